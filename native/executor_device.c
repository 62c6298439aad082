/* Copies between host and device memory: for each direction a thread and a stream of its own.
 *
 *   FETCH, UPDATE    ... -> compute -> [to device] -> ticket filled -> write -> done
 *   STORE, given     ... -> read -> [from device] -> compute -> ...
 *   COPY             [either], and nothing else
 *
 * The driver's functions come as addresses (inf_device_api): the library that torch has loaded, or
 * one that tests make.
 *
 * What orders a copy against the kernels of the compute stream, which run behind the caller's back:
 *   before it    a mark: an event that is recorded on the compute stream when the job is submitted,
 *                or its gate opened. The copy waits for it on its stream. It closes two hazards: a
 *                source that a kernel has yet to write (a gradient), and a target that a kernel of
 *                before still reads (a buffer that the allocator has handed out again).
 *   behind it    the host: a ticket is filled when the copy has ended on the device, and only then
 *                does anybody submit kernels that read the target, free the source, or let the slot
 *                be read into again.
 */
#include "executor.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#define IN_FLIGHT_MAX 8
#define STREAM_NON_BLOCKING 1u
#define REGISTER_PORTABLE 1u
#define EVENT_BLOCKING_SYNC 1u
#define EVENT_DISABLE_TIMING 2u

typedef int (*one_pointer)(void *);
typedef int (*two_pointers)(void *, void *);
typedef int (*create)(void **, unsigned);
typedef int (*get_context)(void **);
typedef int (*wait_event)(void *, void *, unsigned);
typedef int (*host_register)(void *, size_t, unsigned);
typedef int (*to_device)(uint64_t, const void *, size_t, void *);
typedef int (*from_device)(void *, uint64_t, size_t, void *);

#define CALL(type, address) ((type)(uintptr_t)(address))

/* ---- the context ----------------------------------------------------------------------------- */

/* Makes the device's context current on this thread; *before is what was. The thread may be the
 * user's, whose current device is not always this one: `leave` it as it was. */
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

/* Records what the compute stream has been given so far. NULL with *error when the driver refuses.
 * Not locked: a driver may block while its queue is full. */
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
    void *before;
    *error = enter(api, &before);
    if (*error == 0 && mark->event == NULL)
        *error = CALL(create, api->event_create)(&mark->event, EVENT_DISABLE_TIMING);
    if (*error == 0) *error = CALL(two_pointers, api->event_record)(mark->event, stream);
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

/* Whether the job's pass must wait for something from the device. */
bool inf_device_brings(const inf_run *run) {
    if (!(run->job.mask & INF_MASK_DEVICE) || run->copied_in) return false;
    if (run->job.kind == INF_JOB_STORE) return true;
    return run->job.kind == INF_JOB_UPDATE && (run->job.mask & INF_MASK_PARAM_IN_MEMORY) &&
           !(run->reads & 1u);
}

/* Whether what the pass has left goes to the device. */
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
    inf_queue_push(&copies->queue[run->priority], run);
    pthread_cond_signal(&copies->wake);
}

/* ---- the threads ----------------------------------------------------------------------------- */

typedef struct {
    inf_run *run;
    void *event;
    int64_t start_ns;
    int64_t bytes;
    int32_t error; /* of the driver */
} flight;

static inf_run *next_of(inf_copies *copies) {
    for (int32_t p = 0; p < INF_PRIORITY_COUNT; p++) {
        if (copies->queue[p].head != NULL) return inf_queue_pop(&copies->queue[p]);
    }
    return NULL;
}

static int wait_for_mark(const inf_device_api *api, void *stream, const inf_mark *mark) {
    return mark == NULL ? 0 : CALL(wait_event, api->stream_wait_event)(stream, mark->event, 0);
}

/* Hands the copies of a job to its stream. Whatever fails, the event comes behind all that the
 * stream was given. */
static void issue(const inf_copies *copies, flight *flown, const inf_mark *after,
                  const inf_mark *opened) {
    const inf_device_api *api = &copies->ex->device.api;
    piece pieces[INF_SECTION_MAX];
    int32_t count = pieces_of(flown->run, pieces);
    int error = wait_for_mark(api, copies->stream, after);
    if (error == 0) error = wait_for_mark(api, copies->stream, opened);
    for (int32_t i = 0; i < count && error == 0; i++) {
        const piece *at = &pieces[i];
        error = copies->direction == INF_TO_DEVICE
                    ? CALL(to_device, api->to_device)(at->to, (const void *)(uintptr_t)at->from,
                                                      at->bytes, copies->stream)
                    : CALL(from_device, api->from_device)((void *)(uintptr_t)at->to, at->from,
                                                          at->bytes, copies->stream);
        flown->bytes += (int64_t)at->bytes;
    }
    int recorded = CALL(two_pointers, api->event_record)(flown->event, copies->stream);
    if (recorded != 0) CALL(one_pointer, api->stream_wait)(copies->stream);
    flown->error = error != 0 ? error : recorded;
}

/* A COPY has no chunk, and so no FIFO and no slot. */
static void copy_end(struct inf_executor *ex, inf_run *run) {
    inf_submission *submission = run->submission;
    run->state = INF_DONE;
    ex->stats.jobs_done++;
    if (run->faulted) ex->stats.jobs_failed++;
    if (run->faulted) inf_submission_fail(ex, submission, &run->fault);
    inf_run_filled(ex, run);
    ex->active--;
    ex->pending--;
    if (ex->active == 0) {
        ex->idle_since_ns = inf_now_ns();
        if (ex->gates != NULL) pthread_cond_signal(&ex->work);
    }
    if (--submission->pending == 0) inf_submission_end(ex, submission);
    if (inf_idle(ex)) pthread_cond_broadcast(&ex->done);
}

