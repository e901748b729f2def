/* SPDX-License-Identifier: Apache-2.0
 * Which backends there are: the one place that names them. */
#include "api/backend.h"

#include "base/status.h"
#include "cpu/cpu_backend.h"
#include "cuda/cuda_backend.h"

ekv_status ekv_backend_find(ekv_context *context, ekv_backend backend, const ekv_backend_ops **ops)
{
    switch (backend) {
    case EKV_BACKEND_CPU: *ops = &ekv_cpu_backend; return EKV_OK;
    case EKV_BACKEND_CUDA:
        if (context->cuda) {
            *ops = &ekv_cuda_backend;
            return EKV_OK;
        }
        return ekv_fail(EKV_ERROR_BACKEND_UNAVAILABLE, "the CUDA backend is unavailable: %s", context->cuda_missing);
    }
    return ekv_fail(EKV_ERROR_INVALID_ARGUMENT, "backend %d is not an ekv_backend", (int)backend);
}

ekv_status ekv_device_detect(ekv_context *context, ekv_device *device)
{
    if (!context || !device)
        return ekv_fail(EKV_ERROR_INVALID_ARGUMENT, "%s is NULL", context ? "device" : "context");
    const ekv_backend_ops *ops;
    ekv_status status = ekv_backend_find(context, context->cuda ? EKV_BACKEND_CUDA : EKV_BACKEND_CPU, &ops);
    ekv_device found = EKV_DEVICE_INIT;
    if (status || (status = ops->detect(context, &found)))
        return status;
    return ekv_struct_write(device, &found, sizeof found, EKV_DEVICE_FIRST_SIZE, "ekv_device");
}
