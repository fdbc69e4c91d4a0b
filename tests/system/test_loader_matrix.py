# SPDX-License-Identifier: Apache-2.0
"""What the loaders of Debian 11, 12 and 13 take from a crafted cache, whole or corrupt.

The facts that `ldcache.merge` and `ldcache.check` stand on. Each release's loader runs in that release's own root, with
the cache mounted over /etc/ld.so.cache in a mount namespace of its own.
"""

from __future__ import annotations

import platform
import struct
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from ldcache import cache as forms
from tests import cachewriter as write
from tests import releases
from tests.cachewriter import Row
from tests.simhost.elfwriter import EM_386, shared_object

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(900),
    pytest.mark.skipif(platform.machine() != "x86_64", reason="needs loaders for x86-64"),
]

RELEASES = ("bullseye", "bookworm", "trixie")
SONAME = "libq.so.1"
LOADER = "/lib64/ld-linux-x86-64.so.2"
CRASH = "crash"
NOTHING = None

V2, V3 = "x86-64-v2", "x86-64-v3"
Result = str | None

A, B = "/mnt/a", "/mnt/b"
PLAIN_A, PLAIN_B = write.row(SONAME, A), write.row(SONAME, B)
TWO = [write.row("libz.so.9", A), PLAIN_A, PLAIN_B, write.row("liba.so.1", A)]


def special(name: str, index: int, level: int = 0, folder: str = A) -> Row:
    return write.hwcaps_row(SONAME, name, index, folder, level)


def path(name: str, folder: str = A) -> str:
    return f"{folder}/glibc-hwcaps/{name}/{SONAME}"


def edited(data: bytes, at: int, *words: int) -> bytes:
    patch = struct.pack(f"<{len(words)}I", *words)
    return data[:at] + patch + data[at + len(patch) :]


def key_of(data: bytes, row: int) -> int:
    """Where the soname's offset stands for an entry."""
    return 48 + 24 * row + 4


WITH_V2 = write.new([special(V2, 0), PLAIN_B], names=[V2.encode()])
DIRECTORY = struct.unpack_from("<I", WITH_V2, 32)[0]
GOOD = write.new(TWO)
FIRST_A, FIRST_B = f"{A}/{SONAME}", f"{B}/{SONAME}"

