// An iteration is some steps with one row per growing draft, then one step with all drafted rows. Rows that saved their
// hidden state continue from it.
#include "speculative_loop.h"

#include <algorithm>
#include <cmath>

#include "decoder.h"

SpeculativeLoop::SpeculativeLoop(const D3SpeculativeLoop& args, Decoder& decoder)
    : args_(args), decoder_(decoder), num_layers_(decoder.model().num_layers) {
    for (int row = 0; row < args.rows; row++)
        rows_.push_back({args.tokens[row], args.positions[row], args.generation[row], args.lengths[row],
                         args.rooms[row], false, 0, 0});
}

D3Status SpeculativeLoop::check(const D3SpeculativeLoop& args, const Decoder& decoder) {
    const D3Model& model = decoder.model();
    if (args.rows < 1 || args.rows > model.max_rows || args.iterations < 1) return D3_BAD_RUN;
    if (args.most < 1 || args.most >= model.max_rows) return D3_BAD_DRAFT;
    const auto is_token = [&](int64_t token) { return token >= 0 && token < model.vocab; };
    for (int row = 0; row < args.rows; row++) {
        const int64_t first = args.first_lengths[row], longest = args.most_lengths[row], room = args.rooms[row];
        if (longest < 1 || longest > args.most || args.lengths[row] < 1 || args.lengths[row] > longest ||
            first > longest || args.num_begun[row] < 0 || args.num_begun[row] > first || first >= room)
            return D3_BAD_DRAFT;
        const int64_t* begun = args.begun + int64_t(row) * args.most;
        if (!is_token(args.tokens[row]) || !std::all_of(begun, begun + args.num_begun[row], is_token))
            return D3_BAD_TOKEN;
        const int64_t last = args.positions[row] + std::min(args.iterations * (longest + 1), room) - 1;
        const int64_t in_table = int64_t(model.max_blocks) * model.block_size;
        const int64_t max_position = std::min<int64_t>(model.max_positions, in_table);
        if (args.positions[row] < 0 || last >= max_position) return D3_BAD_POSITION;
        if (args.slots[row] < 0 || args.slots[row] >= model.num_slots) return D3_BAD_SLOT;
        if (args.places[row] >= 0 && args.places[row] + args.most > args.num_states) return D3_BAD_STATE;
        const int64_t layers = model.num_layers;
        for (int64_t layer = 0; layer < layers; layer++)
            if (!decoder.has_blocks(args.tables + (args.slots[row] * layers + layer) * model.max_blocks, last))
                return D3_BAD_BLOCK;
    }
    if (!args.bridges) return D3_OK;
    D3Run drafts{};  // drafts may begin at any of these steps
    drafts.rows = args.rows;
    drafts.steps = args.iterations * (args.most + 1);
    drafts.generation = args.generation;
    drafts.cutoffs = args.cutoffs;
    drafts.bridges = args.bridges;
    return decoder.has_bridges(drafts) ? D3_OK : D3_BAD_BRIDGE;
}

void SpeculativeLoop::run() {
    int taken = 0;
    while (taken < args_.iterations && !all_ended()) run_iteration(taken++);
    if (args_.taken) *args_.taken = taken;
}

void SpeculativeLoop::run_iteration(int nth) {
    for (int row = 0; row < args_.rows; row++) std::fill_n(counts(row, nth), 3, -1);
    draft(nth);
    verify(nth);
    for (int row = 0; row < args_.rows; row++) advance(row, nth);
}

bool SpeculativeLoop::all_ended() const {
    return std::all_of(rows_.begin(), rows_.end(), [](const Row& row) { return row.has_ended; });
}

bool SpeculativeLoop::is_active(int row, int layer) const {
    return rows_[row].step < args_.cutoffs[int64_t(row) * num_layers_ + layer];
}

// The first layer that a draft skips, or 0 if its hidden states are not kept.
int SpeculativeLoop::first_skipped(int row) const {
    if (args_.places[row] < 0) return 0;
    int layer = 0;
    while (layer < num_layers_ && is_active(row, layer)) layer++;
    return layer % num_layers_;
}

int64_t SpeculativeLoop::draft_length(int row, int nth) const {
    if (nth == 0) return args_.first_lengths[row];
    bool skips = false;
    for (int layer = 0; layer < num_layers_; layer++) skips |= !is_active(row, layer);
    return skips ? std::min(rows_[row].length, rows_[row].room - 1) : 0;
}

bool SpeculativeLoop::ends_answer(int row, int64_t token) const {
    if (!args_.ends) return false;
    const int64_t* ends = args_.ends + row * args_.most_ends;
    return std::find(ends, ends + args_.most_ends, token) != ends + args_.most_ends;
}

