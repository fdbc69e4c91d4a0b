# SPDX-License-Identifier: Apache-2.0
"""The file `ld.so.cache`: its forms and its limits.

Hot. Three forms exist (glibc `sysdeps/generic/dl-cache.h`, `elf/cache.c`): *new* ("glibc-ld.so.cache1.1",
what ldconfig writes since 2.32), *old* ("ld.so-1.7.0", libc5's and uClibc's) and *combined*, an old file
that holds a whole new one in its string area (ldconfig before 2.32). A new part may end in an extension
directory (2.33+) that names the generator and the glibc-hwcaps folders.

    new part, all integers in the machine's order      entry of a new part       entry of an old part
     0  magic and version, 20 bytes                     0  i32 flags              0  i32 flags
    20  u32 number of entries                           4  u32 soname             4  u32 soname
    24  u32 bytes of strings                            8  u32 path               8  u32 path
    28  u8 byte order: 0 unsaid, 2 little, 3 big       12  u32 OS version
    32  u32 extension directory, from the file's start 16  u64 hwcap
    48  entries, strings, zeros to a multiple of 4, extension directory

`parse` accepts what a container's image may hold, within the limits below, and keeps enough that `serialize`
gives the same bytes for everything that some ldconfig wrote. It reads either byte order. The order in which entries
stand is `ldcache.order`'s.
"""

from __future__ import annotations

import posix
import struct
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Literal

    Form = Literal["new", "old", "combined"]
    ByteOrder = Literal["little", "big"]

MAGIC_NEW = b"glibc-ld.so.cache1.1"
MAGIC_OLD = b"ld.so-1.7.0"
MAGIC_EXTENSION = 0xEAA42174

MAX_FILE = 16 << 20
MAX_ENTRIES = 100_000
MAX_PATH = 4095
MAX_SONAME = 255
MAX_DECODED = 32 << 20
MAX_HWCAPS = 256
MAX_SECTIONS = 16
# Strings that no entry uses are names of empty glibc-hwcaps folders: a handful. Without a bound, 16 MiB of
# NULs would be sixteen million strings.
MAX_UNUSED = 1024

_MARKS = {"little": 2, "big": 3}

HEADER_OLD = 16
HEADER_NEW = 48
ENTRY_OLD = 12
ENTRY_NEW = 24

# The loader compares the whole number, so these are the only useful ones (`sysdeps/*/dl-cache.h`). i386 also
# takes 1, and ARM takes 3: what ldconfig up to 2.36 gave to a library that it could not place.
FLAGS = {
    "i386": 0x003,
    "x86-64": 0x303,
    "s390x": 0x403,
    "ppc64": 0x503,
    "x32": 0x803,
    "arm-hard-float": 0x903,
    "aarch64": 0xA03,
    "arm-soft-float": 0xB03,
    "riscv64": 0x1003,
}

# (ELF class, e_machine) -> name in FLAGS. 32-bit ARM is missing: only e_flags tells its two ABIs apart.
_MACHINES = {
    (32, 3): "i386",
    (64, 62): "x86-64",
    (32, 62): "x32",
    (64, 183): "aarch64",
    (64, 21): "ppc64",
    (64, 22): "s390x",
    (64, 243): "riscv64",
}
_ARM = 40
_ARM_EABI5 = 5
_ARM_HARD_FLOAT = 0x400
_ARM_SOFT_FLOAT = 0x200

# Bits 32-41 of a glibc-hwcaps value hold the ISA level, the low word the index of the folder's name.
HWCAP_EXTENSION = 1 << 62
_LEVEL_MASK = 0x3FF
_MAX_LEVEL = 31


class InvalidLdCache(ValueError):
    """Not a loader cache, or one outside our limits. `offset` is the byte of the file that says so."""

    __slots__ = ("offset",)

    def __init__(self, reason: str, offset: int) -> None:
        super().__init__(f"{reason} (at byte {offset})")
        self.offset = offset


