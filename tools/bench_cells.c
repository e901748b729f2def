/* SPDX-License-Identifier: Apache-2.0
 * The cells of a sweep, out of its options. */
#include "base/number.h"
#include "base/portable.h"
#include "base/status.h"
#include "bench.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- Lists ------------------------------------------------------------------------------------------- */

/* The next name of "A,B" from *list on; false at the end. */
static bool next_name(const char **list, const char **name, size_t *size)
{
    if (!*list)
        return false;
    *name = *list;
    *size = strcspn(*list, ",");
    *list = (*name)[*size] ? *name + *size + 1 : NULL;
    return true;
}

/* Numbers of any size: which of them no batch can have is up to the cells. */
static ekv_status read_numbers(cli_state *cli, const char *text, const char *flag, int64_t **numbers, int64_t *count)
{
    const char *name;
    size_t size;
    int64_t n = 0;
    *numbers = cli_alloc((strlen(text) + 1) * sizeof **numbers); /* more than there are */
    while (next_name(&text, &name, &size)) {
        ekv_status status = ekv_parse_int64(name, size, flag, 1, INT64_MAX, &(*numbers)[n++]);
        if (status)
            return cli_usage(cli, status);
    }
    *count = n;
    return EKV_OK;
}

/* ---- Cells ------------------------------------------------------------------------------------------- */

static bench_cell *add_cell(bench_cells *list)
{
    if (list->num_cells == list->capacity) {
        list->capacity = 2 * list->capacity + 16;
        list->cells = cli_realloc(list->cells, (size_t)list->capacity * sizeof *list->cells);
        list->made = cli_realloc(list->made, (size_t)list->capacity * sizeof(ekv_lengths_list *));
    }
    list->cells[list->num_cells] = (bench_cell){ 0 };
    return &list->cells[list->num_cells++];
}

static ekv_status add_made_cell(bench_cells *list, const char *dist, int64_t batch, int64_t tokens)
{
    ekv_lengths_list *lengths;
    ekv_status status =
        ekv_lengths_from_dist(list->cli->context, dist, batch, tokens, (ekv_hot)list->cli->options.hot, &lengths);
    if (status == EKV_ERROR_INVALID_ARGUMENT) { /* the batch cannot be */
        cli_print(&list->left_out, "evenkv: %s, batch %" PRId64 ", %" PRId64 " tokens left out: %s (%s)\n", dist, batch,
                  tokens, ekv_last_error(), ekv_status_name(status));
        return EKV_OK;
    }
    if (status)
        return cli_usage(list->cli, status);
    bench_cell *cell = add_cell(list);
    list->made[list->num_made++] = lengths;
    snprintf(cell->dist, sizeof cell->dist, "%s", dist);
    cell->lengths = &lengths->batches[0];
    cell->made = true;
    return EKV_OK;
}

static ekv_status add_file_cells(bench_cells *list)
{
    ekv_status status = cli_kv_lens_read(list->cli, &list->file);
    if (status)
        return status;
    for (int64_t i = 0; i < list->file->count; i++) {
        bench_cell *cell = add_cell(list);
        cell->lengths = &list->file->batches[i];
        snprintf(cell->dist, sizeof cell->dist, "file%" PRId64, ekv_max(cell->lengths->index, 1));
    }
    return EKV_OK;
}

typedef struct numbers {
    int64_t *batches, *tokens;
    int64_t num_batches, num_tokens;
} numbers;

static ekv_status add_dist(bench_cells *list, const char *dist, const numbers *n)
{
    if (!strcmp(dist, "file"))
        return add_file_cells(list);
    for (int64_t t = 0; t < n->num_tokens; t++)
        for (int64_t b = 0; b < n->num_batches; b++) {
            ekv_status status = add_made_cell(list, dist, n->batches[b], n->tokens[t]);
            if (status)
                return status;
        }
    return EKV_OK;
}

static ekv_status add_dists(bench_cells *list, const char *dists, const numbers *n)
{
    const char *name;
    size_t size;
    while (next_name(&dists, &name, &size)) {
        char dist[32];
        snprintf(dist, sizeof dist, "%.*s", (int)size, name);
        ekv_status status =
            size < sizeof dist
                ? add_dist(list, dist, n)
                : cli_usage(list->cli, ekv_fail(EKV_ERROR_NOT_FOUND, "no distribution is called '%s'", dist));
        if (status)
            return status;
    }
    return EKV_OK;
}

/* Which of the options of lengths go with each other. */
static ekv_status check_lengths(cli_state *cli, const char *dists, bool *has_file)
{
    const cli_options *options = &cli->options;
    const char *list = dists, *name;
    size_t size;
    bool made = false;
    *has_file = false;
    while (next_name(&list, &name, &size)) {
        const bool file = size == 4 && !memcmp(name, "file", 4);
        if (file && *has_file)
            return cli_usage(cli, ekv_fail(EKV_ERROR_INVALID_ARGUMENT, "--dists names file twice"));
        *has_file = *has_file || file;
        made = made || !file;
    }
    if (*has_file != (options->kv_lens != NULL))
        return cli_usage(cli,
                         ekv_fail(EKV_ERROR_INVALID_ARGUMENT, *has_file ? "--dists file needs --kv-lens @FILE"
                                                                        : "--kv-lens goes with --dists file only"));
    if (made && (!options->batches || !options->token_list))
        return cli_usage(cli, ekv_fail(EKV_ERROR_INVALID_ARGUMENT, "bench needs --batches and --tokens, or --dists "
                                                                   "file with --kv-lens @FILE"));
    if (!made && (options->batches || options->token_list))
        return cli_usage(cli, ekv_fail(EKV_ERROR_INVALID_ARGUMENT, "%s does not go with --dists file",
                                       options->batches ? "--batches" : "--tokens"));
    return EKV_OK;
}

ekv_status bench_cells_list(cli_state *cli, bench_cells *list)
{
    list->cli = cli;
    const char *dists = cli->options.dists ? cli->options.dists : "uniform";
    numbers n = { 0 };
    bool has_file;
    ekv_status status = check_lengths(cli, dists, &has_file);
    if (!status && cli->options.batches)
        status = read_numbers(cli, cli->options.batches, "--batches", &n.batches, &n.num_batches);
    if (!status && cli->options.token_list)
        status = read_numbers(cli, cli->options.token_list, "--tokens", &n.tokens, &n.num_tokens);
    if (!status)
        status = add_dists(list, dists, &n);
    free(n.batches);
    free(n.tokens);
    if (!status && !list->num_cells)
        return cli_usage(cli,
                         ekv_fail(EKV_ERROR_INVALID_ARGUMENT, "no batch of the sweep can be: %s", ekv_last_error()));
    if (!status && list->left_out.size)
        fwrite(list->left_out.data, 1, list->left_out.size, stderr);
    return status;
}

void bench_cells_free(bench_cells *list)
{
    for (int64_t i = 0; i < list->num_made; i++)
        ekv_lengths_free(list->made[i]);
    free(list->made);
    free(list->cells);
    free(list->left_out.data);
    ekv_lengths_free(list->file);
}
