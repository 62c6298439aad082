/* Vector operations of one instruction set, under names that are the same for all: INF_LANES lanes
 * of 32 bits (8: AVX2; 16: AVX-512 F, BW, DQ, VL). Included where INF_LANES is not 0, inside the
 * instruction set's region; lanes_end.h undefines the names.
 *
 * VF is a vector of fp32, VI one of 32-bit integers. LOAD_U16 and its like widen INF_LANES stored
 * items. STORE_U16 narrows a row of ROW_16 vectors to 16 items of 16 bits, STORE_U8 and STORE_S8
 * narrow ROW_8 vectors to 32 items of 8 bits. Lanes must fit: AVX2 saturates the others, AVX-512
 * drops their upper bits. */
/* gcc keeps a row in registers only if it unrolls the loop over it early. */
#if defined(__clang__)
#define UNROLL
#else
#define UNROLL _Pragma("GCC unroll 8")
#endif

#if INF_LANES == 8
#define VF __m256
#define VI __m256i
#define SET_F(x) _mm256_set1_ps(x)
#define SET_I(x) _mm256_set1_epi32((int32_t)(x))
#define AS_F(x) _mm256_castsi256_ps(x)
#define AS_I(x) _mm256_castps_si256(x)
#define LOAD_F(from) _mm256_loadu_ps(from)
#define STORE_F(to, x) _mm256_storeu_ps(to, x)
#define LOAD_I(from) _mm256_loadu_si256((const __m256i *)(from))
#define STORE_I(to, x) _mm256_storeu_si256((__m256i *)(to), x)
#define LOAD_U16(from) _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(from)))
#define LOAD_S16(from) _mm256_cvtepi16_epi32(_mm_loadu_si128((const __m128i *)(from)))
#define LOAD_U8(from) _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(from)))
#define LOAD_S8(from) _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)(from)))
#define IOTA _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7)
#define ADD_I(a, b) _mm256_add_epi32(a, b)
#define MUL_I(a, b) _mm256_mullo_epi32(a, b)
#define AND_I(a, b) _mm256_and_si256(a, b)
#define OR_I(a, b) _mm256_or_si256(a, b)
#define XOR_I(a, b) _mm256_xor_si256(a, b)
#define SHIFT_LEFT(x, n) _mm256_slli_epi32(x, n)
#define SHIFT_RIGHT(x, n) _mm256_srli_epi32(x, n)
#define MAX_U(a, b) _mm256_max_epu32(a, b)
#define MIN_F(a, b) _mm256_min_ps(a, b)
#define SQRT(x) _mm256_sqrt_ps(x)
#define TRUNCATE(x) _mm256_round_ps(x, _MM_FROUND_TO_ZERO | _MM_FROUND_NO_EXC)
#define TO_F(x) _mm256_cvtepi32_ps(x)
#define TO_I(x) _mm256_cvttps_epi32(x)
/* `one` where a < b, else 0 */
#define LESS(a, b, one) _mm256_and_ps(_mm256_cmp_ps(a, b, _CMP_LT_OQ), one)
/* `one` where x is not 0, else 0 */
#define NONZERO_I(x, one) \
    _mm256_andnot_si256(_mm256_cmpeq_epi32(x, _mm256_setzero_si256()), one)
/* NaN becomes `nan` */
#define CANONICAL(x, nan) AS_I(_mm256_blendv_ps(x, nan, _mm256_cmp_ps(x, x, _CMP_UNORD_Q)))
#define STORE_U16(to, x)                                                                      \
    _mm256_storeu_si256((__m256i *)(to),                                                      \
                        _mm256_permute4x64_epi64(_mm256_packus_epi32((x)[0], (x)[1]), 0xD8))
#define ROW_16 2
#define NARROW_8(x, pack)                                                                     \
    _mm256_permutevar8x32_epi32(pack(_mm256_packs_epi32((x)[0], (x)[1]),                      \
                                     _mm256_packs_epi32((x)[2], (x)[3])),                     \
                                _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7))
#define STORE_U8(to, x) _mm256_storeu_si256((__m256i *)(to), NARROW_8(x, _mm256_packus_epi16))
#define STORE_S8(to, x) _mm256_storeu_si256((__m256i *)(to), NARROW_8(x, _mm256_packs_epi16))
#define ROW_8 4
#else
#define VF __m512
#define VI __m512i
#define SET_F(x) _mm512_set1_ps(x)
#define SET_I(x) _mm512_set1_epi32((int32_t)(x))
#define AS_F(x) _mm512_castsi512_ps(x)
#define AS_I(x) _mm512_castps_si512(x)
#define LOAD_F(from) _mm512_loadu_ps(from)
#define STORE_F(to, x) _mm512_storeu_ps(to, x)
#define LOAD_I(from) _mm512_loadu_si512(from)
#define STORE_I(to, x) _mm512_storeu_si512(to, x)
#define LOAD_U16(from) _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(from)))
#define LOAD_S16(from) _mm512_cvtepi16_epi32(_mm256_loadu_si256((const __m256i *)(from)))
#define LOAD_U8(from) _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(from)))
#define LOAD_S8(from) _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)(from)))
#define IOTA _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)
#define ADD_I(a, b) _mm512_add_epi32(a, b)
#define MUL_I(a, b) _mm512_mullo_epi32(a, b)
#define AND_I(a, b) _mm512_and_si512(a, b)
#define OR_I(a, b) _mm512_or_si512(a, b)
#define XOR_I(a, b) _mm512_xor_si512(a, b)
#define SHIFT_LEFT(x, n) _mm512_slli_epi32(x, n)
#define SHIFT_RIGHT(x, n) _mm512_srli_epi32(x, n)
#define MAX_U(a, b) _mm512_max_epu32(a, b)
#define MIN_F(a, b) _mm512_min_ps(a, b)
#define SQRT(x) _mm512_sqrt_ps(x)
#define TRUNCATE(x) _mm512_roundscale_ps(x, _MM_FROUND_TO_ZERO | _MM_FROUND_NO_EXC)
#define TO_F(x) _mm512_cvtepi32_ps(x)
#define TO_I(x) _mm512_cvttps_epi32(x)
#define LESS(a, b, one) _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), one)
#define NONZERO_I(x, one) _mm512_maskz_mov_epi32(_mm512_test_epi32_mask(x, x), one)
#define CANONICAL(x, nan) \
    AS_I(_mm512_mask_mov_ps(x, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), nan))
#define STORE_U16(to, x) _mm256_storeu_si256((__m256i *)(to), _mm512_cvtepi32_epi16((x)[0]))
#define ROW_16 1
#define STORE_U8(to, x)                                                            \
    (_mm_storeu_si128((__m128i *)(to), _mm512_cvtepi32_epi8((x)[0])),              \
     _mm_storeu_si128((__m128i *)(to) + 1, _mm512_cvtepi32_epi8((x)[1])))
#define STORE_S8(to, x) STORE_U8(to, x)
#define ROW_8 2
#endif
