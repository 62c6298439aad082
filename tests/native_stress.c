/* The native executor without Python: threads that store, update, fetch, cancel, gate, read ahead,
 * copy, commit, roll back, drop and look, all at once. Half of the memory that they name is on a
 * device, the simulated one. And first, drives that answer at once.
 *
 * For what an interpreter is in the way of: ThreadSanitizer, other machines under an emulator,
 * other compilers (make tsan, make portable). Each thread owns some chunks and knows what they must
 * hold; everything else is shared.
 *
 *   [STRESS_ISA=portable] native_stress DIRECTORY ROUNDS [THREADS [LIBURING]]    0 and some
 *   figures, or a message and 1
 */
#include "executor/executor.h"

#include <errno.h>
#include <fcntl.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define NUMEL 4096
#define PIECE 1024
#define FORMAT (INF_FORMAT_SPLIT | INF_GRAD_SECTION_FP32 << 24)
#define SECTIONS 5
#define ALL ((1u << SECTIONS) - 1u)
#define RUN_BYTES (16 * NUMEL)
#define CHUNKS_EACH 3
#define DRIVES 2
#define THREADS_MAX 16
#define PLACES_BYTES ((int64_t)THREADS_MAX * CHUNKS_EACH * RUN_BYTES) /* of all first places */
#define WAIT_NS 60000000000
#define SECONDS_MAX 600 /* a hang is a failure, too */

#define CHECK(condition)                                                                     \
    do {                                                                                     \
        if (!(condition)) {                                                                  \
            fprintf(stderr, "native_stress: line %d: %s (errno %d)\n", __LINE__, #condition, \
                    errno);                                                                  \
            exit(1);                                                                         \
        }                                                                                    \
    } while (0)

typedef struct {
    uint16_t hi[NUMEL];
    int16_t lo[NUMEL];
    float m[NUMEL];
    float v[NUMEL];
    float g[NUMEL];
} values;

typedef struct {
    inf_executor *ex;
    pthread_t thread;
    uint64_t random;
    int32_t first; /* of its chunks */
    int32_t rounds;
    inf_chunk plans[CHUNKS_EACH];
    int32_t ids[CHUNKS_EACH];
    values model[CHUNKS_EACH];
    values committed[CHUNKS_EACH]; /* without gradients, which have no versions */
    bool commits[CHUNKS_EACH];     /* whether there is a commit */
    values source;
    values target;
    float grad[NUMEL];
    float matrix[NUMEL]; /* a copy of the gradient, which Muon replaces by a matrix */
    uint16_t out[NUMEL];
    uint16_t given[NUMEL];
    uint32_t sums[CHUNKS_EACH][SECTIONS][NUMEL / PIECE];
    uint32_t other_sums[CHUNKS_EACH][SECTIONS][NUMEL / PIECE];
    int64_t cancelled;
    int64_t escaped;
} actor;

/* Of tests/sim_driver.c; only their addresses are used. */
void cuCtxSetCurrent(void), cuCtxGetCurrent(void), cuStreamCreate(void), cuStreamDestroy_v2(void);
void cuStreamSynchronize(void), cuStreamWaitEvent(void), cuEventCreate(void);
void cuEventDestroy_v2(void), cuEventRecord(void), cuEventQuery(void), cuEventSynchronize(void);
void cuMemcpyHtoDAsync_v2(void), cuMemcpyDtoHAsync_v2(void);
void cuMemHostRegister_v2(void), cuMemHostUnregister(void);
void cuThreadExchangeStreamCaptureMode(void);
void sim_reset(uint64_t seed, int delay_us);

static void attach(inf_executor *ex) {
#define AT(function) ((uint64_t)(uintptr_t)(function))
    const inf_device_api api = {.context = 1,
                                .set_current = AT(cuCtxSetCurrent),
                                .get_current = AT(cuCtxGetCurrent),
                                .stream_create = AT(cuStreamCreate),
                                .stream_destroy = AT(cuStreamDestroy_v2),
                                .stream_wait = AT(cuStreamSynchronize),
                                .stream_wait_event = AT(cuStreamWaitEvent),
                                .event_create = AT(cuEventCreate),
                                .event_destroy = AT(cuEventDestroy_v2),
                                .event_record = AT(cuEventRecord),
                                .event_query = AT(cuEventQuery),
                                .event_wait = AT(cuEventSynchronize),
                                .to_device = AT(cuMemcpyHtoDAsync_v2),
                                .from_device = AT(cuMemcpyDtoHAsync_v2),
                                .host_register = AT(cuMemHostRegister_v2),
                                .host_unregister = AT(cuMemHostUnregister),
                                .capture_mode = AT(cuThreadExchangeStreamCaptureMode)};
    CHECK(inf_executor_attach_device(ex, &api) == 0);
}

