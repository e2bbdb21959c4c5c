"""Without a network a wrong name is refused and a cached model loads, both without waiting for the hub's client."""

from __future__ import annotations

import re
import shutil
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from headstart.api import LLM
from headstart.errors import InvalidParameter, ModelNotFound
from headstart.machine.cpu.build import why_not as no_kernels
from headstart.machine.load import hub
from headstart.machine.load import open as open_module
from headstart.machine.load.hub import Remote, architecture, found_at, out_of_reach
from headstart.machine.load.loading import load, quiet
from headstart.testing import tiny_model, tiny_tokenizer

COMMIT = "0123456789abcdef0123456789abcdef01234567"
PROXIES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy")


class Calls(list[Any]):
    """Every connection and every look-up of an address that is tried."""


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """Connections are made as ever, and written down. The hub's client makes its own through the same functions."""
    made = Calls()
    for name in ("create_connection", "getaddrinfo"):
        real = getattr(socket, name)

        def noted(*args: Any, _real: Any = real, _name: str = name, **more: Any) -> Any:
            made.append(_name)
            return _real(*args, **more)

        monkeypatch.setattr(socket, name, noted)
    return made


@pytest.fixture
def port() -> Iterator[int]:
    """A port of this machine at which nobody listens, though it is taken."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield taken.getsockname()[1]


@pytest.fixture(autouse=True)
def nowhere(port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hub that does not answer, an empty cache of it, and no proxy."""
    for name in PROXIES:
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    monkeypatch.delenv("HF_HUB_ETAG_TIMEOUT", raising=False)
    endpoint = f"http://127.0.0.1:{port}"
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", endpoint + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub._Memory, "asked", None)


def cached(name: str) -> Path:
    """The snapshot of a tiny model, as the hub's client keeps it."""
    place = Path(constants.HF_HUB_CACHE) / f"models--{name.replace('/', '--')}"
    (place / "refs").mkdir(parents=True)
    (place / "refs" / "main").write_text(COMMIT)
    snapshot = place / "snapshots" / COMMIT
    with quiet():
        tiny_model("llama").save_pretrained(snapshot)
        tiny_tokenizer().save_pretrained(snapshot)
    return snapshot


# one look-up and one connection for the question whether anyone answers, none by the hub's client
ASKED_ONCE = ["getaddrinfo", "create_connection", "getaddrinfo"]  # create_connection looks the address up as well


def test_a_wrong_name_is_refused_after_one_try(calls: Calls, port: int) -> None:
    with pytest.raises(ModelNotFound) as refusal:
        load("nobody/nothing")
    message = str(refusal.value)
    assert message.startswith("no model 'nobody/nothing'")
    assert f"the Hugging Face hub cannot be reached (127.0.0.1:{port}: Connection refused)" in message
    assert "check the name and the network, or name a folder" in message
    assert calls == ASKED_ONCE, "the hub's client was asked as well, and it tries again and again"


def test_a_model_in_the_cache_loads_all_the_same(calls: Calls) -> None:
    snapshot = cached("someone/tiny")
    loaded = load("someone/tiny")
    assert loaded.report.architecture == "LlamaForCausalLM"
    assert loaded.tokenizer is not None
    assert found_at("someone/tiny") == snapshot
    assert architecture("someone/tiny") == "LlamaForCausalLM"
    assert calls == ASKED_ONCE


def test_a_draft_in_the_cache_too(calls: Calls) -> None:
    cached("someone/tiny")
    llm = LLM(tiny_model("llama", seed=1), "someone/tiny", max_model_len=64, max_rows=1)
    assert llm.drafter_name == "model"
    assert calls == ASKED_ONCE


@pytest.mark.skipif(no_kernels() is not None, reason=str(no_kernels()))
def test_a_model_in_the_cache_is_rounded_tensor_by_tensor(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "head_dim": 32}
    with quiet():
        tiny_model("llama", **sizes).save_pretrained(cached("someone/tiny"))
    monkeypatch.setattr(open_module, "load", lambda *_, **__: pytest.fail("float weights were loaded"))
    monkeypatch.setenv("HEADSTART_CACHE_GB", "0")
    llm = LLM("someone/tiny", None, quantization="int8", max_model_len=64, max_rows=1, device="cpu")
    assert llm.report.dtype == "int8"
    assert llm.report.tokenizer_size is not None
    assert calls == ASKED_ONCE


