/* SPDX-License-Identifier: Apache-2.0
 * Runs a fuzz target over each file of a corpus folder, and over the file cut short at many places. */
#include "fuzz.h"

#include <dirent.h>
#include <stdbool.h>
#include <string.h>

enum { MAX_CUTS = 256 };

/* From memory of exactly `size` bytes, so that a sanitizer sees a read past the end. */
static void run(const uint8_t *data, size_t size)
{
    uint8_t *copy = malloc(size ? size : 1);
    if (!copy)
        abort();
    memcpy(copy, data, size);
    LLVMFuzzerTestOneInput(copy, size);
    free(copy);
}

static bool replay_file(const char *path)
{
    FILE *file = fopen(path, "rb");
    if (!file || fseek(file, 0, SEEK_END)) {
        perror(path);
        if (file)
            fclose(file);
        return false;
    }
    long end = ftell(file);
    rewind(file);
    size_t size = end > 0 ? (size_t)end : 0;
    uint8_t *data = malloc(size ? size : 1);
    bool read = data && fread(data, 1, size, file) == size;
    fclose(file);
    if (read) {
        size_t step = size / MAX_CUTS + 1;
        for (size_t cut = 0; cut < size; cut += step)
            run(data, cut);
        run(data, size);
    } else {
        fprintf(stderr, "%s: cannot be read\n", path);
    }
    free(data);
    return read;
}

int main(int argc, char **argv)
{
    if (argc != 2) {
        fprintf(stderr, "usage: %s CORPUS_FOLDER\n", argv[0]);
        return 2;
    }
    DIR *folder = opendir(argv[1]);
    if (!folder) {
        perror(argv[1]);
        return 1;
    }
    int files = 0;
    bool good = true;
    for (struct dirent *entry; (entry = readdir(folder)) != NULL;) {
        char path[4096];
        if (entry->d_name[0] == '.')
            continue;
        snprintf(path, sizeof path, "%s/%s", argv[1], entry->d_name);
        good = replay_file(path) && good;
        files++;
    }
    closedir(folder);
    printf("%d files\n", files);
    return good && files > 0 ? 0 : 1; /* an empty corpus tests nothing */
}
