/* SPDX-License-Identifier: Apache-2.0 */
#include "plan/tensors.h"

#include "base/portable.h"
#include "base/status.h"

#include <inttypes.h>
#include <math.h>
#include <stdbool.h>

/* Offsets from a base pointer stay below this many elements, so that byte offsets fit an int64. */
#define MAX_OFFSET ((int64_t)1 << 60)

static void set_kv_strides(const ekv_batch *batch, int64_t *page, int64_t *token, int64_t *head)
{
    if (*page || *token || *head)
        return;
    const int64_t dim = batch->head_dim, heads = batch->kv_heads, tokens = batch->page_size;
    *page = tokens * heads * dim;
    *token = batch->layout == EKV_LAYOUT_NHD ? heads * dim : dim;
    *head = batch->layout == EKV_LAYOUT_NHD ? dim : tokens * dim;
}

static void set_row_strides(int64_t heads, int64_t row, int64_t *stride_request, int64_t *stride_head)
{
    if (*stride_request || *stride_head)
        return;
    *stride_request = heads * row;
    *stride_head = row;
}

void ekv_tensors_set_defaults(const ekv_batch *batch, ekv_tensors *tensors)
{
    set_kv_strides(batch, &tensors->k_stride_page, &tensors->k_stride_token, &tensors->k_stride_head);
    set_kv_strides(batch, &tensors->v_stride_page, &tensors->v_stride_token, &tensors->v_stride_head);
    set_row_strides(batch->q_heads, batch->head_dim, &tensors->q_stride_request, &tensors->q_stride_head);
    set_row_strides(batch->q_heads, batch->head_dim, &tensors->o_stride_request, &tensors->o_stride_head);
    set_row_strides(batch->q_heads, 1, &tensors->lse_stride_request, &tensors->lse_stride_head);
    if (!tensors->block_table_stride)
        tensors->block_table_stride = tensors->block_table_width;
    if (tensors->sm_scale == 0)
        tensors->sm_scale = 1.0f / sqrtf((float)batch->head_dim);
}

/* ---- Checks that read nothing ------------------------------------------------------------------------ */

static ekv_status check_pointer(const void *pointer, const char *name, int32_t element_size)
{
    if (!pointer)
        return ekv_fail(EKV_ERROR_INVALID_ARGUMENT, "tensors.%s is NULL", name);
    if ((uintptr_t)pointer % (uintptr_t)element_size)
        return ekv_fail(EKV_ERROR_INVALID_ARGUMENT, "tensors.%s is %p; it must be aligned to its element of %d bytes",
                        name, pointer, element_size);
    return EKV_OK;
}

/* The furthest offset along a dimension, added to *reach. */
static ekv_status add_reach(int64_t stride, int64_t extent, const char *name, int64_t *reach)
{
    int64_t length = 0;
    if (stride == INT64_MIN || __builtin_mul_overflow(stride < 0 ? -stride : stride, extent - 1, &length) ||
        __builtin_add_overflow(*reach, length, reach) || *reach > MAX_OFFSET)
        return ekv_fail(EKV_ERROR_OVERFLOW, "tensors.%s is %" PRId64 "; times %" PRId64 " it passes 2^60 elements",
                        name, stride, extent - 1);
    return EKV_OK;
}

/* A dimension of an output: rows that overlap would be written twice. */
static ekv_status check_apart(int64_t stride, int64_t extent, int64_t row, const char *name)
{
    if (extent > 1 && stride > -row && stride < row)
        return ekv_fail(EKV_ERROR_INVALID_ARGUMENT, "tensors.%s is %" PRId64 "; rows of %" PRId64 " would overlap",
                        name, stride, row);
    return EKV_OK;
}

static int64_t magnitude(int64_t value)
{
    return value < 0 ? -value : value;
}

/* Both dimensions of an output together, each of which keeps its rows apart: rows (i, j) and (0, 0), whose offsets
 * differ by i * request + j * head.  For each j the i with the smallest difference is one of two neighbours. */
static ekv_status check_both_apart(const ekv_batch *batch, int64_t request, int64_t head, int64_t row, const char *name)
{
    const int64_t requests = batch->batch_size, heads = batch->q_heads;
    if (requests == 1 || heads == 1 || magnitude(request) >= (heads - 1) * magnitude(head) + row ||
        magnitude(head) >= (requests - 1) * magnitude(request) + row)
        return EKV_OK;
    for (int64_t j = 1; j < heads; j++) {
        const int64_t toward_zero = -(j * head) / request;
        for (int64_t i = toward_zero - 1; i <= toward_zero + 1; i++)
            if (magnitude(i) < requests && magnitude(i * request + j * head) < row)
                return ekv_fail(EKV_ERROR_INVALID_ARGUMENT,
                                "tensors.%s_stride_request is %" PRId64 " and %s_stride_head %" PRId64
                                "; rows of %" PRId64 " would overlap",
                                name, request, name, head, row);
    }
    return EKV_OK;
}

