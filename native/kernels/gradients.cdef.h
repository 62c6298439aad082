/* Looks at gradients; for cffi, and included by gradients.h, so that there is one text. No
 * preprocessor here. */

int32_t inf_all_finite(const void *values, int32_t grad_dtype, int64_t numel);
