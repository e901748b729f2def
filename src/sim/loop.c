/* SPDX-License-Identifier: Apache-2.0 */
#include "sim/loop.h"

#include "base/arena.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static const double tie_us = 1e-6;
/* How long a grid's freed slots wait, so that a CTA goes to the emptiest SM: about what hardware takes to start one.
 * Any value from 0.2 to 2 us predicts the H200's measurements equally well; at 0 long tiles meet on an SM by chance,
 * which was never measured. */
static const double grid_refill_us = 0.5;

/* ---- Layout ------------------------------------------------------------------------------------------ */

void ekv_sim_loop_size(ekv_sim_loop *loop, const ekv_plan *plan, const ekv_sim_cost *cost)
{
    const int64_t slots = (int64_t)cost->num_sms * cost->slots_per_sm;
    const int64_t ctas =
        plan->dispatch == EKV_DISPATCH_GRID ? plan->num_tiles + cost->empty_ctas : ekv_plan_num_ctas(plan);
    *loop = (ekv_sim_loop){ .plan = plan, .cost = cost, .empty_left = cost->empty_ctas, .last_tile = -1 };
    loop->num_slots = ekv_max(ekv_min(slots, ctas), 1);
    loop->sms = (int32_t)ekv_min(cost->num_sms, loop->num_slots);
    loop->num_classes = (int32_t)ekv_ceil_div(loop->num_slots, loop->sms);
    for (loop->leaves = 1; loop->leaves < loop->sms;)
        loop->leaves *= 2;
}

size_t ekv_sim_loop_lay_out(ekv_sim_loop *loop, void *memory)
{
    const size_t slots = (size_t)loop->num_slots, sms = (size_t)loop->sms, classes = (size_t)loop->num_classes;
    ekv_arena arena = { memory, 0 };
    loop->slots = ekv_arena_take(&arena, slots * sizeof *loop->slots);
    loop->sm = ekv_arena_take(&arena, sms * sizeof *loop->sm);
    loop->classes = ekv_arena_take(&arena, (classes + 1) * sizeof *loop->classes);
    loop->movers = ekv_arena_take(&arena, sms * classes * sizeof *loop->movers);
    loop->keys = ekv_arena_take(&arena, 2 * (size_t)loop->leaves * classes * sizeof *loop->keys);
    loop->key_sms = ekv_arena_take(&arena, 2 * (size_t)loop->leaves * classes * sizeof *loop->key_sms);
    loop->timers = ekv_arena_take(&arena, slots * sizeof *loop->timers);
    loop->freed = ekv_arena_take(&arena, slots * sizeof *loop->freed);
    return arena.used;
}

/* ---- The tournament of a class ----------------------------------------------------------------------- */

/* No branch depends on the keys, which nobody could predict. */
static void set_key(const ekv_sim_loop *loop, const ekv_sim_class *class, int32_t sm, double key)
{
    double *const keys = class->key;
    int32_t *const sms = class->sm;
    uint32_t node = (uint32_t)(loop->leaves + sm);
    keys[node] = key;
    while (node > 1) {
        const double other = keys[node ^ 1];
        const int32_t other_sm = sms[node ^ 1];
        const bool loses = other < key;
        key = loses ? other : key;
        sm = loses ? other_sm : sm;
        node /= 2;
        keys[node] = key;
        sms[node] = sm;
    }
}

/* ---- Movers ------------------------------------------------------------------------------------------ */

static int32_t *movers_of(const ekv_sim_loop *loop, int32_t sm)
{
    return loop->movers + (int64_t)sm * loop->num_classes;
}

/* Movers are in the order in which they are done; on ties in that in which they began. */
static void add_mover(ekv_sim_loop *loop, int32_t sm, int32_t slot)
{
    int32_t *movers = movers_of(loop, sm);
    const double finish = loop->slots[slot].finish;
    int32_t place = loop->sm[sm].movers++;
    for (; place > 0 && loop->slots[movers[place - 1]].finish > finish; place--)
        movers[place] = movers[place - 1];
    movers[place] = slot;
}

