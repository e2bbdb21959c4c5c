"""What a drafter is told, whoever plays the round: ``commit`` after every one, ``release`` once when a sequence ends,
``reset`` after an interruption. And what each drafter of the house does then: nothing of the sequence is left.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from engines import DeviceTable, device_engine, run, table, table_draft, table_engine, tree_drafter
from slab_tools import check_slab
from test_drafters_head import head
from test_drafters_head import target as head_target

from headstart.drafters.base import Drafter
from headstart.drafters.head import HeadDrafter
from headstart.drafters.lookup import LookupDrafter
from headstart.drafters.model import ModelDrafter
from headstart.drafters.portfolio import PortfolioDrafter
from headstart.engine.engine import Engine
from headstart.machine.kvcache import Slab
from headstart.machine.runner import EagerRunner
from headstart.testing import TINY_VOCABULARY, ScriptedDrafter, TableRunner
from headstart.types import DraftView, Proposal, Request, Round, SamplingParams, Verdict

V, GAMMA = 8, 3
TARGET, DRAFT = table(V, seed=5), table(V, seed=5) + 0.4 * table(V, seed=6)
GREEDY = SamplingParams(temperature=0, max_tokens=30)


class Witness:
    """Stands before a drafter's own methods, and checks what it is told."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.known: dict[str, list[int]] = {}  # sequence -> its text as it was last told
        self.proposed: dict[str, Proposal | None] = {}
        self.rounds: list[tuple[str, ...]] = []
        self.told: list[Verdict | None] = []
        self.ended: Counter[str] = Counter()
        self.cleared = 0

    def propose(self, views: Sequence[DraftView], budgets: Sequence[int]) -> Any:
        found = super().propose(views, budgets)  # type: ignore[misc]
        for view, proposal in zip(views, found, strict=True):
            assert not self.ended[view.id], "asked about what was released"
            assert self.known.get(view.id, view.tokens) == view.tokens, "something came that it was not told of"
            self.proposed[view.id] = proposal
        return found

    def commit(self, views: Sequence[DraftView], verdicts: Sequence[Verdict | None]) -> None:
        super().commit(views, verdicts)  # type: ignore[misc]
        assert len(views) == len(verdicts)
        self.rounds.append(tuple(view.id for view in views))
        self.told += verdicts
        for view, verdict in zip(views, verdicts, strict=True):
            assert not self.ended[view.id], "told of what was released"
            before = self.known.get(view.id, view.tokens[: view.prompt_length])
            self.known[view.id] = list(view.tokens)
            if verdict is None or before == view.tokens:
                continue  # its numbers broke down, or it had ended before this round, which was launched ahead
            new = view.tokens[len(before) :]
            assert view.tokens[: len(before)] == before
            # All that was accepted and the target's own token; less only where the text ended before.
            assert len(new) <= len(verdict.path) + 1
            ended = (
                len(view.tokens) - view.prompt_length == view.params.max_tokens or new[-1] in view.params.stop_token_ids
            )
            assert len(new) == len(verdict.path) + 1 or ended
            assert new == [*self.accepted(view, verdict, new), verdict.token][: len(new)]

    def accepted(self, view: DraftView, verdict: Verdict, new: list[int]) -> list[int]:
        proposal = self.proposed.pop(view.id, None)
        if proposal is None:  # drafted on the device, where nobody sees it before it is judged
            return new[: len(verdict.path)]
        return [proposal.tokens[node] for node in verdict.path]

    def release(self, sequence_id: str) -> None:
        super().release(sequence_id)  # type: ignore[misc]
        self.ended[sequence_id] += 1

    def reset(self) -> None:
        super().reset()  # type: ignore[misc]
        self.cleared += 1
        self.proposed.clear()


class WitnessModel(Witness, ModelDrafter):
    pass


class WitnessLookup(Witness, LookupDrafter):
    pass


class WitnessTree(Witness, ScriptedDrafter):
    pass


def model(kind: type[TableRunner], rows: int) -> WitnessModel:
    return WitnessModel(kind(DRAFT, rows=rows, max_len=64, margin=GAMMA + 20), vocab_size=V, width=V)


