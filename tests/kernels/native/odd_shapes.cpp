// Decodes models of odd shapes with every instruction set of this machine. Each must agree with the portable code, and
// find the same bits for the rows of a smaller batch. Tensors have no spare bytes: built with sanitizers or with
// guard_pages.cpp, a read or write out of bounds ends the program. Prints the instruction sets, best first, and the
// number of cases.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <random>
#include <utility>
#include <vector>

#include "abi.h"
#include "isa/kernels.h"

namespace {

struct Sizes {
    int hidden, intermediate, heads, kv_heads, head_dim, vocab, block_size, rows;
};

std::mt19937 numbers(1);

std::vector<float> floats(size_t count, float size = 0.3f) {
    std::vector<float> made(count);
    for (float& value : made) value = size * (float(numbers() >> 8) * 0x1p-22f - 2.0f);  // from -2 to 2 times `size`
    return made;
}

const float* data_or_null(const std::vector<float>& floats) { return floats.empty() ? nullptr : floats.data(); }

// Any of the 8-bit floats that are numbers.
uint8_t any_e4m3() { return numbers() % 127 | numbers() % 2 << 7; }

// A matrix of any kind in memory of its own, to the byte.
struct Matrix {
    std::unique_ptr<char[]> values;
    std::vector<float> scales, bias;
    std::vector<int64_t> starts;
    std::vector<int32_t> at_columns;
    std::vector<uint16_t> outliers;
    D3Matrix view;

    Matrix(int kind, int rows, int columns, bool with_bias) {
        const int groups = (columns + 127) / 128;
        const int of_kind[] = {columns * 4, columns * 2, columns, columns, columns, groups * 64,
                               (columns + 63) / 64 * 96, 0, 0, columns * 2, columns * 2};
        const BlockSize block = block_size(kind);
        const size_t row = block.columns ? columns / block.columns * block.bytes : of_kind[kind];
        const bool is_bfloat16 = kind == D3_BFLOAT16 || kind == D3_BFLOAT16_PAIRS;
        values.reset(new char[rows * row]);
        std::vector<float> wide = floats(size_t(rows) * columns);
        for (size_t i = 0; i < rows * row; i++) {
            // The upper bytes of small floats, or any bytes of integers.
            if (kind == D3_FLOAT32) values[i] = reinterpret_cast<char*>(wide.data())[i];
            else if (is_bfloat16) values[i] = reinterpret_cast<char*>(wide.data())[i / 2 * 4 + 2 + i % 2];
            else if (kind == D3_FLOAT16) values[i] = char(i % 2 ? 0x24 | (numbers() & 0x83) : numbers());  // small
            else if (kind == D3_FP8 || kind == D3_FP8_GROUPS) values[i] = any_e4m3();
            else values[i] = char(block.columns ? numbers() & 0x2b : numbers());  // any scale of a block is finite
        }
        if (kind == D3_INT8) scales = floats(rows, 0.01f);
        if (kind == D3_FP8) scales = floats(rows, 0.003f);
        if (kind == D3_FP8_GROUPS) scales = floats(size_t(rows) * groups, 0.003f);
        if (kind == D3_INT4) scales = floats(size_t(rows) * groups, 0.1f);
        if (with_bias) bias = floats(rows);
        view = {kind, rows, columns, values.get(), data_or_null(scales), data_or_null(bias), {}, nullptr, nullptr};
        if (kind == D3_BF12) add_outliers();
    }

    // Every other row has an outlier in its last column; codes up to 2^-1 keep any bytes finite.
    void add_outliers() {
        starts = {0};
        for (int row = 0; row < view.rows; row++) {
            if (row % 2) at_columns.push_back(view.columns - 1), outliers.push_back(uint16_t(0x3d00 + row));
            starts.push_back(int64_t(outliers.size()));
        }
        view.bf12 = {111, starts.data(), at_columns.data(), outliers.data()};
    }

