/* SPDX-License-Identifier: Apache-2.0
 * Creation, update and inspection of plans: everything that is the same for all planners. */
#include "plan/plan.h"

#include "base/arena.h"
#include "base/status.h"
#include "plan/imbalance.h"

#include <inttypes.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

void ekv_plan_warn(ekv_plan *plan, const char *format, ...)
{
    if (plan->num_warnings == EKV_PLAN_MAX_WARNINGS)
        return;
    char *text = plan->warnings[plan->num_warnings];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, EKV_PLAN_WARNING_SIZE, format, arguments);
    va_end(arguments);
    plan->warning_list[plan->num_warnings++] = text;
}

void ekv_plan_pack_rows(ekv_plan *plan, int32_t block_m)
{
    plan->heads = plan->batch.kv_heads;
    plan->rows = plan->batch.q_len * plan->group;
    plan->block_m = block_m;
    plan->m_blocks = (int32_t)ekv_ceil_div(plan->rows, block_m);
    plan->padded_rows = block_m;
}

void ekv_plan_add_split_merges(ekv_plan *plan, bool merge_single, int32_t *partial_base)
{
    int32_t base = 0;
    for (int32_t b = 0; b < plan->batch.batch_size; b++) {
        int32_t splits = plan->num_splits[b];
        partial_base[b] = base;
        if (splits == 1 && !merge_single)
            continue;
        for (int32_t m = 0; m < plan->m_blocks; m++) {
            ekv_plan_add_merge(plan, (ekv_merge){ .request = b,
                                                  .m_block = m,
                                                  .num_splits = splits,
                                                  .slot_first = base * plan->heads,
                                                  .slot_next = (base + 1) * plan->heads,
                                                  .slot_stride = plan->heads,
                                                  .head = 0,
                                                  .head_count = (uint16_t)plan->heads });
            base += splits;
        }
    }
    plan->num_slots = (int64_t)base * plan->heads;
}

/* ---- Checks ------------------------------------------------------------------------------------------ */

static ekv_status check_range(int64_t value, const char *name, int64_t smallest, int64_t largest)
{
    if (value < smallest || value > largest)
        return ekv_fail(EKV_ERROR_INVALID_ARGUMENT, "%s is %" PRId64 "; it must be %" PRId64 "..%" PRId64, name, value,
                        smallest, largest);
    return EKV_OK;
}

static ekv_status check_positive(int32_t value, const char *name, int32_t largest)
{
    return check_range(value, name, 1, largest);
}

static ekv_status check_batch(const ekv_batch *batch)
{
    ekv_status status;
    if ((status = check_positive(batch->batch_size, "batch_size", INT32_MAX / 8)) ||
        (status = check_positive(batch->q_heads, "q_heads", UINT16_MAX)) ||
        (status = check_positive(batch->kv_heads, "kv_heads", UINT16_MAX)) ||
        (status = check_positive(batch->head_dim, "head_dim", 65536)) ||
        (status = check_positive(batch->page_size, "page_size", INT32_MAX / 2)) ||
        (status = check_positive(batch->q_len, "q_len", 65536)))
        return status;
    if (batch->q_heads % batch->kv_heads)
        return ekv_fail(EKV_ERROR_INVALID_ARGUMENT, "q_heads %d is not a multiple of kv_heads %d", batch->q_heads,
                        batch->kv_heads);
    if ((int64_t)batch->q_len * batch->q_heads > INT32_MAX / 2)
        return ekv_fail(EKV_ERROR_OVERFLOW, "q_len %d times q_heads %d is too large", batch->q_len, batch->q_heads);
    if ((unsigned)batch->q_dtype > EKV_DTYPE_FP8_E5M2)
        return ekv_fail(EKV_ERROR_INVALID_ARGUMENT, "q_dtype %d is not an ekv_dtype", (int)batch->q_dtype);
    if ((unsigned)batch->kv_dtype > EKV_DTYPE_FP8_E5M2)
        return ekv_fail(EKV_ERROR_INVALID_ARGUMENT, "kv_dtype %d is not an ekv_dtype", (int)batch->kv_dtype);
    if ((unsigned)batch->layout > EKV_LAYOUT_HND)
        return ekv_fail(EKV_ERROR_INVALID_ARGUMENT, "layout %d is not an ekv_layout", (int)batch->layout);
    if (batch->window_left < -1)
        return ekv_fail(EKV_ERROR_INVALID_ARGUMENT, "window_left is %d; it must be -1 or more", batch->window_left);
    if (!(batch->soft_cap >= 0) || isinf(batch->soft_cap))
        return ekv_fail(EKV_ERROR_INVALID_ARGUMENT, "soft_cap is %g; it must be 0 or a positive number",
                        (double)batch->soft_cap);
    if (!batch->kv_len)
        return ekv_fail(EKV_ERROR_INVALID_ARGUMENT, "batch.kv_len is NULL");
    return EKV_OK;
}

