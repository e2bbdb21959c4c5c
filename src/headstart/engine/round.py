"""One round: draft, verify, commit. This is the whole idea of the product, and it is written only here.

Knows: the order of things in a round. Does not know: how a guess is made, how a forward runs, how a rule decides.

    draft    the drafter guesses a few tokens for each sequence
    verify   ONE forward of the target over all of them, and for each row the rule that keeps its distribution
    commit   the accepted tokens and the target's own one more go into the sequence; the caches' lengths follow
    record   what happened, for whoever counts
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from time import perf_counter
from typing import NamedTuple

from torch import Tensor

from ..types import Round
from .context import RoundContext
from .judge import Batch
from .outcome import DraftFailed, Outcome, Rows, emitted
from .players import Clock, Player, judged
from .scheduler import Chunk
from .scoring import Scores, read_scored
from .sequence import Sequence
from .stats import EngineStats

__all__ = ["Reading", "begin_reading", "drain", "end_reading", "play"]


def play(
    context: RoundContext, players: Seq[Player], sequences: list[Sequence], first_row: int, *, ahead: bool = False
) -> list[Round]:
    """Play one round for ``sequences``, which sit in consecutive rows of the slab from ``first_row`` on.

    ``ahead``: nothing is about to change, so a player may launch the next round before it returns this one.
    """
    started = perf_counter()
    rows = Rows.of(context.runner.slab, sequences, first_row, ahead=ahead)
    outcome = _drafted_and_verified(context, players, rows)
    return _committed_and_recorded(context, rows, outcome, started)


def drain(context: RoundContext, players: Seq[Player], sequences: list[Sequence]) -> list[Round] | None:
    """Take in a round that was launched ahead, before rows move; None if there is none."""
    started = perf_counter()
    outcome = next(filter(None, (player.drain(sequences) for player in players)), None)
    if outcome is None:
        return None
    rows = Rows.of(context.runner.slab, sequences, 0, ahead=False)
    return _committed_and_recorded(context, rows, outcome, started)


class Reading(NamedTuple):
    """Parts of several prompts that are read, perhaps at this moment."""

    chunks: Seq[Chunk]  # but those whose log-probabilities are asked for
    scored: Seq[Chunk]  # those
    logits: Tensor  # of those that end, and perhaps others; on a device they may not be there yet
    scores: list[Scores]
    clock: Clock


def begin_reading(context: RoundContext, chunks: Seq[Chunk]) -> Reading:
    """Read parts of prompts, in one forward but for those whose log-probabilities are asked for. A device does so
    behind what it has in flight for other rows."""
    if context.captured is not None:
        context.captured.complete()
    runner, clock = context.runner, Clock(context.runner.device)
    plain, scored = [c for c in chunks if not c.scored], [c for c in chunks if c.scored]
    pieces = [(chunk.row, chunk.tokens) for chunk in plain]
    logits = runner.read(pieces, logits=any(chunk.last for chunk in plain))
    scores = read_scored(runner, scored, context.vocab_size)
    clock.stop()
    return Reading(plain, scored, logits, scores, clock)


def end_reading(context: RoundContext, reading: Reading, stats: EngineStats) -> list[Round] | None:
    """Prompts that are in to their end get their first token, or end here if they want none. The records of the first;
    None if there are none."""
    (chunks, scored, logits, scores, clock), runner = reading, context.runner
    ended = [i for i, chunk in enumerate(chunks) if chunk.last]
    seconds = clock.seconds()
    stats.prefill_tokens += sum(len(chunk.tokens) for chunk in (*chunks, *scored) if not chunk.last)
    for each in scores:
        each.settle()
    for sequence in (chunk.sequence for chunk in (*chunks, *scored) if not chunk.last):
        if sequence.remaining <= 0 and runner.slab.lengths[runner.slab.row(sequence.id)] == len(sequence.tokens):
            sequence.end("length")
    if not ended:
        stats.prefill_seconds += seconds
        return None
    sequences = [chunks[i].sequence for i in ended]
    numbers = [runner.slab.row(sequence.id) for sequence in sequences]  # others may have ended meanwhile: rows move
    behind = [len(chunks[i].tokens) for i in ended]
    logits = (logits if len(ended) == len(chunks) else logits[ended])[:, None]
    rows = Rows(sequences, numbers, [runner.slab.lengths[row] for row in numbers], behind, ahead=False)
    outcome = judged(context, logits, Batch.of(sequences, [None] * len(ended), runner.device), seconds)
    return _committed_and_recorded(context, rows, outcome, clock.started)


def _drafted_and_verified(context: RoundContext, players: Seq[Player], rows: Rows) -> Outcome:
    """By the first player that takes the round. If its draft model fails, all are asked once more, without it."""
    try:
        return next(player for player in players if player.takes(rows)).play(rows)
    except DraftFailed as failure:
        context.drop_drafter(failure.__cause__ or failure)
        return next(player for player in players if player.takes(rows)).play(rows)


def _committed_and_recorded(context: RoundContext, rows: Rows, outcome: Outcome, started: float) -> list[Round]:
    kept = _commit(context, rows, outcome)
    return _records(context, rows, outcome, kept, perf_counter() - started)


def _commit(context: RoundContext, rows: Rows, outcome: Outcome) -> list[int]:
    """Take the accepted tokens and the target's own into the sequences; the slab follows. How many each one kept."""
    slab, kept = context.runner.slab, [0] * len(rows.sequences)
    for i, (sequence, verdict) in enumerate(zip(rows.sequences, outcome.verdicts, strict=True)):
        row = rows.numbers[i]
        if sequence.finished:  # it ended in the round before, which this one was launched ahead of
            continue
        if verdict is None:
            fault = sequence.constraint.fault if sequence.constraint is not None else None
            asked = sequence.params.structured
            if fault is not None and asked is not None:
                sequence.end("error", fault, f"structured.{asked.kind}")
            else:
                sequence.end("error", fault or "the target's numbers broke down here (NaN, or no token left to draw)")
            continue
        slab.keep(row, len(sequence.tokens) - 1, [node + 1 for node in verdict.path])
        kept[i] = sequence.commit(emitted(outcome.proposals[i], verdict), verdict.origin, outcome.logprobs[i])
        slab.extend(row, sequence.tokens[slab.lengths[row] : -1])
    context.tell_drafter(lambda drafter: drafter.commit(list(rows.sequences), list(outcome.verdicts)))
    return kept


