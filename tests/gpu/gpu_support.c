/* SPDX-License-Identifier: Apache-2.0 */
#include "gpu_support.h"

#include "base/arena.h"
#include "plan/tensors.h"

enum {
    GUARD_BYTES = 4096,
    POISON = 0xFF, /* as any float of 2 or 4 bytes: NaN */
    SKIPPED = 77,
    TABLE_PADDING = 3, /* entries of -1 after each row of a block table */
    SPARE_PAGES = 3    /* that no request has */
};

ekv_context *gpu_context;
ekv_device gpu_device;

int gpu_main(int (*run)(void))
{
    ekv_context_options options = EKV_CONTEXT_OPTIONS_INIT;
    options.cuda_device = 0;
    ekv_status status = ekv_context_create(&options, &gpu_context);
    if (status) {
        fprintf(stderr, "%s: %s\n", ekv_status_name(status), ekv_last_error());
        return 1;
    }
    if (!gpu_context->cuda) {
        printf("skipped: %s\n", gpu_context->cuda_missing);
        ekv_context_free(gpu_context);
        return SKIPPED;
    }
    gpu_device = (ekv_device)EKV_DEVICE_INIT;
    if (ekv_device_detect(gpu_context, &gpu_device)) {
        fprintf(stderr, "%s\n", ekv_last_error());
        return 1;
    }
    int failed = run();
    ekv_context_free(gpu_context);
    return failed ? 1 : 0;
}

static void *gpu_alloc(size_t size)
{
    void *device = NULL;
    assert_ok(ekv_cuda_alloc(gpu_context, size, &device));
    return device;
}

/* ---- Page tables ----------------------------------------------------------------------------------------- */

static int64_t pages_of(const gpu_spec *spec, int32_t request)
{
    return ekv_ceil_div(spec->kv_len[request], spec->page_size);
}

static int32_t *shuffled(ekv_rng *rng, int64_t count)
{
    int32_t *values = malloc((size_t)(count + 1) * sizeof *values);
    for (int64_t i = 0; i < count; i++) {
        int64_t j = ekv_rng_below(rng, i + 1);
        values[i] = values[j];
        values[j] = (int32_t)i;
    }
    return values;
}

/* Lists: indptr, then indices. */
static void set_csr(const gpu_spec *spec, const int32_t *pages, gpu_problem *p)
{
    const size_t indptr_count = (size_t)spec->batch_size + 1;
    int32_t *indptr = malloc(indptr_count * sizeof *indptr);
    indptr[0] = 0;
    for (int32_t b = 0; b < spec->batch_size; b++)
        indptr[b + 1] = indptr[b] + (int32_t)pages_of(spec, b);
    const size_t indices_size = (size_t)indptr[spec->batch_size] * sizeof *pages;
    p->tables_size = indptr_count * sizeof *indptr + indices_size;
    p->tables = gpu_alloc(p->tables_size);
    int32_t *device = p->tables;
    assert_ok(ekv_cuda_copy(gpu_context, device, indptr, indptr_count * sizeof *indptr));
    assert_ok(ekv_cuda_copy(gpu_context, device + indptr_count, pages, indices_size));
    p->tensors.page_indptr = device;
    p->tensors.page_indices = device + indptr_count;
    free(indptr);
}

/* Lists: rows, then a table of which every request has one row. */
static void set_block_table(const gpu_spec *spec, const int32_t *pages, ekv_rng *rng, gpu_problem *p)
{
    int64_t width = 1;
    for (int32_t b = 0; b < spec->batch_size; b++)
        width = ekv_max(width, pages_of(spec, b));
    const int64_t stride = width + TABLE_PADDING;
    const size_t count = (size_t)spec->batch_size * (size_t)(stride + 1);
    int32_t *lists = malloc(count * sizeof *lists), *rows = shuffled(rng, spec->batch_size);
    memset(lists, 0xFF, count * sizeof *lists);
    for (int32_t b = 0; b < spec->batch_size; b++) {
        lists[b] = rows[b];
        for (int64_t i = 0; i < pages_of(spec, b); i++)
            lists[spec->batch_size + rows[b] * stride + i] = *pages++;
    }
    p->tables_size = count * sizeof *lists;
    p->tables = gpu_alloc(p->tables_size);
    assert_ok(ekv_cuda_copy(gpu_context, p->tables, lists, p->tables_size));
    p->tensors.block_table_rows = p->tables;
    p->tensors.block_table = (int32_t *)p->tables + spec->batch_size;
    p->tensors.block_table_stride = stride;
    p->tensors.block_table_width = (int32_t)width;
    free(lists);
    free(rows);
}

/* ---- Tensors --------------------------------------------------------------------------------------------- */

