// Attention of a step: who shares entries, and how the work is cut where a few heads read a long text.
#include <algorithm>

#include "decoder.h"
#include "threading/work_queue.h"

namespace {

// Products of a query's channel with a key's and a weight with a value's: fewer are sooner done than handed over.
constexpr int64_t LEAST_SHARED = 24 * 1024;

int num_spans(const Attention& a) { return (a.length + a.rows - 1 + ATTENTION_SPAN - 1) / ATTENTION_SPAN; }
int64_t num_queries(const Attention& a) { return int64_t(a.heads) * a.rows * a.group; }
int64_t num_products(const Attention& a) { return 2 * num_queries(a) * a.length * a.head_dim; }
int64_t num_floats(const Attention& a) { return num_queries(a) * (a.head_dim + 2); }

// Whether the first chunk of another text can be asked for while the last span of this one is looked at.
bool has_time_for_next(const Attention& a) {
    return a.length > ATTENTION_CHUNK && (a.length - 1) % ATTENTION_SPAN + 1 >= ATTENTION_CHUNK;
}

}  // namespace

// Rows of one sequence that stand at neighbouring positions, as those of a prompt do; each row of an answer by itself.
void D3Decoder::find_blocks(const Step& step) {
    const int most = std::max(1, BLOCK_QUERIES / group_);
    blocks_.clear();
    for (int nth = 0; nth < int(active_.size()); nth++) {
        const int row = active_[nth];
        if (!blocks_.empty() && blocks_.back().rows < most) {
            const int before = active_[nth - 1];
            if (step.run.slots[before] == step.run.slots[row] && step.position(before) + 1 == step.position(row)) {
                blocks_.back().rows++;
                continue;
            }
        }
        blocks_.push_back({nth, 1, 0, model_.kv_heads});
    }
}

// Each head of keys and values by itself.
void D3Decoder::split_blocks() {
    const size_t count = blocks_.size();
    blocks_.resize(count * model_.kv_heads);
    for (size_t nth = blocks_.size(); nth-- > 0;) {
        blocks_[nth] = blocks_[nth / model_.kv_heads];
        blocks_[nth].head = int(nth) % model_.kv_heads, blocks_[nth].heads = 1;
    }
}

// What the nth block looks at.
Attention D3Decoder::attention_of(const Step& step, int layer, int nth, int worker) const {
    const Block& block = blocks_[nth];
    const int row = active_[block.first];
    const int64_t first = int64_t(block.head) * group_ * model_.head_dim, wide = is_small() ? 1 : sizeof(float);
    const Scratch& scratch = scratch_[worker];
    const char* pool = static_cast<const char*>(model_.pool);
    return {queries_.row(block.first) + first, attended_.row(block.first) + first, queries_.stride(),
            scratch.scores.at(0), scratch.keys.at(0), scratch.values.at(0),
            pool + block.head * model_.head_dim * wide,
            is_small() ? model_.pool_scales + block.head * model_.block_size : nullptr, step.table(row, layer, model_),
            int64_t(model_.block_size) * kv_size_, int64_t(model_.block_size) * model_.kv_heads, kv_size_, block.rows,
            block.heads, group_, model_.head_dim, model_.block_size, int32_t(step.position(row) + 1), model_.scale,
            fetches_, false, nullptr, 0};
}

// A piece is a block, or a head of one: entries come from memory sooner where all heads of a position are looked at
// together, but nobody is to wait for the one who has a long text.
void D3Decoder::attention(const Step& step, int layer) {
    find_blocks(step);
    const int team = team_.size(), count = int(blocks_.size()), fair = team == 1 ? 1 : 4 * team;
    int spans = 1;
    int64_t products = 0, most = 0, entries = 0;
    bool may_be_whole = !is_small() && model_.heads <= MOST_QUERIES;
    for (int nth = 0; nth < count; nth++) {
        const Attention a = attention_of(step, layer, nth, 0);
        spans = std::max(spans, num_spans(a)), may_be_whole &= a.rows == 1;
        products += num_products(a), most = std::max(most, num_products(a)), entries += a.length;
    }
    if (!may_be_whole || most * fair > 2 * products) {
        const bool are_few = spans > 1 && team > 1 && count < fair;
        if (may_be_whole && are_few && 5 * most_of_share(step, spans) * team <= 6 * entries)
            return attend_split(step, layer, spans);
        split_blocks();
        if (spans > 1 && team > 1 && int(blocks_.size()) < 2 * team) return attend_split(step, layer, spans);
    }
    const int pieces = int(blocks_.size());
    const int64_t first = first_piece_;
    first_piece_ += pieces;
    auto attend = [&](int worker, int nth) {
        Attention a = attention_of(step, layer, nth, worker);
        Scratch& scratch = scratch_[worker];
        a.is_asked_for = scratch.asked == first + nth;
        if (a.heads > 1 && nth + 1 < pieces && has_time_for_next(a)) {
            const Attention next = attention_of(step, layer, nth + 1, worker);
            a.next = next.table, a.next_length = next.length, scratch.asked = first + nth + 1;
        }
        float *earlier = scratch.partials.at(0), *partial = earlier + num_floats(a);
        kernels_.attend_span(a, 0, earlier);
        a.is_asked_for = true;
        for (int span = 1; span < num_spans(a); span++) {
            kernels_.attend_span(a, span, partial);
            kernels_.join_span(a, span, earlier, partial);
        }
        kernels_.finish_attention(a, earlier);
    };
    if (products >= LEAST_SHARED) return team_.each(pieces, attend);
    for (int nth = 0; nth < pieces; nth++) attend(0, nth);
}

// Entries that somebody looks at, at most, if spans are shared out.
int64_t D3Decoder::most_of_share(const Step& step, int spans) const {
    const int team = team_.size(), pieces = int(blocks_.size()) * spans;
    int64_t most = 0;
    for (int worker = 0; worker < team; worker++) {
        int64_t entries = 0;
        for (int nth = first_of_share(worker, team, pieces); nth < first_of_share(worker + 1, team, pieces); nth++) {
            const int64_t length = step.position(active_[blocks_[nth / spans].first]) + 1;
            entries += std::clamp<int64_t>(length - nth % spans * ATTENTION_SPAN, 0, ATTENTION_SPAN);
        }
        most = std::max(most, entries);
    }
    return most;
}

// The same where there are too few pieces for everybody, in few long texts: each span is a piece then.
void D3Decoder::attend_split(const Step& step, int layer, int spans) {
    const int blocks = int(blocks_.size());
    const int64_t floats = most_queries() * (model_.head_dim + 2);
    if (int64_t(partials_.size()) < blocks * spans * floats) partials_.resize(blocks * spans * floats);
    const auto partial = [&](int block, int span) { return &partials_[(int64_t(block) * spans + span) * floats]; };
    team_.each(blocks * spans, [&](int worker, int nth) {
        const Attention a = attention_of(step, layer, nth / spans, worker);
        if (nth % spans < num_spans(a)) kernels_.attend_span(a, nth % spans, partial(nth / spans, nth % spans));
    });
    for (int block = 0; block < blocks; block++) {
        const Attention a = attention_of(step, layer, block, 0);
        for (int span = 1; span < num_spans(a); span++)
            kernels_.join_span(a, span, partial(block, 0), partial(block, span));
        kernels_.finish_attention(a, partial(block, 0));
    }
}
