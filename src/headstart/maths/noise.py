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
draws the drafted tokens, COUPLED is the noise which the draft and the target share under the coupled rule. A drafter
that draws with COUPLED noise under another rule, or with a base that is not its round's, breaks losslessness.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
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
    "exponential_of",
    "keys",
    "keys_in",
    "race",
    "round_key",
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
    x = seeds([seed], "cpu")
    for step in (1, index) if index else ():  # the seed is mixed first, so that near seeds share no choices
        x = _mix64(x + _signed(step * _GOLDEN))
    return int(x)


def seeds(values: Sequence[int], device: torch.device | str) -> Tensor:
    """Seeds from [-2^63, 2^64) as an int64 tensor [R]; 2^64 - 1 and -1 are the same 64 bits, so the same seed."""
    return torch.tensor([_signed(value) for value in values], dtype=torch.int64, device=device)


def _column(x: Tensor, other: Tensor | int) -> Tensor:
    """x [R] as [R, 1] if the other one is [R, N]."""
    return x.unsqueeze(1) if isinstance(other, Tensor) and other.dim() > x.dim() else x


def _times(x: Tensor | int, factor: int) -> Tensor | int:
    """A product that wraps around at 64 bits; tensors do so of their own accord."""
    return x * factor if isinstance(x, Tensor) else _signed(x * factor)


def round_key(seed: Tensor, base: Tensor) -> Tensor:
    """The part of ``keys`` that is the same for all of a round: seed [R], base [R] or [R, N] -> int64, like base."""
    return _mix64(_mix64(_column(seed, base) + _STEP[0]) + base * _STEP[1])


def keys_in(key: Tensor, offset: Tensor | int, stream: Tensor | int) -> Keys:
    """The rest of it: key [R] or [R, N], offset a number or [R, N], stream a number or [R] -> two words."""
    # base and offset go in between different mixings, so that no sum of the two can stand for another one.
    key = _column(key, offset)
    if isinstance(stream, Tensor):
        stream = _column(stream, key)
    x = _mix64(key + _times(offset, _STEP[2]) + _times(stream, _STEP[0]))
    return x.to(torch.int32), (x >> 32).to(torch.int32)


def keys(seed: Tensor, base: Tensor, offset: Tensor | int, stream: Tensor | int) -> Keys:
    """seed [R], base [R] or [R, N], offset a number or [R, N], stream a number or [R] -> two words of [R] or [R, N]."""
    return keys_in(round_key(seed, base), offset, stream)


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


@lru_cache(maxsize=8)  # a constant; on a GPU it is made anew, as a tensor made inside a graph must not be used outside
def _cpu_field(size: int) -> Tensor:
    return _field(size, torch.device("cpu"))


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
    """Standard exponential noise, one number a token: keys [..] -> [.., size] float32, above 0 and finite."""
    device = keys[0].device
    return _exponential(keys, _cpu_field(size) if device.type == "cpu" else _field(size, device))


def exponential_of(keys: Keys, tokens: Tensor, size: int) -> Tensor:
    """The same numbers for some of ``size`` tokens, on a CPU: keys [..], tokens [N] int64 -> [.., N]."""
    return _exponential(keys, _cpu_field(size)[tokens])


def draw(p: Tensor, noise: Tensor) -> Tensor:
    """One token from each distribution: p [.., V] (need not sum to 1), noise [.., V] exponential -> [..] int64.

    The smallest noise / p is at token x with probability p(x) / sum p: a race of exponential clocks, and the same law
    as the argmax of log p plus Gumbel noise. It is taken as the largest p / noise: a token with p = 0 scores 0 and
    never wins.
    """
    return argmax(p / noise)


def race(p: Tensor, keys: Keys) -> Tensor:
    """``draw`` with the keys' own noise: p [.., V], keys [..] -> [..] int64."""
    if p.device.type != "cpu":
        return draw(p, exponential(keys, p.shape[-1]))
    flat = p.reshape(-1, p.shape[-1])
    low, high = keys[0].reshape(-1), keys[1].reshape(-1)
    # A piece that stays in a CPU's cache at a time: that beats a dozen passes over everything.
    step = max(1, (1 << 16) // p.shape[-1])
    parts = [slice(i, i + step) for i in range(0, len(flat), step)]
    winners = [_cpu_race(flat[part], (low[part], high[part])) for part in parts]
    return torch.cat(winners).view(p.shape[:-1]) if winners else low.to(torch.int64).view(p.shape[:-1])


def _cpu_race(p: Tensor, keys: Keys) -> Tensor:
    """``race`` of p [M, V]. A token without mass never wins, so where few have any (top-p, top-k), only those run."""
    size = p.shape[-1]
    if size >= 1 << 12 and len(p) == 1:
        some = torch.from_numpy(np.flatnonzero(p.detach().numpy()))  # NaN is among them
        if 0 < len(some) <= size // 8:
            return some[draw(p[:, some], exponential_of(keys, some, size))]
    return draw(p, exponential(keys, size))
