// How long a draft should be, from the measured times of steps and from how often drafted tokens were right.
//
// A draft of k tokens yields 1 + a1 + ... + ak tokens on average, where ai is the probability that its first i tokens
// are right. It takes a step of k + 1 rows, and k steps of the draft model if that drafts. The loop drafts the number
// of tokens that yields most tokens per second, or none.
#pragma once
#include <algorithm>
#include <cstdint>

#include "types.h"

class DraftCosts {
public:
    explicit DraftCosts(D3DraftCosts& known) : known_(known) {}

    // Seconds of a step of `rows` rows at full depth with their masks, and of one of the draft model.
    double verify(int64_t rows) const {
        return seconds(known_.verify, rows) + mask_share_ * known_.mask * double(rows);
    }
    double draft(int64_t rows) const { return seconds(known_.draft, rows); }
    // Seconds by which a verification of `rows` rows grows with one more row, averaged over the next few: measured
    // times have steps, where rows share a reading of the weights.
    double one_more_row(int64_t rows) const;

    // How often a token is right that a lookup with such a match, or the draft model with such a confidence, proposed.
    double chance(D3Drafter drafter, int bin) const;
    static int bin_of_match(int64_t length) { return int(std::min<int64_t>(length, D3_CONFIDENCE_BINS) - 1); }
    static int bin_of_confidence(double confidence);
    // The mean of all tokens of the draft model.
    double mean_chance() const;

    // Drafts must promise this many times the tokens of a step without any: the more sequences, the more of a step is
    // arithmetic, and the less one timed at the start says of it.
    static double least_gain(int64_t rows) { return MIN_GAIN + 0.05 * double(std::min<int64_t>(rows - 1, 5)); }

    // The best length of a draft of up to `most` tokens, each right with probability `chance`, where each of `rows`
    // sequences has such a draft: a step takes little longer for the rows of one, and much longer for those of all. A
    // drafted token takes `each` seconds beside its row, the first one `first` more. And how many tokens per second
    // that yields.
    struct Plan {
        int64_t length;
        double rate;
    };
    Plan best_plan(double chance, int64_t most, int64_t rows, double each, double first) const;
    // Tokens per second that time should yield: what drafts achieve lately, but no less than a step without drafts.
    double rate(int64_t rows) const { return std::max(known_.gain, 1.0) * double(rows) / verify(rows); }

    // From now on this share of the rows of a step has a grammar, whose mask each of them needs.
    void set_mask_share(double share) { mask_share_ = share; }

    // Count a drafted token that was judged.
    void judge(D3Drafter drafter, int bin, bool right);
    // Take in the measured seconds of a step of `rows` rows.
    void time_verify(int64_t rows, double taken) { time(known_.verify, rows, taken); }
    void time_draft(int64_t rows, double taken) { time(known_.draft, rows, taken); }
    void time_mask(double taken);
    // Count an iteration of `rows` sequences that gave `tokens` tokens.
    void count_iteration(int64_t rows, int64_t tokens, double taken, bool drafted);
    // Whether to try a short draft although none pays: what was true of the text before may be so no longer. It takes
    // `seconds` before its first token.
    bool should_probe(int64_t rows, double seconds) const {
        return known_.idle >= PROBE_AFTER && seconds <= PROBE_SHARE * double(known_.idle) * verify(rows);
    }

private:
    static constexpr double MIN_GAIN = 1.08;  // what the numbers do not say: the host's work, and how sure they are
    static constexpr int64_t PROBE_AFTER = 64;     // a probe of two tokens then costs about one step in a hundred
    static constexpr double PROBE_SHARE = 0.01;    // of the time since the last draft
    static double seconds(const double* of_rows, int64_t rows);
    static void time(double* of_rows, int64_t rows, double taken);
    D3DraftCosts& known_;
    double mask_share_ = 0;
};
