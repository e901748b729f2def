/* SPDX-License-Identifier: Apache-2.0
 * What a fuzz target is, to libFuzzer and to replay.c. */
#ifndef EVENKV_FUZZ_FUZZ_H
#define EVENKV_FUZZ_FUZZ_H

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

/* data: `size` bytes of any content, not terminated.  Returns 0. */
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/* Unlike assert it stands in every build. */
#define FUZZ_CHECK(condition)                                                                         \
    do {                                                                                              \
        if (!(condition)) {                                                                           \
            fprintf(stderr, "%s:%d: FUZZ_CHECK(%s) does not hold\n", __FILE__, __LINE__, #condition); \
            abort();                                                                                  \
        }                                                                                             \
    } while (0)

#endif
