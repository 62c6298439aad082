/* Copies between host and device memory: each direction has a thread and a stream.
 *
 *   FETCH, UPDATE    ... -> compute -> [to device] -> ticket filled -> write -> done
 *   STORE, given     ... -> read -> [from device] -> compute -> ...
 *   COPY             [either], and nothing else
 *
 * The driver's functions are addresses (inf_device_api): of the library that torch has loaded, or
 * of a simulated driver in tests.
 *
 * Order of a copy and the asynchronous kernels of the compute stream:
 *   kernels before the copy   a mark: an event recorded on the compute stream when the job is
 *                submitted or its gate opened. The copy's stream waits for the mark, unless it has
 *                already waited for a later one. This covers a source that a kernel has yet to
 *                write (a gradient), and a target that an earlier kernel still reads (a buffer that
 *                the allocator has reused).
 *   kernels after the copy    the host: a ticket is filled when the copy has ended on the device.
 *                Only then does the caller launch kernels that read the target, or free the source,
 *                and the executor reuses the slot.
 *
 * Call overhead limits the bandwidth of copies: a call takes about 5 us, waking a thread that
 * sleeps on an event 30 to 100 us, and the transfer of a chunk of parameters 14 us. So:
 *   flight       the queued copies, up to BATCH_BYTES, share one event; a single copy is issued
 *                immediately, with one event
 *   merging      pieces of one submission that are adjacent in source and target are one copy
 *   depth        while the thread sleeps on the oldest flight, at least BEHIND_BYTES are queued
 *                after it
 */
#include "executor.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

/* Limits of a flight, since its first ticket is filled together with its last one. 4 MiB take 76 us
 * on the bus. */
#define BATCH_BYTES ((int64_t)4 << 20)
#define BATCH_RUNS 16
/* No flight is issued while this many bytes follow the oldest one. Their transfer takes 229 us,
 * enough for the sleeping thread to wake (30 to 100 us, more in some virtual machines) and issue
 * the next flight. A larger limit would delay new demands, which wait for all of these bytes.
 * Figures: bench/README.md. */
#define BEHIND_BYTES ((int64_t)12 << 20)
#define UNDER_WAY 600 /* the driver's code: the event has not been reached */
#define STREAM_PER_THREAD ((void *)2) /* a handle for a different stream on every thread */
#define STREAM_NON_BLOCKING 1u
#define REGISTER_PORTABLE 1u
#define EVENT_BLOCKING_SYNC 1u
#define EVENT_DISABLE_TIMING 2u
#define CAPTURE_RELAXED 2

typedef int (*one_pointer)(void *);
typedef int (*two_pointers)(void *, void *);
typedef int (*create)(void **, unsigned);
typedef int (*get_context)(void **);
typedef int (*exchange_mode)(int *);
typedef int (*wait_event)(void *, void *, unsigned);
typedef int (*host_register)(void *, size_t, unsigned);
typedef int (*to_device)(uint64_t, const void *, size_t, void *);
typedef int (*from_device)(void *, uint64_t, size_t, void *);

#define CALL(type, address) ((type)(uintptr_t)(address))

/* ---- the context ----------------------------------------------------------------------------- */

/* Makes the device's context current on this thread; *before is the previous context, which `leave`
 * restores: the thread may be the user's, with another current device. */
static int enter(const inf_device_api *api, void **before) {
    *before = NULL;
    int error = CALL(get_context, api->get_current)(before);
    void *ours = (void *)(uintptr_t)api->context;
    return error != 0 || *before == ours ? error : CALL(one_pointer, api->set_current)(ours);
}

static void leave(const inf_device_api *api, void *before) {
    if (before != (void *)(uintptr_t)api->context) CALL(one_pointer, api->set_current)(before);
}

/* ---- marks ----------------------------------------------------------------------------------- */

/* Records an event after all work launched on the compute stream so far. NULL with *error if a call
 * of the driver fails. Not locked, since a driver may block while its queue is full. */
