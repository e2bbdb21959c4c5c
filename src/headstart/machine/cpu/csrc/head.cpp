// A draft head (see machine/head.py): from the target's hidden states to a whole drafted chain, in one call.
//
// Knows: the order of things in the head, how threads share it, and when a chain is not worth another token.
// Does not know: Python, rounds, how a token is drawn (draft_token.cpp).
//
// A call first reads the slots that the committed text has more than the head's cache, with the target's true features,
// and then goes on from the last of them on its own output. Numbers are the same whatever else is in the batch.
#include "head.h"

namespace hs {

namespace {

struct Steps {
    const Head& h;
    const HeadCall& c;
    Model shape;  // for ``attend``
    Pool& pool;
    Room& room;
    Share* share;       // one for each phase
    size_t shares;
    int slots;          // sum of counts
    int* row_of;        // [slots] whose slot it is
    int* at;            // [slots] which slot of its row
    int* last;          // [rows] number of the row's last slot
    float *g, *x, *queries, *reached;
    int32_t *now;       // [rows] where the next slot goes
    int64_t* fed;       // [rows] the tokens that go in next
    int32_t* stop;      // 1: all chains ended
    Inputs features, words, normed, attended, gated, ready;

    template <typename Make>
    Inputs prepare(int n, int width, const Inputs& common, Rounded& own, Share& turn, Make make) const {
        return hs::prepare(pool, n, width, common, own, turn, make);
    }

    template <typename Done>
    void product(const Matrix& m, const Inputs& in, int n, Share& turn, Done done) const {
        shared_product(m, in, n, m.tiles() >= 8 * MOST_TILES ? MOST_TILES : 2, turn, done);
    }

    void norm(const float* from, int width, const Inputs& to, int row) const {
        norm_token(from, h.ones, h.eps, width, to, row);
    }

    void norm_features(const Inputs& to, int slot) const {
        const float* const* first = c.features;
        const int row = row_of[slot], back = at[slot] - c.starts[row];
        // Slot j is made of token j-1's features; ``first`` points at those of slot starts[row] (or starts[row] + 1, if
        // that slot is the text's first and has none).
        const bool none = at[slot] == 0;
        const float* from = none ? nullptr : first[row] + (size_t)(back - (c.starts[row] == 0)) * h.parts * h.target_hidden;
        const Inputs line = to.from(slot);
        const int groups = h.target_hidden / GROUP;
        for (int p = 0; p < h.parts; p++) {
            const Inputs part = line.part(p * h.target_hidden, h.target_hidden);
            if (none)
                for (int i = 0; i < groups; i++) round_group(part, 0, i, splat(0.0f), splat(0.0f));
            else
                norm(from + (size_t)p * h.target_hidden, h.target_hidden, part, 0);
        }
    }

    void norm_word(int64_t token, const Inputs& to, int row, Own& own) const {
        const int id = token < 0 || token >= h.tokens ? 0 : (int)token;
        if (h.plain_embedding) return norm(h.plain_embedding + (size_t)id * h.target_hidden, h.target_hidden, to, row);
        float* line = own.keys.need(h.target_hidden);
        unpack_row(h.embedding, id, line);
        norm(line, h.target_hidden, to, row);
    }

    void unit(float* from, int width) const {  // the norm, in place
        const vf scale = unit_scale(from, h.eps, width);
        for (int i = 0; i < width; i += LANES) store(from + i, load(from + i) * scale);
    }

    // Queries, keys and values of n rows of x; ``whose`` and ``slot``: [n].
    void queries_keys_values(const Inputs& in, int n, const int* whose, const int* slot, bool queries_too, Share& turn) const {
        const int from = queries_too ? 0 : h.heads, all = h.heads + 2 * h.kv_heads;
        for (int head; (head = turn.take() + from) < all;)
            head_product(h.qkv, head, h.head_dim, in, n, [&](int i, const vf* found, int stride) {
                const Way to{nullptr, nullptr, queries + (size_t)i * h.heads * h.head_dim, h.keys, h.values, false};
                place_head(h, head, {c.first_row + whose[i], slot[i], slot[i]}, to, found, stride);
            });
    }

