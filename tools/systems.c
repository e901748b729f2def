/* SPDX-License-Identifier: Apache-2.0 */
#include "systems.h"

#include "base/half.h"
#include "plan/fa3_rule.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

static bool is(const ekv_plan *plan, const char *planner)
{
    return !strcmp(plan->planner->name, planner);
}

static bool is_fa3(const ekv_plan *plan)
{
    return !strncmp(plan->planner->name, "fa3", 3);
}

/* ---- SGLang ------------------------------------------------------------------------------------------ */

/* sglang 0005834, python/sglang/srt/layers/attention/flashinfer_backend.py, should_use_tensor_core, as long as the
 * environment's SGLANG_FLASHINFER_USE_TENSOR_CORE does not decide. */
static void choose_flashinfer(ekv_dtype kv_dtype, int32_t group, cli_sglang *sglang)
{
    enum { TENSOR_CORE_GROUP = 4 };
    const int32_t bytes = ekv_dtype_size(kv_dtype);
    const bool tensor_core = bytes == 1 || (bytes == 2 && group >= TENSOR_CORE_GROUP);
    sglang->flashinfer_planner = tensor_core ? "flashinfer-tensor-core" : "flashinfer-cuda-core";
    if (bytes == 1)
        snprintf(sglang->flashinfer_reason, sizeof sglang->flashinfer_reason,
                 "an FP8 KV cache goes to the tensor cores whatever the group is");
    else if (bytes == 2)
        snprintf(sglang->flashinfer_reason, sizeof sglang->flashinfer_reason,
                 "%s with %d query head%s per KV head: SGLang wants at least %d of them to fill a tensor-core tile",
                 cli_dtype_name(kv_dtype), group, group > 1 ? "s" : "", TENSOR_CORE_GROUP);
    else
        snprintf(sglang->flashinfer_reason, sizeof sglang->flashinfer_reason, "%s has no tensor-core path",
                 cli_dtype_name(kv_dtype));
}

/* python/sglang/srt/server_args.py of sglang since its pull request 17425: the default attention backend of models
 * without MLA and without speculative decoding that has topk > 1, and what overrides it. */
cli_sglang cli_sglang_choose(const ekv_device *device, ekv_dtype kv_dtype, int32_t group)
{
    cli_sglang sglang = { 0 };
    if (!device->sm_arch) {
        sglang.default_reason = "the device is no GPU";
        return sglang;
    }
    if (device->sm_arch >= 100) {
        sglang.default_reason = "SGLang's choice is known here for Ampere, Ada and Hopper only";
        return sglang;
    }
    choose_flashinfer(kv_dtype, group, &sglang);
    if (device->sm_arch != 90) {
        sglang.default_backend = "flashinfer";
        sglang.default_planner = sglang.flashinfer_planner;
        sglang.default_reason = "FlashInfer is its default attention backend on GPUs other than Hopper and Blackwell";
    } else if (kv_dtype == EKV_DTYPE_FP8_E5M2) {
        sglang.default_backend = "triton";
        sglang.default_reason = "its default on Hopper, FlashAttention-3, takes no FP8 KV cache but e4m3";
    } else if (kv_dtype == EKV_DTYPE_F32) {
        sglang.default_reason = "its default on Hopper, FlashAttention-3, takes no fp32 KV cache";
    } else {
        sglang.default_backend = "fa3";
        sglang.default_planner = "fa3";
        sglang.default_reason =
            "on Hopper its default attention backend is FlashAttention-3 for models without MLA, since "
            "FlashInfer's attention became slower there with 0.6.1 (SGLang issue 17411)";
    }
    return sglang;
}

const char *cli_sglang_path(const cli_sglang *sglang, const char *planner)
{
    if (sglang->default_planner && !strcmp(sglang->default_planner, planner))
        return "the default";
    if (sglang->flashinfer_planner && !strcmp(sglang->flashinfer_planner, planner))
        return "with --attention-backend flashinfer";
    /* flashattention_backend.py sets num_splits to 1 then. */
    if (sglang->default_planner && !strcmp(sglang->default_planner, "fa3") && !strcmp(planner, "fa3-nosplit"))
        return "with --enable-deterministic-inference";
    return NULL;
}

/* ---- Kernels ----------------------------------------------------------------------------------------- */

/* __global__ functions of FlashInfer's include/flashinfer/attention/{decode,prefill,cascade,persistent_template}.cuh
 * and csrc/xqa/mha.cu, and kernel classes of FlashAttention's hopper/ (which run in cutlass::device_kernel). */
