/* Reads ahead: idle slots read the chunks of later UPDATEs. All [locked].
 *
 *   behind a closed gate    an UPDATE that is first in its FIFO, and only waits for its gate, is
 *                           *hinted*
 *   requested               inf_executor_prefetch names chunks whose UPDATEs are not submitted yet
 *
 * Hinted jobs are read first, in the order of their gates, then requested chunks, in the order of
 * request. A read ahead gets a slot only while no job waits for one, leaves a quarter of the pool
 * free, and has the lowest priority of all reads. Its slot holds the data until the UPDATE takes
 * the slot over, so no byte is read twice, and jobs use the free quarter. A job without a slot gets
 * the slot of the newest read ahead that no drive has begun. It gets the slot of a completed read
 * ahead only if jobs hold less than their quarter (because of another drive's share, or of failed
 * writes). A dropped read ahead is queued again. If a STORE writes sections meanwhile, the UPDATE
 * reads them again. Only the UPDATE verifies the data. A failed read ahead has no effect: the
 * UPDATE reads the chunk, and reports a fault.
 *
 * While a drive works on a read, its slot is not reused; if the chunk is dropped meanwhile, the
 * result is discarded.
 */
#include "executor.h"

#include <assert.h>
#include <errno.h>
#include <stdlib.h>

/* Slots that reads ahead leave free. */
static int32_t spared(const inf_pool *pool) {
    return pool->count < 4 ? 1 : (pool->count + 3) / 4;
}

/* ---- lists ----------------------------------------------------------------------------------- */

static void list_push(inf_prefetch_list *list, inf_prefetch *prefetch, bool first) {
    prefetch->next = first ? list->head : NULL;
    prefetch->previous = first ? NULL : list->tail;
    *(prefetch->previous == NULL ? &list->head : &prefetch->previous->next) = prefetch;
    *(prefetch->next == NULL ? &list->tail : &prefetch->next->previous) = prefetch;
}

static void list_remove(inf_prefetch_list *list, inf_prefetch *prefetch) {
    *(prefetch->previous == NULL ? &list->head : &prefetch->previous->next) = prefetch->next;
    *(prefetch->next == NULL ? &list->tail : &prefetch->next->previous) = prefetch->previous;
}

int32_t inf_prefetch_make(struct inf_executor *ex, int32_t slot_count) {
    /* One per slot for reads, and as many for queued requests. */
    size_t count = 2 * (size_t)slot_count;
    inf_prefetch *made = calloc(count + 1, sizeof *made);
    if (made == NULL) return -ENOMEM;
    ex->prefetches = made;
    ex->prefetches_free = NULL;
    for (size_t i = 0; i < count; i++) {
        ex->prefetches[i].next = ex->prefetches_free;
        ex->prefetches_free = &ex->prefetches[i];
    }
    return 0;
}

static inf_pool *pool_of(struct inf_executor *ex, const inf_prefetch *prefetch) {
    return &ex->pools[prefetch->run.slot.pool];
}

/* NULL: all are in use. */
static inf_prefetch *prefetch_new(struct inf_executor *ex, inf_chunk_record *chunk, int32_t pool,
                                  uint32_t used, uint32_t have, bool asked) {
    inf_prefetch *prefetch = ex->prefetches_free;
    if (prefetch == NULL) return NULL;
    ex->prefetches_free = prefetch->next;
    *prefetch = (inf_prefetch){.chunk = chunk, .used = used, .have = have, .asked = asked};
    prefetch->record.plan = chunk->plan;
    prefetch->record.id = chunk->id;
    prefetch->run.chunk = &prefetch->record;
    prefetch->run.job.kind = INF_JOB_PREFETCH;
    prefetch->run.slot.pool = pool;
    ex->pools[pool].asked_count += asked;
    chunk->prefetch = prefetch;
    return prefetch;
}

