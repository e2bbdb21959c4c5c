"""Records that clients send: what all of them share.

Knows: pydantic. Does not know: any field.

The first thing that is wrong is enough to refuse a body: a record of every fault in one of megabytes would take
gigabytes. So lists end at their first wrong value (``Many``), and one unknown field stands for all (``Record``).
"""

from __future__ import annotations

from typing import Annotated, Any, TypeAlias, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StrictInt, model_validator
from pydantic_core import PydanticKnownError

__all__ = ["Count", "Many", "Number", "Record"]


def _no_flag(value: Any) -> Any:
    if isinstance(value, bool):
        raise PydanticKnownError("float_type")
    return value


Number: TypeAlias = Annotated[float, Field(strict=False, allow_inf_nan=False), BeforeValidator(_no_flag)]
Count: TypeAlias = StrictInt
T = TypeVar("T")
Many: TypeAlias = Annotated[list[T], Field(fail_fast=True)]


class Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _read(cls, values: Any) -> Any:
        """What was sent, with at most one of the fields that are not known."""
        if not isinstance(values, dict):
            return values
        known = {field.alias or name for name, field in cls.model_fields.items()}
        more = [name for name in values if name not in known]
        if len(more) < 2:
            return values
        return {name: values[name] for name in values if name in known or name == more[0]}
