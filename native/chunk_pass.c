/* Passes over one chunk in memory: fetch, store, and the fused update. Piece by piece, so that a piece of every
 * section (96 KiB at 8192 elements) stays in L2 between its checksum, its update and its next checksum. */
#include "infinity.h"

#include <string.h>

uint32_t inf_sum_seed(uint64_t generation, uint64_t key, int32_t section, int64_t piece) {
    uint64_t mixed = key * 0x9E3779B97F4A7C15u + generation;
    mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9u + (uint64_t)section + 1;
    mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9u + (uint64_t)piece + 1;
    mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EBu;
    return (uint32_t)(mixed ^ (mixed >> 31));
}

int32_t inf_chunk_valid(const inf_chunk *chunk) {
    static const int32_t itemsize_of[3][INF_SECTION_MAX] = {{0, 0, 0, 0}, {2, 2, 4, 4}, {4, 4, 4, 0}};
    static const int32_t section_count_of[3] = {1, 4, 3};
    if (chunk->format < INF_FORMAT_RAW || chunk->format > INF_FORMAT_FP32) return 0;
    if (chunk->section_count != section_count_of[chunk->format]) return 0;
    if (chunk->numel <= 0 || chunk->piece_numel <= 0 || chunk->run_bytes < 0) return 0;
    for (int32_t s = 0; s < chunk->section_count; s++) {
        const int32_t itemsize = chunk->itemsize[s];
        const int32_t wanted = itemsize_of[chunk->format][s];
        if (itemsize <= 0 || itemsize > 16 || (wanted != 0 && itemsize != wanted)) return 0;
        if (chunk->numel > INT64_MAX / itemsize) return 0;
        if (inf_section_resident(chunk, s)) {
            if (chunk->section_ptr[s] == 0) return 0;
        } else if (chunk->section_at[s] > chunk->run_bytes - inf_section_bytes(chunk, s)) {
            return 0;
        }
    }
    return 1;
}

typedef struct {
    int64_t index;
    int64_t start; /* elements */
    int64_t numel;
} piece_range;

static piece_range piece_at(const inf_chunk *chunk, int64_t index) {
    const int64_t start = index * chunk->piece_numel;
    const int64_t left = chunk->numel - start;
    return (piece_range){index, start, left < chunk->piece_numel ? left : chunk->piece_numel};
}

static uint32_t piece_sum(const inf_chunk *chunk, int32_t section, piece_range piece, const uint8_t *section_data) {
    const int64_t itemsize = chunk->itemsize[section];
    return inf_crc32c(inf_sum_seed(chunk->generation, chunk->key, section, piece.index),
                      section_data + piece.start * itemsize, (size_t)(piece.numel * itemsize));
}

static uint32_t *section_sums(const inf_chunk *chunk, int32_t section) {
    uint32_t *sums = (uint32_t *)(uintptr_t)chunk->sums_ptr;
    return sums == NULL ? NULL : sums + section * inf_piece_count(chunk);
}

/* Resident sections never leave RAM, so they have no checksums. */
static int section_summed(const inf_chunk *chunk, int32_t section) {
    return chunk->sums_ptr != 0 && !inf_section_resident(chunk, section);
}

static int piece_verified(const inf_chunk *chunk, int64_t index, int32_t verify) {
    if (verify < INF_VERIFY_SAMPLE) return verify == INF_VERIFY_FULL;
    const int64_t pieces = inf_piece_count(chunk);
    const int64_t stride = pieces < INF_VERIFY_STRIDE ? pieces : INF_VERIFY_STRIDE;
    return index % stride == (verify - INF_VERIFY_SAMPLE) % stride;
}

