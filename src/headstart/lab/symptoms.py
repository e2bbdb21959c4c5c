"""What went wrong, and what to do about it: by symptom, with the figures that show it.

Knows: the usual reasons why speculation pays less than hoped, and how each shows in measurements. Does not know: how
anything is measured. docs/choosing.md tells the same at length.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["Seen", "Symptom", "symptoms"]

LOW, HIGH = 0.5, 0.75  # alpha
GAIN = 1.1  # a speed-up that is worth having
DEAR = 0.25  # of a plain round, for a drafted token: then even good guesses win little
STEEP = 0.15  # of a plain round, for each token more in a forward of the target
TIGHT = 0.85  # of the memory
LONG = 2048  # tokens of a prompt


@dataclass(frozen=True)
class Seen:
    """What was measured of one draft at one number of rows and temperature; None: nobody knows."""

    draft: str
    rows: int
    temperature: float
    speedup: float
    alpha: float | None = None  # a_1: how often the first guess holds
    step: float | None = None  # a drafted token, in plain rounds
    wider: float | None = None  # a token more in the target's forward, in plain rounds
    greedy_alpha: float | None = None  # a_1 without sampling, where this is with it
    fewer: float | None = None  # the speed-up with one row, where this is with more


@dataclass(frozen=True)
class Symptom:
    """Something that holds speculation back."""

    name: str
    figures: str
    advice: str

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name, "figures": self.figures, "advice": self.advice}

    def __str__(self) -> str:
        return f"{self.name}: {self.figures}. {self.advice}."


def symptoms(seen: Seen) -> list[Symptom]:
    """What the figures of a draft show."""
    return [*_of(seen)]


def _of(seen: Seen) -> Iterator[Symptom]:
    alpha = seen.alpha
    if alpha is not None and alpha < LOW and not seen.temperature:
        yield Symptom(
            f"{seen.draft}: alpha under {LOW}",
            f"{alpha:.0%} of first guesses hold",
            "Use a draft of the same family, tuned alike; or distil one from the target's own text (headstart "
            "distill); or draft='lookup' where answers repeat their prompts",
        )
    if alpha is not None and alpha >= HIGH and seen.speedup < GAIN:
        yield Symptom(f"{seen.draft}: alpha high and no speed-up", *_why_slow(seen, alpha))
    if seen.fewer is not None and seen.rows > 1 and seen.fewer >= GAIN > seen.speedup:
        wider = f", and a token more a row costs {seen.wider:.0%} of a plain round" if seen.wider is not None else ""
        yield Symptom(
            f"{seen.draft}: large batches",
            f"{seen.fewer:.2f}x with one row, {seen.speedup:.2f}x with {seen.rows}{wider}",
            "Rows share a forward, and it is no longer free to make it wider. gamma='auto' shortens drafts by itself "
            "and stops where they do not pay; use fewer rows where one answer's time matters more than all together",
        )
    if seen.temperature and alpha is not None and seen.greedy_alpha is not None and alpha < seen.greedy_alpha - 0.1:
        yield Symptom(
            f"{seen.draft}: high temperature",
            f"{alpha:.0%} of first guesses hold at temperature {seen.temperature:g}, {seen.greedy_alpha:.0%} without",
            "A draft is drawn from its own distribution, and the two differ most where neither is sure. A lower "
            "temperature or top_p helps; so does distilling at the temperature that is served",
        )


def _why_slow(seen: Seen, alpha: float) -> tuple[str, str]:
    step, wider = seen.step or 0.0, seen.wider or 0.0
    figures = (
        f"{alpha:.0%} of first guesses hold and the speed-up is {seen.speedup:.2f}x: a drafted token costs {step:.0%} "
        f"of a plain round, and verifying it {wider:.0%}"
    )
    if step >= DEAR:
        return figures, (
            "The draft is too slow: use a smaller one, a head, or weights of fewer bits (--draft-quantization int4); "
            "on a CPU see that both models run on the kernels (headstart doctor)"
        )
    if wider >= STEEP:
        return figures, (
            "The target's wider forward is dear here: fewer rows, or weights of fewer bits, which leave the machine "
            "time to spare"
        )
    return figures, "Something else takes the time: see what a round is made of (headstart profile)"


def memory_tight(used: int, total: int, rows: int, length: int) -> Symptom | None:
    """``used``: bytes of all weights and of all keys and values, of ``total``."""
    if used < TIGHT * total:
        return None
    return Symptom(
        "memory too tight",
        f"weights and keys take {used / 2**30:.1f} of {total / 2**30:.1f} GiB with {rows} rows of {length} tokens",
        "A smaller --max-model-len or fewer --max-rows; a quantized draft; draft='lookup' or a head, which take next "
        "to nothing; a quantized target (--quantization int8)",
    )


def long_prompts(tokens: float, read: Mapping[str, float]) -> Symptom | None:
    """``tokens`` of a usual prompt; ``read``: seconds that target and draft take for a prompt's token."""
    if tokens < LONG:
        return None
    share = read.get("draft", 0.0) / max(read.get("target", 0.0), 1e-12)
    return Symptom(
        "long prompts",
        f"prompts have {tokens:,.0f} tokens, and the draft reads one in {share:.0%} of the target's time",
        "A draft model has to read the prompt, too: for short answers to long prompts that is not won back. A head or "
        "draft='lookup' reads nothing, and lookup is at its best where answers copy from the prompt",
    )
