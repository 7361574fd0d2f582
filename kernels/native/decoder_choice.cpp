// How each row of a step chooses its token, and those choose that need all of their logits.
#include <cmath>

#include "decoder.h"
#include "sampling/rules.h"

Choosing D3Decoder::choosing(const Step& step, int row) const {
    const D3Run& run = step.run;
    if (!run.temperatures) return {0.0f, 0, 0, 0};
    return {run.temperatures[row], uint64_t(run.seeds[row]), uint32_t(run.indices[row]),
            uint32_t(run.generation[row] + step.taken)};
}

bool D3Decoder::needs_all(const D3Run& run, int row) const {
    if (!run.choices) return false;
    const D3Choice& asked = run.choices[row];
    const bool cuts = asked.log_min_p > -INFINITY || asked.top_k > 0 || asked.top_p < 1;
    return asked.counted || asked.rules || (cuts && run.temperatures[row] != 0);
}

// The rows that need all of their logits choose from them.
void D3Decoder::choose_from_all(const Step& step) {
    const D3Run& run = step.run;
    team_.each(int(active_.size()), [&](int worker, int nth) {
        const int row = active_[nth];
        if (!needs_all(run, row)) return;
        const D3Choice& asked = run.choices[row];
        if (step.taken) count(asked, step.taken, run.chosen[(step.taken - 1) * run.rows + row]);
        float* logits = collected_.at(int64_t(row) * model_.vocab);
        if (asked.rules) {
            const uint8_t* form = asked.rules->has_form ? forms_[row] : nullptr;
            restrict_logits(logits, model_.vocab, *asked.rules, form, run, row, step.taken);
        }
        best_[row] = sample(logits, model_.vocab, asked, choosing(step, row), orders_[worker]);
    });
}

// One after the other and by the leader alone: who is asked is a language that has one thread at a time.
void D3Decoder::ask_forms(const Step& step) {
    const D3Run& run = step.run;
    if (!run.choices || !run.form) return;
    forms_.assign(run.rows, nullptr);
    for (int row = 0; row < run.rows; row++) {
        const D3Rules* rules = run.choices[row].rules;
        if (!rules || !rules->has_form) continue;
        const int64_t token = step.taken ? run.chosen[(step.taken - 1) * run.rows + row] : -1;
        forms_[row] = run.form(row, step.taken, token);
        if (!forms_[row]) ended_[row] = true;
    }
}
