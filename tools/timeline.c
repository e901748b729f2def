/* SPDX-License-Identifier: Apache-2.0 */
#include "timeline.h"

#include "base/status.h"
#include "plan/plan.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { TILE = 1, MERGE = 2 }; /* ekv_stamp.kind */

/* Slices of a track must not overlap, and an SM runs several CTAs at a time: each takes the first free place. */
enum { MAX_PLACES = 64 };

typedef struct sm_places {
    int64_t free_at[MAX_PLACES]; /* when its last slice ended; from the first place without one on: the beginning */
    int32_t count;               /* places that were ever taken */
} sm_places;

static void begin_event(cli_timeline *timeline)
{
    cli_print(&timeline->events, timeline->events.size ? ",\n" : "");
}

/* Perfetto keeps process 0 and thread 0 for the idle task of a kernel, and puts a thread that is named as its process
 * first: processes count from 1, tracks from MAX_PLACES. */
static int32_t track(int32_t sm, int32_t place)
{
    return (sm + 1) * MAX_PLACES + place;
}

static int32_t process(const cli_timeline *timeline)
{
    return timeline->decodes + 1;
}

static void add_slice(cli_timeline *timeline, const char *name, const char *category, int32_t tid, int64_t start_ns,
                      int64_t stop_ns, const char *arguments)
{
    begin_event(timeline);
    cli_print(
        &timeline->events,
        "{\"name\":\"%s\",\"cat\":\"%s\",\"ph\":\"X\",\"pid\":%d,\"tid\":%d,\"ts\":%.3f,\"dur\":%.3f,\"args\":{%s}}",
        name, category, process(timeline), tid, (double)start_ns / 1e3, (double)(stop_ns - start_ns) / 1e3, arguments);
}

static void add_metadata(cli_timeline *timeline, const char *what, int32_t tid, const char *key, const char *value)
{
    begin_event(timeline);
    cli_print(&timeline->events, "{\"name\":\"%s\",\"ph\":\"M\",\"pid\":%d,\"tid\":%d,\"args\":{\"%s\":%s}}", what,
              process(timeline), tid, key, value);
}

static void add_tile(cli_timeline *timeline, const ekv_plan *plan, const ekv_stamp *stamp, int32_t tid, int64_t origin)
{
    const ekv_tile *tile = &plan->tiles[stamp->index];
    char name[64], arguments[256];
    snprintf(name, sizeof name, "request %d, split %d", tile->request, tile->split);
    snprintf(arguments, sizeof arguments,
             "\"request\":%d,\"head\":%d,\"heads\":%d,\"split\":%d,\"kv_begin\":%d,\"kv_end\":%d,\"tokens\":%d,"
             "\"tile\":%d,\"cta\":%d",
             tile->request, tile->head, tile->head_count, tile->split, tile->kv_begin, tile->kv_end,
             tile->kv_end - tile->kv_begin, stamp->index, stamp->cta);
    add_slice(timeline, name, "tile", tid, stamp->start_ns - origin, stamp->stop_ns - origin, arguments);
}

static void add_merge(cli_timeline *timeline, const ekv_plan *plan, const ekv_cuda_timeline *recorded,
                      const ekv_stamp *stamp, int32_t tid, int64_t origin)
{
    /* The place of the stamp, not its index, says which merge and head it is. */
    const int64_t entry = stamp - recorded->stamps - recorded->num_tiles;
    const ekv_merge *merge = &plan->merges[entry / recorded->heads];
    char name[64], arguments[160];
    snprintf(name, sizeof name, "merge of request %d", merge->request);
    snprintf(arguments, sizeof arguments, "\"request\":%d,\"head\":%d,\"splits\":%d,\"cta\":%d", merge->request,
             merge->head + (int32_t)(entry % recorded->heads), merge->num_splits, stamp->cta);
    add_slice(timeline, name, "merge", tid, stamp->start_ns - origin, stamp->stop_ns - origin, arguments);
}

static void add_idle(cli_timeline *timeline, int32_t tid, int64_t start_ns, int64_t stop_ns)
{
    if (stop_ns > start_ns)
        add_slice(timeline, "idle", "idle", tid, start_ns, stop_ns, "");
}

static int by_start(const void *a, const void *b)
{
    const ekv_stamp *x = *(const ekv_stamp *const *)a, *y = *(const ekv_stamp *const *)b;
    if (x->start_ns != y->start_ns)
        return x->start_ns < y->start_ns ? -1 : 1;
    return x < y ? -1 : 1;
}

