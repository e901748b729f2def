/* SPDX-License-Identifier: Apache-2.0
 * What a command leaves behind: stdout and files, all of it or none.  Files are written beside their place and renamed
 * when everything else has been written. */
#include "base/context.h"
#include "base/status.h"
#include "cli.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* ---- One file ---------------------------------------------------------------------------------------- */

static ekv_status write_stream(const cli_text *text, FILE *file, const char *name)
{
    errno = 0;
    if ((text->size && fwrite(text->data, 1, text->size, file) != text->size) || fflush(file))
        return cli_fail_file(EKV_ERROR_IO, "write to", name);
    return EKV_OK;
}

/* Writes into an open descriptor and closes it. */
static ekv_status write_descriptor(const cli_text *text, int descriptor, const char *name)
{
    FILE *file = descriptor < 0 ? NULL : fdopen(descriptor, "wb");
    if (!file) {
        ekv_status status = cli_fail_file(EKV_ERROR_IO, "write to", name);
        if (descriptor >= 0)
            close(descriptor);
        return status;
    }
    ekv_status status = write_stream(text, file, name);
    if (fclose(file) && !status)
        status = cli_fail_file(EKV_ERROR_IO, "write to", name);
    return status;
}

/* The rights of the file that is replaced, or those of a new one. */
static mode_t mode_of(const struct stat *replaced)
{
    if (replaced)
        return replaced->st_mode & 07777;
    const mode_t mask = umask(0);
    umask(mask);
    return 0666 & ~mask;
}

/* Writes beside the place of the file and sets file->temporary; what is no regular file, as a pipe or a device, gets
 * the text at once. */
static ekv_status write_beside(cli_file *file)
{
    struct stat there;
    const bool exists = !stat(file->path, &there);
    if (exists && !S_ISREG(there.st_mode))
        return write_descriptor(&file->text, open(file->path, O_WRONLY), file->path);
    if (exists && access(file->path, W_OK))
        return cli_fail_file(EKV_ERROR_IO, "write to", file->path);
    char *resolved = exists ? realpath(file->path, NULL) : NULL; /* a link stays one */
    cli_text name = { 0 };
    cli_print(&name, "%s.XXXXXX", resolved ? resolved : file->path);
    free(resolved);
    const int descriptor = mkstemp(name.data);
    ekv_status status = write_descriptor(&file->text, descriptor, file->path);
    if (!status && chmod(name.data, mode_of(exists ? &there : NULL)))
        status = cli_fail_file(EKV_ERROR_IO, "write to", file->path);
    if (status && descriptor >= 0)
        unlink(name.data);
    if (status)
        free(name.data);
    else
        file->temporary = name.data;
    return status;
}

static ekv_status move_into_place(cli_file *file)
{
    if (!file->temporary)
        return EKV_OK;
    char *place = cli_alloc(strlen(file->temporary) + 1);
    strcpy(place, file->temporary);
    place[strlen(place) - strlen(".XXXXXX")] = 0;
    ekv_status status = EKV_OK;
    if (rename(file->temporary, place))
        status = cli_fail_file(EKV_ERROR_IO, "write to", file->path);
    free(place);
    if (status)
        unlink(file->temporary);
    free(file->temporary);
    file->temporary = NULL;
    return status;
}

/* ---- All of them --------------------------------------------------------------------------------------- */

void cli_write_later(cli_state *cli, const char *path, cli_text *text)
{
    if (cli->num_files == CLI_MAX_FILES)
        abort(); /* more than there are options that name files */
    cli->files[cli->num_files++] = (cli_file){ path, *text, NULL };
    *text = (cli_text){ 0 };
}

ekv_status cli_write_all(cli_state *cli)
{
    if (cli->options.output)
        cli_write_later(cli, cli->options.output, &cli->out);
    ekv_status status = EKV_OK;
    for (int i = 0; i < cli->num_files && !status; i++)
        status = write_beside(&cli->files[i]);
    if (!status && !cli->options.output)
        status = write_stream(&cli->out, stdout, "stdout");
    for (int i = 0; i < cli->num_files && !status; i++)
        status = move_into_place(&cli->files[i]);
    return status;
}

void cli_files_free(cli_state *cli)
{
    for (int i = 0; i < cli->num_files; i++) {
        if (cli->files[i].temporary)
            unlink(cli->files[i].temporary);
        free(cli->files[i].temporary);
        free(cli->files[i].text.data);
    }
    cli->num_files = 0;
}