class Entry:
    """One library: what the loader is asked for, and the file that it opens.

    `soname` and `path` are bytes without NUL; a path may be relative or hold `..`, it is data. `flags` is
    the signed type and ABI (FLAGS). `hwcap` is 0 for a plain entry. For one of a glibc-hwcaps folder
    `hwcaps` is that folder's name and `hwcap` is HWCAP_EXTENSION with the ISA level in bits 32-41 (see
    `level`); the index of the name is the writer's business. Any other value is a legacy bit set, which
    ldconfig wrote up to 2.36. `osversion` is 0 since 2.36.
    """

    __slots__ = ("flags", "hwcap", "hwcaps", "osversion", "path", "soname")

    def __init__(
        self,
        soname: bytes,
        path: bytes,
        flags: int,
        hwcap: int = 0,
        hwcaps: bytes | None = None,
        osversion: int = 0,
    ) -> None:
        self.soname = soname
        self.path = path
        self.flags = flags
        self.hwcap = hwcap
        self.hwcaps = hwcaps
        self.osversion = osversion

    @property
    def level(self) -> int:
        """The ISA level that a glibc-hwcaps entry asks of the CPU; 0 for any other entry."""
        return self.hwcap >> 32 & _LEVEL_MASK if self.hwcaps is not None else 0

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Entry):
            return NotImplemented
        return all(getattr(self, name) == getattr(other, name) for name in Entry.__slots__)

    def __repr__(self) -> str:
        more = f", {self.hwcap:#x}, {self.hwcaps!r}, {self.osversion:#x}" if self.hwcap or self.osversion else ""
        return f"Entry({self.soname!r}, {self.path!r}, {self.flags:#x}{more})"


class Cache:
    """A whole cache, decoded. All that `serialize` needs to write it back is here.

    `form` is "new", "old" or "combined". `marked` says whether the header names its byte order (2.33+, and
    Debian's 2.31). `generator` is the extension directory's text, None where there is no directory.
    `sorted_strings` is the string table of 2.33+, sorted and sharing tails; False is the plain row of
    sonames and paths before it. `unused` holds strings of the table that no entry spells (names of empty
    glibc-hwcaps folders), which have to be kept. `listed` is the glibc-hwcaps list as it stood in the file,
    each name with the offset given for it (see `parse`), and `source` that file; a cache that was made here
    has neither.
    """

    __slots__ = (
        "byteorder",
        "entries",
        "form",
        "generator",
        "listed",
        "marked",
        "sorted_strings",
        "source",
        "unused",
    )

    def __init__(
        self,
        entries: list[Entry],
        *,
        form: Form = "new",
        byteorder: ByteOrder = sys.byteorder,
        marked: bool = True,
        generator: bytes | None = None,
        sorted_strings: bool = True,
        unused: tuple[bytes, ...] = (),
        listed: tuple[tuple[bytes, int], ...] = (),
        source: bytes | None = None,
    ) -> None:
        self.entries = entries
        self.form: Form = form
        self.byteorder: ByteOrder = byteorder
        self.marked = marked
        self.generator = generator
        self.sorted_strings = sorted_strings
        self.unused = unused
        self.listed = listed
        self.source = source

    def replaced(self, entries: list[Entry], unused: tuple[bytes, ...]) -> Cache:
        """A cache like this one with other entries; `unused` are further strings to keep in its table."""
        return Cache(
            entries,
            form=self.form,
            byteorder=self.byteorder,
            marked=self.marked,
            generator=self.generator,
            sorted_strings=self.sorted_strings,
            unused=unused,
        )


def native_flags(elf_class: int, machine: int, e_flags: int = 0) -> int:
    """The cache flags of a library by ELF class (32 or 64), e_machine and, for 32-bit ARM, e_flags.

    As `readelflib.c` of each architecture sets them since glibc 2.37. ValueError for a machine not in FLAGS.
    """
    if (elf_class, machine) == (32, _ARM):
        if e_flags >> 24 == _ARM_EABI5 and e_flags & _ARM_HARD_FLOAT:
            return FLAGS["arm-hard-float"]
        if e_flags >> 24 == _ARM_EABI5 and e_flags & _ARM_SOFT_FLOAT:
            return FLAGS["arm-soft-float"]
        return 3
    name = _MACHINES.get((elf_class, machine))
    if name is None:
        raise ValueError(f"no loader cache flags are known for {elf_class}-bit ELF machine {machine}")
    return FLAGS[name]


def empty() -> Cache:
    """A cache without entries, for a root that has none or an empty one: new form, native order.

    Every glibc loader reads it: those before 2.33 take the extension directory for unused header space.
    """
    return Cache([], generator=b"nvhook")


