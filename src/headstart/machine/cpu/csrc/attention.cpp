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
    int token, from, to;  // sees keys from .. to - 1
    float* scores;
    float total;
    int head;
    float* mixed;
};

// Keys as they lie in the slab (half floats, or floats), or turned into floats once for several queries. The numbers are
// the same: a half float is exactly a float.
HS_INLINE vf load_any(const float* p) { return load(p); }
HS_INLINE vf load_any(const uint16_t* p) { return load_half(p); }

constexpr int MOST_PARTS = 8;   // of heads whose keys several queries share: up to 128 wide
constexpr int MANY = 20;        // queries for which it pays to turn keys round
constexpr int BLOCKS = 4;       // of 16 keys, that are taken at once
constexpr int KEYS = BLOCKS * LANES;
constexpr int AHEAD_KEYS = 64;  // that memory is asked for before they are needed
#if defined(__AVX512F__)        // numbers that find room in the registers: QUERIES x AT_ONCE
constexpr int QUERIES = 4, AT_ONCE = 4;
#else
constexpr int QUERIES = 2, AT_ONCE = 2;
#endif

template <typename T> static HS_INLINE void ask_for(const T* p, int count) {
    for (int i = 0; i < count; i += 64 / (int)sizeof(T)) __builtin_prefetch(p + i);
}

// Keys or values that are read one behind the other, and what is read behind them: a row has a few hundred, so that to ask
// for more than it has, or not for what comes first, is a good part of all.
template <typename T> struct Stream {
    const T* from;
    int end;        // of them that are read
    const T* then;  // or null
    int dim;

    // Where number ``key`` and those behind it will be read.
    HS_INLINE const T* at(int key) const {
        if (key < end) return from + (size_t)key * dim;
        return then ? then + (size_t)(key - end) * dim : nullptr;
    }
    // Those from ``first`` on, and of the next as far as nobody asks for them while these are read.
    HS_INLINE void begin(int first) const {
        for (int key = first; key < first + AHEAD_KEYS; key++)
            if (const T* p = at(key)) ask_for(p, dim);
    }
};

// -- scores: a query times 16 keys. Lane l adds up the products of inputs l, l + 16, l + 32 ..., then lanes are added in
// halves, as ``sum`` does. The two ways below do the same additions.

// A few queries share the loading of keys, which lie as they are: lanes are inputs.
template <int PARTS, int N, typename T> static HS_INLINE void dots(const Query* q, const T* key, vf* found) {
    for (int i = 0; i < PARTS; i++) {
        const vf k = load_any(key + i * LANES);
        for (int n = 0; n < N; n++) {
            const vf x = load(q[n].q + i * LANES);
            found[n] = i ? fma(x, k, found[n]) : x * k;
        }
    }
}

template <int PARTS, int N, typename T>
static __attribute__((noinline)) void few_scores(const Query* q, const T* keys, int base, const T* ahead) {
    constexpr int dim = PARTS * LANES;
    vf four[4][N];
#pragma GCC unroll 1
    for (int j = 0; j < 4; j++) {
        vf part[4][N];
        if (ahead) ask_for(ahead + 4 * j * dim, 4 * dim);
        for (int k = 0; k < 4; k++) dots<PARTS, N>(q, keys + (4 * j + k) * dim, part[k]);
        for (int n = 0; n < N; n++) four[j][n] = fold2(fold1(part[0][n], part[1][n]), fold1(part[2][n], part[3][n]));
    }
    for (int n = 0; n < N; n++)
        store(q[n].scores + base, fold4(fold3(four[0][n], four[1][n]), fold3(four[2][n], four[3][n])));
}

