# SPDX-License-Identifier: Apache-2.0
"""cdi.host.libraries: what discovery finds of the driver's libraries, and what it leaves out."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest

from cdi.host import inventory
from ldcache.errors import NvhookError
from tests.hosts import RELEASE, by_name, look
from tests.simhost import Host, SimulatedHost, build, elfwriter


def test_every_installed_library_is_found(workstation: SimulatedHost) -> None:
    found = {(item["path"], item["soname"], item["class"]) for item in look(workstation)["libraries"]}
    assert found == {(one.path, one.soname, one.bits) for one in workstation.libraries}


def test_a_library_entry(workstation: SimulatedHost) -> None:
    found = look(workstation)
    assert by_name(found, f"libcuda.so.{RELEASE}") == {
        "path": f"/usr/lib/x86_64-linux-gnu/libcuda.so.{RELEASE}",
        "folder": "/usr/lib/x86_64-linux-gnu",
        "name": f"libcuda.so.{RELEASE}",
        "soname": "libcuda.so.1",
        "links": ["libcuda.so"],
        "capability": "compute",
        "also": [],
        "class": 64,
        "machine": 62,
    }
    twin = by_name(found, f"libcuda.so.{RELEASE}", 32)
    assert (twin["folder"], twin["machine"]) == ("/usr/lib/i386-linux-gnu", 3)


@pytest.mark.parametrize(
    ("stem", "links"),
    [
        # Wanted, although the host has none of these names.
        ("libGLX_nvidia", ["libGLX_indirect.so.0"]),
        # As the host has it, and what Mesa's GBM opens.
        ("libnvidia-allocator", ["gbm/nvidia-drm_gbm.so", "libnvidia-allocator.so"]),
        ("libnvidia-ml", ["libnvidia-ml.so"]),
        # The host has no development name, so containers get none.
        ("libnvidia-opencl", []),
    ],
)
def test_links(workstation: SimulatedHost, stem: str, links: list[str]) -> None:
    assert by_name(look(workstation), f"{stem}.so.{RELEASE}")["links"] == links


def test_capabilities(workstation: SimulatedHost) -> None:
    groups = {item["name"].partition(".so")[0]: item["capability"] for item in look(workstation)["libraries"]}
    assert groups["libnvidia-ml"] == groups["libnvidia-cfg"] == "utility"
    assert groups["libcuda"] == groups["libnvidia-nvvm"] == groups["libnvidia-opencl"] == "compute"
    assert groups["libnvcuvid"] == groups["libvdpau_nvidia"] == "video"
    assert groups["libGLX_nvidia"] == groups["libnvidia-egl-gbm"] == groups["libnvoptix"] == "graphics"
    assert groups["libnvidia-ngx"] == "ngx"


def test_what_graphics_libraries_are_linked_against_says_so(workstation: SimulatedHost) -> None:
    assert by_name(look(workstation), f"libnvidia-gpucomp.so.{RELEASE}")["also"] == ["graphics"]


@pytest.mark.parametrize("leftover", ["550.90.07", "595.10"])
def test_another_version_is_never_mixed_in(tmp_path: Path, leftover: str) -> None:
    """Older or newer (then ldconfig's links lead to it), on disk or in the loader cache."""
    host = build(tmp_path, Host(leftover=leftover))
    found = look(host)
    assert {item["name"] for item in found["libraries"]} == {Path(one.path).name for one in host.libraries}
    assert not any(leftover in item["path"] for item in found["libraries"])


def test_versions_are_compared_whole(tmp_path: Path) -> None:
    """libcuda.so.55.10 ends in the text of version 5.10, and is another driver's."""
    host = build(tmp_path, Host(version="5.10", leftover="55.10", graphics=False))
    assert {item["name"].partition(".so.")[2] for item in look(host)["libraries"]} == {"5.10"}


def test_a_link_that_leads_to_another_version_is_left_out(tmp_path: Path) -> None:
    host = build(tmp_path, Host(leftover="550.90.07", graphics=False))
    library = host.library("libnvidia-opencl.so.1")
    library.unlink()
    library.symlink_to("libnvidia-opencl.so.550.90.07")
    found = look(host)
    assert not any(item["soname"] == "libnvidia-opencl.so.1" for item in found["libraries"])
    assert any("libnvidia-opencl.so.550.90.07, of another version" in text for text in found["warnings"])


def test_unknown_libraries_of_the_driver_are_taken(tmp_path: Path) -> None:
    host = build(tmp_path, Host(graphics=False))
    folder = host.path(host.library_folder)
    for name in (f"libnvidia-brandnew.so.{RELEASE}", f"libnvnext.so.{RELEASE}", f"unlike.so.{RELEASE}"):
        (folder / name).write_bytes(elfwriter.shared_object("libnew.so.1"))
    found = look(host)
    assert by_name(found, f"libnvidia-brandnew.so.{RELEASE}")["capability"] == "compute"
    assert by_name(found, f"libnvnext.so.{RELEASE}")["soname"] == "libnew.so.1"
    assert not any(item["name"].startswith("unlike") for item in found["libraries"])


def test_of_own_versions_the_greatest_is_taken(tmp_path: Path) -> None:
    """By number, as ldconfig compares: 1.1.10 is greater than 1.1.9. A plain name is no version."""
    host = build(tmp_path)
    folder = host.path(host.library_folder)
    for version in ("1.1.9", "1.1.10", "2"):
        (folder / f"libnvidia-egl-gbm.so.{version}").write_bytes(elfwriter.shared_object("libnvidia-egl-gbm.so.1"))
    (folder / "libnvidia-nvvm70.so.4").write_bytes(elfwriter.shared_object("libnvidia-nvvm70.so.4"))
    found = look(host)
    own = [item["name"] for item in found["libraries"] if item["name"].startswith("libnvidia-egl-gbm")]
    assert own == ["libnvidia-egl-gbm.so.1.1.10"]
    assert by_name(found, "libnvidia-nvvm70.so.4")["capability"] == "compute"


def test_a_library_without_a_version_of_the_driver_counts_only_beside_it(tmp_path: Path) -> None:
    """CUDA's forward compatibility has a libnvidia-nvvm70.so.4 too, in a folder that the loader may know."""
    host = build(tmp_path, Host(graphics=False))
    stray = host.path("/usr/lib/libnvidia-nvvm70.so.4")
    stray.write_bytes(elfwriter.shared_object("libnvidia-nvvm70.so.4"))
    assert not any(item["name"].startswith("libnvidia-nvvm70") for item in look(host)["libraries"])


def test_debian_alternatives(tmp_path: Path) -> None:
    """Debian keeps the driver in nvidia/current; absolute links by way of /etc/alternatives lead there."""
    host = build(tmp_path, Host(graphics=False))
    folder, current = host.path(host.library_folder), f"{host.library_folder}/nvidia/current"
    host.path(current).mkdir(parents=True)
    real = f"libcuda.so.{RELEASE}"
    os.rename(folder / real, host.path(f"{current}/{real}"))
    host.path(f"{current}/libcuda.so.1").symlink_to(real)
    host.path("/etc/alternatives").mkdir()
    host.path("/etc/alternatives/glx--libcuda.so.1").symlink_to(f"{current}/libcuda.so.1")
    (folder / "libcuda.so.1").unlink()
    (folder / "libcuda.so.1").symlink_to("/etc/alternatives/glx--libcuda.so.1")
    found = by_name(look(host), real)
    assert (found["path"], found["folder"]) == (f"{current}/{real}", current)


def test_a_driver_where_only_the_loader_cache_leads(tmp_path: Path) -> None:
    """Its folder is none of the usual ones; links that the cache lists lead to it, inside the root."""
    host = build(tmp_path, Host(graphics=False))
    place = host.path("/srv/driver/lib64")
    place.parent.mkdir(parents=True)
    os.rename(host.path(host.library_folder), place)
    host.path(host.library_folder).mkdir()
    for name in os.listdir(place):
        if re.fullmatch(r"lib.*\.so\.\d", name):
            host.path(f"{host.library_folder}/{name}").symlink_to(f"/srv/driver/lib64/{name}")
    found = look(host)
    assert {item["folder"] for item in found["libraries"]} >= {"/srv/driver/lib64"}
    assert by_name(found, f"libcuda.so.{RELEASE}")["path"] == f"/srv/driver/lib64/libcuda.so.{RELEASE}"


@pytest.mark.parametrize("layout", ["debian", "lib64", "h200"])
def test_without_a_loader_cache(tmp_path: Path, layout: Any) -> None:
    """As on a system without ldconfig: the usual folders are enough."""
    host = build(tmp_path, Host(layout=layout, cache=False))
    found = {item["path"] for item in look(host)["libraries"]}
    assert found == {one.path for one in host.libraries}


@pytest.mark.parametrize("content", [b"", b"no loader cache", b"glibc-ld.so.cache1.1" + b"\xff" * 100])
def test_a_broken_loader_cache_is_survived(tmp_path: Path, content: bytes) -> None:
    host = build(tmp_path, Host(graphics=False))
    host.path("/etc/ld.so.cache").write_bytes(content)
    found = look(host)
    assert len(found["libraries"]) == len(host.libraries)
    assert any("/etc/ld.so.cache can't be read" in text for text in found["warnings"]) == bool(content)


def test_stale_entries_of_the_loader_cache_are_survived(tmp_path: Path) -> None:
    host = build(tmp_path, Host(graphics=False))
    host.library("libnvidia-opencl.so.1").unlink()
    found = look(host)
    assert len(found["libraries"]) == len(host.libraries) - 1


def test_library_search_path(tmp_path: Path) -> None:
    """Looked into first, below the host root; its bin and share are the driver's too."""
    host = build(tmp_path, Host(graphics=False))
    top = host.path("/srv/nv/lib64")
    top.mkdir(parents=True)
    name = f"libnvidia-opencl.so.{RELEASE}"
    (top / name).write_bytes(elfwriter.shared_object("libnvidia-opencl.so.1"))
    host.path("/srv/nv/bin").mkdir()
    host.path("/srv/nv/bin/nvidia-smi").write_text("#!/bin/sh\n")
    host.path("/srv/nv/bin/nvidia-smi").chmod(0o755)
    found = look(host, library_search_path=("/srv/nv/lib64", "/srv/none"))
    assert by_name(found, name)["path"] == f"/srv/nv/lib64/{name}"
    assert "--library-search-path /srv/none is no folder" in found["warnings"]
    assert found["options"]["library_search_path"] == ["/srv/nv/lib64", "/srv/none"]
    assert next(item["path"] for item in found["programs"]) == "/srv/nv/bin/nvidia-smi"


def test_driver_root(tmp_path: Path) -> None:
    """Host paths have the driver root in front, container paths have not; the dev root follows it."""
    host = build(tmp_path, Host(driver_root="/run/nvidia/driver", dev_root="/run/nvidia/driver"))
    found = look(host, driver_root="/run/nvidia/driver")
    library = by_name(found, f"libcuda.so.{RELEASE}")
    assert library["path"] == f"/run/nvidia/driver/usr/lib/x86_64-linux-gnu/libcuda.so.{RELEASE}"
    assert library["folder"] == "/usr/lib/x86_64-linux-gnu"
    assert {item["path"] for item in found["libraries"]} == {one.path for one in host.libraries}
    assert found["programs"][0]["path"] == "/run/nvidia/driver/usr/bin/nvidia-smi"
    assert found["options"] == {
        "driver_root": "/run/nvidia/driver",
        "dev_root": "/run/nvidia/driver",
        "library_search_path": [],
    }
    for node in found["nodes"]:
        assert node["host_path"] == f"/run/nvidia/driver{node['path']}"


def test_a_driver_root_with_its_libraries_at_the_top(tmp_path: Path) -> None:
    """As GKE's installer leaves it; Vulkan's files lie at the top too."""
    host = build(tmp_path, Host(graphics=False, cache=False))
    bare = host.path("/srv/gke")
    (bare / "vulkan/icd.d").mkdir(parents=True)
    (bare / "vulkan/icd.d/nvidia_icd.json").write_text("{}\n")
    (bare / f"libcuda.so.{RELEASE}").write_bytes(elfwriter.shared_object("libcuda.so.1"))
    found = look(host, driver_root="/srv/gke", dev_root="/")
    assert [(item["path"], item["folder"]) for item in found["libraries"]] == [(f"/srv/gke/libcuda.so.{RELEASE}", "/")]
    assert [(item["path"], item["container_path"]) for item in found["files"]] == [
        ("/srv/gke/vulkan/icd.d/nvidia_icd.json", "/etc/vulkan/icd.d/nvidia_icd.json")
    ]


def test_a_driver_root_that_is_not_there(workstation: SimulatedHost) -> None:
    with pytest.raises(NvhookError, match="cannot open the driver root /run/none: No such file or directory$"):
        look(workstation, driver_root="/run/none")


def test_links_inside_a_driver_root_stay_inside(tmp_path: Path) -> None:
    host = build(tmp_path, Host(driver_root="/drv", graphics=False))
    name = f"libnvidia-cfg.so.{RELEASE}"
    library = host.path(f"/drv/usr/lib/x86_64-linux-gnu/{name}")
    os.rename(library, host.path("/drv/moved.so"))
    os.rename(host.path("/drv/moved.so"), host.path(f"/drv/usr/lib/{name}"))
    library.symlink_to(f"/usr/lib/{name}")
    assert by_name(look(host, driver_root="/drv"), name)["path"] == f"/drv/usr/lib/{name}"


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"#!/bin/sh\n" + b"x" * 100, "not an ELF file"),
        (elfwriter.shared_object("libcuda.so.1", machine=elfwriter.EM_AARCH64), "ELF machine 183"),
    ],
)
def test_a_file_that_is_no_library_of_this_machine(tmp_path: Path, content: bytes, reason: str) -> None:
    host = build(tmp_path, Host(graphics=False))
    host.library("libcuda.so.1").write_bytes(content)
    found = look(host)
    assert not any(item["soname"] == "libcuda.so.1" for item in found["libraries"])
    assert any(f"libcuda.so.{RELEASE} is left out" in text and reason in text for text in found["warnings"])
    assert f"libcuda.so.{RELEASE} is in no library folder" in found["warnings"]


