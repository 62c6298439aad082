/* Opening, ending and observing an executor. */
#include "executor.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Both pools, and the memory of their slots. */
typedef struct {
    inf_pool pool[2];
    uint8_t *slab;
    int64_t slab_bytes;
    int64_t huge_bytes;
} inf_pools;

/* ---- opening --------------------------------------------------------------------------------- */

/* Allocates pools of these sizes; no memory for 0 bytes. */
static int32_t pools_map(struct inf_executor *ex, const inf_exec_config *config, inf_pools *made) {
    int64_t small_total = config->small_count * config->small_bytes;
    *made = (inf_pools){.slab_bytes = small_total + config->large_count * config->large_bytes};
    if (made->slab_bytes > 0) {
        uint64_t address = 0;
        int32_t error = inf_slab_map_on((uint64_t)made->slab_bytes, config->numa - 1, &address,
                                        &ex->numa_error);
        if (error != 0) return error;
        made->slab = (uint8_t *)(uintptr_t)address;
        made->huge_bytes = inf_slab_huge_bytes(address, (uint64_t)made->slab_bytes);
    }
    for (int32_t i = 0; i < 2; i++) {
        uint8_t *base = made->slab == NULL ? NULL : made->slab + (i == 0 ? 0 : small_total);
        int32_t error =
            inf_pool_make(ex, &made->pool[i], i == 0 ? config->small_count : config->large_count,
                          i == 0 ? config->small_bytes : config->large_bytes, base);
        if (error != 0) return error;
    }
    return 0;
}

static void pools_free(const inf_pools *pools) {
    if (pools->slab != NULL)
        inf_slab_unmap((uint64_t)(uintptr_t)pools->slab, (uint64_t)pools->slab_bytes);
    for (int32_t i = 0; i < 2; i++) inf_pool_free(&pools->pool[i]);
}

/* Installs pools; returns the previous ones. [locked] */
static inf_pools pools_exchange(struct inf_executor *ex, const inf_pools *now) {
    inf_pools before = {{ex->pools[0], ex->pools[1]}, ex->slab, ex->slab_bytes, ex->huge_bytes};
    memcpy(ex->pools, now->pool, sizeof ex->pools);
    ex->slab = now->slab;
    ex->slab_bytes = now->slab_bytes;
    ex->huge_bytes = now->huge_bytes;
    return before;
}

static int32_t pools_make(struct inf_executor *ex, char *why, size_t why_bytes) {
    inf_pools made;
    int32_t error = pools_map(ex, &ex->config, &made);
    if (error != 0) {
        snprintf(why, why_bytes, "no memory for pools of %lld bytes", (long long)made.slab_bytes);
        pools_free(&made);
        return error;
    }
    (void)pools_exchange(ex, &made);
    return inf_prefetch_make(ex, ex->config.small_count + ex->config.large_count);
}

/* 0: no slot is in use. -EBUSY: a job or a failed write has one; -EIO: a broken ring may still
 * write to one. [locked] */
static int32_t slots_idle(const struct inf_executor *ex) {
    if (!inf_idle(ex) || ex->stats.kept_chunks > 0) return -EBUSY;
    bool all = ex->pools[0].free_count == ex->config.small_count &&
               ex->pools[1].free_count == ex->config.large_count;
    return all ? 0 : -EIO;
}

/* Exchanges the pools if no slot is in use; `pools` are then the previous ones. [locked] */
static int32_t pools_replace(struct inf_executor *ex, const inf_exec_config *config,
                             inf_pools *pools) {
    inf_prefetch_drop_all(ex);
    inf_prefetch *before = ex->prefetches;
    int32_t error = slots_idle(ex);
    if (error == 0) error = inf_prefetch_make(ex, config->small_count + config->large_count);
    if (error != 0) return error;
    free(before);
    ex->config = *config;
    *pools = pools_exchange(ex, pools);
    ex->slab_number++;
    /* each ring unregisters the old slab and registers the new one before its next request */
    for (int32_t d = 0; d < config->drive_count; d++) ex->backend->wake(&ex->drives[d]);
    return 0;
}

