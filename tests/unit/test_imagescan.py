# SPDX-License-Identifier: Apache-2.0
"""One folder read as ldconfig reads it, held against this machine's ldconfig."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path

import pytest

from ldcache import cache, imagescan, root
from tests import stubs
from tests.simhost import elfwriter
from tests.simhost.tree import Tree


def scanned(top: Path, folder: str) -> set[tuple[str, str]]:
    return {
        (entry.soname.decode(), entry.path.decode())
        for entry in imagescan.Scanner(root.open_root(str(top))).scan(folder)
    }


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    tree = Tree(tmp_path)
    for name, soname in (
        ("liba.so.1.2", "liba.so.1"),
        ("liba.so.1.10", "liba.so.1"),
        ("libb.so", "libb.so"),
        ("libc1.so.5", None),
        ("libcuda.so.580.1", "libcuda.so.1"),
        ("plugin.so", "plugin.so"),
    ):
        tree.write(f"/lib/{name}", elfwriter.shared_object(soname))
    tree.write("/lib/libempty.so.1", "")
    tree.write("/lib/libtext.so", "GROUP ( /lib/libb.so )\n" + 64 * " ")
    tree.write("/lib/libarm.so.1", elfwriter.shared_object("libarm.so.1", machine=elfwriter.EM_AARCH64))
    tree.link("/lib/libcuda.so", "libcuda.so.1")
    tree.link("/lib/libcuda.so.1", "libcuda.so.580.1")
    tree.link("/lib/libgone.so.1", "libgone.so.1.2")
    return tree


def test_as_ldconfig_does(tree: Tree) -> None:
    ours = scanned(tree.top, "/lib")
    assert ("liba.so.1", "/lib/liba.so.1.10") in ours
    tree.write("/etc/ld.so.conf", "/lib\n")
    tree.ldconfig()
    theirs = set(tree.cached())
    # Links are made now, and ldconfig knows no other machine's library.
    assert {(name, path) for name, path in scanned(tree.top, "/lib") if name != "libarm.so.1"} == theirs
    assert {name for name, _ in ours} - {"libarm.so.1"} == {name for name, _ in theirs}


def test_names() -> None:
    good = ("liba.so", "liba.so.1", "ld-linux.so.2", "ld.so.1", "libfoo-1.2.so")
    bad = ("a.so", "liba.a", "liba.so.1.dpkg-new", "liba.so.1.dpkg-tmp", "liba.so.#prelink#", "liba.so;1", "liba.so\n")
    assert [name for name in (*good, *bad) if imagescan.is_library_name(name)] == list(good)


def test_a_soname_with_a_slash_stays_out(tree: Tree) -> None:
    tree.write("/lib/libevil.so.1", elfwriter.shared_object("../../x.so"))
    assert not any(".." in path for _, path in scanned(tree.top, "/lib"))


def test_glibc_hwcaps_as_ldconfig_does(tree: Tree) -> None:
    inside = "/lib/glibc-hwcaps/x86-64-v3"
    tree.write(f"{inside}/liba.so.1.2", stubs.stub("liba.so.1", level="x86-64-v3"))
    tree.write(f"{inside}/libplain.so.1", elfwriter.shared_object("libplain.so.1"))
    tree.link(f"{inside}/name", "libplain.so.1")
    tree.write("/lib/glibc-hwcaps/.hidden/liba.so.1", elfwriter.shared_object("liba.so.1"))
    tree.write("/lib/glibc-hwcaps/a:b/liba.so.1", elfwriter.shared_object("liba.so.1"))
    tree.write("/lib/glibc-hwcaps/file", "")
    scanner = imagescan.Scanner(root.open_root(str(tree.top)))
    assert scanner.hwcaps("/lib") == ["x86-64-v3"]
    assert scanner.hwcaps("/nowhere") == []
    ours = scanner.scan("/lib", "x86-64-v3")
    tree.write("/etc/ld.so.conf", "/lib\n")
    tree.ldconfig()
    theirs = [entry for entry in cache.parse(tree.path("/etc/ld.so.cache").read_bytes()).entries if entry.hwcaps]
    assert sorted(map(repr, ours)) == sorted(map(repr, theirs))
    assert [entry.level for entry in theirs if entry.soname == b"liba.so.1"] == [2]


def test_a_start_reads_so_many_and_no_more(tmp_path: Path) -> None:
    for folder in ("a", "b", "c"):
        (tmp_path / folder).mkdir()
        for number in range(imagescan.ALL_LIBRARIES_MAX // 2):
            (tmp_path / folder / f"lib{number}.so").touch()
    scanner = imagescan.Scanner(root.open_root(str(tmp_path)))
    scanner.scan("/a")
    scanner.scan("/b")
    with pytest.raises(OSError, match="read"):
        scanner.scan("/c")


@pytest.fixture
def many(tmp_path: Path) -> Path:
    """A root whose folder `many` has as many names as one may have, none of them a library's."""
    (tmp_path / "many").mkdir()
    (tmp_path / "many/first").touch()
    for number in range(imagescan.NAMES_MAX - 2):
        os.link(tmp_path / "many/first", tmp_path / f"many/lib{number}\n.so")
    return tmp_path


