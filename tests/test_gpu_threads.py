"""Many threads over rounds that are captured on a GPU: the same text as alone, also when they are interrupted."""

from __future__ import annotations

import os
import sys
import threading
from typing import Any

import pytest
from interrupts import Interrupted
from stress import JOBS, stress
from test_engine_threads import in_threads
from test_gpu_captured import DEEP, PROMPTS, pair

from headstart import LLM, HeadstartError, SamplingParams

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning"),
]


def opened(kind: str) -> LLM:
    target, draft = pair("llama", DEEP)
    settings: dict[str, Any] = {"max_rows": 4, "max_model_len": 128, "max_waiting": 64, "check": False}
    if kind == "lookup":
        return LLM(target, "lookup", **settings)
    return LLM(target, draft, gamma="auto" if kind == "auto" else 4, overlap=kind == "overlap", **settings)


@pytest.fixture(params=["fixed", "overlap", "auto", "lookup"], scope="module")
def llm(request: pytest.FixtureRequest) -> LLM:
    found = opened(request.param)
    assert found.engine.parts.captured is not None
    return found


def test_threads_get_the_text_that_they_would_get_alone(llm: LLM) -> None:
    jobs = [
        (prompt, SamplingParams(temperature=0.8 * (i % 2), seed=i, max_tokens=30, ignore_eos=True))
        for i, prompt in enumerate([*PROMPTS, *PROMPTS])
    ]
    expected = [llm.generate(*job).token_ids for job in jobs]

    def work(i: int) -> list[tuple[int, ...]]:
        if i % 2:
            return [llm.generate(*job).token_ids for job in jobs]
        return [tuple(p.token_id for p in llm.stream(*job) if p.token_id is not None) for job in jobs]

    assert in_threads(8, work) == [expected] * 8
    assert llm.engine.idle


def test_threads_that_are_interrupted(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def ignored(args: Any) -> None:
        if args.exc_type is not Interrupted:
            sys.__excepthook__(*args[:3])

    monkeypatch.setattr(threading, "excepthook", ignored)
    _, seen = stress(llm, "captured", 8, seed=3)
    assert seen["one"] > 5
    assert seen["interrupted"] > 5
    assert len(JOBS) > 5


def test_a_forked_child_is_refused_in_a_sentence(llm: LLM) -> None:
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            llm.generate([3, 4], SamplingParams(max_tokens=2))
        except HeadstartError as error:
            os.write(write, str(error).encode())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        assert "forked after the model was loaded" in pipe.read().decode()
    os.waitpid(child, 0)
