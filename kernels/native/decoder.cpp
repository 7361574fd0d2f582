// Decoding, step by step: the five operations of a layer are those of `kernels/reference.py`.
//
// One thread runs this code; `threads_.parallel_for` spreads an operation's tiles over the others. Rows that skip a
// layer are not among its `active_` rows and cost nothing there.
#include "decoder.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "formats/matrix.h"
#include "threading/work_queue.h"

namespace {

// Of all matrices that a step at full depth reads.
int64_t bytes_of_matrices(const D3Model& model) {
    const auto bytes = [](const D3Matrix& matrix) {
        int64_t sum = 0;
        for (const D3Matrix* part = &matrix; part; part = part->below) sum += bytes_of_row(*part) * part->rows;
        return sum;
    };
    int64_t all = bytes(model.lm_head);
    for (const D3Layer* layer = model.layers; layer < model.layers + model.num_layers; layer++)
        all += bytes(layer->qkv) + bytes(layer->output) + bytes(layer->gate_up) + bytes(layer->down);
    return all;
}

const D3Bridge* find(const D3Bridges& bridges, int first, int stop) {
    for (int64_t nth = 0; nth < bridges.count; nth++)
        if (bridges.bridges[nth].first == first && bridges.bridges[nth].stop == stop) return bridges.bridges + nth;
    return nullptr;
}

bool fits(const D3Bridge& bridge, int hidden) {
    if (!bridge.weight.bias) return false;
    if (!bridge.down.values) return is_matrix(bridge.weight, hidden, hidden, nullptr);
    const int rank = bridge.down.rows;
    return rank >= 1 && rank <= hidden && is_matrix(bridge.weight, hidden, rank, nullptr) &&
           is_matrix(bridge.down, rank, hidden, nullptr);
}

// Of a map for outputs of `outputs` channels.
bool is_map(const D3LowRank& map, int columns, int outputs) {
    const auto is_padded = [](int64_t stride, int count) {
        return stride >= (count + MAX_LANES - 1) / MAX_LANES * MAX_LANES;
    };
    const bool is_float = map.kind == D3_FLOAT32 || map.kind == D3_BFLOAT16 || map.kind == D3_FLOAT16;
    return map.rank == 0 || (map.rank >= 1 && map.rank <= D3_MAX_RANK && is_float && map.columns == columns &&
                             map.outputs == outputs && map.down && map.up && is_padded(map.down_stride, columns) &&
                             is_padded(map.up_stride, outputs));
}

MapArgs map_args(const D3LowRank& map) {
    return {map.kind, map.rank, map.columns, map.down_stride, map.up_stride, static_cast<const char*>(map.down),
            static_cast<const char*>(map.up)};
}

constexpr int MAX_MAP_PARTS = 3;

// Multiplications of maps: with fewer of them handing over to other threads takes longer.
constexpr int64_t MIN_PARALLEL_MAPS = 32 * 1024;

// Multiplications of attention: with fewer of them handing over to other threads takes longer.
constexpr int64_t MIN_PARALLEL_PRODUCTS = 24 * 1024;

// Those behind the first row's window are left out.
int first_span(const AttentionArgs& a) { return std::max(0, a.length - a.window) / ATTENTION_SPAN; }
int num_spans(const AttentionArgs& a) {
    return (a.length + a.rows - 1 + ATTENTION_SPAN - 1) / ATTENTION_SPAN - first_span(a);
}
int64_t num_positions(const AttentionArgs& a) { return std::min(a.length, a.window); }
int64_t num_queries(const AttentionArgs& a) { return int64_t(a.heads) * a.rows * a.group; }
int64_t num_products(const AttentionArgs& a) { return 2 * num_queries(a) * num_positions(a) * a.head_dim; }
int64_t num_floats(const AttentionArgs& a) { return num_queries(a) * (a.head_dim + 2); }

// Whether the last span of this context is long enough to prefetch the first chunk of another meanwhile.
bool has_time_for_next(const AttentionArgs& a) {
    return a.length > ATTENTION_CHUNK && (a.length - 1) % ATTENTION_SPAN + 1 >= ATTENTION_CHUNK;
}

}  // namespace

Decoder::Decoder(const D3Model& model, const Kernels& kernels)
    : model_(model),
      layers_(model.layers, model.layers + model.num_layers),
      kernels_(kernels),
      group_(model.heads / model.kv_heads),
      q_size_(model.heads * model.head_dim),
      kv_size_(model.kv_heads * model.head_dim),
      prefetches_(prefetch_distance() > 0),
      activate_(model.activation == D3_GELU_TANH ? kernels.geglu : kernels.swiglu),
      threads_(model.num_threads),
      matmul_(kernels, threads_, std::max({model.hidden, q_size_, model.intermediate}), model.max_rows,
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
    bridged_rows_.reserve(model.max_rows);
    query_blocks_.reserve(size_t(model.max_rows) * model.kv_heads);
    ended_.reserve(model.max_rows);
    is_needed_.reserve(model.max_rows);
    const int of_head = std::max(group_, BLOCK_QUERIES);
    for (auto& scratch : scratch_) {
        scratch.scores = Floats(int64_t(of_head) * ATTENTION_CHUNK);
        scratch.keys = Floats(int64_t(ATTENTION_CHUNK) * (model.head_dim + MAX_LANES));
        if (model.pool_scales) scratch.values = Floats(int64_t(ATTENTION_CHUNK) * model.head_dim);
        scratch.partials = Floats(2 * max_queries() * (model.head_dim + 2));
    }
}