int32_t inf_executor_resize_pools(inf_executor *ex, int32_t small_count, int64_t small_bytes,
                                  int32_t large_count, int64_t large_bytes) {
    inf_pools pools;
    cpu_set_t cpus_before;
    pthread_mutex_lock(&ex->lock);
    inf_exec_config config = ex->config;
    pthread_mutex_unlock(&ex->lock);
    config.small_count = small_count;
    config.small_bytes = small_bytes;
    config.large_count = large_count;
    config.large_bytes = large_bytes;
    inf_numa_enter(ex, &cpus_before);
    int32_t error = pools_map(ex, &config, &pools);
    inf_numa_leave(ex, &cpus_before);
    bool pinned = false;
    if (error == 0) error = inf_device_pin(ex, pools.slab, pools.slab_bytes, &pinned);
    if (error == 0) {
        pthread_mutex_lock(&ex->lock);
        error = pools_replace(ex, &config, &pools);
        if (error == 0) {
            bool before = ex->device.pinned;
            ex->device.pinned = pinned;
            pinned = before;
        }
        pthread_mutex_unlock(&ex->lock);
    }
    if (pinned) inf_device_unpin(ex, pools.slab);
    pools_free(&pools);
    return error;
}

static int32_t drives_make(struct inf_executor *ex, const inf_drive_config *configs) {
    ex->drives = calloc((size_t)ex->config.drive_count + 1, sizeof *ex->drives);
    if (ex->drives == NULL) return -ENOMEM;
    for (int32_t d = 0; d < ex->config.drive_count; d++) {
        inf_drive *drive = &ex->drives[d];
        *drive = (inf_drive){
            .ex = ex, .index = d, .config = configs[d], .event_fd = -1, .fds = {configs[d].fd}};
        for (int32_t f = 1; f < INF_FILE_MAX; f++) drive->fds[f] = -1;
        int32_t threads = ex->config.threads_per_drive;
        bool blocking = ex->backend == &inf_backend_threads; /* one request per thread */
        if (blocking && drive->config.depth > threads) drive->config.depth = threads;
        drive->stats.depth = drive->config.depth;
        ex->seam_on =
            ex->seam_on || configs[d].read_bytes_per_s > 0 || configs[d].write_bytes_per_s > 0;
        drive->requests = calloc((size_t)drive->config.depth, sizeof *drive->requests);
        if (drive->requests == NULL) return -ENOMEM;
        for (int32_t r = 0; r < drive->config.depth; r++) {
            drive->requests[r].next = drive->free;
            drive->free = &drive->requests[r];
        }
    }
    return 0;
}

static uint64_t seam_random_from(const inf_seam *seam) {
    return seam->seed * 0x9E3779B97F4A7C15u | 1u;
}

static int32_t seam_start(struct inf_executor *ex) {
    if (ex->seam_started) return 0;
    int32_t error = inf_thread_start(&ex->seam_thread, inf_seam_main, ex);
    ex->seam_started = error == 0;
    return error;
}

static int32_t threads_make(struct inf_executor *ex, char *why, size_t why_bytes) {
    int32_t error = 0;
    for (int32_t d = 0; d < ex->config.drive_count && error == 0; d++)
        error = ex->backend->start(&ex->drives[d]);
    if (error != 0) {
        snprintf(why, why_bytes, "%s: %s", ex->backend->name, strerror(-error));
        return error;
    }
    ex->workers = calloc((size_t)ex->config.workers, sizeof *ex->workers);
    ex->worker_threads = calloc((size_t)ex->config.workers, sizeof *ex->worker_threads);
    if (ex->workers == NULL || ex->worker_threads == NULL) return -ENOMEM;
    for (int32_t w = 0; w < ex->config.workers; w++) {
        ex->workers[w].ex = ex;
        error = inf_thread_start(&ex->worker_threads[w], inf_worker_main, &ex->workers[w]);
        if (error != 0) return error;
        ex->workers_started++;
    }
    return ex->seam_on ? seam_start(ex) : 0;
}

