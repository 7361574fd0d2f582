// The C entry points: they check all arguments, and no exception leaves them.
#include "abi.h"

#include <algorithm>
#include <atomic>
#include <exception>
#include <functional>
#include <memory>
#include <new>
#include <utility>

#include "decoder.h"
#include "formats/matrix.h"
#include "speculation/speculative_loop.h"
#include "threading/runner.h"

#ifndef D3_SOURCE_DIGEST
#define D3_SOURCE_DIGEST "unknown"
#endif

// The handle of the C interface: a decoder, and the thread that runs its steps in the background.
struct D3Decoder {
    D3Decoder(const D3Model& model, const Kernels& kernels) : decoder(model, kernels) {}

    Decoder decoder;
    std::atomic<bool> busy{false};
    D3Run run;                              // in the background,
    std::unique_ptr<SpeculativeLoop> loop;  // or this,
    D3Decoder* draft_model = nullptr;       // whose drafts are by that one
    Runner runner;                          // last: its thread stops before what it uses is destroyed
};

namespace {

// Whether the tokens of a shortened head are tokens, in order.
bool has_head_tokens(const D3Model& m) {
    if (!m.head_tokens) return true;
    if (m.num_head_tokens < 1 || m.num_head_tokens > m.vocab) return false;
    const int64_t *first = m.head_tokens, *stop = first + m.num_head_tokens;
    return std::adjacent_find(first, stop, std::greater_equal<>()) == stop && *first >= 0 && stop[-1] < m.vocab;
}

bool is_model(const D3Model& m, const Kernels& kernels) {
    const auto fits = [&](const D3Matrix& matrix, int rows, int columns) {
        return is_matrix(matrix, rows, columns, &kernels);
    };
    const int32_t sizes[] = {m.num_layers, m.hidden, m.intermediate, m.heads, m.kv_heads, m.head_dim, m.vocab,
                             m.block_size, m.max_blocks, m.num_blocks, m.num_slots, m.max_positions, m.max_rows,
                             m.num_threads};
    for (int32_t size : sizes)
        if (size < 1) return false;
    if (m.heads % m.kv_heads || m.heads / m.kv_heads > MAX_GROUP || m.head_dim % 2) return false;
    const int q_size = m.heads * m.head_dim, kv_size = m.kv_heads * m.head_dim;
    if (!has_readable_rows(m.embedding)) return false;
    if (!fits(m.embedding, m.vocab, m.hidden)) return false;
    const int head_rows = m.head_tokens ? int(m.num_head_tokens) : m.vocab;
    if (!fits(m.lm_head, head_rows, m.hidden) || !has_head_tokens(m)) return false;
    for (int32_t l = 0; l < m.num_layers; l++) {
        const D3Layer& layer = m.layers[l];
        const int width = layer.down.columns;  // a student's MLP may be narrower
        const bool is_layer = fits(layer.qkv, q_size + 2 * kv_size, m.hidden) && fits(layer.output, m.hidden, q_size) &&
                              width >= 1 && width <= m.intermediate && fits(layer.gate_up, 2 * width, m.hidden) &&
                              !layer.gate_up.below && fits(layer.down, m.hidden, width) && layer.window >= 1;
        if (!is_layer) return false;
    }
    const bool is_activation = m.activation == D3_SILU || m.activation == D3_GELU_TANH;
    return m.final_norm && m.pool && is_activation && m.attention_cap >= 0 && m.logit_cap >= 0;
}

D3Status check(const D3Decoder& handle, const D3Run& run) { return handle.decoder.check(run); }
Decoder* draft_model(const D3SpeculativeLoop& loop) {
    return loop.draft_model ? &loop.draft_model->decoder : nullptr;
}
D3Status check(const D3Decoder& handle, const D3SpeculativeLoop& loop) {
    return SpeculativeLoop::check(loop, handle.decoder, draft_model(loop));
}

void run(D3Decoder& handle, const D3Run& run) { handle.decoder.run(run); }
void run(D3Decoder& handle, const D3SpeculativeLoop& loop) {
    SpeculativeLoop(loop, handle.decoder, draft_model(loop)).run();
}

void begin(D3Decoder& handle, const D3Run& run) {
    handle.run = run;
    handle.decoder.begin(run);
    handle.runner.begin({run.steps, run.control, [&handle](int taken) { handle.decoder.take(handle.run, taken); }});
}
void begin(D3Decoder& handle, const D3SpeculativeLoop& loop) {
    handle.loop = std::make_unique<SpeculativeLoop>(loop, handle.decoder, draft_model(loop));
    handle.draft_model = loop.draft_model;
    handle.runner.begin({loop.iterations, loop.control, [&handle](int nth) { handle.loop->run_iteration(nth); }});
}

D3Decoder* other_decoder(const D3Run&) { return nullptr; }
D3Decoder* other_decoder(const D3SpeculativeLoop& loop) { return loop.draft_model; }

bool acquire(D3Decoder& handle, D3Decoder* other) {
    if (other == &handle || handle.busy.exchange(true, std::memory_order_acquire)) return false;
    if (!other || !other->busy.exchange(true, std::memory_order_acquire)) return true;
    handle.busy.store(false, std::memory_order_release);
    return false;
}

void release(D3Decoder& handle, D3Decoder* other) {
    if (other) other->busy.store(false, std::memory_order_release);
    handle.busy.store(false, std::memory_order_release);
}

template <class Args> int32_t run_checked(D3Decoder& handle, const Args& args) {
    if (!acquire(handle, other_decoder(args))) return D3_BUSY;
    int32_t status = D3_OK;
    try {
        status = check(handle, args);
        if (status == D3_OK) run(handle, args);
    } catch (const std::bad_alloc&) {
        status = D3_NO_MEMORY;
    }
    release(handle, other_decoder(args));
    return status;
}

template <class Args> int32_t begin_checked(D3Decoder& handle, const Args& args) {
    if (!acquire(handle, other_decoder(args))) return D3_BUSY;
    int32_t status = D3_OK;
    try {
        status = args.control ? check(handle, args) : D3_BAD_RUN;
        if (status == D3_OK) begin(handle, args);
    } catch (const std::exception&) {  // no memory, or no thread
        status = D3_NO_MEMORY;
    }
    if (status != D3_OK) release(handle, other_decoder(args));
    return status;
}

}  // namespace

