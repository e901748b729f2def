/* SPDX-License-Identifier: Apache-2.0 */
#include "sim/loop.h"

#include "base/arena.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static const double tie_us = 1e-6;

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
}

size_t ekv_sim_loop_lay_out(ekv_sim_loop *loop, void *memory)
{
    const size_t slots = (size_t)loop->num_slots, sms = (size_t)loop->sms, classes = (size_t)loop->num_classes;
    ekv_arena arena = { memory, 0 };
    loop->slots = ekv_arena_take(&arena, slots * sizeof *loop->slots);
    loop->sm = ekv_arena_take(&arena, sms * sizeof *loop->sm);
    loop->classes = ekv_arena_take(&arena, (classes + 1) * sizeof *loop->classes);
    loop->movers = ekv_arena_take(&arena, sms * classes * sizeof *loop->movers);
    loop->heaps = ekv_arena_take(&arena, sms * classes * sizeof *loop->heaps);
    loop->timers = ekv_arena_take(&arena, slots * sizeof *loop->timers);
    loop->freed = ekv_arena_take(&arena, slots * sizeof *loop->freed);
    return arena.used;
}

/* ---- The heap of a class ----------------------------------------------------------------------------- */

static bool before(const ekv_sim_loop *loop, int32_t a, int32_t b)
{
    const double x = loop->sm[a].key, y = loop->sm[b].key;
    return x < y || (x == y && a < b);
}

static void put(ekv_sim_loop *loop, ekv_sim_class *class, int32_t place, int32_t sm)
{
    class->heap[place] = sm;
    loop->sm[sm].place = place;
}

static void sift_up(ekv_sim_loop *loop, ekv_sim_class *class, int32_t place, int32_t sm)
{
    while (place > 0 && before(loop, sm, class->heap[(place - 1) / 2])) {
        put(loop, class, place, class->heap[(place - 1) / 2]);
        place = (place - 1) / 2;
    }
    put(loop, class, place, sm);
}

static void sift_down(ekv_sim_loop *loop, ekv_sim_class *class, int32_t place, int32_t sm)
{
    for (int32_t child = 2 * place + 1; child < class->count; child = 2 * place + 1) {
        if (child + 1 < class->count && before(loop, class->heap[child + 1], class->heap[child]))
            child++;
        if (!before(loop, class->heap[child], sm))
            break;
        put(loop, class, place, class->heap[child]);
        place = child;
    }
    put(loop, class, place, sm);
}

static void heap_remove(ekv_sim_loop *loop, ekv_sim_class *class, int32_t sm)
{
    const int32_t place = loop->sm[sm].place, last = class->heap[--class->count];
    if (last == sm)
        return;
    if (place > 0 && before(loop, last, class->heap[(place - 1) / 2]))
        sift_up(loop, class, place, last);
    else
        sift_down(loop, class, place, last);
}

/* ---- Movers ------------------------------------------------------------------------------------------ */

static int32_t *movers_of(const ekv_sim_loop *loop, int32_t sm)
{
    return loop->movers + (int64_t)sm * loop->num_classes;
}

/* The mover of the SM that is done first; on ties the one that began to move first. */
static int32_t first_mover(const ekv_sim_loop *loop, int32_t sm)
{
    const int32_t *movers = movers_of(loop, sm);
    int32_t first = 0;
    for (int32_t i = 1; i < loop->sm[sm].movers; i++)
        if (loop->slots[movers[i]].finish < loop->slots[movers[first]].finish)
            first = i;
    return first;
}

/* Takes the SM out of its class, with `served` up to now. */
static void leave_class(ekv_sim_loop *loop, int32_t sm)
{
    ekv_sim_sm *s = &loop->sm[sm];
    if (!s->movers)
        return;
    ekv_sim_class *class = &loop->classes[s->movers];
    s->served += class->served - s->mark;
    heap_remove(loop, class, sm);
}

static void enter_class(ekv_sim_loop *loop, int32_t sm)
{
    ekv_sim_sm *s = &loop->sm[sm];
    if (!s->movers)
        return;
    ekv_sim_class *class = &loop->classes[s->movers];
    const int32_t slot = movers_of(loop, sm)[first_mover(loop, sm)];
    s->mark = class->served;
    s->key = class->served + (loop->slots[slot].finish - s->served);
    sift_up(loop, class, class->count++, sm);
}

