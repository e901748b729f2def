/* SPDX-License-Identifier: Apache-2.0 */
#include "workload.h"

#include "base/half.h"
#include "base/number.h"
#include "base/status.h"
#include "models.h"
#include "trace/replay.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

/* ---- Device ------------------------------------------------------------------------------------------ */

static bool is_built_in(const char *name)
{
    return ekv_device_text(name) != NULL;
}

ekv_status cli_device_read(cli_state *cli, const char *default_name, ekv_device *device)
{
    enum { LIMIT = 64 << 10 }; /* a device file has a dozen lines */
    const char *name = cli->options.device ? cli->options.device : default_name;
    *device = (ekv_device)EKV_DEVICE_INIT;
    if (!name)
        return ekv_device_detect(cli->context, device);
    struct stat info;
    if (is_built_in(name) || (!strpbrk(name, "/.") && stat(name, &info))) { /* no model and no file: names the models */
        ekv_status status = ekv_device_find(name, device);
        return status == EKV_ERROR_NOT_FOUND ? cli_usage(cli, status) : status;
    }
    char *text;
    size_t size;
    ekv_status status = cli_read_file(name, LIMIT, &text, &size);
    if (status)
        return status;
    status = ekv_device_parse(text, size, name, device);
    free(text);
    return status;
}

/* ---- Shape ------------------------------------------------------------------------------------------- */

static ekv_status bad_shape(cli_state *cli, const char *what, int32_t value, const char *than, int32_t divisor)
{
    return cli_usage(
        cli, ekv_fail(EKV_ERROR_INVALID_ARGUMENT, "%s %d is not a multiple of %s %d", what, value, than, divisor));
}

/* What one of tp ranks has: query heads are divided; so are KV heads, or each is replicated on several ranks. */
static ekv_status divide_heads(cli_state *cli, int32_t tp, ekv_batch *shape)
{
    if (shape->q_heads % tp)
        return bad_shape(cli, "q_heads", shape->q_heads, "--tp", tp);
    if (shape->kv_heads >= tp && shape->kv_heads % tp)
        return bad_shape(cli, "kv_heads", shape->kv_heads, "--tp", tp);
    if (shape->kv_heads < tp && tp % shape->kv_heads)
        return bad_shape(cli, "--tp", tp, "kv_heads", shape->kv_heads);
    shape->q_heads /= tp;
    shape->kv_heads = shape->kv_heads >= tp ? shape->kv_heads / tp : 1;
    return EKV_OK;
}

ekv_status cli_shape_read(cli_state *cli, ekv_batch *shape)
{
    const cli_options *options = &cli->options;
    const char *name = options->model ? options->model : "qwen3-30b-a3b";
    const cli_model *model = cli_model_find(name);
    if (!model) {
        char quoted[EKV_QUOTE_SIZE];
        return cli_usage(cli, ekv_fail(EKV_ERROR_NOT_FOUND, "no model is called '%s'; `evenkv plan --help` lists them",
                                       ekv_quote(name, strlen(name), quoted)));
    }
    *shape = (ekv_batch)EKV_BATCH_INIT;
    shape->q_heads = options->q_heads ? options->q_heads : model->q_heads;
    shape->kv_heads = options->kv_heads ? options->kv_heads : model->kv_heads;
    shape->head_dim = options->head_dim ? options->head_dim : model->head_dim;
    shape->page_size = options->page_size;
    shape->q_len = options->q_len;
    shape->kv_dtype = (ekv_dtype)options->dtype;
    shape->q_dtype = ekv_dtype_size(shape->kv_dtype) == 1 ? EKV_DTYPE_BF16 : shape->kv_dtype;
    shape->layout = (ekv_layout)options->layout;
    if (shape->q_heads % shape->kv_heads)
        return bad_shape(cli, "q_heads", shape->q_heads, "kv_heads", shape->kv_heads);
    return divide_heads(cli, options->tp, shape);
}

/* ---- Lengths ----------------------------------------------------------------------------------------- */

