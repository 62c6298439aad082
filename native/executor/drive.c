/* A drive's queue: chooses the next block and handles its result. Also the fault injector of tests.
 * All [locked]. */
#include "executor.h"

#include <assert.h>
#include <errno.h>
#include <sys/stat.h>

/* Attempts after EAGAIN, EINTR and transfers without progress. */
#define TRIES_MAX 256
#define SECTOR 512

/* ---- choosing -------------------------------------------------------------------------------- */

static int32_t first_class(const inf_drive_queue *queue, int32_t op) {
    for (int32_t p = 0; p < INF_CLASS_COUNT; p++) {
        if (queue->jobs[op][p].head != NULL) return p;
    }
    return -1;
}

/* The next class: the most urgent, or on a fair turn the one with the oldest first job. -1: no job
 * waits. */
static int32_t next_class(const inf_drive_queue *queue, int32_t op, bool *fair) {
    int32_t next = -1;
    *fair = (queue->turns[op] + 1) % INF_FAIR_TURN == 0;
    for (int32_t p = 0; p < INF_PRIORITY_COUNT; p++) {
        const inf_run *head = queue->jobs[op][p].head;
        if (head == NULL) continue;
        if (next < 0 || (*fair && head->order < queue->jobs[op][next].head->order)) next = p;
    }
    if (next < 0 && queue->jobs[op][INF_CLASS_AHEAD].head != NULL) {
        next = INF_CLASS_AHEAD;
        *fair = false;
    }
    return next;
}

/* While both reads and writes are pending, each has half of the depth, so both progress; a quarter
 * of the reads' share is reserved for demands. */
static bool may_send(const inf_drive *drive, int32_t op, int32_t class, bool fair) {
    const inf_drive_queue *queue = &drive->queue;
    int32_t other = 1 - op;
    int32_t cap = drive->config.depth;
    if (queue->in_flight[other] > 0 || first_class(queue, other) >= 0)
        cap = cap / 2 > 0 ? cap / 2 : 1;
    if (op == INF_OP_READ && class != 0 && !fair && cap >= 4) cap -= cap / 4;
    return class >= 0 && queue->in_flight[op] < cap;
}

/* The operation of the next block, or -1. */
static int32_t choose_op(const inf_drive *drive) {
    const inf_drive_queue *queue = &drive->queue;
    bool fair_read, fair_write;
    int32_t read_class = next_class(queue, INF_OP_READ, &fair_read);
    int32_t write_class = next_class(queue, INF_OP_WRITE, &fair_write);
    bool read = may_send(drive, INF_OP_READ, read_class, fair_read);
    bool write = may_send(drive, INF_OP_WRITE, write_class, fair_write);
    if (!read || !write) return read ? INF_OP_READ : write ? INF_OP_WRITE : -1;
    if (read_class == 0) return INF_OP_READ;
    if (queue->in_flight[0] != queue->in_flight[1])
        return queue->in_flight[0] < queue->in_flight[1] ? 0 : 1;
    return 1 - queue->last_op;
}

static bool issued_whole(const inf_run *run, int32_t op) {
    return run->cursor >= run->slot.range_count[op];
}

static void next_block(inf_drive *drive, inf_request *request, inf_run *run, int32_t op) {
    const struct inf_executor *ex = drive->ex;
    const inf_range *range = &run->slot.ranges[op][run->cursor];
    int64_t bytes = range->bytes - run->position;
    if (bytes > drive->config.block_bytes) bytes = drive->config.block_bytes;
    uint8_t *data = run->slot.memory + range->slot_at + run->position;
    int64_t in_piece = INF_PIECE_BYTES - (data - ex->slab) % INF_PIECE_BYTES;
    if (bytes > in_piece) bytes = in_piece;
    *request = (inf_request){.drive = drive,
                             .run = run,
                             .data = data,
                             .offset = range->file_at + run->position,
                             .block_bytes = bytes,
                             .bytes = bytes,
                             .op = op,
                             .file = range->file,
                             .busy = true};
    run->position += bytes;
    run->blocks_in_flight++;
    if (run->position == range->bytes) {
        run->cursor++;
        run->position = 0;
    }
}

