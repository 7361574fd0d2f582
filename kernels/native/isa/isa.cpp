// The instruction sets of this build, best first. With D3_PORTABLE only the portable code is left.
#include "isa/kernels.h"

#if defined(D3_PORTABLE)
#elif defined(__x86_64__)
namespace avx512 { extern const Kernels kernels, vnni, amx; }
namespace avx2 { extern const Kernels kernels; }
#elif defined(__aarch64__)
namespace neon { extern const Kernels kernels; }
#endif
namespace portable { extern const Kernels kernels; }

const Kernels* const ALL_KERNELS[] = {
#if defined(D3_PORTABLE)
#elif defined(__x86_64__)
#if defined(D3_AMX)
    &avx512::amx,
#endif
    &avx512::vnni,
    &avx512::kernels,
    &avx2::kernels,
#elif defined(__aarch64__)
    &neon::kernels,
#endif
    &portable::kernels,
};
const int NUM_KERNELS = sizeof(ALL_KERNELS) / sizeof(*ALL_KERNELS);
