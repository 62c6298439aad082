/* Basics for the executor's files: clocks, threads, queues, spans. */
#include "executor.h"

#include <signal.h>
#include <time.h>

int64_t inf_now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

void inf_deadline(struct timespec *deadline, int64_t at_ns) {
    deadline->tv_sec = (time_t)(at_ns / 1000000000);
    deadline->tv_nsec = (long)(at_ns % 1000000000);
}

int32_t inf_cond_init(pthread_cond_t *cond) {
    pthread_condattr_t attributes;
    int error = pthread_condattr_init(&attributes);
    if (error != 0) return -error;
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    error = pthread_cond_init(cond, &attributes);
    pthread_condattr_destroy(&attributes);
    return -error;
}

/* Native threads block all signals, so that Python's main thread gets them. */
int32_t inf_thread_start(pthread_t *thread, void *(*run)(void *), void *argument) {
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int error = pthread_create(thread, NULL, run, argument);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return -error;
}

void inf_queue_push(inf_queue *queue, inf_run *run) {
    run->next = NULL;
    if (queue->head == NULL) queue->head = run;
    else queue->tail->next = run;
    queue->tail = run;
}

inf_run *inf_queue_pop(inf_queue *queue) {
    inf_run *run = queue->head;
    if (run != NULL) queue->head = run->next;
    return run;
}

bool inf_queue_remove(inf_queue *queue, inf_run *run) {
    inf_run *before = NULL;
    inf_run *at = queue->head;
    while (at != NULL && at != run) {
        before = at;
        at = at->next;
    }
    if (at == NULL) return false;
    if (before == NULL) queue->head = at->next;
    else before->next = at->next;
    if (queue->tail == at) queue->tail = before;
    return true;
}

void inf_span_add(struct inf_executor *ex, const inf_run *run, int32_t track, int64_t start_ns,
                  int64_t bytes) {
    inf_span *span = &ex->spans[ex->span_count++ % INF_SPAN_COUNT];
    *span = (inf_span){.track = track,
                       .drive = track == INF_TRACK_WRITE  ? inf_run_drive(run, INF_OP_WRITE)
                                : track == INF_TRACK_READ ? inf_run_drive(run, INF_OP_READ)
                                                          : -1,
                       .chunk = run->chunk->id,
                       .priority = run->priority,
                       .kind = run->job.kind,
                       .mask = run->job.mask,
                       .start_ns = start_ns,
                       .end_ns = inf_now_ns(),
                       .bytes = bytes};
}

int32_t inf_run_drive(const inf_run *run, int32_t op) {
    const inf_chunk *chunk = &run->chunk->plan;
    return op == INF_OP_WRITE && run->moves ? chunk->other_drive : chunk->drive;
}

bool inf_idle(const struct inf_executor *ex) {
    return ex->pending == 0 && ex->prefetch_reading == 0;
}

static void numa_note(struct inf_executor *ex, int32_t error) {
    if (ex->numa_error == 0) ex->numa_error = error;
}

void inf_numa_enter(struct inf_executor *ex, cpu_set_t *before) {
    CPU_ZERO(before);
    if (ex->config.numa != 0) numa_note(ex, inf_cpus_enter(ex->config.cpus, before));
}

void inf_numa_leave(struct inf_executor *ex, const cpu_set_t *before) {
    numa_note(ex, inf_cpus_leave(before));
}