int32_t d3_num_isas() { return NUM_KERNELS; }
const char* d3_isa_name(int32_t isa) { return ALL_KERNELS[isa]->name; }
int32_t d3_isa_runs_here(int32_t isa) { return ALL_KERNELS[isa]->runs_here(); }
void d3_read_block_rows(const D3Matrix* matrix, int32_t isa, int32_t start, int32_t stop, float* to) {
    ALL_KERNELS[isa]->unpack_blocks(*matrix, start, stop, 0, to);
}

void d3_interleave_blocks(const D3Matrix* matrix, int32_t isa, int32_t start, int32_t stop, void* to) {
    ALL_KERNELS[isa]->interleave_blocks(*matrix, start, stop, static_cast<char*>(to));
}
int64_t d3_interleaved_bytes(int32_t kind, int32_t columns) {
    const BlockSize block = block_size(kind + D3_Q4_0X16 - D3_Q4_0);
    return int64_t(columns / block.columns) * block.bytes;
}
int32_t d3_isa_reads_interleaved(int32_t isa) { return reads_interleaved(*ALL_KERNELS[isa], D3_INT8X16); }
int32_t d3_isa_reads_interleaved_blocks(int32_t isa) { return reads_interleaved(*ALL_KERNELS[isa], D3_Q4_0X16); }
int32_t d3_isa_adds_bfloat16_pairs(int32_t isa) {
    const auto adds = ALL_KERNELS[isa]->adds_bfloat16_pairs;
    return adds && adds();
}
const char* d3_source_digest() { return D3_SOURCE_DIGEST; }

int32_t d3_create(const D3Model* model, D3Decoder** made) {
    *made = nullptr;
    if (model->isa < 0 || model->isa >= NUM_KERNELS || !ALL_KERNELS[model->isa]->runs_here()) return D3_NO_SUCH_ISA;
    if (!is_model(*model, *ALL_KERNELS[model->isa])) return D3_BAD_SHAPE;
    try {
        *made = new D3Decoder(*model, *ALL_KERNELS[model->isa]);
    } catch (const std::bad_alloc&) {
        return D3_NO_MEMORY;
    }
    return D3_OK;
}

int32_t d3_run(D3Decoder* decoder, const D3Run* run) { return run_checked(*decoder, *run); }
int32_t d3_run_speculative_loop(D3Decoder* decoder, const D3SpeculativeLoop* loop) {
    return run_checked(*decoder, *loop);
}
int32_t d3_begin(D3Decoder* decoder, const D3Run* run) { return begin_checked(*decoder, *run); }
int32_t d3_begin_speculative_loop(D3Decoder* decoder, const D3SpeculativeLoop* loop) {
    return begin_checked(*decoder, *loop);
}

int32_t d3_await(D3Decoder* decoder, int32_t steps) {
    try {
        decoder->runner.await(steps);
    } catch (const std::bad_alloc&) {
        return D3_NO_MEMORY;
    }
    return D3_OK;
}

int32_t d3_gather(D3Decoder* decoder, int32_t steps, int32_t* done) {
    try {
        *done = decoder->runner.gather(steps);
    } catch (const std::bad_alloc&) {
        return D3_NO_MEMORY;
    }
    return D3_OK;
}

void d3_finish(D3Decoder* decoder) {
    decoder->runner.finish();
    release(*decoder, std::exchange(decoder->draft_model, nullptr));
}

void d3_destroy(D3Decoder* decoder) { delete decoder; }