static ekv_status check_device(const ekv_device *device)
{
    ekv_status status;
    if ((status = check_positive(device->num_sms, "device.num_sms", 65536)) ||
        (status = check_positive(device->ctas_per_sm, "device.ctas_per_sm", 64)))
        return status;
    return check_range(device->request_cost_tokens, "device.request_cost_tokens", 0, 65536);
}

ekv_status ekv_device_read(const ekv_device *given, ekv_device *device)
{
    *device = (ekv_device)EKV_DEVICE_INIT;
    ekv_status status = ekv_struct_read(device, sizeof *device, given, EKV_DEVICE_FIRST_SIZE, "ekv_device");
    device->name[sizeof device->name - 1] = 0;
    return status ? status : check_device(device);
}

static ekv_status check_options(const ekv_plan_options *options, const ekv_batch *batch, const ekv_device *device)
{
    ekv_status status;
    if ((status = check_range(options->resident_ctas, "resident_ctas", 0, 64)) ||
        (status = check_range(options->table_width, "table_width", 0, INT32_MAX)) ||
        (status = check_range(options->sm_margin, "sm_margin", 0, device->num_sms - 1)) ||
        (status = check_range(options->ctas_per_sm, "ctas_per_sm", 0, 64)) ||
        (status = check_range(options->heads_per_tile, "heads_per_tile", 0, batch->kv_heads)) ||
        (status = check_range(options->block_tokens, "block_tokens", 0, 65536)) ||
        (status = check_range(options->request_cost, "request_cost", -1, 65536)) ||
        (status = check_range(options->snap_tokens, "snap_tokens", -1, 65536)) ||
        (status = check_range(options->least_share, "least_share", -1, 65536)) ||
        (status = check_range(options->chunk_tokens, "chunk_tokens", 0, 1 << 24)) ||
        (status = check_range((int64_t)options->dispatch, "dispatch", EKV_DISPATCH_DEFAULT, EKV_DISPATCH_RANGE)) ||
        (status = check_range(options->max_total_tokens, "max_total_tokens", 0, INT64_MAX)))
        return status;
    if (options->heads_per_tile && batch->kv_heads % options->heads_per_tile)
        return ekv_fail(EKV_ERROR_INVALID_ARGUMENT, "heads_per_tile %d does not divide kv_heads %d",
                        options->heads_per_tile, batch->kv_heads);
    if ((status = check_range(options->cuda, "cuda", 0, 1)) ||
        (status = check_range(options->on_device, "on_device", 0, 1)))
        return status;
    if (options->on_device && !options->cuda)
        return ekv_fail(EKV_ERROR_INVALID_ARGUMENT, "on_device is 1 and cuda is 0; a plan on a GPU needs cuda = 1");
    return EKV_OK;
}

/* The lengths, and their sum against what later products with heads and head_dim can take. */
static ekv_status check_lengths(const int32_t *kv_len, int32_t batch_size)
{
    int64_t sum = 0;
    int32_t signs = 0;
    for (int32_t b = 0; b < batch_size; b++) {
        sum += kv_len[b];
        signs |= kv_len[b];
    }
    if (signs < 0) {
        int32_t b = 0;
        while (kv_len[b] >= 0)
            b++;
        return ekv_fail(EKV_ERROR_INVALID_ARGUMENT, "kv_len[%d] is %d; lengths must be >= 0", b, kv_len[b]);
    }
    int64_t largest = (int64_t)1 << 40;
    if (sum > largest)
        return ekv_fail(EKV_ERROR_OVERFLOW, "the sum of kv_len is %" PRId64 "; it must be at most %" PRId64, sum,
                        largest);
    return EKV_OK;
}