def read(fd: int) -> bytes:
    """The bytes of an open cache file, at most MAX_FILE of them, as a private copy.

    The container can write the file while we read it, make it sparse, or put something else in its place:
    open it non-blocking and without following links. InvalidLdCache if it is no regular file or too big.
    """
    status = posix.fstat(fd)
    if status.st_mode & 0o170000 != 0o100000:
        raise InvalidLdCache("not a regular file", 0)
    if status.st_size > MAX_FILE:
        raise InvalidLdCache(f"{status.st_size} bytes, more than {MAX_FILE}", MAX_FILE)
    chunks = []
    at = 0
    while chunk := posix.pread(fd, MAX_FILE + 1 - at if at else status.st_size + 1, at):
        chunks.append(chunk)
        at += len(chunk)
        if at > MAX_FILE:
            raise InvalidLdCache(f"grew beyond {MAX_FILE} bytes while it was read", MAX_FILE)
    return b"".join(chunks)


def parse(data: bytes) -> Cache:
    """Decode a cache file of any form and byte order.

    Raises InvalidLdCache for anything else, an empty file included: the loader takes that for no cache, so
    the caller uses `empty()` instead. Decodes each string once, and at most MAX_DECODED bytes of them. Of a
    combined file the new part is read, as ldconfig and the loader do. ldconfig 2.33 to 2.43 writes that
    part's glibc-hwcaps list relative to the embedded header, yet reads it relative to the file (a bug; the
    loader then matches no such name). Entries here carry the right names; `Cache.listed` keeps the numbers
    as they stand.
    """
    if len(data) > MAX_FILE:
        raise InvalidLdCache(f"{len(data)} bytes, more than {MAX_FILE}", MAX_FILE)
    if data.startswith(MAGIC_NEW):
        return _parse_new(data, 0, "new", _new_byteorder(data, 0))
    if data.startswith(MAGIC_OLD):
        return _parse_old(data)
    raise InvalidLdCache("no loader cache: unknown magic", 0)


def _new_byteorder(data: bytes, base: int) -> ByteOrder:
    """Byte order of the new part at `base`: what its header says, else the one whose sizes fit the file."""
    if base + HEADER_NEW > len(data):
        raise InvalidLdCache("header is cut short", len(data))
    mark = data[base + 28]
    if mark:
        for byteorder in _both_orders():
            if mark == _MARKS[byteorder]:
                return byteorder
        raise InvalidLdCache(f"byte order mark {mark} is neither 2 nor 3", base + 28)
    for byteorder in _both_orders():
        count, length = struct.unpack_from(_prefix(byteorder) + "2I", data, base + 20)
        if base + HEADER_NEW + ENTRY_NEW * count + length <= len(data):
            return byteorder
    return sys.byteorder


def _both_orders() -> tuple[ByteOrder, ByteOrder]:
    return ("little", "big") if sys.byteorder == "little" else ("big", "little")


def _prefix(byteorder: ByteOrder) -> str:
    return "<" if byteorder == "little" else ">"


def _check_count(count: int, room: int, size: int, offset: int) -> None:
    if count > room // size:
        raise InvalidLdCache(f"{count} entries don't fit the file", offset)
    if count > MAX_ENTRIES:
        raise InvalidLdCache(f"{count} entries, more than {MAX_ENTRIES}", offset)


def _parse_new(data: bytes, base: int, form: Form, byteorder: ByteOrder) -> Cache:
    prefix = _prefix(byteorder)
    count, length, extension = struct.unpack_from(prefix + "2I4xI", data, base + 20)
    _check_count(count, len(data) - base - HEADER_NEW, ENTRY_NEW, base + 20)
    start = base + HEADER_NEW + ENTRY_NEW * count
    end = start + length
    if end > len(data):
        raise InvalidLdCache(f"{length} bytes of strings don't fit the file", base + 24)
    strings = _Strings(data, base, start, end)

    names: list[bytes] = []
    offsets: tuple[int, ...] = ()
    generator = None
    if extension:
        generator, offsets = _parse_extension(data, extension, end, base + 32, prefix)
        names = _hwcaps_names(strings, offsets, extension)
    elif end != len(data):
        raise InvalidLdCache("bytes after the strings that nothing names", end)

    rows = struct.iter_unpack(prefix + "i3IQ", data[base + HEADER_NEW : start])
    entries = _entries(rows, strings, names, base + HEADER_NEW, ENTRY_NEW)
    return Cache(
        entries,
        form=form,
        byteorder=byteorder,
        marked=data[base + 28] != 0,
        generator=generator,
        sorted_strings=extension != 0,
        unused=strings.unused(count),
        listed=tuple(zip(names, offsets, strict=True)),
        source=data,
    )


