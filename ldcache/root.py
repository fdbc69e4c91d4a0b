# SPDX-License-Identifier: Apache-2.0
"""Opening inside a root: a path is looked up as if the root's directory were `/`.

Hot. A root is an O_PATH descriptor of a directory. Whoever built the image chose the links below it, so
nothing here joins a path and opens it: openat2 with RESOLVE_IN_ROOT does the look-up (Linux 5.6), or, where
that call is missing, a walk component by component that never opens `..` and so cannot be led out by a
folder that is renamed meanwhile. Absolute links restart at the root; magic links (`/proc/self/fd/…`) are
refused.
"""

from __future__ import annotations

import errno
import posix

from ldcache import kernel
from ldcache.errors import NvhookError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

PATH = posix.O_PATH | posix.O_CLOEXEC
INSIDE = kernel.RESOLVE_IN_ROOT | kernel.RESOLVE_NO_MAGICLINKS
LINKS_MAX = 40
PATH_MAX = 4096
# Parts of one path that an image chose, those of links among them, and of all that one start follows: a tenth of a
# second.
PARTS_MAX = 256
ALL_PARTS_MAX = 1 << 14
# Links of a folder to names beside them: libcuda.so, libcuda.so.1, libcuda.so.580.1.
NEAR_LINKS_MAX = 4
ATTEMPTS = 16

# statfs(2)'s f_type: proc, sysfs, cgroup, cgroup2, debugfs, tracefs, securityfs, configfs, pstore, bpf, mqueue,
# efivarfs, selinuxfs, nsfs.
PSEUDO = {
    kernel.PROC_SUPER_MAGIC,
    *(0x62656572, 0x27E0EB, 0x63677270, 0x64626720, 0x74726163, 0x73636673, 0x62656570, 0x6165676C),
    *(0xCAFE4A11, 0x19800202, 0xDE5E81E4, 0xF97CFF8C, 0x6E736673),
}

S_IFMT = 0o170000
S_IFREG = 0o100000
S_IFDIR = 0o040000
S_IFLNK = 0o120000
S_IFCHR = 0o020000
S_IFBLK = 0o060000
S_IFSOCK = 0o140000


def file_type(mode: int) -> int:
    """The type bits of a st_mode."""
    return mode & S_IFMT


def open_root(path: str) -> int:
    """An O_PATH descriptor of a directory, to be used as a root."""
    return posix.open(path, PATH | posix.O_DIRECTORY)


def open_host(path: str) -> int:
    """The same of the host's root, or of the folder that stands for it. Raises NvhookError."""
    try:
        return open_root(path)
    except OSError as error:
        raise NvhookError(f"cannot open the host root {path}: {error.strerror}", "give an existing folder") from error


class Budget:
    """What may still be spent on links of paths that an image chose. The kernel follows 40 of 4 KB each in a look-up,
    which takes it 4 ms; an image can have that done ten thousand times over."""

    __slots__ = ("parts",)

    def __init__(self, parts: int = ALL_PARTS_MAX) -> None:
        self.parts = parts


def open_path(root: int, path: str, follow: bool = True, budget: Budget | None = None) -> int:
    """An O_PATH descriptor of what `path` names inside the root; with `follow` off, of a final link itself.

    With a budget, a path with links in it costs its parts, those of the links among them. Raises OSError: ENOENT,
    ENOTDIR, ELOOP (also for a magic link, past PARTS_MAX parts, and where the budget is used up).
    """
    flags = PATH if follow else PATH | posix.O_NOFOLLOW
    if not _HAVE_OPENAT2[0]:
        return walk(root, path, follow, budget)
    if budget is None:
        return _open2(root, path, flags)
    try:
        return kernel.openat2(root, path, flags, 0, INSIDE | kernel.RESOLVE_NO_SYMLINKS)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.EAGAIN, errno.ENOSYS):
            raise
    return walk(root, path, follow, budget)


# One mutable place, decided by the first ENOSYS (kernel before 5.6, or a seccomp filter that says so).
_HAVE_OPENAT2 = [True]


def _open2(root: int, path: str, flags: int) -> int:
    for _ in range(ATTEMPTS):
        try:
            return kernel.openat2(root, path, flags, 0, INSIDE)
        except OSError as error:
            if error.errno == errno.ENOSYS:
                _HAVE_OPENAT2[0] = False
                break
            # A rename somewhere raced with a `..` in the path: the kernel can't tell, and asks to try again.
            if error.errno != errno.EAGAIN:
                raise
    return walk(root, path, not flags & posix.O_NOFOLLOW)


