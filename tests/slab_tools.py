"""What is true of every slab at any time."""

from __future__ import annotations

from headstart.machine.kvcache import Slab

__all__ = ["check_slab", "filling"]


def filling(slab: Slab) -> list[str]:
    """The sequences being prefilled, in row order."""
    return [key for key in slab._keys[slab._ready : slab._active] if key is not None]


def check_slab(slab: Slab) -> None:
    assert min(slab._ready, slab._filling) >= 0
    assert slab._active <= slab.rows
    owned = {key: row for row, key in enumerate(slab._keys) if key is not None}
    assert owned == slab._row_of, "the two indexes of owners differ"
    assert sorted(owned.values()) == list(range(slab._active)), "the zones are not packed"
    for row in range(slab.rows):
        assert slab.lengths[row] == len(slab.tokens[row]), f"row {row}: length and tokens differ"
        assert slab.lengths[row] <= slab.max_len, f"row {row} is too long"
    for layer in slab.layers:
        if layer.is_initialized:
            for buffer in (layer.keys, layer.values):
                assert (buffer.shape[0], buffer.shape[2]) == (slab.rows, slab.capacity)
