// Decodes on models of odd shapes, whose tensors are exactly as large as they have to be: built with sanitizers, a read
// or a write beyond one of them ends the program. Prints how many runs there were.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <vector>

#include "abi.h"

namespace {

struct Sizes {
    int hidden, intermediate, heads, kv_heads, head_dim, vocab, block_size, rows;
};

std::mt19937 numbers(1);

std::vector<float> floats(size_t count, float size = 0.3f) {
    std::normal_distribution<float> normal(0.0f, size);
    std::vector<float> made(count);
    for (float& value : made) value = normal(numbers);
    return made;
}

const float* data_or_null(const std::vector<float>& floats) { return floats.empty() ? nullptr : floats.data(); }

// A matrix of any kind in memory of its own, bytes for bytes.
struct Matrix {
    std::unique_ptr<char[]> values;
    std::vector<float> scales, bias;
    D3Matrix view;

    Matrix(int kind, int rows, int columns, bool with_bias) {
        const int groups = (columns + 127) / 128;
        const int of_kind[] = {columns * 4, columns * 2, columns, groups * 64};
        const size_t row = of_kind[kind];
        values.reset(new char[rows * row]);
        std::vector<float> wide = floats(size_t(rows) * columns);
        for (size_t i = 0; i < rows * row; i++) {
            // The upper bytes of small floats, or any bytes at all where these are whole numbers.
            if (kind == D3_FLOAT32) values[i] = reinterpret_cast<char*>(wide.data())[i];
            else if (kind == D3_BFLOAT16) values[i] = reinterpret_cast<char*>(wide.data())[i / 2 * 4 + 2 + i % 2];
            else values[i] = char(numbers());
        }
        if (kind == D3_INT8) scales = floats(rows, 0.01f);
        if (kind == D3_INT4) scales = floats(size_t(rows) * groups, 0.1f);
        if (with_bias) bias = floats(rows);
        view = {kind, rows, columns, values.get(), data_or_null(scales), data_or_null(bias)};
    }
};

void decode(const Sizes& s, int kind, int isa, int threads) {
    const int layers = 2, steps = 3, length = 3 * 64 + 5, blocks = (length + s.block_size - 1) / s.block_size;
    const int queries = s.heads * s.head_dim, entries = s.kv_heads * s.head_dim, count = s.rows * layers * blocks;
    const bool bias = kind % 2;
    std::vector<Matrix> matrices;
    matrices.reserve(2 + 4 * layers);
    std::vector<float> norm = floats(s.hidden), head_norms = floats(2 * s.head_dim);
    std::vector<float> rotations = floats(size_t(length) * s.head_dim);
    std::vector<D3Layer> made(layers);
    for (D3Layer& layer : made) {
        auto matrix = [&](int rows, int columns) { return matrices.emplace_back(kind, rows, columns, bias).view; };
        layer.attention_norm = layer.mlp_norm = norm.data();
        layer.qkv = matrix(queries + 2 * entries, s.hidden);
        layer.output = matrix(s.hidden, queries);
        layer.gate_up = matrix(2 * s.intermediate, s.hidden);
        layer.down = matrix(s.hidden, s.intermediate);
        layer.head_norms = kind == D3_INT8 ? head_norms.data() : nullptr;
        layer.rotations = &layer == &made[0] ? rotations.data() : nullptr;
    }
    Matrix embedding(kind == D3_BFLOAT16 ? D3_BFLOAT16 : D3_FLOAT32, s.vocab, s.hidden, false);
    Matrix head(kind, s.vocab, s.hidden, false);
    std::vector<float> pool = floats(size_t(count + 1) * 2 * s.block_size * entries);
    D3Model model{layers, s.hidden, s.intermediate, s.heads, s.kv_heads, s.head_dim, s.vocab, s.block_size, blocks,
                  count + 1, s.rows, length, s.rows, threads, isa, 1e-5f, 0.5f, embedding.view, head.view, made.data(),
                  norm.data(), pool.data()};
    std::vector<int64_t> tokens(s.rows), positions(s.rows), generation(s.rows, 1), slots(s.rows);
    std::vector<int64_t> seeds(s.rows, -1), indices(s.rows);
    std::vector<int32_t> cutoffs(s.rows * layers), tables(count);
    std::vector<float> temperatures(s.rows), scores(s.rows * steps), logits(size_t(s.rows) * steps * s.vocab);
    std::vector<int64_t> chosen(s.rows * steps);
    for (int row = 0; row < s.rows; row++) {
        tokens[row] = numbers() % s.vocab, slots[row] = row, temperatures[row] = row % 2;
        positions[row] = row == 0 ? length - steps : numbers() % (length - steps + 1);
        for (int layer = 0; layer < layers; layer++) cutoffs[row * layers + layer] = 1 + numbers() % 5;
    }
    for (int i = 0; i < count; i++) tables[i] = i + 1;
    std::shuffle(tables.begin(), tables.end(), numbers);
    D3Run run{s.rows, steps, tokens.data(), positions.data(), generation.data(), slots.data(), cutoffs.data(),
              tables.data(), temperatures.data(), seeds.data(), indices.data(), chosen.data(), scores.data(),
              logits.data(), nullptr};
    D3Decoder* decoder = nullptr;
    if (d3_create(&model, &decoder) != D3_OK || d3_run(decoder, &run) != D3_OK) std::exit(2);
    d3_destroy(decoder);
    for (float score : scores)
        if (!std::isfinite(score)) std::exit(3);
}

}  // namespace

int main() {
    const Sizes shapes[] = {
        {2, 1, 1, 1, 2, 1, 1, 1},          // the smallest
        {35, 51, 6, 2, 10, 131, 3, 5},     // nothing a multiple of a vector
        {128, 160, 7, 1, 34, 40, 200, 2},  // one block, seven query heads to one of keys
        {48, 130, 5, 1, 18, 17, 64, 9},    // more rows than a tile has
    };
    int runs = 0;
    for (int isa = 0; isa < d3_num_isas(); isa++)
        for (int kind = D3_FLOAT32; d3_isa_runs_here(isa) && kind <= D3_INT4; kind++)
            for (const Sizes& sizes : shapes) decode(sizes, kind, isa, 1 + runs % 3), runs++;
    std::printf("%d runs\n", runs);
}
