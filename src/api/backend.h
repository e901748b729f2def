/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EVENKV_API_BACKEND_H
#define EVENKV_API_BACKEND_H

#include "plan/backend.h"

/* The functions of a backend.  Errors: INVALID_ARGUMENT (no such backend), BACKEND_UNAVAILABLE with the reason. */
ekv_status ekv_backend_find(ekv_context *context, ekv_backend backend, const ekv_backend_ops **ops);

#endif
