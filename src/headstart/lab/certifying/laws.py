"""Distributions that a sampling engine has to keep: of the first tokens behind a prompt, and along whole texts.

Knows: how to work them out from plain forward passes, and how outcomes are sorted into cells. Does not know: engines,
or how outcomes were drawn.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray

from ...types import SamplingParams
from .audit import Answer
from .evidence import Tested, along_texts, pearson
from .stress import distorted
from .truth import Floats, Law, Truth, processed, target_law

__all__ = ["OTHER", "FirstTokens", "Place", "along", "first_tokens", "passed", "places"]

OTHER = -1  # the cell of all tokens that have none of their own
BRANCHES = (2, 3, 3)  # tokens with a cell of their own, behind a prefix of each length
RANKS = (1, 2, 4, 10)  # tokens along texts are sorted by how likely they were: the likeliest, the next, two more ...
TWICE = 2.0
RARE = 0.01  # probability of a cell; rarer ones have no cells of their own in a test, or hardly
MOST_EXCUSED = 0.1  # a total variation of 0.16, at the most
NEARLY = 0.9  # probability of a token that is as good as certain

Cell = tuple[int, ...]
Pass = tuple[Answer, NDArray[np.float32]]  # an answer, and the target's logits along it


@dataclass(frozen=True)
class Place:
    """A text to go on from."""

    tokens: tuple[int, ...]
    worth: float  # how much there is to see behind it


@dataclass(frozen=True)
class FirstTokens:
    """The joint law of the first tokens behind a prompt, over cells: a prefix of tokens that have cells of their own,
    the last of which may be ``OTHER``."""

    prompt: tuple[int, ...]
    params: SamplingParams
    law: dict[Cell, float]
    after: dict[Cell, Law]  # behind each prefix whose tokens all have cells
    named: dict[Cell, tuple[int, ...]]  # the tokens with cells behind it
    depth: int  # tokens that are looked at
    excused: float = 0.0  # the chi-squared distance of a law that is as good as this one: what rounding makes of it

    def cell(self, tokens: Sequence[int]) -> Cell:
        found: list[int] = []
        for token in tokens[: self.depth]:
            own = token in self.named[tuple(found)]
            found.append(token if own else OTHER)
            if not own:
                break
        return tuple(found)

    def test(self, answers: Iterable[Sequence[int]], *, strict: bool) -> Tested:
        """``strict``: tokens to which the target gives nothing cannot come."""
        counts: Counter[Cell] = Counter()
        for tokens in answers:
            counts[self._possible(tokens) if strict else self.cell(tokens)] += 1
        return pearson(counts, self.law, strict=strict, excused=self.excused)

    def _possible(self, tokens: Sequence[int]) -> Cell:
        """The cell; of tokens that cannot come, one that is not in the law."""
        prefix: Cell = ()
        for token in tokens[: self.depth]:
            if not self.after[prefix].possible(token):
                return (*prefix, -2)
            if token not in self.named[prefix]:
                break
            prefix = (*prefix, token)
            if prefix not in self.after:
                break
        return self.cell(tokens)

    def drafts(self) -> dict[Cell, torch.Tensor]:
        """What a drafter that is to be corrected draws from behind each prefix, [V]."""
        pairs = self.after.items()
        return {prefix: distorted(torch.from_numpy(law.p), self.named[prefix]) for prefix, law in pairs}


def first_tokens(
    truth: Truth, prompt: Sequence[int], params: SamplingParams, branches: Sequence[int] = BRANCHES
) -> FirstTokens:
    """Enumerate what can follow a prompt, a plain pass for each prefix. ``branches``: see ``BRANCHES``."""
    after: dict[Cell, Law] = {}
    named: dict[Cell, tuple[int, ...]] = {}
    prefixes: list[Cell] = [()]
    for count in branches:
        longer: list[Cell] = []
        for prefix in prefixes:
            text = [*prompt, *prefix]
            x = processed(truth.after(text, len(text))[0], params, prompt, list(prefix))
            law = target_law(x, params)
            best = np.argsort(-law.p)[:count]
            after[prefix], named[prefix] = law, tuple(int(token) for token in best if law.p[token] > 0)
            longer += [(*prefix, token) for token in named[prefix]]
        prefixes = longer
    cells = _cells({prefix: each.p for prefix, each in after.items()}, named, len(branches))
    excused = _excused(truth, prompt, params, cells, named) if truth.kernels is not None else 0.0
    return FirstTokens(tuple(prompt), params, cells, after, named, len(branches), excused)


def _excused(
    truth: Truth,
    prompt: Sequence[int],
    params: SamplingParams,
    law: dict[Cell, float],
    named: dict[Cell, tuple[int, ...]],
) -> float:
    """The chi-squared distance of the same law from the engine's own kernels, a token at a time over fresh keys: they
    round otherwise than the reference. Rounds of other widths may be off once more, in any direction: twice as far.
    There is a limit, so that kernels which are wrong are no excuse for themselves."""
    chances: dict[Cell, Floats] = {}
    for prefix in named:
        text = [*prompt, *prefix]
        chances[prefix] = target_law(
            processed(truth.by_kernels(text, len(text))[0], params, prompt, list(prefix)), params
        ).p
    other = _cells(chances, named, max(map(len, law)))
    distance = sum((other[cell] - chance) ** 2 / chance for cell, chance in law.items() if chance > RARE)
    return min(MOST_EXCUSED, TWICE * TWICE * distance)


def _cells(after: dict[Cell, Floats], named: dict[Cell, tuple[int, ...]], depth: int) -> dict[Cell, float]:
    law: dict[Cell, float] = {}
    mass: dict[Cell, float] = {(): 1.0}
    for prefix, p in after.items():  # shorter ones first
        before, own = mass.get(prefix, 0.0), named[prefix]
        for token in own:
            mass[*prefix, token] = before * float(p[token])
        law[*prefix, OTHER] = max(0.0, before * (1.0 - float(sum(p[token] for token in own))))
    return law | {cell: m for cell, m in mass.items() if len(cell) == depth}


def passed(truth: Truth, answers: Sequence[Answer]) -> list[Pass]:
    """A plain pass over each of these answers."""
    return [(each, truth.after([*each.prompt, *each.tokens], len(each.prompt))) for each in answers]


def places(passes: Sequence[Pass], params: SamplingParams) -> Iterator[Place]:
    """Texts behind which there is something to see, the best first: the next token as good as certain (it comes from
    the pass that reads the prompt, without a draft), those behind it not. By the plain passes over greedy answers."""
    found: list[Place] = []
    for answer, logits in passes:
        tops, evenness = [], []
        for at in range(len(answer.tokens)):
            x = processed(logits[at], params, answer.prompt, list(answer.tokens[:at]))
            p = target_law(x, params).p
            best = (
                np.sort(np.partition(p, -BRANCHES[1])[-BRANCHES[1] :])[::-1]
                if len(p) > BRANCHES[1]
                else np.sort(p)[::-1]
            )
            tops.append(float(best[0]))
            evenness.append(1.0 - float((best**2).sum()) - max(0.0, 1.0 - float(best.sum())))
        for at in range(len(tops) - 2):
            sure = min(tops[at], NEARLY) / NEARLY
            found.append(
                Place((*answer.prompt, *answer.tokens[:at]), sure * (evenness[at + 1] + 0.3 * evenness[at + 2]))
            )
    yield from sorted(found, key=lambda place: -place.worth)


def along(answers: Sequence[Answer], truth: Truth) -> Tested:
    """Every token of sampled answers, by its rank among what could follow, against the target's probabilities."""
    seen: list[int] = []
    laws: list[list[float]] = []
    impossible = 0
    for answer in answers:
        logits = truth.after([*answer.prompt, *answer.tokens], len(answer.prompt))
        for at, token in enumerate(answer.tokens):
            x = processed(logits[at], answer.params, answer.prompt, list(answer.tokens[:at]), answer.endings)
            law = target_law(x, answer.params)
            p = law.p
            few = np.argpartition(-p, RANKS[-1])[: RANKS[-1]] if len(p) > RANKS[-1] else np.arange(len(p))
            order = few[np.argsort(-p[few], kind="stable")]
            rank = np.flatnonzero(order == token)
            place = int(rank[0]) if len(rank) else len(p)
            bounds = [0, *RANKS]
            masses = [float(p[order[a:b]].sum()) for a, b in pairwise(bounds)]
            laws.append([*masses, max(0.0, 1.0 - sum(masses))])
            seen.append(sum(place >= bound for bound in RANKS))
            impossible += truth.exact and not law.possible(token)
    return along_texts(seen, laws, impossible=impossible)
