/* SPDX-License-Identifier: Apache-2.0
 * The portable tile kernel, in vectors that GCC and Clang map to any machine's registers. */
#include "base/half.h"

enum { MOST_ROWS = 8, LANES = 4 };

typedef float vec __attribute__((vector_size(16)));
typedef float panel __attribute__((vector_size(32)));
typedef int32_t ipanel __attribute__((vector_size(32)));

#define vec_fma(a, b, c) ((a) * (b) + (c))
#define panel_fma(a, b, c) ((a) * (b) + (c))
#define panel_max(a, b) ((panel)((((a) > (b)) & (ipanel)(a)) | (~((a) > (b)) & (ipanel)(b))))

typedef uint32_t words __attribute__((vector_size(16)));
typedef uint16_t half_words __attribute__((vector_size(8)));

static inline words load_halves(const uint16_t *from)
{
    half_words value;
    memcpy(&value, from, sizeof value);
    return __builtin_convertvector(value, words);
}

/* ekv_f16_to_f32 (base/half.h) in each lane. */
static inline vec vec_from_f16(const uint16_t *from)
{
    const words bits = load_halves(from), magnitude = bits & 0x7FFFu;
    const words value = (words)((vec)(magnitude << 13) * 0x1p112f);
    return (vec)((bits & 0x8000u) << 16 | value | ((words)(magnitude >= 0x7C00u) & 0x7F800000u));
}

static inline vec vec_from_bf16(const uint16_t *from)
{
    return (vec)(load_halves(from) << 16);
}

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the first of two bf16 is the low half of a word");

static inline vec vec_from_even(const uint16_t *from)
{
    words value;
    memcpy(&value, from, sizeof value);
    return (vec)(value << 16);
}

static inline vec vec_from_odd(const uint16_t *from)
{
    words value;
    memcpy(&value, from, sizeof value);
    return (vec)(value & 0xFFFF0000u);
}

static inline void vec_split(vec *a, vec *b)
{
    const vec first = *a, second = *b;
    *a = (vec){ first[0], first[2], second[0], second[2] };
    *b = (vec){ first[1], first[3], second[1], second[3] };
}

static inline void vec_join(vec *a, vec *b)
{
    const vec first = *a, second = *b;
    *a = (vec){ first[0], second[0], first[1], second[1] };
    *b = (vec){ first[2], second[2], first[3], second[3] };
}

static inline vec vec_sums(vec a, vec b, vec c, vec d)
{
    return (vec){ (a[0] + a[2]) + (a[1] + a[3]), (b[0] + b[2]) + (b[1] + b[3]), (c[0] + c[2]) + (c[1] + c[3]),
                  (d[0] + d[2]) + (d[1] + d[3]) };
}

/* 16 accumulators do not fit 16 registers, but one pass for 8 rows converts elements once. */
#define TOKENS(rows) ((rows) == 8 ? 2 : (rows) == 4 ? 2 : (rows) == 2 ? 4 : 8)
#define CHUNKS(rows) ((rows) == 8 ? 2 : (rows) == 4 ? 2 : (rows) == 2 ? 4 : 8)

#include "cpu/tile_body.h"

const ekv_cpu_kernel ekv_cpu_kernel_generic = {
    .name = "generic",
    .id = EKV_KERNEL_GENERIC,
    .head_dim_step = 2 * LANES, /* what the backend takes */
    .q_dtype = EKV_DTYPE_F32,
    .p_dtype = EKV_DTYPE_F32,
    .run = run_tile,
    .write = tile_write,
    .exp2 = panel_exp2_all,
};
