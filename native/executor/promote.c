/* What somebody who waits, or no longer wants to, changes about jobs under way. */
#include "executor.h"

/* Moves a job to the queue of demands, wherever it waits; of one that is partly with the drive the
 * rest. [locked] */
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
    run->priority = 0; /* also where it is in no queue: for what comes next */
    if (queued) inf_queue_push(to, run);
}

void inf_promote(struct inf_executor *ex, inf_submission *submission) {
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

/* Gives a fetch up if no drive has begun it. [locked] */
static void run_cancel(struct inf_executor *ex, inf_run *run) {
    if (run->job.kind != INF_JOB_FETCH || run->faulted || run->reread) return;
    if (run->state == INF_WAITING) {
        ex->active++; /* as if it had begun: it ends now, whatever it waits for */
    } else if (!inf_slot_unwait(ex, run)) {
        bool unsent = run->state == INF_READING && run->cursor == 0 && run->position == 0;
        if (!unsent || !inf_drive_unqueue(&ex->drives[run->chunk->plan.drive], run, INF_OP_READ))
            return;
    }
    inf_run_fail(run, INF_FAULT_CANCELLED, -1, 0, 0, 0);
    inf_run_finish(ex, run);
}

void inf_ticket_cancel(inf_executor *ex, inf_ticket *ticket) {
    pthread_mutex_lock(&ex->lock);
    inf_submission *submission = ticket->submission;
    if (submission != NULL) {
        submission->pending++; /* the submission must outlive its last job */
        for (int32_t j = 0; j < submission->job_count; j++) run_cancel(ex, &submission->runs[j]);
        if (--submission->pending == 0) inf_submission_end(ex, submission);
        inf_pump(ex);
    }
    pthread_mutex_unlock(&ex->lock);
}