D3Status Decoder::check(const D3Run& run) const {
    if (run.rows < 1 || run.rows > model_.max_rows || run.steps < 1) return D3_BAD_RUN;
    if (run.yields && run.steps != 1) return D3_BAD_RUN;  // the next step needs the tokens of all rows
    if (run.sampling && !run.temperatures) return D3_BAD_RUN;
    if (model_.head_tokens && run.logits) return D3_BAD_RUN;  // they have a place for each token
    for (int row = 0; row < run.rows; row++) {
        const D3TokenCounts* token_counts = run.sampling ? run.sampling[row].token_counts : nullptr;
        for (int64_t i = 0; token_counts && i < token_counts->used; i++)
            if (token_counts->tokens[i] < 0 || token_counts->tokens[i] >= model_.vocab) return D3_BAD_TOKEN;
        const D3LogitMask* logit_mask = run.sampling ? run.sampling[row].logit_mask : nullptr;
        if (logit_mask && !is_valid_logit_mask(*logit_mask, model_.vocab)) return D3_BAD_TOKEN;
        if (logit_mask && logit_mask->has_grammar && !run.grammar) return D3_BAD_RUN;
        if (run.logit_places && run.logit_places[row] >= run.num_logits) return D3_BAD_RUN;
        const int64_t first = run.positions[row], last = first + run.steps - 1;
        if (run.tokens[row] < 0 || run.tokens[row] >= model_.vocab) return D3_BAD_TOKEN;
        const int64_t room = std::min<int64_t>(model_.max_positions, int64_t(model_.max_blocks) * model_.block_size);
        if (first < 0 || last >= room) return D3_BAD_POSITION;
        if (run.slots[row] < 0 || run.slots[row] >= model_.num_slots) return D3_BAD_SLOT;
        for (const int64_t* places : {run.kept_places, run.resumed_places})
            if (run.states && places[row] >= 0 && places[row] + run.steps > run.num_states) return D3_BAD_STATE;
        for (int layer = 0; layer < model_.num_layers; layer++) {
            const int64_t active_steps = run.cutoffs[row * model_.num_layers + layer] - run.generation[row];
            if (active_steps <= 0) continue;  // a skipped layer has no blocks
            const int64_t deepest = first + std::min<int64_t>(active_steps, run.steps) - 1;
            if (!has_blocks(Step{run, 0}.table(row, layer, model_), layer, first, deepest)) return D3_BAD_BLOCK;
        }
    }
    if (run.adapters && !has_fitting_maps(run.adapters, run.rows)) return D3_BAD_MAP;
    if (!has_valid_hooks(run)) return D3_BAD_STATE;
    for (int64_t nth = 0; nth < run.num_steerings; nth++) {
        const D3LowRank* map = run.steerings[nth].map;
        if (map && (!map->rank || !is_map(*map, model_.hidden, model_.hidden))) return D3_BAD_MAP;
    }
    return run.bridges && !has_bridges(run) ? D3_BAD_BRIDGE : D3_OK;
}

bool Decoder::has_blocks(const int32_t* table, int layer, int64_t first, int64_t last) const {
    // Behind the window of `first` a block may have been given back: its place names block 0 or an earlier owner's,
    // which is read where it shares a span with the window, and masked.
    const int64_t behind = std::max<int64_t>(0, first + 1 - layers_[layer].window) / model_.block_size;
    const auto is_readable = [&](int32_t block) { return block >= 0 && block < model_.num_blocks; };
    const auto is_of_pool = [&](int32_t block) { return block >= 1 && block < model_.num_blocks; };
    return std::all_of(table, table + behind, is_readable) &&
           std::all_of(table + behind, table + last / model_.block_size + 1, is_of_pool);
}

void Decoder::run(const D3Run& run) {
    begin(run);
    int taken = 0;
    for (; taken < run.steps; taken++) {
        ask_grammars({run, taken});
        if (taken && run.ends && have_ended(run, taken - 1)) break;
        step({run, taken});
    }
    if (run.taken) *run.taken = taken;
}

// Whether every row has ended, at this step or before.
bool Decoder::have_ended(const D3Run& run, int taken) {
    bool all = true;
    for (int row = 0; row < run.rows; row++) {
        const int64_t index = int64_t(taken) * run.rows + row, *ends = run.ends + row * run.most_ends;
        if (!ended_[row])
            ended_[row] = !std::isfinite(run.scores[index]) ||
                          std::find(ends, ends + run.most_ends, run.chosen[index]) != ends + run.most_ends;
        all &= ended_[row];
    }
    return all;
}

void Decoder::begin(const D3Run& run) { ended_.assign(run.rows, false); }

void Decoder::take(const D3Run& run, int taken) {
    ask_grammars({run, taken});
    step({run, taken});
}

