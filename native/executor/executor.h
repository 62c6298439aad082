/* Types and functions that the executor's files share. The interface is executor.cdef.h.
 *
 *   submit -> chunk FIFO -> [gate] -> slot -> read -> compute -> write -> done
 *                                          drive    workers    drive
 *
 * Idle slots read ahead for UPDATEs that wait at closed gates (prefetch.c).
 *
 * One mutex guards all state. At 1 MiB a block and 10 GB/s it is locked 20,000 times a second for a
 * short time, a negligible cost (bench/executor.py measures it), and there is no lock order.
 *
 * A drive, a worker or a copying thread that works on a run never decides the run's next state. It
 * appends the run to `ended` under the mutex, and calls inf_pump before it unlocks. The pump, in
 * jobs.c, pops `ended` and decides each run's next state; no other function does. So `ended` is
 * empty whenever the mutex is free, completions do not recurse, and need no thread of their own.
 *
 * A file calls functions only of files in the lines above it (tests/test_wiring.py compares).
 *
 *   kernels/crc32c.c kernels/format.c
 *   kernels/optimizer_kernels.c
 *   kernels/chunk_pass.c kernels/comm_codec.c kernels/gradients.c
 *   memory/numa.c
 *   memory/slab.c
 *   executor/executor.c       clocks, threads, queues, spans
 *   executor/meter.c executor/slot_plan.c executor/submission.c
 *   executor/chunk_places.c
 *   executor/slots.c executor/drive.c executor/compute.c executor/device.c
 *   executor/failed_writes.c
 *   executor/prefetch.c
 *   executor/gates.c
 *   executor/jobs.c           the next state of a run, and the pump
 *   executor/loops.c rings/threads.c rings/uring.c
 *   rings/null.c
 *   executor/open.c
 *   executor/tickets.c executor/versions.c executor/submit.c
 * Threads: per drive one (io_uring) or several (threads) that transfer blocks, and workers that
 * verify, update and copy. No thread calls Python.
 *
 * A job is on at most one queue at a time (`next`), besides the FIFO of its chunk (`fifo_next`). A
 * job holds at most one slot, and takes it before any other resource, so there is no deadlock.
 * (After a failed write a job may wait for a large slot while it holds a small one:
 * failed_writes.c.)
 *
 * Functions marked [locked] require the mutex, and return with it held.
 */
#ifndef INF_EXECUTOR_H
#define INF_EXECUTOR_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include "infinity.h"
#include "memory/memory.h"

#pragma GCC visibility push(default) /* aio/_handles.py looks some of them up by name */
#include "executor.cdef.h"
#pragma GCC visibility pop

#define INF_PRIORITY_COUNT 3
/* The class of reads ahead at a drive: after every priority, and without fair turns. */
#define INF_CLASS_AHEAD INF_PRIORITY_COUNT
#define INF_CLASS_COUNT (INF_PRIORITY_COUNT + 1)
/* Of this many turns at slots, drives and workers, one goes to the run that has waited longest,
 * whatever its priority, so that every run progresses. */
#define INF_FAIR_TURN 8
#define INF_SPAN_COUNT 65536
#define INF_FLIGHT_MAX 32 /* flights of one direction, see device.c */
#define INF_RANGE_MAX INF_SECTION_MAX
#define INF_ALIGN 4096
#define INF_FILE_MAX 8 /* files of one drive */
/* io_uring refuses registered buffers above 1 GiB, and requests that span two buffers. */
#define INF_PIECE_BYTES ((int64_t)1 << 30)
/* In a job's mask: transfer the slot without copy and checksum. For measuring drives. */
#define INF_MASK_MOVE_ONLY 0x80000000u
/* In an UPDATE's mask: section 0 is not read but copied from ptr[1]. No effect on a resident
 * section 0. */
#define INF_MASK_PARAM_IN_MEMORY 0x40000000u
/* In a job's mask: ptr[] are addresses in device memory. */
#define INF_MASK_DEVICE 0x20000000u
/* In a FETCH's mask: the chunk has one checksum for each section (inf_section_fetch_folded). */
#define INF_MASK_FOLDED 0x10000000u
/* The kind of a job that the executor makes for a read ahead; callers never submit it. */
#define INF_JOB_PREFETCH 5

