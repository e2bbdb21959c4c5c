// Products of many tokens by tile registers.
//
// Knows: how a product is cut into steps, and what waits for what. Does not know: layers, threads.
//
// A step is a group of 32 inputs (or half of one, where halves have scales of their own, or sums of which 16 bits hold only
// a half's) of one tile of outputs; a unit is a step times up to 16 tokens. Sums of a unit are whole numbers, and what
// follows them (scales, minima, sums of groups and blocks) is said with the same operations in the same order as in
// product.h and product_256.h: the same bits. Tiles take long, so that four units overlap: the operands of one are loaded,
// the next is multiplied, the sums of the third are stored, those of the last are scaled. Weights are unpacked two steps
// ahead. Up to 16 tokens: their numbers stay while all tiles are multiplied with them. More: weights stay for all tokens.
#pragma once
#include "product_256.h"
#include "tiles.h"

namespace hs {

// From how many tokens on they are faster than dot products; 0: nowhere, as far as was measured (docs/internals/cpu-kernels.md).
constexpr int tiles_pay_from(int) { return 0; }

#if defined(HS_TILES)

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

template <int KIND, int TILES, bool ONE> class TiledProduct {  // ONE: no more tokens than a unit has
    static constexpr int PARTS = KIND == Q5_K || KIND == Q6_K ? 2 : 1;  // steps of a group
    static constexpr int PIECES = 3;
    static constexpr size_t BLOCK = block_bytes(KIND), PART = BLOCK / block_groups(KIND);

  public:
    TiledProduct(const uint8_t* data, size_t stride, int blocks, const Inputs& in, int tokens, vf* out)
        : data(data), stride(stride), in(in), tokens(tokens), out(out), blocks(blocks),
          chunks((tokens + TILE_ROWS - 1) / TILE_ROWS), rows((tokens + chunks - 1) / chunks) {}

    void run() {
        need_tiles(rows, GROUP / PARTS, ONE);
        for (int i = 0; i < TILES * tokens; i++) out[i] = splat(0.0f);
        Step step, next, later;
        for (int i = 0; i < 2 * PARTS; i++) unpack(later), later = after(later);
        load_weights(next, 0);
        load_numbers(next, 0, 0);
        next = after(next);
        int unit = 0, third = 0;  // third: unit % 3
#pragma GCC unroll 1
        for (; step.block < blocks; step = next, next = after(next), later = after(later)) {
            if (later.block < blocks) unpack(later);
#pragma GCC unroll 1
            for (int chunk = 0; chunk < chunks; chunk++, unit++) {
                const int following = third == 2 ? 0 : third + 1, last = third == 0 ? 2 : third - 1;
                if (unit >= 2) finish(flying[(unit - 2) % 4], following, 0);
                if (chunk + 1 < chunks) {
                    load_numbers(step, chunk + 1, following);
                } else if (next.block < blocks) {
                    load_weights(next, following);
                    load_numbers(next, 0, following);
                }
                if (unit >= 2) finish(flying[(unit - 2) % 4], following, 1);
                multiply(2 * third + (ONE ? numbers_place(step) : step.number % 2));
                flying[unit % 4] = {step, chunk * rows};
                if (unit >= 1) keep(last);
                if (unit >= 2) finish(flying[(unit - 2) % 4], following, 2);
                third = following;
            }
        }
        keep((unit - 1) % 3);
        for (int i = unit < 2 ? 1 : 2; i > 0; i--)
            for (int piece = 0; piece < PIECES; piece++) finish(flying[(unit - i) % 4], (unit - i) % 3, piece);
    }

  private:
    struct Step {
        int block = 0, group = 0, tile = 0, part = 0;  // the group's number in its block
        int number = 0;
    };
    struct Unit {
        Step step;
        int token;
    };

    static HS_INLINE Step after(Step s) {
        s.number++;
        if (PARTS > 1 && ++s.part < PARTS) return s;
        s.part = 0;
        if (++s.tile < TILES) return s;
        s.tile = 0;
        if (++s.group < block_groups(KIND)) return s;
        s.group = 0;
        s.block++;
        return s;
    }
    HS_INLINE size_t group_of(const Step& s) const { return (size_t)block_groups(KIND) * s.block + s.group; }
    HS_INLINE const uint8_t* block_of(const Step& s) const { return data + stride * s.tile + BLOCK * s.block; }
    HS_INLINE int buffer_of(const Step& s) const { return s.number / PARTS % 4; }

    // The weights of a group, and a request for later ones.
    HS_INLINE void unpack(const Step& s) {
        if (s.part) return;
        const size_t from = BLOCK * s.block + PART * s.group + AHEAD;
        const uint8_t* ahead = data + from + stride * s.tile + (from < stride ? 0 : stride * (TILES - 1));
        for (size_t line = 0; line < PART; line += 64) __builtin_prefetch(ahead + line);
        if (KIND != INT8) spell_out<KIND>(block_of(s) + group_bytes(KIND) * s.group, weights[buffer_of(s)]);
    }

    // Registers: the two that stay, by ``place``, or the three that go round.
    static HS_INLINE void load_stay(int place, const void* p, size_t apart) {
        if (place)
            tile_load<1>(p, apart);
        else
            tile_load<0>(p, apart);
    }
    static HS_INLINE void load_round(int third, const void* p, size_t apart) {
        if (third == 0)
            tile_load<ROUND>(p, apart);
        else if (third == 1)
            tile_load<ROUND + 1>(p, apart);
        else
            tile_load<ROUND + 2>(p, apart);
    }
    HS_INLINE int numbers_place(const Step& s) const { return PARTS > 1 ? s.part : s.group + s.block * block_groups(KIND) & 1; }

    HS_INLINE void load_weights(const Step& s, int third) const {
        const uint8_t* p = KIND == INT8 ? block_of(s) : weights[buffer_of(s)] + 512 / PARTS * s.part;
        if (ONE)
            load_round(third, p, 64);
        else
            load_stay(s.number % 2, p, 64);
    }
    HS_INLINE void load_numbers(const Step& s, int chunk, int third) const {
        if (ONE && s.tile) return;  // those of the first tile
        const int8_t* p = in.numbers + (group_of(s) * in.rows + chunk * rows) * GROUP + GROUP / PARTS * s.part;
        if (ONE)
            load_stay(numbers_place(s), p, GROUP);
        else
            load_round(third, p, GROUP);
    }
    template <int THIRD, int PLACE> static HS_INLINE void multiply_by() {
        tile_multiply<SUMS + THIRD, ONE ? PLACE : ROUND + THIRD, ONE ? ROUND + THIRD : PLACE>();
    }
    static HS_INLINE void multiply(int which) {
        switch (which) {
            case 0: return multiply_by<0, 0>();
            case 1: return multiply_by<0, 1>();
            case 2: return multiply_by<1, 0>();
            case 3: return multiply_by<1, 1>();
            case 4: return multiply_by<2, 0>();
            default: return multiply_by<2, 1>();
        }
    }
    HS_INLINE void keep(int third) {
        if (third == 0)
            tile_store<SUMS>(sums[0]);
        else if (third == 1)
            tile_store<SUMS + 1>(sums[1]);
        else
            tile_store<SUMS + 2>(sums[2]);
    }

    // What follows the sums of a part of a unit's tokens. In pieces between the others' instructions, because a core does
    // not look far enough ahead to find them by itself.
    __attribute__((noinline)) void finish(const Unit& unit, int third, int piece) {
        const int count = tokens - unit.token < rows ? tokens - unit.token : rows;
        const int from = count * piece / PIECES, some = count * (piece + 1) / PIECES - from, token = unit.token + from;
        vf* to = out + unit.step.tile * tokens + token;
        if constexpr (by_256(KIND))
            add_scaled(unit.step, token, some, sums[third] + from, to);
        else
            add_floats(unit.step, token, some, sums[third] + from, to);
    }

    HS_INLINE void add_floats(const Step& s, int token, int count, const vi* found, vf* to) const {
        Scales<KIND> own;
        own.from(block_of(s) + scales_at(KIND));
        const size_t at = (size_t)s.block * in.rows + token;
#pragma GCC unroll 4
        for (int t = 0; t < count; t++) {
            const vi whole = KIND == INT8 ? found[t] + splat_int(in.offsets[at + t]) : found[t];
            vf sum = fma(to_floats(whole), own.scale * splat(in.scales[at + t]), to[t]);
            if (KIND == INT4) sum = fma(own.least, splat(in.totals[at + t]), sum);
            to[t] = sum;
        }
    }

    HS_INLINE void add_scaled(const Step& s, int token, int count, const vi* found, vf* to) {
        using Scaled = ScaledBlock<KIND, 1>;
        const size_t at = group_of(s) * in.rows + token;
        const auto own = Scaled::scale_of(block_of(s), s.group, s.part);
        const four_numbers* factors = (const four_numbers*)in.factors + at;
        const int32_t* halves = in.halves + 2 * at + s.part;
        vi* sum = whole[s.tile] + token;
        const auto of = [&](int t) { return KIND == Q6_K ? found[t] + splat_int(halves[2 * t]) : found[t]; };
        if (s.group == 0 && s.part == 0) {
#pragma GCC unroll 4
            for (int t = 0; t < count; t++) sum[t] = Scaled::scaled(splat_int(0), of(t), own, Scaled::factor_of(factors + t));
            return;
        }
#pragma GCC unroll 4
        for (int t = 0; t < count; t++) sum[t] = Scaled::scaled(sum[t], of(t), own, Scaled::factor_of(factors + t));
        if (s.group < 7 || s.part < PARTS - 1) return;
        BlockEnd<KIND, 1> end;
        end.from(0, block_of(s));
#pragma GCC unroll 1
        for (int t = 0; t < count; t++) end.add(in, s.block, token + t, sum + t, 0, to + t, 0);
    }

    const uint8_t* data;
    size_t stride;
    const Inputs& in;
    int tokens;
    vf* out;
    int blocks, chunks, rows;  // chunks of so many tokens each
    Unit flying[4];
    vi sums[3][TILE_ROWS];
    vi whole[TILES][MOST_TOKENS];  // by 256: a block's
    alignas(64) uint8_t weights[4][512];
};

template <int KIND, int TILES>
__attribute__((noinline)) void tiled_product(const uint8_t* data, size_t stride, int blocks, const Inputs& in, int tokens,
                                             vf* out) {
    if (tokens <= TILE_ROWS)
        TiledProduct<KIND, TILES, true>(data, stride, blocks, in, tokens, out).run();
    else
        TiledProduct<KIND, TILES, false>(data, stride, blocks, in, tokens, out).run();
}

#endif

}  // namespace hs
