/* SPDX-License-Identifier: Apache-2.0 */
#include "cuda/kernels/simt.cuh"

#include "cuda/variants.def"
