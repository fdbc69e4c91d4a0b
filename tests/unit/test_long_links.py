# SPDX-License-Identifier: Apache-2.0
"""What is looked up for an image's loader, where the image has links that take the kernel milliseconds each."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from hook import loader
from hook.plan import WARNINGS_MAX, Plan
from ldcache import imageconf, root
from ldcache.errors import NvhookError


def chained(top: Path, length: int = 39) -> None:
    """/l0 leads to the folder /far by links of 4 KB each: milliseconds of the kernel's in a look-up."""
    (top / "far").mkdir()
    for number in range(length):
        end = f"l{number + 1}" if number < length - 1 else "far"
        (top / f"l{number}").symlink_to("./" * 2040 + end)


def completed(top: Path, folder: str) -> tuple[Plan, float]:
    """The Plan for three libraries in a folder of the image, and the processor time that it took."""
    base = root.open_root(str(top))
    plan = Plan()
    for name in ("libcuda.so.1", "libnvidia-ml.so.1", "libnvcuvid.so.1"):
        plan.link(f"{folder}/{name}", f"{name}80.1")
        plan.cache_entry(name, f"{folder}/{name}", 64, 62)
    begin = time.process_time()
    loader.complete(plan, base, loader.probe(base), [folder], [f"{folder}/{link['target']}" for link in plan.links])
    seconds = time.process_time() - begin
    os.close(base)
    return plan, seconds


def test_folders_behind_a_long_chain_of_links(tmp_path: Path) -> None:
    """Looked up by their whole paths once for each soname, they took a start a minute."""
    (tmp_path / "etc").mkdir()
    chained(tmp_path)
    for number in range(imageconf.FOLDERS_MAX):
        (tmp_path / f"far/{number}").mkdir()
        (tmp_path / f"far/{number}/libcuda.so.1").write_text("x")
    lines = [f"/l0/{number}" for number in range(imageconf.FOLDERS_MAX)]
    (tmp_path / "etc/ld.so.conf").write_text("\n".join(["/far/0", *lines]))
    plan, seconds = completed(tmp_path, "/usr/lib")
    assert any(warning.startswith("/far/0/libcuda.so.1 of the image is another") for warning in plan.warnings)
    assert not any("/l0" in warning for warning in plan.warnings)
    assert seconds < 1


def test_many_patterns_behind_a_long_chain_of_links(tmp_path: Path) -> None:
    (tmp_path / "etc").mkdir()
    chained(tmp_path)
    (tmp_path / "etc/ld.so.conf").write_text("include /l0/*\n" * 10_000)
    assert completed(tmp_path, "/usr/lib")[1] < 1


def test_libraries_that_are_links_behind_a_long_chain(tmp_path: Path) -> None:
    """Folders as good as any, but each soname in each is such a link."""
    (tmp_path / "etc").mkdir()
    chained(tmp_path, 20)
    (tmp_path / "far/x").write_text("x")
    folders = [f"/opt/{number}" for number in range(imageconf.FOLDERS_MAX)]
    for folder in folders:
        (tmp_path / folder[1:]).mkdir(parents=True)
        for name in ("libcuda.so.1", "libnvidia-ml.so.1", "libnvcuvid.so.1"):
            (tmp_path / folder[1:] / name).symlink_to("/l0/x")
    (tmp_path / "etc/ld.so.conf").write_text("\n".join(folders))
    plan, seconds = completed(tmp_path, "/usr/lib")
    assert seconds < 1
    assert "the image has too many links to follow: not all that /etc/ld.so.conf names is read" in plan.warnings


@pytest.mark.parametrize("text", ["./" * 2040, "x/../" * 800, "/" * 4000])
def test_a_library_folder_behind_links_that_take_long(tmp_path: Path, text: str) -> None:
    (tmp_path / "etc").mkdir()
    (tmp_path / "x").mkdir()
    (tmp_path / "far").mkdir()
    (tmp_path / "lib").symlink_to(f"{text}/far" if text[0] == "/" else f"{text}far")
    with pytest.raises(NvhookError, match="/lib in the container is too long, or has too many links, to be followed"):
        completed(tmp_path, "/lib")


def test_a_library_folder_behind_ordinary_links(tmp_path: Path) -> None:
    (tmp_path / "usr/lib64").mkdir(parents=True)
    (tmp_path / "lib64").symlink_to("usr/lib64")
    (tmp_path / "usr/lib64/libcuda.so.999.1").write_text("x")
    (tmp_path / "usr/lib64/libnvidia-ml.so.999.1").symlink_to("libcuda.so.999.1")
    (tmp_path / "usr/lib64/libnvcuvid.so.999.1").symlink_to("/nowhere")
    plan, _ = completed(tmp_path, "/lib64")
    assert plan.covers == {"/lib64/libcuda.so.1", "/lib64/libnvidia-ml.so.1"}


def test_many_links_by_the_name_of_a_library(tmp_path: Path) -> None:
    """Each was looked up from the root. Past a bound they pass for files, so that ours is mounted before them."""
    chained(tmp_path, 20)
    (tmp_path / "lib").mkdir()
    for number in range(10_000):
        (tmp_path / f"lib/libcuda.so.9{number}").symlink_to("/l0/x")
    plan, seconds = completed(tmp_path, "/lib")
    assert plan.covers == {"/lib/libcuda.so.1"}
    assert seconds < 1


def test_a_warning_for_each_of_many_files(tmp_path: Path) -> None:
    """Hard links to one file wrote 20 MB into the engine's log."""
    (tmp_path / "etc").mkdir()
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib/libcuda.so.90").write_text("x")
    for number in range(1, 3_000):
        os.link(tmp_path / "lib/libcuda.so.90", tmp_path / f"lib/libcuda.so.9{number}")
    folders = [f"/opt/{number}" for number in range(imageconf.FOLDERS_MAX)]
    for folder in folders:
        (tmp_path / folder[1:]).mkdir(parents=True)
        (tmp_path / folder[1:] / "libcuda.so.1").write_text("x")
    (tmp_path / "etc/ld.so.conf").write_text("\n".join(folders))
    plan, _ = completed(tmp_path, "/lib")
    assert plan.covers == {"/lib/libcuda.so.1"}
    assert len([warning for warning in plan.warnings if "another driver's;" in warning]) == 6
    assert "and 2997 more files of another driver's in /lib of the image" in plan.warnings
    assert f"and {len(folders) - 3} more files of another driver's in folders of /etc/ld.so.conf" in plan.warnings


def test_a_plan_says_so_much_and_no_more(tmp_path: Path) -> None:
    (tmp_path / "etc").mkdir()
    folders = [f"/{number}" for number in range(100)]
    plan = Plan()
    for folder in folders:
        (tmp_path / folder[1:]).mkdir()
        (tmp_path / folder[1:] / "libcuda.so.999").write_text("x")
        plan.link(f"{folder}/libcuda.so.1", "libcuda.so.180.1")
    base = root.open_root(str(tmp_path))
    loader.complete(plan, base, loader.probe(base), folders, [f"{folder}/libcuda.so.180.1" for folder in folders])
    os.close(base)
    assert len(plan.warnings) == WARNINGS_MAX + 1 and plan.warnings[-1] == "and 60 more warnings on the image"