enum { INF_OP_READ = 0, INF_OP_WRITE = 1, INF_OP_COUNT = 2 };
enum {
    INF_FAULT_ERRNO = 1,
    INF_FAULT_SHORT,
    INF_FAULT_CHECKSUM,
    INF_FAULT_NO_SPACE,
    INF_FAULT_CLOSED,
    INF_FAULT_PLAN,
    INF_FAULT_CANCELLED,
    INF_FAULT_DEVICE
};
enum { INF_EARLIER_JOB = 1, INF_EARLIER_MARK = 2 };
enum {
    INF_SEAM_NONE = 0,
    INF_SEAM_ERRNO,
    INF_SEAM_SHORT,
    INF_SEAM_ZERO,
    INF_SEAM_BITFLIP,
    INF_SEAM_STALE,
    INF_SEAM_MISDIRECTED,
    INF_SEAM_LATE
};
enum {
    INF_TRACK_READ = 0,
    INF_TRACK_WRITE,
    INF_TRACK_UPDATE,
    INF_TRACK_COPY,
    INF_TRACK_TO_DEVICE,
    INF_TRACK_FROM_DEVICE
};
enum { INF_TO_DEVICE = 0, INF_FROM_DEVICE = 1, INF_DIRECTION_COUNT = 2 };
enum { INF_GATE_CLOSED = 0, INF_GATE_OPEN, INF_GATE_ESCAPED };

typedef enum {
    INF_WAITING,  /* behind another job of its chunk, or behind a gate */
    INF_STARTING, /* on `starting`, which inf_pump empties */
    INF_SLOT,     /* waits for a slot */
    INF_READING,
    INF_COMPUTING,
    INF_COPYING, /* to or from the device */
    INF_WRITING,
    INF_DONE
} inf_state;

typedef struct inf_run inf_run;
typedef struct inf_submission inf_submission;
typedef struct inf_drive inf_drive;
typedef struct inf_prefetch inf_prefetch;

typedef struct {
    inf_run *head;
    inf_run *tail;
} inf_queue;

/* Bytes that lie together in the file and in the slot. */
typedef struct {
    int64_t file_at;
    int64_t slot_at;
    int64_t bytes;
    int32_t file;
} inf_range;

/* A slot, and the bytes of the chunk's run in it. The bytes read into it and written from it may
 * differ. */
typedef struct {
    uint8_t *memory; /* NULL: none */
    int64_t bytes;   /* of all sections in it; 0 = the job needs no slot */
    int32_t index;
    int32_t pool;
    int32_t drive;
    uint32_t written;                      /* sections that are written from it */
    bool lost; /* a broken ring may still write to the slot: never use it again */
    int32_t range_count[INF_OP_COUNT];
    int64_t section_at[INF_SECTION_MAX];   /* a section's place in the slot; -1 = not in it */
    inf_range ranges[INF_OP_COUNT][INF_RANGE_MAX];
} inf_slot;

/* State of a versioned chunk's live place, `plan`. */
typedef enum {
    INF_PLACE_FREE,      /* nothing was committed yet: written in place */
    INF_PLACE_COMMITTED, /* the next write goes to the other place */
    INF_PLACE_MOVED      /* the other place is the committed one */
} inf_place;

typedef struct {
    inf_chunk plan;
    inf_run *fifo_head;
    inf_run *fifo_tail;
    inf_slot failed_write;      /* slot of a failed write: the only copy of its sections */
    uint32_t failed_write_mask; /* sections in it; 0 = none */
    inf_prefetch *prefetch;   /* the read ahead for its next UPDATE; NULL = none */
    uint32_t invalid;   /* sections whose contents are lost */
    /* Whether an UPDATE made the live version, and no STORE has changed it since: then the other
     * place has the states before that update. other_updated: the same for the other place. */
    bool updated;
    bool other_updated;
    bool exchanged; /* an undo has swapped the places, and no write has followed */
    uint32_t committed_invalid; /* invalid sections of the committed place */
    inf_place place;
    inf_fault committed_fault;
    uint32_t verified;  /* counts runs that were verified: the phase of samples */
    inf_fault fault;    /* why sections are invalid */
    int32_t id;
} inf_chunk_record;

