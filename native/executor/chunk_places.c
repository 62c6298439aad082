/* State of a chunk's places: the live one, the one that a run writes, and their files. versions.c
 * has the reasons. All [locked]. */
#include "executor.h"

#include <string.h>

bool inf_run_moves(const inf_run *run) {
    const inf_chunk_record *chunk = run->chunk;
    if (chunk->place != INF_PLACE_COMMITTED || !inf_chunk_versioned(&chunk->plan)) return false;
    if (run->job.kind == INF_JOB_UPDATE) return true;
    uint32_t states = inf_sections_all(&chunk->plan) & ~inf_grad_mask(&chunk->plan);
    return run->job.kind == INF_JOB_STORE && (run->job.mask & states) != 0;
}

inf_chunk inf_chunk_other(const inf_chunk *chunk) {
    inf_chunk other = *chunk;
    uint64_t newest =
        chunk->generation > chunk->other_generation ? chunk->generation : chunk->other_generation;
    /* A number that was never used, so that stale data fails its checksum. */
    other.generation = newest + 1;
    if (chunk->other_bytes > 0) other.drive = chunk->other_drive;
    other.file_offset = chunk->other_offset;
    other.file = chunk->other_file;
    other.sums_ptr = chunk->other_sums_ptr;
    for (int32_t s = 0; s < INF_SECTION_MAX; s++) {
        if (chunk->other_ptr[s] != 0) other.section_ptr[s] = chunk->other_ptr[s];
    }
    return other;
}

/* Swaps the two places. */
static void swap(inf_chunk *chunk, uint64_t generation) {
    inf_chunk was = *chunk;
    chunk->generation = generation;
    chunk->other_generation = was.generation;
    chunk->file_offset = was.other_offset;
    chunk->other_offset = was.file_offset;
    if (was.other_bytes > 0) {
        chunk->drive = was.other_drive;
        chunk->other_drive = was.drive;
    }
    chunk->file = was.other_file;
    chunk->other_file = was.file;
    chunk->sums_ptr = was.other_sums_ptr;
    chunk->other_sums_ptr = was.sums_ptr;
    for (int32_t s = 0; s < INF_SECTION_MAX; s++) {
        if (was.other_ptr[s] == 0) continue;
        chunk->section_ptr[s] = was.other_ptr[s];
        chunk->other_ptr[s] = was.section_ptr[s];
    }
    const uint16_t grad = (uint16_t)inf_grad_mask(chunk);
    chunk->zeros = (uint16_t)((was.other_zeros & ~grad) | (was.zeros & grad));
    chunk->other_zeros = (uint16_t)(was.zeros & ~grad);
    if (inf_grad_mask(chunk) == 0 || was.sums_ptr == 0) return;
    /* Gradients are not versioned, so their checksums are copied, not swapped. */
    size_t at = (size_t)((chunk->section_count - 1) * inf_piece_count(chunk));
    const uint32_t *before = (const uint32_t *)(uintptr_t)was.sums_ptr;
    memcpy((uint32_t *)(uintptr_t)chunk->sums_ptr + at, before + at,
           (size_t)inf_piece_count(chunk) * sizeof *before);
}

/* Swaps the two places, and their flags in the record. */
void inf_chunk_swap_places(inf_chunk_record *chunk, uint64_t generation) {
    swap(&chunk->plan, generation);
    bool updated = chunk->updated;
    chunk->updated = chunk->other_updated;
    chunk->other_updated = updated;
}

uint32_t inf_run_older_after(const inf_run *run) {
    const inf_chunk *chunk = &run->chunk->plan;
    if (!run->moves) return chunk->older & ~inf_run_written(run);
    uint32_t states = inf_sections_on_drive(chunk) & ~inf_grad_mask(chunk);
    return inf_job_leaves(&run->job) & states & ~(uint32_t)chunk->zeros;
}

void inf_chunk_flip(inf_chunk_record *chunk, const inf_run *run) {
    const uint16_t older = (uint16_t)inf_run_older_after(run);
    inf_chunk_swap_places(chunk, inf_chunk_other(&chunk->plan).generation);
    chunk->exchanged = false;
    chunk->place = INF_PLACE_MOVED;
    /* A new version has no zeros but gradients and those that the run left out. */
    chunk->plan.zeros &= (uint16_t)inf_grad_mask(&chunk->plan);
    chunk->plan.zeros |= (uint16_t)(inf_job_leaves(&run->job) & chunk->plan.other_zeros);
    chunk->plan.older = older;
}

void inf_chunk_note_write(inf_chunk_record *chunk, const inf_run *run) {
    uint32_t states = inf_sections_all(&chunk->plan) & ~inf_grad_mask(&chunk->plan);
    if (run->job.kind == INF_JOB_STORE && (run->job.mask & states) != 0) chunk->updated = false;
    else if (run->job.kind == INF_JOB_UPDATE && run->moves) chunk->updated = true;
}

void inf_chunk_renew(inf_chunk_record *chunk, uint32_t written) {
    chunk->plan.zeros &= (uint16_t)~written;
    chunk->plan.older &= (uint16_t)~written;
}

bool inf_file_known(const struct inf_executor *ex, int32_t drive, int32_t file) {
    return file >= 0 && file < INF_FILE_MAX && ex->drives[drive].fds[file] >= 0;
}

bool inf_files_known(const struct inf_executor *ex, const inf_chunk *chunk) {
    if (chunk->drive < 0) return true;
    if (!inf_file_known(ex, chunk->drive, chunk->file)) return false;
    if (!inf_chunk_versioned(chunk)) return true;
    return (chunk->other_bytes == 0 || inf_file_known(ex, chunk->other_drive, chunk->other_file)) &&
           inf_file_known(ex, chunk->drive, chunk->grad_file);
}
