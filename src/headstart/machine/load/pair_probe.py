"""What a draft model promises beside its target on a CPU: measured at the first load of a pair, and remembered.

Knows: what is measured, how a draft with 4 bits compares with one with 8 (``maths.cost``), when a measurement is to be
doubted, and where the result is kept. Does not know: how models are loaded or packed, or who drafts.

The target checks every guess, so a draft's bits change the speed and nothing else: fewer of them make its step shorter
and its guesses a little worse. Which weighs more depends on both models and on the machine. And what was measured is
where a controller begins (``Forecast``): it need not pay for finding out whether a draft is worth reading the prompt.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import platform
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ...maths.cost import CostModel, Forecast
from ..cache import cache_folder, write_whole
from ..cpu.build import isa, library_name
from ..cpu.packed import VERSION
from ..cpu.runner import CpuRunner
from ..cpu.thread_count import timed
from ..model_runner import ModelRunner

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["LEAST_PARAMETERS", "Figures", "Promise", "measure", "pair_file", "probe_text", "recall", "remember"]

log = logging.getLogger(__name__)

LEAST_PARAMETERS = 16_000_000  # of a smaller draft a step is no matter of reading its weights
TOKENS = 256  # of text that the models are compared on, at most,
PATIENCE = 2.0  # seconds that the target may read it, or write it,
FEWEST = 24  # and what there must be at least
TURNS = 4
WIDTHS = (1, 3, 5, 9)  # tokens of the target's forwards that are timed
STEPS = 2  # of a draft that follow each other: what the caches hold after the first one counts
_PIECE = 32  # tokens that are read at once

TEXT = """Question: Why is the sky blue during the day, and red in the evening?
Answer: Sunlight is made of all colours. On its way through the air, blue light is scattered far more than red \
light, so that it reaches us from every direction. In the evening the light has to travel a longer way through the \
air, and most of the blue is gone before it arrives.

Write a function that counts how often each word occurs in a text.

```python
def count_words(text):
    counts = {}
    for word in text.lower().split():
        word = word.strip(".,;:!?")
        if word:
            counts[word] = counts.get(word, 0) + 1
    return counts
```

A train leaves at 9:40 and arrives at 11:25. How long does the journey take? From 9:40 to 10:40 is one hour, and from \
10:40 to 11:25 are 45 minutes, so the journey takes one hour and 45 minutes.
"""


class Figures(NamedTuple):
    """What was measured of a draft with one kind of weights."""

    greedy: float  # how often it says what the target says
    alpha: float  # E[sum_x min(p, q)]
    step: float  # seconds


@dataclass(frozen=True)
class Promise:
    """A target's costs, and what was measured of a draft beside it, by its kind of weights."""

    plain: float  # seconds of the target's step
    v: Mapping[int, float]  # its forwards by width, in steps
    figures: Mapping[str, Figures]
    most: int  # tokens that a round may draft
    sure: bool = True  # nothing else wanted the cores meanwhile

    @property
    def kind(self) -> str:
        """The kind of weights that promises the most."""
        return max(self.figures, key=self.speedup)

    def speedup(self, kind: str) -> float:
        """Over plain decoding, at the best draft length."""
        cost, alpha = self._cost(kind), self.figures[kind].alpha
        return max(cost.speedup(gamma, alpha) for gamma in range(1, self.most + 1))

    def forecast(self) -> Forecast:
        best = self.figures[self.kind]
        return Forecast(self._cost(self.kind), best.greedy, best.alpha)

    def _cost(self, kind: str) -> CostModel:
        return CostModel(c=self.figures[kind].step / self.plain, v=self.v)

    def __str__(self) -> str:
        several = len(self.figures) > 1
        what = "the draft's weights are " + self.kind if several else "the draft"
        said = (
            (f"{kind} " if several else "") + f"{self.speedup(kind):.2f}x (alpha {f.alpha:.2f}, "
            f"the same token {f.greedy:.0%}, a step {f.step * 1e3:.3g} ms to the target's {self.plain * 1e3:.3g})"
            for kind, f in sorted(self.figures.items(), key=lambda item: -self.speedup(item[0]))
        )
        return (
            f"{what}, as measured beside this target; expected over plain decoding: "
            + ", ".join(said)
            + ("" if self.sure else "; other programs used the processor meanwhile, so the next load measures again")
        )


# -- what is remembered ---------------------------------------------------------------------------------------------


def pair_file(*about: object) -> Path:
    """Where the choice for a pair is kept. ``about``: all that the two models and their settings are known by."""
    known = [VERSION, library_name(isa()), platform.node(), platform.processor(), *about]
    digest = hashlib.sha256(json.dumps(known).encode()).hexdigest()
    return cache_folder() / "drafts" / f"{digest[:20]}.json"


