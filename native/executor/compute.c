/* Workers: verify, update, copy and checksum. */
#include "executor.h"

#include <stdlib.h>
#include <string.h>

static uint8_t *pointer(uint64_t address) { return (uint8_t *)(uintptr_t)address; }

/* Copies the live version of resident sections to the new version, except sections copied from the
 * device. */
static void bring(const inf_run *run) {
    const inf_chunk *chunk = &run->chunk->plan;
    for (int32_t s = 0; run->moves && s < chunk->section_count; s++) {
        bool is_there =
            run->copied_in && run->job.kind == INF_JOB_STORE && (run->job.mask >> s & 1u);
        if (chunk->other_ptr[s] == 0 || is_there) continue;
        memcpy(pointer(chunk->other_ptr[s]), pointer(chunk->section_ptr[s]),
               (size_t)inf_section_bytes(chunk, s));
    }
}

/* Writes zeros to sections that are known to be zeros. A repeated pass calls this again, since the
 * first pass may have changed them. */
static void fill_zeros(const inf_run *run) {
    for (int32_t s = 0; s < run->chunk->plan.section_count; s++) {
        if (run->zeros >> s & 1u)
            memset(inf_section_address(run, s), 0,
                   (size_t)inf_align_up(inf_section_bytes(&run->chunk->plan, s)));
    }
}

static int64_t compute_fetch(const inf_run *run) {
    const inf_chunk *chunk = &run->chunk->plan;
    bool on_device = run->job.mask & INF_MASK_DEVICE; /* copied later: see inf_device_takes */
    fill_zeros(run);
    for (int32_t s = 0; s < chunk->section_count; s++) {
        if (!(run->job.mask >> s & 1u)) continue;
        /* sections that were never written have no checksums */
        int32_t verify = run->zeros >> s & 1u ? INF_VERIFY_OFF : run->verify;
        const uint8_t *from = inf_section_address(run, s);
        uint8_t *to = on_device ? NULL : pointer(run->job.ptr[s]);
        bool folded = verify != INF_VERIFY_OFF && (run->job.mask & INF_MASK_FOLDED);
        int64_t bad = folded ? inf_section_fetch_folded(chunk, s, from, to)
                             : inf_section_fetch(chunk, s, from, to, verify);
        if (bad >= 0) return s * inf_piece_count(chunk) + bad;
        if (bad != INF_OK) return bad;
    }
    return INF_OK;
}

/* The chunk at the place that the run writes. */
static inf_chunk written_to(const inf_run *run) {
    inf_chunk to = run->moves ? inf_chunk_other(&run->chunk->plan) : run->chunk->plan;
    to.older = 0;
    return to;
}

static int64_t compute_store(const inf_run *run) {
    const inf_chunk *chunk = &run->chunk->plan;
    const inf_chunk to = written_to(run);
    for (int32_t s = 0; s < chunk->section_count; s++) {
        if (!(run->reads >> s & 1u)) continue;
        int64_t bad = inf_section_fetch(chunk, s, inf_section_address(run, s), NULL, run->verify);
        if (bad >= 0) return s * inf_piece_count(chunk) + bad;
    }
    bring(run);
    fill_zeros(run);
    for (int32_t s = 0; s < chunk->section_count; s++) {
        bool given = run->job.mask >> s & 1u;
        uint8_t *at = inf_section_address(run, s);
        /* gradients have no versions */
        const inf_chunk *view = inf_grad_mask(chunk) >> s & 1u ? chunk : &to;
        if (given || ((run->reads | run->zeros) >> s & 1u))
            inf_section_store(view, s, given && !run->copied_in ? pointer(run->job.ptr[s]) : at,
                              at);
    }
    return INF_OK;
}

/* The unused end of the slot, in which the pass saves resident sections, so that it need not verify
 * the whole chunk first. (Slots have the size of a chunk that is wholly on a drive.) NULL if the
 * end is too small. */
static uint8_t *undo_memory(const struct inf_executor *ex, const inf_run *run) {
    const inf_chunk *chunk = &run->chunk->plan;
    if (run->slot.memory == NULL) return NULL;
    int64_t used = 0;
    for (int32_t s = 0; s < chunk->section_count; s++) {
        if (run->slot.section_at[s] < 0) continue;
        int64_t end = run->slot.section_at[s] + inf_align_up(inf_section_bytes(chunk, s));
        if (end > used) used = end;
    }
    bool fits = (int64_t)inf_undo_bytes(chunk) <= ex->pools[run->slot.pool].bytes - used;
    return fits ? run->slot.memory + used : NULL;
}

