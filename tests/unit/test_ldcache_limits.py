# SPDX-License-Identifier: Apache-2.0
"""Whatever stands in place of a cache, a library or a configuration: each command ends soon, small and with one error.

Each runs in a process of its own, whose processor time and peak memory the kernel tells.
"""

from __future__ import annotations

import os
import struct
import subprocess
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

from ldcache import cache, merge
from ldcache.cache import Entry
from tests import cachewriter as write
from tests.simhost.elfwriter import shared_object

SECONDS = 1.0
MEGABYTES = 100

VERBS = {
    "print": ["print"],
    "check": ["check"],
    "merge": ["merge", "--folder", "/usr/lib"],
}

PROGRAM = """
import resource, sys
from ldcache.cli import main
try:
    status = main(sys.argv[1:])
finally:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    # VmHWM begins anew at exec; ru_maxrss would be at least what the parent had.
    peak = next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM"))
    open(3, "w").write(f"{usage.ru_utime + usage.ru_stime} {peak}")
sys.exit(status)
"""


def run(tree: Path, words: list[str]) -> tuple[int, str]:
    """Status and stderr of one command, which keeps within the bounds. It may map 2 GiB at the most."""
    reading, writing = os.pipe()
    shell = 'ulimit -v 2000000; exec 3>&"$0"; exec "$@"'
    command = ["bash", "-c", shell, str(writing), sys.executable, "-c", PROGRAM, *words]
    try:
        done = subprocess.run(
            command, cwd=tree, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=20, pass_fds=[writing]
        )
    finally:
        os.close(writing)
    with open(reading) as pipe:
        seconds, kilobytes = map(float, pipe.read().split())
    assert seconds < SECONDS
    assert kilobytes / 1024 < MEGABYTES
    assert "Traceback" not in done.stderr
    return done.returncode, done.stderr


def sparse(path: Path, head: bytes = b"") -> None:
    with path.open("wb") as file:
        file.write(head)
        file.truncate(2 << 30)


def many_entries(path: Path) -> None:
    """A header that says ten million, and the room for them."""
    head = cache.MAGIC_NEW + struct.pack("<II", 10_000_000, 48) + b"\2" + bytes(19)
    with path.open("wb") as file:
        file.write(head)
        file.truncate(48 + 24 * 10_000_000 + 48)


ODD: dict[str, Callable[[Path], object]] = {
    "sparse": sparse,
    "sparse cache": lambda path: sparse(path, write.new([write.row("liba.so.1")])),
    "fifo": os.mkfifo,
    "folder": Path.mkdir,
    "ten million entries": many_entries,
    "ten million entries said": lambda path: path.write_bytes(write.new([write.row("liba.so.1")], count=10_000_000)),
    "a link to itself": lambda path: path.symlink_to(path.name),
    "text": lambda path: path.write_text("no cache"),
}


@pytest.fixture
def image(tmp_path: Path) -> Path:
    """A root with one library."""
    (tmp_path / "etc").mkdir()
    (tmp_path / "usr/lib").mkdir(parents=True)
    (tmp_path / "usr/lib/liba.so.1").write_bytes(shared_object("liba.so.1"))
    return tmp_path


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("name", ODD)
def test_in_place_of_a_cache(tree: Path, image: Path, verb: str, name: str) -> None:
    ODD[name](image / "etc/ld.so.cache")
    root = [] if verb == "print" else ["-r", str(image)]
    file = str(image / "etc/ld.so.cache") if verb == "print" else "/etc/ld.so.cache"
    status, error = run(tree, [*VERBS[verb], *root, "-C", file])
    if verb == "print" and name == "fifo":
        # ldconfig takes it for an empty cache.
        assert (status, error) == (0, "")
        return
    lines = error.splitlines()
    assert (status, len(lines)) == (1, 2)
    assert lines[0].startswith("nvhook: error: cannot read the loader cache ")


@pytest.mark.parametrize("name", ODD)
def test_in_place_of_what_build_reads_and_writes(tree: Path, image: Path, name: str) -> None:
    """A library or a configuration that is none is passed over; a cache is replaced, except by a folder's name."""
    for path in ("usr/lib/libodd.so.1", "etc/ld.so.conf", "etc/ld.so.cache"):
        ODD[name](image / path)
    status, error = run(tree, ["build", "-r", str(image), "-C", "/etc/ld.so.cache"])
    if name.startswith(("sparse", "ten million entries")) and not name.endswith("said"):
        # A configuration of gigabytes is refused.
        assert error.splitlines()[0].startswith("nvhook: error: cannot read the configuration /etc/ld.so.conf: ")
        (image / "etc/ld.so.conf").unlink()
        status, error = run(tree, ["build", "-r", str(image), "-C", "/etc/ld.so.cache"])
    if name == "folder":
        assert status == 1
        assert error.splitlines()[0] == (
            "nvhook: error: cannot write the loader cache /etc/ld.so.cache: Is a directory"
        )
        return
    assert status == 0
    entries = cache.parse((image / "etc/ld.so.cache").read_bytes()).entries
    assert [entry.soname for entry in entries] == [b"liba.so.1"]


