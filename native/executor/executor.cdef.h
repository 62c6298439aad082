/* The executor's interface. cffi reads this file and executor.h includes it, so it has no
 * preprocessor lines. */

typedef struct inf_executor inf_executor;
typedef struct inf_ticket inf_ticket;
typedef struct inf_gate inf_gate;

/* The fault of a job; `op`: 0 read, 1 write, -1 neither. offset and length are bytes in the drive's
 * file. */
typedef struct {
    /* 1 errno, 2 short, 3 checksum, 4 no space, 5 closed, 6 bad plan, 7 cancelled, 8 device */
    int32_t kind;
    int32_t op;
    int32_t drive;
    int32_t error; /* errno, or the code of the device's driver; 0 = none */
    int64_t offset;
    int64_t length;
    uint64_t key;
    int32_t chunk;
    /* 1 = of an earlier job, which left the chunk invalid; 2 = refused: the drive is marked */
    int32_t earlier;
    int32_t section;
    int32_t piece;
} inf_fault;

/* A reserved extent: a failed write may go there instead. */
typedef struct {
    int32_t drive;
    int32_t file;
    int64_t offset;
    int64_t bytes;
} inf_spare;

/* A failed write that was moved to a reserved extent: the old place, the new place, and the fault.
 * If the new write fails, too, a later move follows, or the chunk keeps its slot. */
typedef struct {
    int32_t chunk;
    int32_t drive;
    int32_t file;
    int32_t to_drive;
    int32_t to_file;
    int32_t reserved;
    int64_t offset;
    int64_t to_offset;
    int64_t bytes;
    uint64_t key; /* of the chunk, since another chunk may have reused its id */
    inf_fault fault;
} inf_moved_write;

/* Traffic of a drive in one second. */
typedef struct {
    int64_t start_ns;
    uint64_t bytes_read;
    uint64_t bytes_written;
    uint64_t busy_ns;
} inf_window;

/* latency: requests by the time to their result, in the buckets of meter.c. windows: a ring; the
 * newest is at (window_count - 1) % 64. */
typedef struct {
    uint64_t bytes_read;
    uint64_t bytes_written;
    uint64_t reads;
    uint64_t writes;
    uint64_t retries;
    uint64_t short_transfers;
    uint64_t errors;
    uint64_t in_flight_max;
    uint64_t in_flight_bytes_max;
    uint64_t busy_ns;
    uint64_t depth_ns;
    uint64_t latency_max_ns[2];
    uint64_t latency[2][128];
    uint64_t window_count;
    inf_window windows[64];
    int32_t depth;
    int32_t marked;
    inf_fault mark;
} inf_drive_stats;

typedef struct {
    uint64_t jobs_submitted;
    uint64_t jobs_done;
    uint64_t jobs_failed;
    uint64_t jobs_cancelled;
    uint64_t kept_chunks;
    uint64_t updates;
    uint64_t gates_opened;
    uint64_t gates_escaped;
    uint64_t rereads;
    uint64_t checksum_failures;
    uint64_t wait_ns;
    uint64_t compute_ns;
    uint64_t spans_dropped;
    uint64_t submissions_live;
    uint64_t chunks_live;
    uint64_t reads_ahead;
    uint64_t reads_ahead_dropped;
    uint64_t copied_bytes[2]; /* to the device, and from it */
    uint64_t copied_ns[2];    /* time with at least one such copy in flight */
    uint64_t reads_ahead_live; /* slots with a read ahead that no job has taken yet */
    uint64_t moved_writes;
} inf_exec_stats;

typedef struct {
    int32_t track;
    int32_t drive;
    int32_t chunk;
    int32_t priority;
    int32_t kind;
    uint32_t mask;
    int64_t start_ns;
    int64_t end_ns;
    int64_t bytes;
} inf_span;

enum { INF_NULL_BATCH_MAX = 64 }; /* requests that a null drive completes together, at most */

/* See aio/testing.py, Fault. kind: 0 none, 1 errno, 2 short, 3 zero, 4 bitflip, 5 stale,
 * 6 misdirected, 7 late. drive: 1 + its index, 0 = any. */
