/* The loops of comm_codec.c, included once per instruction set with INF_ISA(name) naming the
 * functions.
 * No include guard.
 *
 * Every operation rounds once to fp32, in one order; with -ffp-contract=off each instruction set
 * gives the same bits:
 *
 *   encode      x = float(value) + float(error); scale = rounded(largest |x| / levels)
 *               y = x / scale; code = y to nearest, ties to even, or floor(y) + (u < y - floor(y))
 *               error = x - code * scale
 *   decode_sum  s = code * scale of the first wire; s = s + code * scale of the next ...
 *               s / divisor
 *
 * Block by block, in L1: each wire is read and written once.
 */

/* ---- values between their dtype and fp32 ----------------------------------------------------- */

static void INF_ISA(load_values)(float *restrict x, const void *source, int32_t dtype,
                                 int64_t first, int32_t n) {
    const uint16_t *restrict narrow = (const uint16_t *)source + first;
    if (dtype == INF_GRAD_BF16) {
        for (int32_t i = 0; i < n; i++) x[i] = inf_float_from_bits((uint32_t)narrow[i] << 16);
    } else if (dtype == INF_GRAD_FP16) {
        for (int32_t i = 0; i < n; i++) x[i] = inf_float_from_half(narrow[i]);
    } else {
        memcpy(x, (const float *)source + first, (size_t)n * sizeof(float));
    }
}

static void INF_ISA(add_values)(float *restrict x, const void *source, int32_t dtype, int64_t first,
                                int32_t n) {
    const uint16_t *restrict narrow = (const uint16_t *)source + first;
    const float *restrict wide = (const float *)source + first;
    if (dtype == INF_GRAD_BF16) {
        for (int32_t i = 0; i < n; i++)
            x[i] = x[i] + inf_float_from_bits((uint32_t)narrow[i] << 16);
    } else if (dtype == INF_GRAD_FP16) {
        for (int32_t i = 0; i < n; i++) x[i] = x[i] + inf_float_from_half(narrow[i]);
    } else {
        for (int32_t i = 0; i < n; i++) x[i] = x[i] + wide[i];
    }
}

