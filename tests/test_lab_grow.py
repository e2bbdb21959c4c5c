"""A grown model computes what the small one computes; a cut draft is the layers it names."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from headstart.lab import grow as room
from headstart.lab.grow import SHAPES, Shape, grow, grow_tensors, shares


def tiny(*, tied: bool = True, seed: int = 0, **changes: object) -> LlamaForCausalLM:
    """9 heads on 3 key-value heads, as SmolLM2-135M has; norm weights away from one, so that a lost one shows."""
    sizes: dict[str, object] = {
        "vocab_size": 97,
        "hidden_size": 72,
        "intermediate_size": 80,
        "num_hidden_layers": 3,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 8,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-3,  # large, so that an epsilon that was not rescaled shows
        "tie_word_embeddings": tied,
    }
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**{**sizes, **changes})).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(1 + 0.3 * torch.randn_like(p) if "norm" in name else 0.15 * torch.randn_like(p))
    return model


def logits(model: torch.nn.Module) -> torch.Tensor:
    tokens = torch.arange(2 * 23, device=next(model.parameters()).device).reshape(2, 23) * 7 % 97
    with torch.inference_mode():
        return model(tokens).logits


WIDE = Shape(layers=7, hidden=200, ffn=300, heads=16, kv_heads=4, head_dim=16)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    "shape",
    [
        WIDE,
        Shape(layers=3, hidden=72, ffn=80, heads=9, kv_heads=3, head_dim=8),  # nothing grows
        Shape(layers=4, hidden=512, ffn=81, heads=32, kv_heads=8, head_dim=24),  # 7 copies, three times the width
        Shape(layers=3, hidden=128, ffn=160, heads=9, kv_heads=9, head_dim=8),  # no groups any more
    ],
)
def test_logits_stay(shape: Shape, tied: bool) -> None:
    small = tiny(tied=tied)
    big = grow(small, shape)
    assert room._shape_of(big.config) == shape
    want = logits(small)
    torch.testing.assert_close(logits(big), want, atol=2e-5 * float(want.abs().max()), rtol=0)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("biases", [True, False])
def test_a_padded_vocabulary_keeps_the_logits_of_the_others(biases: bool, tied: bool) -> None:
    """With biases it is a Qwen2, whose biases are zero. A padded id has minus the mean logit."""
    small = tiny(tied=tied)
    big = grow(small, replace(WIDE, vocab=110, biases=biases))
    assert isinstance(big, Qwen2ForCausalLM if biases else LlamaForCausalLM)
    assert (big.config.vocab_size, big.lm_head.weight.shape[0]) == (110, 110)
    found = [p for name, p in big.named_parameters() if name.endswith("bias")]
    assert len(found) == (3 * WIDE.layers if biases else 0)
    assert not any(p.any() for p in found)
    want = logits(small)
    tolerance = {"atol": 2e-5 * float(want.abs().max()), "rtol": 0}
    torch.testing.assert_close(logits(big)[..., :97], want, **tolerance)
    padded = -want.mean(-1, keepdim=True).expand(-1, -1, 13)
    torch.testing.assert_close(logits(big)[..., 97:], padded, **tolerance)


def test_tensors_come_one_by_one_and_are_the_grown_models() -> None:
    """Whoever writes them away needs no room for the model; norms stay float32, in whatever dtype the matrices are."""
    small = tiny()
    _, tensors = grow_tensors(small, WIDE, torch.device("cpu"), torch.float16)
    assert next(tensors)[0] == "model.embed_tokens.weight"
    _, tensors = grow_tensors(small, WIDE, torch.device("cpu"), torch.float16)
    found = dict(tensors)
    want = grow(small, WIDE, dtype=torch.float16).state_dict()
    assert found.keys() | {"lm_head.weight"} == want.keys()
    for name, tensor in found.items():
        assert tensor.dtype == (torch.float32 if tensor.dim() == 1 else torch.float16), name
        assert torch.equal(tensor.half(), want[name]), name


def test_cached_decoding_stays() -> None:
    """Keys of the grown heads carry the same rotary angles at every position, so greedy text is the same."""
    small = tiny()
    prompt = torch.tensor([[5, 7, 11, 13]])
    options = {"max_new_tokens": 40, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    assert torch.equal(grow(small, WIDE).generate(prompt, **options), small.generate(prompt, **options))


@pytest.mark.parametrize("part", ["norm_scale", "eps_scale", "query_scale"])
def test_every_scale_is_needed(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted faults: leave one rescaling out and the logits move."""
    small = tiny()
    plan = room._plan

    def broken(old: Shape, new: Shape) -> room._Plan:
        good = plan(old, new)
        return room._Plan(**{**good.__dict__, part: 1.0})

    monkeypatch.setattr(room, "_plan", broken)
    want = logits(small)
    assert float((logits(grow(small, WIDE)) - want).abs().max()) > 1e-3 * float(want.abs().max())


