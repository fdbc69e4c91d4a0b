# SPDX-License-Identifier: Apache-2.0
"""Every file of every driver branch is found and has its capability; all places of a file; both halves of a cache."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from cdi.host import table
from hook import selection
from hook.request import Request
from tests import driverbranches
from tests.driverbranches import Branch
from tests.hosts import look
from tests.needs import needs_root
from tests.simhost import Host, SimulatedHost, build, elfwriter
from tests.simhost.tree import Tree, ldconfig

FOLDER, FOLDER32 = "/usr/lib/x86_64-linux-gnu", "/usr/lib/i386-linux-gnu"


def install(top: Path, branch: Branch) -> SimulatedHost:
    """A host with exactly the files of a row."""
    host = build(top, Host(version=branch.version, graphics=False, firmware=False))
    tree = Tree(top)
    for one in host.libraries:
        host.path(one.path).unlink()
    for name, (_, soname) in branch.sonames().items():
        # As packages do: VDPAU's loader looks in a folder of its own.
        inside = "/vdpau" if name.startswith("libvdpau") else ""
        tree.write(f"{FOLDER}{inside}/{name}", elfwriter.shared_object(soname))
        twin = elfwriter.shared_object(soname, bits=32, machine=elfwriter.EM_386)
        tree.write(f"{FOLDER32}{inside}/{name}", twin)
    for name in driverbranches.PROGRAMS:
        tree.write(f"/usr/bin/{name}", "#!/bin/sh\n", 0o755)
    for name in (*driverbranches.FILES, *branch.files):
        # Packages have Vulkan's and OpenCL's files in either.
        tree.write(name.format(v=branch.version), "{}\n")
    for name in branch.firmware:
        tree.write(f"/lib/firmware/nvidia/{branch.version}/{name}", "")
    tree.write("/usr/lib/xorg/modules/drivers/nvidia_drv.so", "")
    tree.write(f"/usr/lib/xorg/modules/extensions/libglxserver_nvidia.so.{branch.version}", "")
    for name in ("nvngx.dll", "_nvngx.dll"):
        tree.write(f"{FOLDER}/nvidia/wine/{name}", "MZ")
    return host


def test_the_branch_that_brought_a_library() -> None:
    """None says of a branch's library that it is newer, and of one that comes between two that it is older."""
    seen: dict[str, tuple[int, int]] = {}
    before = 0
    for branch in driverbranches.BRANCHES:
        number = int(branch.version.partition(".")[0])
        for name in branch.sonames():
            seen.setdefault(name.partition(".so")[0], (before, number))
        before = number
    for stem, (after, first) in seen.items():
        since = table.BY_STEM[stem].since or 0
        assert since <= first and (not after or since > after), stem


@pytest.mark.parametrize("branch", driverbranches.BRANCHES, ids=lambda branch: str(branch.version))
def test_every_file_of_a_branch(tmp_path: Path, branch: Branch) -> None:
    found = look(install(tmp_path, branch))
    expected = branch.sonames()
    for bits in (64, 32):
        libraries = [item for item in found["libraries"] if item["class"] == bits]
        assert {item["name"]: (item["capability"], item["soname"]) for item in libraries} == expected
    # By what is known of it, and not because an unknown one is taken for a compute library.
    assert [name for name in expected if name.partition(".so")[0] not in table.BY_STEM] == []
    assert {item["name"]: item["capability"] for item in found["programs"]} == driverbranches.PROGRAMS
    files = {item["container_path"] for item in found["files"]}
    modules = "/usr/lib/xorg/modules"
    assert files == {
        *(name.format(v=branch.version) for name in (*driverbranches.FILES, *branch.files)),
        f"{modules}/drivers/nvidia_drv.so",
        f"{modules}/extensions/libglxserver_nvidia.so.{branch.version}",
        f"{FOLDER}/nvidia/wine/nvngx.dll",
        f"{FOLDER}/nvidia/wine/_nvngx.dll",
    }
    assert [Path(item["path"]).name for item in found["firmware"]] == list(branch.firmware)
    assert [text for text in found["warnings"] if "/dev/" not in text] == []


