# SPDX-License-Identifier: Apache-2.0
"""`ldcache check`: one line for each thing that doesn't hold."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ldcache import cli
from tests import cachewriter as write
from tests import libraryfolders, stubs
from tests.simhost.elfwriter import EM_386, EM_AARCH64, shared_object

Capture = pytest.CaptureFixture[str]

A, B = "/opt/a", "/opt/b"


def put(root: Path, path: str, bits: int = 64, machine: int = 62, soname: str | None = None) -> None:
    file = root / path.lstrip("/")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(shared_object(soname or file.name, bits=bits, machine=machine))


def checked(root: Path, capture: Capture, data: bytes | None = None, *, later: bool = False) -> tuple[list[str], int]:
    """The lines for a cache that is newer than all folders; `later`: older than they are."""
    file = root / "etc/ld.so.cache"
    file.parent.mkdir(exist_ok=True)
    if data is not None:
        file.write_bytes(data)
    for folder, _, _ in os.walk(root):
        os.utime(folder, ns=(0, 2_000_000_000))
    os.utime(file, ns=(0, 1_999_999_999 if later else 2_000_000_000))
    status = cli.main(["check", "-r", str(root), "-C", "/etc/ld.so.cache"])
    captured = capture.readouterr()
    assert captured.err == ""
    return captured.out.splitlines(), status


def test_nothing(tmp_path: Path, capsys: Capture) -> None:
    put(tmp_path, "/opt/a/liba.so.1")
    put(tmp_path, "/opt/a/glibc-hwcaps/x86-64-v3/liba.so.1")
    put(tmp_path, "/opt/b/liba.so.1", 32, EM_386)
    rows = [
        write.hwcaps_row("liba.so.1", "x86-64-v3", 0, A),
        write.row("liba.so.1", A),
        # What ldconfig up to 2.36 says of an i386 library that needs nothing.
        write.row("liba.so.1", B, flags=1),
    ]
    assert checked(tmp_path, capsys, write.new(rows, names=[b"x86-64-v3"])) == ([], 0)
    assert checked(tmp_path, capsys, b"") == ([], 0)


def test_files(tmp_path: Path, capsys: Capture) -> None:
    put(tmp_path, "/opt/a/libarm.so.1", machine=EM_AARCH64)
    put(tmp_path, "/opt/a/libold.so.1", 32, EM_386)
    put(tmp_path, "/opt/a/libppc.so.1", machine=23)
    (tmp_path / "opt/a/libtext.so.1").write_text("no library" * 100)
    os.mkfifo(tmp_path / "opt/a/libfifo.so.1")
    (tmp_path / "opt/a/libout.so.1").symlink_to("../../../../../../../../etc/hostname")
    names = ["libtext.so.1", "libppc.so.1", "libout.so.1", "libold.so.1", "libgone.so.1", "libfifo.so.1", "libarm.so.1"]
    lines, status = checked(tmp_path, capsys, write.new([write.row(name, A) for name in names]))
    assert [line for line in lines if not line.startswith("not listed")] == [
        "no library (not an ELF file): libtext.so.1 => /opt/a/libtext.so.1",
        "of another class (no loader cache flags are known for 64-bit ELF machine 23): "
        "libppc.so.1 => /opt/a/libppc.so.1",
        "gone (No such file or directory): libout.so.1 => /opt/a/libout.so.1",
        "of another class (the file is 0x3, the entry says 0x303): libold.so.1 => /opt/a/libold.so.1",
        "gone (No such file or directory): libgone.so.1 => /opt/a/libgone.so.1",
        "gone (not a regular file: Invalid argument): libfifo.so.1 => /opt/a/libfifo.so.1",
        "of another class (the file is 0xa03, the entry says 0x303): libarm.so.1 => /opt/a/libarm.so.1",
    ]
    assert status == 3


def test_shadowed(tmp_path: Path, capsys: Capture) -> None:
    for folder in (A, B):
        put(tmp_path, f"{folder}/liba.so.1")
        put(tmp_path, f"{folder}/glibc-hwcaps/x86-64-v3/liba.so.1")
        put(tmp_path, f"{folder}/glibc-hwcaps/x86-64-v2/liba.so.1")
    put(tmp_path, "/opt/b/liba.so.01")
    rows = [
        write.hwcaps_row("liba.so.1", "x86-64-v2", 0, A),
        write.hwcaps_row("liba.so.1", "x86-64-v2", 0, B),
        write.hwcaps_row("liba.so.1", "x86-64-v3", 1, A, level=2),
        # Another level: a CPU may take the one and not the other.
        write.hwcaps_row("liba.so.1", "x86-64-v3", 1, B, level=1),
        write.row("liba.so.01", B),
        write.row("liba.so.1", A),
        write.row("liba.so.1", B),
    ]
    lines, status = checked(tmp_path, capsys, write.new(rows, names=[b"x86-64-v2", b"x86-64-v3"]))
    first = "shadowed by /opt/a/glibc-hwcaps/x86-64-v2/liba.so.1"
    assert lines == [
        f"{first}: liba.so.1 => /opt/b/glibc-hwcaps/x86-64-v2/liba.so.1",
        "shadowed by /opt/b/liba.so.01: liba.so.1 => /opt/a/liba.so.1",
        "shadowed by /opt/b/liba.so.01: liba.so.1 => /opt/b/liba.so.1",
    ]
    assert status == 3


def test_a_hwcaps_entry_behind_a_plain_one(tmp_path: Path, capsys: Capture) -> None:
    put(tmp_path, "/opt/a/liba.so.1")
    put(tmp_path, "/opt/a/glibc-hwcaps/x86-64-v3/liba.so.1")
    rows = [write.row("liba.so.1", A), write.hwcaps_row("liba.so.1", "x86-64-v3", 0, A)]
    lines, status = checked(tmp_path, capsys, write.new(rows, names=[b"x86-64-v3"]))
    path = "/opt/a/glibc-hwcaps/x86-64-v3/liba.so.1"
    assert lines == [f"shadowed by /opt/a/liba.so.1: liba.so.1 => {path}", f"out of order: liba.so.1 => {path}"]
    assert status == 3


def test_stale(tmp_path: Path, capsys: Capture) -> None:
    put(tmp_path, "/opt/a/liba.so.1")
    put(tmp_path, "/opt/a/libnew.so.1.0", soname="libnew.so.1")
    put(tmp_path, "/opt/a/glibc-hwcaps/x86-64-v3/libnew.so.1")
    data = write.new([write.row("liba.so.1", A)])
    missing = [
        "not listed: libnew.so.1 => /opt/a/libnew.so.1",
        "not listed: libnew.so.1 => /opt/a/glibc-hwcaps/x86-64-v3/libnew.so.1",
    ]
    assert checked(tmp_path, capsys, data) == (missing, 3)
    newer = [f"stale: /opt/a{inside} is newer than the cache" for inside in ("", "/glibc-hwcaps/x86-64-v3")]
    assert checked(tmp_path, capsys, data, later=True) == (newer + missing, 3)


def test_odd_names_are_quoted(tmp_path: Path, capsys: Capture) -> None:
    lines, _ = checked(tmp_path, capsys, write.new([write.Row(b"a\x1b[2J\n", b"/x\r")]))
    assert lines == [r"gone (No such file or directory): a\x1b[2J\x0a => /x\x0d"]


@pytest.mark.skipif(not stubs.can_compare(), reason="plants libraries for x86-64, and needs gcc")
@pytest.mark.parametrize("seed", range(8))
def test_a_cache_that_was_just_built_lacks_nothing(tmp_path: Path, capsys: Capture, seed: int) -> None:
    """Its libraries may shadow each other, and a name may stand in the cache whose link -X doesn't make."""
    libraryfolders.plant(tmp_path, f"check {seed}", odd=0)
    assert cli.main(["build", "-X", "-r", str(tmp_path), "-C", "/etc/ld.so.cache", "-f", "/nowhere", A, B]) == 0
    capsys.readouterr()
    lines = checked(tmp_path, capsys)[0]
    assert [line for line in lines if line.startswith(("stale", "not listed", "out of order"))] == []


def test_no_cache(tmp_path: Path, capsys: Capture) -> None:
    assert cli.main(["check", "-r", str(tmp_path)]) == 1
    assert capsys.readouterr().err.splitlines() == [
        "nvhook: error: cannot read the loader cache /etc/ld.so.cache: No such file or directory",
        "  remedy: name a readable cache with -C",
    ]
