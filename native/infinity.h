/* infinity: shared declarations of the native extension `infinity._native`.
 *
 * The structs mirror the numpy dtypes of infinity/_src/cabi/records.py byte for byte
 * (tests/unit/native/test_records_layout.py compares every offset). They have no padding: wide
 * members come first. Addresses are uint64_t, so that a numpy array can hold records. Little-endian
 * machines only: sections are written to drives without conversion.
 */
#ifndef INFINITY_H
#define INFINITY_H

#include <stddef.h>
#include <stdint.h>

#if !defined(__BYTE_ORDER__) || __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "infinity needs a little-endian machine"
#endif

#define INF_SECTION_MAX 6
#define INF_LOG_MAX 8
/* Maximum of a size or an offset of a chunk, so that sums of a few do not overflow. */
#define INF_BYTES_MAX ((int64_t)1 << 60)

#define INF_QUANT_GROUP 64 /* elements that share a quantisation scale */

/* A state format: master | moments << 8 | count << 16 | grad << 24; class Format of
 * infinity/_src/cabi/records.py describes the fields. */
enum {
    INF_MASTER_RAW = 0,
    INF_MASTER_SPLIT = 1,
    INF_MASTER_SPLIT8 = 2,
    INF_MASTER_FP32 = 3,
    INF_MASTER_FP16 = 4
};
enum { INF_MOMENTS_FP32 = 0, INF_MOMENTS_BF16 = 1, INF_MOMENTS_Q8 = 2 };
enum {
    INF_GRAD_SECTION_NONE = 0,
    INF_GRAD_SECTION_BF16 = 1,
    INF_GRAD_SECTION_FP32 = 2,
    INF_GRAD_SECTION_FP16 = 3
};
enum {
    INF_FORMAT_RAW = 0,
    INF_FORMAT_SPLIT = INF_MASTER_SPLIT | INF_MOMENTS_FP32 << 8 | 2 << 16,
    INF_FORMAT_FP32 = INF_MASTER_FP32 | INF_MOMENTS_FP32 << 8 | 2 << 16,
    INF_FORMAT_BF16 = INF_MASTER_SPLIT | INF_MOMENTS_BF16 << 8 | 2 << 16,
    INF_FORMAT_COMPACT = INF_MASTER_SPLIT8 | INF_MOMENTS_Q8 << 8 | 2 << 16
};
enum {
    INF_JOB_FETCH = 1,
    INF_JOB_STORE = 2,
    INF_JOB_UPDATE = 3,
    INF_JOB_REWRITE = 4,
    INF_JOB_COPY = 6
};
enum { INF_GRAD_BF16 = 0, INF_GRAD_FP32 = 1, INF_GRAD_FP16 = 2, INF_GRAD_SECTION = 3 };
enum { INF_ADAMW = 0, INF_SGD = 1, INF_LION = 2, INF_MUON_MOMENTUM = 3, INF_MUON = 4 };
enum { INF_FLAG_NESTEROV = 1, INF_FLAG_FIRST = 2 }; /* of SGD; NESTEROV also of MUON_MOMENTUM */
enum { INF_LOG_MUL = 0, INF_LOG_DIV = 1, INF_LOG_CLAMP_MIN = 2, INF_LOG_CLAMP_MAX = 3 };

/* Results of the passes over a chunk that name no (section, piece). */
enum { INF_OK = -1, INF_BAD_PLAN = -2 };

/* A fixed-size piece of a shard. Its run on the drive is one contiguous range that holds the
 * sections that are not resident, in order, each 4096-aligned. `section_at[s]` is the offset in the
 * run, -1 when the section is resident.
 *
 * A versioned chunk has a second place, which is written while the first one is committed (see
 * inf_executor_commit). Between two updates of a step a version is in both places: see `older`.
 * Spilled gradients are not versioned: they have one place, at `grad_offset`, and one bit in
 * `zeros`. */
