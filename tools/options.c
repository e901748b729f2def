/* SPDX-License-Identifier: Apache-2.0 */
#include "options.h"

#include "base/number.h"
#include "base/status.h"
#include "cli.h"
#include "models.h"

#include <stddef.h>
#include <stdlib.h>
#include <string.h>

typedef struct choice {
    const char *name;
    int32_t value;
} choice;

static const choice dtypes[] = { { "fp32", EKV_DTYPE_F32 },          { "fp16", EKV_DTYPE_F16 },
                                 { "bf16", EKV_DTYPE_BF16 },         { "fp8_e4m3", EKV_DTYPE_FP8_E4M3 },
                                 { "fp8_e5m2", EKV_DTYPE_FP8_E5M2 }, { 0 } };
static const choice layouts[] = { { "nhd", EKV_LAYOUT_NHD }, { "hnd", EKV_LAYOUT_HND }, { 0 } };
static const choice places[] = {
    { "first", EKV_HOT_FIRST }, { "middle", EKV_HOT_MIDDLE }, { "last", EKV_HOT_LAST }, { 0 }
};
static const choice formats[] = { { "auto", EKV_TRACE_AUTO },
                                  { "azure", EKV_TRACE_AZURE },
                                  { "mooncake", EKV_TRACE_MOONCAKE },
                                  { "burstgpt", EKV_TRACE_BURSTGPT },
                                  { 0 } };
static const choice dispatches[] = {
    { "grid", EKV_DISPATCH_GRID }, { "queue", EKV_DISPATCH_QUEUE }, { "range", EKV_DISPATCH_RANGE }, { 0 }
};
static const choice kernels[] = { { "auto", EKV_KERNEL_AUTO },
                                  { "mma", EKV_KERNEL_MMA },
                                  { "simt", EKV_KERNEL_SIMT },
                                  { "generic", EKV_KERNEL_GENERIC },
                                  { "avx2", EKV_KERNEL_AVX2 },
                                  { "avx512", EKV_KERNEL_AVX512 },
                                  { "avx512-bf16", EKV_KERNEL_AVX512_BF16 },
                                  { "amx-bf16", EKV_KERNEL_AMX_BF16 },
                                  { 0 } };
static const choice presets[] = { { "decode-imbalance", CLI_PRESET_IMBALANCE },
                                  { "linearity", CLI_PRESET_LINEARITY },
                                  { 0 } };
static const choice systems[] = { { "own", -1 }, { "evenkv", EKV_SYSTEM_EVENKV }, { 0 } };
static const choice fits[] = {
    { "even", CLI_FIT_EVEN }, { "odd", CLI_FIT_ODD }, { "all", CLI_FIT_ALL }, { "none", CLI_FIT_NONE }, { 0 }
};
static const choice backends[] = { { "cpu", EKV_BACKEND_CPU }, { "cuda", EKV_BACKEND_CUDA }, { 0 } };

typedef enum option_kind {
    FLAG, /* bool */
    PLAN_FLAG /* int32_t that is set to 1 */,
    INT32,
    INT64,
    REAL, /* double */
    STRING,
    CHOICE /* int32_t or an enum of its size */
} option_kind;

_Static_assert(sizeof(ekv_dispatch) == sizeof(int32_t), "CHOICE stores an enum as an int32_t");

typedef struct option_row {
    unsigned group;
    const char *name;     /* without the dashes */
    const char *argument; /* what the help calls its value; NULL for a flag */
    option_kind kind;
    size_t offset; /* in cli_options */
    int64_t smallest, largest;
    const choice *choices;
    const char *help;
} option_row;

#define AT(member) offsetof(cli_options, member)
#define TEXT(group, name, argument, member, help)                   \
    {                                                               \
        group, name, argument, STRING, AT(member), 0, 0, NULL, help \
    }
#define SWITCH(group, name, member, help)                     \
    {                                                         \
        group, name, NULL, FLAG, AT(member), 0, 0, NULL, help \
    }
#define PLAN_SWITCH(name, member, help)                                        \
    {                                                                          \
        CLI_PLANNING, name, NULL, PLAN_FLAG, AT(plan.member), 0, 0, NULL, help \
    }
#define ONE_OF(group, name, argument, member, choices, help)           \
    {                                                                  \
        group, name, argument, CHOICE, AT(member), 0, 0, choices, help \
    }
