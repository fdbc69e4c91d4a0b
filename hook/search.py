# SPDX-License-Identifier: Apache-2.0
"""The steps that let the image's loader find the driver's libraries: its cache, ldconfig's configuration, musl's
path file.

Hot. What has to be done is decided in `hook.loader`, before anything is changed; what the files hold is read again
here, in the container's own namespace.
"""

from __future__ import annotations

import posix

from hook import files
from hook.loader import CACHE_PATH, DROP_IN
from hook.namespace import creation_error
from hook.plan import few
from hook.step import Step
from ldcache import cache, imageconf, imagescan, kernel, merge, root
from ldcache.errors import NvhookError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from hook.namespace import Namespace
    from hook.plan import Plan

DROP_IN_HEAD = "# Written by nvhook: where the host's NVIDIA driver is in this container."
# musl 1.2.3, ldso/dynlink.c: what is searched where there is no path file.
MUSL_FOLDERS = ("/lib", "/usr/local/lib", "/usr/lib")
INCLUDE_LINE = f"include {DROP_IN}\n".encode()
COVER_ATTRIBUTES = (
    kernel.MOUNT_ATTR_RDONLY | kernel.MOUNT_ATTR_NOSUID | kernel.MOUNT_ATTR_NODEV | kernel.MOUNT_ATTR_NOEXEC
)


class SearchPath(Step):
    """The drop-in file that tells the image's ldconfig of our folders, and the line of ld.so.conf that reads it. For
    the next ldconfig only: the cache is written without it, so that a failure is a warning."""

    __slots__ = ("folders", "line")

    optional = True

    def __init__(self, folders: list[str], line: bool) -> None:
        self.folders = folders
        self.line = line

    def describe(self) -> str:
        if not self.folders:
            return f"remove {DROP_IN}"
        line = f", and read it first in {imageconf.PATH}" if self.line else ""
        return f"write {DROP_IN}: {' '.join(self.folders)}{line}"

    def execute(self, namespace: Namespace) -> None:
        wanted = kernel.encode("".join([f"{line}\n" for line in (DROP_IN_HEAD, *self.folders)]))
        old = files.read(namespace, DROP_IN)
        if not self.folders:
            if old is not None and old.startswith(DROP_IN_HEAD.encode()):
                files.remove(namespace, DROP_IN, old)
            return
        if old != wanted:
            files.replace(namespace, DROP_IN, old or b"", wanted)
        if self.line:
            text = files.read(namespace, imageconf.PATH)
            files.replace(
                namespace, files.real_name(namespace, imageconf.PATH), text or b"", INCLUDE_LINE + (text or b"")
            )


class MuslPath(Step):
    """musl's path file: without a folder in it that folder is not searched, and where there is no such file the default
    folders are."""

    __slots__ = ("folders", "path")

    def __init__(self, path: str, folders: list[str]) -> None:
        self.path = path
        self.folders = folders

    def describe(self) -> str:
        return f"musl's search path {self.path}: see that it has {' '.join(self.folders)}"

    def execute(self, namespace: Namespace) -> None:
        text = files.read(namespace, self.path)
        known = (
            list(MUSL_FOLDERS)
            if text is None
            else text.decode("utf-8", "surrogateescape").replace(":", "\n").split("\n")
        )
        missing = [folder for folder in self.folders if folder not in known]
        if not missing:
            return
        old = text or b""
        lines = [*MUSL_FOLDERS, *missing] if text is None else missing
        end = b"" if not old or old.endswith((b"\n", b":")) else b"\n"
        new = old + end + kernel.encode("".join([f"{folder}\n" for folder in lines]))
        files.replace(namespace, files.real_name(namespace, self.path), old, new)


