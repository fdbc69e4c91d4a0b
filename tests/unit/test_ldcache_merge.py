# SPDX-License-Identifier: Apache-2.0
"""Merging a folder into a cache, against reruns of the real ldconfig and by hand."""

from __future__ import annotations

import os
import random
import sys
import time
from pathlib import Path

import pytest

from ldcache import cache, merge, order
from ldcache.cache import Cache, Entry, InvalidLdCache
from ldcache.merge import InvalidEntry, UnmergeableLdCache
from tests import cachewriter as write
from tests import stubs

LIB = "/usr/lib/x86_64-linux-gnu"
LEVEL = cache.HWCAP_EXTENSION


def entry(soname: str, folder: str = LIB, flags: int = 0x303) -> Entry:
    return Entry(soname.encode(), f"{folder}/{soname}".encode(), flags)


def parsed(rows: list[write.Row], names: list[bytes] | None = None) -> Cache:
    return cache.parse(write.new(rows, names=names or []))


def add(known: Cache, folder: str, new: list[Entry], *, whole: bool = False, win: bool = False) -> list[bytes]:
    """The paths of the merged cache, in order."""
    merged = merge.merge(known, folder.encode(), new, whole_folder=whole, win=win)
    again = cache.parse(cache.serialize(merged))
    assert again.entries == merged.entries
    assert order.misplaced(again.entries, [order.libcmp_key(e.soname) for e in again.entries]) is None
    return [e.path for e in merged.entries]


# Reruns of ldconfig --------------------------------------------------------------------------------------

SONAMES = [
    "liba.so.1",
    "liba.so.01",
    "liba.so.2",
    "libb.so.10",
    "libb.so.9",
    "libcuda.so.1",
    "libnvidia-ml.so.1",
    "libx_y.so",
    "libx.so.1",
    "libzz.so",
    "lib\u00e9.so.1",
    "libfoo-2.31.so",
    "libts.so.20240131235959",
]


def fill(root: Path, random_: random.Random, folder: str, hwcaps: bool, bits32: bool) -> None:
    """A folder of stubs, with 32-bit ones and glibc-hwcaps sub-folders, an empty one too."""
    for soname in random_.sample(SONAMES, random_.randrange(2, len(SONAMES))):
        stubs.add(root, f"{folder}/{soname}", soname, 32 if bits32 and random_.random() < 0.2 else 64)
    for name in random_.sample(["x86-64-v2", "x86-64-v3", "other"], random_.randrange(3)) if hwcaps else []:
        for soname in random_.sample(SONAMES, random_.randrange(4)):
            stubs.add(root, f"{folder}/glibc-hwcaps/{name}/{soname}.real", soname)
        (root / folder.lstrip("/") / "glibc-hwcaps" / name).mkdir(parents=True, exist_ok=True)


def subfolders(root: Path, folder: str) -> list[bytes]:
    hwcaps = root / folder.lstrip("/") / "glibc-hwcaps"
    return [os.fsencode(name) for name in os.listdir(hwcaps)] if hwcaps.is_dir() else []


def rerun(root: Path, random_: random.Random, form: str) -> None:
    """A new folder, an alias of a listed one and a listed one: each merge equals ldconfig's own rerun."""
    # Up to 2.36 an i386 library's flags say whether ldconfig knew what it needs; a stub needs nothing.
    bits32 = stubs.version() > (2, 36) and stubs.can_build_32_bits()
    for folder in ("/opt/a", "/opt/b", "/opt/driver"):
        # The old form doesn't tell which entries are of glibc-hwcaps folders, so their order can't be kept.
        fill(root, random_, folder, form != "old", bits32)
    (root / "opt/alias").symlink_to("a")

    def ldconfig(*folders: str) -> bytes:
        return stubs.ldconfig(root, list(folders), "-c", form)

    def merged(folder: str, aliases: tuple[bytes, ...] = ()) -> bytes:
        new = stubs.entries(root, folder)
        result = merge.merge(
            cache.parse(ldconfig("/opt/a", "/opt/b")),
            folder.encode(),
            new,
            whole_folder=True,
            win=False,
            aliases=aliases,
            subfolders=subfolders(root, folder),
        )
        return cache.serialize(result)

    assert merged("/opt/driver") == ldconfig("/opt/driver", "/opt/a", "/opt/b")
    assert merged("/opt/a") == ldconfig("/opt/a", "/opt/b")
    assert merged("/opt/b") == ldconfig("/opt/b", "/opt/a")
    assert merged("/opt/alias", (b"/opt/a",)) == ldconfig("/opt/alias", "/opt/a", "/opt/b")


