/* SPDX-License-Identifier: Apache-2.0
 * Batches of KV lengths, from a text, a file or a distribution (and, in replay.h, from a request trace). */
#ifndef EVENKV_TRACE_LENGTHS_H
#define EVENKV_TRACE_LENGTHS_H

#include "evenkv/evenkv.h"

/* One decode batch. */
typedef struct ekv_lengths {
    int32_t *kv_len;      /* [batch_size], each 0..2^31-1 */
    int32_t batch_size;   /* >= 1 */
    int64_t total_tokens; /* sum of kv_len */
    int64_t index;        /* where it comes from: the line of a file, from 1, or the step of a replay, from 0; else 0 */
} ekv_lengths;

/* Owns its batches.  Freed by ekv_lengths_free. */
typedef struct ekv_lengths_list {
    ekv_context *context;
    ekv_lengths *batches; /* [count] */
    int64_t count, capacity;
} ekv_lengths_list;

/* All three: on success *list is a new list; on error it is untouched and ekv_last_error() has the offending
 * value.  The context must outlive the list. */

/* One batch from a text such as "5,17,0"; blanks around a number are allowed.
 * Errors: PARSE (empty, not a number, negative, over 2^31-1), OUT_OF_MEMORY. */
ekv_status ekv_lengths_from_text(ekv_context *context, const char *text, ekv_lengths_list **list);

/* One batch a line, as in a text; blank lines and lines that start with '#' are skipped, CRLF is accepted.
 * Errors: NOT_FOUND (no such file), IO (with the system's reason), PARSE (with the line: as above, or a file
 * that is binary, compressed or without any batch), OUT_OF_MEMORY. */
ekv_status ekv_lengths_from_file(ekv_context *context, const char *path, ekv_lengths_list **list);

/* Where a distribution puts its long ("hot") requests in the batch. */
typedef enum ekv_hot { EKV_HOT_FIRST = 0, EKV_HOT_MIDDLE = 1, EKV_HOT_LAST = 2 } ekv_hot;

/* name: "first", "middle" or "last".  Errors: NOT_FOUND. */
ekv_status ekv_hot_find(const char *name, ekv_hot *hot);

/* One batch of batch_size requests that hold total_tokens together.  dist is one of
 *   uniform  no hot request
 *   skewNN   NN = 1..99: one hot request, which holds floor(total_tokens * NN / 100)
 *   KxNN     K >= 1, NN >= 1, K * NN < 100: K hot requests, each of which holds that many
 * What is left is divided equally among the other requests, the remainder going one token each to the first of
 * them.  The hot requests are neighbours: the first K, the last K, or those from floor((batch_size - K) / 2).
 * Errors: NOT_FOUND (dist), INVALID_ARGUMENT (batch_size < 1, total_tokens < batch_size, batch_size < K + 1, a
 * length that passes 2^31-1), OUT_OF_MEMORY. */
ekv_status ekv_lengths_from_dist(ekv_context *context, const char *dist, int64_t batch_size, int64_t total_tokens,
                                 ekv_hot hot, ekv_lengths_list **list);

/* A list to fill by hand, without batches at first. */
ekv_status ekv_lengths_create(ekv_context *context, ekv_lengths_list **list);
/* Appends a batch; kv_len: [batch_size], each >= 0, copied.  Errors: OUT_OF_MEMORY; the list is then as it was. */
ekv_status ekv_lengths_append(ekv_lengths_list *list, const int32_t *kv_len, int32_t batch_size, int64_t index);

/* The same in the place of batch `place`, 0..count-1. */
ekv_status ekv_lengths_replace(ekv_lengths_list *list, int64_t place, const int32_t *kv_len, int32_t batch_size,
                               int64_t index);

/* list may be NULL. */
void ekv_lengths_free(ekv_lengths_list *list);

#endif
