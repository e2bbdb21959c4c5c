"""What clients send: OpenAI's chat and text completions, and vLLM's extras, as records that refuse what is not meant.

Knows: fields, their kinds, and what each becomes in ``SamplingParams``. Does not know: how anything is answered.

``null`` is a field that was not sent. A field that real clients send and that changes nothing here is taken at its
default (``_HARMLESS``); every other unknown or unmet field is refused by name. None is ignored in silence.
"""

from __future__ import annotations

import json
import re
from dataclasses import fields
from difflib import get_close_matches
from typing import Annotated, Any, Literal, TypeAlias, get_args, get_type_hints

from pydantic import (
    BeforeValidator,
    ConfigDict,
    Field,
    StrictBool,
    TypeAdapter,
    ValidationError,
    create_model,
    model_validator,
)

from ..sampling import MAX_LOGPROBS, MAX_N, MAX_STOP_STRINGS, SamplingParams, Verification
from .errors import Refused
from .messages import Message, Parts, TemplateOptions
from .records import Count, Many, Number, Record
from .structured import ResponseFormat, StructuredOutputs
from .tools import MAX_TOOLS, Tool, ToolChoice

__all__ = ["ChatRequest", "CompletionRequest", "Detokenize", "Message", "Tokenize"]

MAX_PROMPTS = 64
MAX_MESSAGES = 4096
MAX_BIASES = MAX_STOP_IDS = 16384


def _or_one_wrong(values: Any) -> Any:
    """A record of numbers as it is; or one value of it that is none, which is enough to refuse it."""
    if isinstance(values, dict) and len(values) > MAX_BIASES:
        raise Refused(400, f"logit_bias: must hold at most {MAX_BIASES}", "logit_bias")
    for name, value in values.items() if isinstance(values, dict) else ():
        try:
            _NUMBERS.validate_python(value)
        except ValidationError:
            return {name: value}
    return values


_TOKEN_ID = re.compile("0|[1-9][0-9]{0,18}")  # one spelling each, so that none is said twice
_NUMBERS = TypeAdapter[float](Number)
_Biases: TypeAlias = Annotated[dict[str, Number], BeforeValidator(_or_one_wrong)]

#: fields that clients send, and the values (besides null) at which they ask for nothing
_HARMLESS: dict[str, tuple[Any, ...]] = {
    "user": (),  # any text
    "metadata": (),  # any record
    "store": (False,),
    "service_tier": ("auto", "default"),
    "parallel_tool_calls": (True, False),
    "prompt_cache_key": (),
    "safety_identifier": (),
    "reasoning_effort": ("none",),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "web_search_options": (),
    "verbosity": ("medium",),
    # vLLM's
    "use_beam_search": (False,),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "length_penalty": (1.0, 1),
    "priority": (0,),
    "spaces_between_special_tokens": (True,),
    "detokenize": (True,),
    "include_stop_str_in_output": (False,),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "documents": ([],),
    "bad_words": ([],),
    "echo": (False,),  # of a chat
    "prompt_cache_retention": ("in_memory", "in-memory"),  # OpenAI's
}
_ANYTHING = ("user", "metadata", "prompt_cache_key", "safety_identifier")
#: llama.cpp's ways to a structured answer
_STRUCTURED = {"grammar": "structured_outputs.grammar (in Lark's notation)", "json_schema": "response_format"}
#: sentences about fields of vLLM's that are not here
_WHY_NOT = {
    "chat_template": "the server runs no chat template but the model's own (chat_template_kwargs sets what it asks for)"
}
#: what other servers and libraries call a field
_CALLED = {
    "max_completion_tokens": "max_tokens",
    "max_new_tokens": "max_tokens",
    "max_length": "max_tokens",
    "n_predict": "max_tokens",
    "num_predict": "max_tokens",
    "repeat_penalty": "repetition_penalty",
    "stop_sequences": "stop",
}


def _here(name: str) -> str:
    return f"; here it is {_CALLED[name]}" if name in _CALLED else ""


def _asks_for_nothing(name: str, value: Any) -> bool:
    return any(type(value) is type(harmless) and value == harmless for harmless in _HARMLESS[name])


def _unmet(name: str) -> str:
    """A sentence about a field that was sent with a value that asks for something."""
    taken = [json.dumps(value) for value in _HARMLESS[name] if value != []]
    return f"only {' or '.join(taken)} is supported" if taken else "is not supported"


