// The steps of a model, and the memory they need.
#pragma once
#include <algorithm>
#include <vector>

#include "types.h"
#include "isa/kernels.h"
#include "matmul/matmul.h"
#include "sampling/sampling.h"
#include "threading/thread_pool.h"

constexpr int BLOCK_QUERIES = 32;  // query heads that pass over a chunk of the KV cache together
static_assert(BLOCK_QUERIES <= MAX_QUERIES);

class Decoder {
public:
    Decoder(const D3Model& model, const Kernels& kernels);

    const D3Model& model() const { return model_; }
    // D3_OK if the decoder may read and write all that the run names, or what is wrong with it.
    D3Status check(const D3Run& run) const;
    // Whether the block table of a layer names blocks of the pool for all positions up to `last` that rows from `first`
    // on attend to.
    bool has_blocks(const int32_t* table, int layer, int64_t first, int64_t last) const;
    // Whether the bridges of a run cover all windows of layers that its rows skip.
    bool has_bridges(const D3Run& run) const;
    // Whether the maps of these rows' adapters have the sizes of their matrices.
    bool has_fitting_maps(const D3LowRank* const* adapters, int rows) const;
    // Whether captures and steerings name layers and rows of the run, in order, and steerings positions.
    bool has_valid_hooks(const D3Run& run) const;

    // Run all steps, or fewer if every row has ended.
    void run(const D3Run& run);
    // The same step by step: `begin`, then `take` with 0, 1, ... A step that failed may be taken again.
    void begin(const D3Run& run);
    void take(const D3Run& run, int taken);

private:
    // Per thread, for one attention tile.
    struct Scratch {
        Floats scores;            // of a chunk
        Floats keys;              // of a chunk
        Floats values;            // of a chunk of an 8-bit KV cache
        Floats partials;          // of two spans
        int64_t prefetched = -1;  // the tile whose first keys and values are prefetched
    };
    // Neighbouring rows of one sequence, and neighbouring KV heads, that pass through attention together.
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
    struct BridgedRow {
        const D3Bridge* bridge;
        int row;
    };

    bool have_ended(const D3Run& run, int taken);
    void step(const Step& step);
    void embed(const Step& step);
    float* state(const Step& step, int64_t place) const;
    void save_states(const Step& step, int layer);
    void run_hooks(const Step& step, int layer);
    void steer(const D3Steering& steering);
    void find_active(const Step& step, int layer);
    const D3Matrix& next_matrix(const Step& step, int layer) const;

    int skipped_until(const Step& step, int row, int layer) const;
    void apply_bridges(const Step& step, int layer);
    void apply_bridge(const D3Bridge& bridge);

    template <class Body> void each_row(Body body);
    void norm(const float* weight);

    // Maps of adapters at one matmul, one for each part of its outputs: `begin_maps` makes the inner numbers of the
    // active rows of `x`, `add_maps` adds what outputs [start, stop) of the nth of them, or of one part, gain.
    void begin_maps(const Step& step, int first, int parts, const Rows& x);
    void add_maps(int nth, int start, int stop, float* values) const;
    void add_map(int nth, int part, int start, int stop, float* values) const;
    int layer_map(int layer, D3Map map) const { return layer * D3_LAYER_MAPS + map; }
    void expect(const D3Matrix& matrix, int bands = 1) { matmul_.expect(matrix, int(active_.size()), bands); }
    template <class Use> void multiply(const D3Matrix& matrix, const Rows& x, Use use) {
        matmul_.multiply(matrix, x, int(active_.size()), use);
    }
    void multiply_into(const D3Matrix& matrix, const Rows& x, const Rows& to);
    void multiply_and_add(const D3Matrix& matrix, const Rows& x);
    void add_product(const D3Matrix& matrix, const Rows& x, const float* post_norm);
    void qkv(const Step& step, int layer);
    void gate_up(const Step& step, int layer);
    void keep_yielding(const Step& step);

    bool has_8bit_kv() const { return model_.pool_scales; }
    int64_t kv_row(const Step& step, int row, int layer, int half) const;
    void store_qkv(const Step& step, int layer, int nth, int channel, const float* from, int count);
    void store_head(const Step& step, int layer, int nth, int channel, float* head);

    void attention(const Step& step, int layer);
    void attend_split(const Step& step, int layer, int spans);
    void find_query_blocks(const Step& step);
    void split_query_blocks();
    int64_t largest_queue(const Step& step, int layer, int spans) const;
    AttentionArgs attention_args(const Step& step, int layer, int nth, int worker) const;
    int64_t max_queries() const { return std::max({group_, BLOCK_QUERIES, std::min(model_.heads, MAX_QUERIES)}); }

    void head(const Step& step);
    DrawParams draw_params(const Step& step, int row) const;
    bool needs_all_logits(const D3Run& run, int row) const;
    void sample_from_all(const Step& step);
    void ask_grammars(const Step& step);

    const D3Model model_;
    const std::vector<D3Layer> layers_;
    const Kernels& kernels_;
    const int group_, q_size_, kv_size_;
    const bool prefetches_;  // keys and values, before attention reads them
    void (*const activate_)(float* out, const float* gate, const float* up, int n);
    ThreadPool threads_;
    Matmul matmul_;
    // `hidden_` has one row per row of the run; the others one per row in `active_`, in that order.
    Rows hidden_, normed_, projected_, queries_, attended_, gated_, inner_;
    std::vector<int> active_;  // the rows that the layer runs
    int64_t next_steering_ = 0, next_capture_ = 0;  // of the current step
    std::vector<BridgedRow> bridged_rows_;
    std::vector<QueryBlock> query_blocks_;
    std::vector<Scratch> scratch_;
    int64_t first_tile_ = 0;       // the number of the next attention's first tile, counted from the start
    std::vector<float> partials_;  // [block, span], if spans are spread over threads
    std::vector<Best> best_;       // [threads, rows]
    std::vector<Mass> masses_;     // the same, where a run asks for confidences
    Floats all_logits_;            // [rows, vocab], of the rows that sample from all their logits
    std::vector<std::vector<uint64_t>> orders_;   // [threads]: scratch of `sample`
    std::vector<bool> ended_;                     // [rows] of a run
    std::vector<bool> is_needed_;                 // [rows]: behind the last layer's keys and values
    std::vector<const uint8_t*> grammar_masks_;  // [rows] of a step
    // Of the current matmul: the active rows' maps, [rows] pointers to its first, and how many parts it has.
    std::vector<const D3LowRank*> maps_;
    int map_parts_ = 0;
    bool has_maps_ = false;
    Rows mapped_;  // the inner numbers, part by part, for rows with maps; made when the first adapter comes
};
