# SPDX-License-Identifier: Apache-2.0
"""Where a container's device rules are: which version of cgroups has them, and in which folder.

Hot. By /proc/PID/cgroup (cgroups(7)) and our own /proc/self/mountinfo (proc(5)), read before the container's
namespace is entered. A cgroup namespace of the container's own changes nothing: both files are as we see them.
"""

from __future__ import annotations

import posix

from ldcache import kernel, root
from ldcache.errors import NvhookError

TYPE_CHECKING = False
if TYPE_CHECKING:
    Mount = tuple[str, str, str, list[str]]

PROC_MAX = 8 << 20
FOLDER = posix.O_RDONLY | posix.O_DIRECTORY | posix.O_CLOEXEC

CGROUP_MOUNT = "/sys/fs/cgroup"
# The initial user namespace's inode number, a constant of the kernel's: PROC_USER_INIT_INO.
INITIAL_USERS = "user:[4026531837]"
# What crun makes inside of the scope that it asked systemd for.
CRUN_FOLDER = "container"

SHIM_OR_CDI = "use the runtime shim or a CDI file: with them the runtime itself allows the devices"


class Place:
    """The version of cgroups, where its file system is mounted, and the folder of one cgroup in it."""

    __slots__ = ("folder", "mount", "version")

    def __init__(self, version: int, mount: str, folder: str) -> None:
        self.version = version
        self.mount = mount
        self.folder = folder

    def in_scope(self) -> bool:
        """Whether systemd keeps the device rules: a scope, or crun's folder inside of one."""
        return self.folder.endswith(".scope") or self.in_crun_scope()

    def in_crun_scope(self) -> bool:
        """Whether this is the folder that crun makes inside of a scope."""
        return self.folder.endswith(f".scope/{CRUN_FOLDER}")


def rootless() -> bool:
    """Whether we aren't root, or root of a user namespace only."""
    return posix.geteuid() != 0 or posix.readlink("/proc/self/ns/user") != INITIAL_USERS


def find(pid: int | str) -> Place:
    """Where the device rules of a process are kept. Raises NvhookError."""
    try:
        memberships = read(f"/proc/{pid}/cgroup")
    except OSError as error:
        what = f"cannot read /proc/{pid}/cgroup, of the container's init by the state on stdin: {error.strerror}"
        raise NvhookError(what, "register nvhook as a prestart or createRuntime hook, which run on the host") from error
    place = locate(memberships, read("/proc/self/mountinfo"))
    if place is None:
        what = f"no cgroup file system with the device rules of process {pid} is mounted"
        raise NvhookError(what, f"mount one on {CGROUP_MOUNT} where the runtime runs")
    return place


def locate(memberships: str, mountinfo: str) -> Place | None:
    """The place by the texts of /proc/PID/cgroup and /proc/self/mountinfo; None where it isn't mounted.

    Raises NvhookError for a cgroup outside of our cgroup namespace.
    """
    paths = {}
    for line in memberships.splitlines():
        _, controllers, path = line.split(":", 2)
        for controller in controllers.split(","):
            paths[controller] = path
    mounts = [mount for mount in map(parse_mount, mountinfo.splitlines()) if mount[2] in ("cgroup", "cgroup2")]
    # The runtimes' own question: version 2 it is if that is what the usual place itself has. A host that has it
    # anywhere else keeps device rules in version 1, though each process has a path in both.
    unified = [kind for _, point, kind, _ in mounts if point == CGROUP_MOUNT][-1:] == ["cgroup2"]
    old = [mount for mount in mounts if mount[2] == "cgroup" and "devices" in mount[3]]
    if "devices" in paths and old and not unified:
        return _place(1, paths["devices"], old)
    if "" in paths:
        return _place(2, paths[""], [mount for mount in mounts if mount[2] == "cgroup2"])
    return None


def _place(version: int, path: str, mounts: list[Mount]) -> Place | None:
    if path.startswith("/.."):
        what = f"the container's cgroup {path} is outside of the cgroup namespace that nvhook runs in"
        raise NvhookError(what, f"let the runtime run in the host's cgroup namespace, or {SHIM_OR_CDI}")
    # A later mount on the same place hides an earlier one.
    for top, point, _, _ in reversed(mounts):
        below = "" if top == "/" else top
        if path == top or path.startswith(f"{below}/"):
            return Place(version, point, (point + path[len(below) :]).rstrip("/"))
    return None


def parse_mount(line: str) -> Mount:
    """A line of mountinfo: the mount's root, its place, its type, the file system's options."""
    before, _, after = line.partition(" - ")
    fields, rest = before.split(" "), after.split(" ")
    return unescape(fields[3]), unescape(fields[4]), rest[0], rest[-1].split(",")


def unescape(text: str) -> str:
    """A path of mountinfo, which has blanks, tabs, newlines and backslashes as octal numbers."""
    for code, character in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        text = text.replace(code, character)
    return text


def read(path: str) -> str:
    """The text of a file in proc or in a cgroup file system."""
    fd = posix.open(path, posix.O_RDONLY | posix.O_CLOEXEC)
    try:
        return root.read(fd, PROC_MAX, path).decode("utf-8", "surrogateescape")
    finally:
        posix.close(fd)


def may_open(nodes: list[tuple[int, int]]) -> bool:
    """Whether our own device cgroup lets us open character devices for reading and writing.

    access(2) asks it (inode_permission) and no driver. The nodes are made in a tmpfs that nobody sees.
    """
    try:
        folder = kernel.tmpfs((), 0)
    except OSError:
        return False
    try:
        for major, minor in nodes:
            name = f"{major}:{minor}"
            posix.mknod(name, root.S_IFCHR | 0o600, posix.makedev(major, minor), dir_fd=folder)
            if not posix.access(name, posix.R_OK | posix.W_OK, dir_fd=folder):
                return False
        return True
    except OSError:
        return False
    finally:
        posix.close(folder)


def open_folder(folder: str) -> int:
    """A descriptor of a cgroup. Raises NvhookError."""
    try:
        return posix.open(folder, FOLDER)
    except OSError as error:
        what = f"cannot open the cgroup {folder}: {error.strerror}"
        raise NvhookError(what, "see whether the container has ended, and start it again") from error


def open_own(folder: str, pid: int) -> int:
    """A descriptor of a process's cgroup, which is proven to be that, whatever is mounted where."""
    try:
        members = read(f"{folder}/cgroup.procs").split()
    except OSError as error:
        what = f"cannot read {folder}/cgroup.procs: {error.strerror}"
        raise NvhookError(what, "see whether the container has ended, and start it again") from error
    if str(pid) not in members:
        what = f"process {pid}, the container's init, is not in the cgroup {folder}"
        raise NvhookError(what, f"see what is mounted on {CGROUP_MOUNT}, or {SHIM_OR_CDI}")
    return open_folder(folder)
