// bfloat16 matrices in 12 bits a weight, as packed.py describes them.
#include <cstring>

#include "abi.h"
#include "kernels.h"

namespace {

constexpr int CODES = 15;  // and 0, which is that of zeros

inline int exponent_of(uint16_t bits) { return bits >> 7 & 255; }
inline bool is_zero(uint16_t bits) { return (bits & 0x7fff) == 0; }

// The byte of a group that a column has, so that bytes which are zipped become lanes of neighbours.
inline int place_of(int column) { return column % 16 / 4 * 16 + column / 32 * 8 + column % 4 * 2 + column % 32 / 16; }

// The exponent before the neighbours that most weights have. Numbers below the least normal one have none.
int best_exponent(const uint16_t* matrix, int64_t count) {
    int64_t counts[256] = {};
    for (int64_t i = 0; i < count; i++) counts[exponent_of(matrix[i])]++;
    int best = 0;
    int64_t most = -1, held = 0;
    for (int last = 1; last < 256; last++) {
        held += counts[last];
        if (last > CODES) held -= counts[last - CODES];
        if (last >= CODES && held > most) most = held, best = last - CODES;
    }
    return best;
}

}  // namespace

int64_t d3_pack(const uint16_t* matrix, int32_t rows, int32_t columns, int64_t room, uint8_t* packed,
                const D3PackedBeside* beside) {
    int places[PACKED_GROUP];
    for (int column = 0; column < PACKED_GROUP; column++) places[column] = place_of(column);
    const int before = best_exponent(matrix, int64_t(rows) * columns);
    *beside->exponent = before;
    int64_t count = 0;
    beside->starts[0] = 0;
    for (int row = 0; row < rows; row++) {
        const uint16_t* weights = matrix + int64_t(row) * columns;
        for (int first = 0; first < columns; first += PACKED_GROUP, packed += PACKED_BYTES) {
            uint8_t* codes = packed + PACKED_GROUP;
            memset(packed, 0, PACKED_BYTES);
            for (int within = 0; within < PACKED_GROUP && first + within < columns; within++) {
                const uint16_t bits = weights[first + within];
                const int place = places[within];
                const int code = is_zero(bits) ? 0 : exponent_of(bits) - before;
                if (code > CODES || (code < 1 && !is_zero(bits))) {
                    if (count == room) return -1;
                    beside->weights[count] = bits, beside->columns[count] = first + within, count++;
                    continue;
                }
                packed[place] = uint8_t(bits >> 8 & 0x80) | uint8_t(bits & 0x7f);
                codes[place % 32] |= uint8_t(code << place / 32 * 4);
            }
        }
        beside->starts[row + 1] = count;
    }
    return count;
}

void d3_unpack(const D3Matrix* matrix, int32_t start, int32_t stop, void* to) {
    int32_t isa = 0;
    while (!ALL_KERNELS[isa]->runs_here()) isa++;
    ALL_KERNELS[isa]->unpack(*matrix, start, stop, 0, static_cast<char*>(to));
}