@stubs.needs_ldconfig
@stubs.needs_gcc
@pytest.mark.parametrize("form", ["new", "compat", "old"])
@pytest.mark.parametrize("seed", range(4))
def test_equals_a_rerun(tmp_path: Path, form: str, seed: int) -> None:
    rerun(tmp_path, random.Random(f"{form} {seed}"), form)


@pytest.mark.long
@stubs.needs_ldconfig
@stubs.needs_gcc
@pytest.mark.parametrize("form", ["new", "compat", "old"])
@pytest.mark.parametrize("seed", range(100, 160))
def test_equals_many_reruns(tmp_path: Path, form: str, seed: int) -> None:
    rerun(tmp_path, random.Random(f"{form} {seed}"), form)


@stubs.needs_ldconfig
@stubs.needs_gcc
@pytest.mark.parametrize("form", ["new", "compat", "old"])
def test_our_files_in_a_listed_folder_equal_a_rerun(tmp_path: Path, form: str) -> None:
    """Everything else of that folder stays, libc with it."""
    for folder in ("/opt/lib", "/opt/b"):
        for soname in ("libc.so.6", "libm.so.6", "libz.so.1", "libnvidia-old.so.1"):
            stubs.add(tmp_path, f"{folder}/{soname}", soname)
    stubs.add(tmp_path, "/opt/b/libcuda.so.1", "libcuda.so.1")
    stubs.add(tmp_path, "/opt/lib/libcuda.so.550", "libcuda.so.1")
    before = cache.parse(stubs.ldconfig(tmp_path, ["/opt/b", "/opt/lib"], "-c", form))
    ours = ["libcuda.so.1", "libnvidia-ml.so.1", "libnvidia-ptxjitcompiler.so.1"]
    for soname in ours:
        stubs.add(tmp_path, f"/opt/lib/{soname}", soname)
    (tmp_path / "opt/lib/libnvidia-ml.so").symlink_to("libnvidia-ml.so.1")
    new = [entry(soname, "/opt/lib") for soname in [*ours, "libnvidia-ml.so"]]
    result = merge.merge(before, b"/opt/lib", new, whole_folder=False, win=False)
    # ldconfig puts the folder named first in front; the merge puts ours there and leaves the others.
    after = cache.parse(stubs.ldconfig(tmp_path, ["/opt/b", "/opt/lib"], "-c", form))
    assert {(e.soname, e.path, e.flags) for e in result.entries} == {(e.soname, e.path, e.flags) for e in after.entries}
    assert len(result.entries) == len(after.entries)
    paths = [e.path for e in result.entries]
    assert paths.index(b"/opt/lib/libcuda.so.1") < paths.index(b"/opt/b/libcuda.so.1")
    assert paths.index(b"/opt/b/libz.so.1") < paths.index(b"/opt/lib/libz.so.1")


# By hand --------------------------------------------------------------------------------------------------

IMAGE = [
    write.row("libz.so.1", LIB),
    write.hwcaps_row("libcuda.so.1", "x86-64-v3", 0, LIB, level=2),
    write.row("libcuda.so.1", "/usr/local/cuda/compat"),
    write.row("libcuda.so.1", LIB),
    write.row("libcuda.so.1", "/usr/lib/i386-linux-gnu", 3),
    write.row("libc.so.6", LIB),
]
V3 = [b"x86-64-v3"]


def test_some_of_a_folder() -> None:
    assert add(parsed(IMAGE, names=V3), LIB, [entry("libcuda.so.1"), entry("libnvidia-ml.so.1")]) == [
        b"/usr/lib/x86_64-linux-gnu/libz.so.1",
        b"/usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1",
        b"/usr/lib/x86_64-linux-gnu/glibc-hwcaps/x86-64-v3/libcuda.so.1",
        b"/usr/lib/x86_64-linux-gnu/libcuda.so.1",
        b"/usr/local/cuda/compat/libcuda.so.1",
        b"/usr/lib/i386-linux-gnu/libcuda.so.1",
        b"/usr/lib/x86_64-linux-gnu/libc.so.6",
    ]


