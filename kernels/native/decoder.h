// A model, the memory that a step needs, and the steps.
#pragma once
#include <algorithm>
#include <atomic>
#include <memory>
#include <vector>

#include "abi.h"
#include "speculative_loop.h"
#include "isa/kernels.h"
#include "matmul/matmul.h"
#include "threading/runner.h"
#include "sampling/sampling.h"
#include "threading/thread_pool.h"

constexpr int BLOCK_QUERIES = 32;  // heads that go through a chunk of entries together
static_assert(BLOCK_QUERIES <= MAX_QUERIES);

struct D3Decoder {
    D3Decoder(const D3Model& model, const Kernels& kernels);

    // Whether everything that `run` would touch is there; D3_OK, or what is not.
    D3Status check(const D3Run& run) const;
    void run(const D3Run& run);
    // The same in the runner's thread.
    void begin(const D3Run& run);
    // The same for cycles of drafts and verifications.
    D3Status check(const D3SpeculativeLoop& prefetched) const;
    void run(const D3SpeculativeLoop& prefetched);
    void begin(const D3SpeculativeLoop& prefetched);

    std::atomic<bool> busy{false};

private:
    // What a worker writes while it has a piece of attention.
    struct Scratch {
        Floats scores;    // of a chunk
        Floats keys;      // the same
        Floats values;    // the same, of entries in 8 bits
        Floats partials;  // two spans
        int64_t prefetched = -1;  // the number of the piece whose first entries have been asked for
    };
    // Neighbouring rows of one sequence and neighbouring heads of keys and values, which go through attention together.
    struct QueryBlock {
        int first, rows, head, heads;
    };
    // One step of a run.
    struct Step {
        const D3Run& run;
        int taken;  // steps before it
        int64_t position(int row) const { return run.positions[row] + taken; }
        const int32_t* table(int row, int layer, const D3Model& model) const {
            return run.tables + (run.slots[row] * model.num_layers + layer) * model.max_blocks;
        }
        bool runs(int row, int layer, const D3Model& model) const {
            return run.generation[row] + taken < run.cutoffs[row * model.num_layers + layer];
        }
    };

    // A row that crosses a window.
    struct BridgedRow {
        const D3Bridge* bridge;
        int row;
    };

    bool has_bridges(const D3Run& run) const;
    int skipped_until(const Step& step, int row, int layer) const;
    void apply_bridges(const Step& step, int layer);
    void apply_bridge(const D3Bridge& bridge);
    friend class SpeculativeLoop;

    bool have_ended(const D3Run& run, int taken);
    bool has_blocks(const int32_t* table, int64_t last) const;
    void step(const Step& step);
    const D3Matrix& next_matrix(const Step& step, int layer) const;
    void embed(const Step& step);
    void save_states(const Step& step, int layer);
    void find_active(const Step& step, int layer);
    void qkv(const Step& step, int layer);
    void keep_yielding(const Step& step);
    void store_qkv(const Step& step, int layer, int nth, int channel, const float* from, int count);
    void store_head(const Step& step, int layer, int nth, int channel, float* head);
    void attention(const Step& step, int layer);
    void find_query_blocks(const Step& step);
    void split_query_blocks();
    void attend_split(const Step& step, int layer, int spans);
    int64_t largest_queue(const Step& step, int spans) const;
    AttentionArgs attention_args(const Step& step, int layer, int nth, int worker) const;
    // Query heads of a block at most.
    int64_t max_queries() const { return std::max({group_, BLOCK_QUERIES, std::min(model_.heads, MAX_QUERIES)}); }
    void multiply_into(const D3Matrix& matrix, const Rows& x, const Rows& to);
    void multiply_and_add(const D3Matrix& matrix, const Rows& x);
    void gate_up(const D3Layer& layer);
    void head(const Step& step);
    bool needs_all_logits(const D3Run& run, int row) const;
    void ask_grammars(const Step& step);
    void sample_from_all(const Step& step);

    void norm(const float* weight);
    void expect(const D3Matrix& matrix, int bands = 1) { matmul_.expect(matrix, int(active_.size()), bands); }
    template <class Use> void multiply(const D3Matrix& matrix, const Rows& x, Use use) {
        matmul_.multiply(matrix, x, int(active_.size()), use);
    }
    float* state(const Step& step, int64_t index) const;
    bool has_8bit_kv() const { return model_.pool_scales; }
    int64_t kv_row(const Step& step, int row, int layer, int half) const;
    DrawParams draw_params(const Step& step, int row) const;

    const D3Model model_;
    const std::vector<D3Layer> layers_;
    const Kernels& kernels_;
    const int group_, q_size_, kv_size_;
    const bool prefetches_;  // entries of a text, before they are looked at
    ThreadPool threads_;
    Matmul matmul_;
    // `hidden_` has a row for each row of the run; the others for each of the rows in `active_`, in that order.
    Rows hidden_, normed_, projected_, queries_, attended_, gated_, inner_;
    std::vector<int> active_;
    std::vector<BridgedRow> bridged_rows_;
    std::vector<QueryBlock> query_blocks_;
    std::vector<Scratch> scratch_;
    int64_t first_tile_ = 0;      // the number of the next attention's first piece, of all there were
    std::vector<float> partials_;  // [block, span], where spans are shared out
    std::vector<Best> best_;       // [workers, rows]
    Floats all_logits_;                           // [rows, vocab]: all logits of the rows that need them to choose
    std::vector<std::vector<uint64_t>> orders_;  // [workers]: scratch of `sample`
    std::vector<bool> ended_;                    // [rows] of a run
    std::vector<const uint8_t*> grammar_masks_;          // [rows]: the masks of their forms at a step
    D3Run run_;                                  // that the runner is at
    std::unique_ptr<SpeculativeLoop> cycles_;             // that it is at instead

public:
    Runner runner;  // the last member, so that it has come to rest before anything that it works with goes
};