/* ---- the fault injector ---------------------------------------------------------------------- */

static uint64_t seam_next(struct inf_executor *ex) {
    uint64_t x = ex->seam_random;
    x ^= x << 13;
    x ^= x >> 7;
    x ^= x << 17;
    return ex->seam_random = x;
}

/* Flips one bit: of a write before it is sent, of a read after it has completed. */
static void flip(const inf_request *request) { request->data[request->bytes / 3] ^= 0x10; }

/* Distance to the range that a misdirected request transfers: the next one of its length in the
 * file, else the previous one. 0: there is none. */
static int64_t astray(const inf_request *request) {
    struct stat about;
    if (fstat(request->drive->fds[request->file], &about) != 0) return 0;
    if (request->offset + 2 * request->bytes <= about.st_size) return request->bytes;
    return request->offset >= request->bytes ? -request->bytes : 0;
}

static void seam_inject(struct inf_executor *ex, inf_request *request) {
    const inf_seam_fault *fault = &ex->config.seam.fault;
    request->inject = INF_SEAM_NONE;
    request->ask = request->bytes;
    if (fault->kind == INF_SEAM_NONE || fault->op != request->op) return;
    if (fault->drive != 0 && fault->drive != 1 + request->drive->index) return;
    bool behind = request->offset + request->bytes > fault->start;
    if (!behind || (fault->stop != 0 && request->offset >= fault->stop)) return;
    request->astray = fault->kind == INF_SEAM_MISDIRECTED ? astray(request) : 0;
    if (fault->kind == INF_SEAM_MISDIRECTED && request->astray == 0) return;
    int64_t nth = ex->seam_seen++;
    const inf_run *run = request->run;
    bool repeats = run->moved > 0 || run->reread;
    if (nth == fault->nth) ex->seam_run = run;
    else if (ex->seam_run == run && !repeats) ex->seam_run = NULL; /* a new run, same address */
    bool lasts = fault->lasting && ex->seam_run == run && repeats;
    if (nth != fault->nth && !lasts && !(fault->persistent && nth > fault->nth)) return;
    ex->seam_met++;
    request->inject = fault->kind;
    if (fault->kind == INF_SEAM_SHORT && request->bytes >= 2 * SECTOR) {
        request->ask = request->bytes / 2 & ~(int64_t)(SECTOR - 1);
    }
    if (fault->kind == INF_SEAM_BITFLIP && request->op == INF_OP_WRITE) flip(request);
    request->offset += request->astray;
}

static bool seam_holds(const struct inf_executor *ex, const inf_drive *drive,
                       const inf_request *request) {
    return request->inject == INF_SEAM_LATE || ex->config.seam.delay_us_max > 0 ||
           drive->config.read_bytes_per_s > 0 || drive->config.write_bytes_per_s > 0;
}

static void seam_hold(struct inf_executor *ex, inf_drive *drive, inf_request *request,
                      int64_t result) {
    const inf_seam *seam = &ex->config.seam;
    int64_t now_ns = inf_now_ns();
    double speed = request->op == INF_OP_READ ? drive->config.read_bytes_per_s
                                              : drive->config.write_bytes_per_s;
    if (drive->clock_ns < now_ns) drive->clock_ns = now_ns;
    if (speed > 0) drive->clock_ns += (int64_t)((double)request->ask / speed * 1e9);
    request->due_ns = speed > 0 ? drive->clock_ns : now_ns;
    if (seam->delay_us_max > 0) {
        request->due_ns += (int64_t)(seam_next(ex) % ((uint64_t)seam->delay_us_max * 1000 + 1));
    }
    if (request->inject == INF_SEAM_LATE) request->due_ns += seam->fault.late_us * 1000;
    request->result = result;
    inf_request **at = &ex->held;
    while (*at != NULL && (*at)->due_ns <= request->due_ns) at = &(*at)->next;
    request->next = *at;
    *at = request;
    pthread_cond_signal(&ex->seam_wake);
}

/* ---- results --------------------------------------------------------------------------------- */

