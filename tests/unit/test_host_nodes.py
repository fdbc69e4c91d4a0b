# SPDX-License-Identifier: Apache-2.0
"""cdi.host.nodes: the device nodes that are taken."""

from __future__ import annotations

import os
from pathlib import Path

from tests.hosts import look
from tests.needs import needs_root
from tests.simhost import Host, SimulatedHost, build
from tests.simhost import gpus as some_gpus


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
        "links": [f"/dev/dri/by-path/pci-{first}-card"],
    }
    # By the PCI address, where the host has a link and it leads to that very node.
    by_path = workstation.path("/dev/dri/by-path")
    (by_path / f"pci-{first}-card").unlink()
    (by_path / f"pci-{first}-render").unlink()
    (by_path / f"pci-{first}-render").symlink_to("../renderD129")
    links = {n["path"]: n["links"] for n in look(workstation)["nodes"] if n["role"] == "drm"}
    assert links["/dev/dri/card0"] == links["/dev/dri/renderD128"] == []
    assert links["/dev/dri/renderD129"] == [f"/dev/dri/by-path/pci-{second}-render"]


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