    // Leaves only the biases of the rows from `first` on, of int4 or float matrices.
    void zero_rows(int first) {
        const bool has_16_bits = view.kind == D3_BFLOAT16 || view.kind == D3_FLOAT16 || view.kind == D3_BFLOAT16_PAIRS;
        const size_t groups = scales.size() / view.rows, row = has_16_bits ? view.columns * 2 : 0;
        std::fill(scales.begin() + first * groups, scales.end(), 0.0f);
        memset(values.get() + first * row, 0, (view.rows - first) * row);
    }
};

// The same with sixteen rows interleaved; unchanged if the rows do not fill groups of 16, or for another kind.
struct Interleaved {
    static constexpr std::align_val_t LINE{64};
    struct Release { void operator()(char* bytes) const { operator delete[](bytes, LINE); } };
    std::unique_ptr<char[], Release> values;
    std::vector<float> scales;
    D3Matrix view;

    explicit Interleaved(const D3Matrix& of, int isa) : view(of) {
        if (is_in_blocks(of.kind) && of.rows % 32 == 0) {
            view.kind = of.kind + D3_Q4_0X16 - D3_Q4_0;
            values.reset(static_cast<char*>(
                operator new[](size_t(of.rows) * d3_interleaved_bytes(of.kind, of.columns), LINE)));
            d3_interleave_blocks(&of, isa, 0, of.rows, values.get());
            view.values = values.get();
        }
        const bool is_int8 = of.kind == D3_INT8;
        if ((!is_int8 && of.kind != D3_INT4) || of.rows % 32) return;
        const int groups = (of.columns + 127) / 128, row = is_int8 ? (of.columns + 63) / 64 * 64 : groups * 64;
        const int given = is_int8 ? of.columns : row;
        const char* from = static_cast<const char*>(of.values);
        values.reset(static_cast<char*>(operator new[](size_t(of.rows) * row, LINE)));
        for (int n = 0; n < of.rows; n++)
            for (int i = 0; i < row; i++) {
                const char byte = i < given ? from[size_t(n) * given + i] : 0;
                values[size_t(n / 16 * 16) * row + i / 4 * 64 + n % 16 * 4 + i % 4] = is_int8 ? byte ^ char(128) : byte;
            }
        if (!is_int8) scales.resize(size_t(of.rows) * groups);
        for (int n = 0; !is_int8 && n < of.rows; n++)
            for (int group = 0; group < groups; group++)
                scales[size_t(n / 16 * groups + group) * 16 + n % 16] = of.scales[n * groups + group];
        view.kind = is_int8 ? D3_INT8X16 : D3_INT4X16, view.values = values.get();
        if (!is_int8) view.scales = scales.data();
    }
};

// A KV cache, of floats or of 8 bits with scales.
struct Pool {
    std::vector<float> floats, scales;
    std::vector<uint8_t> bytes;

    Pool(size_t count, int head_dim, bool has_8bit_kv) {
        if (!has_8bit_kv) floats = ::floats(count);
        else scales = ::floats(count / head_dim, 0.001f), bytes.resize(count);
        for (uint8_t& byte : bytes) byte = any_e4m3();
    }
    void* entries() { return floats.empty() ? static_cast<void*>(bytes.data()) : floats.data(); }
    float* scales_or_null() { return scales.empty() ? nullptr : scales.data(); }
};

// The results of a run.
struct Found {
    std::vector<int64_t> chosen;
    std::vector<float> scores, logits;
    Pool pool;

