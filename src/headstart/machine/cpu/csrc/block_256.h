// One group of the kinds that have blocks of 256 (Q4_K, Q5_K, Q6_K): sums of products times their scales, in whole numbers.
//
// Knows: the multiplications of each kind of processor. Does not know: what follows a block, tiles, matrices.
//
// A token's 256 numbers share a scale, but for a factor of each group (1, 2, 4 or 8), and so do a block's 256 of an output.
// All that lies between is whole: a block adds
//
//   scale of the token * (d * whole - e * least)
//   whole = sum over groups of factor * s * (sum of products)
//   least = sum over groups of factor * m * (sum of the token's numbers)
//
// with sums of less than 2^31 that are the same in any order. So a group costs two multiplications for each token and tile
// behind its sums of products, where floats need four steps. They take 16 bits, and sums of products fit them because
// ``round_block`` in product.h keeps the magnitudes of 16 numbers of a token at 1023 in all:
//
//   Q4_K  32 inputs: 2 * 1023 * 15      Q5_K  16 inputs: 1023 * 31      Q6_K  16 inputs, less the 32: 1023 * 32
#pragma once
#include "block.h"

namespace hs {

constexpr int MOST_SIZE = 1023;  // of 16 numbers of a token, see above

// Sums of the numbers of groups 2 * i and 2 * i + 1 times their factors, 16 bits each, of one token; ``apart``: how far the next i is.
struct Pairs {
    const four_numbers* first;
    size_t apart;
    HS_INLINE const four_numbers& operator[](int i) const { return first[apart * i]; }
};

// How a group's factor 2^n is kept, twice, as 16 bits each: with AVX-512 as n, because a shift takes no unit that multiplies.
HS_INLINE int32_t kept_factor(int n) {
#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
    return n | n << 16;
#else
    return 1 << n | 1 << n << 16;
#endif
}

#if defined(__AVX512VNNI__) && defined(__AVX512BW__)

template <int KIND, int W, typename Numbers = Block<W>> struct ScaledBlock {
    using Scale = __m512i;
    static constexpr int PARTS = KIND == Q4_K ? 1 : 2;  // sums of a group that fit 16 bits
    Numbers numbers;
    Scale s[W][PARTS];

    HS_INLINE void from(int tile, const uint8_t* block, int g) {  // ``g``: number of the group in the block
        numbers.template unpack<KIND>(tile, block + group_bytes(KIND) * g);
        for (int part = 0; part < PARTS; part++) s[tile][part] = scale_of(block, g, part);
    }
    // 16 bits in each lane, and 16 of zeros, because a sum's upper half is only its sign.
    static HS_INLINE Scale scale_of(const uint8_t* block, int g, int part) {
        const uint8_t* scales = block + scales_at(KIND);
        if (KIND == Q6_K)
            return _mm512_maskz_cvtepi8_epi16(0x55555555, _mm256_loadu_si256((const __m256i*)(scales + 2 * LANES * g + part)));
        return _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)(scales + LANES * g)));
    }
    static HS_INLINE __m512i factor_of(const four_numbers* factors) { return in_all_lanes(factors); }
    static HS_INLINE vi scaled(vi before, vi found, Scale scale, __m512i factor) {
        return (vi)_mm512_dpwssd_epi32((__m512i)before, (__m512i)found, _mm512_sllv_epi16(scale, factor));
    }
    // whole[i * apart + t] += tile i's products with token t. ``halves`` and ``factors``: see ``Inputs``.
    template <int N>
    HS_INLINE void add(const int8_t* a, const int32_t* halves, const four_numbers* factors, vi* whole, int apart) const {
        vi sums[N][W];
        for (int part = 0; part < PARTS; part++) {
            __m512i found[N][W];
            for (int t = 0; t < N; t++)
                for (int i = 0; i < W; i++)
                    found[t][i] = KIND == Q6_K ? _mm512_set1_epi32(halves[2 * t + part]) : nothing();
            if (PARTS == 1)
                numbers.template some<0, 8, N>(a, found);
            else if (part == 0)
                numbers.template some<0, 4, N>(a, found);
            else
                numbers.template some<4, 8, N>(a, found);
            for (int t = 0; t < N; t++) {
                const __m512i factor = factor_of(factors + t);
                for (int i = 0; i < W; i++)
                    sums[t][i] = scaled(part ? sums[t][i] : whole[i * apart + t], (vi)found[t][i], s[i][part], factor);
            }
        }
        for (int t = 0; t < N; t++)
            for (int i = 0; i < W; i++) whole[i * apart + t] = sums[t][i];
    }
};

