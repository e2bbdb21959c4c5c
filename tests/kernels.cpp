// Products and a small decoder from made-up bytes, as hexadecimal numbers: the same text from every processor.
//
// Compiled with machine/cpu/csrc by tests/test_machine_cpu_arm.py, here and for ARM.
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "decoder.h"

using namespace hs;

HS_API int64_t hs_packed_bytes(int, int, int);
HS_API void hs_pack(int, const float*, const int32_t*, int, int, uint8_t*);
HS_API int hs_pack_gguf(int, int, const uint8_t*, int64_t, const int32_t*, int, int, uint8_t*);
HS_API void hs_unpack(const Matrix*, const int32_t*, int, float*);
HS_API const char* hs_instructions();
HS_API void* hs_pool_new(int);
HS_API void hs_product(void*, const Matrix*, const float*, int, float*);
HS_API void* hs_model_new(const Model*);
HS_API int hs_forward(void*, void*, const Call*);

static uint32_t state = 7;
static uint32_t bits() { return state = state * 1664525u + 1013904223u, state >> 8; }
static float number() { return ((float)(bits() % 2001) - 1000.0f) / 997.0f; }
static std::vector<float> numbers(size_t n) {
    std::vector<float> found(n);
    for (float& x : found) x = number();
    return found;
}

// One line for each run: a checksum that a single bit changes, and the first numbers.
static void tell(const char* name, int what, const std::vector<float>& found) {
    uint64_t check = 1469598103934665603u;
    for (float x : found) {
        uint32_t b;
        memcpy(&b, &x, 4);
        check = (check ^ b) * 1099511628211u;
    }
    printf("%s %d %016llx %.9g %.9g\n", name, what, (unsigned long long)check, found[0], found[found.size() / 2]);
}

static std::vector<std::vector<uint8_t>> kept;
static std::vector<std::vector<float>> kept_floats;

// A matrix of a kind: from a GGUF file's bytes where there is such a type, else from floats.
static Matrix made(int kind, int outputs, int inputs) {
    static const struct { int type, bytes, inputs, halves[2]; } TYPES[] = {
        {8, 34, 32, {0, 0}}, {3, 20, 32, {0, 2}}, {}, {12, 144, 256, {0, 2}}, {13, 176, 256, {0, 2}}, {14, 210, 256, {208, 208}}};
    std::vector<int32_t> order(outputs);
    for (int i = 0; i < outputs; i++) order[i] = outputs - 1 - i;
    kept.emplace_back((size_t)hs_packed_bytes(kind, outputs, inputs) + 8192);
    uint8_t* to = kept.back().data();
    if (kind == FLOAT) {
        hs_pack(kind, numbers((size_t)outputs * inputs).data(), order.data(), outputs, inputs, to);
        return {kind, outputs, inputs, to, nullptr};
    }
    const auto& type = TYPES[kind];
    std::vector<uint8_t> raw((size_t)outputs * inputs / type.inputs * type.bytes);
    for (uint8_t& x : raw) x = (uint8_t)bits();
    for (size_t at = 0; at < raw.size(); at += type.bytes)
        for (int half : type.halves) {
            const uint16_t scale = float_to_half(number() * 0.01f);
            memcpy(&raw[at + half], &scale, 2);
        }
    if (hs_pack_gguf(kind, type.type, raw.data(), (int64_t)inputs / type.inputs * type.bytes, order.data(), outputs, inputs, to))
        printf("kind %d was not packed\n", kind);
    return {kind, outputs, inputs, to, nullptr};
}

static const float* vector(size_t n) {
    kept_floats.push_back(numbers(n));
    return kept_floats.back().data();
}

static void products(void* pool) {
    const char* names[] = {"INT8", "INT4", "FLOAT", "Q4_K", "Q5_K", "Q6_K"};
    for (int kind = 0; kind < KINDS && kind < 6; kind++) {
        const Matrix m = made(kind, 48, 512);
        std::vector<float> row(512), x = numbers(60 * 512);
        const int32_t which = 19;
        hs_unpack(&m, &which, 1, row.data());
        tell(names[kind], 0, row);
        for (int tokens : {1, 2, 3, 5, 8, 20, 59}) {
            std::vector<float> y((size_t)tokens * 48);
            hs_product(pool, &m, x.data(), tokens, y.data());
            tell(names[kind], tokens, y);
        }
    }
}

static void decoder(void* pool) {
    const int hidden = 256, heads = 4, dim = 64, ffn = 256, vocab = 96, capacity = 64;
    std::vector<uint16_t> cache[2][2];
    std::vector<Layer> layers(2);
    for (int l = 0; l < 2; l++) {
        for (auto& half : cache[l]) half.resize((size_t)2 * capacity * dim);
        Layer& to = layers[l] = {};
        to.qkv = made(Q4_K, (heads + 2) * dim, hidden);
        to.v = made(Q6_K, 2 * dim, hidden);
        to.out = made(Q5_K, hidden, heads * dim);
        to.gate_up = made(INT4, 2 * ffn, hidden);
        to.down = made(Q6_K, hidden, ffn);
        to.input_norm = vector(hidden), to.post_norm = vector(hidden);
        to.q_norm = vector(dim), to.k_norm = vector(dim);
        to.keys = cache[l][0].data(), to.values = cache[l][1].data();
    }
    Model m = {};
    m.hidden = hidden, m.heads = heads, m.kv_heads = 2, m.head_dim = dim, m.ffn = ffn, m.vocab = vocab, m.layers = 2;
    m.positions = capacity, m.eps = 1e-5f, m.capacity = capacity;
    m.row_stride = (int64_t)2 * capacity * dim, m.head_stride = (int64_t)capacity * dim;
    m.embedding = m.head = made(INT8, vocab, hidden);
    m.norm = vector(hidden), m.cosines = vector((size_t)capacity * dim / 2), m.sines = vector((size_t)capacity * dim / 2);
    m.layer = layers.data();
    void* handle = hs_model_new(&m);
    int32_t length = 0;
    for (int width : {17, 1, 5, 1}) {
        std::vector<int64_t> tokens(width);
        for (int64_t& t : tokens) t = bits() % vocab;
        std::vector<float> logits((size_t)width * vocab);
        Call c = {};
        c.rows = 1, c.width = width, c.keep = width, c.tokens = tokens.data(), c.lengths = &length, c.logits = logits.data();
        if (hs_forward(handle, pool, &c)) puts("refused");
        tell("decoder", width, logits);
        length += width;
    }
}

int main() {
    void* pool = hs_pool_new(2);
    fprintf(stderr, "%s\n", hs_instructions());
    products(pool);
    decoder(pool);
    fflush(stdout);
    _Exit(0);  // the pool's threads live as long as the process
}
