"""The records every floor shares.

Knows: what a request, a guess, a verdict and an answer are made of, and which values are allowed.
Does not know: how any of them is computed.

Glossary, used with the same meaning everywhere:
    draft      the cheap guesser, and the tokens it guesses
    target     the model whose text is wanted; its distribution is never changed
    accepted   a drafted token that the verification rule kept
    correction the token the target puts in the place of the first rejected one
    bonus      the token the target adds when every drafted token was accepted
    plain      a token from a round without a draft
    alpha      acceptance rate: accepted / drafted tokens
    gamma      draft length: tokens drafted in a round
    tau        acceptance length: tokens emitted per target forward
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import torch

from .errors import InvalidParameter

__all__ = [
    "Choice",
    "Completion",
    "DraftView",
    "Draw",
    "FinishReason",
    "Origin",
    "Piece",
    "Proposal",
    "Request",
    "Round",
    "SamplingParams",
    "Stats",
    "TokenLogprob",
    "Verdict",
    "Verification",
]

Verification = Literal["block", "token", "coupled"]
Draw = Literal["point", "iid", "distinct"]
Origin = Literal["accepted", "correction", "bonus", "plain"]
FinishReason = Literal["stop", "length", "abort", "error"]

MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 1000
MAX_N = 64
MAX_LOGPROBS = 50


def _number(name: str, value: object) -> float:
    """A finite real number, or an error that names the field."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise InvalidParameter(name, f"must be a number, not {value!r}")
    if not math.isfinite(value):
        raise InvalidParameter(name, f"must be finite, not {value!r}")
    return float(value)


def _integer(name: str, value: object, low: int, high: int | None = None) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidParameter(name, f"must be a whole number, not {value!r}")
    if value < low or (high is not None and value > high):
        bound = f"at least {low}" if high is None else f"between {low} and {high}"
        raise InvalidParameter(name, f"must be {bound}, not {value}")
    return value


@dataclass(frozen=True)
class SamplingParams:
    """How one request is sampled. The names are vLLM's; ``speculate`` and ``verification`` are ours.

    ``temperature=0`` is greedy. ``verification`` is the rule that keeps speculation lossless when sampling:
    "block" accepts the most, "token" is the classical rule, "coupled" gives the very tokens that plain
    decoding gives for the same seed. ``logprobs=k`` returns the target's own log-probabilities (before any
    penalty or temperature) of each token and of the k most likely ones.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | None = None
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    min_tokens: int = 0
    max_tokens: int = 128
    ignore_eos: bool = False
    logprobs: int | None = None
    seed: int | None = None
    n: int = 1
    speculate: bool = True
    verification: Verification = "block"

    def __post_init__(self) -> None:
        self._check_numbers()
        self._check_lists()
        if self.verification not in ("block", "token", "coupled"):
            raise InvalidParameter("verification", f"must be 'block', 'token' or 'coupled', not {self.verification!r}")
        for name in ("ignore_eos", "speculate"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidParameter(name, f"must be true or false, not {getattr(self, name)!r}")

    def _check_numbers(self) -> None:
        if _number("temperature", self.temperature) < 0:
            raise InvalidParameter("temperature", f"must be at least 0, not {self.temperature}")
        if not 0 < _number("top_p", self.top_p) <= 1:
            raise InvalidParameter("top_p", f"must be in (0, 1], not {self.top_p}")
        if not 0 <= _number("min_p", self.min_p) <= 1:
            raise InvalidParameter("min_p", f"must be in [0, 1], not {self.min_p}")
        for name in ("presence_penalty", "frequency_penalty"):
            if not -2 <= _number(name, getattr(self, name)) <= 2:
                raise InvalidParameter(name, f"must be in [-2, 2], not {getattr(self, name)}")
        if _number("repetition_penalty", self.repetition_penalty) <= 0:
            raise InvalidParameter("repetition_penalty", f"must be above 0, not {self.repetition_penalty}")
        if self.top_k == -1:
            object.__setattr__(self, "top_k", 0)  # vLLM's other way to say "off"
        _integer("top_k", self.top_k, 0)
        _integer("max_tokens", self.max_tokens, 1)
        _integer("min_tokens", self.min_tokens, 0)
        if self.min_tokens > self.max_tokens:
            raise InvalidParameter(
                "min_tokens", f"must be at most max_tokens ({self.max_tokens}), not {self.min_tokens}"
            )
        _integer("n", self.n, 1, MAX_N)
        if self.logprobs is not None:
            _integer("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        if self.seed is not None:
            _integer("seed", self.seed, -(2**63), 2**64 - 1)

    def _check_lists(self) -> None:
        if not isinstance(self.stop, Iterable):
            raise InvalidParameter("stop", f"must be a string or a list of strings, not {self.stop!r}")
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        if len(stop) > MAX_STOP_STRINGS:
            raise InvalidParameter("stop", f"takes at most {MAX_STOP_STRINGS} strings, not {len(stop)}")
        for text in stop:
            if not isinstance(text, str) or not text:
                raise InvalidParameter("stop", "must hold non-empty strings")
            if len(text) > MAX_STOP_LENGTH:
                raise InvalidParameter("stop", f"strings are at most {MAX_STOP_LENGTH} characters, not {len(text)}")
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", tuple(_integer("stop_token_ids", t, 0) for t in self.stop_token_ids))
        if self.logit_bias is not None:
            bias = {}
            for token, value in self.logit_bias.items():
                bias[_integer("logit_bias", token, 0)] = _number("logit_bias", value)
                if not -100 <= value <= 100:
                    raise InvalidParameter("logit_bias", f"values must be in [-100, 100], not {value}")
            object.__setattr__(self, "logit_bias", bias)

    @property
    def greedy(self) -> bool:
        """True when every token is an argmax."""
        return self.temperature == 0

    def check_vocabulary(self, size: int) -> None:
        """Refuse token ids the model does not have. Called where the vocabulary is known, before any work."""
        for name, ids in (("logit_bias", self.logit_bias or ()), ("stop_token_ids", self.stop_token_ids)):
            for token in ids:
                if token >= size:
                    raise InvalidParameter(name, f"names token {token}, but the vocabulary ends at {size - 1}")


@dataclass(frozen=True)
class Request:
    """One prompt on its way to the engine. ``prediction`` is text (as ids) the caller expects in the answer."""

    id: str
    prompt: tuple[int, ...]
    params: SamplingParams
    prediction: tuple[int, ...] = ()


class DraftView(Protocol):
    """All that a drafter may know about a running sequence. The engine's ``Sequence`` is one."""

    @property
    def id(self) -> str: ...
    @property
    def tokens(self) -> list[int]:
        """Prompt and committed output, in order. Read it; never change it."""

    @property
    def prompt_length(self) -> int: ...
    @property
    def params(self) -> SamplingParams: ...
    @property
    def prediction(self) -> tuple[int, ...]: ...
    @property
    def seed(self) -> int:
        """The seed in force (drawn at random when the request gave none)."""


