/* The io_uring backend: one thread and one ring per drive.
 *
 * liburing is in the PyPI wheel `liburing`, whose shared object exports the C library. This file
 * calls its functions by pointer, and treats `struct io_uring` as opaque. It accesses only SQEs and
 * CQEs, which are kernel ABI.
 *
 * One thread creates, uses and closes a ring (SINGLE_ISSUER). It only waits for completions; a
 * pending read of an eventfd turns new work into a completion.
 *
 * inf_drive_done (executor/drive.c) takes each result: it resumes short transfers, and retries
 * after EAGAIN and EINTR.
 */
#include "executor/executor.h"

#include <assert.h>
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

/* ---- kernel ABI ------------------------------------------------------------------------------ */

typedef struct {
    uint8_t opcode;
    uint8_t flags;
    uint16_t ioprio;
    int32_t fd;
    uint64_t offset;
    uint64_t address;
    uint32_t bytes;
    uint32_t rw_flags;
    uint64_t user_data;
    uint16_t buffer;
    uint16_t personality;
    int32_t file_index;
    uint64_t more[2];
} uring_sqe;

typedef struct {
    uint64_t user_data;
    int32_t result;
    uint32_t flags;
} uring_cqe;

typedef struct {
    uint32_t sq_entries, cq_entries, flags, sq_thread_cpu, sq_thread_idle, features, wq_fd,
        reserved[3];
    uint64_t sq_offsets[5], cq_offsets[5];
} uring_params;

_Static_assert(sizeof(uring_sqe) == 64 && sizeof(uring_cqe) == 16 && sizeof(uring_params) == 120,
               "kernel ABI");

enum {
    INF_REGISTERED_NOT = 0,
    INF_REGISTERED = 1,
    INF_REGISTERED_NOT_HUGE = 2,
    INF_REGISTERED_TOO_LARGE = 3
};
enum { OP_READ_FIXED = 4, OP_WRITE_FIXED = 5, OP_READ = 22, OP_WRITE = 23 };
enum { SQE_FIXED_FILE = 1, SETUP_SINGLE_ISSUER = 1 << 12, SETUP_DEFER_TASKRUN = 1 << 13 };

/* ---- liburing by pointer --------------------------------------------------------------------- */

typedef struct {
    int (*queue_init_params)(unsigned entries, void *ring, void *params);
    void (*queue_exit)(void *ring);
    void *(*get_sqe)(void *ring);
    int (*submit_and_wait)(void *ring, unsigned wait_nr);
    unsigned (*peek_batch_cqe)(void *ring, uring_cqe **cqes, unsigned count);
    void (*cq_advance)(void *ring, unsigned count);
    int (*register_buffers)(void *ring, const struct iovec *pieces, unsigned count);
    int (*register_files)(void *ring, const int *files, unsigned count);
    int (*unregister_buffers)(void *ring);
    int (*unregister_files)(void *ring);
} uring_api;

static uring_api api;
static bool api_loaded;
static pthread_mutex_t api_lock = PTHREAD_MUTEX_INITIALIZER;

static int32_t api_load(const char *path, char *why, size_t why_bytes) {
    static const char *const names[] = {
        "io_uring_queue_init_params", "io_uring_queue_exit",     "io_uring_get_sqe",
        "io_uring_submit_and_wait",   "io_uring_peek_batch_cqe", "io_uring_cq_advance",
        "io_uring_register_buffers",  "io_uring_register_files", "io_uring_unregister_buffers",
        "io_uring_unregister_files",
    };
    void *functions[sizeof names / sizeof *names];
    _Static_assert(sizeof functions == sizeof api, "one name for every pointer, in order");
    /* never closed, since pointers into it are used until the process ends */
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (library == NULL) {
        snprintf(why, why_bytes, "%s", dlerror());
        return -1;
    }
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        functions[i] = dlsym(library, names[i]);
        if (functions[i] != NULL) continue;
        snprintf(why, why_bytes, "%s does not export %s", path, names[i]);
        return -1;
    }
    memcpy(&api, functions, sizeof api);
    api_loaded = true;
    return 0;
}

