/* SPDX-License-Identifier: Apache-2.0 */
#include "trace/lengths.h"

#include "base/number.h"
#include "base/portable.h"
#include "base/status.h"
#include "trace/grow.h"
#include "trace/lines.h"

#include <inttypes.h>
#include <string.h>

/* The most that ekv_plan_create takes. */
enum { LARGEST_BATCH = INT32_MAX / 8 };

ekv_status ekv_lengths_create(ekv_context *context, ekv_lengths_list **list)
{
    ekv_lengths_list *created = ekv_alloc(context, sizeof *created);
    if (!created)
        return ekv_fail(EKV_ERROR_OUT_OF_MEMORY, "no memory for a list of lengths");
    *created = (ekv_lengths_list){ .context = context };
    *list = created;
    return EKV_OK;
}

void ekv_lengths_free(ekv_lengths_list *list)
{
    if (!list)
        return;
    for (int64_t i = 0; i < list->count; i++)
        ekv_release(list->context, list->batches[i].kv_len);
    ekv_release(list->context, list->batches);
    ekv_release(list->context, list);
}

static ekv_lengths describe(int32_t *kv_len, int32_t batch_size, int64_t index)
{
    ekv_lengths batch = { .kv_len = kv_len, .batch_size = batch_size, .index = index };
    for (int32_t i = 0; i < batch_size; i++)
        batch.total_tokens += kv_len[i];
    return batch;
}

/* Appends a batch whose lengths the list then owns. */
static ekv_status append_owned(ekv_lengths_list *list, int32_t *kv_len, int32_t batch_size, int64_t index)
{
    if (list->count == list->capacity) {
        int64_t capacity = list->capacity ? list->capacity * 2 : 16;
        ekv_lengths *batches = ekv_grow(list->context, list->batches, (size_t)list->count * sizeof *batches,
                                        (size_t)capacity * sizeof *batches);
        if (!batches)
            return ekv_fail(EKV_ERROR_OUT_OF_MEMORY, "no memory for %" PRId64 " batches", capacity);
        list->batches = batches;
        list->capacity = capacity;
    }
    list->batches[list->count++] = describe(kv_len, batch_size, index);
    return EKV_OK;
}

static ekv_status alloc_lengths(ekv_context *context, int64_t batch_size, int32_t **kv_len)
{
    int32_t *created = ekv_alloc(context, (size_t)batch_size * sizeof *created);
    if (!created)
        return ekv_fail(EKV_ERROR_OUT_OF_MEMORY, "no memory for the lengths of %" PRId64 " requests", batch_size);
    *kv_len = created;
    return EKV_OK;
}

static ekv_status copy_lengths(ekv_context *context, const int32_t *kv_len, int32_t batch_size, int32_t **copy)
{
    ekv_status status = alloc_lengths(context, batch_size, copy);
    if (!status)
        memcpy(*copy, kv_len, (size_t)batch_size * sizeof *kv_len);
    return status;
}

ekv_status ekv_lengths_append(ekv_lengths_list *list, const int32_t *kv_len, int32_t batch_size, int64_t index)
{
    int32_t *copy = NULL;
    ekv_status status = copy_lengths(list->context, kv_len, batch_size, &copy);
    if (!status && (status = append_owned(list, copy, batch_size, index)))
        ekv_release(list->context, copy);
    return status;
}

ekv_status ekv_lengths_replace(ekv_lengths_list *list, int64_t place, const int32_t *kv_len, int32_t batch_size,
                               int64_t index)
{
    int32_t *copy = NULL;
    ekv_status status = copy_lengths(list->context, kv_len, batch_size, &copy);
    if (status)
        return status;
    ekv_release(list->context, list->batches[place].kv_len);
    list->batches[place] = describe(copy, batch_size, index);
    return EKV_OK;
}

/* ---- Text and file ----------------------------------------------------------------------------------- */

static ekv_status parse_length(ekv_line item, int32_t index, int32_t *length)
{
    if (!ekv_parse_int32(item.text, item.size, "kv_len", 0, INT32_MAX, length))
        return EKV_OK;
    char name[32]; /* only a bad length pays for its name */
    snprintf(name, sizeof name, "kv_len[%" PRId32 "]", index);
    return ekv_parse_int32(item.text, item.size, name, 0, INT32_MAX, length);
}

