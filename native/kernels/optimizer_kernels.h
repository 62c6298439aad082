/* The update loops of optimizer_kernels.c, included once per instruction set with INF_ISA(name)
 * naming the functions.
 *
 * No include guard: optimizer_kernels.c includes this file inside `#pragma GCC target` regions.
 * Every operation rounds once to fp32, in one order (below); with -ffp-contract=off each
 * instruction set then gives the same bits, and so does infinity/_src/kernels/update.py:
 *
 *   g = float(grad); for (kind, value) in log: g = g * value or g / value
 *   AdamW  p = p * decay
 *          m = m * beta1 + g * one_minus_beta1
 *          v = v * beta2 + (g * g) * one_minus_beta2
 *          p = p - (m / (sqrt(v) / bc2_sqrt + eps)) * step_size
 *   SGD    g = g + p * weight_decay                              unless weight_decay is 0
 *          b = b * beta1 + g * one_minus_beta1                   or g in the first step;
 *                                                                without a moment: none
 *          d = b, or g + b * beta1 with nesterov, or g without a moment
 *          p = p - d * step_size
 *   Lion   p = p * decay
 *          p = p - sign(m * beta1 + g * one_minus_beta1) * step_size
 *          m = m * beta2 + g * one_minus_beta2
 *   Muon   MUON_MOMENTUM, with the gradient g:
 *          m = lerp(m, g, one_minus_beta1)
 *          u = lerp(g, m, beta1) with nesterov, else m, as bf16 or fp32
 *          MUON, with the orthogonalized u as g:
 *          p = fma(g, -step_size, p * decay)
 *
 * lerp and fma as torch computes them, the former by one fma (muon_lerp).
 *
 * Block by block, in L1: states are decoded to fp32, updated by the algorithm's loop, and encoded
 * again, so every algorithm works with every encoding. AdamW on fp32 moments and a split or fp32
 * master is memory-bound, so it has fused loops. The log is replayed on a block of gradients,
 * outside of the element loops, so that these vectorise.
 */
#include "update_codec.h"

static void INF_ISA(load_gradient)(float *restrict g, const void *grad, int32_t grad_dtype,
                                   int64_t start, int64_t numel, const inf_hyper *hyper) {
    const uint16_t *restrict narrow = (const uint16_t *)grad + start;
    if (grad_dtype == INF_GRAD_BF16) {
        for (int64_t i = 0; i < numel; i++) g[i] = inf_float_from_bits((uint32_t)narrow[i] << 16);
    } else if (grad_dtype == INF_GRAD_FP16) {
        for (int64_t i = 0; i < numel; i++) g[i] = inf_float_from_half(narrow[i]);
    } else {
        memcpy(g, (const float *)grad + start, (size_t)numel * sizeof(float));
    }
    for (int32_t k = 0; k < hyper->log_count; k++) {
        const float value = hyper->log_value[k];
        switch (hyper->log_kind[k]) {
        case INF_LOG_MUL:
            for (int64_t i = 0; i < numel; i++) g[i] *= value;
            break;
        case INF_LOG_DIV:
            for (int64_t i = 0; i < numel; i++) g[i] /= value;
            break;
        /* Keeps NaN, since comparisons with it are false. */
        case INF_LOG_CLAMP_MIN:
            for (int64_t i = 0; i < numel; i++) g[i] = g[i] < value ? value : g[i];
            break;
        case INF_LOG_CLAMP_MAX:
            for (int64_t i = 0; i < numel; i++) g[i] = g[i] > value ? value : g[i];
            break;
        }
    }
}

/* ---- algorithms on fp32 ---------------------------------------------------------------------- */

/* One element's AdamW; `h` is a local copy of the scalars so that they stay in registers. */
static inline float INF_ISA(adamw_rooted)(float p, float g, float *restrict m, float *restrict v,
                                          float *restrict root, const inf_hyper *h) {
    const float decayed = p * h->decay;
    const float m_new = *m * h->beta1 + g * h->one_minus_beta1;
    const float v_new = *v * h->beta2 + (g * g) * h->one_minus_beta2;
    const float v_root = sqrtf(v_new);
    const float denom = v_root / h->bc2_sqrt + h->eps;
    *m = m_new;
    *v = v_new;
    *root = v_root;
    return decayed - (m_new / denom) * h->step_size;
}

