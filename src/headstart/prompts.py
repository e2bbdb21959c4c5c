"""How people write prompts: text, token ids, arrays, tensors, dicts; conversations; one of them, or many.

Knows: which forms are taken, and what each comes to: text, or a list of Python numbers (which a drafter can compare).
Does not know: tokenizers, models, or what a message may hold (``machine/messages.py`` does).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from typing import Any, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from .errors import InvalidParameter
from .sampling import SamplingParams
from .values import ids, plain, shown

__all__ = [
    "Array",
    "Messages",
    "Prompt",
    "Written",
    "is_conversation",
    "numbered",
    "one_each",
    "read_conversations",
    "read_prompt",
    "read_prompts",
    "settings_of",
]

#: text, token ids, or one of the two in a dict as in vLLM: {"prompt": ...} or {"prompt_token_ids": ...}
Prompt: TypeAlias = str | Sequence[int] | Mapping[str, Any]
#: [T] and [1, T] are one prompt, [B, T] are B of them
Array: TypeAlias = npt.NDArray[Any] | torch.Tensor
Messages: TypeAlias = Sequence[Mapping[str, Any]]
#: a prompt that has been read
Written: TypeAlias = str | list[int]

_KEYS = ("prompt", "prompt_token_ids")
_FORMS = "text, token ids, {'prompt': ...} or {'prompt_token_ids': ...}"

T = TypeVar("T")


@contextmanager
def numbered(what: str, index: int, *, alone: bool = False) -> Iterator[None]:
    """An error in here says which of several prompts or conversations it is about. ``alone``: there is only one."""
    try:
        yield
    except InvalidParameter as error:
        if not alone:
            error.about(what, index)
        raise


# -- prompts


def read_prompts(value: object) -> tuple[list[Written], bool]:
    """The prompts, and whether it was one prompt (and not a list with a prompt in it)."""
    value = _listed("prompts", value)
    if not isinstance(value, list):
        return [read_prompt(value)], True
    if value and _is_number(value[0]):
        return [ids("prompt", value)], True
    found = []
    for index, part in enumerate(value):
        with numbered("prompt", index):
            found.append(read_prompt(part))
    return found, False


def read_prompt(value: object) -> Written:
    """One prompt, as text or as Python numbers."""
    value = _listed("prompt", value)
    if isinstance(value, str):
        return str(value)
    if isinstance(value, Mapping):
        return _from_dict(value)
    if isinstance(value, list) and value and not _is_number(value[0]):
        raise InvalidParameter("prompt", f"must be one prompt ({_FORMS}), not a list with {shown(value[0])} in it")
    return ids("prompt", value)


def _listed(name: str, value: object) -> object:
    """Text, a dict or an array [T] as they are; everything else that can be one prompt or many as a list."""
    if isinstance(value, (str, Mapping)):
        return value
    if isinstance(value, (np.ndarray, torch.Tensor)):
        return _rows(name, value)
    if isinstance(value, (bytes, bytearray, Set)) or not isinstance(value, Iterable):
        raise InvalidParameter(
            name, f"must be {_FORMS}{', or a list of those' * (name == 'prompts')}, not {shown(value)}"
        )
    return list(value)


def _rows(name: str, value: Array) -> object:
    """An array as one prompt [T], or as a list of them."""
    if isinstance(value, np.ndarray) and value.dtype.kind in "OU":  # lists of different lengths, or texts
        return value.tolist()
    if value.ndim == 2:
        return value[0] if len(value) == 1 else list(value)
    if value.ndim != 1:
        raise InvalidParameter(name, f"must be token ids [T] or [B, T], not of shape {tuple(value.shape)}")
    return value


def _is_number(value: object) -> bool:
    return isinstance(plain(value), (int, float))


def _from_dict(value: Mapping[Any, Any]) -> Written:
    given = {key: part for key, part in value.items() if part is not None}
    if "role" in given or "content" in given:
        raise InvalidParameter("prompt", "is a message: conversations, a list of messages each, go to chat")
    if unknown := [repr(key) for key in given if key not in _KEYS]:
        raise InvalidParameter("prompt", f"takes the keys 'prompt' and 'prompt_token_ids', not {', '.join(unknown)}")
    if len(given) != 1:
        raise InvalidParameter("prompt", "needs one of the keys 'prompt' (text) and 'prompt_token_ids', and only one")
    if "prompt_token_ids" in given:
        tokens = _listed("prompt_token_ids", given["prompt_token_ids"])
        return ids("prompt_token_ids", tokens)
    if not isinstance(given["prompt"], str):
        raise InvalidParameter("prompt", f"must be text under the key 'prompt', not {shown(given['prompt'])}")
    return str(given["prompt"])


# -- conversations


def is_conversation(value: object) -> bool:
    """A list of messages, as against a prompt or a list of prompts?"""
    if not isinstance(value, (list, tuple)) or not value or not isinstance(value[0], Mapping):
        return False
    return not any(key in value[0] for key in _KEYS)


def read_conversations(value: object) -> tuple[list[Messages], bool]:
    """The conversations, and whether it was one (and not a list with one in it)."""
    if isinstance(value, Mapping):
        raise InvalidParameter("messages", "must be a list of messages: write [{'role': ..., 'content': ...}]")
    if isinstance(value, (str, bytes, bytearray, Set)) or not isinstance(value, Iterable):
        raise InvalidParameter("messages", f"must be a list of {{'role': ..., 'content': ...}}, not {shown(value)}")
    parts = list(value)
    if not parts:
        raise InvalidParameter("messages", "must hold at least one message")
    return ([parts], True) if isinstance(parts[0], Mapping) else (parts, False)


# -- settings


def settings_of(params: T | None, sampling_params: T | None) -> T | SamplingParams:
    """``params`` under either of its two names."""
    if params is not None and sampling_params is not None:
        raise InvalidParameter("sampling_params", "is another name of params: give one of the two")
    chosen = sampling_params if params is None else params
    return SamplingParams() if chosen is None else chosen


def one_each(name: str, value: Any, kinds: type[T] | tuple[type[T], ...], count: int) -> list[T]:
    """One value for all prompts, or a list with one for each."""
    if isinstance(value, kinds):
        return [value] * count
    names = [kind.__name__ for kind in (kinds if isinstance(kinds, tuple) else (kinds,))]
    wanted = " or ".join({"str": "text", "NoneType": "None"}.get(name, name) for name in names)
    if isinstance(value, (str, Mapping)) or not isinstance(value, Iterable):
        raise InvalidParameter(name, f"must be {wanted}, or a list with one for each prompt, not {shown(value)}")
    values = list(value)
    if len(values) != count:
        raise InvalidParameter(name, f"has {len(values)} entries for {count} prompts")
    for item in values:
        if not isinstance(item, kinds):
            raise InvalidParameter(name, f"must hold {wanted} for each prompt, not {shown(item)}")
    return values
