/* SPDX-License-Identifier: Apache-2.0
 * evenkv calibrate without --from: what a decode by even costs on this GPU, and what a request should be said to cost
 * when its shares are cut. */
#include "base/context.h"
#include "base/half.h"
#include "base/number.h"
#include "base/status.h"
#include "calibrate.h"
#include "execution.h"
#include "json.h"
#include "sim/even_cost.h"
#include "workload.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    NUM_SIZES = 3,
    NUM_COUNTS = 4,
    NUM_EQUAL = NUM_SIZES * NUM_COUNTS,
    NUM_MIXED = 4,
    NUM_COSTS = 9,
    NUM_BATCHES = NUM_EQUAL + NUM_MIXED
};

static const int64_t sizes[NUM_SIZES] = { INT64_C(1) << 29, INT64_C(1) << 30, INT64_C(1) << 31 }; /* bytes of K and V */
/* Requests a CTA.  In whole numbers, so that every share begins with a request: nothing is cut, nothing merged. */
static const int32_t counts[NUM_COUNTS] = { 2, 4, 8, 16 };
/* Batches whose requests differ, of sizes[1]: they show what a balance is worth. */
static const struct {
    const char *dist;
    int32_t requests;
} mixed[NUM_MIXED] = { { "skew40", 1024 }, { "skew40", 2048 }, { "skew80", 1024 }, { "skew80", 2048 } };
static const int32_t costs[NUM_COSTS] = { 0, 2, 4, 8, 16, 32, 64, 128, 256 }; /* --request-cost */

typedef struct calibration {
    cli_state *cli;
    cli_workload workload; /* device and shape */
    cli_execution execution;
    ekv_lengths_list *batches[NUM_BATCHES]; /* the equal ones, then the mixed ones; one batch each */
    int32_t num_ctas;
    int32_t heads_per_tile;
    int32_t model_cost; /* request_cost by the device's model */
    char kernel[64];
    ekv_even_time times[NUM_EQUAL];
    cli_read reads[NUM_SIZES];
    int64_t read_bytes[NUM_SIZES];
    double mixed_us[NUM_MIXED][NUM_COSTS];
    /* What comes out. */
    ekv_even_cost cost;
    double read_launch_us;      /* of a line through the plain reads, by least squares */
    double relative[NUM_COSTS]; /* geometric mean over the mixed batches of the time over the least of the batch */
    int32_t best;               /* of costs */
    bool passed;
} calibration;

/* ---- Batches ----------------------------------------------------------------------------------------- */

static ekv_batch batch_of(const calibration *c, int32_t index)
{
    ekv_batch batch = c->workload.shape;
    batch.batch_size = c->batches[index]->batches[0].batch_size;
    batch.kv_len = c->batches[index]->batches[0].kv_len;
    return batch;
}

static ekv_status create_plan(calibration *c, const ekv_batch *batch, int32_t request_cost, ekv_plan **plan)
{
    ekv_plan_options options = c->cli->options.plan;
    options.request_cost = request_cost;
    return cli_plan_status(c->cli,
                           ekv_plan_create(c->cli->context, "even", batch, &c->workload.device, &options, plan));
}

/* What even does whatever the batch. */
static ekv_status look_at_plan(calibration *c)
{
    const int32_t kv_len = 1;
    ekv_batch batch = c->workload.shape;
    batch.batch_size = 1;
    batch.kv_len = &kv_len;
    ekv_plan *plan;
    ekv_status status = create_plan(c, &batch, -1, &plan);
    if (status)
        return status;
    c->num_ctas = plan->grid[0];
    c->heads_per_tile = plan->options.heads_per_tile;
    c->model_cost = plan->options.request_cost;
    ekv_plan_free(plan);
    return EKV_OK;
}

