# SPDX-License-Identifier: Apache-2.0
"""Writes small ELF shared objects, so that a driver of a hundred libraries costs no compiler run.

What is written is what ldconfig and the loaders look at, and nothing else: no code, no symbol, no section
table. Layouts: System V gABI, chapters 4 and 5.
"""

from __future__ import annotations

import struct

EM_386 = 3
EM_ARM = 40
EM_X86_64 = 62
EM_AARCH64 = 183

PT_LOAD, PT_DYNAMIC, PT_GNU_STACK = 1, 2, 0x6474E551
PF_R, PF_W = 4, 2
DT_NULL, DT_NEEDED, DT_HASH, DT_STRTAB, DT_SYMTAB, DT_STRSZ, DT_SYMENT, DT_SONAME = 0, 1, 4, 5, 6, 10, 11, 14

PAGE = 0x1000


def shared_object(
    soname: str | None, *, bits: int = 64, machine: int = EM_X86_64, needed: tuple[str, ...] = ()
) -> bytes:
    """A little-endian shared object of class `bits` (32 or 64); `soname` None: without DT_SONAME."""
    wide = bits == 64
    strings = b"\0" + b"".join(name.encode() + b"\0" for name in (*needed, *([soname] if soname else [])))
    header_size, program_size, dynamic_size, symbol_size = (64, 56, 16, 24) if wide else (52, 32, 8, 16)

    offset = 1
    tags = []
    for name in needed:
        tags.append((DT_NEEDED, offset))
        offset += len(name.encode()) + 1
    if soname:
        tags.append((DT_SONAME, offset))

    # One symbol (the null one) and a hash table of one empty bucket: musl's loader wants a hash table.
    table = header_size + 3 * program_size
    hash_at = table + dynamic_size * (len(tags) + 6)
    symbols_at = hash_at + 16 + (-(hash_at + 16)) % 8
    strings_at = symbols_at + symbol_size
    size = strings_at + len(strings)
    tags += [(DT_HASH, hash_at), (DT_STRTAB, strings_at), (DT_SYMTAB, symbols_at), (DT_STRSZ, len(strings))]
    tags += [(DT_SYMENT, symbol_size), (DT_NULL, 0)]

    # The segment is writable because glibc up to 2.34 relocates the dynamic section in place. PT_GNU_STACK
    # is there because its absence asks for an executable stack, which glibc 2.41 refuses in dlopen.
    segments = [
        (PT_LOAD, PF_R | PF_W, 0, size, PAGE),
        (PT_DYNAMIC, PF_R | PF_W, table, dynamic_size * len(tags), 8),
        (PT_GNU_STACK, PF_R | PF_W, 0, 0, 16),
    ]
    out = bytearray(_header(wide, machine, header_size, program_size, len(segments)))
    for kind, flags, start, length, align in segments:
        if wide:
            out += struct.pack("<IIQQQQQQ", kind, flags, start, start, start, length, length, align)
        else:
            out += struct.pack("<IIIIIIII", kind, start, start, start, length, length, flags, align)
    for tag, value in tags:
        out += struct.pack("<qQ" if wide else "<iI", tag, value)
    out += struct.pack("<IIII", 1, 1, 0, 0)
    out += bytes(strings_at - len(out))
    return bytes(out + strings)


def with_note(image: bytes, section: str, owner: bytes, descriptor: bytes) -> bytes:
    """A 64-bit object with a section that holds one note of type 1; the table has that, the names, and the null
    section."""
    names = b"\0.shstrtab\0" + section.encode() + b"\0"
    parts = [len(owner) + 1, len(descriptor), 1]
    note = struct.pack("<3I", *parts) + (owner + b"\0").ljust(-(-parts[0] // 4) * 4, b"\0") + descriptor
    out = bytearray(image + bytes(-len(image) % 8))
    note_at = len(out)
    out += note
    names_at = len(out)
    out += names + bytes(-(len(out) + len(names)) % 8)
    struct.pack_into("<Q", out, 40, len(out))
    struct.pack_into("<3H", out, 58, 64, 3, 1)
    out += bytes(64)
    out += struct.pack("<2I4Q2I2Q", 1, 3, 0, 0, names_at, len(names), 0, 0, 1, 0)
    out += struct.pack("<2I4Q2I2Q", 11, 7, 0, 0, note_at, len(note), 0, 0, 4, 0)
    return bytes(out)


def _header(wide: bool, machine: int, header_size: int, program_size: int, programs: int) -> bytes:
    ident = b"\x7fELF" + bytes((2 if wide else 1, 1, 1)) + bytes(9)
    words = "QQQ" if wide else "III"
    # ET_DYN, version 1; EABI version 5 where ARM wants to know.
    flags = 0x05000400 if machine == EM_ARM else 0
    return ident + struct.pack(
        "<HHI" + words + "IHHHHHH",
        3,
        machine,
        1,
        0,
        header_size,
        0,
        flags,
        header_size,
        program_size,
        programs,
        0,
        0,
        0,
    )
