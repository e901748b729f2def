/* SPDX-License-Identifier: Apache-2.0
 * What the tests of planners share: plans of small batches on a given device, and exact tiles. */
#ifndef EVENKV_TESTS_PLANNER_TESTS_H
#define EVENKV_TESTS_PLANNER_TESTS_H

#include "one_context.h"
#include "plan/plan.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#define CUDA_CORE "flashinfer-cuda-core"
#define TENSOR_CORE "flashinfer-tensor-core"
#define BATCH_ATTENTION "flashinfer-batch-attention"
#define XQA "flashinfer-xqa"

enum { H200_SMS = 132, H20_SMS = 78 };

/* What a test varies; batch.kv_len is set by the functions below. */
typedef struct setup {
    ekv_batch batch;
    ekv_device device;
    ekv_plan_options options;
} setup;

/* head_dim 128, bf16, pages of 16, on a Hopper GPU of num_sms SMs. */
static inline setup hopper(int32_t num_sms, int32_t q_heads, int32_t kv_heads)
{
    setup s = { EKV_BATCH_INIT, EKV_DEVICE_INIT, EKV_PLAN_OPTIONS_INIT };
    s.batch.q_heads = q_heads;
    s.batch.kv_heads = kv_heads;
    s.batch.head_dim = 128;
    s.device.num_sms = num_sms;
    s.device.sm_arch = 90;
    return s;
}

static inline ekv_status try_plan(const setup *s, const char *planner, const int32_t *kv_len, int32_t batch_size,
                                  ekv_plan **plan)
{
    ekv_batch batch = s->batch;
    batch.kv_len = kv_len;
    batch.batch_size = batch_size;
    return ekv_plan_create(context, planner, &batch, &s->device, &s->options, plan);
}

/* The plan of given lengths; ekv_plan_check is the caller's. */
static inline ekv_plan *make_plan(const setup *s, const char *planner, const int32_t *kv_len, int32_t batch_size)
{
    ekv_plan *plan = NULL;
    if (try_plan(s, planner, kv_len, batch_size, &plan))
        fail_msg("%s: %s", planner, ekv_last_error());
    return plan;
}

static inline void assert_sound(const ekv_plan *plan)
{
    if (ekv_plan_check(plan))
        fail_msg("%s: %s", plan->planner->name, ekv_last_error());
}

/* A checked plan of one request of `first` tokens and batch_size - 1 of `rest`. */
static inline ekv_plan *make_skewed(const setup *s, const char *planner, int32_t first, int32_t rest,
                                    int32_t batch_size)
{
    int32_t *kv_len = malloc((size_t)batch_size * sizeof *kv_len);
    assert_non_null(kv_len);
    for (int32_t b = 0; b < batch_size; b++)
        kv_len[b] = b ? rest : first;
    ekv_plan *plan = make_plan(s, planner, kv_len, batch_size);
    free(kv_len);
    assert_sound(plan);
    return plan;
}

static inline void assert_grid(const ekv_plan *plan, int32_t x, int32_t y, int32_t z)
{
    assert_int_equal(plan->grid[0], x);
    assert_int_equal(plan->grid[1], y);
    assert_int_equal(plan->grid[2], z);
}

static inline void assert_tile(const ekv_plan *plan, int64_t index, ekv_tile expected)
{
    const ekv_tile *t = &plan->tiles[index];
    if (memcmp(t, &expected, sizeof expected))
        fail_msg("tile %d is request %d m_block %d split %d [%d, %d) slot %d head %d+%d flags %u", (int)index,
                 t->request, t->m_block, t->split, t->kv_begin, t->kv_end, t->slot, t->head, t->head_count, t->flags);
}

static inline ekv_tile tile(int32_t request, int32_t split, int32_t kv_begin, int32_t kv_end, int32_t slot,
                            int32_t head)
{
    return (ekv_tile){ .request = request,
                       .split = split,
                       .kv_begin = kv_begin,
                       .kv_end = kv_end,
                       .slot = slot,
                       .head = (uint16_t)head,
                       .head_count = 1,
                       .flags = slot < 0 ? 0 : EKV_TILE_PARTIAL };
}

#endif
