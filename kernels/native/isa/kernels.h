// What one instruction set brings: a table of operations on floats. Each sum is taken in one order, whatever the batch
// and the number of threads, so a row's numbers never depend on its neighbours.
#pragma once
#include <cstdint>

#include "abi.h"

// Whether the compiler knows the tiles of x86, which Linux gives to a process that asks for them.
#if defined(__x86_64__) && defined(__linux__) && !defined(D3_PORTABLE)
#if defined(__clang__) ? __clang_major__ >= 12 : __GNUC__ >= 11
#define D3_TILES
#endif
#endif

// Weights that are multiplied later: two runs of so many bytes, which begin so far apart.
struct NextWeights {
    const char* from = nullptr;
    int64_t bytes = 0, apart = 0;

    // The nth of `count` parts of it.
    NextWeights part(int nth, int count) const {
        if (!from) return {};
        const int64_t before = bytes * nth / count;
        return {from + before, bytes * (nth + 1) / count - before, apart};
    }
};

// A matrix and the vectors that it meets: `x` has `batch` rows of `ldx` floats, zeros from `columns` on up to a whole
// number of int4's groups.
struct MatmulArgs {
    D3Kind kind;
    int32_t columns;
    const char* values;
    int64_t row_bytes;
    union {
        const float* scales;  // int8, fp8: one a row; of groups and int4: `groups` a row
        const D3Bf12* bf12;
    };
    int32_t groups;
    const float* x;
    int64_t ldx;
    int32_t batch;
    char* prepared;   // the same vectors as `prepare` has made them, or null
    int32_t at_once;  // so many of them
    int64_t ahead;    // so many bytes ahead weights are fetched into the second cache, or 0
};

// Output channels [start, stop) of a product: out[b * ldo + n - start]. And what the worker multiplies after them.
struct Tile {
    int start, stop;
    float* out;
    int64_t ldo;
    NextWeights later = {};
};

// Rows of one sequence at neighbouring positions: some neighbouring heads of keys and values, where their entries lie,
// and the query heads that share them. At most MOST_QUERIES of these in all.
struct AttentionArgs {
    const float* queries;  // [rows, heads, group, head_dim]
    float* out;            // [rows, heads, group, head_dim] written
    int64_t stride;        // floats from one row to the next, of both
    float* scores;         // scratch [rows, group, ATTENTION_CHUNK]
    float* keys;           // scratch [ATTENTION_CHUNK, head_dim up to whole vectors]
    float* values;         // scratch [ATTENTION_CHUNK, head_dim], beside entries of 8 bits
    const void* pool;      // the first head's channels of entry 0, floats, or of 8 bits where there are scales
    const float* scales;   // the first head's scales of block 0's keys, or null
    const int32_t* table;  // blocks of the sequence's entries
    int64_t half_block;    // channels of all heads of the keys of a block; its values follow
    int64_t half_scales;   // as many scales are there of the keys of a block; those of its values follow
    int64_t entry;         // channels from one entry to the next
    int32_t rows, heads, group, head_dim, block_size;
    int32_t length;  // entries that the first row looks at, each later row at one more
    float scale;
    bool prefetches;         // whether entries are asked for before they are looked at
    bool is_prefetched;    // whether those of its first chunk have been
    const int32_t* next;  // blocks of the text that the same worker probably looks at after this one, or null
    int32_t next_length;  // entries of it
};

// Positions whose scores are taken before their values are added up; and those that a thread goes through at once.
constexpr int ATTENTION_CHUNK = 64;
constexpr int ATTENTION_SPAN = 256;
constexpr int MAX_QUERIES = 64;

// Query heads that share a key/value head, at most.
constexpr int MAX_GROUP = MAX_QUERIES;

// Floats of the widest vectors.
constexpr int MAX_LANES = 16;

// Input channels that share a scale of a group. Under int4 byte 64 g + j of a row holds channels 128 g + j and
// 128 g + 64 + j.
constexpr int SCALE_GROUP = 128;

