// AVX-512: sixteen floats a register, thirty-two registers. Compiled with these flags, called only on machines that
// have them.
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

// Adding the halves of a register first leaves half the width: a quarter less work where the processor executes a
// register in two halves (Zen 4).
INLINE Summed begun_sum(V values) {
    return _mm256_add_ps(_mm512_castps512_ps256(values), _mm512_extractf32x8_ps(values, 1));
}
INLINE V select(VI where, V yes, V no) { return where ? yes : no; }
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
INLINE V widen_float16(const char* from) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)from)); }
INLINE V widen_e4m3(const char* from) {
    const __m256i halves = _mm256_slli_epi16(_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)from)), 7);
    return _mm512_cvtph_ps(_mm256_and_si256(halves, _mm256_set1_epi16(short(0xbfff))));  // drop the sign's copy
}
#define D3_TABLE_OF_16
INLINE VI widen_words(uint32_t __attribute__((vector_size(16))) words) {
    return (VI)_mm512_cvtepu8_epi32((__m128i)words);
}
INLINE V look_up(V table, VI places) { return _mm512_permutexvar_ps((__m512i)places, table); }
INLINE VI widen_uint8(const char* from) { return (VI)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)from)); }

// A register is the lookup table for the sixteen values of four bits.
struct Int4Values {
    V table;
    Int4Values() = default;
    explicit INLINE_LAMBDA Int4Values(float scale)
        : table(V{-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7} * all(scale)) {}
    // uses the low four bits
    INLINE_LAMBDA V low(VI bytes) const { return _mm512_permutexvar_ps((__m512i)bytes, table); }
    INLINE_LAMBDA V high(VI bytes) const { return _mm512_permutexvar_ps(_mm512_srli_epi32((__m512i)bytes, 4), table); }
};

