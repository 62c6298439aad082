/* Slots: chooses the run that gets the next slot. All [locked].
 *
 * By priority, then in the order of arrival; of INF_FAIR_TURN grants, one is to the oldest run. The
 * slots of a drive are limited: otherwise a slow drive would come to hold all slots, and stop the
 * fast drives.
 */
#include "executor.h"

#include <errno.h>
#include <stdlib.h>

int32_t inf_pool_make(struct inf_executor *ex, inf_pool *pool, int32_t count, int64_t bytes,
                      uint8_t *base) {
    size_t drives = (size_t)ex->config.drive_count + 1;
    pool->count = pool->free_count = count;
    pool->bytes = count == 0 ? 0 : bytes;
    pool->base = base;
    pool->free = calloc((size_t)count + 1, sizeof *pool->free);
    pool->held = calloc(drives, sizeof *pool->held);
    pool->passed = calloc(drives, sizeof *pool->passed);
    bool made = pool->free != NULL && pool->held != NULL && pool->passed != NULL;
    for (int32_t p = 0; p < INF_PRIORITY_COUNT; p++) {
        pool->waiting[p] = calloc(drives, sizeof *pool->waiting[p]);
        made = made && pool->waiting[p] != NULL;
    }
    for (int32_t s = 0; made && s < count; s++) pool->free[s] = count - 1 - s;
    return made ? 0 : -ENOMEM;
}

void inf_pool_free(const inf_pool *pool) {
    free(pool->free);
    free(pool->held);
    free(pool->passed);
    for (int32_t p = 0; p < INF_PRIORITY_COUNT; p++) free(pool->waiting[p]);
}

/* Maximum slots of one drive: reserves half of an equal share for each other drive. */
int32_t inf_held_max(const struct inf_executor *ex, const inf_pool *pool) {
    int32_t drives = ex->config.drive_count;
    if (drives < 2 || pool->count < drives) return pool->count;
    int32_t left = pool->count / (2 * drives);
    return pool->count - (left > 0 ? left : 1) * (drives - 1);
}

void inf_slot_wait(struct inf_executor *ex, inf_run *run) {
    inf_pool *pool = &ex->pools[run->slot.pool];
    run->state = INF_SLOT;
    run->slot.drive = run->chunk->plan.drive;
    run->order = ++ex->arrivals;
    inf_queue_push(&pool->waiting[run->priority][run->slot.drive], run);
    pool->waiting_count++;
}

bool inf_slot_unwait(struct inf_executor *ex, inf_run *run) {
    inf_pool *pool = &ex->pools[run->slot.pool];
    if (run->state != INF_SLOT ||
        !inf_queue_remove(&pool->waiting[run->priority][run->slot.drive], run))
        return false;
    pool->waiting_count--;
    return true;
}

/* The queue with the oldest head among drives that hold fewer than `held` slots, or NULL. */
static inf_queue *first_of(inf_pool *pool, int32_t priority, int32_t drive_count, int32_t held) {
    inf_queue *first = NULL;
    for (int32_t d = 0; d < drive_count; d++) {
        inf_queue *queue = &pool->waiting[priority][d];
        if (queue->head == NULL || pool->held[d] >= held) continue;
        if (first == NULL || queue->head->order < first->head->order) first = queue;
    }
    return first;
}

inf_run *inf_slot_waiting(inf_pool *pool, int32_t drive_count) {
    for (int32_t p = 0; p < INF_PRIORITY_COUNT; p++) {
        inf_queue *queue = first_of(pool, p, drive_count, INT32_MAX);
        if (queue == NULL) continue;
        pool->waiting_count--;
        return inf_queue_pop(queue);
    }
    return NULL;
}

inf_run *inf_slot_next(struct inf_executor *ex, inf_pool *pool) {
    if (pool->free_count == 0 || pool->waiting_count == 0) return NULL;
    int32_t held = inf_held_max(ex, pool);
    int32_t drives = ex->config.drive_count;
    int32_t owed = INF_FAIR_TURN * drives - 1;
    inf_queue *next = NULL;
    for (int32_t p = 0; p < INF_PRIORITY_COUNT; p++) {
        for (int32_t d = 0; d < drives; d++) {
            inf_queue *queue = &pool->waiting[p][d];
            if (queue->head == NULL || pool->held[d] >= held || pool->passed[d] < owed) continue;
            if (next == NULL || queue->head->order < next->head->order) next = queue;
        }
    }
    if (next != NULL) pool->passed[next->head->slot.drive] = -1;
    for (int32_t p = 0; p < INF_PRIORITY_COUNT && next == NULL; p++)
        next = first_of(pool, p, drives, held);
    if (next == NULL) return NULL;
    inf_run *run = inf_queue_pop(next);
    for (int32_t d = 0; d < drives; d++) pool->passed[d] += pool->passed[d] < owed;
    pool->waiting_count--;
    inf_slot_take(ex, &run->slot);
    return run;
}

bool inf_slot_take(struct inf_executor *ex, inf_slot *slot) {
    inf_pool *pool = &ex->pools[slot->pool];
    if (pool->free_count == 0) return false;
    pool->held[slot->drive]++;
    slot->index = pool->free[--pool->free_count];
    slot->memory = pool->base + (int64_t)slot->index * pool->bytes;
    return true;
}

void inf_slot_release(struct inf_executor *ex, inf_slot *slot) {
    if (slot->memory == NULL) return;
    inf_pool *pool = &ex->pools[slot->pool];
    pool->held[slot->drive]--;
    if (slot->lost) pool->count--;
    else pool->free[pool->free_count++] = slot->index;
    slot->memory = NULL;
}

void inf_slot_put_by(struct inf_executor *ex, inf_slot *slot) {
    ex->pools[slot->pool].count--;
    ex->pools[slot->pool].held[slot->drive]--;
}

void inf_slot_put_back(struct inf_executor *ex, inf_slot *slot) {
    ex->pools[slot->pool].count++;
    ex->pools[slot->pool].held[slot->drive]++;
}
