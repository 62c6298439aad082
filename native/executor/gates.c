/* Gates: hold submissions back until they are opened or escape. All [locked]. */
#include "executor.h"

#include <assert.h>
#include <stdlib.h>

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
    if (gate->stays) return;
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
    /* the gate's order must not change: the list of gates is sorted by it */
    if (gate->first != NULL) return;
    gate_unlink(ex, gate);
    gate->order = 0;
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

/* Opens the gate or lets it escape (`state`): its submissions may start. */
void inf_gate_let_go(struct inf_executor *ex, inf_gate *gate, int32_t state) {
    gate->state = state;
    gate_unlink(ex, gate);
    for (inf_submission *submission = gate->first; submission != NULL;
         submission = submission->gate_next) {
        submission->escaped = state == INF_GATE_ESCAPED;
        for (int32_t j = 0; j < submission->job_count; j++)
            inf_run_consider(ex, &submission->runs[j]);
    }
    gate->first = NULL;
    if (ex->gates == NULL) ex->escaping = false; /* later gates are held again */
    if (state == INF_GATE_ESCAPED) ex->stats.gates_escaped++;
}

bool inf_gate_escape_oldest(struct inf_executor *ex) {
    if (ex->gates == NULL) return false;
    inf_gate_let_go(ex, ex->gates, INF_GATE_ESCAPED);
    return true;
}

void inf_gates_escape(struct inf_executor *ex, uint64_t order_max) {
    while (ex->gates != NULL && ex->gates->order <= order_max) inf_gate_escape_oldest(ex);
}

void inf_gates_escape_all(struct inf_executor *ex) {
    inf_gates_escape(ex, UINT64_MAX);
    for (inf_submission *left = ex->live; left != NULL; left = left->next) {
        if (left->gate != NULL && left->gate->state == INF_GATE_CLOSED)
            inf_gate_let_go(ex, left->gate, INF_GATE_ESCAPED);
    }
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
