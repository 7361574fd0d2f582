#include "sampling/rules.h"

#include <algorithm>
#include <cmath>

namespace {

void keep(float* logits, int vocab, const uint8_t* mask) {
    for (int token = 0; token < vocab; token++)
        if (!(mask[token >> 3] >> (token & 7) & 1)) logits[token] = -INFINITY;
}

// Excludes the tokens that complete a word behind the answer: `recent`, and behind it the tokens of this run.
void exclude_words(float* logits, const D3Rules& rules, const D3Run& run, int row, int taken) {
    for (int64_t node = 0, back = 1;; back++) {
        for (int64_t i = rules.first_bans[node]; i < rules.first_bans[node + 1]; i++) logits[rules.bans[i]] = -INFINITY;
        if (back > rules.num_recent + taken) return;
        const int64_t token =
            back <= taken ? run.chosen[(taken - back) * run.rows + row] : rules.recent[rules.num_recent + taken - back];
        const int64_t* end = rules.edges + rules.first_edges[node + 1];
        const int64_t* edge = std::lower_bound(rules.edges + rules.first_edges[node], end, token);
        if (edge == end || *edge != token) return;
        node = edge - rules.edges + 1;
    }
}

}  // namespace

bool are_rules(const D3Rules& rules, int vocab) {
    const auto are_tokens = [&](const int64_t* tokens, int64_t count) {
        return std::all_of(tokens, tokens + count, [&](int64_t token) { return token >= 0 && token < vocab; });
    };
    if (!are_tokens(rules.biased, rules.num_biased) || !are_tokens(rules.banned, rules.num_banned)) return false;
    return are_tokens(rules.bans, rules.num_bans);
}

void restrict_logits(float* logits, int vocab, const D3Rules& rules, const uint8_t* form, const D3Run& run, int row,
                     int taken) {
    for (int64_t i = 0; i < rules.num_biased; i++) logits[rules.biased[i]] += rules.biases[i];
    if (rules.allowed) keep(logits, vocab, rules.allowed);
    if (run.generation[row] + taken < rules.banned_until)
        for (int64_t i = 0; i < rules.num_banned; i++) logits[rules.banned[i]] = -INFINITY;
    if (rules.num_bans) exclude_words(logits, rules, run, row, taken);
    if (form) keep(logits, vocab, form);
}
