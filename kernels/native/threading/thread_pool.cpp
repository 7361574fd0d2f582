#include "threading/thread_pool.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#include "threading/process.h"
#include "threading/work_queue.h"

namespace {

using std::chrono::nanoseconds;

// Longer than the pauses within a step, shorter than is noticeable in an idle process.
constexpr int64_t SPIN = 100'000;
// A helper that takes longer may need this very core.
constexpr int64_t LEADER_SPIN = 50'000;
constexpr int LOOKS_A_YIELD = 256;  // some microseconds

void pause_briefly() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// Polls `is_over` for at most `most` nanoseconds, and yields now and then: the thread that it waits for may need this
// very core.
template <class IsOver> bool spin(int64_t most, IsOver is_over) {
    const int64_t end = ThreadPool::steady_clock() + most;
    for (;;) {
        for (int look = 0; look < LOOKS_A_YIELD; look++) {
            if (is_over()) return true;
            pause_briefly();
        }
        if (ThreadPool::steady_clock() >= end) return false;
        std::this_thread::yield();
    }
}

// Cores exchange lines of 64 bytes, each at the price of some hundred instructions. So each polled word has a line that
// is written only when there is news.
constexpr int LINE = 64;

// A job as helpers see it, in one line. The other fields are written before the notice and read by threads that hold a
// tile, until the job is over. Prefetch fields are read at any time.
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
    // Of a helper: the tiles that it has done of a job, as a notice; whether it may hold a tile; whether it sleeps; and
    // whether it is left out.
    alignas(LINE) std::atomic<uint64_t> done{0};
    alignas(LINE) std::atomic<bool> works{false};
    alignas(LINE) std::atomic<bool> asleep{false};
    std::atomic<bool> is_out{false};
    std::mutex mutex;
    std::condition_variable wake;
    StragglerPolicy policy;  // used by the leader
};

}  // namespace

int64_t ThreadPool::steady_clock() { return nanoseconds(std::chrono::steady_clock::now().time_since_epoch()).count(); }

struct ThreadPool::State {
    explicit State(int size) : num_threads(size), workers(size), made_after(forks.load()) {}

    bool is_of_this_process() const { return made_after == forks.load(std::memory_order_relaxed); }

    // Takes and runs tiles of a job; returns how many.
    int take(int worker, Notice job, bool leads) {
        int taken = 0;
        for (int turn = 0; turn < num_threads; turn++) {
            const int whose = (worker + turn) % num_threads;
            for (;;) {
                const int tile = workers[whose].queue.take(job, whose, num_threads, leads);
                if (tile == WorkQueue::NOTHING) break;
                // The leader waits for this tile, so the job cannot change meanwhile.
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

    // -- helpers -------------------------------------------------------------------------------------------------

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
        me.asleep.store(true);  // before it reads the notice
        me.wake.wait(lock, [&] { return stops.load() || (!me.is_out.load() && now().epoch != seen); });
        me.asleep.store(false);
        return now();
    }

    // -- the leader ----------------------------------------------------------------------------------------------

    // Readmits helpers whose time is up; returns whether any helper is in.
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

    // Publishes a job whose first tile the leader holds: the lines travel while the leader runs that tile.
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
            // Not worth waiting for: a helper that is about to sleep sees the next job.
            std::unique_lock<std::mutex> lock(helper.mutex, std::try_to_lock);
            if (lock) helper.wake.notify_one();
        }
    }

    // Whether the helpers have done `others` tiles.
    bool is_done(Notice job, int others) const {
        for (int worker = 1; worker < num_threads; worker++) {
            const Notice reported = Notice::of(workers[worker].done.load());
            if (reported.epoch == job.epoch) others -= reported.tiles;
        }
        return others == 0;
    }

    // Waits for that; the leader's own tiles took `tile` nanoseconds each.
    void await(Notice job, int others, int64_t tile, Clock clock) {
        Prefetcher prefetcher = prefetcher_of(0);
        const bool have = spin(LEADER_SPIN, [&] {
            if (is_done(job, others)) return true;
            prefetcher.step();
            return false;
        });
        if (have) return;
        // From here on it sleeps: a helper without a core may get this one.
        const int64_t from = clock();
        std::unique_lock<std::mutex> lock(mutex);
        leader_sleeps.store(true);  // before it reads what is done; helpers write that before they read this
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
    std::vector<Worker> workers;  // the leader, which has only a queue, then the helpers
    const int made_after;         // the number of forks
    std::vector<std::thread> threads;
    std::atomic<bool> stops{false};
    bool any_out = false;  // used by the leader
    alignas(LINE) std::atomic<bool> leader_sleeps{false};
    std::mutex mutex;
    std::condition_variable done;
};

// Helpers start at the first use, and again after a fork. The state of the parent's helpers is unknown then, so the old
// state is leaked.
ThreadPool::State& ThreadPool::state() {
    if (state_ && state_->is_of_this_process()) return *state_;
    state_ = new State(size_);
    const SignalsBlocked blocked;
    try {
        for (int worker = 1; worker < size_; worker++)
            state_->threads.emplace_back([state = state_, worker] { state->worker_loop(worker); });
    } catch (const std::system_error&) {
        // The system gives no more threads: the leader does more.
    }
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