def test_win_drops_all_that_the_loader_could_take_instead() -> None:
    rows = [*IMAGE[:1], *IMAGE[1:3], write.row("libcuda.so.01", "/opt"), *IMAGE[3:]]
    assert add(parsed(rows, names=V3), LIB, [entry("libcuda.so.1")], win=True) == [
        b"/usr/lib/x86_64-linux-gnu/libz.so.1",
        b"/usr/lib/x86_64-linux-gnu/libcuda.so.1",
        b"/usr/lib/i386-linux-gnu/libcuda.so.1",
        b"/usr/lib/x86_64-linux-gnu/libc.so.6",
    ]


def test_a_whole_folder_replaces_all_of_it() -> None:
    paths = add(parsed(IMAGE, names=V3), LIB + "/", [entry("libcuda.so.1")], whole=True)
    assert paths == [
        b"/usr/lib/x86_64-linux-gnu/libcuda.so.1",
        b"/usr/local/cuda/compat/libcuda.so.1",
        b"/usr/lib/i386-linux-gnu/libcuda.so.1",
    ]


def test_folders_that_only_begin_or_end_alike_are_others() -> None:
    rows = [
        write.Row(b"sub/liba.so.1", b"/lib/sub/liba.so.1"),
        write.row("liba.so.4", "/lib/sub"),
        write.row("liba.so.3", "/lib64"),
        write.row("liba.so.2", "/usr/lib"),
        write.row("liba.so.1", "/lib"),
    ]
    # The first one's soname holds a slash: its folder is /lib.
    assert add(parsed(rows), "/lib", [], whole=True) == [
        b"/lib/sub/liba.so.4",
        b"/lib64/liba.so.3",
        b"/usr/lib/liba.so.2",
    ]


def test_legacy_sub_folders_are_of_their_folder() -> None:
    rows = [
        write.row("liba.so.1", "/lib/haswell/xeon_phi", hwcap=3 << 50),
        write.row("liba.so.1", "/lib/x/tls", hwcap=1 << 63),
        write.row("liba.so.1", "/lib/tls", hwcap=1 << 50),
        write.row("liba.so.1", "/lib/tls"),
    ]
    assert add(parsed(rows), "/lib", [entry("liba.so.1", "/lib")], whole=True) == [
        b"/lib/x/tls/liba.so.1",
        b"/lib/liba.so.1",
        b"/lib/tls/liba.so.1",
    ]
    # Part of the folder: a legacy entry is another file, and loaders up to 2.36 prefer it unless we win.
    assert add(parsed(rows), "/lib", [entry("liba.so.1", "/lib")])[-2:] == [b"/lib/liba.so.1", b"/lib/tls/liba.so.1"]
    assert add(parsed(rows), "/lib", [entry("liba.so.1", "/lib")], win=True) == [b"/lib/liba.so.1"]


def test_a_higher_os_version_stays_in_front_unless_we_win() -> None:
    rows = [write.row("libz.so.1", "/lib", osversion=0x30200), write.row("libz.so.1", "/usr/lib")]
    known = cache.parse(write.new(rows, generator=None))
    assert add(known, LIB, [entry("libz.so.1")])[:2] == [b"/lib/libz.so.1", f"{LIB}/libz.so.1".encode()]
    assert add(known, LIB, [entry("libz.so.1")], win=True) == [f"{LIB}/libz.so.1".encode()]


def test_twice_changes_nothing_more() -> None:
    new = [entry("libcuda.so.1"), entry("libnvidia-ml.so.1"), entry("libcuda.so")]
    for win in (False, True):
        for data in (write.new(IMAGE, names=V3), write.combined(IMAGE, names=V3)):
            once = cache.serialize(merge.merge(cache.parse(data), LIB.encode(), new, whole_folder=False, win=win))
            known = cache.parse(once)
            assert once == cache.serialize(merge.merge(known, LIB.encode(), new, whole_folder=False, win=win))


