/* A write of a part of a place failed: the rest is read, and the whole then goes to a spare range
 * (spares.c). All [locked].
 *
 *   failed write -> (larger slot) -> read the rest -> verify it -> the whole is written elsewhere
 *
 * The block refuses writes, not reads: what the job does not hold is still in the old place. It
 * comes into the job's own slot where that has the room, and else into a large one, with the job's
 * sections beside it. Until then the small slot has the only copy of them, and is put aside. So a
 * job may hold a small slot while it waits for a large one. No job waits for a small slot while it
 * holds a large one, so there is no cycle of waiting.
 *
 * The record of the chunk changes when the rest is in memory, and not before. If it cannot be read,
 * or is not what was written, or no slot comes, the job is where it was: its write has failed.
 */
#include "executor.h"

static int64_t sections_bytes(const inf_chunk *chunk, uint32_t mask) {
    int64_t bytes = 0;
    for (int32_t s = 0; s < chunk->section_count; s++) {
        if (mask >> s & 1u) bytes += inf_align_up(inf_section_bytes(chunk, s));
    }
    return bytes;
}

/* Sections of `mask` that have no room in the slot. */
static uint32_t without_room(const inf_slot *slot, uint32_t mask) {
    for (int32_t s = 0; s < INF_SECTION_MAX; s++)
        mask &= ~((uint32_t)(slot->section_at[s] >= 0) << s);
    return mask;
}

static void read_beside(struct inf_executor *ex, inf_run *run, uint32_t missing) {
    const inf_chunk *chunk = &run->chunk->plan;
    inf_slot *slot = &run->slot;
    for (int32_t s = 0; s < chunk->section_count; s++) {
        if (!(missing >> s & 1u)) continue;
        slot->section_at[s] = slot->bytes;
        slot->bytes += inf_align_up(inf_section_bytes(chunk, s));
    }
    inf_slot_plan_reads(slot, chunk, run->rest);
    run->state = INF_READING;
    inf_drive_queue_run(ex, run, INF_OP_READ);
}

bool inf_run_load_rest(struct inf_executor *ex, inf_run *run, uint32_t held, uint32_t rest) {
    const inf_chunk *chunk = &run->chunk->plan;
    if (ex->drives[chunk->drive].dead != 0) return false;
    uint32_t missing = without_room(&run->slot, rest);
    int64_t beside = run->slot.bytes + sections_bytes(chunk, missing);
    bool fits = beside <= ex->pools[run->slot.pool].bytes;
    const inf_pool *large = &ex->pools[1];
    bool waits = run->slot.pool == 0 && large->count > 0 &&
                 sections_bytes(chunk, held | rest) <= large->bytes;
    if (!fits && !waits) return false;
    run->rest = rest;
    run->write_fault = run->fault;
    run->faulted = false;
    run->fault = (inf_fault){0};
    run->reread = false;
    if (fits) {
        read_beside(ex, run, missing);
        return true;
    }
    run->chunk->failed_write = run->slot; /* not looked at: its mask is 0 */
    run->aside = true;
    run->slot = (inf_slot){.pool = 1};
    inf_slot_plan(&run->slot, chunk, held | rest, rest, held, false);
    inf_slot_wait(ex, run);
    return true;
}

void inf_run_rest_loaded(struct inf_executor *ex, inf_run *run, int64_t bad) {
    if (bad != INF_OK && !run->reread && !ex->cancelled) {
        run->reread = true;
        ex->stats.rereads++;
        run->state = INF_READING;
        inf_drive_queue_run(ex, run, INF_OP_READ);
        return;
    }
    run->faulted = true;
    run->fault = run->write_fault;
    run->state = INF_WRITING;
    if (bad != INF_OK || !inf_run_move_failed_write(ex, run)) inf_run_finish(ex, run);
}

void inf_run_take_rest(struct inf_executor *ex, inf_run *run) {
    if (run->aside) inf_slot_release(ex, &run->chunk->failed_write);
    run->aside = false;
    run->rest = 0;
}

void inf_run_give_up_rest(struct inf_executor *ex, inf_run *run) {
    if (run->aside) {
        inf_slot_release(ex, &run->slot);
        run->slot = run->chunk->failed_write;
    }
    run->aside = false;
    run->rest = 0;
    run->faulted = true;
    run->fault = run->write_fault;
    run->state = INF_WRITING;
}
