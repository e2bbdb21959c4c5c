"""Text to token ids and back: prompts, chats, and the text of a running answer.

Knows: one Hugging Face tokenizer and its chat template; which ids are control tokens; how to turn a stream of ids
into a stream of text that is never taken back; how to find a stop string before any of it has left the house.
Does not know: models, requests, sampling, or which ids end an answer (``machine/loading.py`` does).

Two promises:
    A control token in a chat comes from the template, never from what somebody wrote in a message.
    A character that is split over tokens is shown when it is complete. U+FFFD appears only where the ids really
    hold broken UTF-8, or that very character.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

from tokenizers import AddedToken, Tokenizer

from ..errors import InvalidParameter, ModelRefused

__all__ = ["Detokenizer", "StopChecker", "TextCodec", "TextStream"]

ROLES = ("system", "user", "assistant", "tool")

_REPLACEMENT = "\ufffd"
_CONTEXT = 8  # prompt ids in front of the answer: enough to know that its first word is not the first of a text
_HOLD = 32  # ids that may wait for the rest of a character. A character is at most 4 bytes; more than this is garbage


class TextCodec:
    """One tokenizer, as the rest of Headstart uses it. Never changes the tokenizer; threads may share it."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        # None for tokenizers that are written in Python
        self._backend: Any = getattr(tokenizer, "backend_tokenizer", None)
        self._added: dict[int, Any] = dict(tokenizer.added_tokens_decoder)
        marked = {token for token, added in self._added.items() if added.special}
        self.special_ids: frozenset[int] = frozenset(marked | set(tokenizer.all_special_ids))
        # Drawn once and never shown, so that nobody can write a name that is built from it into a message
        self._nonce = secrets.token_hex(16)

    @property
    def vocab_size(self) -> int:
        """Ids the tokenizer has; the model's output head may have more (padding)."""
        return len(self._tokenizer)

    def encode(self, text: str) -> list[int]:
        """A raw prompt, the way the tokenizer does it by default: BOS and the like are added, control tokens count."""
        _check_text("prompt", text)
        return list(self._tokenizer.encode(text))

    def encode_prediction(self, text: str) -> list[int]:
        """Text expected in the answer: no BOS, nothing in front of it."""
        _check_text("prediction", text)
        return self._encode_bare(text)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of these ids without the special ones. Spaces are left as they are: HF's clean-up is off."""
        if self._backend is not None:
            text: str = self._backend.decode(list(ids), skip_special_tokens=True)
        else:
            text = self._tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Messages through the tokenizer's own chat template, up to where the assistant's answer begins."""
        if not getattr(self._tokenizer, "chat_template", None):
            raise ModelRefused("this model has no chat template: use generate with a raw prompt instead of chat")
        plain = _check_messages(messages)
        spans = [list(self._suspects(message["content"])) for message in plain]
        if not any(spans):
            return self._encode_bare(self._render(plain))
        return self._encode_guarded(plain, spans)

    def _encode_bare(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def _render(self, messages: Sequence[Mapping[str, str]]) -> str:
        try:
            text = self._tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
        except ImportError:
            raise  # transformers says what to install
        except Exception as error:  # the template's own complaint (the order of roles, say), or its own fault
            raise InvalidParameter("messages", f"do not fit the model's chat template: {error}") from error
        return str(text)

    # Control tokens that somebody wrote into a message. Such a string is wrapped in marks that nobody can guess, so
    # that after the template has run it is known which control tokens are the template's. Those get other names,
    # in a copy of the tokenizer that knows control tokens by these names only; the rest of the text is plain to it.

    @cached_property
    def _control(self) -> dict[str, int]:
        """Control strings and their ids: the special tokens, and the other added tokens that the template writes."""
        template = str(self._tokenizer.get_chat_template())
        found = {
            added.content: token
            for token, added in self._added.items()
            if added.special or (added.content in template and not added.content.isspace())
        }
        for content, token in zip(self._tokenizer.all_special_tokens, self._tokenizer.all_special_ids, strict=True):
            found.setdefault(str(content), token)
        return {content: token for content, token in found.items() if content}

    @cached_property
    def _control_pattern(self) -> re.Pattern[str]:
        """Any control string; the longest first, as the tokenizer matches them."""
        return re.compile("|".join(map(re.escape, sorted(self._control, key=len, reverse=True))) or r"(?!)")

    @cached_property
    def _edges(self) -> tuple[frozenset[str], frozenset[str]]:
        """Every proper beginning, and every proper ending, of a control string."""
        heads = frozenset(content[:k] for content in self._control for k in range(1, len(content)))
        tails = frozenset(content[k:] for content in self._control for k in range(1, len(content)))
        return heads, tails

    def _suspects(self, content: str) -> Iterator[tuple[int, int]]:
        """Spans of a message that are a control string, or could become one with what the template puts around."""
        start, stop = len(content) - len(content.lstrip()), len(content.rstrip())  # templates may strip a message
        core = content[start:stop]
        longest = max(map(len, self._control), default=0)
        if core and len(core) < longest and any(core in control for control in self._control):
            yield start, stop
            return
        heads, tails = self._edges
        reach = range(min(longest - 1, len(core)), 0, -1)
        before = next((k for k in reach if core[:k] in tails), 0)
        after = next((k for k in reach if core[len(core) - k :] in heads), 0)
        inner = [match.span() for match in self._control_pattern.finditer(content)]
        if before and (not inner or inner[0][0] >= start + before):
            yield start, start + before
        yield from inner
        taken = max(inner[-1][1] if inner else 0, start + before)
        if after and taken <= stop - after:
            yield stop - after, stop

    def _encode_guarded(self, messages: list[dict[str, str]], spans: list[list[tuple[int, int]]]) -> list[int]:
        opening, closing = f"o{self._nonce}o", f"c{self._nonce}c"
        wrapped: set[str] = set()
        marked = []
        for message, found in zip(messages, spans, strict=True):
            content, done = "", 0
            for start, stop in found:
                piece = message["content"][start:stop]
                wrapped.add(piece)
                content += message["content"][done:start] + opening + piece + closing
                done = stop
            marked.append({**message, "content": content + message["content"][done:]})
        # First what the message wrote, so that only the template's own control strings are left for the second half
        literal = "|".join(map(re.escape, sorted(wrapped, key=len, reverse=True)))
        pattern = re.compile(f"{opening}({literal}){closing}|({self._control_pattern.pattern})")
        parts: list[str | int] = []
        done = 0
        text = self._render(marked)
        for match in pattern.finditer(text):
            parts += [text[done : match.start()], self._control[match[2]] if match[2] else match[1]]
            done = match.end()
        parts.append(text[done:])
        # A template that cuts a message at a control string (a reasoning model's) leaves half a pair of marks
        parts = [p.replace(opening, "").replace(closing, "") if isinstance(p, str) else p for p in parts]
        return self._encode_parts(parts)

    def _encode_parts(self, parts: Sequence[str | int]) -> list[int]:
        """Text (str) in which nothing is a control token, and control tokens (int)."""
        control = frozenset(self._control.values()) - {self._tokenizer.unk_token_id}  # unknown characters are no attack
        if self._backend is None:
            return self._encode_parts_python(parts, control)
        backend, ids_of = self._guarded
        text = "".join(self._name(part) if isinstance(part, int) else part for part in parts)
        ids: list[int] = []
        for token in backend.encode(text, add_special_tokens=False).ids:
            if token in ids_of:
                ids.append(ids_of[token])
            elif token in control:  # a Unigram model finds "</s>" in its own vocabulary
                ids += self._spell(backend, token, control)
            else:
                ids.append(token)
        return ids

    def _encode_parts_python(self, parts: Sequence[str | int], control: frozenset[int]) -> list[int]:
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

    def _name(self, token: int) -> str:
        """A control token's name in the guarded copy."""
        return f"n{self._nonce}{token}n"

    @cached_property
    def _guarded(self) -> tuple[Any, dict[int, int]]:
        """A copy of the backend in which control tokens go by secret names, and the true ids of its added tokens."""
        spec = json.loads(self._backend.to_str())
        spec.update(added_tokens=[], truncation=None, padding=None)
        backend: Any = Tokenizer.from_str(json.dumps(spec))
        ids_of: dict[int, int] = {}
        secret = set(self._control.values())
        for token, added in sorted(self._backend.get_added_tokens_decoder().items()):
            name = self._name(token) if token in secret else added.content
            flags = {flag: getattr(added, flag) for flag in ("single_word", "lstrip", "rstrip", "normalized")}
            backend.add_tokens([AddedToken(name, special=False, **flags)])
            ids_of[backend.token_to_id(name)] = token
        if missing := secret - set(ids_of.values()):
            raise ModelRefused(f"the tokenizer's control tokens {sorted(missing)} cannot be told from text")
        return backend, ids_of

    def _spell(self, backend: Any, token: int, control: frozenset[int]) -> list[int]:
        """The text of a control token in smaller pieces of the same vocabulary."""
        piece = backend.id_to_token(token)
        for cut in range(1, len(piece)):
            ids = [part.id for half in (piece[:cut], piece[cut:]) for part in backend.model.tokenize(half)]
            if not control.intersection(ids):
                return ids
        raise InvalidParameter("messages", f"hold {piece!r}, which this tokenizer cannot write as plain text")


