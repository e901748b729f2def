/* SPDX-License-Identifier: Apache-2.0
 * The invariants of the plan for every planner over seeded random batches, devices and options.
 *
 *     EKV_PROPERTY_BATCHES=20000 test_plan_properties    more batches than the 2,000 of `make check`
 *     EKV_SEED=1234 test_plan_properties                 only the batch of that seed, as a failure prints it */
#include "base/rng.h"
#include "one_context.h"
#include "plan/plan.h"

#include <inttypes.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

enum {
    DEFAULT_BATCHES = 2000,
    LARGE_EVERY = 400, /* one batch in so many has B * Hkv far above 2^16 */
    MAX_REQUESTS = 65536,
    MAX_PLANNERS = 32
};

typedef struct workload {
    uint64_t seed;
    ekv_batch batch;
    ekv_device device;
    ekv_plan_options options;
    int32_t *kv_len;   /* [batch_size] */
    int32_t *other;    /* [batch_size] lengths to come from, for updates; the batch's sizes otherwise */
    const char *shape; /* of kv_len */
} workload;

static int64_t padding_faults; /* met so far */

/* ---- Random batches ---------------------------------------------------------------------------------- */

static int32_t pick(ekv_rng *rng, const int32_t *list, int32_t count)
{
    return list[ekv_rng_below(rng, count)];
}
#define PICK(rng, ...) \
    pick(rng, (const int32_t[]){ __VA_ARGS__ }, (int32_t)(sizeof((const int32_t[]){ __VA_ARGS__ }) / sizeof(int32_t)))

/* Log-uniform in low..high. */
static int32_t spread(ekv_rng *rng, int32_t low, int32_t high)
{
    double x = exp(log(low) + ekv_rng_unit(rng) * (log(high + 1.0) - log(low)));
    return x > high ? high : (int32_t)x;
}

static int32_t log_normal(ekv_rng *rng, double median, double sigma)
{
    double radius = sqrt(-2.0 * log(1.0 - ekv_rng_unit(rng))), angle = 6.283185307179586 * ekv_rng_unit(rng);
    double x = median * exp(sigma * radius * cos(angle));
    return x > 1e6 ? 1000000 : (int32_t)x;
}

static int32_t near_block(ekv_rng *rng, int32_t most)
{
    int32_t block = PICK(rng, 16, 64, 128, 256, 100);
    int64_t length = block * (1 + ekv_rng_below(rng, 1 + most / block)) + PICK(rng, -1, 0, 1);
    return (int32_t)length;
}

/* Fills kv_len; returns the name of the shape.  mean: about what a request has on average, at least 1. */
static const char *random_lengths(ekv_rng *rng, int32_t *kv_len, int32_t count, int32_t mean)
{
    static const char *const shapes[] = { "equal",        "log-normal", "near blocks", "powers of two",        "small",
                                          "mostly empty", "empty",      "one giant",   "one giant, rest empty" };
    const int64_t shape = ekv_rng_below(rng, 9);
    const int32_t equal = spread(rng, 1, 2 * mean);
    for (int32_t b = 0; b < count; b++)
        switch (shape) {
        case 0: kv_len[b] = equal; break;
        case 1: kv_len[b] = log_normal(rng, mean, 1.0); break;
        case 2: kv_len[b] = near_block(rng, 2 * mean); break;
        case 3: kv_len[b] = 1 << ekv_rng_below(rng, 2 + (int64_t)log2(mean)); break;
        case 4: kv_len[b] = (int32_t)ekv_rng_below(rng, 3); break;
        case 5: kv_len[b] = ekv_rng_below(rng, 8) ? 0 : log_normal(rng, mean, 2.0); break;
        case 6: kv_len[b] = 0; break;
        case 7: kv_len[b] = log_normal(rng, 1 + mean / 4.0, 0.5); break;
        default: kv_len[b] = 0; break;
        }
    if (shape >= 7)
        kv_len[ekv_rng_below(rng, count)] =
            ekv_rng_below(rng, 16) ? spread(rng, 1, (int32_t)ekv_min((int64_t)mean * count, 1 << 24)) : INT32_MAX;
    return shapes[shape];
}

static int64_t sum(const int32_t *kv_len, int32_t count)
{
    int64_t total = 0;
    for (int32_t b = 0; b < count; b++)
        total += kv_len[b];
    return total;
}

