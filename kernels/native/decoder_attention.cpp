// Attention of a step: who shares entries, and how the work is cut where a few heads read a long text.
#include <algorithm>

#include "decoder.h"

namespace {

// Products of a query's channel with a key's and a weight with a value's: fewer are sooner done than handed over.
constexpr int64_t LEAST_SHARED = 24 * 1024;

int num_spans(const Attention& a) { return (a.length + a.rows - 1 + ATTENTION_SPAN - 1) / ATTENTION_SPAN; }
int64_t num_products(const Attention& a) { return 2 * int64_t(a.rows) * a.group * a.length * a.head_dim; }
int64_t num_floats(const Attention& a) { return int64_t(a.rows) * a.group * (a.head_dim + 2); }

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
        blocks_.push_back({nth, 1});
    }
}

// What one piece is, a block's heads that share a head of keys and values.
Attention D3Decoder::attention_of(const Step& step, int layer, int piece, int worker) const {
    const Block& block = blocks_[piece / model_.kv_heads];
    const int head = piece % model_.kv_heads, row = active_[block.first];
    const int64_t first = int64_t(head) * group_ * model_.head_dim, wide = is_small() ? 1 : sizeof(float);
    const Scratch& scratch = scratch_[worker];
    const char* pool = static_cast<const char*>(model_.pool);
    return {queries_.row(block.first) + first, attended_.row(block.first) + first, queries_.stride(),
            scratch.scores.at(0), scratch.keys.at(0), scratch.values.at(0), pool + head * model_.head_dim * wide,
            is_small() ? model_.pool_scales + head * model_.block_size : nullptr, step.table(row, layer, model_),
            int64_t(model_.block_size) * kv_size_, int64_t(model_.block_size) * model_.kv_heads, kv_size_, block.rows,
            group_, model_.head_dim, model_.block_size, int32_t(step.position(row) + 1), model_.scale,
            fetches_};
}

void D3Decoder::attention(const Step& step, int layer) {
    find_blocks(step);
    const int pieces = int(blocks_.size()) * model_.kv_heads;
    int spans = 1;
    int64_t products = 0;
    for (int piece = 0; piece < pieces; piece += model_.kv_heads) {
        const Attention a = attention_of(step, layer, piece, 0);
        spans = std::max(spans, num_spans(a)), products += model_.kv_heads * num_products(a);
    }
    if (spans > 1 && team_.size() > 1 && pieces < 2 * team_.size()) return attend_split(step, layer, spans);
    auto attend = [&](int worker, int piece) {
        const Attention a = attention_of(step, layer, piece, worker);
        float *earlier = scratch_[worker].partials.at(0), *partial = earlier + num_floats(a);
        kernels_.attend_span(a, 0, earlier);
        for (int span = 1; span < num_spans(a); span++) {
            kernels_.attend_span(a, span, partial);
            kernels_.join_span(a, span, earlier, partial);
        }
        kernels_.finish_attention(a, earlier);
    };
    if (products >= LEAST_SHARED) return team_.each(pieces, attend);
    for (int piece = 0; piece < pieces; piece++) attend(0, piece);
}

// The same where there are too few pieces for everybody, in long texts of few heads: each span is a piece then.
void D3Decoder::attend_split(const Step& step, int layer, int spans) {
    const int pieces = int(blocks_.size()) * model_.kv_heads;
    const int64_t floats = int64_t(std::max(group_, BLOCK_QUERIES)) * (model_.head_dim + 2);
    if (int64_t(partials_.size()) < pieces * spans * floats) partials_.resize(pieces * spans * floats);
    const auto partial = [&](int piece, int span) { return &partials_[(int64_t(piece) * spans + span) * floats]; };
    team_.each(pieces * spans, [&](int worker, int nth) {
        const Attention a = attention_of(step, layer, nth / spans, worker);
        if (nth % spans < num_spans(a)) kernels_.attend_span(a, nth % spans, partial(nth / spans, nth % spans));
    });
    for (int piece = 0; piece < pieces; piece++) {
        const Attention a = attention_of(step, layer, piece, 0);
        for (int span = 1; span < num_spans(a); span++)
            kernels_.join_span(a, span, partial(piece, 0), partial(piece, span));
        kernels_.finish_attention(a, partial(piece, 0));
    }
}