void cli_kernels(const ekv_plan *plan, cli_text *names)
{
    const char *merge = plan->split_kv ? ", PersistentVariableLengthMergeStatesKernel" : "";
    if (is(plan, "flashinfer-cuda-core"))
        cli_print(names, "BatchDecodeWithPagedKVCacheKernel%s", merge);
    else if (is(plan, "flashinfer-tensor-core"))
        cli_print(names, "BatchPrefillWithPagedKVCacheKernel%s", merge);
    else if (is(plan, "flashinfer-batch-attention"))
        cli_print(names, "PersistentKernelTemplate");
    else if (is(plan, "flashinfer-xqa"))
        cli_print(names, "kernel_mha");
    else if (is_fa3(plan))
        cli_print(names, "flash::prepare_varlen_num_blocks_kernel, flash::FlashAttnFwdSm%d%s",
                  plan->device.sm_arch >= 90 ? 90 : 80,
                  plan->num_splits_bound > 1 ? ", flash::FlashAttnFwdCombine" : "");
}

/* ---- Thresholds -------------------------------------------------------------------------------------- */

static cli_threshold cuda_core_threshold(const ekv_plan *plan)
{
    const int64_t max_grid = (int64_t)plan->num_sms * plan->resident_ctas;
    cli_threshold t = { .batch = ekv_ceil_div(max_grid, plan->heads),
                        .inclusive = true,
                        .effect = "split-KV is switched off: a request is one tile per KV head" };
    snprintf(t.rule, sizeof t.rule, "requests x %d KV heads >= %d SMs x %d resident CTAs", plan->heads, plan->num_sms,
             plan->resident_ctas);
    return t;
}

static cli_threshold tensor_core_threshold(const ekv_plan *plan)
{
    const int64_t budget = (int64_t)2 * plan->num_sms / plan->heads;
    cli_threshold t = { .batch = ekv_ceil_div(budget, plan->m_blocks),
                        .inclusive = true,
                        .effect = "every request takes a work item, so that none is left to split with" };
    snprintf(t.rule, sizeof t.rule, "floor(2 x %d SMs / %d KV heads) = %" PRId64 " work items, %d per request",
             plan->num_sms, plan->heads, budget, plan->m_blocks);
    return t;
}

static cli_threshold fa3_threshold(const ekv_plan *plan)
{
    if (is(plan, "fa3-nosplit") || plan->num_splits_bound == 1) {
        cli_threshold t = { .batch = 0, .effect = "a request is one tile per KV head and m_block" };
        snprintf(t.rule, sizeof t.rule,
                 is(plan, "fa3-nosplit") ? "splits are switched off"
                                         : "the static bound on splits is 1 for this shape");
        return t;
    }
    cli_threshold t = { .batch = EKV_FA3_PREPARE_REQUESTS,
                        .effect = "requests are no longer split: each is one tile per KV head and m_block" };
    snprintf(t.rule, sizeof t.rule, "its prepare kernel sees %d requests in one CTA (32 warps of 31)",
             EKV_FA3_PREPARE_REQUESTS);
    return t;
}

static cli_threshold xqa_threshold(const ekv_plan *plan)
{
    cli_threshold t = { .batch = plan->num_sms / (2 * plan->heads),
                        .effect =
                            "the one number of splits for all requests, floor(SMs / (requests x KV heads)), is 1" };
    snprintf(t.rule, sizeof t.rule, "2 x requests x %d KV heads > %d SMs", plan->heads, plan->num_sms);
    return t;
}

static cli_threshold batch_attention_threshold(const ekv_plan *plan)
{
    enum { MAX_WORKS = 65536 }; /* max_total_num_works in FlashInfer's include/flashinfer/attention/scheduler.cuh */
    cli_threshold t = { .batch = MAX_WORKS / plan->heads, .effect = "its host plan throws" };
    snprintf(t.rule, sizeof t.rule, "more than %d (chunk, KV head) pairs", (int)MAX_WORKS);
    return t;
}

cli_threshold cli_threshold_of(const ekv_plan *plan)
{
    cli_threshold t = { .batch = -1, .rule = "none", .effect = "cuts do not depend on the number of requests" };
    if (is(plan, "flashinfer-cuda-core"))
        t = cuda_core_threshold(plan);
    else if (is(plan, "flashinfer-tensor-core"))
        t = tensor_core_threshold(plan);
    else if (is(plan, "flashinfer-batch-attention"))
        t = batch_attention_threshold(plan);
    else if (is(plan, "flashinfer-xqa"))
        t = xqa_threshold(plan);
    else if (is_fa3(plan))
        t = fa3_threshold(plan);
    else if (is(plan, "none"))
        t = (cli_threshold){ .batch = 0, .rule = "it never splits", .effect = "a request is one tile per head" };
    t.reached = t.batch >= 0 && (t.inclusive ? plan->batch.batch_size >= t.batch : plan->batch.batch_size > t.batch);
    return t;
}
