/* SPDX-License-Identifier: Apache-2.0 */
#include "cpu/random_cache.h"

#include "base/arena.h"
#include "base/rng.h"
#include "base/status.h"
#include "cpu/convert.h"
#include "plan/tensors.h"

#include <inttypes.h>
#include <math.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum {
    GUARD_BYTES = 1024, /* before and after O and LSE */
    GUARD = 0xA5,
    TABLE_SLACK = 2 /* block table columns that no request uses */
};

struct ekv_random_cache {
    ekv_context *context;
    ekv_batch batch; /* kv_len is borrowed during creation only */
    ekv_random_cache_options options;
    ekv_tensors tensors;
    int64_t row;        /* elements from one row of K, V, Q or O to the next */
    int64_t used_pages; /* pages of requests */
    int64_t num_pages;  /* those and the extra ones */
    size_t kv_size;     /* bytes of K, and of V */
    size_t o_size;      /* bytes of O with its guards */
    size_t lse_size;    /* of LSE */
    unsigned char *o, *lse;
    unsigned char *k, *v, *q;
    int32_t *indptr;     /* [batch_size + 1], of the used pages */
    int32_t *indices;    /* [used_pages] */
    int32_t *last_len;   /* [batch_size] */
    int32_t *table;      /* [batch_size][table_width] */
    int32_t *table_rows; /* [batch_size] */
    int32_t table_width;
    int32_t *shuffle; /* [num_pages] */
    float *rows;      /* [threads][row] */
    _Atomic int64_t next;
};

/* ---- Contents ---------------------------------------------------------------------------------------- */

/* Which tensor a random row belongs to. */
enum { STREAM_K = 1, STREAM_V = 2, STREAM_Q = 3 };

/* Uniform in [-range, range) in steps of range / 2^15, then rounded to dtype; padding is NaN. */
static void fill_row(const ekv_random_cache *cache, void *row, ekv_dtype dtype, int64_t stream, int64_t id,
                     int64_t token, int64_t head, float range, float *buffer)
{
    ekv_rng rng = { cache->options.seed };
    const int64_t key[] = { stream, id, token, head };
    for (int i = 0; i < 4; i++)
        rng.state = ekv_rng_next(&rng) ^ (uint64_t)key[i];
    const int32_t dim = cache->batch.head_dim;
    for (int32_t d = 0; d < dim; d += 4) {
        uint64_t bits = ekv_rng_next(&rng);
        for (int32_t i = d; i < d + 4 && i < dim; i++, bits >>= 16)
            buffer[i] = (float)(int16_t)(bits & 0xFFFF) * (range / 32768);
    }
    for (int64_t i = dim; i < cache->row; i++)
        buffer[i] = NAN;
    ekv_row_from_f32(buffer, (int32_t)cache->row, dtype, row);
}

static int32_t request_id(const ekv_random_cache *cache, int32_t request)
{
    return cache->options.request_ids ? cache->options.request_ids[request] : request;
}

/* One page of a request: its tokens, and NaN after them. */
static void fill_page(ekv_random_cache *cache, int32_t request, int32_t page, float *buffer)
{
    const ekv_batch *batch = &cache->batch;
    const ekv_tensors *t = &cache->tensors;
    const int64_t base = cache->indices[cache->indptr[request] + page];
    const int64_t first = (int64_t)page * batch->page_size;
    const int64_t end = ekv_min(batch->page_size, batch->kv_len[request] - first);
    for (int64_t i = 0; i < end; i++)
        for (int32_t h = 0; h < batch->kv_heads; h++) {
            int64_t at = base * t->k_stride_page + i * t->k_stride_token + h * t->k_stride_head;
            fill_row(cache, ekv_element_mutable(cache->k, batch->kv_dtype, at), batch->kv_dtype, STREAM_K,
                     request_id(cache, request), first + i, h, 1.0f, buffer);
            fill_row(cache, ekv_element_mutable(cache->v, batch->kv_dtype, at), batch->kv_dtype, STREAM_V,
                     request_id(cache, request), first + i, h, 1.0f, buffer);
        }
}

/* Threads take pages; a page's request is found by binary search. */
static void fill_pages(void *argument, int32_t thread)
{
    ekv_random_cache *cache = argument;
    for (int64_t i; (i = atomic_fetch_add(&cache->next, 1)) < cache->used_pages;) {
        int32_t low = 0, high = cache->batch.batch_size; /* indptr[low] <= i < indptr[high] */
        while (high - low > 1) {
            int32_t middle = low + (high - low) / 2;
            if (cache->indptr[middle] <= i)
                low = middle;
            else
                high = middle;
        }
        fill_page(cache, low, (int32_t)(i - cache->indptr[low]), cache->rows + thread * cache->row);
    }
}

static void fill_queries(ekv_random_cache *cache)
{
    const ekv_batch *batch = &cache->batch;
    for (int32_t b = 0; b < batch->batch_size; b++)
        for (int32_t h = 0; h < batch->q_heads; h++) {
            int64_t at = ((int64_t)b * batch->q_heads + h) * cache->row;
            fill_row(cache, ekv_element_mutable(cache->q, batch->q_dtype, at), batch->q_dtype, STREAM_Q,
                     request_id(cache, b), 0, h, cache->options.q_range, cache->rows);
        }
}

