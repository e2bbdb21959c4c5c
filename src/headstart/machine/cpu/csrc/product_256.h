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
    // To token t's sums: tile i's are i * apart behind, its whole numbers i * whole_apart.
    HS_INLINE void add(const Inputs& in, int b, int t, const vi* whole, int whole_apart, vf* out, int apart) const {
        const vf scale = splat(in.bases[(size_t)b * in.rows + t]);
        const Pairs pairs{(const four_numbers*)in.pairs + (size_t)4 * b * in.rows + t, (size_t)in.rows};
        for (int i = 0; i < W; i++) {
            vf found = d[i] * to_floats(whole[i * whole_apart]);
            if (KIND != Q6_K) found = fma(e[i], to_floats(minima[i].times(pairs)), found);
            out[i * apart] = fma(found, scale, out[i * apart]);
        }
    }
};

constexpr size_t part_bytes(int kind) { return block_bytes(kind) / 8; }  // of a block, for each of its groups

// Ask for a part of the weights that come later, for group g: an equal part of tiles FROM .. TO - 1 of TILES.
template <int KIND, int W, int TILES, int FROM = 0, int TO = TILES>
HS_INLINE void ask_ahead(const uint8_t* ahead, size_t stride, int g) {
    constexpr size_t ASKED = part_bytes(KIND) * W / TILES;
    for (int i = FROM; i < TO; i++)
        for (size_t line = 0; line < ASKED; line += 64) __builtin_prefetch(ahead + stride * i + ASKED * g + line);
}

// A group's products with N tokens, from ``at`` on.
template <int N, int KIND, int W, typename Numbers>
HS_INLINE void add_group(const ScaledBlock<KIND, W, Numbers>& group, const Inputs& in, size_t at, vi* whole, int apart) {
    group.template add<N>(in.numbers + at * GROUP, in.halves + 2 * at, in.factors + at, whole, apart);
}

// Block b of W tiles times N tokens, whose sums are in registers meanwhile: added to out[i * apart + t]. ``ahead``: where
// weights of tiles FROM .. TO - 1 are asked for.
template <int KIND, int W, int TILES, int N, int FROM = 0, int TO = TILES>
__attribute__((noinline)) void add_few(const uint8_t* const* block, const uint8_t* ahead, size_t stride, const Inputs& in,
                                       int b, int apart, vf* out) {
    vi whole[W * N];
    for (int i = 0; i < W * N; i++) whole[i] = splat_int(0);
#pragma GCC unroll 1
    for (int g = 0; g < 8; g++) {
        ScaledBlock<KIND, W, PackedBlock<W>> group;
        ask_ahead<KIND, W, TILES, FROM, TO>(ahead, stride, g);
        for (int i = 0; i < W; i++) group.from(i, block[i], g);
        const size_t at = (size_t)(8 * b + g) * in.rows;
        if constexpr (Block<W>::AT_ONCE >= N) {
            add_group<N>(group, in, at, whole, N);
        } else {
#pragma GCC unroll 2
            for (int t = 0; t + 2 <= N; t += 2) add_group<2>(group, in, at + t, whole + t, N);
            if constexpr (N % 2) add_group<1>(group, in, at + N - 1, whole + N - 1, N);
        }
    }
    BlockEnd<KIND, W> end;
    for (int i = 0; i < W; i++) end.from(i, block[i]);
#pragma GCC unroll 4
    for (int t = 0; t < N; t++) end.add(in, b, t, whole + t, N, out + t, apart);
}

// The same for any number of tokens, whose sums lie in memory.
template <int KIND, int W, int TILES>
__attribute__((noinline)) void add_many(const uint8_t* const* block, const uint8_t* ahead, size_t stride, const Inputs& in,
                                        int b, int tokens, vf* out) {
    constexpr int MOST = Block<W>::FEW < 4 ? 1 : KIND == Q4_K || Block<W>::AT_ONCE >= 4 ? 4 : 2;  // tokens at once: as many as registers allow
    vi whole[W * MOST_TOKENS];
    for (int i = 0; i < W * tokens; i++) whole[i] = splat_int(0);
#pragma GCC unroll 1
    for (int g = 0; g < 8; g++) {
        ScaledBlock<KIND, W> group;
        ask_ahead<KIND, W, TILES>(ahead, stride, g);
        for (int i = 0; i < W; i++) group.from(i, block[i], g);
        const size_t at = (size_t)(8 * b + g) * in.rows;
        int t = 0;
#pragma GCC unroll 1
        for (; t + MOST <= tokens; t += MOST) add_group<MOST>(group, in, at + t, whole + t, tokens);
        if constexpr (Block<W>::AT_ONCE >= 4) {
            if (tokens - t == 3) add_group<3>(group, in, at + t, whole + t, tokens);
            if (tokens - t == 2) add_group<2>(group, in, at + t, whole + t, tokens);
            if (tokens - t == 1) add_group<1>(group, in, at + t, whole + t, tokens);
        } else if constexpr (MOST > 1) {
            if (MOST > 2 && tokens - t >= 2) add_group<2>(group, in, at + t, whole + t, tokens), t += 2;
            if (tokens > t) add_group<1>(group, in, at + t, whole + t, tokens);
        }
    }
    BlockEnd<KIND, W> end;
    for (int i = 0; i < W; i++) end.from(i, block[i]);
#pragma GCC unroll 1
    for (int t = 0; t < tokens; t++) end.add(in, b, t, whole + t, tokens, out + t, tokens);
}

