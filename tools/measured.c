/* SPDX-License-Identifier: Apache-2.0 */
#include "measured.h"

#include "base/number.h"
#include "base/portable.h"
#include "base/status.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_FILE = 16 << 20, MAX_FIELDS = 64 };

typedef enum column {
    PLANNER,
    DIST,
    BATCH_LINE,
    BATCH,
    TOKENS,
    PAGE_SIZE,
    Q_HEADS,
    KV_HEADS,
    HEAD_DIM,
    DTYPE,
    HOT,
    BACKEND,
    MEDIAN,
    NUM_COLUMNS
} column;

static const struct {
    const char *name, *other_name;
} columns[NUM_COLUMNS] = {
    [PLANNER] = { "planner", "system" },
    [DIST] = { "dist", NULL },
    [BATCH_LINE] = { "batch_line", NULL },
    [BATCH] = { "batch", NULL },
    [TOKENS] = { "total_tokens", NULL },
    [PAGE_SIZE] = { "page_size", NULL },
    [Q_HEADS] = { "q_heads", NULL },
    [KV_HEADS] = { "kv_heads", NULL },
    [HEAD_DIM] = { "head_dim", NULL },
    [DTYPE] = { "dtype", NULL },
    [HOT] = { "hot", NULL },
    [MEDIAN] = { "median_us", NULL },
    [BACKEND] = { "backend", NULL },
};

typedef struct field {
    const char *text;
    size_t size;
} field;

typedef struct reader {
    cli_state *cli;
    char origin[EKV_PATH_SIZE];
    int64_t line;
    const ekv_lengths_list *lengths;
    int place[NUM_COLUMNS]; /* of a column in a line; -1: there is none */
    int num_fields;         /* of the header */
    field fields[MAX_FIELDS];
    int64_t capacity;
} reader;

static int split(field *fields, const char *line, size_t size)
{
    int count = 0;
    for (const char *end = line + size;; line++) {
        const char *comma = line < end ? memchr(line, ',', (size_t)(end - line)) : NULL;
        const char *stop = comma ? comma : end;
        if (count < MAX_FIELDS)
            fields[count] = (field){ line, (size_t)(stop - line) };
        count++;
        if (!comma)
            return count;
        line = comma;
    }
}

static bool is(field f, const char *text)
{
    return text && f.size == strlen(text) && !memcmp(f.text, text, f.size);
}

static ekv_status read_head(reader *r, const char *line, size_t size)
{
    r->num_fields = split(r->fields, line, size);
    for (int c = 0; c < NUM_COLUMNS; c++) {
        r->place[c] = -1;
        for (int i = 0; i < r->num_fields && i < MAX_FIELDS; i++)
            if (is(r->fields[i], columns[c].name) || is(r->fields[i], columns[c].other_name))
                r->place[c] = i;
    }
    static const column needed[] = { PLANNER, BATCH, TOKENS, PAGE_SIZE, Q_HEADS, KV_HEADS, MEDIAN };
    for (size_t i = 0; i < sizeof needed / sizeof needed[0]; i++)
        if (r->place[needed[i]] < 0)
            return ekv_fail(EKV_ERROR_PARSE, "%s: the header has no column %s", r->origin, columns[needed[i]].name);
    if (r->place[DIST] < 0 && r->place[BATCH_LINE] < 0)
        return ekv_fail(EKV_ERROR_PARSE, "%s: the header has neither column dist nor batch_line", r->origin);
    return EKV_OK;
}

static field get(const reader *r, column c)
{
    return r->place[c] < 0 ? (field){ "", 0 } : r->fields[r->place[c]];
}

static ekv_status read_int(const reader *r, column c, int32_t fallback, int32_t largest, int32_t *value)
{
    const field f = get(r, c);
    char label[EKV_PATH_SIZE + 64];
    snprintf(label, sizeof label, "%s:%" PRId64 ": %s", r->origin, r->line, columns[c].name);
    *value = fallback;
    return r->place[c] < 0 ? EKV_OK : ekv_parse_int32(f.text, f.size, label, 1, largest, value);
}

static ekv_status bad_field(const reader *r, column c)
{
    const field f = get(r, c);
    char quoted[EKV_QUOTE_SIZE];
    return ekv_fail(EKV_ERROR_PARSE, "%s:%" PRId64 ": %s '%s' is not known", r->origin, r->line, columns[c].name,
                    ekv_quote(f.text, f.size, quoted));
}

/* ---- Lengths ----------------------------------------------------------------------------------------- */

