/* evenkv: batch decode attention whose time follows the number of KV tokens.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * A decode batch is a set of requests, each with one query token and a paged KV cache of kv_len tokens.
 * A *planner* turns a batch and a *device* into a *plan*: tiles of KV tokens, the order in which they run,
 * and which partial results merge into which output.  A *backend* executes a plan on tensors.
 *
 *     ekv_context *ctx;  ekv_plan *plan;  size_t bytes;
 *     ekv_context_create(NULL, &ctx);
 *     ekv_plan_create(ctx, "even", &batch, &device, NULL, &plan);
 *     ekv_workspace_size(plan, EKV_BACKEND_CPU, &bytes);
 *     ekv_decode(plan, &tensors, NULL, workspace, bytes);
 *
 * Five rules hold for every function below.
 *
 *  Results    A function that can fail returns ekv_status: EKV_OK is 0, errors are negative and a code never
 *             changes its meaning.  On error the outputs are untouched and ekv_last_error() has a text with
 *             the offending value.  The library never prints, exits or aborts.
 *  Ownership  _create gives, _free takes and accepts NULL.  Everything else is borrowed for the call only.
 *  Threads    A context may be shared by threads.  A plan is used by one thread at a time.
 *  Streams    ekv_decode on a GPU only enqueues: no synchronisation and no allocation, so that a CUDA graph
 *             can capture it.  On the CPU it returns when the result is there.
 *  Structs    Start one with its EKV_..._INIT.  Its first member is its size; members are added at the end
 *             only, and a program built against an older header gets the defaults for the newer members.
 *             Built against a newer header, it may not set members that the library lacks and finds them 0 in
 *             what the library fills in.
 *
 * Units: lengths and positions are KV tokens, strides are elements, sizes are bytes unless a name says more.
 */
#ifndef EVENKV_EVENKV_H
#define EVENKV_EVENKV_H

#include <stddef.h>
#include <stdint.h>

#define EKV_VERSION_MAJOR 0
#define EKV_VERSION_MINOR 1
#define EKV_VERSION_PATCH 0

#if defined(__GNUC__)
#define EKV_API __attribute__((visibility("default")))
#else
#define EKV_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* ---- Status ------------------------------------------------------------------------------------------ */

/* name, value, what it means */
#define EKV_STATUS_LIST(X)                                                                        \
    X(EKV_OK, 0, "success")                                                                       \
    X(EKV_ERROR_INVALID_ARGUMENT, -1, "an argument is outside what its declaration allows")       \
    X(EKV_ERROR_UNSUPPORTED, -2, "legal, but this build or backend cannot do it")                 \
    X(EKV_ERROR_OUT_OF_MEMORY, -3, "the allocator returned NULL")                                 \
    X(EKV_ERROR_OVERFLOW, -4, "a size does not fit its integer type")                             \
    X(EKV_ERROR_NOT_FOUND, -5, "no planner, device, model or file of that name")                  \
    X(EKV_ERROR_CAPACITY, -6, "more than the plan was created for")                               \
    X(EKV_ERROR_WORKSPACE_TOO_SMALL, -7, "the workspace is smaller than ekv_workspace_size says") \
    X(EKV_ERROR_BACKEND_UNAVAILABLE, -8, "this machine has no driver or device for the backend")  \
    X(EKV_ERROR_DRIVER, -9, "the GPU driver reported an error")                                   \
    X(EKV_ERROR_IO, -10, "a file could not be read or written")                                   \
    X(EKV_ERROR_PARSE, -11, "a file or a text is malformed")                                      \
    X(EKV_ERROR_PLAN_INVALID, -12, "a plan breaks one of its invariants")                         \
    X(EKV_ERROR_BUSY, -13, "an earlier update of the plan is still in flight")                    \
    X(EKV_ERROR_SYSTEM, -14, "the operating system refused a thread or another resource")

typedef enum ekv_status {
#define EKV_STATUS_ENUM(name, value, text) name = value,
    EKV_STATUS_LIST(EKV_STATUS_ENUM)
#undef EKV_STATUS_ENUM
} ekv_status;

