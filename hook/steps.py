# SPDX-License-Identifier: Apache-2.0
"""The steps that put a Plan into a live namespace; each describes itself, and leaves nothing half done twice.

Hot. `steps(plan)` makes the list in the order of execution: what can fail for reasons outside comes first,
what leaves names in the image's layer last. Every step looks before it acts, so that a second run changes nothing
more. One that is optional is taken back alone where it fails.
"""

from __future__ import annotations

import errno
import posix
import time

from hook import files, search
from hook.namespace import NODE_OPTIONS, clone, creation_error
from hook.step import Step
from ldcache import kernel, root
from ldcache.errors import NvhookError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from hook import cgroup
    from hook.log import Log
    from hook.namespace import Namespace
    from hook.plan import Plan
    from hook.record import Record
    from hook.state import Container

DRIVER_FOLDER = "/proc/driver/nvidia"
COPIED = ("version", "registry", "params")
# The inodes are for 16 GPUs with seven MIG devices each.
MASK_OPTIONS = (("mode", "0555"), ("size", "256k"), ("nr_inodes", "1024"))
MASK_ATTRIBUTES = kernel.MOUNT_ATTR_NOSUID | kernel.MOUNT_ATTR_NODEV | kernel.MOUNT_ATTR_NOEXEC
GPU_FOLDER_OPTIONS = ("ro", "nosuid", "nodev", "noexec")


def identity(status: posix.stat_result) -> tuple[int, int]:
    """What makes a file this file."""
    return status.st_dev, status.st_ino


class Rules(Step):
    """The device rules: the container's cgroup lets it open the nodes. First, since much can forbid it."""

    __slots__ = ("container", "nodes", "rules")

    def __init__(self, nodes: list[dict[str, Any]], container: Container) -> None:
        self.nodes = [(node["major"], node["minor"]) for node in nodes]
        self.container = container
        self.rules: cgroup.DeviceRules | None = None

    def describe(self) -> str:
        return "device rules: " + ", ".join(f"c {major}:{minor} rw" for major, minor in self.nodes)

    def prepare(self, host: int, namespace: Namespace) -> None:
        # With what it brings, a tenth of all imports, and of no use to a createContainer hook.
        from hook import cgroup

        self.rules = cgroup.DeviceRules(self.container.pid, self.container.device_rules, self.container.devices)
        self.rules.prepare(self.nodes)
        namespace.warnings += self.rules.warnings

    def execute(self, namespace: Namespace) -> None:
        assert self.rules is not None, "executed without prepare"
        namespace.remember(self.rules.undo)
        self.rules.apply()


