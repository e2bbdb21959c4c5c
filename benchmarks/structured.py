"""What structured output costs and gains on a CPU: the embedded model, alone and with seven others.

    python benchmarks/structured.py                          # all parts; 9 turns
    python benchmarks/structured.py --parts masks --keep     # masks alone, vocabularies of 49,152 and 152,000

"free": a grammar that allows any text, so that the answers are those that come without one, token for token: structured
plain over plain, and structured drafted over drafted. "schemas": schemas of structured_schemas.py, plain, over plain
texts behind the same prompts and as long. "forms": form-like schemas, drafted over plain, both structured: what the
schema forces is drafted at no cost. All engines of a part answer at once, some tokens of each in turn (lab.turns).
"masks": the time of one mask, walking through answers, and what share of a round that is.

Knows: what is compared. Does not know: how an answer is held to a grammar.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import Any

from common import RESULTS, Report, interval, log, median, prompts, quantile
from structured_schemas import cases

from headstart import LLM, Request, SamplingParams, Structured
from headstart.lab.turns import Run, side_by_side

ANY = Structured(regex=r"(.|\n)*")
GREEDY: dict[str, Any] = {"temperature": 0}
FORM: dict[str, Any] = {
    "type": "object",
    "properties": {
        "customer_number": {"type": "integer", "minimum": 1000, "maximum": 9999},
        "customer_name": {"type": "string", "maxLength": 20},
        "delivery_address": {
            "type": "object",
            "properties": {
                "street_and_number": {"type": "string", "maxLength": 20},
                "postal_code": {"type": "string", "pattern": "^[0-9]{5}$"},
                "country": {"enum": ["Germany", "France", "Italy"]},
            },
            "required": ["street_and_number", "postal_code", "country"],
            "additionalProperties": False,
        },
        "payment_method": {"enum": ["credit_card", "bank_transfer", "invoice"]},
        "newsletter_subscription": {"type": "boolean"},
        "preferred_contact": {"enum": ["email", "telephone"]},
    },
    "required": [
        "customer_number",
        "customer_name",
        "delivery_address",
        "payment_method",
        "newsletter_subscription",
        "preferred_contact",
    ],
    "additionalProperties": False,
}


class Each(Run):
    """A ``Run`` whose prompts have settings of their own, grammars among them."""

    def __init__(self, llm: LLM, asked: Sequence[tuple[list[int], SamplingParams]]) -> None:
        super().__init__(llm.engine, [prompt for prompt, _ in asked], [params for _, params in asked])
        self._llm = llm
        for prompt, params in asked:
            llm.request(list(prompt), params)  # what it compiles is kept

    def request(self, name: str, prompt: Sequence[int], params: SamplingParams) -> Request:
        return self._llm.request(list(prompt), params, id=name)


Asked = list[tuple[list[int], SamplingParams]]


class Bench:
    """Four engines with the same model: plain and drafted, each once for those that ask for a shape."""

    def __init__(self, turns: int, quick: bool) -> None:
        self.turns, self.quick = turns, quick
        self.engines = {
            name: LLM(draft=None) if name.startswith("plain") else LLM()
            for name in ("plain", "plain structured", "drafted", "drafted structured")
        }
        for llm in self.engines.values():
            llm.prepare_structured()
        self.texts = [text for kind in prompts(3).values() for text in kind]

    def ids(self, content: str) -> list[int]:
        return self.engines["plain"].codec.encode_chat([{"role": "user", "content": content}])

    def ratios(self, asked: Callable[[int], dict[str, Asked]], over: dict[str, str], same: bool) -> dict[str, Any]:
        """Rates of each engine's answers in every turn, and each of ``over`` against its own."""
        rates: dict[str, list[float]] = {}
        for turn in range(-1, self.turns):  # the first is to warm up
            runs = {name: Each(self.engines[name], given) for name, given in asked(max(turn, 0)).items()}
            found = side_by_side(runs)
            texts = {name: [answer.choice.token_ids for answer in run.answers] for name, run in runs.items()}
            if same and any(text != texts["plain"] for text in texts.values()):
                raise RuntimeError("the answers are not the same")
            for name, rate in found.items() if turn >= 0 else ():
                rates.setdefault(name, []).append(rate)
        result: dict[str, Any] = {"tokens_per_second": {name: median(line) for name, line in rates.items()}}
        for mine, theirs in over.items():
            ratios = [a / b for a, b in zip(rates[mine], rates[theirs], strict=True)]
            result[f"{mine} over {theirs}"] = {
                "median": median(ratios),
                "interval": interval(ratios),
                "turns": len(ratios),
                "each": ratios,
            }
            log(f"{mine} over {theirs}: {median(ratios):.3f} {interval(ratios)}")
        return result

    def free(self, batch: int) -> dict[str, Any]:
        length = 24 if self.quick else 96

        def asked(turn: int) -> dict[str, Asked]:
            words = [self.ids(self.texts[(turn * batch + i) % len(self.texts)]) for i in range(batch)]
            plain = [(ids, SamplingParams(max_tokens=length, **GREEDY)) for ids in words]
            held = [(ids, SamplingParams(max_tokens=length, structured=ANY, **GREEDY)) for ids in words]
            return {"plain": plain, "plain structured": held, "drafted": plain, "drafted structured": held}

        over = {"plain structured": "plain", "drafted structured": "drafted", "drafted": "plain"}
        return self.ratios(asked, over, same=True)

    def schemas(self, batch: int) -> dict[str, Any]:
        some = [case for case in cases(63) if len(case.schema) > 1]
        lengths: dict[str, int] = {}

        def asked(turn: int) -> dict[str, Asked]:
            chosen = [some[(turn * batch + i) % len(some)] for i in range(batch)]
            held, free = [], []
            for case in chosen:
                ids = self.ids(case.prompt)
                params = SamplingParams(max_tokens=128, structured=Structured(json=case.schema), **GREEDY)
                if case.name not in lengths:
                    lengths[case.name] = len(self.engines["plain structured"].generate(ids, params).token_ids)
                held.append((ids, params))
                free.append((ids, SamplingParams(max_tokens=lengths[case.name], ignore_eos=True, **GREEDY)))
            return {"plain": free, "plain structured": held}

        return self.ratios(asked, {"plain structured": "plain"}, same=False)

    def forms(self, batch: int) -> dict[str, Any]:
        def asked(turn: int) -> dict[str, Asked]:
            given = []
            for i in range(batch):
                ids = self.ids(f"Make up customer {turn * batch + i} and fill in the form as JSON.")
                params = SamplingParams(max_tokens=200, structured=Structured(json=FORM), **GREEDY)
                given.append((ids, params))
            return {"plain": given, "plain structured": given, "drafted structured": given}

        return self.ratios(asked, {"plain structured": "plain", "drafted structured": "plain"}, same=True)


