"""Plain Python values out of what people pass: NumPy scalars and arrays, tensors, lists, ranges.

Knows: how to read a number, a switch or a list of token ids, and how to say what is wrong with one.
Does not know: which values a field allows; whoever asks says so.
"""

from __future__ import annotations

import math
import reprlib
import sys
from collections.abc import Iterable, Mapping, Set
from typing import Any

from .errors import InvalidParameter

__all__ = ["INT64", "at_least_one", "flag", "ids", "integer", "number", "plain", "shown"]

INT64 = 2**63 - 1  # what a kernel can count to

_PLAIN = (int, float, bool, str, type(None))  # most values, of which there may be thousands
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 80


def shown(value: object) -> str:
    """A value as it stands in an error: short, whatever it is."""
    try:
        return " ".join(_SHORT.repr(value).split())
    except Exception:  # Python writes out no very long numbers, and a value may have a broken __repr__
        return f"a value of type {type(value).__name__}"


def plain(value: Any) -> Any:
    """A NumPy scalar, or an array or tensor without dimensions, as the Python value it holds; others as they are."""
    if type(value) not in _PLAIN and isinstance(value, _arrays()) and value.ndim == 0:
        return value.item()
    return value


def _arrays() -> tuple[Any, ...]:
    """What NumPy and torch call their arrays. They are not imported for it, which would take seconds: whoever passes an
    array has done so."""
    kinds = (("numpy", "generic"), ("numpy", "ndarray"), ("torch", "Tensor"))
    found = (getattr(sys.modules.get(module), name, None) for module, name in kinds)
    return tuple(kind for kind in found if kind is not None)


def number(name: str, value: object, low: float, high: float) -> float:
    """A real number between two bounds, both included."""
    read = plain(value)
    if isinstance(read, bool) or not isinstance(read, (int, float)):
        raise InvalidParameter(name, f"must be a number, not {shown(value)}")
    if isinstance(read, float) and not math.isfinite(read):
        raise InvalidParameter(name, f"must be finite, not {read}")
    if not low <= read <= high:
        raise InvalidParameter(name, f"must be between {low:g} and {high:g}, not {shown(read)}")
    return float(read)


def integer(name: str, value: object, low: int, high: int = INT64) -> int:
    """A whole number between two bounds, both included."""
    read = plain(value)
    if isinstance(read, bool) or not isinstance(read, int):
        raise InvalidParameter(name, f"must be a whole number, not {shown(value)}")
    if not low <= read <= high:
        bound = f"at least {low}" if high == INT64 and read < low else f"between {low} and {high}"
        raise InvalidParameter(name, f"must be {bound}, not {shown(read)}")
    return read


def at_least_one(record: object, *names: str) -> None:
    """Refuse a record of settings in which one of these counts is below 1."""
    for name in names:
        integer(name, getattr(record, name), 1)


def flag(name: str, value: object) -> bool:
    """True or False; no other value stands for one of them."""
    read = plain(value)
    if not isinstance(read, bool):
        raise InvalidParameter(name, f"must be true or false, not {shown(value)}")
    return read


def ids(name: str, value: object) -> list[int]:
    """Token ids as Python numbers: a list, tuple, range or other iterable of whole numbers, an array or tensor [T].

    Whether the model has these ids is not asked here.
    """
    if isinstance(value, _arrays()):
        kind = str(value.dtype)
        if value.ndim != 1:
            raise InvalidParameter(name, f"must be token ids [T], not of shape {tuple(value.shape)}")
        if "int" not in kind:
            raise InvalidParameter(name, f"must be whole numbers (token ids), not {kind}")
        value = value.tolist()
    if isinstance(value, (str, bytes, bytearray, Mapping, Set)) or not isinstance(value, Iterable):
        raise InvalidParameter(name, f"must be a list of token ids, not {shown(value)}")
    found = list(value)
    if all(type(token) is int for token in found):
        return found
    read = [plain(token) for token in found]
    for place, token in enumerate(read):
        if isinstance(token, bool) or not isinstance(token, int):
            raise InvalidParameter(name, f"must hold whole numbers (token ids), not {shown(found[place])} at {place}")
    return read
