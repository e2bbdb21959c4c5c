"""What is captured: the draft loop, and verify-and-decide. Plain functions on the tensors of ``DeviceRows``.

Knows: the order of a round's work on the device. Does not know: when it is played, or who reads what comes of it.

How a token is drawn is ``draft_sampler``'s business, how it is judged ``judge``'s; both are the eager path's own.
Nothing here reads a tensor on the host, so on a GPU a program is captured once and replayed; elsewhere it is called.
Where rows have grammars, verify-and-decide is two programs: the forward, which leaves its logits, and the decision,
which needs their masks. The host works these out in between.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from ..drafters.base import DeviceDrafter
from ..drafters.draft_sampler import draft_keys, draw_tokens
from ..machine.gpu import available, vocab_ops_of
from ..machine.model_runner import DeviceRunner
from ..maths.distribution import probabilities
from ..maths.tree import Topology
from ..maths.verify import Verdicts, coupled_rule
from ..maths.warp import History
from ..sampling import MAX_LOGPROBS
from ..types import Draw
from .device_masks import DeviceMasks
from .device_rows import DeviceRows, Kind
from .judge import VerdictInputs, decide_mixed, targets_of

__all__ = ["Logprobs", "Programs", "Shape"]


@dataclass(frozen=True)
class Shape:
    """What one captured program serves."""

    rows: int
    gamma: int
    kind: Kind
    bound: int


class Logprobs(NamedTuple):
    """The target's own log-probabilities along a round's nodes, before any processing."""

    chosen: Tensor  # [R, N+1] of the token that was emitted after the node
    best: Tensor  # [R, N+1, K] of the K most likely ones
    ids: Tensor  # [R, N+1, K]


class Programs:
    """The programs of any shape, and the buffers they share."""

    def __init__(
        self, state: DeviceRows, target: DeviceRunner, drafter: DeviceDrafter | None, most: int, *, masks: bool = True
    ) -> None:
        """``most``: the longest draft; ``masks``: rows may have grammars."""
        self.state, self.vocab_ops = state, vocab_ops_of(state.device)
        self._in_one = state.device.type == "cuda" and available() is None  # a round's end is one kernel
        self._target, self._drafter = target, drafter
        rows, device = len(state.lengths), state.device
        self.most = most
        self.drafts = torch.zeros(most, rows + rows % 2, dtype=torch.int64, device=device)  # a step's stand together
        self.q = torch.zeros(rows, most, target.vocab_size, device=device)  # what each draft was drawn from
        self.result = torch.zeros(rows, most + 3, dtype=torch.int64, device=device)  # accepted, token, ok, drafted
        top = min(MAX_LOGPROBS, state.vocab_size)
        self.logprobs = Logprobs(
            torch.zeros(rows, most + 1, device=device),
            torch.zeros(rows, most + 1, top, device=device),
            torch.zeros(rows, most + 1, top, dtype=torch.int64, device=device),
        )
        self._chains: dict[tuple[int, int], Topology] = {}  # made before anything is captured
        # [N, 1] for 1 and for 2 tokens that are fed first: how far behind them each step's token stands.
        self._steps = {
            fed: torch.tensor([[i + fed - 1 if i else 0] for i in range(most)], device=device) for fed in (1, 2)
        }
        self._scratch = torch.zeros_like(state.counts) if drafter is not None else None
        self.masks = DeviceMasks(rows, most + 1, target.vocab_size, device) if masks else None
        # The target's logits, between a forward and its decision.
        kept = torch.float64 if target.dtype == torch.float64 else torch.float32
        self._logits = torch.zeros(rows * (most + 1) * target.vocab_size * masks, dtype=kept, device=device)

    @property
    def draft_runner(self) -> DeviceRunner:
        assert self._drafter is not None
        return self._drafter.device_runner

    def changed(self, rows: int) -> list[Tensor]:
        """What a program changes of the state, for whoever must put it back."""
        s = self.state
        return [s.last[:rows], s.places[:, :rows], s.counts[:rows]]

    # -- drafting

    def draft(self, shape: Shape, first: int = 0, most: int | None = None) -> None:
        """Draw tokens ``first`` to gamma - 1 of each row into ``drafts``. ``most``: not more of them, to warm up."""
        s, rows = self.state, shape.rows
        assert self._drafter is not None
        history = None
        if shape.kind == "full":
            assert self._scratch is not None
            history = History(s.prompt[:rows], self._scratch[:rows])
            if first == 0:
                history.counts.copy_(s.counts[:rows])
        # The token before the last is fed again: after full acceptance the draft has not seen it.
        fed, at = s.last[:rows], s.draft_lengths[:rows]
        steps = range(first, shape.gamma if most is None else min(shape.gamma, first + most))
        q = self.q[:rows, : shape.gamma]
        self.chain(shape, fed, at, history, steps, base=s.lengths[:rows] + 1, drafts=self.drafts, q=q)

    def chain(
        self,
        shape: Shape,
        fed: Tensor,
        at: Tensor,
        history: History | None,
        steps: range,
        *,
        base: Tensor,
        drafts: Tensor,
        q: Tensor,
    ) -> None:
        """Draw these ``steps`` of a round into drafts [N, R], and what they were drawn from into q [R, N, V].

        fed [R, M]: the tokens before the round's first one, which go to slots at [R] and on; base [R]: committed
        tokens of that round. Earlier steps' tokens are in ``drafts``.
        """
        s, rows = self.state, shape.rows
        assert self._drafter is not None
        runner = self.draft_runner
        warp = s.warp(rows, shape.kind, draft=True)
        slots = _lines(len(steps), rows, s.device)  # [N, R]
        torch.add(at, self._steps[fed.shape[1]][steps.start : steps.stop], out=slots)
        keys = None
        if shape.kind != "greedy":
            places = torch.arange(steps.start, steps.stop, device=s.device)
            words = draft_keys(s.seeds[:rows], base, s.codes[0, :rows] == 0, places, self.vocab_ops)
            keys = tuple(_lines(len(steps), rows, s.device, word.dtype).copy_(word.T) for word in words)
        for line, i in enumerate(steps):
            before = drafts[i - 1, :rows, None] if i else self._drafter.readable(fed)
            logits = self._drafter.fit(runner.device_forward(before, slots[line], 1, shape.bound)[:, 0])
            mine = None if keys is None else (keys[0][line], keys[1][line])
            place = q[:, i]
            drawn, row_q = draw_tokens(logits, warp, mine, history=history, vocab_ops=self.vocab_ops, into=place)
            torch.clamp_min(drawn, 0, out=drafts[i, :rows])
            if row_q is not None and row_q is not place:
                place.copy_(row_q)
            if history is not None:
                history.add(drawn)

    # -- verifying

    def verify(self, shape: Shape) -> None:
        """One forward of the target over the drafts, the verdicts, and the table brought up to date."""
        tokens = self._nodes(shape)
        logits = self._read(shape, tokens)
        self._end(shape, tokens, logits, logits)

    def forward(self, shape: Shape) -> None:
        """The first half of ``verify``: the logits are kept, whatever the shape's kind."""
        self._kept(shape).copy_(self._read(shape, self._nodes(shape)))

    def decide(self, shape: Shape) -> None:
        """Its second half, with the masks that were sent meanwhile; whatever the shape's bound."""
        assert self.masks is not None
        logits = self._kept(shape)
        allowed = self.vocab_ops.masked(logits, self.masks.bits[: shape.rows, : shape.gamma + 1])
        self._end(shape, self._nodes(shape), allowed, logits)

    def _nodes(self, shape: Shape) -> Tensor:
        """[R, N+1]: the last committed token and the drafted ones."""
        return torch.cat([self.state.last[: shape.rows, 1:], self.drafts[: shape.gamma, : shape.rows].T], dim=1)

    def _read(self, shape: Shape, tokens: Tensor) -> Tensor:
        return self._target.device_forward(tokens, self.state.lengths[: shape.rows], shape.gamma + 1, shape.bound)

    def _kept(self, shape: Shape) -> Tensor:
        """[R, N+1, V], in one piece."""
        size = shape.rows, shape.gamma + 1, self._target.vocab_size
        return self._logits[: math.prod(size)].view(size)

    def _end(self, shape: Shape, tokens: Tensor, logits: Tensor, raw: Tensor) -> None:
        """The verdicts, and the table brought up to date. raw: logits without any mask."""
        if shape.kind == "greedy" or shape.kind == "coupled":
            targets = targets_of(shape.kind, logits, self._given(shape, tokens))
            accepted, token = self._close(shape, tokens, targets, None)
        else:
            accepted, token = self._close(shape, tokens, None, self._verdicts(shape, logits, tokens))
        if shape.kind == "full":
            self._books(shape, raw, tokens, accepted, token)

    def _close(
        self, shape: Shape, tokens: Tensor, targets: Tensor | None, found: tuple[Tensor, Tensor, Tensor] | None
    ) -> tuple[Tensor, Tensor]:
        """End a round: tell the result, and move the rows on. Accepted drafts [R] and the target's own token [R].

        targets [R, N+1]: tokens that the rows follow; or what a rejection rule found: accepted, token, ok.
        """
        s, rows, gamma = self.state, shape.rows, shape.gamma
        if self._in_one:
            from ..machine.gpu.kernels.commit import Table, close_round

            table = Table(s.last, s.places, self.result, s.limits, s.advance)
            return close_round(tokens, table, targets=targets, verdicts=found)
        if found is None:
            assert targets is not None
            found = _triple(coupled_rule(targets, tokens, self._topology(shape)))
        accepted, token, ok = found[0][:, None], found[1].clamp_min(0)[:, None], found[2][:, None]
        told = torch.cat([accepted, token, ok.to(torch.int64), tokens[:, 1:]], dim=1)
        self.result[:rows, : gamma + 3] = told
        s.last[:rows] = torch.cat([tokens.gather(1, accepted), token], dim=1)
        s.places[:, :rows] += (found[0] + 1) * s.advance[:rows]
        return found[0], token[:, 0]

    def _topology(self, shape: Shape) -> Topology:
        """Chains of gamma tokens, of which each row takes as many as its limit says."""
        chain = self._chain(shape)
        return replace(chain, valid=chain.depth <= self.state.limits[: shape.rows, None])

    def _chain(self, shape: Shape) -> Topology:
        key = (shape.rows, shape.gamma)
        if key not in self._chains:
            self._chains[key] = Topology.chain([shape.gamma] * shape.rows, self.state.device)
        return self._chains[key]

    def _given(self, shape: Shape, tokens: Tensor) -> VerdictInputs:
        """What every rule is told of the rows."""
        s, rows = self.state, shape.rows
        follows = shape.kind == "greedy" or shape.kind == "coupled"
        kinds: list[Draw] = [] if follows else ["iid"] * rows
        return VerdictInputs(
            s.warp(rows, shape.kind, draft=False),
            tokens,
            self._chain(shape) if follows else self._topology(shape),
            outputs=s.outputs[:rows],
            history=History(s.prompt[:rows], s.counts[:rows]) if shape.kind == "full" else None,
            seeds=s.seeds[:rows],
            base=s.lengths[:rows] if shape.kind == "greedy" else s.lengths[:rows] + 1,  # greedy: not looked at
            vocab_ops=self.vocab_ops,
            q=None if follows else self.q[:rows, : shape.gamma],
            kinds=kinds,
        )

    def _verdicts(self, shape: Shape, logits: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What the rejection rules say: accepted [R], token [R], ok [R]."""
        s, rows = self.state, shape.rows
        if shape.kind == "rejected" and self.vocab_ops.rejected is not None:
            base = s.lengths[:rows] + 1  # before p, so that nothing stands between the kernels that start early
            warp, q = s.warp(rows, shape.kind, draft=False), self.q[:rows, : shape.gamma]
            p = probabilities(logits, warp, outputs=s.outputs[:rows], vocab_ops=self.vocab_ops)
            return self.vocab_ops.rejected(p, q, tokens, s.limits[:rows], s.codes[1, :rows], s.seeds[:rows], base)
        rejects, block = (s.codes[:, :rows] > 0).unbind(0)
        given = self._given(shape, tokens)
        found = decide_mixed(logits, given, rejects=None if shape.kind == "rejected" else rejects, block=block)
        return _triple(found)

    def _books(self, shape: Shape, logits: Tensor, tokens: Tensor, accepted: Tensor, token: Tensor) -> None:
        """Count what was emitted, for penalties, and keep its log-probabilities."""
        s, rows, nodes = self.state, shape.rows, shape.gamma + 1
        node = torch.arange(nodes, device=s.device)
        after = torch.cat([tokens[:, 1:], token[:, None]], dim=1)  # [R, N+1]: the token after each node ...
        emitted = torch.where(node == accepted[:, None], token[:, None], after)  # ... that was emitted, if any was
        kept = (node <= accepted[:, None]) & (s.advance[:rows, None] > 0)
        s.counts[:rows].scatter_add_(1, emitted, kept.to(s.counts.dtype))
        chances = logits[..., : s.vocab_size].float().log_softmax(-1)
        best = chances.topk(self.logprobs.ids.shape[-1], dim=-1)
        self.logprobs.chosen[:rows, :nodes] = chances.gather(-1, emitted.clamp_max(s.vocab_size - 1)[..., None])[..., 0]
        self.logprobs.best[:rows, :nodes] = best.values
        self.logprobs.ids[:rows, :nodes] = best.indices


def _triple(found: Verdicts) -> tuple[Tensor, Tensor, Tensor]:
    """All that a chain's verdict says: its path is known from how long it is."""
    return found.accepted, found.token, found.ok


def _lines(count: int, width: int, device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    """[N, R] with every line at a multiple of 16 bytes: Triton compiles a kernel anew for each alignment it meets."""
    return torch.empty(count, -(-width // 4) * 4, device=device, dtype=dtype)[:, :width]
