"""What rows with a grammar cost the other rows of their batch on a GPU, and themselves; do texts stay the same?

    python benchmarks/gpu_structured.py --weights FOLDER_OR_GGUF                 # 8B grown from the 135M: 5 minutes
    python benchmarks/gpu_structured.py --weights ... --parts texts              # the same ids, drafted or not
    python benchmarks/gpu_structured.py --quick                                  # a tiny model, to see that it runs

"speed": one row of eight has a JSON schema that does not end, in batches of 8 and 32, greedy and sampled (block rule);
nothing drafted ("plain"), three tokens by a draft model ("drafted"), as many as pay ("auto"), and lookup. Each turn
measures a batch in which nobody has a grammar, the same batch with grammars, and that once more without the captured
programs for masks, which is what a batch with a grammar was before they were there ("before"). Rates are of rounds in
which all rows run. "others": the rows without a grammar, over the same rows where nobody has one. "own": the rows with
one, over the same rows without.
"texts": answers with schemas that end, beside answers without, greedy and coupled, with ``invariant=True``: the ids
with nothing drafted, one at a time, against eight and 32 together, drafted and not.

Knows: which rows have a grammar. Does not know: how masks get to a device.
"""

from __future__ import annotations

import copy
import gc
import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from common import Report, interval, log, median, prompts
from gpu_common import Clock
from pairs import parser, read, small_model

from headstart import LLM, SamplingParams, Structured
from headstart.control.controller import FixedController
from headstart.lab.grow import SHAPES, grow
from headstart.testing import tiny_model, tiny_tokenizer

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 24},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "city": {"type": "string", "maxLength": 24},
        "occupation": {"type": "string", "maxLength": 32},
        "active": {"type": "boolean"},
    },
    "required": ["name", "age", "city", "occupation", "active"],
    "additionalProperties": False,
}
ENDLESS = Structured(json={"type": "array", "items": PERSON, "minItems": 100})
ENDING = Structured(json=PERSON)
ASKED = "Invent a person who lives in {} and describe them as JSON with name, age, city, occupation and active."
PLACES = ("Oslo", "Lima", "Cairo", "Kyoto", "Quito", "Perth", "Turin", "Lagos", "Dakar", "Minsk", "Leeds", "Bonn")
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 0.8, "top_p": 0.95, "verification": "block"},
}
MODES = ("plain", "drafted", "auto", "lookup")
SHARE = 8  # one row of so many has a grammar


class Models:
    """A target, its draft, a tokenizer, and prompts."""

    def __init__(self, given: Any) -> None:
        self.quick = given.quick
        if given.quick:
            self.target, self.draft, self.tokenizer = tiny_model("llama"), tiny_model("llama"), tiny_tokenizer()
        else:
            small, self.tokenizer = small_model(given.weights)
            if self.tokenizer is None:
                raise SystemExit("--weights is needed: a grammar is over the tokens of a tokenizer")
            self.target = grow(small, SHAPES[given.shape], device=given.device, dtype=torch.bfloat16)
            self.draft = copy.deepcopy(small).to(given.device, torch.bfloat16)
        self.texts = [text for kind in prompts().values() for text in kind]

    def llm(self, draft: Any, rows: int, **settings: Any) -> LLM:
        size = 160 if self.quick else 1024
        started = time.perf_counter()
        made = LLM(
            self.target, draft, tokenizer=self.tokenizer, check=False, max_rows=rows, max_model_len=size, **settings
        )
        made.prepare_structured()
        log(f"engine open ({time.perf_counter() - started:.1f} s)")
        return made

    def prompt(self, text: str) -> list[int]:
        if self.quick or not self.tokenizer.chat_template:
            ids = self.tokenizer(text)["input_ids"]
        else:
            chat = [{"role": "user", "content": text}]
            ids = self.tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        return list(ids)[-48:]

    def prompts(self, batch: int, masked: set[int], turn: int) -> list[list[int]]:
        found = []
        for row in range(batch):
            place = PLACES[(turn + row) % len(PLACES)]
            text = self.texts[(turn * 7 + row) % len(self.texts)]
            found.append(self.prompt(ASKED.format(place) if row in masked else text))
        return found


