/* The life of a job: from the chunk's FIFO through slot, read, compute and write to its ticket. All
 * [locked].
 *
 * Only this file decides the next state of a run. Drives, workers and copying threads append runs
 * whose work has ended to `ended`; inf_pump pops them here.
 */
#include "executor.h"

#include <assert.h>
#include <errno.h>
#include <stdlib.h>

/* ---- ends ------------------------------------------------------------------------------------ */

/* Updates the chunk's record at the job's end. [before the slot is released] */
static void chunk_settle(struct inf_executor *ex, inf_run *run) {
    inf_chunk_record *chunk = run->chunk;
    if (!run->faulted) {
        chunk->invalid &= ~inf_run_written(run); /* of an UPDATE only the given section */
        if (run->moves) inf_chunk_flip(chunk, run);
        inf_chunk_note_write(chunk, run);
        inf_chunk_renew(chunk, inf_run_written(run));
        return;
    }
    if (inf_run_keep_failed_write(ex, run) || run->job.kind == INF_JOB_REWRITE) return;
    if (run->job.kind == INF_JOB_FETCH || run->fault.kind == INF_FAULT_PLAN) return;
    /* Also after an update that did not begin: later jobs must not use the values before it. */
    chunk->invalid |= inf_run_written(run);
    chunk->fault = run->fault;
    /* A failed write of the other place has not changed the live one. */
    if (run->job.kind == INF_JOB_STORE && !run->moves) inf_chunk_note_write(chunk, run);
}

static void submission_end(struct inf_executor *ex, inf_submission *submission) {
    inf_ticket *ticket = submission->ticket;
    if (submission->previous != NULL) submission->previous->next = submission->next;
    if (submission->next != NULL) submission->next->previous = submission->previous;
    if (ex->live == submission) ex->live = submission->next;
    ex->stats.submissions_live--;
    if (submission->gate != NULL) {
        inf_gate_detach(ex, submission);
        inf_gate_drop_user(ex, submission->gate);
    }
    inf_device_unmark(ex, submission->mark);
    ticket->submission = NULL;
    __atomic_store_n(&ticket->words[0], ticket->words[2] ? 2u : 1u, __ATOMIC_RELEASE);
    if (ticket->released) free(ticket);
    free(submission->segs);
    free(submission->hypers);
    free(submission);
    pthread_cond_broadcast(&ex->done);
}

static void fifo_remove(struct inf_executor *ex, inf_run *run) {
    inf_chunk_record *chunk = run->chunk;
    inf_run *before = NULL;
    for (inf_run *at = chunk->fifo_head; at != run; at = at->fifo_next) before = at;
    *(before == NULL ? &chunk->fifo_head : &before->fifo_next) = run->fifo_next;
    if (run->fifo_next == NULL) chunk->fifo_tail = before;
    if (before == NULL && chunk->fifo_head != NULL) inf_run_consider(ex, chunk->fifo_head);
}

/* Decrements the submission's pending jobs. The run may be freed afterwards. */
static void run_leave(struct inf_executor *ex, inf_run *run) {
    inf_submission *submission = run->submission;
    run->state = INF_DONE;
    ex->stats.jobs_done++;
    if (run->faulted) {
        if (run->fault.kind == INF_FAULT_CANCELLED) ex->stats.jobs_cancelled++;
        else ex->stats.jobs_failed++;
        inf_submission_fail(ex, submission, &run->fault);
    }
    inf_run_filled(ex, run);
    ex->active--;
    ex->pending--;
    if (ex->active == 0) {
        ex->idle_since_ns = inf_now_ns();
        /* a worker waits for the gates' hold time */
        if (ex->gates != NULL) pthread_cond_signal(&ex->work);
    }
    if (--submission->pending == 0) submission_end(ex, submission);
    if (inf_idle(ex)) pthread_cond_broadcast(&ex->done);
}

