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
constexpr int LOOKS_A_TURN = 256;  // some microseconds

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
    const int64_t end = Team::steady_clock() + most;
    for (;;) {
        for (int look = 0; look < LOOKS_A_TURN; look++) {
            if (is_over()) return true;
            pause_briefly();
        }
        if (Team::steady_clock() >= end) return false;
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
    std::atomic<const char*> upcoming{nullptr};
    std::atomic<int64_t> band_bytes{0}, unit_bytes{0};
    std::atomic<int32_t> first_piece{0}, units{0}, upcoming_pieces{0};
};
static_assert(sizeof(Board) == LINE);

struct Worker {
    alignas(LINE) Share share;
    // Of a helper: how many pieces of which job it has done, as a notice has it; whether it may have one; whether it
    // sleeps, and whether it is to take none.
    alignas(LINE) std::atomic<uint64_t> done{0};
    alignas(LINE) std::atomic<bool> works{false};
    alignas(LINE) std::atomic<bool> asleep{false};
    std::atomic<bool> is_out{false};
    std::mutex mutex;
    std::condition_variable wake;
    Patience patience;  // the leader's
};

// How often this process has become another one since it was loaded.
std::atomic<int> forks{0};
const int forks_are_counted = pthread_atfork(nullptr, nullptr, [] { forks.fetch_add(1, std::memory_order_relaxed); });

}  // namespace

int64_t Team::steady_clock() { return nanoseconds(std::chrono::steady_clock::now().time_since_epoch()).count(); }

struct Team::State {
    explicit State(int size) : team(size), workers(size), made_after(forks.load()) {}

    bool is_of_this_process() const { return made_after == forks.load(std::memory_order_relaxed); }

    // Takes pieces of a job and carries them out; how many.
    int take(int worker, Notice job, bool leads) {
        int taken = 0;
        for (int turn = 0; turn < team; turn++) {
            const int whose = (worker + turn) % team;
            for (;;) {
                const int piece = workers[whose].share.take(job, whose, team, leads);
                if (piece == Share::NOTHING) break;
                // The leader waits for this piece now, so the job cannot change under us.
                board.call.load(std::memory_order_relaxed)(board.body.load(std::memory_order_relaxed), worker,
                                                           board.first_piece.load(std::memory_order_relaxed) + piece);
                taken++;
            }
        }
        return taken;
    }

    Fetching upcoming_of(int worker) const {
        const Upcoming upcoming{board.upcoming.load(std::memory_order_relaxed),
                                board.band_bytes.load(std::memory_order_relaxed),
                                board.unit_bytes.load(std::memory_order_relaxed),
                                board.units.load(std::memory_order_relaxed),
                                board.upcoming_pieces.load(std::memory_order_relaxed)};
        return {upcoming, first_of_share(worker, team, upcoming.pieces),
                first_of_share(worker + 1, team, upcoming.pieces)};
    }

    // -- a helper ------------------------------------------------------------------------------------------------

