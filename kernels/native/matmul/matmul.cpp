#include "matmul/matmul.h"

#include "threading/prefetch.h"
#include "formats/matrix.h"
#include "threading/work_queue.h"

namespace {

constexpr int MOST_PIECE_ROWS = 256;
// Less is sooner multiplied by a row than handed over. As floats it is as much work again for every further row.
constexpr int64_t LEAST_PIECE_BYTES = 24 * 1024, LEAST_OF_MANY_ROWS = 8 * 1024;
constexpr int64_t CACHED_BYTES = 32 * 1024 * 1024;  // of a model: as many as a last cache may keep for one
constexpr int64_t PANEL_BYTES = 512 * 1024;  // of a piece's panels: they stay in a core's second cache

}  // namespace

Multiplier::Multiplier(const Kernels& kernels, Team& team, int widest, int max_rows, int64_t bytes)
    : kernels_(kernels),
      team_(team),
      reads_memory_(bytes > CACHED_BYTES),
      ahead_(reads_memory_ ? bytes_fetched_ahead() : 0),
      scratch_(team.size()) {
    for (Scratch& scratch : scratch_) {
        scratch.outputs = Rows(2 * ROWS_A_PASS, MOST_PIECE_ROWS);
        scratch.unpacked = Floats(2 * MOST_PIECE_ROWS * unpacked_bytes(widest) / int64_t(sizeof(float)));
        scratch.panels = Floats(std::max(PANEL_BYTES / int64_t(sizeof(float)), 2 * kernels.panel_floats(widest)));
    }
    int64_t most = 0;
    for (D3Kind kind : {D3_FLOAT32, D3_BFLOAT16, D3_INT8, D3_FP8, D3_FP8_GROUPS, D3_INT4})
        if (kernels.prepare) most = std::max(most, kernels.prepared_bytes(kind, widest, max_rows));
    prepared_ = Floats(most / int64_t(sizeof(float)));
    for (Scratch& scratch : scratch_) scratch.prepared = Floats(most / int64_t(sizeof(float)));
    strips_ = Floats((max_rows / kernels.strip + 1) * kernels.strip_floats(widest));
}

// Whether this instruction set multiplies such a matrix by vectors in another form.
bool Multiplier::needs_prepared(const D3Matrix& matrix) const {
    const D3Kind kind = unpacks(matrix, 1) ? D3_BFLOAT16 : D3Kind(matrix.kind);
    return kernels_.prepare && kernels_.prepared_bytes(kind, matrix.columns, 1) > 0;
}

// With its vectors in another form too, where they are needed so; few vectors get that later, by `own_vectors`.
Product Multiplier::product(const D3Matrix& matrix, const Rows& x, int rows) {
    Product p = {D3Kind(matrix.kind), matrix.columns, static_cast<const char*>(matrix.values), bytes_of_row(matrix),
                 {matrix.scales}, (matrix.columns + SCALE_GROUP - 1) / SCALE_GROUP, x.row(0), x.stride(), rows, nullptr,
                 0, ahead_};
    if (unpacks(matrix, rows))  // by each worker, when it has a piece
        p.kind = D3_BFLOAT16, p.row_bytes = unpacked_bytes(matrix.columns), p.ahead = 0;
    else if (is_packed(matrix))
        p.packing = &matrix.packing;
    if (!needs_prepared(matrix)) return p;
    p.prepared = reinterpret_cast<char*>(prepared_.at(0)), p.at_once = rows;
    nth_product_++;
    if (has_few_vectors(p)) return p;
    team_.each(kernels_.prepared_pieces(p), [&](int, int nth) { kernels_.prepare(p, nth); });
    return p;
}

// Each worker prepares few vectors by itself, before its first piece: that takes no longer than if the others waited
// for one to do it, and what it reads then is in its own core's cache.
Product Multiplier::own_vectors(const Product& p, int worker) {
    Scratch& scratch = scratch_[worker];
    Product own = p;
    own.prepared = reinterpret_cast<char*>(scratch.prepared.at(0));
    if (scratch.nth_product == nth_product_) return own;
    for (int nth = 0; nth < kernels_.prepared_pieces(own); nth++) kernels_.prepare(own, nth);
    scratch.nth_product = nth_product_;
    return own;
}

// About as many bytes a piece as a core's second cache holds beside the vectors, less where that would leave somebody
// without work, and as many pieces for everybody.
Pieces Multiplier::pieces_of(const D3Matrix& matrix, int rows, int bands) const {
    const int64_t whole = bytes_of_row(matrix) * matrix.rows, team = team_.size();
    const int64_t most = needs_prepared(matrix) ? kernels_.piece_bytes : PIECE_BYTES;
    const int64_t of_floats = std::max(LEAST_PIECE_BYTES / rows, LEAST_OF_MANY_ROWS);
    const int64_t bytes = std::clamp(whole / (2 * team), needs_prepared(matrix) ? LEAST_PIECE_BYTES : of_floats, most);
    Pieces pieces{matrix.rows / bands, 0};
    const int64_t units = pieces.units(), most_units = MOST_PIECE_ROWS / Pieces::UNIT / bands;
    int64_t count = std::max<int64_t>(1, whole / bytes);
    if (count > team) count = count / team * team;
    const int64_t least = (units + most_units - 1) / most_units;
    if (count < least) count = least <= team ? least : (least + team - 1) / team * team;
    pieces.count = int(std::min(count, units));
    return pieces;
}

void Multiplier::expect(const D3Matrix& matrix, int rows, int bands) {
    const Pieces pieces = pieces_of(matrix, rows, bands);
    if (reads_memory_) expected_ = {matrix, bands, pieces};
    if (rows >= ROWS_A_PASS) return;
    const int64_t row = bytes_of_row(matrix);
    team_.expect({static_cast<const char*>(matrix.values), bands > 1 ? pieces.channels * row : 0, Pieces::UNIT * row,
                  pieces.units(), pieces.count});
}

// Panels of a piece, by band: what a core's second cache holds, less where that would leave somebody without work.
int Multiplier::panels_of_piece(const D3Matrix& matrix, int bands) const {
    const int64_t held = PANEL_BYTES / (kernels_.panel_floats(matrix.columns) * int64_t(sizeof(float)) * bands);
    const int64_t fair = matrix.rows / (bands * 2 * team_.size() * kernels_.panel);
    return int(std::clamp<int64_t>(std::min(held, fair), 1, MOST_PIECE_ROWS / kernels_.panel));
}

// What whoever has a piece multiplies after it: the next one of the same share, or else the first of that worker's
// share of what is expected.
Later Multiplier::after(const Cut& cut, int piece) const {
    const int team = team_.size(), count = cut.pieces.count;
    int worker = 0;
    while (piece >= first_of_share(worker + 1, team, count)) worker++;
    if (piece + 1 < first_of_share(worker + 1, team, count)) return cut.weights(piece + 1);
    const Cut& next = expected_;
    if (!next.pieces.count) return {};
    const int first = first_of_share(worker, team, next.pieces.count);
    return first < first_of_share(worker + 1, team, next.pieces.count) ? next.weights(first) : Later{};
}
