"""From the target's logits to a verdict for every row, each by its own request's rule.

Knows: how rows with different sampling settings share one batch of logits, and which rule each falls under.
Does not know: where the logits or the proposals come from; the rules themselves are ``maths.verify``.

A row is judged by one of four groups. *greedy*: the target's token at each node is the argmax. *coupled*: it is
drawn with noise that depends on the seed and the position only; rows without a draft are drawn this way
too, so that plain decoding and coupled speculation give the same tokens. *token* and *block*: rejection sampling.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from ..maths import noise
from ..maths.asks import PROCESSING
from ..maths.bitmask import bits_of, unpacked
from ..maths.distribution import History, Nodes, Warp, argmaxes, probabilities
from ..maths.tree import Topology
from ..maths.verify import CounterChance, Verdicts, block_rule, chain_rules, coupled_rule, token_rule
from ..maths.vocab_ops import PLAIN, DraftedChain, Rule, VocabOps
from ..maths.warp import LIKELIEST, UNTOUCHED
from ..types import Constraint, Draw, Mask, Proposal, TokenLogprob, Verdict
from .node_masks import node_masks
from .sequence import Sequence

__all__ = [
    "Batch",
    "Logits",
    "VerdictInputs",
    "by_rule",
    "decide",
    "decide_mixed",
    "follow",
    "group_of",
    "judge",
    "likeliest",
    "logprob_tensors",
    "logprobs_along",
    "targets_of",
    "token_logprobs",
]

Logits = torch.Tensor | list[torch.Tensor]  # of a round: [R, N+1, V], or of each row [n+1, V] for its own n guesses


@dataclass(frozen=True)
class Batch:
    """One round's rows, padded to the widest proposal. Node 0 of a row is its last committed token."""

    sequences: list[Sequence]
    proposals: list[Proposal | None]
    tokens: torch.Tensor  # [R, N+1] node tokens
    topology: Topology
    masks: list[list[Mask | None]]  # of each row's nodes, nothing for rows without a grammar; see ``with_masks``

    @staticmethod
    def of(sequences: list[Sequence], proposals: list[Proposal | None], device: torch.device) -> Batch:
        drafts = [p.tokens if p is not None else () for p in proposals]
        widest = max(map(len, drafts))
        lines = [[s.tokens[-1], *d, *([0] * (widest - len(d)))] for s, d in zip(sequences, drafts, strict=True)]
        if all(p is None or p.is_chain for p in proposals):
            topology = Topology.chain([len(d) for d in drafts], device)
        else:
            topology = Topology.of([p.parents if p is not None else () for p in proposals], device)
        return Batch(sequences, proposals, torch.tensor(lines, device=device), topology, [[] for _ in sequences])

    def with_masks(self) -> Batch:
        """The same, with what grammars allow."""
        if all(s.constraint is None for s in self.sequences):
            return self
        pairs = zip(self.sequences, self.proposals, strict=True)
        return replace(self, masks=[node_masks(sequence, proposal) for sequence, proposal in pairs])

    def part(self, rows: Seq[int], device: torch.device) -> Batch:
        """These rows alone."""
        found = Batch.of([self.sequences[r] for r in rows], [self.proposals[r] for r in rows], device)
        return replace(found, masks=[self.masks[r] for r in rows])

    @property
    def width(self) -> int:
        return self.tokens.shape[1]

    @property
    def ragged(self) -> bool:
        """Are these chains of different lengths?"""
        drafted = [len(p) if p is not None else 0 for p in self.proposals]
        return self.topology.is_chain and min(drafted) < max(drafted)

    @property
    def lines(self) -> list[list[int]]:
        """The tokens of each row's nodes, without padding; for chains."""
        drafts = [p.tokens if p is not None else () for p in self.proposals]
        return [[s.tokens[-1], *draft] for s, draft in zip(self.sequences, drafts, strict=True)]