static ekv_status check_rows(const ekv_batch *batch, const ekv_tensors *t)
{
    const int64_t requests = batch->batch_size, heads = batch->q_heads, dim = batch->head_dim;
    int64_t q = dim, o = dim, lse = 1;
    ekv_status status;
    if ((status = check_pointer(t->q, "q", ekv_dtype_size(batch->q_dtype))) ||
        (status = check_pointer(t->o, "o", ekv_dtype_size(batch->q_dtype))) ||
        (status = add_reach(t->q_stride_request, requests, "q_stride_request", &q)) ||
        (status = add_reach(t->q_stride_head, heads, "q_stride_head", &q)) ||
        (status = add_reach(t->o_stride_request, requests, "o_stride_request", &o)) ||
        (status = add_reach(t->o_stride_head, heads, "o_stride_head", &o)) ||
        (status = check_apart(t->o_stride_request, requests, dim, "o_stride_request")) ||
        (status = check_apart(t->o_stride_head, heads, dim, "o_stride_head")) ||
        (status = check_both_apart(batch, t->o_stride_request, t->o_stride_head, dim, "o")) || !t->lse)
        return status;
    if ((status = check_pointer(t->lse, "lse", (int32_t)sizeof *t->lse)) ||
        (status = add_reach(t->lse_stride_request, requests, "lse_stride_request", &lse)) ||
        (status = add_reach(t->lse_stride_head, heads, "lse_stride_head", &lse)) ||
        (status = check_apart(t->lse_stride_request, requests, 1, "lse_stride_request")) ||
        (status = check_apart(t->lse_stride_head, heads, 1, "lse_stride_head")) ||
        (status = check_both_apart(batch, t->lse_stride_request, t->lse_stride_head, 1, "lse")))
        return status;
    return EKV_OK;
}

/* pages: what the page dimension is known to hold. */
static ekv_status check_kv_strides(const ekv_batch *batch, const ekv_tensors *t, int64_t pages)
{
    int64_t k = batch->head_dim, v = batch->head_dim;
    ekv_status status;
    if ((status = add_reach(t->k_stride_page, pages, "k_stride_page", &k)) ||
        (status = add_reach(t->k_stride_token, batch->page_size, "k_stride_token", &k)) ||
        (status = add_reach(t->k_stride_head, batch->kv_heads, "k_stride_head", &k)) ||
        (status = add_reach(t->v_stride_page, pages, "v_stride_page", &v)) ||
        (status = add_reach(t->v_stride_token, batch->page_size, "v_stride_token", &v)) ||
        (status = add_reach(t->v_stride_head, batch->kv_heads, "v_stride_head", &v)))
        return status;
    return EKV_OK;
}

static bool has_tokens(const ekv_batch *batch)
{
    for (int32_t b = 0; b < batch->batch_size; b++)
        if (batch->kv_len[b])
            return true;
    return false;
}

/* Exactly one form; none is needed where there are no tokens. */
static ekv_status check_table_form(const ekv_tensors *t, bool tokens)
{
    if (t->page_indptr && t->block_table)
        return ekv_fail(EKV_ERROR_INVALID_ARGUMENT,
                        "tensors.page_indptr and tensors.block_table are both given; a page table has one form");
    if (!t->page_indptr && !t->block_table && tokens)
        return ekv_fail(EKV_ERROR_INVALID_ARGUMENT,
                        "tensors.page_indptr and tensors.block_table are both NULL; one page table is needed");
    if (!t->page_indptr && (t->page_indices || t->last_page_len))
        return ekv_fail(EKV_ERROR_INVALID_ARGUMENT, "tensors.%s is given without tensors.page_indptr",
                        t->page_indices ? "page_indices" : "last_page_len");
    if (!t->block_table && t->block_table_rows)
        return ekv_fail(EKV_ERROR_INVALID_ARGUMENT, "tensors.block_table_rows is given without tensors.block_table");
    if (t->page_indptr && !t->page_indices && tokens)
        return ekv_fail(EKV_ERROR_INVALID_ARGUMENT, "tensors.page_indices is NULL");
    if (t->block_table_width < 0)
        return ekv_fail(EKV_ERROR_INVALID_ARGUMENT, "tensors.block_table_width is %d", t->block_table_width);
    if (t->block_table_stride > MAX_OFFSET >> 31 || t->block_table_stride < -(MAX_OFFSET >> 31))
        return ekv_fail(EKV_ERROR_OVERFLOW, "tensors.block_table_stride is %" PRId64, t->block_table_stride);
    return EKV_OK;
}

