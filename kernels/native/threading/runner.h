// A thread that runs steps while its caller reads their results.
#pragma once
#include <cstdint>
#include <functional>

class Runner {
public:
    struct Run {
        int steps;
        int32_t* control;  // see types.h
        std::function<void(int taken)> step;
    };

    Runner() = default;
    ~Runner();
    Runner(const Runner&) = delete;
    Runner& operator=(const Runner&) = delete;

    // Only after the last run is finished. Throws if the system has no memory or no thread left.
    void begin(Run run);
    // Returns when `steps` steps are done; runs those itself that the thread has left undone.
    void await(int steps);
    // Like `await`, but wakes up less often; returns the number of steps that are done.
    int gather(int steps);
    // Lets no further step begin, and waits for the current one.
    void finish();

    struct State;

private:
    bool has_thread() const;
    void run_undone(int steps);

    State* state_ = nullptr;
};
