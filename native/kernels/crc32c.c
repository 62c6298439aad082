/* CRC-32C (Castagnoli polynomial 0x1EDC6F41, reflected 0x82F63B78) on the CPU's instructions.
 *
 * A crc instruction has latency 3 and throughput 1, so one stream of it leaves two thirds of the
 * unit idle; a carry-less multiplication folds 16 bytes of a message onto later ones and runs on
 * another port. Five implementations:
 *
 *   portable    eight tables, 8 bytes a step
 *   streams     three interleaved streams of the crc instruction (SSE4.2, ARMv8 CRC)
 *   clmul       three such streams and, in the same loop, 128-bit folding of a fourth part
 *   vpclmul256  the same with 256-bit folding (AVX2 with VPCLMULQDQ)
 *   vpclmul     the same with 512-bit folding (AVX-512 with VPCLMULQDQ)
 *
 * All constants are powers of x modulo the polynomial and are computed at load, not copied from
 * anywhere. chunk_pass.c makes and verifies the checksums of chunks.
 *
 * [Note: reflected arithmetic]
 * A 32-bit value holds a polynomial with bit 31 = x^0 and bit 0 = x^31; a 64-bit value likewise
 * with x^63 at bit 0, so a 32-bit value in its low half stands for itself times x^32. A carry-less
 * product of two such has its lowest bit one place below the top of the double width, which is one
 * more factor of x. Two facts follow:
 *   - the crc instruction turns a state s and a 64-bit word w into (s * x^32 + w) * x^32 mod P,
 *     reading s in the low half; hence crc64(0, clmul(a, b)) = a * b * x^33 mod P for 32-bit a and
 *     b. Moving a state past L bytes multiplies it by x^(8L), so the constant to multiply with is
 *     x^(8L - 33).
 *   - to move a 128-bit accumulator (lo, hi) past D bits: lo * x^(D+64) + hi * x^D. With a constant
 *     in the low half of 64 bits (x^32 too many) and the product's extra x, the constants are
 *     x^(D+31) for lo and x^(D-33) for hi.
 */
#include "cpu.h"
#include "infinity.h"
#include "shadow.h"

#include <assert.h>
#include <string.h>

#if defined(__x86_64__)
#define INF_CRC_X86 1
#include <immintrin.h>
#elif defined(__aarch64__) && defined(__linux__)
#define INF_CRC_ARM 1
#include <arm_acle.h>
#include <sys/auxv.h>
#endif

#define POLY 0x82F63B78u
#define X_TO_0 0x80000000u /* the polynomial 1 */

/* ---- arithmetic modulo P, slow, for constants ------------------------------------------------ */

static uint32_t times_x(uint32_t a) {
    return (a >> 1) ^ ((a & 1u) ? POLY : 0u);
}

static uint32_t multiply(uint32_t a, uint32_t b) {
    uint32_t product = 0;
    for (uint32_t bit = X_TO_0; bit != 0; bit >>= 1) {
        if (a & bit) product ^= b;
        b = times_x(b);
    }
    return product;
}

static uint32_t x_to(uint64_t power) {
    uint32_t result = X_TO_0, square = X_TO_0 >> 1;
    for (; power != 0; power >>= 1) {
        if (power & 1u) result = multiply(result, square);
        square = multiply(square, square);
    }
    return result;
}

/* Table rows of the portable version: row k moves a byte past k more bytes. */
static uint32_t byte_table[8][256];

static void make_byte_table(void) {
    for (uint32_t byte = 0; byte < 256; byte++) {
        uint32_t state = byte;
        for (int bit = 0; bit < 8; bit++) state = times_x(state);
        byte_table[0][byte] = state;
    }
    for (uint32_t byte = 0; byte < 256; byte++) {
        for (int row = 1; row < 8; row++) {
            const uint32_t before = byte_table[row - 1][byte];
            byte_table[row][byte] = (before >> 8) ^ byte_table[0][before & 0xFFu];
        }
    }
}

static inline uint64_t load64(const uint8_t *data) {
    uint64_t word;
    memcpy(&word, data, sizeof word);
    return word;
}

/* ---- portable -------------------------------------------------------------------------------- */

