"""How far are a GPU's kernels from what the weights say? Log-probabilities of greedy answers, worked out four ways.

    python benchmarks/lab_rounding.py --weights FOLDER [--device cuda]

    exact     Hugging Face's modules in float32, with the weights that are served (int8 ones times their scales)
    wide      one forward over the whole text: what certify holds answers against where modules do not have the weights
    narrow    the prompt in one forward, then a token at a time: as plain decoding goes
    modules   the same modules in bfloat16, where the weights are not quantized

Of the likeliest tokens of each place: the largest difference of a log-probability, and the root of the mean square.
Two ways that are as far from exact as bfloat16's own modules are rounded, not wrong.
"""

from __future__ import annotations

import argparse
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
from common import RESULTS, Report, log
from transformers import AutoModelForCausalLM

from headstart.lab.certifying.truth import truth_of
from headstart.lab.predict import write
from headstart.lab.system import System, SystemOptions
from headstart.lab.texts import choose, shipped
from headstart.machine.quantize import rounded

LIKELIEST = 4  # tokens of a place
TOKENS = 48  # of an answer


def modules(weights: str, device: str, quantization: str | None, dtype: torch.dtype) -> Any:
    """The model by Hugging Face, its matrices as they are served."""
    model = AutoModelForCausalLM.from_pretrained(weights, dtype=dtype, trust_remote_code=False).to(device).eval()
    if quantization is None:
        return model
    for module in model.modules():  # a head that shares the embedding's weights gets its own
        if isinstance(module, torch.nn.Linear):
            module.weight = torch.nn.Parameter(rounded(module.weight.data, quantization).floats(dtype), False)
    return model


def by_modules(model: Any, text: tuple[int, ...], keep: int) -> torch.Tensor:
    with torch.inference_mode():
        found: torch.Tensor = model(input_ids=torch.tensor([text], device=model.device), use_cache=False).logits
    return found[0, -keep:].float().cpu()


def measured(weights: str, device: str, quantization: str | None, prompts: int) -> dict[str, Any]:
    options = SystemOptions(model=weights, draft=None, quantization=quantization, max_model_len=192, device=device)  # type: ignore[arg-type]
    with System.open(options.changed(check=False)) as system:
        lines = [(text.task, system.ids(text)[:64]) for text in choose(shipped())[:prompts]]
        texts = write(system, lines, tokens=TOKENS, ignore_eos=True)
        truth = truth_of(system.engine, system.target, system.max_len)
        assert truth.kernels is not None, "these kernels have the same bits in any forward: there is nothing to measure"
        exact = modules(weights, device, quantization, torch.float32)
        half = modules(weights, device, None, torch.bfloat16) if quantization is None else None
        found: dict[str, list[torch.Tensor]] = {}
        for text in texts:
            keep = len(text.answer) + 1
            each = {"exact": by_modules(exact, text.ids, keep), "narrow": truth.kernels(text.ids, keep)}
            each["wide"] = _wide(system, text.ids, keep)
            if half is not None:
                each["modules"] = by_modules(half, text.ids, keep)
            best = each["exact"][:, : truth.size].topk(LIKELIEST).indices
            for name, logits in each.items():
                found.setdefault(name, []).append(logits[:, : truth.size].log_softmax(-1).gather(1, best))
    ways = {name: torch.cat(each) for name, each in found.items()}
    pairs = {f"{a} - {b}": (ways[a] - ways[b]) for a, b in combinations(ways, 2)}
    return {
        "reference": truth.name,
        "places": len(ways["exact"]),
        "differences": {
            name: {"largest": float(each.abs().max()), "rms": float(each.square().mean().sqrt())}
            for name, each in pairs.items()
        },
    }


def _wide(system: System, text: tuple[int, ...], keep: int) -> torch.Tensor:
    engine, runner = system.engine, system.engine.parts.runner
    engine.cold()
    ids = torch.tensor([text], device=runner.device)
    found: torch.Tensor = runner.forward(slice(0, 1), ids, [0], keep=keep)[0].float().cpu()
    engine.cold()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--kinds", nargs="+", default=["none", "int8"], choices=["none", "int8"])
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--out", type=Path, default=RESULTS / "certify-rounding.json")
    given = parser.parse_args()
    report = Report(given.out, {"prompts": given.prompts, "tokens": TOKENS, "likeliest": LIKELIEST}, float("inf"))
    for kind in given.kinds:
        found = measured(given.weights, given.device, None if kind == "none" else kind, given.prompts)
        report.add(kind, found)
        for name, each in found["differences"].items():
            log(f"{kind}: {name}: largest {each['largest']:.3f}, rms {each['rms']:.4f}")


if __name__ == "__main__":
    main()
