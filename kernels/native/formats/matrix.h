// What a matrix is in memory.
#pragma once
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>

#include "abi.h"
#include "isa/kernels.h"

inline int64_t bytes_of_row(const D3Matrix& matrix) {
    switch (matrix.kind) {
        case D3_FLOAT32: return int64_t(matrix.columns) * 4;
        case D3_BFLOAT16: return int64_t(matrix.columns) * 2;
        case D3_INT8: case D3_FP8: case D3_FP8_GROUPS: return matrix.columns;
        case D3_INT8_LANES: return int64_t(matrix.columns + STEP_OF_LANES - 1) / STEP_OF_LANES * STEP_OF_LANES;
        case D3_PACKED_BFLOAT16: return groups_of_packed(matrix.columns) * PACKED_BYTES;
        default: return int64_t(matrix.columns + SCALE_GROUP - 1) / SCALE_GROUP * (SCALE_GROUP / 2);
    }
}

// Whether the weights that lie beside a packed matrix are in order, and inside of it.
inline bool is_packing(const D3Matrix& matrix) {
    const D3Packing& packing = matrix.packing;
    if (!packing.starts || packing.exponent < 0 || packing.exponent > 240 || packing.starts[0] != 0) return false;
    for (int row = 0; row < matrix.rows; row++) {
        if (packing.starts[row] > packing.starts[row + 1]) return false;
        int before = -1;
        for (int64_t nth = packing.starts[row]; nth < packing.starts[row + 1]; before = packing.columns[nth++])
            if (packing.columns[nth] <= before || packing.columns[nth] >= matrix.columns) return false;
    }
    return true;
}

// Whether all rows of a matrix are in lanes, those of each half too, and its vectors where they can be loaded at once.
inline bool is_in_lanes(const D3Matrix& matrix) {
    return matrix.rows % (2 * LANES_OF_ROWS) == 0 && reinterpret_cast<uintptr_t>(matrix.values) % 64 == 0;
}

inline bool is_matrix(const D3Matrix& matrix, int rows, int columns, bool reads_lanes) {
    const bool is_packed = matrix.kind == D3_PACKED_BFLOAT16, has_scales = matrix.kind >= D3_INT8 && !is_packed;
    return matrix.kind >= D3_FLOAT32 && matrix.kind <= D3_INT8_LANES && matrix.rows == rows &&
           matrix.columns == columns && matrix.values && (matrix.scales != nullptr) == has_scales &&
           (!is_packed || is_packing(matrix)) && (!lies_in_lanes(matrix.kind) || (reads_lanes && is_in_lanes(matrix)));
}

// Whether single rows can be read from a matrix.
inline bool is_table(const D3Matrix& matrix) { return matrix.kind <= D3_INT8 || matrix.kind == D3_INT8_LANES; }

// Row `row` of a table, as floats.
inline void look_up(float* to, const D3Matrix& table, int64_t row) {
    const char* from = static_cast<const char*>(table.values) + row * bytes_of_row(table);
    if (table.kind == D3_FLOAT32) {
        memcpy(to, from, bytes_of_row(table));
        return;
    }
    if (table.kind == D3_INT8_LANES) {
        const int64_t apart = LANES_OF_ROWS * 4;  // of the row's fours
        const uint8_t* fours = static_cast<const uint8_t*>(table.values) +
                               row / LANES_OF_ROWS * LANES_OF_ROWS * bytes_of_row(table) + row % LANES_OF_ROWS * 4;
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
        uint16_t half;
        memcpy(&half, from + 2 * i, sizeof half);
        const uint32_t bits = uint32_t(half) << 16;
        memcpy(to + i, &bits, sizeof bits);
    }
}

// Floats that begin at a cache line, zeros at first. The system gives their pages when they are first touched, so that
// what is never needed costs nothing.
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

// Rows of floats with zeros behind them: up to a whole group of int4, and some more, so that neighbouring rows do not
// fall onto the same lines of a cache.
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
