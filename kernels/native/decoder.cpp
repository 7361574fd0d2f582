// Decoding, a step after the other: the five operations of a layer are those of `kernels/reference.py`.
//
// The leader goes through them like plain code; `team_.each` is where the others help. A row that a layer does not run
// is not among its `active_` rows, and so costs nothing there.
#include "decoder.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "threading/fetching.h"
#include "formats/matrix.h"
#include "sampling/rules.h"

namespace {

// Of all matrices that a step at full depth reads.
int64_t bytes_of_matrices(const D3Model& model) {
    const auto bytes = [](const D3Matrix& matrix) { return bytes_of_row(matrix) * matrix.rows; };
    int64_t all = bytes(model.lm_head);
    for (const D3Layer* layer = model.layers; layer < model.layers + model.num_layers; layer++)
        all += bytes(layer->qkv) + bytes(layer->output) + bytes(layer->gate_up) + bytes(layer->down);
    return all;
}

}  // namespace

D3Decoder::D3Decoder(const D3Model& model, const Kernels& kernels)
    : model_(model),
      layers_(model.layers, model.layers + model.num_layers),
      kernels_(kernels),
      group_(model.heads / model.kv_heads),
      q_size_(model.heads * model.head_dim),
      kv_size_(model.kv_heads * model.head_dim),
      fetches_(bytes_fetched_ahead() > 0),
      team_(model.num_threads),
      multiplier_(kernels, team_, std::max({model.hidden, q_size_, model.intermediate}), model.max_rows,
                  bytes_of_matrices(model)),
      hidden_(model.max_rows, model.hidden),
      normed_(model.max_rows, model.hidden),
      projected_(model.max_rows, q_size_ + 2 * kv_size_),
      queries_(model.max_rows, q_size_),
      attended_(model.max_rows, q_size_),
      gated_(model.max_rows, model.intermediate),
      inner_(model.max_rows, model.hidden),
      scratch_(model.num_threads),
      best_(size_t(model.num_threads) * model.max_rows) {
    active_.reserve(model.max_rows);
    crossings_.reserve(model.max_rows);
    blocks_.reserve(size_t(model.max_rows) * model.kv_heads);
    ended_.reserve(model.max_rows);
    const int of_head = std::max(group_, BLOCK_QUERIES);
    for (auto& scratch : scratch_) {
        scratch.scores = Floats(int64_t(of_head) * ATTENTION_CHUNK);
        scratch.keys = Floats(int64_t(ATTENTION_CHUNK) * (model.head_dim + MOST_LANES));
        if (model.pool_scales) scratch.values = Floats(int64_t(ATTENTION_CHUNK) * model.head_dim);
        scratch.partials = Floats(2 * most_queries() * (model.head_dim + 2));
    }
}

D3Status D3Decoder::check(const D3Run& run) const {
    if (run.rows < 1 || run.rows > model_.max_rows || run.steps < 1) return D3_BAD_RUN;
    if (run.yields && run.steps != 1) return D3_BAD_RUN;  // the next step begins with the token of every row
    if (run.choices && !run.temperatures) return D3_BAD_RUN;
    for (int row = 0; row < run.rows; row++) {
        const D3Counted* counted = run.choices ? run.choices[row].counted : nullptr;
        for (int64_t i = 0; counted && i < counted->used; i++)
            if (counted->tokens[i] < 0 || counted->tokens[i] >= model_.vocab) return D3_BAD_TOKEN;
        const D3Rules* rules = run.choices ? run.choices[row].rules : nullptr;
        if (rules && !are_rules(*rules, model_.vocab)) return D3_BAD_TOKEN;
        if (rules && rules->has_form && !run.form) return D3_BAD_RUN;
        if (run.logit_places && run.logit_places[row] >= run.num_logits) return D3_BAD_RUN;
        const int64_t first = run.positions[row], last = first + run.steps - 1;
        if (run.tokens[row] < 0 || run.tokens[row] >= model_.vocab) return D3_BAD_TOKEN;
        const int64_t room = std::min<int64_t>(model_.max_positions, int64_t(model_.max_blocks) * model_.block_size);
        if (first < 0 || last >= room) return D3_BAD_POSITION;
        if (run.slots[row] < 0 || run.slots[row] >= model_.num_slots) return D3_BAD_SLOT;
        for (const int64_t* places : {run.kept_places, run.resumed_places})
            if (run.states && places[row] >= 0 && places[row] + run.steps > run.num_states) return D3_BAD_STATE;
        for (int layer = 0; layer < model_.num_layers; layer++) {
            const int64_t awake = run.cutoffs[row * model_.num_layers + layer] - run.generation[row];
            if (awake <= 0) continue;  // the layer sleeps: it has no blocks
            const int64_t deepest = first + std::min<int64_t>(awake, run.steps) - 1;
            if (!has_blocks(Step{run, 0}.table(row, layer, model_), deepest)) return D3_BAD_BLOCK;
        }
    }
    return run.bridges && !has_bridges(run) ? D3_BAD_BRIDGE : D3_OK;
}