ekv_status cli_trace_read(cli_state *cli, ekv_lengths_list **lengths)
{
    const cli_options *options = &cli->options;
    ekv_replay_options replay = EKV_REPLAY_OPTIONS_INIT;
    replay.speedup = options->speedup;
    replay.step_seconds = options->step_ms / 1e3;
    replay.max_batch = options->max_batch;
    replay.token_budget = options->token_budget;
    return ekv_lengths_from_trace(cli->context, options->trace, (ekv_trace_format)options->trace_format, &replay,
                                  options->sample ? options->sample : 1, (uint64_t)options->seed, lengths);
}

static ekv_status read_dist(cli_state *cli, ekv_lengths_list **lengths)
{
    const cli_options *options = &cli->options;
    if (!options->batch || !options->tokens)
        return cli_usage(cli, ekv_fail(EKV_ERROR_INVALID_ARGUMENT, "%s needs %s too",
                                       cli_options_given(options, CLI_DIST), options->batch ? "--tokens" : "--batch"));
    return cli_usage(cli, ekv_lengths_from_dist(cli->context, options->dist ? options->dist : "uniform", options->batch,
                                                options->tokens, (ekv_hot)options->hot, lengths));
}

/* An option of --trace without it, or NULL.  --seed comes last in its group and is also that of tensors. */
static const char *stray_trace_option(const cli_state *cli)
{
    const char *given = cli->options.trace ? NULL : cli_options_given(&cli->options, CLI_TRACE);
    const bool draws_tensors = cli->command->groups & CLI_EXECUTION;
    return given && draws_tensors && !strcmp(given, "--seed") ? NULL : given;
}

ekv_status cli_kv_lens_read(cli_state *cli, ekv_lengths_list **lengths)
{
    const char *kv_lens = cli->options.kv_lens;
    if (kv_lens[0] != '@')
        return cli_usage(cli, ekv_lengths_from_text(cli->context, kv_lens, lengths));
    if (!kv_lens[1])
        return cli_usage(cli, ekv_fail(EKV_ERROR_INVALID_ARGUMENT, "--kv-lens @ needs the name of a file after the @"));
    return ekv_lengths_from_file(cli->context, kv_lens + 1, lengths);
}

/* Lengths come from one source: names two options of different ones, or all sources where there is none. */
static ekv_status check_source(cli_state *cli)
{
    const cli_options *options = &cli->options;
    const char *made = cli_options_given(options, CLI_DIST);
    if ((options->kv_lens != NULL) + (made != NULL) + (options->trace != NULL) > 1)
        return cli_usage(cli, ekv_fail(EKV_ERROR_INVALID_ARGUMENT, "%s does not go with %s", made ? made : "--trace",
                                       options->kv_lens ? "--kv-lens" : "--trace"));
    if (!options->kv_lens && !made && !options->trace)
        return cli_usage(cli, ekv_fail(EKV_ERROR_INVALID_ARGUMENT,
                                       "%s needs lengths from one of --kv-lens, --batch with --tokens, --trace",
                                       cli->command->name));
    return EKV_OK;
}

static ekv_status read_lengths(cli_state *cli, ekv_lengths_list **lengths)
{
    const cli_options *options = &cli->options;
    ekv_status status = check_source(cli);
    if (status)
        return status;
    if (stray_trace_option(cli))
        return cli_usage(cli,
                         ekv_fail(EKV_ERROR_INVALID_ARGUMENT, "%s goes with --trace only", stray_trace_option(cli)));
    if (options->trace)
        return cli_trace_read(cli, lengths);
    return options->kv_lens ? cli_kv_lens_read(cli, lengths) : read_dist(cli, lengths);
}

/* ---- Planners ---------------------------------------------------------------------------------------- */

static ekv_status unknown_planner(const char *name, size_t size)
{
    cli_text names = { 0 };
    const char *known;
    for (int32_t i = 0; (known = ekv_planner_name(i)); i++)
        cli_print(&names, "%s, ", known);
    char quoted[EKV_QUOTE_SIZE];
    ekv_status status = ekv_fail(EKV_ERROR_NOT_FOUND, "no planner is called '%s'; there are %.*sand all",
                                 ekv_quote(name, size, quoted), (int)names.size, names.data);
    free(names.data);
    return status;
}

static ekv_status add_planner(cli_workload *workload, const char *name, size_t size)
{
    const char *known;
    for (int32_t i = 0; (known = ekv_planner_name(i)); i++)
        if (strlen(known) == size && !memcmp(known, name, size))
            break;
    if (!known)
        return unknown_planner(name, size);
    for (int32_t i = 0; i < workload->num_planners; i++)
        if (workload->planners[i] == known)
            return ekv_fail(EKV_ERROR_INVALID_ARGUMENT, "planner %s is named twice", known);
    workload->planners[workload->num_planners++] = known;
    return EKV_OK;
}

