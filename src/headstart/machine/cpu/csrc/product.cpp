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
    // As many tiles at once as the registers can hold sums for.
    const int wide = tokens == 1 ? 4 : tokens <= 4 ? 2 : 1;
    for (int i = 0; i < count;) {
        const uint8_t* p = m.tile(first + i);
        const int n = count - i >= wide ? wide : count - i >= 2 && wide >= 2 ? 2 : 1;
        vf* to = out + (size_t)i * tokens;
        if (n == 4)
            product<KIND, 4, 1>(p, stride, blocks, in, to);
        else if (n == 2 && tokens <= 4)
            tokens == 1   ? product<KIND, 2, 1>(p, stride, blocks, in, to)
            : tokens == 2 ? product<KIND, 2, 2>(p, stride, blocks, in, to)
            : tokens == 3 ? product<KIND, 2, 3>(p, stride, blocks, in, to)
                          : product<KIND, 2, 4>(p, stride, blocks, in, to);
        else
            product_tokens<KIND, 1>(p, stride, blocks, in, tokens, to);
        i += n;
    }
}

void tiles_product(const Matrix& m, int first, int count, const Inputs& in, int tokens, vf* out) {
    switch (m.kind) {
        case INT8: run<INT8>(m, first, count, in, tokens, out); break;
        case INT4: run<INT4>(m, first, count, in, tokens, out); break;
        case Q4_K: run<Q4_K>(m, first, count, in, tokens, out); break;
        case Q5_K: run<Q5_K>(m, first, count, in, tokens, out); break;
        case Q6_K: run<Q6_K>(m, first, count, in, tokens, out); break;
        default: run<FLOAT>(m, first, count, in, tokens, out);
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
