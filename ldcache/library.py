# SPDX-License-Identifier: Apache-2.0
"""A file as ldconfig sees it: whether it counts as a library, its soname, flags and ISA level.

Follows `process_file` and `process_elf_file` (glibc elf/readlib.c, elf/readelflib.c and x86's) in what they accept, odd
things too, where `ldcache.elf` is strict. Reads by `pread` alone. ldconfig maps the file, so that what lies behind its
end reads as zeros up to the page's end; here it reads as zeros, too.
"""

from __future__ import annotations

import os
import struct
import sys

from ldcache.cache import native_flags
from ldcache.elf import (
    DT_NULL,
    DT_SONAME,
    DT_STRTAB,
    ET_DYN,
    MAX_DYNAMIC,
    MAX_NOTE,
    PT_DYNAMIC,
    PT_GNU_PROPERTY,
    PT_LOAD,
    level_of_notes,
)
from ldcache.rules import Rules

PT_INTERP = 3
DT_NEEDED = 1

MAX_NAME = 4096
_SMALLEST = 64
_MACHINE_386 = 3
_MACHINE_X86_64 = 62
_ELF_OLD_I386 = 1
_LIBC6 = 3
# First two bytes of a.out files that are paged in, ZMAGIC and QMAGIC.
_AOUT = (b"\x0b\x01", b"\xcc\x00")

_INTERPRETERS = (
    b"/lib/ld-linux-x86-64.so.2",
    b"/lib/ld-linux.so.2",
    b"/libx32/ld-linux-x32.so.2",
    b"/lib64/ld-linux-x86-64.so.2",
)
_LIBC_NAMES = (b"libc.so.6", b"libm.so.6")
_POINTER = (1 << 64) - 1
_NATIVE = "<" if sys.byteorder == "little" else ">"


class Library:
    """`soname`, `flags` as in a cache entry, `level`: the ISA level that it asks of an x86 CPU, 0 for none.

    `made_up` says that the soname is of an a.out file, which has none: ldconfig takes it from the file's name.
    """

    __slots__ = ("flags", "level", "made_up", "soname")

    def __init__(self, soname: bytes, flags: int, level: int = 0, *, made_up: bool = False) -> None:
        self.soname = soname
        self.made_up = made_up
        self.flags = flags
        self.level = level


class _Refused(Exception):
    """ldconfig passes over this file."""


def read(fd: int, name: bytes, rules: Rules) -> Library | None:
    """The library open at `fd`, a regular file of that name in its folder. None for what ldconfig passes over."""
    size = os.fstat(fd).st_size
    if size < _SMALLEST:
        return None
    file = _File(fd, size)
    head = file.read(0, 64)
    if head[:2] in _AOUT:
        return Library(_aout_soname(name), rules.aout_flags, made_up=True)
    if head[:4] != b"\x7fELF" or struct.unpack_from(_NATIVE + "H", head, 16)[0] != ET_DYN:
        return None
    try:
        return _read_elf(file, head, name, rules)
    except _Refused:
        return None


def _aout_soname(name: bytes) -> bytes:
    """The name up to its major number: liba.so.1.2 gives liba.so.1."""
    base, so, rest = name.partition(b".so.")
    return base + so + rest.partition(b".")[0] if so else name


class _File:
    __slots__ = ("fd", "size")

    def __init__(self, fd: int, size: int) -> None:
        self.fd = fd
        self.size = size

    def read(self, at: int, length: int) -> bytes:
        """Exactly so many bytes; behind the file's end they are zero, and an offset beyond it is refused."""
        if not 0 <= at <= self.size:
            raise _Refused
        data = os.pread(self.fd, length, at)
        return data + bytes(length - len(data))

    def string(self, at: int) -> bytes:
        if not 0 <= at <= self.size:
            raise _Refused
        return os.pread(self.fd, MAX_NAME, at).partition(b"\0")[0]


class _Width:
    """How the two ELF classes differ: struct formats, and the mask of an address."""

    __slots__ = ("bits", "dynamic", "header", "mask", "segment", "word")

    def __init__(self, bits: int) -> None:
        wide = bits == 64
        self.bits = bits
        self.word = bits // 8
        self.mask = (1 << bits) - 1
        # From e_machine on: machine, version, entry, phoff, shoff, flags, ehsize, phentsize, phnum.
        self.header = struct.Struct(_NATIVE + ("HI3QI3H" if wide else "HI3II3H"))
        self.segment = struct.Struct(_NATIVE + ("2I6Q" if wide else "8I"))
        self.dynamic = struct.Struct(_NATIVE + ("2Q" if wide else "2I"))


_WIDTHS = {1: _Width(32), 2: _Width(64)}


class _Segment:
    __slots__ = ("address", "align", "kind", "offset", "size")

    def __init__(self, fields: tuple[int, ...], wide: bool) -> None:
        self.kind = fields[0]
        # The 64-bit header has p_flags in second place, the 32-bit one in the last but one.
        self.offset, self.address, _, self.size = fields[2:6] if wide else fields[1:5]
        self.align = fields[7]


