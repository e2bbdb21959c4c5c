"""The inner loops over the vocabulary, which a machine may have faster versions of.

Knows: their plain forms. Does not know: any machine; whoever has faster ones passes a ``VocabOps`` of its own, whose
functions must give what these give: the same law, the same noise, the same order among equals. A float may differ in
its last bits, so a token at the very edge of a nucleus may fall on either side, and a race that is all but even may go
the other way. One ``VocabOps`` must not contradict itself: what it says of a row may not depend on the row's company,
or coupled drafts would change the text.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

from torch import Tensor

from ..types import Mask, SamplingParams, Verification
from . import noise
from .argmax import argmax
from .asks import Asks, Served
from .bitmask import masked
from .warp import Warp

__all__ = ["PLAIN", "ChainReject", "DraftedChain", "RowDraw", "Rule", "VocabOps"]

Rule = Literal["greedy"] | Verification


class DraftedChain(NamedTuple):
    """One row's draft as the host knows it: all that a verdict on it rests on, besides the logits."""

    params: SamplingParams
    rule: Rule
    seed: int
    committed: Sequence[int]  # prompt and output so far
    prompt_length: int
    tokens: Sequence[int]  # the N drafted ones
    q: Tensor | None = None  # [N, V] what they were drawn from; None: a point draft
    endings: Collection[int] = ()  # what min_tokens holds back
    masks: Sequence[Mask | None] = ()  # what may follow each of the N+1 nodes, None: anything; empty: no grammar


def _keys(seed: Tensor, base: Tensor, offset: Tensor | int, stream: Tensor | int) -> noise.Keys:
    return noise.keys(seed, base, offset, stream)  # looked up at each call, so that a test can plant another


class RowDraw(Protocol):
    """The distribution of each row's next token, and a token of it."""

    def __call__(self, x: Tensor, warp: Warp, words: noise.Keys, into: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """q [R, V] and tokens [R] of logits x [R, V], with the noise of two words [R]. q may be written to ``into``,
        lines of a wider tensor, and is then that very tensor."""


class ChainReject(Protocol):
    """``verify.chain_rules`` on drawn chains with ``CounterChance``, in a few launches instead of a hundred."""

    def __call__(
        self, p: Tensor, q: Tensor, tokens: Tensor, limits: Tensor, block: Tensor, seeds: Tensor, base: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Accepted [R], token [R] and ok [R] of R chains: p [R, N+1, V], q [R, N, V], tokens [R, N+1], N at least 1.

        limits [R] int64: drafted tokens that count; block [R]: not 0 for the block rule; seeds, base [R] int64.
        """


@dataclass(frozen=True)
class VocabOps:
    """What everything sampled goes through."""

    argmax: Callable[[Tensor], Tensor] = argmax
    #: the same, but -1 where the largest is not a finite number; None: by ``argmax``
    peaks: Callable[[Tensor], Tensor] | None = None
    race: Callable[[Tensor, noise.Keys], Tensor] = noise.race
    #: logits [R, N, V] without the tokens whose bits [R, N, W] int32 are not set
    masked: Callable[[Tensor, Tensor], Tensor] = masked
    keys: Callable[[Tensor, Tensor, Tensor | int, Tensor | int], noise.Keys] = _keys
    #: temperature, truncation and softmax of logits [R, N, V]; None: ``distribution``'s own
    sampled: Callable[[Tensor, Warp], Tensor] | None = None
    #: the same of logits [R, V], and a token of each by ``race``; None: one after the other
    drawn: RowDraw | None = None
    samples: Served | None = None  # what those two serve, and what is done around them; None: nothing
    #: the rejection rules on chains whose rows all are rejection sampled; None: ``verify``'s own
    rejected: ChainReject | None = None
    #: These two take one chain's logits [N+1, V] float32, where tensors of a few numbers each take too long. Both or
    #: neither; None: ``distribution`` and ``verify``'s rules.
    #: How many drafted tokens are accepted, and the target's own (-1: its numbers are broken), of processed logits,
    #: which have no mask on them yet.
    judged: Callable[[Tensor, DraftedChain], tuple[int, int]] | None = None
    #: bias, min_tokens and penalties: ``distribution.processed`` for a row; a new tensor
    processed: Callable[[Tensor, DraftedChain], Tensor] | None = None
    judges: Served | None = None  # what those two serve

    def takes(self, asks: Asks) -> bool:
        """Do ``sampled`` and ``drawn`` serve all that is asked for?"""
        return self.samples is not None and self.samples.takes([asks])


PLAIN = VocabOps()
