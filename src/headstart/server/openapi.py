"""The OpenAPI document: what each route takes, gives, and refuses.

Knows: the shapes of answers and errors, for programs that read the document. Does not know: how they are made
(``answers``, ``errors``); a test holds the one against the other.
"""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

__all__ = ["document"]

Schema = dict[str, Any]

_TEXT: Schema = {"type": "string"}
_COUNT: Schema = {"type": "integer", "minimum": 0}
_NUMBER: Schema = {"type": "number"}


def _record(required: dict[str, Schema], **more: Schema) -> Schema:
    return {"type": "object", "properties": required | more, "required": list(required)}


def _list(of: Schema) -> Schema:
    return {"type": "array", "items": of}


def _maybe(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def _ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


_END = _maybe({"type": "string", "enum": ["stop", "length", "tool_calls"]})
_HEAD: dict[str, Schema] = {"id": _TEXT, "object": _TEXT, "created": _COUNT, "model": _TEXT}
_USAGE = _record(
    {"prompt_tokens": _COUNT, "completion_tokens": _COUNT, "total_tokens": _COUNT},
    prompt_tokens_details={"type": "object"},
    completion_tokens_details={"type": "object"},
)
_CHOICE: dict[str, Schema] = {"index": _COUNT, "logprobs": _maybe({"type": "object"}), "finish_reason": _END}
_CALL = _record({"id": _TEXT, "type": _TEXT, "function": _record({"name": _TEXT, "arguments": _TEXT})})
_MESSAGE = _record(
    {"role": _TEXT, "content": _maybe(_TEXT)},
    refusal={"type": "null"},
    reasoning=_TEXT,
    reasoning_content=_TEXT,
    tool_calls=_list(_CALL),
)
_SPENT: dict[str, Schema] = {"metrics": {"type": "object"}}

SCHEMAS: dict[str, Schema] = {
    "Error": _record(
        {"error": _record({"message": _TEXT, "type": _TEXT, "param": _maybe(_TEXT), "code": _maybe(_TEXT)})}
    ),
    "ChatCompletion": _record(
        _HEAD | {"choices": _list(_record(_CHOICE | {"message": _MESSAGE})), "usage": _USAGE}, **_SPENT
    ),
    "Completion": _record(_HEAD | {"choices": _list(_record(_CHOICE | {"text": _TEXT})), "usage": _USAGE}, **_SPENT),
    "Model": _record(
        {"id": _TEXT, "object": _TEXT, "created": _COUNT, "owned_by": _TEXT, "max_model_len": {"type": "integer"}}
    ),
    "Models": _record({"object": _TEXT, "data": _list(_ref("Model"))}),
    "Tokens": _record({"tokens": _list(_COUNT), "count": _COUNT, "max_model_len": _COUNT}),
    "Text": _record({"prompt": _TEXT}),
    "Version": _record({"version": _TEXT}),
}
_JSON = "application/json"
_PLAIN = "text/plain"
_STREAM = "text/event-stream"
#: what a route gives when all is well: the kind of content and its schema
_GIVES: dict[str, dict[str, Schema]] = {
    "/v1/chat/completions": {_JSON: _ref("ChatCompletion"), _STREAM: _TEXT},
    "/v1/completions": {_JSON: _ref("Completion"), _STREAM: _TEXT},
    "/v1/models": {_JSON: _ref("Models")},
    "/v1/models/{model}": {_JSON: _ref("Model")},
    "/tokenize": {_JSON: _ref("Tokens")},
    "/detokenize": {_JSON: _ref("Text")},
    "/health": {_PLAIN: _TEXT},
    "/ready": {_PLAIN: _TEXT},
    "/metrics": {_PLAIN: _TEXT},
    "/version": {_JSON: _ref("Version")},
}
_ERRORS = {
    400: "A field is wrong (`param` names it), the body is not JSON, or the Host header is not this server's.",
    401: "The API key is missing or wrong.",
    403: "A web page from elsewhere asks.",
    404: "There is no such model.",
    413: "The body is too large.",
    429: "The line is full; `Retry-After` says when to come back.",
    431: "The headers are too large.",
    500: "Something went wrong inside the server.",
    503: "The server shuts down, or its engine died.",
}
_EVERYWHERE = (400, 401, 403, 431, 500)
_WITH_BODY = (404, 413)
_COMPUTING = (429, 503)


def document(app: FastAPI) -> Schema:
    """The document, made once."""
    if app.openapi_schema is None:
        found = get_openapi(title=app.title, version=app.version, routes=app.routes)
        schemas = found.setdefault("components", {}).setdefault("schemas", {})
        schemas.update(SCHEMAS)
        for path, methods in found["paths"].items():
            for method, operation in methods.items():
                operation["responses"] = _responses(path, body=method == "post")
        for unused in ("HTTPValidationError", "ValidationError"):  # FastAPI's own; ours have another shape
            schemas.pop(unused, None)
        app.openapi_schema = found
    return app.openapi_schema


def _responses(path: str, *, body: bool) -> Schema:
    gives = {kind: {"schema": schema} for kind, schema in _GIVES[path].items()}
    found: Schema = {"200": {"description": "Well.", "content": gives}}
    codes = [*_EVERYWHERE, *(_WITH_BODY if body else ()), *(_COMPUTING if path.endswith("completions") else ())]
    if "{" in path:
        codes.append(404)
    for code in sorted(codes):
        refused = {"description": _ERRORS[code], "content": {_JSON: {"schema": _ref("Error")}}}
        if code in (429, 503):
            refused["headers"] = {"Retry-After": {"schema": _TEXT}}
        found[str(code)] = refused
    if path in ("/health", "/ready"):
        found["503"] = {"description": "Not now.", "content": {_PLAIN: {"schema": _TEXT}}}
    return found