def test_one_merge_after_the_other() -> None:
    known = cache.parse(write.combined(IMAGE, names=V3))
    first = merge.merge(known, LIB.encode(), [entry("libcuda.so.1")], whole_folder=False, win=False)
    folder = "/usr/lib/i386-linux-gnu"
    second = merge.merge(first, folder.encode(), [entry("libcuda.so.1", folder, 3)], whole_folder=False, win=False)
    assert cache.serialize(second) == cache.serialize(known.replaced(second.entries, ()))
    assert len(second.entries) == len(IMAGE)


def test_nothing_new_gives_the_same_bytes() -> None:
    for data in (write.new(IMAGE, names=V3, empty_names=[b"zen"]), write.old(IMAGE[-2:]), write.new([])):
        assert cache.serialize(merge.merge(cache.parse(data), b"/x", [], whole_folder=True, win=True)) == data


@pytest.mark.parametrize("form", ["new", "2.32", "combined", "combined, 2.31", "old", "old, sorted"])
def test_entries_of_other_architectures_are_kept(form: str) -> None:
    """Each in its place, with its flags; of one soname only that of our flags is replaced."""
    flags = [0x1003, 0xA03, 0x903, 0x803, 0x503, 0x403, 0x303, 3, 1]
    rows = [write.row(soname, LIB, each) for soname in ("libz.so.1", "libcuda.so.1") for each in flags]
    data = {
        "new": write.new(rows),
        "2.32": write.new(rows, generator=None),
        "combined": write.combined(rows),
        "combined, 2.31": write.combined(rows, generator=None),
        "old": write.old(rows),
        "old, sorted": write.old(rows, sort=True),
    }[form]
    known = cache.parse(data)
    for win in (False, True):
        merged = merge.merge(known, LIB.encode(), [entry("libcuda.so.1")], whole_folder=False, win=win)
        assert cache.serialize(merged) == data
        more = merge.merge(known, b"/d", [entry("libcuda.so.1", "/d", 0xA03)], whole_folder=True, win=win)
        assert [e.flags for e in more.entries] == [*flags, *flags[:1], 0xA03, *flags[2 if win else 1 :]]
        assert cache.parse(cache.serialize(more)).form == known.form


def test_a_cache_of_the_other_byte_order_is_read_and_written_but_not_merged() -> None:
    """This machine's loader ignores it: our libraries in it would be lost."""
    other = ">" if sys.byteorder == "little" else "<"
    for data in (
        write.new(IMAGE, names=V3, order=other),
        write.combined(IMAGE, names=V3, order=other),
        write.old(IMAGE[2:], order=other),
    ):
        known = cache.parse(data)
        assert cache.serialize(known) == data
        assert cache.serialize(known.replaced(known.entries[:2], known.unused)) != data
        with pytest.raises(UnmergeableLdCache, match="endian"):
            merge.merge(known, b"/x", [], whole_folder=True, win=False)


def test_into_an_empty_cache() -> None:
    new = [entry("libcuda.so"), entry("libcuda.so.1"), entry("libcuda.so.1", "/usr/lib/i386-linux-gnu", 3)]
    assert add(cache.empty(), LIB, new, win=True) == [new[1].path, new[2].path, new[0].path]


def test_new_glibc_hwcaps_entries() -> None:
    new = [
        Entry(b"libcuda.so.1", b"/d/glibc-hwcaps/x86-64-v2/libcuda.so.1", 0x303, LEVEL | 1 << 32, b"x86-64-v2"),
        entry("libcuda.so.1", "/d"),
    ]
    merged = merge.merge(
        parsed(IMAGE, names=V3), b"/d", new, whole_folder=True, win=False, subfolders=[b"x86-64-v2", b"empty"]
    )
    again = cache.parse(cache.serialize(merged))
    assert [(e.hwcaps, e.level) for e in again.entries if e.hwcaps] == [(b"x86-64-v2", 1), (b"x86-64-v3", 2)]
    assert again.unused == (b"empty",)
    # A cache of 2.32 has no place for a CPU's name.
    plain = cache.parse(write.new(IMAGE[2:], generator=None))
    assert add(plain, "/d", new)[:2] == [b"/d/libcuda.so.1", b"/usr/local/cuda/compat/libcuda.so.1"]


