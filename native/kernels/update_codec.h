/* Decoding and encoding of states, the part of optimizer_kernels.c that depends on formats;
 * included once per instruction set.
 *
 * No include guard (see optimizer_kernels.h). infinity/_src/kernels/state_codec.py computes the
 * same bits in torch, and gives the reasons. All functions work on a block of at most
 * INF_BLOCK_NUMEL elements, in L1, that starts at a quantisation group.
 */

/* ---- random bits: 32 for each element, from (key, element) alone ----------------------------- */

static void INF_ISA(fill_random)(uint32_t *restrict random, uint64_t key, int64_t element,
                                 int64_t numel) {
    for (int64_t done = 0; done < numel;) {
        /* up to the next multiple of 2^32: the keys depend on the upper half of the index */
        const int64_t left = 0x100000000 - (int64_t)(uint32_t)element;
        const int64_t n = numel - done < left ? numel - done : left;
        const inf_keys keys = inf_keys_of(key, element);
        for (int64_t i = 0; i < n; i++) random[done + i] = inf_random((uint32_t)i, keys);
        done += n;
        element += n;
    }
}

/* ---- masters --------------------------------------------------------------------------------- */

/* The masters as fp32: decoded to `memory`, or in place if they are stored as fp32. */
static float *INF_ISA(load_master)(int32_t master, const inf_block *at, float *restrict memory) {
    const int64_t n = at->numel;
    const uint16_t *restrict hi = (const uint16_t *)at->section[0];
    if (master == INF_MASTER_FP32) return (float *)at->section[0];
    if (master == INF_MASTER_FP16) return (float *)at->section[1];
    if (master == INF_MASTER_SPLIT) {
        const int16_t *restrict lo = (const int16_t *)at->section[1];
        for (int64_t i = 0; i < n; i++)
            memory[i] = inf_float_from_bits(inf_join_bits(hi[i], lo[i]));
    } else {
        const int8_t *restrict lo = (const int8_t *)at->section[1];
        for (int64_t i = 0; i < n; i++)
            memory[i] = inf_float_from_bits(inf_join_bits8(hi[i], lo[i]));
    }
    return memory;
}

/* random: the upper 8 bits are for rounding to 24 bits. */
static void INF_ISA(store_master)(int32_t master, const inf_block *at, const float *restrict p,
                                  const uint32_t *restrict random) {
    const int64_t n = at->numel;
    uint16_t *restrict hi = (uint16_t *)at->section[0];
    if (master == INF_MASTER_FP16) {
        for (int64_t i = 0; i < n; i++) hi[i] = inf_half_from_float(p[i]);
    } else if (master == INF_MASTER_SPLIT) {
        int16_t *restrict lo = (int16_t *)at->section[1];
        for (int64_t i = 0; i < n; i++) {
            const uint32_t bits = inf_canonical_bits(p[i]);
            hi[i] = inf_hi_of_bits(bits);
            lo[i] = (int16_t)(uint16_t)bits;
        }
    } else if (master == INF_MASTER_SPLIT8) {
        int8_t *restrict lo = (int8_t *)at->section[1];
        for (int64_t i = 0; i < n; i++) {
            const uint32_t bits = inf_canonical_bits(p[i]) + (random[i] >> 24);
            hi[i] = inf_hi_of_bits(bits & 0xFFFFFF00u);
            lo[i] = (int8_t)(uint8_t)(bits >> 8);
        }
    }
}

/* The loops round halves away from zero, so that (hi, lo) is a bijection. The stored `hi` is
 * rounded to even, as torch rounds. They differ if lo is -32768 and hi is odd: the stored hi is
 * then the lower one, and the sign bit of the second moment, which is never negative, is set.
 * Without such a moment in fp32 the stored lo is 32767, and the master becomes the next smaller
 * fp32 in magnitude.
 *
 * hi, lo: of a block; 1 block in 256 has such a lo. v: that second moment, or NULL. */

static int INF_ISA(has_halves)(const int16_t *restrict lo, int64_t n) {
    int16_t least = 0; /* one instruction a vector */
    for (int64_t i = 0; i < n; i++) least = lo[i] < least ? lo[i] : least;
    return least == INT16_MIN;
}

static void INF_ISA(halves_from_even)(uint16_t *restrict hi, const int16_t *restrict lo,
                                      float *restrict v, int64_t n) {
    if (v == NULL || !INF_ISA(has_halves)(lo, n)) return;
    for (int64_t i = 0; i < n; i++) {
        const uint32_t bits = inf_bits_from_float(v[i]);
        const uint32_t below = lo[i] == INT16_MIN ? bits >> 31 : 0;
        hi[i] = (uint16_t)(hi[i] + below);
        v[i] = inf_float_from_bits(bits ^ below << 31);
    }
}

