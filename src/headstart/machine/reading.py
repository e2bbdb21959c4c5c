"""How several prompts are read together: who goes first, how much of each, and who had better wait for a neighbour.

Knows: token lists and a budget. Does not know: rows, models, requests.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

__all__ = ["WORTH_WAITING", "shared_beginning", "shares", "waits_for"]

WORTH_WAITING = 32  # a shared beginning of so many tokens is copied from a neighbour rather than computed again
_OLDEST = 4  # the oldest prompt gets at least this part of a forward, however many shorter ones arrive


def shared_beginning(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens two texts have in common at their beginnings."""
    most = min(len(a), len(b))
    low = 0
    while low < most:  # whole stretches are compared at a time: a list's own comparison is quick
        stretch = min(64, most - low)
        if list(a[low : low + stretch]) != list(b[low : low + stretch]):
            return low + next(i for i in range(stretch) if a[low + i] != b[low + i])
        low += stretch
    return most


def waits_for(prompt: Sequence[int], others: Iterable[Sequence[int]], warm: int) -> bool:
    """Should this prompt wait until one of ``others``, which are being read, is in? Then it copies what they share.

    ``warm``: how much of it is there already. A prompt that is all shared (another choice of the same request) always
    waits.
    """
    last = len(prompt) - 1  # the last token is fed in any case
    for other in others:
        shared = min(shared_beginning(prompt, other), last)
        if shared > warm and (shared - warm >= WORTH_WAITING or shared == last):
            return True
    return False


def shares(behind: Sequence[int], budget: int, enough: int | None = None) -> list[int]:
    """How many tokens of each prompt go into a forward of ``budget`` tokens; ``behind``: what each lacks, oldest first.

    The shortest first, so that a long prompt holds no short ones up; and a part of it for the oldest in any case, so
    that short ones that keep arriving do not hold up the long one.

    ``enough``: a forward of so many tokens takes hardly longer for each than a wider one. Prompts that all fit into the
    budget are then read in parts of at least that size, the oldest first: some have their first token before the rest
    is read, and whoever comes meanwhile joins the next part, instead of waiting for all of them.
    """
    given = [0] * len(behind)
    if not behind:
        return given
    given[0] = min(behind[0], max(1, budget // _OLDEST))
    left = budget - given[0]
    order = sorted(range(len(behind)), key=lambda i: (behind[i], i))
    for i in order:
        more = min(behind[i] - given[i], left)
        given[i] += more
        left -= more
    parts = sum(behind) // enough if enough and sum(given) == sum(behind) else 1
    if parts > 1:
        room = sum(behind) / parts - behind[0]
        for i in order:
            if i and room < behind[i]:
                given[i] = 0
            elif i:
                room -= behind[i]
    return given