static void prefetch_free(struct inf_executor *ex, inf_prefetch *prefetch) {
    bool wanted = prefetch->state == INF_PREFETCH_WANTED;
    assert(prefetch->run.slot.memory == NULL && prefetch->taker == NULL);
    list_remove(wanted ? &ex->wanted : &ex->with_slot, prefetch);
    pool_of(ex, prefetch)->asked_count -= prefetch->asked;
    if (prefetch->chunk != NULL) prefetch->chunk->prefetch = NULL;
    prefetch->next = ex->prefetches_free;
    ex->prefetches_free = prefetch;
}

/* ---- candidates for the next read ------------------------------------------------------------ */

static bool earlier(const inf_run *run, const inf_run *other) {
    const inf_submission *one = run->submission, *two = other->submission;
    if (one == two) return run < other;
    return one->gate != two->gate ? one->gate->order < two->gate->order : one->order < two->order;
}

/* Inserts a job in order: a new one is almost always last, one that has lost its slot (`again`)
 * first. */
static void hint_insert(struct inf_executor *ex, inf_run *run, bool again) {
    inf_run *after = ex->hint_last;
    if (again) {
        inf_run *before = ex->hint_first;
        while (before != NULL && earlier(before, run)) before = before->hint_next;
        after = before == NULL ? ex->hint_last : before->hint_previous;
    } else {
        while (after != NULL && earlier(run, after)) after = after->hint_previous;
    }
    run->hint_previous = after;
    run->hint_next = after == NULL ? ex->hint_first : after->hint_next;
    *(after == NULL ? &ex->hint_first : &after->hint_next) = run;
    *(run->hint_next == NULL ? &ex->hint_last : &run->hint_next->hint_previous) = run;
    run->hinted = true;
}

void inf_prefetch_unhint(struct inf_executor *ex, inf_run *run) {
    if (!run->hinted) return;
    *(run->hint_previous == NULL ? &ex->hint_first : &run->hint_previous->hint_next) =
        run->hint_next;
    *(run->hint_next == NULL ? &ex->hint_last : &run->hint_next->hint_previous) =
        run->hint_previous;
    run->hinted = false;
}

/* The sections of `mask` that must be read from the drive. */
static uint32_t on_drive(const inf_chunk *chunk, uint32_t mask) {
    mask &= ~(uint32_t)chunk->zeros;
    for (int32_t s = 0; s < chunk->section_count; s++) {
        if (inf_section_resident(chunk, s)) mask &= ~(1u << s);
    }
    return mask;
}

void inf_prefetch_hint(struct inf_executor *ex, inf_run *run) {
    inf_chunk_record *chunk = run->chunk;
    if (run->hinted || run->prefetch_failed || ex->shut || chunk->failed_write_mask != 0) return;
    /* a read ahead for this job is in flight, or complete */
    if (chunk->prefetch != NULL && chunk->prefetch->state != INF_PREFETCH_WANTED) return;
    if (on_drive(&chunk->plan, run->reads) == 0) return;
    if (chunk->prefetch != NULL) prefetch_free(ex, chunk->prefetch);
    hint_insert(ex, run, false);
}

bool inf_prefetch_want(struct inf_executor *ex, inf_chunk_record *chunk, int32_t pool,
                       const inf_job *update) {
    const inf_run *head = chunk->fifo_head;
    bool gated = head != NULL && head->job.kind == INF_JOB_UPDATE && head->state == INF_WAITING;
    /* the last update of a versioned chunk before a commit writes all of it, except zeros */
    bool whole = inf_chunk_versioned(&chunk->plan) && !(update->mask & INF_MASK_FIRST);
    uint32_t kept = whole ? chunk->plan.zeros : ~0u;
    uint32_t used = inf_sections_all(&chunk->plan) & ~(inf_job_leaves(update) & kept);
    uint32_t given = update->mask & INF_MASK_PARAM_IN_MEMORY ? 1u : 0;
    uint32_t have = on_drive(&chunk->plan, used & ~inf_grad_mask(&chunk->plan) & ~given);
    if (chunk->prefetch != NULL || gated || have == 0) return true;
    if (pool < 0 || ex->pools[pool].asked_count >=
                        ex->pools[pool].count - spared(&ex->pools[pool]))
        return false;
    inf_prefetch *prefetch = prefetch_new(ex, chunk, pool, used, have, true);
    if (prefetch == NULL) return false;
    list_push(&ex->wanted, prefetch, false);
    return true;
}

