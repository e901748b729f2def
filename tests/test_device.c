/* SPDX-License-Identifier: Apache-2.0 */
#include "base/pool.h"
#include "evenkv/evenkv.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static const char valid[] = "name = toy\n"
                            "num_sms = 16 # comment\n"
                            "sm_arch = 90\n"
                            "ctas_per_sm = 2\n"
                            "request_cost_tokens = 12\n"
                            "read_gb_per_s_nominal = 4800\n"
                            "read_gb_per_s = 4160.5\n"
                            "bf16_tflops = 9.89e2\n"
                            "l2_bytes = 62914560\n"
                            "memory_bytes = 150754820096\n"
                            "projected = 0\n";

/* Expects an error of this status that has `part` in its text, and the device untouched. */
static void refuse(ekv_status expected, const char *text, size_t size, const char *part)
{
    ekv_device device, before;
    memset(&device, 0xA5, sizeof device); /* padding included */
    device.struct_size = sizeof device;
    memcpy(&before, &device, sizeof device);
    assert_int_equal(ekv_device_parse(text, size, "f.device", &device), expected);
    assert_memory_equal(&device, &before, sizeof device);
    if (!strstr(ekv_last_error(), part))
        fail_msg("'%s' is not in the error '%s'", part, ekv_last_error());
}

/* The valid text with its line for `key` replaced by `line` ("" drops it). */
static void refuse_line(const char *key, const char *line, const char *part)
{
    char text[1024], pattern[64];
    snprintf(pattern, sizeof pattern, "%s =", key);
    const char *at = strstr(valid, pattern), *next = strchr(at, '\n') + 1;
    snprintf(text, sizeof text, "%.*s%s%s", (int)(at - valid), valid, line, next);
    refuse(EKV_ERROR_PARSE, text, strlen(text), part);
}

static void every_built_in_model_parses(void **state)
{
    (void)state;
    static const char *const names[] = { "a100", "h100", "h200", "h20", "cpu" };
    for (int32_t i = 0; i < 5; i++) {
        assert_string_equal(ekv_device_name(i), names[i]);
        assert_non_null(ekv_device_text(names[i]));
        ekv_device device = EKV_DEVICE_INIT;
        assert_int_equal(ekv_device_find(names[i], &device), EKV_OK);
        assert_string_equal(device.name, names[i]);
    }
    assert_null(ekv_device_name(5));
    assert_null(ekv_device_name(-1));
    assert_null(ekv_device_name(INT32_MAX));
    assert_null(ekv_device_text("b200"));
    assert_null(ekv_device_text(NULL));
}

/* Each `key = value` line of a model says where its value comes from. */
static void every_constant_has_its_source(void **state)
{
    (void)state;
    for (int32_t i = 0; ekv_device_name(i); i++)
        for (const char *line = ekv_device_text(ekv_device_name(i)); *line;) {
            const char *end = strchr(line, '\n');
            assert_non_null(end);
            const char *equal = memchr(line, '=', (size_t)(end - line));
            bool self_evident = !strncmp(line, "name ", 5) || !strncmp(line, "projected ", 10);
            if (equal && line[0] != '#' && !self_evident)
                assert_non_null(memchr(equal, '#', (size_t)(end - equal)));
            line = end + 1;
        }
}

static void models_have_the_published_figures(void **state)
{
    (void)state;
    ekv_device d = EKV_DEVICE_INIT;
    assert_int_equal(ekv_device_find("h200", &d), EKV_OK);
    assert_int_equal(d.num_sms, 132);
    assert_int_equal(d.sm_arch, 90);
    assert_int_equal(d.ctas_per_sm, 2);
    assert_int_equal(d.request_cost_tokens, 32);
    assert_true(d.read_gb_per_s_nominal == 4800 && d.read_gb_per_s == 4160 && d.bf16_tflops == 989);
    assert_int_equal(d.l2_bytes, 60 << 20);
    assert_int_equal(d.memory_bytes, INT64_C(143771) << 20);
    assert_int_equal(d.projected, 0);
    assert_int_equal(ekv_device_find("h20", &d), EKV_OK);
    assert_int_equal(d.num_sms, 78);
    assert_true(d.bf16_tflops == 148 && d.read_gb_per_s == 0 && d.projected == 1);
    assert_int_equal(ekv_device_find("a100", &d), EKV_OK);
    assert_int_equal(d.num_sms, 108);
    assert_int_equal(d.sm_arch, 80);
}

