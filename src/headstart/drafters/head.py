"""A small head on the target's own hidden states as the guesser.

Knows: how to bring the head's keys level with the committed text, and how to draft a chain or a tree with it.
Does not know: the network's arithmetic (``machine.head``), how it was trained, or what the target thinks of a guess.

The target's runner keeps the features of every token beside its keys (``watch``), so they are there for every
committed token but the last. A round costs the head one pass over the newly committed tokens, with true features, and a
step on its own output for each further token. Slots made of its own guesses are never kept: when the tokens are
committed, the true features take their place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ..errors import ModelRefused
from ..machine.cpu.build import why_not as no_kernels
from ..machine.cpu.head import MOST_ROWS, HeadKernel, why_not
from ..machine.cpu.open import fall_back
from ..machine.head import HeadNet, load_head
from ..machine.kvcache import Slab
from ..maths.limits import MIN_CHANCE
from ..types import DraftView, Proposal
from .base import DraftContext, Drafter, HeadView, LeastChances, TargetView
from .draft_sampler import DraftSampler
from .head_chains import kernel_chains

__all__ = ["HeadDrafter"]

CATCH_UP = 16  # a row that is further behind than this is brought level on its own
CHUNK = 1024  # slots of a long prompt that are read at once
DEPTH = 8  # levels of a tree

Chances = Callable[[], tuple[float, float]]
Asked = dict[str, tuple[DraftView, int]]  # sequence id -> the sequence and its budget


class HeadDrafter(Drafter):
    """Drafts chains, or trees of the likeliest tokens, with a head trained for this target."""

    name = "head"
    sound_q = True

    def __init__(
        self,
        net: HeadNet,
        target: TargetView,
        *,
        vocab_size: int,
        min_chance_to_extend: float | None = None,
        min_chances: Chances | None = None,
        branch: int = 1,
    ) -> None:
        """``min_chance_to_extend``: stop drafting when the probability of reaching the next token, by the head's own
        probabilities, falls below this; 0: never, None: what suits the device. ``min_chances`` is asked for it once a
        draft, and for the chance below which nothing is drafted behind a token (summed over the rows).
        ``branch``: above 1 drafts trees, with this many of the likeliest tokens behind a node; the budget then counts
        nodes."""
        _check_shapes(net, target, vocab_size)
        self.net = net.to(target.device).eval().requires_grad_(False)
        self.target = target
        self.vocab_size = vocab_size
        # To ask how likely a token is means to wait for the device, which is free on a CPU only.
        self.min_chance_to_extend = (
            min_chance_to_extend if min_chance_to_extend is not None else MIN_CHANCE * (target.device.type == "cpu")
        )
        self._min_chances = min_chances if target.device.type == "cpu" else None
        self.ends_itself = self._min_chances is not None and branch == 1  # a tree has as many nodes as it may
        self.branch = branch
        slab = target.slab
        self.slab = Slab(slab.rows, slab.max_len, margin=slab.capacity - slab.max_len + DEPTH * branch)
        self._dtype = net.fuse.dtype
        self._no_features = net.fuse.new_zeros(1, net.config.features)
        self._turn = net.rotary(self.slab.capacity)  # [capacity, 1, dim / 2]
        self._count = torch.arange(self.slab.capacity, device=target.device)
        self._kernel: HeadKernel | None = None
        self._steps = 0  # of the last draft, without a kernel
        self.needs_torch = True  # until there is a kernel
        target.watch(net.config.watch)

    @classmethod
    def for_target(cls, context: DraftContext) -> HeadDrafter:
        """The head in the folder that ``context.source`` is (see ``machine.head``)."""
        assert isinstance(context.source, Path)
        min_chances = context.advice.min_chances
        drafter = cls(load_head(context.source), context.target, vocab_size=context.vocab_size, min_chances=min_chances)
        if not drafter.use_kernel():
            drafter.net.shrink()
        return drafter

    def use_kernel(self, kind: str = "int8") -> bool:
        """Draft chains on the CPU's own kernels, with rounded matrices, if there are some for this head."""
        if self.branch > 1 or self.slab.rows > MOST_ROWS or why_not(self.net) is not None:
            return False
        missing = no_kernels()
        if missing is not None:
            fall_back("the draft head runs on torch, slower", missing)
            return False
        self._kernel = HeadKernel(self.net, self.slab, self.target.embedding, threads=self.target.threads, kind=kind)
        self.needs_torch = False
        return True

    def propose(self, views: Sequence[DraftView], budgets: Sequence[int]) -> list[Proposal | None]:
        asked = {
            view.id: (view, budget)
            for view, budget in zip(views, budgets, strict=True)
            if budget > 0 and self._has_features(view)
        }
        if not asked:
            return [None] * len(views)
        with torch.inference_mode():
            for view, _ in asked.values():
                self._bring_near(view)
            found = self._trees(asked) if self.branch > 1 else self._chains(asked)
        return [found.get(view.id) or None for view in views]  # nothing was likely enough: no proposal

    @property
    def token_bytes(self) -> int:
        return self.slab.token_bytes

    def head(self) -> HeadView:
        return self

    @property
    def steps(self) -> int:
        return self._kernel.steps if self._kernel is not None else self._steps

    def release(self, sequence_id: str) -> None:
        if sequence_id in self.slab:
            self.slab.release(sequence_id)

    def reset(self) -> None:
        self.slab.reset()

    # -- level with the committed text

    def _has_features(self, view: DraftView) -> bool:
        """Not in a prompt's first round, when the target itself has not read it yet."""
        slab = self.target.slab
        return view.id in slab and slab.lengths[slab.row(view.id)] >= len(view.tokens) - 1

    def _bring_near(self, view: DraftView) -> None:
        """Give the sequence a row, and read a long prompt in, so that only a few slots are missing."""
        slab, tokens = self.slab, view.tokens
        if view.id not in slab:
            slab.acquire(view.id, tokens)
            slab.promote(view.id)
        row = slab.row(view.id)
        if slab.lengths[row] >= len(tokens):  # asked again about the same text: its last slot says what comes next
            slab.truncate(row, len(tokens) - 1)
        if len(tokens) - slab.lengths[row] <= CATCH_UP:
            return
        while (start := slab.lengths[row]) < len(tokens) - 1:
            piece = tokens[start : min(start + CHUNK, len(tokens) - 1)]
            if self._kernel is not None:
                self._kernel.remember(row, start, piece, self._features(view.id, start, len(piece)))
            else:
                x = self._true_inputs([(view.id, start, piece)])[None]
                _, k, v = self.net.queries_keys_values(x, self._turn[None, start : start + len(piece)])
                slab.begin(slice(row, row + 1), [start], len(piece))
                slab.update(k.transpose(1, 2), v.transpose(1, 2), 0)
            slab.extend(row, piece)

    def _features(self, key: str, start: int, count: int) -> Tensor | None:
        """The target's features behind ``count`` slots from ``start`` on [n, F]; nothing stands before a text's first
        token, so slot 0 has none."""
        first, last = max(start - 1, 0), start + count - 1
        return self.target.features(self.target.slab.row(key), first, last).to(self._dtype) if last > first else None

    def _true_inputs(self, parts: Sequence[tuple[str, int, Sequence[int]]]) -> Tensor:
        """x of (sequence, first slot, tokens of its slots), one part behind the other [n, width], by true features."""
        found = []
        for key, start, tokens in parts:
            if start == 0:
                found.append(self._no_features)
            features = self._features(key, start, len(tokens))
            if features is not None:
                found.append(features)
        g = self.net.fused(torch.cat(found) if len(found) > 1 else found[0])
        ids = torch.tensor([token for _, _, tokens in parts for token in tokens], device=g.device)
        return g + self._words(ids)

    def _words(self, tokens: Tensor) -> Tensor:
        """Token ids [..] -> what they add to g [.., width]."""
        return self.net.word(self.target.embed(tokens).to(self._dtype))

    def _missing(self, asked: Asked) -> tuple[list[str], list[int], list[list[int]]]:
        """The sequences in row order up to the last one asked, how many slots their rows have, and the tokens of those
        that are missing."""
        keys = self.slab.ready_keys
        keys = keys[: 1 + max(row for row, key in enumerate(keys) if key in asked)]
        starts = self.slab.lengths[: len(keys)]
        feed = [asked[key][0].tokens[start:] if key in asked else [] for key, start in zip(keys, starts, strict=True)]
        return keys, starts, feed

    def _catch_up(self, asked: Asked) -> tuple[list[str], list[int], Tensor]:
        """Write the missing slots of every asked row. Returns the sequences in row order (rows that were not asked come
        along as idle passengers), how many slots each row has now, and y [R, 1, width] of their last ones."""
        slab = self.slab
        keys, starts, feed = self._missing(asked)
        rows = len(keys)
        found = self._true_inputs([part for part in zip(keys, starts, feed, strict=True) if part[2]])
        ends = [start + max(len(line), 1) for start, line in zip(starts, feed, strict=True)]
        if rows == 1:
            x = found[None]
            q, k, v = self._write(x, starts)
            x, q = x[:, -1:], q[:, -1:]
        else:
            x = pad_sequence(list(torch.split(found, [len(line) for line in feed])), batch_first=True)
            q, k, v = self._write(x, starts)
            last = self._count[:rows], torch.tensor(ends, device=x.device) - torch.tensor(starts, device=x.device) - 1
            x, q = x[last][:, None], q[last][:, None]
        y = self._look(x, q, k, v, self._sight([end - 1 for end in ends], k.shape[2]))
        for row, line in enumerate(feed):
            slab.extend(row, line)
        return keys, ends, y

    # -- the network over the slab

    def _write(
        self, x: Tensor, starts: Sequence[int], positions: Sequence[int] | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Store keys and values of slots x [R, N, width] at starts[r] + index. Returns their queries [R, N, heads, dim]
        and all live keys and values [R, kv_heads, live, dim]. ``positions``: all slots of a row stand at this one."""
        rows, width = x.shape[:2]
        slots: Tensor | None = None
        if min(starts) < max(starts):
            slots = torch.tensor(starts, device=x.device)[:, None] + self._count[:width]
        if positions is not None:
            turn = self._turn[positions][:, None]
        elif slots is not None:
            turn = self._turn[slots]
        else:
            turn = self._turn[None, starts[0] : starts[0] + width]
        q, k, v = self.net.queries_keys_values(x, turn)
        self.slab.begin(slice(0, rows), starts, width, slots)
        keys, values = self.slab.update(k.transpose(1, 2), v.transpose(1, 2), 0)
        return q, keys, values

    def _sight(self, slots: Sequence[int], live: int) -> Tensor | None:
        """[R, 1, live] which keys one query a row may see, from its own slot back; None: the last ``window`` ones."""
        if min(slots) == max(slots) == live - 1:
            return None
        own, at = torch.tensor(slots, device=self.target.device)[:, None, None], self._count[:live]
        return (at <= own) & (at > own - self.net.config.window)

    def _look(self, x: Tensor, q: Tensor, keys: Tensor, values: Tensor, seen: Tensor | None) -> Tensor:
        """y [R, N, width] of slots x [R, N, width] with queries q [R, N, heads, dim]; ``seen`` [R, N, live]."""
        c = self.net.config
        rows, width = x.shape[:2]
        if seen is None:
            keys, values = keys[:, :, -c.window :], values[:, :, -c.window :]
        # Heads of one group read the same keys, so they and the N queries are one axis: keys are never repeated.
        q = q.transpose(1, 2).reshape(rows, c.kv_heads, -1, c.head_dim)
        scores = (q @ keys.transpose(2, 3)) * c.head_dim**-0.5
        if seen is not None:
            scores = scores.unflatten(2, (-1, width)).masked_fill_(~seen[:, None, None], float("-inf")).flatten(2, 3)
        mixed = (scores.softmax(-1) @ values).view(rows, c.heads, width, c.head_dim)
        return self.net.finish(x, mixed.transpose(1, 2).flatten(2))

    # -- drafting

    def _chains(self, asked: Asked) -> dict[str, Proposal]:
        if self._kernel is not None:
            return self._kernel_chains(asked, self._kernel)
        keys, ends, y = self._catch_up(asked)
        logits = self.net.logits(y)[:, 0]
        some = next(view for view, _ in asked.values())  # idle rows draw as any other; it is thrown away
        views = [asked[key][0] if key in asked else some for key in keys]
        wide, ops, live = self.target.vocab_size, self.target.vocab_ops, [key in asked for key in keys]
        sampler = DraftSampler(views, self.vocab_size, wide, logits.device, self.net.ids, ops, live)
        budgets = [asked[key][1] if key in asked else 0 for key in keys]
        least = self.least_chances(len(asked))
        reached: Tensor | float = 1.0
        drawn: list[Tensor] = []
        for offset in range(max(budgets)):
            if offset:
                # A row whose numbers break down draws -1; it is fed as any token and cut out below.
                logits, y = self._next(ends, drawn[-1].clamp_min(0), y)
                ends = [end + 1 for end in ends]
            drawn.append(sampler.draw(logits, offset))
            if any(least):
                # What ends a chain is the distribution a token is drawn from, never the token.
                reached = reached * sampler.agreement()
                chances = reached.tolist()
                most = max(chance for chance, budget in zip(chances, budgets, strict=True) if budget > offset)
                kept = least.kept if offset else min(least.first, most)
                for row, chance in enumerate(chances):
                    if chance < max(kept, least.followed):
                        budgets[row] = min(budgets[row], offset + (chance >= kept))
                if max(budgets) <= offset + 1:
                    break
        self._steps = len(drawn)
        drafted = zip(keys, sampler.proposals(drawn, budgets), strict=True)
        return {key: proposal for key, proposal in drafted if key in asked}

    def least_chances(self, rows: int) -> LeastChances:
        """See ``HeadView``."""
        if self._min_chances is None:
            return LeastChances(self.min_chance_to_extend, 0.0)
        kept, followed = (each / rows for each in self._min_chances())
        first = kept if self.target.ragged else 0.0
        return LeastChances(kept or self.min_chance_to_extend / rows, followed, first)

    def _next(self, ends: Sequence[int], tokens: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """The logits [R, W] behind one drafted token more a row, and the y they come from."""
        x = y + self._words(tokens)[:, None]
        q, k, v = self._write(x, ends)
        y = self._look(x, q, k, v, self._sight(ends, k.shape[2]))
        return self.net.logits(y)[:, 0], y

    def _kernel_chains(self, asked: Asked, kernel: HeadKernel) -> dict[str, Proposal]:
        """The whole draft in one call."""
        keys, starts, feed = self._missing(asked)
        some = next(iter(asked.values()))  # idle rows draw as any other; it is thrown away
        views = [asked.get(key, some)[0] for key in keys]
        budgets = [asked[key][1] if key in asked else 0 for key in keys]
        parts = zip(keys, starts, feed, strict=True)
        features = [self._features(key, start, len(line)) if line else None for key, start, line in parts]
        drafted = kernel_chains(kernel, views, starts, feed, features, budgets, self.least_chances(len(asked)))
        for row, line in enumerate(feed):
            self.slab.extend(row, line)
        return {key: proposal for key, proposal in zip(keys, drafted, strict=True) if key in asked}

    def _trees(self, asked: Asked) -> dict[str, Proposal]:
        """Level by level: of all children of a level's nodes, the ``branch`` that are likeliest to be reached go on.
        In the end each row keeps as many nodes as its budget has, again the likeliest. Deterministic, so points."""
        keys, ends, y = self._catch_up(asked)
        rows, b, device = len(keys), self.branch, y.device
        chance, words = self.net.logits(y).float().log_softmax(-1).topk(b)  # [R, 1, b]
        # All nodes so far, level by level, [R, n] each: token, parent's number, log of the chance to be reached
        tokens, parents, chances = (
            [self.net.ids[words[:, 0]]],
            [torch.full((rows, b), -1, device=device)],
            [chance[:, 0]],
        )
        front = self._count[:b].expand(rows, b)  # the numbers of the nodes that go on
        y = y.expand(rows, b, -1)  # of their parents
        root = torch.tensor(ends, device=device)[:, None]
        path = root[..., None].expand(rows, b, 0)  # slots of their ancestors
        for level in range(1, min(DEPTH, max(budget for _, budget in asked.values()))):
            now = torch.cat(tokens, 1).gather(1, front)
            x = y + self._words(now)
            starts = [end + (level - 1) * b for end in ends]
            q, k, v = self._write(x, starts, [end + level - 1 for end in ends])
            own = root + (level - 1) * b + self._count[:b]
            path = torch.cat([path, own[..., None]], 2)
            prefix = self._count[: k.shape[2]]
            prefix = (prefix < root) & (prefix >= root + level - self.net.config.window)  # [R, live]
            seen = prefix[:, None].expand(rows, b, -1).clone().scatter_(2, path, True)
            y = self._look(x, q, k, v, seen)
            chance, words = self.net.logits(y).float().log_softmax(-1).topk(b)  # [R, b, b]
            chance = (chance + torch.cat(chances, 1).gather(1, front)[..., None]).flatten(1)
            first = sum(level_tokens.shape[1] for level_tokens in tokens)
            tokens.append(self.net.ids[words].flatten(1))
            parents.append(front.repeat_interleave(b, 1))
            chances.append(chance)
            best = chance.topk(b).indices  # [R, b]
            front, kin = best + first, best // b
            y = y.gather(1, kin[..., None].expand(-1, -1, y.shape[2]))
            path = path.gather(1, kin[..., None].expand(-1, -1, path.shape[2]))
        # A child is never likelier than its parent, and among equals the parent stands first: no node loses its parent.
        order = torch.cat(chances, 1).sort(dim=1, descending=True, stable=True).indices.tolist()
        lines = zip(keys, order, torch.cat(tokens, 1).tolist(), torch.cat(parents, 1).tolist(), strict=True)
        return {key: _kept(best, ids, up, asked[key][1]) for key, best, ids, up in lines if key in asked}


def _kept(order: list[int], tokens: list[int], parents: list[int], budget: int) -> Proposal:
    """The tree of the first ``budget`` nodes in ``order``."""
    chosen = sorted(order[:budget])
    number = {-1: -1} | {node: i for i, node in enumerate(chosen)}
    return Proposal(tuple(tokens[node] for node in chosen), tuple(number[parents[node]] for node in chosen))


def _check_shapes(net: HeadNet, target: TargetView, vocab_size: int) -> None:
    """Refuse a head that was made for another target."""
    c = net.config
    mine = (c.target_hidden, c.target_layers, c.target_vocab)
    theirs = (target.hidden_size, target.depth, target.vocab_size)
    if mine != theirs:
        raise ModelRefused(
            "this draft head was trained for another target: one with hidden size {}, {} layers and {} tokens; this "
            "one has {}, {} and {}; train one with `headstart distill`, or use draft='lookup'".format(*mine, *theirs)
        )
    if int(net.ids.max()) >= vocab_size:
        raise ModelRefused(f"this draft head says token {int(net.ids.max())}, but the tokenizer has only {vocab_size}")