static const int32_t ITEMSIZES[SECTIONS] = {2, 2, 4, 4, 4};
static const inf_hyper HYPER = {.decay = 0.9999f,
                                .beta1 = 0.9f,
                                .one_minus_beta1 = 0.1f,
                                .beta2 = 0.99f,
                                .one_minus_beta2 = 0.01f,
                                .eps = 1e-8f,
                                .bc2_sqrt = 0.1f,
                                .step_size = 0.1f};

static const inf_hyper MOMENTUM = {.algorithm = INF_MUON_MOMENTUM,
                                   .beta1 = 0.9f,
                                   .one_minus_beta1 = 0.1f,
                                   .flags = INF_FLAG_NESTEROV};
static const inf_hyper MASTERS = {.algorithm = INF_MUON, .decay = 0.999f, .step_size = 0.1f};

static uint64_t next(actor *me) {
    me->random ^= me->random << 13;
    me->random ^= me->random >> 7;
    return me->random ^= me->random << 17;
}

static uint32_t somewhere(actor *me) { return next(me) & 1 ? INF_MASK_DEVICE : 0; }

static void fill(actor *me, values *at) {
    for (int32_t i = 0; i < NUMEL; i++) {
        uint64_t word = next(me);
        at->hi[i] = (uint16_t)(0x3C00 + (word & 0x3FF));
        at->lo[i] = (int16_t)(word >> 16);
        at->m[i] = (float)(word >> 40) * 1e-9f;
        at->v[i] = (float)(word >> 44) * 1e-9f;
        at->g[i] = (float)(int32_t)word * 1e-9f;
    }
}

static void pointers(values *at, inf_job *job) {
    job->ptr[0] = (uint64_t)(uintptr_t)at->hi;
    job->ptr[1] = (uint64_t)(uintptr_t)at->lo;
    job->ptr[2] = (uint64_t)(uintptr_t)at->m;
    job->ptr[3] = (uint64_t)(uintptr_t)at->v;
    job->ptr[4] = (uint64_t)(uintptr_t)at->g;
}

static inf_ticket *submit(actor *me, const inf_job *job, const inf_seg *seg,
                          const inf_hyper *hyper, inf_gate *gate) {
    int64_t error = 0;
    inf_ticket *ticket = inf_executor_submit(me->ex, job, 1, seg, seg != NULL, hyper, hyper != NULL,
                                             (int32_t)(next(me) % 3), gate, &error);
    CHECK(ticket != NULL);
    return ticket;
}

/* 0, or the kind of fault. */
static int32_t end(actor *me, inf_ticket *ticket) {
    inf_fault fault = {0};
    CHECK(inf_ticket_wait(me->ex, ticket, (int32_t)(next(me) & 1), WAIT_NS, 1) == 1);
    CHECK(inf_ticket_wait(me->ex, ticket, 0, WAIT_NS, 1) == 1);
    CHECK(inf_ticket_words(ticket)[1] != 0);
    if (inf_ticket_words(ticket)[2]) inf_ticket_fault(me->ex, ticket, &fault);
    inf_ticket_release(me->ex, ticket);
    return fault.kind;
}

static void store(actor *me, int32_t chunk, uint32_t mask) {
    inf_job job = {.chunk = me->ids[chunk], .kind = INF_JOB_STORE, .mask = mask, .base = -1};
    job.mask |= somewhere(me);
    fill(me, &me->source);
    if (mask == ALL) memcpy(&me->model[chunk], &me->source, sizeof me->source);
    else memcpy(me->model[chunk].g, me->source.g, sizeof me->source.g);
    pointers(&me->source, &job);
    inf_ticket *ticket = submit(me, &job, NULL, NULL, NULL);
    inf_ticket_cancel(me->ex, ticket); /* does nothing to a store */
    CHECK(end(me, ticket) == 0);
}

/* AdamW, or one of Muon's updates with the sections that it may leave out: all, some, or none. */
static const inf_hyper *draw_update(actor *me, uint32_t *leaves) {
    static const inf_hyper *const UPDATES[] = {&HYPER, &MOMENTUM, &MASTERS};
    const inf_hyper *hyper = UPDATES[next(me) % 3];
    const uint32_t some = next(me) & 1 ? ALL : (uint32_t)next(me) & ALL;
    *leaves = some & ALL >> 1 & ~inf_update_sections(INF_FORMAT_SPLIT, hyper);
    return hyper;
}

