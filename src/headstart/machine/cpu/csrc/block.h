// One group of packed weights (16 outputs, 32 inputs), taken apart once and multiplied with several tokens.
//
// Knows: the dot-product instructions of each kind of processor. Does not know: scales, tokens, tiles.
//
// ``unpack`` takes a group's numbers from memory. ``dot`` is their sum of products with 32 numbers of a token, ``dots``
// the same for inputs 0 .. 15 and 16 .. 31 apart (Q6_K, whose scales are of 16 inputs). Sums are whole numbers of less than
// 2^24, so that floats hold them exactly: every branch gives the same bits. ``offset``: what makes up for numbers that are
// kept without a sign, see ``Inputs``.
#pragma once
#include "layout.h"

namespace hs {

typedef int32_t four_numbers __attribute__((may_alias, aligned(1)));

#if defined(__AVX512VNNI__) && defined(__AVX512BW__)

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
            return;
        }
        const __m512i low = _mm512_set1_epi8(15);
        for (int j = 0; j < 4; j++) {
            const __m512i x = _mm512_loadu_si512(p + 64 * j);
            w[j] = _mm512_and_si512(x, low);
            w[j + 4] = _mm512_and_si512(_mm512_srli_epi16(x, 4), low);
        }
        if (KIND == Q5_K) {
            const __m512i bit = _mm512_set1_epi8(16), x = _mm512_loadu_si512(p + 256);
            for (int j = 0; j < 8; j++) {
                const __m512i high = j < 4 ? _mm512_slli_epi16(x, 4 - j) : _mm512_srli_epi16(x, j - 4);
                w[j] = _mm512_ternarylogic_epi32(w[j], high, bit, 0xf8);  // w | (high & bit)
            }
        }
        if (KIND == Q6_K) {
            const __m512i bits = _mm512_set1_epi8(48);
            for (int j = 0; j < 8; j++) {
                const __m512i x = _mm512_loadu_si512(p + 256 + j / 4 * 64);
                const int up = 4 - 2 * (j % 4);
                const __m512i high = up >= 0 ? _mm512_slli_epi16(x, up) : _mm512_srli_epi16(x, -up);
                w[j] = _mm512_ternarylogic_epi32(w[j], high, bits, 0xf8);
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
    HS_INLINE void dots(const int8_t* a, const int32_t* offsets, vf& first, vf& second) const {
        const four_numbers* four = (const four_numbers*)a;
        __m512i s = _mm512_set1_epi32(offsets[0]), t = _mm512_set1_epi32(offsets[1]);
        for (int j = 0; j < 4; j++) {
            s = add_products(s, w[j], four + j);
            t = add_products(t, w[j + 4], four + j + 4);
        }
        first = (vf)_mm512_cvtepi32_ps(s);
        second = (vf)_mm512_cvtepi32_ps(t);
    }
};

#elif defined(__AVX2__)

struct Block {
    __m256i w[16];  // INT8: with sign; else from 0 on
    template <int KIND> HS_INLINE void unpack(const uint8_t* p) {
        if (KIND == INT8) {
            const __m256i sign = _mm256_set1_epi8(-128);
            for (int j = 0; j < 16; j++) w[j] = _mm256_xor_si256(_mm256_loadu_si256((const __m256i*)(p + 32 * j)), sign);
            return;
        }
        const __m256i low = _mm256_set1_epi8(15);
        for (int j = 0; j < 8; j++) {
            const __m256i x = _mm256_loadu_si256((const __m256i*)(p + 32 * j));
            w[j] = _mm256_and_si256(x, low);
            w[j + 8] = _mm256_and_si256(_mm256_srli_epi16(x, 4), low);
        }
        if (KIND == Q5_K || KIND == Q6_K) {
            const __m256i bits = _mm256_set1_epi8(KIND == Q5_K ? 16 : 48);
            for (int j = 0; j < 8; j++)
                for (int half = 0; half < 2; half++) {
                    const int at = KIND == Q5_K ? 0 : j / 4 * 64, up = KIND == Q5_K ? 4 - j : 4 - 2 * (j % 4);
                    const __m256i x = _mm256_loadu_si256((const __m256i*)(p + 256 + at + 32 * half));
                    const __m256i high = up >= 0 ? _mm256_slli_epi16(x, up) : _mm256_srli_epi16(x, -up);
                    w[2 * j + half] = _mm256_or_si256(w[2 * j + half], _mm256_and_si256(high, bits));
                }
        }
    }
    // Lanes 8 * half .. + 7 of the sum over quads from .. to - 1.
    template <int KIND> HS_INLINE __m256i some(const int8_t* a, int half, int from, int to) const {
        // How many pairs of products still fit 16 bits: n * 2 * 127 * (15, 31 or 63) < 2^15
        constexpr int FIT = KIND == INT4 || KIND == Q4_K ? 8 : KIND == Q5_K ? 4 : KIND == Q6_K ? 2 : 1;
        const four_numbers* four = (const four_numbers*)a;
        const __m256i ones = _mm256_set1_epi16(1);
        __m256i s = _mm256_setzero_si256();
        for (int j = from; j < to; j += FIT) {
            __m256i pairs = _mm256_setzero_si256();
            for (int i = j; i < j + FIT; i++) {
                const __m256i x = _mm256_set1_epi32(four[i]), y = w[2 * i + half];
                pairs = _mm256_add_epi16(pairs, KIND == INT8  // |y| * (x with y's sign): at most 2 * 128 * 127
                                                    ? _mm256_maddubs_epi16(_mm256_abs_epi8(y), _mm256_sign_epi8(x, y))
                                                    : _mm256_maddubs_epi16(y, x));
            }
            s = _mm256_add_epi32(s, _mm256_madd_epi16(pairs, ones));
        }
        return s;
    }
    template <int KIND> HS_INLINE vf dot(const int8_t* a, int32_t) const {
        union { vf v; __m256 h[2]; } found;
        for (int half = 0; half < 2; half++) found.h[half] = _mm256_cvtepi32_ps(some<KIND>(a, half, 0, 8));
        return found.v;
    }
    HS_INLINE void dots(const int8_t* a, const int32_t* offsets, vf& first, vf& second) const {
        union { vf v; __m256 h[2]; } x, y;
        for (int half = 0; half < 2; half++) {
            const __m256i s = some<Q6_K>(a, half, 0, 4), t = some<Q6_K>(a, half, 4, 8);
            x.h[half] = _mm256_cvtepi32_ps(_mm256_add_epi32(s, _mm256_set1_epi32(offsets[0])));
            y.h[half] = _mm256_cvtepi32_ps(_mm256_add_epi32(t, _mm256_set1_epi32(offsets[1])));
        }
        first = x.v;
        second = y.v;
    }
};

#else

struct Block {
    uint8_t w[512];
    template <int KIND> HS_INLINE void unpack(const uint8_t* p) {
        if (KIND == INT8) {
            memcpy(w, p, 512);
            return;
        }
        for (int i = 0; i < 256; i++) w[i] = p[i] & 15, w[i + 256] = p[i] >> 4;
        if (KIND == Q5_K)
            for (int i = 0; i < 512; i++) w[i] |= (p[256 + i % 64] >> i / 64 & 1) << 4;
        if (KIND == Q6_K)
            for (int i = 0; i < 512; i++) w[i] |= (p[256 + i / 256 * 64 + i % 64] >> 2 * (i / 64 % 4) & 3) << 4;
    }
    HS_INLINE vf some(const int8_t* a, int32_t offset, int from, int to) const {
        int32_t s[LANES];
        for (int o = 0; o < LANES; o++) s[o] = offset;
        for (int j = from; j < to; j++)
            for (int o = 0; o < LANES; o++)
                for (int i = 0; i < 4; i++) s[o] += (int32_t)w[64 * j + 4 * o + i] * a[4 * j + i];
        vi v;
        memcpy(&v, s, sizeof v);
        return __builtin_convertvector(v, vf);
    }
    template <int KIND> HS_INLINE vf dot(const int8_t* a, int32_t offset) const {
        return some(a, KIND == INT8 ? offset : 0, 0, 8);
    }
    HS_INLINE void dots(const int8_t* a, const int32_t* offsets, vf& first, vf& second) const {
        first = some(a, offsets[0], 0, 4);
        second = some(a, offsets[1], 4, 8);
    }
};

#endif

}  // namespace hs
