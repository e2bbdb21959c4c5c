// Sixteen floats at a time, and the few functions of them that a decoder needs.
//
// Knows: vectors, half floats, exp. Does not know: matrices, threads, models.
//
// Written with the compiler's own vector types, so that one source serves AVX-512 and machines without it; AVX2 has types of
// its own (vector_avx2.h) with the same operators.
// Every function here has one order of operations: a token's numbers never depend on what is computed beside it.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>
#if defined(__x86_64__) || defined(__i386__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#define HS_INLINE inline __attribute__((always_inline))
#define HS_API extern "C" __attribute__((visibility("default")))

namespace hs {
constexpr int LANES = 16;  // outputs of a tile, floats of a vector
constexpr int GROUP = 32;  // inputs that share a scale
}  // namespace hs

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__) && !defined(__AVX512F__)
#define HS_TWO_HALVES 1
#include "vector_avx2.h"
#endif

namespace hs {

#if !defined(HS_TWO_HALVES)
typedef float vf __attribute__((vector_size(64)));
typedef int32_t vi __attribute__((vector_size(64)));
typedef uint32_t vu __attribute__((vector_size(64)));
typedef float vf_any __attribute__((vector_size(64), aligned(4), may_alias));

#if defined(__AVX512F__)  // said plainly, because compilers like to copy 64 bytes as two halves by way of the stack
HS_INLINE vf load(const float* p) { return (vf)_mm512_loadu_ps(p); }
HS_INLINE void store(float* p, vf v) { _mm512_storeu_ps(p, (__m512)v); }
#else
HS_INLINE vf load(const float* p) { return (vf) * (const vf_any*)p; }
HS_INLINE void store(float* p, vf v) { *(vf_any*)p = (vf_any)v; }
#endif
HS_INLINE vf splat(float x) { return (vf){x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x}; }
HS_INLINE vi splat_int(int32_t x) { return (vi){x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x}; }
HS_INLINE vi lane_numbers() { return (vi){0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}; }
HS_INLINE vi lane_bits() {
    return (vi){1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768};
}
HS_INLINE vf choose(vi mask, vf a, vf b) { return mask ? a : b; }  // by lane
HS_INLINE vf to_floats(vi v) { return __builtin_convertvector(v, vf); }
HS_INLINE vi to_ints(vf v) { return __builtin_convertvector(v, vi); }

// a * b + c, rounded once, on every machine: so a model's numbers are the same bits with every instruction set. Said with
// intrinsics, because a compiler that is left to choose may choose differently in two copies of a loop.
#if defined(__AVX512F__)
HS_INLINE vf fma(vf a, vf b, vf c) { return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c); }
#elif defined(__aarch64__)
union Quarters {
    vf v;
    float32x4_t q[4];
};
HS_INLINE vf fma(vf a, vf b, vf c) {
    Quarters x{a}, y{b}, z{c};
    for (int i = 0; i < 4; i++) z.q[i] = vfmaq_f32(z.q[i], x.q[i], y.q[i]);
    return z.v;
}
#elif defined(__FP_FAST_FMAF)
HS_INLINE vf fma(vf a, vf b, vf c) {
    for (int i = 0; i < LANES; i++) c[i] = __builtin_fmaf(a[i], b[i], c[i]);
    return c;
}
#else
// By way of doubles, which hold a product of floats exactly. Their sum is rounded to odd (its last bit is set where it is
// not exact), so that rounding it again, to a float, gives what one rounding would have given.
typedef double vd __attribute__((vector_size(128)));
typedef int64_t vl __attribute__((vector_size(128)));

static __attribute__((noinline)) vf fma(vf a, vf b, vf c) {
    const vd p = __builtin_convertvector(a, vd) * __builtin_convertvector(b, vd), q = __builtin_convertvector(c, vd);
    const vd s = p + q, back = s - p, error = (p - (s - back)) + (q - back);  // s + error is p + q, exactly
    const vd zero = {};
    const vl inexact = (error > zero) | (error < zero);  // neither for infinities and NaN
    const vl one = inexact & ~(vl)s & 1, inward = (error < zero) ^ (s < zero);
    return __builtin_convertvector((vd)((vl)s + ((one ^ inward) - inward)), vf);
}
#endif

HS_INLINE vf larger(vf a, vf b) {
#if defined(__AVX512F__)
    return (vf)_mm512_max_ps((__m512)a, (__m512)b);
#else
    return a > b ? a : b;
#endif
}

HS_INLINE vi larger(vi a, vi b) {
#if defined(__AVX512F__)
    return (vi)_mm512_max_epi32((__m512i)a, (__m512i)b);
#else
    return a > b ? a : b;
#endif
}

HS_INLINE vf smaller(vf a, vf b) {
#if defined(__AVX512F__)
    return (vf)_mm512_min_ps((__m512)a, (__m512)b);
#else
    return a < b ? a : b;
#endif
}