    Found(const Pool& before, int rows, int steps, int vocab)
        : chosen(rows * steps), scores(rows * steps), logits(size_t(rows) * steps * vocab), pool(before) {}
};

// A model, rows at random positions, and tables of blocks in random order.
class Case {
public:
    Case(const Sizes& sizes, int kind)
        : s(sizes), norm(floats(s.hidden)), head_norms(floats(2 * s.head_dim)),
          projection_norms(floats((s.heads + s.kv_heads) * s.head_dim)), bias(kind % 2) {
        const int queries = s.heads * s.head_dim, entries = s.kv_heads * s.head_dim;
        matrices.reserve(2 + 4 * LAYERS);
        auto matrix = [&](int of, int rows, int columns, bool with_bias) {
            return matrices.emplace_back(of, rows, columns, with_bias).view;
        };
        for (D3Layer& layer : layers) {
            layer.attention_norm = layer.mlp_norm = norm.data();
            layer.qkv = matrix(kind, queries + 2 * entries, s.hidden, bias);
            layer.output = matrix(kind, s.hidden, queries, bias);
            layer.gate_up = matrix(kind, 2 * s.intermediate, s.hidden, bias);
            layer.down = matrix(kind, s.hidden, s.intermediate, bias);
            layer.head_norms = kind == D3_INT8 ? head_norms.data() : nullptr;
            layer.rotations = &layer == layers ? rotations.data() : nullptr;
            layer.window = &layer == layers ? (kind % 2 ? 3 : 70) : INT32_MAX;
            // Norms behind the sublayers too, or only there and over whole projections.
            if (kind >= D3_FP8_GROUPS) layer.attention_post_norm = layer.mlp_post_norm = norm.data();
            if (kind == D3_BF12) layer.attention_norm = layer.mlp_norm = nullptr;
            if (kind == D3_BF12) layer.projection_norms = projection_norms.data();
        }
        add_maps(queries, entries);
        embedding = matrix(kind == D3_BFLOAT16 ? D3_BFLOAT16 : D3_FLOAT32, s.vocab, s.hidden, false);
        head = matrix(kind, s.vocab, s.hidden, false);
        // Other instruction sets round sums differently, which 8 bits may magnify: here keys and values are biases.
        for (int of = 0; bias && of < LAYERS; of++) matrices[4 * of].zero_rows(queries);
        for (int row = 0; row < s.rows; row++) {
            tokens[row] = numbers() % s.vocab, slots[row] = row, temperatures[row] = row % 2;
            positions[row] = row == 0 ? LENGTH - STEPS : numbers() % (LENGTH - STEPS + 1);
            for (int layer = 0; layer < LAYERS; layer++) cutoffs[row * LAYERS + layer] = 1 + numbers() % 5;
        }
        logit_mask.biased = tokens.data(), logit_mask.biases = temperatures.data(), logit_mask.num_biased = 1;
        logit_mask.allowed = all_tokens.data();
        logit_mask.banned = tokens.data(), logit_mask.num_banned = s.vocab > 2, logit_mask.banned_until = 2;
        // The word of token 0 and the last token of the vocabulary.
        logit_mask.edges = word, logit_mask.first_edges = s.vocab > 2 ? first_edges : no_edges;
        logit_mask.bans = word + 1, logit_mask.num_bans = 1;
        logit_mask.first_bans = s.vocab > 2 ? first_bans : no_edges;
        logit_mask.recent = word, logit_mask.num_recent = 1;
        for (int row = 0; row < s.rows; row++)
            sampling[row] = {-INFINITY, 1, 0, 1, 0, 0, nullptr, row % 3 ? &logit_mask : nullptr};
        for (int i = 0; i < count; i++) tables[i] = i + 1;
        std::shuffle(tables.begin(), tables.end(), numbers);
    }

