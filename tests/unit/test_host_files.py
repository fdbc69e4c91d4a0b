# SPDX-License-Identifier: Apache-2.0
"""cdi.host.files: programs, data files, firmware and sockets."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cdi.host import files
from ldcache import root
from tests.hosts import RELEASE, look
from tests.needs import needs_root
from tests.simhost import Host, SimulatedHost, build


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


def test_a_link_is_no_socket_however_late_it_came(tmp_path: Path) -> None:
    """Put there after the first look; what it leads to does answer."""
    host = build(tmp_path, Host(persistenced="answering", graphics=False))
    host.path("/run/link").symlink_to("nvidia-persistenced/socket")
    fd = root.open_root(str(host.root))
    assert files.refusal(fd, "/run/nvidia-persistenced/socket") is None
    assert files.refusal(fd, "/run/link") == "it is a link"
    os.close(fd)
    host.close()


def test_what_belongs_to_a_library_that_is_not_there_costs_no_look(tmp_path: Path) -> None:
    """Each place that is looked at for a file is looked at by every start, to see that there still is none."""
    found = look(build(tmp_path, Host(graphics=False)))
    looked = [path for kind, path, _ in found["fingerprint"] if kind == "file"]
    words = ("ngx", "vulkansc", "application-profiles", "wine", "gridd/", "nvidia-gridd", "opengl-driver", "kubernetes")
    assert [path for path in looked if any(word in path for word in words)] == []
