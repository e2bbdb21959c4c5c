// What sampled rows need of the kernels: a row's distribution, the noise of its tokens, and a race among them.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "core.h"

namespace hs {

// A row's settings (see SamplingParams); sampling.py mirrors them field by field.
struct Knobs {
    float temperature, min_p, top_p;
    int32_t rule;
    int64_t top_k, seed, base;  // base: committed tokens, which noise is keyed by
};

enum Rule : int32_t { GREEDY = 0, COUPLED_RULE = 1, TOKEN_RULE = 2, BLOCK_RULE = 3 };

// -- noise (see maths/noise.py, whose integers these are)

enum Stream : int64_t { ACCEPT = 1, RESIDUAL = 2, DRAFT = 3, COUPLED = 4 };

struct Words {
    uint32_t low, high;
};

HS_INLINE uint64_t mix64(uint64_t x) {
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ x >> 27) * 0x94d049bb133111ebull;
    return x ^ x >> 31;
}

HS_INLINE Words noise_of(int64_t seed, int64_t base, int64_t offset, int64_t stream) {
    const uint64_t golden = 0x9e3779b97f4a7c15ull;
    const uint64_t key = mix64(mix64((uint64_t)seed + golden) + (uint64_t)base * 0xd1b54a32d192ed03ull);
    const uint64_t x = mix64(key + (uint64_t)offset * 0x8cb92ba72f3d8dd7ull + (uint64_t)stream * golden);
    return {(uint32_t)x, (uint32_t)(x >> 32)};
}

HS_INLINE float uniform(Words w) { return ((float)(w.low >> 9) + 0.5f) * 1.1920928955078125e-07f; }

// -- rows

HS_INLINE vf load_some(const float* p, int n, float other) {  // the first n of sixteen
    float t[LANES];
    for (int i = 0; i < LANES; i++) t[i] = i < n ? p[i] : other;
    return load(t);
}

// The sum of value(i, whole) over i = 0, 16, .. < size, in one order: a few hundred floats in sixteen lanes, and those as
// doubles. whole: all of i .. i + 15 are there; else what is not there must give 0.
template <typename Value> HS_INLINE double summed(int size, Value value) {
    double total = 0.0;
    int i = 0;
    while (i + LANES <= size) {
        vf part = splat(0.0f);
        for (const int end = std::min(i + 32 * LANES, size / LANES * LANES); i < end; i += LANES) part += value(i, true);
        total += sum(part);
    }
    if (i < size) total += sum(value(i, false));
    return total;
}

// What a grammar allows: a bit for each token, the lowest first; tokens past its end are not allowed. The numbers of those
// that are not do not count, broken or not.
struct Allowed {
    const uint32_t* mask;
    int words;

    HS_INLINE uint32_t word(int number) const { return number < words ? mask[number] : 0; }

    // The token, where there is only one among the first ``size``; -1: there are several; -2: there is none.
    int64_t only(int size) const;

    // x without what is not allowed.
    HS_INLINE void apply(const float* x, int size, float* to) const {
        for (int i = 0; i < size; i += LANES) {
            const vi ok = lanes(i);
            const vf v = choose(ok, i + LANES <= size ? load(x + i) : load_some(x + i, size - i, 0.0f), splat(-INFINITY));
            if (i + LANES <= size) store(to + i, v);
            if (i + LANES > size) memcpy(to + i, &v, sizeof(float) * (size_t)(size - i));
        }
    }

    // Which of the sixteen from i on (a multiple of sixteen) are allowed: -1 or 0 each.
    HS_INLINE vi lanes(int i) const {
        const uint32_t bits = word(i / 32) >> (i % 32) & 0xffff;
        return (splat_int((int32_t)bits) & lane_bits()) != splat_int(0);
    }
};

// Logits x -> p by the row's settings; returns the largest p. NaN all over if there is NaN in x, or nothing finite.
float distribution(const float* x, int size, const Knobs& knobs, float* p);

// The first of the largest p / exponential noise; NaN is the largest of all. ids: the tokens' numbers, null for 0, 1 ..
int64_t race(const float* p, const int32_t* ids, int size, Words noise);

// The first of the largest values; NaN is the largest of all.
int64_t first_largest(const float* x, int size);

// The same of those that are allowed; -1: there are none.
int64_t first_largest(const float* x, int size, const Allowed& allowed);

}  // namespace hs
