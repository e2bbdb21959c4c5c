// A whole decoder, from token ids to logits, in one call.
//
// Knows: the order of things in a Llama-shaped model, and how threads share it. Does not know: Python, rounds, sampling.
//
// All threads walk through the same program and meet after each matrix. Between two barriers the work is taken piece by
// piece. What follows a matrix (rotation, SwiGLU, the residual sum, rounding) is done by whoever has its piece, while it
// is in the registers. A token's numbers are the same whoever computes them and whatever else is in the batch.
#include "decoder.h"

#include <new>
#include <optional>

namespace hs {

void norm_token(const float* x, const float* weight, float eps, int width, const Inputs& to, int token) {
    const vf scale = unit_scale(x, eps, width);
    if (to.by_256) {
        for (int i = 0; i < width; i += 8 * GROUP) {
            alignas(64) float room[8 * GROUP];
            float* normed = to.exact ? to.exact + (size_t)token * to.width + i : room;
            for (int k = 0; k < 8 * GROUP; k += LANES) store(normed + k, load(x + i + k) * scale * load(weight + i + k));
            round_block(to, token, i / (8 * GROUP), normed);
        }
        return;
    }
    for (int g = 0; g < width / GROUP; g++) {
        const float *p = x + g * GROUP, *w = weight + g * GROUP;
        round_group(to, token, g, load(p) * scale * load(w), load(p + LANES) * scale * load(w + LANES));
    }
}

namespace {

struct Forward {
    const Model& m;
    const Call& c;
    Room& room;
    Pool& pool;
    int tokens;
    float *x, *queries;
    Inputs normed, attended, gated, last;

    float* stream(int token) const { return x + (size_t)token * m.hidden; }

    // The normed and rounded inputs of all tokens.
    Inputs norm(const float* weight, const Inputs& to, int thread, Share& share) const {
        return prepare(pool, tokens, m.hidden, to, room.own[thread].normed, share,
                       [&](const Inputs& to, int t) { norm_token(stream(t), weight, m.eps, m.hidden, to, t); });
    }

    int qkv_heads() const { return m.heads + 2 * m.kv_heads; }

    // The matrix that has a head of queries, keys or values, and the head's number in it.
    const Matrix& where(const Layer& layer, int& head) const {
        if (layer.v.data && head >= m.heads + m.kv_heads) return head -= m.heads + m.kv_heads, layer.v;
        if (layer.k.data && head >= m.heads) return head -= m.heads, layer.k;
        return layer.qkv;
    }

    void qkv(const Layer& layer, int head, const Inputs& in) const {
        int own = head;
        const Matrix& from = where(layer, own);
        head_product(from, own, m.head_dim, in, tokens, [&](int token, const vf* found, int stride) {
            float* query = queries + (size_t)token * m.heads * m.head_dim;
            const Way to{layer.q_norm, layer.k_norm, query, layer.keys, layer.values, m.float_keys != 0};
            place_head(m, head, room.places[token], to, found, stride);
        });
    }

    void attention(const Layer& layer, int thread, Share& share) const {
        const int group = m.heads / m.kv_heads, spans = (int)room.spans.size();
        const Inputs to = read_by(attended, {&layer.out});
        // Heads that share keys go together, or one by one where threads would go without work. A single token's share
        // more when they go together.
        const int sets_of_heads = spans * m.kv_heads, least = spans == tokens ? 1 : 4;
        const bool few = sets_of_heads < least * pool.size() && sets_of_heads % pool.size();
        const int each = few ? 1 : group, sets = m.heads / each;
        const auto place = [&](int item) {  // of the item's keys
            const size_t row = (size_t)room.pieces[room.spans[item / sets].piece].row;
            return row * m.row_stride + (size_t)(item % sets * each / group) * m.head_stride;
        };
        const auto next_keys = [&](int item) -> const void* {  // as far as threads take turns
            const int next = item + pool.size();
            return next < spans * sets ? (const char*)layer.keys + place(next) * (m.float_keys ? 4 : 2) : nullptr;
        };
        for (int item; (item = share.take()) < spans * sets;) {
            const Span& span = room.spans[item / sets];
            const Piece& piece = room.pieces[span.piece];
            const int head = item % sets * each;
            const size_t at = place(item);
            const size_t token = (size_t)piece.first;
            const Sight sight{layer.keys,
                              layer.values,
                              at,
                              piece.length,
                              span.first,
                              span.last,
                              c.ancestors ? c.ancestors + token * c.width : nullptr,
                              piece.width,
                              (int)layer.window,
                              next_keys(item)};
            attend(m, sight, head, each, queries + token * m.heads * m.head_dim, to.from(piece.first),
                   room.own[thread]);
            if (to.by_256) round_heads(to.from(piece.first), item / sets, head, each);
        }
    }