typedef struct {
    int64_t nth;
    int64_t late_us;
    int32_t kind;
    int32_t op;
    int32_t error;
    int32_t drive;
    int32_t persistent;
    int32_t lasting;
    int64_t start; /* bytes [start, stop) of a file; stop 0 = its end */
    int64_t stop;
} inf_seam_fault;

/* See aio/testing.py, Seam. null_batch: 0 = real drives, else null drives that complete this many
 * requests together. null_computes: 0 = no chunk is computed, n = one chunk of n. */
typedef struct {
    uint64_t seed;
    int64_t delay_us_max;
    inf_seam_fault fault;
    int32_t null_batch;
    int32_t null_computes;
} inf_seam;

/* Speeds: the fault injector throttles the drive to them (0: it does not); reads and writes share a
 * drive's time. */
typedef struct {
    int32_t fd;
    int32_t depth;
    int64_t block_bytes;
    double read_bytes_per_s;
    double write_bytes_per_s;
} inf_drive_config;

typedef struct {
    int32_t uring;  /* 1 io_uring, 0 threads */
    int32_t verify; /* 0 off, 1 full, 2 sample */
    int32_t workers;
    int32_t threads_per_drive;
    int32_t small_count;
    int32_t large_count;
    int32_t drive_count;
    int64_t small_bytes;
    int64_t large_bytes;
    int64_t hold_ns;
    inf_seam seam;
    /* 1 + the NUMA node of the slab, with the threads' CPUs in `cpus` (one bit each); 0: the kernel
     * chooses both */
    int32_t numa;
    uint64_t cpus[16]; /* INF_CPU_MAX */
} inf_exec_config;

/* Functions of the compute device's driver, as addresses; each returns 0 or the driver's code.
 * Streams and events are void *, device addresses uint64_t. */
typedef struct {
    /* a thread makes this context current, calls other functions, and restores its former one */
    uint64_t context;
    uint64_t set_current;       /* (void *context) */
    uint64_t get_current;       /* (void **context) */
    uint64_t stream_create;     /* (void **stream, unsigned flags) */
    uint64_t stream_destroy;    /* (void *stream) */
    uint64_t stream_wait;       /* (void *stream): blocks until the stream is empty */
    uint64_t stream_wait_event; /* (void *stream, void *event, unsigned flags) */
    uint64_t event_create;      /* (void **event, unsigned flags) */
    uint64_t event_destroy;     /* (void *event) */
    uint64_t event_record;      /* (void *event, void *stream) */
    uint64_t event_query;       /* (void *event): 600 = not reached yet */
    uint64_t event_wait;        /* (void *event): blocks */
    uint64_t to_device;         /* (uint64_t to, const void *from, size_t bytes, void *stream) */
    uint64_t from_device;       /* (void *to, uint64_t from, size_t bytes, void *stream) */
    uint64_t host_register;     /* (void *memory, size_t bytes, unsigned flags): pins it */
    uint64_t host_unregister;   /* (void *memory) */
    uint64_t capture_mode;      /* (int *mode): swaps it with the calling thread's mode */
} inf_device_api;

/* ---- io_uring by function pointers ----------------------------------------------------------- */

/* Opens the shared object that contains liburing, and resolves every symbol. 0, or -1 with the
 * reason in `why`. */
int32_t inf_uring_load(const char *path, char *why, int32_t why_bytes);
/* Tries to make a ring, on a new thread. 0 or a negative errno. */
int32_t inf_uring_probe(void);

/* ---- executor -------------------------------------------------------------------------------- */

/* NULL with the reason in `why` and a negative errno in *error. */
inf_executor *inf_executor_open(const inf_exec_config *config, const inf_drive_config *drives,
                                int32_t *error, char *why, int32_t why_bytes);
/* Accepts no more jobs and makes all gates escape. `cancel`: jobs that have not started fail. */
void inf_executor_shut(inf_executor *ex, int32_t cancel);
/* 1 when no job is pending, 0 after timeout_ns. */
int32_t inf_executor_wait_idle(inf_executor *ex, int64_t timeout_ns);
/* Joins the threads and frees the pools; only when idle. */
void inf_executor_stop(inf_executor *ex);
/* After stop. The memory is freed with the last ticket or gate, which may be released later. */
void inf_executor_free(inf_executor *ex);

