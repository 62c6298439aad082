/* A device's driver for machines that have none: the functions of libcuda that the engine calls,
 * over ordinary memory.
 *
 * Two things are real about it. Streams run behind the caller: each has a thread, and what it is
 * given it does late, by a random time. And order is checked, not hoped for: every agent (the host,
 * the compute stream, each copy stream) has a vector clock; an access to memory that another agent
 * wrote, or a write to what another agent used, is a race unless something (an event, a wait, the
 * order of submission) puts one behind the other. That finds a missing event whatever the timing.
 *
 * Kernels of the compute stream are those of the CPU, which tests announce (sim_kernel): they run
 * at once, but count as running on their stream. The compute stream is NULL. Kernels that are late
 * (sim_late_write, sim_late_copy) run behind the host as those of a GPU do: who is not behind their
 * event reads what was there before.
 *
 * With sim_timing nothing is moved, and time is virtual: each thread of the host has a clock, which
 * a call and waking from a sleep advance; each stream and each direction of the bus has one, which
 * bytes advance. An answer of the driver depends on these clocks alone, so that what a thread does
 * with work that was queued for it (sim_hold) takes as long on any machine, whatever else runs.
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define AGENTS 16
#define HOST 0
#define COMPUTE 1
#define RACES 64
#define REGISTERED 256
#define ACCESSES (1 << 16)
#define ILLEGAL_ADDRESS 700
#define CAPTURE_UNSUPPORTED 900
#define NOT_READY 600

typedef struct { uint64_t at[AGENTS]; } clock_vector;
typedef struct event event;
typedef struct op {
    struct op *next;
    int kind;
    void *to;
    const void *from;
    size_t bytes;
    event *event;
    uint64_t turn;
    void *stash; /* freed behind it */
} op;
typedef struct {
    void *context;
    int agent;
    pthread_t thread;
    op *head, *tail;
    bool stopping, idle;
    int64_t at_ns; /* when all that it was given has ended, in virtual time */
    uint64_t given, moved; /* bytes, and how many of them a thread has seen moved */
} stream;
struct event {
    void *context;
    clock_vector seen;
    uint64_t turn, done;
    int64_t at_ns;
    stream *on;
    uint64_t given; /* to the stream before it */
};
typedef struct {
    uintptr_t low, high;
    uint64_t at;
    int agent;
    bool write;
    const char *what;
} access_record;

enum { COPY, RECORD, WAIT };
enum { CALL_COPY, CALL_RECORD, CALL_WAIT, CALL_QUERY, CALL_SLEEP, CALL_COUNT };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static clock_vector clocks[AGENTS];
static bool taken[AGENTS];
static access_record accesses[ACCESSES];
static int access_count;
static char races[RACES][256];
static int race_count;
static struct { uintptr_t low, high; } registered[REGISTERED];
static uint64_t seed = 1;
static int delay_us_max;
static __thread void *current; /* context: device 0 has 1, device 1 has 2; no other exists */
static unsigned made_in;       /* bit n: something was made, or pinned, in context n */
static uint64_t copied[2], streams_live, events_live;
static uint64_t calls[CALL_COUNT];
static int fails[CALL_COUNT]; /* the n-th of these from now fails */
static uint64_t torch_copied[2];
static int can_use_host_pointers = 1;
static stream compute = {.agent = COMPUTE};
static bool compute_runs; /* it has a thread: some kernels are late */
static int late_us;
static bool held; /* copies, and waits of streams, stay in their calls */
static int holding;
static bool kernels_held; /* late kernels do not begin */
static uint64_t in_flight_max[2]; /* bytes given to a stream that no thread has seen moved */

/* Virtual time. */
static bool timed;
static int64_t call_ns, wake_ns;
static double bytes_per_ns;
static int64_t bus_ns[2];  /* when a direction of the bus is free */
static int64_t seen_ns;    /* when a thread last saw that an event had come */
static uint64_t epoch = 1; /* of the clocks: sim_timing starts them all again */
static __thread uint64_t host_epoch;
static __thread int64_t host_ns;

static bool in_context(void) { return current == (void *)1 || current == (void *)2; }
static void note_context(void) { made_in |= 1u << (unsigned)(uintptr_t)current; }