# Name: cache, then what Debian 11, 12 and 13 open. NOTHING: the cache has no answer, and no default folder has one.
CASES: dict[str, tuple[bytes, Result, Result, Result]] = {
    # Which entry
    "the first of two": (GOOD, FIRST_A, FIRST_A, FIRST_A),
    "flags are compared whole": (
        write.new([Row(PLAIN_A.soname, PLAIN_A.path, 0x10303), PLAIN_B]),
        FIRST_B,
        FIRST_B,
        FIRST_B,
    ),
    "i386's flags are another's": (write.new([Row(PLAIN_A.soname, PLAIN_A.path, 3)]), NOTHING, NOTHING, NOTHING),
    "glibc-hwcaps before plain": (WITH_V2, FIRST_B, path(V2), path(V2)),
    "the best name, not the first": (
        write.new([special(V2, 0), special(V3, 1), PLAIN_B], names=[V2.encode(), V3.encode()]),
        FIRST_B,
        path(V3),
        path(V3),
    ),
    "the first of equal names": (
        write.new([special(V2, 0), special(V2, 0, folder=B), PLAIN_B], names=[V2.encode()]),
        FIRST_B,
        path(V2),
        path(V2),
    ),
    "an unknown name is skipped": (
        write.new([special("zen", 0), PLAIN_B], names=[b"zen"]),
        FIRST_B,
        FIRST_B,
        FIRST_B,
    ),
    "glibc-hwcaps behind plain": (write.new([PLAIN_B, special(V2, 0)], names=[V2.encode()]), FIRST_B, FIRST_B, FIRST_B),
    "an ISA level that no CPU has": (
        write.new([special(V2, 0, 31), PLAIN_B], names=[V2.encode()]),
        FIRST_B,
        FIRST_B,
        FIRST_B,
    ),
    "ISA level 32 acts as 0": (
        write.new([special(V2, 0, 32), PLAIN_B], names=[V2.encode()]),
        FIRST_B,
        path(V2),
        path(V2),
    ),
    "legacy tls": (write.new([write.row(SONAME, A, hwcap=1 << 63), PLAIN_B]), FIRST_A, FIRST_A, FIRST_B),
    "legacy x86_64": (write.new([write.row(SONAME, A, hwcap=2), PLAIN_B]), FIRST_A, FIRST_A, FIRST_B),
    "an OS version above the kernel's": (
        write.new([write.row(SONAME, A, osversion=0x00FF0000), PLAIN_B]),
        FIRST_B,
        FIRST_A,
        FIRST_A,
    ),
    "leading zeros vanish": (
        write.new([Row(b"libq.so.01", b"/mnt/a/libq.so.1"), PLAIN_B]),
        FIRST_A,
        FIRST_A,
        FIRST_A,
    ),
    "a dangling first entry hides the second": (
        write.new([write.row(SONAME, "/mnt/nowhere"), PLAIN_B]),
        NOTHING,
        NOTHING,
        NOTHING,
    ),
    "a dangling glibc-hwcaps entry hides a plain one": (
        write.new([special(V2, 0, folder="/mnt/nowhere"), PLAIN_B], names=[V2.encode()]),
        FIRST_B,
        NOTHING,
        NOTHING,
    ),
    "a file of another class hides the second": (
        write.new([write.row(SONAME, "/mnt/i386"), PLAIN_B]),
        NOTHING,
        NOTHING,
        NOTHING,
    ),
    "a relative path": (write.new([Row(SONAME.encode(), b"mnt/a/libq.so.1")]), *("mnt/a/libq.so.1",) * 3),
    "a path with ..": (write.new([Row(SONAME.encode(), b"/mnt/b/../a/libq.so.1")]), *("/mnt/b/../a/libq.so.1",) * 3),
    "the combined form": (write.combined(TWO), FIRST_A, FIRST_A, FIRST_A),
    "the old form": (write.old(TWO), FIRST_A, FIRST_A, FIRST_A),
    "the form of 2.32": (write.new(TWO, generator=None), FIRST_A, FIRST_A, FIRST_A),
    # Corrupt caches
    "empty": (b"", NOTHING, NOTHING, NOTHING),
    "short": (GOOD[:40], NOTHING, NOTHING, NOTHING),
    "another magic": (b"x" + GOOD[1:], NOTHING, NOTHING, NOTHING),
    "another version": (GOOD.replace(b"cache1.1", b"cache1.2"), NOTHING, NOTHING, NOTHING),
    "byte order 1": (write.new(TWO, mark=1), NOTHING, NOTHING, NOTHING),
    "byte order 3": (write.new(TWO, mark=3), NOTHING, NOTHING, NOTHING),
    "n too big": (write.new(TWO, count=100_000), CRASH, NOTHING, NOTHING),
    "n is 2^31": (write.new(TWO, count=1 << 31), CRASH, NOTHING, NOTHING),
    "a soname behind the end": (edited(GOOD, key_of(GOOD, 1), 1 << 30), NOTHING, NOTHING, NOTHING),
    "a path behind the end": (edited(GOOD, key_of(GOOD, 1) + 4, 1 << 30), FIRST_B, FIRST_B, FIRST_B),
    "string length too short": (write.new(TWO, length=1), FIRST_A, FIRST_A, FIRST_A),
    "string length too long": (write.new(TWO, length=1 << 30), FIRST_A, FIRST_A, FIRST_A),
    "extension elsewhere": (edited(WITH_V2, 32, DIRECTORY + 1), FIRST_B, FIRST_B, FIRST_B),
    "extension behind the end": (edited(WITH_V2, 32, 1 << 30), FIRST_B, FIRST_B, FIRST_B),
    "extension magic": (edited(WITH_V2, DIRECTORY, 1), FIRST_B, FIRST_B, FIRST_B),
    "extension count": (edited(WITH_V2, DIRECTORY + 4, 1 << 28), FIRST_B, FIRST_B, FIRST_B),
    "a section behind the end": (edited(WITH_V2, DIRECTORY + 32, 1 << 30), FIRST_B, FIRST_B, FIRST_B),
    "a name behind the end": (edited(WITH_V2, DIRECTORY + 40, 1 << 30), FIRST_B, CRASH, CRASH),
    "entries out of order": (
        write.new([write.row("liba.so.1", A), write.row("libb.so.1", A), PLAIN_A]),
        NOTHING,
        NOTHING,
        NOTHING,
    ),
}