#define NUMBER(group, name, argument, kind, member, smallest, largest, help)   \
    {                                                                          \
        group, name, argument, kind, AT(member), smallest, largest, NULL, help \
    }
#define PLAN_NUMBER(name, argument, member, smallest, largest, help)                        \
    {                                                                                       \
        CLI_PLANNING, name, argument, INT32, AT(plan.member), smallest, largest, NULL, help \
    }

/* The library checks again, against each other and the device; the ranges here are what no batch can have. */
static const option_row table[] = {
    TEXT(CLI_SHAPE, "model", "NAME", model, "shape of a model (default qwen3-30b-a3b), one of:"),
    NUMBER(CLI_SHAPE, "q-heads", "N", INT32, q_heads, 1, 65535, "query heads, in place of the model's"),
    NUMBER(CLI_SHAPE, "kv-heads", "N", INT32, kv_heads, 1, 65535, "KV heads, in place of the model's"),
    NUMBER(CLI_SHAPE, "head-dim", "N", INT32, head_dim, 1, 65536, "head dimension, in place of the model's"),
    NUMBER(CLI_SHAPE, "tp", "N", INT32, tp, 1, 65535,
           "plan for one of N tensor-parallel ranks; KV heads are replicated where there are fewer than N (default 1)"),
    NUMBER(CLI_SHAPE, "page-size", "N", INT32, page_size, 1, INT32_MAX / 2,
           "tokens per page of the KV cache (default 16)"),
    ONE_OF(CLI_SHAPE, "dtype", "NAME", dtype, dtypes,
           "of K and V: fp32, fp16, bf16 (default), fp8_e4m3, fp8_e5m2; Q and O are bf16 beside fp8, else the same"),
    NUMBER(CLI_SHAPE, "q-len", "N", INT32, q_len, 1, 65536, "query tokens per request (default 1)"),

    TEXT(CLI_LENGTHS, "kv-lens", "LIST", kv_lens,
         "KV tokens of each request, as 5,17,0, or @FILE with one batch per line"),
    NUMBER(CLI_DIST, "batch", "B", INT64, batch, 1, INT32_MAX, "with --tokens: a batch of B requests"),
    NUMBER(CLI_DIST, "tokens", "T", INT64, tokens, 1, INT64_MAX, "with --batch: T tokens in all"),
    TEXT(CLI_DIST, "dist", "NAME", dist,
         "how the T tokens are spread: uniform (default); skewNN: one request holds NN percent; KxNN: K requests hold "
         "NN percent each"),
    ONE_OF(CLI_DIST | CLI_SWEEP, "hot", "PLACE", hot, places,
           "where those long requests are: first (default), middle, last"),

    TEXT(CLI_TRACE, "trace", "FILE", trace,
         "request trace: Azure LLM inference CSV, Mooncake JSON lines, BurstGPT CSV"),
    ONE_OF(CLI_TRACE, "trace-format", "NAME", trace_format, formats,
           "auto (default: by its first line), azure, mooncake, burstgpt"),
    NUMBER(CLI_TRACE, "sample", "N", INT64, sample, 1, 1000000,
           "decode steps to draw from the replay (default 1; demo: 2)"),
    NUMBER(CLI_TRACE, "step-ms", "MS", REAL, step_ms, 0, 0, "how long a decode step takes (default 30)"),
    NUMBER(CLI_TRACE, "speedup", "X", REAL, speedup, 0, 0, "requests arrive X times faster than recorded (default 1)"),
    NUMBER(CLI_TRACE, "max-batch", "B", INT32, max_batch, 1, INT32_MAX, "most requests in a step (default: no limit)"),
    NUMBER(CLI_TRACE, "token-budget", "T", INT64, token_budget, 1, INT64_MAX,
           "KV tokens that the cache holds; requests that do not fit wait (default: no limit)"),
    NUMBER(CLI_TRACE | CLI_SWEEP, "seed", "S", INT64, seed, 0, INT64_MAX,
           "seed of all that is drawn at random (default 1)"),

    TEXT(CLI_SWEEP | CLI_REPLAY, "planners", "NAMES", planner, "one, several (as none,even), or all of:"),
    TEXT(CLI_SWEEP, "dists", "NAMES", dists,
         "how tokens are spread (default uniform), any of uniform, skewNN, KxNN; or file: the batches of --kv-lens "
         "@FILE"),
    TEXT(CLI_SWEEP, "batches", "LIST", batches, "numbers of requests, as 4,8,16"),
    TEXT(CLI_SWEEP, "tokens", "LIST", token_list, "KV tokens in all, as 65536,524288"),
    SWITCH(CLI_SWEEP, "sim", sim, "simulate on --device (default h200) in place of measuring"),
    ONE_OF(
        CLI_SWEEP, "preset", "NAME", preset, presets,
        "a simulated sweep, of which other options change parts: decode-imbalance (five distributions, 524,288 "
        "tokens, 4 to 2,048 requests), linearity (time = a + b * tokens over 64K to 2M tokens; with --trace over the "
        "batches of a trace)"),
    TEXT(CLI_SWEEP, "csv", "FILE", csv, "write the results there as CSV, cell by cell"),
    TEXT(CLI_SWEEP | CLI_REPLAY | CLI_CALIBRATE, "plot", "FILE", plot,
         "draw it there: FILE.svg or FILE.png (needs gnuplot)"),

    TEXT(CLI_PLANNERS, "planner", "NAMES", planner, "one, several (as none,even), or all of:"),
    PLAN_SWITCH("cuda-graph", cuda_graph, "FlashInfer planners: the rules under CUDA graph capture"),
    PLAN_NUMBER("resident-ctas", "N", resident_ctas, 1, 64,
                "CTAs per SM that a grid kernel keeps resident (default: the planner's own figure)"),
    PLAN_SWITCH("no-sort", no_sort, "fa3: keep the order of the requests"),
    PLAN_SWITCH("no-pack-gqa", no_pack_gqa, "none: one tile per query head, so that K and V are read once for each"),
    NUMBER(CLI_PLANNING, "table-width", "TOKENS", INT64, plan.table_width, 1, INT32_MAX,
           "fa3: tokens that a row of the page table holds (default: the longest request in whole pages)"),
    PLAN_NUMBER("sm-margin", "N", sm_margin, 0, 65535, "SMs left to others (default 0)"),
    PLAN_NUMBER("ctas-per-sm", "N", ctas_per_sm, 1, 64,
                "even, even-invariant: persistent CTAs per SM (default: the device's)"),
    PLAN_NUMBER("heads-per-tile", "N", heads_per_tile, 1, 65535,
                "even, even-invariant: KV heads per tile (default: the largest divisor of the KV heads up to 4, or 2 "
                "with head_dim above 128)"),
    PLAN_NUMBER("block-tokens", "N", block_tokens, 1, 65536,
                "even: cuts fall on multiples of N tokens (default: the page size if 16 to 64, else 16)"),
    PLAN_NUMBER("chunk-tokens", "N", chunk_tokens, 1, 1 << 24,
                "even-invariant: cuts fall on multiples of N tokens (default 1024)"),
    PLAN_NUMBER(
        "request-cost", "N", request_cost, 0, 65536,
        "even, even-invariant: tokens that a request costs beyond its own (default: the device's divided by the "
        "heads per tile)"),
    PLAN_NUMBER("snap-tokens", "N", snap_tokens, 0, 65536,
                "even: how far from its place a share may begin to begin with a request, at most 1/8 of a share "
                "(default 256)"),
    PLAN_NUMBER("least-share", "N", least_share, 0, 65536,
                "even: tokens of a CTA's share at least; 0: all CTAs take part (default: 512 divided by the heads per "
                "tile on a GPU, 0 on the CPU)"),
    ONE_OF(CLI_PLANNING, "dispatch", "NAME", plan.dispatch, dispatches,
           "run the planner's tiles under another dispatch: grid, queue, range (default: the planner's own)"),

    TEXT(CLI_DEVICE, "device", "NAME", device, "a file with a device model, or one of:"),

    ONE_OF(CLI_EXECUTION, "backend", "NAME", backend, backends, "cpu or cuda (default: cuda where there is a GPU)"),
    ONE_OF(CLI_EXECUTION, "kernel", "NAME", kernel, kernels,
           "auto (default: the fastest); CUDA: mma (tensor cores), simt (CUDA cores); CPU: generic, avx2, avx512, "
           "avx512-bf16, amx-bf16"),
    ONE_OF(CLI_EXECUTION, "layout", "NAME", layout, layouts, "of a page: nhd (default) or hnd"),
    NUMBER(CLI_EXECUTION, "threads", "N", INT32, threads, 1, 1024,
           "threads of the CPU backend (default: EKV_NUM_THREADS, else one for each CPU)"),
    NUMBER(CLI_EXECUTION, "repeat", "N", INT32, repeat, 1, 10000, "timed runs (default: 9 on the CPU, 20 on a GPU)"),
    SWITCH(CLI_EXECUTION, "no-check", no_check,
           "do not compare with the reference (on the CPU that takes seconds per GB of K and V)"),

    SWITCH(CLI_EXECUTION, "no-flush", no_flush, "do not flush the caches before each timed run"),
    { CLI_EXECUTION, "on-device", NULL, PLAN_FLAG, AT(plan.on_device), 0, 0, NULL,
      "CUDA: plan on the GPU in each decode, from lengths that live there" },
    SWITCH(CLI_EXECUTION, "graph", graph,
           "CUDA: time replays of a captured decode, which bring the plan to the GPU each time, in place of launches"),
    TEXT(CLI_TIMELINE | CLI_SIMULATE, "timeline", "FILE", timeline,
         "write there when and where each tile ran, in Chrome's trace format, which Perfetto opens"),

    ONE_OF(CLI_SYSTEM, "system", "NAME", system, systems,
           "whose kernels run the plans: own (default: those of the system that the planner is from), evenkv"),
    TEXT(CLI_SIMULATE, "gantt", "FILE", gantt, "draw there when each tile runs on which SM, as SVG"),
    SWITCH(CLI_SIMULATE, "no-picture", no_picture, "only the table, without the picture of SMs over time"),

    NUMBER(CLI_REPLAY, "layers", "N", INT32, layers, 1, 100000, "layers, in place of the model's"),
    NUMBER(CLI_REPLAY, "weights-gb", "GB", REAL, weights_gb, 0, 0,
           "1e9 bytes of weights of the whole model, in place of the model's at 2 bytes a parameter"),
    NUMBER(CLI_REPLAY, "replicas", "N", INT32, replicas, 1, 65536,
           "servers, each with --tp ranks, that take requests in turn (default 1)"),
    NUMBER(CLI_REPLAY, "kv-memory", "GB", REAL, kv_memory_gb, 0, 0,
           "1e9 bytes for K and V on each rank; requests that do not fit wait (default: the device's memory less its "
           "share of the weights)"),
    NUMBER(CLI_REPLAY, "step-base-us", "US", REAL, step_base_us, 0, 0,
           "what a step takes beside attention (default: reading the rank's weights once)"),
    SWITCH(CLI_REPLAY, "fixed-step", fixed_step,
           "a step takes --step-ms whatever attention takes, so that all planners see the same batches"),
    TEXT(CLI_REPLAY, "worst", "FILE", worst,
         "write there the batch of each planner's longest attention, for simulate --kv-lens @FILE"),

    TEXT(CLI_CALIBRATE, "from", "FILES", from,
         "measured times: CSV of `evenkv bench`, or of other systems with the same columns; several as A.csv,B.csv"),
    ONE_OF(CLI_CALIBRATE, "fit", "ROWS", fit, fits,
           "rows to fit to, by their position among those of their planner, from 0: even (default), odd, all; the "
           "others are judged.  none: judge the constants that the device has"),
    SWITCH(CLI_CALIBRATE, "residuals", residuals, "print every row, measured and simulated"),
    TEXT(CLI_CALIBRATE, "save", "FILE", save, "write there the device's model with the fitted constants"),

    SWITCH(CLI_TILES, "tiles", tiles, "print every tile as well"),
    SWITCH(CLI_ABI, "abi", abi, "list the fields of the public structs as well"),
    SWITCH(CLI_JSON, "json", json, "JSON, one object per line"),
    TEXT(CLI_OUTPUT, "output", "FILE", output, "write there in place of stdout"),
    SWITCH(CLI_OUTPUT, "help", help, "this text"),
};

