"""How long it takes from two folders of weights to an engine that is ready, and where the time goes.

    python benchmarks/gpu_startup.py TARGET_FOLDER DRAFT_FOLDER

One start-up, in a process of its own; ``gpu.py`` runs it twice, the first time with nothing compiled. The last line is
JSON. Seconds are counted from the call of ``LLM``: importing Python packages comes before, and is told beside.
"""

from __future__ import annotations

import time

_BEGUN = time.perf_counter()

import argparse  # noqa: E402
import json  # noqa: E402
from collections.abc import Callable  # noqa: E402
from typing import Any  # noqa: E402

from headstart import LLM, SamplingParams  # noqa: E402
from headstart.engine import warm_up  # noqa: E402
from headstart.engine.captured import CapturedRounds  # noqa: E402
from headstart.machine.gpu.compile import precompile  # noqa: E402
from headstart.machine.load import open  # noqa: E402


class Phases:
    """The seconds that pass inside the phases of a start-up, while this is entered: those functions are timed."""

    def __init__(self) -> None:
        self._places = {
            "loading": (open, "load"),
            "rehearsing_and_compiling": (warm_up, "_compile"),
            "compiling": (precompile, "_compile"),
            "workers": (precompile._Helper, "finish"),
            "recording": (CapturedRounds, "warm_up"),
        }
        self.seconds = dict.fromkeys(self._places, 0.0)
        self._own: list[Any] = []

    def __enter__(self) -> Phases:
        self._started = time.perf_counter()
        for phase, (module, name) in self._places.items():
            own = getattr(module, name)
            self._own.append(own)
            setattr(module, name, self._timed(phase, own))
        return self

    def __exit__(self, *_: Any) -> None:
        self.whole = time.perf_counter() - self._started
        for (module, name), own in zip(self._places.values(), self._own, strict=True):
            setattr(module, name, own)

    def _timed(self, phase: str, own: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **options: Any) -> Any:
            started = time.perf_counter()
            try:
                return own(*args, **options)
            finally:
                self.seconds[phase] += time.perf_counter() - started

        return timed

    def told(self) -> dict[str, float]:
        """The phases, which add up to the whole. ``runners``: lowering both models, and all else; ``workers``: waiting
        for the processes that compile; ``fetching``: taking what they made from the cache."""
        found = self.seconds
        both = found["rehearsing_and_compiling"]
        return {
            "loading": found["loading"],
            "runners": self.whole - found["loading"] - both - found["recording"],
            "rehearsing": both - found["compiling"],
            "workers": found["workers"],
            "fetching": found["compiling"] - found["workers"],
            "recording": found["recording"],
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", help="folder of the target's weights")
    parser.add_argument("draft", help="folder of the draft's")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--length", type=int, default=8192, help="tokens of context")
    parser.add_argument("--gamma", default="auto")
    args = parser.parse_args()
    gamma = args.gamma if args.gamma == "auto" else int(args.gamma)
    compiled_before = precompile._begun(precompile._folder())
    imported = time.perf_counter() - _BEGUN
    started = time.perf_counter()
    with Phases() as phases:
        llm = LLM(args.target, args.draft, gamma=gamma, overlap=False, max_rows=args.rows, max_model_len=args.length)
    answer = llm.generate([1, 2, 3], SamplingParams(temperature=0, max_tokens=9, ignore_eos=True))
    rounds = llm.engine.parts.captured
    found = {
        "seconds_to_ready": phases.whole,
        "seconds_to_first_answer": time.perf_counter() - started,
        "seconds_importing": imported,
        "phases": phases.told(),
        "compiled_before": compiled_before,
        "recordings": rounds.captured_programs if rounds is not None else 0,
        "tokens": len(answer.token_ids),
        "rows": args.rows,
        "max_model_len": args.length,
        "gamma": gamma,
    }
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
