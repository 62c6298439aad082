/* The executor's inside: what its files share. The interface is executor.cdef.h.
 *
 *   submit -> chunk FIFO -> [gate] -> slot -> read -> compute -> write -> done
 *                                          drive    workers    drive
 *
 * Slots that are idle read ahead, for UPDATEs at closed gates (prefetch.c).
 *
 * One mutex guards everything. At 1 MiB a block and 10 GB/s that is 20,000 short critical sections
 * a second, which is nothing beside what they order (bench/executor.py measures that); and there is
 * no lock order to get wrong.
 *
 * What works on runs (a drive, a worker, a copying thread) never decides what follows. It appends
 * a run whose work has ended to `ended`, under the mutex, and its thread calls inf_pump before it
 * unlocks. The pump pops `ended` and decides each run's next state, in jobs.c and nowhere else. So
 * `ended` is empty whenever the mutex is free, no completion recurses, no thread is woken for it.
 *
 * Each file names functions only of files in lines above its own (tests/test_wiring.py compares).
 *
 *   kernels/crc32c.c kernels/format.c kernels/gradients.c
 *   kernels/optimizer_kernels.c
 *   kernels/chunk_pass.c kernels/comm_codec.c
 *   memory/numa.c
 *   memory/slab.c
 *   executor/executor.c       clocks, threads, queues, spans
 *   executor/meter.c executor/chunk_state.c executor/slot_plan.c executor/submission.c
 *   executor/slots.c executor/drive.c executor/compute.c executor/device.c
 *   executor/failed_writes.c
 *   executor/prefetch.c
 *   executor/gates.c
 *   executor/jobs.c           the next state of a run, and the pump
 *   executor/loops.c rings/threads.c rings/uring.c
 *   rings/null.c
 *   executor/open.c
 *   executor/tickets.c executor/versions.c executor/submit.c
 * Threads: per drive one (io_uring) or several (threads) that move blocks, and workers that verify,
 * update, copy. None of them knows Python.
 *
 * A job is on at most one queue at a time (`next`), besides the FIFO of its chunk (`fifo_next`). A
 * job holds at most one slot and takes it before anything else, so there is no cycle of waiting. (A
 * write that failed may have it wait for a large slot while it holds a small one, and for nothing
 * else: failed_writes.c.)
 *
 * Functions marked [locked] want the mutex held and keep it.
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
/* Of reads at a drive: those ahead of their time come after every priority, and have no fair
 * turns. */
#define INF_CLASS_AHEAD INF_PRIORITY_COUNT
#define INF_CLASS_COUNT (INF_PRIORITY_COUNT + 1)
/* Of the turns at slots, drives and workers one in so many goes to who waited longest, whatever its
 * priority: so that all progress. */
#define INF_FAIR_TURN 8
#define INF_SPAN_COUNT 65536
#define INF_FLIGHT_MAX 32 /* flights of one direction, see device.c */
#define INF_RANGE_MAX INF_SECTION_MAX
#define INF_ALIGN 4096
#define INF_FILE_MAX 8 /* files of one drive */
/* io_uring takes no registered buffer above 1 GiB, and no request that spans two. */
#define INF_PIECE_BYTES ((int64_t)1 << 30)
/* In a job's mask: move the slot as it is; no copy, no checksum. For measuring drives. */
#define INF_MASK_MOVE_ONLY 0x80000000u
/* In an UPDATE's mask: section 0 is not read but copied from ptr[1]; without effect on a resident
 * section 0. */
#define INF_MASK_PARAM_IN_MEMORY 0x40000000u
/* In a job's mask: ptr[] are addresses in device memory. */
#define INF_MASK_DEVICE 0x20000000u
/* In a FETCH's mask: the chunk has one checksum for each section (inf_section_fetch_folded). */
#define INF_MASK_FOLDED 0x10000000u
/* The kind of a read ahead's own job; it is never submitted. */
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
    INF_STARTING, /* on the list that inf_pump works off */
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

