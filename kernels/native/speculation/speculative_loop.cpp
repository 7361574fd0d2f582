// An iteration is some steps with one row per growing draft, then one step with all drafted rows. Rows that saved their
// hidden state continue from it.
#include "speculation/speculative_loop.h"

#include <algorithm>
#include <chrono>
#include <climits>
#include <cmath>

#include "decoder.h"

namespace {

constexpr int64_t MAX_LAG = 4;  // tokens that the draft model catches up with in a typical iteration

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

}  // namespace

SpeculativeLoop::SpeculativeLoop(const D3SpeculativeLoop& args, Decoder& decoder, Decoder* draft_model)
    : args_(args), decoder_(decoder), draft_model_(draft_model), num_layers_(decoder.model().num_layers) {
    if (args.costs) costs_ = std::make_unique<DraftCosts>(*args.costs);
    for (int row = 0; row < args.rows; row++) {
        rows_.push_back({args.tokens[row], args.positions[row], args.generation[row], args.lengths[row],
                         args.rooms[row], args.draft_positions ? args.draft_positions[row] : 0, false, D3_OWN_LAYERS,
                         0, 0, 1, 0, {}, 0, 0, {}, {}, {}});
        const D3Sampling* asked = args.sampling ? args.sampling + row : nullptr;
        Row& at = rows_.back();
        if (asked && asked->logit_mask) {
            const D3LogitMask& mask = *asked->logit_mask;
            at.recent = mask.num_recent;
            at.answer.assign(mask.recent, mask.recent + mask.num_recent);
            at.answer.resize(at.recent + args.iterations * (args.most + 1) + args.most);
        }
        if (asked && asked->token_counts) {
            const D3TokenCounts& known = *asked->token_counts;
            at.tally = {{known.tokens, known.tokens + known.used}, {known.counts, known.counts + known.used}};
        }
    }
}

