"""Whole engines with rounded weights on a GPU: the same tokens with speculation as without, in less memory."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from test_gpu_captured import PROMPTS, SIZE, pair

from headstart import LLM, SamplingParams
from headstart.control.controller import FixedController
from headstart.machine.load.open import load_draft
from headstart.testing import tiny_model

KINDS = ["int8", "int4"]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_speculation_gives_the_rounded_targets_own_tokens(kind: Any, dtype: torch.dtype) -> None:
    """Captured rounds with a rounded target and a rounded draft: the ids of plain decoding, in bfloat16 too."""
    target, draft = (model.to(dtype) for model in pair("llama"))
    options: dict[str, Any] = {"max_rows": 1, "max_model_len": 128, "check": False}
    llm = LLM(target, draft, gamma=8, quantization=kind, draft_quantization="int8", **options)
    for rule, temperature in (("block", 0.0), ("coupled", 0.8)):
        params = [
            SamplingParams(temperature=temperature, seed=i, max_tokens=40, ignore_eos=True, verification=rule)  # type: ignore[arg-type]
            for i in range(len(PROMPTS))
        ]
        answers = []
        for gamma in (0, 3, 8):
            llm.engine.parts.controller = FixedController(gamma)
            answers.append([a.token_ids for a in llm.generate(PROMPTS, params)])
        assert answers[0] == answers[1] == answers[2], rule
    assert llm.stats.accepted > 20


@pytest.mark.gpu
def test_what_is_loaded_from_a_folder_takes_less_memory(tmp_path: Path) -> None:
    tiny_model("llama", **SIZE | {"hidden_size": 1024, "intermediate_size": 4096}).save_pretrained(tmp_path)
    used, reports = [], []
    for kind in (None, "int8", "int4"):
        gc.collect()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        llm = LLM(tmp_path, None, dtype="bfloat16", device="cuda", quantization=kind, max_model_len=64, max_rows=1)  # type: ignore[arg-type]
        llm.generate([5, 6, 7], SamplingParams(max_tokens=4))
        used.append(torch.cuda.memory_allocated() - before)
        reports.append(llm.report)
        del llm
    assert [r.dtype for r in reports] == ["bfloat16", "int8", "int4"]
    assert reports[0].bytes > 1.8 * reports[1].bytes > 1.8 * 1.2 * reports[2].bytes
    assert "instead of" in reports[1].notes[-1]
    for i in (1, 2):
        assert used[0] - used[i] > 0.8 * (reports[0].bytes - reports[i].bytes)


@pytest.mark.gpu
def test_a_draft_is_rounded_on_a_gpu_only_when_asked() -> None:
    """Its step is latency, not bytes."""
    draft = pair("llama")[1]
    assert load_draft(draft, "auto", dtype="auto").quantization is None
    assert load_draft(draft, "int8", dtype="auto").quantization == "int8"
