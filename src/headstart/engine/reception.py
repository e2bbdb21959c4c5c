"""What comes in: is it fit to run, and what does the engine need to run it?

Knows: the limits of the model, and how a request becomes sequences. Does not know: who runs, or when.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ..errors import InvalidParameter
from ..types import Request
from .handle import Handle
from .sequence import Sequence, TextSink

__all__ = ["Reception"]


@dataclass(frozen=True)
class Reception:
    """Checks requests and makes their handles."""

    vocab_size: int
    max_len: int
    eos: tuple[int, ...]
    text: Callable[[Request], TextSink] | None  # makes the detokeniser of a request; None for ids only

    def check(self, request: Request) -> None:
        """Raise if the request can never run. Nothing is allocated."""
        if not request.prompt:
            raise InvalidParameter("prompt", "must hold at least one token")
        for name, ids in (("prompt", request.prompt), ("prediction", request.prediction)):
            if ids and not 0 <= min(ids) <= max(ids) < self.vocab_size:
                raise InvalidParameter(name, f"holds token ids outside the vocabulary of {self.vocab_size}")
        request.params.check_vocabulary(self.vocab_size)
        if request.params.stop and self.text is None:
            raise InvalidParameter(
                "stop", "needs a tokenizer, and this model was given without one: use stop_token_ids"
            )
        request.longest(self.max_len)

    def handle(self, request: Request, running: Mapping[str, Handle]) -> Handle:
        """The request's handle, with a sequence for each choice; ``running``: see ``Handle``."""
        self.check(request)
        seed = request.params.seed if request.params.seed is not None else secrets.randbits(63)
        sequences = [
            Sequence(
                request,
                index,
                seed,
                eos=self.eos,
                text=self.text(request) if self.text is not None else None,
                limit=request.longest(self.max_len),
            )
            for index in range(request.params.n)
        ]
        return Handle(request, sequences, running)
