// AVX-512: sixteen floats a register, thirty-two registers. Compiled with its own flags, called only where they hold.
#include "isa/simd.h"

#if defined(__x86_64__) && !defined(D3_PORTABLE)
#include <immintrin.h>

namespace avx512 {

constexpr int LANES = 16, REGISTERS = 32;
typedef float V __attribute__((vector_size(64)));
typedef int32_t VI __attribute__((vector_size(64)));

INLINE V load(const float* from) { return _mm512_loadu_ps(from); }
INLINE void store(float* to, V values) { _mm512_storeu_ps(to, values); }
INLINE V all(float value) { return _mm512_set1_ps(value); }
INLINE float sum(V values) { return _mm512_reduce_add_ps(values); }
INLINE float first_lane(V values) { return values[0]; }
INLINE V multiply_add(V a, V b, V c) { return _mm512_fmadd_ps(a, b, c); }
INLINE V zip_low(V a, V b) {
    const __m512i turns = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    return _mm512_permutex2var_ps(a, turns, b);
}
INLINE V zip_high(V a, V b) {
    const __m512i turns = _mm512_setr_epi32(8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
    return _mm512_permutex2var_ps(a, turns, b);
}
#include "isa/x86.inc"

// Halves of a register meet first, and what is left to add up is half as wide: where a whole register goes through the
// processor in two halves (Zen 4), that is a quarter less to do.
INLINE Summed begun_sum(V values) {
    return _mm256_add_ps(_mm512_castps512_ps256(values), _mm512_extractf32x8_ps(values, 1));
}
INLINE V choose(VI where, V yes, V no) { return where ? yes : no; }
INLINE V larger(V a, V b) { return _mm512_max_ps(a, b); }
INLINE V smaller(V a, V b) { return _mm512_min_ps(a, b); }
INLINE VI float_as_bits(V values) { return (VI)values; }
INLINE V bits_as_float(VI bits) { return (V)bits; }

INLINE V widen_bfloat16(const char* from) {
    return (V)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)from)), 16);
}
INLINE V widen_int8(const char* from) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)from)));
}
INLINE V widen_e4m3(const char* from) {
    const __m256i halves = _mm256_slli_epi16(_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)from)), 7);
    return _mm512_cvtph_ps(_mm256_and_si256(halves, _mm256_set1_epi16(short(0xbfff))));  // without the sign's double
}
INLINE VI widen_uint8(const char* from) { return (VI)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)from)); }

// All sixteen values that four bits can stand for lie in one register, and a value is looked up in it.
struct Nibbles {
    V table;
    Nibbles() = default;
    explicit INLINE_LAMBDA Nibbles(float scale)
        : table(V{-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7} * all(scale)) {}
    INLINE_LAMBDA V low(VI bytes) const { return _mm512_permutexvar_ps((__m512i)bytes, table); }  // reads four bits
    INLINE_LAMBDA V high(VI bytes) const { return _mm512_permutexvar_ps(_mm512_srli_epi32((__m512i)bytes, 4), table); }
};

// By code, what of an exponent goes into the byte of the sign, and what into that of the mantissa.
struct Exponents {
    __m512i with_sign, with_mantissa;
    explicit INLINE_LAMBDA Exponents(int before) {
        const __m128i codes = _mm_setr_epi8(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
        const __m128i all = _mm_maskz_add_epi8(0xfffe, codes, _mm_set1_epi8(char(before)));
        with_sign = _mm512_broadcast_i32x4(_mm_and_si128(_mm_srli_epi16(all, 1), _mm_set1_epi8(0x7f)));
        with_mantissa = _mm512_broadcast_i32x4(_mm_and_si128(_mm_slli_epi16(all, 7), _mm_set1_epi8(char(0x80))));
    }
};
INLINE void packed_words(const char* group, const Exponents& exponents, VI (&words)[2]) {
    const __m512i low_bits = _mm512_set1_epi8(0x7f);
    const __m512i of_halves = _mm512_inserti64x4(_mm512_setzero_si512(), _mm256_set1_epi16(4), 1);
    const __m512i bytes = _mm512_loadu_si512(group);
    const __m512i twice = _mm512_broadcast_i64x4(_mm256_loadu_si256((const __m256i*)(group + PACKED_GROUP)));
    const __m512i codes = _mm512_and_si512(_mm512_srlv_epi16(twice, of_halves), _mm512_set1_epi8(15));
    constexpr int CHOOSE = 0xca;  // where the first has a bit, the second's, or else the third's
    const __m512i signs =
        _mm512_ternarylogic_epi32(low_bits, _mm512_shuffle_epi8(exponents.with_sign, codes), bytes, CHOOSE);
    const __m512i mantissas =
        _mm512_ternarylogic_epi32(low_bits, bytes, _mm512_shuffle_epi8(exponents.with_mantissa, codes), CHOOSE);
    words[0] = (VI)_mm512_unpacklo_epi8(mantissas, signs), words[1] = (VI)_mm512_unpackhi_epi8(mantissas, signs);
}

// As bfloat16, column by column.
INLINE void store_words(char* to, const VI (&words)[2]) {
    const VI order = {0x20000, 0x60004, 0xa0008, 0xe000c, 0x120010, 0x160014, 0x1a0018, 0x1e001c,
                      0x30001, 0x70005, 0xb0009, 0xf000d, 0x130011, 0x170015, 0x1b0019, 0x1f001d};
    UNROLL for (int half = 0; half < 2; half++)
        _mm512_storeu_si512(to + 64 * half, _mm512_permutexvar_epi16((__m512i)order, (__m512i)words[half]));
}

#include "isa/kernels.inc"

static bool runs_here() {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("fma");
}

#include "matmul/int_dot.inc"
#include "matmul/fixed_single.inc"
#include "matmul/fixed_lanes.inc"
#include "matmul/int_dot_interleaved.inc"
#include "isa/with_bytes.inc"

#if defined(D3_TILES)
#include "matmul/amx.inc"
#include "matmul/fixed_tiles.inc"
#include "matmul/bfloat16_tiles.inc"
#include "isa/with_tiles.inc"
#endif

extern const Kernels kernels;
const Kernels kernels = table("avx512");

}  // namespace avx512
#endif
