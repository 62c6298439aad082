/* AdamW of the three formats of bf16 parameters, by vector instructions. Compilers vectorise the
 * loops of optimizer_kernels.h, but spend as many instructions on narrowing and on scales as on the
 * update. Same bits as these loops, except for payloads of NaN in fp32 moments. Included once per
 * instruction set that lanes.h has.
 */
#include "lanes.h"

/* The scalars of AdamW, one vector each. */
typedef struct {
    VF decay, beta1, one_minus_beta1, beta2, one_minus_beta2, eps, bc2_sqrt, step_size, nan;
} INF_ISA(adamw_vectors);

INF_INLINE INF_ISA(adamw_vectors) INF_ISA(adamw_vectors_of)(const inf_hyper *h) {
    return (INF_ISA(adamw_vectors)){SET_F(h->decay),
                                    SET_F(h->beta1),
                                    SET_F(h->one_minus_beta1),
                                    SET_F(h->beta2),
                                    SET_F(h->one_minus_beta2),
                                    SET_F(h->eps),
                                    SET_F(h->bc2_sqrt),
                                    SET_F(h->step_size),
                                    AS_F(SET_I(INF_NAN_BITS))};
}

/* The streams of an inf_shadow, in registers while a block is updated. The three functions below do
 * nothing where `shadow` is NULL. */
typedef struct {
    const uint8_t *words;
    size_t stream_bytes;
    uint64_t a, b, c;
} INF_ISA(streams);

INF_INLINE INF_ISA(streams) INF_ISA(streams_of)(const inf_shadow *shadow) {
    if (shadow == NULL) return (INF_ISA(streams)){NULL, 0, 0, 0, 0};
    return (INF_ISA(streams)){shadow->words, shadow->stream_bytes, shadow->state[0],
                              shadow->state[1], shadow->state[2]};
}

INF_INLINE uint64_t INF_ISA(crc_step)(uint64_t state, const uint8_t *from) {
    uint64_t word;
    memcpy(&word, from, sizeof word);
    return _mm_crc32_u64(state, word);
}

/* What a row of 16 elements takes along: 64 bytes of each stream. */
INF_INLINE void INF_ISA(step_streams)(const inf_shadow *shadow, INF_ISA(streams) * s) {
    enum { STEP_BYTES = INF_SHADOW_STREAM / (INF_BLOCK_NUMEL / 16) };
    if (shadow == NULL) return;
    UNROLL
    for (int at = 0; at < STEP_BYTES; at += 8) {
        s->a = INF_ISA(crc_step)(s->a, s->words + at);
        s->b = INF_ISA(crc_step)(s->b, s->words + s->stream_bytes + at);
        s->c = INF_ISA(crc_step)(s->c, s->words + 2 * s->stream_bytes + at);
    }
    s->words += STEP_BYTES;
}

INF_INLINE void INF_ISA(end_streams)(inf_shadow *shadow, const INF_ISA(streams) * s) {
    if (shadow == NULL) return;
    shadow->state[0] = s->a;
    shadow->state[1] = s->b;
    shadow->state[2] = s->c;
    inf_shadow_advance(shadow);
}

/* The first half of adamw_rooted, of each lane: the moments, and the root of the second one. */
INF_INLINE VF INF_ISA(update_moments)(VF g, VF *m, VF *v, const INF_ISA(adamw_vectors) * h) {
    *m = *m * h->beta1 + g * h->one_minus_beta1;
    *v = *v * h->beta2 + (g * g) * h->one_minus_beta2;
    return SQRT(*v);
}

/* The second half: the bits of the updated master. */
INF_INLINE VI INF_ISA(update_master)(VF p, VF m, VF root, const INF_ISA(adamw_vectors) * h) {
    const VF updated = p * h->decay - (m / (root / h->bc2_sqrt + h->eps)) * h->step_size;
    return CANONICAL(updated, h->nan);
}

INF_INLINE VF INF_ISA(join_vector)(const uint16_t *hi, const int16_t *lo) {
    return AS_F(ADD_I(SHIFT_LEFT(LOAD_U16(hi), 16), LOAD_S16(lo)));
}

/* Writes 16 masters. */
INF_INLINE void INF_ISA(store_split)(uint16_t *hi, int16_t *lo, const VI bits[ROW_16]) {
    VI upper[ROW_16], lower[ROW_16];
    UNROLL
    for (int k = 0; k < ROW_16; k++) {
        upper[k] = SHIFT_RIGHT(ADD_I(bits[k], SET_I(0x8000)), 16);
        lower[k] = AND_I(bits[k], SET_I(0xFFFF));
    }
    STORE_U16(hi, upper);
    STORE_U16(lo, lower);
}

