# SPDX-License-Identifier: Apache-2.0
"""What in a cache doesn't hold: files gone or of another class, entries that no loader takes, stale folders."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

from ldcache import elf, merge, scan
from ldcache.cache import Cache, Entry, native_flags
from ldcache.elf import InvalidElf
from ldcache.order import libcmp_key, misplaced, signed_char
from ldcache.rules import OLDEST, Rules, Version
from ldcache.rules import version_of as parsed_version
from ldcache.tree import Tree

_STABLE = re.compile(rb"stable release version (\d{1,3}\.\d{1,3})")
# What an i386 library had up to 2.36, and a 32-bit ARM one may have: the loaders take both for the other.
_SAME = ({1, 3}, {3, 0x903}, {3, 0xB03})


def version_of(cache: Cache) -> Version | None:
    """The glibc version that a cache's generator names, where it is one that we follow."""
    match = _STABLE.search(cache.generator or b"")
    if match is None:
        return None
    version = parsed_version(match.group(1).decode())
    return version if version >= OLDEST else None


def problems(tree: Tree, cache: Cache, written: int, rules: Rules) -> Iterator[bytes]:
    """One line for each problem of a cache whose file was written at `written` (nanoseconds).

    First entries in their order, then folders. Entries of another architecture than their file's are of another class.
    """
    hidden = shadows(cache)
    for index, entry in enumerate(cache.entries):
        problem = _file_problem(tree, entry)
        if problem is not None:
            yield problem + _named(entry)
        if index in hidden:
            yield b"shadowed by %b: " % cache.entries[hidden[index]].path + _named(entry)
    yield from _out_of_order(cache)
    yield from _folder_problems(tree, cache, written, rules)


def _named(entry: Entry) -> bytes:
    return b"%b => %b" % (entry.soname, entry.path)


def _file_problem(tree: Tree, entry: Entry) -> bytes | None:
    try:
        fd = tree.open_file(entry.path)
    except OSError as error:
        return b"gone (%b): " % os.fsencode(error.strerror or "unreadable")
    try:
        facts = elf.read(fd)
        flags = native_flags(facts.elf_class, facts.machine, facts.e_flags)
    except InvalidElf as error:
        # What begins like an a.out file is listed too; no loader of today takes it.
        return b"no library (%b): " % os.fsencode(str(error))
    except ValueError as error:
        return b"of another class (%b): " % os.fsencode(str(error))
    except OSError as error:
        return b"unreadable (%b): " % os.fsencode(error.strerror or "no reason")
    finally:
        os.close(fd)
    if flags != entry.flags and {flags, entry.flags} not in _SAME:
        return b"of another class (the file is %#x, the entry says %#x): " % (flags, entry.flags)
    return None


def shadows(cache: Cache) -> dict[int, int]:
    """For each entry that no loader ever takes, the one that it takes instead.

    A search ends at the first plain entry of a name and flags: what stands behind it is never seen. Of one
    glibc-hwcaps name the first entry is taken. Legacy hwcap entries before it may be, by a loader up to 2.36.
    """
    signed = signed_char(cache.entries)
    plain: dict[tuple[bytes, int], int] = {}
    special: dict[tuple[bytes, int, bytes | None, int], int] = {}
    found = {}
    for index, entry in enumerate(cache.entries):
        name = libcmp_key(entry.soname, signed_char=signed), entry.flags
        if name in plain:
            found[index] = plain[name]
        elif not entry.hwcap:
            plain[name] = index
        else:
            key = (*name, entry.hwcaps, 0 if entry.hwcaps is not None else entry.hwcap)
            if special.setdefault(key, index) != index and entry.level == cache.entries[special[key]].level:
                found[index] = special[key]
    return found


def _out_of_order(cache: Cache) -> Iterator[bytes]:
    signed = signed_char(cache.entries)
    keys = [libcmp_key(entry.soname, signed_char=signed) for entry in cache.entries]
    index = misplaced(cache.entries, keys)
    if index is not None:
        yield b"out of order: " + _named(cache.entries[index])


def _folder_problems(tree: Tree, cache: Cache, written: int, rules: Rules) -> Iterator[bytes]:
    scanner = scan.Scanner(tree, rules, with_links=False)
    for folder in merge.folders(cache):
        scanner.add(folder)
    # Legacy sub-folders join while the others are scanned.
    entries = scanner.entries()
    for scanned in scanner.folders:
        try:
            changed = tree.status(scanned.path).st_mtime_ns
        except OSError:
            continue
        if changed > written:
            yield b"stale: %b is newer than the cache" % scanned.path
    # A folder may have several spellings, of which a cache holds the one that it was made by.
    identities = _Identities(tree)
    listed = {(entry.soname, entry.flags, identities.of_folder(entry)) for entry in cache.entries}
    for entry in entries:
        if (entry.soname, entry.flags, identities.of_folder(entry)) not in listed:
            yield b"not listed: " + _named(entry)


class _Identities:
    """Device and inode of the folders that libraries are in, each looked up once."""

    def __init__(self, tree: Tree) -> None:
        self.tree = tree
        self.known: dict[bytes, tuple[int, int] | None] = {}

    def of_folder(self, entry: Entry) -> tuple[int, int] | None:
        """None where the folder is gone."""
        end = b"/" + entry.soname
        # A soname may hold a slash.
        plain = entry.hwcaps is None and entry.path.endswith(end)
        folder = entry.path[: -len(end)] if plain else entry.path.rpartition(b"/")[0]
        if folder not in self.known:
            try:
                status = self.tree.status(folder or b"/")
                self.known[folder] = status.st_dev, status.st_ino
            except OSError:
                self.known[folder] = None
        return self.known[folder]