D3Status SpeculativeLoop::check(const D3SpeculativeLoop& args, const Decoder& decoder, const Decoder* draft_model) {
    const D3Model& model = decoder.model();
    if (args.rows < 1 || args.rows > model.max_rows || args.iterations < 1) return D3_BAD_RUN;
    if (args.most < 1 || args.most >= model.max_rows) return D3_BAD_DRAFT;
    if (model.head_tokens) return D3_BAD_SHAPE;  // a shortened head judges nothing
    if (draft_model && draft_model->model().vocab != model.vocab) return D3_BAD_SHAPE;
    if ((args.sampling && !args.temperatures) || (args.logits && !args.reports)) return D3_BAD_RUN;
    const auto is_token = [&](int64_t token) { return token >= 0 && token < model.vocab; };
    const auto is_in_history = [&](int64_t token) { return token < model.vocab; };
    if (!std::all_of(args.history, args.history + args.history_length, is_in_history)) return D3_BAD_TOKEN;
    for (int row = 0; row < args.rows; row++) {
        const int64_t first = args.first_lengths[row], longest = args.most_lengths[row], rest = args.rooms[row];
        if (longest < 1 || longest > args.most || args.lengths[row] < 1 || args.lengths[row] > longest ||
            first > longest || args.num_begun[row] < 0 || args.num_begun[row] > first || first >= rest)
            return D3_BAD_DRAFT;
        const int64_t* begun = args.begun + int64_t(row) * args.most;
        if (!is_token(args.tokens[row]) || !std::all_of(begun, begun + args.num_begun[row], is_token))
            return D3_BAD_TOKEN;
        const int64_t last = args.positions[row] + std::min(args.iterations * (longest + 1), rest) - 1;
        const int64_t in_table = int64_t(model.max_blocks) * model.block_size;
        const int64_t max_position = std::min<int64_t>(model.max_positions, in_table);
        if (args.positions[row] < 0 || last >= max_position) return D3_BAD_POSITION;
        if (args.slots[row] < 0 || args.slots[row] >= model.num_slots) return D3_BAD_SLOT;
        if (args.places[row] >= 0 && args.places[row] + args.most > args.num_states) return D3_BAD_STATE;
        const D3TokenCounts* token_counts = args.sampling ? args.sampling[row].token_counts : nullptr;
        if (token_counts && !std::all_of(token_counts->tokens, token_counts->tokens + token_counts->used, is_token))
            return D3_BAD_TOKEN;
        const D3LogitMask* logit_mask = args.sampling ? args.sampling[row].logit_mask : nullptr;
        if (logit_mask && !is_valid_logit_mask(*logit_mask, model.vocab)) return D3_BAD_TOKEN;
        if (logit_mask && logit_mask->has_grammar && !args.grammar) return D3_BAD_RUN;
        const auto has_all_blocks = [&](const Decoder& of, const int32_t* tables) {
            const int64_t layers = of.model().num_layers, blocks = of.model().max_blocks;
            for (int layer = 0; layer < layers; layer++) {
                const int32_t* table = tables + (args.slots[row] * layers + layer) * blocks;
                if (!of.has_blocks(table, layer, args.positions[row], last)) return false;
            }
            return true;
        };
        if (!has_all_blocks(decoder, args.tables)) return D3_BAD_BLOCK;
        if (!args.drafters || !args.drafters[row]) continue;
        const int64_t* text = args.texts + row * args.text_room;
        if (!args.texts || last + 2 > args.text_room) return D3_BAD_TEXT;
        if (!std::all_of(text, text + args.positions[row] + 1, is_token)) return D3_BAD_TOKEN;
        if (!(args.drafters[row] & D3_DRAFT_MODEL)) continue;
        if (!draft_model || !args.draft_tables || !args.draft_positions) return D3_BAD_TEXT;
        const D3Model& second = draft_model->model();
        const int64_t in_second = int64_t(second.max_blocks) * second.block_size;
        const int64_t computed = args.draft_positions[row], room = std::min<int64_t>(second.max_positions, in_second);
        if (last >= room || computed < 0 || computed > args.positions[row]) return D3_BAD_POSITION;
        if (args.slots[row] >= second.num_slots || args.rows > second.max_rows) return D3_BAD_SLOT;
        if (!has_all_blocks(*draft_model, args.draft_tables)) return D3_BAD_BLOCK;
    }
    if (args.adapters && !decoder.has_fitting_maps(args.adapters, args.rows)) return D3_BAD_MAP;
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
    for (int row = 0; row < args_.rows; row++) std::fill_n(counts(row, nth), D3_LOOP_COUNTS, -1);
    seconds_ = 0, has_caught_up_ = has_probed_ = false;
    begin_grammars(nth);
    num_live_ = std::count_if(rows_.begin(), rows_.end(), [](const Row& row) { return !row.has_ended; });
    begin_drafts(nth);
    draft_by_own_layers(nth);
    draft_by_model(nth);
    verify(nth);
    int64_t tokens = 0, drafts = 0;
    for (int row = 0; row < args_.rows; row++) {
        if (rows_[row].has_ended) continue;
        tokens += counts(row, nth)[1] + 1, drafts += counts(row, nth)[0];
        advance(row, nth);
    }
    if (costs_ && num_live_ && !has_caught_up_) costs_->count_iteration(num_live_, tokens, seconds_, drafts > 0);
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
    bool skips = !drafts_by_own_layers(row);
    for (int layer = 0; layer < num_layers_; layer++) skips |= !is_active(row, layer);
    return skips ? std::min(rows_[row].length, rows_[row].room - 1) : 0;
}

bool SpeculativeLoop::ends_answer(int row, int64_t token) const {
    if (!args_.ends) return false;
    const int64_t* ends = args_.ends + row * args_.most_ends;
    return std::find(ends, ends + args_.most_ends, token) != ends + args_.most_ends;
}

// -- grammars ----------------------------------------------------------------------------------------------------

// Asks each grammar what may follow the answer; one that is complete ends its row.
void SpeculativeLoop::begin_grammars(int nth) {
    int64_t live = 0, with_grammar = 0;
    for (int row = 0; row < args_.rows; row++) {
        Row& at = rows_[row];
        at.masks.clear();
        if (at.has_ended) continue;
        if (has_grammar(row)) at.has_ended = !mask_at(row, 0, nth);
        if (!at.has_ended) live++, with_grammar += has_grammar(row);
    }
    if (costs_) costs_->set_mask_share(double(with_grammar) / double(std::max<int64_t>(live, 1)));
}