def walk(root: int, path: str, follow: bool = True, budget: Budget | None = None) -> int:
    """What `open_path` does, without openat2: a stack of descriptors from the root, `..` pops."""
    if not path:
        raise kernel.error("", errno.ENOENT, path)
    if "\0" in path:
        raise kernel.error("", errno.EINVAL, path.replace("\0", "\\0"))
    if len(kernel.encode(path)) >= PATH_MAX:
        raise kernel.error("", errno.ENAMETOOLONG, path)
    # A trailing slash means "as a directory"; splitting leaves an empty last part that says so.
    parts = path.split("/")[::-1]
    stack = [posix.dup(root)]
    links = 0
    spent = _spend(budget, 0, parts, path)
    try:
        while parts:
            name = parts.pop()
            if file_type(posix.fstat(stack[-1]).st_mode) != S_IFDIR:
                raise kernel.error("", errno.ENOTDIR, path)
            if name in ("", "."):
                continue
            if name == "..":
                if len(stack) > 1:
                    posix.close(stack.pop())
                continue
            found = _open_entry(stack[-1], name, path)
            if file_type(posix.fstat(found).st_mode) != S_IFLNK or (not parts and not follow):
                stack.append(found)
                continue
            try:
                target = _link_text(found, path)
            finally:
                posix.close(found)
            links += 1
            if links > LINKS_MAX:
                raise kernel.error("", errno.ELOOP, path)
            if target.startswith("/"):
                while len(stack) > 1:
                    posix.close(stack.pop())
            more = target.split("/")[::-1]
            spent = _spend(budget, spent, more, path)
            parts += more
        return stack.pop()
    finally:
        for fd in stack:
            posix.close(fd)


def _spend(budget: Budget | None, spent: int, parts: list[str], path: str) -> int:
    """How many parts a path has come to."""
    spent += len(parts)
    if budget is not None:
        # One that is refused for itself has cost no more.
        budget.parts -= min(len(parts), PARTS_MAX)
        if spent > PARTS_MAX or budget.parts < 0:
            raise kernel.error("open", errno.ELOOP, path)
    return spent


def _open_entry(directory: int, name: str, path: str) -> int:
    # No O_DIRECTORY: with it a link gives ENOTDIR.
    try:
        return posix.open(name, PATH | posix.O_NOFOLLOW, dir_fd=directory)
    except OSError as error:
        raise kernel.error("", error.errno or errno.EIO, path) from error


def _link_text(link: int, path: str) -> str:
    # Links on proc may be magic; which ones are, only the kernel knows. Refusing all is stricter.
    if kernel.filesystem_type(link) == kernel.PROC_SUPER_MAGIC:
        raise kernel.error("", errno.ELOOP, path)
    target = posix.readlink("", dir_fd=link)
    if not target:
        raise kernel.error("", errno.ENOENT, path)
    return target


def reopen(fd: int, flags: int) -> int:
    """A descriptor with other rights for exactly the file that `fd` names, whatever its path holds by now."""
    return posix.open(f"/proc/self/fd/{fd}", flags | posix.O_CLOEXEC)


def open_file(root: int, path: str, stored: bool = False, budget: Budget | None = None) -> int:
    """A readable descriptor of a regular file inside the root.

    The type is looked at before the file is opened for reading: a FIFO would block, a device may act. `stored`
    is for paths that an image chose: no file of procfs and its like; /proc/kmsg, once read, is gone.
    Raises OSError, EINVAL if it is no such file.
    """
    return readable(open_path(root, path, budget=budget), path, stored)


def readable(named: int, path: str, stored: bool) -> int:
    """The same of a file that is at hand by an O_PATH descriptor, which is closed."""
    try:
        if file_type(posix.fstat(named).st_mode) != S_IFREG or (stored and is_pseudo(named)):
            raise kernel.error("not a regular file", errno.EINVAL, path)
        return reopen(named, posix.O_RDONLY | posix.O_NONBLOCK | posix.O_NOCTTY)
    finally:
        posix.close(named)


def is_pseudo(fd: int) -> bool:
    """Whether a file is the kernel's own text rather than stored bytes: reading it can act, or take away."""
    return kernel.filesystem_type(fd) in PSEUDO


def read(fd: int, limit: int, path: str) -> bytes:
    """All of a file, at most `limit` bytes. Raises OSError, EFBIG if there is more.

    The size that fstat tells is not trusted: procfs says 0, and a sparse file can say anything.
    """
    chunks = []
    size = 0
    while chunk := posix.read(fd, min(65536, limit + 1 - size) if size <= limit else 1):
        size += len(chunk)
        if size > limit:
            raise kernel.error("read", errno.EFBIG, path)
        chunks.append(chunk)
    return b"".join(chunks)


def read_file(root: int, path: str, limit: int = 1 << 20) -> bytes:
    """The content of a regular file inside the root, at most `limit` bytes."""
    return read_open(open_file(root, path), limit, path)


def read_open(fd: int, limit: int, path: str) -> bytes:
    """What `read` gives of a descriptor, which is closed."""
    try:
        return read(fd, limit, path)
    finally:
        posix.close(fd)


def stat(root: int, path: str, follow: bool = True, budget: Budget | None = None) -> posix.stat_result:
    """fstat of what `path` names inside the root."""
    fd = open_path(root, path, follow, budget)
    try:
        return posix.fstat(fd)
    finally:
        posix.close(fd)


def exists(root: int, path: str) -> bool:
    """Whether a look-up inside the root ends anywhere; any error counts as no."""
    try:
        posix.close(open_path(root, path))
    except OSError:
        return False
    return True


