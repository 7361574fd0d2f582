#include "speculation/draft_costs.h"

namespace {

constexpr double FORGET = 0.98;       // a judged token weighs half as much 34 tokens later
constexpr double PRIOR_WEIGHT = 4;    // tokens that the first guess of a bin counts for
constexpr double NEW_WEIGHT = 0.05;   // of a measured time, or gain
constexpr double OUTLIER = 1.1;       // a step that another process interrupts counts for no more than this
constexpr double EDGES[] = {0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995, 0.999};
constexpr int NUM_EDGES = sizeof EDGES / sizeof *EDGES;
static_assert(NUM_EDGES < D3_CONFIDENCE_BINS);

// A first guess, before any token was judged.
double first_guess(D3Drafter drafter, int bin) {
    if (drafter == D3_LOOKUP) return (bin + 1.0) / (bin + 3.0);
    return ((bin ? EDGES[bin - 1] : 0) + (bin < NUM_EDGES ? EDGES[bin] : 1)) / 2;
}

}  // namespace

double DraftCosts::seconds(const double* of_rows, int64_t rows) {
    if (rows <= D3_COST_ROWS) return of_rows[rows];
    const double slope = (of_rows[D3_COST_ROWS] - of_rows[D3_COST_ROWS / 2]) / (D3_COST_ROWS - D3_COST_ROWS / 2);
    return of_rows[D3_COST_ROWS] + slope * double(rows - D3_COST_ROWS);
}

double DraftCosts::one_more_row(int64_t rows) const {
    constexpr int64_t AHEAD = 3;
    return std::max(verify(rows + AHEAD) - verify(rows), 0.0) / AHEAD;
}

int DraftCosts::bin_of_confidence(double confidence) {
    return int(std::upper_bound(EDGES, EDGES + NUM_EDGES, confidence) - EDGES);
}

double DraftCosts::chance(D3Drafter drafter, int bin) const {
    const int of = drafter == D3_LOOKUP;
    return (known_.right[of][bin] + PRIOR_WEIGHT * first_guess(drafter, bin)) / (known_.judged[of][bin] + PRIOR_WEIGHT);
}

double DraftCosts::mean_chance() const {
    return (known_.model_right + PRIOR_WEIGHT * 0.75) / (known_.model_judged + PRIOR_WEIGHT);
}

DraftCosts::Plan DraftCosts::best_plan(double chance, int64_t most, int64_t rows, double each, double first) const {
    double tokens = double(rows), all_right = 1;
    const double plain = tokens / verify(rows);
    Plan best = {0, plain};
    for (int64_t count = 1; count <= most; count++) {
        tokens += double(rows) * (all_right *= chance);
        const double drafting = double(rows) * (each * double(count) + first);
        const double rate = tokens / (verify(rows * (count + 1)) + drafting);
        if (rate > std::max(best.rate, least_gain(rows) * plain)) best = {count, rate};
    }
    return best;
}

void DraftCosts::judge(D3Drafter drafter, int bin, bool right) {
    const int of = drafter == D3_LOOKUP;
    known_.right[of][bin] = known_.right[of][bin] * FORGET + right;
    known_.judged[of][bin] = known_.judged[of][bin] * FORGET + 1;
    if (drafter != D3_DRAFT_MODEL) return;
    known_.model_right = known_.model_right * FORGET + right;
    known_.model_judged = known_.model_judged * FORGET + 1;
}

void DraftCosts::time(double* of_rows, int64_t rows, double taken) {
    if (rows < 1 || rows > D3_COST_ROWS || of_rows[rows] <= 0) return;
    const double mean = of_rows[rows] += NEW_WEIGHT * (std::min(taken, of_rows[rows] * OUTLIER) - of_rows[rows]);
    // A step of fewer rows takes no longer, and one of more is no faster: what seems so was timed at another hour.
    for (int64_t fewer = 1; fewer < rows; fewer++) of_rows[fewer] = std::min(of_rows[fewer], mean);
    for (int64_t more = rows + 1; more <= D3_COST_ROWS; more++) of_rows[more] = std::max(of_rows[more], mean);
}

void DraftCosts::time_mask(double taken) {
    known_.mask += (known_.mask > 0 ? NEW_WEIGHT : 1.0) * (taken - known_.mask);
}

void DraftCosts::count_iteration(int64_t rows, int64_t tokens, double taken, bool drafted) {
    const double gain = double(tokens) / std::max(taken, 1e-9) * verify(rows) / double(rows);
    known_.gain += NEW_WEIGHT * (std::min(gain, double(D3_COST_ROWS)) - known_.gain);
    known_.idle = drafted ? 0 : known_.idle + 1;
}
