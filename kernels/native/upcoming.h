// Memory that a later job begins with, for workers that wait meanwhile to ask for it.
//
// The one idea: a core that waits for another one has nothing to do, and a job's first weights come late, since no
// hardware knows of them before. So they are brought into the second cache then.
#pragma once
#include <algorithm>
#include <cstdint>

// Pieces lie `piece_bytes` apart from `from` on; those of a second band, if there is one, `band_bytes` behind.
struct Upcoming {
    const char* from = nullptr;
    int64_t band_bytes = 0, piece_bytes = 0;
    int pieces = 0;
};

// One worker's part of it, a few lines at a time, so that it sees a new job in time.
class Fetching {
public:
    Fetching(const Upcoming& upcoming, int first, int stop)
        : next_(upcoming.from + first * upcoming.piece_bytes),
          left_(upcoming.from ? std::min((stop - first) * upcoming.piece_bytes, MOST_BYTES) : 0),
          band_bytes_(upcoming.band_bytes) {}

    void some() {
        for (int line = 0; line < LINES_AT_ONCE && left_ > 0; line++, next_ += LINE, left_ -= LINE) {
            __builtin_prefetch(next_, 0, 2);
            if (band_bytes_) __builtin_prefetch(next_ + band_bytes_, 0, 2);
        }
    }

private:
    static constexpr int LINES_AT_ONCE = 8, LINE = 64;
    static constexpr int64_t MOST_BYTES = 64 * 1024;

    const char* next_;
    int64_t left_;
    const int64_t band_bytes_;
};
