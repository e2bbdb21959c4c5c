// The products, compiled once.
#include "product.h"

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace hs {

template <int KIND>
static void run(const Matrix& m, int first, int count, const Inputs& in, int tokens, vf* out) {
    const size_t stride = m.tile_bytes();
    const int blocks = m.blocks();
    for (int i = 0; i < count; i += 2) {
        const uint8_t* p = m.tile(first + i);
        vf* to = out + (size_t)i * tokens;
        if (count - i == 1)
            product<KIND, 1, false>(p, stride, blocks, in, tokens, to);
        else if (tokens == 1)
            product<KIND, 2, true>(p, stride, blocks, in, tokens, to);
        else
            product<KIND, 2, false>(p, stride, blocks, in, tokens, to);
    }
}

static void run_floats(const Matrix& m, int first, int count, const Inputs& in, int tokens, vf* out) {
    const size_t stride = m.tile_bytes();
    for (int i = 0; i < count; i++)
        for (int t = 0; t < tokens;) {
            const uint8_t* p = m.tile(first + i);
            const Inputs from = in.from(t);
            vf* to = out + (size_t)i * tokens + t;
            switch (tokens - t) {
                case 1: float_product<1, 1>(p, stride, m.inputs, from, to, tokens); t += 1; break;
                case 2: float_product<1, 2>(p, stride, m.inputs, from, to, tokens); t += 2; break;
                case 3: float_product<1, 3>(p, stride, m.inputs, from, to, tokens); t += 3; break;
                case 4: float_product<1, 4>(p, stride, m.inputs, from, to, tokens); t += 4; break;
                case 5: float_product<1, 5>(p, stride, m.inputs, from, to, tokens); t += 5; break;
                case 6: float_product<1, 6>(p, stride, m.inputs, from, to, tokens); t += 6; break;
                case 7: float_product<1, 7>(p, stride, m.inputs, from, to, tokens); t += 7; break;
                default: float_product<1, 8>(p, stride, m.inputs, from, to, tokens); t += 8;
            }
        }
}

void tiles_product(const Matrix& m, int first, int count, const Inputs& in, int tokens, vf* out) {
    switch (m.kind) {
        case INT8: run<INT8>(m, first, count, in, tokens, out); break;
        case INT4: run<INT4>(m, first, count, in, tokens, out); break;
        case Q4_K: run<Q4_K>(m, first, count, in, tokens, out); break;
        case Q5_K: run<Q5_K>(m, first, count, in, tokens, out); break;
        case Q6_K: run<Q6_K>(m, first, count, in, tokens, out); break;
        default: run_floats(m, first, count, in, tokens, out);
    }
    if (m.bias)
        for (int i = 0; i < count; i++) {
            const vf bias = load(m.bias + (size_t)(first + i) * LANES);
            for (int t = 0; t < tokens; t++) out[i * tokens + t] += bias;
        }
}

}  // namespace hs

using namespace hs;

// The instructions that this library was compiled to use.
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