    // x of the slots that the text has more, and their keys and values. Returns the phases it used.
    Share* read(int thread, Share* turn) const {
        Own& own = room.own[thread];
        Inputs in = prepare(slots, h.parts * h.target_hidden, features, own.normed, *turn,
                            [&](const Inputs& to, int t) { norm_features(to, t); });
        product(h.fuse, in, slots, *++turn, [&](int tile, int t, vf v) { store(g + (size_t)t * h.width + tile * LANES, v); });
        pool.meet();
        turn++;
        for (int t; (t = turn->take()) < slots;) unit(g + (size_t)t * h.width, h.width);
        pool.meet();
        in = prepare(slots, h.target_hidden, words, own.normed, *++turn,
                     [&](const Inputs& to, int t) { norm_word(c.tokens[t], to, t, own); });
        product(h.embed, in, slots, *++turn, [&](int tile, int t, vf v) {
            const size_t at = (size_t)t * h.width + tile * LANES;
            store(x + at, load(g + at) + v);
        });
        pool.meet();
        in = prepare(slots, h.width, normed, own.normed, *++turn,
                     [&](const Inputs& to, int t) { norm(x + (size_t)t * h.width, h.width, to, t); });
        queries_keys_values(in, slots, row_of, at, c.answering, *++turn);
        pool.meet();
        return turn + 1;
    }

    // x of the next slots: the head's own output in place of the features.
    Share* advance(int thread, Share* turn) const {
        Own& own = room.own[thread];
        Inputs in = prepare(c.rows, h.target_hidden, words, own.normed, *turn,
                            [&](const Inputs& to, int r) { norm_word(fed[r], to, r, own); });
        product(h.embed, in, c.rows, *++turn, [&](int tile, int r, vf v) {
            const size_t at = (size_t)r * h.width + tile * LANES;
            store(x + at, load(c.y + at) + v);
        });
        pool.meet();
        in = prepare(c.rows, h.width, normed, own.normed, *++turn,
                     [&](const Inputs& to, int r) { norm(x + (size_t)r * h.width, h.width, to, r); });
        int whose[64], slot[64];  // rows are few; see hs_head
        for (int r = 0; r < c.rows; r++) whose[r] = r, slot[r] = now[r];
        queries_keys_values(in, c.rows, whose, slot, true, *++turn);
        pool.meet();
        return turn + 1;
    }

    // From x and the queries of each row's newest slot (number ``of[r]`` or r) to y and logits.
    Share* answer(int thread, Share* turn, const int* of) const {
        const int group = h.heads / h.kv_heads;
        for (int item; (item = turn->take()) < c.rows * h.heads;) {
            const int row = item / h.heads, head = item % h.heads, number = of ? of[row] : row;
            const size_t from = (size_t)(c.first_row + row) * h.row_stride + (size_t)(head / group) * h.head_stride;
            const Sight sight{h.keys, h.values, from, now[row], 0, 1, nullptr, 1, h.window};
            attend(shape, sight, head, 1, queries + (size_t)number * h.heads * h.head_dim, attended.from(row),
                   room.own[thread]);
        }
        pool.meet();
        product(h.out, attended, c.rows, *++turn, [&](int tile, int r, vf v) {
            const size_t to = (size_t)(of ? of[r] : r) * h.width + tile * LANES;
            store(x + to, load(x + to) + v);
        });
        pool.meet();
        Inputs in = prepare(c.rows, h.width, normed, room.own[thread].normed, *++turn, [&](const Inputs& to, int r) {
            norm(x + (size_t)(of ? of[r] : r) * h.width, h.width, to, r);
        });
        turn++;
        for (int item; (item = turn->take()) < h.ffn / GROUP;) swiglu(h.gate_up, nullptr, item, in, c.rows, gated);
        pool.meet();
        product(h.down, gated, c.rows, *++turn, [&](int tile, int r, vf v) {
            const size_t from = (size_t)(of ? of[r] : r) * h.width + tile * LANES;
            store(c.y + (size_t)r * h.width + tile * LANES, load(x + from) + v);
        });
        pool.meet();
        turn++;
        for (int r; (r = turn->take()) < c.rows;) {
            unit(c.y + (size_t)r * h.width, h.width);
            const float* y = c.y + (size_t)r * h.width;
            for (int i = 0; i < h.width / GROUP; i++) round_group(ready, r, i, load(y + i * GROUP), load(y + i * GROUP + LANES));
        }
        pool.meet();
        product(h.head, ready, c.rows, *++turn, [&](int tile, int r, vf v) {
            store_tile(c.logits + (size_t)r * h.vocab, h.vocab, tile, v);
        });
        pool.meet();
        return turn + 1;
    }

