"""Chat: on a real terminal with keys, and from a pipe."""

from __future__ import annotations

import json
import signal
import stat
from pathlib import Path

import pytest
from kernel_tools import Compiler
from terminal_tools import CTRL_C, UP, Terminal
from typer.testing import CliRunner, Result

from headstart.cli.chat import _stoppable
from headstart.cli.conversation import Conversation, Ended
from headstart.cli.lines import History
from headstart.cli.main import app

PROMPT = "you> "


def piped(folder: str, text: str | bytes, *arguments: str) -> Result:
    return CliRunner().invoke(app, ["chat", "-m", folder, "-n", "6", "--seed", "1", *arguments], input=text)


@pytest.mark.slow
def test_keys_and_interruptions_on_a_terminal(tiny_folder: str, tmp_path: Path) -> None:
    """One long talk, because each start takes seconds."""
    saved, cache = tmp_path / "saved.json", tmp_path / "cache"
    arguments = ("chat", "-m", tiny_folder, "-n", "3000", "-t", "0", "--plain")  # greedy, this model never ends
    cold = {"HEADSTART_CACHE": str(cache), "CXX": str(Compiler(tmp_path / "compiler").path)}
    history = cache / "chat_history"
    for line in ("Typed in the session before", "and the last line of it"):
        History(pytest.fail, history).add(line)
    with Terminal(*arguments, **cold) as terminal:
        terminal.wait_for(PROMPT)
        terminal.send(UP + UP)
        terminal.wait_for("Typed in the session before")
        terminal.send("\x15")  # Ctrl-U clears the line
        terminal.send("/nonsense\r")
        terminal.wait_for("no command /nonsense")
        terminal.wait_for(PROMPT)
        terminal.send("/help\r")
        for name in ("/system", "/reset", "/save", "/quit"):
            terminal.wait_for(name)
        terminal.wait_for(PROMPT)

        # The arrow key brings the last line back, and the line can be changed; no escape codes reach the model.
        terminal.send("/system Be kin\r")
        terminal.wait_for("message is set")
        terminal.wait_for(PROMPT)
        terminal.send(UP)
        terminal.wait_for("/system Be kin")
        terminal.send("d\r")
        terminal.wait_for("message is set")
        terminal.wait_for(PROMPT)

        # Ctrl-C stops the answer and keeps the conversation.
        terminal.send("Hello\\\r")
        terminal.wait_for(r"\.\.\. ")
        terminal.send("there\r")
        terminal.wait_for(r"there\r\n.{20}")
        terminal.interrupt("stopped; what was written stays")
        terminal.wait_for(PROMPT)
        terminal.send(f"/save {saved}\r")
        terminal.wait_for("saved 3 messages")
        terminal.wait_for(PROMPT)

        # There is one row: it was freed, or nothing more would come.
        terminal.send("And more?\r")
        terminal.wait_for(r"more\?\r\n.{20}")
        terminal.interrupt("stopped; what was written stays")
        terminal.wait_for(PROMPT)

        # At the prompt Ctrl-C drops the line and says how to end; twice in a row it ends.
        terminal.send("half a line")
        terminal.wait_for("half a line")
        terminal.interrupt("Ctrl-C again or Ctrl-D ends")
        terminal.wait_for(PROMPT)
        terminal.send("/reset\r")
        terminal.wait_for("started anew")
        terminal.wait_for(PROMPT)
        terminal.interrupt("Ctrl-C again or Ctrl-D ends")
        terminal.wait_for(PROMPT)
        assert terminal.end(CTRL_C) == 0
    system, asked, answered = json.loads(saved.read_text())
    assert system == {"role": "system", "content": "Be kind"}
    assert asked == {"role": "user", "content": "Hello\nthere"}
    assert answered["role"] == "assistant"
    assert 15 < len(answered["content"]) < 3000
    assert stat.S_IMODE(history.stat().st_mode) == 0o600
    assert "And more?" in map(json.loads, history.read_text().splitlines()), "for the next session"
    assert "Traceback" not in terminal.shown


def test_a_second_ctrl_c_does_not_wait() -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with _stoppable(on=True) as stopped:
            assert not stopped()
            signal.raise_signal(signal.SIGINT)
            assert stopped()
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt), _stoppable(on=False) as stopped:  # a pipe: nobody to go on talking with
            signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_pipe_gets_answers_and_nothing_else(tiny_folder: str) -> None:
    result = piped(tiny_folder, "Hello\n/reset\n\nBye\n")
    assert result.exit_code == 0, result.output
    assert len(result.stdout.splitlines()) == 2
    assert PROMPT not in result.output
    assert "\x1b" not in result.output
    assert result.stderr.count("tok/s") == 2
    assert "started anew" in result.stderr