def on_device(drafter: Drafter, rows: int, **options: Any) -> Callable[[torch.Tensor], Engine]:
    return lambda target: device_engine(target, drafter, gamma=GAMMA, rows=rows, **options)


def stepping(drafter: Drafter, rows: int) -> Callable[[torch.Tensor], Engine]:
    return lambda target: table_engine(target, drafter, gamma=GAMMA, rows=rows)


#: rows -> the engine over a target, with a witness for a drafter
PLAYERS: dict[str, Callable[[int], Callable[[torch.Tensor], Engine]]] = {
    "step by step, model": lambda rows: stepping(model(TableRunner, rows), rows),
    "step by step, lookup": lambda rows: stepping(WitnessLookup(), rows),
    "step by step, tree": lambda rows: stepping(WitnessTree(tree_drafter(DRAFT).guess), rows),
    "captured": lambda rows: on_device(model(DeviceTable, rows), rows),
    "overlapped": lambda rows: on_device(model(DeviceTable, rows), rows, overlap=True),
    "drafted on host": lambda rows: on_device(WitnessLookup(), rows),
}


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("player", PLAYERS)
def test_commit_comes_after_every_round(player: str, rows: int) -> None:
    made = PLAYERS[player](rows)(TARGET)
    witness: Any = made.parts.drafter
    heard: list[Round] = []
    made.listen(heard.extend)
    settings = [GREEDY, SamplingParams(seed=2, max_tokens=30, verification="block"), GREEDY]
    found = run(made, [Request(str(i), (1 + i, 3, 2, 1 + i, 3), p) for i, p in enumerate(settings)])
    assert made.inactive_reason is None, "an assertion in commit would have dropped it"
    assert [len(c.token_ids) for c in found] == [30, 30, 30]
    # The same rounds that everybody hears of, and only those.
    told = Counter(name for names in witness.rounds for name in names)
    records = Counter(record.sequence for record in heard)
    assert all(told[name] >= records[name] for name in records)
    assert sum(told.values()) - sum(records.values()) <= len(found), "one round ahead of an end, at most"
    assert any(verdict is not None and len(verdict.path) > 1 for verdict in witness.told)
    for i, completion in enumerate(found):
        assert witness.known[f"{i}/0"][5:] == list(completion.token_ids)
    assert witness.ended == {f"{i}/0": 1 for i in range(3)}


@pytest.mark.parametrize("player", PLAYERS)
def test_a_verdict_is_plain_numbers(player: str) -> None:
    """Whatever judged: no tensor, which would hold memory and make a drafter wait for a device."""
    made = PLAYERS[player](2)(TARGET)
    witness: Any = made.parts.drafter
    run(made, [Request("a", (1, 3, 2, 1, 3), SamplingParams(seed=1, max_tokens=12, verification="block"))])
    assert witness.told
    for verdict in witness.told:
        assert type(verdict) is Verdict
        assert type(verdict.token) is int
        assert all(type(node) is int for node in verdict.path)


@pytest.mark.parametrize("player", PLAYERS)
def test_release_comes_once_for_every_end(player: str) -> None:
    """A full answer, an end token, an abort while it runs and while it waits, and numbers that break down."""
    broken = TARGET.clone()
    broken[0, 0] = float("nan")
    made = PLAYERS[player](3)(broken)
    witness: Any = made.parts.drafter
    at_once = SamplingParams(temperature=0, max_tokens=30, stop_token_ids=tuple(range(V)))
    asked = {"full": (1, 3, 2), "nan": (0, 0), "ended": (5, 2), "aborted": (2, 3), "waiting": (3, 3)}
    handles = {
        name: made.submit(Request(name, prompt, at_once if name == "ended" else GREEDY))
        for name, prompt in asked.items()
    }
    made.abort("waiting")
    while not handles["ended"].done or len(made._scheduler._running | made._scheduler._filling) < 2:
        made.step()
    made.abort("aborted")
    while not made.idle:
        made.step()
    found = {name: handle.completion().finish_reason for name, handle in handles.items()}
    assert found == {"full": "length", "nan": "error", "ended": "stop", "aborted": "abort", "waiting": "abort"}
    assert made.inactive_reason is None
    assert witness.ended == {f"{name}/0": 1 for name in asked}