/* Returns elements of one of K and V. */
static int64_t set_strides(const gpu_spec *spec, int64_t num_pages, gpu_problem *p)
{
    ekv_tensors *t = &p->tensors;
    const int64_t row = spec->head_dim + spec->row_padding, heads = (int64_t)spec->kv_heads * spec->group;
    const bool nhd = spec->layout == EKV_LAYOUT_NHD;
    t->k_stride_head = nhd ? row : row * spec->page_size;
    t->k_stride_token = nhd ? row * spec->kv_heads : row;
    t->k_stride_page = row * spec->kv_heads * spec->page_size + spec->page_padding;
    t->v_stride_head = t->k_stride_head;
    t->v_stride_token = t->k_stride_token;
    t->v_stride_page = t->k_stride_page;
    t->q_stride_head = t->o_stride_head = row;
    t->q_stride_request = t->o_stride_request = row * heads;
    t->lse_stride_head = 1 + spec->row_padding;
    t->lse_stride_request = t->lse_stride_head * heads;
    return (num_pages - 1) * t->k_stride_page + row * spec->kv_heads * spec->page_size;
}

static void make_queries(const gpu_spec *spec, gpu_problem *p)
{
    const int64_t rows = (int64_t)spec->batch_size * p->batch.q_heads;
    const size_t dense = (size_t)rows * (size_t)spec->head_dim * 2;
    const size_t strided = p->q_size = (size_t)(rows * p->tensors.q_stride_head) * 2;
    p->q = gpu_alloc(strided);
    p->tensors.q = p->q;
    if (!spec->row_padding) {
        assert_ok(ekv_cuda_fill_random(gpu_context, p->q, spec->dtype, rows * spec->head_dim, spec->seed + 2, 4.0f));
        return;
    }
    void *device = gpu_alloc(dense);
    unsigned char *host = malloc(dense), *spread = malloc(strided);
    assert_ok(ekv_cuda_fill_random(gpu_context, device, spec->dtype, rows * spec->head_dim, spec->seed + 2, 4.0f));
    assert_ok(ekv_cuda_copy(gpu_context, host, device, dense));
    memset(spread, POISON, strided);
    for (int64_t r = 0; r < rows; r++)
        memcpy(spread + r * p->tensors.q_stride_head * 2, host + r * spec->head_dim * 2, (size_t)spec->head_dim * 2);
    assert_ok(ekv_cuda_copy(gpu_context, p->q, spread, strided));
    ekv_cuda_free(gpu_context, device);
    free(host);
    free(spread);
}

static void make_outputs(gpu_problem *p)
{
    const size_t rows = (size_t)p->batch.batch_size * (size_t)p->batch.q_heads;
    p->o_size = rows * (size_t)p->tensors.o_stride_head * 2;
    p->lse_size = rows * (size_t)p->tensors.lse_stride_head * sizeof(float);
    p->outputs_size = p->o_size + p->lse_size + 3 * GUARD_BYTES;
    p->outputs = gpu_alloc(p->outputs_size);
    p->tensors.o = (unsigned char *)p->outputs + GUARD_BYTES;
    p->tensors.lse = (float *)(void *)((unsigned char *)p->outputs + 2 * GUARD_BYTES + p->o_size);
    gpu_problem_reset(p);
}

static void compute_reference(gpu_problem *p)
{
    assert_ok(ekv_cuda_reference(gpu_context, &p->batch, &p->tensors, p->reference.o, p->reference.lse,
                                 (double *)p->reference.scale));
}

static int32_t *copy_of(const int32_t *values, int32_t count)
{
    int32_t *copy = malloc((size_t)count * sizeof *copy);
    memcpy(copy, values, (size_t)count * sizeof *copy);
    return copy;
}

static void fill_cache(const gpu_spec *spec, gpu_problem *p)
{
    const size_t lengths = (size_t)spec->batch_size * sizeof *spec->kv_len;
    int32_t *kv_len = gpu_alloc(lengths);
    assert_ok(ekv_cuda_copy(gpu_context, kv_len, spec->kv_len, lengths));
    assert_ok(ekv_cuda_fill(gpu_context, p->cache, POISON, p->cache_size));
    assert_ok(ekv_cuda_fill_cache(gpu_context, &p->batch, &p->tensors, kv_len, spec->seed));
    ekv_cuda_free(gpu_context, kv_len);
}

