// Matrices times the rows of a step, in tiles that threads share.
//
// A tile is some output channels of all rows, so each weight is read once. Its results are used while they are in the
// core's cache; the whole output is never stored.
#pragma once
#include <algorithm>
#include <vector>

#include "isa/kernels.h"
#include "formats/matrix.h"
#include "threading/thread_pool.h"

// The output channels of each band of a matrix, in tiles that differ by at most one unit: pairs of channels stay
// together and micro-tiles are full.
struct Tiling {
    static constexpr int UNIT = 16;
    int channels, count;
    int units() const { return (channels + UNIT - 1) / UNIT; }
    int start(int nth) const { return std::min(channels, int(int64_t(units()) * nth / count) * UNIT); }
};

// A matrix whose channels are `bands` bands, and the tiles of each.
struct TiledMatrix {
    D3Matrix matrix;
    int bands;
    Tiling tiles;

    // The weights of a tile.
    NextWeights weights(int tile) const {
        const int start = tiles.start(tile), stop = tiles.start(tile + 1);
        const int64_t row = bytes_of_row(matrix), bytes = (stop - start) * row;
        const char* from = static_cast<const char*>(matrix.values) + start * row;
        return bands > 1 ? NextWeights{from, bytes, tiles.channels * row} : NextWeights{from, bytes / 2, bytes / 2};
    }
};

class Matmul {
public:
    // For matrices of at most `widest` columns and at most `max_rows` rows; the model has `bytes` bytes of weights.
    Matmul(const Kernels& kernels, ThreadPool& threads, int widest, int max_rows, int64_t bytes);

    // Multiplies the first `rows` rows of x, and calls use(worker, nth row, first channel, last channel, their values)
    // for every row and tile.
    template <class Use> void multiply(const D3Matrix& matrix, const Rows& x, int rows, Use use) {
        multiply_bands<1>(matrix, x, rows, [&](int worker, int nth, int start, int stop, float* values, float*) {
            use(worker, nth, start, stop, values);
        });
    }

    // The same where the output channels are one band or two, half a matrix apart, that are used together: calls
    // use(worker, nth row, first channel, last channel, their values, those of the second band).
    template <int BANDS, class Use> void multiply_bands(const D3Matrix& matrix, const Rows& x, int rows, Use use) {
        int before = 0;
        for (const D3Matrix* part = &matrix; part; before += part->rows, part = part->below)
            multiply_part<BANDS>(*part, x, rows, [&](int worker, int nth, int start, int stop, float* values,
                                                     float* others) {
                use(worker, nth, before + start, before + stop, values, others);
            });
    }

    // The matmul after the next has this matrix, in `bands` bands: threads that wait, or finish their last tile,
    // prefetch their part of it.
    void expect(const D3Matrix& matrix, int rows, int bands = 1);

private:
    // The same without the matrices below it.
    template <int BANDS, class Use> void multiply_part(const D3Matrix& matrix, const Rows& x, int rows, Use use) {
        const MatmulArgs p = args_for(matrix, in_order_of(matrix, x, rows), rows);
        const int channels = matrix.rows / BANDS;
        const auto use_rows = [&](int worker, int first, int count, int start, int stop) {
            const Rows& out = scratch_[worker].outputs;
            for (int nth = 0; nth < count; nth++) {
                float* values[] = {out.row(nth), out.row(ROWS_A_PASS + nth)};
                for (int band = 0; matrix.bias && band < BANDS; band++)
                    kernels_.add(values[band], matrix.bias + band * channels + start, stop - start);
                use(worker, first + nth, start, stop, values[0], values[1]);
            }
        };
        if (uses_gemm(p)) run_gemm_packed<BANDS>(matrix, p, use_rows);
        else run_gemv<BANDS>(matrix, p, use_rows);
        if (reads_memory_) next_matrix_ = {};
    }