static inline float INF_ISA(adamw_element)(float p, float g, float *restrict m, float *restrict v,
                                           const inf_hyper *h) {
    float root;
    return INF_ISA(adamw_rooted)(p, g, m, v, &root, h);
}

static void INF_ISA(adamw)(float *restrict p, float *restrict m, float *restrict v,
                           const float *restrict g, int64_t numel, const inf_hyper *hyper) {
    const inf_hyper h = *hyper;
    for (int64_t i = 0; i < numel; i++) p[i] = INF_ISA(adamw_element)(p[i], g[i], &m[i], &v[i], &h);
}

#if INF_LANES
#include "adamw_lanes.h"
#endif

/* Returns whether a master has a `lo` of -32768. A second loop over `lo` costs more. */
static int INF_ISA(adamw_split_scalar)(uint16_t *restrict hi, int16_t *restrict lo,
                                       float *restrict m, float *restrict v,
                                       const float *restrict g, int64_t numel,
                                       const inf_hyper *hyper) {
    const inf_hyper h = *hyper;
    int16_t least = 0;
    for (int64_t i = 0; i < numel; i++) {
        const float p = inf_float_from_bits(inf_join_bits(hi[i], lo[i]));
        const uint32_t bits = inf_canonical_bits(INF_ISA(adamw_element)(p, g[i], &m[i], &v[i], &h));
        hi[i] = inf_hi_of_bits(bits);
        lo[i] = (int16_t)(uint16_t)bits;
        least = lo[i] < least ? lo[i] : least;
    }
    return least == INT16_MIN;
}

/* The same by vector instructions where these are faster, or where there is a shadow. */
static int INF_ISA(adamw_split)(uint16_t *restrict hi, int16_t *restrict lo, float *restrict m,
                                float *restrict v, const float *restrict g, int64_t numel,
                                const inf_hyper *hyper, inf_shadow *shadow) {
#if INF_LANES
    /* gcc's and clang's code for AVX-512 is faster, but has no shadow */
    if (numel >= 16 && (INF_LANES == 8 || shadow != NULL)) {
        const int64_t n = numel / 16 * 16;
        INF_ISA(adamw_split_lanes)(hi, lo, m, v, g, n, hyper, shadow);
        return INF_ISA(has_halves)(lo, n) |
               INF_ISA(adamw_split_scalar)(hi + n, lo + n, m + n, v + n, g + n, numel - n, hyper);
    }
#endif
    (void)shadow;
    return INF_ISA(adamw_split_scalar)(hi, lo, m, v, g, numel, hyper);
}

#if !INF_LANES
/* Fused loops for the formats `bf16` and `compact`: division and square root take as long as all
 * other operations, which overlap with them. Same bits as update_block, which takes the blocks that
 * do not consist of whole rows of 16, or whole groups. adamw_lanes.h has these loops in vector
 * instructions. */
static void INF_ISA(adamw_bf16)(uint16_t *restrict hi, int16_t *restrict lo,
                                uint16_t *restrict m_bits, uint16_t *restrict v_bits,
                                const float *restrict g, int64_t numel, const inf_hyper *hyper,
                                inf_keys keys, inf_shadow *shadow) {
    const inf_hyper h = *hyper;
    (void)shadow;
    for (int64_t i = 0; i < numel; i++) {
        const float p = inf_float_from_bits(inf_join_bits(hi[i], lo[i]));
        float m = inf_float_from_bits((uint32_t)m_bits[i] << 16),
              v = inf_float_from_bits((uint32_t)v_bits[i] << 16);
        const uint32_t bits = inf_canonical_bits(INF_ISA(adamw_element)(p, g[i], &m, &v, &h));
        const uint32_t random = inf_random((uint32_t)i, keys);
        const uint32_t v_new = inf_canonical_bits(v),
                       v_rounded = (v_new + (random & 0xFFFFu)) >> 16;
        const uint32_t v_least = v_new != 0;
        hi[i] = inf_hi_of_bits(bits);
        lo[i] = (int16_t)(uint16_t)bits;
        m_bits[i] = (uint16_t)((inf_canonical_bits(m) + (random >> 16)) >> 16);
        v_bits[i] = (uint16_t)(v_rounded < v_least ? v_least : v_rounded);
    }
}

