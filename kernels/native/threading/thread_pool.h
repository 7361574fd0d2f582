// A thread pool: a leader and its helpers.
//
// The leader runs sequential code. It publishes the tiles of an operation and takes tiles itself. It waits for tiles
// that are taken, never for a helper that took none. A helper that is descheduled with a tile in hand is waited for
// once, then left out for a while (`StragglerPolicy`).
#pragma once
#include <algorithm>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "threading/prefetch.h"

// When the pool leaves a helper out, in nanoseconds of any clock.
//
// A helper that is descheduled within a tile delays all others, for a tenth of a second on a busy machine. It is left
// out for twice as long as it was waited for, so an outnumbered pool spends at most a third of its time waiting.
class StragglerPolicy {
public:
    // How long the leader waits for tiles of helpers before one is late; its own tiles took `tile` each on average.
    static int64_t allowance(int64_t tile) { return MIN + 2 * tile; }

    bool is_out(int64_t now) const { return now < back_; }
    // The helper is late, and out until the length of the wait is known.
    void begin() { back_ = LATE; }
    bool is_late() const { return back_ == LATE; }
    void end(int64_t from, int64_t to) { back_ = to + std::min(TIMES * (to - from), MAX); }

private:
    static constexpr int64_t LATE = std::numeric_limits<int64_t>::max();
    static constexpr int64_t MIN = 200'000;  // shorter waits leave no helper out
    static constexpr int64_t TIMES = 2;
    static constexpr int64_t MAX = 10'000'000'000;  // a process that was stopped for an hour soon recovers

    int64_t back_ = std::numeric_limits<int64_t>::min();
};

class ThreadPool {
public:
    using Clock = int64_t (*)();  // nanoseconds
    static int64_t steady_clock();

    explicit ThreadPool(int size, Clock clock = steady_clock) : size_(size), clock_(clock) {}
    ~ThreadPool();
    ThreadPool(const ThreadPool&) = delete;
    ThreadPool& operator=(const ThreadPool&) = delete;

    int size() const { return size_; }
    // How many helpers are left out now.
    int num_out() const;

    // Calls body(worker, tile) for every tile in [0, count) once, on any worker in [0, size), and returns when all are
    // done. Only one thread at a time may call it.
    template <class Body> void parallel_for(int count, Body&& body) {
        if (size_ == 1 || count <= 1) {
            for (int tile = 0; tile < count; tile++) body(0, tile);
            return;
        }
        using Plain = std::remove_reference_t<Body>;
        const auto call = [](void* given, int worker, int tile) { (*static_cast<Plain*>(given))(worker, tile); };
        run_parallel(count, {call, &body});
    }

    // What the job after the next reads first.
    void expect(const PrefetchRange& prefetch) { prefetch_ = prefetch; }

    struct Job {
        void (*call)(void* body, int worker, int tile);
        void* body;
    };
    struct State;

private:
    void run_parallel(int count, Job job);
    State& state();

    const int size_;
    const Clock clock_;
    State* state_ = nullptr;
    PrefetchRange prefetch_;
};