    // A grammar's word on the next token, of which ``likely`` is the row's guess or -1: it is another one, which is
    // taken; the guess (or anything) is fine; or the logits get a mask.
    enum Said { TAKEN, FINE, MASKED };
    Said held(int row, int offset, int64_t likely, float* q) const {
        int64_t* line = c.drafted + (size_t)row * c.most;
        const uint32_t* mask = nullptr;
        const int64_t token = c.follow(row, offset, offset ? line[offset - 1] : -1, likely, &mask);
        if (token < 0 || token >= h.tokens) {
            float* x = c.logits + (size_t)row * h.vocab;
            for (int i = 0; mask && i < h.vocab; i++) {
                const int32_t id = h.ids[i];
                if (id / 32 >= c.words || !(mask[id / 32] >> (id % 32) & 1)) x[i] += -INFINITY;
            }
            return mask ? MASKED : FINE;
        }
        line[offset] = fed[row] = token;
        if (q && c.knobs && (c.knobs[row].rule == TOKEN_RULE || c.knobs[row].rule == BLOCK_RULE)) {
            memset(q, 0, sizeof(float) * (size_t)h.tokens);
            q[token] = 1.0f;
        }
        return TAKEN;
    }

    // The next word of a row, and how likely its token is to be reached by the target's text. By one thread. A greedy
    // guess is made without a mask first. The others come from the masked distribution, so they wait for the mask.
    void choose(int row, int offset) const {
        float* q = c.q ? c.q + ((size_t)row * c.most + offset) * h.tokens : nullptr;
        const Knobs* knobs = c.knobs ? c.knobs + row : nullptr;
        const bool grammar = c.masked && c.masked[row] && c.budgets[row] > offset;
        const bool greedy = !knobs || knobs->rule == GREEDY;
        const auto guess = [&] { return next_token(h, c.logits + (size_t)row * h.vocab, knobs, offset, c.temperature, q); };
        Word word{-1, 0.0f};
        if (!grammar || greedy) word = guess();
        if (grammar) {
            const Said said = held(row, offset, greedy && word.number >= 0 ? h.ids[word.number] : -1, q);
            if (said == TAKEN) return;
            if (said == MASKED || !greedy) word = guess();
        }
        const bool sound = word.number >= 0;
        c.drafted[(size_t)row * c.most + offset] = sound ? h.ids[word.number] : -1;
        fed[row] = sound ? h.ids[word.number] : 0;
        reached[row] *= word.hope;
        if (!sound && c.budgets[row] > offset) c.budgets[row] = offset;
        if (offset && reached[row] < c.min_chance_to_extend && c.budgets[row] > offset) c.budgets[row] = offset;
        if (reached[row] < c.least_next && c.budgets[row] > offset + 1) c.budgets[row] = offset + 1;
    }

    // Leave out first tokens that are reached with too little chance, but for the likeliest: it says whether drafts hold.
    void drop_first() const {
        float most = 0.0f;
        for (int r = 0; r < c.rows; r++)
            if (c.budgets[r] > 0 && reached[r] > most) most = reached[r];
        const float least = c.least_first < most ? c.least_first : most;
        for (int r = 0; r < c.rows; r++)
            if (reached[r] < least) c.budgets[r] = 0;
    }

