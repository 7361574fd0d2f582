// Macros and headers that all instruction sets share.
#pragma once
#include <climits>
#include <cmath>
#include <cstring>

#include "isa/kernels.h"

// Helpers of hot loops must be inlined, or their vectors go through memory.
#define INLINE static inline __attribute__((always_inline))
#define INLINE_LAMBDA __attribute__((always_inline))
#if defined(__clang__)
#define UNROLL _Pragma("clang loop unroll(full)")
#else
#define UNROLL _Pragma("GCC unroll 16")
#endif

constexpr int CACHE_LINE = 64;

// Into L2 only.
INLINE void fetch(const void* line) { __builtin_prefetch(line, 0, 2); }
