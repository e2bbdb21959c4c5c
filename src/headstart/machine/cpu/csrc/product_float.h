// Products of float weights (float32, bfloat16, float16 as they are stored) with float activations.
//
// Knows: which sums the registers hold at once, and in which order weights are read. Does not know: layers, threads.
//
// An output's products are added up one input after the other, so a token's results depend on nothing but the token. In
// between, a sum may lie in memory: it is the same number there.
#pragma once
#include "product.h"

namespace hs {

// Sums in registers at once, of 16 outputs each: registers of 64 bytes hold 24 beside weights, those of 32 bytes six
// (twelve halves), of sixteen registers.
#if defined(__AVX512F__)
constexpr int FLOAT_SUMS = 16;
#else
constexpr int FLOAT_SUMS = 6;
#endif
constexpr int PANEL = 64;  // inputs of a turn: their weights stay in the nearest cache for all tokens

// 16 outputs' weights for input k of a tile that is not rounded.
template <int KIND> HS_INLINE vf exact_weights(const uint8_t* tile, size_t k) {
    if (KIND == FLOAT) return load((const float*)tile + k * LANES);
    const uint16_t* p = (const uint16_t*)tile + k * LANES;
    return KIND == HALF ? load_half(p) : load_bfloat(p);
}

// The same, in registers: compilers would load them again for every token, and loads are what is short.
HS_INLINE vf held(vf v) {
#if defined(HS_TWO_HALVES)
    __asm__("" : "+x"(v.h[0]), "+x"(v.h[1]));
#endif
    return v;
}

#if defined(__AVX512F__)
// x[at * apart + FROM] in all lanes, said plainly: compilers keep an address for every token, and find no room for them.
template <int FROM> HS_INLINE vf in_all_lanes(int at, const float* x, size_t apart, size_t thrice) {
    vf v;
    constexpr int bytes = FROM * (int)sizeof(float);
    if (at == 0) __asm__("vbroadcastss %c2(%1), %0" : "=v"(v) : "r"(x), "i"(bytes), "m"(*x));
    if (at == 1) __asm__("vbroadcastss %c2(%1,%4), %0" : "=v"(v) : "r"(x), "i"(bytes), "m"(*x), "r"(apart));
    if (at == 2) __asm__("vbroadcastss %c2(%1,%4,2), %0" : "=v"(v) : "r"(x), "i"(bytes), "m"(*x), "r"(apart));
    if (at == 3) __asm__("vbroadcastss %c2(%1,%4), %0" : "=v"(v) : "r"(x), "i"(bytes), "m"(*x), "r"(thrice));
    return v;
}

template <int KIND, int W, int T, int FROM>
HS_INLINE void add_input(const uint8_t* data, size_t stride, const float* const* x, size_t apart, size_t thrice, vf (*sums)[T]) {
    vf weight[W];
    for (int w = 0; w < W; w++) {
        weight[w] = exact_weights<KIND>(data + stride * w, FROM);
        __asm__("" : "+v"(weight[w]));
    }
#pragma GCC unroll 24
    for (int t = 0; t < T; t++) {
        const vf number = in_all_lanes<FROM>(t % 4, x[t / 4], apart, thrice);
        for (int w = 0; w < W; w++) sums[w][t] = fma(weight[w], number, sums[w][t]);
    }
}

template <int KIND, int W, int T, bool ASK>
HS_INLINE void add_panel(const uint8_t* data, size_t stride, int inputs, const float* x, size_t width, vf* out, int apart) {
    constexpr int line = KIND == FLOAT ? 1 : 2;  // inputs of a cache line
    const size_t one = sizeof(float) * width, thrice = 3 * one;
    const float* from[(T + 3) / 4];
    for (int i = 0; i < (T + 3) / 4; i++) from[i] = x + 4 * width * i;
    vf sums[W][T];
    for (int w = 0; w < W; w++)
        for (int t = 0; t < T; t++) sums[w][t] = load((const float*)(out + w * apart + t));
#pragma GCC unroll 1
    for (int k = 0; k < inputs; k += line, data += 64) {
        for (int w = 0; w < W; w++)
            if (ASK) __builtin_prefetch(data + stride * w + AHEAD);
        add_input<KIND, W, T, 0>(data, stride, from, one, thrice, sums);
        if (line == 2) add_input<KIND, W, T, 1>(data, stride, from, one, thrice, sums);
        for (int i = 0; i < (T + 3) / 4; i++) from[i] += line;
    }
    for (int w = 0; w < W; w++)
        for (int t = 0; t < T; t++) store((float*)(out + w * apart + t), sums[w][t]);
}
#else
// ``inputs`` inputs of W tiles (``stride`` bytes apart) times T tokens, from ``x`` on (``width`` apart): added to
// out[w * apart + t]. AHEAD_TOO: the weights behind them are asked for.
template <int KIND, int W, int T, bool ASK>
HS_INLINE void add_panel(const uint8_t* data, size_t stride, int inputs, const float* x, size_t width, vf* out, int apart) {
    constexpr int line = KIND == FLOAT ? 1 : 2;  // inputs of a cache line
    vf sums[W][T];
    for (int w = 0; w < W; w++)
        for (int t = 0; t < T; t++) sums[w][t] = load((const float*)(out + w * apart + t));
#pragma GCC unroll 1
    for (size_t k = 0; k < (size_t)inputs; k += line)
#pragma GCC unroll 2
        for (size_t i = k; i < k + line; i++)
            for (int w = 0; w < W; w++) {
                const uint8_t* tile = data + stride * w;
                if (ASK && i == k) __builtin_prefetch(tile + 64 / line * k + AHEAD);
                const vf weight = T > 1 ? held(exact_weights<KIND>(tile, i)) : exact_weights<KIND>(tile, i);
#pragma GCC unroll 16
                for (int t = 0; t < T; t++) sums[w][t] = fma(weight, splat(x[width * t + i]), sums[w][t]);
            }
    for (int w = 0; w < W; w++)
        for (int t = 0; t < T; t++) store((float*)(out + w * apart + t), sums[w][t]);
}
#endif

// The same for ``tokens`` tokens, 1 .. MOST of them, by a number that the compiler knows.
template <int KIND, int W, int MOST, bool ASK>
HS_INLINE void add_panel_of(int tokens, const uint8_t* data, size_t stride, int inputs, const float* x, size_t width, vf* out,
                            int apart) {
    if constexpr (MOST > 1)
        if (tokens < MOST) return add_panel_of<KIND, W, MOST - 1, ASK>(tokens, data, stride, inputs, x, width, out, apart);
    add_panel<KIND, W, MOST, ASK>(data, stride, inputs, x, width, out, apart);
}

// W tiles times ``tokens`` tokens, a panel of inputs after the other. Tokens go in equal parts, as many at once as there are
// sums for. Each part spells weights of two bytes out for itself: to keep them took longer.
template <int KIND, int W>
__attribute__((noinline)) void float_product(const uint8_t* data, size_t stride, int inputs, const Inputs& in, int tokens,
                                             vf* out) {
    constexpr int MOST = FLOAT_SUMS / W;
    const int parts = (tokens + MOST - 1) / MOST, each = (tokens + parts - 1) / parts;
    for (int i = 0; i < W * tokens; i++) out[i] = splat(0.0f);
    for (int k = 0; k < inputs; k += PANEL) {
        const int some = inputs - k < PANEL ? inputs - k : PANEL;
        const uint8_t* from = data + group_bytes(KIND) / GROUP * k;
        const float* x = in.exact + k;
        add_panel_of<KIND, W, MOST, true>(each, from, stride, some, x, in.width, out, tokens);
        for (int t = each; t < tokens; t += each)
            add_panel_of<KIND, W, MOST, false>(tokens - t < each ? tokens - t : each, from, stride, some,
                                               x + (size_t)in.width * t, in.width, out + t, tokens);
    }
}

// One token: as many tiles at once as hide how long an addition takes, from end to end.
template <int KIND, int W>
HS_INLINE void float_product_of_one(const uint8_t* data, size_t stride, int inputs, const Inputs& in, vf* out) {
    for (int i = 0; i < W; i++) out[i] = splat(0.0f);
    add_panel<KIND, W, 1, true>(data, stride, inputs, in.exact, in.width, out, 1);
}

// ``count`` tiles (1 .. 4): as many at once as leave the registers sums for all tokens, since a token's number is then loaded
// once for all of them.
template <int KIND>
void run_floats(const Matrix& m, int first, int count, const Inputs& in, int tokens, vf* out) {
    constexpr int alone = !ZEN5 ? 0 : KIND == FLOAT ? 16 : 5;  // tokens up to which tiles are one stream, see ``one_stream``
    const size_t stride = m.tile_bytes();
    for (int i = 0; i < count;) {
        const uint8_t* p = m.tile(first + i);
        vf* to = out + (size_t)i * tokens;
        if (tokens == 1 && alone)
            float_product_of_one<KIND, 1>(p, stride, m.inputs, in, to), i += 1;
        else if (tokens == 1 && count - i >= 4)
            float_product_of_one<KIND, 4>(p, stride, m.inputs, in, to), i += 4;
        else if (count - i >= 2 && (FLOAT_SUMS > 6 || tokens <= 2) && tokens > alone)
            float_product<KIND, 2>(p, stride, m.inputs, in, tokens, to), i += 2;
        else
            float_product<KIND, 1>(p, stride, m.inputs, in, tokens, to), i += 1;
    }
}

}  // namespace hs
