/* Layout of a chunk's sections in a slot, and the file ranges that they are read from and written
 * to. All [locked]. */
#include "executor.h"

static uint8_t *pointer(uint64_t address) { return (uint8_t *)(uintptr_t)address; }

/* Sections that the job uses, in its slot or resident. */
uint32_t inf_run_used(const inf_run *run) {
    uint32_t all = inf_sections_all(&run->chunk->plan);
    if (run->job.kind == INF_JOB_UPDATE) return all & ~inf_job_leaves(&run->job);
    /* A REWRITE uses none: the slot of the failed write has its data. */
    return (run->job.mask & all) | inf_run_written(run);
}

uint32_t inf_run_written(const inf_run *run) {
    uint32_t all = inf_sections_all(&run->chunk->plan);
    uint32_t states = all & ~inf_grad_mask(&run->chunk->plan);
    if (run->job.kind == INF_JOB_UPDATE) return states & ~inf_job_leaves(&run->job);
    if (run->job.kind != INF_JOB_STORE) return 0;
    return (run->job.mask & all) | (run->moves ? states : 0); /* a new version has all */
}

/* Makes the UPDATE read and write the sections that it would leave out and that a new version
 * lacks: not zeros, which are zeros in the new version, too; and none if another UPDATE follows.
 * (That one reads both places, so they must be on one drive, and no slot may have the only copy of
 * a section.) */
void inf_run_make_whole(inf_run *run, bool moves) {
    const inf_chunk *chunk = &run->chunk->plan;
    const uint32_t leaves = inf_job_leaves(&run->job);
    if (leaves == 0) return;
    const bool one_drive = chunk->other_bytes == 0 || chunk->other_drive == chunk->drive;
    if ((run->job.mask & INF_MASK_FIRST) && one_drive && run->chunk->failed_write_mask == 0)
        return;
    const uint32_t lacks = leaves & (moves ? ~(uint32_t)chunk->zeros : chunk->older);
    run->job.mask &= ~(lacks << INF_LEAVES_SHIFT);
    run->reads |= lacks & ~inf_grad_mask(chunk);
}

static void range_add(inf_slot *slot, int32_t op, inf_range range) {
    inf_range *last =
        slot->range_count[op] > 0 ? &slot->ranges[op][slot->range_count[op] - 1] : NULL;
    bool follows = last != NULL && last->file == range.file &&
                   last->file_at + last->bytes == range.file_at &&
                   last->slot_at + last->bytes == range.slot_at;
    if (follows) last->bytes += range.bytes;
    else slot->ranges[op][slot->range_count[op]++] = range;
}

static int32_t file_of(const inf_chunk *chunk, int32_t section, bool other) {
    if (inf_chunk_versioned(chunk) && (inf_grad_mask(chunk) >> section & 1u))
        return chunk->grad_file;
    return other ? chunk->other_file : chunk->file;
}

static inf_range range_of(const inf_chunk *chunk, int32_t s, bool other, int64_t slot_at) {
    return (inf_range){.file_at = inf_section_file_at(chunk, s, other),
                       .slot_at = slot_at,
                       .bytes = inf_align_up(inf_section_bytes(chunk, s)),
                       .file = file_of(chunk, s, other)};
}

static inf_range read_range(const inf_chunk *chunk, int32_t s, int64_t slot_at) {
    return range_of(chunk, s, inf_section_older(chunk, s), slot_at);
}

/* Places the sections `used` in the slot, in order, and lists the ranges to read and to write;
 * adjacent sections (in file and slot) are one range. */
void inf_slot_plan(inf_slot *slot, const inf_chunk *chunk, uint32_t used, uint32_t reads,
                   uint32_t written, bool moves) {
    slot->range_count[INF_OP_READ] = slot->range_count[INF_OP_WRITE] = 0;
    slot->bytes = 0;
    slot->written = 0;
    for (int32_t s = 0; s < INF_SECTION_MAX; s++) {
        slot->section_at[s] = -1;
        if (s >= chunk->section_count || !(used >> s & 1u) || inf_section_resident(chunk, s))
            continue;
        slot->section_at[s] = slot->bytes;
        if (reads >> s & 1u) range_add(slot, INF_OP_READ, read_range(chunk, s, slot->bytes));
        if (written >> s & 1u)
            range_add(slot, INF_OP_WRITE, range_of(chunk, s, moves, slot->bytes));
        slot->written |= written & 1u << s;
        slot->bytes += inf_align_up(inf_section_bytes(chunk, s));
    }
}

void inf_slot_plan_writes(inf_slot *slot, const inf_chunk *chunk, uint32_t written, bool other) {
    slot->range_count[INF_OP_WRITE] = 0;
    slot->written = written;
    for (int32_t s = 0; s < chunk->section_count; s++) {
        if (written >> s & 1u)
            range_add(slot, INF_OP_WRITE, range_of(chunk, s, other, slot->section_at[s]));
    }
}

void inf_slot_plan_reads(inf_slot *slot, const inf_chunk *chunk, uint32_t reads) {
    slot->range_count[INF_OP_READ] = 0;
    for (int32_t s = 0; s < chunk->section_count; s++) {
        if (reads >> s & 1u)
            range_add(slot, INF_OP_READ, read_range(chunk, s, slot->section_at[s]));
    }
}

/* Leaves out the sections of a failed write, which are still in that write's slot. */
void inf_run_plan_slot(inf_run *run) {
    inf_slot_plan(&run->slot, &run->chunk->plan,
                  inf_run_used(run) & ~run->chunk->failed_write_mask, run->reads,
                  inf_run_written(run), run->moves);
}

/* Address at which the pass finds a section: in the run's slot, in the slot of a failed write, or
 * resident. For a new version of a resident section it is the memory to which `bring` (compute.c)
 * has copied the live version. */
uint8_t *inf_section_address(const inf_run *run, int32_t section) {
    const inf_slot *failed_write = &run->chunk->failed_write;
    const inf_chunk *chunk = &run->chunk->plan;
    if (run->slot.section_at[section] >= 0) return run->slot.memory + run->slot.section_at[section];
    if (run->chunk->failed_write_mask >> section & 1u)
        return failed_write->memory + failed_write->section_at[section];
    bool other = run->moves && chunk->other_ptr[section] != 0;
    return pointer(other ? chunk->other_ptr[section] : chunk->section_ptr[section]);
}
