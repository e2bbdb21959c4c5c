"""Where a text stands in a grammar, and what may come next.

Knows: committed and drafted tokens, a grammar that reads them (``Matcher``), free text before it, and what ends a text.
Does not know: how grammars are compiled (``grammar``), logits, rounds.

A mask follows from the text alone, so it is the same whoever asks, in whatever order. Where the grammar leaves only one
way to go on, the mask has one bit: the token that the tokenizer itself would write there. Such a run of tokens is asked
for once, where it begins, and the grammar reads it once it is over: in between there is nothing to ask it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from threading import Lock
from typing import Protocol, TypeVar

import numpy as np

from ..maths.bitmask import allows
from ..types import Mask
from .mask_budget import TOO_SLOW, Budget

__all__ = ["CompiledGrammar", "GrammarState", "Matcher", "Vocabulary", "computed", "first_line"]

T = TypeVar("T")

_NO_TOKEN = ("NoExtensionBias", "forced bytes")  # llguidance's words for what no token spells


class Matcher(Protocol):
    """What is used of llguidance's ``LLMatcher``. One that failed stays so."""

    def deep_copy(self) -> Matcher: ...
    def is_error(self) -> bool: ...
    def get_error(self) -> str: ...
    def is_stopped(self) -> bool:
        """Nothing can follow but an eos token."""

    def is_accepting(self) -> bool:
        """The text may end here."""

    def consume_tokens(self, sampled_tokens: list[int]) -> bool: ...
    def validate_tokens(self, tokens: list[int]) -> int:
        """How many of them could be consumed."""

    def compute_ff_tokens(self) -> list[int]:
        """Tokens that must come next, as the tokenizer would write them."""

    def unsafe_compute_mask_ptr(self, trg_pointer: int, trg_byte_size: int) -> None: ...


@dataclass(frozen=True)
class Vocabulary:
    """A tokenizer's tokens as bytes."""

    size: int
    eos: frozenset[int]  # what ends a text where the grammar lets it end
    spelt: Callable[[int], bytes]
    split: Callable[[bytes], list[int]]  # bytes -> tokens
    _longer: dict[bytes, list[tuple[int, bytes]]] = field(default_factory=dict, repr=False, compare=False)

    @property
    def words(self) -> int:
        """Of a mask."""
        return (self.size + 31) // 32

    def longer(self, byte: bytes) -> list[tuple[int, bytes]]:
        """Tokens that have this byte, and go on behind it: looked for once, which takes a moment."""
        if byte not in self._longer:
            spelt = ((token, self.spelt(token)) for token in range(self.size))
            self._longer[byte] = [(token, text) for token, text in spelt if byte in text[:-1]]
        return self._longer[byte]

    def one(self, token: int) -> Mask:
        row = np.zeros(self.words, np.uint32)
        row[token >> 5] = np.uint32(1 << (token & 31))
        return row

    def all(self) -> Mask:
        return np.full(self.words, 0xFFFFFFFF, np.uint32)


def computed(matcher: Matcher, vocabulary: Vocabulary) -> Mask:
    """The matcher's mask."""
    row = np.zeros(vocabulary.words, np.uint32)
    matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
    return row


def first_line(text: str) -> str:
    """Of an error: the rest is about the library's insides. Where it only announces a reason, that is a line of its
    own, or the last one."""
    lines = [line.strip() for line in text.splitlines() if line.strip()] or ["no reason was given"]
    told = next((line for line in lines if line.startswith("error: ")), lines[-1]).removeprefix("error: ")
    reason = f"{lines[0]} {told}" if lines[0].endswith(":") and lines[1:] else lines[0]
    return reason[:300]