    void help(int worker) {
        Worker& me = workers[worker];
        for (uint32_t seen = 0;;) {
            const Notice job = wait_for_other_than(seen, worker);
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

    Notice wait_for_other_than(uint32_t seen, int worker) {
        Worker& me = workers[worker];
        Fetching fetching = upcoming_of(worker);
        Notice told{seen, 0};
        spin(SPIN, [&] {
            if (me.is_out.load(std::memory_order_relaxed)) return true;
            told = Notice::of(board.notice.load(std::memory_order_acquire));
            if (told.epoch != seen) return true;
            me.share.keep_near();
            fetching.some();
            return false;
        });
        if (told.epoch != seen) return told;
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
        if (!somebody_is_out) return true;
        const int64_t now = clock();
        bool has = false;
        somebody_is_out = false;
        for (int worker = 1; worker < team; worker++) {
            Worker& helper = workers[worker];
            const bool is_out = helper.patience.is_out(now);
            if (is_out != helper.is_out.load(std::memory_order_relaxed)) helper.is_out.store(is_out);
            somebody_is_out |= is_out, has |= !is_out;
        }
        return has;
    }

    // Tells the helpers of a job, whose first piece is the leader's already: what is written here is on its way to them
    // while the leader carries that out.
    void announce(Notice notice, const Job& job, int first_piece, const Upcoming& upcoming) {
        workers[0].share.begin(notice, team);
        board.call.store(job.call, std::memory_order_relaxed);
        board.body.store(job.body, std::memory_order_relaxed);
        board.first_piece.store(first_piece, std::memory_order_relaxed);
        board.upcoming.store(upcoming.from, std::memory_order_relaxed);
        board.band_bytes.store(upcoming.band_bytes, std::memory_order_relaxed);
        board.unit_bytes.store(upcoming.unit_bytes, std::memory_order_relaxed);
        board.units.store(upcoming.units, std::memory_order_relaxed);
        board.upcoming_pieces.store(upcoming.pieces, std::memory_order_relaxed);
        board.notice.store(notice.word(), std::memory_order_release);
        for (int worker = 1; worker < team; worker++) {
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
        for (int worker = 1; worker < team; worker++) {
            const Notice reported = Notice::of(workers[worker].done.load());
            if (reported.epoch == job.epoch) others -= reported.pieces;
        }
        return others == 0;
    }

    // Returns when they have; the leader's own took `piece` each.
    void await(Notice job, int others, int64_t piece, Clock clock) {
        Fetching fetching = upcoming_of(0);
        const bool have = spin(LEADER_SPIN, [&] {
            if (is_done(job, others)) return true;
            fetching.some();
            return false;
        });
        if (have) return;
        // From here on asleep, for who has a piece and no core may get this one.
        const int64_t from = clock();
        std::unique_lock<std::mutex> lock(mutex);
        leader_sleeps.store(true);  // before the look at what is done; helpers say what is before they look here
        const auto all = [&] { return is_done(job, others); };
        if (!done.wait_for(lock, nanoseconds(Patience::allowance(piece)), all)) {
            for (Worker& helper : workers)
                if (helper.works.load()) helper.patience.begin(), helper.is_out.store(true);
            done.wait(lock, all);
            const int64_t to = clock();
            for (Worker& helper : workers) {
                if (!helper.patience.is_late()) continue;
                helper.patience.end(from, to);
                helper.is_out.store(helper.patience.is_out(to));
            }
            somebody_is_out = true;
        }
        leader_sleeps.store(false);
    }

    const int team;
    Board board;
    std::vector<Worker> workers;  // the leader, who has a share alone, then the helpers
    const int made_after;         // so many forks
    std::vector<std::thread> threads;
    std::atomic<bool> stops{false};
    bool somebody_is_out = false;  // the leader's
    alignas(LINE) std::atomic<bool> leader_sleeps{false};
    std::mutex mutex;
    std::condition_variable done;
};

// Helpers are made when they are first needed, and again in a process that was forked: there are none there. What the
// parent's were at is unknown then, so the old state is left behind as it is.
Team::State& Team::state() {
    if (state_ && state_->is_of_this_process()) return *state_;
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
    if (!state.has_help(clock_)) {
        for (int piece = 0; piece < count; piece++) job.call(job.body, 0, piece);
        return;
    }
    for (int first = 0; first < count; first += MOST_PIECES) {
        const uint32_t epoch = Notice::of(state.board.notice.load(std::memory_order_relaxed)).epoch + 1;
        const Notice notice{epoch, std::min(count - first, MOST_PIECES)};
        state.announce(notice, job, first, upcoming_);
        const int64_t begun = clock_();
        job.call(job.body, 0, first);
        const int taken = 1 + state.take(0, notice, true), others = notice.pieces - taken;
        if (!state.is_done(notice, others)) state.await(notice, others, (clock_() - begun) / taken, clock_);
    }
    upcoming_ = {};
}

int Team::num_out() const {
    if (!state_) return 0;
    const auto& workers = state_->workers;
    auto is_out = [](const Worker& helper) { return helper.is_out.load(); };
    return int(std::count_if(workers.begin(), workers.end(), is_out));
}

Team::~Team() {
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