enum { NUM_OPTIONS = sizeof table / sizeof table[0] };
_Static_assert((int)NUM_OPTIONS <= (int)CLI_MAX_OPTIONS, "cli_options.given has a place for each");

static const char *choice_name(const choice *choices, int32_t value)
{
    for (; choices->name; choices++)
        if (choices->value == value)
            return choices->name;
    return "?";
}

const char *cli_dtype_name(ekv_dtype dtype)
{
    return choice_name(dtypes, (int32_t)dtype);
}

const char *cli_dispatch_name(ekv_dispatch dispatch)
{
    return choice_name(dispatches, (int32_t)dispatch);
}

const char *cli_hot_name(ekv_hot hot)
{
    return choice_name(places, (int32_t)hot);
}

static ekv_status read_choice(const choice *choices, const char *flag, const char *value, int32_t *target)
{
    cli_text names = { 0 };
    for (const choice *c = choices; c->name; c++) {
        if (!strcmp(c->name, value)) {
            *target = c->value;
            free(names.data);
            return EKV_OK;
        }
        cli_print(&names, "%s%s", names.size ? ", " : "", c->name);
    }
    char quoted[EKV_QUOTE_SIZE];
    ekv_status status = ekv_fail(EKV_ERROR_NOT_FOUND, "%s '%s' is none of %.*s", flag,
                                 ekv_quote(value, strlen(value), quoted), (int)names.size, names.data);
    free(names.data);
    return status;
}

