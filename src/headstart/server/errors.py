"""Errors as OpenAI's clients expect them: a status, a type, the field that is wrong, a sentence.

Knows: which fault is whose. Does not know: routes.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from ..errors import (
    EngineBusy,
    EngineStopped,
    HeadstartError,
    InvalidParameter,
    MissingExtra,
    ModelRefused,
    PromptTooLong,
)

__all__ = ["REQUEST_ID", "TWO_LENGTHS", "Refused", "body", "described", "install", "misfit"]

log = logging.getLogger(__name__)

REQUEST_ID = "headstart.request_id"  # in a request's scope: by which name its client and the log know it
TWO_LENGTHS = "two_lengths"  # the code of a request of which nobody can be sure where it ends
_KINDS = {"str", "int", "float", "bool"}
_CODES = {413: "body_too_large"}
_WRONG = {  # pydantic's kinds of errors, in the words of JSON
    "model_type": "must be an object",
    "model_attributes_type": "must be an object",
    "dict_type": "must be an object",
    "list_type": "must be a list",
    "string_type": "must be text",
    "bool_type": "must be true or false",
    "int_type": "must be a whole number",
    "float_type": "must be a number",
    "float_parsing": "must be a number",
    "finite_number": "must be a finite number",
    "literal_error": "must be {expected}",
    "less_than_equal": "must be at most {le}",
    "greater_than_equal": "must be at least {ge}",
    "too_short": "must hold at least {min_length}",
    "too_long": "must hold at most {max_length}",
    "missing": "is required",
    "extra_forbidden": "is not a field that this server knows",
}
_SUCH_AS = {  # of fields that are often sent in another shape
    "messages": 'a list of objects such as {"role": "user", "content": "Hello"}',
    "content": 'text, or a list of parts such as {"type": "text", "text": "Hello"} (no images, no audio)',
    "prompt": "text, token ids, or a list of those",
    "prediction": 'an object such as {"type": "content", "content": "the text that is expected"}',
    "stop": "text or a list of texts",
    "tools": 'a list of objects such as {"type": "function", "function": {"name": "add", "parameters": {...}}}',
    "tool_choice": '"none", "auto", "required", or an object such as {"type": "function", "function": {"name": "add"}}',
    "response_format": 'an object such as {"type": "json_object"}',
    "logit_bias": 'an object of token ids and numbers such as {"42": -100}',
}
_LIMITS = (
    "too_long",
    "too_short",
    "less_than_equal",
    "greater_than_equal",
)  # it was read, and is too much or too little
_SHAPE = ("model_type", "model_attributes_type", "dict_type", "list_type")  # not what stands in it, but all of it
_TYPES = {400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class Refused(Exception):
    """A request that is answered with an error. ``field``: what it is about, as the client spelt it; ``retry_after``:
    seconds, for those who may come back."""

    def __init__(
        self, status: int, message: str, field: str | None = None, code: str | None = None, retry_after: int = 1
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.field, self.code = status, message, field, code
        self.retry_after = retry_after


def body(status: int, message: str, field: str | None = None, code: str | None = None) -> dict[str, Any]:
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    param = None if field is None else _sendable(field)
    return {"error": {"message": _sendable(message), "type": kind, "param": param, "code": code}}


def _sendable(text: str) -> str:
    """Half a character, which JSON can spell and UTF-8 cannot, is spelt again."""
    return text.encode("utf-8", "backslashreplace").decode()


def described(error: Exception) -> Refused:
    """Whose fault it is, and what to say."""
    if isinstance(error, Refused):
        return error
    if isinstance(error, PromptTooLong):
        return Refused(400, str(error), error.field, "context_length_exceeded")
    if isinstance(error, InvalidParameter):
        return Refused(400, str(error), error.field)
    if isinstance(error, EngineBusy):
        return Refused(429, str(error), code="queue_full")
    if isinstance(error, EngineStopped):
        return Refused(503, str(error), code="engine_stopped")
    if isinstance(error, MissingExtra):
        return Refused(400, f"this server cannot hold an answer to a shape: {error}")
    if isinstance(error, ModelRefused):  # a chat, of a model that has no template for it
        return Refused(400, str(error), "messages")
    if isinstance(error, HeadstartError):
        return Refused(500, str(error))
    return Refused(500, "something went wrong inside the server; its log says what")


def misfit(errors: Sequence[Any], skip: int = 0) -> Refused:
    """What pydantic found; ``skip``: so many parts of its places are not the body's. The first thing is told; of a
    field that may be one of several things, what is wrong with the one that was meant."""
    error = errors[0]
    place = error["loc"][skip:]
    error = next((e for e in errors if e["loc"][skip:][:1] == place[:1] and e["type"] in _LIMITS), error)
    parts = [str(part) for part in error["loc"][skip:]]
    kinds = [i for i, part in enumerate(parts) if part in _KINDS or "[" in part]  # one of several that may stand there
    parts = parts[: kinds[0]] if kinds else parts
    field = ".".join(parts) or None
    if not parts and isinstance(error.get("input"), bytes):  # read as JSON only where it is said to be
        return Refused(400, "the body must be JSON, sent with the header 'Content-Type: application/json'")
    named = parts
    while named and named[-1].isdigit():  # a place in a list
        named = named[:-1]
    name = named[-1] if named else ""
    limit = error["type"] in _LIMITS
    if name in _SUCH_AS and not limit and (kinds or error["type"] in _SHAPE):
        return Refused(400, f"{'.'.join(named)}: must be {_SUCH_AS[name]}", field)
    said = "has a value of the wrong type" if kinds and not limit else _said(error)
    if name == "logprobs" and error["type"] == "bool_type":
        said += "; top_logprobs says how many"
    return Refused(400, f"{field or 'the body'}: {said}", field)


def answer(error: Refused) -> JSONResponse:
    headers = {"Retry-After": str(error.retry_after)} if error.status in (429, 503) else None
    if error.status == 401:
        headers = {"WWW-Authenticate": "Bearer"}
    if error.code == TWO_LENGTHS:
        headers = {"Connection": "close"}  # what comes behind it may be part of it
    return JSONResponse(body(error.status, error.message, error.field, error.code), error.status, headers)


def install(app: Any) -> None:
    """Have every error of the app said in this way."""

    async def known(request: Request, error: Exception) -> JSONResponse:
        said = described(error)
        if said.status == 500:
            log.error("request %s failed", request.scope.get(REQUEST_ID), exc_info=error)
        return answer(said)

    async def invalid(_: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)
        return answer(misfit(error.errors(), skip=1))

    async def http(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        path = f"{request.url.path!r:.200}"
        if error.status_code == 404:
            return answer(Refused(404, _no_route(request), code="not_found"))
        if error.status_code == 405:
            refused = answer(Refused(405, f"{path} does not take {request.method:.20}", code="method_not_allowed"))
            refused.headers["Allow"] = (error.headers or {}).get("Allow", "GET, POST")
            return refused
        return answer(Refused(error.status_code, str(error.detail), code=_CODES.get(error.status_code)))

    for kind in (Refused, HeadstartError):
        app.add_exception_handler(kind, known)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(HTTPException, http)


def _said(error: dict[str, Any]) -> str:
    """One of pydantic's errors as a sentence. What was sent is not repeated: it may be megabytes, or secret."""
    if error["type"] in _WRONG:
        return _WRONG[error["type"]].format(**error.get("ctx", {}))
    message = str(error["msg"])
    return message[:1].lower() + message[1:]


def _no_route(request: Request) -> str:
    """A sentence that helps those whose base URL has /v1 once too seldom or too often."""
    path, known = request.url.path, {getattr(route, "path", None) for route in request.app.routes}
    for meant in (f"/v1{path}", path.removeprefix("/v1")):
        if meant != path and meant in known:
            why = "the base URL of OpenAI's clients ends in /v1"
            if meant in path:
                why = "/v1 stands there twice" if meant.startswith("/v1") else "that route is not below /v1"
            return f"there is no route {path!r:.200} here, but {meant}: {why}"
    return f"there is no route {request.method:.20} {path!r:.200} here; GET /openapi.json lists those that there are"
