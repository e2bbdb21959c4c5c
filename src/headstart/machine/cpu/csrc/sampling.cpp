// The loops over the vocabulary that everything sampled goes through (maths/vocab_ops.py says what they must give).
//
// Knows: temperature, truncation, softmax, and races of exponential clocks. Does not know: tokens, requests, rules.
//
// A row's numbers depend on nothing but the row: sums go over sixteen lanes in a fixed order, whatever thread does them.
// Truncation never sorts a vocabulary. It looks for the smallest value that stays among those near the top, and widens
// the search only where they are not enough. NaN and rows without a finite logit come out as NaN.
#include "sampling.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>

#include "pool.h"

namespace hs {
namespace {

HS_INLINE vu splat_word(uint32_t x) { return (vu)splat_int((int32_t)x); }

HS_INLINE bool any(vi mask) {  // lanes are 0 or -1
#if defined(__AVX512F__)
    return _mm512_test_epi32_mask((__m512i)mask, (__m512i)mask) != 0;
#elif defined(__AVX2__)
    union { vi v; __m256i h[2]; } m{mask};
    const __m256i both = _mm256_or_si256(m.h[0], m.h[1]);
    return !_mm256_testz_si256(both, both);
#else
    int32_t found = 0;
    for (int i = 0; i < LANES; i++) found |= mask[i];
    return found != 0;
#endif
}

// -- softmax

// exp(x) for x <= 0, and exactly 0 where float32 would hardly hold it (so that a token without mass has none).
HS_INLINE vf mass_of(vf x) {
    const vf e = exponential(x);
    return choose(x < splat(-87.0f), splat(0.0f), e);
}

struct Peak {
    float most;
    double total;
};

// e[i] = exp((x[i] - largest x) / temperature), and their sum. The largest e is exactly 1.
Peak unscaled(const float* x, int size, float temperature, float* e) {
    vf top[4] = {splat(-INFINITY), splat(-INFINITY), splat(-INFINITY), splat(-INFINITY)};
    int i = 0;
    for (; i + 4 * LANES <= size; i += 4 * LANES)
        for (int k = 0; k < 4; k++) top[k] = larger(load(x + i + k * LANES), top[k]);  // a NaN is passed over here
    for (; i < size; i += LANES) top[0] = larger(load_some(x + i, size - i, -INFINITY), top[0]);
    const float most = greatest(larger(larger(top[0], top[1]), larger(top[2], top[3])));
    const vf high = splat(most), inverse = splat(1.0f / temperature);
    const double total = summed(size, [&](int at, bool whole) {
        const vf v = mass_of(((whole ? load(x + at) : load_some(x + at, size - at, -INFINITY)) - high) * inverse);
        if (whole) store(e + at, v);
        if (!whole) memcpy(e + at, &v, sizeof(float) * (size_t)(size - at));
        return v;
    });
    return {most, total};
}

// -- truncation

struct Above {
    int count;
    double mass;
};

Above at_least(const float* e, int size, float floor) {
    vi count = splat_int(0);
    const double mass = summed(size, [&](int i, bool whole) {
        const vf v = whole ? load(e + i) : load_some(e + i, size - i, -1.0f);
        const vi in = v >= splat(floor);
        count -= in;
        return (vf)((vi)v & in);
    });
    return {sum(count), mass};
}

// All values from ``low`` up to but not including ``high``, in the order of their places.
int gather(const float* e, int size, float low, float high, float* to) {
    int n = 0, i = 0;
#if defined(__AVX512F__)
    const __m512 least = _mm512_set1_ps(low), most = _mm512_set1_ps(high);
    for (; i + LANES <= size; i += LANES) {
        const __m512 v = _mm512_loadu_ps(e + i);
        const __mmask16 in = _mm512_cmp_ps_mask(v, least, _CMP_GE_OQ) & _mm512_cmp_ps_mask(v, most, _CMP_LT_OQ);
        if (!in) continue;
        _mm512_storeu_ps(to + n, _mm512_maskz_compress_ps(in, v));
        n += __builtin_popcount(in);
    }
#else
    for (; i + LANES <= size; i += LANES) {
        if (!any((load(e + i) >= splat(low)) & (load(e + i) < splat(high)))) continue;
        for (int k = 0; k < LANES; k++) to[n] = e[i + k], n += e[i + k] >= low && e[i + k] < high;
    }
#endif
    for (; i < size; i++)
        if (e[i] >= low && e[i] < high) to[n++] = e[i];
    return n;
}

// What top-k and top-p ask: the value, from the largest down, with which the values so far are enough, by their number
// or by their sum. Nothing under ``low`` counts; if all of it is not enough, the answer is ``low``.
template <bool COUNT> float enough(const float* e, int size, float low, double wanted, std::vector<float>& room) {
    const auto so_far = [](const Above& a) { return COUNT ? (double)a.count : a.mass; };
    float high = 2.0f;  // above all of them
    Above above{0, 0.0}, below = at_least(e, size, low);
    if (so_far(below) < wanted) return low;
    // Near the top there are usually enough; elsewhere, halve the powers of two in between.
    for (int tries = 0; tries < 24 && below.count - above.count > 256; tries++) {
        const float middle = high > 1.0f ? 0.015625f : std::sqrt(std::max(low, 1e-30f)) * std::sqrt(high);
        if (!(middle > low && middle < high)) break;
        const Above found = at_least(e, size, middle);
        if (so_far(found) >= wanted)
            low = middle, below = found;
        else
            high = middle, above = found;
    }
    if ((int)room.size() < size + LANES) room.resize(size + LANES);
    float *begin = room.data(), *end = begin + gather(e, size, low, high, begin);
    std::sort(begin, end, std::greater<float>());
    double before = so_far(above);
    for (; begin < end; begin++)
        if ((before += COUNT ? 1.0 : (double)*begin) >= wanted) return *begin;
    return low;  // sums are rounded: all of it
}

// The smallest e that stays: min-p, then top-k, then top-p. e's largest is 1, its sum ``total``.
float smallest_kept(const float* e, int size, double total, const Knobs& knobs, std::vector<float>& room) {
    const bool few = knobs.top_k < size, cut = knobs.top_p < 1.0f;
    if (!few && !cut) return knobs.min_p;
    float low = std::max(knobs.min_p, std::numeric_limits<float>::min());  // what has no mass never stays
    if (few) {
        low = enough<true>(e, size, low, (double)knobs.top_k, room);
        if (cut) {  // top-p's share is one of k tokens, though all that equal the last of them stay
            const Above all = at_least(e, size, low);
            total = all.mass - (double)low * (double)std::max<int64_t>(0, all.count - knobs.top_k);
        }
    } else if (knobs.min_p > 0.0f) {
        total = at_least(e, size, low).mass;
    }
    return cut ? enough<false>(e, size, low, (double)knobs.top_p * total, room) : low;
}

// p = e / its sum, nothing under the floor. Returns the largest.
float scale(float* e, int size, double total, float floor) {
    if (floor > 0.0f) total = at_least(e, size, floor).mass;
    const vf inverse = splat((float)(1.0 / total)), f = splat(floor);
    int i = 0;
    for (; i + LANES <= size; i += LANES) {
        const vf v = load(e + i);
        store(e + i, (vf)((vi)(v * inverse) & (v >= f)));
    }
    for (; i < size; i++) e[i] = e[i] >= floor ? e[i] * inverse[0] : 0.0f;
    return inverse[0];
}

}  // namespace

float distribution(const float* x, int size, const Knobs& knobs, float* p) {
    static thread_local std::vector<float> room;
    const Peak peak = unscaled(x, size, knobs.temperature, p);
    if (!std::isfinite(peak.total) || !std::isfinite(peak.most)) {
        std::fill(p, p + size, std::numeric_limits<float>::quiet_NaN());
        return std::numeric_limits<float>::quiet_NaN();
    }
    return scale(p, size, peak.total, smallest_kept(p, size, peak.total, knobs, room));
}

// -- races

namespace {

HS_INLINE vu fold_bits(vu x, int bits) { return x ^ (x >> bits); }

HS_INLINE vu field(vu token) {
    vu x = token * splat_word(0x7f4a7c15);
    x = fold_bits(x, 16) * splat_word(0x7feb352d);
    x = fold_bits(x, 15) * splat_word(0x846ca68b);
    return fold_bits(x, 16);
}

// Uniform in (0, 1): what the token's exponential number is made of.
HS_INLINE vf uniform(vu token, vu low, vu high) {
    vu x = fold_bits(field(token) + low, 16) * splat_word(0x7feb352d) + high;
    x = fold_bits(x, 15) * splat_word(0x846ca68b);
    x = fold_bits(x, 16) & splat_word(0x7fffffff);
    const vf v = (to_floats((vi)x) + splat(0.5f)) * splat(4.656612873077393e-10f);
    const vf most = splat(1.0f - 5.960464477539063e-08f);
    return choose(v > most, most, v);
}

}  // namespace

int64_t race(const float* p, const int32_t* ids, int size, Words noise) {
    const vu first = splat_word(noise.low), second = splat_word(noise.high);
    float best = 0.0f;
    int64_t winner = 0;
    for (int i = 0; i < size; i += LANES) {
        const int n = size - i < LANES ? size - i : LANES;
        const vf v = n == LANES ? load(p + i) : load_some(p + i, n, 0.0f);
        if (!any(!(v == splat(0.0f)))) continue;  // nothing with mass, and no NaN
        vu token = (vu)(lane_numbers() + splat_int(i));
        if (ids) {
            int32_t t[LANES];
            for (int k = 0; k < LANES; k++) t[k] = ids[i + (k < n ? k : 0)];
            memcpy(&token, t, sizeof t);
        }
        const vf u = uniform(token, first, second);
        // -log(1 - u) is never under u, so few need the logarithm.
        if (!any(!(v * splat(1.00001f) < u * splat(best)))) continue;
        for (int k = 0; k < n; k++) {
            if (v[k] == 0.0f || v[k] * 1.00001f < u[k] * best) continue;
            const float score = v[k] / -std::log1p(-u[k]);
            if (std::isnan(score)) return i + k;
            if (score > best) best = score, winner = i + k;
        }
    }
    return winner;
}

int64_t first_largest(const float* x, int size) {
    vf top = splat(-INFINITY);
    vi broken = splat_int(0);
    int i = 0;
    for (; i + LANES <= size; i += LANES) {
        const vf v = load(x + i);
        broken |= v != v;
        top = larger(v, top);
    }
    float most = greatest(top);
    const bool odd = any(broken);
    for (int k = i; k < size; k++) most = x[k] > most ? x[k] : most;
    for (i = 0; i < size; i++)
        if (odd ? std::isnan(x[i]) : x[i] == most || std::isnan(x[i])) return i;
    return 0;
}

int64_t Allowed::only(int size) const {
    int64_t found = -2;
    for (int w = 0; w * 32 < size; w++) {
        uint32_t bits = word(w);
        if (!bits) continue;
        if (size - w * 32 < 32) bits &= (1u << (size - w * 32)) - 1;
        if (!bits) continue;
        if (found >= 0 || (bits & (bits - 1))) return -1;
        found = w * 32 + __builtin_ctz(bits);
    }
    return found;
}

int64_t first_largest(const float* x, int size, const Allowed& allowed) {
    vf top = splat(-INFINITY);
    vi broken = splat_int(0);
    const int whole = size / LANES * LANES;
    for (int i = 0; i < whole; i += LANES) {
        if (!(allowed.word(i / 32) >> (i % 32) & 0xffff)) continue;  // most of many masks
        const vi ok = allowed.lanes(i);
        const vf v = choose(ok, load(x + i), splat(-INFINITY));
        broken |= v != v;
        top = larger(v, top);
    }
    float most = greatest(top);
    bool odd = any(broken);
    for (int i = whole; i < size; i++) {
        if (!(allowed.word(i / 32) >> (i % 32) & 1)) continue;
        odd |= std::isnan(x[i]);
        most = x[i] > most ? x[i] : most;
    }
    for (int w = 0; w * 32 < size; w++)
        for (uint32_t bits = allowed.word(w); bits; bits &= bits - 1) {
            const int i = w * 32 + __builtin_ctz(bits);
            if (i < size && (odd ? std::isnan(x[i]) : x[i] == most)) return i;
        }
    return -1;
}

namespace {

struct Rows {
    const float* x;
    int rows, nodes, size;
    const float *temperature, *min_p, *top_p;
    const int64_t* top_k;
    const uint32_t *low, *high;
    float* p;
    int64_t* tokens;
    Share next;

