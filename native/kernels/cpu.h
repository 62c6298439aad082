/* Instruction sets of this machine for which the kernels have versions: x86-64 only. They are read
 * with CPUID, not with __builtin_cpu_supports: that reads tables in the compiler's run-time
 * library, and zig's tables are empty, so every machine would look like the oldest. */
#ifndef INFINITY_CPU_H
#define INFINITY_CPU_H

#if defined(__x86_64__)
#include <cpuid.h>
#include <stdint.h>

enum {
    INF_CPU_CRC32 = 1 << 0, /* SSE 4.2 */
    INF_CPU_CLMUL = 1 << 1,
    INF_CPU_AVX2 = 1 << 2, /* and FMA */
    INF_CPU_AVX512 = 1 << 3, /* F, BW, DQ and VL */
    INF_CPU_VPCLMUL = 1 << 4, /* on registers of 512 bits */
    INF_CPU_VPCLMUL256 = 1 << 5 /* on registers of 256 bits: Zen 3, and cores without AVX-512 */
};

/* Registers that the operating system saves on a context switch; without that, instructions on them
 * fault or lose their state. */
enum { INF_XCR0_YMM = 0x06, INF_XCR0_ZMM = 0xE6 };

static inline uint32_t inf_xcr0(void) {
    uint32_t low, high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return low;
}

static inline uint32_t inf_cpu_has(void) {
    unsigned a, b, c, d;
    if (!__get_cpuid(1, &a, &b, &c, &d)) return 0;
    uint32_t has = 0;
    if (c & bit_SSE4_2) has |= INF_CPU_CRC32;
    if (c & bit_PCLMUL) has |= INF_CPU_CLMUL;
    const uint32_t saved = (c & bit_OSXSAVE) ? inf_xcr0() : 0;
    const int avx = (c & bit_AVX) && (saved & INF_XCR0_YMM) == INF_XCR0_YMM;
    const int fma = (c & bit_FMA) != 0;
    if (!avx || !__get_cpuid_count(7, 0, &a, &b, &c, &d)) return has;
    if ((b & bit_AVX2) && fma) has |= INF_CPU_AVX2;
    if ((b & bit_AVX2) && (c & bit_VPCLMULQDQ)) has |= INF_CPU_VPCLMUL256;
    const unsigned wide = bit_AVX512F | bit_AVX512BW | bit_AVX512DQ | bit_AVX512VL;
    if ((saved & INF_XCR0_ZMM) != INF_XCR0_ZMM || (b & wide) != wide) return has;
    has |= INF_CPU_AVX512;
    if (c & bit_VPCLMULQDQ) has |= INF_CPU_VPCLMUL;
    return has;
}
#endif
#endif