// The mask of a row's grammar behind the first `place` tokens of its draft. Null where nothing may follow: the grammar
// is complete, or does not go on with these tokens.
const uint8_t* SpeculativeLoop::mask_at(int row, int64_t place, int nth) {
    Row& at = rows_[row];
    int64_t* added = at.answer.data() + at.recent;
    for (int64_t before = int64_t(at.masks.size()); before <= place; before++) {
        std::copy_n(drafted(row, nth), before, added + at.added);
        const double begun = now();
        at.masks.push_back(args_.grammar(row, added, at.added, before));
        const double taken = now() - begun;
        seconds_ += taken;
        if (costs_) costs_->time_mask(taken);
    }
    return at.masks[place];
}

// How many of the first `count` drafted tokens the grammar allows, each with something behind it: the last token of an
// answer is left to the verification.
int64_t SpeculativeLoop::count_allowed(int row, int64_t count, int nth) {
    if (!has_grammar(row)) return count;
    const int64_t* tokens = drafted(row, nth);
    for (int64_t place = 0; place < count; place++)
        if (!is_allowed(mask_at(row, place, nth), tokens[place]) || !mask_at(row, place + 1, nth)) return place;
    return count;
}

// Ends a draft before its last token.
void SpeculativeLoop::drop_last(int row) {
    Row& at = rows_[row];
    at.wanted = --at.count;
    if (at.bins.empty()) return;
    if (costs_) at.all_right /= costs_->chance(D3_DRAFT_MODEL, at.bins.back());
    at.bins.pop_back();
}

// -- drafts ------------------------------------------------------------------------------------------------------

void SpeculativeLoop::begin_drafts(int nth) {
    for (int row = 0; row < args_.rows; row++) {
        Row& at = rows_[row];
        if (at.has_ended) continue;
        at.count = nth == 0 ? args_.num_begun[row] : 0;
        at.wanted = draft_length(row, nth);
        at.drafter = D3_OWN_LAYERS, at.all_right = 1;
        at.computed = std::min(at.computed, at.position);  // an iteration that failed may have been ahead
        at.bins.clear();
        if (nth == 0) std::copy_n(args_.begun + int64_t(row) * args_.most, at.count, drafted(row, 0));
        if (drafts(row, D3_DRAFT_MODEL)) plan_draft(row);
        if (drafts(row, D3_LOOKUP)) look_up(row, nth);
        if (at.drafter == D3_OWN_LAYERS && !drafts_by_own_layers(row)) at.wanted = 0;
    }
}

// Decides whether the draft model drafts, and how many tokens at most.
void SpeculativeLoop::plan_draft(int row) {
    Row& at = rows_[row];
    at.drafter = D3_DRAFT_MODEL;
    if (!costs_) return;
    const double each = costs_->draft(num_live_) / double(num_live_);
    const int64_t lag = at.position - at.computed;
    // A prompt that the draft model has not read yet is paid for by all tokens that the answer may still have.
    const double per_token = costs_->draft(D3_COST_ROWS) / D3_COST_ROWS;
    const double seconds = double(lag) * per_token, first = seconds * (lag > MAX_LAG ? 4 / double(at.room) : 1);
    const DraftCosts::Plan best = costs_->best_plan(costs_->mean_chance(), at.wanted, num_live_, each, first);
    at.rate = best.rate;
    if (best.length == 0) at.wanted = length_of_probe(at.wanted, each, seconds);
    if (at.wanted == 0) at.drafter = D3_OWN_LAYERS;
}

// Tokens of a draft that does not pay, if it is time to try one; 0 otherwise, and where not even drafts without a wrong
// token would pay. A token takes `each` seconds, the first one `first` more.
int64_t SpeculativeLoop::length_of_probe(int64_t most, double each, double first) {
    if (has_probed_ || most < 1 || !costs_->should_probe(num_live_, first)) return 0;
    if (costs_->best_plan(1, most, num_live_, each, 0).length == 0) return 0;
    has_probed_ = true;
    return std::min<int64_t>(most, 2);
}

