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
class Patience {
public:
    // How long the leader waits for pieces that others have taken, whose own took `piece` each on average, before
    // whoever still has one is late.
    static int64_t allowance(int64_t piece) { return LEAST + 2 * piece; }

    bool is_out(int64_t now) const { return now < back_; }
    // It is late, and left out until it is known for how long it was waited for.
    void begin() { back_ = LATE; }
    bool is_late() const { return back_ == LATE; }
    void end(int64_t from, int64_t to) { back_ = to + std::min(TIMES * (to - from), MOST); }

private:
    static constexpr int64_t LATE = std::numeric_limits<int64_t>::max();
    static constexpr int64_t LEAST = 200'000;        // nobody is put aside for less
    static constexpr int64_t TIMES = 2;
    static constexpr int64_t MOST = 10'000'000'000;  // a process that was stopped for an hour is soon itself again

    int64_t back_ = std::numeric_limits<int64_t>::min();
};

class Team {
public:
    using Clock = int64_t (*)();  // nanoseconds
    static int64_t steady_clock();

    explicit Team(int size, Clock clock = steady_clock) : size_(size), clock_(clock) {}
    ~Team();
    Team(const Team&) = delete;
    Team& operator=(const Team&) = delete;

    int size() const { return size_; }
    // How many helpers are left out now.
    int num_out() const;

    // Calls body(worker, piece) for every piece in [0, count) once, on any worker in [0, size), and returns when all
    // are done. Only one thread at a time may lead.
    template <class Body> void each(int count, Body&& body) {
        if (size_ == 1 || count <= 1) {
            for (int piece = 0; piece < count; piece++) body(0, piece);
            return;
        }
        using Plain = std::remove_reference_t<Body>;
        share(count, {[](void* given, int worker, int piece) { (*static_cast<Plain*>(given))(worker, piece); }, &body});
    }

    // What the job after the next begins with.
    void expect(const Upcoming& upcoming) { upcoming_ = upcoming; }

    struct Job {
        void (*call)(void* body, int worker, int piece);
        void* body;
    };
    struct State;

private:
    void share(int count, Job job);
    State& state();

    const int size_;
    const Clock clock_;
    State* state_ = nullptr;
    Upcoming upcoming_;
};
