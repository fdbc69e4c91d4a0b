# SPDX-License-Identifier: Apache-2.0
"""All that an inventory depends on, in a form that is judged in a fraction of a millisecond.

Hot. A fingerprint is a list of `[kind, path, value]`; paths are names on the host, free of links. `changed`
looks at each thing again and names the first that differs; `Recorder` made the list while the inventory was
gathered, each thing *before* it was read, so that a change in between is seen.

    kind     value                                       of
    nvhook   our version
    text     the file's text; "" where there is none     boot id, the driver's version
    names    [[name, inode], …]                          the folders gpus/*, which GPUs there are. Their text is
                                                         not read: that wakes a suspended GPU
    majors   [line, …]                                   NVIDIA's lines of /proc/devices
    mig      [[path, inode], …]                          capabilities/gpu*/mig, the MIG layout
    file     [dev, inode, size, mtime_ns, ctime_ns]      files and library folders. Times alone are constant
                                                         on images that are built reproducibly
    link     its target                                  links on the way to a file
    node     [rdev, mode, uid, gid]                      device nodes
    entry    [dev, inode, mode, uid]                     sockets and folders whose times always change; the folders
                                                         /sys/module/nvidia*, which tell of a reload
    ours     [dev, inode, mode, uid]                     a folder of root's or of our own where anybody may make one
    until    seconds since boot                          the moment to look again at a GPU that was left out

`file`, `link`, `node` and `entry` are None for what is not there, `ours` for whatever else is there too: what
another user puts into /tmp is not used, and must not make an inventory stale, or that user could stop all starts.
"""

from __future__ import annotations

import posix
import time

from cdi import VERSION
from ldcache import root

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

BOOT_ID = "/proc/sys/kernel/random/boot_id"
VERSION_FILE = "/proc/driver/nvidia/version"
GPUS = "/proc/driver/nvidia/gpus"
DEVICES = "/proc/devices"
MODULE_FOLDER = "/sys/module"
MODULES = ("nvidia", "nvidia_uvm", "nvidia_modeset", "nvidia_drm")
CAPABILITIES = "/proc/driver/nvidia/capabilities"

TEXT_MAX = 4096
DEVICES_MAX = 65536
LINKS_MAX = 40
# gpuN/mig/giN/ciN, which holds nothing but `access`. Each folder that is opened costs a start of a host with many
# MIG devices, 112 of them with eight GPUs of seven.
MIG_DEPTH = 3

FOLDER = posix.O_RDONLY | posix.O_DIRECTORY | posix.O_NOFOLLOW | posix.O_CLOEXEC


def changed(root_fd: int, fingerprint: list[list[Any]]) -> str | None:
    """The first thing that differs from a fingerprint, by its path, or None while all is as it was.

    `root_fd` is open on the host's root. Anything that can't be looked at counts as absent, as it did when
    the fingerprint was made.
    """
    open_folder = None
    fd = -1
    try:
        for kind, path, value in fingerprint:
            look = IN_FOLDER.get(kind)
            if look is None:
                if not SAME[kind](root_fd, path, value):
                    return str(path or kind)
                continue
            folder, _, name = path.rpartition("/")
            if folder != open_folder:
                if fd >= 0:
                    posix.close(fd)
                open_folder, fd = folder, _open(root_fd, folder or "/")
            if look(fd, name) != value:
                return str(path)
        return None
    finally:
        if fd >= 0:
            posix.close(fd)


def _open(root_fd: int, path: str) -> int:
    try:
        return root.open_path(root_fd, path)
    except OSError:
        return -1


def _file(fd: int, name: str) -> list[int] | None:
    try:
        status = posix.stat(name, dir_fd=fd, follow_symlinks=False)
    except OSError:
        return None
    return [status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns]


def _link(fd: int, name: str) -> str | None:
    try:
        return posix.readlink(name, dir_fd=fd)
    except OSError:
        return None


def _node(fd: int, name: str) -> list[int] | None:
    try:
        status = posix.stat(name, dir_fd=fd, follow_symlinks=False)
    except OSError:
        return None
    return [status.st_rdev, status.st_mode, status.st_uid, status.st_gid]


def _entry(fd: int, name: str) -> list[int] | None:
    try:
        status = posix.stat(name, dir_fd=fd, follow_symlinks=False)
    except OSError:
        return None
    # An inode's number is given out anew once it is free, to anybody: the owner is part of what it is.
    return [status.st_dev, status.st_ino, status.st_mode, status.st_uid]


def is_ours(status: posix.stat_result) -> bool:
    """Whether something is a folder that nobody but root, or who we are, can have made."""
    return root.file_type(status.st_mode) == root.S_IFDIR and status.st_uid in (0, posix.geteuid())