def judge(logits: Logits, batch: Batch, vocab_size: int, vocab_ops: VocabOps = PLAIN) -> list[Verdict | None]:
    """One verdict a row; None where the row's numbers are broken (NaN, no mass).

    By the quickest decider that serves all that the rows ask for; ``by_rule`` serves everything.
    """
    wanted = [s.asks for s in batch.sequences]
    chains = batch.topology.is_chain and logits[0].dtype == torch.float32
    if chains and logits[0].device.type == "cpu" and LIKELIEST.takes(wanted):
        return follow(logits, batch, vocab_size)
    if chains and torch.is_tensor(logits) and batch.width == 1 and UNTOUCHED.takes(wanted):
        return likeliest(logits, batch, vocab_size)
    if chains and vocab_ops.judged is not None and vocab_ops.judges is not None and vocab_ops.judges.takes(wanted):
        return _judge_chains(logits, batch, vocab_size, vocab_ops)
    padded = logits if torch.is_tensor(logits) else pad_sequence(logits, batch_first=True)
    return by_rule(padded, batch, vocab_size, vocab_ops)


def by_rule(logits: torch.Tensor, batch: Batch, vocab_size: int, vocab_ops: VocabOps = PLAIN) -> list[Verdict | None]:
    """Rows of the same rule together, in tensors, by ``maths.verify``: what every other decider is held against."""
    batch = batch.with_masks()
    groups: dict[tuple[Rule, bool], list[int]] = {}
    for row, (sequence, proposal) in enumerate(zip(batch.sequences, batch.proposals, strict=True)):
        # A row that the machine's loops decline has no say in who works its neighbours' numbers out.
        key = group_of(sequence, drafted=proposal is not None), vocab_ops.takes(sequence.asks)
        groups.setdefault(key, []).append(row)
    verdicts: list[Verdict | None] = [None] * len(batch.sequences)
    for (group, _), rows in groups.items():
        part, part_logits = batch, logits
        if len(rows) < len(batch.sequences):
            part = batch.part(rows, logits.device)
            part_logits = logits[rows, : part.width]
        for row, verdict in zip(rows, _judge_group(group, part_logits, part, vocab_size, vocab_ops), strict=True):
            verdicts[row] = verdict
    return verdicts


def follow(logits: Logits, batch: Batch, vocab_size: int) -> list[Verdict | None]:
    """Greedy chains on a CPU: what ``decide`` says of them, said without tensors of a few numbers each, whose making
    takes a tenth of a round there."""
    return [
        _followed(nodes.numpy()[:, :vocab_size], proposal, sequence.constraint)
        for nodes, proposal, sequence in zip(logits, batch.proposals, batch.sequences, strict=True)
    ]


def _followed(nodes: np.ndarray, proposal: Proposal | None, constraint: Constraint | None) -> Verdict | None:
    """The verdict on one greedy chain by its logits [N+1, V], processed. Nodes behind the first disagreement are not
    looked at."""
    drafted = proposal.tokens if proposal is not None else ()
    token, held = -1, 0
    for held, line in enumerate(nodes):
        token = _likeliest_allowed(line, constraint, drafted[:held])
        if held == len(drafted) or drafted[held] != token:
            break
    return Verdict.on(proposal, range(held), token) if token >= 0 else None


def _likeliest_allowed(line: np.ndarray, constraint: Constraint | None, drafted: tuple[int, ...]) -> int:
    """The first of the largest logits [V] among what may follow drafted tokens; -1: its numbers are broken.

    Of all tokens the first of the largest, if it may follow, is also the first of the largest of those that may. So
    the mask, which takes far longer to work out than whether one token may follow, is asked for only where it may not,
    or where numbers are broken: those of tokens that may not follow do not count.
    """
    token = int(line.argmax())  # the first of the largest; NaN counts as the largest
    sound = bool(np.isfinite(line[token]))
    if constraint is None or (sound and constraint.allows(drafted, token)):
        return token if sound else -1
    mask = constraint.mask(drafted)
    if mask is not None:
        line = np.where(bits_of(mask, len(line)), line, -np.inf)
        token = int(line.argmax())
    return token if np.isfinite(line[token]) else -1


def likeliest(logits: torch.Tensor, batch: Batch, vocab_size: int) -> list[Verdict | None]:
    """Greedy rows without a draft on a GPU, where prompts end: what ``by_rule`` says of them, in one question."""
    logits = logits[:, 0, :vocab_size]
    best = logits.argmax(-1, keepdim=True)  # the first of the largest; NaN counts as the largest
    found = torch.where(logits.gather(-1, best).isfinite(), best, -1)[:, 0].tolist()
    return [Verdict.on(None, (), token) if token >= 0 else None for token in found]