def test_expected_libraries_follow_the_branch(tmp_path: Path) -> None:
    old = build(tmp_path / "old", Host(version="450.80.02", graphics=False))
    assert not any("nvvm" in text for text in look(old)["warnings"])
    new = build(tmp_path / "new", Host(graphics=False))
    new.library("libnvidia-nvvm.so.4").unlink()
    assert f"libnvidia-nvvm.so.{RELEASE} is in no library folder" in look(new)["warnings"]


def test_names_that_are_no_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One such library, link or SONAME is left out; the table and a CDI file have all the rest."""
    host = build(tmp_path, Host(graphics=False))
    before = len(look(host)["libraries"])
    folder = os.fsencode(host.path(host.library_folder))
    for name in (b"libodd\xff.so", b"libworse\xc3.so"):
        Path(os.fsdecode(folder + b"/" + name + b"." + RELEASE.encode())).write_bytes(
            elfwriter.shared_object("libodd.so")
        )
    os.symlink("nowhere", folder + b"/libdangling\xff.so." + RELEASE.encode())
    os.symlink(f"libcuda.so.{RELEASE}", folder + b"/libcuda.so.\xff")
    stub = elfwriter.shared_object("libplain.so.X").replace(b"libplain.so.X", b"libplain.so.\xff")
    (host.path(host.library_folder) / f"libplain.so.{RELEASE}").write_bytes(stub)
    found = look(host)
    assert len(found["libraries"]) == before
    assert by_name(found, f"libcuda.so.{RELEASE}")["links"] == ["libcuda.so"]
    warnings = [text for text in found["warnings"] if "left out: no CDI file could" in text]
    assert len(warnings) == 4 and all(text.isprintable() for text in warnings)
    assert inventory.main(["--host-root", str(host.root)]) == 0
    assert "libodd\\udcff" in capsys.readouterr().out


def test_a_loader_cache_that_is_too_long_is_named(tmp_path: Path) -> None:
    host = build(tmp_path, Host(graphics=False))
    os.truncate(host.path("/etc/ld.so.cache"), 10 << 30)
    found = look(host)
    assert len(found["libraries"]) == len(host.libraries)
    assert "/etc/ld.so.cache can't be read: read: File too large" in found["warnings"]


def test_a_loader_cache_that_is_no_file_is_named(tmp_path: Path) -> None:
    host = build(tmp_path, Host(graphics=False))
    host.path("/etc/ld.so.cache").unlink()
    os.mkfifo(host.path("/etc/ld.so.cache"))
    assert any(text.startswith("/etc/ld.so.cache can't be read: ") for text in look(host)["warnings"])