static ekv_status read_value(const option_row *option, const char *flag, const char *value, void *target)
{
    const size_t size = value ? strlen(value) : 0;
    switch (option->kind) {
    case FLAG: *(bool *)target = true; return EKV_OK;
    case PLAN_FLAG: *(int32_t *)target = 1; return EKV_OK;
    case STRING: *(const char **)target = value; return EKV_OK;
    case INT32: return ekv_parse_int32(value, size, flag, (int32_t)option->smallest, (int32_t)option->largest, target);
    case INT64: return ekv_parse_int64(value, size, flag, option->smallest, option->largest, target);
    case REAL: return ekv_parse_double(value, size, flag, 1e-6, 1e9, target);
    case CHOICE: return read_choice(option->choices, flag, value, target);
    }
    return EKV_OK;
}

/* The option of that name (size characters) that the groups have, else one of other groups, else NULL. */
static const option_row *find(const char *name, size_t size, unsigned groups)
{
    const option_row *other = NULL;
    for (int i = 0; i < NUM_OPTIONS; i++)
        if (strlen(table[i].name) == size && !memcmp(table[i].name, name, size)) {
            if (table[i].group & groups)
                return &table[i];
            other = &table[i];
        }
    return other;
}

/* Reads the option at arguments[0] and, where it takes one, its value; *used counts both. */
static ekv_status read_option(cli_state *cli, int count, char **arguments, int *used)
{
    char quoted[EKV_QUOTE_SIZE];
    const char *argument = !strcmp(arguments[0], "-h") ? "--help" : arguments[0];
    if (strncmp(argument, "--", 2))
        return ekv_fail(EKV_ERROR_INVALID_ARGUMENT, "unexpected argument '%s'; options start with --",
                        ekv_quote(argument, strlen(argument), quoted));
    const char *equals = strchr(argument, '=');
    const size_t size = equals ? (size_t)(equals - argument) : strlen(argument);
    const option_row *option = find(argument + 2, size - 2, cli->command->groups);
    if (!option)
        return ekv_fail(EKV_ERROR_INVALID_ARGUMENT, "unknown option '%s'", ekv_quote(argument, size, quoted));
    if (!(option->group & cli->command->groups))
        return ekv_fail(EKV_ERROR_INVALID_ARGUMENT, "%s takes no option --%s", cli->command->name, option->name);
    bool *given = &cli->options.given[option - table];
    if (*given)
        return ekv_fail(EKV_ERROR_INVALID_ARGUMENT, "option --%s is given twice", option->name);
    *given = true;

    const char *value = equals ? equals + 1 : NULL;
    *used = 1;
    if (!option->argument && value)
        return ekv_fail(EKV_ERROR_INVALID_ARGUMENT, "option --%s takes no value", option->name);
    if (option->argument && !value) {
        if (count < 2 || !strncmp(arguments[1], "--", 2))
            return ekv_fail(EKV_ERROR_INVALID_ARGUMENT, "option --%s needs a value", option->name);
        value = arguments[1];
        *used = 2;
    }
    if (value && !value[0])
        return ekv_fail(EKV_ERROR_INVALID_ARGUMENT, "the value of option --%s is empty", option->name);
    char flag[32] = "--";
    strcat(flag, option->name); /* names are short */
    return read_value(option, flag, value, (char *)&cli->options + option->offset);
}