/* The copy has ended on the device. [locked] */
static void landed(inf_copies *copies, const flight *flown) {
    struct inf_executor *ex = copies->ex;
    inf_run *run = flown->run;
    ex->stats.copied_bytes[copies->direction] += (uint64_t)flown->bytes;
    if (ex->spans_on)
        inf_span_add(ex, run, INF_TRACK_TO_DEVICE + copies->direction, flown->start_ns,
                     flown->bytes);
    bool updated = run->job.kind == INF_JOB_UPDATE && copies->direction == INF_TO_DEVICE;
    if (flown->error != 0 && updated) {
        /* The states are sound, and are written; but whoever waits for the parameters must hear of
         * it. */
        inf_fault fault = {.kind = INF_FAULT_DEVICE,
                           .op = -1,
                           .drive = -1,
                           .error = flown->error,
                           .key = run->chunk->plan.key,
                           .chunk = run->chunk->id,
                           .section = 0,
                           .piece = -1};
        inf_submission_fail(ex, run->submission, &fault);
    } else if (flown->error != 0) {
        inf_run_fail(run, INF_FAULT_DEVICE, -1, flown->error, 0, flown->bytes);
    }
    if (run->job.kind == INF_JOB_COPY) {
        copy_end(ex, run);
    } else if (copies->direction == INF_TO_DEVICE && !run->faulted) {
        inf_run_settle(ex, run);
    } else if (run->faulted) {
        inf_run_finish(ex, run);
    } else {
        run->copied_in = true;
        inf_run_queue_compute(ex, run);
    }
}

static void *copies_main(void *argument) {
    inf_copies *copies = argument;
    struct inf_executor *ex = copies->ex;
    const inf_device_api *api = &ex->device.api;
    flight flights[IN_FLIGHT_MAX];
    int32_t first = 0, count = 0;
    int64_t busy_since_ns = 0;
    CALL(one_pointer, api->set_current)((void *)(uintptr_t)api->context);
    pthread_mutex_lock(&ex->lock);
    for (;;) {
        inf_run *run = count < IN_FLIGHT_MAX ? next_of(copies) : NULL;
        if (run != NULL) {
            int32_t at = (first + count++) % IN_FLIGHT_MAX;
            flights[at] =
                (flight){.run = run, .event = copies->events[at], .start_ns = inf_now_ns()};
            if (count == 1) busy_since_ns = flights[at].start_ns;
            const inf_submission *submission = run->submission;
            const inf_mark *opened = submission->gate != NULL ? submission->gate->mark : NULL;
            pthread_mutex_unlock(&ex->lock);
            issue(copies, &flights[at], submission->mark, opened);
            pthread_mutex_lock(&ex->lock);
        } else if (count > 0) {
            flight *oldest = &flights[first];
            pthread_mutex_unlock(&ex->lock);
            int error = CALL(one_pointer, api->event_wait)(oldest->event);
            pthread_mutex_lock(&ex->lock);
            if (oldest->error == 0) oldest->error = error;
            first = (first + 1) % IN_FLIGHT_MAX;
            if (--count == 0)
                ex->stats.copied_ns[copies->direction] += (uint64_t)(inf_now_ns() - busy_since_ns);
            landed(copies, oldest);
            inf_pump(ex);
        } else if (ex->stopping) {
            break;
        } else {
            pthread_cond_wait(&copies->wake, &ex->lock);
        }
    }
    pthread_mutex_unlock(&ex->lock);
    return NULL;
}

/* ---- attaching ------------------------------------------------------------------------------- */

int32_t inf_executor_attach_device(inf_executor *ex, const inf_device_api *api) {
    struct inf_device *device = &ex->device;
    if (device->attached) return -EALREADY;
    device->api = *api;
    device->nothing = (inf_chunk_record){.id = -1, .plan = {.drive = -1}};
    void *before;
    int32_t error = enter(api, &before);
    cpu_set_t cpus_before;
    inf_numa_enter(ex, &cpus_before);
    if (error == 0 && ex->slab != NULL) {
        error = CALL(host_register, api->host_register)(ex->slab, (size_t)ex->slab_bytes,
                                                        REGISTER_PORTABLE);
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
        copies->events = calloc(IN_FLIGHT_MAX, sizeof *copies->events);
        if (copies->events == NULL) error = -ENOMEM;
        for (int32_t e = 0; e < IN_FLIGHT_MAX && error == 0; e++) {
            error = CALL(create, api->event_create)(&copies->events[e],
                                                    EVENT_DISABLE_TIMING | EVENT_BLOCKING_SYNC);
        }
        if (error == 0) error = inf_thread_start(&copies->thread, copies_main, copies);
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

/* After `stopping` was set. */
void inf_device_stop(struct inf_executor *ex) {
    struct inf_device *device = &ex->device;
    const inf_device_api *api = &device->api;
    if (api->get_current == 0) return; /* there is none */
    void *before;
    (void)enter(api, &before);
    for (int32_t d = 0; d < INF_DIRECTION_COUNT; d++) {
        inf_copies *copies = &device->copies[d];
        if (!copies->made) continue;
        pthread_mutex_lock(&ex->lock);
        pthread_cond_signal(&copies->wake);
        pthread_mutex_unlock(&ex->lock);
        if (copies->started) pthread_join(copies->thread, NULL);
        for (int32_t e = 0; e < IN_FLIGHT_MAX && copies->events != NULL; e++) {
            if (copies->events[e] != NULL) CALL(one_pointer, api->event_destroy)(copies->events[e]);
        }
        if (copies->stream != NULL) CALL(one_pointer, api->stream_destroy)(copies->stream);
        free(copies->events);
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
