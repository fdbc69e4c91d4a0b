# SPDX-License-Identifier: Apache-2.0
"""cdi.host: what discovery finds on simulated hosts and on the one real host on record."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from cdi import VERSION
from cdi.host import driver, files, gpus, inventory
from cdi.host.store import Options
from ldcache import root
from ldcache.errors import NvhookError
from tests.needs import needs_root
from tests.simhost import Gpu, Host, SimulatedHost, build, build_h200, elfwriter
from tests.simhost import gpus as some_gpus

TREE = Path(__file__).resolve().parents[2]
DATA = TREE / "tests/data/h200"
RELEASE = "580.159.04"


def look(host: SimulatedHost, **options: Any) -> dict[str, Any]:
    """The inventory of a simulated host; NVML is another test's subject."""
    return inventory.gather(Options(str(host.root), nvml="never", **options))


def by_name(found: dict[str, Any], name: str, bits: int = 64) -> dict[str, Any]:
    """The library of that file name."""
    (library,) = [item for item in found["libraries"] if (item["name"], item["class"]) == (name, bits)]
    return dict(library)


@pytest.fixture(scope="module")
def h200(tmp_path_factory: pytest.TempPathFactory) -> SimulatedHost:
    return build_h200(tmp_path_factory.mktemp("h200"))


@pytest.fixture(scope="module")
def workstation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimulatedHost]:
    """A host with all that this package looks for. Tests only read it."""
    modules = ("nvidia", "nvidia_uvm", "nvidia_modeset", "nvidia_drm")
    host = Host(gpus=some_gpus(2), i386=True, modules=modules, persistenced="answering", fabricmanager="dead", mps=True)
    built = build(tmp_path_factory.mktemp("workstation"), host)
    yield built
    built.close()


# --- the real host


@pytest.mark.parametrize("peer", ["peer-cdi-default.yaml", "peer-cdi-search-path.yaml"])
def test_h200_has_every_file_of_the_peer(h200: SimulatedHost, peer: str) -> None:
    found = look(h200)
    paths = {item["path"] for kind in ("libraries", "programs", "files", "firmware") for item in found[kind]}
    places = {item["container_path"] for item in found["files"]}
    mounts = yaml.safe_load((DATA / peer).read_text())["containerEdits"]["mounts"]
    # Where two folders have one data file, one of them is enough: a container has one place for it.
    missing = [m for m in mounts if m["hostPath"] not in paths and m["containerPath"] not in places]
    assert len(mounts) > 30 and missing == []


def test_h200_has_what_the_peer_missed(h200: SimulatedHost) -> None:
    paths = [item["path"] for item in look(h200)["files"]]
    assert "/usr/local/nvidia/share/vulkan/implicit_layer.d/nvidia_layers.json" in paths


def test_h200_sonames_are_those_on_record(h200: SimulatedHost) -> None:
    rows = [row.split(" | ") for row in (DATA / "sonames.txt").read_text().splitlines() if row]
    found = {item["name"]: item["soname"] for item in look(h200)["libraries"]}
    assert found == {row[0]: row[1] for row in rows}


def test_h200_kernel_facts(h200: SimulatedHost) -> None:
    found = look(h200)
    params = {"ModifyDeviceFiles": 1, "DeviceFileUID": 0, "DeviceFileGID": 0, "DeviceFileMode": 438}
    assert found["driver"] == {"version": RELEASE, "flavour": "open", "cuda": None, "params": params}
    assert found["gpus"] == [
        {
            "index": 0,
            "minor": 0,
            "bus_id": "0000:00:06.0",
            "uuid": "GPU-11111111-2222-3333-4444-555555555555",
            "arch": None,
            "brand": None,
            "numa_node": None,
            "name": "NVIDIA H200",
            "node": "/dev/nvidia0",
        }
    ]
    assert (found["schema"], found["nvhook"], found["faults"], found["sockets"]) == (1, VERSION, [], [])
    if h200.nodes_skipped is None:
        assert found["warnings"] == []


@needs_root
def test_h200_nodes(h200: SimulatedHost) -> None:
    nodes = {n["path"]: (n["role"], n["major"], n["minor"], n["mode"], n["gpu"]) for n in look(h200)["nodes"]}
    assert nodes == {
        "/dev/nvidiactl": ("control", 195, 255, 0o666, None),
        "/dev/nvidia-uvm": ("uvm", 238, 0, 0o666, None),
        "/dev/nvidia-uvm-tools": ("uvm-tools", 238, 1, 0o666, None),
        "/dev/nvidia0": ("gpu", 195, 0, 0o666, "0000:00:06.0"),
    }