/* After the successful write of an UPDATE, gives its slot to the chunk's next job if that is a
 * FETCH at an open gate that stays (a save's), which copies the new states without a read. */
static void hand_down(inf_run *run) {
    inf_run *next = run->fifo_next;
    if (run->job.kind != INF_JOB_UPDATE || run->faulted || run->slot.memory == NULL) return;
    if (inf_job_leaves(&run->job) != 0) return; /* its slot has only some sections */
    if (next == NULL || next->job.kind != INF_JOB_FETCH) return;
    const inf_gate *gate = next->submission->gate;
    if (gate == NULL || !gate->stays || gate->state != INF_GATE_OPEN) return;
    uint32_t unread = INF_MASK_MOVE_ONLY | inf_grad_mask(&run->chunk->plan);
    if (next->state != INF_WAITING || (next->job.mask & unread) != 0) return;
    next->slot = run->slot;
    next->slot.range_count[INF_OP_READ] = next->slot.range_count[INF_OP_WRITE] = 0;
    next->slot.written = 0;
    next->inherits = true;
    /* jobs of the update's priority may wait for this slot */
    if (next->priority > run->priority) next->priority = run->priority;
    run->slot.memory = NULL;
}

/* Ends a job that has a chunk. The run may be freed afterwards. */
static void run_finish(struct inf_executor *ex, inf_run *run) {
    if (run->rest != 0) inf_run_give_up_rest(ex, run);
    assert(run->chunk->fifo_head == run || run->fault.kind == INF_FAULT_CANCELLED);
    assert(run->state != INF_DONE && run->blocks_in_flight == 0);
    inf_prefetch_unhint(ex, run);
    /* An UPDATE that fails at its start (a marked drive, an earlier fault) leaves its read ahead
     * unused. */
    if (run->job.kind == INF_JOB_UPDATE && run->state == INF_STARTING)
        inf_prefetch_drop(ex, run->chunk);
    chunk_settle(ex, run);
    hand_down(run);
    inf_slot_release(ex, &run->slot);
    fifo_remove(ex, run);
    run_leave(ex, run);
}

/* ---- steps ----------------------------------------------------------------------------------- */

static void run_compute(struct inf_executor *ex, inf_run *run) {
    if (inf_device_brings(run)) inf_device_queue(ex, run, INF_FROM_DEVICE);
    else inf_run_queue_compute(ex, run);
}

/* Fails the run if its drive is dead. */
static void transfer(struct inf_executor *ex, inf_run *run, int32_t op) {
    const inf_range *range = &run->slot.ranges[op][0];
    int32_t dead = ex->drives[inf_run_drive(run, op)].dead;
    if (dead == 0) {
        inf_drive_queue_run(ex, run, op);
        return;
    }
    run->state = op == INF_OP_READ ? INF_READING : INF_WRITING;
    inf_run_fail(run, INF_FAULT_ERRNO, op, dead, range->file_at, range->bytes);
    run_finish(ex, run);
}

static void read_again(struct inf_executor *ex, inf_run *run) {
    run->reread = true;
    run->faulted = false;
    run->fault = (inf_fault){0};
    ex->stats.rereads++;
    transfer(ex, run, INF_OP_READ);
}

static void run_want_slot(struct inf_executor *ex, inf_run *run) {
    if (run->slot.bytes == 0) run_compute(ex, run);
    else inf_slot_wait(ex, run);
}

static void run_with_slot(struct inf_executor *ex, inf_run *run) {
    if (run->slot.range_count[INF_OP_READ] > 0) {
        transfer(ex, run, INF_OP_READ);
    } else if (run->job.kind == INF_JOB_STORE && (run->job.mask & INF_MASK_MOVE_ONLY)) {
        transfer(ex, run, INF_OP_WRITE);
    } else {
        run_compute(ex, run);
    }
}

