# SPDX-License-Identifier: Apache-2.0
"""Putting the libraries of one folder into a loader cache.

Hot. The result is what a rerun of ldconfig with that folder named first would write, without reading any other folder
(held against glibc 2.31, 2.36 and 2.41). Libraries that came or went elsewhere since the cache was written stay
unseen. In the old form, where entries don't say whether they are of a glibc-hwcaps folder, those may stand behind ours
of the same soname instead of before them.

A cache that can't be kept whole is refused, never repaired: the caller leaves the file alone and lets an ldconfig do
it. That holds for one whose sonames have numbers beyond 2147483647 in an order that only ldconfig's own way of
inserting explains, see `order.libcmp_key`.
"""

from __future__ import annotations

import sys

from ldcache.cache import (
    ENTRY_NEW,
    ENTRY_OLD,
    HEADER_NEW,
    HEADER_OLD,
    HWCAP_EXTENSION,
    MAGIC_NEW,
    MAX_PATH,
    MAX_SONAME,
    Cache,
    Entry,
    InvalidLdCache,
    serialize,
)
from ldcache.order import TooManyNumbers, libcmp_keys, misplaced, signed_char, tie_key

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable


class UnmergeableLdCache(InvalidLdCache):
    """A cache that can be read but not kept whole: written back it would differ, or its order doesn't hold."""

    __slots__ = ()


class InvalidEntry(ValueError):
    """A new entry that no cache can hold."""

    __slots__ = ()


def merge(
    cache: Cache,
    folder: bytes,
    entries: Iterable[Entry],
    *,
    whole_folder: bool,
    win: bool,
    aliases: Iterable[bytes] = (),
    subfolders: Iterable[bytes] = (),
) -> Cache:
    """A cache with `entries`, libraries of `folder`, put before all that equal them; `cache` stays as it is.

    `folder` is an absolute folder as the container names it. `whole_folder`: the entries are all that the
    folder has, so every other entry of it goes. Otherwise they are some (ours, in the container's own
    library folder): only entries of the folder with the soname and flags of a new one go. `aliases` are
    other spellings of the same folder (same device and inode) that the cache may use, see `folders`.

    `entries` stand in ldconfig's order (reverse readdir order of each soname's first appearance, then the
    glibc-hwcaps folders); it only matters among sonames that libcmp calls equal. `subfolders` names the folder's
    glibc-hwcaps folders, empty ones too: ldconfig keeps the name of each. A cache without extension
    directory can't say what CPU an entry is for, so new glibc-hwcaps entries are left out of it.

    First doesn't mean chosen: a glibc-hwcaps entry (2.33+), a legacy-hwcap one (loaders up to 2.36) or a
    higher OS version (caches up to 2.35) of another folder still beats a new plain entry. `win` drops every
    old entry, of any folder, whose soname equals a new one as the loader sees it and whose flags are the
    same.

    Raises UnmergeableLdCache, or InvalidEntry for an entry that can't be written.
    """
    new = list(entries)
    if cache.generator is None:
        new = [entry for entry in new if entry.hwcaps is None]
    unused = (*cache.unused, *subfolders) if cache.sorted_strings else cache.unused
    for entry in new:
        _check_entry(entry)
    signed = signed_char((*cache.entries, *new))
    try:
        new_keys = libcmp_keys([entry.soname for entry in new], signed_char=signed)
        keys = libcmp_keys([entry.soname for entry in cache.entries], signed_char=signed)
    except TooManyNumbers as error:
        raise UnmergeableLdCache(str(error), 0) from error
    _check_whole(cache, keys)

    spellings = tuple([name.rstrip(b"/") for name in (folder, *aliases)])
    dropped = _of_whole_folder(cache, spellings) if whole_folder else _replaced(cache, spellings, new)
    if win:
        dropped |= _beaten(cache, keys, {(key, e.flags) for key, e in zip(new_keys, new, strict=True)})
    old = cache.entries
    if dropped:
        old = [entry for index, entry in enumerate(old) if index not in dropped]
        keys = [key for index, key in enumerate(keys) if index not in dropped]
    return cache.replaced(_inserted(old, keys, new, new_keys), unused)


def folders(cache: Cache) -> list[bytes]:
    """The folders that the cache's libraries are of, each once, in the order of their first entry.

    A library in a folder's glibc-hwcaps or legacy hwcap sub-folder is of that folder.
    """
    return list(dict.fromkeys([_folder_of(entry) for entry in cache.entries]))


def _check_whole(cache: Cache, keys: list[bytes]) -> None:
    """Refuse a cache whose order doesn't hold, or that would come out changed where we change nothing."""
    if cache.byteorder != sys.byteorder:
        # The loader ignores such a file: our libraries in it would be lost without a word.
        raise UnmergeableLdCache(f"{cache.byteorder}-endian, unlike this machine", 0)
    wrong = misplaced(cache.entries, keys)
    if wrong is not None:
        what = f"entry {wrong}, {cache.entries[wrong].soname!r}, is out of order"
        raise UnmergeableLdCache(what, _entry_offset(cache, wrong))
    if cache.source is None:
        return
    try:
        written = serialize(cache)
    except ValueError as error:
        raise UnmergeableLdCache(str(error), 0) from error
    if written != cache.source:
        what = "not laid out as a known ldconfig does it"
        raise UnmergeableLdCache(what, _first_difference(written, cache.source))


