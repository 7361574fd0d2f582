// When a team does without a helper: the rule alone, in nanoseconds of any clock.
//
// A helper that the system puts aside in the middle of a piece holds everybody up, beside busy neighbours for a tenth
// of a second. Whoever was waited for is left out for twice as long, so that a team which is outnumbered spends at most
// a third of its time on waiting: it takes one and a half times as long as its leader alone, whatever else there is.
#pragma once
#include <algorithm>
#include <cstdint>
#include <limits>

class Patience {
public:
    // How long the leader waits for pieces that others have taken, whose own took `piece` each on average, before
    // whoever still has one is late.
    static int64_t allowance(int64_t piece) { return LEAST + 2 * piece; }

    bool is_out(int64_t now) const { return now < back_; }
    // It is late, and left out until it is known for how long it was waited for.
    void begin() { back_ = LATE; }
    bool is_late() const { return back_ == LATE; }
    void end(int64_t from, int64_t to) { back_ = to + std::min(TIMES * (to - from), MOST); }

private:
    static constexpr int64_t LATE = std::numeric_limits<int64_t>::max();
    static constexpr int64_t LEAST = 200'000;        // nobody is put aside for less
    static constexpr int64_t TIMES = 2;
    static constexpr int64_t MOST = 10'000'000'000;  // a process that was stopped for an hour is soon itself again

    int64_t back_ = std::numeric_limits<int64_t>::min();
};