void Decoder::step(const Step& step) {
    embed(step);
    const bool has_hooks = step.run.num_steerings || step.run.num_captures;
    next_steering_ = next_capture_ = 0;
    for (int layer = 0; layer < model_.num_layers; layer++) {
        if (has_hooks) run_hooks(step, layer);
        if (step.run.states) save_states(step, layer);
        if (step.run.bridges) apply_bridges(step, layer);
        find_active(step, layer);
        if (active_.empty()) continue;
        const D3Layer& weights = layers_[layer];
        expect(weights.output);
        qkv(step, layer);
        if (layer + 1 == model_.num_layers) keep_yielding(step);
        if (active_.empty()) break;
        attention(step, layer);
        expect(weights.gate_up, 2);
        begin_maps(step, layer_map(layer, D3_MAP_OUTPUT), 1, attended_);
        add_product(weights.output, attended_, weights.attention_post_norm);
        expect(weights.down);
        gate_up(step, layer);
        expect(next_matrix(step, layer));
        begin_maps(step, layer_map(layer, D3_MAP_DOWN), 1, gated_);
        add_product(weights.down, gated_, weights.mlp_post_norm);
    }
    if (has_hooks) run_hooks(step, model_.num_layers);
    head(step);
}

// The matrix after a layer: the first of the next layer that a row runs, or the LM head.
const D3Matrix& Decoder::next_matrix(const Step& step, int layer) const {
    while (++layer < model_.num_layers)
        for (int row = 0; row < step.run.rows; row++)
            if (step.runs(row, layer, model_)) return layers_[layer].qkv;
    return model_.lm_head;
}

void Decoder::embed(const Step& step) {
    const D3Matrix& table = model_.embedding;
    for (int row = 0; row < step.run.rows; row++) {
        if (step.run.states && step.run.resumed_places[row] >= 0) {
            memcpy(hidden_.row(row), state(step, step.run.resumed_places[row]), model_.hidden * sizeof(float));
            continue;
        }
        const int64_t* tokens = step.taken ? step.run.chosen + (step.taken - 1) * step.run.rows : step.run.tokens;
        const int token = int(tokens[row]);
        if (table.kind >= D3_Q4_0) kernels_.unpack_blocks(table, token, token + 1, 0, hidden_.row(row));
        else read_row(hidden_.row(row), table, token);
        if (model_.embedding_scale != 1)
            for (int i = 0; i < model_.hidden; i++) hidden_.row(row)[i] *= model_.embedding_scale;
    }
}

float* Decoder::state(const Step& step, int64_t index) const {
    return step.run.states + (index + step.taken) * model_.hidden;
}

void Decoder::save_states(const Step& step, int layer) {
    const D3Run& run = step.run;
    for (int row = 0; row < run.rows; row++)
        if (run.kept_layers[row] == layer && run.kept_places[row] >= 0)
            memcpy(state(step, run.kept_places[row]), hidden_.row(row), model_.hidden * sizeof(float));
}

// All layers below `layer` have run.
void Decoder::run_hooks(const Step& step, int layer) {
    const D3Run& run = step.run;
    for (; next_steering_ < run.num_steerings && run.steerings[next_steering_].layer == layer; next_steering_++) {
        const D3Steering& one = run.steerings[next_steering_];
        const int64_t position = step.position(one.row);
        if (position >= one.start && position < one.stop && (position - one.start) % one.step == 0) steer(one);
    }
    float* captured = run.captured + step.taken * run.num_captures * model_.hidden;
    for (; next_capture_ < run.num_captures && run.captures[next_capture_].layer == layer; next_capture_++)
        memcpy(captured + next_capture_ * model_.hidden, hidden_.row(run.captures[next_capture_].row),
               model_.hidden * sizeof(float));
}

void Decoder::steer(const D3Steering& steering) {
    float* state = hidden_.row(steering.row);
    if (steering.vector) return kernels_.add(state, steering.vector, model_.hidden);
    if (!mapped_.stride()) mapped_ = Rows(model_.max_rows, MAX_MAP_PARTS * D3_MAX_RANK);
    const MapArgs map = map_args(*steering.map);
    kernels_.map_down(map, state, 0, map.rank, mapped_.row(0));
    kernels_.map_up(map, mapped_.row(0), 0, model_.hidden, state);
}

bool Decoder::has_valid_hooks(const D3Run& run) const {
    const auto are_valid = [&](const auto* hooks, int64_t count, int last) {
        for (int64_t nth = 0; nth < count; nth++) {
            const auto& one = hooks[nth];
            if (one.row < 0 || one.row >= run.rows || one.layer < (nth ? hooks[nth - 1].layer : 0) || one.layer > last)
                return false;
        }
        return true;
    };
    for (int64_t nth = 0; nth < run.num_steerings; nth++)
        if (run.steerings[nth].step < 1 || !run.steerings[nth].vector == !run.steerings[nth].map) return false;
    return (!run.num_captures || run.captured) && are_valid(run.captures, run.num_captures, model_.num_layers) &&
           are_valid(run.steerings, run.num_steerings, model_.num_layers - 1);
}

void Decoder::find_active(const Step& step, int layer) {
    active_.clear();
    for (int row = 0; row < step.run.rows; row++)
        if (step.runs(row, layer, model_)) active_.push_back(row);
}