typedef struct {
    uint64_t key;              /* unique; seeds the checksums together with generation */
    uint64_t generation;
    uint64_t other_generation; /* of the second place */
    int64_t numel;
    int64_t file_offset;       /* of the run, in bytes; -1 = no run */
    int64_t run_bytes;         /* 0 = all sections are resident */
    int64_t other_offset;      /* of the second place's run, in bytes */
    int64_t other_bytes;       /* 0 = no second run */
    int64_t grad_offset;       /* of a versioned chunk's section of gradients, in bytes */
    int32_t drive;       /* -1 = none */
    int32_t format;
    int32_t section_count;
    int32_t piece_numel; /* elements covered by one checksum of one section */
    int32_t file;        /* the run's file: an index among the drive's files */
    int32_t other_file;  /* the second run's file */
    int32_t grad_file;   /* of a versioned chunk's section of gradients, always on `drive` */
    int32_t other_drive; /* the second run's; `drive` unless a failed write moved a run */
    /* bit s = section s was never written to the drive: a read of it returns zeros */
    uint16_t zeros;
    uint16_t other_zeros;      /* of the second place */
    /* bit s = section s is not written yet in this version: it is at the second place, on the same
     * drive, and has that place's generation */
    uint16_t older;
    uint16_t reserved;         /* 0; aligns the next fields to 8 bytes */
    int32_t itemsize[INF_SECTION_MAX];
    int32_t group_numel[INF_SECTION_MAX]; /* elements per item; 0 means 1 */
    int64_t section_at[INF_SECTION_MAX];
    uint64_t section_ptr[INF_SECTION_MAX]; /* address when resident, else 0 */
    /* address of the second version of a resident section; 0 = changed in place */
    uint64_t other_ptr[INF_SECTION_MAX];
    /* uint32_t[section_count][piece_count]; 0 = no checksums */
    uint64_t sums_ptr;
    uint64_t other_sums_ptr;               /* of the second place; 0 = no checksums */
} inf_chunk;

typedef struct {
    int32_t chunk;
    int32_t kind;  /* INF_JOB_* */
    /* bit s = section s; bit INF_LEAVES_SHIFT + s = an UPDATE neither reads nor writes section s */
    uint32_t mask;
    int32_t base;  /* index into the gate's bases, -1 = ptr[0] is absolute */
    int32_t seg_first;
    int32_t seg_count;
    uint64_t ptr[INF_SECTION_MAX];
} inf_job;

#define INF_LEAVES_SHIFT 8
/* In an UPDATE's mask: another UPDATE of the chunk follows before the next commit. So this one
 * leaves sections out of a new version, and the next one that has no such bit completes it. */
#define INF_MASK_FIRST 0x08000000u
#define INF_MASK_LEAVES (((1u << INF_SECTION_MAX) - 1u) << INF_LEAVES_SHIFT)

/* The sections that an UPDATE leaves out. */
static inline uint32_t inf_job_leaves(const inf_job *job) {
    return job->kind == INF_JOB_UPDATE ? (job->mask & INF_MASK_LEAVES) >> INF_LEAVES_SHIFT : 0;
}

/* A range of a chunk that belongs to one parameter. The segments of a chunk ascend and do not
 * overlap. With quantised moments, `start` and `element` are multiples of INF_QUANT_GROUP, and the
 * elements from a segment's end to the end of its group belong to no parameter. */
typedef struct {
    int64_t start; /* element in the chunk */
    int64_t numel;
    /* the parameter's index of element `start`; stochastic rounding uses (hyper's key, element) */
    int64_t element;
    /* address of the gradient of element `start`, aligned to its own size; unused for
     * INF_GRAD_SECTION */
    uint64_t grad;
    int32_t grad_dtype;
    int32_t hyper; /* index into the submission's inf_hyper array */
} inf_seg;

