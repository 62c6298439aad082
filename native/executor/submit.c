/* Registers chunks; checks and copies jobs, and appends them to the FIFOs of their chunks. */
#include "executor.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

/* Errors in a job; aio/_validate.py has the messages. */
enum {
    BAD_CHUNK = 1,
    BAD_KIND,
    BAD_MASK,
    BAD_BASE,
    BAD_SEGS,
    BAD_STORE_GATE,
    BAD_SIZE,
    BAD_FORMAT,
    BAD_GIVEN,
    BAD_DEVICE,
    BAD_COPY
};

/* ---- chunks ---------------------------------------------------------------------------------- */

static int32_t chunks_grow(struct inf_executor *ex, int32_t more) {
    if (ex->chunk_free_count >= more) return 0;
    int64_t count = (int64_t)ex->chunk_count + more;
    if (count > INT32_MAX) return -ENOMEM;
    inf_chunk_record **chunks = realloc(ex->chunks, (size_t)count * sizeof *chunks);
    if (chunks == NULL) return -ENOMEM;
    ex->chunks = chunks;
    int32_t *ids = realloc(ex->chunks_free, (size_t)count * sizeof *ids);
    if (ids == NULL) return -ENOMEM;
    ex->chunks_free = ids;
    memmove(ids + more, ids, (size_t)ex->chunk_free_count * sizeof *ids);
    for (int32_t i = 0; i < more; i++) {
        chunks[ex->chunk_count + i] = NULL;
        ids[i] = (int32_t)count - 1 - i; /* taken from the end: low ids first */
    }
    ex->chunk_free_count += more;
    ex->chunk_count = (int32_t)count;
    return 0;
}

/* A chunk without a second place uses no second drive. */
static bool second_drive_valid(const struct inf_executor *ex, const inf_chunk *plan) {
    if (plan->other_bytes == 0) return true;
    return plan->other_drive >= 0 && plan->other_drive < ex->config.drive_count;
}

int32_t inf_executor_define(inf_executor *ex, const void *chunks, int32_t count, int32_t *ids) {
    const inf_chunk *plans = chunks;
    if (count <= 0) return 0;
    inf_chunk_record **records = calloc((size_t)count, sizeof *records);
    int32_t error = records == NULL ? -ENOMEM : 0;
    for (int32_t i = 0; i < count && error == 0; i++) {
        bool valid = inf_chunk_valid(&plans[i]) && plans[i].drive < ex->config.drive_count &&
                     second_drive_valid(ex, &plans[i]);
        if (!valid) error = -EINVAL;
        else if ((records[i] = calloc(1, sizeof **records)) == NULL) error = -ENOMEM;
    }
    pthread_mutex_lock(&ex->lock);
    for (int32_t i = 0; i < count && error == 0; i++)
        error = inf_files_known(ex, &plans[i]) ? 0 : -ENOENT;
    if (error == 0) error = ex->shut ? -ESHUTDOWN : chunks_grow(ex, count);
    for (int32_t i = 0; i < count && error == 0; i++) {
        int32_t id = ex->chunks_free[--ex->chunk_free_count];
        records[i]->plan = plans[i];
        if (ex->config.verify == INF_VERIFY_OFF)
            records[i]->plan.sums_ptr = records[i]->plan.other_sums_ptr = 0;
        records[i]->id = ids[i] = id;
        ex->chunks[id] = records[i];
    }
    if (error == 0) ex->stats.chunks_live += (uint64_t)count;
    pthread_mutex_unlock(&ex->lock);
    for (int32_t i = 0; i < count && error != 0 && records != NULL; i++) free(records[i]);
    free(records);
    return error;
}

int32_t inf_executor_drop(inf_executor *ex, const int32_t *ids, int32_t count) {
    int32_t error = 0;
    pthread_mutex_lock(&ex->lock);
    for (int32_t i = 0; i < count && error == 0; i++) {
        const inf_chunk_record *chunk = inf_chunk_of(ex, ids[i]);
        if (chunk == NULL) error = -EINVAL;
        else if (chunk->fifo_head != NULL) error = -EBUSY;
    }
    for (int32_t i = 0; i < count && error == 0; i++) {
        if (ex->chunks[ids[i]] == NULL) continue; /* named twice */
        inf_prefetch_drop(ex, ex->chunks[ids[i]]);
        inf_chunk_drop_failed_write(ex, ex->chunks[ids[i]]);
        free(ex->chunks[ids[i]]);
        ex->chunks[ids[i]] = NULL;
        ex->chunks_free[ex->chunk_free_count++] = ids[i];
        ex->stats.chunks_live--;
    }
    inf_pump(ex); /* released slots may be granted */
    pthread_mutex_unlock(&ex->lock);
    return error;
}