static ekv_status check_fit(const ekv_plan *plan, const int32_t *kv_len, int32_t batch_size)
{
    return plan->planner->fits ? plan->planner->fits(plan, kv_len, batch_size) : EKV_OK;
}

/* ---- Build ------------------------------------------------------------------------------------------- */

/* Runs the planner's tiles, in its order, under another dispatch. */
static void override_dispatch(ekv_plan *plan)
{
    ekv_dispatch dispatch = plan->options.dispatch;
    if (dispatch == EKV_DISPATCH_DEFAULT || dispatch == plan->dispatch)
        return;
    int64_t ctas = dispatch == EKV_DISPATCH_GRID ? plan->num_tiles : (int64_t)plan->num_sms * plan->resident_ctas;
    plan->dispatch = dispatch;
    plan->grid[0] = (int32_t)ctas;
    plan->grid[1] = plan->grid[2] = 1;
    if (dispatch == EKV_DISPATCH_RANGE)
        for (int64_t i = 0; i <= ctas; i++)
            plan->cta_begin[i] = i * plan->num_tiles / ctas;
}

static void build(ekv_plan *plan)
{
    plan->num_tiles = plan->num_merges = plan->num_slots = 0;
    plan->num_warnings = 0;
    plan->kv_chunk_tokens = -1;
    plan->num_splits_bound = -1;
    plan->planner->build(plan);
    override_dispatch(plan);
}

/* Lays out plan and arrays in one block, the plan itself first; with a NULL base it only counts. */
static void lay_out(ekv_arena *arena, ekv_plan *p, int32_t batch_size, const ekv_plan_capacity *c)
{
    ekv_arena_take(arena, sizeof *p);
    p->kv_len = ekv_arena_take(arena, (size_t)batch_size * sizeof *p->kv_len);
    p->num_splits = ekv_arena_take(arena, (size_t)batch_size * sizeof *p->num_splits);
    p->batch_order = ekv_arena_take(arena, (size_t)batch_size * sizeof *p->batch_order);
    p->tiles = ekv_arena_take(arena, (size_t)c->tiles * sizeof *p->tiles);
    p->merges = ekv_arena_take(arena, (size_t)c->merges * sizeof *p->merges);
    p->cta_begin = ekv_arena_take(arena, (size_t)(c->ctas + 1) * sizeof *p->cta_begin);
    p->scratch = ekv_arena_take(arena, c->scratch_size);
    p->slot_load = ekv_arena_take(arena, (size_t)p->num_sms * (size_t)p->resident_ctas * sizeof *p->slot_load);
}

static ekv_status check_capacity(const ekv_plan *plan, const ekv_plan_capacity *capacity)
{
    const int64_t largest = EKV_PLAN_MAX_RECORDS;
    if (capacity->tiles > largest || capacity->slots > largest || capacity->merges > largest)
        return ekv_fail(EKV_ERROR_OVERFLOW,
                        "planner %s may make %" PRId64 " tiles and %" PRId64 " partial results; at most %" PRId64
                        " are supported",
                        plan->planner->name, capacity->tiles, capacity->slots, largest);
    return EKV_OK;
}