def _judge_chains(logits: Logits, batch: Batch, vocab_size: int, vocab_ops: VocabOps) -> list[Verdict | None]:
    """Chains, row by row, each in one call or two: what ``decide`` says of them. Greedy rows with a grammar do without
    most masks."""
    assert vocab_ops.judged is not None
    assert vocab_ops.processed is not None
    found: list[Verdict | None] = []
    for row, (sequence, proposal) in enumerate(zip(batch.sequences, batch.proposals, strict=True)):
        chain = DraftedChain(
            sequence.params,
            group_of(sequence, drafted=proposal is not None),
            sequence.seed,
            committed=sequence.tokens,
            prompt_length=sequence.prompt_length,
            tokens=proposal.tokens if proposal is not None else (),
            q=proposal.q if proposal is not None and proposal.draw != "point" else None,
            endings=sequence.held_back,
        )
        x = logits[row][: len(chain.tokens) + 1, :vocab_size]
        if sequence.asks & PROCESSING:
            x = vocab_ops.processed(x, chain)
        if sequence.constraint is not None and sequence.params.greedy:
            found.append(_followed(x.numpy(), proposal, sequence.constraint))
            continue
        held, token = vocab_ops.judged(x, chain._replace(masks=node_masks(sequence, proposal)))
        found.append(Verdict.on(proposal, range(held), token) if token >= 0 else None)
    return found


def group_of(sequence: Sequence, *, drafted: bool) -> Rule:
    """By which rule the sequence's next round is judged."""
    if sequence.params.greedy:
        return "greedy"
    if not drafted:
        return "coupled"
    return sequence.params.rule


def _judge_group(
    group: Rule, logits: torch.Tensor, batch: Batch, vocab_size: int, vocab_ops: VocabOps
) -> list[Verdict | None]:
    device = logits.device
    sequences = batch.sequences
    params = [s.params for s in sequences]
    warp = Warp.of(params, vocab_size=vocab_size, eos=[tuple(s.held_back) for s in sequences], device=device)
    if any(batch.masks):
        warp = replace(warp, allowed=unpacked(batch.masks, batch.width, logits.shape[-1], device))
    history = None
    if warp.needs_history:
        prompts = [s.tokens[: s.prompt_length] for s in sequences]
        outputs = [s.tokens[s.prompt_length :] for s in sequences]
        history = History.of(prompts, outputs, logits.shape[-1], device)
    inputs = VerdictInputs(
        warp,
        batch.tokens,
        batch.topology,
        outputs=torch.tensor([s.output_length for s in sequences], device=device),
        history=history,
        seeds=noise.seeds([s.seed for s in sequences], device),
        base=torch.tensor([len(s.tokens) for s in sequences], device=device),
        vocab_ops=vocab_ops,
        q=None if group in ("greedy", "coupled") else _stack_q(batch, logits.shape[-1]),
        kinds=[proposal.draw if proposal is not None else "point" for proposal in batch.proposals],
    )
    verdicts = decide(group, logits, inputs)
    columns = [verdicts.accepted[:, None], verdicts.token[:, None], verdicts.ok[:, None], verdicts.path]
    lines = torch.cat([column.to(torch.int64) for column in columns], dim=1).tolist()  # one transfer for all
    return [
        Verdict.on(proposal, [node - 1 for node in nodes[:accepted]], token) if ok else None
        for (accepted, token, ok, *nodes), proposal in zip(lines, batch.proposals, strict=True)
    ]


@dataclass(frozen=True)
class VerdictInputs:
    """All that the verdicts on R rows rest on, besides the target's logits [R, N+1, V]."""

    warp: Warp
    tokens: torch.Tensor  # [R, N+1] of the nodes
    topology: Topology
    outputs: torch.Tensor  # [R] output tokens so far
    history: History | None  # None: no row uses a penalty
    seeds: torch.Tensor  # [R]
    base: torch.Tensor  # [R] committed tokens
    vocab_ops: VocabOps = PLAIN
    q: torch.Tensor | None = None  # [R, N, V] what the tokens were drawn from; None: point drafts, or no rejection rule
    kinds: Seq[Draw] = ()

    @property
    def nodes(self) -> Nodes:
        return {"outputs": self.outputs, "tokens": self.tokens, "topology": self.topology, "history": self.history}

    def p(self, logits: torch.Tensor) -> torch.Tensor:
        return probabilities(logits, self.warp, vocab_ops=self.vocab_ops, **self.nodes)

    def chance(self) -> CounterChance:
        return CounterChance(self.seeds, self.base, self.topology.width, self.vocab_ops)