def test_every_library_that_both_references_name_is_known() -> None:
    """libnvidia-container's table by capability, and what NVIDIA's generator mounts besides."""
    groups = {
        "utility": "libnvidia-ml libnvidia-cfg libnvidia-nscq",
        "compute": "libcuda libcudadebugger libnvidia-opencl libnvidia-gpucomp libnvidia-ptxjitcompiler "
        "libnvidia-fatbinaryloader libnvidia-allocator libnvidia-compiler libnvidia-pkcs11 "
        "libnvidia-pkcs11-openssl3 libnvidia-nvvm libnvidia-nvvm70 libnvidia-tileiras",
        "video": "libvdpau_nvidia libnvidia-encode libnvidia-opticalflow libnvcuvid",
        "graphics": "libnvidia-eglcore libnvidia-glcore libnvidia-tls libnvidia-glsi libnvidia-fbc libnvidia-ifr "
        "libnvidia-rtcore libnvoptix libGLX_nvidia libEGL_nvidia libGLESv2_nvidia libGLESv1_CM_nvidia "
        "libnvidia-glvkspirv libnvidia-cbl libnvidia-egl-gbm libnvidia-egl-wayland libnvidia-egl-wayland2 "
        "libnvidia-egl-xcb libnvidia-egl-xlib libnvidia-vulkan-producer",
        "ngx": "libnvidia-ngx",
    }
    for group, stems in groups.items():
        assert {table.BY_STEM[stem].group for stem in stems.split()} == {group}


@pytest.mark.parametrize("folder", ["/etc", "/usr/local/share", "/usr/share", "/usr/local/nvidia/share"])
@pytest.mark.parametrize("name", ["vulkan/icd.d/nvidia_icd.json", "vulkan/implicit_layer.d/nvidia_layers.json"])
def test_vulkans_files_are_found_in_each_place(tmp_path: Path, folder: str, name: str) -> None:
    host = build(tmp_path, Host(layout="h200", graphics=False))
    Tree(host.root).write(f"{folder}/{name}", "{}\n")
    assert [(item["path"], item["container_path"]) for item in look(host)["files"]] == [
        (f"{folder}/{name}", f"/etc/{name}")
    ]


@pytest.mark.parametrize(
    "folder",
    ["/srv/firmware", "/lib/firmware/updates/6.1.0-test", "/lib/firmware/updates", "/lib/firmware/6.1.0-test"],
)
def test_firmware_in_each_place_where_the_kernel_looks(tmp_path: Path, folder: str) -> None:
    host = build(tmp_path, Host(graphics=False, firmware=False))
    tree = Tree(host.root)
    tree.write("/proc/sys/kernel/osrelease", "6.1.0-test\n")
    tree.write("/sys/module/firmware_class/parameters/path", "/srv/firmware\n")
    tree.write(f"{folder}/nvidia/{host.host.version}/gsp_ga10x.bin", "")
    (item,) = look(host)["firmware"]
    assert item["container_path"] == f"/lib/firmware/nvidia/{host.host.version}/gsp_ga10x.bin"


@needs_root
@pytest.mark.parametrize("form", ["new", "compat", "old"])
def test_32_bit_twins_by_the_loader_cache(tmp_path: Path, form: str) -> None:
    """Only the cache leads to either folder; with `compat` it has the old header in front of the new one."""
    host = build(tmp_path, Host(layout="flatcar", i386=True, graphics=False))
    tree = Tree(host.root)
    tree.write("/etc/ld.so.conf.d/nvidia.conf", "/opt/nvidia/lib64\n/opt/nvidia/lib32\n")
    try:
        ldconfig("-r", str(host.root), "-c", form)
    except (RuntimeError, subprocess.SubprocessError) as error:
        pytest.skip(f"this ldconfig writes no cache of the form {form}: {error}")
    found = look(host)
    classes = {(item["soname"], item["class"]) for item in found["libraries"]}
    assert {("libcuda.so.1", 64), ("libcuda.so.1", 32), ("libnvidia-ml.so.1", 32)} <= classes
    assert {item["path"] for item in found["libraries"]} == {one.path for one in host.libraries}
    chosen = {
        wanted: {(item["soname"], item["class"]) for item in selection.select(found, Request(None, wanted)).libraries}
        for wanted in (("compute", "utility"), ("compute", "utility", "compat32"))
    }
    plain, twins = chosen.values()
    assert {bits for _, bits in plain} == {64} and plain < twins and ("libcuda.so.1", 32) in twins
