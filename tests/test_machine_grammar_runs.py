"""Runs of tokens that a grammar forces: asked for once, and the same whoever asks, where and in what order.

With a grammar whose tokenizer writes the rest of a run otherwise than the run itself ("1234" is 12, 3, 4, but "34" is
one token, as where digits are grouped): a run that counted from wherever somebody asked would depend on the draft.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest

from headstart.machine.grammar_state import CompiledGrammar, GrammarState, Matcher, Vocabulary
from headstart.types import Mask

TEXTS = [b"", b"a", b"b", b"1", b"2", b"3", b"4", b"12", b"34", b"!"]
A, B, ONE, TWELVE, THREE, FOUR, THIRTY_FOUR, MARK, EOS = 1, 2, 3, 7, 5, 6, 8, 9, 0
WRITTEN = {b"1234": [TWELVE, THREE, FOUR], b"234": [4, THIRTY_FOUR], b"34": [THIRTY_FOUR], b"4": [FOUR], b"!": [MARK]}


class Numbers(Matcher):
    """a or b, then 1234; twice; then "!" and the end."""

    calls = 0  # of compute_ff_tokens, by all of them

    def __init__(self, text: bytes = b"") -> None:
        self.text, self.failed = text, False

    def deep_copy(self) -> Numbers:
        return Numbers(self.text)

    def is_error(self) -> bool:
        return self.failed

    def get_error(self) -> str:
        return "no"

    def is_stopped(self) -> bool:
        return self.text.endswith(b"!")

    def is_accepting(self) -> bool:
        return self.is_stopped()

    def _rest(self) -> bytes:
        """What must come; nothing where there is a choice."""
        place = len(self.text) % 5
        return b"!" if len(self.text) == 10 else b"1234"[place - 1 :] if place else b""

    def consume_tokens(self, sampled_tokens: list[int]) -> bool:
        for token in sampled_tokens:
            rest, spelt = self._rest(), TEXTS[token]
            if not spelt or not (rest.startswith(spelt) if rest else spelt in (b"a", b"b")):
                self.failed = True
                return False
            self.text += spelt
        return True

    def validate_tokens(self, tokens: list[int]) -> int:
        other = self.deep_copy()
        return next((i for i, token in enumerate(tokens) if not other.consume_tokens([token])), len(tokens))

    def compute_ff_tokens(self) -> list[int]:
        type(self).calls += 1
        return WRITTEN.get(self._rest(), [])

    def unsafe_compute_mask_ptr(self, trg_pointer: int, trg_byte_size: int) -> None:
        import ctypes

        ctypes.c_uint32.from_address(trg_pointer).value = 1 << A | 1 << B


TOKENS = Vocabulary(
    len(TEXTS), frozenset({EOS}), TEXTS.__getitem__, lambda text: [TEXTS.index(bytes([c])) for c in text]
)
LINE = (A, TWELVE, THREE, FOUR, B, TWELVE, THREE, FOUR, MARK)
BITS = [{A, B}, {TWELVE}, {THREE}, {FOUR}, {A, B}, {TWELVE}, {THREE}, {FOUR}, {MARK}]


def begin(endings: frozenset[int] = frozenset({EOS})) -> GrammarState:
    return CompiledGrammar(TOKENS, Numbers(), None).begin(endings=endings, min_tokens=0)


def bits(mask: Mask | None) -> set[int]:
    assert mask is not None
    return {token for token in range(len(TEXTS)) if int(mask[0]) >> token & 1}


def asked_at_each_place(state: GrammarState) -> list[set[int]]:
    found = []
    for token in LINE:
        found.append(bits(state.mask(())))
        state.take(token)
    return found


def asked_about_a_draft(state: GrammarState) -> list[set[int]]:
    return [bits(state.mask(LINE[:count])) for count in range(len(LINE))]


def asked_backwards(state: GrammarState) -> list[set[int]]:
    return [bits(state.mask(LINE[:count])) for count in reversed(range(len(LINE)))][::-1]


def never_asked_before(state: GrammarState) -> list[set[int]]:
    found = []
    for count in range(len(LINE)):
        fresh = begin()
        for token in LINE[:count]:
            fresh.take(token)
        found.append(bits(fresh.mask(())))
    return found


WAYS = [asked_at_each_place, asked_about_a_draft, asked_backwards, never_asked_before]


@pytest.mark.parametrize("way", WAYS)
def test_masks_are_the_same_whoever_asks(way: Callable[[GrammarState], list[set[int]]]) -> None:
    assert way(begin()) == BITS


def test_masks_are_the_same_in_any_mixture_of_drafts_and_commits() -> None:
    for number in range(300):
        chance, state, at = Random(number), begin(), 0
        while at < len(LINE):
            for _ in range(chance.randrange(4)):
                ahead = chance.randrange(len(LINE) - at)
                kind = chance.randrange(6)
                if kind == 0:
                    assert bits(state.mask(LINE[at : at + ahead])) == BITS[at + ahead], number
                elif kind == 1:
                    assert state.fits(LINE[at : at + ahead]) == ahead, number
                elif kind == 2:
                    others = {THREE: THIRTY_FOUR, FOUR: MARK}
                    wrong = (*LINE[at : at + ahead], others.get(LINE[at + ahead], FOUR))
                    # Spelt otherwise it may fit the grammar: then the mask, which has no such bit, rejects it.
                    assert state.fits(wrong) in (ahead, ahead + (wrong[-1] == THIRTY_FOUR)), number
                elif kind == 3:
                    run = state.forced(9, LINE[at : at + ahead])
                    assert run == LINE[at + ahead : at + ahead + len(run)], number
                    assert bool(run) == (len(BITS[at + ahead]) == 1), number
                else:
                    token = chance.choice([LINE[at + ahead], *range(1, len(TEXTS))])
                    right = token in BITS[at + ahead]
                    assert state.allows(LINE[at : at + ahead], token) == right, (number, token)
            for _ in range(min(chance.randint(1, 3), len(LINE) - at)):
                state.take(LINE[at])
                at += 1
        assert state.over
        assert state.fault is None


def test_tokens_are_checked_one_after_another_at_every_place_of_a_draft() -> None:
    for at in range(len(LINE)):
        for ahead in range(len(LINE) - at):
            state = begin()
            for token in LINE[:at]:
                state.take(token)
            drafted = LINE[at : at + ahead]
            found = {token for token in range(1, len(TEXTS)) if state.allows(drafted, token)}
            assert found == BITS[at + ahead] - {0}, (at, ahead)


def test_a_run_is_asked_for_once_and_read_when_it_is_over() -> None:
    Numbers.calls = 0
    state = begin()
    asked_at_each_place(state)
    assert Numbers.calls == 5, "at two choices, and where two runs and the end begin"
    Numbers.calls, state, at = 0, begin(), 0
    for count in (3, 4, 2):  # drafts, all accepted
        for ahead in range(count):
            state.mask(LINE[at : at + ahead])
        for token in LINE[at : at + count]:
            state.take(token)
        at += count
    assert Numbers.calls <= 7, "what was found out behind drafted tokens is known when they are committed"
    assert state.over


def test_an_ending_of_the_requests_own_inside_of_a_run() -> None:
    """A run leaves no place for it; if it comes all the same, the text is over."""
    state = begin(frozenset({EOS, ONE}))
    for token in LINE[:2]:
        state.take(token)
    assert bits(state.mask(())) == {THREE}
    state.take(ONE)
    assert state.over


def test_a_token_that_is_not_the_runs_own_but_spells_it() -> None:
    """Nothing that is committed is lost, though no mask would have let it through."""
    state = begin()
    for token in (A, TWELVE, THIRTY_FOUR):
        state.take(token)
    assert state.fault is None
    assert bits(state.mask(())) == {A, B}
    state = begin()
    for token in (A, TWELVE, B):
        state.take(token)
    assert state.fault is not None
    assert bits(state.mask(())) == set()