static ekv_status make_batches(calibration *c)
{
    ekv_context *context = c->cli->context;
    const int64_t token = cli_kv_bytes_per_token(&c->workload.shape), page = c->workload.shape.page_size;
    ekv_status status = EKV_OK;
    for (int32_t i = 0; i < NUM_EQUAL && !status; i++) {
        const int64_t requests = (int64_t)c->num_ctas * counts[i % NUM_COUNTS];
        const int64_t tokens = sizes[i / NUM_COUNTS] / token;
        const int64_t pages = ekv_max((tokens + requests * page / 2) / (requests * page), 1); /* of a request */
        status =
            ekv_lengths_from_dist(context, "uniform", requests, requests * pages * page, EKV_HOT_FIRST, &c->batches[i]);
    }
    for (int32_t i = 0; i < NUM_MIXED && !status; i++)
        status = ekv_lengths_from_dist(context, mixed[i].dist, mixed[i].requests, sizes[1] / token, EKV_HOT_FIRST,
                                       &c->batches[NUM_EQUAL + i]);
    return status;
}

/* ---- Times ------------------------------------------------------------------------------------------- */

/* A job for the plan, checked. */
static ekv_status create_job(calibration *c, ekv_plan *plan, int32_t index, cli_job *job)
{
    cli_check check;
    ekv_status status = cli_job_create(&c->execution, plan, job);
    if (status || (status = cli_job_check(&c->execution, job, &check)))
        return status;
    if (!check.passed) {
        char what[64];
        snprintf(what, sizeof what, "batch %" PRId32, index);
        cli_check_report(c->cli, what, &check);
        c->passed = false;
    }
    return EKV_OK;
}

/* Plans for one batch, one for each cost; their runs take turns.  us: [count], medians. */
typedef struct turns {
    int32_t count;
    ekv_plan *plans[NUM_COSTS];
    cli_job jobs[NUM_COSTS];
    double *times; /* [count][repeat] */
} turns;

static ekv_status time_turns(calibration *c, int32_t index, const int32_t *request_costs, turns *t, double *us)
{
    const int32_t repeat = cli_repeat(c->cli);
    const ekv_batch batch = batch_of(c, index);
    ekv_status status = EKV_OK;
    t->times = cli_alloc((size_t)t->count * (size_t)repeat * sizeof *t->times);
    for (int32_t i = 0; i < t->count && !status; i++)
        if (!(status = create_plan(c, &batch, request_costs[i], &t->plans[i])))
            status = create_job(c, t->plans[i], index, &t->jobs[i]);
    for (int32_t n = 0; n < repeat; n++)
        for (int32_t i = 0; i < t->count && !status; i++)
            status = cli_job_time(&c->execution, &t->jobs[i], &t->times[i * repeat + n]);
    for (int32_t i = 0; i < t->count && !status; i++)
        us[i] = cli_times_of(t->times + i * repeat, repeat).median_us;
    if (!status)
        snprintf(c->kernel, sizeof c->kernel, "%s", t->jobs[0].kernel);
    return status;
}

static ekv_status time_batch(calibration *c, int32_t index, const int32_t *request_costs, int32_t count, double *us)
{
    char text[48];
    snprintf(text, sizeof text, "batch %" PRId32 " of %d", index + 1, NUM_BATCHES);
    cli_progress(text);
    const ekv_batch batch = batch_of(c, index);
    turns t = { .count = count };
    ekv_status status = cli_execution_set_batch(&c->execution, &batch);
    if (!status)
        status = time_turns(c, index, request_costs, &t, us);
    for (int32_t i = 0; i < count; i++) {
        if (t.jobs[i].plan)
            cli_job_free(&c->execution, &t.jobs[i]);
        ekv_plan_free(t.plans[i]);
    }
    free(t.times);
    return status;
}

static ekv_status measure(calibration *c)
{
    static const int32_t any_cost[] = { -1 }; /* equal requests are shared out the same at any */
    ekv_status status = EKV_OK;
    for (int32_t i = 0; i < NUM_EQUAL && !status; i++) {
        ekv_even_time *time = &c->times[i];
        time->requests = c->batches[i]->batches[0].batch_size;
        time->tokens = c->batches[i]->batches[0].total_tokens;
        status = time_batch(c, i, any_cost, 1, &time->us);
        if (!status && i % NUM_COUNTS == 0) {
            c->read_bytes[i / NUM_COUNTS] = c->execution.bytes;
            status = cli_read_time(&c->execution, cli_repeat(c->cli), &c->reads[i / NUM_COUNTS]);
        }
    }
    for (int32_t i = 0; i < NUM_MIXED && !status; i++)
        status = time_batch(c, NUM_EQUAL + i, costs, NUM_COSTS, c->mixed_us[i]);
    return status;
}

