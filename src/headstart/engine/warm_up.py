"""Captures rounds at load, where the device can have them, and tells how far it is.

Knows: which models can be captured. Does not know: what is captured.
"""

from __future__ import annotations

import logging
from time import perf_counter

import torch

from ..config import DraftConfig
from ..drafters.base import Drafter
from ..machine.model_runner import DeviceRunner, ModelRunner
from ..types import Tell
from .captured import CapturedRounds, draft_lengths
from .overlap import OverlappedRounds

__all__ = ["open_captured", "rehearse"]

log = logging.getLogger(__name__)


_PREFILLS = (64, 24, 12, 3)  # prompt lengths of every class of kernels
_KEPT = (9, 17)  # and logits of so many tokens of a prompt, more than one
_TOGETHER = (1, 2, 3, 9, 17, 33)  # parts of prompts read in one forward: the head's kernels differ


def open_captured(
    runner: ModelRunner,
    drafter: Drafter | None,
    config: DraftConfig,
    vocab_size: int,
    tell: Tell,
    *,
    name: str,
    masks: bool,
) -> CapturedRounds | None:
    """Captured rounds for this target and drafter; None where there is no GPU or the model cannot be captured.
    ``name``: what to call the target where people are told so; ``masks``: requests may have grammars."""
    target = runner.on_device()
    if target is None or target.device.type != "cuda":
        return None
    model = drafter.on_device() if drafter is not None else None
    # Hugging Face's modules take ten times as long to walk through as fused kernels.
    slow = not target.compiled or (model is not None and not model.device_runner.compiled)
    fixed = config.gamma != "auto"
    lengths = draft_lengths(config.most, fixed=fixed, few=slow) if drafter is not None else (0,)
    overlap = config.overlap if config.overlap is not None else fixed and not slow
    kind = OverlappedRounds if overlap and model is not None else CapturedRounds
    with torch.cuda.device(target.device):
        rounds = kind(target, model, vocab_size=vocab_size, lengths=lengths, masks=masks)
        return rounds if _captured(rounds, name, tell, compiled=not slow) else None


def _captured(rounds: CapturedRounds, name: str, tell: Tell, *, compiled: bool) -> bool:
    started, telling = perf_counter(), False

    def say(text: str) -> None:
        nonlocal telling
        telling = True  # what is raised then is no fault of the model's
        tell(text)
        telling = False

    try:
        if compiled:
            say("compiling kernels")
            _compile(rounds)
        rounds.warm_up(lambda done, total: say(f"capturing rounds ({done} of {total})"))
    except Exception as error:  # a model that looks at its tensors on the host (most mixtures of experts do)
        if telling:
            raise
        log.warning("rounds are played step by step: %s cannot be captured (%s)", name, error)
        return False
    for runner in rounds.runners:
        _capture_reads(runner)
    log.info("captured %d programs in %.1f s", rounds.captured_programs, perf_counter() - started)
    return True


def _capture_reads(runner: DeviceRunner) -> None:
    try:
        runner.capture_reads()
    except Exception as error:  # memory, say: rounds are captured all the same
        log.warning("prompts are read launch by launch: reading cannot be captured (%s)", error)


@torch.inference_mode()
def _compile(rounds: CapturedRounds) -> None:
    """All kernels at once, before the first is wanted: one after another takes several times as long."""
    from ..machine.gpu.compile.precompile import rehearsal

    started = perf_counter()
    try:
        with rehearsal() as names:
            rehearse(rounds)
    except Exception as error:  # each is compiled where it is first used, then
        log.warning("kernels are compiled one by one: %s", error)
    else:
        log.info("compiled %d kernels in %.1f s", len(names), perf_counter() - started)


def rehearse(rounds: CapturedRounds) -> None:
    """Everything that will be captured or run, each once and briefly."""
    for body in rounds.rehearsed():
        body()
    for runner in rounds.runners:
        with runner.brief():
            _rehearse_reading(runner, rounds.lengths[-1] + 1 if not rounds.drafting else 1)


def _rehearse_reading(runner: DeviceRunner, most: int) -> None:
    """Prompts of every class of kernels, alone and together. ``most``: logits of so many tokens of a prompt are wanted,
    because guesses from the host may come with its end, and are judged in the forward that reads it."""
    slab = runner.slab
    alone = [(width, 1) for width in _PREFILLS] + [(_PREFILLS[1], keep) for keep in _KEPT if keep <= most]
    for width, keep in alone:
        tokens = torch.zeros(1, min(width, slab.capacity), dtype=torch.int64, device=runner.device)
        runner.forward(slice(0, 1), tokens, [0], keep=min(keep, tokens.shape[1]))
    for rows in sorted({min(rows, slab.rows) for rows in _TOGETHER}):
        before = slab.lengths[:rows]
        # The first prompt by itself is too long for the kernels that decode.
        runner.read([(row, [0] * (1 if row else min(_PREFILLS[0], runner.max_len))) for row in range(rows)])
        for row, length in enumerate(before):
            slab.truncate(row, length)