// Rows that lie in lanes together (lanes.py), and bytes of one that are always there.
constexpr int INTERLEAVED_ROWS = 16, INTERLEAVED_STEP = 64;
inline bool is_interleaved(int kind) { return kind == D3_INT4X16 || kind == D3_INT8X16; }
inline bool is_int4(D3Kind kind) { return kind == D3_INT4 || kind == D3_INT4X16; }

// Columns of a group of a packed matrix (packed.py), and its bytes: signs and mantissas, then the codes of exponents.
constexpr int BF12_GROUP = 64, BF12_BYTES = 96;
constexpr int64_t bf12_groups(int columns) { return (columns + BF12_GROUP - 1) / BF12_GROUP; }
// Of its rows as bfloat16 they take so many bytes.
constexpr int64_t unpacked_bytes(int columns) { return bf12_groups(columns) * BF12_GROUP * 2; }

// What an instruction set's `widen_e4m3` leaves out: it reads a byte as the bits of a half float, whose exponents begin
// so much lower.
constexpr float E4M3_UNIT = 256.0f;

// So many bytes of a matrix at once meet all vectors that are floats.
constexpr int64_t TILE_BYTES = 128 * 1024;

struct Kernels {
    const char* name;
    bool (*runs_here)();
    void (*multiply)(const MatmulArgs&, const Tile&);
    // Where products with a kind of matrix take vectors in another form: how many bytes it has, a multiple of 64 for 16
    // vectors each, in how many pieces it is written, and what writes one to p.prepared. Null where they take floats.
    int64_t (*prepared_bytes)(D3Kind, int columns, int rows);
    int (*prepared_tiles)(const MatmulArgs&);
    void (*prepare)(const MatmulArgs&, int tile);
    int64_t tile_bytes;  // so many of a matrix at once meet vectors in that form
    bool reads_interleaved;     // whether it knows matrices in lanes, always with vectors in that form
    // So many vectors meet a weight at once, so many in that form, and so many one of a packed matrix: with more, rows
    // are read again from a cache, and what comes later is fetched meanwhile.
    int widest, widest_prepared, widest_bf12;
    // Up to so many vectors meet a packed matrix as it lies. For more `unpack` makes bfloat16 of some rows first,
    // `unpacked_bytes` each, and asks for the packed ones so many bytes ahead.
    int max_bf12;
    void (*unpack)(const D3Matrix&, int start, int stop, int64_t ahead, char* to);
    // Products of many vectors, bit for bit the same: `panel` channels at most are widened into a panel of
    // `panel_floats(columns)` floats, `strip` vectors at most packed into a strip of `strip_floats(columns)`.
    // From `many` vectors on that costs less than it saves; from `many_of_floats` on where weights are wide already.
    int panel, strip, many, many_of_floats;
    int64_t (*panel_floats)(int columns);
    int64_t (*strip_floats)(int columns);
    void (*pack)(const MatmulArgs&, int first, int rows, float* strip);
    void (*widen)(const MatmulArgs&, int start, int stop, float* panel);
    void (*multiply_panel)(const MatmulArgs&, const float* panel, int start, int stop, const float* strip, int rows,
                           float* out, int64_t ldo);
    // Attention span by span, each into [rows, group, head_dim + 2] floats; the others join the first in their order.
    void (*attend_span)(const AttentionArgs&, int span, float* partial);
    void (*join_span)(const AttentionArgs&, int span, float* earlier, float* partial);
    void (*finish_attention)(const AttentionArgs&, float* partial);
    // The e4m3 of n floats and their scale, as the reference has them (kv_pool.py).
    void (*write_e4m3)(const float* from, int n, uint8_t* to, float* scale);
    void (*rms_norm)(float* out, const float* x, const float* weight, float eps, int n);
    void (*rotate)(float* out, const float* x, const float* turns, int n);  // n / 2 pairs by n / 2 pairs
    void (*swiglu)(float* out, const float* gate, const float* up, int n);
    void (*add)(float* out, const float* x, int n);
};

// Best first. Not every one is in every build.
extern const Kernels* const ALL_KERNELS[];
extern const int NUM_KERNELS;
