"""Control tokens in a chat come from the template, never from what somebody wrote in a message.

Knows: which strings are control tokens, where a message holds one or could help to make one, and how to encode a
rendered chat so that such places stay text. Does not know: roles, templates' insides, or who calls.

How: a suspicious place in a message is wrapped in marks that nobody can guess. After the template has run, a
control string without marks is the template's own. Those go by other, secret names into a copy of the tokenizer
that knows control tokens by these names only; everything else is plain text to it. One encoding of the whole
chat, so that there are no seams: ids are those of an ordinary chat but for the forged tokens.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any

from tokenizers import AddedToken, Tokenizer

from ..errors import InvalidParameter, ModelRefused

__all__ = ["ControlGuard"]

_FLAGS = ("single_word", "lstrip", "rstrip", "normalized")


class ControlGuard:
    """The guard of one tokenizer and its chat template. Never changes the tokenizer; threads may share it."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        # None for tokenizers that are written in Python
        self._backend: Any = getattr(tokenizer, "backend_tokenizer", None)
        special, named = _control_strings(tokenizer)
        self._ids = special | named
        self._strict = _Suspects(self._ids)
        # What the model itself said may hold the template's words, such as "<think>": they are no forgery there,
        # and templates look for them. Special tokens stay forbidden.
        self._lenient = _Suspects(special)
        # Drawn once and never shown, so that nobody can write a mark or a name into a message
        nonce = secrets.token_hex(16)
        self._opening, self._closing, self._prefix = f"o{nonce}o", f"c{nonce}c", f"n{nonce}n"

    def mark(self, content: str, *, own_words: bool) -> tuple[str, set[str]]:
        """The content with marks around its suspicious places, and what these say (nothing: an ordinary message).

        ``own_words``: the message is an answer of the model.
        """
        marked, done = "", 0
        found: set[str] = set()
        for start, stop in (self._lenient if own_words else self._strict).spans(content):
            found.add(content[start:stop])
            marked += content[done:start] + self._opening + content[start:stop] + self._closing
            done = stop
        return marked + content[done:], found

    def encode(self, text: str, found: Iterable[str]) -> list[int]:
        """Ids of a rendered chat with marks in it. ``found``: all that marks were put around."""
        literal = "|".join(map(re.escape, sorted(found, key=len, reverse=True)))
        pattern = re.compile(f"{self._opening}({literal}){self._closing}|({self._strict.pattern.pattern})")
        parts: list[str | int] = []
        done = 0
        for match in pattern.finditer(text):
            parts += [text[done : match.start()], self._ids[match[2]] if match[2] else match[1]]
            done = match.end()
        parts.append(text[done:])
        # A template that cuts a message to pieces may leave half a pair of marks
        parts = [self.unmarked(p) if isinstance(p, str) else p for p in parts]
        control = frozenset(self._ids.values()) - {self._tokenizer.unk_token_id}  # unknown characters forge nothing
        return self._encode_python(parts, control) if self._backend is None else self._encode_rust(parts, control)

    def unmarked(self, text: str) -> str:
        """The text without marks."""
        return text.replace(self._opening, "").replace(self._closing, "")

    def _encode_rust(self, parts: Sequence[str | int], control: frozenset[int]) -> list[int]:
        """``parts``: plain text and control tokens."""
        backend, ids_of = self._copy
        text = "".join(f"{self._prefix}{part}n" if isinstance(part, int) else part for part in parts)
        ids: list[int] = []
        [encoded] = backend.encode_batch(
            [text], add_special_tokens=False
        )  # lets other threads run meanwhile; encode does not
        for token in encoded.ids:
            if token in ids_of:
                ids.append(ids_of[token])
            elif token in control:  # a Unigram model finds "</s>" in its own vocabulary
                ids += _spelled(backend, token, control)
            else:
                ids.append(token)
        return ids

    def _encode_python(self, parts: Sequence[str | int], control: frozenset[int]) -> list[int]:
        """The same, run by run: here the tokenizer has a switch that needs no copy."""
        ids: list[int] = []
        run = ""
        for part in [*parts, None]:
            if isinstance(part, str):
                run += part
                continue
            if run:
                plain = self._tokenizer.encode(run, add_special_tokens=False, split_special_tokens=True)
                if control.intersection(plain):
                    raise InvalidParameter("messages", "hold a control token that cannot be written as plain text")
                ids += plain
                run = ""
            if part is not None:
                ids.append(part)
        return ids

    @cached_property
    def _copy(self) -> tuple[Any, dict[int, int]]:
        """The backend with control tokens under secret names, and the true ids of its added tokens.

        Made when it is first needed: it takes about half a second for 50,000 entries.
        """
        spec = json.loads(self._backend.to_str())
        spec.update(added_tokens=[], truncation=None, padding=None)
        backend: Any = Tokenizer.from_str(json.dumps(spec))
        ids_of: dict[int, int] = {}
        secret = set(self._ids.values())
        for token, added in sorted(self._backend.get_added_tokens_decoder().items()):
            name = f"{self._prefix}{token}n" if token in secret else added.content
            backend.add_tokens([AddedToken(name, special=False, **{flag: getattr(added, flag) for flag in _FLAGS})])
            ids_of[backend.token_to_id(name)] = token
        if missing := secret - set(ids_of.values()):
            raise ModelRefused(f"the tokenizer's control tokens {sorted(missing)} cannot be told from text")
        return backend, ids_of


