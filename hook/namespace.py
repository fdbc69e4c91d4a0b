# SPDX-License-Identifier: Apache-2.0
"""A container's mount namespace, entered: cloned sources, its root, and creations that can be taken back.

Hot. The order matters more than anything else here. Sources are cloned in the runtime's namespace, since a
clone of a mount of a namespace that we left is refused. Then setns, and proof that it changed the namespace:
the container's root has the same path on the host, and without that proof every mount would land there.
From then on only the root's descriptor is used, never its path. Linux 5.12.
"""

from __future__ import annotations

import errno
import posix

from hook import mounts
from ldcache import kernel, root
from ldcache.errors import NvhookError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from hook.state import Container

ATTRIBUTES = {
    "ro": kernel.MOUNT_ATTR_RDONLY,
    "nosuid": kernel.MOUNT_ATTR_NOSUID,
    "nodev": kernel.MOUNT_ATTR_NODEV,
    "noexec": kernel.MOUNT_ATTR_NOEXEC,
}
# Nodes: no nodev, or opening them gives EACCES.
NODE_OPTIONS = ("nosuid", "noexec")
FOLDER_MODE = 0o755
SELINUX = "/sys/fs/selinux/enforce"
PLACEHOLDER_MODE = 0o644

OLD_KERNEL = "use the runtime shim or a CDI file on kernels before 5.12, which lack these calls"


def clone(host: int, path: str, options: tuple[str, ...]) -> int:
    """A detached mount of a host file or folder, with its final attributes. `path` is below the host root.

    Private, or the clone would stay in its source's peer group and show as `shared:N` in the container.
    An inventory's paths are free of links. One that is a link by now, perhaps in a folder that others may
    write, is not followed.
    """
    try:
        source = root.open_path(host, path, follow=False)
        if root.file_type(posix.fstat(source).st_mode) == root.S_IFLNK:
            posix.close(source)
            raise kernel.error("it has become a link", errno.ELOOP)
    except OSError as error:
        what = f"{path} on the host is not what it was a moment ago: {error.strerror}"
        raise NvhookError(what, "the driver was changed a moment ago; start the container again") from error
    try:
        mount = kernel.open_tree(source, path)
        try:
            attributes = 0
            for option in options:
                attributes |= ATTRIBUTES.get(option, 0)
            kernel.mount_setattr(mount, attributes, propagation=kernel.MS_PRIVATE, path=path)
        except BaseException:
            posix.close(mount)
            raise
        return mount
    except OSError as error:
        raise mount_error(error, path) from error
    finally:
        posix.close(source)


def mount_error(error: OSError, path: str) -> NvhookError:
    """Words for what a mount call said."""
    if error.errno == errno.ENOSYS:
        return NvhookError(f"this kernel cannot mount by descriptor ({error.strerror})", OLD_KERNEL)
    if error.errno == errno.EPERM:
        remedy = "run the runtime as root, or with CAP_SYS_ADMIN; in a user namespace use a CDI file"
        return NvhookError(f"not allowed to mount {path}: {error.strerror}", remedy)
    return NvhookError(f"cannot mount {path}: {error.strerror}", "see docs/errors: mounts")


