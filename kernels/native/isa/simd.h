// What the instruction sets' files have in common: the words for inlining, unrolling and fetching, and the headers they
// need.
#pragma once
#include <climits>
#include <cmath>
#include <cstring>

#include "isa/kernels.h"

// A helper of a hot loop has to be inlined even where the compiler counts otherwise, or its vectors go through memory.
#define INLINE static inline __attribute__((always_inline))
#define INLINE_LAMBDA __attribute__((always_inline))
#if defined(__clang__)
#define UNROLL _Pragma("clang loop unroll(full)")
#else
#define UNROLL _Pragma("GCC unroll 16")
#endif

constexpr int CACHE_LINE = 64;

// Into the second cache, and no nearer.
INLINE void fetch(const void* line) { __builtin_prefetch(line, 0, 2); }
