/* SPDX-License-Identifier: Apache-2.0
 * The read rate of this machine's CPU: the plain read that `bench --backend cpu` measures a decode by, without one. */
#ifndef EVENKV_TOOLS_READ_PROBE_H
#define EVENKV_TOOLS_READ_PROBE_H

#include "cli.h"

/* Prints GB/s on one thread and on those of the context.  Errors: OUT_OF_MEMORY, SYSTEM. */
ekv_status cli_read_probe(cli_state *cli);

#endif
