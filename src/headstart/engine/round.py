"""One round: draft, verify, commit. This is the whole idea of the product, and it is written only here.

Knows: the order of things in a round. Does not know: how a guess is made, how a forward runs, how a rule decides.

    draft    the drafter guesses a few tokens for each sequence
    verify   ONE forward of the target over all of them, and for each row the rule that keeps its distribution
    commit   the accepted tokens and the target's own one more go into the sequence; the caches' lengths follow
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from time import perf_counter

import torch

from ..types import Proposal, Round, Verdict
from .captured import DraftFailed, Outcome
from .judge import Batch, judge, logprobs_along
from .parts import Parts
from .proposal_check import checked
from .sequence import Emission, Sequence

__all__ = ["Parts", "play"]


def play(parts: Parts, sequences: list[Sequence], first_row: int, *, ahead: bool = False) -> list[Round]:
    """Play one round for ``sequences``, which sit in consecutive rows of the slab from ``first_row`` on.

    ``ahead``: nothing is about to change, so a captured round may launch its successor before it returns.
    """
    started = perf_counter()
    lengths = parts.runner.slab.lengths[first_row : first_row + len(sequences)]
    # The cache always lacks the last committed token; in a sequence's first round it also lacks the prompt's end.
    behind = [len(s.tokens) - 1 - length for s, length in zip(sequences, lengths, strict=True)]

    # Draft and verify: as a recording on the device where the round fits one, step by step where it does not.
    outcome = _captured(parts, sequences, first_row, behind, ahead)
    if outcome is None:
        proposals = _draft(parts, sequences, reading=any(behind))
        drafted = perf_counter()
        if parts.captured is not None and not first_row and not any(behind):
            outcome = parts.captured.judge(sequences, proposals, drafted - started)
    if outcome is None:
        batch = Batch.of(sequences, proposals, parts.runner.device)
        logits = _forward(parts, batch, first_row, lengths, behind)
        verified = perf_counter()
        verdicts = judge(logits, batch, parts.vocab_size, parts.runner.inner)
        outcome = Outcome(proposals, verdicts, drafted - started, verified - drafted, logits)

    kept = _commit(parts, sequences, first_row, outcome)
    return _records(parts, sequences, outcome, kept, behind, perf_counter() - started)


def _commit(parts: Parts, sequences: list[Sequence], first_row: int, outcome: Outcome) -> list[int]:
    """Take the accepted tokens and the target's own into the sequences; the slab follows. How many each one kept."""
    slab, kept = parts.runner.slab, [0] * len(sequences)
    for i, (sequence, verdict) in enumerate(zip(sequences, outcome.verdicts, strict=True)):
        row = first_row + i
        if sequence.finished:  # it ended in the round before, which this one was launched ahead of
            continue
        if verdict is None:
            sequence.end("error", "the target's numbers broke down here (NaN, or no token left to draw)")
            continue
        slab.keep(row, len(sequence.tokens) - 1, [node + 1 for node in verdict.path])
        kept[i] = sequence.commit(_emissions(sequence, i, outcome, verdict, parts.vocab_size))
        slab.extend(row, sequence.tokens[slab.lengths[row] : -1])
    if parts.captured is not None and outcome.logits is None:
        parts.captured.committed(sequences, outcome)
    parts.tell_drafter(sequences, outcome.verdicts)
    return kept


def _captured(
    parts: Parts, sequences: list[Sequence], first_row: int, behind: list[int], ahead: bool
) -> Outcome | None:
    """The round as a recording on the device, or None where it does not fit there."""
    rounds = parts.captured
    if rounds is None or first_row or any(behind) or (parts.drafter is not None and not rounds.drafting):
        return None
    gamma = 0
    if parts.drafter is not None and any(s.params.speculate for s in sequences):
        room = [parts.max_gamma] * len(sequences)
        gamma = max(parts.controller.budgets(sequences, room))
    if not rounds.in_flight and not rounds.fits(sequences, gamma):
        return None
    try:
        return rounds.play(sequences, gamma, ahead=ahead)
    except DraftFailed as failure:  # before anything was launched
        parts.drop_drafter(failure.__cause__ or failure)
        return rounds.play(sequences, 0, ahead=ahead) if rounds.fits(sequences, 0) else None


