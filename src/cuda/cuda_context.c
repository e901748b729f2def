/* SPDX-License-Identifier: Apache-2.0
 * Finds the device and its context, loads the kernels, launches them. */
#include "cuda/cuda_context.h"

#include "base/status.h"
#include "cuda/cuda_backend.h"
#include "cuda/cuda_plan.h"
#include "cuda/fatbin.h"

#include <stdio.h>
#include <string.h>

static const char *const kernel_names[] = {
#define EKV_MMA_KERNEL(name, bf16, head_dim, rows) #name,
#define EKV_SIMT_KERNEL(name, bf16, head_dim, rows) #name,
#define EKV_MERGE_KERNEL(name, bf16) #name,
#define EKV_STATES_KERNEL(name, dtype) #name,
#define EKV_REFERENCE_KERNEL(name, bf16) #name,
#define EKV_OTHER_KERNEL(name) #name,
#include "cuda/variants.def"
};

const char *ekv_cuda_kernel_name(int32_t kernel)
{
    return kernel_names[kernel];
}

/* ---- The current context ------------------------------------------------------------------------------- */

ekv_status ekv_cuda_enter(ekv_cuda *cuda, bool *entered)
{
    CUcontext current = NULL;
    ekv_status status = EKV_CUDA_CALL(cuda, cuCtxGetCurrent, (&current));
    *entered = false;
    if (status || current == cuda->current)
        return status;
    status = EKV_CUDA_CALL(cuda, cuCtxPushCurrent, (cuda->current));
    *entered = !status;
    return status;
}

void ekv_cuda_leave(ekv_cuda *cuda, bool entered)
{
    CUcontext popped;
    if (entered)
        cuda->driver.cuCtxPopCurrent(&popped);
}

/* ---- Device -------------------------------------------------------------------------------------------- */

/* Device and context by cuda_device (evenkv.h).  chosen is false where the machine has no device at all. */
static ekv_status choose_device(ekv_cuda *cuda, bool *chosen)
{
    int32_t wanted = cuda->context->options.cuda_device;
    int count = 0;
    CUcontext current = NULL;
    ekv_status status;
    *chosen = false;
    if ((status = EKV_CUDA_CALL(cuda, cuDeviceGetCount, (&count))))
        return status;
    if (!count) {
        snprintf(cuda->context->cuda_missing, sizeof cuda->context->cuda_missing, "no CUDA device");
        return EKV_OK;
    }
    if (wanted >= count)
        return ekv_fail(EKV_ERROR_INVALID_ARGUMENT, "cuda_device is %d; there are %d devices", wanted, count);
    if ((status = EKV_CUDA_CALL(cuda, cuCtxGetCurrent, (&current))))
        return status;
    if (current) {
        CUdevice device;
        if ((status = EKV_CUDA_CALL(cuda, cuCtxGetDevice, (&device))))
            return status;
        CUdevice ordinal = device;
        if (wanted >= 0 && (status = EKV_CUDA_CALL(cuda, cuDeviceGet, (&ordinal, wanted))))
            return status;
        if (ordinal == device) {
            cuda->device = device;
            cuda->current = current;
            *chosen = true;
            return EKV_OK;
        }
    }
    if ((status = EKV_CUDA_CALL(cuda, cuDeviceGet, (&cuda->device, wanted < 0 ? 0 : wanted))) ||
        (status = EKV_CUDA_CALL(cuda, cuDevicePrimaryCtxRetain, (&cuda->current, cuda->device))))
        return status;
    cuda->retained = *chosen = true;
    return EKV_OK;
}

static ekv_status attribute(ekv_cuda *cuda, CUdevice_attribute name, int32_t *value)
{
    int read = 0;
    ekv_status status = EKV_CUDA_CALL(cuda, cuDeviceGetAttribute, (&read, name, cuda->device));
    *value = read;
    return status;
}

static ekv_status read_attributes(ekv_cuda *cuda)
{
    int32_t major, minor;
    ekv_status status;
    if ((status = attribute(cuda, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, &cuda->num_sms)) ||
        (status = attribute(cuda, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, &major)) ||
        (status = attribute(cuda, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, &minor)) ||
        (status = attribute(cuda, CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN, &cuda->cta_shared)) ||
        (status = attribute(cuda, CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR, &cuda->sm_shared)) ||
        (status = attribute(cuda, CU_DEVICE_ATTRIBUTE_RESERVED_SHARED_MEMORY_PER_BLOCK, &cuda->shared_of_cta)) ||
        (status = attribute(cuda, CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR, &cuda->sm_registers)))
        return status;
    cuda->arch = major * 10 + minor;
    return EKV_OK;
}

