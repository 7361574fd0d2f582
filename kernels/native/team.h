// A leader and its helpers.
//
// The leader runs plain sequential code. Where an operation falls into pieces it offers them to the helpers, and takes
// them itself too. It waits for pieces that somebody has taken, never for a helper that took none: one that the system
// has put aside costs its help and nothing else, so more threads than cores are slow but never stand still.
#pragma once
#include <cstdint>
#include <type_traits>

class Team {
public:
    explicit Team(int size) : size_(size) {}
    ~Team();
    Team(const Team&) = delete;
    Team& operator=(const Team&) = delete;

    int size() const { return size_; }

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

    struct Job {
        void (*call)(void* body, int worker, int piece);
        void* body;
    };
    struct State;

private:
    void share(int count, Job job);
    State& helpers();

    const int size_;
    State* state_ = nullptr;
};
