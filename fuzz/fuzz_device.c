/* SPDX-License-Identifier: Apache-2.0
 * ekv_device_parse: any text gives a device that plans accept, or a PARSE error with its origin and no device. */
#include "fuzz.h"

#include "evenkv/evenkv.h"

#include <stdbool.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    ekv_device device, before;
    memset(&device, 0xA5, sizeof device);
    device.struct_size = sizeof device;
    memcpy(&before, &device, sizeof device);
    ekv_status status = ekv_device_parse((const char *)data, size, "fuzz", &device);
    if (status) {
        FUZZ_CHECK(status == EKV_ERROR_PARSE);
        FUZZ_CHECK(!strncmp(ekv_last_error(), "fuzz:", 5));
        FUZZ_CHECK(!memcmp(&device, &before, sizeof device));
        return 0;
    }
    FUZZ_CHECK(memchr(device.name, 0, sizeof device.name) && device.name[0]);
    FUZZ_CHECK(device.num_sms >= 1 && device.num_sms <= 65536);
    FUZZ_CHECK(device.ctas_per_sm >= 1 && device.ctas_per_sm <= 64);
    FUZZ_CHECK(device.request_cost_tokens >= 0 && device.request_cost_tokens <= 65536);
    FUZZ_CHECK(device.read_gb_per_s >= 0 && device.read_gb_per_s <= 1e6);
    FUZZ_CHECK(device.read_gb_per_s_nominal >= 0 && device.read_gb_per_s_nominal <= 1e6);
    FUZZ_CHECK(device.bf16_tflops >= 0 && device.bf16_tflops <= 1e6);
    FUZZ_CHECK(device.l2_bytes >= 0 && device.memory_bytes >= 0);
    for (int s = 0; s < EKV_MAX_SYSTEMS; s++) {
        const ekv_system_model *m = &device.systems[s];
        const bool none = m->cta_gb_per_s == 0;
        FUZZ_CHECK(none == (m->sm_gb_per_s == 0) && none == (m->total_gb_per_s == 0));
        FUZZ_CHECK(m->cta_gb_per_s >= 0 && m->tile_us >= 0 && m->launch_us >= 0 && m->merge_us >= 0);
    }
    return 0;
}