int32_t inf_executor_invalid(inf_executor *ex, const int32_t *ids, int32_t count, uint32_t *masks) {
    int32_t error = 0;
    pthread_mutex_lock(&ex->lock);
    for (int32_t i = 0; i < count; i++) {
        const inf_chunk_record *chunk = inf_chunk_of(ex, ids[i]);
        if (chunk == NULL) error = -EINVAL;
        masks[i] = chunk == NULL ? 0 : chunk->invalid;
    }
    pthread_mutex_unlock(&ex->lock);
    return error;
}

/* ---- jobs ------------------------------------------------------------------------------------ */

/* Whether the section is zeros, now and when all queued jobs of the chunk have ended. */
static bool stays_zero(const inf_chunk_record *chunk, int32_t section) {
    bool written = false;
    for (const inf_run *at = chunk->fifo_head; at != NULL; at = at->fifo_next)
        written = written || (inf_run_written(at) >> section & 1u);
    return (chunk->plan.zeros >> section & 1u) && !written;
}

/* The mask with which a job runs. The signs of a second moment may encode how masters are rounded
 * (halves_to_even in update_codec.h), so an UPDATE that moves masters must not leave that moment
 * out, unless it is all zeros. */
static uint32_t mask_of(const inf_chunk_record *chunk, const inf_job *job) {
    const int32_t format = chunk->plan.format;
    const int32_t signs = inf_format_master_count(format) + 1;
    bool has_signs = inf_format_states(format) == INF_FORMAT_SPLIT;
    bool masters = (inf_job_leaves(job) & 1u) == 0;
    if (inf_job_leaves(job) == 0 || !has_signs || !masters || stays_zero(chunk, signs))
        return job->mask;
    return job->mask & ~(1u << (INF_LEAVES_SHIFT + signs));
}

static int64_t slot_bytes(const inf_chunk_record *record, const inf_job *job) {
    const inf_chunk *chunk = &record->plan;
    int64_t bytes = 0;
    bool update = job->kind == INF_JOB_UPDATE, versioned = inf_chunk_versioned(chunk);
    const inf_job runs = {.kind = job->kind, .mask = mask_of(record, job)};
    uint32_t used = update ? ~inf_job_leaves(&runs) : job->mask;
    if (versioned && (update || job->kind == INF_JOB_STORE)) used = ~0u;
    for (int32_t s = 0; s < chunk->section_count; s++) {
        if ((used >> s & 1u) && !inf_section_resident(chunk, s))
            bytes += inf_align_up(inf_section_bytes(chunk, s));
    }
    return bytes;
}

/* The pool with slots of at least that many bytes, or -1. */
static int32_t pool_for(const struct inf_executor *ex, int64_t bytes) {
    for (int32_t i = 0; i < 2; i++) {
        if ((ex->config.small_count > 0 || i == 1) && bytes <= ex->pools[i].bytes) return i;
    }
    return bytes == 0 ? 0 : -1;
}

