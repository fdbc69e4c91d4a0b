# SPDX-License-Identifier: Apache-2.0
"""Reading and writing loader caches of every form, odd and hostile ones, and the order of their entries."""

from __future__ import annotations

import os
import random
import struct
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ldcache import cache, order
from ldcache.cache import Cache, Entry, InvalidLdCache
from tests import cachewriter as write
from tests import stubs

MACHINE_CACHE = Path("/etc/ld.so.cache")

NAMES = [b"x86-64-v2", b"x86-64-v3"]
PLAIN = [
    write.row("libz.so.1"),
    write.row("libnvidia-ml.so.1", "/usr/lib/x86_64-linux-gnu"),
    write.row("libcuda.so.1", "/usr/lib/x86_64-linux-gnu"),
    write.row("libcuda.so.1", "/usr/lib/i386-linux-gnu", write.I386),
    write.row("libcuda.so", "/usr/lib/x86_64-linux-gnu"),
]
WITH_HWCAPS = [
    write.row("libz.so.1"),
    write.hwcaps_row("liba.so.2", "x86-64-v2", 0, level=1),
    write.hwcaps_row("liba.so.2", "x86-64-v3", 1, level=31),
    write.row("liba.so.2"),
]
LEGACY = [
    write.row("libz.so.1", "/lib/haswell/xeon_phi", hwcap=(1 << 50) + (1 << 51)),
    write.row("libz.so.1", "/lib/tls", hwcap=1 << 63, osversion=0x03020000),
    write.row("libz.so.1", "/lib", osversion=0x03020000),
    write.row("libz.so.1", "/lib"),
]

FORMS = {
    "new": write.new(PLAIN),
    "new, hwcaps": write.new(WITH_HWCAPS, names=NAMES),
    "new, unused names": write.new(WITH_HWCAPS, names=NAMES, empty_names=[b"avx", b"zen"]),
    "new, legacy": write.new(LEGACY),
    "new, big-endian": write.new(WITH_HWCAPS, names=NAMES, order=">"),
    "new, 2.32": write.new(PLAIN, generator=None),
    "new, 2.32, big-endian": write.new(PLAIN, generator=None, order=">"),
    "new, 2.32, marked": write.new(LEGACY, generator=None, mark=2),
    "new, empty": write.new([]),
    "combined": write.combined(PLAIN),
    "combined, hwcaps": write.combined(WITH_HWCAPS, names=NAMES),
    "combined, legacy, 2.31": write.combined(LEGACY, generator=None),
    "combined, big-endian": write.combined(WITH_HWCAPS, names=NAMES, order=">"),
    "combined, empty": write.combined([]),
    "old": write.old(PLAIN),
    "old, sorted strings": write.old(PLAIN, sort=True),
    "old, big-endian": write.old(PLAIN, order=">"),
    "old, empty": write.old([]),
}


@pytest.mark.parametrize("name", FORMS)
def test_round_trip(name: str) -> None:
    assert cache.serialize(cache.parse(FORMS[name])) == FORMS[name]


@pytest.mark.parametrize("name", FORMS)
def test_form(name: str) -> None:
    known = cache.parse(FORMS[name])
    assert name.startswith(known.form)
    assert known.byteorder == ("big" if "big-endian" in name else "little")
    assert known.source == FORMS[name]
    assert known.generator == (None if "old" in name or "2.3" in name else write.GENERATOR)


def test_entries() -> None:
    known = cache.parse(write.new([*WITH_HWCAPS, *LEGACY[:2]], names=NAMES, empty_names=[b"avx"]))
    assert known.entries == [
        Entry(b"libz.so.1", b"/usr/lib/libz.so.1", 0x303),
        Entry(b"liba.so.2", b"/usr/lib/glibc-hwcaps/x86-64-v2/liba.so.2", 0x303, 0x4000000100000000, b"x86-64-v2"),
        Entry(b"liba.so.2", b"/usr/lib/glibc-hwcaps/x86-64-v3/liba.so.2", 0x303, 0x4000001F00000000, b"x86-64-v3"),
        Entry(b"liba.so.2", b"/usr/lib/liba.so.2", 0x303),
        Entry(b"libz.so.1", b"/lib/haswell/xeon_phi/libz.so.1", 0x303, 3 << 50),
        Entry(b"libz.so.1", b"/lib/tls/libz.so.1", 0x303, 1 << 63, None, 0x03020000),
    ]
    assert [entry.level for entry in known.entries] == [0, 1, 31, 0, 0, 0]
    assert known.unused == (b"avx",)