/* Appends the batch that a line holds. */
static ekv_status append_line(ekv_lengths_list *list, ekv_line line, int64_t index)
{
    const char *const end = line.text + line.size;
    int64_t batch_size = 1;
    for (const char *c = line.text; c < end; c++)
        batch_size += *c == ',';
    if (batch_size > LARGEST_BATCH)
        return ekv_fail(EKV_ERROR_PARSE, "a batch of %" PRId64 " requests; the most is %d", batch_size, LARGEST_BATCH);
    int32_t *kv_len = NULL;
    ekv_status status = alloc_lengths(list->context, batch_size, &kv_len);
    if (status)
        return status;
    const char *begin = line.text;
    for (int32_t i = 0; !status && i < batch_size; i++) {
        const char *comma = memchr(begin, ',', (size_t)(end - begin));
        ekv_line item = { .text = begin, .size = (size_t)((comma ? comma : end) - begin) };
        status = parse_length(ekv_line_trim(item), i, &kv_len[i]);
        begin = comma ? comma + 1 : end;
    }
    if (status || (status = append_owned(list, kv_len, (int32_t)batch_size, index)))
        ekv_release(list->context, kv_len);
    return status;
}

ekv_status ekv_lengths_from_text(ekv_context *context, const char *text, ekv_lengths_list **list)
{
    ekv_lengths_list *created = NULL;
    ekv_status status = ekv_lengths_create(context, &created);
    if (status)
        return status;
    ekv_line line = ekv_line_trim((ekv_line){ .text = text, .size = strlen(text) });
    status = line.size ? append_line(created, line, 0) : ekv_fail(EKV_ERROR_PARSE, "the list of lengths is empty");
    if (status)
        ekv_lengths_free(created);
    else
        *list = created;
    return status;
}

static ekv_status append_lines(ekv_lengths_list *list, ekv_lines *lines)
{
    for (;;) {
        ekv_line line;
        bool end;
        ekv_status status = ekv_lines_next(lines, &line, &end);
        if (status)
            return status;
        if (end)
            break;
        line = ekv_line_trim(line);
        if (!line.size || *line.text == '#')
            continue;
        if ((status = append_line(list, line, lines->line)))
            return ekv_fail(status, "%s, line %" PRId64 ": %s", lines->name, lines->line, ekv_last_error());
    }
    if (!lines->line)
        return ekv_fail(EKV_ERROR_PARSE, "%s is empty", lines->name);
    if (!list->count)
        return ekv_fail(EKV_ERROR_PARSE, "%s has no batch of lengths, only blank lines and comments", lines->name);
    return EKV_OK;
}

ekv_status ekv_lengths_from_file(ekv_context *context, const char *path, ekv_lengths_list **list)
{
    ekv_lines lines;
    ekv_lengths_list *created = NULL;
    ekv_status status = ekv_lines_open(context, path, &lines);
    if (status)
        return status;
    if (!(status = ekv_lengths_create(context, &created))) {
        if ((status = append_lines(created, &lines)))
            ekv_lengths_free(created);
        else
            *list = created;
    }
    ekv_lines_close(&lines);
    return status;
}

/* ---- Distributions ----------------------------------------------------------------------------------- */

ekv_status ekv_hot_find(const char *name, ekv_hot *hot)
{
    static const char *const names[] = {
        [EKV_HOT_FIRST] = "first", [EKV_HOT_MIDDLE] = "middle", [EKV_HOT_LAST] = "last"
    };
    for (int32_t i = 0; i < 3; i++)
        if (!strcmp(name, names[i])) {
            *hot = (ekv_hot)i;
            return EKV_OK;
        }
    char quoted[EKV_QUOTE_SIZE];
    return ekv_fail(EKV_ERROR_NOT_FOUND, "no place '%s' for hot requests; there are first, middle and last",
                    ekv_quote(name, strlen(name), quoted));
}

typedef struct hot_share {
    int64_t requests; /* hot requests, K */
    int64_t percent;  /* of all tokens that each of them holds, NN */
} hot_share;

