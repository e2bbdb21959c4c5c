"""The records every floor shares.

Knows: what a request, a guess, a verdict and an answer are made of (how a request is sampled: ``sampling.py``).
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

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias

from .errors import PromptTooLong
from .sampling import SamplingParams, Structured, Verification

if TYPE_CHECKING:  # these records hold tensors and never compute with them; torch takes seconds to import
    import numpy as np
    import torch
    from numpy.typing import NDArray

__all__ = [
    "Advice",
    "Choice",
    "Completion",
    "Constraint",
    "DraftView",
    "Draw",
    "FinishReason",
    "Grammar",
    "Mask",
    "Origin",
    "Piece",
    "Proposal",
    "Request",
    "Round",
    "SamplingParams",
    "Stats",
    "Structured",
    "Tell",
    "TokenLogprob",
    "Verdict",
    "Verification",
    "silent",
]

Draw = Literal["point", "iid", "distinct"]
Origin = Literal["accepted", "correction", "bonus", "plain"]
FinishReason = Literal["stop", "length", "abort", "error"]
Tell: TypeAlias = Callable[[str], None]  # hears what a start-up is doing; an empty text: nothing to tell
Mask: TypeAlias = "NDArray[np.uint32]"  # [W] a bit for each token that may come next, the lowest bit first


class Constraint(Protocol):
    """What a grammar lets one running choice go on with. It moves over committed tokens only; drafted ones are asked
    about. Any thread may ask. ``machine/grammar_state.py`` has one."""

    @property
    def over(self) -> bool:
        """Nothing may follow any more: the text ends here."""

    @property
    def fault(self) -> str | None:
        """Why the grammar cannot be followed any further; its masks are empty from there on."""

    def take(self, token: int) -> None:
        """A token was committed."""

    def mask(self, drafted: tuple[int, ...]) -> Mask | None:
        """What may follow the committed text and these drafted tokens; None: anything."""

    def allows(self, drafted: tuple[int, ...], token: int) -> bool:
        """Does ``mask`` let this one token follow? Much quicker than to work the mask out."""

    def fits(self, drafted: Sequence[int]) -> int:
        """How many of these may follow the committed text, one after the other."""

    def forced(self, most: int, drafted: tuple[int, ...] = ()) -> tuple[int, ...]:
        """The tokens that must come next, behind these drafted ones, as far as there is no choice: each one's mask has
        no other bit."""


class Grammar(Protocol):
    """A compiled grammar, for any number of choices."""

    def begin(self, *, endings: frozenset[int], min_tokens: int) -> Constraint:
        """For a new choice: ids that end its text, and how many tokens must come before one of them, where there is a
        choice at all."""


@dataclass(frozen=True)
class Request:
    """One prompt on its way to the engine. ``prediction`` is text (as ids) the caller expects in the answer."""

    id: str
    prompt: tuple[int, ...]
    params: SamplingParams
    prediction: tuple[int, ...] = ()
    grammar: Grammar | None = None  # ``params.structured``, compiled for the model's tokens

    def longest(self, max_model_len: int) -> int:
        """The most tokens that prompt and answer may have together; an error if what was asked for does not fit."""
        length, wanted = len(self.prompt), self.params.max_tokens
        room = max_model_len - length
        if room < (wanted != 0):
            raise PromptTooLong(
                "prompt", f"has {length} tokens; max_model_len is {max_model_len} and counts the answer too"
            )
        fits = f"max_model_len is {max_model_len}, and {length} prompt tokens leave room for {room}"
        if wanted is not None and wanted > room:
            raise PromptTooLong("max_tokens", f"is {wanted}; {fits}", room)
        if self.params.min_tokens > room:
            raise PromptTooLong("min_tokens", f"is {self.params.min_tokens}; {fits}", room)
        return length + (room if wanted is None else wanted)


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

    @property
    def constraint(self) -> Constraint | None:
        """What its grammar lets it go on with; None: anything. A guess may disregard it: the target does not."""


class Advice(Protocol):
    """What a drafter may ask the controller, once a round. 0.0: whatever is asked for is worth its time."""

    def min_chance_to_extend(self) -> float:
        """How likely to be accepted, summed over the rows, one more drafted token must be to be worth its time."""

    def min_chances(self) -> tuple[float, float]:
        """The same for a token that is drafted already and may still be left out; and ``min_chance_to_extend``."""

    def paid_budgets(self, views: Sequence[DraftView], limits: Sequence[int]) -> list[int]:
        """How many tokens that cost time are worth drafting for each sequence, at most ``limits[i]``."""


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

    ``paid`` matters where a drafter is ``free`` as a whole: this guess cost time for every token and was asked for by
    length beforehand (``PortfolioDrafter`` says it of its costly half), so it is not looked at again, and not cut.

    ``predicted``: copied from the request's ``prediction``, so that it costs nothing whoever drafts otherwise.
    ``forced``: the request's grammar leaves no other choice, so that it costs nothing either and always holds.
    """

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    q: torch.Tensor | None = None  # [n, V]
    draw: Draw = "point"
    strength: int = 0
    paid: bool = False
    predicted: bool = False
    forced: bool = False

    @staticmethod
    def chain(
        tokens: Sequence[int], q: torch.Tensor | None = None, strength: int = 0, *, predicted: bool = False
    ) -> Proposal:
        """A proposal with one branch."""
        draw: Draw = "point" if q is None else "iid"
        return Proposal(tuple(tokens), tuple(range(-1, len(tokens) - 1)), q, draw, strength, predicted=predicted)

    def cut(self, n: int) -> Proposal | None:
        """The first n tokens; parents stand before their children, so a tree stays one. None: nothing is left.

        Tokens that were drawn at random may be cut only by what was known before they were drawn.
        """
        if n >= len(self):
            return self
        q = None if self.q is None else self.q[:n]
        return replace(self, tokens=self.tokens[:n], parents=self.parents[:n], q=q) if n else None

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

    @staticmethod
    def on(proposal: Proposal | None, path: Sequence[int], token: int) -> Verdict:
        """A correction is a token where something was drafted behind the last accepted one."""
        if proposal is None:
            return Verdict((), token, "plain")
        leaf = path[-1] if path else -1
        return Verdict(tuple(path), token, "correction" if leaf in proposal.parents else "bonus")


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
    outcomes: tuple[bool, ...] = ()  # was a token of level i accepted; only up to and with the first rejection
    strength: int = 0
    drafter: str = ""
    paid: bool = False  # see ``Proposal``
    catch_up_seconds: float = 0.0  # of the whole round: the drafter read what it lacked (a prompt, say)
    predicted: bool = False  # see ``Proposal``
    forced: bool = False  # see ``Proposal``
    tokens: int = 0  # of that forward, where rows differ in width; 0: all of them are ``width`` wide


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


