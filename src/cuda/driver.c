/* SPDX-License-Identifier: Apache-2.0 */
#include "cuda/driver.h"

#include "base/status.h"

#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

/* POSIX lets dlsym return functions as void pointers, which ISO C cannot convert. */
static bool look_up(void *handle, const char *name, void *function, char *missing, size_t size)
{
    void *symbol = dlsym(handle, name);
    if (!symbol) {
        snprintf(missing, size, "libcuda.so.1 has no %s; a driver for CUDA %d.0 or newer is needed", name,
                 EKV_DRIVER_MINIMUM / 1000);
        return false;
    }
    memcpy(function, &symbol, sizeof symbol);
    return true;
}

static bool look_up_all(ekv_driver *driver, char *missing, size_t size)
{
#define EKV_DRIVER_LOOK_UP(function)                                                           \
    if (!look_up(driver->handle, EKV_DRIVER_NAME(function), &driver->function, missing, size)) \
        return false;
    EKV_DRIVER_LIST(EKV_DRIVER_LOOK_UP)
#undef EKV_DRIVER_LOOK_UP
    return look_up(driver->handle, "cuStreamGetCaptureInfo_v2", &driver->stream_capture_info, missing, size);
}

static bool initialise(ekv_driver *driver, char *missing, size_t size)
{
    CUresult result = driver->cuInit(0);
    if (result != CUDA_SUCCESS) {
        const char *text = "an unknown error";
        driver->cuGetErrorString(result, &text);
        snprintf(missing, size, "cuInit: %s", text);
        return false;
    }
    int version = 0;
    driver->cuDriverGetVersion(&version);
    if (version < EKV_DRIVER_MINIMUM) {
        snprintf(missing, size, "the driver is for CUDA %d.%d; this library needs one for %d.0 or newer",
                 version / 1000, version % 1000 / 10, EKV_DRIVER_MINIMUM / 1000);
        return false;
    }
    return true;
}

bool ekv_driver_load(ekv_driver *driver, char *missing, size_t size)
{
    driver->handle = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (!driver->handle) {
        snprintf(missing, size, "no CUDA driver: %s", dlerror());
        return false;
    }
    if (look_up_all(driver, missing, size) && initialise(driver, missing, size))
        return true;
    ekv_driver_unload(driver);
    return false;
}

void ekv_driver_unload(ekv_driver *driver)
{
    if (driver->handle)
        dlclose(driver->handle);
    driver->handle = NULL;
}

ekv_status ekv_driver_status(const ekv_driver *driver, CUresult result, const char *call)
{
    if (result == CUDA_SUCCESS)
        return EKV_OK;
    const char *name = "CUDA_ERROR", *text = "an unknown error";
    driver->cuGetErrorName(result, &name);
    driver->cuGetErrorString(result, &text);
    return ekv_fail(result == CUDA_ERROR_OUT_OF_MEMORY ? EKV_ERROR_OUT_OF_MEMORY : EKV_ERROR_DRIVER, "%s: %s (%s, %d)",
                    call, text, name, (int)result);
}
