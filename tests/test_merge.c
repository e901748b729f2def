/* SPDX-License-Identifier: Apache-2.0
 * ekv_merge_states on the CPU. */
#include "one_context.h"
#include "support.h"

#include "cpu/convert.h"

enum { STATES = 5, ROWS = 37, DIM = 40 };

/* States of known contents in a given dtype; row r of state s is empty where bit s of r % 32 is clear, and then its
 * part is NaN. */
typedef struct states {
    unsigned char parts[STATES * ROWS * DIM * 4 * 2]; /* strided uses take twice the room */
    float lse[STATES * ROWS * 2];
    unsigned char o[(ROWS * DIM + 1) * 4];
    float merged[ROWS + 1];
    ekv_merge_args args;
} states;

static bool is_empty(int32_t s, int64_t row)
{
    return !(row % 32 >> s & 1);
}

static states *create_states(ekv_dtype part_dtype, ekv_dtype o_dtype, ekv_lse_base base, int32_t stride, float offset)
{
    ekv_rng rng = { 7 };
    states *made = calloc(1, sizeof *made);
    memset(made->parts, 0xFF, sizeof made->parts);
    memset(made->o, 0xFF, sizeof made->o);
    memset(made->merged, 0xFF, sizeof made->merged);
    for (int32_t i = 0; i < STATES * ROWS * 2; i++)
        made->lse[i] = NAN;
    ekv_merge_args *args = &made->args;
    *args = (ekv_merge_args)EKV_MERGE_ARGS_INIT;
    args->num_states = STATES;
    args->rows = ROWS;
    args->head_dim = DIM;
    args->part_dtype = part_dtype;
    args->o_dtype = o_dtype;
    args->lse_base = base;
    args->o_parts = made->parts;
    args->lse_parts = made->lse;
    args->o = made->o;
    args->lse = made->merged;
    if (stride > 1) { /* [row][state], every other row of the tensor */
        args->part_stride_state = DIM * stride;
        args->part_stride_row = STATES * DIM * stride;
        args->lse_stride_state = stride;
        args->lse_stride_row = STATES * stride;
    }
    for (int32_t s = 0; s < STATES; s++)
        for (int64_t r = 0; r < ROWS; r++) {
            float row[DIM];
            for (int32_t d = 0; d < DIM; d++)
                row[d] = (float)(2 * ekv_rng_unit(&rng) - 1);
            const int64_t at = stride > 1 ? (r * STATES + s) * stride : s * ROWS + r;
            made->lse[at] = is_empty(s, r) ? -INFINITY : offset + (float)(6 * ekv_rng_unit(&rng) - 3);
            if (!is_empty(s, r))
                ekv_row_from_f32(row, DIM, part_dtype, ekv_element_mutable(made->parts, part_dtype, at * DIM));
        }
    return made;
}

static double element(const void *base, ekv_dtype dtype, int64_t at)
{
    float value;
    ekv_row_to_f32(ekv_element(base, dtype, at), dtype, 1, &value);
    return value;
}

/* The definition, in double precision. */
static void check_row(const states *made, int32_t stride, int64_t r)
{
    const ekv_merge_args *args = &made->args;
    const double unit = args->lse_base == EKV_LSE_BASE2 ? log(2) : 1;
    double largest = -INFINITY, sum = 0;
    for (int32_t s = 0; s < STATES; s++)
        largest = fmax(largest, made->lse[stride > 1 ? (r * STATES + s) * stride : s * ROWS + r]);
    double o[DIM] = { 0 };
    for (int32_t s = 0; s < STATES; s++) {
        const int64_t at = stride > 1 ? (r * STATES + s) * stride : s * ROWS + r;
        if (is_empty(s, r))
            continue;
        const double weight = exp((made->lse[at] - largest) * unit);
        sum += weight;
        for (int32_t d = 0; d < DIM; d++)
            o[d] += weight * element(made->parts, args->part_dtype, at * DIM + d);
    }
    const double unit_o = args->o_dtype == EKV_DTYPE_BF16 ? 0x1p-8 : args->o_dtype == EKV_DTYPE_F16 ? 0x1p-11 : 0;
    for (int32_t d = 0; d < DIM; d++) {
        const double ref = sum > 0 ? o[d] / sum : 0;
        assert_true(fabs(element(made->o, args->o_dtype, r * DIM + d) - ref) <= unit_o * fabs(ref) + 2e-6);
    }
    if (sum > 0)
        assert_true(fabs(made->merged[r] - (largest + log(sum) / unit)) <= 1e-6 + 2e-7 * fabs(largest));
    else
        assert_true(made->merged[r] == -INFINITY);
}

