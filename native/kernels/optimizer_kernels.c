/* Updates: one version of optimizer_kernels.h per instruction set, chosen at run time.
 *
 * The file is compiled for the ABI's baseline; the wider versions are in `#pragma GCC target`
 * regions, called only if cpu.h detects the instruction set. Inline functions used across regions
 * are always_inline and scalar.
 */
#include "cpu.h"
#include "float_bits.h"
#include "fp_mode.h"
#include "infinity.h"
#include "shadow.h"

#include <math.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

/* Companding of 8-bit moments (infinity/_src/kernels/state_codec.py): number = sign(c) * c^2 /
 * 127^2 * scale, or c^4 / 255^4 * scale. */
#define INF_SQUARE_STEP (1.0f / 16129.0f)
#define INF_FOURTH_STEP (1.0f / 4228250625.0f)
/* bf16 bits of 2^-94: then 255^4 / scale is finite, and code 1 above zero */
#define INF_SCALE_LEAST 0x1080u
#define INF_SCALE_MOST 0x7F7Fu  /* the largest bf16 */

/* Part of a segment: addresses of its sections, and the parameter's index of its first element. */
typedef struct {
    uint8_t *section[INF_SECTION_MAX];
    int64_t numel;
    int64_t element;
} inf_block;

/* Bytes of each section for INF_QUANT_GROUP elements. */
INF_INLINE void inf_group_bytes(int32_t format, int64_t bytes[INF_SECTION_MAX]) {
    int32_t itemsize[INF_SECTION_MAX] = {0}, group_numel[INF_SECTION_MAX] = {0};
    const int32_t count = inf_format_sections(format, itemsize, group_numel);
    for (int32_t s = 0; s < INF_SECTION_MAX; s++)
        bytes[s] = s < count ? INF_QUANT_GROUP / group_numel[s] * itemsize[s] : 0;
}

/* Prefetches into L2 the block of INF_BLOCK_NUMEL elements that starts at `start`. */
INF_INLINE void inf_prefetch(uint8_t *const section[INF_SECTION_MAX],
                             const int64_t group_bytes[INF_SECTION_MAX], const void *grad,
                             int32_t grad_dtype, int64_t start) {
    enum { LINE = 64, BLOCK_GROUPS = INF_BLOCK_NUMEL / INF_QUANT_GROUP };
    const int64_t grad_itemsize = grad_dtype == INF_GRAD_FP32 ? 4 : 2;
    const uint8_t *from = (const uint8_t *)grad + start * grad_itemsize;
    for (int64_t at = 0; at < INF_BLOCK_NUMEL * grad_itemsize; at += LINE)
        __builtin_prefetch(from + at, 0, 2);
    for (int32_t s = 0; s < INF_SECTION_MAX; s++) {
        if (group_bytes[s] == 0) continue;
        from = section[s] + start / INF_QUANT_GROUP * group_bytes[s];
        for (int64_t at = 0; at < group_bytes[s] * BLOCK_GROUPS; at += LINE)
            __builtin_prefetch(from + at, 0, 2);
    }
}

/* Which of an element's 32 random bits round a moment, and how. A 24-bit master takes the upper 8;
 * then the moments have the two lower 12, else 16 each. For bf16: 16 bits, (random >> shift & mask)
 * << left | half. For 8 bits: a number in [1, 2) whose bits are (random placed & place_mask) |
 * place_one, placed: `place` to the right in moment 0, to the left in moment 1. Half of the last
 * random bit is added, so that the mean is right. */
typedef struct {
    uint32_t shift;
    uint32_t mask;
    uint32_t left;
    uint32_t half;
    uint32_t place;
    uint32_t place_mask;
    uint32_t place_one;
} inf_draw;

INF_INLINE inf_draw inf_draw_of(int32_t format, int32_t moment) {
    if (inf_format_master(format) == INF_MASTER_SPLIT8) {
        return (inf_draw){moment == 0 ? 12 : 0, 0xFFF,    4,         8,
                          moment == 0 ? 1 : 11, 0x7FF800, 0x3F800400};
    }
    return (inf_draw){moment == 0 ? 16 : 0, 0xFFFF,   0,         0,
                      moment == 0 ? 9 : 7,  0x7FFF80, 0x3F800040};
}

INF_INLINE float inf_square_code(int8_t code, float scale) {
    const float c = (float)code;
    return ((c * fabsf(c)) * INF_SQUARE_STEP) * scale;
}

INF_INLINE float inf_fourth_code(uint8_t code, float scale) {
    const float square = (float)code * (float)code;
    return ((square * square) * INF_FOURTH_STEP) * scale;
}

/* The bf16 bits of a group's scale, given the fp32 bits of its largest magnitude: that rounded up,
 * within INF_SCALE_LEAST and INF_SCALE_MOST; 0 if the group is all zero, NaN if it has infinity or
 * NaN. */
INF_INLINE uint32_t inf_scale_above(uint32_t most) {
    if (most >= INF_INFINITY_BITS) return INF_NAN_BITS >> 16;
    if (most == 0) return 0;
    const uint32_t up = (most + 0xFFFFu) >> 16;
    return up < INF_SCALE_LEAST ? INF_SCALE_LEAST : up > INF_SCALE_MOST ? INF_SCALE_MOST : up;
}

