/* SPDX-License-Identifier: Apache-2.0
 * The CPU backend: executes any plan on the threads of the context. */
#ifndef EVENKV_CPU_CPU_BACKEND_H
#define EVENKV_CPU_CPU_BACKEND_H

#include "plan/backend.h"

extern const ekv_backend_ops ekv_cpu_backend;

/* ekv_backend_ops.merge_states of the CPU (merge_states.c). */
ekv_status ekv_cpu_merge_states(ekv_context *context, const ekv_merge_args *args);

#endif