static int64_t compute_update(inf_worker *worker, const inf_run *run) {
    const inf_chunk *chunk = &run->chunk->plan;
    size_t words = (size_t)(chunk->section_count * inf_piece_count(chunk));
    if (worker->scratch_words < words) { /* in the first updates only */
        uint32_t *scratch = realloc(worker->scratch, words * sizeof *scratch);
        if (scratch == NULL) return INF_BAD_PLAN;
        worker->scratch = scratch;
        worker->scratch_words = words;
    }
    uint8_t *sections[INF_SECTION_MAX] = {NULL};
    bring(run);
    const inf_chunk to = written_to(run);
    const uint32_t used = inf_run_used(run);
    for (int32_t s = 0; s < chunk->section_count; s++)
        sections[s] = used >> s & 1u ? inf_section_address(run, s) : NULL;
    fill_zeros(run);
    uint32_t unread = used & ~run->reads;
    /* Given by the caller. A repeated pass copies it again, since the slot has changed. */
    if ((unread & ~run->zeros & 1u) && !run->copied_in) {
        memcpy(sections[0], pointer(run->job.ptr[1]), (size_t)inf_section_bytes(chunk, 0));
    }
    const inf_submission *submission = run->submission;
    uint64_t out = run->job.mask & INF_MASK_DEVICE ? 0 : run->job.ptr[0];
    return inf_chunk_update_undo(
        chunk, run->moves || chunk->older != 0 ? &to : chunk, sections,
        submission->segs + run->job.seg_first, run->job.seg_count, submission->hypers,
        submission->hyper_count, pointer(out), run->verify, unread, worker->scratch,
        undo_memory(worker->ex, run));
}

/* Whether the fault injector skips the run: with null drives only every n-th chunk is computed. */
static bool passes_by(const struct inf_executor *ex, const inf_run *run) {
    const inf_seam *seam = &ex->config.seam;
    if (seam->null_batch == 0) return false;
    return seam->null_computes == 0 || run->chunk->id % seam->null_computes != 0;
}

/* After a failed partial write: verifies the other sections of the place, and copies the job's
 * sections next to them. */
static int64_t compute_rest(const inf_run *run) {
    const inf_chunk *chunk = &run->chunk->plan;
    const inf_chunk to = written_to(run);
    const inf_slot *aside = &run->chunk->failed_write;
    for (int32_t s = 0; s < chunk->section_count; s++) {
        uint8_t *at = inf_section_address(run, s);
        if (run->rest >> s & 1u) {
            int64_t bad = inf_section_fetch(chunk, s, at, NULL, INF_VERIFY_FULL);
            if (bad >= 0) return s * inf_piece_count(chunk) + bad;
            if (run->moves) inf_section_store(&to, s, at, at);
        } else if (run->aside && (run->slot.written >> s & 1u)) {
            memcpy(at, aside->memory + aside->section_at[s],
                   (size_t)inf_align_up(inf_section_bytes(chunk, s)));
        }
    }
    return INF_OK;
}

static int64_t compute(inf_worker *worker, const inf_run *run) {
    if (run->rest != 0) return compute_rest(run);
    if (passes_by(worker->ex, run)) return INF_OK;
    switch (run->job.kind) {
    case INF_JOB_FETCH: return compute_fetch(run);
    case INF_JOB_STORE: return compute_store(run);
    default: return compute_update(worker, run);
    }
}

static int64_t compute_bytes(const inf_run *run) {
    int64_t bytes = 0;
    for (int32_t s = 0; s < run->chunk->plan.section_count; s++) {
        if (inf_run_used(run) >> s & 1u)
            bytes += inf_section_bytes(&run->chunk->plan, s);
    }
    return bytes;
}

void inf_run_queue_compute(struct inf_executor *ex, inf_run *run) {
    run->state = INF_COMPUTING;
    run->verify = ex->config.verify;
    if (run->verify >= INF_VERIFY_SAMPLE && run->reread) {
        run->verify = INF_VERIFY_FULL;
    } else if (run->verify >= INF_VERIFY_SAMPLE && run->job.kind != INF_JOB_STORE) {
        run->verify = INF_VERIFY_SAMPLE + (int32_t)(run->chunk->verified++ % INF_VERIFY_STRIDE);
    }
    run->order = ++ex->arrivals;
    inf_queue_push(&ex->compute[run->priority], run);
    ex->compute_count++;
    pthread_cond_signal(&ex->work);
}

static inf_run *compute_next(struct inf_executor *ex) {
    bool fair = (ex->compute_grants + 1) % INF_FAIR_TURN == 0;
    inf_queue *next = NULL;
    for (int32_t p = 0; p < INF_PRIORITY_COUNT && (next == NULL || fair); p++) {
        inf_queue *queue = &ex->compute[p];
        if (queue->head != NULL && (next == NULL || queue->head->order < next->head->order))
            next = queue;
    }
    if (next == NULL) return NULL;
    ex->compute_grants++;
    ex->compute_count--;
    return inf_queue_pop(next);
}

bool inf_worker_step(inf_worker *worker) {
    struct inf_executor *ex = worker->ex;
    inf_run *run = compute_next(ex);
    if (run == NULL) return false;
    pthread_mutex_unlock(&ex->lock);
    int64_t start_ns = inf_now_ns();
    run->bad = compute(worker, run);
    int64_t end_ns = inf_now_ns();
    pthread_mutex_lock(&ex->lock);
    ex->stats.compute_ns += (uint64_t)(end_ns - start_ns);
    if (ex->spans_on) {
        inf_span_add(ex, run, run->job.kind == INF_JOB_UPDATE ? INF_TRACK_UPDATE : INF_TRACK_COPY,
                     start_ns, compute_bytes(run));
    }
    inf_queue_push(&ex->ended, run);
    return true;
}