/* A job in flight. */
struct inf_run {
    inf_run *next;
    inf_run *fifo_next;
    inf_submission *submission;
    inf_chunk_record *chunk;
    inf_run *hint_next; /* list of UPDATEs at closed gates that may be read ahead, by gate */
    inf_run *hint_previous;
    inf_prefetch *prefetch; /* the read ahead for which the run waits */
    inf_slot slot;
    inf_job job;
    inf_state state;
    uint32_t reads; /* sections of the chunk that it uses, from memory or from the drive */
    uint32_t zeros; /* used sections that are known to be zeros, and so are not read */
    int32_t priority;
    int32_t verify; /* INF_VERIFY_* of its next pass */
    int32_t cursor; /* range of the next block; `position` is its place in that range */
    int64_t position;
    int32_t blocks_in_flight;
    uint32_t rest; /* other sections, read so that a failed partial write can move as a whole */
    bool aside; /* its small slot is the chunk's failed_write; it has, or waits for, a large one */
    bool moves; /* it writes the chunk's other place */
    bool filled;
    bool faulted;
    bool reread;
    bool hinted; /* on the list by hint_next */
    bool inherits; /* it got the slot of the UPDATE before it, with the states to copy */
    bool copied_in; /* its copy from the device has ended */
    int32_t moved; /* times that its write failed and went to a reserved extent */
    int32_t direction; /* of its copy: INF_TO_DEVICE or INF_FROM_DEVICE */
    int64_t bad; /* result of its pass */
    int32_t copy_error; /* the driver's error when the copy was issued */
    bool prefetch_failed; /* its read ahead failed, so it reads again */
    uint64_t order; /* of arrival at the slots or the workers */
    int64_t start_ns;
    inf_fault fault;
    inf_fault write_fault; /* while `rest` is read: the fault of the failed write */
};

typedef enum { INF_PREFETCH_WANTED, INF_PREFETCH_READING, INF_PREFETCH_HELD } inf_prefetch_state;

/* A read ahead of an UPDATE: see prefetch.c. */
struct inf_prefetch {
    inf_run run;             /* the run that a drive reads; no FIFO, no submission */
    /* a copy of the chunk's record, for `run`: the chunk may be dropped while a drive reads */
    inf_chunk_record record;
    inf_chunk_record *chunk; /* NULL: no UPDATE will use the read */
    inf_run *taker;          /* the UPDATE that waits for the read */
    inf_prefetch *next;         /* free, or of one state, oldest first */
    inf_prefetch *previous;
    uint32_t used, have;     /* sections in its slot, and those that it reads or has read */
    bool asked;              /* requested by inf_executor_prefetch, not by a job at a gate */
    inf_prefetch_state state;
};

typedef struct {
    inf_prefetch *head;
    inf_prefetch *tail;
} inf_prefetch_list;

struct inf_ticket {
    uint32_t words[4];
    inf_submission *submission; /* NULL once done */
    inf_fault fault;
    bool released;
};

/* An event on the compute stream: see device.c. */
typedef struct inf_mark {
    struct inf_mark *next; /* on the free list */
    void *event;
    void *stream;   /* the stream that recorded it */
    uint64_t begun; /* count of all marks just before it was recorded ... */
    uint64_t ended; /* ... and just after */
} inf_mark;

struct inf_gate {
    inf_mark *mark; /* when it was opened */
    inf_gate *next; /* list of closed gates that hold a submission, oldest first */
    inf_submission *first;
    uint64_t *bases;
    uint64_t order; /* of its first submission; 0 = none yet */
    int32_t base_count;
    int32_t base_max; /* highest index that a job uses, -1 = none */
    int32_t state;
    bool stays; /* only its owner opens or releases it: it is not on the list of gates */
    int32_t users; /* Python's reference, and the submissions that are not done */
};

struct inf_submission {
    inf_submission *next; /* all live ones */
    inf_submission *previous;
    inf_submission *gate_next;
    inf_ticket *ticket;
    inf_gate *gate;
    inf_mark *mark; /* when it was submitted; NULL: nothing of it is on the device */
    uint64_t order;
    inf_seg *segs;
    inf_hyper *hypers;
    int32_t hyper_count;
    int32_t job_count;
    int32_t pending;
    int32_t unfilled;
    bool escaped;
    bool awaited; /* a thread sleeps until it is filled or done */
    inf_run runs[];
};