static void prefetch(actor *me) {
    int32_t count = (int32_t)(next(me) % (CHUNKS_EACH + 1));
    uint32_t masks[CHUNKS_EACH];
    for (int32_t i = 0; i < CHUNKS_EACH; i++) {
        draw_update(me, &masks[i]);
        masks[i] = masks[i] << INF_LEAVES_SHIFT | (next(me) & 1 ? INF_MASK_PARAM_IN_MEMORY : 0);
        masks[i] |= next(me) & 1 ? INF_MASK_FIRST : 0;
    }
    int32_t accepted = inf_executor_prefetch(me->ex, me->ids, count, masks);
    CHECK(accepted >= 0 && accepted <= count);
}

static void fetch(actor *me, int32_t chunk) {
    inf_job job = {.chunk = me->ids[chunk], .kind = INF_JOB_FETCH, .mask = ALL, .base = -1};
    memset(&me->target, 0, sizeof me->target);
    job.mask |= somewhere(me);
    pointers(&me->target, &job);
    inf_ticket *ticket = submit(me, &job, NULL, NULL, NULL);
    bool cancel = next(me) % 4 == 0;
    if (cancel) inf_ticket_cancel(me->ex, ticket);
    int32_t kind = end(me, ticket);
    CHECK(kind == 0 || (cancel && kind == INF_FAULT_CANCELLED));
    if (kind == 0) CHECK(memcmp(&me->target, &me->model[chunk], sizeof me->target) == 0);
    me->cancelled += kind != 0;
}

/* What a save does: a fetch behind an update, at a gate that only this thread opens or releases. */
static inf_ticket *fetch_behind(actor *me, int32_t chunk, inf_gate *gate) {
    inf_job job = {.chunk = me->ids[chunk], .kind = INF_JOB_FETCH};
    job.mask = next(me) & 1 ? ALL : ALL >> 1; /* a fetch of gradients takes over no slot */
    job.ptr[1] = offsetof(values, lo);
    job.ptr[2] = offsetof(values, m);
    job.ptr[3] = offsetof(values, v);
    job.ptr[4] = offsetof(values, g);
    memset(&me->target, 0, sizeof me->target);
    return submit(me, &job, NULL, NULL, gate);
}

static bool open_behind(actor *me, inf_gate *gate) {
    uint64_t base = (uint64_t)(uintptr_t)&me->target;
    CHECK(inf_gate_open(me->ex, gate, &base, 1) == 1);
    return true;
}

static void update(actor *me, int32_t chunk) {
    inf_job job = {.chunk = me->ids[chunk], .kind = INF_JOB_UPDATE, .base = -1, .seg_count = 1};
    uint32_t leaves;
    const inf_hyper *hyper = draw_update(me, &leaves);
    const bool gives = (leaves & 1u) == 0;
    job.mask = somewhere(me) | leaves << INF_LEAVES_SHIFT | (next(me) & 1 ? INF_MASK_FIRST : 0);
    inf_seg seg = {
        .numel = NUMEL, .grad = (uint64_t)(uintptr_t)me->grad, .grad_dtype = INF_GRAD_FP32};
    for (int32_t i = 0; i < NUMEL; i++) me->grad[i] = (float)(int32_t)next(me) * 1e-9f;
    memset(me->out, 0, sizeof me->out);
    bool gated = gives && (next(me) & 1);
    bool opened = gives;
    inf_gate *gate = gated ? inf_gate_new(me->ex, 0) : NULL;
    CHECK(!gated || gate != NULL);
    job.base = gated ? 0 : -1;
    job.ptr[0] = gated || !gives ? 0 : (uint64_t)(uintptr_t)me->out;
    bool spilled = hyper != &MOMENTUM && (next(me) & 1);
    if (spilled) seg = (inf_seg){.numel = NUMEL, .grad_dtype = INF_GRAD_SECTION};
    values *model = &me->model[chunk];
    memcpy(me->matrix, spilled ? model->g : me->grad, sizeof me->matrix);
    if (gives && (next(me) & 1)) { /* sometimes where the result goes */
        uint16_t *given = !gated && (next(me) & 1) ? me->out : me->given;
        memcpy(given, model->hi, sizeof me->given);
        job.mask |= INF_MASK_PARAM_IN_MEMORY;
        job.ptr[1] = (uint64_t)(uintptr_t)given;
    }
    inf_ticket *ticket = submit(me, &job, &seg, hyper, gate);
    inf_gate *late = next(me) & 1 ? inf_gate_new(me->ex, 1) : NULL;
    inf_ticket *behind = late != NULL ? fetch_behind(me, chunk, late) : NULL;
    bool copied = late != NULL && next(me) % 3 != 0 && open_behind(me, late);
    if (gated && next(me) % 3 != 0) {
        uint64_t base = (uint64_t)(uintptr_t)me->out;
        opened = inf_gate_open(me->ex, gate, &base, 1) == 1;
    } else if (gated) {
        opened = false; /* waiting makes it escape */
    }
    CHECK(end(me, ticket) == 0);
    if (gated) inf_gate_release(me->ex, gate);
    if (late != NULL) {
        if (!copied && next(me) & 1) copied = open_behind(me, late);
        inf_gate_release(me->ex, late);
        CHECK(end(me, behind) == 0);
    }
    me->escaped += gives && !opened;
    uint8_t *sections[INF_SECTION_MAX] = {(uint8_t *)model->hi, (uint8_t *)model->lo,
                                          (uint8_t *)model->m, (uint8_t *)model->v};
    inf_update(INF_FORMAT_SPLIT, sections, me->matrix, INF_GRAD_FP32, NUMEL, 0, hyper);
    CHECK(spilled || memcmp(me->grad, me->matrix, sizeof me->matrix) == 0);
    if (opened) CHECK(memcmp(me->out, model->hi, sizeof me->out) == 0);
    if (copied) CHECK(memcmp(&me->target, model, offsetof(values, g)) == 0);
}