/* An algorithm's scalars, computed in fp64 and rounded once; the kernel first replays `log` on the
 * fp32 gradient.
 *
 *              AdamW                        Lion                  SGD
 * decay        1 - lr * weight_decay        the same              -
 * beta1        beta1                        beta1                 momentum
 * one_minus_1  1 - beta1                    1 - beta1             1 - dampening
 * beta2        beta2                        beta2                 -
 * one_minus_2  1 - beta2                    1 - beta2             -
 * eps          eps                          -                     -
 * bc2_sqrt     sqrt(1 - beta2 ** step)      -                     -
 * step_size    lr / (1 - beta1 ** step)     lr                    lr
 * weight_decay -                            -                     weight_decay
 *
 * SGD's weight_decay is added to the gradient; 0 = none.
 *
 * A step of Muon takes two updates: MUON_MOMENTUM has beta1 (momentum), one_minus_1 and NESTEROV;
 * MUON, whose gradient is the orthogonalized matrix, has decay and step_size.
 */
typedef struct {
    uint64_t key; /* for stochastic rounding */
    float decay;
    float beta1;
    float one_minus_beta1;
    float beta2;
    float one_minus_beta2;
    float eps;
    float bc2_sqrt;
    float step_size;
    float weight_decay;
    int32_t algorithm; /* INF_ADAMW ... */
    int32_t flags;     /* INF_FLAG_* */
    int32_t log_count;
    int32_t log_kind[INF_LOG_MAX]; /* INF_LOG_* */
    float log_value[INF_LOG_MAX];
} inf_hyper;

/* ---- chunk geometry -------------------------------------------------------------------------- */

static inline int64_t inf_piece_count(const inf_chunk *chunk) {
    return (chunk->numel + chunk->piece_numel - 1) / chunk->piece_numel;
}

/* Bytes of the first `numel` elements of a section, rounded up to whole items. */
static inline int64_t inf_section_span(const inf_chunk *chunk, int32_t section, int64_t numel) {
    const int64_t group = chunk->group_numel[section];
    const int64_t items = group > 1 ? numel / group + (numel % group != 0) : numel;
    return items * chunk->itemsize[section];
}

static inline int64_t inf_section_bytes(const inf_chunk *chunk, int32_t section) {
    return inf_section_span(chunk, section, chunk->numel);
}

/* Whether there is a second place, on the drive or in memory. */
static inline int inf_chunk_versioned(const inf_chunk *chunk) {
    int versioned = chunk->other_bytes > 0;
    for (int32_t s = 0; s < INF_SECTION_MAX; s++) versioned |= chunk->other_ptr[s] != 0;
    return versioned;
}

static inline int inf_section_resident(const inf_chunk *chunk, int32_t section) {
    return chunk->section_at[section] < 0;
}

/* The sections that are not resident, as a mask. */
static inline uint32_t inf_sections_on_drive(const inf_chunk *chunk) {
    uint32_t mask = 0;
    for (int32_t s = 0; s < chunk->section_count; s++)
        mask |= (uint32_t)!inf_section_resident(chunk, s) << s;
    return mask;
}

/* Whether a section is read from the second place. */
static inline int inf_section_older(const inf_chunk *chunk, int32_t section) {
    return chunk->older >> section & 1;
}

/* ---- formats --------------------------------------------------------------------------------- */

static inline int32_t inf_format_master(int32_t format) { return format & 255; }
static inline int32_t inf_format_moments(int32_t format) { return format >> 8 & 255; }
static inline int32_t inf_format_count(int32_t format) { return format >> 16 & 255; }
static inline int32_t inf_format_grad(int32_t format) { return (int32_t)((uint32_t)format >> 24); }

/* The format without its section of gradients. */
static inline int32_t inf_format_states(int32_t format) { return format & 0xFFFFFF; }

/* Sections of the master; the moments follow. */
static inline int32_t inf_format_master_count(int32_t format) {
    const int32_t master = inf_format_master(format);
    return master == INF_MASTER_RAW || master == INF_MASTER_FP32 ? 1 : 2;
}

/* Itemsizes and elements per item of a format's sections (RAW: itemsize 0 = any). Returns the
 * number of sections, 0 for an invalid format. */
