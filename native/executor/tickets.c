/* The interface of gates and tickets, which hold submissions back, wait for, promote and cancel
 * them. */
#include "executor.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

/* ---- gates ----------------------------------------------------------------------------------- */

inf_gate *inf_gate_new(inf_executor *ex, int32_t stays) {
    inf_gate *gate = calloc(1, sizeof *gate);
    if (gate == NULL) return NULL;
    gate->base_max = -1;
    gate->users = 1;
    gate->stays = stays != 0;
    pthread_mutex_lock(&ex->lock);
    ex->holds++;
    if (ex->shut) gate->state = INF_GATE_ESCAPED;
    pthread_mutex_unlock(&ex->lock);
    return gate;
}

int32_t inf_gate_open(inf_executor *ex, inf_gate *gate, const uint64_t *bases, int32_t count) {
    uint64_t *copy = malloc((size_t)(count > 0 ? count : 1) * sizeof *copy);
    if (copy == NULL) return -ENOMEM;
    if (count > 0) memcpy(copy, bases, (size_t)count * sizeof *copy);
    int32_t result = 1;
    inf_mark *mark = NULL;
    if (ex->device.attached) {
        mark = inf_device_mark(ex, &result);
        if (mark == NULL) {
            free(copy);
            return result == -ENOMEM ? result : -EREMOTEIO;
        }
        result = 1;
    }
    pthread_mutex_lock(&ex->lock);
    ex->escaping = false;
    if (gate->state == INF_GATE_ESCAPED) {
        result = 0;
    } else if (gate->state == INF_GATE_OPEN) {
        result = -EALREADY;
    } else if (gate->base_max >= count) {
        result = -ERANGE;
    } else {
        gate->bases = copy;
        gate->mark = mark;
        mark = NULL;
        gate->base_count = count;
        copy = NULL;
        ex->stats.gates_opened++;
        inf_gate_let_go(ex, gate, INF_GATE_OPEN);
        inf_pump(ex);
    }
    inf_device_unmark(ex, mark);
    pthread_mutex_unlock(&ex->lock);
    free(copy);
    return result;
}

int32_t inf_gate_escaped(inf_executor *ex, const inf_gate *gate) {
    pthread_mutex_lock(&ex->lock);
    int32_t escaped = gate->state == INF_GATE_ESCAPED;
    pthread_mutex_unlock(&ex->lock);
    return escaped;
}

/* A closed gate escapes, since its owner can no longer open it. */
void inf_gate_release(inf_executor *ex, inf_gate *gate) {
    pthread_mutex_lock(&ex->lock);
    if (gate->state == INF_GATE_CLOSED && gate->first != NULL) {
        inf_gate_let_go(ex, gate, INF_GATE_ESCAPED);
        inf_pump(ex);
    }
    inf_gate_drop_user(ex, gate);
    inf_executor_let_go(ex);
}

void inf_executor_hold_gates(inf_executor *ex, int32_t held) {
    pthread_mutex_lock(&ex->lock);
    ex->gates_held = held != 0;
    ex->idle_since_ns = inf_now_ns();
    pthread_cond_broadcast(&ex->work);
    inf_pump(ex);
    pthread_mutex_unlock(&ex->lock);
}

void inf_executor_release_gates(inf_executor *ex) {
    pthread_mutex_lock(&ex->lock);
    inf_gates_escape(ex, UINT64_MAX);
    inf_pump(ex);
    pthread_mutex_unlock(&ex->lock);
}

/* ---- tickets --------------------------------------------------------------------------------- */

const uint32_t *inf_ticket_words(const inf_ticket *ticket) { return ticket->words; }

static bool word_set(const inf_ticket *ticket, int32_t word) {
    return __atomic_load_n(&ticket->words[word], __ATOMIC_ACQUIRE) != 0;
}

int32_t inf_ticket_set(const inf_ticket *ticket, int32_t word) { return word_set(ticket, word); }

int32_t inf_ticket_follows_update(inf_executor *ex, const inf_ticket *ticket) {
    bool follows = false;
    pthread_mutex_lock(&ex->lock);
    const inf_submission *submission = ticket->submission;
    for (int32_t j = 0; submission != NULL && j < submission->job_count; j++) {
        const inf_run *first = submission->runs[j].chunk->fifo_head;
        bool waits = submission->runs[j].state == INF_WAITING && first != &submission->runs[j];
        follows |= waits && first->job.kind == INF_JOB_UPDATE && first->state < INF_COMPUTING;
    }
    pthread_mutex_unlock(&ex->lock);
    return follows;
}

/* Moves a waiting job to the queue of demands. Of a partly issued job only the remaining blocks
 * move. [locked] */