def _draft(parts: Parts, sequences: list[Sequence], *, reading: bool) -> list[Proposal | None]:
    """Ask for guesses. A drafter that fails, or proposes nonsense, is dropped for good: the text goes on without it.

    ``reading``: the round also reads the end of a prompt. A draft model with recordings does not guess there: step by
    step it would take longer than the round after it.
    """
    nothing: list[Proposal | None] = [None] * len(sequences)
    if parts.drafter is None or (reading and parts.captured is not None and parts.captured.drafting):
        return nothing
    limits = [_limit(parts, sequence) for sequence in sequences]
    if not any(limits):
        return nothing
    try:
        budgets = parts.controller.budgets(sequences, limits)
        if not any(budgets):
            return nothing
        found = checked(
            parts.drafter.propose(list(sequences), list(budgets)),
            budgets,
            width=parts.runner.vocab_size,
            device=parts.runner.device,
            sound_q=parts.drafter.sound_q,
        )
        return parts.controller.trim(sequences, found)
    except Exception as error:
        parts.drop_drafter(error)
        return nothing


def _limit(parts: Parts, sequence: Sequence) -> int:
    """The most tokens worth drafting: a round emits one more than it drafts, and all must fit."""
    if not sequence.params.speculate:
        return 0
    return max(0, min(sequence.remaining, parts.max_len - len(sequence.tokens)) - 1)


def _forward(parts: Parts, batch: Batch, first_row: int, lengths: list[int], behind: list[int]) -> torch.Tensor:
    """Logits [R, N+1, V] of each row's last committed token and its drafted ones."""
    rows = slice(first_row, first_row + len(lengths))
    feed, topology = batch.tokens, None if batch.topology.is_chain else batch.topology
    if any(behind):  # a first round, of one sequence: the rest of its prompt comes along in the same forward
        (sequence,), (length,) = batch.sequences, lengths
        rest = sequence.tokens[length:-1]
        if topology is None:
            feed = torch.cat([torch.tensor([rest], device=feed.device), feed], dim=1)
        else:  # a tree hangs from one token, so the prompt's end goes in before it
            parts.runner.prefill(rows.start, rest)
            lengths = [length + len(rest)]
    logits = parts.runner.forward(rows, feed, lengths, topology, keep=batch.width)
    if logits.is_cuda:
        torch.cuda.synchronize(logits.device)  # so that the clock reads the forward, not its launch
    return logits


def _emissions(sequence: Sequence, i: int, outcome: Outcome, verdict: Verdict, vocab_size: int) -> list[Emission]:
    """The accepted tokens and the target's own, in order, with log-probabilities where they were asked for."""
    proposal = outcome.proposals[i]
    drafted = proposal.tokens if proposal is not None else ()
    tokens = [*(drafted[node] for node in verdict.path), verdict.token]
    emissions = [Emission(token, "accepted") for token in tokens]
    emissions[-1].origin = verdict.origin
    if sequence.params.logprobs is not None:
        if outcome.logits is not None:
            nodes = [0, *(node + 1 for node in verdict.path)]
            found = logprobs_along(outcome.logits[i], tokens, nodes, sequence.params.logprobs, vocab_size)
        else:
            assert outcome.logprobs is not None
            found = outcome.logprobs[i]
        for emission, logprob in zip(emissions, found, strict=True):
            emission.logprob = logprob
    return emissions


def _records(
    parts: Parts, sequences: list[Sequence], outcome: Outcome, kept: Seq[int], behind: Seq[int], seconds: float
) -> list[Round]:
    """The telemetry of the round, a record for each sequence."""
    rounds, drafter = [], parts.drafter_name
    widest = max(len(p) if p is not None else 0 for p in outcome.proposals)
    for i, (sequence, proposal) in enumerate(zip(sequences, outcome.proposals, strict=True)):
        verdict = outcome.verdicts[i]
        path = verdict.path if verdict is not None else ()
        drafted = len(proposal) if proposal is not None else 0
        record = Round(
            sequence=sequence.id,
            drafted=drafted,
            accepted=min(len(path), kept[i]),
            emitted=kept[i],
            rows=len(sequences),
            width=widest + 1,
            prefill=behind[i],
            draft_seconds=outcome.draft_seconds,
            verify_seconds=outcome.verify_seconds,
            round_seconds=seconds,
            outcomes=_outcomes(proposal, path) if proposal is not None and verdict is not None else (),
            strength=proposal.strength if proposal is not None else 0,
            drafter=drafter,
            paid=proposal is not None and proposal.paid,
        )
        if kept[i]:
            sequence.record(record)
            rounds.append(record)
    return rounds


def _outcomes(proposal: Proposal, path: tuple[int, ...]) -> tuple[bool, ...]:
    """Level by level: did one of the guesses hold? Only up to and with the first level where none did."""
    refused = (path[-1] if path else -1) in proposal.parents  # something was guessed behind the last accepted token
    return (True,) * len(path) + (False,) * refused
