// The functions of the C interface, mirrored by `library.py`.
#pragma once
#include "types.h"

#if defined(_WIN32)
#define D3_EXPORT extern "C" __declspec(dllexport)
#else
#define D3_EXPORT extern "C" __attribute__((visibility("default")))
#endif

// The number of instruction sets in this library, best first; their names; whether this machine runs one.
D3_EXPORT int32_t d3_num_isas();
D3_EXPORT const char* d3_isa_name(int32_t isa);
D3_EXPORT int32_t d3_isa_runs_here(int32_t isa);
D3_EXPORT int32_t d3_isa_reads_interleaved(int32_t isa);  // whether it knows interleaved int8 and int4 matrices
D3_EXPORT int32_t d3_isa_reads_interleaved_blocks(int32_t isa);
// Whether this machine multiplies bfloat16 by bfloat16 in one instruction of this set.
D3_EXPORT int32_t d3_isa_adds_bfloat16_pairs(int32_t isa);
// The digest of the library's sources.
D3_EXPORT const char* d3_source_digest();

// Pack a bfloat16 matrix [rows, columns] into `packed`, and write the fields of a D3Bf12 with `room` outliers. Returns
// the number of outliers, or -1 for more than `room`.
struct D3Bf12Target {
    int32_t* exponent;
    int64_t* starts;
    int32_t* columns;
    uint16_t* weights;
};
D3_EXPORT int64_t d3_bf12_pack(const uint16_t* matrix, int32_t rows, int32_t columns, int64_t room, uint8_t* packed,
                               const D3Bf12Target* outliers);

// Rows [start, stop) of a matrix in ggml's blocks as floats, by any instruction set that runs here; of an interleaved
// one by an instruction set that knows it.
D3_EXPORT void d3_read_block_rows(const D3Matrix* matrix, int32_t isa, int32_t start, int32_t stop, float* to);
// Rows [start, stop), multiples of 16, of a matrix in ggml's blocks become those of an interleaved one at `to`, by an
// instruction set that knows such.
D3_EXPORT int64_t d3_interleaved_bytes(int32_t kind, int32_t columns);  // of such a row, `kind` that of its blocks
D3_EXPORT void d3_interleave_blocks(const D3Matrix* matrix, int32_t isa, int32_t start, int32_t stop, void* to);
// Rows [start, stop) of a bf12 matrix as bfloat16, each padded with zeros to whole groups of 64 columns.
D3_EXPORT void d3_bf12_unpack(const D3Matrix* matrix, int32_t start, int32_t stop, void* to);

D3_EXPORT int32_t d3_create(const D3Model* model, D3Decoder** made);
D3_EXPORT int32_t d3_run(D3Decoder* decoder, const D3Run* run);
// The same in a background thread: `d3_begin` returns at once, and the memory of the run belongs to it until
// `d3_finish`. `d3_await` returns when `steps` steps are done and their tokens may be read. `d3_finish` lets no further
// step begin and waits for the current one. Only one thread at a time calls these.
D3_EXPORT int32_t d3_begin(D3Decoder* decoder, const D3Run* run);
// The same two for draft-and-verify iterations, which `d3_await` then counts.
D3_EXPORT int32_t d3_run_speculative_loop(D3Decoder* decoder, const D3SpeculativeLoop* iterations);
D3_EXPORT int32_t d3_begin_speculative_loop(D3Decoder* decoder, const D3SpeculativeLoop* iterations);
D3_EXPORT int32_t d3_await(D3Decoder* decoder, int32_t steps);
// Like `d3_await`, but returns the number of all steps that are `done`, and wakes up less often.
D3_EXPORT int32_t d3_gather(D3Decoder* decoder, int32_t steps, int32_t* done);
D3_EXPORT void d3_finish(D3Decoder* decoder);
D3_EXPORT void d3_destroy(D3Decoder* decoder);