/* All bits set is a NaN in every dtype here. */
static void poison(void *memory, size_t size)
{
    memset(memory, 0xFF, size);
}

void ekv_random_cache_reset(ekv_random_cache *cache)
{
    memset(cache->o, GUARD, cache->o_size);
    memset(cache->lse, GUARD, cache->lse_size);
    poison(cache->o + GUARD_BYTES, cache->o_size - 2 * GUARD_BYTES);
    poison(cache->lse + GUARD_BYTES, cache->lse_size - 2 * GUARD_BYTES);
}

/* ---- Page tables ------------------------------------------------------------------------------------- */

static void shuffle(int32_t *values, int64_t n, ekv_rng *rng)
{
    for (int64_t i = n - 1; i > 0; i--) {
        int64_t j = ekv_rng_below(rng, i + 1);
        int32_t value = values[i];
        values[i] = values[j];
        values[j] = value;
    }
}

static void fill_page_tables(ekv_random_cache *cache)
{
    const ekv_batch *batch = &cache->batch;
    ekv_rng rng = { cache->options.seed ^ 0x70616765 };
    for (int64_t p = 0; p < cache->num_pages; p++)
        cache->shuffle[p] = (int32_t)p;
    for (int32_t b = 0; b < batch->batch_size; b++)
        cache->table_rows[b] = b;
    if (!cache->options.ordered_pages) {
        shuffle(cache->shuffle, cache->num_pages, &rng);
        shuffle(cache->table_rows, batch->batch_size, &rng);
    }
    cache->indptr[0] = 0;
    for (int32_t b = 0; b < batch->batch_size; b++) {
        const int32_t len = batch->kv_len[b], pages = (int32_t)ekv_ceil_div(len, batch->page_size);
        int32_t *indices = cache->indices + cache->indptr[b];
        int32_t *row = cache->table + (int64_t)cache->table_rows[b] * cache->table_width;
        cache->indptr[b + 1] = cache->indptr[b] + pages;
        cache->last_len[b] = pages ? len - (pages - 1) * batch->page_size : 0;
        for (int32_t p = 0; p < pages; p++)
            row[p] = indices[p] = cache->shuffle[cache->indptr[b] + p];
        for (int32_t p = pages; p < cache->table_width; p++)
            row[p] = -1;
    }
}

/* ---- Creation ---------------------------------------------------------------------------------------- */

/* Sets the cache's pointers: everything in one block, the cache itself first.  With a NULL base it only counts. */
static void lay_out(ekv_arena *arena, ekv_random_cache *cache)
{
    const ekv_batch *batch = &cache->batch;
    const size_t requests = (size_t)batch->batch_size, row = (size_t)cache->row;
    const size_t q_size = requests * (size_t)batch->q_heads * row * (size_t)ekv_dtype_size(batch->q_dtype);
    const size_t threads = (size_t)ekv_pool_num_threads(cache->context->pool);
    cache->kv_size = (size_t)cache->num_pages * (size_t)batch->page_size * (size_t)batch->kv_heads * row *
                     (size_t)ekv_dtype_size(batch->kv_dtype);
    cache->o_size = q_size + 2 * GUARD_BYTES;
    cache->lse_size = requests * (size_t)batch->q_heads * sizeof(float) + 2 * GUARD_BYTES;
    ekv_arena_take(arena, sizeof *cache);
    cache->k = ekv_arena_take(arena, cache->kv_size);
    cache->v = ekv_arena_take(arena, cache->kv_size);
    cache->q = ekv_arena_take(arena, q_size);
    cache->o = ekv_arena_take(arena, cache->o_size);
    cache->lse = ekv_arena_take(arena, cache->lse_size);
    cache->indptr = ekv_arena_take(arena, (requests + 1) * sizeof *cache->indptr);
    cache->indices = ekv_arena_take(arena, (size_t)cache->used_pages * sizeof *cache->indices);
    cache->last_len = ekv_arena_take(arena, requests * sizeof *cache->last_len);
    cache->table = ekv_arena_take(arena, requests * (size_t)cache->table_width * sizeof *cache->table);
    cache->table_rows = ekv_arena_take(arena, requests * sizeof *cache->table_rows);
    cache->shuffle = ekv_arena_take(arena, (size_t)cache->num_pages * sizeof *cache->shuffle);
    cache->rows = ekv_arena_take(arena, threads * row * sizeof *cache->rows);
}

