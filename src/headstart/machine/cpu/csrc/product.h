// Rounded activations, and the products of packed matrices with them.
//
// Knows: how activations are rounded and what is multiplied and added in which order. Does not know: layers, threads.
//
// Activations are rounded to 8 bits for each token and each group of 32, so a token's results depend on nothing but the
// token: sums inside a group are whole numbers, and groups are added up in order, whatever else is computed beside it.
// Where a matrix with blocks of 256 reads them, 256 share a scale, so that sums stay whole for as long (block_256.h).
#pragma once
#include "block.h"

namespace hs {

// Rounded inputs of some tokens. A group's 32 numbers of all tokens lie side by side, then the next group's, so that a
// product with several tokens reads from end to end. Matrices that are not rounded read ``exact`` instead; where there are
// none it is not kept, because a prompt's would not fit the caches.
struct Inputs {
    int8_t* numbers;   // [width / 32, rows, 32]; null where all that read them are not rounded
    float* scales;     // [width / 32, rows]
    float* totals;     // the same: scale * sum of the group's numbers, for minima
    int32_t* offsets;  // the same: -128 * sum of the group's numbers, for INT8's + 128
    int32_t* halves;   // [width / 32, rows, 2] -32 * sum of 16 numbers, for Q6_K's + 32; with AVX2 two sums of 16 bits,
                       // of the first and of the last two of each four
    int32_t* factors;  // [width / 32, rows] by 256: a group's scale is so many of the block's, see ``kept_factor``
    float* bases;      // [width / 256, rows] the block's
    int16_t* pairs;    // [width / 64, rows, 2] sum of a group's numbers times its factor, for minima
    float* exact;      // [rows, width], or null
    int width, rows;
    bool by_256;       // 256 share a scale: ``round_group`` keeps them exact, until ``round_block`` has all of them

    Inputs from(int token) const {
        Inputs in = moved(token, (size_t)token * width, width);
        in.factors += token, in.bases += token, in.pairs += 2 * token;
        return in;
    }
    Inputs part(int first, int wide) const {  // of one token: its inputs from ``first`` on, a multiple of 32; not by 256
        return moved((size_t)first / GROUP * rows, first, wide);
    }

