"""Headstart: lossless speculative decoding for any Hugging Face causal language model.

from headstart import LLM, SamplingParams

llm = LLM(draft="lookup")
print(llm.generate("Quantum entanglement is", SamplingParams(max_tokens=50, temperature=0)).text)
"""

from __future__ import annotations

from . import errors as _errors

TYPE_CHECKING = False  # typing's own, which type checkers know by its name: nothing else is imported here
if TYPE_CHECKING:
    from .api import LLM
    from .async_api import AsyncLLM
    from .drafters.base import DraftContext, Drafter, TargetView
    from .engine.inbox import Inbox, Reader
    from .engine.stream import Stream
    from .errors import (
        EngineBusy,
        EngineStopped,
        GenerationFailed,
        HeadstartError,
        HeadstartWarning,
        InvalidParameter,
        MissingExtra,
        ModelNotFound,
        ModelRefused,
        PromptTooLong,
    )
    from .tensors import SpeculativeOutput, speculative_decode
    from .types import (
        Choice,
        Completion,
        DraftView,
        Piece,
        Proposal,
        Request,
        Round,
        SamplingParams,
        Stats,
        Structured,
        TokenLogprob,
        Verdict,
    )

__all__ = [
    "LLM",
    "AsyncLLM",
    "Choice",
    "Completion",
    "DraftContext",
    "DraftView",
    "Drafter",
    "EngineBusy",
    "EngineStopped",
    "GenerationFailed",
    "HeadstartError",
    "HeadstartWarning",
    "Inbox",
    "InvalidParameter",
    "MissingExtra",
    "ModelNotFound",
    "ModelRefused",
    "Piece",
    "PromptTooLong",
    "Proposal",
    "Reader",
    "Request",
    "Round",
    "SamplingParams",
    "SpeculativeOutput",
    "Stats",
    "Stream",
    "Structured",
    "TargetView",
    "TokenLogprob",
    "Verdict",
    "speculative_decode",
]

__version__ = "0.1.0"

# Which module holds each public name. It is imported when one of its names is first used: torch and transformers take
# seconds to import, and `headstart --help` needs neither.
_HOMES = {
    **{name: "errors" if hasattr(_errors, name) else "types" for name in __all__},
    "LLM": "api",
    "AsyncLLM": "async_api",
    **dict.fromkeys(("DraftContext", "Drafter", "TargetView"), "drafters.base"),
    **dict.fromkeys(("Inbox", "Reader"), "engine.inbox"),
    "Stream": "engine.stream",
    **dict.fromkeys(("SpeculativeOutput", "speculative_decode"), "tensors"),
}


if not TYPE_CHECKING:  # so that a wrong name is still found without running anything

    def __getattr__(name: str) -> object:
        from importlib import import_module

        if name in _HOMES:
            value = getattr(import_module(f".{_HOMES[name]}", __name__), name)
            globals()[name] = value
            return value
        if not name.startswith(
            "_"
        ):  # `import headstart` alone has always made `headstart.types` and its like reachable
            try:
                return import_module(f".{name}", __name__)
            except ModuleNotFoundError as error:
                if error.name != f"{__name__}.{name}":
                    raise
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
