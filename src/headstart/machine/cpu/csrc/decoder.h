// The records that Python fills in (see library.py, which mirrors them field by field) and the room a forward needs.
#pragma once
#include <cmath>
#include <memory>
#include <vector>

#include "pool.h"
#include "product.h"

namespace hs {

struct Layer {
    Matrix qkv;      // [(heads + 2 * kv_heads) * head_dim, hidden], less k and v below
    Matrix out;      // [hidden, heads * head_dim]
    Matrix gate_up;  // [2 * ffn, hidden], 32 rows of gate, 32 of up, and so on
    Matrix down;     // [hidden, ffn]
    const float *input_norm, *post_norm;
    const float *q_norm, *k_norm;  // [head_dim] or null
    void *keys, *values;           // the slab's
    int64_t window;                // 0: sees everything
    // Where they are of another kind than what they would lie in: then they are not in qkv, or gate_up is the gate alone.
    Matrix k, v, up;
};

struct Model {
    int32_t hidden, heads, kv_heads, head_dim, ffn, vocab, layers, positions;
    float eps;
    int32_t float_keys;                 // 1: keys and values are floats, 0: half floats
    int32_t capacity;                   // slots of a row of the slab
    int64_t row_stride, head_stride;    // of the slab, in numbers
    Matrix embedding, head;             // [vocab, hidden]
    const float* norm;                  // [hidden]
    const float *cosines, *sines;       // [positions, head_dim / 2]
    const Layer* layer;
};

struct Call {
    int32_t rows, width, first_row, keep;  // keep: logits of so many tokens of each row, its last; -1: of all
    const int64_t* tokens;     // [rows, width], or row after row where each has a width of its own
    const int32_t* lengths;    // [rows]
    const uint8_t* ancestors;  // [rows, width, width] or null for chains
    const int32_t* depths;     // [rows, width] or null
    float* logits;             // [rows, keep, vocab]; of all: [tokens, vocab]
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
    int row, slot, position;  // past the rotation table's end its last is meant
};
constexpr int MOST_SPAN = 16;
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
    Inputs need(int tokens, int width, bool exact, bool by_256 = false) {
        // Not a power of two apart: a prompt's groups would all want the same few lines of the caches.
        const int rows = tokens > MOST_TOKENS ? tokens | 1 : tokens;
        const size_t n = (size_t)rows * width, b = n / GROUP;
        return {numbers_.need(n), scales_.need(b), totals_.need(b),                   offsets_.need(b),
                halves_.need(2 * b), factors_.need(b), bases_.need(b / 8 + 1),              pairs_.need(b + 2 * rows),
                exact ? exact_.need(n) : nullptr, width, rows, by_256};
    }

  private:
    Buffer<int8_t> numbers_;
    Buffer<float> scales_, totals_, bases_, exact_;
    Buffer<int32_t> offsets_, halves_, factors_;
    Buffer<int16_t> pairs_;
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
    Runs runs;
    Ready ready;
    std::vector<Piece> pieces;
    std::vector<Place> places;
    std::vector<Span> spans;
};

// x [width] scaled by this has unit size.
HS_INLINE vf unit_scale(const float* x, float eps, int width) {
    vf squares = splat(0.0f);
    for (int i = 0; i < width; i += LANES) squares = fma(load(x + i), load(x + i), squares);
    return splat(1.0f / std::sqrt(sum(squares) / (float)width + eps));
}

// The inputs as these matrices read them.
inline Inputs read_by(Inputs in, std::initializer_list<const Matrix*> readers) {
    bool exact = in.by_256 = false, rounded = false;
    for (const Matrix* m : readers)
        if (m->data) exact |= is_exact(m->kind), rounded |= !is_exact(m->kind), in.by_256 |= by_256(m->kind);
    if (!exact && !in.by_256) in.exact = nullptr;
    if (!rounded) in.numbers = nullptr;
    return in;
}

// Round 256 inputs that ``round_group`` kept.
HS_INLINE void round_kept(const Inputs& in, int token, int block) {
    round_block(in, token, block, in.exact + (size_t)token * in.width + 8 * GROUP * block);
}

// x [width], scaled to unit size and by ``weight``, rounded.
void norm_token(const float* x, const float* weight, float eps, int width, const Inputs& to, int token);

// Attention of some tokens of one row and some query heads that share keys; the result is rounded into ``to``.
struct Sight {
    const void *keys, *values;      // the slab's
    size_t at;                      // where the row's head begins in them: [capacity, head_dim]
    int length;                     // live keys before this forward
    int first, last;                // tokens first .. last - 1 of the row
    const uint8_t* ancestors;       // [width, width] of the row, or null
    int width;
    int window;
    const void* next = nullptr;     // keys that this thread will probably read next
};
void attend(const Model& m, const Sight& s, int head, int heads, const float* queries, const Inputs& to, Own& own);

// -- what threads share out, and do alike for a decoder and for a draft head

// n rows of inputs: up to FEW are prepared by every thread for itself, which saves a barrier; more by all together, some
// neighbours at a time, whose numbers lie in the same cache lines.
constexpr int FEW = 16, NEIGHBOURS = 8;
template <typename Make>
Inputs prepare(Pool& pool, int n, int width, const Inputs& common, Rounded& own, Share& turn, Make make) {
    if (n <= FEW) {
        Inputs to = own.need(n, width, common.exact != nullptr, common.by_256);
        if (!common.numbers) to.numbers = nullptr;
        for (int t = 0; t < n; t++) make(to, t);
        return to;
    }
    for (int first; (first = turn.take() * NEIGHBOURS) < n;)
        for (int t = first; t < n && t < first + NEIGHBOURS; t++) make(common, t);
    pool.meet();
    return common;
}

