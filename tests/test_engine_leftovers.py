"""What a hostile review found behind the first mends: places, threads and bits that were left over."""

from __future__ import annotations

import gc
import io
import os
import sys
import threading
import time
from contextlib import redirect_stderr
from itertools import repeat
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import table, table_engine
from warm_processes import WarmProcess

from headstart import LLM, InvalidParameter, Proposal, SamplingParams, progress
from headstart.engine.outcome import Rows
from headstart.machine.cpu.build import why_not
from headstart.machine.cpu.packed import load_packed, pack_model, save_packed
from headstart.testing import ScriptedDrafter, tiny_model
from headstart.types import Request

SIZES = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
GREEDY = SamplingParams(temperature=0, max_tokens=6)


def test_dropped_streams_hold_no_place_in_the_line() -> None:
    llm = LLM(tiny_model("llama"), None, max_model_len=64, max_waiting=4)
    for _ in range(10):
        llm.stream([3, 4, 5], GREEDY)
        gc.collect()
    assert llm.stats.tokens == 0


def test_a_model_in_training_mode_is_asked_without_dropout_and_left_in_it() -> None:
    model = tiny_model("gpt2", resid_pdrop=0.5, embd_pdrop=0.5, attn_pdrop=0.5)
    llm = LLM(model, "lookup", max_model_len=64)
    expected = llm.generate([3, 4, 5], GREEDY).token_ids
    model.train()
    frozen: Any = model.transformer.h[0]
    frozen.eval()
    assert llm.generate([3, 4, 5], GREEDY).token_ids == expected
    assert (
        llm.generate([3, 4, 5, 6], GREEDY).token_ids
        == LLM(model.eval(), None, max_model_len=64).generate([3, 4, 5, 6], GREEDY).token_ids
    )
    model.train()
    frozen.eval()
    llm.generate([9], GREEDY)
    assert model.training
    assert not frozen.training


def test_a_proposal_without_end_is_not_read_to_its_end() -> None:
    engine = table_engine(table(6), ScriptedDrafter(lambda view, budget: Proposal(repeat(1), (-1,))))  # type: ignore[arg-type]
    handle = engine.submit(Request("a", (1, 2), GREEDY))
    engine.drive(lambda: handle.done)
    assert handle.completion().finish_reason == "length"
    assert "or more tokens" in str(engine.inactive_reason)


@pytest.mark.skipif(why_not() is not None, reason="no kernels here")
def test_packed_weights_with_a_flipped_bit_are_not_used(tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    save_packed(pack_model(tiny_model("llama", **SIZES), "int8"), path)
    assert load_packed(path) is not None
    with path.open("r+b") as file:
        file.seek(-100, os.SEEK_END)
        byte = file.read(1)
        file.seek(-100, os.SEEK_END)
        file.write(bytes([byte[0] ^ 16]))
    assert load_packed(path) is None


@pytest.mark.skipif(why_not() is not None, reason="no kernels here")
def test_a_process_may_end_while_a_thread_generates() -> None:
    program = f"""
import threading, time, torch
from headstart import LLM, SamplingParams
from headstart.testing import tiny_model
llm = LLM(tiny_model("llama", **{SIZES!r}), "lookup", quantization="int8", max_model_len=256)
def work():
    while True:
        llm.generate([3, 4, 5], SamplingParams(temperature=0, max_tokens=200, ignore_eos=True))
for _ in range(2):
    threading.Thread(target=work, daemon=True).start()
time.sleep(0.3)
"""
    done = WarmProcess(program, environment=dict(os.environ))
    _, errors = done.communicate(timeout=120)
    assert done.returncode == 0, errors[-2000:]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="nothing forks here")
def test_many_threads_at_once_in_a_forked_child() -> None:
    llm = LLM(tiny_model("llama"), None, max_model_len=64, max_rows=2)
    expected = llm.generate([3, 4, 5], GREEDY).token_ids
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            sys.setswitchinterval(1e-6)
            found: list[Any] = []
            begin = threading.Barrier(4)

            def work() -> None:
                begin.wait()
                found.append(llm.generate([3, 4, 5], GREEDY).token_ids)

            threads = [threading.Thread(target=work) for _ in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(60)
            os.write(write, str(found.count(expected)).encode())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        assert pipe.read() == b"4"
    os.waitpid(child, 0)


def test_a_drafter_whose_name_raises_has_one() -> None:
    class Nameless(ScriptedDrafter):
        @property
        def name(self) -> str:  # type: ignore[override]
            raise RuntimeError("no name")

    llm = LLM(tiny_model("llama"), Nameless(lambda view, budget: None), max_model_len=64)
    assert llm.drafter_name == "Nameless"
    assert torch.is_grad_enabled()


def test_distill_settings_are_checked_before_anything_is_made() -> None:
    from headstart.distill.make import DistillSettings

    for name in ("vocab", "layers", "length", "gamma"):
        with pytest.raises(InvalidParameter, match=f"{name} must be at least 1"):
            DistillSettings(**{name: 0})  # type: ignore[arg-type]


def test_the_draft_quantization_is_checked_whoever_drafts() -> None:
    with pytest.raises(InvalidParameter, match="draft_quantization"):
        LLM(tiny_model("llama"), "lookup", draft_quantization="int2", max_model_len=64)  # type: ignore[arg-type]


def test_progress_is_told_while_a_reader_redirects_standard_error(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "PATIENCE", 0.01)
    monkeypatch.setattr(progress, "INTERVAL", 0.01)
    with progress.telling(None) as tell, redirect_stderr(io.StringIO()):
        tell("loading a long file")
        time.sleep(0.2)
    assert "loading a long file" in capsys.readouterr().err


def test_nothing_is_read_of_the_rows_when_no_round_is_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    """An abort asks the players whether a round was launched ahead; on a CPU none ever is."""
    engine = table_engine(table(8, seed=3), None, rows=4)
    for name in "abc":
        engine.submit(Request(name, (1, 2), SamplingParams(max_tokens=20, ignore_eos=True)))
    while engine.stats.tokens < 9:
        engine.step()
    monkeypatch.setattr(Rows, "of", staticmethod(lambda *_, **__: pytest.fail("rows were gathered for nothing")))
    engine.abort("b")
    monkeypatch.undo()
    while not engine.idle:
        engine.step()
    assert (engine.stats.aborted, engine.stats.finished, engine.stats.failed) == (1, 2, 0)
