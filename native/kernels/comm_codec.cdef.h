/* Quantised wire buffers and sums in the order of ranks. Parsed by cffi and included by
 * comm_codec.h, so no preprocessor directives.
 *
 * A wire: int8 codes, or int4 codes two to a byte (the element with the even number in the low
 * half), padded with zeros to a multiple of 64 bytes; then a bf16 scale per group of `group_numel`
 * (a power of two, 64 to 1024) elements, padded likewise. infinity/_src/kernels/quantize.py defines
 * codes and scales; infinity/_src/kernels/comm_codec.py is the bitwise reference of all functions
 * below.
 *
 * dtypes: INF_GRAD_BF16, INF_GRAD_FP16, INF_GRAD_FP32. Pointers are aligned to their items, wires
 * to 2 bytes. Arrays of addresses are uint64_t. The functions run in the caller's thread and only
 * use stack memory. Denormals are kept in every floating-point mode. */

/* Bytes of a wire, of codes alone with `codes_only`. */
int64_t inf_wire_bytes(int64_t numel, int32_t bits, int32_t group_numel, int32_t codes_only);

/* values [numel] (+ error [numel]) to a wire. error: bf16 or fp32, or NULL; replaced by the
 * rounding error, zero in groups with infinity or NaN. random: round stochastically with `key` and
 * the element index of the first value, instead of to nearest. */
void inf_wire_encode(const void *values, int32_t dtype, void *error, int32_t error_dtype,
                     uint8_t *wire, int64_t numel, int32_t bits, int32_t group_numel,
                     int32_t random, uint64_t key, int64_t element);

/* out [numel]: the sum of `count` (at least 1) wires, fp32 additions in their order, / divisor,
 * rounded once. */
void inf_wire_decode_sum(const uint64_t *wires, int32_t count, void *out, int32_t dtype,
                         int64_t numel, int32_t bits, int32_t group_numel, float divisor);

/* The same for unquantised pieces [numel] of one dtype; `out` may be one of them. */
void inf_sum_in_order(const uint64_t *pieces, int32_t count, int32_t dtype, void *out,
                      int32_t out_dtype, int64_t numel, float divisor);
