/* SPDX-License-Identifier: Apache-2.0
 * The event loop: CTAs start in dispatch order where a slot is free, and share the memory as a fluid.
 *
 * A tile first takes cost.tile_us, in which it moves nothing, then moves its bytes.  All CTAs of an SM that move move
 * at the same rate, ekv_sim_rate(); where that is more than total_rate over all SMs, the largest rates are cut to one
 * level (max-min fairness), so that no bandwidth is left while somebody could take it.
 *
 * Tiles that end at the same time free their slots together, under grid dispatch also those that end a little later;
 * what comes next goes to the SMs with the fewest CTAs first, then by number, as the hardware spreads CTAs.  So the
 * result does not hang on how sums round. */
#ifndef EVENKV_SIM_LOOP_H
#define EVENKV_SIM_LOOP_H

#include "sim/cost.h"

typedef struct ekv_sim_slot {
    int32_t sm, place; /* which slot of the SM, from 0 */
    int64_t tile;      /* in flight; -1: none; -2: a CTA of a padded grid, which has none */
    int64_t next;      /* range: the CTA's next tile, */
    int64_t end;       /* and where its range ends */
    double start;      /* of the tile */
    double finish;     /* service of the SM at which its bytes are moved */
} ekv_sim_slot;

typedef struct ekv_sim_sm {
    int32_t movers;   /* CTAs that move bytes: the class of the SM */
    int32_t resident; /* slots with a tile */
    double served;    /* bytes that a CTA moving all the time would have moved, at `mark` */
    double mark;      /* service of the class at which `served` was taken */
    double busy_since, last_stop;
} ekv_sim_sm;

/* SMs with the same number of movers. */
typedef struct ekv_sim_class {
    /* A tournament: node 1 is the first of all, node n of nodes 2n and 2n + 1, leaf leaves + sm of the SM itself. */
    double *key; /* [2 * leaves], service of the class at which the first CTA of the SM is done; INFINITY: not here */
    int32_t *sm; /* [2 * leaves], whose key it is */
    int32_t count;
    double served; /* bytes that a CTA in this class all the time would have moved */
    double cap;    /* rate of a CTA as far as the SM goes */
    double rate;
    double us_per_byte, cap_us_per_byte; /* their reciprocals */
} ekv_sim_class;

typedef struct ekv_sim_timer {
    int32_t slot;
    double at;
} ekv_sim_timer;

typedef struct ekv_sim_freed {
    int32_t slot;
    int32_t rank; /* CTAs on the SM when this slot is filled */
} ekv_sim_freed;

typedef struct ekv_sim_loop {
    const ekv_plan *plan;
    const ekv_sim_cost *cost;
    int64_t num_slots; /* slots that can get a tile; slot k lies on SM k % sms */
    int32_t sms;       /* with such slots */
    int32_t num_classes;
    ekv_sim_slot *slots;    /* [num_slots] */
    ekv_sim_sm *sm;         /* [sms] */
    uint64_t occupied;      /* bit c - 1: class c has SMs */
    ekv_sim_class *classes; /* [num_classes + 1], by movers; class 0 is idle */
    int32_t *movers;        /* [sms][num_classes], slots that move, the first sm.movers, in the order of their end */
    int32_t leaves;         /* the least power of two that is not less than sms */
    int64_t moving;         /* movers of all SMs */
    double *keys;           /* [num_classes][2 * leaves] */
    int32_t *key_sms;       /* the same */
    ekv_sim_timer *timers;  /* [num_slots], a ring: all wait equally long */
    int64_t timer_head, timer_count;
    ekv_sim_freed *freed; /* [num_slots], slots that the current time has freed */
    int64_t num_freed;
    double refill_us, refill_at; /* how long freed slots wait for each other, and until when */
    int64_t next_tile, next_cta, empty_left;
    double now;
    double busy_us; /* over SMs, in which they have a tile */
    double tile_us; /* over tiles, in which they are in flight */
    int64_t last_tile;
    double last_tile_us; /* how long the tile that ended last was in flight */
    ekv_sim_bytes bytes;
    ekv_timeline_event *events; /* [plan->num_tiles] or NULL, by tile */
} ekv_sim_loop;

/* Rate of each of n CTAs that move on one SM. */
double ekv_sim_rate(const ekv_sim_cost *cost, int32_t n);

/* Sets the sizes; then lays the arrays out in `memory` (NULL: only counts) and returns the bytes that they need. */
void ekv_sim_loop_size(ekv_sim_loop *loop, const ekv_plan *plan, const ekv_sim_cost *cost);
size_t ekv_sim_loop_lay_out(ekv_sim_loop *loop, void *memory);
/* From launch_us on until all tiles are done. */
void ekv_sim_loop_run(ekv_sim_loop *loop);

#endif
