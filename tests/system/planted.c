/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Code that an attacker plants where a loader, glibc or Python might look. Whoever loads it leaves a file
 * `ran` in the folder that the build names.
 */
#include <fcntl.h>
#include <unistd.h>

__attribute__((constructor)) static void leave_a_mark(void)
{
    int fd = open(MARK, O_WRONLY | O_CREAT | O_CLOEXEC, 0666);

    if (fd >= 0)
        close(fd);
}

/* What the dynamic loader asks of an audit module: the interface's version. */
unsigned int la_version(unsigned int version)
{
    return version;
}
