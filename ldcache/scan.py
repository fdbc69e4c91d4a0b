# SPDX-License-Identifier: Apache-2.0
"""What ldconfig finds in library folders: `add_dir_1` and `search_dir` of glibc's elf/ldconfig.c.

The order of everything is ldconfig's, since the order of a cache's entries follows from it: folders as they come, their
glibc-hwcaps sub-folders right behind them, legacy hwcap sub-folders at the end of the list, and in a folder the reverse
of readdir's.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterable

from ldcache import library, links, names
from ldcache.cache import HWCAP_EXTENSION, MAX_HWCAPS, MAX_PATH, MAX_SONAME, Entry
from ldcache.library import Library
from ldcache.order import libcmp, libcmp_key, wraps
from ldcache.rules import Rules
from ldcache.tree import Tree

MAX_FOLDERS = 4096

_SPACE = b" \t\n\v\f\r"
_ANY_TYPE = -1
_TYPES = {b"libc4": 0, b"libc5": 2, b"libc6": 3, b"glibc2": 3}


class Folder:
    """A folder to scan: `path` as it is spelled, `hwcaps` the name of a glibc-hwcaps folder or None.

    `kind` is the library type that a `=libc6` suffix named, -1 without one.
    """

    __slots__ = ("hwcaps", "identity", "kind", "path")

    def __init__(self, path: bytes, identity: tuple[int, int], kind: int, hwcaps: bytes | None = None) -> None:
        self.path = path
        self.identity = identity
        self.kind = kind
        self.hwcaps = hwcaps


class Scanner:
    """Collects folders, then scans them.

    `with_links`: make and remove links as ldconfig does without -X. `for_cache`: as ldconfig does without -N, when it
    remembers what it read of each inode; that shows where an a.out file has several names. `warnings` are lines for a
    person; `hwcaps_names` the names of all glibc-hwcaps folders met, which stay in a cache's strings even where they
    hold no library.
    """

    def __init__(self, tree: Tree, rules: Rules, *, with_links: bool, for_cache: bool = True) -> None:
        self.tree = tree
        self.rules = rules
        self.with_links = with_links
        self.for_cache = for_cache
        self.folders: list[Folder] = []
        self.hwcaps_names: list[bytes] = []
        self.warnings: list[str] = []
        self._known: dict[tuple[int, int], Folder] = {}
        self._made_up: dict[tuple[int, int], Library] = {}

    def add(self, line: bytes) -> None:
        """Queue a folder as a command line or ld.so.conf names it. One that isn't there is passed over."""
        kind = _ANY_TYPE
        if self.rules.folder_types and b"=" in line:
            line, _, suffix = line.partition(b"=")
            kind = _TYPES.get(suffix, _ANY_TYPE)
        path = line.rstrip(_SPACE).rstrip(b"/")
        if not path:
            return
        try:
            status = self.tree.status(path)
        except OSError:
            return
        if self._queue(Folder(path, (status.st_dev, status.st_ino), kind)):
            self._add_hwcaps(path, kind)

    def _queue(self, folder: Folder) -> bool:
        """A folder that is known keeps its first spelling, and takes the later type."""
        known = self._known.get(folder.identity)
        if known is not None:
            known.kind = folder.kind
            return False
        if len(self.folders) >= MAX_FOLDERS:
            self.warnings.append(f"more than {MAX_FOLDERS} folders: {os.fsdecode(folder.path)} is left out")
            return False
        self._known[folder.identity] = folder
        self.folders.append(folder)
        return True

    def _add_hwcaps(self, path: bytes, kind: int) -> None:
        inside = path + b"/glibc-hwcaps"
        for name, entry_type in self._listed(inside, quiet=True):
            if not names.is_hwcaps(name) or entry_type == stat.S_IFREG:
                continue
            try:
                status = self.tree.status(inside + b"/" + name)
            except OSError:
                continue
            if not stat.S_ISDIR(status.st_mode):
                continue
            if len(self.hwcaps_names) >= MAX_HWCAPS:
                self.warnings.append(f"more than {MAX_HWCAPS} glibc-hwcaps folders: {os.fsdecode(name)} is left out")
                continue
            self.hwcaps_names.append(name)
            self._queue(Folder(inside + b"/" + name, (status.st_dev, status.st_ino), kind, name))

    def _listed(self, path: bytes, *, quiet: bool = False) -> list[tuple[bytes, int]]:
        """Each name of a folder in readdir's order, with the file type that its listing tells."""
        try:
            fd = self.tree.open_folder(path)
        except OSError as error:
            if not quiet and error.errno not in (errno.ENOENT, errno.ENOTDIR):
                self.warnings.append(f"cannot open the folder {os.fsdecode(path)}: {error.strerror}")
            return []
        try:
            with os.scandir(fd) as listing:
                return [(os.fsencode(entry.name), _type(entry)) for entry in listing]
        finally:
            os.close(fd)

    def entries(self, wanted: Callable[[bytes], bool] | None = None) -> list[Entry]:
        """Scan all queued folders. With `wanted`, only files whose path, as it is spelled, it accepts."""
        found: list[Entry] = []
        # Legacy sub-folders join the list while it is walked.
        for folder in self.folders:
            found += self._scan(folder, wanted)
        return found

    def _scan(self, folder: Folder, wanted: Callable[[bytes], bool] | None) -> list[Entry]:
        winners = _Winners(self, folder)
        for name, entry_type in self._listed(folder.path):
            path = folder.path + b"/" + name
            if not self._may_matter(folder, name, entry_type) or (wanted is not None and not wanted(path)):
                continue
            is_link = entry_type == stat.S_IFLNK
            try:
                status = self.tree.status(path)
            except OSError:
                if is_link and self.with_links and b".so." in name:
                    self._remove_dangling(path)
                continue
            if folder.hwcaps is None and stat.S_ISDIR(status.st_mode) and self.rules.is_legacy_folder(name):
                self._queue(Folder(path, (status.st_dev, status.st_ino), folder.kind))
            elif stat.S_ISREG(status.st_mode):
                found = self._library(path, name)
                if found is not None:
                    winners.add(found, name, is_link)
        return winners.entries()

    def _may_matter(self, folder: Folder, name: bytes, entry_type: int) -> bool:
        if entry_type not in (stat.S_IFREG, stat.S_IFLNK, stat.S_IFDIR):
            return False
        if not names.is_library(name):
            # In a glibc-hwcaps folder links of any name count, for whatever reason.
            if entry_type == stat.S_IFREG or (folder.hwcaps is None and not self.rules.is_legacy_folder(name)):
                return False
        return not names.is_temporary(name, self.rules.skips_package_managers)

    def _remove_dangling(self, path: bytes) -> None:
        try:
            with self.tree.folder_of(path) as (folder, base):
                os.unlink(base, dir_fd=folder)
        except OSError as error:
            self.warnings.append(f"cannot remove the dangling link {os.fsdecode(path)}: {error.strerror}")

    def _library(self, path: bytes, name: bytes) -> Library | None:
        try:
            fd = self.tree.open_file(path)
        except OSError as error:
            self.warnings.append(f"cannot open {os.fsdecode(path)}: {error.strerror}")
            return None
        try:
            return self._remembered(fd, library.read(fd, name, self.rules))
        except OSError as error:
            self.warnings.append(f"cannot read {os.fsdecode(path)}: {error.strerror}")
            return None
        finally:
            os.close(fd)

    def _remembered(self, fd: int, found: Library | None) -> Library | None:
        if found is None or not found.made_up or not self.for_cache:
            return found
        status = os.fstat(fd)
        return self._made_up.setdefault((status.st_dev, status.st_ino), found)


