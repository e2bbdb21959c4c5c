// Packed matrices, rounded activations, and their products.
//
// Knows: how weights are laid out and multiplied on each kind of processor. Does not know: layers, threads.
//
// A matrix [outputs, inputs] is cut into tiles of 16 outputs, a tile into blocks of 32 inputs. A block holds the 16 x 32
// numbers in the order the dot-product instruction wants them (four inputs of all 16 outputs side by side, so that no
// sum ever crosses lanes), and behind them the 16 scales as half floats:
//
//   INT8   512 bytes, number + 128      16 scales                value = scale * number
//   INT4   256 bytes, two in each       16 scales, 16 minima     value = scale * number + minimum   (GGUF's Q4_1)
//   FLOAT  2048 bytes, float32          none
//
// Activations are rounded to 8 bits for each token and each group of 32, so a token's results depend on nothing but the
// token: sums inside a block are whole numbers, and blocks are added up in order, whatever else is computed beside it.
#pragma once
#include "core.h"

namespace hs {

enum Kind : int32_t { INT8 = 0, INT4 = 1, FLOAT = 2 };

HS_INLINE size_t block_bytes(int kind) { return kind == INT8 ? 544 : kind == INT4 ? 320 : 2048; }

struct Matrix {
    int32_t kind, outputs, inputs;  // outputs: a multiple of 16 (padded), inputs: of 32
    const uint8_t* data;
    const float* bias;  // [outputs] or null

    int blocks() const { return inputs / GROUP; }
    int tiles() const { return outputs / LANES; }
    size_t tile_bytes() const { return block_bytes(kind) * blocks(); }
    const uint8_t* tile(int i) const { return data + tile_bytes() * i; }
};

// Rounded inputs of some tokens. FLOAT matrices read ``exact`` instead.
struct Inputs {
    int8_t* numbers;   // [tokens, width]
    float* scales;     // [tokens, width / 32]
    float* totals;     // the same: scale * sum of the group's numbers, for INT4's minima
    int32_t* offsets;  // the same: -128 * sum of the group's numbers, for INT8's + 128
    float* exact;      // [tokens, width]
    int width;