def test_names_that_are_no_librarys_count_too(many: Path) -> None:
    scanner = imagescan.Scanner(root.open_root(str(many)))
    for number in range(imagescan.ALL_NAMES_MAX // imagescan.NAMES_MAX):
        (many / f"link{number}").symlink_to("many")
        assert scanner.scan(f"/link{number}") == []
    with pytest.raises(OSError, match="read") as caught:
        scanner.scan("/many")
    assert caught.value.errno == errno.E2BIG
    (many / "glibc-hwcaps/x86-64-v3").mkdir(parents=True)
    assert scanner.hwcaps("/") == []


def test_a_folder_with_too_many_names_has_been_read_too(many: Path) -> None:
    for number in range(3):
        (many / f"many/{number}").touch()
    scanner = imagescan.Scanner(root.open_root(str(many)))
    for _ in range(imagescan.ALL_NAMES_MAX // imagescan.NAMES_MAX):
        with pytest.raises(OSError, match="read"):
            scanner.scan("/many")
    (many / "few").mkdir()
    with pytest.raises(OSError, match="read"):
        scanner.scan("/few")


def test_variants_are_read_once_however_many_links_lead_there(many: Path) -> None:
    """Twenty-four seconds, where sixteen links to one folder are shared by 64."""
    (many / "many/liba.so.1").write_bytes(elfwriter.shared_object("liba.so.1"))
    (many / "shared").mkdir()
    for number in range(imagescan.HWCAPS_MAX):
        (many / f"shared/x86-64-v{number}").symlink_to("/many")
    scanner = imagescan.Scanner(root.open_root(str(many)))
    begin = time.process_time()
    found = []
    for number in range(64):
        folder = f"/{number}"
        (many / str(number)).mkdir()
        (many / str(number) / "glibc-hwcaps").symlink_to("/shared")
        for name in scanner.hwcaps(folder):
            found += scanner.scan(folder, name)
    assert [entry.soname for entry in found] == [b"liba.so.1"]
    assert time.process_time() - begin < 3


def test_libraries_that_are_long_chains_of_links(tmp_path: Path) -> None:
    """One look-up of each cost the kernel some milliseconds."""
    for number in range(39):
        (tmp_path / f"l{number}").symlink_to("./" * 2040 + f"l{number + 1}")
    (tmp_path / "l39").write_bytes(elfwriter.shared_object("liba.so.1"))
    (tmp_path / "few").mkdir()
    (tmp_path / "few/liba.so.1").symlink_to("../l39")
    (tmp_path / "lib").mkdir()
    for number in range(imagescan.LIBRARIES_MAX):
        (tmp_path / f"lib/lib{number}.so").symlink_to("/l0")
    scanner = imagescan.Scanner(root.open_root(str(tmp_path)))
    assert [entry.soname for entry in scanner.scan("/few")] == [b"liba.so.1"]
    begin = time.process_time()
    with pytest.raises(OSError, match="read") as caught:
        scanner.scan("/lib")
    assert caught.value.errno == errno.ELOOP
    assert time.process_time() - begin < 1


def test_bounds(tmp_path: Path) -> None:
    for number in range(imagescan.LIBRARIES_MAX + 1):
        (tmp_path / f"lib{number}.so").touch()
    with pytest.raises(OSError, match="read") as caught:
        imagescan.Scanner(root.open_root(str(tmp_path))).scan("/")
    assert caught.value.errno == errno.E2BIG


def test_flags_are_the_machines(tree: Tree) -> None:
    (found,) = [
        entry
        for entry in imagescan.Scanner(root.open_root(str(tree.top))).scan("/lib")
        if entry.soname == b"libarm.so.1"
    ]
    assert found.flags == cache.FLAGS["aarch64"]
