// What a matrix is in memory.
#pragma once
#include <cstdint>

#include "abi.h"
#include "kernels.h"

inline int64_t bytes_of_row(const D3Matrix& matrix) {
    switch (matrix.kind) {
        case D3_FLOAT32: return int64_t(matrix.columns) * 4;
        case D3_BFLOAT16: return int64_t(matrix.columns) * 2;
        case D3_INT8: return matrix.columns;
        default: return int64_t(matrix.columns + INT4_GROUP - 1) / INT4_GROUP * (INT4_GROUP / 2);
    }
}

inline bool is_matrix(const D3Matrix& matrix, int rows, int columns) {
    const bool is_quantized = matrix.kind == D3_INT8 || matrix.kind == D3_INT4;
    return matrix.kind >= D3_FLOAT32 && matrix.kind <= D3_INT4 && matrix.rows == rows && matrix.columns == columns &&
           matrix.values && (matrix.scales != nullptr) == is_quantized;
}