static uint32_t crc_portable(uint32_t state, const uint8_t *data, size_t size) {
    for (; size >= 8; size -= 8, data += 8) {
        const uint64_t word = load64(data) ^ state;
        state = 0;
        for (int i = 0; i < 8; i++) state ^= byte_table[7 - i][(word >> (8 * i)) & 0xFFu];
    }
    for (; size > 0; size--, data++) state = (state >> 8) ^ byte_table[0][(state ^ *data) & 0xFFu];
    return state;
}

/* ---- streams of the crc instruction ---------------------------------------------------------- */

enum {
    STREAM_LONG = 2720, /* bytes of each of three streams; three of them fill half a 16 KiB piece */
    STREAM_SHORT = 256,
};
static uint32_t past_long, past_short; /* x^(8L), for `multiply` */

#if defined(INF_CRC_X86)
/* clang keeps the crc instructions apart from SSE 4.2; gcc knows a name for them only from 11
 * on. */
#if defined(__clang__)
#define CRC_FEATURES "sse4.2,crc32"
#else
#define CRC_FEATURES "sse4.2"
#endif
#define CRC_TARGET __attribute__((target(CRC_FEATURES)))
#define CRC64(state, word) _mm_crc32_u64(state, word)
#define CRC8(state, byte) _mm_crc32_u8((uint32_t)(state), byte)
#elif defined(INF_CRC_ARM)
#if defined(__clang__)
#define CRC_TARGET __attribute__((target("crc")))
#else
#define CRC_TARGET __attribute__((target("+crc")))
#endif
#define CRC64(state, word) __crc32cd((uint32_t)(state), word)
#define CRC8(state, byte) __crc32cb((uint32_t)(state), byte)
#endif

#if defined(CRC_TARGET)
CRC_TARGET static inline uint32_t crc_one_stream(uint32_t state, const uint8_t *data, size_t size) {
    uint64_t wide = state;
    for (; size >= 8; size -= 8, data += 8) wide = CRC64(wide, load64(data));
    state = (uint32_t)wide;
    for (; size > 0; size--, data++) state = CRC8(state, *data);
    return state;
}

CRC_TARGET static inline uint32_t crc_three_streams(uint32_t state, const uint8_t *data,
                                                    size_t stream, uint32_t past) {
    uint64_t a = state, b = 0, c = 0;
    for (size_t i = 0; i < stream; i += 8) {
        a = CRC64(a, load64(data + i));
        b = CRC64(b, load64(data + stream + i));
        c = CRC64(c, load64(data + 2 * stream + i));
    }
    const uint32_t ab = multiply((uint32_t)a, past) ^ (uint32_t)b;
    return multiply(ab, past) ^ (uint32_t)c;
}

CRC_TARGET static uint32_t crc_streams(uint32_t state, const uint8_t *data, size_t size) {
    for (; size >= 3 * STREAM_LONG; size -= 3 * STREAM_LONG, data += 3 * STREAM_LONG) {
        state = crc_three_streams(state, data, STREAM_LONG, past_long);
    }
    for (; size >= 3 * STREAM_SHORT; size -= 3 * STREAM_SHORT, data += 3 * STREAM_SHORT) {
        state = crc_three_streams(state, data, STREAM_SHORT, past_short);
    }
    return crc_one_stream(state, data, size);
}
#endif

#if defined(INF_CRC_X86)

/* ---- three streams beside folding ------------------------------------------------------------- *
 *
 * A block of n iterations is [folded: f n bytes][stream: s n][stream: s n][stream: s n]. An
 * iteration makes 8 multiplications, of 128, 256 or 512 bits, and 3 s / 8 crc instructions, which
 * run on another port. Processors make one or half a multiplication a cycle, and one crc
 * instruction. n: so that a block is nearly a piece of 16 or of 8 KiB.
 *
 *                f    s   n                bytes
 *   clmul        64   24  120, 12          16,320 and 1,632
 *   vpclmul256  128   40  66, 33           16,368 and 8,184
 *   vpclmul     256   32  46, 23           16,192 and 8,096
 */

