"""A conversation and the commands that change it.

Knows: messages, the system message and what can be typed instead of a message. Does not know: models, terminals.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

__all__ = ["COMMANDS", "Conversation", "Ended"]

COMMANDS = {
    "/help": "this list",
    "/system TEXT": "set the system message; without TEXT there is none",
    "/reset": "start anew; the system message stays",
    "/save FILE": "write the messages to a new file, as JSON",
    "/quit": "end, as Ctrl-D does",
}
_HELP = (
    "\n".join(f"  {name:<13} {text}" for name, text in COMMANDS.items())
    + '\n  Several lines: end each but the last in \\, or put """ before the first and behind the last.'
    + "\n  A message that begins with '/' needs a space before it. Ctrl-C stops an answer."
)


class Ended(Exception):
    """The person has had enough."""


class Conversation:
    """The messages so far."""

    def __init__(self, system: str | None = None) -> None:
        self._system = system
        self._turns: list[dict[str, str]] = []

    @property
    def messages(self) -> list[dict[str, str]]:
        opening = [{"role": "system", "content": self._system}] if self._system else []
        return [*opening, *self._turns]

    def ask(self, text: str) -> None:
        self._turns.append({"role": "user", "content": text})

    def answer(self, text: str) -> None:
        self._turns.append({"role": "assistant", "content": text})

    def take_back(self) -> None:
        """Forget a question that has no answer, where there is one."""
        if self._turns and self._turns[-1]["role"] == "user":
            self._turns.pop()

    def command(self, line: str) -> str:
        """Carry out what begins with '/'. Returns what to tell; raises ``Ended``."""
        name, _, rest = line.strip().partition(" ")
        known: dict[str, Callable[[str], str]] = {
            "/help": lambda _: _HELP,
            "/system": self._set_system,
            "/reset": self._reset,
            "/save": self._save,
            "/quit": self._end,
            "/exit": self._end,
        }
        if name not in known:
            return (
                f"there is no command {name}; /help lists them (a message that begins with '/' needs a space before it)"
            )
        return known[name](rest.strip())

    def _set_system(self, text: str) -> str:
        self._system = text or None
        return "the system message is set" if text else "there is no system message now"

    def _reset(self, _: str) -> str:
        self._turns.clear()
        return "started anew"

    def _save(self, name: str) -> str:
        if not name:
            return "which file? /save FILE"
        path = Path(name)
        mine = False
        try:
            path = path.expanduser()
            with path.open("x", encoding="utf-8") as file:  # a file that is there stays as it is
                mine = True
                json.dump(self.messages, file, ensure_ascii=False, indent=2)
                file.write("\n")
        except FileExistsError:
            return f"{path} exists already, and /save does not overwrite; choose another name"
        except (OSError, RuntimeError, ValueError) as error:  # the second: ~nobody; the third: a name with a zero byte
            if mine:
                with suppress(OSError):
                    path.unlink()  # half of it is of no use
            reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            return f"not saved: {reason} ({path})"
        count = len(self.messages)
        return f"saved {count} message{'s' * (count != 1)} in {path}"

    def _end(self, _: str) -> str:
        raise Ended