def _check_text(field: str, text: object) -> None:
    if not isinstance(text, str):
        raise InvalidParameter(field, f"must be text, not {type(text).__name__}")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidParameter(field, f"holds a lone surrogate at character {error.start}") from None


def _check_messages(messages: object) -> list[dict[str, str]]:
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise InvalidParameter("messages", "must be a list of {'role': ..., 'content': ...}")
    if not messages:
        raise InvalidParameter("messages", "must hold at least one message")
    checked = []
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or set(message) != {"role", "content"}:
            raise InvalidParameter("messages", f"must have a role and a content and nothing else (message {index})")
        if message["role"] not in ROLES:
            raise InvalidParameter("messages", f"take the roles {', '.join(ROLES)}, not {message['role']!r}")
        _check_text("messages", message["content"])
        checked.append({"role": message["role"], "content": message["content"]})
    return checked


class Detokenizer:
    """The text of one growing sequence. What ``push`` returns is final.

    Decodes a short window: the ids behind the last text shown (they tell the tokenizer that the next word is not
    the first of a text, so that its space is kept) and the ids since. Special ids are skipped.
    """

    def __init__(self, codec: TextCodec, prompt_ids: Sequence[int] = ()) -> None:
        self._codec = codec
        self._window: list[int] = []
        self._rebase([token for token in prompt_ids[-_CONTEXT:] if token not in codec.special_ids])

    def _rebase(self, context: list[int]) -> None:
        """Start a new window with ids whose text has been shown."""
        self._window = context
        self._context = len(context)
        self._base = self._shown = len(self._codec.decode(context).rstrip(_REPLACEMENT)) if context else 0

    def push(self, token_id: int) -> str:
        """The text that this id settles; empty while a character is incomplete."""
        if token_id in self._codec.special_ids:
            return ""
        self._window.append(token_id)
        text = self._codec.decode(self._window)
        stable = text.rstrip(_REPLACEMENT)  # any of these may be the beginning of a character
        piece, held = stable[self._shown :], text[len(stable) :]
        if piece and not held:  # without new text the id may be half a character that the tokenizer shows as nothing
            self._rebase(self._window[self._context :])
        elif len(self._window) - self._context > _HOLD:  # broken UTF-8: show it, but for the last character
            piece += held[:-1]
            self._rebase(self._window[-4:])
            self._shown = len(self._codec.decode(self._window)) - len(held[-1:])
        else:
            self._shown = max(self._shown, len(stable))
        return piece

    def flush(self) -> str:
        """What is left at the end: a real U+FFFD, if that is what the ids spell. Half a character is dropped."""
        text, pending = self._codec.decode(self._window), self._window[self._context :]
        held = text[self._shown :]
        if held and self._codec.encode_prediction(text[self._base :]) != pending:
            held = ""
        self._rebase([])
        return held


