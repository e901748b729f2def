/* SPDX-License-Identifier: Apache-2.0 */
#include "sim/cost.h"

#include "base/half.h"
#include "base/status.h"

#include <math.h>
#include <stddef.h>

ekv_system ekv_sim_system_of(const ekv_plan *plan, const ekv_device *device)
{
    return device->sm_arch ? plan->planner->system : EKV_SYSTEM_EVENKV;
}

/* Query rows that the system's kernel computes for a tile, padding included. */
static int32_t computed_rows(const ekv_plan *plan, ekv_system system)
{
    enum { MMA_ROWS = 8 }; /* evenkv puts queries on the side of m16n8k16 that has 8 */
    if (system == plan->planner->system && system != EKV_SYSTEM_EVENKV)
        return plan->padded_rows;
    return (int32_t)ekv_round_up(ekv_plan_slot_rows(plan), MMA_ROWS);
}

/* Most bytes of K and V a microsecond that the matrix units of an SM keep up with: a token of a head is 2 * head_dim
 * elements and 4 * head_dim FLOP a row.  FP8 is taken at the rate of bf16: nobody measured it. */
static double matrix_rate(const ekv_plan *plan, const ekv_device *device, ekv_system system)
{
    if (system == EKV_SYSTEM_FLASHINFER_CUDA_CORE || device->bf16_tflops <= 0)
        return INFINITY;
    const double flop_per_byte = 2.0 * computed_rows(plan, system) / ekv_dtype_size(plan->batch.kv_dtype);
    return device->bf16_tflops * 1e6 / device->num_sms / flop_per_byte;
}

static ekv_status check_model(const ekv_device *device, ekv_system system)
{
    const ekv_system_model *m = &device->systems[system];
    const double rates[] = { m->cta_gb_per_s, m->sm_gb_per_s, m->total_gb_per_s };
    const double times[] = { m->tile_us, m->launch_us, m->merge_us };
    if (m->cta_gb_per_s == 0 && m->sm_gb_per_s == 0 && m->total_gb_per_s == 0)
        return ekv_fail(EKV_ERROR_UNSUPPORTED, "device %s has no constants of %s; `evenkv calibrate` fits them",
                        device->name, ekv_system_name((int32_t)system));
    for (int i = 0; i < 3; i++)
        if (!(rates[i] > 0 && rates[i] <= 1e9) || !(times[i] >= 0 && times[i] <= 1e9))
            return ekv_fail(EKV_ERROR_INVALID_ARGUMENT,
                            "device %s: constants of %s are rates of %g, %g, %g GB/s and times of %g, %g, %g us; rates "
                            "must be above 0, times 0 or more, all at most 1e9",
                            device->name, ekv_system_name((int32_t)system), rates[0], rates[1], rates[2], times[0],
                            times[1], times[2]);
    return EKV_OK;
}

static void set_bytes(const ekv_plan *plan, ekv_sim_cost *cost)
{
    const ekv_batch *batch = &plan->batch;
    const int64_t elements = (int64_t)ekv_plan_slot_rows(plan) * batch->head_dim;
    cost->kv_token_bytes = (int64_t)2 * batch->head_dim * ekv_dtype_size(batch->kv_dtype);
    cost->q_head_bytes = elements * ekv_dtype_size(batch->q_dtype);
    cost->o_head_bytes = elements * ekv_dtype_size(batch->q_dtype);
    cost->partial_head_bytes = (elements + ekv_plan_slot_rows(plan)) * (int64_t)sizeof(float);
    cost->page_size = batch->page_size;
    cost->round_tokens = cost->system == EKV_SYSTEM_FA3 ? plan->block_tokens : 1;
}

/* FlashAttention-3 launches its combine kernel wherever the static bound allows splits, split or not. */
static bool merges(const ekv_plan *plan, ekv_system system)
{
    return plan->num_merges > 0 || (system == EKV_SYSTEM_FA3 && plan->num_splits_bound > 1);
}

ekv_status ekv_sim_cost_of(const ekv_plan *plan, const ekv_device *device, ekv_system system, ekv_sim_cost *cost)
{
    if ((unsigned)system >= EKV_NUM_SYSTEMS)
        return ekv_fail(EKV_ERROR_INVALID_ARGUMENT, "system %d is not an ekv_system", (int)system);
    ekv_status status = check_model(device, system);
    if (status)
        return status;
    if (device->num_sms <= plan->options.sm_margin)
        return ekv_fail(EKV_ERROR_INVALID_ARGUMENT, "device %s has %d SMs; the plan leaves %d to others", device->name,
                        device->num_sms, plan->options.sm_margin);
    const ekv_system_model *model = &device->systems[system];
    const double gb = 1e3; /* 1e9 bytes a second are 1e3 bytes a microsecond */
    *cost = (ekv_sim_cost){ .system = system,
                            .num_sms = device->num_sms - plan->options.sm_margin,
                            .slots_per_sm = plan->resident_ctas,
                            .cta_rate = model->cta_gb_per_s * gb,
                            .sm_rate = fmin(model->sm_gb_per_s * gb, matrix_rate(plan, device, system)),
                            .total_rate = model->total_gb_per_s * gb,
                            .tile_us = model->tile_us,
                            .launch_us = model->launch_us,
                            .empty_ctas = (plan->max_work_items - plan->num_work_items) * plan->heads };
    set_bytes(plan, cost);
    if (plan->dispatch != EKV_DISPATCH_GRID || cost->empty_ctas < 0)
        cost->empty_ctas = 0;
    if (merges(plan, system))
        cost->merge_us = model->merge_us + (double)ekv_sim_bytes_sum(ekv_sim_merge_bytes(plan, cost)) /
                                               fmin(cost->total_rate, cost->sm_rate * cost->num_sms);
    return EKV_OK;
}

ekv_sim_bytes ekv_sim_tile_bytes(const ekv_sim_cost *cost, const ekv_tile *tile)
{
    const int64_t tokens = tile->kv_end - tile->kv_begin;
    const bool partial = tile->flags & EKV_TILE_PARTIAL;
    ekv_sim_bytes bytes = { 0 };
    if (tokens > 0) {
        bytes.kv = ekv_round_up(tokens, cost->round_tokens) * tile->head_count * cost->kv_token_bytes;
        bytes.q = tile->head_count * cost->q_head_bytes;
        bytes.table = ekv_ceil_div(tokens, cost->page_size) * (int64_t)sizeof(int32_t);
    }
    if (partial)
        bytes.partial = tile->head_count * cost->partial_head_bytes;
    else
        bytes.o = tile->head_count * cost->o_head_bytes;
    return bytes;
}

ekv_sim_bytes ekv_sim_merge_bytes(const ekv_plan *plan, const ekv_sim_cost *cost)
{
    ekv_sim_bytes bytes = { 0 };
    for (int64_t i = 0; i < plan->num_merges; i++) {
        const ekv_merge *merge = &plan->merges[i];
        bytes.partial += (int64_t)merge->num_splits * merge->head_count * cost->partial_head_bytes;
        bytes.o += merge->head_count * cost->o_head_bytes;
    }
    return bytes;
}
