/* SPDX-License-Identifier: Apache-2.0 */
#include "sim/timeline.h"

#include "base/arena.h"
#include "base/status.h"
#include "plan/imbalance.h"
#include "sim/loop.h"

#include <inttypes.h>
#include <math.h>
#include <stdlib.h>

/* ---- Why SMs stand idle ------------------------------------------------------------------------------ */

/* Idle up to this share of the SMs' time between launch and merge needs no cause: kernels ramp up and down. */
static const double idle_share = 0.05;

static ekv_tail_cause tail_cause(const ekv_sim_loop *loop, const ekv_timeline_info *info)
{
    const double sms_us = (loop->now - info->launch_us) * loop->cost->num_sms;
    if (loop->last_tile < 0 || sms_us - loop->busy_us <= idle_share * sms_us)
        return EKV_TAIL_NONE;
    /* In flight longer than all tiles, spread evenly, would keep the slots: no order of the tiles could hide it. */
    if (loop->last_tile_us > loop->tile_us / ((double)loop->cost->num_sms * loop->cost->slots_per_sm))
        return EKV_TAIL_LONG_TILE;
    if (loop->plan->dispatch == EKV_DISPATCH_RANGE)
        return EKV_TAIL_UNEVEN;
    return loop->plan->tiles[loop->last_tile].flags & EKV_TILE_PARTIAL ? EKV_TAIL_SPLIT_WAVE : EKV_TAIL_WHOLE_WAVE;
}

/* ---- Results ----------------------------------------------------------------------------------------- */

static double first_idle(const ekv_sim_loop *loop)
{
    double first = loop->sms < loop->cost->num_sms ? loop->cost->launch_us : INFINITY;
    for (int32_t i = 0; i < loop->sms; i++)
        first = fmin(first, loop->sm[i].last_stop);
    return first;
}

static void set_info(ekv_timeline *timeline, ekv_sim_loop *loop, const ekv_device *device)
{
    const ekv_plan *plan = loop->plan;
    const ekv_sim_cost *cost = loop->cost;
    const ekv_sim_bytes merged = ekv_sim_merge_bytes(plan, cost);
    const double end = loop->last_tile >= 0 ? loop->now : cost->launch_us;
    ekv_timeline_info *info = &timeline->info;
    *info = (ekv_timeline_info)EKV_TIMELINE_INFO_INIT;
    info->system = ekv_system_name((int32_t)cost->system);
    info->projected = device->projected;
    info->num_sms = cost->num_sms;
    info->slots_per_sm = cost->slots_per_sm;
    info->num_ctas = ekv_plan_num_ctas(plan);
    info->num_tiles = plan->num_tiles;
    info->num_events = timeline->events ? plan->num_tiles : 0;
    info->time_us = end + cost->merge_us;
    info->launch_us = cost->launch_us;
    info->merge_us = cost->merge_us;
    info->sm_busy_share = info->time_us > 0 ? loop->busy_us / (info->time_us * cost->num_sms) : 0;
    info->tail_us = loop->last_tile >= 0 ? end - first_idle(loop) : 0;
    info->tail_tile = loop->last_tile;
    info->tail_cause = tail_cause(loop, info);
    int64_t tokens = 0;
    for (int32_t b = 0; b < plan->batch.batch_size; b++)
        tokens += plan->kv_len[b];
    info->kv_gb_per_s =
        info->time_us > 0 ? (double)(tokens * plan->batch.kv_heads * cost->kv_token_bytes) / info->time_us / 1e3 : 0;
    info->kv_bytes = loop->bytes.kv;
    info->q_bytes = loop->bytes.q;
    info->o_bytes = loop->bytes.o + merged.o;
    info->partial_bytes = loop->bytes.partial + merged.partial;
    info->table_bytes = loop->bytes.table;
}

static int by_start(const void *a, const void *b)
{
    const ekv_timeline_event *x = a, *y = b;
    if (x->start_us != y->start_us)
        return x->start_us < y->start_us ? -1 : 1;
    return (x->tile > y->tile) - (x->tile < y->tile);
}

/* ---- Memory ------------------------------------------------------------------------------------------ */

static ekv_status reserve(ekv_timeline *timeline, size_t size)
{
    if (size <= timeline->memory_size)
        return EKV_OK;
    ekv_timeline_clear(timeline);
    timeline->memory = ekv_alloc(timeline->context, size + size / 2);
    if (!timeline->memory)
        return ekv_fail(EKV_ERROR_OUT_OF_MEMORY, "no memory for a simulation of %zu bytes", size + size / 2);
    timeline->memory_size = size + size / 2;
    return EKV_OK;
}

void ekv_timeline_clear(ekv_timeline *timeline)
{
    ekv_release(timeline->context, timeline->memory);
    *timeline = (ekv_timeline){ .context = timeline->context };
}

ekv_status ekv_timeline_run(ekv_timeline *timeline, const ekv_plan *plan, const ekv_device *device, int32_t system,
                            bool events)
{
    ekv_sim_cost cost;
    ekv_sim_loop loop;
    const ekv_system own = ekv_sim_system_of(plan, device);
    ekv_status status = ekv_sim_cost_of(plan, device, system < 0 ? own : (ekv_system)system, &cost);
    timeline->events = NULL;
    if (status)
        return status;
    ekv_sim_loop_size(&loop, plan, &cost);
    const size_t events_size = events ? (size_t)plan->num_tiles * sizeof(ekv_timeline_event) : 0;
    const size_t loop_size = ekv_sim_loop_lay_out(&loop, NULL);
    if ((status = reserve(timeline, events_size + EKV_ARENA_ALIGN + loop_size)))
        return status;
    unsigned char *memory = timeline->memory;
    ekv_sim_loop_lay_out(&loop, memory + ekv_round_up((int64_t)events_size, EKV_ARENA_ALIGN));
    loop.events = timeline->events = events ? timeline->memory : NULL;
    ekv_sim_loop_run(&loop);
    set_info(timeline, &loop, device);
    if (events)
        qsort(timeline->events, (size_t)plan->num_tiles, sizeof *timeline->events, by_start);
    return EKV_OK;
}
