"""From what a request asks for (``Structured``) to a grammar over tokens. The only file that knows llguidance.

Knows: how to compile, for how long, and what is kept. Does not know: where a text stands in a grammar
(``grammar_state``), logits, rounds.
"""

from __future__ import annotations

import json
import os
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from threading import Lock
from time import monotonic
from typing import TYPE_CHECKING, Any

from ..errors import EngineBusy, InvalidParameter, MissingExtra
from ..types import Structured
from .compiling import Compilers
from .grammar_state import CompiledGrammar, Vocabulary, computed, first_line
from .mask_budget import TOO_SLOW
from .schemas import adapted, escapes

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer
    from transformers import PreTrainedTokenizerBase

__all__ = ["Grammars", "Order"]

DEADLINE = 10.0  # seconds that compiling may take
KEPT = 64  # compiled grammars
#: bounds on what a grammar may cost, to compile and with each token (llguidance's own, but for what an error tells)
LIMITS: dict[str, Any] = {"max_grammar_size": 500_000, "verbose_errors": False}
#: characters that matter in JSON: llguidance must spell their tokens as the tokenizer does
_SAMPLE = '{"name": "a b", "list": [1, -2.5, true], "x": {"y": null}}'
#: what llguidance says by a name of its own, in words
_IN_WORDS = {
    "NoExtensionBias": "it allows no answer, or refers to itself without an end",
    "oneOf constraints are not supported. Enable 'coerce_one_of' option to approximate oneOf with anyOf": (
        "oneOf is for parts of which no answer can be two; use anyOf"
    ),
}
_NO_EBNF = 'is in Lark\'s notation here (start: "a" | "b"), not in EBNF or GBNF (root ::= "a" | "b")'


class Grammars:
    """Compiles what requests ask for, for one tokenizer, and keeps the latest."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase | None, *, width: int, eos: Sequence[int], deadline: float = DEADLINE
    ) -> None:
        """``width``: V of the model's logits; ``eos``: ids that end a text."""
        self._source, self._width, self._eos, self._deadline = tokenizer, width, tuple(eos), deadline
        self._tokens: tuple[LLTokenizer, Vocabulary] | None = None
        self._kept: OrderedDict[Structured, CompiledGrammar] = OrderedDict()
        self._running: dict[Structured, Future[CompiledGrammar]] = {}
        self._reading, self._books, self._compilers = Lock(), Lock(), Compilers[CompiledGrammar]()
        self._process = os.getpid()

    @property
    def possible(self) -> bool:
        """Is there what it takes to compile anything: a tokenizer, and llguidance?"""
        return self._source is not None and find_spec("llguidance") is not None

    def prepare(self) -> None:
        """Read the tokenizer now. It takes a second or two for a large one, in which no other thread gets on."""
        self._read_tokens()

    def compile(self, asked: Structured, client: str | None = None) -> CompiledGrammar:
        """The grammar that was asked for; ``InvalidParameter`` says why there is none. Any thread may call this; it
        waits for no step of an engine, and not longer than the deadline. ``client``: see ``Compilers.submit``."""
        order = self.order(asked, client)
        while not order.over:
            with suppress(TimeoutError, InvalidParameter):
                order.future.result(order.pause)
        return order.found()

    def order(self, asked: Structured, client: str | None = None) -> Order:
        """The same for those who must not wait here. ``EngineBusy``: too many wait."""
        tokens = self._read_tokens()
        with self._books:
            found: Future[CompiledGrammar] | None = self._running.get(asked)
            if asked in self._kept:
                self._kept.move_to_end(asked)
                found = Future()
                found.set_result(self._kept[asked])
            elif found is None or found.cancelled():
                found = self._compilers.submit(partial(self._work, tokens, asked), client)
                self._running[asked] = found
        return Order(asked, found, self._compilers, self._deadline)

    def _read_tokens(self) -> tuple[LLTokenizer, Vocabulary]:
        """The tokenizer's bytes, read once."""
        if os.getpid() != self._process:  # forked: what another thread held then, nobody gives back here
            self._process, self._running = os.getpid(), {}
            self._reading, self._books, self._compilers = Lock(), Lock(), Compilers[CompiledGrammar]()
        with self._reading:
            if self._tokens is None:
                if self._source is None:
                    raise InvalidParameter("structured", "needs a tokenizer, and this model was given without one")
                self._tokens = _read(self._source, self._width, self._eos)
            return self._tokens

    def _work(self, tokens: tuple[LLTokenizer, Vocabulary], asked: Structured) -> CompiledGrammar:
        try:
            found = _compiled(*tokens, asked)
            with self._books:
                self._kept[asked] = found
                while len(self._kept) > KEPT:
                    self._kept.popitem(last=False)
            return found
        finally:
            with self._books:
                self._running.pop(asked, None)