    // All rows at once; then those of each half, which must find the same bits.
    Found decode(int isa, int threads, bool is_interleaved = false) const {
        Found found(pool, s.rows, STEPS, s.vocab);
        std::vector<Interleaved> repacked;
        repacked.reserve(1 + 4 * LAYERS);
        const auto matrix = [&](const D3Matrix& of) {
            return is_interleaved ? repacked.emplace_back(of, isa).view : of;
        };
        D3Layer own[LAYERS];
        for (int of = 0; of < LAYERS; of++) {
            own[of] = layers[of];
            for (D3Matrix* each : {&own[of].qkv, &own[of].output, &own[of].gate_up, &own[of].down})
                *each = matrix(*each);
        }
        D3Model model{LAYERS, s.hidden, s.intermediate, s.heads, s.kv_heads, s.head_dim, s.vocab, s.block_size, blocks,
                      count + 1, s.rows, LENGTH, std::max(s.rows, PROMPT), threads, isa, 1e-5f, 0.5f, embedding,
                      matrix(head), nullptr, 0, own, norm.data(), found.pool.entries(), found.pool.scales_or_null(),
                      D3_SILU, 1.0f, 0.0f, 0.0f};
        if (head.kind == D3_FLOAT16 || head.kind == D3_FP8_GROUPS)
            model.activation = D3_GELU_TANH, model.embedding_scale = 3, model.attention_cap = 2, model.logit_cap = 1.5f;
        D3Decoder *decoder = nullptr, *draft_model = nullptr;
        if (d3_create(&model, &decoder) != D3_OK) fail("no decoder", isa);
        Pool of_drafts = found.pool;
        D3Model second = model;
        second.pool = of_drafts.entries(), second.pool_scales = of_drafts.scales_or_null();
        std::vector<int64_t> head_tokens(s.vocab);
        for (int token = 0; token < s.vocab; token++) head_tokens[token] = token;
        second.head_tokens = head_tokens.data(), second.num_head_tokens = s.vocab;
        if (d3_create(&second, &draft_model) != D3_OK) fail("no decoder of drafts", isa);
        run(decoder, isa, found, 0, s.rows);
        follow(decoder, isa, found);
        for (float score : found.scores)
            if (!std::isfinite(score)) fail("a score that is not finite", isa);
        for (const auto& [start, stop] : {std::pair(0, s.rows / 2), std::pair(s.rows / 2, s.rows)}) {
            const int rows = stop - start;
            if (rows == 0) continue;
            Found some(found.pool, rows, STEPS, s.vocab);
            run(decoder, isa, some, start, rows);
            for (int step = 0; step < STEPS; step++) {
                const float* whole = &found.logits[size_t(step * s.rows + start) * s.vocab];
                const size_t part = size_t(rows) * s.vocab;
                if (memcmp(whole, &some.logits[step * part], part * sizeof(float))) fail("other bits in a batch", isa);
            }
        }
        const Pool kept = found.pool;
        prompt(decoder, isa);
        refuse_maps(decoder, isa, found);
        // The loop of drafts is the same for all kinds of blocks, which are most of the cases, and takes longest.
        if (!is_in_blocks(embedding.kind) || embedding.kind == D3_Q4_0) {
            speculate(decoder, isa);
            speculate_by_text(decoder, draft_model, isa);
        }
        std::copy(kept.floats.begin(), kept.floats.end(), found.pool.floats.begin());
        std::copy(kept.scales.begin(), kept.scales.end(), found.pool.scales.begin());
        std::copy(kept.bytes.begin(), kept.bytes.end(), found.pool.bytes.begin());
        int32_t control[2] = {0, 0};
        Found again(found.pool, s.rows, STEPS, s.vocab);
        const D3Run followed = run_of(again, 0, s.rows, control);
        if (d3_begin(decoder, &followed) != D3_OK || d3_await(decoder, 1) != D3_OK) fail("a run not followed", isa);
        d3_destroy(decoder);  // in the middle of the run
        d3_destroy(draft_model);
        return found;
    }

    // Ends the program unless `other`, of the instruction set `isa`, equals `found` but for rounding.
    void compare(const Found& found, const Found& other, int isa) const {
        if (found.chosen != other.chosen) fail("other tokens", isa);
        compare_rows(found.logits, other.logits, s.vocab, isa);
        compare_rows(found.pool.floats, other.pool.floats, s.head_dim, isa);
        if (found.pool.bytes != other.pool.bytes || found.pool.scales != other.pool.scales) fail("other entries", isa);
    }

private:
    static constexpr int LAYERS = 2, STEPS = 3, LENGTH = 4 * 64 + 5, PROMPT = 58;

    [[noreturn]] void fail(const char* what, int isa) const {
        std::fprintf(stderr, "%s: %s, kind %d, hidden %d\n", d3_isa_name(isa), what, head.kind, s.hidden);
        std::exit(1);
    }

    void run(D3Decoder* decoder, int isa, Found& found, int start, int rows) const {
        int32_t control[2] = {0, 0};
        const D3Run run = run_of(found, start, rows, control);
        if (d3_run(decoder, &run) != D3_OK) fail("a run that was refused", isa);
    }

    // All rows again in the background, while this thread waits for the first step, then for all that are done.
    void follow(D3Decoder* decoder, int isa, Found& found) const {
        int32_t control[2] = {0, 0};
        const D3Run run = run_of(found, 0, s.rows, control);
        const std::vector<int64_t> tokens = found.chosen;
        if (d3_begin(decoder, &run) != D3_OK) fail("a run that does not begin", isa);
        for (int32_t taken = 0, done = 1; taken < STEPS; taken = done) {
            const int status = taken ? d3_gather(decoder, taken + 1, &done) : d3_await(decoder, done);
            if (status != D3_OK || done <= taken || done > STEPS) fail("a step that does not come", isa);
            const int first = taken * s.rows, stop = done * s.rows;
            if (memcmp(&tokens[first], &found.chosen[first], (stop - first) * sizeof(int64_t)))
                fail("other tokens in a run that is followed", isa);
        }
        d3_finish(decoder);
    }

