# SPDX-License-Identifier: Apache-2.0
"""`ldcache merge` against reruns of the real ldconfig, and what it refuses."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from ldcache import cache, cli
from tests import cachewriter as write
from tests import libraryfolders, stubs
from tests.simhost.elfwriter import EM_X86_64, shared_object

real = pytest.mark.skipif(not stubs.can_compare(), reason="needs gcc, and ldconfig for x86-64")

LISTED = ("/opt/a", "/opt/b", "/opt/c")


def merge(root: Path, folder: str, *words: str) -> None:
    assert cli.main(["merge", "-r", str(root), "-C", "/etc/ld.so.cache", "--folder", folder, *words]) == 0


def listing(data: bytes) -> list[str]:
    return [repr(entry) for entry in cache.parse(data).entries]


def same(found: bytes, expected: bytes) -> None:
    assert listing(found) == listing(expected)
    assert found == expected


def cache_of(root: Path) -> bytes:
    return (root / "etc/ld.so.cache").read_bytes()


def plant(root: Path, random_: random.Random) -> None:
    """Three listed folders of whole and odd libraries, with sub-folders for CPUs."""
    for folder in LISTED:
        fill(root, folder, random_)


def fill(root: Path, folder: str, random_: random.Random) -> None:
    inside = root / folder[1:]
    libraryfolders.fill(inside, random_, 14, libraryfolders.SONAMES[:16], 0.15, True)
    for name in random_.sample(("x86-64-v2", "x86-64-v3", "zen", "empty"), random_.randrange(4)):
        (inside / "glibc-hwcaps" / name).mkdir(parents=True)
        if name != "empty":
            libraryfolders.fill(
                inside / "glibc-hwcaps" / name, random_, 5, libraryfolders.SONAMES[:8], 0.1, True, False
            )
    if random_.random() < 0.4:
        name = random_.choice(("tls", "haswell", "avx512_1"))
        libraryfolders.fill(inside / name, random_, 4, libraryfolders.SONAMES[:8], 0.1, False)


@pytest.mark.parametrize("seed", range(100))
@real
def test_a_new_folder_equals_a_rerun_with_it_listed_first(tmp_path: Path, seed: int) -> None:
    random_ = random.Random(f"new {seed}")
    plant(tmp_path, random_)
    fill(tmp_path, "/opt/driver", random_)
    before = stubs.ldconfig(tmp_path, list(LISTED))
    expected = stubs.ldconfig(tmp_path, ["/opt/driver", *LISTED])
    (tmp_path / "etc/ld.so.cache").write_bytes(before)
    names = [name for name in os.listdir(tmp_path / "opt/driver") if is_listed(expected, f"/opt/driver/{name}")]
    # Named or not, one or all: a folder that is new comes in whole.
    merge(tmp_path, "/opt/driver", *random_.sample(names, random_.randrange(len(names) + 1)))
    same(cache_of(tmp_path), expected)


def is_listed(data: bytes, path: str) -> bool:
    return any(entry.path == os.fsencode(path) for entry in cache.parse(data).entries)


@pytest.mark.parametrize("seed", range(20))
@real
def test_a_listed_folder_as_a_whole_equals_a_rerun_with_it_listed_first(tmp_path: Path, seed: int) -> None:
    """Under its own name or another one, after files came and went."""
    random_ = random.Random(f"whole {seed}")
    plant(tmp_path, random_)
    (tmp_path / "opt/alias").symlink_to("c")
    before = stubs.ldconfig(tmp_path, list(LISTED))
    for name in os.listdir(tmp_path / "opt/c"):
        if random_.random() < 0.3 and not (tmp_path / "opt/c" / name).is_dir():
            (tmp_path / "opt/c" / name).unlink()
    libraryfolders.fill(tmp_path / "opt/c/more", random_, 9, libraryfolders.SONAMES[:16], 0.1, True)
    for file in (tmp_path / "opt/c/more").iterdir():
        if not os.path.lexists(tmp_path / "opt/c" / file.name) and not file.is_dir():
            file.rename(tmp_path / "opt/c" / file.name)
    folder = random_.choice(("/opt/c", "/opt/alias"))
    expected = stubs.ldconfig(tmp_path, [folder, *LISTED])
    (tmp_path / "etc/ld.so.cache").write_bytes(before)
    merge(tmp_path, folder)
    same(cache_of(tmp_path), expected)


def ours(root: Path, folder: str, random_: random.Random, links: bool) -> list[str]:
    """Libraries of our own in a folder, new ones and ones in place of the image's; their file names."""
    letter = folder[-1]
    names = []
    for number in random_.sample(range(8), random_.randrange(1, 7)):
        soname = f"lib{letter}{number}.so.1"
        name = random_.choice((soname, f"{soname}.580.1"))
        for old in (root / folder[1:]).glob(f"{soname}*"):
            old.unlink()
        (root / folder[1:] / name).write_bytes(shared_object(soname, machine=EM_X86_64, needed=("libc.so.6",)))
        names.append(random_.choice((name, f"{folder}/{name}")))
        if links and random_.random() < 0.3:
            (root / folder[1:] / f"lib{letter}{number}.so").symlink_to(name)
            names.append(f"lib{letter}{number}.so")
    return names