static void learn(clock_vector *to, const clock_vector *from) {
    for (int a = 0; a < AGENTS; a++)
        if (from->at[a] > to->at[a]) to->at[a] = from->at[a];
}

static void say(const char *what, uintptr_t low, const char *other) {
    if (race_count < RACES)
        snprintf(races[race_count], sizeof races[0], "%s at %#lx is not ordered behind: %s", what,
                 (unsigned long)low, other);
    race_count++;
}

/* An access of `agent`, at its present time. [locked] */
static void touch(int agent, uintptr_t low, size_t bytes, bool write, const char *what) {
    uintptr_t high = low + bytes;
    int kept = 0;
    for (int i = 0; i < access_count; i++) {
        access_record *old = &accesses[i];
        bool overlap = old->low < high && low < old->high;
        bool seen = old->at <= clocks[agent].at[old->agent];
        if (overlap && !seen && (write || old->write)) say(what, low, old->what);
        bool covered = overlap && low <= old->low && old->high <= high &&
                       (write || (!old->write && old->agent == agent));
        if (!(covered && seen)) accesses[kept++] = *old;
    }
    access_count = kept;
    if (access_count < ACCESSES)
        accesses[access_count++] =
            (access_record){low, high, clocks[agent].at[agent], agent, write, what};
    else say("too many accesses", low, "raise ACCESSES");
}

static void submit_to(int agent) {
    clocks[HOST].at[HOST]++;
    learn(&clocks[agent], &clocks[HOST]);
    clocks[agent].at[agent]++;
}

static int64_t later(int64_t one, int64_t other) { return one > other ? one : other; }

/* This thread is in a call of the driver that costs its time. True: the call must fail. [locked] */
static bool charge(int kind) {
    if (host_epoch != epoch) host_ns = 0;
    host_epoch = epoch;
    calls[kind]++;
    if (timed) host_ns += call_ns;
    return fails[kind] > 0 && --fails[kind] == 0;
}

static void stay_while_held(void) {
    holding++;
    while (held) pthread_cond_wait(&changed, &lock);
    holding--;
}

static stream *stream_of(void *handle) { return handle == NULL ? &compute : handle; }

/* Whether ops of it are queued for a thread, or are over at once. */
static bool runs_late(const stream *on) { return !timed && (on != &compute || compute_runs); }

static void nap(void) {
    pthread_mutex_lock(&lock);
    seed = seed * 6364136223846793005u + 1442695040888963407u;
    int us = delay_us_max > 0 ? (int)((seed >> 33) % (uint64_t)delay_us_max) : 0;
    pthread_mutex_unlock(&lock);
    if (us > 0) usleep((useconds_t)us);
}

static void *stream_main(void *argument) {
    stream *self = argument;
    pthread_mutex_lock(&lock);
    for (;;) {
        op *next = self->head;
        if (next == NULL) {
            /* Signalled once: idle streams that signalled each other at every wake-up would never
             * sleep. */
            if (!self->idle) pthread_cond_broadcast(&changed);
            self->idle = true;
            if (self->stopping) break;
            pthread_cond_wait(&changed, &lock);
            continue;
        }
        self->idle = false;
        self->head = next->next;
        while ((next->kind == WAIT && next->event->done < next->turn) ||
               (self == &compute && next->kind == COPY && kernels_held))
            pthread_cond_wait(&changed, &lock);
        pthread_mutex_unlock(&lock);
        if (next->kind == COPY) {
            if (self == &compute) usleep((useconds_t)late_us);
            else nap();
            memcpy(next->to, next->from, next->bytes);
        }
        free(next->stash);
        pthread_mutex_lock(&lock);
        if (next->kind == RECORD && next->event->done < next->turn) next->event->done = next->turn;
        free(next);
        pthread_cond_broadcast(&changed);
    }
    pthread_mutex_unlock(&lock);
    return NULL;
}

static void push(stream *to, op what) {
    op *made = malloc(sizeof *made);
    *made = what;
    made->next = NULL;
    if (to->head == NULL) to->head = made;
    else to->tail->next = made;
    to->tail = made;
    pthread_cond_broadcast(&changed);
}

static bool pinned(uintptr_t low, size_t bytes) {
    for (int i = 0; i < REGISTERED; i++)
        if (registered[i].low <= low && low + bytes <= registered[i].high) return true;
    return false;
}