int64_t inf_section_fetch(const inf_chunk *chunk, int32_t section, const uint8_t *from, uint8_t *to, int32_t verify) {
    const int64_t itemsize = chunk->itemsize[section];
    if (!verify || !section_summed(chunk, section)) {
        if (to != NULL && to != from) memcpy(to, from, (size_t)inf_section_bytes(chunk, section));
        return INF_OK;
    }
    const uint32_t *sums = section_sums(chunk, section);
    const int64_t piece_count = inf_piece_count(chunk);
    for (int64_t k = 0; k < piece_count; k++) {
        const piece_range piece = piece_at(chunk, k);
        if (piece_verified(chunk, k, verify) && piece_sum(chunk, section, piece, from) != sums[k]) return k;
        const int64_t at = piece.start * itemsize;
        if (to != NULL && to != from) memcpy(to + at, from + at, (size_t)(piece.numel * itemsize));
    }
    return INF_OK;
}

void inf_section_store(const inf_chunk *chunk, int32_t section, const uint8_t *from, uint8_t *to) {
    const int64_t itemsize = chunk->itemsize[section];
    const int64_t piece_count = inf_piece_count(chunk);
    uint32_t *sums = section_summed(chunk, section) ? section_sums(chunk, section) : NULL;
    for (int64_t k = 0; k < piece_count; k++) {
        const piece_range piece = piece_at(chunk, k);
        const int64_t at = piece.start * itemsize;
        const size_t size_bytes = (size_t)(piece.numel * itemsize);
        if (from == NULL) {
            memset(to + at, 0, size_bytes);
        } else if (from != to) {
            memcpy(to + at, from + at, size_bytes);
        }
        if (sums != NULL) sums[k] = piece_sum(chunk, section, piece, to);
    }
}

/* ---- update ---------------------------------------------------------------------------------------------------- */

static int update_plan_valid(const inf_chunk *chunk, uint8_t *const section[INF_SECTION_MAX], const inf_seg *segs,
                             int32_t seg_count, const inf_hyper *hypers, int32_t hyper_count,
                             const uint32_t *sums_scratch) {
    if (chunk->format != INF_FORMAT_SPLIT && chunk->format != INF_FORMAT_FP32) return 0;
    if (!inf_chunk_valid(chunk) || (chunk->sums_ptr != 0 && sums_scratch == NULL)) return 0;
    for (int32_t s = 0; s < chunk->section_count; s++) {
        if (section[s] == NULL) return 0;
    }
    int64_t end = 0;
    for (int32_t i = 0; i < seg_count; i++) {
        const inf_seg *seg = &segs[i];
        if (seg->start < end || seg->numel < 0 || seg->numel > chunk->numel - seg->start) return 0;
        if (seg->grad == 0 || (seg->grad_dtype != INF_GRAD_BF16 && seg->grad_dtype != INF_GRAD_FP32)) return 0;
        if (seg->hyper < 0 || seg->hyper >= hyper_count) return 0;
        const int32_t log_count = hypers[seg->hyper].log_count;
        if (log_count < 0 || log_count > INF_LOG_MAX) return 0;
        end = seg->start + seg->numel;
    }
    return 1;
}

static int64_t verify_piece(const inf_chunk *chunk, uint8_t *const section[INF_SECTION_MAX], piece_range piece,
                            int32_t verify) {
    if (!piece_verified(chunk, piece.index, verify)) return INF_OK;
    for (int32_t s = 0; s < chunk->section_count; s++) {
        if (!section_summed(chunk, s)) continue;
        if (piece_sum(chunk, s, piece, section[s]) != section_sums(chunk, s)[piece.index]) {
            return s * inf_piece_count(chunk) + piece.index;
        }
    }
    return INF_OK;
}

static void update_range(const inf_chunk *chunk, uint8_t *const section[INF_SECTION_MAX], int64_t start, int64_t numel,
                         const uint8_t *grad, int32_t grad_dtype, const inf_hyper *hyper) {
    if (chunk->format == INF_FORMAT_SPLIT) {
        inf_adamw_split((uint16_t *)section[0] + start, (int16_t *)section[1] + start, (float *)section[2] + start,
                        (float *)section[3] + start, grad, grad_dtype, numel, hyper);
    } else {
        inf_adamw_fp32((float *)section[0] + start, (float *)section[1] + start, (float *)section[2] + start, grad,
                       grad_dtype, numel, hyper);
    }
}