/* ---- Kernels ------------------------------------------------------------------------------------------- */

/* An SM has four quarters with a register file each; a warp takes multiples of 256 registers (CUDA programming guide,
 * "hardware multithreading"). */
static int32_t warps_by_registers(const ekv_cuda *cuda, int32_t registers)
{
    return 4 * (cuda->sm_registers / 4 / (int32_t)ekv_round_up(ekv_max(registers, 1) * 32, 256));
}

/* Also makes the driver put the kernel into the context now, whatever CUDA_MODULE_LOADING says: a first launch
 * inside a graph capture could not. */
static ekv_status load_kernel(ekv_cuda *cuda, int32_t index, CUkernel kernel)
{
    CUfunction *function = &cuda->kernels[index];
    int shared = 0, registers = 0;
    ekv_status status;
    if ((status = EKV_CUDA_CALL(cuda, cuKernelGetFunction, (function, kernel))) ||
        (status = EKV_CUDA_CALL(cuda, cuFuncGetAttribute, (&shared, CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, *function))) ||
        (status = EKV_CUDA_CALL(cuda, cuFuncGetAttribute, (&registers, CU_FUNC_ATTRIBUTE_NUM_REGS, *function))) ||
        (status =
             EKV_CUDA_CALL(cuda, cuFuncSetAttribute,
                           (*function, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, cuda->cta_shared - shared))))
        return status;
    cuda->resident_warps[index] = warps_by_registers(cuda, registers);
    return EKV_OK;
}

/* The kernels of an image, by the names that the driver gives: asking an image for one that it lacks would be an
 * error of the API, which tools report. */
static ekv_status load_image(ekv_cuda *cuda, CUlibrary library)
{
    enum { MOST = EKV_CUDA_NUM_KERNELS };
    CUkernel kernels[MOST];
    unsigned int count = 0;
    ekv_status status = EKV_CUDA_CALL(cuda, cuLibraryGetKernelCount, (&count, library));
    if (status)
        return status;
    if (count > MOST)
        return ekv_fail(EKV_ERROR_DRIVER, "an image has %u kernels, the list %d", count, (int)MOST);
    if ((status = EKV_CUDA_CALL(cuda, cuLibraryEnumerateKernels, (kernels, count, library))))
        return status;
    for (unsigned int k = 0; k < count; k++) {
        const char *name = NULL;
        if ((status = EKV_CUDA_CALL(cuda, cuKernelGetName, (&name, kernels[k]))))
            return status;
        for (int32_t i = 0; i < EKV_CUDA_NUM_KERNELS; i++)
            if (!strcmp(name, kernel_names[i]) && (status = load_kernel(cuda, i, kernels[k])))
                return status;
    }
    return EKV_OK;
}

static ekv_status load_kernels(ekv_cuda *cuda)
{
    ekv_status status;
    for (const ekv_fatbin *fatbin = ekv_fatbins; fatbin->name; fatbin++) {
        if (cuda->num_libraries == EKV_CUDA_MAX_LIBRARIES)
            return ekv_fail(EKV_ERROR_DRIVER, "more than %d kernel images", EKV_CUDA_MAX_LIBRARIES);
        CUlibrary *library = &cuda->libraries[cuda->num_libraries];
        if ((status = EKV_CUDA_CALL(cuda, cuLibraryLoadData, (library, fatbin->image, NULL, NULL, 0, NULL, NULL, 0))))
            return status;
        cuda->num_libraries++;
        if ((status = load_image(cuda, *library)))
            return status;
    }
    for (int32_t i = 0; i < EKV_CUDA_NUM_KERNELS; i++)
        if (!cuda->kernels[i])
            return ekv_fail(EKV_ERROR_DRIVER, "kernel %s is not in the embedded images for sm_%d", kernel_names[i],
                            cuda->arch);
    /* Decode kernels live on shared memory; the driver's own choice may give them an SM with too little of it. */
    for (int32_t i = 0; i < EKV_CUDA_KERNEL_ekv_merge_bf16; i++)
        if ((status = EKV_CUDA_CALL(cuda, cuFuncSetAttribute,
                                    (cuda->kernels[i], CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT,
                                     CU_SHAREDMEM_CARVEOUT_MAX_SHARED))))
            return status;
    return EKV_OK;
}