    // Round what is there in full, of a span's tokens and some heads.
    void round_heads(const Inputs& to, int span, int head, int heads) const {
        const int first = head * m.head_dim / GROUP, last = (head + heads) * m.head_dim / GROUP;
        for (int b = first / 8; 8 * b < last; b++) {
            const int parts = (last < 8 * b + 8 ? last : 8 * b + 8) - (first > 8 * b ? first : 8 * b);
            if (room.ready.add((size_t)span * (to.width / (8 * GROUP)) + b, parts, 8))
                for (int t = room.spans[span].first; t < room.spans[span].last; t++) round_kept(to, t, b);
        }
    }

    void feed_forward(const Layer& layer, const Inputs& in, const Turn& turn) const {
        const Matrix* up = layer.up.data ? &layer.up : nullptr;
        const Inputs to = read_by(gated, {&layer.down});
        const int items = m.ffn / GROUP;
        for (int i; (i = turn.take(items)) < items;) {
            swiglu(layer.gate_up, up, i, in, tokens, to);
            if (to.by_256 && room.ready.add(i / 8, 1, 8))
                for (int t = 0; t < tokens; t++) round_kept(to, t, i / 8);
        }
    }

    // Tiles of a piece: many, where every thread still gets several pieces.
    int wide(const Matrix& matrix) const { return matrix.tiles() >= 8 * MOST_TILES * pool.size() ? MOST_TILES : 2; }

    // x += product: the residual stream.
    void add(const Matrix& matrix, const Inputs& in, const Turn& turn) const {
        shared_product(matrix, in, tokens, wide(matrix), turn, [&](int tile, int token, vf v) {
            float* to = stream(token) + tile * LANES;
            store(to, load(to) + v);
        });
    }

    void keep_features(int layer) const {
        for (int i = 0; i < c.watched; i++) {
            if (c.watch[i] != layer) continue;
            for (int t = 0; t < tokens; t++) {
                const size_t slot = (size_t)room.places[t].row * m.capacity + room.places[t].slot;
                memcpy(c.features + (slot * c.watched + i) * m.hidden, stream(t), sizeof(float) * m.hidden);
            }
        }
    }

    void logits(Share& preparing, const Turn& turn) const {
        if (!c.keep) return;
        const int kept = c.keep < 0 ? tokens : c.rows * c.keep;
        for (int i; (i = preparing.take()) < kept;) {
            int token = i;
            if (c.keep > 0) {
                const Piece& piece = room.pieces[i / c.keep];
                token = piece.first + piece.width - c.keep + i % c.keep;
            }
            norm_token(stream(token), m.norm, m.eps, m.hidden, read_by(last, {&m.head}), i);
        }
        pool.meet();
        shared_product(m.head, last, kept, MOST_TILES, turn, [&](int tile, int i, vf v) {
            store_tile(c.logits + (size_t)i * m.vocab, m.vocab, tile, v);
        });
    }

    // Ask for the first weights that a thread will read in a later phase, while it waits for the others.
    void ask_for(const Matrix& matrix, int tile) const {
        if (!matrix.data || tile >= matrix.tiles()) return;
        const int tiles = matrix.tiles() - tile < MOST_TILES ? matrix.tiles() - tile : MOST_TILES;
        const size_t most = tiles * matrix.tile_bytes(), each = ZEN5 ? MOST_TILES * AHEAD : AHEAD;
        for (int i = 0; i < (ZEN5 ? 1 : tiles); i++)  // Zen 5 reads them as one stream
            for (size_t line = 0; line < each && line < most; line += 64) __builtin_prefetch(matrix.tile(tile + i) + line);
    }
    void ask_for_layer(int l, const Turn& turn) const {
        if (l == m.layers) return ask_for(m.head, turn.first((m.head.tiles() + MOST_TILES - 1) / MOST_TILES) * MOST_TILES);
        int head = turn.first(qkv_heads());
        const Matrix& from = where(m.layer[l], head);
        ask_for(from, head * m.head_dim / LANES);
    }

