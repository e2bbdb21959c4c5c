"""Which prompts are read together, and how much of each: a list of numbers in, a list of numbers out."""

from __future__ import annotations

import random

from headstart.machine.reading import WORTH_WAITING, shared_beginning, shares, waits_for


def test_shared_beginnings_are_found_to_the_token() -> None:
    text = list(range(300))
    for at in (0, 1, 63, 64, 65, 128, 299):
        other = list(text)
        other[at] = -1
        assert shared_beginning(text, other) == at
    assert shared_beginning(text, text[:100]) == 100
    assert shared_beginning([], text) == 0


def test_a_budget_is_used_up_and_never_passed() -> None:
    rng = random.Random(5)
    for _ in range(300):
        behind = [rng.choice((1, 5, 40, 300, 8000)) for _ in range(rng.randrange(1, 40))]
        budget = rng.choice((1, 7, 64, 512))
        given = shares(behind, budget)
        assert sum(given) == min(budget, sum(behind))
        assert all(0 <= g <= b for g, b in zip(given, behind, strict=True))
        assert given[0] >= 1, "the oldest is never passed over"


def test_a_long_prompt_holds_no_short_ones_up_nor_they_it() -> None:
    given = shares([8000] + [20] * 15, 512)
    assert given[1:] == [20] * 15
    assert given[0] == 212
    crowd = shares([8000] + [50] * 40, 512)
    assert crowd[0] == 128
    assert sum(crowd[1:]) == 384


def test_prompts_that_all_fit_are_read_in_parts_that_are_wide_enough() -> None:
    assert shares([40] * 8, 512, enough=128) == [40] * 4 + [0] * 4
    assert shares([40] * 6, 512, enough=128) == [40] * 6, "two parts would be too narrow"
    assert shares([90, 20, 30, 80, 60], 512, enough=128) == [90, 20, 30, 0, 0], "the oldest, then the shortest"
    assert shares([300, 20, 20], 512, enough=128) == [300, 0, 0], "the oldest is never passed over"
    assert shares([8000] + [20] * 15, 512, enough=128) == shares([8000] + [20] * 15, 512), "not all of them fit"
    rng = random.Random(6)
    for _ in range(300):
        behind, enough = [rng.randrange(1, 60) for _ in range(rng.randrange(1, 9))], rng.choice((1, 32, 128))
        forwards = 0
        while behind:
            given, forwards, total = shares(behind, 512, enough), forwards + 1, sum(behind)
            assert given[0] == behind[0]
            assert all(g in (0, b) for g, b in zip(given, behind, strict=True)), "whole prompts"
            assert sum(given) > min(total, enough) - 60
            behind = [b for g, b in zip(given, behind, strict=True) if not g]
        assert forwards <= 8


def test_who_shares_much_with_one_that_is_read_waits_for_it() -> None:
    long = list(range(200))
    assert waits_for([*long[:100], -1], [long], warm=0)
    assert waits_for(long, [long], warm=0), "another choice of the same request"
    assert waits_for(long[:5], [long[:5]], warm=0), "however short"
    assert not waits_for(long, [long], warm=199), "it is all there already"
    assert not waits_for([*long[: WORTH_WAITING - 1], -1, -2], [long], warm=0), "too little to wait for"
    assert not waits_for([*long[:100], -1, -2], [long], warm=80)
    assert not waits_for([-1, *long], [long], warm=0)
    assert not waits_for(long, [], warm=0)