inf_executor *inf_executor_open(const inf_exec_config *config, const inf_drive_config *drives,
                                int32_t *error, char *why, int32_t why_bytes) {
    struct inf_executor *ex = calloc(1, sizeof *ex);
    *error = -ENOMEM;
    if (ex == NULL) return NULL;
    ex->config = *config;
    ex->holds = 1;
    const inf_seam *seam = &config->seam;
    ex->backend = config->uring ? &inf_backend_uring : &inf_backend_threads;
    if (seam->null_batch > 0) ex->backend = &inf_backend_null;
    ex->seam_on = seam->delay_us_max > 0 || seam->fault.kind != INF_SEAM_NONE;
    ex->seam_random = seam_random_from(seam);
    pthread_mutex_init(&ex->lock, NULL);
    *error = inf_cond_init(&ex->done);
    if (*error == 0) *error = inf_cond_init(&ex->work);
    if (*error == 0) *error = inf_cond_init(&ex->seam_wake);
    if (*error == 0) *error = pools_make(ex, why, (size_t)why_bytes);
    if (*error == 0) *error = drives_make(ex, drives);
    cpu_set_t before;
    if (*error == 0) {
        inf_numa_enter(ex, &before);
        *error = threads_make(ex, why, (size_t)why_bytes);
        inf_numa_leave(ex, &before);
    }
    if (*error == 0) return ex;
    if (why[0] == '\0') snprintf(why, (size_t)why_bytes, "%s", strerror(-*error));
    inf_executor_stop(ex);
    inf_executor_free(ex);
    return NULL;
}

int32_t inf_executor_attach_device(inf_executor *ex, const inf_device_api *api) {
    return inf_device_attach(ex, api, inf_copies_main);
}

/* ---- the fault injector ---------------------------------------------------------------------- */

int64_t inf_executor_set_seam(inf_executor *ex, const inf_seam *seam, const double *speeds) {
    pthread_mutex_lock(&ex->lock);
    int64_t met = ex->seam_met;
    int32_t error = seam_start(ex);
    if (error == 0) {
        const inf_seam before = ex->config.seam;
        ex->config.seam = *seam;
        ex->config.seam.null_batch = before.null_batch;
        ex->config.seam.null_computes = before.null_computes;
        ex->seam_random = seam_random_from(seam);
        ex->seam_seen = ex->seam_met = 0;
        ex->seam_run = NULL;
        for (int32_t d = 0; d < ex->config.drive_count; d++) {
            ex->drives[d].config.read_bytes_per_s = speeds[2 * d + INF_OP_READ];
            ex->drives[d].config.write_bytes_per_s = speeds[2 * d + INF_OP_WRITE];
            ex->drives[d].clock_ns = 0; /* clears the backlog of the earlier speed */
        }
        ex->seam_on = true;
    }
    pthread_mutex_unlock(&ex->lock);
    return error == 0 ? met : error;
}

/* ---- ending ---------------------------------------------------------------------------------- */

void inf_executor_shut(inf_executor *ex, int32_t cancel) {
    pthread_mutex_lock(&ex->lock);
    ex->shut = true;
    if (cancel) ex->cancelled = true;
    inf_gates_escape_all(ex);
    for (int32_t d = 0; d < ex->config.drive_count && cancel; d++) inf_drive_cancel(&ex->drives[d]);
    inf_pump(ex);
    inf_prefetch_drop_all(ex); /* no job will use them */
    inf_pump(ex);
    pthread_mutex_unlock(&ex->lock);
}

int32_t inf_executor_wait_idle(inf_executor *ex, int64_t timeout_ns) {
    struct timespec deadline;
    inf_deadline(&deadline, inf_now_ns() + timeout_ns);
    pthread_mutex_lock(&ex->lock);
    while (!inf_idle(ex)) {
        if (pthread_cond_timedwait(&ex->done, &ex->lock, &deadline) == ETIMEDOUT) break;
    }
    int32_t idle = inf_idle(ex);
    pthread_mutex_unlock(&ex->lock);
    return idle;
}

void inf_executor_stop(inf_executor *ex) {
    if (ex->stopped) return;
    ex->stopped = true;
    pthread_mutex_lock(&ex->lock);
    ex->shut = true;
    ex->stopping = true;
    pthread_cond_broadcast(&ex->work);
    pthread_cond_broadcast(&ex->seam_wake);
    pthread_mutex_unlock(&ex->lock);
    for (int32_t w = 0; w < ex->workers_started; w++) pthread_join(ex->worker_threads[w], NULL);
    if (ex->seam_started) pthread_join(ex->seam_thread, NULL);
    inf_device_stop(ex);
    for (int32_t d = 0; d < ex->config.drive_count && ex->drives != NULL; d++)
        ex->backend->stop(&ex->drives[d]);
    for (int32_t w = 0; w < ex->workers_started; w++) free(ex->workers[w].scratch);
    if (ex->slab != NULL) inf_slab_unmap((uint64_t)(uintptr_t)ex->slab, (uint64_t)ex->slab_bytes);
    ex->slab = NULL;
}