static void run_blames(inf_drive *drive, const inf_request *request, int32_t kind, int32_t error) {
    inf_run *run = request->run;
    if (error == ENOSPC || error == EFBIG || error == EDQUOT) kind = INF_FAULT_NO_SPACE;
    drive->stats.errors++;
    inf_run_fail(run, kind, request->op, error, request->offset, request->bytes);
    inf_queue *queue = &drive->queue.jobs[request->op][run->priority];
    (void)inf_queue_remove(queue, run); /* its remaining blocks are not sent */
}

/* True when the request must be sent again: after EAGAIN or EINTR, or for the rest of a short
 * transfer. */
static bool result_again(inf_drive *drive, inf_request *request, int64_t result) {
    bool read = request->op == INF_OP_READ;
    if (result < 0) {
        bool passing = result == -EAGAIN || result == -EINTR;
        if (passing && request->tries++ < TRIES_MAX && !request->run->faulted) {
            drive->stats.retries++;
            return true;
        }
        run_blames(drive, request, INF_FAULT_ERRNO, (int32_t)-result);
        return false;
    }
    if (result == 0) {
        run_blames(drive, request, read ? INF_FAULT_SHORT : INF_FAULT_NO_SPACE, read ? 0 : ENOSPC);
        return false;
    }
    if (request->inject == INF_SEAM_SHORT && result > request->bytes / 2)
        result = request->bytes / 2;
    bool whole = result >= request->bytes;
    /* O_DIRECT needs an offset that is aligned to the drive's sectors (512 or 4096 bytes), so a
     * partial sector is transferred again. */
    int64_t aligned = result & ~(int64_t)(INF_ALIGN - 1);
    if (aligned == 0) aligned = result & ~(int64_t)(SECTOR - 1);
    int64_t moved = whole ? request->bytes : aligned;
    inf_meter_moved(drive, request->op, moved);
    if (whole) {
        if (read && request->inject == INF_SEAM_BITFLIP) flip(request);
        return false;
    }
    drive->stats.short_transfers++;
    if (moved == 0 && request->tries++ >= TRIES_MAX) {
        run_blames(drive, request, INF_FAULT_SHORT, 0);
        return false;
    }
    request->data += moved;
    request->offset += moved;
    request->bytes -= moved;
    return !request->run->faulted;
}

static void request_end(inf_drive *drive, inf_request *request) {
    inf_run *run = request->run;
    inf_meter_tick(drive, inf_now_ns());
    drive->queue.in_flight[request->op]--;
    drive->queue.in_flight_bytes -= request->block_bytes;
    request->busy = false;
    request->next = drive->free;
    drive->free = request;
    run->blocks_in_flight--;
    if (run->blocks_in_flight == 0 && (run->faulted || issued_whole(run, request->op)))
        inf_queue_push(&drive->ex->ended, run);
}

static void request_result(inf_drive *drive, inf_request *request, int64_t result) {
    inf_meter_tick(drive, inf_now_ns()); /* first: the counters below may open a new window */
    inf_meter_result(drive, request);
    if (result_again(drive, request, result)) {
        request->next = drive->again;
        drive->again = request;
    } else {
        request_end(drive, request);
    }
    if (drive->again != NULL || choose_op(drive) >= 0) drive->ex->backend->wake(drive);
}

void inf_drive_done(inf_drive *drive, inf_request *request, int64_t result) {
    struct inf_executor *ex = drive->ex;
    request->offset -= request->astray;
    request->astray = 0;
    if (ex->seam_on && seam_holds(ex, drive, request)) seam_hold(ex, drive, request, result);
    else request_result(drive, request, result);
}

void inf_seam_release(struct inf_executor *ex) {
    inf_request *request = ex->held;
    ex->held = request->next;
    request_result(request->drive, request, request->result);
}

/* ---- interface for backends and jobs --------------------------------------------------------- */

void inf_drive_queue_run(struct inf_executor *ex, inf_run *run, int32_t op) {
    inf_drive *drive = &ex->drives[inf_run_drive(run, op)];
    assert(drive->dead == 0);
    run->state = op == INF_OP_READ ? INF_READING : INF_WRITING;
    run->cursor = 0;
    run->position = 0;
    run->start_ns = inf_now_ns();
    inf_queue_push(&drive->queue.jobs[op][run->priority], run);
    ex->backend->wake(drive);
}