/* After the pass and the copies to the targets have succeeded: starts the write, if any. */
static void run_settle(struct inf_executor *ex, inf_run *run) {
    inf_run_filled(ex, run);
    if (run->slot.range_count[INF_OP_WRITE] == 0) {
        run_finish(ex, run);
    } else if (ex->cancelled) {
        inf_run_fail(run, INF_FAULT_CLOSED, -1, 0, 0, 0);
        run_finish(ex, run);
    } else {
        transfer(ex, run, INF_OP_WRITE);
    }
}

static void run_start(struct inf_executor *ex, inf_run *run) {
    const inf_submission *submission = run->submission;
    if (ex->cancelled) inf_run_fail(run, INF_FAULT_CLOSED, -1, 0, 0, 0);
    if (run->faulted) {
        run_finish(ex, run);
        return;
    }
    if (run->job.kind == INF_JOB_REWRITE) {
        if (run->chunk->failed_write_mask == 0) {
            run_finish(ex, run);
            return;
        }
        inf_prefetch_written(ex, run->chunk, run->chunk->failed_write_mask);
        inf_run_take_failed_write(ex, run);
        transfer(ex, run, INF_OP_WRITE);
        return;
    }
    if (submission->escaped) {
        if (run->job.kind == INF_JOB_FETCH) {
            run_finish(ex, run);
            return;
        }
        if (run->job.kind == INF_JOB_UPDATE) run->job.ptr[0] = 0;
    } else if (submission->gate != NULL && run->job.base >= 0) {
        uint32_t placed = run->job.kind == INF_JOB_FETCH ? run->job.mask : 1u;
        for (int32_t s = 0; s < INF_SECTION_MAX; s++) {
            if (placed >> s & 1u) run->job.ptr[s] += submission->gate->bases[run->job.base];
        }
    }
    run->moves = inf_run_moves(run);
    if (run->moves && run->job.kind == INF_JOB_STORE)
        run->reads = inf_run_written(run) & ~run->job.mask;
    inf_run_make_whole(run, run->moves);
    /* Before `zeros` is set: a section whose first write has failed is invalid, not zero. */
    if ((run->chunk->invalid & run->reads) != 0) {
        run->fault = run->chunk->fault;
        run->fault.earlier = INF_EARLIER_JOB;
        run->faulted = true;
        run_finish(ex, run);
        return;
    }
    run->zeros = run->reads & run->chunk->plan.zeros;
    run->reads &= ~run->zeros;
    if (inf_run_refused(ex, run)) {
        run_finish(ex, run);
        return;
    }
    /* Except gradients, which an update of resident states reads in place. */
    assert(run->job.kind == INF_JOB_FETCH ||
           (run->chunk->failed_write_mask & inf_run_used(run) &
            ~inf_grad_mask(&run->chunk->plan)) == 0);
    if (run->inherits) {
        run_compute(ex, run);
        return;
    }
    inf_run_plan_slot(run);
    inf_prefetch_state ahead = INF_PREFETCH_WANTED;
    if (run->job.kind == INF_JOB_UPDATE) ahead = inf_prefetch_take(ex, run);
    if (ahead == INF_PREFETCH_HELD) run_with_slot(ex, run);
    if (ahead != INF_PREFETCH_WANTED) return;
    inf_prefetch_written(ex, run->chunk, inf_run_written(run));
    run_want_slot(ex, run);
}

/* ---- after the end of a unit of work --------------------------------------------------------- */

static bool fetch_computes(const struct inf_executor *ex, const inf_run *run) {
    if (run->job.mask & INF_MASK_MOVE_ONLY) return false;
    if (ex->config.verify && run->chunk->plan.sums_ptr != 0) return true;
    for (int32_t s = 0; s < run->chunk->plan.section_count; s++) {
        if ((run->job.mask >> s & 1u) && run->job.ptr[s] != 0) return true;
    }
    return false;
}

