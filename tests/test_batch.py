"""``headstart batch``: OpenAI's batch files, answered as the server answers, whole whenever the job is killed."""

from __future__ import annotations

import io
import json
import os
import signal
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi")

from server_tools import WORDS, Server, tiny_llm

from headstart import LLM
from headstart.cli import batch_files
from headstart.cli.batch_files import fingerprint
from headstart.cli.main import command
from headstart.cli.options import ModelOptions
from headstart.errors import HeadstartError

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
Job = Callable[..., int]


def ask(name: str, body: Any, url: str = CHAT) -> dict[str, Any]:
    return {"custom_id": name, "method": "POST", "url": url, "body": body}


BODIES = [
    (CHAT, {"model": "tiny", "messages": WORDS, "max_tokens": 9, "temperature": 0}),
    (CHAT, {"messages": WORDS, "max_tokens": 9, "n": 2, "seed": 4, "logprobs": True, "top_logprobs": 2}),
    (TEXT, {"prompt": ["one two", [5, 6, 7]], "max_tokens": 7, "seed": 1, "logprobs": 1}),
    (TEXT, {"prompt": "one two one two", "max_tokens": 30, "temperature": 0, "speculate": False}),
]
MANY = [ask(f"q{i}", BODIES[i % len(BODIES)][1], BODIES[i % len(BODIES)][0]) for i in range(24)]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return tiny_llm()


