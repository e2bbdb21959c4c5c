"""Counter-based randomness: every random number is a pure function of (seed, base, offset, stream).

Knows: how to turn such a counter into a uniform number, or into one exponential number for each token.
Does not know: what is decided with them. There is no generator and no state: asking again gives the same numbers,
on the CPU and on CUDA (the integers are the same bits; the logarithm may differ in the last one).

How rounds are keyed, and why:

- The token and block rules key a round by (seed, base, offset): base is the number of committed tokens when the round
  starts, offset is a node of that round's draft. The block rule looks at LATER drafts before it decides about an
  earlier one, so a round that keeps k tokens has already used noise of the positions after k. If noise were keyed by
  the position alone, the next round would meet the same numbers again, given what they had decided: rounds would be
  correlated and the output would no longer follow the target's distribution. A fresh base gives fresh noise.
- The coupled rule, and every round without a draft, is keyed by the absolute position alone (base = position,
  offset = 0). There the token at a position is a function of the target's distribution and that position's noise, so
  no drafter, draft length or batch can change it, and re-use is what is wanted.

Four streams keep independent what must be independent: ACCEPT decides, RESIDUAL draws the target's own token, DRAFT
draws the drafted tokens, COUPLED is the noise which the draft and the target share under the coupled rule.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .argmax import argmax

__all__ = [
    "ACCEPT",
    "COUPLED",
    "DRAFT",
    "RESIDUAL",
    "Keys",
    "derive",
    "draw",
    "exponential",
    "keys",
    "race",
    "seeds",
    "uniform",
]

ACCEPT, RESIDUAL, DRAFT, COUPLED = 1, 2, 3, 4

Keys = tuple[Tensor, Tensor]  # two int32 words of one 64-bit key, each [..]

_WORD = (1 << 64) - 1


def _signed(x: int) -> int:
    """The same 64 bits, read as a signed number (torch has no arithmetic on unsigned ones)."""
    x &= _WORD
    return x - (1 << 64) if x >> 63 else x


_GOLDEN = 0x9E3779B97F4A7C15
_MIX = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)  # splitmix64's multipliers
_STEP = (_signed(_GOLDEN), _signed(0xD1B54A32D192ED03), _signed(0x8CB92BA72F3D8DD7))  # odd: base, offset, stream
_LOW = (0x7FEB352D, 0x846CA68B - (1 << 32))  # lowbias32's multipliers, as int32


def _shift(x: Tensor, bits: int, width: int) -> Tensor:
    """Logical shift right: the arithmetic one, with the copies of the sign masked away."""
    return (x >> bits) & ((1 << (width - bits)) - 1)


def _mix64(x: Tensor) -> Tensor:
    """splitmix64's finaliser: every input bit reaches every output bit. x int64, wraps around."""
    x = (x ^ _shift(x, 30, 64)) * _signed(_MIX[0])
    x = (x ^ _shift(x, 27, 64)) * _signed(_MIX[1])
    return x ^ _shift(x, 31, 64)


def derive(seed: int, index: int) -> int:
    """The seed of the index-th of n choices, as a signed 64-bit number; choice 0 keeps the request's own seed."""
    if index == 0:
        return _signed(seed)
    x = seed
    for step in (1, index):  # the seed is mixed before the index goes in, so that near seeds share no choices
        x = (x + step * _GOLDEN) & _WORD
        x = ((x ^ (x >> 30)) * _MIX[0]) & _WORD
        x = ((x ^ (x >> 27)) * _MIX[1]) & _WORD
        x ^= x >> 31
    return _signed(x)


def seeds(values: Sequence[int], device: torch.device | str) -> Tensor:
    """Seeds from [-2^63, 2^64) as an int64 tensor [R]; 2^64 - 1 and -1 are the same 64 bits, so the same seed."""
    return torch.tensor([_signed(value) for value in values], dtype=torch.int64, device=device)


