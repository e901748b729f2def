/* SPDX-License-Identifier: Apache-2.0 */
#include "cuda/cuda_timeline.h"

#include "base/status.h"
#include "cuda/cuda_bench.h"
#include "cuda/cuda_decode.h"

static ekv_status record(ekv_plan *plan, const ekv_tensors *tensors, const ekv_decode_options *options, void *workspace,
                         void *device, ekv_stamp *host, size_t size)
{
    ekv_status status;
    if ((status = ekv_cuda_fill(plan->context, device, 0, size)) ||
        (status = ekv_cuda_decode_stamped(plan, tensors, options, workspace, device)) ||
        (status = ekv_cuda_stream_wait(plan->context, options->stream)))
        return status;
    return ekv_cuda_copy(plan->context, host, device, size);
}

ekv_status ekv_cuda_timeline_record(ekv_plan *plan, const ekv_tensors *tensors, const ekv_decode_options *options,
                                    void *workspace, ekv_cuda_timeline *timeline)
{
    ekv_context *context = plan->context;
    if (plan->options.on_device)
        return ekv_fail(EKV_ERROR_UNSUPPORTED, "timelines are of plans made on the host");
    ekv_cuda_timeline created = { .num_tiles = plan->num_tiles,
                                  .num_merges = plan->num_merges * plan->heads,
                                  .heads = plan->heads };
    const size_t size = (size_t)(created.num_tiles + created.num_merges) * sizeof *created.stamps;
    void *device;
    created.stamps = ekv_alloc(context, size);
    if (!created.stamps)
        return ekv_fail(EKV_ERROR_OUT_OF_MEMORY, "no memory for a timeline of %zu bytes", size);
    ekv_status status = ekv_cuda_alloc(context, size, &device);
    if (!status) {
        status = record(plan, tensors, options, workspace, device, created.stamps, size);
        ekv_cuda_free(context, device);
    }
    if (status) {
        ekv_release(context, created.stamps);
        return status;
    }
    *timeline = created;
    return EKV_OK;
}

void ekv_cuda_timeline_free(ekv_context *context, ekv_cuda_timeline *timeline)
{
    ekv_release(context, timeline->stamps);
    timeline->stamps = NULL;
}
