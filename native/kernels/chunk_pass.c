/* Passes over one chunk in memory: fetch, store, and the fused update. Piece by piece, so that a
 * piece of all sections (96 KiB at 8192 elements) stays in L2 between verification, update and new
 * checksum. */
#include "infinity.h"
#include "shadow.h"

#include <string.h>

uint32_t inf_sum_seed(uint64_t generation, uint64_t key, int32_t section, int64_t piece) {
    uint64_t mixed = key * 0x9E3779B97F4A7C15u + generation;
    mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9u + (uint64_t)section + 1;
    mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9u + (uint64_t)piece + 1;
    mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EBu;
    return (uint32_t)(mixed ^ (mixed >> 31));
}

/* The chunk's section of spilled gradients; -1 = it has none. */
static int32_t grad_section(const inf_chunk *chunk) {
    return inf_format_grad(chunk->format) == INF_GRAD_SECTION_NONE ? -1 : chunk->section_count - 1;
}

/* Whether a size or an offset is valid. The limit is low enough that the sum of several valid ones
 * does not overflow int64_t. */
static int within(int64_t bytes) {
    return bytes >= 0 && bytes <= INF_BYTES_MAX;
}

/* Whether the section has the items of its format, inside its run. */
static int section_valid(const inf_chunk *chunk, int32_t s, int32_t itemsize_of, int32_t group_of) {
    const int32_t itemsize = chunk->itemsize[s];
    const int32_t group = chunk->group_numel[s] == 0 ? 1 : chunk->group_numel[s];
    if (itemsize <= 0 || itemsize > 16 || (itemsize_of != 0 && itemsize != itemsize_of)) return 0;
    if (group != group_of || chunk->piece_numel % group != 0) return 0;
    if (chunk->numel > INF_BYTES_MAX / itemsize) return 0;
    if (!inf_section_resident(chunk, s)) {
        return chunk->section_at[s] <= chunk->run_bytes - inf_section_bytes(chunk, s);
    }
    const int on_drive_only = chunk->zeros | chunk->other_zeros | chunk->older;
    return chunk->section_ptr[s] != 0 && !(on_drive_only >> s & 1);
}

