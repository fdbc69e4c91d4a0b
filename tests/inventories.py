# SPDX-License-Identifier: Apache-2.0
"""Inventories written by hand, for tests of what reads them; `tests.simhost` makes real ones."""

from __future__ import annotations

from typing import Any

VERSION = "580.159.04"
FOLDER = "/usr/lib/x86_64-linux-gnu"


def library(
    stem: str, capability: str, soname: str, links: tuple[str, ...] = (), elf_class: int = 64
) -> dict[str, Any]:
    """A library entry, `libcuda` becoming libcuda.so.580.159.04."""
    folder = FOLDER if elf_class == 64 else "/usr/lib/i386-linux-gnu"
    name = f"{stem}.so.{VERSION}"
    return {
        "path": f"{folder}/{name}",
        "folder": folder,
        "name": name,
        "soname": soname,
        "links": list(links),
        "capability": capability,
        "also": [],
        "class": elf_class,
        "machine": 62 if elf_class == 64 else 3,
    }


def node(path: str, major: int, minor: int, role: str, gpu: str | None = None) -> dict[str, Any]:
    """A node entry."""
    numbers = {"major": major, "minor": minor, "mode": 0o666, "uid": 0, "gid": 0}
    return {"path": path, "host_path": path, "role": role, "gpu": gpu, **numbers}


def gpu(index: int, minor: int | None = None, uuid: str | None = "known") -> dict[str, Any]:
    """A GPU entry; `uuid` may be None."""
    minor = index if minor is None else minor
    known = f"GPU-{index:08x}-2222-3333-4444-555555555555" if uuid == "known" else uuid
    return {
        "index": index,
        "minor": minor,
        "bus_id": f"0000:{index + 6:02x}:00.0",
        "uuid": known,
        "arch": "9.0",
        "brand": "Nvidia",
        "mig_mode": None,
        "numa_node": None,
        "name": "NVIDIA H200",
        "node": f"/dev/nvidia{minor}",
    }


def inventory(gpus: int = 2) -> dict[str, Any]:
    """An ordinary host with every kind of entry."""
    cards = [gpu(index) for index in range(gpus)]
    return {
        "schema": 1,
        "driver": {"version": VERSION, "cuda": None},
        "gpus": cards,
        "faults": [],
        "libraries": [
            library("libcuda", "compute", "libcuda.so.1", ("libcuda.so",)),
            library("libnvidia-ptxjitcompiler", "compute", "libnvidia-ptxjitcompiler.so.1"),
            library("libnvidia-ml", "utility", "libnvidia-ml.so.1", ("libnvidia-ml.so",)),
            library("libnvcuvid", "video", "libnvcuvid.so.1"),
            library("libGLX_nvidia", "graphics", "libGLX_nvidia.so.0", ("libGLX_indirect.so.0",)),
            library("libEGL_nvidia", "graphics", "libEGL_nvidia.so.0"),
            library("libnvidia-glcore", "graphics", f"libnvidia-glcore.so.{VERSION}"),
            library("libnvidia-allocator", "graphics", "libnvidia-allocator.so.1", ("gbm/nvidia-drm_gbm.so",)),
            library("libnvidia-ngx", "ngx", "libnvidia-ngx.so.1"),
            library("libcuda", "compute", "libcuda.so.1", ("libcuda.so",), elf_class=32),
        ],
        "programs": [
            {"path": "/usr/bin/nvidia-smi", "name": "nvidia-smi", "capability": "utility"},
            {"path": "/usr/bin/nvidia-cuda-mps-server", "name": "nvidia-cuda-mps-server", "capability": "compute"},
        ],
        "files": [
            {
                "path": "/usr/share/vulkan/icd.d/nvidia_icd.json",
                "container_path": "/etc/vulkan/icd.d/nvidia_icd.json",
                "capability": "graphics",
                "kind": "graphics",
                "links": [],
            }
        ],
        "firmware": [
            {
                "path": f"/lib/firmware/nvidia/{VERSION}/gsp_ga10x.bin",
                "container_path": f"/lib/firmware/nvidia/{VERSION}/gsp_ga10x.bin",
            }
        ],
        "sockets": [
            {
                "path": "/run/nvidia-persistenced/socket",
                "container_path": "/run/nvidia-persistenced/socket",
                "capability": "utility",
                "kind": "socket",
            }
        ],
        "nodes": [
            node("/dev/nvidiactl", 195, 255, "control"),
            node("/dev/nvidia-uvm", 238, 0, "uvm"),
            node("/dev/nvidia-uvm-tools", 238, 1, "uvm-tools"),
            node("/dev/nvidia-modeset", 195, 254, "modeset"),
            *[node(card["node"], 195, card["minor"], "gpu", card["bus_id"]) for card in cards],
            *[node(f"/dev/dri/renderD{128 + i}", 226, 128 + i, "drm", card["bus_id"]) for i, card in enumerate(cards)],
        ],
        "warnings": [],
    }


def mig_device(card: dict[str, Any], index: int, gi: int, ci: int = 0, uuid: str | None = "known") -> dict[str, Any]:
    """A MIG device of a GPU, with the two nodes and the two access files that it needs."""
    known = f"MIG-{card['index']:04x}{ci:02x}{gi:02x}-2222-3333-4444-55555555555{ci}" if uuid == "known" else uuid
    minor = 30 + 100 * card["index"] + 10 * gi
    folder = f"/proc/driver/nvidia/capabilities/gpu{card['minor']}/mig/gi{gi}"
    caps = [
        node(f"/dev/nvidia-caps/nvidia-cap{number}", 237, number, "mig", card["bus_id"])
        for number in (minor, minor + 1 + ci)
    ]
    access = [f"{folder}/access", f"{folder}/ci{ci}/access"]
    numbers = {"index": index, "gi": gi, "ci": ci}
    told = {"uuid": known, "profile": "1g.18gb"}
    return {**told, "gpu": card["bus_id"], **numbers, "nodes": caps, "access": access}


def with_everything(made: dict[str, Any], divided: tuple[int, ...] = ()) -> dict[str, Any]:
    """The same host with MIG devices on some of its GPUs, MIG's control nodes, IMEX channels and all gates."""
    made["mig"] = [mig_device(made["gpus"][i], j, gi) for i in divided for j, gi in enumerate((3, 1, 7))]
    folder = "/proc/driver/nvidia/capabilities"
    made["mig_control"] = {
        name: {
            "nodes": [node(f"/dev/nvidia-caps/nvidia-cap{minor}", 237, minor, "mig")],
            "access": [f"{folder}/mig/{name}"],
            "uuid": None,
            "index": None,
        }
        for minor, name in ((1, "config"), (2, "monitor"))
    }
    channels = "/dev/nvidia-caps-imex-channels"
    made["imex"] = [
        {"channel": first, "count": count, "node": node(f"{channels}/channel{first}", 236, first, "imex")}
        for first, count in ((0, 3), (8, 4))
    ]
    file = {
        "path": "/etc/cufile.json",
        "container_path": "/etc/cufile.json",
        "capability": "",
        "kind": "gds",
        "links": [],
    }
    made["gates"] = {
        "gds": {"nodes": [node("/dev/nvidia-fs0", 235, 0, "gds")], "files": [file]},
        "mofed": {"nodes": [node("/dev/infiniband/uverbs0", 231, 192, "mofed")], "files": []},
        "gdrcopy": {"nodes": [node("/dev/gdrdrv", 234, 0, "gdrcopy")], "files": []},
        "nvswitch": {"nodes": [node("/dev/nvidia-nvswitchctl", 233, 255, "nvswitch")], "files": []},
    }
    return made