class Mask(Step):
    """The proc mask: a tmpfs over /proc/driver/nvidia that shows the chosen GPUs and says ModifyDeviceFiles 0,
    so that the driver's user space makes no nodes of other GPUs. `access` are the capabilities that stay visible:
    files of MIG devices, or the folder of all; CUDA tells by them which MIG devices it has."""

    __slots__ = ("access", "gpus", "shown", "texts")

    def __init__(self, gpus: list[str], access: list[str]) -> None:
        self.gpus = gpus
        self.access = [path[len(DRIVER_FOLDER) + 1 :] for path in access]
        self.texts: dict[str, bytes] = {}
        # Names in the mask and the clones that go there.
        self.shown: dict[str, int] = {}

    def describe(self) -> str:
        show = ", ".join([*self.gpus, *self.access]) or "no GPU"
        return f"mask {DRIVER_FOLDER}: show {show}; ModifyDeviceFiles: 0"

    def prepare(self, host: int, namespace: Namespace) -> None:
        for name in COPIED:
            try:
                self.texts[name] = root.read_file(host, f"{DRIVER_FOLDER}/{name}", 1 << 16)
            except FileNotFoundError:
                continue
        if "params" in self.texts:
            self.texts["params"] = self.texts["params"].replace(b"ModifyDeviceFiles: 1\n", b"ModifyDeviceFiles: 0\n")
        for name in [*(f"gpus/{gpu}" for gpu in self.gpus), *self.access]:
            self.shown[name] = clone(host, f"{DRIVER_FOLDER}/{name}", GPU_FOLDER_OPTIONS)

    def execute(self, namespace: Namespace) -> None:
        try:
            target = root.open_path(namespace.base, DRIVER_FOLDER)
        except FileNotFoundError:
            # No proc in this container, so nothing of the driver's is to be seen there.
            return
        try:
            if not self._stands(target):
                self._mount(namespace, target)
        finally:
            posix.close(target)

    def _stands(self, target: int) -> bool:
        if kernel.filesystem_type(target) != kernel.TMPFS_MAGIC:
            return False
        try:
            params = root.read_file(target, "params", 1 << 16)
            same = params == self.texts.get("params") and root.listdir(target, "gpus") == sorted(self.gpus)
            return same and all(root.exists(target, name) for name in self.access)
        except FileNotFoundError:
            return False

    def _mount(self, namespace: Namespace, target: int) -> None:
        mask = namespace.tmpfs(MASK_OPTIONS, MASK_ATTRIBUTES)
        kernel.mount_setattr(mask, 0, propagation=kernel.MS_PRIVATE)
        for name, text in self.texts.items():
            flags = posix.O_CREAT | posix.O_EXCL | posix.O_WRONLY | posix.O_CLOEXEC
            fd = posix.open(name, flags, 0o444, dir_fd=mask)
            posix.write(fd, text)
            posix.close(fd)
        made: set[str] = set()
        self._make_folders(mask, "gpus/", made)
        for name, mount in self.shown.items():
            is_folder = root.file_type(posix.fstat(mount).st_mode) == root.S_IFDIR
            self._make_folders(mask, name + "/" * is_folder, made)
            if not is_folder:
                posix.close(posix.open(name, posix.O_CREAT | posix.O_EXCL | posix.O_CLOEXEC, 0o444, dir_fd=mask))
        namespace.attach(mask, target, DRIVER_FOLDER)
        # Into a tmpfs that is still detached, mounts can be moved only since Linux 6.15.
        for name, mount in self.shown.items():
            place = posix.open(name, root.PATH | posix.O_NOFOLLOW, dir_fd=mask)
            namespace.attach(mount, place, f"{DRIVER_FOLDER}/{name}")
            posix.close(place)
        kernel.mount_setattr(mask, kernel.MOUNT_ATTR_RDONLY, path=DRIVER_FOLDER)

    def _make_folders(self, mask: int, path: str, made: set[str]) -> None:
        """The folders above what a path's last slash is followed by."""
        end = path.find("/")
        while end >= 0:
            if path[:end] not in made:
                posix.mkdir(path[:end], 0o555, dir_fd=mask)
                made.add(path[:end])
            end = path.find("/", end + 1)