class Namespace:
    """The mount namespace of a container's init process, before and after it was entered.

    What is made in it is remembered with its inverse: `undo` takes everything back, newest first.
    """

    __slots__ = (
        "_back",
        "_numbers",
        "_table",
        "_target",
        "_writable",
        "base",
        "base_mount",
        "ids",
        "label",
        "missing",
        "warnings",
    )

    def __init__(self) -> None:
        self.base = -1
        self.base_mount = -1
        self.ids = (0, 0)
        # linux.mountLabel of config.json.
        self.label = ""
        self.warnings: list[str] = []
        # Container paths of optional mounts that were left out.
        self.missing: set[str] = set()
        self._back: list[Callable[[], None]] = []
        self._numbers = posix.open("/proc/self/fd", root.PATH)
        self._table: mounts.MountTable | None = None
        self._target = -1
        self._writable = -1

    def open(self, container: Container) -> None:
        """Take hold of the namespace from outside. Raises NvhookError, also where it is our own."""
        path = f"/proc/{container.pid}/ns/mnt"
        self.label = container.mount_label
        try:
            self._target = posix.open(path, posix.O_RDONLY | posix.O_CLOEXEC)
            self.ids = container_ids(container.pid)
            same = posix.readlink(path) == posix.readlink("/proc/self/ns/mnt")
        except FileNotFoundError as error:
            what = f"process {container.pid}, the container's init by the state on stdin, does not exist"
            raise NvhookError(
                what, "register nvhook as a prestart or createRuntime hook, which run on the host"
            ) from error
        except PermissionError as error:
            what = f"not allowed to open {path}: {error.strerror}"
            raise NvhookError(what, "give the runtime CAP_SYS_PTRACE: the container's init is not dumpable") from error
        if same:
            what = f"process {container.pid} is in the host's own mount namespace; its mounts would be the host's"
            raise NvhookError(what, "give the container a mount namespace: linux.namespaces in config.json")

    def outside(self, container: Container) -> int:
        """The container's root as seen from here, for reading: mounts can't be moved onto what it names."""
        path = f"/proc/{container.pid}/root{container.root_path}"
        try:
            return root.open_root(path)
        except OSError as error:
            what = f"cannot open the container's root {container.root_path}: {error.strerror}"
            raise NvhookError(what, "see whether the engine mounted the image there") from error

    def enter(self, root_path: str) -> None:
        """setns, the proof that it happened, and the container's root. Raises NvhookError."""
        before = posix.readlink("/proc/self/ns/mnt")
        try:
            kernel.setns(self._target, kernel.CLONE_NEWNS)
        except OSError as error:
            what = f"cannot enter the container's mount namespace: {error.strerror}"
            raise NvhookError(what, "give the runtime CAP_SYS_ADMIN and CAP_SYS_CHROOT") from error
        if posix.readlink("/proc/self/ns/mnt") == before:
            raise NvhookError("setns left us in the host's mount namespace", "report this kernel to nvhook's authors")
        self.open_base(root_path)

    def open_root(self, root_path: str) -> None:
        """The container's root folder, which must not be the host's own."""
        try:
            self.base = root.open_root(root_path)
        except OSError as error:
            what = f"cannot open the container's root {root_path}: {error.strerror}"
            raise NvhookError(what, "see whether the engine mounted the image there") from error
        self.base_mount = kernel.mount_id(self.base)
        there, own = posix.fstat(self.base), posix.stat("/")
        if (own.st_dev, own.st_ino) == (there.st_dev, there.st_ino):
            what = f"the container's root {root_path} is the host's own /"
            raise NvhookError(what, "give the container a root folder of its own: root.path in config.json")

    def open_base(self, root_path: str) -> None:
        """The container's root folder, as it is named in the namespace that we are in."""
        self.open_root(root_path)
        # Runtimes make the root a mount point. A plain folder is one that somebody put in its place meanwhile,
        # where a part of the path can be written by others than root.
        above = posix.open("..", root.PATH, dir_fd=self.base)
        plain = kernel.mount_id(above) == self.base_mount
        posix.close(above)
        if plain:
            what = f"the container's root {root_path} is no mount point of its namespace"
            raise NvhookError(
                what, "let the runtime mount the root, as runc and crun do, and only root write in the folders above it"
            )

    def remember(self, inverse: Callable[[], None]) -> None:
        """Add an inverse to what `undo` will do."""
        self._back.append(inverse)

    def mark(self) -> int:
        """A savepoint for `undo`."""
        return len(self._back)

    def undo(self, to: int = 0) -> list[str]:
        """Take everything since the savepoint back, newest first; what could not be taken back, in words."""
        failures = []
        while len(self._back) > to:
            try:
                self._back.pop()()
            except OSError as error:
                failures.append(f"{error.strerror}: {error.filename}" if error.filename else str(error.strerror))
            except Exception as error:  # whatever it is, the older inverses must still run
                failures.append(f"{type(error).__name__}: {error}")
        return failures

    def _mounts(self) -> mounts.MountTable:
        if self._table is None:
            self._table = mounts.read(posix.readlink(f"/proc/self/fd/{self.base}"))
        return self._table

    def may_create(self, folder: int) -> None:
        """Refuse a folder that belongs to somebody else: a mount that config.json brought from the host.

        A tmpfs that is mounted nowhere else was made for this container, and is as much its own as its root.
        The name would not tell: an image's link can lead from anywhere to a host's tmpfs below /dev.
        """
        if kernel.mount_id(folder) == self.base_mount:
            return
        own = kernel.filesystem_type(folder) == kernel.TMPFS_MAGIC
        if own and not self._mounts().is_foreign(posix.fstat(folder).st_dev):
            return
        name = root.name_of(self.base, folder)
        kind = "read-only mount" if posix.fstatvfs(folder).f_flag & posix.ST_RDONLY else "mount"
        what = f"{name} in the container is a {kind} from elsewhere; nvhook makes no files in it"
        raise NvhookError(what, f"mount something else over {name}, or put the driver's files there yourself")

    def writable(self, folder: int) -> int:
        """A descriptor of the same folder to create in, which the caller keeps; refused as in `may_create`.

        crun up to 1.25 has made a read-only root read-only before createContainer hooks run. A clone of its mount
        without that flag, attached nowhere, still takes new names.
        """
        self.may_create(folder)
        if kernel.mount_id(folder) != self.base_mount or not posix.fstatvfs(self.base).f_flag & posix.ST_RDONLY:
            return posix.dup(folder)
        if self._writable < 0:
            clone = kernel.open_tree(self.base)
            kernel.mount_setattr(clone, 0, clear=kernel.MOUNT_ATTR_RDONLY, propagation=kernel.MS_PRIVATE)
            self._writable = clone
        twin = root.open_path(self._writable, root.name_of(self.base, folder))
        one, other = posix.fstat(folder), posix.fstat(twin)
        if (one.st_dev, one.st_ino) != (other.st_dev, other.st_ino):
            posix.close(twin)
            raise kernel.error("open", errno.EROFS, root.name_of(self.base, folder))
        return twin

    def _keep_inside(self, target: int, path: str) -> None:
        """Refuse a target whose mount hands on what is mounted on it: an `rshared` volume takes it to the host,
        where it stays."""
        mount_id = kernel.mount_id(target)
        if mount_id != self.base_mount and self._mounts().leaks(mount_id):
            what = f"{path} in the container is in a volume with rshared propagation; a mount there is the host's too"
            raise NvhookError(what, "mount that volume with rslave or rprivate propagation")

    def may_cover(self, folder: int, path: str) -> None:
        """Refuse to cover the container's root, its /dev, or a file system of the kernel's with a host folder."""
        status = posix.fstat(folder)
        vital = [posix.fstat(self.base)]
        if root.exists(self.base, "/dev"):
            vital.append(root.stat(self.base, "/dev"))
        same = any((status.st_dev, status.st_ino) == (other.st_dev, other.st_ino) for other in vital)
        if same or root.is_pseudo(folder):
            what = f"{path} in the container leads to its root, /dev, or a file system of the kernel's"
            raise NvhookError(what, "repair the link in the image")

    def create(self, action: Callable[[], Any]) -> Any:
        """Run one creation; in a file system of the container's user namespace, as that namespace's root.

        There the kernel can't store an owner that the namespace doesn't map: EOVERFLOW (tmpfs). The changed
        ids last for this one call, because a non-zero fsuid drops DAC_OVERRIDE and MKNOD with it.
        """
        try:
            return action()
        except OSError as error:
            if error.errno != errno.EOVERFLOW or self.ids == (0, 0):
                raise
        kernel.set_filesystem_ids(*self.ids)
        try:
            return action()
        finally:
            kernel.set_filesystem_ids(0, 0)

    def give(self, name: str, folder: int) -> None:
        """Let the container's root own what we made in its file system."""
        if self.ids != (0, 0):
            posix.chown(name, *self.ids, dir_fd=folder, follow_symlinks=False)

    def folder(self, path: str) -> int:
        """An O_PATH descriptor of a container folder, made where missing."""
        try:
            return root.open_folder(self.base, path, self._make_folder)
        except OSError as error:
            raise creation_error(error, path) from error

    def _make_folder(self, parent: int, name: str) -> None:
        # What can run out is taken first, so that nothing made is ever without its inverse.
        kept = self.writable(parent)
        self.create(lambda: posix.mkdir(name, FOLDER_MODE, dir_fd=kept))
        self.remember(lambda: posix.rmdir(name, dir_fd=kept))
        self.give(name, kept)

    def placeholder(self, folder: int, name: str) -> int:
        """A new empty file to mount on; FileExistsError if there is something by that name."""
        flags = posix.O_CREAT | posix.O_EXCL | posix.O_NOFOLLOW | posix.O_WRONLY | posix.O_CLOEXEC
        fd: int = self.make(folder, name, lambda kept: posix.open(name, flags, PLACEHOLDER_MODE, dir_fd=kept))
        if self._writable < 0:
            return fd
        # What was made through the clone is on a mount of nowhere.
        posix.close(fd)
        return posix.open(name, root.PATH | posix.O_NOFOLLOW, dir_fd=folder)

    def make(self, folder: int, name: str, action: Callable[[int], Any]) -> Any:
        """Run an action that makes `name` in the folder that it is given; `undo` will unlink that."""
        kept = self.writable(folder)
        made = self.create(lambda: action(kept))
        self.remember(lambda: posix.unlink(name, dir_fd=kept))
        self.give(name, kept)
        return made

    def swap(self, folder: int, name: str, make: Callable[[int, str], None]) -> None:
        """Put what `make(folder, temporary name)` makes in the place of `name`, by rename; the caller knows the way
        back."""
        kept = self.writable(folder)
        try:
            temporary = unused(kept, name)
            try:
                make(kept, temporary)
                posix.rename(temporary, name, src_dir_fd=kept, dst_dir_fd=kept)
            except BaseException:
                try:
                    posix.unlink(temporary, dir_fd=kept)
                except FileNotFoundError:
                    pass
                raise
        finally:
            posix.close(kept)

    def tmpfs(self, options: tuple[tuple[str, str], ...], attributes: int) -> int:
        """A new, detached tmpfs under the container's label, without which its processes may not read what is there.

        A label belongs to a file system, so clones of the host's keep theirs. A kernel without SELinux knows no option
        `context` (EINVAL); config.json may name a label all the same.
        """
        if self.label:
            try:
                return kernel.tmpfs((*options, ("context", self.label)), attributes)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                if has_selinux():
                    self.warnings.append(f"the kernel refuses linux.mountLabel {self.label[:200]!a} of config.json")
        return kernel.tmpfs(options, attributes)

    def attach(self, mount: int, target: int, path: str) -> None:
        """Move a detached mount on a target in the container."""
        self._keep_inside(target, path)
        try:
            kernel.move_mount(mount, target, path)
        except OSError as error:
            raise mount_error(error, path) from error
        self.remember(lambda: self._detach(mount))

    def _detach(self, mount: int) -> None:
        # A detached mount has no path of its own; the number of its descriptor below /proc/self/fd is one.
        # umount2 must follow that link, so without UMOUNT_NOFOLLOW.
        posix.fchdir(self._numbers)
        kernel.umount2(str(mount), kernel.MNT_DETACH)


