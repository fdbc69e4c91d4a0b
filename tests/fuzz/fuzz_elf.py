# SPDX-License-Identifier: Apache-2.0
"""Shared objects: the strict reader of a container start, and the one that sees a file as ldconfig does."""

from __future__ import annotations

import os


def seeds() -> list[bytes]:
    """Each class, with and without a soname; a.out."""
    from tests.simhost.elfwriter import EM_386, EM_AARCH64, shared_object

    return [
        shared_object("liba.so.1", needed=("libc.so.6",)),
        shared_object(None),
        shared_object("liba.so.1", bits=32, machine=EM_386, needed=("libm.so.6",)),
        shared_object("liba.so.1", bits=32),
        shared_object("liba.so.1", machine=EM_AARCH64),
        b"\xcc\x00" + bytes(80),
    ]


def TestOneInput(data: bytes) -> None:
    """One round; what it raises is a finding."""
    from ldcache import elf, library
    from ldcache.rules import Rules

    fd = os.memfd_create("fuzz")
    try:
        os.write(fd, data)
        try:
            facts = elf.read(fd)
        except elf.InvalidElf:
            facts = None
        for version in ((2, 36), (2, 41)):
            for machine in ("x86_64", "aarch64", "riscv64"):
                library.read(fd, b"libfuzz.so.1", Rules(version, machine))
        assert facts is None or facts.soname is None or len(facts.soname) <= elf.MAX_SONAME
    finally:
        os.close(fd)
