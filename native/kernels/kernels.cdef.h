/* What Python sees of infinity.h. Parsed by cffi first of all *.cdef.h (others use these structs);
 * cffi checks at compile time that it agrees with infinity.h. */

typedef struct {
    uint64_t key;
    uint64_t generation;
    uint64_t other_generation;
    int64_t numel;
    int64_t file_offset;
    int64_t run_bytes;
    int64_t other_offset;
    int64_t other_bytes;
    int64_t grad_offset;
    int32_t drive;
    int32_t format;
    int32_t section_count;
    int32_t piece_numel;
    int32_t file;
    int32_t other_file;
    int32_t grad_file;
    int32_t other_drive;
    uint16_t zeros;
    uint16_t other_zeros;
    uint16_t older;
    uint16_t reserved;
    int32_t itemsize[6];
    int32_t group_numel[6];
    int64_t section_at[6];
    uint64_t section_ptr[6];
    uint64_t other_ptr[6];
    uint64_t sums_ptr;
    uint64_t other_sums_ptr;
} inf_chunk;

typedef struct {
    int32_t chunk;
    int32_t kind;
    uint32_t mask;
    int32_t base;
    int32_t seg_first;
    int32_t seg_count;
    uint64_t ptr[6];
} inf_job;

typedef struct {
    int64_t start;
    int64_t numel;
    int64_t element;
    uint64_t grad;
    int32_t grad_dtype;
    int32_t hyper;
} inf_seg;

typedef struct {
    uint64_t key;
    float decay;
    float beta1;
    float one_minus_beta1;
    float beta2;
    float one_minus_beta2;
    float eps;
    float bc2_sqrt;
    float step_size;
    float weight_decay;
    int32_t algorithm;
    int32_t flags;
    int32_t log_count;
    int32_t log_kind[8];
    float log_value[8];
} inf_hyper;

int32_t inf_format_sections(int32_t format, int32_t itemsize[6], int32_t group_numel[6]);
int32_t inf_chunk_valid(const inf_chunk *chunk);

uint32_t inf_crc32c(uint32_t seed, const void *data, size_t size_bytes);
const char *inf_crc32c_name(int32_t variant);
uint32_t inf_crc32c_with(int32_t variant, uint32_t seed, const void *data, size_t size_bytes,
                         int32_t *ok);
uint32_t inf_sum_seed(uint64_t generation, uint64_t key, int32_t section, int64_t piece);

int64_t inf_section_fetch(const inf_chunk *chunk, int32_t section, const uint8_t *from, uint8_t *to,
                          int32_t verify);
void inf_fold_sums(const uint64_t *sums, const int64_t *pieces, int64_t count,
                   int32_t section_count, uint32_t *folded);
void inf_section_store(const inf_chunk *chunk, int32_t section, const uint8_t *from, uint8_t *to);
int64_t inf_chunk_update(const inf_chunk *chunk, uint8_t *const section[6], const inf_seg *segs,
                         int32_t seg_count, const inf_hyper *hypers, int32_t hyper_count,
                         uint8_t *out0, int32_t verify, uint32_t in_memory_mask,
                         uint32_t *sums_scratch);
int64_t inf_chunk_update_undo(const inf_chunk *chunk, const inf_chunk *to,
                              uint8_t *const section[6], const inf_seg *segs, int32_t seg_count,
                              const inf_hyper *hypers, int32_t hyper_count, uint8_t *out0,
                              int32_t verify, uint32_t in_memory_mask, uint32_t *sums_scratch,
                              uint8_t *undo);
size_t inf_undo_bytes(const inf_chunk *chunk);

const char *inf_isa(void);
int32_t inf_isa_index(void);
int32_t inf_isa_select(const char *name);
int32_t inf_update_valid(int32_t format, const inf_hyper *hyper);
void inf_update(int32_t format, uint8_t *const section[6], const void *grad, int32_t grad_dtype,
                int64_t numel, int64_t element, const inf_hyper *hyper);
void inf_split_master(const float *master, uint16_t *hi, int16_t *lo, int64_t numel);
void inf_join_master(const uint16_t *hi, const int16_t *lo, float *master, int64_t numel);
