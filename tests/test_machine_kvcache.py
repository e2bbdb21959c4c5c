"""The slab by itself: zones, warmth, rollback, moves. Keys are written as their own token ids, so rows can be read."""

from __future__ import annotations

import random

import pytest
import torch
from slab_tools import check_slab, filling

from headstart.machine.kvcache import LEAST_MARGIN, Slab
from headstart.machine.slab_layer import on_cache_line

LAYERS, HEADS, DIM = 2, 2, 3


def write(
    slab: Slab, rows: slice, tokens: list[list[int]], starts: list[int]
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """What a forward does: write one key a token (its id, in every layer and head), and see what comes back."""
    ids = torch.tensor(tokens, dtype=torch.float32)
    slots = torch.tensor(starts)[:, None] + torch.arange(ids.shape[1])
    slab.begin(rows, starts, ids.shape[1], slots)
    states = ids[:, None, :, None].expand(-1, HEADS, -1, DIM)
    return [slab.update(states + 1000 * layer, states + 0.5, layer) for layer in range(LAYERS)]


def fill(slab: Slab, key: str, tokens: list[int]) -> int:
    """Give key a row and its tokens, as a prefill would; returns how many were warm."""
    warm = slab.acquire(key, tokens)
    row = slab.row(key)
    write(slab, slice(row, row + 1), [tokens[warm:]], [warm])
    slab.extend(row, tokens[warm:])
    return warm


def keys_of(slab: Slab, row: int) -> list[int]:
    """The tokens whose keys really lie in the row; all layers, heads and both buffers must agree."""
    length = slab.lengths[row]
    found = [int(x) for x in slab.layers[0].keys[row, 0, :length, 0]]
    for index, layer in enumerate(slab.layers):
        expected = torch.tensor(found, dtype=torch.float32)[None, :, None]
        assert torch.equal(layer.keys[row, :, :length], (expected + 1000 * index).expand(HEADS, -1, DIM))
        assert torch.equal(layer.values[row, :, :length], (expected + 0.5).expand(HEADS, -1, DIM))
    return found


def assert_true(slab: Slab) -> None:
    check_slab(slab)
    for row in range(slab.rows):
        if slab.lengths[row]:
            assert keys_of(slab, row) == slab.tokens[row]


def test_buffers_appear_on_first_update_and_hold_zeros() -> None:
    slab = Slab(3, 10, margin=20)
    assert not slab.layers
    write(slab, slice(0, 1), [[1]], [0])
    assert slab.layers[0].keys.shape == (3, HEADS, 30, DIM)
    assert torch.count_nonzero(slab.layers[0].keys[1:]) == 0, "dead slots must be finite: 0 * NaN is NaN"
    other = Slab(5, 40)
    other.allocate((layer.keys, layer.values) for layer in slab.layers)
    assert other.layers[1].values.shape == (5, HEADS, other.capacity, DIM)


def test_update_returns_all_live_keys_for_equal_and_ragged_rows() -> None:
    slab = Slab(3, 20)
    write(slab, slice(0, 3), [[1, 2, 3], [4, 5, 6], [7, 8, 9]], [0, 0, 0])
    (keys, values), _ = write(slab, slice(0, 2), [[10, 11], [12, 13]], [3, 1])
    assert keys.shape == values.shape == (2, HEADS, 5, DIM)
    assert keys[0, 1, :, 2].tolist() == [1, 2, 3, 10, 11]
    assert keys[1, 0, :3, 0].tolist() == [4, 12, 13]
    assert slab.get_seq_length() == 3
    assert slab.get_mask_sizes(2, 0) == (5, 0)
    (keys, _), _ = write(slab, slice(1, 3), [[1], [2]], [3, 3])  # a slice that does not begin at row 0
    assert keys[:, 0, :, 0].tolist() == [[4, 12, 13, 1], [7, 8, 9, 2]]


def test_writes_that_do_not_fit_are_refused_and_padding_may_run_past_the_end() -> None:
    slab = Slab(1, 4, margin=0)
    assert slab.capacity == 4 + LEAST_MARGIN
    write(slab, slice(0, 1), [[0] * LEAST_MARGIN], [4])
    with pytest.raises(ValueError, match="do not fit"):
        slab.begin(slice(0, 1), [5], LEAST_MARGIN)
    with pytest.raises(ValueError, match="do not fit"):
        slab.begin(slice(0, 1), [-1], 1)
    with pytest.raises(ValueError, match="slots tensor"):
        slab.begin(slice(0, 2), [0, 1], 1)
    with pytest.raises(ValueError, match="would hold 5 tokens of 4"):
        slab.extend(0, [1, 2, 3, 4, 5])


def test_rollback_is_a_length() -> None:
    slab = Slab(1, 20)
    fill(slab, "a", [1, 2, 3])
    write(slab, slice(0, 1), [[90, 91, 92]], [3])  # a draft, never extended
    slab.truncate(0, 2)
    write(slab, slice(0, 1), [[5]], [2])
    slab.extend(0, [5])
    assert slab.tokens[0] == [1, 2, 5] == keys_of(slab, 0)
    for wrong in (-1, 4):
        with pytest.raises(ValueError, match="cannot be cut"):
            slab.truncate(0, wrong)


def test_keep_moves_the_accepted_path_together() -> None:
    slab = Slab(2, 20)
    for key in ("a", "b"):
        fill(slab, key, [1, 2])
    write(slab, slice(0, 2), [[10, 11, 12, 13, 14]] * 2, [2, 2])  # the root and four nodes
    slab.keep(1, 2, [2, 4])
    slab.keep(0, 2, [1, 2])  # a chain: nothing to move
    for row, tokens in ((0, [10, 11, 12]), (1, [10, 12, 14])):
        slab.extend(row, tokens)
    assert_true(slab)
    slab.keep(0, 2, [])
    for wrong in ([0, 1], [2, 2], [3, 1]):
        with pytest.raises(ValueError, match="rising order"):
            slab.keep(0, 2, wrong)


def test_rows_are_packed_whatever_comes_and_goes() -> None:
    slab = Slab(4, 20)
    fill(slab, "a", [1, 2, 3])
    fill(slab, "b", [4])
    fill(slab, "c", [5, 6])
    assert slab.ready_keys == []
    assert filling(slab) == ["a", "b", "c"]
    assert slab.free_rows == 1
    slab.promote("b")
    slab.promote("c")
    assert slab.ready_keys == ["b", "c"]
    assert filling(slab) == ["a"]
    assert_true(slab)
    slab.release("b")
    assert slab.ready_keys == ["c"]
    assert slab.row("c") == 0
    assert slab.row("a") == 1
    assert "b" not in slab
    assert_true(slab)
    slab.release("a")
    assert slab.ready_keys == ["c"]
    assert slab.free_rows == 3
    assert_true(slab)
    with pytest.raises(ValueError, match="already ready"):
        slab.promote("c")
    with pytest.raises(ValueError, match="already owns"):
        slab.acquire("c", [1])
    with pytest.raises(KeyError):
        slab.release("b")


def test_acquire_refuses_when_every_row_is_taken() -> None:
    slab = Slab(1, 20)
    fill(slab, "a", [1])
    with pytest.raises(ValueError, match="no free row"):
        slab.acquire("b", [1])


def test_a_released_row_stays_warm_but_the_last_token_is_always_fed() -> None:
    slab = Slab(2, 20)
    fill(slab, "a", [1, 2, 3, 4])
    slab.release("a")
    assert slab.acquire("again", [1, 2, 3, 4]) == 3
    slab.release("again")
    assert slab.acquire("longer", [1, 2, 3, 4, 5]) == 3, "the last round held only three tokens"
    assert slab.acquire("one", [1]) == 0
    assert_true(slab)


def test_warmth_is_copied_from_an_active_row() -> None:
    slab = Slab(2, 20)
    fill(slab, "a", [1, 2, 3, 4])
    slab.promote("a")
    assert slab.acquire("b", [1, 2, 3, 9, 9]) == 3
    assert slab.tokens[slab.row("b")] == [1, 2, 3]
    assert slab.tokens[slab.row("a")] == [1, 2, 3, 4], "the source is untouched"
    assert_true(slab)


def test_a_long_warm_row_is_not_eaten_for_a_short_prefix() -> None:
    slab = Slab(3, 20)
    conversation = [1, 2, 3, 4, 5, 6, 7, 8]
    for key, tokens in (("old", [50, 51]), ("chat", conversation)):
        fill(slab, key, tokens)
    slab.release("old")
    slab.release("chat")
    assert slab.acquire("other", [1, 2, 90]) == 2  # copied: the conversation may well go on
    assert slab.acquire("chat", [*conversation, 9]) == 8
    assert_true(slab)


def test_the_row_let_go_the_longest_ago_is_overwritten_first() -> None:
    slab = Slab(3, 20)
    for key, token in (("a", 10), ("b", 20), ("c", 30)):
        fill(slab, key, [token, token + 1])
    for key in ("b", "c", "a"):
        slab.release(key)
    slab.acquire("x", [99, 98])
    held = sorted(tokens[0] for tokens in slab.tokens if tokens)
    assert held == [10, 30], "b went first"
    slab.acquire("y", [97, 96])
    assert [tokens[0] for tokens in slab.tokens if tokens] == [10]
    assert_true(slab)


def test_scrub_leaves_no_nan_behind() -> None:
    slab = Slab(2, 20)
    fill(slab, "a", [1, 2])
    slab.layers[0].keys[0, :, 5] = float("nan")
    slab.release("a", scrub=True)
    assert torch.isfinite(slab.layers[0].keys).all()
    assert slab.acquire("b", [1, 2, 3]) == 0, "a scrubbed row is cold"
    check_slab(slab)


def test_check_notices_every_kind_of_damage() -> None:
    def damaged() -> Slab:
        slab = Slab(3, 20)
        fill(slab, "a", [1, 2])
        fill(slab, "b", [3])
        check_slab(slab)
        return slab

    for harm in (
        lambda s: s.tokens[0].append(9),
        lambda s: s.lengths.__setitem__(1, 5),
        lambda s: s._row_of.__setitem__("a", 2),
        lambda s: s._keys.__setitem__(slice(0, 3), ["a", None, "b"]) or s._row_of.update(a=0, b=2),
        lambda s: setattr(s, "_filling", 1),
        lambda s: setattr(s.layers[0], "keys", s.layers[0].keys[:2]),
    ):
        slab = damaged()
        harm(slab)
        with pytest.raises(AssertionError):
            check_slab(slab)


@pytest.mark.parametrize("seed", range(12))
def test_random_traffic_never_mixes_keys(seed: int) -> None:
    rng = random.Random(seed)
    slab = Slab(rng.choice([1, 2, 5]), 24)
    alive: list[str] = []
    for step in range(150):
        action = rng.choice(["acquire", "promote", "release", "decode", "decode", "rollback"])
        if action == "acquire" and slab.free_rows:
            prompt = [rng.randrange(3) for _ in range(rng.randint(1, 12))]  # three tokens only, so prefixes do meet
            alive.append(f"s{step}")
            assert fill(slab, alive[-1], prompt) < len(prompt)
            assert slab.tokens[slab.row(alive[-1])] == prompt
        elif action == "promote" and filling(slab):
            slab.promote(rng.choice(filling(slab)))
        elif action == "release" and alive:
            slab.release(alive.pop(rng.randrange(len(alive))))
        elif action == "decode" and slab.ready_keys:
            count = len(slab.ready_keys)
            starts = slab.lengths[:count]
            if max(starts) + 2 > slab.max_len:
                continue
            drafts = [[rng.randrange(3) for _ in range(3)] for _ in range(count)]
            write(slab, slice(0, count), drafts, starts)
            for row in range(count):
                slab.extend(row, drafts[row][: rng.randint(1, 2)])
        elif action == "rollback" and slab.ready_keys:
            row = rng.randrange(len(slab.ready_keys))
            slab.truncate(row, rng.randint(0, slab.lengths[row]))
        assert sorted(slab.ready_keys + filling(slab)) == sorted(alive)
        assert_true(slab)


@pytest.mark.parametrize("zero", [True, False])
def test_memory_that_cannot_be_had(zero: bool) -> None:
    """Of the system's, or of torch's: one kind of error, with the size."""
    with pytest.raises(MemoryError, match=r"1152921504\.61 GB of memory cannot be had in one piece"):
        on_cache_line(1 << 60, zero=zero)