/* Library version, "major.minor.patch".  Static storage. */
EKV_API const char *ekv_version_string(void);
/* The identifier of a status ("EKV_OK"), or "EKV_ERROR_UNKNOWN".  Static storage. */
EKV_API const char *ekv_status_name(ekv_status status);
/* What a status means, one clause.  Static storage. */
EKV_API const char *ekv_status_text(ekv_status status);
/* What went wrong in the last call of this thread that failed, with the offending value; "" if none has.
 * Thread-local storage, valid until this thread's next failing call. */
EKV_API const char *ekv_last_error(void);

/* ---- Context ----------------------------------------------------------------------------------------- */

typedef struct ekv_context ekv_context;

typedef enum ekv_log_level { EKV_LOG_DEBUG = 0, EKV_LOG_INFO = 1, EKV_LOG_WARNING = 2 } ekv_log_level;

typedef struct ekv_context_options {
    size_t struct_size;
    /* Host memory; both or neither.  NULL: malloc and free.  Called from the threads that call the library. */
    void *(*alloc)(size_t size, void *user);
    void (*free)(void *pointer, void *user);
    void *alloc_user;
    /* Receives one line of text, without a newline.  NULL: nothing is logged. */
    void (*log)(ekv_log_level level, const char *text, void *user);
    void *log_user;
    /* Threads of the CPU backend, the caller included, 1..1024.  0: EKV_NUM_THREADS, else as many as the CPUs that
     * the process may run on. */
    int32_t num_threads;
    /* CUDA device of the CUDA backend.  -1: that of the context current in the creating thread, else 0.  -2: none,
     * which saves the start of a GPU.  The CUDA context is the current one if it is on that device, else the
     * device's primary one, which the context then retains. */
    int32_t cuda_device;
} ekv_context_options;
#define EKV_CONTEXT_OPTIONS_INIT                          \
    {                                                     \
        sizeof(ekv_context_options), 0, 0, 0, 0, 0, 0, -1 \
    }

/* options: NULL for the defaults.  Errors: INVALID_ARGUMENT, OUT_OF_MEMORY, SYSTEM (no thread).
 * A machine without a GPU is no error here; see ekv_backend_supports. */
EKV_API ekv_status ekv_context_create(const ekv_context_options *options, ekv_context **context);
/* Every plan of the context must have been freed before. */
EKV_API void ekv_context_free(ekv_context *context);

/* ---- Devices: models of what runs a plan ------------------------------------------------------------- */

/* Systems whose kernels a device model can have constants of.  EVENKV: this project's own, on a GPU or on the CPU. */
typedef enum ekv_system {
    EKV_SYSTEM_EVENKV = 0,
    EKV_SYSTEM_FLASHINFER_CUDA_CORE = 1,
    EKV_SYSTEM_FLASHINFER_TENSOR_CORE = 2,
    EKV_SYSTEM_FA3 = 3,
    EKV_SYSTEM_FLASHINFER_BATCH_ATTENTION = 4,
    EKV_SYSTEM_FLASHINFER_XQA = 5
} ekv_system;
enum { EKV_NUM_SYSTEMS = 6, EKV_MAX_SYSTEMS = 16 };

/* What a system's decode costs on a device; docs/simulator.md has the model.  All 0: nobody measured it. */
typedef struct ekv_system_model {
    double cta_gb_per_s;   /* most that one CTA reads, 1e9 bytes/s */
    double sm_gb_per_s;    /* most that the CTAs of one SM read together */
    double total_gb_per_s; /* most that all SMs read together */
    double tile_us;        /* what a tile costs beyond its bytes */
    double launch_us;      /* before the first tile starts, kernels that prepare included */
    double merge_us;       /* of merging, beyond its bytes */
} ekv_system_model;

