# SPDX-License-Identifier: Apache-2.0
"""A container's root before its start: links and the loader's files go into it; mounts are left to the runtime.

Hot. The runtime shim works in the host's mount namespace, where nothing may be mounted: what the hooks cover with a
mount becomes one of config.json's. All else is as in a live namespace: paths are opened inside the root, files are
replaced by rename, everything has its inverse.
"""

from __future__ import annotations

import errno
import posix

from hook import files, namespace, steps
from hook.volumes import SHARED, Volumes
from ldcache import kernel, root
from ldcache.errors import NvhookError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from hook.plan import Plan
    from hook.state import Container
    from hook.step import Step

# Of no library and no configuration.
APART = ("/proc/", "/sys/", "/dev/")
LOADERS = ("/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d")


class Outside(namespace.Namespace):
    """The root, open before anything is mounted in it. `covers` maps a path to the library that the runtime is to mount
    on it, `image` tells where the image's links lead."""

    __slots__ = ("covers", "image")

    def __init__(self, root_path: str, config: dict[str, Any]) -> None:
        """Raises NvhookError for a root that can't be opened, or is the host's own."""
        super().__init__()
        self.covers: dict[str, str] = {}
        self.open_root(root_path)
        self.image = Volumes(self.base)
        linux = config.get("linux") or {}
        self.ids = (mapped(linux.get("uidMappings")), mapped(linux.get("gidMappings")))

    def is_read_only(self) -> bool:
        """Whether the root takes no files from here either, whatever config.json says of it."""
        return bool(posix.fstatvfs(self.base).f_flag & posix.ST_RDONLY)

    def writable(self, folder: int) -> int:
        """As in a namespace, but a mount that is read-only here was made so by somebody for a reason."""
        self.may_create(folder)
        if posix.fstatvfs(folder).f_flag & posix.ST_RDONLY:
            raise kernel.error("open", errno.EROFS, root.name_of(self.base, folder))
        return posix.dup(folder)

    def attach(self, mount: int, target: int, path: str) -> None:
        """Never: it would be a mount of the host's."""
        raise NvhookError(f"{path} cannot be mounted before the container is there", "report this to nvhook's authors")


def mapped(mappings: Any) -> int:
    """What id 0 of the container is on the host, by config.json's mappings; 0 without any."""
    for mapping in mappings if isinstance(mappings, list) else []:
        if isinstance(mapping, dict) and mapping.get("containerID") == 0 and isinstance(mapping.get("hostID"), int):
            return int(mapping["hostID"])
    return 0


class Link(steps.Link):
    """A link in the root; where a file of the image has to be covered instead, a mount for the runtime."""

    __slots__ = ()

    def __init__(self, step: steps.Link) -> None:
        # The runtime brings the library, so no mount of ours does.
        super().__init__(step.path, step.target, step.library, None, step.cover)
        self.optional = step.optional

    def _cover(self, place: namespace.Namespace, folder: int, name: str, there: posix.stat_result) -> None:
        assert isinstance(place, Outside), "a link of another applier"
        if root.file_type(there.st_mode) == root.S_IFLNK:
            # The runtime would follow it, and mount on what it leads to.
            kept = posix.dup(folder)
            text = posix.readlink(name, dir_fd=folder)
            place.swap(folder, name, lambda where, new: files.make_file(place, where, new, b"", 0o644, *place.ids))
            owner = (there.st_uid, there.st_gid)
            place.remember(
                lambda: place.swap(kept, name, lambda where, new: files.make_link(place, where, new, text, *owner))
            )
        place.covers[self.path] = self.library


def finish(plan: Plan, container: Container) -> list[Step]:
    """The steps that put a Plan's finish into a root from outside, in their order. Not links to nodes: /dev will be
    another."""
    made: list[Step] = []
    for step in steps.steps(plan, container):
        if isinstance(step, steps.Link):
            if step.path.startswith("/dev/"):
                continue
            made.append(Link(step))
        elif not isinstance(step, (steps.Rules, steps.Mask, steps.Node, steps.Mount)):
            made.append(step)
    return made


def places(plan: Plan) -> list[str]:
    """The folders that a Plan's finish writes in."""
    found = [root.split(link["path"])[0] for link in plan.links]
    if plan.musl_path or plan.cache_entries or plan.stale_folders:
        found.append("/etc")
    return list(dict.fromkeys(found))