def _records(context: RoundContext, rows: Rows, outcome: Outcome, kept: Seq[int], seconds: float) -> list[Round]:
    """The telemetry of the round, a record for each sequence."""
    rounds, drafter = [], context.drafter_name
    widest = max(len(p) if p is not None else 0 for p in outcome.proposals)
    for i, (sequence, proposal) in enumerate(zip(rows.sequences, outcome.proposals, strict=True)):
        verdict = outcome.verdicts[i]
        path = verdict.path if verdict is not None else ()
        drafted = len(proposal) if proposal is not None else 0
        record = Round(
            sequence=sequence.id,
            drafted=drafted,
            accepted=min(len(path), kept[i]),
            emitted=kept[i],
            rows=len(rows.sequences),
            width=widest + 1,
            prefill=rows.behind[i],
            draft_seconds=outcome.draft_seconds,
            verify_seconds=outcome.verify_seconds,
            catch_up_seconds=outcome.catch_up_seconds,
            round_seconds=seconds,
            # Level by level: did one of the guesses hold? Only up to and with the first level where none did.
            outcomes=(True,) * len(path) + (False,) * (verdict is not None and verdict.origin == "correction"),
            strength=proposal.strength if proposal is not None else 0,
            drafter=drafter,
            paid=proposal is not None and proposal.paid,
            predicted=proposal is not None and proposal.predicted,
            forced=proposal is not None and proposal.forced,
            tokens=outcome.tokens,
        )
        if kept[i]:
            sequence.tally.add(record)
            rounds.append(record)
    return rounds