typedef struct ekv_device {
    size_t struct_size;
    char name[32];
    int32_t num_sms;              /* streaming multiprocessors; threads for "cpu" */
    int32_t sm_arch;              /* compute capability x 10: 80, 90; 0 for "cpu" */
    int32_t ctas_per_sm;          /* persistent CTAs per SM that `even` counts on */
    int32_t request_cost_tokens;  /* what a request costs `even` beyond its tokens, in tokens of one KV head */
    double read_gb_per_s_nominal; /* memory bandwidth by the vendor's data sheet, 1e9 bytes/s; 0: unknown */
    double read_gb_per_s;         /* achieved by a plain read of 1 GiB; 0: nobody measured */
    double bf16_tflops;           /* dense matrix rate, 1e12 FLOP/s; 0: unknown */
    int64_t l2_bytes;             /* last-level cache; 0: unknown */
    int64_t memory_bytes;         /* 0: unknown */
    int32_t projected;            /* 1: some constant was not measured on such a device */
    ekv_system_model systems[EKV_MAX_SYSTEMS]; /* by ekv_system, for ekv_simulate */
} ekv_device;
#define EKV_DEVICE_INIT                                          \
    {                                                            \
        sizeof(ekv_device), { 0 }, 0, 0, 2, 0, 0, 0, 0, 0, 0, 1, \
        {                                                        \
            {                                                    \
                0, 0, 0, 0, 0, 0                                 \
            }                                                    \
        }                                                        \
    }

/* Built-in models.  ekv_device_name(i): the name of model i, NULL past the last. */
EKV_API const char *ekv_device_name(int32_t index);
/* The `key = value` text of a built-in model, each constant with its source; NULL if there is none. */
EKV_API const char *ekv_device_text(const char *name);
/* Fills *device (started with EKV_DEVICE_INIT).  name: one of the built-in models.  Errors: NOT_FOUND. */
EKV_API ekv_status ekv_device_find(const char *name, ekv_device *device);
/* Reads a device from `key = value` text of `size` bytes (need not be terminated).  origin: what to call the
 * text in errors.  Errors: PARSE with line number (unknown, repeated or missing key, value not a finite
 * number or outside its range). */
EKV_API ekv_status ekv_device_parse(const char *text, size_t size, const char *origin, ekv_device *device);
/* What this machine has: the context's CUDA device, else "cpu".  Errors: DRIVER. */
EKV_API ekv_status ekv_device_detect(ekv_context *context, ekv_device *device);

/* ---- Batch ------------------------------------------------------------------------------------------- */

typedef enum ekv_dtype {
    EKV_DTYPE_F32 = 0,
    EKV_DTYPE_F16 = 1,
    EKV_DTYPE_BF16 = 2,
    EKV_DTYPE_FP8_E4M3 = 3, /* planned and explained; no backend decodes it yet */
    EKV_DTYPE_FP8_E5M2 = 4
} ekv_dtype;

/* Order of a page's dimensions, used where tensors give no strides. */
typedef enum ekv_layout {
    EKV_LAYOUT_NHD = 0, /* [page][token][head][head_dim] */
    EKV_LAYOUT_HND = 1  /* [page][head][token][head_dim] */
} ekv_layout;

typedef struct ekv_batch {
    size_t struct_size;
    int32_t batch_size;    /* requests, >= 1 */
    const int32_t *kv_len; /* host, [batch_size], each >= 0: KV tokens of each request */
    int32_t q_heads;       /* local query heads, a multiple of kv_heads */
    int32_t kv_heads;      /* local KV heads, >= 1 */
    int32_t head_dim;      /* >= 1 */
    int32_t page_size;     /* tokens per page, >= 1 */
    int32_t q_len;         /* query tokens per request, >= 1; decode supports 1 */
    ekv_dtype q_dtype;     /* of Q and O */
    ekv_dtype kv_dtype;    /* of K and V */
    ekv_layout layout;
    int32_t window_left; /* -1: none; decode supports -1 */
    float soft_cap;      /* 0: none; decode supports 0 */
} ekv_batch;
#define EKV_BATCH_INIT                                                                                    \
    {                                                                                                     \
        sizeof(ekv_batch), 0, 0, 0, 0, 0, 16, 1, EKV_DTYPE_BF16, EKV_DTYPE_BF16, EKV_LAYOUT_NHD, -1, 0.0f \
    }

/* ---- Plan -------------------------------------------------------------------------------------------- */

