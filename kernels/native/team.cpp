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

#include "patience.h"

namespace {

using std::chrono::nanoseconds;

// Longer than the pauses within a step, shorter than anybody notices in an idle process.
constexpr int64_t SPIN = 100'000;
// Whoever has a piece for longer may need this core to go on with it.
constexpr int64_t LEADER_SPIN = 50'000;
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

// What leader and helper know of each other; the leader's own is not used.
struct alignas(64) Helper {
    std::atomic<bool> works{false};   // it may have a piece
    std::atomic<bool> is_out{false};  // it takes none
    std::atomic<bool> asleep{false};
    std::mutex mutex;
    std::condition_variable wake;
    Patience patience;  // the leader's
};

}  // namespace

int64_t Team::steady_clock() { return nanoseconds(std::chrono::steady_clock::now().time_since_epoch()).count(); }

struct Team::State {
    explicit State(int size) : shares(size), helpers(size), process(getpid()) {}

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

    // -- a helper ------------------------------------------------------------------------------------------------

    void help(int worker) {
        Helper& me = helpers[worker];
        for (uint32_t seen = 0;;) {
            seen = wait_for_other_than(seen, me);
            if (stops.load(std::memory_order_relaxed)) return;
            me.works.store(true, std::memory_order_relaxed);
            const int taken = take(worker, seen);
            me.works.store(false, std::memory_order_relaxed);
            if (!taken) continue;
            finished.fetch_add(taken);
            if (!leader_sleeps.load()) continue;
            std::lock_guard<std::mutex> lock(mutex);
            done.notify_one();
        }
    }

    uint32_t wait_for_other_than(uint32_t seen, Helper& me) {
        const int64_t end = steady_clock() + SPIN;
        while (!me.is_out.load(std::memory_order_relaxed)) {
            for (int i = 0; i < PAUSES_A_LOOK; i++) {
                const uint32_t now = epoch.load(std::memory_order_acquire);
                if (now != seen) return now;
                pause_briefly();
            }
            if (steady_clock() >= end) break;
        }
        std::unique_lock<std::mutex> lock(me.mutex);
        me.asleep.store(true);  // before the look at the epoch; the leader writes the epoch before it looks here
        me.wake.wait(lock, [&] { return stops.load() || (!me.is_out.load() && epoch.load() != seen); });
        me.asleep.store(false);
        return epoch.load(std::memory_order_acquire);
    }

    // -- the leader ----------------------------------------------------------------------------------------------

    // Lets those back in whose time has come; whether there is anybody to help.
    bool has_help(int64_t now) {
        bool has = false;
        for (size_t worker = 1; worker < helpers.size(); worker++) {
            Helper& helper = helpers[worker];
            const bool is_out = helper.patience.is_out(now);
            if (is_out != helper.is_out.load(std::memory_order_relaxed)) helper.is_out.store(is_out);
            has |= !is_out;
        }
        return has;
    }

    void announce(uint32_t next) {
        epoch.store(next);
        for (Helper& helper : helpers) {
            if (!helper.asleep.load() || helper.is_out.load(std::memory_order_relaxed)) continue;
            // Nobody needs it enough to wait for it: one that is just about to sleep hears of the next job.
            std::unique_lock<std::mutex> lock(helper.mutex, std::try_to_lock);
            if (lock) helper.wake.notify_one();
        }
    }

    bool is_done(int others) const { return finished.load() == others; }

    // Returns when the helpers have done `others` pieces; the leader's own took `piece` each.
    void await(int others, int64_t piece, Clock clock) {
        for (const int64_t end = steady_clock() + LEADER_SPIN; steady_clock() < end;)
            for (int i = 0; i < PAUSES_A_LOOK; i++) {
                if (is_done(others)) return;
                pause_briefly();
            }
        // From here on asleep, for who has a piece and no core may get this one.
        const int64_t from = clock();
        std::unique_lock<std::mutex> lock(mutex);
        leader_sleeps.store(true);  // before the look at what is done; helpers add to that before they look here
        const auto all = [&] { return is_done(others); };
        if (!done.wait_for(lock, nanoseconds(Patience::allowance(piece)), all)) {
            for (Helper& helper : helpers)
                if (helper.works.load()) helper.patience.begin(), helper.is_out.store(true);
            done.wait(lock, all);
            const int64_t to = clock();
            for (Helper& helper : helpers) {
                if (!helper.patience.is_late()) continue;
                helper.patience.end(from, to);
                helper.is_out.store(helper.patience.is_out(to));
            }
        }
        leader_sleeps.store(false);
    }

    std::vector<Share> shares;
    std::vector<Helper> helpers;
    const pid_t process;
    std::vector<std::thread> threads;
    int first_piece = 0;  // written before the tickets, like `job`
    std::atomic<const Job*> job{nullptr};
    std::atomic<bool> stops{false};
    alignas(64) std::atomic<uint32_t> epoch{0};
    alignas(64) std::atomic<int> finished{0};
    std::atomic<bool> leader_sleeps{false};
    std::mutex mutex;
    std::condition_variable done;
};

// Helpers are made when they are first needed, and again in a process that was forked: there are none there. What the
// parent's were at is unknown then, so the old state is left behind as it is.
Team::State& Team::state() {
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
    State& state = this->state();
    const int64_t begun = clock_();
    if (!state.has_help(begun)) {
        for (int piece = 0; piece < count; piece++) job.call(job.body, 0, piece);
        return;
    }
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
        const int taken = state.take(0, epoch);
        if (!state.is_done(pieces - taken)) {
            const int64_t piece = (clock_() - begun) / std::max(taken, 1);
            state.await(pieces - taken, piece, clock_);
        }
        state.finished.store(0, std::memory_order_relaxed);
    }
}

int Team::num_out() const {
    if (!state_) return 0;
    const auto& helpers = state_->helpers;
    auto is_out = [](const Helper& helper) { return helper.is_out.load(); };
    return int(std::count_if(helpers.begin(), helpers.end(), is_out));
}

Team::~Team() {
    if (!state_ || state_->process != getpid()) return;
    state_->stops.store(true);
    state_->epoch.store(state_->epoch.load() + 1);
    for (Helper& helper : state_->helpers) {
        std::lock_guard<std::mutex> lock(helper.mutex);
        helper.wake.notify_one();
    }
    for (auto& thread : state_->threads) thread.join();
    delete state_;
}