def test_combined_hwcaps_names_are_right_though_the_list_is_not() -> None:
    known = cache.parse(FORMS["combined, hwcaps"])
    assert [entry.hwcaps for entry in known.entries] == [None, b"x86-64-v2", b"x86-64-v3", None]
    # 4 old entries stand before the new header: the offset of the list is short by that much.
    data = FORMS["combined, hwcaps"]
    for name, offset in known.listed:
        at = offset + 16 + 12 * 4
        assert data[at : at + len(name) + 1] == name + b"\0"


def test_a_combined_file_with_an_odd_count_is_padded() -> None:
    """glibc writes none, but its readers look at the next multiple of 8."""
    inner = write.new(PLAIN[:1], generator=None)
    head = b"ld.so-1.7.0\0" + struct.pack("<I", 1) + struct.pack("<iII", 0x303, 4 + 72, 4 + 72 + 10)
    known = cache.parse(head + b"\0\0\0\0" + inner)
    assert (known.form, [entry.soname for entry in known.entries]) == ("combined", [b"libz.so.1"])


def test_strings_that_are_no_text() -> None:
    rows = [write.Row(b"lib\xff\n.so", b"/\xe9/..//lib\xff\n.so"), write.Row(b"", b"relative"), write.Row(b"", b"")]
    data = write.new(rows)
    assert [(entry.soname, entry.path) for entry in cache.parse(data).entries] == [
        (b"lib\xff\n.so", b"/\xe9/..//lib\xff\n.so"),
        (b"", b"relative"),
        (b"", b""),
    ]
    assert cache.serialize(cache.parse(data)) == data


@pytest.mark.skipif(not MACHINE_CACHE.is_file(), reason="this machine has no /etc/ld.so.cache")
def test_this_machines_cache() -> None:
    data = MACHINE_CACHE.read_bytes()
    known = cache.parse(data)
    assert cache.serialize(known) == data
    assert order.misplaced(known.entries, [order.libcmp_key(entry.soname) for entry in known.entries]) is None


def test_the_h200_hosts_cache(tree: Path) -> None:
    data = (tree / "tests/data/h200/ld.so.cache").read_bytes()
    known = cache.parse(data)
    assert cache.serialize(known) == data
    assert len(known.entries) == 520
    assert known.generator == b"ldconfig (Ubuntu GLIBC 2.39-0ubuntu8.9) stable release version 2.39"
    assert order.misplaced(known.entries, [order.libcmp_key(entry.soname) for entry in known.entries]) is None


@stubs.needs_ldconfig
@stubs.needs_gcc
@pytest.mark.parametrize("form", ["new", "compat", "old"])
def test_caches_of_the_real_ldconfig(tmp_path: Path, form: str) -> None:
    for soname in ("liba.so.1", "liba.so.01", "libb.so.9", "libb.so.10", "libcuda.so.1", "libx.so_y"):
        stubs.add(tmp_path, f"/opt/a/{soname}.0", soname)
        stubs.add(tmp_path, f"/opt/b/{soname}.0", soname)
    stubs.add(tmp_path, "/opt/a/glibc-hwcaps/x86-64-v3/libb.so.real", "libb.so.9", level="x86-64-v3")
    stubs.add(tmp_path, "/opt/b/glibc-hwcaps/x86-64-v2/libb.so.real", "libb.so.9")
    (tmp_path / "opt/b/glibc-hwcaps/empty").mkdir()
    data = stubs.ldconfig(tmp_path, ["/opt/a", "/opt/b"], "-c", form)
    known = cache.parse(data)
    assert cache.serialize(known) == data
    assert len(known.entries) == 14
    if form != "old":
        levels = [(entry.hwcaps, entry.level) for entry in known.entries if entry.hwcaps]
        assert levels == [(b"x86-64-v2", 0), (b"x86-64-v3", 2)]
        assert order.misplaced(known.entries, [order.libcmp_key(entry.soname) for entry in known.entries]) is None
    assert b"empty" in known.unused


