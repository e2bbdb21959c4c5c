"""A target, perhaps a draft, and an engine around them: what every measurement here runs on.

Knows: how a system is opened from a few words, how a text becomes token ids, and how a second one shares the first
one's weights. Does not know: what is measured.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from ..assembly import Model, assemble
from ..config import SETTINGS, Config
from ..drafters.base import Drafter
from ..engine.engine import Engine
from ..errors import InvalidParameter
from ..machine.load.loading import Capability, Loaded, eos_ids
from ..machine.load.open import Opened
from ..machine.quantize import QUANTIZATIONS, Quantization
from ..machine.text import TextCodec
from ..types import Round, Tell
from .report.store import without_folders
from .texts import Text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["System", "SystemOptions"]

_OF_THE_TARGET = ("model", "dtype", "quantization", "device", "device_map", "revision", "tokenizer")


@dataclass(frozen=True)
class SystemOptions:
    """How a system is opened: what ``LLM`` takes, by the same names and with the same meaning."""

    model: Model | None = None  # None: the embedded one
    draft: Model | Drafter | None = "auto"
    gamma: int | Literal["auto"] = "auto"
    max_gamma: int = 10
    dtype: str | torch.dtype = "auto"
    draft_dtype: str | torch.dtype | None = None
    quantization: Quantization = "auto"
    draft_quantization: Quantization = "auto"
    device: str | torch.device | None = None
    device_map: Any = None
    max_rows: int = 1
    max_model_len: int | None = None
    prefill_chunk: int = 512
    threads: int | None = None
    invariant: bool = False
    overlap: bool | None = None
    trust_remote_code: bool = False
    revision: str | None = None
    token: str | None = None
    tokenizer: PreTrainedTokenizerBase | None = None
    check: bool = True

    def config(self) -> Config:
        """The engine's settings; raises where one is out of range. Nothing is loaded."""
        return Config.of({name: getattr(self, name) for name in SETTINGS if hasattr(self, name)})

    def changed(self, **settings: Any) -> SystemOptions:
        """The same with other settings; an unknown one is an error."""
        if unknown := set(settings) - {f.name for f in fields(self)}:
            raise InvalidParameter(sorted(unknown)[0], "is not a setting of a system")
        return replace(self, **settings)

    def told(self) -> dict[str, Any]:
        """The settings that are not the default ones, as a report shows them."""
        shown = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("token", "tokenizer")}
        plain = SystemOptions()
        return {name: _named(value) for name, value in shown.items() if value != getattr(plain, name)}


def _named(value: Any) -> Any:
    """A setting as text, where it is no number: of a folder its name, of a model or a drafter its class."""
    if value is None or isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, Path):
        return value.name
    known = isinstance(value, (str, torch.dtype, torch.device, dict))
    return without_folders(str(value)) if known else type(value).__name__


