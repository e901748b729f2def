/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EVENKV_TRACE_GROW_H
#define EVENKV_TRACE_GROW_H

#include "base/context.h"

#include <string.h>

/* A larger block with the first `used` bytes of `pointer` (may be NULL), which is released.  NULL if there is no
 * memory; `pointer` then stays as it was. */
static inline void *ekv_grow(ekv_context *context, void *pointer, size_t used, size_t size)
{
    void *grown = ekv_alloc(context, size);
    if (!grown || !pointer)
        return grown;
    memcpy(grown, pointer, used);
    ekv_release(context, pointer);
    return grown;
}

#endif
