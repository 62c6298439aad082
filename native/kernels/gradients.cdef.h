/* Checks of gradients. Parsed by cffi and included by gradients.h, so no preprocessor directives.
 * */

int32_t inf_all_finite(const void *values, int32_t grad_dtype, int64_t numel);