int32_t inf_uring_load(const char *path, char *why, int32_t why_bytes) {
    pthread_mutex_lock(&api_lock);
    int32_t error = api_loaded ? 0 : api_load(path, why, (size_t)why_bytes);
    pthread_mutex_unlock(&api_lock);
    return error;
}

/* ---- one ring -------------------------------------------------------------------------------- */

/* `struct io_uring` of liburing 2.15 has 216 bytes; a later one may have more. */
typedef union {
    uint8_t bytes[4096];
    max_align_t align;
} ring_storage;

typedef struct {
    ring_storage storage;
    uint64_t event;
    int32_t error;
    int32_t registered;
    uint32_t slab_number; /* of the last slab that it tried to register */
    bool ready;
    bool fixed;
    bool file_fixed;
    bool event_posted;
} uring_state;

static int32_t ring_make(ring_storage *ring, unsigned entries) {
    static const uint32_t flags[] = {SETUP_SINGLE_ISSUER | SETUP_DEFER_TASKRUN, SETUP_SINGLE_ISSUER,
                                     0};
    int error = -EINVAL;
    /* older kernels support fewer flags */
    for (size_t i = 0; i < sizeof flags / sizeof *flags && error == -EINVAL; i++) {
        uring_params params = {.flags = flags[i]};
        memset(ring, 0, sizeof *ring);
        error = api.queue_init_params(entries, ring, &params);
    }
    return error;
}

static void *probe_main(void *argument) {
    static __thread ring_storage ring;
    int32_t *error = argument;
    *error = ring_make(&ring, 4);
    if (*error == 0) api.queue_exit(&ring);
    return NULL;
}

int32_t inf_uring_probe(void) {
    if (!api_loaded) return -ENOSYS;
    pthread_t thread;
    int32_t error = 0;
    int32_t started = inf_thread_start(&thread, probe_main, &error);
    if (started != 0) return started;
    pthread_join(thread, NULL);
    return error;
}

/* Registered pages are not pinned per request. Only for huge pages: with 4 KiB pages registration
 * is slower. */
static int32_t slab_register(const struct inf_executor *ex, uring_state *state) {
    if (ex->slab_bytes == 0) return INF_REGISTERED_NOT;
    if (ex->huge_bytes < ex->slab_bytes / 10 * 9) return INF_REGISTERED_NOT_HUGE;
    struct iovec pieces[1024];
    unsigned count = 0;
    for (int64_t at = 0; at < ex->slab_bytes; at += INF_PIECE_BYTES) {
        if (count == sizeof pieces / sizeof *pieces) return INF_REGISTERED_TOO_LARGE;
        int64_t bytes =
            ex->slab_bytes - at < INF_PIECE_BYTES ? ex->slab_bytes - at : INF_PIECE_BYTES;
        pieces[count++] = (struct iovec){ex->slab + at, (size_t)bytes};
    }
    /* ENOMEM: RLIMIT_MEMLOCK; continues without registration */
    int32_t error = api.register_buffers(&state->storage, pieces, count);
    return error == 0 ? INF_REGISTERED : error;
}

/* Unregister explicitly: the kernel frees a ring's references (file space, locked pages) some time
 * after its exit. */
static void ring_close(uring_state *state, bool broken) {
    if (!broken && state->file_fixed) api.unregister_files(&state->storage);
    if (!broken && state->fixed) api.unregister_buffers(&state->storage);
    api.queue_exit(&state->storage);
}

static uring_sqe *sqe_new(uring_state *state) {
    uring_sqe *sqe = api.get_sqe(&state->storage);
    assert(sqe != NULL); /* the ring has twice as many entries as requests in flight */
    memset(sqe, 0, sizeof *sqe);
    return sqe;
}

static void post_event_read(inf_drive *drive, uring_state *state) {
    uring_sqe *sqe = sqe_new(state);
    sqe->opcode = OP_READ;
    sqe->fd = drive->event_fd;
    sqe->address = (uint64_t)(uintptr_t)&state->event;
    sqe->bytes = sizeof state->event;
    state->event_posted = true;
}