static void INF_ISA(halves_to_even)(uint16_t *restrict hi, int16_t *restrict lo,
                                    float *restrict v, int64_t n) {
    for (int64_t i = 0; i < n; i++) {
        const uint32_t below = lo[i] == INT16_MIN ? hi[i] & 1u : 0;
        hi[i] = (uint16_t)(hi[i] - below);
        if (v != NULL) {
            v[i] = inf_float_from_bits(inf_bits_from_float(v[i]) | below << 31);
        } else {
            lo[i] = (int16_t)(uint16_t)((uint16_t)lo[i] - below);
        }
    }
}

/* ---- moments in bf16 ------------------------------------------------------------------------- */

static void INF_ISA(load_bf16)(float *restrict x, const uint16_t *restrict source, int64_t n) {
    for (int64_t i = 0; i < n; i++) x[i] = inf_float_from_bits((uint32_t)source[i] << 16);
}

static void INF_ISA(store_bf16)(uint16_t *restrict target, const float *restrict x,
                                const uint32_t *restrict random, inf_draw draw, uint32_t least,
                                int64_t n) {
    for (int64_t i = 0; i < n; i++) {
        const uint32_t bits = inf_canonical_bits(x[i]);
        const uint32_t noise = (random[i] >> draw.shift & draw.mask) << draw.left | draw.half;
        const uint32_t rounded = (bits + noise) >> 16;
        /* least 1: keeps a positive second moment positive */
        const uint32_t floor = bits != 0 ? least : 0;
        target[i] = (uint16_t)(rounded < floor ? floor : rounded);
    }
}

/* ---- moments in 8 bits: groups of INF_QUANT_GROUP -------------------------------------------- */

static void INF_ISA(load_q8)(float *restrict x, const uint8_t *restrict code,
                             const uint16_t *restrict scales, int32_t moment, int32_t count,
                             int64_t n) {
    for (int64_t at = 0; at < n; at += INF_QUANT_GROUP) {
        const float scale =
            inf_float_from_bits((uint32_t)scales[at / INF_QUANT_GROUP * count + moment] << 16);
        const uint8_t *restrict from = code + at;
        float *restrict to = x + at;
        uint8_t padded[INF_QUANT_GROUP];
        if (n - at < INF_QUANT_GROUP) { /* the end of a parameter: the rest of its group is zero */
            memset(padded, 0, sizeof padded);
            memcpy(padded, from, (size_t)(n - at));
            from = padded;
        }
        if (moment == 0) {
            for (int32_t i = 0; i < INF_QUANT_GROUP; i++)
                to[i] = inf_square_code((int8_t)from[i], scale);
        } else {
            for (int32_t i = 0; i < INF_QUANT_GROUP; i++) to[i] = inf_fourth_code(from[i], scale);
        }
    }
}

/* The scale of a group; in moment 1 (sign_mask all ones) NaN if it has a negative number. */
INF_INLINE uint32_t INF_ISA(group_scale)(const float *restrict x, uint32_t sign_mask) {
    uint32_t most = 0;
    for (int32_t i = 0; i < INF_QUANT_GROUP; i++) {
        const uint32_t bits = inf_bits_from_float(x[i]) & sign_mask;
        most = bits > most ? bits : most;
    }
    return inf_scale_above(most);
}

/* The codes of a group of finite numbers; factor: 127^2 / scale, or 255^4 / scale. Where rounding
 * takes a root across an integer, `low` is off by one; the number then equals that code up to its
 * last bits, so both codes are right. */
INF_INLINE void INF_ISA(encode_square)(uint8_t *restrict code, const float *restrict x,
                                       const uint32_t *restrict random, inf_draw draw,
                                       float factor) {
    for (int32_t i = 0; i < INF_QUANT_GROUP; i++) {
        const float y = fabsf(x[i]) * factor;
        const int32_t low = (int32_t)sqrtf(y);
        const float c = (float)low, step = (float)(low + low + 1);
        const float u =
            inf_float_from_bits((random[i] >> draw.place & draw.place_mask) | draw.place_one);
        int32_t number = low + (u * step < (y - c * c) + step);
        number = number > 127 ? 127 : number;
        const int32_t negative = -(int32_t)(x[i] < 0.0f);
        code[i] = (uint8_t)((number ^ negative) - negative);
    }
}

