"""Masks on their way to the device: every node has its own, rows without one have all bits set, whatever was there."""

from __future__ import annotations

import numpy as np
import torch
from grammars import packed

from headstart.engine.device_masks import DeviceMasks
from headstart.maths.bitmask import masked, unpacked

WIDTH = 70


def allowed(masks: DeviceMasks) -> torch.Tensor:
    """[rows, nodes, WIDTH]"""
    return masked(torch.zeros(*masks.bits.shape[:2], WIDTH), masks.bits).isfinite()


def test_what_is_sent_is_what_is_allowed() -> None:
    made = DeviceMasks(4, 3, WIDTH, torch.device("cpu"))
    assert allowed(made).all()
    odd, low = packed(range(1, 96, 2), 96), packed(range(5), 40)  # one is longer than the vocabulary, one is shorter
    lines = [[], [odd, None, low], [None, None], [low]]
    made.send(lines, 3)
    assert torch.equal(allowed(made), unpacked(lines, 3, WIDTH, "cpu"))
    made.send([[odd], [], [low, odd]], 2)  # fewer rows and nodes
    assert torch.equal(allowed(made)[:3, :2], unpacked([[odd], [], [low, odd]], 2, WIDTH, "cpu"))
    assert allowed(made)[3].all(), "a row that is idle now"
    made.send([[None], [], [None]], 1)
    assert allowed(made).all(), "none of the rows has anything forbidden any more"
    made.send([[np.zeros(3, np.uint32)]], 1)
    assert not allowed(made)[0, 0].any()