/* Completes one request: the kernel may support io_uring but not these operations. */
static int32_t ring_prove(inf_drive *drive, uring_state *state) {
    uint64_t one = 1;
    uring_cqe *cqe = NULL;
    if (write(drive->event_fd, &one, sizeof one) != (ssize_t)sizeof one) return -errno;
    post_event_read(drive, state);
    state->event_posted = false;
    for (int32_t tries = 0; tries < 1000 && cqe == NULL; tries++) {
        int error = api.submit_and_wait(&state->storage, 1);
        bool passing = error == -EINTR || error == -EAGAIN || error == -EBUSY;
        if (error < 0 && !passing) return error;
        if (api.peek_batch_cqe(&state->storage, &cqe, 1) == 0)
            nanosleep(&(struct timespec){0, 1000000}, NULL);
    }
    if (cqe == NULL) return -ETIME;
    int32_t result = cqe->result;
    api.cq_advance(&state->storage, 1);
    return result == (int32_t)sizeof one ? 0 : result < 0 ? result : -EIO;
}

static int32_t ring_open(inf_drive *drive, uring_state *state) {
    int32_t error = ring_make(&state->storage, (unsigned)drive->config.depth * 2 + 4);
    if (error != 0) return error;
    error = ring_prove(drive, state);
    if (error != 0) {
        api.queue_exit(&state->storage);
        return error;
    }
    /* Saves a look-up per request; files that are added later are not registered. */
    state->file_fixed = api.register_files(&state->storage, &drive->config.fd, 1) == 0;
    state->registered = slab_register(drive->ex, state);
    state->fixed = state->registered == INF_REGISTERED;
    return 0;
}

/* Registers the replaced slab. No request is in flight. [locked] */
static void slab_renew(inf_drive *drive, uring_state *state) {
    struct inf_executor *ex = drive->ex;
    state->slab_number = ex->slab_number;
    if (state->fixed) api.unregister_buffers(&state->storage);
    state->registered = slab_register(ex, state);
    state->fixed = state->registered == INF_REGISTERED;
    if (drive->index == 0 || ex->registered == INF_REGISTERED) ex->registered = state->registered;
}

static void post_request(const inf_drive *drive, uring_state *state, const inf_request *request) {
    bool read = request->op == INF_OP_READ;
    uring_sqe *sqe = sqe_new(state);
    sqe->opcode =
        state->fixed ? (read ? OP_READ_FIXED : OP_WRITE_FIXED) : (read ? OP_READ : OP_WRITE);
    bool file_fixed = state->file_fixed && request->file == 0;
    sqe->flags = file_fixed ? SQE_FIXED_FILE : 0;
    sqe->fd = file_fixed ? 0 : drive->fds[request->file];
    sqe->offset = (uint64_t)request->offset;
    sqe->address = (uint64_t)(uintptr_t)request->data;
    sqe->bytes = (uint32_t)request->ask;
    sqe->buffer =
        state->fixed ? (uint16_t)((request->data - drive->ex->slab) / INF_PIECE_BYTES) : 0;
    sqe->user_data = (uint64_t)(uintptr_t)request;
}

/* Submits all requests that the queue allows. [locked] */
static void fill_ring(inf_drive *drive, uring_state *state) {
    uint32_t kicks;
    do {
        kicks = drive->kicks;
        inf_request *request;
        while ((request = inf_drive_take(drive)) != NULL) post_request(drive, state, request);
        inf_pump(drive->ex); /* taking may have ended jobs by injected faults */
    } while (kicks != drive->kicks);
}

/* Handles completions. [locked] */
static void reap(inf_drive *drive, uring_state *state) {
    uring_cqe *cqes[64];
    unsigned count;
    while ((count = api.peek_batch_cqe(&state->storage, cqes, 64)) > 0) {
        for (unsigned i = 0; i < count; i++) {
            inf_request *request = (inf_request *)(uintptr_t)cqes[i]->user_data;
            if (request != NULL) {
                inf_drive_done(drive, request, cqes[i]->result);
                continue;
            }
            state->event_posted = false;
            if (!drive->ex->stopping) post_event_read(drive, state);
        }
        api.cq_advance(&state->storage, count);
    }
    inf_pump(drive->ex);
}

