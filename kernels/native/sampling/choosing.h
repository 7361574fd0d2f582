// From logits to a token: the likeliest, or a draw, as `kernels/random.py` and the sampler of the engine take it.
#pragma once
#include <cstdint>

// How one row chooses. With a temperature of 0 it takes its largest logit.
struct Choosing {
    float temperature;
    uint64_t seed;
    uint32_t index, step;
};

// The best token so far, and the score that it has.
struct Best {
    float score;
    int64_t token;

    static Best nothing();
    // NaN is the best of all, so that whoever sees the score learns of it; of equal scores the lower token wins.
    void meet(float other, int64_t of);
    void meet(const Best& other) { meet(other.score, other.token); }
};

// Lets `best` meet `count` logits, of the tokens from `first` on; `first` is a multiple of 4.
void choose(Best& best, const float* logits, int64_t first, int count, const Choosing& how);
