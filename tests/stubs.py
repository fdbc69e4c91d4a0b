# SPDX-License-Identifier: Apache-2.0
"""Folders of real shared objects, built by gcc, and the caches that this machine's ldconfig makes of them."""

from __future__ import annotations

import functools
import os
import platform
import shutil
import subprocess
from pathlib import Path

import pytest

from ldcache import elf
from ldcache.cache import Entry, native_flags
from tests.simhost.compiler import cache_folder

LDCONFIG = "/sbin/ldconfig"

needs_ldconfig = pytest.mark.skipif(not os.path.exists(LDCONFIG), reason=f"needs {LDCONFIG}, which is not there")
needs_gcc = pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc, which is not installed")


@functools.cache
def stub(soname: str | None, bits: int = 64, level: str = "") -> bytes:
    """A shared object without code. `level` is an ISA level it asks for, such as x86-64-v3."""
    out = cache_folder() / "stub.so"
    options = ["-Wl,-soname," + soname] if soname is not None else []
    options += [f"-Wl,-z,{level}"] if level else []
    command = ["gcc", f"-m{bits}", "-shared", "-nostdlib", *options, "-o", str(out), "-xc", os.devnull]
    subprocess.run(command, check=True, capture_output=True)
    return out.read_bytes()


def add(root: Path, path: str, soname: str | None, bits: int = 64, level: str = "") -> None:
    """Put a stub at `path`, a name inside the root."""
    file = root / path.lstrip("/")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(stub(soname, bits, level))


def ldconfig(root: Path, folders: list[str], *options: str) -> bytes:
    """The cache that ldconfig writes in `root` for these folders, in this order, and its own default ones.

    It makes no links, so that a second run finds what the first one found.
    """
    (root / "etc").mkdir(parents=True, exist_ok=True)
    (root / "etc/ld.so.conf").write_text("".join(f"{folder}\n" for folder in folders))
    command = [LDCONFIG, "-X", "-i", "-r", str(root), *options]
    subprocess.run(command, check=True, capture_output=True)
    return (root / "etc/ld.so.cache").read_bytes()


def version() -> tuple[int, int]:
    """glibc version of the ldconfig at hand."""
    done = subprocess.run([LDCONFIG, "--version"], check=True, capture_output=True, text=True)
    major, minor = done.stdout.splitlines()[0].rsplit(" ", 1)[1].split(".")
    return int(major), int(minor)


def version_text() -> str:
    """The same as `--like` takes it."""
    return ".".join(map(str, version()))


def version_or_none() -> tuple[int, int]:
    """The same, (0, 0) where there is no ldconfig."""
    return version() if os.path.exists(LDCONFIG) else (0, 0)


def can_compare() -> bool:
    """Whether a real ldconfig is here whose rules for x86-64 ours follow, and gcc for stubs."""
    return version_or_none() >= (2, 36) and is_x86() and shutil.which("gcc") is not None


def can_build_32_bits() -> bool:
    try:
        stub("lib32.so", 32)
    except subprocess.CalledProcessError:
        return False
    return True


def entries(root: Path, folder: str) -> list[Entry]:
    """What ldconfig lists of a folder of regular files, in its order: reverse readdir order, then glibc-hwcaps."""
    found = _listed(root, folder, None)
    hwcaps = root / folder.lstrip("/") / "glibc-hwcaps"
    for name in reversed(os.listdir(hwcaps)) if hwcaps.is_dir() else []:
        found += _listed(root, folder, name)
    return found


def _listed(root: Path, folder: str, hwcaps: str | None) -> list[Entry]:
    inside = folder if hwcaps is None else f"{folder}/glibc-hwcaps/{hwcaps}"
    found: dict[bytes, Entry] = {}
    with os.scandir(root / inside.lstrip("/")) as listing:
        files = [file for file in listing if file.is_file()]
    for file in reversed(files):
        fd = os.open(file.path, os.O_RDONLY)
        facts = elf.read(fd)
        os.close(fd)
        soname = facts.soname if facts.soname is not None else os.fsencode(file.name)
        flags = native_flags(facts.elf_class, facts.machine)
        name = soname if hwcaps is None else os.fsencode(file.name)
        path = os.fsencode(inside) + b"/" + name
        if hwcaps is None:
            found.setdefault(soname, Entry(soname, path, flags))
        else:
            found.setdefault(soname, Entry(soname, path, flags, 1 << 62, os.fsencode(hwcaps)))
    return list(found.values())


def is_x86() -> bool:
    """Whether this machine's ldconfig is of the x86 family, whose rules differ from all others'."""
    return platform.machine() in ("x86_64", "i686")
