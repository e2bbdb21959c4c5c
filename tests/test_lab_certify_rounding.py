"""What ``certify`` excuses: a tie where the engine's kernels round otherwise, and no more than that."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from headstart.lab.certifying.audit import Answer, audited
from headstart.lab.certifying.laws import first_tokens
from headstart.lab.certifying.truth import Forwards, Truth
from headstart.types import SamplingParams, TokenLogprob

SHAPES = (Forwards(1, 1), Forwards(8, 5))
NEAR = torch.tensor([10.0, 9.8, 0.0, 0.0])  # token 1 is 0.2 behind: 1.6 times what rounding explains (0.125)


def rounded(reference: torch.Tensor, narrow: torch.Tensor, wide: torch.Tensor, rounding: float = 0.0) -> Truth:
    """A target whose logits are so by the reference, and by the engine's kernels in narrow and in wide forwards: [V],
    the same everywhere, or [n, V] of the last places of a text."""
    kernels, size = {SHAPES[0]: narrow, SHAPES[1]: wide}, reference.shape[-1]

    def last(logits: torch.Tensor, keep: int) -> torch.Tensor:
        return logits.expand(keep, size) if logits.dim() == 1 else logits[-keep:]

    return Truth(
        "", False, 2.0**-8, 2.0, size, rounding, lambda text, keep: last(reference, keep),
        lambda text, keep, shape=SHAPES[0]: last(kernels[shape], keep), SHAPES,
    )  # fmt: skip


def wrong(truth: Truth, *tokens: int) -> int:
    """How many of these greedy tokens are wrong."""
    return audited(Answer((2, 3), SamplingParams(temperature=0, max_tokens=len(tokens)), tokens), truth).wrong


@pytest.mark.parametrize(
    ("behind", "narrow", "wide", "wrong"),
    [
        (0.1, 0.1, 0.1, 0),  # within rounding of the best (0.125)
        (0.2, 0.0, 0.2, 0),  # not so, but right by the engine's own kernels, a token at a time
        (0.2, 0.2, 0.0, 0),  # or in forwards as wide as a round's
        (0.2, 0.2, 0.2, 1),  # wrong by all
        (0.3, 0.0, 0.0, 1),  # so far off that nothing excuses it
    ],
)
def test_kernels_that_round_otherwise_are_asked_too(behind: float, narrow: float, wide: float, wrong: int) -> None:
    """Token 1 is so far behind token 0 by the plain pass, and by the engine's kernels; about the rest they agree."""
    truth = rounded(*(torch.tensor([10.0, 10.0 - gap, *[0.0] * 58]) for gap in (behind, narrow, wide)))
    found = audited(Answer((2, 3), SamplingParams(temperature=0, max_tokens=2), (0, 1)), truth)
    assert (found.wrong, found.positions, found.ties) == (wrong, 2, 1 - wrong)
    assert found.by_kernels == (not wrong and behind > 0.125), "it is told"


@pytest.mark.parametrize(
    ("behind", "one", "other", "wrong"),
    [
        (0.2, 0.05, 0.05, 0),
        (0.2, 0.035, 0.035, 0),
        (0.2, 0.0315, 0.0315, 1),  # 1.51 times as much as is usual
        (0.2, 0.01, 0.01, 1),
        (0.2, 0.05, 0.0, 0),
        (0.2, 0.0445, 0.0, 1),  # 1.51 times over both shapes
        (0.3, 0.05, 0.05, 1),  # twice as much as is usual is never excused
    ],
)
def test_a_place_that_rounds_more_than_others_is_measured(behind: float, one: float, other: float, wrong: int) -> None:
    """Plain forwards of the engine's kernels differ so much there, about tokens that nobody chose."""
    near, far = torch.tensor([10.0, 10.0 - behind, 0.0, 0.0]), torch.tensor([0.0, 0.0, 1.0, -1.0])
    answer = Answer((2, 3), SamplingParams(temperature=0, max_tokens=1), (1,))
    assert audited(answer, rounded(near, near + one * far, near - other * far)).wrong == wrong


