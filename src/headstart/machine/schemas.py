"""JSON schemas said so that llguidance keeps them, and so that small models get to an end.

Knows: what it takes otherwise than JSON Schema says, and how long texts of a format may be. Does not know: grammars,
tokens.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, TypeGuard

__all__ = ["adapted"]

_DATA = ("const", "enum", "default", "examples")  # these hold no schemas
_NAMED = ("properties", "patternProperties", "dependentSchemas", "$defs", "definitions")  # these hold them by name
#: the bound that counts, which way the next number lies, and the bounds on the other side
_SIDES = {
    "exclusiveMinimum": ("minimum", 1.0, ("maximum", "exclusiveMaximum")),
    "exclusiveMaximum": ("maximum", -1.0, ("minimum", "exclusiveMinimum")),
}
_SMALL = 1e-15  # next to 0, where doubles have hundreds of digits

_NANOSECONDS = r"^[^.]*(\.[0-9]{1,9}([^0-9].*)?)?$"
#: What llguidance lets grow without an end: a model that begins a URI with words could never come to its colon, nor an
#: address to its "@". Lengths are those of RFC 1123 and 5321; the longest registered scheme of a URI has 36 letters.
_BOUNDS = {
    "uri": r"^[^:]{1,40}:",
    "email": r"^[^@]{1,64}@.{1,255}$",
    "hostname": r"^.{1,253}$",
    "date-time": _NANOSECONDS,
    "time": _NANOSECONDS,
    "duration": r"^([^0-9]*[0-9]{1,9}[^0-9])*$",
}


def adapted(text: str) -> str:
    """A schema, as JSON, with what ``exact_bounds`` and ``bounded`` change in each of its parts."""
    if '"exclusiveM' not in text and '"format' not in text:
        return text
    return json.dumps(_walked(json.loads(text)), ensure_ascii=False)


def _walked(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_walked(part) for part in schema]
    if not isinstance(schema, Mapping):
        return schema
    found = {}
    for key, part in schema.items():
        if key in _NAMED and isinstance(part, Mapping):
            found[key] = {name: _walked(each) for name, each in part.items()}
        else:
            found[key] = part if key in _DATA else _walked(part)
    return bounded(exact_bounds(found))


def exact_bounds(schema: dict[str, Any]) -> dict[str, Any]:
    """The same schema, but where a whole number is a bound that does not count, and the other bound begins like it:
    there the next number is a bound that counts. llguidance 1.9 lets 10 through for above 10 and at most 10.25."""
    found = dict(schema)
    for name, (bound, towards, others) in _SIDES.items():
        value = found.get(name)
        if _number(value) and value == int(value) and value * towards >= 0 and bound not in found:
            ends = [found[other] for other in others if _number(found.get(other))]
            if any(abs(end - value) < 1 for end in ends):
                del found[name]
                found[bound] = math.nextafter(value, towards * math.inf) if value else math.copysign(_SMALL, towards)
    return found


def bounded(schema: dict[str, Any]) -> dict[str, Any]:
    """The same schema, with an end to what texts of its format may grow to."""
    form = schema.get("format")
    pattern = _BOUNDS.get(form) if isinstance(form, str) else None
    others = schema.get("allOf", [])
    if pattern is None or not isinstance(others, list):
        return schema
    return schema | {"allOf": [*others, {"pattern": pattern}]}


def _number(value: Any) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e15
