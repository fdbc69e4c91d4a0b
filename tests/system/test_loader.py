# SPDX-License-Identifier: Apache-2.0
"""The real loader reads what we wrote.

A cache is put over /etc/ld.so.cache in a mount namespace of its own, and the loader lists which file each soname
that a stub needs leads to, as it does for ldd. Nothing of the libraries runs, and the namespace takes its mount along.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from pathlib import Path

import pytest

from ldcache import cache, merge
from ldcache.cache import Cache, Entry
from tests import stubs
from tests.simhost.elfwriter import EM_AARCH64, EM_X86_64, shared_object
from tests.system.prestart import HostMounts

MACHINE_CACHE = Path("/etc/ld.so.cache")
LOADERS = {
    "x86_64": ("/lib64/ld-linux-x86-64.so.2", EM_X86_64),
    "aarch64": ("/lib/ld-linux-aarch64.so.1", EM_AARCH64),
}
LOADER, MACHINE = LOADERS.get(platform.machine(), ("", 0))

OURS = ("libcuda.so.1", "libnvidia-ml.so.1", "libnvidia-ptxjitcompiler.so.1", "libnvhook-test.so.1")


def _private_mounts() -> bool:
    command = ["unshare", "--mount", "--propagation", "private", "true"]
    return shutil.which("unshare") is not None and subprocess.run(command, capture_output=True).returncode == 0


pytestmark = [
    pytest.mark.skipif(not MACHINE_CACHE.is_file(), reason="needs /etc/ld.so.cache, which is not there"),
    pytest.mark.skipif(not os.path.exists(LOADER), reason="needs glibc's loader for x86-64 or AArch64"),
    pytest.mark.skipif(os.geteuid() == 0 and not _private_mounts(), reason="needs leave to make a mount namespace"),
    stubs.needs_gcc,
]


def flags() -> int:
    return cache.native_flags(64, MACHINE)


def resolve(folder: Path, data: bytes, sonames: list[str]) -> dict[str, str]:
    """Which file the loader takes for each soname with this cache; those that it doesn't find are left out."""
    (folder / "cache").write_bytes(data)
    # One stub that needs all of them: each is asked for on behalf of the stub, so no RUNPATH plays a part.
    (folder / "asks").write_bytes(shared_object("asks", machine=MACHINE, needed=tuple(sonames)))
    script = f'mount --bind "$1" {MACHINE_CACHE} && exec env LD_TRACE_LOADED_OBJECTS=1 {LOADER} "$2"'
    command = ["unshare", "--mount", "--propagation", "private", "sh", "-c", script, "sh"]
    done = subprocess.run([*command, folder / "cache", folder / "asks"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    found = {}
    for line in done.stdout.splitlines():
        soname, arrow, rest = line.strip().partition(" => ")
        if arrow and rest != "not found" and soname in sonames:
            found[soname] = rest.rsplit(" (", 1)[0]
    return found


def known() -> Cache:
    return cache.parse(MACHINE_CACHE.read_bytes())


def native_sonames(of: Cache) -> list[str]:
    return list(dict.fromkeys(os.fsdecode(entry.soname) for entry in of.entries if entry.flags == flags()))


def driver(folder: Path, sonames: tuple[str, ...] = OURS) -> list[Entry]:
    """Stubs in `folder`, and their entries."""
    for soname in sonames:
        stubs.add(folder, soname, soname)
    return [Entry(soname.encode(), os.fsencode(folder / soname), flags()) for soname in reversed(os.listdir(folder))]


@pytest.fixture
def machine(tmp_path: Path) -> tuple[Cache, dict[str, str]]:
    """This machine's cache, and what its loader finds by it."""
    of = known()
    found = resolve(tmp_path, MACHINE_CACHE.read_bytes(), native_sonames(of))
    assert len(found) > 10
    return of, found


def test_ours_are_found_and_everything_else_as_before(tmp_path: Path, machine: tuple[Cache, dict[str, str]]) -> None:
    of, before = machine
    folder = tmp_path / "driver"
    new = driver(folder)
    merged = merge.merge(of, os.fsencode(folder), new, whole_folder=True, win=False)
    after = resolve(tmp_path, cache.serialize(merged), [*native_sonames(of), *OURS])
    assert after == {**before, **{soname: str(folder / soname) for soname in OURS}}


def test_ours_come_first(tmp_path: Path, machine: tuple[Cache, dict[str, str]]) -> None:
    """Libraries that the image has too: the merged cache leads to ours, and the others stay."""
    of, before = machine
    image, folder = tmp_path / "image", tmp_path / "driver"
    with_image = merge.merge(of, os.fsencode(image), driver(image), whole_folder=True, win=False)
    data = cache.serialize(with_image)
    sonames = [*native_sonames(of), *OURS]
    assert resolve(tmp_path, data, sonames) == {**before, **{soname: str(image / soname) for soname in OURS}}
    merged = merge.merge(cache.parse(data), os.fsencode(folder), driver(folder), whole_folder=True, win=False)
    after = resolve(tmp_path, cache.serialize(merged), sonames)
    assert after == {**before, **{soname: str(folder / soname) for soname in OURS}}
    assert len(merged.entries) == len(of.entries) + 2 * len(OURS)


def test_every_form_is_read(tmp_path: Path, machine: tuple[Cache, dict[str, str]]) -> None:
    of, before = machine
    folder = tmp_path / "driver"
    new = driver(folder)
    plain = [entry for entry in of.entries if not entry.hwcap]
    expected = {**before, **{soname: str(folder / soname) for soname in OURS}}
    if len(plain) < len(of.entries):
        pytest.skip("this machine's cache has hwcap entries, which not every form can hold")
    for form in (
        Cache(plain, form="combined", generator=b"test"),
        Cache(plain, form="combined", sorted_strings=False, marked=False),
        Cache(plain, sorted_strings=False, marked=False),
        Cache(plain, form="old"),
        Cache(plain, form="old", sorted_strings=False),
    ):
        image = cache.parse(cache.serialize(form))
        merged = merge.merge(image, os.fsencode(folder), new, whole_folder=True, win=False)
        data = cache.serialize(merged)
        assert cache.parse(data).form == form.form
        assert resolve(tmp_path, data, [*native_sonames(of), *OURS]) == expected, form.form


def test_a_root_without_cache_gets_one(tmp_path: Path) -> None:
    """The rest is then found in the loader's default folders, as it was."""
    folder = tmp_path / "driver"
    merged = merge.merge(cache.empty(), os.fsencode(folder), driver(folder), whole_folder=True, win=False)
    before = resolve(tmp_path, b"", ["libc.so.6", "libm.so.6", *OURS])
    assert sorted(before) == ["libc.so.6", "libm.so.6"]
    after = resolve(tmp_path, cache.serialize(merged), ["libc.so.6", "libm.so.6", *OURS])
    assert after == {**before, **{soname: str(folder / soname) for soname in OURS}}


def cpu_level() -> str | None:
    """A glibc-hwcaps name that this CPU's loader takes; None where there is none (an old glibc or CPU)."""
    done = subprocess.run([LOADER, "--help"], capture_output=True, text=True)
    names = [line.split()[0] for line in done.stdout.splitlines() if "(supported, searched)" in line]
    return next((name for name in names if name.startswith("x86-64-v")), None)


def test_glibc_hwcaps_beat_a_plain_entry_unless_we_win(tmp_path: Path) -> None:
    level = cpu_level()
    if level is None:
        pytest.skip("this loader and CPU have no glibc-hwcaps folder")
    image, folder = tmp_path / "image", tmp_path / "driver"
    special = image / "glibc-hwcaps" / level / "libcuda.so.1"
    for path in (special, image / "libcuda.so.1"):
        stubs.add(tmp_path, str(path.relative_to(tmp_path)), "libcuda.so.1")
    entries = [
        Entry(b"libcuda.so.1", os.fsencode(special), flags(), cache.HWCAP_EXTENSION, level.encode()),
        Entry(b"libcuda.so.1", os.fsencode(image / "libcuda.so.1"), flags()),
    ]
    of = cache.parse(cache.serialize(Cache(entries, generator=b"test")))
    new = driver(folder)
    for win, expected in ((False, special), (True, folder / "libcuda.so.1")):
        merged = merge.merge(of, os.fsencode(folder), new, whole_folder=True, win=win)
        found = resolve(tmp_path, cache.serialize(merged), ["libcuda.so.1", "libnvidia-ml.so.1"])
        assert found == {"libcuda.so.1": str(expected), "libnvidia-ml.so.1": str(folder / "libnvidia-ml.so.1")}


def test_no_mount_is_left(tmp_path: Path) -> None:
    mounts = HostMounts(tmp_path)
    resolve(tmp_path, MACHINE_CACHE.read_bytes(), ["libc.so.6"])
    assert mounts.changed() == []
