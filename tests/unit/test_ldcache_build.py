# SPDX-License-Identifier: Apache-2.0
"""`ldcache build` against the real ldconfig: the same bytes, the same links."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ldcache import cache, cli
from tests import libraryfolders, releases, stubs
from tests.needs import needs_root

pytestmark = [
    pytest.mark.skipif(not stubs.can_compare(), reason="needs gcc, and ldconfig 2.36 or later for x86-64"),
    # Without chroot(2) ldconfig follows names by itself, and refuses a relative include.
    needs_root,
]


def masked(data: bytes) -> bytes:
    """A cache's bytes as if its generator had no name, read back and written again."""
    known = cache.parse(data)
    assert cache.serialize(known) == data
    known.generator = b""
    return cache.serialize(known)


def build(root: Path, like: str, plan: libraryfolders.Plan) -> bytes | None:
    """What ours writes, as libraryfolders.run for ldconfig."""
    words = ["build", "-r", str(root), "-C", "/etc/ld.so.cache", "--like", like, *plan.options, *plan.folders]
    assert cli.main(words) == 0
    file = root / "etc/ld.so.cache"
    return file.read_bytes() if file.exists() else None


def equal(folder: Path, seed: str, binary: str, like: str, *, files: int = 12, long: bool = False) -> int:
    """Twin roots of one seed, ldconfig in one and ours in the other: the number of entries."""
    theirs, ours = folder / "theirs", folder / "ours"
    plan = libraryfolders.plant(theirs, seed, files=files, long=long)
    assert libraryfolders.plant(ours, seed, files=files, long=long) == plan
    if libraryfolders.order(theirs) != libraryfolders.order(ours):
        pytest.skip("this file system lists equal folders in different orders")
    before = libraryfolders.state(ours)
    try:
        expected, found = libraryfolders.run(binary, theirs, plan), build(ours, like, plan)
        after = libraryfolders.state(ours)
        assert after == libraryfolders.state(theirs)
        assert "-X" not in plan.options or after == before
        if expected is None or found is None:
            assert (expected, found) == (None, None)
            return 0
        assert listed(found) == listed(expected)
        assert masked(found) == masked(expected)
        # Links have been made and removed: a second run finds another folder, and both find the same.
        again = libraryfolders.run(binary, theirs, plan), build(ours, like, plan)
        assert again[0] is not None and again[1] is not None
        assert masked(again[1]) == masked(again[0])
        return len(listed(found))
    finally:
        libraryfolders.remove(theirs)
        libraryfolders.remove(ours)


def listed(data: bytes) -> list[str]:
    """The entries, so that a failure can be read."""
    return [repr(entry) for entry in cache.parse(data).entries]


@pytest.mark.parametrize("seed", range(60))
def test_equals_ldconfig(tmp_path: Path, seed: int) -> None:
    equal(tmp_path, f"build {seed}", stubs.LDCONFIG, stubs.version_text())


def test_equals_ldconfig_in_folders_of_hundreds(tmp_path: Path) -> None:
    found = [equal(tmp_path, f"hundreds {seed}", stubs.LDCONFIG, stubs.version_text(), files=200) for seed in range(3)]
    assert max(found) > 300


@pytest.mark.parametrize("seed", range(10))
def test_equals_ldconfig_where_numbers_overflow(tmp_path: Path, seed: int) -> None:
    """libcmp has no order for such names, so that only ldconfig's own way of inserting gives its result."""
    equal(tmp_path, f"numbers {seed}", stubs.LDCONFIG, stubs.version_text(), files=20, long=True)


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("hundred", range(2))
def test_equals_ldconfig_for_many_seeds(tmp_path: Path, hundred: int) -> None:
    for seed in range(100):
        equal(tmp_path, f"many {hundred} {seed}", stubs.LDCONFIG, stubs.version_text(), long=seed % 10 == 0)


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("release", ["bookworm", "trixie"])
def test_equals_the_ldconfig_of_other_releases(tmp_path: Path, cache: Path, release: str) -> None:
    """ldconfig is a static program: it runs without the rest of its release."""
    try:
        binary = str(releases.debian(cache, release) / "usr/sbin/ldconfig")
    except RuntimeError as error:
        pytest.skip(str(error))
    if not os.path.exists(binary):
        binary = binary.replace("/usr/sbin", "/sbin")
    for seed in range(150):
        equal(tmp_path, f"{release} {seed}", binary, releases.GLIBC[release], long=seed % 10 == 0)
    equal(tmp_path, f"{release} hundreds", binary, releases.GLIBC[release], files=200)


def test_this_machines_own_folders(tmp_path: Path) -> None:
    """Real libraries, by this machine's own configuration; links are left alone."""
    command = [stubs.LDCONFIG, "-X", "-C", str(tmp_path / "theirs")]
    subprocess.run(command, check=True, capture_output=True)
    assert cli.main(["build", "-X", "-C", str(tmp_path / "ours")]) == 0
    ours, theirs = (tmp_path / "ours").read_bytes(), (tmp_path / "theirs").read_bytes()
    assert listed(ours) == listed(theirs)
    assert masked(ours) == masked(theirs)


@pytest.mark.parametrize("like", ["2.36", "2.41"])
def test_check_and_merge_follow_the_version_that_built_a_cache(tmp_path: Path, like: str) -> None:
    """Whatever ldconfig is at hand: legacy sub-folders count up to 2.36."""
    for folder in ("usr/lib", "usr/lib/tls", "opt/new/tls"):
        stubs.add(tmp_path, f"{folder}/liba.so.1", "liba.so.1")
    words = ["-r", str(tmp_path), "-C", "/etc/ld.so.cache"]
    (tmp_path / "etc").mkdir()
    assert cli.main(["build", *words, "--like", like]) == 0
    assert cli.main(["check", *words]) == 0
    assert cli.main(["merge", *words, "--folder", "/opt/new"]) == 0
    entries = cache.parse((tmp_path / "etc/ld.so.cache").read_bytes()).entries
    assert [entry.path.count(b"/tls/") for entry in entries] == ([1, 1, 0] if like == "2.36" else [0])