/* How tiles reach CTAs (thread blocks; threads on the CPU). */
typedef enum ekv_dispatch {
    EKV_DISPATCH_DEFAULT = 0, /* the planner's own */
    EKV_DISPATCH_GRID = 1,    /* one CTA a tile, hardware order */
    EKV_DISPATCH_QUEUE = 2,   /* persistent CTAs take the next tile from a counter */
    EKV_DISPATCH_RANGE = 3    /* each persistent CTA owns a contiguous range of tiles */
} ekv_dispatch;

typedef struct ekv_plan_options {
    size_t struct_size;
    int32_t cuda_graph;     /* FlashInfer planners: the rules under CUDA graph capture */
    int32_t resident_ctas;  /* CTAs per SM that a grid kernel keeps resident; 0: the planner's own figure */
    int32_t no_sort;        /* fa3: keep request order */
    int32_t no_pack_gqa;    /* none: one tile per query head, so K and V are read q_heads/kv_heads times */
    int64_t table_width;    /* fa3: tokens that a page-table row can hold; 0: batch maximum in whole pages */
    int32_t sm_margin;      /* SMs to leave to others, < num_sms */
    int32_t ctas_per_sm;    /* even, even-invariant: persistent CTAs per SM; 0: the device's */
    int32_t heads_per_tile; /* even, even-invariant: KV heads per tile, a divisor of kv_heads; 0: the largest up to 4 */
    int32_t block_tokens;   /* even: cuts fall on multiples of this; 0: page size if 16..64, else 16 */
    int32_t request_cost;   /* even, even-invariant: tokens that a request costs beyond its own; -1: the device's
                               divided by heads_per_tile */
    int32_t snap_tokens;    /* even: how far a share may begin from its place so that it begins with a request, at most
                               1/8 of a share (6/8, see least_share); -1: 256 */
    int32_t least_share;    /* even: tokens of a share at least: of a small batch fewer CTAs take part, though no fewer
                               than requests x head groups, and a share may move by 6/8 of itself; -1: 512 divided by
                               heads_per_tile on a GPU, 0 on the CPU */
    int32_t chunk_tokens;   /* even-invariant: cuts fall on multiples of this; 0: 1024 */
    ekv_dispatch dispatch;  /* run the planner's tiles under another dispatch */
    int64_t max_total_tokens; /* even-invariant: room for updates; 0: twice the batch's, or what fits */
    int32_t on_device;        /* 1: plan on the GPU, from lengths that live there; needs cuda = 1; see below */
    int32_t cuda;             /* 1: for the CUDA backend too: copies of the plan on the device and in pinned memory */
} ekv_plan_options;
#define EKV_PLAN_OPTIONS_INIT                                                                             \
    {                                                                                                     \
        sizeof(ekv_plan_options), 0, 0, 0, 0, 0, 0, 0, 0, 0, -1, -1, -1, 0, EKV_DISPATCH_DEFAULT, 0, 0, 0 \
    }

#define EKV_TILE_PARTIAL 1u /* writes partial slots (slot + h for its h-th head); else writes O and LSE */

/* What one CTA does in one go: KV tokens [kv_begin, kv_end) of one request for heads
 * [head, head + head_count), for rows [m_block * rows, ...) of the packed queries. */
typedef struct ekv_tile {
    int32_t request;
    int32_t m_block;
    int32_t split; /* index among the tiles of its (request, m_block, head), in token order */
    int32_t kv_begin;
    int32_t kv_end;
    int32_t slot;  /* first partial slot; -1 where the tile writes the output itself */
    uint16_t head; /* KV head; query head where GQA is not packed */
    uint16_t head_count;
    uint32_t flags; /* EKV_TILE_PARTIAL */
} ekv_tile;

typedef struct ekv_plan ekv_plan;

