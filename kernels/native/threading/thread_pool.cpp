#include "threading/thread_pool.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#include "threading/work_queue.h"

namespace {

using std::chrono::nanoseconds;

// Longer than the pauses within a step, shorter than anybody notices in an idle process.
constexpr int64_t SPIN = 100'000;
// Whoever has a piece for longer may need this core to go on with it.
constexpr int64_t LEADER_SPIN = 50'000;
constexpr int LOOKS_A_YIELD = 256;  // some microseconds

void pause_briefly() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// Looks whether something is over, for so many nanoseconds at most. Whoever is waited for may need this very core, so
// others get a turn now and then: without it a leader and a helper on one core would wait for each other in turns.
template <class IsOver> bool spin(int64_t most, IsOver is_over) {
    const int64_t end = ThreadPool::steady_clock() + most;
    for (;;) {
        for (int look = 0; look < LOOKS_A_YIELD; look++) {
            if (is_over()) return true;
            pause_briefly();
        }
        if (ThreadPool::steady_clock() >= end) return false;
        sched_yield();
    }
}

// What travels between cores are lines of 64 bytes, and each takes as long as some hundred instructions. So whoever
// waits looks at a line that is written when there is something to see, and what others read seldom has another.
constexpr int LINE = 64;

// What the leader tells of a job, all in one line. What stands beside the notice is written before it, and read by
// those who have a piece, until the job is over. What is upcoming is read by others too, and of any job.
struct alignas(LINE) Board {
    std::atomic<uint64_t> notice{0};
    std::atomic<void (*)(void*, int, int)> call{nullptr};
    std::atomic<void*> body{nullptr};
    std::atomic<const char*> prefetch{nullptr};
    std::atomic<int64_t> band_bytes{0}, unit_bytes{0};
    std::atomic<int32_t> first_tile_index{0}, units{0}, prefetch_tiles{0};
};
static_assert(sizeof(Board) == LINE);

struct Worker {
    alignas(LINE) WorkQueue queue;
    // Of a helper: how many pieces of which job it has done, as a notice has it; whether it may have one; whether it
    // sleeps, and whether it is to take none.
    alignas(LINE) std::atomic<uint64_t> done{0};
    alignas(LINE) std::atomic<bool> works{false};
    alignas(LINE) std::atomic<bool> asleep{false};
    std::atomic<bool> is_out{false};
    std::mutex mutex;
    std::condition_variable wake;
    StragglerPolicy policy;  // the leader's
};

// How often this process has become another one since it was loaded.
std::atomic<int> forks{0};
const int forks_are_counted = pthread_atfork(nullptr, nullptr, [] { forks.fetch_add(1, std::memory_order_relaxed); });

}  // namespace

int64_t ThreadPool::steady_clock() { return nanoseconds(std::chrono::steady_clock::now().time_since_epoch()).count(); }

struct ThreadPool::State {
    explicit State(int size) : num_threads(size), workers(size), made_after(forks.load()) {}

    bool is_of_this_process() const { return made_after == forks.load(std::memory_order_relaxed); }

    // Takes pieces of a job and carries them out; how many.
    int take(int worker, Notice job, bool leads) {
        int taken = 0;
        for (int turn = 0; turn < num_threads; turn++) {
            const int whose = (worker + turn) % num_threads;
            for (;;) {
                const int tile = workers[whose].queue.take(job, whose, num_threads, leads);
                if (tile == WorkQueue::NOTHING) break;
                // The leader waits for this piece now, so the job cannot change under us.
                const int first = board.first_tile_index.load(std::memory_order_relaxed);
                board.call.load(std::memory_order_relaxed)(board.body.load(std::memory_order_relaxed), worker,
                                                           first + tile);
                taken++;
            }
        }
        return taken;
    }