/* ---- reading --------------------------------------------------------------------------------- */

static bool may_begin(const struct inf_executor *ex, const inf_pool *pool, int32_t drive) {
    if (pool->waiting_count > 0 || pool->free_count <= spared(pool)) return false;
    return pool->held[drive] < inf_held_max(ex, pool) && ex->prefetches_free != NULL &&
           ex->drives[drive].dead == 0;
}

static void begin(struct inf_executor *ex, inf_prefetch *prefetch) {
    inf_run *run = &prefetch->run;
    const inf_chunk *plan = &prefetch->record.plan;
    prefetch->record.plan = prefetch->chunk->plan; /* the chunk may have moved */
    run->slot.drive = plan->drive;
    inf_slot_plan(&run->slot, plan, prefetch->used, prefetch->have, 0, false);
    bool taken = inf_slot_take(ex, &run->slot);
    assert(taken);
    (void)taken;
    pool_of(ex, prefetch)->prefetch_count++;
    list_push(&ex->with_slot, prefetch, false);
    prefetch->state = INF_PREFETCH_READING;
    run->priority = INF_CLASS_AHEAD;
    run->order = ++ex->arrivals;
    run->faulted = false;
    ex->prefetch_reading++;
    ex->stats.reads_ahead++;
    inf_drive_queue_run(ex, run, INF_OP_READ);
}

/* Begins a hinted read, or drops the hint. False: no slot is idle, so the caller stops: reads begin
 * in the order of gates, across drives and pools. */
static bool begin_hinted(struct inf_executor *ex, inf_run *run) {
    inf_chunk_record *chunk = run->chunk;
    int32_t drive = chunk->plan.drive;
    if (chunk->fifo_head != run || chunk->failed_write_mask != 0 || ex->drives[drive].dead != 0) {
        inf_prefetch_unhint(ex, run); /* hinted again when the job before it ends */
        return true;
    }
    if (!may_begin(ex, &ex->pools[run->slot.pool], drive)) return false;
    inf_prefetch_unhint(ex, run);
    begin(ex, prefetch_new(ex, chunk, run->slot.pool, inf_run_used(run),
                           on_drive(&chunk->plan, run->reads), false));
    return true;
}

void inf_prefetch_begin(struct inf_executor *ex) {
    if (ex->shut) return;
    while (ex->hint_first != NULL && begin_hinted(ex, ex->hint_first)) continue;
    if (ex->hint_first != NULL) return;
    inf_prefetch *next;
    for (inf_prefetch *prefetch = ex->wanted.head; prefetch != NULL; prefetch = next) {
        next = prefetch->next;
        if (prefetch->chunk->fifo_head != NULL || prefetch->chunk->failed_write_mask != 0) continue;
        if (!may_begin(ex, pool_of(ex, prefetch), prefetch->chunk->plan.drive)) continue;
        list_remove(&ex->wanted, prefetch);
        begin(ex, prefetch);
    }
}

void inf_prefetch_promote(struct inf_executor *ex, inf_prefetch *prefetch, int32_t class) {
    inf_run *run = &prefetch->run;
    if (prefetch->state != INF_PREFETCH_READING || run->priority <= class) return;
    bool queued = inf_drive_unqueue(&ex->drives[prefetch->record.plan.drive], run, INF_OP_READ);
    run->priority = class;
    if (queued) inf_drive_requeue(&ex->drives[prefetch->record.plan.drive], run, INF_OP_READ);
}

static void read_ended(struct inf_executor *ex) {
    ex->prefetch_reading--;
    if (inf_idle(ex)) pthread_cond_broadcast(&ex->done);
}

