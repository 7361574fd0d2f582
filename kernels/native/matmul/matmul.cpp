#include "matmul/matmul.h"

#include "formats/matrix.h"
#include "threading/prefetch.h"
#include "threading/work_queue.h"

namespace {

constexpr int MAX_TILE_ROWS = 256;
// Fewer bytes are multiplied by a row faster than they are handed over. With float vectors each further row is as much
// work again.
constexpr int64_t MIN_TILE_BYTES = 24 * 1024, MIN_TILE_BYTES_MANY_ROWS = 8 * 1024;
constexpr int64_t CACHED_BYTES = 32 * 1024 * 1024;  // of a model, that a last-level cache may hold
constexpr int64_t PANEL_BYTES = 512 * 1024;         // of a tile's panels: they stay in L2

}  // namespace

Matmul::Matmul(const Kernels& kernels, ThreadPool& threads, int widest, int max_rows, int64_t bytes)
    : kernels_(kernels),
      threads_(threads),
      reads_memory_(bytes > CACHED_BYTES),
      ahead_(reads_memory_ ? prefetch_distance() : 0),
      one_stream_(prefers_one_stream()),
      scratch_(threads.size()),
      ordered_(max_rows, widest),
      pairs_(max_rows, (widest + 1) / 2) {
    for (Scratch& scratch : scratch_) {
        scratch.outputs = Rows(2 * ROWS_A_PASS, MAX_TILE_ROWS);
        scratch.unpacked = Floats(2 * MAX_TILE_ROWS * (unpacked_bytes(widest) / 2));
        scratch.panels = Floats(std::max(PANEL_BYTES / int64_t(sizeof(float)), 2 * kernels.panel_floats(widest)));
    }
    int64_t most = 0;
    for (int kind = 0; kernels.prepare && kind < D3_NUM_KINDS; kind++)
        most = std::max(most, kernels.prepared_bytes(D3Kind(kind), widest, max_rows));
    prepared_ = Floats(most / int64_t(sizeof(float)));
    for (Scratch& scratch : scratch_) scratch.prepared = Floats(most / int64_t(sizeof(float)));
    strips_ = Floats((max_rows / kernels.strip + 1) * kernels.strip_floats(widest));
}

// Whether this instruction set multiplies the matrix by vectors in a form of its own.
bool Matmul::needs_prepared(const D3Matrix& matrix) const {
    const D3Kind kind = is_bf12(matrix) && unpacks(matrix, 1) ? D3_BFLOAT16 : D3Kind(matrix.kind);
    return kernels_.prepare && kernels_.prepared_bytes(kind, matrix.columns, 1) > 0;
}

const Rows& Matmul::in_order_of(const D3Matrix& matrix, const Rows& x, int rows) {
    if (!matrix.order) return x;
    const int padded = (matrix.columns + SCALE_GROUP - 1) / SCALE_GROUP * SCALE_GROUP;
    each_row(rows, matrix.columns, [&](int nth) {
        const float* from = x.row(nth);
        float* to = ordered_.row(nth);
        for (int column = 0; column < matrix.columns; column++) to[column] = from[matrix.order[column]];
        std::fill(to + matrix.columns, to + padded, 0.0f);  // a wider matrix may have left numbers there
    });
    return ordered_;
}

// The vectors rounded to bfloat16, two numbers in the place of a float.
const Rows& Matmul::in_pairs(const Rows& x, int rows, int columns) {
    const int pairs = columns / 2, padded = (pairs + SCALE_GROUP - 1) / SCALE_GROUP * SCALE_GROUP;
    each_row(rows, columns, [&](int nth) {
        float* to = pairs_.row(nth);
        kernels_.round_to_bfloat16(x.row(nth), columns, reinterpret_cast<char*>(to));
        std::fill(to + pairs, to + padded, 0.0f);
    });
    return pairs_;
}

// Prepares the vectors too if the matrix needs that; for few vectors `worker_vectors` does it later.
MatmulArgs Matmul::args_for(const D3Matrix& matrix, const Rows& x, int rows) {
    MatmulArgs p = {D3Kind(matrix.kind), matrix.columns, static_cast<const char*>(matrix.values), bytes_of_row(matrix),
                    {matrix.scales}, (matrix.columns + SCALE_GROUP - 1) / SCALE_GROUP, x.row(0), x.stride(), rows,
                    nullptr, 0, ahead_, one_stream_};
    if (unpacks(matrix, rows)) {  // each thread unpacks its own tiles
        p.kind = is_bf12(matrix) ? D3_BFLOAT16 : D3_FLOAT32, p.ahead = 0;
        p.row_bytes = is_bf12(matrix) ? unpacked_bytes(matrix.columns) : matrix.columns * int64_t(sizeof(float));
    }
    if (is_bf12(matrix) && !unpacks(matrix, rows)) p.bf12 = &matrix.bf12;
    if (p.kind == D3_BFLOAT16_PAIRS) {
        const Rows& pairs = in_pairs(x, rows, matrix.columns);
        p.x = pairs.row(0), p.ldx = pairs.stride(), p.columns /= 2;
    }
    if (!needs_prepared(matrix)) return p;
    p.prepared = reinterpret_cast<char*>(prepared_.at(0)), p.at_once = rows;
    nth_matmul_++;
    if (has_few_vectors(p)) return p;
    threads_.parallel_for(kernels_.prepared_tiles(p), [&](int, int nth) { kernels_.prepare(p, nth); });
    return p;
}

