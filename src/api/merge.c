/* SPDX-License-Identifier: Apache-2.0
 * Merging of attention states: checks, then one call of the backend. */
#include "api/backend.h"
#include "base/half.h"
#include "base/status.h"

#include <inttypes.h>

static ekv_status check_dtype(ekv_dtype dtype, const char *name)
{
    if ((unsigned)dtype > EKV_DTYPE_FP8_E5M2)
        return ekv_fail(EKV_ERROR_INVALID_ARGUMENT, "%s %d is not an ekv_dtype", name, (int)dtype);
    if (dtype > EKV_DTYPE_BF16)
        return ekv_fail(EKV_ERROR_UNSUPPORTED, "%s %d: states of FP8 are not built yet", name, (int)dtype);
    return EKV_OK;
}

static ekv_status check_sizes(const ekv_merge_args *args)
{
    ekv_status status;
    if (args->num_states < 1)
        return ekv_fail(EKV_ERROR_INVALID_ARGUMENT, "num_states is %d; it must be >= 1", args->num_states);
    if (args->rows < 0)
        return ekv_fail(EKV_ERROR_INVALID_ARGUMENT, "rows is %" PRId64 "; it must be >= 0", args->rows);
    if (args->head_dim < 1)
        return ekv_fail(EKV_ERROR_INVALID_ARGUMENT, "head_dim is %d; it must be >= 1", args->head_dim);
    if ((unsigned)args->lse_base > EKV_LSE_BASE2)
        return ekv_fail(EKV_ERROR_INVALID_ARGUMENT, "lse_base %d is not an ekv_lse_base", (int)args->lse_base);
    if ((status = check_dtype(args->part_dtype, "part_dtype")) || (status = check_dtype(args->o_dtype, "o_dtype")))
        return status;
    if (args->backend == EKV_BACKEND_CPU && args->stream)
        return ekv_fail(EKV_ERROR_UNSUPPORTED, "stream: the CPU backend has none");
    return EKV_OK;
}

static ekv_status check_pointer(const void *pointer, const char *name, int32_t element_size)
{
    if (!pointer)
        return ekv_fail(EKV_ERROR_INVALID_ARGUMENT, "%s is NULL", name);
    if ((uintptr_t)pointer % (uintptr_t)element_size)
        return ekv_fail(EKV_ERROR_INVALID_ARGUMENT, "%s is %p; it must be aligned to its element of %d bytes", name,
                        pointer, element_size);
    return EKV_OK;
}

static ekv_status check_pointers(const ekv_merge_args *args)
{
    ekv_status status;
    if ((status = check_pointer(args->o_parts, "o_parts", ekv_dtype_size(args->part_dtype))) ||
        (status = check_pointer(args->lse_parts, "lse_parts", (int32_t)sizeof(float))) ||
        (status = check_pointer(args->o, "o", ekv_dtype_size(args->o_dtype))))
        return status;
    return args->lse ? check_pointer(args->lse, "lse", (int32_t)sizeof(float)) : EKV_OK;
}

/* The furthest element of [states][rows][row] stays below 2^60. */
static ekv_status check_reach(const ekv_merge_args *args, int64_t stride_state, int64_t stride_row, int64_t row,
                              const char *name)
{
    int64_t states, rows;
    if (stride_state == INT64_MIN || stride_row == INT64_MIN ||
        __builtin_mul_overflow(stride_state < 0 ? -stride_state : stride_state, args->num_states - 1, &states) ||
        __builtin_mul_overflow(stride_row < 0 ? -stride_row : stride_row, args->rows - 1, &rows) ||
        states > (int64_t)1 << 59 || rows > ((int64_t)1 << 59) - row)
        return ekv_fail(EKV_ERROR_OVERFLOW,
                        "%s strides %" PRId64 " and %" PRId64 " with %d states of %" PRId64 " rows pass 2^60 elements",
                        name, stride_state, stride_row, args->num_states, args->rows);
    return EKV_OK;
}

static ekv_status set_strides(ekv_merge_args *args)
{
    int64_t dense_o, state_o;
    if (__builtin_mul_overflow(args->rows, (int64_t)args->head_dim, &dense_o) ||
        __builtin_mul_overflow(dense_o, (int64_t)args->num_states, &state_o) || state_o > (int64_t)1 << 59)
        return ekv_fail(EKV_ERROR_OVERFLOW, "%d states of %" PRId64 " rows of %d elements are too many",
                        args->num_states, args->rows, args->head_dim);
    if (!args->part_stride_state && !args->part_stride_row) {
        args->part_stride_state = dense_o;
        args->part_stride_row = args->head_dim;
    }
    if (!args->lse_stride_state && !args->lse_stride_row) {
        args->lse_stride_state = args->rows;
        args->lse_stride_row = 1;
    }
    ekv_status status = check_reach(args, args->part_stride_state, args->part_stride_row, args->head_dim, "part");
    return status ? status : check_reach(args, args->lse_stride_state, args->lse_stride_row, 1, "lse");
}

ekv_status ekv_merge_states(ekv_context *context, const ekv_merge_args *args)
{
    if (!context || !args)
        return ekv_fail(EKV_ERROR_INVALID_ARGUMENT, "%s is NULL", context ? "args" : "context");
    ekv_merge_args read = EKV_MERGE_ARGS_INIT;
    const ekv_backend_ops *ops;
    ekv_status status;
    if ((status = ekv_struct_read(&read, sizeof read, args, sizeof read, "ekv_merge_args")) ||
        (status = ekv_backend_find(context, read.backend, &ops)) || (status = check_sizes(&read)))
        return status;
    if (read.rows == 0)
        return EKV_OK;
    if ((status = check_pointers(&read)) || (status = set_strides(&read)))
        return status;
    return ops->merge_states(context, &read);
}
