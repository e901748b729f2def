/* SPDX-License-Identifier: Apache-2.0 */
#include "base/context.h"

#include "cuda/cuda_backend.h"

ekv_status ekv_context_create(const ekv_context_options *options, ekv_context **context)
{
    ekv_status status = ekv_context_create_host(options, context);
    if (status || (*context)->options.cuda_device == -2)
        return status;
    status = ekv_cuda_attach(*context);
    if (status) {
        ekv_context_free(*context);
        *context = NULL;
    }
    return status;
}
