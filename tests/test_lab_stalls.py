"""What something else on the machine takes of an engine's time is not counted, and nothing but that."""

from __future__ import annotations

from dataclasses import replace

import pytest

from headstart.lab.figures import Measured
from headstart.lab.stalls import without_stalls
from headstart.lab.statistics import Block, ratio
from headstart.types import Round


def rounds(*milliseconds: float, width: int = 1, paid: bool = False, rows: int = 1) -> list[Round]:
    plain = Round("s", width - 1, 0, 1, rows, width, 0, 0.0, 0.0, 0.0, paid=paid)
    return [replace(plain, round_seconds=each / 1e3) for each in milliseconds for _ in range(rows)]


def block(found: list[Round]) -> Measured:
    seconds = sum(each.round_seconds / each.rows for each in found)
    return Measured((0.1,), len(found) + 1, seconds + 0.1, len(found), seconds, decoding=tuple(found))


@pytest.mark.parametrize("rows", [1, 3])
def test_a_round_that_was_held_up_counts_as_its_like(rows: int) -> None:
    clean = block(rounds(*[10.0] * 20, rows=rows))
    stalled = block(rounds(*[10.0] * 10, 150.0, *[10.0] * 9, rows=rows))
    first, second = without_stalls([clean, stalled])
    assert first == clean
    assert second.decode_seconds == pytest.approx(0.2)
    assert second.seconds == pytest.approx(0.3)


def test_what_belongs_to_the_engine_stays() -> None:
    usual = block(rounds(*[10.0] * 9) + rounds(*[30.0] * 9, width=5, paid=True))  # wider rounds take longer
    long_text = block(rounds(*[35.0] * 9))
    reading = replace(rounds(10.0)[0], round_seconds=0.4, catch_up_seconds=0.39)  # the draft read its prompt
    drafted = block([*rounds(*[10.0] * 9), reading])
    blocks = [usual, long_text, drafted]
    assert without_stalls(blocks) == blocks
    assert without_stalls([Measured((), 4, 1.0, 3, 0.5)]) == [Measured((), 4, 1.0, 3, 0.5)], "peers tell of no rounds"


def test_an_answer_that_was_held_up_hardly_moves_the_ratio() -> None:
    times = [1.0, 1.02, 0.98, 1.01]
    blocks = [Block(p, 30, times[i] * (1 + p), 30, times[i - 1] / 1.5) for i in range(4) for p in range(4)]
    sound = ratio(blocks)
    assert sound is not None
    assert sound.value == pytest.approx(1.5 * 2.5)
    for side in ("base_seconds", "seconds"):
        held_up = [replace(b, **{side: 2 * getattr(b, side)}) if i == 5 else b for i, b in enumerate(blocks)]
        found = ratio(held_up)
        assert found is not None
        assert found.value == pytest.approx(sound.value, rel=0.02)


def test_blocks_that_differ_by_themselves_are_left_alone() -> None:
    """Two blocks of a prompt say nothing of which is right, and a wide spread is no stall."""
    steady = [Block(1, 30, base, 30, 1.0) for base in (1.0, 1.01, 0.99, 1.02, 0.98)]
    two = [Block(0, 30, 1.0, 30, 1.0), Block(0, 30, 3.0, 30, 1.0)]
    assert ratio([*steady, *two]).value == pytest.approx((1.0 + 2.0) / 2)  # type: ignore[union-attr]
    wide = [Block(0, 30, base, 30, 1.0) for base in (1.0, 1.4, 1.8, 2.2, 2.6)]
    assert ratio(wide).value == pytest.approx(1.8)  # type: ignore[union-attr]
