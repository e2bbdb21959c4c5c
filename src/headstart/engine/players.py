"""The ways to play a round, and which of them plays it: the first in ``players`` that takes it.

    on the device     draft, verify and decide are captured; the next round may be launched before this one is read.
                      With a drafter on the host: rounds in which it has nothing to say
    drafted on host   guesses from the host (``lookup``, a head, anybody's drafter), verified and decided on the device
    step by step      everything else: trees, prompts' ends, models that cannot be captured, no GPU

Knows: who takes which round. Does not know: what becomes of its outcome (``round``).
"""

from __future__ import annotations

from dataclasses import replace
from time import perf_counter
from typing import Protocol

import torch

from ..types import TokenLogprob
from .captured import CapturedRounds
from .context import RoundContext
from .device_rows import served
from .drafting import Drafted, HostDrafts
from .judge import Batch, Logits, judge, logprobs_along
from .node_masks import LookAhead
from .outcome import Outcome, Rows, emitted
from .sequence import Sequence

__all__ = ["Clock", "Player", "judged", "players"]


class Player(Protocol):
    """One way to play a round. What it has under way on a device is its own business."""

    def takes(self, rows: Rows) -> bool:
        """Can it play the next round of these rows?"""

    def play(self, rows: Rows) -> Outcome:
        """Draft, ONE forward of the target, a verdict for each row. Called right after ``takes`` said yes."""

    def drain(self, sequences: list[Sequence]) -> Outcome | None:
        """The round that was launched ahead for these, if there is one: to be taken in before rows move."""
        return None

    def forget(self) -> None:
        """After a failure: what is under way is dropped, and nothing on the device is trusted."""
        return None


def players(context: RoundContext) -> tuple[Player, ...]:
    """All that can play here, in the order in which they are asked."""
    drafts = HostDrafts(context)
    step = StepByStep(context, drafts)
    if context.captured is None:
        return (step,)
    return (OnDevice(context, context.captured, drafts), DraftedOnHost(context.captured, drafts, step), step)


class OnDevice(Player):
    """Rounds that are captured as a whole, with the draft model's guesses or with none (``captured``, ``overlap``).

    A drafter on the host is asked while the device works, about the text as it was a round before. While it has nothing
    to say, plain rounds follow each other without waiting for it; a guess is therefore taken up a round late.
    """

    def __init__(self, context: RoundContext, rounds: CapturedRounds, drafts: HostDrafts) -> None:
        self._context, self._rounds, self._drafts = context, rounds, drafts
        self._gamma = 0  # what ``takes`` found best

    def takes(self, rows: Rows) -> bool:
        context, rounds = self._context, self._rounds
        if rows.first or rows.reading:
            return False
        self._gamma = 0
        if context.drafter is not None and rounds.drafting and any(s.params.speculate for s in rows.sequences):
            room = [context.max_gamma] * len(rows.sequences)
            self._gamma = max(context.controller.budgets(rows.sequences, room))
        if rounds.in_flight:
            return True
        here = served(rows.sequences) and rounds.fits(rows.sequences, self._gamma)
        return here and not self._guessed(rows)

    def _guessed(self, rows: Rows) -> bool:
        """Is there a guess from the host? The draft model on the device goes before all but predictions."""
        return self._drafts.predicted(rows) or (not self._rounds.drafting and self._drafts.likely(rows))

    def play(self, rows: Rows) -> Outcome:
        def ahead() -> bool:
            return rows.ahead and not self._guessed(rows)

        return self._rounds.play(rows.sequences, self._gamma, ahead=ahead)

    def drain(self, sequences: list[Sequence]) -> Outcome | None:
        return self._rounds.play(sequences, 0, ahead=lambda: False) if self._rounds.in_flight else None

    def forget(self) -> None:
        self._rounds.forget()