ekv_status ekv_tensors_check(const ekv_batch *batch, const ekv_tensors *t)
{
    const bool tokens = has_tokens(batch);
    ekv_status status;
    if (!isfinite(t->sm_scale))
        return ekv_fail(EKV_ERROR_INVALID_ARGUMENT, "tensors.sm_scale is %g; it must be a finite number",
                        (double)t->sm_scale);
    if (t->num_pages < 0)
        return ekv_fail(EKV_ERROR_INVALID_ARGUMENT, "tensors.num_pages is %" PRId64 "; it must be >= 0 (0: unknown)",
                        t->num_pages);
    if ((status = check_rows(batch, t)) || (status = check_table_form(t, tokens)))
        return status;
    if (!tokens)
        return EKV_OK; /* an engine's cache of no pages may well be NULL */
    if ((status = check_pointer(t->k, "k", ekv_dtype_size(batch->kv_dtype))) ||
        (status = check_pointer(t->v, "v", ekv_dtype_size(batch->kv_dtype))) ||
        (status = check_kv_strides(batch, t, ekv_max(t->num_pages, 1))))
        return status;
    return EKV_OK;
}

/* ---- Checks of a page table in host memory ----------------------------------------------------------- */

static ekv_status check_csr(const ekv_batch *batch, const ekv_tensors *t, int32_t b, int64_t needed)
{
    const int32_t begin = t->page_indptr[b], end = t->page_indptr[b + 1], len = batch->kv_len[b];
    if (begin < 0 || end < begin)
        return ekv_fail(EKV_ERROR_INVALID_ARGUMENT,
                        "page_indptr[%d] is %d and page_indptr[%d] is %d; they must not fall", b, begin, b + 1, end);
    const int64_t pages = (int64_t)end - begin;
    if (pages < needed)
        return ekv_fail(EKV_ERROR_INVALID_ARGUMENT,
                        "request %d has %" PRId64 " pages of %d tokens; its kv_len %d needs %" PRId64, b, pages,
                        batch->page_size, len, needed);
    if (!t->last_page_len)
        return EKV_OK;
    const int32_t last = t->last_page_len[b];
    if (last < (len ? 1 : 0) || last > batch->page_size)
        return ekv_fail(EKV_ERROR_INVALID_ARGUMENT, "last_page_len[%d] is %d; it must be %d..%d", b, last, len ? 1 : 0,
                        batch->page_size);
    const int64_t tokens = pages ? (pages - 1) * batch->page_size + last : 0;
    if (tokens != len)
        return ekv_fail(EKV_ERROR_INVALID_ARGUMENT,
                        "last_page_len[%d] is %d: with %" PRId64 " pages of %d that makes %" PRId64
                        " tokens, but the plan's kv_len is %d",
                        b, last, pages, batch->page_size, tokens, len);
    return EKV_OK;
}

static ekv_status check_block_table(const ekv_batch *batch, const ekv_tensors *t, int32_t b, int64_t needed)
{
    if (needed > t->block_table_width)
        return ekv_fail(EKV_ERROR_INVALID_ARGUMENT,
                        "block_table_width is %d; request %d of kv_len %d needs %" PRId64 " pages of %d tokens",
                        t->block_table_width, b, batch->kv_len[b], needed, batch->page_size);
    if (t->block_table_rows && t->block_table_rows[b] < 0)
        return ekv_fail(EKV_ERROR_INVALID_ARGUMENT, "block_table_rows[%d] is %d", b, t->block_table_rows[b]);
    return EKV_OK;
}

/* Largest page index of the used entries; the entries may lie anywhere, so they are looked at once. */
static ekv_status check_entries(const ekv_tensors *t, int32_t b, int64_t needed, int32_t *largest)
{
    const int32_t *pages = ekv_tensors_pages(t, b);
    const int64_t limit = t->num_pages ? t->num_pages : INT64_MAX;
    for (int64_t p = 0; p < needed; p++) {
        if (pages[p] < 0 || pages[p] >= limit) {
            if (t->num_pages)
                return ekv_fail(EKV_ERROR_INVALID_ARGUMENT,
                                "page %" PRId64 " of request %d is %d; num_pages is %" PRId64, p, b, pages[p],
                                t->num_pages);
            return ekv_fail(EKV_ERROR_INVALID_ARGUMENT, "page %" PRId64 " of request %d is %d", p, b, pages[p]);
        }
        *largest = pages[p] > *largest ? pages[p] : *largest;
    }
    return EKV_OK;
}

ekv_status ekv_tensors_check_pages(const ekv_batch *batch, const ekv_tensors *t)
{
    int32_t largest = -1;
    for (int32_t b = 0; b < batch->batch_size; b++) {
        const int64_t needed = ekv_ceil_div(batch->kv_len[b], batch->page_size);
        ekv_status status = EKV_OK;
        if (t->page_indptr)
            status = check_csr(batch, t, b, needed);
        else if (t->block_table)
            status = check_block_table(batch, t, b, needed);
        if (status || (needed && (status = check_entries(t, b, needed, &largest))))
            return status;
    }
    return largest < 0 ? EKV_OK : check_kv_strides(batch, t, (int64_t)largest + 1);
}
