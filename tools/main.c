/* SPDX-License-Identifier: Apache-2.0
 * The evenkv command: finds the command, reads its options, runs it, writes what it has to say. */
#include "base/number.h"
#include "base/status.h"
#include "cli.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static const cli_command *const commands[] = { &cli_command_plan,     &cli_command_explain, &cli_command_run,
                                               &cli_command_bench,    &cli_command_demo,    &cli_command_devices,
                                               &cli_command_simulate, &cli_command_replay,  &cli_command_calibrate,
                                               &cli_command_info };
enum { NUM_COMMANDS = sizeof commands / sizeof commands[0] };

ekv_status cli_usage(cli_state *cli, ekv_status status)
{
    if (status && status != EKV_ERROR_OUT_OF_MEMORY)
        cli->exit_code = CLI_USAGE;
    return status;
}

ekv_status cli_plan_status(cli_state *cli, ekv_status status)
{
    return status == EKV_ERROR_INVALID_ARGUMENT || status == EKV_ERROR_NOT_FOUND ? cli_usage(cli, status) : status;
}

/* ---- Help -------------------------------------------------------------------------------------------- */

static void print_overview(cli_text *text)
{
    cli_print(text,
              "evenkv %s: decode attention whose time follows the number of KV tokens\n\n"
              "usage: evenkv COMMAND [options]\n\n",
              ekv_version_string());
    for (int i = 0; i < NUM_COMMANDS; i++)
        cli_print(text, "  %-9s %s\n", commands[i]->name, commands[i]->summary);
    cli_print(text, "\n"
                    "  evenkv COMMAND --help    the options of a command\n"
                    "  evenkv --version         the version\n\n"
                    "Exit status: 0 success, 1 failure, 2 wrong usage.  An error is one line on stderr.\n");
}

static void print_command_help(cli_text *text, const cli_command *command)
{
    cli_print(text, "usage: evenkv %s%s\n\n", command->name, command->groups ? " [options]" : "");
    for (const char *paragraph = command->details; *paragraph;) {
        const size_t size = strcspn(paragraph, "\n");
        cli_wrapf(text, 0, "%.*s", (int)size, paragraph);
        paragraph += size + (paragraph[size] == '\n');
    }
    if (command->groups & (CLI_PLANNERS | CLI_SWEEP | CLI_REPLAY))
        cli_print(text, "Planners unless --planner%s names others: %s\n", command->groups & CLI_PLANNERS ? "" : "s",
                  command->planners);
    cli_options_help(text, command->groups);
}

/* ---- Standard files ---------------------------------------------------------------------------------- */

/* A closed stdout must stay an error of writing: without this the next file opened would take its place. */
static void keep_standard_files(void)
{
    for (int file = STDIN_FILENO; file <= STDERR_FILENO; file++)
        if (fcntl(file, F_GETFD) < 0 && errno == EBADF)
            open("/dev/null", O_RDONLY); /* takes the lowest free number, which is this one */
    signal(SIGPIPE, SIG_IGN);            /* a reader that went away is an error of writing too, ... */
    signal(SIGXFSZ, SIG_IGN);            /* ... and so is a limit on the size of files */
}

/* ---- Commands ---------------------------------------------------------------------------------------- */

static const cli_command *find_command(const char *name)
{
    for (int i = 0; i < NUM_COMMANDS; i++)
        if (!strcmp(commands[i]->name, name))
            return commands[i];
    char quoted[EKV_QUOTE_SIZE];
    ekv_fail(EKV_ERROR_NOT_FOUND, "no command is called '%s'; `evenkv help` lists them",
             ekv_quote(name, strlen(name), quoted));
    return NULL;
}

/* Starting a GPU takes a while, so only what looks at it does. */
static bool wants_gpu(const cli_state *cli)
{
    if (cli->command->groups & CLI_EXECUTION)
        return cli->options.backend != EKV_BACKEND_CPU;
    return cli->command == &cli_command_devices;
}

static ekv_status run_command(cli_state *cli, int count, char **arguments)
{
    ekv_status status = cli_options_read(cli, count, arguments);
    if (status)
        return status;
    if (cli->options.help) {
        print_command_help(&cli->out, cli->command);
        return EKV_OK;
    }
    ekv_context_options options = EKV_CONTEXT_OPTIONS_INIT;
    options.num_threads = cli->options.threads;
    if (!wants_gpu(cli))
        options.cuda_device = -2; /* none */
    if ((status = ekv_context_create(&options, &cli->context)))
        return status;
    status = cli->command->run(cli);
    cli_progress(NULL);
    ekv_context_free(cli->context);
    return status;
}

static ekv_status dispatch(cli_state *cli, int count, char **arguments)
{
    if (count < 2)
        return cli_usage(cli, ekv_fail(EKV_ERROR_INVALID_ARGUMENT, "no command is given; `evenkv help` lists them"));
    const char *first = arguments[1];
    const bool help = !strcmp(first, "help") || !strcmp(first, "--help") || !strcmp(first, "-h");
    const bool version = !strcmp(first, "--version");
    if (version && count == 2) {
        cli_print(&cli->out, "evenkv %s\n", ekv_version_string());
        return EKV_OK;
    }
    if (help && count == 2) {
        print_overview(&cli->out);
        return EKV_OK;
    }
    if ((help && count > 3) || version) {
        char quoted[EKV_QUOTE_SIZE];
        const char *extra = arguments[version ? 2 : 3];
        return cli_usage(cli, ekv_fail(EKV_ERROR_INVALID_ARGUMENT, "unexpected argument '%s'",
                                       ekv_quote(extra, strlen(extra), quoted)));
    }
    cli->command = find_command(help ? arguments[2] : first);
    if (!cli->command)
        return cli_usage(cli, EKV_ERROR_NOT_FOUND);
    if (!help)
        return run_command(cli, count - 2, arguments + 2);
    print_command_help(&cli->out, cli->command);
    return EKV_OK;
}

/* In one line, whatever the names in it. */
static void print_error(ekv_status status)
{
    char line[1024];
    snprintf(line, sizeof line, "%s", ekv_last_error());
    for (char *c = line; *c; c++)
        if ((unsigned char)*c < 0x20 || *c == 0x7F)
            *c = '?';
    fprintf(stderr, "evenkv: %s (%s)\n", line, ekv_status_name(status));
}

int main(int count, char **arguments)
{
    keep_standard_files();
    cli_state cli = { 0 };
    ekv_status status = dispatch(&cli, count, arguments);
    if (!status)
        status = cli_write_all(&cli);
    if (status) {
        print_error(status);
        if (!cli.exit_code)
            cli.exit_code = CLI_FAILURE;
    }
    cli_files_free(&cli);
    free(cli.out.data);
    return cli.exit_code;
}