class Node(Step):
    """A device node: made where the container's /dev is its own tmpfs, else the host's node mounted."""

    __slots__ = ("clone", "host_dev", "host_path", "makes", "node", "optional")

    def __init__(self, node: dict[str, Any], optional: bool) -> None:
        self.node = node
        self.optional = optional
        self.makes: str = node["path"]
        self.clone = -1
        self.host_path: str = node.get("hostPath", node["path"])
        self.host_dev = (-1, -1)

    def describe(self) -> str:
        node = self.node
        return f"device node {node['path']}: c {node['major']}:{node['minor']} mode {node['fileMode']:04o}"

    def prepare(self, host: int, namespace: Namespace) -> None:
        self.host_dev = identity(root.stat(host, "/dev"))
        self.clone = clone(host, self.host_path, NODE_OPTIONS)

    def execute(self, namespace: Namespace) -> None:
        dev = namespace.folder("/dev")
        host_dev = identity(posix.fstat(dev)) == self.host_dev
        posix.close(dev)
        if host_dev:
            # config.json brought the host's own /dev: whatever we make there appears on the host.
            return
        place, name = root.split(self.node["path"])
        folder = namespace.folder(place)
        try:
            self._make(namespace, folder, name)
        finally:
            posix.close(folder)

    def _make(self, namespace: Namespace, folder: int, name: str) -> None:
        device = posix.makedev(self.node["major"], self.node["minor"])
        try:
            there = posix.stat(name, dir_fd=folder, follow_symlinks=False)
        except FileNotFoundError:
            self._make_new(namespace, folder, name, device)
            return
        if root.file_type(there.st_mode) == root.S_IFCHR and there.st_rdev == device:
            return
        if root.file_type(there.st_mode) != root.S_IFREG:
            what = f"{self.node['path']} in the container is in the way: it is not device {self._numbers()}"
            raise NvhookError(what, "take that path out of the image, or of linux.devices in config.json")
        target = posix.open(name, root.PATH | posix.O_NOFOLLOW, dir_fd=folder)
        self._mount(namespace, target)

    def _numbers(self) -> str:
        return f"{self.node['major']}:{self.node['minor']}"

    def _make_new(self, namespace: Namespace, folder: int, name: str, device: int) -> None:
        if kernel.filesystem_type(folder) == kernel.TMPFS_MAGIC:
            namespace.may_create(folder)
            mode = root.S_IFCHR | self.node["fileMode"]
            try:
                # Not as the container's root, who may make no nodes.
                kept = posix.dup(folder)
                posix.mknod(name, mode, device, dir_fd=folder)
            except OSError as error:
                # In a user namespace nodes can't be made; the runtimes mount the host's there, and so do we.
                if error.errno not in (errno.EPERM, errno.EOVERFLOW):
                    raise creation_error(error, self.node["path"]) from error
            else:
                namespace.remember(lambda: posix.unlink(name, dir_fd=kept))
                posix.chown(name, self.node["uid"], self.node["gid"], dir_fd=folder, follow_symlinks=False)
                return
        try:
            target = namespace.placeholder(folder, name)
        except OSError as error:
            raise creation_error(error, self.node["path"]) from error
        self._mount(namespace, target)

    def _mount(self, namespace: Namespace, target: int) -> None:
        try:
            namespace.attach(self.clone, target, self.node["path"])
        finally:
            posix.close(target)


class Mount(Step):
    """A host file or folder, bound in the container. Each mount is of a clone of its own: moved once, a clone
    would only move again, away from where it was."""

    __slots__ = ("clone", "container_path", "host_path", "makes", "optional", "options", "used")

    def __init__(self, mount: dict[str, Any], optional: bool = False) -> None:
        self.clone = -1
        self.used = False
        self.optional = optional
        self.makes: str = mount["containerPath"]
        self.host_path: str = mount["hostPath"]
        self.container_path: str = mount["containerPath"]
        self.options = tuple(mount["options"])

    def describe(self) -> str:
        return f"mount {self.host_path} on {self.container_path} ({' '.join(self.options)})"

    def prepare(self, host: int, namespace: Namespace) -> None:
        self.clone = clone(host, self.host_path, self.options)

    def execute(self, namespace: Namespace) -> None:
        wanted = posix.fstat(self.clone)
        target = self._target(namespace, wanted)
        if target is not None:
            try:
                namespace.attach(self.clone, target, self.container_path)
                self.used = True
            finally:
                posix.close(target)

    def again(self) -> int:
        """A detached mount of the host's file, to be mounted by another name too.

        Once moved, our mount is one of this namespace and can be cloned by its descriptor; before, the clone itself
        is at hand, and a clone of it is refused below Linux 6.15.
        """
        if not self.used:
            self.used = True
            return posix.dup(self.clone)
        mount = kernel.open_tree(self.clone, self.host_path)
        kernel.mount_setattr(mount, 0, propagation=kernel.MS_PRIVATE, path=self.host_path)
        return mount

    def _target(self, namespace: Namespace, wanted: posix.stat_result) -> int | None:
        """What to mount on, made where missing; None where the source is mounted there already."""
        if root.file_type(wanted.st_mode) == root.S_IFDIR:
            target = namespace.folder(self.container_path)
            if identity(posix.fstat(target)) == identity(wanted):
                posix.close(target)
                return None
            namespace.may_cover(target, self.container_path)
            return target
        place, name = root.split(self.container_path)
        folder = namespace.folder(place)
        try:
            return self._file(namespace, folder, name, wanted)
        except OSError as error:
            raise creation_error(error, self.container_path) from error
        finally:
            posix.close(folder)

    def _file(self, namespace: Namespace, folder: int, name: str, wanted: posix.stat_result) -> int | None:
        try:
            target = posix.open(name, root.PATH | posix.O_NOFOLLOW, dir_fd=folder)
        except FileNotFoundError:
            return namespace.placeholder(folder, name)
        there = posix.fstat(target)
        if identity(there) == identity(wanted):
            posix.close(target)
            return None
        # A link is covered itself, never what it leads to: the name is then a plain file.
        if root.file_type(there.st_mode) in (root.S_IFREG, root.S_IFLNK, root.S_IFSOCK):
            return target
        posix.close(target)
        what = f"{self.container_path} in the container is in the way: neither a file nor a link"
        raise NvhookError(what, "take that path out of the image")