class System:
    """An engine with its models, opened once and measured many times. Close it: models are large."""

    def __init__(
        self, options: SystemOptions, engine: Engine, target: Loaded, draft: Capability | None, codec: TextCodec | None
    ) -> None:
        self.options, self.engine = options, engine
        self.target, self.draft_report, self._codec = target, draft, codec

    @classmethod
    def open(
        cls,
        options: SystemOptions | None = None,
        tell: Tell | None = None,
        *,
        opened: Opened | None = None,
        **settings: Any,
    ) -> System:
        """``settings``: fields of ``SystemOptions``. ``tell``: hears what loading is at; None: a line on a terminal.
        ``opened``: the target, where it is loaded already."""
        options = (options or SystemOptions()).changed(**settings)
        engine, target, draft, codec, _ = assemble(
            options.model,
            options.draft,
            options.config(),
            tokenizer=options.tokenizer,
            dtype=options.dtype,
            draft_dtype=options.dtype if options.draft_dtype is None else options.draft_dtype,
            quantization=options.quantization,
            draft_quantization=options.draft_quantization,
            revision=options.revision,
            check=options.check,
            progress=tell,
            opened=opened,
            device=options.device,
            device_map=options.device_map,
            trust_remote_code=options.trust_remote_code,
            token=options.token,
        )
        return cls(options, engine, target, draft, codec)

    def sibling(self, draft: Model | Drafter | None, tell: Tell | None = None, **settings: Any) -> System:
        """A second system on the same target with another draft. It shares the target's weights, but for those that
        were quantized for a GPU, which are read once more."""
        options = self.options.changed(draft=draft, **settings)
        same = all(getattr(options, name) == getattr(self.options, name) for name in _OF_THE_TARGET)
        packed, opened = self.engine.parts.runner.packed, None
        if packed is not None and same:
            opened = Opened(self.target, packed.plan.kind, packed)
        elif same and isinstance(self.target.model, torch.nn.Module) and self.report.dtype not in QUANTIZATIONS:
            options = replace(options, model=self.target.model, tokenizer=self.target.tokenizer, check=False)
        found = System.open(options, tell, opened=opened)
        if opened is not None:  # it was described once more
            notes = tuple(dict.fromkeys(found.report.notes))
            report = replace(found.report, dtype=self.report.dtype, notes=notes)
            found.target = replace(found.target, report=report)
        found.options = self.options.changed(draft=draft, **settings)
        return found

    def hold_threads(self) -> SystemOptions:
        """From now on its kernels use the threads that they use now, whatever else the machine does; the options for
        siblings that do the same. Engines that are compared must not differ by how many each one found fastest."""
        runner: Any = self.engine.parts.runner
        if self.options.threads is None and runner.own_threads:
            runner.threads = runner.threads  # what is set is kept
            return replace(self.options, threads=runner.threads)
        return self.options

    # -- what it is

    @property
    def report(self) -> Capability:
        """What the target is and what it can do."""
        return self.target.report

    @property
    def drafter_name(self) -> str:
        """Who drafts; "none" for plain decoding."""
        return self.engine.parts.drafter_name or "none"

    @property
    def device(self) -> torch.device:
        return self.engine.parts.runner.device

    @property
    def max_len(self) -> int:
        """The most tokens of prompt and answer together."""
        return self.engine.parts.runner.max_len

    @property
    def codec(self) -> TextCodec:
        """Text to token ids and back."""
        if self._codec is None:
            raise InvalidParameter("prompts", "must be token ids: this model was given without a tokenizer")
        return self._codec

    @property
    def eos(self) -> tuple[int, ...]:
        """The ids that end an answer."""
        return tuple(eos_ids(self.target))

    def facts(self) -> dict[str, Any]:
        """What runs, for a report: the model, its numbers, where, on which kernels, and who drafts."""
        names = ("architecture", "parameters", "bytes", "dtype", "device", "kernels")
        found = {name: getattr(self.report, name) for name in names} | {"draft": self.drafter_name}
        if self.draft_report is not None:
            found |= {f"draft_{name}": getattr(self.draft_report, name) for name in names if name != "device"}
        return found | {"gamma": self.options.gamma}

    # -- what it does

    def ids(self, text: Text, answers: Sequence[str] = ()) -> list[int]:
        """The token ids of a text, or of its turn behind these answers: through the model's chat template where it has
        one and the text is no raw one."""
        most = self.max_len
        conversation = text.conversation(answers)
        chats = bool(getattr(self.target.tokenizer, "chat_template", None))
        if text.messages is not None or (chats and not text.raw):
            return self.codec.encode_chat(conversation, most=most)
        return self.codec.encode("\n\n".join(str(message["content"]) for message in conversation), most=most)

    def listen(self, rounds: Callable[[list[Round]], object]) -> ExitStack:
        """Have this called with the records of every round; close what comes back to end it."""
        return self.engine.listen(rounds)

    def cold(self) -> None:
        """As if just opened: no prompt is warm, and nothing is learnt about drafting."""
        self.engine.cold()

    def close(self) -> None:
        """Let go of the models. Nothing else may be asked of it then."""
        device = self.device
        vars(self).pop("engine", None)
        vars(self).pop("target", None)
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()

    def __enter__(self) -> System:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
