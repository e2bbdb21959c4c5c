"""The mutable state of one running choice, from prompt to last token.

Knows: what was committed, why it ended, and what goes out to the reader. Does not know: rows, models, batches.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from typing import Any, NoReturn, Protocol

from ..maths.asks import Asks, asks_of
from ..maths.noise import derive
from ..types import Choice, Constraint, FinishReason, Origin, Piece, Request, SamplingParams, TokenLogprob
from .stats import Tally

__all__ = ["Committed", "Sequence", "TextSink"]


class TextSink(Protocol):
    """Turns committed ids into text, and notices stop strings. ``machine.text.TextStream`` is one."""

    def push(self, token_id: int, *, check_stop: bool = True) -> tuple[str, bool]: ...
    def finish(self) -> str: ...


class Committed(list[int]):
    """Prompt and committed output, in order. Reads as any list does; slices and copies are plain lists of their own.

    Drafters are handed the live list, because a copy of a long text in every round would cost more than many a draft.
    They must not change it: the target's cache and the text that goes out are counted by it. So the list itself says
    no.
    """

    def take(self, token: int) -> None:
        """The engine's way to add one."""
        super().append(token)

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise TypeError("the tokens of a view are only to be read; take a copy, list(view.tokens), to change it")

    append = extend = insert = pop = remove = clear = sort = reverse = _refuse
    __setitem__ = __delitem__ = __iadd__ = __imul__ = _refuse

    def __reduce_ex__(self, protocol: Any) -> tuple[type[list[int]], tuple[list[int]]]:
        return list, (list(self),)


