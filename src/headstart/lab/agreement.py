"""How often a draft agrees with its target, from one pass of each over text that the target wrote.

Knows: probabilities of both models along a written text, and what each verification rule makes of them. Does not know:
what anything costs, or how a round is played (``replay``).

Why one pass is enough. The target's text is the same whoever drafts, so it can be taken as given, and the rules say how
likely a draft would have been accepted along it. With p and q of the token x that stands there, and the draft begun
some tokens before:

    greedy    accepted where the draft's likeliest token is x
    token     each with probability min(1, q/p): min(p, q) of the p that x came with
    block     at least i tokens with probability min over k <= i of the product of q/p over the first k, and 1
    coupled   each with probability 1 / sum_y max(p(y), q(y) p(x) / q(x)): x wins both races, given that it wins one

Each is exact: averaged over texts it gives the rule's own acceptance, sum_x min(p, q) for the first token, and the
lengths that enumeration of the rule gives (``tests/test_lab_agreement.py``). A draft model guesses alike at every place
of a draft; a head at place j reads its own output of place j - 1, so it takes a pass for each place.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul
from typing import Any

import torch
from torch import Tensor

from ..distill.students import Batch, HeadStudent, Reading
from ..drafters.base import HeadView
from ..engine.torch_threads import torch_threads
from ..machine.model_runner import ModelRunner
from ..maths.cost import conditional
from ..maths.limits import AGREEMENT_TEMPERATURE, DRAWN_HEAT, DRAWN_HOPE
from ..sampling import Verification

__all__ = ["Agreement", "Written", "by_place", "of_head", "of_model", "reached"]

PIECE = 64  # tokens whose logits are in memory at once


@dataclass(frozen=True)
class Written:
    """A text that the target wrote: prompt and answer, as token ids."""

    task: str
    prompt: int  # tokens of it
    ids: tuple[int, ...]
    temperature: float = 0.0

    @property
    def answer(self) -> tuple[int, ...]:
        return self.ids[self.prompt :]


@dataclass(frozen=True)
class Agreement:
    """One draft along one written text. Lists are by place in a draft, then by token of the answer: the token as it
    would be drafted there. A draft that guesses alike at every place has one list for all."""

    greedy: bool
    ratio: tuple[tuple[float, ...], ...]  # q(x) / p(x); greedy: 1 where the draft says x, else 0
    overlap: tuple[tuple[float, ...], ...]  # sum_x min(p, q): alpha; greedy: as ``ratio``
    coupled: tuple[tuple[float, ...], ...]  # chance that a coupled draft is x, too
    hope: tuple[tuple[float, ...], ...]  # how likely the draft itself takes its token to hold
    places: int = field(default=64)  # that may be asked for

    def at(self, table: tuple[tuple[float, ...], ...], start: int, place: int) -> float:
        """The entry for a draft's token ``place`` where the draft begins with the answer's token ``start``."""
        return table[min(place, len(table) - 1)][start + place]


def reached(found: Agreement, start: int, most: int, rule: Verification | None) -> list[float]:
    """Given the text: the probability that at least 1, 2, .. ``most`` tokens of a draft are accepted that begins with
    the answer's token ``start``."""
    last = min(most, len(found.ratio[0]) - start)
    if rule == "coupled":
        each = [found.at(found.coupled, start, place) for place in range(last)]
        return list(accumulate(each, mul))
    ratios = [found.at(found.ratio, start, place) for place in range(last)]
    if rule == "block":
        return list(accumulate(accumulate(ratios, mul), min, initial=1.0))[1:]
    return list(accumulate((min(1.0, ratio) for ratio in ratios), mul))


def by_place(found: Sequence[Agreement], most: int, rule: Verification | None = None) -> list[float]:
    """a_1 .. a_most over all places where a draft could have begun: how often token j holds, given that all before it
    do."""
    sums, counts = [0.0] * most, [0] * most
    for each in found:
        for start in range(len(each.ratio[0])):
            for place, chance in enumerate(reached(each, start, most, rule)):
                sums[place] += chance
                counts[place] += 1
    total = [s / n for s, n in zip(sums, counts, strict=True) if n]
    return conditional(total)


# -- one pass of each ---------------------------------------------------------------------------------------------


def of_model(
    target: ModelRunner, draft: ModelRunner, text: Written, vocab_size: int, row: str = "agreement"
) -> Agreement:
    """A draft model. The target is read only where tokens were drawn: a greedy text says all there is to say of it."""
    drawn = text.temperature > 0
    found = _Columns(drawn)
    own = _pass(draft, [min(token, draft.vocab_size - 1) for token in text.ids], text.prompt, row)
    others: Iterator[Any] = _pass(target, text.ids, text.prompt, row) if drawn else iter(lambda: None, 0)
    for (start, logits), other in zip(own, others, strict=False):
        x = torch.tensor(text.ids[start + 1 : start + 1 + len(logits)], device=logits.device)
        found.add(other[1] if other is not None else None, logits, x, text.temperature, vocab_size)
    return found.agreement()