static int32_t take_first_mover(ekv_sim_loop *loop, int32_t sm)
{
    int32_t *movers = movers_of(loop, sm);
    const int32_t slot = movers[0], left = --loop->sm[sm].movers;
    for (int32_t i = 0; i < left; i++)
        movers[i] = movers[i + 1];
    return slot;
}

/* Takes the SM out of its class, with `served` up to now. */
static void leave_class(ekv_sim_loop *loop, int32_t sm)
{
    ekv_sim_sm *s = &loop->sm[sm];
    if (!s->movers)
        return;
    ekv_sim_class *class = &loop->classes[s->movers];
    s->served += class->served - s->mark;
    set_key(loop, class, sm, INFINITY);
    loop->moving -= s->movers;
    if (!--class->count)
        loop->occupied &= ~(1ull << (s->movers - 1));
}

static void enter_class(ekv_sim_loop *loop, int32_t sm)
{
    ekv_sim_sm *s = &loop->sm[sm];
    if (!s->movers)
        return;
    ekv_sim_class *class = &loop->classes[s->movers];
    const int32_t slot = movers_of(loop, sm)[0];
    s->mark = class->served;
    loop->occupied |= 1ull << (s->movers - 1);
    loop->moving += s->movers;
    class->count++;
    set_key(loop, class, sm, class->served + (loop->slots[slot].finish - s->served));
}

static void begin_move(ekv_sim_loop *loop, int32_t slot)
{
    const int32_t sm = loop->slots[slot].sm;
    ekv_sim_sm *s = &loop->sm[sm];
    const ekv_sim_bytes bytes = ekv_sim_tile_bytes(loop->cost, &loop->plan->tiles[loop->slots[slot].tile]);
    leave_class(loop, sm);
    if (!s->movers)
        s->served = 0; /* nobody counts on it: keep numbers small, so that sums stay exact */
    loop->slots[slot].finish = s->served + (double)ekv_sim_bytes_sum(bytes);
    add_mover(loop, sm, slot);
    enter_class(loop, sm);
    loop->bytes.kv += bytes.kv;
    loop->bytes.q += bytes.q;
    loop->bytes.o += bytes.o;
    loop->bytes.partial += bytes.partial;
    loop->bytes.table += bytes.table;
}

/* CTAs of an SM wait for the same units.  Where one alone keeps them busy for a share u = cta_rate / sm_rate of the
 * time, n that do not know of each other do for 1 - (1 - u)^n. */
double ekv_sim_rate(const ekv_sim_cost *cost, int32_t n)
{
    if (cost->cta_rate >= cost->sm_rate)
        return cost->sm_rate / n;
    if (n == 1)
        return cost->cta_rate;
    return cost->sm_rate * -expm1(n * log1p(-cost->cta_rate / cost->sm_rate)) / n;
}

/* ---- Tiles ------------------------------------------------------------------------------------------- */

/* The tile that the slot runs next: -1 where none is left for it, -2 for a CTA of a padded grid without a tile. */
static int64_t take_tile(ekv_sim_loop *loop, ekv_sim_slot *slot)
{
    const ekv_plan *plan = loop->plan;
    if (plan->dispatch == EKV_DISPATCH_RANGE) {
        while (slot->next == slot->end) {
            if (loop->next_cta == ekv_plan_num_ctas(plan))
                return -1;
            slot->next = plan->cta_begin[loop->next_cta];
            slot->end = plan->cta_begin[++loop->next_cta];
        }
        return slot->next++;
    }
    if (loop->next_tile < plan->num_tiles)
        return loop->next_tile++;
    if (!loop->empty_left)
        return -1;
    loop->empty_left--;
    return -2;
}

/* Whether take_tile has another one for the slot. */
static bool has_next(const ekv_sim_loop *loop, const ekv_sim_slot *slot)
{
    if (loop->plan->dispatch == EKV_DISPATCH_RANGE)
        return slot->next != slot->end || loop->next_cta < ekv_plan_num_ctas(loop->plan);
    return loop->next_tile < loop->plan->num_tiles || loop->empty_left;
}

