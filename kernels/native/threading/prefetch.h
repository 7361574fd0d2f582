// L2 prefetch of the next job's first weights, by threads that wait.
//
// A waiting core has nothing else to do, and no hardware prefetcher can predict these addresses.
#pragma once
#include <algorithm>
#include <cstdint>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

// `units` units from `from` on, spread over `tiles` tiles; a second band, if any, is `band_bytes` behind.
struct PrefetchRange {
    const char* from = nullptr;
    int64_t band_bytes = 0, unit_bytes = 0;
    int units = 0, tiles = 0;
};

// One thread's part of it, a few lines at a time so that the thread sees a new job soon.
class Prefetcher {
public:
    Prefetcher(const PrefetchRange& prefetch, int first, int stop) : band_bytes_(prefetch.band_bytes) {
        if (!prefetch.from || prefetch.tiles < 1) return;  // some fields may be of the job before
        const auto place = [&](int tile) {
            return int64_t(prefetch.units) * tile / prefetch.tiles * prefetch.unit_bytes;
        };
        next_ = prefetch.from + place(first), left_ = std::min(place(stop) - place(first), MAX_BYTES);
    }

    void step() {
        for (int line = 0; line < LINES_AT_ONCE && left_ > 0; line++, next_ += LINE, left_ -= LINE) {
            __builtin_prefetch(next_, 0, 2);
            if (band_bytes_) __builtin_prefetch(next_ + band_bytes_, 0, 2);
        }
    }

private:
    static constexpr int LINES_AT_ONCE = 8, LINE = 64;
    static constexpr int64_t MAX_BYTES = 64 * 1024;

    const char* next_ = nullptr;
    int64_t left_ = 0;
    const int64_t band_bytes_;
};

// L2 prefetch distance in bytes; 0 disables prefetch (weights and KV).
//
// On AMD processors 16-bit and 8-bit weights arrive much sooner if L2 prefetches them this far ahead. L1 prefetch does
// not help, perhaps because few lines can be in flight there. Intel showed no gain.
inline int64_t prefetch_distance() {
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_is("amd")) return 48 * 1024;
#endif
    return 0;
}

// Whether the weights that one or two vectors meet arrive sooner as one stream than as several.
//
// On Zen 5 one row of Coder-1.5B, Q4_K_M, then takes 0.86 of the time. Several were tuned on Zen 4.
inline bool prefers_one_stream() {
#if defined(__x86_64__)
    constexpr unsigned ZEN_5 = 0x1a;
    unsigned signature = 0, b, c, d;
    __builtin_cpu_init();
    if (!__builtin_cpu_is("amd") || !__get_cpuid(1, &signature, &b, &c, &d)) return false;
    return (signature >> 8 & 0xf) + (signature >> 20 & 0xff) >= ZEN_5;  // family and extended family
#else
    return false;
#endif
}
