/* SPDX-License-Identifier: Apache-2.0
 * Execution on the threads of the context. */
#include "base/context.h"
#include "base/half.h"
#include "base/portable.h"
#include "base/status.h"
#include "cpu/random_cache.h"
#include "cpu/tile_kernel.h"
#include "execution.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum {
    WORKSPACE_ALIGN = 256, /* ekv_workspace_size asks for it */
    SMALLEST_FLUSH = 64 << 20,
    LARGEST_FLUSH = 256 << 20 /* what a thread can reach of the last-level cache is less on every CPU of 2026 */
};

/* How the threads of a plain read share the bytes. */
typedef struct read_way {
    int64_t chunk; /* bytes that a thread takes in turn; 0: its share of each tensor in one piece */
    int64_t ahead; /* bytes that it prefetches ahead of its loads; 0: that is left to the hardware */
} read_way;

typedef struct cpu_state {
    ekv_random_cache *cache;
    ekv_reference *reference;
    unsigned char *flush; /* [flush_size] */
    size_t flush_size;    /* bytes, 0: nothing is flushed */
    unsigned char byte;
    const read_way *read_way; /* of the read in progress */
    uint64_t *sums;           /* [threads * SUM_STRIDE] */
} cpu_state;

enum { SUM_STRIDE = 8 }; /* a cache line a thread */

/* ---- Caches ------------------------------------------------------------------------------------------ */

/* As much as the last-level cache has. */
static size_t flush_size(void)
{
    int64_t size = SMALLEST_FLUSH;
#ifdef _SC_LEVEL3_CACHE_SIZE
    size = ekv_max(size, sysconf(_SC_LEVEL3_CACHE_SIZE));
#endif
    return (size_t)ekv_min(size, LARGEST_FLUSH);
}

/* Thread t's part of n things. */
static int64_t part_begin(int64_t n, int32_t thread, int32_t threads)
{
    return n * thread / threads;
}

static void flush_part(void *argument, int32_t thread)
{
    const cli_execution *execution = argument;
    const cpu_state *state = execution->state;
    const int32_t threads = ekv_pool_num_threads(execution->cli->context->pool);
    const int64_t begin = part_begin((int64_t)state->flush_size, thread, threads);
    const int64_t end = part_begin((int64_t)state->flush_size, thread + 1, threads);
    memset(state->flush + begin, state->byte, (size_t)(end - begin));
}

static void flush(cli_execution *execution)
{
    cpu_state *state = execution->state;
    if (!state->flush_size)
        return;
    state->byte++;
    ekv_pool_run(execution->cli->context->pool, flush_part, execution);
}

/* ---- Execution --------------------------------------------------------------------------------------- */

static ekv_status create(cli_execution *execution)
{
    cpu_state *state = cli_alloc(sizeof *state);
    *state = (cpu_state){ 0 };
    execution->state = state;
    if (execution->cold) {
        state->flush_size = flush_size();
        state->flush = cli_alloc(state->flush_size);
        snprintf(execution->flush, sizeof execution->flush, "write%zuMiB", state->flush_size >> 20);
    }
    const size_t threads = (size_t)ekv_pool_num_threads(execution->cli->context->pool);
    state->sums = cli_alloc(threads * SUM_STRIDE * sizeof *state->sums);
    return EKV_OK;
}

static void free_batch(cpu_state *state)
{
    ekv_reference_free(state->reference);
    ekv_random_cache_free(state->cache);
    state->reference = NULL;
    state->cache = NULL;
}

static void destroy(cli_execution *execution)
{
    cpu_state *state = execution->state;
    free_batch(state);
    free(state->flush);
    free(state->sums);
    free(state);
}

static ekv_status set_batch(cli_execution *execution)
{
    cpu_state *state = execution->state;
    ekv_context *context = execution->cli->context;
    free_batch(state);
    execution->reference = NULL;
    ekv_random_cache_options options = EKV_RANDOM_CACHE_OPTIONS_INIT;
    options.seed = (uint64_t)execution->cli->options.seed;
    ekv_status status = ekv_random_cache_create(context, &execution->batch, &options, &state->cache);
    if (status)
        return status;
    execution->tensors = ekv_random_cache_tensors(state->cache);
    if (execution->limits.with_reference)
        status = ekv_reference_create(context, &execution->batch, execution->tensors, &state->reference);
    execution->reference = state->reference;
    return status;
}

/* ---- Jobs -------------------------------------------------------------------------------------------- */

static ekv_status prepare(cli_execution *execution, cli_job *job)
{
    (void)execution;
    job->workspace =
        aligned_alloc(WORKSPACE_ALIGN, (size_t)ekv_round_up((int64_t)job->workspace_size + 1, WORKSPACE_ALIGN));
    if (!job->workspace)
        return ekv_fail(EKV_ERROR_OUT_OF_MEMORY, "no memory for a workspace of %zu bytes", job->workspace_size);
    const ekv_cpu_kernel *kernel;
    ekv_status status = ekv_cpu_kernel_choose(&job->plan->batch, job->options.kernel, &kernel);
    if (status)
        return status;
    job->kernel = kernel->name;
    job->p_dtype = kernel->p_dtype;
    return EKV_OK;
}

