/* Includes INF_BODY once for each instruction set, with its functions named by INF_ISA(name): one
 * loop body, compiled for every processor (infinity.h says how one is chosen). Defines INF_HAS_X86
 * where there is more than the portable one. INF_LANES: lanes of 32 bits of the vectors of lanes.h;
 * 0 = the instruction set is not in it. */
#define INF_ISA(name) name##_portable
#define INF_LANES 0
#include INF_BODY
#undef INF_ISA
#undef INF_LANES

#if defined(__x86_64__)
#define INF_HAS_X86 1

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,crc32"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma")
#endif
#define INF_ISA(name) name##_avx2
#define INF_LANES 8
#include INF_BODY
#undef INF_ISA
#undef INF_LANES
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

#if defined(__clang__)
#pragma clang attribute push(                                           \
    __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,fma,crc32"), \
                   min_vector_width(512))),                              \
    apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,fma,prefer-vector-width=512")
#endif
#define INF_ISA(name) name##_avx512
#define INF_LANES 16
#include INF_BODY
#undef INF_ISA
#undef INF_LANES
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif

#undef INF_BODY
