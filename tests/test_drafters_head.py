"""The head drafter: it can never change what is generated, and it drafts what its training taught it to draft."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from test_controller import FLAT, play
from transformers import PreTrainedModel

from headstart import LLM, InvalidParameter, ModelRefused, SamplingParams
from headstart.config import EngineConfig
from headstart.control.adaptive import AdaptiveController
from headstart.control.controller import FixedController
from headstart.distill.shapes import head_for
from headstart.distill.students import Batch, HeadStudent, Teacher
from headstart.drafters.draft_sampler import DraftSampler
from headstart.drafters.head import HeadDrafter
from headstart.engine.engine import Engine
from headstart.machine import int8
from headstart.machine.head import HeadNet, head_folder, load_head, save_head
from headstart.machine.load.embedded import embedded_draft
from headstart.machine.runner import EagerRunner
from headstart.testing import TINY_VOCABULARY, tiny_model
from headstart.types import DraftView, Proposal, Request

LONGEST = 96
TOKENS = 20
SETTINGS = {
    "greedy": SamplingParams(temperature=0, max_tokens=TOKENS),
    "coupled": SamplingParams(temperature=0.8, top_p=0.9, seed=5, max_tokens=TOKENS, verification="coupled"),
}


def prompts(count: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(3, TINY_VOCABULARY, (3 + 5 * i,), generator=generator).tolist() for i in range(count)]


@lru_cache(maxsize=2)
def target(architecture: str = "llama") -> PreTrainedModel:
    """Repeats itself enough for a rough head to be right now and then: what it says depends on the last token most."""
    model = tiny_model(architecture)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if any(part in name for part in ("o_proj", "down_proj", "c_proj")) and parameter.dim() > 1:
                parameter.mul_(0.05)
    return model


@lru_cache(maxsize=2)
def head(architecture: str = "llama", window: int = 512) -> HeadNet:
    """A head that adds little to the token it reads, and reads the target's embeddings, so that it is often right."""
    torch.manual_seed(0)
    model = target(architecture)
    net = head_for(model, torch.arange(0, TINY_VOCABULARY - 20), ffn=32, window=window)
    embedding = model.get_input_embeddings().weight.detach()
    with torch.no_grad():
        net.embed.copy_(8 * torch.eye(net.config.width, embedding.shape[1]))
        net.out.mul_(0.1)
        net.down.mul_(0.1)
        net.head.copy_(model.get_output_embeddings().weight[net.ids])
    return net


class Recorder(HeadDrafter):
    """Remembers what was proposed when, and what became of it."""

    def __init__(self, *args: object, **options: object) -> None:
        super().__init__(*args, **options)  # type: ignore[arg-type]
        self.log: list[tuple[str, int, Proposal]] = []

    def propose(self, views: list[DraftView], budgets: list[int]) -> list[Proposal | None]:  # type: ignore[override]
        found = super().propose(views, budgets)
        for view, proposal in zip(views, found, strict=True):
            if proposal is not None:
                self.log.append((view.id, len(view.tokens), proposal))
        return found


def engine(
    gamma: int,
    rows: int,
    *,
    drafted: bool = True,
    branch: int = 1,
    min_chance_to_extend: float = 0.0,
    architecture: str = "llama",
    eos: tuple[int, ...] = (),
    window: int = 512,
) -> Engine:
    runner = EagerRunner(target(architecture), rows=rows, max_len=LONGEST, margin=gamma + 2, probe=False)
    drafter = None
    if drafted:
        net = head(architecture, window)
        drafter = Recorder(
            net, runner, vocab_size=TINY_VOCABULARY, branch=branch, min_chance_to_extend=min_chance_to_extend
        )
    config = EngineConfig(max_rows=rows, prefill_chunk=16)
    return Engine(runner, drafter, FixedController(gamma), config, vocab_size=TINY_VOCABULARY, eos=eos)


def run(served: Engine, lines: list[list[int]], params: SamplingParams) -> list[tuple[int, ...]]:
    handles = [served.submit(Request(f"r{i}", tuple(line), params)) for i, line in enumerate(lines)]
    while not served.idle:
        served.step()
    assert served.parts.inactive is None, served.parts.inactive
    return [handle.completion().token_ids for handle in handles]