/* Waits for a completion, unlocked. 0, or a negative errno when the ring is broken. */
static int32_t wait_ring(inf_drive *drive, uring_state *state) {
    struct inf_executor *ex = drive->ex;
    int32_t result = 0;
    pthread_mutex_unlock(&ex->lock);
    for (int32_t tries = 0; tries < 1000; tries++) {
        result = api.submit_and_wait(&state->storage, 1);
        if (result >= 0 || result == -EINTR) {
            result = 0;
            break;
        }
        if (result != -EAGAIN && result != -EBUSY && result != -ENOMEM) break;
        /* the kernel lacks memory: retry for a second at most */
        nanosleep(&(struct timespec){0, 1000000}, NULL);
    }
    pthread_mutex_lock(&ex->lock);
    return result;
}

static void *uring_main(void *argument) {
    inf_drive *drive = argument;
    struct inf_executor *ex = drive->ex;
    uring_state *state = drive->ring;
    int32_t error = ring_open(drive, state);
    pthread_mutex_lock(&ex->lock);
    state->error = error;
    state->ready = true;
    pthread_cond_broadcast(&ex->done);
    if (error != 0) {
        pthread_mutex_unlock(&ex->lock);
        return NULL;
    }
    post_event_read(drive, state);
    int32_t broken = 0;
    /* Runs until `stopping` is set and the eventfd's read has completed: the kernel must not keep
     * an address of this process. */
    while ((!ex->stopping || state->event_posted) && broken == 0) {
        if (state->slab_number != ex->slab_number) slab_renew(drive, state);
        fill_ring(drive, state);
        drive->sleeping = true;
        broken = wait_ring(drive, state);
        drive->sleeping = false;
        if (broken == 0) reap(drive, state);
    }
    pthread_mutex_unlock(&ex->lock);
    ring_close(state, broken != 0);
    if (broken != 0) {
        pthread_mutex_lock(&ex->lock);
        inf_drive_break(drive, -broken);
        inf_pump(ex);
        pthread_mutex_unlock(&ex->lock);
    }
    return NULL;
}

static void uring_wake(inf_drive *drive) {
    drive->kicks++;
    if (!drive->sleeping) return;
    drive->sleeping = false;
    uint64_t one = 1;
    ssize_t written = write(drive->event_fd, &one, sizeof one);
    assert(written == (ssize_t)sizeof one);
    (void)written;
}

static void uring_stop(inf_drive *drive) {
    struct inf_executor *ex = drive->ex;
    if (drive->thread_count > 0) {
        pthread_mutex_lock(&ex->lock);
        /* even if it is not sleeping: the event also ends its next wait */
        drive->sleeping = true;
        uring_wake(drive);
        pthread_mutex_unlock(&ex->lock);
        pthread_join(drive->threads[0], NULL);
    }
    if (drive->event_fd >= 0) close(drive->event_fd);
    free(drive->threads);
    free(drive->ring);
    drive->thread_count = 0;
    drive->event_fd = -1;
    drive->threads = NULL;
    drive->ring = NULL;
}

static int32_t uring_start(inf_drive *drive) {
    struct inf_executor *ex = drive->ex;
    if (!api_loaded) return -ENOSYS;
    uring_state *state = calloc(1, sizeof *state);
    drive->ring = state;
    drive->threads = calloc(1, sizeof *drive->threads);
    drive->event_fd = eventfd(0, EFD_CLOEXEC);
    if (drive->event_fd < 0) return -errno;
    if (state == NULL || drive->threads == NULL) return -ENOMEM;
    int32_t error = inf_thread_start(&drive->threads[0], uring_main, drive);
    if (error != 0) return error;
    drive->thread_count = 1;
    pthread_mutex_lock(&ex->lock);
    while (!state->ready) pthread_cond_wait(&ex->done, &ex->lock);
    /* Reports the first ring that is not registered. */
    if (drive->index == 0 || ex->registered == INF_REGISTERED) ex->registered = state->registered;
    pthread_mutex_unlock(&ex->lock);
    return state->error;
}

const inf_backend inf_backend_uring = {"io_uring", uring_start, uring_wake, uring_stop};