/* Line `number` of --kv-lens @FILE. */
static ekv_status lengths_of_line(const reader *r, int32_t number, cli_measured_row *row, ekv_lengths_list **list)
{
    for (int64_t i = 0; r->lengths && i < r->lengths->count; i++) {
        const ekv_lengths *lengths = &r->lengths->batches[i];
        if (ekv_max(lengths->index, 1) != number)
            continue;
        ekv_status status = ekv_lengths_create(r->cli->context, list);
        snprintf(row->dist, sizeof row->dist, "file%d", number);
        return status ? status : ekv_lengths_append(*list, lengths->kv_len, lengths->batch_size, 0);
    }
    return ekv_fail(EKV_ERROR_NOT_FOUND, "%s:%" PRId64 ": the row is of line %d of a file; %s", r->origin, r->line,
                    number, r->lengths ? "--kv-lens @FILE has no such line" : "--kv-lens @FILE says which");
}

static ekv_status read_lengths(const reader *r, cli_measured_row *row)
{
    ekv_lengths_list *list = NULL;
    int32_t number;
    ekv_status status;
    const field dist = get(r, DIST);
    char label[EKV_PATH_SIZE + 64];
    if (r->place[BATCH_LINE] >= 0) {
        if (!(status = read_int(r, BATCH_LINE, 1, INT32_MAX, &number)))
            status = lengths_of_line(r, number, row, &list);
    } else if (dist.size > 4 && !memcmp(dist.text, "file", 4)) {
        snprintf(label, sizeof label, "%s:%" PRId64 ": dist", r->origin, r->line);
        if (!(status = ekv_parse_int32(dist.text + 4, dist.size - 4, label, 1, INT32_MAX, &number)))
            status = lengths_of_line(r, number, row, &list);
    } else {
        ekv_hot hot = EKV_HOT_FIRST;
        char place[16] = "first";
        const field f = get(r, HOT);
        if (f.size && f.size < sizeof place && !is(f, "na"))
            snprintf(place, sizeof place, "%.*s", (int)f.size, f.text);
        if (dist.size >= sizeof row->dist || ekv_hot_find(place, &hot))
            return bad_field(r, dist.size >= sizeof row->dist ? DIST : HOT);
        snprintf(row->dist, sizeof row->dist, "%.*s", (int)dist.size, dist.text);
        status =
            ekv_lengths_from_dist(r->cli->context, row->dist, row->batch.batch_size, row->total_tokens, hot, &list);
        if (status)
            status = ekv_fail(status, "%s:%" PRId64 ": %s", r->origin, r->line, ekv_last_error());
    }
    if (!status &&
        (list->batches[0].batch_size != row->batch.batch_size || list->batches[0].total_tokens != row->total_tokens))
        status = ekv_fail(EKV_ERROR_PARSE,
                          "%s:%" PRId64 ": a batch of %d requests and %" PRId64 " tokens; %s has %d and %" PRId64,
                          r->origin, r->line, row->batch.batch_size, row->total_tokens, row->dist,
                          list->batches[0].batch_size, list->batches[0].total_tokens);
    if (!status) {
        const size_t size = (size_t)row->batch.batch_size * sizeof(int32_t);
        int32_t *kv_len = cli_alloc(size);
        memcpy(kv_len, list->batches[0].kv_len, size);
        row->batch.kv_len = kv_len;
    }
    ekv_lengths_free(list);
    return status;
}

/* ---- Rows -------------------------------------------------------------------------------------------- */

static ekv_status read_shape(const reader *r, cli_measured_row *row)
{
    ekv_batch *batch = &row->batch;
    const field tokens = get(r, TOKENS), median = get(r, MEDIAN), dtype = get(r, DTYPE);
    char label[EKV_PATH_SIZE + 64];
    *batch = (ekv_batch)EKV_BATCH_INIT;
    ekv_status status;
    if ((status = read_int(r, BATCH, 0, INT32_MAX, &batch->batch_size)) ||
        (status = read_int(r, PAGE_SIZE, 0, INT32_MAX, &batch->page_size)) ||
        (status = read_int(r, Q_HEADS, 0, UINT16_MAX, &batch->q_heads)) ||
        (status = read_int(r, KV_HEADS, 0, UINT16_MAX, &batch->kv_heads)) ||
        (status = read_int(r, HEAD_DIM, 128, 65536, &batch->head_dim)))
        return status;
    snprintf(label, sizeof label, "%s:%" PRId64 ": total_tokens", r->origin, r->line);
    if ((status = ekv_parse_int64(tokens.text, tokens.size, label, 1, INT64_MAX, &row->total_tokens)))
        return status;
    snprintf(label, sizeof label, "%s:%" PRId64 ": median_us", r->origin, r->line);
    if ((status = ekv_parse_double(median.text, median.size, label, 1e-3, 1e12, &row->median_us)))
        return status;
    for (int d = EKV_DTYPE_F32; dtype.size && d <= EKV_DTYPE_FP8_E5M2; d++)
        if (is(dtype, cli_dtype_name((ekv_dtype)d))) {
            batch->kv_dtype = (ekv_dtype)d;
            batch->q_dtype = d >= EKV_DTYPE_FP8_E4M3 ? EKV_DTYPE_BF16 : (ekv_dtype)d;
            return EKV_OK;
        }
    return dtype.size ? bad_field(r, DTYPE) : EKV_OK;
}

