/* AdamW on pointers: one loop body (adamw_body.h) per instruction set, chosen at run time.
 *
 * The file is compiled for the ABI's baseline; the wider versions sit in `#pragma GCC target` regions that run only
 * after __builtin_cpu_supports said yes. No inline helper crosses a region: those are always_inline and scalar.
 */
#include "infinity.h"

#include <math.h>
#include <string.h>

#define INF_BLOCK_NUMEL 256 /* gradients of a block: 1 KiB of stack, stays in L1 between the log and the update */

#define INF_INLINE static inline __attribute__((always_inline))

INF_INLINE float inf_float_from_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

INF_INLINE uint32_t inf_join_bits(uint16_t hi, int16_t lo) {
    return ((uint32_t)hi << 16) + (uint32_t)(int32_t)lo;
}

/* 0x7FFFFFFF would round up into the sign and come back as -0.0, so every NaN is stored as one that cannot. */
INF_INLINE uint32_t inf_canonical_bits(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return (bits & 0x7FFFFFFFu) > 0x7F800000u ? 0x7FC00000u : bits;
}

#define INF_ISA(name) name##_portable
#include "adamw_body.h"
#undef INF_ISA

#if defined(__x86_64__)
#define INF_HAS_X86 1

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2")
#endif
#define INF_ISA(name) name##_avx2
#include "adamw_body.h"
#undef INF_ISA
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl"), min_vector_width(512))), \
                             apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512")
#endif
#define INF_ISA(name) name##_avx512
#include "adamw_body.h"
#undef INF_ISA
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif

/* ---- dispatch -------------------------------------------------------------------------------------------------- */

typedef void adamw_split_fn(uint16_t *, int16_t *, float *, float *, const void *, int32_t, int64_t, const inf_hyper *);
typedef void adamw_fp32_fn(float *, float *, float *, const void *, int32_t, int64_t, const inf_hyper *);

typedef struct {
    const char *name;
    adamw_split_fn *split;
    adamw_fp32_fn *fp32;
} isa_kernels;

static const isa_kernels ISA_TABLE[] = {
    {"portable", adamw_split_portable, adamw_fp32_portable},
#if defined(INF_HAS_X86)
    {"avx2", adamw_split_avx2, adamw_fp32_avx2},
    {"avx512", adamw_split_avx512, adamw_fp32_avx512},
#endif
};
enum { ISA_COUNT = sizeof ISA_TABLE / sizeof ISA_TABLE[0] };

static const isa_kernels *isa_chosen = &ISA_TABLE[0];

static int isa_supported(int index) {
#if defined(INF_HAS_X86)
    if (index == 1) return __builtin_cpu_supports("avx2") != 0;
    if (index == 2) {
        return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
               __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    }
#endif
    return index == 0;
}

__attribute__((constructor)) static void isa_choose_best(void) {
#if defined(INF_HAS_X86)
    __builtin_cpu_init();
#endif
    for (int i = 0; i < (int)ISA_COUNT; i++) {
        if (isa_supported(i)) isa_chosen = &ISA_TABLE[i];
    }
}

const char *inf_isa(void) {
    return isa_chosen->name;
}

int32_t inf_isa_select(const char *name) {
    for (int i = 0; i < (int)ISA_COUNT; i++) {
        if (strcmp(name, ISA_TABLE[i].name) == 0 && isa_supported(i)) {
            isa_chosen = &ISA_TABLE[i];
            return 1;
        }
    }
    return 0;
}

/* ---- floating-point mode: denormals kept and rounding to nearest, whatever the thread has (a thread inherits
 * torch.set_flush_denormal from the one that made it) -------------------------------------------------------------- */

#if defined(INF_HAS_X86)
enum { MXCSR_DEFAULT = 0x1F80 }; /* all exceptions masked, round to nearest, no FTZ, no DAZ */
static uint32_t fp_mode_enter(void) {
    const uint32_t mode = __builtin_ia32_stmxcsr();
    if ((mode & ~0x3Fu) != MXCSR_DEFAULT) __builtin_ia32_ldmxcsr(MXCSR_DEFAULT);
    return mode;
}
static void fp_mode_leave(uint32_t mode) {
    if ((mode & ~0x3Fu) != MXCSR_DEFAULT) __builtin_ia32_ldmxcsr(mode);
}
typedef uint32_t fp_mode;
#elif defined(__aarch64__)
static uint64_t fp_mode_enter(void) {
    uint64_t mode;
    __asm__ volatile("mrs %0, fpcr" : "=r"(mode));
    if (mode != 0) __asm__ volatile("msr fpcr, %0" ::"r"((uint64_t)0));
    return mode;
}
static void fp_mode_leave(uint64_t mode) {
    if (mode != 0) __asm__ volatile("msr fpcr, %0" ::"r"(mode));
}
typedef uint64_t fp_mode;
#else
typedef int fp_mode;
static fp_mode fp_mode_enter(void) {
    return 0;
}
static void fp_mode_leave(fp_mode mode) {
    (void)mode;
}
#endif

void inf_adamw_split(uint16_t *hi, int16_t *lo, float *exp_avg, float *exp_avg_sq, const void *grad,
                     int32_t grad_dtype, int64_t numel, const inf_hyper *hyper) {
    const fp_mode mode = fp_mode_enter();
    isa_chosen->split(hi, lo, exp_avg, exp_avg_sq, grad, grad_dtype, numel, hyper);
    fp_mode_leave(mode);
}

void inf_adamw_fp32(float *param, float *exp_avg, float *exp_avg_sq, const void *grad, int32_t grad_dtype,
                    int64_t numel, const inf_hyper *hyper) {
    const fp_mode mode = fp_mode_enter();
    isa_chosen->fp32(param, exp_avg, exp_avg_sq, grad, grad_dtype, numel, hyper);
    fp_mode_leave(mode);
}

/* Integer work: no instruction-set versions, the baseline vectorises and it runs at load and export only. */

void inf_split_master(const float *master, uint16_t *hi, int16_t *lo, int64_t numel) {
    for (int64_t i = 0; i < numel; i++) {
        const uint32_t bits = inf_canonical_bits(master[i]);
        hi[i] = (uint16_t)((bits + 0x8000u) >> 16);
        lo[i] = (int16_t)(uint16_t)bits;
    }
}

void inf_join_master(const uint16_t *hi, const int16_t *lo, float *master, int64_t numel) {
    for (int64_t i = 0; i < numel; i++) master[i] = inf_float_from_bits(inf_join_bits(hi[i], lo[i]));
}
