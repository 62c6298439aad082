/* The loop bodies of adamw.c, included once per instruction set with INF_ISA(name) naming the functions.
 *
 * No include guard: adamw.c includes this file inside `#pragma GCC target` regions. Every operation rounds once to
 * fp32, in one order (below); with -ffp-contract=off each instruction set then gives the same bits, and so does the
 * torch reference in infinity/ops/adamw.py:
 *
 *   g = float(grad); for (kind, value) in log: g = g * value or g / value
 *   p = p * decay
 *   m = m * beta1 + g * one_minus_beta1
 *   v = v * beta2 + (g * g) * one_minus_beta2
 *   p = p - (m / (sqrt(v) / bc2_sqrt + eps)) * step_size
 *
 * The log is replayed on a block of gradients in L1, so that its loop is outside the element loops and these vectorise.
 */

static void INF_ISA(load_gradient)(float *restrict g, const void *grad, int32_t grad_dtype, int64_t start, int64_t numel,
                                   const inf_hyper *hyper) {
    if (grad_dtype == INF_GRAD_BF16) {
        const uint16_t *restrict source = (const uint16_t *)grad + start;
        for (int64_t i = 0; i < numel; i++) g[i] = inf_float_from_bits((uint32_t)source[i] << 16);
    } else {
        memcpy(g, (const float *)grad + start, (size_t)numel * sizeof(float));
    }
    for (int32_t k = 0; k < hyper->log_count; k++) {
        const float value = hyper->log_value[k];
        if (hyper->log_kind[k] == INF_LOG_MUL) {
            for (int64_t i = 0; i < numel; i++) g[i] *= value;
        } else {
            for (int64_t i = 0; i < numel; i++) g[i] /= value;
        }
    }
}

/* One element's update; `h` is a local copy of the scalars so that they stay in registers. */
static inline float INF_ISA(element)(float p, float g, float *restrict m, float *restrict v, const inf_hyper *h) {
    const float decayed = p * h->decay;
    const float m_new = *m * h->beta1 + g * h->one_minus_beta1;
    const float v_new = *v * h->beta2 + (g * g) * h->one_minus_beta2;
    const float denom = sqrtf(v_new) / h->bc2_sqrt + h->eps;
    *m = m_new;
    *v = v_new;
    return decayed - (m_new / denom) * h->step_size;
}

static void INF_ISA(block_split)(uint16_t *restrict hi, int16_t *restrict lo, float *restrict m, float *restrict v,
                                 const float *restrict g, int64_t numel, const inf_hyper *hyper) {
    const inf_hyper h = *hyper;
    for (int64_t i = 0; i < numel; i++) {
        const float p = INF_ISA(element)(inf_float_from_bits(inf_join_bits(hi[i], lo[i])), g[i], &m[i], &v[i], &h);
        const uint32_t bits = inf_canonical_bits(p);
        hi[i] = (uint16_t)((bits + 0x8000u) >> 16);
        lo[i] = (int16_t)(uint16_t)bits;
    }
}

static void INF_ISA(block_fp32)(float *restrict p, float *restrict m, float *restrict v, const float *restrict g,
                                int64_t numel, const inf_hyper *hyper) {
    const inf_hyper h = *hyper;
    for (int64_t i = 0; i < numel; i++) p[i] = INF_ISA(element)(p[i], g[i], &m[i], &v[i], &h);
}

static void INF_ISA(adamw_split)(uint16_t *hi, int16_t *lo, float *m, float *v, const void *grad, int32_t grad_dtype,
                                 int64_t numel, const inf_hyper *hyper) {
    float g[INF_BLOCK_NUMEL] __attribute__((aligned(64)));
    for (int64_t at = 0; at < numel; at += INF_BLOCK_NUMEL) {
        const int64_t n = numel - at < INF_BLOCK_NUMEL ? numel - at : INF_BLOCK_NUMEL;
        INF_ISA(load_gradient)(g, grad, grad_dtype, at, n, hyper);
        INF_ISA(block_split)(hi + at, lo + at, m + at, v + at, g, n, hyper);
    }
}

static void INF_ISA(adamw_fp32)(float *p, float *m, float *v, const void *grad, int32_t grad_dtype, int64_t numel,
                                const inf_hyper *hyper) {
    float g[INF_BLOCK_NUMEL] __attribute__((aligned(64)));
    for (int64_t at = 0; at < numel; at += INF_BLOCK_NUMEL) {
        const int64_t n = numel - at < INF_BLOCK_NUMEL ? numel - at : INF_BLOCK_NUMEL;
        INF_ISA(load_gradient)(g, grad, grad_dtype, at, n, hyper);
        INF_ISA(block_fp32)(p + at, m + at, v + at, g, n, hyper);
    }
}
