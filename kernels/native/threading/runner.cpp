#include "threading/runner.h"

#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>

namespace {

using Clock = std::chrono::steady_clock;

// Whoever has read all that is done comes back after so long, or when the next step is done: to wake up for each of
// many short steps, with all caches cold, would cost more than half of what a step does. Shorter than anybody sees.
constexpr auto GATHER_INTERVAL = std::chrono::milliseconds(4);
// Whoever gathers comes back when this part of a run is left too: what the next run waits for is then soon read.
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
                // The reader takes the step that has failed once more, and hears of it.
            }
            lock.lock();
            idle = true;
            progress.notify_one();
        }
    }

    void run_steps() {
        for (int taken = 0; taken < run.steps; taken++) {
            __atomic_store_n(run.control + 1, taken + 1, __ATOMIC_SEQ_CST);  // whoever ends the run then looks at this
            if (__atomic_load_n(run.control, __ATOMIC_SEQ_CST)) return;
            run.step(taken);
            done.store(taken + 1);
            const int wanted = awaited.load();
            if (wanted == 0 || wanted > taken + 1) continue;
            std::lock_guard<std::mutex> lock(mutex);  // the reader is asleep then, not on its way there
            progress.notify_one();
        }
    }

    const pid_t process = getpid();
    std::thread thread;
    Run run;
    std::mutex mutex;
    std::condition_variable given, progress;
    bool idle = true, stopping = false;  // under the mutex
    Clock::time_point next_wakeup;        // of a reader who gathers; his own
    std::atomic<int> done{0}, awaited{0};
};

// In a process that was forked the thread is not there, and what it held is held for ever.
bool Runner::has_thread() const { return state_ && state_->process == getpid(); }

void Runner::begin(Run run) {
    if (!has_thread()) {
        auto made = std::make_unique<State>();
        sigset_t all, before;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before);  // signals are the caller's business
        try {
            made->thread = std::thread([state = made.get()] { state->thread_main(); });
        } catch (...) {
            pthread_sigmask(SIG_SETMASK, &before, nullptr);
            throw;
        }
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
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
        state.awaited.store(steps);  // before the look at `done`; the thread writes that before it looks here
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