int32_t inf_format_sections(int32_t format, int32_t itemsize[INF_SECTION_MAX],
                            int32_t group_numel[INF_SECTION_MAX]);

/* Number of sections that an UPDATE writes: all except the gradients, which are the last section.
 * */
static inline int32_t inf_format_written(int32_t format, int32_t section_count) {
    return section_count - (inf_format_grad(format) != INF_GRAD_SECTION_NONE);
}

/* 1 if the fields are consistent (sizes positive, sections inside the run, itemsizes of the
 * format). */
int32_t inf_chunk_valid(const inf_chunk *chunk);

/* ---- checksums (crc32c.c) -------------------------------------------------------------------- */

/* CRC-32C (Castagnoli), chained as zlib's crc32: crc(crc(0, a), b) == crc(0, ab). Any alignment. */
uint32_t inf_crc32c(uint32_t seed, const void *data, size_t size_bytes);

/* Implementations, best last; `inf_crc32c_with` returns 0 in *ok where the machine lacks one. For
 * tests, benches. */
enum {
    INF_CRC_PORTABLE = 0,
    INF_CRC_STREAMS = 1,
    INF_CRC_CLMUL = 2,
    INF_CRC_VPCLMUL256 = 3,
    INF_CRC_VPCLMUL = 4,
    INF_CRC_COUNT = 5
};
const char *inf_crc32c_name(int32_t variant); /* NULL past the last; variant -1 = the one in use */
uint32_t inf_crc32c_with(int32_t variant, uint32_t seed, const void *data, size_t size_bytes,
                         int32_t *ok);

/* `verify` of the passes: none, every piece, or (INF_VERIFY_SAMPLE + phase) one piece of
 * INF_VERIFY_STRIDE: every read checks some pieces, and as many reads as the stride check all. */
enum { INF_VERIFY_OFF = 0, INF_VERIFY_FULL = 1, INF_VERIFY_SAMPLE = 2, INF_VERIFY_STRIDE = 16 };

/* Seed of a piece's checksum, so that stale or misdirected data fails the comparison. */
uint32_t inf_sum_seed(uint64_t generation, uint64_t key, int32_t section, int64_t piece);

/* ---- passes over a chunk (chunk_pass.c): none blocks, allocates or touches a drive ----------- */

/* FETCH of one section: verify piece by piece, copy to `to` (NULL: only verify). Resident sections
 * and chunks without checksums are only copied. Returns INF_OK or the first bad piece (`to` is then
 * partly written). */
int64_t inf_section_fetch(const inf_chunk *chunk, int32_t section, const uint8_t *from, uint8_t *to,
                          int32_t verify);

/* inf_section_fetch with one checksum per section, `uint32_t[section_count]` at sums_ptr: the CRC
 * of the section's piece checksums in order. Returns INF_OK, or 0 on a mismatch. */
int64_t inf_section_fetch_folded(const inf_chunk *chunk, int32_t section, const uint8_t *from,
                                 uint8_t *to);

/* Computes one checksum per section for `count` chunks: sums[i] is the address of
 * uint32_t[section_count][pieces[i]], folded is uint32_t[count][section_count]. */
void inf_fold_sums(const uint64_t *sums, const int64_t *pieces, int64_t count,
                   int32_t section_count, uint32_t *folded);

/* STORE of one section: copy `from` (NULL: zeros; `from == to`: in place) to `to` and set its
 * checksums. */
void inf_section_store(const inf_chunk *chunk, int32_t section, const uint8_t *from, uint8_t *to);

