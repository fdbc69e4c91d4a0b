# SPDX-License-Identifier: Apache-2.0
"""System calls, one function each, under the kernel's names.

Hot: every container start imports this. Only what Python's posix module lacks is here. A failing call
raises OSError with the call's name in its text and, where the caller gave one, the path it was about.

Kernel versions: openat2 5.6; open_tree, move_mount, fsopen 5.2; mount_setattr 5.12; STATX_MNT_ID 5.8.
"""

from __future__ import annotations

import errno
import posix

from ldcache._sys import ffi, lib

AT_FDCWD = -100
AT_EMPTY_PATH = 0x1000
AT_RECURSIVE = 0x8000

OPEN_TREE_CLONE = 1
OPEN_TREE_CLOEXEC = posix.O_CLOEXEC
MOVE_MOUNT_F_EMPTY_PATH = 0x04
MOVE_MOUNT_T_EMPTY_PATH = 0x40

MOUNT_ATTR_RDONLY = 0x1
MOUNT_ATTR_NOSUID = 0x2
MOUNT_ATTR_NODEV = 0x4
MOUNT_ATTR_NOEXEC = 0x8
MS_PRIVATE = 1 << 18
MNT_DETACH = 2

RESOLVE_NO_MAGICLINKS = 0x02
RESOLVE_NO_SYMLINKS = 0x04
RESOLVE_IN_ROOT = 0x10

FSOPEN_CLOEXEC = 1
FSMOUNT_CLOEXEC = 1
FSCONFIG_SET_STRING = 1
FSCONFIG_CMD_CREATE = 6

CLONE_NEWNS = 0x00020000
PR_SET_PDEATHSIG = 1
PR_SET_NO_NEW_PRIVS = 38
SIGKILL = 9
PROC_SUPER_MAGIC = 0x9FA0
TMPFS_MAGIC = 0x01021994


def error(call: str, number: int, path: str | None = None) -> OSError:
    """An OSError that says which call failed: `move_mount: Invalid argument: '/usr/lib/libcuda.so.1'`. Without a name
    for opening, of which whoever reads it has heard already."""
    try:
        text = posix.strerror(number)
    except ValueError:
        text = f"error {number}"
    text = f"{call}: {text}" if call else text
    return OSError(number, text, path) if path else OSError(number, text)


def _checked(call: str, value: int, path: str | None = None) -> int:
    if value < 0:
        raise error(call, -value, path)
    return value


def encode(path: str) -> bytes:
    """A path as the kernel takes it; bytes that are not UTF-8 travel as surrogate escapes."""
    try:
        return path.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError as bad:
        # A lone surrogate out of JSON, which names no file.
        raise error("no path", errno.EINVAL, ascii(path)) from bad


def openat2(dirfd: int, path: str, flags: int, mode: int = 0, resolve: int = 0) -> int:
    """A descriptor, close-on-exec. A path with a NUL byte cannot reach the kernel whole: EINVAL."""
    if "\0" in path:
        raise error("", errno.EINVAL, path.replace("\0", "\\0"))
    fd: int = lib.sys_openat2(dirfd, encode(path), flags | posix.O_CLOEXEC, mode, resolve)
    return _checked("openat2" if fd == -errno.ENOSYS else "", fd, path)


def open_tree(fd: int, path: str | None = None, recursive: bool = False) -> int:
    """A detached clone of the mount that holds `fd`'s file, rooted at that file. `path` only names it in errors."""
    flags = OPEN_TREE_CLONE | OPEN_TREE_CLOEXEC | AT_EMPTY_PATH
    if recursive:
        flags |= AT_RECURSIVE
    return _checked("open_tree", lib.sys_open_tree(fd, b"", flags), path)


def move_mount(clone: int, target: int, path: str | None = None) -> None:
    """Attach a detached mount on the file or directory that `target` is open on."""
    flags = MOVE_MOUNT_F_EMPTY_PATH | MOVE_MOUNT_T_EMPTY_PATH
    _checked("move_mount", lib.sys_move_mount(clone, b"", target, b"", flags), path)


def mount_setattr(
    fd: int,
    set_attributes: int,
    clear: int = 0,
    propagation: int = 0,
    path: str | None = None,
    recursive: bool = False,
) -> None:
    """Change the attributes of the mount at `fd`."""
    flags = AT_EMPTY_PATH | (AT_RECURSIVE if recursive else 0)
    value = lib.sys_mount_setattr(fd, b"", flags, set_attributes, clear, propagation)
    _checked("mount_setattr", value, path)


def tmpfs(options: tuple[tuple[str, str], ...], attributes: int) -> int:
    """A new, detached tmpfs mount; fill it through its descriptor, then move_mount it."""
    context = _checked("fsopen", lib.sys_fsopen(b"tmpfs", FSOPEN_CLOEXEC))
    try:
        for key, value in options:
            _checked(
                "fsconfig",
                lib.sys_fsconfig(context, FSCONFIG_SET_STRING, encode(key), encode(value), 0),
                key,
            )
        _checked("fsconfig", lib.sys_fsconfig(context, FSCONFIG_CMD_CREATE, ffi.NULL, ffi.NULL, 0))
        return _checked("fsmount", lib.sys_fsmount(context, FSMOUNT_CLOEXEC, attributes))
    finally:
        posix.close(context)


def umount2(target: str, flags: int) -> None:
    """Detach the mount at a path."""
    _checked("umount2", lib.sys_umount2(encode(target), flags), target)


def setns(fd: int, kind: int) -> None:
    """Enter a namespace. A process with a second thread that shares its working directory gets EINVAL."""
    _checked("setns", lib.sys_setns(fd, kind))


def set_filesystem_ids(uid: int, gid: int) -> None:
    """setfsgid and setfsuid: who creates files from here on. A non-zero uid drops DAC_OVERRIDE and MKNOD too."""
    lib.sys_setfsgid(gid)
    lib.sys_setfsuid(uid)


def set_no_new_privs() -> None:
    """No program that this process executes gains privileges. Never call it in what becomes the runtime."""
    _checked("prctl", lib.sys_prctl(PR_SET_NO_NEW_PRIVS, 1))


def die_with_parent() -> None:
    """SIGKILL for this process when the thread that started it ends. It may have ended before: ask getppid."""
    _checked("prctl", lib.sys_prctl(PR_SET_PDEATHSIG, SIGKILL))


def mount_id(fd: int) -> int:
    """The id of the mount that a descriptor is on; two descriptors on one mount have the same."""
    return _checked("statx", lib.sys_mount_id(fd))


def filesystem_type(fd: int) -> int:
    """The f_type of statfs(2), for example PROC_SUPER_MAGIC."""
    return _checked("fstatfs", lib.sys_filesystem_type(fd))


def bpf(command: int, attributes: bytes, call: str = "bpf") -> tuple[int, bytes]:
    """bpf(2): the returned value, and the attributes as the kernel left them. The kernel's errno is raised."""
    buffer = ffi.new("char[]", attributes)
    value = _checked(call, lib.sys_bpf(command, buffer, len(attributes)))
    return value, ffi.buffer(buffer, len(attributes))[:]


def buffer(size_or_bytes: int | bytes) -> tuple[object, int]:
    """Memory for a pointer inside bpf's attributes: the object to keep alive, and its address."""
    memory = ffi.new("char[]", size_or_bytes)
    return memory, lib.sys_address(memory)


def contents(memory: object, size: int) -> bytes:
    """The first `size` bytes of what `buffer` gave."""
    return bytes(ffi.buffer(memory, size))
