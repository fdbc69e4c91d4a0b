# SPDX-License-Identifier: Apache-2.0
"""What the loader cache needs to know of a shared object: its soname and machine.

Hot. Reads by `pread` on a descriptor alone, a few kilobytes, and treats every number in the file as hostile. It
follows ldconfig (`elf/readelflib.c`): the last PT_DYNAMIC counts, DT_STRTAB is an address that the first PT_LOAD
holding it maps to the file, and an offset where none does.
"""

from __future__ import annotations

import posix
import struct
import sys

MAX_HEADERS = 128
MAX_DYNAMIC = 1 << 20
MAX_SONAME = 255
MAX_SECTIONS = 1024
MAX_SECTION_NAMES = 1 << 16

ET_DYN = 3
PT_LOAD = 1
PT_DYNAMIC = 2
DT_NULL = 0
DT_STRTAB = 5
DT_SONAME = 14
PT_GNU_PROPERTY = 0x6474E553
SHT_NOTE = 7
NT_GNU_PROPERTY_TYPE_0 = 5
GNU_PROPERTY_X86_ISA_1_NEEDED = 0xC0008002
MAX_NOTE = 1 << 16

# Program headers stand right behind the ELF header in what linkers write, and the dynamic section is often near.
_FIRST_READ = 2048
_NATIVE = "<" if sys.byteorder == "little" else ">"
_X86 = (3, 62)


class InvalidElf(ValueError):
    """No ELF file, or one outside our limits."""

    __slots__ = ()


class ElfFacts:
    """`soname` (None without DT_SONAME), `elf_class` 32 or 64, `machine` (e_machine), `e_flags`, and `shared`.

    `shared` says ET_DYN with a dynamic section: what ldconfig takes for a library. A position-independent program
    is one too.
    """

    __slots__ = ("e_flags", "elf_class", "machine", "shared", "soname")

    def __init__(self, soname: bytes | None, elf_class: int, machine: int, e_flags: int, shared: bool) -> None:
        self.soname = soname
        self.elf_class = elf_class
        self.machine = machine
        self.e_flags = e_flags
        self.shared = shared


class _Layout:
    """How one class and byte order lays out the header, the program headers and the dynamic entries."""

    __slots__ = ("dynamic", "elf_class", "header", "section", "segment", "wide")

    def __init__(self, elf_class: int, prefix: str) -> None:
        self.elf_class = elf_class
        self.wide = elf_class == 64
        # From e_type on: type, machine, version, entry, phoff, shoff, flags, ehsize, phentsize, phnum.
        self.header = struct.Struct(prefix + ("2HI3QI3H" if self.wide else "2HI3II3H"))
        self.segment = struct.Struct(prefix + ("2I6Q" if self.wide else "8I"))
        self.dynamic = struct.Struct(prefix + ("2Q" if self.wide else "2I"))
        # name, type, flags, address, offset, size, then what we don't ask for.
        self.section = struct.Struct(prefix + ("2I4Q2I2Q" if self.wide else "10I"))


# e_ident: class at 4, byte order at 5.
_LAYOUTS = {
    b"\x7fELF\x01\x01": _Layout(32, "<"),
    b"\x7fELF\x01\x02": _Layout(32, ">"),
    b"\x7fELF\x02\x01": _Layout(64, "<"),
    b"\x7fELF\x02\x02": _Layout(64, ">"),
}


def read(fd: int) -> ElfFacts:
    """The facts of the ELF file open at `fd`. InvalidElf for anything else; OSError as pread gives it."""
    status = posix.fstat(fd)
    if status.st_mode & 0o170000 != 0o100000:
        raise InvalidElf("not a regular file")
    size = status.st_size
    head = posix.pread(fd, _FIRST_READ, 0)
    layout = _LAYOUTS.get(head[:6])
    if layout is None or len(head) < 64:
        raise InvalidElf("not an ELF file")
    kind, machine, _, _, phoff, _, e_flags, _, phentsize, phnum = layout.header.unpack_from(head, 16)
    loads, dynamic = _segments(fd, head, layout, phoff, phentsize, phnum)
    shared = kind == ET_DYN and dynamic is not None
    soname = _soname(fd, size, layout, loads, dynamic) if shared and dynamic else None
    return ElfFacts(soname, layout.elf_class, machine, e_flags, shared)


