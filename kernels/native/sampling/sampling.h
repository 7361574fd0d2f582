// From logits to a token: the likeliest, or a draw, as `kernels/random.py` and the sampler of the engine take it.
#pragma once
#include <cstdint>
#include <vector>

#include "abi.h"

// How one row chooses. With a temperature of 0 it takes its largest logit.
struct DrawParams {
    float temperature;
    uint64_t seed;
    uint32_t index, step;
};

// The best token so far, and the score that it has.
struct Best {
    float score;
    int64_t token;

    static Best none();
    // NaN is the best of all, so that whoever sees the score learns of it; of equal scores the lower token wins.
    void update(float other, int64_t of);
    void update(const Best& other) { update(other.score, other.token); }
};

// Lets `best` meet `count` logits, of the tokens from `first` on; `first` is a multiple of 4.
void update_best(Best& best, const float* logits, int64_t first, int count_token, const DrawParams& how);

// The best token of `logits`, which are changed. `order` is scratch, with room for `vocab` numbers.
Best sample(float* logits, int vocab, const D3Sampling& asked, const DrawParams& how, std::vector<uint64_t>& order);

// Lets the token of the step before `taken` count for the penalties, if there is one and it does not yet.
void count_token(const D3Sampling& asked, int taken, int64_t token);

// Whether all tokens that the rules name are of a vocabulary of that size.
bool is_valid_logit_mask(const D3LogitMask& mask, int vocab);

// Applies what `rules` say of the step `taken` of `run` to the logits of its row; `form` is the mask of the row's form,
// or null. Bias comes first, so that nothing brings back what is excluded.
void apply_logit_mask(float* logits, int vocab, const D3LogitMask& mask, const uint8_t* grammar, const D3Run& run,
                      int row, int taken);
