/* SPDX-License-Identifier: Apache-2.0
 * The tolerance has to let correct decodes pass (test_decode) and to catch wrong ones: shown here with errors made
 * on purpose, in an output that is the reference rounded to the output's dtype. */
#include "support.h"

#include "cpu/convert.h"
#include "cpu/expf.h"

enum { KV_LEN = 3000 };

typedef struct subject {
    ekv_context *context;
    ekv_batch batch;
    int32_t kv_len;
    decode_setup setup;
    ekv_reference *reference; /* of all tokens */
} subject;

static subject *create_subject(ekv_dtype dtype)
{
    subject *s = calloc(1, sizeof *s);
    s->context = support_context(2);
    s->kv_len = KV_LEN;
    s->batch = (ekv_batch)EKV_BATCH_INIT;
    s->batch.batch_size = 1;
    s->batch.kv_len = &s->kv_len;
    s->batch.q_heads = 8;
    s->batch.kv_heads = 2;
    s->batch.head_dim = 128;
    s->batch.q_dtype = s->batch.kv_dtype = dtype;
    const ekv_device device = support_device(16);
    support_run(s->context, "even", &s->batch, &device, NULL, NULL, &s->setup);
    assert_ok(ekv_reference_create(s->context, &s->batch, s->setup.tensors, &s->reference));
    return s;
}

static void free_subject(subject *s)
{
    ekv_reference_free(s->reference);
    support_tear_down(&s->setup);
    ekv_context_free(s->context);
    free(s);
}

/* Writes o * factor and lse + shift as the decode's output; returns the comparison's ratio. */
static double ratio_of(const subject *s, const ekv_reference *result, double factor, double shift)
{
    const ekv_tensors *t = s->setup.tensors;
    for (int32_t h = 0; h < s->batch.q_heads; h++) {
        float row[128];
        for (int32_t d = 0; d < 128; d++)
            row[d] = (float)(result->o[h * 128 + d] * factor);
        ekv_row_from_f32(row, 128, s->batch.q_dtype, ekv_element_mutable(t->o, s->batch.q_dtype, h * t->o_stride_head));
        t->lse[h * t->lse_stride_head] = (float)(result->lse[h] + shift);
    }
    return ekv_compare(s->setup.plan, t, EKV_LSE_NATURAL, EKV_DTYPE_F32, s->reference).max_ratio;
}

static const ekv_dtype dtypes[] = { EKV_DTYPE_F32, EKV_DTYPE_F16, EKV_DTYPE_BF16 };

static void the_rounded_reference_passes(void **state)
{
    (void)state;
    for (int i = 0; i < 3; i++) {
        subject *s = create_subject(dtypes[i]);
        assert_true(ratio_of(s, s->reference, 1, 0) <= 1);
        free_subject(s);
    }
}

static void outputs_one_percent_off_are_caught(void **state)
{
    (void)state;
    for (int i = 0; i < 3; i++) {
        subject *s = create_subject(dtypes[i]);
        assert_true(ratio_of(s, s->reference, 1.01, 0) > 1);
        assert_true(ratio_of(s, s->reference, 0.99, 0) > 1);
        free_subject(s);
    }
}

static void an_lse_off_by_a_thousandth_is_caught(void **state)
{
    (void)state;
    subject *s = create_subject(EKV_DTYPE_BF16);
    assert_true(ratio_of(s, s->reference, 1, 1e-3) > 1);
    assert_true(ratio_of(s, s->reference, 1, -1e-3) > 1);
    free_subject(s);
}

/* The last of 3,000 tokens left out, in O alone and in LSE alone. */
static void a_token_left_out_is_caught(void **state)
{
    (void)state;
    for (int i = 0; i < 3; i++) {
        subject *s = create_subject(dtypes[i]);
        const int32_t fewer = KV_LEN - 1;
        ekv_batch batch = s->batch;
        batch.kv_len = &fewer;
        ekv_reference *without;
        assert_ok(ekv_reference_create(s->context, &batch, s->setup.tensors, &without));
        double *lse = without->lse;
        without->lse = s->reference->lse;
        assert_true(ratio_of(s, without, 1, 0) > 1);
        without->lse = lse;
        without->o = s->reference->o;
        assert_true(ratio_of(s, without, 1, 0) > 1);
        ekv_reference_free(without);
        free_subject(s);
    }
}

