/* SPDX-License-Identifier: Apache-2.0
 * The CUDA driver API, found at run time: the library links no CUDA library, and one binary runs with and without
 * a driver. */
#ifndef EVENKV_CUDA_DRIVER_H
#define EVENKV_CUDA_DRIVER_H

#include "evenkv/evenkv.h"

#include <cuda.h>
#include <stdbool.h>
#include <stddef.h>

/* The oldest driver that can load what nvcc compiled is that of nvcc's own major version. */
#define EKV_DRIVER_MINIMUM (CUDA_VERSION / 1000 * 1000)

/* cuda.h maps these names to versioned ones (cuMemAlloc to cuMemAlloc_v2) by macros, which work on the members of
 * ekv_driver and on the names that are looked up alike. */
#define EKV_DRIVER_LIST(X)                         \
    X(cuInit)                                      \
    X(cuDriverGetVersion)                          \
    X(cuGetErrorName)                              \
    X(cuGetErrorString)                            \
    X(cuDeviceGet)                                 \
    X(cuDeviceGetCount)                            \
    X(cuDeviceGetName)                             \
    X(cuDeviceGetAttribute)                        \
    X(cuDeviceTotalMem)                            \
    X(cuDevicePrimaryCtxRetain)                    \
    X(cuDevicePrimaryCtxRelease)                   \
    X(cuCtxGetCurrent)                             \
    X(cuCtxGetDevice)                              \
    X(cuCtxPushCurrent)                            \
    X(cuCtxPopCurrent)                             \
    X(cuCtxSynchronize)                            \
    X(cuLibraryLoadData)                           \
    X(cuLibraryUnload)                             \
    X(cuLibraryGetKernelCount)                     \
    X(cuLibraryEnumerateKernels)                   \
    X(cuKernelGetName)                             \
    X(cuKernelGetFunction)                         \
    X(cuFuncGetAttribute)                          \
    X(cuFuncSetAttribute)                          \
    X(cuLaunchKernelEx)                            \
    X(cuOccupancyMaxActiveBlocksPerMultiprocessor) \
    X(cuMemAlloc)                                  \
    X(cuMemFree)                                   \
    X(cuMemHostAlloc)                              \
    X(cuMemFreeHost)                               \
    X(cuMemHostGetDevicePointer)                   \
    X(cuMemcpyAsync)                               \
    X(cuMemsetD8Async)                             \
    X(cuMemsetD32Async)                            \
    X(cuEventCreate)                               \
    X(cuEventDestroy)                              \
    X(cuEventRecord)                               \
    X(cuEventRecordWithFlags)                      \
    X(cuEventSynchronize)                          \
    X(cuEventElapsedTime)                          \
    X(cuStreamCreate)                              \
    X(cuStreamDestroy)                             \
    X(cuStreamSynchronize)                         \
    X(cuStreamWaitEvent)                           \
    X(cuStreamGetCtx)                              \
    X(cuStreamGetId)                               \
    X(cuStreamBeginCapture)                        \
    X(cuStreamEndCapture)                          \
    X(cuGraphInstantiate)                          \
    X(cuGraphLaunch)                               \
    X(cuGraphExecDestroy)                          \
    X(cuGraphDestroy)

typedef struct ekv_driver {
    void *handle; /* of dlopen */
#define EKV_DRIVER_MEMBER(function) __typeof__(function) *function;
    EKV_DRIVER_LIST(EKV_DRIVER_MEMBER)
#undef EKV_DRIVER_MEMBER
    /* By its own version: cuda.h of CUDA 12 and 13 map the plain name to different signatures. */
    CUresult(CUDAAPI *stream_capture_info)(CUstream stream, CUstreamCaptureStatus *status, cuuint64_t *id,
                                           CUgraph *graph, const CUgraphNode **dependencies, size_t *num_dependencies);
} ekv_driver;

/* Loads libcuda.so.1 and initialises it.  On failure returns false and writes why to missing[0, size). */
bool ekv_driver_load(ekv_driver *driver, char *missing, size_t size);
void ekv_driver_unload(ekv_driver *driver);

/* EKV_OK for CUDA_SUCCESS; else OUT_OF_MEMORY or DRIVER with the call's name and the driver's text. */
ekv_status ekv_driver_status(const ekv_driver *driver, CUresult result, const char *call);

/* EKV_DRIVER_CALL(driver, cuEventRecord, (event, stream)): an ekv_status. */
#define EKV_DRIVER_CALL(driver, function, arguments) \
    ekv_driver_status((driver), (driver)->function arguments, EKV_DRIVER_NAME(function))
#define EKV_DRIVER_NAME(function) EKV_DRIVER_NAME_(function)
#define EKV_DRIVER_NAME_(function) #function

#endif
