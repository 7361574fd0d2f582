#include "rules.h"

#include <algorithm>
#include <cmath>

namespace {

void keep(float* logits, int vocab, const uint8_t* mask) {
    for (int token = 0; token < vocab; token++)
        if (!(mask[token >> 3] >> (token & 7) & 1)) logits[token] = -INFINITY;
}

// Calls use(its tokens, how many) for each word.
template <class Use> void each_word(const D3Rules& rules, Use use) {
    for (int64_t place = 0; place < rules.words_size; place += 1 + rules.words[place])
        use(rules.words + place + 1, rules.words[place]);
}

// Whether the answer ends with these tokens: with the run's own, and before them with those that were there.
bool ends_with(const int64_t* tokens, int64_t count, const D3Rules& rules, const D3Run& run, int row, int taken) {
    if (count > rules.num_recent + taken) return false;
    for (int64_t back = 1; back <= count; back++) {
        const int64_t there =
            back <= taken ? run.chosen[(taken - back) * run.rows + row] : rules.recent[rules.num_recent + taken - back];
        if (there != tokens[count - back]) return false;
    }
    return true;
}

}  // namespace

bool are_rules(const D3Rules& rules, int vocab) {
    const auto are_tokens = [&](const int64_t* tokens, int64_t count) {
        return std::all_of(tokens, tokens + count, [&](int64_t token) { return token >= 0 && token < vocab; });
    };
    if (!are_tokens(rules.biased, rules.num_biased) || !are_tokens(rules.banned, rules.num_banned)) return false;
    for (int64_t place = 0; place < rules.words_size; place += 1 + rules.words[place]) {
        const int64_t length = rules.words[place];
        if (length < 1 || length >= rules.words_size - place) return false;
        if (!are_tokens(rules.words + place + 1, length)) return false;
    }
    return true;
}

void restrict_logits(float* logits, int vocab, const D3Rules& rules, const uint8_t* form, const D3Run& run, int row,
                     int taken) {
    for (int64_t i = 0; i < rules.num_biased; i++) logits[rules.biased[i]] += rules.biases[i];
    if (rules.allowed) keep(logits, vocab, rules.allowed);
    if (run.generation[row] + taken < rules.banned_until)
        for (int64_t i = 0; i < rules.num_banned; i++) logits[rules.banned[i]] = -INFINITY;
    each_word(rules, [&](const int64_t* word, int64_t length) {
        if (ends_with(word, length - 1, rules, run, row, taken)) logits[word[length - 1]] = -INFINITY;
    });
    if (form) keep(logits, vocab, form);
}