def has_selinux() -> bool:
    """Whether SELinux is on: its file system is mounted then."""
    try:
        posix.stat(SELINUX)
    except OSError:
        return False
    return True


def unused(folder: int, name: str) -> str:
    """A name for a temporary file beside `name`. What a start that was killed has left by it is removed."""
    for number in range(16):
        temporary = f".{name}.nvhook-{number}"
        try:
            there = posix.stat(temporary, dir_fd=folder, follow_symlinks=False)
        except FileNotFoundError:
            return temporary
        if root.file_type(there.st_mode) in (root.S_IFREG, root.S_IFLNK):
            posix.unlink(temporary, dir_fd=folder)
            return temporary
    raise kernel.error("no free temporary name", errno.EEXIST, name)


def creation_error(error: OSError, path: str) -> NvhookError:
    """Words for why something could not be made in the container."""
    reasons = {
        errno.EROFS: ("it is read-only", "give the container a writable root, or use the runtime shim"),
        errno.ENOSPC: ("its layer is full", "free space in the engine's storage"),
        errno.EDQUOT: ("its layer's quota is used up", "raise the quota of the container's storage"),
        errno.ELOOP: ("the image has a looping or magic link there", "repair the link in the image"),
        errno.EXDEV: ("the image has a looping or magic link there", "repair the link in the image"),
        errno.ENOENT: ("the image has a dangling link there", "repair the link in the image"),
        errno.ENOTDIR: ("the image has a file where a folder belongs", "repair the path in the image"),
    }
    reason, remedy = reasons.get(error.errno or 0, (error.strerror, "see docs/errors: creating files"))
    return NvhookError(f"cannot make {path} in the container: {reason}", remedy)


def container_ids(pid: int) -> tuple[int, int]:
    """The host's uid and gid of the container's root, from its user namespace's maps; (0, 0) without one."""
    return mapped_root(f"/proc/{pid}/uid_map"), mapped_root(f"/proc/{pid}/gid_map")


def mapped_root(path: str) -> int:
    """What id 0 of a uid_map or gid_map file is outside: lines of `inside outside count`. 0 if unmapped."""
    fd = posix.open(path, posix.O_RDONLY | posix.O_CLOEXEC)
    try:
        lines = root.read(fd, 1 << 16, path).decode().splitlines()
    finally:
        posix.close(fd)
    for line in lines:
        inside, outside, _ = line.split()
        if inside == "0":
            return int(outside)
    return 0