static void fit_reads(calibration *c)
{
    double mean_x = 0, mean_y = 0, xx = 0, xy = 0;
    for (int32_t i = 0; i < NUM_SIZES; i++) {
        mean_x += (double)c->read_bytes[i] / NUM_SIZES;
        mean_y += c->reads[i].us / NUM_SIZES;
    }
    for (int32_t i = 0; i < NUM_SIZES; i++) {
        const double x = (double)c->read_bytes[i] - mean_x;
        xx += x * x;
        xy += x * (c->reads[i].us - mean_y);
    }
    c->read_launch_us = mean_y - xy / xx * mean_x;
}

static void compare_costs(calibration *c)
{
    for (int32_t i = 0; i < NUM_COSTS; i++) {
        double logs = 0;
        for (int32_t m = 0; m < NUM_MIXED; m++) {
            double least = c->mixed_us[m][0];
            for (int32_t k = 1; k < NUM_COSTS; k++)
                least = fmin(least, c->mixed_us[m][k]);
            logs += log(c->mixed_us[m][i] / least);
        }
        c->relative[i] = exp(logs / NUM_MIXED);
        if (c->relative[i] < c->relative[c->best])
            c->best = i;
    }
}

/* ---- Output ------------------------------------------------------------------------------------------ */

static double gb_per_s(int64_t bytes, double us)
{
    return (double)bytes / us / 1e3;
}

/* Tokens of a head group, as --request-cost has it: of both costs a head group has the same share. */
static double request_tokens(const calibration *c)
{
    return c->cost.request_us / c->cost.token_us;
}

/* Tokens whose K and V have as many bytes as Q and O of a request. */
static double query_tokens(const ekv_batch *shape)
{
    const int64_t row = (int64_t)shape->head_dim * ekv_dtype_size(shape->q_dtype);
    return 2.0 * (double)(row * shape->q_heads) / (double)cli_kv_bytes_per_token(shape);
}

static void print_equal(calibration *c, cli_text *text)
{
    cli_print(text, "\nequal requests, a whole number of them a CTA and of pages a request: us\n%-14s", "requests");
    for (int32_t i = 0; i < NUM_COUNTS; i++)
        cli_print(text, " %8" PRId32, c->times[i].requests);
    cli_print(text, "\n");
    for (int32_t i = 0; i < NUM_EQUAL; i++)
        if (i % NUM_COUNTS) {
            cli_print(text, " %8.1f%s", c->times[i].us, i % NUM_COUNTS == NUM_COUNTS - 1 ? "\n" : "");
        } else {
            cli_print(text, "about %4.1f GiB %8.1f", (double)sizes[i / NUM_COUNTS] / (1 << 30), c->times[i].us);
        }
}

static void print_mixed(calibration *c, cli_text *text)
{
    cli_print(text, "\nus by --request-cost\n%-22s", "");
    for (int32_t i = 0; i < NUM_COSTS; i++)
        cli_print(text, " %8" PRId32, costs[i]);
    for (int32_t m = 0; m < NUM_MIXED; m++) {
        cli_print(text, "\n%s, %4" PRId32 " requests ", mixed[m].dist, mixed[m].requests);
        for (int32_t i = 0; i < NUM_COSTS; i++)
            cli_print(text, " %8.1f", c->mixed_us[m][i]);
    }
    cli_print(text, "\n%-22s", "over the least");
    for (int32_t i = 0; i < NUM_COSTS; i++)
        cli_print(text, " %8.4f", c->relative[i]);
    cli_print(text, "\n");
}

