/* SPDX-License-Identifier: Apache-2.0
 * The options of all commands, in one table (options.c): an option has one name, one meaning and one check
 * wherever it occurs. */
#ifndef EVENKV_TOOLS_OPTIONS_H
#define EVENKV_TOOLS_OPTIONS_H

#include "evenkv/evenkv.h"
#include "trace/lengths.h"
#include "trace/trace.h"

#include <stdbool.h>

typedef struct cli_state cli_state;
typedef struct cli_text cli_text;

/* Groups of options; a command takes whole groups. */
enum {
    CLI_SHAPE = 1 << 0,      /* heads, head_dim, page size, dtype */
    CLI_LENGTHS = 1 << 1,    /* KV lengths given */
    CLI_DIST = 1 << 2,       /* KV lengths made by a distribution */
    CLI_TRACE = 1 << 3,      /* KV lengths from a request trace */
    CLI_PLANNERS = 1 << 4,   /* --planner */
    CLI_PLANNING = 1 << 5,   /* what planners take */
    CLI_DEVICE = 1 << 6,     /* --device */
    CLI_EXECUTION = 1 << 7,  /* what runs on a backend */
    CLI_TILES = 1 << 8,      /* --tiles */
    CLI_JSON = 1 << 9,       /* --json */
    CLI_OUTPUT = 1 << 10,    /* --output, --help */
    CLI_SWEEP = 1 << 11,     /* many batches by many planners */
    CLI_TIMELINE = 1 << 12,  /* --timeline */
    CLI_CALIBRATE = 1 << 13, /* measured times */
    CLI_SIMULATE = 1 << 14,  /* what is drawn of a simulation */
    CLI_SYSTEM = 1 << 15,    /* --system */
    CLI_REPLAY = 1 << 16,    /* a serving model */
    CLI_ABI = 1 << 17,       /* --abi */
    CLI_BATCH = CLI_SHAPE | CLI_LENGTHS | CLI_DIST | CLI_TRACE
};

enum { CLI_BACKEND_AUTO = -1 };
enum { CLI_MAX_OPTIONS = 128 };

/* Sweeps that have a name. */
typedef enum cli_preset { CLI_PRESET_NONE = 0, CLI_PRESET_IMBALANCE, CLI_PRESET_LINEARITY } cli_preset;

/* Rows that constants are fitted to. */
typedef enum cli_fit { CLI_FIT_EVEN = 0, CLI_FIT_ODD, CLI_FIT_ALL, CLI_FIT_NONE } cli_fit;

/* What was given; 0 or NULL where an option without a default was not. */
typedef struct cli_options {
    const char *model;
    int32_t q_heads, kv_heads, head_dim; /* over those of the model */
    int32_t tp;
    int32_t page_size;
    int32_t q_len;
    int32_t dtype;  /* ekv_dtype of K and V */
    int32_t layout; /* ekv_layout */

    const char *kv_lens; /* "5,17" or "@FILE" */
    int64_t batch, tokens;
    const char *dist;
    int32_t hot; /* ekv_hot */

    const char *trace;
    int32_t trace_format; /* ekv_trace_format */
    int64_t sample;       /* 0: the command's own */
    int64_t seed;
    double step_ms;
    double speedup;
    int32_t max_batch;
    int64_t token_budget;

    const char *planner;
    ekv_plan_options plan;
    const char *device;

    int32_t backend; /* ekv_backend, or CLI_BACKEND_AUTO */
    int32_t kernel;  /* ekv_kernel */
    int32_t threads;
    int32_t repeat; /* 0: the backend's own */
    bool no_check, no_flush, graph;
    const char *timeline;

    const char *dists, *batches, *token_list; /* "A,B" */
    const char *csv, *plot;
    bool sim;
    int32_t preset; /* cli_preset */

    int32_t layers, replicas;
    double weights_gb, kv_memory_gb, step_base_us;
    bool fixed_step;
    const char *worst;

    const char *gantt;
    bool no_picture;
    int32_t system; /* ekv_system, or -1 */

    const char *from, *save;
    int32_t fit; /* cli_fit */
    bool residuals;

    bool tiles, abi, json, help;
    const char *output;

    bool given[CLI_MAX_OPTIONS]; /* by row of the table */
} cli_options;

/* Sets defaults, then reads arguments[0..count).  Errors (all usage errors): an unknown option or one that the
 * command does not take, a missing or malformed value, an option given twice. */
ekv_status cli_options_read(cli_state *cli, int count, char **arguments);

/* The first option of the groups that was given, as "--name"; NULL if none was. */
const char *cli_options_given(const cli_options *options, unsigned groups);

/* The help of the groups' options. */
void cli_options_help(cli_text *text, unsigned groups);

/* "fp32", "fp16", "bf16", "fp8_e4m3", "fp8_e5m2". */
const char *cli_dtype_name(ekv_dtype dtype);
/* "grid", "queue", "range". */
const char *cli_dispatch_name(ekv_dispatch dispatch);
/* "first", "middle", "last". */
const char *cli_hot_name(ekv_hot hot);

#endif