    void run(int thread) const {
        Share* turn = share;
        const int* of = nullptr;
        if (c.reading) {
            turn = read(thread, turn);
            if (!c.answering) return;
            of = last;
        } else {
            turn = advance(thread, turn);
        }
        turn = answer(thread, turn, of);
        for (int offset = 0; offset < c.most; offset++) {
            if (thread == 0) {
                int wanted = 0;
                for (int r = 0; r < c.rows; r++) {
                    choose(r, offset);
                    now[r]++;
                    wanted = c.budgets[r] > wanted ? c.budgets[r] : wanted;
                }
                if (!offset) drop_first();
                *stop = wanted <= offset + 1;
                for (size_t i = 0; i < shares; i++) share[i].reset();
            }
            pool.meet();
            if (*stop) return;
            turn = advance(thread, share);
            answer(thread, turn, nullptr);
        }
    }
};

}  // namespace

struct HeadHandle {
    Head head;
    Room room;
    Buffer<float> g, x, queries, reached;
    Buffer<int> row_of, at, last;
    Buffer<int32_t> now;
    Buffer<int64_t> fed;
    Rounded features, words, normed, attended, gated, ready;
    int32_t stop = 0;
};

}  // namespace hs

using namespace hs;

HS_API void* hs_head_new(const Head* head) {
    HeadHandle* made = new HeadHandle();
    made->head = *head;
    return made;
}
HS_API void hs_head_free(void* handle) { delete (HeadHandle*)handle; }

// 0, or 1 if there are more rows than one call takes (then nothing was done).
HS_API int hs_head(void* handle, void* pool_, const HeadCall* call) {
    HeadHandle& t = *(HeadHandle*)handle;
    const Head& h = t.head;
    Pool& pool = *(Pool*)pool_;
    const int rows = call->rows;
    if (rows > 64) return 1;
    int slots = 0;
    if (call->reading)
        for (int r = 0; r < rows; r++) slots += call->counts[r];
    const int n = slots > rows ? slots : rows, spare = n + rows;  // a row without a slot of its own uses a spare one
    int *row_of = t.row_of.need(spare), *at = t.at.need(spare), *last = t.last.need(rows);
    int32_t* now = t.now.need(rows);
    int64_t* fed = t.fed.need(rows);
    float* reached = t.reached.need(rows);
    for (int r = 0, s = 0; r < rows; r++) {
        reached[r] = 1.0f;
        now[r] = call->starts[r];
        if (!call->reading) {
            fed[r] = call->tokens[r];
            continue;
        }
        for (int i = 0; i < call->counts[r]; i++, s++) row_of[s] = r, at[s] = call->starts[r] + i;
        last[r] = call->counts[r] ? s - 1 : slots + r;
        now[r] = call->starts[r] + (call->counts[r] ? call->counts[r] - 1 : 0);
    }
    if ((int)t.room.own.size() < pool.size()) t.room.own.resize(pool.size());
    if (t.room.shares.empty()) t.room.shares = std::vector<Share>(32);
    for (Share& share : t.room.shares) share.reset();
    bool exact = false;
    for (const Matrix* matrix : {&h.fuse, &h.embed, &h.qkv, &h.out, &h.gate_up, &h.down, &h.head})
        exact |= is_exact(matrix->kind);
    Model shape{};
    shape.heads = h.heads, shape.kv_heads = h.kv_heads, shape.head_dim = h.head_dim, shape.capacity = h.capacity;
    Steps steps{h,
                *call,
                shape,
                pool,
                t.room,
                t.room.shares.data(),
                t.room.shares.size(),
                slots,
                row_of,
                at,
                last,
                t.g.need((size_t)spare * h.width),
                t.x.need((size_t)spare * h.width),
                t.queries.need((size_t)spare * h.heads * h.head_dim),
                reached,
                now,
                fed,
                &t.stop,
                t.features.need(n, h.parts * h.target_hidden, exact),
                t.words.need(n, h.target_hidden, exact),
                t.normed.need(n, h.width, exact),
                t.attended.need(n, h.heads * h.head_dim, exact),
                t.gated.need(n, h.ffn, exact),
                t.ready.need(rows, h.width, exact)};
    for (int r = 0; call->reading && r < rows; r++)
        if (!call->counts[r]) {
            memset(steps.x + (size_t)last[r] * h.width, 0, sizeof(float) * h.width);
            memset(steps.queries + (size_t)last[r] * h.heads * h.head_dim, 0, sizeof(float) * h.heads * h.head_dim);
        }
    pool.run([](void* s, int thread) { ((const Steps*)s)->run(thread); }, &steps);
    return 0;
}