class Link(Step):
    """A symbolic link. A file of the image by that name is covered with the library that the link leads to, which
    `mount` brings from the host; with `cover` the library is mounted by that name in any case."""

    __slots__ = ("cover", "library", "mount", "optional", "path", "target")

    def __init__(self, path: str, target: str, library: str, mount: Mount | None, cover: bool = False) -> None:
        self.path = path
        self.target = target
        self.library = library
        self.mount = mount
        self.optional = mount is not None and mount.optional
        self.cover = cover

    def describe(self) -> str:
        if self.cover:
            return f"mount {self.library} on {self.path}, since the image has another version"
        return f"link {self.path} -> {self.target}"

    def execute(self, namespace: Namespace) -> None:
        if self.library in namespace.missing:
            return
        place, name = root.split(self.path)
        folder = namespace.folder(place)
        try:
            self._make(namespace, folder, name)
        except OSError as error:
            raise creation_error(error, self.path) from error
        finally:
            posix.close(folder)

    def _make(self, namespace: Namespace, folder: int, name: str) -> None:
        try:
            there = posix.stat(name, dir_fd=folder, follow_symlinks=False)
        except FileNotFoundError:
            if not self.cover:
                namespace.make(folder, name, lambda kept: posix.symlink(self.target, name, dir_fd=kept))
                return
            posix.close(namespace.placeholder(folder, name))
            there = posix.stat(name, dir_fd=folder, follow_symlinks=False)
        kind = root.file_type(there.st_mode)
        if kind == root.S_IFLNK and not self.cover:
            self._replace(namespace, folder, name, there)
        elif kind in (root.S_IFREG, root.S_IFLNK):
            self._cover(namespace, folder, name, there)
        else:
            what = f"{self.path} in the container is in the way: neither a file nor a link"
            raise NvhookError(what, "take that path out of the image")

    def _replace(self, namespace: Namespace, folder: int, name: str, there: posix.stat_result) -> None:
        old = posix.readlink(name, dir_fd=folder)
        if old == self.target:
            return
        kept = posix.dup(folder)

        def lead(target: str, uid: int, gid: int) -> None:
            namespace.swap(kept, name, lambda where, new: files.make_link(namespace, where, new, target, uid, gid))

        lead(self.target, *namespace.ids)
        namespace.remember(lambda: lead(old, there.st_uid, there.st_gid))

    def _cover(self, namespace: Namespace, folder: int, name: str, there: posix.stat_result) -> None:
        if self.mount is None:
            what = f"{self.path} in the container is in the way: a file, and no file of the host is at {self.library}"
            raise NvhookError(what, "take that path out of the image")
        if identity(root.stat(namespace.base, self.library)) == identity(there):
            return
        target = posix.open(name, root.PATH | posix.O_NOFOLLOW, dir_fd=folder)
        try:
            namespace.attach(self.mount.again(), target, self.path)
        finally:
            posix.close(target)


