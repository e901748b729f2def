/* SPDX-License-Identifier: Apache-2.0
 * What the CUDA backend hangs on an ekv_context: the driver, the device, the kernels. */
#ifndef EVENKV_CUDA_CUDA_CONTEXT_H
#define EVENKV_CUDA_CUDA_CONTEXT_H

#include "base/context.h"
#include "cuda/driver.h"

#include <stdbool.h>

/* EKV_CUDA_KERNEL_ekv_merge_bf16 and so on, in the order of variants.def. */
enum {
#define EKV_MMA_KERNEL(name, bf16, head_dim, rows) EKV_CUDA_KERNEL_##name,
#define EKV_SIMT_KERNEL(name, bf16, head_dim, rows) EKV_CUDA_KERNEL_##name,
#define EKV_MERGE_KERNEL(name, bf16) EKV_CUDA_KERNEL_##name,
#define EKV_STATES_KERNEL(name, dtype) EKV_CUDA_KERNEL_##name,
#define EKV_REFERENCE_KERNEL(name, bf16) EKV_CUDA_KERNEL_##name,
#define EKV_OTHER_KERNEL(name) EKV_CUDA_KERNEL_##name,
#include "cuda/variants.def"
    EKV_CUDA_NUM_KERNELS
};

enum { EKV_CUDA_MAX_LIBRARIES = 16 };

typedef struct ekv_cuda {
    ekv_context *context;
    ekv_driver driver;
    CUdevice device;
    CUcontext current; /* the CUDA context that everything runs in */
    bool retained;     /* it is the device's primary one, retained here */
    int32_t num_sms;
    int32_t arch;          /* compute capability x 10 */
    int32_t cta_shared;    /* bytes of shared memory that a CTA may have */
    int32_t sm_shared;     /* ... that the CTAs of an SM share */
    int32_t shared_of_cta; /* ... that every CTA costs beyond its own */
    int32_t sm_registers;
    int32_t num_libraries;
    CUlibrary libraries[EKV_CUDA_MAX_LIBRARIES];
    CUfunction kernels[EKV_CUDA_NUM_KERNELS];
    int32_t resident_warps[EKV_CUDA_NUM_KERNELS]; /* of the kernel that the registers of an SM are enough for */
} ekv_cuda;

/* EKV_CUDA_CALL(cuda, cuEventRecord, (event, stream)): an ekv_status. */
#define EKV_CUDA_CALL(cuda, function, arguments) EKV_DRIVER_CALL(&(cuda)->driver, function, arguments)

/* Name of a kernel, for texts. */
const char *ekv_cuda_kernel_name(int32_t kernel);

/* Makes the CUDA context current; *entered says whether ekv_cuda_leave has to undo that. */
ekv_status ekv_cuda_enter(ekv_cuda *cuda, bool *entered);
void ekv_cuda_leave(ekv_cuda *cuda, bool entered);

typedef struct ekv_cuda_launch {
    uint32_t grid[3];
    uint32_t threads;
    uint32_t shared_bytes; /* dynamic */
    CUstream stream;
    bool overlap; /* may start before the kernel in front of it has ended; waits for it by griddepcontrol */
} ekv_cuda_launch;

/* parameters: as cuLaunchKernel takes them.  The context is current. */
ekv_status ekv_cuda_launch_kernel(ekv_cuda *cuda, int32_t kernel, const ekv_cuda_launch *launch, void **parameters);

/* ekv_backend_ops.detect */
ekv_status ekv_cuda_detect(ekv_context *context, ekv_device *device);

#endif