/* Over the bus, behind what its stream was given. */
static void move_in_virtual_time(stream *on, size_t bytes, int direction) {
    int64_t begins = later(later(host_ns, on->at_ns), bus_ns[direction]);
    bus_ns[direction] = on->at_ns = begins + (int64_t)((double)bytes / bytes_per_ns);
}

static int copy(stream *on, void *to, const void *from, size_t bytes, int direction) {
    pthread_mutex_lock(&lock);
    stay_while_held();
    if (charge(CALL_COPY)) {
        pthread_mutex_unlock(&lock);
        return ILLEGAL_ADDRESS;
    }
    const void *host = direction == 0 ? from : to;
    if (!pinned((uintptr_t)host, bytes))
        say("host memory of a copy", (uintptr_t)host, "it is not pinned");
    submit_to(on->agent);
    touch(on->agent, (uintptr_t)from, bytes, false,
          direction == 0 ? "to device, source" : "from device, source");
    touch(on->agent, (uintptr_t)to, bytes, true,
          direction == 0 ? "to device, target" : "from device, target");
    copied[direction] += bytes;
    on->given += bytes;
    if (on->given - on->moved > in_flight_max[direction])
        in_flight_max[direction] = on->given - on->moved;
    if (timed) move_in_virtual_time(on, bytes, direction);
    else push(on, (op){.kind = COPY, .to = to, .from = from, .bytes = bytes});
    pthread_mutex_unlock(&lock);
    return 0;
}

/* ---- what the engine calls ---- */

int cuInit(unsigned flags) { (void)flags; return 0; }
int cuDeviceGet(int *device, int ordinal) { *device = ordinal; return 0; }
int cuDeviceGetAttribute(int *value, int attribute, int device) {
    (void)device;
    if (attribute != 91) return 1;
    *value = can_use_host_pointers;
    return 0;
}
int cuDevicePrimaryCtxRetain(void **context, int device) {
    *context = (void *)(intptr_t)(device + 1);
    return 0;
}
int cuDevicePrimaryCtxRelease_v2(int device) { (void)device; return 0; }

/* Somebody captures a graph, in the mode that is torch's default: no thread may ask whether
 * something has ended, unless it has said that it does not mind. */
static _Thread_local int capture_mode;
static bool capturing, capture_broken;

int cuThreadExchangeStreamCaptureMode(int *mode) {
    int before = capture_mode;
    capture_mode = *mode;
    *mode = before;
    return 0;
}

void sim_capture(int on) {
    pthread_mutex_lock(&lock);
    capturing = on != 0;
    if (capturing) capture_broken = false;
    pthread_mutex_unlock(&lock);
}

int sim_capture_broken(void) {
    pthread_mutex_lock(&lock);
    bool broken = capture_broken;
    pthread_mutex_unlock(&lock);
    return broken;
}

/* [locked] */
static bool breaks_capture(void) {
    if (!capturing || capture_mode == 2) return false;
    capture_broken = true;
    return true;
}

int cuCtxSetCurrent(void *context) { current = context; return 0; }
int cuCtxGetCurrent(void **context) { *context = current; return 0; }
int cuGetErrorName(int code, const char **name) {
    *name = code == ILLEGAL_ADDRESS ? "CUDA_ERROR_ILLEGAL_ADDRESS" : "CUDA_ERROR";
    return 0;
}

int cuStreamCreate(void **out, unsigned flags) {
    (void)flags;
    stream *made = calloc(1, sizeof *made);
    made->context = current;
    pthread_mutex_lock(&lock);
    note_context();
    for (made->agent = 2; taken[made->agent]; made->agent++)
        if (made->agent == AGENTS - 1) { pthread_mutex_unlock(&lock); free(made); return 2; }
    taken[made->agent] = true;
    learn(&clocks[made->agent], &clocks[HOST]);
    streams_live++;
    pthread_mutex_unlock(&lock);
    pthread_create(&made->thread, NULL, stream_main, made);
    *out = made;
    return 0;
}

int cuStreamDestroy_v2(void *handle) {
    stream *gone = handle;
    pthread_mutex_lock(&lock);
    gone->stopping = true;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
    pthread_join(gone->thread, NULL);
    pthread_mutex_lock(&lock);
    taken[gone->agent] = false;
    streams_live--;
    pthread_mutex_unlock(&lock);
    free(gone);
    return 0;
}

