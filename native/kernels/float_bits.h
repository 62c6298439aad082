/* Bitwise conversions of scalars. Always inlined, without library calls, so that loops over them
 * vectorise in every instruction set (see optimizer_kernels.c), with the same results. */
#ifndef INFINITY_FLOAT_BITS_H
#define INFINITY_FLOAT_BITS_H

#include <stdint.h>
#include <string.h>

#define INF_INLINE static inline __attribute__((always_inline))

#define INF_NAN_BITS 0x7FC00000u
#define INF_INFINITY_BITS 0x7F800000u

INF_INLINE float inf_float_from_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

INF_INLINE uint32_t inf_bits_from_float(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

INF_INLINE uint32_t inf_join_bits(uint16_t hi, int16_t lo) {
    return ((uint32_t)hi << 16) + (uint32_t)(int32_t)lo;
}

INF_INLINE uint32_t inf_join_bits8(uint16_t hi, int8_t lo) {
    return ((uint32_t)hi << 16) + ((uint32_t)(int32_t)lo << 8);
}

/* To nearest, halves away from zero (native/kernels/update_codec.h: halves_to_even). */
INF_INLINE uint16_t inf_hi_of_bits(uint32_t bits) {
    return (uint16_t)((bits + 0x8000u) >> 16);
}

/* Every NaN becomes 0x7FC00000: 0x7FFFFFFF would round up into the sign and decode as -0.0. */
INF_INLINE uint32_t inf_canonical_bits(float value) {
    const uint32_t bits = inf_bits_from_float(value);
    return (bits & 0x7FFFFFFFu) > INF_INFINITY_BITS ? INF_NAN_BITS : bits;
}

INF_INLINE uint64_t inf_mix64(uint64_t word) {
    word += 0x9E3779B97F4A7C15u;
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9u;
    word = (word ^ (word >> 27)) * 0x94D049BB133111EBu;
    return word ^ (word >> 31);
}

/* Key of the random bits for indices relative to `element`. Valid until the upper half of the
 * element changes. */
typedef struct {
    uint32_t low;
    uint32_t high;
} inf_keys;

INF_INLINE inf_keys inf_keys_of(uint64_t key, int64_t element) {
    const uint64_t mixed = inf_mix64(key ^ ((uint64_t)element >> 32) * 0x9E3779B97F4A7C15u);
    return (inf_keys){(uint32_t)mixed + (uint32_t)element, (uint32_t)(mixed >> 32)};
}

/* The random bits of the element `index` after the keys' (infinity/_src/kernels/random_bits.py). */
INF_INLINE uint32_t inf_random(uint32_t index, inf_keys keys) {
    uint32_t h = index + keys.low;
    h ^= h >> 16;
    h *= 0x7FEB352Du;
    h ^= h >> 15;
    h ^= keys.high;
    h *= 0x846CA68Bu;
    return h ^ h >> 16;
}

/* Exact. */
INF_INLINE float inf_float_from_half(uint16_t half) {
    const uint32_t word = (uint32_t)half << 16;
    const uint32_t twice = word + word;
    /* A normal number: add 224 to the exponent, then scale by 2^-112; this also converts infinity
     * and NaN. */
    const float normal = inf_float_from_bits((twice >> 4) + (0xE0u << 23)) * 0x1.0p-112f;
    const float denormal = inf_float_from_bits((twice >> 17) | (126u << 23)) - 0.5f;
    const uint32_t small = 0u - (uint32_t)(twice < (1u << 27));
    const uint32_t magnitude =
        (inf_bits_from_float(denormal) & small) | (inf_bits_from_float(normal) & ~small);
    return inf_float_from_bits((word & 0x80000000u) | magnitude);
}

/* To nearest, ties to even, as torch's .half(); a NaN becomes 0x7E00. */
INF_INLINE uint16_t inf_half_from_float(float value) {
    const uint32_t bits = inf_bits_from_float(value);
    const uint32_t twice = bits + bits;
    /* Adding a power of two that leaves ten bits of the number rounds it. Scaling up first turns
     * numbers that are too large into infinity. */
    float base = (inf_float_from_bits(bits & 0x7FFFFFFFu) * 0x1.0p+112f) * 0x1.0p-110f;
    uint32_t bias = twice & 0xFF000000u;
    bias = bias < 0x71000000u ? 0x71000000u : bias;
    base = inf_float_from_bits((bias >> 1) + 0x07800000u) + base;
    const uint32_t sum = inf_bits_from_float(base);
    const uint32_t magnitude = ((sum >> 13) & 0x7C00u) + (sum & 0x0FFFu);
    const uint32_t nan = 0u - (uint32_t)(twice > 0xFF000000u);
    return (uint16_t)((nan & 0x7E00u) | (~nan & ((bits >> 16 & 0x8000u) | magnitude)));
}

#endif
