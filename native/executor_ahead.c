/* Reads ahead: slots that are idle fill with what UPDATEs will need. All [locked].
 *
 *   behind a closed gate    an UPDATE that is first in its FIFO is *hinted*: it only waits for its gate
 *   asked for               inf_executor_preread names chunks whose UPDATEs were not submitted yet
 *
 * Hinted jobs come first, in the order of their gates, then what was asked for, in the order of asking. A read takes a slot
 * only while no job waits for one, and leaves a quarter of the pool; of all reads it is the least urgent. What was read stays
 * in the slot, of the chunk, until its UPDATE takes the slot over: jobs have the quarter, and a byte read ahead is not read
 * again. A job that finds no slot gets that of the youngest read that no drive has begun, and that of one which has ended only
 * where jobs hold less than their quarter (another drive's share, slots that faults keep); what is given up is wanted again.
 * Of what was read, sections that a STORE writes are read again by the UPDATE. Nothing is verified before the UPDATE does it,
 * and a read ahead that fails is as if it had never been: the UPDATE reads, and tells.
 *
 * While a drive works on a read its slot belongs to nobody else; if the chunk is dropped meanwhile nobody is told of its end.
 */
#include "executor.h"

#include <assert.h>
#include <errno.h>
#include <stdlib.h>

/* ---- lists ---- */

static void list_push(inf_ahead_list *list, inf_ahead *ahead, bool first) {
    ahead->next = first ? list->head : NULL;
    ahead->previous = first ? NULL : list->tail;
    *(ahead->previous == NULL ? &list->head : &ahead->previous->next) = ahead;
    *(ahead->next == NULL ? &list->tail : &ahead->next->previous) = ahead;
}

static void list_remove(inf_ahead_list *list, inf_ahead *ahead) {
    *(ahead->previous == NULL ? &list->head : &ahead->previous->next) = ahead->next;
    *(ahead->next == NULL ? &list->tail : &ahead->next->previous) = ahead->previous;
}

int32_t inf_ahead_make(struct inf_executor *ex) {
    /* As many as slots may be read into, and as many may be wanted. */
    size_t count = 2 * ((size_t)ex->config.small_count + (size_t)ex->config.large_count);
    ex->aheads = calloc(count + 1, sizeof *ex->aheads);
    if (ex->aheads == NULL) return -ENOMEM;
    for (size_t i = 0; i < count; i++) {
        ex->aheads[i].next = ex->aheads_free;
        ex->aheads_free = &ex->aheads[i];
    }
    return 0;
}

static inf_pool *pool_of(struct inf_executor *ex, const inf_ahead *ahead) { return &ex->pools[ahead->run.slot.pool]; }

/* NULL: there is none left. */
static inf_ahead *ahead_new(struct inf_executor *ex, inf_chunk_record *chunk, int32_t pool, uint32_t have, bool asked) {
    inf_ahead *ahead = ex->aheads_free;
    if (ahead == NULL) return NULL;
    ex->aheads_free = ahead->next;
    *ahead = (inf_ahead){.chunk = chunk, .have = have, .asked = asked};
    ahead->record.plan = chunk->plan;
    ahead->record.id = chunk->id;
    ahead->run.chunk = &ahead->record;
    ahead->run.job.kind = INF_JOB_AHEAD;
    ahead->run.slot.pool = pool;
    ex->pools[pool].asked_count += asked;
    chunk->ahead = ahead;
    return ahead;
}

static void ahead_free(struct inf_executor *ex, inf_ahead *ahead) {
    bool wanted = ahead->state == INF_AHEAD_WANTED;
    assert(ahead->run.slot.memory == NULL && ahead->taker == NULL);
    list_remove(wanted ? &ex->wanted : &ex->with_slot, ahead);
    pool_of(ex, ahead)->asked_count -= ahead->asked;
    if (ahead->chunk != NULL) ahead->chunk->ahead = NULL;
    ahead->next = ex->aheads_free;
    ex->aheads_free = ahead;
}

/* ---- what may be read next ---- */

static bool earlier(const inf_run *run, const inf_run *other) {
    const inf_submission *one = run->submission, *two = other->submission;
    if (one == two) return run < other;
    return one->gate != two->gate ? one->gate->order < two->gate->order : one->order < two->order;
}

