"""From what a request asks for (``Structured``) to a grammar over tokens. The only file that knows llguidance.

Knows: how to compile, for how long, and what is kept. Does not know: where a text stands in a grammar
(``grammar_state``), logits, rounds.
"""

from __future__ import annotations

import json
import os
from collections import OrderedDict
from collections.abc import Sequence
from importlib.util import find_spec
from threading import Event, Lock, Semaphore, Thread
from typing import TYPE_CHECKING, Any

from ..errors import EngineBusy, InvalidParameter, MissingExtra
from ..types import Structured
from .grammar_state import CompiledGrammar, Vocabulary, computed, first_line
from .mask_budget import TOO_SLOW
from .schemas import adapted, escapes

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer
    from transformers import PreTrainedTokenizerBase

__all__ = ["Grammars"]

DEADLINE = 10.0  # seconds that compiling may take
KEPT = 64  # compiled grammars
AT_ONCE = 4  # grammars that are compiled at the same time: one that takes long holds up nobody
#: bounds on what a grammar may cost, to compile and with each token (llguidance's own, but for what an error tells)
LIMITS: dict[str, Any] = {"max_grammar_size": 500_000, "verbose_errors": False}
#: characters that matter in JSON: llguidance must spell their tokens as the tokenizer does
_SAMPLE = '{"name": "a b", "list": [1, -2.5, true], "x": {"y": null}}'
#: what llguidance says by a name of its own, in words
_IN_WORDS = {"NoExtensionBias": "it allows no answer, or refers to itself without an end"}


class Grammars:
    """Compiles what requests ask for, for one tokenizer, and keeps the latest."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase | None, *, width: int, eos: Sequence[int], deadline: float = DEADLINE
    ) -> None:
        """``width``: V of the model's logits; ``eos``: ids that end a text."""
        self._source, self._width, self._eos, self._deadline = tokenizer, width, tuple(eos), deadline
        self._tokens: tuple[LLTokenizer, Vocabulary] | None = None
        self._kept: OrderedDict[Structured, CompiledGrammar] = OrderedDict()
        self._running: dict[Structured, _Job] = {}
        self._reading, self._books, self._places = Lock(), Lock(), Semaphore(AT_ONCE)
        self._process = os.getpid()

    @property
    def possible(self) -> bool:
        """Is there what it takes to compile anything: a tokenizer, and llguidance?"""
        return self._source is not None and find_spec("llguidance") is not None

    def prepare(self) -> None:
        """Read the tokenizer now. It takes a second or two for a large one, in which no other thread gets on."""
        self._read_tokens()

    def compile(self, asked: Structured) -> CompiledGrammar:
        """The grammar that was asked for; ``InvalidParameter`` says why there is none. Any thread may call this; it
        waits for no step of an engine, and not much longer than the deadline."""
        tokens = self._read_tokens()
        with self._books:
            if asked in self._kept:
                self._kept.move_to_end(asked)
                if self._kept[asked].budget.exceeded:
                    raise InvalidParameter(f"structured.{asked.kind}", TOO_SLOW)
                return self._kept[asked]
        job = self._job(tokens, asked)
        if not job.done.wait(self._deadline):
            raise InvalidParameter(
                f"structured.{asked.kind}", f"takes more than {self._deadline:g} s to compile: make it smaller"
            )
        if job.found is None:
            raise InvalidParameter(f"structured.{asked.kind}", job.error or "cannot be compiled")
        return job.found

    def _read_tokens(self) -> tuple[LLTokenizer, Vocabulary]:
        """The tokenizer's bytes, read once."""
        if os.getpid() != self._process:  # forked: what another thread held then, nobody gives back here
            self._process, self._running = os.getpid(), {}
            self._reading, self._books, self._places = Lock(), Lock(), Semaphore(AT_ONCE)
        with self._reading:
            if self._tokens is None:
                if self._source is None:
                    raise InvalidParameter("structured", "needs a tokenizer, and this model was given without one")
                self._tokens = _read(self._source, self._width, self._eos)
            return self._tokens

    def _job(self, tokens: tuple[LLTokenizer, Vocabulary], asked: Structured) -> _Job:
        """The one that is on its way already, or a new one, as soon as there is a place."""
        if (running := self._running.get(asked)) is not None:
            return running
        if not self._places.acquire(timeout=self._deadline):
            raise EngineBusy(f"{AT_ONCE} other grammars are being compiled")
        with self._books:
            job = self._running.setdefault(asked, fresh := _Job(*tokens, asked))
        if job is fresh:
            Thread(target=self._work, args=(job,), name="headstart-grammar", daemon=True).start()
        else:
            self._places.release()
        return job

    def _work(self, job: _Job) -> None:
        job.run()
        with self._books:
            self._running.pop(job.asked, None)
            if job.found is not None:
                self._kept[job.asked] = job.found
                while len(self._kept) > KEPT:
                    self._kept.popitem(last=False)
        self._places.release()
        job.done.set()


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


class _Job:
    """One grammar on its way, in a thread of its own."""

    def __init__(self, tokens: LLTokenizer, vocabulary: Vocabulary, asked: Structured) -> None:
        self.tokens, self.vocabulary, self.asked, self.done = tokens, vocabulary, asked, Event()
        self.found: CompiledGrammar | None = None
        self.error: str | None = None

    def run(self) -> None:
        try:
            self.found = CompiledGrammar(self.vocabulary, self._matcher(), self.asked.after)
        except InvalidParameter as error:
            self.error = str(error).removeprefix(f"{error.field} ")
        except Exception as error:  # whatever a library makes of what strangers send
            why = first_line(str(error))
            self.error = f"cannot be compiled: {_IN_WORDS.get(why, why)}"

    def _matcher(self) -> LLMatcher:
        from llguidance import LLMatcher, LLParserLimits

        found = LLMatcher(self.tokens, _source_of(self.asked), log_level=0, limits=LLParserLimits(**LIMITS))
        # Some grammars fail only when they are used: try the beginning of an answer.
        trial = found.deep_copy()
        for _ in "ab":
            row = computed(trial, self.vocabulary) if not trial.is_error() else None
            if trial.is_error():
                why = first_line(trial.get_error())
                raise InvalidParameter("structured", f"cannot be compiled: {_IN_WORDS.get(why, why)}")
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
