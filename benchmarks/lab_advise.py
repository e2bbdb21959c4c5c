"""Is what ``advise`` predicts what is measured? Points 1 and 2 of the lab.

Knows: candidates for the embedded model, grown pairs with a wanted acceptance rate, and how predicted is held against
measured. Does not know: how anything is predicted or measured (``headstart.lab``).

    python benchmarks/lab_advise.py --device cpu --model-draft DIR --worse DIR   point 1: the embedded model
    python benchmarks/lab_advise.py --weights DIR --ids FILE                     point 2: a GPU, grown pairs
    python benchmarks/lab_advise.py --quick                                      tiny models, to see that it runs

Point 1: predictions are made from prompts of ../shared/data; ``bench`` measures every candidate on other prompts of the
same tasks. Point 2: for each draft and batch size the prediction is made from some prompts, and measured on others.
"""

from __future__ import annotations

import gc
import json
import random
import time
from argparse import Namespace
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from common import Report, log
from pairs import SHARED, THIRD, Noise, Setting, parser, read, setting_of

from headstart.errors import HeadstartError
from headstart.lab.advice_record import Advice, AdviseSettings
from headstart.lab.advising import Adviser
from headstart.lab.agreement import Written
from headstart.lab.bench_record import ALL, BenchSettings
from headstart.lab.benching import Bencher
from headstart.lab.candidates import candidates
from headstart.lab.predict import write
from headstart.lab.system import System, SystemOptions
from headstart.lab.texts import Text, by_task, choose, read_texts

WITHIN = 0.10
TASKS = ("arithmetic", "code", "dialogue", "instruction")


# -- point 1 -------------------------------------------------------------------------------------------------------


def halves(data: Path, per_task: int) -> tuple[list[Text], list[Text]]:
    """Prompts to predict from, and others of the same tasks to measure on."""
    found = [text for task in TASKS for text in read_texts(data / f"{task}.jsonl")]
    groups = by_task(found)
    first = [text for texts in groups.values() for text in texts[: 2 * per_task]]  # advise keeps every other one back
    other = [text for texts in groups.values() for text in texts[-per_task:]]
    return choose(first), choose(other)


def embedded(given: Namespace, report: Report) -> None:
    """Every candidate predicted by ``advise`` and measured by ``bench``, on prompts that advise was not given."""
    drafts: list[Any] = [path for path in (given.model_draft, given.worse) if path is not None]
    seen, unseen = halves(given.data, given.per_task)
    options = SystemOptions(max_rows=1, max_model_len=1024, draft_quantization="int8", check=False, device="cpu")
    if "advise" in given.parts:
        settings = AdviseSettings(tokens=given.tokens, seconds=given.advise_seconds, gammas=(1, 2, 4), confirm=2)
        log(f"advise: {len(seen)} prompts, {len(drafts)} further drafts")
        with Adviser(options, drafts, seen, settings, tell=quiet) as adviser:
            adviser.run(settings.seconds)
            advice = adviser.result()
        log(advice.recommendation.sentence)
        report.add("advice", advice.to_json())
    else:
        report.add("advice", json.loads(report.path.read_text(encoding="utf-8"))["advice"])
    if "bench" not in given.parts:
        return
    told = report.results["advice"]["results"]
    predicted = {one["name"]: one["predicted"][0] for one in told["candidates"] if one["predicted"]}
    asked, _ = candidates(None, drafts, device="cpu", quantization=options.draft_quantization)
    run = [one for one in asked if one.name in predicted]
    bench = BenchSettings(tokens=given.tokens, turns=1, seconds=given.bench_seconds)  # prompts differ more than turns
    log(f"bench: {len(unseen)} other prompts, {', '.join(one.name for one in run)}")
    found = measured_by_bench(options, run, unseen, bench)
    rows = []
    for one in run:
        first, ratio = predicted[one.name], found[one.name]  # with gamma auto
        row = compared(one.name, first["speedup"]["mid"], ratio.value)
        rows.append(row | {"tau": first["tau"], "bench": ratio.to_json()})
    fastest = max(rows, key=lambda row: row["measured"])["name"]
    picked = told["recommendation"]["candidate"] or max(rows, key=lambda row: row["predicted"])["name"]
    report.add("point_1", {"candidates": rows, "picked": picked, "fastest": fastest, "same": picked == fastest})
    log(f"advise picked {picked}; bench finds {fastest} fastest")