class Order:
    """A grammar that somebody waits for, until a deadline: while it is not ``over``, look again after ``pause``."""

    def __init__(
        self,
        asked: Structured,
        future: Future[CompiledGrammar],
        compilers: Compilers[CompiledGrammar],
        deadline: float,
    ) -> None:
        self.future = future
        self._asked, self._compilers, self._deadline = asked, compilers, deadline
        self._end = monotonic() + deadline

    @property
    def over(self) -> bool:
        self._compilers.tend()
        return self.future.done() or monotonic() >= self._end

    @property
    def pause(self) -> float:
        """Seconds, to the deadline at the most."""
        return max(0.0, min(self._compilers.pause(self.future), self._end - monotonic()))

    def found(self) -> CompiledGrammar:
        """What came of it. One that waits still is given up; one that has begun cannot be stopped, and is kept."""
        field = f"structured.{self._asked.kind}"
        if self.future.cancel() or self.future.cancelled():
            raise EngineBusy("other grammars are being compiled")
        if not self.future.done():
            raise InvalidParameter(field, f"takes more than {self._deadline:g} s to compile: make it smaller")
        try:
            grammar = self.future.result()
        except InvalidParameter as error:
            why = str(error).removeprefix(f"{error.field} ")
            raise InvalidParameter(field, _NO_EBNF if "::=" in (self._asked.grammar or "") else why) from None
        if grammar.budget.exceeded:
            raise InvalidParameter(field, TOO_SLOW)
        return grammar


def _read(source: PreTrainedTokenizerBase, width: int, eos: Sequence[int]) -> tuple[LLTokenizer, Vocabulary]:
    try:
        from llguidance import LLTokenizer
    except ImportError as error:
        raise MissingExtra("llguidance", "structured") from error
    try:
        made = LLTokenizer(_described(source), n_vocab=max(len(source), width), eos_token=sorted(eos) or None)
    except ValueError as error:
        why = first_line(str(error))
        raise InvalidParameter("structured", f"needs the bytes of this model's tokens: {why}") from error

    def spelt(token: int) -> bytes:
        return made.decode_bytes([token])

    ids = source(_SAMPLE, add_special_tokens=False)["input_ids"]
    known = not {*ids} & {*source.all_special_ids}  # it has all of these characters
    if known and b"".join(map(spelt, ids)).strip() != source.decode(ids).strip().encode():
        said = "needs the bytes of this model's tokens, and llguidance takes them for others than its tokenizer does"
        raise InvalidParameter("structured", said)
    return made, Vocabulary(made.vocab_size, frozenset(made.eos_tokens), spelt, made.tokenize_bytes)


def _described(source: PreTrainedTokenizerBase) -> str:
    """A tokenizer as JSON, for llguidance.

    Where text is decoded in several steps, llguidance looks for the one that makes bytes, and takes the first it knows.
    Tokenizers that older versions of transformers make of GGUF files have two: one for bytes written out (which none of
    their tokens are), and then the one that counts.
    """
    backend = getattr(source, "backend_tokenizer", None)
    if backend is None:
        raise ValueError("only fast tokenizers are supported")
    told = json.loads(backend.to_str())
    told["padding"] = told["truncation"] = None
    steps = (told.get("decoder") or {}).get("decoders", [])
    told["decoder"] = next((step for step in steps if step["type"] == "ByteLevel"), told.get("decoder"))
    return json.dumps(told)


def _compiled(tokens: LLTokenizer, vocabulary: Vocabulary, asked: Structured) -> CompiledGrammar:
    try:
        return CompiledGrammar(vocabulary, _matcher(tokens, vocabulary, asked), asked.after)
    except InvalidParameter:
        raise
    except Exception as error:  # whatever a library makes of what strangers send
        raise _wrong(str(error)) from None


def _wrong(said: str) -> InvalidParameter:
    why = first_line(said)
    return InvalidParameter("structured", f"cannot be compiled: {_IN_WORDS.get(why, why)}")


def _matcher(tokens: LLTokenizer, vocabulary: Vocabulary, asked: Structured) -> LLMatcher:
    from llguidance import LLMatcher, LLParserLimits

    found = LLMatcher(tokens, _source_of(asked), log_level=0, limits=LLParserLimits(**LIMITS))
    # Some grammars fail only when they are used: try the beginning of an answer.
    trial = found.deep_copy()
    for _ in "ab":
        row = computed(trial, vocabulary) if not trial.is_error() else None
        if trial.is_error():
            raise _wrong(trial.get_error())
        if row is None or not row.any():
            raise InvalidParameter("structured", "allows no answer that this model's tokens can spell")
        trial.consume_tokens(trial.compute_ff_tokens())
    return found


def _source_of(asked: Structured) -> str:
    """In llguidance's own words."""
    from llguidance import LLMatcher

    if asked.regex is not None:
        return LLMatcher.grammar_from_regex(asked.regex)
    if asked.choice is not None:
        # One terminal: as a rule, each choice is an item of the parser's row, which has 2,000 at the most.
        return LLMatcher.grammar_from_lark("start: CHOICE\nCHOICE: " + " | ".join(map(json.dumps, asked.choice)))
    if asked.grammar is not None:
        return LLMatcher.grammar_from_lark(asked.grammar)
    schema = adapted('{"type":"object"}' if asked.json_object else str(asked.json))
    if schema == "false":
        raise InvalidParameter("structured.json", "allows no answer: it is false")
    # One blank where people write one, unless they say otherwise: small models that may write any go on doing so.
    spacing: dict[str, Any] = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
    if asked.disable_any_whitespace:
        spacing |= {"item_separator": ",", "key_separator": ":"}
    elif asked.whitespace_pattern is not None:
        spacing = {"whitespace_flexible": True, "whitespace_pattern": asked.whitespace_pattern}
    spacing |= escapes(schema)
    return LLMatcher.grammar_from_json_schema("{}" if schema == "true" else schema, overrides=spacing)  # type: ignore[arg-type]
