// The products, compiled once, and the packing of weights.
#include "product.h"

#include <cmath>
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
        default: run<FLOAT>(m, first, count, in, tokens, out);
    }
    if (m.bias)
        for (int i = 0; i < count; i++) {
            const vf bias = load(m.bias + (size_t)(first + i) * LANES);
            for (int t = 0; t < tokens; t++) out[i * tokens + t] += bias;
        }
}

// -- packing

static void pack_int8(const float* x, uint8_t* block, int lane) {
    float most = 0.0f;
    for (int k = 0; k < GROUP; k++) most = std::fmax(most, std::fabs(x[k]));
    const uint16_t half = float_to_half(most / 127.0f);
    const float scale = half_to_float(half), inverse = scale > 0.0f ? 1.0f / scale : 0.0f;
    memcpy(block + 512 + 2 * lane, &half, 2);
    for (int k = 0; k < GROUP; k++) {
        float q = std::nearbyint(x[k] * inverse);
        q = q > 127.0f ? 127.0f : q < -127.0f ? -127.0f : q;
        block[64 * (k / 4) + 4 * lane + k % 4] = (uint8_t)((int)q + 128);
    }
}

static void pack_int4(const float* x, uint8_t* block, int lane) {
    float low = x[0], high = x[0];
    for (int k = 1; k < GROUP; k++) low = std::fmin(low, x[k]), high = std::fmax(high, x[k]);
    const uint16_t halves[2] = {float_to_half((high - low) / 15.0f), float_to_half(low)};
    const float scale = half_to_float(halves[0]), least = half_to_float(halves[1]);
    const float inverse = scale > 0.0f ? 1.0f / scale : 0.0f;
    memcpy(block + 256 + 2 * lane, &halves[0], 2);
    memcpy(block + 288 + 2 * lane, &halves[1], 2);
    for (int k = 0; k < GROUP; k++) {
        float q = std::nearbyint((x[k] - least) * inverse);
        const uint8_t n = (uint8_t)(q > 15.0f ? 15.0f : q < 0.0f ? 0.0f : q);
        const int quad = k / 4;
        uint8_t& at = block[64 * (quad % 4) + 4 * lane + k % 4];
        at = quad < 4 ? (uint8_t)((at & 0xf0) | n) : (uint8_t)((at & 0x0f) | n << 4);
    }
}

void unpack_row(const Matrix& m, int output, float* to) {
    const int lane = output % LANES;
    for (int b = 0; b < m.blocks(); b++) {
        const uint8_t *block = m.tile(output / LANES) + block_bytes(m.kind) * b, *own = block + 4 * lane;
        if (m.kind == FLOAT) {
            for (int k = 0; k < GROUP; k++) *to++ = ((const float*)block)[k * LANES + lane];
            continue;
        }
        const uint16_t* halves = (const uint16_t*)(block + (m.kind == INT8 ? 512 : 256));
        const float scale = half_to_float(halves[lane]);
        if (m.kind == INT8) {
            for (int k = 0; k < GROUP; k++) *to++ = scale * (float)((int)own[64 * (k / 4) + k % 4] - 128);
            continue;
        }
        const float least = half_to_float(halves[LANES + lane]);
        for (int k = 0; k < GROUP; k++) {
            const uint8_t both = own[64 * (k / 4 % 4) + k % 4];
            *to++ = std::fma(scale, (float)(k < GROUP / 2 ? both & 15 : both >> 4), least);
        }
    }
}

}  // namespace hs

using namespace hs;

HS_API int64_t hs_packed_bytes(int kind, int outputs, int inputs) {
    return (int64_t)block_bytes(kind) * (inputs / GROUP) * ((outputs + LANES - 1) / LANES);
}

// ``order[i]``: which row of ``weights`` [.., inputs] becomes output i; -1 for a row of zeros. ``outputs``: padded.
HS_API void hs_pack(int kind, const float* weights, const int32_t* order, int outputs, int inputs, uint8_t* packed) {
    const float zeros[GROUP] = {};
    memset(packed, 0, (size_t)hs_packed_bytes(kind, outputs, inputs));
    for (int o = 0; o < outputs; o++)
        for (int b = 0; b < inputs / GROUP; b++) {
            const float* x = order[o] < 0 ? zeros : weights + (size_t)order[o] * inputs + b * GROUP;
            const size_t tile = block_bytes(kind) * (inputs / GROUP) * (o / LANES);
            uint8_t* block = packed + tile + block_bytes(kind) * b;
            if (kind == INT8)
                pack_int8(x, block, o % LANES);
            else if (kind == INT4)
                pack_int4(x, block, o % LANES);
            else
                for (int k = 0; k < GROUP; k++) ((float*)block)[k * LANES + o % LANES] = x[k];
        }
}

// Some rows of a packed matrix as floats [count, inputs].
HS_API void hs_unpack(const Matrix* m, const int32_t* rows, int count, float* to) {
    for (int i = 0; i < count; i++) unpack_row(*m, rows[i], to + (size_t)i * m->inputs);
}

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
