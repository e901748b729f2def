/* SPDX-License-Identifier: Apache-2.0
 * evenkv explain: which kernel a serving engine would run on a batch, where each system stops splitting, which
 * request everybody waits for, and what even does instead. */
#include "json.h"
#include "sim_view.h"
#include "systems.h"
#include "workload.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* A planner's plan of the batch; plan is NULL where it was refused. */
typedef struct planner_entry {
    const char *planner;
    const char *path; /* SGLang's, or NULL */
    ekv_plan *plan;
    ekv_plan_info info;
    cli_threshold threshold;
    cli_text kernels;
    char refusal[512];
    bool simulated;
    ekv_timeline_info predicted; /* where simulated, else: */
    char no_prediction[256];     /* why not */
} planner_entry;

typedef struct explanation {
    const cli_workload *workload;
    int64_t index;
    ekv_batch batch;
    int32_t tail; /* the longest request */
    cli_sglang sglang;
    int32_t num_entries;
    planner_entry entries[CLI_MAX_PLANNERS];
    const planner_entry *even;
} explanation;

/* ---- Facts ------------------------------------------------------------------------------------------- */

/* A device without constants of the system is worth to be told, not to end here. */
static ekv_status predict(planner_entry *entry)
{
    ekv_timeline *timeline = NULL;
    ekv_status status = ekv_simulate(entry->plan, NULL, NULL, &timeline);
    if (status == EKV_ERROR_UNSUPPORTED) {
        snprintf(entry->no_prediction, sizeof entry->no_prediction, "%s", ekv_last_error());
        return EKV_OK;
    }
    entry->predicted = (ekv_timeline_info)EKV_TIMELINE_INFO_INIT;
    if (!status)
        status = ekv_timeline_info_get(timeline, &entry->predicted);
    ekv_timeline_free(timeline);
    entry->simulated = !status;
    return status;
}

static ekv_status read_entry(cli_state *cli, const explanation *e, planner_entry *entry)
{
    ekv_status status = ekv_plan_create(cli->context, entry->planner, &e->batch, &e->workload->device,
                                        &cli->options.plan, &entry->plan);
    if (status == EKV_ERROR_UNSUPPORTED || status == EKV_ERROR_OVERFLOW) { /* worth to be told, not to end here */
        snprintf(entry->refusal, sizeof entry->refusal, "%s", ekv_last_error());
        return EKV_OK;
    }
    if (status)
        return cli_plan_status(cli, status);
    entry->info = (ekv_plan_info)EKV_PLAN_INFO_INIT;
    if ((status = ekv_plan_info_get(entry->plan, &entry->info)))
        return status;
    entry->path = cli_sglang_path(&e->sglang, entry->planner);
    entry->threshold = cli_threshold_of(entry->plan);
    cli_kernels(entry->plan, &entry->kernels);
    cli_append(&entry->kernels, "", 1);
    return predict(entry);
}

static ekv_status read_explanation(cli_state *cli, explanation *e)
{
    e->tail = cli_longest_request(&e->batch);
    e->sglang = cli_sglang_choose(&e->workload->device, e->batch.kv_dtype, e->batch.q_heads / e->batch.kv_heads);
    const char *name;
    for (int32_t i = 0; (name = ekv_planner_name(i)); i++) {
        planner_entry *entry = &e->entries[e->num_entries++];
        entry->planner = name;
        ekv_status status = read_entry(cli, e, entry);
        if (status)
            return status;
        if (!strcmp(name, "even"))
            e->even = entry;
    }
    return EKV_OK;
}

static void free_explanation(explanation *e)
{
    for (int32_t i = 0; i < e->num_entries; i++) {
        ekv_plan_free(e->entries[i].plan);
        free(e->entries[i].kernels.data);
    }
}

static const planner_entry *find_entry(const explanation *e, const char *planner)
{
    for (int32_t i = 0; planner && i < e->num_entries; i++)
        if (!strcmp(e->entries[i].planner, planner))
            return &e->entries[i];
    return NULL;
}

static int64_t num_slots(const planner_entry *entry)
{
    return (int64_t)entry->plan->num_sms * entry->plan->resident_ctas;
}

/* How many times as long as under even the busiest slot has work, each against its own mean. */
static double against_even(const explanation *e, const planner_entry *entry)
{
    return entry->info.imbalance / e->even->info.imbalance;
}

/* Left whole the longest request keeps its slot clearly longer (5 %) than the mean, and it is long enough to be cut. */
static bool tail_stands_out(const explanation *e)
{
    const int32_t tail = e->batch.kv_len[e->tail];
    return e->even->plan && tail > 1.05 * e->even->info.mean_cta_tokens && tail > e->even->plan->block_tokens;
}

/* ---- Text -------------------------------------------------------------------------------------------- */

