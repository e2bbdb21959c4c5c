"""What the benchmarks share: prompts, medians, Hugging Face's answers, the machine, and where results go.

Knows: how a run is described and stored. Does not know: what is measured.
"""

from __future__ import annotations

import math
import os
import time
import traceback
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from headstart.lab.machine_facts import machine
from headstart.lab.report.store import as_json
from headstart.lab.statistics import geometric_mean, median, quantile
from headstart.lab.texts import shipped
from headstart.machine.files import write_whole

__all__ = [
    "KINDS",
    "RESULTS",
    "Report",
    "as_json",
    "geometric_mean",
    "greedy",
    "interval",
    "log",
    "machine",
    "median",
    "prompts",
    "quantile",
    "save",
    "set_draft_length",
    "share_of_cores",
]

HERE = Path(__file__).parent
RESULTS = HERE / "results"
KINDS = ("dialogue", "translation", "summary", "question", "arithmetic", "code_edit")


def prompts(per_kind: int | None = None) -> dict[str, list[str]]:
    """Our sixty prompts, by kind of task."""
    found: dict[str, list[str]] = {kind: [] for kind in KINDS}
    for text in shipped():
        found[text.task].append(text.turns[0])
    return {kind: texts[:per_kind] for kind, texts in found.items()}


def share_of_cores(jobs: int) -> dict[str, str]:
    """The environment of one of ``jobs`` processes that run at a time, so that together they have a thread a core."""
    return dict(os.environ) | ({"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // jobs))} if jobs > 1 else {})


def interval(values: Iterable[float]) -> tuple[float, float]:
    """Where the median lies with at least 95%, however the values are spread (order statistics); under six values,
    all of them."""
    ordered = sorted(values)
    below, outside = 0, 0.0
    while (outside := outside + math.comb(len(ordered), below) / 2 ** len(ordered)) <= 0.025:
        below += 1
    return ordered[max(0, below - 1)], ordered[len(ordered) - max(1, below)]


def log(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {text}", flush=True)


def greedy(model: Any, ids: list[int], tokens: int, **options: Any) -> list[int]:
    """Hugging Face's own greedy answer to one prompt."""
    batch = torch.tensor([ids], device=model.device)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        out = model.generate(
            batch,
            attention_mask=torch.ones_like(batch),
            do_sample=False,
            max_new_tokens=tokens,
            pad_token_id=0,
            **options,
        )
    answer: list[int] = out[0, len(ids) :].tolist()
    return answer


def set_draft_length(draft: Any, tokens: int, confidence: float = 0.0) -> None:
    """Hugging Face's assisted generation: so many tokens a round. These are settings of the draft's."""
    draft.generation_config.update(
        num_assistant_tokens=tokens,
        num_assistant_tokens_schedule="constant",
        assistant_confidence_threshold=confidence,
    )


class Report:
    """Results that are stored as they come, and the time that is left for more."""

    def __init__(self, path: Path, settings: dict[str, Any], seconds: float) -> None:
        self.path, self._about = path, {"machine": machine(), "settings": settings}
        self.results: dict[str, Any] = {}
        self._end = time.perf_counter() + seconds
        path.parent.mkdir(parents=True, exist_ok=True)

    @property
    def late(self) -> bool:
        return time.perf_counter() > self._end

    def add(self, name: str, result: Any) -> None:
        self.results[name] = result
        write_whole(self.path, as_json(self._about | self.results))

    def guarded(self, part: Callable[[], Any]) -> Any:
        """A part that may fail without taking the others along: then it says so."""
        try:
            return part()
        except Exception as error:
            traceback.print_exc()
            return {"failed": f"{type(error).__name__}: {error}"}


def save(name: str, result: dict[str, Any]) -> Path:
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / name
    path.write_text(as_json(result))
    return path