// Calls body(worker, nth active row), which reads a hidden state or two.
template <class Body> void Decoder::each_row(Body body) {
    const int count = int(active_.size());
    if (int64_t(count) * model_.hidden >= 16 * 1024) return threads_.parallel_for(count, body);
    for (int nth = 0; nth < count; nth++) body(0, nth);  // faster than handing over
}

void Decoder::norm(const float* weight) {
    each_row([&](int, int nth) {
        const float* from = hidden_.row(active_[nth]);
        if (weight) kernels_.rms_norm(normed_.row(nth), from, weight, model_.eps, model_.hidden);
        else memcpy(normed_.row(nth), from, model_.hidden * sizeof(float));
    });
}

void Decoder::qkv(const Step& step, int layer) {
    const D3Layer& weights = layers_[layer];
    norm(weights.attention_norm);
    begin_maps(step, layer_map(layer, D3_MAP_Q), 3, normed_);
    if (!weights.head_norms && !weights.projection_norms && !has_8bit_kv()) {
        multiply(weights.qkv, normed_, [&](int, int nth, int start, int stop, float* values) {
            if (has_maps_) add_maps(nth, start, stop, values);
            for (int channel = start; channel < stop;) {  // by heads, of which a tile may hold parts
                const int count = std::min(stop - channel, model_.head_dim - channel % model_.head_dim);
                store_qkv(step, layer, nth, channel, values + (channel - start), count);
                channel += count;
            }
        });
        return;
    }
    multiply_into(weights.qkv, normed_, projected_);
    threads_.parallel_for(int(active_.size()), [&](int, int nth) {  // a norm needs its whole head, and so does a scale
        if (const float* weight = weights.projection_norms) {
            float *queries = projected_.row(nth), *keys = queries + q_size_;
            kernels_.rms_norm(queries, queries, weight, model_.eps, q_size_);
            kernels_.rms_norm(keys, keys, weight + q_size_, model_.eps, kv_size_);
        }
        for (int channel = 0; channel < q_size_ + 2 * kv_size_; channel += model_.head_dim) {
            float* head = projected_.row(nth) + channel;
            if (weights.head_norms && channel < q_size_ + kv_size_) {
                const float* weight = weights.head_norms + (channel < q_size_ ? 0 : model_.head_dim);
                kernels_.rms_norm(head, head, weight, model_.eps, model_.head_dim);
            }
            store_head(step, layer, nth, channel, head);
        }
    });
}

// After the last layer's keys and values are stored, rows that need no token stop: most rows of a prompt. Those whose
// last state is captured go on.
void Decoder::keep_yielding(const Step& step) {
    const D3Run& run = step.run;
    if (!run.yields) return;
    is_needed_.assign(run.yields, run.yields + run.rows);
    for (int64_t nth = next_capture_; nth < run.num_captures; nth++) is_needed_[run.captures[nth].row] = true;
    int kept = 0;
    for (int nth = 0; nth < int(active_.size()); nth++) {
        if (!is_needed_[active_[nth]]) continue;
        if (kept < nth) memcpy(queries_.row(kept), queries_.row(nth), q_size_ * sizeof(float));
        active_[kept++] = active_[nth];
    }
    active_.resize(kept);
}

void Decoder::multiply_into(const D3Matrix& matrix, const Rows& x, const Rows& to) {
    multiply(matrix, x, [&](int, int nth, int start, int stop, float* values) {
        if (has_maps_) add_maps(nth, start, stop, values);
        memcpy(to.row(nth) + start, values, (stop - start) * sizeof(float));
    });
}

void Decoder::multiply_and_add(const D3Matrix& matrix, const Rows& x) {
    multiply(matrix, x, [&](int, int nth, int start, int stop, float* values) {
        if (has_maps_) add_maps(nth, start, stop, values);
        kernels_.add(hidden_.row(active_[nth]) + start, values, stop - start);
    });
}

// With a norm behind the sublayer the whole product is needed before it is added.
void Decoder::add_product(const D3Matrix& matrix, const Rows& x, const float* post_norm) {
    if (!post_norm) return multiply_and_add(matrix, x);
    multiply_into(matrix, x, inner_);
    each_row([&](int, int nth) {
        float* product = inner_.row(nth);
        kernels_.rms_norm(product, product, post_norm, model_.eps, model_.hidden);
        kernels_.add(hidden_.row(active_[nth]), product, model_.hidden);
    });
}

// The rows of gate and up lie half a matrix apart; a tile takes some of both.
void Decoder::gate_up(const Step& step, int layer) {
    norm(layers_[layer].mlp_norm);
    begin_maps(step, layer_map(layer, D3_MAP_GATE), 2, normed_);
    const auto use = [&](int, int nth, int start, int stop, float* gate, float* up) {
        if (has_maps_) add_map(nth, 0, start, stop, gate), add_map(nth, 1, start, stop, up);
        activate_(gated_.row(nth) + start, gate, up, stop - start);
    };
    matmul_.multiply_bands<2>(layers_[layer].gate_up, normed_, int(active_.size()), use);
}

