#include "sampling/choosing.h"

#include <cmath>

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
