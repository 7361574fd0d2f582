// Assigns tiles to threads.
//
// Each thread has a queue, the same at every step, so that small weights stay in its core's cache. It empties its own
// queue first and then steals from the others.
#pragma once
#include <atomic>
#include <cstdint>

// A job's number and its number of tiles in one word, which waiting helpers poll.
struct Notice {
    uint32_t epoch;
    int tiles;

    static Notice of(uint64_t word) { return {uint32_t(word >> 32), int(word & 0xFFFF)}; }
    uint64_t word() const { return uint64_t(epoch) << 32 | uint64_t(tiles); }
};
constexpr int MAX_TILES = 0xFFFF;

// The first tile of a thread's queue; it ends where the next thread's begins. The leader's queue is never empty, nor
// shorter than another.
inline int first_tile(int worker, int num_threads, int tiles) {
    return int((int64_t(tiles) * worker + num_threads - 1) / num_threads);
}

// The tiles [next, end) of job `epoch` that are left, in one word: taking a tile and checking the job are one
// compare-and-swap. Until its first tile is taken the word is an earlier job's. So the leader need not write it, and it
// stays in its core's cache.
class WorkQueue {
public:
    static constexpr int NOTHING = -1;

    // Takes a tile of the queue of `worker`; NOTHING if none is left. A late helper may see a newer job; the leader
    // knows that any other job is an older one.
    int take(Notice job, int worker, int num_threads, bool leads) {
        uint64_t seen = word_.load(std::memory_order_relaxed);
        for (;;) {
            uint32_t epoch = uint32_t(seen >> 32);
            int end = int(seen >> 16 & 0xFFFF), next = int(seen & 0xFFFF);
            if (epoch != job.epoch) {
                if (!leads && int32_t(epoch - job.epoch) > 0) return NOTHING;
                end = first_tile(worker + 1, num_threads, job.tiles), next = first_tile(worker, num_threads, job.tiles);
            }
            if (next >= end) return NOTHING;
            const uint64_t rest = word(job, end, next + 1);
            if (word_.compare_exchange_weak(seen, rest, std::memory_order_acq_rel, std::memory_order_relaxed))
                return next;
        }
    }

    // Takes the first tile of the leader's queue, before helpers see the job.
    void begin(Notice job, int num_threads) {
        word_.store(word(job, first_tile(1, num_threads, job.tiles), 1), std::memory_order_relaxed);
    }

    // For a waiting thread: brings the word back if others have read it.
    void keep_cached() const { __builtin_prefetch(&word_, 1); }

private:
    static uint64_t word(Notice job, int end, int next) {
        return uint64_t(job.epoch) << 32 | uint64_t(end) << 16 | uint64_t(next);
    }

    std::atomic<uint64_t> word_{0};
};
