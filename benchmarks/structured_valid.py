"""Are structured answers valid, and the same whoever drafts and whoever is answered beside them?

    python benchmarks/structured_valid.py                       # 400 schemas, the embedded model
    python benchmarks/structured_valid.py --first 40 --count 20 # some of them; adds to what is stored
    python benchmarks/structured_valid.py --only 184 255        # these, by their numbers

Each schema (structured_schemas.py) is answered greedily and sampled with a seed, drafted and plain, alone and with
seven others. Answers that came to their own end are held against the schema by the package ``jsonschema``, formats
included; those that ran into ``max_tokens`` are counted. All ways must give the same bytes.

Knows: what is compared. Does not know: how answers are held to their schemas.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import time
from collections import Counter
from importlib.metadata import version
from pathlib import Path
from typing import Any

from common import RESULTS, as_json, log, machine
from jsonschema.validators import validator_for
from structured_schemas import SEED, Case, cases

from headstart import LLM, SamplingParams, Structured

MAX_TOKENS = 192
SAMPLED = {"temperature": 0.8, "top_p": 0.95}
#: in the order in which they are run: drafted with seven others, plain alone, drafted alone, plain with seven others
WAYS = ((True, True), (False, False), (True, False), (False, True))


def why_invalid(schema: dict[str, Any], text: str) -> str | None:
    """What ``jsonschema`` has against it; None: nothing."""
    try:
        document = json.loads(text)
    except ValueError as error:
        return f"not JSON: {error}"
    judge = validator_for(schema)
    errors = judge(schema, format_checker=judge.FORMAT_CHECKER).iter_errors(document)
    return next((error.message for error in errors), None)


def params_of(case: Case, *, greedy: bool, drafted: bool = True, number: int = 0) -> SamplingParams:
    drawn = {"temperature": 0} if greedy else SAMPLED | {"seed": number}
    asked = Structured(json=case.schema)
    return SamplingParams(max_tokens=MAX_TOKENS, structured=asked, speculate=drafted, **drawn)


def answers(llm: LLM, group: list[tuple[int, Case]], *, greedy: bool, drafted: bool, together: bool) -> list[Any]:
    """Of schemas and their numbers, which are their seeds."""
    conversations = [[{"role": "user", "content": case.prompt}] for _, case in group]
    params = [params_of(case, greedy=greedy, drafted=drafted, number=number) for number, case in group]
    if together:
        return llm.chat(conversations, params)
    return [llm.chat(words, each) for words, each in zip(conversations, params, strict=True)]


def named(drafted: bool, together: bool) -> str:
    return f"{'drafted' if drafted else 'plain'} {'together' if together else 'alone'}"


class Stored:
    """What is known of each answer so far."""

    def __init__(self, path: Path) -> None:
        self.path = path
        found = json.loads(path.read_text(encoding="utf-8"))["answers"] if path.exists() else []
        self.lines: dict[tuple[str, bool], dict[str, Any]] = {(line["schema"], line["greedy"]): line for line in found}

    def lacks(self, case: Case, greedy: bool, way: str) -> bool:
        return way not in self.lines.get((case.name, greedy), {"ways": {}})["ways"]

    def add(self, case: Case, greedy: bool, way: str, answer: Any) -> None:
        line = self.lines.setdefault((case.name, greedy), {"schema": case.name, "greedy": greedy, "ways": {}})
        digest = hashlib.sha256(json.dumps([answer.text, list(answer.token_ids)]).encode()).hexdigest()[:16]
        line["ways"][way] = digest
        if len(line["ways"]) == 1:
            ended = answer.finish_reason == "stop"
            line |= {"tokens": len(answer.token_ids), "forced": answer.stats.forced, "end": answer.finish_reason}
            line["invalid"] = why_invalid(case.schema, answer.text) if ended else None
            if line["invalid"]:
                line |= {"text": answer.text, "schema_text": json.dumps(case.schema)}
                log(f"{case.name}: {line}")
        elif len(set(line["ways"].values())) > 1:
            log(f"{case.name}, {way}: not the same: {line}")

    def summary(self) -> dict[str, Any]:
        lines = list(self.lines.values())
        ended = [line for line in lines if line["end"] == "stop"]
        families = Counter(line["schema"].split()[0] for line in lines if line["end"] != "stop")
        return {
            "schemas": len({line["schema"] for line in lines}),
            "answers": len(lines),
            "ends": dict(Counter(line["end"] for line in lines)),
            "ended_share": len(ended) / len(lines),
            "ended_share_greedy": sum(line["greedy"] for line in ended) / sum(line["greedy"] for line in lines),
            "invalid": sum(line["invalid"] is not None for line in ended),
            "compared": {named(*way): sum(named(*way) in line["ways"] for line in lines) for way in WAYS},
            "not_the_same": sum(len(set(line["ways"].values())) > 1 for line in lines),
            "tokens": sum(line["tokens"] for line in lines),
            "forced_tokens": sum(line["forced"] for line in lines),
            "not_ended_by_family": dict(families),
        }

    def save(self) -> None:
        settings = {"seed": SEED, "max_tokens": MAX_TOKENS, "sampled": SAMPLED, "max_rows": 8}
        settings |= {name: version(name) for name in ("jsonschema", "llguidance")}
        said = {"machine": machine(), "settings": settings, "result": self.summary()}
        self.path.write_text(as_json(said | {"answers": list(self.lines.values())}))


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--first", type=int, default=0)
    options.add_argument("--count", type=int, default=400)
    options.add_argument("--only", type=int, nargs="+", help="numbers of schemas, in place of the two above")
    options.add_argument("--ways", type=int, nargs="+", default=range(len(WAYS)), help="which of them, from 0 on")
    options.add_argument("--seconds", type=float, default=1e9, help="begin no other eight after so long")
    options.add_argument("--threads", type=int, help="of the kernels; the bits do not depend on it")
    options.add_argument("--out", default="structured-valid.json")
    given = options.parse_args()
    stored, end = Stored(RESULTS / given.out), time.perf_counter() + given.seconds
    llm, whole = LLM(threads=given.threads), list(enumerate(cases()))
    chosen = [whole[i] for i in given.only] if given.only else whole[given.first : given.first + given.count]
    for way in given.ways:
        drafted, together = WAYS[way]
        for first in range(0, len(chosen), 8):
            for greedy in (True, False):
                group, name = chosen[first : first + 8], named(drafted, together)
                if time.perf_counter() > end or not any(stored.lacks(case, greedy, name) for _, case in group):
                    continue
                found = answers(llm, group, greedy=greedy, drafted=drafted, together=together)
                for (_, case), answer in zip(group, found, strict=True):
                    stored.add(case, greedy, name, answer)
                stored.save()
    log(json.dumps(stored.summary()))


if __name__ == "__main__":
    main()
