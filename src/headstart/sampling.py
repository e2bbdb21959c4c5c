"""How one request is sampled.

Knows: the settings, which values are allowed, and which verification rule they come to.
Does not know: what is done with them; ``maths`` does.

The bounds keep float32 arithmetic sound: at each of them, and at all of them together, finite logits give a
distribution that sums to 1 (``tests/test_types_bounds.py``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Literal, get_args

from .errors import InvalidParameter
from .structured import Structured
from .values import INT64, flag, ids, integer, number, shown

__all__ = ["MAX_LOGPROBS", "SamplingParams", "Structured", "Verification"]

Verification = Literal["block", "token", "coupled"]

MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 1000
MAX_N = 64
MAX_LOGPROBS = 50
# A positive temperature under this is refused: float32 could not tell it from others. At it, a token whose logit is
# below the largest by as little as float32 can hold of usual logits has no mass left.
MIN_TEMPERATURE, MAX_TEMPERATURE = 1e-30, 100.0
REPETITION = (0.01, 100.0)
PENALTY = (-2.0, 2.0)
BIAS = (-100.0, 100.0)


@dataclass(frozen=True)
class SamplingParams:
    """How one request is sampled. The names are vLLM's; ``speculate`` and ``verification`` are ours.

    ``temperature=0`` is greedy. ``max_tokens=None`` writes to the end of the context; 0 reads the prompt and writes
    nothing. ``logprobs=k`` returns the target's own log-probabilities (before any penalty or temperature) of each token
    and of the k most likely ones; ``prompt_logprobs=k`` the same of the prompt's (``Completion.prompt_logprobs``).

    ``verification`` is the rule that keeps speculation lossless when sampling: "block" accepts the most, "token" is
    the classical rule, "coupled" gives the very tokens that plain decoding gives for the same seed. None is "coupled"
    if there is a ``seed``, so that a seed gives one text, and "block" if there is none; ``rule`` says which.

    ``skip_special_tokens=False`` leaves the tokenizer's special tokens in the text, but for the one that ends it.

    ``structured`` holds the answer to a JSON schema, a regex, a list of choices or a grammar (``Structured``): every
    token is drawn from those that can still lead to such an answer. It needs the extra ``structured`` and a tokenizer.

    Numbers may be NumPy scalars or tensors without dimensions; they are kept as Python's own.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | None = None
    stop: str | Sequence[str] | None = ()
    stop_token_ids: Sequence[int] | None = ()
    min_tokens: int = 0
    max_tokens: int | None = 128
    ignore_eos: bool = False
    logprobs: int | None = None
    seed: int | None = None
    n: int = 1
    speculate: bool = True
    verification: Verification | None = None
    prompt_logprobs: int | None = None
    structured: Structured | None = None
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        self._read_numbers()
        self._read_counts()
        self._keep("stop", _stop_strings(self.stop))
        self._keep("stop_token_ids", _stop_ids(self.stop_token_ids))
        if self.logit_bias is not None:
            self._keep("logit_bias", _biases(self.logit_bias))
        if self.verification is not None and self.verification not in get_args(Verification):
            raise InvalidParameter(
                "verification", f"must be 'block', 'token', 'coupled' or None, not {shown(self.verification)}"
            )
        self._keep("structured", _structured(self.structured))
        for name in ("ignore_eos", "speculate", "skip_special_tokens"):
            self._keep(name, flag(name, getattr(self, name)))

    def _keep(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _read_numbers(self) -> None:
        temperature = number("temperature", self.temperature, 0.0, MAX_TEMPERATURE)
        if 0 < temperature < MIN_TEMPERATURE:
            raise InvalidParameter(
                "temperature",
                f"must be 0 (greedy) or between {MIN_TEMPERATURE:g} and {MAX_TEMPERATURE:g}, not {temperature}",
            )
        self._keep("temperature", temperature)
        top_p = number("top_p", self.top_p, 0.0, 1.0)
        if top_p == 0:
            raise InvalidParameter("top_p", "must be above 0 and at most 1, not 0")
        self._keep("top_p", top_p)
        self._keep("min_p", number("min_p", self.min_p, 0.0, 1.0))
        for name in ("presence_penalty", "frequency_penalty"):
            self._keep(name, number(name, getattr(self, name), *PENALTY))
        self._keep("repetition_penalty", number("repetition_penalty", self.repetition_penalty, *REPETITION))

    def _read_counts(self) -> None:
        top_k = integer("top_k", self.top_k, -1)
        self._keep("top_k", max(top_k, 0))  # -1 is vLLM's other way to say "off"
        if self.max_tokens is not None:
            self._keep("max_tokens", integer("max_tokens", self.max_tokens, 0))
        self._keep("min_tokens", integer("min_tokens", self.min_tokens, 0))
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidParameter(
                "min_tokens", f"must be at most max_tokens ({self.max_tokens}), not {self.min_tokens}"
            )
        self._keep("n", integer("n", self.n, 1, MAX_N))
        for name in ("logprobs", "prompt_logprobs"):
            if (value := getattr(self, name)) is not None:
                self._keep(name, integer(name, value, 0, MAX_LOGPROBS))
        if self.seed is not None:
            self._keep("seed", integer("seed", self.seed, -INT64 - 1, 2**64 - 1))

    @property
    def greedy(self) -> bool:
        """True when every token is an argmax."""
        return self.temperature == 0

    @property
    def rule(self) -> Verification:
        """The verification rule in force: the one that was given, or the one that follows from the seed."""
        if self.verification is not None:
            return self.verification
        return "block" if self.seed is None else "coupled"

    def check_vocabulary(self, size: int) -> None:
        """Refuse token ids the model does not have. Called where the vocabulary is known, before any work."""
        for name, tokens in (("logit_bias", self.logit_bias), ("stop_token_ids", self.stop_token_ids)):
            for token in tokens or ():
                if token >= size:
                    raise InvalidParameter(name, f"names token {token}, but the vocabulary ends at {size - 1}")


def _structured(value: object) -> Structured | None:
    if value is None or isinstance(value, Structured):
        return value
    example = "headstart.Structured(json={...})"
    raise InvalidParameter("structured", f"must be a Structured, as in {example}, not {shown(value)}")


def _stop_strings(value: object) -> tuple[str, ...]:
    if value is None:
        return ()
    if not isinstance(value, Iterable) or isinstance(value, (bytes, bytearray, Mapping)):
        raise InvalidParameter("stop", f"must be a string or a list of strings, not {shown(value)}")
    stop = (value,) if isinstance(value, str) else tuple(value)
    if len(stop) > MAX_STOP_STRINGS:
        raise InvalidParameter("stop", f"takes at most {MAX_STOP_STRINGS} strings, not {len(stop)}")
    for text in stop:
        if not isinstance(text, str) or not text:
            raise InvalidParameter("stop", "must hold non-empty strings")
        if len(text) > MAX_STOP_LENGTH:
            raise InvalidParameter("stop", f"strings are at most {MAX_STOP_LENGTH} characters, not {len(text)}")
        if any("\ud800" <= letter <= "\udfff" for letter in text):
            raise InvalidParameter("stop", "holds a lone surrogate, which no text has")
    return tuple(map(str, stop))


def _stop_ids(value: object) -> tuple[int, ...]:
    if value is None:
        return ()
    unordered = list(value) if isinstance(value, Set) else value
    return tuple(integer("stop_token_ids", token, 0) for token in ids("stop_token_ids", unordered))


def _biases(value: object) -> dict[int, float]:
    if not isinstance(value, Mapping):
        raise InvalidParameter("logit_bias", f"must be a dict of token ids and numbers, not {shown(value)}")
    return {integer("logit_bias", token, 0): number("logit_bias", bias, *BIAS) for token, bias in value.items()}
