/* Handling of failed writes. All [locked].
 *
 * The write is moved to a reserved extent, on the same drive if possible, or else on another drive.
 * Python reserves extents beforehand, since a failing drive may have no space left. The extent
 * becomes the chunk's place, and the failed range is not used again: Python fetches the record of
 * the move, records the bad range, and reserves another extent.
 *
 * Only a whole place can be moved. After a failed partial write the other sections ("rest") are
 * read first:
 *
 *   failed write -> (larger slot) -> read the rest -> verify it -> write the whole to the extent
 *
 * A bad block usually fails writes, not reads, so the rest is still readable in the old place. The
 * rest is read into the job's slot if that is large enough, or else into a large slot, next to the
 * job's sections. Until then the small slot has the only copy of the job's sections, and is put
 * aside. So a job may hold a small slot while it waits for a large one. No job waits for a small
 * slot while it holds a large one, so there is no deadlock. The chunk's record changes only when
 * the rest is in memory. If the rest cannot be read, fails its checksum, or no slot becomes free,
 * the job's write counts as failed.
 *
 * A write without a suitable extent stays in memory: the slot has the only copy of its data, since
 * an update cannot be repeated, and the range on the drive may be partly written. So the chunk
 * keeps the slot, reads use the slot's data, and the drive is marked: it gets no further writes
 * until inf_executor_recover. While a chunk keeps a slot, its drive is marked, or a REWRITE is
 * first in its FIFO, so no other job writes the chunk.
 */
#include "executor.h"

#include <assert.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

/* Once to the same drive, once to another: a further failure is not due to a bad block. */
#define MOVES_MAX 2

/* One of a chunk's places on the drive. */
typedef enum { PLACE_NONE, PLACE_LIVE, PLACE_OTHER, PLACE_GRADIENTS } place_kind;

/* ---- the rest of a place --------------------------------------------------------------------- */

static int64_t sections_bytes(const inf_chunk *chunk, uint32_t mask) {
    int64_t bytes = 0;
    for (int32_t s = 0; s < chunk->section_count; s++) {
        if (mask >> s & 1u) bytes += inf_align_up(inf_section_bytes(chunk, s));
    }
    return bytes;
}

/* Sections of `mask` without a place in the slot. */
static uint32_t without_place(const inf_slot *slot, uint32_t mask) {
    for (int32_t s = 0; s < INF_SECTION_MAX; s++)
        mask &= ~((uint32_t)(slot->section_at[s] >= 0) << s);
    return mask;
}

static void read_beside(struct inf_executor *ex, inf_run *run, uint32_t missing) {
    const inf_chunk *chunk = &run->chunk->plan;
    inf_slot *slot = &run->slot;
    for (int32_t s = 0; s < chunk->section_count; s++) {
        if (!(missing >> s & 1u)) continue;
        slot->section_at[s] = slot->bytes;
        slot->bytes += inf_align_up(inf_section_bytes(chunk, s));
    }
    inf_slot_plan_reads(slot, chunk, run->rest);
    run->state = INF_READING;
    inf_drive_queue_run(ex, run, INF_OP_READ);
}

static bool load_rest(struct inf_executor *ex, inf_run *run, uint32_t held, uint32_t rest) {
    const inf_chunk *chunk = &run->chunk->plan;
    if (ex->drives[chunk->drive].dead != 0) return false;
    uint32_t missing = without_place(&run->slot, rest);
    int64_t beside = run->slot.bytes + sections_bytes(chunk, missing);
    bool fits = beside <= ex->pools[run->slot.pool].bytes;
    const inf_pool *large = &ex->pools[1];
    bool waits = run->slot.pool == 0 && large->count > 0 &&
                 sections_bytes(chunk, held | rest) <= large->bytes;
    if (!fits && !waits) return false;
    run->rest = rest;
    run->write_fault = run->fault;
    run->faulted = false;
    run->fault = (inf_fault){0};
    run->reread = false;
    if (fits) {
        read_beside(ex, run, missing);
        return true;
    }
    run->chunk->failed_write = run->slot; /* unused by other code: its mask is 0 */
    run->aside = true;
    run->slot = (inf_slot){.pool = 1};
    inf_slot_plan(&run->slot, chunk, held | rest, rest, held, false);
    inf_slot_wait(ex, run);
    return true;
}

static void take_rest(struct inf_executor *ex, inf_run *run) {
    if (run->aside) inf_slot_release(ex, &run->chunk->failed_write);
    run->aside = false;
    run->rest = 0;
}