def test_half_a_model_in_the_cache_is_not_taken_for_pickle() -> None:
    (cached("someone/tiny") / "model.safetensors").unlink()
    with pytest.raises(ModelNotFound, match=r"someone/tiny is not whole .* cannot be reached .*no weights"):
        load("someone/tiny")


def test_a_repository_without_a_configuration_is_not_the_current_folder() -> None:
    snapshot = cached("someone/tiny")
    (snapshot / "config.json").unlink()
    missing = snapshot.parents[1] / ".no_exist" / COMMIT
    missing.mkdir(parents=True)
    (missing / "config.json").touch()
    with pytest.raises(OSError, match=r"config\.json"):
        found_at("someone/tiny", Remote(COMMIT))


@pytest.mark.parametrize("draft", ["lokup", "somebody/nothing", "./nothing", Path("nothing")])
def test_an_unknown_draft_lists_the_drafters_before_the_target_is_read(
    draft: str | Path, tmp_path: Path, calls: Calls
) -> None:
    target = tmp_path / "target"
    with quiet():
        tiny_model("llama").save_pretrained(target)
    (target / "model.safetensors").write_bytes(b"would be refused as soon as it is read")
    names = (
        "is no drafter's name (there are 'auto', 'embedded', 'lookup', and None, which is 'none' on the command line), "
    )
    with pytest.raises(ModelNotFound, match=re.escape(names)) as refusal:
        LLM(target, draft)
    assert str(refusal.value).startswith(f"draft '{draft}'")
    assert calls in ([], ASKED_ONCE)


def test_the_embedded_model_is_a_draft_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with quiet():
        tiny_model("llama").save_pretrained(tmp_path)
    asked: list[object] = []
    monkeypatch.setattr("headstart.assembly.embedded_folder", lambda tell: asked.append(tell) or tmp_path)
    target = tiny_model("llama")
    assert LLM(target, "embedded", gamma=0).draft_report is None
    assert asked == [], "nothing is drafted, so nothing is loaded"
    llm = LLM(target, "embedded", gamma=2)
    assert len(asked) == 1
    assert llm.draft_report is not None
    assert llm.draft_report.architecture == "LlamaForCausalLM"


def test_what_is_no_draft_is_named() -> None:
    with pytest.raises(InvalidParameter, match="draft must be a drafter's name"):
        LLM(tiny_model("llama"), 5)  # type: ignore[arg-type]


# -- whether the hub answers


def test_a_hub_that_answers(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        assert out_of_reach() is None
        assert not Remote().offline


def test_the_answer_is_remembered_for_a_moment(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    assert out_of_reach() == out_of_reach() is not None
    assert calls == ASKED_ONCE
    monkeypatch.setattr(hub._Memory, "until", 0.0)
    out_of_reach()
    assert calls == 2 * ASKED_ONCE


def test_a_proxy_is_left_to_the_hubs_client(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://proxy.example:3128")
    assert out_of_reach() is None
    assert calls == []
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    assert out_of_reach() is not None
    assert calls == ASKED_ONCE


def test_offline_is_not_asked(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert out_of_reach() == "HF_HUB_OFFLINE is set"
    with pytest.raises(ModelNotFound, match="HF_HUB_OFFLINE is set"):
        load("nobody/nothing")
    assert calls == []


def test_an_address_that_is_never_found_holds_nothing_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name server that does not answer takes a minute to say so; here one that never does."""
    ended = threading.Event()
    monkeypatch.setattr(hub, "PATIENCE", 0.05)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *a, **k: ended.wait())
    try:
        assert out_of_reach() == "127.0.0.1: no answer within 0.05 s; HF_HUB_ETAG_TIMEOUT=10 waits longer"
    finally:
        ended.set()


def test_an_address_that_leads_nowhere_does_not_hide_one_that_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken IPv6 beside IPv4 that works."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        good = server.getsockname()[1]
        places = [(0, 0, 0, "", ("192.0.2.1", 9)), (0, 0, 0, "", ("127.0.0.1", good))]
        real = socket.getaddrinfo
        monkeypatch.setattr(socket, "getaddrinfo", lambda host, *a, **k: places if host == "h" else real(host, *a, **k))
        assert hub._no_connection("h", 9, 5.0) is None


def test_a_folder_never_asks(tmp_path: Path, calls: Calls) -> None:
    snapshot = cached("someone/tiny")
    shutil.copytree(snapshot, tmp_path / "here")
    load(tmp_path / "here")
    assert calls == []
