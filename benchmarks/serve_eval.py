"""lm-eval's ``local-completions`` through our server, with speculation on and off: the same scores, sample by sample.

    python benchmarks/serve_eval.py --lm-eval ../venv-eval/bin/lm_eval

Two small tasks of our own, as local files: multiple choice by log-likelihood (``echo`` with ``logprobs``), and answers
that are generated until a line ends.

Knows: the tool's command line and files. Does not know: how anything is served.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from common import RESULTS, Report, log
from serve_common import Served

CHOICES = [
    ("The opposite of hot is", ["cold", "blue", "seven", "quick"]),
    ("The opposite of up is", ["green", "down", "soup", "early"]),
    ("The capital of France is", ["Madrid", "Rome", "Paris", "Oslo"]),
    ("The capital of Italy is", ["Rome", "Berlin", "Lima", "Cairo"]),
    ("Two plus two is", ["nine", "four", "twelve", "zero"]),
    ("A week has as many days as", ["seven", "three", "thirty", "ninety"]),
    ("The colour of grass is", ["purple", "green", "black", "pink"]),
    ("A young dog is called a", ["kitten", "calf", "puppy", "chick"]),
    ("A young cat is called a", ["kitten", "foal", "puppy", "lamb"]),
    ("Ice is frozen", ["sand", "iron", "milk", "water"]),
    ("The sun rises in the", ["west", "east", "north", "south"]),
    ("Bees make", ["honey", "bread", "wool", "paper"]),
    ("The largest ocean is the", ["Arctic", "Baltic", "Pacific", "Dead Sea"]),
    ("You read a book with your", ["knees", "eyes", "elbows", "ears"]),
    ("Fish live in", ["trees", "clouds", "water", "ovens"]),
    ("The first month of the year is", ["May", "January", "June", "October"]),
]
RIGHT = [0, 1, 2, 0, 1, 0, 1, 2, 0, 3, 1, 0, 2, 1, 2, 1]
ANSWERS = [
    ("red, green, red, green, red,", "green"),
    ("one two three one two three one two", "three"),
    ("A B C A B C A B", "C"),
    ("2, 4, 6, 8,", "10"),
    ("Monday, Tuesday, Wednesday,", "Thursday"),
    ("apple -> APPLE\npear -> PEAR\nplum ->", "PLUM"),
    ("cat: cats\ndog: dogs\nbird:", "birds"),
    ("1 + 1 = 2\n2 + 2 = 4\n3 + 3 =", "6"),
]
CHOOSE = """task: local_choices
dataset_path: json
dataset_kwargs: {data_files: {test: FOLDER/choices.jsonl}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
target_delimiter: " "
metric_list:
  - {metric: acc, aggregation: mean, higher_is_better: true}
  - {metric: acc_norm, aggregation: mean, higher_is_better: true}
"""
WRITE = """task: local_answers
dataset_path: json
dataset_kwargs: {data_files: {test: FOLDER/answers.jsonl}}
test_split: test
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{answer}}"
generation_kwargs: {until: ["\\n"], max_gen_toks: 24, do_sample: false, temperature: 0.0}
filter_list:
  - name: first
    filter: [{function: regex, regex_pattern: "(\\\\w+)"}, {function: take_first}]
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true, ignore_case: true}]
"""


def lines(rows: list[dict[str, Any]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def tasks(folder: Path) -> None:
    rows = [{"question": q, "choices": c, "answer": a} for (q, c), a in zip(CHOICES, RIGHT, strict=True)]
    (folder / "choices.jsonl").write_text(lines(rows))
    (folder / "answers.jsonl").write_text(lines([{"question": q, "answer": a} for q, a in ANSWERS]))
    for name, text in (("choices", CHOOSE), ("answers", WRITE)):
        (folder / f"{name}.yaml").write_text(text.replace("FOLDER", str(folder)))


def evaluate(lm_eval: str, port: int, tokenizer: str, folder: Path, ids: bool) -> dict[str, Any]:
    """What lm-eval says: scores, and what it got for each sample. ``ids``: prompts are sent as token ids."""
    out = folder / f"out-{port}-{ids}"
    model = f"model=served,base_url=http://127.0.0.1:{port}/v1/completions,num_concurrent=4,max_retries=3"
    model += f",tokenizer_backend=huggingface,tokenizer={tokenizer},tokenized_requests={ids},max_length=1024"
    command = [lm_eval, "run", "--model", "local-completions", "--model_args", model, "--include_path", str(folder)]
    command += [
        "--tasks",
        "local_choices,local_answers",
        "--output_path",
        str(out),
        "--log_samples",
        "--batch_size",
        "1",
    ]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    environment.pop("PYTHONPATH", None)
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    if done.returncode:
        raise RuntimeError(f"lm_eval ended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-3000:]}")
    scores = json.loads(next(out.rglob("results_*.json")).read_text())["results"]
    samples = {}
    for path in sorted(out.rglob("samples_*.jsonl")):
        found = [json.loads(line) for line in path.read_text().splitlines()]
        samples[path.name.rpartition("_")[0]] = sorted((each["doc_id"], each["resps"]) for each in found)
    kept = {
        name: {key: value for key, value in found.items() if isinstance(value, float) and "stderr" not in key}
        for name, found in scores.items()
    }
    return {"scores": kept, "samples": samples}


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--lm-eval", required=True, help="the command lm_eval")
    options = arguments.parse_args()
    from headstart.machine.load.embedded import embedded_folder

    tokenizer, found = str(embedded_folder()), {}
    with tempfile.TemporaryDirectory() as where:
        tasks(Path(where))
        for name, how in (("on", []), ("off", ["--plain"])):
            with Served("--model", "embedded", "--length", "1024", *how) as served:
                for ids in (True, False):
                    kind = f"speculation {name}, {'ids' if ids else 'text'}"
                    found[kind] = evaluate(options.lm_eval, served.port, tokenizer, Path(where), ids)
                    log(f"{kind}: {found[kind]['scores']}")
    same = {
        kind: found[f"speculation on, {kind}"] == found[f"speculation off, {kind}"] for kind in ("ids", "text")
    }  # sample by sample, log-likelihoods included
    log(f"the same with speculation on and off, sample by sample: {same}")
    report = Report(RESULTS / "serve-eval.json", vars(options), 0)
    report.add("eval", {"same": same, "scores": {kind: each["scores"] for kind, each in found.items()}})


if __name__ == "__main__":
    main()