static int64_t run_bytes(const inf_run *run, int32_t op) {
    int64_t bytes = 0;
    for (int32_t r = 0; r < run->slot.range_count[op]; r++) bytes += run->slot.ranges[op][r].bytes;
    return bytes;
}

/* A failed read is repeated once, since a drive may have been reset, or may read another copy. */
static bool may_read_again(const struct inf_executor *ex, const inf_run *run) {
    bool drive = run->fault.kind == INF_FAULT_ERRNO || run->fault.kind == INF_FAULT_SHORT;
    return drive && !run->reread && !ex->cancelled &&
           ex->drives[run->chunk->plan.drive].dead == 0;
}

/* After the last block of a read or a write has completed. */
static void run_moved(struct inf_executor *ex, inf_run *run) {
    bool reading = run->state == INF_READING;
    assert(run->blocks_in_flight == 0 && (reading || run->state == INF_WRITING));
    if (ex->spans_on) {
        int32_t op = reading ? INF_OP_READ : INF_OP_WRITE;
        inf_span_add(ex, run, reading ? INF_TRACK_READ : INF_TRACK_WRITE, run->start_ns,
                     run_bytes(run, op));
    }
    if (run->job.kind == INF_JOB_PREFETCH) {
        inf_run *taker = inf_prefetch_moved(ex, run);
        if (taker == NULL) return;
        if (taker->faulted) run_finish(ex, taker);
        else if (taker->slot.memory != NULL) run_with_slot(ex, taker);
        else run_want_slot(ex, taker);
        return;
    }
    if (!reading && run->faulted && inf_run_move_failed_write(ex, run)) return;
    if (reading && run->faulted && may_read_again(ex, run)) {
        read_again(ex, run);
        return;
    }
    bool refused = reading && !run->faulted && run->rest == 0 && inf_run_refused(ex, run);
    if (run->faulted || !reading || refused) {
        run_finish(ex, run);
    } else if (run->job.kind == INF_JOB_FETCH && !fetch_computes(ex, run)) {
        run_finish(ex, run);
    } else {
        run_compute(ex, run);
    }
}

static void checksum_failed(struct inf_executor *ex, inf_run *run, int64_t bad) {
    const inf_chunk *chunk = &run->chunk->plan;
    int64_t pieces = inf_piece_count(chunk);
    int32_t section = (int32_t)(bad / pieces);
    int64_t first = bad % pieces * chunk->piece_numel;
    /* A folded checksum does not identify the bad piece. */
    int64_t covered = run->job.mask & INF_MASK_FOLDED ? chunk->numel : chunk->piece_numel;
    int64_t numel = chunk->numel - first < covered ? chunk->numel - first : covered;
    bool older = inf_section_older(chunk, section);
    int64_t at = chunk->section_at[section] < 0 ? 0 : inf_section_file_at(chunk, section, older);
    ex->stats.checksum_failures++;
    inf_run_fail(run, INF_FAULT_CHECKSUM, INF_OP_READ, 0,
                 at + inf_section_span(chunk, section, first),
                 inf_section_span(chunk, section, numel));
    run->fault.section = section;
    run->fault.piece = (int32_t)(bad % pieces);
}

static uint32_t sections_in(const inf_slot *slot) {
    uint32_t mask = 0;
    for (int32_t s = 0; s < INF_SECTION_MAX; s++) mask |= (uint32_t)(slot->section_at[s] >= 0) << s;
    return mask;
}