def steps(plan: Plan, container: Container, sources: dict[str, Mount] | None = None) -> list[Step]:
    """The Plan's steps in order of execution. `sources` are mounts that the runtime has made, by container path."""
    made: list[Step] = []
    mounts = {mount["containerPath"]: Mount(mount, mount["containerPath"] in plan.optional) for mount in plan.mounts}
    if plan.nodes:
        made.append(Rules(plan.nodes, container))
    if plan.proc_mask is not None:
        made.append(Mask(plan.proc_mask, plan.proc_access))
    made += [Node(node, node["path"] in plan.optional) for node in plan.nodes]
    made += mounts.values()
    mounts |= sources or {}
    targets = {link["path"]: link["target"] for link in plan.links}
    for path, target in targets.items():
        library = final(path, targets)
        made.append(Link(path, target, library, mounts.get(library), path in plan.covers))
    for link in plan.node_links:
        step = Link(link["path"], link["target"], final(link["path"], {link["path"]: link["target"]}), None)
        step.optional = True
        made.append(step)
    if plan.drop_in or plan.drop_in_there:
        made.append(search.SearchPath(plan.drop_in, plan.drop_in_line))
    if plan.musl_path:
        made.append(search.MuslPath(plan.musl_path, plan.musl_folders))
    if plan.profile:
        # For containers with EGL alone.
        from hook import profile

        made.append(profile.Profile(plan.profile))
    # Last, so that it is newer than every folder that was changed here.
    if plan.cache_entries or plan.stale_folders or plan.compat_folder:
        made.append(search.LoaderCache([(final(entry["path"], targets), entry) for entry in plan.cache_entries], plan))
    return made


def final(path: str, targets: dict[str, str]) -> str:
    """The file that a chain of planned links ends at; somewhere in it where it is a circle."""
    for _ in targets:
        if path not in targets:
            break
        folder, target = path.rpartition("/")[0], targets[path]
        while target.startswith("../"):
            # Above the root is the root.
            folder, target = folder.rpartition("/")[0], target[3:]
        path = target if target.startswith("/") else f"{folder}/{target}"
    return path


def prepare(
    todo: list[Step], host: int, namespace: Namespace, times: Record | None = None, journal: Log | None = None
) -> list[Step]:
    """Prepare the steps; those that can be executed come back."""
    ready = []
    begin = time.monotonic()
    for step in todo:
        if times is not None:
            times.at(kind(step))
        try:
            step.prepare(host, namespace)
        except (NvhookError, OSError) as error:
            if not step.optional:
                raise
            leave_out(step, error, namespace, namespace.mark())
        else:
            ready.append(step)
    if journal is not None:
        journal.step(f"{len(todo)} steps prepared on the host", begin)
    return ready


def run(todo: list[Step], namespace: Namespace, times: Record | None = None, journal: Log | None = None) -> None:
    """Run the steps; on a failure take everything back and say which step it was. An optional one is left out."""
    for step in todo:
        if times is not None:
            times.at(kind(step))
        mark = namespace.mark()
        begin = time.monotonic()
        try:
            step.execute(namespace)
        except BaseException as error:
            if step.optional and isinstance(error, (NvhookError, OSError)):
                leave_out(step, error, namespace, mark)
                continue
            left = namespace.undo()
            raise failure(step, error, left) from error
        if journal is not None:
            journal.step(step.describe(), begin)


def kind(step: Step) -> str:
    """What its time and its failures are counted under."""
    return type(step).__name__.lower()


def leave_out(step: Step, error: BaseException, namespace: Namespace, mark: int) -> None:
    """Take an optional step back, alone, and say so."""
    said = failure(step, error, namespace.undo(mark))
    namespace.missing.add(step.makes)
    namespace.warnings.append(f"left out: {said.what if isinstance(said, NvhookError) else said}")


def failure(step: Step, error: BaseException, left: list[str]) -> BaseException:
    """The error to show: what a step said, or which step a bare OSError came from."""
    if isinstance(error, OSError):
        path = f" ({error.filename})" if error.filename else ""
        error = NvhookError(f"{step.describe()}: {error.strerror}{path}", "see docs/errors: steps")
    if left and isinstance(error, NvhookError):
        return NvhookError(f"{error.what}; and could not be taken back: {', '.join(left)}", error.remedy)
    return error
