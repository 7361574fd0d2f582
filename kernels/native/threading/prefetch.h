// Memory that a later job begins with, for workers that wait meanwhile to ask for it.
//
// The one idea: a core that waits for another one has nothing to do, and a job's first weights come late, since no
// hardware knows of them before. So they are brought into the second cache then.
#pragma once
#include <algorithm>
#include <cstdint>

// So many units from `from` on, in pieces of as many of them as can be; those of a second band, if there is one, lie
// `band_bytes` behind.
struct PrefetchRange {
    const char* from = nullptr;
    int64_t band_bytes = 0, unit_bytes = 0;
    int units = 0, tiles = 0;
};

// One worker's part of it, from its first piece to that of the next worker, a few lines at a time so that it sees a new
// job soon.
class Prefetcher {
public:
    Prefetcher(const PrefetchRange& prefetch, int first, int stop) : band_bytes_(prefetch.band_bytes) {
        if (!prefetch.from || prefetch.tiles < 1) return;  // one half may be of the job before
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

// How many bytes ahead of a product its weights are fetched into the second cache; 0 for none, nor entries of a text.
//
// On AMD's processors weights of 16 and 8 bits arrive much sooner if they are asked for so early in the second cache,
// and no sooner in the first, perhaps since few lines can be on their way to that. On Intel's steps became no shorter.
inline int64_t prefetch_distance() {
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_is("amd")) return 48 * 1024;
#endif
    return 0;
}
