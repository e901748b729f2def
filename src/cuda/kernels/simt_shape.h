/* SPDX-License-Identifier: Apache-2.0
 * Shape of the simt kernels, for the kernel and for the host that launches it. */
#ifndef EVENKV_CUDA_KERNELS_SIMT_SHAPE_H
#define EVENKV_CUDA_KERNELS_SIMT_SHAPE_H

#include "base/portable.h"

enum {
    EKV_SIMT_THREADS = 128,
    EKV_SIMT_MAX_ROWS = 8 /* query heads of a thread: 64 fp32 of Q and 64 of O */
};

/* Static shared memory holds everything: the kernels are launched with EKV_SIMT_THREADS threads and no dynamic
 * shared memory. */

/* The variant's packed rows for a group: 1, 2, 4 or 8.  Groups of 9 to 16 run as two sets of 8 rows. */
EKV_INLINE EKV_HD int32_t ekv_simt_rows(int32_t group)
{
    return group > 4 ? 8 : group > 2 ? 4 : group;
}

#endif