typedef struct {
    const inf_seg *segs;
    int32_t count;
    int32_t next; /* the first segment that is not wholly behind the current piece */
} seg_cursor;

/* Update the part of the segments that lies in the piece; returns whether there was any. */
static int update_piece(const inf_chunk *chunk, uint8_t *const section[INF_SECTION_MAX], piece_range piece,
                        seg_cursor *cursor, const inf_hyper *hypers) {
    const int64_t piece_end = piece.start + piece.numel;
    int touched = 0;
    for (; cursor->next < cursor->count; cursor->next++) {
        const inf_seg *seg = &cursor->segs[cursor->next];
        const int64_t seg_end = seg->start + seg->numel;
        const int64_t start = seg->start > piece.start ? seg->start : piece.start;
        const int64_t end = seg_end < piece_end ? seg_end : piece_end;
        if (start < end) {
            const int64_t grad_itemsize = seg->grad_dtype == INF_GRAD_BF16 ? 2 : 4;
            const uint8_t *grad = (const uint8_t *)(uintptr_t)seg->grad + (start - seg->start) * grad_itemsize;
            update_range(chunk, section, start, end - start, grad, seg->grad_dtype, &hypers[seg->hyper]);
            touched = 1;
        }
        if (seg_end > piece_end) break; /* goes on in the next piece */
    }
    return touched;
}

static void commit_sums(const inf_chunk *chunk, const uint32_t *sums_new) {
    const int64_t piece_count = inf_piece_count(chunk);
    for (int32_t s = 0; s < chunk->section_count; s++) {
        if (!section_summed(chunk, s)) continue;
        memcpy(section_sums(chunk, s), sums_new + s * piece_count, (size_t)piece_count * sizeof(uint32_t));
    }
}

int64_t inf_chunk_update(const inf_chunk *chunk, uint8_t *const section[INF_SECTION_MAX], const inf_seg *segs,
                         int32_t seg_count, const inf_hyper *hypers, int32_t hyper_count, uint8_t *out0,
                         int32_t verify, uint32_t *sums_scratch) {
    if (!update_plan_valid(chunk, section, segs, seg_count, hypers, hyper_count, sums_scratch)) return INF_BAD_PLAN;
    const int64_t piece_count = inf_piece_count(chunk);
    int32_t resident_count = 0;
    for (int32_t s = 0; s < chunk->section_count; s++) resident_count += inf_section_resident(chunk, s);
    const int fallible = verify != INF_VERIFY_OFF && chunk->sums_ptr != 0 && resident_count < chunk->section_count;
    const int verify_ahead = fallible && resident_count > 0;
    for (int64_t k = 0; verify_ahead && k < piece_count; k++) {
        const int64_t bad = verify_piece(chunk, section, piece_at(chunk, k), verify);
        if (bad != INF_OK) return bad;
    }
    seg_cursor cursor = {segs, seg_count, 0};
    for (int64_t k = 0; k < piece_count; k++) {
        const piece_range piece = piece_at(chunk, k);
        if (fallible && !verify_ahead) {
            const int64_t bad = verify_piece(chunk, section, piece, verify);
            if (bad != INF_OK) return bad;
        }
        const int touched = update_piece(chunk, section, piece, &cursor, hypers);
        for (int32_t s = 0; s < chunk->section_count; s++) {
            if (!section_summed(chunk, s)) continue;
            sums_scratch[s * piece_count + k] =
                touched ? piece_sum(chunk, s, piece, section[s]) : section_sums(chunk, s)[k];
        }
        if (out0 != NULL) {
            const int64_t at = piece.start * chunk->itemsize[0];
            memcpy(out0 + at, section[0] + at, (size_t)(piece.numel * chunk->itemsize[0]));
        }
    }
    if (chunk->sums_ptr != 0) commit_sums(chunk, sums_scratch);
    return INF_OK;
}