// Many queries share M blocks that are turned round: [inputs, 16 keys], lanes are keys, and no addition crosses lanes.
// Inputs come in the order in which their lanes are added up; a sum waits until its other half is there.
template <int PARTS, int M>
static __attribute__((noinline)) void many_scores(const float* const* q, const float* turned, float* const* to) {
    constexpr int ORDER[LANES] = {0, 8, 4, 12, 2, 10, 6, 14, 1, 9, 5, 13, 3, 11, 7, 15};
    vf waiting[5][QUERIES][M];
#pragma GCC unroll 1
    for (int j = 0; j < LANES; j++) {
        vf s[QUERIES][M];
        const int l = ORDER[j];
        for (int i = 0; i < PARTS; i++) {
            vf k[M];
            for (int b = 0; b < M; b++) k[b] = load(turned + (size_t)((b * PARTS + i) * LANES + l) * LANES);
            for (int n = 0; n < QUERIES; n++) {
                const vf x = splat(q[n][i * LANES + l]);
                for (int b = 0; b < M; b++) s[n][b] = i ? fma(x, k[b], s[n][b]) : x * k[b];
            }
        }
        int level = 0;
#pragma GCC unroll 1
        for (; j >> level & 1; level++)
            for (int n = 0; n < QUERIES; n++)
                for (int b = 0; b < M; b++) s[n][b] += waiting[level][n][b];
        for (int n = 0; n < QUERIES; n++)
            for (int b = 0; b < M; b++) waiting[level][n][b] = s[n][b];
    }
    for (int n = 0; n < QUERIES; n++)
        for (int b = 0; b < M; b++) store(to[n] + b * LANES, waiting[4][n][b]);
}

// 16 x 16 numbers: rows become columns.
static HS_INLINE void turn(vf* r) {
    for (int i = 0; i < 8; i++) swap8(r[i], r[i + 8]);
    for (int i = 0; i < 16; i = (i + 5) & ~4) swap4(r[i], r[i + 4]);
    for (int i = 0; i < 16; i = (i + 3) & ~2) swap2(r[i], r[i + 2]);
    for (int i = 0; i < 16; i += 2) swap1(r[i], r[i + 1]);
}

template <typename T> static __attribute__((noinline)) void turn_block(const T* keys, int dim, float* to) {
    for (int d = 0; d < dim; d += LANES) {
        vf r[LANES];
        for (int k = 0; k < LANES; k++) r[k] = load_any(keys + k * dim + d);
        turn(r);
        for (int l = 0; l < LANES; l++) store(to + (d + l) * LANES, r[l]);
    }
}

template <int PARTS> static void turned_scores(const Query* q, int count, const float* turned, int base, int blocks) {
    for (; count > 0; count -= QUERIES, q += QUERIES) {
        const float* from[QUERIES];
        float* to[QUERIES];
        int seen = 0;
        for (int n = 0; n < QUERIES; n++) {
            const Query& one = q[n < count ? n : count - 1];  // the last one more than once
            from[n] = one.q, to[n] = one.scores + base;
            seen = one.to > seen ? one.to : seen;
        }
        const int wanted = (seen - base + LANES - 1) / LANES < blocks ? (seen - base + LANES - 1) / LANES : blocks;
        for (int b = 0, some; b < wanted; b += some) {
            const float* at = turned + (size_t)b * PARTS * LANES * LANES;
            some = wanted - b >= AT_ONCE ? AT_ONCE : wanted - b >= 2 ? 2 : 1;
            if (some == AT_ONCE)
                many_scores<PARTS, AT_ONCE>(from, at, to);
            else if (some == 2)
                many_scores<PARTS, 2>(from, at, to);
            else
                many_scores<PARTS, 1>(from, at, to);
            for (int n = 0; n < QUERIES; n++) to[n] += some * LANES;
        }
    }
}

template <int PARTS, typename T>
static void scores_of(const Query* q, int count, const T* keys, int base, int blocks, const Stream<T>& stream, float* room) {
    constexpr int dim = PARTS * LANES;
    if constexpr (PARTS <= MOST_PARTS)
        if (count >= MANY) {
            for (int b = 0; b < blocks; b++) turn_block(keys + b * LANES * dim, dim, room + b * LANES * dim);
            return turned_scores<PARTS>(q, count, room, base, blocks);
        }
    for (int b = 0; b < blocks; b++, base += LANES, keys += LANES * dim) {
        int i = 0;
        const T* ahead = stream.at(base + AHEAD_KEYS);  // the first queries ask for all
        if constexpr (PARTS <= MOST_PARTS)
            for (; i + 3 <= count; i += 3, ahead = nullptr) few_scores<PARTS, 3>(q + i, keys, base, ahead);
        for (; i < count; i++, ahead = nullptr) few_scores<PARTS, 1>(q + i, keys, base, ahead);
    }
}

