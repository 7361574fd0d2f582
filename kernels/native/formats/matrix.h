// Matrices and rows of floats in memory.
#pragma once
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>

#include "types.h"
#include "isa/kernels.h"

inline int64_t bytes_of_row(const D3Matrix& matrix) {
    const BlockSize block = block_size(matrix.kind);
    if (block.columns) return int64_t(matrix.columns / block.columns) * block.bytes;
    switch (matrix.kind) {
        case D3_FLOAT32: return int64_t(matrix.columns) * 4;
        case D3_BFLOAT16: case D3_FLOAT16: case D3_BFLOAT16_PAIRS: return int64_t(matrix.columns) * 2;
        case D3_INT8: case D3_FP8: case D3_FP8_GROUPS: return matrix.columns;
        case D3_INT8X16: return int64_t(matrix.columns + INTERLEAVED_STEP - 1) / INTERLEAVED_STEP * INTERLEAVED_STEP;
        case D3_BF12: return bf12_groups(matrix.columns) * BF12_BYTES;
        default: return int64_t(matrix.columns + SCALE_GROUP - 1) / SCALE_GROUP * (SCALE_GROUP / 2);
    }
}

// Whether the outliers of a bf12 matrix are sorted and inside the matrix.
inline bool is_valid_bf12(const D3Matrix& matrix) {
    const D3Bf12& bf12 = matrix.bf12;
    if (!bf12.starts || bf12.exponent < 0 || bf12.exponent > 240 || bf12.starts[0] != 0) return false;
    for (int row = 0; row < matrix.rows; row++) {
        if (bf12.starts[row] > bf12.starts[row + 1]) return false;
        int before = -1;
        for (int64_t nth = bf12.starts[row]; nth < bf12.starts[row + 1]; before = bf12.columns[nth++])
            if (bf12.columns[nth] <= before || bf12.columns[nth] >= matrix.columns) return false;
    }
    return true;
}

// Whether the rows of each half of a matrix fill whole groups of 16, and its address allows aligned loads.
inline bool has_interleaved_rows(const D3Matrix& matrix) {
    return matrix.rows % (2 * INTERLEAVED_ROWS) == 0 && reinterpret_cast<uintptr_t>(matrix.values) % 64 == 0;
}

// Whether an instruction set reads an interleaved kind.
inline bool reads_interleaved(const Kernels& kernels, int kind) {
    return is_in_interleaved_blocks(kind) ? kernels.interleave_blocks != nullptr : kernels.reads_interleaved;
}

// Whether the order of a matrix names input channels that there are.
inline bool is_valid_order(const D3Matrix& matrix) {
    for (int column = 0; matrix.order && column < matrix.columns; column++)
        if (matrix.order[column] < 0 || matrix.order[column] >= matrix.columns) return false;
    return true;
}

// Whether a matrix, with those below it, has these rows and columns. Without `kernels` none may be interleaved.
inline bool is_matrix(const D3Matrix& matrix, int rows, int columns, const Kernels* kernels) {
    const bool is_bf12 = matrix.kind == D3_BF12;
    const bool has_scales = matrix.kind >= D3_INT8 && matrix.kind <= D3_INT8X16 && !is_bf12;
    const int block = block_size(matrix.kind).columns, own = matrix.below ? matrix.rows : rows;
    if (matrix.below && (own < 1 || own >= rows || !is_matrix(*matrix.below, rows - own, columns, kernels)))
        return false;
    if (is_interleaved(matrix.kind) &&
        !(kernels && reads_interleaved(*kernels, matrix.kind) && has_interleaved_rows(matrix)))
        return false;
    return matrix.kind >= D3_FLOAT32 && matrix.kind < D3_NUM_KINDS && matrix.rows == own && matrix.columns == columns &&
           columns % (block ? block : matrix.kind == D3_BFLOAT16_PAIRS ? 2 : 1) == 0 && matrix.values &&
           (matrix.scales != nullptr) == has_scales && (!is_bf12 || is_valid_bf12(matrix)) && is_valid_order(matrix);
}

// Whether single rows can be read from a matrix, as from an embedding.
inline bool has_readable_rows(const D3Matrix& matrix) {
    return !matrix.below && !matrix.order && (matrix.kind <= D3_INT8 || matrix.kind >= D3_INT8X16);
}

// Row `row` as floats; `Kernels::unpack_blocks` reads those in blocks.
inline void read_row(float* to, const D3Matrix& table, int64_t row) {
    const char* from = static_cast<const char*>(table.values) + row * bytes_of_row(table);
    if (table.kind == D3_FLOAT32) {
        memcpy(to, from, bytes_of_row(table));
        return;
    }
    if (table.kind == D3_INT8X16) {
        const int64_t apart = INTERLEAVED_ROWS * 4;  // bytes between the row's groups of four
        const int64_t first = row / INTERLEAVED_ROWS * INTERLEAVED_ROWS, nth = row % INTERLEAVED_ROWS;
        const uint8_t* fours = static_cast<const uint8_t*>(table.values) + first * bytes_of_row(table) + nth * 4;
        for (int i = 0; i < table.columns; i++)
            to[i] = float(int(fours[i / 4 * apart + i % 4]) - 128) * table.scales[row];
        return;
    }
    if (table.kind == D3_INT8) {
        const int8_t* values = reinterpret_cast<const int8_t*>(from);
        for (int i = 0; i < table.columns; i++) to[i] = float(values[i]) * table.scales[row];
        return;
    }
    for (int i = 0; i < table.columns; i++) {
        if (table.kind == D3_FLOAT16) {
            to[i] = float_of_half(from + 2 * i);
            continue;
        }
        uint16_t half;
        memcpy(&half, from + 2 * i, sizeof half);
        const uint32_t bits = uint32_t(half) << 16;
        memcpy(to + i, &bits, sizeof bits);
    }
}

// Zeroed floats, aligned to a cache line. The system maps their pages at the first touch, so unused ones cost nothing.
class Floats {
public:
    Floats() = default;
    explicit Floats(int64_t count) : memory_(std::calloc(count * sizeof(float) + LINE, 1)) {
        if (!memory_) throw std::bad_alloc();
        floats_ = reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(memory_.get()) + LINE - 1) / LINE * LINE);
    }
    float* at(int64_t index) const { return floats_ + index; }

private:
    static constexpr size_t LINE = 64;
    struct Free {
        void operator()(void* memory) const { std::free(memory); }
    };
    std::unique_ptr<void, Free> memory_;
    float* floats_ = nullptr;
};

// Rows of floats, padded with zeros to a whole int4 group, and a little more so that neighbouring rows use different
// cache sets.
class Rows {
public:
    Rows() = default;
    Rows(int rows, int columns)
        : stride_((columns + SCALE_GROUP - 1) / SCALE_GROUP * SCALE_GROUP + 16), floats_(int64_t(rows) * stride_) {}
    float* row(int index) const { return floats_.at(index * stride_); }
    int64_t stride() const { return stride_; }

private:
    int64_t stride_ = 0;
    Floats floats_;
};
