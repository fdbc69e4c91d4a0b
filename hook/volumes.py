# SPDX-License-Identifier: Apache-2.0
"""What config.json mounts where, told before anything is mounted: which paths of the container will be the host's.

Hot. The low-level runtime mounts in config.json's order (OCI runtime specification, "Mounts") and resolves each
destination inside the root, through links of the image and of what it has mounted by then. What it makes below a
volume it makes on the host. So a path is followed here as it will be then: in the image, and in a volume's source.
"""

from __future__ import annotations

import errno
import posix

from ldcache import kernel, root
from ldcache.errors import NvhookError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

# Made for the container. Of tmpfs all is its own; the links of the others lead to places on themselves.
TMPFS = "tmpfs"
KERNELS = ("proc", "sysfs", "devpts", "mqueue", "cgroup", "cgroup2")
SHARED = ("shared", "rshared")
PROPAGATION = (*SHARED, "private", "rprivate", "slave", "rslave", "unbindable", "runbindable")
# Of one path and of all links on its way: more than an image needs, and some milliseconds.
PARTS_MAX = 256
# The names of processes in proc lead to anywhere.
PROCESSES = ("self", "thread-self")


class Volume:
    """One mount. `place` is where it will be, `foreign` whether what is made in it is made elsewhere, `leaks` whether
    what is mounted right on it may appear elsewhere."""

    __slots__ = ("copies", "destination", "foreign", "kind", "leaks", "place", "source")

    def __init__(self, mount: dict[str, Any], place: str, inside: Volume | None, bundle: str, shared: bool) -> None:
        listed = mount.get("options")
        options = listed if isinstance(listed, list) else []
        kind = str(mount.get("type") or "")
        self.kind = "bind" if kind == "bind" or "bind" in options or "rbind" in options else kind
        self.place = place
        self.destination = str(mount["destination"])
        own = self.kind == TMPFS or self.kind in KERNELS
        # On a volume that hands mounts on, even a tmpfs is the host's too.
        self.foreign: bool = not own or (inside is not None and inside.foreign)
        propagation = [option for option in options if option in PROPAGATION][-1:]
        self.leaks = self.foreign and (propagation[0] in SHARED if propagation else shared)
        # runc and crun fill such a tmpfs with what the image has there, links included.
        self.copies = self.kind == TMPFS and "tmpcopyup" in options
        source = str(mount.get("source") or "")
        self.source = source if source.startswith("/") else f"{bundle}/{source}"

    def open(self) -> int:
        """An O_PATH descriptor of a bind mount's source, which runtimes look up on the host. Raises OSError."""
        if self.kind != "bind":
            raise kernel.error("no look into it", errno.EXDEV, self.destination)
        return posix.open(self.source, root.PATH)

    def link(self, rest: str) -> str:
        """The text of a link in it, by its name below the mount's root; "" for what is none. Raises OSError where
        that can't be told."""
        if self.kind in KERNELS:
            first = rest.split("/")[1]
            if self.kind == "proc" and (first in PROCESSES or first.isdigit()):
                raise kernel.error("a process's folder", errno.EXDEV, self.destination)
            return ""
        if self.kind == TMPFS:
            return ""
        fd = self.open()
        try:
            text = root.readlink(fd, rest)
            if root.is_pseudo(fd):
                raise kernel.error("a link of the kernel's", errno.EXDEV, self.destination)
            return text
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.EINVAL):
                return ""
            raise
        finally:
            posix.close(fd)

    def is_dev(self) -> bool:
        """Whether runtimes make no nodes because of it: one look at the destination's words, links or not."""
        words = [part for part in self.destination.split("/") if part not in ("", ".")]
        return self.kind == "bind" and words == ["dev"]