static void print_tail(cli_text *text, const explanation *e)
{
    const int64_t total = e->workload->lengths->batches[e->index].total_tokens;
    const int32_t tail = e->batch.kv_len[e->tail];
    cli_print(text, "\nThe tail\n");
    if (!total) {
        cli_wrap(text, 2, "No request has KV tokens.");
        return;
    }
    cli_wrapf(text, 2, "Request %d has %d of the batch's %" PRId64 " KV tokens, %.1f %%.", e->tail, tail, total,
              100.0 * tail / (double)total);
    if (!e->even->plan)
        return;
    const double mean = e->even->info.mean_cta_tokens;
    if (tail_stands_out(e))
        cli_wrapf(text, 2,
                  "Left whole it keeps one CTA per KV head busy for %d tokens, while the mean over the %" PRId64
                  " slots (%d SMs x %d CTAs) is %.1f: %.1f times as much. Everybody waits for it unless it is split.",
                  tail, num_slots(e->even), e->even->plan->num_sms, e->even->plan->resident_ctas, mean, tail / mean);
    else if (tail <= e->even->plan->block_tokens)
        cli_wrapf(
            text, 2,
            "It is the longest, but no longer than a block of %d tokens, which is never cut, so it makes no tail.",
            e->even->plan->block_tokens);
    else
        cli_wrapf(text, 2,
                  "It is the longest, but even whole it has only %.2f times the mean of %.1f tokens per slot, so it "
                  "makes no tail.",
                  tail / mean, mean);
}

static void print_path(cli_text *text, const explanation *e, const planner_entry *entry, const char *start)
{
    const int32_t group = e->batch.q_heads / e->batch.kv_heads;
    if (!entry->plan) {
        cli_wrapf(text, 2, "%s; it is not planned here: %s.", start, entry->refusal);
        return;
    }
    cli_wrapf(text, 2, "%s. A profiler shows %s.", start, entry->kernels.data);
    if (!strcmp(entry->planner, "flashinfer-tensor-core"))
        cli_wrapf(text, 2,
                  "That a decode shows a prefill kernel is no mistake: FlashInfer decodes on tensor cores by its "
                  "prefill kernel with a query length of %d, where the %d query head%s of a KV head %s the rows of a "
                  "tile of %d.",
                  e->batch.q_len, group, group > 1 ? "s" : "", group > 1 ? "are" : "is", entry->plan->padded_rows);
}

static void print_kernels(cli_text *text, const explanation *e)
{
    const cli_sglang *sglang = &e->sglang;
    const planner_entry *chosen = find_entry(e, sglang->default_planner);
    const planner_entry *other = find_entry(e, sglang->flashinfer_planner);
    char start[512];
    cli_print(text, "\nThe kernel that runs\n");
    if (chosen && chosen != other) {
        snprintf(start, sizeof start, "SGLang on %s takes attention backend %s (planner %s): %s",
                 e->workload->device.name, sglang->default_backend, chosen->planner, sglang->default_reason);
        print_path(text, e, chosen, start);
    } else if (chosen) {
        snprintf(start, sizeof start,
                 "SGLang on %s takes attention backend %s: %s. Of FlashInfer's two paths it takes %s: %s",
                 e->workload->device.name, sglang->default_backend, sglang->default_reason, chosen->planner,
                 sglang->flashinfer_reason);
        print_path(text, e, chosen, start);
    } else {
        cli_wrapf(text, 2, "SGLang on %s: %s%s%s.", e->workload->device.name, sglang->default_reason,
                  sglang->default_backend ? "; it takes " : "", sglang->default_backend ? sglang->default_backend : "");
    }
    if (other && other != chosen) {
        snprintf(start, sizeof start, "With --attention-backend flashinfer it takes %s: %s", other->planner,
                 sglang->flashinfer_reason);
        print_path(text, e, other, start);
    }
}

static void print_threshold(cli_text *text, const explanation *e, const planner_entry *entry)
{
    const cli_threshold *t = &entry->threshold;
    if (t->batch <= 0) {
        cli_wrapf(text, 4, "Always, since %s: %s.", t->rule, t->effect);
        return;
    }
    cli_wrapf(text, 4, "%s %" PRId64 " request%s (%s): %s. This batch of %d is %s it.", t->inclusive ? "From" : "Above",
              t->batch, t->batch > 1 ? "s" : "", t->rule, t->effect, e->batch.batch_size,
              t->reached ? "past" : "short of");
}

