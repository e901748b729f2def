/* SPDX-License-Identifier: Apache-2.0
 * Execution on a GPU in a build without nvcc: cli_backend_choose never gets here. */
#include "execution.h"

const cli_backend cli_backend_cuda = { .name = "cuda" };
