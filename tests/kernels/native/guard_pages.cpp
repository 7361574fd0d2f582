// Gives each piece of memory pages of its own, between two that may not be touched: linked to a program, it ends where
// anything, in the program or in a library, reads or writes beyond what it has asked for, or after it gave that back.
// Pieces end where their pages end, or with GUARDED=before begin where these begin: both have to be gone through.
#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>

namespace {

struct Pages {
    char* start;
    size_t size;
};

// What a piece of `size` bytes takes, and where it lies: as near to the page behind it as `alignment` lets it.
void* guarded(size_t size, size_t alignment) {
    static const size_t page = sysconf(_SC_PAGESIZE);
    static const char* const side = std::getenv("GUARDED");
    static const bool is_before = side && !std::strcmp(side, "before");
    // The first page holds what `release` has to know, and is then closed as the last one is.
    const size_t inner = (size + page - 1) / page * page, whole = inner + 2 * page;
    void* const mapped = mmap(nullptr, whole, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapped == MAP_FAILED) throw std::bad_alloc();
    char* const start = static_cast<char*>(mapped);
    *reinterpret_cast<Pages*>(start) = {start, whole};
    mprotect(start, page, PROT_NONE);
    mprotect(start + page + inner, page, PROT_NONE);
    if (is_before) return start + page;
    return start + page + (inner - size) / alignment * alignment;
}

void release(void* tile) {
    if (!tile) return;
    const uintptr_t page = sysconf(_SC_PAGESIZE);
    char* const first = reinterpret_cast<char*>(reinterpret_cast<uintptr_t>(tile) / page * page);
    mprotect(first - page, page, PROT_READ);
    const Pages pages = *reinterpret_cast<Pages*>(first - page);
    munmap(pages.start, pages.size);
}

}  // namespace

// A piece of no bytes lies at the closed page itself; of any other only the first bytes have an alignment to ask for.
void* operator new(size_t size) { return guarded(size, 1); }
void* operator new[](size_t size) { return guarded(size, 1); }
void* operator new(size_t size, std::align_val_t alignment) { return guarded(size, size_t(alignment)); }
void* operator new[](size_t size, std::align_val_t alignment) { return guarded(size, size_t(alignment)); }
void operator delete(void* tile) noexcept { release(tile); }
void operator delete[](void* tile) noexcept { release(tile); }
void operator delete(void* tile, size_t) noexcept { release(tile); }
void operator delete[](void* tile, size_t) noexcept { release(tile); }
void operator delete(void* tile, std::align_val_t) noexcept { release(tile); }
void operator delete[](void* tile, std::align_val_t) noexcept { release(tile); }
void operator delete(void* tile, size_t, std::align_val_t) noexcept { release(tile); }
void operator delete[](void* tile, size_t, std::align_val_t) noexcept { release(tile); }