@contextmanager
def step_by_step(llm: LLM, on: bool) -> Iterator[None]:
    """Without the programs for masks."""
    rounds = llm.engine.parts.captured
    if rounds is None or not on:
        yield
        return
    kept, rounds._programs.masks = rounds._programs.masks, None
    try:
        yield
    finally:
        rounds._programs.masks = kept


def rates(llm: LLM, lines: Sequence[list[int]], params: Sequence[SamplingParams], masked: set[int]) -> dict[str, Any]:
    """Tokens a second of the rows with a grammar and of the others, over rounds in which all run."""
    llm.cold()
    clock = Clock()
    listening = llm.listen(clock)
    pairs = zip(lines, params, strict=True)
    streams = [llm.submit(line, each, id=f"r{i}") for i, (line, each) in enumerate(pairs)]
    while not llm.engine.idle:
        llm.engine.step()
    listening.close()
    for stream in streams:
        stream.result()
    full = clock.decoding(len(lines))
    seconds = sum(s for s, _ in full)
    records = [r for _, found in full for r in found]
    names = {f"r{i}/0" for i in masked}
    own = [r for r in records if r.sequence in names]
    others = [r for r in records if r.sequence not in names]
    drafted = sum(r.drafted for r in own)
    return {
        "others": sum(r.emitted for r in others) / seconds,
        "own": sum(r.emitted for r in own) / seconds,
        "rounds": len(full),
        "round_ms": 1e3 * seconds / len(full),
        "own_alpha": sum(r.accepted for r in own) / drafted if drafted else None,
    }


class Speed:
    """All cases of one engine, in turns."""

    def __init__(self, models: Models, given: Any, report: Report) -> None:
        self.models, self.given, self.report = models, given, report
        self.rows = max(given.batches)
        self.cases: list[dict[str, Any]] = []

    def measure(self) -> None:
        for draft, modes in ((self.models.draft, MODES[:3]), ("lookup", MODES[3:])):
            wanted = [mode for mode in modes if mode in self.given.modes]
            if not wanted or self.report.late:
                continue
            llm = self.models.llm(draft, self.rows, gamma="auto", max_gamma=8)
            own = llm.engine.parts.controller
            for mode in wanted:
                fixed = {"plain": 0, "drafted": 3}.get(mode)
                for batch in self.given.batches:
                    for kind in KINDS:
                        llm.engine.parts.controller = own if fixed is None else FixedController(fixed)
                        self._case(llm, mode, batch, kind)
            llm.engine.parts.controller = own
            del llm, own
            gc.unfreeze()
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()

    def _case(self, llm: LLM, mode: str, batch: int, kind: str) -> None:
        masked = set(range(0, batch, SHARE))
        found: dict[str, list[dict[str, Any]]] = {"nobody": [], "masked": [], "before": []}
        for turn in range(-1, self.given.turns):  # the first is the warm-up
            lines = self.models.prompts(batch, masked, max(turn, 0))
            names = list(found)
            for name in names[turn % 3 :] + names[: turn % 3]:
                if name == "before" and turn >= self.given.before:
                    continue
                params = [
                    SamplingParams(
                        max_tokens=self.given.tokens,
                        seed=i,
                        ignore_eos=True,
                        structured=ENDLESS if i in masked and name != "nobody" else None,
                        **KINDS[kind],
                    )
                    for i in range(batch)
                ]
                gc.collect()
                gc.freeze()
                with step_by_step(llm, name == "before"):
                    one = rates(llm, lines, params, masked)
                gc.unfreeze()
                if turn >= 0:
                    found[name].append(one)
            if self.report.late:
                break
        self._store(mode, batch, kind, len(masked), found)

    def _store(self, mode: str, batch: int, kind: str, masked: int, found: dict[str, list[dict[str, Any]]]) -> None:
        if not found["masked"]:
            return
        case: dict[str, Any] = {"mode": mode, "batch": batch, "kind": kind, "with_grammar": masked}
        for who in ("others", "own"):
            for name in ("masked", "before"):
                over = [m[who] / n[who] for m, n in zip(found[name], found["nobody"], strict=False)]
                if over:
                    case[f"{who}_{name}_over_nobody"] = median(over)
                    case[f"{who}_{name}_interval"] = interval(over)
        case["tokens_per_second"] = {
            name: {who: median(r[who] for r in runs) for who in ("others", "own")}
            for name, runs in found.items()
            if runs
        }
        case["round_ms"] = {name: median(r["round_ms"] for r in runs) for name, runs in found.items() if runs}
        alphas = [r["own_alpha"] for r in found["masked"] if r["own_alpha"] is not None]
        case["own_alpha"] = median(alphas) if alphas else None
        case["turns"] = len(found["masked"])
        self.cases.append(case)
        self.report.add("speed", self.cases)
        low, high = case["others_masked_interval"]
        before = case.get("others_before_over_nobody")
        log(
            f"{mode:8} x{batch:2} {kind:8} others {case['others_masked_over_nobody']:.3f} [{low:.3f}, {high:.3f}]"
            + (f" (before {before:.3f})" if before is not None else "")
            + f", own {case['own_masked_over_nobody']:.3f}, round {case['round_ms']['masked']:.2f} ms of "
            + f"{case['round_ms']['nobody']:.2f}, own alpha {case['own_alpha']}"
        )