// Drafts by a lookup where that promises more tokens per second than the draft model.
void SpeculativeLoop::look_up(int row, int nth) {
    Row& at = rows_[row];
    const int64_t most = draft_length(row, nth), length = at.position + 1;
    Lookup own, found;
    find_match(text(row), length, text(row), length, own);
    found = own;
    find_match(text(row), length, args_.history, args_.history_length, found);
    if (!found.length || most < 1) return;
    int64_t wanted = most;
    const int bin = DraftCosts::bin_of_match(found.length);
    if (costs_) {
        const DraftCosts::Plan best = costs_->best_plan(costs_->chance(D3_LOOKUP, bin), most, num_live_, 0, 0);
        if (at.drafter == D3_DRAFT_MODEL && best.rate < at.rate) return;
        wanted = best.length;
        if (wanted == 0) wanted = length_of_probe(most, 0, 0);
        if (wanted == 0) return;
    }
    int64_t* tokens = drafted(row, nth);
    int64_t count = copy_continuation(found, found.next == own.next, wanted, tokens);
    // Texts in the history are kept apart by a negative number, and nothing is worth proposing behind an end.
    count = std::find_if(tokens, tokens + count, [](int64_t token) { return token < 0; }) - tokens;
    for (int64_t place = 0; place + 1 < count; place++)
        if (ends_answer(row, tokens[place])) count = place + 1;
    count = count_allowed(row, count, nth);
    if (count == 0 && has_grammar(row)) at.masks.resize(1);
    if (count == 0) return;
    at.drafter = D3_LOOKUP;
    at.count = at.wanted = count;
    at.bins.assign(count, bin);
}

void SpeculativeLoop::draft_by_own_layers(int nth) {
    const auto grows = [](const Row& at) {
        return !at.has_ended && at.drafter == D3_OWN_LAYERS && at.count < at.wanted;
    };
    for (;;) {
        batch_.clear();
        for (int row = 0; row < args_.rows; row++) {
            if (grows(rows_[row]) && has_grammar(row) && !mask_at(row, rows_[row].count, nth)) drop_last(row);
            if (grows(rows_[row])) add_row(row, rows_[row].count, true, nth);
        }
        if (batch_.tokens.empty()) return;
        run_batch(decoder_, args_.tables, nth);
        for (int row = 0, place = 0; row < args_.rows; row++) {
            Row& at = rows_[row];
            if (!grows(at)) continue;
            const int64_t token = batch_.chosen[place];
            const bool is_sound = std::isfinite(batch_.scores[place++]);
            if (is_sound) drafted(row, nth)[at.count++] = token;
            if (!is_sound || ends_answer(row, token)) at.wanted = at.count;
        }
    }
}

void SpeculativeLoop::draft_by_model(int nth) {
    const auto grows = [](const Row& at) {
        return !at.has_ended && at.drafter == D3_DRAFT_MODEL && at.count < at.wanted;
    };
    for (;;) {
        batch_.clear();
        int64_t growing = 0;
        for (int row = 0; row < args_.rows; row++) {
            if (grows(rows_[row]) && has_grammar(row) && !mask_at(row, rows_[row].count, nth)) drop_last(row);
            if (grows(rows_[row])) catch_up(row, nth), growing++;
        }
        if (growing == 0) return;
        const double begun = now();
        const bool is_typical = int64_t(batch_.tokens.size()) <= growing + MAX_LAG;
        has_caught_up_ |= !is_typical;
        batch_.confidences.resize(costs_ || args_.stops ? batch_.tokens.size() : 0);
        run_batch(*draft_model_, args_.draft_tables, nth);
        if (costs_ && int64_t(batch_.tokens.size()) == growing) costs_->time_draft(growing, now() - begun);
        seconds_ += now() - begun;
        for (int row = 0, place = -1; row < args_.rows; row++) {
            Row& at = rows_[row];
            if (!grows(at)) continue;
            do place++;
            while (!batch_.yields[place]);
            const int64_t token = batch_.chosen[place];
            const bool is_sound = std::isfinite(batch_.scores[place]);
            at.computed = at.position + at.count + 1;
            if (!is_sound) {
                at.wanted = at.count;
                continue;
            }
            drafted(row, nth)[at.count++] = token;
            if (costs_) {
                at.bins.push_back(DraftCosts::bin_of_confidence(batch_.confidences[place]));
                at.all_right *= costs_->chance(D3_DRAFT_MODEL, at.bins.back());
            }
            const bool is_unsure = args_.stops && batch_.confidences[place] < args_.stops[row];
            if (is_unsure || ends_answer(row, token) || !pays_to_go_on(at, growing)) at.wanted = at.count;
            if (at.count == at.wanted) trim(row);
        }
    }
}

