"""The options that say what an answer must look like.

Knows: names, help texts, and that a schema or a grammar may stand in a file. Does not know: what becomes of them.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from ..errors import InvalidParameter
from ..structured import Structured
from .options import section

__all__ = ["StructuredOptions"]

_option = section("Structured output")


@dataclass(frozen=True)
class StructuredOptions:
    """At most one of the first five. Needs the extra ``structured``."""

    json_schema: Annotated[
        str | None, _option(of="FILE|TEXT", help="The answer is JSON that this schema allows: a file, or the schema.")
    ] = None
    json_object: Annotated[bool, _option("--json-object", help="The answer is a JSON object, of any kind.")] = False
    regex: Annotated[str | None, _option(of="REGEX", help="The whole answer matches this regular expression.")] = None
    choice: Annotated[
        list[str] | None, _option("--choice", of="TEXT", help="The answer is one of these texts. May be repeated.")
    ] = None
    grammar: Annotated[
        str | None, _option(of="FILE|TEXT", help="The answer follows this grammar, in Lark's notation (rule: start).")
    ] = None
    structured_after: Annotated[
        str | None,
        _option(of="TEXT", help="Only what comes behind this text is held to it; for models that think: '</think>'."),
    ] = None

    def structured(self) -> Structured | None:
        """What is asked for; None: nothing."""
        given = {
            "json": None if self.json_schema is None else _read("json_schema", self.json_schema, "{"),
            "regex": self.regex,
            "choice": tuple(self.choice) if self.choice else None,
            "grammar": None if self.grammar is None else _read("grammar", self.grammar, ":"),
        }
        kept = {name: value for name, value in given.items() if value is not None}
        if not kept and not self.json_object:
            if self.structured_after is not None:
                raise InvalidParameter("structured_after", "needs --json-schema, --regex, --choice or --grammar")
            return None
        return Structured(json_object=self.json_object, after=self.structured_after, **kept)  # type: ignore[arg-type]


def _read(name: str, value: str, sign: str) -> str:
    """The text itself, which has this sign in it, or what stands in the file of that name."""
    if sign in value and not os.path.exists(value):  # Path's own fails for texts that no file can be called
        return value
    try:
        return Path(value).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise InvalidParameter(name, f"names the file {value!r}, which cannot be read: {why}") from error
