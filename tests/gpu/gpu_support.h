/* SPDX-License-Identifier: Apache-2.0
 * What the test programs of the CUDA backend share.  Functions fail the running cmocka test. */
#ifndef EVENKV_TESTS_GPU_SUPPORT_H
#define EVENKV_TESTS_GPU_SUPPORT_H

#include "../support.h"
#include "cuda/cuda_bench.h"

/* The context of all tests of a program, on the first GPU, and its device. */
extern ekv_context *gpu_context;
extern ekv_device gpu_device;

/* Runs the tests, or says why not and returns 77, which ctest shows as skipped. */
int gpu_main(int (*run)(void));

/* What a problem is made of; start with GPU_SPEC_INIT. */
typedef struct gpu_spec {
    ekv_dtype dtype;
    int32_t head_dim;
    int32_t kv_heads;
    int32_t group;
    int32_t page_size;
    int32_t batch_size;
    const int32_t *kv_len; /* [batch_size] */
    ekv_layout layout;
    bool block_table;     /* a slice of a wider table, its rows permuted; else CSR */
    int32_t row_padding;  /* elements after each row of K, V, Q and O and after each LSE: a multiple of 8 */
    int64_t page_padding; /* elements after each page of K and V */
    uint64_t seed;
} gpu_spec;
#define GPU_SPEC_INIT                                                                    \
    {                                                                                    \
        EKV_DTYPE_BF16, 128, 2, 4, 16, 0, NULL, EKV_LAYOUT_NHD, false, 0, 0, UINT64_C(1) \
    }

/* A batch with tensors on the GPU.  Whatever no decode may read is NaN; O and LSE are NaN between guard bands. */
typedef struct gpu_problem {
    ekv_batch batch;
    ekv_tensors tensors; /* resolved, device pointers */
    ekv_reference reference;
    int32_t row_padding;
    void *cache;  /* of K, then V */
    void *tables; /* the page table's arrays */
    void *q;
    void *outputs; /* guard, O, guard, LSE, guard */
    size_t cache_size, tables_size, q_size, o_size, lse_size, outputs_size;
} gpu_problem;

/* False where the GPU has too little memory. */
bool gpu_problem_create(const gpu_spec *spec, gpu_problem *problem);
void gpu_problem_free(gpu_problem *problem);
/* O and LSE become NaN again. */
void gpu_problem_reset(gpu_problem *problem);
/* Computes the reference for the lengths of problem->batch again. */
void gpu_problem_set_lengths(gpu_problem *problem, const int32_t *kv_len, int32_t batch_size);

/* The inputs in host memory. */
typedef struct gpu_host_tensors {
    ekv_tensors tensors;
    unsigned char *cache, *tables, *q; /* owned */
} gpu_host_tensors;

gpu_host_tensors gpu_host_tensors_read(const gpu_problem *problem);
void gpu_host_tensors_free(gpu_host_tensors *host);

/* O and LSE on the host, with everything round them. */
typedef struct gpu_output {
    unsigned char *bytes; /* [problem->outputs_size] */
} gpu_output;

gpu_output gpu_output_read(const gpu_problem *problem);
void gpu_output_free(gpu_output *output);
/* Fails unless the output is within the tolerance of the reference and nothing else was written. */
void gpu_output_check(const gpu_problem *problem, const ekv_plan *plan, const ekv_decode_options *options,
                      const gpu_output *output, const char *what);

/* A plan with its workspace. */
typedef struct gpu_run {
    ekv_plan *plan;
    void *workspace; /* full of NaN at first */
    size_t workspace_size;
    ekv_decode_options options;
} gpu_run;

/* kernel, stream: of the decode.  False where the plan cannot be made for these lengths or by this kernel, with
 * status UNSUPPORTED; any other error fails. */
bool gpu_run_create(const gpu_problem *problem, const char *planner, const ekv_plan_options *options, ekv_kernel kernel,
                    void *stream, gpu_run *run);
void gpu_run_free(gpu_run *run);
ekv_status gpu_decode(gpu_run *run, const gpu_problem *problem);
/* Decodes twice, into fresh outputs, waits, checks the first and that the second has the same bits. */
void gpu_run_check(gpu_run *run, gpu_problem *problem, const char *what);

#endif