def _entry_offset(cache: Cache, index: int) -> int:
    """Byte of the file at which an entry stands."""
    if cache.form == "old":
        return HEADER_OLD + ENTRY_OLD * index
    base = cache.source.find(MAGIC_NEW, HEADER_OLD) if cache.source and cache.form == "combined" else 0
    return base + HEADER_NEW + ENTRY_NEW * index


def _first_difference(one: bytes, other: bytes) -> int:
    same, differ = 0, min(len(one), len(other)) + 1
    while differ - same > 1:
        middle = (same + differ) // 2
        if one[same:middle] == other[same:middle]:
            same = middle
        else:
            differ = middle
    return same


def _check_entry(entry: Entry) -> None:
    if not entry.path or b"\0" in entry.path or len(entry.path) > MAX_PATH:
        raise InvalidEntry(f"{entry.path!r} is no path for a loader cache")
    for name in (entry.soname, entry.hwcaps or b""):
        if b"\0" in name or len(name) > MAX_SONAME:
            raise InvalidEntry(f"{entry.path!r}: {name!r} is no name for a loader cache")
    if not -(1 << 31) <= entry.flags < 1 << 31 or not 0 <= entry.osversion < 1 << 32:
        raise InvalidEntry(f"{entry.path!r}: flags {entry.flags:#x}, OS version {entry.osversion:#x}: beyond 32 bits")
    # A new entry is of a glibc-hwcaps folder with an ISA level below 32, or plain, or has legacy bits up to 2.36.
    if entry.hwcaps is None:
        sound = 0 <= entry.hwcap < 1 << 64 and not entry.hwcap & HWCAP_EXTENSION
    else:
        named = entry.hwcaps != b"" and not set(b"/:") & set(entry.hwcaps)
        sound = named and entry.hwcap & ~(0x1F << 32) == HWCAP_EXTENSION
    if not sound:
        raise InvalidEntry(f"{entry.path!r}: hwcap {entry.hwcap:#x} of glibc-hwcaps folder {entry.hwcaps!r}")


def _folder_of(entry: Entry) -> bytes:
    """The folder that ldconfig scanned for this entry, without glibc-hwcaps or legacy hwcap sub-folders."""
    if entry.hwcaps is not None:
        return entry.path.rpartition(b"/glibc-hwcaps/")[0]
    if entry.soname and entry.path.endswith(b"/" + entry.soname):
        # A soname may hold a slash.
        folder = entry.path[: -len(entry.soname) - 1]
    else:
        folder = entry.path.rpartition(b"/")[0]
    # Each legacy bit is one trailing component, as in /lib/haswell/avx512_1.
    for _ in range(entry.hwcap.bit_count()):
        folder = folder.rpartition(b"/")[0]
    return folder


def _of_whole_folder(cache: Cache, spellings: tuple[bytes, ...]) -> set[int]:
    """Indexes of all entries of a folder."""
    prefixes = tuple([folder + b"/" for folder in spellings])
    return {
        index
        for index, entry in enumerate(cache.entries)
        if entry.path.startswith(prefixes) and _folder_of(entry) in spellings
    }


def _replaced(cache: Cache, spellings: tuple[bytes, ...], new: list[Entry]) -> set[int]:
    """Indexes of the folder's own entries that new ones stand for: same soname, flags and sub-folder."""
    wanted = {(entry.soname, entry.flags, entry.hwcaps) for entry in new}
    sonames = {entry.soname for entry in new}
    return {
        index
        for index, entry in enumerate(cache.entries)
        if entry.soname in sonames
        and not (entry.hwcap and entry.hwcaps is None)
        and (entry.soname, entry.flags, entry.hwcaps) in wanted
        and _folder_of(entry) in spellings
    }


def _beaten(cache: Cache, keys: list[bytes], new: set[tuple[bytes, int]]) -> set[int]:
    """Indexes of all entries that the loader would take for one of `new` (libcmp_key, flags)."""
    wanted = {key for key, _ in new}
    return {index for index, key in enumerate(keys) if key in wanted and (key, cache.entries[index].flags) in new}


def _inserted(old: list[Entry], keys: list[bytes], new: list[Entry], new_keys: list[bytes]) -> list[Entry]:
    """`old`, whose libcmp_keys are `keys`, with each of `new` put before the first entry that it equals or
    precedes.

    By bisection: a hostile cache may hold thousands of equal sonames.
    """
    ties = [tie_key(entry) for entry in new]
    order = sorted(range(len(new)), key=ties.__getitem__)
    # Descending, yet stable: `reverse` keeps equals in their order.
    order.sort(key=new_keys.__getitem__, reverse=True)
    merged = []
    done = 0
    for number in order:
        place = _place(old, keys, new_keys[number], ties[number])
        merged += old[done:place]
        merged.append(new[number])
        done = place
    return merged + old[done:]


def _place(old: list[Entry], keys: list[bytes], key: bytes, tie: tuple[int, bool, bytes, int, int, int]) -> int:
    low, high = 0, len(old)
    while low < high:
        middle = (low + high) // 2
        if keys[middle] > key or (keys[middle] == key and tie_key(old[middle]) < tie):
            low = middle + 1
        else:
            high = middle
    return low