class CompiledGrammar:
    """See ``types.Grammar``."""

    def __init__(self, tokens: Vocabulary, matcher: Matcher, after: str | None) -> None:
        self.tokens, self._matcher, self.budget = tokens, matcher, Budget()
        self.after = after.encode() if after is not None else b""
        longer = tokens.longer(self.after[-1:]) if self.after else []
        #: by how much of ``after`` is there already
        self._overhang = [self._allowed_behind(self.after[:n], longer) for n in range(len(self.after))]

    def begin(self, *, endings: frozenset[int], min_tokens: int) -> GrammarState:
        return GrammarState(self, endings, min_tokens)

    def fresh(self) -> Matcher:
        return self._matcher.deep_copy()

    def overhang(self, tail: bytes) -> Mask | None:
        """What may follow free text that ends like this: anything (None) but eos tokens, since what was asked for is
        still to come, and tokens that go on behind the end of ``after`` with what the grammar does not begin with."""
        reached = next(n for n in range(len(self.after) - 1, -1, -1) if tail.endswith(self.after[:n]))
        return self._overhang[reached]

    def _allowed_behind(self, tail: bytes, tokens: Sequence[tuple[int, bytes]]) -> Mask | None:
        matcher, wrong = self.fresh(), [token for token in self.tokens.eos if token < self.tokens.size]
        for token, spelt in tokens:
            rest = behind(tail + spelt, self.after)
            if rest:
                line = self.tokens.split(rest)
                if matcher.validate_tokens(line) < len(line):
                    wrong.append(token)
        if not wrong:
            return None
        row = self.tokens.all()
        for token in wrong:
            row[token >> 5] &= ~np.uint32(1 << (token & 31))
        return row


def behind(text: bytes, mark: bytes) -> bytes | None:
    """What stands behind the first ``mark``; None: it is not there."""
    _, found, rest = text.partition(mark)
    return rest if found else None


class _Place:
    """A place in a grammar, or before it: in the free text up to ``after``."""

    __slots__ = ("endings", "fault", "grammar", "matcher", "others", "over", "run", "tail", "unread")

    def __init__(self, grammar: CompiledGrammar, endings: frozenset[int]) -> None:
        self.grammar, self.endings = grammar, endings
        self.others = endings - grammar.tokens.eos  # llguidance knows when the eos tokens may come
        self.matcher = grammar.fresh() if not grammar.after else None  # None: in the free text
        self.run: tuple[int, ...] | None = None  # what must come next, empty where there is a choice; None: not known
        self.unread: tuple[int, ...] = ()  # tokens of a run that the matcher has not read; not empty only inside of one
        self.tail = b""  # the end of the free text
        self.over = False
        self.fault: str | None = None

    def copy(self) -> _Place:
        found: _Place = object.__new__(_Place)
        found.grammar, found.tail = self.grammar, self.tail
        found.endings, found.others = self.endings, self.others
        found.matcher = self.matcher.deep_copy() if self.matcher is not None else None
        found.run, found.unread = self.run, self.unread
        found.over, found.fault = self.over, self.fault
        return found

    def take(self, token: int) -> None:
        if self.over or self.fault is not None:
            return
        if token in self.endings:
            self.over = True
        elif self.matcher is not None:
            # A run counts from where it begins, whether anybody asked there or not: masks follow from the text alone.
            run, line = self.forced(), (*self.unread, token)
            if run[:1] == (token,) and len(run) > 1:
                self.run, self.unread = run[1:], line
            else:
                self.run, self.unread = None, ()
                self._advance(list(line))
        else:
            text, mark = self.tail + self.grammar.tokens.spelt(token), self.grammar.after
            rest = behind(text, mark)
            self.tail = text[-len(mark) :]
            if rest is not None:
                self.matcher = self.grammar.fresh()
                self._advance(self.grammar.tokens.split(rest) if rest else [])

    def _advance(self, tokens: list[int]) -> None:
        assert self.matcher is not None
        if tokens and not self.matcher.consume_tokens(tokens):
            self._fail()
        else:
            self.over = self.matcher.is_stopped()

    def _fail(self) -> None:
        assert self.matcher is not None
        why = first_line(self.matcher.get_error())
        if any(words in why for words in _NO_TOKEN):
            why = "this model has no token for what it wants"
        self.fault = f"the grammar could not be followed here: {why}"

    @property
    def follows(self) -> bool:
        """Does the grammar say what comes here: not in the free text, not behind the end?"""
        return self.matcher is not None and not self.over and self.fault is None

    def forced(self) -> tuple[int, ...]:
        if self.matcher is None or not self.follows:
            return ()
        if self.run is None:
            self.run = tuple(self.matcher.compute_ff_tokens())
        return self.run

    def reads(self, tokens: Sequence[int]) -> bool:
        """Can the grammar read all of these from here? Not for what may end a text, nor inside of a run."""
        assert self.matcher is not None
        line = [*self.unread, *tokens]
        return self.matcher.validate_tokens(line) == len(line)

    def ends(self, token: int) -> bool:
        """Could this token end a text?"""
        return token in self.endings or token in self.grammar.tokens.eos

    def fits(self, line: Sequence[int]) -> int | None:
        """How many of these may follow; None: that is to be asked a token at a time."""
        if self.over or self.fault is not None:
            return 0
        if self.matcher is None or self.run or self.endings.intersection(line):
            return None
        return self.matcher.validate_tokens(list(line))

    def mask(self) -> Mask | None:
        """No bit where the grammar cannot be followed; anything (None) behind its end, where nothing counts."""
        tokens = self.grammar.tokens
        if self.over:
            return None
        if self.fault is not None:
            return np.zeros(tokens.words, np.uint32)
        if self.matcher is None:
            return self.grammar.overhang(self.tail)
        if forced := self.forced():
            return tokens.one(forced[0])
        row = computed(self.matcher, tokens)
        if self.matcher.is_error():
            self._fail()
            return np.zeros(tokens.words, np.uint32)
        if self.others and self.matcher.is_accepting():
            for token in self.others:  # ids of the request's own end a text where it may end
                if token < tokens.size:
                    row[token >> 5] |= np.uint32(1 << (token & 31))
        return row


