# SPDX-License-Identifier: Apache-2.0
"""Soname and machine of shared objects: gcc's, this machine's, cut and changed ones."""

from __future__ import annotations

import os
import random
import shutil
import struct
import subprocess
from pathlib import Path

import pytest

from ldcache import elf
from ldcache.elf import ElfFacts, InvalidElf
from tests import stubs

LIBRARIES = [Path(folder) for folder in ("/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64")]


def facts_of(path: Path) -> ElfFacts:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return elf.read(fd)
    finally:
        os.close(fd)


def read(data: bytes) -> ElfFacts:
    fd = os.memfd_create("elf", os.MFD_CLOEXEC)
    try:
        os.write(fd, data)
        return elf.read(fd)
    finally:
        os.close(fd)


def written(
    *,
    wide: bool = True,
    order: str = "<",
    soname: bytes = b"libx.so.1",
    dynamic: list[tuple[int, int]] | None = None,
    address: int = 0x10000,
    kind: int = 3,
    phnum: int = 3,
    phentsize: int | None = None,
    dynamic_size: int | None = None,
) -> bytes:
    """A shared object of which only the dynamic section and its strings exist, mapped from `address` on.

    The strings are at address + 0x800, the soname 1 byte into them. The first PT_DYNAMIC is a decoy.
    """
    entries = [(5, address + 0x800), (14, 1), (0, 0)] if dynamic is None else dynamic
    table = b"".join(struct.pack(order + ("2Q" if wide else "2I"), *entry) for entry in entries)
    size = len(table) if dynamic_size is None else dynamic_size

    def segment(kind: int, offset: int, where: int, length: int) -> bytes:
        if wide:
            return struct.pack(order + "2I6Q", kind, 4, offset, where, where, length, length, 8)
        return struct.pack(order + "8I", kind, offset, where, where, length, length, 4, 4)

    segments = segment(2, 8, 0, 8) + segment(1, 0, address, 0xA00) + segment(2, 0x400, address + 0x400, size)
    ident = b"\x7fELF" + bytes([2 if wide else 1, 1 if order == "<" else 2, 1]) + bytes(9)
    start = 64 if wide else 52
    entry_size = len(segments) // 3 if phentsize is None else phentsize
    head = ident + struct.pack(
        order + ("2HI3QI6H" if wide else "2HI3II6H"),
        *(kind, 62 if wide else 3, 1, 0, start, 0, 0x12345, start, entry_size, phnum, 0, 0, 0),
    )
    image = bytearray(0xA00)
    image[: len(head)] = head
    image[start : start + len(segments)] = segments
    image[0x400 : 0x400 + len(table)] = table
    image[0x800 : 0x802 + len(soname)] = b"\0" + soname + b"\0"
    return bytes(image)


@pytest.mark.parametrize("wide", [True, False])
@pytest.mark.parametrize("order", ["<", ">"])
def test_every_class_and_byte_order(wide: bool, order: str) -> None:
    facts = read(written(wide=wide, order=order))
    assert (facts.soname, facts.shared, facts.e_flags) == (b"libx.so.1", True, 0x12345)
    assert (facts.elf_class, facts.machine) == ((64, 62) if wide else (32, 3))


def test_string_table_address_outside_any_segment_is_an_offset() -> None:
    assert read(written(dynamic=[(14, 1), (5, 0x800), (0, 0)])).soname == b"libx.so.1"


def test_dynamic_entries_end_at_null() -> None:
    assert read(written(dynamic=[(5, 0x800), (0, 0), (14, 1)])).soname is None
    # ... or with the section.
    assert read(written(dynamic=[(5, 0x800), (14, 1)])).soname == b"libx.so.1"


def test_no_soname_and_an_empty_one() -> None:
    assert read(written(dynamic=[(5, 0x800), (0, 0)])).soname is None
    assert read(written(dynamic=[(5, 0x800), (14, 0), (0, 0)])).soname == b""


def test_a_soname_of_any_bytes() -> None:
    for soname in (b"a/b", b"\xff\n", b"a" * 255):
        assert read(written(soname=soname)).soname == soname


def test_only_shared_objects_have_a_soname() -> None:
    for kind in (1, 2, 4):
        facts = read(written(kind=kind))
        assert (facts.soname, facts.shared) == (None, False)
    facts = read(written(phnum=0))
    assert (facts.soname, facts.shared) == (None, False)