static int32_t longest(const int32_t *kv_len, int32_t count)
{
    int32_t most = 0;
    for (int32_t b = 0; b < count; b++)
        most = kv_len[b] > most ? kv_len[b] : most;
    return most;
}

static int32_t random_divisor(ekv_rng *rng, int32_t n)
{
    int32_t d = spread(rng, 1, n);
    while (n % d)
        d--;
    return d;
}

static void random_options(ekv_rng *rng, workload *w)
{
    const int32_t count = w->batch.batch_size;
    const int64_t tokens = ekv_max(sum(w->kv_len, count), sum(w->other, count));
    ekv_plan_options *o = &w->options;
    *o = (ekv_plan_options)EKV_PLAN_OPTIONS_INIT;
    o->cuda_graph = ekv_rng_below(rng, 3) == 0;
    o->resident_ctas = 1 + (int32_t)ekv_rng_below(rng, 12); /* or cuda-core refuses the shapes that nobody measured */
    o->no_sort = ekv_rng_below(rng, 2) == 0;
    o->no_pack_gqa = ekv_rng_below(rng, 4) == 0;
    if (ekv_rng_below(rng, 4) == 0)
        o->table_width = ekv_min(
            (int64_t)ekv_max(longest(w->kv_len, count), longest(w->other, count)) + spread(rng, 1, 100000), INT32_MAX);
    if (ekv_rng_below(rng, 4) == 0)
        o->sm_margin = (int32_t)ekv_rng_below(rng, w->device.num_sms);
    o->ctas_per_sm = (int32_t)ekv_rng_below(rng, 5);
    if (ekv_rng_below(rng, 2))
        o->heads_per_tile = random_divisor(rng, w->batch.kv_heads);
    o->block_tokens = PICK(rng, 0, 0, 8, 16, 64, 100);
    o->request_cost = PICK(rng, -1, 0, 5, 12, 1000);
    o->snap_tokens = PICK(rng, -1, 0, 0, 100, 5000);
    o->least_share = PICK(rng, -1, 0, 0, 50, 1000);
    o->chunk_tokens = PICK(rng, 0, 64, 1000, 4096);
    /* Keep even-invariant, which makes a tile of every chunk, to some 2^16 tiles. */
    const int64_t least = tokens * w->batch.kv_heads >> 16;
    if (least > (o->chunk_tokens ? o->chunk_tokens : 256))
        o->chunk_tokens = (int32_t)ekv_min(least, 1 << 24);
    o->max_total_tokens = tokens;
    o->dispatch = (ekv_dispatch)PICK(rng, 0, 0, 0, 1, 2, 3);
}

/* The lengths are the caller's to free. */
static workload random_workload(uint64_t seed, bool large)
{
    ekv_rng rng = { seed };
    workload w = { .seed = seed, .batch = EKV_BATCH_INIT, .device = EKV_DEVICE_INIT };
    ekv_batch *b = &w.batch;
    b->kv_heads = ekv_rng_below(&rng, 4) ? PICK(&rng, 1, 2, 4, 8) : spread(&rng, 1, 128);
    b->q_len = ekv_rng_below(&rng, 10) ? 1 : PICK(&rng, 2, 3, 8, 40); /* 40: several m_blocks in every kernel */
    const int32_t pairs = large ? spread(&rng, 1 << 17, 1 << 20) : spread(&rng, 1, spread(&rng, 64, 1 << 16));
    b->batch_size = (int32_t)ekv_max(ekv_min(pairs / b->kv_heads / b->q_len, MAX_REQUESTS), 1);
    const int32_t group = ekv_rng_below(&rng, 4) ? PICK(&rng, 1, 4, 8) : 1 + (int32_t)ekv_rng_below(&rng, 16);
    b->q_heads = b->kv_heads * group;
    b->head_dim = PICK(&rng, 64, 96, 128, 128, 192, 256);
    b->page_size = PICK(&rng, 1, 2, 3, 16, 16, 64, 100, 16000);
    b->kv_dtype = (ekv_dtype)PICK(&rng, EKV_DTYPE_BF16, EKV_DTYPE_F16, EKV_DTYPE_F32, EKV_DTYPE_FP8_E4M3);
    snprintf(w.device.name, sizeof w.device.name, "random");
    w.device.num_sms = ekv_rng_below(&rng, 3) ? PICK(&rng, 132, 78, 108) : 1 + (int32_t)ekv_rng_below(&rng, 200);
    w.device.sm_arch = 90;
    w.device.ctas_per_sm = PICK(&rng, 1, 2, 2, 4);
    w.device.request_cost_tokens = PICK(&rng, 0, 12);

    w.kv_len = malloc((size_t)b->batch_size * sizeof *w.kv_len);
    w.other = malloc((size_t)b->batch_size * sizeof *w.other);
    assert_true(w.kv_len && w.other);
    const int32_t mean = spread(&rng, 1, (int32_t)ekv_max(ekv_min(1 << 17, (1 << 24) / b->batch_size), 1));
    w.shape = random_lengths(&rng, w.kv_len, b->batch_size, mean);
    random_lengths(&rng, w.other, b->batch_size, mean);
    b->kv_len = w.kv_len;
    random_options(&rng, &w);
    return w;
}