static void start_next(ekv_sim_loop *loop, int32_t slot)
{
    ekv_sim_slot *s = &loop->slots[slot];
    ekv_sim_sm *sm = &loop->sm[s->sm];
    s->tile = take_tile(loop, s);
    if (s->tile == -1)
        return;
    if (!sm->resident++)
        sm->busy_since = loop->now;
    s->start = loop->now;
    if (loop->cost->tile_us == 0 && s->tile >= 0) {
        begin_move(loop, slot);
        return;
    }
    int64_t end = loop->timer_head + loop->timer_count++;
    if (end >= loop->num_slots)
        end -= loop->num_slots;
    loop->timers[end] = (ekv_sim_timer){ slot, loop->now + loop->cost->tile_us };
}

static void end_tile(ekv_sim_loop *loop, int32_t slot)
{
    ekv_sim_slot *s = &loop->slots[slot];
    ekv_sim_sm *sm = &loop->sm[s->sm];
    if (s->tile >= 0) {
        loop->last_tile = s->tile;
        loop->last_tile_us = loop->now - s->start;
        loop->tile_us += loop->now - s->start;
        if (loop->events)
            loop->events[s->tile] = (ekv_timeline_event){
                .tile = s->tile, .sm = s->sm, .slot = s->place, .start_us = s->start, .stop_us = loop->now
            };
        sm->last_stop = loop->now;
    }
    if (!--sm->resident)
        loop->busy_us += loop->now - sm->busy_since;
    if (!has_next(loop, s))
        return;
    if (!loop->num_freed)
        loop->refill_at = loop->now + loop->refill_us;
    loop->freed[loop->num_freed++].slot = slot;
}

static int by_rank(const void *a, const void *b)
{
    const ekv_sim_freed *x = a, *y = b;
    if (x->rank != y->rank)
        return x->rank < y->rank ? -1 : 1;
    return (x->slot > y->slot) - (x->slot < y->slot);
}

static void fill_freed(ekv_sim_loop *loop)
{
    if (loop->num_freed > 1) {
        for (int64_t i = 0; i < loop->num_freed; i++) /* as if each freed slot before it were filled */
            loop->freed[i].rank = loop->sm[loop->slots[loop->freed[i].slot].sm].resident++;
        for (int64_t i = 0; i < loop->num_freed; i++)
            loop->sm[loop->slots[loop->freed[i].slot].sm].resident--;
        qsort(loop->freed, (size_t)loop->num_freed, sizeof *loop->freed, by_rank);
    }
    for (int64_t i = 0; i < loop->num_freed; i++)
        start_next(loop, loop->freed[i].slot);
    loop->num_freed = 0;
}

/* ---- Events ------------------------------------------------------------------------------------------ */

/* The next occupied class in `set`, which loses it, from the lowest and from the highest. */
static int32_t lowest(uint64_t *set)
{
    const int32_t bit = __builtin_ctzll(*set);
    *set &= *set - 1;
    return bit + 1;
}

static int32_t highest(uint64_t *set)
{
    const int32_t bit = 63 - __builtin_clzll(*set);
    *set &= ~(1ull << bit);
    return bit + 1;
}

/* Sets the rate of each class: the smallest caps are served first, the others share what is left. */
static void share(ekv_sim_loop *loop)
{
    double left = loop->cost->total_rate, level = 0, us_per_byte = 0;
    int64_t movers = loop->moving;
    for (uint64_t set = loop->occupied; set;) {
        const int32_t c = highest(&set); /* caps grow as c falls */
        ekv_sim_class *class = &loop->classes[c];
        if (level == 0 && class->cap * (double)movers > left) {
            level = left / (double)movers;
            us_per_byte = (double)movers / left;
        }
        class->rate = level > 0 ? level : class->cap;
        class->us_per_byte = level > 0 ? us_per_byte : class->cap_us_per_byte;
        left -= class->rate * (double)class->count * c;
        movers -= (int64_t) class->count * c;
    }
}

