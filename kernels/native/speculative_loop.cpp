// Each cycle is some steps of one row for each sequence whose draft still grows, and one of all drafted rows, in which
// a row that has left its hidden state behind goes on from there.
#include "speculative_loop.h"

#include <algorithm>
#include <cmath>

#include "decoder.h"

Cycles::Cycles(const D3Cycles& asked, D3Decoder& decoder) : asked_(asked), decoder_(decoder) {
    for (int row = 0; row < asked.rows; row++)
        rows_.push_back({asked.tokens[row], asked.positions[row], asked.generation[row], asked.lengths[row],
                         asked.rooms[row], false, 0, 0});
}

void Cycles::take(int nth) {
    for (int row = 0; row < asked_.rows; row++) std::fill_n(counts(row, nth), 3, -1);
    draft(nth);
    verify(nth);
    for (int row = 0; row < asked_.rows; row++) settle(row, nth);
}

bool Cycles::have_ended() const {
    return std::all_of(rows_.begin(), rows_.end(), [](const Row& row) { return row.has_ended; });
}

bool Cycles::awake(int row, int layer) const {
    return rows_[row].step < asked_.cutoffs[int64_t(row) * decoder_.model_.num_layers + layer];
}

// The first layer that a draft leaves out, or 0, where its hidden states are not kept.
int Cycles::first_asleep(int row) const {
    if (asked_.places[row] < 0) return 0;
    int layer = 0;
    while (layer < decoder_.model_.num_layers && awake(row, layer)) layer++;
    return layer % decoder_.model_.num_layers;
}

int64_t Cycles::length_of_draft(int row, int nth) const {
    if (nth == 0) return asked_.first_lengths[row];
    bool skips = false;
    for (int layer = 0; layer < decoder_.model_.num_layers; layer++) skips |= !awake(row, layer);
    return skips ? std::min(rows_[row].length, rows_[row].room - 1) : 0;
}

bool Cycles::ends_answer(int row, int64_t token) const {
    if (!asked_.ends) return false;
    const int64_t* ends = asked_.ends + row * asked_.most_ends;
    return std::find(ends, ends + asked_.most_ends, token) != ends + asked_.most_ends;
}

void Cycles::draft(int nth) {
    for (int row = 0; row < asked_.rows; row++) {
        Row& at = rows_[row];
        if (at.has_ended) continue;
        at.count = nth == 0 ? asked_.num_begun[row] : 0;
        at.wanted = length_of_draft(row, nth);
        if (nth == 0) std::copy_n(asked_.begun + int64_t(row) * asked_.most, at.count, drafted(row, 0));
    }
    for (;;) {
        batch_.clear();
        for (int row = 0; row < asked_.rows; row++)
            if (!rows_[row].has_ended && rows_[row].count < rows_[row].wanted) add(row, rows_[row].count, true, nth);
        if (batch_.tokens.empty()) return;
        run_batch();
        for (int row = 0, place = 0; row < asked_.rows; row++) {
            Row& at = rows_[row];
            if (at.has_ended || at.count >= at.wanted) continue;
            const int64_t token = batch_.chosen[place];
            const bool is_sound = std::isfinite(batch_.scores[place++]);
            if (is_sound) drafted(row, nth)[at.count++] = token;
            if (!is_sound || ends_answer(row, token)) at.wanted = at.count;
        }
    }
}

// Whole sequences at a time, as many as the decoder has rows for.
void Cycles::verify(int nth) {
    for (int first = 0, next = 0; first < asked_.rows; first = next) {
        batch_.clear();
        for (; next < asked_.rows; next++) {
            const Row& at = rows_[next];
            if (at.has_ended) continue;
            if (int64_t(batch_.tokens.size()) + at.count + 1 > decoder_.model_.max_rows) break;
            for (int64_t place = 0; place <= at.count; place++) add(next, place, false, nth);
        }
        if (batch_.tokens.empty()) return;
        run_batch();
        for (int row = first, place = 0; row < next; row++) {
            if (rows_[row].has_ended) continue;
            judge(row, nth, place);
            place += int(rows_[row].count) + 1;
        }
    }
}

// What is accepted of a draft whose verification begins at this row of the batch.
void Cycles::judge(int row, int nth, int first) {
    const int64_t* tokens = drafted(row, nth);
    const auto is_sound = [&](int64_t place) { return std::isfinite(batch_.scores[first + place]); };
    int64_t accepted = 0, count = rows_[row].count;
    while (accepted < count && is_sound(accepted) && batch_.chosen[first + accepted] == tokens[accepted]) accepted++;
    int64_t* found = counts(row, nth);
    found[0] = count;
    found[1] = accepted;
    found[2] = is_sound(accepted) ? batch_.chosen[first + accepted] : -1;
}