def _type(entry: os.DirEntry[str]) -> int:
    if entry.is_symlink():
        return stat.S_IFLNK
    if entry.is_dir(follow_symlinks=False):
        return stat.S_IFDIR
    return stat.S_IFREG if entry.is_file(follow_symlinks=False) else 0


class _Winner:
    """The library of one soname in one folder; its flags are those of the file met first."""

    __slots__ = ("flags", "is_link", "level", "name")

    def __init__(self, name: bytes, flags: int, is_link: bool, level: int) -> None:
        self.name = name
        self.flags = flags
        self.is_link = is_link
        self.level = level


class _Winners:
    """The libraries of one folder, one for each soname."""

    def __init__(self, scanner: Scanner, folder: Folder) -> None:
        self.scanner = scanner
        self.folder = folder
        self.found: dict[bytes, _Winner] = {}

    def add(self, library: Library, name: bytes, is_link: bool) -> None:
        """A library of this folder, by its name there."""
        # A link is one only under the soname, or as what the linker looks for: libx.so for libx.so.1.
        is_link = is_link and (name == library.soname or (name.endswith(b".so") and library.soname.startswith(name)))
        soname = name if is_link else library.soname
        flags = library.flags
        if flags == 1 and self.folder.kind in (2, 3):
            flags = self.folder.kind
        if len(soname) > MAX_SONAME or len(self.folder.path) + 1 + max(len(soname), len(name)) > MAX_PATH:
            self.scanner.warnings.append(f"{os.fsdecode(self.folder.path + b'/' + name)}: its soname is too long")
            return
        known = self.found.get(soname)
        if known is None:
            self.found[soname] = _Winner(name, flags, is_link, library.level)
        elif (known.is_link and not is_link) or (known.is_link == is_link and _is_newer(name, known.name)):
            self._replace(known, name, flags, is_link, library.level)

    def _replace(self, known: _Winner, name: bytes, flags: int, is_link: bool, level: int) -> None:
        if known.flags != flags:
            kinds = {known.flags, flags}
            if kinds in ({1, 2}, {1, 3}):
                # ldconfig up to 2.36 takes the later one's, whichever says less.
                known.flags = flags
            else:
                where = f"{os.fsdecode(known.name)} and {os.fsdecode(name)} in {os.fsdecode(self.folder.path)}"
                self.scanner.warnings.append(f"{where} have one soname and different types")
        known.name, known.is_link, known.level = name, is_link, level

    def entries(self) -> list[Entry]:
        """Their entries, the last one met first; their links are made on the way."""
        folder, scanner = self.folder, self.scanner
        hwcap = scanner.rules.legacy_bits(folder.path) if folder.hwcaps is None else 0
        entries = []
        for soname, winner in reversed(self.found.items()):
            if folder.hwcaps is not None:
                # The file itself, since no link is made here.
                level = HWCAP_EXTENSION | winner.level << 32
                path = folder.path + b"/" + winner.name
                entries.append(Entry(soname, path, winner.flags, level, folder.hwcaps))
                continue
            if scanner.with_links and not winner.is_link:
                warning = links.make(scanner.tree, folder.path, winner.name, soname)
                if warning is not None:
                    scanner.warnings.append(warning)
            entries.append(Entry(soname, folder.path + b"/" + soname, winner.flags, hwcap))
        return entries


def _is_newer(name: bytes, than: bytes) -> bool:
    if wraps((name, than)):
        return libcmp(than, name) < 0
    return libcmp_key(than) < libcmp_key(name)


def strings_of(entries: Iterable[Entry], names: Iterable[bytes]) -> tuple[bytes, ...]:
    """The glibc-hwcaps names that no entry uses, each once."""
    used = {entry.hwcaps for entry in entries}
    return tuple(dict.fromkeys(name for name in names if name not in used))