ekv_status cli_planners_read(cli_state *cli, cli_workload *workload)
{
    const char *names = cli->options.planner ? cli->options.planner : cli->command->planners;
    workload->all_planners = !strcmp(names, "all");
    if (workload->all_planners) {
        const char *known;
        for (int32_t i = 0; (known = ekv_planner_name(i)); i++)
            workload->planners[workload->num_planners++] = known;
        return EKV_OK;
    }
    for (const char *name = names;; name++) {
        const size_t size = strcspn(name, ",");
        ekv_status status = add_planner(workload, name, size);
        if (status)
            return cli_usage(cli, status);
        name += size;
        if (!*name)
            return EKV_OK;
    }
}

bool cli_skip_planner(const cli_workload *workload, const char *planner, ekv_status status)
{
    if (!workload->all_planners || (status != EKV_ERROR_UNSUPPORTED && status != EKV_ERROR_OVERFLOW))
        return false;
    cli_progress(NULL);
    fprintf(stderr, "evenkv: %s left out: %s (%s)\n", planner, ekv_last_error(), ekv_status_name(status));
    return true;
}

/* ---- All of it --------------------------------------------------------------------------------------- */

ekv_status cli_workload_read(cli_state *cli, const char *default_device, cli_workload *workload)
{
    ekv_status status;
    if ((status = cli_shape_read(cli, &workload->shape)) || (status = cli_planners_read(cli, workload)) ||
        (status = cli_device_read(cli, default_device, &workload->device)))
        return status;
    return read_lengths(cli, &workload->lengths);
}

void cli_workload_free(cli_workload *workload)
{
    ekv_lengths_free(workload->lengths);
}

ekv_batch cli_workload_batch(const cli_workload *workload, int64_t index)
{
    ekv_batch batch = workload->shape;
    batch.batch_size = workload->lengths->batches[index].batch_size;
    batch.kv_len = workload->lengths->batches[index].kv_len;
    return batch;
}

/* ---- Texts ------------------------------------------------------------------------------------------- */

int32_t cli_longest_request(const ekv_batch *batch)
{
    int32_t longest = 0;
    for (int32_t b = 1; b < batch->batch_size; b++)
        if (batch->kv_len[b] > batch->kv_len[longest])
            longest = b;
    return longest;
}

int64_t cli_kv_bytes_per_token(const ekv_batch *batch)
{
    return (int64_t)2 * batch->kv_heads * batch->head_dim * ekv_dtype_size(batch->kv_dtype);
}

void cli_print_batch(cli_text *text, const cli_workload *workload, int64_t index)
{
    const ekv_lengths *lengths = &workload->lengths->batches[index];
    const ekv_batch batch = cli_workload_batch(workload, index);
    const int32_t longest = batch.kv_len[cli_longest_request(&batch)];
    const double mean = (double)lengths->total_tokens / batch.batch_size;
    cli_print(text, "batch");
    if (workload->lengths->count > 1)
        cli_print(text, " %" PRId64, index + 1);
    cli_print(text, ": %d request%s, %" PRId64 " KV tokens, longest %d (%.1f x the mean of %.1f)\n", batch.batch_size,
              batch.batch_size > 1 ? "s" : "", lengths->total_tokens, longest, mean > 0 ? longest / mean : 1.0, mean);
    cli_print(text, "shape: %d query and %d KV heads of %d, %s, page size %d", batch.q_heads, batch.kv_heads,
              batch.head_dim, cli_dtype_name(batch.kv_dtype), batch.page_size);
    if (batch.q_len > 1)
        cli_print(text, ", %d query tokens per request", batch.q_len);
    cli_print(text, "; %.1f MB of K and V\n",
              (double)cli_kv_bytes_per_token(&batch) * (double)lengths->total_tokens / 1e6);
}

void cli_print_device(cli_text *text, const ekv_device *device)
{
    cli_print(text, "device: %s, %d %s\n", device->name, device->num_sms, device->sm_arch ? "SMs" : "threads");
}