    void run(int thread) const {
        Share* share = room.shares.data();
        const auto turn = [&] { return Turn{room.runs, thread, (int)(share - room.shares.data())}; };
        const auto tile = [&](const Matrix& matrix) {
            const int each = wide(matrix);
            return turn().first((matrix.tiles() + each - 1) / each) * each;
        };
        room.runs.reset(thread);
        for (int t; (t = share->take()) < tokens;) unpack_row(m.embedding, (int)c.tokens[t], stream(t));
        ask_for_layer(0, turn());
        pool.meet();
        for (int l = 0; l < m.layers; l++) {
            const Layer& layer = m.layer[l];
            const int items = m.ffn / GROUP;
            Inputs in = norm(layer.input_norm, read_by(normed, {&layer.qkv, &layer.k, &layer.v}), thread, *++share);
            share++;
            for (int h; (h = turn().take(qkv_heads())) < qkv_heads();) qkv(layer, h, in);
            pool.meet();
            ask_for(layer.out, tile(layer.out));
            attention(layer, thread, *++share);
            pool.meet();
            share++;
            add(layer.out, attended, turn());
            ask_for(layer.gate_up, turn().first(items) * (layer.up.data ? 2 : 4));
            pool.meet();
            in = norm(layer.post_norm, read_by(normed, {&layer.gate_up, &layer.up}), thread, *++share);
            share++;
            feed_forward(layer, in, turn());
            ask_for(layer.down, tile(layer.down));
            pool.meet();
            share++;
            add(layer.down, gated, turn());
            ask_for_layer(l + 1, turn());
            pool.meet();
            if (thread == 0) keep_features(l);  // x changes again only after two more barriers
        }
        share += 2;
        logits(share[-1], turn());
    }
};

}  // namespace

struct Handle {
    Model model;
    std::vector<Layer> layers;
    Room room;
    bool exact = false;  // some layer has weights that are not rounded
    bool wide = false;   // some layer reads inputs that were rounded by 256, for which they are kept until all are there
};

}  // namespace hs

using namespace hs;

HS_API void* hs_pool_new(int threads) { return new Pool(threads); }
HS_API int hs_pool_size(void* pool) { return ((Pool*)pool)->size(); }  // fewer than asked for if the system had no more

HS_API void* hs_model_new(const Model* model) {
    Handle* h = new Handle{*model, std::vector<Layer>(model->layer, model->layer + model->layers), {}, false, false};
    h->model.layer = h->layers.data();
    for (const Layer& l : h->layers)
        for (const Matrix* matrix : {&l.qkv, &l.k, &l.v, &l.out, &l.gate_up, &l.up, &l.down})
            if (matrix->data) h->exact |= is_exact(matrix->kind), h->wide |= by_256(matrix->kind);
    return h;
}
HS_API void hs_model_free(void* handle) { delete (Handle*)handle; }

// Where the call's tokens belong; how many they are.
static int lay_out(const Call& c, Room& room) {
    room.pieces.clear();
    room.places.clear();
    room.spans.clear();
    int tokens = 0;
    for (int i = 0; i < c.rows; i++) {
        const int row = c.slab_rows ? c.slab_rows[i] : c.first_row + i, length = c.lengths[i];
        const int width = c.widths ? c.widths[i] : c.width;
        room.pieces.push_back({row, length, tokens, width});
        for (int n = 0; n < width; n += MOST_SPAN)
            room.spans.push_back({i, n, n + MOST_SPAN < width ? n + MOST_SPAN : width});
        for (int n = 0; n < width; n++, tokens++) {
            room.places.push_back({row, length + n, length + (c.depths ? c.depths[tokens] : n)});
        }
    }
    return tokens;
}

// All that a call needs, with its memory: threads that run must not ask for much, since they cannot fail.
static Forward prepared(Handle& h, const Call& c, Pool& pool, int tokens) {
    const Model& m = h.model;
    Room& room = h.room;
    const size_t phases = 8 * (size_t)m.layers + 4, most = (size_t)MOST_SPAN * (m.heads / m.kv_heads);
    if ((int)room.own.size() < pool.size()) room.own.resize(pool.size());
    for (Own& own : room.own) {
        own.normed.need(tokens < FEW ? tokens : FEW, m.hidden, h.exact);
        own.scores.need(most * (m.capacity + LANES + m.head_dim));
    }
    if (room.shares.size() < phases) room.shares = std::vector<Share>(phases);
    for (Share& share : room.shares) share.reset();
    room.runs.need(pool.size(), (int)phases);
    room.ready.need(room.spans.size() * (m.heads * m.head_dim / (8 * GROUP)) + m.ffn / (8 * GROUP));
    const int kept = c.keep < 0 ? tokens : c.rows * c.keep;
    return {m,
            c,
            room,
            pool,
            tokens,
            room.x.need((size_t)tokens * m.hidden),
            room.queries.need((size_t)tokens * m.heads * m.head_dim),
            room.normed.need(tokens, m.hidden, h.exact),
            room.attended.need(tokens, m.heads * m.head_dim, h.exact || h.wide),
            room.gated.need(tokens, m.ffn, h.exact || h.wide),
            room.last.need(kept ? kept : 1, m.hidden, is_exact(m.head.kind))};
}

