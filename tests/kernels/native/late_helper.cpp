// A team of two whose helper is put aside in the middle of a piece, by a clock that stands still unless it is moved
// here. Says what is not as it should be; a hang is for the caller to end.
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

// The helper does `as_helper` in the first piece that it takes; the leader gives it the time for one.
template <class AsHelper> void share_with_helper(Team& team, AsHelper as_helper) {
    std::atomic<bool> helps{false};
    while (!helps.load())
        team.each(2, [&](int worker, int) {
            if (worker == 1 && !helps.exchange(true)) as_helper();
            for (int turn = 0; turn < 1000 && !helps.load(); turn++) std::this_thread::yield();
        });
}

bool is_alone(Team& team) {
    std::atomic<int> others{0};
    for (int job = 0; job < 100; job++) team.each(8, [&](int worker, int) { others += worker != 0; });
    return others.load() == 0;
}

void rule() {
    Patience patience;
    require(!patience.is_out(0), "nobody is out in the beginning");
    patience.begin();
    require(patience.is_late() && patience.is_out(int64_t(1) << 60), "who is late is out until it comes");
    patience.end(1000, 4000);
    require(!patience.is_late() && patience.is_out(9999) && !patience.is_out(10000), "out for twice the waiting");
    patience.begin(), patience.end(0, int64_t(3600) * 1'000'000'000);
    require(!patience.is_out(int64_t(3611) * 1'000'000'000), "for ten seconds at most");
    require(Patience::allowance(5'000'000) > 2 * Patience::allowance(0), "long pieces are waited for");
}

}  // namespace

int main() {
    rule();
    Team team(2, clock_here);
    share_with_helper(team, [] {});
    require(team.num_out() == 0, "who has just come is not out");
    share_with_helper(team, [&] {
        while (team.num_out() == 0) std::this_thread::yield();  // put aside until the leader has had enough
        now += 1000;
    });
    require(is_alone(team), "the leader goes on alone");
    now += 1999;
    require(is_alone(team) && team.num_out() == 1, "for twice as long as it has waited");
    now += 1;
    share_with_helper(team, [] {});
    require(team.num_out() == 0, "the helper is back");
    std::puts("as it should be");
}
