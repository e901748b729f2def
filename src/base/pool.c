/* SPDX-License-Identifier: Apache-2.0
 * A run is *open* while threads may enter it.  One atomic word has the number of the run, whether it is open, and how
 * many workers have entered; so a worker enters a run once at most and none that is over.  Workers and the caller wait
 * for each other by spinning for a while, since the next decode of a model follows within microseconds, then asleep. */
#define _GNU_SOURCE /* sched_getaffinity */
#include "base/pool.h"

#include "base/context.h"
#include "base/status.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

/* How long to spin: several times what waking a sleeper costs (5 to 50 us on Linux). */
enum { SPIN_US = 50 };

/* Of ekv_pool.word. */
#define ENTERED(word) ((uint32_t)(word)&0xFFFFu)
#define OPEN ((uint64_t)1 << 16)
#define RUN(word) ((word) >> 32)

typedef struct worker {
    ekv_pool *pool;
    pthread_t thread;
    int32_t index;
} worker;

struct ekv_pool {
    ekv_context *context;
    int32_t num_threads;
    bool spins;           /* there is a CPU for each thread */
    pthread_mutex_t turn; /* held by the thread whose run is on */
    _Atomic uint64_t word;
    _Atomic uint32_t left; /* workers that have entered the run and are through */
    /* Asleep.  Who goes to sleep says so, then looks again; who changes word or left looks for sleepers then. */
    pthread_mutex_t lock;
    pthread_cond_t start, done;
    _Atomic int32_t sleepers; /* workers */
    _Atomic bool waiting;     /* the caller */
    _Atomic bool stop;
    /* Written while no run is open. */
    void (*work)(void *argument, int32_t thread);
    void *argument;
    worker workers[]; /* num_threads - 1 */
};

int32_t ekv_num_cpus(void)
{
    cpu_set_t set; /* of 1,024 CPUs; a larger machine makes the call fail */
    const long count = sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : sysconf(_SC_NPROCESSORS_ONLN);
    return count < 1 ? 1 : (int32_t)count;
}

/* ---- Waiting ----------------------------------------------------------------------------------------- */

static void pause_cpu(void)
{
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static int64_t now_us(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (int64_t)time.tv_sec * 1000000 + time.tv_nsec / 1000;
}

/* Until `ready` or SPIN_US are over. */
static bool spin(ekv_pool *pool, bool (*ready)(ekv_pool *pool, uint64_t value), uint64_t value)
{
    enum { LOOKS = 32 }; /* between two looks at the clock */
    if (!pool->spins)
        return ready(pool, value);
    for (const int64_t end = now_us() + SPIN_US; now_us() < end;)
        for (int i = 0; i < LOOKS; i++) {
            if (ready(pool, value))
                return true;
            pause_cpu();
        }
    return false;
}

/* A run that the worker has not seen, or the end. */
static bool has_news(ekv_pool *pool, uint64_t seen)
{
    return RUN(atomic_load(&pool->word)) != seen || atomic_load(&pool->stop);
}

static void wait_for_news(ekv_pool *pool, uint64_t seen)
{
    if (spin(pool, has_news, seen))
        return;
    pthread_mutex_lock(&pool->lock);
    atomic_fetch_add(&pool->sleepers, 1);
    while (!has_news(pool, seen))
        pthread_cond_wait(&pool->start, &pool->lock);
    atomic_fetch_sub(&pool->sleepers, 1);
    pthread_mutex_unlock(&pool->lock);
}

static bool has_left(ekv_pool *pool, uint64_t count)
{
    return atomic_load(&pool->left) == count;
}

static void wait_for_workers(ekv_pool *pool, uint32_t count)
{
    if (spin(pool, has_left, count))
        return;
    pthread_mutex_lock(&pool->lock);
    atomic_store(&pool->waiting, true);
    while (!has_left(pool, count))
        pthread_cond_wait(&pool->done, &pool->lock);
    atomic_store(&pool->waiting, false);
    pthread_mutex_unlock(&pool->lock);
}

static void wake(ekv_pool *pool, pthread_cond_t *condition)
{
    pthread_mutex_lock(&pool->lock);
    pthread_cond_broadcast(condition);
    pthread_mutex_unlock(&pool->lock);
}

/* ---- Workers ----------------------------------------------------------------------------------------- */

/* Enters the current run if it is open and was not seen; *seen becomes its number. */
static bool enter(ekv_pool *pool, uint64_t *seen)
{
    uint64_t word = atomic_load(&pool->word);
    do {
        if (RUN(word) == *seen)
            return false;
        if (!(word & OPEN)) {
            *seen = RUN(word);
            return false;
        }
    } while (!atomic_compare_exchange_weak(&pool->word, &word, word + 1));
    *seen = RUN(word);
    return true;
}

static void *worker_main(void *argument)
{
    worker *self = argument;
    ekv_pool *pool = self->pool;
    uint64_t seen = 0;
    while (!atomic_load(&pool->stop)) {
        if (enter(pool, &seen)) {
            pool->work(pool->argument, self->index);
            atomic_fetch_add(&pool->left, 1);
            if (atomic_load(&pool->waiting))
                wake(pool, &pool->done);
        }
        wait_for_news(pool, seen);
    }
    return NULL;
}

/* Ends and joins the first `started` workers. */
static void stop_workers(ekv_pool *pool, int32_t started)
{
    atomic_store(&pool->stop, true);
    wake(pool, &pool->start);
    for (int32_t i = 0; i < started; i++)
        pthread_join(pool->workers[i].thread, NULL);
}

/* ---- The pool ---------------------------------------------------------------------------------------- */

ekv_status ekv_pool_create(ekv_context *context, int32_t num_threads, ekv_pool **pool)
{
    size_t size = sizeof(ekv_pool) + (size_t)(num_threads - 1) * sizeof(worker);
    ekv_pool *created = ekv_alloc(context, size);
    if (!created)
        return ekv_fail(EKV_ERROR_OUT_OF_MEMORY, "no memory for a pool of %d threads", num_threads);
    memset(created, 0, size);
    created->context = context;
    created->num_threads = num_threads;
    created->spins = num_threads <= ekv_num_cpus();
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

static void run(ekv_pool *pool, void (*work)(void *argument, int32_t thread), void *argument, bool all,
                bool wake_sleepers)
{
    pthread_mutex_lock(&pool->turn);
    pool->work = work;
    pool->argument = argument;
    atomic_store(&pool->left, 0);
    const uint64_t number = RUN(atomic_load(&pool->word)) + 1;
    atomic_store(&pool->word, (number & UINT32_MAX) << 32 | OPEN);
    if (wake_sleepers && atomic_load(&pool->sleepers))
        wake(pool, &pool->start);
    work(argument, 0);
    if (all)
        wait_for_workers(pool, (uint32_t)pool->num_threads - 1);
    const uint64_t closed = atomic_fetch_and(&pool->word, ~OPEN);
    wait_for_workers(pool, ENTERED(closed));
    pthread_mutex_unlock(&pool->turn);
}

void ekv_pool_run(ekv_pool *pool, void (*work)(void *argument, int32_t thread), void *argument)
{
    run(pool, work, argument, true, true);
}

void ekv_pool_share(ekv_pool *pool, void (*work)(void *argument, int32_t thread), void *argument, bool wake_sleepers)
{
    run(pool, work, argument, false, wake_sleepers);
}
