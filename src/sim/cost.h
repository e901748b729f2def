/* SPDX-License-Identifier: Apache-2.0
 * What a plan costs on a device: rates, constants and bytes, resolved from the plan, the device and the system whose
 * kernels run it. */
#ifndef EVENKV_SIM_COST_H
#define EVENKV_SIM_COST_H

#include "plan/plan.h"

/* Rates in bytes per microsecond, times in microseconds. */
typedef struct ekv_sim_cost {
    ekv_system system;
    int32_t num_sms, slots_per_sm;
    double cta_rate;   /* most that one CTA moves */
    double sm_rate;    /* most that the CTAs of an SM move together: memory or arithmetic, what is less */
    double total_rate; /* most that all move together */
    double tile_us;
    double launch_us;
    double merge_us;            /* after the last tile: the constant and the merges' bytes */
    int64_t empty_ctas;         /* CTAs of a padded grid that have no tile */
    int32_t round_tokens;       /* a tile moves whole multiples of this */
    int64_t kv_token_bytes;     /* K and V of one token of one head */
    int64_t q_head_bytes;       /* Q of one tile and head */
    int64_t o_head_bytes;       /* O of the same */
    int64_t partial_head_bytes; /* a partial result of the same: O and LSE in fp32 */
    int32_t page_size;
} ekv_sim_cost;

/* What a tile moves. */
typedef struct ekv_sim_bytes {
    int64_t kv, q, o, partial, table;
} ekv_sim_bytes;

/* The system by whose kernels the original of the planner runs; on a CPU this project's. */
ekv_system ekv_sim_system_of(const ekv_plan *plan, const ekv_device *device);

/* system: whose constants of the device to take.  Errors: UNSUPPORTED (it has none), INVALID_ARGUMENT (constants that
 * no machine has). */
ekv_status ekv_sim_cost_of(const ekv_plan *plan, const ekv_device *device, ekv_system system, ekv_sim_cost *cost);

ekv_sim_bytes ekv_sim_tile_bytes(const ekv_sim_cost *cost, const ekv_tile *tile);

/* What all merges move: they read partial results and write O. */
ekv_sim_bytes ekv_sim_merge_bytes(const ekv_plan *plan, const ekv_sim_cost *cost);

static inline int64_t ekv_sim_bytes_sum(ekv_sim_bytes bytes)
{
    return bytes.kv + bytes.q + bytes.o + bytes.partial + bytes.table;
}

#endif
