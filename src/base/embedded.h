/* SPDX-License-Identifier: Apache-2.0
 * Text files that cmake/embed.cmake put into the library: a table whose last entry has name NULL. */
#ifndef EVENKV_BASE_EMBEDDED_H
#define EVENKV_BASE_EMBEDDED_H

typedef struct ekv_embedded {
    const char *name; /* of the file, without folder and extension */
    const char *text; /* terminated */
} ekv_embedded;

#endif