def measured_by_bench(
    options: SystemOptions, drafts: Sequence[Any], texts: Sequence[Text], settings: BenchSettings
) -> dict[str, Any]:
    """The speed-up of each draft, all of them in turns with plain decoding (one bench, its drafts opened by hand, since
    each has weights of its own kind)."""
    with Bencher(options.changed(draft=None), texts, settings, tell=quiet) as bencher:
        plain = bencher.systems["plain"]
        for one in drafts:
            bencher.systems[one.name] = plain.sibling(one.draft, quiet, **one.settings)
        bencher.run(settings.seconds)
        found = bencher.result()
    return {way.name: way.speedup[ALL] for way in found.ways[1:]}


# -- point 2 -------------------------------------------------------------------------------------------------------


def pairs(setting: Setting, given: Namespace, report: Report) -> None:
    """Grown pairs at three acceptance levels, and several batch sizes."""
    lines = prompts(setting, given)
    longest = 240 if given.quick else 512
    sizes = setting.options | {"max_rows": max(given.batches), "max_model_len": longest, "draft_quantization": None}
    options = SystemOptions(model=setting.target).changed(**sizes)
    log("opening the target")
    plain = System.open(options, quiet, draft=None)
    texts = write(plain, lines[:8], tokens=48, ignore_eos=True)
    noise, found = Noise(setting.small), earlier(given.earlier)

    def measured(kind: str, alpha: float) -> list[dict[str, Any]]:
        draft, about = noisy(setting, noise, alpha, texts, kind)
        log(f"{kind}, alpha {alpha}: {about}")
        settings = AdviseSettings(
            rows=tuple(given.batches),
            gammas=(1, 2, 4),
            tokens=given.tokens,
            ignore_eos=True,
            confirm=1,
            seconds=given.pair_seconds,
        )
        started = time.perf_counter()
        adviser = Adviser(options, [draft], None, settings, tell=quiet, prompts=lines, plain=plain, only=True)
        with adviser:
            adviser.run(settings.seconds)
            advice = adviser.result()
        log(f"  {time.perf_counter() - started:.0f} s")
        return cells(advice, kind, alpha, about, given.batches)

    for kind, alpha in wanted(given, found if given.go_on else []):
        if report.late:
            log(f"no time left for {kind} at {alpha}")
            continue
        new = report.guarded(partial(measured, kind, alpha))  # one that fails does not take the others along
        if isinstance(new, dict):
            log(f"{kind} at {alpha}: {new['failed']}")
            new = []
        names = {cell["name"] for cell in new}
        found = [cell for cell in found if cell["name"] not in names] + new
        report.add("pairs", found)
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    within = [cell["within"] for cell in found]
    agree = [cell["bench_agrees"] for cell in found]
    report.add("point_2", {"cells": len(found), "within": sum(within), "advice_agrees": sum(agree)})
    log(f"{sum(within)} of {len(found)} within {WITHIN:.0%}; the advice agrees with what was measured in {sum(agree)}")


def wanted(given: Namespace, stored: Sequence[dict[str, Any]]) -> list[tuple[str, float]]:
    """Kinds of drafts and acceptance rates, in the order in which they are measured; without those that are stored."""
    pairs = [(kind, alpha) for alpha in given.alphas for kind in given.drafts]
    if given.pairs is not None:
        named = [pair.split(":") for pair in given.pairs]
        pairs = [(kind, float(alpha)) for kind, alpha in named]
    done = {(cell["draft"], cell["alpha_wanted"], cell["rows"]) for cell in stored}
    return [pair for pair in pairs if not all((*pair, rows) in done for rows in given.batches)]


def earlier(path: Path | None) -> list[dict[str, Any]]:
    """The cells of an earlier run, which those of this one take the place of."""
    return list(json.loads(path.read_text(encoding="utf-8")).get("pairs", [])) if path is not None else []


def prompts(setting: Setting, given: Namespace) -> list[tuple[str, list[int]]]:
    if given.ids is None or given.quick:  # tiny models do not know the ids of real text
        return [("any", line) for turn in range(6) for line in setting.prompts([24] * 16, turn)]
    lines = [line for line in json.loads(Path(given.ids).read_text()) if len(line) <= 160]
    random.Random(0).shuffle(lines)  # every other one is kept back: tasks that take turns would be told apart by that
    return [("any", line) for line in lines[::2]]


def noisy(
    setting: Setting, noise: Noise, alpha: float, texts: Sequence[Written], kind: str
) -> tuple[Any, dict[str, Any]]:
    """A draft that agrees so often: as small as it is, or grown to a third of the target."""
    scale, agreed = noise.scale_for(alpha, [(text.prompt, text.ids) for text in texts])
    small = setting.draft_shape is None or kind == "small"
    model = noise.model(scale).to(setting.target.dtype) if small else setting.noisy_draft(noise, scale)
    return model, {"noise": scale, "agreement": agreed}