def _read_elf(file: _File, head: bytes, name: bytes, rules: Rules) -> Library:
    width = _WIDTHS.get(head[4])
    if width is None:
        raise _Refused
    machine, _, _, phoff, _, e_flags, _, _, phnum = width.header.unpack_from(head, 18)
    if rules.x86 and (width.bits, machine) not in ((64, _MACHINE_X86_64), (32, _MACHINE_X86_64), (32, _MACHINE_386)):
        raise _Refused
    segments = _segments(file, width, phoff, phnum)
    guess = _guess(file, segments)
    soname, guess = _names(file, width, segments, guess, rules)
    flags = _flags(width, machine, e_flags, guess, rules)
    level = _level(file, width, segments) if rules.x86 else 0
    # ldconfig makes up the missing soname from the file's name.
    return Library(name if soname is None else soname, flags, level)


def _flags(width: _Width, machine: int, e_flags: int, guess: int, rules: Rules) -> int:
    if rules.x86 and machine == _MACHINE_386:
        return guess if rules.guesses_i386 else _LIBC6
    if rules.machine == "aarch64" and width.bits == 64:
        # Whatever e_machine says (sysdeps/unix/sysv/linux/aarch64/readelflib.c).
        return native_flags(64, 183)
    if rules.machine.startswith(("aarch64", "armv")) and width.bits == 32:
        return native_flags(32, 40, e_flags)
    try:
        return native_flags(width.bits, machine, e_flags)
    except ValueError as error:
        raise _Refused from error


def _segments(file: _File, width: _Width, phoff: int, phnum: int) -> list[_Segment]:
    size = width.segment.size
    if phnum and phoff + size * (phnum - 1) > file.size:
        raise _Refused
    table = file.read(phoff, phnum * size)
    return [_Segment(fields, width.bits == 64) for fields in width.segment.iter_unpack(table)]


def _guess(file: _File, segments: list[_Segment]) -> int:
    """What the interpreter tells of an i386 file's flags."""
    guess = _ELF_OLD_I386
    for segment in segments:
        if segment.kind == PT_INTERP and file.string(segment.offset) in _INTERPRETERS:
            guess = _LIBC6
    return guess


def _names(file: _File, width: _Width, segments: list[_Segment], guess: int, rules: Rules) -> tuple[bytes | None, int]:
    """DT_SONAME, and the flags of an i386 file. Up to 2.36 the walk ends when both are known, later at a soname."""
    dynamic = [segment for segment in segments if segment.kind == PT_DYNAMIC]
    # The last one counts.
    if not dynamic or not dynamic[-1].size:
        raise _Refused
    # ldconfig keeps the offset in 32 bits.
    tags = _tags(file, width, dynamic[-1].offset & 0xFFFFFFFF)
    strings = _strings(file, width, segments, tags)
    soname = None
    for tag, value in tags:
        # Since 2.37 what a library needs isn't looked at.
        if tag != DT_SONAME and (tag != DT_NEEDED or not rules.guesses_i386):
            continue
        name = file.string(strings + value & _POINTER)
        if tag == DT_SONAME:
            soname = name
        elif name in _LIBC_NAMES and guess == _ELF_OLD_I386:
            guess = _LIBC6
        if soname is not None and (guess != _ELF_OLD_I386 or not rules.guesses_i386):
            break
    return soname, guess


def _tags(file: _File, width: _Width, at: int) -> list[tuple[int, int]]:
    """The dynamic section up to DT_NULL, which alone ends it: p_filesz doesn't."""
    size = width.dynamic.size
    tags: list[tuple[int, int]] = []
    data = b""
    for number in range(MAX_DYNAMIC // size):
        place = number * size % 4096
        if not place:
            data = file.read(at + number * size, 4096)
        tag, value = width.dynamic.unpack_from(data, place)
        if tag == DT_NULL:
            return tags
        tags.append((tag, value))
    raise _Refused


def _strings(file: _File, width: _Width, segments: list[_Segment], tags: list[tuple[int, int]]) -> int:
    """Offset of the string table: mapped by the first PT_LOAD that holds its address, else taken as an offset."""
    address = next((value for tag, value in tags if tag == DT_STRTAB), None)
    if address is None:
        raise _Refused
    for segment in segments:
        if segment.kind == PT_LOAD and segment.address <= address < segment.address + segment.size:
            address = _mapped(address, segment.address - segment.offset & width.mask, width)
            break
    if address > file.size:
        raise _Refused
    return address


def _mapped(address: int, shift: int, width: _Width) -> int:
    """An address as an offset. As in C: all ones is ldconfig's mark for no shift, and pointers have 64 bits."""
    if shift == width.mask:
        return address
    return address - shift & _POINTER


def _level(file: _File, width: _Width, segments: list[_Segment]) -> int:
    """Number of the highest bit in GNU_PROPERTY_X86_ISA_1_NEEDED; 0 without one, or with none set."""
    level = 0
    for segment in segments:
        # Wrongly aligned notes of old linkers are skipped.
        if segment.kind == PT_GNU_PROPERTY and segment.align == width.word:
            level = level_of_notes(file.read(segment.offset, min(segment.size, MAX_NOTE)), width.word) or level
    return level
