/* SPDX-License-Identifier: Apache-2.0 */
#include "cuda/kernels/merge.cuh"

#include "cuda/variants.def"
