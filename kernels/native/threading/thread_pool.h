// A leader and its helpers.
//
// The leader runs plain sequential code. Where an operation falls into pieces it offers them to the helpers, and takes
// them itself too. It waits for pieces that somebody has taken, never for a helper that took none. One that the system
// has put aside with a piece in its hands is waited for, and then left out for a while (`patience.h`): beside busy
// neighbours a team becomes its leader alone.
#pragma once
#include <cstdint>
#include <type_traits>

#include "threading/prefetch.h"

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
