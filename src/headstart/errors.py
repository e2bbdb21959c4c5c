"""Every error Headstart raises on purpose, as one tree under ``HeadstartError``; and its warnings.

Knows: how to name a fault. Does not know: who raises it or who shows it.
"""

from __future__ import annotations


class HeadstartError(Exception):
    """The root: catch this to catch everything Headstart raises on purpose."""


class InvalidParameter(HeadstartError, ValueError):
    """A value is out of range. ``field`` is the parameter's name, and it opens the message.

    ``index``: which of several prompts, conversations or messages it is about; None where there was only one.
    """

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field} {message}")
        self.field = field
        self.index: int | None = None

    def about(self, what: str, index: int) -> None:
        """Say in the message which of several it is about: ``what`` is "prompt", say."""
        text = str(self)
        self.args = (f"{what} {index}{text[len(what) :]}" if self.field == what else f"{text} ({what} {index})",)
        self.index = index


class PromptTooLong(InvalidParameter):
    """The prompt, or the prompt and ``max_tokens`` together, does not fit the context. ``room``: what an answer has."""

    def __init__(self, field: str, message: str, room: int = 0) -> None:
        super().__init__(field, message)
        self.room = room


class ModelRefused(HeadstartError):
    """The model cannot be served. The message says why and what to do instead."""


class ModelNotFound(HeadstartError):
    """No model was found under the given name."""


class EngineBusy(HeadstartError):
    """The waiting queue is full; or requests run, and what was asked for cannot be done meanwhile."""


class EngineStopped(HeadstartError):
    """The inbox takes no requests any more: it was closed, or the thread that steps died."""


class GenerationFailed(HeadstartError):
    """One request failed while it ran; its neighbours in the batch did not."""


class MissingExtra(HeadstartError):
    """An optional dependency is missing."""

    def __init__(self, package: str, extra: str) -> None:
        super().__init__(f"this needs the package {package!r}: pip install 'headstart[{extra}]'")


class HeadstartWarning(UserWarning):
    """Something works, but not as it was meant to; the message says why and what to do."""
