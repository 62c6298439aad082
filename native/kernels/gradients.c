/* Whether gradients are finite, and norms of bf16 gradients: one pass at memory bandwidth. torch's
 * functions make copies or run element by element. */
#include "infinity.h"

#include "float_bits.h"
#include "gradients.h"

#include <math.h>
#include <string.h>

enum { STEP = 4096 }; /* elements between two checks of the result */

/* A number is not finite when all bits of its exponent are set. */
static int32_t finite16(const uint16_t *values, uint16_t exponent, int64_t numel) {
    for (int64_t start = 0; start < numel; start += STEP) {
        const int64_t end = numel - start < STEP ? numel : start + STEP;
        uint16_t bad = 0;
        for (int64_t i = start; i < end; i++) bad |= (uint16_t)((values[i] & exponent) == exponent);
        if (bad) return 0;
    }
    return 1;
}

static int32_t finite32(const uint32_t *values, int64_t numel) {
    for (int64_t start = 0; start < numel; start += STEP) {
        const int64_t end = numel - start < STEP ? numel : start + STEP;
        uint32_t bad = 0;
        for (int64_t i = start; i < end; i++)
            bad |= (uint32_t)((values[i] & 0x7F800000u) == 0x7F800000u);
        if (bad) return 0;
    }
    return 1;
}

/* 1 if all `numel` values are finite, else 0; -1: unknown dtype. grad_dtype: INF_GRAD_*; the
 * pointer is aligned to its elements. */
int32_t inf_all_finite(const void *values, int32_t grad_dtype, int64_t numel) {
    if (grad_dtype == INF_GRAD_BF16) return finite16(values, 0x7F80u, numel);
    if (grad_dtype == INF_GRAD_FP16) return finite16(values, 0x7C00u, numel);
    if (grad_dtype == INF_GRAD_FP32) return finite32(values, numel);
    return -1;
}

/* ---- the norm of a bf16 gradient ------------------------------------------------------------- */

enum { SUMS = 8 }; /* of torch's norm: the lanes of an AVX2 vector, for every instruction set */
typedef uint16_t bf16_vector __attribute__((vector_size(SUMS * sizeof(uint16_t))));
typedef uint32_t word_vector __attribute__((vector_size(SUMS * sizeof(uint32_t))));
typedef float sum_vector __attribute__((vector_size(SUMS * sizeof(float))));

INF_INLINE float norm_of(const uint16_t *from, uint16_t *to, int64_t numel) {
    sum_vector sums = {0};
    for (int64_t i = 0; i < numel; i += SUMS) {
        bf16_vector narrow;
        memcpy(&narrow, from + i, sizeof narrow);
        if (to != NULL) memcpy(to + i, &narrow, sizeof narrow);
        const sum_vector x = (sum_vector)(__builtin_convertvector(narrow, word_vector) << 16);
        sums += x * x;
    }
    float sum = sums[0];
    for (int32_t k = 1; k < SUMS; k++) sum += sums[k];
    return sqrtf(sum);
}

#if defined(__x86_64__)
__attribute__((target("avx2"))) static float norm_avx2(const uint16_t *from, uint16_t *to,
                                                       int64_t numel) {
    return norm_of(from, to, numel);
}
#endif

/* The floating-point mode is the thread's, as in torch. */
float inf_bf16_norm(const void *from, void *to, int64_t numel) {
#if defined(__x86_64__)
    if (inf_isa_index() > 0) return norm_avx2(from, to, numel);
#endif
    return norm_of(from, to, numel);
}
