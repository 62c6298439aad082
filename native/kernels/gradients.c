/* Whether gradients are finite: one pass at memory bandwidth. torch's functions make a copy or run
 * element by element. */
#include "infinity.h"

#include "gradients.h"

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