/* One request to a drive: a block of a job. */
typedef struct inf_request inf_request;
struct inf_request {
    inf_request *next; /* on the free list, to be sent again, or delayed by the fault injector */
    inf_drive *drive;
    inf_run *run;
    uint8_t *data;
    int64_t offset;
    int64_t block_bytes;
    int64_t bytes;  /* of the block, not yet transferred */
    int64_t ask;    /* to transfer now: `bytes`, or less if the fault injector cuts it */
    int64_t sent_ns;
    int64_t due_ns; /* fault injector: when the result is passed on */
    int64_t astray; /* fault injector: distance of `offset` from the right place */
    int64_t result;
    int32_t op;
    int32_t file;
    int32_t tries;
    int32_t inject; /* INF_SEAM_* */
    bool busy;
};

typedef struct {
    inf_queue jobs[INF_OP_COUNT][INF_CLASS_COUNT];
    int32_t in_flight[INF_OP_COUNT];
    int64_t in_flight_bytes;
    uint32_t turns[INF_OP_COUNT];
    int32_t last_op;
} inf_drive_queue;

struct inf_drive {
    struct inf_executor *ex;
    inf_drive_queue queue;
    inf_request *requests;
    inf_request *free;
    inf_request *again;
    pthread_cond_t wake; /* threads */
    pthread_t *threads;
    void *ring; /* io_uring's state */
    inf_drive_config config;
    inf_drive_stats stats;
    int64_t metered_ns; /* busy time is counted up to here */
    int64_t clock_ns;   /* fault injector: when the throttled drive is free again */
    int32_t thread_count;
    int32_t index;
    int32_t event_fd;
    int32_t fds[INF_FILE_MAX]; /* the first is the config's; -1 = none */
    int32_t dead; /* errno after the ring broke: every request fails with it */
    uint32_t kicks; /* number of wakes: a thread that is about to sleep compares it */
    bool sleeping;
};

typedef struct {
    int32_t *free;
    int32_t free_count;
    int32_t count; /* slots in use or free, without those of failed writes and of a broken ring */
    int64_t bytes;
    uint8_t *base;
    inf_queue *waiting[INF_PRIORITY_COUNT]; /* [drive] */
    int32_t *held;                          /* [drive] */
    int32_t *passed;                        /* [drive]: grants since its last fair turn */
    int32_t waiting_count;
    int32_t prefetch_count; /* slots with reads ahead that no job has taken over */
    int32_t asked_count; /* reads ahead that inf_executor_prefetch asked for */
} inf_pool;

/* A backend moves blocks: it takes a request by inf_drive_take and completes it by
 * inf_drive_done. */
typedef struct {
    const char *name;
    /* 0 or a negative errno; returns when its threads are ready */
    int32_t (*start)(inf_drive *drive);
    void (*wake)(inf_drive *drive);     /* [locked] work has come */
    void (*stop)(inf_drive *drive);     /* after ex->stopping was set: joins the threads */
} inf_backend;

typedef struct {
    struct inf_executor *ex;
    uint32_t *scratch;
    size_t scratch_words;
} inf_worker;

/* Runs whose copies have one event. */
typedef struct {
    inf_run *first; /* by `next`: they are on no queue */
    inf_run *last;
    void *event; /* each place of the ring has one */
    int64_t bytes;
    int32_t count;
    int32_t error; /* of the driver, for all of them */
} inf_flight;

/* One direction of copies. */
typedef struct {
    struct inf_executor *ex;
    inf_queue queue[INF_PRIORITY_COUNT];
    pthread_cond_t wake;
    pthread_t thread;
    void *stream;
    inf_flight flights[INF_FLIGHT_MAX]; /* a ring, in the order of the stream */
    int64_t flight_bytes;
    int64_t busy_since_ns;
    int32_t flight_first;
    int32_t flight_count;
    /* the stream is behind all marks of this compute stream that had ended at this count */
    void *behind_stream;
    uint64_t behind; /* 0 = behind none */
    int32_t direction;
    bool asked; /* the oldest flight's event was queried just now, and is pending */
    bool made;
    bool started;
} inf_copies;

