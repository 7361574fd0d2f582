// Where the queries, keys and values of a row go: into attention's rows, and into the entries of a cache.
#include <cstring>

#include "decoder.h"

// How many halves of entries, keys or values, are in the pool before this one's.
int64_t D3Decoder::entry(const Step& step, int row, int layer, int half) const {
    const int64_t position = step.position(row), block = step.table(row, layer, model_)[position / model_.block_size];
    return (2 * block + half) * model_.block_size + position % model_.block_size;
}

// `count` channels from `channel` on, all of one head, go where they belong; those of queries and keys are turned.
void D3Decoder::place(const Step& step, int layer, int nth, int channel, const float* from, int count) {
    const int row = active_[nth], keys_end = q_size_ + kv_size_;
    float *pool = static_cast<float*>(model_.pool), *to;
    if (channel < q_size_) to = queries_.row(nth) + channel;
    else if (channel < keys_end) to = pool + entry(step, row, layer, 0) * kv_size_ + (channel - q_size_);
    else to = pool + entry(step, row, layer, 1) * kv_size_ + (channel - keys_end);
    const float* rotations = layers_[layer].rotations;
    if (!rotations || channel >= keys_end) {
        memcpy(to, from, count * sizeof(float));
        return;
    }
    const float* turns = rotations + step.position(row) * model_.head_dim;
    kernels_.rotate(to, from, turns + channel % model_.head_dim, count);
}

// The same of a whole head, which entries of 8 bits need for its scale; it may be changed.
void D3Decoder::place_head(const Step& step, int layer, int nth, int channel, float* head) {
    if (channel < q_size_ || !is_small()) return place(step, layer, nth, channel, head, model_.head_dim);
    const int row = active_[nth], half = channel >= q_size_ + kv_size_, first = channel - q_size_ - half * kv_size_;
    const float* rotations = layers_[layer].rotations;
    if (rotations && !half)
        kernels_.rotate(head, head, rotations + step.position(row) * model_.head_dim, model_.head_dim);
    const int64_t place = entry(step, row, layer, half), size = model_.block_size;
    const int64_t scales = place / size * model_.kv_heads + first / model_.head_dim;  // runs of a block's, before these
    kernels_.write_e4m3(head, model_.head_dim, static_cast<uint8_t*>(model_.pool) + place * kv_size_ + first,
                        model_.pool_scales + scales * size + place % size);
}
