// The verdict on one drafted chain, from logits to the accepted tokens and the one the target adds, in one call.
//
// Knows: maths/verify.py's rules for chains and judge's greedy and coupled ones, with the same noise; the tests hold this
// against them; what a grammar allows at each node. Does not know: trees, batches, penalties (they are in the logits
// already), drafters.
//
// Why there is a second form of them: on a CPU a round's decision is some hundred operations on a few numbers, each of
// which torch needs ten microseconds for once the weights have pushed everything else out of the cache.
#include <algorithm>
#include <cmath>

#include "pool.h"
#include "sampling.h"

namespace hs {
namespace {

constexpr double SOUND = 1e-3;  // how far from 1 a distribution may sum, see chance.py

// What the draft was drawn from. A point draft has all its mass on the token.
struct Chain {
    const float* x;         // [n + 1, stride] logits
    int64_t stride;
    int size;               // tokens that may be drawn
    int n;                  // drafted
    const int64_t* tokens;  // [n]
    const float* q;         // [n, q_stride], or null: a point draft
    int64_t q_stride;
    const uint32_t* const* masks;  // [n + 1] of the nodes, null where anything may follow; or null
    int words;              // of a mask

    const float* at(int node) const { return x + node * stride; }
    Allowed allowed(int node) const { return {masks ? masks[node] : nullptr, words}; }

    // A node's distribution; returns the largest p, NaN if its numbers are broken.
    float p_of(int node, const Knobs& knobs, float* p, std::vector<float>& room) const {
        const Allowed mask = allowed(node);
        if (!mask.mask) return distribution(at(node), size, knobs, p);
        const int64_t token = mask.only(size);
        if (token == -1) {
            room.resize(size);
            mask.apply(at(node), size, room.data());
            return distribution(room.data(), size, knobs, p);
        }
        const float sound = token >= 0 && std::isfinite(at(node)[token]) ? 1.0f : NAN;
        std::fill(p, p + size, sound * 0.0f);
        if (token >= 0) p[token] = sound;
        return sound;
    }

    // What the target itself puts behind a node; -1: its numbers are broken.
    int64_t target(int node, const Knobs& knobs, float* p, std::vector<float>& room) const {
        const Allowed mask = allowed(node);
        int64_t token = mask.mask ? mask.only(size) : -1;
        if (token == -1) {
            if (knobs.rule == GREEDY)
                token = mask.mask ? first_largest(at(node), size, mask) : first_largest(at(node), size);
            else if (std::isfinite(p_of(node, knobs, p, room)))
                token = race(p, nullptr, size, noise_of(knobs.seed, knobs.base + node, 0, COUPLED));
        }
        return token >= 0 && std::isfinite(at(node)[token]) ? token : -1;
    }
};

struct Verdict {
    int64_t accepted, token;  // token -1: the target's numbers are broken there
};

struct Rejection {
    const Chain& c;
    const Knobs& knobs;
    bool block;
    float* p;  // [n + 1, size]
    std::vector<float> most, scale, ratio;
    std::vector<bool> usable;

    const float* at(int node) const { return p + (size_t)node * c.size; }
    const float* q_of(int node) const { return c.q + (node - 1) * c.q_stride; }

    // What is left of p at a node whose child was rejected: max(factor * p - q, 0). Returns its sum. ``to`` may be null.
    double rest(int node, float factor, float* to) const {
        const float *a = at(node), *b = c.q ? q_of(node + 1) : nullptr;
        return summed(c.size, [&](int i, bool whole) {
            vf v = (whole ? load(a + i) : load_some(a + i, c.size - i, 0.0f)) * splat(factor);
            if (b) v = larger(v - (whole ? load(b + i) : load_some(b + i, c.size - i, 0.0f)), splat(0.0f));
            if (!b) v = (vf)((vi)v & (lane_numbers() + splat_int(i) != splat_int((int32_t)c.tokens[node])));
            if (to && whole) store(to + i, v);
            if (to && !whole) memcpy(to + i, &v, sizeof(float) * (size_t)(c.size - i));
            return v;
        });
    }