class StepByStep(Player):
    """Any round at all: the drafter, the target and the rule, called one after another."""

    def __init__(self, context: RoundContext, drafts: HostDrafts) -> None:
        self._context, self._drafts = context, drafts
        self._ahead = LookAhead(context.runner.device)

    def takes(self, rows: Rows) -> bool:
        return True

    def play(self, rows: Rows) -> Outcome:
        captured = self._context.captured
        # A draft model in captured rounds does not guess while a prompt is read: step by step that takes longer than
        # the captured round after it.
        idle = captured is not None and captured.drafting and rows.reading
        return self.verify(rows, Drafted([None] * len(rows.sequences)) if idle else self._drafts.take(rows))

    def verify(self, rows: Rows, drafted: Drafted) -> Outcome:
        """The target's word on these guesses."""
        context = self._context
        clock = Clock(context.runner.device)
        batch = Batch.of(rows.sequences, drafted.proposals, context.runner.device)
        with self._ahead.over(rows.sequences, drafted.proposals):
            logits = self._forward(batch, rows)
            clock.stop()
        return judged(context, logits, batch, clock.seconds(), drafted.seconds, drafted.catch_up_seconds)

    def forget(self) -> None:
        self._drafts.forget()

    def _forward(self, batch: Batch, rows: Rows) -> Logits:
        """Of each row's last committed token and its drafted ones."""
        runner, lengths = self._context.runner, rows.lengths
        slab_rows = slice(rows.first, rows.first + len(lengths))
        if runner.ragged and batch.ragged:
            return runner.forward_ragged(slab_rows, batch.lines, lengths)
        feed, topology = batch.tokens, None if batch.topology.is_chain else batch.topology
        if rows.reading:  # a first round, of one sequence: the rest of its prompt comes along in the same forward
            (sequence,), (length,) = batch.sequences, lengths
            rest = sequence.tokens[length:-1]
            if topology is None:
                feed = torch.cat([torch.tensor([rest], device=feed.device), feed], dim=1)
            else:  # a tree hangs from one token, so the prompt's end goes in before it
                runner.prefill(rows.first, rest)
                lengths = [length + len(rest)]
        return runner.forward(slab_rows, feed, lengths, topology, keep=batch.width)


class DraftedOnHost(Player):
    """Guesses from the host, sent to the device and decided there; what fits no captured round goes step by step."""

    def __init__(self, rounds: CapturedRounds, drafts: HostDrafts, step: StepByStep) -> None:
        self._rounds, self._drafts, self._step = rounds, drafts, step

    def takes(self, rows: Rows) -> bool:
        return not rows.first and not rows.reading and served(rows.sequences)

    def play(self, rows: Rows) -> Outcome:
        drafted = self._drafts.take(rows)
        found = self._rounds.judge(rows.sequences, drafted.proposals)
        if found is None:
            return self._step.verify(rows, drafted)
        proposals, seconds, catch_up = drafted.proposals, drafted.seconds, drafted.catch_up_seconds
        return replace(found, proposals=proposals, draft_seconds=seconds, catch_up_seconds=catch_up)


class Clock:
    """Times a forward: on a device itself, not its launch, nor what it waits for there."""

    def __init__(self, device: torch.device) -> None:
        self.started = perf_counter()
        self._marks = [torch.cuda.Event(enable_timing=True) for _ in "ab"] if device.type == "cuda" else []  # type: ignore[no-untyped-call]
        if self._marks:
            self._marks[0].record()
        self._stopped = 0.0

    def stop(self) -> None:
        self._stopped = perf_counter()
        if self._marks:
            self._marks[1].record()

    def seconds(self) -> float:
        """Waits until it is over."""
        if not self._marks:
            return self._stopped - self.started
        self._marks[1].synchronize()
        return float(self._marks[0].elapsed_time(self._marks[1])) / 1e3


def judged(
    context: RoundContext, logits: Logits, batch: Batch, seconds: float, draft: float = 0.0, catch_up: float = 0.0
) -> Outcome:
    """What the target's logits say of the rows; log-probabilities for those that asked for them.

    ``seconds`` that the forward took; and those of ``Drafted``.
    """
    verdicts = judge(logits, batch, context.vocab_size, context.runner.vocab_ops)
    logprobs: list[list[TokenLogprob]] = []
    for sequence, proposal, verdict, row in zip(batch.sequences, batch.proposals, verdicts, logits, strict=True):
        top, found = sequence.params.logprobs, list[TokenLogprob]()
        if top is not None and verdict is not None:
            nodes = [0, *(node + 1 for node in verdict.path)]
            found = logprobs_along(row, emitted(proposal, verdict), nodes, top, context.vocab_size)
        logprobs.append(found)
    tokens = 0 if torch.is_tensor(logits) else sum(map(len, logits))
    return Outcome(batch.proposals, verdicts, logprobs, draft, seconds, catch_up, tokens)