    static constexpr int ROWS_A_PASS = 48;              // that a tile multiplies at once
    static_assert(ROWS_A_PASS % 16 == 0);               // vectors that were prepared together stay together
    static constexpr int64_t MANY_NUMBERS = 16 * 1024;  // of vectors: from here on threads share their preparation

    // Per thread, for one tile.
    struct Scratch {
        Rows outputs;            // the tile's channels of some rows, band by band
        Floats panels;           // its weights, for many rows
        Floats unpacked;         // its bf12 rows as bfloat16, those in blocks as floats, band by band
        Floats prepared;         // few vectors, in the form of the instruction set
        int64_t nth_matmul = 0;  // the matmul that they belong to
    };

    // The vectors as the columns of the matrix meet them.
    const Rows& in_order_of(const D3Matrix& matrix, const Rows& x, int rows);
    const Rows& in_pairs(const Rows& x, int rows, int columns);
    template <class Body> void each_row(int rows, int columns, Body body) {
        if (int64_t(rows) * columns >= MANY_NUMBERS) threads_.parallel_for(rows, [&](int, int nth) { body(nth); });
        else for (int nth = 0; nth < rows; nth++) body(nth);
    }
    MatmulArgs args_for(const D3Matrix& matrix, const Rows& x, int rows);
    MatmulArgs worker_vectors(const MatmulArgs& p, int worker);
    static bool has_few_vectors(const MatmulArgs& p) { return int64_t(p.batch) * p.columns < MANY_NUMBERS; }
    bool uses_gemm(const MatmulArgs& p) const {
        return !p.prepared && p.batch >= (p.kind == D3_FLOAT32 ? kernels_.many_of_floats : kernels_.many);
    }
    static bool is_bf12(const D3Matrix& matrix) { return matrix.kind == D3_BF12; }
    // Whether a matrix is unpacked for that many vectors, tile by tile: bf12 to bfloat16, blocks to floats.
    bool unpacks(const D3Matrix& matrix, int rows) const {
        return is_bf12(matrix) ? rows > kernels_.max_bf12 : is_in_blocks(matrix.kind) && rows > kernels_.max_blocks;
    }
    void unpack(const D3Matrix& matrix, int start, int stop, char* to) const {
        if (is_bf12(matrix)) kernels_.unpack(matrix, start, stop, ahead_, to);
        else kernels_.unpack_blocks(matrix, start, stop, ahead_, reinterpret_cast<float*>(to));
    }
    bool needs_prepared(const D3Matrix& matrix) const;
    Tiling tiling_of(const D3Matrix& matrix, int rows, int bands) const;
    // Whether memory would be idle during this matmul.
    bool prefetches_next(const MatmulArgs& p) const {
        const int of_floats = p.kind == D3_BF12 ? kernels_.widest_bf12 : kernels_.widest;
        return reads_memory_ && p.batch > (p.prepared ? kernels_.widest_prepared : of_floats);
    }
    NextWeights next_weights(const TiledMatrix& tiled, int tile) const;
    int panels_of_tile(const D3Matrix& matrix, int bands) const;

    // Calls use(worker, first row, how many, first channel, last channel).
    template <int BANDS, class Use> void run_gemv(const D3Matrix& matrix, const MatmulArgs& p, Use use) {
        const Tiling tiles = tiling_of(matrix, p.batch, BANDS);
        const bool has_later = prefetches_next(p), unpacked = unpacks(matrix, p.batch);
        threads_.parallel_for(tiles.count, [&](int worker, int tile) {
            const Rows& out = scratch_[worker].outputs;
            const MatmulArgs own = p.prepared && has_few_vectors(p) ? worker_vectors(p, worker) : p;
            const int start = tiles.start(tile), stop = tiles.start(tile + 1);
            const NextWeights later = has_later ? next_weights({matrix, BANDS, tiles}, tile) : NextWeights{};
            char* const rows = reinterpret_cast<char*>(scratch_[worker].unpacked.at(0));
            for (int band = 0; unpacked && band < BANDS; band++)
                unpack(matrix, band * tiles.channels + start, band * tiles.channels + stop,
                       rows + band * (stop - start) * p.row_bytes);
            const int passes = (p.batch + ROWS_A_PASS - 1) / ROWS_A_PASS * BANDS;
            int pass = 0;
            for (int first = 0; first < p.batch; first += ROWS_A_PASS) {
                MatmulArgs some = own;
                some.batch = std::min(ROWS_A_PASS, p.batch - first), some.x += first * p.ldx;
                if (p.prepared) some.prepared += kernels_.prepared_bytes(p.kind, p.columns, first);
                for (int band = 0; band < BANDS; band++) {
                    const int begin = unpacked ? band * (stop - start) : band * tiles.channels + start;
                    if (unpacked) some.values = rows;
                    kernels_.multiply(some, {begin, begin + stop - start, out.row(band * ROWS_A_PASS), out.stride(),
                                             later.part(pass++, passes)});
                }
                use(worker, first, some.batch, start, stop);
            }
        });
    }

