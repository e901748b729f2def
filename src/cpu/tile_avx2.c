/* SPDX-License-Identifier: Apache-2.0
 * The tile kernel for x86-64 with AVX2, FMA and F16C. */
#include "cpu/tile_avx2.h"

enum { MOST_ROWS = 4, LANES = 8 };

typedef panel vec;

#define vec_fma panel_fma

static inline vec vec_from_f16(const uint16_t *from)
{
    return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(const void *)from));
}

static inline vec vec_from_bf16(const uint16_t *from)
{
    const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(const void *)from));
    return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}

static inline vec vec_from_even(const uint16_t *from)
{
    const __m256i words = _mm256_loadu_si256((const __m256i *)(const void *)from);
    return _mm256_castsi256_ps(_mm256_slli_epi32(words, 16));
}

static inline vec vec_from_odd(const uint16_t *from)
{
    const __m256i words = _mm256_loadu_si256((const __m256i *)(const void *)from);
    return _mm256_castsi256_ps(_mm256_and_si256(words, _mm256_set1_epi32((int)0xFFFF0000)));
}

static inline void vec_split(vec *a, vec *b)
{
    const __m256d even = _mm256_castps_pd(_mm256_shuffle_ps(*a, *b, 0x88));
    const __m256d odd = _mm256_castps_pd(_mm256_shuffle_ps(*a, *b, 0xDD));
    *a = _mm256_castpd_ps(_mm256_permute4x64_pd(even, 0xD8));
    *b = _mm256_castpd_ps(_mm256_permute4x64_pd(odd, 0xD8));
}

static inline void vec_join(vec *a, vec *b)
{
    const __m256 low = _mm256_unpacklo_ps(*a, *b), high = _mm256_unpackhi_ps(*a, *b);
    *a = _mm256_permute2f128_ps(low, high, 0x20);
    *b = _mm256_permute2f128_ps(low, high, 0x31);
}

/* Both halves of a vector alike: sums of two pairs of lanes, of the pairs, then of the halves. */
static inline __m128 vec_sums(vec a, vec b, vec c, vec d)
{
    const __m256 ab = _mm256_add_ps(_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b));
    const __m256 cd = _mm256_add_ps(_mm256_unpacklo_ps(c, d), _mm256_unpackhi_ps(c, d));
    const __m256 sums = _mm256_add_ps(_mm256_shuffle_ps(ab, cd, 0x44), _mm256_shuffle_ps(ab, cd, 0xEE));
    return _mm_add_ps(_mm256_castps256_ps128(sums), _mm256_extractf128_ps(sums, 1));
}

/* Of 16 registers: 12 accumulators, 3 tokens and a query; or 8 accumulators, 2 vectors of V and a weight. */
#define TOKENS(rows) ((rows) == 4 ? 3 : (rows) == 2 ? 4 : 8)
#define CHUNKS(rows) ((rows) == 4 ? 2 : (rows) == 2 ? 4 : 8)

#include "cpu/tile_body.h"

const ekv_cpu_kernel ekv_cpu_kernel_avx2 = {
    .name = "avx2",
    .id = EKV_KERNEL_AVX2,
    .head_dim_step = LANES,
    .q_dtype = EKV_DTYPE_F32,
    .p_dtype = EKV_DTYPE_F32,
    .run = run_tile,
    .write = tile_write,
    .exp2 = panel_exp2_all,
};
