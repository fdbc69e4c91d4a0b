# SPDX-License-Identifier: Apache-2.0
"""Reading one folder of a root as ldconfig reads it, without changing anything there.

Hot, but only where an image's cache does not know a folder, or its CUDA brings forward compatibility.
ldconfig's rules (glibc `elf/ldconfig.c`, search_dir): names like `lib*.so*` and `ld-*.so*`; of the files with
one soname the greater name wins; a link counts by its own name where that is the soname, or `X.so` of a soname
that begins so. ldconfig then makes the soname's link. We don't: where it is missing, the entry leads to the file.
Sub-folders (glibc-hwcaps) are not read: an image whose cache lacks them only loses variants for newer CPUs.
"""

from __future__ import annotations

import errno
import posix

from ldcache import cache, elf, kernel, order, root

NAMES_MAX = 16384
LIBRARIES_MAX = 2048

# What package managers and prelink leave beside a library while they replace it.
PARTIAL = (".#prelink#", ".dpkg-new", ".dpkg-tmp")


class _Found:
    """The best name so far for one key of the cache."""

    __slots__ = ("flags", "is_link", "name")

    def __init__(self, name: str, is_link: bool, flags: int) -> None:
        self.name = name
        self.is_link = is_link
        self.flags = flags


def scan(base: int, folder: str) -> list[cache.Entry]:
    """Cache entries for the libraries of a folder, in ldconfig's order.

    Raises OSError where the folder can't be read, E2BIG past NAMES_MAX names or LIBRARIES_MAX of them like a
    library's. A file that is no library of a known machine is passed over.
    """
    names = [name for name in root.names(base, folder, NAMES_MAX) if is_library_name(name)]
    if len(names) > LIBRARIES_MAX:
        raise kernel.error("read", errno.E2BIG, folder)
    directory = root.open_path(base, folder)
    try:
        present = set(names)
        found: dict[str, _Found] = {}
        for name in names:
            _look(base, directory, folder, name, found)
    finally:
        posix.close(directory)
    prefix = "" if folder == "/" else folder
    return [
        cache.Entry(kernel.encode(key), kernel.encode(f"{prefix}/{key if key in present else best.name}"), best.flags)
        for key, best in reversed(found.items())
    ]


def is_library_name(name: str) -> bool:
    """Whether ldconfig looks into a file of that name. Names with a newline or `;` stand for nothing good."""
    if not name.startswith(("lib", "ld-", "ld.so.", "ld64.so.")) or ".so" not in name:
        return False
    return not name.endswith(PARTIAL) and ".#prelink#." not in name and not set(";\n") & set(name)


def _look(base: int, directory: int, folder: str, name: str, found: dict[str, _Found]) -> None:
    try:
        there = posix.stat(name, dir_fd=directory, follow_symlinks=False)
    except OSError:
        return
    is_link = root.file_type(there.st_mode) == root.S_IFLNK
    if not is_link and root.file_type(there.st_mode) != root.S_IFREG:
        return
    facts = read_facts(base, f"{folder}/{name}")
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
        found[key] = _Found(name, is_link, flags)
    elif (known.is_link and not is_link) or (known.is_link == is_link and greater(name, known.name)):
        known.name, known.is_link = name, is_link


def greater(one: str, other: str) -> bool:
    """Whether ldconfig takes a file name for a newer version than another."""
    first, second = (order.libcmp_key(kernel.encode(name)) for name in (one, other))
    return first > second


def read_facts(base: int, path: str) -> elf.ElfFacts | None:
    """ELF facts of a file of the image; None for what is no library."""
    try:
        fd = root.open_file(base, path, stored=True)
    except OSError:
        return None
    try:
        return elf.read(fd)
    except (elf.InvalidElf, OSError):
        return None
    finally:
        posix.close(fd)
