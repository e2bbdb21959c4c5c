"""JSON schemas said so that llguidance keeps them, and so that small models get to an end.

Knows: what it takes otherwise than JSON Schema says, and how long texts of a format may be. Does not know: grammars,
tokens.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, TypeGuard

__all__ = ["adapted", "escapes"]

_OPTIONS = "x-guidance"  # what llguidance would read there is not the schema's to say

_DATA = ("const", "enum", "default", "examples")  # these hold no schemas
_NAMED = ("properties", "patternProperties", "dependentSchemas", "$defs", "definitions")  # these hold them by name
#: the bound that counts, which way the next number lies, and which of two such bounds is the narrower
_SIDES = {"exclusiveMinimum": ("minimum", 1.0, max), "exclusiveMaximum": ("maximum", -1.0, min)}
#: and for each bound which way other numbers are narrower
_INWARDS = {"minimum": 1, "exclusiveMinimum": 1, "maximum": -1, "exclusiveMaximum": -1}
_SMALL = 1e-15  # about 0, where doubles have hundreds of digits, and llguidance few
_LARGE = 10**15  # from here on llguidance rounds bounds, this way or that
_MOST = {True: 92 * 10**17, False: 9 * 10**17}  # and larger ones it does not take; True: of whole numbers

_BY_FOUR = "(?:0[48]|[2468][048]|[13579][26])"  # of 04 to 96
_YEAR = r"(?:[0-9]{3}[1-9]|[0-9]{2}[1-9][0-9]|[0-9][1-9][0-9]{2}|[1-9][0-9]{3})"  # but 0000
_DAY = rf"^(?:{_YEAR}-(?:(?:0[13-9]|1[0-2])-|02-(?:[01]|2[0-8]))|(?:[0-9]{{2}}{_BY_FOUR}|{_BY_FOUR}00)-02-29)"
_NANOSECONDS = r"^[^.]*(\.[0-9]{1,9}([^0-9].*)?)?$"
#: What llguidance lets grow without an end: a model that begins a URI with words could never come to its colon, nor an
#: address to its "@". Lengths are those of RFC 1123 and 5321; the longest registered scheme of a URI has 36 letters.
#: And days that there are: it knows months, but no leap years.
_BOUNDS = {
    "uri": (r"^[^:]{1,40}:",),
    "email": (r"^[^@]{1,64}@.{1,255}$",),
    "hostname": (r"^.{1,253}$",),
    "date": (_DAY,),
    "date-time": (_DAY, _NANOSECONDS),
    "time": (_NANOSECONDS,),
    "duration": (r"^([^0-9]*[0-9]{1,9}[^0-9])*$",),
}


def adapted(text: str) -> str:
    """A schema, as JSON, with what ``exact_bounds`` and ``bounded`` change in each of its parts."""
    if not any(f'"{word}' in text for word in (*_SIDES, *_INWARDS, "format", _OPTIONS)):
        return text
    return json.dumps(_walked(json.loads(text)), ensure_ascii=False)


def escapes(text: str) -> dict[str, str]:
    """What llguidance is told of this schema, as JSON: no "u" may follow a backslash, by which it lets a key that the
    schema does not name be written like one that it does name ("\\u0061" for "a"). Schemas that name control characters
    need it."""
    return {} if "\\u00" in text else {"json_allowed_escapes": 'nrbtf\\"'}


def _walked(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_walked(part) for part in schema]
    if not isinstance(schema, Mapping):
        return schema
    found = {}
    for key, part in schema.items():
        if key == _OPTIONS:
            continue
        if key in _NAMED and isinstance(part, Mapping):
            found[key] = {name: _walked(each) for name, each in part.items()}
        else:
            found[key] = part if key in _DATA else _walked(part)
    return bounded(exact_bounds(large_bounds(found)))


def large_bounds(schema: dict[str, Any]) -> dict[str, Any]:
    """The same schema, with bounds from 1e15 on moved inwards, to numbers that llguidance holds as they are: texts of
    numbers with at most 15 digits and zeros behind them; of whole numbers, those that are doubles. What is between is
    not let through any more; of all else it would let some through that is beyond the bound."""
    found, kinds = dict(schema), schema.get("type")
    whole = "integer" in (kinds := kinds if isinstance(kinds, list) else [kinds]) and "number" not in kinds
    for name, towards in _INWARDS.items():
        value = found.get(name)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or abs(value) < _LARGE:
            continue
        if value * towards < -_MOST[whole]:
            value = -_MOST[whole] * towards
        elif value * towards > _MOST[False]:
            continue  # nothing is left inwards: it is refused
        del found[name]
        bound = name if name not in _SIDES else _SIDES[name][0]
        value, least = (math.ceil if towards > 0 else math.floor)(value), int(name in _SIDES)
        near = (_next_double if whole else _next_text)(value, towards, least)
        others = found.get(bound, near)
        narrower = max if towards > 0 else min
        found[bound] = narrower(near, others) if isinstance(others, (int, float)) else near
    return found


def _next_double(value: int, towards: int, least: int) -> int:
    """The first double from ``value`` on that is at least so far away."""
    found = float(value)
    while (int(found) - value) * towards < least:
        found = math.nextafter(found, towards * math.inf)
    return int(found)


def _next_text(value: int, towards: int, least: int) -> int:
    """The first number of 15 digits and zeros, which is that far away also where it is read as a double."""
    step: int = 10 ** (len(str(abs(value))) - 15)
    found = -(-value // step) * step if towards > 0 else value // step * step
    while (min if towards > 0 else max)(found, int(float(found))) * towards < value * towards + least:
        found += towards * step
    return found


def exact_bounds(schema: dict[str, Any]) -> dict[str, Any]:
    """The same schema, where the next number is a bound that counts, in place of one that does not: 10.0000000000000001
    is above 10, but 10 for everybody who reads it as a double. And llguidance 1.9 lets 10 through for above 10 and at
    most 10.25. Whole numbers and steps are not that close to anything. Only bounds towards 0 are moved: below 10.5, it
    would take 10.499999999999998 for one that 10.4 is not below; there 10.49999999999999999 gets through."""
    if schema.get("type") == "integer" or "multipleOf" in schema:
        return schema
    found = dict(schema)
    for name, (bound, towards, narrower) in _SIDES.items():
        value = found.get(name)
        if _number(value) and value * towards >= 0 and (bound not in found or _number(found[bound])):
            del found[name]
            far = abs(value) >= _SMALL
            near = math.nextafter(value, towards * math.inf) if far else math.copysign(_SMALL, towards)
            found[bound] = narrower(near, found.get(bound, near))
    return found


def bounded(schema: dict[str, Any]) -> dict[str, Any]:
    """The same schema, with an end to what texts of its format may grow to."""
    form = schema.get("format")
    patterns = _BOUNDS.get(form, ()) if isinstance(form, str) else ()
    others = schema.get("allOf", [])
    if not patterns or not isinstance(others, list):
        return schema
    return schema | {"allOf": [*others, *({"pattern": pattern} for pattern in patterns)]}


def _number(value: Any) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e15
