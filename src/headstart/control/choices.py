"""Which guesses a round may verify, from none on, and what each such choice is expected to bring.

Knows: the chance of every guess to be reached. Does not know: seconds, or who guesses.

Where all rows of a forward are padded to the widest, a choice is a draft length for all of them. Where a forward costs
its own tokens only (``ragged``), a choice is a number of guesses: the likeliest of all rows. A guess is never likelier
than the one before it, so these are the beginnings of drafts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from ..maths.cost import round_tokens, slowest_rows, slowest_tokens

__all__ = ["Choices"]


class Choices(NamedTuple):
    """What is expected by choice. The first one verifies nothing that can be left out."""

    tokens: list[float]  # of the round
    slowest: list[float]  # of each of those rows whose first guesses hold least often
    widths: list[int]  # of the forward, as ``Costs`` counts them
    longest: list[int]  # of the drafts
    chances: Sequence[Sequence[float]]  # A_1, A_2 .. of each row's guesses
    rows: Sequence[int] = ()  # ragged: whose each guess is, in the order in which they are taken

    @staticmethod
    def by_length(chances: Sequence[Sequence[float]], share: float, *, ragged: bool = False) -> Choices:
        """One draft length for all rows. ``share`` of them are the slowest."""
        tokens = round_tokens(chances)
        lengths = list(range(len(tokens)))
        widths = [1 + (sum(min(length, len(row)) for row in chances) if ragged else length) for length in lengths]
        return Choices(tokens, slowest_tokens(chances, share), widths, lengths, chances)

    @staticmethod
    def by_guess(chances: Sequence[Sequence[float]], share: float, fixed: Sequence[bool] = ()) -> Choices:
        """The likeliest guesses. ``fixed`` rows' are verified whatever is chosen."""
        given = list(fixed) or [False] * len(chances)
        # Sorting is stable: guesses of a row that are equally likely stay in their order.
        guesses = sorted(
            ((row, depth, chance) for row, each in enumerate(chances) for depth, chance in enumerate(each, 1)),
            key=lambda guess: (not given[guess[0]], -guess[2]),
        )
        slow = set(slowest_rows(chances, share))
        tokens = accumulate((chance for _, _, chance in guesses), initial=float(len(chances)))
        slowest = accumulate((chance * (row in slow) / len(slow) for row, _, chance in guesses), initial=1.0)
        longest = accumulate((depth for _, depth, _ in guesses), max, initial=0)
        first = sum(len(each) for each, whole in zip(chances, given, strict=True) if whole)
        widths = range(1 + first, len(guesses) + 2)
        taken = [row for row, _, _ in guesses]
        return Choices(list(tokens)[first:], list(slowest)[first:], list(widths), list(longest)[first:], chances, taken)

    def lengths(self, choice: int) -> list[int]:
        """How many guesses of each row are verified."""
        if not self.rows:
            return [min(self.longest[choice], len(row)) for row in self.chances]
        taken = Counter(self.rows[: self.widths[choice] - 1])
        return [taken[row] for row in range(len(self.chances))]

    def lagging(self, apart: float) -> list[float]:
        """Expected tokens of each of the slowest rows, where rows really differ by this share of what they seem to."""
        means = (each / len(self.chances) for each in self.tokens)
        return [mean + apart * (slow - mean) for mean, slow in zip(means, self.slowest, strict=True)]

    def shortened(self, guesses: int) -> Choices:
        """Those with at most so many guesses, but never only the first."""
        last = max(2, guesses + 1)
        return Choices(
            self.tokens[:last], self.slowest[:last], self.widths[:last], self.longest[:last], self.chances, self.rows
        )
