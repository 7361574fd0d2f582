// Memory for rows of floats.
#pragma once
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>

#include "isa/kernels.h"

// Floats that begin at a cache line, zeros at first. The system gives their pages when they are first touched, so that
// what is never needed costs nothing.
class Floats {
public:
    Floats() = default;
    explicit Floats(int64_t count) : memory_(std::calloc(count * sizeof(float) + LINE, 1)) {
        if (!memory_) throw std::bad_alloc();
        floats_ = reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(memory_.get()) + LINE - 1) / LINE * LINE);
    }
    float* at(int64_t index) const { return floats_ + index; }

private:
    static constexpr size_t LINE = 64;
    struct Free {
        void operator()(void* memory) const { std::free(memory); }
    };
    std::unique_ptr<void, Free> memory_;
    float* floats_ = nullptr;
};

// Rows of floats with zeros behind them: up to a whole group of int4, and some more, so that neighbouring rows do not
// fall onto the same lines of a cache.
class Rows {
public:
    Rows() = default;
    Rows(int rows, int columns)
        : stride_((columns + SCALE_GROUP - 1) / SCALE_GROUP * SCALE_GROUP + 16), floats_(int64_t(rows) * stride_) {}
    float* row(int index) const { return floats_.at(index * stride_); }
    int64_t stride() const { return stride_; }

private:
    int64_t stride_ = 0;
    Floats floats_;
};
