// A pool of two whose helper is descheduled within a tile, by a clock that only this program moves. Reports what is
// wrong; the caller ends a hang.
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <thread>

#include "threading/thread_pool.h"

namespace {

std::atomic<int64_t> now{1};
int64_t clock_here() { return now.load(); }

void require(bool holds, const char* what) {
    if (holds) return;
    std::fprintf(stderr, "not so: %s\n", what);
    std::exit(1);
}

// The helper runs `as_helper` in the first tile that it takes; the leader gives it time to take one.
template <class AsHelper> void run_with_helper(ThreadPool& threads, AsHelper as_helper) {
    std::atomic<bool> helps{false};
    while (!helps.load())
        threads.parallel_for(2, [&](int worker, int) {
            if (worker == 1 && !helps.exchange(true)) as_helper();
            for (int turn = 0; turn < 1000 && !helps.load(); turn++) std::this_thread::yield();
        });
}

bool is_alone(ThreadPool& threads) {
    std::atomic<int> others{0};
    for (int job = 0; job < 100; job++) threads.parallel_for(8, [&](int worker, int) { others += worker != 0; });
    return others.load() == 0;
}

void rule() {
    StragglerPolicy policy;
    require(!policy.is_out(0), "no helper is out at first");
    policy.begin();
    require(policy.is_late() && policy.is_out(int64_t(1) << 60), "a late helper is out until it is back");
    policy.end(1000, 4000);
    require(!policy.is_late() && policy.is_out(9999) && !policy.is_out(10000), "out for twice the wait");
    policy.begin(), policy.end(0, int64_t(3600) * 1'000'000'000);
    require(!policy.is_out(int64_t(3611) * 1'000'000'000), "for ten seconds at most");
    require(StragglerPolicy::allowance(5'000'000) > 2 * StragglerPolicy::allowance(0), "long tiles are waited for");
}

}  // namespace

int main() {
    rule();
    ThreadPool threads(2, clock_here);
    run_with_helper(threads, [] {});
    require(threads.num_out() == 0, "a new helper is not out");
    run_with_helper(threads, [&] {
        while (threads.num_out() == 0) std::this_thread::yield();  // until the leader gives up on it
        now += 1000;
    });
    require(is_alone(threads), "the leader goes on alone");
    now += 1999;
    require(is_alone(threads) && threads.num_out() == 1, "for twice as long as it waited");
    now += 1;
    run_with_helper(threads, [] {});
    require(threads.num_out() == 0, "the helper is back");
    std::puts("as it should be");
}
