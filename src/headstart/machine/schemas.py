"""JSON schemas said so that llguidance keeps them.

Knows: what it takes otherwise than JSON Schema says. Does not know: grammars, tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, TypeGuard

__all__ = ["exact_bounds"]

_DATA = ("const", "enum", "default", "examples")  # these hold no schemas
#: the bound that counts, which way the next number lies, and the bounds on the other side
_SIDES = {
    "exclusiveMinimum": ("minimum", 1.0, ("maximum", "exclusiveMaximum")),
    "exclusiveMaximum": ("maximum", -1.0, ("minimum", "exclusiveMinimum")),
}
_SMALL = 1e-15  # next to 0, where doubles have hundreds of digits


def exact_bounds(schema: Any) -> Any:
    """The same schema, but where a whole number is a bound that does not count, and the other bound begins like it:
    there the next number is a bound that counts. llguidance 1.9 lets 10 through for above 10 and at most 10.25."""
    if isinstance(schema, (list, tuple)):
        return [exact_bounds(part) for part in schema]
    if not isinstance(schema, Mapping):
        return schema
    found = {key: part if key in _DATA else exact_bounds(part) for key, part in schema.items()}
    for name, (bound, towards, others) in _SIDES.items():
        value = found.get(name)
        if _number(value) and value == int(value) and value * towards >= 0 and bound not in found:
            ends = [found[other] for other in others if _number(found.get(other))]
            if any(abs(end - value) < 1 for end in ends):
                del found[name]
                found[bound] = math.nextafter(value, towards * math.inf) if value else math.copysign(_SMALL, towards)
    return found


def _number(value: Any) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e15
