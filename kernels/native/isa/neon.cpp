// NEON, which every 64-bit Arm has: four floats a register, thirty-two registers.
#include "isa/simd.h"

#if defined(__aarch64__) && !defined(D3_PORTABLE)
#include <arm_neon.h>

namespace neon {

constexpr int LANES = 4, REGISTERS = 32;
typedef float V __attribute__((vector_size(16)));
typedef int32_t VI __attribute__((vector_size(16)));

INLINE V load(const float* from) { return (V)vld1q_f32(from); }
INLINE void store(float* to, V values) { vst1q_f32(to, (float32x4_t)values); }
INLINE V all(float value) { return (V)vdupq_n_f32(value); }
INLINE float sum(V values) { return (values[0] + values[2]) + (values[1] + values[3]); }
INLINE float first_lane(V values) { return values[0]; }
INLINE V multiply_add(V a, V b, V c) { return (V)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b); }
INLINE V zip_low(V a, V b) { return (V)vzip1q_f32((float32x4_t)a, (float32x4_t)b); }
INLINE V zip_high(V a, V b) { return (V)vzip2q_f32((float32x4_t)a, (float32x4_t)b); }
constexpr int SUMS = LANES;
using Summed = V;
INLINE Summed begun_sum(V values) { return values; }
template <int DISTANCE> INLINE V folded(V a, V b) {
    const float32x4_t first = (float32x4_t)a, second = (float32x4_t)b;
    if constexpr (DISTANCE == 1) return (V)vtrn1q_f32(first, second) + (V)vtrn2q_f32(first, second);
    else return (V)vtrn1q_f64((float64x2_t)a, (float64x2_t)b) + (V)vtrn2q_f64((float64x2_t)a, (float64x2_t)b);
}
INLINE V select(VI where, V yes, V no) { return (V)(((VI)yes & where) | ((VI)no & ~where)); }
INLINE V larger(V a, V b) { return select(a > b, a, b); }
INLINE V smaller(V a, V b) { return select(a < b, a, b); }
INLINE VI float_as_bits(V values) { return (VI)values; }
INLINE V bits_as_float(VI bits) { return (V)bits; }

template <class T> INLINE T load_bytes(const char* from) {
    T values;
    memcpy(&values, from, sizeof values);
    return values;
}
INLINE V widen_bfloat16(const char* from) { return (V)vshll_n_u16(load_bytes<uint16x4_t>(from), 16); }
INLINE int8x8_t four_bytes(const char* from) { return vcreate_s8(load_bytes<uint32_t>(from)); }
INLINE V widen_int8(const char* from) {
    return (V)vcvtq_f32_s32(vmovl_s16(vget_low_s16(vmovl_s8(four_bytes(from)))));
}
INLINE V widen_float16(const char* from) {
    return (V)vcvt_f32_f16(vreinterpret_f16_u16(load_bytes<uint16x4_t>(from)));
}
INLINE V widen_e4m3(const char* from) {
    const int16x4_t halves = vget_low_s16(vshll_n_s8(four_bytes(from), 7));
    return (V)vcvt_f32_f16(vreinterpret_f16_s16(vand_s16(halves, vdup_n_s16(short(0xbfff)))));  // drop the sign's copy
}
INLINE VI widen_uint8(const char* from) {
    return (VI)vmovl_u16(vget_low_u16(vmovl_u8(vreinterpret_u8_s8(four_bytes(from)))));
}

// q * scale - 8 * scale rounded once is (q - 8) * scale: multiplying by 8 is exact.
struct Int4Values {
    V scale, eight;
    Int4Values() = default;
    explicit INLINE_LAMBDA Int4Values(float given) : scale(all(given)), eight(all(-8.0f * given)) {}
    INLINE_LAMBDA V low(VI bytes) const { return value(bytes & 15); }
    INLINE_LAMBDA V high(VI bytes) const { return value(bytes >> 4); }
    INLINE_LAMBDA V value(VI q) const { return multiply_add((V)vcvtq_f32_s32((int32x4_t)q), scale, eight); }
};

// By code: the exponent bits of the byte with the sign, and of the byte with the mantissa.
struct Bf12Exponents {
    uint8x16_t with_sign, with_mantissa;
    explicit INLINE_LAMBDA Bf12Exponents(int before) {
        const uint8x16_t codes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
        const uint8x16_t all = vandq_u8(vaddq_u8(codes, vdupq_n_u8(uint8_t(before))), vtstq_u8(codes, codes));
        with_sign = vshrq_n_u8(all, 1), with_mantissa = vshlq_n_u8(all, 7);
    }
};
INLINE void bf12_words(const char* group, const Bf12Exponents& exponents, VI (&words)[8]) {
    const uint8_t* bytes = reinterpret_cast<const uint8_t*>(group);
    const uint8x16_t low_bits = vdupq_n_u8(0x7f);
    UNROLL for (int quarter = 0; quarter < 4; quarter++) {
        const uint8x16_t some = vld1q_u8(bytes + 16 * quarter);
        const uint8x16_t pairs = vld1q_u8(bytes + BF12_GROUP + quarter % 2 * 16);
        const uint8x16_t codes = quarter < 2 ? vandq_u8(pairs, vdupq_n_u8(15)) : vshrq_n_u8(pairs, 4);
        const uint8x16_t signs = vbslq_u8(low_bits, vqtbl1q_u8(exponents.with_sign, codes), some);
        const uint8x16_t mantissas = vbslq_u8(low_bits, some, vqtbl1q_u8(exponents.with_mantissa, codes));
        words[quarter] = (VI)vzip1q_u8(mantissas, signs), words[4 + quarter] = (VI)vzip2q_u8(mantissas, signs);
    }
}

// As bfloat16, column by column.
INLINE void store_words(char* to, const VI (&words)[8]) {
    UNROLL for (int nth = 0; nth < 8; nth++) {
        const uint16x8_t both = (uint16x8_t)words[nth];
        const uint16x8_t apart = vuzp1q_u16(both, both), others = vuzp2q_u16(both, both);
        memcpy(to + nth / 4 * 64 + nth % 4 * 8, &apart, 8);
        memcpy(to + nth / 4 * 64 + nth % 4 * 8 + 32, &others, 8);
    }
}

#include "isa/kernels.inc"

static bool runs_here() { return true; }

extern const Kernels kernels;
const Kernels kernels = table("neon");

}  // namespace neon
#endif