def test_the_last_dynamic_section_counts() -> None:
    """The first one of `written` has 8 bytes, not even one entry."""
    facts = read(written(phnum=2))
    assert (facts.soname, facts.shared) == (None, True)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "not an ELF file"),
        (b"\x7fELF\x02\x01\x01" + bytes(56), "not an ELF file"),
        (b"#!/bin/sh" + bytes(100), "not an ELF file"),
        (b"\x7fELF\x03\x01\x01" + bytes(100), "not an ELF file"),
        (b"\x7fELF\x02\x03\x01" + bytes(100), "not an ELF file"),
        (written(phnum=129), "129 program headers"),
        (written(phnum=0xFFFF), "65535 program headers"),
        (written(phentsize=55), "program headers of 55 bytes"),
        (written()[:64].replace(struct.pack("<Q", 64), struct.pack("<Q", 1 << 63)), "program header table"),
        (written()[:64].replace(struct.pack("<Q", 64), struct.pack("<Q", (1 << 64) - 1)), "program header table"),
        (written(dynamic_size=(1 << 20) + 1), "more than 1048576"),
        (written(dynamic_size=(1 << 64) - 1), "more than 1048576"),
        (written(dynamic_size=1 << 20), "dynamic section is outside"),
        (written(dynamic=[(14, 1), (0, 0)]), "no string table"),
        (written(dynamic=[(5, 0xA00), (14, 0), (0, 0)]), "soname is outside"),
        (written(dynamic=[(5, (1 << 64) - 1), (14, (1 << 64) - 1), (0, 0)]), "soname is outside"),
        (written(soname=b"a" * 256), "longer than 255"),
        (written()[:0x806], "or the file ends in it"),
    ],
)
def test_refused(data: bytes, message: str) -> None:
    with pytest.raises(InvalidElf, match=message):
        read(data)


def test_what_is_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for path in (tmp_path, tmp_path / "fifo", Path("/dev/zero")):
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        with pytest.raises(InvalidElf, match="not a regular file"):
            elf.read(fd)
        os.close(fd)


@pytest.mark.parametrize("wide", [True, False])
def test_truncations(wide: bool) -> None:
    whole = written(wide=wide)
    last = 0x802 + len(b"libx.so.1")
    for length in range(0, last, 3):
        with pytest.raises(InvalidElf):
            read(whole[:length])
    assert read(whole[:last]).soname == b"libx.so.1"


def mutations(seed: str, rounds: int) -> None:
    random_ = random.Random(seed)
    for number in range(rounds):
        data = bytearray(written(wide=number % 2 == 0, order="<>"[number // 2 % 2]))
        for _ in range(random_.randrange(1, 4)):
            at = random_.randrange(0x440) if random_.random() < 0.9 else random_.randrange(len(data))
            data[at] = random_.choice((0, 1, 0x7F, 0x80, 0xFF, random_.randrange(256)))
        try:
            facts = read(bytes(data))
        except InvalidElf:
            continue
        assert facts.soname is None or len(facts.soname) <= elf.MAX_SONAME


def test_mutations() -> None:
    mutations("short", 4000)


@pytest.mark.long
def test_many_mutations() -> None:
    mutations("long", 1_000_000)


# What compilers write -----------------------------------------------------------------------------------


@stubs.needs_gcc
def test_gcc(tmp_path: Path) -> None:
    machine = os.uname().machine
    expected = {"x86_64": 62, "aarch64": 183}.get(machine)
    file = tmp_path / "file"
    file.write_bytes(stubs.stub("libcuda.so.1"))
    facts = facts_of(file)
    assert (facts.soname, facts.elf_class, facts.shared) == (b"libcuda.so.1", 64, True)
    assert facts.machine == expected or expected is None
    file.write_bytes(stubs.stub(None))
    assert (facts_of(file).soname, facts_of(file).shared) == (None, True)


@stubs.needs_gcc
def test_gcc_32_bits(tmp_path: Path) -> None:
    if not stubs.can_build_32_bits():
        pytest.skip("this gcc can't link 32-bit x86 code")
    file = tmp_path / "file"
    file.write_bytes(stubs.stub("libcuda.so.1", 32))
    facts = facts_of(file)
    assert (facts.soname, facts.elf_class, facts.machine, facts.shared) == (b"libcuda.so.1", 32, 3, True)


@stubs.needs_gcc
def test_gcc_programs_and_objects(tmp_path: Path) -> None:
    source = tmp_path / "start.c"
    source.write_text("void _start(void) { for (;;) ; }\n")
    shared = {"-c": False, "-no-pie": False, "-static": False, "-pie": True}
    for option, expected in shared.items():
        out = tmp_path / "out"
        subprocess.run(["gcc", "-nostdlib", "-fPIE", option, "-o", str(out), str(source)], check=True)
        assert (facts_of(out).shared, facts_of(out).soname) == (expected, None), option


@pytest.mark.skipif(shutil.which("readelf") is None, reason="needs readelf, which is not installed")
def test_this_machines_libraries() -> None:
    found = [file for folder in LIBRARIES if folder.is_dir() for file in sorted(folder.glob("*.so.*"))]
    files = [file for file in found if file.is_file() and not file.is_symlink()][:60]
    if not files:
        pytest.skip("this machine has no libraries where they are looked for")
    for file in files:
        done = subprocess.run(["readelf", "-dW", str(file)], capture_output=True, check=True)
        named = [line.split(b"[")[1].split(b"]")[0] for line in done.stdout.splitlines() if b"(SONAME)" in line]
        assert facts_of(file).soname == (named[0] if named else None), file
