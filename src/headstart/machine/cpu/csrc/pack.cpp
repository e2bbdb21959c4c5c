// Packing: floats, or a GGUF file's own blocks, into the layout of the kernels, and back to floats.
//
// Knows: both layouts. Does not know: files, tensors' names, products.
#include <cmath>

#include "layout.h"

namespace hs {

namespace {

// Types of GGUF's tensors, by its own numbers: bytes of a block, and inputs of a block.
enum Type : int { F32 = 0, F16 = 1, T4_0 = 2, T4_1 = 3, T8_0 = 8, T4_K = 12, T5_K = 13, T6_K = 14, BF16 = 30 };

uint16_t half_at(const uint8_t* p) {
    uint16_t h;
    memcpy(&h, p, 2);
    return h;
}

// A group's numbers [32] to the place of output ``lane``; the group's bytes are zero before.
template <int KIND> HS_INLINE void put_numbers(const uint8_t* n, uint8_t* group, int lane) {
    uint8_t* own = group + 4 * lane;
    if (KIND == INT8) {
        for (int j = 0; j < 8; j++) memcpy(own + 64 * j, n + 4 * j, 4);
        return;
    }
    if (KIND == Q6_K) {
        for (int half = 0; half < 2; half++, n += 16)
            for (int j = 0; j < 3; j++)
                for (int i = 0; i < 4; i++)
                    own[192 * half + 64 * j + i] = (uint8_t)(n[4 * j + i] | (n[12 + i] >> 2 * j & 3) << 6);
        return;
    }
    uint8_t both[16];
    for (int k = 0; k < 16; k++) both[k] = (uint8_t)((n[k] & 15) | n[k + 16] << 4);
    for (int j = 0; j < 4; j++) memcpy(own + 64 * j, both + 4 * j, 4);
    if (KIND == Q5_K) {
        uint8_t high[4] = {};
        for (int k = 0; k < GROUP; k++) high[k % 4] |= (uint8_t)((n[k] >> 4) << k / 4);
        memcpy(own + 256, high, 4);
    }
}

template <int KIND> HS_INLINE void get_numbers(const uint8_t* group, int lane, uint8_t* n) {
    const uint8_t* own = group + 4 * lane;
    for (int k = 0; k < GROUP; k++) {
        const int j = k / 4, i = k % 4;
        if (KIND == INT8) {
            n[k] = own[64 * j + i];
            continue;
        }
        if (KIND == Q6_K) {
            const uint8_t* three = own + 192 * (j / 4) + i;
            n[k] = j % 4 < 3 ? three[64 * (j % 4)] & 63 : three[0] >> 6 | (three[64] >> 6) << 2 | (three[128] >> 6) << 4;
            continue;
        }
        n[k] = own[64 * (j % 4) + i] >> (j < 4 ? 0 : 4) & 15;
        if (KIND == Q5_K) n[k] |= (own[256 + i] >> j & 1) << 4;
    }
}

// -- floats: a group of all 16 outputs of a tile at a time, in vectors as wide as the processor's own

#if defined(__AVX512F__)
constexpr int WIDE = 16;
#elif defined(__AVX2__)
constexpr int WIDE = 8;
#else
constexpr int WIDE = 4;
#endif
typedef float wide __attribute__((vector_size(4 * WIDE)));
typedef int32_t wide_int __attribute__((vector_size(4 * WIDE)));

struct Columns {
    alignas(64) float x[GROUP][LANES];  // inputs of 16 outputs
    int32_t live[LANES];                // -1 for each that there is, 0 for others, whose bytes are zero
};

template <typename V = wide, typename T> HS_INLINE V some(const T* p) {
    V v;
    memcpy(&v, p, sizeof v);
    return v;
}

// Scales as halves, and what numbers are multiplied by to be in them: 0 where the scale is, so that every number is 0.
HS_INLINE void put_scales(const float* scale, uint8_t* halves, float* inverse) {
    for (int i = 0; i < LANES; i++) {
        const uint16_t half = float_to_half(scale[i]);
        memcpy(halves + 2 * i, &half, 2);
        const float rounded = half_to_float(half);
        inverse[i] = rounded > 0.0f ? 1.0f / rounded : 0.0f;
    }
}

HS_INLINE wide_int nearest(wide x, float low, float high) {  // to even, between whole numbers; of NaN any
    const wide least = wide{} + low, most = wide{} + high;
    x = x > most ? most : x;
    x = x < least ? least : x;
    return __builtin_convertvector((x + 12582912.0f) - 12582912.0f, wide_int);
}

void pack_int8(const Columns& c, uint8_t* block) {
    float scale[LANES], inverse[LANES];
    for (int i = 0; i < LANES; i += WIDE) {
        wide most = {};
        for (int k = 0; k < GROUP; k++) {
            const wide x = some(c.x[k] + i), size = x < wide{} ? -x : x;
            most = (size > most) | (size != size) ? size : most;  // of a group with NaN the scale is NaN, too
        }
        most /= 127.0f;
        memcpy(scale + i, &most, sizeof most);
    }
    put_scales(scale, block + 512, inverse);
    for (int i = 0; i < LANES; i += WIDE)
        for (int k = 0; k < GROUP; k += 4) {
            wide_int word = {};
            for (int j = 0; j < 4; j++)
                word |= ((nearest(some(c.x[k + j] + i) * some(inverse + i), -127.0f, 127.0f) + 128) & 255) << 8 * j;
            word &= some<wide_int>(c.live + i);
            memcpy(block + 16 * k + 4 * i, &word, sizeof word);
        }
}

void pack_int4(const Columns& c, uint8_t* block) {
    float scale[LANES], least[LANES], inverse[LANES];
    for (int i = 0; i < LANES; i += WIDE) {
        wide low = wide{} + INFINITY, high = wide{} - INFINITY;
        wide_int broken = {};
        for (int k = 0; k < GROUP; k++) {
            const wide x = some(c.x[k] + i);
            low = x < low ? x : low;
            high = x > high ? x : high;
            broken |= x != x;
        }
        const wide_int none = low > high;  // nothing but NaN
        low = none ? some(c.x[0] + i) : low;
        high = broken ? wide{} + NAN : (high - low) / 15.0f;  // of a group with NaN the scale is NaN, too
        memcpy(least + i, &low, sizeof low);
        memcpy(scale + i, &high, sizeof high);
    }
    put_scales(scale, block + 256, inverse);
    for (int i = 0; i < LANES; i++) {
        const uint16_t half = float_to_half(least[i]);
        memcpy(block + 288 + 2 * i, &half, 2);
        least[i] = half_to_float(half);
    }
    for (int i = 0; i < LANES; i += WIDE)
        for (int k = 0; k < 16; k += 4) {
            const wide down = some(least + i), by = some(inverse + i);
            wide_int word = {};
            for (int j = 0; j < 4; j++) {
                const wide_int n = nearest((some(c.x[k + j] + i) - down) * by, 0.0f, 15.0f) & 15;
                const wide_int upper = nearest((some(c.x[k + j + 16] + i) - down) * by, 0.0f, 15.0f) & 15;
                word |= (n | upper << 4) << 8 * j;
            }
            word &= some<wide_int>(c.live + i);
            memcpy(block + 16 * k + 4 * i, &word, sizeof word);
        }
}

void pack_floats(int kind, const Columns& c, uint8_t* block) {
    if (kind == INT8) return pack_int8(c, block);
    if (kind == INT4) return pack_int4(c, block);
    if (kind == FLOAT) {
        memcpy(block, c.x, sizeof c.x);
        return;
    }
    uint16_t* to = (uint16_t*)block;
    for (int k = 0; k < GROUP; k++)
        for (int i = 0; i < LANES; i++)
            to[k * LANES + i] = kind == HALF ? float_to_half(c.x[k][i]) : float_to_bfloat(c.x[k][i]);
}

// -- blocks of a GGUF file

// Q4_K's and Q5_K's eight 6-bit scales and minima, from 12 bytes.
void split_scales(const uint8_t* p, uint8_t* scales, uint8_t* minima) {
    for (int g = 0; g < 4; g++) {
        scales[g] = p[g] & 63;
        minima[g] = p[g + 4] & 63;
        scales[g + 4] = (uint8_t)((p[g + 8] & 15) | (p[g] >> 6) << 4);
        minima[g + 4] = (uint8_t)((p[g + 8] >> 4) | (p[g + 4] >> 6) << 4);
    }
}

// Group g's numbers of a block of 256.
template <int KIND> HS_INLINE void file_numbers(const uint8_t* raw, int g, uint8_t* n) {
    if (KIND == Q6_K) {  // 128 low halves, 64 bytes of high bits; inputs l, l + 32, l + 64, l + 96 share these
        const uint8_t *low = raw + g / 4 * 64 + g % 2 * 32, *high = raw + 128 + g / 4 * 32;
        for (int k = 0; k < GROUP; k++)
            n[k] = (uint8_t)((low[k] >> (g % 4 < 2 ? 0 : 4) & 15) | (high[k] >> 2 * (g % 4) & 3) << 4);
        return;
    }
    const uint8_t *high = raw + 16, *low = raw + (KIND == Q5_K ? 48 : 16) + g / 2 * 32;
    for (int k = 0; k < GROUP; k++) {
        n[k] = low[k] >> (g % 2 ? 4 : 0) & 15;
        if (KIND == Q5_K) n[k] |= (high[k] >> g & 1) << 4;
    }
}

// Where an output's scale ``i`` lies, of those that lie side by side in twos.
int paired(int i, int lane) { return 32 * (i / 2) + 2 * lane + i % 2; }

template <int KIND> void pack_256(const uint8_t* raw, uint8_t* block, int lane) {
    uint8_t n[GROUP], *scales = block + scales_at(KIND);
    for (int g = 0; g < 8; g++) {
        file_numbers<KIND>(raw, g, n);
        put_numbers<KIND>(n, block + group_bytes(KIND) * g, lane);
    }
    if (KIND == Q6_K) {
        for (int i = 0; i < 16; i++) scales[paired(i, lane)] = raw[192 + i];
        memcpy(scales + 256 + 2 * lane, raw + 208, 2);
        return;
    }
    uint8_t s[8], m[8];
    split_scales(raw + 4, s, m);
    for (int g = 0; g < 8; g++) scales[LANES * g + lane] = s[g], scales[128 + paired(g, lane)] = m[g];
    memcpy(scales + 256 + 2 * lane, raw, 2);
    memcpy(scales + 288 + 2 * lane, raw + 2, 2);
}

void pack_32(int type, const uint8_t* raw, uint8_t* block, int lane) {
    uint8_t n[GROUP];
    if (type == T8_0) {
        memcpy(block + 512 + 2 * lane, raw, 2);
        for (int k = 0; k < GROUP; k++) n[k] = (uint8_t)(raw[2 + k] ^ 128);
        return put_numbers<INT8>(n, block, lane);
    }
    const uint16_t least = type == T4_1 ? half_at(raw + 2) : float_to_half(-8.0f * half_to_float(half_at(raw)));
    memcpy(block + 256 + 2 * lane, raw, 2);
    memcpy(block + 288 + 2 * lane, &least, 2);
    const uint8_t* both = raw + (type == T4_1 ? 4 : 2);
    for (int k = 0; k < 16; k++) n[k] = both[k] & 15, n[k + 16] = both[k] >> 4;
    put_numbers<INT4>(n, block, lane);
}

size_t raw_bytes(int type) {
    switch (type) {
        case T4_0: return 18;
        case T4_1: return 20;
        case T8_0: return 34;
        case T4_K: return 144;
        case T5_K: return 176;
        case T6_K: return 210;
        default: return 0;
    }
}

// The kind that keeps a type's numbers; -1 if there is none.
int kind_of(int type) {
    switch (type) {
        case T4_0: case T4_1: return INT4;
        case T8_0: return INT8;
        case T4_K: return Q4_K;
        case T5_K: return Q5_K;
        case T6_K: return Q6_K;
        default: return -1;
    }
}

void pack_raw(int type, const uint8_t* raw, uint8_t* block, int lane) {
    switch (type) {
        case T4_K: return pack_256<Q4_K>(raw, block, lane);
        case T5_K: return pack_256<Q5_K>(raw, block, lane);
        case T6_K: return pack_256<Q6_K>(raw, block, lane);
        default: return pack_32(type, raw, block, lane);
    }
}

// 32 inputs of 16 rows of a file, from input ``at`` on; zeros where there is no row.
HS_INLINE void read_columns(int type, const uint8_t* const* rows, size_t at, Columns& c) {
    alignas(64) float x[LANES][GROUP];
    for (int i = 0; i < LANES; i++)
        for (int k = 0; k < GROUP; k += LANES) {
            vf some = splat(0.0f);
            if (rows[i] && type == F32) some = load((const float*)rows[i] + at + k);
            if (rows[i] && type == F16) some = load_half((const uint16_t*)rows[i] + at + k);
            if (rows[i] && type == BF16) some = load_bfloat((const uint16_t*)rows[i] + at + k);
            store(x[i] + k, some);
        }
    for (int k = 0; k < GROUP; k++)
        for (int i = 0; i < LANES; i++) c.x[k][i] = x[i][k];
}

// -- and back

template <int KIND> void unpack_block(const uint8_t* block, int lane, float* to) {
    const uint8_t* p = block + scales_at(KIND);
    const uint16_t* halves = (const uint16_t*)(p + (by_256(KIND) ? 256 : 0));
    const float scale = half_to_float(halves[lane]);
    const float least = KIND == INT8 || KIND == Q6_K ? 0.0f : half_to_float(halves[LANES + lane]);
    for (int g = 0; g < block_groups(KIND); g++) {
        uint8_t n[GROUP];
        get_numbers<KIND>(block + group_bytes(KIND) * g, lane, n);
        for (int k = 0; k < GROUP; k++) {
            if (KIND == INT8) *to++ = scale * (float)((int)n[k] - 128);
            if (KIND == INT4) *to++ = std::fma(scale, (float)n[k], least);
            if (KIND == Q4_K || KIND == Q5_K)
                *to++ = scale * (float)(p[LANES * g + lane] * n[k]) - least * (float)p[128 + paired(g, lane)];
            if (KIND == Q6_K)
                *to++ = scale * (float)((int8_t)p[paired(2 * g + k / 16, lane)] * ((int)n[k] - 32));
        }
    }
}

}  // namespace

void unpack_row(const Matrix& m, int output, float* to) {
    const int lane = output % LANES;
    for (int b = 0; b < m.blocks(); b++, to += block_inputs(m.kind)) {
        const uint8_t* block = m.tile(output / LANES) + block_bytes(m.kind) * b;
        switch (m.kind) {
#define HS_UNPACK(KIND) \
    case KIND: unpack_block<KIND>(block, lane, to); break;
            HS_ROUNDED_KINDS(HS_UNPACK)
#undef HS_UNPACK
            case FLOAT:
                for (int k = 0; k < GROUP; k++) to[k] = ((const float*)block)[k * LANES + lane];
                break;
            default:
                for (int k = 0; k < GROUP; k++) {
                    const uint16_t h = ((const uint16_t*)block)[k * LANES + lane];
                    to[k] = m.kind == HALF ? half_to_float(h) : bfloat_to_float(h);
                }
        }
    }
}

}  // namespace hs