int cuStreamSynchronize(void *handle) {
    stream *on = stream_of(handle);
    pthread_mutex_lock(&lock);
    if (breaks_capture()) {
        pthread_mutex_unlock(&lock);
        return CAPTURE_UNSUPPORTED;
    }
    while (runs_late(on) && !(on->head == NULL && on->idle)) pthread_cond_wait(&changed, &lock);
    charge(CALL_SLEEP);
    if (timed && on->at_ns > host_ns) host_ns = on->at_ns + wake_ns;
    learn(&clocks[HOST], &clocks[on->agent]);
    pthread_mutex_unlock(&lock);
    return 0;
}

int cuEventCreate(void **out, unsigned flags) {
    (void)flags;
    if (!in_context()) return 201;
    event *made = calloc(1, sizeof *made);
    made->context = current;
    *out = made;
    pthread_mutex_lock(&lock);
    note_context();
    events_live++;
    pthread_mutex_unlock(&lock);
    return 0;
}

int cuEventDestroy_v2(void *handle) {
    const event *gone = handle;
    pthread_mutex_lock(&lock);
    /* A stream that has yet to record it would write there. */
    while (!timed && gone->done < gone->turn) pthread_cond_wait(&changed, &lock);
    events_live--;
    pthread_mutex_unlock(&lock);
    free(handle);
    return 0;
}

int cuEventRecord(void *handle, void *stream_handle) {
    event *mark = handle;
    stream *on = stream_of(stream_handle);
    if (!in_context()) return 201;
    /* NULL is the default stream of whatever is current; an event belongs to one device. */
    if (mark->context != (stream_handle == NULL ? current : on->context)) return 400;
    pthread_mutex_lock(&lock);
    if (charge(CALL_RECORD)) {
        pthread_mutex_unlock(&lock);
        return ILLEGAL_ADDRESS;
    }
    submit_to(on->agent);
    mark->on = on;
    mark->given = on->given;
    mark->seen = clocks[on->agent];
    mark->turn++;
    if (timed) mark->at_ns = on->at_ns = later(on->at_ns, host_ns);
    if (runs_late(on)) push(on, (op){.kind = RECORD, .event = mark, .turn = mark->turn});
    else mark->done = mark->turn;
    pthread_mutex_unlock(&lock);
    return 0;
}

int cuStreamWaitEvent(void *stream_handle, void *handle, unsigned flags) {
    (void)flags;
    stream *on = stream_handle;
    event *mark = handle;
    pthread_mutex_lock(&lock);
    stay_while_held();
    if (charge(CALL_WAIT)) {
        pthread_mutex_unlock(&lock);
        return ILLEGAL_ADDRESS;
    }
    submit_to(on->agent);
    learn(&clocks[on->agent], &mark->seen);
    if (timed) on->at_ns = later(later(on->at_ns, host_ns), mark->at_ns);
    else push(on, (op){.kind = WAIT, .event = mark, .turn = mark->turn});
    pthread_mutex_unlock(&lock);
    return 0;
}

/* [locked] */
static void see(const event *mark) {
    learn(&clocks[HOST], &mark->seen);
    seen_ns = later(seen_ns, host_ns);
    if (mark->on != NULL && mark->given > mark->on->moved) mark->on->moved = mark->given;
}

int cuEventQuery(void *handle) {
    const event *mark = handle;
    pthread_mutex_lock(&lock);
    if (breaks_capture()) {
        pthread_mutex_unlock(&lock);
        return CAPTURE_UNSUPPORTED;
    }
    bool failed = charge(CALL_QUERY);
    bool come = timed ? mark->at_ns <= host_ns : mark->done >= mark->turn;
    if (come) see(mark);
    pthread_mutex_unlock(&lock);
    return failed ? ILLEGAL_ADDRESS : come ? 0 : NOT_READY;
}

int cuEventSynchronize(void *handle) {
    event *mark = handle;
    pthread_mutex_lock(&lock);
    if (breaks_capture()) {
        pthread_mutex_unlock(&lock);
        return CAPTURE_UNSUPPORTED;
    }
    bool failed = charge(CALL_SLEEP);
    uint64_t turn = mark->turn;
    while (!timed && mark->done < turn) pthread_cond_wait(&changed, &lock);
    if (timed && mark->at_ns > host_ns) host_ns = mark->at_ns + wake_ns;
    see(mark);
    pthread_mutex_unlock(&lock);
    return failed ? ILLEGAL_ADDRESS : 0;
}