def _read_exactly(fd: int, length: int, offset: int, what: str) -> bytes:
    data = posix.pread(fd, length, offset) if offset < 1 << 63 else b""
    if len(data) < length:
        raise InvalidElf(f"{what} is outside the file")
    return data


def _segments(
    fd: int, head: bytes, layout: _Layout, phoff: int, phentsize: int, phnum: int
) -> tuple[list[tuple[int, int, int]], tuple[int, int] | None]:
    """Each PT_LOAD as (address, offset, bytes in the file), and the last PT_DYNAMIC as (offset, bytes)."""
    if phnum > MAX_HEADERS:
        raise InvalidElf(f"{phnum} program headers, more than {MAX_HEADERS}")
    if phnum and phentsize != layout.segment.size:
        raise InvalidElf(f"program headers of {phentsize} bytes")
    length = phnum * phentsize
    table = head[phoff : phoff + length]
    if len(table) < length:
        table = _read_exactly(fd, length, phoff, "program header table")
    loads = []
    dynamic = None
    for fields in layout.segment.iter_unpack(table):
        kind = fields[0]
        if kind == PT_LOAD or kind == PT_DYNAMIC:
            # The 64-bit header has p_flags in second place.
            offset, address, _, filesize = fields[2:6] if layout.wide else fields[1:5]
            if kind == PT_LOAD:
                loads.append((address, offset, filesize))
            elif filesize:
                dynamic = offset, filesize
    return loads, dynamic


def _soname(
    fd: int, size: int, layout: _Layout, loads: list[tuple[int, int, int]], dynamic: tuple[int, int]
) -> bytes | None:
    offset, length = dynamic
    if length > MAX_DYNAMIC:
        raise InvalidElf(f"dynamic section of {length} bytes, more than {MAX_DYNAMIC}")
    table = _read_exactly(fd, length - length % layout.dynamic.size, offset, "dynamic section")
    strings = name = None
    for tag, value in layout.dynamic.iter_unpack(table):
        if tag == DT_NULL:
            break
        if tag == DT_STRTAB:
            strings = value
        elif tag == DT_SONAME:
            name = value
    if name is None:
        return None
    if strings is None:
        raise InvalidElf("dynamic section names no string table")
    at = strings
    for address, place, filesize in loads:
        if address <= strings < address + filesize:
            at = strings - address + place
            break
    if at + name >= size:
        raise InvalidElf("soname is outside the file")
    text, end, _ = posix.pread(fd, MAX_SONAME + 1, at + name).partition(b"\0")
    if not end:
        raise InvalidElf(f"soname is longer than {MAX_SONAME} bytes, or the file ends in it")
    return text


def note(fd: int, section: bytes, limit: int) -> tuple[bytes, bytes] | None:
    """Owner and descriptor of the first note in a section of that name; None where there is no such section.

    gABI, chapter 5, "Note Section"; the numbers are in the file's byte order, the parts padded to 4 bytes.
    Raises InvalidElf, also for a section of more than `limit` bytes.
    """
    head = posix.pread(fd, 64, 0)
    layout = _LAYOUTS.get(head[:6])
    if layout is None or len(head) < 64:
        raise InvalidElf("not an ELF file")
    place = _section(fd, head, layout, section)
    if place is None:
        return None
    offset, size = place
    if size > limit:
        raise InvalidElf(f"note of {size} bytes, more than {limit}")
    data = _read_exactly(fd, size, offset, "note")
    if size < 12:
        raise InvalidElf("note is cut short")
    owner_size, size, _ = struct.unpack_from(layout.section.format[0] + "3I", data)
    at = 12 + owner_size + -owner_size % 4
    if at + size > len(data):
        raise InvalidElf("note is cut short")
    return data[12 : 12 + owner_size].rstrip(b"\0"), data[at : at + size]


