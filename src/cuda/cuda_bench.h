/* SPDX-License-Identifier: Apache-2.0
 * What tests and benches need around ekv_decode on a GPU: memory, random tensors, streams and graphs, the clock, the
 * plain read, a reference.  Needs no CUDA header.  Not part of the public API; the context must have a GPU. */
#ifndef EVENKV_CUDA_CUDA_BENCH_H
#define EVENKV_CUDA_CUDA_BENCH_H

#include "plan/plan.h"

/* ---- Memory: device pointers; all calls are synchronous ------------------------------------------------ */

ekv_status ekv_cuda_alloc(ekv_context *context, size_t size, void **device);
void ekv_cuda_free(ekv_context *context, void *device);
/* Between host and device in any direction; after everything enqueued before. */
ekv_status ekv_cuda_copy(ekv_context *context, void *target, const void *source, size_t size);
ekv_status ekv_cuda_fill(ekv_context *context, void *device, uint8_t byte, size_t size);
/* Element i becomes range * (2 u_i - 1), u_i in [0, 1) being output i of SplitMix64(seed). */
ekv_status ekv_cuda_fill_random(ekv_context *context, void *device, ekv_dtype dtype, int64_t count, uint64_t seed,
                                float range);

/* Fills what the requests have of K and V, uniform in [-1, 1), and nothing else of those tensors: values depend on
 * seed, request, token and head, not on pages or strides.  tensors: resolved, with device pointers; only k, v, their
 * strides and the page table are looked at.  kv_len: device, [batch_size]. */
ekv_status ekv_cuda_fill_cache(ekv_context *context, const ekv_batch *batch, const ekv_tensors *tensors,
                               const int32_t *kv_len, uint64_t seed);

/* ---- Streams and graphs: CUstream and CUgraphExec as void * -------------------------------------------- */

ekv_status ekv_cuda_stream_create(ekv_context *context, void **stream);
void ekv_cuda_stream_free(ekv_context *context, void *stream);
ekv_status ekv_cuda_stream_wait(ekv_context *context, void *stream);
/* Work of `second` from here on waits for that of `first` up to here, also within a capture. */
ekv_status ekv_cuda_stream_order(ekv_context *context, void *first, void *second);
/* Captures what `work` enqueues on the stream, which is not the default one. */
ekv_status ekv_cuda_graph_create(ekv_context *context, void *stream, ekv_status (*work)(void *argument, void *stream),
                                 void *argument, void **graph);
ekv_status ekv_cuda_graph_launch(ekv_context *context, void *graph, void *stream);
void ekv_cuda_graph_free(ekv_context *context, void *graph);

/* Enqueues a kernel that holds `sms` SMs whole for `ns`. */
ekv_status ekv_cuda_occupy(ekv_context *context, void *stream, int32_t sms, int64_t ns);

/* ---- The clock ------------------------------------------------------------------------------------------ */

/* Two events and a buffer for flushes. */
typedef struct ekv_cuda_clock ekv_cuda_clock;

ekv_status ekv_cuda_clock_create(ekv_context *context, ekv_cuda_clock **clock);
void ekv_cuda_clock_free(ekv_cuda_clock *clock);
/* Time in us between events round what `work` enqueues.  flush: first writes 256 MiB, so that the caches hold none
 * of work's data, and dirty lines instead. */
ekv_status ekv_cuda_clock_time(ekv_cuda_clock *clock, void *stream, bool flush,
                               ekv_status (*work)(void *argument, void *stream), void *argument, double *us);

/* ---- Plain read ----------------------------------------------------------------------------------------- */

typedef struct ekv_cuda_read_shape {
    int32_t threads; /* a CTA */
    int32_t ctas_per_sm;
    int32_t loads; /* of 16 bytes in flight a thread */
} ekv_cuda_read_shape;

/* The fixed list; returns its length. */
int32_t ekv_cuda_read_shapes(const ekv_cuda_read_shape **shapes);
/* Enqueues a read of exactly `size` bytes, a multiple of 16; sink: 4 bytes of device memory. */
ekv_status ekv_cuda_read(ekv_context *context, const ekv_cuda_read_shape *shape, const void *device, size_t size,
                         void *sink, void *stream);

/* ---- Reference ------------------------------------------------------------------------------------------ */

/* Decode in double precision on the GPU, straight from tensors and lengths.  Host arrays of the result, as those of
 * ekv_reference (cpu/reference.h): o [batch_size][q_heads][head_dim], lse (natural) and scale, three doubles,
 * [batch_size][q_heads].  tensors: resolved, device pointers.  head_dim at most 256, bf16 or fp16. */
ekv_status ekv_cuda_reference(ekv_context *context, const ekv_batch *batch, const ekv_tensors *tensors, double *o,
                              double *lse, double *scale);

/* ---- Launches of a plan --------------------------------------------------------------------------------- */

typedef struct ekv_cuda_launch_info {
    const char *kernel;
    int32_t warps_per_head; /* mma */
    int32_t threads;
    int32_t shared_bytes;  /* dynamic */
    int32_t resident_ctas; /* an SM, as the driver computes it */
} ekv_cuda_launch_info;

/* plan: made with options.cuda. */
ekv_status ekv_cuda_launch_info_get(const ekv_plan *plan, ekv_kernel kernel, ekv_cuda_launch_info *info);

/* Driver version x 1000 (13000 is 13.0). */
int32_t ekv_cuda_driver_version(ekv_context *context);

#endif