bool gpu_problem_create(const gpu_spec *spec, gpu_problem *problem)
{
    gpu_problem p = { .batch = EKV_BATCH_INIT, .tensors = EKV_TENSORS_INIT, .row_padding = spec->row_padding };
    p.batch.batch_size = spec->batch_size;
    p.batch.kv_len = copy_of(spec->kv_len, spec->batch_size);
    p.batch.q_heads = spec->kv_heads * spec->group;
    p.batch.kv_heads = spec->kv_heads;
    p.batch.head_dim = spec->head_dim;
    p.batch.page_size = spec->page_size;
    p.batch.q_dtype = p.batch.kv_dtype = spec->dtype;
    p.batch.layout = spec->layout;
    int64_t used = 0;
    for (int32_t b = 0; b < spec->batch_size; b++)
        used += pages_of(spec, b);
    const int64_t elements = set_strides(spec, used + SPARE_PAGES, &p);
    const size_t v_begin = ((size_t)elements * 2 + 255) / 256 * 256;
    p.cache_size = v_begin + (size_t)elements * 2;
    ekv_status status = ekv_cuda_alloc(gpu_context, p.cache_size, &p.cache);
    if (status == EKV_ERROR_OUT_OF_MEMORY) {
        free((void *)(uintptr_t)p.batch.kv_len);
        return false;
    }
    assert_ok(status);
    p.tensors.k = p.cache;
    p.tensors.v = (unsigned char *)p.cache + v_begin;

    ekv_rng rng = { spec->seed };
    int32_t *pages = shuffled(&rng, used + SPARE_PAGES);
    if (spec->block_table)
        set_block_table(spec, pages, &rng, &p);
    else
        set_csr(spec, pages, &p);
    free(pages);
    fill_cache(spec, &p);
    make_queries(spec, &p);
    make_outputs(&p);
    ekv_tensors_set_defaults(&p.batch, &p.tensors);

    const size_t rows = (size_t)p.batch.batch_size * (size_t)p.batch.q_heads;
    p.reference = (ekv_reference){ .context = gpu_context,
                                   .batch = p.batch,
                                   .o = malloc(rows * (size_t)spec->head_dim * sizeof(double)),
                                   .lse = malloc(rows * sizeof(double)),
                                   .scale = malloc(rows * sizeof(ekv_row_scale)) };
    compute_reference(&p);
    *problem = p;
    return true;
}

void gpu_problem_free(gpu_problem *problem)
{
    ekv_cuda_free(gpu_context, problem->cache);
    ekv_cuda_free(gpu_context, problem->tables);
    ekv_cuda_free(gpu_context, problem->q);
    ekv_cuda_free(gpu_context, problem->outputs);
    free(problem->reference.o);
    free(problem->reference.lse);
    free(problem->reference.scale);
    free((void *)(uintptr_t)problem->batch.kv_len);
}

void gpu_problem_reset(gpu_problem *problem)
{
    assert_ok(ekv_cuda_fill(gpu_context, problem->outputs, POISON, problem->outputs_size));
}

void gpu_problem_set_lengths(gpu_problem *problem, const int32_t *kv_len, int32_t batch_size)
{
    memcpy((int32_t *)(uintptr_t)problem->batch.kv_len, kv_len, (size_t)batch_size * sizeof *kv_len);
    problem->batch.batch_size = problem->reference.batch.batch_size = batch_size;
    compute_reference(problem);
}

static unsigned char *read_back(const void *device, size_t size)
{
    unsigned char *host = malloc(size);
    assert_ok(ekv_cuda_copy(gpu_context, host, device, size));
    return host;
}

/* Where a device pointer into `device` lies in its copy; NULL stays NULL. */
static const void *moved(const void *pointer, const void *device, const unsigned char *host)
{
    return pointer ? host + ((const unsigned char *)pointer - (const unsigned char *)device) : NULL;
}

gpu_host_tensors gpu_host_tensors_read(const gpu_problem *p)
{
    gpu_host_tensors host = { .tensors = p->tensors,
                              .cache = read_back(p->cache, p->cache_size),
                              .tables = read_back(p->tables, p->tables_size),
                              .q = read_back(p->q, p->q_size) };
    ekv_tensors *t = &host.tensors;
    t->q = host.q;
    t->k = moved(t->k, p->cache, host.cache);
    t->v = moved(t->v, p->cache, host.cache);
    t->page_indptr = moved(t->page_indptr, p->tables, host.tables);
    t->page_indices = moved(t->page_indices, p->tables, host.tables);
    t->block_table = moved(t->block_table, p->tables, host.tables);
    t->block_table_rows = moved(t->block_table_rows, p->tables, host.tables);
    return host;
}

void gpu_host_tensors_free(gpu_host_tensors *host)
{
    free(host->cache);
    free(host->tables);
    free(host->q);
}

/* ---- Outputs --------------------------------------------------------------------------------------------- */

gpu_output gpu_output_read(const gpu_problem *problem)
{
    gpu_output output = { malloc(problem->outputs_size) };
    assert_ok(ekv_cuda_copy(gpu_context, output.bytes, problem->outputs, problem->outputs_size));
    return output;
}

void gpu_output_free(gpu_output *output)
{
    free(output->bytes);
    output->bytes = NULL;
}

