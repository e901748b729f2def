/* SPDX-License-Identifier: Apache-2.0
 * The CUDA backend of a build without nvcc. */
#include "cuda/cuda_backend.h"

#include <stdio.h>

const ekv_backend_ops ekv_cuda_backend = { 0 }; /* never called: context->cuda stays NULL */

ekv_status ekv_cuda_attach(ekv_context *context)
{
    snprintf(context->cuda_missing, sizeof context->cuda_missing, "this library was built without CUDA");
    return EKV_OK;
}