/* The stamps that were written, in order of their start.  Malloced. */
static const ekv_stamp **sorted_stamps(const ekv_cuda_timeline *recorded, int64_t *count)
{
    const int64_t all = recorded->num_tiles + recorded->num_merges;
    const ekv_stamp **stamps = cli_alloc((size_t)all * sizeof *stamps);
    *count = 0;
    for (int64_t i = 0; i < all; i++)
        if (recorded->stamps[i].kind == TILE || recorded->stamps[i].kind == MERGE)
            stamps[(*count)++] = &recorded->stamps[i];
    qsort(stamps, (size_t)*count, sizeof *stamps, by_start);
    return stamps;
}

static int32_t take_place(sm_places *places, const ekv_stamp *stamp)
{
    int32_t place = 0;
    while (place < MAX_PLACES - 1 && places->free_at[place] > stamp->start_ns)
        place++;
    if (place == places->count)
        places->count++;
    return place;
}

static void name_tracks(cli_timeline *timeline, const sm_places *sms, int32_t num_sms)
{
    for (int32_t sm = 0; sm < num_sms; sm++)
        for (int32_t place = 0; place < ekv_max(sms[sm].count, 1); place++) {
            char name[48], order[16];
            snprintf(name, sizeof name, "\"SM %03d, CTA %d\"", sm, place);
            snprintf(order, sizeof order, "%d", track(sm, place));
            add_metadata(timeline, "thread_name", track(sm, place), "name", name);
            add_metadata(timeline, "thread_sort_index", track(sm, place), "sort_index", order);
        }
}

static void name_process(cli_timeline *timeline, const ekv_plan *plan, int64_t batch, int64_t ns)
{
    char name[192];
    snprintf(name, sizeof name, "\"%s, %s, batch %" PRId64 ": %d requests, %" PRId64 " tiles, %.1f us\"",
             plan->planner->name, cli_dispatch_name(plan->dispatch), batch + 1, plan->batch.batch_size, plan->num_tiles,
             (double)ns / 1e3);
    add_metadata(timeline, "process_name", track(0, 0), "name", name);
}

/* Returns the time from the first start to the last stop. */
static int64_t add_stamps(cli_timeline *timeline, const ekv_plan *plan, const ekv_cuda_timeline *recorded,
                          const ekv_stamp **stamps, int64_t count, sm_places *sms, int32_t num_sms)
{
    const int64_t origin = stamps[0]->start_ns;
    int64_t end = origin;
    for (int64_t i = 0; i < count; i++)
        end = ekv_max(end, stamps[i]->stop_ns);
    for (int32_t sm = 0; sm < num_sms; sm++)
        for (int32_t place = 0; place < MAX_PLACES; place++)
            sms[sm].free_at[place] = origin;
    for (int64_t i = 0; i < count; i++) {
        sm_places *places = &sms[stamps[i]->sm];
        const int32_t place = take_place(places, stamps[i]), tid = track(stamps[i]->sm, place);
        add_idle(timeline, tid, places->free_at[place] - origin, stamps[i]->start_ns - origin);
        if (stamps[i]->kind == TILE)
            add_tile(timeline, plan, stamps[i], tid, origin);
        else
            add_merge(timeline, plan, recorded, stamps[i], tid, origin);
        places->free_at[place] = stamps[i]->stop_ns;
    }
    for (int32_t sm = 0; sm < num_sms; sm++)
        for (int32_t place = 0; place < ekv_max(sms[sm].count, 1); place++)
            add_idle(timeline, track(sm, place), sms[sm].free_at[place] - origin, end - origin);
    name_tracks(timeline, sms, num_sms);
    return end - origin;
}

void cli_timeline_add(cli_timeline *timeline, const ekv_plan *plan, int64_t batch, const ekv_cuda_timeline *recorded)
{
    int64_t count;
    const ekv_stamp **stamps = sorted_stamps(recorded, &count);
    int32_t num_sms = plan->device.num_sms;
    for (int64_t i = 0; i < count; i++)
        num_sms = (int32_t)ekv_max(num_sms, stamps[i]->sm + 1);
    sm_places *sms = cli_alloc((size_t)num_sms * sizeof *sms);
    memset(sms, 0, (size_t)num_sms * sizeof *sms);
    if (count)
        name_process(timeline, plan, batch, add_stamps(timeline, plan, recorded, stamps, count, sms, num_sms));
    timeline->decodes++;
    free(sms);
    free((void *)stamps);
}

void cli_timeline_write(const cli_timeline *timeline, cli_text *text)
{
    cli_print(text, "{\"displayTimeUnit\":\"ns\",\"traceEvents\":[\n");
    cli_append(text, timeline->events.data, timeline->events.size);
    cli_print(text, "\n]}\n");
}

void cli_timeline_free(cli_timeline *timeline)
{
    free(timeline->events.data);
    *timeline = (cli_timeline){ 0 };
}
