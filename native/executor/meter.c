/* Counters of a drive: latency, busy time, depth, bandwidth per second. All [locked]. */
#include "executor.h"

#define WINDOW_NS ((int64_t)1000000000)
#define WINDOW_COUNT 64
#define BUCKET_COUNT 128

/* Four buckets per octave of microseconds (1.024 us, which a shift computes): 0, 1, 2, 3, then
 * [4, 5) [5, 6) [6, 7) [7, 8) [8, 10) ... */
static int32_t latency_bucket(int64_t ns) {
    uint64_t us = (uint64_t)(ns < 0 ? 0 : ns) >> 10;
    if (us < 4) return (int32_t)us;
    int32_t octave = 63 - __builtin_clzll(us);
    int32_t bucket = octave * 4 - 4 + (int32_t)(us >> (octave - 2) & 3u);
    return bucket < BUCKET_COUNT ? bucket : BUCKET_COUNT - 1;
}

static inf_window *window_at(inf_drive *drive, int64_t now_ns) {
    inf_drive_stats *stats = &drive->stats;
    inf_window *last =
        stats->window_count == 0 ? NULL : &stats->windows[(stats->window_count - 1) % WINDOW_COUNT];
    int64_t start_ns = now_ns - now_ns % WINDOW_NS;
    if (last != NULL && last->start_ns >= start_ns) return last;
    inf_window *next = &stats->windows[stats->window_count++ % WINDOW_COUNT];
    *next = (inf_window){.start_ns = start_ns};
    return next;
}

/* Counts [metered_ns, now_ns) as busy, second by second: a request may take longer than one. */
static void count_busy(inf_drive *drive, int64_t now_ns) {
    int64_t from_ns = drive->metered_ns;
    /* older windows are overwritten */
    if (now_ns - from_ns > WINDOW_COUNT * WINDOW_NS) from_ns = now_ns - WINDOW_COUNT * WINDOW_NS;
    while (from_ns < now_ns) {
        int64_t end_ns = from_ns - from_ns % WINDOW_NS + WINDOW_NS;
        if (end_ns > now_ns) end_ns = now_ns;
        window_at(drive, from_ns)->busy_ns += (uint64_t)(end_ns - from_ns);
        from_ns = end_ns;
    }
}

void inf_meter_tick(inf_drive *drive, int64_t now_ns) {
    int64_t in_flight = (int64_t)drive->queue.in_flight[0] + drive->queue.in_flight[1];
    int64_t elapsed_ns = now_ns - drive->metered_ns;
    if (in_flight > 0 && elapsed_ns > 0) {
        drive->stats.busy_ns += (uint64_t)elapsed_ns;
        drive->stats.depth_ns += (uint64_t)(elapsed_ns * in_flight);
        count_busy(drive, now_ns);
    }
    drive->metered_ns = now_ns;
}

void inf_meter_sent(inf_drive *drive, inf_request *request) {
    request->sent_ns = inf_now_ns();
    *(request->op == INF_OP_READ ? &drive->stats.reads : &drive->stats.writes) += 1;
}

void inf_meter_result(inf_drive *drive, const inf_request *request) {
    int64_t took_ns = inf_now_ns() - request->sent_ns;
    inf_drive_stats *stats = &drive->stats;
    stats->latency[request->op][latency_bucket(took_ns)]++;
    if ((uint64_t)took_ns > stats->latency_max_ns[request->op])
        stats->latency_max_ns[request->op] = (uint64_t)took_ns;
}

void inf_meter_moved(inf_drive *drive, int32_t op, int64_t bytes) {
    inf_window *window = window_at(drive, inf_now_ns());
    bool read = op == INF_OP_READ;
    *(read ? &drive->stats.bytes_read : &drive->stats.bytes_written) += (uint64_t)bytes;
    *(read ? &window->bytes_read : &window->bytes_written) += (uint64_t)bytes;
}