/* Pointers are owned by the plan and valid until its next update or its end. */
typedef struct ekv_plan_info {
    size_t struct_size;
    const char *planner;
    ekv_dispatch dispatch;
    int32_t grid[3];        /* launch grid; queue and range: {ctas, 1, 1} */
    int64_t num_ctas;       /* product of grid */
    int32_t resident_ctas;  /* CTAs per SM */
    int32_t split_kv;       /* 1: partial results are merged */
    int64_t num_work_items; /* (request, m_block, split) */
    int64_t num_tiles;
    int64_t num_partial_slots;
    int64_t kv_chunk_tokens;  /* tokens per split, where one number rules all; else -1 */
    int32_t num_splits_bound; /* fa3: static bound; else -1 */
    int32_t batch_size;
    const int32_t *num_splits;  /* [batch_size], the largest over a request's heads */
    const int32_t *batch_order; /* [batch_size], request ids in the order in which they are visited */
    int64_t total_tokens;       /* sum of kv_len */
    /* The tiles put on slots (SMs x resident CTAs) as the dispatch does, one token of one head one unit: */
    int64_t max_cta_tokens; /* busiest slot */
    double mean_cta_tokens; /* over all slots */
    double imbalance;       /* max / mean; 1 for a batch without tokens */
    int32_t num_warnings;
    const char *const *warnings; /* [num_warnings] */
} ekv_plan_info;
#define EKV_PLAN_INFO_INIT                                                                                             \
    {                                                                                                                  \
        sizeof(ekv_plan_info), 0, EKV_DISPATCH_DEFAULT, { 0, 0, 0 }, 0, 0, 0, 0, 0, 0, -1, -1, 0, 0, 0, 0, 0, 0, 0, 0, \
            0                                                                                                          \
    }

/* Planners, in the order of their listing.  NULL past the last.  Static storage. */
EKV_API const char *ekv_planner_name(int32_t index);
/* One line on what a planner does and where its rule comes from; NULL if there is no such planner. */
EKV_API const char *ekv_planner_summary(const char *name);

/* options: NULL for the defaults.  batch and device are copied.
 * Errors: NOT_FOUND (planner), INVALID_ARGUMENT, UNSUPPORTED (a shape whose rule nobody knows: names the
 * option that supplies it), OVERFLOW, OUT_OF_MEMORY; with options.cuda also BACKEND_UNAVAILABLE and DRIVER. */
EKV_API ekv_status ekv_plan_create(ekv_context *context, const char *planner, const ekv_batch *batch,
                                   const ekv_device *device, const ekv_plan_options *options, ekv_plan **plan);
/* The same batch with other lengths.  kv_len: host, [batch_size]; batch_size: 1 to that of the creation.
 * No allocation.  On error the plan is as it was.  Errors: INVALID_ARGUMENT, UNSUPPORTED, OVERFLOW, CAPACITY, DRIVER.
 *
 * A plan for CUDA (options.cuda) has one copy of its records on the device, and counters that its decodes share.
 *  - Decodes of the plan must be ordered among each other, by their stream or by events, whatever their workspaces.
 *    ekv_decode enqueues the transfer on the first stream that uses the plan after an update; later ones wait for it.
 *  - A CUDA graph that captured a decode of the plan transfers the records at each replay, once a capture, so that a
 *    replay computes with the lengths of the last update.
 * The transfer reads pinned memory that the plan owns.  An update waits until the transfer that it would disturb is
 * over: the last but one outside graphs, the last one of a replay.  Do not update while a stream is capturing. */
EKV_API ekv_status ekv_plan_update(ekv_plan *plan, const int32_t *kv_len, int32_t batch_size);
EKV_API void ekv_plan_free(ekv_plan *plan);

/* An on-device plan (options.on_device; planners even, even-invariant, fa3, fa3-nosplit and fa3-vllm) is made anew by
 * the GPU in every ekv_decode that has ekv_tensors.kv_len: byte for byte the plan that the host would make of these
 * lengths.  The host waits for nothing, and a CUDA graph replays with whatever lengths are there then.
 *  - batch.kv_len are upper bounds.  A length beyond its bound is taken as the bound, a negative one as 0.  What the
 *    functions here say of the plan is said of the bounds.  A request of length 0, as padding, costs next to nothing.
 *  - fa3 takes its static bound from table_width, or from the longest upper bound.
 *  - Without ekv_tensors.kv_len a decode uses the records of the decode before it: the layers of a model have the same
 *    lengths, so only the first one needs to plan.
 *  - ekv_plan_update is refused with UNSUPPORTED. */

