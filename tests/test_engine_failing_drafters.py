"""A drafter is anybody's code: whatever it raises, no request notices, and all can see why it went."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from copy import copy, deepcopy
from typing import Any

import pytest
import torch
from engines import DeviceTable, run, table_engine
from test_engine_bad_proposals import (
    DRAFT,
    GAMMA,
    SETTINGS,
    TARGET,
    Turning,
    V,
    engine,
    goes_on,
    plain,
    raises,
    requests,
)

from headstart.config import EngineConfig
from headstart.control.controller import FixedController
from headstart.drafters.model import ModelDrafter
from headstart.engine.captured import CapturedRounds
from headstart.engine.engine import Engine
from headstart.engine.sequence import Committed
from headstart.machine.pieces import Pieces
from headstart.types import DraftView, Verdict


class Failing(Turning):
    """Drafts well, and raises in one of its other methods."""

    def __init__(self, where: str) -> None:
        super().__init__(None, None, warm=False)
        self.where, self.told, self.released = where, 0, 0

    def commit(self, views: Sequence[DraftView], verdicts: Sequence[Verdict | None]) -> None:
        self.told += 1
        if self.where == "commit" and self.told > 4:
            raise KeyError("commit lost it")

    def release(self, sequence_id: str) -> None:
        self.released += 1
        if self.where == "release":
            raise KeyError("release lost it")


@pytest.mark.parametrize("backend", ["table", "captured"])
@pytest.mark.parametrize("rule", ["greedy", "coupled"])
@pytest.mark.parametrize("where", ["commit", "release"])
def test_a_drafter_that_cannot_be_told(where: str, rule: str, backend: str) -> None:
    drafter = Failing(where)
    goes_on(engine(drafter, backend), plain(backend, rule), rule, f"{where} lost it")
    assert drafter.told > 4
    assert drafter.released == (1 if where == "release" else 0), "it is not called again"


def test_an_abort_with_a_release_that_raises() -> None:
    made = table_engine(TARGET, Failing("release"), gamma=GAMMA)
    first, second = (made.submit(request) for request in requests("greedy")[:2])
    made.step()
    made.abort("0")
    assert first.done
    while not made.idle:
        made.step()
    assert second.completion().finish_reason == "length"
    assert "release lost it" in str(made.inactive_reason)


def drained(made: Engine) -> None:
    while not made.idle:
        made.step()


def test_a_reset_that_raises() -> None:
    """Ctrl-C while it drafts, and then it cannot forget: the requests are read in again, and go on without it."""

    class Stuck(Turning):
        def reset(self) -> None:
            raise KeyError("reset lost it")

    made = table_engine(TARGET, Stuck(raises(KeyboardInterrupt()), None, warm=False), gamma=GAMMA)
    handles = [made.submit(request) for request in requests("greedy")]
    with pytest.raises(KeyboardInterrupt):
        drained(made)
    drained(made)
    assert [handle.completion().token_ids for handle in handles] == plain("table", "greedy")
    assert "reset lost it" in str(made.inactive_reason)


def test_a_name_that_is_none() -> None:
    """Rounds carry the drafter's name; that it cannot say it is no reason to stop."""

    class Nameless(Turning):
        @property
        def name(self) -> str:  # type: ignore[override]
            raise RuntimeError("who am I")

    class Numbered(Turning):
        name = 7  # type: ignore[assignment]

    for kind, called in ((Nameless, "Nameless"), (Numbered, "7")):
        made, seen = table_engine(TARGET, kind(None, None, warm=False), gamma=GAMMA), []
        made.listen(seen.extend)
        assert [c.token_ids for c in run(made, requests("greedy"))] == plain("table", "greedy")
        assert {r.drafter for r in seen} == {called}
        assert made.inactive_reason is None
        failed = table_engine(TARGET, kind(raises(ValueError("enough")), None, warm=False), gamma=GAMMA)
        run(failed, requests("greedy"))
        assert failed.inactive_reason == f"the drafter {called!r} failed: enough"


