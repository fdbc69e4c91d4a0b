/* SPDX-License-Identifier: Apache-2.0 */
/* System calls that Python's posix module lacks. Each returns the call's value, or -errno. */
#ifndef NVHOOK_SYS_H
#define NVHOOK_SYS_H

#include <stdint.h>

int sys_openat2(int dirfd, const char *path, uint64_t flags, uint64_t mode, uint64_t resolve);
int sys_open_tree(int dirfd, const char *path, unsigned int flags);
int sys_move_mount(int from_fd, const char *from, int to_fd, const char *to, unsigned int flags);
int sys_mount_setattr(int fd, const char *path, unsigned int flags, uint64_t set, uint64_t clear,
                      uint64_t propagation);
int sys_fsopen(const char *type, unsigned int flags);
int sys_fsconfig(int fd, unsigned int command, const char *key, const char *value, int aux);
int sys_fsmount(int fd, unsigned int flags, unsigned int attributes);
int sys_umount2(const char *target, int flags);
int sys_setns(int fd, int type);
int sys_setfsuid(uint32_t uid);
int sys_setfsgid(uint32_t gid);
int sys_prctl(int option, unsigned long value);
int sys_bpf(int command, void *attributes, unsigned int size);
int64_t sys_mount_id(int fd);
int64_t sys_filesystem_type(int fd);
uint64_t sys_address(const void *buffer);

#endif