def cells(
    advice: Advice, kind: str, alpha: float, about: dict[str, Any], batches: Sequence[int]
) -> list[dict[str, Any]]:
    (outlook,) = advice.outlooks
    if outlook.refused is not None:
        raise HeadstartError(f"refused: {outlook.refused}")
    found = []
    for rows in batches:
        predicted, ratio = outlook.prediction(rows, 0.0), outlook.measured.get((rows, 0.0))
        if predicted is None or ratio is None:
            log(f"  {rows} rows: not measured")
            continue
        cell = compared(f"{kind} {alpha} x {rows}", predicted.speedup.mid, ratio.value)
        fixed = {p.gamma: p.speedup.mid for p in outlook.predictions if p.rows == rows}
        cell |= {"draft": kind, "alpha_wanted": alpha, **about, "rows": rows, "tau": predicted.tau}
        cell |= {
            "predicted_interval": predicted.speedup.to_json(),
            "bench": ratio.to_json(),
            "predicted_by_gamma": fixed,
        }
        cell |= {"acceptance": outlook.acceptance.get("0"), "costs": outlook.costs.get(str(rows))}
        cell |= {"plain_costs": outlook.costs["plain"].get(str(rows)), "lengths": predicted.lengths}
        ran = outlook.ran[rows, 0.0]
        cell |= {
            "rounds": ran.to_json(),
            "answer_tokens": ran.tokens / ran.answers,
        }  # as they were when it was measured
        pays = predicted.speedup.mid >= PAYS
        agrees = pays == (ratio.value >= PAYS) or abs(ratio.value - PAYS) <= 0.04  # on the line between the two
        found.append(cell | {"advice": "speculate" if pays else "do not speculate", "bench_agrees": agrees})
        length = f"answers of {cell['answer_tokens']:g} tokens"
        log(f"    advice: {found[-1]['advice']}; bench agrees: {agrees}; {ratio.blocks} blocks, {length}")
    return found


PAYS = 1.05


def compared(name: str, predicted: float, measured: float) -> dict[str, Any]:
    off = predicted / measured - 1
    log(f"  {name}: predicted {predicted:.3f}, measured {measured:.3f}, {off:+.1%}")
    return {"name": name, "predicted": predicted, "measured": measured, "off": off, "within": abs(off) <= WITHIN}


def quiet(text: str) -> None:
    """What is going on, for whoever waits: not here."""


def main(arguments: Sequence[str] | None = None) -> None:
    options = parser(__doc__, "pair")
    options.add_argument("--model-draft", type=Path, help="a distilled model (benchmarks/lab_drafts.py model)")
    options.add_argument("--worse", type=Path, help="the head in a worse version (benchmarks/lab_drafts.py worse)")
    options.add_argument("--data", type=Path, default=SHARED, help="the folder of shared/data")
    options.add_argument("--per-task", type=int, default=15)
    options.add_argument("--tokens", type=int, default=64)
    options.add_argument("--advise-seconds", type=float, default=280)
    options.add_argument("--bench-seconds", type=float, default=330)
    options.add_argument("--pair-seconds", type=float, default=35, help="for each draft, opening not counted")
    options.add_argument("--alphas", type=float, nargs="+", default=[0.6, 0.75, 0.9])
    options.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    options.add_argument("--drafts", nargs="+", default=["third", "small"], choices=["third", "small"])
    options.add_argument("--pairs", nargs="+", help="these alone, as third:0.6, the most important first")
    options.add_argument(
        "--parts", nargs="+", default=["advise", "bench"], help="of point 1; bench alone reads the advice"
    )
    options.add_argument("--earlier", type=Path, help="a stored result whose other cells are kept")
    options.add_argument("--go-on", action="store_true", help="of point 2: keep what is stored, and leave it out")
    given = read(options, arguments)
    if given.quick:
        given.batches, given.alphas, given.tokens = [1, 3], given.alphas[:1], 24
        given.pair_seconds, given.drafts = 20.0, ["small"]
    name = "lab-advise-" + ("quick" if given.quick else "cpu" if given.device == "cpu" else f"gpu-{given.shape}")
    told = {"tokens": given.tokens, "per_task": given.per_task, "batches": given.batches, "alphas": given.alphas}
    told |= {"weights": "real" if given.weights or given.device == "cpu" else "random", "third": str(THIRD)}
    path = given.out / f"{name}.json"
    if given.go_on and path.exists():
        given.earlier = path
    report = Report(path, told, given.seconds)
    if given.device == "cpu" and not given.quick:
        embedded(given, report)
    else:
        pairs(setting_of(given, max(given.batches)), given, report)


if __name__ == "__main__":
    main()
