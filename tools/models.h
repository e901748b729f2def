/* SPDX-License-Identifier: Apache-2.0
 * Attention shapes and sizes of published models. */
#ifndef EVENKV_TOOLS_MODELS_H
#define EVENKV_TOOLS_MODELS_H

#include <stdint.h>

typedef struct cli_model {
    const char *name;
    int32_t q_heads, kv_heads, head_dim;
    int32_t layers;
    double parameters;  /* billions, experts that a token does not use included */
    const char *source; /* the published configuration that the numbers are from */
} cli_model;

/* NULL past the last. */
const cli_model *cli_model_get(int32_t index);
/* NULL if there is none of that name. */
const cli_model *cli_model_find(const char *name);

#endif
