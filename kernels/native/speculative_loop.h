// Draft-and-verify iterations: sequences draft with some layers and verify with all of them.
#pragma once
#include <cstdint>
#include <vector>

#include "abi.h"

class Decoder;

class SpeculativeLoop {
public:
    SpeculativeLoop(const D3SpeculativeLoop& args, Decoder& decoder);

    // D3_OK if the decoder may read and write all that these iterations name, or what is wrong with them.
    static D3Status check(const D3SpeculativeLoop& args, const Decoder& decoder);
    // Run all iterations, or fewer if every sequence has ended.
    void run();
    // Run the nth iteration, after those before it. One that failed may be run again.
    void run_iteration(int nth);

private:
    // The state of a sequence and, within an iteration, of its draft.
    struct Row {
        int64_t token, position, step, length, room;
        bool has_ended;
        int64_t count, wanted;  // tokens of the draft: drafted so far, and in all
    };
    // The rows of one step, of drafts or of their verification.
    struct Batch {
        std::vector<int64_t> tokens, positions, generation, slots, kept_layers, kept_places, resumed_places, chosen;
        std::vector<int32_t> active;
        std::vector<float> scores;
        std::vector<const D3Bridges*> bridges;
        void clear();
    };

    bool all_ended() const;
    bool is_active(int row, int layer) const;
    int first_skipped(int row) const;
    int64_t draft_length(int row, int nth) const;
    bool ends_answer(int row, int64_t token) const;
    void draft(int nth);
    void verify(int nth);
    void count_accepted(int row, int nth, int first);
    void advance(int row, int nth);
    void add_row(int row, int64_t place, bool is_draft, int nth);
    void run_batch();
    int64_t cell(int row, int nth) const { return int64_t(nth) * args_.rows + row; }
    int64_t* drafted(int row, int nth) const { return args_.drafted + cell(row, nth) * args_.most; }
    int64_t* counts(int row, int nth) const { return args_.counts + cell(row, nth) * 3; }

    const D3SpeculativeLoop args_;
    Decoder& decoder_;
    const int num_layers_;
    std::vector<Row> rows_;
    Batch batch_;
};