class _Strings:
    """The string table. Offsets count from `base`; each is decoded once, within a common budget."""

    __slots__ = ("budget", "decoded", "skipped", "start", "table")

    def __init__(self, data: bytes, base: int, start: int, end: int) -> None:
        self.table = data[start:end]
        self.start = start
        self.skipped = start - base
        self.decoded: dict[int, bytes] = {}
        self.budget = MAX_DECODED
        if self.table and self.table[-1]:
            raise InvalidLdCache("last string has no end", end - 1)

    def get(self, offset: int, limit: int, where: int) -> bytes:
        """The string at `offset`, at most `limit` bytes long; `where` is the byte of the file that asks."""
        at = offset - self.skipped
        if not 0 <= at < len(self.table):
            raise InvalidLdCache(f"string offset {offset} is outside the strings", where)
        stop = self.table.find(b"\0", at, at + limit + 1)
        if stop < 0:
            raise InvalidLdCache(f"string is longer than {limit} bytes", self.start + at)
        self.budget -= stop - at + 1
        if self.budget < 0:
            raise InvalidLdCache(f"strings decode to more than {MAX_DECODED} bytes", where)
        text = self.decoded[offset] = self.table[at:stop]
        return text

    def unused(self, count: int) -> tuple[bytes, ...]:
        """What stands in the table and was never asked for; `count` is the number of entries."""
        if self.table.count(b"\0") > 2 * count + MAX_UNUSED:
            raise InvalidLdCache(f"more than {MAX_UNUSED} strings that no entry uses", self.start)
        used = set(self.decoded.values())
        return tuple([text for text in self.table.split(b"\0")[:-1] if text not in used])


def _entries(rows: Iterable[tuple[int, ...]], strings: _Strings, names: list[bytes], at: int, size: int) -> list[Entry]:
    """Decode rows of flags, soname, path, OS version and hwcap, each `size` bytes, the first at byte `at`."""
    entries = []
    known = strings.decoded.get
    for flags, key, value, osversion, hwcap in rows:
        soname = known(key)
        if soname is None:
            soname = strings.get(key, MAX_SONAME, at + 4)
        elif len(soname) > MAX_SONAME:
            raise InvalidLdCache(f"soname is longer than {MAX_SONAME} bytes", at + 4)
        path = known(value)
        if path is None:
            path = strings.get(value, MAX_PATH, at + 8)
        folder = None
        if hwcap >> 42 == HWCAP_EXTENSION >> 42:
            index = hwcap & 0xFFFFFFFF
            if index >= len(names):
                raise InvalidLdCache(f"glibc-hwcaps index {index} of {len(names)}", at + 16)
            if hwcap >> 32 & _LEVEL_MASK > _MAX_LEVEL:
                raise InvalidLdCache(f"ISA level {hwcap >> 32 & _LEVEL_MASK}, more than {_MAX_LEVEL}", at + 16)
            folder = names[index]
            hwcap -= index
        entries.append(Entry(soname, path, flags, hwcap, folder, osversion))
        at += size
    return entries


def _parse_extension(
    data: bytes, at: int, strings_end: int, where: int, prefix: str
) -> tuple[bytes | None, tuple[int, ...]]:
    """Generator and glibc-hwcaps list of the directory at byte `at`, which the byte `where` names."""
    if at != strings_end + -strings_end % 4 or data[strings_end:at].strip(b"\0"):
        raise InvalidLdCache(f"extension directory at {at} does not follow the strings", where)
    if at + 8 > len(data):
        raise InvalidLdCache("extension directory is cut short", at)
    magic, count = struct.unpack_from(prefix + "2I", data, at)
    if magic != MAGIC_EXTENSION:
        raise InvalidLdCache(f"extension directory has magic {magic:#x}", at)
    if count > MAX_SECTIONS or at + 8 + 16 * count > len(data):
        raise InvalidLdCache(f"{count} extension sections", at + 4)
    generator = None
    offsets: tuple[int, ...] = ()
    for number in range(count):
        here = at + 8 + 16 * number
        tag, _, offset, size = struct.unpack_from(prefix + "4I", data, here)
        if offset + size > len(data):
            raise InvalidLdCache("extension section is outside the file", here + 8)
        if tag == 0:
            generator = data[offset : offset + size]
        elif tag == 1:
            if size % 4 or size > 4 * MAX_HWCAPS:
                raise InvalidLdCache(f"glibc-hwcaps list of {size} bytes", here + 12)
            offsets = struct.unpack_from(f"{prefix}{size // 4}I", data, offset)
        # glibc skips tags that it doesn't know, so do we; `merge` refuses the file, as it would lose them.
    return generator, offsets


