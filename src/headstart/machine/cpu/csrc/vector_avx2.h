// Sixteen numbers as two vectors of eight, for processors that have AVX2 and no AVX-512.
//
// Knows: the operators that the compiler's own vectors have elsewhere, said with intrinsics. Does not know: anything else.
//
// GCC keeps vectors of 64 bytes in memory where registers are half as wide, and copies them there by way of general
// registers: a product's end took as long as the product. These it keeps in registers. Every operator does what the
// compiler's own does in each lane, so the bits are the same.
#pragma once
#include <cstdint>
#include <cstring>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace hs {

struct vf;
struct vu;

struct vi {
    __m256i h[2];
    vi() = default;
    HS_INLINE vi(__m256i low, __m256i high) : h{low, high} {}
    HS_INLINE explicit vi(vf v);
    HS_INLINE explicit vi(vu v);
};
struct vf {
    __m256 h[2];
    vf() = default;
    HS_INLINE vf(__m256 low, __m256 high) : h{low, high} {}
    HS_INLINE explicit vf(vi v) : h{_mm256_castsi256_ps(v.h[0]), _mm256_castsi256_ps(v.h[1])} {}
    HS_INLINE float operator[](int lane) const {
        float all[16];
        memcpy(all, h, sizeof all);
        return all[lane];
    }
};
struct vu {  // whole numbers without a sign
    __m256i h[2];
    vu() = default;
    HS_INLINE vu(__m256i low, __m256i high) : h{low, high} {}
    HS_INLINE explicit vu(vi v) : h{v.h[0], v.h[1]} {}
};
HS_INLINE vi::vi(vf v) : h{_mm256_castps_si256(v.h[0]), _mm256_castps_si256(v.h[1])} {}
HS_INLINE vi::vi(vu v) : h{v.h[0], v.h[1]} {}

#define HS_BOTH(type, name, a, b, op) \
    HS_INLINE type name(type a, type b) { return {op(a.h[0], b.h[0]), op(a.h[1], b.h[1])}; }
HS_BOTH(vf, operator+, a, b, _mm256_add_ps)
HS_BOTH(vf, operator-, a, b, _mm256_sub_ps)
HS_BOTH(vf, operator*, a, b, _mm256_mul_ps)
HS_BOTH(vf, operator/, a, b, _mm256_div_ps)
HS_BOTH(vf, larger, a, b, _mm256_max_ps)   // a > b ? a : b
HS_BOTH(vf, smaller, a, b, _mm256_min_ps)  // a < b ? a : b
HS_BOTH(vi, operator+, a, b, _mm256_add_epi32)
HS_BOTH(vi, operator-, a, b, _mm256_sub_epi32)
HS_BOTH(vi, operator*, a, b, _mm256_mullo_epi32)
HS_BOTH(vi, operator&, a, b, _mm256_and_si256)
HS_BOTH(vi, operator|, a, b, _mm256_or_si256)
HS_BOTH(vi, operator==, a, b, _mm256_cmpeq_epi32)
HS_BOTH(vi, operator>, a, b, _mm256_cmpgt_epi32)
HS_BOTH(vi, larger, a, b, _mm256_max_epi32)
HS_BOTH(vu, operator+, a, b, _mm256_add_epi32)
HS_BOTH(vu, operator*, a, b, _mm256_mullo_epi32)
HS_BOTH(vu, operator&, a, b, _mm256_and_si256)
HS_BOTH(vu, operator^, a, b, _mm256_xor_si256)
#undef HS_BOTH