static ekv_status read_arguments(ekv_plan *plan, const ekv_batch *batch, const ekv_device *device,
                                 const ekv_plan_options *options)
{
    if (!batch || !device)
        return ekv_fail(EKV_ERROR_INVALID_ARGUMENT, "%s is NULL", batch ? "device" : "batch");
    plan->batch = (ekv_batch)EKV_BATCH_INIT;
    plan->options = (ekv_plan_options)EKV_PLAN_OPTIONS_INIT;
    ekv_status status;
    if ((status = ekv_struct_read(&plan->batch, sizeof plan->batch, batch, sizeof plan->batch, "ekv_batch")) ||
        (status = ekv_device_read(device, &plan->device)) ||
        (status = ekv_struct_read(&plan->options, sizeof plan->options, options, sizeof plan->options,
                                  "ekv_plan_options")) ||
        (status = check_batch(&plan->batch)) || (status = check_options(&plan->options, &plan->batch, &plan->device)))
        return status;
    plan->group = plan->batch.q_heads / plan->batch.kv_heads;
    plan->num_sms = plan->device.num_sms - plan->options.sm_margin;
    if (plan->options.on_device && plan->planner->device_rule == EKV_DEVICE_RULE_NONE)
        return ekv_fail(EKV_ERROR_UNSUPPORTED, "on_device: planner %s makes its plan on the host", plan->planner->name);
    if (plan->options.cuda && !plan->context->plan_copies)
        return ekv_fail(EKV_ERROR_BACKEND_UNAVAILABLE, "the CUDA backend is unavailable: %s",
                        plan->context->cuda_missing);
    return EKV_OK;
}

ekv_status ekv_plan_create(ekv_context *context, const char *planner, const ekv_batch *batch, const ekv_device *device,
                           const ekv_plan_options *options, ekv_plan **plan)
{
    if (!context || !planner || !plan)
        return ekv_fail(EKV_ERROR_INVALID_ARGUMENT, "%s is NULL", !context ? "context" : !planner ? "planner" : "plan");
    ekv_plan draft = {
        .context = context, .planner = ekv_planner_find(planner), .block_tokens = 1, .cut_tokens = 1, .request_cost = -1
    };
    if (!draft.planner)
        return ekv_fail(EKV_ERROR_NOT_FOUND, "no planner is called '%s'", planner);
    ekv_plan_capacity capacity = { 0 };
    ekv_status status;
    if ((status = read_arguments(&draft, batch, device, options)) ||
        (status = check_lengths(draft.batch.kv_len, draft.batch.batch_size)) ||
        (status = draft.planner->capacity(&draft, &capacity)))
        return status;
    if (draft.options.dispatch == EKV_DISPATCH_RANGE)
        capacity.ctas = ekv_max(capacity.ctas, (int64_t)draft.num_sms * draft.resident_ctas);
    draft.capacity = capacity;
    draft.max_batch_size = draft.batch.batch_size;
    if ((status = check_capacity(&draft, &capacity)) ||
        (status = check_fit(&draft, draft.batch.kv_len, draft.batch.batch_size)))
        return status;

    ekv_arena arena = { NULL, 0 };
    ekv_plan counted = draft;
    lay_out(&arena, &counted, draft.max_batch_size, &capacity);
    void *memory = ekv_alloc(context, arena.used);
    if (!memory)
        return ekv_fail(EKV_ERROR_OUT_OF_MEMORY, "no memory for a plan of %zu bytes", arena.used);
    arena = (ekv_arena){ memory, 0 };
    ekv_plan *created = memory;
    *created = draft;
    lay_out(&arena, created, draft.max_batch_size, &capacity);
    memcpy(created->kv_len, draft.batch.kv_len, (size_t)draft.max_batch_size * sizeof *created->kv_len);
    created->batch.kv_len = created->kv_len;
    build(created);
    if (created->options.cuda && (status = context->plan_copies->create(created))) {
        ekv_release(context, memory);
        return status;
    }
    *plan = created;
    return EKV_OK;
}

ekv_status ekv_plan_update(ekv_plan *plan, const int32_t *kv_len, int32_t batch_size)
{
    if (!plan || !kv_len)
        return ekv_fail(EKV_ERROR_INVALID_ARGUMENT, "%s is NULL", plan ? "kv_len" : "plan");
    if (batch_size < 1 || batch_size > plan->max_batch_size)
        return ekv_fail(EKV_ERROR_INVALID_ARGUMENT, "batch_size is %d; this plan takes 1..%d", batch_size,
                        plan->max_batch_size);
    if (plan->options.on_device)
        return ekv_fail(EKV_ERROR_UNSUPPORTED, "an on-device plan takes its lengths from the tensors of a decode");
    ekv_status status;
    if ((status = check_lengths(kv_len, batch_size)) || (status = check_fit(plan, kv_len, batch_size)) ||
        (plan->cuda && (status = plan->context->plan_copies->begin_update(plan))))
        return status;
    memmove(plan->kv_len, kv_len, (size_t)batch_size * sizeof *kv_len);
    plan->batch.batch_size = batch_size;
    build(plan);
    if (plan->cuda)
        plan->context->plan_copies->end_update(plan);
    return EKV_OK;
}