  private:
    Inputs moved(size_t groups, size_t n, int wide) const {
        return {numbers ? numbers + groups * GROUP : nullptr, scales + groups, totals + groups, offsets + groups,
                halves + 2 * groups,      factors,         bases,           pairs,
                exact ? exact + n : nullptr, wide, rows, by_256};
    }
};

// Numbers -127 .. 127 to bytes; the sums of the first 16 and of the others.
struct Sums {
    int32_t sum[2];
    int32_t half[2];  // as ``Inputs::halves`` has them
};
#if defined(__AVX2__)
HS_INLINE __m128i sixteen_bytes(vf v) {
#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
    return _mm512_cvtepi32_epi8(_mm512_cvtps_epi32((__m512)v));
#else
    union { vf v; __m256 h[2]; } x{v};
    const __m256i words = _mm256_packs_epi32(_mm256_cvtps_epi32(x.h[0]), _mm256_cvtps_epi32(x.h[1]));  // quarters 0 2 1 3
    const __m256i right = _mm256_permute4x64_epi64(words, 0xd8);
    return _mm_packs_epi16(_mm256_castsi256_si128(right), _mm256_extracti128_si256(right, 1));
#endif
}
HS_INLINE Sums to_bytes(vf a, vf b, int8_t* to) {
    const __m128i p = sixteen_bytes(a), q = sixteen_bytes(b), ones = _mm_set1_epi8(1);
    _mm_storeu_si128((__m128i*)to, p);
    _mm_storeu_si128((__m128i*)to + 1, q);
#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
    const __m128i none = _mm_setzero_si128();
    const __m128i sums = _mm_hadd_epi32(_mm_dpbusd_epi32(none, ones, p), _mm_dpbusd_epi32(none, ones, q));
    const __m128i both = _mm_hadd_epi32(sums, sums);
    const int32_t x = _mm_cvtsi128_si32(both), y = _mm_extract_epi32(both, 1);
    return {{x, y}, {-32 * x, -32 * y}};
#else  // sums of two, those of 0, 1, 4, 5, ... and those of 2, 3, 6, 7, ... apart
    const __m128i x = _mm_maddubs_epi16(ones, p), y = _mm_maddubs_epi16(ones, q);
    const __m128i four = _mm_add_epi16(_mm_unpacklo_epi32(x, y), _mm_unpackhi_epi32(x, y));  // x y x y
    const __m128i two = _mm_add_epi16(four, _mm_srli_si128(four, 8));
    const __m128i sums = _mm_madd_epi16(two, _mm_set1_epi16(1));
    const __m128i halves = _mm_mullo_epi16(two, _mm_set1_epi16(-32));
    return {{_mm_cvtsi128_si32(sums), _mm_extract_epi32(sums, 1)},
            {_mm_cvtsi128_si32(halves), _mm_extract_epi32(halves, 1)}};
#endif
}
#else
HS_INLINE Sums to_bytes(vf a, vf b, int8_t* to) {
    typedef int8_t v16b __attribute__((vector_size(16)));
    const vi x = __builtin_convertvector(round_even(a), vi), y = __builtin_convertvector(round_even(b), vi);
    const v16b p = __builtin_convertvector(x, v16b), q = __builtin_convertvector(y, v16b);
    memcpy(to, &p, 16);
    memcpy(to + 16, &q, 16);
    const int32_t first = sum(x), second = sum(y);
    return {{first, second}, {-32 * first, -32 * second}};
}
#endif

// What belongs to a group's numbers.
HS_INLINE void keep_sums(const Inputs& to, size_t at, float scale, const Sums& of) {
    const int32_t total = of.sum[0] + of.sum[1];
    to.scales[at] = scale;
    to.totals[at] = scale * (float)total;
    to.offsets[at] = -128 * total;
    to.halves[2 * at] = of.half[0];
    to.halves[2 * at + 1] = of.half[1];
}

HS_INLINE float inverse_of(float most) { return most > 1e-35f ? 127.0f / most : 0.0f; }  // never infinite, nor is 8 times it

// Round 32 inputs of a token. Infinities and NaN make the scale NaN, so that they are seen in the end.
HS_INLINE void round_group(const Inputs& to, int token, int group, vf a, vf b) {
    if (to.exact) {
        float* exact = to.exact + (size_t)token * to.width + group * GROUP;
        store(exact, a);
        store(exact + LANES, b);
    }
    if (to.by_256 || !to.numbers) return;
    const float most = greatest(larger(magnitude(a), magnitude(b)));
    const vf inverse = splat(inverse_of(most));
    const size_t at = (size_t)group * to.rows + token;
    const Sums sums = to_bytes(a * inverse, b * inverse, to.numbers + at * GROUP);
    keep_sums(to, at, most / 127.0f + not_finite(a + b), sums);
}

// Round 256 inputs of a token: a scale for all, and for each group a power of two of it. A group's is what its largest number
// needs, or more where 16 numbers would be larger than MOST_SIZE together (half of what they can be, and twice what they
// mostly are).
void round_block(const Inputs& to, int token, int block, const float* x);

// A group's scales.
template <int KIND> struct Scales {
    vf scale, least;

    HS_INLINE void from(const uint8_t* p) {
        scale = load_half((const uint16_t*)p);
        if (KIND == INT4) least = load_half((const uint16_t*)(p + 32));
    }
};

constexpr int MOST_TILES = 4;    // tiles of one call
constexpr int MOST_TOKENS = 60;  // tokens of one call; of 64, the sums of four tiles would want the same cache lines
constexpr size_t AHEAD = 4096;   // bytes that weights are asked for before they are needed

// Tokens up to which tiles are read one after the other, as one stream of memory. Zen 5 reads one faster than four that lie
// close together (two threads 59 GB/s instead of 49); from there on to load a token's numbers for each tile costs more.
constexpr int one_stream(int kind) { return !ZEN5 ? 0 : kind == INT8 || kind == Q5_K ? 8 : 7; }
constexpr bool all_at_once(int tiles) { return ZEN5 && tiles == 1; }  // five to eight tokens, with their sums in registers

// A group's products with N tokens, from ``at`` on: tile i's part is added to out[i * tokens + t]. Whole numbers inside a
// group, groups in order.
template <int KIND, int W, int N, typename Numbers>
HS_INLINE void add_group(const Numbers& numbers, const Scales<KIND>* own, const Inputs& in, size_t at, int tokens, vf* out) {
    vf dot[N][W];
    numbers.template dot<KIND, N>(in.numbers + at * GROUP, in.offsets + at, dot);
    for (int t = 0; t < N; t++) {
        const vf scale = splat(in.scales[at + t]), total = splat(in.totals[at + t]);
        for (int i = 0; i < W; i++) {
            vf s = fma(dot[t][i], own[i].scale * scale, out[i * tokens + t]);
            if (KIND == INT4) s = fma(own[i].least, total, s);
            out[i * tokens + t] = s;
        }
    }
}

constexpr int STEP = 8;  // groups between two looks at the sums in memory

// Groups g .. g + count - 1 of W tiles times N tokens, whose sums are in registers meanwhile: tile i's part is added to
// out[i * N + t]. ``ahead``: where weights are asked for, an equal part of all TILES tiles for each of their groups.
template <int KIND, int W, int TILES, int N>
HS_INLINE void add_step(const uint8_t* const* tile, const uint8_t* ahead, size_t stride, int g, int count, const Inputs& in,
                        vf* out) {
    constexpr size_t PART = block_bytes(KIND), ASKED = PART * W / TILES;
    constexpr int SOME = N < Block<W>::AT_ONCE ? N : Block<W>::AT_ONCE;  // tokens at once
    vf sums[W * N];
    for (int i = 0; i < W * N; i++) sums[i] = out[i];
#pragma GCC unroll 1
    for (int k = 0; k < count; k++) {
        PackedBlock<W> numbers;
        Scales<KIND> own[W];
        for (int i = 0; i < TILES; i++)
            for (size_t line = 0; line < ASKED; line += 64) __builtin_prefetch(ahead + stride * i + ASKED * k + line);
        for (int i = 0; i < W; i++) {
            const uint8_t* block = tile[i] + PART * (g + k);
            numbers.template unpack<KIND>(i, block);
            own[i].from(block + scales_at(KIND));
        }
        const size_t at = (size_t)(g + k) * in.rows;
#pragma GCC unroll 4
        for (int t = 0; t < N; t += SOME)
            if (N - t >= SOME)
                add_group<KIND, W, SOME>(numbers, own, in, at + t, N, sums + t);
            else
                add_group<KIND, W, 1>(numbers, own, in, at + t, N, sums + t);
    }
    for (int i = 0; i < W * N; i++) out[i] = sums[i];
}

// A few tokens: ``product`` in steps. One alone waits for memory, which is read faster group by group.
template <int KIND, int W, int TILES, int N>
__attribute__((noinline)) void few_product(const uint8_t* data, size_t stride, int groups, const Inputs& in, vf* out) {
    constexpr size_t PART = block_bytes(KIND);
    for (int i = 0; i < TILES * N; i++) out[i] = splat(0.0f);
    for (int g = 0; g < groups; g += STEP)
        for (int first = 0; first < TILES; first += W) {
            const int count = groups - g < STEP ? groups - g : STEP;
            const size_t next = PART * g + PART * count * first / TILES + AHEAD;
            const uint8_t *tile[W], *ahead = data + next + (next < stride ? 0 : stride * (TILES - 1));
            for (int i = 0; i < W; i++) tile[i] = data + stride * (first + i);
            add_step<KIND, W, TILES, N>(tile, ahead, stride, g, count, in, out + first * N);
        }
}

// ``tiles`` tiles (``stride`` bytes apart), W at a time, times ``tokens`` tokens: out[i * tokens + t] is tile i's 16 outputs
// for token t. Tiles are streams of memory, which a core reads faster together than one by one: what is asked for behind a
// tile's end is the stream's next tile. Sums of many tokens are kept in ``out``, so that the registers hold the weights.
template <int KIND, int W, int TILES, typename Numbers>
HS_INLINE void any_product(const uint8_t* data, size_t stride, int groups, const Inputs& in, int tokens, vf* out) {
    constexpr size_t PART = block_bytes(KIND);
    for (int i = 0; i < TILES * tokens; i++) out[i] = splat(0.0f);
    size_t at = 0;  // the group's place among the inputs
    for (int g = 0; g < groups; g++, at += in.rows)
        for (int first = 0; first < TILES; first += W) {
            Numbers numbers;
            Scales<KIND> own[W];
            for (int i = 0; i < W; i++) {
                const uint8_t *tile = data + stride * (first + i), *block = tile + PART * g;
                const size_t from = PART * g + AHEAD;
                const uint8_t* ahead = tile + from + (from < stride ? 0 : stride * (TILES - 1));
                for (size_t line = 0; line < PART; line += 64) __builtin_prefetch(ahead + line);
                numbers.template unpack<KIND>(i, block);
                own[i].from(block + scales_at(KIND));
            }
            vf* to = out + first * tokens;
            int t = 0;
#pragma GCC unroll 1
            for (; t + 4 <= tokens; t += 4) add_group<KIND, W, 4>(numbers, own, in, at + t, tokens, to + t);
            if (tokens - t == 3) add_group<KIND, W, 3>(numbers, own, in, at + t, tokens, to + t);
            if (tokens - t == 2) add_group<KIND, W, 2>(numbers, own, in, at + t, tokens, to + t);
            if (tokens - t == 1) add_group<KIND, W, 1>(numbers, own, in, at + t, tokens, to + t);
        }
}

template <int KIND, int W, int TILES>
HS_INLINE void product(const uint8_t* data, size_t stride, int groups, const Inputs& in, int tokens, vf* out) {
    if constexpr (all_at_once(TILES)) {
        if (tokens == 5) return few_product<KIND, W, TILES, 5>(data, stride, groups, in, out);
        if (tokens == 6) return few_product<KIND, W, TILES, 6>(data, stride, groups, in, out);
        if (tokens == 7) return few_product<KIND, W, TILES, 7>(data, stride, groups, in, out);
        if (tokens == 8) return few_product<KIND, W, TILES, 8>(data, stride, groups, in, out);
    }
    if constexpr (Block<W>::FEW >= 4) {
        if (tokens == 2) return few_product<KIND, W, TILES, 2>(data, stride, groups, in, out);
        if (tokens == 3) return few_product<KIND, W, TILES, 3>(data, stride, groups, in, out);
        if (tokens == 4) return few_product<KIND, W, TILES, 4>(data, stride, groups, in, out);
    }
    if constexpr (Block<W>::AT_ONCE >= 4)
        if (tokens == 1) return any_product<KIND, W, TILES, PackedBlock<W>>(data, stride, groups, in, 1, out);
    any_product<KIND, W, TILES, Block<W>>(data, stride, groups, in, tokens, out);
}

// ``count`` tiles from ``first`` on (1 .. 4) times ``tokens`` tokens (1 .. 60): out[i * tokens + t]. Biases are added.
void tiles_product(const Matrix& m, int first, int count, const Inputs& in, int tokens, vf* out);

}  // namespace hs