    D3Run run_of(Found& found, int start, int rows, int32_t* control) const {
        D3Run run{};
        run.rows = rows, run.steps = STEPS;
        run.tokens = &tokens[start], run.positions = &positions[start], run.generation = &generation[start];
        run.slots = &slots[start], run.cutoffs = &cutoffs[start * LAYERS], run.tables = tables.data();
        run.temperatures = &temperatures[start], run.seeds = &seeds[start], run.indices = &indices[start];
        run.chosen = found.chosen.data(), run.scores = found.scores.data(), run.logits = found.logits.data();
        run.control = control, run.sampling = &sampling[start], run.adapters = &adapters[start];
        return run;
    }

    // An adapter for some of the rows, with maps of every kind of values and several ranks. Keys and values of an 8-bit
    // cache have none: see above.
    void add_maps(int queries, int entries) {
        const int sizes[D3_LAYER_MAPS][2] = {{s.hidden, queries}, {s.hidden, entries}, {s.hidden, entries},
                                             {queries, s.hidden}, {s.hidden, s.intermediate},
                                             {s.hidden, s.intermediate}, {s.intermediate, s.hidden}};
        const int kinds[] = {D3_FLOAT32, D3_BFLOAT16, D3_FLOAT16}, ranks[] = {1, 5, 16};
        const auto add = [&](int columns, int outputs, int nth) {
            const int kind = kinds[nth % 3], rank = ranks[nth / 2 % 3], stride = (columns + 15) / 16 * 16;
            const int up_stride = (outputs + 15) / 16 * 16 + 16;
            of_maps.emplace_back(kind, rank, stride, false), of_maps.emplace_back(kind, rank, up_stride, false);
            const Matrix *down = &of_maps[of_maps.size() - 2], *up = &of_maps.back();
            maps.push_back({kind, rank, columns, outputs, stride, up_stride, down->view.values, up->view.values});
        };
        of_maps.reserve(2 * (LAYERS * D3_LAYER_MAPS + 1));
        for (int nth = 0; nth < LAYERS * D3_LAYER_MAPS; nth++) {
            const int map = nth % D3_LAYER_MAPS;
            const bool is_left_out = nth % 5 == 4 || (bias && (map == D3_MAP_K || map == D3_MAP_V));
            if (is_left_out) maps.push_back({});
            else add(sizes[map][0], sizes[map][1], nth);
        }
        add(s.hidden, s.vocab, 1);
        for (int row = 0; row < s.rows; row++) adapters[row] = row % 3 == 1 ? maps.data() : nullptr;
    }

    // Rows of the first sequence in one chunk of many rows, and in two of fewer. With one kind of weights they are the
    // sequence's last rows, with all others its first: attention does not depend on the kind.
    void prompt(D3Decoder* decoder, int isa) const {
        const int chunks[][2] = {{0, PROMPT}, {0, 21}, {21, PROMPT}};
        std::vector<int64_t> ids(PROMPT), places(PROMPT), zeros(PROMPT), chosen(PROMPT);
        std::vector<int32_t> all(PROMPT * LAYERS, 1);
        const std::vector<const D3LowRank*> own(PROMPT, maps.data());
        std::vector<float> scores(PROMPT), whole(size_t(PROMPT) * s.vocab), parts(whole);
        const int before = head.kind == D3_FLOAT32 ? LENGTH - PROMPT : 0;
        for (int row = 0; row < PROMPT; row++) ids[row] = row % s.vocab, places[row] = before + row;
        for (const auto& [start, stop] : chunks) {
            D3Run run{};
            run.rows = stop - start, run.steps = 1;
            run.tokens = &ids[start], run.positions = &places[start], run.generation = run.slots = zeros.data();
            run.cutoffs = all.data(), run.tables = tables.data();
            run.chosen = chosen.data(), run.scores = scores.data();
            run.logits = (stop - start == PROMPT ? whole : parts).data() + size_t(start) * s.vocab;
            run.adapters = &own[start];
            if (d3_run(decoder, &run) != D3_OK) fail("a prompt that was refused", isa);
        }
        if (memcmp(whole.data(), parts.data(), whole.size() * sizeof(float))) fail("other bits in a chunk", isa);
        if (!std::all_of(whole.begin(), whole.end(), [](float logit) { return std::isfinite(logit); }))
            fail("a prompt's logit that is not finite", isa);
    }