// Of queries that see some of the blocks. ``room``: for as many numbers.
template <typename T>
static void scores(const Query* q, int count, const T* keys, int base, int blocks, const Stream<T>& stream, float* room) {
    switch (stream.dim / LANES) {
        case 2: return scores_of<2>(q, count, keys, base, blocks, stream, room);
        case 4: return scores_of<4>(q, count, keys, base, blocks, stream, room);
        case 6: return scores_of<6>(q, count, keys, base, blocks, stream, room);
        case 8: return scores_of<8>(q, count, keys, base, blocks, stream, room);
        case 10: return scores_of<10>(q, count, keys, base, blocks, stream, room);
        case 12: return scores_of<12>(q, count, keys, base, blocks, stream, room);
        case 14: return scores_of<14>(q, count, keys, base, blocks, stream, room);
        default: return scores_of<16>(q, count, keys, base, blocks, stream, room);
    }
}

// -- from scores to shares

static __attribute__((noinline)) void soften(Query& query) {
    const int first = query.from / LANES * LANES;
    const auto edge = [&](int b) { return b < query.from || b + LANES > query.to; };  // not all of the block is seen
    const auto seen = [&](int b) -> vi {
        const vi at = lane_numbers() + splat_int(b);
        return (at >= splat_int(query.from)) & (at < splat_int(query.to));
    };
    const vf low = splat(-INFINITY), none = splat(0.0f);
    vf most = low, total = none;
    for (int b = first; b < query.to; b += LANES) {
        vf s = load(query.scores + b);
        if (edge(b)) s = choose(seen(b), s, low);
        most = larger(s, most);
    }
    const vf top = splat(greatest(most));
    for (int b = first; b < query.to; b += LANES) {
        vf p = exponential(load(query.scores + b) - top);
        if (edge(b)) p = choose(seen(b), p, none);
        store(query.scores + b, p);
        total += p;
    }
    query.total = sum(total);
}

// -- the values' mixture: one key after the other

// Of N queries that see keys from .. to - 1 behind ``base`` and share the loading of values. ``stream``: or null, where
// nothing is to be asked for.
template <int N, int PARTS, typename T>
static HS_INLINE void mix_parts(const Query* q, const T* values, int base, int from, int to, int dim, int d,
                                const Stream<T>* stream) {
    vf s[N][PARTS];
    for (int n = 0; n < N; n++)
        for (int i = 0; i < PARTS; i++) s[n][i] = load(q[n].mixed + d + i * LANES);
    for (int k = from; k < to; k++) {
        vf value[PARTS];
        if (stream)
            if (const T* ahead = stream->at(base + k + AHEAD_KEYS)) ask_for(ahead + d, PARTS * LANES);
        for (int i = 0; i < PARTS; i++) value[i] = load_any(values + k * dim + d + i * LANES);
        for (int n = 0; n < N; n++) {
            const vf p = splat(q[n].scores[base + k]);
            for (int i = 0; i < PARTS; i++) s[n][i] = fma(p, value[i], s[n][i]);
        }
    }
    for (int n = 0; n < N; n++)
        for (int i = 0; i < PARTS; i++) store(q[n].mixed + d + i * LANES, s[n][i]);
}

template <int N, typename T>
static __attribute__((noinline)) void mix(const Query* q, const T* values, int base, int from, int to, int dim,
                                          const Stream<T>* stream) {
    int d = 0;
    for (; d + AT_ONCE * LANES <= dim; d += AT_ONCE * LANES) mix_parts<N, AT_ONCE>(q, values, base, from, to, dim, d, stream);
    for (; d < dim; d += 2 * LANES) mix_parts<N, 2>(q, values, base, from, to, dim, d, stream);
}

// Of queries that see some of the blocks, four at a time as far as all four see the same keys.
template <typename T>
static void mixes(const Query* q, int count, const T* values, int base, int blocks, int dim, const Stream<T>* stream) {
    for (; count > 0; count -= 4, q += 4) {
        const int some = count < 4 ? count : 4;
        int from[4], to[4], first = 0, last = blocks * LANES;
        for (int n = 0; n < some; n++) {
            from[n] = q[n].from > base ? q[n].from - base : 0;
            to[n] = q[n].to - base < blocks * LANES ? q[n].to - base : blocks * LANES;
            first = from[n] > first ? from[n] : first;
            last = to[n] < last ? to[n] : last;
        }
        last = last < first ? first : last;
        for (int n = 0; n < some; n++)
            if (from[n] < first) mix<1>(q + n, values, base, from[n], first < to[n] ? first : to[n], dim, stream);
        if (first < last) switch (some) {
                case 1: mix<1>(q, values, base, first, last, dim, stream); break;
                case 2: mix<2>(q, values, base, first, last, dim, stream); break;
                case 3: mix<3>(q, values, base, first, last, dim, stream); break;
                default: mix<4>(q, values, base, first, last, dim, stream);
            }
        for (int n = 0; n < some; n++)
            if (last < to[n]) mix<1>(q + n, values, base, last, to[n], dim, stream);
    }
}

