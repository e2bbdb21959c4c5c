// The next word of a drafted chain, taken or drawn as its request asks for (drafters/draft_sampler.py says it in torch).
//
// Knows: a head's logits, and how likely a guess is to hold. Does not know: where logits come from, who verifies.
#include <algorithm>
#include <cmath>

#include "head.h"

// How often a drawn guess holds was read off the shipped head (1 - TV(p, q) by the largest q, temperatures 0.8 and 1).

namespace hs {
namespace {

// The likeliest word, and its probability at temperature ``temperature``.
Word likeliest(const float* logits, int vocab, float temperature) {
    const int best = (int)first_largest(logits, vocab);
    if (!std::isfinite(logits[best])) return {-1, 0.0f};
    const vf most = splat(logits[best]), inverse = splat(1.0f / temperature);
    const double mass = summed(vocab, [&](int i, bool whole) {
        return exponential(((whole ? load(logits + i) : load_some(logits + i, vocab - i, -INFINITY)) - most) * inverse);
    });
    return {best, (float)(1.0 / mass)};
}

}  // namespace

Word next_token(const Head& h, const float* logits, const Knobs* knobs, int offset, float temperature, float* q) {
    if (!knobs || knobs->rule == GREEDY) return likeliest(logits, h.vocab, temperature);
    static thread_local std::vector<float> room;
    room.resize(h.vocab);
    float* p = room.data();
    const float most = distribution(logits, h.vocab, *knobs, p);
    if (!std::isfinite(most)) return {-1, 0.0f};
    if (knobs->rule == COUPLED_RULE) {  // the noise is the target's own at that position
        const Words noise = noise_of(knobs->seed, knobs->base + offset, 0, COUPLED);
        return {(int)race(p, h.ids, h.vocab, noise), likeliest(logits, h.vocab, temperature).hope};
    }
    const Words noise = noise_of(knobs->seed, knobs->base, offset + 1, DRAFT);
    std::fill(q, q + h.tokens, 0.0f);
    for (int i = 0; i < h.vocab; i++)
        if (p[i] > 0.0f) q[h.ids[i]] = p[i];
    return {(int)race(p, h.ids, h.vocab, noise), 0.2f + 0.65f * most};
}

}  // namespace hs