/* Several at once, one behind another in the queue, in both directions. */
static void copy(actor *me) {
    inf_ticket *tickets[2 * SECTIONS];
    int32_t count = 0;
    fill(me, &me->source);
    memset(&me->target, 0, sizeof me->target);
    inf_job to = {0}, from = {0};
    pointers(&me->target, &to);
    pointers(&me->source, &from);
    for (int32_t s = 0; s < SECTIONS; s++) {
        /* Each half apart: adjacent copies, of which some become one. */
        uint64_t half = (uint64_t)NUMEL * (uint64_t)ITEMSIZES[s] / 2;
        inf_job jobs[2];
        for (uint64_t h = 0; h < 2; h++)
            jobs[h] = (inf_job){.chunk = -1,
                                .kind = INF_JOB_COPY,
                                .mask = INF_MASK_DEVICE | (uint32_t)(next(me) & 1),
                                .base = -1,
                                .ptr = {to.ptr[s] + h * half, from.ptr[s] + h * half, half}};
        int64_t error = 0;
        tickets[count] = inf_executor_submit(me->ex, jobs, 2, NULL, 0, NULL, 0,
                                             (int32_t)(next(me) % 3), NULL, &error);
        CHECK(tickets[count++] != NULL);
    }
    while (count > 0) CHECK(end(me, tickets[--count]) == 0);
    CHECK(memcmp(&me->target, &me->source, sizeof me->target) == 0);
}

/* Refused between two updates. */
static void commit(actor *me, int32_t chunk) {
    inf_chunk now;
    CHECK(inf_executor_look(me->ex, &me->ids[chunk], 1, &now) == 0);
    CHECK(inf_executor_commit(me->ex, &me->ids[chunk], 1) == (now.older == 0 ? 0 : -EPERM));
    if (now.older != 0 || !inf_chunk_versioned(&now)) return;
    me->commits[chunk] = true;
    memcpy(&me->committed[chunk], &me->model[chunk], offsetof(values, g));
}

static void roll_back(actor *me, int32_t chunk) {
    CHECK(inf_executor_rollback(me->ex, &me->ids[chunk], 1) == 0);
    if (me->commits[chunk]) memcpy(&me->model[chunk], &me->committed[chunk], offsetof(values, g));
}

static void define_again(actor *me, int32_t chunk) {
    CHECK(inf_executor_look(me->ex, &me->ids[chunk], 1, &me->plans[chunk]) == 0);
    me->commits[chunk] = false;
    CHECK(inf_executor_drop(me->ex, &me->ids[chunk], 1) == 0);
    CHECK(inf_executor_define(me->ex, &me->plans[chunk], 1, &me->ids[chunk]) == 0);
}

static void *act(void *argument) {
    actor *me = argument;
    for (int32_t i = 0; i < CHUNKS_EACH; i++) store(me, i, ALL);
    for (int32_t round = 0; round < me->rounds; round++) {
        int32_t chunk = (int32_t)(next(me) % CHUNKS_EACH);
        switch (next(me) % 13) {
            case 0: store(me, chunk, next(me) & 1 ? ALL : 16); break;
            case 1: define_again(me, chunk); break;
            case 2: case 3: case 4: update(me, chunk); break;
            case 5: case 6: prefetch(me); break;
            case 7: copy(me); break;
            case 8: commit(me, chunk); break;
            case 9: roll_back(me, chunk); break;
            default: fetch(me, chunk); break;
        }
    }
    return NULL;
}

