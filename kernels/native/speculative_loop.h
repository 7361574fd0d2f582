// Sequences that draft with some of their layers and verify with all of them, cycle after cycle.
#pragma once
#include <cstdint>
#include <vector>

#include "abi.h"

struct D3Decoder;

class Cycles {
public:
    Cycles(const D3Cycles& asked, D3Decoder& decoder);

    // The nth cycle, the one before being done. One that has failed may be taken again.
    void take(int nth);
    bool have_ended() const;

private:
    // Where a sequence stands, and, in a cycle, the draft that it has.
    struct Row {
        int64_t token, position, step, length, room;
        bool has_ended;
        int64_t count, wanted;  // tokens of the draft, and how many it is to have
    };
    // The rows of one step: of drafts, or of their verification.
    struct Batch {
        std::vector<int64_t> tokens, positions, generation, slots, kept_layers, kept_places, resumed_places, chosen;
        std::vector<int32_t> active;
        std::vector<float> scores;
        std::vector<const D3Bridges*> bridges;
        void clear();
    };

    bool awake(int row, int layer) const;
    int first_asleep(int row) const;
    int64_t length_of_draft(int row, int nth) const;
    bool ends_answer(int row, int64_t token) const;
    void draft(int nth);
    void verify(int nth);
    void judge(int row, int nth, int first);
    void settle(int row, int nth);
    void add(int row, int64_t place, bool is_draft, int nth);
    void run_batch();
    int64_t cell(int row, int nth) const { return int64_t(nth) * asked_.rows + row; }
    int64_t* drafted(int row, int nth) const { return asked_.drafted + cell(row, nth) * asked_.most; }
    int64_t* counts(int row, int nth) const { return asked_.counts + cell(row, nth) * 3; }

    const D3Cycles asked_;
    D3Decoder& decoder_;
    std::vector<Row> rows_;
    Batch batch_;
};