using namespace hs;

HS_API int64_t hs_packed_bytes(int kind, int outputs, int inputs) {
    return (int64_t)block_bytes(kind) * (inputs / block_inputs(kind)) * ((outputs + LANES - 1) / LANES);
}

// Calls put(row, number of the block, block, lane) for every block; rows of -1 stay zeros.
template <typename Put>
static void pack(int kind, const int32_t* order, int outputs, int inputs, uint8_t* packed, Put put) {
    const int blocks = inputs / block_inputs(kind);
    memset(packed, 0, (size_t)hs_packed_bytes(kind, outputs, inputs));
    for (int first = 0; first < outputs; first += LANES)  // tile by tile, which is written once from end to end
        for (int b = 0; b < blocks; b++, packed += block_bytes(kind))
            for (int o = first; o < first + LANES && o < outputs; o++)
                if (order[o] >= 0) put(order[o], b, packed, o - first);
}

// The same of floats, for all outputs of a tile together.
static void pack_rows(int kind, int type, const uint8_t* raw, int64_t row_bytes, const int32_t* order, int outputs,
                      int inputs, uint8_t* packed) {
    for (int first = 0; first < outputs; first += LANES) {
        const uint8_t* rows[LANES] = {};
        Columns columns = {};
        for (int i = 0; i < LANES && first + i < outputs; i++)
            if (order[first + i] >= 0) rows[i] = raw + row_bytes * order[first + i], columns.live[i] = -1;
        for (int at = 0; at < inputs; at += GROUP, packed += block_bytes(kind)) {
            read_columns(type, rows, at, columns);
            pack_floats(kind, columns, packed);
        }
    }
}