struct Minima {
    __m512i m[4];
    HS_INLINE void from(const uint8_t* p) {
        for (int i = 0; i < 4; i++) m[i] = _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i*)(p + 32 * i)));
    }
    HS_INLINE vi times(Pairs pairs) const {
        __m512i s = _mm512_setzero_si512();
        for (int i = 0; i < 4; i++) s = _mm512_dpwssd_epi32(s, m[i], in_all_lanes(&pairs[i]));
        return (vi)s;
    }
};

#elif defined(__AVX2__)

union HalfSums { vi v; __m256i h[2]; };

template <int KIND, int W, typename Numbers = Block<W>> struct ScaledBlock {
    static constexpr int PARTS = KIND == Q4_K ? 1 : 2;
    Numbers numbers;
    __m256i s[W][4];  // of outputs 0 .. 7 and 8 .. 15: two equal ones of 16 bits for each; Q6_K: both parts', one by one

    HS_INLINE void from(int tile, const uint8_t* block, int g) {
        const uint8_t* scales = block + scales_at(KIND);
        numbers.template unpack<KIND>(tile, block + group_bytes(KIND) * g);
        for (int half = 0; half < 2; half++) {
            if (KIND == Q6_K) {
                const uint8_t* own = scales + 2 * LANES * g + LANES * half;
                const __m256i both = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)own));
                s[tile][half] = _mm256_blend_epi16(both, _mm256_slli_epi32(both, 16), 0xaa);
                s[tile][2 + half] = _mm256_blend_epi16(_mm256_srli_epi32(both, 16), both, 0xaa);
                continue;
            }
            const __m256i x = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)(scales + LANES * g + 8 * half)));
            s[tile][half] = _mm256_or_si256(x, _mm256_slli_epi32(x, 16));
        }
    }
    template <int N>
    HS_INLINE void add(const int8_t* a, const int32_t* halves, const four_numbers* factors, vi* whole, int apart) const {
#pragma GCC unroll 2
        for (int half = 0; half < 2; half++) {
            add_part<0, N>(a, halves, factors, half, whole, apart);
            if (PARTS == 2) add_part<1, N>(a, halves, factors, half, whole, apart);
        }
    }

  private:
    template <int PART, int N>
    HS_INLINE void add_part(const int8_t* a, const int32_t* halves, const four_numbers* factors, int half, vi* whole,
                            int apart) const {
        __m256i found[N][W];
        if (KIND == Q6_K)  // its sums go past 16 bits and come back, since they begin with what belongs off them
            for (int t = 0; t < N; t++)
                for (int i = 0; i < W; i++) found[t][i] = in_all_lanes((const four_numbers*)halves + 2 * t + PART);
        numbers.template pairs<KIND, 8 / PARTS * PART, 8 / PARTS * (PART + 1), N, KIND != Q6_K>(a, half, found);
        for (int t = 0; t < N; t++) {
            const __m256i factor = in_all_lanes(factors + t);
            for (int i = 0; i < W; i++) {
                const __m256i scale = _mm256_mullo_epi16(s[i][KIND == Q6_K ? 2 * PART + half : half], factor);
                __m256i& to = ((HalfSums*)(whole + i * apart + t))->h[half];
                to = _mm256_add_epi32(to, _mm256_madd_epi16(found[t][i], scale));
            }
        }
    }
};

