"""What users can name keeps working from one version to the next: the last one wrote ``data/public_names.json``.

A name that is to go warns for one version first; then it is taken out of that file.
"""

from __future__ import annotations

import copy
import json
import re
import sys
import tomllib
from importlib import import_module
from pathlib import Path

import pytest
from public_names import ROOT, broken, now, variables

from headstart import LLM, Drafter, SamplingParams
from headstart.testing import tiny_model

HELD = json.loads((Path(__file__).parent / "data" / "public_names.json").read_text())


def test_nothing_that_could_be_named_is_gone() -> None:
    assert broken(HELD, now()) == []


def test_what_is_gone_would_be_noticed() -> None:
    changed = copy.deepcopy(HELD)
    records = changed["modules"]["headstart"]
    del records["Verdict"], records["Stats"]["members"]["acceptance_rate"]
    del changed["modules"]["headstart.testing"]["tiny_model"]
    records["speculative_decode"]["call"]["positional"].insert(0, "new")
    records["LLM"]["members"]["chat"] = None
    records["Round"]["call"]["required"].append("new")
    changed["commands"]["generate"].remove("--json")
    changed["variables"].remove("HEADSTART_CACHE")
    told = broken(HELD, changed)
    assert len(told) == 8
    for name in (
        "Verdict",
        "acceptance_rate",
        "tiny_model",
        "speculative_decode",
        "LLM.members.chat",
        "new=",
        "--json",
    ):
        assert any(name in line for line in told), name


def test_every_environment_variable_is_documented() -> None:
    page = (ROOT / "docs" / "reference.md").read_text()
    section = page.partition("## Environment\n")[2].partition("\n## ")[0]
    documented = re.findall(r"^\| `(HEADSTART_\w+)` \|", section, re.M)
    assert sorted(documented) == variables()


def test_drafters_of_other_packages_are_found_by_the_same_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A real package, as pip would leave it: a module and its metadata on the path."""
    (tmp_path / "silent_drafter.py").write_text(
        "from headstart import Drafter\n"
        "class SilentDrafter(Drafter):\n"
        "    name = 'silent'\n"
        "    def propose(self, views, budgets):\n"
        "        return [None] * len(views)\n"
    )
    metadata = tmp_path / "silent_drafter-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: silent-drafter\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[headstart.drafters]\nsilent = silent_drafter:SilentDrafter\n")
    monkeypatch.syspath_prepend(tmp_path)
    llm = LLM(tiny_model("llama"), "silent", max_model_len=64, check=False)
    assert llm.drafter_name == "silent"
    params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
    assert len(llm.generate([5, 6], params).token_ids) == 4
    sys.modules.pop("silent_drafter")


def test_our_own_entry_points_lead_to_drafters() -> None:
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    assert "lookup" in groups["headstart.drafters"]
    for place in groups["headstart.drafters"].values():
        module, _, name = place.partition(":")
        assert issubclass(getattr(import_module(module), name), Drafter)