/* The numbers of "skewNN" and "KxNN"; false where dist is neither. */
static bool parse_hot_share(const char *dist, hot_share *share)
{
    const char *x = strchr(dist, 'x');
    if (!strncmp(dist, "skew", 4)) {
        share->requests = 1;
        return !ekv_parse_int64(dist + 4, strlen(dist + 4), "skew", 1, 99, &share->percent);
    }
    return x && !ekv_parse_int64(dist, (size_t)(x - dist), "K", 1, 99, &share->requests) &&
           !ekv_parse_int64(x + 1, strlen(x + 1), "NN", 1, 99, &share->percent) &&
           share->requests * share->percent < 100;
}

static ekv_status parse_dist(const char *dist, hot_share *share)
{
    *share = (hot_share){ 0, 0 };
    if (!strcmp(dist, "uniform") || parse_hot_share(dist, share))
        return EKV_OK;
    char quoted[EKV_QUOTE_SIZE];
    return ekv_fail(
        EKV_ERROR_NOT_FOUND,
        "no distribution '%s'; there are uniform, skewNN (NN 1..99) and KxNN (K >= 1, NN >= 1, K * NN < 100)",
        ekv_quote(dist, strlen(dist), quoted));
}

static ekv_status check_sizes(const char *dist, const hot_share *share, int64_t batch_size, int64_t total_tokens)
{
    if (batch_size < 1 || batch_size > LARGEST_BATCH)
        return ekv_fail(EKV_ERROR_INVALID_ARGUMENT, "the batch is %" PRId64 " requests; it must be 1..%d", batch_size,
                        LARGEST_BATCH);
    if (total_tokens < batch_size)
        return ekv_fail(EKV_ERROR_INVALID_ARGUMENT, "%" PRId64 " tokens are fewer than the %" PRId64 " requests",
                        total_tokens, batch_size);
    if (batch_size < share->requests + 1)
        return ekv_fail(EKV_ERROR_INVALID_ARGUMENT, "%s needs a batch of at least %" PRId64 " requests; it is %" PRId64,
                        dist, share->requests + 1, batch_size);
    return EKV_OK;
}

/* kv_len: [batch_size], to be written.  Errors: INVALID_ARGUMENT (a length passes 2^31-1). */
static ekv_status spread(const char *dist, const hot_share *share, int64_t batch_size, int64_t total_tokens,
                         ekv_hot hot, int32_t *kv_len)
{
    const int64_t others = batch_size - share->requests;
    /* floor(total * percent / 100), and ceil(rest / others) below, without a product or sum that may overflow */
    const int64_t hot_tokens = total_tokens / 100 * share->percent + total_tokens % 100 * share->percent / 100;
    const int64_t rest = total_tokens - share->requests * hot_tokens;
    const int64_t longest = ekv_max(hot_tokens, rest / others + (rest % others > 0));
    if (longest > INT32_MAX)
        return ekv_fail(EKV_ERROR_INVALID_ARGUMENT,
                        "%s of %" PRId64 " tokens over %" PRId64 " requests makes a length of %" PRId64
                        "; the most is %d",
                        dist, total_tokens, batch_size, longest, INT32_MAX);
    const int64_t first_hot = hot == EKV_HOT_FIRST ? 0 : hot == EKV_HOT_LAST ? others : others / 2;
    int64_t other = 0;
    for (int64_t i = 0; i < batch_size; i++) {
        const bool is_hot = i >= first_hot && i < first_hot + share->requests;
        kv_len[i] = (int32_t)(is_hot ? hot_tokens : rest / others + (other < rest % others));
        other += !is_hot;
    }
    return EKV_OK;
}

ekv_status ekv_lengths_from_dist(ekv_context *context, const char *dist, int64_t batch_size, int64_t total_tokens,
                                 ekv_hot hot, ekv_lengths_list **list)
{
    hot_share share;
    ekv_status status;
    if ((status = parse_dist(dist, &share)) || (status = check_sizes(dist, &share, batch_size, total_tokens)))
        return status;
    ekv_lengths_list *created = NULL;
    if ((status = ekv_lengths_create(context, &created)))
        return status;
    int32_t *kv_len = NULL;
    if ((status = alloc_lengths(context, batch_size, &kv_len)) ||
        (status = spread(dist, &share, batch_size, total_tokens, hot, kv_len)) ||
        (status = append_owned(created, kv_len, (int32_t)batch_size, 0))) {
        ekv_release(context, kv_len);
        ekv_lengths_free(created);
        return status;
    }
    *list = created;
    return EKV_OK;
}