static void begin_move(ekv_sim_loop *loop, int32_t slot)
{
    const int32_t sm = (int32_t)(slot % loop->sms);
    ekv_sim_sm *s = &loop->sm[sm];
    const ekv_sim_bytes bytes = ekv_sim_tile_bytes(loop->cost, &loop->plan->tiles[loop->slots[slot].tile]);
    leave_class(loop, sm);
    if (!s->movers)
        s->served = 0; /* nobody counts on it: keep numbers small, so that sums stay exact */
    loop->slots[slot].finish = s->served + (double)ekv_sim_bytes_sum(bytes);
    movers_of(loop, sm)[s->movers++] = slot;
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
    return cost->sm_rate * (1 - pow(1 - cost->cta_rate / cost->sm_rate, n)) / n;
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

static void start_next(ekv_sim_loop *loop, int32_t slot)
{
    ekv_sim_slot *s = &loop->slots[slot];
    ekv_sim_sm *sm = &loop->sm[slot % loop->sms];
    s->tile = take_tile(loop, s);
    if (s->tile == -1)
        return;
    if (!sm->resident++)
        sm->busy_since = loop->now;
    s->start = loop->now;
    loop->timers[(loop->timer_head + loop->timer_count++) % loop->num_slots] =
        (ekv_sim_timer){ slot, loop->now + loop->cost->tile_us };
}

static void end_tile(ekv_sim_loop *loop, int32_t slot)
{
    ekv_sim_slot *s = &loop->slots[slot];
    ekv_sim_sm *sm = &loop->sm[slot % loop->sms];
    if (s->tile >= 0) {
        loop->last_tile = s->tile;
        loop->last_tile_us = loop->now - s->start;
        if (loop->events)
            loop->events[s->tile] = (ekv_timeline_event){ .tile = s->tile,
                                                          .sm = (int32_t)(slot % loop->sms),
                                                          .slot = (int32_t)(slot / loop->sms),
                                                          .start_us = s->start,
                                                          .stop_us = loop->now };
        sm->last_stop = loop->now;
    }
    if (!--sm->resident)
        loop->busy_us += loop->now - sm->busy_since;
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
            loop->freed[i].rank = loop->sm[loop->freed[i].slot % loop->sms].resident++;
        for (int64_t i = 0; i < loop->num_freed; i++)
            loop->sm[loop->freed[i].slot % loop->sms].resident--;
        qsort(loop->freed, (size_t)loop->num_freed, sizeof *loop->freed, by_rank);
    }
    for (int64_t i = 0; i < loop->num_freed; i++)
        start_next(loop, loop->freed[i].slot);
    loop->num_freed = 0;
}

/* ---- Events ------------------------------------------------------------------------------------------ */

/* Sets the rate of each class: the smallest caps are served first, the others share what is left. */
static void share(ekv_sim_loop *loop)
{
    double left = loop->cost->total_rate;
    int64_t movers = 0;
    for (int32_t c = 1; c <= loop->num_classes; c++)
        movers += (int64_t)loop->classes[c].count * c;
    for (int32_t c = loop->num_classes; c > 0; c--) { /* caps grow as c falls */
        ekv_sim_class *class = &loop->classes[c];
        if (!class->count)
            continue;
        const double own = (double)class->count * c;
        class->rate = fmin(class->cap, left / (double)movers);
        left -= class->rate * own;
        movers -= (int64_t) class->count * c;
    }
}

static void advance(ekv_sim_loop *loop, double us)
{
    for (int32_t c = 1; c <= loop->num_classes; c++)
        if (loop->classes[c].count)
            loop->classes[c].served += loop->classes[c].rate * us;
    loop->now += us;
}

/* The next event: a timer, or the first of the tiles to have moved its bytes.  Timers go first on ties, and freed slots
 * are filled when time moves on. */
static bool step(ekv_sim_loop *loop)
{
    double wait = INFINITY;
    int32_t found = 0;
    share(loop);
    for (int32_t c = 1; c <= loop->num_classes; c++) {
        const ekv_sim_class *class = &loop->classes[c];
        if (!class->count)
            continue;
        const double us = fmax((loop->sm[class->heap[0]].key - class->served) / class->rate, 0);
        if (us < wait) {
            wait = us;
            found = c;
        }
    }
    if (loop->num_freed && wait > tie_us) {
        fill_freed(loop);
        return true;
    }
    if (loop->timer_count && loop->timers[loop->timer_head].at - loop->now <= wait) {
        const ekv_sim_timer timer = loop->timers[loop->timer_head];
        loop->timer_head = (loop->timer_head + 1) % loop->num_slots;
        loop->timer_count--;
        advance(loop, fmax(timer.at - loop->now, 0));
        if (loop->slots[timer.slot].tile >= 0)
            begin_move(loop, timer.slot);
        else
            end_tile(loop, timer.slot);
        return true;
    }
    if (!found)
        return false;
    advance(loop, wait);
    const int32_t sm = loop->classes[found].heap[0];
    leave_class(loop, sm);
    int32_t *movers = movers_of(loop, sm), first = first_mover(loop, sm);
    const int32_t slot = movers[first];
    memmove(movers + first, movers + first + 1, (size_t)(--loop->sm[sm].movers - first) * sizeof *movers);
    loop->sm[sm].served = loop->slots[slot].finish;
    enter_class(loop, sm);
    end_tile(loop, slot);
    return true;
}

void ekv_sim_loop_run(ekv_sim_loop *loop)
{
    const ekv_sim_cost *cost = loop->cost;
    loop->now = cost->launch_us;
    for (int32_t c = 0; c <= loop->num_classes; c++)
        loop->classes[c] = (ekv_sim_class){ .heap = c ? loop->heaps + (int64_t)(c - 1) * loop->sms : NULL,
                                            .cap = c ? ekv_sim_rate(cost, c) : 0 };
    for (int32_t i = 0; i < loop->sms; i++)
        loop->sm[i] = (ekv_sim_sm){ .last_stop = loop->now };
    for (int64_t k = 0; k < loop->num_slots; k++) {
        loop->slots[k] = (ekv_sim_slot){ .tile = -1 };
        start_next(loop, (int32_t)k);
    }
    while (step(loop))
        ;
}