void Decoder::head(const Step& step) {
    const D3Run& run = step.run;
    active_.clear();
    for (int row = 0; row < run.rows; row++)
        if (!run.yields || run.yields[row]) active_.push_back(row);
    if (active_.empty()) return;
    norm(model_.final_norm);
    begin_maps(step, model_.num_layers * D3_LAYER_MAPS, 1, normed_);
    if (run.sampling) {  // allocate here: inside `parallel_for` nothing may throw
        if (!all_logits_.at(0)) all_logits_ = Floats(int64_t(model_.max_rows) * model_.vocab);
        orders_.resize(threads_.size());
        for (auto& order : orders_) order.reserve(model_.vocab);
    }
    std::fill(best_.begin(), best_.end(), Best::none());
    if (run.confidences) masses_.assign(best_.size(), Mass());
    multiply(model_.lm_head, normed_, [&](int worker, int nth, int start, int stop, float* values) {
        const int row = active_[nth];
        const DrawParams how = draw_params(step, row);
        const size_t place = size_t(worker) * model_.max_rows + row;
        if (has_maps_) add_maps(nth, start, stop, values);
        if (model_.logit_cap > 0) kernels_.soft_cap(values, model_.logit_cap, stop - start);
        if (run.confidences) masses_[place].update(values, stop - start, how.temperature);
        const int64_t index = run.logit_places ? run.logit_places[row] : row;
        if (run.logits && index >= 0) {
            const int64_t count = run.logit_places ? run.num_logits : run.rows;
            float* logits = run.logits + (int64_t(step.taken) * count + index) * model_.vocab;
            memcpy(logits + start, values, (stop - start) * sizeof(float));
        }
        if (needs_all_logits(run, row)) {
            memcpy(all_logits_.at(int64_t(row) * model_.vocab + start), values, (stop - start) * sizeof(float));
            return;
        }
        const int64_t* tokens = model_.head_tokens;
        if (tokens) update_best_of(best_[place], values, tokens + start, stop - start, how);
        else update_best(best_[place], values, start, stop - start, how);
    });
    if (run.sampling) sample_from_all(step);
    for (int row : active_) {
        Best best = best_[row];
        for (int worker = 1; worker < threads_.size(); worker++)
            best.update(best_[size_t(worker) * model_.max_rows + row]);
        run.chosen[step.taken * run.rows + row] = std::min<int64_t>(best.token, model_.vocab - 1);
        run.scores[step.taken * run.rows + row] = best.score;
    }
    for (int row : active_) {
        if (!run.confidences) break;
        Mass mass;
        for (int worker = 0; worker < threads_.size(); worker++)
            mass.update(masses_[size_t(worker) * model_.max_rows + row]);
        run.confidences[step.taken * run.rows + row] = mass.confidence();
    }
}

// -- KV cache ----------------------------------------------------------------------------------------------------

// The index of a key (half 0) or value (half 1) in the pool, all its heads together.
int64_t Decoder::kv_row(const Step& step, int row, int layer, int half) const {
    const int64_t position = step.position(row), block = step.table(row, layer, model_)[position / model_.block_size];
    return (2 * block + half) * model_.block_size + position % model_.block_size;
}

// Stores `count` channels from `channel` on, all of one head, as queries, keys or values; queries and keys are rotated.
void Decoder::store_qkv(const Step& step, int layer, int nth, int channel, const float* from, int count) {
    const int row = active_[nth], keys_end = q_size_ + kv_size_;
    float *pool = static_cast<float*>(model_.pool), *to;
    if (channel < q_size_) to = queries_.row(nth) + channel;
    else if (channel < keys_end) to = pool + kv_row(step, row, layer, 0) * kv_size_ + (channel - q_size_);
    else to = pool + kv_row(step, row, layer, 1) * kv_size_ + (channel - keys_end);
    const float* rotations = layers_[layer].rotations;
    if (!rotations || channel >= keys_end) {
        memcpy(to, from, count * sizeof(float));
        return;
    }
    const float* turns = rotations + step.position(row) * model_.head_dim;
    kernels_.rotate(to, from, turns + channel % model_.head_dim, count);
}

// The same for a whole head, which an 8-bit KV cache needs for its scale. It may change `head`.
void Decoder::store_head(const Step& step, int layer, int nth, int channel, float* head) {
    if (channel < q_size_ || !has_8bit_kv()) return store_qkv(step, layer, nth, channel, head, model_.head_dim);
    const int row = active_[nth], half = channel >= q_size_ + kv_size_, first = channel - q_size_ - half * kv_size_;
    const float* rotations = layers_[layer].rotations;
    if (rotations && !half)
        kernels_.rotate(head, head, rotations + step.position(row) * model_.head_dim, model_.head_dim);
    const int64_t index = kv_row(step, row, layer, half), size = model_.block_size;
    const int64_t scales = index / size * model_.kv_heads + first / model_.head_dim;  // of all blocks before this one
    kernels_.write_e4m3(head, model_.head_dim, static_cast<uint8_t*>(model_.pool) + index * kv_size_ + first,
                        model_.pool_scales + scales * size + index % size);
}

// -- bridges -----------------------------------------------------------------------------------------------------
//
// A bridge is one more matmul of the rows that skip the same window of layers, or two for a low-rank map. It writes no
// keys or values.