def decide(group: Rule, logits: torch.Tensor, given: VerdictInputs) -> Verdicts:
    """The target's word on every row of one group. Nothing here waits for the device."""
    if group == "greedy" or group == "coupled":
        return coupled_rule(targets_of(group, logits, given), given.tokens, given.topology)
    rule = {"token": token_rule, "block": block_rule}[group]  # one that is not here is no rule
    return rule(given.p(logits), given.q, given.tokens, given.topology, given.kinds, given.chance())


def targets_of(group: Literal["greedy", "coupled"], logits: torch.Tensor, given: VerdictInputs) -> torch.Tensor:
    """The token that the target itself puts after each node [R, N+1]; -1 where its numbers are broken."""
    if group == "greedy":
        return argmaxes(logits, given.warp, vocab_ops=given.vocab_ops, **given.nodes)
    return given.chance().targets(given.p(logits), given.topology.depth)


def decide_mixed(
    logits: torch.Tensor, given: VerdictInputs, *, rejects: torch.Tensor | None, block: torch.Tensor
) -> Verdicts:
    """``decide`` for chains whose rows fall under different rules, known on the device only.

    rejects [R] bool: the row is rejection sampled, by the block rule where ``block`` [R] says so; the others are
    coupled or greedy (all mass on one token, so noise has no say). None: all rows are.
    """
    p, chance = given.p(logits), given.chance()

    def sampled() -> Verdicts:
        return chain_rules(p, given.q, given.tokens, given.topology, given.kinds, chance, block)

    if rejects is None:
        return sampled()
    follow = coupled_rule(chance.targets(p, given.topology.depth), given.tokens, given.topology)
    if given.topology.width == 1:  # nothing was drafted, so there is nothing to reject
        return follow
    sample = sampled()
    return Verdicts(
        torch.where(rejects[:, None], sample.path, follow.path),
        torch.where(rejects, sample.accepted, follow.accepted),
        torch.where(rejects, sample.token, follow.token),
        torch.where(rejects, sample.ok, follow.ok),
    )


def _stack_q(batch: Batch, width: int) -> torch.Tensor | None:
    """[R, N, V] from the rows' own q, zeros where a row has none; None when no row has one."""
    given = [(row, p.q) for row, p in enumerate(batch.proposals) if p is not None and p.q is not None]
    if not given:
        return None
    if len(batch.proposals) == 1 and given[0][1].shape[0] == batch.width - 1:
        return given[0][1][None]
    q = torch.zeros(len(batch.proposals), batch.width - 1, width, dtype=given[0][1].dtype, device=batch.tokens.device)
    for row, row_q in given:
        q[row, : row_q.shape[0]] = row_q
    return q


def logprobs_along(
    logits: torch.Tensor, tokens: Seq[int], nodes: Seq[int], top: int, vocab_size: int
) -> list[TokenLogprob]:
    """The target's own log-probabilities, before any processing, of ``tokens[i]`` at node ``nodes[i]``.

    logits [N+1, V] of one row.
    """
    values, best, ids = logprob_tensors(logits[list(nodes)], tokens, top, vocab_size)
    return token_logprobs(tokens, values.tolist(), best.tolist(), ids.tolist(), top)


def logprob_tensors(
    logits: torch.Tensor, tokens: Seq[int], top: int, vocab_size: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-probabilities [n] of ``tokens`` by logits [n, V]; of the ``top`` most likely ones, and their ids [n, top].

    Nothing here waits for the device.
    """
    chosen = logits[:, :vocab_size].float().log_softmax(-1)
    values = chosen.gather(-1, torch.tensor(tokens, device=logits.device)[:, None])[:, 0]
    best = chosen.topk(min(top, vocab_size), dim=-1)
    return values, best.values, best.indices


def token_logprobs(
    tokens: Seq[int], values: Seq[float], best: Seq[Seq[float]], ids: Seq[Seq[int]], top: int
) -> list[TokenLogprob]:
    """The log-probability of each token, and of the ``top`` most likely ones at its place."""
    return [
        TokenLogprob(token, value, dict(zip(names[:top], most[:top], strict=True)))
        for token, value, most, names in zip(tokens, values, best, ids, strict=True)
    ]
