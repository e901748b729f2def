/* SPDX-License-Identifier: Apache-2.0 */
#include "cuda/kernels/prepare.cuh"

#define EVEN_KERNELS(suffix, invariant)                                         \
    extern "C" __global__ void __launch_bounds__(EKV_PREPARE_THREADS)           \
        ekv_prepare_##suffix(const __grid_constant__ ekv_prepare_even_params p) \
    {                                                                           \
        prepare::prepare_even<invariant>(p);                                    \
    }                                                                           \
    extern "C" __global__ void __launch_bounds__(EKV_EMIT_EVEN_THREADS)         \
        ekv_emit_##suffix(const __grid_constant__ ekv_prepare_even_params p)    \
    {                                                                           \
        prepare::emit_even<invariant>(p);                                       \
    }

EVEN_KERNELS(even, 0)
EVEN_KERNELS(even_invariant, 1)

extern "C" __global__ void __launch_bounds__(EKV_PREPARE_THREADS)
    ekv_prepare_fa3(const __grid_constant__ ekv_prepare_fa3_params p)
{
    prepare::prepare_fa3(p);
}

extern "C" __global__ void __launch_bounds__(EKV_EMIT_FA3_THREADS)
    ekv_emit_fa3(const __grid_constant__ ekv_prepare_fa3_params p)
{
    prepare::emit_fa3(p);
}
