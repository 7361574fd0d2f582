#include "threading/runner.h"

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>

#include "threading/process.h"

namespace {

using Clock = std::chrono::steady_clock;

// A reader that has read all finished steps sleeps this long at most. Waking up for each of many short steps, with cold
// caches, would cost more than half a step. Too short to be seen in a stream.
constexpr auto GATHER_INTERVAL = std::chrono::milliseconds(4);
// A gathering reader also wakes up when this fraction of a run is left, so that the next run can begin soon.
constexpr int LAST_FRACTION = 8;

}  // namespace

struct Runner::State {
    ~State() {
        {
            std::lock_guard<std::mutex> lock(mutex);
            stopping = true;
        }
        given.notify_one();
        if (thread.joinable()) thread.join();
    }

    void thread_main() {
        std::unique_lock<std::mutex> lock(mutex);
        for (;;) {
            given.wait(lock, [&] { return stopping || !idle; });
            if (stopping) return;
            lock.unlock();
            try {
                run_steps();
            } catch (...) {
                // The reader repeats the step that failed and gets its error.
            }
            lock.lock();
            idle = true;
            progress.notify_one();
        }
    }

    void run_steps() {
        for (int taken = 0; taken < run.steps; taken++) {
            // before the stop flag is read: a thread that sets it then reads this
            __atomic_store_n(run.control + 1, taken + 1, __ATOMIC_SEQ_CST);
            if (__atomic_load_n(run.control, __ATOMIC_SEQ_CST)) return;
            run.step(taken);
            done.store(taken + 1);
            const int wanted = awaited.load();
            if (wanted == 0 || wanted > taken + 1) continue;
            std::lock_guard<std::mutex> lock(mutex);  // then the reader sleeps, and is not about to
            progress.notify_one();
        }
    }

    const int made_after = forks.load();  // the number of forks
    std::thread thread;
    Run run;
    std::mutex mutex;
    std::condition_variable given, progress;
    bool idle = true, stopping = false;  // under the mutex
    Clock::time_point next_wakeup;       // of a gathering reader
    std::atomic<int> done{0}, awaited{0};
};

bool Runner::has_thread() const { return state_ && state_->made_after == forks.load(); }

void Runner::begin(Run run) {
    if (!has_thread()) {
        auto made = std::make_unique<State>();
        const SignalsBlocked blocked;
        made->thread = std::thread([state = made.get()] { state->thread_main(); });
        state_ = made.release();
    }
    std::lock_guard<std::mutex> lock(state_->mutex);
    state_->run = std::move(run);
    state_->done.store(0);
    state_->idle = false;
    state_->next_wakeup = Clock::now() + GATHER_INTERVAL;
    state_->given.notify_one();
}

void Runner::await(int steps) {
    State& state = *state_;
    if (has_thread() && state.done.load() < steps) {
        std::unique_lock<std::mutex> lock(state.mutex);
        state.progress.wait_for(lock, GATHER_INTERVAL, [&] { return state.idle; });
        state.awaited.store(steps);  // before it reads `done`, which the thread writes before it reads this
        state.progress.wait(lock, [&] { return state.idle || state.done.load() >= steps; });
        state.awaited.store(0);
    }
    run_undone(steps);
}

int Runner::gather(int steps) {
    State& state = *state_;
    if (has_thread()) {
        const int last_part = state.run.steps - state.run.steps / LAST_FRACTION;
        const int enough = steps <= last_part ? last_part : state.run.steps;
        std::unique_lock<std::mutex> lock(state.mutex);
        state.awaited.store(enough);
        state.progress.wait_until(lock, state.next_wakeup, [&] { return state.idle || state.done.load() >= enough; });
        state.awaited.store(steps);
        state.progress.wait(lock, [&] { return state.idle || state.done.load() >= steps; });
        state.awaited.store(0);
    }
    run_undone(steps);
    state.next_wakeup = Clock::now() + GATHER_INTERVAL;
    return state.done.load();
}

void Runner::run_undone(int steps) {
    State& state = *state_;
    for (int taken = state.done.load(); taken < steps; taken = state.done.load()) {
        state.run.step(taken);
        state.done.store(taken + 1);
    }
}

void Runner::finish() {
    if (!has_thread()) return;
    std::unique_lock<std::mutex> lock(state_->mutex);
    if (!state_->idle) __atomic_store_n(state_->run.control, 1, __ATOMIC_SEQ_CST);
    state_->progress.wait(lock, [&] { return state_->idle; });
}

Runner::~Runner() {
    if (!has_thread()) return;
    finish();
    delete state_;
}