// Comparisons: -1 where they hold.
template <int HOW> HS_INLINE vi compared(vf a, vf b) {
    return (vi)vf(_mm256_cmp_ps(a.h[0], b.h[0], HOW), _mm256_cmp_ps(a.h[1], b.h[1], HOW));
}
HS_INLINE vi operator==(vf a, vf b) { return compared<_CMP_EQ_OQ>(a, b); }
HS_INLINE vi operator!=(vf a, vf b) { return compared<_CMP_NEQ_UQ>(a, b); }
HS_INLINE vi operator<(vf a, vf b) { return compared<_CMP_LT_OQ>(a, b); }
HS_INLINE vi operator>(vf a, vf b) { return compared<_CMP_GT_OQ>(a, b); }
HS_INLINE vi operator>=(vf a, vf b) { return compared<_CMP_GE_OQ>(a, b); }
HS_INLINE vi operator~(vi a) {
    const __m256i all = _mm256_set1_epi32(-1);
    return {_mm256_xor_si256(a.h[0], all), _mm256_xor_si256(a.h[1], all)};
}
HS_INLINE vi operator!(vi a) { return a == vi(_mm256_setzero_si256(), _mm256_setzero_si256()); }
HS_INLINE vi operator!=(vi a, vi b) { return ~(a == b); }
HS_INLINE vi operator<(vi a, vi b) { return b > a; }
HS_INLINE vi operator>=(vi a, vi b) { return ~(b > a); }

HS_INLINE vf operator-(vf a) {
    const __m256 sign = _mm256_set1_ps(-0.0f);
    return {_mm256_xor_ps(a.h[0], sign), _mm256_xor_ps(a.h[1], sign)};
}
HS_INLINE vi operator<<(vi a, int n) { return {_mm256_slli_epi32(a.h[0], n), _mm256_slli_epi32(a.h[1], n)}; }
HS_INLINE vu operator>>(vu a, int n) { return {_mm256_srli_epi32(a.h[0], n), _mm256_srli_epi32(a.h[1], n)}; }
HS_INLINE vf& operator+=(vf& a, vf b) { return a = a + b; }
HS_INLINE vi& operator+=(vi& a, vi b) { return a = a + b; }
HS_INLINE vi& operator-=(vi& a, vi b) { return a = a - b; }
HS_INLINE vi& operator|=(vi& a, vi b) { return a = a | b; }

HS_INLINE vf load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
HS_INLINE void store(float* p, vf v) {
    _mm256_storeu_ps(p, v.h[0]);
    _mm256_storeu_ps(p + 8, v.h[1]);
}
HS_INLINE vf splat(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
HS_INLINE vi splat_int(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
HS_INLINE vi lane_numbers() {
    return {_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), _mm256_setr_epi32(8, 9, 10, 11, 12, 13, 14, 15)};
}
HS_INLINE vi lane_bits() {
    return {_mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128),
            _mm256_setr_epi32(256, 512, 1024, 2048, 4096, 8192, 16384, 32768)};
}
HS_INLINE vf fma(vf a, vf b, vf c) {
    return {_mm256_fmadd_ps(a.h[0], b.h[0], c.h[0]), _mm256_fmadd_ps(a.h[1], b.h[1], c.h[1])};
}
HS_INLINE vf choose(vi mask, vf a, vf b) {
    const vf m = (vf)mask;
    return {_mm256_blendv_ps(b.h[0], a.h[0], m.h[0]), _mm256_blendv_ps(b.h[1], a.h[1], m.h[1])};
}
HS_INLINE vf to_floats(vi v) { return {_mm256_cvtepi32_ps(v.h[0]), _mm256_cvtepi32_ps(v.h[1])}; }
HS_INLINE vi to_ints(vf v) { return {_mm256_cvttps_epi32(v.h[0]), _mm256_cvttps_epi32(v.h[1])}; }

// Over the lanes, in halves.
HS_INLINE float sum(vf v) {
    const __m256 a = _mm256_add_ps(v.h[0], v.h[1]);
    const __m128 b = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    const __m128 c = _mm_add_ps(b, _mm_movehl_ps(b, b));
    return _mm_cvtss_f32(_mm_add_ss(c, _mm_movehdup_ps(c)));
}
HS_INLINE float greatest(vf v) {
    const __m256 a = _mm256_max_ps(v.h[0], v.h[1]);
    const __m128 b = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    const __m128 c = _mm_max_ps(b, _mm_movehl_ps(b, b));
    return _mm_cvtss_f32(_mm_max_ss(c, _mm_movehdup_ps(c)));
}
HS_INLINE int32_t sum(vi v) {
    const __m256i a = _mm256_add_epi32(v.h[0], v.h[1]);
    const __m128i b = _mm_add_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
    const __m128i c = _mm_add_epi32(b, _mm_shuffle_epi32(b, 0xee));
    return _mm_cvtsi128_si32(_mm_add_epi32(c, _mm_shuffle_epi32(c, 0x55)));
}
HS_INLINE int32_t greatest(vi v) {
    const __m256i a = _mm256_max_epi32(v.h[0], v.h[1]);
    const __m128i b = _mm_max_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
    const __m128i c = _mm_max_epi32(b, _mm_shuffle_epi32(b, 0xee));
    return _mm_cvtsi128_si32(_mm_max_epi32(c, _mm_shuffle_epi32(c, 0x55)));
}