// Moves a sequence on by what its verification has found. Nothing fails any more.
void Cycles::settle(int row, int nth) {
    Row& at = rows_[row];
    if (at.has_ended) return;
    const int64_t *found = counts(row, nth), *tokens = drafted(row, nth), accepted = found[1];
    at.has_ended = found[2] < 0 || accepted + 1 >= at.room || ends_answer(row, found[2]) ||
                   std::any_of(tokens, tokens + accepted, [&](int64_t token) { return ends_answer(row, token); });
    at.token = found[2];
    at.position += accepted + 1;
    at.step += accepted + 1;
    at.room -= accepted + 1;
    if (asked_.adapts[row] && found[0]) {
        const int64_t length = at.length + (accepted == found[0] ? 1 : -1);
        at.length = std::clamp<int64_t>(length, 1, asked_.most_lengths[row]);
    }
}

// A row at the token that stands `place` behind the answer's last.
void Cycles::add(int row, int64_t place, bool is_draft, int nth) {
    const Row& at = rows_[row];
    const int asleep = first_asleep(row);
    const bool has_state = asleep > 0 && (is_draft || place < at.count);
    batch_.tokens.push_back(place ? drafted(row, nth)[place - 1] : at.token);
    batch_.positions.push_back(at.position + place);
    batch_.generation.push_back(0);
    batch_.slots.push_back(asked_.slots[row]);
    batch_.kept_layers.push_back(asleep);
    batch_.kept_places.push_back(has_state && is_draft ? asked_.places[row] + place : -1);
    batch_.resumed_places.push_back(has_state && !is_draft ? asked_.places[row] + place : -1);
    // What verification leaves out it has the states of.
    batch_.bridges.push_back(is_draft && asked_.bridges ? asked_.bridges[row] : nullptr);
    for (int layer = 0; layer < decoder_.model_.num_layers; layer++)
        batch_.active.push_back(is_draft ? awake(row, layer) : !has_state || layer >= asleep);
}

void Cycles::run_batch() {
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
    run.tables = asked_.tables;
    run.chosen = b.chosen.data();
    run.scores = b.scores.data();
    run.states = asked_.states;
    run.num_states = asked_.num_states;
    run.kept_layers = b.kept_layers.data();
    run.kept_places = b.kept_places.data();
    run.resumed_places = b.resumed_places.data();
    run.bridges = asked_.bridges ? b.bridges.data() : nullptr;
    decoder_.step({run, 0});
}

void Cycles::Batch::clear() {
    for (auto* numbers : {&tokens, &positions, &generation, &slots, &kept_layers, &kept_places, &resumed_places})
        numbers->clear();
    active.clear();
    bridges.clear();
}

D3Status D3Decoder::check(const D3Cycles& asked) const {
    if (asked.rows < 1 || asked.rows > model_.max_rows || asked.cycles < 1) return D3_BAD_RUN;
    if (asked.most < 1 || asked.most >= model_.max_rows) return D3_BAD_DRAFT;
    const auto is_token = [&](int64_t token) { return token >= 0 && token < model_.vocab; };
    for (int row = 0; row < asked.rows; row++) {
        const int64_t first = asked.first_lengths[row], longest = asked.most_lengths[row], room = asked.rooms[row];
        if (longest < 1 || longest > asked.most || asked.lengths[row] < 1 || asked.lengths[row] > longest ||
            first > longest || asked.num_begun[row] < 0 || asked.num_begun[row] > first || first >= room)
            return D3_BAD_DRAFT;
        const int64_t* begun = asked.begun + int64_t(row) * asked.most;
        if (!is_token(asked.tokens[row]) || !std::all_of(begun, begun + asked.num_begun[row], is_token))
            return D3_BAD_TOKEN;
        const int64_t last = asked.positions[row] + std::min(asked.cycles * (longest + 1), room) - 1;
        const int64_t most = std::min<int64_t>(model_.max_positions, int64_t(model_.max_blocks) * model_.block_size);
        if (asked.positions[row] < 0 || last >= most) return D3_BAD_POSITION;
        if (asked.slots[row] < 0 || asked.slots[row] >= model_.num_slots) return D3_BAD_SLOT;
        if (asked.places[row] >= 0 && asked.places[row] + asked.most > asked.num_states) return D3_BAD_STATE;
        const int64_t layers = model_.num_layers;
        for (int64_t layer = 0; layer < layers; layer++)
            if (!has_blocks(asked.tables + (asked.slots[row] * layers + layer) * model_.max_blocks, last))
                return D3_BAD_BLOCK;
    }
    if (!asked.bridges) return D3_OK;
    D3Run drafts{};  // whoever begins a draft at any of these steps
    drafts.rows = asked.rows;
    drafts.steps = asked.cycles * (asked.most + 1);
    drafts.generation = asked.generation;
    drafts.cutoffs = asked.cutoffs;
    drafts.bridges = asked.bridges;
    return has_bridges(drafts) ? D3_OK : D3_BAD_BRIDGE;
}

void D3Decoder::run(const D3Cycles& asked) {
    Cycles cycles(asked, *this);
    int taken = 0;
    while (taken < asked.cycles && !cycles.have_ended()) cycles.take(taken++);
    if (asked.taken) *asked.taken = taken;
}

void D3Decoder::begin(const D3Cycles& asked) {
    cycles_ = std::make_unique<Cycles>(asked, *this);
    runner.begin({asked.cycles, asked.course, [this](int taken) { cycles_->take(taken); }});
}