static void print_text(calibration *c)
{
    cli_text *text = &c->cli->out;
    const ekv_device *device = &c->workload.device;
    const ekv_batch *shape = &c->workload.shape;
    cli_print(text,
              "%s: even in %" PRId32
              " CTAs, %s, %d query and %d KV heads of %d, pages of %d; caches %s, medians of %d\n",
              device->name, c->num_ctas, c->kernel, shape->q_heads, shape->kv_heads, shape->head_dim, shape->page_size,
              c->execution.cold ? "flushed" : "as they are", cli_repeat(c->cli));
    print_equal(c, text);
    print_mixed(c, text);
    cli_print(text, "\ntime = launch + token x tokens + request x requests, for the equal ones within %.1f %%\n",
              100 * c->cost.worst);
    cli_print(text, "  a launch   %9.2f us; of a line through the plain reads, %.2f us\n", c->cost.launch_us,
              c->read_launch_us);
    cli_print(text, "  a token    %9.4f ns: %.0f GB/s\n", c->cost.token_us * 1e3,
              gb_per_s(cli_kv_bytes_per_token(shape), c->cost.token_us));
    cli_print(text, "  a request  %9.2f ns: as %.1f tokens; the bytes of its Q and O are those of %.1f\n",
              c->cost.request_us * 1e3, request_tokens(c), query_tokens(shape));
    cli_print(text, "unequal ones take the least time at --request-cost %" PRId32 "; the device's model says %d\n",
              costs[c->best], c->model_cost);
    for (int32_t i = 0; i < NUM_SIZES; i++)
        cli_print(text, "plain read of %10" PRId64 " bytes: %8.1f us, %.0f GB/s\n", c->read_bytes[i], c->reads[i].us,
                  gb_per_s(c->read_bytes[i], c->reads[i].us));
    cli_print(text, "the device's model says %.0f GB/s\n", device->read_gb_per_s);
}

static void print_json(calibration *c)
{
    const ekv_device *device = &c->workload.device;
    const ekv_batch *shape = &c->workload.shape;
    cJSON *object = json_object();
    json_string(object, "device", device->name);
    json_string(object, "kernel", c->kernel);
    json_shape(object, shape);
    json_string(object, "flush", c->execution.flush);
    json_int(object, "repeat", cli_repeat(c->cli));
    json_int(object, "ctas", c->num_ctas);
    json_real(object, "launch_us", c->cost.launch_us);
    json_real(object, "read_launch_us", c->read_launch_us);
    json_real(object, "token_us", c->cost.token_us);
    json_real(object, "request_us", c->cost.request_us);
    json_real(object, "request_tokens", request_tokens(c));
    json_real(object, "query_tokens", query_tokens(shape));
    json_real(object, "worst_residual", c->cost.worst);
    json_int(object, "best_request_cost", costs[c->best]);
    json_int(object, "device_request_cost", c->model_cost);
    json_real(object, "device_read_gb_per_s", device->read_gb_per_s);
    json_bool(object, "passed", c->passed);
    cJSON *equal = json_add_array(object, "equal_requests");
    for (int32_t i = 0; i < NUM_EQUAL; i++) {
        cJSON *entry = json_append_object(equal);
        json_int(entry, "requests", c->times[i].requests);
        json_int(entry, "tokens", c->times[i].tokens);
        json_real(entry, "median_us", c->times[i].us);
    }
    cJSON *reads = json_add_array(object, "plain_reads");
    for (int32_t i = 0; i < NUM_SIZES; i++) {
        cJSON *entry = json_append_object(reads);
        json_int(entry, "bytes", c->read_bytes[i]);
        json_real(entry, "median_us", c->reads[i].us);
        json_string(entry, "shape", c->reads[i].shape);
    }
    cJSON *balances = json_add_array(object, "request_costs");
    for (int32_t m = 0; m < NUM_MIXED; m++)
        for (int32_t i = 0; i < NUM_COSTS; i++) {
            cJSON *entry = json_append_object(balances);
            json_string(entry, "dist", mixed[m].dist);
            json_int(entry, "requests", mixed[m].requests);
            json_int(entry, "request_cost", costs[i]);
            json_real(entry, "median_us", c->mixed_us[m][i]);
        }
    json_print(&c->cli->out, object);
}

/* ---- The device with what was measured --------------------------------------------------------------- */

