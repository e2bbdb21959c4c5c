"""Grammars for tests over small vocabularies: a function of the text, and its law."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import numpy as np
import torch

from headstart.maths.bitmask import allows
from headstart.types import Constraint, Grammar, Mask

#: the output so far -> the tokens that may follow; None: anything; none at all: the text ends
Follow = Callable[[tuple[int, ...]], Collection[int] | None]


def packed(tokens: Collection[int], size: int) -> Mask:
    row = np.zeros((size + 31) // 32, np.uint32)
    for token in tokens:
        row[token >> 5] |= np.uint32(1 << (token & 31))
    return row


class ToyState(Constraint):
    """Follows a function of the text. ``moves`` is the bug to plant: being asked about a draft moves it."""

    fault = None

    def __init__(self, follow: Follow, size: int, moves: bool = False) -> None:
        self.follow, self.size, self.moves = follow, size, moves
        self.text: tuple[int, ...] = ()
        self.asked: list[tuple[int, ...]] = []

    @property
    def over(self) -> bool:
        found = self.follow(self.text)
        return found is not None and not found

    def take(self, token: int) -> None:
        self.text += (token,)

    def mask(self, drafted: tuple[int, ...]) -> Mask | None:
        self.asked.append(drafted)
        found = self.follow(self.text + drafted)
        if self.moves:
            self.text += drafted[-1:]
        return None if not found else packed(found, self.size)

    def allows(self, drafted: tuple[int, ...], token: int) -> bool:
        self.asked.append(drafted)
        found = self.follow(self.text + drafted)
        if self.moves:
            self.text += drafted[-1:]
        return not found or token in found

    def fits(self, drafted: Sequence[int]) -> int:
        for count, token in enumerate(drafted):
            found = self.follow((*self.text, *drafted[:count]))
            if found is not None and token not in found:
                return count
        return len(drafted)

    def forced(self, most: int, drafted: tuple[int, ...] = ()) -> tuple[int, ...]:
        text, line = self.text + drafted, tuple[int, ...]()
        while len(line) < most and (found := self.follow(text + line)) is not None and len(found) == 1:
            line += tuple(found)
        return line


class Toy(Grammar):
    def __init__(self, follow: Follow, size: int, *, moves: bool = False) -> None:
        self.follow, self.size, self.moves = follow, size, moves
        self.made: list[ToyState] = []

    def begin(self, *, endings: frozenset[int], min_tokens: int) -> ToyState:
        self.made.append(ToyState(self.follow, self.size, self.moves))
        return self.made[-1]


def masked_law(
    logits: Callable[[tuple[int, ...]], torch.Tensor], follow: Follow, length: int
) -> dict[tuple[int, ...], float]:
    """The exact law of at most ``length`` tokens under a grammar, by plain recursion."""
    law: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(length):
        longer: dict[tuple[int, ...], float] = {}
        for prefix, mass in law.items():
            found = follow(prefix)
            if found is not None and not found:
                longer[prefix] = longer.get(prefix, 0.0) + mass
                continue
            row = logits(prefix).double().clone()
            if found is not None:
                row[[token for token in range(len(row)) if token not in found]] = -torch.inf
            for token, chance in enumerate(row.softmax(-1).tolist()):
                if chance:
                    longer[*prefix, token] = mass * chance
        law = longer
    return law


__all__ = ["Follow", "Toy", "ToyState", "allows", "masked_law", "packed"]