// Whether a layer's table has blocks of the pool for all positions up to the last.
bool D3Decoder::has_blocks(const int32_t* table, int64_t last) const {
    const auto is_of_pool = [&](int32_t block) { return block >= 1 && block < model_.num_blocks; };
    return std::all_of(table, table + last / model_.block_size + 1, is_of_pool);
}

void D3Decoder::run(const D3Run& run) {
    ended_.assign(run.rows, false);
    int taken = 0;
    for (; taken < run.steps; taken++) {
        ask_forms({run, taken});
        if (taken && run.ends && have_ended(run, taken - 1)) break;
        step({run, taken});
    }
    if (run.taken) *run.taken = taken;
}

// Whether every row has come to its end, at this step or at one before.
bool D3Decoder::have_ended(const D3Run& run, int taken) {
    bool all = true;
    for (int row = 0; row < run.rows; row++) {
        const int64_t place = int64_t(taken) * run.rows + row, *ends = run.ends + row * run.most_ends;
        if (!ended_[row])
            ended_[row] = !std::isfinite(run.scores[place]) ||
                          std::find(ends, ends + run.most_ends, run.chosen[place]) != ends + run.most_ends;
        all &= ended_[row];
    }
    return all;
}

void D3Decoder::begin(const D3Run& run) {
    run_ = run;
    ended_.assign(run.rows, false);
    runner.begin({run.steps, run.course, [this](int taken) {
                      ask_forms({run_, taken});
                      step({run_, taken});
                  }});
}

void D3Decoder::step(const Step& step) {
    embed(step);
    for (int layer = 0; layer < model_.num_layers; layer++) {
        if (step.run.states) keep_states(step, layer);
        if (step.run.bridges) cross(step, layer);
        find_active(step, layer);
        if (active_.empty()) continue;
        const D3Layer& weights = layers_[layer];
        expect(weights.output);
        qkv(step, layer);
        if (layer + 1 == model_.num_layers) keep_asked(step);
        if (active_.empty()) break;
        attention(step, layer);
        expect(weights.gate_up, 2);
        add_product(weights.output, attended_);
        expect(weights.down);
        gate_up(weights);
        expect(after(step, layer));
        add_product(weights.down, gated_);
    }
    head(step);
}

// What is multiplied after a layer: the first matrix of the next one that a row runs, or the head's.
const D3Matrix& D3Decoder::after(const Step& step, int layer) const {
    while (++layer < model_.num_layers)
        for (int row = 0; row < step.run.rows; row++)
            if (step.runs(row, layer, model_)) return layers_[layer].qkv;
    return model_.lm_head;
}

void D3Decoder::embed(const Step& step) {
    const D3Matrix& table = model_.embedding;
    for (int row = 0; row < step.run.rows; row++) {
        if (step.run.states && step.run.resumed_places[row] >= 0) {
            memcpy(hidden_.row(row), state(step, step.run.resumed_places[row]), model_.hidden * sizeof(float));
            continue;
        }
        const int64_t* tokens = step.taken ? step.run.chosen + (step.taken - 1) * step.run.rows : step.run.tokens;
        look_up(hidden_.row(row), table, tokens[row]);
    }
}

float* D3Decoder::state(const Step& step, int64_t place) const {
    return step.run.states + (place + step.taken) * model_.hidden;
}

void D3Decoder::keep_states(const Step& step, int layer) {
    const D3Run& run = step.run;
    for (int row = 0; row < run.rows; row++)
        if (run.kept_layers[row] == layer && run.kept_places[row] >= 0)
            memcpy(state(step, run.kept_places[row]), hidden_.row(row), model_.hidden * sizeof(float));
}

void D3Decoder::find_active(const Step& step, int layer) {
    active_.clear();
    for (int row = 0; row < step.run.rows; row++)
        if (step.runs(row, layer, model_)) active_.push_back(row);
}

void D3Decoder::norm(const float* weight) {
    auto one = [&](int, int nth) {
        kernels_.rms_norm(normed_.row(nth), hidden_.row(active_[nth]), weight, model_.eps, model_.hidden);
    };
    const int count = int(active_.size());
    if (int64_t(count) * model_.hidden >= 16 * 1024) return team_.each(count, one);
    for (int nth = 0; nth < count; nth++) one(0, nth);  // sooner done than handed over
}

