"""The page of a check-up.

Knows: what people look for first. Does not know: how anything was found out.
"""

from __future__ import annotations

from ..checkup.looks import gigabytes
from ..checkup.record import Checkup, Finding
from .page import facts, html_page, lead, note, section, table

__all__ = ["page", "sentence"]

_KINDS = {"wrong": "bad", "slow": "warning", "note": "", "fine": "good"}


def sentence(found: Checkup) -> str:
    """What the check-up comes to, in one sentence."""
    wrong, slow = len(found.of("wrong")), len(found.of("slow"))
    if wrong:
        return f"{wrong} thing{'s are' if wrong > 1 else ' is'} wrong."
    return f"Nothing is wrong; {slow} thing{'s' if slow != 1 else ''} will be slow." if slow else "Nothing is wrong."


def page(found: Checkup) -> str:
    """A self-contained page of HTML."""
    urgent = [finding for level in ("wrong", "slow", "note") for finding in found.of(level)]
    kept = [(place.name, place.what, gigabytes(place.bytes), place.deletable) for place in found.places]
    parts = [
        lead(sentence(found)),
        *(note(_told(finding), _KINDS[finding.level]) for finding in urgent),
        section("As it should be", *(finding.text for finding in found.of("fine"))),
        section("Versions", facts({name: value or "not installed" for name, value in found.versions.items()})),
        section("Caches", table(("folder", "what", "size", "if it is deleted"), kept, text=(1, 3))) if kept else "",
        section("The machine", facts({**found.machine, "memory": gigabytes(found.machine["memory"])})),
    ]
    return html_page("Headstart on this machine", [part for part in parts if part])


def _told(finding: Finding) -> str:
    return f"{finding.about}: {finding.text}" + (f"; {finding.advice}" if finding.advice else "")