void SpeculativeLoop::draft(int nth) {
    for (int row = 0; row < args_.rows; row++) {
        Row& at = rows_[row];
        if (at.has_ended) continue;
        at.count = nth == 0 ? args_.num_begun[row] : 0;
        at.wanted = draft_length(row, nth);
        if (nth == 0) std::copy_n(args_.begun + int64_t(row) * args_.most, at.count, drafted(row, 0));
    }
    for (;;) {
        batch_.clear();
        for (int row = 0; row < args_.rows; row++)
            if (!rows_[row].has_ended && rows_[row].count < rows_[row].wanted)
                add_row(row, rows_[row].count, true, nth);
        if (batch_.tokens.empty()) return;
        run_batch();
        for (int row = 0, place = 0; row < args_.rows; row++) {
            Row& at = rows_[row];
            if (at.has_ended || at.count >= at.wanted) continue;
            const int64_t token = batch_.chosen[place];
            const bool is_sound = std::isfinite(batch_.scores[place++]);
            if (is_sound) drafted(row, nth)[at.count++] = token;
            if (!is_sound || ends_answer(row, token)) at.wanted = at.count;
        }
    }
}

// Whole sequences at a time, as many as fit into the decoder's rows.
void SpeculativeLoop::verify(int nth) {
    for (int first = 0, next = 0; first < args_.rows; first = next) {
        batch_.clear();
        for (; next < args_.rows; next++) {
            const Row& at = rows_[next];
            if (at.has_ended) continue;
            if (int64_t(batch_.tokens.size()) + at.count + 1 > decoder_.model().max_rows) break;
            for (int64_t place = 0; place <= at.count; place++) add_row(next, place, false, nth);
        }
        if (batch_.tokens.empty()) return;
        run_batch();
        for (int row = first, place = 0; row < next; row++) {
            if (rows_[row].has_ended) continue;
            count_accepted(row, nth, place);
            place += int(rows_[row].count) + 1;
        }
    }
}

// Counts the accepted tokens of a draft whose verification begins at row `first` of the batch.
void SpeculativeLoop::count_accepted(int row, int nth, int first) {
    const int64_t* tokens = drafted(row, nth);
    const auto is_sound = [&](int64_t place) { return std::isfinite(batch_.scores[first + place]); };
    int64_t accepted = 0, count = rows_[row].count;
    while (accepted < count && is_sound(accepted) && batch_.chosen[first + accepted] == tokens[accepted]) accepted++;
    int64_t* found = counts(row, nth);
    found[0] = count;
    found[1] = accepted;
    found[2] = is_sound(accepted) ? batch_.chosen[first + accepted] : -1;
}

// Moves a sequence on by what was accepted. Nothing fails from here on.
void SpeculativeLoop::advance(int row, int nth) {
    Row& at = rows_[row];
    if (at.has_ended) return;
    const int64_t *found = counts(row, nth), *tokens = drafted(row, nth), accepted = found[1];
    at.has_ended = found[2] < 0 || accepted + 1 >= at.room || ends_answer(row, found[2]) ||
                   std::any_of(tokens, tokens + accepted, [&](int64_t token) { return ends_answer(row, token); });
    at.token = found[2];
    at.position += accepted + 1;
    at.step += accepted + 1;
    at.room -= accepted + 1;
    if (args_.adapts[row] && found[0]) {
        const int64_t length = at.length + (accepted == found[0] ? 1 : -1);
        at.length = std::clamp<int64_t>(length, 1, args_.most_lengths[row]);
    }
}

// The row of the token `place` positions after the answer's last.
void SpeculativeLoop::add_row(int row, int64_t place, bool is_draft, int nth) {
    const Row& at = rows_[row];
    const int skipped = first_skipped(row);
    const bool has_state = skipped > 0 && (is_draft || place < at.count);
    batch_.tokens.push_back(place ? drafted(row, nth)[place - 1] : at.token);
    batch_.positions.push_back(at.position + place);
    batch_.generation.push_back(0);
    batch_.slots.push_back(args_.slots[row]);
    batch_.kept_layers.push_back(skipped);
    batch_.kept_places.push_back(has_state && is_draft ? args_.places[row] + place : -1);
    batch_.resumed_places.push_back(has_state && !is_draft ? args_.places[row] + place : -1);
    // Verification skips only layers whose states it has.
    batch_.bridges.push_back(is_draft && args_.bridges ? args_.bridges[row] : nullptr);
    for (int layer = 0; layer < num_layers_; layer++)
        batch_.active.push_back(is_draft ? is_active(row, layer) : !has_state || layer >= skipped);
}

void SpeculativeLoop::run_batch() {
    Batch& b = batch_;
    b.chosen.resize(b.tokens.size());
    b.scores.resize(b.tokens.size());
    D3Run run{};
    run.rows = int32_t(b.tokens.size());
    run.steps = 1;
    run.tokens = b.tokens.data();
    run.positions = b.positions.data();
    run.generation = b.generation.data();
    run.slots = b.slots.data();
    run.cutoffs = b.active.data();
    run.tables = args_.tables;
    run.chosen = b.chosen.data();
    run.scores = b.scores.data();
    run.states = args_.states;
    run.num_states = args_.num_states;
    run.kept_layers = b.kept_layers.data();
    run.kept_places = b.kept_places.data();
    run.resumed_places = b.resumed_places.data();
    run.bridges = args_.bridges ? b.bridges.data() : nullptr;
    decoder_.take(run, 0);
}

void SpeculativeLoop::Batch::clear() {
    for (auto* numbers : {&tokens, &positions, &generation, &slots, &kept_layers, &kept_places, &resumed_places})
        numbers->clear();
    active.clear();
    bridges.clear();
}