int32_t inf_chunk_valid(const inf_chunk *chunk) {
    int32_t itemsizes[INF_SECTION_MAX], groups[INF_SECTION_MAX];
    const int32_t section_count = inf_format_sections(chunk->format, itemsizes, groups);
    if (section_count == 0 || chunk->section_count != section_count) return 0;
    if (chunk->numel <= 0 || chunk->numel > INF_BYTES_MAX || chunk->piece_numel <= 0) return 0;
    if (!within(chunk->run_bytes) || !within(chunk->other_bytes)) return 0;
    if ((chunk->zeros | chunk->other_zeros | chunk->older) >> section_count != 0) return 0;
    if (chunk->older != 0 && (chunk->other_bytes == 0 || chunk->other_drive != chunk->drive))
        return 0;
    int on_drive = 0;
    for (int32_t s = 0; s < section_count; s++) {
        if (!section_valid(chunk, s, itemsizes[s], groups[s])) return 0;
        on_drive |= !inf_section_resident(chunk, s);
    }
    if (on_drive && (chunk->drive < 0 || !within(chunk->file_offset))) return 0;
    if (!inf_chunk_versioned(chunk)) return 1;
    if (chunk->other_bytes > 0 && !within(chunk->other_offset)) return 0;
    const int32_t grad = grad_section(chunk);
    if (grad >= 0 && !inf_section_resident(chunk, grad) && !within(chunk->grad_offset)) return 0;
    if (grad >= 0 && inf_section_older(chunk, grad)) return 0;
    return (chunk->sums_ptr != 0) == (chunk->other_sums_ptr != 0);
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

/* Offset and bytes of a piece in a section. */
static int64_t piece_offset(const inf_chunk *chunk, int32_t section, piece_range piece) {
    return inf_section_span(chunk, section, piece.start);
}

static size_t piece_bytes(const inf_chunk *chunk, int32_t section, piece_range piece) {
    return (size_t)inf_section_span(chunk, section, piece.numel);
}

static inf_shadow_job sum_job(const inf_chunk *chunk, int32_t section, piece_range piece,
                              const uint8_t *section_data, uint32_t *sum) {
    /* gradients are not versioned */
    const uint64_t generation = section == grad_section(chunk)        ? 0
                                : inf_section_older(chunk, section) ? chunk->other_generation
                                                                     : chunk->generation;
    return (inf_shadow_job){section_data + piece_offset(chunk, section, piece),
                            piece_bytes(chunk, section, piece),
                            inf_sum_seed(generation, chunk->key, section, piece.index), sum};
}

static uint32_t piece_sum(const inf_chunk *chunk, int32_t section, piece_range piece,
                          const uint8_t *section_data) {
    const inf_shadow_job job = sum_job(chunk, section, piece, section_data, NULL);
    return inf_crc32c(job.seed, job.data, job.size_bytes);
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

int64_t inf_section_fetch(const inf_chunk *chunk, int32_t section, const uint8_t *from, uint8_t *to,
                          int32_t verify) {
    if (!verify || !section_summed(chunk, section)) {
        if (to != NULL && to != from) memcpy(to, from, (size_t)inf_section_bytes(chunk, section));
        return INF_OK;
    }
    const uint32_t *sums = section_sums(chunk, section);
    const int64_t piece_count = inf_piece_count(chunk);
    for (int64_t k = 0; k < piece_count; k++) {
        const piece_range piece = piece_at(chunk, k);
        if (piece_verified(chunk, k, verify) && piece_sum(chunk, section, piece, from) != sums[k])
            return k;
        const int64_t at = piece_offset(chunk, section, piece);
        if (to != NULL && to != from)
            memcpy(to + at, from + at, piece_bytes(chunk, section, piece));
    }
    return INF_OK;
}

static uint32_t fold(uint32_t folded, const uint32_t *sums, int64_t count) {
    return inf_crc32c(folded, sums, (size_t)count * sizeof *sums);
}

int64_t inf_section_fetch_folded(const inf_chunk *chunk, int32_t section, const uint8_t *from,
                                 uint8_t *to) {
    const int64_t piece_count = inf_piece_count(chunk);
    uint32_t folded = 0;
    for (int64_t k = 0; k < piece_count; k++) {
        const piece_range piece = piece_at(chunk, k);
        const uint32_t sum = piece_sum(chunk, section, piece, from);
        folded = fold(folded, &sum, 1);
        const int64_t at = piece_offset(chunk, section, piece);
        if (to != NULL && to != from)
            memcpy(to + at, from + at, piece_bytes(chunk, section, piece));
    }
    return folded == ((const uint32_t *)(uintptr_t)chunk->sums_ptr)[section] ? INF_OK : 0;
}

void inf_fold_sums(const uint64_t *sums, const int64_t *pieces, int64_t count,
                   int32_t section_count, uint32_t *folded) {
    for (int64_t i = 0; i < count; i++) {
        const uint32_t *of_chunk = (const uint32_t *)(uintptr_t)sums[i];
        for (int32_t s = 0; s < section_count; s++)
            *folded++ = fold(0, of_chunk + s * pieces[i], pieces[i]);
    }
}

void inf_section_store(const inf_chunk *chunk, int32_t section, const uint8_t *from, uint8_t *to) {
    const int64_t piece_count = inf_piece_count(chunk);
    uint32_t *sums = section_summed(chunk, section) ? section_sums(chunk, section) : NULL;
    for (int64_t k = 0; k < piece_count; k++) {
        const piece_range piece = piece_at(chunk, k);
        const int64_t at = piece_offset(chunk, section, piece);
        const size_t size_bytes = piece_bytes(chunk, section, piece);
        if (from == NULL) {
            memset(to + at, 0, size_bytes);
        } else if (from != to) {
            memcpy(to + at, from + at, size_bytes);
        }
        if (sums != NULL) sums[k] = piece_sum(chunk, section, piece, to);
    }
}

/* ---- update ---------------------------------------------------------------------------------- */

/* The dtype of a segment's gradient, an INF_GRAD_* other than SECTION; -1: invalid. */
static int32_t grad_dtype_of(const inf_chunk *chunk, const inf_seg *seg) {
    if (seg->grad_dtype >= INF_GRAD_BF16 && seg->grad_dtype <= INF_GRAD_FP16)
        return seg->grad == 0 ? -1 : seg->grad_dtype;
    if (seg->grad_dtype != INF_GRAD_SECTION) return -1;
    switch (inf_format_grad(chunk->format)) {
    case INF_GRAD_SECTION_BF16: return INF_GRAD_BF16;
    case INF_GRAD_SECTION_FP32: return INF_GRAD_FP32;
    case INF_GRAD_SECTION_FP16: return INF_GRAD_FP16;
    default: return -1;
    }
}

/* Whether the update puts its result into the memory of the gradient. */
static int overwrites(const inf_seg *seg, const inf_hyper *hypers) {
    return hypers[seg->hyper].algorithm == INF_MUON_MOMENTUM;
}

static int update_plan_valid(const inf_chunk *chunk, uint8_t *const section[INF_SECTION_MAX],
                             const inf_seg *segs, int32_t seg_count, const inf_hyper *hypers,
                             int32_t hyper_count, const uint32_t *sums_scratch) {
    if (!inf_chunk_valid(chunk) || (chunk->sums_ptr != 0 && sums_scratch == NULL)) return 0;
    uint32_t given = 0;
    for (int32_t s = 0; s < chunk->section_count; s++) given |= (uint32_t)(section[s] != NULL) << s;
    const int64_t align = inf_format_moments(chunk->format) == INF_MOMENTS_Q8 ? INF_QUANT_GROUP : 1;
    int64_t end = 0;
    for (int32_t i = 0; i < seg_count; i++) {
        const inf_seg *seg = &segs[i];
        if (seg->start < end || seg->numel < 0 || seg->numel > chunk->numel - seg->start) return 0;
        if (seg->element < 0 || seg->start % align != 0 || seg->element % align != 0) return 0;
        if (grad_dtype_of(chunk, seg) < 0) return 0;
        if (seg->hyper < 0 || seg->hyper >= hyper_count) return 0;
        const int32_t states = inf_format_states(chunk->format);
        if (!inf_update_valid(states, &hypers[seg->hyper])) return 0;
        uint32_t needed = inf_update_sections(states, &hypers[seg->hyper]);
        if (seg->grad_dtype == INF_GRAD_SECTION) needed |= 1u << grad_section(chunk);
        if ((needed & ~given) != 0 || (overwrites(seg, hypers) && seg->grad == 0)) return 0;
        end = seg->start + seg->numel;
    }
    return 1;
}

static int section_verified(const inf_chunk *chunk, uint8_t *const section[INF_SECTION_MAX],
                            int32_t s, uint32_t in_memory_mask) {
    return section_summed(chunk, s) && section[s] != NULL && !(in_memory_mask >> s & 1u);
}

/* found: the piece's checksums, of each section, if they have been computed; else NULL. */
static int64_t verify_piece(const inf_chunk *chunk, uint8_t *const section[INF_SECTION_MAX],
                            piece_range piece, int32_t verify, uint32_t in_memory_mask,
                            const uint32_t *found) {
    if (!piece_verified(chunk, piece.index, verify)) return INF_OK;
    for (int32_t s = 0; s < chunk->section_count; s++) {
        if (!section_verified(chunk, section, s, in_memory_mask)) continue;
        const uint32_t sum = found != NULL ? found[s] : piece_sum(chunk, s, piece, section[s]);
        if (sum != section_sums(chunk, s)[piece.index])
            return s * inf_piece_count(chunk) + piece.index;
    }
    return INF_OK;
}

/* Updates elements [start, start + numel) of the chunk, which are in the segment (ahead, shadow:
 * inf_update_beside). */
static void update_range(const inf_chunk *chunk, uint8_t *const section[INF_SECTION_MAX],
                         const inf_seg *seg, int64_t start, int64_t numel, const inf_hyper *hyper,
                         int64_t ahead, inf_shadow *shadow) {
    const int32_t grad_dtype = grad_dtype_of(chunk, seg);
    const int64_t done = start - seg->start; /* elements of the segment before it */
    const uint8_t *grad;
    if (seg->grad_dtype == INF_GRAD_SECTION) {
        const int32_t s = grad_section(chunk);
        grad = section[s] + inf_section_span(chunk, s, start);
    } else {
        grad =
            (const uint8_t *)(uintptr_t)seg->grad + done * (grad_dtype == INF_GRAD_FP32 ? 4 : 2);
    }
    uint8_t *at[INF_SECTION_MAX] = {NULL};
    const int32_t written = inf_format_written(chunk->format, chunk->section_count);
    for (int32_t s = 0; s < written; s++)
        if (section[s] != NULL) at[s] = section[s] + inf_section_span(chunk, s, start);
    inf_update_beside(inf_format_states(chunk->format), at, grad, grad_dtype, numel,
                      seg->element + done, hyper, ahead, shadow);
}

typedef struct {
    const inf_seg *segs;
    int32_t count;
    int32_t next; /* the first segment that is not wholly behind the current piece */
} seg_cursor;

/* Updates the parts of segments in the piece; returns whether there are any. */
static int update_piece(const inf_chunk *chunk, uint8_t *const section[INF_SECTION_MAX],
                        piece_range piece, seg_cursor *cursor, const inf_hyper *hypers,
                        int64_t ahead, inf_shadow *shadow) {
    const int64_t piece_end = piece.start + piece.numel;
    int touched = 0;
    for (; cursor->next < cursor->count; cursor->next++) {
        const inf_seg *seg = &cursor->segs[cursor->next];
        const int64_t seg_end = seg->start + seg->numel;
        const int64_t start = seg->start > piece.start ? seg->start : piece.start;
        const int64_t end = seg_end < piece_end ? seg_end : piece_end;
        if (start < end) {
            update_range(chunk, section, seg, start, end - start, &hypers[seg->hyper], ahead,
                         shadow);
            touched = 1;
        }
        if (seg_end > piece_end) break; /* continues in the next piece */
    }
    return touched;
}

/* Writes a piece's checksums after its update to `sums_new`. Adds jobs of at most `room` blocks to
 * `late` instead, for the next piece's shadow. Returns their number. */
static int32_t sum_piece(const inf_chunk *chunk, const inf_chunk *to,
                         uint8_t *const section[INF_SECTION_MAX], piece_range piece, int touched,
                         uint32_t in_memory_mask, uint32_t *sums_new, int32_t room,
                         inf_shadow_job late[INF_SECTION_MAX]) {
    const int64_t piece_count = inf_piece_count(chunk);
    int32_t late_count = 0;
    for (int32_t s = 0; s < chunk->section_count; s++) {
        if (!section_summed(chunk, s)) continue;
        uint32_t *const sum = &sums_new[s * piece_count + piece.index];
        if (s == grad_section(chunk) || section[s] == NULL ||
            !(to != chunk || touched || (in_memory_mask >> s & 1u))) {
            *sum = section_sums(chunk, s)[piece.index];
            continue;
        }
        const inf_shadow_job job = sum_job(to, s, piece, section[s], sum);
        const int32_t blocks = inf_shadow_blocks(job.size_bytes);
        if (blocks > 0 && blocks <= room) {
            late[late_count++] = job;
            room -= blocks;
        } else {
            *sum = inf_crc32c(job.seed, job.data, job.size_bytes);
        }
    }
    return late_count;
}

/* Adds the checksums that a verification of the piece compares. Returns their blocks. */
static int32_t shadow_verification(inf_shadow *shadow, const inf_chunk *chunk,
                                   uint8_t *const section[INF_SECTION_MAX], piece_range piece,
                                   uint32_t in_memory_mask, uint32_t found[INF_SECTION_MAX]) {
    int32_t blocks = 0;
    for (int32_t s = 0; s < chunk->section_count; s++) {
        if (!section_verified(chunk, section, s, in_memory_mask)) continue;
        const inf_shadow_job job = sum_job(chunk, s, piece, section[s], &found[s]);
        blocks += inf_shadow_blocks(job.size_bytes);
        shadow->jobs[shadow->count++] = job;
    }
    return blocks;
}

static void commit_sums(const inf_chunk *chunk, const uint32_t *sums_new) {
    const int64_t piece_count = inf_piece_count(chunk);
    for (int32_t s = 0; s < chunk->section_count; s++) {
        if (!section_summed(chunk, s)) continue;
        memcpy(section_sums(chunk, s), sums_new + s * piece_count,
               (size_t)piece_count * sizeof(uint32_t));
    }
}

/* ---- undo ------------------------------------------------------------------------------------
 *
 * When a later piece of the chunk does not match its checksum, the resident sections get their
 * earlier contents back: a repeated read does not restore what is not on a drive. */

static int undone(const inf_chunk *chunk, int32_t s) {
    return inf_section_resident(chunk, s) && s != grad_section(chunk);
}

size_t inf_undo_bytes(const inf_chunk *chunk) {
    size_t bytes = 0;
    for (int32_t s = 0; s < chunk->section_count; s++) {
        if (undone(chunk, s)) bytes += (size_t)inf_section_bytes(chunk, s);
    }
    return bytes;
}

static void undo_copy(const inf_chunk *chunk, uint8_t *const section[INF_SECTION_MAX],
                      piece_range piece, uint8_t *undo, int restore) {
    for (int32_t s = 0; s < chunk->section_count; s++) {
        if (!undone(chunk, s) || section[s] == NULL) continue;
        const int64_t at = piece_offset(chunk, s, piece);
        uint8_t *mine = section[s] + at;
        memcpy(restore ? mine : undo + at, restore ? undo + at : mine,
               piece_bytes(chunk, s, piece));
        undo += inf_section_bytes(chunk, s);
    }
}

static void copy_out(const inf_chunk *chunk, uint8_t *const section[INF_SECTION_MAX],
                     piece_range piece, uint8_t *out0) {
    const int64_t at = piece_offset(chunk, 0, piece);
    memcpy(out0 + at, section[0] + at, piece_bytes(chunk, 0, piece));
}

int64_t inf_chunk_update_undo(const inf_chunk *chunk, const inf_chunk *to,
                              uint8_t *const section[INF_SECTION_MAX], const inf_seg *segs,
                              int32_t seg_count, const inf_hyper *hypers, int32_t hyper_count,
                              uint8_t *out0, int32_t verify, uint32_t in_memory_mask,
                              uint32_t *sums_scratch, uint8_t *undo) {
    if (!update_plan_valid(chunk, section, segs, seg_count, hypers, hyper_count, sums_scratch) ||
        (out0 != NULL && section[0] == NULL))
        return INF_BAD_PLAN;
    const int64_t piece_count = inf_piece_count(chunk);
    int32_t unread_count = 0; /* sections that cannot be read again */
    int32_t verified_count = 0;
    for (int32_t s = 0; s < chunk->section_count; s++) {
        verified_count += section_verified(chunk, section, s, in_memory_mask);
        unread_count += section[s] != NULL &&
                        (inf_section_resident(chunk, s) || (in_memory_mask >> s & 1u));
    }
    int lasting = 0; /* gradients that a repeated pass would not find */
    for (int32_t i = 0; i < seg_count; i++) lasting |= overwrites(&segs[i], hypers);
    const int fallible = verify != INF_VERIFY_OFF && verified_count > 0;
    const int verify_ahead = fallible && (lasting || (unread_count > 0 && undo == NULL));
    const int keeps = fallible && !verify_ahead && unread_count > 0;
    for (int64_t k = 0; verify_ahead && k < piece_count; k++) {
        const int64_t bad =
            verify_piece(chunk, section, piece_at(chunk, k), verify, in_memory_mask, NULL);
        if (bad != INF_OK) return bad;
    }
    const int32_t before = fallible && !verify_ahead ? verify : INF_VERIFY_OFF;
    const int shadowed = chunk->sums_ptr != 0 && inf_shadow_usable();
    seg_cursor cursor = {segs, seg_count, 0};
    inf_shadow shadow = {.count = 0};
    inf_shadow_job late[INF_SECTION_MAX];
    int32_t late_count = 0;
    uint32_t found[INF_SECTION_MAX];
    int is_found = 0;
    for (int64_t k = 0; k < piece_count; k++) {
        const piece_range piece = piece_at(chunk, k);
        const int64_t bad = verify_piece(chunk, section, piece, before, in_memory_mask,
                                         is_found ? found : NULL);
        for (int64_t back = 0; bad != INF_OK && keeps && back < k; back++)
            undo_copy(chunk, section, piece_at(chunk, back), undo, 1);
        if (bad != INF_OK) return bad;
        if (keeps) undo_copy(chunk, section, piece, undo, 0);
        /* In the shadow of this update: checksums that verify the next piece, then late ones of the
         * piece before. Meanwhile the update prefetches into L2 the piece that is verified after
         * that. */
        int32_t room = (int32_t)(chunk->piece_numel / INF_BLOCK_NUMEL);
        shadow.count = 0;
        is_found = shadowed && k + 1 < piece_count && piece_verified(chunk, k + 1, before);
        if (is_found)
            room -= shadow_verification(&shadow, chunk, section, piece_at(chunk, k + 1),
                                        in_memory_mask, found);
        for (int32_t i = 0; i < late_count; i++) shadow.jobs[shadow.count++] = late[i];
        inf_shadow_start(&shadow);
        const int64_t next = k + 1 + shadowed;
        const int prefetched = next < piece_count && piece_verified(chunk, next, before);
        const int touched = update_piece(chunk, section, piece, &cursor, hypers,
                                         prefetched ? (next - k) * chunk->piece_numel : 0, &shadow);
        inf_shadow_finish(&shadow);
        late_count = sum_piece(chunk, to, section, piece, touched, in_memory_mask, sums_scratch,
                               shadowed && k + 1 < piece_count ? room : 0, late);
        if (out0 != NULL && !keeps) copy_out(chunk, section, piece, out0);
    }
    /* Only now: out0 may be the memory of a section in in_memory_mask, which a repeated pass reads
     * after a mismatch. */
    for (int64_t k = 0; out0 != NULL && keeps && k < piece_count; k++)
        copy_out(chunk, section, piece_at(chunk, k), out0);
    if (chunk->sums_ptr != 0) commit_sums(to, sums_scratch);
    return INF_OK;
}

int64_t inf_chunk_update(const inf_chunk *chunk, uint8_t *const section[INF_SECTION_MAX],
                         const inf_seg *segs, int32_t seg_count, const inf_hyper *hypers,
                         int32_t hyper_count, uint8_t *out0, int32_t verify,
                         uint32_t in_memory_mask, uint32_t *sums_scratch) {
    return inf_chunk_update_undo(chunk, chunk, section, segs, seg_count, hypers, hyper_count, out0,
                                 verify, in_memory_mask, sums_scratch, NULL);
}