@pytest.mark.parametrize("seed", range(100))
@real
def test_named_libraries_of_a_listed_folder_equal_a_rerun(tmp_path: Path, seed: int) -> None:
    """They come in, or in place of those of their own soname; everything else stays. Sonames of ours are in no other
    folder: where several have one, the merge puts ours first, wherever their folder is listed."""
    random_ = random.Random(f"listed {seed}")
    plant(tmp_path, random_)
    for folder in LISTED:
        ours(tmp_path, folder, random_, links=False)
    folder = random_.choice(LISTED)
    before = stubs.ldconfig(tmp_path, list(LISTED))
    names = ours(tmp_path, folder, random_, links=True)
    expected = stubs.ldconfig(tmp_path, list(LISTED))
    (tmp_path / "etc/ld.so.cache").write_bytes(before)
    merge(tmp_path, folder, *names)
    same(cache_of(tmp_path), expected)


@pytest.mark.parametrize("seed", range(20))
@real
def test_win(tmp_path: Path, seed: int) -> None:
    """Of each soname and flags that ours have, ours alone are left."""
    random_ = random.Random(f"win {seed}")
    plant(tmp_path, random_)
    fill(tmp_path, "/opt/driver", random_)
    stubs.ldconfig(tmp_path, list(LISTED))
    before = cache.parse(cache_of(tmp_path)).entries
    merge(tmp_path, "/opt/driver", "--win")
    after = cache.parse(cache_of(tmp_path)).entries
    new = [entry for entry in after if entry.path.startswith(b"/opt/driver/")]
    # libcmp calls .so.01 and .so.1 equal.
    beaten = {(entry.soname.replace(b".0", b"."), entry.flags) for entry in new}
    left = [entry for entry in before if (entry.soname.replace(b".0", b"."), entry.flags) not in beaten]
    assert [entry for entry in after if entry not in new] == left


def test_a_named_library_for_a_cpu(tmp_path: Path) -> None:
    """By its path below the folder; libraries that aren't named stay out."""
    for name in ("libx.so.1", "liby.so.1", "glibc-hwcaps/x86-64-v3/libx.so.1"):
        path = tmp_path / "usr/lib" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(shared_object(path.name))
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/ld.so.cache").write_bytes(write.new([write.row("libz.so.1")]))
    merge(tmp_path, "/usr/lib", "glibc-hwcaps/x86-64-v3/libx.so.1")
    assert [entry.path for entry in cache.parse(cache_of(tmp_path)).entries] == [
        b"/usr/lib/libz.so.1",
        b"/usr/lib/glibc-hwcaps/x86-64-v3/libx.so.1",
    ]


def test_an_empty_cache_becomes_one(tmp_path: Path) -> None:
    (tmp_path / "usr/lib").mkdir(parents=True)
    (tmp_path / "usr/lib/libx.so.1").write_bytes(shared_object("libx.so.1"))
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/ld.so.cache").write_bytes(b"")
    merge(tmp_path, "/usr/lib", "libx.so.1")
    assert [entry.path for entry in cache.parse(cache_of(tmp_path)).entries] == [b"/usr/lib/libx.so.1"]
    assert os.listdir(tmp_path / "etc") == ["ld.so.cache"]


CACHE = write.new([write.row("libz.so.1"), write.row("liba.so.1", "/opt/a")])


@pytest.mark.parametrize(
    ("data", "words", "line"),
    [
        (CACHE, ["--folder", "/nowhere"], "cannot merge the folder /nowhere: there is no such folder"),
        (CACHE, ["--folder", "usr/lib"], "cannot merge the folder usr/lib: there is no such folder, or its name is"),
        (CACHE, ["--folder", "/usr/lib", "libno.so.1"], "/usr/lib/libno.so.1 is no library that ldconfig would list"),
        (CACHE, ["--folder", "/usr/lib", "libtext.so"], "/usr/lib/libtext.so is no library that ldconfig would list"),
        (CACHE, ["--folder", "/usr/lib", "/lib/liby.so.1"], "/lib/liby.so.1 is not in the folder /usr/lib"),
        (CACHE[:100], ["--folder", "/usr/lib"], "cannot read the loader cache /etc/ld.so.cache: "),
        (
            CACHE + b"x",
            ["--folder", "/usr/lib"],
            "the loader cache /etc/ld.so.cache cannot be kept whole: not laid out",
        ),
        (write.new([], order=">"), ["--folder", "/usr/lib"], "the loader cache /etc/ld.so.cache cannot be kept whole"),
    ],
)
def test_a_refusal_leaves_all_as_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], data: bytes, words: list[str], line: str
) -> None:
    (tmp_path / "usr/lib").mkdir(parents=True)
    (tmp_path / "usr/lib/libx.so.1").write_bytes(shared_object("libx.so.1"))
    (tmp_path / "usr/lib/libtext.so").write_text("no library")
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/ld.so.cache").write_bytes(data)
    assert cli.main(["merge", "-r", str(tmp_path), "-C", "/etc/ld.so.cache", *words]) == 1
    error = capsys.readouterr().err.splitlines()
    assert error[0].startswith(f"nvhook: error: {line}")
    assert error[1].startswith("  remedy: ")
    assert cache_of(tmp_path) == data
    assert os.listdir(tmp_path / "etc") == ["ld.so.cache"]