// Whether one more token of the draft model yields more tokens per second than time does elsewhere. The `growing`
// drafts share the draft model's step, which takes nearly as long for one.
bool SpeculativeLoop::pays_to_go_on(const Row& at, int64_t growing) const {
    if (!costs_) return true;
    const double row = costs_->one_more_row(num_live_ * (at.count + 1));
    const double seconds = costs_->draft(growing) / double(growing) + row;
    return at.all_right * costs_->mean_chance() > costs_->rate(num_live_) * seconds;
}

// Drops the last tokens of a draft that are not worth their rows in the verification.
void SpeculativeLoop::trim(int row) {
    Row& at = rows_[row];
    if (!costs_) return;
    while (at.count > 1 && at.all_right < costs_->rate(num_live_) * costs_->one_more_row(num_live_ * at.count))
        drop_last(row);
}

// The rows of a draft's next token: what the draft model has not computed of the text and of the draft. More than it
// takes in one step are computed at once.
void SpeculativeLoop::catch_up(int row, int nth) {
    Row& at = rows_[row];
    const int64_t stop = at.position + at.count + 1, spare = draft_model_->model().max_rows - args_.rows;
    while (stop - at.computed > std::max<int64_t>(spare / args_.rows, 1)) {
        Batch others;
        std::swap(others, batch_);
        const int64_t until = std::min(stop - 1, at.computed + draft_model_->model().max_rows);
        const double begun = now();
        for (; at.computed < until; at.computed++) {
            add_common(row, at.computed - at.position, nth);
            batch_.yields.push_back(0);
            batch_.cutoffs.insert(batch_.cutoffs.end(), draft_model_->model().num_layers, INT_MAX);
        }
        run_batch(*draft_model_, args_.draft_tables, nth);
        seconds_ += now() - begun;
        std::swap(others, batch_);
        has_caught_up_ = true;
        if (at.computed == stop - 1) break;
    }
    for (int64_t position = at.computed; position < stop; position++) {
        add_common(row, position - at.position, nth);
        batch_.yields.push_back(position + 1 == stop);
        batch_.cutoffs.insert(batch_.cutoffs.end(), draft_model_->model().num_layers, INT_MAX);
    }
}

// -- verification ------------------------------------------------------------------------------------------------

// Whole sequences at a time, as many as fit into the decoder's rows.
void SpeculativeLoop::verify(int nth) {
    for (int row = 0; row < args_.rows; row++) {
        if (rows_[row].has_ended) continue;
        const int64_t count = count_allowed(row, rows_[row].count, nth);
        while (rows_[row].count > count) drop_last(row);
    }
    for (int first = 0, next = 0; first < args_.rows; first = next) {
        batch_.clear();
        for (; next < args_.rows; next++) {
            const Row& at = rows_[next];
            if (at.has_ended) continue;
            if (int64_t(batch_.tokens.size()) + at.count + 1 > decoder_.model().max_rows) break;
            for (int64_t place = 0; place <= at.count; place++) add_row(next, place, false, nth);
        }
        if (batch_.tokens.empty()) return;
        const double begun = now();
        run_batch(decoder_, args_.tables, nth);
        if (costs_) costs_->time_verify(int64_t(batch_.tokens.size()), now() - begun);
        seconds_ += now() - begun;
        for (int row = first, place = 0; row < next; row++) {
            if (rows_[row].has_ended) continue;
            count_accepted(row, nth, place);
            place += int(rows_[row].count) + 1;
        }
    }
}

