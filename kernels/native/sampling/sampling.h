// From all logits of a row to its token: penalties, temperature, min-p, top-k, top-p and a draw, in this order, as
// `kernels/sampling.py` has them.
#pragma once
#include <cstdint>
#include <vector>

#include "abi.h"
#include "sampling/choosing.h"

// The best token of `logits`, which are changed. `order` is scratch, with room for `vocab` numbers.
Best sample(float* logits, int vocab, const D3Choice& asked, const Choosing& how, std::vector<uint64_t>& order);

// Lets the token of the step before `taken` count for the penalties, if there is one and it does not yet.
void count(const D3Choice& asked, int taken, int64_t token);
