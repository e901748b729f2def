/* SPDX-License-Identifier: Apache-2.0
 * Which tile kernel runs: what the build has, what the CPU and the operating system have, what the shape allows. */
#include "base/status.h"
#include "cpu/tile_kernel.h"

extern const ekv_cpu_kernel ekv_cpu_kernel_generic, ekv_cpu_kernel_avx2, ekv_cpu_kernel_avx512,
    ekv_cpu_kernel_avx512_bf16, ekv_cpu_kernel_amx_bf16;

typedef struct choice {
    const ekv_cpu_kernel *kernel;
    bool (*runs_here)(void);
} choice;

static bool always(void)
{
    return true;
}

#ifdef EVENKV_X86_64
#include <cpuid.h>
#include <stdatomic.h>
#ifdef __linux__
#include <sys/syscall.h>
#include <unistd.h>
#endif

/* An answer that costs microseconds, as CPUID does where a hypervisor answers it: asked once. */
static bool once(_Atomic int *known, bool (*ask)(void))
{
    enum { UNKNOWN, NO, YES };
    int has = atomic_load_explicit(known, memory_order_relaxed);
    if (has == UNKNOWN) {
        has = ask() ? YES : NO;
        atomic_store_explicit(known, has, memory_order_relaxed);
    }
    return has == YES;
}

/* __builtin_cpu_supports knows F16C in some compilers only. */
static bool ask_f16c(void)
{
    unsigned a, b, c, d;
    return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
}

static bool has_f16c(void)
{
    static _Atomic int known;
    return once(&known, ask_f16c);
}

/* __builtin_cpu_supports also asks whether the operating system keeps the registers. */
static bool has_avx2(void)
{
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c();
}

static bool has_avx512(void)
{
    return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}

static bool has_avx512_bf16(void)
{
    return has_avx512() && __builtin_cpu_supports("avx512bf16");
}

/* The tile registers are in the CPU, and Linux allows this process to use them (Documentation/arch/x86/xstate.rst):
 * it keeps 8 KiB more for each thread that does. */
static bool ask_amx_bf16(void)
{
#ifdef __linux__
    enum { EDX_AMX_BF16 = 1 << 22, EDX_AMX_TILE = 1 << 24, ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18 };
    unsigned a, b, c, d;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && d & EDX_AMX_BF16 && d & EDX_AMX_TILE &&
           syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
#else
    return false;
#endif
}

static bool has_amx_bf16(void)
{
    static _Atomic int known;
    return has_avx512_bf16() && once(&known, ask_amx_bf16);
}
#endif

/* In the order of speed, as docs/cpu.md has it: of those that can, the last is taken. */
static const choice choices[] = {
    { &ekv_cpu_kernel_generic, always },
#ifdef EVENKV_X86_64
    { &ekv_cpu_kernel_avx2, has_avx2 },     { &ekv_cpu_kernel_avx512_bf16, has_avx512_bf16 },
    { &ekv_cpu_kernel_avx512, has_avx512 }, { &ekv_cpu_kernel_amx_bf16, has_amx_bf16 },
#endif
};

enum { NUM_CHOICES = sizeof choices / sizeof choices[0] };

const ekv_cpu_kernel *ekv_cpu_kernel_at(int32_t index, bool *runs_here)
{
    if (index < 0 || index >= NUM_CHOICES)
        return NULL;
    *runs_here = choices[index].runs_here();
    return choices[index].kernel;
}

static bool can_do(const ekv_cpu_kernel *kernel, const ekv_batch *batch)
{
    const bool bf16 = batch->q_dtype == EKV_DTYPE_BF16 && batch->kv_dtype == EKV_DTYPE_BF16;
    return batch->head_dim % kernel->head_dim_step == 0 && (bf16 || !kernel->bf16_only);
}

static ekv_status check_wanted(const choice *wanted, const ekv_batch *batch)
{
    const ekv_cpu_kernel *kernel = wanted->kernel;
    if (!wanted->runs_here())
        return ekv_fail(EKV_ERROR_UNSUPPORTED, "kernel %s: this CPU has not the instructions", kernel->name);
    if (can_do(kernel, batch))
        return EKV_OK;
    return ekv_fail(EKV_ERROR_UNSUPPORTED, "kernel %s wants head_dim in steps of %d%s; head_dim is %d", kernel->name,
                    kernel->head_dim_step, kernel->bf16_only ? " and Q, K and V of bf16" : "", batch->head_dim);
}

ekv_status ekv_cpu_kernel_choose(const ekv_batch *batch, ekv_kernel wanted, const ekv_cpu_kernel **kernel)
{
    for (int32_t i = NUM_CHOICES - 1; i >= 0; i--) {
        const choice *c = &choices[i];
        if (wanted != EKV_KERNEL_AUTO && c->kernel->id != wanted)
            continue;
        ekv_status status = wanted == EKV_KERNEL_AUTO ? EKV_OK : check_wanted(c, batch);
        if (status)
            return status;
        if (!can_do(c->kernel, batch) || !c->runs_here())
            continue;
        *kernel = c->kernel;
        return EKV_OK;
    }
    return ekv_fail(EKV_ERROR_UNSUPPORTED, "kernel %d is none of this build's CPU backend", (int)wanted);
}