/* A new job is the last one almost always, and one that gave up its slot the first. */
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

void inf_ahead_unhint(struct inf_executor *ex, inf_run *run) {
    if (!run->hinted) return;
    *(run->hint_previous == NULL ? &ex->hint_first : &run->hint_previous->hint_next) = run->hint_next;
    *(run->hint_next == NULL ? &ex->hint_last : &run->hint_next->hint_previous) = run->hint_previous;
    run->hinted = false;
}

static uint32_t on_drive(const inf_chunk *chunk, uint32_t mask) {
    for (int32_t s = 0; s < chunk->section_count; s++) {
        if (inf_section_resident(chunk, s)) mask &= ~(1u << s);
    }
    return mask;
}

void inf_ahead_hint(struct inf_executor *ex, inf_run *run) {
    inf_chunk_record *chunk = run->chunk;
    if (run->hinted || run->unlucky || ex->shut || chunk->kept_mask != 0) return;
    if (chunk->ahead != NULL && chunk->ahead->state != INF_AHEAD_WANTED) return; /* that is for it */
    if (on_drive(&chunk->plan, run->reads) == 0) return;
    if (chunk->ahead != NULL) ahead_free(ex, chunk->ahead);
    hint_insert(ex, run, false);
}

bool inf_ahead_want(struct inf_executor *ex, inf_chunk_record *chunk, int32_t pool, bool given) {
    const inf_run *head = chunk->fifo_head;
    bool gated = head != NULL && head->job.kind == INF_JOB_UPDATE && head->state == INF_WAITING;
    uint32_t have = inf_sections_all(&chunk->plan) & ~inf_grad_mask(&chunk->plan) & ~(uint32_t)given;
    have = on_drive(&chunk->plan, have);
    if (chunk->ahead != NULL || gated || have == 0) return true;
    if (pool < 0 || ex->pools[pool].asked_count >= ex->pools[pool].count - inf_ahead_spared(&ex->pools[pool])) return false;
    inf_ahead *ahead = ahead_new(ex, chunk, pool, have, true);
    if (ahead == NULL) return false;
    list_push(&ex->wanted, ahead, false);
    return true;
}

/* ---- reading ---- */

static bool may_begin(const struct inf_executor *ex, const inf_pool *pool, int32_t drive) {
    if (pool->waiting_count > 0 || pool->free_count <= inf_ahead_spared(pool)) return false;
    return pool->held[drive] < inf_held_max(ex, pool) && ex->aheads_free != NULL && ex->drives[drive].dead == 0;
}

static void begin(struct inf_executor *ex, inf_ahead *ahead) {
    inf_run *run = &ahead->run;
    const inf_chunk *plan = &ahead->record.plan;
    ahead->record.plan = ahead->chunk->plan; /* it may have moved since it was wanted */
    run->slot.drive = plan->drive;
    inf_slot_plan(&run->slot, plan, inf_sections_all(plan), ahead->have, 0, false);
    bool taken = inf_slot_take(ex, &run->slot);
    assert(taken);
    (void)taken;
    pool_of(ex, ahead)->ahead_count++;
    list_push(&ex->with_slot, ahead, false);
    ahead->state = INF_AHEAD_READING;
    run->state = INF_READING;
    run->priority = INF_CLASS_AHEAD;
    run->order = ++ex->arrivals;
    run->faulted = false;
    ex->ahead_reading++;
    ex->stats.reads_ahead++;
    inf_drive_queue_run(ex, run, INF_OP_READ);
}

/* Whether the next may be tried: the order of gates is kept, whatever drive or pool a job wants. */
static bool begin_hinted(struct inf_executor *ex, inf_run *run) {
    inf_chunk_record *chunk = run->chunk;
    int32_t drive = chunk->plan.drive;
    if (chunk->fifo_head != run || chunk->kept_mask != 0 || ex->drives[drive].dead != 0) {
        inf_ahead_unhint(ex, run); /* what goes before it will consider it again */
        return true;
    }
    if (!may_begin(ex, &ex->pools[run->slot.pool], drive)) return false;
    inf_ahead_unhint(ex, run);
    begin(ex, ahead_new(ex, chunk, run->slot.pool, on_drive(&chunk->plan, run->reads), false));
    return true;
}

