/* SPDX-License-Identifier: Apache-2.0
 * Tile kernels by themselves, on one thread, without planner and pool: what their arithmetic takes.
 *
 *     cpu_tile [GROUP [KERNEL]]       default: 8 query heads a KV head; every kernel that this CPU runs
 *
 * Prints `kernel,dtype,group,where,gb_per_s` of K and V for 4 KV heads of 128 (NHD) in pages of 16 at random places.
 * where: `cache`, 32 tokens again and again, which stay in the second-level cache (the best run); or `memory`, a run of
 * 1,024 tokens that the caches do not have (the fastest quarter's slowest).  Kernels and dtypes take turns.
 * `cpu_roof 1 GROUP` prints what the memory and fp32 multiply-adds by themselves would allow. */
#include "base/half.h"
#include "base/number.h"
#include "base/portable.h"
#include "cpu/tile_kernel.h"
#include "timing.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

enum {
    HEADS = 4,
    DIM = 128,
    PAGE = 16,
    TOKENS = 32768, /* 64 MiB of bf16 */
    PAGES = TOKENS / PAGE,
    CACHE_TOKENS = 32,
    MEMORY_TOKENS = 1024,
    ROUNDS = 160,
    MAX_GROUP = 64,
    MAX_CELLS = 16,
    ALIGN = 2 << 20 /* huge pages */
};

static const char *const dtype_names[] = { "fp32", "fp16", "bf16" };

typedef struct cell {
    const ekv_cpu_kernel *kernel;
    ekv_dtype dtype;
    double cache_us[ROUNDS], memory_us[ROUNDS];
} cell;

static float *zeros(size_t n)
{
    const size_t size = (n * sizeof(float) + ALIGN - 1) / ALIGN * ALIGN;
    float *memory = aligned_alloc(ALIGN, size);
    if (!memory) {
        fprintf(stderr, "cpu_tile: no memory for %zu bytes\n", size);
        exit(1);
    }
#ifdef MADV_HUGEPAGE
    madvise(memory, size, MADV_HUGEPAGE);
#endif
    memset(memory, 0, size);
    return memory;
}

/* n numbers in [-0.5, 0.5), the same each time. */
static void fill(void *to, ekv_dtype dtype, size_t n)
{
    ekv_rng rng = { 1 };
    for (size_t i = 0; i < n; i++) {
        const float value = (float)ekv_rng_unit(&rng) - 0.5f;
        if (dtype == EKV_DTYPE_F32)
            ((float *)to)[i] = value;
        else
            ((uint16_t *)to)[i] = dtype == EKV_DTYPE_F16 ? ekv_f32_to_f16(value) : ekv_f32_to_bf16(value);
    }
}

static double time_tile(const cell *c, ekv_cpu_tile *tile, int32_t begin, int32_t tokens)
{
    fill(tile->q, c->kernel->q_dtype, (size_t)tile->heads * (size_t)tile->rows * DIM);
    tile->kv_dtype = c->dtype;
    tile->kv_begin = begin;
    tile->kv_end = begin + tokens;
    const double start = now_us();
    c->kernel->run(tile);
    return now_us() - start;
}

static int32_t find_cells(const char *wanted, cell *cells)
{
    int32_t count = 0;
    const ekv_cpu_kernel *kernel;
    bool runs_here;
    for (int32_t i = 0; (kernel = ekv_cpu_kernel_at(i, &runs_here)); i++)
        for (int32_t dtype = 0; dtype < 3 && runs_here; dtype++)
            if ((!kernel->bf16_only || dtype == EKV_DTYPE_BF16) && (!wanted || !strcmp(wanted, kernel->name))) {
                cells[count].kernel = kernel;
                cells[count++].dtype = (ekv_dtype)dtype;
            }
    return count;
}

