/* SPDX-License-Identifier: Apache-2.0
 * Parts of evenkv calibrate. */
#ifndef EVENKV_TOOLS_CALIBRATE_H
#define EVENKV_TOOLS_CALIBRATE_H

#include "cli.h"

/* Without --from: measures what a decode by even costs on the GPU.  Errors: BACKEND_UNAVAILABLE (no GPU), usage errors,
 * those of a decode. */
ekv_status calibrate_gpu_run(cli_state *cli);

/* Writes to --save the text of the device, that of --device or else the built-in model of that name, without the lines
 * for which is_replaced is true; `added` comes at the end.  Errors: NOT_FOUND (no such model), those of the file. */
ekv_status calibrate_save(cli_state *cli, const char *name,
                          bool (*is_replaced)(const void *argument, const char *line, size_t size),
                          const void *argument, const cli_text *added);

#endif
