/* SPDX-License-Identifier: Apache-2.0
 * Vectors of AVX-512, for the kernels that have it. */
#include "cpu/tile_kernel.h"

#include <immintrin.h>
#include <stdint.h>

enum { LANES = 16 };

typedef float vec __attribute__((vector_size(64)));

static inline vec vec_fma(vec a, vec b, vec c)
{
    return _mm512_fmadd_ps(a, b, c);
}

/* A quarter of a vector for each argument, with sums of four lanes; then sums of two; then all. */
static inline __m128 vec_sums(vec a, vec b, vec c, vec d)
{
    const __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
    const __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
    const __m512 sums = _mm512_add_ps(_mm512_shuffle_ps(ab, cd, 0x44), _mm512_shuffle_ps(ab, cd, 0xEE));
    const __m256 halves = _mm256_add_ps(_mm512_castps512_ps256(sums), _mm512_extractf32x8_ps(sums, 1));
    return _mm_add_ps(_mm256_castps256_ps128(halves), _mm256_extractf128_ps(halves, 1));
}

static inline __m512i load_words(const void *from)
{
    return _mm512_loadu_si512(from);
}

/* 32 floats that follow words of two rows interleaved by unpacklo and unpackhi, in their own order: the first 16 have
 * the places 0 to 3 modulo 8, the others those behind. */
static inline void put_in_order(float *acc)
{
    const __m512i first = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    const __m512i second = _mm512_add_epi32(first, _mm512_set1_epi32(8));
    const __m512 a = _mm512_loadu_ps(acc), b = _mm512_loadu_ps(acc + LANES);
    _mm512_storeu_ps(acc, _mm512_permutex2var_ps(a, first, b));
    _mm512_storeu_ps(acc + LANES, _mm512_permutex2var_ps(a, second, b));
}

/* acc of all heads of a tile whose V was interleaved so. */
static inline void put_tile_in_order(const ekv_cpu_tile *tile)
{
    for (int32_t h = 0; h < tile->heads; h++)
        for (int32_t i = 0; i < tile->rows * tile->head_dim; i += 2 * LANES)
            put_in_order(tile->acc + h * tile->stride_acc + i);
}
