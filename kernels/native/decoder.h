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
static_assert(BLOCK_QUERIES <= MOST_QUERIES);

struct D3Decoder {
    D3Decoder(const D3Model& model, const Kernels& kernels);

    // Whether everything that `run` would touch is there; D3_OK, or what is not.
    D3Status check(const D3Run& run) const;
    void run(const D3Run& run);
    // The same in the runner's thread.
    void begin(const D3Run& run);
    // The same for cycles of drafts and verifications.
    D3Status check(const D3Cycles& asked) const;
    void run(const D3Cycles& asked);
    void begin(const D3Cycles& asked);

    std::atomic<bool> busy{false};

private:
    // What a worker writes while it has a piece of attention.
    struct Scratch {
        Floats scores;    // of a chunk
        Floats keys;      // the same
        Floats values;    // the same, of entries in 8 bits
        Floats partials;  // two spans
        int64_t asked = -1;  // the number of the piece whose first entries have been asked for
    };
    // Neighbouring rows of one sequence and neighbouring heads of keys and values, which go through attention together.
    struct Block {
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
    struct Crossing {
        const D3Bridge* bridge;
        int row;
    };

    bool has_bridges(const D3Run& run) const;
    int window_from(const Step& step, int row, int layer) const;
    void cross(const Step& step, int layer);
    void cross_together(const D3Bridge& bridge);
    friend class Cycles;

    bool have_ended(const D3Run& run, int taken);
    bool has_blocks(const int32_t* table, int64_t last) const;
    void step(const Step& step);
    const D3Matrix& after(const Step& step, int layer) const;
    void embed(const Step& step);
    void keep_states(const Step& step, int layer);
    void find_active(const Step& step, int layer);
    void qkv(const Step& step, int layer);
    void keep_asked(const Step& step);
    void place(const Step& step, int layer, int nth, int channel, const float* from, int count);
    void place_head(const Step& step, int layer, int nth, int channel, float* head);
    void attention(const Step& step, int layer);
    void find_blocks(const Step& step);
    void split_blocks();
    void attend_split(const Step& step, int layer, int spans);
    int64_t most_of_share(const Step& step, int spans) const;
    Attention attention_of(const Step& step, int layer, int nth, int worker) const;
    // Query heads of a block at most.
    int64_t most_queries() const { return std::max({group_, BLOCK_QUERIES, std::min(model_.heads, MOST_QUERIES)}); }
    void put_product(const D3Matrix& matrix, const Rows& x, const Rows& to);
    void add_product(const D3Matrix& matrix, const Rows& x);
    void gate_up(const D3Layer& layer);
    void head(const Step& step);
    bool needs_all(const D3Run& run, int row) const;
    void ask_forms(const Step& step);
    void choose_from_all(const Step& step);

    void norm(const float* weight);
    void expect(const D3Matrix& matrix, int bands = 1) { multiplier_.expect(matrix, int(active_.size()), bands); }
    template <class Use> void multiply(const D3Matrix& matrix, const Rows& x, Use use) {
        multiplier_.multiply(matrix, x, int(active_.size()), use);
    }
    float* state(const Step& step, int64_t place) const;
    bool is_small() const { return model_.pool_scales; }
    int64_t entry(const Step& step, int row, int layer, int half) const;
    Choosing choosing(const Step& step, int row) const;

    const D3Model model_;
    const std::vector<D3Layer> layers_;
    const Kernels& kernels_;
    const int group_, q_size_, kv_size_;
    const bool fetches_;  // entries of a text, before they are looked at
    Team team_;
    Multiplier multiplier_;
    // `hidden_` has a row for each row of the run; the others for each of the rows in `active_`, in that order.
    Rows hidden_, normed_, projected_, queries_, attended_, gated_, inner_;
    std::vector<int> active_;
    std::vector<Crossing> crossings_;
    std::vector<Block> blocks_;
    std::vector<Scratch> scratch_;
    int64_t first_piece_ = 0;      // the number of the next attention's first piece, of all there were
    std::vector<float> partials_;  // [block, span], where spans are shared out
    std::vector<Best> best_;       // [workers, rows]
    Floats collected_;                           // [rows, vocab]: all logits of the rows that need them to choose
    std::vector<std::vector<uint64_t>> orders_;  // [workers]: scratch of `sample`
    std::vector<bool> ended_;                    // [rows] of a run
    std::vector<const uint8_t*> forms_;          // [rows]: the masks of their forms at a step
    D3Run run_;                                  // that the runner is at
    std::unique_ptr<Cycles> cycles_;             // that it is at instead

public:
    Runner runner;  // the last member, so that it has come to rest before anything that it works with goes
};