// Where the window of layers ends that a row skips from `layer` on; `layer` itself if none begins there.
int Decoder::skipped_until(const Step& step, int row, int layer) const {
    int stop = layer;
    if (layer > 0 && !step.runs(row, layer - 1, model_)) return stop;
    while (stop < model_.num_layers && !step.runs(row, stop, model_)) stop++;
    return stop;
}

bool Decoder::has_bridges(const D3Run& run) const {
    for (int row = 0; row < run.rows; row++) {
        if (!run.bridges[row]) continue;
        for (int taken = 0; taken < run.steps; taken++)
            for (int layer = 0; layer < model_.num_layers; layer++) {
                const int stop = skipped_until({run, taken}, row, layer);
                if (stop == layer) continue;
                const D3Bridge* bridge = find(*run.bridges[row], layer, stop);
                if (!bridge || !fits(*bridge, model_.hidden)) return false;
            }
    }
    return true;
}

// All layers below `layer` have run.
void Decoder::apply_bridges(const Step& step, int layer) {
    bridged_rows_.clear();
    for (int row = 0; row < step.run.rows; row++) {
        if (!step.run.bridges[row]) continue;
        const int stop = skipped_until(step, row, layer);
        if (stop > layer) bridged_rows_.push_back({find(*step.run.bridges[row], layer, stop), row});
    }
    std::sort(bridged_rows_.begin(), bridged_rows_.end(), [](const BridgedRow& one, const BridgedRow& other) {
        return one.bridge != other.bridge ? one.bridge < other.bridge : one.row < other.row;
    });
    for (size_t nth = 0; nth < bridged_rows_.size();) {
        const D3Bridge* bridge = bridged_rows_[nth].bridge;
        active_.clear();
        for (; nth < bridged_rows_.size() && bridged_rows_[nth].bridge == bridge; nth++)
            active_.push_back(bridged_rows_[nth].row);
        apply_bridge(*bridge);
    }
}

// For the active rows. It multiplies a copy, because other threads add to the rows meanwhile.
void Decoder::apply_bridge(const D3Bridge& bridge) {
    has_maps_ = false;
    for (size_t nth = 0; nth < active_.size(); nth++)
        memcpy(normed_.row(int(nth)), hidden_.row(active_[nth]), model_.hidden * sizeof(float));
    if (!bridge.down.values) return multiply_and_add(bridge.weight, normed_);
    for (size_t nth = 0; nth < active_.size(); nth++)  // a wider bridge may have left numbers beyond the rank
        std::fill(inner_.row(int(nth)) + bridge.down.rows, inner_.row(int(nth)) + inner_.stride(), 0.0f);
    multiply_into(bridge.down, normed_, inner_);
    multiply_and_add(bridge.weight, inner_);
}

// -- adapters ----------------------------------------------------------------------------------------------------

bool Decoder::has_fitting_maps(const D3LowRank* const* adapters, int rows) const {
    const int hidden = model_.hidden;
    const int sizes[D3_LAYER_MAPS][2] = {{hidden, q_size_}, {hidden, kv_size_}, {hidden, kv_size_}, {q_size_, hidden},
                                         {hidden, model_.intermediate}, {hidden, model_.intermediate},
                                         {model_.intermediate, hidden}};
    for (int row = 0; row < rows; row++) {
        const D3LowRank* maps = adapters[row];
        if (!maps || (row && maps == adapters[row - 1])) continue;
        for (int nth = 0; nth < model_.num_layers * D3_LAYER_MAPS; nth++)
            if (!is_map(maps[nth], sizes[nth % D3_LAYER_MAPS][0], sizes[nth % D3_LAYER_MAPS][1])) return false;
        if (!is_map(maps[model_.num_layers * D3_LAYER_MAPS], hidden, model_.vocab)) return false;
    }
    return true;
}

void Decoder::begin_maps(const Step& step, int first, int parts, const Rows& x) {
    has_maps_ = false;
    if (!step.run.adapters) return;
    map_parts_ = parts;
    maps_.assign(active_.size(), nullptr);
    int64_t products = 0;
    for (size_t nth = 0; nth < active_.size(); nth++) {
        const D3LowRank* maps = step.run.adapters[active_[nth]];
        if (!maps) continue;
        maps_[nth] = maps + first;
        for (int part = 0; part < parts; part++)
            products += int64_t(maps[first + part].rank) * maps[first + part].columns;
    }
    has_maps_ = products > 0;
    if (!has_maps_) return;
    if (!mapped_.stride()) mapped_ = Rows(model_.max_rows, MAX_MAP_PARTS * D3_MAX_RANK);
    const int count = int(active_.size()), num_threads = threads_.size();
    // The ranks of few rows are shared out among threads.
    const int shares = count >= 2 * num_threads ? 1 : num_threads;
    auto work = [&](int, int tile) {
        const int nth = tile / shares, share = tile % shares;
        if (!maps_[nth]) return;
        for (int part = 0; part < map_parts_; part++) {
            const D3LowRank& map = maps_[nth][part];
            const int start = map.rank * share / shares, stop = map.rank * (share + 1) / shares;
            if (start < stop)
                kernels_.map_down(map_args(map), x.row(nth), start, stop, mapped_.row(nth) + part * D3_MAX_RANK);
        }
    };
    if (products >= MIN_PARALLEL_MAPS) return threads_.parallel_for(count * shares, work);
    for (int tile = 0; tile < count * shares; tile++) work(0, tile);
}

