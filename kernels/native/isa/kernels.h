// The table of operations of one instruction set. Each sum has one order, whatever the batch and the number of threads,
// so the numbers of a row do not depend on other rows.
#pragma once
#include <cstdint>
#include <cstring>

#include "types.h"

// Whether the compiler knows AMX. Linux grants it to a process on request.
#if defined(__x86_64__) && defined(__linux__) && !defined(D3_PORTABLE)
#if defined(__clang__) ? __clang_major__ >= 12 : __GNUC__ >= 11
#define D3_AMX
#endif
#endif

// Weights of a later matmul: two ranges of `bytes` bytes, `apart` bytes from each other.
struct NextWeights {
    const char* from = nullptr;
    int64_t bytes = 0, apart = 0;

    // The nth of `count` parts.
    NextWeights part(int nth, int count) const {
        if (!from) return {};
        const int64_t before = bytes * nth / count;
        return {from + before, bytes * (nth + 1) / count - before, apart};
    }
};

// A matrix and its input vectors: `x` has `batch` rows of `ldx` floats, zeros from `columns` up to a whole int4 group.
// Pairs of bfloat16 numbers stand for floats there, and count as one column.
struct MatmulArgs {
    D3Kind kind;
    int32_t columns;
    const char* values;
    int64_t row_bytes;
    union {
        const float* scales;  // int8, fp8: one a row; fp8 groups and int4: `groups` a row
        const D3Bf12* bf12;
    };
    int32_t groups;
    const float* x;
    int64_t ldx;
    int32_t batch;
    char* prepared;   // the vectors as `prepare` wrote them, or null
    int32_t at_once;  // the number of vectors prepared together
    int64_t ahead;    // L2 prefetch distance in bytes, or 0
    bool one_stream;  // whether one or two vectors read weights as one stream
};

// Output channels [start, stop) of a matmul: out[b * ldo + n - start]. `later` is what the thread multiplies next.
struct Tile {
    int start, stop;
    float* out;
    int64_t ldo;
    NextWeights later = {};
};

// Rows of one sequence at neighbouring positions, neighbouring KV heads, and the query heads that share them: at most
// MAX_QUERIES of these in all.
struct AttentionArgs {
    const float* queries;     // [rows, heads, group, head_dim]
    float* out;               // [rows, heads, group, head_dim] written
    int64_t stride;           // floats from one row to the next, of both
    float* scores;            // scratch [rows, group, ATTENTION_CHUNK]
    float* keys;              // scratch [ATTENTION_CHUNK, head_dim padded to whole vectors]
    float* values;            // scratch [ATTENTION_CHUNK, head_dim], for an 8-bit KV cache
    const void* pool;         // the first head's key at the pool's first position: floats, or e4m3 with scales
    const float* scales;      // the first head's scales of block 0's keys, or null
    const int32_t* table;     // blocks of the sequence
    int64_t half_block;       // channels of all keys of a block; its values follow
    int64_t half_scales;      // scales of all keys of a block; those of its values follow
    int64_t position_stride;  // channels from one position to the next
    int32_t rows, heads, group, head_dim, block_size;
    int32_t length;  // positions up to the first row's own, which is the last; up to each later row's one more
    int32_t window;  // positions that a row attends to at most
    float scale;
    float cap;            // a soft cap of scores, or 0
    bool prefetches;      // whether to prefetch keys and values
    bool is_prefetched;   // whether those of the first chunk are prefetched already
    const int32_t* next;  // blocks of the context that the same thread probably attends to next, or null
    int32_t next_length;  // its positions
};

// A map of an adapter (D3LowRank).
struct MapArgs {
    int32_t kind, rank, columns;
    int64_t down_stride, up_stride;
    const char *down, *up;
};

// A chunk: positions that are scored before their values are added. A span: positions that one thread handles at once.
constexpr int ATTENTION_CHUNK = 64;
constexpr int ATTENTION_SPAN = 256;
constexpr int MAX_QUERIES = 64;

// The most query heads that share a KV head.
constexpr int MAX_GROUP = MAX_QUERIES;

// Floats of the widest vectors.
constexpr int MAX_LANES = 16;

// Input channels that share the scale of a group. Byte 64 g + j of an int4 row holds channels 128 g + j and 128 g + 64
// + j.
constexpr int SCALE_GROUP = 128;

// Rows that are interleaved (kernels/interleaved.py), and the bytes to which each is padded.
constexpr int INTERLEAVED_ROWS = 16, INTERLEAVED_STEP = 64;
inline bool is_in_interleaved_blocks(int kind) { return kind >= D3_Q4_0X16; }
inline bool is_interleaved(int kind) {
    return kind == D3_INT4X16 || kind == D3_INT8X16 || is_in_interleaved_blocks(kind);
}
inline bool is_int4(D3Kind kind) { return kind == D3_INT4 || kind == D3_INT4X16; }

// Columns of a bf12 group (kernels/bf12.py), and its bytes: signs and mantissas, then exponent codes.
constexpr int BF12_GROUP = 64, BF12_BYTES = 96;
constexpr int64_t bf12_groups(int columns) { return (columns + BF12_GROUP - 1) / BF12_GROUP; }
// Bytes of a row as bfloat16.
constexpr int64_t unpacked_bytes(int columns) { return bf12_groups(columns) * BF12_GROUP * 2; }