class Accepting:
    """Whatever counts drafted and accepted tokens."""

    drafted: int
    accepted: int

    @property
    def acceptance_rate(self) -> float:
        """alpha; 0 when nothing was drafted."""
        return self.accepted / self.drafted if self.drafted else 0.0


@dataclass(frozen=True)
class Stats(Accepting):
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
    waiting_seconds: float = 0.0  # from submit to the first prefill: the time in the line
    first_token_seconds: float = 0.0  # from submit to the first token, the time in the line included; 0: there is none
    drafts: int = 0  # rounds in which something was drafted
    acceptance_histogram: tuple[int, ...] = ()  # in how many of them 0, 1, 2 ... tokens were accepted
    predicted: int = 0  # of the drafted tokens, those copied from the request's prediction ...
    predicted_accepted: int = 0  # ... and of these the accepted ones
    forced: int = 0  # of the drafted tokens, those that the request's grammar left no choice about

    @property
    def acceptance_length(self) -> float:
        """tau: tokens per target forward."""
        return self.tokens / self.rounds if self.rounds else 0.0

    @property
    def mean_acceptance_length(self) -> float:
        """vLLM's: tokens per round in which something was drafted, accepted ones and the target's own; 0: none was."""
        return 1 + self.accepted / self.drafts if self.drafts else 0.0

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
    #: which of its request's parameters the error is about ("structured.regex"); None: it is nobody's fault
    error_field: str | None = None


@dataclass(frozen=True)
class Completion:
    """The answer to one request: n choices, and shortcuts to the first."""

    id: str
    prompt_token_ids: tuple[int, ...]
    choices: tuple[Choice, ...]
    #: with ``prompt_logprobs``: of each of the prompt's tokens; None for the first, which nothing stands before
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None

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


def silent(text: str) -> None:
    """A ``Tell`` that tells nobody."""