/* A slot, and which bytes of the chunk's run it holds. What is read into it is not always what is
 * written from it. */
typedef struct {
    uint8_t *memory; /* NULL: none */
    int64_t bytes;   /* of all sections in it; 0 = the job needs no slot */
    int32_t index;
    int32_t pool;
    int32_t drive;
    uint32_t written;                      /* sections that are written from it */
    /* a broken ring may still touch it: never to be used again */
    bool lost;
    int32_t range_count[INF_OP_COUNT];
    int64_t section_at[INF_SECTION_MAX];   /* where a section lies in it; -1 = not in it */
    inf_range ranges[INF_OP_COUNT][INF_RANGE_MAX];
} inf_slot;

/* What a versioned chunk's live place, `plan`, is. */
typedef enum {
    INF_PLACE_FREE,      /* nothing was committed yet: written in place */
    INF_PLACE_COMMITTED, /* what is written next goes to the other place */
    INF_PLACE_MOVED      /* the other place is the committed one */
} inf_place;

typedef struct {
    inf_chunk plan;
    inf_run *fifo_head;
    inf_run *fifo_tail;
    inf_slot failed_write;      /* of a write that failed: the only copy of its sections */
    uint32_t failed_write_mask; /* 0 = nothing is kept */
    inf_prefetch *prefetch;   /* what was, or will be, read for its next UPDATE; NULL = nothing */
    uint32_t invalid;   /* sections whose contents are lost */
    /* Whether an UPDATE made the version that is live, and no STORE has changed it since: then the
     * other place has the states before it; the same of the other place. */
    bool updated;
    bool other_updated;
    bool exchanged; /* the version before was gone back to, and nothing was written since */
    uint32_t committed_invalid; /* and those of the committed place */
    inf_place place;
    inf_fault committed_fault;
    uint32_t verified;  /* counts runs that were verified: the phase of samples */
    inf_fault fault;    /* why they are invalid */
    int32_t id;
} inf_chunk_record;

/* A job in flight. */
struct inf_run {
    inf_run *next;
    inf_run *fifo_next;
    inf_submission *submission;
    inf_chunk_record *chunk;
    inf_run *hint_next; /* UPDATEs behind closed gates that want to be read ahead, by gate */
    inf_run *hint_previous;
    inf_prefetch *prefetch; /* whose read it waits for */
    inf_slot slot;
    inf_job job;
    inf_state state;
    uint32_t reads; /* sections that it takes from the chunk, in memory or on the drive */
    uint32_t zeros; /* sections that it takes, which are not read but known to be zeros */
    int32_t priority;
    int32_t verify; /* of its next pass */
    int32_t cursor; /* next block: range, and position in it */
    int64_t position;
    int32_t blocks_in_flight;
    uint32_t rest; /* sections that are read to make a failed write of a part one of the whole */
    bool aside; /* its small slot is the chunk's failed_write: it has, or waits for, a large one */
    bool moves; /* it writes the chunk's other place */
    bool filled;
    bool faulted;
    bool reread;
    bool hinted; /* on the list of those that want to be read ahead */
    bool copied_in; /* what the device has of it is here */
    int32_t moved; /* how often its write failed and went to a spare range */
    int32_t direction; /* of its copy to or from the device */
    int64_t bad; /* what its pass returned */
    int32_t copy_error; /* of the driver, when that copy was handed to it */
    bool prefetch_failed; /* its read ahead failed: it reads for itself */
    uint64_t order; /* of arrival, at the slots or the workers */
    int64_t start_ns;
    inf_fault fault;
    inf_fault write_fault; /* while `rest` is read: why */
};

typedef enum { INF_PREFETCH_WANTED, INF_PREFETCH_READING, INF_PREFETCH_HELD } inf_prefetch_state;