/* Rows 0..31 have every subset of empty states. */
static void every_subset_of_empty_states(void **state)
{
    (void)state;
    for (int variant = 0; variant < 36; variant++) {
        const ekv_dtype part = (ekv_dtype)(variant % 3), o = (ekv_dtype)(variant / 3 % 3);
        const int32_t stride = variant % 2 ? 2 : 1;
        states *made = create_states(part, o, (ekv_lse_base)(variant / 18), stride, 0);
        assert_ok(ekv_merge_states(context, &made->args));
        for (int64_t r = 0; r < ROWS; r++)
            check_row(made, stride, r);
        assert_true(isnan(element(made->o, o, ROWS * DIM)) && isnan(made->merged[ROWS])); /* nothing past the end */
        free(made);
    }
}

static void large_lse_do_not_overflow(void **state)
{
    (void)state;
    for (int base = 0; base < 2; base++)
        for (float offset = -1e4f; offset <= 1e4f; offset += 2e4f) {
            states *made = create_states(EKV_DTYPE_F32, EKV_DTYPE_F32, (ekv_lse_base)base, 1, offset);
            assert_ok(ekv_merge_states(context, &made->args));
            for (int64_t r = 0; r < ROWS; r++)
                check_row(made, 1, r);
            free(made);
        }
}

static void one_state_is_copied(void **state)
{
    (void)state;
    states *made = create_states(EKV_DTYPE_F32, EKV_DTYPE_F32, EKV_LSE_NATURAL, 1, 0);
    made->args.num_states = 1;
    assert_ok(ekv_merge_states(context, &made->args));
    for (int64_t r = 0; r < ROWS; r++)
        if (is_empty(0, r)) {
            assert_true(made->merged[r] == -INFINITY);
        } else {
            assert_memory_equal(made->o + r * DIM * 4, made->parts + r * DIM * 4, DIM * 4);
            assert_true(made->merged[r] == made->lse[r]);
        }
    free(made);
}

/* A head_dim beyond that of decode, in more than one step of 256. */
static void wide_rows(void **state)
{
    (void)state;
    enum { WIDE = 600 };
    static float parts[2][WIDE], o[WIDE];
    const float lse[2] = { 1, 1 };
    for (int32_t d = 0; d < WIDE; d++) {
        parts[0][d] = (float)d;
        parts[1][d] = (float)(d + 2);
    }
    ekv_merge_args args = EKV_MERGE_ARGS_INIT;
    args.num_states = 2;
    args.rows = 1;
    args.head_dim = WIDE;
    args.o_parts = parts;
    args.lse_parts = lse;
    args.o = o;
    assert_ok(ekv_merge_states(context, &args));
    for (int32_t d = 0; d < WIDE; d++)
        assert_true(fabsf(o[d] - (float)(d + 1)) <= 1e-4f);
}

/* Decodes of the two halves of a request merge into the decode of all of it. */
static void halves_merge_into_the_whole(void **state)
{
    (void)state;
    const int32_t whole_len = 640, half_len = 320;
    ekv_batch batch = EKV_BATCH_INIT;
    batch.batch_size = 1;
    batch.kv_len = &whole_len;
    batch.q_heads = 8;
    batch.kv_heads = 2;
    batch.head_dim = 64;
    batch.q_dtype = batch.kv_dtype = EKV_DTYPE_F32;
    const ekv_device device = support_device(4);
    decode_setup whole, half;
    support_run(context, "even", &batch, &device, NULL, NULL, &whole);
    static float parts[2][8][64], lse[2][8];
    batch.kv_len = &half_len;
    assert_ok(support_set_up(context, "even", &batch, &device, NULL, NULL, &half));
    ekv_tensors tensors = *whole.tensors;
    tensors.last_page_len = NULL;
    for (int i = 0; i < 2; i++) {
        const int32_t indptr[2] = { i * 20, i * 20 + 20 }; /* pages of 16 */
        tensors.page_indptr = indptr;
        tensors.o = parts[i];
        tensors.lse = lse[i];
        assert_ok(ekv_decode(half.plan, &tensors, NULL, half.workspace, half.workspace_size));
    }
    ekv_merge_args args = EKV_MERGE_ARGS_INIT;
    args.num_states = 2;
    args.rows = 8;
    args.head_dim = 64;
    args.o_parts = parts;
    args.lse_parts = &lse[0][0];
    args.o = whole.tensors->o;
    args.lse = whole.tensors->lse;
    assert_ok(ekv_merge_states(context, &args));
    support_assert_right(&whole, "halves");
    support_tear_down(&half);
    support_tear_down(&whole);
}