class StreamOptions(Record):
    include_usage: StrictBool | None = None
    continuous_usage_stats: StrictBool | None = None  # vLLM's: in every chunk what was used so far
    include_obfuscation: StrictBool | None = None  # padding against eavesdroppers: none is sent


class Prediction(Record):
    type: Literal["content"]
    content: str | Parts

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


def _with_harmless(schema: dict[str, Any]) -> None:
    """Put fields that are taken out before anything is checked (``_HARMLESS``) into the OpenAPI document."""
    for name, values in _HARMLESS.items():
        schema["properties"].setdefault(name, {} if name in _ANYTHING else {"enum": [None, *values]})


def _one_value_each() -> dict[str, Any]:
    """Sampling parameters that are one number or one flag, under their own names."""
    here = {float: Number, int: Count, bool: StrictBool}
    found = {}
    for name, kind in get_type_hints(SamplingParams).items():
        [first, *others] = get_args(kind) or (kind,)
        if first in here and set(others) <= {type(None)}:
            found[name] = (here[first] | None, None)
    return found


_Parameters: Any = create_model("_Parameters", __base__=Record, **_one_value_each())


class _Sampled(_Parameters):  # type: ignore[misc]  # its fields are those of SamplingParams
    """What both kinds of completions share: sampling parameters, and how the answer is sent. Here are those that have
    another shape or other bounds than one value of ``SamplingParams``."""

    model_config = ConfigDict(json_schema_extra=_with_harmless)

    model: str | None = None
    stream: StrictBool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[Count, Field(ge=1, le=MAX_N)] | None = None
    stop: str | Annotated[Many[str], Field(max_length=MAX_STOP_STRINGS)] | None = None
    logit_bias: _Biases | None = None
    stop_token_ids: Annotated[Many[Count], Field(max_length=MAX_STOP_IDS)] | None = None
    prompt_logprobs: Annotated[Count, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    verification: Verification | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None  # vLLM's
    guided_json: str | dict[str, Any] | None = None  # vLLM's, until it was called structured_outputs
    guided_regex: str | None = None
    guided_choice: Many[str] | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None
    statistics: StrictBool | None = None  # of speculation, in the answer
    origins: StrictBool | None = None  # where each token came from, in the stream

    @model_validator(mode="before")
    @classmethod
    def _read(cls, values: Any) -> Any:
        """Take out what changes nothing; refuse what would change something and is not done."""
        if not isinstance(values, dict):
            return values
        kept = {}
        for name, value in values.items():
            if name not in _HARMLESS or name in cls.model_fields:
                kept[name] = value
            elif value is not None and name not in _ANYTHING and not _asks_for_nothing(name, value):
                elsewhere = name in CompletionRequest.model_fields
                raise Refused(400, f"{name}: {cls._unknown(name) if elsewhere else _unmet(name)}; leave it out", name)
            if name in kept and name not in cls.model_fields:
                raise Refused(400, f"{name:.200}: {cls._unknown(name)}", name)
        return kept

    @classmethod
    def _unknown(cls, name: str) -> str:
        """A sentence about a field that there is not, and what may have been meant."""
        if name in _WHY_NOT:
            return _WHY_NOT[name]
        if name in _STRUCTURED:
            return f"is not a field that this server knows; use {_STRUCTURED[name]}"
        for path, other in (("/v1/chat/completions", ChatRequest), ("/v1/completions", CompletionRequest)):
            if name in other.model_fields:
                return f"is a field of {path}, not of this route" + _here(name)
        if name in _CALLED:
            return "is not a field that this server knows" + _here(name)
        near = get_close_matches(name[:64], cls.model_fields, n=1, cutoff=0.8)
        return "is not a field that this server knows" + (f"; did you mean {near[0]}?" if near else "")

    def _params(self, max_tokens: int | None, logprobs: int | None, **more: Any) -> SamplingParams:
        apart = ("max_tokens", "logprobs", "logit_bias", "structured")
        given = {field.name: getattr(self, field.name) for field in fields(SamplingParams) if field.name not in apart}
        bias = None
        if self.logit_bias is not None:
            if not all(map(_TOKEN_ID.fullmatch, self.logit_bias)):
                raise Refused(400, "logit_bias: its keys are token ids, as text", "logit_bias")
            bias = {int(token): value for token, value in self.logit_bias.items()}
        kept = {name: value for name, value in (given | more).items() if value is not None}
        return SamplingParams(max_tokens=max_tokens, logprobs=logprobs, logit_bias=bias, **kept)

    @property
    def wants_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def wants_running_usage(self) -> bool:
        return self.wants_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)

    @model_validator(mode="after")
    def _options_of_a_stream(self) -> _Sampled:
        if self.stream_options is not None and not self.stream:
            raise Refused(400, "stream_options: is only for streams", "stream_options")
        if self.origins and not self.stream:
            raise Refused(400, "origins: is only for streams", "origins")
        if self.prompt_logprobs is not None and self.stream:
            raise Refused(400, "prompt_logprobs: is not for streams (a completion has echo)", "prompt_logprobs")
        return self


