/* Gates and tickets: what holds work back, and what it is waited for with. */
#include "executor.h"

#include <assert.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

/* ---- gates ----------------------------------------------------------------------------------- */

void inf_gate_drop_user(struct inf_executor *ex, inf_gate *gate) {
    assert(gate->users > 0);
    if (--gate->users > 0) return;
    inf_device_unmark(ex, gate->mark);
    free(gate->bases);
    free(gate);
}

static void bases_used(inf_gate *gate, const inf_submission *submission) {
    for (int32_t j = 0; j < submission->job_count; j++) {
        int32_t base = submission->runs[j].job.base;
        if (base > gate->base_max && submission->runs[j].state != INF_DONE) gate->base_max = base;
    }
}

void inf_gate_attach(struct inf_executor *ex, inf_gate *gate, inf_submission *submission) {
    gate->users++;
    submission->gate = gate;
    if (gate->state == INF_GATE_ESCAPED) submission->escaped = true;
    if (gate->state != INF_GATE_CLOSED) return;
    bases_used(gate, submission);
    submission->gate_next = gate->first;
    gate->first = submission;
    if (gate->order == 0) {
        gate->order = submission->order;
        gate->next = NULL;
        if (ex->gates == NULL) ex->gates = gate;
        else ex->gates_tail->next = gate;
        ex->gates_tail = gate;
    }
    ex->idle_since_ns = inf_now_ns();
    pthread_cond_signal(&ex->work);
}

static void gate_unlink(struct inf_executor *ex, inf_gate *gate) {
    inf_gate *before = NULL;
    inf_gate *at = ex->gates;
    while (at != NULL && at != gate) {
        before = at;
        at = at->next;
    }
    if (at == NULL) return;
    if (before == NULL) ex->gates = gate->next;
    else before->next = gate->next;
    if (ex->gates_tail == gate) ex->gates_tail = before;
    gate->next = NULL;
}

void inf_gate_detach(struct inf_executor *ex, inf_submission *submission) {
    inf_gate *gate = submission->gate;
    if (gate->state != INF_GATE_CLOSED) return;
    inf_submission **at = &gate->first;
    while (*at != NULL && *at != submission) at = &(*at)->gate_next;
    if (*at != NULL) *at = submission->gate_next;
    gate->base_max = -1;
    for (const inf_submission *left = gate->first; left != NULL; left = left->gate_next)
        bases_used(gate, left);
    /* its order stays the oldest: the list of gates is sorted by it */
    if (gate->first != NULL) return;
    gate_unlink(ex, gate);
    gate->order = 0;
}

/* The gate is closed no more: its submissions may start. */
static void gate_let_go(struct inf_executor *ex, inf_gate *gate, int32_t state) {
    gate->state = state;
    gate_unlink(ex, gate);
    for (inf_submission *submission = gate->first; submission != NULL;
         submission = submission->gate_next) {
        submission->escaped = state == INF_GATE_ESCAPED;
        for (int32_t j = 0; j < submission->job_count; j++)
            inf_run_consider(ex, &submission->runs[j]);
    }
    gate->first = NULL;
    if (ex->gates == NULL) ex->escaping = false; /* what comes next is held again */
    if (state == INF_GATE_ESCAPED) ex->stats.gates_escaped++;
}

bool inf_gate_escape_oldest(struct inf_executor *ex) {
    if (ex->gates == NULL) return false;
    gate_let_go(ex, ex->gates, INF_GATE_ESCAPED);
    return true;
}

void inf_gates_escape(struct inf_executor *ex, uint64_t order_max) {
    while (ex->gates != NULL && ex->gates->order <= order_max) inf_gate_escape_oldest(ex);
}

void inf_gates_escape_for(struct inf_executor *ex, inf_submission *submission) {
    uint64_t order = 0;
    if (submission->gate != NULL && submission->gate->state == INF_GATE_CLOSED)
        order = submission->order;
    for (int32_t j = 0; j < submission->job_count; j++) {
        const inf_run *run = &submission->runs[j];
        if (run->state != INF_WAITING) continue;
        for (const inf_run *before = run->chunk->fifo_head; before != NULL && before != run;
             before = before->fifo_next) {
            const inf_submission *other = before->submission;
            bool closed = other->gate != NULL && other->gate->state == INF_GATE_CLOSED;
            if (closed && other->order > order) order = other->order;
        }
    }
    inf_gates_escape(ex, order);
}

inf_gate *inf_gate_new(inf_executor *ex) {
    inf_gate *gate = calloc(1, sizeof *gate);
    if (gate == NULL) return NULL;
    gate->base_max = -1;
    gate->users = 1;
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
        gate_let_go(ex, gate, INF_GATE_OPEN);
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

/* A gate that can no longer be opened escapes. */
void inf_gate_release(inf_executor *ex, inf_gate *gate) {
    pthread_mutex_lock(&ex->lock);
    if (gate->state == INF_GATE_CLOSED && gate->first != NULL) {
        gate_let_go(ex, gate, INF_GATE_ESCAPED);
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
        inf_promote(ex, ticket->submission);
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
