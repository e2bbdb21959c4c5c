"""Is what a drafter proposes a proposal at all? Asked once, where it enters the engine, before anything runs.

Knows: what forwards, kernels and rules rely on without looking again: lengths, ids, real trees, real distributions.
Does not know: whether a guess is any good, or who made it.

Ids, parents and lengths are used as indexes from here on. A wrong one would end the CUDA context on a GPU and read
past the end of memory in C++; a wrong q would go unnoticed and change the text's distribution.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence, Sized
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from ..maths.chance import sound
from ..types import Proposal

__all__ = ["BadProposal", "checked"]


class BadProposal(ValueError):
    """A drafter proposed something that cannot be a draft."""


def checked(
    proposals: object, budgets: Sequence[int], *, width: int, device: torch.device, sound_q: bool
) -> list[Proposal | None]:
    """The proposals, put into their proper types; ``BadProposal`` if one of them cannot be right.

    ``width``: V of the target's logits (ids past the tokenizer's are allowed: the target just never says them).
    ``sound_q``: the values of q come from our own sampler and are not looked at, only its shape is.
    """
    if not isinstance(proposals, (list, tuple)):
        raise BadProposal(f"it gave back {_kind(proposals)} where a list of proposals was asked for")
    if len(proposals) != len(budgets):
        raise BadProposal(f"it gave back {len(proposals)} proposals for {len(budgets)} sequences")
    return [
        None if p is None else _checked(p, budget, width, device, sound_q)
        for p, budget in zip(proposals, budgets, strict=True)
    ]


def _checked(p: object, budget: int, width: int, device: torch.device, sound_q: bool) -> Proposal | None:
    if not isinstance(p, Proposal):
        raise BadProposal(f"it proposed {_kind(p)}, not a Proposal")
    tokens = _whole(p.tokens, "tokens", budget + 1)
    count = len(tokens)
    if not count:
        return None  # a guess of nothing is no guess
    if count > budget:
        said = len(p.tokens) if isinstance(p.tokens, Sized) else f"{count} or more"
        raise BadProposal(f"it proposed {said} tokens where at most {budget} were asked for")
    if min(tokens) < 0 or max(tokens) >= width:
        wrong = next(token for token in tokens if not 0 <= token < width)
        raise BadProposal(f"it proposed token {wrong}, which is outside of the vocabulary of {width}")
    parents = _whole(p.parents, "parents", count + 1)
    if len(parents) != count:
        raise BadProposal(f"it proposed {count} tokens with {len(parents)} parents")
    if parents != tuple(range(-1, count - 1)):
        for child, parent in enumerate(parents):
            if not -1 <= parent < child:
                rule = "a parent stands before its child, or is -1"
                raise BadProposal(f"its token {child} names parent {parent}; {rule}")
    (strength,) = _whole((p.strength,), "strength", 1)
    if strength < 0:
        raise BadProposal(f"its strength is {strength}; 0 is the least")
    q = _checked_q(p, tokens, parents, width, device, sound_q)
    if type(p) is Proposal and tokens is p.tokens and parents is p.parents and q is p.q and strength is p.strength:
        return p
    return Proposal(tokens, parents, q, p.draw, strength, bool(p.paid), bool(p.predicted), bool(p.forced))


def _whole(values: Any, name: str, most: int) -> tuple[int, ...]:
    """A tuple of Python's own whole numbers. NumPy's and torch's become some; truth values and fractions are none.
    At most the first ``most`` are read: an iterator may have no end."""
    if type(values) is tuple and set(map(type, values)) <= {int}:
        return values
    if not isinstance(values, Iterable) or isinstance(values, (str, bytes)):
        raise BadProposal(f"its {name} are {_kind(values)}, not a tuple of whole numbers")
    found = []
    for value in islice(values, most):
        if isinstance(value, bool) or not hasattr(value, "__index__"):
            raise BadProposal(f"its {name} hold {value!r}, which is no whole number")
        try:
            found.append(operator.index(value))
        except TypeError:  # a tensor of fractions, or of several numbers
            raise BadProposal(f"its {name} hold {value!r}, which is no whole number") from None
    return tuple(found)


def _checked_q(
    p: Proposal, tokens: tuple[int, ...], parents: tuple[int, ...], width: int, device: torch.device, sound_q: bool
) -> Tensor | None:
    """q [n, V] where the target's logits are; None for deterministic tokens."""
    if p.draw == "point":
        if p.q is not None:
            raise BadProposal("it gave a q for tokens that it calls deterministic (draw='point')")
        return None
    if p.draw not in ("iid", "distinct"):
        raise BadProposal(f"its tokens were drawn {p.draw!r}; 'point', 'iid' and 'distinct' are known")
    q, count = p.q, len(tokens)
    if not isinstance(q, Tensor):
        raise BadProposal(f"its tokens were drawn at random, but its q is {_kind(q)}, not a tensor")
    if tuple(q.shape) != (count, width):
        raise BadProposal(
            f"its q is {list(q.shape)}; {count} tokens over a vocabulary of {width} need [{count}, {width}]"
        )
    if q.dtype not in (torch.float32, torch.float64) or q.layout is not torch.strided:
        raise BadProposal(f"its q is {q.dtype} ({q.layout}); a dense float32 is needed: others do not sum to 1")
    if p.draw == "distinct" and len(set(zip(parents, tokens, strict=True))) < count:
        raise BadProposal("two of its siblings are the same token, though they were drawn without replacement")
    if sound_q:
        return q
    q = q.detach().to(device) if q.requires_grad or q.device != device else q
    drawn = q.gather(1, torch.tensor(tokens, device=device)[:, None])
    facts = torch.stack([q.min() >= 0, sound(q).all(), drawn.min() > 0])  # NaN compares False
    for fine, fault in zip(facts.tolist(), _Q_FAULTS, strict=True):
        if not fine:
            raise BadProposal(fault)
    return q


_Q_FAULTS = (
    "its q holds a negative probability or NaN",
    "its q does not sum to 1",
    "it proposed a token that has probability 0 in its own q",
)


def _kind(value: object) -> str:
    return "None" if value is None else f"a {type(value).__name__}"
