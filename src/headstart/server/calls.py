"""One call of OpenAI's API, from what was sent to what is answered, without HTTP: the server and batch jobs share it.

Knows: which requests a call is made of, and how their answers become one. Does not know: who asks, or what becomes of
an answer that nobody reads.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

from ..api import LLM
from ..async_api import AsyncLLM
from ..engine.inbox import BUFFER, Reader, together
from ..errors import InvalidParameter
from ..structured import Structured
from ..types import Choice, Completion, Piece, SamplingParams
from .answers import Chats, Prompt, Texts, Writer
from .errors import Refused, described
from .figures import Spelling
from .reasoning import Reasoning
from .replies import Reply, plain
from .schemas import ChatRequest, CompletionRequest
from .structured import Wanted
from .tool_formats import FORMATS, Grammar, ToolFormat, format_of, json_rule
from .tools import Toolbox

__all__ = ["Brought", "Call", "Calls"]

#: chunks of a reader's number and pieces
Brought: TypeAlias = Callable[[int, Sequence[Piece]], Sequence[dict[str, Any]]]
Pump: TypeAlias = Callable[[Brought], Awaitable[None]]


@dataclass(frozen=True)
class Call:
    """One call: what is asked of the engine, and who writes the answer."""

    writer: Writer
    prompts: Sequence[Any]  # text, token ids or a conversation, each
    params: SamplingParams
    prediction: str | None
    stream: bool
    usage: bool  # at the end of a stream
    running_usage: bool = False  # in every chunk what was used so far
    wanted: Wanted | None = None  # what the client said of the answer's shape

    async def submit(self, llm: AsyncLLM, *, wait: bool = False, client: str | None = None) -> list[Reader]:
        """All of its requests, or none: ``EngineBusy`` where the line is full; ``wait``: for places in it. ``client``:
        who asks."""
        readers: list[Reader] = []
        buffer = BUFFER if self.stream else None  # whole answers are read one after the other
        try:
            for i, prompt in enumerate(self.prompts):
                name = f"{self.writer.id}-{i}"
                submit = partial(llm.submit, prompt, self.params, id=name, prediction=self.prediction)
                with _told_of(self.writer.prompt_field):
                    readers.append(await submit(buffer=buffer, wait=wait, client=client))
        except BaseException as error:
            _close(readers)
            if isinstance(error, InvalidParameter) and error.field.startswith("structured"):
                raise self._misshapen(error) from None
            raise
        return readers

    def _misshapen(self, error: InvalidParameter) -> Refused:
        """What was asked of the answer's shape cannot be: in the client's words."""
        if self.wanted is not None:
            return self.wanted.renamed(error)
        return _of_tools(error)

    def _failed(self, choice: Choice) -> Refused:
        """What became of an answer that failed. Where its shape is at fault, to ask again would be of no use."""
        why = choice.error or "the request failed"
        if choice.error_field is None:
            return Refused(500, why, code="generation_failed")
        field = "tools" if self.wanted is None else self.wanted.named(choice.error_field)
        return Refused(400, f"{field}: {why}", field, "generation_failed")

    def _answers(self, readers: Sequence[Reader]) -> list[Completion]:
        """An answer that did not come to its own end is an error, whatever was written of it."""
        found = [reader.completion() for reader in readers]
        for choice in (choice for answer in found for choice in answer.choices):
            if choice.finish_reason == "error" or (choice.finish_reason == "abort" and choice.error):
                raise self._failed(choice)
            if choice.finish_reason == "abort":
                raise Refused(503, "the request was stopped: the server is shutting down", code="shutting_down")
        return found

    async def whole(self, readers: Sequence[Reader]) -> dict[str, Any]:
        """The answer, when all of it is written. Cancelled, it stops what was asked for."""
        try:
            for reader in readers:
                await reader.finish()
        finally:
            _close(readers)
        answers = self._answers(readers)
        if self.params.prompt_logprobs is None:
            return self.writer.whole(answers)
        return await asyncio.to_thread(self.writer.whole, answers)  # a prompt may have thousands of tokens to spell

    async def chunks(self, readers: Sequence[Reader], pump: Pump | None = None) -> AsyncGenerator[dict[str, Any], None]:
        """The same in pieces, round by round. Closed early, it stops what was asked for. ``pump``: whoever writes what
        rounds bring as soon as it comes, past this generator."""
        writer, rounds = self.writer, _Rounds(self, readers)
        try:
            for chunk in writer.first(writer.n * len(readers)):
                yield rounds.with_usage(chunk)
            if writer.echo is not None:
                async for number, pieces in together(readers):
                    for chunk in await asyncio.to_thread(rounds.brought, number, pieces):  # see ``whole``
                        yield chunk
            elif pump is not None:
                await pump(rounds.brought)
            else:
                async for number, pieces in together(readers):
                    for chunk in rounds.brought(number, pieces):
                        yield chunk
            try:
                answers = self._answers(readers)
            except Refused:
                for chunk in rounds.kept:
                    yield chunk
                raise
            for chunk in rounds.kept:
                yield chunk | writer.metrics(answers)
            if self.usage:
                yield writer.last(answers)
        finally:
            _close(readers)


class _Rounds:
    """What the rounds of one call brought so far.

    ``kept``: the last chunk of all choices, where statistics belong into it. They are complete a moment later."""

    def __init__(self, call: Call, readers: Sequence[Reader]) -> None:
        self._call, self._readers, self._written = call, readers, 0
        self._open = call.writer.n * len(readers)  # choices that have not ended
        self.kept: list[dict[str, Any]] = []
        self._prompts = [Prompt(reader.prompt_token_ids, None) for reader in readers]

    def brought(self, number: int, pieces: Sequence[Piece]) -> list[dict[str, Any]]:
        """The chunks for what came to one reader."""
        writer, prompt = self._call.writer, self._prompts[number]
        if writer.echo is not None:
            prompt = replace(prompt, logprobs=self._readers[number].prompt_logprobs)
        found = writer.chunks(number, pieces, prompt)
        if writer.statistics and not self._call.usage:  # a chunk without choices is for those who asked for usage
            self._open -= sum(piece.finish_reason is not None for piece in pieces)
            if self._open <= 0:
                self.kept, found = found[-1:], found[:-1]
        if not self._call.running_usage:
            return found
        self._written += sum(piece.token_id is not None for piece in pieces)
        return [self.with_usage(chunk) for chunk in found]

    def with_usage(self, chunk: dict[str, Any]) -> dict[str, Any]:
        if not self._call.running_usage:
            return chunk
        read = sum(len(reader.prompt_token_ids) for reader in self._readers)
        used = {"prompt_tokens": read, "completion_tokens": self._written, "total_tokens": read + self._written}
        return chunk | {"usage": used}


class Calls:
    """Makes calls out of what clients send. ``tools``: how the model writes tool calls; "auto": by its template."""

    def __init__(self, llm: LLM, model: str, *, statistics: bool = False, tools: str = "auto") -> None:
        self._model, self._statistics = model, statistics
        self._codec, self._spelling = llm.codec, Spelling.of(llm.codec)
        self._longest = llm.engine.parts.runner.max_len
        self._reasoning = Reasoning.of(llm.codec)
        self._format = format_of(llm.codec.template or "") if tools == "auto" else FORMATS[tools]

    def check_model(self, name: str | None) -> None:
        if name is not None and name != self._model:
            message = f"there is no model {name!r:.100} here, but {self._model!r} (--served-model-name changes that)"
            raise Refused(404, message, "model", "model_not_found")

    def lengthy(self, body: ChatRequest | CompletionRequest) -> bool:
        """Are there texts to tokenize, ids to spell or shapes to read before the call is made? Then not on an event
        loop."""
        if Wanted.of(body) is not None:
            return True
        return (
            bool(body.suffix or body.echo)
            if isinstance(body, CompletionRequest)
            else bool(body.tools or body.chat_template_kwargs)
        )

    def chat(self, body: ChatRequest) -> Call:
        """See ``lengthy``."""
        self.check_model(body.model)
        with _told_of(Chats.prompt_field):
            return self._chat(body)

    def _chat(self, body: ChatRequest) -> Call:
        box = Toolbox.of(body.tools, body.tool_choice, body.parallel_tool_calls)
        wanted, params, writing = Wanted.of(body), body.params(), self._writing("chatcmpl", body)
        prompt: Any = (messages := body.conversation())
        encode = partial(self._codec.encode_chat, options=body.chat_template_kwargs, most=self._longest)
        format = None if box is None else self._tool_format()
        if format is not None and box is not None:
            prompt = encode(prompt, tools=[tool.as_dict() for tool in box.shown])
            params = self._held_to_tools(params, format, box, wanted, prompt)
        elif wanted is not None:
            thinking = None
            if self._reasoning.tags is not None:
                prompt = encode(prompt)
                thinking = self._reasoning.thinking(prompt)
            params = replace(params, structured=wanted.structured(thinking, self._codec.added_id))
        if body.chat_template_kwargs and prompt is messages:
            prompt = encode(prompt)
        if format is not None or self._reasoning.tags is not None:
            read, names = (plain, frozenset[str]()) if format is None or box is None else (format.read, box.names)
            only = box is not None and box.required
            writing["reply"] = lambda ids: Reply(read, names, self._reasoning.thinking(ids), required=only)
            writing |= {"reasoning": self._reasoning, "format": format, "named": box is not None and box.named}
            if self._reasoning.special or (format is not None and self._codec.special_id(format.tag) is not None):
                params = replace(params, skip_special_tokens=False)
        writer = Chats(**writing, logprobs=bool(body.logprobs))
        return self._call(writer, [prompt], params, body, wanted if box is None else None)

    def _tool_format(self) -> ToolFormat:
        if not self._codec.takes_tools:
            raise Refused(400, "tools: this model's chat template has no place for tools; leave them out", "tools")
        if self._format is None:
            ways = ", ".join(FORMATS)
            why = f"how this model writes tool calls is not known here; --tool-format says it ({ways})"
            raise Refused(400, f"tools: {why}", "tools")
        return self._format

    def _held_to_tools(
        self, params: SamplingParams, format: ToolFormat, box: Toolbox, wanted: Wanted | None, prompt: list[int]
    ) -> SamplingParams:
        """Calls are written as the model writes them, and their arguments as their tools say."""
        content = None
        if wanted is not None:
            wanted.structured(None, self._codec.added_id)  # its faults are the client's, whatever is called
        if wanted is not None and not box.required:
            if wanted.json is None or not format.tag:
                why = "JSON can" if format.tag else "this model's calls could not be told from it; require a call"
                raise Refused(400, f"{wanted.field}: cannot be used with tools; {why}", wanted.field)
            content = json_rule(wanted.json)
        grammar = Grammar(self._codec.added_id, self._reasoning.thinking(prompt))
        try:
            rules = grammar.calls(format, box, content)
            return replace(params, structured=Structured(grammar=rules, after=grammar.after))
        except InvalidParameter as error:
            raise _of_tools(error) from None

    def complete(self, body: CompletionRequest) -> Call:
        """See ``lengthy``."""
        self.check_model(body.model)
        prompts, params, wanted = body.prompts(), body.params(), Wanted.of(body)
        if wanted is not None:
            params = replace(params, structured=wanted.structured(None, self._codec.added_id))
        if body.suffix:
            prompts, params = self._infilled(prompts, body.suffix, params)
        echo = [self._as_text(prompt) for prompt in prompts] if body.echo else None
        writer = Texts(**self._writing("cmpl", body), logprobs=body.logprobs is not None, echo=echo)
        return self._call(writer, prompts, params, body, wanted)

    def _as_text(self, prompt: str | list[int]) -> str:
        if isinstance(prompt, str):
            return prompt
        self._codec.check_ids("prompt", prompt)  # before they are spelt, which is before the engine sees them
        return self._codec.decode(prompt)

    def _infilled(
        self, prompts: Sequence[str | list[int]], suffix: str, params: SamplingParams
    ) -> tuple[list[str | list[int]], SamplingParams]:
        """Prompts that ask for what stands between them and the suffix; the tokens that end it are stops."""
        infill = self._codec.infill
        for text in (suffix, *(prompt for prompt in prompts if isinstance(prompt, str))):
            self._codec.check_length(text, self._longest)
        found: list[str | list[int]] = [infill.encode(prompt, suffix) for prompt in prompts]
        ends = () if params.ignore_eos else infill.ends
        return found, replace(params, stop_token_ids=(*(params.stop_token_ids or ()), *ends))

    def _writing(self, prefix: str, body: ChatRequest | CompletionRequest) -> dict[str, Any]:
        """What every ``Writer`` is given."""
        return {
            "id": f"{prefix}-{uuid.uuid4().hex}",
            "model": self._model,
            "spelling": self._spelling,
            "n": body.n or 1,
            "prompt_logprobs": body.prompt_logprobs,
            "statistics": self._statistics if body.statistics is None else body.statistics,
            "origins": bool(body.origins),
        }

    def _call(
        self,
        writer: Writer,
        prompts: Sequence[Any],
        params: SamplingParams,
        body: ChatRequest | CompletionRequest,
        wanted: Wanted | None,
    ) -> Call:
        guess = body.prediction.text if body.prediction is not None else None
        usage = body.wants_usage, body.wants_running_usage
        return Call(writer, prompts, params, guess, bool(body.stream), *usage, wanted)


@contextmanager
def _told_of(field: str) -> Iterator[None]:
    """What is wrong with a prompt is told of the field that its client sent it in."""
    try:
        yield
    except InvalidParameter as error:
        if error.field != "prompt" or field == "prompt":
            raise
        said = described(error)
        raise Refused(said.status, f"{field}: the {said.message}", field, said.code) from None


def _of_tools(error: InvalidParameter) -> Refused:
    """What is wrong with the grammar of a request's tools."""
    return Refused(400, f"tools: {str(error).removeprefix(error.field).strip()}", "tools")


def _close(readers: Sequence[Reader]) -> None:
    for reader in readers:
        reader.close()