static void advance(ekv_sim_loop *loop, double us)
{
    for (uint64_t set = loop->occupied; set;) {
        ekv_sim_class *class = &loop->classes[lowest(&set)];
        class->served += class->rate * us;
    }
    loop->now += us;
}

/* The class whose first tile has moved its bytes first, and in how many microseconds; 0: nobody moves. */
static int32_t first_to_move(const ekv_sim_loop *loop, double *wait)
{
    int32_t found = 0;
    *wait = INFINITY;
    for (uint64_t set = loop->occupied; set;) {
        const int32_t c = lowest(&set);
        const ekv_sim_class *class = &loop->classes[c];
        const double us = (class->key[1] - class->served) * class->us_per_byte;
        if (us < *wait) {
            *wait = us;
            found = c;
        }
    }
    if (*wait < 0)
        *wait = 0;
    return found;
}

static void end_move(ekv_sim_loop *loop, int32_t sm)
{
    leave_class(loop, sm);
    const int32_t slot = take_first_mover(loop, sm);
    loop->sm[sm].served = loop->slots[slot].finish;
    enter_class(loop, sm);
    end_tile(loop, slot);
}

static void end_timer(ekv_sim_loop *loop)
{
    const int32_t slot = loop->timers[loop->timer_head].slot;
    if (++loop->timer_head == loop->num_slots)
        loop->timer_head = 0;
    loop->timer_count--;
    if (loop->slots[slot].tile >= 0)
        begin_move(loop, slot);
    else
        end_tile(loop, slot);
}

/* The next event: freed slots are filled, a timer ends, or the first of the tiles has moved its bytes.  On ties tiles
 * end first, so that their slots are filled together. */
static bool step(ekv_sim_loop *loop)
{
    double wait;
    share(loop);
    const int32_t class = first_to_move(loop, &wait);
    const double timer = loop->timer_count ? loop->timers[loop->timer_head].at - loop->now : INFINITY;
    const double refill = loop->refill_at - loop->now;
    if (loop->num_freed && wait - tie_us > refill && timer - tie_us > refill) {
        if (refill > 0)
            advance(loop, refill);
        fill_freed(loop);
        return true;
    }
    if (timer <= wait && loop->timer_count) {
        advance(loop, timer > 0 ? timer : 0);
        end_timer(loop);
        return true;
    }
    if (!class)
        return false;
    advance(loop, wait);
    end_move(loop, loop->classes[class].sm[1]);
    return true;
}

static void start_tournament(ekv_sim_loop *loop, int32_t c)
{
    ekv_sim_class *class = &loop->classes[c];
    const int64_t nodes = 2 * (int64_t)loop->leaves;
    class->key = loop->keys + (c - 1) * nodes;
    class->sm = loop->key_sms + (c - 1) * nodes;
    for (int64_t node = 0; node < nodes; node++) {
        class->key[node] = INFINITY;
        class->sm[node] = (int32_t)(node >= loop->leaves ? node - loop->leaves : 0);
    }
}

void ekv_sim_loop_run(ekv_sim_loop *loop)
{
    const ekv_sim_cost *cost = loop->cost;
    loop->now = cost->launch_us;
    if (loop->plan->dispatch == EKV_DISPATCH_GRID && cost->slots_per_sm > 1)
        loop->refill_us = grid_refill_us;
    for (int32_t c = 0; c <= loop->num_classes; c++) {
        const double cap = c ? ekv_sim_rate(cost, c) : 1;
        loop->classes[c] = (ekv_sim_class){ .cap = cap, .cap_us_per_byte = 1 / cap };
        if (c)
            start_tournament(loop, c);
    }
    for (int32_t i = 0; i < loop->sms; i++)
        loop->sm[i] = (ekv_sim_sm){ .last_stop = loop->now };
    for (int64_t k = 0; k < loop->num_slots; k++) {
        loop->slots[k] =
            (ekv_sim_slot){ .tile = -1, .sm = (int32_t)(k % loop->sms), .place = (int32_t)(k / loop->sms) };
        start_next(loop, (int32_t)k);
    }
    while (step(loop))
        ;
}
