/* SPDX-License-Identifier: Apache-2.0 */
/* glibc has wrappers for most of these only since 2.36, so all go through syscall(2). */
#define _GNU_SOURCE
#include "sys.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/fsuid.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/vfs.h>
#include <unistd.h>

/* One number on every architecture since Linux 5.1's unified table. */
enum {
    NR_OPEN_TREE = 428,
    NR_MOVE_MOUNT = 429,
    NR_FSOPEN = 430,
    NR_FSCONFIG = 431,
    NR_FSMOUNT = 432,
    NR_OPENAT2 = 437,
    NR_MOUNT_SETATTR = 442,
};

static long result(long value)
{
    return value < 0 ? -errno : value;
}

int sys_openat2(int dirfd, const char *path, uint64_t flags, uint64_t mode, uint64_t resolve)
{
    struct {
        uint64_t flags, mode, resolve;
    } how = {flags, mode, resolve};
    return result(syscall(NR_OPENAT2, dirfd, path, &how, sizeof how));
}

int sys_open_tree(int dirfd, const char *path, unsigned int flags)
{
    return result(syscall(NR_OPEN_TREE, dirfd, path, flags));
}

int sys_move_mount(int from_fd, const char *from, int to_fd, const char *to, unsigned int flags)
{
    return result(syscall(NR_MOVE_MOUNT, from_fd, from, to_fd, to, flags));
}

int sys_mount_setattr(int fd, const char *path, unsigned int flags, uint64_t set, uint64_t clear,
                      uint64_t propagation)
{
    struct {
        uint64_t set, clear, propagation, userns_fd;
    } attributes = {set, clear, propagation, 0};
    return result(syscall(NR_MOUNT_SETATTR, fd, path, flags, &attributes, sizeof attributes));
}

int sys_fsopen(const char *type, unsigned int flags)
{
    return result(syscall(NR_FSOPEN, type, flags));
}

int sys_fsconfig(int fd, unsigned int command, const char *key, const char *value, int aux)
{
    return result(syscall(NR_FSCONFIG, fd, command, key, value, aux));
}

int sys_fsmount(int fd, unsigned int flags, unsigned int attributes)
{
    return result(syscall(NR_FSMOUNT, fd, flags, attributes));
}

int sys_umount2(const char *target, int flags)
{
    return result(syscall(SYS_umount2, target, flags));
}

int sys_setns(int fd, int type)
{
    return result(syscall(SYS_setns, fd, type));
}

int sys_setfsuid(uint32_t uid)
{
    return setfsuid(uid);
}

int sys_setfsgid(uint32_t gid)
{
    return setfsgid(gid);
}

int sys_prctl(int option, unsigned long value)
{
    return result(prctl(option, value, 0UL, 0UL, 0UL));
}

int sys_bpf(int command, void *attributes, unsigned int size)
{
    return result(syscall(SYS_bpf, command, attributes, size));
}

/* statx(2) with STATX_MNT_ID; laid out here because <linux/stat.h> before 5.8 lacks the field. */
int64_t sys_mount_id(int fd)
{
    struct {
        uint32_t mask;
        uint8_t before[140];
        uint64_t mount_id;
        uint8_t after[104];
    } status = {0};
    const unsigned int want = 0x1000;

    if (syscall(SYS_statx, fd, "", AT_EMPTY_PATH, want, &status) < 0)
        return -errno;
    return status.mask & want ? (int64_t)status.mount_id : -ENOSYS;
}

int64_t sys_filesystem_type(int fd)
{
    struct statfs status;

    return fstatfs(fd, &status) < 0 ? -errno : (int64_t)status.f_type;
}

uint64_t sys_address(const void *buffer)
{
    return (uint64_t)(uintptr_t)buffer;
}
