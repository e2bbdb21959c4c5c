// The records of a draft head that Python fills in (see head.py, which mirrors them field by field).
#pragma once
#include "decoder.h"
#include "sampling.h"

namespace hs {

struct Head {
    int32_t target_hidden, parts, width, heads, kv_heads, head_dim, ffn, vocab, capacity, positions, window;
    float eps;
    int64_t row_stride, head_stride;   // of keys and values, in numbers
    Matrix fuse, embed, qkv, out, gate_up, down, head;
    Matrix embedding;                  // the target's, packed; or
    const float* plain_embedding;      // [tokens, target_hidden]
    int32_t tokens;                    // rows of the embedding
    const int32_t* ids;                // [vocab] the target's token for each word
    const float *cosines, *sines;      // [positions, head_dim / 2]
    const float* ones;                 // [>= target_hidden, width]: norms have no weights
    uint16_t *keys, *values;           // [rows, kv_heads, capacity, head_dim]
};

// Fields that are not used may be null.
struct HeadCall {
    int32_t first_row, rows;    // of the cache
    int32_t reading;            // 1: slots are read first; 0: go on from ``y``
    int32_t answering;          // 0: only remember the slots
    const int32_t* counts;      // [rows] slots to read; 0 for a row that only comes along
    const int32_t* starts;      // [rows] the first slot to write
    const int64_t* tokens;      // reading: sum(counts), one row behind the other; else [rows]
    const float* const* features;  // [rows] features of the token before the first slot, and on; null: none before it
    float* y;                   // [rows, width] the head's last outputs
    float* logits;              // [rows, vocab]
    // chains
    int32_t most;               // tokens to draft, of the row that wants the most; 0: stop at the logits
    int32_t* budgets;           // [rows] wanted; in the end, what each row has
    float min_chance_to_extend;           // a token that is reached with less than this chance is left out
    float least_next;           // behind a token that is reached with less, nothing more is drafted
    float least_first;          // a row's first token that is reached with less is left out, but for the likeliest one
    float temperature;
    int64_t* drafted;           // [rows, most]; -1 where a row's numbers broke down
    const Knobs* knobs;         // [rows] how a row draws its tokens; null: all rows take the likeliest
    float* q;                   // [rows, most, tokens] what they were drawn from, of rows with the token or block rule
    // What may follow a row's drafted tokens; asked before each of its tokens, by the thread that called. ``before``: the
    // token at offset - 1. ``likely``: the row's guess, or -1: whether one token may follow is found out far sooner than
    // all that may. Returns the only token there is, or -1, and then a mask (see sampling.h), or null: anything, or the guess.
    int64_t (*follow)(int32_t row, int32_t offset, int64_t before, int64_t likely, const uint32_t** mask);
    const uint8_t* masked;      // [rows] 1: rows it is asked about; null: none
    int32_t words;              // of a mask
};

struct Word {
    int number;  // -1: the logits are broken
    float hope;  // about how likely the target will agree, by the logits alone
};

// The next word by its logits [vocab]; drafted tokens before it in this round: ``offset``. knobs null: the likeliest.
Word next_token(const Head& h, const float* logits, const Knobs* knobs, int offset, float temperature, float* q);

}  // namespace hs