ekv_status ekv_cuda_launch_kernel(ekv_cuda *cuda, int32_t kernel, const ekv_cuda_launch *launch, void **parameters)
{
    CUlaunchAttribute overlap = { .id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
                                  .value = { .programmaticStreamSerializationAllowed = 1 } };
    CUlaunchConfig config = { .gridDimX = launch->grid[0],
                              .gridDimY = launch->grid[1],
                              .gridDimZ = launch->grid[2],
                              .blockDimX = launch->threads,
                              .blockDimY = 1,
                              .blockDimZ = 1,
                              .sharedMemBytes = launch->shared_bytes,
                              .hStream = launch->stream,
                              .attrs = &overlap,
                              .numAttrs = launch->overlap && cuda->arch >= 90 };
    CUresult result = cuda->driver.cuLaunchKernelEx(&config, cuda->kernels[kernel], parameters, NULL);
    return ekv_driver_status(&cuda->driver, result, kernel_names[kernel]);
}

/* ---- Attach and detach --------------------------------------------------------------------------------- */

static void detach(void *argument)
{
    ekv_cuda *cuda = argument;
    bool entered = false;
    if (cuda->current && !ekv_cuda_enter(cuda, &entered)) {
        for (int32_t i = 0; i < cuda->num_libraries; i++)
            cuda->driver.cuLibraryUnload(cuda->libraries[i]);
        ekv_cuda_leave(cuda, entered);
    }
    if (cuda->retained)
        cuda->driver.cuDevicePrimaryCtxRelease(cuda->device);
    ekv_driver_unload(&cuda->driver);
    ekv_release(cuda->context, cuda);
}

static ekv_status start(ekv_cuda *cuda, bool *chosen)
{
    bool entered = false;
    ekv_status status = choose_device(cuda, chosen);
    if (status || !*chosen || (status = ekv_cuda_enter(cuda, &entered)))
        return status;
    if (!(status = read_attributes(cuda)))
        status = load_kernels(cuda);
    ekv_cuda_leave(cuda, entered);
    return status;
}

ekv_status ekv_cuda_attach(ekv_context *context)
{
    ekv_cuda *cuda = ekv_alloc(context, sizeof *cuda);
    if (!cuda)
        return ekv_fail(EKV_ERROR_OUT_OF_MEMORY, "no memory for the CUDA backend of %zu bytes", sizeof *cuda);
    memset(cuda, 0, sizeof *cuda);
    cuda->context = context;
    if (!ekv_driver_load(&cuda->driver, context->cuda_missing, sizeof context->cuda_missing)) {
        ekv_release(context, cuda);
        return EKV_OK;
    }
    bool chosen = false;
    ekv_status status = start(cuda, &chosen);
    if (status || !chosen) {
        detach(cuda);
        if (status == EKV_ERROR_INVALID_ARGUMENT)
            return status;
        /* A machine whose GPU cannot be used still has a CPU. */
        if (status)
            snprintf(context->cuda_missing, sizeof context->cuda_missing, "%s", ekv_last_error());
        ekv_log(context, EKV_LOG_WARNING, "no CUDA backend: %s", context->cuda_missing);
        return EKV_OK;
    }
    context->cuda = cuda;
    context->cuda_free = detach;
    context->plan_copies = &ekv_cuda_plan_copies;
    return EKV_OK;
}

/* ---- Description of the device ------------------------------------------------------------------------- */

/* The built-in model that the driver's name contains as a word ("NVIDIA H200" has h200, not h20). */
static bool find_model(const char *driver_name, ekv_device *device)
{
    char words[256];
    snprintf(words, sizeof words, "%s", driver_name);
    for (char *c = words; *c; c++)
        if (*c >= 'A' && *c <= 'Z')
            *c = (char)(*c - 'A' + 'a');
    char *rest = NULL;
    for (char *word = strtok_r(words, " -_", &rest); word; word = strtok_r(NULL, " -_", &rest))
        if (strcmp(word, "cpu") && !ekv_device_find(word, device))
            return true;
    return false;
}

ekv_status ekv_cuda_detect(ekv_context *context, ekv_device *device)
{
    ekv_cuda *cuda = context->cuda;
    char name[256] = "";
    size_t memory = 0;
    int32_t l2 = 0;
    ekv_status status;
    if ((status = EKV_CUDA_CALL(cuda, cuDeviceGetName, (name, (int)sizeof name - 1, cuda->device))) ||
        (status = EKV_CUDA_CALL(cuda, cuDeviceTotalMem, (&memory, cuda->device))) ||
        (status = attribute(cuda, CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE, &l2)))
        return status;
    ekv_device found = EKV_DEVICE_INIT;
    if (!find_model(name, &found))
        snprintf(found.name, sizeof found.name, "%.*s", (int)sizeof found.name - 1, name);
    found.num_sms = cuda->num_sms;
    found.sm_arch = cuda->arch;
    found.l2_bytes = l2;
    found.memory_bytes = (int64_t)memory;
    *device = found;
    return EKV_OK;
}