# What the generated folders can't show --------------------------------------------------------------------


def test_nothing_leads_out_of_the_root(tmp_path: Path) -> None:
    """An image's links, and sonames with `..`, end inside its root; ldconfig itself looks outside for the second."""
    outside = tmp_path / "outside"
    root = tmp_path / "root"
    stubs.add(outside, "/lib/libsecret.so.1.0", "libsecret.so.1")
    stubs.add(root, "/usr/lib/libz.so.1.0", "../../../outside/lib/libz.so.1")
    (root / "opt").symlink_to(outside)
    (root / "usr/lib/glibc-hwcaps").mkdir()
    (root / "usr/lib/glibc-hwcaps/x").symlink_to(outside / "lib")
    (root / "usr/lib/libout.so.1").symlink_to(outside / "lib/libsecret.so.1.0")
    (root / "etc").mkdir()
    (root / "etc/ld.so.conf").write_text(f"/opt/lib\n{outside}/lib\ninclude {outside}/*.conf\n")
    (outside / "x.conf").write_text("/usr/lib\n")
    assert cli.main(["build", "-r", str(root), "-C", "/etc/ld.so.cache", str(outside / "lib")]) == 0
    entries = cache.parse((root / "etc/ld.so.cache").read_bytes()).entries
    assert [entry.soname for entry in entries] == [b"../../../outside/lib/libz.so.1"]
    assert sorted(os.listdir(outside / "lib")) == ["libsecret.so.1.0"]
    assert not os.path.lexists(root / "usr/lib/libout.so.1")


def test_a_fifo_behind_a_link_does_not_block(tmp_path: Path) -> None:
    stubs.add(tmp_path, "/usr/lib/liba.so.1", "liba.so.1")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "usr/lib/libpipe.so.1").symlink_to("/pipe")
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/ld.so.conf").symlink_to("/pipe")
    assert build(tmp_path, "2.41", libraryfolders.Plan()) is not None


def test_a_configuration_that_includes_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/ld.so.conf").write_text("include ld.so.conf\ninclude ld.so.conf\n")
    assert cli.main(["build", "-r", str(tmp_path), "-C", "/etc/ld.so.cache"]) == 1
    assert capsys.readouterr().err.splitlines()[0] == (
        "nvhook: error: /etc/ld.so.conf includes too much: more than 16 deep, or 4096 files"
    )


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["-C", "/nowhere/cache"], "cannot write the loader cache /nowhere/cache: No such file or directory"),
        (["-C", "/etc"], "cannot write the loader cache /etc: Is a directory"),
        (["lib"], "lib is a relative folder, which no cache can hold"),
        (["--like", "2.31"], "cannot build as ldconfig 2.31 does"),
    ],
)
def test_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], line: str) -> None:
    (tmp_path / "etc").mkdir()
    assert cli.main(["build", "-r", str(tmp_path), *words]) == 1
    assert capsys.readouterr().err.splitlines()[0] == f"nvhook: error: {line}"
    assert os.listdir(tmp_path / "etc") == []


def test_a_cache_that_is_a_mount_point_stays(tmp_path: Path, tree: Path) -> None:
    """ldconfig fails there too, and leaves its temporary file besides."""
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/ld.so.cache").write_bytes(b"old")
    script = 'mount --bind "$1" "$1" && shift && exec "$@"'
    program = "import sys; from ldcache.cli import main; sys.exit(main(sys.argv[1:]))"
    enter = ["unshare", "--mount", "--propagation", "private", "sh", "-c", script, "sh", f"{tmp_path}/etc/ld.so.cache"]
    build = ["build", "-r", str(tmp_path), "-C", "/etc/ld.so.cache", "--like", "2.41"]
    done = subprocess.run(
        [*enter, sys.executable, "-c", program, *build],
        cwd=tree,
        capture_output=True,
        text=True,
    )
    assert done.stderr.splitlines()[:1] == [
        "nvhook: error: cannot write the loader cache /etc/ld.so.cache: Device or resource busy"
    ]
    assert (tmp_path / "etc/ld.so.cache").read_bytes() == b"old"
    assert os.listdir(tmp_path / "etc") == ["ld.so.cache"]


def test_the_cache_is_replaced_in_one_step(tmp_path: Path) -> None:
    """Running loaders map the old file. A link of that name is replaced itself, as ldconfig does."""
    (tmp_path / "etc").mkdir()
    (tmp_path / "elsewhere").write_bytes(b"old")
    (tmp_path / "etc/ld.so.cache").symlink_to("/elsewhere")
    assert build(tmp_path, "2.41", libraryfolders.Plan()) is not None
    assert (tmp_path / "elsewhere").read_bytes() == b"old"
    assert (tmp_path / "etc/ld.so.cache").lstat().st_mode == 0o100644
    assert os.listdir(tmp_path / "etc") == ["ld.so.cache"]


def test_a_name_that_the_image_took_is_in_nobodys_way(tmp_path: Path) -> None:
    """Where the cache is made first lies in the image, and in a container a process has the same number each time."""
    (tmp_path / "etc").mkdir()
    (tmp_path / f"etc/.ld.so.cache.{os.getpid()}~").mkdir()
    assert build(tmp_path, "2.41", libraryfolders.Plan()) is not None
    assert (tmp_path / "etc/ld.so.cache").lstat().st_mode == 0o100644
