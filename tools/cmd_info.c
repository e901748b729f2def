/* SPDX-License-Identifier: Apache-2.0
 * evenkv info: what this build is, and with --abi the layout of the public structs, which bindings of other languages
 * check theirs against. */
#include "cli.h"
#include "json.h"

#include <stddef.h>
#include <stdlib.h>

typedef struct abi_field {
    const char *name;
    size_t offset, size;
} abi_field;

typedef struct abi_struct {
    const char *name;
    size_t size;
    const void *initial; /* its EKV_..._INIT; NULL: it has none */
    const abi_field *fields;
    int32_t num_fields;
} abi_struct;

#define FIELD(type, field) { #field, offsetof(type, field), sizeof((type *)NULL)->field },
#define BEGIN(type) static const abi_field type##_fields[] = {
#define END \
    }       \
    ;

/* clang-format off */
BEGIN(ekv_context_options)
#define F(field) FIELD(ekv_context_options, field)
    F(struct_size) F(alloc) F(free) F(alloc_user) F(log) F(log_user) F(num_threads) F(cuda_device)
#undef F
END
BEGIN(ekv_system_model)
#define F(field) FIELD(ekv_system_model, field)
    F(cta_gb_per_s) F(sm_gb_per_s) F(total_gb_per_s) F(tile_us) F(launch_us) F(merge_us)
#undef F
END
BEGIN(ekv_device)
#define F(field) FIELD(ekv_device, field)
    F(struct_size) F(name) F(num_sms) F(sm_arch) F(ctas_per_sm) F(request_cost_tokens) F(read_gb_per_s_nominal)
    F(read_gb_per_s) F(bf16_tflops) F(l2_bytes) F(memory_bytes) F(projected) F(systems)
#undef F
END
BEGIN(ekv_batch)
#define F(field) FIELD(ekv_batch, field)
    F(struct_size) F(batch_size) F(kv_len) F(q_heads) F(kv_heads) F(head_dim) F(page_size) F(q_len) F(q_dtype)
    F(kv_dtype) F(layout) F(window_left) F(soft_cap)
#undef F
END
BEGIN(ekv_plan_options)
#define F(field) FIELD(ekv_plan_options, field)
    F(struct_size) F(cuda_graph) F(resident_ctas) F(no_sort) F(no_pack_gqa) F(table_width) F(sm_margin) F(ctas_per_sm)
    F(heads_per_tile) F(block_tokens) F(request_cost) F(snap_tokens) F(least_share) F(chunk_tokens) F(dispatch)
    F(max_total_tokens) F(on_device) F(cuda)
#undef F
END
BEGIN(ekv_tile)
#define F(field) FIELD(ekv_tile, field)
    F(request) F(m_block) F(split) F(kv_begin) F(kv_end) F(slot) F(head) F(head_count) F(flags)
#undef F
END
BEGIN(ekv_plan_info)
#define F(field) FIELD(ekv_plan_info, field)
    F(struct_size) F(planner) F(dispatch) F(grid) F(num_ctas) F(resident_ctas) F(split_kv) F(num_work_items)
    F(num_tiles) F(num_partial_slots) F(kv_chunk_tokens) F(num_splits_bound) F(batch_size) F(num_splits)
    F(batch_order) F(total_tokens) F(max_cta_tokens) F(mean_cta_tokens) F(imbalance) F(num_warnings) F(warnings)
#undef F
END
BEGIN(ekv_tensors)
#define F(field) FIELD(ekv_tensors, field)
    F(struct_size) F(q) F(q_stride_request) F(q_stride_head) F(k) F(k_stride_page) F(k_stride_token) F(k_stride_head)
    F(v) F(v_stride_page) F(v_stride_token) F(v_stride_head) F(o) F(o_stride_request) F(o_stride_head) F(lse)
    F(lse_stride_request) F(lse_stride_head) F(page_indptr) F(page_indices) F(last_page_len) F(block_table)
    F(block_table_rows) F(block_table_stride) F(block_table_width) F(num_pages) F(kv_len) F(sm_scale) F(k_scale)
    F(v_scale) F(sinks)
#undef F
END
BEGIN(ekv_decode_options)
#define F(field) FIELD(ekv_decode_options, field)
    F(struct_size) F(backend) F(kernel) F(lse_base) F(stream)
#undef F
END
BEGIN(ekv_merge_args)
#define F(field) FIELD(ekv_merge_args, field)
    F(struct_size) F(backend) F(num_states) F(rows) F(head_dim) F(part_dtype) F(o_parts) F(part_stride_state)
    F(part_stride_row) F(lse_parts) F(lse_stride_state) F(lse_stride_row) F(o_dtype) F(o) F(lse) F(lse_base) F(stream)
#undef F
END
    BEGIN(ekv_sim_options)
#define F(field) FIELD(ekv_sim_options, field)
    F(struct_size) F(system) F(events)
#undef F
END
BEGIN(ekv_timeline_info)
#define F(field) FIELD(ekv_timeline_info, field)
    F(struct_size) F(system) F(projected) F(num_sms) F(slots_per_sm) F(num_ctas) F(num_tiles) F(num_events) F(time_us)
    F(launch_us) F(merge_us) F(sm_busy_share) F(tail_us) F(tail_tile) F(tail_cause) F(kv_gb_per_s) F(imbalance)
    F(kv_bytes) F(q_bytes) F(o_bytes) F(partial_bytes) F(table_bytes)
