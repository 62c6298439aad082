/* Two places of a chunk, one of them committed: writes go to the other place, and either can be
 * restored.
 *
 *   commit      the live place is the committed one; the next UPDATE or STORE writes the other,
 *               whole, and flips. The first of two UPDATEs writes its own sections alone: the
 *               others are still read from the committed place, and the second one writes them,
 *               too. No commit is possible before
 *   later       UPDATEs and STOREs change the uncommitted place
 *   rollback    the committed place is the live one again
 *   exchange    the other place becomes the committed and the live one
 *
 * Spilled gradients are not versioned: a STORE of only gradients changes no place. Resident
 * sections without memory for a second version are changed in place, and cannot be restored.
 */
#include "executor.h"

#include <errno.h>

/* Whether a resident section has no second version. */
static bool for_good(const inf_chunk *chunk) {
    for (int32_t s = 0; s < chunk->section_count; s++) {
        bool state = !(inf_grad_mask(chunk) >> s & 1u);
        if (state && inf_section_resident(chunk, s) && chunk->other_ptr[s] == 0) return true;
    }
    return false;
}

/* Whether a section of the states is in memory: a failed update may have changed its second
 * version. */
static bool holds_state(const inf_chunk *chunk) {
    for (int32_t s = 0; s < chunk->section_count; s++) {
        if (!(inf_grad_mask(chunk) >> s & 1u) && inf_section_resident(chunk, s)) return true;
    }
    return false;
}

/* Whether no pending job writes states; stores of spilled gradients do not count. */
static bool states_stay(const inf_chunk_record *chunk) {
    uint32_t states = inf_sections_all(&chunk->plan) & ~inf_grad_mask(&chunk->plan);
    const inf_run *run = chunk->fifo_head;
    while (run != NULL) {
        bool stores = run->job.kind == INF_JOB_STORE && (run->job.mask & states) == 0;
        if (run->job.kind != INF_JOB_FETCH && !stores) return false;
        run = run->fifo_next;
    }
    return true;
}

static int32_t wrong(const struct inf_executor *ex, const int32_t *ids, int32_t count, bool back) {
    for (int32_t i = 0; i < count; i++) {
        const inf_chunk_record *chunk = inf_chunk_of(ex, ids[i]);
        if (chunk == NULL) return -EINVAL;
        if (back ? chunk->fifo_head != NULL : !states_stay(chunk)) return -EBUSY;
        if (back && chunk->place == INF_PLACE_MOVED && for_good(&chunk->plan)) return -EPERM;
    }
    return 0;
}

int32_t inf_executor_commit(inf_executor *ex, const int32_t *ids, int32_t count) {
    pthread_mutex_lock(&ex->lock);
    int32_t error = wrong(ex, ids, count, false);
    for (int32_t i = 0; i < count && error == 0; i++)
        if (ex->chunks[ids[i]]->plan.older != 0) error = -EPERM;
    for (int32_t i = 0; i < count && error == 0; i++) {
        inf_chunk_record *chunk = ex->chunks[ids[i]];
        chunk->place = INF_PLACE_COMMITTED;
        chunk->committed_invalid = chunk->invalid;
        chunk->committed_fault = chunk->fault;
    }
    pthread_mutex_unlock(&ex->lock);
    return error;
}

static void go_back(struct inf_executor *ex, inf_chunk_record *chunk) {
    uint32_t grad = inf_grad_mask(&chunk->plan); /* gradients have no versions */
    if (chunk->place == INF_PLACE_FREE) return;
    if (chunk->place == INF_PLACE_MOVED) {
        inf_prefetch_drop(ex, chunk);
        inf_chunk_drop_failed_write(ex, chunk);
        inf_chunk_swap_places(chunk, chunk->plan.other_generation);
        chunk->plan.older = 0;
        /* The other place now has the undone version, not the states before an update. */
        chunk->updated = chunk->exchanged = false;
    }
    chunk->place = INF_PLACE_COMMITTED;
    chunk->invalid = (chunk->invalid & grad) | (chunk->committed_invalid & ~grad);
    chunk->fault = chunk->committed_fault;
}

int32_t inf_executor_rollback(inf_executor *ex, const int32_t *ids, int32_t count) {
    pthread_mutex_lock(&ex->lock);
    int32_t error = wrong(ex, ids, count, true);
    for (int32_t i = 0; i < count && error == 0; i++) go_back(ex, ex->chunks[ids[i]]);
    inf_pump(ex); /* released slots may be granted */
    pthread_mutex_unlock(&ex->lock);
    return error;
}

