"""``speculative_decode`` on padded batches: padding is never read, and what cannot be right is refused."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import pytest
import torch

from headstart import InvalidParameter, speculative_decode
from headstart.testing import tiny_model

PAD, TOKENS = 0, 8
PROMPTS = [[5, 6, 7, 8, 5, 6], [9, 3, 9], [11]]
GREEDY: dict[str, Any] = {"gamma": 3, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}


@lru_cache
def target(pad: int | None = PAD) -> Any:
    return tiny_model("llama", pad_token_id=pad)


def decode(ids: Any, pad: int | None = PAD, **arguments: Any) -> torch.Tensor:
    return speculative_decode(target(pad), target(pad), ids, **GREEDY | arguments).ids


def padded(side: str) -> tuple[torch.Tensor, torch.Tensor]:
    """PROMPTS as one tensor, and its mask."""
    width = max(map(len, PROMPTS))
    gaps = [[PAD] * (width - len(p)) for p in PROMPTS]
    rows = [gap + p if side == "left" else p + gap for p, gap in zip(PROMPTS, gaps, strict=True)]
    ones = [[0] * len(gap) + [1] * len(p) for p, gap in zip(PROMPTS, gaps, strict=True)]
    return torch.tensor(rows), torch.tensor(ones if side == "left" else [line[::-1] for line in ones])


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("kind", [torch.long, torch.bool, torch.float32])
def test_a_padded_row_is_answered_like_its_prompt_alone(side: str, kind: torch.dtype) -> None:
    ids, mask = padded(side)
    out = decode(ids, attention_mask=mask.to(kind))
    assert out.shape == (3, 6 + TOKENS)
    for row, prompt in zip(out.tolist(), PROMPTS, strict=True):
        alone = decode(torch.tensor(prompt))[0].tolist()
        assert alone[: len(prompt)] == prompt
        assert row == alone + [PAD] * (len(row) - len(alone))


def test_answers_are_those_of_hugging_face_on_the_same_tensors() -> None:
    ids, mask = padded("left")
    with torch.inference_mode():
        theirs = target().generate(
            ids, attention_mask=mask, max_new_tokens=TOKENS, do_sample=False, eos_token_id=None, pad_token_id=PAD
        )
    ours = decode(ids, attention_mask=mask)
    for row, reference, prompt in zip(ours.tolist(), theirs.tolist(), PROMPTS, strict=True):
        assert row[: len(prompt) + TOKENS] == prompt + reference[ids.shape[1] :]


def test_a_batch_that_looks_padded_needs_its_mask() -> None:
    for side in ("left", "right"):
        ids, _ = padded(side)
        with pytest.raises(InvalidParameter, match=r"row 1 begins or ends with token 0.*attention_mask") as caught:
            decode(ids)
        assert caught.value.field == "input_ids"
        with pytest.raises(InvalidParameter, match="attention_mask"):  # the model does not know, but the caller does
            decode(ids, pad=None, pad_token_id=PAD)
    own = target(None)
    own.generation_config.pad_token_id = PAD
    try:
        with pytest.raises(InvalidParameter, match="attention_mask"):
            speculative_decode(own, own, ids, **GREEDY)
    finally:
        own.generation_config.pad_token_id = None
    whole = torch.tensor([[PAD, 5, 6], [7, 8, 9]])  # with the mask, padding is what the mask says
    assert decode(whole, attention_mask=torch.ones_like(whole))[0, :3].tolist() == [PAD, 5, 6]


def test_what_is_not_padded_needs_no_mask() -> None:
    assert decode(torch.tensor([[5, 6, 7], [8, 9, 10]])).shape == (2, 3 + TOKENS)
    assert decode(torch.tensor([PAD, 5, 6]))[0, :3].tolist() == [PAD, 5, 6]  # one row has nothing to be padded to
    begins = 1  # where texts begin with the token that pads, as in some models
    assert decode(torch.tensor([[1, 5, 6], [1, 8, 9]]), pad=begins).shape == (2, 3 + TOKENS)
    assert decode(torch.tensor([[1], [1]]), pad=begins).shape == (2, 1 + TOKENS)
    with pytest.raises(InvalidParameter, match="row 1 begins"):
        decode(torch.tensor([[1, 5, 6], [1, 1, 9]]), pad=begins)


IDS = torch.tensor([[5, 6, 7], [8, 9, 10]])


@pytest.mark.parametrize(
    ("mask", "words"),
    [
        (torch.tensor([[1, 0, 1], [1, 1, 1]]), "has a hole in row 0"),
        (torch.tensor([[1, 1, 1], [0, 0, 0]]), "leaves nothing of row 1"),
        (torch.tensor([[1, 1, 1], [2, 1, 1]]), "must be 0 or 1"),
        (torch.tensor([[1.0, 1.0, 1.0], [0.5, 1.0, 1.0]]), "must be 0 or 1"),
        (torch.ones(2, 2), "must have the shape"),
        (torch.ones(3), "must have the shape"),
        (torch.ones(2, 1, 3, 3), "must have the shape"),
    ],
)
def test_a_mask_that_cannot_be_right_is_refused(mask: torch.Tensor, words: str) -> None:
    with pytest.raises(InvalidParameter, match=words) as caught:
        decode(IDS, attention_mask=mask)
    assert caught.value.field == "attention_mask"


def test_other_forms_and_limits() -> None:
    expected = decode(IDS)
    assert torch.equal(decode(IDS.numpy()), expected)
    assert torch.equal(decode(IDS.tolist()), expected)
    assert torch.equal(decode(IDS.to(torch.int32), attention_mask=np.ones((2, 3), dtype=np.int64)), expected)
    for wrong in (IDS.float(), IDS.bool(), IDS[None], torch.zeros(2, 0, dtype=torch.long)):
        with pytest.raises(InvalidParameter, match="input_ids"):
            decode(wrong)
    with pytest.raises(InvalidParameter, match="n must be 1"):
        decode(IDS, n=2)
    with pytest.raises(InvalidParameter, match="stop needs a tokenizer"):
        decode(IDS, stop="x")
    short = decode(torch.tensor([5, 6]), max_tokens=None)
    assert short.shape == (1, target().config.max_position_embeddings)


def test_short_rows_are_filled_with_the_models_padding() -> None:
    ids, mask = padded("left")
    out = decode(ids, attention_mask=mask, pad_token_id=77)
    assert out[2, 1 + TOKENS :].tolist() == [77] * 5
    assert decode(torch.where(mask == 1, ids, 42), pad=42, attention_mask=mask)[2, -1] == 42
    assert decode(ids, pad=None, attention_mask=mask)[2, -1] == 0
