/* SPDX-License-Identifier: Apache-2.0
 * Shape of the merge kernels, for the kernel and for the host that launches it. */
#ifndef EVENKV_CUDA_KERNELS_MERGE_SHAPE_H
#define EVENKV_CUDA_KERNELS_MERGE_SHAPE_H

enum {
    EKV_MERGE_THREADS = 256,
    EKV_MERGE_CTAS_PER_SM = 2 /* 128 registers a thread: with fewer the loads in flight spill */
};

/* The grid is the number of units (merges x merge_heads x slot_rows), at most what the SMs hold at once. */

#endif