static void run_computed(struct inf_executor *ex, inf_run *run) {
    int64_t bad = run->bad;
    if (run->rest != 0) {
        if (bad != INF_OK && !run->reread && !ex->cancelled) read_again(ex, run);
        else if (!inf_run_rest_loaded(ex, run, bad)) run_finish(ex, run);
        return;
    }
    if (bad == INF_OK) {
        if (run->job.kind == INF_JOB_UPDATE) ex->stats.updates++;
        if (inf_device_takes(run)) inf_device_queue(ex, run, INF_TO_DEVICE);
        else run_settle(ex, run);
        return;
    }
    if (bad >= 0 && !run->reread && (run->reads & sections_in(&run->slot)) != 0 && !ex->cancelled) {
        /* A second read repairs a wrong transfer, but not wrong data on the drive. It reads all
         * sections: the pass may have changed verified ones, and a read ahead has read some. */
        run->copied_in = false;
        inf_run_plan_slot(run);
        read_again(ex, run);
        return;
    }
    if (bad >= 0) {
        checksum_failed(ex, run, bad);
    } else {
        inf_run_fail(run, INF_FAULT_PLAN, -1, EINVAL, 0, 0);
    }
    run_finish(ex, run);
}

/* After a copy to or from the device has ended. A COPY has no chunk: neither FIFO nor slot. */
static void run_copied(struct inf_executor *ex, inf_run *run) {
    if (run->job.kind == INF_JOB_COPY) {
        run_leave(ex, run);
    } else if (run->faulted) {
        run_finish(ex, run);
    } else if (run->direction == INF_TO_DEVICE) {
        run_settle(ex, run);
    } else {
        run->copied_in = true;
        run_compute(ex, run);
    }
}

/* Decides the next state of a run whose work has ended. */
static void run_ended(struct inf_executor *ex, inf_run *run) {
    switch (run->state) {
    case INF_READING:
    case INF_WRITING: run_moved(ex, run); break;
    case INF_COMPUTING: run_computed(ex, run); break;
    case INF_COPYING: run_copied(ex, run); break;
    default: run_finish(ex, run); /* cancelled before the run began */
    }
}

/* ---- the pump -------------------------------------------------------------------------------- */

/* Fails a run that can get no slot: failed writes keep all slots, a broken ring may still write to
 * them, or the executor ends. */
static void no_slot(struct inf_executor *ex, inf_run *run) {
    if (ex->cancelled || !ex->faulted) {
        inf_run_fail(run, ex->cancelled ? INF_FAULT_CLOSED : INF_FAULT_ERRNO, -1,
                     ex->cancelled ? 0 : EIO, 0, 0);
    } else {
        run->faulted = true;
        run->fault = ex->fault;
        run->fault.earlier = INF_EARLIER_MARK;
    }
    run_finish(ex, run);
}

static void pool_dispatch(struct inf_executor *ex, int32_t index) {
    inf_pool *pool = &ex->pools[index];
    inf_run *run;
    do {
        while (!ex->cancelled && (run = inf_slot_next(ex, pool)) != NULL)
            run_with_slot(ex, run);
    } while (!ex->cancelled && pool->waiting_count > 0 && inf_prefetch_yield(ex, index));
    if (!ex->cancelled && pool->count > 0) return;
    while ((run = inf_slot_waiting(pool, ex->config.drive_count)) != NULL) no_slot(ex, run);
}

/* Until a gate is opened, gates escape one after another while slots and workers are free. */
static bool gates_may_flow(const struct inf_executor *ex) {
    return ex->escaping && !ex->gates_held && ex->gates != NULL &&
           ex->pools[0].waiting_count + ex->pools[1].waiting_count == 0 && ex->compute_count < 8;
}

void inf_pump(struct inf_executor *ex) {
    inf_run *run;
    while ((run = inf_queue_pop(&ex->ended)) != NULL) run_ended(ex, run);
    for (;;) {
        while ((run = inf_queue_pop(&ex->starting)) != NULL) run_start(ex, run);
        /* Large slots first: a run that waits for one may hold a small one, and then release or
         * keep it. */
        pool_dispatch(ex, 1);
        pool_dispatch(ex, 0);
        if (ex->starting.head != NULL) continue;
        if (!gates_may_flow(ex) || !inf_gate_escape_oldest(ex)) break;
    }
    inf_prefetch_begin(ex);
    assert(ex->ended.head == NULL); /* no decision above appends to it */
}
