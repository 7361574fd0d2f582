// Who does which pieces of a job.
//
// Every worker has a share, the same at every step, so that small weights stay in its core's cache. It takes the pieces
// of its own one by one and then those that are left of the others'.
#pragma once
#include <atomic>
#include <cstdint>

// A job's number and how many pieces it has, in one word: what helpers look at while they wait.
struct Notice {
    uint32_t epoch;
    int tiles;

    static Notice of(uint64_t word) { return {uint32_t(word >> 32), int(word & 0xFFFF)}; }
    uint64_t word() const { return uint64_t(epoch) << 32 | uint64_t(tiles); }
};
constexpr int MAX_TILES = 0xFFFF;

// The first piece of a worker's share, and behind the last one that of the next worker. The leader's share has one at
// least, and no smaller share than anybody's.
inline int first_tile(int worker, int num_threads, int tiles) {
    return int((int64_t(tiles) * worker + num_threads - 1) / num_threads);
}

// What is left of a share, the pieces [next, end) of the job that `epoch` names, in one word, so that taking a piece
// and finding out whether the job is still the same are one compare-and-swap. Until somebody takes the first, the word
// is that of an earlier job: the leader need not write it, and it stays in the cache of the core that uses it.
class WorkQueue {
public:
    static constexpr int NOTHING = -1;

    // Takes a piece, of the share of this `worker`; NOTHING if none is left. A helper may be late, and the job over;
    // the leader knows that any other job than this one is an earlier one.
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

    // Takes the first piece of the leader's share, before anybody else knows of the job.
    void begin(Notice job, int num_threads) {
        word_.store(word(job, first_tile(1, num_threads, job.tiles), 1), std::memory_order_relaxed);
    }

    // For a worker that waits: brings the word back, if others have looked whether anything is left.
    void keep_cached() const { __builtin_prefetch(&word_, 1); }

private:
    static uint64_t word(Notice job, int end, int next) {
        return uint64_t(job.epoch) << 32 | uint64_t(end) << 16 | uint64_t(next);
    }

    std::atomic<uint64_t> word_{0};
};