static int32_t job_wrong(const struct inf_executor *ex, const inf_job *job, int32_t seg_count,
                         bool gated) {
    bool on_device = job->mask & INF_MASK_DEVICE;
    if (on_device && !ex->device.attached) return BAD_DEVICE;
    if (job->kind == INF_JOB_COPY) {
        bool whole =
            job->ptr[0] != 0 && job->ptr[1] != 0 && job->ptr[2] != 0 && job->ptr[2] <= INT64_MAX;
        return !on_device || gated || job->chunk != -1 ||
                       (job->mask & ~(INF_MASK_DEVICE | 1u)) != 0 || !whole
                   ? BAD_COPY
                   : 0;
    }
    const inf_chunk_record *record = inf_chunk_of(ex, job->chunk);
    if (record == NULL) return BAD_CHUNK;
    const inf_chunk *chunk = &record->plan;
    if (job->kind < INF_JOB_FETCH || job->kind > INF_JOB_UPDATE) return BAD_KIND;
    uint32_t flags = INF_MASK_MOVE_ONLY | INF_MASK_DEVICE;
    bool may_fold = job->kind == INF_JOB_FETCH && !on_device && chunk->sums_ptr != 0;
    if (may_fold) flags |= INF_MASK_FOLDED;
    uint32_t known = inf_sections_all(chunk) | flags;
    bool update = job->kind == INF_JOB_UPDATE;
    if ((job->mask & INF_MASK_PARAM_IN_MEMORY) && (!update || job->ptr[1] == 0)) return BAD_GIVEN;
    if (!update && ((job->mask & ~known) != 0 || (job->mask & ~flags) == 0)) return BAD_MASK;
    if (job->base < -1 || (job->base >= 0 && !gated)) return BAD_BASE;
    if (job->kind == INF_JOB_STORE && job->base >= 0) return BAD_STORE_GATE;
    if (update && chunk->format == INF_FORMAT_RAW) return BAD_FORMAT;
    uint32_t leaves = inf_job_leaves(job);
    bool gives = job->base >= 0 || job->ptr[0] != 0 || (job->mask & INF_MASK_PARAM_IN_MEMORY);
    if ((leaves & ~inf_sections_all(chunk)) != 0 || ((leaves & 1u) && gives)) return BAD_MASK;
    if (update) {
        int64_t end = (int64_t)job->seg_first + job->seg_count;
        if (job->seg_first < 0 || job->seg_count < 0 || end > seg_count) return BAD_SEGS;
    }
    int64_t bytes = slot_bytes(record, job);
    return bytes > 0 && pool_for(ex, bytes) < 0 ? BAD_SIZE : 0;
}

int32_t inf_executor_prefetch(inf_executor *ex, const int32_t *ids, int32_t count,
                              const uint32_t *masks) {
    int32_t accepted = 0;
    pthread_mutex_lock(&ex->lock);
    for (int32_t i = 0; i < count && accepted >= 0; i++) {
        if (inf_chunk_of(ex, ids[i]) == NULL) accepted = -EINVAL;
    }
    while (accepted >= 0 && accepted < count && !ex->shut) {
        inf_chunk_record *chunk = inf_chunk_of(ex, ids[accepted]);
        inf_job update = {.kind = INF_JOB_UPDATE, .mask = masks[accepted]};
        update.mask = mask_of(chunk, &update);
        int32_t pool = pool_for(ex, slot_bytes(chunk, &update));
        if (!inf_prefetch_want(ex, chunk, pool, &update)) break;
        accepted++;
    }
    inf_pump(ex);
    pthread_mutex_unlock(&ex->lock);
    return accepted;
}

static void *copy_of(const void *source, int32_t count, size_t size) {
    size_t bytes = (size_t)(count > 0 ? count : 1) * size;
    void *copy = malloc(bytes);
    if (copy != NULL && count > 0) memcpy(copy, source, (size_t)count * size);
    return copy;
}

/* Whether the run is a FETCH at a closed gate that only its owner opens. */
static bool lingers(const inf_run *run) {
    const inf_gate *gate = run->submission->gate;
    return run->job.kind == INF_JOB_FETCH && run->state == INF_WAITING && gate != NULL &&
           gate->stays && gate->state == INF_GATE_CLOSED;
}

/* Appends a job; a REWRITE is inserted before all jobs that have not started, which might write the
 * chunk, and a FETCH before FETCHes that linger. */
static void fifo_insert(inf_run *run) {
    inf_chunk_record *chunk = run->chunk;
    inf_run *after = chunk->fifo_tail;
    if (run->job.kind == INF_JOB_REWRITE) {
        bool started = chunk->fifo_head != NULL && chunk->fifo_head->state != INF_WAITING;
        after = started ? chunk->fifo_head : NULL;
    }
    if (run->job.kind == INF_JOB_FETCH && after != NULL && lingers(after)) {
        after = NULL;
        for (inf_run *at = chunk->fifo_head; at != NULL; at = at->fifo_next)
            if (!lingers(at)) after = at;
    }
    inf_run **at = after == NULL ? &chunk->fifo_head : &after->fifo_next;
    run->fifo_next = *at;
    *at = run;
    if (run->fifo_next == NULL) chunk->fifo_tail = run;
}

