// Rounded activations, and the products of packed matrices with them.
//
// Knows: how activations are rounded and what is multiplied and added in which order. Does not know: layers, threads.
//
// Activations are rounded to 8 bits for each token and each group of 32, so a token's results depend on nothing but the
// token: sums inside a group are whole numbers, and groups are added up in order, whatever else is computed beside it.
#pragma once
#include "block.h"

namespace hs {

// Rounded inputs of some tokens. A group's 32 numbers of all tokens lie side by side, then the next group's, so that a
// product with several tokens reads from end to end. Matrices that are not rounded read ``exact`` instead.
struct Inputs {
    int8_t* numbers;   // [width / 32, rows, 32]
    float* scales;     // [width / 32, rows]
    float* totals;     // the same: scale * sum of the group's numbers, for minima
    int32_t* offsets;  // the same: -128 * sum of the group's numbers, for INT8's + 128
    int32_t* halves;   // [width / 32, rows, 2] -32 * sum of 16 numbers, for Q6_K's + 32
    float* exact;      // [rows, width]
    int width, rows;

    Inputs from(int token) const { return moved(token, (size_t)token * width, width); }
    Inputs part(int first, int wide) const {  // of one token: its inputs from ``first`` on, a multiple of 32
        return moved((size_t)first / GROUP * rows, first, wide);
    }

