// A leader and its helpers.
//
// The leader runs plain sequential code. Where an operation falls into pieces it offers them to the helpers, and takes
// them itself too. It waits for pieces that somebody has taken, never for a helper that took none. One that the system
// has put aside with a piece in its hands is waited for, and then left out for a while (`patience.h`): beside busy
// neighbours a team becomes its leader alone.
#pragma once
#include <algorithm>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "threading/prefetch.h"

// When a team does without a helper: the rule alone, in nanoseconds of any clock.
//
// A helper that the system puts aside in the middle of a piece holds everybody up, beside busy neighbours for a tenth
// of a second. Whoever was waited for is left out for twice as long, so that a team which is outnumbered spends at most
// a third of its time on waiting: it takes one and a half times as long as its leader alone, whatever else there is.
class StragglerPolicy {
public:
    // How long the leader waits for pieces that others have taken, whose own took `piece` each on average, before
    // whoever still has one is late.
    static int64_t allowance(int64_t tile) { return MIN + 2 * tile; }

    bool is_out(int64_t now) const { return now < back_; }
    // It is late, and left out until it is known for how long it was waited for.
    void begin() { back_ = LATE; }
    bool is_late() const { return back_ == LATE; }
    void end(int64_t from, int64_t to) { back_ = to + std::min(TIMES * (to - from), MAX); }

private:
    static constexpr int64_t LATE = std::numeric_limits<int64_t>::max();
    static constexpr int64_t MIN = 200'000;        // nobody is put aside for less
    static constexpr int64_t TIMES = 2;
    static constexpr int64_t MAX = 10'000'000'000;  // a process that was stopped for an hour is soon itself again

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

    // Calls body(worker, piece) for every piece in [0, count) once, on any worker in [0, size), and returns when all
    // are done. Only one thread at a time may lead.
    template <class Body> void parallel_for(int count, Body&& body) {
        if (size_ == 1 || count <= 1) {
            for (int tile = 0; tile < count; tile++) body(0, tile);
            return;
        }
        using Plain = std::remove_reference_t<Body>;
        const auto call = [](void* given, int worker, int tile) { (*static_cast<Plain*>(given))(worker, tile); };
        run_parallel(count, {call, &body});
    }

    // What the job after the next begins with.
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
