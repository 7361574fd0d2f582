// Any machine that GCC or Clang supports: four floats at a time in their vector types, no intrinsics. The fallback.
#include "isa/simd.h"

namespace portable {

constexpr int LANES = 4, REGISTERS = 16;
typedef float V __attribute__((vector_size(16)));
typedef int32_t VI __attribute__((vector_size(16)));

template <class T> INLINE T load_bytes(const void* from) {
    T values;
    memcpy(&values, from, sizeof values);
    return values;
}
INLINE V load(const float* from) { return load_bytes<V>(from); }
INLINE void store(float* to, V values) { memcpy(to, &values, sizeof values); }
INLINE V all(float value) { return V{value, value, value, value}; }
INLINE float sum(V values) { return (values[0] + values[2]) + (values[1] + values[3]); }
INLINE float first_lane(V values) { return values[0]; }
INLINE V multiply_add(V a, V b, V c) { return a * b + c; }
INLINE V zip_low(V a, V b) { return V{a[0], b[0], a[1], b[1]}; }
INLINE V zip_high(V a, V b) { return V{a[2], b[2], a[3], b[3]}; }
constexpr int SUMS = LANES;
using Summed = V;
INLINE Summed begun_sum(V values) { return values; }
template <int DISTANCE> INLINE V folded(V a, V b) {
    if constexpr (DISTANCE == 1) return V{a[0], b[0], a[2], b[2]} + V{a[1], b[1], a[3], b[3]};
    else return V{a[0], a[1], b[0], b[1]} + V{a[2], a[3], b[2], b[3]};
}
INLINE V select(VI where, V yes, V no) { return (V)(((VI)yes & where) | ((VI)no & ~where)); }
INLINE V larger(V a, V b) { return select(a > b, a, b); }
INLINE V smaller(V a, V b) { return select(a < b, a, b); }
INLINE VI float_as_bits(V values) { return (VI)values; }
INLINE V bits_as_float(VI bits) { return (V)bits; }

INLINE V as_floats(VI values) { return __builtin_convertvector(values, V); }
template <class T> INLINE VI widen(const char* from) {
    T few[4];
    memcpy(few, from, sizeof few);
    return VI{few[0], few[1], few[2], few[3]};
}
INLINE V widen_bfloat16(const char* from) { return (V)(widen<uint16_t>(from) << 16); }
INLINE V widen_int8(const char* from) { return as_floats(widen<int8_t>(from)); }
INLINE VI widen_uint8(const char* from) { return widen<uint8_t>(from); }
INLINE V widen_float16(const char* from) {
    const VI halves = widen<uint16_t>(from);
    return (V)((halves & 0x8000) << 16 | (halves & 0x7fff) << 13) * all(0x1p112f);
}
INLINE V widen_e4m3(const char* from) {
    const VI bytes = widen_uint8(from), magnitude = (bytes & 0x7f) << 20;
    const V small = (V)(magnitude + (113 << 23)) - all(0x1p-14f);  // eighths of the least exponent
    const V value = select(magnitude < (8 << 20), small, (V)(magnitude + (112 << 23)));
    return (V)((VI)value | (bytes & 0x80) << 24);
}

struct Int4Values {
    V scale;
    Int4Values() = default;
    explicit INLINE_LAMBDA Int4Values(float given) : scale(all(given)) {}
    INLINE_LAMBDA V low(VI bytes) const { return as_floats((bytes & 15) - 8) * scale; }
    INLINE_LAMBDA V high(VI bytes) const { return as_floats((bytes >> 4) - 8) * scale; }
};

struct Bf12Exponents {
    int before;
    explicit INLINE_LAMBDA Bf12Exponents(int given) : before(given) {}
};
INLINE void bf12_words(const char* group, const Bf12Exponents& exponents, VI (&words)[8]) {
    for (int place = 0; place < BF12_GROUP; place += 2) {
        uint32_t both = 0;
        for (int nth = 0; nth < 2; nth++) {
            const uint32_t byte = uint8_t(group[place + nth]);
            const uint32_t code = uint8_t(group[BF12_GROUP + (place + nth) % 32]) >> place / 32 * 4 & 15;
            const uint32_t exponent = code ? code + exponents.before : 0;
            both |= ((byte & 0x80) << 8 | exponent << 7 | (byte & 0x7f)) << 16 * nth;
        }
        const int quarter = place / 16, within = place % 16;
        words[within / 8 * 4 + quarter][within % 8 / 2] = int32_t(both);
    }
}

// As bfloat16, column by column.
INLINE void store_words(char* to, const VI (&words)[8]) {
    for (int nth = 0; nth < 8; nth++)
        for (int lane = 0; lane < 4; lane++) {
            const uint32_t both = words[nth][lane];
            const uint16_t first = uint16_t(both), second = uint16_t(both >> 16);
            char* const here = to + nth / 4 * 64 + nth % 4 * 8 + lane * 2;
            memcpy(here, &first, 2), memcpy(here + 32, &second, 2);
        }
}

#include "isa/kernels.inc"

static bool runs_here() { return true; }

extern const Kernels kernels;
const Kernels kernels = table("portable");

}  // namespace portable