/* ---- Failures ---------------------------------------------------------------------------------------- */

static void print_lengths(const int32_t *kv_len, int32_t count)
{
    fprintf(stderr, "--kv-lens ");
    for (int32_t b = 0; b < count && b < 64; b++)
        fprintf(stderr, "%s%d", b ? "," : "", kv_len[b]);
    fprintf(stderr, "%s\n", count > 64 ? ",..." : "");
}

__attribute__((format(printf, 3, 4), noreturn)) static void fail_workload(const workload *w, const char *planner,
                                                                          const char *format, ...)
{
    const ekv_plan_options *o = &w->options;
    char text[640];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    fprintf(
        stderr,
        "EKV_SEED=%" PRIu64 ": %s: %s\n"
        "  %d requests (%s), %d/%d heads, head_dim %d, page_size %d, q_len %d, kv_dtype %d; %d SMs, ctas_per_sm %d, "
        "request_cost_tokens %d\n"
        "  cuda_graph %d, resident_ctas %d, no_sort %d, no_pack_gqa %d, table_width %" PRId64 ", sm_margin %d, "
        "ctas_per_sm %d, heads_per_tile %d, block_tokens %d, request_cost %d, chunk_tokens %d, dispatch %d\n  ",
        w->seed, planner, text, w->batch.batch_size, w->shape, w->batch.q_heads, w->batch.kv_heads, w->batch.head_dim,
        w->batch.page_size, w->batch.q_len, (int)w->batch.kv_dtype, w->device.num_sms, w->device.ctas_per_sm,
        w->device.request_cost_tokens, o->cuda_graph, o->resident_ctas, o->no_sort, o->no_pack_gqa, o->table_width,
        o->sm_margin, o->ctas_per_sm, o->heads_per_tile, o->block_tokens, o->request_cost, o->chunk_tokens,
        (int)o->dispatch);
    print_lengths(w->kv_len, w->batch.batch_size);
    fail_msg("EKV_SEED=%" PRIu64 ": %s: %s", w->seed, planner, text);
    abort(); /* fail_msg does not return, but does not say so */
}

/* ---- Properties -------------------------------------------------------------------------------------- */

/* The first thing in which two plans differ, or NULL. */
static const char *difference(const ekv_plan *a, const ekv_plan *b)
{
#define DIFFERS(member)         \
    if (a->member != b->member) \
        return #member;
    DIFFERS(batch.batch_size)
    DIFFERS(dispatch)
    DIFFERS(grid[0])
    DIFFERS(grid[1])
    DIFFERS(grid[2])
    DIFFERS(split_kv)
    DIFFERS(num_work_items)
    DIFFERS(max_work_items)
    DIFFERS(kv_chunk_tokens)
    DIFFERS(num_splits_bound)
    DIFFERS(num_tiles)
    DIFFERS(num_merges)
    DIFFERS(num_slots)
    DIFFERS(num_warnings)
#undef DIFFERS
    const size_t requests = (size_t)a->batch.batch_size;
    if (memcmp(a->num_splits, b->num_splits, requests * sizeof *a->num_splits))
        return "num_splits";
    if (memcmp(a->batch_order, b->batch_order, requests * sizeof *a->batch_order))
        return "batch_order";
    if (memcmp(a->tiles, b->tiles, (size_t)a->num_tiles * sizeof *a->tiles))
        return "tiles";
    if (memcmp(a->merges, b->merges, (size_t)a->num_merges * sizeof *a->merges))
        return "merges";
    if (a->dispatch == EKV_DISPATCH_RANGE &&
        memcmp(a->cta_begin, b->cta_begin, ((size_t)ekv_plan_num_ctas(a) + 1) * sizeof *a->cta_begin))
        return "cta_begin";
    for (int32_t i = 0; i < a->num_warnings; i++)
        if (strcmp(a->warnings[i], b->warnings[i]))
            return "warnings";
    return NULL;
}