// Counts the accepted tokens of a draft whose verification begins at row `first` of the batch.
void SpeculativeLoop::count_accepted(int row, int nth, int first) {
    const Row& at = rows_[row];
    const int64_t* tokens = drafted(row, nth);
    const auto is_sound = [&](int64_t place) { return std::isfinite(batch_.scores[first + place]); };
    int64_t accepted = 0, count = at.count;
    while (accepted < count && is_sound(accepted) && batch_.chosen[first + accepted] == tokens[accepted]) accepted++;
    int64_t* found = counts(row, nth);
    found[0] = count;
    found[1] = accepted;
    found[2] = is_sound(accepted) ? batch_.chosen[first + accepted] : -1;
    found[3] = at.drafter;
    for (int64_t place = 0; place < int64_t(at.bins.size()) && place <= accepted && costs_; place++)
        costs_->judge(at.drafter, at.bins[place], place < accepted);
}

// Moves a sequence on by what was accepted. Nothing fails from here on.
void SpeculativeLoop::advance(int row, int nth) {
    Row& at = rows_[row];
    int64_t* found = counts(row, nth);
    const int64_t *tokens = drafted(row, nth), accepted = found[1];
    at.has_ended = found[2] < 0 || accepted + 1 >= at.room || ends_answer(row, found[2]) ||
                   std::any_of(tokens, tokens + accepted, [&](int64_t token) { return ends_answer(row, token); });
    if (!drafts_by_own_layers(row)) {
        std::copy_n(tokens, accepted, text(row) + at.position + 1);
        text(row)[at.position + accepted + 1] = std::max<int64_t>(found[2], 0);
    }
    for (int64_t place = 0; place <= accepted; place++) {
        const int64_t token = place < accepted ? tokens[place] : found[2];
        if (!at.answer.empty()) at.answer[at.recent + at.added++] = token;
        if (args_.sampling && args_.sampling[row].token_counts) at.tally.add(token);
    }
    at.token = found[2];
    at.position += accepted + 1;
    at.step += accepted + 1;
    at.room -= accepted + 1;
    at.computed = std::min(at.computed, at.position);
    found[4] = at.computed;
    if (args_.adapts[row] && found[0]) {
        const int64_t length = at.length + (accepted == found[0] ? 1 : -1);
        at.length = std::clamp<int64_t>(length, 1, args_.most_lengths[row]);
    }
}

// -- rows --------------------------------------------------------------------------------------------------------

// What all rows of a sequence have in common, at the token `place` positions after the answer's last.
void SpeculativeLoop::add_common(int row, int64_t place, int nth) {
    const Row& at = rows_[row];
    batch_.tokens.push_back(token_at(row, place, nth));
    batch_.positions.push_back(at.position + place);
    batch_.generation.push_back(std::max<int64_t>(at.step + place, 0));
    batch_.slots.push_back(args_.slots[row]);
    if (args_.temperatures) {
        batch_.temperatures.push_back(args_.temperatures[row]);
        batch_.seeds.push_back(args_.seeds[row]);
        batch_.indices.push_back(args_.indices[row]);
    }
    if (args_.sampling) batch_.sampling.push_back(args_.sampling[row]), batch_.origins.push_back({row, place});
}

// A row of the model's own, of a draft by some of its layers or of a verification.
void SpeculativeLoop::add_row(int row, int64_t place, bool is_draft, int nth) {
    const Row& at = rows_[row];
    const int skipped = at.drafter == D3_OWN_LAYERS ? first_skipped(row) : 0;
    const bool has_state = skipped > 0 && (is_draft || place < at.count);
    add_common(row, place, nth);
    batch_.kept_layers.push_back(skipped);
    batch_.kept_places.push_back(has_state && is_draft ? args_.places[row] + place : -1);
    batch_.resumed_places.push_back(has_state && !is_draft ? args_.places[row] + place : -1);
    if (args_.adapters) batch_.adapters.push_back(args_.adapters[row]);
    // Verification skips only layers whose states it has.
    batch_.bridges.push_back(is_draft && args_.bridges ? args_.bridges[row] : nullptr);
    const bool is_reported = !is_draft && reports(row);
    batch_.logit_places.push_back(is_reported ? cell(row, nth) * (args_.most + 1) + place : -1);
    for (int layer = 0; layer < num_layers_; layer++) {
        const bool runs = is_draft ? is_active(row, layer) : !has_state || layer >= skipped;
        batch_.cutoffs.push_back(runs ? INT_MAX : 0);
    }
}