  private:
    Inputs moved(size_t groups, size_t n, int wide) const {
        return {numbers + groups * GROUP, scales + groups, totals + groups, offsets + groups,
                halves + 2 * groups,      exact + n,       wide,            rows};
    }
};

// Round 32 inputs of a token. Infinities and NaN make the scale NaN, so that they are seen in the end.
HS_INLINE void round_group(const Inputs& to, int token, int group, vf a, vf b) {
    float* exact = to.exact + (size_t)token * to.width + group * GROUP;
    store(exact, a);
    store(exact + LANES, b);
    const float most = greatest(larger(magnitude(a), magnitude(b)));
    const float check = sum((a + b) * splat(0.0f));
    const float inverse = most > 0.0f ? 127.0f / most : 0.0f;
    const vi x = __builtin_convertvector(round_even(a * splat(inverse)), vi);
    const vi y = __builtin_convertvector(round_even(b * splat(inverse)), vi);
    typedef int8_t v16b __attribute__((vector_size(16)));
    const v16b p = __builtin_convertvector(x, v16b), q = __builtin_convertvector(y, v16b);
    const size_t at = (size_t)group * to.rows + token;
    memcpy(to.numbers + at * GROUP, &p, 16);
    memcpy(to.numbers + at * GROUP + 16, &q, 16);
    const int32_t first = sum(x), second = sum(y), total = first + second;
    const float scale = most / 127.0f + check;
    to.scales[at] = scale;
    to.totals[at] = scale * (float)total;
    to.offsets[at] = -128 * total;
    to.halves[2 * at] = -32 * first;
    to.halves[2 * at + 1] = -32 * second;
}

// A group's scales for its 16 outputs, exactly (a half times a byte is a float).
template <int KIND> struct Scales {
    vf scale, least, first, second;

    Scales() = default;
    // ``p``: where the block's scales begin; ``g``: number of the group in the block.
    HS_INLINE Scales(const uint8_t* p, int g) {
        if (KIND == INT8 || KIND == INT4) scale = load_half((const uint16_t*)p);
        if (KIND == INT4) least = load_half((const uint16_t*)(p + 32));
        if (KIND == Q4_K || KIND == Q5_K) {
            scale = load_half((const uint16_t*)(p + 256)) * load_bytes(p + LANES * g);
            least = -load_half((const uint16_t*)(p + 288)) * load_bytes(p + 128 + LANES * g);
        }
        if (KIND == Q6_K) {
            scale = load_half((const uint16_t*)(p + 256));
            first = load_bytes((const int8_t*)p + 2 * LANES * g);
            second = load_bytes((const int8_t*)p + 2 * LANES * g + LANES);
        }
    }
};

constexpr int MOST_TILES = 4;    // tiles of one call
constexpr int MOST_TOKENS = 64;  // tokens of one call
constexpr size_t AHEAD = 4096;   // bytes that weights are asked for before they are needed

// A group's products with a token: sums[i] += tile i's part. Whole numbers inside a group, groups in order.
template <int KIND, int W>
HS_INLINE void add_group(const Block<W>& numbers, const Scales<KIND>* own, const Inputs& in, size_t at, vf* sums) {
    const int8_t* a = in.numbers + at * GROUP;
    vf dot[W], second[W];
    if (KIND == Q6_K)
        numbers.dots(a, in.halves + 2 * at, dot, second);
    else
        numbers.template dot<KIND>(a, in.offsets + at, dot);
    const vf scale = splat(in.scales[at]), total = splat(in.totals[at]);
    for (int i = 0; i < W; i++) {
        if (KIND == Q6_K) dot[i] = fma(second[i], own[i].second, dot[i] * own[i].first);  // exact, too
        sums[i] = fma(dot[i], own[i].scale * scale, sums[i]);
        if (KIND != INT8 && KIND != Q6_K) sums[i] = fma(own[i].least, total, sums[i]);
    }
}

// W tiles (``stride`` bytes apart) times ``tokens`` tokens: out[i * tokens + t] is tile i's 16 outputs for token t. W tiles
// are W streams of memory: what is asked for behind a tile's end is the stream's next tile. Sums are kept in ``out``, so
// that the registers hold the weights, unless there is but ONE token.
template <int KIND, int W, bool ONE>
HS_INLINE void product(const uint8_t* data, size_t stride, int blocks, const Inputs& in, int tokens, vf* out) {
    vf sums[W];
    for (int i = 0; i < W; i++) sums[i] = splat(0.0f);
    if (!ONE)
        for (int i = 0; i < W * tokens; i++) out[i] = splat(0.0f);
    size_t at = 0;  // the group's place among the inputs
    for (int b = 0; b < blocks; b++)
        for (int g = 0; g < block_groups(KIND); g++, at += in.rows) {
            Block<W> numbers;
            Scales<KIND> own[W];
            for (int i = 0; i < W; i++) {
                const uint8_t* block = data + stride * i + block_bytes(KIND) * b;
                const size_t part = block_bytes(KIND) / block_groups(KIND), from = block_bytes(KIND) * b + part * g + AHEAD;
                const uint8_t* ahead = data + stride * i + from + (from < stride ? 0 : stride * (W - 1));
                for (size_t line = 0; line < part; line += 64) __builtin_prefetch(ahead + line);
                numbers.template unpack<KIND>(i, block + group_bytes(KIND) * g);
                own[i] = Scales<KIND>(block + scales_at(KIND), g);
            }
            if (ONE) {
                add_group<KIND, W>(numbers, own, in, at, sums);
                continue;
            }
#pragma GCC unroll 1
            for (int t = 0; t < tokens; t++) {
                for (int i = 0; i < W; i++) sums[i] = out[i * tokens + t];
                add_group<KIND, W>(numbers, own, in, at + t, sums);
                for (int i = 0; i < W; i++) out[i * tokens + t] = sums[i];
            }
        }
    if (ONE)
        for (int i = 0; i < W; i++) out[i] = sums[i];
}

// 16 outputs' weights for input k of a tile that is not rounded.
template <int KIND> HS_INLINE vf exact_weights(const uint8_t* tile, int k) {
    if (KIND == FLOAT) return load((const float*)tile + (size_t)k * LANES);
    const uint16_t* p = (const uint16_t*)tile + (size_t)k * LANES;
    return KIND == HALF ? load_half(p) : load_bfloat(p);
}

// The same for float weights: T tokens at once, an output's products added up one input after the other.
template <int KIND, int W, int T>
HS_INLINE void float_product(const uint8_t* data, size_t stride, int inputs, const Inputs& in, vf* out, int apart) {
    vf sums[W * T];
    for (int i = 0; i < W * T; i++) sums[i] = splat(0.0f);
    for (int k = 0; k < inputs; k++)
        for (int w = 0; w < W; w++) {
            constexpr int line = KIND == FLOAT ? 1 : 2;  // inputs of a cache line
            if (k % line == 0) __builtin_prefetch(data + stride * w + 64 * (size_t)(k / line) + AHEAD);
            const vf weight = exact_weights<KIND>(data + stride * w, k);
            for (int t = 0; t < T; t++)
                sums[w * T + t] = fma(weight, splat(in.exact[(size_t)t * in.width + k]), sums[w * T + t]);
        }
    for (int w = 0; w < W; w++)
        for (int t = 0; t < T; t++) out[w * apart + t] = sums[w * T + t];
}

// ``count`` tiles from ``first`` on (1 .. 4) times ``tokens`` tokens (1 .. 64): out[i * tokens + t]. Biases are added.
void tiles_product(const Matrix& m, int first, int count, const Inputs& in, int tokens, vf* out);

}  // namespace hs
