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

// An upper bound: 16.64 is the noise of the largest number below 1 that `gumbel` takes.
constexpr float MAX_NOISE = 17.0f;

void mask_tokens(const RowLogits& logits, const uint8_t* mask) {
    for (int nth = 0; nth < logits.count; nth++)
        if (!is_allowed(mask, logits.tokens ? logits.tokens[nth] : nth)) logits.values[nth] = -INFINITY;
}

void exclude(const RowLogits& logits, int64_t token) {
    if (float* logit = logits.find(token)) *logit = -INFINITY;
}

// Excludes the tokens that complete a word after the answer: `recent`, then the tokens of this run.
void mask_words(const RowLogits& logits, const D3LogitMask& mask, const D3Run& run, int row, int taken) {
    for (int64_t node = 0, back = 1;; back++) {
        for (int64_t i = mask.first_bans[node]; i < mask.first_bans[node + 1]; i++) exclude(logits, mask.bans[i]);
        if (back > mask.num_recent + taken) return;
        const int64_t token =
            back <= taken ? run.chosen[(taken - back) * run.rows + row] : mask.recent[mask.num_recent + taken - back];
        const int64_t* end = mask.edges + mask.first_edges[node + 1];
        const int64_t* edge = std::lower_bound(mask.edges + mask.first_edges[node], end, token);
        if (edge == end || *edge != token) return;
        node = edge - mask.edges + 1;
    }
}

void apply_penalties(const RowLogits& logits, const D3Sampling& asked) {
    for (int64_t i = 0; i < asked.token_counts->used; i++) {
        float* place = logits.find(asked.token_counts->tokens[i]);
        if (!place) continue;
        float& logit = *place;
        const float often = float(asked.token_counts->counts[i]);
        const float repeated = logit > 0 ? logit / asked.repetition : logit * asked.repetition;
        logit = repeated - (asked.frequency * often + asked.presence * (often > 0 ? 1.0f : 0.0f));
    }
}

// Larger for likelier tokens, and of equal scores for the lower token.
uint64_t sort_key(float score, int token) {
    uint32_t bits;
    score += 0.0f;  // turns -0 into 0
    memcpy(&bits, &score, sizeof bits);
    bits = bits >> 31 ? ~bits : bits | 0x80000000u;
    return uint64_t(bits) << 32 | uint32_t(~token);
}

int token_of_key(uint64_t key) { return int(~uint32_t(key)); }

// The probability relative to the likeliest token's, in units of 2^-40: integer sums do not depend on their order.
uint64_t weight_of(float score, float highest) { return uint64_t(std::exp(score - highest) * 0x1p40f); }

// How many of the likeliest tokens have the share `top_p`; sorts these.
size_t count_top_p(std::vector<uint64_t>& order, const float* scores, float highest, float top_p) {
    uint64_t total = 0, sum = 0;
    for (uint64_t key : order) total += weight_of(scores[token_of_key(key)], highest);
    const auto target = std::max<uint64_t>(uint64_t(std::ceil(double(total) * double(top_p))), 1);
    size_t sorted = 0;
    for (size_t kept = 0; kept < order.size(); kept++) {
        if (kept == sorted) {  // usually few are enough, so sort only some
            const size_t next = std::min(order.size(), std::max<size_t>(64, 4 * sorted));
            std::partial_sort(order.begin() + sorted, order.begin() + next, order.end(), std::greater<uint64_t>());
            sorted = next;
        }
        sum += weight_of(scores[token_of_key(order[kept])], highest);
        if (sum >= target) return kept + 1;
    }
    return order.size();
}

void mask_below_threshold(float* scores, int vocab, const D3Sampling& asked, std::vector<uint64_t>& order) {
    float highest = -INFINITY;
    for (int token = 0; token < vocab; token++) {
        if (std::isnan(scores[token])) return;  // NaN wins anyway, and ends the row
        highest = std::max(highest, scores[token]);
    }
    if (std::isinf(highest)) return;
    const float floor = highest + asked.log_min_p;
    order.clear();
    for (int token = 0; token < vocab; token++)
        if (scores[token] >= floor && scores[token] != -INFINITY) order.push_back(sort_key(scores[token], token));
    if (asked.top_k > 0 && size_t(asked.top_k) < order.size()) {
        std::nth_element(order.begin(), order.begin() + (asked.top_k - 1), order.end(), std::greater<uint64_t>());
        order.resize(asked.top_k);
    }
    if (asked.top_p < 1) order.resize(count_top_p(order, scores, highest, asked.top_p));
    const uint64_t last = *std::min_element(order.begin(), order.end());
    for (int token = 0; token < vocab; token++)
        if (sort_key(scores[token], token) < last) scores[token] = -INFINITY;
}

}  // namespace

Best Best::none() { return {-INFINITY, INT64_MAX}; }

void Best::update(float other, int64_t of) {
    if (std::isnan(score) || std::isnan(other)) {
        const bool wins = std::isnan(other) && (!std::isnan(score) || of < token);
        if (wins) score = other, token = of;
    } else if (other > score || (other == score && of < token)) {
        score = other, token = of;
    }
}

