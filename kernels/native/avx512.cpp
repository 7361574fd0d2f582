// AVX-512: sixteen floats a register, thirty-two registers. Compiled with its own flags, called only where they hold.
#include "simd.h"

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
#include "eight_lanes.inc"

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

#include "kernels.inc"

static bool runs_here() {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("fma");
}

#include "fixed_point.inc"
#include "fixed_single.inc"
#include "fixed_lanes.inc"
#include "with_bytes.inc"

#if defined(D3_TILES)
#include "tiles.inc"
#include "fixed_tiles.inc"
#include "bfloat16_tiles.inc"
#include "with_tiles.inc"
#endif

extern const Kernels kernels;
const Kernels kernels = table("avx512");

}  // namespace avx512
#endif