struct inf_device {
    inf_device_api api;
    void *compute_stream;
    inf_mark *marks; /* free */
    uint64_t mark_count; /* atomic */
    inf_copies copies[INF_DIRECTION_COUNT];
    inf_chunk_record nothing; /* the chunk of COPYs */
    bool pinned;
    bool attached;
};

struct inf_executor {
    pthread_mutex_t lock;
    pthread_cond_t done;   /* a word of a ticket was set, or nothing is pending */
    pthread_cond_t work;   /* for workers */
    pthread_cond_t seam_wake;
    uint32_t *alarm; /* of the caller, set when a ticket fails; or NULL */
    const inf_backend *backend;
    inf_exec_config config;
    inf_chunk_record **chunks;
    int32_t *chunks_free;
    int32_t chunk_count;
    int32_t chunk_free_count;
    inf_pool pools[2]; /* small, large */
    uint8_t *slab;
    int64_t slab_bytes;
    int64_t huge_bytes;
    uint32_t slab_number; /* counts the slabs: a ring knows whether it registered this one */
    int32_t numa_error; /* a negative errno */
    inf_drive *drives;
    inf_queue ended; /* runs whose work has ended; empty whenever the lock is free */
    inf_queue starting;
    inf_queue compute[INF_PRIORITY_COUNT];
    int32_t compute_count;
    int64_t active; /* jobs past their FIFO and gate, not done */
    int64_t pending;
    inf_prefetch *prefetches; /* [slots] */
    inf_prefetch *prefetches_free;
    inf_prefetch_list wanted;       /* requested by inf_executor_prefetch, without a slot */
    inf_prefetch_list with_slot;    /* reading or held */
    int32_t prefetch_reading;       /* how many of with_slot a drive is reading */
    inf_run *hint_first;
    inf_run *hint_last;
    int64_t idle_since_ns;
    inf_submission *live;
    inf_gate *gates;
    inf_gate *gates_tail;
    uint64_t order;
    uint64_t arrivals;
    uint32_t compute_grants;
    inf_worker *workers;
    pthread_t *worker_threads;
    inf_request *held; /* seam: by due time */
    pthread_t seam_thread;
    uint64_t seam_random;
    const inf_run *seam_run; /* the run that got the injected fault */
    inf_spare *spares; /* reserved extents not used yet */
    inf_moved_write *moves; /* moved writes that Python has not taken yet */
    int32_t spare_count;
    int32_t move_count;
    int64_t seam_seen; /* requests that match the fault to inject */
    int64_t seam_met;  /* requests that got the fault */
    inf_span *spans;
    uint64_t span_count; /* since the last take */
    inf_exec_stats stats;
    struct inf_device device;
    inf_fault fault;
    int64_t holds; /* Python's references: executor, tickets and gates, in any order */
    int32_t workers_started;
    int32_t registered; /* INF_REGISTERED* or a negative errno */
    bool seam_started;
    bool seam_on;
    bool spans_on;
    bool faulted;
    bool gates_held; /* idle gates do not escape, since a running forward will open them */
    bool escaping; /* gates escape one after another until a caller opens one */
    bool shut;
    bool cancelled;
    bool stopping;
    bool stopped;
};

extern const inf_backend inf_backend_uring;
extern const inf_backend inf_backend_threads;
extern const inf_backend inf_backend_null; /* for tests and benchmarks: it moves nothing */

/* Threads of a drive that wait for requests, for the backends without a ring. `run` gets the drive.
 * inf_threads_wake is called under the lock. */
int32_t inf_threads_start(inf_drive *drive, int32_t count, void *(*run)(void *));
void inf_threads_wake(inf_drive *drive);
void inf_threads_stop(inf_drive *drive);

/* The section with the chunk's spilled gradients, as a mask; 0 = it has none. */
static inline uint32_t inf_grad_mask(const inf_chunk *chunk) {
    return inf_format_grad(chunk->format) == INF_GRAD_SECTION_NONE
               ? 0
               : 1u << (chunk->section_count - 1);
}

static inline uint32_t inf_sections_all(const inf_chunk *chunk) {
    return (1u << chunk->section_count) - 1u;
}