    Prefetcher prefetcher_of(int worker) const {
        const PrefetchRange prefetch{board.prefetch.load(std::memory_order_relaxed),
                                     board.band_bytes.load(std::memory_order_relaxed),
                                     board.unit_bytes.load(std::memory_order_relaxed),
                                     board.units.load(std::memory_order_relaxed),
                                     board.prefetch_tiles.load(std::memory_order_relaxed)};
        return {prefetch, first_tile(worker, num_threads, prefetch.tiles),
                first_tile(worker + 1, num_threads, prefetch.tiles)};
    }

    // -- a helper ------------------------------------------------------------------------------------------------

    void worker_loop(int worker) {
        Worker& me = workers[worker];
        for (uint32_t seen = 0;;) {
            const Notice job = wait_for_job(seen, worker);
            seen = job.epoch;
            if (stops.load(std::memory_order_relaxed)) return;
            __builtin_prefetch(board.body.load(std::memory_order_relaxed));
            me.works.store(true, std::memory_order_relaxed);
            const int taken = take(worker, job, false);
            me.works.store(false, std::memory_order_relaxed);
            if (!taken) continue;
            me.done.store(Notice{job.epoch, taken}.word());
            if (!leader_sleeps.load()) continue;
            std::lock_guard<std::mutex> lock(mutex);
            done.notify_one();
        }
    }

    Notice wait_for_job(uint32_t seen, int worker) {
        Worker& me = workers[worker];
        Prefetcher prefetcher = prefetcher_of(worker);
        Notice notice{seen, 0};
        spin(SPIN, [&] {
            if (me.is_out.load(std::memory_order_relaxed)) return true;
            notice = Notice::of(board.notice.load(std::memory_order_acquire));
            if (notice.epoch != seen) return true;
            me.queue.keep_cached();
            prefetcher.step();
            return false;
        });
        if (notice.epoch != seen) return notice;
        const auto now = [&] { return Notice::of(board.notice.load()); };
        std::unique_lock<std::mutex> lock(me.mutex);
        me.asleep.store(true);  // before the look at the notice
        me.wake.wait(lock, [&] { return stops.load() || (!me.is_out.load() && now().epoch != seen); });
        me.asleep.store(false);
        return now();
    }

    // -- the leader ----------------------------------------------------------------------------------------------

    // Lets those back in whose time has come; whether there is anybody to help.
    bool has_help(Clock clock) {
        if (!any_out) return true;
        const int64_t now = clock();
        bool has = false;
        any_out = false;
        for (int worker = 1; worker < num_threads; worker++) {
            Worker& helper = workers[worker];
            const bool is_out = helper.policy.is_out(now);
            if (is_out != helper.is_out.load(std::memory_order_relaxed)) helper.is_out.store(is_out);
            any_out |= is_out, has |= !is_out;
        }
        return has;
    }

    // Tells the helpers of a job, whose first piece is the leader's already: what is written here is on its way to them
    // while the leader carries that out.
    void announce(Notice notice, const Job& job, int first_tile_index, const PrefetchRange& prefetch) {
        workers[0].queue.begin(notice, num_threads);
        board.call.store(job.call, std::memory_order_relaxed);
        board.body.store(job.body, std::memory_order_relaxed);
        board.first_tile_index.store(first_tile_index, std::memory_order_relaxed);
        board.prefetch.store(prefetch.from, std::memory_order_relaxed);
        board.band_bytes.store(prefetch.band_bytes, std::memory_order_relaxed);
        board.unit_bytes.store(prefetch.unit_bytes, std::memory_order_relaxed);
        board.units.store(prefetch.units, std::memory_order_relaxed);
        board.prefetch_tiles.store(prefetch.tiles, std::memory_order_relaxed);
        board.notice.store(notice.word(), std::memory_order_release);
        for (int worker = 1; worker < num_threads; worker++) {
            Worker& helper = workers[worker];
            if (!helper.asleep.load(std::memory_order_relaxed) || helper.is_out.load(std::memory_order_relaxed))
                continue;
            // Nobody needs it enough to wait for it: one that is just about to sleep hears of the next job.
            std::unique_lock<std::mutex> lock(helper.mutex, std::try_to_lock);
            if (lock) helper.wake.notify_one();
        }
    }