/* UPDATE: one fused pass: verify a piece of every section -> kernel on segments that meet it -> new
 * checksum.
 *
 * section[s]: address of section s (in the slot, or section_ptr when resident), updated in place;
 * NULL: no segment's algorithm needs it (inf_update_sections), and the section keeps its contents
 * and checksums. out0: target of a copy of section 0 after the update, or NULL. in_memory_mask:
 * bit s = section s was not read from the drive but copied from the caller's memory (it is not
 * verified; its checksums are set, since it will be written). sums_scratch:
 * uint32_t[section_count * piece_count], unused when sums_ptr is 0. The `grad` section is verified,
 * but neither written nor summed again.
 *
 * Returns INF_OK, after which *sums_ptr holds the new checksums; INF_BAD_PLAN, nothing touched; or
 * section * piece_count + piece of the first mismatch. Then *sums_ptr, resident
 * sections and sections of in_memory_mask are unchanged, and the slot's contents are undefined:
 * read the run again and repeat. (So if a chunk has such sections and others that were read, all
 * pieces are verified before the first is updated.)
 * A piece outside of all segments keeps its checksum. */
int64_t inf_chunk_update(const inf_chunk *chunk, uint8_t *const section[INF_SECTION_MAX],
                         const inf_seg *segs, int32_t seg_count, const inf_hyper *hypers,
                         int32_t hyper_count, uint8_t *out0, int32_t verify,
                         uint32_t in_memory_mask, uint32_t *sums_scratch);

/* inf_chunk_update in one pass, even if only some of the chunk's sections were read from the drive:
 * `undo` (inf_undo_bytes(chunk) bytes) saves resident sections. After a mismatch resident sections
 * are restored, and sections of in_memory_mask are not. out0 is then unchanged, so it may be the
 * memory from which they were copied. to: the chunk at the place that is written, all of whose
 * checksums are set, also of sections left out; or `chunk` itself. */
int64_t inf_chunk_update_undo(const inf_chunk *chunk, const inf_chunk *to,
                              uint8_t *const section[INF_SECTION_MAX], const inf_seg *segs,
                              int32_t seg_count, const inf_hyper *hypers, int32_t hyper_count,
                              uint8_t *out0, int32_t verify, uint32_t in_memory_mask,
                              uint32_t *sums_scratch, uint8_t *undo);
size_t inf_undo_bytes(const inf_chunk *chunk);

/* ---- kernels (optimizer_kernels.c) ----------------------------------------------------------- */

/* The kernels' instruction set: "portable", "avx2" or "avx512"; by default the best of the machine.
 * */
const char *inf_isa(void);
/* its index: 0 portable, 1 avx2, 2 avx512; for other files with a version per instruction set */
int32_t inf_isa_index(void);
/* Returns 1, or 0 if the machine lacks it. No kernel may be running. */
int32_t inf_isa_select(const char *name);

/* Whether `inf_update` supports the format with the algorithm (RAW has no states; AdamW has two
 * moments, Lion one, SGD one, or none when its momentum is 0; Muon's is the first of one or two),
 * and the hyper's log is in range. */
int32_t inf_update_valid(int32_t format, const inf_hyper *hyper);

/* The sections that the algorithm reads and writes, as a mask: all, but for Muon's two updates.
 * inf_update_valid must hold. */
uint32_t inf_update_sections(int32_t format, const inf_hyper *hyper);

/* The update of `hyper->algorithm` in place on [numel] elements of the sections of `format`, which
 * has no `grad`. element: the parameter's, at the first (see inf_seg). grad_dtype: an INF_GRAD_*
 * other than SECTION. MUON_MOMENTUM writes its result over the gradient: as fp32, or in the two
 * bytes of bf16 and fp16 as bf16. Pointers are aligned to their items. Denormals are kept in every
 * floating-point mode of the thread. inf_update_valid must hold. */
void inf_update(int32_t format, uint8_t *const section[INF_SECTION_MAX], const void *grad,
                int32_t grad_dtype, int64_t numel, int64_t element, const inf_hyper *hyper);

/* fp32 master <-> (hi, lo), without a second moment. NaN becomes 0x7FC00000. A master half-way to
 * the next bf16, whose hi is rounded to the lower, even one, becomes the preceding fp32. All other
 * values round-trip. */
void inf_split_master(const float *master, uint16_t *hi, int16_t *lo, int64_t numel);
void inf_join_master(const uint16_t *hi, const int16_t *lo, float *master, int64_t numel);

#endif
