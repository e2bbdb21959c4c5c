"""How the files in this folder were made, by version 0.1.0 at commit 80b3aaa; they are never to be made again.

    git archive 80b3aaa src | tar -x -C /tmp/old
    PYTHONPATH=/tmp/old/src HEADSTART_CACHE=/tmp/old/cache python make.py

``target``: a tiny Llama with a tokenizer of single characters. ``head``: a draft head for it, untrained.
``packed-int8`` and ``packed-int4``: its packed copies as they lay in the cache folder. ``expected.json``: what that
version computed with them. ``tests/test_old_files.py`` holds later versions to it.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import torch
from torch import Tensor

from headstart import LLM, SamplingParams
from headstart.machine.head import HeadConfig, HeadNet, load_head, save_head
from headstart.testing import tiny_model, tiny_tokenizer

HERE = Path(__file__).parent
SIZES = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
HEAD = HeadConfig(
    target_hidden=32,
    target_layers=2,
    target_vocab=112,
    watch=(0, 1),
    width=32,
    heads=2,
    kv_heads=1,
    head_dim=16,
    ffn=32,
    vocab=64,
    window=16,
)
PROMPT = [5, 17, 40, 41, 42, 5, 17, 40]
PARAMS = SamplingParams(max_tokens=16, temperature=0, ignore_eos=True, logprobs=3)


def answer(llm: LLM) -> dict[str, object]:
    out = llm.generate(PROMPT, PARAMS)
    assert out.logprobs is not None
    return {"token_ids": list(out.token_ids), "logprobs": [each.logprob for each in out.logprobs]}


def head_logits(net: HeadNet) -> list[float]:
    """Of one slot that sees itself alone, with features and an embedding that anyone can write down."""

    def wave(size: int, pace: float) -> Tensor:
        return torch.sin(torch.arange(size) * pace)[None, None]

    c = net.config
    x = net.fused(wave(c.features, 0.7)) + net.word(wave(c.target_hidden, 0.3))
    _, _, v = net.queries_keys_values(x, net.rotary(4)[None, 3:])
    seen = v.repeat_interleave(c.heads // c.kv_heads, 2).flatten(2)
    logits: list[float] = net.logits(net.finish(x, seen)).flatten().tolist()
    return logits


if __name__ == "__main__":
    cache = Path(os.environ["HEADSTART_CACHE"])
    target = HERE / "target"
    tiny_model("llama", seed=3, tie_word_embeddings=True, **SIZES).save_pretrained(target)
    tiny_tokenizer().save_pretrained(target)
    torch.manual_seed(3)
    save_head(HeadNet(HEAD, list(range(3, 67))), HERE / "head", {"target": "target", "seed": 3}, torch.bfloat16)
    expected = {"head_logits": head_logits(load_head(HERE / "head")), "float32": answer(LLM(target, None))}
    for kind in ("int8", "int4"):
        expected[kind] = answer(LLM(target, None, quantization=kind))
        (copy,) = (cache / "packed").glob(f"*-{kind}-*")
        shutil.move(copy, HERE / f"packed-{kind}")
    (HERE / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")