/* Rounded to nearest, ties to even; every NaN with the same bits. */
static void INF_ISA(store_values)(void *target, int32_t dtype, int64_t first,
                                  const float *restrict x, int32_t n) {
    uint16_t *restrict narrow = (uint16_t *)target + first;
    float *restrict wide = (float *)target + first;
    if (dtype == INF_GRAD_BF16) {
        for (int32_t i = 0; i < n; i++) {
            const uint32_t bits = inf_canonical_bits(x[i]);
            narrow[i] = (uint16_t)((bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16);
        }
    } else if (dtype == INF_GRAD_FP16) {
        for (int32_t i = 0; i < n; i++)
            narrow[i] = inf_half_from_float(inf_float_from_bits(inf_canonical_bits(x[i])));
    } else {
        for (int32_t i = 0; i < n; i++) wide[i] = inf_float_from_bits(inf_canonical_bits(x[i]));
    }
}

static void INF_ISA(divide)(float *restrict x, float divisor, int32_t n) {
    if (divisor == 1.0f) return;
    int exponent;
    /* a power of two: multiplication gives the same result faster */
    if (frexpf(divisor, &exponent) == 0.5f) {
        const float factor = 1.0f / divisor;
        for (int32_t i = 0; i < n; i++) x[i] = x[i] * factor;
    } else {
        for (int32_t i = 0; i < n; i++) x[i] = x[i] / divisor;
    }
}

/* ---- encoding -------------------------------------------------------------------------------- */

/* The bits of the largest magnitude. */
INF_INLINE uint32_t INF_ISA(largest)(const float *restrict x, int32_t n) {
    int32_t most = 0;
    for (int32_t i = 0; i < n; i++) {
        const int32_t bits = (int32_t)(inf_bits_from_float(x[i]) & 0x7FFFFFFFu);
        most = bits > most ? bits : most;
    }
    return (uint32_t)most;
}

/* One group; u: the group's random numbers in (0, 1), or NULL. */
INF_INLINE void INF_ISA(codes_of)(int8_t *restrict code, const float *restrict x,
                                  const float *restrict u, float scale, int32_t levels, int32_t n) {
    if (u == NULL) {
        for (int32_t i = 0; i < n; i++) {
            const float y = x[i] / scale;
            /* Below 2^22, adding 1.5 * 2^23 leaves a whole number, to nearest, ties to even, in the
             * lowest bits. */
            int32_t number = (int32_t)(inf_bits_from_float(y + INF_ROUNDER) - INF_ROUNDER_BITS);
            number = number > levels ? levels : number;
            number = number < -levels ? -levels : number;
            code[i] = (int8_t)number;
        }
    } else {
        for (int32_t i = 0; i < n; i++) {
            const float y = x[i] / scale;
            int32_t number = (int32_t)y;
            /* in integers, since gcc does not vectorise the float version */
            number -= (float)number > y;
            number += u[i] < y - (float)number;
            number = number > levels ? levels : number;
            number = number < -levels ? -levels : number;
            code[i] = (int8_t)number;
        }
    }
}

/* One group: replaces x by the rounding errors of its codes. */
INF_INLINE void INF_ISA(remainders)(float *restrict x, const int8_t *restrict code, float scale,
                                    int32_t n) {
    if (wire_within(scale)) {
        for (int32_t i = 0; i < n; i++) x[i] = x[i] - (float)code[i] * scale;
    } else {
        for (int32_t i = 0; i < n; i++) x[i] = x[i] - wire_clamped((float)code[i] * scale);
    }
}

static void INF_ISA(fill_uniform)(float *restrict u, uint64_t key, int64_t element, int32_t n) {
    for (int32_t done = 0; done < n;) {
        /* until the upper half of the element changes */
        const int64_t left = 0x100000000 - (int64_t)(uint32_t)element;
        const int32_t part = n - done < left ? n - done : (int32_t)left;
        const inf_keys keys = inf_keys_of(key, element);
        float *restrict to = u + done;
        for (int32_t i = 0; i < part; i++) {
            to[i] = ((float)(int32_t)(inf_random((uint32_t)i, keys) >> 9) + 0.5f) * 0x1.0p-23f;
        }
        done += part;
        element += part;
    }
}

/* Bytes of codes [n], n even. */
static void INF_ISA(pack)(uint8_t *restrict to, const int8_t *restrict code, int32_t n) {
    for (int32_t i = 0; i < n / 2; i++) {
        uint16_t pair;
        memcpy(&pair, code + 2 * i, sizeof pair); /* the low byte is the even element */
        to[i] = (uint8_t)((pair & 0x0Fu) | (pair >> 4 & 0xF0u));
    }
}

/* Codes and scales of the groups of a block of n elements; with keep_error, x is replaced by the
 * rounding errors. */
static void INF_ISA(encode_block)(int8_t *restrict code, uint8_t *restrict scales,
                                  float *restrict x, const float *restrict u,
                                  const wire_shape *shape, int keep_error, int32_t n) {
    for (int32_t at = 0; at < n; at += shape->group_numel) {
        const int32_t here = n - at < shape->group_numel ? n - at : shape->group_numel;
        const uint32_t most = INF_ISA(largest)(x + at, here);
        uint16_t bits16 = INF_NAN_BITS >> 16;
        if (most < INF_INFINITY_BITS) {
            const float exact = inf_float_from_bits(most) / (float)shape->levels;
            uint32_t bits = inf_bits_from_float(exact);
            bits = (bits + (u != NULL ? 0xFFFFu : 0x7FFFu + (bits >> 16 & 1u))) & 0xFFFF0000u;
            bits = bits < INF_SCALE_LEAST_BITS ? INF_SCALE_LEAST_BITS : bits;
            const float scale = inf_float_from_bits(bits);
            INF_ISA(codes_of)(code + at, x + at, u != NULL ? u + at : NULL, scale, shape->levels,
                              here);
            if (keep_error) INF_ISA(remainders)(x + at, code + at, scale, here);
            bits16 = (uint16_t)(bits >> 16);
        } else {
            memset(code + at, 0, (size_t)here);
            if (keep_error) memset(x + at, 0, (size_t)here * sizeof(float));
        }
        memcpy(scales + at / shape->group_numel * 2, &bits16, sizeof bits16);
    }
}

static void INF_ISA(encode)(const void *values, int32_t dtype, void *error, int32_t error_dtype,
                            uint8_t *wire, int64_t numel, const wire_shape *shape, int32_t random,
                            uint64_t key, int64_t element) {
    float x[WIRE_BLOCK] __attribute__((aligned(64))), u[WIRE_BLOCK] __attribute__((aligned(64)));
    int8_t code[WIRE_BLOCK + 1] __attribute__((aligned(64)));
    uint8_t *scales = wire + shape->codes_bytes;
    for (int64_t at = 0; at < numel; at += WIRE_BLOCK) {
        const int32_t n = numel - at < WIRE_BLOCK ? (int32_t)(numel - at) : WIRE_BLOCK;
        wire_values_ahead(values, dtype, at + n, n);
        INF_ISA(load_values)(x, values, dtype, at, n);
        if (error != NULL) {
            wire_values_ahead(error, error_dtype, at + n, n);
            INF_ISA(add_values)(x, error, error_dtype, at, n);
        }
        if (random) INF_ISA(fill_uniform)(u, key, element + at, n);
        INF_ISA(encode_block)(shape->bits == 8 ? (int8_t *)wire + at : code,
                              scales + at / shape->group_numel * 2, x, random ? u : NULL, shape,
                              error != NULL, n);
        if (shape->bits == 4) {
            code[n] = 0; /* the other half of an odd last byte */
            INF_ISA(pack)(wire + at / 2, code, n + n % 2);
        }
        if (error != NULL) INF_ISA(store_values)(error, error_dtype, at, x, n);
    }
}

/* ---- decoding and sums ----------------------------------------------------------------------- */

/* One group of a wire: x = its values, or x + its values. */
INF_INLINE void INF_ISA(take_group)(float *restrict x, const int8_t *restrict code, float scale,
                                    int add, int32_t n) {
    if (!wire_within(scale)) {
        for (int32_t i = 0; i < n; i++) {
            const float value = wire_clamped((float)code[i] * scale);
            x[i] = add ? x[i] + value : value;
        }
    } else if (add) {
        for (int32_t i = 0; i < n; i++) x[i] = x[i] + (float)code[i] * scale;
    } else {
        for (int32_t i = 0; i < n; i++) x[i] = (float)code[i] * scale;
    }
}

/* int4 codes of n elements, n even, to a byte each. */
static void INF_ISA(unpack)(int8_t *restrict code, const uint8_t *restrict from, int32_t n) {
    for (int32_t i = 0; i < n / 2; i++) {
        const uint32_t byte = from[i];
        const uint16_t pair = (uint16_t)((byte | byte << 4) & 0x0F0Fu);
        memcpy(code + 2 * i, &pair, sizeof pair);
    }
    for (int32_t i = 0; i < n; i++) code[i] = (int8_t)((code[i] ^ 8) - 8);
}

static void INF_ISA(decode_sum)(const uint64_t *wires, int32_t count, void *out, int32_t dtype,
                                int64_t numel, const wire_shape *shape, float divisor) {
    float x[WIRE_BLOCK] __attribute__((aligned(64)));
    int8_t unpacked[WIRE_BLOCK] __attribute__((aligned(64)));
    for (int64_t at = 0; at < numel; at += WIRE_BLOCK) {
        const int32_t n = numel - at < WIRE_BLOCK ? (int32_t)(numel - at) : WIRE_BLOCK;
        for (int32_t k = 0; k < count; k++) {
            const uint8_t *wire = (const uint8_t *)(uintptr_t)wires[k];
            const uint8_t *scales = wire + shape->codes_bytes + at / shape->group_numel * 2;
            const int8_t *code = (const int8_t *)wire + at;
            wire_ahead(wire, (at + n) * shape->bits / 8, n * shape->bits / 8);
            if (shape->bits == 4) {
                INF_ISA(unpack)(unpacked, wire + at / 2, n + n % 2);
                code = unpacked;
            }
            for (int32_t in = 0; in < n; in += shape->group_numel) {
                uint16_t bits16;
                memcpy(&bits16, scales + in / shape->group_numel * 2, sizeof bits16);
                INF_ISA(take_group)(x + in, code + in, inf_float_from_bits((uint32_t)bits16 << 16),
                                    k > 0,
                                    n - in < shape->group_numel ? n - in : shape->group_numel);
            }
        }
        INF_ISA(divide)(x, divisor, n);
        INF_ISA(store_values)(out, dtype, at, x, n);
    }
}

static void INF_ISA(sum_in_order)(const uint64_t *pieces, int32_t count, int32_t dtype, void *out,
                                  int32_t out_dtype, int64_t numel, float divisor) {
    float x[WIRE_BLOCK] __attribute__((aligned(64)));
    for (int64_t at = 0; at < numel; at += WIRE_BLOCK) {
        const int32_t n = numel - at < WIRE_BLOCK ? (int32_t)(numel - at) : WIRE_BLOCK;
        for (int32_t k = 0; k < count; k++) {
            wire_values_ahead((const void *)(uintptr_t)pieces[k], dtype, at + n, n);
        }
        INF_ISA(load_values)(x, (const void *)(uintptr_t)pieces[0], dtype, at, n);
        for (int32_t k = 1; k < count; k++) {
            INF_ISA(add_values)(x, (const void *)(uintptr_t)pieces[k], dtype, at, n);
        }
        INF_ISA(divide)(x, divisor, n);
        INF_ISA(store_values)(out, out_dtype, at, x, n);
    }
}