void update_best(Best& best, const float* logits, int64_t first, int count_token, const DrawParams& how) {
    if (how.temperature == 0.0f) {
        for (int i = 0; i < count_token; i++)
            if (!(logits[i] < best.score)) best.update(logits[i], first + i);
        return;
    }
    for (int group = 0; group < count_token; group += 4) {
        const int some = count_token - group < 4 ? count_token - group : 4;
        float scores[4];
        bool hopeless = true;  // no noise could make one of these the best
        for (int i = 0; i < some; i++) {
            scores[i] = logits[group + i] / how.temperature;
            hopeless &= scores[i] + MAX_NOISE < best.score;
        }
        if (hopeless) continue;
        uint32_t words[4] = {uint32_t((first + group) / 4), how.step, how.index, 0};
        philox(how.seed, words);
        for (int i = 0; i < some; i++) best.update(scores[i] + gumbel(words[i]), first + group + i);
    }
}

void update_best_of(Best& best, const float* logits, const int64_t* tokens, int count, const DrawParams& how) {
    for (int i = 0; i < count; i++) {
        if (how.temperature == 0.0f) {
            if (!(logits[i] < best.score)) best.update(logits[i], tokens[i]);
            continue;
        }
        const float score = logits[i] / how.temperature;
        if (score + MAX_NOISE < best.score) continue;
        uint32_t words[4] = {uint32_t(tokens[i] / 4), how.step, how.index, 0};
        philox(how.seed, words);
        best.update(score + gumbel(words[tokens[i] % 4]), tokens[i]);
    }
}

void Mass::update(const float* logits, int count, float temperature) {
    constexpr float NEGLIGIBLE = 16;  // exp(-16) of 100,000 tokens are 0.01
    const float scale = temperature == 0.0f ? 1.0f : 1 / temperature;
    Mass own;
    for (int i = 0; i < count; i++) own.highest = std::max(own.highest, logits[i] * scale);
    for (int i = 0; i < count; i++)
        if (const float below = logits[i] * scale - own.highest; below > -NEGLIGIBLE) own.sum += std::exp(below);
    update(own);
}

void Mass::update(const Mass& other) {
    if (other.sum == 0) return;
    const float top = std::max(highest, other.highest);
    sum = sum * std::exp(highest - top) + other.sum * std::exp(other.highest - top);
    highest = top;
}

bool is_valid_logit_mask(const D3LogitMask& mask, int vocab) {
    const auto are_tokens = [&](const int64_t* tokens, int64_t count_token) {
        return std::all_of(tokens, tokens + count_token, [&](int64_t token) { return token >= 0 && token < vocab; });
    };
    if (!are_tokens(mask.biased, mask.num_biased) || !are_tokens(mask.banned, mask.num_banned)) return false;
    return are_tokens(mask.bans, mask.num_bans);
}

float* RowLogits::find(int64_t token) const {
    if (!tokens) return values + token;
    const int64_t* found = std::lower_bound(tokens, tokens + count, token);
    return found != tokens + count && *found == token ? values + (found - tokens) : nullptr;
}

void apply_logit_mask(const RowLogits& logits, const D3LogitMask& mask, const uint8_t* grammar, const D3Run& run,
                      int row, int taken) {
    for (int64_t i = 0; i < mask.num_biased; i++)
        if (float* logit = logits.find(mask.biased[i])) *logit += mask.biases[i];
    if (mask.allowed) mask_tokens(logits, mask.allowed);
    if (run.generation[row] + taken < mask.banned_until)
        for (int64_t i = 0; i < mask.num_banned; i++) exclude(logits, mask.banned[i]);
    if (mask.num_bans) mask_words(logits, mask, run, row, taken);
    if (grammar) mask_tokens(logits, grammar);
    if (mask.also_allowed) mask_tokens(logits, mask.also_allowed);
}

Best sample(const RowLogits& row, const D3Sampling& asked, const DrawParams& how, std::vector<uint64_t>& order) {
    if (asked.token_counts) apply_penalties(row, asked);
    float* logits = row.values;
    const int64_t* tokens = row.tokens;
    const int count = row.count;
    DrawParams rest = how;
    if (how.temperature != 0 && (asked.log_min_p > -INFINITY || asked.top_k > 0 || asked.top_p < 1)) {
        for (int nth = 0; nth < count; nth++) logits[nth] /= how.temperature;
        rest.temperature = 1;
        mask_below_threshold(logits, count, asked, order);
    }
    Best best = Best::none();
    if (tokens) update_best_of(best, logits, tokens, count, rest);
    else update_best(best, logits, 0, count, rest);
    return best;
}

void count_token(const D3Sampling& asked, int taken, int64_t token) {
    // A repeated step counts its token once.
    if (!asked.token_counts || asked.token_counts->steps >= taken) return;
    D3TokenCounts& token_counts = *asked.token_counts;
    token_counts.steps = taken;
    for (int64_t i = 0; i < token_counts.used; i++)
        if (token_counts.tokens[i] == token) {
            token_counts.counts[i]++;
            return;
        }
    token_counts.tokens[token_counts.used] = token;
    token_counts.counts[token_counts.used++] = 1;
}
