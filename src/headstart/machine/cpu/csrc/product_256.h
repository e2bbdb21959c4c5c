// Products of the kinds that have blocks of 256 (Q4_K, Q5_K, Q6_K), with inputs that were rounded by 256.
//
// Knows: in which order blocks, groups, tiles and tokens are taken. Does not know: layers, threads.
//
// A block's sums are whole numbers until its end (block_256.h), and blocks are added up in order: a token's results are the
// same bits alone and beside others.
#pragma once
#include "block_256.h"
#include "product.h"

namespace hs {

// What a block of W tiles adds at its end.
template <int KIND, int W> struct BlockEnd {
    vf d[W], e[W];
    Minima minima[W];

    HS_INLINE void from(int tile, const uint8_t* block) {
        const uint8_t* p = block + scales_at(KIND);
        d[tile] = load_half((const uint16_t*)(p + 256));
        if (KIND == Q6_K) return;
        e[tile] = -load_half((const uint16_t*)(p + 288));
        minima[tile].from(p + 128);
    }
    // To token t's sums: ``whole`` and ``out`` of tile i are i * apart behind.
    HS_INLINE void add(const Inputs& in, int b, int t, const vi* whole, vf* out, int apart) const {
        const vf scale = splat(in.scales[(size_t)8 * b * in.rows + t]);
        const Pairs pairs{(const four_numbers*)in.pairs + (size_t)4 * b * in.rows + t, (size_t)in.rows};
        for (int i = 0; i < W; i++) {
            vf found = d[i] * __builtin_convertvector(whole[i * apart], vf);
            if (KIND != Q6_K) found = fma(e[i], __builtin_convertvector(minima[i].times(pairs), vf), found);
            out[i * apart] = fma(found, scale, out[i * apart]);
        }
    }
};

constexpr size_t part_bytes(int kind) { return block_bytes(kind) / 8; }  // of a block, for each of its groups

// Block b of W tiles times N tokens: out[i * N + t]. ``ahead``: where weights are asked for, an equal part of all TILES
// tiles for each group. The sums of so few tokens stay in registers.
template <int KIND, int W, int TILES, int N>
HS_INLINE void add_block(const uint8_t* const* block, const uint8_t* ahead, size_t stride, const Inputs& in, int b, vf* out) {
    constexpr size_t ASKED = part_bytes(KIND) * W / TILES;
    constexpr int TWO = N < 2 ? 1 : 2;  // tokens at once
    vi whole[W * N] = {};
#pragma GCC unroll 1
    for (int g = 0; g < 8; g++) {
        ScaledBlock<KIND, W> group;
        for (int i = 0; i < TILES; i++)
            for (size_t line = 0; line < ASKED; line += 64) __builtin_prefetch(ahead + stride * i + ASKED * g + line);
        for (int i = 0; i < W; i++) group.from(i, block[i], g);
        const size_t at = (size_t)(8 * b + g) * in.rows;
#pragma GCC unroll 4
        for (int t = 0; t < N; t += TWO)
            if (N - t >= TWO)
                group.template add<TWO>(in.numbers + (at + t) * GROUP, in.halves + 2 * (at + t), whole + t, N);
            else
                group.template add<1>(in.numbers + (at + t) * GROUP, in.halves + 2 * (at + t), whole + t, N);
    }
    BlockEnd<KIND, W> end;
    for (int i = 0; i < W; i++) end.from(i, block[i]);
#pragma GCC unroll 4
    for (int t = 0; t < N; t++) end.add(in, b, t, whole + t, out + t, N);
}

// The same for any number of tokens, whose sums lie in memory: the registers hold the weights.
template <int KIND, int W, int TILES>
HS_INLINE void add_block(const uint8_t* const* block, const uint8_t* ahead, size_t stride, const Inputs& in, int b,
                         int tokens, vf* out) {
    constexpr size_t ASKED = part_bytes(KIND) * W / TILES;
    constexpr int MOST = Block<W>::FEW < 4 ? 1 : KIND == Q4_K ? 4 : 2;  // tokens at once: as many as there are registers for
    vi whole[W * MOST_TOKENS];
    for (int i = 0; i < W * tokens; i++) whole[i] = splat_int(0);
#pragma GCC unroll 1
    for (int g = 0; g < 8; g++) {
        ScaledBlock<KIND, W> group;
        for (int i = 0; i < TILES; i++)
            for (size_t line = 0; line < ASKED; line += 64) __builtin_prefetch(ahead + stride * i + ASKED * g + line);
        for (int i = 0; i < W; i++) group.from(i, block[i], g);
        const size_t at = (size_t)(8 * b + g) * in.rows;
        const int8_t* numbers = in.numbers + at * GROUP;
        const int32_t* halves = in.halves + 2 * at;
        int t = 0;
#pragma GCC unroll 1
        for (; t + MOST <= tokens; t += MOST) group.template add<MOST>(numbers + t * GROUP, halves + 2 * t, whole + t, tokens);
        if constexpr (MOST > 3)
            if (tokens - t == 3) group.template add<3>(numbers + t * GROUP, halves + 2 * t, whole + t, tokens);
        if constexpr (MOST > 2)
            if (tokens - t == 2) group.template add<2>(numbers + t * GROUP, halves + 2 * t, whole + t, tokens);
        if constexpr (MOST > 1)
            if (tokens - t == 1) group.template add<1>(numbers + t * GROUP, halves + 2 * t, whole + t, tokens);
    }
    BlockEnd<KIND, W> end;
    for (int i = 0; i < W; i++) end.from(i, block[i]);
#pragma GCC unroll 1
    for (int t = 0; t < tokens; t++) end.add(in, b, t, whole + t, out + t, tokens);
}

// N tokens, or any number of them if N is 0.
template <int KIND, int W, int TILES, int N>
__attribute__((noinline)) void product_256(const uint8_t* data, size_t stride, int blocks, const Inputs& in, int tokens,
                                           vf* out) {
    constexpr size_t BLOCK = block_bytes(KIND);
    for (int i = 0; i < TILES * tokens; i++) out[i] = splat(0.0f);
    for (int b = 0; b < blocks; b++)
        for (int first = 0; first < TILES; first += W) {
            const uint8_t* block[W];
            for (int i = 0; i < W; i++) block[i] = data + stride * (first + i) + BLOCK * b;
            const size_t next = BLOCK * b + BLOCK * first / TILES + AHEAD;
            const uint8_t* ahead = data + next + (next < stride ? 0 : stride * (TILES - 1));
            if constexpr (N)
                add_block<KIND, W, TILES, N>(block, ahead, stride, in, b, out + first * N);
            else
                add_block<KIND, W, TILES>(block, ahead, stride, in, b, tokens, out + first * tokens);
        }
}

// One token waits for memory, which is read faster group by group: all tiles of a group before the next one's.
template <int KIND, int W, int TILES>
__attribute__((noinline)) void one_product_256(const uint8_t* data, size_t stride, int blocks, const Inputs& in, vf* out) {
    constexpr size_t BLOCK = block_bytes(KIND), PART = part_bytes(KIND);
    for (int i = 0; i < TILES; i++) out[i] = splat(0.0f);
    for (int b = 0; b < blocks; b++) {
        vi whole[TILES] = {};
#pragma GCC unroll 1
        for (int g = 0; g < 8; g++) {
            const size_t at = (size_t)(8 * b + g) * in.rows, from = BLOCK * b + PART * g + AHEAD;
            const uint8_t* ahead = data + from + (from < stride ? 0 : stride * (TILES - 1));
#pragma GCC unroll 2
            for (int first = 0; first < TILES; first += W) {
                ScaledBlock<KIND, W> group;
                for (int i = 0; i < W; i++) {
                    for (size_t line = 0; line < PART; line += 64) __builtin_prefetch(ahead + stride * (first + i) + line);
                    group.from(i, data + stride * (first + i) + BLOCK * b, g);
                }
                group.template add<1>(in.numbers + at * GROUP, in.halves + 2 * at, whole + first, 1);
            }
        }
        for (int i = 0; i < TILES; i++) {
            BlockEnd<KIND, 1> end;
            end.from(0, data + stride * i + BLOCK * b);
            end.add(in, b, 0, whole + i, out + i, 1);
        }
    }
}

// What ``product`` is for the other kinds.
template <int KIND, int W, int TILES>
HS_INLINE void by_256_product(const uint8_t* data, size_t stride, int blocks, const Inputs& in, int tokens, vf* out) {
    if (tokens == 1) return one_product_256<KIND, W, TILES>(data, stride, blocks, in, out);
    if constexpr (Block<W>::FEW >= 4) {
        if (tokens == 2) return product_256<KIND, W, TILES, 2>(data, stride, blocks, in, 2, out);
        if (tokens == 3) return product_256<KIND, W, TILES, 3>(data, stride, blocks, in, 3, out);
        if (tokens == 4) return product_256<KIND, W, TILES, 4>(data, stride, blocks, in, 4, out);
    }
    product_256<KIND, W, TILES, 0>(data, stride, blocks, in, tokens, out);
}

}  // namespace hs
