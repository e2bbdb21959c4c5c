"""What grammars let each node of a round's drafts go on with, and drafts cut to what they allow.

Knows: trees of drafted tokens. Does not know: how a grammar works (``types.Constraint``), or what a mask is used for.

The mask at a node follows from the drafted tokens before it; only committed tokens move a grammar. A token that the
grammar forbids has no probability with the target. One that a drafter chose deterministically is left out, with all
behind it. One that was drawn at random stays, to be rejected: leaving it out because of what it is would change the
text's distribution. What was drafted behind it goes.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from dataclasses import replace
from threading import Thread
from time import thread_time

import torch

from ..maths.bitmask import allows
from ..types import Constraint, Mask, Proposal
from .sequence import Sequence

__all__ = ["LookAhead", "held", "node_masks"]

#: seconds of masks. A thread takes a core from a forward that uses them all, and makes its other threads wait: on two
#: cores one row wrote 100 tokens a second with a thread for each round's 0.3 ms of masks, and 108 without (plain: 120).
WORTH_A_THREAD = 2e-3


def held(sequence: Sequence, proposal: Proposal | None) -> Proposal | None:
    """The proposal, cut to what the sequence's grammar allows; None: nothing is left."""
    constraint = sequence.constraint
    if constraint is None or proposal is None:
        return proposal
    drawn = proposal.draw != "point"
    if proposal.is_chain:
        return proposal.cut(constraint.fits(proposal.tokens) + drawn)
    good: list[bool] = []  # is the way to this node allowed?
    paths = _paths(proposal)
    for path, parent in zip(paths, proposal.parents, strict=True):
        good.append((parent < 0 or good[parent]) and _allowed(constraint, path))
    kept = [i for i, up in enumerate(proposal.parents) if good[i] or (drawn and (up < 0 or good[up]))]
    if len(kept) == len(proposal):
        return proposal
    number = {-1: -1} | {node: i for i, node in enumerate(kept)}
    q = None if proposal.q is None else proposal.q[kept]
    tokens, parents = (tuple(line[i] for i in kept) for line in (proposal.tokens, proposal.parents))
    return replace(proposal, tokens=tokens, parents=tuple(number[up] for up in parents), q=q) if kept else None


def node_masks(sequence: Sequence, proposal: Proposal | None) -> list[Mask | None]:
    """What may follow the last committed token, and each drafted one; None: anything. Behind a token that is not
    allowed nothing counts."""
    constraint = sequence.constraint
    if constraint is None:
        return []
    found = [constraint.mask(())]
    if proposal is not None:
        for path, parent in zip(_paths(proposal), proposal.parents, strict=True):
            above = found[parent + 1]
            dead = above is not None and not allows(above, path[-1])
            found.append(None if dead else constraint.mask(path))
    return found


class LookAhead:
    """Works masks out while a forward runs, where that pays.

    A device computes by itself, so there is nothing to do: the masks are asked for behind the launch of its forward.
    On a CPU a forward uses every core, and most masks take less time than a thread takes to start: only those of rounds
    that are known to take long get one, which a forward, needing no Python, does not hold up.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_device = device.type != "cpu"
        self._seconds = 0.0  # of a round's masks, lately

    @contextmanager
    def over(self, sequences: Seq[Sequence], proposals: Seq[Proposal | None]) -> Iterator[None]:
        """The forward of these drafts runs inside. Greedy chains on a CPU do without most masks (``judge``)."""
        late = not self._on_device and all(p is None or p.is_chain for p in proposals)
        pairs = zip(sequences, proposals, strict=True)
        masked = [(s, p) for s, p in pairs if s.constraint is not None and not (late and s.params.greedy)]
        if not masked or self._on_device:
            yield
        elif self._seconds < WORTH_A_THREAD:
            self._look(masked)
            yield
        else:
            # A thread for each round: one that is kept would have to be found again after a fork.
            thread = Thread(target=self._look, args=(masked,), name="headstart-masks", daemon=True)
            thread.start()
            try:
                yield
            finally:
                thread.join()  # also where the forward fails: nobody else may look into the grammars before

    def _look(self, masked: Seq[tuple[Sequence, Proposal | None]]) -> None:
        """The constraints keep what was worked out. What fails here fails again where the masks are used."""
        started = thread_time()
        try:
            for sequence, proposal in masked:
                node_masks(sequence, proposal)
        except Exception:
            return
        self._seconds += (thread_time() - started - self._seconds) / 8


def _paths(proposal: Proposal) -> list[tuple[int, ...]]:
    """The drafted tokens up to each node, its own the last."""
    found: list[tuple[int, ...]] = []
    for token, parent in zip(proposal.tokens, proposal.parents, strict=True):
        found.append((*(found[parent] if parent >= 0 else ()), token))
    return found


def _allowed(constraint: Constraint, path: tuple[int, ...]) -> bool:
    above = constraint.mask(path[:-1])
    return above is None or allows(above, path[-1])