/* NULL: no chunk has that id. [locked] */
static inline inf_chunk_record *inf_chunk_of(const struct inf_executor *ex, int32_t id) {
    return id >= 0 && id < ex->chunk_count ? ex->chunks[id] : NULL;
}

/* A section's offset in the file, at the live place or at the other place. */
static inline int64_t inf_section_file_at(const inf_chunk *chunk, int32_t section, bool other) {
    if (inf_chunk_versioned(chunk) && (inf_grad_mask(chunk) >> section & 1u))
        return chunk->grad_offset;
    return (other ? chunk->other_offset : chunk->file_offset) + chunk->section_at[section];
}

static inline int64_t inf_align_up(int64_t bytes) {
    return (bytes + INF_ALIGN - 1) & ~(int64_t)(INF_ALIGN - 1);
}

/* executor.c */
int64_t inf_now_ns(void);
void inf_deadline(struct timespec *deadline, int64_t at_ns);
int32_t inf_cond_init(pthread_cond_t *cond); /* waits by CLOCK_MONOTONIC */
/* 0 or a negative errno */
int32_t inf_thread_start(pthread_t *thread, void *(*run)(void *), void *argument);
void inf_queue_push(inf_queue *queue, inf_run *run);
inf_run *inf_queue_pop(inf_queue *queue);
bool inf_queue_remove(inf_queue *queue, inf_run *run); /* false: it was not queued */
/* no job is pending, and no drive reads ahead. [locked] */
bool inf_idle(const struct inf_executor *ex);
/* [locked] */
void inf_span_add(struct inf_executor *ex, const inf_run *run, int32_t track, int64_t start_ns,
                  int64_t bytes);
/* the drive that a run reads from or writes to */
int32_t inf_run_drive(const inf_run *run, int32_t op);
/* Between these two calls the caller runs on the config's CPUs, so that new threads inherit them;
 * an error is stored in numa_error. */
void inf_numa_enter(struct inf_executor *ex, cpu_set_t *before);
void inf_numa_leave(struct inf_executor *ex, const cpu_set_t *before);

/* meter.c, all [locked] */
void inf_meter_sent(inf_drive *drive, inf_request *request);
void inf_meter_result(inf_drive *drive, const inf_request *request);
void inf_meter_moved(inf_drive *drive, int32_t op, int64_t bytes);
/* called before the number in flight changes, and before it is read */
void inf_meter_tick(inf_drive *drive, int64_t now_ns);

/* chunk_places.c, all [locked] */
bool inf_run_moves(const inf_run *run); /* whether it will write its chunk's other place */
/* the plan of the chunk at its other place, which is written next */
inf_chunk inf_chunk_other(const inf_chunk *chunk);
/* swaps the two places, with all records of them */
void inf_chunk_swap_places(inf_chunk_record *chunk, uint64_t generation);
/* makes the other place, which the run has written, the live one */
void inf_chunk_flip(inf_chunk_record *chunk, const inf_run *run);
void inf_chunk_renew(inf_chunk_record *chunk, uint32_t written); /* the live place has these */
uint32_t inf_run_older_after(const inf_run *run); /* `older` once the run has ended well */
/* Records whether the run's write came from an UPDATE or a STORE. */
void inf_chunk_note_write(inf_chunk_record *chunk, const inf_run *run);
bool inf_file_known(const struct inf_executor *ex, int32_t drive, int32_t file);
bool inf_files_known(const struct inf_executor *ex, const inf_chunk *chunk); /* all of them */

/* slot_plan.c, all [locked] */
uint32_t inf_run_used(const inf_run *run);    /* sections that it uses, in its slot or resident */
uint32_t inf_run_written(const inf_run *run); /* sections that it writes */
void inf_run_make_whole(inf_run *run, bool moves); /* makes it write what a new version lacks */
void inf_slot_plan(inf_slot *slot, const inf_chunk *chunk, uint32_t used, uint32_t reads,
                   uint32_t written, bool moves);
