"""One recommendation out of many figures: the line to run, or why not to speculate.

Knows: what was predicted and measured of each candidate, and how a system is asked for. Does not know: how anything was
measured.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Mapping, Set
from pathlib import Path
from typing import Any

from .advice_record import Outlook, Recommendation
from .candidates import Candidate
from .statistics import Interval
from .symptoms import Seen
from .system import SystemOptions

__all__ = ["PAYS", "command_line", "python_line", "recommended", "seen"]

PAYS = 1.05  # times plain decoding from which on a draft is recommended: what it rests on is measured, and errs
_SAID = ("dtype", "quantization", "device", "max_model_len", "threads", "revision", "trust_remote_code")


def recommended(
    options: SystemOptions,
    candidates: Mapping[str, Candidate],
    outlooks: Mapping[str, Outlook],
    rows: int,
    temperature: float,
) -> Recommendation:
    """The best candidate at this number of rows and temperature: of those that were run, if one of them is sure."""
    known = {name: sure for name, each in outlooks.items() if (sure := each.expected(rows, temperature)) is not None}
    run = {name for name in known if (rows, temperature) in outlooks[name].measured}
    if not known:
        reasons = "; ".join(f"{name}: {outlook.refused}" for name, outlook in outlooks.items() if outlook.refused)
        return _plain(options, f"Do not speculate, because there is no draft to do it with. {reasons}".strip())
    best = _best(known, run)
    outlook, expected = outlooks[best], known[best]
    where = f"with {rows} row{'s' * (rows > 1)}" + (f" at temperature {temperature:g}" if temperature else "")
    how = "measured" if best in run else "predicted"
    not_run = _not_run(best, known, run)
    if expected.mid < PAYS:
        return _plain(
            options,
            f"Do not speculate {where}, because the best draft, {best}, gives {expected.mid:.2f}x of plain decoding "
            f"({how}; 90%: {expected.low:.2f} to {expected.high:.2f}): {_why(outlook, rows, temperature)}{not_run}",
            expected,
        )
    sentence = (
        f"Use {best}: {expected.mid:.2f} times as fast as plain decoding {where} ({how}; 90% of prompts like these: "
        f"{expected.low:.2f} to {expected.high:.2f}).{not_run}"
    )
    if (longer := _fixed(outlook, rows, temperature)) is not None:
        sentence += f" {longer}"
    candidate = candidates[best]
    settings = _settings(options, candidate)
    return Recommendation(
        True, best, sentence, command_line(options, settings), python_line(options, settings), expected, best in run
    )


def _best(known: Mapping[str, Interval], run: Set[str]) -> str:
    """A run counts more than a prediction; but not one that may be a loss, or hardly pays, where something better is
    predicted that is surely a gain."""

    def best(names: Iterable[str]) -> str:
        return max(names, key=lambda name: known[name].mid)

    # An interval of no width rests on too few texts to be sure of anything.
    sure = [name for name in known if name not in run and 1 < known[name].low < known[name].high]
    most = max((known[name].mid for name in sure), default=0.0)
    gains = {name for name in run if known[name].low >= 1 and known[name].mid >= PAYS}
    kept = [name for name in known if name in run and (name in gains or known[name].mid >= most)]
    return best(kept or (sure if run else known))


def _not_run(best: str, known: Mapping[str, Interval], run: Set[str]) -> str:
    """What the recommendation rests on, where that is not all run: sentences, each behind a space."""

    def told(name: str) -> str:
        return f"{known[name].mid:.2f} times; 90%: {known[name].low:.2f} to {known[name].high:.2f}"

    order = sorted(known, key=lambda name: known[name].mid, reverse=True)
    said = "" if best in run else f" {best} was not run, so nothing confirms this prediction"
    if said:
        tried = next((name for name in order if name in run), None)
        said += "." if tried is None else f"; {tried} was run ({told(tried)}), which is no sure gain."
    better = [name for name in order if name not in run and name != best and known[name].mid > known[best].mid]
    if better:
        said += f" {better[0]}, of which more is predicted ({told(better[0])}), was not run: more time would tell."
    return said


def _plain(options: SystemOptions, sentence: str, expected: Any = None) -> Recommendation:
    settings = {"draft": None, **_said(options)}
    return Recommendation(
        False, None, sentence, command_line(options, settings), python_line(options, settings), expected
    )


def _why(outlook: Outlook, rows: int, temperature: float) -> str:
    """In figures: how often guesses hold, and how often they would have to."""
    figures = seen(outlook, rows, temperature)
    if figures is None:
        return "nothing more is known of it."
    alpha, step, wider = figures.alpha, figures.step, figures.wider
    found = outlook.prediction(rows, temperature)
    if alpha is None or step is None or wider is None:
        said = f"{found.tau:.2f} tokens a round" if found is not None else "too few guesses hold"
        return f"{said}, which is too few for what rounds cost."
    if alpha < step + wider:
        return (
            f"{alpha:.0%} of its first guesses hold, and {step + wider:.0%} must: a drafted token costs {step:.0%} of "
            f"a plain round, and verifying it {wider:.0%}."
        )
    return (
        f"{alpha:.0%} of its first guesses hold, a drafted token costs {step:.0%} of a plain round and verifying it "
        f"{wider:.0%}, so that little is left to win."
    )


def _fixed(outlook: Outlook, rows: int, temperature: float) -> str | None:
    """Where a fixed draft length promises clearly more than "auto"."""
    auto = outlook.prediction(rows, temperature)
    fixed = [p for p in outlook.predictions if (p.rows, p.temperature) == (rows, temperature) and p.gamma != "auto"]
    if auto is None or not fixed:
        return None
    best = max(fixed, key=lambda p: p.speedup.mid)
    if best.speedup.mid < 1.05 * auto.speedup.mid:
        return None
    return (
        f"A fixed length of {best.gamma} is predicted to give {best.speedup.mid:.2f}x, gamma auto "
        f"{auto.speedup.mid:.2f}x: try --gamma {best.gamma} where prompts are all of one kind."
    )


def seen(outlook: Outlook, rows: int, temperature: float) -> Seen | None:
    """The figures of a candidate as ``symptoms`` reads them."""
    expected = outlook.expected(rows, temperature)
    if expected is None:
        return None
    first = outlook.acceptance.get(f"{temperature:g}")
    greedy = outlook.acceptance.get("0")
    costs = outlook.costs.get(str(rows))
    plain = outlook.costs.get("plain", {}).get(str(rows))
    step = wider = None
    if costs is not None and plain is not None:
        unit, widths = plain["forward_ms"]["1"], costs["forward_ms"]
        step = (costs["draft_start_ms"] + costs["draft_step_ms"]) / unit
        wider = (widths["2"] - widths["1"]) / unit if "2" in widths and "1" in widths else None
    alone = outlook.expected(1, temperature)
    return Seen(
        outlook.name,
        rows,
        temperature,
        expected.mid,
        alpha=first[0] if first else None,
        step=step,
        wider=wider,
        greedy_alpha=greedy[0] if greedy and temperature else None,
        fewer=alone.mid if alone is not None and rows > 1 else None,
    )


def _said(options: SystemOptions) -> dict[str, Any]:
    default = SystemOptions()
    return {name: value for name in _SAID if (value := getattr(options, name)) != getattr(default, name)}


def _settings(options: SystemOptions, candidate: Candidate) -> dict[str, Any]:
    found: dict[str, Any] = {"draft": candidate.draft, **_said(options)}
    if candidate.kind == "model" and candidate.quantization != "auto":
        found["draft_quantization"] = None if candidate.quantization == "none" else candidate.quantization
    return found


def command_line(options: SystemOptions, settings: Mapping[str, Any]) -> str:
    """``headstart serve`` with these settings."""
    words = ["headstart", "serve"]
    if options.model is not None:
        words += ["--model", _word(options.model)]
    for name, value in settings.items():
        flag = "--" + name.replace("_", "-")
        words += [flag] if value is True else [flag, "none" if value is None else _word(value)]
    return " ".join(words)


def python_line(options: SystemOptions, settings: Mapping[str, Any]) -> str:
    """The same as Python."""
    arguments = [] if options.model is None else [json.dumps(_word(options.model, quote=False))]
    arguments += [
        f"{name}={json.dumps(_word(value, quote=False)) if not isinstance(value, (bool, int, type(None))) else value}"
        for name, value in settings.items()
    ]
    return f"from headstart import LLM\n\nllm = LLM({', '.join(arguments)})"


def _word(value: Any, *, quote: bool = True) -> str:
    """A setting as one types it; a model or a drafter that is an object has no name on a command line."""
    text = str(value) if isinstance(value, (str, Path, int, float)) else f"<{type(value).__name__}>"
    text = text.removeprefix("torch.")
    return shlex.quote(text) if quote else text