# What parse must refuse -----------------------------------------------------------------------------


def edited(data: bytes, at: int, *words: int) -> bytes:
    """The same with these 32-bit little-endian words at byte `at`."""
    patch = b"".join(struct.pack("<I", word) for word in words)
    return data[:at] + patch + data[at + len(patch) :]


NEW = FORMS["new, hwcaps"]
DIRECTORY = struct.unpack_from("<I", NEW, 32)[0]
FIRST = 48
LAST_HWCAP = FIRST + 24 * 2 + 16
LONG = [write.row("lib" + "a" * 253)]

BAD = {
    "empty": b"",
    "no cache": b"\x7fELF" + bytes(100),
    "a later version": NEW.replace(b"cache1.1", b"cache1.2"),
    "cut header": NEW[:47],
    "cut old header": b"ld.so-1.7.0\0\0",
    "byte order 1": edited(NEW, 28, 1),
    "byte order 0x12": edited(NEW, 28, 0x12),
    "the other byte order": edited(NEW, 28, 3),
    "n is 2^32-1": edited(NEW, 20, 0xFFFFFFFF),
    "n is 2^31 without byte order": edited(NEW, 20, 0x80000000, 0, 0),
    "n is one too many": edited(NEW, 20, (len(NEW) - 48) // 24 + 1),
    "old n too big": write.old(PLAIN, count=(1 << 32) - 1),
    "strings beyond the file": edited(NEW, 24, len(NEW)),
    "strings shorter than they are": edited(NEW, 24, 10),
    "strings longer than they are": edited(NEW, 24, struct.unpack_from("<I", NEW, 24)[0] + 4),
    "soname before the strings": edited(NEW, FIRST + 4, 0),
    "soname behind the strings": edited(NEW, FIRST + 4, DIRECTORY),
    "path beyond the file": edited(NEW, FIRST + 8, 0xFFFFFFFF),
    "old path beyond the file": edited(FORMS["old"], 16 + 8, 0xFFFFFFFF),
    "soname of 256 bytes": write.new([write.row("l" * 256)]),
    "path used as soname": edited(write.new(LONG), FIRST + 4, struct.unpack_from("<I", write.new(LONG), FIRST + 8)[0]),
    "path of 4096 bytes": write.new([write.Row(b"liba.so", b"/" * 4096)]),
    "last string without end": write.new([write.row("liba.so")], generator=None)[:-1] + b"x",
    "bytes behind the strings": FORMS["new, 2.32"] + b"\0",
    "extension offset not aligned": edited(NEW, 32, DIRECTORY + 1),
    "extension elsewhere": edited(NEW, 32, DIRECTORY + 4),
    "extension inside the header": edited(NEW, 32, 4),
    "extension beyond the file": edited(NEW, 32, 0xFFFFFFFC),
    "extension cut": NEW[: DIRECTORY + 4],
    "extension magic": edited(NEW, DIRECTORY, 0xEAA42175),
    "extension count 17": edited(NEW, DIRECTORY + 4, 17) + bytes(17 * 16),
    "extension count 2^32-1": edited(NEW, DIRECTORY + 4, 0xFFFFFFFF),
    "generator beyond the file": edited(NEW, DIRECTORY + 16, 0xFFFFFFFF, 0xFFFFFFFF),
    "generator cut": NEW[:-1],
    "list beyond the file": edited(NEW, DIRECTORY + 32, len(NEW), 4),
    "list of 7 bytes": edited(NEW, DIRECTORY + 36, 7),
    "list item beyond the file": edited(NEW, DIRECTORY + 40, len(NEW)),
    "list not sorted": write.new(WITH_HWCAPS, names=NAMES[::-1]),
    "list with a name twice": write.new(WITH_HWCAPS, names=[NAMES[0], NAMES[0]]),
    "name with a slash": write.new(WITH_HWCAPS, names=[b"a/b", b"c"]),
    "name with a colon": write.new(WITH_HWCAPS, names=[b"a:b", b"c"]),
    "empty name": write.new(WITH_HWCAPS, names=[b"", b"c"]),
    "name of 256 bytes": write.new(WITH_HWCAPS, names=[b"a" * 256, b"c"]),
    "257 names": write.new(PLAIN, names=[b"%03d" % number for number in range(257)]),
    "index beyond the list": edited(NEW, LAST_HWCAP, 2),
    "index without list": write.new([write.hwcaps_row("liba.so", "x", 0)]),
    "hwcaps entry in a cache of 2.32": write.new([write.hwcaps_row("liba.so", "x", 0)], generator=None),
    "ISA level 32": edited(NEW, LAST_HWCAP + 4, 0x40000020),
    "100,001 entries": write.new([]).replace(struct.pack("<II", 0, 0), struct.pack("<II", 100_001, 1), 1)
    + bytes(24 * 100_001 + 1),
    "100,001 old entries": b"ld.so-1.7.0\0" + struct.pack("<I", 100_001) + bytes(12 * 100_001 + 1),
    "more than 16 MiB": NEW + bytes(cache.MAX_FILE),
}


@pytest.mark.parametrize("name", BAD)
def test_refused(name: str) -> None:
    with pytest.raises(InvalidLdCache, match=r"\(at byte \d+\)$") as caught:
        cache.parse(BAD[name])
    assert 0 <= caught.value.offset <= len(BAD[name])


def test_the_limits_themselves_are_allowed() -> None:
    rows = [write.Row(b"l" * 255, b"/" * 4095)]
    assert cache.parse(write.new(rows)).entries == [Entry(b"l" * 255, b"/" * 4095, 0x303)]
    names = [b"%03d" % number for number in range(256)]
    assert [name for name, _ in cache.parse(write.new(PLAIN, names=names)).listed] == names


@pytest.mark.parametrize("name", FORMS)
def test_every_truncation_is_refused(name: str) -> None:
    for length in range(len(FORMS[name])):
        if name == "combined, empty" and length == 16:
            continue  # that much is an empty cache of the old form
        with pytest.raises(InvalidLdCache):
            cache.parse(FORMS[name][:length])


def judge(data: bytes) -> bool:
    """Whether parse accepts it. What it accepts is written again, or refused with ValueError; nothing else."""
    try:
        known = cache.parse(data)
    except InvalidLdCache:
        return False
    try:
        cache.serialize(known)
    except ValueError:
        pass
    return True


def mutate(random_: random.Random, data: bytes) -> bytes:
    changed = bytearray(data)
    for _ in range(random_.choice((1, 1, 2, 5))):
        at = random_.randrange(len(changed))
        what = random_.randrange(4)
        if what == 0:
            changed[at] = random_.randrange(256)
        elif what == 1:
            changed[at : at + 4] = struct.pack("<I", random_.choice((0, 1, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF)))
        elif what == 2:
            del changed[at : at + random_.randrange(1, 9)]
        else:
            changed[at:at] = random_.randbytes(random_.randrange(1, 9))
        if not changed:
            return b""
    return bytes(changed)


@pytest.mark.parametrize("name", FORMS)
def test_mutations(name: str) -> None:
    random_ = random.Random(name)
    results = [judge(mutate(random_, FORMS[name])) for _ in range(400)]
    assert not all(results)


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", FORMS)
def test_many_mutations(name: str) -> None:
    random_ = random.Random(f"many {name}")
    for _ in range(60_000):
        judge(mutate(random_, FORMS[name]))


@given(st.sampled_from([cache.MAGIC_NEW, cache.MAGIC_OLD + b"\0"]), st.binary(max_size=300))
@settings(max_examples=300, deadline=None)
def test_anything_behind_the_magic(magic: bytes, rest: bytes) -> None:
    judge(magic + rest)


NAME = st.binary(max_size=12).map(lambda name: name.replace(b"\0", b"."))
FLAG = st.sampled_from([0, 1, 3, 0x303, 0x10303, -1])


@given(
    st.lists(st.builds(write.Row, NAME, NAME, FLAG, st.just(0), st.integers(0, (1 << 32) - 1)), max_size=12),
    st.sets(NAME.filter(lambda name: name and not set(b"/:") & set(name)), max_size=3),
    st.sampled_from("<>"),
    st.sampled_from(["new", "new, 2.32", "combined", "combined, 2.31", "old", "old, sorted"]),
)
@settings(max_examples=300, deadline=None)
def test_round_trip_of_any_content(rows: list[write.Row], names: set[bytes], order: str, form: str) -> None:
    if form == "new":
        data = write.new(rows, empty_names=sorted(names), order=order)
    elif form == "new, 2.32":
        data = write.new(rows, generator=None, mark=2 if order == "<" else 3, order=order)
    elif form == "combined":
        data = write.combined(rows, order=order)
    elif form == "combined, 2.31":
        data = write.combined(rows, generator=None, order=order)
    else:
        data = write.old(rows, sort=form == "old, sorted", order=order)
    known = cache.parse(data)
    assert cache.serialize(known) == data
    assert [(e.soname, e.path, e.flags) for e in known.entries] == [(r.soname, r.path, r.flags) for r in rows]


@given(
    st.lists(st.builds(write.Row, NAME, NAME, FLAG, st.just(0)), min_size=1, max_size=8),
    st.sampled_from(["new", "new, 2.32", "combined", "combined, 2.31", "old", "old, sorted"]),
    st.floats(0, 1, exclude_max=True),
)
@settings(max_examples=500)
def test_any_truncation_of_any_content_is_refused(rows: list[write.Row], form: str, where: float) -> None:
    data = {
        "new": lambda: write.new(rows),
        "new, 2.32": lambda: write.new(rows, generator=None),
        "combined": lambda: write.combined(rows),
        "combined, 2.31": lambda: write.combined(rows, generator=None),
        "old": lambda: write.old(rows),
        "old, sorted": lambda: write.old(rows, sort=True),
    }[form]()
    with pytest.raises(InvalidLdCache):
        cache.parse(data[: int(len(data) * where)])


# What would be too much -------------------------------------------------------------------------------


@contextmanager
def at_most(megabytes: float) -> Iterator[None]:
    """Fails if Python takes more memory than this on the way."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < megabytes * (1 << 20)
    finally:
        tracemalloc.stop()


def overlapping(count: int, string: bytes, step: int) -> bytes:
    """A cache of 2.32 whose entries all point into one string, `step` bytes apart."""
    start = 48 + 24 * count
    rows = [struct.pack("<iIIIQ", 3, start + step * i, start + step * i, 0, 0) for i in range(count)]
    table = string + b"\0"
    return cache.MAGIC_NEW + struct.pack("<II", count, len(table)) + bytes(20) + b"".join(rows) + table


def test_one_long_string_is_not_decoded_for_each_entry() -> None:
    data = overlapping(20_000, b"a" * 200_000, 1)
    with at_most(8), pytest.raises(InvalidLdCache, match="longer than 255"):
        cache.parse(data)


def test_overlapping_strings_have_a_common_budget() -> None:
    # 40,000 paths that end together, each one longer than the budget allows for all of them.
    start = 48 + 24 * 40_000
    table = (b"a" * 4095 + b"\0") * 12
    body = b"".join(
        struct.pack("<iIIIQ", 3, start + 4090, start + number % len(table), 0, 0) for number in range(40_000)
    )
    data = cache.MAGIC_NEW + struct.pack("<II", 40_000, len(table)) + bytes(20) + body + table
    with at_most(60), pytest.raises(InvalidLdCache, match="decode to more than"):
        cache.parse(data)


def test_a_table_of_nothing_but_ends() -> None:
    table = bytes(15 << 20)
    data = cache.MAGIC_NEW + struct.pack("<II", 0, len(table)) + bytes(20) + table
    with at_most(40), pytest.raises(InvalidLdCache, match="no entry uses"):
        cache.parse(data)


def test_the_largest_cache_fits_in_memory() -> None:
    data = overlapping(100_000, b"a" * 200, 0)
    with at_most(60):
        assert len(cache.parse(data).entries) == 100_000


# read ---------------------------------------------------------------------------------------------------


def open_read(path: Path) -> bytes:
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        return cache.read(fd)
    finally:
        os.close(fd)


def test_read(tmp_path: Path) -> None:
    file = tmp_path / "cache"
    file.write_bytes(NEW * 1000)
    assert open_read(file) == NEW * 1000
    file.write_bytes(b"")
    assert open_read(file) == b""
    with file.open("wb") as sparse:
        sparse.truncate(cache.MAX_FILE)
    assert len(open_read(file)) == cache.MAX_FILE


def test_read_refuses_what_is_no_file_of_a_caches_size(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    with (tmp_path / "sparse").open("wb") as sparse:
        sparse.truncate(1 << 40)
    for path in (tmp_path / "fifo", tmp_path / "sparse", tmp_path, Path("/dev/zero")):
        with pytest.raises(InvalidLdCache):
            open_read(path)


# Writing ------------------------------------------------------------------------------------------------


def test_empty() -> None:
    known = cache.parse(cache.serialize(cache.empty()))
    assert (known.form, known.marked, known.entries, known.generator) == ("new", True, [], b"nvhook")


@pytest.mark.parametrize(
    "entry",
    [
        Entry(b"a\0b", b"/a", 0x303),
        Entry(b"a", b"/a\0", 0x303),
        Entry(b"a", b"/a", 1 << 31),
        Entry(b"a", b"/a", 0x303, osversion=1 << 32),
        Entry(b"a", b"/a", 0x303, hwcap=1 << 64),
    ],
)
def test_what_no_cache_can_hold_is_not_written(entry: Entry) -> None:
    with pytest.raises(ValueError, match="loader cache"):
        cache.serialize(Cache([entry], generator=b""))
    if b"\0" in entry.soname + entry.path:
        with pytest.raises(ValueError, match="loader cache"):
            cache.serialize(Cache([entry], sorted_strings=False))


def test_hwcaps_need_an_extension_directory() -> None:
    entry = Entry(b"a", b"/a", 0x303, cache.HWCAP_EXTENSION, b"x86-64-v3")
    with pytest.raises(ValueError, match="glibc-hwcaps"):
        cache.serialize(Cache([entry], sorted_strings=False))


@pytest.mark.parametrize(
    ("elf_class", "machine", "e_flags", "expected"),
    [
        (64, 62, 0, 0x303),
        (32, 62, 0, 0x803),
        (32, 3, 0, 3),
        (64, 183, 0, 0xA03),
        (32, 40, 0x05000400, 0x903),
        (32, 40, 0x05000200, 0xB03),
        (32, 40, 0x04000400, 3),
        (64, 21, 2, 0x503),
        (64, 22, 0, 0x403),
        (64, 243, 5, 0x1003),
    ],
)
def test_native_flags(elf_class: int, machine: int, e_flags: int, expected: int) -> None:
    assert cache.native_flags(elf_class, machine, e_flags) == expected


def test_no_flags_for_an_unknown_machine() -> None:
    with pytest.raises(ValueError, match="64-bit ELF machine 3$"):
        cache.native_flags(64, 3)