static void release(cli_execution *execution, cli_job *job)
{
    (void)execution;
    free(job->workspace);
}

static ekv_status decode_once(cli_execution *execution, cli_job *job)
{
    return ekv_decode(job->plan, execution->tensors, &job->options, job->workspace, job->workspace_size);
}

static ekv_status time_decode(cli_execution *execution, cli_job *job, double *us)
{
    flush(execution);
    const double start = cli_now_us();
    ekv_status status = decode_once(execution, job);
    *us = cli_now_us() - start;
    return status;
}

static ekv_status decode(cli_execution *execution, cli_job *job, cli_outputs *outputs)
{
    cpu_state *state = execution->state;
    ekv_random_cache_reset(state->cache);
    ekv_status status = decode_once(execution, job);
    *outputs = (cli_outputs){ .o = execution->tensors->o,
                              .lse = execution->tensors->lse,
                              .guards_intact = ekv_random_cache_guards_intact(state->cache) };
    return status;
}

/* ---- Plain read -------------------------------------------------------------------------------------- */

static const read_way read_ways[] = { { 0, 0 },    { 64 << 10, 0 },    { 1 << 20, 0 },
                                      { 0, 4096 }, { 64 << 10, 4096 }, { 1 << 20, 4096 } };

static bool read_shape(const cli_execution *execution, int32_t shape, char *text, size_t size)
{
    if (shape >= (int32_t)(sizeof read_ways / sizeof read_ways[0]))
        return false;
    const read_way *way = &read_ways[shape];
    const int32_t threads = ekv_pool_num_threads(execution->cli->context->pool);
    char share[32] = "with a part each";
    if (way->chunk)
        snprintf(share, sizeof share, "taking %d KiB in turn", (int)(way->chunk >> 10));
    snprintf(text, size, "%d thread%s %s%s", threads, threads == 1 ? "" : "s", share, way->ahead ? ", prefetch" : "");
    return true;
}

/* The words of [begin, end), both multiples of 8. */
static uint64_t sum_bytes(const unsigned char *data, int64_t begin, int64_t end, int64_t ahead)
{
    enum { LINE = 64, WORDS = LINE / 8 };
    typedef uint64_t line __attribute__((vector_size(LINE)));
    line sums = { 0 }, words;
    int64_t at = begin;
    for (; at + LINE <= end; at += LINE) {
        if (ahead)
            __builtin_prefetch(data + at + ahead);
        memcpy(&words, data + at, sizeof words);
        sums += words;
    }
    uint64_t sum = 0, word;
    for (int i = 0; i < WORDS; i++)
        sum += sums[i];
    for (; at < end; at += 8) {
        memcpy(&word, data + at, sizeof word);
        sum += word;
    }
    return sum;
}

static uint64_t read_tensor(const cpu_state *state, const void *data, int64_t size, int32_t thread, int32_t threads)
{
    const read_way *way = state->read_way;
    const int64_t words = size / 8; /* up to 7 bytes are left out */
    if (!way->chunk)
        return sum_bytes(data, 8 * part_begin(words, thread, threads), 8 * part_begin(words, thread + 1, threads),
                         way->ahead);
    uint64_t sum = 0;
    for (int64_t at = thread * way->chunk; at < 8 * words; at += threads * way->chunk)
        sum += sum_bytes(data, at, ekv_min(at + way->chunk, 8 * words), way->ahead);
    return sum;
}

/* As many bytes of K, V, Q and O as a decode has to touch, from the beginning of each. */
static void read_part(void *argument, int32_t thread)
{
    const cli_execution *execution = argument;
    const cpu_state *state = execution->state;
    const ekv_tensors *t = execution->tensors;
    const int32_t threads = ekv_pool_num_threads(execution->cli->context->pool);
    const int64_t q_bytes = (execution->bytes - execution->kv_bytes) / 2;
    uint64_t sum = read_tensor(state, t->k, execution->kv_bytes / 2, thread, threads);
    sum += read_tensor(state, t->v, execution->kv_bytes / 2, thread, threads);
    sum += read_tensor(state, t->q, q_bytes, thread, threads);
    sum += read_tensor(state, t->o, q_bytes, thread, threads);
    state->sums[thread * SUM_STRIDE] = sum; /* so that the loads stay */
}

static ekv_status read_once(cli_execution *execution, int32_t shape, double *us)
{
    cpu_state *state = execution->state;
    state->read_way = &read_ways[shape];
    flush(execution);
    const double start = cli_now_us();
    ekv_pool_run(execution->cli->context->pool, read_part, execution);
    *us = cli_now_us() - start;
    return EKV_OK;
}

const cli_backend cli_backend_cpu = {
    .name = "cpu",
    .create = create,
    .free = destroy,
    .set_batch = set_batch,
    .prepare = prepare,
    .release = release,
    .time = time_decode,
    .decode = decode,
    .read_shape = read_shape,
    .read = read_once,
};