void Decoder::add_map(int nth, int part, int start, int stop, float* values) const {
    if (!maps_[nth] || !maps_[nth][part].rank) return;
    kernels_.map_up(map_args(maps_[nth][part]), mapped_.row(nth) + part * D3_MAX_RANK, start, stop - start, values);
}

void Decoder::add_maps(int nth, int start, int stop, float* values) const {
    if (!maps_[nth]) return;
    for (int part = 0, before = 0; part < map_parts_ && before < stop; part++) {
        // A part without a map has its size all the same.
        const int size = map_parts_ == 1 ? stop : part ? kv_size_ : q_size_;
        const int from = std::max(start, before), end = std::min(stop, before + size);
        if (from < end) add_map(nth, part, from - before, end - before, values + (from - start));
        before += size;
    }
}

// -- attention ---------------------------------------------------------------------------------------------------

// Rows of one sequence at neighbouring positions, as in a prompt, make a block; a decoding row is a block by itself.
void Decoder::find_query_blocks(const Step& step) {
    const int most = std::max(1, BLOCK_QUERIES / group_);
    query_blocks_.clear();
    for (int nth = 0; nth < int(active_.size()); nth++) {
        const int row = active_[nth];
        if (!query_blocks_.empty() && query_blocks_.back().rows < most) {
            const int before = active_[nth - 1];
            if (step.run.slots[before] == step.run.slots[row] && step.position(before) + 1 == step.position(row)) {
                query_blocks_.back().rows++;
                continue;
            }
        }
        query_blocks_.push_back({nth, 1, 0, model_.kv_heads});
    }
}

// One block per KV head.
void Decoder::split_query_blocks() {
    const size_t count = query_blocks_.size();
    query_blocks_.resize(count * model_.kv_heads);
    for (size_t nth = query_blocks_.size(); nth-- > 0;) {
        query_blocks_[nth] = query_blocks_[nth / model_.kv_heads];
        query_blocks_[nth].head = int(nth) % model_.kv_heads, query_blocks_[nth].heads = 1;
    }
}

AttentionArgs Decoder::attention_args(const Step& step, int layer, int nth, int worker) const {
    const QueryBlock& block = query_blocks_[nth];
    const int row = active_[block.first];
    const int64_t first = int64_t(block.head) * group_ * model_.head_dim, wide = has_8bit_kv() ? 1 : sizeof(float);
    const Scratch& scratch = scratch_[worker];
    const char* pool = static_cast<const char*>(model_.pool);
    return {queries_.row(block.first) + first, attended_.row(block.first) + first, queries_.stride(),
            scratch.scores.at(0), scratch.keys.at(0), scratch.values.at(0),
            pool + block.head * model_.head_dim * wide,
            has_8bit_kv() ? model_.pool_scales + block.head * model_.block_size : nullptr,
            step.table(row, layer, model_),
            int64_t(model_.block_size) * kv_size_, int64_t(model_.block_size) * model_.kv_heads, kv_size_, block.rows,
            block.heads, group_, model_.head_dim, model_.block_size, int32_t(step.position(row) + 1),
            layers_[layer].window, model_.scale, model_.attention_cap, prefetches_, false, nullptr, 0};
}

// A tile is a block, or one KV head of it. All heads together read memory faster, because they are neighbours there;
// but one long context must not keep the other threads waiting.
void Decoder::attention(const Step& step, int layer) {
    find_query_blocks(step);
    const int num_threads = threads_.size(), fair = num_threads == 1 ? 1 : 4 * num_threads;
    const int count = int(query_blocks_.size());
    int spans = 1;
    int64_t products = 0, most = 0, positions = 0;
    bool may_be_whole = !has_8bit_kv() && model_.heads <= MAX_QUERIES;
    for (int nth = 0; nth < count; nth++) {
        const AttentionArgs a = attention_args(step, layer, nth, 0);
        spans = std::max(spans, num_spans(a)), may_be_whole &= a.rows == 1;
        products += num_products(a), most = std::max(most, num_products(a)), positions += num_positions(a);
    }
    if (!may_be_whole || most * fair > 2 * products) {
        const bool are_few = spans > 1 && num_threads > 1 && count < fair;
        if (may_be_whole && are_few && 5 * largest_queue(step, layer, spans) * num_threads <= 6 * positions)
            return attend_split(step, layer, spans);
        split_query_blocks();
        if (spans > 1 && num_threads > 1 && int(query_blocks_.size()) < 2 * num_threads)
            return attend_split(step, layer, spans);
    }
    const int tiles = int(query_blocks_.size());
    const int64_t first = first_tile_;
    first_tile_ += tiles;
    auto attend = [&](int worker, int nth) {
        AttentionArgs a = attention_args(step, layer, nth, worker);
        Scratch& scratch = scratch_[worker];
        a.is_prefetched = scratch.prefetched == first + nth;
        if (a.heads > 1 && nth + 1 < tiles && has_time_for_next(a)) {
            const AttentionArgs next = attention_args(step, layer, nth + 1, worker);
            if (next.length <= next.window)
                a.next = next.table, a.next_length = next.length, scratch.prefetched = first + nth + 1;
        }
        float *earlier = scratch.partials.at(0), *partial = earlier + num_floats(a);
        const int from = first_span(a);
        kernels_.attend_span(a, from, earlier);
        a.is_prefetched = true;
        for (int span = from + 1; span < from + num_spans(a); span++) {
            kernels_.attend_span(a, span, partial);
            kernels_.join_span(a, span, earlier, partial);
        }
        kernels_.finish_attention(a, earlier);
    };
    if (products >= MIN_PARALLEL_PRODUCTS) return threads_.parallel_for(tiles, attend);
    for (int nth = 0; nth < tiles; nth++) attend(0, nth);
}