EKV_API ekv_status ekv_plan_info_get(ekv_plan *plan, ekv_plan_info *info);
/* index: 0..num_tiles-1, in dispatch order. */
EKV_API ekv_status ekv_plan_tile_get(const ekv_plan *plan, int64_t index, ekv_tile *tile);
/* Under range dispatch, CTA cta owns tiles [*begin, *end).  Errors: INVALID_ARGUMENT for other dispatches. */
EKV_API ekv_status ekv_plan_cta_range(const ekv_plan *plan, int64_t cta, int64_t *begin, int64_t *end);
/* Verifies coverage, slots, merges and promised sizes (docs/planners.md lists the invariants).
 * Errors: PLAN_INVALID with the first breach found, OUT_OF_MEMORY. */
EKV_API ekv_status ekv_plan_check(const ekv_plan *plan);

/* ---- Decode ------------------------------------------------------------------------------------------ */

typedef enum ekv_backend { EKV_BACKEND_CPU = 0, EKV_BACKEND_CUDA = 1 } ekv_backend;

/* Pointers are host memory for the CPU backend and device memory for CUDA.  Strides are in elements, may be
 * any int64 (views of a larger cache, other layouts), and the last dimension is contiguous.  Where all
 * strides of a tensor are 0 it is dense: K and V in batch.layout, Q and O as [request][q_head][head_dim],
 * LSE as [request][q_head]. */
typedef struct ekv_tensors {
    size_t struct_size;
    const void *q; /* [batch_size][q_heads][head_dim], q_dtype */
    int64_t q_stride_request, q_stride_head;
    const void *k; /* [page][page_size][kv_heads][head_dim] in any order of strides, kv_dtype */
    int64_t k_stride_page, k_stride_token, k_stride_head;
    const void *v; /* as k */
    int64_t v_stride_page, v_stride_token, v_stride_head;
    void *o; /* [batch_size][q_heads][head_dim], q_dtype */
    int64_t o_stride_request, o_stride_head;
    float *lse; /* [batch_size][q_heads], or NULL: not wanted */
    int64_t lse_stride_request, lse_stride_head;
    /* The page table, in one of two forms.  CSR: pages of request b are
     * page_indices[page_indptr[b] .. page_indptr[b+1]); last_page_len may be NULL (lengths come from the plan). */
    const int32_t *page_indptr;   /* [batch_size + 1] */
    const int32_t *page_indices;  /* [page_indptr[batch_size]] */
    const int32_t *last_page_len; /* [batch_size], 1..page_size; 0 only where the request is empty */
    /* Padded table: page p of request b is block_table[row * block_table_stride + p], row = b, or
     * block_table_rows[b] where given.  Entries past the length are not read (-1 is usual). */
    const int32_t *block_table;      /* [rows][block_table_width] */
    const int32_t *block_table_rows; /* [batch_size] or NULL */
    int64_t block_table_stride;      /* 0: block_table_width */
    int32_t block_table_width;
    int64_t num_pages;      /* pages behind k and v, to check table entries on the CPU; 0: unknown */
    const int32_t *kv_len;  /* on-device plans: [batch_size] on the device, or NULL: as before; other plans: NULL */
    float sm_scale;         /* of Q.K^T; 0: 1/sqrt(head_dim) */
    float k_scale, v_scale; /* dequantisation of FP8; decode supports 1 */
    const float *sinks;     /* [q_heads] attention-sink logits; decode supports NULL */
} ekv_tensors;
#define EKV_TENSORS_INIT                                                                                               \
    {                                                                                                                  \
        sizeof(ekv_tensors), 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0.0f, 1.0f, \
            1.0f, 0                                                                                                    \
    }

typedef enum ekv_lse_base { EKV_LSE_NATURAL = 0, EKV_LSE_BASE2 = 1 } ekv_lse_base;

