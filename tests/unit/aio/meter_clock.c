/* A drive's meter (native/executor/meter.c) with a clock that tests set: what it says of seconds
 * and days can be seen at once. Compiled and loaded by test_executor_meter.py. */
#include "executor/executor.h"

#include <string.h>

static int64_t clock_ns;
static inf_drive drive;
static inf_request requests[2];

int64_t inf_now_ns(void) { return clock_ns; }

void meter_reset(int64_t now_ns) {
    memset(&drive, 0, sizeof drive);
    clock_ns = drive.metered_ns = now_ns;
}

void meter_pass(int64_t ns) { clock_ns += ns; }

/* One request at a time of each op; in the order of drive.c. */
void meter_send(int32_t op) {
    inf_meter_tick(&drive, clock_ns);
    drive.queue.in_flight[op]++;
    requests[op].op = op;
    inf_meter_sent(&drive, &requests[op]);
}

void meter_end(int32_t op, int64_t bytes) {
    inf_meter_tick(&drive, clock_ns);
    inf_meter_result(&drive, &requests[op]);
    inf_meter_moved(&drive, op, bytes);
    drive.queue.in_flight[op]--;
}

const inf_drive_stats *meter_stats(void) { return &drive.stats; }