// Walks a token's keys, some blocks of 16 at a time, and hands them to everyone who sees some of them. ``room``: for as
// many keys as they lie in the slab.
template <typename T, typename Visit>
static void walk(const Sight& s, const T* from, int dim, int capacity, std::vector<Query>& queries, T* room, Visit visit) {
    const int end = s.length + (s.ancestors ? 0 : s.last);
    const int shared = s.ancestors ? end / LANES * LANES : end;  // blocks that all tokens of a tree have in common
    int first = shared;
    for (const Query& q : queries) first = q.from < first ? q.from : first;
    for (int base = first / LANES * LANES; base < shared; base += KEYS) {
        const int blocks = shared - base < KEYS ? (shared - base + LANES - 1) / LANES : BLOCKS, next_base = base + blocks * LANES;
        const T* p = from + (size_t)base * dim;
        if (next_base > capacity) {  // nothing is read past the row's end
            memcpy(room, p, sizeof(T) * (capacity - base) * dim);
            memset(room + (capacity - base) * dim, 0, sizeof(T) * (next_base - capacity) * dim);
            p = room;
        }
        const auto sees = [&](const Query& q) { return base < q.to && next_base > q.from; };
        for (size_t i = 0, next; i < queries.size(); i = next + 1) {
            for (next = i; next < queries.size() && sees(queries[next]);) next++;
            if (next > i) visit(queries.data() + i, (int)(next - i), base, blocks, p);
        }
    }
    if (!s.ancestors) return;
    memset(room, 0, sizeof(T) * LANES * dim);
    for (size_t at = 0; at < queries.size();) {
        const int token = queries[at].token;
        size_t next = at;
        while (next < queries.size() && queries[next].token == token) next++;
        const uint8_t* mine = s.ancestors + (size_t)token * s.width;
        int node = -1;
        for (int base = shared; base < queries[at].to; base += LANES) {
            for (int k = 0; k < LANES && base + k < queries[at].to; k++) {
                int slot = base + k;
                if (slot >= s.length) {
                    do node++;
                    while (!mine[node]);
                    slot = s.length + node;
                }
                memcpy(room + k * dim, from + (size_t)slot * dim, sizeof(T) * dim);
            }
            if (base + LANES > queries[at].from) visit(queries.data() + at, (int)(next - at), base, 1, room);
        }
        at = next;
    }
}

template <typename T>
static void attend_to(const T* keys, const T* values, const Model& m, const Sight& s, int head, int heads,
                      const float* queries, const Inputs& to, Own& own) {
    const int dim = m.head_dim, stride = m.heads * dim, count = (s.last - s.first) * heads;
    const int most = (s.length + s.last + LANES - 1) / LANES * LANES;
    float* room = own.scores.need((size_t)count * (most + dim));
    float* mixed = room + (size_t)count * most;
    float* floats = own.keys.need((size_t)2 * KEYS * dim);
    T* copy = (T*)(floats + KEYS * dim);
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
    const int read = most < m.capacity ? most : m.capacity;
    const int first = all.front().from;
    const Stream<T> key_stream{keys, read, values + (size_t)first * dim, dim}, value_stream{values, read, (const T*)s.next, dim};
    key_stream.begin(first);
    if (count >= MANY) value_stream.begin(first);
    walk(s, keys, dim, m.capacity, all, copy, [&](Query* q, int some, int base, int blocks, const T* at) {
        scores(q, some, at, base, blocks, key_stream, floats);
    });
    for (Query& q : all) soften(q);
    memset(mixed, 0, sizeof(float) * count * dim);
    walk(s, values, dim, m.capacity, all, copy, [&](Query* q, int some, int base, int blocks, const T* at) {
        if (some <= 4) return mixes(q, some, at, base, blocks, dim, &value_stream);
        if (sizeof(T) == sizeof(float)) return mixes(q, some, at, base, blocks, dim, (const Stream<T>*)nullptr);
        for (int k = 0; k < blocks * LANES; k++) {
            if (const T* ahead = value_stream.at(base + k + AHEAD_KEYS)) ask_for(ahead, dim);
            for (int i = k * dim; i < (k + 1) * dim; i += LANES) store(floats + i, load_any(at + i));
        }
        mixes(q, some, floats, base, blocks, dim, (const Stream<float>*)nullptr);
    });
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
