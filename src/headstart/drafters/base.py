"""What a drafter is, what it is given, and how one is found by name.

Knows: the contract between the engine and whoever guesses. Does not know: any particular guesser.

A drafter is asked once a round for guesses and may keep whatever state it likes about each sequence,
found again by ``view.id``. It cannot change what is generated, only how fast: the verification rule
needs nothing but the ``Proposal``. Packages add drafters through the entry-point group
``headstart.drafters``; CONTRIBUTING.md builds two step by step.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

from ..errors import InvalidParameter
from ..types import Advice, DraftView, Proposal, Verdict

if TYPE_CHECKING:  # torch takes seconds to import, and a drafter may do without it
    import torch
    from torch import Tensor
    from transformers import PreTrainedModel

    from ..machine.cpu.library import MatrixRecord
    from ..machine.head import HeadNet
    from ..machine.kvcache import Slab
    from ..machine.model_runner import DeviceRunner, ModelRunner
    from ..maths.vocab_ops import VocabOps

__all__ = [
    "ENTRY_POINT_GROUP",
    "DeviceDrafter",
    "DraftContext",
    "Drafter",
    "HeadView",
    "LeastChances",
    "TargetView",
    "drafter_named",
    "registered_drafters",
]

ENTRY_POINT_GROUP = "headstart.drafters"


class TargetView(Protocol):
    """What a drafter may use of the target. Its rows are for reading only: they belong to the engine."""

    vocab_size: int  # V of its logits, the width that q must have
    depth: int  # decoder layers
    device: torch.device  # where token ids go in and hidden states come out
    slab: Slab  # ``lengths[row(view.id)]``: tokens of a sequence it has read, all but the newest once the prompt is in
    ragged: bool  # verifies each row's own guesses: one fewer of any row saves time

    @property
    def hidden_size(self) -> int: ...

    def watch(self, layers: Sequence[int]) -> None:
        """From now on keep the hidden states behind these decoder layers (0 is the first). To be called when the
        drafter is built; a target can be watched in one way only."""

    def features(self, row: int, start: int, stop: int) -> Tensor:
        """What ``watch`` kept of a row's tokens start .. stop - 1: [n, len(layers) * hidden_size], a view."""

    def embed(self, tokens: Tensor) -> Tensor:
        """Token ids [..] -> the target's embeddings [.., hidden_size]."""

    @property
    def embedding(self) -> Tensor | MatrixRecord:
        """The whole table, as the CPU's kernels read it."""

    @property
    def threads(self) -> int:
        """How many threads kernels of the drafter's own may use."""

    @property
    def vocab_ops(self) -> VocabOps:
        """The loops over the vocabulary that suit the target's device."""


@dataclass(frozen=True)
class DraftContext:
    """What a drafter is given when it is built (``Drafter.for_target``)."""

    target: TargetView
    vocab_size: int  # ids at and past this are not to be drafted
    advice: Advice
    #: a draft model (name, folder or loaded) beside the target, with as many rows; another tokenizer is refused
    open_model: Callable[[str | Path | PreTrainedModel], ModelRunner]
    source: str | Path | PreTrainedModel  # what ``draft=`` named
    prefill_chunk: int  # tokens of a prompt that are read at once


class DeviceDrafter(Protocol):
    """What a captured round needs of a drafter: a model that drafts on the device, row by row beside the target's."""

    @property
    def device_runner(self) -> DeviceRunner: ...

    def align(self, views: Sequence[DraftView]) -> bool:
        """Put the sequences in rows 0, 1, 2 ... in this order, each holding all committed tokens but the last two.
        Those a captured draft reads itself: so rows can leave and move without a forward of the draft model.

        True if there was anything to read.
        """

    def adopt(self, view: DraftView, accepted: Sequence[int]) -> None:
        """The device drafted on its own: the row now holds all committed tokens, and these behind them."""

    def fit(self, logits: Tensor) -> Tensor:
        """The draft's logits in the target's width."""

    def readable(self, tokens: Tensor) -> Tensor:
        """Committed tokens as the draft can read them."""


class LeastChances(NamedTuple):
    """Of a guess's chance to be reached, by the distribution that it was drawn from: what it needs."""

    kept: float  # not to be left out
    followed: float  # to have another one behind it
    first: float = 0.0  # not to be left out, for a draft's first one; the likeliest row's stays in any case