def test_it_is_measured_at_that_very_place() -> None:
    """Of two tokens that are 0.2 behind, one stands where rounding is strong, or where the kernels say so, too."""
    calm, right = (torch.tensor([10.0, second, *[0.0] * 58]) for second in (9.8, 10.0))
    far = torch.tensor([0.0, 0.0, *[0.05, -0.05] * 29])
    everywhere = torch.stack([calm] * 3)
    for place in range(2):  # the last row is of what follows the text
        noise = torch.stack([far * (at == place) for at in range(3)])
        truth = rounded(everywhere, everywhere + noise, everywhere - noise)
        assert [wrong(truth, *tokens) for tokens in ((1, 0), (0, 1), (1, 1))] == [place, 1 - place, 1]
        own = torch.stack([right if at == place else calm for at in range(3)])
        for narrow, wide in ((own, everywhere), (everywhere, own)):
            truth = rounded(everywhere, narrow, wide)
            assert [wrong(truth, *tokens) for tokens in ((1, 0), (0, 1), (1, 1))] == [place, 1 - place, 1]


def test_what_moves_all_logits_and_what_nobody_would_say_is_no_rounding() -> None:
    """Only what kernels make of the likeliest tokens counts, and only by how much they differ from each other."""
    assert wrong(rounded(NEAR, NEAR + 0.5, NEAR - 0.5), 1) == 1
    many = torch.cat([NEAR, torch.linspace(-1.0, -2.0, 46), torch.full((50,), -9.0)])
    noise = torch.tensor([0.0, 0.0, *[0.1, -0.1] * 49])
    likely = torch.arange(100) < 50
    assert wrong(rounded(many, many + noise * ~likely, many - noise * ~likely), 1) == 1
    assert wrong(rounded(many, many + noise * likely, many - noise * likely), 1) == 0


def test_a_tie_is_twice_the_usual_at_the_most() -> None:
    """However far the engine's kernels are from the reference; and nothing where they are to be the same bits."""
    for top, usual in ((0.1, 0.125), (15.0, 0.125), (17.0, 0.25), (-33.0, 0.5)):
        row = np.array([top, 0.0, -np.inf])
        for rounding, tie in ((0.0, usual), (1.5 * usual, 1.5 * usual), (100.0, 2 * usual)):
            assert rounded(NEAR, NEAR, NEAR, rounding).tie(row) == tie
    assert wrong(rounded(NEAR, NEAR, NEAR, 0.21), 1) == 0
    other = torch.tensor([10.0, 9.45, 0.0, 0.0])
    assert wrong(rounded(other, NEAR, NEAR, 100.0), 1) == 1, "0.55, and all excuses together end at 0.5"
    exact = replace(rounded(NEAR, NEAR, NEAR, 100.0), exact=True, kernels=None)
    assert wrong(exact, 1) == 1
    assert exact.tie(np.array([10.0, 9.8])) == 0.0


@pytest.mark.parametrize("shift", [0.0, 0.02, 0.6])
def test_laws_of_the_engines_kernels_excuse_a_little(shift: float) -> None:
    """Twice the distance at which the kernels' law lies, and a tenth at the most."""
    reference = torch.tensor([1.0, 0.9, 0.2, -8.0])
    other = reference + torch.tensor([0.0, shift, 0.0, 3.0 * (shift > 0)])  # the last is too rare to count
    params = SamplingParams(temperature=1.0, max_tokens=1)
    law = first_tokens(rounded(reference, other, reference), (2, 3), params, (4,))
    p, moved = (logits.double().softmax(0) for logits in (reference, other))
    distance = float(((moved - p)[:3] ** 2 / p[:3]).sum())
    assert law.excused == pytest.approx(min(0.1, 4 * distance), rel=1e-6)
    assert (law.excused == 0.1) == (shift > 0.1)


@pytest.mark.parametrize(("narrow", "wide", "wrong"), [(0.4, 0.0, 0), (0.0, 0.4, 0), (0.0, 0.0, 1), (0.6, 0.6, 1)])
def test_so_they_are_about_log_probabilities(narrow: float, wide: float, wrong: int) -> None:
    """One is told 0.4 off, where 0.25 is rounding; the engine's own kernels are so far off, or not at all."""

    def said(more: float) -> torch.Tensor:
        return torch.tensor([0.0, 9.0, -3.0 + more, 0.0])

    told = said(0.6 if narrow > 0.5 else 0.4).log_softmax(0)
    logprobs = (TokenLogprob(1, float(told[1]), {2: float(told[2])}),)
    answer = Answer((0, 3), SamplingParams(temperature=0, max_tokens=1, logprobs=1), (1,), logprobs=logprobs)
    assert audited(answer, rounded(said(0), said(narrow), said(wide))).wrong == wrong