def test_weights_are_not_zeros() -> None:
    """A step must read real numbers: zeros stand only where the function needs them."""
    big = grow(tiny(), Shape(layers=3, hidden=256, ffn=320, heads=12, kv_heads=3, head_dim=16))
    full, some = ("q_proj", "v_proj", "gate_proj", "up_proj"), ("k_proj", "o_proj", "down_proj")
    for name, p in big.named_parameters():
        zeros = float((p == 0).float().mean())
        if any(part in name for part in full):
            assert zeros == 0, name
        if any(part in name for part in some):
            assert zeros <= 0.6, name


def test_added_layers_add_nothing_but_compute() -> None:
    big = grow(tiny(), WIDE)
    added = [layer for layer in big.model.layers if not layer.self_attn.o_proj.weight.any()]
    assert len(added) == 4
    for layer in added:
        assert not layer.mlp.down_proj.weight.any()
        assert bool((layer.mlp.up_proj.weight != 0).all())
        assert bool((layer.self_attn.q_proj.weight != 0).all())


def test_shares_add_up_exactly() -> None:
    for n in range(1, 30):
        assert sum(shares(n)) == 1.0
        assert len(shares(n)) == n


def test_named_shapes_have_exact_norms() -> None:
    """The copies chosen for SmolLM2-135M scale its norms without rounding, in bfloat16 too."""
    small = Shape(layers=30, hidden=576, ffn=1536, heads=9, kv_heads=3, head_dim=64)
    for name, copies in {"llama-3-8b": 4, "qwen2.5-32b": 5, "0.5b": 1}.items():
        plan = room._plan(small, SHAPES[name])
        assert int((plan.hidden.source == 0).sum()) == copies
        assert plan.norm_scale == 0.75
        assert sorted(i for i in plan.layers if i >= 0) == list(range(30))


def test_bfloat16_growth_is_close_to_the_bfloat16_model() -> None:
    small = tiny()
    with torch.no_grad():
        for p in small.parameters():
            p.copy_(p.bfloat16())
    big = grow(small, WIDE, dtype=torch.bfloat16)
    assert big.dtype == torch.bfloat16
    want = logits(small)
    error = (logits(big.float()) - want).norm() / want.norm()
    assert float(error) < 0.02


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        (Shape(layers=3, hidden=72, ffn=80, heads=9, kv_heads=3, head_dim=8, vocab=96), "vocabulary"),
        (Shape(layers=2, hidden=72, ffn=80, heads=9, kv_heads=3, head_dim=8), "layers"),
        (Shape(layers=3, hidden=72, ffn=80, heads=9, kv_heads=3, head_dim=12), "multiple"),
        (Shape(layers=3, hidden=72, ffn=80, heads=10, kv_heads=3, head_dim=8), "multiple"),
        (Shape(layers=3, hidden=72, ffn=80, heads=10, kv_heads=5, head_dim=8), "no room"),
    ],
)
def test_impossible_shapes_are_refused(shape: Shape, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        grow(tiny(), shape)


def test_only_llama_grows() -> None:
    other = Qwen2ForCausalLM(
        Qwen2Config(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, vocab_size=9)
    )
    with pytest.raises(ValueError, match="Qwen2"):
        grow(other, WIDE)
    with pytest.raises(ValueError, match="bias"):
        grow(tiny(attention_bias=True), WIDE)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_real_size_on_the_device() -> None:
    """SmolLM2-135M's shape with random weights, grown to Llama-3-8B's, in float32 on the GPU."""
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
    )
    torch.manual_seed(0)
    small = LlamaForCausalLM(config).eval().cuda()
    want = logits(small)
    big = grow(small, "llama-3-8b")
    torch.testing.assert_close(logits(big), want, atol=1e-4 * float(want.abs().max()), rtol=0)