class Sequence:
    """One of the n choices of a request while it runs."""

    def __init__(
        self, request: Request, index: int, seed: int, *, eos: Iterable[int], text: TextSink | None, limit: int
    ) -> None:
        """``limit``: the most tokens prompt and answer may have together; ``text`` None: ids only."""
        self.request = request
        self.index = index
        self.id = f"{request.id}/{index}"
        self.seed = derive(seed, index) if index else seed
        self.tokens = Committed(request.prompt)
        self.prompt_length = len(request.prompt)
        self.params: SamplingParams = request.params
        self.prediction = request.prediction
        # Ids that end the text, and that ``min_tokens`` therefore holds back.
        # A grammar lets the eos tokens come where a text may end, and nowhere else: they end it.
        ignored = self.params.ignore_eos and request.grammar is None
        self.ending_ids = frozenset(self.params.stop_token_ids or ()).union(() if ignored else eos)
        self.constraint: Constraint | None = None
        if request.grammar is not None:
            self.constraint = request.grammar.begin(endings=self.ending_ids, min_tokens=self.params.min_tokens)
        self.finish_reason: FinishReason | None = None
        self.error: str | None = None
        self.error_field: str | None = None  # what of the request is at fault
        self.settled = False  # it has ended, and the engine holds nothing for it any more
        self.dropped = False  # nobody waits for it: it ends before the next step
        self.torn = False  # tokens are being taken in; stays true only if that was interrupted
        self.pieces: deque[Piece] = deque()
        self.tally = Tally(prompt_tokens=self.prompt_length)
        self._asks = asks_of(self.params)
        self._limit = limit
        self._sink = text
        self._texts: list[str] = []
        self._origins: list[Origin] = []
        self._logprobs: list[TokenLogprob] = []
        #: of the prompt's tokens so far, the first of which has none; None: not asked for, or of another choice
        self.prompt_logprobs: list[TokenLogprob | None] | None = None
        if self.params.prompt_logprobs is not None and not index:
            self.prompt_logprobs = [None]

    # -- what the round asks

    @property
    def output_length(self) -> int:
        return len(self.tokens) - self.prompt_length

    @property
    def remaining(self) -> int:
        """Tokens that may still be emitted."""
        return self._limit - len(self.tokens)

    @property
    def scored_until(self) -> int:
        """Prompt tokens before this place are read with the logits of each (``scoring``); 0: none is, or all were."""
        if self.prompt_logprobs is None or len(self.prompt_logprobs) == self.prompt_length:
            return 0
        return self.prompt_length if self.remaining <= 0 else self.prompt_length - 1

    @property
    def reusable(self) -> Seq[int]:
        """The beginning that other rows may share with it, and one token more. Where the prompt's log-probabilities are
        still to come, the tokens they follow from have to be read here."""
        return self.tokens if not self.scored_until else self.tokens[: len(self.prompt_logprobs or ())]

    @property
    def asks(self) -> Asks:
        """What its settings ask for now (see ``maths.asks``): ``min_tokens`` only until they are out."""
        if "min_tokens" in self._asks and self.output_length >= self.params.min_tokens:
            self._asks -= {"min_tokens"}
        return self._asks

    @property
    def held_back(self) -> frozenset[int]:
        """Ids that ``min_tokens`` holds back. Not where a grammar does so itself: it knows when there is no choice."""
        return self.ending_ids if self.constraint is None else frozenset()

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    # -- what the round does

    def commit(self, tokens: Seq[int], origin: Origin, logprobs: Seq[TokenLogprob]) -> int:
        """Take accepted tokens and the target's own, of this ``origin``, in until one ends the text; the rest are
        dropped. logprobs: of each of them, or none. Returns how many were kept."""
        self.torn = True
        for kept, token in enumerate(tokens, 1):
            self._take(token, origin if kept == len(tokens) else "accepted", logprobs[kept - 1] if logprobs else None)
            if self.finished:
                break
        self.torn = False
        return kept

    def _take(self, token: int, origin: Origin, logprob: TokenLogprob | None) -> None:
        self.tokens.take(token)
        self._origins.append(origin)
        if logprob is not None:
            self._logprobs.append(logprob)
        text, stopped = "", False
        if self._sink is not None and token not in self.ending_ids:
            text, stopped = self._sink.push(token, check_stop=self.output_length >= self.params.min_tokens)
        # "stop" wins over "length" when both fall on the same token.
        reason: FinishReason | None = None
        if self.constraint is not None:
            self.constraint.take(token)
        over = self.constraint is not None and self.constraint.over
        if stopped or over or token in self.ending_ids:
            reason = "stop"
        elif self.remaining <= 0:
            reason = "length"
        if reason is not None and self._sink is not None and not stopped:
            text += self._sink.finish()
        self._texts.append(text)
        self.pieces.append(Piece(text, token, origin, self.index, logprob, reason))
        self.finish_reason = reason  # last: another thread may be reading, and takes this for the end

    def score(self, place: int, logprobs: Seq[TokenLogprob]) -> None:
        """Log-probabilities of the prompt's tokens from ``place`` on."""
        assert self.prompt_logprobs is not None
        self.prompt_logprobs[place:] = logprobs

    def end(self, reason: FinishReason, error: str | None = None, field: str | None = None) -> None:
        """Finish from outside: an abort, a failure, or a prompt without an answer (``max_tokens=0``). What was held
        back as a possible stop string is let go."""
        if self.finished:
            return
        text = ""
        if self._sink is not None and not self.torn:  # else its text may lack a token, or half of one
            text = self._sink.finish()
        self._texts.append(text)
        self.pieces.append(Piece(text, None, "plain", self.index, None, reason))
        self.error, self.error_field, self.finish_reason = error, field, reason

    def choice(self) -> Choice:
        """The finished answer."""
        assert self.finish_reason is not None
        return Choice(
            index=self.index,
            text="".join(self._texts),
            token_ids=tuple(self.tokens[self.prompt_length :]),
            finish_reason=self.finish_reason,
            stats=self.tally.stats(),
            logprobs=tuple(self._logprobs) if self.params.logprobs is not None else None,
            origins=tuple(self._origins),
            error=self.error,
            error_field=self.error_field,
        )