void inf_ahead_begin(struct inf_executor *ex) {
    if (ex->shut) return;
    while (ex->hint_first != NULL && begin_hinted(ex, ex->hint_first)) continue;
    if (ex->hint_first != NULL) return;
    inf_ahead *next;
    for (inf_ahead *ahead = ex->wanted.head; ahead != NULL; ahead = next) {
        next = ahead->next;
        if (ahead->chunk->fifo_head != NULL || ahead->chunk->kept_mask != 0) continue;
        if (!may_begin(ex, pool_of(ex, ahead), ahead->record.plan.drive)) continue;
        list_remove(&ex->wanted, ahead);
        begin(ex, ahead);
    }
}

void inf_ahead_promote(struct inf_executor *ex, inf_ahead *ahead, int32_t class) {
    inf_run *run = &ahead->run;
    if (ahead->state != INF_AHEAD_READING || run->priority <= class) return;
    bool queued = inf_drive_unqueue(&ex->drives[ahead->record.plan.drive], run, INF_OP_READ);
    run->priority = class;
    if (queued) inf_drive_requeue(&ex->drives[ahead->record.plan.drive], run, INF_OP_READ);
}

static void read_ended(struct inf_executor *ex) {
    ex->ahead_reading--;
    if (inf_idle(ex)) pthread_cond_broadcast(&ex->done);
}

/* Takes a read back that no drive has begun. */
static bool unread(struct inf_executor *ex, inf_ahead *ahead) {
    inf_run *run = &ahead->run;
    if (ahead->state != INF_AHEAD_READING || run->cursor != 0 || run->position != 0) return false;
    if (!inf_drive_unqueue(&ex->drives[ahead->record.plan.drive], run, INF_OP_READ)) return false;
    read_ended(ex);
    return true;
}

static void let_slot_go(struct inf_executor *ex, inf_ahead *ahead) {
    pool_of(ex, ahead)->ahead_count--;
    inf_slot_release(ex, &ahead->run.slot);
    ex->stats.reads_ahead_dropped++;
}

/* ---- ends ---- */

static bool drive_waits(const inf_pool *pool, int32_t drive) {
    for (int32_t p = 0; p < INF_PRIORITY_COUNT; p++) {
        if (pool->waiting[p][drive].head != NULL) return true;
    }
    return false;
}

/* Whether jobs hold the slots that are left to them, of all or, while only this drive has its share, of the drive: then they
 * go on with those, and nothing is read twice. */
static bool jobs_go_on(struct inf_executor *ex, const inf_pool *pool, int32_t drive) {
    bool all = pool->free_count == 0;
    int32_t held = all ? pool->count - pool->ahead_count : pool->held[drive];
    for (const inf_ahead *ahead = ex->with_slot.head; ahead != NULL && !all; ahead = ahead->next) {
        held -= pool_of(ex, ahead) == pool && ahead->record.plan.drive == drive;
    }
    return held >= inf_ahead_spared(pool);
}

bool inf_ahead_yield(struct inf_executor *ex, int32_t index) {
    const inf_pool *pool = &ex->pools[index];
    for (inf_ahead *ahead = ex->with_slot.tail; ahead != NULL; ahead = ahead->previous) {
        inf_chunk_record *chunk = ahead->chunk;
        if (ahead->run.slot.pool != index || chunk == NULL || ahead->taker != NULL) continue;
        if (pool->free_count > 0 && !drive_waits(pool, chunk->plan.drive)) continue; /* it is not one too many */
        if (ahead->state == INF_AHEAD_READING && !unread(ex, ahead)) continue;
        if (ahead->state == INF_AHEAD_HELD && jobs_go_on(ex, pool, chunk->plan.drive)) continue;
        let_slot_go(ex, ahead);
        inf_run *head = chunk->fifo_head;
        bool gated = head != NULL && head->job.kind == INF_JOB_UPDATE && head->state == INF_WAITING;
        if (ahead->asked && !gated) {
            list_remove(&ex->with_slot, ahead);
            ahead->state = INF_AHEAD_WANTED;
            list_push(&ex->wanted, ahead, true);
        } else {
            ahead_free(ex, ahead);
            if (gated && !head->unlucky) hint_insert(ex, head, true);
        }
        return true;
    }
    return false;
}