// Each thread prepares few vectors by itself before its first tile: that is no slower than waiting for one thread to do
// it, and the vectors are then in its own cache.
MatmulArgs Matmul::worker_vectors(const MatmulArgs& p, int worker) {
    Scratch& scratch = scratch_[worker];
    MatmulArgs own = p;
    own.prepared = reinterpret_cast<char*>(scratch.prepared.at(0));
    if (scratch.nth_matmul == nth_matmul_) return own;
    for (int nth = 0; nth < kernels_.prepared_tiles(own); nth++) kernels_.prepare(own, nth);
    scratch.nth_matmul = nth_matmul_;
    return own;
}

// About as many bytes per tile as fit into L2 with the vectors; fewer if threads would have no work. A multiple of the
// number of threads.
Tiling Matmul::tiling_of(const D3Matrix& matrix, int rows, int bands) const {
    const bool is_widened = is_in_blocks(matrix.kind) && unpacks(matrix, rows);
    const int64_t row_bytes = is_widened ? matrix.columns * int64_t(sizeof(float)) : bytes_of_row(matrix);
    const int64_t whole = row_bytes * matrix.rows, num_threads = threads_.size();
    const int64_t most = needs_prepared(matrix) ? kernels_.tile_bytes : TILE_BYTES;
    const int64_t of_floats = std::max(MIN_TILE_BYTES / rows, MIN_TILE_BYTES_MANY_ROWS);
    const int64_t least_bytes = needs_prepared(matrix) ? MIN_TILE_BYTES : of_floats;
    const int64_t bytes = std::clamp(whole / (2 * num_threads), least_bytes, most);
    Tiling tiles{matrix.rows / bands, 0};
    const int64_t units = tiles.units(), most_units = MAX_TILE_ROWS / Tiling::UNIT / bands;
    int64_t count = std::max<int64_t>(1, whole / bytes);
    if (count > num_threads) count = count / num_threads * num_threads;
    const int64_t least = (units + most_units - 1) / most_units;
    if (count < least) count = least <= num_threads ? least : (least + num_threads - 1) / num_threads * num_threads;
    tiles.count = int(std::min(count, units));
    return tiles;
}

void Matmul::expect(const D3Matrix& matrix, int rows, int bands) {
    const Tiling tiles = tiling_of(matrix, rows, bands);
    if (reads_memory_) next_matrix_ = {matrix, bands, tiles};
    if (rows >= ROWS_A_PASS) return;
    const int64_t row = bytes_of_row(matrix);
    threads_.expect({static_cast<const char*>(matrix.values), bands > 1 ? tiles.channels * row : 0, Tiling::UNIT * row,
                     tiles.units(), tiles.count});
}

// Panels of a tile, by band: as many as fit into L2; fewer if threads would have no work.
int Matmul::panels_of_tile(const D3Matrix& matrix, int bands) const {
    const int64_t held = PANEL_BYTES / (kernels_.panel_floats(matrix.columns) * int64_t(sizeof(float)) * bands);
    const int64_t fair = matrix.rows / (bands * 2 * threads_.size() * kernels_.panel);
    return int(std::clamp<int64_t>(std::min(held, fair), 1, MAX_TILE_ROWS / kernels_.panel));
}

// What the thread with this tile multiplies next: the next tile of its queue, or the first one of its queue in the next
// matmul.
NextWeights Matmul::next_weights(const TiledMatrix& tiled, int tile) const {
    const int num_threads = threads_.size(), count = tiled.tiles.count;
    int worker = 0;
    while (tile >= first_tile(worker + 1, num_threads, count)) worker++;
    if (tile + 1 < first_tile(worker + 1, num_threads, count)) return tiled.weights(tile + 1);
    const TiledMatrix& next = next_matrix_;
    if (!next.tiles.count) return {};
    const int first = first_tile(worker, num_threads, next.tiles.count);
    return first < first_tile(worker + 1, num_threads, next.tiles.count) ? next.weights(first) : NextWeights{};
}
