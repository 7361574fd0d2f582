// Draft-and-verify iterations: sequences draft with some layers, with a second model or by lookups, and verify at full
// depth.
#pragma once
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "types.h"
#include "speculation/draft_costs.h"
#include "speculation/lookup.h"

class Decoder;

class SpeculativeLoop {
public:
    // `draft_model` is that of `args`, or null.
    SpeculativeLoop(const D3SpeculativeLoop& args, Decoder& decoder, Decoder* draft_model);

    // D3_OK if the decoders may read and write all that these iterations name, or what is wrong with them.
    static D3Status check(const D3SpeculativeLoop& args, const Decoder& decoder, const Decoder* draft_model);
    // Run all iterations, or fewer if every sequence has ended.
    void run();
    // Run the nth iteration, after those before it. One that failed may be run again.
    void run_iteration(int nth);

private:
    // `D3TokenCounts` that grow.
    struct TokenTally {
        std::vector<int64_t> tokens;
        std::vector<int32_t> counts;
        void add(int64_t token);
    };
    // The state of a sequence and, within an iteration, of its draft.
    struct Row {
        int64_t token, position, step, length, room;
        int64_t computed;  // positions that the draft model has computed
        bool has_ended;
        D3Drafter drafter;
        int64_t count, wanted;  // tokens of the draft: drafted so far, and in all
        double all_right;       // the probability that all of them are right
        double rate;            // tokens per second that the planned draft promises
        std::vector<int> bins;  // of each drafted token, see `DraftCosts::judge`
        int64_t recent, added;        // tokens of `answer`: from before, and of the loop
        std::vector<int64_t> answer;  // the answer's last tokens, then those of the loop, then those of the draft
        TokenTally tally;             // for penalties, with the tokens of the loop
        std::vector<const uint8_t*> masks;  // of the grammar, behind the first n tokens of the draft
    };
    // The rows of one step, of drafts or of their verification.
    struct Batch {
        std::vector<int64_t> tokens, positions, generation, slots, kept_layers, kept_places, resumed_places, chosen;
        std::vector<int64_t> seeds, indices, logit_places;
        std::vector<int32_t> cutoffs;
        std::vector<uint8_t> yields;
        std::vector<float> scores, temperatures, confidences;
        std::vector<D3Sampling> sampling;
        std::vector<std::pair<int, int64_t>> origins;  // of each row: its sequence, and its place behind the last token
        std::vector<D3LogitMask> logit_masks;
        std::vector<D3TokenCounts> token_counts;
        std::vector<TokenTally> tallies;
        std::vector<const D3Bridges*> bridges;
        std::vector<const D3LowRank*> adapters;
        void clear();
    };

    bool all_ended() const;
    bool drafts(int row, D3Drafter drafter) const { return args_.drafters && args_.drafters[row] & drafter; }
    bool drafts_by_own_layers(int row) const { return !args_.drafters || !args_.drafters[row]; }
    bool is_active(int row, int layer) const;
    int first_skipped(int row) const;
    int64_t draft_length(int row, int nth) const;
    bool ends_answer(int row, int64_t token) const;

    void begin_drafts(int nth);
    void look_up(int row, int nth);
    void plan_draft(int row);
    void draft_by_own_layers(int nth);
    void draft_by_model(int nth);
    bool pays_to_go_on(const Row& at, int64_t growing) const;
    void trim(int row);
    int64_t length_of_probe(int64_t most, double each, double first);
    void verify(int nth);
    void count_accepted(int row, int nth, int first);
    void advance(int row, int nth);

    void add_row(int row, int64_t place, bool is_draft, int nth);
    void add_common(int row, int64_t place, int nth);
    bool reports(int row) const { return args_.logits && args_.reports[row]; }
    void catch_up(int row, int nth);
    void run_batch(Decoder& decoder, const int32_t* tables, int nth);
    void sample_behind_drafts(int nth);

    bool has_grammar(int row) const {
        return args_.sampling && args_.sampling[row].logit_mask && args_.sampling[row].logit_mask->has_grammar;
    }
    void begin_grammars(int nth);
    const uint8_t* mask_at(int row, int64_t place, int nth);
    int64_t count_allowed(int row, int64_t count, int nth);
    void drop_last(int row);

    int64_t cell(int row, int nth) const { return int64_t(nth) * args_.rows + row; }
    int64_t* drafted(int row, int nth) const { return args_.drafted + cell(row, nth) * args_.most; }
    int64_t* counts(int row, int nth) const { return args_.counts + cell(row, nth) * D3_LOOP_COUNTS; }
    int64_t* text(int row) const { return args_.texts + row * args_.text_room; }
    // The token `place` positions after the answer's last.
    int64_t token_at(int row, int64_t place, int nth) const {
        if (place > 0) return drafted(row, nth)[place - 1];
        return place ? text(row)[rows_[row].position + place] : rows_[row].token;
    }

    const D3SpeculativeLoop args_;
    Decoder& decoder_;
    Decoder* draft_model_;
    const int num_layers_;
    std::unique_ptr<DraftCosts> costs_;  // null: fixed lengths
    std::vector<Row> rows_;
    Batch batch_;
    int64_t num_live_ = 0;      // sequences of the iteration
    double seconds_ = 0;        // of its steps and masks
    bool has_probed_ = false;   // one sequence of an iteration is enough
    bool has_caught_up_ = false;  // the draft model read more than a few tokens: not a typical iteration
};
