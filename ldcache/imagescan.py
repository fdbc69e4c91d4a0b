# SPDX-License-Identifier: Apache-2.0
"""Reading folders of a root as ldconfig reads them, without changing anything there.

Hot, but only where an image's cache does not know a folder, or its CUDA brings forward compatibility.
ldconfig's rules (glibc `elf/ldconfig.c`, search_dir): names like `lib*.so*` and `ld-*.so*`; of the files with
one soname the greater name wins; a link counts by its own name where that is the soname, or `X.so` of a soname
that begins so. ldconfig then makes the soname's link. We don't: where it is missing, the entry leads to the file.
"""

from __future__ import annotations

import errno
import posix

from ldcache import cache, elf, kernel, names, order, root

# Of one folder, and of all that one start lists.
NAMES_MAX = 16384
ALL_NAMES_MAX = 1 << 16
# Of one folder, and of all that one start reads.
LIBRARIES_MAX = 2048
ALL_LIBRARIES_MAX = 4096
HWCAPS_MAX = 16


class _Found:
    """The best name so far for one key of the cache."""

    __slots__ = ("flags", "is_link", "level", "name")

    def __init__(self, name: str, is_link: bool, flags: int, level: int) -> None:
        self.name = name
        self.is_link = is_link
        self.flags = flags
        self.level = level


class Scanner:
    """Reads folders of the root that `base` is open on, as many as the bounds allow."""

    __slots__ = ("_base", "_budget", "_left", "_names", "_seen")

    def __init__(self, base: int) -> None:
        self._base = base
        self._budget = root.Budget()
        self._left = ALL_LIBRARIES_MAX
        self._names = ALL_NAMES_MAX
        # Folders for newer CPUs, and those that hold them.
        self._seen: set[tuple[int, int]] = set()

    def hwcaps(self, folder: str) -> list[str]:
        """The sub-folders of its glibc-hwcaps, by name, at most HWCAPS_MAX; each holds variants for newer CPUs. None
        where another folder's glibc-hwcaps is the same one, by a link."""
        try:
            inside = root.Folder(self._base, f"{folder}/glibc-hwcaps", self._budget)
        except OSError:
            return []
        found: list[str] = []
        try:
            for name in [] if self._was_seen(inside) else self._list(inside):
                if len(found) == HWCAPS_MAX:
                    break
                if names.is_hwcaps(kernel.encode(name)) and _is_folder(inside, name):
                    found.append(name)
        except OSError:
            pass
        finally:
            inside.close()
        return found

    def _was_seen(self, folder: root.Folder) -> bool:
        status = posix.fstat(folder.fd)
        key = (status.st_dev, status.st_ino)
        known = key in self._seen
        self._seen.add(key)
        return known

    def _list(self, folder: root.Folder) -> list[str]:
        """The names in a folder. All of them count: the image chose how many are none of a library's."""
        limit = min(NAMES_MAX, self._names)
        if limit <= 0 or self._left <= 0:
            raise kernel.error("read", errno.E2BIG, folder.path)
        # So much at least has been read where there are more.
        self._names -= limit
        listed = folder.names(limit)
        self._names += limit - 1 - len(listed)
        return listed

    def scan(self, folder: str, hwcaps: str | None = None) -> list[cache.Entry]:
        """Cache entries for the libraries of a folder, in ldconfig's order; with `hwcaps`, of that sub-folder, which is
        read once, as ldconfig does, however many links lead to it.

        Raises OSError where the folder can't be read, E2BIG past NAMES_MAX names, or past LIBRARIES_MAX of them like a
        library's, ALL_NAMES_MAX and ALL_LIBRARIES_MAX in all, ELOOP past the budget for links. A file that is no
        library of a known machine is passed over.
        """
        place = folder if hwcaps is None else f"{folder}/glibc-hwcaps/{hwcaps}"
        opened = root.Folder(self._base, place, self._budget)
        try:
            if hwcaps is not None and self._was_seen(opened):
                return []
            # In a glibc-hwcaps folder links of any name count, for whatever reason.
            wanted = is_library_name if hwcaps is None else is_whole
            listed = [name for name in self._list(opened) if wanted(name)]
            if len(listed) > min(LIBRARIES_MAX, self._left):
                raise kernel.error("read", errno.E2BIG, place)
            self._left -= len(listed)
            found: dict[str, _Found] = {}
            for name in listed:
                _look(opened, name, found)
            if self._budget.parts < 0:
                raise kernel.error("read", errno.ELOOP, place)
        finally:
            opened.close()
        present = set(listed)
        prefix = "" if place == "/" else place
        if hwcaps is None:
            return [
                _entry(key, f"{prefix}/{key if key in present else best.name}", best.flags)
                for key, best in reversed(found.items())
            ]
        # No links are made in these, so entries lead to the files.
        return [
            _entry(key, f"{prefix}/{best.name}", best.flags, cache.HWCAP_EXTENSION | best.level << 32, hwcaps)
            for key, best in reversed(found.items())
        ]