def test_lines_that_belong_together(tiny_folder: str) -> None:
    several = piped(tiny_folder, "a\\\nb\n", "--plain")
    quoted = piped(tiny_folder, '"""a\nb"""\n', "--plain")
    quoted_apart = piped(tiny_folder, '"""\na\nb\n"""\n', "--plain")
    unfinished = piped(tiny_folder, '"""\na\nb\n', "--plain")
    other = piped(tiny_folder, "a\nb\n", "--plain")
    assert several.stdout == quoted.stdout == quoted_apart.stdout == unfinished.stdout
    assert several.stdout.count("\n") == 1
    assert other.stdout.count("\n") == 2


def test_a_message_may_begin_with_a_slash(tiny_folder: str) -> None:
    assert "no command /etc" in piped(tiny_folder, "/etc is what?\n").stderr
    result = piped(tiny_folder, " /etc is what?\n")
    assert "no command" not in result.stderr
    assert result.stdout.strip()


def test_the_system_message_changes_the_answer(tiny_folder: str) -> None:
    without = piped(tiny_folder, "Hello\n", "--plain").stdout
    given = piped(tiny_folder, "Hello\n", "--plain", "--system", "Be kind").stdout
    assert piped(tiny_folder, "/system Be kind\nHello\n", "--plain").stdout == given != without
    assert piped(tiny_folder, "/system\nHello\n", "--plain", "--system", "Be kind").stdout == without


def test_input_that_is_no_text(tiny_folder: str) -> None:
    result = piped(tiny_folder, b"Hello\n\xff\xfe\n")
    assert result.exit_code == 2
    assert result.stderr.splitlines()[-1] == "error: standard input is not valid UTF-8"
    assert "Traceback" not in result.output


def test_answers_in_the_room_there_is(tiny_folder: str) -> None:
    result = piped(tiny_folder, "Hello\n", "--max-model-len", "60", "-n", "512")
    assert result.exit_code == 0, result.output
    assert "too long" not in result.stderr
    assert result.stderr.count("tok/s") == 1


def test_a_conversation_that_is_full_goes_on_after_reset(tiny_folder: str) -> None:
    result = piped(tiny_folder, f"Hello\n{'x' * 200}\n/reset\nHello\n", "--max-model-len", "100", "--plain")
    assert result.exit_code == 0, result.output
    assert result.stderr.count("too long") == 1
    first, second = result.stdout.splitlines()
    assert first == second


def test_save_never_overwrites_and_says_what_went_wrong(tmp_path: Path) -> None:
    talk = Conversation("Be brief")
    talk.ask("ä?")
    path = tmp_path / "talk.json"
    assert talk.command(f"/save {path}") == f"saved 2 messages in {path}"
    before = path.read_text(encoding="utf-8")
    assert json.loads(before) == [{"role": "system", "content": "Be brief"}, {"role": "user", "content": "ä?"}]
    talk.answer("!")
    assert "does not overwrite" in talk.command(f"/save {path}")
    assert path.read_text(encoding="utf-8") == before
    assert "which file?" in talk.command("/save")
    assert "No such file or directory" in talk.command(f"/save {tmp_path}/none/talk.json")
    assert talk.command("/save a\0b").startswith("not saved: ")
    assert talk.command("/save ~nobody-of-that-name/x").startswith("not saved: ")
    with pytest.raises(Ended):
        talk.command("/exit")


def test_what_cannot_be_written_whole_is_not_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(json, "dump", full)  # a disk cannot be filled here
    talk, path = Conversation(), tmp_path / "talk.json"
    assert talk.command(f"/save {path}") == f"not saved: No space left on device ({path})"
    assert not path.exists()


def test_the_history_is_bounded_private_and_no_reason_to_fail(tmp_path: Path) -> None:
    path, told = tmp_path / "inner" / "chat_history", list[str]()
    path.parent.mkdir()
    path.write_text("".join(json.dumps(f"line {i}") + "\n" for i in range(2500)) + "broken\n")
    history = History(told.append, path)
    history.add("one more")
    history.add("  ")
    lines = path.read_text().splitlines()
    assert len(lines) <= 1001
    assert lines[-1] == '"one more"'
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    (tmp_path / "file").write_text("")
    lost = History(told.append, tmp_path / "file" / "chat_history")
    lost.add("first")
    lost.add("second")
    assert len(told) == 1
    assert told[0].startswith("what you type is not kept for next time: ")