def walked(grammars: Any, texts: Sequence[tuple[Structured, bytes]]) -> dict[str, float]:
    """Microseconds of a mask at each place of texts, with the tokens the tokenizer would write."""
    spent: list[float] = []
    for asked, text in texts:
        grammar = grammars.compile(asked)
        for _ in range(3):  # what a grammar learns while it is used, it keeps
            state, times = grammar.begin(endings=frozenset(), min_tokens=0), []
            for token in grammar.tokens.split(text):
                started = time.perf_counter()
                state.mask(())
                middle = time.perf_counter()
                times.append(middle - started)
                state.take(token)
        spent += times
    us = [1e6 * each for each in spent]
    return {"median": median(us), "mean": sum(us) / len(us), "p99": quantile(us, 0.99), "masks": len(us)}


def masks(bench: Bench) -> dict[str, Any]:
    """The embedded vocabulary, and one that is three times as large."""
    from structured_vocabulary import enlarged

    from headstart.machine.grammar import Grammars

    llm = bench.engines["plain structured"]
    texts: list[tuple[Structured, bytes]] = []
    for case in [*cases(42)[::2]]:
        asked = Structured(json=case.schema)
        found = llm.generate(bench.ids(case.prompt), SamplingParams(max_tokens=128, structured=asked, **GREEDY))
        texts.append((asked, found.text.encode()))
    free = llm.generate(bench.ids(bench.texts[0]), SamplingParams(max_tokens=128, **GREEDY))
    result: dict[str, Any] = {}
    for size, tokenizer in ((49_152, llm.tokenizer), (152_000, enlarged(llm.tokenizer, 152_000))):
        grammars = Grammars(tokenizer, width=size, eos=(2,), deadline=60)
        result[str(size)] = {
            "schemas": walked(grammars, texts),
            "any text": walked(grammars, [(ANY, free.text.encode())]),
        }
        log(f"{size}: {result[str(size)]}")
    rounds = []
    for _ in range(3):
        started = time.perf_counter()
        answer = bench.engines["plain"].generate(
            bench.ids("Tell me a story."), SamplingParams(max_tokens=128, **GREEDY)
        )
        rounds.append((time.perf_counter() - started) / len(answer.token_ids))
    result["round_us"] = 1e6 * median(rounds)
    result["share_of_a_round"] = result["49152"]["schemas"]["mean"] / result["round_us"]
    return result


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--parts", nargs="+", default=["free", "schemas", "forms", "masks"])
    options.add_argument("--batches", nargs="+", type=int, default=[1, 8])
    options.add_argument("--turns", type=int, default=9)
    options.add_argument("--quick", action="store_true", help="one turn, short")
    options.add_argument("--out", default="structured.json")
    options.add_argument("--keep", action="store_true", help="keep the parts that are there and not measured now")
    given = options.parse_args()
    turns = 1 if given.quick else given.turns
    bench = Bench(turns, given.quick)
    settings = {"turns": turns, "llguidance": version("llguidance"), "model": "SmolLM2-135M-Instruct (embedded)"}
    report = Report(RESULTS / given.out, settings, 1e9)
    if given.keep and report.path.exists():
        before = json.loads(report.path.read_text())
        report.results = {name: part for name, part in before.items() if name not in ("machine", "settings")}
    for part in given.parts:
        if part == "masks":
            report.add(part, masks(bench))
            continue
        for batch in given.batches:
            log(f"{part}, {batch} together")
            report.add(f"{part} {batch}", getattr(bench, part)(batch))
    log(json.dumps(list(report.results)))


if __name__ == "__main__":
    main()