int cuMemcpyHtoDAsync_v2(uint64_t to, const void *from, size_t bytes, void *on) {
    return copy(on, (void *)(uintptr_t)to, from, bytes, 0);
}
int cuMemcpyDtoHAsync_v2(void *to, uint64_t from, size_t bytes, void *on) {
    return copy(on, to, (const void *)(uintptr_t)from, bytes, 1);
}

int cuMemHostRegister_v2(void *memory, size_t bytes, unsigned flags) {
    (void)flags;
    if (!in_context()) return 201;
    pthread_mutex_lock(&lock);
    note_context();
    int result = 2;
    for (int i = 0; i < REGISTERED; i++) {
        if (registered[i].high != 0) {
            if (registered[i].low < (uintptr_t)memory + bytes &&
                (uintptr_t)memory < registered[i].high) {
                result = 712;
                break;
            }
        } else if (result == 2) {
            registered[i].low = (uintptr_t)memory;
            registered[i].high = (uintptr_t)memory + bytes;
            result = 0;
            break;
        }
    }
    pthread_mutex_unlock(&lock);
    return result;
}

int cuMemHostUnregister(void *memory) {
    if (!in_context()) return 201;
    pthread_mutex_lock(&lock);
    int result = 713;
    for (int i = 0; i < REGISTERED; i++) {
        if (registered[i].high == 0 || registered[i].low != (uintptr_t)memory) continue;
        registered[i].low = registered[i].high = 0;
        result = 0;
    }
    pthread_mutex_unlock(&lock);
    return result;
}

/* ---- what tests call ---- */

void sim_reset(uint64_t new_seed, int delay_us) {
    pthread_mutex_lock(&lock);
    seed = new_seed * 2 + 1;
    delay_us_max = delay_us;
    access_count = race_count = 0;
    made_in = 0;
    memset(fails, 0, sizeof fails);
    in_flight_max[0] = in_flight_max[1] = 0;
    copied[0] = copied[1] = torch_copied[0] = torch_copied[1] = 0;
    memset(calls, 0, sizeof calls);
    can_use_host_pointers = 1;
    timed = held = kernels_held = capturing = capture_broken = false;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
}

/* From now on time is virtual, and begins. While nothing is under way. */
void sim_timing(int64_t new_call_ns, int64_t new_wake_ns, double bytes_per_s) {
    pthread_mutex_lock(&lock);
    timed = true;
    call_ns = new_call_ns;
    wake_ns = new_wake_ns;
    bytes_per_ns = bytes_per_s / 1e9;
    bus_ns[0] = bus_ns[1] = compute.at_ns = seen_ns = 0;
    epoch++;
    memset(calls, 0, sizeof calls);
    in_flight_max[0] = in_flight_max[1] = 0;
    pthread_mutex_unlock(&lock);
}

/* Virtual nanoseconds until a thread last saw that an event had come. */
int64_t sim_seen_ns(void) { return seen_ns; }

/* A kernel that takes so long is submitted, in virtual time. */
void sim_busy(int64_t ns) {
    pthread_mutex_lock(&lock);
    charge(CALL_RECORD);
    compute.at_ns = later(compute.at_ns, host_ns) + ns;
    pthread_mutex_unlock(&lock);
}

uint64_t sim_calls(int kind) { return calls[kind]; }
uint64_t sim_in_flight_max(int direction) { return in_flight_max[direction]; }

/* Threads that give streams something stay in the call until they are let go. */
void sim_hold(int hold) {
    pthread_mutex_lock(&lock);
    held = hold != 0;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
}

/* Late kernels do not begin until they are let go. */
void sim_hold_kernels(int hold) {
    pthread_mutex_lock(&lock);
    kernels_held = hold != 0;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
}

int sim_holding(void) {
    pthread_mutex_lock(&lock);
    int count = held ? holding : 0;
    pthread_mutex_unlock(&lock);
    return count;
}

void sim_host_pointers(int can) { can_use_host_pointers = can; }