// Steps of ``sums`` (core.h): the first half of the result is a's, the second b's.
HS_INLINE vf fold1(vf a, vf b) { return {_mm256_add_ps(a.h[0], a.h[1]), _mm256_add_ps(b.h[0], b.h[1])}; }
HS_INLINE __m256 fold2(vf a) {
    return _mm256_add_ps(_mm256_permute2f128_ps(a.h[0], a.h[1], 0x20), _mm256_permute2f128_ps(a.h[0], a.h[1], 0x31));
}
HS_INLINE __m256 in_order(__m256 pairs) {  // 0 2 1 3 -> 0 1 2 3
    return _mm256_castpd_ps(_mm256_permute4x64_pd(_mm256_castps_pd(pairs), 0xd8));
}
HS_INLINE __m256 fold3(vf a) {
    const __m256d x = _mm256_castps_pd(a.h[0]), y = _mm256_castps_pd(a.h[1]);
    return in_order(
        _mm256_add_ps(_mm256_castpd_ps(_mm256_unpacklo_pd(x, y)), _mm256_castpd_ps(_mm256_unpackhi_pd(x, y))));
}
HS_INLINE __m256 fold4(vf a) {
    return in_order(_mm256_add_ps(_mm256_shuffle_ps(a.h[0], a.h[1], 0x88), _mm256_shuffle_ps(a.h[0], a.h[1], 0xdd)));
}
HS_INLINE vf fold2(vf a, vf b) { return {fold2(a), fold2(b)}; }
HS_INLINE vf fold3(vf a, vf b) { return {fold3(a), fold3(b)}; }
HS_INLINE vf fold4(vf a, vf b) { return {fold4(a), fold4(b)}; }

// Steps of turning 16 x 16 numbers round: a and b exchange their outer halves, quarters, pairs, numbers.
HS_INLINE void swap8(vf& a, vf& b) {
    const vf x = a, y = b;
    a = {x.h[0], y.h[0]};
    b = {x.h[1], y.h[1]};
}
HS_INLINE void swap4(vf& a, vf& b) {
    const vf x = a, y = b;
    for (int i = 0; i < 2; i++) {
        a.h[i] = _mm256_permute2f128_ps(x.h[i], y.h[i], 0x20);
        b.h[i] = _mm256_permute2f128_ps(x.h[i], y.h[i], 0x31);
    }
}
HS_INLINE void swap2(vf& a, vf& b) {
    for (int i = 0; i < 2; i++) {
        const __m256d x = _mm256_castps_pd(a.h[i]), y = _mm256_castps_pd(b.h[i]);
        a.h[i] = _mm256_castpd_ps(_mm256_unpacklo_pd(x, y));
        b.h[i] = _mm256_castpd_ps(_mm256_unpackhi_pd(x, y));
    }
}
HS_INLINE void swap1(vf& a, vf& b) {
    for (int i = 0; i < 2; i++) {
        const __m256 x = a.h[i], y = b.h[i];
        a.h[i] = _mm256_blend_ps(x, _mm256_moveldup_ps(y), 0xaa);
        b.h[i] = _mm256_blend_ps(_mm256_movehdup_ps(x), y, 0xaa);
    }
}

HS_INLINE vf load_half(const uint16_t* p) {
    return {_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)), _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(p + 8)))};
}
HS_INLINE void store_half(uint16_t* p, vf v) {
    constexpr int HOW = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    for (int i = 0; i < 2; i++) _mm_storeu_si128((__m128i*)(p + 8 * i), _mm256_cvtps_ph(v.h[i], HOW));
}
HS_INLINE vf load_bfloat(const uint16_t* p) {
    const vi v{_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)),
               _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)(p + 8)))};
    return (vf)(v << 16);
}

}  // namespace hs
