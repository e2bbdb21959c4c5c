"""A running answer's tokens, which everybody may read and only the engine may add to.

Knows: how to refuse. Does not know: who asks.

Drafters are handed the live list, because a copy of a long text in every round would cost more than many a draft. They
must not change it: the target's cache and the text that goes out are counted by it. So the list itself says no.
"""

from __future__ import annotations

from typing import Any, NoReturn

__all__ = ["Committed"]


class Committed(list[int]):
    """Prompt and committed output, in order. Reads as any list does; slices and copies are plain lists of their own."""

    def take(self, token: int) -> None:
        """The engine's way to add one."""
        super().append(token)

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise TypeError("the tokens of a view are only to be read; take a copy, list(view.tokens), to change it")

    append = extend = insert = pop = remove = clear = sort = reverse = _refuse
    __setitem__ = __delitem__ = __iadd__ = __imul__ = _refuse

    def __reduce_ex__(self, protocol: Any) -> tuple[type[list[int]], tuple[list[int]]]:
        return list, (list(self),)