static volatile int looking = 1;

/* Everything that only looks, or may be called at any time. */
static void *look(void *argument) {
    inf_executor *ex = argument;
    static inf_span spans[4096];
    inf_exec_stats stats;
    inf_drive_stats drives[DRIVES];
    inf_fault fault;
    inf_executor_spans(ex, 1);
    while (__atomic_load_n(&looking, __ATOMIC_RELAXED)) {
        inf_executor_stats(ex, &stats, drives);
        CHECK(inf_executor_fault(ex, &fault) == 0);
        inf_executor_take_spans(ex, spans, 4096);
        inf_executor_hold_gates(ex, 1);
        inf_executor_hold_gates(ex, 0);
        inf_executor_release_gates(ex);
        int32_t id = stats.reads_ahead % THREADS_MAX;
        const uint32_t mask = 0;
        CHECK(inf_executor_prefetch(ex, &id, 1, &mask) >= -EINVAL);
        int64_t error = 0;
        inf_ticket *ticket = inf_executor_recover(ex, &error);
        CHECK(ticket != NULL);
        CHECK(inf_ticket_wait(ex, ticket, 0, WAIT_NS, 1) == 1);
        inf_ticket_release(ex, ticket);
        usleep(2000);
    }
    return NULL;
}

static int32_t open_file(const char *directory, int64_t bytes) {
    char path[4096];
    snprintf(path, sizeof path, "%s/native_stress-XXXXXX", directory);
    int32_t fd = mkstemp(path);
    CHECK(fd >= 0);
    CHECK(unlink(path) == 0 && ftruncate(fd, bytes) == 0);
    return fd;
}

static void plan(actor *me, int32_t chunk) {
    inf_chunk *at = &me->plans[chunk];
    int32_t number = me->first + chunk;
    *at = (inf_chunk){.key = (uint64_t)number + 1,
                      .numel = NUMEL,
                      .file_offset = (int64_t)number * RUN_BYTES,
                      .run_bytes = RUN_BYTES,
                      .drive = number % DRIVES,
                      .format = FORMAT,
                      .section_count = SECTIONS,
                      .piece_numel = PIECE,
                      .sums_ptr = (uint64_t)(uintptr_t)me->sums[chunk]};
    int64_t end_at = 0;
    for (int32_t s = 0; s < SECTIONS; s++) {
        at->itemsize[s] = ITEMSIZES[s];
        at->section_at[s] = end_at;
        end_at += (int64_t)NUMEL * ITEMSIZES[s];
    }
    if (chunk == 0) return; /* one place */
    at->other_drive = at->drive;
    at->other_offset = at->file_offset + PLACES_BYTES;
    at->other_bytes = RUN_BYTES;
    at->grad_offset = at->file_offset + at->section_at[SECTIONS - 1];
    at->other_sums_ptr = (uint64_t)(uintptr_t)me->other_sums[chunk];
}

/* Random numbers of all kinds: some are denormal, infinite or NaN, and bytes of codes are any. */
static void draw_section(uint8_t *bytes, size_t count, uint64_t *random, int bf16, int fp32) {
    for (size_t i = 0; i + 4 <= count; i += 4) {
        *random = *random * 6364136223846793005u + 1442695040888963407u;
        const uint32_t drawn = (uint32_t)(*random >> 32);
        const uint32_t exponent = drawn % 61 == 0 ? drawn >> 23 & 0xFF : 100 + (drawn >> 8) % 32;
        const uint32_t bits = (drawn & 0x807FFFFFu) | exponent << 23;
        const uint32_t word = bf16 ? (bits >> 16) * 0x10001u : fp32 ? bits : drawn;
        memcpy(bytes + i, &word, 4);
    }
}

/* NaN has one payload in all sections but fp32 ones. */
static void same_payloads(uint8_t *section, int64_t numel) {
    for (int64_t i = 0; i < numel; i++) {
        uint32_t bits;
        memcpy(&bits, section + 4 * i, 4);
        if ((bits & 0x7FFFFFFFu) > 0x7F800000u) memset(section + 4 * i, 0xFF, 4);
    }
}

#define UPDATES_SUM 0x1D36A8BEu
enum { ISA_NUMEL = 1024 };
typedef uint8_t isa_sections[INF_SECTION_MAX][4 * ISA_NUMEL] __attribute__((aligned(64)));

