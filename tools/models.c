/* SPDX-License-Identifier: Apache-2.0 */
#include "models.h"

#include <stddef.h>
#include <string.h>

/* num_attention_heads, num_key_value_heads, head_dim and num_hidden_layers of each model's config.json (where that has
 * no head_dim: hidden_size / num_attention_heads); parameters by its model card. */
static const cli_model models[] = {
    { "qwen3-30b-a3b", 32, 4, 128, 48, 30.5, "Qwen/Qwen3-30B-A3B config.json" },
    { "qwen3-235b-a22b", 64, 4, 128, 94, 235, "Qwen/Qwen3-235B-A22B config.json" },
    { "qwen3-32b", 64, 8, 128, 64, 32.8, "Qwen/Qwen3-32B config.json" },
    { "llama3-8b", 32, 8, 128, 32, 8.03, "meta-llama/Llama-3.1-8B config.json" },
    { "llama3-70b", 64, 8, 128, 80, 70.6, "meta-llama/Llama-3.1-70B config.json" },
    { "llama3-70b-tp8", 8, 1, 128, 80, 8.825, "llama3-70b, what one of 8 tensor-parallel ranks has" },
    { "llama3-405b", 128, 8, 128, 126, 405.9, "meta-llama/Llama-3.1-405B config.json" },
    { "llama2-7b", 32, 32, 128, 32, 6.74, "meta-llama/Llama-2-7b-hf config.json" },
    { "mistral-7b", 32, 8, 128, 32, 7.25, "mistralai/Mistral-7B-v0.3 config.json" },
    { "mixtral-8x7b", 32, 8, 128, 32, 46.7, "mistralai/Mixtral-8x7B-v0.1 config.json" },
};

const cli_model *cli_model_get(int32_t index)
{
    return index >= 0 && (size_t)index < sizeof models / sizeof models[0] ? &models[index] : NULL;
}

const cli_model *cli_model_find(const char *name)
{
    const cli_model *model;
    for (int32_t i = 0; (model = cli_model_get(i)); i++)
        if (!strcmp(model->name, name))
            return model;
    return NULL;
}
