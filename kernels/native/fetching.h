// How many bytes ahead of a product its weights are fetched into the second cache; 0 for none, nor entries of a text.
//
// AMD's processors have few places for lines on their way to the first cache and more for the second: weights of 16 and
// 8 bits arrive much sooner where they are asked for there in time. On Intel's that made steps no shorter, or longer.
#pragma once
#include <cstdint>

inline int64_t bytes_fetched_ahead() {
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_is("amd")) return 48 * 1024;
#endif
    return 0;
}