def _hwcaps_names(strings: _Strings, offsets: tuple[int, ...], where: int) -> list[bytes]:
    """The names of the glibc-hwcaps list, which counts from the header that it belongs to (see `parse`)."""
    names: list[bytes] = []
    for offset in offsets:
        name = strings.decoded.get(offset)
        if name is None:
            name = strings.get(offset, MAX_SONAME, where)
        if not name or b"/" in name or b":" in name:
            raise InvalidLdCache(f"{name!r} is no glibc-hwcaps name", where)
        if names and names[-1] >= name:
            raise InvalidLdCache("glibc-hwcaps names are not sorted", where)
        names.append(name)
    return names


def _parse_old(data: bytes) -> Cache:
    if len(data) < HEADER_OLD:
        raise InvalidLdCache("header is cut short", len(data))
    fallback: ByteOrder | None = None
    for byteorder in _both_orders():
        (count,) = struct.unpack_from(_prefix(byteorder) + "I", data, 12)
        if count > (len(data) - HEADER_OLD) // ENTRY_OLD:
            continue
        end = HEADER_OLD + ENTRY_OLD * count
        # ldconfig makes the count even, so that the new part stands right behind; else it is padded to 8.
        for base in (end, end + -end % 8):
            if data.startswith(MAGIC_NEW, base) and _new_byteorder(data, base) == byteorder:
                return _parse_new(data, base, "combined", byteorder)
        fallback = fallback or byteorder
    if fallback is None:
        raise InvalidLdCache("entries don't fit the file", 12)
    return _parse_pure_old(data, fallback)


def _parse_pure_old(data: bytes, byteorder: ByteOrder) -> Cache:
    prefix = _prefix(byteorder)
    (count,) = struct.unpack_from(prefix + "I", data, 12)
    _check_count(count, len(data) - HEADER_OLD, ENTRY_OLD, 12)
    start = HEADER_OLD + ENTRY_OLD * count
    strings = _Strings(data, start, start, len(data))
    rows = [(*row, 0, 0) for row in struct.iter_unpack(prefix + "i2I", data[HEADER_OLD:start])]
    entries = _entries(rows, strings, [], HEADER_OLD, ENTRY_OLD)
    # This form doesn't say which ldconfig wrote it: the strings do.
    in_a_row = strings.table == _row(entries)
    return Cache(
        entries,
        form="old",
        byteorder=byteorder,
        marked=False,
        sorted_strings=not in_a_row,
        unused=strings.unused(count),
        source=data,
    )


def serialize(cache: Cache) -> bytes:
    """The file of a cache, byte for byte as the ldconfig that made its form would write it.

    ValueError if an entry can't be written: a number too big, a string with NUL, a glibc-hwcaps folder in a
    form that can't name one.
    """
    names = sorted({entry.hwcaps for entry in cache.entries if entry.hwcaps is not None})
    if names and cache.generator is None:
        raise ValueError("this form of loader cache can't name glibc-hwcaps folders")
    skipped = 0 if cache.form == "old" else HEADER_NEW + ENTRY_NEW * len(cache.entries)
    strings = _sorted_strings(cache, names, skipped) if cache.sorted_strings else _strings_in_a_row(cache, skipped)
    try:
        old = b"" if cache.form == "new" else _old_part(cache, strings)
        return old + (strings.table if cache.form == "old" else _new_part(cache, strings, names, len(old)))
    except struct.error as error:
        raise ValueError(f"a number of the loader cache is too big: {error}") from error


class _Layout:
    """A string table, and the offsets of each entry's soname and path and of each glibc-hwcaps name."""

    __slots__ = ("keys", "list_offsets", "table", "values")

    def __init__(self, table: bytes, keys: list[int], values: list[int], list_offsets: list[int]) -> None:
        self.table = table
        self.keys = keys
        self.values = values
        self.list_offsets = list_offsets


def _reversed(text: bytes) -> bytes:
    return text[::-1]