def keys(seed: Tensor, base: Tensor, offset: Tensor | int, stream: Tensor | int) -> Keys:
    """seed [R], base [R] or [R, N], offset [R, N] or a number, stream [R] or a number -> two words of [R] or [R, N]."""
    deep = base.dim() == 2 or (isinstance(offset, Tensor) and offset.dim() == 2)

    def column(x: Tensor) -> Tensor:
        return x.unsqueeze(-1) if deep and x.dim() == 1 else x

    if isinstance(stream, Tensor):
        stream = column(stream)
    if isinstance(offset, Tensor):
        offset = column(offset)
    x = _mix64(column(seed) + _STEP[0])
    # Two mixings, so that no sum of base and offset can stand for another one.
    x = _mix64(x + column(base) * _STEP[1])
    for factor, step in ((offset, _STEP[2]), (stream, _STEP[0])):
        x = x + (factor * step if isinstance(factor, Tensor) else _signed(factor * step))  # both wrap around
    x = _mix64(x)
    return x.to(torch.int32), (x >> 32).to(torch.int32)


def uniform(keys: Keys) -> Tensor:
    """One float32 number in (0, 1) for each key. 0 and 1 never occur: u < 1 always holds, and u < 0 never."""
    # 23 bits and a half: one bit more, and the largest would round to 1.
    return (_shift(keys[0], 9, 32).to(torch.float32) + 0.5) * 2.0**-23


def _field(size: int, device: torch.device) -> Tensor:
    """Token ids 0 .. size - 1, mixed: the half of the noise that no key changes. int32, because CPUs vectorise it."""
    x = torch.arange(size, dtype=torch.int32, device=device) * (_GOLDEN & 0x7FFFFFFF)
    for bits, factor in ((16, _LOW[0]), (15, _LOW[1])):
        x = (x ^ _shift(x, bits, 32)) * factor
    return x ^ _shift(x, 16, 32)


def _exponential(keys: Keys, field: Tensor) -> Tensor:
    """The keyed half: keys [..], field [V] -> [.., V]. In place where it can be, as memory is what it waits for."""
    low, high = keys
    x = field + low.unsqueeze(-1)
    scratch = torch.empty_like(x)

    def fold(bits: int) -> None:
        torch.bitwise_right_shift(x, bits, out=scratch)
        x.bitwise_xor_(scratch.bitwise_and_((1 << (32 - bits)) - 1))

    # One word of the key goes in before the first multiplication, the other before the second.
    fold(16)
    x.mul_(_LOW[0]).add_(high.unsqueeze(-1))
    fold(15)
    x.mul_(_LOW[1])
    fold(16)
    # 31 bits: float32 keeps small values exact, and small values are the ones that win a draw.
    value = x.bitwise_and_(0x7FFFFFFF).to(torch.float32).add_(0.5).mul_(2.0**-31).clamp_max_(1 - 2.0**-24)
    return value.neg_().log1p_().neg_()


def exponential(keys: Keys, size: int) -> Tensor:
    """Standard exponential noise, a number for each of ``size`` tokens: keys [..] -> [.., size] float32, > 0, finite."""
    return _exponential(keys, _field(size, keys[0].device))


def draw(p: Tensor, noise: Tensor) -> Tensor:
    """One token from each distribution: p [.., V] (need not sum to 1), noise [.., V] exponential -> [..] int64.

    The smallest noise / p is at token x with probability p(x) / sum p: a race of exponential clocks, and the same law
    as the argmax of log p plus Gumbel noise. It is taken as the largest p / noise: a token with p = 0 scores 0 and
    never wins.
    """
    return argmax(p / noise)


def race(p: Tensor, keys: Keys) -> Tensor:
    """``draw`` with the keys' own noise: p [.., V], keys [..] -> [..] int64."""
    field = _field(p.shape[-1], p.device)
    if p.device.type != "cpu":
        return draw(p, _exponential(keys, field))
    # One vocabulary at a time stays in a CPU's cache, which beats a dozen passes over all of them.
    flat = p.reshape(-1, p.shape[-1])
    low, high = keys[0].reshape(-1), keys[1].reshape(-1)
    winners = [draw(flat[i], _exponential((low[i], high[i]), field)) for i in range(len(flat))]
    return torch.stack(winners).view(p.shape[:-1]) if winners else low