/* root: the square roots of x, which the update has computed. */
INF_INLINE void INF_ISA(encode_fourth)(uint8_t *restrict code, const float *restrict x,
                                       const float *restrict root, const uint32_t *restrict random,
                                       inf_draw draw, float factor) {
    const float root_factor = sqrtf(factor);
    for (int32_t i = 0; i < INF_QUANT_GROUP; i++) {
        const float y = x[i] * factor;
        const int32_t low = (int32_t)sqrtf(root[i] * root_factor);
        const float c = (float)low, next = (float)(low + 1);
        const float below = c * c, above = next * next;
        const float base = below * below, step = above * above - base;
        const float u =
            inf_float_from_bits((random[i] << draw.place & draw.place_mask) | draw.place_one);
        int32_t number = low + (u * step < (y - base) + step);
        number = number > 255 ? 255 : number;
        const int32_t least = inf_bits_from_float(x[i]) != 0;
        code[i] = (uint8_t)(number < least ? least : number);
    }
}

/* x, and for moment 1 its square roots: whole groups, zero beyond n. All scales first, since their
 * dependency chains overlap. */
static void INF_ISA(store_q8)(uint8_t *restrict code, uint16_t *restrict scales,
                              const float *restrict x, const float *restrict root,
                              const uint32_t *restrict random, inf_draw draw, int32_t moment,
                              int32_t count, int64_t n) {
    const int32_t groups = (int32_t)((n + INF_QUANT_GROUP - 1) / INF_QUANT_GROUP);
    float factor[INF_BLOCK_NUMEL / INF_QUANT_GROUP];
    for (int32_t k = 0; k < groups; k++) {
        const uint32_t bits =
            INF_ISA(group_scale)(x + k * INF_QUANT_GROUP, moment == 0 ? 0x7FFFFFFFu : 0xFFFFFFFFu);
        scales[k * count + moment] = (uint16_t)bits;
        factor[k] = inf_code_factor(moment, bits);
    }
    for (int32_t k = 0; k < groups; k++) {
        const int64_t at = k * INF_QUANT_GROUP;
        uint8_t end[INF_QUANT_GROUP];
        uint8_t *restrict to = n - at < INF_QUANT_GROUP ? end : code + at;
        if (factor[k] == 0.0f) {
            memset(to, 0, INF_QUANT_GROUP);
        } else if (moment == 0) {
            INF_ISA(encode_square)(to, x + at, random + at, draw, factor[k]);
        } else {
            INF_ISA(encode_fourth)(to, x + at, root + at, random + at, draw, factor[k]);
        }
        if (n - at < INF_QUANT_GROUP) memcpy(code + at, end, (size_t)(n - at));
    }
}

/* ---- moments in any encoding ----------------------------------------------------------------- */

/* The moment as fp32: decoded to `memory` (zero to the end of its last group), or in place if it is
 * stored as fp32. */
static float *INF_ISA(load_moment)(int32_t format, const inf_block *at, int32_t moment,
                                   float *restrict memory) {
    const int32_t first = inf_format_master_count(format), count = inf_format_count(format);
    uint8_t *source = at->section[first + moment];
    switch (inf_format_moments(format)) {
    case INF_MOMENTS_FP32: return (float *)source;
    case INF_MOMENTS_BF16: INF_ISA(load_bf16)(memory, (const uint16_t *)source, at->numel); break;
    default:
        INF_ISA(load_q8)(memory, source, (const uint16_t *)at->section[first + count], moment,
                         count, at->numel);
    }
    return memory;
}

static void INF_ISA(store_moment)(int32_t format, const inf_block *at, int32_t moment,
                                  float *restrict x, const uint32_t *restrict random) {
    const int32_t first = inf_format_master_count(format), count = inf_format_count(format);
    uint8_t *target = at->section[first + moment];
    const inf_draw draw = inf_draw_of(format, moment);
    if (inf_format_moments(format) == INF_MOMENTS_BF16) {
        INF_ISA(store_bf16)((uint16_t *)target, x, random, draw, moment == 1, at->numel);
    } else if (inf_format_moments(format) == INF_MOMENTS_Q8) {
        float root[INF_BLOCK_NUMEL] __attribute__((aligned(64)));
        const int64_t whole = (at->numel + INF_QUANT_GROUP - 1) / INF_QUANT_GROUP * INF_QUANT_GROUP;
        for (int64_t i = 0; moment == 1 && i < whole; i++) root[i] = sqrtf(x[i]);
        INF_ISA(store_q8)(target, (uint16_t *)at->section[first + count], x, root, random, draw,
                          moment, count, at->numel);
    }
}