void inf_run_give_up_rest(struct inf_executor *ex, inf_run *run) {
    if (run->aside) {
        inf_slot_release(ex, &run->slot);
        run->slot = run->chunk->failed_write;
    }
    run->aside = false;
    run->rest = 0;
    run->faulted = true;
    run->fault = run->write_fault;
    run->state = INF_WRITING;
}

/* ---- reserved extents ------------------------------------------------------------------------ */

/* Spilled gradients of an unversioned chunk in the slot of its UPDATE: they are part of the failed
 * place, and move with the states. */
static uint32_t gradients_held(const inf_run *run) {
    const inf_chunk *chunk = &run->chunk->plan;
    uint32_t grad = inf_grad_mask(chunk) & run->reads;
    if (run->job.kind != INF_JOB_UPDATE || inf_chunk_versioned(chunk) || grad == 0) return 0;
    return run->slot.section_at[chunk->section_count - 1] < 0 ? 0 : grad;
}

/* The place that the run writes; `rest`: other sections with contents there. */
static place_kind place_written(const inf_run *run, uint32_t written, uint32_t *rest) {
    const inf_chunk *chunk = &run->chunk->plan;
    bool versioned = inf_chunk_versioned(chunk);
    uint32_t there = inf_sections_on_drive(chunk);
    uint32_t grad = there & inf_grad_mask(chunk);
    *rest = 0;
    if (versioned && grad != 0 && written == grad) return PLACE_GRADIENTS;
    if (versioned && (written & grad) != 0) return PLACE_NONE; /* two places at once */
    uint32_t others = there & ~written & ~(versioned ? grad : 0u);
    /* a new version has nothing there but what the run writes */
    if (run->moves) return (others & ~inf_job_leaves(&run->job)) == 0 ? PLACE_OTHER : PLACE_NONE;
    /* except zeros, which are not read, invalid sections, and sections that are not there yet */
    *rest = others & ~((uint32_t)chunk->zeros | run->chunk->invalid | chunk->older);
    return PLACE_LIVE;
}

static int64_t place_bytes(const inf_chunk *chunk, place_kind place) {
    if (place == PLACE_GRADIENTS)
        return inf_align_up(inf_section_bytes(chunk, chunk->section_count - 1));
    return inf_chunk_versioned(chunk) ? chunk->other_bytes : chunk->run_bytes;
}

/* A section of gradients must be on the live place's drive, as must sections that stay older. */
static bool may_leave_drive(const inf_run *run, place_kind place) {
    const inf_chunk *chunk = &run->chunk->plan;
    bool versioned = inf_chunk_versioned(chunk);
    bool grad = (inf_sections_on_drive(chunk) & inf_grad_mask(chunk)) != 0;
    return place != PLACE_GRADIENTS && !(versioned && grad) &&
           (run->moves || inf_run_older_after(run) == 0);
}

static bool drive_writes(const struct inf_executor *ex, int32_t drive) {
    return ex->drives[drive].dead == 0 && !ex->drives[drive].stats.marked;
}

/* The index of a reserved extent of this drive, or (`own` false) of another drive; -1: none. */
static int32_t spare_find(const struct inf_executor *ex, int32_t drive, bool own, int64_t bytes) {
    for (int32_t s = 0; s < ex->spare_count; s++) {
        const inf_spare *spare = &ex->spares[s];
        if ((spare->drive == drive) == own && spare->bytes >= bytes &&
            drive_writes(ex, spare->drive))
            return s;
    }
    return -1;
}

/* The index of a reserved extent for the run's place, or -1. */
static int32_t spare_for(const struct inf_executor *ex, const inf_run *run, place_kind place) {
    const inf_chunk *chunk = &run->chunk->plan;
    int64_t bytes = place_bytes(chunk, place);
    int32_t drive = inf_run_drive(run, INF_OP_WRITE);
    if (run->moved >= MOVES_MAX) return -1;
    /* A second failure on one drive is not due to a bad block: try another drive. */
    int32_t index = run->moved > 0 ? -1 : spare_find(ex, drive, true, bytes);
    if (index >= 0 || !may_leave_drive(run, place)) return index;
    return spare_find(ex, drive, false, bytes);
}