@dataclass(frozen=True)
class Proposal:
    """What a drafter guesses for one sequence: a tree of tokens hanging from the last committed one.

    ``parents[i]`` is the index of token i's parent among these tokens, or -1 for the last committed token;
    a parent stands before its children, and siblings stand in the order they were drawn. A chain has
    parents -1, 0, 1, ... ``q[i]`` is the distribution token i was drawn from, before any sibling was
    taken out of it.

    ``draw``: "point" tokens are a deterministic function of what came before (q is None);
    "iid" siblings were drawn independently from one q; "distinct" siblings were drawn without replacement.

    ``strength`` is what the drafter knew about its own guess before making it (a match length, say); the
    controller learns how far to trust each value. 0 means that it knows nothing.
    """

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    q: torch.Tensor | None = None  # [n, V]
    draw: Draw = "point"
    strength: int = 0

    @staticmethod
    def chain(tokens: Sequence[int], q: torch.Tensor | None = None, strength: int = 0) -> Proposal:
        """A proposal with one branch."""
        n = len(tokens)
        return Proposal(tuple(tokens), tuple(range(-1, n - 1)), q, "point" if q is None else "iid", strength)

    @property
    def is_chain(self) -> bool:
        return self.parents == tuple(range(-1, len(self.tokens) - 1))

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True)
class Verdict:
    """What the target says of one proposal: the accepted path (indices into its tokens) and one token more."""

    path: tuple[int, ...]
    token: int
    origin: Origin  # of ``token``: correction, bonus, or plain when nothing was drafted


@dataclass(frozen=True)
class Round:
    """One draft-verify-commit round of one sequence. The only telemetry record there is."""

    sequence: str
    drafted: int
    accepted: int
    emitted: int  # accepted tokens and the target's own, less what was trimmed after a stop
    rows: int  # sequences that shared this round's forward
    width: int  # token positions a row in that forward
    prefill: int  # of these, prompt tokens that came along (a sequence's first round)
    draft_seconds: float
    verify_seconds: float  # the target's forward alone
    round_seconds: float  # the whole round, for all its rows
    outcomes: tuple[bool, ...] = ()  # for a chain: was token i accepted; only up to and with the first rejection
    strength: int = 0
    drafter: str = ""


@dataclass(frozen=True)
class TokenLogprob:
    """The target's log-probability of one emitted token, and of the most likely ones at its position."""

    token_id: int
    logprob: float
    top: Mapping[int, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Piece:
    """One emitted token on its way out. ``text`` may be empty while a character or stop string is undecided."""

    text: str
    token_id: int | None  # None for a last piece that only brings held-back text
    origin: Origin
    index: int = 0  # which of the n choices
    logprob: TokenLogprob | None = None
    finish_reason: FinishReason | None = None  # set on the last piece of a choice


@dataclass(frozen=True)
class Stats:
    """What speculation did for one choice, summed from its ``Round`` records."""

    drafted: int = 0
    accepted: int = 0
    rounds: int = 0
    tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0  # prompt tokens that were warm in the slab
    seconds: float = 0.0  # from the first prefill to the last token
    decode_tokens: int = 0  # tokens from rounds that carried no prompt
    decode_seconds: float = 0.0  # the time of those rounds
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0

    @property
    def acceptance_rate(self) -> float:
        """alpha; 0 when nothing was drafted."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def acceptance_length(self) -> float:
        """tau: tokens per target forward."""
        return self.tokens / self.rounds if self.rounds else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Decoding speed: rounds that read the prompt in are left out, tokens and time."""
        return self.decode_tokens / self.decode_seconds if self.decode_seconds > 0 else 0.0


@dataclass(frozen=True)
class Choice:
    """One of the n answers to a request."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stats: Stats
    logprobs: tuple[TokenLogprob, ...] | None = None
    origins: tuple[Origin, ...] = ()
    error: str | None = None


@dataclass(frozen=True)
class Completion:
    """The answer to one request: n choices, and shortcuts to the first."""

    id: str
    prompt_token_ids: tuple[int, ...]
    choices: tuple[Choice, ...]

    @property
    def text(self) -> str:
        return self.choices[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.choices[0].token_ids

    @property
    def finish_reason(self) -> FinishReason:
        return self.choices[0].finish_reason

    @property
    def logprobs(self) -> tuple[TokenLogprob, ...] | None:
        return self.choices[0].logprobs

    @property
    def stats(self) -> Stats:
        return self.choices[0].stats

    @property
    def error(self) -> str | None:
        return self.choices[0].error
