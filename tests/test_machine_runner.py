"""The recompute oracle: whatever path led to a row's keys, its logits equal those of one fresh pass without a cache."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest
import torch
from slab_tools import check_slab
from transformers import PreTrainedModel

from headstart.errors import ModelRefused
from headstart.machine.attention import GROUPED, wants_grouped
from headstart.machine.kvcache import Slab
from headstart.machine.runner import EagerRunner, attention_kinds, context_limit
from headstart.maths.tree import Topology
from headstart.testing import ARCHITECTURES, REFUSED_ARCHITECTURES, TINY_VOCABULARY, tiny_model

TOLERANCE = 2e-5  # of logits of size 1 and more, in float32


class Oracle:
    """Drives a runner like the engine does and keeps the largest difference from fresh full passes."""

    def __init__(self, model: PreTrainedModel, runner: EagerRunner, seed: int = 0) -> None:
        self.model, self.runner, self.slab = model, runner, runner.slab
        self.rng = random.Random(seed)
        self.worst = 0.0
        self.truth: dict[str, list[int]] = {}

    def junk(self, count: int) -> list[int]:
        return [self.rng.randrange(3, TINY_VOCABULARY) for _ in range(count)]

    def compare(self, logits: torch.Tensor, tokens: Sequence[int]) -> None:
        """``logits`` [n, V] against a fresh pass over ``tokens``, at its last n positions."""
        with torch.inference_mode():
            ids = torch.tensor([list(tokens)], device=self.runner.device)
            fresh = self.model(input_ids=ids, use_cache=False).logits[0, -len(logits) :]
        scale = max(1.0, float(fresh.abs().max()))
        self.worst = max(self.worst, float((logits - fresh).abs().max()) / scale)

    def admit(self, key: str, prompt: list[int], chunk: int = 5) -> int:
        """Prefill all but the last token, which the first round feeds."""
        warm = self.slab.acquire(key, prompt)
        if prompt[warm:-1]:
            logits = self.runner.prefill(self.slab.row(key), prompt[warm:-1], chunk=chunk)
            self.compare(logits[0], prompt[:-1])
        self.slab.promote(key)
        self.truth[key] = list(prompt)
        return warm

    def round(self, drafted: int, accepted: dict[str, int]) -> None:
        """A chain round over all ready rows: ``accepted[key]`` drafted tokens turn out right, the rest is garbage."""
        keys = self.slab.ready_keys
        drafts = [self.junk(drafted) for _ in keys]
        feed = [[self.truth[key][-1], *draft] for key, draft in zip(keys, drafts, strict=True)]
        starts = [len(self.truth[key]) - 1 for key in keys]
        assert starts == self.slab.lengths[: len(keys)]
        logits = self.runner.forward(slice(0, len(keys)), torch.tensor(feed, device=self.runner.device), starts)
        for row, key in enumerate(keys):
            kept = drafts[row][: accepted[key]]
            self.compare(logits[row, : len(kept) + 1], [*self.truth[key], *kept])
            self.slab.extend(row, [self.truth[key][-1], *kept])
            self.truth[key] += [*kept, *self.junk(1)]

    def tree_round(self, parents: Sequence[tuple[int, ...]], paths: Sequence[Sequence[int]]) -> None:
        """A tree round: each row drafts its own tree, and ``paths[row]`` (node numbers, root excluded) is accepted."""
        keys = self.slab.ready_keys
        topology = Topology.of(parents, self.runner.device)
        drafts = [self.junk(topology.width - 1) for _ in keys]
        feed = [[self.truth[key][-1], *draft] for key, draft in zip(keys, drafts, strict=True)]
        starts = [len(self.truth[key]) - 1 for key in keys]
        ids = torch.tensor(feed, device=self.runner.device)
        logits = self.runner.forward(slice(0, len(keys)), ids, starts, topology)
        for row, key in enumerate(keys):
            for node in range(len(parents[row]) + 1):  # every branch, accepted or not
                line = [i for i in range(1, topology.width) if topology.ancestors[row, node, i]]
                self.compare(logits[row, node][None], [*self.truth[key], *(drafts[row][i - 1] for i in line)])
            kept = [drafts[row][node - 1] for node in paths[row]]
            self.slab.keep(row, starts[row], paths[row])
            self.slab.extend(row, [self.truth[key][-1], *kept])
            self.truth[key] += [*kept, *self.junk(1)]


TREES = [(-1, -1, 0, 1, 3, 1), (-1, 0, -1, 2, 2), (-1, -1)]
PATHS = [[2, 4, 5], [3, 5], [2]]  # none of them is the first branch


def whole_life(oracle: Oracle) -> None:
    """Ragged admission, garbage drafts, rollback, a tree, neighbours that leave, and a warm newcomer."""
    system = oracle.junk(12)
    for key, length in (("a", 3), ("b", 11), ("c", 19)):
        oracle.admit(key, system[:length] if length < 12 else system + oracle.junk(length - 12))
    oracle.round(4, {"a": 0, "b": 2, "c": 4})
    oracle.round(0, {"a": 0, "b": 0, "c": 0})
    oracle.tree_round(TREES, PATHS)
    oracle.round(3, {"a": 3, "b": 0, "c": 1})
    oracle.slab.release("a")  # the others move up
    oracle.round(2, {"b": 1, "c": 0})
    assert oracle.admit("d", [*system, *oracle.junk(4)]) == 12, "the system prompt is warm"
    oracle.tree_round([TREES[1], TREES[0], TREES[2]], [PATHS[1], PATHS[0], []])
    oracle.round(1, {"b": 1, "c": 1, "d": 0})
    check_slab(oracle.slab)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_path_gives_the_logits_of_a_fresh_pass(name: str) -> None:
    model = tiny_model(name)
    oracle = Oracle(model, EagerRunner(model, rows=4, max_len=96))
    whole_life(oracle)
    assert oracle.worst < TOLERANCE
    assert max(map(len, oracle.truth.values())) > 24, "sequences must outgrow the sliding windows"


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2-mixed", "gpt2"])
def test_eager_attention_gives_them_too(name: str) -> None:
    model = tiny_model(name)
    model.set_attn_implementation("eager")
    oracle = Oracle(model, EagerRunner(model, rows=4, max_len=96))
    whole_life(oracle)
    assert oracle.worst < TOLERANCE


def test_grouped_attention_is_lent_for_one_forward_only(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    runner = EagerRunner(model, rows=2, max_len=32)
    used: list[str] = []
    own = model.config._attn_implementation
    step = model.model.layers[0].self_attn.forward

    def spy(*args, **kwargs):  # type: ignore[no-untyped-def]
        used.append(model.config._attn_implementation)
        return step(*args, **kwargs)

    monkeypatch.setattr(model.model.layers[0].self_attn, "forward", spy)
    tokens = torch.tensor([[5, 6, 7], [8, 9, 10]])
    ours = runner.forward(slice(0, 2), tokens, [0, 0])
    torch.testing.assert_close(ours, model(tokens).logits)
    assert used == [GROUPED, own] == ["headstart_grouped", "sdpa"]
    monkeypatch.setattr(model.model, "norm", None)
    with pytest.raises(TypeError):
        runner.forward(slice(0, 2), tokens, [0, 0])
    assert model.config._attn_implementation == own, "given back even when the forward fails"
    assert not wants_grouped(tiny_model("gpt2").config, runner.device), "one key head for each query head already"
    assert not wants_grouped(tiny_model("gemma2").config, runner.device), "needs eager attention for its soft cap"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_gpu_gives_them_too(name: str) -> None:
    model = tiny_model(name).cuda()
    oracle = Oracle(model, EagerRunner(model, rows=4, max_len=96))
    whole_life(oracle)
    assert oracle.worst < 10 * TOLERANCE, "other kernels for other widths, but float32 all the same"
    assert EagerRunner(tiny_model(name, dtype=torch.bfloat16).cuda(), rows=1, max_len=32).device.type == "cuda"


class Narrow(EagerRunner):
    """Planted bug: sliding layers judge a tree node by its slot, not by its position."""

    def _masks(self, positions, starts, low, high, tree):  # type: ignore[no-untyped-def]
        if tree is not None:
            positions = starts + self._count[: tree.width]
        return super()._masks(positions, starts, low, high, tree)


class Blind(EagerRunner):
    """Planted bug: tree nodes see their cousins."""

    def _masks(self, positions, starts, low, high, tree):  # type: ignore[no-untyped-def]
        return super()._masks(positions, starts, low, high, None)


class Flat(EagerRunner):
    """Planted bug: sliding windows are forgotten."""

    def __init__(self, *args, **kwargs):  # type: ignore[no-untyped-def]
        super().__init__(*args, **kwargs)
        self.kinds = dict.fromkeys(self.kinds)


class Untidy(Slab):
    """Planted bug: accepted tree nodes are not moved together."""

    def keep(self, row: int, start_length: int, path: Sequence[int]) -> None:
        pass


def untidy(model: PreTrainedModel, **sizes: int) -> EagerRunner:
    runner = EagerRunner(model, **sizes)
    runner.slab = Untidy(sizes["rows"], sizes["max_len"])
    return runner


@pytest.mark.parametrize("plant", [Narrow, Blind, Flat, untidy])
def test_the_oracle_notices_planted_bugs(plant: Callable[..., EagerRunner]) -> None:
    model = tiny_model("mistral")
    oracle = Oracle(model, plant(model, rows=4, max_len=96, probe=False))
    whole_life(oracle)
    assert oracle.worst > 100 * TOLERANCE


def test_the_end_of_a_learned_position_table_can_be_reached() -> None:
    model = tiny_model("gpt2", n_positions=32)
    oracle = Oracle(model, EagerRunner(model, rows=2, max_len=32))
    oracle.admit("a", oracle.junk(30))
    oracle.admit("b", oracle.junk(5))
    oracle.round(6, {"a": 0, "b": 4})  # row a's padding points past the table
    oracle.round(6, {"a": 0, "b": 4})
    assert oracle.worst < TOLERANCE


@pytest.mark.parametrize("name", ["llama", "gpt-j", "falcon"])
def test_keep_limits_the_logits(name: str) -> None:
    runner = EagerRunner(tiny_model(name), rows=2, max_len=32)
    tokens = torch.tensor([[5, 6, 7, 8], [9, 10, 11, 12]])
    full = runner.forward(slice(0, 2), tokens, [0, 0])
    assert full.shape == (2, 4, runner.vocab_size)
    last = runner.forward(slice(0, 2), tokens, [0, 0], keep=2)
    torch.testing.assert_close(last, full[:, -2:])
    none = runner.forward(slice(0, 2), tokens, [0, 0], keep=0)
    assert none.shape == (2, 0, runner.vocab_size)
    torch.testing.assert_close(runner.forward(slice(1, 2), tokens[1:, 3:], [3]), full[1:, 3:])


def test_prefill_cut_anywhere_is_the_same() -> None:
    model = tiny_model("gemma3")
    prompt = Oracle(model, EagerRunner(model, rows=1, max_len=64)).junk(30)
    results = []
    for chunk in (1, 7, 30, 500):
        runner = EagerRunner(model, rows=1, max_len=64)
        results.append(runner.prefill(0, prompt, chunk=chunk))
        assert runner.slab.tokens[0] == prompt
        again = runner.prefill(0, prompt[20:], start=20)  # rolls back and feeds the end once more
        torch.testing.assert_close(again, results[-1], atol=1e-5, rtol=1e-5)
    for other in results[1:]:
        torch.testing.assert_close(other, results[0], atol=1e-5, rtol=1e-5)
    with pytest.raises(ValueError, match="nothing to prefill"):
        runner.prefill(0, [])


def test_arguments_that_do_not_agree_are_refused() -> None:
    runner = EagerRunner(tiny_model("llama"), rows=2, max_len=32)
    tokens = torch.tensor([[5, 6, 7]])
    with pytest.raises(ValueError, match="do not agree"):
        runner.forward(slice(0, 2), tokens, [0, 0])
    with pytest.raises(ValueError, match="do not agree"):
        runner.forward(slice(2, 3), tokens, [0])
    with pytest.raises(ValueError, match="tree of 4 nodes"):
        runner.forward(slice(0, 1), tokens, [0], Topology.of([(-1, -1, 0)], "cpu"))


@pytest.mark.parametrize("name", [name for name in REFUSED_ARCHITECTURES if name not in ("mamba", "qwen3-next")])
def test_the_probe_refuses_what_cannot_follow_a_mask(name: str) -> None:
    """Loading refuses these by their config already; the probe would find them without knowing their names."""
    with pytest.raises(ModelRefused, match="use a decoder-only model"):
        EagerRunner(tiny_model(name), rows=1, max_len=32)


def test_the_probe_refuses_a_model_that_ignores_its_positions() -> None:
    model = tiny_model("llama")
    honest = model.forward

    def forward(input_ids, position_ids=None, **rest):  # type: ignore[no-untyped-def]
        return honest(input_ids=input_ids, **rest)

    model.forward = forward  # type: ignore[method-assign]
    with pytest.raises(ModelRefused, match="does not follow the mask and the positions"):
        EagerRunner(model, rows=1, max_len=32)


def test_the_probe_refuses_nan() -> None:
    model = tiny_model("llama")
    with torch.no_grad():
        model.lm_head.weight[5] = float("nan")
    with pytest.raises(ModelRefused, match="nan"):
        EagerRunner(model, rows=1, max_len=32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_the_probe_allows_for_rounding(dtype: torch.dtype) -> None:
    runner = EagerRunner(tiny_model("qwen2-mixed", dtype=dtype), rows=1, max_len=32)
    assert runner.dtype == dtype
    assert len(runner.slab.layers) == 3, "the probe allocates the slab"
    assert runner.slab.layers[0].keys.dtype == dtype


def test_kinds_and_limits_are_read_from_the_config() -> None:
    config = tiny_model("gemma2").config
    assert attention_kinds(config) == {"sliding_attention": 8, "full_attention": None}
    assert attention_kinds(tiny_model("mistral").config) == {"sliding_attention": 8}
    assert attention_kinds(tiny_model("llama4").config) == {"chunked_attention": 8, "full_attention": None}
    assert attention_kinds(tiny_model("gpt2").config) == {"full_attention": None}
    assert context_limit(tiny_model("gpt2").config) == 256
    factors = [1.0] * 6
    rope = {"rope_type": "longrope", "short_factor": factors, "long_factor": factors, "rope_theta": 10000.0}
    long = tiny_model("phi3", original_max_position_embeddings=64, rope_parameters=rope)
    assert context_limit(long.config) == 64