    bool q_is_sound(int node) const {
        if (!c.q) return true;
        const float* b = q_of(node);
        const double total = summed(
            c.size, [&](int i, bool whole) { return whole ? load(b + i) : load_some(b + i, c.size - i, 0.0f); });
        return std::fabs(total - 1.0) < SOUND;  // not so for NaN
    }

    // Which nodes count, the ratio p / q of each, and how much of p is left below it.
    void prepare() {
        usable.assign(c.n + 2, false);
        ratio.assign(c.n + 1, 0.0f);
        scale.assign(c.n + 1, 1.0f);
        bool way = true;
        for (int node = 1; node <= c.n; node++) {
            const int64_t token = c.tokens[node - 1];
            way = way && std::isfinite(most[node - 1]) && token >= 0 && q_is_sound(node);
            usable[node] = way;
            if (!way) continue;
            const float above = token < c.size ? at(node - 1)[token] : 0.0f;  // the others are never emitted
            ratio[node] = above > 0.0f ? above / (c.q ? q_of(node)[token] : 1.0f) : 0.0f;
            if (block) scale[node] = std::min(scale[node - 1] * ratio[node], 1.0f);
        }
    }

    float chance(int node) const {
        if (!block) return std::min(ratio[node], 1.0f);
        if (node == c.n || !usable[node + 1]) return scale[node];
        const float mass = c.q ? (float)rest(node, scale[node], nullptr)
                               : scale[node] * std::max(1.0f - ratio[node + 1], 0.0f);
        const float lost = mass + (1.0f - scale[node]);
        return lost > 0.0f ? mass / lost : 1.0f;
    }

    Verdict run(std::vector<float>& room) {
        prepare();
        int last = 0;
        for (int node = 1; node <= c.n && usable[node]; node++) {
            if (uniform(noise_of(knobs.seed, knobs.base, node, ACCEPT)) < chance(node))
                last = node;
            else if (!block)
                break;
        }
        if (!std::isfinite(most[last])) return {last, -1};
        const float* weights = at(last);
        if (last < c.n && usable[last + 1]) {  // it was rejected: the target draws from what it left
            room.resize(c.size);
            if (rest(last, scale[last], room.data()) > 0.0) weights = room.data();
        }
        const Words noise = noise_of(knobs.seed, knobs.base, 0, c.n ? RESIDUAL : COUPLED);
        return {last, race(weights, nullptr, c.size, noise)};
    }
};

Verdict follow(const Chain& c, const Knobs& knobs, float* p, std::vector<float>& room) {
    for (int node = 0;; node++) {
        const int64_t token = c.target(node, knobs, p, room);
        if (token < 0 || node == c.n || c.tokens[node] != token) return {node, token};
    }
}

struct Nodes {
    const Chain& c;
    const Knobs& knobs;
    float *p, *most;
    Share next;

    void work() {
        static thread_local std::vector<float> room;
        for (int i; (i = next.take()) <= c.n;)
            most[i] = c.p_of(i, knobs, p + (size_t)i * c.size, room);
    }
};

}  // namespace
}  // namespace hs

using namespace hs;

// found: how many of the n drafted tokens are accepted, and the target's own token; -1 if its numbers are broken.
HS_API void hs_judge(void* pool, const Knobs* knobs, const float* x, int64_t stride, int size, int n,
                     const int64_t* tokens, const float* q, int64_t q_stride, const uint32_t* const* masks, int words,
                     int64_t* found) {
    static thread_local std::vector<float> p, room;
    const Chain chain{x, stride, size, n, tokens, q, q_stride, masks, words};
    Verdict verdict;
    if (knobs->rule == GREEDY || knobs->rule == COUPLED_RULE) {
        p.resize(std::max(p.size(), (size_t)size));
        verdict = follow(chain, *knobs, p.data(), room);
    } else {
        p.resize(std::max(p.size(), (size_t)size * (n + 1)));
        Rejection rule{chain, *knobs, knobs->rule == BLOCK_RULE, p.data(), std::vector<float>(n + 1), {}, {}, {}};
        Nodes nodes{chain, *knobs, p.data(), rule.most.data(), {}};
        if (pool && n)
            ((Pool*)pool)->run([](void* a, int) { ((Nodes*)a)->work(); }, &nodes);
        else
            nodes.work();
        verdict = rule.run(room);
    }
    found[0] = verdict.accepted, found[1] = verdict.token;
}
