// A thread that takes the steps of a run while its caller reads what they have brought.
#pragma once
#include <cstdint>
#include <functional>

class Runner {
public:
    struct Run {
        int steps;
        int32_t* control;  // see abi.h
        std::function<void(int taken)> step;
    };

    Runner() = default;
    ~Runner();
    Runner(const Runner&) = delete;
    Runner& operator=(const Runner&) = delete;

    // Only when the last run is finished. Throws where the system has no memory or no thread to give.
    void begin(Run run);
    // Returns when `steps` steps are done; those that the thread has left undone are taken here.
    void await(int steps);
    // The same for a reader who takes all that are done, and comes back when some more are: how many those are.
    int gather(int steps);
    // Lets no further step begin, and waits for the one that is under way.
    void finish();

    struct State;

private:
    bool has_thread() const;
    void run_undone(int steps);

    State* state_ = nullptr;
};
