"""The suffix automaton against the definition of a longest match, and the drafter that copies from it."""

from __future__ import annotations

import gc
import tracemalloc
from dataclasses import dataclass, field

import pytest
from engines import draft_context
from hypothesis import given, settings
from hypothesis import strategies as st

from headstart.drafters.base import drafter_named
from headstart.drafters.lookup import LookupDrafter
from headstart.drafters.suffix import SuffixAutomaton
from headstart.errors import InvalidParameter
from headstart.machine.runner import EagerRunner
from headstart.maths.limits import MAX_STRENGTH
from headstart.testing import tiny_model
from headstart.types import Proposal, SamplingParams


@dataclass
class View:
    tokens: list[int]
    prediction: tuple[int, ...] = ()
    id: str = "a"
    prompt_length: int = 0
    params: SamplingParams = field(default_factory=SamplingParams)
    seed: int = 0


def indexed_tokens(drafter: LookupDrafter) -> int:
    """Tokens held for all sequences."""
    return sum(map(len, drafter._indexes.values()))


def longest_match(text: list[int], longest: int | None = None) -> tuple[int, int] | None:
    """By the definition: the longest suffix (no longer than ``longest``) that ended before, and its latest end."""
    for length in range(min(len(text) - 1, longest or len(text)), 0, -1):
        suffix = text[len(text) - length :]
        for end in range(len(text) - 2, length - 2, -1):
            if text[end - length + 1 : end + 1] == suffix:
                return length, end
    return None


def all_matches(text: list[int]) -> list[tuple[int, int]]:
    """The longest match for every set of earlier ends, longest first: those that a shorter suffix adds ends to."""
    found: list[tuple[int, int]] = []
    known = 0
    for length in range(len(text) - 1, 0, -1):
        suffix = text[len(text) - length :]
        ends = [end for end in range(length - 1, len(text) - 1) if text[end - length + 1 : end + 1] == suffix]
        if len(ends) > known:
            found.append((length, ends[-1]))
            known = len(ends)
    return found


small_texts = st.integers(1, 4).flatmap(lambda size: st.lists(st.integers(0, size), max_size=30))


@settings(max_examples=400, deadline=None)
@given(text=small_texts)
def test_every_match_of_every_beginning(text: list[int]) -> None:
    automaton = SuffixAutomaton()
    for position, token in enumerate(text):
        automaton.extend([token])
        so_far = text[: position + 1]
        assert list(automaton.matches()) == all_matches(so_far)
        assert next(automaton.matches(), None) == longest_match(so_far)


@settings(max_examples=200, deadline=None)
@given(text=small_texts, cuts=st.lists(st.integers(0, 30)))
def test_pieces_do_not_matter(text: list[int], cuts: list[int]) -> None:
    automaton, done = SuffixAutomaton(), 0
    for cut in sorted(cuts):
        automaton.extend(text[done:cut])
        done = max(done, cut)
    automaton.extend(text[done:])
    assert automaton.tokens == text
    assert list(automaton.matches()) == list(SuffixAutomaton(text).matches())


def test_long_repetition_still_gives_true_matches() -> None:
    """Deeper than the automaton notes latest ends: lengths stay exact and every end is a real one."""
    text = [1, 2, 3, 9] * 60 + [5, 6] + [1, 2, 3]
    automaton = SuffixAutomaton(text)
    for length, end in automaton.matches():
        assert end < len(text) - 1
        assert text[end - length + 1 : end + 1] == text[len(text) - length :]
    assert next(automaton.matches())[0] == 3
    automaton.extend([1, 2, 3, 9] * 60)
    assert next(automaton.matches())[0] == 240