// By code: the exponent bits of the byte with the sign, and of the byte with the mantissa.
struct Bf12Exponents {
    __m512i with_sign, with_mantissa;
    explicit INLINE_LAMBDA Bf12Exponents(int before) {
        const __m128i codes = _mm_setr_epi8(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
        const __m128i all = _mm_maskz_add_epi8(0xfffe, codes, _mm_set1_epi8(char(before)));
        with_sign = _mm512_broadcast_i32x4(_mm_and_si128(_mm_srli_epi16(all, 1), _mm_set1_epi8(0x7f)));
        with_mantissa = _mm512_broadcast_i32x4(_mm_and_si128(_mm_slli_epi16(all, 7), _mm_set1_epi8(char(0x80))));
    }
};
INLINE void bf12_words(const char* group, const Bf12Exponents& exponents, VI (&words)[2]) {
    const __m512i low_bits = _mm512_set1_epi8(0x7f);
    const __m512i of_halves = _mm512_inserti64x4(_mm512_setzero_si512(), _mm256_set1_epi16(4), 1);
    const __m512i bytes = _mm512_loadu_si512(group);
    const __m512i twice = _mm512_broadcast_i64x4(_mm256_loadu_si256((const __m256i*)(group + BF12_GROUP)));
    const __m512i codes = _mm512_and_si512(_mm512_srlv_epi16(twice, of_halves), _mm512_set1_epi8(15));
    constexpr int CHOOSE = 0xca;  // bits of the second operand where the first is set, or of the third
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

#include "matmul/prepared.inc"
#include "matmul/int_dot.inc"
#include "matmul/int_dot_interleaved.inc"

// Of interleaved blocks.
INLINE Words or_masked(Words a, Words b, Words mask) {
    constexpr int OR_AND = 0xf8;  // the first, or the second and the third
    return (Words)_mm512_ternarylogic_epi32((__m512i)a, (__m512i)b, (__m512i)mask, OR_AND);
}
INLINE Words look_up_bytes(__m128i table, Words places) {
    return (Words)_mm512_shuffle_epi8(_mm512_broadcast_i32x4(table), (__m512i)places);
}
INLINE VI larger(VI a, VI b) { return (VI)_mm512_max_epi32((__m512i)a, (__m512i)b); }
INLINE int32_t largest_lane(VI values) { return _mm512_reduce_max_epi32((__m512i)values); }
INLINE int32_t sum_of_lanes(VI values) { return _mm512_reduce_add_epi32((__m512i)values); }
INLINE VI whole_numbers(V values) { return (VI)_mm512_cvtps_epi32(values); }
INLINE void store_bytes(void* to, VI values) { _mm_storeu_si128((__m128i*)to, _mm512_cvtepi32_epi8((__m512i)values)); }

// Products of unsigned and signed bytes are added in 32 bits.
constexpr bool MULTIPLIES_SIGNED = false;
constexpr int products_together(int, int fours) { return fours; }
INLINE VI begun_products(VI found) { return found; }
template <int BITS> INLINE void add_products(VI& sum, Words codes, VI same) {
    __m512i found = (__m512i)sum;
    add_products(found, (__m512i)codes, (__m512i)same);
    sum = (VI)found;
}
INLINE VI with_products(VI, VI products) { return products; }

#include "formats/interleaved_blocks.inc"
#include "matmul/int_dot_blocks.inc"

// VNNI: integer dot products for int4 and for interleaved int8, which need no more instructions than floats for any
// number of vectors. Plain int8 stays with floats: with few vectors transposing its rows costs more than it saves.

static bool runs_here_vnni() { return runs_here() && __builtin_cpu_supports("avx512vnni"); }

static int64_t vnni_bytes(D3Kind kind, int columns, int rows) {
    if (is_in_interleaved_blocks(kind)) return short_vectors_bytes(kind, columns, rows);
    return kind == D3_INT4 || is_interleaved(kind) ? (rows + SIDE - 1) / SIDE * int_dot_bytes(columns, SIDE) : 0;
}
static void prepare_vnni(const MatmulArgs& p, int tile) {
    if (is_in_interleaved_blocks(p.kind)) return prepare_short_vectors(p, tile);
    if (p.at_once == 1) return prepare_int_dot_single(p);
    prepare_int_dot<true>(p, tile / int_dot_blocks(p.columns) * SIDE, tile % int_dot_blocks(p.columns));
}

// Pairs of bfloat16 numbers: an instruction multiplies and adds twice as many as of floats.
static bool adds_bfloat16_pairs() {
    static const bool is_there = __builtin_cpu_supports("avx512bf16");
    return is_there;
}
struct Bfloat16Dots : Bfloat16Pairs {
    static INLINE_LAMBDA V add(V weights, V x, V sum) {
        asm("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(weights), "v"(x));
        return sum;
    }
};
static void multiply_panel_vnni(const MatmulArgs& p, const float* panel, int start, int stop, const float* strip,
                                int rows, float* out, int64_t ldo) {
    if (p.kind == D3_BFLOAT16_PAIRS && adds_bfloat16_pairs())
        return multiply_panel_as<Bfloat16Dots>(p, panel, start, stop, strip, rows, out, ldo);
    multiply_panel(p, panel, start, stop, strip, rows, out, ldo);
}

static void multiply_vnni(const MatmulArgs& p, const Tile& tile) {
    if (p.kind == D3_BFLOAT16_PAIRS && adds_bfloat16_pairs()) return multiply_as<Float<Bfloat16Dots>>(p, tile);
    if (!p.prepared) return multiply(p, tile);
    if (is_in_interleaved_blocks(p.kind)) return multiply_short_vectors(p, tile);
    switch (p.kind) {
        case D3_INT4X16: return multiply_interleaved<Int4Interleaved>(p, tile);
        case D3_INT8X16: return multiply_interleaved<Int8Interleaved>(p, tile);
        default: p.at_once == 1 ? multiply_as<SingleInt4>(p, tile) : multiply_transposed(p, tile);
    }
}

constexpr Kernels isa_vnni() {
    Kernels made = table("avx512-vnni");
    made.widest_prepared = INT_MAX;  // memory is not the bottleneck
    made.runs_here = runs_here_vnni, made.multiply = multiply_vnni, made.reads_interleaved = true;
    made.prepared_bytes = vnni_bytes, made.prepared_tiles = prepare_tiles;
    made.prepare = prepare_vnni;
    made.multiply_panel = multiply_panel_vnni, made.adds_bfloat16_pairs = adds_bfloat16_pairs;
    made.unpack_blocks = unpack_all_blocks, made.interleave_blocks = interleave_blocks;
    return made;
}

extern const Kernels vnni;
const Kernels vnni = isa_vnni();

#if defined(D3_AMX)
#include "matmul/amx.inc"

// AMX: int8, int4 and bfloat16. A single vector with int4 uses VNNI, because AMX would have to expand nibbles to bytes
// first.

static bool runs_here_amx() { return runs_here() && has_amx(); }

static bool is_single_int4(const MatmulArgs& p) { return p.kind == D3_INT4 && p.at_once == 1; }

static int64_t amx_bytes(D3Kind kind, int columns, int rows) {
    const int64_t groups = (rows + SIDE - 1) / SIDE;
    if (kind == D3_BFLOAT16) return groups * bfloat16_bytes(columns, SIDE);
    return kind == D3_INT8 || kind == D3_INT4 ? groups * int_dot_bytes(columns, SIDE) : 0;
}
static int amx_blocks(const MatmulArgs& p) {
    return p.kind == D3_BFLOAT16 ? Bfloat16Amx::blocks(p) : int_dot_blocks(p.columns);
}
static int amx_prepare_tiles(const MatmulArgs& p) {
    return is_single_int4(p) ? 1 : (p.at_once + SIDE - 1) / SIDE * amx_blocks(p);
}
static void prepare_amx(const MatmulArgs& p, int tile) {
    if (is_single_int4(p)) return prepare_int_dot_single(p);
    const int first = tile / amx_blocks(p) * SIDE, block = tile % amx_blocks(p);
    p.kind == D3_BFLOAT16 ? prepare_bfloat16(p, first, block) : prepare_int_dot<false>(p, first, block);
}
static void multiply_with_amx(const MatmulArgs& p, const Tile& tile) {
    if (!p.prepared) return multiply(p, tile);
    if (is_single_int4(p)) return multiply_as<SingleInt4>(p, tile);
    switch (p.kind) {
        case D3_BFLOAT16: return multiply_amx<Bfloat16Amx>(p, tile);
        case D3_INT8: return multiply_amx<Int8Amx>(p, tile);
        default: return multiply_amx<Int4Amx>(p, tile);
    }
}

constexpr Kernels isa_amx() {
    Kernels made = table("amx");
    made.tile_bytes = 512 * 1024;  // so that strided rows are long streams
    made.widest_prepared = SIDE, made.max_bf12 = 0;
    made.runs_here = runs_here_amx, made.multiply = multiply_with_amx;
    made.prepared_bytes = amx_bytes, made.prepared_tiles = amx_prepare_tiles, made.prepare = prepare_amx;
    return made;
}

extern const Kernels amx;
const Kernels amx = isa_amx();

#endif

extern const Kernels kernels;
const Kernels kernels = table("avx512");

}  // namespace avx512
#endif
