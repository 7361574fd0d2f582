// AVX2 with FMA and F16C: eight floats a register, sixteen registers. Compiled with these flags, called only on
// machines that have them.
#include "isa/simd.h"

#if defined(__x86_64__) && !defined(D3_PORTABLE)
#include <cpuid.h>
#include <immintrin.h>

namespace avx2 {

constexpr int LANES = 8, REGISTERS = 16;
typedef float V __attribute__((vector_size(32)));
typedef int32_t VI __attribute__((vector_size(32)));

INLINE V load(const float* from) { return _mm256_loadu_ps(from); }
INLINE void store(float* to, V values) { _mm256_storeu_ps(to, values); }
INLINE V all(float value) { return _mm256_set1_ps(value); }
INLINE float sum(V values) {
    __m128 half = _mm_add_ps(_mm256_castps256_ps128(values), _mm256_extractf128_ps(values, 1));
    __m128 quarter = _mm_add_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_add_ss(quarter, _mm_movehdup_ps(quarter)));
}
INLINE float first_lane(V values) { return values[0]; }
INLINE V multiply_add(V a, V b, V c) { return _mm256_fmadd_ps(a, b, c); }
INLINE V zip_low(V a, V b) { return _mm256_permute2f128_ps(_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b), 0x20); }
INLINE V zip_high(V a, V b) { return _mm256_permute2f128_ps(_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b), 0x31); }
// Halves are swapped first, and the rest stays within them: half the instructions of a transpose by zips.
INLINE void transpose(V (&values)[LANES]) {
    constexpr int HALF = LANES / 2;
    V halves[LANES], pairs[LANES];
    UNROLL for (int i = 0; i < HALF; i++) {
        halves[i] = _mm256_permute2f128_ps(values[i], values[i + HALF], 0x20);
        halves[i + HALF] = _mm256_permute2f128_ps(values[i], values[i + HALF], 0x31);
    }
    UNROLL for (int i = 0; i < LANES; i += 2) {
        pairs[i] = _mm256_unpacklo_ps(halves[i], halves[i + 1]);
        pairs[i + 1] = _mm256_unpackhi_ps(halves[i], halves[i + 1]);
    }
    UNROLL for (int i = 0; i < LANES; i += HALF)
        UNROLL for (int nth = 0; nth < 2; nth++) {
            const __m256d a = (__m256d)pairs[i + nth], b = (__m256d)pairs[i + nth + 2];
            values[i + 2 * nth] = (V)_mm256_unpacklo_pd(a, b), values[i + 2 * nth + 1] = (V)_mm256_unpackhi_pd(a, b);
        }
}
#include "isa/x86.inc"
INLINE Summed begun_sum(V values) { return values; }
INLINE V select(VI where, V yes, V no) { return where ? yes : no; }
INLINE V larger(V a, V b) { return _mm256_max_ps(a, b); }
INLINE V smaller(V a, V b) { return _mm256_min_ps(a, b); }
INLINE VI float_as_bits(V values) { return (VI)values; }
INLINE V bits_as_float(VI bits) { return (V)bits; }

INLINE V widen_bfloat16(const char* from) {
    return (V)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)from)), 16);
}
INLINE V widen_int8(const char* from) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)from)));
}
INLINE V widen_float16(const char* from) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)from)); }
INLINE V widen_e4m3(const char* from) {
    const __m128i halves = _mm_slli_epi16(_mm_cvtepi8_epi16(_mm_loadl_epi64((const __m128i*)from)), 7);
    return _mm256_cvtph_ps(_mm_and_si128(halves, _mm_set1_epi16(short(0xbfff))));  // drop the sign's copy
}
INLINE VI widen_uint8(const char* from) { return (VI)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)from)); }

// q * scale - 8 * scale rounded once is (q - 8) * scale: multiplying by 8 is exact.
struct Int4Values {
    V scale, eight;
    Int4Values() = default;
    explicit INLINE_LAMBDA Int4Values(float given) : scale(all(given)), eight(all(-8.0f * given)) {}
    INLINE_LAMBDA V low(VI bytes) const { return value(_mm256_and_si256((__m256i)bytes, _mm256_set1_epi32(15))); }
    INLINE_LAMBDA V high(VI bytes) const { return value(_mm256_srli_epi32((__m256i)bytes, 4)); }
    INLINE_LAMBDA V value(__m256i q) const { return _mm256_fmadd_ps(_mm256_cvtepi32_ps(q), scale, eight); }
};

