/* The life of a job: from the chunk's FIFO through slot, read, compute and write to its ticket. All
 * [locked]. */
#include "executor.h"

#include <assert.h>
#include <errno.h>
#include <stdlib.h>

/* Sections that the job has in its slot, unless they are resident. */
static uint32_t sections_used(const inf_run *run) {
    uint32_t all = inf_sections_all(&run->chunk->plan);
    if (run->job.kind == INF_JOB_UPDATE) return all;
    return (run->job.mask & all) | inf_run_written(run); /* none of a REWRITE */
}

uint32_t inf_run_written(const inf_run *run) {
    uint32_t all = inf_sections_all(&run->chunk->plan);
    uint32_t states = all & ~inf_grad_mask(&run->chunk->plan);
    if (run->job.kind == INF_JOB_UPDATE) return states;
    if (run->job.kind != INF_JOB_STORE) return 0;
    return (run->job.mask & all) | (run->moves ? states : 0); /* a new version is whole */
}

static void range_add(inf_slot *slot, int32_t op, inf_range range) {
    inf_range *last =
        slot->range_count[op] > 0 ? &slot->ranges[op][slot->range_count[op] - 1] : NULL;
    bool follows = last != NULL && last->file == range.file &&
                   last->file_at + last->bytes == range.file_at &&
                   last->slot_at + last->bytes == range.slot_at;
    if (follows) last->bytes += range.bytes;
    else slot->ranges[op][slot->range_count[op]++] = range;
}

static inf_range range_of(const inf_chunk *chunk, int32_t s, bool other, int64_t slot_at) {
    return (inf_range){.file_at = inf_section_file_at(chunk, s, other),
                       .slot_at = slot_at,
                       .bytes = inf_align_up(inf_section_bytes(chunk, s)),
                       .file = inf_section_file(chunk, s, other)};
}

/* Lays `used` out in the slot, in the order of sections. What is read and what is written of it are
 * ranges of their own; in each of the two, sections that lie together in the file and in the slot
 * are one. */
void inf_slot_plan(inf_slot *slot, const inf_chunk *chunk, uint32_t used, uint32_t reads,
                   uint32_t written, bool moves) {
    slot->range_count[INF_OP_READ] = slot->range_count[INF_OP_WRITE] = 0;
    slot->bytes = 0;
    slot->written = 0;
    for (int32_t s = 0; s < INF_SECTION_MAX; s++) {
        slot->section_at[s] = -1;
        if (s >= chunk->section_count || !(used >> s & 1u) || inf_section_resident(chunk, s))
            continue;
        slot->section_at[s] = slot->bytes;
        if (reads >> s & 1u) range_add(slot, INF_OP_READ, range_of(chunk, s, false, slot->bytes));
        if (written >> s & 1u)
            range_add(slot, INF_OP_WRITE, range_of(chunk, s, moves, slot->bytes));
        slot->written |= written & 1u << s;
        slot->bytes += inf_align_up(inf_section_bytes(chunk, s));
    }
}

void inf_slot_plan_writes(inf_slot *slot, const inf_chunk *chunk, uint32_t written, bool other) {
    slot->range_count[INF_OP_WRITE] = 0;
    slot->written = written;
    for (int32_t s = 0; s < chunk->section_count; s++) {
        if (written >> s & 1u)
            range_add(slot, INF_OP_WRITE, range_of(chunk, s, other, slot->section_at[s]));
    }
}

void inf_slot_plan_reads(inf_slot *slot, const inf_chunk *chunk, uint32_t reads) {
    slot->range_count[INF_OP_READ] = 0;
    for (int32_t s = 0; s < chunk->section_count; s++) {
        if (reads >> s & 1u)
            range_add(slot, INF_OP_READ, range_of(chunk, s, false, slot->section_at[s]));
    }
}

int32_t inf_run_drive(const inf_run *run, int32_t op) {
    const inf_chunk *chunk = &run->chunk->plan;
    return op == INF_OP_WRITE && run->moves ? chunk->other_drive : chunk->drive;
}

/* What the chunk keeps in memory is not read from the drive. */
static void plan_slot(inf_run *run) {
    inf_slot_plan(&run->slot, &run->chunk->plan,
                  sections_used(run) & ~run->chunk->failed_write_mask, run->reads,
                  inf_run_written(run), run->moves);
}

void inf_run_fail(inf_run *run, int32_t kind, int32_t op, int32_t error, int64_t offset,
                  int64_t length) {
    if (run->faulted) return; /* the first fault is the cause, later ones its consequences */
    run->faulted = true;
    run->fault = (inf_fault){.kind = kind,
                             .op = op,
                             .drive = inf_run_drive(run, op),
                             .error = error,
                             .offset = offset,
                             .length = length,
                             .key = run->chunk->plan.key,
                             .chunk = run->chunk->id,
                             .section = -1,
                             .piece = -1};
}

