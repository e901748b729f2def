/* SPDX-License-Identifier: Apache-2.0
 * The tile kernel for x86-64 with AVX-512 (F, BW, DQ, VL). */
#include "cpu/tile_avx512.h"

#include "cpu/tile_avx2.h" /* a panel is half of a vector */

static inline vec vec_from_f16(const uint16_t *from)
{
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(const void *)from));
}

static inline vec vec_from_bf16(const uint16_t *from)
{
    const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(const void *)from));
    return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}

static inline vec vec_from_even(const uint16_t *from)
{
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_loadu_si512(from), 16));
}

static inline vec vec_from_odd(const uint16_t *from)
{
    return _mm512_castsi512_ps(_mm512_and_si512(_mm512_loadu_si512(from), _mm512_set1_epi32((int)0xFFFF0000)));
}

static inline void vec_split(vec *a, vec *b)
{
    const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    const __m512i odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
    const vec first = *a;
    *a = _mm512_permutex2var_ps(first, even, *b);
    *b = _mm512_permutex2var_ps(first, odd, *b);
}

static inline void vec_join(vec *a, vec *b)
{
    const __m512i low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
    const vec first = *a;
    *a = _mm512_permutex2var_ps(first, low, *b);
    *b = _mm512_permutex2var_ps(first, high, *b);
}

/* Conversions take the ports of multiply-adds here, hence the largest passes.  Of 32 registers 16 to 24 are
 * accumulators. */
enum { MOST_ROWS = 8 };

#define TOKENS(rows) ((rows) == 8 ? 3 : (rows) == 4 ? 4 : 8)
#define CHUNKS(rows) ((rows) == 8 ? 2 : (rows) == 4 ? 4 : 8)

#include "cpu/tile_body.h"

const ekv_cpu_kernel ekv_cpu_kernel_avx512 = {
    .name = "avx512",
    .id = EKV_KERNEL_AVX512,
    .head_dim_step = LANES,
    .q_dtype = EKV_DTYPE_F32,
    .p_dtype = EKV_DTYPE_F32,
    .run = run_tile,
    .write = tile_write,
    .exp2 = panel_exp2_all,
};
