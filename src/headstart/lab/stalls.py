"""Rounds in which something else had the processor.

Knows: how long rounds of one kind take, and which of them took much longer than their like. Does not know: engines, or
what the times are used for.

On a shared machine, and on a virtual one, an engine stands still for a tenth of a second now and then. That says
nothing about the engine, and in a short measurement it decides who was faster. A round that takes more than twice as
long as rounds of its kind did in the same answers counts as one of those. What a drafter takes to read a prompt is not
looked at: it is long, and belongs to it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from ..types import Round
from .figures import Measured
from .statistics import median

__all__ = ["without_stalls"]

TIMES = 2.0  # as long as its like, from where on a round was stalled

Kind = tuple[int, int, bool]


def without_stalls(blocks: Sequence[Measured]) -> list[Measured]:
    """The blocks of one engine, less what their rounds were held up."""
    kinds: dict[Kind, list[float]] = defaultdict(list)
    for block in blocks:
        for record in block.decoding:
            kinds[_kind(record)].append(_seconds(record))
    usual = {kind: median(seconds) for kind, seconds in kinds.items()}
    return [_steady(block, usual) for block in blocks]


def _steady(block: Measured, usual: dict[Kind, float]) -> Measured:
    pairs = [(record, _seconds(record), usual[_kind(record)]) for record in block.decoding]
    pairs = [(record, seconds, like) for record, seconds, like in pairs if seconds > 0 and like > 0]
    if not pairs:
        return block
    here = median(seconds / like for _, seconds, like in pairs)  # longer texts take longer
    lost = sum(
        (seconds - here * like) / record.rows for record, seconds, like in pairs if seconds > TIMES * here * like
    )
    return replace(block, decode_seconds=block.decode_seconds - lost, seconds=block.seconds - lost)


def _kind(record: Round) -> Kind:
    return record.rows, round(record.tokens / record.rows) if record.tokens else record.width, record.paid


def _seconds(record: Round) -> float:
    return record.round_seconds - record.catch_up_seconds