def of_head(
    target: ModelRunner, head: HeadView, text: Written, vocab_size: int, places: int, row: str = "agreement"
) -> Agreement:
    """A head, at every place of a draft, by its network before its weights are rounded."""
    drawn, prompt = text.temperature > 0, text.prompt
    logits = [part for _, part in _pass(target, text.ids, prompt, row, keep=True)]
    net, slab = head.net, target.slab
    features = head.target.features(slab.row(row), 0, len(text.ids) - 1).to(net.fuse.dtype)[None]
    slab.release(row)
    device = features.device
    # Only what occurs is looked up: the whole table takes longer to spell out than the head takes.
    place = {token: i for i, token in enumerate(sorted(set(text.ids)))}
    student = HeadStudent(net, _Embedding(head.target.embed(torch.tensor([*place], device=device))))
    ids = torch.tensor([[place[token] for token in text.ids[:-1]]], device=device)
    columns = [_Columns(drawn) for _ in range(places)]
    x = torch.tensor(text.ids[prompt:], device=device)
    heat = DRAWN_HEAT if device.type == "cpu" else 1.0
    # Small operations one after the other: on a CPU, threads would wait for each other most of the time.
    with torch.inference_mode(), torch_threads(1 if device.type == "cpu" else None):
        p = torch.cat(logits) if drawn else None
        reading = Reading(Batch(ids, ids > -1, torch.zeros(1)), features[..., :1], features)
        for found, states in zip(columns, student.rollout(reading, places), strict=False):
            said = net.logits(states[0, prompt - 1 :]).float()
            if p is None:
                found.add_greedy(net.ids[said.argmax(-1)] == x, said)
                continue
            wide = torch.full((len(said), p.shape[-1]), -torch.inf, device=said.device)
            wide[:, net.ids] = said
            found.add(p, wide, x, text.temperature, vocab_size, heat=heat)
    return _Columns.together(columns)


class _Embedding:
    """As much of a target as a head's rollout asks for."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight

    def get_input_embeddings(self) -> _Embedding:
        return self


@torch.inference_mode()
def _pass(
    runner: ModelRunner, ids: Sequence[int], prompt: int, key: str, *, keep: bool = False
) -> Iterator[tuple[int, Tensor]]:
    """(i, logits [n, V] behind token i and the next ones), for all tokens of the answer, in pieces. Nothing else may
    run meanwhile. ``keep``: the row stays in the slab."""
    slab = runner.slab
    warm = slab.acquire(key, ids)
    slab.truncate(slab.row(key), min(warm, prompt - 1))
    slab.promote(key)
    try:
        row = slab.row(key)
        at = slab.lengths[row]
        if at < prompt - 1:
            runner.prefill(row, list(ids[at : prompt - 1]))
        for start in range(prompt - 1, len(ids) - 1, PIECE):
            piece = list(ids[start : min(start + PIECE, len(ids) - 1)])
            yield start, runner.read_all([(row, piece)])[0]
    finally:
        if not keep:
            slab.release(key)


class _Columns:
    """What is known of the tokens of an answer at one place in a draft, a piece at a time."""

    def __init__(self, drawn: bool) -> None:
        self.drawn = drawn
        self.ratio: list[float] = []
        self.overlap: list[float] = []
        self.coupled: list[float] = []
        self.hope: list[float] = []

    def add(
        self, target: Tensor | None, draft: Tensor, x: Tensor, temperature: float, vocab_size: int, heat: float = 1.0
    ) -> None:
        """Logits of both [n, V], the target's None where nothing was drawn; the tokens x [n] that follow."""
        draft = draft[:, :vocab_size].float()
        if target is None or not self.drawn:
            self.add_greedy(draft.argmax(-1) == x, draft)
            return
        p = (target[:, :vocab_size].float() / temperature).softmax(-1)
        q = (draft / (temperature * heat)).softmax(-1)
        if q.shape[-1] < p.shape[-1]:
            q = torch.nn.functional.pad(q, (0, p.shape[-1] - q.shape[-1]))
        at = x[:, None]
        p_x, q_x = p.gather(1, at)[:, 0].clamp_min(1e-30), q.gather(1, at)[:, 0]
        both = torch.maximum(p, q * (p_x / q_x.clamp_min(1e-30))[:, None]).sum(-1)
        self.ratio += (q_x / p_x).tolist()
        self.overlap += torch.minimum(p, q).sum(-1).tolist()
        self.coupled += torch.where(q_x > 0, 1 / both, torch.zeros_like(both)).tolist()
        self.hope += (DRAWN_HOPE[0] + DRAWN_HOPE[1] * q.amax(-1)).tolist()

    def add_greedy(self, same: Tensor, draft: Tensor) -> None:
        """Is the draft's likeliest token the text's [n]? And its logits, over whatever it can say [n, W]."""
        held = same.float().tolist()
        for column in (self.ratio, self.overlap, self.coupled):
            column += held
        self.hope += (draft / AGREEMENT_TEMPERATURE).softmax(-1).amax(-1).tolist()

    def agreement(self) -> Agreement:
        return self.together([self])

    @staticmethod
    def together(places: Sequence[_Columns]) -> Agreement:
        def of(name: str) -> tuple[tuple[float, ...], ...]:
            return tuple(tuple(getattr(place, name)) for place in places)

        return Agreement(not places[0].drawn, of("ratio"), of("overlap"), of("coupled"), of("hope"))