static void set_tensors(ekv_random_cache *cache)
{
    const ekv_batch *batch = &cache->batch;
    const ekv_random_cache_options *options = &cache->options;
    ekv_tensors *t = &cache->tensors;
    *t = (ekv_tensors)EKV_TENSORS_INIT;
    t->q = cache->q;
    t->k = cache->k;
    t->v = cache->v;
    t->o = cache->o + GUARD_BYTES;
    t->lse = options->no_lse ? NULL : (float *)(void *)(cache->lse + GUARD_BYTES);
    t->num_pages = cache->num_pages;
    if (options->block_table) {
        t->block_table = cache->table;
        t->block_table_rows = cache->table_rows;
        t->block_table_width = cache->table_width;
        t->block_table_stride = cache->table_width;
    } else {
        t->page_indptr = cache->indptr;
        t->page_indices = cache->indices;
        t->last_page_len = cache->last_len;
    }
    ekv_batch padded = *batch;
    padded.head_dim = (int32_t)cache->row;
    ekv_tensors_set_defaults(&padded, t);
    t->sm_scale = 0;
}

static ekv_status measure(ekv_random_cache *draft)
{
    const ekv_batch *batch = &draft->batch;
    int64_t widest = 0;
    for (int32_t b = 0; b < batch->batch_size; b++) {
        const int64_t pages = ekv_ceil_div(batch->kv_len[b], batch->page_size);
        draft->used_pages += pages;
        widest = ekv_max(widest, pages);
    }
    draft->row = batch->head_dim + draft->options.row_padding;
    draft->num_pages = draft->used_pages + draft->options.extra_pages;
    draft->table_width = (int32_t)widest + TABLE_SLACK;
    /* 2^40 elements of K are more than any machine that runs this can hold. */
    if (draft->num_pages > INT32_MAX ||
        (double)draft->num_pages * batch->page_size * batch->kv_heads * (double)draft->row > 0x1p40 ||
        (double)batch->batch_size * draft->table_width > 0x1p40)
        return ekv_fail(EKV_ERROR_OVERFLOW, "a cache of %" PRId64 " pages of %d tokens is too large", draft->num_pages,
                        batch->page_size);
    return EKV_OK;
}

/* Pages of K and V lie apart, so with small pages of memory nearly each of them costs a walk of the page table. */
static void ask_for_huge_pages(void *memory, size_t size)
{
#ifdef MADV_HUGEPAGE
    const uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE);
    const uintptr_t begin = ((uintptr_t)memory + page - 1) / page * page,
                    end = ((uintptr_t)memory + size) / page * page;
    if (begin < end)
        madvise((void *)begin, end - begin, MADV_HUGEPAGE); /* a wish: where it is not granted all works as well */
#else
    (void)memory, (void)size;
#endif
}

ekv_status ekv_random_cache_create(ekv_context *context, const ekv_batch *batch,
                                   const ekv_random_cache_options *options, ekv_random_cache **cache)
{
    if (batch->kv_dtype > EKV_DTYPE_BF16 || batch->q_dtype > EKV_DTYPE_BF16)
        return ekv_fail(EKV_ERROR_UNSUPPORTED, "a random cache of FP8 is not built yet");
    ekv_random_cache draft = { .context = context, .batch = *batch, .options = *options };
    ekv_status status = measure(&draft);
    if (status)
        return status;
    ekv_arena arena = { NULL, 0 };
    lay_out(&arena, &draft);
    void *memory = ekv_alloc(context, arena.used);
    if (!memory)
        return ekv_fail(EKV_ERROR_OUT_OF_MEMORY, "no memory for a cache of %zu bytes", arena.used);
    ask_for_huge_pages(memory, arena.used);
    arena = ekv_arena_over(memory);
    lay_out(&arena, &draft);
    ekv_random_cache *created = memory;
    *created = draft;
    poison(created->k, created->kv_size);
    poison(created->v, created->kv_size);
    set_tensors(created);
    fill_page_tables(created);
    fill_queries(created);
    ekv_pool_run(context->pool, fill_pages, created);
    ekv_random_cache_reset(created);
    *cache = created;
    return EKV_OK;
}

void ekv_random_cache_free(ekv_random_cache *cache)
{
    if (cache)
        ekv_release(cache->context, cache); /* the block begins with it */
}

ekv_tensors *ekv_random_cache_tensors(ekv_random_cache *cache)
{
    return &cache->tensors;
}

/* ---- Guards ------------------------------------------------------------------------------------------ */

static bool all_guard(const unsigned char *bytes, size_t size)
{
    for (size_t i = 0; i < size; i++)
        if (bytes[i] != GUARD)
            return false;
    return true;
}

/* The padding between rows of O still is NaN. */
static bool padding_intact(const ekv_random_cache *cache)
{
    const size_t element = (size_t)ekv_dtype_size(cache->batch.q_dtype), row = (size_t)cache->row * element;
    for (size_t at = 0; at < cache->o_size - 2 * GUARD_BYTES; at += row)
        for (size_t i = (size_t)cache->batch.head_dim * element; i < row; i++)
            if (cache->o[GUARD_BYTES + at + i] != 0xFF)
                return false;
    return true;
}

bool ekv_random_cache_guards_intact(const ekv_random_cache *cache)
{
    return all_guard(cache->o, GUARD_BYTES) && all_guard(cache->o + cache->o_size - GUARD_BYTES, GUARD_BYTES) &&
           all_guard(cache->lse, GUARD_BYTES) && all_guard(cache->lse + cache->lse_size - GUARD_BYTES, GUARD_BYTES) &&
           padding_intact(cache);
}
