"""Where has the end of this text occurred before?

Knows: an online suffix automaton over token ids. Does not know: what the tokens mean, or what is done with an answer.

A state stands for a set of strings that end at the same positions of the text. The state of the whole text links to
the state of its longest suffix that has ended somewhere else too, which is the very question; from there each link
leads to a shorter suffix that has more ends. A token costs O(1) amortised time and about half a kilobyte.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

__all__ = ["SuffixAutomaton"]

# Suffixes whose latest end is noted after each token, longest first. Only a text that repeats itself more often
# than this in a row has more; then an earlier end of a short suffix is found in place of its latest.
_NOTED = 32


class SuffixAutomaton:
    """Longest suffix that occurred before, and where it ended last. Negative ids are never drafted."""

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        self.tokens: list[int] = []
        # By state; state 0 is the empty string.
        self._length = [0]  # of its longest string
        self._link = [-1]  # the state of the longest suffix that ends elsewhere too
        self._next: list[dict[int, int]] = [{}]  # token -> state
        self._end = [-1]  # the latest position where its strings end, as of the token before the last
        self._last = 0  # the state of the whole text
        self.extend(tokens)

    def __len__(self) -> int:
        return len(self.tokens)

    def extend(self, tokens: Iterable[int]) -> None:
        """Add tokens at the end."""
        length, link, after, end = self._length, self._link, self._next, self._end  # local names: this loop is hot
        last, position = self._last, len(self.tokens) - 1
        for token in tokens:
            # Note that the suffixes of the text so far end here. Late, so that ``matches`` sees their ends before.
            state = link[last]
            for _ in range(_NOTED):
                if state <= 0:
                    break
                end[state] = position
                state = link[state]

            position += 1
            self.tokens.append(token)
            new = len(length)
            length.append(position + 1)
            after.append({})
            end.append(position)
            state, target = last, new
            while state >= 0:
                target = after[state].setdefault(token, new)
                if target != new:
                    break
                state = link[state]
            if state < 0:
                link.append(0)
            elif length[target] == length[state] + 1:
                link.append(target)
            else:
                link.append(0)
                link[new] = self._split(state, token, target)
            last = new
        self._last = last

    def _split(self, state: int, token: int, target: int) -> int:
        """Part the shorter strings of ``target``, which from now on end in one place more, from the longer ones."""
        link, after = self._link, self._next
        short = len(self._length)
        self._length.append(self._length[state] + 1)
        self._end.append(self._end[target])
        after.append(after[target].copy())
        link.append(link[target])
        link[target] = short
        while state >= 0 and after[state].get(token) == target:
            after[state][token] = short
            state = link[state]
        return short

    def matches(self) -> Iterator[tuple[int, int]]:
        """(length, end) of suffixes that occurred before, longest first, with the latest position where each ended.

        A match may overlap the end of the text. One entry for every set of earlier ends, not for every length.
        """
        state = self._link[self._last]
        while state > 0:
            yield self._length[state], self._end[state]
            state = self._link[state]

    def continuation(self, end: int, count: int) -> list[int]:
        """What followed position ``end``, up to ``count`` tokens; cut before a negative id.

        Behind the end of the text it goes on with the copy itself, as a text with that period does.
        """
        start = end + 1
        period = len(self.tokens) - start
        copied = self.tokens[start : start + count]
        if 0 < period < count:
            copied = (copied * (count // period + 1))[:count]
        return copied[: next((i for i, token in enumerate(copied) if token < 0), count)]
