// Products of many tokens by tile registers.
//
// Knows: how a product is cut into steps, and what waits for what. Does not know: layers, threads.
//
// A step is a group of 32 inputs (16 where a group's halves have scales of their own, or sums that 16 bits hold) of W tiles of
// outputs; a unit is a step times up to 16 tokens. Sums of a unit are whole numbers, and what follows them (scales, minima,
// sums of groups and blocks) is said with the same operations in the same order as in product.h and product_256.h: the same
// bits. Instructions for tiles take long, and what they store is slowly there, so units overlap: one is multiplied while the
// sums of the last are stored and those of the one before are scaled. Weights are unpacked a step ahead.
#pragma once
#include "product_256.h"
#include "tiles.h"

#if defined(HS_TILES)

namespace hs {

// A group's weights as the dot products want them.
template <int KIND> HS_INLINE void spell_out(const uint8_t* p, uint8_t* to) {
    Block<1> block;
    block.template unpack<KIND>(0, p);
#if defined(__AVX512F__)
    for (int j = 0; j < 8; j++) _mm512_store_si512(to + 64 * j, block.w[0][j]);
#else
    memcpy(to, block.w[0], 512);
#endif
}

template <int KIND, int W, int TILES> class TiledProduct {
    static constexpr int PARTS = KIND == Q5_K || KIND == Q6_K ? 2 : 1, ROWS = 8 / PARTS;  // steps of a group; their quads
    static constexpr int STEPS = block_groups(KIND) * PARTS;                              // of a block
    static constexpr size_t BLOCK = block_bytes(KIND);

  public:
    TiledProduct(const uint8_t* data, size_t stride, int blocks, const Inputs& in, int tokens, vf* out)
        : data(data), stride(stride), in(in), tokens(tokens), out(out), all(blocks * (TILES / W) * STEPS),
          chunks((tokens + TILE_ROWS - 1) / TILE_ROWS), rows((tokens + chunks - 1) / chunks) {}

    void run() {
        need_tiles(rows, GROUP / PARTS);
        for (int i = 0; i < TILES * tokens; i++) out[i] = splat(0.0f);
        int unit = 0;
        unpack(at(0), 0);
#pragma GCC unroll 1
        for (int s = 0; s < all; s++) {
            const Step step = at(s);
            if (s + 1 < all) unpack(at(s + 1), (s + 1) % 2);
            load_weights(step, s % 2);
#pragma GCC unroll 1
            for (int chunk = 0; chunk < chunks; chunk++, unit++) {
                multiply(step, chunk * rows, unit % 2);
                flying[unit % 4] = {step, chunk * rows};
                if (unit >= 1) keep((unit + 1) % 2);
                if (unit >= 2) finish(flying[(unit - 2) % 4], unit % 2);
            }
        }
        keep((unit + 1) % 2);
        if (unit >= 2) finish(flying[(unit - 2) % 4], unit % 2);
        finish(flying[(unit - 1) % 4], (unit + 1) % 2);
    }

  private:
    struct Step {
        int block, first, group, part;  // of the first .. first + W - 1st tile; the group's number in its block
    };
    struct Unit {
        Step step;
        int token;
    };

    Step at(int s) const {
        const int inner = s % STEPS, outer = s / STEPS;
        return {outer / (TILES / W), outer % (TILES / W) * W, inner / PARTS, inner % PARTS};
    }
    const uint8_t* block_of(const Step& s, int i) const { return data + stride * (s.first + i) + BLOCK * s.block; }

    // The weights of a step, and a request for later ones.
    HS_INLINE void unpack(const Step& s, int buffer) {
        if (s.part) return;
        const size_t next = BLOCK * s.block + BLOCK * s.first / TILES * (STEPS > 1) + AHEAD;
        const uint8_t* ahead = data + next + (next < stride ? 0 : stride * (TILES - 1));
        if constexpr (by_256(KIND))
            ask_ahead<KIND, W, TILES>(ahead, stride, s.group);
        else
            for (int i = 0; i < W; i++)
                for (size_t line = 0; line < BLOCK; line += 64) __builtin_prefetch(ahead + stride * (s.first + i) + line);
        if (KIND == INT8) return;
        for (int i = 0; i < W; i++)
            spell_out<KIND>(block_of(s, i) + group_bytes(KIND) * s.group, weights[PARTS == 1 ? buffer : s.group % 2][i]);
    }

    HS_INLINE void load_weights(const Step& s, int buffer) const {
        const auto from = [&](int i) -> const uint8_t* {
            if (KIND == INT8) return block_of(s, i);
            return weights[PARTS == 1 ? buffer : s.group % 2][i] + 64 * ROWS * s.part;
        };
        tile_load<WEIGHTS>(from(0), 64);
        if (W > 1) tile_load<WEIGHTS + 1>(from(W - 1), 64);
    }

    template <int SET> HS_INLINE void multiply_set(const int8_t* numbers) const {
        tile_load<NUMBERS + SET>(numbers, GROUP);
        tile_multiply<SET, 0>();
        if (W > 1) tile_multiply<SET, 1>();
    }
    HS_INLINE void multiply(const Step& s, int token, int set) const {
        const size_t group = (size_t)block_groups(KIND) * s.block + s.group;
        const int8_t* numbers = in.numbers + (group * in.rows + token) * GROUP + GROUP / PARTS * s.part;
        if (set)
            multiply_set<1>(numbers);
        else
            multiply_set<0>(numbers);
    }

    template <int SET> HS_INLINE void keep_set() {
        tile_store<SUMS + 2 * SET>(sums[SET][0]);
        if (W > 1) tile_store<SUMS + 2 * SET + 1>(sums[SET][W - 1]);
    }
    HS_INLINE void keep(int set) {
        if (set)
            keep_set<1>();
        else
            keep_set<0>();
    }

    // What follows a unit's sums.
    __attribute__((noinline)) void finish(const Unit& unit, int set) {
        const int count = tokens - unit.token < rows ? tokens - unit.token : rows;
        vf* to = out + unit.step.first * tokens + unit.token;
        if constexpr (by_256(KIND))
            add_scaled(unit.step, unit.token, count, sums[set], to);
        else
            add_floats(unit.step, unit.token, count, sums[set], to);
    }

    HS_INLINE void add_floats(const Step& s, int token, int count, const vi (*found)[TILE_ROWS], vf* to) const {
        Scales<KIND> own[W];
        for (int i = 0; i < W; i++) own[i].from(block_of(s, i) + scales_at(KIND));
        const size_t at = (size_t)s.block * in.rows + token;
#pragma GCC unroll 2
        for (int t = 0; t < count; t++) {
            const vf scale = splat(in.scales[at + t]), total = splat(in.totals[at + t]);
            for (int i = 0; i < W; i++) {
                const vi whole = KIND == INT8 ? found[i][t] + splat_int(in.offsets[at + t]) : found[i][t];
                vf sum = fma(to_floats(whole), own[i].scale * scale, to[i * tokens + t]);
                if (KIND == INT4) sum = fma(own[i].least, total, sum);
                to[i * tokens + t] = sum;
            }
        }
    }

    HS_INLINE void add_scaled(const Step& s, int token, int count, const vi (*found)[TILE_ROWS], vf* to) {
        using Scaled = ScaledBlock<KIND, W>;
        const size_t at = ((size_t)8 * s.block + s.group) * in.rows + token;
        const bool begins = s.group == 0 && s.part == 0;
        typename Scaled::Scale own[W];
        for (int i = 0; i < W; i++) own[i] = Scaled::scale_of(block_of(s, i), s.group, s.part);
#pragma GCC unroll 2
        for (int t = 0; t < count; t++) {
            const auto factor = Scaled::factor_of((const four_numbers*)in.factors + at + t);
            for (int i = 0; i < W; i++) {
                const vi of = KIND == Q6_K ? found[i][t] + splat_int(in.halves[2 * (at + t) + s.part]) : found[i][t];
                vi& sum = whole[i][token + t];
                sum = Scaled::scaled(begins ? splat_int(0) : sum, of, own[i], factor);
            }
        }
        if (s.group < 7 || s.part < PARTS - 1) return;
        BlockEnd<KIND, W> end;
        for (int i = 0; i < W; i++) end.from(i, block_of(s, i));
#pragma GCC unroll 1
        for (int t = 0; t < count; t++) end.add(in, s.block, token + t, &whole[0][token + t], MOST_TOKENS, to + t, tokens);
    }

    const uint8_t* data;
    size_t stride;
    const Inputs& in;
    int tokens;
    vf* out;
    int all, chunks, rows;  // steps; of tokens, so many in each
    Unit flying[4];
    vi sums[2][W][TILE_ROWS];
    vi whole[W][MOST_TOKENS];  // by 256: a block's
    alignas(64) uint8_t weights[2][W][512];
};

template <int KIND, int W, int TILES>
__attribute__((noinline)) void tiled_product(const uint8_t* data, size_t stride, int blocks, const Inputs& in, int tokens,
                                             vf* out) {
    TiledProduct<KIND, W, TILES>(data, stride, blocks, in, tokens, out).run();
}

}  // namespace hs

#endif
