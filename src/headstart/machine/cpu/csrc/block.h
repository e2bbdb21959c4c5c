// One group of packed weights (16 outputs, 32 inputs) of W tiles, taken apart once and multiplied with several tokens.
//
// Knows: the dot-product instructions of each kind of processor. Does not know: scales, tokens, tiles.
//
// ``unpack`` takes a group's numbers from memory. ``dot`` finds their sums of products with 32 numbers of each of N tokens:
// found[t][i] for tile i; ``dots`` finds those of inputs 0 .. 15 and 16 .. 31 apart (Q6_K, whose scales are of 16 inputs).
// Sums are whole numbers of less than 2^24, so that floats hold them exactly: every branch gives the same bits.
// ``offset``: what makes up for numbers that are kept without a sign, see ``Inputs``.
//
// Several tiles at once, because a token's numbers are then loaded once for all of them: cores multiply faster than they
// load. Several tokens at once, because a sum has to wait for its last step: others are taken in turns with it.
#pragma once
#include "layout.h"

namespace hs {

typedef int32_t four_numbers __attribute__((may_alias, aligned(1)));

// For processors that gain nothing from several tokens at once: a Block that has ``dot_one`` and ``dots_one``.
template <typename Own, int W> struct TokenByToken {
    static constexpr int FEW = 0;
    template <int KIND, int N> HS_INLINE void dot(const int8_t* a, const int32_t* offset, vf (*found)[W]) const {
        for (int t = 0; t < N; t++) own().template dot_one<KIND>(a + GROUP * t, offset + t, found[t]);
    }
    template <int N> HS_INLINE void dots(const int8_t* a, const int32_t* offset, vf (*first)[W], vf (*second)[W]) const {
        for (int t = 0; t < N; t++) own().dots_one(a + GROUP * t, offset + 2 * t, first[t], second[t]);
    }

  private:
    HS_INLINE const Own& own() const { return *static_cast<const Own*>(this); }
};

#if defined(__AVX512VNNI__) && defined(__AVX512BW__)

// Four numbers from memory, in all lanes. Compilers left to themselves load them again for each of their uses.
HS_INLINE __m512i in_all_lanes(const four_numbers* four) {
    __m512i x;
    __asm__("vpbroadcastd %1, %0" : "=v"(x) : "m"(*four));
    return x;
}

// The upper half of each byte.
HS_INLINE __m512i upper(__m512i x) {
#if defined(__GFNI__)
    return _mm512_gf2p8affine_epi64_epi8(x, _mm512_set1_epi64(0x1020408000000000), 0);
#else
    return _mm512_and_si512(_mm512_srli_epi16(x, 4), _mm512_set1_epi8(15));
#endif
}

template <int W> struct Block {
    static constexpr int FEW = 4;  // tokens whose sums find room in the registers beside the weights
    __m512i w[W][8];
    template <int KIND> HS_INLINE void unpack(int tile, const uint8_t* p) {
        __m512i* to = w[tile];
        if (KIND == INT8) {
            for (int j = 0; j < 8; j++) to[j] = _mm512_loadu_si512(p + 64 * j);
            return;
        }
        const __m512i low = _mm512_set1_epi8(15);
        for (int j = 0; j < 4; j++) {
            const __m512i x = _mm512_loadu_si512(p + 64 * j);
            to[j] = _mm512_and_si512(x, low);
            to[j + 4] = upper(x);
        }
        if (KIND == Q5_K) {
            const __m512i bit = _mm512_set1_epi8(16), x = _mm512_loadu_si512(p + 256);
            for (int j = 0; j < 8; j++) {
                const __m512i high = j < 4 ? _mm512_slli_epi16(x, 4 - j) : _mm512_srli_epi16(x, j - 4);
                to[j] = _mm512_ternarylogic_epi32(to[j], high, bit, 0xf8);  // to | (high & bit)
            }
        }
        if (KIND == Q6_K) {
            const __m512i bits = _mm512_set1_epi8(48);
            for (int j = 0; j < 8; j++) {
                const __m512i x = _mm512_loadu_si512(p + 256 + j / 4 * 64);
                const int up = 4 - 2 * (j % 4);
                const __m512i high = up >= 0 ? _mm512_slli_epi16(x, up) : _mm512_srli_epi16(x, -up);
                to[j] = _mm512_ternarylogic_epi32(to[j], high, bits, 0xf8);
            }
        }
    }
    // s += products of quads FROM .. TO - 1.
    template <int FROM, int TO, int N> HS_INLINE void some(const int8_t* a, __m512i (*s)[W]) const {
        for (int j = FROM; j < TO; j++)
            for (int t = 0; t < N; t++) {
                const __m512i x = in_all_lanes((const four_numbers*)(a + GROUP * t) + j);
                for (int i = 0; i < W; i++) s[t][i] = _mm512_dpbusd_epi32(s[t][i], w[i][j], x);
            }
    }
    template <int KIND, int N> HS_INLINE void dot(const int8_t* a, const int32_t* offset, vf (*found)[W]) const {
        __m512i s[N][W];
        for (int t = 0; t < N; t++)
            for (int i = 0; i < W; i++) s[t][i] = KIND == INT8 ? _mm512_set1_epi32(offset[t]) : _mm512_setzero_si512();
        some<0, 8, N>(a, s);
        for (int t = 0; t < N; t++)
            for (int i = 0; i < W; i++) found[t][i] = (vf)_mm512_cvtepi32_ps(s[t][i]);
    }
    template <int N> HS_INLINE void dots(const int8_t* a, const int32_t* offset, vf (*first)[W], vf (*second)[W]) const {
        __m512i s[N][W], u[N][W];
        for (int t = 0; t < N; t++)
            for (int i = 0; i < W; i++)
                s[t][i] = _mm512_set1_epi32(offset[2 * t]), u[t][i] = _mm512_set1_epi32(offset[2 * t + 1]);
        some<0, 4, N>(a, s);
        some<4, 8, N>(a, u);
        for (int t = 0; t < N; t++)
            for (int i = 0; i < W; i++)
                first[t][i] = (vf)_mm512_cvtepi32_ps(s[t][i]), second[t][i] = (vf)_mm512_cvtepi32_ps(u[t][i]);
    }
};

#elif defined(__AVX2__)

template <int W> struct Block : TokenByToken<Block<W>, W> {
    __m256i w[W][16];  // INT8: with sign; else from 0 on
    template <int KIND> HS_INLINE void unpack(int tile, const uint8_t* p) {
        auto* to = w[tile];
        if (KIND == INT8) {
            const __m256i sign = _mm256_set1_epi8(-128);
            for (int j = 0; j < 16; j++) to[j] = _mm256_xor_si256(_mm256_loadu_si256((const __m256i*)(p + 32 * j)), sign);
            return;
        }
        const __m256i low = _mm256_set1_epi8(15);
        for (int j = 0; j < 8; j++) {
            const __m256i x = _mm256_loadu_si256((const __m256i*)(p + 32 * j));
            to[j] = _mm256_and_si256(x, low);
            to[j + 8] = _mm256_and_si256(_mm256_srli_epi16(x, 4), low);
        }
        if (KIND == Q5_K || KIND == Q6_K) {
            const __m256i bits = _mm256_set1_epi8(KIND == Q5_K ? 16 : 48);
            for (int j = 0; j < 8; j++)
                for (int half = 0; half < 2; half++) {
                    const int at = KIND == Q5_K ? 0 : j / 4 * 64, up = KIND == Q5_K ? 4 - j : 4 - 2 * (j % 4);
                    const __m256i x = _mm256_loadu_si256((const __m256i*)(p + 256 + at + 32 * half));
                    const __m256i high = up >= 0 ? _mm256_slli_epi16(x, up) : _mm256_srli_epi16(x, -up);
                    to[2 * j + half] = _mm256_or_si256(to[2 * j + half], _mm256_and_si256(high, bits));
                }
        }
    }
    // Lanes 8 * half .. + 7 of the sums over quads from .. to - 1.
    template <int KIND> HS_INLINE void some(const int8_t* a, int half, int from, int to, __m256i* s) const {
        // How many pairs of products still fit 16 bits: n * 2 * 127 * (15, 31 or 63) < 2^15
        constexpr int FIT = KIND == INT4 || KIND == Q4_K ? 8 : KIND == Q5_K ? 4 : KIND == Q6_K ? 2 : 1;
        const four_numbers* four = (const four_numbers*)a;
        const __m256i ones = _mm256_set1_epi16(1);
        for (int i = 0; i < W; i++) s[i] = _mm256_setzero_si256();
        for (int j = from; j < to; j += FIT) {
            __m256i pairs[W];
            for (int i = 0; i < W; i++) pairs[i] = _mm256_setzero_si256();
            for (int k = j; k < j + FIT; k++) {
                const __m256i x = _mm256_set1_epi32(four[k]);
                for (int i = 0; i < W; i++) {
                    const __m256i y = w[i][2 * k + half];
                    const __m256i both = KIND == INT8  // |y| * (x with y's sign): at most 2 * 128 * 127
                                             ? _mm256_maddubs_epi16(_mm256_abs_epi8(y), _mm256_sign_epi8(x, y))
                                             : _mm256_maddubs_epi16(y, x);
                    pairs[i] = _mm256_add_epi16(pairs[i], both);
                }
            }
            for (int i = 0; i < W; i++) s[i] = _mm256_add_epi32(s[i], _mm256_madd_epi16(pairs[i], ones));
        }
    }
    template <int KIND> HS_INLINE void dot_one(const int8_t* a, const int32_t*, vf* found) const {
        union Halves { vf v; __m256 h[2]; };
        for (int half = 0; half < 2; half++) {
            __m256i s[W];
            some<KIND>(a, half, 0, 8, s);
            for (int i = 0; i < W; i++) ((Halves*)(found + i))->h[half] = _mm256_cvtepi32_ps(s[i]);
        }
    }
    HS_INLINE void dots_one(const int8_t* a, const int32_t* offsets, vf* first, vf* second) const {
        union Halves { vf v; __m256 h[2]; };
        for (int half = 0; half < 2; half++)
            for (int part = 0; part < 2; part++) {
                __m256i s[W];
                some<Q6_K>(a, half, 4 * part, 4 * part + 4, s);
                for (int i = 0; i < W; i++) {
                    s[i] = _mm256_add_epi32(s[i], _mm256_set1_epi32(offsets[part]));
                    ((Halves*)((part ? second : first) + i))->h[half] = _mm256_cvtepi32_ps(s[i]);
                }
            }
    }
};

#elif defined(__ARM_FEATURE_DOTPROD)

template <int W> struct Block : TokenByToken<Block<W>, W> {
    int8x16_t w[W][32];  // [4 * j + q]: quad j of outputs 4 * q .. 4 * q + 3
    template <int KIND> HS_INLINE void unpack(int tile, const uint8_t* p) {
        auto* to = w[tile];
        if (KIND == INT8) {
            const uint8x16_t sign = vdupq_n_u8(128);
            for (int i = 0; i < 32; i++) to[i] = vreinterpretq_s8_u8(veorq_u8(vld1q_u8(p + 16 * i), sign));
            return;
        }
        const uint8x16_t low = vdupq_n_u8(15);
        for (int i = 0; i < 16; i++) {
            uint8x16_t x = vld1q_u8(p + 16 * i), y = vshrq_n_u8(x, 4);
            x = vandq_u8(x, low);
            if (KIND == Q5_K || KIND == Q6_K) {
                const int j = i / 4, at = 256 + 16 * (i % 4);
                const uint8x16_t h = vld1q_u8(p + at), k = KIND == Q5_K ? h : vld1q_u8(p + at + 64);
                const int first = KIND == Q5_K ? j : 2 * j, second = KIND == Q5_K ? j + 4 : 2 * j;
                const uint8x16_t bits = vdupq_n_u8(KIND == Q5_K ? 16 : 48);
                x = vorrq_u8(x, vandq_u8(vshlq_u8(h, vdupq_n_s8((int8_t)(4 - first))), bits));
                y = vorrq_u8(y, vandq_u8(vshlq_u8(k, vdupq_n_s8((int8_t)(4 - second))), bits));
            }
            to[i] = vreinterpretq_s8_u8(x);
            to[i + 16] = vreinterpretq_s8_u8(y);
        }
    }
    // Outputs 4 * q .. 4 * q + 3: four quads, from ``from`` on, times 16 numbers of a token.
    static HS_INLINE int32x4_t some(int32x4_t s, const int8x16_t* w, int from, int q, int8x16_t a) {
        s = vdotq_laneq_s32(s, w[4 * from + q], a, 0);
        s = vdotq_laneq_s32(s, w[4 * from + 4 + q], a, 1);
        s = vdotq_laneq_s32(s, w[4 * from + 8 + q], a, 2);
        return vdotq_laneq_s32(s, w[4 * from + 12 + q], a, 3);
    }
    template <int KIND> HS_INLINE void dot_one(const int8_t* a, const int32_t*, vf* found) const {
        const int8x16_t x = vld1q_s8(a), y = vld1q_s8(a + 16);
        for (int i = 0; i < W; i++) {
            Quarters s;
            for (int q = 0; q < 4; q++) s.q[q] = vcvtq_f32_s32(some(some(vdupq_n_s32(0), w[i], 0, q, x), w[i], 4, q, y));
            found[i] = s.v;
        }
    }
    HS_INLINE void dots_one(const int8_t* a, const int32_t* offsets, vf* first, vf* second) const {
        const int8x16_t x = vld1q_s8(a), y = vld1q_s8(a + 16);
        for (int i = 0; i < W; i++) {
            Quarters s, t;
            for (int q = 0; q < 4; q++) {
                s.q[q] = vcvtq_f32_s32(some(vdupq_n_s32(offsets[0]), w[i], 0, q, x));
                t.q[q] = vcvtq_f32_s32(some(vdupq_n_s32(offsets[1]), w[i], 4, q, y));
            }
            first[i] = s.v;
            second[i] = t.v;
        }
    }
};

#else

template <int W> struct Block : TokenByToken<Block<W>, W> {
    uint8_t w[W][512];
    template <int KIND> HS_INLINE void unpack(int tile, const uint8_t* p) {
        auto* to = w[tile];
        if (KIND == INT8) {
            memcpy(to, p, 512);
            return;
        }
        for (int i = 0; i < 256; i++) to[i] = p[i] & 15, to[i + 256] = p[i] >> 4;
        if (KIND == Q5_K)
            for (int i = 0; i < 512; i++) to[i] |= (p[256 + i % 64] >> i / 64 & 1) << 4;
        if (KIND == Q6_K)
            for (int i = 0; i < 512; i++) to[i] |= (p[256 + i / 256 * 64 + i % 64] >> 2 * (i / 64 % 4) & 3) << 4;
    }
    static HS_INLINE vf some(const uint8_t* w, const int8_t* a, int32_t offset, int from, int to) {
        int32_t s[LANES];
        for (int o = 0; o < LANES; o++) s[o] = offset;
        for (int j = from; j < to; j++)
            for (int o = 0; o < LANES; o++)
                for (int i = 0; i < 4; i++) s[o] += (int32_t)w[64 * j + 4 * o + i] * a[4 * j + i];
        vi v;
        memcpy(&v, s, sizeof v);
        return __builtin_convertvector(v, vf);
    }
    template <int KIND> HS_INLINE void dot_one(const int8_t* a, const int32_t* offset, vf* found) const {
        for (int i = 0; i < W; i++) found[i] = some(w[i], a, KIND == INT8 ? *offset : 0, 0, 8);
    }
    HS_INLINE void dots_one(const int8_t* a, const int32_t* offsets, vf* first, vf* second) const {
        for (int i = 0; i < W; i++) first[i] = some(w[i], a, offsets[0], 0, 4), second[i] = some(w[i], a, offsets[1], 4, 8);
    }
};

#endif

// Products of bytes and nothing else, as fast as the processor goes; how many there were. ``seen``: so that none is left out.
HS_INLINE int64_t most_products(int64_t rounds, int32_t* seen) {
#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
    constexpr int SUMS = 16;
    __m512i s[SUMS];
    for (int i = 0; i < SUMS; i++) s[i] = _mm512_set1_epi32(i);
    const __m512i w = _mm512_set1_epi8((char)(1 + *seen % 2)), x = _mm512_set1_epi8((char)(2 + *seen % 3));
#pragma GCC unroll 1
    for (int64_t n = 0; n < rounds; n++)
#pragma GCC unroll 16
        for (int i = 0; i < SUMS; i++) s[i] = _mm512_dpbusd_epi32(s[i], w, x);
    for (int i = 1; i < SUMS; i++) s[0] = _mm512_xor_si512(s[0], s[i]);
    *seen = sum((vi)s[0]);
    return rounds * SUMS * 64;
#else
    (void)rounds, (void)seen;
    return 0;  // not measured
#endif
}

}  // namespace hs