void inf_run_consider(struct inf_executor *ex, inf_run *run) {
    const inf_submission *submission = run->submission;
    if (run->state != INF_WAITING || run->chunk->fifo_head != run) return;
    if (submission->gate != NULL && submission->gate->state == INF_GATE_CLOSED &&
        !submission->escaped) {
        if (run->job.kind == INF_JOB_UPDATE) inf_prefetch_hint(ex, run);
        return;
    }
    inf_prefetch_unhint(ex, run);
    run->state = INF_STARTING;
    ex->active++;
    inf_queue_push(&ex->starting, run);
}

static void run_start(struct inf_executor *ex, inf_run *run) {
    const inf_submission *submission = run->submission;
    if (ex->cancelled) inf_run_fail(run, INF_FAULT_CLOSED, -1, 0, 0, 0);
    if (run->faulted) {
        inf_run_finish(ex, run);
        return;
    }
    if (run->job.kind == INF_JOB_REWRITE) {
        if (run->chunk->failed_write_mask == 0) {
            inf_run_finish(ex, run);
            return;
        }
        inf_prefetch_written(ex, run->chunk, run->chunk->failed_write_mask);
        inf_run_take_failed_write(ex, run);
        run->state = INF_WRITING;
        inf_drive_queue_run(ex, run, INF_OP_WRITE);
        return;
    }
    if (submission->escaped) {
        if (run->job.kind == INF_JOB_FETCH) {
            inf_run_finish(ex, run);
            return;
        }
        if (run->job.kind == INF_JOB_UPDATE) run->job.ptr[0] = 0;
    } else if (submission->gate != NULL && run->job.base >= 0) {
        run->job.ptr[0] += submission->gate->bases[run->job.base];
    }
    run->moves = inf_run_moves(run);
    if (run->moves && run->job.kind == INF_JOB_STORE)
        run->reads = inf_run_written(run) & ~run->job.mask;
    /* First: zeros that were to be written and were not are no contents. */
    if ((run->chunk->invalid & run->reads) != 0) {
        run->fault = run->chunk->fault;
        run->fault.earlier = INF_EARLIER_JOB;
        run->faulted = true;
        inf_run_finish(ex, run);
        return;
    }
    run->zeros = run->reads & run->chunk->plan.zeros;
    run->reads &= ~run->zeros;
    if (inf_run_refused(ex, run)) {
        inf_run_finish(ex, run);
        return;
    }
    /* But gradients, which an update of resident states reads where they are. */
    assert(run->job.kind == INF_JOB_FETCH ||
           (run->chunk->failed_write_mask & sections_used(run) &
            ~inf_grad_mask(&run->chunk->plan)) == 0);
    plan_slot(run);
    if (run->job.kind == INF_JOB_UPDATE && inf_prefetch_take(ex, run)) return;
    inf_prefetch_written(ex, run->chunk, inf_run_written(run));
    inf_run_want_slot(ex, run);
}

void inf_run_want_slot(struct inf_executor *ex, inf_run *run) {
    if (run->slot.bytes == 0) inf_run_queue_compute(ex, run);
    else inf_slot_wait(ex, run);
}

void inf_run_with_slot(struct inf_executor *ex, inf_run *run) {
    if (run->slot.range_count[INF_OP_READ] > 0) {
        run->state = INF_READING;
        inf_drive_queue_run(ex, run, INF_OP_READ);
    } else if (run->job.kind == INF_JOB_STORE && (run->job.mask & INF_MASK_MOVE_ONLY)) {
        run->state = INF_WRITING;
        inf_drive_queue_run(ex, run, INF_OP_WRITE);
    } else {
        inf_run_queue_compute(ex, run);
    }
}

/* Every slot is kept by a chunk whose write failed, or lost to a ring that broke; or the executor
 * ends. */
static void no_slot(struct inf_executor *ex, inf_run *run) {
    if (ex->cancelled || !ex->faulted) {
        inf_run_fail(run, ex->cancelled ? INF_FAULT_CLOSED : INF_FAULT_ERRNO, -1,
                     ex->cancelled ? 0 : EIO, 0, 0);
    } else {
        run->faulted = true;
        run->fault = ex->fault;
        run->fault.earlier = INF_EARLIER_MARK;
    }
    inf_run_finish(ex, run);
}