@pytest.fixture(scope="session")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder, /mnt in each root: the library in many places, and a program's stand-in that needs it."""
    folder = tmp_path_factory.mktemp("loader-matrix")
    for place in ("a", "b", *(f"{one}/glibc-hwcaps/{name}" for one in "ab" for name in (V2, V3, "zen"))):
        (folder / place).mkdir(parents=True)
        (folder / place / SONAME).write_bytes(shared_object(SONAME))
    (folder / "i386").mkdir()
    (folder / "i386" / SONAME).write_bytes(shared_object(SONAME, bits=32, machine=EM_386))
    (folder / "asks").write_bytes(shared_object("asks", needed=(SONAME,)))
    return folder


SCRIPT = """
mount --bind "$2" "$1/mnt"
mount --bind "$3" "$1/etc/ld.so.cache"
exec chroot "$1" /usr/bin/env LD_TRACE_LOADED_OBJECTS=1 "$4" /mnt/asks
"""


def opened(root: Path, libraries: Path, data: bytes, folder: Path) -> Result:
    """The file that this release's loader takes for SONAME."""
    file = folder / "cache"
    file.write_bytes(data)
    command = ["unshare", "--mount", "--propagation", "private", "sh", "-ec", SCRIPT, "sh"]
    done = subprocess.run(
        [*command, root, libraries, file, LOADER], capture_output=True, text=True, check=False, timeout=60
    )
    if done.returncode == -11:
        return CRASH
    assert done.returncode == 0, done.stdout + done.stderr
    for line in done.stdout.splitlines():
        soname, _, rest = line.strip().partition(" => ")
        if soname == SONAME:
            return NOTHING if rest == "not found" else rest.rsplit(" (", 1)[0]
    raise AssertionError(done.stdout)


@pytest.fixture(scope="session")
def loaders(cache: Path) -> Callable[[str], Path]:
    """The root of a release, made at the first question; a skip where it can't be."""

    def root(release: str) -> Path:
        try:
            made = releases.debian(cache, release)
        except RuntimeError as error:
            pytest.skip(str(error))
        (made / "etc/ld.so.cache").touch()
        return made

    return root


def cpu_has_v3() -> bool:
    text = Path("/proc/cpuinfo").read_text()
    return all(f" {flag} " in text for flag in ("avx2", "bmi2", "fma", "movbe"))


@pytest.mark.parametrize("release", RELEASES)
def test_what_a_loader_takes(loaders: Callable[[str], Path], libraries: Path, tmp_path: Path, release: str) -> None:
    if not cpu_has_v3():
        pytest.skip("needs a CPU of level x86-64-v3")
    root = loaders(release)
    column = RELEASES.index(release) + 1
    wrong = {}
    for name, case in CASES.items():
        found = opened(root, libraries, case[0], tmp_path)
        if found != case[column]:
            wrong[name] = (found, case[column])
    assert wrong == {}


def test_what_crashes_a_loader_is_refused() -> None:
    for name, (data, *results) in CASES.items():
        if CRASH in results:
            with pytest.raises(forms.InvalidLdCache):
                forms.parse(data)
                raise AssertionError(name)