@pytest.mark.parametrize("player", PLAYERS)
def test_reset_comes_after_an_interruption_and_the_rest_is_told_as_ever(player: str) -> None:
    made = PLAYERS[player](2)(TARGET)
    witness: Any = made.parts.drafter
    handles = [made.submit(Request(str(i), (1 + i, 3, 2), GREEDY)) for i in range(2)]
    for _ in range(4):
        made.step()
    own, made._scheduler.ready = made._scheduler.ready, partial(_struck, made)  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        made.step()
    made._scheduler.ready = own  # type: ignore[method-assign]
    assert witness.cleared == 0
    while not made.idle:
        made.step()
    assert witness.cleared == 1
    assert made.inactive_reason is None
    assert [len(handle.completion().token_ids) for handle in handles] == [30, 30]
    assert witness.ended == {"0/0": 1, "1/0": 1}


def _struck(made: Engine) -> Any:
    raise KeyboardInterrupt


# -- what each drafter does when it is told


class View:
    """A sequence as drafters see it."""

    def __init__(self, name: str, tokens: list[int]) -> None:
        self.id, self.tokens, self.prompt_length = name, tokens, len(tokens)
        self.params, self.prediction, self.seed = GREEDY, (), 0


def model_and_rows() -> tuple[Drafter, Callable[[], list[str]]]:
    drafter = table_draft(DRAFT)
    return drafter, lambda: _owners(drafter.runner.slab, drafter._level)


def lookup_and_rows() -> tuple[Drafter, Callable[[], list[str]]]:
    drafter = LookupDrafter()
    return drafter, lambda: sorted(drafter._indexes)


def both_and_rows() -> tuple[Drafter, Callable[[], list[str]]]:
    costly, rows = model_and_rows()
    drafter = PortfolioDrafter(costly, lambda views, limits: list(limits))

    def held() -> list[str]:
        assert rows() == sorted(drafter.lookup._indexes)
        return rows()

    return drafter, held


def head_and_rows() -> tuple[Drafter, Callable[[], list[str]]]:
    runner = EagerRunner(head_target(), rows=3, max_len=96, margin=40)
    drafter = HeadDrafter(head(), runner, vocab_size=TINY_VOCABULARY, min_chance_to_extend=0.0)
    for name, tokens in TEXTS.items():  # it reads the target's own features
        runner.slab.acquire(name, tokens)
        runner.prefill(runner.slab.row(name), tokens[:-1])
        runner.slab.promote(name)
    return drafter, lambda: _owners(drafter.slab)


def _owners(slab: Slab, known: dict[str, int] | None = None) -> list[str]:
    check_slab(slab)
    assert known is None or sorted(known) == sorted(slab.ready_keys)
    assert slab.free_rows == slab.rows - len(slab.ready_keys)
    return sorted(slab.ready_keys)


TEXTS = {"a": [1, 2, 3, 1, 2], "b": [4, 5, 4, 5], "c": [6, 7, 1, 6]}


@pytest.mark.parametrize("make", [model_and_rows, lookup_and_rows, both_and_rows, head_and_rows])
def test_what_is_released_leaves_nothing_and_disturbs_nobody(
    make: Callable[[], tuple[Drafter, Callable[[], list[str]]]],
) -> None:
    drafter, held = make()
    views: Any = [View(name, tokens) for name, tokens in TEXTS.items()]

    def ask(asked: Any) -> list[tuple[int, ...] | None]:
        return [None if p is None else p.tokens for p in drafter.propose(asked, [2] * len(asked))]

    first = ask(views)
    assert any(first)
    assert held() == ["a", "b", "c"]
    drafter.commit(views, [None] * 3)  # nothing held against it, nothing lost
    assert held() == ["a", "b", "c"]
    drafter.release("b")
    assert held() == ["a", "c"]
    drafter.release("b")  # twice, and one that was never seen: as if nothing had been
    drafter.release("nobody")
    assert held() == ["a", "c"]
    assert ask([views[0], views[2]]) == [first[0], first[2]], "the others' rows are as they were"
    assert ask(views) == first, "one that comes back is read in anew"
    drafter.reset()
    assert held() == []
    assert ask(views[::-1]) == first[::-1]
    for name in TEXTS:
        drafter.release(name)
    assert held() == []
