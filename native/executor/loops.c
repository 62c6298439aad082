/* The loops of the executor's threads: each does a unit of work, pumps, or sleeps. executor.h draws
 * the stages of a job; jobs.c decides which one is next. */
#include "executor.h"

/* A waiting worker also lets a closed gate escape when its hold time is over. */
static void wait_for_work(struct inf_executor *ex) {
    if (ex->gates == NULL || ex->active > 0 || ex->gates_held) {
        pthread_cond_wait(&ex->work, &ex->lock);
        return;
    }
    int64_t due_ns = ex->idle_since_ns + ex->config.hold_ns;
    if (inf_now_ns() >= due_ns) {
        ex->escaping = true;
        inf_gate_escape_oldest(ex);
        inf_pump(ex);
        return;
    }
    struct timespec deadline;
    inf_deadline(&deadline, due_ns);
    pthread_cond_timedwait(&ex->work, &ex->lock, &deadline);
}

void *inf_worker_main(void *argument) {
    inf_worker *worker = argument;
    struct inf_executor *ex = worker->ex;
    pthread_mutex_lock(&ex->lock);
    for (;;) {
        if (inf_worker_step(worker)) inf_pump(ex);
        else if (ex->stopping) break;
        else wait_for_work(ex);
    }
    pthread_mutex_unlock(&ex->lock);
    return NULL;
}

void *inf_copies_main(void *argument) {
    inf_copies *copies = argument;
    struct inf_executor *ex = copies->ex;
    inf_copies_enter(copies);
    pthread_mutex_lock(&ex->lock);
    for (;;) {
        bool worked = inf_copies_step(copies);
        if (ex->ended.head != NULL) inf_pump(ex);
        if (worked) continue;
        if (ex->stopping) break;
        pthread_cond_wait(&copies->wake, &ex->lock);
    }
    pthread_mutex_unlock(&ex->lock);
    return NULL;
}

void *inf_seam_main(void *argument) {
    struct inf_executor *ex = argument;
    pthread_mutex_lock(&ex->lock);
    while (!ex->stopping || ex->held != NULL) {
        const inf_request *request = ex->held;
        if (request == NULL) {
            pthread_cond_wait(&ex->seam_wake, &ex->lock);
        } else if (inf_now_ns() < request->due_ns) {
            struct timespec deadline;
            inf_deadline(&deadline, request->due_ns);
            pthread_cond_timedwait(&ex->seam_wake, &ex->lock, &deadline);
        } else {
            inf_seam_release(ex);
            inf_pump(ex);
        }
    }
    pthread_mutex_unlock(&ex->lock);
    return NULL;
}