    // All rows draft and verify until their answers are full, in one call and again in the background.
    void speculate(D3Decoder* decoder, int isa) const {
        const int most = STEPS - 1;
        std::vector<int64_t> lengths = numbers_for_rows(most), rooms = numbers_for_rows(STEPS), places = lengths;
        std::vector<int64_t> drafted(STEPS * s.rows * most, -1), none = drafted;
        std::vector<int64_t> counts(STEPS * s.rows * D3_LOOP_COUNTS);
        std::vector<float> states(size_t(s.rows) * most * s.hidden);
        for (int row = 0; row < s.rows; row++) places[row] = row % 4 ? row * most : -1;
        int32_t control[2] = {0, 0}, taken = 0;
        D3SpeculativeLoop asked{};
        asked.rows = s.rows, asked.iterations = STEPS, asked.most = most;
        asked.tokens = tokens.data(), asked.positions = positions.data(), asked.generation = generation.data();
        asked.slots = slots.data(), asked.cutoffs = cutoffs.data(), asked.tables = tables.data();
        asked.begun = none.data(), asked.num_begun = indices.data(), asked.first_lengths = lengths.data();
        asked.lengths = asked.most_lengths = asked.adapts = lengths.data(), asked.rooms = rooms.data();
        asked.ends = tokens.data(), asked.most_ends = 1;
        asked.states = states.data(), asked.num_states = s.rows * most, asked.places = places.data();
        asked.drafted = drafted.data(), asked.counts = counts.data(), asked.control = control, asked.taken = &taken;
        asked.adapters = adapters.data();
        if (d3_run_speculative_loop(decoder, &asked) != D3_OK) fail("iterations that were refused", isa);
        const std::vector<int64_t> found(counts.begin(), counts.begin() + taken * s.rows * D3_LOOP_COUNTS);
        if (d3_begin_speculative_loop(decoder, &asked) != D3_OK) fail("iterations that do not begin", isa);
        if (d3_await(decoder, taken) != D3_OK) fail("an iteration that does not come", isa);
        d3_finish(decoder);
        if (!std::equal(found.begin(), found.end(), counts.begin())) fail("other iterations in the background", isa);
    }

