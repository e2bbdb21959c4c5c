"""Rows whose drafts differ in length: verified together, each with its own tokens only, and the same text comes out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from engines import run, table, table_engine
from torch import Tensor

from headstart import LLM, Proposal, SamplingParams
from headstart.machine.cpu.build import why_not
from headstart.testing import ScriptedDrafter, TableRunner, tiny_model
from headstart.types import Completion, DraftView, Request, Round

SIZES = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
needs_kernels = pytest.mark.skipif(why_not() is not None, reason="no compiler")


class RaggedTable(TableRunner):
    """Row by row, so that nothing can come from beside a row's own tokens."""

    ragged = True

    def forward_ragged(self, rows: slice, lines: Sequence[Sequence[int]], lengths: Sequence[int]) -> list[Tensor]:
        assert len({len(line) for line in lines}) > 1, "else it is no ragged round"
        each = zip(range(rows.start, rows.stop), lines, lengths, strict=True)
        return [self.forward(slice(row, row + 1), torch.tensor([line]), [n])[0] for row, line, n in each]


def unlike(view: DraftView, budget: int) -> Proposal | None:
    """Guesses that are often right (what came last comes again), of another length for each row and round."""
    length = min(budget, (len(view.tokens) * 7 + view.tokens[0] * 3) % 5)
    return Proposal.chain([view.tokens[-1 - i % 3] for i in range(length)]) if length else None


PARAMS = {
    "greedy": {"temperature": 0},
    "coupled": {"verification": "coupled", "seed": 5},
    "block": {"verification": "block", "seed": 5},
    "token, processed": {"verification": "token", "seed": 5, "top_p": 0.9, "frequency_penalty": 0.3, "min_tokens": 3},
}


def requests(**settings: Any) -> list[Request]:
    params = SamplingParams(max_tokens=24, logprobs=2, **settings)
    return [Request(f"r{i}", (1 + i, 2, 3)[: 2 + i % 2], params) for i in range(4)]


def told(found: Sequence[Completion]) -> list[Any]:
    assert all(c.logprobs for c in found)
    return [(c.token_ids, c.logprobs) for c in found]


@pytest.mark.parametrize("kind", PARAMS)
def test_the_text_is_the_one_of_padded_rounds(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By every rule, with its log-probabilities; the random numbers of a row do not depend on the others' widths."""
    padded = told(run(table_engine(table(6), ScriptedDrafter(unlike), gamma=4), requests(**PARAMS[kind])))
    monkeypatch.setattr("engines.TableRunner", RaggedTable)
    engine, records = table_engine(table(6), ScriptedDrafter(unlike), gamma=4), list[Sequence[Round]]()
    engine.listen(records.append)
    assert told(run(engine, requests(**PARAMS[kind]))) == padded
    assert engine.inactive_reason is None
    ragged = [each for each in records if each[0].tokens]
    assert ragged
    for each in ragged:
        assert each[0].tokens == sum(1 + record.drafted for record in each) < len(each) * each[0].width


@needs_kernels
@pytest.mark.parametrize("kind", PARAMS)
def test_on_the_kernels_the_text_is_the_one_of_padded_rounds(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def texts(*, ragged: bool) -> list[Any]:
        settings: Any = {"max_model_len": 64, "max_rows": 4, "quantization": "int8", "gamma": 4}
        llm = LLM(tiny_model("llama", **SIZES), ScriptedDrafter(unlike), **settings)
        runner: Any = llm.engine.parts.runner
        assert runner.ragged
        monkeypatch.setattr(runner, "ragged", ragged)
        records: list[Sequence[Round]] = []
        llm.engine.listen(records.append)
        found = llm.generate([[3, 4, 5], [6, 7], [8, 9, 10], [11, 12]], SamplingParams(max_tokens=24, **PARAMS[kind]))
        assert llm.engine.inactive_reason is None
        assert any(each[0].tokens for each in records) == ragged
        return [c.token_ids for c in found]

    assert texts(ragged=True) == texts(ragged=False)


@needs_kernels
def test_nobody_computes_what_nobody_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """One row of four has a guess of four tokens: eight tokens are verified, not twenty."""
    settings: Any = {"max_model_len": 64, "max_rows": 4, "quantization": "int8", "gamma": 4}

    def one(view: DraftView, budget: int) -> Proposal | None:
        return Proposal.chain([3] * min(4, budget)) if view.id.startswith("x2") and budget else None

    llm = LLM(tiny_model("llama", **SIZES), ScriptedDrafter(one), **settings)
    runner: Any = llm.engine.parts.runner
    forwards, forward = list[int](), runner._run
    monkeypatch.setattr(runner, "_run", lambda tokens, longest: (forwards.append(tokens), forward(tokens, longest)))
    records: list[Sequence[Round]] = []
    llm.engine.listen(records.append)
    prompts = [[3, 4, 5], [6, 7], [8, 9, 10], [11, 12]]
    lines = [Request(f"x{i}", tuple(p), SamplingParams(temperature=0, max_tokens=12)) for i, p in enumerate(prompts)]
    run(llm.engine, lines)
    wide = [each[0].tokens for each in records if len(each) == 4 and any(r.drafted == 4 for r in each)]
    assert set(wide) == {8}
    assert 20 not in forwards
    assert 8 in forwards