    // Whether the helpers have done so many pieces.
    bool is_done(Notice job, int others) const {
        for (int worker = 1; worker < num_threads; worker++) {
            const Notice reported = Notice::of(workers[worker].done.load());
            if (reported.epoch == job.epoch) others -= reported.tiles;
        }
        return others == 0;
    }

    // Returns when they have; the leader's own took `piece` each.
    void await(Notice job, int others, int64_t tile, Clock clock) {
        Prefetcher prefetcher = prefetcher_of(0);
        const bool have = spin(LEADER_SPIN, [&] {
            if (is_done(job, others)) return true;
            prefetcher.step();
            return false;
        });
        if (have) return;
        // From here on asleep, for who has a piece and no core may get this one.
        const int64_t from = clock();
        std::unique_lock<std::mutex> lock(mutex);
        leader_sleeps.store(true);  // before the look at what is done; helpers say what is before they look here
        const auto all = [&] { return is_done(job, others); };
        if (!done.wait_for(lock, nanoseconds(StragglerPolicy::allowance(tile)), all)) {
            for (Worker& helper : workers)
                if (helper.works.load()) helper.policy.begin(), helper.is_out.store(true);
            done.wait(lock, all);
            const int64_t to = clock();
            for (Worker& helper : workers) {
                if (!helper.policy.is_late()) continue;
                helper.policy.end(from, to);
                helper.is_out.store(helper.policy.is_out(to));
            }
            any_out = true;
        }
        leader_sleeps.store(false);
    }

    const int num_threads;
    Board board;
    std::vector<Worker> workers;  // the leader, who has a share alone, then the helpers
    const int made_after;         // so many forks
    std::vector<std::thread> threads;
    std::atomic<bool> stops{false};
    bool any_out = false;  // the leader's
    alignas(LINE) std::atomic<bool> leader_sleeps{false};
    std::mutex mutex;
    std::condition_variable done;
};

// Helpers are made when they are first needed, and again in a process that was forked: there are none there. What the
// parent's were at is unknown then, so the old state is left behind as it is.
ThreadPool::State& ThreadPool::state() {
    if (state_ && state_->is_of_this_process()) return *state_;
    state_ = new State(size_);
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);  // signals are the caller's business
    try {
        for (int worker = 1; worker < size_; worker++)
            state_->threads.emplace_back([state = state_, worker] { state->worker_loop(worker); });
    } catch (const std::system_error&) {
        // The system gives no more threads: fewer help, and the leader does the rest.
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    return *state_;
}

void ThreadPool::run_parallel(int count, Job job) {
    State& state = this->state();
    if (!state.has_help(clock_)) {
        for (int tile = 0; tile < count; tile++) job.call(job.body, 0, tile);
        return;
    }
    for (int first = 0; first < count; first += MAX_TILES) {
        const uint32_t epoch = Notice::of(state.board.notice.load(std::memory_order_relaxed)).epoch + 1;
        const Notice notice{epoch, std::min(count - first, MAX_TILES)};
        state.announce(notice, job, first, prefetch_);
        const int64_t begun = clock_();
        job.call(job.body, 0, first);
        const int taken = 1 + state.take(0, notice, true), others = notice.tiles - taken;
        if (!state.is_done(notice, others)) state.await(notice, others, (clock_() - begun) / taken, clock_);
    }
    prefetch_ = {};
}

int ThreadPool::num_out() const {
    if (!state_) return 0;
    const auto& workers = state_->workers;
    auto is_out = [](const Worker& helper) { return helper.is_out.load(); };
    return int(std::count_if(workers.begin(), workers.end(), is_out));
}

ThreadPool::~ThreadPool() {
    if (!state_ || !state_->is_of_this_process()) return;
    state_->stops.store(true);
    state_->board.notice.store(Notice{Notice::of(state_->board.notice.load()).epoch + 1, 0}.word());
    for (Worker& helper : state_->workers) {
        std::lock_guard<std::mutex> lock(helper.mutex);
        helper.wake.notify_one();
    }
    for (auto& thread : state_->threads) thread.join();
    delete state_;
}
