"""A small language model as the guesser, with a slab of its own.

Knows: how to bring the draft's cache level with the committed text, and how to draw gamma tokens a row.
Does not know: what the target thinks of them.

The draft's cache needs no instructions from the engine. Each round starts by comparing the tokens it holds
with the tokens that were committed, rolls back to where they part, and feeds what is missing. That covers
every case: a rejection, full acceptance (the last drafted token was never fed, and neither was the
bonus), rounds without speculation, and a new prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ..machine.model_runner import DeviceRunner, ModelRunner
from ..machine.reading import shares, waits_for
from ..types import DraftView, Proposal
from .base import DeviceDrafter, DraftContext, Drafter
from .draft_sampler import DraftSampler, fit

__all__ = ["ModelDrafter"]

# A row that is further behind than this is read in before, so that the others are not padded to it.
CATCH_UP = 8
STAND_IN = 0  # what a token is read as that the draft does not know


class ModelDrafter(Drafter):
    """Drafts chains with a causal language model that shares the target's tokenizer."""

    name = "model"
    sound_q = True

    def __init__(
        self,
        runner: ModelRunner,
        *,
        vocab_size: int,
        width: int,
        prefill_chunk: int = 512,
        min_chance_to_extend: Callable[[], float] | None = None,
    ) -> None:
        """``vocab_size``: ids that may be drawn; ``width``: V of the target's logits, the width q must have.

        ``min_chance_to_extend``: stop drafting when the probability of reaching the next token, by the draft's own
        probabilities and summed over the rows, falls below this. To ask means to wait for the
        device, which is free on a CPU only.
        """
        self.runner = runner
        self.vocab_size = vocab_size
        self.width = width
        self.prefill_chunk = prefill_chunk
        self._min_chance_to_extend = min_chance_to_extend if runner.device.type == "cpu" else None
        self.ends_itself = self._min_chance_to_extend is not None
        self.needs_torch = not runner.own_threads
        # A target may write ids that the draft has no embedding for; they are read as another token then.
        self._knows = runner.vocab_size if runner.vocab_size < vocab_size else None
        self._level: dict[str, int] = {}  # sequence id -> leading tokens known to be right in its row

    @classmethod
    def for_target(cls, context: DraftContext) -> ModelDrafter:
        """The model that ``context.source`` names, or is."""
        return cls(
            context.open_model(context.source),
            vocab_size=context.vocab_size,
            width=context.target.vocab_size,
            prefill_chunk=context.prefill_chunk,
            min_chance_to_extend=context.advice.min_chance_to_extend,
        )

    def propose(self, views: Sequence[DraftView], budgets: Sequence[int]) -> list[Proposal | None]:
        asked = [(view, budget) for view, budget in zip(views, budgets, strict=True) if budget > 0]
        if not asked:
            return [None] * len(views)
        self.catch_up([view for view, _ in asked])
        for view, _ in asked:
            self._find_level(view)
        by_id = self._draft({view.id: (view, budget) for view, budget in asked})
        return [by_id.get(view.id) for view in views]

    def text_model(self) -> ModelRunner:
        return self.runner

    def catch_up(self, views: Sequence[DraftView]) -> None:
        """Rows that lack more than a few tokens (a prompt, say) are read together, in as few forwards as may be."""
        self._read_missing(views, CATCH_UP)

    @property
    def token_bytes(self) -> int:
        return self.runner.slab.token_bytes

    def release(self, sequence_id: str) -> None:
        if self._level.pop(sequence_id, None) is not None:
            self.runner.slab.release(sequence_id)

    def reset(self) -> None:
        self._level.clear()
        self.runner.slab.reset()

    # -- for captured rounds, see ``DeviceDrafter``

    def on_device(self) -> DeviceDrafter | None:
        return self if self.runner.on_device() is not None else None

    @property
    def device_runner(self) -> DeviceRunner:
        runner = self.runner.on_device()
        assert runner is not None, "whoever drafts on the device asks on_device first"
        return runner

    def align(self, views: Sequence[DraftView]) -> bool:
        slab = self.runner.slab
        read = self._read_missing(views, 2)
        for row, view in enumerate(views):
            slab.swap(slab.row(view.id), row)
        return read

    def adopt(self, view: DraftView, accepted: Sequence[int]) -> None:
        slab, row = self.runner.slab, self.runner.slab.row(view.id)
        known = min(len(view.tokens), slab.lengths[row], self._level[view.id])
        slab.truncate(row, known)
        slab.extend(row, self._readable([*view.tokens[known:], *accepted]))
        self._level[view.id] = slab.lengths[row]

    def fit(self, logits: torch.Tensor) -> torch.Tensor:
        return fit(logits, self.width)

    def readable(self, tokens: torch.Tensor) -> torch.Tensor:
        return tokens if self._knows is None else tokens.where(tokens < self._knows, STAND_IN)

    def _readable(self, tokens: list[int]) -> list[int]:
        if self._knows is None:
            return tokens
        return [token if token < self._knows else STAND_IN for token in tokens]

    def _read_missing(self, views: Sequence[DraftView], most: int) -> bool:
        """Make every row hold a prefix of its committed tokens lacking at most ``most``; true if it read anything."""
        slab, read = self.runner.slab, False
        missing = [view for view in views if self._lacks(view, most)]
        while missing:
            reading: list[tuple[DraftView, list[int]]] = []
            for view in missing:
                tokens = self._readable(view.tokens)
                if view.id not in self._level:
                    others = [other for _, other in reading]
                    if others and waits_for(tokens, others, slab.warm(tokens)):
                        continue  # until that one is read: then it copies what they share
                    self._level[view.id] = slab.acquire(view.id, tokens)
                    slab.promote(view.id)
                if len(tokens) - self._find_level(view) > most:
                    reading.append((view, tokens))
            levels = [self._level[view.id] for view, _ in reading]
            behind = [len(tokens) - 1 - level for (_, tokens), level in zip(reading, levels, strict=True)]
            pieces, reached = [], {}
            for (view, tokens), level, count in zip(reading, levels, shares(behind, self.prefill_chunk), strict=True):
                if count:
                    pieces.append((slab.row(view.id), tokens[level : level + count]))
                    reached[view.id] = level + count
            if pieces:
                self.runner.read(pieces, logits=False)
                self._level |= reached  # not before: a read that fails has brought nobody further
                read = True
            missing = [view for view in missing if self._lacks(view, most)]
        return read

    def _lacks(self, view: DraftView, most: int) -> bool:
        """Has it no row, or one that may lack more than ``most`` tokens?"""
        return view.id not in self._level or len(view.tokens) - self._level[view.id] > most

    def _find_level(self, view: DraftView) -> int:
        """How many leading tokens of the row are the sequence's; the rest is dropped."""
        slab, tokens = self.runner.slab, self._readable(view.tokens)
        row, level = slab.row(view.id), self._level[view.id]
        held = slab.tokens[row]
        most = min(len(held), len(tokens) - 1)
        while level < most and held[level] == tokens[level]:
            level += 1
        slab.truncate(row, level)
        self._level[view.id] = level
        return level

    def _draft(self, asked: dict[str, tuple[DraftView, int]]) -> dict[str, Proposal]:
        """Draw up to each row's budget. Rows of the slab that were not asked take part as idle passengers."""
        slab, device = self.runner.slab, self.runner.device
        keys = slab.ready_keys
        keys = keys[: 1 + max(row for row, key in enumerate(keys) if key in asked)]
        rows = len(keys)
        levels = slab.lengths[:rows]
        feed = [
            self._readable(asked[key][0].tokens[levels[row] :]) if key in asked else [0] for row, key in enumerate(keys)
        ]
        some = next(view for view, _ in asked.values())  # idle rows draw as any other; it is thrown away
        views = [asked[key][0] if key in asked else some for key in keys]
        live = [key in asked for key in keys]
        sampler = DraftSampler(views, self.vocab_size, self.width, device, vocab_ops=self.runner.vocab_ops, live=live)

        widest = max(map(len, feed))
        padded = [line + [0] * (widest - len(line)) for line in feed]
        step = torch.tensor(padded, device=device)
        if min(map(len, feed)) == widest:
            logits = self.runner.forward(slice(0, rows), step, levels, keep=1)[:, 0]
        else:
            last = torch.tensor([len(line) - 1 for line in feed], device=device)
            logits = self.runner.forward(slice(0, rows), step, levels)  # [rows, widest, V]
            logits = logits[torch.arange(rows, device=device), last]
        fed = [level + len(line) for level, line in zip(levels, feed, strict=True)]

        budgets = [asked[key][1] if key in asked else 0 for key in keys]
        least = self._min_chance_to_extend() if self._min_chance_to_extend is not None else 0.0
        reached = torch.ones(rows, device=device)
        drawn = [sampler.draw(logits, 0)]
        for offset in range(1, max(budgets)):
            if least:  # what ends a draft is the distribution its last token was drawn from, never the token
                reached = reached * sampler.agreement()
                if sum(r for r, b in zip(reached.tolist(), budgets, strict=True) if b > offset) < least:
                    break
            # A draft whose numbers break down draws -1; it is fed as any token and cut out below.
            logits = self.runner.forward(slice(0, rows), drawn[-1][:, None].clamp_min(0), fed)[:, 0]
            fed = [length + 1 for length in fed]
            drawn.append(sampler.draw(logits, offset))

        proposals = {}
        for row, (key, proposal) in enumerate(zip(keys, sampler.proposals(drawn, budgets), strict=True)):
            if key in asked:
                # Only its own draft, though the batch's longest was fed to every row: the rest may lie past its end.
                slab.extend(row, [*feed[row], *proposal.tokens[: len(drawn) - 1]])
                proposals[key] = proposal
        return proposals