// Over the lanes, in halves: always the same order, which a compiler's own reduction does not promise.
#if defined(__AVX512F__)
HS_INLINE __m256 low_half(vf v) { return _mm512_castps512_ps256((__m512)v); }
HS_INLINE __m256 high_half(vf v) { return _mm256_castpd_ps(_mm512_extractf64x4_pd((__m512d)v, 1)); }
HS_INLINE float sum(vf v) {
    const __m256 a = _mm256_add_ps(low_half(v), high_half(v));
    const __m128 b = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    const __m128 c = _mm_add_ps(b, _mm_movehl_ps(b, b));
    return _mm_cvtss_f32(_mm_add_ss(c, _mm_movehdup_ps(c)));
}
HS_INLINE float greatest(vf v) {
    const __m256 a = _mm256_max_ps(low_half(v), high_half(v));
    const __m128 b = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    const __m128 c = _mm_max_ps(b, _mm_movehl_ps(b, b));
    return _mm_cvtss_f32(_mm_max_ss(c, _mm_movehdup_ps(c)));
}
HS_INLINE int32_t sum(vi v) { return _mm512_reduce_add_epi32((__m512i)v); }
HS_INLINE int32_t greatest(vi v) { return _mm512_reduce_max_epi32((__m512i)v); }
#else
template <typename T, typename V> HS_INLINE T fold(V v, T (*join)(T, T)) {
    T t[LANES];
    memcpy(t, &v, sizeof t);
    for (int w = LANES / 2; w; w /= 2)
        for (int i = 0; i < w; i++) t[i] = join(t[i], t[i + w]);
    return t[0];
}
HS_INLINE float sum(vf v) {
    return fold<float>(v, +[](float a, float b) { return a + b; });
}
HS_INLINE int32_t sum(vi v) {
    return fold<int32_t>(v, +[](int32_t a, int32_t b) { return a + b; });
}
HS_INLINE int32_t greatest(vi v) {
    return fold<int32_t>(v, +[](int32_t a, int32_t b) { return a > b ? a : b; });
}
HS_INLINE float greatest(vf v) {
    return fold<float>(v, +[](float a, float b) { return a > b ? a : b; });
}
#endif