def readlink(root: int, path: str) -> str:
    """The text of a link inside the root. Raises OSError, EINVAL if it is none."""
    fd = open_path(root, path, follow=False)
    try:
        if file_type(posix.fstat(fd).st_mode) != S_IFLNK:
            raise kernel.error("readlink", errno.EINVAL, path)
        return posix.readlink("", dir_fd=fd)
    finally:
        posix.close(fd)


def listdir(root: int, path: str) -> list[str]:
    """The names in a folder inside the root, sorted. Raises OSError, ENOTDIR if it is none."""
    named = open_path(root, path)
    try:
        fd = reopen(named, posix.O_RDONLY | posix.O_DIRECTORY)
    finally:
        posix.close(named)
    try:
        return sorted(posix.listdir(fd))
    finally:
        posix.close(fd)


def names(root: int, path: str, limit: int, budget: Budget | None = None) -> list[str]:
    """The names in a folder of an image inside the root, as the file system orders them. Raises OSError, E2BIG
    where there are more than `limit`; the rest is not read then."""
    folder = Folder(root, path, budget)
    try:
        return folder.names(limit)
    finally:
        folder.close()


class Folder:
    """A folder of an image, looked up once; its names are then looked up in it."""

    __slots__ = ("_budget", "_root", "fd", "path")

    def __init__(self, root: int, path: str, budget: Budget | None = None) -> None:
        """Raises OSError, as `open_path` does."""
        self._root = root
        self._budget = budget
        self.path = path
        self.fd = open_path(root, path, budget=budget)

    def close(self) -> None:
        """Let go of it."""
        posix.close(self.fd)

    def names(self, limit: int) -> list[str]:
        """As the function `names`."""
        fd = reopen(self.fd, posix.O_RDONLY | posix.O_DIRECTORY)
        found: list[str] = []
        try:
            with posix.scandir(fd) as entries:
                for entry in entries:
                    if len(found) == limit:
                        raise kernel.error("read", errno.E2BIG, self.path)
                    found.append(entry.name)
        finally:
            posix.close(fd)
        return found

    def stat(self, name: str, follow: bool = True) -> posix.stat_result:
        """Of a name, or with `follow` of what it leads to inside the root. Raises OSError."""
        status = posix.stat(name, dir_fd=self.fd, follow_symlinks=False)
        if not follow or file_type(status.st_mode) != S_IFLNK:
            return status
        fd = self.open(name)
        try:
            return posix.fstat(fd)
        finally:
            posix.close(fd)

    def open(self, name: str) -> int:
        """An O_PATH descriptor of what a name leads to inside the root. Raises OSError."""
        near = name
        for _ in range(NEAR_LINKS_MAX):
            if "/" in near or near in ("", ".", ".."):
                break
            found = posix.open(near, PATH | posix.O_NOFOLLOW, dir_fd=self.fd)
            if file_type(posix.fstat(found).st_mode) != S_IFLNK:
                return found
            try:
                near = posix.readlink("", dir_fd=found)
            finally:
                posix.close(found)
        return open_path(self._root, f"{self.path.rstrip('/')}/{name}", budget=self._budget)


def real_path(root: int, path: str) -> str:
    """The name inside the root, free of links, of what `path` leads to. A name, not a promise: for reports."""
    fd = open_path(root, path)
    try:
        return name_of(root, fd)
    finally:
        posix.close(fd)


def name_of(root: int, fd: int) -> str:
    """The absolute name that a descriptor's file has inside the root, by the kernel's own record."""
    base = posix.readlink(f"/proc/self/fd/{root}").rstrip("/")
    name = posix.readlink(f"/proc/self/fd/{fd}")
    if name == base:
        return "/"
    if not name.startswith(base + "/"):
        raise kernel.error("outside of the root", errno.EXDEV, name)
    return name[len(base) :]


def split(path: str) -> tuple[str, str]:
    """Folder and last component: `/usr/lib/libcuda.so` is (`/usr/lib`, `libcuda.so`). The name may not be `..`."""
    folder, _, name = path.rstrip("/").rpartition("/")
    if name in ("", ".", ".."):
        raise kernel.error("no file name", errno.EINVAL, path)
    return folder or "/", name


def open_folder(root: int, path: str, make: Callable[[int, str], None]) -> int:
    """An O_PATH descriptor of a folder inside the root, made with its parents where missing.

    `make(parent, name)` makes one folder, so that the caller decides whether it may, and can take it away
    again; it may raise FileExistsError. Raises OSError; a dangling link on the way is ENOENT.
    """
    try:
        fd = open_path(root, path)
    except FileNotFoundError:
        folder, name = split(path)
        parent = open_folder(root, folder, make)
        try:
            make(parent, name)
        except FileExistsError:
            # Made by another meanwhile, or a dangling link, which the look-up below refuses.
            pass
        finally:
            posix.close(parent)
        fd = open_path(root, path)
    if file_type(posix.fstat(fd).st_mode) != S_IFDIR:
        posix.close(fd)
        raise kernel.error("", errno.ENOTDIR, path)
    return fd