class Volumes:
    """The mounts of a configuration over the root that `base` is open on. `unclear` is the destination of one that
    may be anywhere, `met` those that lead through a name in `written`, which will be another by then."""

    __slots__ = ("_base", "_folders", "_met", "_texts", "_tree", "met", "unclear", "written")

    def __init__(self, base: int, known: Volumes | None = None) -> None:
        """`known` has looked at the same root before; a name is looked up once for both."""
        self._base = base
        self._texts: dict[str, str] = {} if known is None else known._texts
        self._folders: dict[str, str] = {}
        self._met = False
        # By the names of a path, one in the other; "" is the volume that is mounted there.
        self._tree: dict[str, Any] = {}
        self.met: list[str] = []
        self.unclear = ""
        self.written: set[str] = set()

    def add(self, mounts: list[dict[str, Any]], bundle: str, shared: bool) -> None:
        """Mount these, in their order. `shared`: the root's propagation is."""
        for mount in mounts:
            destination = mount.get("destination")
            if not isinstance(destination, str):
                continue
            self._met = False
            try:
                place = self.real(destination)
            except OSError:
                self.unclear = self.unclear or destination
                continue
            if self._met:
                self.met.append(destination)
            self._put(Volume(mount, place, self.holding(place), bundle, shared))
            self._folders = {}

    def _put(self, volume: Volume) -> None:
        """Mount it, over what is mounted below its place."""
        names = volume.place.split("/")[1:]
        if not names:
            self._tree = {"": volume}
            return
        at = self._tree
        for name in names[:-1]:
            at = at.setdefault(name, {})
        at[names[-1]] = {"": volume}

    def real(self, path: str) -> str:
        """The path without links, as a runtime will resolve it: what is not there yet, it makes. "" is the root. A
        name to decide by, never to open.

        Raises OSError where it can't be told. Raises NvhookError past the kernel's bounds for one look-up, or PARTS_MAX
        parts, those of links among them: each is looked for, and the image or a volume's destination says how many
        there are.
        """
        done: list[str] = []
        parts = path.split("/")[::-1]
        left = PARTS_MAX - len(parts)
        links = 0
        while parts:
            part = parts.pop()
            if part == "..":
                self._may_leave("/".join(["", *done]))
                del done[-1:]
            if part not in ("", ".", ".."):
                done.append(part)
            here = "/".join(["", *done])
            if left < 0 or links > root.LINKS_MAX or len(here) >= root.PATH_MAX:
                what = f"{path[:200]} in the container is too long, or has too many links, to be followed"
                raise NvhookError(what, f"let it be a path of at most {PARTS_MAX} folders, those of links among them")
            text = self._link(here) if part not in ("", ".", "..") else ""
            if text:
                links += 1
                done = [] if text.startswith("/") else done[:-1]
                more = text.split("/")[::-1]
                left -= len(more)
                parts += more
        return "/".join(["", *done])

    def real_folder(self, path: str) -> str:
        """What `real` says of a folder, looked up once."""
        if path not in self._folders:
            self._folders[path] = self.real(path)
        return self._folders[path]

    def real_file(self, path: str) -> str:
        """What `real` says of a file, its folder looked up once."""
        folder, name = root.split(path)
        there = f"{self.real_folder(folder)}/{name}"
        return self.real(there) if self._link(there) else there

    def holding(self, place: str) -> Volume | None:
        """The mount that a path without links will be on; None for the image's own."""
        at = self._tree
        found: Volume | None = at.get("")
        for part in place.split("/")[1:]:
            if part not in at:
                break
            at = at[part]
            found = at.get("", found)
        return found

    def stat(self, place: str) -> posix.stat_result | None:
        """What will be at a path without links before anything is made there; None for nothing. Raises OSError."""
        volume = self.holding(place)
        if volume is None or volume.copies:
            return self._stat(self._base, place or "/")
        if volume.kind != "bind":
            return None
        fd = volume.open()
        try:
            return self._stat(fd, place[len(volume.place) :]) if place != volume.place else posix.fstat(fd)
        finally:
            posix.close(fd)

    def _stat(self, fd: int, path: str) -> posix.stat_result | None:
        try:
            return root.stat(fd, path, follow=False)
        except FileNotFoundError:
            return None

    def _link(self, here: str) -> str:
        """The text of the link by that name; "" for anything else, the root of a mount included."""
        volume = self.holding(here)
        if volume is not None and volume.place == here:
            return ""
        if volume is not None and not volume.copies:
            return volume.link(here[len(volume.place) :])
        if volume is None and here in self.written:
            self._met = True
        if here not in self._texts:
            try:
                self._texts[here] = root.readlink(self._base, here)
            except OSError:
                self._texts[here] = ""
        return self._texts[here]

    def _may_leave(self, folder: str) -> None:
        """Refuse `..` behind a link of the kernel's that was not followed."""
        volume = self.holding(folder)
        if volume is not None and volume.kind in KERNELS and folder != volume.place:
            raise kernel.error("a folder of the kernel's", errno.EXDEV, folder)