/* One update of the first elements, by the chosen kernels. */
static void update_part(int32_t format, isa_sections at, uint8_t *grad, int32_t grad_dtype,
                        int64_t numel, int32_t algorithm) {
    int32_t itemsize[INF_SECTION_MAX], group[INF_SECTION_MAX];
    const int32_t count = inf_format_sections(format, itemsize, group);
    const inf_hyper hyper = {.decay = 0.99f, .beta1 = 0.9f, .one_minus_beta1 = 0.1f,
                             .beta2 = 0.999f, .one_minus_beta2 = 0.001f, .eps = 1e-8f,
                             .bc2_sqrt = 0.5f, .step_size = 1e-3f, .key = 7,
                             .algorithm = algorithm,
                             .flags = numel % 2 ? INF_FLAG_NESTEROV : 0};
    uint8_t *section[INF_SECTION_MAX] = {NULL};
    uint32_t needed = inf_update_sections(format, &hyper);
    if (format == INF_FORMAT_SPLIT && numel % 16 != 0) needed |= 8; /* signs of masters */
    for (int32_t s = 0; s < count; s++)
        if (needed >> s & 1u) section[s] = at[s];
    inf_update(format, section, grad, grad_dtype, numel, 0, &hyper);
    for (int32_t s = 0; s < count; s++)
        if (itemsize[s] == 4 && group[s] <= 1) same_payloads(at[s], ISA_NUMEL);
    if (grad_dtype == INF_GRAD_FP32) same_payloads(grad, ISA_NUMEL);
}

/* Updates by every instruction set have the same bits, on every machine: those of this checksum. */
static void check_updates(void) {
    static const int32_t FORMATS[] = {INF_FORMAT_SPLIT, INF_FORMAT_BF16, INF_FORMAT_COMPACT,
                                      INF_FORMAT_FP32};
    static const char *const NAMES[] = {"portable", "avx2", "avx512"};
    static const int64_t NUMELS[] = {1, 15, 16, 33, 64, 256, 320, 1000};
    static isa_sections at;
    static uint8_t grad[4 * ISA_NUMEL] __attribute__((aligned(64)));
    const char *const chosen = inf_isa();
    for (size_t i = 0; i < sizeof NAMES / sizeof NAMES[0]; i++) {
        if (!inf_isa_select(NAMES[i])) continue;
        uint64_t random = 1;
        uint32_t sum = 0;
        for (int32_t k = 0; k < 4 * 3 * 8 * 3 * 2; k++) {
            static const int32_t ALGORITHMS[] = {INF_ADAMW, INF_MUON_MOMENTUM, INF_MUON};
            const int32_t format = FORMATS[k % 4], dtype = INF_GRAD_BF16 + k / 4 % 3;
            int32_t itemsize[INF_SECTION_MAX], group[INF_SECTION_MAX];
            const int32_t count = inf_format_sections(format, itemsize, group);
            for (int32_t s = 0; s < count; s++)
                draw_section(at[s], sizeof at[s], &random,
                             itemsize[s] == 2 && (s != 1 || format == INF_FORMAT_COMPACT),
                             itemsize[s] == 4);
            draw_section(grad, sizeof grad, &random, dtype != INF_GRAD_FP32,
                         dtype == INF_GRAD_FP32);
            update_part(format, at, grad, dtype, NUMELS[k / 12 % 8], ALGORITHMS[k / 96 % 3]);
            for (int32_t s = 0; s < count; s++) sum = inf_crc32c(sum, at[s], sizeof at[s]);
            sum = inf_crc32c(sum, grad, sizeof grad);
        }
        if (sum != UPDATES_SUM) fprintf(stderr, "%s: 0x%08Xu\n", NAMES[i], sum);
        CHECK(sum == UPDATES_SUM);
    }
    CHECK(inf_isa_select(chosen) == 1);
}

/* What does not depend on the machine must be the same on every one. */
static void check_kernels(void) {
    CHECK(inf_crc32c(0, "123456789", 9) == 0xE3069283u);
    float master[5] = {1.0f, -2.5f, 3.14159274f, 1e-30f, -7e20f};
    float back[5];
    uint16_t hi[5];
    int16_t lo[5];
    inf_split_master(master, hi, lo, 5);
    inf_join_master(hi, lo, back, 5);
    CHECK(memcmp(master, back, sizeof back) == 0);
    float m[1] = {0.0f}, v[1] = {0.0f}, grad[1] = {0.5f};
    uint8_t *sections[INF_SECTION_MAX] = {(uint8_t *)hi, (uint8_t *)lo, (uint8_t *)m, (uint8_t *)v};
    inf_update(INF_FORMAT_SPLIT, sections, grad, INF_GRAD_FP32, 1, 0, &HYPER);
    inf_join_master(hi, lo, back, 1);
    CHECK(m[0] == 0.1f * 0.5f && v[0] == 0.01f * 0.25f && back[0] < 1.0f && back[0] > 0.8f);
}