def test_aliases_are_the_same_folder() -> None:
    known = parsed([write.row("libcuda.so.1", "/lib/x86_64-linux-gnu"), write.row("libc.so.6", "/lib")])
    merged = merge.merge(
        known,
        LIB.encode(),
        [entry("libcuda.so.1")],
        whole_folder=False,
        win=False,
        aliases=[b"/lib/x86_64-linux-gnu/"],
    )
    assert [e.path for e in merged.entries] == [f"{LIB}/libcuda.so.1".encode(), b"/lib/libc.so.6"]


def test_folders() -> None:
    rows = [*IMAGE, write.row("liba.so.1", "/lib/tls/i686", hwcap=(1 << 63) + (1 << 49))]
    assert merge.folders(parsed(rows, names=V3)) == [
        LIB.encode(),
        b"/usr/local/cuda/compat",
        b"/usr/lib/i386-linux-gnu",
        b"/lib",
    ]


def test_the_order_of_signed_and_unsigned_bytes() -> None:
    """On AArch64 a byte above 127 sorts behind the end of a name, on x86 before it."""
    for flags, expected in ((0x303, [b"/d/libx", b"/lib/libx\xff"]), (0xA03, [b"/lib/libx\xff", b"/d/libx"])):
        known = parsed([write.Row(b"libx\xff", b"/lib/libx\xff", flags)])
        merged = merge.merge(known, b"/d", [Entry(b"libx", b"/d/libx", flags)], whole_folder=True, win=False)
        assert [e.path for e in merged.entries] == expected


# Refusals ---------------------------------------------------------------------------------------------------


def patched(data: bytes, at: int, byte: int) -> bytes:
    return data[:at] + bytes([byte]) + data[at + 1 :]


GOOD = write.new(IMAGE, names=V3)
DIRECTORY = int.from_bytes(GOOD[32:36], "little")

UNMERGEABLE = {
    "out of order": write.new(IMAGE[::-1], names=V3),
    "flags out of order": write.new([IMAGE[4], IMAGE[3]]),
    "hwcaps behind plain": write.new([IMAGE[3], IMAGE[1]], names=V3),
    "out of order, old": write.old(IMAGE[:3:-1]),
    "out of order, combined": write.combined(IMAGE[::-1], names=V3),
    "reserved bytes of the header": patched(GOOD, 36, 1),
    "reserved bytes behind the byte order": patched(GOOD, 29, 1),
    "unknown extension tag, no generator": patched(GOOD, DIRECTORY + 8, 7),
    "flags of an extension section": patched(GOOD, DIRECTORY + 12, 1),
    "a listed name that no entry uses": write.new(IMAGE[2:], names=V3),
    "strings neither sorted nor shared": write.new(IMAGE[2:], sort=False),
    "sorted strings without extension": write.new(IMAGE[2:], generator=None, sort=True),
    "bytes behind the generator": GOOD + b"\0",
    "old part unlike the new one": patched(write.combined(IMAGE[2:]), 16, 1),
    "the other byte order": write.new(IMAGE, names=V3, order=">"),
}


@pytest.mark.parametrize("name", UNMERGEABLE)
def test_what_cannot_be_kept_whole_is_refused(name: str) -> None:
    known = cache.parse(UNMERGEABLE[name])
    with pytest.raises(UnmergeableLdCache, match=r"\(at byte \d+\)$") as caught:
        merge.merge(known, LIB.encode(), [entry("libcuda.so.1")], whole_folder=False, win=False)
    assert 0 <= caught.value.offset <= len(UNMERGEABLE[name])
    assert isinstance(caught.value, InvalidLdCache)


def test_a_refusal_names_the_place() -> None:
    def offset(data: bytes) -> int:
        with pytest.raises(UnmergeableLdCache) as caught:
            merge.merge(cache.parse(data), b"/x", [], whole_folder=True, win=False)
        return caught.value.offset

    assert offset(UNMERGEABLE["reserved bytes of the header"]) == 36
    assert offset(UNMERGEABLE["bytes behind the generator"]) == len(GOOD)
    assert offset(UNMERGEABLE["flags out of order"]) == 48 + 24
    assert offset(UNMERGEABLE["out of order, old"]) == 16 + 12
    assert offset(UNMERGEABLE["out of order, combined"]) == 16 + 12 * 6 + 48 + 24