class HeadView(Protocol):
    """A head on the target's hidden states, for those who ask it about a whole text at once (``lab.agreement``)."""

    @property
    def net(self) -> HeadNet: ...
    @property
    def target(self) -> TargetView: ...
    @property
    def steps(self) -> int:
        """That the last draft took, one whose token was not kept in the end included."""

    def least_chances(self, rows: int) -> LeastChances:
        """What ends its drafts just now, for so many rows."""


class Drafter(ABC):
    """One guesser."""

    #: shown in metrics and messages
    name: str = "drafter"

    #: True when a guess costs next to nothing to make and is deterministic: the controller then looks at
    #: the guess (its ``strength``) before it decides how much of it to verify. False when every drafted
    #: token costs time: the controller decides beforehand.
    free: bool = False
    #: True when the drafter itself ends a draft that is not likely enough to hold (``Advice.min_chance_to_extend``):
    #: the budget is then only a ceiling.
    ends_itself: bool = False
    #: True when q comes straight from the sampler that drew the tokens (``draft_sampler``): its shape is still
    #: checked in every round, but no longer whether its values are a distribution.
    sound_q: bool = False
    #: True when it drafts from ``view.prediction`` itself; else that is done for it, before it is asked.
    reads_predictions: bool = False
    #: True when drafting runs a model on torch, which then keeps its threads whatever the target runs on.
    needs_torch: bool = False

    @classmethod
    def for_target(cls, context: DraftContext) -> Drafter:
        """Build the drafter that ``draft=`` names. A class that wants to know its target overrides this."""
        return cls()

    @abstractmethod
    def propose(self, views: Sequence[DraftView], budgets: Sequence[int]) -> list[Proposal | None]:
        """Guess what follows each sequence: at most ``budgets[i]`` tokens for ``views[i]``, None for no guess.

        What comes back is checked before anything runs; a drafter that proposes nonsense, or raises, is dropped.
        """

    def catch_up(self, views: Sequence[DraftView]) -> None:  # noqa: B027
        """You are about to be asked about these: read what you lack of them (a prompt, say). It is not counted as time
        that a draft took."""

    def commit(self, views: Sequence[DraftView], verdicts: Sequence[Verdict | None]) -> None:  # noqa: B027
        """Told after each round what the target said of each proposal; ``view.tokens`` is up to date by then."""

    def release(self, sequence_id: str) -> None:  # noqa: B027
        """The sequence is finished or aborted: forget it."""

    def reset(self) -> None:  # noqa: B027
        """A round was interrupted (Ctrl-C, say), perhaps in the middle of ``propose``: forget every sequence. You will
        be asked again about those that go on."""

    @property
    def token_bytes(self) -> int:
        """Memory for keys and values that it keeps for a token of text."""
        return 0

    def halves(self) -> tuple[Drafter | None, Drafter]:
        """One that copies and is asked first, if there is one, and the one whose guesses cost time."""
        return None, self

    def text_model(self) -> ModelRunner | None:
        """The model that it guesses with, if it guesses from the text alone and alike at every place of a draft."""
        return None

    def head(self) -> HeadView | None:
        """This drafter, if it is a head on the target's hidden states."""
        return None

    def on_device(self) -> DeviceDrafter | None:
        """This drafter, if captured rounds can draft with it; None: its guesses come from the host."""
        return None


# Built in, so that they are there even when the package runs from its source tree without being installed.
_BUILT_IN = (EntryPoint("lookup", "headstart.drafters.lookup:LookupDrafter", ENTRY_POINT_GROUP),)


def _points() -> dict[str, EntryPoint]:
    return {point.name: point for point in (*entry_points(group=ENTRY_POINT_GROUP), *_BUILT_IN)}


def registered_drafters() -> dict[str, str]:
    """Name -> "module:Class" of every drafter that can be asked for by name."""
    return {name: point.value for name, point in _points().items()}


def drafter_named(name: str, context: DraftContext) -> Drafter:
    """Build the drafter registered under ``name``: a class by ``for_target``, any other callable without arguments."""
    point = _points().get(name)
    if point is None:
        raise InvalidParameter("draft", f"names no drafter {name!r}; there are {', '.join(registered_drafters())}")
    found = point.load()
    known = isinstance(found, type) and issubclass(found, Drafter)
    made = found.for_target(context) if known else found()
    if not isinstance(made, Drafter):
        raise InvalidParameter("draft", f"names {name!r}, which is not a headstart.drafters.base.Drafter")
    return made
