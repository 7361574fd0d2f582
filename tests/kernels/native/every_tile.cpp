// Thread pools of several sizes run jobs of several lengths, many of each. Reports a tile that did not run exactly
// once.
#include <atomic>
#include <cstdio>
#include <vector>

#include "threading/thread_pool.h"

int main() {
    const char weights[64] = {};
    Prefetcher({weights, 0, 64, 4, 0}, 0, 0).step();  // as seen while a job is published
    for (int size : {1, 2, 3, 9}) {
        ThreadPool threads(size);
        for (int count : {0, 1, 2, 3, 5, 8, 9, 10, 100, 70000})
            for (int job = 0; job < (count < 1000 ? 300 : 2); job++) {
                std::vector<std::atomic<int>> times(count);
                std::atomic<int> others{0};
                if (job % 2) threads.expect({reinterpret_cast<const char*>(times.data()), 0, 64, 4, 2});
                threads.parallel_for(count, [&](int worker, int tile) {
                    times[tile]++;
                    others += worker < 0 || worker >= size;
                });
                for (int tile = 0; tile < count; tile++)
                    if (times[tile] != 1 || others) {
                        std::fprintf(stderr, "pool of %d: tile %d of %d: %d times, %d by no thread of it\n", size,
                                     tile, count, times[tile].load(), others.load());
                        return 1;
                    }
            }
    }
    std::puts("each once");
}