def _ours(fd: int, name: str) -> list[int] | None:
    try:
        status = posix.stat(name, dir_fd=fd, follow_symlinks=False)
    except OSError:
        return None
    return [status.st_dev, status.st_ino, status.st_mode, status.st_uid] if is_ours(status) else None


# -1 as dir_fd gives EBADF, an OSError: what lies in a folder that is not there is not there.
IN_FOLDER: dict[str, Callable[[int, str], Any]] = {
    "file": _file,
    "link": _link,
    "node": _node,
    "entry": _entry,
    "ours": _ours,
}


def text(root_fd: int, path: str, limit: int = TEXT_MAX) -> str:
    """A small file's text, "" where it can't be read."""
    try:
        return root.read_file(root_fd, path, limit).decode("utf-8", "surrogateescape")
    except OSError:
        return ""


def names(root_fd: int, path: str) -> list[list[Any]]:
    """Names and inode numbers in a folder, sorted."""
    try:
        named = root.open_path(root_fd, path)
    except OSError:
        return []
    try:
        return [[name, number] for name, number, _ in _listing(named, ".")]
    finally:
        posix.close(named)


def majors(root_fd: int, path: str) -> list[str]:
    """The lines of /proc/devices that name NVIDIA's drivers: a reload gives nvidia-uvm another major."""
    lines = text(root_fd, path, DEVICES_MAX).splitlines()
    return [line.strip() for line in lines if " nvidia" in line]


def mig(root_fd: int, path: str) -> list[list[Any]]:
    """Paths and inode numbers of all instances, and what else lies beside them, below gpu*/mig in the folder of
    capabilities."""
    try:
        named = root.open_path(root_fd, path)
    except OSError:
        return []
    found: list[list[Any]] = []
    try:
        for name, _, _ in _listing(named, "."):
            if name.startswith("gpu"):
                _collect(named, f"{name}/mig", found, 2)
    finally:
        posix.close(named)
    return found


def _collect(fd: int, path: str, found: list[list[Any]], depth: int) -> None:
    for name, number, is_folder in _listing(fd, path):
        inner = f"{path}/{name}"
        found.append([inner, number])
        if is_folder and depth < MIG_DEPTH:
            _collect(fd, inner, found, depth + 1)


def _listing(fd: int, path: str) -> list[tuple[str, int, bool]]:
    try:
        folder = posix.open(path, FOLDER, dir_fd=fd)
    except OSError:
        return []
    try:
        with posix.scandir(folder) as entries:
            return sorted((entry.name, entry.inode(), entry.is_dir(follow_symlinks=False)) for entry in entries)
    finally:
        posix.close(folder)