static void run_promote(struct inf_executor *ex, inf_run *run) {
    int32_t priority = run->priority;
    inf_queue *from = NULL;
    inf_queue *to = NULL;
    if (priority == 0 || run->state == INF_DONE) return;
    if (run->prefetch != NULL) inf_prefetch_promote(ex, run->prefetch, 0);
    if (inf_slot_unwait(ex, run)) {
        run->priority = 0;
        inf_slot_wait(ex, run);
        return;
    }
    if (run->state == INF_COMPUTING) {
        from = &ex->compute[priority];
        to = &ex->compute[0];
    } else if (run->state == INF_COPYING) {
        from = &ex->device.copies[run->direction].queue[priority];
        to = &ex->device.copies[run->direction].queue[0];
    } else if (run->state == INF_READING || run->state == INF_WRITING) {
        int32_t op = run->state == INF_READING ? INF_OP_READ : INF_OP_WRITE;
        inf_drive_queue *queue = &ex->drives[inf_run_drive(run, op)].queue;
        from = &queue->jobs[op][priority];
        to = &queue->jobs[op][0];
    }
    bool queued = from != NULL && inf_queue_remove(from, run);
    run->priority = 0; /* also if it is in no queue: for its next states */
    if (queued) inf_queue_push(to, run);
}

static void promote(struct inf_executor *ex, inf_submission *submission) {
    for (int32_t j = 0; j < submission->job_count; j++) {
        inf_run *run = &submission->runs[j];
        if (run->state == INF_DONE) continue;
        inf_run *before = run->chunk->fifo_head;
        while (before != NULL && before != run) {
            run_promote(ex, before);
            before = before->fifo_next;
        }
        run_promote(ex, run);
    }
}

int32_t inf_ticket_wait(inf_executor *ex, inf_ticket *ticket, int32_t word, int64_t timeout_ns,
                        int32_t escape) {
    if (word_set(ticket, word)) return 1;
    int64_t start_ns = inf_now_ns();
    struct timespec deadline;
    inf_deadline(&deadline, start_ns + timeout_ns);
    pthread_mutex_lock(&ex->lock);
    if (ticket->submission != NULL) ticket->submission->awaited = true;
    if (escape && ticket->submission != NULL) {
        inf_gates_escape_for(ex, ticket->submission);
        promote(ex, ticket->submission);
        inf_pump(ex);
    }
    while (!word_set(ticket, word)) {
        if (pthread_cond_timedwait(&ex->done, &ex->lock, &deadline) == ETIMEDOUT) break;
    }
    int32_t set = word_set(ticket, word);
    ex->stats.wait_ns += (uint64_t)(inf_now_ns() - start_ns);
    pthread_mutex_unlock(&ex->lock);
    return set;
}

/* Ends a fetch that no drive has begun. */
static void run_cancel(struct inf_executor *ex, inf_run *run) {
    if (run->faulted || run->reread) return;
    if (run->state == INF_WAITING) {
        ex->active++; /* as if it had started, since its end decrements it */
    } else if (!inf_slot_unwait(ex, run)) {
        bool unsent = run->state == INF_READING && run->cursor == 0 && run->position == 0;
        if (!unsent || !inf_drive_unqueue(&ex->drives[run->chunk->plan.drive], run, INF_OP_READ))
            return;
    }
    inf_run_fail(run, INF_FAULT_CANCELLED, -1, 0, 0, 0);
    run->state = INF_STARTING; /* so that the end of the previous job does not start it */
    inf_queue_push(&ex->ended, run);
}

/* A ticket has one fault. A submission of updates and fetches (frozen parameters of the same unit)
 * is not cancelled: its ticket would report a failed update, or hide one. */
static bool only_fetches(const inf_submission *submission) {
    for (int32_t j = 0; j < submission->job_count; j++)
        if (submission->runs[j].job.kind != INF_JOB_FETCH) return false;
    return true;
}

void inf_ticket_cancel(inf_executor *ex, inf_ticket *ticket) {
    pthread_mutex_lock(&ex->lock);
    inf_submission *submission = ticket->submission;
    if (submission != NULL && only_fetches(submission)) {
        for (int32_t j = 0; j < submission->job_count; j++) run_cancel(ex, &submission->runs[j]);
        inf_pump(ex);
    }
    pthread_mutex_unlock(&ex->lock);
}

int32_t inf_ticket_fault(inf_executor *ex, const inf_ticket *ticket, inf_fault *fault) {
    pthread_mutex_lock(&ex->lock);
    int32_t failed = ticket->words[2] != 0;
    if (failed) *fault = ticket->fault;
    pthread_mutex_unlock(&ex->lock);
    return failed;
}

void inf_ticket_release(inf_executor *ex, inf_ticket *ticket) {
    pthread_mutex_lock(&ex->lock);
    bool done = ticket->submission == NULL;
    ticket->released = true;
    if (done) free(ticket);
    inf_executor_let_go(ex);
}