@pytest.mark.parametrize("rule", SETTINGS)
@pytest.mark.parametrize("branch", [1, 3])
def test_the_text_is_the_one_of_plain_decoding(rule: str, branch: int) -> None:
    params = SETTINGS[rule]
    expected = run(engine(1, 1, drafted=False), prompts(5), params)
    accepted = drafted = 0
    for gamma in (1, 3, 8):
        for rows in (1, 5):
            served = engine(gamma, rows, branch=branch)
            assert run(served, prompts(5), params) == expected, (gamma, rows)
            accepted, drafted = accepted + served.stats.accepted, drafted + served.stats.drafted
    assert 50 < accepted < drafted, "no guess held, or all did: hardly anything was tested"


@pytest.mark.parametrize("architecture", ["gemma2", "gpt2", "phi3"])
def test_other_families_have_layers_to_watch_too(architecture: str) -> None:
    expected = run(engine(1, 1, drafted=False, architecture=architecture), prompts(3), SETTINGS["greedy"])
    served = engine(4, 3, architecture=architecture)
    assert run(served, prompts(3), SETTINGS["greedy"]) == expected
    assert served.stats.drafted > 30


def test_chains_end_where_the_head_is_unsure() -> None:
    expected = run(engine(1, 1, drafted=False), prompts(5), SETTINGS["greedy"])
    long, short = engine(8, 5), engine(8, 5, min_chance_to_extend=0.6)
    assert run(long, prompts(5), SETTINGS["greedy"]) == expected
    assert run(short, prompts(5), SETTINGS["greedy"]) == expected
    assert short.stats.drafted < 0.8 * long.stats.drafted
    assert short.stats.acceptance_rate > long.stats.acceptance_rate


def test_requests_that_end_or_come_in_the_middle_of_rounds() -> None:
    """Rows swap places as short requests end; an end mark in the middle of accepted tokens cuts the round."""
    plain = engine(1, 1, drafted=False)
    lines = prompts(6)
    free = run(plain, lines, SETTINGS["greedy"])
    eos = (free[0][7], free[3][4])
    expected = run(engine(1, 1, drafted=False, eos=eos), lines, SETTINGS["greedy"])
    assert len({len(ids) for ids in expected}) > 2
    assert run(engine(5, 3, eos=eos), lines, SETTINGS["greedy"]) == expected
    assert run(engine(5, 3, eos=eos, branch=2), lines, SETTINGS["greedy"]) == expected


def test_an_abort_leaves_the_others_alone() -> None:
    lines = prompts(4)
    expected = run(engine(1, 1, drafted=False), lines, SETTINGS["greedy"])
    served = engine(4, 4)
    handles = [served.submit(Request(f"r{i}", tuple(line), SETTINGS["greedy"])) for i, line in enumerate(lines)]
    for _ in range(4):
        served.step()
    served.abort("r0")
    while not served.idle:
        served.step()
    assert [h.completion().token_ids for h in handles[1:]] == expected[1:]


@pytest.mark.parametrize("rule", ["token", "block"])
def test_sampling_gives_a_q_over_the_whole_vocabulary(rule: str) -> None:
    """q is zero outside the draft's words and sums to 1; the answers stay the target's (by the rules' own tests)."""
    served = engine(4, 2)
    params = SamplingParams(temperature=0.9, top_k=20, seed=1, max_tokens=TOKENS, verification=rule)  # type: ignore[arg-type]
    run(served, prompts(2), params)
    drafter = served.parts.drafter
    assert isinstance(drafter, Recorder)
    assert len(drafter.log) > 5
    known = torch.zeros(TINY_VOCABULARY, dtype=torch.bool)
    known[drafter.net.ids] = True
    for _, _, proposal in drafter.log:
        assert proposal.draw == "iid"
        assert proposal.q is not None
        assert proposal.q.shape == (len(proposal), TINY_VOCABULARY)
        torch.testing.assert_close(proposal.q.sum(-1), torch.ones(len(proposal)))
        assert not proposal.q[:, ~known].any()
        assert all(known[token] for token in proposal.tokens)


def test_trees_are_given_a_size_and_chains_a_ceiling() -> None:
    """A chain ends itself where the head is no longer sure; a tree takes all the nodes it is given."""
    runner = EagerRunner(target(), rows=1, max_len=LONGEST, probe=False)
    asked = {}
    for branch in (1, 3):
        chances = lambda: (0.9, 0.9)  # noqa: E731  # so high that a chain ends at once
        drafter = HeadDrafter(head(), runner, vocab_size=TINY_VOCABULARY, min_chances=chances, branch=branch)
        runner.slab.reset()
        runner.slab.acquire("a", prompts(1)[0])
        runner.prefill(0, prompts(1)[0][:-1])
        (drafted,) = drafter.propose([View("a", prompts(1)[0])], [10])
        assert drafted is not None
        controller = AdaptiveController(10, free=drafter.free, ends_itself=drafter.ends_itself)
        asked[branch] = max(play(controller, holds=0.9, cost=FLAT, rounds=60, step=0.2)[-20:]), len(drafted)
    assert asked[1] == (10, 1)
    assert asked[3][0] < 8
    assert asked[3][1] == 10


