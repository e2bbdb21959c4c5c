"""What a request's settings ask of whoever works its tokens out, and which of them each backend serves.

Knows: one table, a line for each field of ``SamplingParams``. Does not know: any backend.

A backend (tensors, C++, kernels, a captured program) is a faster way to say what ``maths`` says. It lists every field,
as served or as declined (``Served``). A round goes to the first backend that serves all that its rows ask for, so one
that has not heard of a field is passed by and does not ignore it. ``tests/test_maths_asks.py`` goes over the fields of
``SamplingParams`` and names each backend that has not said yes or no to one.

To add a field, or a rule: write it into ``ASKS``, serve it in ``distribution`` or ``verify`` (the tensors serve
everything), and say yes or no in each ``Served``; or put it into ``TENSORS_ONLY``, which says no for all the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import get_args

from ..types import SamplingParams, Verification

__all__ = ["ASKS", "DRAWING", "OTHERS", "PENALTIES", "PROCESSING", "RULES", "TENSORS_ONLY", "Asks", "Served", "asks_of"]

Asks = frozenset[str]

#: field -> does a request ask for anything by it? None: never. With those the engine deals, around the distribution:
#: how long a text gets, how many there are, what is said of the prompt, whether there is a draft at all.
ASKS: dict[str, Callable[[SamplingParams], bool] | None] = {
    "temperature": lambda p: not p.greedy,
    "top_p": lambda p: not p.greedy and p.top_p < 1,
    "top_k": lambda p: not p.greedy and p.top_k > 0,
    "min_p": lambda p: not p.greedy and p.min_p > 0,
    "verification": lambda p: not p.greedy and p.rule != "coupled",
    "presence_penalty": lambda p: p.presence_penalty != 0,
    "frequency_penalty": lambda p: p.frequency_penalty != 0,
    "repetition_penalty": lambda p: p.repetition_penalty != 1,
    "logit_bias": lambda p: bool(p.logit_bias),
    "min_tokens": lambda p: p.min_tokens > 0,
    "logprobs": lambda p: p.logprobs is not None,
    "structured": lambda p: p.structured is not None,
    "prompt_logprobs": None,
    "seed": None,
    "stop": None,
    "stop_token_ids": None,
    "max_tokens": None,
    "ignore_eos": None,
    "skip_special_tokens": None,
    "n": None,
    "speculate": None,
}

#: what is done to logits before the temperature
PENALTIES = frozenset({"presence_penalty", "frequency_penalty", "repetition_penalty"})
PROCESSING = PENALTIES | {"logit_bias", "min_tokens"}
#: temperature and truncation
DRAWING = frozenset({"temperature", "top_p", "top_k", "min_p"})
#: the rules that are asked for by name, instead of the field: ``coupled`` needs nothing but the target's own draw
RULES = frozenset(get_args(Verification)) - {"coupled"}
#: what is done before temperature and truncation, or after them
OTHERS = PROCESSING | RULES | {"logprobs", "structured"}
#: fields and rules that have no faster way yet: all backends but the tensors decline them
TENSORS_ONLY: Asks = frozenset()


def asks_of(params: SamplingParams) -> Asks:
    """The fields by which this request asks for anything; its rule in the place of ``verification``."""
    asked = [name for name, asks in ASKS.items() if asks is not None and asks(params)]
    return frozenset(params.rule if name == "verification" else name for name in asked)


@dataclass(frozen=True)
class Served:
    """What one backend serves and what it declines: together, every field that can ask for anything."""

    by: str
    serves: Asks
    declines: Asks = frozenset()

    def __post_init__(self) -> None:
        if both := self.serves & self.declines:
            raise ValueError(f"{self.by} both serves and declines {', '.join(sorted(both))}")

    def takes(self, wanted: Iterable[Asks]) -> bool:
        """Can it serve rows that ask for this? What it has not heard of, it does not take."""
        return all(asks <= self.serves for asks in wanted)
