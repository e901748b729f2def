/* SPDX-License-Identifier: Apache-2.0 */
#include "base/context.h"

#include "cuda/cuda_backend.h"

ekv_status ekv_context_create(const ekv_context_options *options, ekv_context **context)
{
    ekv_context *created;
    ekv_status status = context ? ekv_context_create_host(options, &created) : ekv_context_create_host(options, NULL);
    if (status)
        return status;
    if (created->options.cuda_device != -2 && (status = ekv_cuda_attach(created))) {
        ekv_context_free(created);
        return status;
    }
    *context = created;
    return EKV_OK;
}
