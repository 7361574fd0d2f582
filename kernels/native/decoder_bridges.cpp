// Bridges: rows that leave out a window of layers cross it by a map, where the layers below it have run.
//
// A map is one more product of the rows that leave out the same window, or two where it is of low rank, so their
// numbers depend on no others'. It writes no entries.
#include <algorithm>
#include <cstring>

#include "decoder.h"
#include "formats/matrix.h"

namespace {

const D3Bridge* find(const D3Bridges& bridges, int first, int stop) {
    for (int64_t nth = 0; nth < bridges.count; nth++)
        if (bridges.bridges[nth].first == first && bridges.bridges[nth].stop == stop) return bridges.bridges + nth;
    return nullptr;
}

bool fits(const D3Bridge& bridge, int hidden) {
    if (!bridge.weight.bias) return false;
    if (!bridge.down.values) return is_matrix(bridge.weight, hidden, hidden, false);
    const int rank = bridge.down.rows;
    return rank >= 1 && rank <= hidden && is_matrix(bridge.weight, hidden, rank, false) &&
           is_matrix(bridge.down, rank, hidden, false);
}

}  // namespace

// Where the window ends that a row leaves out from `layer` on; `layer` itself where none begins there.
int D3Decoder::window_from(const Step& step, int row, int layer) const {
    int stop = layer;
    if (layer > 0 && !step.runs(row, layer - 1, model_)) return stop;
    while (stop < model_.num_layers && !step.runs(row, stop, model_)) stop++;
    return stop;
}

bool D3Decoder::has_bridges(const D3Run& run) const {
    for (int row = 0; row < run.rows; row++) {
        if (!run.bridges[row]) continue;
        for (int taken = 0; taken < run.steps; taken++)
            for (int layer = 0; layer < model_.num_layers; layer++) {
                const int stop = window_from({run, taken}, row, layer);
                if (stop == layer) continue;
                const D3Bridge* bridge = find(*run.bridges[row], layer, stop);
                if (!bridge || !fits(*bridge, model_.hidden)) return false;
            }
    }
    return true;
}

// All layers below `layer` have run.
void D3Decoder::cross(const Step& step, int layer) {
    crossings_.clear();
    for (int row = 0; row < step.run.rows; row++) {
        if (!step.run.bridges[row]) continue;
        const int stop = window_from(step, row, layer);
        if (stop > layer) crossings_.push_back({find(*step.run.bridges[row], layer, stop), row});
    }
    std::sort(crossings_.begin(), crossings_.end(), [](const Crossing& one, const Crossing& other) {
        return one.bridge != other.bridge ? one.bridge < other.bridge : one.row < other.row;
    });
    for (size_t nth = 0; nth < crossings_.size();) {
        const D3Bridge* bridge = crossings_[nth].bridge;
        active_.clear();
        for (; nth < crossings_.size() && crossings_[nth].bridge == bridge; nth++)
            active_.push_back(crossings_[nth].row);
        cross_together(*bridge);
    }
}

// The active rows cross a window. Pieces of a product are added while others are still read, so it reads a copy.
void D3Decoder::cross_together(const D3Bridge& bridge) {
    for (size_t nth = 0; nth < active_.size(); nth++)
        memcpy(normed_.row(int(nth)), hidden_.row(active_[nth]), model_.hidden * sizeof(float));
    if (!bridge.down.values) return add_product(bridge.weight, normed_);
    for (size_t nth = 0; nth < active_.size(); nth++)  // of a wider bridge there may be something beyond the rank
        std::fill(inner_.row(int(nth)) + bridge.down.rows, inner_.row(int(nth)) + inner_.stride(), 0.0f);
    put_product(bridge.down, normed_, inner_);
    add_product(bridge.weight, inner_);
}