def now() -> float:
    """Seconds since boot, suspended ones included; no clock that somebody sets."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


SAME: dict[str, Callable[[int, str, Any], bool]] = {
    "nvhook": lambda root_fd, path, value: bool(value == VERSION),
    "text": lambda root_fd, path, value: bool(text(root_fd, path) == value),
    "names": lambda root_fd, path, value: names(root_fd, path) == value,
    "mig": lambda root_fd, path, value: mig(root_fd, path) == value,
    "majors": lambda root_fd, path, value: majors(root_fd, path) == value,
    "until": lambda root_fd, path, value: bool(now() < value),
}


def look_again(fingerprint: list[list[Any]], seconds: float) -> None:
    """Makes an inventory that was gathered already stale that many seconds from now."""
    fingerprint[:] = [item for item in fingerprint if item[0] != "until"]
    # Behind our version, where Recorder has it.
    fingerprint.insert(1, ["until", "", round(now() + seconds, 3)])


class Base:
    """A folder that paths are looked up in as if it were `/`: its descriptor, and its own name on the host.

    `prefix` is "" for the host's root and never ends in a slash, so that `prefix + path` is a host path.
    """

    __slots__ = ("fd", "prefix")

    def __init__(self, fd: int, prefix: str) -> None:
        self.fd = fd
        self.prefix = prefix.rstrip("/")


class Recorder:
    """Looks things up while an inventory is gathered, and remembers each look for the fingerprint."""

    __slots__ = ("_found", "_real", "root_fd")

    def __init__(self, root_fd: int) -> None:
        self.root_fd = root_fd
        self._found: dict[tuple[str, str], Any] = {}
        self._real: dict[tuple[str, str], str | None] = {}

    def kernel(self) -> None:
        """The facts that the kernel gives: to be recorded first, before any is read."""
        self._found["nvhook", ""] = VERSION
        self._found["text", BOOT_ID] = text(self.root_fd, BOOT_ID)
        self._found["text", VERSION_FILE] = text(self.root_fd, VERSION_FILE)
        self._found["names", GPUS] = names(self.root_fd, GPUS)
        self._found["mig", CAPABILITIES] = mig(self.root_fd, CAPABILITIES)
        self._found["majors", DEVICES] = majors(self.root_fd, DEVICES)
        # sysfs counts its inodes up, so a module that was loaded again has another one (kernfs, Linux 5.5); procfs
        # takes the lowest free number, and its folders of GPUs may look as they were.
        host = Base(self.root_fd, "")
        for name in MODULES:
            self.entry(host, f"{MODULE_FOLDER}/{name}")

    def until(self, seconds: float) -> None:
        """Makes the inventory stale that many seconds from now."""
        self._found["until", ""] = round(now() + seconds, 3)

    def resolve(self, base: Base, path: str) -> str | None:
        """The name inside `base`, free of links, of what `path` leads to; None where it leads nowhere.

        Remembers the links on the way, and where the way ended.
        """
        return self._resolve(base, path, LINKS_MAX)

    def _resolve(self, base: Base, path: str, links: int) -> str | None:
        folder, _, name = path.rstrip("/").rpartition("/")
        if not folder and not name:
            return "/"
        where = self._folder(base, folder, links)
        if where is None:
            return None
        if name in ("", "."):
            return where or "/"
        if name == "..":
            return where.rpartition("/")[0] or "/"
        return self._step(base, where, name, links)

    def _step(self, base: Base, where: str, name: str, links: int) -> str | None:
        real = f"{where}/{name}"
        try:
            fd = root.open_path(base.fd, real, follow=False)
        except OSError:
            self._found.setdefault(("file", base.prefix + real), None)
            return None
        try:
            if root.file_type(posix.fstat(fd).st_mode) != root.S_IFLNK:
                return real
            target = posix.readlink("", dir_fd=fd)
        finally:
            posix.close(fd)
        # The first look counts: what changed between two looks must not pass for unchanged.
        self._found.setdefault(("link", base.prefix + real), target)
        if not links:
            return None
        return self._resolve(base, target if target.startswith("/") else f"{where}/{target}", links - 1)

    def _folder(self, base: Base, path: str, links: int) -> str | None:
        """As `resolve`, "" for the base itself; remembered, since hundreds of files share few folders."""
        if not path:
            return ""
        key = base.prefix, path
        if key not in self._real:
            found = self._resolve(base, path, links)
            self._real[key] = "" if found == "/" else found
        return self._real[key]

    def file(self, base: Base, path: str) -> str | None:
        """`resolve`, and remembers the file or folder that was found."""
        return self._at("file", base, path)

    def entry(self, base: Base, path: str) -> str | None:
        """`resolve`, and remembers which socket or folder was found, whatever its times."""
        return self._at("entry", base, path)

    def _at(self, kind: str, base: Base, path: str) -> str | None:
        real = self.resolve(base, path)
        if real is not None and real != "/":
            self._look(kind, base, real)
        return real

    def node(self, base: Base, path: str) -> None:
        """Remembers a device node, or that there is none; a link in its place is not followed."""
        self.unfollowed("node", base, path)

    def unfollowed(self, kind: str, base: Base, path: str) -> str | None:
        """Remembers, as of that kind, what lies at `path`, or that nothing does; its name with no link in the folders
        above, None where these lead nowhere. A link in its place is not followed: who may write in the folder
        chose where it leads, and could change at will what the fingerprint then depends on.
        """
        folder, _, name = path.rpartition("/")
        where = self._folder(base, folder, LINKS_MAX)
        if where is None:
            return None
        self._look(kind, base, f"{where}/{name}")
        return f"{where}/{name}"

    def _look(self, kind: str, base: Base, real: str) -> None:
        folder, _, name = real.rpartition("/")
        fd = _open(base.fd, folder or "/")
        self._found.setdefault((kind, base.prefix + real), IN_FOLDER[kind](fd, name))
        if fd >= 0:
            posix.close(fd)

    def fingerprint(self) -> list[list[Any]]:
        """The list: cheap and likely things first, then by folder, so that each is opened once."""
        order = {kind: place for place, kind in enumerate(("nvhook", "until", "text", "names", "majors", "mig"))}
        last = len(order)

        def key(item: tuple[str, str]) -> tuple[int, str, str, str]:
            kind, path = item
            folder, _, name = path.rpartition("/")
            return order.get(kind, last), folder, name, kind

        return [[*item, self._found[item]] for item in sorted(self._found, key=key)]