// 0; 1 if a token id is not in the vocabulary, 2 if there is no memory for so many tokens (then nothing was done).
HS_API int hs_forward(void* handle, void* pool_, const Call* call) {
    Handle& h = *(Handle*)handle;
    Pool& pool = *(Pool*)pool_;
    std::optional<Forward> forward;
    try {
        const int tokens = lay_out(*call, h.room);
        for (int t = 0; t < tokens; t++)
            if (call->tokens[t] < 0 || call->tokens[t] >= h.model.vocab) return 1;
        forward.emplace(prepared(h, *call, pool, tokens));
    } catch (const std::bad_alloc&) {
        return 2;
    }
    pool.run([](void* f, int thread) { ((const Forward*)f)->run(thread); }, &*forward);
    return 0;
}

struct ProductCall {
    const Matrix* m;
    Inputs in;
    const float* x;
    float* y;
    int tokens;
    Share rounding;
    Runs* runs;
    Pool* pool;
};

// y [tokens, outputs] = x [tokens, inputs] times the matrix: for tests, probes and anything that is not a whole model.
HS_API void hs_product(void* pool, const Matrix* m, const float* x, int tokens, float* y) {
    static thread_local Rounded rounded;
    static thread_local Runs runs;
    runs.need(((Pool*)pool)->size(), 1);
    ProductCall call{m, rounded.need(tokens, m->inputs, is_exact(m->kind), by_256(m->kind)), x, y, tokens, {}, &runs, (Pool*)pool};
    call.in = read_by(call.in, {m});
    call.pool->run(
        [](void* argument, int thread) {
            ProductCall& p = *(ProductCall*)argument;
            const Matrix& m = *p.m;
            for (int t; (t = p.rounding.take()) < p.tokens;) {
                const float* x = p.x + (size_t)t * m.inputs;
                if (p.in.by_256)
                    for (int b = 0; b < m.blocks(); b++) round_block(p.in, t, b, x + 8 * GROUP * b);
                else
                    for (int g = 0; g < m.inputs / GROUP; g++, x += GROUP) round_group(p.in, t, g, load(x), load(x + LANES));
            }
            p.runs->reset(thread);
            p.pool->meet();
            shared_product(m, p.in, p.tokens, MOST_TILES, Turn{*p.runs, thread, 0}, [&](int tile, int t, vf v) {
                store(p.y + (size_t)t * m.outputs + tile * LANES, v);
            });
        },
        &call);
}

// Read memory from end to end, each thread a part of it: what any product with weights of so many bytes takes at least.
HS_API void hs_read(void* pool, const uint8_t* data, int64_t bytes) {
    struct Reading {
        const uint8_t* data;
        int64_t each;
    } reading{data, bytes / ((Pool*)pool)->size() / 256 * 256};
    ((Pool*)pool)->run(
        [](void* argument, int thread) {
            const Reading& r = *(const Reading*)argument;
            const int64_t apart = r.each / 4;  // four streams, which a core reads faster than one
            const uint8_t* p = r.data + r.each * thread;
            vi s = splat_int(0);
            for (int64_t i = 0; i < apart; i += 64)
                for (int stream = 0; stream < 4; stream++) {
                    __builtin_prefetch(p + apart * stream + i + AHEAD);
                    s |= (vi)load((const float*)(p + apart * stream + i));
                }
            static std::atomic<int32_t> seen;
            seen.store(sum(s), std::memory_order_relaxed);  // so that nothing is left out
        },
        &reading);
}

// Products of 8-bit numbers in registers, on all threads: how many in all, or 0 where that is not measured. What any
// product can do at the most.
HS_API int64_t hs_multiply(void* pool, int64_t rounds) {
    struct Multiplying {
        int64_t rounds;
        std::atomic<int64_t> done{0};
        std::atomic<int32_t> seen{0};
    } call;
    call.rounds = rounds;
    ((Pool*)pool)->run(
        [](void* argument, int thread) {
            Multiplying& m = *(Multiplying*)argument;
            int32_t seen = thread;
            m.done += most_products(m.rounds, &seen);
            m.seen += seen;
        },
        &call);
    return call.done;
}
