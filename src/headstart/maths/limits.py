"""Numbers that several parts go by. Each is written here and nowhere else.

Knows: the numbers, and why they are what they are. Does not know: who goes by them.
The bounds of a request's settings are in ``sampling.py``, those of an engine's in ``config.py``: people meet them.
"""

from __future__ import annotations

__all__ = [
    "AGREEMENT_TEMPERATURE",
    "CPU_CACHE",
    "DRAWN_HEAT",
    "DRAWN_HOPE",
    "LONG_MATCH",
    "MAX_STRENGTH",
    "MIN_CHANCE",
    "NO_TOP_K",
]

# -- how strong a guess is, as the length of the match that it copies (``Proposal.strength``)

MAX_STRENGTH = 16  # a longer match is no better
LONG_MATCH = 4  # right about as often as a good trained draft, and needs no time to draft

# -- when a draft goes on

#: The acceptance probability under which a token is not drafted, where nothing was measured yet: about what one costs
#: in tokens, drafting and verifying it.
MIN_CHANCE = 0.15
#: Rules of thumb, read off a trained head. A greedy guess is accepted as often as its probability at this temperature
#: says; a drawn one more evenly: DRAWN_HOPE[0] + DRAWN_HOPE[1] * its largest probability.
AGREEMENT_TEMPERATURE = 0.7
DRAWN_HOPE = (0.35, 0.55)
#: A trained head is less sure than its target: drawn a little colder, its tokens hold more often (1 - TV(p, q) of the
#: shipped one: 0.487 against 0.476 at temperature 1, 0.568 against 0.556 at 0.8 with top-p 0.95). Any q is lossless.
DRAWN_HEAT = 0.85

# -- tensors and kernels

NO_TOP_K = 1 << 62  # the top_k of a row that has none: it keeps everything
CPU_CACHE = 1 << 17  # float32 numbers that stay in a core's cache while they are worked on