def texts(models: Models, given: Any, report: Report) -> None:
    """The ids of answers, each alone and plain, against those in company, drafted and not."""
    rows = max(given.batches)
    llm = models.llm(models.draft, rows, gamma="auto", max_gamma=8, invariant=not models.quick)
    found: dict[str, Any] = {}
    own = llm.engine.parts.controller
    masked = set(range(0, given.requests, 2))
    lines = models.prompts(given.requests, masked, 0)
    for kind, setting in (("greedy", {"temperature": 0.0}), ("coupled", {"temperature": 0.8, "top_p": 0.95})):
        params = [
            SamplingParams(max_tokens=96, seed=i, structured=ENDING if i in masked else None, **setting)
            for i in range(given.requests)
        ]
        llm.engine.parts.controller = FixedController(0)
        llm.cold()
        expected = [list(llm.generate(line, each).token_ids) for line, each in zip(lines, params, strict=True)]
        for gamma in (0, 3, "auto"):
            for together in given.batches:
                llm.engine.parts.controller = own
                llm.cold()
                if gamma != "auto":
                    llm.engine.parts.controller = FixedController(int(gamma))
                answers = []
                for at in range(0, given.requests, together):
                    answers += llm.generate(lines[at : at + together], params[at : at + together])
                same = sum(list(a.token_ids) == want for a, want in zip(answers, expected, strict=True))
                ended = [a for i, a in enumerate(answers) if i in masked and a.finish_reason == "stop"]
                valid = sum(_person(a.text) for a in ended)
                name = f"{kind}, gamma {gamma}, {together} together"
                found[name] = {"same": same, "of": len(answers), "ended": len(ended), "valid": valid}
                log(f"{name}: {same} of {len(answers)} the same, {valid} of {len(ended)} that ended are valid")
                report.add("texts", found)
    llm.engine.parts.controller = own


def _person(text: str) -> bool:
    """Is it what the schema asks for?"""
    try:
        found = json.loads(text)
    except ValueError:
        return False
    return isinstance(found, dict) and set(found) == set(PERSON["required"]) and 0 <= found["age"] <= 120


def main(arguments: Sequence[str] | None = None) -> None:
    options = parser(__doc__, "turn")
    options.add_argument("--parts", nargs="+", default=["speed", "texts"], choices=("speed", "texts"))
    options.add_argument("--modes", nargs="+", default=list(MODES), choices=MODES)
    options.add_argument("--batches", nargs="+", type=int, default=[8, 32])
    options.add_argument("--tokens", type=int, default=192)
    options.add_argument("--turns", type=int, default=5)
    options.add_argument("--before", type=int, default=2, help="turns that are measured step by step as well")
    options.add_argument("--requests", type=int, default=32, help="of texts")
    given = read(options, arguments)
    name = "quick" if given.quick else f"gpu-{given.shape}"
    settings = {key: getattr(given, key) for key in ("batches", "tokens", "turns", "requests")}
    report = Report(given.out / f"structured-{name}.json", settings, given.seconds)
    models = Models(given)
    if "speed" in given.parts:
        Speed(models, given, report).measure()
    if "texts" in given.parts and not report.late:
        texts(models, given, report)
    log(f"stored: {report.path}")


if __name__ == "__main__":
    main()
