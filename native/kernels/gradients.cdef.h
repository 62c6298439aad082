/* Checks and norms of gradients. Parsed by cffi and included by gradients.h, so no preprocessor
 * directives. */

int32_t inf_all_finite(const void *values, int32_t grad_dtype, int64_t numel);

/* The 2-norm in fp32 of bf16 values, which are also copied to `to` unless it is NULL. The sums are
 * those of torch's norm of fp32 values on x86, in the same order, so the bits are the same. numel:
 * a multiple of 8, since compilers differ in how they add the rest. */
float inf_bf16_norm(const void *from, void *to, int64_t numel);