def _control_strings(tokenizer: Any) -> tuple[dict[str, int], dict[str, int]]:
    """String -> id of the special tokens, and of other added tokens that the chat template writes."""
    template = str(tokenizer.get_chat_template())
    special = dict(zip(map(str, tokenizer.all_special_tokens), tokenizer.all_special_ids, strict=True))
    named = {}
    for token, added in tokenizer.added_tokens_decoder.items():
        if added.special:
            special[added.content] = token
        elif added.content in template and not added.content.isspace():
            named[added.content] = token
    special.pop("", None)
    return special, named


class _Suspects:
    """Finds where a message holds one of some strings, or could become one with what a template puts around it."""

    def __init__(self, strings: Iterable[str]) -> None:
        self._strings = sorted(strings, key=len, reverse=True)
        # the longest first, as the tokenizer matches them
        self.pattern = re.compile("|".join(map(re.escape, self._strings)) or r"(?!)")
        self._longest = max(map(len, self._strings), default=0)
        # every proper beginning, and every proper ending
        self._heads = frozenset(s[:k] for s in self._strings for k in range(1, len(s)))
        self._tails = frozenset(s[k:] for s in self._strings for k in range(1, len(s)))

    def spans(self, content: str) -> Iterator[tuple[int, int]]:
        """In order, without overlap."""
        start, stop = len(content) - len(content.lstrip()), len(content.rstrip())  # templates may strip a message
        core = content[start:stop]
        if core and any(len(core) < len(s) and core in s for s in self._strings):
            yield start, stop
            return
        inner = [match.span() for match in self.pattern.finditer(content)]
        room = min(self._longest - 1, (inner[0][0] if inner else stop) - start)
        before = start + next((k for k in range(room, 0, -1) if content[start : start + k] in self._tails), 0)
        if before > start:
            yield start, before
        yield from inner
        room = min(self._longest - 1, stop - (inner[-1][1] if inner else before))
        after = stop - next((k for k in range(room, 0, -1) if content[stop - k : stop] in self._heads), 0)
        if after < stop:
            yield after, stop


def _spelled(backend: Any, token: int, control: frozenset[int]) -> list[int]:
    """The text of a control token in smaller pieces of the same vocabulary."""
    piece = backend.id_to_token(token)
    for cut in range(1, len(piece)):
        ids = [part.id for half in (piece[:cut], piece[cut:]) for part in backend.model.tokenize(half)]
        if not control.intersection(ids):
            return ids
    raise InvalidParameter("messages", f"hold {piece!r}, which this tokenizer cannot write as plain text")