enum { FOLD_128 = 64, FOLD_256 = 128, FOLD_512 = 256 };
enum { STREAM_128 = 24, STREAM_256 = 40, STREAM_512 = 32 };

#define CLMUL_TARGET __attribute__((target(CRC_FEATURES ",pclmul")))

typedef struct {
    size_t iterations, bytes;
    uint32_t past_one, past_two, past_three; /* x^(8 s n k - 33): past k streams */
} block_shape;
static block_shape blocks_128[2], blocks_256[2], blocks_512[2]; /* the longer one first */
static uint64_t fold_512[2] __attribute__((aligned(16))); /* past 64 bytes */
static uint64_t fold_384[2] __attribute__((aligned(16)));
static uint64_t fold_256[2] __attribute__((aligned(16)));
static uint64_t fold_128[2] __attribute__((aligned(16)));

static void make_fold(uint64_t fold[2], uint64_t bits) {
    fold[0] = x_to(bits + 31);
    fold[1] = x_to(bits - 33);
}

static block_shape make_block(uint64_t iterations, uint64_t fold_bytes, uint64_t stream_bytes) {
    const uint64_t stream_bits = 8 * stream_bytes * iterations;
    return (block_shape){iterations, iterations * (fold_bytes + 3 * stream_bytes),
                         x_to(stream_bits - 33), x_to(2 * stream_bits - 33),
                         x_to(3 * stream_bits - 33)};
}

CLMUL_TARGET static inline __m128i fold(__m128i from, __m128i onto, const uint64_t constants[2]) {
    const __m128i by = _mm_load_si128((const __m128i *)constants);
    const __m128i lo = _mm_clmulepi64_si128(from, by, 0x00);
    const __m128i hi = _mm_clmulepi64_si128(from, by, 0x11);
    return _mm_xor_si128(_mm_xor_si128(lo, hi), onto);
}

CLMUL_TARGET static inline __m128i load128(const uint8_t *data) {
    return _mm_loadu_si128((const __m128i *)data);
}

/* The state after the 16 bytes that an accumulator stands for. */
CLMUL_TARGET static inline uint32_t finish128(__m128i accumulator) {
    const uint64_t lo = (uint64_t)_mm_cvtsi128_si64(accumulator);
    const uint64_t hi = (uint64_t)_mm_extract_epi64(accumulator, 1);
    return (uint32_t)_mm_crc32_u64(_mm_crc32_u64(0, lo), hi);
}

CLMUL_TARGET static inline uint32_t finish512(__m128i x0, __m128i x1, __m128i x2, __m128i x3) {
    return finish128(fold(x0, fold(x1, fold(x2, x3, fold_128), fold_256), fold_384));
}

/* The state times x^(8L), for past = x^(8L - 33). */
CLMUL_TARGET static inline uint32_t move_past(uint64_t state, uint32_t past) {
    const __m128i product = _mm_clmulepi64_si128(_mm_cvtsi64_si128((long long)(uint32_t)state),
                                                 _mm_cvtsi64_si128((long long)past), 0x00);
    return (uint32_t)_mm_crc32_u64(0, (uint64_t)_mm_cvtsi128_si64(product));
}

/* The states of the three streams after one more word each; `at` is its offset. */
#define STREAM_WORDS(a, b, c, words, stream, at)                     \
    do {                                                             \
        a = _mm_crc32_u64(a, load64((words) + (at)));                \
        b = _mm_crc32_u64(b, load64((words) + (stream) + (at)));     \
        c = _mm_crc32_u64(c, load64((words) + 2 * (stream) + (at))); \
    } while (0)

/* Moves `state`, `data` and `size` past all blocks of both shapes. */
#define EACH_BLOCK(shapes, block_of)                                                    \
    for (const block_shape *each = shapes; each < (shapes) + 2; each++) {               \
        for (; size >= each->bytes; size -= each->bytes, data += each->bytes)           \
            state = block_of(state, data, each);                                        \
    }

/* The state after a block: the folded part and the streams, each moved past what follows it. */
CLMUL_TARGET static inline uint32_t join_block(uint32_t folded, uint64_t a, uint64_t b, uint64_t c,
                                               const block_shape *block) {
    return move_past(folded, block->past_three) ^ move_past(a, block->past_two) ^
           move_past(b, block->past_one) ^ (uint32_t)c;
}

