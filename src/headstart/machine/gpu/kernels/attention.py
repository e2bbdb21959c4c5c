"""Attention of a few (or many) new tokens per row over the slab's live keys.

Knows: lengths on the device, grouped heads, ragged rows, sliding windows, and trees as ancestor bits.
Does not know: how queries and keys were made.

A program takes one row, one key-value head, one tile of queries (all query heads of the group together, so that keys
are read once) and one chunk of keys. Chunks lie at fixed places whatever the lengths are: the sums of a token are the
same in every batch. Programs whose chunk is not live end at once; with more than one chunk a second kernel joins the
parts.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ..compile.launching import launch, overlap
from ..step import Step
from ..tiles import AttentionTile, pieces, power_of_two
from .blocks import done, wait

__all__ = ["LOG2E", "attend", "new_key", "old_keys"]

LOG2E = 1.4426950408889634


@triton.jit
def _reach(lengths, row, width, last_query, window, TREE: tl.constexpr, WINDOW: tl.constexpr):
    """First and past-the-last key that any of the tile's queries may see, and the row's length."""
    length = tl.load(lengths + row, cache_modifier=".cg").to(tl.int32)
    low = tl.maximum(length - window + 1, 0) if WINDOW else 0
    high = length + (width if TREE else tl.minimum(width, last_query + 1))
    return length, low, high


@triton.jit
def _ask_keys(buffer, base, count, D: tl.constexpr, LINES: tl.constexpr):
    """Ask the first ``count`` keys (or values) at buffer + base into L2, LINES lines of 128 bytes at most."""
    SIZE: tl.constexpr = buffer.dtype.element_ty.primitive_bitwidth // 8
    line = tl.arange(0, LINES)
    tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.s32 p, $2, 0; @p prefetch.global.L2 [$1]; mov.u32 $0, 0; }",
        "=r,l,r",
        [(buffer + base).to(tl.int64, bitcast=True) + line * 128, (line * (128 // SIZE) < count * D).to(tl.int32)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _ask_chunk(
    keys, values, lengths, row, kv, start, capacity, KV: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """Before the wait: the length may be an old one, but a wrong guess only costs a few useless reads."""
    SPAN: tl.constexpr = 512 if CHUNK > 512 else CHUNK
    count = tl.minimum(tl.load(lengths + row).to(tl.int32) - start, SPAN)
    base = ((row * KV + kv).to(tl.int64) * capacity + start) * D
    LINES: tl.constexpr = SPAN * DP * (keys.dtype.element_ty.primitive_bitwidth // 8) // 128
    _ask_keys(keys, base, count, D, LINES)
    _ask_keys(values, base, count, D, LINES)


@triton.jit
def _standing(ancestors, depths, token, live, length, i, width, TREE: tl.constexpr, RAGGED: tl.constexpr):
    """The queries' ancestors as bits, if they are of a tree, and their positions."""
    if TREE:
        bits = tl.load(ancestors + token, mask=live, other=0)
        position = length + tl.load(depths + token, mask=live, other=0).to(tl.int32)
    else:
        position = length + (tl.minimum(i, width - 1) if RAGGED else i)  # padding sees what the last token sees
        bits = position
    return bits, position


@triton.jit
def _sight(j, alive, length, bits, position, depths, window, TREE: tl.constexpr, WINDOW: tl.constexpr):
    """[BQ, BK] may the query see key j? ``depths``: the row's."""
    if TREE:
        node = tl.minimum(tl.maximum(j - length, 0), 63)
        seen = (j < length)[None, :] | (((bits[:, None] >> node[None, :].to(tl.int64)) & 1) == 1)
        seen = seen & alive[None, :]
    else:
        seen = j[None, :] <= position[:, None]
    if WINDOW:
        if TREE:
            tail = (j >= length) & alive
            where = tl.load(depths + j - length, mask=tail, other=0).to(tl.int32)
            key_position = tl.where(tail, length + where, j)
        else:
            key_position = j
        seen = seen & (position[:, None] - key_position[None, :] < window)
    return seen


@triton.jit
def _soften(s, top):
    """Of a running softmax with scores s [BQ, BK] more: its top, their weights, and what older weights fade by."""
    new = tl.maximum(top, tl.max(s, axis=1))
    safe = tl.where(new == float("-inf"), 0.0, new)
    p = tl.exp2(s - safe[:, None])
    return new, p, tl.exp2(top - safe)