/* A read ahead of an UPDATE: see prefetch.c. */
struct inf_prefetch {
    inf_run run;             /* what a drive moves; it is in no FIFO and has no submission */
    /* the run's chunk, a copy: the real one may be dropped while a drive reads */
    inf_chunk_record record;
    inf_chunk_record *chunk; /* NULL: what is being read is not wanted any more */
    inf_run *taker;          /* the UPDATE that waits for the read */
    inf_prefetch *next;         /* free, or of one state, oldest first */
    inf_prefetch *previous;
    uint32_t have;           /* sections that it reads, or has, as they are on the drive */
    bool asked;              /* by inf_executor_prefetch, not for a job at a gate */
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
    struct inf_mark *next; /* of those that are free */
    void *event;
    void *stream;   /* that it was recorded on */
    uint64_t begun; /* by a count of all marks: before it was recorded ... */
    uint64_t ended; /* ... and after that */
} inf_mark;

struct inf_gate {
    inf_mark *mark; /* when it was opened */
    inf_gate *next; /* of the closed gates that hold a submission, oldest first */
    inf_submission *first;
    uint64_t *bases;
    uint64_t order; /* of its first submission; 0 = none yet */
    int32_t base_count;
    int32_t base_max; /* highest index that a job uses, -1 = none */
    int32_t state;
    int32_t users; /* Python's hold and the submissions that are not done */
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
    bool awaited; /* somebody sleeps until it is filled or done */
    inf_run runs[];
};

/* One request to a drive: a block of a job. */
typedef struct inf_request inf_request;
struct inf_request {
    inf_request *next; /* free, to be sent again, or held back by the seam */
    inf_drive *drive;
    inf_run *run;
    uint8_t *data;
    int64_t offset;
    int64_t block_bytes;
    int64_t bytes;  /* that are left of the block */
    int64_t ask;    /* that the backend transfers now: `bytes`, or less when the seam says so */
    int64_t sent_ns;
    int64_t due_ns; /* seam */
    int64_t astray; /* seam: how far `offset` is from where the request belongs */
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
    int64_t metered_ns; /* up to when busy time is counted */
    int64_t clock_ns;   /* seam: when the throttled drive is free again */
    int32_t thread_count;
    int32_t index;
    int32_t event_fd;
    int32_t fds[INF_FILE_MAX]; /* the first is the config's; -1 = none */
    int32_t dead; /* errno after the ring broke: every request fails with it */
    uint32_t kicks; /* counts wakes, so that a thread about to sleep sees that it must not */
    bool sleeping;
};

typedef struct {
    int32_t *free;
    int32_t free_count;
    int32_t count; /* slots that go round: not those that chunks keep or a broken ring may touch */
    int64_t bytes;
    uint8_t *base;
    inf_queue *waiting[INF_PRIORITY_COUNT]; /* [drive] */
    int32_t *held;                          /* [drive] */
    /* [drive]: grants since its fair turn, which each has for itself */
    int32_t *passed;
    int32_t waiting_count;
    int32_t prefetch_count; /* slots with reads ahead that no job has taken over */
    int32_t asked_count; /* reads ahead that inf_executor_prefetch asked for */
} inf_pool;

/* A backend moves blocks: it takes requests with inf_drive_take and gives them back with
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
    void *event; /* of this place in the ring */
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
    bool asked; /* the oldest flight was, just now, and is under way */
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
    inf_queue ended; /* their work has ended; empty whenever the lock is free */
    inf_queue starting;
    inf_queue compute[INF_PRIORITY_COUNT];
    int32_t compute_count;
    int64_t active; /* jobs past their FIFO and gate, not done */
    int64_t pending;
    inf_prefetch *prefetches; /* [slots] */
    inf_prefetch *prefetches_free;
    inf_prefetch_list wanted;       /* by inf_executor_prefetch, without a slot */
    inf_prefetch_list with_slot;    /* reading or held */
    int32_t prefetch_reading;       /* of these, how many a drive works on */
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
    const inf_run *seam_run; /* that its fault met */
    inf_spare *spares; /* not used yet */
    inf_moved_write *moves; /* not yet taken by Python */
    int32_t spare_count;
    int32_t move_count;
    int64_t seam_seen; /* requests that the fault might be injected into, */
    int64_t seam_met;  /* and those that it was */
    inf_span *spans;
    uint64_t span_count; /* since the last take */
    inf_exec_stats stats;
    struct inf_device device;
    inf_fault fault;
    int64_t holds; /* Python's: the executor, its tickets and gates, let go in any order */
    int32_t workers_started;
    int32_t registered; /* INF_REGISTERED* or a negative errno */
    bool seam_started;
    bool seam_on;
    bool spans_on;
    bool faulted;
    bool gates_held; /* somebody is on the way to open them: no gate escapes for being idle */
    bool escaping; /* gates escape one after another until someone opens one */
    bool shut;
    bool cancelled;
    bool stopping;
    bool stopped;
};

