"""What a request's answer must look like: a JSON schema, a regex, one of several texts, or a grammar.

Knows: the ways to say it, and what cannot be one of them. Does not know: tokens, or what a schema means;
``machine/grammar.py`` compiles it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from .errors import InvalidParameter
from .values import flag, shown

__all__ = ["MAX_CHOICES", "MAX_GRAMMAR", "Structured", "check_schema"]

MAX_GRAMMAR = 1 << 18  # characters of a schema, regex or grammar, and of all choices together
MAX_CHOICES = 4096
MAX_AFTER = 200
#: of multipleOf, without its point, and without its factors 2 and 5: a grammar has a state for each remainder
MAX_STEP, MAX_ODD_STEP = 10_000, 1_000
_KINDS = ("json", "json_object", "regex", "choice", "grammar")


@dataclass(frozen=True, kw_only=True)
class Structured:
    """What an answer must look like, held to it token by token. Exactly one of the first five is given.

    ``json``: a JSON schema, as text or as a dict (kept as text). ``json_object=True``: any JSON object. ``regex``: the
    whole answer matches it. ``choice``: the answer is one of these texts. ``grammar``: a grammar in Lark's notation, as
    llguidance reads it; its first rule is ``start``.

    ``after``: everything up to and with this text is free, and the rest is held to the grammar; for models that think
    first, ``after="</think>"``. No eos token comes before it: if it never comes, the answer ends by its length.

    With ``json`` and ``json_object``: ``disable_any_whitespace`` leaves no blank between a document's parts;
    ``whitespace_pattern`` is a regex of the blanks that there may be.
    """

    json: str | bool | Mapping[str, Any] | None = None
    json_object: bool = False
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    after: str | None = None
    whitespace_pattern: str | None = None
    disable_any_whitespace: bool = False

    def __post_init__(self) -> None:
        for name in ("json_object", "disable_any_whitespace"):
            self._keep(name, flag(f"structured.{name}", getattr(self, name)))
        given = self._given
        if len(given) != 1:
            named = "none of them was" if not given else f"{' and '.join(given)} were"
            raise InvalidParameter("structured", f"takes exactly one of {', '.join(_KINDS)}; {named} given")
        if self.json is not None:
            self._keep("json", _schema(self.json))
        if self.choice is not None:
            self._keep("choice", _choices(self.choice))
        for name in ("regex", "grammar", "whitespace_pattern"):
            if getattr(self, name) is not None:
                self._keep(name, _text(f"structured.{name}", getattr(self, name), MAX_GRAMMAR))
        if self.after is not None:
            self._keep("after", _text("structured.after", self.after, MAX_AFTER))
        self._check_whitespace()

    def _keep(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _check_whitespace(self) -> None:
        for name in ("whitespace_pattern", "disable_any_whitespace"):
            if getattr(self, name) and self.kind not in ("json", "json_object"):
                raise InvalidParameter(f"structured.{name}", f"is for json and json_object, not for {self.kind}")
        if self.whitespace_pattern is not None and self.disable_any_whitespace:
            raise InvalidParameter("structured.whitespace_pattern", "cannot be used with disable_any_whitespace")

    @property
    def kind(self) -> str:
        """Which of the five was given."""
        return self._given[0]

    @property
    def _given(self) -> list[str]:
        return [
            name for name in _KINDS if getattr(self, name) is not None and (name != "json_object" or self.json_object)
        ]


def _text(name: str, value: object, most: int) -> str:
    if not isinstance(value, str) or not value:
        raise InvalidParameter(name, f"must be a text that is not empty, not {shown(value)}")
    if len(value) > most:
        raise InvalidParameter(name, f"is at most {most} characters, not {len(value)}")
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            raise InvalidParameter(name, "holds half of a surrogate pair, which is no character") from None
    return str.__str__(value)  # of an enum of texts the text, not its name


def _schema(value: object) -> str:
    """A schema as text, its keys in the order given: that is the order in which an answer has them."""
    name = "structured.json"
    if isinstance(value, str):
        _text(name, value, MAX_GRAMMAR)
        try:
            value = json.loads(value, parse_constant=_no_number)
        except RecursionError:
            raise InvalidParameter(name, "is nested too deeply") from None
        except ValueError as error:
            raise InvalidParameter(name, f"is not JSON: {error}") from None
    if not isinstance(value, (Mapping, bool)):
        raise InvalidParameter(
            name, f"must be a JSON schema (an object; pydantic: Model.model_json_schema()), not {shown(value)}"
        )
    try:
        written = json.dumps(
            dict(value) if isinstance(value, Mapping) else value,
            ensure_ascii=False,
            allow_nan=False,
            separators=(",", ":"),
        )
    except RecursionError:
        raise InvalidParameter(name, "is nested too deeply, or holds itself") from None
    except (TypeError, ValueError) as error:
        raise InvalidParameter(name, f"cannot be written as JSON: {error}") from None
    _text(name, written, MAX_GRAMMAR)
    try:
        check_schema(name, value)
    except RecursionError:
        raise InvalidParameter(name, "is nested too deeply") from None
    return written


def check_schema(name: str, schema: object) -> None:
    """Refuse what compiles but could not be kept, or would take seconds for a token: keys that a schema does not name
    may be written twice, and then count once; steps of numbers."""
    if isinstance(schema, (list, tuple)):
        for part in schema:
            check_schema(name, part)
    if not isinstance(schema, Mapping):
        return
    least, required = schema.get("minProperties"), schema.get("required")
    known = len({str(name) for name in required}) if isinstance(required, (list, tuple)) else 0
    free = schema.get("additionalProperties") is not False or schema.get("patternProperties")
    if isinstance(least, (int, float)) and least > known + 1 and free:
        why = "keys that it does not name could be written twice, and would count once"
        raise InvalidParameter(name, f"asks for minProperties {least}, which could not be kept: {why}")
    step = schema.get("multipleOf")
    if isinstance(step, (int, float)) and not isinstance(step, bool) and not _small_step(step):
        raise InvalidParameter(name, f"asks for multipleOf {shown(step)}, which takes too long: use a smaller step")
    for key, part in schema.items():
        if key not in ("const", "enum", "default", "examples"):  # these are no schemas
            check_schema(name, part)


def _small_step(step: float) -> bool:
    exact = Decimal(repr(step)).normalize()
    whole = abs(int(exact.scaleb(max(0, -int(exact.as_tuple().exponent)))))  # 2.5 is 25, and 0.01 is 1
    if whole > MAX_STEP:
        return False
    for factor in (2, 5):
        while whole and whole % factor == 0:
            whole //= factor
    return whole <= MAX_ODD_STEP


def _no_number(text: str) -> float:
    raise ValueError(f"{text} is no JSON number")


def _choices(value: object) -> tuple[str, ...]:
    name = "structured.choice"
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Iterable):
        raise InvalidParameter(name, f"must be a list of texts, not {shown(value)}")
    found = tuple(_text(name, text, MAX_GRAMMAR) for text in value)
    if not 1 <= len(found) <= MAX_CHOICES:
        raise InvalidParameter(name, f"takes 1 to {MAX_CHOICES} texts, not {len(found)}")
    if (total := sum(map(len, found))) > MAX_GRAMMAR:
        raise InvalidParameter(name, f"is at most {MAX_GRAMMAR} characters in all, not {total}")
    return tuple(dict.fromkeys(found))
