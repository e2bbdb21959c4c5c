"""Keeps transformers' progress bars and remarks out of a program's output.

Knows: transformers' switches for them. Does not know: what is loaded meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from transformers.utils import logging as hf_logging

__all__ = ["quiet"]


@contextmanager
def quiet() -> Iterator[None]:
    """No progress bars: reading local weights takes seconds, and their bars would cut through a program's output."""
    shown, level = hf_logging.is_progress_bar_enabled(), hf_logging.get_verbosity()
    hf_logging.disable_progress_bar()
    hf_logging.set_verbosity_error()
    try:
        yield
    finally:
        hf_logging.set_verbosity(level)
        if shown:
            hf_logging.enable_progress_bar()