static void pool_dispatch(struct inf_executor *ex, int32_t index) {
    inf_pool *pool = &ex->pools[index];
    inf_run *run;
    do {
        while (!ex->cancelled && (run = inf_slot_next(ex, pool)) != NULL)
            inf_run_with_slot(ex, run);
    } while (!ex->cancelled && pool->waiting_count > 0 && inf_prefetch_yield(ex, index));
    if (!ex->cancelled && pool->count > 0) return;
    while ((run = inf_slot_waiting(pool, ex->config.drive_count)) != NULL) no_slot(ex, run);
}

/* While no gate is opened they follow each other without a pause, as long as slots and workers are
 * free. */
static bool gates_may_flow(const struct inf_executor *ex) {
    return ex->escaping && !ex->gates_held && ex->gates != NULL &&
           ex->pools[0].waiting_count + ex->pools[1].waiting_count == 0 && ex->compute_count < 8;
}

void inf_pump(struct inf_executor *ex) {
    for (;;) {
        inf_run *run;
        while ((run = inf_queue_pop(&ex->starting)) != NULL) run_start(ex, run);
        /* Large ones first: whoever waits there may hold a small one, and give it back or keep it
         * for good. */
        pool_dispatch(ex, 1);
        pool_dispatch(ex, 0);
        if (ex->starting.head != NULL) continue;
        if (!gates_may_flow(ex) || !inf_gate_escape_oldest(ex)) break;
    }
    inf_prefetch_begin(ex);
}

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

/* A read that failed is repeated once: drives answer again after a reset, or from another copy. */
static bool read_again(struct inf_executor *ex, inf_run *run) {
    bool drive = run->fault.kind == INF_FAULT_ERRNO || run->fault.kind == INF_FAULT_SHORT;
    if (!drive || run->reread || ex->cancelled || ex->drives[run->chunk->plan.drive].dead != 0)
        return false;
    run->reread = true;
    run->faulted = false;
    run->fault = (inf_fault){0};
    ex->stats.rereads++;
    inf_drive_queue_run(ex, run, INF_OP_READ);
    return true;
}

void inf_run_moved(struct inf_executor *ex, inf_run *run) {
    bool reading = run->state == INF_READING;
    assert(run->blocks_in_flight == 0 && (reading || run->state == INF_WRITING));
    if (ex->spans_on) {
        int32_t op = reading ? INF_OP_READ : INF_OP_WRITE;
        inf_span_add(ex, run, reading ? INF_TRACK_READ : INF_TRACK_WRITE, run->start_ns,
                     run_bytes(run, op));
    }
    if (run->job.kind == INF_JOB_PREFETCH) {
        inf_prefetch_moved(ex, run);
        return;
    }
    if (!reading && run->faulted && inf_run_move_failed_write(ex, run)) return;
    if (reading && run->faulted && read_again(ex, run)) return;
    bool refused = reading && !run->faulted && run->rest == 0 && inf_run_refused(ex, run);
    if (run->faulted || !reading || refused) {
        inf_run_finish(ex, run);
    } else if (run->job.kind == INF_JOB_FETCH && !fetch_computes(ex, run)) {
        inf_run_finish(ex, run);
    } else {
        inf_run_queue_compute(ex, run);
    }
}

/* Targets hold their data and sources are free again; tells the ticket when all of its jobs are so
 * far. */
void inf_run_filled(struct inf_executor *ex, inf_run *run) {
    inf_submission *submission = run->submission;
    if (run->filled) return;
    run->filled = true;
    if (--submission->unfilled > 0) return;
    __atomic_store_n(&submission->ticket->words[1], 1u, __ATOMIC_RELEASE);
    pthread_cond_broadcast(&ex->done);
}