CLMUL_TARGET static inline uint32_t block_128(uint32_t state, const uint8_t *folded,
                                              const block_shape *block) {
    const size_t stream = STREAM_128 * block->iterations;
    const uint8_t *words = folded + FOLD_128 * block->iterations;
    __m128i x0 = _mm_setzero_si128(), x1 = x0, x2 = x0, x3 = x0;
    uint64_t a = 0, b = 0, c = 0;
    __m128i first = _mm_cvtsi32_si128((int)state);
    for (size_t k = 0; k < block->iterations; k++, folded += FOLD_128, words += STREAM_128) {
        x0 = fold(x0, _mm_xor_si128(load128(folded), first), fold_512);
        x1 = fold(x1, load128(folded + 16), fold_512);
        STREAM_WORDS(a, b, c, words, stream, 0);
        x2 = fold(x2, load128(folded + 32), fold_512);
        STREAM_WORDS(a, b, c, words, stream, 8);
        x3 = fold(x3, load128(folded + 48), fold_512);
        STREAM_WORDS(a, b, c, words, stream, 16);
        first = _mm_setzero_si128();
    }
    return join_block(finish512(x0, x1, x2, x3), a, b, c, block);
}

CLMUL_TARGET static uint32_t crc_clmul(uint32_t state, const uint8_t *data, size_t size) {
    EACH_BLOCK(blocks_128, block_128);
    uint64_t wide = state;
    for (; size >= 8; size -= 8, data += 8) wide = _mm_crc32_u64(wide, load64(data));
    state = (uint32_t)wide;
    for (; size > 0; size--, data++) state = _mm_crc32_u8(state, *data);
    return state;
}

/* ---- wider folding --------------------------------------------------------------------------- */

/* tests, on machines without the instruction: 128-bit products */
#if defined(INF_EMULATE_VPCLMUL)
#define TARGET_256 __attribute__((target(CRC_FEATURES ",pclmul,avx2")))
#define TARGET_512 __attribute__((target(CRC_FEATURES ",pclmul,avx512f,avx512dq,avx512vl")))
#define CLMUL_LANE(high, x, y) \
    ((high) ? _mm_clmulepi64_si128(x, y, 0x11) : _mm_clmulepi64_si128(x, y, 0x00))
TARGET_256 static inline __m256i clmul256(__m256i a, __m256i b, int high) {
    const __m128i low = CLMUL_LANE(high, _mm256_castsi256_si128(a), _mm256_castsi256_si128(b));
    const __m128i top =
        CLMUL_LANE(high, _mm256_extracti128_si256(a, 1), _mm256_extracti128_si256(b, 1));
    return _mm256_inserti128_si256(_mm256_castsi128_si256(low), top, 1);
}
TARGET_512 static inline __m512i clmul512(__m512i a, __m512i b, int high) {
    const __m256i low = clmul256(_mm512_extracti64x4_epi64(a, 0), _mm512_extracti64x4_epi64(b, 0),
                                 high);
    const __m256i top = clmul256(_mm512_extracti64x4_epi64(a, 1), _mm512_extracti64x4_epi64(b, 1),
                                 high);
    return _mm512_inserti64x4(_mm512_castsi256_si512(low), top, 1);
}
#define CLMUL256_LO(a, b) clmul256(a, b, 0)
#define CLMUL256_HI(a, b) clmul256(a, b, 1)
#define CLMUL512_LO(a, b) clmul512(a, b, 0)
#define CLMUL512_HI(a, b) clmul512(a, b, 1)
#else
#define TARGET_256 __attribute__((target(CRC_FEATURES ",pclmul,avx2,vpclmulqdq")))
#define TARGET_512 \
    __attribute__((target(CRC_FEATURES ",pclmul,avx512f,avx512dq,avx512vl,vpclmulqdq")))
#define CLMUL256_LO(a, b) _mm256_clmulepi64_epi128(a, b, 0x00)
#define CLMUL256_HI(a, b) _mm256_clmulepi64_epi128(a, b, 0x11)
#define CLMUL512_LO(a, b) _mm512_clmulepi64_epi128(a, b, 0x00)
#define CLMUL512_HI(a, b) _mm512_clmulepi64_epi128(a, b, 0x11)
#endif