    // The same by a draft model, by lookups and by both, for as many tokens as pay.
    void speculate_by_text(D3Decoder* decoder, D3Decoder* draft_model, int isa) const {
        const int most = STEPS - 1;
        std::vector<int64_t> lengths = numbers_for_rows(most), rooms = numbers_for_rows(STEPS);
        std::vector<int64_t> nowhere = numbers_for_rows(-1), adapts = numbers_for_rows(0);
        std::vector<int64_t> drafters = adapts, computed = adapts;
        const int64_t room = *std::max_element(positions.begin(), positions.end()) + STEPS + 1;
        std::vector<int64_t> texts(s.rows * room), history = {0, s.vocab - 1, -1, 0, 0};
        for (int row = 0; row < s.rows; row++) {
            drafters[row] = 1 + row % 3, computed[row] = std::min<int64_t>(positions[row], row % 2 * 3);
            for (int64_t at = 0; at <= positions[row]; at++) texts[row * room + at] = (at % 3) % s.vocab;
            texts[row * room + positions[row]] = tokens[row];
        }
        std::vector<int64_t> drafted(STEPS * s.rows * most, -1), none = drafted;
        std::vector<int64_t> counts(STEPS * s.rows * D3_LOOP_COUNTS);
        std::vector<float> logits(size_t(STEPS) * s.rows * (most + 1) * s.vocab), stops(s.rows, 0.01f);
        std::vector<float> states(s.hidden);
        const std::vector<uint8_t> reports(s.rows, 1);
        std::vector<D3Sampling> cuts(s.rows, {-INFINITY, 0.9f, 3, 1, 0, 0, nullptr, nullptr});
        static std::vector<uint8_t> mask;  // a grammar that ends after three tokens
        mask = all_tokens;
        D3LogitMask grammar = logit_mask;
        grammar.has_grammar = true;
        int64_t seen = s.vocab - 1;
        int32_t seen_count = 2;
        D3TokenCounts token_counts{&seen, &seen_count, 1, 0};
        for (int row = 0; row < s.rows; row++) {
            cuts[row].repetition = 1.1f, cuts[row].token_counts = row % 2 ? &token_counts : nullptr;
            cuts[row].logit_mask = row % 3 == 2 ? &grammar : row % 3 ? &logit_mask : nullptr;
        }
        D3DraftCosts costs{};
        for (int rows = 1; rows <= D3_COST_ROWS; rows++) costs.verify[rows] = 1, costs.draft[rows] = 0.01;
        int32_t taken = 0;
        D3SpeculativeLoop asked{};
        asked.rows = s.rows, asked.iterations = STEPS, asked.most = most;
        asked.tokens = tokens.data(), asked.positions = positions.data(), asked.generation = generation.data();
        asked.slots = slots.data(), asked.cutoffs = cutoffs.data(), asked.tables = tables.data();
        asked.begun = none.data(), asked.num_begun = adapts.data(), asked.first_lengths = lengths.data();
        asked.lengths = asked.most_lengths = lengths.data(), asked.adapts = adapts.data(), asked.rooms = rooms.data();
        asked.states = states.data(), asked.num_states = 1, asked.places = nowhere.data();
        asked.drafted = drafted.data(), asked.counts = counts.data(), asked.taken = &taken;
        asked.temperatures = temperatures.data(), asked.seeds = seeds.data(), asked.indices = indices.data();
        asked.sampling = cuts.data();
        asked.texts = texts.data(), asked.text_room = room, asked.drafters = drafters.data();
        asked.draft_model = draft_model, asked.draft_tables = tables.data(), asked.draft_positions = computed.data();
        asked.history = history.data(), asked.history_length = int64_t(history.size());
        asked.adapters = adapters.data();
        asked.grammar = [](int32_t, const int64_t*, int64_t added, int64_t drafted) -> const uint8_t* {
            return added + drafted < 3 ? mask.data() : nullptr;
        };
        asked.stops = stops.data(), asked.costs = &costs, asked.logits = logits.data(), asked.reports = reports.data();
        if (d3_run_speculative_loop(decoder, &asked) != D3_OK) fail("drafts by text that were refused", isa);
        for (int row = 0; row < s.rows; row++)
            if (counts[row * D3_LOOP_COUNTS] > most) fail("a draft longer than the longest", isa);
        for (int row = 2; row < s.rows; row += 3)
            for (int nth = 0, count = 0; nth < taken; nth++) {
                const int64_t* found = &counts[(nth * s.rows + row) * D3_LOOP_COUNTS];
                if (found[0] >= 0) count += int(found[1]) + 1;
                if (count > 3) fail("a token behind the end of a grammar", isa);
            }
        asked.grammar = nullptr;
        if (s.rows > 2 && d3_run_speculative_loop(decoder, &asked) != D3_BAD_RUN)
            fail("a row without its grammar that was taken", isa);
        for (auto& cut : cuts) cut.logit_mask = nullptr;
        asked.text_room--;
        if (d3_run_speculative_loop(decoder, &asked) != D3_BAD_TEXT) fail("a text without room that was taken", isa);
    }

    // Adapters of other sizes, or ranks, than the model's are refused.
    void refuse_maps(D3Decoder* decoder, int isa, Found& found) const {
        for (int wrong = 0; wrong < 4; wrong++) {
            std::vector<D3LowRank> other = maps;
            D3LowRank& last = other.back();
            if (wrong == 0) last.rank = D3_MAX_RANK + 1;
            if (wrong == 1) last.columns++;
            if (wrong == 2) last.outputs++;
            if (wrong == 3) last.down_stride = s.hidden - 1;
            const std::vector<const D3LowRank*> own(s.rows, other.data());
            int32_t control[2] = {0, 0};
            D3Run run = run_of(found, 0, s.rows, control);
            run.adapters = own.data();
            if (d3_run(decoder, &run) != D3_BAD_MAP) fail("a map that was not refused", isa);
        }
    }

    // The difference of a row relative to its length: sums of thousands of products are rounded in another order.
    void compare_rows(const std::vector<float>& wanted, const std::vector<float>& found, int columns, int isa) const {
        for (size_t row = 0; row < wanted.size(); row += columns) {
            double apart = 0, length = 1e-12;
            for (int i = 0; i < columns; i++) {
                const double here = wanted[row + i], off = found[row + i] - here;
                apart += off * off, length += here * here;
            }
            if (!(apart <= 2e-5 * 2e-5 * length)) fail("other numbers than the portable code's", isa);
        }
    }

