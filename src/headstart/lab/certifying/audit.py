"""Teacher-forcing: an answer is put through the target again, and every token of it has to be the one that follows.

Knows: answers, the target's plain logits, and which token greedy or coupled decoding puts after each prefix. Does not
know: how the answers were made.

If each token is what the target puts after those before it, the whole answer is the one that decoding by plain forward
passes gives: there is no need to decode it a second time. Where the target's numbers are rounded (bfloat16, or other
kernels than the engine's), the best two candidates can change places: a token that is within rounding of the best is a
near-tie, and counted. What is further off, but not twice as far, is held against the engine's own kernels too, over
fresh keys and without drafts, in forwards of the shapes that rounds run (a kernel for eight rows rounds otherwise than
one for a single row): if it is right by one of them, the two references differ and not the answer. So it is where
these forwards themselves differ so much about the place that its rounding accounts for it: keys come from forwards of
several shapes, so that none of them repeats a round exactly. Both are counted. Twice as far is wrong in any case, and
what rounds make of right logits is not in it: rejected keys, counts, masks and verdicts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ...types import Grammar, Mask, SamplingParams, TokenLogprob
from .truth import Truth, clocks, cuts, processed, target_law

__all__ = ["Answer", "Audit", "audited", "tampered"]

RACE = 2e-4  # of a score, relative: float32 probabilities against float64 ones
LOGPROBS = 2e-3  # of a log-probability, where the logits are the same bits; rounding is added
AT_MOST = 2.0  # times what rounding explains: what is further off is wrong, whatever the engine's own kernels say
_NOTHING = 1e-9  # float64's own rounding
SHOWN = 5  # wrong tokens that a certificate names


@dataclass(frozen=True)
class Answer:
    """A prompt, how it was to be answered, and what came."""

    prompt: tuple[int, ...]
    params: SamplingParams
    tokens: tuple[int, ...]
    seed: int = 0
    endings: frozenset[int] = frozenset()
    logprobs: tuple[TokenLogprob, ...] | None = None
    grammar: Grammar | None = None


@dataclass(frozen=True)
class Audit:
    """What came of some answers."""

    answers: int = 0
    positions: int = 0
    ties: int = 0  # not the best, but within rounding of it
    widest_tie: float = 0.0  # in logits
    by_kernels: int = 0  # further from the reference than rounding explains, and right by the engine's own kernels
    wrong: int = 0
    first_wrong: tuple[str, ...] = ()
    logprobs: int = 0  # compared
    logprobs_off: float = 0.0  # the largest difference

    def __add__(self, other: Audit) -> Audit:
        return Audit(
            self.answers + other.answers,
            self.positions + other.positions,
            self.ties + other.ties,
            max(self.widest_tie, other.widest_tie),
            self.by_kernels + other.by_kernels,
            self.wrong + other.wrong,
            (self.first_wrong + other.first_wrong)[:SHOWN],
            self.logprobs + other.logprobs,
            max(self.logprobs_off, other.logprobs_off),
        )


def audited(answer: Answer, truth: Truth) -> Audit:
    """Hold one greedy or coupled answer against the target."""
    prompt, params, tokens = answer.prompt, answer.params, answer.tokens
    if not tokens:
        return Audit(answers=1)
    text, start = [*prompt, *tokens], len(prompt)
    logits = truth.after(text, start)
    found = Audit(answers=1)
    grammar = answer.grammar.begin(endings=answer.endings, min_tokens=params.min_tokens) if answer.grammar else None
    for at, token in enumerate(tokens):
        mask = grammar.mask(()) if grammar is not None else None
        each = _token(answer, at, logits[at], mask, truth)
        if each.wrong and truth.kernels is not None:
            each = _by_kernels(answer, at, logits[at], mask, truth) or each
        found += each
        if grammar is not None:
            grammar.take(token)
    return found


def _by_kernels(answer: Answer, at: int, row: np.ndarray, mask: Mask | None, truth: Truth) -> Audit | None:
    """What the engine's own kernels say of a token that is beyond rounding of the reference; None: that it is wrong."""
    text, start = [*answer.prompt, *answer.tokens], len(answer.prompt)
    further = _token(answer, at, row, mask, truth, AT_MOST)
    if further.wrong:
        return None
    right = (truth.by_kernels(text, start, shape)[at] for shape in truth.shapes)
    if all(_token(answer, at, each, mask, truth).wrong for each in right):
        times = truth.rounding_at(text, start, at, row) / truth.tie(row.astype(np.float64))
        if _token(answer, at, row, mask, truth, min(AT_MOST, max(1.0, times))).wrong:
            return None
    return replace(further, by_kernels=1)


