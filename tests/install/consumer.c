/* SPDX-License-Identifier: Apache-2.0
 * A program outside the tree that uses the installed library. */
#include <evenkv/evenkv.h>
#include <stdio.h>

int main(void)
{
    ekv_context *context;
    if (ekv_context_create(NULL, &context)) {
        fprintf(stderr, "%s\n", ekv_last_error());
        return 1;
    }
    printf("evenkv %s\n", ekv_version_string());
    ekv_context_free(context);
    return 0;
}