typedef enum ekv_kernel {
    EKV_KERNEL_AUTO = 0,
    EKV_KERNEL_SIMT = 1,        /* CUDA: CUDA cores */
    EKV_KERNEL_MMA = 2,         /* CUDA: tensor cores */
    EKV_KERNEL_GENERIC = 3,     /* CPU: portable C */
    EKV_KERNEL_AVX2 = 4,        /* CPU: AVX2, FMA, F16C */
    EKV_KERNEL_AVX512 = 5,      /* CPU: AVX-512 F, BW, DQ, VL; head_dim in steps of 16 */
    EKV_KERNEL_AVX512_BF16 = 6, /* CPU: AVX-512 BF16; Q, K and V of bf16, head_dim in steps of 32 */
    EKV_KERNEL_AMX_BF16 = 7     /* CPU: AMX BF16 and AVX-512 BF16; Q, K and V of bf16, head_dim in steps of 32 */
} ekv_kernel;

typedef struct ekv_decode_options {
    size_t struct_size;
    ekv_backend backend;
    ekv_kernel kernel;     /* one of the backend's; AUTO: the fastest that can do the batch here */
    ekv_lse_base lse_base; /* of the LSE output */
    void *stream;          /* CUstream / cudaStream_t; NULL: the default stream */
} ekv_decode_options;
#define EKV_DECODE_OPTIONS_INIT                                                          \
    {                                                                                    \
        sizeof(ekv_decode_options), EKV_BACKEND_CPU, EKV_KERNEL_AUTO, EKV_LSE_NATURAL, 0 \
    }

/* Bytes that ekv_decode needs for this plan; an update that keeps within the plan's capacity does not change
 * them.  The workspace must be aligned to 256 bytes; its contents on entry do not matter. */
EKV_API ekv_status ekv_workspace_size(const ekv_plan *plan, ekv_backend backend, size_t *size);
/* EKV_OK if ekv_decode can run the plan with these tensors (NULL: any tensors) and options; otherwise
 * UNSUPPORTED or BACKEND_UNAVAILABLE and a reason. */
EKV_API ekv_status ekv_backend_supports(const ekv_plan *plan, const ekv_tensors *tensors,
                                        const ekv_decode_options *options);
/* O[b][h] = softmax(sm_scale * Q[b][h] K^T) V over the request's tokens, by the plan.  A request without
 * tokens gives O = 0 and LSE = -inf.  workspace: workspace_size bytes, used by one call at a time.
 * options: NULL for the CPU backend.
 * Errors: INVALID_ARGUMENT (pointers, strides, page table), UNSUPPORTED, WORKSPACE_TOO_SMALL, PLAN_INVALID
 * (a FlashInfer padding fault, see docs/planners.md), BACKEND_UNAVAILABLE, DRIVER. */
EKV_API ekv_status ekv_decode(ekv_plan *plan, const ekv_tensors *tensors, const ekv_decode_options *options,
                              void *workspace, size_t workspace_size);

/* Merges attention states over disjoint sets of tokens: parts[i] with lse_parts[i] into one. */
typedef struct ekv_merge_args {
    size_t struct_size;
    ekv_backend backend;
    int32_t num_states;                         /* >= 1 */
    int64_t rows;                               /* (request, query head) pairs, >= 0 */
    int32_t head_dim;                           /* >= 1 */
    ekv_dtype part_dtype;                       /* of o_parts */
    const void *o_parts;                        /* [num_states][rows][head_dim] by the strides below */
    int64_t part_stride_state, part_stride_row; /* both 0: dense in that order */
    const float *lse_parts;                     /* [num_states][rows] by the strides below; -inf for an empty state */
    int64_t lse_stride_state, lse_stride_row;   /* both 0: dense in that order */
    ekv_dtype o_dtype;
    void *o;               /* [rows][head_dim], dense */
    float *lse;            /* [rows], dense, or NULL */
    ekv_lse_base lse_base; /* of lse_parts and lse */
    void *stream;
} ekv_merge_args;
#define EKV_MERGE_ARGS_INIT                                                                                     \
    {                                                                                                           \
        sizeof(ekv_merge_args), EKV_BACKEND_CPU, 1, 0, 0, EKV_DTYPE_F32, 0, 0, 0, 0, 0, 0, EKV_DTYPE_F32, 0, 0, \
            EKV_LSE_NATURAL, 0                                                                                  \
    }

/* States are merged in order 0, 1, ...; a row whose states are all empty gives 0 and -inf. */
EKV_API ekv_status ekv_merge_states(ekv_context *context, const ekv_merge_args *args);