int32_t inf_executor_exchange(inf_executor *ex, const int32_t *ids, int32_t count) {
    pthread_mutex_lock(&ex->lock);
    int32_t error = wrong(ex, ids, count, true);
    for (int32_t i = 0; i < count && error == 0; i++) {
        const inf_chunk_record *chunk = ex->chunks[ids[i]];
        if (!inf_chunk_versioned(&chunk->plan) || chunk->place != INF_PLACE_COMMITTED ||
            chunk->failed_write_mask != 0 || chunk->committed_invalid != 0 ||
            holds_state(&chunk->plan) || !(chunk->updated || chunk->exchanged))
            error = -EPERM;
    }
    for (int32_t i = 0; i < count && error == 0; i++) {
        inf_chunk_record *chunk = ex->chunks[ids[i]];
        uint32_t grad = inf_grad_mask(&chunk->plan); /* gradients have no versions */
        inf_prefetch_drop(ex, chunk);
        inf_chunk_swap_places(chunk, chunk->plan.other_generation);
        chunk->exchanged = !chunk->exchanged;
        chunk->invalid &= grad;
    }
    inf_pump(ex); /* released slots may be granted */
    pthread_mutex_unlock(&ex->lock);
    return error;
}

int32_t inf_executor_look(inf_executor *ex, const int32_t *ids, int32_t count, void *chunks) {
    inf_chunk *plans = chunks;
    int32_t error = 0;
    pthread_mutex_lock(&ex->lock);
    for (int32_t i = 0; i < count && error == 0; i++) {
        const inf_chunk_record *chunk = inf_chunk_of(ex, ids[i]);
        if (chunk == NULL) error = -EINVAL;
        else plans[i] = chunk->plan;
    }
    pthread_mutex_unlock(&ex->lock);
    return error;
}

int32_t inf_executor_relocate(inf_executor *ex, const int32_t *ids, int32_t count,
                              const int32_t *drives, const int32_t *files,
                              const int64_t *offsets) {
    pthread_mutex_lock(&ex->lock);
    int32_t error = wrong(ex, ids, count, false);
    for (int32_t i = 0; i < count && error == 0; i++) {
        const inf_chunk_record *chunk = ex->chunks[ids[i]];
        bool drive = drives[i] >= 0 && drives[i] < ex->config.drive_count;
        bool known = chunk->plan.other_bytes > 0 && drive &&
                     inf_file_known(ex, drives[i], files[i]) && offsets[i] >= 0;
        known = known && (inf_grad_mask(&chunk->plan) == 0 || drives[i] == chunk->plan.drive);
        if (!known) error = -EINVAL;
        else if (chunk->place == INF_PLACE_MOVED || chunk->plan.older != 0) error = -EPERM;
    }
    for (int32_t i = 0; i < count && error == 0; i++) {
        ex->chunks[ids[i]]->plan.other_drive = drives[i];
        ex->chunks[ids[i]]->plan.other_file = files[i];
        ex->chunks[ids[i]]->plan.other_offset = offsets[i];
    }
    pthread_mutex_unlock(&ex->lock);
    return error;
}

/* ---- files ----------------------------------------------------------------------------------- */

int32_t inf_executor_file_add(inf_executor *ex, int32_t drive, int32_t fd) {
    int32_t index = drive >= 0 && drive < ex->config.drive_count && fd >= 0 ? 1 : -EINVAL;
    pthread_mutex_lock(&ex->lock);
    while (index > 0 && index < INF_FILE_MAX && ex->drives[drive].fds[index] >= 0) index++;
    if (index == INF_FILE_MAX) index = -ENOSPC;
    if (index > 0) ex->drives[drive].fds[index] = fd;
    pthread_mutex_unlock(&ex->lock);
    return index;
}

static bool lies_in(const inf_chunk *chunk, int32_t drive, int32_t file) {
    if (chunk->drive == drive && chunk->file == file) return true;
    if (!inf_chunk_versioned(chunk)) return false;
    return (chunk->other_drive == drive && chunk->other_file == file) ||
           (chunk->drive == drive && chunk->grad_file == file);
}

int32_t inf_executor_file_remove(inf_executor *ex, int32_t drive, int32_t index) {
    pthread_mutex_lock(&ex->lock);
    bool known = drive >= 0 && drive < ex->config.drive_count && index > 0 &&
                 inf_file_known(ex, drive, index);
    int32_t error = known ? 0 : -EINVAL;
    for (int32_t c = 0; c < ex->chunk_count && error == 0; c++) {
        if (ex->chunks[c] != NULL && lies_in(&ex->chunks[c]->plan, drive, index)) error = -EBUSY;
    }
    for (int32_t s = 0; s < ex->spare_count && error == 0; s++) {
        if (ex->spares[s].drive == drive && ex->spares[s].file == index) error = -EBUSY;
    }
    if (error == 0) ex->drives[drive].fds[index] = -1;
    pthread_mutex_unlock(&ex->lock);
    return error;
}