/* Cancels a read that no drive has begun. */
static bool unread(struct inf_executor *ex, inf_prefetch *prefetch) {
    inf_run *run = &prefetch->run;
    if (prefetch->state != INF_PREFETCH_READING || run->cursor != 0 || run->position != 0)
        return false;
    if (!inf_drive_unqueue(&ex->drives[prefetch->record.plan.drive], run, INF_OP_READ))
        return false;
    read_ended(ex);
    return true;
}

static void let_slot_go(struct inf_executor *ex, inf_prefetch *prefetch) {
    pool_of(ex, prefetch)->prefetch_count--;
    inf_slot_release(ex, &prefetch->run.slot);
    ex->stats.reads_ahead_dropped++;
}

/* ---- ends ------------------------------------------------------------------------------------ */

static bool drive_waits(const inf_pool *pool, int32_t drive) {
    for (int32_t p = 0; p < INF_PRIORITY_COUNT; p++) {
        if (pool->waiting[p][drive].head != NULL) return true;
    }
    return false;
}

/* Whether jobs hold as many slots as are reserved for them: of the pool, or of this drive if only
 * the drive is at its limit. Then no read ahead need be dropped. */
static bool jobs_have_slots(struct inf_executor *ex, const inf_pool *pool, int32_t drive) {
    bool all = pool->free_count == 0;
    int32_t held = all ? pool->count - pool->prefetch_count : pool->held[drive];
    for (const inf_prefetch *prefetch = ex->with_slot.head; prefetch != NULL && !all;
         prefetch = prefetch->next) {
        held -= pool_of(ex, prefetch) == pool && prefetch->record.plan.drive == drive;
    }
    return held >= spared(pool);
}

bool inf_prefetch_yield(struct inf_executor *ex, int32_t index) {
    const inf_pool *pool = &ex->pools[index];
    for (inf_prefetch *prefetch = ex->with_slot.tail; prefetch != NULL;
         prefetch = prefetch->previous) {
        inf_chunk_record *chunk = prefetch->chunk;
        if (prefetch->run.slot.pool != index || chunk == NULL || prefetch->taker != NULL) continue;
        /* dropping it would not help */
        if (pool->free_count > 0 && !drive_waits(pool, chunk->plan.drive)) continue;
        if (prefetch->state == INF_PREFETCH_READING && !unread(ex, prefetch)) continue;
        if (prefetch->state == INF_PREFETCH_HELD && jobs_have_slots(ex, pool, chunk->plan.drive))
            continue;
        let_slot_go(ex, prefetch);
        inf_run *head = chunk->fifo_head;
        bool gated = head != NULL && head->job.kind == INF_JOB_UPDATE && head->state == INF_WAITING;
        if (prefetch->asked && !gated) {
            list_remove(&ex->with_slot, prefetch);
            prefetch->state = INF_PREFETCH_WANTED;
            list_push(&ex->wanted, prefetch, true);
        } else {
            prefetch_free(ex, prefetch);
            if (gated && !head->prefetch_failed) hint_insert(ex, head, true);
        }
        return true;
    }
    return false;
}

/* Transfers the slot to the UPDATE, which reads the missing sections. */
static void give_over(struct inf_executor *ex, inf_prefetch *prefetch, inf_run *run) {
    inf_slot *slot = &prefetch->run.slot;
    uint32_t missing = run->reads & ~prefetch->have;
    inf_slot_plan(&run->slot, &run->chunk->plan, prefetch->used, missing, inf_run_written(run),
                  run->moves);
    assert(run->slot.pool == slot->pool && run->slot.bytes == slot->bytes);
    run->slot.memory = slot->memory;
    run->slot.index = slot->index;
    run->slot.drive = slot->drive;
    run->order = ++ex->arrivals;
    slot->memory = NULL;
    pool_of(ex, prefetch)->prefetch_count--;
    prefetch_free(ex, prefetch);
}