/* inf_random of the indices from `first`. */
INF_INLINE VI INF_ISA(random_vector)(uint32_t first, inf_keys keys) {
    VI h = ADD_I(IOTA, SET_I(first + keys.low));
    h = MUL_I(XOR_I(h, SHIFT_RIGHT(h, 16)), SET_I(0x7FEB352D));
    h = XOR_I(XOR_I(h, SHIFT_RIGHT(h, 15)), SET_I(keys.high));
    h = MUL_I(h, SET_I(0x846CA68Bu));
    return XOR_I(h, SHIFT_RIGHT(h, 16));
}

/* Masters of 16 elements, given their updated moments. */
INF_INLINE void INF_ISA(finish_split)(uint16_t *hi, int16_t *lo, const VF m[ROW_16],
                                      const VF root[ROW_16], const INF_ISA(adamw_vectors) * h) {
    VI bits[ROW_16];
    UNROLL
    for (int k = 0; k < ROW_16; k++) {
        const VF p = INF_ISA(join_vector)(hi + k * INF_LANES, lo + k * INF_LANES);
        bits[k] = INF_ISA(update_master)(p, m[k], root[k], h);
    }
    INF_ISA(store_split)(hi, lo, bits);
}

/* Both loops below finish a row while the next one's roots are being computed: root, two divisions
 * and the rest in one iteration are a chain that is too long for the processor to overlap with the
 * following ones. */

/* numel: a multiple of 16, above 0; INF_BLOCK_NUMEL with a shadow (or NULL). */
INF_INLINE void INF_ISA(split_rows)(uint16_t *restrict hi, int16_t *restrict lo,
                                    float *restrict m_at, float *restrict v_at,
                                    const float *restrict g, int64_t numel, const inf_hyper *hyper,
                                    inf_shadow *shadow) {
    INF_ISA(streams) streams = INF_ISA(streams_of)(shadow);
    const INF_ISA(adamw_vectors) h = INF_ISA(adamw_vectors_of)(hyper);
    VF m[ROW_16] = {{0}}, root[ROW_16] = {{0}};
    for (int64_t i = 0; i < numel; i += 16) {
        VF m_next[ROW_16], root_next[ROW_16];
        UNROLL
        for (int k = 0; k < ROW_16; k++) {
            const int64_t at = i + k * INF_LANES;
            VF v = LOAD_F(v_at + at);
            m_next[k] = LOAD_F(m_at + at);
            root_next[k] = INF_ISA(update_moments)(LOAD_F(g + at), &m_next[k], &v, &h);
            STORE_F(m_at + at, m_next[k]);
            STORE_F(v_at + at, v);
        }
        INF_ISA(step_streams)(shadow, &streams);
        if (i > 0) INF_ISA(finish_split)(hi + i - 16, lo + i - 16, m, root, &h);
        UNROLL
        for (int k = 0; k < ROW_16; k++) {
            m[k] = m_next[k];
            root[k] = root_next[k];
        }
    }
    INF_ISA(finish_split)(hi + numel - 16, lo + numel - 16, m, root, &h);
    INF_ISA(end_streams)(shadow, &streams);
}

/* A copy of the loop for each case: a single one, which tests `shadow` in each row, takes up to 1.1
 * times as long. */
static void INF_ISA(adamw_split_lanes)(uint16_t *restrict hi, int16_t *restrict lo,
                                       float *restrict m, float *restrict v,
                                       const float *restrict g, int64_t numel,
                                       const inf_hyper *hyper, inf_shadow *shadow) {
    if (shadow == NULL) {
        INF_ISA(split_rows)(hi, lo, m, v, g, numel, hyper, NULL);
    } else {
        INF_ISA(split_rows)(hi, lo, m, v, g, numel, hyper, shadow);
    }
}

