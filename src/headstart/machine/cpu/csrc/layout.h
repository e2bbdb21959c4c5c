// Packed matrices: which numbers lie where.
//
// Knows: the kinds of weights and their layout. Does not know: how they are multiplied, or where they come from.
//
// A matrix [outputs, inputs] is cut into tiles of 16 outputs, a tile into blocks of 32 or 256 inputs, a block into groups
// of 32. A group holds 16 x 32 numbers in the order the dot-product instruction wants them (four inputs of all 16 outputs
// side by side, so that no sum ever crosses lanes); behind a block's groups lie its scales, 16 outputs side by side:
//
//   kind   block  a group's numbers            scales of a block                                 value
//   INT8   32     512 bytes, number + 128      16 halves                                         scale * number
//   INT4   32     256 bytes, two in each       16 halves, 16 halves of minima                    scale * number + minimum
//   FLOAT  32     2048 bytes, float32          none                                              the number itself
//   BFLOAT 32     1024 bytes, bfloat16         none                                              the same
//   HALF   32     1024 bytes, float16          none                                              the same
//   Q4_K   256    256 bytes, two in each       8 x 16 bytes s, 4 x 32 bytes m (one for each      d * s * number - e * m
//                                              group), 16 halves d, 16 halves e
//   Q5_K   256    256 bytes, and 64 of bits 4  the same                                          the same
//   Q6_K   256    384 bytes, four in three     8 x 32 signed bytes s (one for each 16 inputs),   d * s * (number - 32)
//                                              16 halves d
//
// Two in each: byte k of a lane has input k (of the group) in its low half and input k + 16 in its high half. Bits 4: bit
// j of byte i of a lane belongs to input 4 * j + i. Four in three: 16 inputs have 3 x 64 bytes. Byte i of a lane has input
// i, i + 4 or i + 8 in its low six bits; their high bits are input i + 12's, the first byte has its lowest two. Where two
// scales of an output lie side by side (m of groups 2 * i and 2 * i + 1, Q6_K's s of both halves of a group) a row of 16
// outputs has 32 bytes.
//
// These are the numbers of GGUF's Q8_0 (INT8), Q4_0 and Q4_1 (INT4), Q4_K, Q5_K and Q6_K, none of them changed.
#pragma once
#include "core.h"

namespace hs {

enum Kind : int32_t { INT8 = 0, INT4 = 1, FLOAT = 2, Q4_K = 3, Q5_K = 4, Q6_K = 5, BFLOAT = 6, HALF = 7 };
constexpr int KINDS = 8;
// All that are rounded, for switches over kinds: DO(kind) for each.
#define HS_ROUNDED_KINDS(DO) DO(INT8) DO(INT4) DO(Q4_K) DO(Q5_K) DO(Q6_K)

constexpr bool by_256(int kind) { return kind >= Q4_K && kind <= Q6_K; }
constexpr bool is_exact(int kind) { return kind == FLOAT || kind == BFLOAT || kind == HALF; }  // floats, not rounded
constexpr int block_groups(int kind) { return by_256(kind) ? 8 : 1; }
constexpr int block_inputs(int kind) { return GROUP * block_groups(kind); }
constexpr size_t group_bytes(int kind) {
    if (is_exact(kind)) return kind == FLOAT ? 2048 : 1024;
    return kind == INT8 ? 512 : kind == Q5_K ? 320 : kind == Q6_K ? 384 : 256;
}
constexpr size_t scales_at(int kind) { return group_bytes(kind) * block_groups(kind); }  // behind the groups
constexpr size_t block_bytes(int kind) {
    return scales_at(kind) + (is_exact(kind) ? 0 : kind == INT8 ? 32 : kind == INT4 ? 64 : kind == Q6_K ? 288 : 320);
}

struct Matrix {
    int32_t kind, outputs, inputs;  // outputs: a multiple of 16 (padded), inputs: of a block's
    const uint8_t* data;            // null: there is no such matrix
    const float* bias;              // [outputs] or null

    int blocks() const { return inputs / block_inputs(kind); }
    int tiles() const { return outputs / LANES; }
    size_t tile_bytes() const { return block_bytes(kind) * blocks(); }
    const uint8_t* tile(int i) const { return data + tile_bytes() * i; }
};

// Row ``output`` of a packed matrix as floats [inputs].
void unpack_row(const Matrix& m, int output, float* to);

}  // namespace hs