def _sorted_strings(cache: Cache, names: list[bytes], skipped: int) -> _Layout:
    """String table of 2.33+, which starts at offset `skipped`.

    Sorted by their reversed bytes, descending, so that a string that ends another one stands right behind
    it; it then gets no bytes of its own (`elf/stringtable.c`).
    """
    sonames = [entry.soname for entry in cache.entries]
    paths = [entry.path for entry in cache.entries]
    stored = []
    offsets = {}
    at = skipped
    last = None
    for text in sorted({*sonames, *paths, *names, *cache.unused}, key=_reversed, reverse=True):
        if last is None or not last.endswith(text):
            stored.append(text)
            last = text
            at += len(text) + 1
        offsets[text] = at - len(text) - 1
    stored.append(b"")
    of = offsets.__getitem__
    table = _checked(b"\0".join(stored), len(stored) - 1)
    return _Layout(table, list(map(of, sonames)), list(map(of, paths)), list(map(of, names)))


def _row(entries: list[Entry]) -> bytes:
    """String table up to 2.32: of each entry the soname, then the path. Nothing is shared."""
    return b"".join([b"%b\0%b\0" % (entry.soname, entry.path) for entry in entries])


def _strings_in_a_row(cache: Cache, skipped: int) -> _Layout:
    keys = []
    values = []
    at = skipped
    for entry in cache.entries:
        keys.append(at)
        at += len(entry.soname) + 1
        values.append(at)
        at += len(entry.path) + 1
    return _Layout(_checked(_row(cache.entries), 2 * len(keys)), keys, values, [])


def _checked(table: bytes, strings: int) -> bytes:
    if table.count(b"\0") != strings:
        raise ValueError("a string of the loader cache holds a NUL")
    return table


def _old_part(cache: Cache, strings: _Layout) -> bytes:
    """Old header and entries. Legacy-hwcap entries are left out, glibc-hwcaps ones are not.

    A combined file needs an even number, so that the new part is aligned to 8: the last one is repeated.
    """
    prefix = _prefix(cache.byteorder)
    pack = struct.Struct(prefix + "i2I").pack
    rows = [
        pack(entry.flags, key, value)
        for entry, key, value in zip(cache.entries, strings.keys, strings.values, strict=True)
        if not entry.hwcap or entry.hwcaps is not None
    ]
    if cache.form == "combined" and len(rows) % 2:
        rows.append(rows[-1])
    return struct.pack(prefix + "11sxI", MAGIC_OLD, len(rows)) + b"".join(rows)


def _new_part(cache: Cache, strings: _Layout, names: list[bytes], base: int) -> bytes:
    """New header, entries, strings and extension directory, to stand at byte `base` of the file."""
    prefix = _prefix(cache.byteorder)
    entries = cache.entries
    table = strings.table
    index = {name: number for number, name in enumerate(names)}
    # One call for all entries, laid out column by column, takes half the time of one call an entry.
    numbers = [0] * (5 * len(entries))
    numbers[0::5] = [entry.flags for entry in entries]
    numbers[1::5] = strings.keys
    numbers[2::5] = strings.values
    numbers[3::5] = [entry.osversion for entry in entries]
    numbers[4::5] = [entry.hwcap if entry.hwcaps is None else entry.hwcap + index[entry.hwcaps] for entry in entries]
    end = base + HEADER_NEW + ENTRY_NEW * len(entries) + len(table)
    extension = b""
    padding = 0
    if cache.generator is not None:
        padding = -end % 4
        extension = _extension(cache.generator, strings.list_offsets, end + padding, prefix)
    header = struct.pack(
        prefix + "20s2IB3xI12x",
        MAGIC_NEW,
        len(entries),
        len(table),
        _MARKS[cache.byteorder] if cache.marked else 0,
        end + padding if extension else 0,
    )
    return b"".join([header, struct.pack(prefix + "i3IQ" * len(entries), *numbers), table, b"\0" * padding, extension])


def _extension(generator: bytes, list_offsets: list[int], at: int, prefix: str) -> bytes:
    """The directory for byte `at` of the file, then the glibc-hwcaps list, if any, then the generator."""
    if not list_offsets:
        head = struct.pack(prefix + "6I", MAGIC_EXTENSION, 1, 0, 0, at + 24, len(generator))
        return head + generator
    size = 4 * len(list_offsets)
    head = struct.pack(prefix + "10I", MAGIC_EXTENSION, 2, 0, 0, at + 40 + size, len(generator), 1, 0, at + 40, size)
    return head + struct.pack(f"{prefix}{len(list_offsets)}I", *list_offsets) + generator