static void checksum_failed(struct inf_executor *ex, inf_run *run, int64_t bad) {
    const inf_chunk *chunk = &run->chunk->plan;
    int64_t pieces = inf_piece_count(chunk);
    int32_t section = (int32_t)(bad / pieces);
    int64_t first = bad % pieces * chunk->piece_numel;
    /* One checksum for all pieces does not say which of them is wrong. */
    int64_t covered = run->job.mask & INF_MASK_FOLDED ? chunk->numel : chunk->piece_numel;
    int64_t numel = chunk->numel - first < covered ? chunk->numel - first : covered;
    int64_t at = chunk->section_at[section] < 0 ? 0 : inf_section_file_at(chunk, section, false);
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

void inf_run_settle(struct inf_executor *ex, inf_run *run) {
    inf_run_filled(ex, run);
    if (run->slot.range_count[INF_OP_WRITE] == 0) {
        inf_run_finish(ex, run);
    } else if (ex->cancelled) {
        inf_run_fail(run, INF_FAULT_CLOSED, -1, 0, 0, 0);
        inf_run_finish(ex, run);
    } else {
        run->state = INF_WRITING;
        inf_drive_queue_run(ex, run, INF_OP_WRITE);
    }
}

void inf_run_computed(struct inf_executor *ex, inf_run *run, int64_t bad) {
    if (run->rest != 0) {
        inf_run_rest_loaded(ex, run, bad);
        return;
    }
    if (bad == INF_OK) {
        if (run->job.kind == INF_JOB_UPDATE) ex->stats.updates++;
        if (inf_device_takes(run)) inf_device_queue(ex, run, INF_TO_DEVICE);
        else inf_run_settle(ex, run);
        return;
    }
    if (bad >= 0 && !run->reread && (run->reads & sections_in(&run->slot)) != 0 && !ex->cancelled) {
        /* A transfer gone wrong is mended by another one; what lies wrong on the drive is not. All
         * of it: the pass may have spoilt what it had verified, and part of the slot may have been
         * read ahead. */
        run->reread = true;
        run->copied_in = false;
        ex->stats.rereads++;
        plan_slot(run);
        run->state = INF_READING;
        inf_drive_queue_run(ex, run, INF_OP_READ);
        return;
    }
    if (bad >= 0) {
        checksum_failed(ex, run, bad);
    } else {
        inf_run_fail(run, INF_FAULT_PLAN, -1, EINVAL, 0, 0);
    }
    inf_run_finish(ex, run);
}

/* What the job's end means for its chunk. [before the slot is released] */
static void chunk_settle(struct inf_executor *ex, inf_run *run) {
    inf_chunk_record *chunk = run->chunk;
    if (!run->faulted) {
        chunk->invalid &= ~inf_run_written(run); /* of an UPDATE only what it was given */
        if (run->moves) inf_chunk_flip(chunk);
        inf_chunk_note_write(chunk, run);
        inf_chunk_nonzero(chunk, inf_run_written(run));
        return;
    }
    if (inf_run_keep_failed_write(ex, run) || run->job.kind == INF_JOB_REWRITE) return;
    if (run->job.kind == INF_JOB_FETCH || run->fault.kind == INF_FAULT_PLAN) return;
    /* Also after an update that did not begin: no job may take the values before it for those after
     * it. */
    chunk->invalid |= inf_run_written(run);
    chunk->fault = run->fault;
    /* One that would have written the other place has changed nothing that counts. */
    if (run->job.kind == INF_JOB_STORE && !run->moves) inf_chunk_note_write(chunk, run);
}

void inf_submission_fail(struct inf_executor *ex, inf_submission *submission,
                         const inf_fault *fault) {
    bool given_up = fault->kind == INF_FAULT_CLOSED || fault->kind == INF_FAULT_CANCELLED;
    if (!ex->faulted && !given_up) {
        ex->faulted = true;
        ex->fault = *fault;
    }
    if (submission->ticket->words[2]) return;
    submission->ticket->fault = *fault;
    __atomic_store_n(&submission->ticket->words[2], 1u, __ATOMIC_RELEASE);
    /* Behind the ticket's word: who sees the alarm finds the ticket that failed. */
    if (ex->alarm != NULL) __atomic_store_n(ex->alarm, 1u, __ATOMIC_RELEASE);
}

void inf_submission_end(struct inf_executor *ex, inf_submission *submission) {
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

/* Ends a job. Its memory may be gone afterwards: callers must not touch `run` again. */
void inf_run_finish(struct inf_executor *ex, inf_run *run) {
    inf_submission *submission = run->submission;
    if (run->rest != 0) inf_run_give_up_rest(ex, run);
    assert(run->chunk->fifo_head == run || run->fault.kind == INF_FAULT_CANCELLED);
    assert(run->state != INF_DONE && run->blocks_in_flight == 0);
    inf_prefetch_unhint(ex, run);
    /* An UPDATE that ends before it takes what was read for it: a mark, or an earlier fault. */
    if (run->job.kind == INF_JOB_UPDATE && run->state == INF_STARTING)
        inf_prefetch_drop(ex, run->chunk);
    chunk_settle(ex, run);
    run->state = INF_DONE;
    inf_slot_release(ex, &run->slot);
    fifo_remove(ex, run);
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
        /* a worker keeps the time of gates */
        if (ex->gates != NULL) pthread_cond_signal(&ex->work);
    }
    if (--submission->pending == 0) inf_submission_end(ex, submission);
    if (inf_idle(ex)) pthread_cond_broadcast(&ex->done);
}