def volumes(place: Outside, plan: Plan, config: dict[str, Any], taken: set[str], bundle: str) -> Volumes:
    """What config.json mounts, less what gives way to mounts of ours at the destinations in `taken`."""
    made = Volumes(place.base, place.image)
    made.written = written(place, plan)
    mounts = [mount for mount in config.get("mounts") or [] if mount.get("destination") not in taken]
    made.add(mounts, bundle, (config.get("linux") or {}).get("rootfsPropagation") in SHARED)
    return made


def written(place: Outside, plan: Plan) -> set[str]:
    """The names, free of the image's links, that a Plan's finish puts something else behind."""
    paths = [link["path"] for link in plan.links]
    if "/etc" in places(plan):
        paths += LOADERS
    try:
        return {f"{place.image.real_folder(folder)}/{name}" for folder, name in map(root.split, paths)}
    except (OSError, NvhookError):
        # `hidden` then says that folder.
        return set()


def hidden(place: Outside, wanted: list[str], mounts: Volumes) -> str:
    """The destination of a mount of config.json that will hide one of these folders, or the folder itself where it
    can't be told; "" for none."""
    for folder in wanted:
        try:
            there = mounts.real_folder(folder)
            volume = mounts.holding(there)
            if volume is not None:
                return volume.destination
            if there != place.image.real_folder(folder):
                return folder
        except (OSError, NvhookError):
            return folder
    return ""


def check_target(mounts: Volumes, path: str, is_folder: bool) -> str:
    """Why the runtime is not to mount a host's file there; "" where nothing is in the way."""
    try:
        there = mounts.real_file(path)
        volume = mounts.holding(there)
        if f"{there}/".startswith(APART):
            return f"{path} in the container is in the way: it leads to {there}"
        if volume is not None and volume.foreign and there != volume.place:
            return f"{path} in the container is in a mount from elsewhere; nvhook makes no files in it"
        if volume is not None and volume.leaks:
            return f"{path} in the container is in a volume with rshared propagation; a mount there is the host's too"
        status = mounts.stat(there)
    except OSError as error:
        return namespace.creation_error(error, path).what
    except NvhookError as error:
        return error.what
    if status is not None and (root.file_type(status.st_mode) == root.S_IFDIR) != is_folder:
        return f"{path} in the container is in the way: {'no folder' if is_folder else 'a folder'}"
    return beside(mounts, path)


def check_node(mounts: Volumes, node: dict[str, Any], host: int) -> str:
    """Why the runtime is not to make a device node; "" where nothing is in the way, or it makes none. `host` is open
    on the host's root, whose own /dev may be the container's."""
    path = node["path"]
    try:
        there = mounts.real_file(path)
        volume = mounts.holding(there)
        if volume is None or not volume.foreign:
            return beside(mounts, path)
        if volume.is_dev():
            status = mounts.stat(volume.place)
            if status is not None and steps.identity(status) == steps.identity(root.stat(host, "/dev")):
                return ""
        status = mounts.stat(there)
    except OSError as error:
        return namespace.creation_error(error, path).what
    except NvhookError as error:
        return error.what
    # runc and crun leave what is there.
    device = posix.makedev(node["major"], node["minor"])
    if status is not None and root.file_type(status.st_mode) == root.S_IFCHR and status.st_rdev == device:
        return ""
    return f"{path} in the container is in a mount from elsewhere; nvhook makes no files in it"


def beside(mounts: Volumes, path: str) -> str:
    """Why nothing can be made anywhere: a mount that will be nobody knows where; "" where all are known."""
    if not mounts.unclear:
        return ""
    return f"{path} in the container may be in a mount from elsewhere: it can't be told where {mounts.unclear} leads"


def remedy(reason: str) -> str:
    """What helps against one of the above that a volume is the reason of; "" for others."""
    if "rshared" in reason:
        return "mount that volume with rslave or rprivate propagation"
    if "can't be told" in reason:
        return "mount it where neither the image nor another volume has a link"
    if "in a mount from elsewhere" in reason:
        return "mount nothing of the host's on that folder, or only what the container needs of it"
    return ""