static bool is_measured(const void *argument, const char *line, size_t size)
{
    static const char *const keys[] = { "request_cost_tokens", "read_gb_per_s" };
    (void)argument;
    for (size_t i = 0; i < sizeof keys / sizeof keys[0]; i++) {
        const size_t length = strlen(keys[i]);
        if (size > length && !memcmp(line, keys[i], length) && (line[length] == ' ' || line[length] == '='))
            return true;
    }
    return false;
}

static ekv_status save(calibration *c)
{
    cli_text added = { 0 };
    char source[160];
    snprintf(source, sizeof source, "measured by evenkv calibrate, %d/%d heads of %d, %s", c->workload.shape.q_heads,
             c->workload.shape.kv_heads, c->workload.shape.head_dim, c->execution.cold ? "caches flushed" : "no flush");
    cli_print(&added, "%-21s = %-13" PRId32 " # %s\n", "request_cost_tokens", costs[c->best] * c->heads_per_tile,
              source);
    cli_print(&added, "%-21s = %-13.0f # %s: plain read of %" PRId64 " bytes\n", "read_gb_per_s",
              gb_per_s(c->read_bytes[1], c->reads[1].us), source, c->read_bytes[1]);
    ekv_status status = calibrate_save(c->cli, c->workload.device.name, is_measured, NULL, &added);
    free(added.data);
    return status;
}

/* ---- All of it --------------------------------------------------------------------------------------- */

static ekv_status check_options(cli_state *cli)
{
    const cli_options *options = &cli->options;
    const char *stray = options->kv_lens                      ? "--kv-lens"
                        : options->planner                    ? "--planner"
                        : options->residuals                  ? "--residuals"
                        : options->plot                       ? "--plot"
                        : options->fit                        ? "--fit"
                        : options->backend == EKV_BACKEND_CPU ? "--backend cpu"
                                                              : NULL;
    if (stray)
        return cli_usage(
            cli, ekv_fail(EKV_ERROR_INVALID_ARGUMENT, "%s: without --from calibrate measures even on a GPU", stray));
    if (options->plan.request_cost >= 0)
        return cli_usage(cli, ekv_fail(EKV_ERROR_INVALID_ARGUMENT, "calibrate tries every --request-cost itself"));
    if (!cli->context->cuda)
        return ekv_fail(EKV_ERROR_BACKEND_UNAVAILABLE,
                        "calibrate needs --from FILE, --device cpu, or a GPU to measure on: %s",
                        cli->context->cuda_missing);
    return EKV_OK;
}

static ekv_status calibrate(calibration *c)
{
    cli_state *cli = c->cli;
    cli_limits limits = { .with_reference = !cli->options.no_check };
    ekv_status status;
    cli->options.backend = EKV_BACKEND_CUDA;
    if ((status = cli_backend_choose(cli)) || (status = cli_shape_read(cli, &c->workload.shape)) ||
        (status = cli_device_read(cli, NULL, &c->workload.device)) || (status = look_at_plan(c)) ||
        (status = make_batches(c)))
        return status;
    for (int32_t i = 0; i < NUM_BATCHES; i++) {
        const ekv_batch batch = batch_of(c, i);
        cli_limits_add(&limits, &batch);
    }
    if ((status = cli_execution_create(cli, &c->workload.shape, limits, &c->execution)) || (status = measure(c)) ||
        (status = ekv_even_cost_fit(c->times, NUM_EQUAL, &c->cost)))
        return status;
    fit_reads(c);
    compare_costs(c);
    if (cli->options.json)
        print_json(c);
    else
        print_text(c);
    return cli->options.save ? save(c) : EKV_OK;
}

ekv_status calibrate_gpu_run(cli_state *cli)
{
    calibration c = { .cli = cli, .passed = true };
    ekv_status status = check_options(cli);
    if (!status)
        status = calibrate(&c);
    cli_execution_free(&c.execution);
    for (int32_t i = 0; i < NUM_BATCHES; i++)
        ekv_lengths_free(c.batches[i]);
    cli_workload_free(&c.workload);
    return status;
}