ekv_status cli_options_read(cli_state *cli, int count, char **arguments)
{
    cli->options = (cli_options){ .tp = 1,
                                  .page_size = 16,
                                  .q_len = 1,
                                  .dtype = EKV_DTYPE_BF16,
                                  .seed = 1,
                                  .step_ms = 30,
                                  .speedup = 1,
                                  .backend = CLI_BACKEND_AUTO,
                                  .system = -1,
                                  .replicas = 1,
                                  .plan = EKV_PLAN_OPTIONS_INIT };
    for (int used = 1, i = 0; i < count; i += used) {
        ekv_status status = read_option(cli, count - i, arguments + i, &used);
        if (status)
            return cli_usage(cli, status);
    }
    return EKV_OK;
}

const char *cli_options_given(const cli_options *options, unsigned groups)
{
    static char flag[32];
    for (int i = 0; i < NUM_OPTIONS; i++)
        if ((table[i].group & groups) && options->given[i]) {
            strcpy(flag, "--");
            return strcat(flag, table[i].name);
        }
    return NULL;
}

/* A heading before the options of a group. */
static const char *heading(unsigned group)
{
    switch (group) {
    case CLI_SHAPE: return "Shape of the batch";
    case CLI_LENGTHS:
    case CLI_DIST: return "Lengths, given or made";
    case CLI_TRACE:
        return "Lengths from a trace (it has arrivals and totals only, so it is replayed with continuous batching: "
               "a request that has arrived joins the batch when it fits, its prefill takes no time, and each decode "
               "step adds a token to it until its output is complete; the lengths of a batch are input + generated "
               "so far)";
    case CLI_PLANNERS:
    case CLI_PLANNING: return "Planners";
    case CLI_DEVICE: return "Device";
    case CLI_SWEEP: return "The sweep: every distribution x number of requests x number of tokens";
    case CLI_EXECUTION:
    case CLI_TIMELINE: return "Execution";
    case CLI_REPLAY: return "The server: a step takes base + layers x simulated attention";
    case CLI_SYSTEM:
    case CLI_SIMULATE: return "Simulation";
    case CLI_CALIBRATE: return "Measured times";
    default: return "Output";
    }
}

