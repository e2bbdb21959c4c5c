"""What answers come to: times, rates, and what speculation did, by position in a draft.

Knows: ``Answer`` and ``Round`` records, and how to add them up. Does not know: which engine they are from.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ..types import Round
from .statistics import median

__all__ = ["Figures", "Measured", "figures"]


@dataclass(frozen=True)
class Measured:
    """One block of one engine: answers to some prompts together."""

    first_tokens: tuple[float, ...]  # seconds to the first token of each answer; empty: it cannot be told
    tokens: int  # of all answers
    seconds: float  # from submitting to the last token
    decode_tokens: int  # from when every row had its first token on
    decode_seconds: float
    rounds: tuple[Round, ...] = ()  # those that read no prompt, one for each row; none of an engine that tells none
    ids: tuple[tuple[int, ...], ...] = ()
    decoding: tuple[Round, ...] = ()  # those of them that ``decode_seconds`` are the time of


@dataclass(frozen=True)
class Figures:
    """What one engine did on some prompts."""

    answers: int
    tokens: int
    ttft: float | None  # median seconds to the first token
    tpot: float | None  # seconds for each token behind the first round, for each row
    tokens_per_second: float  # all rows together, prompts included
    decode_tokens_per_second: float | None
    alpha: float | None = None  # accepted of drafted tokens; None: nothing was drafted
    tau: float | None = None  # tokens for each forward of the target and row
    drafted: int = 0
    acceptance: tuple[float, ...] = ()  # by position: how often it holds where all before it held
    reached: tuple[float, ...] = ()  # by position: how often a draft that is so long holds up to it
    tried: tuple[int, ...] = ()  # by position: how often it came to it
    lengths: tuple[tuple[int, float], ...] = ()  # draft length, share of rounds
    round_seconds: float | None = None  # of a round, for all its rows together; and its parts
    draft_seconds: float | None = None
    verify_seconds: float | None = None

    @property
    def rest_seconds(self) -> float | None:
        """Of a round: neither drafting nor the target's forward."""
        if self.round_seconds is None or self.draft_seconds is None or self.verify_seconds is None:
            return None
        return max(0.0, self.round_seconds - self.draft_seconds - self.verify_seconds)

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {
            "rest_seconds": self.rest_seconds,
            "lengths": {str(length): share for length, share in self.lengths},
        }


def figures(blocks: Sequence[Measured], rows: int = 1) -> Figures:
    """Of one engine's blocks, each of ``rows`` prompts together."""
    tokens, seconds = sum(b.tokens for b in blocks), sum(b.seconds for b in blocks)
    decode_tokens, decode_seconds = sum(b.decode_tokens for b in blocks), sum(b.decode_seconds for b in blocks)
    first = [each for b in blocks for each in b.first_tokens]
    records = [record for b in blocks for record in b.rounds]
    return Figures(
        answers=sum(len(b.ids) for b in blocks),
        tokens=tokens,
        ttft=median(first) if first else None,
        tpot=rows * decode_seconds / decode_tokens if decode_tokens else None,
        tokens_per_second=tokens / seconds if seconds > 0 else 0.0,
        decode_tokens_per_second=decode_tokens / decode_seconds if decode_seconds > 0 else None,
        **(_of_rounds(records) if records else {}),
    )


def _of_rounds(records: Sequence[Round]) -> dict[str, Any]:
    drafted, accepted = sum(r.drafted for r in records), sum(r.accepted for r in records)
    lengths = Counter(r.drafted for r in records)
    tried, held = _by_position(records)
    long = [sum(1 for r in records if r.drafted > i) for i in range(len(tried))]
    whole = [sum(1 for r in records if r.drafted > i and sum(r.outcomes) > i) for i in range(len(tried))]
    shares = [1 / r.rows for r in records]  # the records of one round say the same seconds
    rounds = sum(shares)
    return {
        "alpha": accepted / drafted if drafted else None,
        "tau": sum(r.emitted for r in records) / len(records),
        "drafted": drafted,
        "acceptance": tuple(h / t for h, t in zip(held, tried, strict=True)),
        "reached": tuple(w / n for w, n in zip(whole, long, strict=True) if n),
        "tried": tuple(tried),
        "lengths": tuple((length, count / len(records)) for length, count in sorted(lengths.items())),
        "round_seconds": sum(s * r.round_seconds for s, r in zip(shares, records, strict=True)) / rounds,
        "draft_seconds": sum(s * _drafting(r) for s, r in zip(shares, records, strict=True)) / rounds,
        "verify_seconds": sum(s * r.verify_seconds for s, r in zip(shares, records, strict=True)) / rounds,
    }


def _drafting(record: Round) -> float:
    return record.draft_seconds + record.catch_up_seconds


def _by_position(records: Iterable[Round]) -> tuple[list[int], list[int]]:
    """How often each position of a draft was looked at, and how often it held."""
    tried: list[int] = []
    held: list[int] = []
    for record in records:
        for position, hit in enumerate(record.outcomes):
            if position == len(tried):
                tried.append(0)
                held.append(0)
            tried[position] += 1
            held[position] += hit
    return tried, held