static inf_spare spare_use(struct inf_executor *ex, int32_t index) {
    inf_spare spare = ex->spares[index];
    ex->spare_count--;
    memmove(&ex->spares[index], &ex->spares[index + 1],
            (size_t)(ex->spare_count - index) * sizeof spare);
    return spare;
}

/* Makes the reserved extent the chunk's place, and records the move. */
static void place_move(struct inf_executor *ex, inf_run *run, place_kind place, inf_spare to,
                       int64_t bytes) {
    inf_chunk *chunk = &run->chunk->plan;
    inf_moved_write move = {.chunk = run->chunk->id,
                            .key = chunk->key,
                            .bytes = bytes,
                            .to_drive = to.drive,
                            .to_file = to.file,
                            .to_offset = to.offset,
                            .fault = run->fault};
    int32_t *drive = place == PLACE_OTHER ? &chunk->other_drive : &chunk->drive;
    int32_t *file = place == PLACE_OTHER  ? &chunk->other_file
                    : place == PLACE_LIVE ? &chunk->file
                                          : &chunk->grad_file;
    int64_t *offset = place == PLACE_OTHER  ? &chunk->other_offset
                      : place == PLACE_LIVE ? &chunk->file_offset
                                            : &chunk->grad_offset;
    move.drive = *drive;
    move.file = *file;
    move.offset = *offset;
    *drive = to.drive;
    *file = to.file;
    *offset = to.offset;
    ex->moves[ex->move_count++] = move; /* spares_add allocated one per extent */
    ex->stats.moved_writes++;
}

bool inf_run_move_failed_write(struct inf_executor *ex, inf_run *run) {
    if (ex->cancelled || run->fault.kind == INF_FAULT_CLOSED) return false;
    if ((run->job.mask & INF_MASK_MOVE_ONLY) || run->slot.memory == NULL) return false;
    uint32_t written = run->slot.written | gradients_held(run) | run->rest, rest;
    place_kind place = place_written(run, written, &rest);
    if (place == PLACE_NONE) return false;
    int32_t index = spare_for(ex, run, place);
    if (index < 0) return false;
    /* To another drive a new version moves whole. */
    if (run->moves && ex->spares[index].drive != inf_run_drive(run, INF_OP_WRITE))
        rest = inf_run_older_after(run) & ~written;
    if (rest != 0) return load_rest(ex, run, written, rest);
    if (run->moves) run->job.mask &= ~(run->rest << INF_LEAVES_SHIFT);
    take_rest(ex, run);
    const inf_chunk *chunk = &run->chunk->plan;
    inf_spare to = spare_use(ex, index);
    place_move(ex, run, place, to, place_bytes(chunk, place));
    run->moved++;
    run->faulted = false;
    run->fault = (inf_fault){0};
    inf_slot_plan_writes(&run->slot, chunk, written, run->moves);
    inf_drive_queue_run(ex, run, INF_OP_WRITE);
    return true;
}

bool inf_run_rest_loaded(struct inf_executor *ex, inf_run *run, int64_t bad) {
    run->faulted = true;
    run->fault = run->write_fault;
    run->state = INF_WRITING;
    return bad == INF_OK && inf_run_move_failed_write(ex, run);
}

/* ---- kept in memory -------------------------------------------------------------------------- */

bool inf_run_keep_failed_write(struct inf_executor *ex, inf_run *run) {
    inf_chunk_record *chunk = run->chunk;
    bool rewrite = run->job.kind == INF_JOB_REWRITE;
    bool closed = run->fault.kind == INF_FAULT_CLOSED;
    if (run->state != INF_WRITING || run->slot.memory == NULL || (closed && !rewrite)) return false;
    /* a measurement, which needs no data */
    if (run->job.mask & INF_MASK_MOVE_ONLY) return false;
    assert(chunk->failed_write_mask == 0);
    inf_drive *drive = &ex->drives[inf_run_drive(run, INF_OP_WRITE)]; /* before the places flip */
    chunk->failed_write = run->slot;
    chunk->failed_write_mask = run->slot.written;
    if (run->moves) inf_chunk_flip(chunk, run);
    inf_chunk_note_write(chunk, run);
    inf_chunk_renew(chunk, run->slot.written);
    /* A store's values exist, in the slot or in resident sections; an update has no invalid
     * section. */
    if (run->job.kind == INF_JOB_STORE) chunk->invalid &= ~run->job.mask;
    run->slot.memory = NULL;
    inf_slot_put_by(ex, &chunk->failed_write);
    ex->stats.kept_chunks++;
    if (!closed && !drive->stats.marked) {
        drive->stats.marked = 1;
        drive->stats.mark = run->fault;
    }
    return true;
}