class LoaderCache(Step):
    """The image's ld.so.cache with our libraries in it, put in place by rename: a mounted cache would make
    every later ldconfig in the container fail, package installation included. So it is covered with a mount only
    where /etc takes no new file, nor ldconfig's."""

    __slots__ = ("compat", "entries", "optional", "stale")

    def __init__(self, entries: list[tuple[str, dict[str, Any]]], plan: Plan) -> None:
        self.entries = entries
        self.stale = plan.stale_folders
        self.compat = plan.compat_folder
        # The loader searches its default folders after the cache.
        self.optional = not plan.cache_needed

    def describe(self) -> str:
        names = " ".join(entry["soname"] for _, entry in self.entries)
        stale = "".join(f"; read {folder}, which it does not know" for folder in self.stale)
        compat = f"; {self.compat} first, for forward compatibility" if self.compat else ""
        return f"loader cache {CACHE_PATH}: {names}{stale}{compat}"

    def execute(self, namespace: Namespace) -> None:
        old = b""
        try:
            old = self._read(namespace)
            new = self._merged(namespace, old)
        except (cache.InvalidLdCache, merge.InvalidEntry) as error:
            what = f"{CACHE_PATH} of the container is left as it is: {error}{self._rival(old)}"
            if not self.optional:
                raise NvhookError(what, "run ldconfig in the image") from error
            namespace.warnings.append(what)
            return
        if new == old:
            return
        mark = namespace.mark()
        try:
            files.replace(namespace, CACHE_PATH, old, new)
        except (OSError, NvhookError) as error:
            namespace.undo(mark)
            if not self._cover(namespace, new):
                raise (creation_error(error, CACHE_PATH) if isinstance(error, OSError) else error) from error

    def _rival(self, old: bytes) -> str:
        """What the loader finds by a cache that stays, instead of a library of ours; the end of a sentence."""
        try:
            entries = cache.parse(old).entries
        except cache.InvalidLdCache:
            return ""
        ours = {(made.soname, made.flags) for made in [cache_entry(entry) for _, entry in self.entries]}
        for entry in entries:
            if (entry.soname, entry.flags) in ours:
                return f"; the loader finds {ascii(entry.path)[2:-1]} of the image, not the host's"
        return ""

    def _read(self, namespace: Namespace) -> bytes:
        """The container's cache; empty where it has none."""
        try:
            fd = root.open_file(namespace.base, CACHE_PATH, stored=True)
        except FileNotFoundError:
            return b""
        except OSError as error:
            raise cache.InvalidLdCache(str(error.strerror), 0) from error
        try:
            return cache.read(fd)
        except OSError as error:
            raise cache.InvalidLdCache(str(error.strerror), 0) from error
        finally:
            posix.close(fd)

    def _merged(self, namespace: Namespace, old: bytes) -> bytes:
        merged = cache.parse(old) if old else cache.empty()
        scanner = imagescan.Scanner(namespace.base)
        unread: list[str] = []
        if self.stale:
            merged = self._healed(merged, scanner, unread)
        folders: dict[str, list[cache.Entry]] = {}
        for library, entry in self.entries:
            if library not in namespace.missing:
                folders.setdefault(root.split(entry["path"])[0], []).append(cache_entry(entry))
        for folder, entries in folders.items():
            merged = merge.merge(merged, kernel.encode(folder), entries, whole_folder=False, win=True)
        if self.compat:
            entries = self._scanned(scanner, unread, self.compat)
            merged = merge.merge(merged, kernel.encode(self.compat), entries, whole_folder=False, win=True)
        namespace.warnings += few(unread, "such folders")
        return cache.serialize(merged)

    def _healed(self, merged: cache.Cache, scanner: imagescan.Scanner, unread: list[str]) -> cache.Cache:
        """The cache with the libraries of folders that it does not know, but for those that a folder which it knows
        has already; the first folder of ld.so.conf wins. In one merge: a hostile cache makes each of them slow."""
        spellings = [kernel.encode(folder) for folder in self.stale]
        prefixes = tuple([folder + b"/" for folder in spellings])
        taken = {
            (entry.soname, entry.flags, entry.hwcaps) for entry in merged.entries if not entry.path.startswith(prefixes)
        }
        entries: list[cache.Entry] = []
        subfolders: list[bytes] = []
        for folder in self.stale:
            found = self._scanned(scanner, unread, folder)
            for name in scanner.hwcaps(folder):
                subfolders.append(kernel.encode(name))
                found += self._scanned(scanner, unread, folder, name)
            for entry in found:
                key = entry.soname, entry.flags, entry.hwcaps
                if key not in taken:
                    taken.add(key)
                    entries.append(entry)
        return merge.merge(
            merged,
            spellings[0],
            entries,
            whole_folder=False,
            win=False,
            aliases=spellings[1:],
            subfolders=subfolders,
        )

    def _scanned(
        self, scanner: imagescan.Scanner, unread: list[str], folder: str, hwcaps: str | None = None
    ) -> list[cache.Entry]:
        try:
            return scanner.scan(folder, hwcaps)
        except OSError as error:
            place = folder if hwcaps is None else f"{folder}/glibc-hwcaps/{hwcaps}"
            unread.append(
                f"{place} of the container is not read into {CACHE_PATH}: {error.strerror}; run ldconfig in the image"
            )
            return []

    def _cover(self, namespace: Namespace, new: bytes) -> bool:
        """Mount a file over the cache, if there is one. Clones of what is attached nowhere: Linux 6.15."""
        mark = namespace.mark()
        try:
            target = root.open_path(namespace.base, CACHE_PATH, follow=False)
            detached = namespace.tmpfs((("mode", "0755"), ("size", str(len(new) + 65536))), kernel.MOUNT_ATTR_NOSUID)
            files.make_file(namespace, detached, "cache", new, 0o644, *namespace.ids)
            made = root.open_path(detached, "cache", follow=False)
            mount = kernel.open_tree(made, CACHE_PATH)
            kernel.mount_setattr(mount, COVER_ATTRIBUTES, propagation=kernel.MS_PRIVATE, path=CACHE_PATH)
            namespace.attach(mount, target, CACHE_PATH)
        except (OSError, NvhookError):
            namespace.undo(mark)
            return False
        namespace.warnings.append(f"{CACHE_PATH} of the container is covered with a mount: ldconfig will fail there")
        return True


def cache_entry(entry: dict[str, Any]) -> cache.Entry:
    """A Plan's entry in the loader cache's own terms."""
    flags = cache.native_flags(entry["class"], entry["machine"])
    return cache.Entry(kernel.encode(entry["soname"]), kernel.encode(entry["path"]), flags)