inline float float_of_half(const char* from) {
    uint16_t half;
    memcpy(&half, from, sizeof half);
    const uint32_t bits = uint32_t(half & 0x8000) << 16 | uint32_t(half & 0x7fff) << 13;
    float scaled;
    memcpy(&scaled, &bits, sizeof scaled);
    return scaled * 0x1p112f;  // the difference of the exponents' biases; a half that is not finite stays finite
}

struct BlockSize {
    int columns, bytes;  // 0 for other kinds
};
inline BlockSize block_size(int kind) {
    switch (kind) {
#define D3_SIZE(NAME, COLUMNS, BYTES, INTERLEAVED) \
    case D3_##NAME: return {COLUMNS, BYTES}; \
    case D3_##NAME##X16: return {COLUMNS, INTERLEAVED};
        D3_BLOCK_FORMATS(D3_SIZE)
#undef D3_SIZE
        default: return {0, 0};
    }
}
inline bool is_in_blocks(int kind) { return kind >= D3_Q4_0 && kind < D3_Q4_0X16; }

// What `widen_e4m3` leaves out: it reads a byte as the bits of a half float, whose exponent bias is larger.
constexpr float E4M3_UNIT = 256.0f;

// Bytes of a matrix in one tile, with float vectors.
constexpr int64_t TILE_BYTES = 128 * 1024;

struct Kernels {
    const char* name;
    bool (*runs_here)();
    void (*multiply)(const MatmulArgs&, const Tile&);
    // For vectors in a form of the instruction set's own: its bytes, a multiple of 64 per 16 vectors; the number of
    // tiles that write it; and what writes one tile to p.prepared. Null if vectors stay floats.
    int64_t (*prepared_bytes)(D3Kind, int columns, int rows);
    int (*prepared_tiles)(const MatmulArgs&);
    void (*prepare)(const MatmulArgs&, int tile);
    int64_t tile_bytes;      // bytes of a matrix in one tile, with prepared vectors
    bool reads_interleaved;  // whether it knows interleaved int8 and int4 matrices, always with prepared vectors
    // Vectors that meet a weight at once: floats, prepared, and for bf12. With more of them rows are read again from
    // the cache, and the weights of the next matmul are prefetched meanwhile.
    int widest, widest_prepared, widest_bf12;
    // The most vectors that multiply a bf12 matrix directly. For more, `unpack` first writes bfloat16 rows of
    // `unpacked_bytes` each, and prefetches packed rows `ahead` bytes ahead.
    int max_bf12;
    void (*unpack)(const D3Matrix&, int start, int stop, int64_t ahead, char* to);
    // The packed GEMM, with the same bits: `panel` channels at most are widened into a panel of `panel_floats(columns)`
    // floats, `strip` vectors at most are packed into a strip of `strip_floats(columns)`. It pays from `many` vectors
    // on, or from `many_of_floats` on for float32 weights.
    int panel, strip, many, many_of_floats;
    int64_t (*panel_floats)(int columns);
    int64_t (*strip_floats)(int columns);
    void (*pack)(const MatmulArgs&, int first, int rows, float* strip);
    void (*widen)(const MatmulArgs&, int start, int stop, float* panel);
    void (*multiply_panel)(const MatmulArgs&, const float* panel, int start, int stop, const float* strip, int rows,
                           float* out, int64_t ldo);
    // Matrices in ggml's blocks: the most vectors that multiply one directly; for more, `unpack_blocks` first writes
    // rows of floats, and prefetches rows `ahead` bytes ahead.
    int max_blocks;
    void (*unpack_blocks)(const D3Matrix&, int start, int stop, int64_t ahead, float* to);
    // Writes rows of blocks, sixteen by sixteen, as interleaved ones, which `unpack_blocks` then reads too, and
    // `multiply` with prepared vectors; or null.
    void (*interleave_blocks)(const D3Matrix&, int start, int stop, char* to);
    // Attention span by span, each into [rows, group, head_dim + 2] floats; the others join the first in their order.
    void (*attend_span)(const AttentionArgs&, int span, float* partial);
    void (*join_span)(const AttentionArgs&, int span, float* earlier, float* partial);
    void (*finish_attention)(const AttentionArgs&, float* partial);
    // The e4m3 of n floats and their scale, as in the reference (kernels/kv_pool.py).
    void (*write_e4m3)(const float* from, int n, uint8_t* to, float* scale);
    void (*rms_norm)(float* out, const float* x, const float* weight, float eps, int n);
    void (*rotate)(float* out, const float* x, const float* turns, int n);  // n / 2 pairs by n / 2 pairs
    void (*swiglu)(float* out, const float* gate, const float* up, int n);
    void (*geglu)(float* out, const float* gate, const float* up, int n);
    void (*add)(float* out, const float* x, int n);
    void (*round_to_bfloat16)(const float* x, int n, char* to);
    // Whether this machine adds products of pairs of bfloat16 numbers in one instruction; null: no machine of this set.
    bool (*adds_bfloat16_pairs)();
    void (*soft_cap)(float* values, float cap, int n);  // each becomes cap * tanh(value / cap)
    // The two halves of a map for one row: inner[j] for j in [start, stop) of its rank, from `x`, which is padded with
    // zeros as `down` is; and what outputs [first, first + n) add to `values`.
    void (*map_down)(const MapArgs&, const float* x, int start, int stop, float* inner);
    void (*map_up)(const MapArgs&, const float* inner, int first, int n, float* values);
};

// Best first. A build may lack some.
extern const Kernels* const ALL_KERNELS[];
extern const int NUM_KERNELS;