/* 127^2 / scale, or 255^4 / scale; 0 where there is nothing to encode: the scale is 0 or NaN. */
INF_INLINE float inf_code_factor(int32_t moment, uint32_t scale) {
    if (scale == 0 || scale > INF_SCALE_MOST) return 0.0f;
    return (moment == 0 ? 16129.0f : 4228250625.0f) / inf_float_from_bits(scale << 16);
}

#define INF_BODY "optimizer_kernels.h"
#include "each_isa.h"

/* ---- dispatch -------------------------------------------------------------------------------- */

typedef void update_fn(int32_t, uint8_t *const *, const void *, int32_t, int64_t, int64_t,
                       const inf_hyper *, int64_t, inf_shadow *);

typedef struct {
    const char *name;
    update_fn *update;
} isa_kernels;

static const isa_kernels ISA_TABLE[] = {
    {"portable", update_portable},
#if defined(INF_HAS_X86)
    {"avx2", update_avx2},
    {"avx512", update_avx512},
#endif
};
enum { ISA_COUNT = sizeof ISA_TABLE / sizeof ISA_TABLE[0] };

static const isa_kernels *isa_chosen = &ISA_TABLE[0];

static int isa_supported(int index) {
#if defined(INF_HAS_X86)
    if (index == 1) return (inf_cpu_has() & INF_CPU_AVX2) != 0;
    if (index == 2) return (inf_cpu_has() & INF_CPU_AVX512) != 0;
#endif
    return index == 0;
}

__attribute__((constructor)) static void isa_choose_best(void) {
    for (int i = 0; i < (int)ISA_COUNT; i++) {
        if (isa_supported(i)) isa_chosen = &ISA_TABLE[i];
    }
}

const char *inf_isa(void) {
    return isa_chosen->name;
}

int32_t inf_isa_index(void) {
    return (int32_t)(isa_chosen - ISA_TABLE);
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

int32_t inf_update_valid(int32_t format, const inf_hyper *hyper) {
    int32_t itemsize[INF_SECTION_MAX], group_numel[INF_SECTION_MAX];
    const int32_t count = inf_format_count(format);
    if (inf_format_sections(format, itemsize, group_numel) == 0) return 0;
    if (inf_format_master(format) == INF_MASTER_RAW ||
        inf_format_grad(format) != INF_GRAD_SECTION_NONE)
        return 0;
    if (hyper->log_count < 0 || hyper->log_count > INF_LOG_MAX) return 0;
    for (int32_t k = 0; k < hyper->log_count; k++)
        if (hyper->log_kind[k] < INF_LOG_MUL || hyper->log_kind[k] > INF_LOG_CLAMP_MAX) return 0;
    switch (hyper->algorithm) {
    case INF_ADAMW: return count == 2;
    case INF_SGD: return count == 1 || (count == 0 && hyper->beta1 == 0.0f);
    case INF_LION: return count == 1;
    case INF_MUON_MOMENTUM:
    case INF_MUON: return count == 1 || count == 2;
    default: return 0;
    }
}

uint32_t inf_update_sections(int32_t format, const inf_hyper *hyper) {
    int32_t itemsize[INF_SECTION_MAX], group_numel[INF_SECTION_MAX];
    const uint32_t all = (1u << inf_format_sections(format, itemsize, group_numel)) - 1u;
    const int32_t first = inf_format_master_count(format);
    const uint32_t masters = (1u << first) - 1u;
    if (hyper->algorithm == INF_MUON) return masters;
    if (hyper->algorithm != INF_MUON_MOMENTUM) return all;
    if (inf_format_moments(format) != INF_MOMENTS_Q8) return 1u << first;
    return 1u << first | 1u << (first + inf_format_count(format));
}

void inf_update_beside(int32_t format, uint8_t *const section[INF_SECTION_MAX], const void *grad,
                       int32_t grad_dtype, int64_t numel, int64_t element, const inf_hyper *hyper,
                       int64_t ahead, inf_shadow *shadow) {
    const fp_mode mode = fp_mode_enter();
    isa_chosen->update(format, section, grad, grad_dtype, numel, element, hyper, ahead, shadow);
    fp_mode_leave(mode);
}

void inf_update(int32_t format, uint8_t *const section[INF_SECTION_MAX], const void *grad,
                int32_t grad_dtype, int64_t numel, int64_t element, const inf_hyper *hyper) {
    inf_update_beside(format, section, grad, grad_dtype, numel, element, hyper, 0, NULL);
}

/* Integer work: no instruction-set versions, the baseline vectorises and it runs at load and export
 * only. */

void inf_split_master(const float *master, uint16_t *hi, int16_t *lo, int64_t numel) {
    for (int64_t i = 0; i < numel; i++) {
        const uint32_t bits = inf_canonical_bits(master[i]);
        hi[i] = inf_hi_of_bits(bits);
        lo[i] = (int16_t)(uint16_t)bits;
    }
    halves_to_even_portable(hi, lo, NULL, numel);
}

void inf_join_master(const uint16_t *hi, const int16_t *lo, float *master, int64_t numel) {
    for (int64_t i = 0; i < numel; i++)
        master[i] = inf_float_from_bits(inf_join_bits(hi[i], lo[i]));
}
