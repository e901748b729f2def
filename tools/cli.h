/* SPDX-License-Identifier: Apache-2.0
 * What all commands of the tool share.
 *
 * A command writes to cli->out, in memory; main writes it to its destination once the command has succeeded, so
 * that an error leaves nothing on stdout.  Where memory for text or JSON runs out the tool ends at once with the
 * usual error line (cli_alloc): nothing has been written by then. */
#ifndef EVENKV_TOOLS_CLI_H
#define EVENKV_TOOLS_CLI_H

#include "evenkv/evenkv.h"
#include "options.h"

#include <stdbool.h>
#include <stddef.h>

typedef struct cli_text {
    char *data; /* [size], not terminated */
    size_t size, capacity;
} cli_text;

typedef struct cli_state cli_state;

typedef struct cli_command {
    const char *name;
    const char *summary;  /* one line */
    const char *details;  /* paragraphs for --help */
    unsigned groups;      /* option groups that it takes */
    const char *planners; /* what it runs without --planner; NULL where it plans nothing */
    ekv_status (*run)(cli_state *cli);
} cli_command;

/* A file that the command writes when it has succeeded. */
typedef struct cli_file {
    const char *path;
    cli_text text;
    char *temporary; /* written beside its place; NULL: not yet */
} cli_file;

enum { CLI_MAX_FILES = 4 };

struct cli_state {
    const cli_command *command;
    cli_options options;
    ekv_context *context;
    cli_text out;
    cli_file files[CLI_MAX_FILES];
    int num_files;
    int exit_code; /* of a failure, CLI_FAILURE or CLI_USAGE; a command that succeeds may set it too */
};

enum { CLI_FAILURE = 1, CLI_USAGE = 2 };

/* ---- Output (output.c) ------------------------------------------------------------------------------- */

/* Takes the text over.  path stays the caller's until the end. */
void cli_write_later(cli_state *cli, const char *path, cli_text *text);
/* stdout or --output, and all files: on an error every file is as it was. */
ekv_status cli_write_all(cli_state *cli);
void cli_files_free(cli_state *cli);

/* Where the command line itself is at fault: remembers the exit code and passes the status on, as in
 * `return cli_usage(cli, ekv_fail(...))`. */
ekv_status cli_usage(cli_state *cli, ekv_status status);

/* The same for the status of ekv_plan_create: a wrong argument or name came from the command line. */
ekv_status cli_plan_status(cli_state *cli, ekv_status status);

void *cli_alloc(size_t size);
void *cli_realloc(void *pointer, size_t size);

__attribute__((format(printf, 2, 3))) void cli_print(cli_text *text, const char *format, ...);
void cli_append(cli_text *text, const char *bytes, size_t size);
/* Words of a paragraph broken at 100 columns, each line after `indent` blanks; ends with a newline. */
void cli_wrap(cli_text *text, int indent, const char *paragraph);
/* As cli_print to a text that is then wrapped. */
__attribute__((format(printf, 3, 4))) void cli_wrapf(cli_text *text, int indent, const char *format, ...);

/* A line on stderr that replaces the one before, only where stderr is a terminal; NULL clears it. */
void cli_progress(const char *text);

/* Says by errno why `what` ("open", "write to") failed for the file, and returns status. */
ekv_status cli_fail_file(ekv_status status, const char *what, const char *path);

/* Reads a whole file.  *text is malloced, *size bytes long and has a 0 behind them.  limit: bytes, a larger file is
 * an error.  Errors: NOT_FOUND, IO, PARSE (over the limit). */
ekv_status cli_read_file(const char *path, size_t limit, char **text, size_t *size);

extern const cli_command cli_command_plan, cli_command_explain, cli_command_run, cli_command_bench, cli_command_demo,
    cli_command_devices, cli_command_calibrate, cli_command_simulate, cli_command_replay, cli_command_info;

#endif