// The most positions that one thread attends to if spans are spread over threads.
int64_t Decoder::largest_queue(const Step& step, int layer, int spans) const {
    const int num_threads = threads_.size(), tiles = int(query_blocks_.size()) * spans;
    int64_t most = 0;
    for (int worker = 0; worker < num_threads; worker++) {
        int64_t positions = 0;
        const int stop = first_tile(worker + 1, num_threads, tiles);
        for (int nth = first_tile(worker, num_threads, tiles); nth < stop; nth++) {
            const int64_t length = num_positions(attention_args(step, layer, nth / spans, 0));
            positions += std::clamp<int64_t>(length - nth % spans * ATTENTION_SPAN, 0, ATTENTION_SPAN);
        }
        most = std::max(most, positions);
    }
    return most;
}

// For a few long contexts, with fewer tiles than threads: each span is a tile.
void Decoder::attend_split(const Step& step, int layer, int spans) {
    const int blocks = int(query_blocks_.size());
    const int64_t floats = max_queries() * (model_.head_dim + 2);
    if (int64_t(partials_.size()) < blocks * spans * floats) partials_.resize(blocks * spans * floats);
    const auto partial = [&](int block, int span) { return &partials_[(int64_t(block) * spans + span) * floats]; };
    threads_.parallel_for(blocks * spans, [&](int worker, int nth) {
        const AttentionArgs a = attention_args(step, layer, nth / spans, worker);
        if (nth % spans < num_spans(a))
            kernels_.attend_span(a, first_span(a) + nth % spans, partial(nth / spans, nth % spans));
    });
    for (int block = 0; block < blocks; block++) {
        const AttentionArgs a = attention_args(step, layer, block, 0);
        for (int span = 1; span < num_spans(a); span++)
            kernels_.join_span(a, first_span(a) + span, partial(block, 0), partial(block, span));
        kernels_.finish_attention(a, partial(block, 0));
    }
}

// -- sampling ----------------------------------------------------------------------------------------------------

DrawParams Decoder::draw_params(const Step& step, int row) const {
    const D3Run& run = step.run;
    if (!run.temperatures) return {0.0f, 0, 0, 0};
    return {run.temperatures[row], uint64_t(run.seeds[row]), uint32_t(run.indices[row]),
            uint32_t(run.generation[row] + step.taken)};
}

bool Decoder::needs_all_logits(const D3Run& run, int row) const {
    if (!run.sampling) return false;
    const D3Sampling& asked = run.sampling[row];
    const bool has_threshold = asked.log_min_p > -INFINITY || asked.top_k > 0 || asked.top_p < 1;
    return asked.token_counts || asked.logit_mask || (has_threshold && run.temperatures[row] != 0);
}

void Decoder::sample_from_all(const Step& step) {
    const D3Run& run = step.run;
    threads_.parallel_for(int(active_.size()), [&](int worker, int nth) {
        const int row = active_[nth];
        if (!needs_all_logits(run, row)) return;
        const D3Sampling& asked = run.sampling[row];
        if (step.taken) count_token(asked, step.taken, run.chosen[(step.taken - 1) * run.rows + row]);
        const int count = model_.head_tokens ? int(model_.num_head_tokens) : model_.vocab;
        const RowLogits logits{all_logits_.at(int64_t(row) * model_.vocab), count, model_.head_tokens};
        if (asked.logit_mask) {
            const uint8_t* grammar = asked.logit_mask->has_grammar ? grammar_masks_[row] : nullptr;
            apply_logit_mask(logits, *asked.logit_mask, grammar, run, row, step.taken);
        }
        best_[row] = sample(logits, asked, draw_params(step, row), orders_[worker]);
    });
}

// One by one, in the calling thread: the callback is Python, which runs one thread at a time.
void Decoder::ask_grammars(const Step& step) {
    const D3Run& run = step.run;
    if (!run.sampling || !run.grammar) return;
    grammar_masks_.assign(run.rows, nullptr);
    for (int row = 0; row < run.rows; row++) {
        const D3LogitMask* logit_mask = run.sampling[row].logit_mask;
        if (!logit_mask || !logit_mask->has_grammar) continue;
        const int64_t token = step.taken ? run.chosen[(step.taken - 1) * run.rows + row] : -1;
        grammar_masks_[row] = run.grammar(row, step.taken, token);
        if (!grammar_masks_[row]) ended_[row] = true;
    }
}
