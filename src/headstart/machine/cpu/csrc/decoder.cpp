// A whole decoder, from token ids to logits, in one call.
//
// Knows: the order of things in a Llama-shaped model, and how threads share it. Does not know: Python, rounds, sampling.
//
// All threads walk through the same program and meet after each matrix. Between two barriers the work is taken piece by
// piece. What follows a matrix (rotation, SwiGLU, the residual sum, rounding) is done by whoever has its piece, while it
// is in the registers. A token's numbers are the same whoever computes them and whatever else is in the batch.
#include "decoder.h"

#include <cmath>

namespace hs {

constexpr int FEW = 16;  // up to so many tokens every thread prepares its own inputs, which saves a barrier

void norm_token(const float* x, const float* weight, float eps, int width, const Inputs& to, int token) {
    vf squares = splat(0.0f);
    for (int i = 0; i < width; i += LANES) squares = fma(load(x + i), load(x + i), squares);
    const vf scale = splat(1.0f / std::sqrt(sum(squares) / (float)width + eps));
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

    void embed(int token) const {
        const Matrix& e = m.embedding;
        const int id = (int)c.tokens[token], lane = id % LANES;
        float* to = x + (size_t)token * m.hidden;
        for (int b = 0; b < e.blocks(); b++) {
            const uint8_t* block = e.tile(id / LANES) + block_bytes(e.kind) * b;
            if (e.kind == FLOAT) {
                for (int k = 0; k < GROUP; k++) *to++ = ((const float*)block)[k * LANES + lane];
                continue;
            }
            const float scale = half_to_float(((const uint16_t*)(block + 512))[lane]);
            for (int k = 0; k < GROUP; k++) *to++ = scale * (float)((int)block[64 * (k / 4) + 4 * lane + k % 4] - 128);
        }
    }

    // The normed and rounded inputs of all tokens; see FEW.
    Inputs norm(const float* weight, int thread, Share& share) const {
        if (tokens <= FEW) {
            const Inputs to = room.own[thread].normed.need(FEW, m.hidden);
            for (int t = 0; t < tokens; t++) norm_token(x + (size_t)t * m.hidden, weight, m.eps, m.hidden, to, t);
            return to;
        }
        for (int t; (t = share.take()) < tokens;)
            norm_token(x + (size_t)t * m.hidden, weight, m.eps, m.hidden, normed, t);
        pool.meet();
        return normed;
    }

    // One head of queries, keys or values: product, norm, rotation, and to where it belongs.
    void qkv(const Layer& layer, int head, const Inputs& in) const {
        const int tiles = m.head_dim / LANES;
        vf found[16 * MOST_TOKENS];
        for (int t = 0; t < tokens; t += MOST_TOKENS) {
            const int n = tokens - t < MOST_TOKENS ? tokens - t : MOST_TOKENS;
            for (int i = 0; i < tiles; i += MOST_TILES)
                tiles_product(layer.qkv, head * tiles + i, tiles - i < MOST_TILES ? tiles - i : MOST_TILES,
                              in.from(t), n, found + i * n);
            for (int j = 0; j < n; j++) place(layer, head, t + j, found + j, n);
        }
    }

    __attribute__((noinline)) void place(const Layer& layer, int head, int token, const vf* found, int stride) const {
        const int dim = m.head_dim, tiles = dim / LANES, half = tiles / 2;
        const Place& at = room.places[token];
        vf v[16];
        for (int i = 0; i < tiles; i++) v[i] = found[i * stride];
        const bool query = head < m.heads, key = !query && head < m.heads + m.kv_heads;
        const float* weight = query ? layer.q_norm : key ? layer.k_norm : nullptr;
        if (weight) {
            vf squares = splat(0.0f);
            for (int i = 0; i < tiles; i++) squares = fma(v[i], v[i], squares);
            const vf scale = splat(1.0f / std::sqrt(sum(squares) / (float)dim + m.eps));
            for (int i = 0; i < tiles; i++) v[i] = v[i] * scale * load(weight + i * LANES);
        }
        if (query || key) {
            const size_t turn = (size_t)at.position * (dim / 2);
            for (int i = 0; i < half; i++) {
                const vf c = load(m.cosines + turn + i * LANES), s = load(m.sines + turn + i * LANES);
                const vf a = v[i], b = v[i + half];
                v[i] = a * c - b * s;
                v[i + half] = b * c + a * s;
            }
        }
        if (query) {
            const vf scale = splat(1.0f / std::sqrt((float)dim));
            float* to = queries + ((size_t)token * m.heads + head) * dim;
            for (int i = 0; i < tiles; i++) store(to + i * LANES, v[i] * scale);
            return;
        }
        const int own = key ? head - m.heads : head - m.heads - m.kv_heads;
        uint16_t* to = (key ? layer.keys : layer.values) + (size_t)at.row * m.row_stride +
                       (size_t)own * m.head_stride + (size_t)at.slot * dim;
        for (int i = 0; i < tiles; i++) store_half(to + i * LANES, v[i]);
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
        vf found[MOST_TILES * MOST_TOKENS];
        for (int item; (item = share.take() * wide) < tiles;) {
            const int count = tiles - item < wide ? tiles - item : wide;
            for (int t = 0; t < tokens; t += MOST_TOKENS) {
                const int n = tokens - t < MOST_TOKENS ? tokens - t : MOST_TOKENS;
                tiles_product(matrix, item, count, in.from(t), n, found);
                for (int i = 0; i < count; i++)
                    for (int j = 0; j < n; j++) {
                        float* to = x + (size_t)(t + j) * m.hidden + (item + i) * LANES;
                        store(to, load(to) + found[i * n + j]);
                    }
            }
        }
    }

    // 32 numbers of silu(gate) * up.
    void swiglu(const Layer& layer, int item, const Inputs& in) const {
        vf found[4 * MOST_TOKENS];
        for (int t = 0; t < tokens; t += MOST_TOKENS) {
            const int n = tokens - t < MOST_TOKENS ? tokens - t : MOST_TOKENS;
            tiles_product(layer.gate_up, item * 4, 4, in.from(t), n, found);
            for (int j = 0; j < n; j++)
                round_group(gated, t + j, item, silu(found[j]) * found[2 * n + j], silu(found[n + j]) * found[3 * n + j]);
        }
    }

    void keep_features(int layer) const {
        for (int i = 0; i < c.watched; i++) {
            if (c.watch[i] != layer) continue;
            for (int t = 0; t < tokens; t++) {
                const size_t slot = (size_t)room.places[t].row * m.capacity + room.places[t].slot;
                memcpy(c.features + (slot * c.watched + i) * m.hidden, x + (size_t)t * m.hidden,
                       sizeof(float) * m.hidden);
            }
        }
    }

    void logits(int thread, Share& preparing, Share& share) const {
        if (!c.keep) return;
        const int kept = c.rows * c.keep;
        for (int i; (i = preparing.take()) < kept;) {
            const Piece& piece = room.pieces[i / c.keep];
            const int token = piece.first + piece.width - c.keep + i % c.keep;
            norm_token(x + (size_t)token * m.hidden, m.norm, m.eps, m.hidden, last, i);
        }
        pool.meet();
        const int tiles = m.head.tiles();
        vf found[MOST_TILES * MOST_TOKENS];
        for (int item; (item = share.take() * MOST_TILES) < tiles;) {
            const int count = tiles - item < MOST_TILES ? tiles - item : MOST_TILES;
            for (int t = 0; t < kept; t += MOST_TOKENS) {
                const int n = kept - t < MOST_TOKENS ? kept - t : MOST_TOKENS;
                tiles_product(m.head, item, count, last.from(t), n, found);
                for (int i = 0; i < count; i++)
                    for (int j = 0; j < n; j++) {
                        const int at = (item + i) * LANES, some = m.vocab - at;
                        float* to = c.logits + (size_t)(t + j) * m.vocab + at;
                        if (some >= LANES)
                            store(to, found[i * n + j]);
                        else
                            memcpy(to, &found[i * n + j], sizeof(float) * some);
                    }
            }
        }
    }

    void run(int thread) const {
        Share* share = room.shares.data();
        for (int t; (t = share->take()) < tokens;) embed(t);
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
            share++;
            for (int i; (i = share->take()) < m.ffn / GROUP;) swiglu(layer, i, in);
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
HS_API void hs_pool_free(void* pool) { delete (Pool*)pool; }

HS_API void* hs_model_new(const Model* model) {
    Handle* h = new Handle{*model, std::vector<Layer>(model->layer, model->layer + model->layers), {}};
    h->model.layer = h->layers.data();
    return h;
}
HS_API void hs_model_free(void* handle) { delete (Handle*)handle; }

// Where the call's tokens belong; how many they are.
static int lay_out(const Model& m, const Call& c, Room& room) {
    room.pieces.clear();
    room.places.clear();
    room.spans.clear();
    int tokens = 0;
    for (int i = 0; i < c.rows; i++) {
        const int row = c.slab_rows ? c.slab_rows[i] : c.first_row + i, length = c.lengths[i];
        const int width = c.widths ? c.widths[i] : c.width;
        room.pieces.push_back({row, length, tokens, width});
        for (int n = 0; n < width; n += MOST_TOKENS)
            room.spans.push_back({i, n, n + MOST_TOKENS < width ? n + MOST_TOKENS : width});
        for (int n = 0; n < width; n++, tokens++) {
            const int position = length + (c.depths ? c.depths[tokens] : n);
            room.places.push_back({row, length + n, position < m.positions ? position : m.positions - 1});
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
    const int tokens = lay_out(m, *call, room), kept = call->rows * call->keep;
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
                for (int g = 0; g < m.blocks(); g++) {
                    const float* x = p.x + (size_t)t * m.inputs + g * GROUP;
                    round_group(p.in, t, g, load(x), load(x + LANES));
                }
            p.pool->meet();
            vf found[MOST_TILES * MOST_TOKENS];
            for (int first; (first = p.share.take() * MOST_TILES) < m.tiles();) {
                const int count = m.tiles() - first < MOST_TILES ? m.tiles() - first : MOST_TILES;
                for (int t = 0; t < p.tokens; t += MOST_TOKENS) {
                    const int n = p.tokens - t < MOST_TOKENS ? p.tokens - t : MOST_TOKENS;
                    tiles_product(m, first, count, p.in.from(t), n, found);
                    for (int i = 0; i < count; i++)
                        for (int j = 0; j < n; j++)
                            store(p.y + (size_t)(t + j) * m.outputs + (first + i) * LANES, found[i * n + j]);
                }
            }
        },
        &call);
}