static uint64_t fold_2048[2] __attribute__((aligned(16))); /* past 256 bytes */
static uint64_t fold_1536[2] __attribute__((aligned(16)));
static uint64_t fold_1024[2] __attribute__((aligned(16)));
static uint64_t fold_768[2] __attribute__((aligned(16)));

TARGET_256 static inline __m256i fold_256_bits(__m256i from, __m256i onto,
                                               const uint64_t constants[2]) {
    const __m256i by = _mm256_broadcastsi128_si256(_mm_load_si128((const __m128i *)constants));
    return _mm256_xor_si256(_mm256_xor_si256(CLMUL256_LO(from, by), CLMUL256_HI(from, by)), onto);
}

TARGET_256 static inline __m256i load256(const uint8_t *data) {
    return _mm256_loadu_si256((const __m256i *)data);
}

TARGET_256 static inline uint32_t block_256(uint32_t state, const uint8_t *folded,
                                            const block_shape *block) {
    const size_t stream = STREAM_256 * block->iterations;
    const uint8_t *words = folded + FOLD_256 * block->iterations;
    __m256i y0 = _mm256_setzero_si256(), y1 = y0, y2 = y0, y3 = y0;
    uint64_t a = 0, b = 0, c = 0;
    __m256i first = _mm256_inserti128_si256(y0, _mm_cvtsi32_si128((int)state), 0);
    for (size_t k = 0; k < block->iterations; k++, folded += FOLD_256, words += STREAM_256) {
        y0 = fold_256_bits(y0, _mm256_xor_si256(load256(folded), first), fold_1024);
        STREAM_WORDS(a, b, c, words, stream, 0);
        y1 = fold_256_bits(y1, load256(folded + 32), fold_1024);
        STREAM_WORDS(a, b, c, words, stream, 8);
        y2 = fold_256_bits(y2, load256(folded + 64), fold_1024);
        STREAM_WORDS(a, b, c, words, stream, 16);
        y3 = fold_256_bits(y3, load256(folded + 96), fold_1024);
        STREAM_WORDS(a, b, c, words, stream, 24);
        STREAM_WORDS(a, b, c, words, stream, 32);
        first = _mm256_setzero_si256();
    }
    y3 = fold_256_bits(y2, y3, fold_256);
    y3 = fold_256_bits(y1, y3, fold_512);
    y3 = fold_256_bits(y0, y3, fold_768);
    const __m128i last =
        fold(_mm256_castsi256_si128(y3), _mm256_extracti128_si256(y3, 1), fold_128);
    return join_block(finish128(last), a, b, c, block);
}

TARGET_256 static uint32_t crc_vpclmul256(uint32_t state, const uint8_t *data, size_t size) {
    EACH_BLOCK(blocks_256, block_256);
    return crc_clmul(state, data, size);
}

TARGET_512 static inline __m512i fold_512_bits(__m512i from, __m512i onto,
                                               const uint64_t constants[2]) {
    const __m512i by = _mm512_broadcast_i32x4(_mm_load_si128((const __m128i *)constants));
    /* three-way xor */
    return _mm512_ternarylogic_epi64(CLMUL512_LO(from, by), CLMUL512_HI(from, by), onto, 0x96);
}

TARGET_512 static inline uint32_t finish2048(__m512i z) {
    return finish512(_mm512_extracti64x2_epi64(z, 0), _mm512_extracti64x2_epi64(z, 1),
                     _mm512_extracti64x2_epi64(z, 2), _mm512_extracti64x2_epi64(z, 3));
}