/* The UPDATE has the slot from now on, and reads what is not in it. */
static void give_over(struct inf_executor *ex, inf_ahead *ahead, inf_run *run) {
    inf_slot *slot = &ahead->run.slot;
    uint32_t missing = run->reads & ~ahead->have;
    uint32_t all = inf_sections_all(&run->chunk->plan);
    inf_slot_plan(&run->slot, &run->chunk->plan, all, missing, all & ~inf_grad_mask(&run->chunk->plan), run->moves);
    assert(run->slot.pool == slot->pool && run->slot.bytes == slot->bytes);
    run->slot.memory = slot->memory;
    run->slot.index = slot->index;
    run->slot.drive = slot->drive;
    run->order = ++ex->arrivals;
    slot->memory = NULL;
    pool_of(ex, ahead)->ahead_count--;
    ahead_free(ex, ahead);
    inf_run_with_slot(ex, run);
}

bool inf_ahead_take(struct inf_executor *ex, inf_run *run) {
    inf_ahead *ahead = run->chunk->ahead;
    if (ahead == NULL) return false;
    if (ahead->state == INF_AHEAD_WANTED) {
        ahead_free(ex, ahead);
        return false;
    }
    if (unread(ex, ahead)) {
        ahead->have = 0;
        give_over(ex, ahead, run);
    } else if (ahead->state == INF_AHEAD_HELD) {
        give_over(ex, ahead, run);
    } else {
        ahead->taker = run;
        run->ahead = ahead;
        run->state = INF_READING;
        inf_ahead_promote(ex, ahead, run->priority);
    }
    return true;
}

/* Its UPDATE waits for the read that has ended. */
static void taker_goes_on(struct inf_executor *ex, inf_ahead *ahead, inf_run *taker, bool failed) {
    ahead->taker = NULL;
    taker->ahead = NULL;
    if (ex->cancelled) inf_run_fail(taker, INF_FAULT_CLOSED, -1, 0, 0, 0);
    if (!failed && !taker->faulted && !inf_run_refused(ex, taker)) {
        give_over(ex, ahead, taker);
        return;
    }
    let_slot_go(ex, ahead);
    ahead_free(ex, ahead);
    if (taker->faulted) inf_run_finish(ex, taker);
    else inf_run_want_slot(ex, taker);
}

void inf_ahead_moved(struct inf_executor *ex, inf_run *run) {
    inf_ahead *ahead = (inf_ahead *)run; /* its first member */
    bool failed = run->faulted;
    read_ended(ex);
    if (ahead->taker != NULL) {
        taker_goes_on(ex, ahead, ahead->taker, failed);
    } else if (failed || ahead->chunk == NULL) {
        inf_run *head = ahead->chunk == NULL ? NULL : ahead->chunk->fifo_head;
        if (head != NULL && head->state == INF_WAITING) head->unlucky = true;
        let_slot_go(ex, ahead);
        ahead_free(ex, ahead);
    } else {
        ahead->state = INF_AHEAD_HELD;
        run->state = INF_DONE;
    }
}

void inf_ahead_drop(struct inf_executor *ex, inf_chunk_record *chunk) {
    inf_ahead *ahead = chunk->ahead;
    if (ahead == NULL) return;
    assert(ahead->taker == NULL);
    if (ahead->state == INF_AHEAD_READING && !unread(ex, ahead)) {
        ahead->chunk = NULL; /* its slot is free when the drive is through */
        chunk->ahead = NULL;
        return;
    }
    if (ahead->state != INF_AHEAD_WANTED) let_slot_go(ex, ahead);
    ahead_free(ex, ahead);
}

void inf_ahead_written(struct inf_executor *ex, inf_chunk_record *chunk, uint32_t mask) {
    if (chunk->ahead == NULL || mask == 0) return;
    chunk->ahead->have &= ~mask;
    if (chunk->ahead->have == 0) inf_ahead_drop(ex, chunk);
}

static void drop_list(struct inf_executor *ex, const inf_ahead_list *list) {
    inf_ahead *next;
    for (inf_ahead *ahead = list->head; ahead != NULL; ahead = next) {
        next = ahead->next;
        if (ahead->chunk != NULL && ahead->taker == NULL) inf_ahead_drop(ex, ahead->chunk);
    }
}

void inf_ahead_drop_all(struct inf_executor *ex) {
    drop_list(ex, &ex->wanted);
    drop_list(ex, &ex->with_slot);
}
