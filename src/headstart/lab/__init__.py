"""The workshop's benches: does speculation pay here, with which draft, and is it lossless? Only doors call it.

    from headstart import lab

    print(lab.bench(seconds=30).speedup)

Every function returns a record with ``to_json``; ``lab.save`` writes it as JSON and as a page.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .advice_record import Advice, AdviseSettings
    from .advising import advise
    from .bench_record import Bench, BenchSettings
    from .benching import bench
    from .certifying.certificate import Certificate, Check, Control
    from .certifying.certify import certify
    from .checkup.doctor import doctor
    from .checkup.record import Checkup, Finding
    from .profile_record import Profile
    from .profiling import profile
    from .report.store import page_of, save
    from .statistics import Interval, Ratio
    from .system import System, SystemOptions
    from .texts import Text, read_texts, shipped
    from .what_if import WhatIf, WhatIfSettings, whatif

# Which module holds each public name. It is imported when one of its names is first used: torch takes seconds.
# No module here has the name of a function: importing it would put it in the function's place.
_HOMES = {
    **dict.fromkeys(("Interval", "Ratio"), "statistics"),
    **dict.fromkeys(("System", "SystemOptions"), "system"),
    **dict.fromkeys(("Text", "read_texts", "shipped"), "texts"),
    **dict.fromkeys(("page_of", "save"), "report.store"),
    "advise": "advising",
    **dict.fromkeys(("Advice", "AdviseSettings"), "advice_record"),
    **dict.fromkeys(("whatif", "WhatIf", "WhatIfSettings"), "what_if"),
    "bench": "benching",
    "certify": "certifying.certify",
    **dict.fromkeys(("Certificate", "Check", "Control"), "certifying.certificate"),
    "doctor": "checkup.doctor",
    **dict.fromkeys(("Checkup", "Finding"), "checkup.record"),
    **dict.fromkeys(("Bench", "BenchSettings"), "bench_record"),
    "profile": "profiling",
    "Profile": "profile_record",
}

__all__ = [
    "Advice",
    "AdviseSettings",
    "Bench",
    "BenchSettings",
    "Certificate",
    "Check",
    "Checkup",
    "Control",
    "Finding",
    "Interval",
    "Profile",
    "Ratio",
    "System",
    "SystemOptions",
    "Text",
    "WhatIf",
    "WhatIfSettings",
    "advise",
    "bench",
    "certify",
    "doctor",
    "page_of",
    "profile",
    "read_texts",
    "save",
    "shipped",
    "whatif",
]


if not TYPE_CHECKING:  # so that a wrong name is still found without running anything

    def __getattr__(name: str) -> object:
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(import_module(f".{_HOMES[name]}", __name__), name)
        globals()[name] = value
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