// Calls work(first, count) for n tokens, at most MOST_TOKENS at a time: about as many every time, because weights are
// unpacked for each of them, and in fours, as products take them.
template <typename Work> HS_INLINE void by_tokens(int n, Work work) {
    const int calls = (n + MOST_TOKENS - 1) / MOST_TOKENS, each = calls > 1 ? ((n + calls - 1) / calls + 3) / 4 * 4 : n;
    for (int t = 0; t < n; t += each) work(t, n - t < each ? n - t : each);
}

// A matrix times n tokens, ``wide`` tiles (1 .. 4) at a time; done(tile, token, 16 numbers).
template <typename Turns, typename Done>
void shared_product(const Matrix& m, const Inputs& in, int n, int wide, Turns&& turn, Done done) {
    const int tiles = m.tiles(), pieces = (tiles + wide - 1) / wide;
    vf found[MOST_TILES * MOST_TOKENS];
    for (int item; (item = turn.take(pieces) * wide) < tiles;) {
        const int count = tiles - item < wide ? tiles - item : wide;
        by_tokens(n, [&](int t, int some) {
            tiles_product(m, item, count, in.from(t), some, found);
            for (int i = 0; i < count; i++)
                for (int j = 0; j < some; j++) done(item + i, t + j, found[i * some + j]);
        });
    }
}

// The 16 numbers of a tile to their place in a row of ``outputs``, which may end before them.
HS_INLINE void store_tile(float* row, int outputs, int tile, vf v) {
    const int at = tile * LANES, some = outputs - at;
    memcpy(row + at, &v, sizeof(float) * (some < LANES ? some : LANES));
}

// One head of queries, keys or values of n tokens; placed(token, its tiles, how far these are apart).
template <typename Placed>
void head_product(const Matrix& qkv, int head, int dim, const Inputs& in, int n, Placed placed) {
    const int tiles = dim / LANES;
    vf found[16 * MOST_TOKENS];
    by_tokens(n, [&](int t, int some) {
        for (int i = 0; i < tiles; i += MOST_TILES)
            tiles_product(qkv, head * tiles + i, tiles - i < MOST_TILES ? tiles - i : MOST_TILES, in.from(t), some,
                          found + i * some);
        for (int j = 0; j < some; j++) placed(t + j, found + j, some);
    });
}

// What a token's heads meet on their way.
struct Way {
    const float *q_norm, *k_norm;  // [head_dim] or null
    float* query;                  // [heads, head_dim]
    void *keys, *values;           // of the cache
    bool floats;                   // they are floats, not half floats
};

// A token's head: norm, rotation, and to where it belongs. M: a Model, or whatever else has its fields.
template <typename M>
__attribute__((noinline)) void place_head(const M& m, int head, const Place& at, const Way& to, const vf* found,
                                          int stride) {
    const int dim = m.head_dim, tiles = dim / LANES, half = tiles / 2;
    vf v[16];
    for (int i = 0; i < tiles; i++) v[i] = found[i * stride];
    const bool query = head < m.heads, key = !query && head < m.heads + m.kv_heads;
    const float* weight = query ? to.q_norm : key ? to.k_norm : nullptr;
    if (weight) {
        vf squares = splat(0.0f);
        for (int i = 0; i < tiles; i++) squares = fma(v[i], v[i], squares);
        const vf scale = splat(1.0f / std::sqrt(sum(squares) / (float)dim + m.eps));
        for (int i = 0; i < tiles; i++) v[i] = v[i] * scale * load(weight + i * LANES);
    }
    if (query || key) {
        const size_t turn = (size_t)(at.position < m.positions ? at.position : m.positions - 1) * (dim / 2);
        for (int i = 0; i < half; i++) {
            const vf c = load(m.cosines + turn + i * LANES), s = load(m.sines + turn + i * LANES);
            const vf a = v[i], b = v[i + half];
            v[i] = a * c - b * s;
            v[i + half] = b * c + a * s;
        }
    }
    if (query) {
        const vf scale = splat(1.0f / std::sqrt((float)dim));
        for (int i = 0; i < tiles; i++) store(to.query + head * dim + i * LANES, v[i] * scale);
        return;
    }
    const int own = key ? head - m.heads : head - m.heads - m.kv_heads;
    void* cache = key ? to.keys : to.values;
    const size_t first = (size_t)at.row * m.row_stride + (size_t)own * m.head_stride + (size_t)at.slot * dim;
    for (int i = 0; i < tiles; i++)
        if (to.floats)
            store((float*)cache + first + i * LANES, v[i]);
        else
            store_half((uint16_t*)cache + first + i * LANES, v[i]);
}

// 32 numbers of silu(gate) * up for n tokens, rounded. ``up``: null if its rows lie between the gate's.
HS_INLINE void swiglu(const Matrix& gate, const Matrix* up, int item, const Inputs& in, int n, const Inputs& to) {
    vf found[4 * MOST_TOKENS];
    by_tokens(n, [&](int t, int some) {
        if (up) {
            tiles_product(gate, item * 2, 2, in.from(t), some, found);
            tiles_product(*up, item * 2, 2, in.from(t), some, found + 2 * some);
        } else {
            tiles_product(gate, item * 4, 4, in.from(t), some, found);
        }
        for (int j = 0; j < some; j++)
            round_group(to, t + j, item, silu(found[j]) * found[2 * some + j],
                        silu(found[some + j]) * found[3 * some + j]);
    });
}

}  // namespace hs