#undef F
END
BEGIN(ekv_timeline_event)
#define F(field) FIELD(ekv_timeline_event, field)
    F(tile) F(sm) F(slot) F(start_us) F(stop_us)
#undef F
END
    /* clang-format on */

    static const struct {
    ekv_context_options context_options;
    ekv_device device;
    ekv_batch batch;
    ekv_plan_options plan_options;
    ekv_plan_info plan_info;
    ekv_tensors tensors;
    ekv_decode_options decode_options;
    ekv_merge_args merge_args;
    ekv_sim_options sim_options;
    ekv_timeline_info timeline_info;
} initial = {
    EKV_CONTEXT_OPTIONS_INIT, EKV_DEVICE_INIT,        EKV_BATCH_INIT,          EKV_PLAN_OPTIONS_INIT,
    EKV_PLAN_INFO_INIT,       EKV_TENSORS_INIT,       EKV_DECODE_OPTIONS_INIT, EKV_MERGE_ARGS_INIT,
    EKV_SIM_OPTIONS_INIT,     EKV_TIMELINE_INFO_INIT,
};

#define STRUCT(type, initial)                                                                       \
    {                                                                                               \
#type, sizeof(type), initial, type##_fields, sizeof type##_fields / sizeof type##_fields[0] \
    }

static const abi_struct structs[] = {
    STRUCT(ekv_context_options, &initial.context_options),
    STRUCT(ekv_system_model, NULL),
    STRUCT(ekv_device, &initial.device),
    STRUCT(ekv_batch, &initial.batch),
    STRUCT(ekv_plan_options, &initial.plan_options),
    STRUCT(ekv_tile, NULL),
    STRUCT(ekv_plan_info, &initial.plan_info),
    STRUCT(ekv_tensors, &initial.tensors),
    STRUCT(ekv_decode_options, &initial.decode_options),
    STRUCT(ekv_merge_args, &initial.merge_args),
    STRUCT(ekv_sim_options, &initial.sim_options),
    STRUCT(ekv_timeline_info, &initial.timeline_info),
    STRUCT(ekv_timeline_event, NULL),
};
enum { NUM_STRUCTS = sizeof structs / sizeof structs[0] };

/* The bytes of EKV_..._INIT, two hexadecimal digits each. */
static void add_initial(cJSON *object, const abi_struct *s)
{
    cli_text text = { 0 };
    for (size_t i = 0; i < s->size; i++)
        cli_print(&text, "%02x", ((const unsigned char *)s->initial)[i]);
    cli_append(&text, "", 1);
    json_string(object, "initial", text.data);
    free(text.data);
}

static void add_struct(cJSON *parent, const abi_struct *s)
{
    cJSON *object = json_add_object(parent, s->name);
    json_int(object, "size", (int64_t)s->size);
    if (s->initial)
        add_initial(object, s);
    cJSON *fields = json_add_array(object, "fields");
    for (int32_t i = 0; i < s->num_fields; i++) {
        cJSON *field = json_append_object(fields);
        json_string(field, "name", s->fields[i].name);
        json_int(field, "offset", (int64_t)s->fields[i].offset);
        json_int(field, "size", (int64_t)s->fields[i].size);
    }
}

static void add_statuses(cJSON *parent)
{
    cJSON *object = json_add_object(parent, "statuses");
#define STATUS(name, value, text) json_int(object, #name, value);
    EKV_STATUS_LIST(STATUS)
#undef STATUS
}

static void print_json(cli_state *cli)
{
    cJSON *object = json_object();
    json_string(object, "version", ekv_version_string());
    json_bool(object, "cuda_built", EVENKV_HAVE_CUDA);
    if (cli->options.abi) {
        cJSON *abi = json_add_object(object, "structs");
        for (int32_t i = 0; i < NUM_STRUCTS; i++)
            add_struct(abi, &structs[i]);
        add_statuses(object);
    }
    json_print(&cli->out, object);
}

static void print_struct(cli_text *text, const abi_struct *s)
{
    cli_print(text, "\n%s: %zu bytes\n", s->name, s->size);
    for (int32_t i = 0; i < s->num_fields; i++)
        cli_print(text, "  %-22s at %4zu, %3zu bytes\n", s->fields[i].name, s->fields[i].offset, s->fields[i].size);
}

static ekv_status info_run(cli_state *cli)
{
    if (cli->options.json) {
        print_json(cli);
        return EKV_OK;
    }
    cli_print(&cli->out, "evenkv %s\nCUDA backend: %s\n", ekv_version_string(),
              EVENKV_HAVE_CUDA ? "built" : "not in this build");
    for (int32_t i = 0; cli->options.abi && i < NUM_STRUCTS; i++)
        print_struct(&cli->out, &structs[i]);
    return EKV_OK;
}

const cli_command cli_command_info = {
    .name = "info",
    .summary = "the version, what was built, the layout of the public structs",
    .details = "Says the version and whether the CUDA backend was built.  With --abi it also lists size, offset and "
               "initial value of every field of the public structs, for bindings of other languages to check theirs.\n",
    .groups = CLI_ABI | CLI_JSON | CLI_OUTPUT,
    .run = info_run,
};