inf_request *inf_drive_take(inf_drive *drive) {
    struct inf_executor *ex = drive->ex;
    for (;;) {
        inf_request *request = drive->again;
        if (request != NULL) {
            drive->again = request->next;
        } else {
            int32_t op = drive->free == NULL ? -1 : choose_op(drive);
            if (op < 0) return NULL;
            bool fair;
            inf_queue *queue = &drive->queue.jobs[op][next_class(&drive->queue, op, &fair)];
            drive->queue.turns[op]++;
            inf_run *run = queue->head;
            request = drive->free;
            drive->free = request->next;
            next_block(drive, request, run, op);
            if (issued_whole(run, op)) inf_queue_pop(queue);
            drive->queue.last_op = op;
            inf_meter_tick(drive, inf_now_ns());
            drive->queue.in_flight[op]++;
            drive->queue.in_flight_bytes += request->bytes;
            if ((uint64_t)drive->queue.in_flight_bytes > drive->stats.in_flight_bytes_max) {
                drive->stats.in_flight_bytes_max = (uint64_t)drive->queue.in_flight_bytes;
            }
            uint64_t in_flight = (uint64_t)(drive->queue.in_flight[0] + drive->queue.in_flight[1]);
            if (in_flight > drive->stats.in_flight_max) drive->stats.in_flight_max = in_flight;
        }
        inf_meter_sent(drive, request);
        request->ask = request->bytes;
        if (ex->seam_on) seam_inject(ex, request);
        switch (request->inject) {
        case INF_SEAM_ERRNO: inf_drive_done(drive, request, -ex->config.seam.fault.error); break;
        case INF_SEAM_ZERO: inf_drive_done(drive, request, 0); break;
        case INF_SEAM_STALE: inf_drive_done(drive, request, request->bytes); break;
        default: return request;
        }
    }
}

static void queued_fail(inf_drive *drive, int32_t kind, int32_t error) {
    for (int32_t op = 0; op < INF_OP_COUNT; op++) {
        for (int32_t p = 0; p < INF_CLASS_COUNT; p++) {
            inf_run *run;
            while ((run = inf_queue_pop(&drive->queue.jobs[op][p])) != NULL) {
                const inf_range *range = &run->slot.ranges[op][0];
                inf_run_fail(run, kind, op, error, range->file_at, range->bytes);
                if (run->blocks_in_flight == 0) inf_queue_push(&drive->ex->ended, run);
            }
        }
    }
}

bool inf_drive_unqueue(inf_drive *drive, inf_run *run, int32_t op) {
    return inf_queue_remove(&drive->queue.jobs[op][run->priority], run);
}

void inf_drive_requeue(inf_drive *drive, inf_run *run, int32_t op) {
    inf_queue_push(&drive->queue.jobs[op][run->priority], run);
    drive->ex->backend->wake(drive);
}

void inf_drive_cancel(inf_drive *drive) { queued_fail(drive, INF_FAULT_CLOSED, 0); }

void inf_drive_break(inf_drive *drive, int32_t error) {
    inf_request **at = &drive->ex->held; /* the kernel has completed these */
    while (*at != NULL) {
        if ((*at)->drive == drive) *at = (*at)->next;
        else at = &(*at)->next;
    }
    drive->dead = error;
    if (!drive->stats.marked) {
        drive->stats.marked = 1;
        drive->stats.mark = (inf_fault){
            .kind = INF_FAULT_ERRNO, .op = -1, .drive = drive->index, .error = error, .chunk = -1};
    }
    drive->again = NULL;
    queued_fail(drive, INF_FAULT_ERRNO, error);
    for (int32_t i = 0; i < drive->config.depth; i++) {
        inf_request *request = &drive->requests[i];
        if (!request->busy) continue;
        /* The kernel may still transfer these bytes, so the slot must never be reused. */
        request->run->slot.lost = true;
        inf_run_fail(request->run, INF_FAULT_ERRNO, request->op, error, request->offset,
                     request->bytes);
        request_end(drive, request);
    }
}