void ekv_plan_free(ekv_plan *plan)
{
    if (!plan)
        return;
    if (plan->cuda)
        plan->context->plan_copies->free(plan);
    ekv_release(plan->context, plan); /* the block begins with the plan */
}

/* ---- Inspection -------------------------------------------------------------------------------------- */

ekv_status ekv_plan_info_get(ekv_plan *plan, ekv_plan_info *info)
{
    if (!plan)
        return ekv_fail(EKV_ERROR_INVALID_ARGUMENT, "plan is NULL");
    ekv_imbalance load = ekv_plan_imbalance(plan);
    int64_t total = 0;
    for (int32_t b = 0; b < plan->batch.batch_size; b++)
        total += plan->kv_len[b];
    const ekv_plan_info found = { .struct_size = sizeof found,
                                  .planner = plan->planner->name,
                                  .dispatch = plan->dispatch,
                                  .grid = { plan->grid[0], plan->grid[1], plan->grid[2] },
                                  .num_ctas = ekv_plan_num_ctas(plan),
                                  .resident_ctas = plan->resident_ctas,
                                  .split_kv = plan->split_kv,
                                  .num_work_items = plan->num_work_items,
                                  .num_tiles = plan->num_tiles,
                                  .num_partial_slots = plan->num_slots,
                                  .kv_chunk_tokens = plan->kv_chunk_tokens,
                                  .num_splits_bound = plan->num_splits_bound,
                                  .batch_size = plan->batch.batch_size,
                                  .num_splits = plan->num_splits,
                                  .batch_order = plan->batch_order,
                                  .total_tokens = total,
                                  .max_cta_tokens = load.max_tokens,
                                  .mean_cta_tokens = load.mean_tokens,
                                  .imbalance = load.mean_tokens > 0 ? (double)load.max_tokens / load.mean_tokens : 1.0,
                                  .num_warnings = plan->num_warnings,
                                  .warnings = plan->warning_list };
    return ekv_struct_write(info, &found, sizeof found, sizeof found, "ekv_plan_info");
}

ekv_status ekv_plan_tile_get(const ekv_plan *plan, int64_t index, ekv_tile *tile)
{
    if (!plan || !tile)
        return ekv_fail(EKV_ERROR_INVALID_ARGUMENT, "%s is NULL", plan ? "tile" : "plan");
    if (index < 0 || index >= plan->num_tiles)
        return ekv_fail(EKV_ERROR_INVALID_ARGUMENT, "tile index is %" PRId64 "; the plan has %" PRId64 " tiles", index,
                        plan->num_tiles);
    *tile = plan->tiles[index];
    return EKV_OK;
}

ekv_status ekv_plan_cta_range(const ekv_plan *plan, int64_t cta, int64_t *begin, int64_t *end)
{
    if (!plan || !begin || !end)
        return ekv_fail(EKV_ERROR_INVALID_ARGUMENT, "%s is NULL", !plan ? "plan" : !begin ? "begin" : "end");
    if (plan->dispatch != EKV_DISPATCH_RANGE)
        return ekv_fail(EKV_ERROR_INVALID_ARGUMENT, "planner %s does not dispatch by range", plan->planner->name);
    if (cta < 0 || cta >= ekv_plan_num_ctas(plan))
        return ekv_fail(EKV_ERROR_INVALID_ARGUMENT, "cta is %" PRId64 "; the plan has %" PRId64, cta,
                        ekv_plan_num_ctas(plan));
    *begin = plan->cta_begin[cta];
    *end = plan->cta_begin[cta + 1];
    return EKV_OK;
}