TARGET_512 static inline uint32_t block_512(uint32_t state, const uint8_t *folded,
                                            const block_shape *block) {
    const size_t stream = STREAM_512 * block->iterations;
    const uint8_t *words = folded + FOLD_512 * block->iterations;
    __m512i z0 = _mm512_setzero_si512(), z1 = z0, z2 = z0, z3 = z0;
    uint64_t a = 0, b = 0, c = 0;
    __m512i first = _mm512_zextsi128_si512(_mm_cvtsi32_si128((int)state));
    for (size_t k = 0; k < block->iterations; k++, folded += FOLD_512, words += STREAM_512) {
        z0 = fold_512_bits(z0, _mm512_xor_si512(_mm512_loadu_si512(folded), first), fold_2048);
        STREAM_WORDS(a, b, c, words, stream, 0);
        z1 = fold_512_bits(z1, _mm512_loadu_si512(folded + 64), fold_2048);
        STREAM_WORDS(a, b, c, words, stream, 8);
        z2 = fold_512_bits(z2, _mm512_loadu_si512(folded + 128), fold_2048);
        STREAM_WORDS(a, b, c, words, stream, 16);
        z3 = fold_512_bits(z3, _mm512_loadu_si512(folded + 192), fold_2048);
        STREAM_WORDS(a, b, c, words, stream, 24);
        first = _mm512_setzero_si512();
    }
    z3 = fold_512_bits(z2, z3, fold_512);
    z3 = fold_512_bits(z1, z3, fold_1024);
    z3 = fold_512_bits(z0, z3, fold_1536);
    return join_block(finish2048(z3), a, b, c, block);
}

TARGET_512 static uint32_t crc_vpclmul(uint32_t state, const uint8_t *data, size_t size) {
    EACH_BLOCK(blocks_512, block_512);
    if (size < 64) return crc_clmul(state, data, size);
    __m512i z = _mm512_xor_si512(_mm512_loadu_si512(data),
                                 _mm512_zextsi128_si512(_mm_cvtsi32_si128((int)state)));
    for (size -= 64, data += 64; size >= 64; size -= 64, data += 64)
        z = fold_512_bits(z, _mm512_loadu_si512(data), fold_512);
    return crc_clmul(finish2048(z), data, size);
}
#endif

/* ---- dispatch -------------------------------------------------------------------------------- */

typedef uint32_t crc_fn(uint32_t state, const uint8_t *data, size_t size);

static const char *const CRC_NAME[INF_CRC_COUNT] = {"portable", "streams", "clmul",
                                                    "vpclmul256", "vpclmul"};
static crc_fn *crc_table[INF_CRC_COUNT]; /* NULL where the machine lacks it */
static int32_t crc_best;

__attribute__((constructor)) static void crc_choose_best(void) {
    make_byte_table();
    past_long = x_to(8 * STREAM_LONG);
    past_short = x_to(8 * STREAM_SHORT);
    crc_table[INF_CRC_PORTABLE] = crc_portable;
#if defined(INF_CRC_X86)
    const uint32_t has = inf_cpu_has();
    blocks_128[0] = make_block(120, FOLD_128, STREAM_128);
    blocks_128[1] = make_block(12, FOLD_128, STREAM_128);
    blocks_256[0] = make_block(66, FOLD_256, STREAM_256);
    blocks_256[1] = make_block(33, FOLD_256, STREAM_256);
    blocks_512[0] = make_block(46, FOLD_512, STREAM_512);
    blocks_512[1] = make_block(23, FOLD_512, STREAM_512);
    make_fold(fold_128, 128);
    make_fold(fold_256, 256);
    make_fold(fold_384, 384);
    make_fold(fold_512, 512);
    make_fold(fold_768, 768);
    make_fold(fold_1024, 1024);
    make_fold(fold_1536, 1536);
    make_fold(fold_2048, 2048);
    if (has & INF_CPU_CRC32) {
        crc_table[INF_CRC_STREAMS] = crc_streams;
        if (has & INF_CPU_CLMUL) {
            crc_table[INF_CRC_CLMUL] = crc_clmul;
#if defined(INF_EMULATE_VPCLMUL)
            const uint32_t wide = INF_CPU_AVX2, widest = INF_CPU_AVX512;
#else
            const uint32_t wide = INF_CPU_VPCLMUL256, widest = INF_CPU_VPCLMUL;
#endif
            if (has & wide) crc_table[INF_CRC_VPCLMUL256] = crc_vpclmul256;
            if (has & widest) crc_table[INF_CRC_VPCLMUL] = crc_vpclmul;
        }
    }
#elif defined(INF_CRC_ARM)
    /* HWCAP_CRC32 */
    if (getauxval(AT_HWCAP) & (1UL << 7)) crc_table[INF_CRC_STREAMS] = crc_streams;
#endif
    for (int32_t i = 0; i < INF_CRC_COUNT; i++) {
        if (crc_table[i] != NULL) crc_best = i;
    }
}