static void print_thresholds(cli_text *text, const explanation *e)
{
    cli_print(text, "\nWhere each system stops splitting\n");
    for (int32_t i = 0; i < e->num_entries; i++) {
        const planner_entry *entry = &e->entries[i];
        if (entry->plan && entry->threshold.batch < 0)
            continue;
        const bool other_system = strcmp(entry->planner, "none") != 0;
        cli_print(text, "  %s", entry->planner);
        if (!entry->plan)
            cli_print(text, " (refused)\n");
        else if (entry->path)
            cli_print(text, " (SGLang: %s)\n", entry->path);
        else if (other_system)
            cli_print(text, " (a path not taken by SGLang for this batch)\n");
        else
            cli_print(text, "\n");
        if (entry->plan)
            print_threshold(text, e, entry);
        else
            cli_wrap(text, 4, entry->refusal);
    }
}

static void print_balance(cli_text *text, const explanation *e)
{
    cli_print(text, "\nThe busiest slot\n");
    cli_print(text, "  %-27s %6s %10s %11s %9s %8s %11s\n", "planner", "slots", "busiest", "mean", "imbalance",
              "x even", "tail splits");
    for (int32_t i = 0; i < e->num_entries; i++) {
        const planner_entry *entry = &e->entries[i];
        if (!entry->plan)
            continue;
        cli_print(text, "  %-27s %6" PRId64 " %10" PRId64 " %11.1f %9.3f ", entry->planner, num_slots(entry),
                  entry->info.max_cta_tokens, entry->info.mean_cta_tokens, entry->info.imbalance);
        if (e->even->plan)
            cli_print(text, "%8.2f", against_even(e, entry));
        else
            cli_print(text, "%8s", "-");
        cli_print(text, " %11d\n", entry->info.num_splits[e->tail]);
    }
    cli_wrap(text, 2,
             "A slot is room for one CTA (SMs x resident CTAs), its load in tokens of one head. Planners count on "
             "different numbers of slots, so `x even` compares imbalances (busiest / mean). Tokens are not times: a "
             "kernel has fixed costs and a rate of its own.");
}

static void print_predictions(cli_text *text, const explanation *e)
{
    const ekv_device *device = &e->workload->device;
    const planner_entry *even = e->even;
    cli_print(text, "\nPredicted times%s\n", device->projected ? " (projected: nobody measured on this device)" : "");
    for (int32_t i = 0; i < e->num_entries; i++) {
        const planner_entry *entry = &e->entries[i];
        if (!entry->plan)
            continue;
        cli_print(text, "  %-27s ", entry->planner);
        if (!entry->simulated) {
            cli_print(text, "-  %s\n", entry->no_prediction);
            continue;
        }
        cli_print(text, "%10.1f us", entry->predicted.time_us);
        if (even->simulated)
            cli_print(text, " %8.2f x even", entry->predicted.time_us / even->predicted.time_us);
        cli_print(text, "%s%s\n", entry->predicted.tail_cause ? "  " : "", cli_tail_name(entry->predicted.tail_cause));
    }
    cli_wrap(text, 2,
             "Simulated with the constants of each system's own kernels; `evenkv simulate` shows more, "
             "docs/simulator.md how far they are from measurements.");
}

static void print_even(cli_text *text, const explanation *e)
{
    cli_print(text, "\nWhat even does instead\n");
    if (!e->even->plan) {
        cli_wrapf(text, 2, "It cannot take this batch: %s.", e->even->refusal);
        return;
    }
    const ekv_plan *plan = e->even->plan;
    const ekv_plan_info *info = &e->even->info;
    cli_wrapf(text, 2,
              "It lays the requests end to end and gives each of %" PRId64 " CTAs the same share of the line, in "
              "tokens plus %d per request, whatever the number of requests; there is no threshold. Cuts fall on "
              "multiples of %d tokens.",
              info->num_ctas, plan->request_cost, plan->block_tokens);
    const int32_t splits = info->num_splits[e->tail];
    if (splits > 1)
        cli_wrapf(text, 2,
                  "Request %d is split over %d CTAs; the busiest slot has %" PRId64 " tokens, %.3f times the mean.",
                  e->tail, splits, info->max_cta_tokens, info->imbalance);
    else
        cli_wrapf(text, 2, "Request %d stays whole; the busiest slot has %" PRId64 " tokens, %.3f times the mean.",
                  e->tail, info->max_cta_tokens, info->imbalance);
}

/* ---- JSON -------------------------------------------------------------------------------------------- */

/* The names of cli_kernels, as an array. */
static void print_json_kernels(cJSON *object, const planner_entry *entry)
{
    cJSON *array = json_add_array(object, "kernels");
    for (const char *name = entry->kernels.data; name && *name;) {
        char one[96];
        const size_t size = strcspn(name, ",");
        snprintf(one, sizeof one, "%.*s", (int)size, name);
        cJSON_AddItemToArray(array, cJSON_CreateString(one));
        name += size;
        name += strspn(name, ", ");
    }
}

