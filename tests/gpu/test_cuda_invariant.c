/* SPDX-License-Identifier: Apache-2.0
 * even-invariant on the GPU: an output has the same bits whatever else is in the batch, however many SMs there are and
 * wherever the plan is made. */
#include "gpu_support.h"

enum { REQUESTS = 24, NUM_MARGINS = 3 };

/* Round the borders of pages and of chunks of 1,024 tokens, several chunks, hundreds of them. */
static const int32_t lengths[REQUESTS] = { 700,  0,    1,    1024, 1025, 15,    16,   17,   5000, 1023, 2048, 150000,
                                           2047, 2049, 3000, 64,   0,    20000, 1024, 9999, 130,  4096, 4097, 333 };

/* O and LSE of requests [first, first + count), as bytes on the host. */
typedef struct rows {
    unsigned char *bytes;
    size_t o_size, lse_size;
} rows;

static rows read_rows(const gpu_problem *p, int32_t first, int32_t count)
{
    const size_t heads = (size_t)p->batch.q_heads, o_row = heads * (size_t)p->batch.head_dim * 2;
    rows r = { .o_size = (size_t)count * o_row, .lse_size = (size_t)count * heads * sizeof(float) };
    r.bytes = malloc(r.o_size + r.lse_size);
    assert_ok(ekv_cuda_copy(gpu_context, r.bytes, (unsigned char *)p->tensors.o + (size_t)first * o_row, r.o_size));
    assert_ok(ekv_cuda_copy(gpu_context, r.bytes + r.o_size, p->tensors.lse + (size_t)first * heads, r.lse_size));
    return r;
}

/* The problem of requests [first, first + count): their rows of all tensors, which stay where they are. */
static gpu_problem window_of(const gpu_problem *p, int32_t first, int32_t count)
{
    gpu_problem w = *p;
    const int64_t heads = p->batch.q_heads, row = heads * p->batch.head_dim;
    w.batch.batch_size = count;
    w.batch.kv_len = lengths + first;
    w.tensors.q = (const uint16_t *)p->tensors.q + first * row;
    w.tensors.o = (uint16_t *)p->tensors.o + first * row;
    w.tensors.lse = p->tensors.lse + first * heads;
    w.tensors.page_indptr = p->tensors.page_indptr + first; /* positions in page_indices, which do not move */
    return w;
}

/* kv_len: device, of the whole batch; NULL: planned on the host. */
static void decode_window(gpu_problem *whole, int32_t first, int32_t count, const ekv_plan_options *options,
                          const int32_t *kv_len)
{
    gpu_problem window = window_of(whole, first, count);
    ekv_plan_options own = *options;
    gpu_run run;
    own.on_device = kv_len != NULL;
    gpu_problem_reset(whole);
    if (!gpu_run_create(&window, "even-invariant", &own, EKV_KERNEL_MMA, NULL, &run))
        fail_msg("%s", ekv_last_error());
    window.tensors.kv_len = kv_len ? kv_len + first : NULL;
    assert_ok(gpu_decode(&run, &window));
    assert_ok(ekv_cuda_stream_wait(gpu_context, NULL));
    gpu_run_free(&run);
}

static void check_window(gpu_problem *whole, const rows *together, int32_t first, int32_t count,
                         const ekv_plan_options *options, const int32_t *kv_len)
{
    decode_window(whole, first, count, options, kv_len);
    rows got = read_rows(whole, first, count);
    const size_t o_row = got.o_size / (size_t)count, lse_row = got.lse_size / (size_t)count;
    for (int32_t b = 0; b < count; b++) {
        const size_t at = (size_t)(first + b);
        if (memcmp(got.bytes + (size_t)b * o_row, together->bytes + at * o_row, o_row) ||
            memcmp(got.bytes + got.o_size + (size_t)b * lse_row, together->bytes + together->o_size + at * lse_row,
                   lse_row))
            fail_msg("request %d (%d tokens) has other bits in the batch of requests %d to %d, %d SMs left out%s",
                     first + b, lengths[first + b], first, first + count - 1, options->sm_margin,
                     kv_len ? ", planned on the device" : "");
    }
    free(got.bytes);
}

static void check_shape(int32_t kv_heads, int32_t group, int32_t head_dim, int32_t page_size)
{
    gpu_spec spec = GPU_SPEC_INIT;
    spec.kv_heads = kv_heads;
    spec.group = group;
    spec.head_dim = head_dim;
    spec.page_size = page_size;
    spec.batch_size = REQUESTS;
    spec.kv_len = lengths;
    gpu_problem problem;
    assert_true(gpu_problem_create(&spec, &problem));
    void *memory;
    assert_ok(ekv_cuda_alloc(gpu_context, sizeof lengths, &memory));
    assert_ok(ekv_cuda_copy(gpu_context, memory, lengths, sizeof lengths));
    ekv_plan_options options = EKV_PLAN_OPTIONS_INIT;
    decode_window(&problem, 0, REQUESTS, &options, NULL);
    rows together = read_rows(&problem, 0, REQUESTS);
    for (int32_t m = 0; m < NUM_MARGINS; m++) {
        options.sm_margin = (int32_t[NUM_MARGINS]){ 0, 5, gpu_device.num_sms - 1 }[m];
        for (int32_t count = 1; count <= REQUESTS; count = count * 4 - 1)
            for (int32_t first = 0; first + count <= REQUESTS; first += (count + 1) / 2) {
                check_window(&problem, &together, first, count, &options, NULL);
                check_window(&problem, &together, first, count, &options, memory);
            }
    }
    free(together.bytes);
    ekv_cuda_free(gpu_context, memory);
    gpu_problem_free(&problem);
}

static void the_rest_of_the_batch_does_not_matter(void **state)
{
    (void)state;
    check_shape(4, 8, 128, 16);
    check_shape(1, 8, 128, 1);
    check_shape(8, 4, 64, 64);
    check_shape(2, 1, 256, 16);
}

static int run(void)
{
    const struct CMUnitTest tests[] = { cmocka_unit_test(the_rest_of_the_batch_does_not_matter) };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

int main(void)
{
    return gpu_main(run);
}
