#include "multiplier.h"

#include "fetching.h"
#include "matrix.h"

namespace {

constexpr int MOST_PIECE_ROWS = 256;
constexpr int64_t LEAST_PIECE_BYTES = 16 * 1024;
constexpr int64_t PANEL_BYTES = 512 * 1024;  // of a piece's panels: they stay in a core's second cache
constexpr int64_t LEAST_SHARED = 16 * 1024;  // numbers: fewer are sooner made than handed over

}  // namespace

Multiplier::Multiplier(const Kernels& kernels, Team& team, int widest, int max_rows)
    : kernels_(kernels), team_(team), ahead_(bytes_fetched_ahead()), scratch_(team.size()) {
    for (Scratch& scratch : scratch_) {
        scratch.outputs = Rows(2 * MANY_ROWS, MOST_PIECE_ROWS);
        scratch.panels = Floats(std::max(PANEL_BYTES / int64_t(sizeof(float)), 2 * kernels.panel_floats(widest)));
    }
    int64_t most = 0;
    for (D3Kind kind : {D3_FLOAT32, D3_BFLOAT16, D3_INT8, D3_FP8, D3_FP8_GROUPS, D3_INT4})
        if (kernels.prepare) most = std::max(most, kernels.prepared_bytes(kind, widest, max_rows));
    prepared_ = Floats(most / int64_t(sizeof(float)));
    strips_ = Floats((max_rows / kernels.strip + 1) * kernels.strip_floats(widest));
}

// With its vectors in another form too, where this instruction set multiplies such a matrix by that.
Product Multiplier::product(const D3Matrix& matrix, const Rows& x, int rows) {
    Product p = {D3Kind(matrix.kind), matrix.columns, static_cast<const char*>(matrix.values), bytes_of_row(matrix),
                 matrix.scales, (matrix.columns + SCALE_GROUP - 1) / SCALE_GROUP, x.row(0), x.stride(), rows, nullptr,
                 0, ahead_};
    if (!kernels_.prepare || kernels_.prepared_bytes(p.kind, p.columns, 1) == 0) return p;
    p.prepared = reinterpret_cast<char*>(prepared_.at(0)), p.at_once = rows;
    auto one = [&](int, int nth) { kernels_.prepare(p, nth); };
    const int pieces = kernels_.prepared_pieces(p);
    if (int64_t(rows) * p.columns >= LEAST_SHARED) team_.each(pieces, one);
    else for (int nth = 0; nth < pieces; nth++) one(0, nth);
    return p;
}

// Output channels of a piece: about what a core's second cache holds beside the vectors, less where that would leave
// somebody without work; a multiple of 16, so that pairs of channels stay together and tiles are full.
int Multiplier::rows_of_piece(const D3Matrix& matrix, bool is_prepared) const {
    const int64_t row = bytes_of_row(matrix), whole = row * matrix.rows;
    const int64_t most = is_prepared ? kernels_.piece_bytes : PIECE_BYTES;
    const int64_t bytes = std::clamp(whole / (2 * team_.size()), LEAST_PIECE_BYTES, most);
    return int(std::clamp<int64_t>((bytes / row + 15) / 16 * 16, 16, MOST_PIECE_ROWS));
}

// Panels of a piece, by band: what a core's second cache holds, less where that would leave somebody without work.
int Multiplier::panels_of_piece(const D3Matrix& matrix, int bands) const {
    const int64_t held = PANEL_BYTES / (kernels_.panel_floats(matrix.columns) * int64_t(sizeof(float)) * bands);
    const int64_t fair = matrix.rows / (bands * 2 * team_.size() * kernels_.panel);
    return int(std::clamp<int64_t>(std::min(held, fair), 1, MOST_PIECE_ROWS / kernels_.panel));
}