def _is_folder(inside: root.Folder, name: str) -> bool:
    try:
        return root.file_type(inside.stat(name).st_mode) == root.S_IFDIR
    except OSError:
        return False


def _entry(key: str, path: str, flags: int, hwcap: int = 0, hwcaps: str | None = None) -> cache.Entry:
    name = None if hwcaps is None else kernel.encode(hwcaps)
    return cache.Entry(kernel.encode(key), kernel.encode(path), flags, hwcap, name)


def is_library_name(name: str) -> bool:
    """Whether ldconfig looks into a file of that name."""
    return names.is_library(kernel.encode(name)) and is_whole(name)


def is_whole(name: str) -> bool:
    """Whether it is no name for the time being. Those with a newline stand for nothing good."""
    return not names.is_temporary(kernel.encode(name)) and "\n" not in name


def _look(folder: root.Folder, name: str, found: dict[str, _Found]) -> None:
    try:
        there = folder.stat(name, follow=False)
    except OSError:
        return
    is_link = root.file_type(there.st_mode) == root.S_IFLNK
    if not is_link and (root.file_type(there.st_mode) != root.S_IFREG or not is_library_name(name)):
        return
    facts, level = _read_in(folder, name)
    if facts is None or not facts.shared:
        return
    try:
        flags = cache.native_flags(facts.elf_class, facts.machine, facts.e_flags)
    except ValueError:
        return
    # A soname with a slash would lead the entry out of the folder.
    soname = name if facts.soname is None else facts.soname.decode("utf-8", "surrogateescape")
    if not soname or "/" in soname:
        return
    bare = is_link and name.endswith(".so") and soname.startswith(name)
    key = name if bare else soname
    is_link = is_link and (bare or name == soname)
    known = found.get(key)
    if known is None:
        found[key] = _Found(name, is_link, flags, level)
    elif (known.is_link and not is_link) or (known.is_link == is_link and greater(name, known.name)):
        known.name, known.is_link, known.level = name, is_link, level


def greater(one: str, other: str) -> bool:
    """Whether ldconfig takes a file name for a newer version than another."""
    first, second = (order.libcmp_key(kernel.encode(name)) for name in (one, other))
    return first > second


def _read_in(folder: root.Folder, name: str) -> tuple[elf.ElfFacts | None, int]:
    try:
        return _read(root.readable(folder.open(name), name, stored=True), "/glibc-hwcaps/" in folder.path)
    except OSError:
        return None, 0


def read_facts(base: int, path: str) -> elf.ElfFacts | None:
    """ELF facts of a file of the image; None for what is no library."""
    try:
        return _read(root.open_file(base, path, stored=True), False)[0]
    except OSError:
        return None


def _read(fd: int, with_level: bool) -> tuple[elf.ElfFacts | None, int]:
    """ELF facts, and the ISA level that counts in a glibc-hwcaps folder."""
    try:
        return elf.read(fd), elf.level(fd) if with_level else 0
    except (elf.InvalidElf, OSError):
        return None, 0
    finally:
        posix.close(fd)
