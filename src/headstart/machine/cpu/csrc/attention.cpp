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
    float* mixed;
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

// Of two queries, which share the loading of keys. Each query's numbers are those of ``dots``.
template <int PARTS> static HS_INLINE void two_dots(const float* a, const float* b, const float* keys, vf* found) {
    constexpr int dim = PARTS * LANES;
    vf x[PARTS], y[PARTS], part[2][LANES];
    for (int i = 0; i < PARTS; i++) x[i] = load(a + i * LANES), y[i] = load(b + i * LANES);
    for (int k = 0; k < LANES; k++) {
        vf key = load(keys + k * dim), s = x[0] * key, t = y[0] * key;
        for (int i = 1; i < PARTS; i++) {
            key = load(keys + k * dim + i * LANES);
            s = fma(x[i], key, s);
            t = fma(y[i], key, t);
        }
        part[0][k] = s;
        part[1][k] = t;
    }
    found[0] = sums(part[0]);
    found[1] = sums(part[1]);
}

static __attribute__((noinline)) void two_scores(const Query& a, const Query& b, const float* keys, int base, int dim) {
    vf found[2];
    switch (dim / LANES) {
        case 2: two_dots<2>(a.q, b.q, keys, found); break;
        case 4: two_dots<4>(a.q, b.q, keys, found); break;
        case 6: two_dots<6>(a.q, b.q, keys, found); break;
        default: two_dots<8>(a.q, b.q, keys, found);
    }
    store(a.scores + base, found[0]);
    store(b.scores + base, found[1]);
}

// Queries one behind the other that see a block.
template <typename T> static void scores(const Query* q, int count, const T* keys, int base, int dim) {
    for (int i = 0; i < count; i++) score(q[i], keys, base, dim);
}
static void scores(const Query* q, int count, const float* keys, int base, int dim) {
    int i = 0;
    if (dim <= 8 * LANES)
        for (; i + 2 <= count; i += 2) two_scores(q[i], q[i + 1], keys, base, dim);
    for (; i < count; i++) score(q[i], keys, base, dim);
}

template <int PARTS, typename T>
static HS_INLINE void mix_parts(const float* p, const T* values, int from, int to, int dim, float* sum) {
    vf s[PARTS];
    for (int i = 0; i < PARTS; i++) s[i] = load(sum + i * LANES);
    for (int k = from; k < to; k++)
        for (int i = 0; i < PARTS; i++) s[i] = fma(splat(p[k]), load_any(values + k * dim + i * LANES), s[i]);
    for (int i = 0; i < PARTS; i++) store(sum + i * LANES, s[i]);
}

template <typename T> static __attribute__((noinline)) void mix(const Query& query, const T* values, int base, int dim) {
    float* sum = query.mixed;
    const int from = query.seen_from > base ? query.seen_from - base : 0;
    const int to = query.seen_to - base < LANES ? query.seen_to - base : LANES;
    const float* p = query.scores + base;
    int d = 0;
    for (; d + 4 * LANES <= dim; d += 4 * LANES) mix_parts<4>(p, values + d, from, to, dim, sum + d);
    for (; d < dim; d += 2 * LANES) mix_parts<2>(p, values + d, from, to, dim, sum + d);
}

// Of four queries that see the whole block and share the loading of values.
template <int PARTS> static HS_INLINE void mix_four_parts(const Query* q, const float* values, int base, int dim, int d) {
    vf s[4][PARTS];
    for (int n = 0; n < 4; n++)
        for (int i = 0; i < PARTS; i++) s[n][i] = load(q[n].mixed + d + i * LANES);
    for (int k = 0; k < LANES; k++) {
        vf value[PARTS];
        for (int i = 0; i < PARTS; i++) value[i] = load(values + k * dim + d + i * LANES);
        for (int n = 0; n < 4; n++) {
            const vf p = splat(q[n].scores[base + k]);
            for (int i = 0; i < PARTS; i++) s[n][i] = fma(p, value[i], s[n][i]);
        }
    }
    for (int n = 0; n < 4; n++)
        for (int i = 0; i < PARTS; i++) store(q[n].mixed + d + i * LANES, s[n][i]);
}

static __attribute__((noinline)) void mix_four(const Query* q, const float* values, int base, int dim) {
    int d = 0;
    for (; d + 4 * LANES <= dim; d += 4 * LANES) mix_four_parts<4>(q, values, base, dim, d);
    for (; d < dim; d += 2 * LANES) mix_four_parts<2>(q, values, base, dim, d);
}

template <typename T> static void mixes(const Query* q, int count, const T* values, int base, int dim) {
    for (int i = 0; i < count; i++) mix(q[i], values, base, dim);
}
static void mixes(const Query* q, int count, const float* values, int base, int dim) {
    for (int i = 0; i < count;) {
        int whole = 0;
        while (whole < 4 && i + whole < count && q[i + whole].seen_from <= base && q[i + whole].seen_to >= base + LANES) whole++;
        if (whole == 4)
            mix_four(q + i, values, base, dim), i += 4;
        else
            mix(q[i], values, base, dim), i++;
    }
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
            visit(queries.data(), 1, base, p);
            continue;
        }
        for (int i = 0; i < rows * dim; i += LANES) store(block + i, load_any(p + i));
        const auto sees = [&](const Query& q) { return base < q.seen_to && base + LANES > q.seen_from; };
        for (size_t i = 0, next; i < queries.size(); i = next + 1) {
            for (next = i; next < queries.size() && sees(queries[next]);) next++;
            if (next > i) visit(queries.data() + i, (int)(next - i), base, block);
        }
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
                if (base + LANES > queries[i].seen_from) visit(queries.data() + i, 1, base, block);
        }
        at = next;
    }
}

template <typename T>
static void attend_to(const T* keys, const T* values, const Model& m, const Sight& s, int head, int heads,
                      const float* queries, const Inputs& to, Own& own) {
    const int dim = m.head_dim, most = m.capacity + LANES, stride = m.heads * dim;
    const int count = (s.last - s.first) * heads;
    float* room = own.scores.need((size_t)count * (most + dim));
    float* mixed = room + (size_t)count * most;
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
            all.push_back({queries + (size_t)n * stride + h * dim, n, from, seen, room + all.size() * most, 0.0f, h,
                           mixed + all.size() * dim});
    }
    walk(s, keys, dim, all, block, [&](Query* q, int some, int base, auto* at) { scores(q, some, at, base, dim); });
    for (Query& q : all) soften(q);
    memset(mixed, 0, sizeof(float) * count * dim);
    memset(block, 0, sizeof(float) * LANES * dim);
    walk(s, values, dim, all, block, [&](Query* q, int some, int base, auto* at) { mixes(q, some, at, base, dim); });
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
