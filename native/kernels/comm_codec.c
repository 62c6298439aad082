/* Codec of the collectives: one version of comm_codec_kernels.h per instruction set, chosen at run
 * time as in optimizer_kernels.c. */
#include "comm_codec.h"

#include "float_bits.h"
#include "fp_mode.h"
#include "infinity.h"

#include <math.h>
#include <string.h>

/* elements, a multiple of every group: fp32, random numbers and codes of a block stay in L1 */
#define WIRE_BLOCK 1024
#define WIRE_ALIGN 64   /* bytes; of codes and of scales */

#define INF_VALUE_MOST 0x1.fep127f      /* the largest bf16 */
#define INF_SCALE_LEAST_BITS 0x00800000u /* 2^-126 */
#define INF_ROUNDER 12582912.0f          /* 1.5 * 2^23 */
#define INF_ROUNDER_BITS 0x4B400000u

typedef struct {
    int32_t bits;
    int32_t levels;
    int32_t group_numel;
    int64_t codes_bytes; /* with their padding */
} wire_shape;

/* Keeps NaN. */
INF_INLINE float wire_clamped(float value) {
    value = value > INF_VALUE_MOST ? INF_VALUE_MOST : value;
    return value < -INF_VALUE_MOST ? -INF_VALUE_MOST : value;
}

/* Whether no code of this scale needs clamping: 128 * 2^120 is 2^127. */
INF_INLINE int wire_within(float scale) {
    return fabsf(scale) < 0x1.0p120f;
}

/* Prefetches the next block's bytes: the hardware prefetcher starts only after a few lines of each
 * stream, and a block is short (this saves 10 % or more when several wires are summed). Prefetching
 * beyond the end is harmless. */
INF_INLINE void wire_ahead(const void *source, int64_t first, int64_t size_bytes) {
    const uintptr_t from = (uintptr_t)source + (uintptr_t)first;
    for (int64_t at = 0; at < size_bytes; at += WIRE_ALIGN)
        __builtin_prefetch((const void *)(from + (uintptr_t)at));
}

INF_INLINE void wire_values_ahead(const void *source, int32_t dtype, int64_t first, int64_t numel) {
    const int64_t itemsize = dtype == INF_GRAD_FP32 ? 4 : 2;
    wire_ahead(source, first * itemsize, numel * itemsize);
}

#define INF_BODY "comm_codec_kernels.h"
#include "each_isa.h"

typedef struct {
    void (*encode)(const void *, int32_t, void *, int32_t, uint8_t *, int64_t, const wire_shape *,
                   int32_t, uint64_t, int64_t);
    void (*decode_sum)(const uint64_t *, int32_t, void *, int32_t, int64_t, const wire_shape *,
                       float);
    void (*sum_in_order)(const uint64_t *, int32_t, int32_t, void *, int32_t, int64_t, float);
} isa_kernels;

/* By inf_isa_index. */
static const isa_kernels ISA_TABLE[] = {
    {encode_portable, decode_sum_portable, sum_in_order_portable},
#if defined(__x86_64__)
    {encode_avx2, decode_sum_avx2, sum_in_order_avx2},
    {encode_avx512, decode_sum_avx512, sum_in_order_avx512},
#endif
};

static int64_t aligned(int64_t bytes) {
    return (bytes + WIRE_ALIGN - 1) / WIRE_ALIGN * WIRE_ALIGN;
}

static int64_t codes_bytes(int64_t numel, int32_t bits) {
    return bits == 8 ? numel : numel / 2 + numel % 2;
}

static int64_t scales_bytes(int64_t numel, int32_t group_numel) {
    return (numel / group_numel + (numel % group_numel != 0)) * 2;
}

static wire_shape shape_of(int64_t numel, int32_t bits, int32_t group_numel) {
    return (wire_shape){bits, bits == 8 ? 127 : 7, group_numel, aligned(codes_bytes(numel, bits))};
}

int64_t inf_wire_bytes(int64_t numel, int32_t bits, int32_t group_numel, int32_t codes_only) {
    const int64_t codes = aligned(codes_bytes(numel, bits));
    return codes_only ? codes : codes + aligned(scales_bytes(numel, group_numel));
}

void inf_wire_encode(const void *values, int32_t dtype, void *error, int32_t error_dtype,
                     uint8_t *wire, int64_t numel, int32_t bits, int32_t group_numel,
                     int32_t random, uint64_t key, int64_t element) {
    const wire_shape shape = shape_of(numel, bits, group_numel);
    const int64_t codes = codes_bytes(numel, bits), scales = scales_bytes(numel, group_numel);
    if (numel == 0) return; /* pointers may be NULL, which memset must not get */
    const fp_mode mode = fp_mode_enter();
    ISA_TABLE[inf_isa_index()].encode(values, dtype, error, error_dtype, wire, numel, &shape,
                                      random, key, element);
    fp_mode_leave(mode);
    /* Zero padding, so that equal values have equal bytes. */
    memset(wire + codes, 0, (size_t)(shape.codes_bytes - codes));
    memset(wire + shape.codes_bytes + scales, 0, (size_t)(aligned(scales) - scales));
}

void inf_wire_decode_sum(const uint64_t *wires, int32_t count, void *out, int32_t dtype,
                         int64_t numel, int32_t bits, int32_t group_numel, float divisor) {
    const wire_shape shape = shape_of(numel, bits, group_numel);
    const fp_mode mode = fp_mode_enter();
    ISA_TABLE[inf_isa_index()].decode_sum(wires, count, out, dtype, numel, &shape, divisor);
    fp_mode_leave(mode);
}

void inf_sum_in_order(const uint64_t *pieces, int32_t count, int32_t dtype, void *out,
                      int32_t out_dtype, int64_t numel, float divisor) {
    const fp_mode mode = fp_mode_enter();
    ISA_TABLE[inf_isa_index()].sum_in_order(pieces, count, dtype, out, out_dtype, numel, divisor);
    fp_mode_leave(mode);
}
