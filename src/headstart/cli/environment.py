"""Environment variables of Headstart: which there are, and which somebody misspelt.

Knows: names. Does not know: what any of them does.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from difflib import get_close_matches

__all__ = ["OTHERS", "PREFIX", "unknown"]

PREFIX = "HEADSTART_"
#: those that are no option of ``headstart serve``
OTHERS = frozenset(
    PREFIX + name for name in ("API_KEY", "CACHE", "CACHE_GB", "CPU_ISA", "REQUIRE_KERNELS", "STRESS", "STRESS_SECONDS")
)
#: what Kubernetes sets in every pod for a service that is called headstart, or headstart-and-more
_KUBERNETES = re.compile(r"\w*_SERVICE_(HOST|PORT)(_\w+)?|\w*_PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?")
_ADDRESS = re.compile(r"(tcp|udp|sctp)://")  # and the value of its HEADSTART_..._PORT


def unknown(environment: Mapping[str, str], options: Iterable[str]) -> str | None:
    """A sentence about variables that nobody reads, each with the name that may have been meant; None: there are none.

    ``options``: the variables of options. One that is empty is one that is not set.
    """
    known = OTHERS.union(options)
    ends = [name.removeprefix(PREFIX) for name in known]  # compared without what all have in common
    found = []
    for name in sorted(environment):
        value = environment[name]
        if not name.startswith(PREFIX) or not value or name in known:
            continue
        if _KUBERNETES.fullmatch(name) or _ADDRESS.match(value):
            continue
        near = get_close_matches(name.removeprefix(PREFIX)[:64], ends, n=1, cutoff=0.7)
        found.append(f"{name:.64}" + (f" (did you mean {PREFIX}{near[0]}?)" if near else ""))
    if not found:
        return None
    shown = found[:5] + ([f"and {len(found) - 5} more"] if len(found) > 5 else [])
    return f"nobody reads the environment variable{'s' * (len(found) > 1)} {', '.join(shown)}"
