// Decoding, a step after the other: the five operations of a layer are those of `kernels/reference.py`.
//
// The leader goes through them like plain code; `team_.each` is where the others help. A row that a layer does not run
// is not among its `active_` rows, and so costs nothing there.
#include "decoder.h"

#include <algorithm>
#include <cmath>

#include "fetching.h"
#include "matrix.h"
#include "rules.h"

namespace {

constexpr int MOST_PIECE_ROWS = 256;
constexpr int64_t PIECE_BYTES = 64 * 1024;
constexpr int64_t LEAST_PIECE_BYTES = 16 * 1024;
constexpr int64_t PANEL_BYTES = 512 * 1024;  // of a piece's panels: they stay in a core's second cache
constexpr int MANY_ROWS = 48;                // from here on widening a panel costs less than it saves
static_assert(MANY_ROWS % 16 == 0);         // vectors that were prepared together stay together

}  // namespace

D3Decoder::D3Decoder(const D3Model& model, const Kernels& kernels)
    : model_(model),
      layers_(model.layers, model.layers + model.num_layers),
      kernels_(kernels),
      group_(model.heads / model.kv_heads),
      q_size_(model.heads * model.head_dim),
      kv_size_(model.kv_heads * model.head_dim),
      ahead_(bytes_fetched_ahead()),
      team_(model.num_threads),
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
    blocks_.reserve(model.max_rows);
    ended_.reserve(model.max_rows);
    const int widest = std::max({model.hidden, q_size_, model.intermediate});
    const int queries = std::max(group_, BLOCK_QUERIES);
    for (auto& scratch : scratch_) {
        scratch.outputs = Rows(2 * MANY_ROWS, MOST_PIECE_ROWS);
        scratch.panels = Floats(std::max(PANEL_BYTES / int64_t(sizeof(float)), 2 * kernels.panel_floats(widest)));
        scratch.scores = Floats(int64_t(queries) * ATTENTION_CHUNK);
        scratch.keys = Floats(int64_t(ATTENTION_CHUNK) * (model.head_dim + MOST_LANES));
        if (model.pool_scales) scratch.values = Floats(int64_t(ATTENTION_CHUNK) * model.head_dim);
        scratch.partials = Floats(2 * int64_t(queries) * (model.head_dim + 2));
    }
    int64_t most = 0;
    for (D3Kind kind : {D3_FLOAT32, D3_BFLOAT16, D3_INT8, D3_FP8, D3_FP8_GROUPS, D3_INT4})
        if (kernels.prepare) most = std::max(most, kernels.prepared_bytes(kind, widest, model.max_rows));
    prepared_ = Floats(most / int64_t(sizeof(float)));
    strips_ = Floats((model.max_rows / kernels.strip + 1) * kernels.strip_floats(widest));
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
        qkv(step, layer);
        attention(step, layer);
        add_product(layers_[layer].output, attended_);
        gate_up(layers_[layer]);
        add_product(layers_[layer].down, gated_);
    }
    head(step);
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

Product D3Decoder::product(const D3Matrix& matrix, const Rows& x) const {
    return {D3Kind(matrix.kind), matrix.columns, static_cast<const char*>(matrix.values), bytes_of_row(matrix),
            matrix.scales, (matrix.columns + SCALE_GROUP - 1) / SCALE_GROUP, x.row(0), x.stride(),
            int32_t(active_.size()), nullptr, 0, ahead_};
}

// With its vectors in another form too, where this instruction set multiplies such a matrix by that.
Product D3Decoder::prepared(Product p) {
    if (!kernels_.prepare || kernels_.prepared_bytes(p.kind, p.columns, 1) == 0) return p;
    p.prepared = reinterpret_cast<char*>(prepared_.at(0)), p.at_once = p.batch;
    auto one = [&](int, int nth) { kernels_.prepare(p, nth); };
    if (int64_t(p.batch) * p.columns >= 16 * 1024) team_.each(p.batch, one);
    else for (int nth = 0; nth < p.batch; nth++) one(0, nth);  // sooner done than handed over
    return p;
}

// Output channels of a piece: about what a core's second cache holds beside the vectors, less where that would leave
// somebody without work; a multiple of 16, so that pairs of channels stay together and tiles are full.
int D3Decoder::rows_of_piece(const D3Matrix& matrix) const {
    const int64_t row = bytes_of_row(matrix), whole = row * matrix.rows;
    const int64_t bytes = std::clamp(whole / (2 * team_.size()), LEAST_PIECE_BYTES, PIECE_BYTES);
    return int(std::clamp<int64_t>((bytes / row + 15) / 16 * 16, 16, MOST_PIECE_ROWS));
}