static void run(inf_executor *ex, int32_t threads, int32_t rounds) {
    actor *actors = calloc((size_t)threads, sizeof *actors);
    CHECK(actors != NULL);
    pthread_t looker;
    CHECK(pthread_create(&looker, NULL, look, ex) == 0);
    for (int32_t t = 0; t < threads; t++) {
        actor *me = &actors[t];
        me->ex = ex;
        me->random = 0x9E3779B97F4A7C15u * (uint64_t)(t + 1);
        me->first = t * CHUNKS_EACH;
        me->rounds = rounds;
        for (int32_t i = 0; i < CHUNKS_EACH; i++) plan(me, i);
        CHECK(inf_executor_define(ex, me->plans, CHUNKS_EACH, me->ids) == 0);
        CHECK(pthread_create(&me->thread, NULL, act, me) == 0);
    }
    int64_t cancelled = 0, escaped = 0;
    for (int32_t t = 0; t < threads; t++) {
        CHECK(pthread_join(actors[t].thread, NULL) == 0);
        cancelled += actors[t].cancelled;
        escaped += actors[t].escaped;
    }
    __atomic_store_n(&looking, 0, __ATOMIC_RELAXED);
    CHECK(pthread_join(looker, NULL) == 0);
    inf_exec_stats stats;
    inf_drive_stats drives[DRIVES];
    inf_executor_stats(ex, &stats, drives);
    CHECK(stats.jobs_done == stats.jobs_submitted && stats.jobs_failed == 0 &&
          stats.submissions_live == 0);
    printf(
        "%llu jobs, %llu updates, %lld given up, %lld without target, %llu ahead (%llu dropped), "
        "%llu retries, %llu short, %llu bytes to the device, %llu from it\n",
        (unsigned long long)stats.jobs_done, (unsigned long long)stats.updates,
        (long long)cancelled, (long long)escaped, (unsigned long long)stats.reads_ahead,
        (unsigned long long)stats.reads_ahead_dropped,
        (unsigned long long)(drives[0].retries + drives[1].retries),
        (unsigned long long)(drives[0].short_transfers + drives[1].short_transfers),
        (unsigned long long)stats.copied_bytes[0], (unsigned long long)stats.copied_bytes[1]);
    free(actors);
}

#define FAR_AT ((int64_t)1 << 50)
#define FAR_CHUNKS 64
#define FAR_ROUNDS 200

static inf_ticket *move(inf_executor *ex, const int32_t *ids, int32_t kind) {
    inf_job jobs[FAR_CHUNKS] = {{0}};
    for (int32_t i = 0; i < FAR_CHUNKS; i++) {
        uint32_t mask = (ALL >> 1) | (i & 1 ? INF_MASK_MOVE_ONLY : 0); /* or through a worker */
        jobs[i] = (inf_job){.chunk = ids[i], .kind = kind, .mask = mask, .base = -1};
        for (int32_t s = 0; s < SECTIONS - 1; s++) jobs[i].ptr[s] = 64; /* never accessed */
    }
    int64_t error = 0;
    inf_ticket *ticket =
        inf_executor_submit(ex, jobs, FAR_CHUNKS, NULL, 0, NULL, 0, kind % 3, NULL, &error);
    CHECK(ticket != NULL);
    return ticket;
}