    const Sizes s;
    const int blocks = (LENGTH + s.block_size - 1) / s.block_size, count = s.rows * LAYERS * blocks;
    std::vector<Matrix> matrices;
    const std::vector<float> norm, head_norms, projection_norms, rotations = floats(size_t(LENGTH) * s.head_dim);
    const bool bias;  // and an 8-bit KV cache
    const Pool pool{size_t(count + 1) * 2 * s.block_size * s.kv_heads * s.head_dim, s.head_dim, bias};
    D3Layer layers[LAYERS]{};
    std::vector<Matrix> of_maps;
    std::vector<D3LowRank> maps;
    std::vector<const D3LowRank*> adapters = std::vector<const D3LowRank*>(s.rows);
    D3Matrix embedding, head;
    std::vector<int64_t> tokens = numbers_for_rows(0), positions = tokens, slots = tokens, indices = tokens;
    std::vector<int64_t> generation = numbers_for_rows(1), seeds = numbers_for_rows(-1);
    std::vector<float> temperatures = std::vector<float>(s.rows);
    const int64_t word[2] = {0, s.vocab - 1}, first_edges[3] = {0, 1, 1}, first_bans[3] = {0, 0, 1}, no_edges[3] = {};
    const std::vector<uint8_t> all_tokens = std::vector<uint8_t>((s.vocab + 7) / 8, 255);
    D3LogitMask logit_mask{};
    std::vector<D3Sampling> sampling = std::vector<D3Sampling>(s.rows);
    std::vector<int32_t> cutoffs = std::vector<int32_t>(s.rows * LAYERS), tables = std::vector<int32_t>(count);

    std::vector<int64_t> numbers_for_rows(int64_t number) const { return std::vector<int64_t>(s.rows, number); }
};

}  // namespace

int main() {
    const Sizes shapes[] = {
        {2, 1, 1, 1, 2, 1, 1, 1},          // the smallest
        {35, 51, 6, 2, 10, 131, 3, 5},  // no multiple of a vector
        {128, 160, 7, 1, 34, 40, 200, 2},  // one block, seven query heads per KV head
        {48, 130, 5, 1, 18, 17, 64, 11},  // more rows than a micro-tile has
    };
    const int portable = d3_num_isas() - 1;
    int cases = 0;
    for (int kind : {D3_FLOAT32, D3_BFLOAT16, D3_FLOAT16, D3_INT8, D3_FP8, D3_FP8_GROUPS, D3_INT4, D3_BF12})
        for (const Sizes& sizes : shapes) {
            const Case made(sizes, kind);
            const Found wanted = made.decode(portable, 1 + cases % 3);
            for (int isa = 0; isa < portable; isa++)
                for (int repacked = 0; d3_isa_runs_here(isa) && repacked <= d3_isa_reads_interleaved(isa); repacked++)
                    made.compare(wanted, made.decode(isa, 1 + (cases + isa) % 3, repacked), isa);
            cases++;
        }
    // Vectors that are rounded differ between instruction sets by more than sums do.
    for (const Sizes& sizes : {shapes[2], shapes[3]}) {
        const Case made(sizes, D3_BFLOAT16_PAIRS);
        for (int isa = 0; isa <= portable; isa++)
            if (d3_isa_runs_here(isa)) made.decode(isa, 1 + (cases + isa) % 3);
        cases++;
    }
    // Blocks fill their rows; directly with one to three rows, unpacked for prompts. Interleaved ones have other
    // numbers than the portable code's, whose vectors are floats.
    for (int kind = D3_Q4_0; is_in_blocks(kind); kind++, cases++) {
        const Case made({256, 256, 8, 2, 32, 64, 3, 3}, kind);
        for (int isa = 0; isa <= portable; isa++)
            for (int repacked = 0; d3_isa_runs_here(isa) && repacked <= d3_isa_reads_interleaved_blocks(isa);
                 repacked++)
                made.decode(isa, 1 + (cases + isa) % 3, repacked);
    }
    for (int isa = 0; isa <= portable; isa++)
        if (d3_isa_runs_here(isa)) std::printf("%s ", d3_isa_name(isa));
    std::printf("%d\n", cases);
}
