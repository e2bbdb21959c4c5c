"""A distilled model directory as Hugging Face's own `assistant_model`: does it speed transformers up, unchanged?

    python benchmarks/hf_assist.py DRAFT_FOLDER --per-kind 5

Greedy, float32, one prompt at a time. Plain and assisted `generate` of the same target take turns, prompt by prompt;
the speed-up of a kind is the median over its prompts of plain seconds a token over assisted seconds a token.
Headstart's engine has no part in it: both sides are `transformers`.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from common import RESULTS, geometric_mean, machine, median, prompts, save, set_draft_length
from rich.console import Console
from transformers import AutoModelForCausalLM

from headstart.machine.load.embedded import embedded_folder
from headstart.machine.load.loading import load

console = Console(width=140)


def timed(model: Any, ids: torch.Tensor, tokens: int, **options: Any) -> tuple[float, list[int]]:
    """Seconds a token, and the tokens."""
    mask = torch.ones_like(ids)
    started = time.perf_counter()
    out = model.generate(input_ids=ids, attention_mask=mask, do_sample=False, max_new_tokens=tokens, **options)
    took = time.perf_counter() - started
    said = out[0, ids.shape[1] :].tolist()
    return took / len(said), said


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("draft", type=Path)
    parser.add_argument("--per-kind", type=int, default=5)
    parser.add_argument(
        "--kinds", nargs="*", help="only these; what --out holds of others, from an earlier run, is kept"
    )
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument(
        "--assistant-tokens", type=int, default=2, help="two: three tokens are what plain transformers verifies cheaply"
    )
    parser.add_argument("--confidence", type=float, default=0.0, help="stop a draft at a token it is less sure of")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", default="hf-assist.json")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    loaded = load(embedded_folder(), dtype=torch.float32)
    target, tokenizer = loaded.model, loaded.tokenizer
    assert tokenizer is not None
    draft = AutoModelForCausalLM.from_pretrained(arguments.draft, dtype=torch.float32, trust_remote_code=False)
    set_draft_length(draft, arguments.assistant_tokens, arguments.confidence)
    target.generation_config.pad_token_id = draft.generation_config.pad_token_id = tokenizer.eos_token_id
    chosen = prompts(arguments.per_kind)
    results: dict[str, Any] = {}
    if arguments.kinds:
        chosen = {kind: texts for kind, texts in chosen.items() if kind in arguments.kinds}
        if (RESULTS / arguments.out).exists():
            results = json.loads((RESULTS / arguments.out).read_text())["results"]
    warm = False
    for kind, texts in chosen.items():
        ratios, rates = [], []
        same = 0
        for number, text in enumerate(texts):
            chat = [{"role": "user", "content": text}]
            ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
            ways: dict[str, dict[str, Any]] = {"plain": {}, "assisted": {"assistant_model": draft}}
            if not warm:  # the very first calls are slow
                warm = True
                for options in ways.values():
                    timed(target, ids["input_ids"], 8, **options)
            order = list(ways) if number % 2 else list(ways)[::-1]
            found = {way: timed(target, ids["input_ids"], arguments.tokens, **ways[way]) for way in order}
            same += found["plain"][1] == found["assisted"][1]
            ratios.append(found["plain"][0] / found["assisted"][0])
            rates.append(1 / found["plain"][0])
        results[kind] = {
            "speedup": median(ratios),
            "all": ratios,
            "same_tokens": same,
            "plain_tokens_per_second": median(rates),
        }
        console.print(f"{kind}: {median(ratios):.2f}x, plain {median(rates):.1f} tokens/s")
    mean = geometric_mean(r["speedup"] for r in results.values())
    same = sum(r["same_tokens"] for r in results.values())
    count = sum(len(r["all"]) for r in results.values())
    console.print(f"geometric mean {mean:.3f}x, same tokens {same} of {count}")
    save(
        arguments.out,
        {
            "machine": machine(),
            "settings": vars(arguments),
            "mean": mean,
            "same": f"{same} of {count}",
            "results": results,
        },
    )


if __name__ == "__main__":
    main()