extern const inf_backend inf_backend_uring;
extern const inf_backend inf_backend_threads;
extern const inf_backend inf_backend_null; /* a seam of tests and benchmarks */

/* Threads of a drive that wait for requests: of the backends that have no ring. `run` gets the
 * drive. inf_threads_wake is called under the lock. */
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

/* NULL: there is no chunk of that id. [locked] */
static inline inf_chunk_record *inf_chunk_of(const struct inf_executor *ex, int32_t id) {
    return id >= 0 && id < ex->chunk_count ? ex->chunks[id] : NULL;
}

/* Where a section lies on the drive, at the live place or the other one. */
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
bool inf_queue_remove(inf_queue *queue, inf_run *run); /* false: it was not on it */
/* no job is pending, and no drive reads ahead. [locked] */
bool inf_idle(const struct inf_executor *ex);
/* [locked] */
void inf_span_add(struct inf_executor *ex, const inf_run *run, int32_t track, int64_t start_ns,
                  int64_t bytes);
/* that it reads from, or writes to */
int32_t inf_run_drive(const inf_run *run, int32_t op);
/* around the making of threads: the config's CPUs are the caller's meanwhile; errors are noted */
void inf_numa_enter(struct inf_executor *ex, cpu_set_t *before);
void inf_numa_leave(struct inf_executor *ex, const cpu_set_t *before);

/* meter.c, all [locked] */
void inf_meter_sent(inf_drive *drive, inf_request *request);
void inf_meter_result(inf_drive *drive, const inf_request *request);
void inf_meter_moved(inf_drive *drive, int32_t op, int64_t bytes);
/* before the number in flight changes, and before it is looked at */
void inf_meter_tick(inf_drive *drive, int64_t now_ns);

/* chunk_state.c, all [locked] */
/* whether it will write the other place */
bool inf_run_moves(const inf_run *run);
/* as it is at its other place, written next */
inf_chunk inf_chunk_other(const inf_chunk *chunk);
/* the two places, and all that is known of them, change their roles */
void inf_chunk_swap_places(inf_chunk_record *chunk, uint64_t generation);
/* the other place is the live one */
void inf_chunk_flip(inf_chunk_record *chunk);
/* these sections were written: zeros or not, they are read from now on */
void inf_chunk_nonzero(inf_chunk_record *chunk, uint32_t written);
/* Notes whether what the run wrote, where it lies now, came from an UPDATE or a STORE. */
void inf_chunk_note_write(inf_chunk_record *chunk, const inf_run *run);
bool inf_file_known(const struct inf_executor *ex, int32_t drive, int32_t file);
/* that it lies in */
bool inf_files_known(const struct inf_executor *ex, const inf_chunk *chunk);

/* slot_plan.c, all [locked] */
uint32_t inf_run_used(const inf_run *run);    /* sections that it has in its slot, or resident */
uint32_t inf_run_written(const inf_run *run); /* sections that it writes */
void inf_slot_plan(inf_slot *slot, const inf_chunk *chunk, uint32_t used, uint32_t reads,
                   uint32_t written, bool moves);
/* Lays out anew which ranges of the slot are written, and to where. */
void inf_slot_plan_writes(inf_slot *slot, const inf_chunk *chunk, uint32_t written, bool other);
void inf_slot_plan_reads(inf_slot *slot, const inf_chunk *chunk, uint32_t reads);
void inf_run_plan_slot(inf_run *run);
/* where a section is worked on */
uint8_t *inf_section_address(const inf_run *run, int32_t section);

