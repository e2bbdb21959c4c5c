"""Reads parts of several prompts in one forward; a prompt that is in to its end gets its first token.

Knows: what the scheduler wants read. Does not know: why these and not others (``scheduler``).
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from time import perf_counter

import torch

from ..types import Round
from .context import RoundContext
from .judge import Batch, judge
from .outcome import Outcome, Rows
from .players import logprobs_of
from .round import first_tokens
from .scheduler import Chunk
from .stats import EngineStats

__all__ = ["read"]


def read(parts: RoundContext, chunks: Seq[Chunk], stats: EngineStats) -> list[Round] | None:
    """The records of the prompts that end here; None if none does."""
    started, runner = perf_counter(), parts.runner
    ended = [i for i, chunk in enumerate(chunks) if chunk.last]
    logits = runner.read([(chunk.row, chunk.tokens) for chunk in chunks], logits=bool(ended))
    if logits.is_cuda:
        torch.cuda.synchronize(logits.device)  # so that the clock reads the forward, not its launch
    seconds = perf_counter() - started
    stats.prefill_tokens += sum(len(chunk.tokens) for chunk in chunks if not chunk.last)
    if not ended:
        stats.prefill_seconds += seconds
        return None
    sequences = [chunks[i].sequence for i in ended]
    batch = Batch.of(sequences, [None] * len(ended), runner.device)
    logits = (logits if len(ended) == len(chunks) else logits[ended])[:, None]
    verdicts = judge(logits, batch, parts.vocab_size, runner.vocab_ops)
    behind = [len(chunks[i].tokens) for i in ended]
    numbers = [chunks[i].row for i in ended]
    rows = Rows(sequences, numbers, [runner.slab.lengths[row] for row in numbers], behind, ahead=False)
    outcome = Outcome(batch.proposals, verdicts, logprobs_of(logits, batch, verdicts, parts.vocab_size), 0.0, seconds)
    return first_tokens(parts, rows, outcome, perf_counter() - started)
