/* SPDX-License-Identifier: Apache-2.0
 * One decode step on the CPU: build a batch, plan it, look at the plan, decode.  Then the same result in two
 * parts, as an engine has it that keeps a shared prefix apart: decode either half of every request's tokens and
 * merge the two attention states. */
#include <evenkv/evenkv.h>
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

enum { REQUESTS = 4, Q_HEADS = 8, KV_HEADS = 2, HEAD_DIM = 64, PAGE_SIZE = 16, PAGES = 400 };
enum { Q_ROWS = REQUESTS * Q_HEADS, CACHE_SIZE = PAGES * PAGE_SIZE * KV_HEADS * HEAD_DIM };

/* One long request, one short, one empty, one in between.  Pages of a request lie in order here; any order does. */
static const int32_t kv_len[REQUESTS] = { 4800, 37, 0, 900 };
static const int32_t first_page[REQUESTS] = { 0, 300, 303, 303 };

static float q[Q_ROWS * HEAD_DIM], k[CACHE_SIZE], v[CACHE_SIZE];

static void check(ekv_status status)
{
    if (status) {
        fprintf(stderr, "%s: %s\n", ekv_status_name(status), ekv_last_error());
        exit(1);
    }
}

static void fill(float *values, int count, uint32_t seed)
{
    for (int i = 0; i < count; i++) {
        seed = seed * 1664525u + 1013904223u; /* Numerical Recipes' generator; any numbers do */
        values[i] = (float)(seed >> 8) / (1 << 23) - 1;
    }
}

static ekv_plan *make_plan(ekv_context *context, const int32_t *lengths)
{
    ekv_device device = EKV_DEVICE_INIT;
    check(ekv_device_find("cpu", &device));

    ekv_batch batch = EKV_BATCH_INIT;
    batch.batch_size = REQUESTS;
    batch.kv_len = lengths;
    batch.q_heads = Q_HEADS;
    batch.kv_heads = KV_HEADS;
    batch.head_dim = HEAD_DIM;
    batch.page_size = PAGE_SIZE;
    batch.q_dtype = batch.kv_dtype = EKV_DTYPE_F32;

    ekv_plan *plan;
    check(ekv_plan_create(context, "even", &batch, &device, NULL, &plan));
    return plan;
}

static void print_plan(ekv_plan *plan)
{
    ekv_plan_info info = EKV_PLAN_INFO_INIT;
    check(ekv_plan_info_get(plan, &info));
    printf("%s: %lld tokens in %lld tiles, imbalance %.3f\n", info.planner, (long long)info.total_tokens,
           (long long)info.num_tiles, info.imbalance);
    for (int64_t i = 0; i < info.num_tiles; i++) {
        ekv_tile tile;
        check(ekv_plan_tile_get(plan, i, &tile));
        printf("  request %d, split %d: tokens %d..%d of KV heads %d..%d\n", tile.request, tile.split, tile.kv_begin,
               tile.kv_end, tile.head, tile.head + tile.head_count);
    }
}

/* Attention over `lengths` tokens of every request from page skip_pages[b] on. */
static void decode(ekv_context *context, const int32_t *lengths, const int32_t *skip_pages, int show, float *o,
                   float *lse)
{
    int32_t indptr[REQUESTS + 1] = { 0 }, indices[PAGES];
    for (int b = 0; b < REQUESTS; b++) {
        int32_t pages = (lengths[b] + PAGE_SIZE - 1) / PAGE_SIZE;
        for (int32_t p = 0; p < pages; p++)
            indices[indptr[b] + p] = first_page[b] + skip_pages[b] + p;
        indptr[b + 1] = indptr[b] + pages;
    }

    ekv_tensors tensors = EKV_TENSORS_INIT; /* strides 0: dense */
    tensors.q = q;
    tensors.k = k;
    tensors.v = v;
    tensors.o = o;
    tensors.lse = lse;
    tensors.page_indptr = indptr;
    tensors.page_indices = indices;
    tensors.num_pages = PAGES;

    ekv_plan *plan = make_plan(context, lengths);
    if (show)
        print_plan(plan);
    size_t size;
    check(ekv_workspace_size(plan, EKV_BACKEND_CPU, &size));
    void *workspace = aligned_alloc(256, (size + 511) / 256 * 256); /* at least one unit, as size may be 0 */
    check(ekv_decode(plan, &tensors, NULL, workspace, size));
    free(workspace);
    ekv_plan_free(plan);
}

int main(void)
{
    static float whole[Q_ROWS * HEAD_DIM], whole_lse[Q_ROWS];
    static float parts[2][Q_ROWS * HEAD_DIM], part_lse[2][Q_ROWS];
    static float merged[Q_ROWS * HEAD_DIM], merged_lse[Q_ROWS];
    int32_t half_pages[REQUESTS], lengths[2][REQUESTS];
    const int32_t none[REQUESTS] = { 0 };

    fill(q, Q_ROWS * HEAD_DIM, 1);
    fill(k, CACHE_SIZE, 2);
    fill(v, CACHE_SIZE, 3);
    for (int b = 0; b < REQUESTS; b++) {
        half_pages[b] = kv_len[b] / PAGE_SIZE / 2;
        lengths[0][b] = half_pages[b] * PAGE_SIZE;
        lengths[1][b] = kv_len[b] - lengths[0][b];
    }

    ekv_context *context;
    check(ekv_context_create(NULL, &context));
    decode(context, kv_len, none, 1, whole, whole_lse);
    decode(context, lengths[0], none, 0, parts[0], part_lse[0]);
    decode(context, lengths[1], half_pages, 0, parts[1], part_lse[1]);

    ekv_merge_args merge = EKV_MERGE_ARGS_INIT;
    merge.num_states = 2;
    merge.rows = Q_ROWS;
    merge.head_dim = HEAD_DIM;
    merge.o_parts = parts;
    merge.lse_parts = part_lse[0];
    merge.o = merged;
    merge.lse = merged_lse;
    check(ekv_merge_states(context, &merge));
    ekv_context_free(context);

    float largest = 0;
    for (int i = 0; i < Q_ROWS * HEAD_DIM; i++)
        largest = fmaxf(largest, fabsf(merged[i] - whole[i]));
    printf("two halves merged differ from the whole by at most %.1e\n", (double)largest);
    return largest < 1e-6f ? 0 : 1; /* a few roundings of float32 below 1, 6e-8 each */
}
