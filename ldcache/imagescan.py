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

NAMES_MAX = 16384
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

    __slots__ = ("base", "left")

    def __init__(self, base: int) -> None:
        self.base = base
        self.left = ALL_LIBRARIES_MAX

    def hwcaps(self, folder: str) -> list[str]:
        """The sub-folders of its glibc-hwcaps, by name, at most HWCAPS_MAX; each holds variants for newer CPUs."""
        inside = f"{folder}/glibc-hwcaps"
        try:
            listed = root.names(self.base, inside, NAMES_MAX)
        except OSError:
            return []
        found: list[str] = []
        for name in listed:
            if names.is_hwcaps(kernel.encode(name)) and len(found) < HWCAPS_MAX and self._is_folder(f"{inside}/{name}"):
                found.append(name)
        return found

    def _is_folder(self, path: str) -> bool:
        try:
            return root.file_type(root.stat(self.base, path).st_mode) == root.S_IFDIR
        except OSError:
            return False

    def scan(self, folder: str, hwcaps: str | None = None) -> list[cache.Entry]:
        """Cache entries for the libraries of a folder, in ldconfig's order; with `hwcaps`, of that sub-folder.

        Raises OSError where the folder can't be read, E2BIG past NAMES_MAX names, or past LIBRARIES_MAX of them like a
        library's, ALL_LIBRARIES_MAX in all. A file that is no library of a known machine is passed over.
        """
        place = folder if hwcaps is None else f"{folder}/glibc-hwcaps/{hwcaps}"
        # In a glibc-hwcaps folder links of any name count, for whatever reason.
        wanted = is_library_name if hwcaps is None else is_whole
        listed = [name for name in root.names(self.base, place, NAMES_MAX) if wanted(name)]
        if len(listed) > min(LIBRARIES_MAX, self.left):
            raise kernel.error("read", errno.E2BIG, place)
        self.left -= len(listed)
        directory = root.open_path(self.base, place)
        try:
            present = set(listed)
            found: dict[str, _Found] = {}
            for name in listed:
                _look(self.base, directory, place, name, found)
        finally:
            posix.close(directory)
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


def _entry(key: str, path: str, flags: int, hwcap: int = 0, hwcaps: str | None = None) -> cache.Entry:
    name = None if hwcaps is None else kernel.encode(hwcaps)
    return cache.Entry(kernel.encode(key), kernel.encode(path), flags, hwcap, name)


def is_library_name(name: str) -> bool:
    """Whether ldconfig looks into a file of that name."""
    return names.is_library(kernel.encode(name)) and is_whole(name)


def is_whole(name: str) -> bool:
    """Whether it is no name for the time being. Those with a newline stand for nothing good."""
    return not names.is_temporary(kernel.encode(name)) and "\n" not in name


def _look(base: int, directory: int, folder: str, name: str, found: dict[str, _Found]) -> None:
    try:
        there = posix.stat(name, dir_fd=directory, follow_symlinks=False)
    except OSError:
        return
    is_link = root.file_type(there.st_mode) == root.S_IFLNK
    if not is_link and (root.file_type(there.st_mode) != root.S_IFREG or not is_library_name(name)):
        return
    facts, level = _read(base, f"{folder}/{name}")
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


def read_facts(base: int, path: str) -> elf.ElfFacts | None:
    """ELF facts of a file of the image; None for what is no library."""
    return _read(base, path)[0]


def _read(base: int, path: str) -> tuple[elf.ElfFacts | None, int]:
    """ELF facts, and the ISA level that counts in a glibc-hwcaps folder."""
    try:
        fd = root.open_file(base, path, stored=True)
    except OSError:
        return None, 0
    try:
        return elf.read(fd), elf.level(fd) if "/glibc-hwcaps/" in path else 0
    except (elf.InvalidElf, OSError):
        return None, 0
    finally:
        posix.close(fd)