/* One wrong element of one head, as small as two units in the last place of bf16. */
static void one_wrong_element_is_found(void **state)
{
    (void)state;
    subject *s = create_subject(EKV_DTYPE_BF16);
    assert_true(ratio_of(s, s->reference, 1, 0) <= 1);
    uint16_t *element = (uint16_t *)s->setup.tensors->o + 5 * 128 + 77;
    *element = (uint16_t)(*element + 2);
    ekv_comparison c = ekv_compare(s->setup.plan, s->setup.tensors, EKV_LSE_NATURAL, EKV_DTYPE_F32, s->reference);
    assert_true(c.max_ratio > 1 && c.q_head == 5 && c.dim == 77 && c.request == 0);
    *element = 0x7FC0; /* NaN */
    c = ekv_compare(s->setup.plan, s->setup.tensors, EKV_LSE_NATURAL, EKV_DTYPE_F32, s->reference);
    assert_true(isinf(c.max_ratio) && c.q_head == 5 && c.dim == 77);
    free_subject(s);
}

/* Weights rounded to 16 bits, as on tensor cores: within a thousandth of the values over 4,096 tokens. */
static void sixteen_bit_weights_widen_it_a_little(void **state)
{
    (void)state;
    const ekv_row_scale scale = { 8, 0.5, 1 / sqrt(4096) };
    ekv_row_shape shape = { EKV_DTYPE_F32, EKV_DTYPE_F32, 128, 4096, 4 };
    const double exact = ekv_tolerance_o(&shape, &scale, 0.01);
    shape.p_dtype = EKV_DTYPE_F16;
    const double f16 = ekv_tolerance_o(&shape, &scale, 0.01);
    shape.p_dtype = EKV_DTYPE_BF16;
    const double bf16 = ekv_tolerance_o(&shape, &scale, 0.01);
    assert_true(exact < f16 && f16 < bf16 && bf16 < 0.5 / 1000);
    assert_true(exact < 0.5 / 4096);
}

/* The exp of the CPU backend, which the derivation takes to be good to a few units in the last place: every 97th float
 * from 0 to -87 and what lies beyond. */
static void exp_is_within_two_units(void **state)
{
    (void)state;
    for (uint32_t bits = 0x80000000u; bits <= ekv_f32_bits(-87.0f); bits += 97) {
        const float x = ekv_bits_f32(bits), got = ekv_exp_nonpositive(x);
        const double exact = exp(x);
        if (!(fabs(got - exact) <= 2 * 0x1p-24 * exact))
            fail_msg("exp(%.9g) is %.9g, should be %.9g", (double)x, (double)got, exact);
    }
    assert_true(ekv_exp_nonpositive(0) == 1 && ekv_exp_nonpositive(-0.0f) == 1);
    for (float x = -87; x > -110; x -= 0.0078125f)
        if (!(fabs(ekv_exp_nonpositive(x) - exp(x)) <= 2 * 0x1p-24 * exp(x) + 0x1p-149))
            fail_msg("exp(%.9g) is %.9g, should be %.9g", (double)x, (double)ekv_exp_nonpositive(x), exp(x));
    assert_true(ekv_exp_nonpositive(-INFINITY) == 0 && ekv_exp_nonpositive(-8e6f) == 0);
    assert_true(isnan(ekv_exp_nonpositive(NAN)));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(exp_is_within_two_units),
        cmocka_unit_test(the_rounded_reference_passes),
        cmocka_unit_test(outputs_one_percent_off_are_caught),
        cmocka_unit_test(an_lse_off_by_a_thousandth_is_caught),
        cmocka_unit_test(a_token_left_out_is_caught),
        cmocka_unit_test(one_wrong_element_is_found),
        cmocka_unit_test(sixteen_bit_weights_widen_it_a_little),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
