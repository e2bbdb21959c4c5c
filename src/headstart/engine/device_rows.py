"""What captured rounds know of their sequences: a table on the device, a line for each row of the slab.

Knows: where each row's text ends, its seed, its rule and its settings, and how to bring all that level with the host.
Does not know: what a round does with it.

A captured program serves a fixed number of rows (a bucket). Rows past the running sequences are idle: they compute
along, their writes land past their own live keys, and their lengths stand still.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor

from ..maths import noise
from ..maths.asks import PENALTIES, PROCESSING, RULES, TENSORS_ONLY, Asks, Served
from ..maths.limits import NO_TOP_K
from ..maths.warp import History, Warp, temperature_of
from ..types import SamplingParams, Verdict
from .sequence import Sequence

__all__ = ["PROGRAMS", "DeviceRows", "Kind", "kind_of", "served"]

# Which program the rows need. *greedy*: every row is greedy and nothing is done to its logits. *rejected*: every row is
# rejection sampled, by the token or the block rule, with temperature, top-p and min-p. *coupled*: every row is sampled
# by the coupled rule, or has no draft. *full*: everything there is, in any mixture.
Kind = Literal["greedy", "rejected", "coupled", "full"]

_NEVER = 1 << 40  # a draft limit that no draft reaches


#: what each program serves, the cheapest first; masks are on the logits before any of them sees them
_REST = PROCESSING | {"top_k", "logprobs"}
_MASKS = frozenset({"structured"})
_DRAWN, _REJECTING = frozenset({"temperature", "top_p", "min_p"}), frozenset({"token", "block"})
PROGRAMS: dict[Kind, Served] = {
    "greedy": Served("greedy program", _MASKS, _REST | _DRAWN | _REJECTING | TENSORS_ONLY),
    "coupled": Served("coupled program", _DRAWN | _MASKS, _REST | _REJECTING | TENSORS_ONLY),
    "rejected": Served("rejected program", _DRAWN | _REJECTING | _MASKS, _REST | TENSORS_ONLY),
    "full": Served("full program", _REST | _DRAWN | _REJECTING | _MASKS, TENSORS_ONLY),
}


def served(sequences: Seq[Sequence]) -> bool:
    """Is there a program for these rows at all? What even the full one declines is played step by step."""
    return PROGRAMS["full"].takes(s.asks for s in sequences)


def kind_of(sequences: Seq[Sequence], *, drafted: bool) -> Kind:
    """The cheapest program that serves all these rows."""
    kinds = {_kind(s, drafted) for s in sequences}
    return kinds.pop() if len(kinds) == 1 else "full"


def _kind(sequence: Sequence, drafted: bool) -> Kind:
    params = sequence.params
    return _kind_for(params.greedy, drafted and _rejects(params), sequence.asks)


@lru_cache(4096)  # every row is asked several times a round, and few are different
def _kind_for(greedy: bool, rejected: bool, asks: Asks) -> Kind:
    """A row whose token is drawn by noise alone, because nothing was drafted, has no use for its rule."""
    kind: Kind = "greedy" if greedy else "rejected" if rejected else "coupled"
    return kind if PROGRAMS[kind].takes([asks if rejected else asks - RULES]) else "full"


def _rejects(p: SamplingParams) -> bool:
    return not p.greedy and p.speculate and p.rule != "coupled"


class DeviceRows:
    """The table. Captured programs read and write its tensors in place, so they are made once and never replaced."""

    def __init__(self, rows: int, *, width: int, vocab_size: int, device: torch.device) -> None:
        """``width``: V of the target's logits; ``vocab_size``: ids that may be drawn."""
        self.device, self.vocab_size = device, vocab_size

        def whole(*shape: int) -> Tensor:
            return torch.zeros(*shape, dtype=torch.int64, device=device)

        self.last = whole(rows, 2)  # the last two committed tokens
        self._columns = whole(5, rows)
        # Live keys in the target's row (committed tokens less one), where the last two tokens go in the draft's row,
        # and tokens of the answer so far: all three grow together. Then 1 for running rows, 0 for idle ones.
        self.lengths, self.draft_lengths, self.outputs, self.advance, self.seeds = self._columns.unbind(0)
        self.places = self._columns[:3]
        self.limits = whole(rows)  # how many drafted tokens the row takes
        self.codes = whole(2, rows)  # is the row rejection sampled; by the block rule
        self.greedy = torch.zeros(rows, dtype=torch.bool, device=device)
        self.top_k = whole(rows) + NO_TOP_K
        self.least = whole(rows)  # min_tokens
        # temperature, top_p, min_p, repetition, frequency, presence
        self.real = torch.tensor([1.0, 1.0, 0.0, 1.0, 0.0, 0.0], device=device).repeat(rows, 1).T.contiguous()
        self.bias = torch.zeros(rows, width, device=device)
        self.endings = torch.zeros(rows, width, dtype=torch.bool, device=device)  # ids that min_tokens holds back
        # The tokens that penalties count, kept up to date by the rounds themselves.
        self.prompt = torch.zeros(rows, width, dtype=torch.bool, device=device)
        self.counts = torch.zeros(rows, width, device=device)
        self._settings: tuple[object, ...] = ()
        self._limits: tuple[int, ...] = ()
        # What the device holds: (sequence, committed tokens) of the running rows, the lengths of the idle ones. Not
        # their ids: one may come again with another text.
        self._level: tuple[tuple[tuple[Sequence, int], ...], tuple[tuple[int, int], ...]] | None = None
        self._warps: dict[tuple[int, Kind, bool], Warp] = {}
        self._odd: set[int] = set()  # rows whose wide settings were ever sent
        self._ids = torch.arange(width, device=device)

    # -- what a program reads

    def warp(self, rows: int, kind: Kind, *, draft: bool) -> Warp:
        """The settings of the first rows, read from the table whenever it is used. A draft ignores min_tokens.

        Kept, because it is made on the host, which a captured program must not wait for.
        """
        key = (rows, kind, draft)
        if key not in self._warps:
            self._warps[key] = self._warp(rows, kind, draft=draft)
        return self._warps[key]

    def _warp(self, rows: int, kind: Kind, *, draft: bool) -> Warp:
        example = [SamplingParams(temperature=0.0 if kind == "greedy" else 1.0)] * rows
        plain = Warp.of(example, vocab_size=self.vocab_size, eos=None, device=self.device)
        if kind == "greedy":
            return plain
        asks, real = PROGRAMS[kind].serves, self.real[:, :rows]
        sampled = replace(plain, asks=asks, cold=True, temperature=real[0], top_p=real[1], min_p=real[2])
        if kind != "full":
            return sampled
        ids = self._ids.expand(rows, -1)
        return replace(
            sampled,
            greedy=self.greedy[:rows],
            any_greedy=True,
            top_k=self.top_k[:rows],
            most_k=self.vocab_size,
            bias=(ids, self.bias[:rows]),
            early_eos=None if draft else (self.least[:rows], ids, self.endings[:rows]),
            repetition=real[3],
            frequency=real[4],
            presence=real[5],
        )

    # -- bringing it level

    def advanced(self, sequences: Seq[Sequence], verdicts: Seq[Verdict | None]) -> None:
        """A round is over, and the device has taken its tokens in by itself; the host is about to."""
        if self._level is not None:
            grown = zip(sequences, verdicts, strict=True)
            running = tuple((s, len(s.tokens) + (len(v.path) + 1 if v is not None else 0)) for s, v in grown)
            self._level = running, self._level[1]

    def forget(self) -> None:
        self._level, self._settings, self._limits = None, (), ()

    def settle(self, sequences: Seq[Sequence], idle: Seq[tuple[int, int]], limits: Seq[int] | None = None) -> None:
        """Send what differs.

        idle: (target's keys, draft's keys) of the idle rows. limits: how much draft each
        row takes in this round; None: all that is drafted, where the request allows it."""
        fresh = False
        if kind_of(sequences, drafted=True) != "greedy":  # the greedy program reads none
            settings = tuple((s.params, s.held_back) for s in sequences)
            fresh = settings != self._settings
            if fresh:
                self._send_settings(sequences)
                self._settings = settings
        wanted = tuple(limits) if limits is not None else tuple(_NEVER if s.params.speculate else 0 for s in sequences)
        if wanted != self._limits:
            self.limits[: len(wanted)] = torch.tensor(wanted, dtype=torch.int64).to(self.device, non_blocking=True)
            self._limits = wanted
        level = tuple((s, len(s.tokens)) for s in sequences), tuple(idle)
        if not fresh and level == self._level:
            return
        lines = [
            [*s.tokens[-2:], len(s.tokens) - 1, len(s.tokens) - 2, s.output_length, 1, seed]
            for s, seed in zip(sequences, noise.seeds([s.seed for s in sequences], "cpu").tolist(), strict=True)
        ]
        lines += [[0, 0, target, draft, 0, 0, 0] for target, draft in idle]
        table = torch.tensor(lines, dtype=torch.int64).T.contiguous().to(self.device, non_blocking=True)
        rows = len(lines)
        self.last[:rows] = table[:2].T
        self._columns[:, :rows] = table[2:]
        self._send_history(sequences)
        self._level = level

    def _send_settings(self, sequences: Seq[Sequence]) -> None:
        params, rows = [s.params for s in sequences], len(sequences)
        real = [
            list(map(temperature_of, params)),
            [p.top_p for p in params],
            [p.min_p for p in params],
            [p.repetition_penalty for p in params],
            [p.frequency_penalty for p in params],
            [p.presence_penalty for p in params],
        ]
        rejects = [_rejects(p) for p in params]
        whole = [
            [p.top_k or NO_TOP_K for p in params],
            [p.min_tokens for p in params],
            [int(r) for r in rejects],
            [int(r and p.rule == "block") for r, p in zip(rejects, params, strict=True)],
            [int(p.greedy) for p in params],
        ]
        self.real[:, :rows] = torch.tensor(real).to(self.device)
        table = torch.tensor(whole, dtype=torch.int64).to(self.device)
        self.top_k[:rows], self.least[:rows] = table[0], table[1]
        self.codes[:, :rows], self.greedy[:rows] = table[2:4], table[4].bool()
        for row, s in enumerate(sequences):
            if s.params.logit_bias or s.params.min_tokens or row in self._odd:
                self._send_wide(row, s)

    def _send_wide(self, row: int, s: Sequence) -> None:
        """The bias and the held-back ids of one row, which are as wide as the vocabulary."""
        pairs = {i: v for i, v in (s.params.logit_bias or {}).items() if i < self.vocab_size}
        self.bias[row] = 0
        self.endings[row] = False
        if pairs:
            self.bias[row, torch.tensor(list(pairs), device=self.device)] = torch.tensor(
                list(pairs.values()), device=self.device
            )
        ends = [i for i in s.held_back if i < self.vocab_size]
        if s.params.min_tokens and ends:
            self.endings[row, torch.tensor(ends, device=self.device)] = True
        self._odd.add(row)

    def _send_history(self, sequences: Seq[Sequence]) -> None:
        for row, s in enumerate(sequences):
            if not s.asks & PENALTIES:
                continue
            cut = s.prompt_length
            found = History.of([s.tokens[:cut]], [s.tokens[cut:]], self.counts.shape[1], self.device)
            self.prompt[row], self.counts[row] = found.prompt[0], found.counts[0]