static void executor_destroy(struct inf_executor *ex) {
    for (int32_t d = 0; d < ex->config.drive_count && ex->drives != NULL; d++)
        free(ex->drives[d].requests);
    for (int32_t c = 0; c < ex->chunk_count; c++) free(ex->chunks[c]);
    free(ex->drives);
    free(ex->prefetches);
    free(ex->chunks);
    free(ex->chunks_free);
    inf_pool_free(&ex->pools[0]);
    inf_pool_free(&ex->pools[1]);
    free(ex->workers);
    free(ex->worker_threads);
    free(ex->spans);
    free(ex->spares);
    free(ex->moves);
    pthread_cond_destroy(&ex->done);
    pthread_cond_destroy(&ex->work);
    pthread_cond_destroy(&ex->seam_wake);
    pthread_mutex_destroy(&ex->lock);
    free(ex);
}

void inf_executor_let_go(struct inf_executor *ex) {
    bool last = --ex->holds == 0;
    pthread_mutex_unlock(&ex->lock);
    if (last) executor_destroy(ex);
}

void inf_executor_free(inf_executor *ex) {
    pthread_mutex_lock(&ex->lock);
    inf_executor_let_go(ex);
}

/* ---- observing ------------------------------------------------------------------------------- */

int64_t inf_executor_pool_bytes(const inf_executor *ex) { return ex->slab_bytes; }

uint64_t inf_executor_slab(const inf_executor *ex) { return (uint64_t)(uintptr_t)ex->slab; }

int64_t inf_executor_huge_bytes(const inf_executor *ex) { return ex->huge_bytes; }

int32_t inf_executor_numa_error(const inf_executor *ex) { return ex->numa_error; }

int32_t inf_executor_registered(const inf_executor *ex) { return ex->registered; }

void inf_executor_stats(inf_executor *ex, inf_exec_stats *stats, inf_drive_stats *drives) {
    pthread_mutex_lock(&ex->lock);
    *stats = ex->stats;
    stats->reads_ahead_live = (uint64_t)(ex->pools[0].prefetch_count + ex->pools[1].prefetch_count);
    for (int32_t d = 0; d < ex->config.drive_count; d++) {
        inf_meter_tick(&ex->drives[d], inf_now_ns());
        drives[d] = ex->drives[d].stats;
    }
    pthread_mutex_unlock(&ex->lock);
}

int32_t inf_executor_spans(inf_executor *ex, int32_t enable) {
    inf_span *spans = enable ? malloc(INF_SPAN_COUNT * sizeof *spans) : NULL;
    if (enable && spans == NULL) return -ENOMEM;
    /* Touch all pages now, so that the process does not grow with its steps. Not with zeros:
     * compilers may turn that into calloc, which maps pages only when they are written. */
    if (spans != NULL) memset(spans, 0xff, INF_SPAN_COUNT * sizeof *spans);
    pthread_mutex_lock(&ex->lock);
    if (enable && ex->spans == NULL) {
        ex->spans = spans;
        spans = NULL;
        ex->span_count = 0;
    }
    ex->spans_on = enable != 0;
    pthread_mutex_unlock(&ex->lock);
    free(spans);
    return 0;
}

int32_t inf_executor_take_spans(inf_executor *ex, inf_span *spans, int32_t count_max) {
    pthread_mutex_lock(&ex->lock);
    uint64_t kept = ex->span_count < INF_SPAN_COUNT ? ex->span_count : INF_SPAN_COUNT;
    if (kept > (uint64_t)count_max) kept = (uint64_t)count_max;
    for (uint64_t i = 0; i < kept; i++)
        spans[i] = ex->spans[(ex->span_count - kept + i) % INF_SPAN_COUNT];
    ex->stats.spans_dropped += ex->span_count - kept;
    ex->span_count = 0;
    pthread_mutex_unlock(&ex->lock);
    return (int32_t)kept;
}

void inf_executor_alarm(inf_executor *ex, uint32_t *word) {
    pthread_mutex_lock(&ex->lock);
    ex->alarm = word;
    pthread_mutex_unlock(&ex->lock);
}

int32_t inf_executor_fault(inf_executor *ex, inf_fault *fault) {
    pthread_mutex_lock(&ex->lock);
    int32_t faulted = ex->faulted;
    if (faulted) *fault = ex->fault;
    pthread_mutex_unlock(&ex->lock);
    return faulted;
}
