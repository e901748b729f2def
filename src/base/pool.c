/* SPDX-License-Identifier: Apache-2.0 */
#include "base/pool.h"

#include "base/context.h"
#include "base/status.h"

#include <pthread.h>
#include <string.h>

typedef struct worker {
    ekv_pool *pool;
    pthread_t thread;
    int32_t index;
} worker;

struct ekv_pool {
    ekv_context *context;
    int32_t num_threads;
    pthread_mutex_t turn; /* held by the thread whose run is on */
    pthread_mutex_t lock; /* guards all below */
    pthread_cond_t start, done;
    uint64_t generation; /* of the current run */
    int32_t running;     /* workers that have not finished it */
    int stop;
    void (*work)(void *argument, int32_t thread);
    void *argument;
    worker workers[]; /* num_threads - 1 */
};

static void *worker_main(void *argument)
{
    worker *self = argument;
    ekv_pool *pool = self->pool;
    uint64_t seen = 0;
    pthread_mutex_lock(&pool->lock);
    for (;;) {
        while (pool->generation == seen && !pool->stop)
            pthread_cond_wait(&pool->start, &pool->lock);
        if (pool->stop)
            break;
        seen = pool->generation;
        pthread_mutex_unlock(&pool->lock);
        pool->work(pool->argument, self->index);
        pthread_mutex_lock(&pool->lock);
        if (--pool->running == 0)
            pthread_cond_signal(&pool->done);
    }
    pthread_mutex_unlock(&pool->lock);
    return NULL;
}

/* Ends and joins the first `started` workers. */
static void stop_workers(ekv_pool *pool, int32_t started)
{
    pthread_mutex_lock(&pool->lock);
    pool->stop = 1;
    pthread_cond_broadcast(&pool->start);
    pthread_mutex_unlock(&pool->lock);
    for (int32_t i = 0; i < started; i++)
        pthread_join(pool->workers[i].thread, NULL);
}

ekv_status ekv_pool_create(ekv_context *context, int32_t num_threads, ekv_pool **pool)
{
    size_t size = sizeof(ekv_pool) + (size_t)(num_threads - 1) * sizeof(worker);
    ekv_pool *created = ekv_alloc(context, size);
    if (!created)
        return ekv_fail(EKV_ERROR_OUT_OF_MEMORY, "no memory for a pool of %d threads", num_threads);
    memset(created, 0, size);
    created->context = context;
    created->num_threads = num_threads;
    pthread_mutex_init(&created->turn, NULL);
    pthread_mutex_init(&created->lock, NULL);
    pthread_cond_init(&created->start, NULL);
    pthread_cond_init(&created->done, NULL);
    for (int32_t i = 0; i < num_threads - 1; i++) {
        created->workers[i] = (worker){ .pool = created, .index = i + 1 };
        int error = pthread_create(&created->workers[i].thread, NULL, worker_main, &created->workers[i]);
        if (error) {
            stop_workers(created, i);
            created->num_threads = 1;
            ekv_pool_free(created);
            return ekv_fail(EKV_ERROR_SYSTEM, "thread %d of %d: %s", i + 1, num_threads, strerror(error));
        }
    }
    *pool = created;
    return EKV_OK;
}

void ekv_pool_free(ekv_pool *pool)
{
    if (!pool)
        return;
    stop_workers(pool, pool->num_threads - 1);
    pthread_cond_destroy(&pool->done);
    pthread_cond_destroy(&pool->start);
    pthread_mutex_destroy(&pool->lock);
    pthread_mutex_destroy(&pool->turn);
    ekv_release(pool->context, pool);
}

int32_t ekv_pool_num_threads(const ekv_pool *pool)
{
    return pool->num_threads;
}

void ekv_pool_run(ekv_pool *pool, void (*work)(void *argument, int32_t thread), void *argument)
{
    pthread_mutex_lock(&pool->turn);
    pthread_mutex_lock(&pool->lock);
    pool->work = work;
    pool->argument = argument;
    pool->running = pool->num_threads - 1;
    pool->generation++;
    pthread_cond_broadcast(&pool->start);
    pthread_mutex_unlock(&pool->lock);
    work(argument, 0);
    pthread_mutex_lock(&pool->lock);
    while (pool->running > 0)
        pthread_cond_wait(&pool->done, &pool->lock);
    pthread_mutex_unlock(&pool->lock);
    pthread_mutex_unlock(&pool->turn);
}
