/* After a write failed: its chunk keeps its slot, its drive is marked. All [locked].
 *
 * The slot of a write that failed holds the only copy of what it should have written: an update has
 * no way back, and the range on the drive may be torn. So the chunk keeps the slot, reads are
 * served from it, and the drive takes no further writes until somebody says that the cause is
 * mended (inf_executor_recover).
 *
 * While a chunk keeps something its drive is marked, or a REWRITE is first in its FIFO: nothing
 * else writes it.
 */
#include "executor.h"

#include <assert.h>

bool inf_run_keep_failed_write(struct inf_executor *ex, inf_run *run) {
    inf_chunk_record *chunk = run->chunk;
    bool rewrite = run->job.kind == INF_JOB_REWRITE;
    bool closed = run->fault.kind == INF_FAULT_CLOSED;
    if (run->state != INF_WRITING || run->slot.memory == NULL || (closed && !rewrite)) return false;
    /* a measurement: the slot holds nothing that is missed */
    if (run->job.mask & INF_MASK_MOVE_ONLY) return false;
    assert(chunk->failed_write_mask == 0);
    inf_drive *drive = &ex->drives[inf_run_drive(run, INF_OP_WRITE)]; /* before the places flip */
    chunk->failed_write = run->slot;
    chunk->failed_write_mask = run->slot.written;
    if (run->moves) inf_chunk_flip(chunk);
    inf_chunk_note_write(chunk, run);
    inf_chunk_nonzero(chunk, run->slot.written);
    /* A store holds what was wanted, in the slot or in resident sections; an update had no invalid
     * section. */
    if (run->job.kind == INF_JOB_STORE) chunk->invalid &= ~run->job.mask;
    run->slot.memory = NULL;
    inf_slot_put_by(ex, &chunk->failed_write);
    ex->stats.kept_chunks++;
    if (!closed && !drive->stats.marked) {
        drive->stats.marked = 1;
        drive->stats.mark = run->fault;
    }
    return true;
}

void inf_run_take_failed_write(struct inf_executor *ex, inf_run *run) {
    run->slot = run->chunk->failed_write;
    run->chunk->failed_write_mask = 0;
    inf_slot_put_back(ex, &run->slot);
    ex->stats.kept_chunks--;
}

void inf_chunk_drop_failed_write(struct inf_executor *ex, inf_chunk_record *chunk) {
    if (chunk->failed_write_mask == 0) return;
    chunk->failed_write_mask = 0;
    inf_slot_put_back(ex, &chunk->failed_write);
    ex->stats.kept_chunks--;
    inf_slot_release(ex, &chunk->failed_write);
}

bool inf_run_refused(const struct inf_executor *ex, inf_run *run) {
    bool update = run->job.kind == INF_JOB_UPDATE;
    if (!update && run->job.kind != INF_JOB_STORE) return false;
    const inf_chunk *chunk = &run->chunk->plan;
    bool writes = false; /* to the drive, whether or not what is there is kept in memory now */
    for (int32_t s = 0; s < chunk->section_count; s++) {
        bool written = update ? !(inf_grad_mask(chunk) >> s & 1u) : run->job.mask >> s & 1u;
        writes = writes || (written && !inf_section_resident(chunk, s));
    }
    if (!writes) return false;
    /* What a chunk keeps goes first, also where its next version would lie on another drive. */
    bool keeps = run->chunk->failed_write_mask != 0;
    const inf_drive *drive = &ex->drives[keeps ? chunk->drive : inf_run_drive(run, INF_OP_WRITE)];
    if (!drive->stats.marked) return false;
    run->faulted = true;
    run->fault = drive->stats.mark;
    run->fault.earlier = INF_EARLIER_MARK;
    return true;
}
