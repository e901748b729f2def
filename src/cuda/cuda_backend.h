/* SPDX-License-Identifier: Apache-2.0
 * The CUDA backend as the rest of the library sees it; needs no CUDA header. */
#ifndef EVENKV_CUDA_CUDA_BACKEND_H
#define EVENKV_CUDA_CUDA_BACKEND_H

#include "plan/backend.h"

extern const ekv_backend_ops ekv_cuda_backend;

/* Sets context->cuda, cuda_free and plan_copies, or, where there is no driver, no device or no CUDA in this build,
 * context->cuda_missing, which is no error.  Kernels are loaded here, so that no later call loads one.
 * Errors: INVALID_ARGUMENT (cuda_device is not among the devices), OUT_OF_MEMORY. */
ekv_status ekv_cuda_attach(ekv_context *context);

#endif