/* One group without the moments' codes: the outputs *_out are for store_q8. */
INF_INLINE void INF_ISA(adamw_compact)(uint16_t *restrict hi, int8_t *restrict lo,
                                       const uint8_t *restrict m_code,
                                       const uint8_t *restrict v_code,
                                       const uint16_t *restrict scales, const float *restrict g,
                                       const inf_hyper *hyper, inf_keys keys, uint32_t first,
                                       float *restrict m_out, float *restrict v_out,
                                       float *restrict root_out, uint32_t *restrict random_out) {
    const inf_hyper h = *hyper;
    const float m_scale = inf_float_from_bits((uint32_t)scales[0] << 16);
    const float v_scale = inf_float_from_bits((uint32_t)scales[1] << 16);
    for (int32_t i = 0; i < INF_QUANT_GROUP; i++) {
        const float p = inf_float_from_bits(inf_join_bits8(hi[i], lo[i]));
        float m = inf_square_code((int8_t)m_code[i], m_scale),
              v = inf_fourth_code(v_code[i], v_scale);
        float root;
        const float p_new = INF_ISA(adamw_rooted)(p, g[i], &m, &v, &root, &h);
        const uint32_t random = inf_random(first + (uint32_t)i, keys);
        const uint32_t bits = inf_canonical_bits(p_new) + (random >> 24);
        hi[i] = inf_hi_of_bits(bits & 0xFFFFFF00u);
        lo[i] = (int8_t)(uint8_t)(bits >> 8);
        m_out[i] = m;
        v_out[i] = v;
        root_out[i] = root;
        random_out[i] = random;
    }
}

/* A block of whole groups. */
static void INF_ISA(adamw_compact_block)(const inf_block *at, const float *restrict g,
                                         const inf_hyper *hyper, inf_keys keys,
                                         inf_shadow *shadow) {
    float m[INF_BLOCK_NUMEL] __attribute__((aligned(64))),
        v[INF_BLOCK_NUMEL] __attribute__((aligned(64)));
    float root[INF_BLOCK_NUMEL] __attribute__((aligned(64)));
    uint32_t random[INF_BLOCK_NUMEL] __attribute__((aligned(64)));
    uint16_t *scales = (uint16_t *)at->section[4];
    (void)shadow;
    for (int64_t i = 0; i < at->numel; i += INF_QUANT_GROUP) {
        INF_ISA(adamw_compact)((uint16_t *)at->section[0] + i, (int8_t *)at->section[1] + i,
                               at->section[2] + i, at->section[3] + i,
                               scales + i / INF_QUANT_GROUP * 2, g + i, hyper, keys, (uint32_t)i,
                               m + i, v + i, root + i, random + i);
    }
    INF_ISA(store_q8)(at->section[2], scales, m, root, random, inf_draw_of(INF_FORMAT_COMPACT, 0),
                      0, 2, at->numel);
    INF_ISA(store_q8)(at->section[3], scales, v, root, random, inf_draw_of(INF_FORMAT_COMPACT, 1),
                      1, 2, at->numel);
}
#endif

/* b: the momentum buffer, or NULL. g is overwritten. */
static void INF_ISA(sgd)(float *restrict p, float *restrict b, float *restrict g, int64_t numel,
                         const inf_hyper *hyper) {
    const float momentum = hyper->beta1, one_minus_dampening = hyper->one_minus_beta1;
    const float step_size = hyper->step_size, weight_decay = hyper->weight_decay;
    if (weight_decay != 0.0f) {
        for (int64_t i = 0; i < numel; i++) g[i] = g[i] + p[i] * weight_decay;
    }
    if (b != NULL) {
        if (hyper->flags & INF_FLAG_FIRST) {
            memcpy(b, g, (size_t)numel * sizeof(float));
        } else {
            for (int64_t i = 0; i < numel; i++) b[i] = b[i] * momentum + g[i] * one_minus_dampening;
        }
        if (hyper->flags & INF_FLAG_NESTEROV) {
            for (int64_t i = 0; i < numel; i++) g[i] = g[i] + b[i] * momentum;
        } else {
            memcpy(g, b, (size_t)numel * sizeof(float));
        }
    }
    for (int64_t i = 0; i < numel; i++) p[i] = p[i] - g[i] * step_size;
}