inf_mark *inf_device_mark(struct inf_executor *ex, int32_t *error) {
    struct inf_device *device = &ex->device;
    const inf_device_api *api = &device->api;
    pthread_mutex_lock(&ex->lock);
    inf_mark *mark = device->marks;
    if (mark != NULL) device->marks = mark->next;
    void *stream = device->compute_stream;
    pthread_mutex_unlock(&ex->lock);
    if (mark == NULL) mark = calloc(1, sizeof *mark);
    if (mark == NULL) {
        *error = -ENOMEM;
        return NULL;
    }
    mark->stream = stream;
    void *before;
    *error = enter(api, &before);
    if (*error == 0 && mark->event == NULL)
        *error = CALL(create, api->event_create)(&mark->event, EVENT_DISABLE_TIMING);
    /* Threads may record concurrently: the order of two marks is known only if one began after the
     * other had ended. */
    mark->begun = __atomic_add_fetch(&device->mark_count, 1, __ATOMIC_SEQ_CST);
    if (*error == 0) *error = CALL(two_pointers, api->event_record)(mark->event, stream);
    mark->ended = __atomic_add_fetch(&device->mark_count, 1, __ATOMIC_SEQ_CST);
    if (*error != 0 && mark->event != NULL) CALL(one_pointer, api->event_destroy)(mark->event);
    leave(api, before);
    if (*error == 0) return mark;
    free(mark);
    return NULL;
}

void inf_device_unmark(struct inf_executor *ex, inf_mark *mark) {
    if (mark == NULL) return;
    mark->next = ex->device.marks;
    ex->device.marks = mark;
}

/* Whether the copies' stream has already waited for this mark, or for a later one of the same
 * stream. Called only by the copies' thread. */
static bool covered(const inf_copies *copies, const inf_mark *mark) {
    if (mark == NULL) return true;
    if (mark->stream != copies->behind_stream || mark->stream == STREAM_PER_THREAD) return false;
    return mark->ended < copies->behind || mark->begun == copies->behind;
}

static void cover(inf_copies *copies, const inf_mark *mark) {
    if (mark->stream == copies->behind_stream && mark->begun < copies->behind) return;
    copies->behind_stream = mark->stream;
    copies->behind = mark->begun;
}

/* The marks of submission and of the gate's opening; NULL: none. Constant while the run copies. */
static void marks_of(const inf_run *run, const inf_mark *marks[2]) {
    const inf_submission *submission = run->submission;
    marks[0] = submission->mark;
    marks[1] = submission->gate != NULL ? submission->gate->mark : NULL;
}

/* ---- the pieces of a copy -------------------------------------------------------------------- */

typedef struct {
    uint64_t to;
    uint64_t from;
    size_t bytes;
} piece;

static uint64_t address_of(const inf_run *run, int32_t section) {
    return (uint64_t)(uintptr_t)inf_section_address(run, section);
}

/* The pieces of a job in one direction. */
static int32_t pieces_of(const inf_run *run, piece pieces[INF_SECTION_MAX]) {
    const inf_chunk *chunk = &run->chunk->plan;
    if (run->job.kind == INF_JOB_COPY) {
        pieces[0] = (piece){run->job.ptr[0], run->job.ptr[1], (size_t)run->job.ptr[2]};
        return 1;
    }
    if (run->job.kind == INF_JOB_UPDATE) {
        size_t bytes = (size_t)inf_section_bytes(chunk, 0);
        bool out = run->direction == INF_TO_DEVICE;
        pieces[0] = out ? (piece){run->job.ptr[0], address_of(run, 0), bytes}
                        : (piece){address_of(run, 0), run->job.ptr[1], bytes};
        return 1;
    }
    int32_t count = 0;
    for (int32_t s = 0; s < chunk->section_count; s++) {
        if (!(run->job.mask >> s & 1u) || run->job.ptr[s] == 0) continue;
        size_t bytes = (size_t)inf_section_bytes(chunk, s);
        bool out = run->job.kind == INF_JOB_FETCH;
        pieces[count++] = out ? (piece){run->job.ptr[s], address_of(run, s), bytes}
                              : (piece){address_of(run, s), run->job.ptr[s], bytes};
    }
    return count;
}

