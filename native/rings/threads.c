/* The thread backend: several threads per drive, each moving one block at a time with pread and
 * pwrite.
 *
 * inf_drive_done (executor/drive.c) takes each result: it resumes short transfers, and retries
 * after EAGAIN and EINTR. */
#include "executor/executor.h"

#include <errno.h>
#include <stdlib.h>
#include <unistd.h>

static int64_t transfer(const inf_drive *drive, const inf_request *request) {
    size_t bytes = (size_t)request->ask;
    int32_t fd = drive->fds[request->file];
    ssize_t moved = request->op == INF_OP_READ ? pread(fd, request->data, bytes, request->offset)
                                               : pwrite(fd, request->data, bytes, request->offset);
    return moved < 0 ? -(int64_t)errno : moved;
}

static void *thread_main(void *argument) {
    inf_drive *drive = argument;
    struct inf_executor *ex = drive->ex;
    pthread_mutex_lock(&ex->lock);
    for (;;) {
        uint32_t kicks = drive->kicks;
        inf_request *request = inf_drive_take(drive);
        inf_pump(ex); /* taking may have ended jobs by injected faults */
        if (request != NULL) {
            pthread_mutex_unlock(&ex->lock);
            int64_t result = transfer(drive, request);
            pthread_mutex_lock(&ex->lock);
            inf_drive_done(drive, request, result);
            inf_pump(ex);
        } else if (ex->stopping) {
            break;
        } else if (kicks == drive->kicks) {
            pthread_cond_wait(&drive->wake, &ex->lock);
        }
    }
    pthread_mutex_unlock(&ex->lock);
    return NULL;
}

void inf_threads_wake(inf_drive *drive) {
    drive->kicks++;
    pthread_cond_signal(&drive->wake);
}

void inf_threads_stop(inf_drive *drive) {
    struct inf_executor *ex = drive->ex;
    if (drive->threads == NULL) return; /* never started */
    pthread_mutex_lock(&ex->lock);
    drive->kicks++;
    pthread_cond_broadcast(&drive->wake);
    pthread_mutex_unlock(&ex->lock);
    for (int32_t i = 0; i < drive->thread_count; i++) pthread_join(drive->threads[i], NULL);
    pthread_cond_destroy(&drive->wake);
    free(drive->threads);
    drive->threads = NULL;
    drive->thread_count = 0;
}

int32_t inf_threads_start(inf_drive *drive, int32_t count, void *(*run)(void *)) {
    drive->threads = calloc((size_t)count, sizeof *drive->threads);
    if (drive->threads == NULL) return -ENOMEM;
    int32_t error = inf_cond_init(&drive->wake);
    if (error != 0) {
        free(drive->threads);
        drive->threads = NULL;
        return error;
    }
    for (int32_t i = 0; i < count && error == 0; i++) {
        error = inf_thread_start(&drive->threads[i], run, drive);
        if (error == 0) drive->thread_count++;
    }
    return error; /* the caller stops what was started */
}

static int32_t threads_start(inf_drive *drive) {
    return inf_threads_start(drive, drive->ex->config.threads_per_drive, thread_main);
}

const inf_backend inf_backend_threads = {"threads", threads_start, inf_threads_wake,
                                         inf_threads_stop};