uint32_t inf_crc32c(uint32_t seed, const void *data, size_t size_bytes) {
    return ~crc_table[crc_best](~seed, data, size_bytes);
}

const char *inf_crc32c_name(int32_t variant) {
    if (variant == -1) return CRC_NAME[crc_best];
    return variant >= 0 && variant < INF_CRC_COUNT ? CRC_NAME[variant] : NULL;
}

uint32_t inf_crc32c_with(int32_t variant, uint32_t seed, const void *data, size_t size_bytes,
                         int32_t *ok) {
    *ok = variant >= 0 && variant < INF_CRC_COUNT && crc_table[variant] != NULL;
    return *ok ? ~crc_table[variant](~seed, data, size_bytes) : 0;
}

/* ---- in the shadow of an update (shadow.h) --------------------------------------------------- */

enum { SHADOW_BLOCKS_MAX = 10 }; /* of a section of 32 KiB */
#if defined(INF_CRC_X86)
static block_shape shadow_blocks[SHADOW_BLOCKS_MAX + 1];

__attribute__((constructor)) static void make_shadow_blocks(void) {
    for (uint64_t n = 1; n <= SHADOW_BLOCKS_MAX; n++)
        shadow_blocks[n] = make_block(n, 0, INF_SHADOW_STREAM);
}

CLMUL_TARGET static uint32_t join_shadow(const inf_shadow *shadow) {
    return join_block(0, shadow->state[0], shadow->state[1], shadow->state[2],
                      &shadow_blocks[shadow->stream_bytes / INF_SHADOW_STREAM]);
}
#else
/* Not reached: no job begins where inf_shadow_usable is 0. */
static uint32_t join_shadow(const inf_shadow *shadow) {
    (void)shadow;
    assert(0);
    return 0;
}
#endif

int inf_shadow_usable(void) {
    return crc_table[INF_CRC_CLMUL] != NULL;
}

int32_t inf_shadow_blocks(size_t size_bytes) {
    const size_t blocks = size_bytes / INF_SHADOW_BLOCK;
    return blocks < SHADOW_BLOCKS_MAX ? (int32_t)blocks : SHADOW_BLOCKS_MAX;
}

/* Starts jobs[next], or a later one: a job that is shorter than a block is computed at once. */
static void shadow_next(inf_shadow *shadow) {
    for (; shadow->next < shadow->count; shadow->next++) {
        const inf_shadow_job *job = &shadow->jobs[shadow->next];
        shadow->blocks = inf_shadow_blocks(job->size_bytes);
        if (shadow->blocks > 0) {
            shadow->words = job->data;
            shadow->stream_bytes = (size_t)shadow->blocks * INF_SHADOW_STREAM;
            shadow->state[0] = ~job->seed;
            shadow->state[1] = shadow->state[2] = 0;
            return;
        }
        *job->sum = inf_crc32c(job->seed, job->data, job->size_bytes);
    }
    shadow->blocks = 0;
}

void inf_shadow_start(inf_shadow *shadow) {
    shadow->next = 0;
    shadow_next(shadow);
}

void inf_shadow_advance(inf_shadow *shadow) {
    shadow->words += INF_SHADOW_STREAM;
    if (--shadow->blocks > 0) return;
    const inf_shadow_job *job = &shadow->jobs[shadow->next++];
    const size_t done = 3 * shadow->stream_bytes;
    *job->sum = inf_crc32c(~join_shadow(shadow), job->data + done, job->size_bytes - done);
    shadow_next(shadow);
}

void inf_shadow_finish(inf_shadow *shadow) {
    for (; shadow->next < shadow->count; shadow->next++) {
        const inf_shadow_job *job = &shadow->jobs[shadow->next];
        *job->sum = inf_crc32c(job->seed, job->data, job->size_bytes);
    }
    shadow->blocks = 0;
}
