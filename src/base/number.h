/* SPDX-License-Identifier: Apache-2.0
 * Strict numbers out of text: the whole of text[0, size) is the number or it is an error.  No white space, no
 * '+', no hexadecimal, no NaN or infinity, and the same result under every locale.  text need not be
 * terminated.  name says in the error what the number is ("--page-size", "h200.device:3: num_sms").
 * Errors: EKV_ERROR_PARSE with name, text and range; *value is then untouched. */
#ifndef EVENKV_BASE_NUMBER_H
#define EVENKV_BASE_NUMBER_H

#include "evenkv/evenkv.h"

/* "-12": decimal digits after an optional '-', in smallest..largest. */
ekv_status ekv_parse_int64(const char *text, size_t size, const char *name, int64_t smallest, int64_t largest,
                           int64_t *value);
ekv_status ekv_parse_int32(const char *text, size_t size, const char *name, int32_t smallest, int32_t largest,
                           int32_t *value);

/* "-12.5e3": digits with an optional '-', fraction and exponent, correctly rounded, in smallest..largest.
 * At most 64 characters. */
ekv_status ekv_parse_double(const char *text, size_t size, const char *name, double smallest, double largest,
                            double *value);

/* For error texts that quote foreign bytes: writes text[0, size) to quoted, at most 40 characters of it,
 * anything but printable ASCII as '?', "..." where it was cut, terminated.  Returns quoted. */
enum { EKV_QUOTE_SIZE = 44 };
const char *ekv_quote(const char *text, size_t size, char quoted[EKV_QUOTE_SIZE]);

/* For error texts that name a file: writes path to shown, of a long one "..." and its last 196 bytes, so that what is
 * wrong with the file still fits behind it.  Returns shown. */
enum { EKV_PATH_SIZE = 200 };
const char *ekv_show_path(const char *path, char shown[EKV_PATH_SIZE]);

#endif
