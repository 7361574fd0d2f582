// Gives each allocation pages of its own between two closed ones. A program linked to it ends where it, or a library,
// reads or writes beyond an allocation or after its release. Allocations end at the end of their pages, or with
// GUARDED=before begin at their beginning: run both.
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

// Maps an allocation of `size` bytes, as near to the page behind it as `alignment` allows.
void* guarded(size_t size, size_t alignment) {
    static const size_t page = sysconf(_SC_PAGESIZE);
    static const char* const side = std::getenv("GUARDED");
    static const bool is_before = side && !std::strcmp(side, "before");
    // The first page holds what `release` needs, and is closed like the last one.
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

// An allocation of no bytes is at the closed page itself; in any other only the first bytes have an alignment.
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