/* Whether a copy from the device must precede the job's pass. */
bool inf_device_brings(const inf_run *run) {
    if (!(run->job.mask & INF_MASK_DEVICE) || run->copied_in) return false;
    if (run->job.kind == INF_JOB_STORE) return true;
    return run->job.kind == INF_JOB_UPDATE && (run->job.mask & INF_MASK_PARAM_IN_MEMORY) &&
           !(run->reads & 1u);
}

/* Whether a copy to the device follows the pass. */
bool inf_device_takes(const inf_run *run) {
    if (!(run->job.mask & INF_MASK_DEVICE)) return false;
    if (run->job.kind == INF_JOB_UPDATE) return run->job.ptr[0] != 0;
    piece pieces[INF_SECTION_MAX];
    return run->job.kind == INF_JOB_FETCH && pieces_of(run, pieces) > 0;
}

void inf_device_queue(struct inf_executor *ex, inf_run *run, int32_t direction) {
    inf_copies *copies = &ex->device.copies[direction];
    run->state = INF_COPYING;
    run->direction = direction;
    run->copy_error = 0;
    inf_queue_push(&copies->queue[run->priority], run);
    pthread_cond_signal(&copies->wake);
}

/* ---- the copies ----------------------------------------------------------------------------- */

static inf_queue *most_urgent(inf_copies *copies) {
    for (int32_t p = 0; p < INF_PRIORITY_COUNT; p++) {
        if (copies->queue[p].head != NULL) return &copies->queue[p];
    }
    return NULL;
}

static int64_t bytes_of(const inf_run *run) {
    piece pieces[INF_SECTION_MAX];
    int64_t bytes = 0;
    for (int32_t i = pieces_of(run, pieces) - 1; i >= 0; i--) bytes += (int64_t)pieces[i].bytes;
    return bytes;
}

static uint64_t target_of(const inf_run *run) {
    piece pieces[INF_SECTION_MAX];
    return pieces_of(run, pieces) > 0 ? pieces[0].to : 0;
}

/* Appends a run, but sorts the runs of one submission by target address: workers finish chunks in
 * any order, and adjacent ones should be consecutive, to be merged. */
static void flight_add(inf_flight *flown, inf_run *run) {
    inf_run **at = &flown->first;
    for (inf_run *other = flown->first; other != NULL; other = other->next) {
        bool behind = other->submission != run->submission || target_of(other) < target_of(run);
        if (behind) at = &other->next;
    }
    run->next = *at;
    *at = run;
    if (run->next == NULL) flown->last = run;
    flown->bytes += bytes_of(run);
    flown->count++;
}

/* Whether a run may join the flight of the run before it. Not if that would delay the earlier run's
 * caller: because the stream must still wait for this run's mark, or the caller already waits. */
static bool may_follow(const inf_copies *copies, const inf_run *before, const inf_run *run) {
    if (before->submission == run->submission) return true;
    const inf_mark *marks[2];
    marks_of(run, marks);
    return !before->submission->awaited && covered(copies, marks[0]) && covered(copies, marks[1]);
}

/* Each gradient has a mark. If the device has reached the last mark of the queued runs, it has
 * reached all, and their copies can share a flight without a wait. [locked], but not during the
 * call of the driver */
static void look_at_marks(inf_copies *copies, const inf_queue *queue) {
    const inf_mark *last = NULL, *own[2];
    int64_t bytes = 0;
    int32_t count = 0;
    for (const inf_run *run = queue->head;
         run != NULL && bytes < BATCH_BYTES && count < BATCH_RUNS; run = run->next) {
        const inf_mark *marks[2];
        marks_of(run, marks);
        for (int32_t m = 0; m < 2; m++) {
            if (!covered(copies, marks[m]) && (last == NULL || marks[m]->begun > last->begun))
                last = marks[m];
        }
        bytes += bytes_of(run);
        count++;
    }
    marks_of(queue->head, own);
    /* For the first run's marks the stream waits, which costs no more than a query. */
    if (last == NULL || last == own[0] || last == own[1]) return;
    /* The mark stays valid: only this thread removes runs from the queue, which keep their
     * submission. */
    pthread_mutex_unlock(&copies->ex->lock);
    int error = CALL(one_pointer, copies->ex->device.api.event_query)(last->event);
    pthread_mutex_lock(&copies->ex->lock);
    if (error == 0) cover(copies, last);
}

