// Packs bfloat16 matrices into 12 bits a weight; kernels/bf12.py describes the format.
#include <algorithm>
#include <cstring>

#include "abi.h"
#include "isa/kernels.h"

namespace {

constexpr int CODES = 15;  // and 0, the code of zeros

inline int exponent_of(uint16_t bits) { return bits >> 7 & 255; }

// The column of a group for each byte: zipped bytes become lanes of neighbouring columns.
inline int column_of(int place) { return place % 16 / 8 * 32 + place % 2 * 16 + place / 16 * 4 + place % 8 / 2; }

// The exponent below the fifteen neighbouring exponents that most weights have. Subnormal numbers have none.
int best_exponent(const uint16_t* matrix, int64_t count) {
    // Neighbours often have the same exponent: four histograms avoid waiting for the same counter.
    int64_t counts[4][256] = {};
    for (int64_t i = 0; i < count; i++) counts[i % 4][exponent_of(matrix[i])]++;
    int best = 0;
    int64_t most = -1, held = 0;
    const auto number = [&](int exponent) {
        return counts[0][exponent] + counts[1][exponent] + counts[2][exponent] + counts[3][exponent];
    };
    for (int last = 1; last < 256; last++) {
        held += number(last);
        if (last > CODES) held -= number(last - CODES);
        if (last >= CODES && held > most) most = held, best = last - CODES;
    }
    return best;
}

// Whether a weight is stored as an outlier: not zero, and none of the fifteen exponents above `before`.
inline bool is_outlier(uint16_t bits, uint16_t before) {
    const uint16_t code = exponent_of(bits) - before;
    return (bits & 0x7fff) != 0 && uint16_t(code - 1) >= CODES;
}

// Packs a group whose weights are in the order of its bytes; returns whether it has outliers. Branch-free and all
// 16-bit, so that the compiler vectorizes it.
bool pack_group(const uint16_t* __restrict weights, uint16_t before, uint8_t* __restrict packed) {
    uint16_t codes[BF12_GROUP], values[BF12_GROUP], outliers = 0;
    for (int place = 0; place < BF12_GROUP; place++) {
        const uint16_t bits = weights[place], apart = is_outlier(bits, before) ? 0xffff : 0;
        const uint16_t some = (bits & 0x7fff) != 0 ? 0xffff : 0, code = exponent_of(bits) - before;
        values[place] = ((bits >> 8 & 0x80) | (bits & 0x7f)) & uint16_t(~apart);
        codes[place] = code & some & uint16_t(~apart);
        outliers |= apart;
    }
    constexpr int HALF = BF12_GROUP / 2;
    for (int place = 0; place < BF12_GROUP; place++) packed[place] = uint8_t(values[place]);
    for (int i = 0; i < HALF; i++) packed[BF12_GROUP + i] = uint8_t(codes[i] | codes[HALF + i] << 4);
    return outliers != 0;
}

}  // namespace

int64_t d3_bf12_pack(const uint16_t* matrix, int32_t rows, int32_t columns, int64_t room, uint8_t* packed,
                     const D3Bf12Target* outliers) {
    int order[BF12_GROUP];
    for (int place = 0; place < BF12_GROUP; place++) order[place] = column_of(place);
    const int before = best_exponent(matrix, int64_t(rows) * columns);
    *outliers->exponent = before;
    int64_t count = 0;
    outliers->starts[0] = 0;
    for (int row = 0; row < rows; row++) {
        for (int first = 0; first < columns; first += BF12_GROUP, packed += BF12_BYTES) {
            const int held = std::min(BF12_GROUP, columns - first);
            uint16_t weights[BF12_GROUP], ordered[BF12_GROUP];
            if (held < BF12_GROUP) memset(weights, 0, sizeof(weights));
            memcpy(weights, matrix + int64_t(row) * columns + first, sizeof(uint16_t) * held);
            for (int place = 0; place < BF12_GROUP; place++) ordered[place] = weights[order[place]];
            if (!pack_group(ordered, before, packed)) continue;
            for (int column = 0; column < held; column++) {
                if (!is_outlier(weights[column], before)) continue;
                if (count == room) return -1;
                outliers->weights[count] = weights[column], outliers->columns[count] = first + column, count++;
            }
        }
        outliers->starts[row + 1] = count;
    }
    return count;
}

void d3_bf12_unpack(const D3Matrix* matrix, int32_t start, int32_t stop, void* to) {
    int32_t isa = 0;
    while (!ALL_KERNELS[isa]->runs_here()) isa++;
    ALL_KERNELS[isa]->unpack(*matrix, start, stop, 0, static_cast<char*>(to));
}