@dataclass
class View:
    """A sequence as a drafter sees it."""

    id: str
    tokens: list[int]
    prompt_length: int = 1
    params: SamplingParams = SETTINGS["greedy"]
    prediction: tuple[int, ...] = ()
    seed: int = 0
    constraint: Any = None


class Forced(DraftSampler):
    """Draws what the text says, and remembers the logits."""

    texts: ClassVar[list[list[int]]] = []
    seen: ClassVar[list[torch.Tensor]] = []

    def __init__(self, views: list[View], *rest: Any) -> None:
        super().__init__(views, *rest)
        self._lengths = [len(view.tokens) for view in views]

    def draw(self, logits: torch.Tensor, offset: int) -> torch.Tensor:
        super().draw(logits, offset)
        self.seen.append(logits)
        return torch.tensor([t[n + offset] for t, n in zip(self.texts, self._lengths, strict=True)])


@pytest.mark.parametrize(("rows", "window"), [(1, 512), (3, 512), (1, 9), (3, 9)])
def test_drafting_is_what_training_unrolls(rows: int, window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Step s of a draft is step s of the training rollout over the same text, for every way of getting there."""
    monkeypatch.setattr("headstart.drafters.head.DraftSampler", Forced)
    torch.manual_seed(1)
    model = tiny_model("llama")
    net = head_for(model, torch.arange(TINY_VOCABULARY), window=window)
    runner = EagerRunner(model, rows=rows, max_len=LONGEST, margin=16, probe=False)
    drafter = HeadDrafter(net, runner, vocab_size=TINY_VOCABULARY, min_chance_to_extend=0.0)
    steps = 6
    texts = torch.randint(3, TINY_VOCABULARY, (rows, 60)).tolist()
    Forced.texts = texts
    student, teacher = HeadStudent(net, model), Teacher(model, net.config.watch)
    with torch.no_grad():
        reading = teacher.read(Batch(torch.tensor(texts), torch.zeros(rows, 60).bool(), torch.zeros(rows)))
        taught = torch.stack([student.logits(y) for y in student.rollout(reading, steps)])  # [steps, R, T, W]
    teacher.close()
    views = [View(f"row{r}", text[: 1 + 4 * r]) for r, text in enumerate(texts)]
    for r, view in enumerate(views):
        runner.slab.acquire(view.id, view.tokens)
        runner.slab.promote(view.id)
        if r:
            runner.prefill(r, view.tokens[:-1])
    committed = (1, 3, 20, 2, 1, 7, 5)  # between two drafts; 20 is more than is caught up with in passing
    for ahead in committed:
        Forced.seen = []
        drafter.propose(views, [steps] * rows)
        got = torch.stack(Forced.seen)  # [steps, R, W]
        for r, view in enumerate(views):
            n = len(view.tokens)
            for s in range(steps):
                torch.testing.assert_close(got[s, r], taught[s, r, n - 1 + s], rtol=1e-4, atol=1e-4)
            view.tokens = texts[r][: n + ahead]
            runner.prefill(r, view.tokens[n - 1 : -1])


def test_a_folder_opens_by_name_and_is_checked(tmp_path: Path) -> None:
    folder = tmp_path / "head"
    save_head(head(), folder, {"target": "tiny"})
    assert head_folder(str(folder)) == folder
    assert json.loads((folder / "config.json").read_text())["target"] == "tiny"
    again = load_head(folder)
    for name, tensor in head().state_dict().items():
        torch.testing.assert_close(again.state_dict()[name], tensor)
    llm = LLM(target(), str(folder), gamma=4, max_rows=2, max_model_len=LONGEST, check=False)
    plain = LLM(target(), None, max_rows=2, max_model_len=LONGEST, check=False)
    got = [a.token_ids for a in llm.generate(prompts(3), SETTINGS["greedy"])]
    assert got == [a.token_ids for a in plain.generate(prompts(3), SETTINGS["greedy"])]
    assert llm.stats.drafted > 20
    other = tiny_model("llama", num_hidden_layers=3)
    with pytest.raises(ModelRefused, match="another target"):
        LLM(other, str(folder), max_model_len=LONGEST, check=False)
    (folder / "model.safetensors").write_bytes(b"nothing")
    with pytest.raises(ModelRefused, match="cannot be read"):
        LLM(target(), str(folder), max_model_len=LONGEST, check=False)


def test_watching_is_refused_where_features_would_be_missing() -> None:
    runner = EagerRunner(target(), rows=2, max_len=LONGEST, probe=False)
    with pytest.raises(InvalidParameter, match=r"0 \.\. 1"):
        runner.watch([0, 5])
    runner.slab.acquire("a", [1, 2, 3])
    with pytest.raises(ValueError, match="running"):
        runner.watch([0])
    runner.slab.release("a")
    runner.prefill(0, [1, 2, 3])
    runner.watch([0, 1])
    assert runner.slab.lengths == [0, 0], "warm tokens without features must be forgotten"
    runner.watch([0, 1])  # the same again is fine
    with pytest.raises(ValueError, match="already"):
        runner.watch([1])


@torch.no_grad()
@pytest.mark.parametrize("way", ["_float_sums", "_integer_sums"])
def test_small_numbers_on_a_cpu_are_nearly_the_same(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """int8 matrices: a percent off at a few rows, exact at many, gone when the weights move."""
    if way == "_integer_sums" and not torch.cpu._is_vnni_supported():
        pytest.skip(
            "without VNNI oneDNN adds two products in 16 bits, and large ones are cut: ``quickest`` passes it over"
        )
    torch.manual_seed(0)
    net = head_for(target(), torch.arange(64), width=64, head_dim=16)
    y = torch.randn(3, 64)
    exact = net.logits(y)

    def only(matrix: torch.Tensor) -> int8.Product:
        scale = matrix.abs().amax(1) / 127
        made: int8.Product = getattr(int8, way)((matrix / scale[:, None]).round().to(torch.int8), scale)
        return made

    monkeypatch.setattr("headstart.machine.head.quickest", lambda matrix: None)
    assert not net.shrink()
    assert torch.equal(net.logits(y), exact)
    monkeypatch.setattr("headstart.machine.head.quickest", only)
    assert net.shrink()
    near = net.logits(y)
    assert not torch.equal(near, exact)
    assert float((near - exact).norm() / exact.norm()) < 0.03
    many = torch.randn(40, 64)
    torch.testing.assert_close(net.logits(many), many @ net.head.T)
    net.to(torch.float64)
    torch.testing.assert_close(net.logits(y.double()), exact.double(), rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_the_fastest_product_is_a_right_one(monkeypatch: pytest.MonkeyPatch) -> None:
    matrix, x = torch.randn(4096, 256), torch.randn(2, 256)
    found = int8.quickest(matrix)
    if found is not None:  # which it is depends on the machine
        assert float((found(x).float() - x @ matrix.T).norm() / (x @ matrix.T).norm()) < 0.03
    monkeypatch.setattr(int8, "_float_sums", lambda small, scale: lambda x: torch.zeros(len(x), len(small)))
    monkeypatch.setattr(int8, "_integer_sums", lambda small, scale: None)
    assert int8.quickest(matrix) is None, "wrong or missing ways are passed over"


def test_the_shipped_head_drafts_well_and_changes_nothing(embedded: LLM) -> None:
    """Two answers of the embedded model: the text of plain decoding, in far fewer forwards."""
    folder = embedded_draft()
    assert folder is not None
    assert (folder / "model.safetensors").stat().st_size < 25e6
    assert (folder / "README.md").exists()
    runner = embedded.engine.parts.runner
    assert isinstance(runner, EagerRunner)
    llm = LLM(runner.model, str(folder), tokenizer=embedded.tokenizer, gamma=5, max_rows=2, check=False)
    params = SamplingParams(temperature=0, max_tokens=40)
    chats = [[{"role": "user", "content": text}] for text in ("How do I boil an egg?", "What is 17 plus 25?")]
    plain = SamplingParams(temperature=0, max_tokens=40, speculate=False)
    answers, expected = llm.chat(chats, params), embedded.chat(chats, plain)
    assert isinstance(answers, list)
    assert isinstance(expected, list)
    assert [a.token_ids for a in answers] == [a.token_ids for a in expected]
    assert llm.stats.acceptance_length > 1.8