class StopChecker:
    """Finds stop strings in a text that comes in pieces, and shows nothing that may still become one.

    The stop string that is complete first ends the text, whatever the pieces are; where two end at one character,
    the longer. Neither it nor anything behind it is shown.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._failure = [_failure_table(stop) for stop in self._stops]
        self._matched = [0] * len(self._stops)  # how much of each stop string the text ends with
        self._held = ""
        self.stopped = False

    def push(self, text: str) -> tuple[str, bool]:
        """The text that can be shown now, and whether a stop string has been found."""
        if self.stopped:
            return "", True
        if not self._stops:
            return text, False
        whole = self._held + text
        for position, character in enumerate(text, start=len(self._held) + 1):
            found = self._step(character)
            if found:
                self.stopped, self._held = True, ""
                return whole[: position - found], True
        keep = len(whole) - max(self._matched)
        self._held = whole[keep:]
        return whole[:keep], False

    def _step(self, character: str) -> int:
        """One character on, by Knuth, Morris and Pratt; the length of the stop string it completes, or 0."""
        found = 0
        for index, stop in enumerate(self._stops):
            length = self._matched[index]
            while length and stop[length] != character:
                length = self._failure[index][length - 1]
            if stop[length] == character:
                length += 1
            if length == len(stop):
                found = max(found, length)
            self._matched[index] = length
        return found

    def flush(self) -> str:
        """The text held back, once it is known that no more will come."""
        held, self._held = self._held, ""
        self._matched = [0] * len(self._stops)
        return held


def _failure_table(text: str) -> list[int]:
    """For each beginning of the text: the length of its longest proper ending that is a beginning, too."""
    table = [0] * len(text)
    length = 0
    for index in range(1, len(text)):
        while length and text[index] != text[length]:
            length = table[length - 1]
        if text[index] == text[length]:
            length += 1
        table[index] = length
    return table


class TextStream:
    """Ids in, text out, for one running sequence."""

    def __init__(self, codec: TextCodec, prompt_ids: Sequence[int], stops: Sequence[str] = ()) -> None:
        self._detokenizer = Detokenizer(codec, prompt_ids)
        self._checker = StopChecker(stops)

    def push(self, token_id: int, *, check_stop: bool = True) -> tuple[str, bool]:
        """The text this id lets out, and whether a stop string ends the sequence with it.

        ``check_stop`` False: too early to stop (min_tokens). The text goes out, and no stop string can begin in it.
        """
        if self._checker.stopped:
            return "", True
        text = self._detokenizer.push(token_id)
        return self._checker.push(text) if check_stop else (self._checker.flush() + text, False)

    def finish(self) -> str:
        """The last text, when the sequence ends for another reason than a stop string."""
        text, stopped = self._checker.push(self._detokenizer.flush())
        return text if stopped else text + self._checker.flush()