/* The next flight; NULL: no copy waits, or enough are in flight. [locked] */
static inf_flight *take(inf_copies *copies) {
    const inf_flight *oldest = &copies->flights[copies->flight_first];
    if (most_urgent(copies) == NULL || copies->flight_count == INF_FLIGHT_MAX) return NULL;
    int64_t behind = copies->flight_bytes - oldest->bytes;
    if (copies->flight_count > 0 && behind >= BEHIND_BYTES) return NULL;
    look_at_marks(copies, most_urgent(copies));
    inf_queue *queue = most_urgent(copies); /* may differ: a demand may have arrived */
    int32_t at = (copies->flight_first + copies->flight_count) % INF_FLIGHT_MAX;
    inf_flight *next = &copies->flights[at];
    *next = (inf_flight){.event = next->event};
    const inf_run *before = NULL;
    while (queue->head != NULL && next->bytes < BATCH_BYTES && next->count < BATCH_RUNS &&
           (before == NULL || may_follow(copies, before, queue->head))) {
        inf_run *run = inf_queue_pop(queue);
        run->start_ns = inf_now_ns();
        flight_add(next, run);
        before = run;
    }
    if (copies->flight_count++ == 0) copies->busy_since_ns = next->first->start_ns;
    copies->flight_bytes += next->bytes;
    return next;
}

static int wait_for_mark(inf_copies *copies, const inf_mark *mark) {
    if (covered(copies, mark)) return 0;
    const inf_device_api *api = &copies->ex->device.api;
    int error = CALL(wait_event, api->stream_wait_event)(copies->stream, mark->event, 0);
    if (error == 0) cover(copies, mark);
    return error;
}

/* Issues one copy, of the runs from `first` to `last`. */
static void copy(const inf_copies *copies, const piece *at, inf_run *first, const inf_run *last) {
    if (at->bytes == 0) return;
    const inf_device_api *api = &copies->ex->device.api;
    int error = copies->direction == INF_TO_DEVICE
                    ? CALL(to_device, api->to_device)(at->to, (const void *)(uintptr_t)at->from,
                                                      at->bytes, copies->stream)
                    : CALL(from_device, api->from_device)((void *)(uintptr_t)at->to, at->from,
                                                          at->bytes, copies->stream);
    if (error == 0) return;
    for (inf_run *run = first;; run = run->next) {
        if (run->copy_error == 0) run->copy_error = error;
        if (run == last) break;
    }
}

/* Issues the copies of a flight. Also after an error, the event follows all issued copies. */
static void issue(inf_copies *copies, inf_flight *flown) {
    const inf_device_api *api = &copies->ex->device.api;
    piece whole = {0};                   /* adjacent pieces so far */
    inf_run *first = NULL, *last = NULL; /* their runs */
    for (inf_run *run = flown->first; run != NULL; run = run->next) {
        piece pieces[INF_SECTION_MAX];
        const inf_mark *marks[2];
        int32_t count = pieces_of(run, pieces);
        marks_of(run, marks);
        if (!covered(copies, marks[0]) || !covered(copies, marks[1])) {
            copy(copies, &whole, first, last); /* needs none of these marks */
            whole.bytes = 0;
            run->copy_error = wait_for_mark(copies, marks[0]);
            if (run->copy_error == 0) run->copy_error = wait_for_mark(copies, marks[1]);
        }
        for (int32_t i = 0; i < count && run->copy_error == 0; i++) {
            /* Merge only within a submission: a driver may refuse a copy across two allocations. */
            bool follows = whole.bytes > 0 && last->submission == run->submission &&
                           whole.to + whole.bytes == pieces[i].to &&
                           whole.from + whole.bytes == pieces[i].from;
            if (follows) {
                whole.bytes += pieces[i].bytes;
            } else {
                copy(copies, &whole, first, last);
                whole = pieces[i];
                first = run;
            }
            last = run;
        }
    }
    copy(copies, &whole, first, last);
    flown->error = CALL(two_pointers, api->event_record)(flown->event, copies->stream);
    if (flown->error != 0) CALL(one_pointer, api->stream_wait)(copies->stream);
}

