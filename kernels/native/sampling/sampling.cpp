#include "sampling/sampling.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>

namespace {

// Philox-4x32-10: four random words for a counter under a key (Salmon et al., SC 2011).
void philox(uint64_t key, uint32_t (&word)[4]) {
    uint32_t low = uint32_t(key), high = uint32_t(key >> 32);
    for (int round = 0; round < 10; round++) {
        const uint64_t first = uint64_t(word[0]) * 0xD2511F53u, second = uint64_t(word[2]) * 0xCD9E8D57u;
        const uint32_t next[4] = {uint32_t(second >> 32) ^ word[1] ^ low, uint32_t(second),
                                  uint32_t(first >> 32) ^ word[3] ^ high, uint32_t(first)};
        for (int i = 0; i < 4; i++) word[i] = next[i];
        low += 0x9E3779B9u, high += 0xBB67AE85u;
    }
}

float gumbel(uint32_t word) {
    const float uniform = (float(word >> 9) + 0.5f) * 0x1p-23f;
    return -std::log(-std::log(uniform));
}

// No noise is larger: 16.64 is that of the largest number below 1 that `gumbel` takes.
constexpr float MOST_NOISE = 17.0f;

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

void penalise(float* logits, const D3Choice& asked) {
    for (int64_t i = 0; i < asked.counted->used; i++) {
        float& logit = logits[asked.counted->tokens[i]];
        const float often = float(asked.counted->counts[i]);
        const float repeated = logit > 0 ? logit / asked.repetition : logit * asked.repetition;
        logit = repeated - (asked.frequency * often + asked.presence * (often > 0 ? 1.0f : 0.0f));
    }
}

// A number that is larger for the likelier token, and of equal scores for the lower one.
uint64_t place_of(float score, int token) {
    uint32_t bits;
    score += 0.0f;  // which makes -0 a 0
    memcpy(&bits, &score, sizeof bits);
    bits = bits >> 31 ? ~bits : bits | 0x80000000u;
    return uint64_t(bits) << 32 | uint32_t(~token);
}

int token_of(uint64_t place) { return int(~uint32_t(place)); }

// The probability beside that of the likeliest, in units of 2^-40: sums of whole numbers do not depend on their order.
uint64_t weight_of(float score, float highest) { return uint64_t(std::exp(score - highest) * 0x1p40f); }

// How many of the likeliest tokens make up the share `top_p`; these are in order then.
size_t most_of(std::vector<uint64_t>& order, const float* scores, float highest, float top_p) {
    uint64_t total = 0, sum = 0;
    for (uint64_t place : order) total += weight_of(scores[token_of(place)], highest);
    const auto target = std::max<uint64_t>(uint64_t(std::ceil(double(total) * double(top_p))), 1);
    size_t sorted = 0;
    for (size_t kept = 0; kept < order.size(); kept++) {
        if (kept == sorted) {  // few are enough as a rule, so not all are put in order
            const size_t next = std::min(order.size(), std::max<size_t>(64, 4 * sorted));
            std::partial_sort(order.begin() + sorted, order.begin() + next, order.end(), std::greater<uint64_t>());
            sorted = next;
        }
        sum += weight_of(scores[token_of(order[kept])], highest);
        if (sum >= target) return kept + 1;
    }
    return order.size();
}

void cut(float* scores, int vocab, const D3Choice& asked, std::vector<uint64_t>& order) {
    float highest = -INFINITY;
    for (int token = 0; token < vocab; token++) {
        if (std::isnan(scores[token])) return;  // it wins anyway, and ends the row
        highest = std::max(highest, scores[token]);
    }
    if (std::isinf(highest)) return;
    const float floor = highest + asked.log_min_p;
    order.clear();
    for (int token = 0; token < vocab; token++)
        if (scores[token] >= floor && scores[token] != -INFINITY) order.push_back(place_of(scores[token], token));
    if (asked.top_k > 0 && size_t(asked.top_k) < order.size()) {
        std::nth_element(order.begin(), order.begin() + (asked.top_k - 1), order.end(), std::greater<uint64_t>());
        order.resize(asked.top_k);
    }
    if (asked.top_p < 1) order.resize(most_of(order, scores, highest, asked.top_p));
    const uint64_t last = *std::min_element(order.begin(), order.end());
    for (int token = 0; token < vocab; token++)
        if (place_of(scores[token], token) < last) scores[token] = -INFINITY;
}

}  // namespace

Best Best::nothing() { return {-INFINITY, INT64_MAX}; }

void Best::meet(float other, int64_t of) {
    if (std::isnan(score) || std::isnan(other)) {
        const bool wins = std::isnan(other) && (!std::isnan(score) || of < token);
        if (wins) score = other, token = of;
    } else if (other > score || (other == score && of < token)) {
        score = other, token = of;
    }
}

void choose(Best& best, const float* logits, int64_t first, int count, const Choosing& how) {
    if (how.temperature == 0.0f) {
        for (int i = 0; i < count; i++)
            if (!(logits[i] < best.score)) best.meet(logits[i], first + i);
        return;
    }
    for (int group = 0; group < count; group += 4) {
        const int some = count - group < 4 ? count - group : 4;
        float scores[4];
        bool hopeless = true;  // no noise could make one of these the best
        for (int i = 0; i < some; i++) {
            scores[i] = logits[group + i] / how.temperature;
            hopeless &= scores[i] + MOST_NOISE < best.score;
        }
        if (hopeless) continue;
        uint32_t words[4] = {uint32_t((first + group) / 4), how.step, how.index, 0};
        philox(how.seed, words);
        for (int i = 0; i < some; i++) best.meet(scores[i] + gumbel(words[i]), first + group + i);
    }
}

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

Best sample(float* logits, int vocab, const D3Choice& asked, const Choosing& how, std::vector<uint64_t>& order) {
    if (asked.counted) penalise(logits, asked);
    Choosing rest = how;
    if (how.temperature != 0 && (asked.log_min_p > -INFINITY || asked.top_k > 0 || asked.top_p < 1)) {
        for (int token = 0; token < vocab; token++) logits[token] /= how.temperature;
        rest.temperature = 1;
        cut(logits, vocab, asked, order);
    }
    Best best = Best::nothing();
    choose(best, logits, 0, vocab, rest);
    return best;
}

void count(const D3Choice& asked, int taken, int64_t token) {
    if (!asked.counted || asked.counted->steps >= taken) return;  // a step that is taken again counts nothing twice
    D3Counted& counted = *asked.counted;
    counted.steps = taken;
    for (int64_t i = 0; i < counted.used; i++)
        if (counted.tokens[i] == token) {
            counted.counts[i]++;
            return;
        }
    counted.tokens[counted.used] = token;
    counted.counts[counted.used++] = 1;
}
