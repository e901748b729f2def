/* SPDX-License-Identifier: Apache-2.0
 * The compiled kernels, as cmake/fatbin.cmake embeds them: one image a .cu file, the last entry has name NULL. */
#ifndef EVENKV_CUDA_FATBIN_H
#define EVENKV_CUDA_FATBIN_H

typedef struct ekv_fatbin {
    const char *name; /* of the file, without extension */
    const void *image;
} ekv_fatbin;

extern const ekv_fatbin ekv_fatbins[];

#endif