// Do five to eight tokens of Q4_K go in two turns, and four with their sums in registers? To unpack a second time costs less
// than sums in memory, but on newer processors.
#if defined(__AVX512FP16__)
constexpr bool IN_TURNS = false;
#else
constexpr bool IN_TURNS = true;
#endif

// N tokens, or any number of them if N is 0.
template <int KIND, int W, int TILES, int N>
__attribute__((noinline)) void product_256(const uint8_t* data, size_t stride, int blocks, const Inputs& in, int tokens,
                                           vf* out) {
    constexpr size_t BLOCK = block_bytes(KIND);
    constexpr int FIRST = (N + 1) / 2, HALF = (TILES + 1) / 2;
    for (int i = 0; i < TILES * tokens; i++) out[i] = splat(0.0f);
    for (int b = 0; b < blocks; b++)
        for (int first = 0; first < TILES; first += W) {
            const uint8_t* block[W];
            for (int i = 0; i < W; i++) block[i] = data + stride * (first + i) + BLOCK * b;
            const size_t next = BLOCK * b + BLOCK * first / TILES + AHEAD;
            const uint8_t* ahead = data + next + (next < stride ? 0 : stride * (TILES - 1));
            vf* to = out + first * tokens;
            if constexpr (N > 4 && !all_at_once(TILES)) {
                // In two turns, each of which asks for a half, so that memory never rests.
                add_few<KIND, W, TILES, FIRST, 0, HALF>(block, ahead, stride, in, b, N, to);
                add_few<KIND, W, TILES, N - FIRST, HALF, TILES>(block, ahead, stride, in.from(FIRST), b, N, to + FIRST);
            } else if constexpr (N > 0) {
                add_few<KIND, W, TILES, N>(block, ahead, stride, in, b, N, to);
            } else {
                add_many<KIND, W, TILES>(block, ahead, stride, in, b, tokens, to);
            }
        }
}

// N tokens that wait for memory (one, or two where registers hold all sums): memory is read faster group by group, all tiles
// of a group before the next one's.
template <int KIND, int W, int TILES, int N>
__attribute__((noinline)) void abreast_256(const uint8_t* data, size_t stride, int blocks, const Inputs& in, vf* out) {
    constexpr size_t BLOCK = block_bytes(KIND), PART = part_bytes(KIND);
    for (int i = 0; i < TILES * N; i++) out[i] = splat(0.0f);
    for (int b = 0; b < blocks; b++) {
        vi whole[TILES * N];
        for (int i = 0; i < TILES * N; i++) whole[i] = splat_int(0);
#pragma GCC unroll 1
        for (int g = 0; g < 8; g++) {
            const size_t at = (size_t)(8 * b + g) * in.rows, from = BLOCK * b + PART * g + AHEAD;
            const uint8_t* ahead = data + from + (from < stride ? 0 : stride * (TILES - 1));
#pragma GCC unroll 2
            for (int first = 0; first < TILES; first += W) {
                ScaledBlock<KIND, W, PackedBlock<W>> group;
                for (int i = 0; i < W; i++) {
                    for (size_t line = 0; line < PART; line += 64) __builtin_prefetch(ahead + stride * (first + i) + line);
                    group.from(i, data + stride * (first + i) + BLOCK * b, g);
                }
                add_group<N>(group, in, at, whole + first * N, N);
            }
        }
        for (int i = 0; i < TILES; i++) {
            BlockEnd<KIND, 1> end;
            end.from(0, data + stride * i + BLOCK * b);
            for (int t = 0; t < N; t++) end.add(in, b, t, whole + i * N + t, N, out + i * N + t, N);
        }
    }
}

// What ``product`` is for the other kinds.
template <int KIND, int W, int TILES>
HS_INLINE void by_256_product(const uint8_t* data, size_t stride, int blocks, const Inputs& in, int tokens, vf* out) {
    if (tokens == 1) return abreast_256<KIND, W, TILES, 1>(data, stride, blocks, in, out);
    if constexpr (Block<W>::AT_ONCE >= 4)
        if (tokens == 2) return abreast_256<KIND, W, TILES, 2>(data, stride, blocks, in, out);
    if constexpr (Block<W>::FEW >= 4) {
        if (tokens == 2) return product_256<KIND, W, TILES, 2>(data, stride, blocks, in, 2, out);
        if (tokens == 3) return product_256<KIND, W, TILES, 3>(data, stride, blocks, in, 3, out);
        if constexpr (KIND != Q4_K || IN_TURNS)
            if (tokens == 4) return product_256<KIND, W, TILES, 4>(data, stride, blocks, in, 4, out);
    }
    if constexpr (Block<W>::FEW >= 4 && ((KIND == Q4_K && IN_TURNS) || all_at_once(TILES))) {  // the others take longer to unpack
        if (tokens == 5) return product_256<KIND, W, TILES, 5>(data, stride, blocks, in, 5, out);
        if (tokens == 6) return product_256<KIND, W, TILES, 6>(data, stride, blocks, in, 6, out);
        if (tokens == 7) return product_256<KIND, W, TILES, 7>(data, stride, blocks, in, 7, out);
        if (tokens == 8) return product_256<KIND, W, TILES, 8>(data, stride, blocks, in, 8, out);
    }
    product_256<KIND, W, TILES, 0>(data, stride, blocks, in, tokens, out);
}

}  // namespace hs