// By code: the exponent bits of the byte with the sign, and of the byte with the mantissa.
struct Bf12Exponents {
    __m256i with_sign, with_mantissa;
    explicit INLINE_LAMBDA Bf12Exponents(int before) {
        const __m128i codes = _mm_setr_epi8(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
        const __m128i sums = _mm_add_epi8(codes, _mm_set1_epi8(char(before)));
        const __m128i all = _mm_andnot_si128(_mm_cmpeq_epi8(codes, _mm_setzero_si128()), sums);
        with_sign = _mm256_broadcastsi128_si256(_mm_and_si128(_mm_srli_epi16(all, 1), _mm_set1_epi8(0x7f)));
        with_mantissa = _mm256_broadcastsi128_si256(_mm_and_si128(_mm_slli_epi16(all, 7), _mm_set1_epi8(char(0x80))));
    }
};
INLINE void bf12_words(const char* group, const Bf12Exponents& exponents, VI (&words)[4]) {
    const __m256i low_bits = _mm256_set1_epi8(0x7f);
    const __m256i all_codes = _mm256_loadu_si256((const __m256i*)(group + BF12_GROUP));
    UNROLL for (int half = 0; half < 2; half++) {
        const __m256i bytes = _mm256_loadu_si256((const __m256i*)(group + 32 * half));
        const __m256i codes = _mm256_and_si256(_mm256_srli_epi16(all_codes, 4 * half), _mm256_set1_epi8(15));
        const __m256i signs = _mm256_or_si256(_mm256_andnot_si256(low_bits, bytes),
                                              _mm256_shuffle_epi8(exponents.with_sign, codes));
        const __m256i mantissas = _mm256_or_si256(_mm256_and_si256(low_bits, bytes),
                                                  _mm256_shuffle_epi8(exponents.with_mantissa, codes));
        words[half] = (VI)_mm256_unpacklo_epi8(mantissas, signs);
        words[2 + half] = (VI)_mm256_unpackhi_epi8(mantissas, signs);
    }
}

// As bfloat16, column by column.
INLINE void store_words(char* to, const VI (&words)[4]) {
    const __m256i order = _mm256_broadcastsi128_si256(
        _mm_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15));
    UNROLL for (int nth = 0; nth < 4; nth++) {
        const __m256i apart = _mm256_permute4x64_epi64(_mm256_shuffle_epi8((__m256i)words[nth], order), 0xd8);
        char* const here = to + nth / 2 * 64 + nth % 2 * 16;
        _mm_storeu_si128((__m128i*)here, _mm256_castsi256_si128(apart));
        _mm_storeu_si128((__m128i*)(here + 32), _mm256_extracti128_si256(apart, 1));
    }
}

#include "isa/kernels.inc"
#include "matmul/prepared.inc"

// Of interleaved blocks.
INLINE Words or_masked(Words a, Words b, Words mask) { return a | (b & mask); }
INLINE Words look_up_bytes(__m128i table, Words places) {
    return (Words)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(table), (__m256i)places);
}
INLINE VI larger(VI a, VI b) { return (VI)_mm256_max_epi32((__m256i)a, (__m256i)b); }
INLINE int32_t largest_lane(VI values) {
    __m128i most = _mm_max_epi32(_mm256_castsi256_si128((__m256i)values), _mm256_extracti128_si256((__m256i)values, 1));
    most = _mm_max_epi32(most, _mm_shuffle_epi32(most, 0x4e));
    return _mm_cvtsi128_si32(_mm_max_epi32(most, _mm_shuffle_epi32(most, 0xb1)));
}
INLINE int32_t sum_of_lanes(VI values) {
    __m128i sum = _mm_add_epi32(_mm256_castsi256_si128((__m256i)values), _mm256_extracti128_si256((__m256i)values, 1));
    sum = _mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0xb1)));
}
INLINE VI whole_numbers(V values) { return (VI)_mm256_cvtps_epi32(values); }
INLINE void store_bytes(void* to, VI values) {
    const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128((__m256i)values),
                                          _mm256_extracti128_si256((__m256i)values, 1));
    _mm_storel_epi64((__m128i*)to, _mm_packs_epi16(words, words));
}

// Products of unsigned and signed bytes are added in pairs, which saturate at 16 bits. A pair of codes of up to seven
// bits fits, and so do sums of several pairs of fewer bits; codes of eight bits are multiplied with their sign: at most
// 2 * 128 * 127. Sums in 16 bits become sums in 32 bits before they overflow.
constexpr bool MULTIPLIES_SIGNED = true;
constexpr int products_together(int bits, int fours) {
    int together = 1;
    while (bits < 8 && 2 * together <= fours && 2 * together * 2 * 127 * ((1 << bits) - 1) <= 32767) together *= 2;
    return together;
}
INLINE VI begun_products(VI) { return VI{}; }
template <int BITS> INLINE void add_products(VI& sum, Words codes, VI same) {
    __m256i weights = (__m256i)codes, numbers = (__m256i)same;
    if constexpr (BITS == 8) {
        weights = _mm256_xor_si256(weights, _mm256_set1_epi8(-128));
        numbers = _mm256_sign_epi8(numbers, weights), weights = _mm256_abs_epi8(weights);
    }
    sum = (VI)_mm256_add_epi16((__m256i)sum, _mm256_maddubs_epi16(weights, numbers));
    asm("" : "+x"(sum));  // else GCC adds the products of several fours first, and spills them
}
INLINE VI with_products(VI found, VI products) {
    return found + (VI)_mm256_madd_epi16((__m256i)products, _mm256_set1_epi16(1));
}

#include "formats/interleaved_blocks.inc"
#include "matmul/int_dot_blocks.inc"

// Older compilers have no name for this check.
static bool has_half_floats() {
    unsigned a, b, c, d;
    return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
}
static bool runs_here() {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_half_floats();
}

static void multiply_any(const MatmulArgs& p, const Tile& tile) {
    p.prepared ? multiply_short_vectors(p, tile) : multiply(p, tile);
}

constexpr Kernels isa() {
    Kernels made = table("avx2");
    made.widest_prepared = INT_MAX;  // memory is not the bottleneck
    made.multiply = multiply_any, made.prepared_bytes = short_vectors_bytes;
    made.prepared_tiles = prepare_tiles, made.prepare = prepare_short_vectors;
    made.unpack_blocks = unpack_all_blocks, made.interleave_blocks = interleave_blocks;
    return made;
}

extern const Kernels kernels;
const Kernels kernels = isa();

}  // namespace avx2
#endif