CHANGES: dict[str, Callable[[list[int]], Any]] = {
    "append": lambda tokens: tokens.append(0),
    "extend": lambda tokens: tokens.extend([0, 1]),
    "+=": lambda tokens: tokens.__iadd__([0]),
    "*=": lambda tokens: tokens.__imul__(2),
    "insert": lambda tokens: tokens.insert(0, 0),
    "pop": lambda tokens: tokens.pop(),
    "remove": lambda tokens: tokens.remove(tokens[0]),
    "clear": lambda tokens: tokens.clear(),
    "sort": lambda tokens: tokens.sort(),
    "reverse": lambda tokens: tokens.reverse(),
    "assign": lambda tokens: tokens.__setitem__(0, 0),
    "assign a slice": lambda tokens: tokens.__setitem__(slice(0, 2), [0]),
    "delete": lambda tokens: tokens.__delitem__(-1),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("where", ["propose", "commit"])
def test_a_text_that_a_drafter_changes(where: str, change: str) -> None:
    """The text is the engine's, and the drafter that reaches into it goes."""

    class Meddling(Turning):
        def guess(self, view: DraftView, budget: int) -> Any:
            if where == "propose" and self.turns(view):
                CHANGES[change](view.tokens)
            return super().guess(view, budget)

        def commit(self, views: Sequence[DraftView], verdicts: Sequence[Verdict | None]) -> None:
            for view in views:
                if where == "commit" and self.turns(view):
                    CHANGES[change](view.tokens)

    made = table_engine(TARGET, Meddling(None, None, warm=False), gamma=GAMMA, rows=3)
    goes_on(made, plain("table", "greedy"), "greedy", "only to be read")


def test_copies_of_a_text_are_ones_own() -> None:
    tokens = Committed([3, 1, 2])
    copies = [
        list(tokens),
        tokens.copy(),
        tokens[:],
        copy(tokens),
        deepcopy(tokens),
        pickle.loads(pickle.dumps(tokens)),
    ]
    for mine in (*copies, [*tokens], sorted(tokens)):
        assert type(mine) is list
        assert sorted(mine) == [1, 2, 3]
        mine.append(4)
    assert tokens == [3, 1, 2]


def test_a_list_that_a_drafter_empties_is_its_own() -> None:
    """Views and budgets are copies: what becomes of them is the drafter's business."""

    class Greedy(Turning):
        def propose(self, views: Sequence[DraftView], budgets: Sequence[int]) -> Any:
            found = super().propose(views, budgets)
            views.clear(), budgets.clear()  # type: ignore[attr-defined]
            return found

        def commit(self, views: Sequence[DraftView], verdicts: Sequence[Verdict | None]) -> None:
            views.clear(), verdicts.clear()  # type: ignore[attr-defined]

    made = table_engine(TARGET, Greedy(None, None, warm=False), gamma=GAMMA)
    assert [c.token_ids for c in run(made, requests("greedy"))] == plain("table", "greedy")
    assert made.inactive_reason is None


@pytest.mark.parametrize("rule", SETTINGS)
def test_a_draft_model_on_the_device_that_cannot_be_brought_level(rule: str) -> None:
    """Captured rounds draft by themselves; where the draft model fails to read a prompt, they go on without it."""

    class Short(DeviceTable):
        def read(self, pieces: Pieces, *, logits: bool = True) -> torch.Tensor:
            raise torch.OutOfMemoryError("no room for the draft")

    target, own = (kind(t, rows=3, max_len=64, margin=40) for kind, t in ((DeviceTable, TARGET), (Short, DRAFT)))
    drafter = ModelDrafter(own, vocab_size=V, width=V)
    rounds = CapturedRounds(target, drafter, vocab_size=V, lengths=(0, GAMMA))
    config = EngineConfig(max_rows=3)
    made = Engine(target, drafter, FixedController(GAMMA), config, vocab_size=V, captured=rounds, max_gamma=GAMMA)
    goes_on(made, plain("captured", rule), rule, "no room for the draft")
