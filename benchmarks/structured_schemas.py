"""JSON schemas of many shapes, made from a seed: what structured output is tried with.

    python benchmarks/structured_schemas.py --count 400        # prints them, one a line

Twenty-one families, each with as much chance in it as keeps it what it is: forms, nested objects, lists, tuples, enums,
constants, patterns, numbers with bounds, unions, references, recursion, unicode, formats, free keys, optional keys,
schemas as pydantic writes them, large ones, documents that are no object. Four in ten texts are of any length, the
others bounded. Steps of numbers are exact in binary, since ``jsonschema`` divides floats.

Knows: schemas. Does not know: who answers, or how answers are judged.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

SEED = 18


def _words(text: str) -> list[str]:
    return text.split()


NAMES = _words(
    "name title city street email phone color brand author language country summary owner status note label code unit"
    " category message subject product team vehicle animal material style reason source"
)
NUMBERS = _words("age count price score weight height year quantity rating distance total level width duration")
FLAGS = _words("active verified public archived in_stock married paid urgent")
WORDS = _words(
    "red green blue small medium large low high urgent open closed pending draft final cat dog bird car bike train"
    " north south east west monday friday summer winter paper glass steel wood tea coffee"
)
UNICODE = _words("größe straße naïve año 東京 名前 город цена ñandú λόγος été İstanbul 🙂 łódź ÅR")
PATTERNS = (
    r"^[A-Z]{2}[0-9]{4}$",
    r"^#[0-9a-f]{6}$",
    r"^\+[1-9][0-9]{6,11}$",
    r"^[0-9]{5}(-[0-9]{4})?$",
    r"^v[0-9]+\.[0-9]+\.[0-9]+$",
    r"^(usr|org|key)_[a-zA-Z0-9]{8}$",
    r"^[A-Z][a-z]{2,9}( [A-Z][a-z]{2,9})?$",
    r"^([01][0-9]|2[0-3]):[0-5][0-9]$",
    r"^[^@\s]{1,12}@[a-z]{2,8}\.(com|org)$",
    r"^\w{3,8}$",
    r"^(yes|no|maybe)!?$",
    r"^[A-D][+-]?$",
    r"^\$[0-9]{1,3}\.[0-9]{2}$",
    r"^ISBN [0-9]{3}-[0-9]{10}$",
    r"^[A-ZÄÖÜ][a-zäöüß]{1,8}$",
    r"[0-9]{3}",
)
FORMATS = _words("date time date-time duration email hostname ipv4 ipv6 uuid uri")


@dataclass(frozen=True)
class Case:
    """One schema, and what somebody would ask for with it."""

    name: str
    schema: dict[str, Any]

    @property
    def prompt(self) -> str:
        written = json.dumps(self.schema, ensure_ascii=False)
        if len(written) > 1200:
            return "Make up a short example record and write it as JSON."
        return f"Make up a short example and write it as JSON that fits this schema:\n{written}"


class Maker:
    """Parts of schemas."""

    def __init__(self, chance: Random) -> None:
        self.chance = chance

    def names(self, count: int, pool: list[str] | None = None) -> list[str]:
        return self.chance.sample(pool or NAMES, count)

    def text(self) -> dict[str, Any]:
        """Four in ten are of any length."""
        kind = self.chance.randrange(5)
        if kind < 2:
            return {"type": "string"}
        if kind < 4:
            return {"type": "string", "maxLength": self.chance.choice([8, 20, 40, 80])}
        least = self.chance.choice([1, 2, 5])
        return {"type": "string", "minLength": least, "maxLength": least + self.chance.choice([3, 15, 30])}

    def integer(self) -> dict[str, Any]:
        kind = self.chance.choice([0, 0, 1, 2, 3, 4])
        low = self.chance.choice([-1000, -40, -1, 0, 1, 18, 1900])
        high = low + self.chance.choice([1, 9, 100, 125, 12345])
        return {"type": "integer"} | (
            {"minimum": low, "maximum": high},
            {"minimum": low},
            {"exclusiveMinimum": low, "exclusiveMaximum": high + 1},
            {"minimum": 0, "maximum": 1000, "multipleOf": self.chance.choice([2, 5, 10, 25])},
            {},
        )[kind]

    def number(self) -> dict[str, Any]:
        low = self.chance.choice([-273.15, -1.5, -0.5, 0, 0.5, 10, 99.9])
        high = round(low + self.chance.choice([0.25, 1, 7.75, 100, 1e4]), 2)
        kind = self.chance.randrange(4)
        return {"type": "number"} | (
            {"minimum": low, "maximum": high},
            {"exclusiveMinimum": low, "maximum": high},
            {"minimum": low, "exclusiveMaximum": high},
            {"minimum": 0, "maximum": 100, "multipleOf": self.chance.choice([0.5, 0.25, 0.125])},
        )[kind]

    def enum(self) -> dict[str, Any]:
        found: dict[str, Any] = {"enum": self.chance.sample(WORDS, self.chance.randint(2, 8))}
        return ({"type": "string"} if self.chance.random() < 0.6 else {}) | found

    def pattern(self) -> dict[str, Any]:
        return {"type": "string", "pattern": self.chance.choice(PATTERNS)}

    def format(self) -> dict[str, Any]:
        found: dict[str, Any] = {"type": "string", "format": self.chance.choice(FORMATS)}
        return found | ({"maxLength": 48} if self.chance.random() < 0.5 else {})

    def scalar(self) -> dict[str, Any]:
        kinds = (self.text, self.text, self.integer, self.number, self.enum, self.pattern, self.format)
        if self.chance.random() < 0.12:
            return {"type": "boolean"}
        return self.chance.choice(kinds)()

    def array(self, items: dict[str, Any] | None = None) -> dict[str, Any]:
        """Of a few items: somebody who wants a list says how long it may be, or a small model goes on."""
        least = self.chance.randrange(3)
        most = least + self.chance.randint(0 if least else 1, 3)
        return {"type": "array", "items": items or self.scalar(), "minItems": least, "maxItems": most}

    def object(self, properties: dict[str, Any], *, optional: float = 0.0, closed: bool = True) -> dict[str, Any]:
        required = [name for name in properties if self.chance.random() >= optional]
        found = {"type": "object", "properties": properties, "required": required}
        return found | ({"additionalProperties": False} if closed else {})

    def record(self, fields: int) -> dict[str, Any]:
        """An object of scalars."""
        found: dict[str, Any] = {}
        for name in self.names(fields, NAMES + NUMBERS + FLAGS):
            if name in FLAGS:
                found[name] = {"type": "boolean"}
            elif name in NUMBERS:
                found[name] = self.chance.choice([self.integer, self.number])()
            else:
                found[name] = self.scalar()
        return self.object(found)

    def nested(self, depth: int) -> dict[str, Any]:
        found = {name: self.scalar() for name in self.names(self.chance.randint(1, 2))}
        if depth:
            found[self.chance.choice(["details", "address", "profile", "settings"])] = self.nested(depth - 1)
        return self.object(found)


def form(make: Maker) -> dict[str, Any]:
    return make.record(make.chance.randint(3, 7))


def nested(make: Maker) -> dict[str, Any]:
    return make.nested(make.chance.randint(2, 5))


def lists(make: Maker) -> dict[str, Any]:
    return make.object({name: make.array() for name in make.names(make.chance.randint(1, 3))})


def tables(make: Maker) -> dict[str, Any]:
    rows = make.array(make.record(make.chance.randint(1, 3)))
    return make.object({"title": make.text(), "rows": rows})


def tuples(make: Maker) -> dict[str, Any]:
    parts = [make.scalar() for _ in range(make.chance.randint(2, 4))]
    rest: Any = make.chance.choice([False, {"type": "integer"}])
    line = {"type": "array", "prefixItems": parts, "items": rest, "minItems": len(parts), "maxItems": len(parts) + 2}
    return make.object({"point": line, "label": make.enum()})


def enums(make: Maker) -> dict[str, Any]:
    mixed = [1, 2.5, None, True, "one", "two words", 'a "quote"', "back\\slash", "tab\t", [1, "a"], {"k": None}, "", -7]
    fields: dict[str, Any] = {name: make.enum() for name in make.names(make.chance.randint(1, 4))}
    fields["mixed"] = {"enum": make.chance.sample(mixed, make.chance.randint(2, 6))}
    if make.chance.random() < 0.3:
        fields["many"] = {"enum": [f"item-{i:03}" for i in range(make.chance.choice([40, 150]))]}
    return make.object(fields)


def constants(make: Maker) -> dict[str, Any]:
    values: list[Any] = ["v1", 3, -0.5, None, False, [], {}, {"a": [1, {"b": "c"}]}, "line\nbreak", "日本"]
    names = make.names(make.chance.randint(2, 4))
    fields: dict[str, Any] = {name: {"const": make.chance.choice(values)} for name in names}
    return make.object(fields | {"extra": make.scalar()})


def patterns(make: Maker) -> dict[str, Any]:
    return make.object({name: make.pattern() for name in make.names(make.chance.randint(1, 5))})


def numbers(make: Maker) -> dict[str, Any]:
    kinds = [make.integer, make.number]
    return make.object({name: make.chance.choice(kinds)() for name in make.names(make.chance.randint(2, 6), NUMBERS)})


def unions(make: Maker) -> dict[str, Any]:
    ways: list[Any] = [
        {"anyOf": [make.scalar(), {"type": "null"}]},
        {"type": make.chance.sample(["string", "integer", "boolean", "null"], 2), "maxLength": 20},
        {"anyOf": [make.record(2), make.array(make.integer())]},
        {"oneOf": [{"type": "string", "maxLength": 12}, {"type": "number"}, {"type": "boolean"}]},
    ]
    names = make.names(make.chance.randint(1, 3))
    return make.object({name: make.chance.choice(ways) for name in names})


def tagged(make: Maker) -> dict[str, Any]:
    """One of several records, told apart by a constant."""
    tags = make.chance.sample(WORDS, make.chance.randint(2, 4))
    records = []
    for tag in tags:
        record = make.record(make.chance.randint(1, 3))
        fields = {"kind": {"const": tag}} | record["properties"]
        records.append(make.object(fields))
    return make.object({"event": {make.chance.choice(["anyOf", "oneOf"]): records}})


def references(make: Maker) -> dict[str, Any]:
    key = make.chance.choice(["$defs", "definitions"])
    found = make.object({"first": {"$ref": f"#/{key}/person"}, "second": {"$ref": f"#/{key}/person"}})
    if make.chance.random() < 0.5:
        found["properties"]["again"] = {"$ref": "#/properties/first"}
        found["required"].append("again")
    person = make.record(make.chance.randint(1, 2))
    person["properties"]["home"] = {"$ref": f"#/{key}/home"}
    person["required"].append("home")
    return found | {key: {"person": person, "home": make.record(1)}}


def recursive(make: Maker) -> dict[str, Any]:
    """A list or a tree that holds itself."""
    value = make.chance.choice([make.integer, make.enum])()
    if make.chance.random() < 0.5:
        node = make.object({"value": value, "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]}})
    else:
        children = {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 2}
        node = make.object({"value": value, "children": children})
    return {"$ref": "#/$defs/node", "$defs": {"node": node}}


def foreign(make: Maker) -> dict[str, Any]:
    """Keys and values that are no ASCII, or need escapes."""
    odd = ['say "hi"', "a/b", "tab\there", "$cost", "per cent %", "new\nline", "back\\slash"]
    keys = make.chance.sample(UNICODE, make.chance.randint(1, 3)) + make.chance.sample(odd, 1)
    fields: dict[str, Any] = {}
    for key in keys:
        pool = make.chance.sample(UNICODE, 4)
        fields[key] = make.chance.choice(
            [{"enum": pool}, {"const": pool[0]}, make.integer(), {"type": "string", "maxLength": 10}]
        )
    return make.object(fields)


def formats(make: Maker) -> dict[str, Any]:
    return make.object({name: make.format() for name in make.names(make.chance.randint(1, 4))})


def free_keys(make: Maker) -> dict[str, Any]:
    """Keys that the schema does not name."""
    values = make.chance.choice([make.integer, make.number, make.enum])()
    free = {"type": "object", "additionalProperties": values, "minProperties": 1, "maxProperties": 3}
    shaped = {"type": "object", "patternProperties": {"^x-[a-z]{1,6}$": values}, "maxProperties": 3}
    shaped["additionalProperties"] = False
    inner = make.chance.choice([free, shaped])
    return make.object({"name": make.text(), "extra": inner})


def optional(make: Maker) -> dict[str, Any]:
    fields = {name: make.scalar() for name in make.names(make.chance.randint(3, 6))}
    return make.object(fields, optional=0.6, closed=make.chance.random() < 0.7)


def merged(make: Maker) -> dict[str, Any]:
    names = make.names(4)
    parts = [make.object({name: make.scalar() for name in some}, closed=False) for some in (names[:2], names[2:])]
    return {"type": "object", "allOf": parts}


def pydantic(make: Maker) -> dict[str, Any]:
    """As pydantic writes it."""
    fields: dict[str, Any] = {}
    for name in make.names(make.chance.randint(2, 4)):
        fields[name] = make.scalar() | {"title": name.title(), "description": f"The {name}."}
    fields["kind"] = {"$ref": "#/$defs/Kind"}
    item = {"anyOf": [make.chance.choice([make.integer, make.enum])(), {"type": "null"}], "default": None}
    fields["parent"] = item | {"title": "Parent"}
    kinds = {"enum": make.chance.sample(WORDS, 3), "title": "Kind", "type": "string"}
    found = make.object(fields)
    found["required"] = [name for name in found["required"] if name != "parent"]
    return {"$defs": {"Kind": kinds}, "title": "Record", "description": "A record of something."} | found


def large(make: Maker) -> dict[str, Any]:
    """Many fields, few tokens each."""
    quick = [make.integer, make.enum, make.number, lambda: {"type": "boolean"}]
    fields = {
        f"{make.chance.choice(NAMES)}_{i}": make.chance.choice(quick)() for i in range(make.chance.randint(12, 24))
    }
    return make.object(fields)


def bare(make: Maker) -> dict[str, Any]:
    """Documents that are no object."""
    ways = (make.array, make.integer, make.number, make.enum, make.pattern, make.format)
    return make.chance.choice(ways)()


FAMILIES: tuple[Callable[[Maker], dict[str, Any]], ...] = (
    form,
    nested,
    lists,
    tables,
    tuples,
    enums,
    constants,
    patterns,
    numbers,
    unions,
    tagged,
    references,
    recursive,
    foreign,
    formats,
    free_keys,
    optional,
    merged,
    pydantic,
    large,
    bare,
)


def cases(count: int = 400, seed: int = SEED) -> list[Case]:
    """The first so many, the families in turn; each depends on its number and the seed only."""
    found = []
    for number in range(count):
        family = FAMILIES[number % len(FAMILIES)]
        schema = family(Maker(Random(f"{seed} {number}")))
        found.append(Case(f"{family.__name__} {number}", schema))
    return found


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--count", type=int, default=400)
    options.add_argument("--seed", type=int, default=SEED)
    given = options.parse_args()
    for case in cases(given.count, given.seed):
        print(json.dumps({"name": case.name, "schema": case.schema}, ensure_ascii=False))


if __name__ == "__main__":
    main()