// Steps of ``sums`` below.
#if defined(__has_builtin)
#if __has_builtin(__builtin_shufflevector)
#define HS_SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#endif
#endif
#ifndef HS_SHUFFLE
#define HS_SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (vi){__VA_ARGS__})
#endif
HS_INLINE vf fold1(vf a, vf b) {  // halves of a, halves of b
    return HS_SHUFFLE(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
           HS_SHUFFLE(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
}
HS_INLINE vf fold2(vf a, vf b) {  // quarters
    return HS_SHUFFLE(a, b, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27) +
           HS_SHUFFLE(a, b, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
}
HS_INLINE vf fold3(vf a, vf b) {
    return HS_SHUFFLE(a, b, 0, 1, 4, 5, 8, 9, 12, 13, 16, 17, 20, 21, 24, 25, 28, 29) +
           HS_SHUFFLE(a, b, 2, 3, 6, 7, 10, 11, 14, 15, 18, 19, 22, 23, 26, 27, 30, 31);
}
HS_INLINE vf fold4(vf a, vf b) {
    return HS_SHUFFLE(a, b, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30) +
           HS_SHUFFLE(a, b, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
}

// Steps of turning 16 x 16 numbers round: a and b exchange their outer halves, quarters, pairs, numbers.
HS_INLINE void swap8(vf& a, vf& b) {
    const vf x = a, y = b;
    a = HS_SHUFFLE(x, y, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23);
    b = HS_SHUFFLE(x, y, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
}
HS_INLINE void swap4(vf& a, vf& b) {
    const vf x = a, y = b;
    a = HS_SHUFFLE(x, y, 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27);
    b = HS_SHUFFLE(x, y, 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31);
}
HS_INLINE void swap2(vf& a, vf& b) {
    const vf x = a, y = b;
    a = HS_SHUFFLE(x, y, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29);
    b = HS_SHUFFLE(x, y, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
}
HS_INLINE void swap1(vf& a, vf& b) {
    const vf x = a, y = b;
    a = HS_SHUFFLE(x, y, 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30);
    b = HS_SHUFFLE(x, y, 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31);
}
#endif  // HS_TWO_HALVES

HS_INLINE vf magnitude(vf a) { return (vf)((vi)a & splat_int(0x7fffffff)); }

// 0, or NaN if one of the numbers is infinite or NaN.
HS_INLINE float not_finite(vf v) {
#if defined(__AVX512F__)
    const vi most = splat_int(0x7f800000);
    return _mm512_cmpge_epi32_mask((__m512i)magnitude(v), (__m512i)most) ? __builtin_nanf("") : 0.0f;
#else
    return sum(v * splat(0.0f));
#endif
}

// Sixteen vectors -> the vector of their sums: lane k is the sum of part[k]'s lanes.
HS_INLINE vf sums(const vf* part) {
    vf a[8], b[4], c[2];
    for (int i = 0; i < 8; i++) a[i] = fold1(part[2 * i], part[2 * i + 1]);
    for (int i = 0; i < 4; i++) b[i] = fold2(a[2 * i], a[2 * i + 1]);
    for (int i = 0; i < 2; i++) c[i] = fold3(b[2 * i], b[2 * i + 1]);
    return fold4(c[0], c[1]);
}

// -- half floats: the scales of packed weights, and the keys and values of the slab

HS_INLINE float half_to_float(uint16_t h) {
    const uint32_t sign = (uint32_t)(h & 0x8000) << 16, body = h & 0x7fff;
    uint32_t bits;
    float f;
    if (body >= 0x7c00) {
        bits = sign | 0x7f800000 | (body & 0x3ff) << 13;
    } else if (body >= 0x400) {
        bits = sign | ((body << 13) + 0x38000000);
    } else {  // subnormal: body * 2^-24 is exact
        f = (float)body * 5.9604644775390625e-8f;
        return sign ? -f : f;
    }
    memcpy(&f, &bits, 4);
    return f;
}

HS_INLINE uint16_t float_to_half(float f) {  // to nearest, ties to even
    uint32_t bits;
    memcpy(&bits, &f, 4);
    const uint32_t sign = bits >> 16 & 0x8000;
    bits &= 0x7fffffff;
    if (bits > 0x7f800000) return (uint16_t)(sign | 0x7e00);
    if (bits >= 0x477ff000) return (uint16_t)(sign | 0x7c00);
    if (bits < 0x38800000) {  // subnormal or zero: let the float adder round
        float x;
        memcpy(&x, &bits, 4);
        x += 0.5f;
        memcpy(&bits, &x, 4);
        return (uint16_t)(sign | (bits - 0x3f000000));
    }
    bits += 0xfff + (bits >> 13 & 1);
    return (uint16_t)(sign | (bits - 0x38000000) >> 13);
}

// -- bfloat16: the upper half of a float

HS_INLINE float bfloat_to_float(uint16_t h) {
    const uint32_t bits = (uint32_t)h << 16;
    float f;
    memcpy(&f, &bits, 4);
    return f;
}

HS_INLINE uint16_t float_to_bfloat(float f) {  // to nearest, ties to even
    uint32_t bits;
    memcpy(&bits, &f, 4);
    if ((bits & 0x7fffffff) > 0x7f800000) return (uint16_t)(bits >> 16 | 64);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

#if !defined(HS_TWO_HALVES)
HS_INLINE vf load_half(const uint16_t* p) {
#if defined(__AVX512F__)
    return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
#elif defined(__aarch64__)
    Quarters x;
    for (int i = 0; i < 4; i++) x.q[i] = vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p + 4 * i)));
    return x.v;
#else
    vf v;
    for (int i = 0; i < LANES; i++) v[i] = half_to_float(p[i]);
    return v;
#endif
}

HS_INLINE vf load_bfloat(const uint16_t* p) {
#if defined(__AVX512F__)
    return (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16);
#else
    typedef uint16_t v16h __attribute__((vector_size(32)));
    v16h h;
    memcpy(&h, p, sizeof h);
    return (vf)(__builtin_convertvector(h, vi) << 16);
#endif
}

HS_INLINE void store_half(uint16_t* p, vf v) {
#if defined(__AVX512F__)
    _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#elif defined(__aarch64__)
    const Quarters x{v};
    for (int i = 0; i < 4; i++) vst1_u16(p + 4 * i, vreinterpret_u16_f16(vcvt_f16_f32(x.q[i])));
#else
    for (int i = 0; i < LANES; i++) p[i] = float_to_half(v[i]);
#endif
}

#endif  // HS_TWO_HALVES

// -- exp

HS_INLINE vf round_even(vf x) {  // |x| < 2^22
    const vf magic = splat(12582912.0f);
    return (x + magic) - magic;
}

HS_INLINE vf exponential(vf x) {
    x = larger(splat(-87.0f), x);  // in this order: NaN stays
    x = smaller(splat(88.0f), x);
    const vf n = round_even(x * splat(1.44269504088896341f));
    vf r = fma(n, splat(-0.693359375f), x);
    r = fma(n, splat(2.12194440e-4f), r);
    vf p = fma(splat(1.9875691500e-4f), r, splat(1.3981999507e-3f));
    p = fma(p, r, splat(8.3334519073e-3f));
    p = fma(p, r, splat(4.1665795894e-2f));
    p = fma(p, r, splat(1.6666665459e-1f));
    p = fma(p, r, splat(5.0000001201e-1f));
    p = fma(p, r * r, r + splat(1.0f));
    const vi power = (to_ints(n) + splat_int(127)) << 23;
    return p * (vf)power;
}

HS_INLINE vf silu(vf x) { return x / (splat(1.0f) + exponential(-x)); }

}  // namespace hs
