"""Why nothing is drafted, for people.

Knows: the figures that a decision rested on. Does not know: how it was made.
"""

from __future__ import annotations

from typing import NamedTuple

from ..maths.cost import break_even

__all__ = ["Figures", "too_large"]


class Figures(NamedTuple):
    """Why nothing is drafted: put into words only when somebody asks."""

    alpha: float
    plain: float  # seconds
    wider: float
    draft: float
    owing: bool  # it would pay, but drafts lost too much lately

    def __str__(self) -> str:
        even = break_even(self.wider + self.draft - self.plain, 1 / self.plain)
        plain, wider, draft = (f"{seconds * 1e3:.3g} ms" for seconds in self[1:4])
        means = "would pay, but what drafts cost lately is to be won back first" if self.owing else "does not pay now"
        must = f"and {even:.0%} must" if even <= 1 else "and all of them would not do"
        return (
            f"drafting {means}: about {self.alpha:.0%} of first guesses hold, {must}: a plain "
            f"round takes {plain}, one that verifies a drafted token {wider}, and {draft} to draft it"
        )


def too_large(share: float, most: float) -> str:
    """``share`` of the target's bytes that a draft model reads for a token, of which ``most`` could pay."""
    return (
        f"drafting does not pay: the draft model reads {share:.0%} of the bytes that the target "
        f"reads for a token, and from {most:.0%} on there is nothing to win"
    )
