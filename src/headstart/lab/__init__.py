"""The workshop's benches: does speculation pay here, with which draft, and is it lossless? Only doors call it.

    from headstart import lab

    print(lab.bench(seconds=30).speedup)

Every function returns a record with ``to_json``; ``lab.save`` writes it as JSON and as a page.
"""

from __future__ import annotations

from importlib import import_module

# Which module holds each public name. It is imported when one of its names is first used: torch takes seconds.
# No module here has the name of a function: importing it would put it in the function's place.
_HOMES = {
    **dict.fromkeys(("Interval", "Ratio"), "statistics"),
    **dict.fromkeys(("System", "SystemOptions"), "system"),
    **dict.fromkeys(("Text", "read_texts", "shipped"), "texts"),
    **dict.fromkeys(("page_of", "save"), "report.store"),
    **dict.fromkeys(("bench", "Bench"), "benching"),
    **dict.fromkeys(("profile", "Profile"), "profiling"),
}

__all__ = [
    "Bench",
    "Interval",
    "Profile",
    "Ratio",
    "System",
    "SystemOptions",
    "Text",
    "bench",
    "page_of",
    "profile",
    "read_texts",
    "save",
    "shipped",
]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f".{_HOMES[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