class ChatRequest(_Sampled):
    messages: Annotated[Many[Message], Field(min_length=1, max_length=MAX_MESSAGES)]
    chat_template_kwargs: TemplateOptions | None = None  # vLLM's
    max_completion_tokens: Count | None = None
    logprobs: StrictBool | None = None
    top_logprobs: Annotated[Count, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    prediction: Prediction | None = None
    tools: Annotated[Many[Tool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: StrictBool | None = None

    def params(self) -> SamplingParams:
        if self.max_tokens is not None and self.max_completion_tokens not in (None, self.max_tokens):
            raise Refused(400, "max_completion_tokens: is another number than max_tokens", "max_completion_tokens")
        if self.top_logprobs is not None and not self.logprobs:
            raise Refused(400, "top_logprobs: needs logprobs", "top_logprobs")
        most = self.max_tokens if self.max_tokens is not None else self.max_completion_tokens
        if most is not None and most < 1:
            field = "max_tokens" if self.max_tokens is not None else "max_completion_tokens"
            raise Refused(400, f"{field}: must be at least 1; without it, a chat may fill the context", field)
        return self._params(most, (self.top_logprobs or 0) if self.logprobs else None)

    def conversation(self) -> list[dict[str, Any]]:
        return [message.as_dict() for message in self.messages]


class CompletionRequest(_Sampled):
    prompt: str | Many[Count] | Many[str | Many[Count]]
    logprobs: Annotated[Count, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    prediction: Prediction | None = None
    echo: StrictBool | None = None
    best_of: Annotated[Count, Field(ge=1, le=MAX_N)] | None = None
    suffix: str | None = None

    def params(self) -> SamplingParams:
        n = self.n or 1
        most, runs, logprobs = self.max_tokens, self.best_of or n, self.logprobs
        if runs < n:
            raise Refused(400, f"best_of: must be at least n ({n}), not {runs}", "best_of")
        if runs > n:  # the best are found by their log-probabilities, at the end
            if self.stream:
                raise Refused(400, "best_of: cannot be more than n in a stream", "best_of")
            logprobs = logprobs or 0
        if self.suffix and self.echo:
            raise Refused(400, "echo: cannot be used with suffix", "echo")
        asked = (self.prompt_logprobs, self.logprobs if self.echo else None)
        of_prompt = max((k for k in asked if k is not None), default=None)
        return self._params(16 if most is None else most, logprobs, n=runs, prompt_logprobs=of_prompt)

    def prompts(self) -> list[str | list[int]]:
        """Each one as text or token ids."""
        prompt: Any = self.prompt
        if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)):
            return [prompt]
        if not 1 <= len(prompt) <= MAX_PROMPTS:
            raise Refused(400, f"prompt: holds {len(prompt)} prompts; 1 to {MAX_PROMPTS} can be sent at once", "prompt")
        return list(prompt)


class Tokenize(Record):
    model: str | None = None
    prompt: str | None = None
    messages: Annotated[Many[Message], Field(min_length=1, max_length=MAX_MESSAGES)] | None = None
    add_special_tokens: StrictBool | None = None
    chat_template_kwargs: TemplateOptions | None = None

    @model_validator(mode="after")
    def _one_of_two(self) -> Tokenize:
        if (self.prompt is None) == (self.messages is None):
            raise Refused(400, "prompt: give either prompt or messages", "prompt")
        if self.chat_template_kwargs and self.messages is None:
            raise Refused(400, "chat_template_kwargs: is for messages", "chat_template_kwargs")
        return self


class Detokenize(Record):
    model: str | None = None
    tokens: Many[Count]