/* Where a planner may refuse, and how. */
static bool may_refuse(const workload *w, const char *planner, ekv_status status)
{
    if (!strcmp(planner, "flashinfer-cuda-core"))
        return status == EKV_ERROR_UNSUPPORTED && w->batch.q_len > 1;
    if (!strcmp(planner, "flashinfer-batch-attention")) { /* over 65,536 works */
        const int64_t rows = (int64_t)w->batch.q_len * w->batch.q_heads / w->batch.kv_heads;
        const int64_t m_blocks = ekv_ceil_div(rows, rows > 16 ? 128 : 16);
        const int64_t whole = w->batch.batch_size * m_blocks * w->batch.kv_heads;
        return status == EKV_ERROR_UNSUPPORTED && whole + 4 * (int64_t)w->device.num_sms > 65536;
    }
    return false;
}

/* FlashInfer's graph padding, where it goes wrong (docs/planners.md): empty requests become work items that the
 * search for a chunk did not count. */
static bool has_padding_fault(const workload *w, const ekv_plan *plan)
{
    if (strcmp(plan->planner->name, "flashinfer-cuda-core") || !w->options.cuda_graph)
        return false;
    const int64_t max_grid = (int64_t)(w->device.num_sms - w->options.sm_margin) * w->options.resident_ctas;
    if ((int64_t)w->batch.batch_size * w->batch.kv_heads >= max_grid)
        return false;
    int64_t work_items = 0;
    for (int32_t b = 0; b < w->batch.batch_size; b++)
        work_items += ekv_max(ekv_ceil_div(w->kv_len[b], plan->kv_chunk_tokens), 1);
    return work_items > max_grid / w->batch.kv_heads;
}

static void check_invariants(const workload *w, const ekv_plan *plan)
{
    const char *planner = plan->planner->name;
    const ekv_status status = ekv_plan_check(plan);
    if (!has_padding_fault(w, plan)) {
        if (status)
            fail_workload(w, planner, "%s", ekv_last_error());
        return;
    }
    padding_faults++;
    char expected[96];
    snprintf(expected, sizeof expected, "%" PRId64 " work items, but the captured grid has room for %" PRId64,
             plan->num_work_items, plan->max_work_items);
    if (status != EKV_ERROR_PLAN_INVALID || strcmp(ekv_last_error(), expected) || plan->num_warnings != 1)
        fail_workload(w, planner, "the padding fault gives '%s' and %d warnings", ekv_last_error(), plan->num_warnings);
}

/* Of even, in tokens of one head. */
static int64_t largest_cost(const ekv_plan *plan)
{
    int64_t largest = 0;
    for (int64_t cta = 0; cta < ekv_plan_num_ctas(plan); cta++) {
        int64_t cost = 0;
        for (int64_t i = plan->cta_begin[cta]; i < plan->cta_begin[cta + 1]; i++) {
            const ekv_tile *t = &plan->tiles[i];
            cost += t->head_count * (ekv_round_up(t->kv_end - t->kv_begin, plan->block_tokens) +
                                     (t->split == 0 ? plan->request_cost : 0));
        }
        largest = ekv_max(largest, cost);
    }
    return largest;
}

/* 6: in another order the largest cost is another by at most one block and what shares may move. */
static void check_reordering(const workload *w, ekv_plan *plan)
{
    const int32_t count = w->batch.batch_size;
    const int64_t before = largest_cost(plan);
    int32_t *shuffled = malloc((size_t)count * sizeof *shuffled);
    assert_non_null(shuffled);
    memcpy(shuffled, w->kv_len, (size_t)count * sizeof *shuffled);
    ekv_rng rng = { w->seed ^ 0x5EED };
    for (int32_t b = count - 1; b > 0; b--) {
        int64_t other = ekv_rng_below(&rng, b + 1);
        int32_t length = shuffled[b];
        shuffled[b] = shuffled[other];
        shuffled[other] = length;
    }
    ekv_status status = ekv_plan_update(plan, shuffled, count);
    free(shuffled);
    if (status)
        fail_workload(w, plan->planner->name, "reordered: %s", ekv_last_error());
    const int64_t moved = largest_cost(plan) - before;
    const int64_t block =
        (int64_t)plan->tiles[0].head_count * (plan->block_tokens + plan->request_cost + 2 * plan->options.snap_tokens);
    if (moved > block || moved < -block)
        fail_workload(w, plan->planner->name, "reordering moves the largest cost from %" PRId64 " by %" PRId64, before,
                      moved);
}