@pytest.mark.parametrize("name", ["sparse", "fifo", "folder", "a link to itself"])
def test_in_place_of_a_library_that_merge_names(tree: Path, image: Path, name: str) -> None:
    (image / "etc/ld.so.cache").write_bytes(write.new([write.row("libz.so.1")]))
    ODD[name](image / "usr/lib/libodd.so.1")
    status, error = run(
        tree, ["merge", "-r", str(image), "-C", "/etc/ld.so.cache", "--folder", "/usr/lib", "libodd.so.1"]
    )
    assert status == 1
    assert error.splitlines()[0] == ("nvhook: error: /usr/lib/libodd.so.1 is no library that ldconfig would list")


def test_a_library_of_gigabytes_is_one(tree: Path, image: Path) -> None:
    """Its headers alone are read."""
    sparse(image / "usr/lib/libbig.so.1", shared_object("libbig.so.1"))
    assert run(tree, ["build", "-r", str(image), "-C", "/etc/ld.so.cache"])[0] == 0
    assert len(cache.parse((image / "etc/ld.so.cache").read_bytes()).entries) == 2


@pytest.mark.parametrize("verb", VERBS)
def test_a_cache_that_is_replaced_while_it_is_read(tree: Path, image: Path, verb: str) -> None:
    """By rename, and in place: either one is read, or there is an error."""
    file = image / "etc/ld.so.cache"
    contents = [write.new([write.row(f"lib{n}.so.1") for n in range(most, 0, -1)]) for most in (3, 9, 2000)]
    stop = threading.Event()

    def replace() -> None:
        number = 0
        while not stop.is_set():
            number += 1
            other = image / "etc/other"
            other.write_bytes(contents[number % 3])
            other.rename(file)
            with file.open("r+b") as same:
                same.truncate(100)
                same.write(contents[(number + 1) % 3])

    file.write_bytes(contents[0])
    thread = threading.Thread(target=replace)
    thread.start()
    try:
        for _ in range(6):
            root = [] if verb == "print" else ["-r", str(image)]
            path = str(file) if verb == "print" else "/etc/ld.so.cache"
            assert run(tree, [*VERBS[verb], *root, "-C", path])[0] in (0, 1, 3)
    finally:
        stop.set()
        thread.join()


DIGITS = b"1a" * 127
HOSTILE_SONAMES = {
    "equal": [DIGITS] * cache.MAX_ENTRIES,
    "different": [b"lib%06d" % n + DIGITS[:120] for n in range(cache.MAX_ENTRIES, 0, -1)],
}


@pytest.mark.parametrize("name", HOSTILE_SONAMES)
def test_sonames_of_nothing_but_numbers_take_no_time(name: str) -> None:
    """Each run of digits is compared by its value; twelve million of them took seconds of a start."""
    entries = [Entry(soname, b"/opt/liba.so", 0x303) for soname in HOSTILE_SONAMES[name]]
    data = cache.serialize(cache.Cache(entries, generator=b"g"))
    ours = [Entry(b"libours.so.1", b"/usr/lib/libours.so.1", 0x303)]
    begin = time.process_time()
    try:
        merged = merge.merge(cache.parse(data), b"/usr/lib", ours, whole_folder=False, win=True)
        cache.serialize(merge.merge(merged, b"/usr/lib32", ours, whole_folder=False, win=True))
        assert name == "equal"
    except merge.UnmergeableLdCache as error:
        assert name == "different" and "numbers in its sonames" in str(error)
    # Half a second for the slower of them; without the bound ten times that.
    assert time.process_time() - begin < 3 * SECONDS


@pytest.mark.parametrize("count", [1_000, 10_000, 100_000])
def test_memory_is_bounded_by_the_files_size(count: int) -> None:
    """Reading, merging and writing: at most so many bytes for each byte of the file."""
    rows = [write.Row(b"lib%06d.so.1" % n, b"/usr/lib/lib%06d.so.1" % n) for n in range(count, 0, -1)]
    data = write.new(rows, generator=None) if count > 10_000 else write.new(rows)
    ours = [Entry(b"libours%d.so.1" % n, b"/opt/libours%d.so.1" % n, 0x303) for n in range(40)]
    tracemalloc.start()
    try:
        merged = merge.merge(cache.parse(data), b"/opt", ours, whole_folder=True, win=True)
        assert len(cache.serialize(merged)) > len(data)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 16 * len(data)
