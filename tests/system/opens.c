/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Says which devices can be made and opened: one line for each argument such as `c:195:0` and way of opening,
 * with the errno's name. ENXIO and the like mean that the device cgroup allows it and no driver is there; EPERM
 * means that it does not. Last come the nodes that every container has, by their names, and a pseudo-terminal.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>

static const struct {
    const char *name;
    int flags;
} ways[] = {{"r", O_RDONLY}, {"w", O_WRONLY}, {"rw", O_RDWR}};

static const char *usual[] = {"/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom",
                              "/dev/tty",  "/dev/ptmx", "/dev/console"};

static const char *outcome(int value)
{
    return value < 0 ? strerrorname_np(errno) : "ok";
}

static void open_each_way(const char *path, const char *name)
{
    for (size_t i = 0; i < sizeof ways / sizeof *ways; i++) {
        int fd = open(path, ways[i].flags | O_NONBLOCK | O_NOCTTY | O_CLOEXEC);
        printf("%s %s: %s\n", name, ways[i].name, outcome(fd));
        if (fd >= 0)
            close(fd);
    }
}

static void device(const char *name)
{
    char kind;
    unsigned int major_number, minor_number;

    if (sscanf(name, "%c:%u:%u", &kind, &major_number, &minor_number) != 3)
        exit(2);
    unlink("/dev/probe");
    mode_t type = kind == 'b' ? S_IFBLK : S_IFCHR;
    int made = mknod("/dev/probe", type | 0600, makedev(major_number, minor_number));
    printf("%s m: %s\n", name, outcome(made));
    if (made == 0)
        open_each_way("/dev/probe", name);
    unlink("/dev/probe");
}

static void terminal(void)
{
    char text[2] = "";
    int leader = posix_openpt(O_RDWR | O_NOCTTY);
    int follower = -1;

    if (leader >= 0 && grantpt(leader) == 0 && unlockpt(leader) == 0)
        follower = open(ptsname(leader), O_RDWR | O_NOCTTY);
    printf("pty open: %s\n", outcome(follower));
    if (follower >= 0)
        printf("pty echo: %s\n", outcome(write(follower, "x", 1) == 1 && read(leader, text, 1) == 1 ? 0 : -1));
}

int main(int argc, char **argv)
{
    for (int i = 1; i < argc; i++)
        device(argv[i]);
    for (size_t i = 0; i < sizeof usual / sizeof *usual; i++)
        open_each_way(usual[i], usual[i]);
    terminal();
    return 0;
}
