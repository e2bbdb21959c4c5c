"""``headstart chat``: talk to a model in the terminal.

Knows: turns, and what Ctrl-C means when. Does not know: how an answer is made, or how lines are typed.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import FrameType
from typing import Annotated, Any

from ..errors import GenerationFailed, InvalidParameter, PromptTooLong
from ..types import SamplingParams
from .conversation import Conversation, Ended
from .lines import Lines
from .options import MaxTokens, ModelOptions, SamplingOptions, Temperature, TopP, section
from .screen import Answer, closing_line, legend, note, what_runs
from .structured import StructuredOptions

__all__ = ["ChatSampling", "chat"]

_LEAST_ROOM = 16  # tokens; a shorter answer is none


@dataclass(frozen=True)
class ChatSampling(SamplingOptions):
    """A chat is livelier than the answer to a single prompt, and longer."""

    max_tokens: MaxTokens = 512
    temperature: Temperature = 0.7
    top_p: TopP = 0.95


def chat(
    *,
    system: Annotated[str | None, section("Conversation")(of="TEXT", help="The system message.")] = None,
    model: ModelOptions,
    sampling: ChatSampling,
    shape: StructuredOptions,
) -> None:
    """Talk to a model.

    /help lists what can be typed besides messages. Ctrl-C stops an answer, Ctrl-D ends. Where standard input is no
    terminal, each line is a message, and only the answers go to standard output.
    """
    params = sampling.params(structured=shape.structured())
    llm = model.open()
    if not llm.has_chat_template:
        raise InvalidParameter("model", "has no chat template; 'headstart generate' continues text as it is")
    talk = _Talk(llm, params, Conversation(system))
    note(what_runs(llm))
    if talk.lines.typed:
        note("/help lists the commands; Ctrl-C stops an answer, Ctrl-D ends")
    if talk.out.coloured:
        note(legend())
    while True:
        try:
            talk.turn(talk.next_line())
        except Ended:
            return


class _Talk:
    """A person and a model, turn by turn."""

    def __init__(self, llm: Any, params: SamplingParams, conversation: Conversation) -> None:
        self._llm, self._params, self._said = llm, params, conversation
        coloured = Answer().coloured
        self.lines = Lines(note, colour=coloured)
        self.out = Answer(plain=not self.lines.typed)

    def next_line(self) -> str:
        """What is said next. Ctrl-C drops the line; twice in a row it ends the chat."""
        warned = False
        while True:
            try:
                return self.lines.message()
            except EOFError:
                self.lines.leave()
                raise Ended from None
            except KeyboardInterrupt:
                if not self.lines.typed:
                    raise
                self.lines.leave()
                if warned:
                    raise Ended from None
                note("Ctrl-C again or Ctrl-D ends the chat; /help lists the commands")
                warned = True

    def turn(self, line: str) -> None:
        """Carry out a command, or answer a message. Whatever goes wrong, the conversation before it stays."""
        if line.startswith("/"):
            note(self._said.command(line))
            return
        if not line.strip():
            return
        self._said.ask(line.strip())
        try:
            self._answer()
        except PromptTooLong as error:
            note(f"the conversation has grown too long ({error}); /reset starts anew")
        except (GenerationFailed, InvalidParameter) as error:
            note(f"error: {error}; your message is taken back")
        except KeyboardInterrupt:  # in the moment before or after the answer
            if not self.lines.typed:
                raise
        finally:
            self._said.take_back()

    def _answer(self) -> None:
        stream, written = self._stream(), 0
        with stream, _stoppable(on=self.lines.typed) as stopped:
            try:
                for piece in stream:
                    self.out.write(piece)
                    written += len(piece.text)
                    if stopped():
                        break
            except KeyboardInterrupt:
                if not self.lines.typed:
                    self.out.end_line()
                    raise
            except GenerationFailed:
                self.out.end_line()
                raise
        completion = stream.completion()
        self.out.text(completion.text[written:])  # what might have become a stop string
        if completion.finish_reason == "abort" and not completion.text.strip():
            self.out.end_line()
            note("stopped before the answer began; your message is taken back")
            return
        self.out.end()
        self._said.answer(completion.text)
        if completion.finish_reason == "abort":
            note("stopped; what was written stays in the conversation")
        model = self._llm.draft_report is not None
        note(closing_line(completion.stats, self._llm.engine.inactive_reason, model=model))

    def _stream(self) -> Any:
        """The answer, cut short where the context ends."""
        try:
            return self._llm.stream(self._said.messages, self._params)
        except PromptTooLong as error:
            if error.room < _LEAST_ROOM:
                raise
            return self._llm.stream(self._said.messages, replace(self._params, max_tokens=error.room))


@contextmanager
def _stoppable(*, on: bool) -> Iterator[Callable[[], bool]]:
    """Ctrl-C is noted, so that the answer stops between two tokens; a second one does not wait for that."""
    pressed: list[bool] = []

    def press(number: int, frame: FrameType | None) -> None:
        if pressed:
            raise KeyboardInterrupt
        pressed.append(True)

    before = signal.getsignal(signal.SIGINT)
    if not on or threading.current_thread() is not threading.main_thread() or not callable(before):
        yield lambda: False
        return
    signal.signal(signal.SIGINT, press)
    try:
        yield lambda: bool(pressed)
    finally:
        signal.signal(signal.SIGINT, before)
