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

from ..types import Round, Verdict
from .context import RoundContext
from .outcome import DraftFailed, Outcome, Rows
from .players import Player
from .sequence import Emission, Sequence

__all__ = ["drain", "first_tokens", "play"]


def play(
    parts: RoundContext, players: Seq[Player], sequences: list[Sequence], first_row: int, *, ahead: bool = False
) -> list[Round]:
    """Play one round for ``sequences``, which sit in consecutive rows of the slab from ``first_row`` on.

    ``ahead``: nothing is about to change, so a player may launch the next round before it returns this one.
    """
    started = perf_counter()
    rows = Rows.of(parts.runner.slab, sequences, first_row, ahead=ahead)
    outcome = _drafted_and_verified(parts, players, rows)
    kept = _commit(parts, rows, outcome)
    return _records(parts, rows, outcome, kept, perf_counter() - started)


def drain(parts: RoundContext, players: Seq[Player], sequences: list[Sequence]) -> list[Round] | None:
    """Take in a round that was launched ahead, before rows move; None if there is none."""
    started = perf_counter()
    outcome = next(filter(None, (player.drain(sequences) for player in players)), None)
    if outcome is None:
        return None
    rows = Rows.of(parts.runner.slab, sequences, 0, ahead=False)
    kept = _commit(parts, rows, outcome)
    return _records(parts, rows, outcome, kept, perf_counter() - started)


def first_tokens(parts: RoundContext, rows: Rows, outcome: Outcome, seconds: float) -> list[Round]:
    """The end of a round in which several prompts were read in: each gets its first token."""
    return _records(parts, rows, outcome, _commit(parts, rows, outcome), seconds)


def _drafted_and_verified(parts: RoundContext, players: Seq[Player], rows: Rows) -> Outcome:
    """By the first player that takes the round. If its draft model fails, all are asked once more, without it."""
    try:
        return next(player for player in players if player.takes(rows)).play(rows)
    except DraftFailed as failure:
        parts.drop_drafter(failure.__cause__ or failure)
        return next(player for player in players if player.takes(rows)).play(rows)


def _commit(parts: RoundContext, rows: Rows, outcome: Outcome) -> list[int]:
    """Take the accepted tokens and the target's own into the sequences; the slab follows. How many each one kept."""
    slab, kept = parts.runner.slab, [0] * len(rows.sequences)
    for i, (sequence, verdict) in enumerate(zip(rows.sequences, outcome.verdicts, strict=True)):
        row = rows.numbers[i]
        if sequence.finished:  # it ended in the round before, which this one was launched ahead of
            continue
        if verdict is None:
            sequence.end("error", "the target's numbers broke down here (NaN, or no token left to draw)")
            continue
        slab.keep(row, len(sequence.tokens) - 1, [node + 1 for node in verdict.path])
        kept[i] = sequence.commit(_emissions(outcome, i, verdict))
        slab.extend(row, sequence.tokens[slab.lengths[row] : -1])
    parts.tell_drafter(rows.sequences, outcome.verdicts)
    return kept


def _emissions(outcome: Outcome, i: int, verdict: Verdict) -> list[Emission]:
    """The accepted tokens and the target's own, in order, with log-probabilities where they were asked for."""
    proposal = outcome.proposals[i]
    drafted = proposal.tokens if proposal is not None else ()
    emissions = [Emission(drafted[node], "accepted") for node in verdict.path]
    emissions.append(Emission(verdict.token, verdict.origin))
    for emission, logprob in zip(emissions, outcome.logprobs[i], strict=False):
        emission.logprob = logprob
    return emissions


def _records(parts: RoundContext, rows: Rows, outcome: Outcome, kept: Seq[int], seconds: float) -> list[Round]:
    """The telemetry of the round, a record for each sequence."""
    rounds, drafter = [], parts.drafter_name
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
            outcomes=_outcomes(verdict) if proposal is not None and verdict is not None else (),
            strength=proposal.strength if proposal is not None else 0,
            drafter=drafter,
            paid=proposal is not None and proposal.paid,
        )
        if kept[i]:
            sequence.record(record)
            rounds.append(record)
    return rounds


def _outcomes(verdict: Verdict) -> tuple[bool, ...]:
    """Level by level: did one of the guesses hold? Only up to and with the first level where none did."""
    return (True,) * len(verdict.path) + (False,) * (verdict.origin == "correction")
