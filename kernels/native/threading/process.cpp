#include "threading/process.h"

std::atomic<int> forks{0};

#if !defined(_WIN32)
namespace {
const int forks_are_counted = pthread_atfork(nullptr, nullptr, [] { forks.fetch_add(1, std::memory_order_relaxed); });
}  // namespace
#endif