static const char *find_planner(field name)
{
    const char *known;
    for (int32_t i = 0; (known = ekv_planner_name(i)); i++)
        if (is(name, known))
            return known;
    return NULL;
}

static ekv_status read_row(reader *r, const char *line, size_t size, cli_measured *measured)
{
    if (split(r->fields, line, size) != r->num_fields)
        return ekv_fail(EKV_ERROR_PARSE, "%s:%" PRId64 ": the line has other than %d fields", r->origin, r->line,
                        r->num_fields);
    cli_measured_row row = { .line = r->line, .planner = find_planner(get(r, PLANNER)) };
    if (!row.planner) {
        measured->num_foreign++;
        return EKV_OK;
    }
    for (int64_t i = measured->num_rows - 1; i >= 0; i--)
        if (measured->rows[i].planner == row.planner) {
            row.position = measured->rows[i].position + 1;
            break;
        }
    row.ours = is(get(r, BACKEND), "cpu") || is(get(r, BACKEND), "cuda");
    ekv_status status;
    if ((status = read_shape(r, &row)) || (status = read_lengths(r, &row)))
        return status;
    if (measured->num_rows == r->capacity) {
        r->capacity = 2 * r->capacity + 64;
        measured->rows = cli_realloc(measured->rows, (size_t)r->capacity * sizeof *measured->rows);
    }
    measured->rows[measured->num_rows++] = row;
    return EKV_OK;
}

static ekv_status read_lines(reader *r, const char *text, size_t size, cli_measured *measured)
{
    for (const char *end = text + size; text < end;) {
        const char *stop = memchr(text, '\n', (size_t)(end - text));
        size_t length = (size_t)((stop ? stop : end) - text);
        const size_t taken = length + (stop != NULL);
        if (length && text[length - 1] == '\r')
            length--;
        r->line++;
        ekv_status status = EKV_OK;
        if (r->line == 1)
            status = read_head(r, text, length);
        else if (length)
            status = read_row(r, text, length, measured);
        if (status)
            return status;
        text += taken;
    }
    return EKV_OK;
}

static ekv_status read_file(reader *r, const char *path, cli_measured *measured)
{
    char *text;
    size_t size;
    ekv_status status = cli_read_file(path, MAX_FILE, &text, &size);
    if (status)
        return status;
    r->line = 0;
    ekv_show_path(path, r->origin);
    const int64_t before = measured->num_rows;
    status = read_lines(r, text, size, measured);
    if (!status && measured->num_rows == before)
        status = ekv_fail(EKV_ERROR_PARSE, "%s has no row of a planner of ours", r->origin);
    free(text);
    return status;
}

ekv_status cli_measured_read(cli_state *cli, const char *paths, const ekv_lengths_list *lengths, cli_measured *measured)
{
    reader r = { .cli = cli, .lengths = lengths };
    char *path = cli_alloc(strlen(paths) + 1);
    ekv_status status = EKV_OK;
    *measured = (cli_measured){ 0 };
    for (bool more = true; more && !status;) {
        const size_t size = strcspn(paths, ",");
        memcpy(path, paths, size);
        path[size] = 0;
        status = read_file(&r, path, measured);
        more = paths[size] != 0;
        paths += size + more;
    }
    free(path);
    if (status)
        cli_measured_free(measured);
    return status;
}

void cli_measured_free(cli_measured *measured)
{
    for (int64_t i = 0; i < measured->num_rows; i++)
        free((void *)measured->rows[i].batch.kv_len);
    free(measured->rows);
    *measured = (cli_measured){ 0 };
}
