"""Log-probabilities of a prompt's own tokens, for requests that ask for them (``prompt_logprobs``).

Knows: which tokens must be read for them, and in how small parts, so that the logits of a whole prompt are never in
memory at once. Does not know: who asks, or how a forward runs.

The logits behind token i say how likely token i + 1 was. So all tokens but the last are read here, with the logits of
each; the last one is read in the sequence's first round, as any prompt's is. A token whose keys are warm has no logits:
such a sequence takes nothing from other rows (``Sequence.reusable``).
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from torch import Tensor

from ..machine.model_runner import ModelRunner
from .judge import logprob_tensors, token_logprobs
from .scheduler import Chunk
from .sequence import Sequence

__all__ = ["Scores", "read_scored"]

_MOST = 1 << 23  # numbers of logits in memory at once: 32 MiB of floats
_MOST_TOKENS = 512


@dataclass(frozen=True)
class Scores:
    """What a forward said of some tokens of one prompt. On a device it may not be there yet."""

    sequence: Sequence
    start: int  # the place of the token that was read first: the one behind it is the first that has a score
    tokens: list[int]
    values: Tensor  # [n]
    best: Tensor  # [n, k]
    ids: Tensor  # [n, k]

    def settle(self) -> None:
        """Give them to their sequence. Waits until they are there."""
        values = self.values.tolist()
        if any(value != value for value in values):
            self.sequence.end("error", "the target's numbers broke down in the prompt (NaN)")
            return
        top = self.sequence.params.prompt_logprobs or 0
        found = token_logprobs(self.tokens, values, self.best.tolist(), self.ids.tolist(), top)
        self.sequence.score(self.start + 1, found)


def read_scored(runner: ModelRunner, chunks: Seq[Chunk], vocab_size: int) -> list[Scores]:
    """Read these parts of prompts in, with the log-probability of each token but a prompt's first."""
    found: list[Scores] = []
    most = max(1, min(_MOST_TOKENS, _MOST // runner.vocab_size))
    for parts in _forwards(chunks, most):
        starts = [runner.slab.lengths[chunk.row] for chunk, _ in parts]
        logits = runner.read_all([(chunk.row, tokens) for chunk, tokens in parts])
        for (chunk, tokens), start, lines in zip(parts, starts, logits, strict=True):
            sequence = chunk.sequence
            said = sequence.tokens[start + 1 : min(start + 1 + len(tokens), sequence.prompt_length)]
            top = sequence.params.prompt_logprobs or 0
            if said:  # not of the last token: what comes behind it is the answer
                found.append(Scores(sequence, start, said, *logprob_tensors(lines[: len(said)], said, top, vocab_size)))
    return found


def _forwards(chunks: Seq[Chunk], most: int) -> Iterator[list[tuple[Chunk, list[int]]]]:
    """The chunks' tokens, ``most`` at a time; each row once in a forward."""
    parts: list[tuple[Chunk, list[int]]] = []
    room = most
    for chunk in chunks:
        at = 0
        while at < len(chunk.tokens):
            tokens = chunk.tokens[at : at + room]
            parts.append((chunk, tokens))
            at += len(tokens)
            room -= len(tokens)
            if not room:
                yield parts
                parts, room = [], most
    if parts:
        yield parts