class GrammarState:
    """See ``types.Constraint``."""

    def __init__(self, grammar: CompiledGrammar, endings: frozenset[int], min_tokens: int) -> None:
        self._base = _Place(grammar, endings)
        self._min_tokens, self._taken = min_tokens, 0
        self._words, self._budget = grammar.tokens, grammar.budget
        self._ahead: tuple[tuple[int, ...], _Place] | None = None  # a place behind drafted tokens, and which
        # What was found out behind drafted tokens; of those that are committed, the rest stays.
        self._known: dict[tuple[int, ...], Mask | None] = {}
        self._runs: dict[tuple[int, ...], tuple[int, ...]] = {}  # what must come there, empty where there is a choice
        self._fine: dict[tuple[int, ...], int] = {}  # a token that may follow
        self._fault: str | None = None  # of a place behind drafted tokens
        self._lock = Lock()

    @property
    def over(self) -> bool:
        return self._base.over

    @property
    def fault(self) -> str | None:
        too_slow = f"the grammar {TOO_SLOW}" if self._budget.exceeded else None
        return self._base.fault or self._fault or too_slow

    def take(self, token: int) -> None:
        with self._lock, self._budget.spending(tokens=1):
            known, runs, fine = (self._known, self._runs, self._fine) if self._fault is None else ({}, {}, {})
            self._ahead, self._fault, self._known, self._runs, self._fine = None, None, {}, {}, {}
            self._taken += 1
            self._base.take(token)
            self._known, self._runs, self._fine = _behind(known, token), _behind(runs, token), _behind(fine, token)
            if self._base.run is None:
                self._base.run = self._runs.get(())
            # Somebody will ask for it, and now the grammar is in the cache: behind the next forward it is not.
            self._noted((), self._base)

    def mask(self, drafted: tuple[int, ...]) -> Mask | None:
        with self._lock:
            if drafted in self._known:
                return self._known[drafted]
            if self._budget.exceeded:
                return np.zeros(self._words.words, np.uint32)
            with self._budget.spending():
                return self._mask(drafted)

    def allows(self, drafted: tuple[int, ...], token: int) -> bool:
        with self._lock:
            if self._fine.get(drafted) == token:
                return True
            if drafted not in self._known and not self._budget.exceeded:
                with self._budget.spending():
                    said = self._checked(drafted, token)
                if said:
                    self._fine[drafted] = token
                if said is not None:
                    return said
        row = self.mask(drafted)
        return row is None or allows(row, token)

    def fits(self, drafted: Sequence[int]) -> int:
        line, count = () if self._budget.exceeded else tuple(drafted), 0
        with self._lock, self._budget.spending():
            while count < len(line):
                if line[:count] not in self._known:
                    fitting = self._at(line[:count]).fits(line[count:])
                    if fitting is not None:
                        return count + fitting
                row = self._mask(line[:count])
                if row is not None and not allows(row, line[count]):
                    return count
                count += 1
        return count

    def forced(self, most: int, drafted: tuple[int, ...] = ()) -> tuple[int, ...]:
        with self._lock:
            if self._budget.exceeded:
                return ()
            if drafted not in self._runs:
                with self._budget.spending():
                    return self._noted(drafted, self._at(drafted))[:most]
            return self._runs[drafted][:most]

    def _checked(self, drafted: tuple[int, ...], token: int) -> bool | None:
        """Has the mask there this token's bit? None: only the mask itself tells. Where it is known what must come, or
        that there is a choice, no place is needed: the grammar reads the drafted tokens and this one, and forgets."""
        place, line = self._base, (*drafted, token)
        if place.matcher is None or drafted not in self._runs:
            place, line = self._at(drafted), (token,)
            self._noted(drafted, place)
        run = self._runs.get(drafted)
        if run is None or place.ends(token):
            return None
        if run:
            return token == run[0]
        return token < self._words.size and place.reads(line)

    def _noted(self, drafted: tuple[int, ...], place: _Place) -> tuple[int, ...]:
        """What must come at a place, kept where a grammar has a say."""
        run = place.forced()
        if place.follows:
            self._runs[drafted] = run
        return run

    def _mask(self, drafted: tuple[int, ...]) -> Mask | None:
        if drafted not in self._known:
            place = self._at(drafted)
            row = place.mask()
            if drafted and place.fault is not None:
                self._fault = self._fault or place.fault
            if self._taken + len(drafted) < self._min_tokens and not place.over:
                row = self._held_back(row)
            self._noted(drafted, place)
            self._known[drafted] = row
        return self._known[drafted]

    def _held_back(self, row: Mask | None) -> Mask:
        """Without what would end the text, unless there is nothing else."""
        found = row.copy() if row is not None else self._words.all()
        for token in self._base.endings:
            if token < self._words.size:
                found[token >> 5] &= ~np.uint32(1 << (token & 31))
        return found if row is None or found.any() else row

    def _at(self, drafted: tuple[int, ...]) -> _Place:
        """The place behind drafted tokens. One is kept; an interruption in the middle of a move leaves none."""
        if not drafted:
            return self._base
        kept, self._ahead = self._ahead, None
        if kept is None or drafted[: len(kept[0])] != kept[0]:
            kept = (), self._base.copy()
        at, place = kept
        for count in range(len(at), len(drafted)):
            place.take(drafted[count])
            if place.run is None:
                place.run = self._runs.get(drafted[: count + 1])
        self._ahead = drafted, place
        return place


def _behind(found: dict[tuple[int, ...], T], token: int) -> dict[tuple[int, ...], T]:
    """Of what is known behind drafted tokens, what stays when one is committed."""
    return {path[1:]: each for path, each in found.items() if path[:1] == (token,)}