/* The caller has checked the chunks (aio/_validate.py). 0, or a negative errno: then none is
 * defined. */
int32_t inf_executor_define(inf_executor *ex, const void *chunks, int32_t count, int32_t *ids);
/* 0; -EBUSY when jobs are pending on one, -EINVAL for an unknown id: then none is dropped. */
int32_t inf_executor_drop(inf_executor *ex, const int32_t *ids, int32_t count);
/* For versioned chunks; chunks without versions are ignored. commit: their present contents become
 * the committed ones, and later writes go to their other places. rollback: they have their
 * committed contents again. 0; -EBUSY when jobs are pending on one (commit: jobs that write
 * states), -EINVAL for an unknown id, -EPERM (rollback) when a resident section without a second
 * version has changed: then no chunk has changed. */
int32_t inf_executor_commit(inf_executor *ex, const int32_t *ids, int32_t count);
int32_t inf_executor_rollback(inf_executor *ex, const int32_t *ids, int32_t count);
/* Adds a file to a drive. Its index, from 1 on; -ENOSPC when there are too many. */
int32_t inf_executor_file_add(inf_executor *ex, int32_t drive, int32_t fd);
/* Removes a file. 0; -EBUSY while a chunk has a place in it, -EINVAL for an unknown index. */
int32_t inf_executor_file_remove(inf_executor *ex, int32_t drive, int32_t index);
/* Gives the executor reserved extents for failed writes. The caller must not use an extent until it
 * has taken it back. 0, -EINVAL for an unknown drive or file, -ENOMEM. */
int32_t inf_executor_spares_add(inf_executor *ex, const void *spares, int32_t count);
/* Takes back unused extents, count_max at most. Returns how many. */
int32_t inf_executor_spares_take(inf_executor *ex, void *spares, int32_t count_max);
/* Takes the moved writes since the last call, inf_moved_write[count_max] at most, oldest first. */
int32_t inf_executor_moves_take(inf_executor *ex, void *moves, int32_t count_max);
/* Replaces the second places of versioned chunks whose live place is the committed one (or that
 * have no commit yet). Errors as commit; -EPERM if a chunk's second place is the committed one. */
int32_t inf_executor_relocate(inf_executor *ex, const int32_t *ids, int32_t count,
                              const int32_t *drives, const int32_t *files,
                              const int64_t *offsets);
/* Swaps the two places of these chunks: the states before their last UPDATE become the committed
 * contents, and a second call swaps back. 0; -EBUSY when jobs are pending on one, -EINVAL for an
 * unknown id, -EPERM for a chunk without a second place, not committed, not made by an UPDATE
 * alone, or with states in memory: then no chunk has changed. */
int32_t inf_executor_exchange(inf_executor *ex, const int32_t *ids, int32_t count);
/* The chunks as they are now, inf_chunk[count]; -EINVAL for an unknown id. */
int32_t inf_executor_look(inf_executor *ex, const int32_t *ids, int32_t count, void *chunks);
int32_t inf_executor_invalid(inf_executor *ex, const int32_t *ids, int32_t count, uint32_t *masks);

/* NULL with *error: a negative errno, or 1 + (index of the job << 4 | what) for a job that cannot
 * run. */
inf_ticket *inf_executor_submit(inf_executor *ex, const void *jobs, int32_t job_count,
                                const void *segs, int32_t seg_count, const void *hypers,
                                int32_t hyper_count, int32_t priority, inf_gate *gate,
                                int64_t *error);
/* Reads chunks ahead of their next UPDATEs, while slots are idle; `masks`: the UPDATEs' masks.
 * Returns the number of accepted chunks. */
int32_t inf_executor_prefetch(inf_executor *ex, const int32_t *ids, int32_t count,
                              const uint32_t *masks);
/* Removes the drives' marks and repeats failed writes. Returns the same as submit. */
inf_ticket *inf_executor_recover(inf_executor *ex, int64_t *error);
/* Attaches the device for jobs with INF_MASK_DEVICE, once, before the first of them, and pins the
 * slab. 0, a negative errno, or the driver's code. */