// Panels of a piece, by band: what a core's second cache holds, less where that would leave somebody without work.
int D3Decoder::panels_of_piece(const D3Matrix& matrix, int bands) const {
    const int64_t held = PANEL_BYTES / (kernels_.panel_floats(matrix.columns) * int64_t(sizeof(float)) * bands);
    const int64_t fair = matrix.rows / (bands * 2 * team_.size() * kernels_.panel);
    return int(std::clamp<int64_t>(std::min(held, fair), 1, MOST_PIECE_ROWS / kernels_.panel));
}

// Calls use(worker, nth row, first channel, last channel, their values) for every active row and piece.
template <class Use> void D3Decoder::multiply(const D3Matrix& matrix, const Rows& x, Use use) {
    multiply_bands<1>(matrix, x, [&](int worker, int nth, int start, int stop, float* values, const float*) {
        use(worker, nth, start, stop, values);
    });
}

// The same where the output channels are one band or two, which lie half a matrix apart and are used together: calls
// use(worker, nth row, first channel, last channel, their values, those of the second band).
template <int BANDS, class Use> void D3Decoder::multiply_bands(const D3Matrix& matrix, const Rows& x, Use use) {
    const Product p = prepared(product(matrix, x));
    const int channels = matrix.rows / BANDS;
    const auto use_rows = [&](int worker, int first, int count, int start, int stop) {
        const Rows& out = scratch_[worker].outputs;
        for (int nth = 0; nth < count; nth++) {
            float* values[] = {out.row(nth), out.row(MANY_ROWS + nth)};
            for (int band = 0; matrix.bias && band < BANDS; band++)
                kernels_.add(values[band], matrix.bias + band * channels + start, stop - start);
            use(worker, first + nth, start, stop, values[0], values[1]);
        }
    };
    if (p.batch >= MANY_ROWS && !p.prepared) return multiply_many<BANDS>(matrix, p, use_rows);
    const int size = std::max(16, rows_of_piece(matrix) / BANDS / 16 * 16);
    team_.each((channels + size - 1) / size, [&](int worker, int piece) {
        const Rows& out = scratch_[worker].outputs;
        const int start = piece * size, stop = std::min(channels, start + size);
        for (int first = 0; first < p.batch; first += MANY_ROWS) {
            Product some = p;
            some.batch = std::min(MANY_ROWS, p.batch - first), some.x += first * p.ldx;
            if (p.prepared) some.prepared += kernels_.prepared_bytes(p.kind, p.columns, first);
            for (int band = 0; band < BANDS; band++) {
                const int before = band * channels;
                kernels_.multiply(some, before + start, before + stop, out.row(band * MANY_ROWS), out.stride());
            }
            use_rows(worker, first, some.batch, start, stop);
        }
    });
}

// Many rows meet weights that are widened once for all of them, panel by panel: no more than a piece's is ever there.
template <int BANDS, class Use> void D3Decoder::multiply_many(const D3Matrix& matrix, const Product& p, Use use) {
    const int channels = matrix.rows / BANDS, panel = kernels_.panel, strip = kernels_.strip;
    const int64_t panel_floats = kernels_.panel_floats(p.columns), strip_floats = kernels_.strip_floats(p.columns);
    const int strips = (p.batch + strip - 1) / strip, panels = panels_of_piece(matrix, BANDS), size = panels * panel;
    const auto rows_of = [&](int nth) { return std::min(strip, p.batch - nth * strip); };
    team_.each(strips, [&](int, int nth) {
        kernels_.pack(p, nth * strip, rows_of(nth), strips_.at(nth * strip_floats));
    });
    team_.each((channels + size - 1) / size, [&](int worker, int piece) {
        const Scratch& scratch = scratch_[worker];
        const int start = piece * size, stop = std::min(channels, start + size);
        // Calls body(a panel's floats, its first channel, its last, where their values go).
        const auto each_panel = [&](auto body) {
            for (int band = 0; band < BANDS; band++)
                for (int n = start, nth = band * panels; n < stop; n += panel, nth++)
                    body(scratch.panels.at(nth * panel_floats), band * channels + n,
                         band * channels + std::min(stop, n + panel),
                         scratch.outputs.row(band * MANY_ROWS) + n - start);
        };
        each_panel([&](float* widened, int from, int end, float*) { kernels_.widen(p, from, end, widened); });
        for (int nth = 0; nth < strips; nth++) {
            const float* vectors = strips_.at(nth * strip_floats);
            each_panel([&](const float* widened, int from, int end, float* out) {
                kernels_.multiply_panel(p, widened, from, end, vectors, rows_of(nth), out, scratch.outputs.stride());
            });
            use(worker, nth * strip, rows_of(nth), start, stop);
        }
    });
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
    multiply_bands<2>(layer.gate_up, normed_, use);
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
