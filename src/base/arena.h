/* SPDX-License-Identifier: Apache-2.0
 * Carves aligned pieces out of one block.  With base NULL it only counts, so that the size that is promised
 * and the layout that is used come from the same code. */
#ifndef EVENKV_BASE_ARENA_H
#define EVENKV_BASE_ARENA_H

#include <stddef.h>
#include <stdint.h>

enum { EKV_ARENA_ALIGN = 256 };

typedef struct ekv_arena {
    unsigned char *base;
    size_t used;
} ekv_arena;

static inline void *ekv_arena_take(ekv_arena *arena, size_t size)
{
    size_t begin = (arena->used + EKV_ARENA_ALIGN - 1) / EKV_ARENA_ALIGN * EKV_ARENA_ALIGN;
    arena->used = begin + size;
    return arena->base ? arena->base + begin : NULL;
}

/* An arena over memory that is there, as static analysis cannot see by itself. */
static inline ekv_arena ekv_arena_over(void *base)
{
    if (!base)
        __builtin_unreachable();
    return (ekv_arena){ base, 0 };
}

#endif
