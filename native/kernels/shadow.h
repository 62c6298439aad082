/* Checksums in the shadow of an update. The crc instruction runs on a port that an update of
 * floating-point numbers leaves idle, so each row of the update's loops executes 24 of them, for
 * three streams over other memory. Most of their time overlaps with the update's. */
#ifndef INFINITY_SHADOW_H
#define INFINITY_SHADOW_H

#include "infinity.h"

/* Elements of a block of an update: an array of them as fp32 takes 1 KiB of stack, and stays in L1
 * from decoding to encoding. */
#define INF_BLOCK_NUMEL 256

/* A block of an update takes this many bytes of each stream along. */
enum { INF_SHADOW_STREAM = 1024, INF_SHADOW_BLOCK = 3 * INF_SHADOW_STREAM };

typedef struct {
    const uint8_t *data;
    size_t size_bytes;
    uint32_t seed;
    uint32_t *sum; /* where the checksum goes */
} inf_shadow_job;

typedef struct {
    const uint8_t *words; /* the next bytes of the first stream of jobs[next] */
    size_t stream_bytes;  /* from one stream to the next */
    int32_t blocks;       /* left of these streams; 0 = no job */
    int32_t next;
    int32_t count;
    uint64_t state[3];
    inf_shadow_job jobs[2 * INF_SECTION_MAX];
} inf_shadow;

/* Whether the processor has the crc instruction and carry-less multiplication. */
int inf_shadow_usable(void);

/* Blocks of an update that a job of this size takes. */
int32_t inf_shadow_blocks(size_t size_bytes);

/* The caller has set `jobs` and `count`. */
void inf_shadow_start(inf_shadow *shadow);

/* Called after a block of an update has advanced the three states. */
void inf_shadow_advance(inf_shadow *shadow);

/* Computes the checksums of the jobs that are left; of one that has begun, from its start. */
void inf_shadow_finish(inf_shadow *shadow);

/* inf_update; meanwhile prefetches the states and gradients that are `ahead` elements further on
 * (0 = none; the sections may end before these, since a prefetch does not fault), and advances
 * `shadow` (or NULL), as far as its loops can. */
void inf_update_beside(int32_t format, uint8_t *const section[INF_SECTION_MAX], const void *grad,
                       int32_t grad_dtype, int64_t numel, int64_t element, const inf_hyper *hyper,
                       int64_t ahead, inf_shadow *shadow);

#endif