@settings(max_examples=200, deadline=None)
@given(text=st.lists(st.integers(0, 3), min_size=1, max_size=20), data=st.data())
def test_continuation_runs_into_itself(text: list[int], data: st.DataObject) -> None:
    end = data.draw(st.integers(0, len(text) - 2)) if len(text) > 1 else -1
    count = data.draw(st.integers(1, 40))
    whole = list(text)
    for step in range(count):
        whole.append(whole[end + 1 + step])
    assert SuffixAutomaton(text).continuation(end, count) == whole[len(text) :]


def only(drafter: LookupDrafter, view: View, budget: int) -> Proposal | None:
    (proposal,) = drafter.propose([view], [budget])
    return proposal


@settings(max_examples=300, deadline=None)
@given(
    text=st.lists(st.integers(0, 3), min_size=1, max_size=25),
    budget=st.integers(0, 20),
    steps=st.lists(st.integers(1, 25), max_size=4),
)
def test_drafts_are_what_followed_the_longest_match(text: list[int], budget: int, steps: list[int]) -> None:
    drafter = LookupDrafter()
    view = View([])
    for length in sorted({min(step, len(text)) for step in [*steps, 25]}):
        view.tokens = text[:length]
        proposal = only(drafter, view, budget)
        found = longest_match(view.tokens)
        if budget == 0 or found is None:
            assert proposal is None
            continue
        assert proposal is not None
        assert proposal.is_chain
        assert proposal.draw == "point"
        assert proposal.strength == min(found[0], MAX_STRENGTH)
        assert len(proposal) == budget
        assert list(proposal.tokens) == [*view.tokens[found[1] + 1 :], *proposal.tokens][:budget]
        assert not proposal.predicted


def test_a_loop_is_drafted_to_full_length() -> None:
    proposal = only(LookupDrafter(), View([7, 8, 9, 7, 8, 9, 7]), 10)
    assert proposal is not None
    assert proposal.tokens == (8, 9, 7, 8, 9, 7, 8, 9, 7, 8)
    assert proposal.strength == 4


def test_the_latest_of_two_occurrences_wins() -> None:
    proposal = only(LookupDrafter(), View([1, 2, 50, 1, 2, 60, 3, 1, 2]), 2)
    assert proposal is not None
    assert proposal.tokens == (60, 3)


def test_sequences_do_not_mix() -> None:
    drafter = LookupDrafter()
    views = [View([1, 2, 1], id="a"), View([1, 9, 1], id="b"), View([1, 2, 3], id="c"), View([1, 1], id="d")]
    assert [p and p.tokens for p in drafter.propose(views, [2, 1, 5, 0])] == [(2, 1), (9,), None, None]


def test_short_matches_can_be_left_out() -> None:
    view = View([1, 2, 3, 1, 2])
    assert only(LookupDrafter(min_match=2), view, 1) is not None
    assert only(LookupDrafter(min_match=3), view, 1) is None
    with pytest.raises(InvalidParameter, match="min_match"):
        LookupDrafter(min_match=0)


def test_release_frees_memory() -> None:
    drafter = LookupDrafter()
    text = [token % 1009 for token in range(20_000)]
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for name in "abc":
            only(drafter, View(text, id=name), 4)
        held = tracemalloc.get_traced_memory()[0] - before
        assert indexed_tokens(drafter) == 60_000
        for name in "abc":
            drafter.release(name)
        drafter.release("never seen")
        gc.collect()
        assert indexed_tokens(drafter) == 0
        assert tracemalloc.get_traced_memory()[0] - before < held / 100
    finally:
        tracemalloc.stop()


def test_a_name_used_again_is_another_sequence() -> None:
    drafter = LookupDrafter()
    only(drafter, View([1, 2, 3, 1, 2, 3]), 2)
    proposal = only(drafter, View([8, 9, 8]), 2)
    assert proposal is not None
    assert proposal.tokens == (9, 8)


def test_found_by_name() -> None:
    runner = EagerRunner(tiny_model("llama"), probe=False)
    assert isinstance(drafter_named("lookup", draft_context(runner)), LookupDrafter)
    assert LookupDrafter.free
