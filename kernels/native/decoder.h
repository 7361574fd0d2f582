// A model, the memory that a step needs, and the steps.
#pragma once
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <vector>

#include "abi.h"
#include "choosing.h"
#include "cycles.h"
#include "kernels.h"
#include "runner.h"
#include "sampling.h"
#include "team.h"

// Floats that begin at a cache line, zeros at first. The system gives their pages when they are first touched, so that
// what is never needed costs nothing.
class Floats {
public:
    Floats() = default;
    explicit Floats(int64_t count) : memory_(std::calloc(count * sizeof(float) + LINE, 1)) {
        if (!memory_) throw std::bad_alloc();
        floats_ = reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(memory_.get()) + LINE - 1) / LINE * LINE);
    }
    float* at(int64_t index) const { return floats_ + index; }

private:
    static constexpr size_t LINE = 64;
    struct Free {
        void operator()(void* memory) const { std::free(memory); }
    };
    std::unique_ptr<void, Free> memory_;
    float* floats_ = nullptr;
};

// Rows of floats with zeros behind them: up to a whole group of int4, and some more, so that neighbouring rows do not
// fall onto the same lines of a cache.
class Rows {
public:
    Rows() = default;
    Rows(int rows, int columns)
        : stride_((columns + SCALE_GROUP - 1) / SCALE_GROUP * SCALE_GROUP + 16), floats_(int64_t(rows) * stride_) {}
    float* row(int index) const { return floats_.at(index * stride_); }
    int64_t stride() const { return stride_; }

private:
    int64_t stride_ = 0;
    Floats floats_;
};

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
    // What a worker writes while it has a piece.
    struct Scratch {
        Rows outputs;     // a piece's output channels, for some rows
        Floats panels;    // a piece's weights, for many rows
        Floats scores;    // a chunk of attention
        Floats keys;      // the same
        Floats values;    // the same, of entries in 8 bits
        Floats partials;  // two spans of attention
    };
    // Neighbouring rows of one sequence, which go through attention together.
    struct Block {
        int first, rows;
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
    void embed(const Step& step);
    void keep_states(const Step& step, int layer);
    void find_active(const Step& step, int layer);
    void qkv(const Step& step, int layer);
    void place(const Step& step, int layer, int nth, int channel, const float* from, int count);
    void place_head(const Step& step, int layer, int nth, int channel, float* head);
    void attention(const Step& step, int layer);
    void find_blocks(const Step& step);
    void attend_split(const Step& step, int layer, int spans);
    Attention attention_of(const Step& step, int layer, int piece, int worker) const;
    void put_product(const D3Matrix& matrix, const Rows& x, const Rows& to);
    void add_product(const D3Matrix& matrix, const Rows& x);
    void gate_up(const D3Layer& layer);
    void head(const Step& step);
    bool needs_all(const D3Run& run, int row) const;
    void ask_forms(const Step& step);
    void choose_from_all(const Step& step);

    void norm(const float* weight);
    Product product(const D3Matrix& matrix, const Rows& x) const;
    Product prepared(Product p);
    int rows_of_piece(const D3Matrix& matrix) const;
    int panels_of_piece(const D3Matrix& matrix, int bands) const;
    template <class Use> void multiply(const D3Matrix& matrix, const Rows& x, Use use);
    float* state(const Step& step, int64_t place) const;
    template <int BANDS, class Use> void multiply_bands(const D3Matrix& matrix, const Rows& x, Use use);
    template <int BANDS, class Use> void multiply_many(const D3Matrix& matrix, const Product& p, Use use);
    bool is_small() const { return model_.pool_scales; }
    int64_t entry(const Step& step, int row, int layer, int half) const;
    Choosing choosing(const Step& step, int row) const;

    const D3Model model_;
    const std::vector<D3Layer> layers_;
    const Kernels& kernels_;
    const int group_, q_size_, kv_size_;
    const int64_t ahead_;
    Team team_;
    // `hidden_` has a row for each row of the run; the others for each of the rows in `active_`, in that order.
    Rows hidden_, normed_, projected_, queries_, attended_, gated_, inner_;
    std::vector<int> active_;
    std::vector<Crossing> crossings_;
    std::vector<Block> blocks_;
    std::vector<Scratch> scratch_;
    Floats prepared_;              // the vectors of a product in a form of the instruction set's own
    Floats strips_;                // the vectors of a product of many rows
    std::vector<float> partials_;  // [block and head, span], where spans are shared out
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
