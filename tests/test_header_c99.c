/* SPDX-License-Identifier: Apache-2.0
 * The public header stands alone, may be included twice, and is strict C99; every struct's _INIT fits it. */
#include <evenkv/evenkv.h>

#include <evenkv/evenkv.h>

int test_header(void);

/* Also compiled as C++, see test_header_cxx.cpp. */
int test_header(void)
{
    ekv_context_options context_options = EKV_CONTEXT_OPTIONS_INIT;
    ekv_device device = EKV_DEVICE_INIT;
    ekv_batch batch = EKV_BATCH_INIT;
    ekv_plan_options plan_options = EKV_PLAN_OPTIONS_INIT;
    ekv_plan_info info = EKV_PLAN_INFO_INIT;
    ekv_tensors tensors = EKV_TENSORS_INIT;
    ekv_decode_options decode_options = EKV_DECODE_OPTIONS_INIT;
    ekv_merge_args merge_args = EKV_MERGE_ARGS_INIT;
    ekv_sim_options sim_options = EKV_SIM_OPTIONS_INIT;
    ekv_timeline_info timeline_info = EKV_TIMELINE_INFO_INIT;
    int failed = 0;

    failed += context_options.struct_size != sizeof context_options || context_options.cuda_device != -1;
    failed += device.struct_size != sizeof device;
    failed += batch.struct_size != sizeof batch || batch.page_size != 16 || batch.q_len != 1;
    failed += batch.q_dtype != EKV_DTYPE_BF16 || batch.kv_dtype != EKV_DTYPE_BF16 || batch.window_left != -1;
    failed += plan_options.struct_size != sizeof plan_options || plan_options.request_cost != -1;
    failed += plan_options.dispatch != EKV_DISPATCH_DEFAULT;
    failed += info.struct_size != sizeof info || info.kv_chunk_tokens != -1 || info.num_splits_bound != -1;
    failed += tensors.struct_size != sizeof tensors || tensors.k_scale != 1 || tensors.v_scale != 1;
    failed += decode_options.struct_size != sizeof decode_options || decode_options.backend != EKV_BACKEND_CPU;
    failed += merge_args.struct_size != sizeof merge_args || merge_args.num_states != 1;
    failed += sim_options.struct_size != sizeof sim_options || sim_options.system != -1;
    failed += timeline_info.struct_size != sizeof timeline_info || device.systems[0].tile_us != 0;
    failed += EKV_OK != 0 || ekv_version_string()[0] != '0' + EKV_VERSION_MAJOR;
    failed += sizeof(ekv_tile) != 32;
    return failed;
}

int main(void)
{
    return test_header();
}
