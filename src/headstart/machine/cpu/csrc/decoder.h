// The records that Python fills in (see library.py, which mirrors them field by field) and the room a forward needs.
#pragma once
#include <memory>
#include <vector>

#include "pool.h"
#include "product.h"

namespace hs {

struct Layer {
    Matrix qkv;      // [(heads + 2 * kv_heads) * head_dim, hidden]
    Matrix out;      // [hidden, heads * head_dim]
    Matrix gate_up;  // [2 * ffn, hidden], 32 rows of gate, 32 of up, and so on
    Matrix down;     // [hidden, ffn]
    const float *input_norm, *post_norm;
    const float *q_norm, *k_norm;  // [head_dim] or null
    uint16_t *keys, *values;       // the slab's, half floats
    int64_t window;                // 0: sees everything
};

struct Model {
    int32_t hidden, heads, kv_heads, head_dim, ffn, vocab, layers, positions;
    float eps;
    int32_t capacity;                   // slots of a row of the slab
    int64_t row_stride, head_stride;    // of the slab, in numbers
    Matrix embedding, head;             // [vocab, hidden]
    const float* norm;                  // [hidden]
    const float *cosines, *sines;       // [positions, head_dim / 2]
    const Layer* layer;
};

struct Call {
    int32_t rows, width, first_row, keep;
    const int64_t* tokens;     // [rows, width], or row after row where each has a width of its own
    const int32_t* lengths;    // [rows]
    const uint8_t* ancestors;  // [rows, width, width] or null for chains
    const int32_t* depths;     // [rows, width] or null
    float* logits;             // [rows, keep, vocab]
    int32_t watched;           // layers whose outputs are kept
    const int32_t* watch;
    float* features;           // [slab rows, capacity, watched * hidden]
    const int32_t* slab_rows;  // [rows] or null: first_row and those behind it
    const int32_t* widths;     // [rows] or null: all are ``width`` wide
};

struct Piece {  // what a call has of one row: consecutive tokens of the call
    int row, length, first, width;
};
struct Place {  // of a token
    int row, slot, position;
};
struct Span {  // tokens first .. last - 1 of a piece: they go through attention together
    int piece, first, last;
};

// Memory that starts on a cache line.
template <typename T> class Buffer {
  public:
    T* need(size_t n) {
        if (n > size_) {
            raw_.reset(new char[n * sizeof(T) + 128]);
            size_ = n;
        }
        return (T*)(((uintptr_t)raw_.get() + 63) & ~(uintptr_t)63);
    }

  private:
    std::unique_ptr<char[]> raw_;
    size_t size_ = 0;
};

class Rounded {
  public:
    Inputs need(int tokens, int width) {
        const size_t n = (size_t)tokens * width, b = n / GROUP;
        return {numbers_.need(n), scales_.need(b), totals_.need(b), offsets_.need(b), exact_.need(n), width};
    }

  private:
    Buffer<int8_t> numbers_;
    Buffer<float> scales_, totals_, exact_;
    Buffer<int32_t> offsets_;
};

struct Own {  // of one thread
    Rounded normed;
    Buffer<float> scores, keys;
};

struct Room {  // of one model; kept between forwards
    Buffer<float> x, queries;
    Rounded normed, attended, gated, last;
    std::vector<Own> own;
    std::vector<Share> shares;
    std::vector<Piece> pieces;
    std::vector<Place> places;
    std::vector<Span> spans;
};

// x [tokens, width], scaled to unit size and by ``weight``, rounded. ``which``: numbers of the tokens, or null for all.
void norm_token(const float* x, const float* weight, float eps, int width, const Inputs& to, int token);

// Attention of some tokens of one row and some query heads that share keys; the result is rounded into ``to``.
struct Sight {
    const uint16_t *keys, *values;  // [capacity, head_dim]
    int length;                     // live keys before this forward
    int first, last;                // tokens first .. last - 1 of the row
    const uint8_t* ancestors;       // [width, width] of the row, or null
    int width;
    int window;
};
void attend(const Model& m, const Sight& s, int head, int heads, const float* queries, const Inputs& to, Own& own);

}  // namespace hs
