# SPDX-License-Identifier: Apache-2.0
"""Writes loader caches from a description, so that odd and hostile ones are code.

A second, plain reading of glibc's format that shares nothing with `ldcache`: slow, checks nothing, and lets every
field that a header states be something else.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

GENERATOR = b"ldconfig (Debian GLIBC 2.36-9+deb12u14) stable release version 2.36"
X86_64 = 0x303
I386 = 3
PLAIN_HWCAPS = 1 << 62


@dataclass(frozen=True)
class Row:
    """One entry as the file has it: `hwcap` is the raw number."""

    soname: bytes
    path: bytes
    flags: int = X86_64
    hwcap: int = 0
    osversion: int = 0


def row(soname: str, folder: str = "/usr/lib", flags: int = X86_64, hwcap: int = 0, osversion: int = 0) -> Row:
    return Row(soname.encode(), f"{folder}/{soname}".encode(), flags, hwcap, osversion)


def hwcaps_row(soname: str, name: str, index: int, folder: str = "/usr/lib", level: int = 0) -> Row:
    """An entry of FOLDER/glibc-hwcaps/NAME; `index` is the name's place in the list of the file."""
    path = f"{folder}/glibc-hwcaps/{name}/{soname}"
    return Row(soname.encode(), path.encode(), X86_64, PLAIN_HWCAPS | level << 32 | index)


def sorted_table(strings: Sequence[bytes]) -> tuple[bytes, dict[bytes, int]]:
    """String table of glibc 2.33 and newer: backwards from the end of the alphabet, tails shared."""
    table = b""
    places: dict[bytes, int] = {}
    previous: bytes | None = None
    for string in sorted(set(strings), key=lambda text: bytes(reversed(text)), reverse=True):
        if previous is not None and previous[len(previous) - len(string) :] == string and len(string) <= len(previous):
            places[string] = places[previous] + len(previous) - len(string)
        else:
            places[string] = len(table)
            table += string + b"\0"
        previous = string
    return table, places


def row_table(rows: Sequence[Row]) -> tuple[bytes, list[tuple[int, int]]]:
    """String table up to glibc 2.32, and each row's two places."""
    table = b""
    places = []
    for entry in rows:
        places.append((len(table), len(table) + len(entry.soname) + 1))
        table += entry.soname + b"\0" + entry.path + b"\0"
    return table, places


def _table(rows: Sequence[Row], more: Sequence[bytes], sort: bool) -> tuple[bytes, list[tuple[int, int]], list[int]]:
    if not sort:
        return *row_table(rows), []
    table, of = sorted_table([*(entry.soname for entry in rows), *(entry.path for entry in rows), *more])
    return table, [(of[entry.soname], of[entry.path]) for entry in rows], [of[name] for name in more]


def _new_part(
    rows: Sequence[Row],
    base: int,
    strings: tuple[bytes, list[tuple[int, int]], list[int]],
    listed: int,
    generator: bytes | None,
    order: str,
    mark: int | None,
    count: int | None,
    length: int | None,
    extension: int | None,
    magic: int,
) -> bytes:
    table, places, names = strings
    skipped = 48 + 24 * len(rows)
    body = b"".join(
        struct.pack(order + "iIIIQ", entry.flags, key + skipped, value + skipped, entry.osversion, entry.hwcap)
        for entry, (key, value) in zip(rows, places, strict=True)
    )
    end = base + skipped + len(table)
    at = end
    while at % 4:
        at += 1
    tail = b""
    if generator is not None:
        tail = b"\0" * (at - end)
        if listed:
            # The combined form's bug: these count from this header, not from the file.
            offsets = [skipped + place for place in names[:listed]]
            tail += struct.pack(order + "2I", magic, 2)
            tail += struct.pack(order + "4I", 0, 0, at + 40 + 4 * listed, len(generator))
            tail += struct.pack(order + "4I", 1, 0, at + 40, 4 * listed)
            tail += b"".join(struct.pack(order + "I", offset) for offset in offsets) + generator
        else:
            tail += struct.pack(order + "2I4I", magic, 1, 0, 0, at + 24, len(generator)) + generator
    default_mark = {"<": 2, ">": 3}[order] if generator is not None else 0
    header = b"glibc-ld.so.cache" + b"1.1"
    header += struct.pack(order + "2I", len(rows) if count is None else count, len(table) if length is None else length)
    header += bytes([default_mark if mark is None else mark, 0, 0, 0])
    header += struct.pack(order + "I", (at if tail else 0) if extension is None else extension) + bytes(12)
    return header + body + table + tail


def new(
    rows: Sequence[Row],
    *,
    names: Sequence[bytes] = (),
    empty_names: Sequence[bytes] = (),
    generator: bytes | None = GENERATOR,
    order: str = "<",
    mark: int | None = None,
    count: int | None = None,
    length: int | None = None,
    extension: int | None = None,
    magic: int = 0xEAA42174,
    sort: bool | None = None,
) -> bytes:
    """The new form. `generator` None: as glibc up to 2.32 writes it, without extension directory.

    `names` is the glibc-hwcaps list, `empty_names` more names that stand in the string table alone.
    `order` is struct's sign; `mark`, `count`, `length`, `extension` and `magic` replace what is true, and `sort`
    the kind of string table.
    """
    strings = _table(rows, [*names, *empty_names], generator is not None if sort is None else sort)
    return _new_part(rows, 0, strings, len(names), generator, order, mark, count, length, extension, magic)


def old(rows: Sequence[Row], *, sort: bool = False, order: str = "<", count: int | None = None) -> bytes:
    """The old form. `sort`: with the string table of glibc 2.33 and newer."""
    table, places, _ = _table(rows, [], sort)
    return _old_part(rows, places, 0, order, len(rows) if count is None else count) + table


def _old_part(rows: Sequence[Row], places: list[tuple[int, int]], skipped: int, order: str, count: int) -> bytes:
    lines = [
        struct.pack(order + "iII", entry.flags, key + skipped, value + skipped)
        for entry, (key, value) in zip(rows, places, strict=True)
    ]
    return b"ld.so-1.7.0\0" + struct.pack(order + "I", count) + b"".join(lines)


def combined(
    rows: Sequence[Row],
    *,
    names: Sequence[bytes] = (),
    generator: bytes | None = GENERATOR,
    order: str = "<",
) -> bytes:
    """The combined form, the glibc-hwcaps list counted as ldconfig counts it."""
    strings = _table(rows, names, generator is not None)
    _, places, _ = strings
    kept = [
        (entry, place) for entry, place in zip(rows, places, strict=True) if not entry.hwcap or entry.hwcap >> 62 == 1
    ]
    if len(kept) % 2:
        kept.append(kept[-1])
    head = _old_part([entry for entry, _ in kept], [place for _, place in kept], 48 + 24 * len(rows), order, len(kept))
    return head + _new_part(rows, len(head), strings, len(names), generator, order, None, None, None, None, 0xEAA42174)
