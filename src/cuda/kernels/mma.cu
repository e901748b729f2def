/* SPDX-License-Identifier: Apache-2.0 */
#include "cuda/kernels/mma.cuh"

#include "cuda/variants.def"
