/* The null backend, for tests and benchmarks: drives that complete immediately without transfers.
 *
 * It measures the executor's overhead, and allows terabytes of swap in sparse files. A read leaves
 * the slot unchanged, so verification must be off. One thread per drive, like a ring: it takes
 * requests, unlocks where a ring's thread would be in the kernel, and completes up to
 * `seam.null_batch` of them together.
 */
#include <errno.h>

#include "executor/executor.h"

/* [locked] */
static int32_t take_batch(inf_drive *drive, inf_request **batch) {
    int32_t count = 0, count_max = drive->ex->config.seam.null_batch;
    while (count < count_max && (batch[count] = inf_drive_take(drive)) != NULL) count++;
    inf_pump(drive->ex); /* taking may have ended jobs by injected faults */
    return count;
}

static void *null_main(void *argument) {
    inf_drive *drive = argument;
    struct inf_executor *ex = drive->ex;
    inf_request *batch[INF_NULL_BATCH_MAX];
    pthread_mutex_lock(&ex->lock);
    for (;;) {
        uint32_t kicks = drive->kicks;
        int32_t count = take_batch(drive, batch);
        if (count > 0) {
            pthread_mutex_unlock(&ex->lock);
            pthread_mutex_lock(&ex->lock);
            for (int32_t i = 0; i < count; i++) inf_drive_done(drive, batch[i], batch[i]->ask);
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

static int32_t null_start(inf_drive *drive) {
    if (drive->ex->config.seam.null_batch > INF_NULL_BATCH_MAX) return -EINVAL;
    return inf_threads_start(drive, 1, null_main);
}

const inf_backend inf_backend_null = {"null", null_start, inf_threads_wake, inf_threads_stop};
