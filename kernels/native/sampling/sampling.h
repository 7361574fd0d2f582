// From logits to a token: logit mask, penalties, temperature, min-p, top-k, top-p and a draw, in this order, as in
// `kernels/sampling.py` and `kernels/reference.py`.
#pragma once
#include <cmath>
#include <cstdint>
#include <vector>

#include "types.h"

// How one row draws. A temperature of 0 takes the largest logit.
struct DrawParams {
    float temperature;
    uint64_t seed;
    uint32_t index, step;
};

// The best token so far and its score.
struct Best {
    float score;
    int64_t token;

    static Best none();
    // NaN beats everything, so that a caller sees it; of equal scores the lower token wins.
    void update(float other, int64_t of);
    void update(const Best& other) { update(other.score, other.token); }
};

// Compares `best` with `count` logits, of the tokens from `first` on; `first` is a multiple of 4.
void update_best(Best& best, const float* logits, int64_t first, int count_token, const DrawParams& how);

// The same for the logits of `tokens`, which ascend.
void update_best_of(Best& best, const float* logits, const int64_t* tokens, int count, const DrawParams& how);

// The sum of exp(logit / temperature - highest / temperature) so far; a temperature of 0 counts as 1.
struct Mass {
    float highest = -INFINITY;
    double sum = 0;

    void update(const float* logits, int count, float temperature);
    void update(const Mass& other);
    float confidence() const { return float(1 / sum); }  // the probability of the likeliest token
};


// The logits of one row: `count` values, of `tokens`, which ascend, or, with null, of all tokens.
struct RowLogits {
    float* values;
    int count;
    const int64_t* tokens;

    // The logit of a token, or null if the row has none.
    float* find(int64_t token) const;
};

// The best token of `logits`, which it changes. `order` is scratch, with room for all of them.
Best sample(const RowLogits& logits, const D3Sampling& asked, const DrawParams& how, std::vector<uint64_t>& order);

// Counts the token of the step before `taken` for the penalties, unless it is counted already.
void count_token(const D3Sampling& asked, int taken, int64_t token);

// Whether all tokens of the mask are in a vocabulary of that size.
bool is_valid_logit_mask(const D3LogitMask& mask, int vocab);

// Applies `mask` at the step `taken` of `run` to the logits of its row; `grammar` is the row's grammar mask, or null.
// Bias comes first, so that it brings back no excluded token.
void apply_logit_mask(const RowLogits& logits, const D3LogitMask& mask, const uint8_t* grammar, const D3Run& run,
                      int row, int taken);

// Whether a mask allows a token.
inline bool is_allowed(const uint8_t* mask, int64_t token) { return mask[token >> 3] >> (token & 7) & 1; }