    Inputs from(int token) const {
        const size_t w = (size_t)token * width, b = w / GROUP;
        return {numbers + w, scales + b, totals + b, offsets + b, exact + w, width};
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
    const int32_t total = sum(x + y);
    const float scale = most / 127.0f + check;
    at.scales[group] = scale;
    at.totals[group] = scale * (float)total;
    at.offsets[group] = -128 * total;
}

// -- one block of weights, taken apart once and used for several tokens

typedef int32_t four_numbers __attribute__((may_alias, aligned(1)));

#if defined(__AVX512VNNI__)

// s += w * (four numbers from memory, in all lanes at once). Compilers left to themselves load them into registers first,
// of which there are then too few.
HS_INLINE __m512i add_products(__m512i s, __m512i w, const four_numbers* four) {
    __asm__("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(s) : "v"(w), "m"(*four));
    return s;
}

struct Block {
    __m512i w[8];
    template <int KIND> HS_INLINE void unpack(const uint8_t* p) {
        if (KIND == INT8) {
            for (int j = 0; j < 8; j++) w[j] = _mm512_loadu_si512(p + 64 * j);
        } else {
            const __m512i low = _mm512_set1_epi8(15);
            for (int j = 0; j < 4; j++) {
                const __m512i x = _mm512_loadu_si512(p + 64 * j);
                w[j] = _mm512_and_si512(x, low);
                w[j + 4] = _mm512_and_si512(_mm512_srli_epi16(x, 4), low);
            }
        }
    }
    template <int KIND> HS_INLINE vf dot(const int8_t* a, int32_t offset) const {
        const four_numbers* four = (const four_numbers*)a;
        __m512i s = KIND == INT8 ? _mm512_set1_epi32(offset) : _mm512_setzero_si512(), t = _mm512_setzero_si512();
        for (int j = 0; j < 4; j++) {
            s = add_products(s, w[j], four + j);
            t = add_products(t, w[j + 4], four + j + 4);
        }
        return (vf)_mm512_cvtepi32_ps(_mm512_add_epi32(s, t));
    }
};

#elif defined(__AVX2__)

struct Block {
    __m256i w[16];  // INT8: with sign; INT4: 0 .. 15
    template <int KIND> HS_INLINE void unpack(const uint8_t* p) {
        if (KIND == INT8) {
            const __m256i sign = _mm256_set1_epi8(-128);
            for (int j = 0; j < 16; j++) w[j] = _mm256_xor_si256(_mm256_loadu_si256((const __m256i*)(p + 32 * j)), sign);
        } else {
            const __m256i low = _mm256_set1_epi8(15);
            for (int j = 0; j < 8; j++) {
                const __m256i x = _mm256_loadu_si256((const __m256i*)(p + 32 * j));
                w[j] = _mm256_and_si256(x, low);
                w[j + 8] = _mm256_and_si256(_mm256_srli_epi16(x, 4), low);
            }
        }
    }
    template <int KIND> HS_INLINE vf dot(const int8_t* a, int32_t) const {
        const four_numbers* four = (const four_numbers*)a;
        const __m256i ones = _mm256_set1_epi16(1);
        union { vf v; __m256 h[2]; } found;
        for (int half = 0; half < 2; half++) {
            __m256i s = _mm256_setzero_si256();
            for (int j = 0; j < 8; j++) {
                const __m256i x = _mm256_set1_epi32(four[j]), y = w[2 * j + half];
                if (KIND == INT8) {  // |y| * (x with y's sign): at most 2 * 127 * 127, which fits 16 bits
                    const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(y), _mm256_sign_epi8(x, y));
                    s = _mm256_add_epi32(s, _mm256_madd_epi16(pairs, ones));
                } else {  // 8 * 2 * 15 * 127 still fits
                    s = _mm256_add_epi16(s, _mm256_maddubs_epi16(y, x));
                }
            }
            if (KIND == INT4) s = _mm256_madd_epi16(s, ones);
            found.h[half] = _mm256_cvtepi32_ps(s);
        }
        return found.v;
    }
};

#else

struct Block {
    uint8_t w[512];
    template <int KIND> HS_INLINE void unpack(const uint8_t* p) {
        if (KIND == INT8) {
            memcpy(w, p, 512);
        } else {
            for (int i = 0; i < 256; i++) w[i] = p[i] & 15, w[i + 256] = p[i] >> 4;
        }
    }
    template <int KIND> HS_INLINE vf dot(const int8_t* a, int32_t offset) const {
        int32_t s[LANES];
        for (int o = 0; o < LANES; o++) s[o] = KIND == INT8 ? offset : 0;
        for (int j = 0; j < 8; j++)
            for (int o = 0; o < LANES; o++)
                for (int i = 0; i < 4; i++) s[o] += (int32_t)w[64 * j + 4 * o + i] * a[4 * j + i];
        vi v;
        memcpy(&v, s, sizeof v);
        return __builtin_convertvector(v, vf);
    }
};

#endif

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
        const int groups = in.width / GROUP;
        for (int b = 0; b < blocks; b++) {
            for (int w = 0; w < W; w++) {
                const uint8_t* p = data + stride * w + block_bytes(KIND) * b;
                const vf scale = load_half((const uint16_t*)(p + (KIND == INT8 ? 512 : 256)));
                for (size_t line = 0; line < block_bytes(KIND); line += 64) __builtin_prefetch(p + AHEAD + line);
                Block block;
                block.unpack<KIND>(p);
                for (int t = 0; t < T; t++) {
                    const int at = t * groups + b;
                    const vf dot = block.dot<KIND>(in.numbers + (size_t)t * in.width + b * GROUP, in.offsets[at]);
                    vf s = fma(dot, scale * splat(in.scales[at]), sums[w * T + t]);
                    if (KIND == INT4) s = fma(load_half((const uint16_t*)(p + 288)), splat(in.totals[at]), s);
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

// Row ``output`` of a packed matrix as floats [inputs].
void unpack_row(const Matrix& m, int output, float* to);

// ``count`` tiles from ``first`` on (1 .. 4) times ``tokens`` tokens (1 .. 8): out[i * tokens + t]. Biases are added.
void tiles_product(const Matrix& m, int first, int count, const Inputs& in, int tokens, vf* out);

}  // namespace hs