    void work() {
        for (int i; (i = next.take()) < rows * nodes;) {
            const int r = i / nodes;
            float* to = p + (size_t)i * size;
            if (x) {
                Knobs knobs{};
                knobs.temperature = temperature ? temperature[r] : 1.0f;
                knobs.min_p = min_p ? min_p[r] : 0.0f;
                knobs.top_p = top_p ? top_p[r] : 1.0f;
                knobs.top_k = top_k ? top_k[r] : std::numeric_limits<int64_t>::max();
                distribution(x + (size_t)i * size, size, knobs, to);
            }
            if (tokens) tokens[i] = race(to, nullptr, size, {low[i], high[i]});
        }
    }
};

}  // namespace
}  // namespace hs

using namespace hs;

// Logits x [rows, nodes, size] -> p of the same shape; the knobs are one a row, or null. With tokens [rows, nodes], also
// a race of each with the noise of its two words. x null: p is given, and only raced.
HS_API void hs_sample(void* pool, const float* x, int rows, int nodes, int size, const float* temperature, const float* min_p,
                      const int64_t* top_k, const float* top_p, const uint32_t* low, const uint32_t* high, float* p,
                      int64_t* tokens) {
    Rows all{x, rows, nodes, size, temperature, min_p, top_p, top_k, low, high, p, tokens, {}};
    if (pool && rows * nodes > 1)
        ((Pool*)pool)->run([](void* a, int) { ((Rows*)a)->work(); }, &all);
    else
        all.work();
}

// The two words of n keys (see noise.keys).
HS_API void hs_keys(const int64_t* seeds, const int64_t* bases, const int64_t* offsets, const int64_t* streams, int n,
                    uint32_t* low, uint32_t* high) {
    for (int i = 0; i < n; i++) {
        const Words w = noise_of(seeds[i], bases[i], offsets[i], streams[i]);
        low[i] = w.low, high[i] = w.high;
    }
}