static void print_json_threshold(cJSON *object, const planner_entry *entry)
{
    const cli_threshold *t = &entry->threshold;
    if (t->batch < 0) {
        cJSON_AddNullToObject(object, "threshold");
        return;
    }
    cJSON *threshold = json_add_object(object, "threshold");
    json_int(threshold, "batch", t->batch);
    json_string(threshold, "condition", t->inclusive ? ">=" : ">");
    json_bool(threshold, "reached", t->reached);
    json_string(threshold, "rule", t->rule);
    json_string(threshold, "effect", t->effect);
}

static void print_json_entry(cJSON *array, const explanation *e, const planner_entry *entry)
{
    cJSON *object = json_append_object(array);
    json_string(object, "planner", entry->planner);
    json_string(object, "refused", entry->plan ? NULL : entry->refusal);
    json_string(object, "sglang_path", entry->path);
    if (!entry->plan)
        return;
    print_json_kernels(object, entry);
    print_json_threshold(object, entry);
    json_int(object, "slots", num_slots(entry));
    json_int(object, "max_cta_tokens", entry->info.max_cta_tokens);
    json_real(object, "mean_cta_tokens", entry->info.mean_cta_tokens);
    json_real(object, "imbalance", entry->info.imbalance);
    json_real_or_null(object, "against_even", e->even->plan ? against_even(e, entry) : 0, !e->even->plan);
    json_int(object, "tail_num_splits", entry->info.num_splits[e->tail]);
    json_real_or_null(object, "predicted_us", entry->predicted.time_us, !entry->simulated);
    json_string(object, "predicted_system", entry->simulated ? entry->predicted.system : NULL);
    json_string(object, "predicted_tail",
                entry->simulated && entry->predicted.tail_cause ? cli_tail_name(entry->predicted.tail_cause) : NULL);
    json_bool(object, "projected", e->workload->device.projected);
}

static void print_json(cli_text *text, const explanation *e)
{
    const int64_t total = e->workload->lengths->batches[e->index].total_tokens;
    cJSON *object = json_object();
    json_string(object, "device", e->workload->device.name);
    json_int(object, "batch", e->batch.batch_size);
    json_int(object, "total_tokens", total);
    json_shape(object, &e->batch);
    cJSON *tail = json_add_object(object, "tail");
    json_int(tail, "request", e->tail);
    json_int(tail, "kv_len", e->batch.kv_len[e->tail]);
    json_real(tail, "share", total ? (double)e->batch.kv_len[e->tail] / (double)total : 0);
    json_bool(tail, "stands_out", tail_stands_out(e));
    cJSON *sglang = json_add_object(object, "sglang");
    json_string(sglang, "attention_backend", e->sglang.default_backend);
    json_string(sglang, "planner", e->sglang.default_planner);
    json_string(sglang, "reason", e->sglang.default_reason);
    json_string(sglang, "flashinfer_planner", e->sglang.flashinfer_planner);
    json_string(sglang, "flashinfer_reason", e->sglang.flashinfer_planner ? e->sglang.flashinfer_reason : NULL);
    cJSON *planners = json_add_array(object, "planners");
    for (int32_t i = 0; i < e->num_entries; i++)
        print_json_entry(planners, e, &e->entries[i]);
    json_print(text, object);
}

/* ---- The command ------------------------------------------------------------------------------------- */

static void print_explanation(cli_state *cli, const explanation *e)
{
    cli_text *text = &cli->out;
    if (cli->options.json) {
        print_json(text, e);
        return;
    }
    cli_print(text, e->index ? "\n" : "");
    cli_print_batch(text, e->workload, e->index);
    cli_print_device(text, &e->workload->device);
    print_tail(text, e);
    print_kernels(text, e);
    print_thresholds(text, e);
    print_balance(text, e);
    print_predictions(text, e);
    print_even(text, e);
}

static ekv_status explain_run(cli_state *cli)
{
    cli_workload workload = { 0 };
    ekv_status status = cli_workload_read(cli, "h200", &workload);
    for (int64_t i = 0; !status && i < workload.lengths->count; i++) {
        explanation e = { .workload = &workload, .index = i, .batch = cli_workload_batch(&workload, i) };
        status = read_explanation(cli, &e);
        if (!status)
            print_explanation(cli, &e);
        free_explanation(&e);
    }
    cli_workload_free(&workload);
    return status;
}

const cli_command cli_command_explain = {
    .name = "explain",
    .summary = "say in words which kernel runs a batch, and who waits for whom",
    .details = "Names the request that makes the tail; the path that SGLang takes for these heads and this dtype, why, "
               "and the kernels that a profiler then shows; the batch size from which each system stops splitting "
               "requests, on which side of it the batch lies, and whether SGLang takes that path at all; the busiest "
               "slot's tokens under every planner; the times that a simulation predicts; and what even does instead.\n",
    .groups = CLI_BATCH | CLI_PLANNING | CLI_DEVICE | CLI_JSON | CLI_OUTPUT,
    .planners = "all",
    .run = explain_run,
};
