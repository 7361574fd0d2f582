#include "team.h"

#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

namespace {

using Clock = std::chrono::steady_clock;

// Longer than the pauses within a step, shorter than anybody notices in an idle process.
constexpr auto SPIN = std::chrono::microseconds(100);
constexpr int PAUSES_A_LOOK = 32;
constexpr int MOST_PIECES = 0xFFFF;

void pause_briefly() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// What one worker has to do first: the pieces [next, end) of the job that `epoch` names, in one word, so that taking a
// piece and finding out whether the job is still the same are one compare-and-swap.
struct Ticket {
    uint32_t epoch, end, next;

    static Ticket of(uint64_t word) {
        return {uint32_t(word >> 32), uint32_t(word >> 16 & 0xFFFF), uint32_t(word & 0xFFFF)};
    }
    uint64_t word() const { return uint64_t(epoch) << 32 | uint64_t(end) << 16 | next; }
};

struct alignas(64) Share {
    std::atomic<uint64_t> ticket{0};
};

}  // namespace

struct Team::State {
    explicit State(int size) : shares(size), process(getpid()) {}

    // Takes pieces of the job `epoch` and carries them out; how many. A worker begins with its own share, which is the
    // same at every step, so that small weights stay in its core's cache; then it helps the others.
    int take(int worker, uint32_t epoch) {
        const int size = int(shares.size());
        int taken = 0;
        for (int turn = 0; turn < size; turn++) {
            auto& shared = shares[(worker + turn) % size].ticket;
            uint64_t seen = shared.load(std::memory_order_relaxed);
            for (;;) {
                Ticket ticket = Ticket::of(seen);
                if (ticket.epoch != epoch || ticket.next >= ticket.end) break;
                const uint64_t rest = Ticket{epoch, ticket.end, ticket.next + 1}.word();
                if (!shared.compare_exchange_weak(seen, rest, std::memory_order_acquire, std::memory_order_relaxed))
                    continue;
                // The leader waits for this piece now, so the job cannot change under us.
                const Job* now = job.load(std::memory_order_relaxed);
                now->call(now->body, worker, first_piece + int(ticket.next));
                taken++;
                seen = shared.load(std::memory_order_relaxed);
            }
        }
        return taken;
    }

    void help(int worker) {
        for (uint32_t seen = 0;;) {
            seen = wait_for_other_than(seen);
            if (stops.load(std::memory_order_relaxed)) return;
            if (int taken = take(worker, seen)) finished.fetch_add(taken, std::memory_order_release);
        }
    }

    uint32_t wait_for_other_than(uint32_t seen) {
        const auto end = Clock::now() + SPIN;
        do {
            for (int i = 0; i < PAUSES_A_LOOK; i++) {
                uint32_t now = epoch.load(std::memory_order_acquire);
                if (now != seen) return now;
                pause_briefly();
            }
        } while (Clock::now() < end);
        std::unique_lock<std::mutex> lock(mutex);
        asleep.fetch_add(1);  // before the look at the epoch; the leader writes the epoch before it looks here
        wake.wait(lock, [&] { return epoch.load() != seen; });
        asleep.fetch_sub(1);
        return epoch.load(std::memory_order_acquire);
    }

    void announce(uint32_t next) {
        epoch.store(next);
        if (asleep.load() == 0) return;
        std::lock_guard<std::mutex> lock(mutex);
        wake.notify_all();
    }

    std::vector<Share> shares;
    const pid_t process;
    std::vector<std::thread> threads;
    int first_piece = 0;  // written before the tickets, like `job`
    std::atomic<const Job*> job{nullptr};
    std::atomic<bool> stops{false};
    alignas(64) std::atomic<uint32_t> epoch{0};
    alignas(64) std::atomic<int> finished{0};
    alignas(64) std::atomic<int> asleep{0};
    std::mutex mutex;
    std::condition_variable wake;
};

// Helpers are made when they are first needed, and again in a process that was forked: there are none there. What the
// parent's were at is unknown then, so the old state is left behind as it is.
Team::State& Team::helpers() {
    if (state_ && state_->process == getpid()) return *state_;
    state_ = new State(size_);
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);  // signals are the caller's business
    try {
        for (int worker = 1; worker < size_; worker++)
            state_->threads.emplace_back([state = state_, worker] { state->help(worker); });
    } catch (const std::system_error&) {
        // The system gives no more threads: fewer help, and the leader does the rest.
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    return *state_;
}

void Team::share(int count, Job job) {
    State& state = helpers();
    for (int first = 0; first < count; first += MOST_PIECES) {
        const int pieces = std::min(count - first, MOST_PIECES);
        const uint32_t epoch = state.epoch.load(std::memory_order_relaxed) + 1;
        state.job.store(&job, std::memory_order_relaxed);
        state.first_piece = first;
        for (int worker = 0; worker < size_; worker++) {
            auto bound = [&](int nth) { return uint32_t(int64_t(pieces) * nth / size_); };
            Ticket ticket{epoch, bound(worker + 1), bound(worker)};
            state.shares[worker].ticket.store(ticket.word(), std::memory_order_release);
        }
        state.announce(epoch);
        const int others = pieces - state.take(0, epoch);
        for (int spins = 0; state.finished.load(std::memory_order_acquire) != others; spins++) {
            if (spins < 1000) pause_briefly();
            else std::this_thread::yield();  // whoever has the last piece may need this core
        }
        state.finished.store(0, std::memory_order_relaxed);
    }
}

Team::~Team() {
    if (!state_ || state_->process != getpid()) return;
    state_->stops.store(true);
    state_->announce(state_->epoch.load() + 1);
    for (auto& thread : state_->threads) thread.join();
    delete state_;
}
