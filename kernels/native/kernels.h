// What one instruction set brings: a table of operations on floats. Each sum is taken in one order, whatever the batch
// and the number of threads, so a row's numbers never depend on its neighbours.
#pragma once
#include <cstdint>

#include "abi.h"

// A matrix and the vectors that it meets: `x` has `batch` rows of `ldx` floats, zeros from `columns` on up to a whole
// number of int4's groups.
struct Product {
    D3Kind kind;
    int32_t columns;
    const char* values;
    int64_t row_bytes;
    const float* scales;  // int8: one a row; int4: `groups` a row
    int32_t groups;
    const float* x;
    int64_t ldx;
    int32_t batch;
};

// One row's query heads that share a key/value head, and where that head's entries lie.
struct Attention {
    const float* queries;  // [group, head_dim]
    float* out;            // [group, head_dim] written
    float* scores;         // scratch [group, ATTENTION_CHUNK]
    const float* pool;     // the head's channels of entry 0
    const int32_t* table;  // blocks of the row's entries
    int64_t half_block;    // floats of the keys of a block; its values follow
    int64_t entry;         // floats from one entry to the next
    int32_t group, head_dim, block_size, length;
    float scale;
};

// Positions whose scores are taken before their values are added up; a power of two.
constexpr int ATTENTION_CHUNK = 64;

// Query heads that share a key/value head, at most.
constexpr int MOST_GROUP = 64;

// Input channels that share a scale under int4: byte 64 g + j of a row holds channels 128 g + j and 128 g + 64 + j.
constexpr int INT4_GROUP = 128;

struct Kernels {
    const char* name;
    bool (*runs_here)();
    // out[b * ldo + n - start] for output channels n in [start, stop)
    void (*multiply)(const Product&, int start, int stop, float* out, int64_t ldo);
    void (*attend)(const Attention&);
    void (*rms_norm)(float* out, const float* x, const float* weight, float eps, int n);
    void (*rotate)(float* out, const float* x, const float* turns, int n);  // n / 2 pairs by n / 2 pairs
    void (*swiglu)(float* out, const float* gate, const float* up, int n);
    void (*add)(float* out, const float* x, int n);
};

// Best first. Not every one is in every build.
extern const Kernels* const ALL_KERNELS[];
extern const int NUM_KERNELS;