// ``order[i]``: which row of ``weights`` [.., inputs] becomes output i; -1 for a row of zeros. ``kind``: not a K kind.
HS_API void hs_pack(int kind, const float* weights, const int32_t* order, int outputs, int inputs, uint8_t* packed) {
    pack_rows(kind, F32, (const uint8_t*)weights, (int64_t)sizeof(float) * inputs, order, outputs, inputs, packed);
}

// The same from the bytes of a GGUF file's tensor, whose rows are ``row_bytes`` apart. Q4_0 and Q4_1 become INT4, Q8_0
// INT8, Q4_K, Q5_K and Q6_K themselves, exactly; F32, F16 and BF16 any kind that ``hs_pack`` makes. 0, or 1 if the type
// does not become this kind (then nothing was done). Several threads may pack ranges of a matrix's tiles.
HS_API int hs_pack_gguf(int kind, int type, const uint8_t* raw, int64_t row_bytes, const int32_t* order, int outputs,
                        int inputs, uint8_t* packed) {
    if (kind < 0 || kind >= KINDS || inputs % block_inputs(kind)) return 1;
    if (type == F32 || type == F16 || type == BF16) {
        if (by_256(kind)) return 1;
        pack_rows(kind, type, raw, row_bytes, order, outputs, inputs, packed);
        return 0;
    }
    if (kind_of(type) != kind) return 1;
    const size_t each = raw_bytes(type);
    pack(kind, order, outputs, inputs, packed, [&](int row, int b, uint8_t* block, int lane) {
        pack_raw(type, raw + row_bytes * row + each * b, block, lane);
    });
    return 0;
}

// Some rows of a packed matrix as floats [count, inputs].
HS_API void hs_unpack(const Matrix* m, const int32_t* rows, int count, float* to) {
    for (int i = 0; i < count; i++) unpack_row(*m, rows[i], to + (size_t)i * m->inputs);
}