/* The copies of a run have ended on the device. [locked] */
static void landed(inf_copies *copies, inf_run *run, int32_t error) {
    struct inf_executor *ex = copies->ex;
    int64_t bytes = bytes_of(run);
    if (error == 0) ex->stats.copied_bytes[copies->direction] += (uint64_t)bytes;
    if (ex->spans_on)
        inf_span_add(ex, run, INF_TRACK_TO_DEVICE + copies->direction, run->start_ns, bytes);
    bool updated = run->job.kind == INF_JOB_UPDATE && copies->direction == INF_TO_DEVICE;
    if (error != 0 && updated) {
        /* The updated states are valid and will be written, but the ticket must report that the
         * parameters were not copied. */
        inf_fault fault = {.kind = INF_FAULT_DEVICE,
                           .op = -1,
                           .drive = -1,
                           .error = error,
                           .key = run->chunk->plan.key,
                           .chunk = run->chunk->id,
                           .section = 0,
                           .piece = -1};
        inf_submission_fail(ex, run->submission, &fault);
    } else if (error != 0) {
        inf_run_fail(run, INF_FAULT_DEVICE, -1, error, 0, bytes);
    }
    inf_queue_push(&ex->ended, run);
}

/* The oldest flight has ended; `error`: the result of its event. [locked] */
static void land_oldest(inf_copies *copies, int32_t error) {
    struct inf_executor *ex = copies->ex;
    const inf_flight *flown = &copies->flights[copies->flight_first];
    if (flown->error != 0) error = flown->error;
    copies->flight_first = (copies->flight_first + 1) % INF_FLIGHT_MAX;
    copies->flight_bytes -= flown->bytes;
    if (--copies->flight_count == 0)
        ex->stats.copied_ns[copies->direction] += (uint64_t)(inf_now_ns() - copies->busy_since_ns);
    for (inf_run *run = flown->first, *next; run != NULL; run = next) {
        next = run->next;
        landed(copies, run, run->copy_error != 0 ? run->copy_error : error);
    }
}

void inf_copies_enter(const inf_copies *copies) {
    const inf_device_api *api = &copies->ex->device.api;
    CALL(one_pointer, api->set_current)((void *)(uintptr_t)api->context);
    /* In the default mode, querying an event would invalidate a graph that another thread captures.
     * */
    int mode = CAPTURE_RELAXED;
    CALL(exchange_mode, api->capture_mode)(&mode);
}

bool inf_copies_step(inf_copies *copies) {
    struct inf_executor *ex = copies->ex;
    const inf_device_api *api = &ex->device.api;
    inf_flight *next = take(copies);
    if (copies->flight_count == 0) return false;
    void *oldest = copies->flights[copies->flight_first].event;
    pthread_mutex_unlock(&ex->lock);
    if (next != NULL) issue(copies, next);
    /* Query before sleeping, since several flights may have ended during the last sleep; and query
     * between issues, so that a long queue does not delay tickets. */
    int error = UNDER_WAY;
    if (next != NULL || !copies->asked) error = CALL(one_pointer, api->event_query)(oldest);
    if (error == UNDER_WAY && next == NULL) error = CALL(one_pointer, api->event_wait)(oldest);
    /* After an error copies may still run: their memory is free only when the stream is empty. */
    if (error != 0 && error != UNDER_WAY) CALL(one_pointer, api->stream_wait)(copies->stream);
    pthread_mutex_lock(&ex->lock);
    copies->asked = error == UNDER_WAY;
    if (!copies->asked) land_oldest(copies, error);
    return true;
}

/* ---- attaching ------------------------------------------------------------------------------- */

