/* Sections of a state format. */
#include "infinity.h"

/* Master sections of each INF_MASTER_*: itemsizes, 0 ends. RAW's is the parameter's own. */
static const int32_t MASTER_ITEMSIZES[5][2] = {{0, 0}, {2, 2}, {2, 1}, {4, 0}, {2, 4}};
static const int32_t MOMENT_ITEMSIZES[3] = {4, 2, 1};
static const int32_t GRAD_ITEMSIZES[4] = {0, 2, 4, 2};

int32_t inf_format_sections(int32_t format, int32_t itemsize[INF_SECTION_MAX],
                            int32_t group_numel[INF_SECTION_MAX]) {
    const int32_t master = inf_format_master(format), moments = inf_format_moments(format);
    const int32_t moment_count = inf_format_count(format), grad = inf_format_grad(format);
    if (master > INF_MASTER_FP16 || moments > INF_MOMENTS_Q8 || moment_count > 3 ||
        grad > INF_GRAD_SECTION_FP16)
        return 0;
    if (master == INF_MASTER_RAW && format != INF_FORMAT_RAW) return 0;
    if (moments == INF_MOMENTS_Q8 && (moment_count < 1 || moment_count > 2)) return 0;
    int32_t count = inf_format_master_count(format);
    for (int32_t s = 0; s < count; s++) itemsize[s] = MASTER_ITEMSIZES[master][s];
    for (int32_t k = 0; k < moment_count; k++) itemsize[count++] = MOMENT_ITEMSIZES[moments];
    const int32_t scales = moments == INF_MOMENTS_Q8 ? count : -1;
    if (scales >= 0) itemsize[count++] = 2 * moment_count;
    if (grad != INF_GRAD_SECTION_NONE) itemsize[count++] = GRAD_ITEMSIZES[grad];
    for (int32_t s = 0; s < count; s++) group_numel[s] = s == scales ? INF_QUANT_GROUP : 1;
    return count;
}