static const char *model_name(int32_t index)
{
    const cli_model *model = cli_model_get(index);
    return model ? model->name : NULL;
}

/* The names that an option takes are known to the tables of models, planners and devices. */
static const struct {
    const char *option;
    const char *(*name)(int32_t index);
} name_lists[] = { { "model", model_name },
                   { "planner", ekv_planner_name },
                   { "planners", ekv_planner_name },
                   { "device", ekv_device_name } };

static bool print_names(cli_text *text, const option_row *option)
{
    for (size_t i = 0; i < sizeof name_lists / sizeof name_lists[0]; i++)
        if (!strcmp(name_lists[i].option, option->name)) {
            cli_text line = { 0 };
            const char *name;
            cli_print(&line, "%s", option->help);
            for (int32_t j = 0; (name = name_lists[i].name(j)); j++)
                cli_print(&line, "%s %s", j ? "," : "", name);
            cli_wrapf(text, 6, "%.*s", (int)line.size, line.data);
            free(line.data);
            return true;
        }
    return false;
}

void cli_options_help(cli_text *text, unsigned groups)
{
    const char *last = NULL;
    for (int i = 0; i < NUM_OPTIONS; i++) {
        const option_row *option = &table[i];
        if (!(option->group & groups))
            continue;
        const char *title = heading(option->group & groups);
        if (!last || strcmp(title, last)) {
            cli_print(text, "\n");
            cli_wrapf(text, 0, "%s:", title);
        }
        last = title;
        cli_print(text, "  --%s%s%s\n", option->name, option->argument ? " " : "",
                  option->argument ? option->argument : "");
        if (!print_names(text, option))
            cli_wrap(text, 6, option->help);
    }
}