    // For many rows: weights are widened once for all of them, panel by panel, never more than a tile at a time.
    template <int BANDS, class Use> void run_gemm_packed(const D3Matrix& matrix, const MatmulArgs& p, Use use) {
        const int channels = matrix.rows / BANDS, panel = kernels_.panel, strip = kernels_.strip;
        const int64_t panel_floats = kernels_.panel_floats(p.columns), strip_floats = kernels_.strip_floats(p.columns);
        const int strips = (p.batch + strip - 1) / strip;
        const int panels = panels_of_tile(matrix, BANDS), size = panels * panel;
        const auto rows_of = [&](int nth) { return std::min(strip, p.batch - nth * strip); };
        threads_.parallel_for(strips, [&](int, int nth) {
            kernels_.pack(p, nth * strip, rows_of(nth), strips_.at(nth * strip_floats));
        });
        threads_.parallel_for((channels + size - 1) / size, [&](int worker, int tile) {
            const Scratch& scratch = scratch_[worker];
            const int start = tile * size, stop = std::min(channels, start + size);
            // Calls body(a panel's floats, its first channel, its last, where their values go).
            const auto each_panel = [&](auto body) {
                for (int band = 0; band < BANDS; band++)
                    for (int n = start, nth = band * panels; n < stop; n += panel, nth++)
                        body(scratch.panels.at(nth * panel_floats), band * channels + n,
                             band * channels + std::min(stop, n + panel),
                             scratch.outputs.row(band * ROWS_A_PASS) + n - start);
            };
            each_panel([&](float* widened, int from, int end, float*) {
                if (!unpacks(matrix, p.batch)) return kernels_.widen(p, from, end, widened);
                MatmulArgs some = p;
                some.values = reinterpret_cast<char*>(scratch.unpacked.at(0));
                unpack(matrix, from, end, reinterpret_cast<char*>(scratch.unpacked.at(0)));
                kernels_.widen(some, 0, end - from, widened);
            });
            for (int nth = 0; nth < strips; nth++) {
                const float* vectors = strips_.at(nth * strip_floats);
                each_panel([&](const float* widened, int from, int end, float* out) {
                    kernels_.multiply_panel(p, widened, from, end, vectors, rows_of(nth), out,
                                            scratch.outputs.stride());
                });
                use(worker, nth * strip, rows_of(nth), start, stop);
            }
        });
    }

    const Kernels& kernels_;
    ThreadPool& threads_;
    const bool reads_memory_;  // the weights do not fit into the last-level cache
    const int64_t ahead_;
    const bool one_stream_;
    std::vector<Scratch> scratch_;  // [threads]
    Rows ordered_;                  // the vectors of a matrix with an order
    Rows pairs_;                    // of bfloat16 numbers, for a matrix of such
    Floats prepared_;               // many vectors, in the form of the instruction set
    TiledMatrix next_matrix_{};     // of the matmul after this one, if known
    int64_t nth_matmul_ = 0;        // counts those with prepared vectors
    Floats strips_;                 // the vectors of the packed GEMM
};
