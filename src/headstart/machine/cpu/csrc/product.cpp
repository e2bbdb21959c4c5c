// The products, compiled once.
#include "product_256.h"
#include "product_float.h"

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace hs {

void round_block(const Inputs& to, int token, int block, const float* x) {
    vf size[16];
    vi bits = splat_int(0);  // of magnitudes; infinities and NaN are the largest
    float least[8], most = 0.0f;  // least: what a group's largest number may be at the least
    for (int i = 0; i < 16; i++) size[i] = magnitude(load(x + LANES * i)), bits = larger((vi)size[i], bits);
    float together[16];  // sums of 16 magnitudes, and a little more than their rounding can add
    store(together, sums(size) * splat(127.0f / (MOST_SIZE - 16)));
    for (int g = 0; g < 8; g++) {
        least[g] = greatest(larger(size[2 * g], size[2 * g + 1]));
        for (int i = 2 * g; i < 2 * g + 2; i++) least[g] = together[i] > least[g] ? together[i] : least[g];
        most = least[g] > most ? least[g] : most;
    }
    if (greatest(bits) >= 0x7f800000) most = __builtin_nanf("");
    const float inverse = inverse_of(most), base = most / (127.0f * 8.0f);
    to.bases[(size_t)block * to.rows + token] = base;
    for (int g = 0; g < 8; g++, x += GROUP) {
        const int finer = (least[g] <= most * 0.5f) + (least[g] <= most * 0.25f) + (least[g] <= most * 0.125f);
        const int factor = 8 >> finer;
        const size_t at = (size_t)(8 * block + g) * to.rows + token;
        const vf by = splat(inverse * (float)(1 << finer));
        const Sums sums = to_bytes(load(x) * by, load(x + LANES) * by, to.numbers + at * GROUP);
        keep_sums(to, at, base * (float)factor, sums);
        to.factors[at] = kept_factor(3 - finer);
        to.pairs[2 * ((size_t)(4 * block + g / 2) * to.rows + token) + g % 2] = (int16_t)((sums.sum[0] + sums.sum[1]) * factor);
    }
}

template <int KIND, int W, int TILES>
static HS_INLINE void some_tiles(const uint8_t* p, size_t stride, int blocks, const Inputs& in, int tokens, vf* out) {
    if constexpr (by_256(KIND))
        by_256_product<KIND, W, TILES>(p, stride, blocks, in, tokens, out);
    else
        product<KIND, W, TILES>(p, stride, blocks, in, tokens, out);
}

template <int KIND>
static void run(const Matrix& m, int first, int count, const Inputs& in, int tokens, vf* out) {
    const size_t stride = m.tile_bytes();
    const int blocks = m.blocks();
    if (tokens <= one_stream(KIND)) {
        for (int i = 0; i < count; i++)
            some_tiles<KIND, 1, 1>(m.tile(first + i), stride, blocks, in, tokens, out + (size_t)i * tokens);
        return;
    }
    for (int i = 0; i < count;) {
        const uint8_t* p = m.tile(first + i);
        vf* to = out + (size_t)i * tokens;
        if (count - i >= 4)
            some_tiles<KIND, 2, 4>(p, stride, blocks, in, tokens, to), i += 4;
        else if (count - i >= 2)
            some_tiles<KIND, 2, 2>(p, stride, blocks, in, tokens, to), i += 2;
        else
            some_tiles<KIND, 1, 1>(p, stride, blocks, in, tokens, to), i += 1;
    }
}

void tiles_product(const Matrix& m, int first, int count, const Inputs& in, int tokens, vf* out) {
    switch (m.kind) {
#define HS_RUN(KIND) \
    case KIND: run<KIND>(m, first, count, in, tokens, out); break;
        HS_ROUNDED_KINDS(HS_RUN)
#undef HS_RUN
        case BFLOAT: run_floats<BFLOAT>(m, first, count, in, tokens, out); break;
        case HALF: run_floats<HALF>(m, first, count, in, tokens, out); break;
        default: run_floats<FLOAT>(m, first, count, in, tokens, out);
    }
    if (m.bias)
        for (int i = 0; i < count; i++) {
            const vf bias = load(m.bias + (size_t)(first + i) * LANES);
            for (int t = 0; t < tokens; t++) out[i * tokens + t] += bias;
        }
}

}  // namespace hs

using namespace hs;

// The instructions that this library was compiled for.
HS_API const char* hs_instructions() {
#if defined(__AVX512VNNI__)
    return "AVX-512 VNNI";
#elif defined(__AVX512F__)
    return "AVX-512";
#elif defined(__AVX2__) && defined(__FMA__)
    return "AVX2";
#elif defined(__ARM_FEATURE_DOTPROD)
    return "NEON with dot products";
#elif defined(__aarch64__)
    return "NEON";
#else
    return "plain";
#endif
}

// Ask for large pages: weights are read from end to end every step.
HS_API void hs_advise(void* start, int64_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
    const uintptr_t page = 4096, from = ((uintptr_t)start + page - 1) & ~(page - 1);
    const uintptr_t to = ((uintptr_t)start + (uintptr_t)bytes) & ~(page - 1);
    if (to > from) madvise((void*)from, to - from, MADV_HUGEPAGE);  // a wish: failure costs nothing
#else
    (void)start, (void)bytes;
#endif
}
