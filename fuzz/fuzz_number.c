/* SPDX-License-Identifier: Apache-2.0
 * The number parsers: what they take has the value that strtoll and strtod give it, and is in range; what they
 * refuse leaves the value alone. */
#include "fuzz.h"

#include "base/number.h"

#include <errno.h>
#include <math.h>
#include <string.h>

enum { MAX_SIZE = 128 };

static void check_integers(const char *text, size_t size)
{
    int64_t wide = -77;
    int32_t narrow = -77;
    ekv_status status = ekv_parse_int64(text, size, "n", INT64_MIN, INT64_MAX, &wide);
    ekv_status narrow_status = ekv_parse_int32(text, size, "n", -1000, INT32_MAX, &narrow);
    FUZZ_CHECK(status == EKV_OK || (status == EKV_ERROR_PARSE && wide == -77));
    FUZZ_CHECK(narrow_status == EKV_OK || (narrow_status == EKV_ERROR_PARSE && narrow == -77));
    if (status == EKV_OK) {
        char *end;
        errno = 0;
        FUZZ_CHECK(strtoll(text, &end, 10) == wide && errno == 0 && end == text + size);
    }
    FUZZ_CHECK((narrow_status == EKV_OK) == (status == EKV_OK && wide >= -1000 && wide <= INT32_MAX));
    FUZZ_CHECK(narrow_status || narrow == wide);
}

static void check_double(const char *text, size_t size)
{
    double real = -77;
    ekv_status status = ekv_parse_double(text, size, "x", -1e6, 1e300, &real);
    FUZZ_CHECK(status == EKV_OK || (status == EKV_ERROR_PARSE && real == -77));
    if (status == EKV_OK) {
        char *end;
        FUZZ_CHECK(strtod(text, &end) == real && end == text + size);
        FUZZ_CHECK(isfinite(real) && real >= -1e6 && real <= 1e300);
        FUZZ_CHECK(strspn(text, "-+.0123456789eE") == size);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    char text[MAX_SIZE + 1], quoted[EKV_QUOTE_SIZE];
    FUZZ_CHECK(strlen(ekv_quote((const char *)data, size, quoted)) < EKV_QUOTE_SIZE);
    if (size > MAX_SIZE)
        return 0;
    memcpy(text, data, size); /* strtoll and strtod want it terminated */
    text[size] = 0;
    check_integers(text, size);
    check_double(text, size);
    return 0;
}