@triton.jit
def _leave(acc, top, total, out, part, stats, h, d, split, splits, live, inside, D: tl.constexpr, SPLIT: tl.constexpr):
    """What was found for channels d of heads h of all tokens: to out; where SPLIT, to part and stats."""
    if not SPLIT:
        tl.store(out + (h[:, None] * D + d[None, :]), (acc / total[:, None]).to(out.dtype.element_ty), mask=inside)
    else:
        slot = h.to(tl.int64) * splits + split
        tl.store(part + slot[:, None] * D + d[None, :], acc, mask=inside)
        tl.store(stats + slot * 2, top, mask=live)
        tl.store(stats + slot * 2 + 1, total, mask=live)


@triton.jit(do_not_specialize=["width", "capacity", "splits"])
def _attend_kernel(
    query, keys, values, out, part, stats, lengths, ancestors, depths, width, capacity, splits, window, scale,
    HEADS: tl.constexpr, KV: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr,
    CHUNK: tl.constexpr, SPLIT: tl.constexpr, TREE: tl.constexpr, RAGGED: tl.constexpr, WINDOW: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """To out [tokens, HEADS, D]; where SPLIT, to part [tokens, HEADS, splits, D] and stats [.., splits, 2]."""
    G: tl.constexpr = HEADS // KV
    split = tl.program_id(0)
    row = tl.program_id(1) // KV
    kv = tl.program_id(1) % KV
    start = split * CHUNK
    if PDL and not RAGGED:
        _ask_chunk(keys, values, lengths, row, kv, start, capacity, KV, D, DP, CHUNK)
    wait(PDL)
    t = tl.program_id(2) * BQ + tl.arange(0, BQ)  # the tile's queries: token t // G, head t % G of the group
    i = t // G
    if RAGGED:
        tile = lengths + row * 4
        row, first, width = tl.load(tile), tl.load(tile + 2).to(tl.int32), tl.load(tile + 3).to(tl.int32)
        length, low, high = _reach(tile + 1, 0, width, width, window, TREE, WINDOW)
    else:
        first = row * width
        length, low, high = _reach(lengths, row, width, (tl.program_id(2) * BQ + BQ - 1) // G, window, TREE, WINDOW)
    if (start < high) & (start + CHUNK > low):
        d = tl.arange(0, DP)
        live = i < width
        token = first + i
        head = token * HEADS + (kv * G + t % G)
        inside = live[:, None] & (d < D)[None, :]
        q = tl.load(query + (head[:, None] * D + d[None, :]), mask=inside, other=0.0, cache_modifier=".cg")
        base = (row * KV + kv).to(tl.int64) * capacity * D
        bits, position = _standing(ancestors, depths, token, live, length, i, width, TREE, RAGGED)
        top = tl.full([BQ], float("-inf"), tl.float32)
        total = tl.zeros([BQ], tl.float32)
        acc = tl.zeros([BQ, DP], tl.float32)
        begin = tl.maximum(start, low // BK * BK)
        for at in tl.range(begin, tl.minimum(start + CHUNK, high), BK):
            j = at + tl.arange(0, BK)
            alive = j < high
            spot = base + j[:, None] * D + d[None, :]
            read = alive[:, None] & (d < D)[None, :]
            k = tl.load(keys + spot, mask=read, other=0.0)
            s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
            seen = _sight(j, alive, length, bits, position, depths + row * width, window, TREE, WINDOW)
            top, p, fade = _soften(tl.where(seen, s, float("-inf")), top)
            total = total * fade + tl.sum(p, axis=1)
            v = tl.load(values + spot, mask=read, other=0.0)
            acc = tl.dot(p.to(v.dtype), v, acc * fade[:, None], input_precision="ieee")
        done(PDL)
        _leave(acc, top, total, out, part, stats, head, d, split, splits, live, inside, D, SPLIT)


@triton.jit
def old_keys(buffer, base, j, length, window, D: tl.constexpr, DP: tl.constexpr, WINDOW: tl.constexpr):
    """buffer[j] [BK, DP] for keys of earlier steps; zero elsewhere. Not through L1, which may be older than L2."""
    d = tl.arange(0, DP)
    seen = j < length
    if WINDOW:
        seen = seen & (length - j < window)
    tile = tl.load(
        buffer + base + j[:, None] * D + d[None, :], mask=seen[:, None] & (d < D)[None, :], other=0.0,
        cache_modifier=".cg",
    )  # fmt: skip
    return tile, seen


@triton.jit
def new_key(buffer, base, length, past, D: tl.constexpr, DP: tl.constexpr):
    """buffer[length] [DP], the new token's, where a chunk up to ``past`` holds it."""
    d = tl.arange(0, DP)
    mine = (d < D) & (length < past)
    return tl.load(buffer + base + length * D + d, mask=mine, other=0.0, cache_modifier=".cg").to(tl.float32)


@triton.jit
def _take(q, k, v, seen, top, total, acc, scale):
    """Take one more tile of keys into the running softmax."""
    s = tl.where(seen[None, :], tl.dot(q, tl.trans(k), input_precision="ieee") * scale, float("-inf"))
    top, p, fade = _soften(s, top)
    acc = tl.dot(p.to(v.dtype), v, acc * fade[:, None], input_precision="ieee")
    return top, total * fade + tl.sum(p, axis=1), acc


@triton.jit(do_not_specialize=["capacity", "splits"])
def _attend_one_kernel(
    query, keys, values, out, part, stats, lengths, capacity, splits, window, scale,
    HEADS: tl.constexpr, KV: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr,
    CHUNK: tl.constexpr, SPLIT: tl.constexpr, WINDOW: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One new token a row, least latency: the first tile of old keys is loaded before the kernel in front has ended.

    That is allowed only if that kernel itself let this one start after its own wait (PDL 2): then everything two
    kernels back is written, the lengths and the keys of earlier steps included. The new key is taken last.
    """
    G: tl.constexpr = HEADS // KV
    split = tl.program_id(0)
    row = tl.program_id(1) // KV
    kv = tl.program_id(1) % KV
    start = split * CHUNK
    base = (row * KV + kv).to(tl.int64) * capacity * D
    d = tl.arange(0, DP)
    t = tl.arange(0, BQ)
    inside = (t < G)[:, None] & (d < D)[None, :]
    head = row * HEADS + kv * G + t
    if PDL == 1 or PDL == 3:
        wait(PDL)
    length = tl.load(lengths + row, cache_modifier=".cg").to(tl.int32)
    low = tl.maximum(length - window + 1, 0) if WINDOW else 0
    if (start <= length) & (start + CHUNK > low):
        begin = tl.maximum(start, low // BK * BK)
        j = begin + tl.arange(0, BK)
        k, seen = old_keys(keys, base, j, length, window, D, DP, WINDOW)
        v, _ = old_keys(values, base, j, length, window, D, DP, WINDOW)
        if PDL == 2:
            wait(PDL)
        q = tl.load(query + head[:, None] * D + d[None, :], mask=inside, other=0.0, cache_modifier=".cg")
        new_k = new_key(keys, base, length, start + CHUNK, D, DP)
        new_v = new_key(values, base, length, start + CHUNK, D, DP)
        top = tl.full([BQ], float("-inf"), tl.float32)
        total = tl.zeros([BQ], tl.float32)
        acc = tl.zeros([BQ, DP], tl.float32)
        top, total, acc = _take(q, k, v, seen, top, total, acc, scale)
        for at in tl.range(begin + BK, tl.minimum(start + CHUNK, length), BK):
            k, seen = old_keys(keys, base, at + tl.arange(0, BK), length, window, D, DP, WINDOW)
            v, _ = old_keys(values, base, at + tl.arange(0, BK), length, window, D, DP, WINDOW)
            top, total, acc = _take(q, k, v, seen, top, total, acc, scale)
        done(PDL)
        if length < start + CHUNK:
            s = tl.sum(q.to(tl.float32) * new_k[None, :], axis=1) * scale
            new = tl.maximum(top, s)
            fade = tl.exp2(top - new)
            p = tl.exp2(s - new)
            acc = acc * fade[:, None] + p[:, None] * new_v[None, :]
            total = total * fade + p
            top = new
        _leave(acc, top, total, out, part, stats, head, d, split, splits, t < G, inside, D, SPLIT)
    else:
        if PDL == 2:
            wait(PDL)


@triton.jit(do_not_specialize=["width", "splits"])
def _join_kernel(
    out, part, stats, lengths, width, splits, window, HEADS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    CHUNK: tl.constexpr, GROUP: tl.constexpr, TREE: tl.constexpr, WINDOW: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Join the chunks of one token and head. Chunks are taken GROUP by GROUP, so that their number changes no sum."""
    token = tl.program_id(0)
    head = tl.program_id(1)
    wait(PDL)
    index = token % width
    _, low, high = _reach(lengths, token // width, width, index, window, TREE, WINDOW)
    first = low // CHUNK
    last = tl.cdiv(high, CHUNK)
    d = tl.arange(0, DP)
    slot = (token * HEADS + head).to(tl.int64) * splits
    top = tl.full([], float("-inf"), tl.float32)
    total = tl.zeros([], tl.float32)
    acc = tl.zeros([DP], tl.float32)
    for at in tl.range(first // GROUP * GROUP, last, GROUP):
        s = at + tl.arange(0, GROUP)
        mine = (s >= first) & (s < last)
        peak = tl.load(stats + (slot + s) * 2, mask=mine, other=float("-inf"), cache_modifier=".cg")
        mass = tl.load(stats + (slot + s) * 2 + 1, mask=mine, other=0.0, cache_modifier=".cg")
        new = tl.maximum(top, tl.max(peak, axis=0))
        safe = tl.where(new == float("-inf"), 0.0, new)
        weight = tl.exp2(peak - safe)
        fade = tl.exp2(top - safe)
        at_part = part + (slot + s)[:, None] * D + d[None, :]
        values = tl.load(at_part, mask=mine[:, None] & (d < D)[None, :], other=0.0, cache_modifier=".cg")
        acc = acc * fade + tl.sum(values * weight[:, None], axis=0)
        total = total * fade + tl.sum(mass * weight, axis=0)
        top = new
    done(PDL)
    tl.store(out + (token * HEADS + head) * D + d, (acc / total).to(out.dtype.element_ty), mask=d < D)


def attend(
    query: Tensor,
    cache: tuple[Tensor, Tensor],
    out: Tensor,
    step: Step,
    *,
    window: int | None,
    t: AttentionTile,
    pdl: int,
) -> None:
    """out [tokens, heads, D] = attention of ``query`` (same shape) over each row's keys up to its own.

    ``cache``: keys and values [R, kv_heads, capacity, D] of the step's rows; the new tokens' keys stand there already.
    The step's ``work``: part and stats buffers where its bound is above t.chunk (see the kernel).
    """
    keys, values = cache
    tokens, heads, d = query.shape
    rows, kv, capacity = keys.shape[:3]
    group = heads // kv
    common = {"HEADS": heads, "D": d, "DP": power_of_two(d), "WINDOW": window is not None} | overlap(pdl)
    scale = d**-0.5 * LOG2E
    if step.packed is not None:  # of any rows, as many of each as there may be
        tiles = step.packed.tiles
        launch(
            _attend_kernel, (1, len(tiles) * kv),
            query, keys, values, out, out, out, tiles, tiles, tiles, 0, capacity, 1, window or 0, scale,
            KV=kv, BQ=t.packed(group)[0], BK=t.keys, CHUNK=1 << 30, SPLIT=False, TREE=False, RAGGED=True,
            num_warps=t.warps, num_stages=t.deep, **common,
        )  # fmt: skip
        return
    assert tokens == rows * step.width
    splits = pieces(step.bound, t.chunk) if step.work is not None else 1
    part, stats = step.work if step.work is not None else (out, out)
    cut = {"KV": kv, "BK": t.keys, "CHUNK": t.chunk if splits > 1 else 1 << 30, "SPLIT": splits > 1}
    cut |= {"num_warps": t.warps, "num_stages": t.stages_for(rows, splits)}
    lengths, width, tree = step.lengths, step.width, step.tree
    if t.one and width == 1:
        launch(
            _attend_one_kernel, (splits, rows * kv),
            query, keys, values, out, part, stats, lengths, capacity, splits, window or 0, scale,
            BQ=max(16, power_of_two(group)), **cut | {"BK": t.one}, **common,
        )  # fmt: skip
    else:
        bits, depths = tree if tree is not None else (lengths, lengths)
        # Few tokens: one size for all, so that a token's sums are the same alone and among others.
        tile = t.queries if tokens <= 32 else min(max(t.queries, power_of_two(group * width)), t.most)
        launch(
            _attend_kernel, (splits, rows * kv, pieces(group * width, tile)),
            query, keys, values, out, part, stats, lengths, bits, depths, width, capacity, splits, window or 0, scale,
            BQ=tile, TREE=tree is not None, RAGGED=False, **cut, **common,
        )  # fmt: skip
    if splits > 1:
        launch(
            _join_kernel, (tokens, heads),
            out, part, stats, lengths, width, splits, window or 0, CHUNK=t.chunk, GROUP=16, TREE=tree is not None,
            num_warps=4, **common,
        )  # fmt: skip