int sim_is_pinned(uint64_t address, size_t bytes) {
    pthread_mutex_lock(&lock);
    int is = pinned((uintptr_t)address, bytes);
    pthread_mutex_unlock(&lock);
    return is;
}

/* What is submitted to the compute stream as a late kernel takes so long there. */
void sim_late(int us) {
    pthread_mutex_lock(&lock);
    late_us = us;
    if (!compute_runs) pthread_create(&compute.thread, NULL, stream_main, &compute);
    compute_runs = true;
    pthread_mutex_unlock(&lock);
}

/* A late kernel that copies. */
void sim_late_copy(uint64_t to, uint64_t from, size_t bytes, const char *what) {
    pthread_mutex_lock(&lock);
    submit_to(COMPUTE);
    touch(COMPUTE, (uintptr_t)from, bytes, false, what);
    touch(COMPUTE, (uintptr_t)to, bytes, true, what);
    push(&compute, (op){.kind = COPY,
                        .to = (void *)(uintptr_t)to,
                        .from = (const void *)(uintptr_t)from,
                        .bytes = bytes});
    pthread_mutex_unlock(&lock);
}

/* A late kernel that writes what is there now; until it has run, something else is there. */
void sim_late_write(uint64_t address, size_t bytes, const char *what) {
    void *to = (void *)(uintptr_t)address, *stash = malloc(bytes);
    memcpy(stash, to, bytes);
    memset(to, 0xA5, bytes);
    pthread_mutex_lock(&lock);
    submit_to(COMPUTE);
    touch(COMPUTE, (uintptr_t)address, bytes, true, what);
    push(&compute,
         (op){.kind = COPY, .to = to, .from = stash, .bytes = bytes, .stash = stash});
    pthread_mutex_unlock(&lock);
}

/* A copy that torch makes, on the compute stream: its bytes have been moved. */
void sim_torch_copy(uint64_t to, uint64_t from, size_t bytes, int direction, int blocks) {
    uint64_t host = direction == 0 ? from : to;
    pthread_mutex_lock(&lock);
    charge(CALL_COPY);
    if (!pinned((uintptr_t)host, bytes))
        say("host memory of a copy of torch's", (uintptr_t)host, "it is not pinned");
    submit_to(COMPUTE);
    touch(COMPUTE, (uintptr_t)from, bytes, false, "a copy of torch's, source");
    touch(COMPUTE, (uintptr_t)to, bytes, true, "a copy of torch's, target");
    torch_copied[direction] += bytes;
    if (timed) move_in_virtual_time(&compute, bytes, direction);
    if (blocks) {
        learn(&clocks[HOST], &clocks[COMPUTE]);
        if (timed) host_ns = compute.at_ns + wake_ns;
    }
    pthread_mutex_unlock(&lock);
}

uint64_t sim_torch_copied(int direction) { return torch_copied[direction]; }

void sim_fail(int kind, int nth) {
    pthread_mutex_lock(&lock);
    fails[kind] = nth;
    pthread_mutex_unlock(&lock);
}

/* A kernel that the host submits to a stream; NULL: the compute stream. */
void sim_kernel(void *handle, uint64_t address, size_t bytes, int write, const char *what) {
    stream *on = handle;
    int agent = on == NULL ? COMPUTE : on->agent;
    pthread_mutex_lock(&lock);
    submit_to(agent);
    touch(agent, (uintptr_t)address, bytes, write != 0, what);
    pthread_mutex_unlock(&lock);
}

/* An access of the host itself. */
void sim_host(uint64_t address, size_t bytes, int write, const char *what) {
    pthread_mutex_lock(&lock);
    clocks[HOST].at[HOST]++;
    touch(HOST, (uintptr_t)address, bytes, write != 0, what);
    pthread_mutex_unlock(&lock);
}

int sim_races(void) { return race_count; }
const char *sim_race(int index) { return races[index]; }
uint64_t sim_copied(int direction) { return copied[direction]; }
unsigned sim_made_in(void) { return made_in; }
uint64_t sim_live(int what) { return what == 0 ? streams_live : events_live; }
uint64_t sim_pinned(void) {
    uint64_t bytes = 0;
    for (int i = 0; i < REGISTERED; i++) bytes += registered[i].high - registered[i].low;
    return bytes;
}