def _section(fd: int, head: bytes, layout: _Layout, wanted: bytes) -> tuple[int, int] | None:
    """Offset and size of the section of that name that holds notes."""
    prefix = layout.section.format[0]
    (offset,) = struct.unpack_from(prefix + ("Q" if layout.wide else "I"), head, 40 if layout.wide else 32)
    size, count, names = struct.unpack_from(prefix + "3H", head, 58 if layout.wide else 46)
    if not offset or not count:
        return None
    if count > MAX_SECTIONS or names >= count or size != layout.section.size:
        raise InvalidElf(f"{count} sections of {size} bytes, their names in section {names}")
    table = list(layout.section.iter_unpack(_read_exactly(fd, size * count, offset, "section table")))
    if table[names][5] > MAX_SECTION_NAMES:
        raise InvalidElf("section names take too many bytes")
    text = _read_exactly(fd, table[names][5], table[names][4], "section names")
    for fields in table:
        if fields[1] == SHT_NOTE and text[fields[0] : fields[0] + len(wanted) + 1] == wanted + b"\0":
            return fields[4], fields[5]
    return None


def level(fd: int) -> int:
    """The ISA level that an x86 library asks of the CPU, as a cache's glibc-hwcaps entry has it; 0 for any other file.

    Raises OSError as pread gives it.
    """
    head = posix.pread(fd, _FIRST_READ, 0)
    layout = _LAYOUTS.get(head[:6])
    if layout is None or len(head) < 64:
        return 0
    _, machine, _, _, phoff, _, _, _, phentsize, phnum = layout.header.unpack_from(head, 16)
    table = head[phoff : phoff + phnum * phentsize]
    if machine not in _X86 or phentsize != layout.segment.size or len(table) < phnum * phentsize:
        return 0
    word = layout.elf_class // 8
    for fields in layout.segment.iter_unpack(table):
        offset, size = (fields[2], fields[5]) if layout.wide else (fields[1], fields[4])
        # Wrongly aligned notes of old linkers are skipped.
        if fields[0] == PT_GNU_PROPERTY and fields[7] == word and offset < 1 << 63:
            return level_of_notes(posix.pread(fd, min(size, MAX_NOTE), offset), word)
    return 0


def level_of_notes(notes: bytes, word: int) -> int:
    """The ISA level that a PT_GNU_PROPERTY's notes ask of an x86 CPU: the number of the highest bit in
    GNU_PROPERTY_X86_ISA_1_NEEDED (x86-64 psABI, "ISA level"); 0 for none. `word` is what properties are aligned to."""
    at = 0
    while at + 12 < len(notes):
        name_size, size, kind = struct.unpack_from(_NATIVE + "3I", notes, at)
        if name_size == 4 and kind == NT_GNU_PROPERTY_TYPE_0 and notes[at + 12 : at + 16] == b"GNU\0":
            # Only the first such note counts.
            return _level_of_properties(notes[at + 16 : at + 16 + size], size, word)
        at = _aligned(at + 12 + name_size, word)
        at = _aligned(at + size, word)
    return 0


def _level_of_properties(properties: bytes, size: int, word: int) -> int:
    if size < 8 or size % word or len(properties) < size:
        return 0
    at = last = 0
    while size - at >= 8:
        kind, length = struct.unpack_from(_NATIVE + "2I", properties, at)
        at += 8
        # Types stand in ascending order.
        if kind < last or at + length > size or kind > GNU_PROPERTY_X86_ISA_1_NEEDED:
            return 0
        if kind == GNU_PROPERTY_X86_ISA_1_NEEDED:
            needed: int = struct.unpack_from(_NATIVE + "I", properties, at)[0] if length == 4 else 0
            return max(needed.bit_length() - 1, 0)
        last = kind
        at += _aligned(length, word)
    return 0


def _aligned(value: int, word: int) -> int:
    return value + -value % word
