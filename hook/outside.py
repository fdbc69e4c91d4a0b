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
# Of one path and of all links on its way: more than an image needs, and some milliseconds.
PARTS_MAX = 256


class Outside(namespace.Namespace):
    """The root, open before anything is mounted in it. `covers` maps a path to the library that the runtime is to mount
    on it."""

    __slots__ = ("_folders", "covers")

    def __init__(self, root_path: str, config: dict[str, Any]) -> None:
        """Raises NvhookError for a root that can't be opened, or is the host's own."""
        super().__init__()
        self.covers: dict[str, str] = {}
        self._folders: dict[str, str] = {}
        self.open_root(root_path)
        linux = config.get("linux") or {}
        self.ids = (mapped(linux.get("uidMappings")), mapped(linux.get("gidMappings")))

    def real_folder(self, path: str) -> str:
        """What `real` says of a folder, looked up once."""
        if path not in self._folders:
            self._folders[path] = real(self.base, path)
        return self._folders[path]

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


def hidden(place: Outside, wanted: list[str], mounts: list[dict[str, Any]]) -> str:
    """The destination of a mount of config.json that will hide one of these folders, or a file that is written in
    /etc; "" for none."""
    folders = [place.real_folder(folder) for folder in wanted]
    own = ("/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d")
    for mount in mounts:
        destination = mount.get("destination")
        if not isinstance(destination, str) or f"{destination}/".startswith(APART):
            continue
        there = real(place.base, destination)
        if there in own and "/etc" in wanted:
            return destination
        if any(f"{folder}/".startswith(f"{there}/") for folder in folders):
            return destination
    return ""


def real(base: int, path: str) -> str:
    """The path without the links of the image, as a runtime will resolve it: what is not there yet, it makes. A name to
    decide by, never to open. Raises NvhookError past the kernel's bounds for one look-up, or PARTS_MAX parts, those of
    links among them: each is looked for, and the image or a volume's destination says how many there are."""
    done: list[str] = []
    parts = path.split("/")[::-1]
    left = PARTS_MAX - len(parts)
    links = 0
    while parts:
        part = parts.pop()
        if part == "..":
            del done[-1:]
        if part not in ("", ".", ".."):
            done.append(part)
        name = "/" + "/".join(done)
        if left < 0 or links > root.LINKS_MAX or len(name) >= root.PATH_MAX:
            what = f"{path[:200]} in the container is too long, or has too many links, to be followed"
            raise NvhookError(what, f"let it be a path of at most {PARTS_MAX} folders, those of links among them")
        if part in ("", ".", ".."):
            continue
        try:
            text = root.readlink(base, name)
        except OSError:
            continue
        links += 1
        done = [] if text.startswith("/") else done[:-1]
        more = text.split("/")[::-1]
        left -= len(more)
        parts += more
    return "/" + "/".join(done) if done else ""


def foreign(place: Outside, mounts: list[dict[str, Any]]) -> list[str]:
    """Where config.json mounts folders of the host's: what the runtime makes below, it makes on the host."""
    found = []
    for mount in mounts:
        destination, options = mount.get("destination"), mount.get("options")
        options = options if isinstance(options, list) else []
        if isinstance(destination, str) and (mount.get("type") == "bind" or "bind" in options or "rbind" in options):
            found.append(real(place.base, destination))
    return found


def check_target(place: Outside, mount: dict[str, Any], is_folder: bool, volumes: list[str]) -> str:
    """Why the runtime is not to mount a host's file there; "" where nothing is in the way. `volumes`: see `foreign`."""
    path = mount["containerPath"]
    folder, name = root.split(path)
    try:
        there = f"{place.real_folder(folder)}/{name}"
        if root.file_type(root.stat(place.base, there, follow=False).st_mode) == root.S_IFLNK:
            there = real(place.base, there)
        status = root.stat(place.base, there)
    except FileNotFoundError:
        status = None
    except OSError as error:
        return namespace.creation_error(error, path).what
    except NvhookError as error:
        return error.what
    if f"{there}/".startswith(APART):
        return f"{path} in the container is in the way: it leads to {there}"
    if any(there.startswith(f"{volume}/") for volume in volumes):
        return f"{path} in the container is in a mount from elsewhere; nvhook makes no files in it"
    if status is not None and (root.file_type(status.st_mode) == root.S_IFDIR) != is_folder:
        return f"{path} in the container is in the way: {'no folder' if is_folder else 'a folder'}"
    return ""