static int32_t slab_pin(const inf_device_api *api, uint8_t *slab, int64_t bytes) {
    return CALL(host_register, api->host_register)(slab, (size_t)bytes, REGISTER_PORTABLE);
}

int32_t inf_device_attach(struct inf_executor *ex, const inf_device_api *api,
                          void *(*run)(void *)) {
    struct inf_device *device = &ex->device;
    if (device->attached) return -EALREADY;
    device->api = *api;
    device->nothing = (inf_chunk_record){.id = -1, .plan = {.drive = -1}};
    void *before;
    int32_t error = enter(api, &before);
    cpu_set_t cpus_before;
    inf_numa_enter(ex, &cpus_before);
    if (error == 0 && ex->slab != NULL) {
        error = slab_pin(api, ex->slab, ex->slab_bytes);
        device->pinned = error == 0;
    }
    for (int32_t d = 0; d < INF_DIRECTION_COUNT && error == 0; d++) {
        inf_copies *copies = &device->copies[d];
        copies->ex = ex;
        copies->direction = d;
        error = inf_cond_init(&copies->wake);
        copies->made = error == 0;
        if (error == 0)
            error = CALL(create, api->stream_create)(&copies->stream, STREAM_NON_BLOCKING);
        for (int32_t e = 0; e < INF_FLIGHT_MAX && error == 0; e++) {
            error = CALL(create, api->event_create)(&copies->flights[e].event,
                                                    EVENT_DISABLE_TIMING | EVENT_BLOCKING_SYNC);
        }
        if (error == 0) error = inf_thread_start(&copies->thread, run, copies);
        copies->started = error == 0;
    }
    inf_numa_leave(ex, &cpus_before);
    leave(api, before);
    device->attached = error == 0;
    return error;
}

void inf_executor_compute_stream(inf_executor *ex, uint64_t stream) {
    pthread_mutex_lock(&ex->lock);
    ex->device.compute_stream = (void *)(uintptr_t)stream;
    pthread_mutex_unlock(&ex->lock);
}

int32_t inf_device_pin(struct inf_executor *ex, uint8_t *slab, int64_t bytes, bool *pinned) {
    struct inf_device *device = &ex->device;
    if (!device->attached || slab == NULL) return 0;
    void *before;
    int32_t error = enter(&device->api, &before);
    if (error == 0) error = slab_pin(&device->api, slab, bytes);
    *pinned = error == 0;
    leave(&device->api, before);
    return error;
}

void inf_device_unpin(struct inf_executor *ex, uint8_t *slab) {
    const inf_device_api *api = &ex->device.api;
    void *before;
    (void)enter(api, &before);
    CALL(one_pointer, api->host_unregister)(slab);
    leave(api, before);
}

/* After `stopping` was set. */
void inf_device_stop(struct inf_executor *ex) {
    struct inf_device *device = &ex->device;
    const inf_device_api *api = &device->api;
    if (api->get_current == 0) return; /* no device */
    void *before;
    (void)enter(api, &before);
    for (int32_t d = 0; d < INF_DIRECTION_COUNT; d++) {
        inf_copies *copies = &device->copies[d];
        if (!copies->made) continue;
        pthread_mutex_lock(&ex->lock);
        pthread_cond_signal(&copies->wake);
        pthread_mutex_unlock(&ex->lock);
        if (copies->started) pthread_join(copies->thread, NULL);
        for (int32_t e = 0; e < INF_FLIGHT_MAX; e++) {
            void *event = copies->flights[e].event;
            if (event != NULL) CALL(one_pointer, api->event_destroy)(event);
        }
        if (copies->stream != NULL) CALL(one_pointer, api->stream_destroy)(copies->stream);
        pthread_cond_destroy(&copies->wake);
        *copies = (inf_copies){0};
    }
    if (device->pinned) CALL(one_pointer, api->host_unregister)(ex->slab);
    device->pinned = false;
    while (device->marks != NULL) {
        inf_mark *mark = device->marks;
        device->marks = mark->next;
        CALL(one_pointer, api->event_destroy)(mark->event);
        free(mark);
    }
    leave(api, before);
}
