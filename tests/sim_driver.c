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
 * at once, but count as running on their stream. The compute stream is NULL.
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
} op;
struct event { clock_vector seen; uint64_t turn, done; void *context; };
typedef struct {
    void *context;
    int agent;
    pthread_t thread;
    op *head, *tail;
    bool stopping, idle;
} stream;
typedef struct {
    uintptr_t low, high;
    uint64_t at;
    int agent;
    bool write;
    const char *what;
} access_record;

enum { COPY, RECORD, WAIT };

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
static int fail_copy; /* the n-th copy from now fails */
static __thread void *current; /* context: device 0 has 1, device 1 has 2; others are nobody's */
static unsigned made_in;       /* bit n: something was made, or pinned, in context n */
static uint64_t copied[2], streams_live, events_live;

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
            /* Told once: two idle streams that told each other at every wake-up would never rest. */
            if (!self->idle) pthread_cond_broadcast(&changed);
            self->idle = true;
            if (self->stopping) break;
            pthread_cond_wait(&changed, &lock);
            continue;
        }
        self->idle = false;
        self->head = next->next;
        while (next->kind == WAIT && next->event->done < next->turn)
            pthread_cond_wait(&changed, &lock);
        pthread_mutex_unlock(&lock);
        if (next->kind == COPY) {
            nap();
            memcpy(next->to, next->from, next->bytes);
        }
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

static int copy(stream *on, void *to, const void *from, size_t bytes, int direction) {
    pthread_mutex_lock(&lock);
    if (fail_copy > 0 && --fail_copy == 0) {
        pthread_mutex_unlock(&lock);
        return 700;
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
    push(on, (op){.kind = COPY, .to = to, .from = from, .bytes = bytes});
    pthread_mutex_unlock(&lock);
    return 0;
}

/* ---- what the engine calls ---- */

int cuInit(unsigned flags) { (void)flags; return 0; }
int cuDeviceGet(int *device, int ordinal) { *device = ordinal; return 0; }
int cuDevicePrimaryCtxRetain(void **context, int device) {
    *context = (void *)(intptr_t)(device + 1);
    return 0;
}
int cuDevicePrimaryCtxRelease_v2(int device) { (void)device; return 0; }
int cuCtxSetCurrent(void *context) { current = context; return 0; }
int cuCtxGetCurrent(void **context) { *context = current; return 0; }
int cuGetErrorName(int code, const char **name) {
    *name = code == 700 ? "CUDA_ERROR_ILLEGAL_ADDRESS" : "CUDA_ERROR";
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
    stream *on = handle;
    pthread_mutex_lock(&lock);
    while (on != NULL && !(on->head == NULL && on->idle)) pthread_cond_wait(&changed, &lock);
    learn(&clocks[HOST], &clocks[on == NULL ? COMPUTE : on->agent]);
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
    pthread_mutex_lock(&lock);
    events_live--;
    pthread_mutex_unlock(&lock);
    free(handle);
    return 0;
}

int cuEventRecord(void *handle, void *stream_handle) {
    event *mark = handle;
    stream *on = stream_handle;
    if (!in_context()) return 201;
    /* NULL is the default stream of whatever is current; an event belongs to one device. */
    if (mark->context != (on == NULL ? current : on->context)) return 400;
    pthread_mutex_lock(&lock);
    int agent = on == NULL ? COMPUTE : on->agent;
    submit_to(agent);
    mark->seen = clocks[agent];
    mark->turn++;
    if (on == NULL) mark->done = mark->turn;
    else push(on, (op){.kind = RECORD, .event = mark, .turn = mark->turn});
    pthread_mutex_unlock(&lock);
    return 0;
}

int cuStreamWaitEvent(void *stream_handle, void *handle, unsigned flags) {
    (void)flags;
    stream *on = stream_handle;
    event *mark = handle;
    pthread_mutex_lock(&lock);
    submit_to(on->agent);
    learn(&clocks[on->agent], &mark->seen);
    push(on, (op){.kind = WAIT, .event = mark, .turn = mark->turn});
    pthread_mutex_unlock(&lock);
    return 0;
}

int cuEventSynchronize(void *handle) {
    event *mark = handle;
    pthread_mutex_lock(&lock);
    uint64_t turn = mark->turn;
    while (mark->done < turn) pthread_cond_wait(&changed, &lock);
    learn(&clocks[HOST], &mark->seen);
    pthread_mutex_unlock(&lock);
    return 0;
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
    access_count = race_count = fail_copy = 0;
    made_in = 0;
    copied[0] = copied[1] = 0;
    pthread_mutex_unlock(&lock);
}

void sim_fail(int nth) {
    pthread_mutex_lock(&lock);
    fail_copy = nth;
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
