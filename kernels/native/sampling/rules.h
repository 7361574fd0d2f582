// Which tokens may come: the logits of all others become minus infinity.
#pragma once
#include <cstdint>

#include "abi.h"

// Whether all tokens that the rules name are of a vocabulary of that size.
bool are_rules(const D3Rules& rules, int vocab);

// Applies what `rules` say of the step `taken` of `run` to the logits of its row; `form` is the mask of the row's form,
// or null. Bias comes first, so that nothing brings back what is excluded.
void restrict_logits(float* logits, int vocab, const D3Rules& rules, const uint8_t* form, const D3Run& run, int row,
                     int taken);