static void INF_ISA(lion)(float *restrict p, float *restrict m, const float *restrict g,
                          int64_t numel, const inf_hyper *hyper) {
    const inf_hyper h = *hyper;
    for (int64_t i = 0; i < numel; i++) {
        const float c = m[i] * h.beta1 + g[i] * h.one_minus_beta1;
        const uint32_t nan = 0u - (uint32_t)(c != c); /* the sign of NaN is NaN */
        const float sign = inf_float_from_bits(
            inf_bits_from_float((float)((c > 0.0f) - (c < 0.0f))) | (nan & INF_NAN_BITS));
        p[i] = p[i] * h.decay - sign * h.step_size;
        m[i] = m[i] * h.beta2 + g[i] * h.one_minus_beta2;
    }
}

/* ---- Muon ------------------------------------------------------------------------------------ */

/* a + (b - a) * weight, from the end that is nearer. */
INF_INLINE float INF_ISA(muon_lerp)(float a, float b, float weight) {
    const int near_a = fabsf(weight) < 0.5f;
    return fmaf(near_a ? weight : weight - 1.0f, b - a, near_a ? a : b);
}

/* The fp32 numbers x over the gradient from element `start` on; in two bytes as bf16, rounded to
 * nearest even. */
static void INF_ISA(store_matrix)(void *grad, int32_t grad_dtype, int64_t start,
                                  const float *restrict x, int64_t numel) {
    if (grad_dtype == INF_GRAD_FP32) {
        memcpy((float *)grad + start, x, (size_t)numel * sizeof(float));
        return;
    }
    uint16_t *restrict to = (uint16_t *)grad + start;
    for (int64_t i = 0; i < numel; i++) {
        const uint32_t bits = inf_canonical_bits(x[i]);
        to[i] = (uint16_t)((bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16);
    }
}

static void INF_ISA(muon_momentum)(int32_t format, const inf_block *at, const float *restrict g,
                                   float *restrict u, const inf_hyper *hyper) {
    float memory[INF_BLOCK_NUMEL] __attribute__((aligned(64)));
    uint32_t random[INF_BLOCK_NUMEL] __attribute__((aligned(64)));
    const float momentum = hyper->beta1, rest = hyper->one_minus_beta1;
    float *restrict m = INF_ISA(load_moment)(format, at, 0, memory);
    for (int64_t i = 0; i < at->numel; i++) m[i] = INF_ISA(muon_lerp)(m[i], g[i], rest);
    if (hyper->flags & INF_FLAG_NESTEROV) {
        for (int64_t i = 0; i < at->numel; i++) u[i] = INF_ISA(muon_lerp)(g[i], m[i], momentum);
    } else {
        memcpy(u, m, (size_t)at->numel * sizeof(float));
    }
    if (inf_format_moments(format) == INF_MOMENTS_FP32) return;
    const int64_t whole = (at->numel + INF_QUANT_GROUP - 1) / INF_QUANT_GROUP * INF_QUANT_GROUP;
    INF_ISA(fill_random)(random, hyper->key, at->element, whole);
    INF_ISA(store_moment)(format, at, 0, m, random); /* zero to the end of its last group */
}

/* The step of a master, whose signs in a second moment (halves_from_even) are cleared. */
static void INF_ISA(muon)(int32_t format, const inf_block *at, const float *restrict g,
                          const inf_hyper *hyper) {
    float memory[INF_BLOCK_NUMEL] __attribute__((aligned(64)));
    uint32_t random[INF_BLOCK_NUMEL] __attribute__((aligned(64)));
    const int32_t master = inf_format_master(format);
    const float decay = hyper->decay, step_size = hyper->step_size;
    uint16_t *const hi = (uint16_t *)at->section[0];
    int16_t *const lo = (int16_t *)at->section[1];
    if (format == INF_FORMAT_SPLIT)
        INF_ISA(halves_from_even)(hi, lo, (float *)at->section[3], at->numel);
    float *restrict p = INF_ISA(load_master)(master, at, memory);
    for (int64_t i = 0; i < at->numel; i++) p[i] = fmaf(g[i], -step_size, p[i] * decay);
    if (master == INF_MASTER_SPLIT8)
        INF_ISA(fill_random)(random, hyper->key, at->element, at->numel);
    INF_ISA(store_master)(master, at, p, random);
    if (master == INF_MASTER_SPLIT && INF_ISA(has_halves)(lo, at->numel))
        INF_ISA(halves_to_even)(hi, lo, NULL, at->numel);
}

static void INF_ISA(update_muon)(int32_t format, uint8_t *const section[INF_SECTION_MAX],
                                 void *grad, int32_t grad_dtype, int64_t numel, int64_t element,
                                 const inf_hyper *hyper) {
    float g[INF_BLOCK_NUMEL] __attribute__((aligned(64)));
    float u[INF_BLOCK_NUMEL] __attribute__((aligned(64)));
    int64_t group_bytes[INF_SECTION_MAX];
    inf_group_bytes(format, group_bytes);
    for (int64_t start = 0; start < numel; start += INF_BLOCK_NUMEL) {
        const int64_t n = numel - start < INF_BLOCK_NUMEL ? numel - start : INF_BLOCK_NUMEL;
        inf_block at = {.numel = n, .element = element + start};
        for (int32_t s = 0; s < INF_SECTION_MAX; s++) {
            if (section[s] != NULL)
                at.section[s] = section[s] + start / INF_QUANT_GROUP * group_bytes[s];
        }
        INF_ISA(load_gradient)(g, grad, grad_dtype, start, n, hyper);
        if (hyper->algorithm == INF_MUON) {
            INF_ISA(muon)(format, &at, g, hyper);
        } else {
            INF_ISA(muon_momentum)(format, &at, g, u, hyper);
            INF_ISA(store_matrix)(grad, grad_dtype, start, u, n);
        }
    }
}

/* ---- the update ------------------------------------------------------------------------------ */

static void INF_ISA(update_block)(int32_t format, const inf_block *at, float *restrict g,
                                  const inf_hyper *hyper) {
    float master[INF_BLOCK_NUMEL] __attribute__((aligned(64)));
    float moments[2][INF_BLOCK_NUMEL] __attribute__((aligned(64)));
    uint32_t random[INF_BLOCK_NUMEL] __attribute__((aligned(64)));
    const int32_t count = inf_format_count(format);
    float *p = INF_ISA(load_master)(inf_format_master(format), at, master);
    float *m[2] = {NULL, NULL};
    for (int32_t k = 0; k < count; k++) m[k] = INF_ISA(load_moment)(format, at, k, moments[k]);
    switch (hyper->algorithm) {
    case INF_ADAMW: INF_ISA(adamw)(p, m[0], m[1], g, at->numel, hyper); break;
    case INF_SGD: INF_ISA(sgd)(p, m[0], g, at->numel, hyper); break;
    default: INF_ISA(lion)(p, m[0], g, at->numel, hyper);
    }
    const int64_t whole = (at->numel + INF_QUANT_GROUP - 1) / INF_QUANT_GROUP * INF_QUANT_GROUP;
    for (int32_t k = 0; k < count && inf_format_moments(format) == INF_MOMENTS_Q8; k++) {
        /* no parameter's elements: must not affect the scale */
        memset(m[k] + at->numel, 0, (size_t)(whole - at->numel) * sizeof(float));
    }
    if (inf_format_master(format) == INF_MASTER_SPLIT8 ||
        inf_format_moments(format) != INF_MOMENTS_FP32) {
        INF_ISA(fill_random)(random, hyper->key, at->element, whole);
    }
    INF_ISA(store_master)(inf_format_master(format), at, p, random);
    for (int32_t k = 0; k < count; k++) INF_ISA(store_moment)(format, at, k, m[k], random);
}

/* Updates a block, by a fused loop if there is one. shadow: NULL, or one that these loops may
 * advance, for a block of INF_BLOCK_NUMEL. */
static void INF_ISA(update_part)(int32_t format, const inf_block *at, float *restrict g,
                                 const inf_hyper *hyper, inf_shadow *shadow) {
    const int one_key = (uint32_t)at->element <= 0xFFFFFFFFu - INF_BLOCK_NUMEL;
    if (hyper->algorithm == INF_ADAMW && one_key && format == INF_FORMAT_BF16 &&
        at->numel % 16 == 0) {
        INF_ISA(adamw_bf16)((uint16_t *)at->section[0], (int16_t *)at->section[1],
                            (uint16_t *)at->section[2], (uint16_t *)at->section[3], g, at->numel,
                            hyper, inf_keys_of(hyper->key, at->element), shadow);
    } else if (hyper->algorithm == INF_ADAMW && one_key && format == INF_FORMAT_COMPACT &&
               at->numel % INF_QUANT_GROUP == 0) {
        INF_ISA(adamw_compact_block)(at, g, hyper, inf_keys_of(hyper->key, at->element), shadow);
    } else {
        INF_ISA(update_block)(format, at, g, hyper);
    }
}

static void INF_ISA(update)(int32_t format, uint8_t *const section[INF_SECTION_MAX],
                            const void *grad, int32_t grad_dtype, int64_t numel, int64_t element,
                            const inf_hyper *hyper, int64_t ahead, inf_shadow *shadow) {
    float g[INF_BLOCK_NUMEL] __attribute__((aligned(64)));
    int64_t group_bytes[INF_SECTION_MAX];
    if (hyper->algorithm == INF_MUON || hyper->algorithm == INF_MUON_MOMENTUM) {
        /* the gradient's memory is the caller's, to be overwritten */
        INF_ISA(update_muon)(format, section, (void *)(uintptr_t)grad, grad_dtype, numel, element,
                             hyper);
        return;
    }
    inf_group_bytes(format, group_bytes);
    const int fused_split = format == INF_FORMAT_SPLIT && hyper->algorithm == INF_ADAMW;
    const int fused_fp32 = format == INF_FORMAT_FP32 && hyper->algorithm == INF_ADAMW;
    const int split = inf_format_master(format) == INF_MASTER_SPLIT;
    for (int64_t start = 0; start < numel; start += INF_BLOCK_NUMEL) {
        const int64_t n = numel - start < INF_BLOCK_NUMEL ? numel - start : INF_BLOCK_NUMEL;
        uint16_t *const hi = split ? (uint16_t *)section[0] + start : NULL;
        int16_t *const lo = split ? (int16_t *)section[1] + start : NULL;
        float *const v = format == INF_FORMAT_SPLIT ? (float *)section[3] + start : NULL;
        INF_ISA(load_gradient)(g, grad, grad_dtype, start, n, hyper);
        if (split) INF_ISA(halves_from_even)(hi, lo, v, n);
        if (ahead != 0) inf_prefetch(section, group_bytes, grad, grad_dtype, start + ahead);
        int halves = 0;
        inf_shadow *const taken =
            shadow != NULL && shadow->blocks > 0 && n == INF_BLOCK_NUMEL ? shadow : NULL;
        if (fused_split) {
            halves =
                INF_ISA(adamw_split)(hi, lo, (float *)section[2] + start, v, g, n, hyper, taken);
        } else if (fused_fp32) {
            INF_ISA(adamw)((float *)section[0] + start, (float *)section[1] + start,
                           (float *)section[2] + start, g, n, hyper);
        } else {
            inf_block at = {.numel = n, .element = element + start};
            for (int32_t s = 0; s < INF_SECTION_MAX; s++) {
                if (group_bytes[s] != 0)
                    at.section[s] = section[s] + start / INF_QUANT_GROUP * group_bytes[s];
            }
            INF_ISA(update_part)(format, &at, g, hyper, taken);
            halves = split && INF_ISA(has_halves)(lo, n);
        }
        if (halves) INF_ISA(halves_to_even)(hi, lo, v, n);
    }
}

#if INF_LANES
#include "lanes_end.h"
#endif