# --- the loaded module


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build  (builder@)\n",
            ("580.159.04", "open", "x86_64"),
        ),
        (
            "NVRM version: NVIDIA UNIX x86_64 Kernel Module  390.157  Wed Oct 12 09:19:07 UTC 2022\n",
            ("390.157", "proprietary", "x86_64"),
        ),
        (
            "NVRM version: NVIDIA UNIX aarch64 Kernel Module  570.124.06  Tue Feb 25 00:43:07 UTC 2025\n",
            ("570.124.06", "proprietary", "aarch64"),
        ),
        ("NVRM version: something else altogether\n", (None, None, None)),
        ("", (None, None, None)),
    ],
)
def test_version_text(text: str, expected: tuple[str | None, str | None, str | None]) -> None:
    assert driver.parse_version(text) == expected


def test_an_unknown_wording_falls_back_to_the_module(tmp_path: Path) -> None:
    host = build(tmp_path, Host(graphics=False))
    host.path("/proc/driver/nvidia/version").chmod(0o644)
    host.path("/proc/driver/nvidia/version").write_text("NVRM version: rewritten\n")
    assert look(host)["driver"]["version"] == RELEASE


def test_no_driver(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    host = build(tmp_path, Host(modules=()))
    with pytest.raises(NvhookError) as caught:
        look(host)
    for place in ("/proc/driver/nvidia/version", "/sys/module/nvidia/version", str(tmp_path)):
        assert place in caught.value.what
    assert inventory.main(["--host-root", str(tmp_path)]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err == f"nvhook: error: {caught.value.what}\n  remedy: {caught.value.remedy}\n"


def test_a_masked_proc_is_not_called_a_missing_driver(tmp_path: Path) -> None:
    host = build(tmp_path, Host(graphics=False))
    host.path("/proc/driver/nvidia/version").unlink()
    with pytest.raises(NvhookError, match=f"module {RELEASE} is loaded, but /proc/driver/nvidia/version"):
        look(host)


def test_no_host_root() -> None:
    with pytest.raises(NvhookError, match="cannot open the host root /nowhere"):
        inventory.gather(Options("/nowhere"))


# --- GPUs


def test_index_is_the_rank_by_bus_id(tmp_path: Path) -> None:
    """A GPU that can't be reached keeps its place, an excluded one has none, minors follow neither."""
    cards = (
        Gpu("10000:01:00.0", 0, "GPU-00000004-0000-0000-0000-000000000000"),
        Gpu("0000:81:00.0", 5, "GPU-00000003-0000-0000-0000-000000000000"),
        Gpu("0000:41:00.0", 1, "GPU-00000002-0000-0000-0000-000000000000", excluded=True),
        Gpu("0000:21:00.0", 2, "GPU-00000001-0000-0000-0000-000000000000", powered=False),
        Gpu("0000:11:00.0", 3, "GPU-00000000-0000-0000-0000-000000000000", numa_node=1, known=False),
    )
    host = build(tmp_path, Host(gpus=cards, graphics=False))
    found = look(host)
    assert [(g["index"], g["bus_id"], g["minor"], g["node"]) for g in found["gpus"]] == [
        (0, "0000:11:00.0", 3, "/dev/nvidia3"),
        (2, "0000:81:00.0", 5, "/dev/nvidia5"),
        (3, "10000:01:00.0", 0, "/dev/nvidia0"),
    ]
    assert [g["uuid"] for g in found["gpus"]] == [None, cards[1].uuid, cards[0].uuid]
    assert [g["numa_node"] for g in found["gpus"]] == [1, None, None]
    assert [(f["bus_id"], f["reason"]) for f in found["faults"]] == [
        (
            "0000:21:00.0",
            "the driver can't power it up: /proc/driver/nvidia/gpus/0000:21:00.0/information is empty",
        ),
        ("0000:41:00.0", gpus.EXCLUDED),
    ]
    # The one that can't be reached now is looked at again soon; the excluded one alone would not matter.
    assert "until" in {kind for kind, _, _ in found["fingerprint"]}
    numbers = {card.bus_id: index for index, card in enumerate(host.host.nvml_order)}
    assert {g["bus_id"]: g["index"] for g in found["gpus"]}.items() <= numbers.items()


def test_a_gpu_whose_text_cannot_be_read_is_left_out(tmp_path: Path) -> None:
    host = build(tmp_path, Host(gpus=some_gpus(2), graphics=False))
    text = host.path("/proc/driver/nvidia/gpus/0000:10:00.0/information")
    text.unlink()
    text.mkdir()
    found = look(host)
    assert [g["index"] for g in found["gpus"]] == [1]
    assert found["faults"][0]["reason"].startswith("cannot read /proc/driver/nvidia/gpus/0000:10:00.0/information")


def test_no_gpu(tmp_path: Path) -> None:
    found = look(build(tmp_path, Host(gpus=(), graphics=False)))
    assert (found["gpus"], found["faults"]) == ([], [])
    assert len(found["libraries"]) > 10


# --- libraries


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
    with pytest.raises(NvhookError, match="cannot open the driver root /run/none"):
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


# --- other files


def test_programs(workstation: SimulatedHost) -> None:
    found = {item["name"]: (item["path"], item["capability"]) for item in look(workstation)["programs"]}
    assert found["nvidia-smi"] == ("/usr/bin/nvidia-smi", "utility")
    assert found["nvidia-cuda-mps-server"] == ("/usr/bin/nvidia-cuda-mps-server", "compute")
    assert found["nvidia-xconfig"][1] == "graphics"


def test_programs_do_not_come_from_the_callers_path(
    workstation: SimulatedHost, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "nvidia-imex").write_text("#!/bin/sh\n")
    (tmp_path / "nvidia-imex").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "nvidia-imex" not in {item["name"] for item in look(workstation)["programs"]}


def test_graphics_files(workstation: SimulatedHost) -> None:
    found = {item["container_path"]: item for item in look(workstation)["files"]}
    assert {path.rpartition("/")[2] for path in found} == {
        "10_nvidia.json",
        "10_nvidia_wayland.json",
        "15_nvidia_gbm.json",
        "nvidia-drm-outputclass.conf",
        "nvidia.icd",
        "nvidia_icd.json",
        "nvidia_layers.json",
        "nvoptix.bin",
        "nvidia_drv.so",
        f"libglxserver_nvidia.so.{RELEASE}",
    }
    assert found["/etc/vulkan/icd.d/nvidia_icd.json"]["path"] == "/usr/share/vulkan/icd.d/nvidia_icd.json"
    assert found["/etc/OpenCL/vendors/nvidia.icd"]["capability"] == "compute"
    server = found[f"/usr/lib/xorg/modules/extensions/libglxserver_nvidia.so.{RELEASE}"]
    assert server["links"] == ["libglxserver_nvidia.so"]


def test_vulkan_files_in_etc_come_first(tmp_path: Path) -> None:
    host = build(tmp_path)
    host.path("/etc/vulkan/icd.d").mkdir(parents=True)
    host.path("/etc/vulkan/icd.d/nvidia_icd.json").write_text("{}\n")
    paths = {item["container_path"]: item["path"] for item in look(host)["files"]}
    assert paths["/etc/vulkan/icd.d/nvidia_icd.json"] == "/etc/vulkan/icd.d/nvidia_icd.json"


def test_firmware(workstation: SimulatedHost) -> None:
    """The real path on the host, the usual one in a container, though here /lib is a link."""
    assert look(workstation)["firmware"] == [
        {
            "path": f"/usr/lib/firmware/nvidia/{RELEASE}/{name}",
            "container_path": f"/lib/firmware/nvidia/{RELEASE}/{name}",
        }
        for name in ("gsp_ga10x.bin", "gsp_tu10x.bin")
    ]


def test_firmware_that_only_the_driver_knows_of(tmp_path: Path) -> None:
    host = build(tmp_path, Host(layout="h200"))
    host.path("/sys/module/firmware_class/parameters/path").write_text("\n")
    paths = [item["path"] for item in look(host)["firmware"]]
    assert paths[0] == f"/usr/local/nvidia/firmware/nvidia/{RELEASE}/gsp_ga10x.bin"


def test_sockets(workstation: SimulatedHost) -> None:
    found = look(workstation)
    assert found["sockets"] == [
        {
            "path": "/run/nvidia-persistenced/socket",
            "container_path": "/run/nvidia-persistenced/socket",
            "capability": "utility",
            "kind": "socket",
        },
        {
            "path": "/tmp/nvidia-mps",
            "container_path": "/tmp/nvidia-mps",
            "capability": "compute",
            "kind": "directory",
        },
    ]
    assert "/run/nvidia-fabricmanager/socket is left out: Connection refused" in found["warnings"]


def test_a_socket_with_a_long_name_answers(tmp_path: Path) -> None:
    """sun_path holds 108 bytes."""
    host = build(tmp_path / ("x" * 120), Host(graphics=False, persistenced="answering"))
    assert [item["path"] for item in look(host)["sockets"]] == ["/run/nvidia-persistenced/socket"]
    host.close()


@needs_root
def test_another_users_mps_folder_is_not_handed_on(tmp_path: Path) -> None:
    host = build(tmp_path, Host(graphics=False, mps=True))
    os.chown(host.path("/tmp/nvidia-mps"), 4242, 4242)
    found = look(host)
    assert found["sockets"] == []
    assert "/tmp/nvidia-mps is left out: it belongs to uid 4242" in found["warnings"]


def test_own_tops() -> None:
    folders = ["/usr/lib/x86_64-linux-gnu", "/usr/lib64", "/lib64", "/usr/local/lib", "/usr/local/nvidia/lib64"]
    assert files.own_tops([*folders, "/usr/local/nvidia/lib"]) == ["/usr/local/nvidia"]


# --- nodes


@needs_root
def test_nodes(workstation: SimulatedHost) -> None:
    found = look(workstation)
    first, second = (gpu["bus_id"] for gpu in found["gpus"])
    assert [(n["path"], n["role"], n["gpu"]) for n in found["nodes"]] == [
        ("/dev/nvidiactl", "control", None),
        ("/dev/nvidia-uvm", "uvm", None),
        ("/dev/nvidia-uvm-tools", "uvm-tools", None),
        ("/dev/nvidia-modeset", "modeset", None),
        ("/dev/nvidia0", "gpu", first),
        ("/dev/nvidia1", "gpu", second),
        ("/dev/dri/card0", "drm", first),
        ("/dev/dri/renderD128", "drm", first),
        ("/dev/dri/card1", "drm", second),
        ("/dev/dri/renderD129", "drm", second),
    ]
    assert found["nodes"][6] | {"gpu": None} == {
        "path": "/dev/dri/card0",
        "host_path": "/dev/dri/card0",
        "major": 226,
        "minor": 0,
        "mode": 0o660,
        "uid": 0,
        "gid": 0,
        "role": "drm",
        "gpu": None,
    }


@needs_root
def test_only_device_nodes_with_the_kernels_numbers_are_taken(tmp_path: Path) -> None:
    host = build(tmp_path, Host(gpus=some_gpus(3), graphics=False, missing=frozenset({"nvidia2"})))
    uvm, card = host.path("/dev/nvidia-uvm"), host.path("/dev/nvidia1")
    uvm.unlink()
    os.mknod(uvm, 0o020666, os.makedev(511, 0))
    card.unlink()
    card.symlink_to("nvidia0")
    found = look(host)
    assert {n["path"] for n in found["nodes"]} == {
        "/dev/nvidiactl",
        "/dev/nvidia-uvm-tools",
        "/dev/nvidia-modeset",
        "/dev/nvidia0",
    }
    assert found["warnings"] == [
        "/dev/nvidia-uvm is left out: it is device 511:0, and the kernel says 508:0",
        "/dev/nvidia1 is left out: it is a link",
        "/dev/nvidia2 is missing",
    ]


@needs_root
def test_the_major_of_older_branches(tmp_path: Path) -> None:
    found = look(build(tmp_path, Host(version="535.104.05", graphics=False)))
    assert {n["role"] for n in found["nodes"]} == {"control", "uvm", "uvm-tools", "modeset", "gpu"}


# --- the verb


def test_the_table(workstation: SimulatedHost, capsys: pytest.CaptureFixture[str]) -> None:
    assert inventory.main(["--host-root", str(workstation.root)]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"driver {RELEASE}, open module\nGPUs:\n")
    rows = [line.split() for line in out.splitlines()]
    assert ["0", "0", "0000:10:00.0", some_gpus(1)[0].uuid, "0", "NVIDIA", "H200"] in rows
    cuda = f"/usr/lib/x86_64-linux-gnu/libcuda.so.{RELEASE}"
    assert ["compute", "64", cuda, "libcuda.so.1", "libcuda.so"] in rows
    assert "warning: /run/nvidia-fabricmanager/socket is left out: Connection refused" in out


def test_json_is_the_kept_inventory(workstation: SimulatedHost, capsys: pytest.CaptureFixture[str]) -> None:
    kept = workstation.path("/run/nvhook/inventory.json")
    assert inventory.main(["--host-root", str(workstation.root), "--json"]) == 0
    printed = yaml.safe_load(capsys.readouterr().out)
    assert printed == yaml.safe_load(kept.read_text())
    before = kept.stat()
    assert inventory.main(["--host-root", str(workstation.root), "--quiet"]) == 0
    assert kept.stat().st_ino == before.st_ino, "a fresh inventory is not made again"
    assert inventory.main(["--host-root", str(workstation.root), "--quiet", "--refresh"]) == 0
    assert kept.stat().st_mtime_ns > before.st_mtime_ns
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    "words",
    [
        ["--driver-root", "run/nvidia"],
        ["--dev-root", "."],
        ["--library-search-path", "lib"],
        ["--nvml-timeout", "0"],
        ["--nvml-timeout", "nan"],
        ["--nvml", "sometimes"],
    ],
)
def test_usage_errors(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        inventory.main(words)
    assert caught.value.code == 2
    assert words[0] in capsys.readouterr().err


def test_roots_are_one_however_they_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A kept inventory is for a host, not for a spelling."""
    host = build(tmp_path / "host", Host(driver_root="/drv", dev_root="/drv", graphics=False))
    assert inventory.main(["--host-root", str(host.root), "--driver-root", "/drv", "--quiet"]) == 0
    kept = host.path("/run/nvhook/inventory.json").stat()
    monkeypatch.chdir(tmp_path)
    assert inventory.main(["--host-root", "./host/", "--driver-root", "/drv/", "--dev-root", "//drv/.", "--quiet"]) == 0
    assert host.path("/run/nvhook/inventory.json").stat() == kept


@needs_root
def test_a_link_where_anybody_may_make_one_is_not_followed(tmp_path: Path) -> None:
    """`ln -s / /tmp/nvidia-mps` by anybody would have mounted the host's root into every container."""
    host = build(tmp_path / "host", Host(persistenced="answering", graphics=False))
    host.path("/tmp").mkdir(exist_ok=True)
    host.path("/tmp/nvidia-mps").symlink_to("/")
    socket = host.path("/run/nvidia-persistenced/socket")
    socket.rename(socket.with_name("aside"))
    socket.symlink_to("aside")
    found = look(host)
    host.close()
    assert found["sockets"] == []
    assert "/tmp/nvidia-mps is left out: it is a link" in found["warnings"]
    assert any(warning.endswith("is left out: it is a link") for warning in found["warnings"][-2:])


@pytest.mark.parametrize("text", ["²", "1" * 5000, "-1", "0x1", ""])
def test_numbers_are_the_kernels_own(text: str) -> None:
    assert driver.number(text) is None


def test_a_number_that_is_none_leaves_one_gpu_out(tmp_path: Path) -> None:
    host = build(tmp_path, Host(gpus=some_gpus(2), graphics=False))
    information = host.path(f"/proc/driver/nvidia/gpus/{host.host.gpus[0].bus_id}/information")
    information.write_text(information.read_text().replace("Device Minor: \t 0", "Device Minor: \t ²"))
    found = look(host)
    assert [gpu["index"] for gpu in found["gpus"]] == [1]
    assert found["faults"][0]["reason"].endswith("names no device minor")


def test_a_link_is_no_socket_however_late_it_came(tmp_path: Path) -> None:
    """Put there after the first look; what it leads to does answer."""
    host = build(tmp_path, Host(persistenced="answering", graphics=False))
    host.path("/run/link").symlink_to("nvidia-persistenced/socket")
    fd = root.open_root(str(host.root))
    assert files.refusal(fd, "/run/nvidia-persistenced/socket") is None
    assert files.refusal(fd, "/run/link") == "it is no socket"
    os.close(fd)
    host.close()


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
