/* SPDX-License-Identifier: Apache-2.0
 * What this machine's CPU could do at best in a decode: its read rate and its arithmetic, in GB/s of K and V.
 *
 *     cpu_roof [THREADS [GROUP]]      default: EKV_NUM_THREADS, else one for each CPU; 8 query heads a KV head
 *
 * Prints `what,threads,gb_per_s`: the best of ROUNDS rounds, in which the measurements take turns.
 * read: each thread reads its own part of 256 MiB, which is not in the caches.  A decode can be no faster.
 * fma:  fp32 multiply-adds of registers alone, as bytes of K and V: an element of K or V costs GROUP of them.  A decode
 *       in fp32 arithmetic can be no faster, whatever the memory; so with 16-bit K and V often not at the read rate. */
#include "base/context.h"
#include "base/number.h"
#include "timing.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#ifdef __x86_64__
#include <immintrin.h>
#endif

enum { ROUNDS = 15, BYTES = 256 << 20, LINE = 64, CHAINS = 12, STEPS = 1 << 20, MAX_LANES = 16 };

typedef struct roof {
    ekv_pool *pool;
    unsigned char *data; /* [BYTES] */
    void (*fma)(float *sums);
    float sums[1024][MAX_LANES * 4]; /* [thread]: so that nothing is left out */
} roof;

static void read_part(void *argument, int32_t thread)
{
    typedef float line __attribute__((vector_size(LINE)));
    roof *r = argument;
    const int64_t part = BYTES / LINE / ekv_pool_num_threads(r->pool) * LINE;
    line sum = { 0 }, words;
    for (const unsigned char *at = r->data + thread * part, *end = at + part; at < end; at += LINE) {
        __builtin_prefetch(at + 4096); /* as far ahead as a plain read of `evenkv bench` */
        memcpy(&words, at, sizeof words);
        sum += words;
    }
    memcpy(r->sums[thread], &sum, sizeof sum);
}

#ifdef __x86_64__
/* STEPS steps of CHAINS independent chains, in registers. */
#define DEFINE_FMA(name, isa, vec, fmadd, set1, store)         \
    __attribute__((target(isa))) static void name(float *sums) \
    {                                                          \
        vec chain[CHAINS];                                     \
        const vec factor = set1(0.5f);                         \
        for (int i = 0; i < CHAINS; i++)                       \
            chain[i] = set1((float)i);                         \
        for (int step = 0; step < STEPS; step++)               \
            REPEAT_12(chain, fmadd, factor);                   \
        for (int i = 1; i < CHAINS; i++)                       \
            chain[0] += chain[i];                              \
        store(sums, chain[0]);                                 \
    }
#define ONE(chain, fmadd, factor, i) chain[i] = fmadd(chain[i], factor, factor)
#define REPEAT_4(chain, fmadd, factor, i)                                                             \
    ONE(chain, fmadd, factor, i), ONE(chain, fmadd, factor, i + 1), ONE(chain, fmadd, factor, i + 2), \
        ONE(chain, fmadd, factor, i + 3)
#define REPEAT_12(chain, fmadd, factor) \
    REPEAT_4(chain, fmadd, factor, 0), REPEAT_4(chain, fmadd, factor, 4), REPEAT_4(chain, fmadd, factor, 8)

DEFINE_FMA(fma_avx2, "avx2,fma", __m256, _mm256_fmadd_ps, _mm256_set1_ps, _mm256_storeu_ps)
DEFINE_FMA(fma_avx512, "avx512f", __m512, _mm512_fmadd_ps, _mm512_set1_ps, _mm512_storeu_ps)
#endif

static void fma_part(void *argument, int32_t thread)
{
    roof *r = argument;
    r->fma(r->sums[thread]);
}

static double rate(roof *r, void (*work)(void *, int32_t), double amount)
{
    const double start = now_us();
    ekv_pool_run(r->pool, work, r);
    return amount / (now_us() - start) / 1e3;
}

static void measure(roof *r, int32_t lanes, int32_t group)
{
    const int32_t threads = ekv_pool_num_threads(r->pool);
    double read = 0, fma = 0;
    for (int round = 0; round < ROUNDS; round++) {
        const double now = rate(r, read_part, BYTES);
        read = now > read ? now : read;
        if (!lanes)
            continue;
        const double adds = rate(r, fma_part, (double)threads * STEPS * CHAINS * lanes);
        fma = adds > fma ? adds : fma;
    }
    printf("read,%d,%.2f\n", threads, read);
    if (lanes)
        printf("fma 16-bit,%d,%.2f\nfma fp32,%d,%.2f\n", threads, fma / group * 2, threads, fma / group * 4);
}

int main(int argc, char **argv)
{
    static roof r;
    int32_t threads = 0, group = 8, lanes = 0;
    if ((argc > 1 && ekv_parse_int32(argv[1], strlen(argv[1]), "THREADS", 1, 1024, &threads)) ||
        (argc > 2 && ekv_parse_int32(argv[2], strlen(argv[2]), "GROUP", 1, 1024, &group))) {
        fprintf(stderr, "cpu_roof: %s\n", ekv_last_error());
        return 2;
    }
    ekv_context_options options = EKV_CONTEXT_OPTIONS_INIT;
    ekv_context *context;
    options.num_threads = threads;
    if (ekv_context_create_host(&options, &context)) {
        fprintf(stderr, "cpu_roof: %s\n", ekv_last_error());
        return 1;
    }
    r.pool = context->pool;
    r.data = aligned_alloc(LINE, BYTES + 4096);
    if (!r.data)
        return 1;
    memset(r.data, 0, BYTES);
#ifdef __x86_64__
    lanes = __builtin_cpu_supports("avx512f") ? 16 : __builtin_cpu_supports("fma") ? 8 : 0;
    r.fma = lanes == 16 ? fma_avx512 : fma_avx2;
#endif
    printf("what,threads,gb_per_s\n");
    measure(&r, lanes, group);
    free(r.data);
    ekv_context_free(context);
    return 0;
}
