#include "sampling/sampling.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>

namespace {

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