/* ---- Simulation: what a plan would take on a device -------------------------------------------------- */

typedef struct ekv_sim_options {
    size_t struct_size;
    int32_t system; /* ekv_system whose kernels run the tiles; -1: the planner's own, on "cpu" evenkv's */
    int32_t events; /* 1: keep when and where each tile ran */
} ekv_sim_options;
#define EKV_SIM_OPTIONS_INIT           \
    {                                  \
        sizeof(ekv_sim_options), -1, 0 \
    }

/* Why SMs stand idle at the end. */
typedef enum ekv_tail_cause {
    EKV_TAIL_NONE = 0,       /* they hardly do: at most 5 % of their time from launch to merge */
    EKV_TAIL_LONG_TILE = 1,  /* the last tile alone takes longer than a slot's even share of all tiles */
    EKV_TAIL_SPLIT_WAVE = 2, /* tiles fill the slots in waves, the last one only in part; splitting made so many */
    EKV_TAIL_WHOLE_WAVE = 3, /* the same with requests that were not split */
    EKV_TAIL_UNEVEN = 4      /* the plan gave some CTA more than others */
} ekv_tail_cause;

/* A simulated execution.  Deterministic: the same plan, device and options give the same bytes. */
typedef struct ekv_timeline ekv_timeline;

typedef struct ekv_timeline_info {
    size_t struct_size;
    const char *system;   /* whose kernels, as "fa3"; static storage */
    int32_t projected;    /* 1: constants that nobody measured on such a device */
    int32_t num_sms;      /* that run the plan */
    int32_t slots_per_sm; /* CTAs that an SM holds at a time */
    int64_t num_ctas;
    int64_t num_tiles;
    int64_t num_events;   /* 0 without options.events */
    double time_us;       /* of all of it */
    double launch_us;     /* before the first tile */
    double merge_us;      /* of merging, after the last tile */
    double sm_busy_share; /* share of SMs x time_us in which an SM runs a tile */
    double tail_us;       /* from the first SM without a tile until the end of the last tile */
    int64_t tail_tile;    /* index of the tile that ends last; -1: there is none */
    ekv_tail_cause tail_cause;
    double kv_gb_per_s; /* K and V of the batch, each byte once, over time_us; 1e9 bytes/s */
    double imbalance;   /* as in ekv_plan_info */
    /* Bytes moved, by all tiles and merges. */
    int64_t kv_bytes, q_bytes, o_bytes, partial_bytes, table_bytes;
} ekv_timeline_info;
#define EKV_TIMELINE_INFO_INIT                                                                               \
    {                                                                                                        \
        sizeof(ekv_timeline_info), 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, EKV_TAIL_NONE, 0, 0, 0, 0, 0, 0, 0 \
    }

/* One tile in one slot.  Times are microseconds from the launch. */
typedef struct ekv_timeline_event {
    int64_t tile; /* index in the plan */
    int32_t sm;
    int32_t slot; /* of the SM, from 0 */
    double start_us;
    double stop_us;
} ekv_timeline_event;

/* The identifier of a system ("fa3"); NULL past the last.  Static storage. */
EKV_API const char *ekv_system_name(int32_t index);
/* Predicts how the plan runs on the device (NULL: the one that it was made for).  options: NULL for the defaults.
 * The timeline borrows nothing from the plan; free it before the plan's context.
 * Errors: INVALID_ARGUMENT, UNSUPPORTED (the device has no constants of the system), OUT_OF_MEMORY. */
EKV_API ekv_status ekv_simulate(ekv_plan *plan, const ekv_device *device, const ekv_sim_options *options,
                                ekv_timeline **timeline);
EKV_API void ekv_timeline_free(ekv_timeline *timeline);
EKV_API ekv_status ekv_timeline_info_get(const ekv_timeline *timeline, ekv_timeline_info *info);
/* Tiles in the order of their starts.  index: 0..num_events-1. */
EKV_API ekv_status ekv_timeline_event_get(const ekv_timeline *timeline, int64_t index, ekv_timeline_event *event);

#ifdef __cplusplus
}
#endif

#endif