int32_t inf_executor_attach_device(inf_executor *ex, const inf_device_api *api);
/* Sets the compute stream. A copy waits for the kernels that this stream had when the copy was
 * submitted, or when its gate was opened. */
void inf_executor_compute_stream(inf_executor *ex, uint64_t stream);
/* The slab's address; 0 without one. */
uint64_t inf_executor_slab(const inf_executor *ex);
void inf_executor_release_gates(inf_executor *ex);
void inf_executor_hold_gates(inf_executor *ex, int32_t held);
/* Replaces the fault injector's settings: it counts requests from 0 again, and speeds[2 * drive +
 * op] throttle the drives. Null drives stay null. Returns how many requests got the fault of the
 * earlier settings, or a negative errno (no thread could be made). */
int64_t inf_executor_set_seam(inf_executor *ex, const inf_seam *seam, const double *speeds);
/* Replaces the pools. 0; -EBUSY while a job, or a chunk whose write failed, has a slot; -EIO if a
 * broken ring may write to a slot; -ENOMEM; the driver's code. After an error the pools are
 * unchanged. */
int32_t inf_executor_resize_pools(inf_executor *ex, int32_t small_count, int64_t small_bytes,
                                  int32_t large_count, int64_t large_bytes);
int64_t inf_executor_pool_bytes(const inf_executor *ex);
int64_t inf_executor_huge_bytes(const inf_executor *ex);
/* Why slab or threads are not on the requested NUMA node, a negative errno; 0: they are, or no node
 * was requested. */
int32_t inf_executor_numa_error(const inf_executor *ex);
/* 1: the slab is registered with every ring. Otherwise the reason: 0 there is no slab, 2 it is not
 * in huge pages, 3 it is too large, or a negative errno of the kernel. */
int32_t inf_executor_registered(const inf_executor *ex);
void inf_executor_stats(inf_executor *ex, inf_exec_stats *stats, inf_drive_stats *drives);
int32_t inf_executor_spans(inf_executor *ex, int32_t enable);
int32_t inf_executor_take_spans(inf_executor *ex, inf_span *spans, int32_t count_max);
int32_t inf_executor_fault(inf_executor *ex, inf_fault *fault);
/* The executor sets this word of the caller to 1 whenever a ticket fails; NULL ends that. */
void inf_executor_alarm(inf_executor *ex, uint32_t *word);

/* Words: [0] done (0 pending, 1 success, 2 failed), [1] filled, [2] a job has failed. Valid until
 * the release. */
const uint32_t *inf_ticket_words(const inf_ticket *ticket);
/* Whether a word is set. If so, the caller sees all data that was copied before. */
int32_t inf_ticket_set(const inf_ticket *ticket, int32_t word);
/* Whether a job waits behind an UPDATE of its chunk that has not begun to compute. */
int32_t inf_ticket_follows_update(inf_executor *ex, const inf_ticket *ticket);
/* Waits for word 0 or 1: 1 when it is set, 0 after timeout_ns. `escape`: first the gates that the
 * ticket depends on escape, and its jobs become demands. */
int32_t inf_ticket_wait(inf_executor *ex, inf_ticket *ticket, int32_t word, int64_t timeout_ns,
                        int32_t escape);
int32_t inf_ticket_fault(inf_executor *ex, const inf_ticket *ticket, inf_fault *fault);
/* Cancels the ticket's fetches that no drive has begun. No effect if it has other jobs, too. */
void inf_ticket_cancel(inf_executor *ex, inf_ticket *ticket);
void inf_ticket_release(inf_executor *ex, inf_ticket *ticket);

/* `stays`: the gate escapes only when it is released, or the executor is shut. */
inf_gate *inf_gate_new(inf_executor *ex, int32_t stays);
/* 1 opened, 0 it had escaped, -EALREADY, -ERANGE (a job's base is past `count`). */
int32_t inf_gate_open(inf_executor *ex, inf_gate *gate, const uint64_t *bases, int32_t count);
int32_t inf_gate_escaped(inf_executor *ex, const inf_gate *gate);
void inf_gate_release(inf_executor *ex, inf_gate *gate);