/* 4: the same plan again; and the same plan by way of other lengths. */
static void check_repetition(const workload *w, const ekv_plan *plan)
{
    const char *planner = plan->planner->name, *differs;
    ekv_batch batch = w->batch;
    ekv_plan *second = NULL;
    batch.kv_len = w->other;
    const ekv_status status = ekv_plan_create(context, planner, &batch, &w->device, &w->options, &second);
    if (status) {
        if (!may_refuse(w, planner, status))
            fail_workload(w, planner, "other lengths: %s", ekv_last_error());
        return;
    }
    if (ekv_plan_update(second, w->kv_len, w->batch.batch_size))
        fail_workload(w, planner, "update: %s", ekv_last_error());
    if ((differs = difference(plan, second)) != NULL)
        fail_workload(w, planner, "an update gives other %s than a creation", differs);
    if (ekv_plan_update(second, w->kv_len, w->batch.batch_size) || (differs = difference(plan, second)) != NULL)
        fail_workload(w, planner, "a second update gives other %s", differs);
    ekv_plan_free(second);
}

/* An update to the first half of the requests gives a valid plan of those. */
static void check_fewer_requests(const workload *w, ekv_plan *plan)
{
    workload fewer = *w;
    fewer.batch.batch_size = (w->batch.batch_size + 1) / 2;
    if (ekv_plan_update(plan, w->kv_len, fewer.batch.batch_size))
        fail_workload(w, plan->planner->name, "update to %d requests: %s", fewer.batch.batch_size, ekv_last_error());
    check_invariants(&fewer, plan);
}

/* Whether the planner took it. */
static bool check_planner(const workload *w, const char *planner)
{
    ekv_plan *plan = NULL;
    ekv_status status = ekv_plan_create(context, planner, &w->batch, &w->device, &w->options, &plan);
    if (status) {
        if (!may_refuse(w, planner, status))
            fail_workload(w, planner, "%s", ekv_last_error());
        return false;
    }
    check_invariants(w, plan);
    check_repetition(w, plan);
    if (plan->request_cost >= 0 && plan->dispatch == EKV_DISPATCH_RANGE)
        check_reordering(w, plan);
    check_fewer_requests(w, plan);
    ekv_plan_free(plan);
    return true;
}

/* ---- Tests ------------------------------------------------------------------------------------------- */

static int64_t number_of(const char *variable, int64_t otherwise)
{
    const char *text = getenv(variable);
    return text && *text ? strtoll(text, NULL, 10) : otherwise;
}

static void invariants_hold_for_every_planner(void **state)
{
    (void)state;
    const int64_t batches = number_of("EKV_PROPERTY_BATCHES", DEFAULT_BATCHES), only = number_of("EKV_SEED", -1);
    int64_t taken[MAX_PLANNERS] = { 0 };
    for (int64_t i = only >= 0 ? only : 0; i < (only >= 0 ? only + 1 : batches); i++) {
        workload w = random_workload((uint64_t)i, i % LARGE_EVERY == LARGE_EVERY - 1);
        for (int32_t p = 0; ekv_planner_name(p); p++)
            taken[p] += check_planner(&w, ekv_planner_name(p));
        free(w.kv_len);
        free(w.other);
    }
    for (int32_t p = 0; only < 0 && ekv_planner_name(p); p++)
        if (taken[p] < batches * 3 / 4)
            fail_msg("%s took only %" PRId64 " of %" PRId64 " batches", ekv_planner_name(p), taken[p], batches);
    if (only < 0 && padding_faults < batches / 500)
        fail_msg("only %" PRId64 " batches met FlashInfer's graph padding fault", padding_faults);
}

int main(void)
{
    const struct CMUnitTest tests[] = { cmocka_unit_test(invariants_hold_for_every_planner) };
    return cmocka_run_group_tests(tests, create_context, free_context);
}
