// Bias, min_tokens and penalties on a chain's logits: what maths/distribution.py's ``processed`` says of one row.
//
// Knows: that all of them change a token's logit by what is known of that token, so that only the few tokens of the text
// are looked at. Does not know: what the logits are for.
#include <cmath>
#include <cstring>
#include <vector>

#include "core.h"

namespace hs {

// What Python fills in (see sampling.py). Ids outside of 0 .. size - 1 have no logit and are passed over.
struct Past {
    const int64_t* text;      // prompt, committed output and draft, one behind the other
    int32_t prompt, committed;  // tokens of the prompt; of prompt and output
    int32_t nodes;            // the last committed token and the drafted ones
    float repetition, frequency, presence;
    int32_t biased, banned;   // how many
    const int64_t* bias_ids;
    const float* bias;
    const int64_t* banned_ids;  // not to be drawn while the output is shorter than
    int32_t least;
};

struct Known {
    std::vector<uint8_t> prompt;
    std::vector<int32_t> count;  // in the output
    std::vector<int32_t> tokens;  // those with either
};

}  // namespace hs

using namespace hs;

// x [nodes, stride] -> to [nodes, size].
HS_API void hs_process(const Past* past, const float* x, int64_t stride, int size, float* to) {
    static thread_local Known known;
    known.prompt.resize(size, 0), known.count.resize(size, 0);
    known.tokens.clear();
    const auto meet = [&](int64_t token, bool prompt) {
        if (token < 0 || token >= size) return;
        if (!known.prompt[token] && !known.count[token]) known.tokens.push_back((int32_t)token);
        if (prompt) known.prompt[token] = 1;
        if (!prompt) known.count[token]++;
    };
    for (int i = 0; i < past->committed; i++) meet(past->text[i], i < past->prompt);
    for (int node = 0; node < past->nodes; node++) {
        if (node) meet(past->text[past->committed + node - 1], false);
        float* y = to + (size_t)node * size;
        memcpy(y, x + node * stride, sizeof(float) * (size_t)size);
        for (int i = 0; i < past->biased; i++)
            if (past->bias_ids[i] >= 0 && past->bias_ids[i] < size) y[past->bias_ids[i]] += past->bias[i];
        if (past->committed - past->prompt + node < past->least)
            for (int i = 0; i < past->banned; i++)
                if (past->banned_ids[i] >= 0 && past->banned_ids[i] < size) y[past->banned_ids[i]] += -INFINITY;
        for (const int32_t token : known.tokens) {
            const float v = y[token], count = (float)known.count[token];
            const float pressed = v > 0.0f ? v / past->repetition : v * past->repetition;
            y[token] = pressed - (count * past->frequency + (count > 0.0f ? past->presence : 0.0f));
        }
    }
    for (const int32_t token : known.tokens) known.prompt[token] = 0, known.count[token] = 0;
}
