// One group of packed weights (16 outputs, 32 inputs) of W tiles, taken apart once and multiplied with several tokens.
//
// Knows: the dot-product instructions of each kind of processor. Does not know: scales, tokens, tiles.
//
// ``unpack`` takes a group's numbers from memory. ``dot`` finds their sums of products with 32 numbers of each of N tokens:
// found[t][i] for tile i (INT8 and INT4; what has blocks of 256 goes on in whole numbers, see block_256.h). Sums are whole
// numbers of less than 2^24, so that floats hold them exactly: every branch gives the same bits. ``offset``: what makes up
// for numbers that are kept without a sign, see ``Inputs``.
//
// Several tiles at once, because a token's numbers are then loaded once for all of them: cores multiply faster than they
// load. Several tokens at once, because a sum has to wait for its last step: others are taken in turns with it.
#pragma once
#include "layout.h"

namespace hs {

typedef int32_t four_numbers __attribute__((may_alias, aligned(1)));

// AMD's Zen 4 and 5 (compilers that do not know them say Zen 3): of four units two multiply, and the other two shift, mask
// and add meanwhile, so that two such steps are cheaper than one of a unit that multiplies.
#if defined(__AVX512VNNI__) && (defined(__znver3__) || defined(__znver4__) || defined(__znver5__))
constexpr bool ZEN = true;
#else
constexpr bool ZEN = false;
#endif
// Zen 5 alone, by an instruction that Zen 4 has not.
#if defined(__znver5__) || defined(__AVX512VP2INTERSECT__)
constexpr bool ZEN5 = ZEN;
#else
constexpr bool ZEN5 = false;
#endif

// For processors that gain nothing from several tokens at once: a Block that has ``dot_one``.
template <typename Own, int W> struct TokenByToken {
    static constexpr int FEW = 0, AT_ONCE = 1;
    template <int KIND, int N> HS_INLINE void dot(const int8_t* a, const int32_t* offset, vf (*found)[W]) const {
        for (int t = 0; t < N; t++) own().template dot_one<KIND>(a + GROUP * t, offset + t, found[t]);
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

// Said plainly, because compilers copy a register of zeros, which is not always free.
HS_INLINE __m512i nothing() {
    __m512i x;
    __asm__ volatile("vpxor %x0, %x0, %x0" : "=x"(x));
    return x;
}

// The upper half of each byte.
HS_INLINE __m512i upper(__m512i x) {
#if defined(__GFNI__)
    if (!ZEN) return _mm512_gf2p8affine_epi64_epi8(x, _mm512_set1_epi64(0x1020408000000000), 0);
#endif
    return _mm512_and_si512(_mm512_srli_epi16(x, 4), _mm512_set1_epi8(15));
}

// The highest two bits of each byte of x, y and z, x's lowest.
HS_INLINE __m512i high_bits(__m512i x, __m512i y, __m512i z) {
#if defined(__GFNI__)
    if (!ZEN) {
        x = _mm512_gf2p8affine_epi64_epi8(x, _mm512_set1_epi64(0x4080000000000000), 0);
        y = _mm512_gf2p8affine_epi64_epi8(y, _mm512_set1_epi64(0x0000408000000000), 0);
        z = _mm512_gf2p8affine_epi64_epi8(z, _mm512_set1_epi64(0x0000000040800000), 0);
        return _mm512_ternarylogic_epi32(x, y, z, 0xfe);  // x | y | z
    }
#endif
    const __m512i top = _mm512_set1_epi8(-64);
    y = _mm512_ternarylogic_epi32(top, y, _mm512_srli_epi16(x, 2), 0xca);  // top ? y : x >> 2
    z = _mm512_ternarylogic_epi32(top, z, _mm512_srli_epi16(y, 2), 0xca);
    return _mm512_and_si512(_mm512_srli_epi16(z, 2), _mm512_set1_epi8(63));
}

template <int W> struct Block {
    static constexpr int FEW = 4, AT_ONCE = 2;  // tokens whose sums find room in the registers beside the weights
    __m512i w[W][8];
    template <int KIND> HS_INLINE void unpack(int tile, const uint8_t* p) {
        __m512i* to = w[tile];
        if (KIND == INT8) {
            for (int j = 0; j < 8; j++) to[j] = _mm512_loadu_si512(p + 64 * j);
            return;
        }
        if (KIND == Q6_K) {
            for (int half = 0; half < 2; half++, p += 192, to += 4) {
                const __m512i x = _mm512_loadu_si512(p), y = _mm512_loadu_si512(p + 64), z = _mm512_loadu_si512(p + 128);
                const __m512i low = _mm512_set1_epi8(63);
                to[0] = _mm512_and_si512(x, low);
                to[1] = _mm512_and_si512(y, low);
                to[2] = _mm512_and_si512(z, low);
                to[3] = high_bits(x, y, z);
            }
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
            for (int i = 0; i < W; i++) s[t][i] = KIND == INT8 ? _mm512_set1_epi32(offset[t]) : nothing();
        some<0, 8, N>(a, s);
        for (int t = 0; t < N; t++)
            for (int i = 0; i < W; i++) found[t][i] = (vf)_mm512_cvtepi32_ps(s[t][i]);
    }
};

#elif defined(__AVX2__)

// Said plainly, because compilers left to themselves load everything that is used twice at the beginning, find no room for
// it and store it again, and put additions off until no product finds room either.

// Four numbers from memory, in all lanes: as a float, which takes no part of the units that multiply and add.
HS_INLINE __m256i in_all_lanes(const four_numbers* four) {
    __m256i x;
    __asm__ volatile("vbroadcastss %1, %0" : "=x"(x) : "m"(*four));
    return x;
}
HS_INLINE __m256i from_memory(const void* p) {
    __m256i x;
    __asm__ volatile("vmovdqu %1, %0" : "=x"(x) : "m"(*(const __m256i_u*)p));
    return x;
}
// The same address, from which others are counted: compilers like to keep all of them, and find no room for them either.
template <typename T> HS_INLINE const T* one_address(const T* p) {
    __asm__("" : "+r"(p));
    return p;
}
// sum (+)= products of bytes, two by two: ``w`` without a sign, ``x`` with one.
HS_INLINE void first_products(__m256i& sum, __m256i w, __m256i x) {
    __asm__ volatile("vpmaddubsw %2, %1, %0" : "=x"(sum) : "x"(w), "x"(x));
}
HS_INLINE void add_products(__m256i& sum, __m256i w, __m256i x) {
    __m256i both;
    __asm__ volatile("vpmaddubsw %3, %2, %1\n\tvpaddw %1, %0, %0" : "+x"(sum), "=&x"(both) : "x"(w), "x"(x));
}

// Numbers of W tiles as they lie in memory, taken apart when they are used: for a few tokens, which use them once.
// weights<KIND>(i, k, half): quad k of outputs 8 * half .. + 7 of tile i. INT8: with sign; else from 0 on.
template <int W> struct Packed {
    const uint8_t* from[W];
    template <int KIND> HS_INLINE void unpack(int tile, const uint8_t* p) { from[tile] = p; }
    template <int KIND> HS_INLINE __m256i weights(int i, int k, int half) const {
        const uint8_t* p = from[i] + 32 * half;
        if (KIND == INT8) return _mm256_xor_si256(from_memory(p + 64 * k), _mm256_set1_epi8(-128));
        if (KIND == Q6_K) {
            p += k / 4 * 192;
            if (k % 4 < 3) return _mm256_and_si256(from_memory(p + 64 * (k % 4)), _mm256_set1_epi8(63));
            const __m256i top = _mm256_set1_epi8(3);
            const __m256i a = _mm256_and_si256(_mm256_srli_epi16(from_memory(p), 6), top);
            const __m256i b = _mm256_and_si256(_mm256_srli_epi16(from_memory(p + 64), 4), _mm256_slli_epi16(top, 2));
            const __m256i c = _mm256_and_si256(_mm256_srli_epi16(from_memory(p + 128), 2), _mm256_slli_epi16(top, 4));
            return _mm256_or_si256(_mm256_or_si256(a, b), c);
        }
        const __m256i x = from_memory(p + 64 * (k % 4)), low = _mm256_set1_epi8(15);
        const __m256i four = _mm256_and_si256(k < 4 ? x : _mm256_srli_epi16(x, 4), low);
        if (KIND != Q5_K) return four;
        const __m256i bits = from_memory(p + 256), bit = _mm256_set1_epi8(16);
        const __m256i high = k < 4 ? _mm256_slli_epi16(bits, 4 - k) : _mm256_srli_epi16(bits, k - 4);
        return _mm256_or_si256(four, _mm256_and_si256(high, bit));
    }
};
// The same, taken apart once for many tokens.
template <int W> struct Unpacked {
    __m256i w[W][16];
    template <int KIND> HS_INLINE void unpack(int tile, const uint8_t* p) {
        Packed<1> packed{{p}};
#pragma GCC unroll 16
        for (int j = 0; j < 16; j++) w[tile][j] = packed.template weights<KIND>(0, j / 2, j % 2);
    }
    template <int KIND> HS_INLINE __m256i weights(int i, int k, int half) const { return from_memory(&w[i][2 * k + half]); }
};

template <int W, typename Numbers = Unpacked<W>> struct Block {
    static constexpr int FEW = 4, AT_ONCE = 4;  // tokens whose sums find room in the registers
    Numbers numbers;
    template <int KIND> HS_INLINE void unpack(int tile, const uint8_t* p) { numbers.template unpack<KIND>(tile, p); }

    // found[t][i] (+)= products of token t with quads FROM .. TO - 1 of tile i's lanes 8 * half .. + 7, two of a quad's in
    // each sum.
    template <int KIND, int FROM, int TO, int N, bool FIRST = true>
    HS_INLINE void pairs(const int8_t* a, int half, __m256i (*found)[W]) const {
        a = one_address(a);
#pragma GCC unroll 8
        for (int k = FROM; k < TO; k++) {
            __m256i y[W];
            for (int i = 0; i < W; i++) y[i] = numbers.template weights<KIND>(i, k, half);
            for (int t = 0; t < N; t++) {
                const __m256i x = in_all_lanes((const four_numbers*)(a + GROUP * t) + k);
                for (int i = 0; i < W; i++)
                    if (FIRST && k == FROM)
                        first_products(found[t][i], y[i], x);
                    else
                        add_products(found[t][i], y[i], x);
            }
        }
    }
    template <int KIND, int N> HS_INLINE void dot(const int8_t* a, const int32_t*, vf (*found)[W]) const {
        union Halves { vf v; __m256 h[2]; };
#pragma GCC unroll 2
        for (int half = 0; half < 2; half++) {
            __m256i s[N][W];
            sums<KIND, N>(a, half, s);
            for (int t = 0; t < N; t++)
                for (int i = 0; i < W; i++) ((Halves*)(found[t] + i))->h[half] = _mm256_cvtepi32_ps(s[t][i]);
        }
    }

  private:
    // Lanes 8 * half .. + 7 of the sums over all quads.
    template <int KIND, int N> HS_INLINE void sums(const int8_t* a, int half, __m256i (*s)[W]) const {
        const __m256i ones = _mm256_set1_epi16(1);
        a = one_address(a);
        if (KIND == INT4) {  // 8 * 2 * 127 * 15 fits 16 bits
            pairs<KIND, 0, 8, N>(a, half, s);
            for (int t = 0; t < N; t++)
                for (int i = 0; i < W; i++) s[t][i] = _mm256_madd_epi16(s[t][i], ones);
            return;
        }
        for (int t = 0; t < N; t++)
            for (int i = 0; i < W; i++) s[t][i] = _mm256_setzero_si256();
#pragma GCC unroll 8
        for (int k = 0; k < 8; k++) {
            __m256i y[W];
            for (int i = 0; i < W; i++) y[i] = numbers.template weights<KIND>(i, k, half);
            for (int t = 0; t < N; t++) {
                const __m256i x = in_all_lanes((const four_numbers*)(a + GROUP * t) + k);
                for (int i = 0; i < W; i++) {  // |y| * (x with y's sign): at most 2 * 128 * 127
                    const __m256i both = _mm256_maddubs_epi16(_mm256_abs_epi8(y[i]), _mm256_sign_epi8(x, y[i]));
                    s[t][i] = _mm256_add_epi32(s[t][i], _mm256_madd_epi16(both, ones));
                }
            }
        }
    }
};
template <int W> using PackedBlock = Block<W, Packed<W>>;

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
        if (KIND == Q6_K) {
            const uint8x16_t low = vdupq_n_u8(63);
            for (int half = 0; half < 2; half++, p += 192, to += 16)
                for (int q = 0; q < 4; q++) {
                    const uint8x16_t x = vld1q_u8(p + 16 * q), y = vld1q_u8(p + 64 + 16 * q), z = vld1q_u8(p + 128 + 16 * q);
                    to[q] = vreinterpretq_s8_u8(vandq_u8(x, low));
                    to[q + 4] = vreinterpretq_s8_u8(vandq_u8(y, low));
                    to[q + 8] = vreinterpretq_s8_u8(vandq_u8(z, low));
                    to[q + 12] = vreinterpretq_s8_u8(vshrq_n_u8(vsriq_n_u8(z, vsriq_n_u8(y, x, 2), 2), 2));
                }
            return;
        }
        const uint8x16_t low = vdupq_n_u8(15);
        for (int i = 0; i < 16; i++) {
            uint8x16_t x = vld1q_u8(p + 16 * i), y = vshrq_n_u8(x, 4);
            x = vandq_u8(x, low);
            if (KIND == Q5_K) {
                const int j = i / 4;
                const uint8x16_t high = vld1q_u8(p + 256 + 16 * (i % 4)), bit = vdupq_n_u8(16);
                x = vorrq_u8(x, vandq_u8(vshlq_u8(high, vdupq_n_s8((int8_t)(4 - j))), bit));
                y = vorrq_u8(y, vandq_u8(vshlq_u8(high, vdupq_n_s8((int8_t)-j)), bit));
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
        if (KIND == Q6_K) {
            for (int i = 0; i < 512; i++) {
                const uint8_t* three = p + i / 256 * 192 + i % 64;
                const int j = i / 64 % 4;
                to[i] = j < 3 ? three[64 * j] & 63 : three[0] >> 6 | (three[64] >> 6) << 2 | (three[128] >> 6) << 4;
            }
            return;
        }
        for (int i = 0; i < 256; i++) to[i] = p[i] & 15, to[i + 256] = p[i] >> 4;
        if (KIND == Q5_K)
            for (int i = 0; i < 512; i++) to[i] |= (p[256 + i % 64] >> i / 64 & 1) << 4;
    }
    static HS_INLINE vi some(const uint8_t* w, const int8_t* a, int32_t offset, int from, int to) {
        int32_t s[LANES];
        for (int o = 0; o < LANES; o++) s[o] = offset;
        for (int j = from; j < to; j++)
            for (int o = 0; o < LANES; o++)
                for (int i = 0; i < 4; i++) s[o] += (int32_t)w[64 * j + 4 * o + i] * a[4 * j + i];
        vi v;
        memcpy(&v, s, sizeof v);
        return v;
    }
    template <int KIND> HS_INLINE void dot_one(const int8_t* a, const int32_t* offset, vf* found) const {
        for (int i = 0; i < W; i++) found[i] = to_floats(some(w[i], a, KIND == INT8 ? *offset : 0, 0, 8));
    }
};

#endif

#if !defined(__AVX2__) || defined(__AVX512VNNI__)
template <int W> using PackedBlock = Block<W>;  // for a few tokens: the same here
#endif

// Products of bytes and nothing else, as fast as the processor goes; how many there were. ``seen``: so that none is left out.
HS_INLINE int64_t most_products(int64_t rounds, int32_t* seen) {
#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
    constexpr int SUMS = 12;  // in registers by name: GCC kept them in memory, or copied each twice
    const __m512i w = _mm512_set1_epi8((char)(1 + *seen % 2)), x = _mm512_set1_epi8((char)(2 + *seen % 3));
    __m512i a = w, b = w, c = w, d = w, e = w, f = w, g = w, h = w, i = w, j = w, k = w, l = w;
#define HS_STEP(n) "vpdpbusd %13, %12, %" #n "\n\t"
#pragma GCC unroll 1
    for (int64_t n = 0; n < rounds; n++)
        __asm__ volatile(HS_STEP(0) HS_STEP(1) HS_STEP(2) HS_STEP(3) HS_STEP(4) HS_STEP(5) HS_STEP(6) HS_STEP(7) HS_STEP(8)
                             HS_STEP(9) HS_STEP(10) HS_STEP(11)
                         : "+v"(a), "+v"(b), "+v"(c), "+v"(d), "+v"(e), "+v"(f), "+v"(g), "+v"(h), "+v"(i), "+v"(j),
                           "+v"(k), "+v"(l)
                         : "v"(w), "v"(x));
#undef HS_STEP
    a = _mm512_xor_si512(_mm512_xor_si512(a, b), _mm512_xor_si512(k, l));
    *seen = sum((vi)a);
    return rounds * SUMS * 64;
#elif defined(__AVX2__)
    constexpr int SUMS = 8;  // a sum of two products each; of twelve, GCC kept two in memory and waited for them
    __m256i s[SUMS];
    for (int i = 0; i < SUMS; i++) s[i] = _mm256_set1_epi16((short)i);
    const __m256i w = _mm256_set1_epi8((char)(1 + *seen % 2)), x = _mm256_set1_epi8((char)(2 + *seen % 3));
#pragma GCC unroll 1
    for (int64_t n = 0; n < rounds; n++)
#pragma GCC unroll 8
        for (int i = 0; i < SUMS; i++) add_products(s[i], w, x);  // the same every time, which a compiler must not see
    for (int i = 1; i < SUMS; i++) s[0] = _mm256_xor_si256(s[0], s[i]);
    *seen = _mm256_extract_epi32(s[0], 0);
    return rounds * SUMS * 32;
#else
    (void)rounds, (void)seen;
    return 0;  // not measured
#endif
}

}  // namespace hs
