// A whole decoder, from token ids to logits, in one call.
//
// Knows: the order of things in a Llama-shaped model, and how threads share it. Does not know: Python, rounds, sampling.
//
// All threads walk through the same program and meet after each matrix. Between two barriers the work is taken piece by
// piece. What follows a matrix (rotation, SwiGLU, the residual sum, rounding) is done by whoever has its piece, while it
// is in the registers. A token's numbers are the same whoever computes them and whatever else is in the batch.
#include "decoder.h"

namespace hs {

void norm_token(const float* x, const float* weight, float eps, int width, const Inputs& to, int token) {
    const vf scale = unit_scale(x, eps, width);
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
    Inputs norm(const float* weight, int thread, Share& share) const {
        return prepare(pool, tokens, m.hidden, normed, room.own[thread].normed, share,
                       [&](const Inputs& to, int t) { norm_token(stream(t), weight, m.eps, m.hidden, to, t); });
    }

    void qkv(const Layer& layer, int head, const Inputs& in) const {
        const Matrix* from = &layer.qkv;
        int own = head;  // the head's number in the matrix
        if (layer.k.data && head >= m.heads) from = &layer.k, own = head - m.heads;
        if (layer.v.data && head >= m.heads + m.kv_heads) from = &layer.v, own = head - m.heads - m.kv_heads;
        head_product(*from, own, m.head_dim, in, tokens, [&](int token, const vf* found, int stride) {
            float* query = queries + (size_t)token * m.heads * m.head_dim;
            const Way to{layer.q_norm, layer.k_norm, query, layer.keys, layer.values};
            place_head(m, head, room.places[token], to, found, stride);
        });
    }

    void attention(const Layer& layer, int thread, Share& share) const {
        const int group = m.heads / m.kv_heads, spans = (int)room.spans.size();
        const int few = spans * m.kv_heads < 4 * pool.size();  // then heads go one by one
        const int each = few ? 1 : group, sets = m.heads / each;
        for (int item; (item = share.take()) < spans * sets;) {
            const Span& span = room.spans[item / sets];
            const Piece& piece = room.pieces[span.piece];
            const int head = item % sets * each;
            const size_t at = (size_t)piece.row * m.row_stride + (size_t)(head / group) * m.head_stride;
            const size_t token = (size_t)piece.first;
            const Sight sight{layer.keys + at,
                              layer.values + at,
                              piece.length,
                              span.first,
                              span.last,
                              c.ancestors ? c.ancestors + token * c.width : nullptr,
                              piece.width,
                              (int)layer.window};
            attend(m, sight, head, each, queries + token * m.heads * m.head_dim, attended.from(piece.first),
                   room.own[thread]);
        }
    }

    // x += product: the residual stream.
    void add(const Matrix& matrix, const Inputs& in, Share& share) const {
        const int tiles = matrix.tiles(), wide = tiles % 4 == 0 && tiles / 4 % pool.size() == 0 ? 4 : 2;
        shared_product(matrix, in, tokens, wide, share, [&](int tile, int token, vf v) {
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

    void logits(int thread, Share& preparing, Share& share) const {
        if (!c.keep) return;
        const int kept = c.rows * c.keep;
        for (int i; (i = preparing.take()) < kept;) {
            const Piece& piece = room.pieces[i / c.keep];
            const int token = piece.first + piece.width - c.keep + i % c.keep;
            norm_token(stream(token), m.norm, m.eps, m.hidden, last, i);
        }
        pool.meet();
        shared_product(m.head, last, kept, MOST_TILES, share, [&](int tile, int i, vf v) {
            store_tile(c.logits + (size_t)i * m.vocab, m.vocab, tile, v);
        });
    }

    void run(int thread) const {
        Share* share = room.shares.data();
        for (int t; (t = share->take()) < tokens;) unpack_row(m.embedding, (int)c.tokens[t], stream(t));
        pool.meet();
        for (int l = 0; l < m.layers; l++) {
            const Layer& layer = m.layer[l];
            Inputs in = norm(layer.input_norm, thread, *++share);
            const int heads = m.heads + 2 * m.kv_heads;
            share++;
            for (int h; (h = share->take()) < heads;) qkv(layer, h, in);
            pool.meet();
            attention(layer, thread, *++share);
            pool.meet();
            add(layer.out, attended, *++share);
            pool.meet();
            in = norm(layer.post_norm, thread, *++share);
            const Matrix* up = layer.up.data ? &layer.up : nullptr;
            share++;
            for (int i; (i = share->take()) < m.ffn / GROUP;) swiglu(layer.gate_up, up, i, in, tokens, gated);
            pool.meet();
            add(layer.down, gated, *++share);
            pool.meet();
            if (thread == 0) keep_features(l);  // x changes again only after two more barriers
        }
        logits(thread, share[1], share[2]);
    }
};

}  // namespace

struct Handle {
    Model model;
    std::vector<Layer> layers;
    Room room;
};

}  // namespace hs

using namespace hs;

HS_API void* hs_pool_new(int threads) { return new Pool(threads); }

HS_API void* hs_model_new(const Model* model) {
    Handle* h = new Handle{*model, std::vector<Layer>(model->layer, model->layer + model->layers), {}};
    h->model.layer = h->layers.data();
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

// 0, or 1 if a token id is not in the vocabulary (then nothing was done).
HS_API int hs_forward(void* handle, void* pool_, const Call* call) {
    Handle& h = *(Handle*)handle;
    Pool& pool = *(Pool*)pool_;
    const Model& m = h.model;
    Room& room = h.room;
    const int tokens = lay_out(*call, room), kept = call->rows * call->keep;
    for (int t = 0; t < tokens; t++)
        if (call->tokens[t] < 0 || call->tokens[t] >= m.vocab) return 1;
    if ((int)room.own.size() < pool.size()) room.own.resize(pool.size());
    const size_t phases = 8 * (size_t)m.layers + 4;
    if (room.shares.size() < phases) room.shares = std::vector<Share>(phases);
    for (Share& share : room.shares) share.reset();
    Forward forward{m,
                    *call,
                    room,
                    pool,
                    tokens,
                    room.x.need((size_t)tokens * m.hidden),
                    room.queries.need((size_t)tokens * m.heads * m.head_dim),
                    room.normed.need(tokens, m.hidden),
                    room.attended.need(tokens, m.heads * m.head_dim),
                    room.gated.need(tokens, m.ffn),
                    room.last.need(kept ? kept : 1, m.hidden)};
    pool.run([](void* f, int thread) { ((const Forward*)f)->run(thread); }, &forward);
    return 0;
}

struct ProductCall {
    const Matrix* m;
    Inputs in;
    const float* x;
    float* y;
    int tokens;
    Share rounding, share;
    Pool* pool;
};

// y [tokens, outputs] = x [tokens, inputs] times the matrix: for tests, probes and anything that is not a whole model.
HS_API void hs_product(void* pool, const Matrix* m, const float* x, int tokens, float* y) {
    static thread_local Rounded rounded;
    ProductCall call{m, rounded.need(tokens, m->inputs), x, y, tokens, {}, {}, (Pool*)pool};
    call.pool->run(
        [](void* argument, int) {
            ProductCall& p = *(ProductCall*)argument;
            const Matrix& m = *p.m;
            for (int t; (t = p.rounding.take()) < p.tokens;)
                for (int g = 0; g < m.inputs / GROUP; g++) {
                    const float* x = p.x + (size_t)t * m.inputs + g * GROUP;
                    round_group(p.in, t, g, load(x), load(x + LANES));
                }
            p.pool->meet();
            shared_product(m, p.in, p.tokens, MOST_TILES, p.share, [&](int tile, int t, vf v) {
                store(p.y + (size_t)t * m.outputs + tile * LANES, v);
            });
        },
        &call);
}
