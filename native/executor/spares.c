/* A write that fails goes to another range: a spare one, of its own drive first, then of another.
 *
 * Python gives spare ranges ahead of their time: a drive that fails has no room to give.
 * The chunk's place is the spare range from then on, and the range that failed is not used again:
 * Python takes the record of the move, remembers the bad range, and gives another spare.
 *
 * Only a whole place can go elsewhere. Of a part the rest is read first, from the place that
 * refused it (partial_writes.c). What finds no range, or failed twice on its drive and
 * finds none on another, is kept in memory (failed_writes.c).
 */
#include "executor.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

/* To its own drive, and to another: a fault that follows a write there is of no block. */
#define MOVES_MAX 2

/* One of a chunk's places on the drive. */
typedef enum { PLACE_NONE, PLACE_LIVE, PLACE_OTHER, PLACE_GRADIENTS } place_kind;

static uint32_t sections_on_drive(const inf_chunk *chunk) {
    uint32_t mask = 0;
    for (int32_t s = 0; s < chunk->section_count; s++)
        mask |= (uint32_t)!inf_section_resident(chunk, s) << s;
    return mask;
}

/* Spilled gradients of an unversioned chunk that its UPDATE has in the slot: they lie in the place
 * that is given up, and move with the states. */
static uint32_t gradients_held(const inf_run *run) {
    const inf_chunk *chunk = &run->chunk->plan;
    uint32_t grad = inf_grad_mask(chunk) & run->reads;
    if (run->job.kind != INF_JOB_UPDATE || inf_chunk_versioned(chunk) || grad == 0) return 0;
    return run->slot.section_at[chunk->section_count - 1] < 0 ? 0 : grad;
}

/* The place that the run writes `written` of; in `rest` what else has contents there. */
static place_kind place_written(const inf_run *run, uint32_t written, uint32_t *rest) {
    const inf_chunk *chunk = &run->chunk->plan;
    bool versioned = inf_chunk_versioned(chunk);
    uint32_t there = sections_on_drive(chunk);
    uint32_t grad = there & inf_grad_mask(chunk);
    *rest = 0;
    if (versioned && grad != 0 && written == grad) return PLACE_GRADIENTS;
    if (versioned && (written & grad) != 0) return PLACE_NONE; /* two places at once */
    *rest = there & ~written & ~(versioned ? grad : 0u);
    if (run->moves) return *rest == 0 ? PLACE_OTHER : PLACE_NONE;
    /* zeros that are not read, and what was lost before */
    *rest &= ~((uint32_t)chunk->zeros | run->chunk->invalid);
    return PLACE_LIVE;
}

static int64_t place_bytes(const inf_chunk *chunk, place_kind place) {
    if (place == PLACE_GRADIENTS)
        return inf_align_up(inf_section_bytes(chunk, chunk->section_count - 1));
    return inf_chunk_versioned(chunk) ? chunk->other_bytes : chunk->run_bytes;
}

/* A section of gradients has to be on the drive of the live place. */
static bool may_leave_drive(const inf_chunk *chunk, place_kind place) {
    bool versioned = inf_chunk_versioned(chunk);
    bool grad = (sections_on_drive(chunk) & inf_grad_mask(chunk)) != 0;
    return place != PLACE_GRADIENTS && !(versioned && grad);
}

static bool drive_writes(const struct inf_executor *ex, int32_t drive) {
    return ex->drives[drive].dead == 0 && !ex->drives[drive].stats.marked;
}

/* The index of a spare range, of this drive or (`own` false) of any other; -1: there is none. */
static int32_t spare_find(const struct inf_executor *ex, int32_t drive, bool own, int64_t bytes) {
    for (int32_t s = 0; s < ex->spare_count; s++) {
        const inf_spare *spare = &ex->spares[s];
        if ((spare->drive == drive) == own && spare->bytes >= bytes &&
            drive_writes(ex, spare->drive))
            return s;
    }
    return -1;
}

/* The index of the one for the run's place, or -1. */
static int32_t spare_for(const struct inf_executor *ex, const inf_run *run, place_kind place) {
    const inf_chunk *chunk = &run->chunk->plan;
    int64_t bytes = place_bytes(chunk, place);
    int32_t drive = inf_run_drive(run, INF_OP_WRITE);
    if (run->moved >= MOVES_MAX) return -1;
    /* Twice on the same drive: it is the drive, not a block. */
    int32_t index = run->moved > 0 ? -1 : spare_find(ex, drive, true, bytes);
    if (index >= 0 || !may_leave_drive(chunk, place)) return index;
    return spare_find(ex, drive, false, bytes);
}

static inf_spare spare_use(struct inf_executor *ex, int32_t index) {
    inf_spare spare = ex->spares[index];
    ex->spare_count--;
    memmove(&ex->spares[index], &ex->spares[index + 1],
            (size_t)(ex->spare_count - index) * sizeof spare);
    return spare;
}

/* Puts the spare range into the chunk's record, and the move on the list. */
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
    ex->moves[ex->move_count++] = move; /* spares_add made room for as many as there are spares */
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
    if (rest != 0) return inf_run_load_rest(ex, run, written, rest);
    inf_run_take_rest(ex, run);
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
        /* a move for each spare, so that no fault ever wants memory */
        size_t moves = all + (size_t)ex->move_count;
        inf_moved_write *room = realloc(ex->moves, moves * sizeof *room);
        if (room != NULL) ex->moves = room;
        if (more == NULL || room == NULL) error = -ENOMEM;
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