/* Drives that answer at once: files of no length, offsets that no file system has. */
static void null_drives(const char *directory, int32_t batch) {
    const int64_t bytes = 12 * NUMEL;
    inf_exec_config config = {.workers = 2,
                              .large_count = 4,
                              .large_bytes = bytes,
                              .drive_count = DRIVES,
                              .hold_ns = 2000000,
                              .seam = {.null_batch = batch, .null_computes = 0}};
    inf_drive_config drives[DRIVES];
    for (int32_t d = 0; d < DRIVES; d++)
        drives[d] = (inf_drive_config){
            .fd = open_file(directory, 0), .depth = 8, .block_bytes = 16384};
    int32_t error = 0;
    char why[512] = "";
    inf_executor *ex = inf_executor_open(&config, drives, &error, why, sizeof why);
    CHECK(ex != NULL);
    inf_chunk chunks[FAR_CHUNKS];
    int32_t ids[FAR_CHUNKS];
    for (int32_t i = 0; i < FAR_CHUNKS; i++) {
        chunks[i] = (inf_chunk){.key = (uint64_t)i + 1,
                                .numel = NUMEL,
                                .file_offset = FAR_AT + i * bytes,
                                .other_offset = -1,
                                .grad_offset = -1,
                                .run_bytes = bytes,
                                .drive = i % DRIVES,
                                .format = INF_FORMAT_SPLIT,
                                .section_count = SECTIONS - 1,
                                .piece_numel = PIECE,
                                .section_at = {0, 2 * NUMEL, 4 * NUMEL, 8 * NUMEL}};
        for (int32_t s = 0; s < SECTIONS - 1; s++) chunks[i].itemsize[s] = ITEMSIZES[s];
    }
    CHECK(inf_executor_define(ex, chunks, FAR_CHUNKS, ids) == 0);
    for (int32_t round = 0; round < FAR_ROUNDS; round++) {
        inf_ticket *first = move(ex, ids, INF_JOB_STORE);
        inf_ticket *second = move(ex, ids, INF_JOB_FETCH);
        CHECK(inf_ticket_wait(ex, first, 0, WAIT_NS, 1) == 1);
        CHECK(inf_ticket_wait(ex, second, 0, WAIT_NS, 1) == 1);
        CHECK(inf_ticket_words(first)[0] == 1 && inf_ticket_words(second)[0] == 1);
        inf_ticket_release(ex, first);
        inf_ticket_release(ex, second);
    }
    inf_exec_stats stats;
    inf_drive_stats moved[DRIVES];
    inf_executor_stats(ex, &stats, moved);
    for (int32_t d = 0; d < DRIVES; d++) {
        uint64_t wanted = (uint64_t)(FAR_ROUNDS * FAR_CHUNKS / DRIVES * bytes);
        CHECK(moved[d].bytes_read == wanted && moved[d].bytes_written == wanted);
    }
    inf_executor_shut(ex, 0);
    CHECK(inf_executor_wait_idle(ex, WAIT_NS) == 1);
    inf_executor_stop(ex);
    inf_executor_free(ex);
    for (int32_t d = 0; d < DRIVES; d++) close(drives[d].fd);
}

int main(int argc, char **argv) {
    if (argc < 3) {
        fprintf(stderr, "usage: native_stress DIRECTORY ROUNDS [THREADS [LIBURING]]\n");
        return 2;
    }
    alarm(SECONDS_MAX);
    const char *isa = getenv("STRESS_ISA");
    CHECK(isa == NULL || inf_isa_select(isa) == 1);
    check_kernels();
    check_updates();
    null_drives(argv[1], 1);
    null_drives(argv[1], 8);
    int32_t threads = argc > 3 ? atoi(argv[3]) : 4;
    CHECK(threads >= 1 && threads <= THREADS_MAX);
    char why[512] = "";
    bool uring = argc > 4;
    if (uring && inf_uring_load(argv[4], why, sizeof why) != 0) {
        fprintf(stderr, "native_stress: %s\n", why);
        return 1;
    }
    for (int32_t kind = INF_SEAM_NONE; kind <= INF_SEAM_SHORT; kind++) {
        inf_exec_config config = {.uring = uring,
                                  .verify = 1 + (kind & 1),
                                  .workers = 2,
                                  .threads_per_drive = 3,
                                  .small_count = 2,
                                  .large_count = 4,
                                  .small_bytes = 8192,
                                  .large_bytes = RUN_BYTES,
                                  .drive_count = DRIVES,
                                  .hold_ns = 2000000,
                                  .seam = {.seed = 7,
                                           .delay_us_max = kind == INF_SEAM_NONE ? 0 : 100,
                                           .fault = {.kind = kind,
                                                     .nth = 40,
                                                     .op = kind & 1,
                                                     .error = EAGAIN}}};
        inf_drive_config drives[DRIVES];
        for (int32_t d = 0; d < DRIVES; d++) {
            int32_t fd = open_file(argv[1], 2 * PLACES_BYTES);
            drives[d] = (inf_drive_config){.fd = fd, .depth = 8, .block_bytes = 16384};
        }
        int32_t error = 0;
        inf_executor *ex = inf_executor_open(&config, drives, &error, why, sizeof why);
        if (ex == NULL) {
            fprintf(stderr, "native_stress: %s (%d)\n", why, error);
            return 1;
        }
        sim_reset((uint64_t)kind, kind & 1 ? 0 : 200);
        attach(ex);
        __atomic_store_n(&looking, 1, __ATOMIC_RELAXED);
        run(ex, threads, atoi(argv[2]));
        inf_executor_shut(ex, kind & 1);
        CHECK(inf_executor_wait_idle(ex, WAIT_NS) == 1);
        inf_executor_stop(ex);
        inf_executor_free(ex);
        for (int32_t d = 0; d < DRIVES; d++) close(drives[d].fd);
    }
    printf("native_stress: %s, %s, %s: ok\n", uring ? "io_uring" : "threads", inf_isa(),
           inf_crc32c_name(-1));
    return 0;
}
