"""What a token is drawn from, in the slowest and most obvious way: one position, plain Python numbers, no tensors."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from headstart.types import SamplingParams


def processed_slowly(
    logits: Sequence[float],
    params: SamplingParams,
    prompt: Sequence[int],
    output: Sequence[int],
    vocab_size: int,
    eos: Sequence[int] = (),
) -> list[float]:
    """Everything before the temperature; ``output`` is all that came after the prompt, drafted tokens included."""
    x = [value if token < vocab_size else -math.inf for token, value in enumerate(logits)]
    for token, bias in (params.logit_bias or {}).items():
        x[token] += bias
    if len(output) < params.min_tokens:
        for token in eos:
            x[token] = -math.inf
    for token in {*prompt, *output}:
        x[token] = x[token] / params.repetition_penalty if x[token] > 0 else x[token] * params.repetition_penalty
    for token, count in Counter(output).items():
        x[token] -= params.frequency_penalty * count + params.presence_penalty
    return x


def probabilities_slowly(
    logits: Sequence[float],
    params: SamplingParams,
    prompt: Sequence[int],
    output: Sequence[int],
    vocab_size: int,
    eos: Sequence[int] = (),
) -> list[float]:
    x = processed_slowly(logits, params, prompt, output, vocab_size, eos)
    if params.temperature == 0:
        return [float(token == x.index(max(x))) for token in range(len(x))]
    top = max(x)
    weights = [math.exp((value - top) / params.temperature) for value in x]

    def cut(floor: float) -> list[float]:
        kept = [w if w >= floor else 0.0 for w in weights]
        return [w / sum(kept) for w in kept]

    weights = cut(params.min_p * max(weights))
    if params.top_k:
        weights = cut(sorted(weights, reverse=True)[: params.top_k][-1])
    if params.top_p < 1:
        total = 0.0
        for weight in sorted(weights, reverse=True):
            total += weight
            if total >= params.top_p:
                break
        weights = cut(weight)
    return weights