/* num_sms = auto: the threads of a context that asks for none. */
static void the_cpu_has_the_threads_of_a_default_context(void **state)
{
    (void)state;
    ekv_device d = EKV_DEVICE_INIT;
    unsetenv("EKV_NUM_THREADS");
    assert_int_equal(ekv_device_find("cpu", &d), EKV_OK);
    const int32_t cpus = ekv_num_cpus();
    assert_int_equal(d.num_sms, cpus < 1024 ? cpus : 1024);
    assert_int_equal(d.sm_arch, 0);
    assert_int_equal(d.ctas_per_sm, 1);
    setenv("EKV_NUM_THREADS", "7", 1);
    assert_int_equal(ekv_device_find("cpu", &d), EKV_OK);
    assert_int_equal(d.num_sms, 7);
    setenv("EKV_NUM_THREADS", "0", 1);
    assert_int_equal(ekv_device_find("cpu", &d), EKV_ERROR_INVALID_ARGUMENT);
    assert_non_null(strstr(ekv_last_error(), "EKV_NUM_THREADS is '0'"));
    assert_int_equal(d.num_sms, 7);
    unsetenv("EKV_NUM_THREADS");
    refuse_line("num_sms", "num_sms = auto\n", "goes with sm_arch 0 only, not 90");
}

static void a_valid_text_gives_all_members(void **state)
{
    (void)state;
    ekv_device d = EKV_DEVICE_INIT;
    assert_int_equal(ekv_device_parse(valid, sizeof valid - 1, "f.device", &d), EKV_OK);
    assert_string_equal(d.name, "toy");
    assert_int_equal(d.struct_size, sizeof d);
    assert_int_equal(d.num_sms, 16);
    assert_int_equal(d.sm_arch, 90);
    assert_true(d.read_gb_per_s == 4160.5 && d.bf16_tflops == 989.0);
    assert_int_equal(d.memory_bytes, INT64_C(150754820096));

    /* The same with CRLF, tabs, no spaces round '=', and no newline at the end. */
    char text[1024];
    size_t size = 0;
    for (const char *c = valid; *c; c++) {
        if (*c == '\n')
            text[size++] = '\r';
        if (*c == ' ')
            text[size++] = '\t';
        else
            text[size++] = *c;
    }
    ekv_device crlf = EKV_DEVICE_INIT;
    assert_int_equal(ekv_device_parse(text, size - 1, "crlf.device", &crlf), EKV_OK);
    assert_memory_equal(&crlf, &d, sizeof d);

    /* The same after a byte order mark, which some editors write. */
    snprintf(text, sizeof text, "\xEF\xBB\xBF%s", valid);
    ekv_device marked = EKV_DEVICE_INIT;
    assert_int_equal(ekv_device_parse(text, strlen(text), "marked.device", &marked), EKV_OK);
    assert_memory_equal(&marked, &d, sizeof d);
}

static void a_long_origin_does_not_hide_what_is_wrong(void **state)
{
    (void)state;
    char origin[1000];
    memset(origin, 'o', sizeof origin);
    strcpy(origin + 600, "/f.device");
    static const char *const texts[] = { "num_sms = 0\n", "name = a b\n", "x = 1\n", "x\n", "\n" };
    static const char *const parts[] = { "1..65536", "without spaces", "not a key", "not `key", "projected" };
    for (int i = 0; i < 5; i++) {
        ekv_device d = EKV_DEVICE_INIT;
        assert_int_equal(ekv_device_parse(texts[i], strlen(texts[i]), origin, &d), EKV_ERROR_PARSE);
        assert_non_null(strstr(ekv_last_error(), "o/f.device:1: "));
        assert_non_null(strstr(ekv_last_error(), parts[i]));
    }
}

/* A newer program gets 0 for what this library does not know, and may plan with it. */
static void a_newer_struct_is_filled(void **state)
{
    (void)state;
    struct newer_device {
        ekv_device device;
        int64_t newer, beyond;
    } d = { EKV_DEVICE_INIT, 77, 78 };
    const size_t size = d.device.struct_size = offsetof(struct newer_device, beyond);
    assert_int_equal(ekv_device_find("h200", &d.device), EKV_OK);
    assert_int_equal(d.device.struct_size, size);
    assert_int_equal(d.device.num_sms, 132);
    assert_int_equal(d.device.projected, 0);
    assert_true(d.newer == 0 && d.beyond == 78);
    d.newer = 77;
    assert_int_equal(ekv_device_parse(valid, sizeof valid - 1, "f.device", &d.device), EKV_OK);
    assert_int_equal(d.device.num_sms, 16);
    assert_true(d.newer == 0 && d.beyond == 78);
}

