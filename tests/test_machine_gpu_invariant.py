"""Invariant fused models: a token's logits are the same bits alone, among others and behind keys made in any company.

On a GPU: ``pytest -m gpu``. Without one: in Triton's interpreter (see ``test_machine_gpu``), where the order in which
a GPU adds does not show, but everything that is cut and put together again does.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_machine_gpu import DEVICE, INTERPRETED, SIZES, build_from, draw, kernels, truth
from transformers import AutoModelForCausalLM, LlamaConfig

from headstart import LLM, InvalidParameter, ModelRefused, SamplingParams
from headstart.machine import gpu
from headstart.machine.cpu import build
from headstart.machine.gpu.cut import cut
from headstart.testing import tiny_model

#: Widths whose kernels, tiles or parts differ. The last is a whole chunk of a prompt.
WIDTHS = (5, 19) if INTERPRETED else (3, 8, 9, 16, 17, 32, 33, 72, 100, 128, 512)

# By class of kernels: rows that are streamed, short ones, both; with and without head norms.
SHAPES: dict[str, dict[str, Any]] = {
    "streamed": {"hidden_size": 2560, "intermediate_size": 6912, "num_attention_heads": 20, "num_key_value_heads": 4},
    "short": {"hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9, "num_key_value_heads": 3},
}


@pytest.mark.parametrize("rows", [1, 2, 5, 32])
@pytest.mark.parametrize("width", [1, 3, 9, 16, 17, 32, 33, 65])
def test_parts_are_few_tokens_and_together_all_of_them(rows: int, width: int) -> None:
    places = torch.arange(rows * width).view(rows, width)
    lengths = torch.arange(rows) * 1000
    for keep in {0, 1, width - 1, width}:
        found, kept = [], []
        written = set()
        for part in cut(rows, width, keep, 16):
            mine = part.of(places)
            assert mine.shape == (part.rows, part.width)
            assert 0 < mine.numel() <= 16
            assert mine.is_contiguous()
            assert mine.data_ptr() % 16 == 0
            for row, line, length in zip(range(part.first, rows), mine.tolist(), part.lengths(lengths), strict=False):
                behind = {(row, at) for at in range(int(length) - row * 1000)}
                assert behind <= written  # the row's earlier tokens were read before
                written |= {(row, place % width) for place in line}
            found += mine.flatten().tolist()
            kept += mine[:, part.width - part.keep :].flatten().tolist()
        assert found == places.flatten().tolist()
        assert kept == places[:, width - keep :].flatten().tolist()


@pytest.mark.skipif(build.why_not() is not None, reason=str(build.why_not()))
def test_a_cpu_needs_nothing_for_it_but_its_kernels() -> None:
    model = tiny_model("llama", hidden_size=64, num_attention_heads=2, num_key_value_heads=1, head_dim=32)
    quiet, told = (LLM(model, None, quantization="int8", max_model_len=64, invariant=wish) for wish in (False, True))
    assert set(told.report.notes) - set(quiet.report.notes) == {
        "invariant: a token's logits are the same bits alone, in any batch and in any draft"
    }


def test_who_cannot_promise_it_refuses() -> None:
    with pytest.raises(ModelRefused, match="invariant=True needs Headstart's own kernels"):
        LLM(tiny_model("llama"), None, max_model_len=64, invariant=True)
    with pytest.raises(InvalidParameter, match="invariant must be True or False"):
        LLM(tiny_model("llama"), None, max_model_len=64, invariant="yes")


def large(shape: str, dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    sizes = SIZES | SHAPES[shape] | {"head_dim": 128 if shape == "streamed" else 64, "vocab_size": 30011}
    with torch.device(DEVICE):
        model = AutoModelForCausalLM.from_config(LlamaConfig(**sizes)).eval()
    for p in model.parameters():
        p.data = p.data.to(dtype)
    return model


class Reader:
    """An invariant model and one text, which is read into its rows in pieces."""

    def __init__(self, model: Any, *, rows: int, length: int, **options: Any) -> None:
        self.fused = gpu.fuse(model, rows=rows, capacity=length + 16, invariant=True, **options)
        self.text = torch.tensor([draw(length, 7)], device=DEVICE)

    def read(self, start: int, end: int, row: int = 0) -> torch.Tensor:
        """Logits [end - start, V]."""
        lengths = torch.tensor([start], device=DEVICE)
        return self.fused.forward(self.text[:, start:end], lengths, first_row=row)[0].clone()

    def one_by_one(self, end: int) -> torch.Tensor:
        return torch.cat([self.read(at, at + 1) for at in range(end)])

    def keys(self, row: int, end: int) -> list[torch.Tensor]:
        return [x[row, :, :end].clone() for pair in self.fused.cache for x in pair]


def check_company(reader: Reader, length: int, widths: tuple[int, ...]) -> torch.Tensor:
    """The logits of the text, one token at a time, and to the same bits in every other way."""
    alone, keys = reader.one_by_one(length), reader.keys(0, length)
    for width in widths:
        for buffer in (x for pair in reader.fused.cache for x in pair):
            buffer.fill_(7.0)
        found = torch.cat([reader.read(at, min(at + width, length), 1) for at in range(0, length, width)])
        assert torch.equal(found, alone), (width, float((found - alone).abs().max()))
        assert all(torch.equal(a, b) for a, b in zip(reader.keys(1, length), keys, strict=True)), width
    # Only the last ones are asked for: after a whole prompt, and after its last token behind warm keys.
    for start, keep in ((0, 1), (length - 1, 1), (length - 9, 4), (0, 18)):
        tokens, lengths = reader.text[:, start:length], torch.tensor([start], device=DEVICE)
        last = reader.fused.forward(tokens, lengths, keep=keep)[0]
        assert torch.equal(last, alone[length - keep :]), (start, keep)
    # Neighbours with other texts and lengths.
    rows = reader.fused.cache[0][0].shape[0]
    starts = [(length - 9 - 3 * row) % (length - 9) for row in range(rows)]
    for row in range(rows):
        reader.read(0, length, row)
    for width in (9,) if INTERPRETED else (1, 4, 9):
        tokens = torch.cat([reader.text[:, start : start + width] for start in starts])
        got = reader.fused.forward(tokens, torch.tensor(starts, device=DEVICE))
        for start, row in zip(starts, got, strict=True):
            assert torch.equal(row, alone[start : start + width]), (width, start)
    return alone


@kernels
@pytest.mark.skipif(not INTERPRETED, reason="large shapes and bfloat16 are for GPUs")
def test_in_any_company_interpreted() -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = LlamaConfig(**SIZES | sizes | {"num_hidden_layers": 2, "vocab_size": 32})
    model = build_from(config, 3, DEVICE, torch.float32)
    reader = Reader(model, rows=3, length=19)
    reader.text %= 32
    alone = check_company(reader, 19, WIDTHS)
    want = truth(model, reader.text[0].tolist())
    assert float((alone - want).norm() / want.norm()) < 2e-5


@kernels
@pytest.mark.skipif(INTERPRETED, reason="too large for the interpreter")
@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
@pytest.mark.parametrize("shape", SHAPES)
def test_in_any_company(shape: str, quantization: str | None) -> None:
    """Past 512 keys, where attention is split, and past 1,024, where it is split for narrow heads too."""
    model = large(shape, torch.bfloat16)
    check_company(Reader(model, rows=32, length=1100, quantization=quantization), 1100, WIDTHS)


@kernels
@pytest.mark.skipif(INTERPRETED, reason="graphs need a GPU")
def test_in_any_company_when_captured() -> None:
    """Eight rows of nine tokens, as a round that was captured verifies them."""
    reader = Reader(large("streamed", torch.bfloat16), rows=8, length=600)
    alone = reader.one_by_one(600)
    starts = [0, 500, 30, 511, 64, 503, 7, 560]
    for row in range(8):
        reader.read(0, 600, row)
    tokens = torch.zeros(8, 9, dtype=torch.int64, device=DEVICE)
    lengths = torch.zeros(8, dtype=torch.int64, device=DEVICE)
    reader.fused.forward(tokens, lengths + 9)  # compile outside the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits = reader.fused.forward(tokens, lengths)
    for row in range(8):
        reader.read(0, 600, row)
    for shift in (0, 3):
        at = [start + shift for start in starts]
        tokens.copy_(torch.cat([reader.text[:, start : start + 9] for start in at]))
        lengths.copy_(torch.tensor(at))
        graph.replay()
        for start, row in zip(at, logits, strict=True):
            assert torch.equal(row, alone[start : start + 9]), start


@kernels
@pytest.mark.skipif(INTERPRETED, reason="too large for the interpreter")
def test_texts_do_not_depend_on_company() -> None:
    """Sixteen requests, greedy and coupled: alone, eight and sixteen together, plain and drafted, cold and warm."""
    target, draft = large("streamed", torch.bfloat16), large("streamed", torch.bfloat16)
    with torch.no_grad():
        for p in draft.parameters():
            p.add_(torch.randn_like(p) * 0.1 * p.std() if p.dim() > 1 else 0)
    prompts = [[token % 30011 for token in draw(11 + 37 * (i % 5), i)] for i in range(16)]
    kinds = ({"temperature": 0.0}, {"temperature": 1.0, "verification": "coupled"})
    settings = [SamplingParams(max_tokens=64, seed=i, ignore_eos=True, **kinds[i % 2]) for i in range(16)]
    want: list[Any] = []
    for gamma in (0, 3, 8):
        llm = LLM(target, draft, gamma=gamma, max_rows=16, max_model_len=512, check=False, invariant=True)
        for together in (1, 8, 16, 16):
            found = []
            for at in range(0, 16, together):
                answers = llm.generate(prompts[at : at + together], settings[at : at + together])
                found += [answer.token_ids for answer in answers]
            want = want or found
            assert found == want, (gamma, together, [a == b for a, b in zip(found, want, strict=True)])
            if together == 8:
                llm.cold()  # the next pass reads everything again, the last one finds it warm