@pytest.fixture
def job(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> Job:
    """Runs the command, over a model that is loaded already; its exit status."""
    monkeypatch.setattr(ModelOptions, "open", lambda *_, **__: llm)

    def run(*arguments: Any) -> int:
        try:
            code = command()(["batch", *map(str, arguments), "--served-model-name", "tiny"], standalone_mode=False)
        except SystemExit as ended:
            return ended.code if isinstance(ended.code, int) else 0
        return code if isinstance(code, int) else 0

    return run


def written(path: Path, lines: list[Any]) -> Path:
    path.write_bytes(b"".join(x if isinstance(x, bytes) else json.dumps(x).encode() + b"\n" for x in lines))
    return path


def records(path: Path) -> dict[str | None, dict[str, Any]]:
    """By custom_id; each once."""
    lines = path.read_text().splitlines()
    found = {json.loads(line)["custom_id"]: json.loads(line) for line in lines}
    assert len(found) == len(lines)
    return found


def test_answers_are_those_of_the_server(job: Job, tmp_path: Path) -> None:
    asked = written(tmp_path / "in.jsonl", [ask(f"q{i}", body, url) for i, (url, body) in enumerate(BODIES)])
    assert job(asked, tmp_path / "out.jsonl") == 0
    found = records(tmp_path / "out.jsonl")
    server = Server()
    try:
        for i, (url, body) in enumerate(BODIES):
            status, said = server.post(url, body)
            record = found[f"q{i}"]
            assert sorted(record) == ["custom_id", "error", "id", "response"]
            assert record["error"] is None
            assert record["response"]["status_code"] == status == 200
            assert record["response"]["request_id"]
            kept = record["response"]["body"]
            assert list(kept) == list(said)
            for name in ("object", "model", "choices"):
                assert kept[name] == said[name]
            assert kept["usage"]["total_tokens"] == said["usage"]["total_tokens"]
    finally:
        server.close()


def test_bad_lines_become_records_and_stop_nobody(job: Job, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = BODIES[0][1]
    lines: list[Any] = [
        b"\xef\xbb\xbf" + json.dumps(ask("good", good)).encode() + b"\r\n",
        b"\n",
        ask("no-field", good | {"temperatur": 1}),
        ask("range", good | {"temperature": 1000}),
        ask("streamed", good | {"stream": True}),
        ask("other-model", good | {"model": "gpt-9"}),
        ask("url", good, "/v1/embeddings"),
        ask("method", good) | {"method": "GET"},
        ask("no-body", None),
        ask("more", good) | {"priority": 1},
        ask("half", good | {"\ud800": 1}),
        ask("deep", {"messages": json.loads("[" * 200 + "]" * 200)}),
        ask("also good", good),
    ]
    asked, out = written(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    assert job(asked, out) == 3
    told = capsys.readouterr().err
    assert "2 of 12 requests succeeded, 10 failed" in told
    assert "not tried again" not in told
    assert job(asked, out) == 3  # somebody who thinks that it would try once more
    assert "those that failed are not tried again without --retry-failed" in capsys.readouterr().err
    found = records(out)
    assert {name for name, r in found.items() if r["response"] and r["response"]["status_code"] == 200} == {
        "good",
        "also good",
    }
    for name, status, field in (
        ("no-field", 400, "temperatur"),
        ("range", 400, "temperature"),
        ("streamed", 400, "stream"),
        ("other-model", 404, "model"),
        ("half", 400, "\\ud800"),  # half a character, spelt so that it can be sent back
    ):
        response = found[name]["response"]
        assert (response["status_code"], response["body"]["error"]["param"]) == (status, field)
        assert found[name]["error"] is None
    for name, line, field in (
        ("url", 7, "url"),
        ("method", 8, "method"),
        ("no-body", 9, "body"),
        ("more", 10, "'priority'"),
    ):
        assert found[name]["response"] is None
        assert found[name]["error"]["message"].startswith(f"line {line}: {field}: ")
    told = found[None]["error"]  # too deep: nothing of it is believed
    assert (told["message"][:20], told["param"]) == ("line 12 is not JSON:", None)


def test_what_failed_is_tried_again_when_that_is_asked_for(
    job: Job, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good, bad = BODIES[0][1], BODIES[0][1] | {"temperature": 1000}
    lines: list[Any] = [ask("a", good), ask("b", bad), b"no JSON\n", ask("c", good), ask("d", bad)]
    asked, out = written(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    assert job(asked, out) == 3
    out.chmod(0o640)
    before = records(out)
    linked = tmp_path / "link.jsonl"
    linked.symlink_to(out)
    lines[1] = ask("b", good)  # mended by its owner, who knows what was wrong with it
    written(asked, lines)
    with out.open("ab") as file:  # a job that was killed while it wrote
        file.write(b'{"id":"batch_req_5f')
    (tmp_path / "out.jsonl.retry").write_bytes(b"of one that was killed while it took lines out")
    assert job(asked, linked, "--retry-failed") == 3
    assert "3 of 5 requests succeeded, 2 failed" in capsys.readouterr().err
    after = records(out)
    assert linked.is_symlink()
    assert out.stat().st_mode & 0o777 == 0o640
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "link.jsonl", "out.jsonl"]
    assert after["b"]["response"]["status_code"] == 200
    assert after["d"]["response"]["status_code"] == 400
    assert after["d"]["response"]["request_id"] != before["d"]["response"]["request_id"]
    assert {name: after[name] for name in ("a", "c")} == {name: before[name] for name in ("a", "c")}  # not again


def test_a_job_that_is_killed_while_it_takes_lines_out_loses_none(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = BODIES[0][1] | {"temperature": 1000}
    asked, out = written(tmp_path / "in.jsonl", [ask("a", BODIES[0][1]), ask("b", bad)]), tmp_path / "out.jsonl"
    assert job(asked, out) == 3
    before = out.read_bytes()

    def killed(*_: Any) -> None:
        raise SystemExit(9)

    with monkeypatch.context() as patch:
        patch.setattr("headstart.cli.batch_files.os.replace", killed)
        assert job(asked, out, "--retry-failed") == 9
    assert out.read_bytes() == before
    assert job(asked, out, "--retry-failed") == 3
    assert len(records(out)) == 2


def test_lines_without_a_name_are_told_apart(job: Job, tmp_path: Path) -> None:
    lines = [
        b"{\n",
        {"url": CHAT},
        b"[1]\n",
        b'"\xff"\n',
        b"[" * 5000 + b"\n",
        {"custom_id": 7},
        ask("", {}),
        ask("a\x1b[1mb", {}),
    ]
    asked, out = written(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    assert job(asked, out) == 3
    found = [json.loads(line) for line in out.read_text().splitlines()]
    assert sorted(int(r["error"]["message"].split()[1].rstrip(":")) for r in found) == list(range(1, 9))
    assert {r["custom_id"] for r in found} == {None}
    assert len({r["id"] for r in found}) == 8
    before = out.read_bytes()
    assert job(asked, out) == 3, "what failed stays failed"
    assert out.read_bytes() == before


def test_doubled_names_and_wrong_files_are_refused_before_anything_runs(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ModelOptions, "open", lambda *_, **__: pytest.fail("a model was loaded"))
    twice = written(tmp_path / "twice.jsonl", [ask("a", {}), ask("b", {}), ask("a", {})])
    good = written(tmp_path / "good.jsonl", MANY[:2])
    (tmp_path / "link.jsonl").symlink_to(good)
    (tmp_path / "notes.txt").write_text("my notes, without a newline")
    (tmp_path / "empty").write_text("\n")
    for arguments, words in (
        ((twice, tmp_path / "o"), "custom_id 'a' twice, in lines 1 and 3"),
        ((good, good), "is the file that is read"),
        ((good, tmp_path / "link.jsonl"), "is the file that is read"),
        ((good, tmp_path / "notes.txt"), "is no record of a batch"),
        ((tmp_path / "none", tmp_path / "o"), "No such file"),
        ((tmp_path / "empty", tmp_path / "o"), "is empty"),
        ((good, tmp_path / "no" / "folder"), "cannot be written"),
        ((good, tmp_path), "cannot be written"),
    ):
        assert job(*arguments) == 2
        told = capsys.readouterr().err.strip()
        assert told.startswith("error: ")
        assert words in told
        assert "\n" not in told
    assert (tmp_path / "notes.txt").read_text() == "my notes, without a newline"
    assert good.read_bytes() == written(tmp_path / "again", MANY[:2]).read_bytes()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="nothing forks here")
def test_a_job_that_is_killed_goes_on_and_answers_each_once(job: Job, tmp_path: Path) -> None:
    asked, out = written(tmp_path / "in.jsonl", MANY), tmp_path / "out.jsonl"
    write, here = os.write, os.getpid()

    def killed(at: int, share: float) -> None:
        """A process of its own, which is killed when it has written so much of its record number ``at``."""
        child = os.fork()
        if not child:
            seen: list[int] = []

            def dies(file: int, text: Any) -> int:
                seen.append(1)
                if len(seen) == at:
                    write(file, bytes(text)[: int(len(text) * share)])
                    os.kill(os.getpid(), signal.SIGKILL)
                return write(file, text)

            try:
                batch_files.os.write = dies  # type: ignore[assignment]
                job(asked, out)
            finally:
                os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL

    for at, share in ((1, 0.0), (3, 0.5), (2, 1.0), (4, 0.001), (3, 0.999)):
        killed(at, share)
    assert os.getpid() == here
    kept = [line for line in out.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]
    assert 8 <= len(kept) < 20
    assert job(asked, out) == 0
    assert out.read_bytes().splitlines(keepends=True)[: len(kept)] == kept, "what was done was not done again"
    assert sorted(records(out), key=str) == sorted(f"q{i}" for i in range(24))
    assert all(record["response"]["status_code"] == 200 for record in records(out).values())


def test_a_full_disk_leaves_whole_records(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked, out, write = written(tmp_path / "in.jsonl", MANY), tmp_path / "out.jsonl", os.write
    seen: list[int] = []

    def fills(file: int, text: Any) -> int:
        seen.append(1)
        if len(seen) == 4:
            return write(file, bytes(text)[:100])
        if len(seen) == 5:
            raise OSError(28, "No space left on device")
        return write(file, text)

    with monkeypatch.context() as patched:
        patched.setattr(batch_files.os, "write", fills)
        assert job(asked, out) == 2
    told = capsys.readouterr().err
    assert "No space left on device" in told
    assert "the same command goes on from here" in told
    assert len(records(out)) == 3
    assert job(asked, out) == 0
    assert len(records(out)) == 24


def test_another_input_or_model_is_noticed(job: Job, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked, out = written(tmp_path / "in.jsonl", MANY[:3]), tmp_path / "out.jsonl"
    assert job(asked, out) == 0
    before = out.read_bytes()
    written(asked, [MANY[0], ask("q1", BODIES[1][1] | {"seed": 5}), MANY[2]])
    assert job(asked, out) == 2
    assert "holds answers to another input, or of another model (custom_id 'q1'" in capsys.readouterr().err
    written(asked, MANY[:3])
    assert job(asked, out, "--model", "other") == 2
    assert "of another model" in capsys.readouterr().err
    assert out.read_bytes() == before
    written(asked, MANY[:5])  # more lines are more to do
    assert job(asked, out) == 0
    assert out.read_bytes().startswith(before)
    assert len(records(out)) == 5


def test_models_are_known_by_what_they_hold(tmp_path: Path) -> None:
    for name, weights in (("a", b"x" * 200_000), ("b", b"x" * 200_000), ("c", b"x" * 199_999 + b"y")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(weights)
    a, b, c = (fingerprint(str(tmp_path / name), "auto") for name in "abc")
    assert a == b != c
    assert fingerprint(str(tmp_path / "a"), "float32") != a
    assert fingerprint(None) != fingerprint("some/model")


def test_ctrl_c_keeps_what_is_done(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], llm: LLM
) -> None:
    asked, out = written(tmp_path / "in.jsonl", MANY), tmp_path / "out.jsonl"
    add = batch_files.Records.add

    def then_stops(self: Any, *given: Any) -> None:
        add(self, *given)
        if len(self.done) == 5:
            os.kill(os.getpid(), signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # tests in a shell's background ignore it
    try:
        with monkeypatch.context() as patched:
            patched.setattr(batch_files.Records, "add", then_stops)
            assert job(asked, out) == 130
    finally:
        signal.signal(signal.SIGINT, before)
    told = capsys.readouterr().err
    assert "of 24 requests are answered; the same command goes on from here" in told
    assert 5 <= len(records(out)) < 24
    assert llm.engine.idle
    assert job(asked, out) == 0
    assert len(records(out)) == 24


@pytest.fixture
def piped(monkeypatch: pytest.MonkeyPatch) -> Callable[[bytes], None]:
    return lambda content: monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(content)))


def test_standard_input_and_output(job: Job, tmp_path: Path, piped: Any, capfd: pytest.CaptureFixture[str]) -> None:
    piped(written(tmp_path / "in.jsonl", MANY[:3]).read_bytes())
    assert job("-", "-") == 0
    found = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
    assert sorted(r["custom_id"] for r in found) == ["q0", "q1", "q2"]
    piped(b"")
    assert job("-", "-") == 2


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes here")
def test_an_input_that_can_be_read_only_once(job: Job, tmp_path: Path) -> None:
    """A shell's <(...), or /dev/stdin."""
    os.mkfifo(pipe := tmp_path / "pipe")
    writer = threading.Thread(target=lambda: written(pipe, MANY[:3]))
    writer.start()
    assert job(pipe, tmp_path / "out.jsonl") == 0
    writer.join()
    assert sorted(map(str, records(tmp_path / "out.jsonl"))) == ["q0", "q1", "q2"]


def test_an_input_that_is_changed_meanwhile_stops_the_job(tmp_path: Path) -> None:
    """What stands there now is another question, whose answer the record's id would not belong to."""
    questions = batch_files.Questions(str(written(tmp_path / "in.jsonl", MANY[:2])), "tiny")
    with closing(questions):
        first, second = questions.lines
        written(tmp_path / "in.jsonl", [MANY[0], ask("q9", BODIES[1][1])])
        assert json.loads(questions.read(first)[1]) == MANY[0]
        with pytest.raises(HeadstartError, match=r"line 2 .* changed"):
            questions.read(second)


def test_two_jobs_do_not_share_an_output(job: Job, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("fcntl")
    asked, out = written(tmp_path / "in.jsonl", MANY[:2]), tmp_path / "out.jsonl"
    first = batch_files.Records(str(out), [])
    assert job(asked, out) == 2
    assert "another process writes to" in capsys.readouterr().err
    first.close()
    assert job(asked, out) == 0


def test_an_engine_that_dies_stops_the_job_and_not_with_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = tiny_llm()
    steps, step = [], broken.engine._step

    def dies() -> None:
        steps.append(1)
        if len(steps) > 20:
            raise SystemExit("killed")
        step()

    monkeypatch.setattr(broken.engine, "_step", dies)
    monkeypatch.setattr(ModelOptions, "open", lambda *_, **__: broken)
    asked, out = written(tmp_path / "in.jsonl", MANY), tmp_path / "out.jsonl"
    with pytest.raises(SystemExit) as ended:
        command()(["batch", str(asked), str(out), "--served-model-name", "tiny"], standalone_mode=False)
    assert ended.value.code == 2
    assert "error: the " in capsys.readouterr().err
    assert all(record["response"]["status_code"] == 200 for record in records(out).values())