def _token(answer: Answer, at: int, row: np.ndarray, mask: Mask | None, truth: Truth, times: float = 1.0) -> Audit:
    """One token of an answer, and the log-probabilities told with it, against the target's logits [V] at its place.
    ``times``: how much further off than rounding explains it may be."""
    params, token = answer.params, answer.tokens[at]
    x = processed(row, params, answer.prompt, list(answer.tokens[:at]), answer.endings, mask)
    tie = times * truth.tie(row.astype(np.float64)) * max(params.repetition_penalty, 1 / params.repetition_penalty)
    if params.greedy:
        gap, allowed = float(x.max() - x[token]), tie
    else:
        gap, allowed = _race_gap(x, answer, token, at, tie), tie / params.temperature + RACE
    found = _judged(gap, allowed, token, at)
    return found if answer.logprobs is None else found + _logprob(answer.logprobs[at], row.astype(np.float64), tie, at)


def _race_gap(x: np.ndarray, answer: Answer, token: int, at: int, tie: float) -> float:
    """By how much, in logits, the token lost the race of its position; infinite: it was not in it.

    Where rounding may put a token on either side of a cut (top-k, top-p, min-p), nobody can say whether it was in the
    race: it may win, and it may be missing.
    """
    p, params = target_law(x, answer.params).before, answer.params
    least, most = cuts(p, params, 2 * (tie / params.temperature + RACE))
    if p[token] < least:
        return math.inf
    sure = np.flatnonzero(p >= most)
    scores = p[np.append(sure, token)] / clocks(len(x), answer.seed, len(answer.prompt) + at, np.append(sure, token))
    return max(0.0, math.log(scores.max() / scores[-1])) if scores[-1] > 0 else math.inf


def _judged(gap: float, allowed: float, token: int, at: int) -> Audit:
    if gap <= _NOTHING:
        return Audit(positions=1)
    if gap <= allowed:
        return Audit(positions=1, ties=1, widest_tie=gap)
    told = f"token {at} of an answer is {token}, {gap:.3g} behind the one that follows there (a tie is {allowed:.2g})"
    return Audit(positions=1, wrong=1, first_wrong=(told,))


def _logprob(told: TokenLogprob, row: np.ndarray, tie: float, at: int) -> Audit:
    """The log-probabilities told with a token against those of the plain pass, before any processing."""
    top = float(row.max())
    total = top + math.log(float(np.exp(row - top).sum()))
    pairs = [(told.token_id, told.logprob), *told.top.items()]  # the token may be among the likeliest, too
    off = max(abs(value - (float(row[token]) - total)) for token, value in pairs)
    if off <= LOGPROBS + 2 * tie:
        return Audit(logprobs=len(pairs), logprobs_off=off)
    wrong = (f"a log-probability told with token {at} of an answer is {off:.3g} off",)
    return Audit(logprobs=len(pairs), logprobs_off=off, wrong=1, first_wrong=wrong)


def tampered(answers: Sequence[Answer], truth: Truth) -> Answer:
    """The negative control: an answer in which one token is the target's second choice. What is behind it stays."""
    answer = max(answers, key=lambda each: len(each.tokens))
    at = len(answer.tokens) // 2
    logits = truth.after([*answer.prompt, *answer.tokens[:at]], len(answer.prompt) + at)[0]
    x = processed(logits, answer.params, answer.prompt, list(answer.tokens[:at]), answer.endings)
    x[answer.tokens[at]] = -np.inf
    other = int(x.argmax())
    return replace(answer, tokens=(*answer.tokens[:at], other, *answer.tokens[at + 1 :]), logprobs=None, grammar=None)
