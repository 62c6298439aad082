/* Sets a kernel's floating-point mode: denormals kept, rounding to nearest. A thread inherits
 * torch.set_flush_denormal from its creator. */
#ifndef INFINITY_FP_MODE_H
#define INFINITY_FP_MODE_H

#include <stdint.h>

#if defined(__x86_64__)
enum { MXCSR_DEFAULT = 0x1F80 }; /* all exceptions masked, round to nearest, no FTZ, no DAZ */
static inline uint32_t fp_mode_enter(void) {
    const uint32_t mode = __builtin_ia32_stmxcsr();
    if ((mode & ~0x3Fu) != MXCSR_DEFAULT) __builtin_ia32_ldmxcsr(MXCSR_DEFAULT);
    return mode;
}
static inline void fp_mode_leave(uint32_t mode) {
    if ((mode & ~0x3Fu) != MXCSR_DEFAULT) __builtin_ia32_ldmxcsr(mode);
}
typedef uint32_t fp_mode;
#elif defined(__aarch64__)
static inline uint64_t fp_mode_enter(void) {
    uint64_t mode;
    __asm__ volatile("mrs %0, fpcr" : "=r"(mode));
    if (mode != 0) __asm__ volatile("msr fpcr, %0" ::"r"((uint64_t)0));
    return mode;
}
static inline void fp_mode_leave(uint64_t mode) {
    if (mode != 0) __asm__ volatile("msr fpcr, %0" ::"r"(mode));
}
typedef uint64_t fp_mode;
#else
typedef int fp_mode;
static inline fp_mode fp_mode_enter(void) {
    return 0;
}
static inline void fp_mode_leave(fp_mode mode) {
    (void)mode;
}
#endif

#endif