inf_prefetch_state inf_prefetch_take(struct inf_executor *ex, inf_run *run) {
    inf_prefetch *prefetch = run->chunk->prefetch;
    if (prefetch == NULL) return INF_PREFETCH_WANTED;
    if (prefetch->used != inf_run_used(run)) {
        inf_prefetch_drop(ex, run->chunk); /* its slot has other sections */
        return INF_PREFETCH_WANTED;
    }
    if (prefetch->state == INF_PREFETCH_WANTED) {
        prefetch_free(ex, prefetch);
        return INF_PREFETCH_WANTED;
    }
    if (unread(ex, prefetch)) {
        prefetch->have = 0;
        give_over(ex, prefetch, run);
    } else if (prefetch->state == INF_PREFETCH_HELD) {
        give_over(ex, prefetch, run);
    } else {
        prefetch->taker = run;
        run->prefetch = prefetch;
        run->state = INF_READING;
        inf_prefetch_promote(ex, prefetch, run->priority);
        return INF_PREFETCH_READING;
    }
    return INF_PREFETCH_HELD;
}

/* A read ahead for which an UPDATE (`taker`) waits has ended: gives the UPDATE its slot, or drops
 * the read. */
static void taker_resumes(struct inf_executor *ex, inf_prefetch *prefetch, inf_run *taker,
                          bool failed) {
    prefetch->taker = NULL;
    taker->prefetch = NULL;
    if (ex->cancelled) inf_run_fail(taker, INF_FAULT_CLOSED, -1, 0, 0, 0);
    if (!failed && !taker->faulted && !inf_run_refused(ex, taker)) {
        give_over(ex, prefetch, taker);
        return;
    }
    let_slot_go(ex, prefetch);
    prefetch_free(ex, prefetch);
}

inf_run *inf_prefetch_moved(struct inf_executor *ex, inf_run *run) {
    inf_prefetch *prefetch = (inf_prefetch *)run; /* its first member */
    inf_run *taker = prefetch->taker;
    bool failed = run->faulted;
    read_ended(ex);
    if (taker != NULL) {
        taker_resumes(ex, prefetch, taker, failed);
    } else if (failed || prefetch->chunk == NULL) {
        inf_run *head = prefetch->chunk == NULL ? NULL : prefetch->chunk->fifo_head;
        if (head != NULL && head->state == INF_WAITING) head->prefetch_failed = true;
        let_slot_go(ex, prefetch);
        prefetch_free(ex, prefetch);
    } else {
        prefetch->state = INF_PREFETCH_HELD;
        run->state = INF_DONE;
    }
    return taker;
}

void inf_prefetch_drop(struct inf_executor *ex, inf_chunk_record *chunk) {
    inf_prefetch *prefetch = chunk->prefetch;
    if (prefetch == NULL) return;
    assert(prefetch->taker == NULL);
    if (prefetch->state == INF_PREFETCH_READING && !unread(ex, prefetch)) {
        prefetch->chunk = NULL; /* its slot is released when the read ends */
        chunk->prefetch = NULL;
        return;
    }
    if (prefetch->state != INF_PREFETCH_WANTED) let_slot_go(ex, prefetch);
    prefetch_free(ex, prefetch);
}

void inf_prefetch_written(struct inf_executor *ex, inf_chunk_record *chunk, uint32_t mask) {
    if (chunk->prefetch == NULL || mask == 0) return;
    chunk->prefetch->have &= ~mask;
    if (chunk->prefetch->have == 0) inf_prefetch_drop(ex, chunk);
}

static void drop_list(struct inf_executor *ex, const inf_prefetch_list *list) {
    inf_prefetch *next;
    for (inf_prefetch *prefetch = list->head; prefetch != NULL; prefetch = next) {
        next = prefetch->next;
        if (prefetch->chunk != NULL && prefetch->taker == NULL)
            inf_prefetch_drop(ex, prefetch->chunk);
    }
}

void inf_prefetch_drop_all(struct inf_executor *ex) {
    drop_list(ex, &ex->wanted);
    drop_list(ex, &ex->with_slot);
}