/* numel, shadow: as above. */
INF_INLINE void INF_ISA(bf16_rows)(uint16_t *restrict hi, int16_t *restrict lo,
                                   uint16_t *restrict m_bits, uint16_t *restrict v_bits,
                                   const float *restrict g, int64_t numel, const inf_hyper *hyper,
                                   inf_keys keys, inf_shadow *shadow) {
    INF_ISA(streams) streams = INF_ISA(streams_of)(shadow);
    const INF_ISA(adamw_vectors) h = INF_ISA(adamw_vectors_of)(hyper);
    VF m[ROW_16] = {{0}}, root[ROW_16] = {{0}};
    for (int64_t i = 0; i < numel; i += 16) {
        VF m_next[ROW_16], root_next[ROW_16];
        VI m_rounded[ROW_16], v_rounded[ROW_16];
        UNROLL
        for (int k = 0; k < ROW_16; k++) {
            const int64_t at = i + k * INF_LANES;
            VF v = AS_F(SHIFT_LEFT(LOAD_U16(v_bits + at), 16));
            m_next[k] = AS_F(SHIFT_LEFT(LOAD_U16(m_bits + at), 16));
            root_next[k] = INF_ISA(update_moments)(LOAD_F(g + at), &m_next[k], &v, &h);
            const VI random = INF_ISA(random_vector)((uint32_t)at, keys);
            const VI m_new = CANONICAL(m_next[k], h.nan), v_new = CANONICAL(v, h.nan);
            m_rounded[k] = SHIFT_RIGHT(ADD_I(m_new, SHIFT_RIGHT(random, 16)), 16);
            v_rounded[k] = MAX_U(SHIFT_RIGHT(ADD_I(v_new, AND_I(random, SET_I(0xFFFF))), 16),
                                 NONZERO_I(v_new, SET_I(1)));
        }
        STORE_U16(m_bits + i, m_rounded);
        STORE_U16(v_bits + i, v_rounded);
        INF_ISA(step_streams)(shadow, &streams);
        if (i > 0) INF_ISA(finish_split)(hi + i - 16, lo + i - 16, m, root, &h);
        UNROLL
        for (int k = 0; k < ROW_16; k++) {
            m[k] = m_next[k];
            root[k] = root_next[k];
        }
    }
    INF_ISA(finish_split)(hi + numel - 16, lo + numel - 16, m, root, &h);
    INF_ISA(end_streams)(shadow, &streams);
}

/* As adamw_split_lanes. */
static void INF_ISA(adamw_bf16)(uint16_t *restrict hi, int16_t *restrict lo, uint16_t *restrict m,
                                uint16_t *restrict v, const float *restrict g, int64_t numel,
                                const inf_hyper *hyper, inf_keys keys, inf_shadow *shadow) {
    if (shadow == NULL) {
        INF_ISA(bf16_rows)(hi, lo, m, v, g, numel, hyper, keys, NULL);
    } else {
        INF_ISA(bf16_rows)(hi, lo, m, v, g, numel, hyper, keys, shadow);
    }
}

/* What a block of `compact` keeps in L1 between the update and the encoding of its moments. */
typedef struct {
    float m[INF_BLOCK_NUMEL];
    float v[INF_BLOCK_NUMEL];
    float root[INF_BLOCK_NUMEL];
    uint32_t random[INF_BLOCK_NUMEL];
} __attribute__((aligned(64))) INF_ISA(compact_block);

/* The largest of a vector's lanes. */
INF_INLINE uint32_t INF_ISA(largest)(VI x) {
#if INF_LANES == 8
    __m128i most = _mm_max_epu32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
    most = _mm_max_epu32(most, _mm_shuffle_epi32(most, 0x4E));
    most = _mm_max_epu32(most, _mm_shuffle_epi32(most, 0xB1));
    return (uint32_t)_mm_cvtsi128_si32(most);
#else
    return _mm512_reduce_max_epu32(x);
#endif
}

/* Decodes the moments of a group, and updates them. Returns in `most` the largest bits of |m| and
 * of v. */
INF_INLINE void INF_ISA(update_group)(const uint8_t *m_code, const uint8_t *v_code,
                                      const uint16_t *scales, const float *g,
                                      const INF_ISA(adamw_vectors) * h, float *m_out, float *v_out,
                                      float *root_out, uint32_t most[2]) {
    const VF m_scale = SET_F(inf_float_from_bits((uint32_t)scales[0] << 16));
    const VF v_scale = SET_F(inf_float_from_bits((uint32_t)scales[1] << 16));
    const VI magnitude = SET_I(0x7FFFFFFF);
    VI m_most = SET_I(0), v_most = SET_I(0);
    for (int32_t i = 0; i < INF_QUANT_GROUP; i += INF_LANES) {
        const VF c = TO_F(LOAD_S8(m_code + i)), d = TO_F(LOAD_U8(v_code + i));
        const VF square = d * d;
        VF m = ((c * AS_F(AND_I(AS_I(c), magnitude))) * SET_F(INF_SQUARE_STEP)) * m_scale;
        VF v = ((square * square) * SET_F(INF_FOURTH_STEP)) * v_scale;
        STORE_F(root_out + i, INF_ISA(update_moments)(LOAD_F(g + i), &m, &v, h));
        STORE_F(m_out + i, m);
        STORE_F(v_out + i, v);
        m_most = MAX_U(m_most, AND_I(AS_I(m), magnitude));
        v_most = MAX_U(v_most, AS_I(v));
    }
    most[0] = INF_ISA(largest)(m_most);
    most[1] = INF_ISA(largest)(v_most);
}