/* Sections that an UPDATE reads from the chunk: not those that it leaves out, not a given section 0
 * (unless it is resident), and spilled gradients only if a segment uses them. */
static uint32_t update_reads(const inf_chunk *chunk, const inf_job *job, const inf_seg *segs) {
    uint32_t reads = inf_sections_all(chunk) & ~inf_grad_mask(chunk) & ~inf_job_leaves(job);
    if ((job->mask & INF_MASK_PARAM_IN_MEMORY) && !inf_section_resident(chunk, 0)) reads &= ~1u;
    for (int32_t i = 0; i < job->seg_count; i++) {
        if (segs[job->seg_first + i].grad_dtype == INF_GRAD_SECTION) reads |= inf_grad_mask(chunk);
    }
    return reads;
}

static void run_init(struct inf_executor *ex, inf_submission *submission, int32_t index,
                     const inf_job *job, int32_t priority) {
    inf_run *run = &submission->runs[index];
    if (job->kind == INF_JOB_COPY) {
        *run = (inf_run){.submission = submission,
                         .chunk = &ex->device.nothing,
                         .job = *job,
                         .priority = priority};
        return;
    }
    *run = (inf_run){.submission = submission,
                     .chunk = ex->chunks[job->chunk],
                     .job = *job,
                     .state = INF_WAITING,
                     .priority = priority};
    if (job->kind == INF_JOB_FETCH) run->reads = job->mask & inf_sections_all(&run->chunk->plan);
    if (job->kind == INF_JOB_UPDATE) {
        run->job.mask = mask_of(run->chunk, job);
        run->reads = update_reads(&run->chunk->plan, &run->job, submission->segs);
        /* here, so that a read ahead has all sections */
        inf_run_make_whole(run, inf_run_moves(run));
    }
    run->slot.pool = pool_for(ex, slot_bytes(run->chunk, job));
    fifo_insert(run);
}

static void submission_enter(struct inf_executor *ex, inf_submission *submission,
                             const inf_job *jobs, int32_t priority, inf_gate *gate) {
    submission->order = ++ex->order;
    submission->next = ex->live;
    if (ex->live != NULL) ex->live->previous = submission;
    ex->live = submission;
    ex->stats.submissions_live++;
    ex->stats.jobs_submitted += (uint64_t)submission->job_count;
    ex->pending += submission->job_count;
    for (int32_t j = 0; j < submission->job_count; j++)
        run_init(ex, submission, j, &jobs[j], priority);
    if (gate != NULL) inf_gate_attach(ex, gate, submission);
    for (int32_t j = 0; j < submission->job_count; j++) {
        inf_run *run = &submission->runs[j];
        if (run->job.kind != INF_JOB_COPY) {
            inf_run_consider(ex, run);
            continue;
        }
        ex->active++;
        inf_device_queue(ex, run, run->job.mask & 1u ? INF_TO_DEVICE : INF_FROM_DEVICE);
    }
    inf_pump(ex);
}

static void submission_free(inf_submission *submission) {
    if (submission == NULL) return;
    free(submission->segs);
    free(submission->hypers);
    free(submission);
}

static inf_submission *submission_new(int32_t job_count, const void *segs, int32_t seg_count,
                                      const void *hypers, int32_t hyper_count) {
    inf_submission *submission =
        calloc(1, sizeof *submission + (size_t)job_count * sizeof(inf_run));
    if (submission == NULL) return NULL;
    submission->segs = copy_of(segs, seg_count, sizeof(inf_seg));
    submission->hypers = copy_of(hypers, hyper_count, sizeof(inf_hyper));
    submission->hyper_count = hyper_count;
    submission->job_count = submission->pending = submission->unfilled = job_count;
    if (submission->segs != NULL && submission->hypers != NULL) return submission;
    submission_free(submission);
    return NULL;
}