/* Everything but the rows must still be poison. */
static void check_guards(const gpu_problem *p, const gpu_output *output, bool lse, const char *what)
{
    const size_t rows = (size_t)p->batch.batch_size * (size_t)p->batch.q_heads;
    unsigned char *bytes = malloc(p->outputs_size), *o = bytes + GUARD_BYTES, *lses = o + p->o_size + GUARD_BYTES;
    memcpy(bytes, output->bytes, p->outputs_size);
    for (size_t r = 0; r < rows; r++) {
        memset(o + r * (size_t)p->tensors.o_stride_head * 2, POISON, (size_t)p->batch.head_dim * 2);
        if (lse)
            memset(lses + r * (size_t)p->tensors.lse_stride_head * sizeof(float), POISON, sizeof(float));
    }
    for (size_t i = 0; i < p->outputs_size; i++)
        if (bytes[i] != POISON)
            fail_msg("%s: byte %zu outside the outputs was written", what, i);
    free(bytes);
}

void gpu_output_check(const gpu_problem *problem, const ekv_plan *plan, const ekv_decode_options *options,
                      const gpu_output *output, const char *what)
{
    ekv_tensors host = problem->tensors;
    host.o = output->bytes + GUARD_BYTES;
    if (host.lse)
        host.lse = (float *)(void *)(output->bytes + 2 * GUARD_BYTES + problem->o_size);
    const ekv_dtype p_dtype = options->kernel == EKV_KERNEL_SIMT ? EKV_DTYPE_F32 : problem->batch.kv_dtype;
    ekv_comparison c = ekv_compare(plan, &host, options->lse_base, p_dtype, &problem->reference);
    if (!(c.max_ratio <= 1))
        fail_msg("%s: request %d (kv_len %d), query head %d, %s %d: error %.3g times the tolerance", what, c.request,
                 problem->batch.kv_len[c.request], c.q_head, c.dim < 0 ? "LSE" : "dimension", c.dim, c.max_ratio);
    check_guards(problem, output, host.lse != NULL, what);
}

/* ---- Runs ------------------------------------------------------------------------------------------------ */

bool gpu_run_create(const gpu_problem *problem, const char *planner, const ekv_plan_options *options, ekv_kernel kernel,
                    void *stream, gpu_run *run)
{
    gpu_run made = { .options = EKV_DECODE_OPTIONS_INIT };
    made.options.backend = EKV_BACKEND_CUDA;
    made.options.kernel = kernel;
    made.options.stream = stream;
    ekv_plan_options plan_options = EKV_PLAN_OPTIONS_INIT;
    if (options)
        plan_options = *options;
    plan_options.cuda = 1;
    ekv_status status = ekv_plan_create(gpu_context, planner, &problem->batch, &gpu_device, &plan_options, &made.plan);
    if (!status)
        status = ekv_backend_supports(made.plan, &problem->tensors, &made.options);
    if (status == EKV_ERROR_UNSUPPORTED) {
        ekv_plan_free(made.plan);
        return false;
    }
    assert_ok(status);
    assert_ok(ekv_plan_check(made.plan));
    assert_ok(ekv_workspace_size(made.plan, EKV_BACKEND_CUDA, &made.workspace_size));
    made.workspace = gpu_alloc(made.workspace_size + GUARD_BYTES);
    assert_ok(ekv_cuda_fill(gpu_context, made.workspace, POISON, made.workspace_size + GUARD_BYTES));
    *run = made;
    return true;
}

void gpu_run_free(gpu_run *run)
{
    ekv_plan_free(run->plan);
    ekv_cuda_free(gpu_context, run->workspace);
}

ekv_status gpu_decode(gpu_run *run, const gpu_problem *problem)
{
    return ekv_decode(run->plan, &problem->tensors, &run->options, run->workspace, run->workspace_size);
}

static gpu_output decode_and_read(gpu_run *run, gpu_problem *problem)
{
    gpu_problem_reset(problem);
    assert_ok(gpu_decode(run, problem));
    assert_ok(ekv_cuda_stream_wait(gpu_context, run->options.stream));
    return gpu_output_read(problem);
}

void gpu_run_check(gpu_run *run, gpu_problem *problem, const char *what)
{
    gpu_output first = decode_and_read(run, problem);
    gpu_output_check(problem, run->plan, &run->options, &first, what);
    gpu_output second = decode_and_read(run, problem);
    if (memcmp(first.bytes, second.bytes, problem->outputs_size))
        fail_msg("%s: a second decode has other bits", what);
    unsigned char guard[GUARD_BYTES];
    assert_ok(ekv_cuda_copy(gpu_context, guard, (unsigned char *)run->workspace + run->workspace_size, GUARD_BYTES));
    for (int i = 0; i < GUARD_BYTES; i++)
        if (guard[i] != POISON)
            fail_msg("%s: byte %d past the workspace was written", what, i);
    gpu_output_free(&first);
    gpu_output_free(&second);
}