/* The masters of a block of whole groups, and its random bits. As above, a row's denominators are
 * computed while the row before is finished. One loop with and without a shadow: with two copies,
 * the one with a shadow took a fifth longer on AVX-512. */
INF_INLINE void INF_ISA(finish_compact)(uint16_t *hi, int8_t *lo, INF_ISA(compact_block) * kept,
                                        int64_t numel, inf_keys keys,
                                        const INF_ISA(adamw_vectors) * h, inf_shadow *shadow) {
    INF_ISA(streams) streams = INF_ISA(streams_of)(shadow);
    VF denominator[ROW_8];
    UNROLL
    for (int k = 0; k < ROW_8; k++)
        denominator[k] = LOAD_F(kept->root + k * INF_LANES) / h->bc2_sqrt + h->eps;
    for (int64_t i = 0; i < numel; i += 32) {
        VI upper[2 * ROW_16], lower[ROW_8];
        const int64_t next = i + 32 < numel ? i + 32 : 0;
        INF_ISA(step_streams)(shadow, &streams);
        INF_ISA(step_streams)(shadow, &streams);
        UNROLL
        for (int k = 0; k < ROW_8; k++) {
            const int64_t at = i + k * INF_LANES;
            const VI random = INF_ISA(random_vector)((uint32_t)at, keys);
            STORE_I(kept->random + at, random);
            const VI master = ADD_I(SHIFT_LEFT(LOAD_U16(hi + at), 16),
                                    SHIFT_LEFT(LOAD_S8(lo + at), 8));
            const VF updated = AS_F(master) * h->decay -
                               (LOAD_F(kept->m + at) / denominator[k]) * h->step_size;
            const VI bits = ADD_I(CANONICAL(updated, h->nan), SHIFT_RIGHT(random, 24));
            upper[k] = SHIFT_RIGHT(ADD_I(bits, SET_I(0x8000)), 16);
            lower[k] = AND_I(SHIFT_RIGHT(bits, 8), SET_I(0xFF));
            denominator[k] =
                LOAD_F(kept->root + next + k * INF_LANES) / h->bc2_sqrt + h->eps;
        }
        STORE_U16(hi + i, upper);
        STORE_U16(hi + i + 16, upper + ROW_16);
        STORE_U8(lo + i, lower);
    }
    INF_ISA(end_streams)(shadow, &streams);
}

/* The random number in [1, 2) of each lane, for the rounding of a moment (inf_draw). */
INF_INLINE VF INF_ISA(draw_vector)(const uint32_t *random, int32_t moment) {
    const inf_draw draw = inf_draw_of(INF_FORMAT_COMPACT, moment);
    const VI bits = LOAD_I(random);
    const VI placed = moment == 0 ? SHIFT_RIGHT(bits, (int)draw.place)
                                  : SHIFT_LEFT(bits, (int)draw.place);
    return AS_F(OR_I(AND_I(placed, SET_I(draw.place_mask)), SET_I(draw.place_one)));
}

/* Both functions below encode the moments of whole groups as encode_square and encode_fourth do.
 * Codes stay fp32 until they are stored, which is exact. factor: of each group; codes of a group
 * whose factor is 0 are undefined. As in adamw_split_lanes, a row is encoded while the next one's
 * roots are being computed. */

INF_INLINE void INF_ISA(square_roots)(const float *x, float factor, VF y[ROW_8], VF low[ROW_8]) {
    UNROLL
    for (int k = 0; k < ROW_8; k++) {
        y[k] = AS_F(AND_I(LOAD_I(x + k * INF_LANES), SET_I(0x7FFFFFFF))) * SET_F(factor);
        low[k] = TRUNCATE(SQRT(y[k]));
    }
}