/* Plans again which ranges of the slot are written, and where to. */
void inf_slot_plan_writes(inf_slot *slot, const inf_chunk *chunk, uint32_t written, bool other);
void inf_slot_plan_reads(inf_slot *slot, const inf_chunk *chunk, uint32_t reads);
void inf_run_plan_slot(inf_run *run);
/* where a section is during its pass: in the slot, or resident */
uint8_t *inf_section_address(const inf_run *run, int32_t section);

/* submission.c, all [locked] */
void inf_run_fail(inf_run *run, int32_t kind, int32_t op, int32_t error, int64_t offset,
                  int64_t length);
/* The run's targets hold their data, and its sources may be reused. */
void inf_run_filled(struct inf_executor *ex, inf_run *run);
/* keeps the first fault of a submission */
void inf_submission_fail(struct inf_executor *ex, inf_submission *submission,
                         const inf_fault *fault);

/* slots.c, all [locked] */
int32_t inf_pool_make(struct inf_executor *ex, inf_pool *pool, int32_t count, int64_t bytes,
                      uint8_t *base);
void inf_pool_free(const inf_pool *pool);
void inf_slot_wait(struct inf_executor *ex, inf_run *run);   /* queues it for a slot */
bool inf_slot_unwait(struct inf_executor *ex, inf_run *run); /* false: it was not waiting */
/* grants a slot to the run whose turn it is, and returns the run; NULL: none waits */
inf_run *inf_slot_next(struct inf_executor *ex, inf_pool *pool);
/* removes any waiting run; NULL: none waits */
inf_run *inf_slot_waiting(inf_pool *pool, int32_t drive_count);
void inf_slot_release(struct inf_executor *ex, inf_slot *slot);
void inf_slot_put_by(struct inf_executor *ex, inf_slot *slot);   /* removes it from its pool */
void inf_slot_put_back(struct inf_executor *ex, inf_slot *slot); /* returns it to its pool */
/* the most slots that one drive may hold */
int32_t inf_held_max(const struct inf_executor *ex, const inf_pool *pool);
/* takes a slot without queueing; false: none is free */
bool inf_slot_take(struct inf_executor *ex, inf_slot *slot);

/* drive.c, all [locked] */
/* the drive must not be dead */
void inf_drive_queue_run(struct inf_executor *ex, inf_run *run, int32_t op);
/* NULL: no request may be sent. Injected faults may end runs here: call inf_pump afterwards. */
inf_request *inf_drive_take(inf_drive *drive);
void inf_drive_done(inf_drive *drive, inf_request *request, int64_t result);
void inf_drive_cancel(inf_drive *drive);
bool inf_drive_unqueue(inf_drive *drive, inf_run *run, int32_t op); /* false: all blocks issued */
/* queues its remaining blocks at another priority */
void inf_drive_requeue(inf_drive *drive, inf_run *run, int32_t op);
/* the ring broke: fails every request in flight */
void inf_drive_break(inf_drive *drive, int32_t error);
/* passes on the first result that the fault injector delays */
void inf_seam_release(struct inf_executor *ex);

/* compute.c, [locked] */
void inf_run_queue_compute(struct inf_executor *ex, inf_run *run);
/* processes one run, unlocked meanwhile; false: none waits */
bool inf_worker_step(inf_worker *worker);

/* device.c; [locked] but for inf_device_mark, attach, stop, pin, unpin and inf_copies_enter */
inf_mark *inf_device_mark(struct inf_executor *ex, int32_t *error);
void inf_device_unmark(struct inf_executor *ex, inf_mark *mark);
bool inf_device_brings(const inf_run *run);
bool inf_device_takes(const inf_run *run);
void inf_device_queue(struct inf_executor *ex, inf_run *run, int32_t direction);
/* `run` is the function of each direction's thread; it gets an inf_copies */
int32_t inf_device_attach(struct inf_executor *ex, const inf_device_api *api, void *(*run)(void *));
void inf_device_stop(struct inf_executor *ex);
/* Pins a slab if a device is attached; *pinned: whether it is pinned. 0, or an error. */
int32_t inf_device_pin(struct inf_executor *ex, uint8_t *slab, int64_t bytes, bool *pinned);
void inf_device_unpin(struct inf_executor *ex, uint8_t *slab);
/* a thread calls this once before inf_copies_step */
void inf_copies_enter(const inf_copies *copies);
/* issues copies, or waits for copies, unlocked meanwhile; false: none is queued or in flight */
bool inf_copies_step(inf_copies *copies);

