// What threads need of the operating system: signals and forks, neither of which Windows has.
#pragma once
#include <atomic>

#if !defined(_WIN32)
#include <pthread.h>
#include <signal.h>
#endif

// How often this process has forked since it loaded the library. A child has none of its parent's threads, and the
// locks that these held stay locked.
extern std::atomic<int> forks;

// While one lives, this thread starts threads that get no signals: those are for the caller's threads.
class SignalsBlocked {
public:
#if defined(_WIN32)
    SignalsBlocked() {}  // written out, or the variable is unused
#else
    SignalsBlocked() {
        sigset_t all;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before_);
    }
    ~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
#endif
    SignalsBlocked(const SignalsBlocked&) = delete;
    SignalsBlocked& operator=(const SignalsBlocked&) = delete;

#if !defined(_WIN32)
private:
    sigset_t before_;
#endif
};
