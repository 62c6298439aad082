/* Reports of runs to their submission and ticket: failed, filled. All [locked]. */
#include "executor.h"

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

/* The run's targets have their data, and its sources are free. The submission's last run sets the
 * ticket's word. */
void inf_run_filled(struct inf_executor *ex, inf_run *run) {
    inf_submission *submission = run->submission;
    if (run->filled) return;
    run->filled = true;
    if (--submission->unfilled > 0) return;
    __atomic_store_n(&submission->ticket->words[1], 1u, __ATOMIC_RELEASE);
    pthread_cond_broadcast(&ex->done);
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
    /* After the ticket's word: a thread that sees the alarm finds the failed ticket. */
    if (ex->alarm != NULL) __atomic_store_n(ex->alarm, 1u, __ATOMIC_RELEASE);
}