void D3Decoder::qkv(const Step& step, int layer) {
    const D3Layer& weights = layers_[layer];
    norm(weights.attention_norm);
    if (!weights.head_norms && !is_small()) {
        multiply(weights.qkv, normed_, [&](int, int nth, int start, int stop, const float* values) {
            for (int channel = start; channel < stop;) {  // by heads, of which a piece may hold parts
                const int count = std::min(stop - channel, model_.head_dim - channel % model_.head_dim);
                place(step, layer, nth, channel, values + (channel - start), count);
                channel += count;
            }
        });
        return;
    }
    put_product(weights.qkv, normed_, projected_);
    team_.each(int(active_.size()), [&](int, int nth) {  // a norm needs its whole head, and so does a scale
        for (int channel = 0; channel < q_size_ + 2 * kv_size_; channel += model_.head_dim) {
            float* head = projected_.row(nth) + channel;
            if (weights.head_norms && channel < q_size_ + kv_size_) {
                const float* weight = weights.head_norms + (channel < q_size_ ? 0 : model_.head_dim);
                kernels_.rms_norm(head, head, weight, model_.eps, model_.head_dim);
            }
            place_head(step, layer, nth, channel, head);
        }
    });
}

// Behind the last layer's entries nothing is computed for rows that nobody asks for a token, as most of a prompt's are.
void D3Decoder::keep_asked(const Step& step) {
    if (!step.run.yields) return;
    int kept = 0;
    for (int nth = 0; nth < int(active_.size()); nth++) {
        if (!step.run.yields[active_[nth]]) continue;
        if (kept < nth) memcpy(queries_.row(kept), queries_.row(nth), q_size_ * sizeof(float));
        active_[kept++] = active_[nth];
    }
    active_.resize(kept);
}

void D3Decoder::put_product(const D3Matrix& matrix, const Rows& x, const Rows& to) {
    multiply(matrix, x, [&](int, int nth, int start, int stop, const float* values) {
        memcpy(to.row(nth) + start, values, (stop - start) * sizeof(float));
    });
}

void D3Decoder::add_product(const D3Matrix& matrix, const Rows& x) {
    multiply(matrix, x, [&](int, int nth, int start, int stop, const float* values) {
        kernels_.add(hidden_.row(active_[nth]) + start, values, stop - start);
    });
}

// The rows of the gate and those of the up projection lie half a matrix apart; a piece takes some of both.
void D3Decoder::gate_up(const D3Layer& layer) {
    norm(layer.mlp_norm);
    const auto use = [&](int, int nth, int start, int stop, const float* gate, const float* up) {
        kernels_.swiglu(gated_.row(nth) + start, gate, up, stop - start);
    };
    multiplier_.multiply_bands<2>(layer.gate_up, normed_, int(active_.size()), use);
}

void D3Decoder::head(const Step& step) {
    const D3Run& run = step.run;
    active_.clear();
    for (int row = 0; row < run.rows; row++)
        if (!run.yields || run.yields[row]) active_.push_back(row);
    if (active_.empty()) return;
    norm(model_.final_norm);
    if (run.choices) {  // all memory is taken here: where pieces are shared nothing may throw
        if (!collected_.at(0)) collected_ = Floats(int64_t(model_.max_rows) * model_.vocab);
        orders_.resize(team_.size());
        for (auto& order : orders_) order.reserve(model_.vocab);
    }
    std::fill(best_.begin(), best_.end(), Best::nothing());
    multiply(model_.lm_head, normed_, [&](int worker, int nth, int start, int stop, const float* values) {
        const int row = active_[nth];
        const int64_t place = run.logit_places ? run.logit_places[row] : row;
        if (run.logits && place >= 0) {
            const int64_t count = run.logit_places ? run.num_logits : run.rows;
            float* logits = run.logits + (int64_t(step.taken) * count + place) * model_.vocab;
            memcpy(logits + start, values, (stop - start) * sizeof(float));
        }
        if (needs_all(run, row)) {
            memcpy(collected_.at(int64_t(row) * model_.vocab + start), values, (stop - start) * sizeof(float));
            return;
        }
        choose(best_[size_t(worker) * model_.max_rows + row], values, start, stop - start, choosing(step, row));
    });
    if (run.choices) choose_from_all(step);
    for (int row : active_) {
        Best best = best_[row];
        for (int worker = 1; worker < team_.size(); worker++) best.meet(best_[size_t(worker) * model_.max_rows + row]);
        run.chosen[step.taken * run.rows + row] = std::min<int64_t>(best.token, model_.vocab - 1);
        run.scores[step.taken * run.rows + row] = best.score;
    }
}
