// Rounded activations, and the products of packed matrices with them.
//
// Knows: how activations are rounded and what is multiplied and added in which order. Does not know: layers, threads.
//
// Activations are rounded to 8 bits for each token and each group of 32, so a token's results depend on nothing but the
// token: sums inside a group are whole numbers, and groups are added up in order, whatever else is computed beside it.
#pragma once
#include "block.h"

namespace hs {

// Rounded inputs of some tokens. FLOAT matrices read ``exact`` instead.
struct Inputs {
    int8_t* numbers;   // [tokens, width]
    float* scales;     // [tokens, width / 32]
    float* totals;     // the same: scale * sum of the group's numbers, for minima
    int32_t* offsets;  // the same: -128 * sum of the group's numbers, for INT8's + 128
    int32_t* halves;   // [tokens, width / 16] -32 * sum of 16 numbers, for Q6_K's + 32
    float* exact;      // [tokens, width]
    int width;

    Inputs from(int token) const { return at((size_t)token * width, width); }
    Inputs at(size_t n, int wide) const {  // from number n on, a multiple of 32
        const size_t b = n / GROUP;
        return {numbers + n, scales + b, totals + b, offsets + b, halves + 2 * b, exact + n, wide};
    }
};

// Round 32 inputs of a token. Infinities and NaN make the scale NaN, so that they are seen in the end.
HS_INLINE void round_group(const Inputs& to, int token, int group, vf a, vf b) {
    const Inputs at = to.from(token);
    store(at.exact + group * GROUP, a);
    store(at.exact + group * GROUP + LANES, b);
    const float most = greatest(larger(magnitude(a), magnitude(b)));
    const float check = sum((a + b) * splat(0.0f));
    const float inverse = most > 0.0f ? 127.0f / most : 0.0f;
    const vi x = __builtin_convertvector(round_even(a * splat(inverse)), vi);
    const vi y = __builtin_convertvector(round_even(b * splat(inverse)), vi);
    typedef int8_t v16b __attribute__((vector_size(16)));
    const v16b p = __builtin_convertvector(x, v16b), q = __builtin_convertvector(y, v16b);
    memcpy(at.numbers + group * GROUP, &p, 16);
    memcpy(at.numbers + group * GROUP + 16, &q, 16);
    const int32_t first = sum(x), second = sum(y), total = first + second;
    const float scale = most / 127.0f + check;
    at.scales[group] = scale;
    at.totals[group] = scale * (float)total;
    at.offsets[group] = -128 * total;
    at.halves[2 * group] = -32 * first;
    at.halves[2 * group + 1] = -32 * second;
}

// A group's scales for its 16 outputs, exactly (a half times a byte is a float).
template <int KIND> struct Scales {
    vf scale, least, first, second;

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

#ifndef AHEAD
#define AHEAD 5120
#endif
// W tiles (``stride`` bytes apart) times T tokens: out[w * T + t] is tile w's 16 outputs for token t. Several tiles at
// once are several streams of memory, which a core reads faster than one.
template <int KIND, int W, int T>
HS_INLINE void product(const uint8_t* data, size_t stride, int blocks, const Inputs& in, vf* out) {
    vf sums[W * T];
    for (int i = 0; i < W * T; i++) sums[i] = splat(0.0f);
    if (KIND == FLOAT) {
        for (int k = 0; k < blocks * GROUP; k++)
            for (int w = 0; w < W; w++) {
                const vf weight = load((const float*)(data + stride * w) + (size_t)k * LANES);
                for (int t = 0; t < T; t++)
                    sums[w * T + t] = fma(weight, splat(in.exact[(size_t)t * in.width + k]), sums[w * T + t]);
            }
    } else {
        const int width = in.width / GROUP, groups = blocks * block_groups(KIND);
        for (int b = 0; b < groups; b++) {
            for (int w = 0; w < W; w++) {
                const int g = b % block_groups(KIND);
                const uint8_t* block = data + stride * w + block_bytes(KIND) * (b / block_groups(KIND));
                const uint8_t* p = block + group_bytes(KIND) * g;
                const Scales<KIND> own(block + scales_at(KIND), g);
                for (size_t line = 0; line < block_bytes(KIND) / block_groups(KIND); line += 64)
                    __builtin_prefetch(p + AHEAD + line);
                Block numbers;
                numbers.unpack<KIND>(p);
                for (int t = 0; t < T; t++) {
                    const int at = t * width + b;
                    const int8_t* a = in.numbers + (size_t)t * in.width + b * GROUP;
                    vf s = sums[w * T + t], dot;
                    if (KIND == Q6_K) {
                        vf second;
                        numbers.dots(a, in.halves + 2 * at, dot, second);
                        dot = fma(second, own.second, dot * own.first);  // exact, too
                    } else {
                        dot = numbers.dot<KIND>(a, in.offsets[at]);
                    }
                    s = fma(dot, own.scale * splat(in.scales[at]), s);
                    if (KIND != INT8 && KIND != Q6_K) s = fma(own.least, splat(in.totals[at]), s);
                    sums[w * T + t] = s;
                }
            }
        }
    }
    for (int i = 0; i < W * T; i++) out[i] = sums[i];
}

constexpr int MOST_TILES = 4;   // tiles of one call
constexpr int MOST_TOKENS = 8;  // tokens that share an unpacked block

template <int KIND, int W>
HS_INLINE void product_tokens(const uint8_t* data, size_t stride, int blocks, const Inputs& in, int tokens, vf* out) {
    switch (tokens) {
        case 1: return product<KIND, W, 1>(data, stride, blocks, in, out);
        case 2: return product<KIND, W, 2>(data, stride, blocks, in, out);
        case 3: return product<KIND, W, 3>(data, stride, blocks, in, out);
        case 4: return product<KIND, W, 4>(data, stride, blocks, in, out);
        case 5: return product<KIND, W, 5>(data, stride, blocks, in, out);
        case 6: return product<KIND, W, 6>(data, stride, blocks, in, out);
        case 7: return product<KIND, W, 7>(data, stride, blocks, in, out);
        default: return product<KIND, W, 8>(data, stride, blocks, in, out);
    }
}

// ``count`` tiles from ``first`` on (1 .. 4) times ``tokens`` tokens (1 .. 8): out[i * tokens + t]. Biases are added.
void tiles_product(const Matrix& m, int first, int count, const Inputs& in, int tokens, vf* out);

}  // namespace hs