void inf_run_take_failed_write(struct inf_executor *ex, inf_run *run) {
    run->slot = run->chunk->failed_write;
    run->chunk->failed_write_mask = 0;
    inf_slot_put_back(ex, &run->slot);
    ex->stats.kept_chunks--;
}

void inf_chunk_drop_failed_write(struct inf_executor *ex, inf_chunk_record *chunk) {
    if (chunk->failed_write_mask == 0) return;
    chunk->failed_write_mask = 0;
    inf_slot_put_back(ex, &chunk->failed_write);
    ex->stats.kept_chunks--;
    inf_slot_release(ex, &chunk->failed_write);
}

bool inf_run_refused(const struct inf_executor *ex, inf_run *run) {
    bool update = run->job.kind == INF_JOB_UPDATE;
    if (!update && run->job.kind != INF_JOB_STORE) return false;
    const uint32_t sections = update ? inf_run_written(run) : run->job.mask;
    const inf_chunk *chunk = &run->chunk->plan;
    bool writes = false; /* to the drive, even if the section is in a kept slot now */
    for (int32_t s = 0; s < chunk->section_count; s++) {
        writes = writes || ((sections >> s & 1u) && !inf_section_resident(chunk, s));
    }
    if (!writes) return false;
    /* A kept slot is written first, even if the next version is on another drive. */
    bool keeps = run->chunk->failed_write_mask != 0;
    const inf_drive *drive = &ex->drives[keeps ? chunk->drive : inf_run_drive(run, INF_OP_WRITE)];
    if (!drive->stats.marked) return false;
    run->faulted = true;
    run->fault = drive->stats.mark;
    run->fault.earlier = INF_EARLIER_MARK;
    return true;
}

/* ---- interface ------------------------------------------------------------------------------- */

int32_t inf_executor_spares_add(inf_executor *ex, const void *spares, int32_t count) {
    const inf_spare *added = spares;
    int32_t error = count >= 0 ? 0 : -EINVAL;
    pthread_mutex_lock(&ex->lock);
    for (int32_t i = 0; i < count && error == 0; i++) {
        bool known = added[i].drive >= 0 && added[i].drive < ex->config.drive_count &&
                     inf_file_known(ex, added[i].drive, added[i].file);
        bool aligned = added[i].offset >= 0 && added[i].bytes > 0 &&
                       added[i].offset % INF_ALIGN == 0 && added[i].bytes % INF_ALIGN == 0;
        if (!known || !aligned) error = -EINVAL;
    }
    if (error == 0 && count > 0) {
        size_t all = (size_t)ex->spare_count + (size_t)count;
        inf_spare *more = realloc(ex->spares, all * sizeof *more);
        if (more != NULL) ex->spares = more;
        /* one record per extent, so that a fault needs no allocation */
        size_t moves = all + (size_t)ex->move_count;
        inf_moved_write *records = realloc(ex->moves, moves * sizeof *records);
        if (records != NULL) ex->moves = records;
        if (more == NULL || records == NULL) error = -ENOMEM;
    }
    if (error == 0 && count > 0) {
        memcpy(&ex->spares[ex->spare_count], added, (size_t)count * sizeof *added);
        ex->spare_count += count;
    }
    pthread_mutex_unlock(&ex->lock);
    return error;
}

int32_t inf_executor_spares_take(inf_executor *ex, void *spares, int32_t count_max) {
    pthread_mutex_lock(&ex->lock);
    int32_t count = ex->spare_count < count_max ? ex->spare_count : count_max;
    ex->spare_count -= count;
    if (count > 0)
        memcpy(spares, &ex->spares[ex->spare_count], (size_t)count * sizeof(inf_spare));
    pthread_mutex_unlock(&ex->lock);
    return count;
}

int32_t inf_executor_moves_take(inf_executor *ex, void *moves, int32_t count_max) {
    pthread_mutex_lock(&ex->lock);
    int32_t count = ex->move_count < count_max ? ex->move_count : count_max;
    if (count > 0) {
        memcpy(moves, ex->moves, (size_t)count * sizeof *ex->moves);
        ex->move_count -= count;
        memmove(ex->moves, &ex->moves[count], (size_t)ex->move_count * sizeof *ex->moves);
    }
    pthread_mutex_unlock(&ex->lock);
    return count;
}
