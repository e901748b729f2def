/* SPDX-License-Identifier: Apache-2.0 */
#include "cpu/convert.h"
#include "cpu/cpu_backend.h"

#include <math.h>
#include <stdatomic.h>

enum {
    CHUNK_DIMS = 256, /* of head_dim at once */
    CHUNK_ROWS = 64   /* that a thread takes at once */
};

typedef struct merge_run {
    const ekv_merge_args *args;
    _Atomic int64_t next; /* chunk of rows */
} merge_run;

static float lse_of(const ekv_merge_args *args, int32_t state, int64_t row)
{
    return args->lse_parts[state * args->lse_stride_state + row * args->lse_stride_row];
}

/* base^x of args->lse_base. */
static float power(const ekv_merge_args *args, float x)
{
    return args->lse_base == EKV_LSE_BASE2 ? exp2f(x) : expf(x);
}

/* Dimensions [first, first + n) of a row; a state of LSE -inf is not read. */
static void merge_dims(const ekv_merge_args *args, int64_t row, int32_t first, int32_t n, float largest, float sum)
{
    float acc[CHUNK_DIMS] = { 0 }, part[CHUNK_DIMS];
    for (int32_t s = 0; s < args->num_states; s++) {
        const float lse = lse_of(args, s, row);
        if (lse == -INFINITY)
            continue;
        const float weight = power(args, lse - largest) / sum;
        const int64_t at = s * args->part_stride_state + row * args->part_stride_row + first;
        ekv_row_to_f32(ekv_element(args->o_parts, args->part_dtype, at), args->part_dtype, n, part);
        for (int32_t d = 0; d < n; d++)
            acc[d] += weight * part[d];
    }
    ekv_row_from_f32(acc, n, args->o_dtype, ekv_element_mutable(args->o, args->o_dtype, row * args->head_dim + first));
}

static void merge_row(const ekv_merge_args *args, int64_t row)
{
    float largest = -INFINITY, sum = 0;
    for (int32_t s = 0; s < args->num_states; s++) {
        const float lse = lse_of(args, s, row);
        largest = lse > largest ? lse : largest;
    }
    for (int32_t s = 0; s < args->num_states; s++) {
        const float lse = lse_of(args, s, row);
        if (lse != -INFINITY)
            sum += power(args, lse - largest);
    }
    for (int32_t d = 0; d < args->head_dim; d += CHUNK_DIMS)
        merge_dims(args, row, d, args->head_dim - d < CHUNK_DIMS ? args->head_dim - d : CHUNK_DIMS, largest, sum);
    if (args->lse)
        args->lse[row] = sum == 0 ? -INFINITY : largest + (args->lse_base == EKV_LSE_BASE2 ? log2f(sum) : logf(sum));
}

static void work(void *argument, int32_t thread)
{
    (void)thread;
    merge_run *run = argument;
    const int64_t rows = run->args->rows;
    for (int64_t first; (first = atomic_fetch_add(&run->next, 1) * CHUNK_ROWS) < rows;)
        for (int64_t row = first; row < rows && row < first + CHUNK_ROWS; row++)
            merge_row(run->args, row);
}

ekv_status ekv_cpu_merge_states(ekv_context *context, const ekv_merge_args *args)
{
    merge_run run = { .args = args };
    ekv_pool_run(context->pool, work, &run);
    return EKV_OK;
}
