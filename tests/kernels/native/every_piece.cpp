// Teams of several sizes share jobs of several lengths, many of each. Says which piece was not carried out once.
#include <atomic>
#include <cstdio>
#include <vector>

#include "threading/thread_pool.h"

int main() {
    const char weights[64] = {};
    Fetching({weights, 0, 64, 4, 0}, 0, 0).some();  // as seen while a job is announced
    for (int size : {1, 2, 3, 9}) {
        Team team(size);
        for (int count : {0, 1, 2, 3, 5, 8, 9, 10, 100, 70000})
            for (int job = 0; job < (count < 1000 ? 300 : 2); job++) {
                std::vector<std::atomic<int>> times(count);
                std::atomic<int> others{0};
                if (job % 2) team.expect({reinterpret_cast<const char*>(times.data()), 0, 64, 4, 2});
                team.each(count, [&](int worker, int piece) {
                    times[piece]++;
                    others += worker < 0 || worker >= size;
                });
                for (int piece = 0; piece < count; piece++)
                    if (times[piece] != 1 || others) {
                        std::fprintf(stderr, "team of %d: piece %d of %d: %d times, %d by nobody of the team\n", size,
                                     piece, count, times[piece].load(), others.load());
                        return 1;
                    }
            }
    }
    std::puts("each once");
}
