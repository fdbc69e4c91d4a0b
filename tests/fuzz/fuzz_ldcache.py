# SPDX-License-Identifier: Apache-2.0
"""Loader caches: what is read is written, read again, merged and printed, or refused."""

from __future__ import annotations


def seeds() -> list[bytes]:
    """One cache of each form."""
    from tests import cachewriter as write

    rows = [
        write.row("libz.so.10"),
        write.hwcaps_row("liba.so.2", "x86-64-v2", 0, level=1),
        write.hwcaps_row("liba.so.2", "x86-64-v3", 1),
        write.row("liba.so.2"),
        write.row("liba.so.01", "/opt", write.I386),
    ]
    names = [b"x86-64-v2", b"x86-64-v3"]
    plain = [row for row in rows if not row.hwcap]
    legacy = [write.row("libz.so.1", "/lib/haswell", hwcap=1 << 50), write.row("libz.so.1", osversion=0x030200)]
    return [
        write.new(rows, names=names, empty_names=[b"zen"]),
        write.new(rows, names=names, order=">"),
        write.new(legacy),
        write.new(plain, generator=None),
        write.new([]),
        write.combined(rows, names=names),
        write.combined(plain, generator=None),
        write.old(plain),
        write.old(plain, sort=True),
    ]


def TestOneInput(data: bytes) -> None:
    """One round; what it raises is a finding."""
    from ldcache import cache, check, merge, text

    try:
        known = cache.parse(data)
    except cache.InvalidLdCache:
        return
    b"".join(text.lines(known, data, b"cache", (2, 41)))
    check.shadows(known)
    ours = [cache.Entry(b"liba.so.2", b"/usr/lib/liba.so.2", 0x303), cache.Entry(b"libours.so", b"/opt/libours.so", 3)]
    for whole in (False, True):
        try:
            merged = merge.merge(known, b"/usr/lib", ours, whole_folder=whole, win=not whole)
        except cache.InvalidLdCache:
            continue
        written = cache.serialize(merged)
        # What can be merged can be read, and merging once more changes nothing.
        again = cache.parse(written)
        assert again.entries == merged.entries
        assert cache.serialize(again) == written
