/* SPDX-License-Identifier: Apache-2.0 */
#include "read_probe.h"

#include "base/context.h"
#include "base/status.h"
#include "execution.h"
#include "json.h"

#include <string.h>

enum { REQUESTS = 8, TOKENS = 16384, Q_HEADS = 32, KV_HEADS = 4, HEAD_DIM = 128, MAX_PROBES = 2 };

typedef struct probe {
    int32_t threads;
    double us, gb_per_s;
    char shape[64];
} probe;

typedef struct probes {
    int32_t count;
    probe items[MAX_PROBES];
    int64_t bytes;
    char flush[32];
} probes;

static ekv_status read_with(cli_state *cli, probes *all)
{
    int32_t kv_len[REQUESTS];
    for (int32_t b = 0; b < REQUESTS; b++)
        kv_len[b] = TOKENS;
    ekv_batch batch = EKV_BATCH_INIT;
    batch.batch_size = REQUESTS;
    batch.kv_len = kv_len;
    batch.q_heads = Q_HEADS;
    batch.kv_heads = KV_HEADS;
    batch.head_dim = HEAD_DIM;
    cli_limits limits = { 0 };
    cli_execution execution = { 0 };
    cli_read read;
    cli_limits_add(&limits, &batch);
    ekv_status status;
    if (!(status = cli_execution_create(cli, &batch, limits, &execution)) &&
        !(status = cli_execution_set_batch(&execution, &batch)) &&
        !(status = cli_read_time(&execution, cli_repeat(cli), &read))) {
        probe *p = &all->items[all->count++];
        *p = (probe){ .threads = ekv_pool_num_threads(cli->context->pool),
                      .us = read.us,
                      .gb_per_s = (double)execution.bytes / read.us / 1e3 };
        memcpy(p->shape, read.shape, sizeof p->shape);
        all->bytes = execution.bytes;
        memcpy(all->flush, execution.flush, sizeof all->flush);
    }
    cli_execution_free(&execution);
    return status;
}

/* The command as it is, with a context of one thread. */
static ekv_status read_with_one(const cli_state *cli, probes *all)
{
    cli_state one = *cli;
    ekv_context_options options = EKV_CONTEXT_OPTIONS_INIT;
    options.num_threads = 1;
    ekv_status status = ekv_context_create_host(&options, &one.context);
    if (status)
        return status;
    status = read_with(&one, all);
    ekv_context_free(one.context);
    return status;
}

static void print_text(cli_text *text, const probes *all)
{
    cli_print(text, "plain read of %.1f MB on this CPU (flush: %s)\n%7s %8s  %s\n", (double)all->bytes / 1e6,
              all->flush, "threads", "GB/s", "fastest way");
    for (int32_t i = 0; i < all->count; i++)
        cli_print(text, "%7d %8.1f  %s\n", all->items[i].threads, all->items[i].gb_per_s, all->items[i].shape);
}

static void print_json(cli_text *text, const probes *all)
{
    cJSON *object = json_object();
    json_string(object, "device", "cpu");
    json_int(object, "read_bytes", all->bytes);
    json_string(object, "flush", all->flush);
    cJSON *reads = json_add_array(object, "reads");
    for (int32_t i = 0; i < all->count; i++) {
        cJSON *entry = json_append_object(reads);
        json_int(entry, "threads", all->items[i].threads);
        json_real(entry, "read_us", all->items[i].us);
        json_real(entry, "gb_per_s", all->items[i].gb_per_s);
        json_string(entry, "shape", all->items[i].shape);
    }
    json_print(text, object);
}

ekv_status cli_read_probe(cli_state *cli)
{
    probes all = { 0 };
    cli->options.backend = EKV_BACKEND_CPU;
    cli_progress("reading on one thread");
    ekv_status status = read_with_one(cli, &all);
    if (!status && ekv_pool_num_threads(cli->context->pool) > 1) {
        cli_progress("reading on all threads");
        status = read_with(cli, &all);
    }
    if (status)
        return status;
    if (cli->options.json)
        print_json(&cli->out, &all);
    else
        print_text(&cli->out, &all);
    return EKV_OK;
}
