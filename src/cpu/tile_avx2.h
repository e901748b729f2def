/* SPDX-License-Identifier: Apache-2.0
 * Panels in AVX2 with FMA. */
#include <immintrin.h>
#include <stdint.h>

typedef float panel __attribute__((vector_size(32)));
typedef int32_t ipanel __attribute__((vector_size(32)));

static inline panel panel_fma(panel a, panel b, panel c)
{
    return _mm256_fmadd_ps(a, b, c);
}

static inline panel panel_max(panel a, panel b)
{
    return _mm256_max_ps(a, b);
}
