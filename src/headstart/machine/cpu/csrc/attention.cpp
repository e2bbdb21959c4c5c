// Attention over one row's live keys.
//
// Knows: which keys a token sees and how they are weighed. Does not know: where queries come from.
//
// Keys are numbered in the order in which the token's text has them: first the row's live ones, then the token's own
// ancestors in this round. In a chain that is the order of the slots; in a tree the ancestors' slots have gaps, but their
// numbers have not. Sums follow the numbers, so an accepted branch gives the very bits that a chain would have given.
#include <cmath>

#include "decoder.h"

namespace hs {

struct Query {
    const float* q;
    int token, seen_from, seen_to;
    float* scores;
    float total;
    int head;
};

// Keys as they lie in the slab (half floats, or floats), or turned into floats once for several queries. The numbers are
// the same: a half float is exactly a float.
HS_INLINE vf load_any(const float* p) { return load(p); }
HS_INLINE vf load_any(const uint16_t* p) { return load_half(p); }

template <int PARTS, typename T> static HS_INLINE vf dot(const float* q, const T* key) {
    vf s = load(q) * load_any(key);
    for (int i = 1; i < PARTS; i++) s = fma(load(q + i * LANES), load_any(key + i * LANES), s);
    return s;
}

template <int PARTS, typename T> static HS_INLINE vf dots(const float* query, const T* keys) {
    constexpr int dim = PARTS * LANES;
    vf part[LANES];
    for (int k = 0; k < LANES; k++) part[k] = dot<PARTS>(query, keys + k * dim);
    return sums(part);
}

template <typename T> static __attribute__((noinline)) void score(const Query& query, const T* keys, int base, int dim) {
    vf found;
    switch (dim / LANES) {
        case 2: found = dots<2>(query.q, keys); break;
        case 4: found = dots<4>(query.q, keys); break;
        case 6: found = dots<6>(query.q, keys); break;
        case 8: found = dots<8>(query.q, keys); break;
        case 10: found = dots<10>(query.q, keys); break;
        case 12: found = dots<12>(query.q, keys); break;
        case 14: found = dots<14>(query.q, keys); break;
        default: found = dots<16>(query.q, keys);
    }
    store(query.scores + base, found);
}

template <int PARTS, typename T>
static HS_INLINE void mix_parts(const float* p, const T* values, int from, int to, int dim, float* sum) {
    vf s[PARTS];
    for (int i = 0; i < PARTS; i++) s[i] = load(sum + i * LANES);
    for (int k = from; k < to; k++)
        for (int i = 0; i < PARTS; i++) s[i] = fma(splat(p[k]), load_any(values + k * dim + i * LANES), s[i]);
    for (int i = 0; i < PARTS; i++) store(sum + i * LANES, s[i]);
}

template <typename T>
static __attribute__((noinline)) void mix(const Query& query, const T* values, int base, int dim, float* sum) {
    const int from = query.seen_from > base ? query.seen_from - base : 0;
    const int to = query.seen_to - base < LANES ? query.seen_to - base : LANES;
    const float* p = query.scores + base;
    int d = 0;
    for (; d + 4 * LANES <= dim; d += 4 * LANES) mix_parts<4>(p, values + d, from, to, dim, sum + d);
    for (; d < dim; d += 2 * LANES) mix_parts<2>(p, values + d, from, to, dim, sum + d);
}

static __attribute__((noinline)) void soften(Query& query) {
    const int first = query.seen_from / LANES * LANES;
    const vf low = splat(-INFINITY);
    vf most = low;
    for (int b = first; b < query.seen_to; b += LANES) {
        const vi at = lane_numbers() + splat_int(b);
        const vi seen = (at >= splat_int(query.seen_from)) & (at < splat_int(query.seen_to));
        const vf s = load(query.scores + b);
        most = larger(seen ? s : low, most);
    }
    const vf top = splat(greatest(most));
    vf total = splat(0.0f);
    for (int b = first; b < query.seen_to; b += LANES) {
        const vi at = lane_numbers() + splat_int(b);
        const vi seen = (at >= splat_int(query.seen_from)) & (at < splat_int(query.seen_to));
        const vf s = load(query.scores + b) - top;
        const vf p = seen ? exponential(s) : splat(0.0f);
        store(query.scores + b, p);
        total += p;
    }
    query.total = sum(total);
}

// Walks a token's keys in blocks of 16 and hands each block, as floats, to everyone who sees it.
template <typename T, typename Visit>
static void walk(const Sight& s, const T* from, int dim, std::vector<Query>& queries, float* block, Visit visit) {
    const int end = s.length + (s.ancestors ? 0 : s.last);
    const int shared = s.ancestors ? end / LANES * LANES : end;  // blocks that all tokens of a tree have in common
    int first = shared;
    for (const Query& q : queries) first = q.seen_from < first ? q.seen_from : first;
    for (int base = first / LANES * LANES; base < shared; base += LANES) {
        const int rows = shared - base < LANES ? shared - base : LANES;
        const T* p = from + (size_t)base * dim;
        if (queries.size() == 1 && rows == LANES) {
            visit(queries[0], base, p);
            continue;
        }
        for (int i = 0; i < rows * dim; i += LANES) store(block + i, load_any(p + i));
        for (Query& q : queries)
            if (base < q.seen_to && base + LANES > q.seen_from) visit(q, base, block);
    }
    if (!s.ancestors) return;
    for (size_t at = 0; at < queries.size();) {
        const int token = queries[at].token;
        size_t next = at;
        while (next < queries.size() && queries[next].token == token) next++;
        const uint8_t* mine = s.ancestors + (size_t)token * s.width;
        int node = -1;
        for (int base = shared; base < queries[at].seen_to; base += LANES) {
            for (int k = 0; k < LANES && base + k < queries[at].seen_to; k++) {
                int slot = base + k;
                if (slot >= s.length) {
                    do node++;
                    while (!mine[node]);
                    slot = s.length + node;
                }
                for (int i = 0; i < dim; i += LANES)
                    store(block + k * dim + i, load_any(from + (size_t)slot * dim + i));
            }
            for (size_t i = at; i < next; i++)
                if (base + LANES > queries[i].seen_from) visit(queries[i], base, block);
        }
        at = next;
    }
}

template <typename T>
static void attend_to(const T* keys, const T* values, const Model& m, const Sight& s, int head, int heads,
                      const float* queries, const Inputs& to, Own& own) {
    const int dim = m.head_dim, most = m.capacity + LANES, stride = m.heads * dim;
    const int count = (s.last - s.first) * heads;
    float* scores = own.scores.need((size_t)count * (most + dim));
    float* mixed = scores + (size_t)count * most;
    float* block = own.keys.need((size_t)LANES * dim);
    memset(block, 0, sizeof(float) * LANES * dim);
    std::vector<Query> all;
    all.reserve(count);
    for (int n = s.first; n < s.last; n++) {
        int seen = s.length + n + 1;
        if (s.ancestors) {
            seen = s.length;
            for (int i = 0; i <= n; i++) seen += s.ancestors[(size_t)n * s.width + i] != 0;
        }
        const int from = s.window && seen > s.window ? seen - s.window : 0;
        for (int h = head; h < head + heads; h++)
            all.push_back({queries + (size_t)n * stride + h * dim, n, from, seen, scores + all.size() * most, 0.0f, h});
    }
    walk(s, keys, dim, all, block, [&](Query& q, int base, auto* some) { score(q, some, base, dim); });
    for (Query& q : all) soften(q);
    memset(mixed, 0, sizeof(float) * count * dim);
    memset(block, 0, sizeof(float) * LANES * dim);
    Query* const begin = all.data();
    walk(s, values, dim, all, block,
         [&](Query& q, int base, auto* some) { mix(q, some, base, dim, mixed + (&q - begin) * dim); });
    for (int i = 0; i < count; i++) {
        const vf share = splat(1.0f / all[i].total);
        for (int g = 0; g < dim / GROUP; g++) {
            const float* p = mixed + (size_t)i * dim + g * GROUP;
            round_group(to, all[i].token, all[i].head * dim / GROUP + g, load(p) * share, load(p + LANES) * share);
        }
    }
}

void attend(const Model& m, const Sight& s, int head, int heads, const float* queries, const Inputs& to, Own& own) {
    if (m.float_keys)
        attend_to((const float*)s.keys + s.at, (const float*)s.values + s.at, m, s, head, heads, queries, to, own);
    else
        attend_to((const uint16_t*)s.keys + s.at, (const uint16_t*)s.values + s.at, m, s, head, heads, queries, to, own);
}

}  // namespace hs