def test_runs_of_digits_beyond_32_bits() -> None:
    """libcmp wraps them. A cache that is in order all the same is merged; where it isn't, it is refused."""
    # 2^32 + 5 wraps to 5, and 3000000000 to a negative number.
    ordered = [write.row(f"liba.so.{number}") for number in (7, 4294967301, 4, 3000000000)]
    assert len(add(parsed(ordered), "/d", [entry("liba.so.6", "/d")])) == 5
    with pytest.raises(UnmergeableLdCache):
        add(parsed(ordered[::-1]), "/d", [])


@pytest.mark.parametrize(
    "bad",
    [
        Entry(b"a\0b", b"/d/a", 0x303),
        Entry(b"a", b"/d/a\0", 0x303),
        Entry(b"a", b"", 0x303),
        Entry(b"a" * 256, b"/d/a", 0x303),
        Entry(b"a", b"/" * 4096, 0x303),
        Entry(b"a", b"/d/a", 1 << 31),
        Entry(b"a", b"/d/a", 0x303, hwcap=1 << 64),
        Entry(b"a", b"/d/a", 0x303, hwcap=LEVEL),
        Entry(b"a", b"/d/a", 0x303, hwcaps=b"x86-64-v3"),
        Entry(b"a", b"/d/a", 0x303, hwcap=LEVEL | 32 << 32, hwcaps=b"x86-64-v3"),
        Entry(b"a", b"/d/a", 0x303, hwcap=LEVEL | 1, hwcaps=b"x86-64-v3"),
        Entry(b"a", b"/d/a", 0x303, hwcap=LEVEL, hwcaps=b"a/b"),
        Entry(b"a", b"/d/a", 0x303, hwcap=LEVEL, hwcaps=b""),
        Entry(b"a", b"/d/a", 0x303, osversion=1 << 32),
    ],
)
def test_invalid_entries(bad: Entry) -> None:
    with pytest.raises(InvalidEntry):
        merge.merge(parsed(IMAGE, names=V3), b"/d", [bad], whole_folder=True, win=False)


def test_the_given_cache_is_left_as_it_is() -> None:
    known = parsed(IMAGE, names=V3)
    before = list(known.entries)
    merge.merge(known, LIB.encode(), [entry("libcuda.so.1")], whole_folder=True, win=True)
    assert known.entries == before
    assert cache.serialize(known) == GOOD


def test_thousands_of_equal_sonames_take_no_quadratic_time() -> None:
    """By comparing one by one this would take minutes."""
    rows = [write.Row(b"liba.so.1", b"/%05d/liba.so.1" % number) for number in range(30_000)]
    new = [Entry(b"liba.so.1", b"/d/%d" % number, 0x303) for number in range(2000)]
    strings = b"".join(b"%b\0%b\0" % (row.soname, row.path) for row in rows)
    known = Cache([Entry(row.soname, row.path, 0x303) for row in rows], sorted_strings=False)
    assert strings in cache.serialize(known)
    start = time.process_time()
    merged = merge.merge(known, b"/d", new, whole_folder=False, win=False)
    assert time.process_time() - start < 5
    assert [e.path for e in merged.entries[:2000]] == [e.path for e in new]
    assert len(merged.entries) == 32_000


def test_mutated_caches() -> None:
    """Whatever parse accepts is merged, or refused as a cache; nothing else happens."""
    random_ = random.Random("merge")
    new = [entry("libcuda.so.1"), entry("liba.so", "/d")]
    merged = 0
    for number in range(4000):
        data = bytearray((GOOD, write.combined(IMAGE, names=V3), write.old(IMAGE[2:]))[number % 3])
        for _ in range(random_.randrange(1, 3)):
            data[random_.randrange(len(data))] = random_.choice((0, 1, 0x2F, 0x80, 0xFF, random_.randrange(256)))
        try:
            known = cache.parse(bytes(data))
            result = merge.merge(known, LIB.encode(), new, whole_folder=False, win=number % 2 == 0)
        except InvalidLdCache:
            continue
        again = cache.parse(cache.serialize(result))
        assert again.entries == result.entries
        merged += 1
    assert merged > 100