static void bad_arguments_are_refused(void **state)
{
    (void)state;
    states *made = create_states(EKV_DTYPE_F32, EKV_DTYPE_F32, EKV_LSE_NATURAL, 1, 0);
    const ekv_merge_args good = made->args;
    ekv_merge_args *args = &made->args;
    assert_fails(ekv_merge_states(NULL, args), EKV_ERROR_INVALID_ARGUMENT, "context");
    assert_fails(ekv_merge_states(context, NULL), EKV_ERROR_INVALID_ARGUMENT, "args");
#define REFUSED(change, status, ...)                                        \
    do {                                                                    \
        *args = good;                                                       \
        args->change;                                                       \
        assert_fails(ekv_merge_states(context, args), status, __VA_ARGS__); \
    } while (0)
    REFUSED(struct_size = 3, EKV_ERROR_INVALID_ARGUMENT, "struct_size is 3");
    REFUSED(num_states = 0, EKV_ERROR_INVALID_ARGUMENT, "num_states is 0");
    REFUSED(rows = -1, EKV_ERROR_INVALID_ARGUMENT, "rows is -1");
    REFUSED(head_dim = 0, EKV_ERROR_INVALID_ARGUMENT, "head_dim is 0");
    REFUSED(o_parts = NULL, EKV_ERROR_INVALID_ARGUMENT, "o_parts is NULL");
    REFUSED(lse_parts = NULL, EKV_ERROR_INVALID_ARGUMENT, "lse_parts is NULL");
    REFUSED(o = NULL, EKV_ERROR_INVALID_ARGUMENT, "o is NULL");
    REFUSED(o = made->o + 1, EKV_ERROR_INVALID_ARGUMENT, "aligned");
    REFUSED(part_dtype = EKV_DTYPE_FP8_E4M3, EKV_ERROR_UNSUPPORTED, "part_dtype 3");
    REFUSED(o_dtype = (ekv_dtype)9, EKV_ERROR_INVALID_ARGUMENT, "o_dtype 9");
    REFUSED(lse_base = (ekv_lse_base)2, EKV_ERROR_INVALID_ARGUMENT, "lse_base 2");
    REFUSED(backend = (ekv_backend)5, EKV_ERROR_INVALID_ARGUMENT, "backend 5");
    REFUSED(backend = EKV_BACKEND_CUDA, EKV_ERROR_BACKEND_UNAVAILABLE, "CUDA");
    REFUSED(stream = made, EKV_ERROR_UNSUPPORTED, "stream");
    REFUSED(rows = INT64_MAX / 2, EKV_ERROR_OVERFLOW, "rows");
    REFUSED(part_stride_state = INT64_MIN, EKV_ERROR_OVERFLOW, "part strides");
    REFUSED(lse_stride_row = INT64_MAX, EKV_ERROR_OVERFLOW, "lse strides");
#undef REFUSED
    assert_true(isnan(made->merged[0])); /* outputs are untouched */
    *args = good;
    args->rows = 0;
    args->o = NULL;
    assert_ok(ekv_merge_states(context, args));
    free(made);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_subset_of_empty_states), cmocka_unit_test(large_lse_do_not_overflow),
        cmocka_unit_test(one_state_is_copied),          cmocka_unit_test(wide_rows),
        cmocka_unit_test(halves_merge_into_the_whole),  cmocka_unit_test(bad_arguments_are_refused),
    };
    return cmocka_run_group_tests(tests, create_context, free_context);
}