INF_INLINE void INF_ISA(encode_squares)(uint8_t *code, const float *x, const uint32_t *random,
                                        const float *factor, int64_t numel) {
    const VF one = SET_F(1.0f);
    VF y[ROW_8], low[ROW_8];
    INF_ISA(square_roots)(x, factor[0], y, low);
    for (int64_t i = 0; i < numel; i += 32) {
        VF y_next[ROW_8], low_next[ROW_8];
        VI row[ROW_8];
        const int64_t next = i + 32 < numel ? i + 32 : 0;
        INF_ISA(square_roots)(x + next, factor[next / INF_QUANT_GROUP], y_next, low_next);
        UNROLL
        for (int k = 0; k < ROW_8; k++) {
            const int64_t at = i + k * INF_LANES;
            const VF u = INF_ISA(draw_vector)(random + at, 0), step = (low[k] + low[k]) + one;
            const VF number = low[k] + LESS(u * step, (y[k] - low[k] * low[k]) + step, one);
            const VI sign = AND_I(LOAD_I(x + at), SET_I(0x80000000u));
            row[k] = TO_I(AS_F(OR_I(AS_I(MIN_F(number, SET_F(127.0f))), sign)));
            y[k] = y_next[k];
            low[k] = low_next[k];
        }
        STORE_S8(code + i, row);
    }
}

INF_INLINE void INF_ISA(fourth_roots)(const float *root, float factor, VF low[ROW_8]) {
    const VF root_factor = SET_F(sqrtf(factor));
    UNROLL
    for (int k = 0; k < ROW_8; k++)
        low[k] = TRUNCATE(SQRT(LOAD_F(root + k * INF_LANES) * root_factor));
}

INF_INLINE void INF_ISA(encode_fourths)(uint8_t *code, const float *x, const float *root,
                                        const uint32_t *random, const float *factor,
                                        int64_t numel) {
    const VF one = SET_F(1.0f);
    VF low[ROW_8];
    INF_ISA(fourth_roots)(root, factor[0], low);
    for (int64_t i = 0; i < numel; i += 32) {
        VF low_next[ROW_8];
        VI row[ROW_8];
        const int64_t next = i + 32 < numel ? i + 32 : 0;
        INF_ISA(fourth_roots)(root + next, factor[next / INF_QUANT_GROUP], low_next);
        const VF group_factor = SET_F(factor[i / INF_QUANT_GROUP]);
        UNROLL
        for (int k = 0; k < ROW_8; k++) {
            const int64_t at = i + k * INF_LANES;
            const VF value = LOAD_F(x + at), above_low = low[k] + one;
            const VF below = low[k] * low[k], above = above_low * above_low;
            const VF base = below * below, step = above * above - base;
            const VF u = INF_ISA(draw_vector)(random + at, 1);
            const VF number =
                low[k] + LESS(u * step, (value * group_factor - base) + step, one);
            /* a positive number keeps a code above 0 */
            row[k] = MAX_U(TO_I(MIN_F(number, SET_F(255.0f))), NONZERO_I(AS_I(value), SET_I(1)));
            low[k] = low_next[k];
        }
        STORE_U8(code + i, row);
    }
}

/* A block of whole groups, at least one. All scales come first, since their chains of dependent
 * instructions overlap. */
static void INF_ISA(adamw_compact_block)(const inf_block *at, const float *restrict g,
                                         const inf_hyper *hyper, inf_keys keys,
                                         inf_shadow *shadow) {
    const INF_ISA(adamw_vectors) h = INF_ISA(adamw_vectors_of)(hyper);
    INF_ISA(compact_block) kept;
    uint16_t *scales = (uint16_t *)at->section[4];
    uint32_t most[INF_BLOCK_NUMEL / INF_QUANT_GROUP][2];
    const int64_t groups = at->numel / INF_QUANT_GROUP;
    int64_t group = 0;
    do { /* with `for`, gcc -O1 warns that `kept` may be uninitialized */
        const int64_t i = group * INF_QUANT_GROUP;
        INF_ISA(update_group)(at->section[2] + i, at->section[3] + i, scales + 2 * group, g + i, &h,
                              kept.m + i, kept.v + i, kept.root + i, most[group]);
    } while (++group < groups);
    INF_ISA(finish_compact)((uint16_t *)at->section[0], (int8_t *)at->section[1], &kept, at->numel,
                            keys, &h, shadow);
    float factor[2][INF_BLOCK_NUMEL / INF_QUANT_GROUP];
    for (int64_t k = 0; k < 2 * groups; k++) {
        const uint32_t scale = inf_scale_above(most[k / 2][k % 2]);
        scales[k] = (uint16_t)scale;
        factor[k % 2][k / 2] = inf_code_factor((int32_t)(k % 2), scale);
    }
    INF_ISA(encode_squares)(at->section[2], kept.m, kept.random, factor[0], at->numel);
    INF_ISA(encode_fourths)(at->section[3], kept.v, kept.root, kept.random, factor[1], at->numel);
    for (int64_t k = 0; k < 2 * groups; k++) {
        if (factor[k % 2][k / 2] == 0.0f)
            memset(at->section[2 + k % 2] + k / 2 * INF_QUANT_GROUP, 0, INF_QUANT_GROUP);
    }
}