static void bad_lines_are_named_with_their_number(void **state)
{
    (void)state;
    refuse_line("sm_arch", "sm_archs = 90\n", "f.device:3: 'sm_archs' is not a key");
    refuse_line("sm_arch", "SM_ARCH = 90\n", "'SM_ARCH' is not a key");
    refuse_line("sm_arch", "= 90\n", "f.device:3: '' is not a key");
    refuse_line("sm_arch", "sm_arch 90\n", "f.device:3: 'sm_arch 90' is not `key = value`");
    refuse_line("sm_arch", "num_sms = 16\nsm_arch = 90\n", "f.device:3: num_sms is repeated");
    refuse_line("sm_arch", "", "f.device:10: the device lacks sm_arch");
    refuse_line("sm_arch", "# sm_arch = 90\n", "lacks sm_arch");
    refuse_line("num_sms", "num_sms =\n", "f.device:2: num_sms is ''");
    refuse_line("num_sms", "num_sms = 0\n", "f.device:2: num_sms is '0'; it must be a whole number 1..65536");
    refuse_line("num_sms", "num_sms = 65537\n", "'65537'");
    refuse_line("num_sms", "num_sms = 1e2\n", "'1e2'");
    refuse_line("num_sms", "num_sms = 16 = 16\n", "'16 = 16'");
    refuse_line("num_sms", "num_sms = automatic\n", "'automatic'");
    refuse_line("bf16_tflops", "bf16_tflops = nan\n", "f.device:8: bf16_tflops is 'nan'");
    refuse_line("bf16_tflops", "bf16_tflops = inf\n", "'inf'");
    refuse_line("bf16_tflops", "bf16_tflops = -1\n", "'-1'; it must be a number 0..");
    refuse_line("bf16_tflops", "bf16_tflops = 989 TFLOP/s\n", "'989 TFLOP/s'");
    refuse_line("l2_bytes", "l2_bytes = 99999999999999999999\n", "f.device:9: l2_bytes");
    refuse_line("projected", "projected = yes\n", "f.device:11: projected is 'yes'");
    refuse_line("name", "name = \n", "f.device:1: name is ''");
    refuse_line("name", "name = two words\n", "'two words'");
    refuse_line("name", "name = caf\xC3\xA9\n",
                "'caf?"
                "?'");
    refuse_line("name", "name = a123456789012345678901234567890z\n", "1..31 characters");
}

static void what_is_no_device_text_is_refused(void **state)
{
    (void)state;
    refuse(EKV_ERROR_PARSE, "", 0,
           "f.device:1: the device lacks name, num_sms, sm_arch, ctas_per_sm, request_cost_tokens, "
           "read_gb_per_s_nominal, read_gb_per_s, bf16_tflops, l2_bytes, memory_bytes, projected");
    refuse(EKV_ERROR_PARSE, "\n\n", 2, "f.device:2: the device lacks name");
    refuse(EKV_ERROR_PARSE, "name\0= toy\n", 11, "f.device:1: byte 0x00 at column 5 is not text");
    refuse(EKV_ERROR_PARSE, "# a\n\x1F\x8B\x08\n", 8, "f.device:2: byte 0x1F at column 1");
    refuse(EKV_ERROR_PARSE, "# a\rb\n", 6, "byte 0x0D at column 4");
}

static void bad_arguments_are_refused(void **state)
{
    (void)state;
    ekv_device d = EKV_DEVICE_INIT;
    assert_int_equal(ekv_device_find("b200", &d), EKV_ERROR_NOT_FOUND);
    assert_string_equal(ekv_last_error(), "no device is called 'b200'; known are a100, h100, h200, h20, cpu");
    assert_int_equal(ekv_device_find(NULL, &d), EKV_ERROR_INVALID_ARGUMENT);
    assert_int_equal(ekv_device_find("h200", NULL), EKV_ERROR_INVALID_ARGUMENT);
    assert_int_equal(ekv_device_parse(NULL, 0, "f", &d), EKV_ERROR_INVALID_ARGUMENT);
    assert_int_equal(ekv_device_parse(valid, 5, NULL, &d), EKV_ERROR_INVALID_ARGUMENT);
    d.struct_size = 3;
    assert_int_equal(ekv_device_find("h200", &d), EKV_ERROR_INVALID_ARGUMENT);
    assert_non_null(strstr(ekv_last_error(), "ekv_device.struct_size is 3"));
    assert_int_equal(d.num_sms, 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_built_in_model_parses),
        cmocka_unit_test(every_constant_has_its_source),
        cmocka_unit_test(models_have_the_published_figures),
        cmocka_unit_test(the_cpu_has_the_threads_of_a_default_context),
        cmocka_unit_test(a_valid_text_gives_all_members),
        cmocka_unit_test(a_long_origin_does_not_hide_what_is_wrong),
        cmocka_unit_test(a_newer_struct_is_filled),
        cmocka_unit_test(bad_lines_are_named_with_their_number),
        cmocka_unit_test(what_is_no_device_text_is_refused),
        cmocka_unit_test(bad_arguments_are_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