/* Page i's place; the order is random, the same each time. */
static void shuffle(int32_t *pages)
{
    ekv_rng rng = { 2 };
    for (int32_t i = 0; i < PAGES; i++)
        pages[i] = i;
    for (int32_t i = PAGES - 1; i > 0; i--) {
        const int32_t other = (int32_t)(ekv_rng_unit(&rng) * (i + 1)), page = pages[i];
        pages[i] = pages[other];
        pages[other] = page;
    }
}

static void print(const cell *c, int32_t group, const char *where, int32_t tokens, double us)
{
    const double bytes = 2.0 * tokens * HEADS * DIM * (double)ekv_dtype_size(c->dtype);
    printf("%s,%s,%d,%s,%.2f\n", c->kernel->name, dtype_names[c->dtype], group, where, bytes / us / 1e3);
}

int main(int argc, char **argv)
{
    static cell cells[MAX_CELLS];
    static int32_t pages[PAGES];
    int32_t group = 8;
    if (argc > 1 && ekv_parse_int32(argv[1], strlen(argv[1]), "GROUP", 1, MAX_GROUP, &group)) {
        fprintf(stderr, "cpu_tile: %s\n", ekv_last_error());
        return 2;
    }
    const int32_t num_cells = find_cells(argc > 2 ? argv[2] : NULL, cells);
    const size_t rows = (size_t)ekv_round_up(group, EKV_TILE_PANEL), elements = (size_t)TOKENS * HEADS * DIM;
    float *k = zeros(elements), *v = zeros(elements);
    shuffle(pages);
    ekv_cpu_tile tile = { .q = zeros(HEADS * rows * DIM),
                          .heads = HEADS,
                          .rows = group,
                          .head_dim = DIM,
                          .scale = 0.088f,
                          .k = k,
                          .v = v,
                          .pages = pages,
                          .page_size = PAGE,
                          .k_stride_page = PAGE * HEADS * DIM,
                          .k_stride_token = HEADS * DIM,
                          .k_stride_head = DIM,
                          .v_stride_page = PAGE * HEADS * DIM,
                          .v_stride_token = HEADS * DIM,
                          .v_stride_head = DIM,
                          .p = zeros(rows * EKV_TILE_BLOCK),
                          .state = zeros(HEADS * rows * 2),
                          .acc = zeros(HEADS * rows * DIM),
                          .max = zeros(HEADS * rows),
                          .sum = zeros(HEADS * rows),
                          .stride_acc = (int64_t)rows * DIM,
                          .stride_state = (int64_t)rows };
    for (int32_t dtype = 0; dtype < 3; dtype++) {
        fill(k, (ekv_dtype)dtype, elements);
        fill(v, (ekv_dtype)dtype, elements);
        for (int32_t round = 0; round < ROUNDS; round++)
            for (int32_t i = 0; i < num_cells; i++) {
                if (cells[i].dtype != (ekv_dtype)dtype)
                    continue;
                const int32_t begin = (round * num_cells + i) * MEMORY_TOKENS % TOKENS;
                cells[i].memory_us[round] = time_tile(&cells[i], &tile, begin, MEMORY_TOKENS);
                cells[i].cache_us[round] = INFINITY;
                for (int again = 0; again < 8; again++)
                    cells[i].cache_us[round] =
                        fmin(cells[i].cache_us[round], time_tile(&cells[i], &tile, begin, CACHE_TOKENS));
            }
    }
    printf("kernel,dtype,group,where,gb_per_s\n");
    for (int32_t i = 0; i < num_cells; i++) {
        qsort(cells[i].cache_us, ROUNDS, sizeof(double), compare_doubles);
        qsort(cells[i].memory_us, ROUNDS, sizeof(double), compare_doubles);
        print(&cells[i], group, "cache", CACHE_TOKENS, cells[i].cache_us[0]);
        print(&cells[i], group, "memory", MEMORY_TOKENS, cells[i].memory_us[ROUNDS / 4]);
    }
    return 0;
}