// Lets the masks and counts of each row be those behind the drafted tokens before it.
void SpeculativeLoop::sample_behind_drafts(int nth) {
    Batch& b = batch_;
    const size_t rows = b.sampling.size();
    b.logit_masks.resize(rows), b.token_counts.resize(rows), b.tallies.resize(rows);
    for (size_t i = 0; i < rows; i++) {
        const auto [row, place] = b.origins[i];
        D3Sampling& asked = b.sampling[i];
        if (!b.yields.empty() && !b.yields[i]) asked.token_counts = nullptr, asked.logit_mask = nullptr;
        Row& at = rows_[row];
        const int64_t* tokens = drafted(row, nth);
        if (asked.logit_mask) {
            std::copy_n(tokens, place, at.answer.data() + at.recent + at.added);
            D3LogitMask& mask = b.logit_masks[i] = *asked.logit_mask;
            mask.recent = at.answer.data(), mask.num_recent = at.recent + at.added + place;
            mask.also_allowed = mask.has_grammar ? at.masks[place] : nullptr;
            mask.has_grammar = false;
            asked.logit_mask = &mask;
        }
        if (asked.token_counts) {
            TokenTally& tally = b.tallies[i] = at.tally;
            for (int64_t before = 0; before < place; before++) tally.add(tokens[before]);
            b.token_counts[i] = {tally.tokens.data(), tally.counts.data(), int64_t(tally.tokens.size()), 0};
            asked.token_counts = &b.token_counts[i];
        }
    }
}

void SpeculativeLoop::TokenTally::add(int64_t token) {
    const auto found = std::find(tokens.begin(), tokens.end(), token);
    if (found != tokens.end()) {
        counts[found - tokens.begin()]++;
        return;
    }
    tokens.push_back(token);
    counts.push_back(1);
}

void SpeculativeLoop::run_batch(Decoder& decoder, const int32_t* tables, int nth) {
    Batch& b = batch_;
    sample_behind_drafts(nth);
    b.chosen.resize(b.tokens.size());
    b.scores.resize(b.tokens.size());
    D3Run run{};
    run.rows = int32_t(b.tokens.size());
    run.steps = 1;
    run.tokens = b.tokens.data();
    run.positions = b.positions.data();
    run.generation = b.generation.data();
    run.slots = b.slots.data();
    run.cutoffs = b.cutoffs.data();
    run.tables = tables;
    run.chosen = b.chosen.data();
    run.scores = b.scores.data();
    if (args_.temperatures) run.temperatures = b.temperatures.data();
    run.seeds = b.seeds.data();
    run.indices = b.indices.data();
    if (!b.sampling.empty()) run.sampling = b.sampling.data();
    if (!b.yields.empty()) run.yields = b.yields.data();
    if (!b.confidences.empty()) run.confidences = b.confidences.data();
    if (!b.kept_places.empty()) {
        run.states = args_.states;
        run.num_states = args_.num_states;
        run.kept_layers = b.kept_layers.data();
        run.kept_places = b.kept_places.data();
        run.resumed_places = b.resumed_places.data();
        run.bridges = args_.bridges ? b.bridges.data() : nullptr;
        run.logits = args_.logits;
        run.logit_places = b.logit_places.data();
        run.num_logits = int64_t(args_.iterations) * args_.rows * (args_.most + 1);
        if (!b.adapters.empty()) run.adapters = b.adapters.data();
    }
    decoder.take(run, 0);
}

void SpeculativeLoop::Batch::clear() {
    for (auto* numbers : {&tokens, &positions, &generation, &slots, &kept_layers, &kept_places, &resumed_places, &seeds,
                          &indices, &logit_places})
        numbers->clear();
    cutoffs.clear();
    yields.clear();
    temperatures.clear();
    confidences.clear();
    sampling.clear();
    origins.clear();
    bridges.clear();
    adapters.clear();
}