/* failed_writes.c, all [locked] */
/* Moves a failed write to a reserved extent. False: no extent suits, or the run may not move. */
bool inf_run_move_failed_write(struct inf_executor *ex, inf_run *run);
/* `rest` was read, or could not be; false: the run has ended */
bool inf_run_rest_loaded(struct inf_executor *ex, inf_run *run, int64_t bad);
/* ends the run without `rest`: its write has failed */
void inf_run_give_up_rest(struct inf_executor *ex, inf_run *run);
/* keeps the data of a failed write; false: the run's fault is not a failed write */
bool inf_run_keep_failed_write(struct inf_executor *ex, inf_run *run);
void inf_run_take_failed_write(struct inf_executor *ex, inf_run *run);
void inf_chunk_drop_failed_write(struct inf_executor *ex, inf_chunk_record *chunk);
/* whether the run's drive is marked as failed */
bool inf_run_refused(const struct inf_executor *ex, inf_run *run);

/* prefetch.c, all [locked] */
/* makes records for this many slots in place of the earlier ones; none may be in use */
int32_t inf_prefetch_make(struct inf_executor *ex, int32_t slot_count);
/* starts reads ahead while slots are idle */
void inf_prefetch_begin(struct inf_executor *ex);
/* false: the list is full */
bool inf_prefetch_want(struct inf_executor *ex, inf_chunk_record *chunk, int32_t pool,
                       const inf_job *update);
/* frees the slot of a read ahead for a job; false: no slot can be freed */
bool inf_prefetch_yield(struct inf_executor *ex, int32_t pool);
/* An UPDATE begins. HELD: it owns the slot of its read ahead; READING: it waits for that read;
 * WANTED: nothing was read. */
inf_prefetch_state inf_prefetch_take(struct inf_executor *ex, inf_run *run);
/* The last block of a read ahead has ended. Returns the UPDATE that waited for it, or NULL: with
 * the slot, without one, or faulted. */
inf_run *inf_prefetch_moved(struct inf_executor *ex, inf_run *run);
void inf_prefetch_promote(struct inf_executor *ex, inf_prefetch *prefetch, int32_t class);
/* these sections will be written, so data that was read ahead of them is stale */
void inf_prefetch_written(struct inf_executor *ex, inf_chunk_record *chunk, uint32_t mask);
/* drops the chunk's read ahead */
void inf_prefetch_drop(struct inf_executor *ex, inf_chunk_record *chunk);
void inf_prefetch_drop_all(struct inf_executor *ex);
/* the run is an UPDATE, first in its FIFO, at a closed gate */
void inf_prefetch_hint(struct inf_executor *ex, inf_run *run);
void inf_prefetch_unhint(struct inf_executor *ex, inf_run *run);

/* gates.c, all [locked] */
void inf_run_consider(struct inf_executor *ex, inf_run *run); /* starts it if FIFO and gate allow */
void inf_gate_attach(struct inf_executor *ex, inf_gate *gate, inf_submission *submission);
void inf_gate_drop_user(struct inf_executor *ex, inf_gate *gate);
/* the submission is done: removes it from its gate */
void inf_gate_detach(struct inf_executor *ex, inf_submission *submission);
void inf_gate_let_go(struct inf_executor *ex, inf_gate *gate, int32_t state);
void inf_gates_escape(struct inf_executor *ex, uint64_t order_max);
void inf_gates_escape_all(struct inf_executor *ex); /* also gates that stay */
void inf_gates_escape_for(struct inf_executor *ex, inf_submission *submission);
bool inf_gate_escape_oldest(struct inf_executor *ex);

/* jobs.c, [locked]: a thread that has changed a run or a queue calls this before it unlocks */
void inf_pump(struct inf_executor *ex);

/* loops.c: functions of the threads; the argument is an inf_worker, an inf_copies, the executor */
void *inf_worker_main(void *worker);
void *inf_copies_main(void *copies);
void *inf_seam_main(void *executor);

/* open.c */
/* Drops a reference, and frees with the last. [locked], unlocks. */
void inf_executor_let_go(struct inf_executor *ex);

#endif
