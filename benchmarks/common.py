"""What the benchmarks share: prompts, medians, Hugging Face's answers, the machine, and where results go.

Knows: how a run is described and stored. Does not know: what is measured.
"""

from __future__ import annotations

import json
import math
import platform
import re
import statistics
import subprocess
import time
import traceback
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import transformers

HERE = Path(__file__).parent
RESULTS = HERE / "results"
KINDS = ("dialogue", "translation", "summary", "question", "arithmetic", "code_edit")


def prompts(per_kind: int | None = None) -> dict[str, list[str]]:
    """Our sixty prompts, by kind of task."""
    found: dict[str, list[str]] = {kind: [] for kind in KINDS}
    for line in (HERE / "prompts.jsonl").read_text().splitlines():
        entry = json.loads(line)
        found[entry["task"]].append(entry["prompt"])
    return {kind: texts[:per_kind] for kind, texts in found.items()}


def geometric_mean(values: Iterable[float]) -> float:
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs))


def median(values: Iterable[float]) -> float:
    return statistics.median(values)


def quantile(values: Iterable[float], share: float) -> float:
    """The least value that so large a share of them do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


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


def machine() -> dict[str, Any]:
    """Enough to know what a figure was measured on."""
    processor = platform.processor()
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                processor = line.split(":", 1)[1].strip()
                break
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=HERE, capture_output=True, text=True, check=False
    )
    return {
        "date": time.strftime("%Y-%m-%d"),
        "processor": processor,
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "commit": commit.stdout.strip() or None,
    }


# A path with a folder in it: absolute, under ~, or under . or ..; not a hub id, a URL or a fraction.
_FOLDERS = re.compile(r"(?<![\w)/.:~])(?:~|\.\.?)?/(?:[\w.+@-]+/)+(?=[\w.+@-])")


def as_json(result: Any) -> str:
    """A result as it is stored: every path is cut to its last name, so that no folder of this machine is in it."""
    return json.dumps(_named(result), indent=1) + "\n"


def _named(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _named(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_named(part) for part in value]
    if value is None or isinstance(value, (bool, int, float)):
        return value
    return _FOLDERS.sub("", str(value))


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
        self.path.write_text(as_json(self._about | self.results))

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
