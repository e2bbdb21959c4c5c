"""The old name of ``headstart.control``, for one version more.

Knows: where its names are now. Does not know: anything else.
"""

from __future__ import annotations

from .control.adaptive import AdaptiveController
from .control.controller import Controller, FixedController, GreedyAndSampled, controller_for

__all__ = ["AdaptiveController", "Controller", "FixedController", "GreedyAndSampled", "controller_for"]