def recall(path: Path | None) -> Promise | None:
    """What was measured before of this pair, on this machine; None if nothing was, or what there is cannot be read."""
    if path is None:
        return None
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        figures = {str(kind): Figures(*map(float, of)) for kind, of in found["figures"].items()}
        v = {int(width): float(time) for width, time in found["v"].items()}
        promise = Promise(float(found["plain"]), v, figures, int(found["most"]))
        promise.speedup(promise.kind)  # it can be reckoned with
    except (OSError, ValueError, TypeError, AttributeError, LookupError, ArithmeticError, RecursionError):
        return None
    times = (promise.plain, *v.values(), *(of.step for of in figures.values()))
    return promise if all(0 < time < math.inf for time in times) else None


def remember(path: Path | None, promise: Promise) -> None:
    """Keep it for the next load, unless it is to be doubted."""
    if path is not None and promise.sure:
        about = {"plain": promise.plain, "v": promise.v, "figures": promise.figures, "most": promise.most}
        with suppress(OSError):  # a cache that cannot be written costs a measurement next time
            write_whole(path, json.dumps(about))


# -- measuring ------------------------------------------------------------------------------------------------------


@torch.inference_mode()
def measure(target: ModelRunner, drafts: Mapping[str, CpuRunner], text: Sequence[int], most: int) -> Promise | None:
    """Measure a draft, with one kind of weights or several, beside its target. None if there is too little text, or one
    of them says no numbers: that is for whoever runs it to refuse.

    ``text``: token ids, see ``probe_text``. ``most``: tokens that a round may draft. Rows 0 are written to; none is
    live yet.
    """
    if len(text) < FEWEST:
        return None
    agreed = _agreement(target, drafts, text)
    if any(math.isnan(alpha) for _, alpha in agreed.values()):
        return None
    widths = {width: [float("inf")] for width in WIDTHS}
    steps, quiet = {kind: [float("inf")] for kind in drafts}, dict.fromkeys(drafts, False)
    for _ in range(TURNS):  # in turns, so that what comes and goes meets all alike
        for width, seconds in widths.items():
            seconds.append(timed(partial(_run, target, text, width), 1).seconds)
            if width == WIDTHS[0]:
                continue
            for kind, runner in drafts.items():
                one = timed(partial(_steps, runner, text), runner.threads)
                steps[kind].append(one.seconds / STEPS)
                quiet[kind] |= one.quiet
    plain = min(widths[1])
    v = {width: max(1.0, min(seconds) / plain) for width, seconds in widths.items()}
    figures = {kind: Figures(same, min(1.0, alpha), min(steps[kind])) for kind, (same, alpha) in agreed.items()}
    promise = Promise(plain, v, figures, most, sure=all(quiet.values()))
    log.info("%s", promise)
    return promise


def probe_text(target: ModelRunner, tokenizer: PreTrainedTokenizerBase | None, known: int) -> list[int]:
    """Ids, all below ``known``, of what the models are compared on; without a tokenizer what the target says itself."""
    most = min(TOKENS, target.max_len)
    if tokenizer is not None:
        ids: list[int] = tokenizer(TEXT, add_special_tokens=False)["input_ids"]
        return [token for token in ids if token < known][:most]
    drawn, generator, begun = [known // 2], torch.Generator().manual_seed(0), perf_counter()
    while len(drawn) < most and perf_counter() - begun < PATIENCE:
        p = _probabilities(target, drawn[-1:], len(drawn) - 1)[0, :known]
        if not bool(torch.isfinite(p).all()):
            break
        drawn.append(int(torch.multinomial(p, 1, generator=generator)))
    return drawn


def _agreement(
    target: ModelRunner, drafts: Mapping[str, CpuRunner], text: Sequence[int]
) -> dict[str, tuple[float, float]]:
    """How often each draft's likeliest token is the target's, and alpha, over as much of the text as the target reads
    in time."""
    same, shared, read, begun = dict.fromkeys(drafts, 0.0), dict.fromkeys(drafts, 0.0), 0, perf_counter()
    while read < len(text) and (read < FEWEST or perf_counter() - begun < PATIENCE):
        piece = text[read : read + _PIECE]
        p = _probabilities(target, piece, read)
        for kind, runner in drafts.items():
            q = _probabilities(runner, piece, read)
            width = min(p.shape[-1], q.shape[-1])  # what one vocabulary has and the other lacks is never agreed on
            shared[kind] += float(torch.minimum(p[:, :width], q[:, :width]).sum())
            same[kind] += float((p.argmax(-1) == q.argmax(-1)).sum())
        read += len(piece)
    return {kind: (same[kind] / read, shared[kind] / read) for kind in drafts}


def _probabilities(runner: ModelRunner, tokens: Sequence[int], behind: int) -> Tensor:
    """[N, V] after each of these tokens."""
    return runner.forward(slice(0, 1), torch.tensor([list(tokens)]), [behind])[0].float().softmax(-1)


def _run(runner: ModelRunner, text: Sequence[int], width: int, _threads: int = 1) -> Any:
    """The text's last tokens once more, behind all the others."""
    at = len(text) - width
    return runner.forward(slice(0, 1), torch.tensor([list(text[at:])]), [at])


def _steps(runner: ModelRunner, text: Sequence[int], _threads: int = 1) -> None:
    for _ in range(STEPS):
        _run(runner, text, 1)