/* submission.c, all [locked] */
void inf_run_fail(inf_run *run, int32_t kind, int32_t op, int32_t error, int64_t offset,
                  int64_t length);
/* targets hold their data and sources are free again */
void inf_run_filled(struct inf_executor *ex, inf_run *run);
/* its first fault stays */
void inf_submission_fail(struct inf_executor *ex, inf_submission *submission,
                         const inf_fault *fault);

/* slots.c, all [locked] */
int32_t inf_pool_make(struct inf_executor *ex, inf_pool *pool, int32_t count, int64_t bytes,
                      uint8_t *base);
void inf_pool_free(const inf_pool *pool);
void inf_slot_wait(struct inf_executor *ex, inf_run *run);   /* queues it for a slot */
bool inf_slot_unwait(struct inf_executor *ex, inf_run *run); /* false: it was not waiting */
/* whose turn it is: it has its slot; NULL: no run's */
inf_run *inf_slot_next(struct inf_executor *ex, inf_pool *pool);
/* takes any that waits; NULL: none does */
inf_run *inf_slot_waiting(inf_pool *pool, int32_t drive_count);
void inf_slot_release(struct inf_executor *ex, inf_slot *slot);
void inf_slot_put_by(struct inf_executor *ex, inf_slot *slot);   /* it goes round no more ... */
void inf_slot_put_back(struct inf_executor *ex, inf_slot *slot); /* ... and again */
/* the most slots that one drive may hold */
int32_t inf_held_max(const struct inf_executor *ex, const inf_pool *pool);
/* outside of the queues; false: none is free */
bool inf_slot_take(struct inf_executor *ex, inf_slot *slot);

/* drive.c, all [locked] */
/* to a drive that is not dead */
void inf_drive_queue_run(struct inf_executor *ex, inf_run *run, int32_t op);
/* Taking may end runs, too, by injected faults: pump after it. */
inf_request *inf_drive_take(inf_drive *drive);
void inf_drive_done(inf_drive *drive, inf_request *request, int64_t result);
void inf_drive_cancel(inf_drive *drive);
bool inf_drive_unqueue(inf_drive *drive, inf_run *run, int32_t op); /* false: it was issued whole */
/* what is left of it, at another priority */
void inf_drive_requeue(inf_drive *drive, inf_run *run, int32_t op);
/* fails all that is in flight; the ring is gone */
void inf_drive_break(inf_drive *drive, int32_t error);
/* hands on the first result that the seam holds back */
void inf_seam_release(struct inf_executor *ex);

/* compute.c, [locked] */
void inf_run_queue_compute(struct inf_executor *ex, inf_run *run);
/* works one run off, unlocked meanwhile; false: none waits */
bool inf_worker_step(inf_worker *worker);

/* device.c; [locked] but for inf_device_mark, attach, stop, pin, unpin and inf_copies_enter */
inf_mark *inf_device_mark(struct inf_executor *ex, int32_t *error);
void inf_device_unmark(struct inf_executor *ex, inf_mark *mark);
bool inf_device_brings(const inf_run *run);
bool inf_device_takes(const inf_run *run);
void inf_device_queue(struct inf_executor *ex, inf_run *run, int32_t direction);
/* `run` is what a thread of each direction does, with its inf_copies */
int32_t inf_device_attach(struct inf_executor *ex, const inf_device_api *api, void *(*run)(void *));
void inf_device_stop(struct inf_executor *ex);
/* Pins a slab, if the one in force is or would be; *pinned: whether it did. 0, or an error. */
int32_t inf_device_pin(struct inf_executor *ex, uint8_t *slab, int64_t bytes, bool *pinned);
void inf_device_unpin(struct inf_executor *ex, uint8_t *slab);
/* the thread that will call the next one calls this first */
void inf_copies_enter(const inf_copies *copies);
/* issues copies or waits for some, unlocked meanwhile; false: there are none */
bool inf_copies_step(inf_copies *copies);

