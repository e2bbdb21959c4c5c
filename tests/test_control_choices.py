"""What a round may verify, and what each choice brings: draft lengths, or the likeliest guesses of ragged rounds."""

from __future__ import annotations

from itertools import product

import pytest

from headstart.control.choices import Choices
from headstart.control.costs import Costs
from headstart.types import Round

ROWS = ([0.9, 0.8, 0.1], [0.5], [], [0.7, 0.6, 0.55, 0.5])


def brought(lengths: list[int]) -> float:
    return len(ROWS) + sum(sum(row[:n]) for row, n in zip(ROWS, lengths, strict=True))


def test_as_many_guesses_as_are_likeliest_together() -> None:
    found = Choices.by_guess(ROWS, 0.25)
    assert found.widths == list(range(1, 10))
    everyone = [range(len(row) + 1) for row in ROWS]
    for choice, width in enumerate(found.widths):
        lengths = found.lengths(choice)
        assert sum(lengths) == width - 1
        assert found.longest[choice] == max(lengths)
        assert found.tokens[choice] == pytest.approx(brought(lengths))
        best = max(brought(list(each)) for each in product(*everyone) if sum(each) == width - 1)
        assert found.tokens[choice] == pytest.approx(best), "no other choice of as many guesses brings more"


def test_the_slowest_are_those_whose_first_guesses_hold_least() -> None:
    found = Choices.by_guess(ROWS, 0.5)  # the third, which has none, and the second
    for choice in range(len(found.widths)):
        assert found.slowest[choice] == pytest.approx((2 + 0.5 * found.lengths(choice)[1]) / 2)


def test_rows_that_are_verified_whole_come_first() -> None:
    found = Choices.by_guess(ROWS, 0.25, [False, False, False, True])
    assert found.lengths(0) == [0, 0, 0, 4]
    assert found.lengths(1) == [1, 0, 0, 4]
    assert found.lengths(len(found.widths) - 1) == [3, 1, 0, 4]
    assert found.tokens[0] == pytest.approx(4 + 2.35)


def test_one_length_for_all_counts_guesses_on_ragged_forwards() -> None:
    padded, ragged = Choices.by_length(ROWS, 0.25), Choices.by_length(ROWS, 0.25, ragged=True)
    assert padded.widths == [1, 2, 3, 4, 5]
    assert ragged.widths == [1, 4, 6, 8, 9]
    assert padded.tokens == ragged.tokens
    assert ragged.lengths(2) == [2, 1, 0, 2]


def test_no_more_guesses_than_were_kept_lately_are_counted_on() -> None:
    found = Choices.by_guess(ROWS, 0.25)
    assert found.shortened(3).widths == [1, 2, 3, 4]
    assert found.shortened(0).widths == [1, 2], "one is always looked at"
    assert found.shortened(99) == found


# -- what ragged rounds cost


def seen(costs: Costs, rows: int, drafted: int, seconds: float, times: int = 5) -> None:
    widest = 1 + drafted  # all of one row
    record = Round("a", drafted, 0, 1, rows, widest, 0, 0.0, seconds, seconds, tokens=(rows + drafted) * (drafted > 0))
    for _ in range(times):
        costs.add(rows, costs.width(record), seconds)


def test_a_ragged_round_costs_its_own_tokens() -> None:
    costs, padded = Costs(ragged=True), Costs()
    for each in (costs, padded):
        seen(each, 8, 0, 0.050)
        seen(each, 8, 4, 0.058)
        seen(each, 8, 8, 0.066)
    assert costs.seconds(8, [1, 5, 9]) == pytest.approx([0.050, 0.058, 0.066])
    assert costs.seconds(8, [3, 7]) == pytest.approx([0.054, 0.062]), "between them on a line"
    assert padded.forwards(8, 5)[4] == pytest.approx(0.058), "by the widest row"


def test_widths_of_many_guesses_are_measured_together() -> None:
    costs = Costs(ragged=True)
    seen(costs, 8, 0, 0.050)
    for drafted in range(33, 43):  # each once: none of them would count
        seen(costs, 8, drafted, 0.050 + 0.002 * drafted, times=1)
    assert len(costs.table(8)) > 2
    assert costs.seconds(8, [38])[0] == pytest.approx(0.050 + 0.002 * 37, rel=0.05)


def test_before_a_wide_round_was_seen_a_token_costs_the_same_either_way() -> None:
    for rows in (1, 8, 32):
        costs, padded = Costs(ragged=True), Costs()
        for each in (costs, padded):
            seen(each, rows, 0, 0.050)
        assert costs.seconds(rows, [1 + rows]) == pytest.approx(padded.forwards(rows, 2)[1:])
        for each in (costs, padded):
            each.read(512, 3.0)  # very slow, the first time: nothing is believed beyond a limit
        assert costs.seconds(rows, [1 + rows]) == pytest.approx(padded.forwards(rows, 2)[1:])


def test_a_token_more_costs_something_however_rounds_scatter() -> None:
    """Two more tokens than in a plain round are hard to time; that wider rounds take longer says that they do, too."""
    costs = Costs(ragged=True)
    for drafted, seconds in ((0, 0.0502), (1, 0.0501), (2, 0.0499), (8, 0.066), (9, 0.068)):
        seen(costs, 8, drafted, seconds)
    plain, one, two = costs.seconds(8, [1, 2, 3])
    assert one - plain >= 0.0005
    assert two - plain >= 0.001