struct Minima {
    __m256i m[8];
    HS_INLINE void from(const uint8_t* p) {
        for (int i = 0; i < 8; i++) m[i] = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i*)(p + 16 * i)));
    }
    HS_INLINE vi times(Pairs pairs) const {
        HalfSums s{};
        for (int i = 0; i < 8; i++)
            s.h[i % 2] = _mm256_add_epi32(s.h[i % 2], _mm256_madd_epi16(m[i], _mm256_set1_epi32(pairs[i / 2])));
        return s.v;
    }
};

#else

// Whole numbers of 32 bits, from ``Block::some``.
template <int KIND, int W, typename Numbers = Block<W>> struct ScaledBlock {
    using Scale = vi;
    static constexpr int PARTS = KIND == Q6_K ? 2 : 1;
    Numbers numbers;
    Scale s[W][PARTS];

    HS_INLINE void from(int tile, const uint8_t* block, int g) {
        numbers.template unpack<KIND>(tile, block + group_bytes(KIND) * g);
        for (int part = 0; part < PARTS; part++) s[tile][part] = scale_of(block, g, part);
    }
    static HS_INLINE Scale scale_of(const uint8_t* block, int g, int part) {
        const uint8_t* scales = block + scales_at(KIND);
        int32_t own[LANES];
        for (int o = 0; o < LANES; o++)
            own[o] = KIND == Q6_K ? (int8_t)scales[2 * (LANES * g + o) + part] : scales[LANES * g + o];
        vi scale;
        memcpy(&scale, own, sizeof scale);
        return scale;
    }
    static HS_INLINE vi factor_of(const four_numbers* factors) { return splat_int(*factors & 15); }
    static HS_INLINE vi scaled(vi before, vi found, Scale scale, vi factor) { return before + scale * factor * found; }
    template <int N>
    HS_INLINE void add(const int8_t* a, const int32_t* halves, const four_numbers* factors, vi* whole, int apart) const {
        for (int t = 0; t < N; t++, a += GROUP, halves += 2)
            for (int i = 0; i < W; i++)
                for (int part = 0; part < PARTS; part++) {
                    const int from = 8 / PARTS * part, offset = KIND == Q6_K ? halves[part] : 0;
                    vi& sum = whole[i * apart + t];
                    sum = scaled(sum, found(i, a, offset, from, from + 8 / PARTS), s[i][part], factor_of(factors + t));
                }
    }

  private:
#if defined(__ARM_FEATURE_DOTPROD)
    HS_INLINE vi found(int tile, const int8_t* a, int32_t offset, int from, int to) const {
        union { vi v; int32x4_t q[4]; } sums;
        for (int q = 0; q < 4; q++) {
            sums.q[q] = vdupq_n_s32(offset);
            for (int j = from; j < to; j += 4) sums.q[q] = Numbers::some(sums.q[q], numbers.w[tile], j, q, vld1q_s8(a + 4 * j));
        }
        return sums.v;
    }
#else
    HS_INLINE vi found(int tile, const int8_t* a, int32_t offset, int from, int to) const {
        return Numbers::some(numbers.w[tile], a, offset, from, to);
    }
#endif
};

struct Minima {
    const uint8_t* m;
    HS_INLINE void from(const uint8_t* p) { m = p; }
    HS_INLINE vi times(Pairs pairs) const {
        int32_t s[LANES] = {};
        for (int i = 0; i < 4; i++) {
            const int32_t first = (int16_t)(pairs[i] & 0xffff), second = pairs[i] >> 16;
            for (int o = 0; o < LANES; o++) s[o] += m[32 * i + 2 * o] * first + m[32 * i + 2 * o + 1] * second;
        }
        vi v;
        memcpy(&v, s, sizeof v);
        return v;
    }
};

#endif

}  // namespace hs