static int64_t plan_wrong(const struct inf_executor *ex, const inf_job *jobs, int32_t job_count,
                          int32_t seg_count, const inf_gate *gate) {
    for (int32_t j = 0; j < job_count; j++) {
        int32_t what = job_wrong(ex, &jobs[j], seg_count, gate != NULL);
        if (what == 0 && gate != NULL && gate->state == INF_GATE_OPEN &&
            jobs[j].base >= gate->base_count)
            what = BAD_BASE;
        if (what != 0) return 1 + ((int64_t)j << 4 | what);
    }
    return 0;
}

/* Enters a submission, with a reference of its ticket. [locked] */
static void submission_hand_over(struct inf_executor *ex, inf_ticket *ticket,
                                 inf_submission *submission, const inf_job *jobs, int32_t priority,
                                 inf_gate *gate) {
    ex->holds++;
    if (submission->job_count == 0) {
        ticket->words[0] = ticket->words[1] = 1;
        submission_free(submission);
        return;
    }
    ticket->submission = submission;
    submission->ticket = ticket;
    submission_enter(ex, submission, jobs, priority, gate);
}

static bool on_device(const inf_job *jobs, int32_t job_count) {
    for (int32_t j = 0; j < job_count; j++) {
        if (jobs[j].mask & INF_MASK_DEVICE) return true;
    }
    return false;
}

inf_ticket *inf_executor_submit(inf_executor *ex, const void *jobs, int32_t job_count,
                                const void *segs, int32_t seg_count, const void *hypers,
                                int32_t hyper_count, int32_t priority, inf_gate *gate,
                                int64_t *error) {
    inf_ticket *ticket = calloc(1, sizeof *ticket);
    inf_submission *submission = submission_new(job_count, segs, seg_count, hypers, hyper_count);
    *error = ticket == NULL || submission == NULL ? -ENOMEM : 0;
    inf_mark *mark = NULL;
    if (*error == 0 && ex->device.attached && on_device(jobs, job_count)) {
        int32_t refused = 0;
        mark = inf_device_mark(ex, &refused);
        if (mark == NULL) *error = refused == -ENOMEM ? -ENOMEM : -EREMOTEIO;
    }
    pthread_mutex_lock(&ex->lock);
    if (*error == 0) submission->mark = mark;
    if (*error == 0 && ex->shut) *error = -ESHUTDOWN;
    if (*error == 0) *error = plan_wrong(ex, jobs, job_count, seg_count, gate);
    if (*error == 0) submission_hand_over(ex, ticket, submission, jobs, priority, gate);
    else inf_device_unmark(ex, mark);
    pthread_mutex_unlock(&ex->lock);
    if (*error == 0) return ticket;
    submission_free(submission);
    free(ticket);
    return NULL;
}

/* One REWRITE per chunk with a failed write; *count: their number. NULL without memory. */
static inf_job *rewrites(const struct inf_executor *ex, int32_t *count) {
    inf_job *jobs = calloc(ex->stats.kept_chunks + 1, sizeof *jobs);
    *count = 0;
    for (int32_t c = 0; c < ex->chunk_count && jobs != NULL; c++) {
        if (ex->chunks[c] == NULL || ex->chunks[c]->failed_write_mask == 0) continue;
        jobs[(*count)++] = (inf_job){.chunk = c, .kind = INF_JOB_REWRITE, .base = -1};
    }
    return jobs;
}

inf_ticket *inf_executor_recover(inf_executor *ex, int64_t *error) {
    inf_ticket *ticket = calloc(1, sizeof *ticket);
    inf_submission *submission = NULL;
    int32_t count = 0;
    pthread_mutex_lock(&ex->lock);
    inf_job *jobs = rewrites(ex, &count);
    if (jobs != NULL) submission = submission_new(count, NULL, 0, NULL, 0);
    *error = ticket == NULL || submission == NULL ? -ENOMEM : ex->shut ? -ESHUTDOWN : 0;
    if (*error == 0) {
        /* Under the same lock as unmarking: in between, another job could write a chunk with a
         * failed write. */
        for (int32_t d = 0; d < ex->config.drive_count; d++) ex->drives[d].stats.marked = 0;
        submission_hand_over(ex, ticket, submission, jobs, INF_PRIORITY_COUNT - 1, NULL);
    }
    pthread_mutex_unlock(&ex->lock);
    free(jobs);
    if (*error == 0) return ticket;
    submission_free(submission);
    free(ticket);
    return NULL;
}