/* failed_writes.c, all [locked] */
/* A write failed: it goes to a reserved extent. False: there is none, or the run may not move. */
bool inf_run_move_failed_write(struct inf_executor *ex, inf_run *run);
/* the rest of its place was read, or not; false: the run has ended */
bool inf_run_rest_loaded(struct inf_executor *ex, inf_run *run, int64_t bad);
/* it ends without the rest: its write has failed */
void inf_run_give_up_rest(struct inf_executor *ex, inf_run *run);
/* after a failed write; false: it was something else */
bool inf_run_keep_failed_write(struct inf_executor *ex, inf_run *run);
void inf_run_take_failed_write(struct inf_executor *ex, inf_run *run);
void inf_chunk_drop_failed_write(struct inf_executor *ex, inf_chunk_record *chunk);
/* its drive is marked: it has failed */
bool inf_run_refused(const struct inf_executor *ex, inf_run *run);

/* prefetch.c, all [locked] */
/* for so many slots, in place of those of before; none of them is in use */
int32_t inf_prefetch_make(struct inf_executor *ex, int32_t slot_count);
/* reads ahead as far as slots are idle */
void inf_prefetch_begin(struct inf_executor *ex);
/* false: one too many */
bool inf_prefetch_want(struct inf_executor *ex, inf_chunk_record *chunk, int32_t pool,
                       bool param_in_memory);
/* a job wants a slot: false, there is none to give up */
bool inf_prefetch_yield(struct inf_executor *ex, int32_t pool);
/* An UPDATE begins. HELD: it has the slot that was read into; READING: it waits for the read;
 * WANTED: nothing was read. */
inf_prefetch_state inf_prefetch_take(struct inf_executor *ex, inf_run *run);
/* The last block of a read ahead came back. The UPDATE that waited for it, if one did: with the
 * slot, without one, or faulted. */
inf_run *inf_prefetch_moved(struct inf_executor *ex, inf_run *run);
void inf_prefetch_promote(struct inf_executor *ex, inf_prefetch *prefetch, int32_t class);
/* these will be others than were read */
void inf_prefetch_written(struct inf_executor *ex, inf_chunk_record *chunk, uint32_t mask);
/* it is not wanted any more */
void inf_prefetch_drop(struct inf_executor *ex, inf_chunk_record *chunk);
void inf_prefetch_drop_all(struct inf_executor *ex);
/* an UPDATE, first in its FIFO, waits at a closed gate */
void inf_prefetch_hint(struct inf_executor *ex, inf_run *run);
void inf_prefetch_unhint(struct inf_executor *ex, inf_run *run);

/* gates.c, all [locked] */
void inf_run_consider(struct inf_executor *ex, inf_run *run); /* starts it if FIFO and gate allow */
void inf_gate_attach(struct inf_executor *ex, inf_gate *gate, inf_submission *submission);
void inf_gate_drop_user(struct inf_executor *ex, inf_gate *gate);
/* it is done: its gate need not hold it */
void inf_gate_detach(struct inf_executor *ex, inf_submission *submission);
void inf_gate_let_go(struct inf_executor *ex, inf_gate *gate, int32_t state);
void inf_gates_escape(struct inf_executor *ex, uint64_t order_max);
void inf_gates_escape_for(struct inf_executor *ex, inf_submission *submission);
bool inf_gate_escape_oldest(struct inf_executor *ex);

/* jobs.c, [locked]: whoever changed something calls it before unlocking */
void inf_pump(struct inf_executor *ex);

/* loops.c: what the threads run, with an inf_worker, an inf_copies and the executor */
void *inf_worker_main(void *worker);
void *inf_copies_main(void *copies);
void *inf_seam_main(void *executor);

/* open.c */
/* one hold less; frees with the last. [locked], unlocks */
void inf_executor_let_go(struct inf_executor *ex);

#endif
