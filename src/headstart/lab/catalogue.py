"""Which drafts are known for a target: models that share its tokenizer, and heads that were published for it.

Knows: the catalogue that ships (``data/catalogue.json``). Does not know: what a draft is worth, or what lies on this
machine. Nothing is fetched.

An entry is unverified until two tokenizers were compared, which ``candidates`` does where both lie on this machine. A
wrong one does no harm: tokenizers are compared whenever a draft is loaded, and one that differs is refused.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from ..machine.load.embedded import HUB_ID, is_embedded

__all__ = ["CATALOGUE", "Known", "families", "known_drafts"]

CATALOGUE = Path(__file__).parent / "data" / "catalogue.json"
LEAST = 3.0  # times that a target must be larger than a draft to be proposed with it
MOST = 4  # proposals for a target


@dataclass(frozen=True)
class Known:
    """A draft that somebody might use for a target."""

    target: str
    draft: str
    kind: str  # "model", or what kind of head it is
    loadable: bool = True  # by this version
    verified: bool = False
    note: str = ""
    differs: str | None = None  # in its tokenizer, as was found here: it cannot draft for this target

    @property
    def sentence(self) -> str:
        """For people, who may want to download it."""
        if self.differs is not None:
            return f"{self.draft} ({self.kind}): not for this target, though the catalogue says so: {self.differs}"
        sure = (
            "; the tokenizers are the same" if self.verified else "; unverified: no tokenizer of it is here to compare"
        )
        if not self.loadable:
            return f"{self.draft} ({self.kind}): published for {self.target}, but this version cannot load it{sure}"
        return f"{self.draft} ({self.kind}): {self.note or 'said to share the tokenizer'}{sure}"


@cache
def families() -> dict[str, Any]:
    """The catalogue as it stands."""
    found: dict[str, Any] = json.loads(CATALOGUE.read_text(encoding="utf-8"))
    return found


def known_drafts(model: object) -> list[Known]:
    """Drafts for a target by its name on the hub, the most promising first; none for a model that is not known."""
    name = HUB_ID if model is None or is_embedded(model) else _name(model)
    heads = [
        Known(entry["target"], entry["draft"], entry["kind"], entry["loadable"], entry["verified"])
        for entry in families()["heads"]
        if entry["target"].lower() == name.lower() and entry["draft"] != "auto"  # that one ships, and needs no proposal
    ]
    models: list[Known] = []
    for family in families()["families"]:
        mine = next((m for m in family["members"] if m["id"].lower() == name.lower()), None)
        if mine is None:
            continue
        small = [m for m in family["members"] if m["billions"] * LEAST <= mine["billions"]]
        # Tuned alike first, then the smaller: a draft's time counts for every token.
        small.sort(key=lambda m: (m["tuned"] != mine["tuned"], m["billions"]))
        for member in small[:MOST]:
            times = mine["billions"] / member["billions"]
            told = f"{member['billions']:g}B weights, the target {times:.0f} times as many; family {family['name']}"
            models.append(Known(mine["id"], member["id"], "model", verified=family["verified"], note=told))
    return [*models, *heads]


def _name(model: object) -> str:
    """A hub id as it is; of a folder of the hub's cache, the id that it was fetched by."""
    text = str(model)
    for part in Path(text).parts:
        if part.startswith("models--"):
            return part.removeprefix("models--").replace("--", "/")
    return text
