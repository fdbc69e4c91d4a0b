# SPDX-License-Identifier: Apache-2.0
"""Hosts without the driver's module: WSL, and Tegra."""

from __future__ import annotations

import os
from pathlib import Path

from tests.simhost import elfwriter
from tests.simhost.tree import Tree, merged_usr

STORE = "/usr/lib/wsl/drivers/nvlt.inf_amd64_0123456789abcdef"
OTHER_VENDOR = "/usr/lib/wsl/drivers/iigd_dch.inf_amd64_fedcba9876543210"
# By file name: the SONAME, None for what is no library.
STORE_FILES = {
    "libcuda.so.1.1": "libcuda.so.1.1",
    "libcuda_loader.so": "libcuda.so.1",
    "libnvidia-ptxjitcompiler.so.1": "libnvidia-ptxjitcompiler.so.1",
    "libnvidia-ml.so.1": "libnvidia-ml.so.1",
    "libnvidia-ml_loader.so": "libnvidia-ml.so.1",
    "libnvdxgdmal.so.1": "libnvdxgdmal.so.1",
    "libnvidia-opticalflow.so.1": "libnvidia-opticalflow.so.1",
    "libnvoptix.so.1": "libnvoptix.so.1",
    "nvcubins.bin": None,
    "nvwgf2umx.dll": None,
    "nvidia-smi": None,
    "nvlt.inf": None,
    "nvlt.cat": None,
}


def wsl(top: Path, *, store: str = STORE) -> Tree:
    """WSL 2 with another vendor's store beside NVIDIA's, and no loader cache that knows of either."""
    tree = _base(top)
    tree.node("/dev/dxg", 10, 125, 0o666)
    for name in ("libdxcore.so", "libd3d12.so"):
        tree.write(f"/usr/lib/wsl/lib/{name}", elfwriter.shared_object(name))
    tree.write(f"{OTHER_VENDOR}/libigd12umd64.so", elfwriter.shared_object("libigd12umd64.so"))
    for name, soname in STORE_FILES.items():
        content = elfwriter.shared_object(soname) if soname else name
        tree.write(f"{store}/{name}", content, 0o755 if name == "nvidia-smi" else 0o644)
    return tree


LISTS = "/etc/nvidia-container-runtime/host-files-for-container.d"
MULTIARCH = "/usr/lib/aarch64-linux-gnu"
DEVICES = """\
dev, /dev/nvhost-ctrl
dev, /dev/nvhost-*-gpu
dev,/dev/nvmap
dev, /dev/not-on-this-board

# a comment
"""
DRIVERS = f"""\
dir, /lib/firmware/tegra23x
lib, {MULTIARCH}/tegra/libcuda.so.1.1
lib, {MULTIARCH}/tegra/libnvrm_*.so
sym, {MULTIARCH}/libcuda.so
sym, /etc/vulkan/icd.d/nvidia_icd.json
sym, /usr/lib/aarch64-linux-gnu/libv4l/plugins/nv
lib, {MULTIARCH}/tegra/libnone.so
"""


def tegra(top: Path, devices: str = DEVICES, drivers: str = DRIVERS) -> Tree:
    """An Orin with JetPack's lists."""
    tree = _base(top)
    tree.write("/etc/nv_tegra_release", "# R36 (release), REVISION: 4.3\n")
    tree.write("/sys/devices/soc0/family", "Tegra\n")
    for name, minor in (("nvhost-ctrl", 0), ("nvhost-as-gpu", 1), ("nvhost-ctrl-gpu", 2), ("nvmap", 3)):
        tree.node(f"/dev/{name}", 505, minor, 0o660, 0, 44)
    tree.write("/dev/nvhost-plain-gpu", "no node")
    tree.write("/lib/firmware/tegra23x/fw.bin", "")
    for name, soname in (
        ("libcuda.so.1.1", "libcuda.so.1"),
        ("libnvrm_gpu.so", "libnvrm_gpu.so"),
        ("libnvrm_mem.so", "libnvrm_mem.so"),
    ):
        machine = elfwriter.EM_AARCH64
        tree.write(f"{MULTIARCH}/tegra/{name}", elfwriter.shared_object(soname, machine=machine))
    tree.link(f"{MULTIARCH}/tegra/libcuda.so", "libcuda.so.1.1")
    tree.link(f"{MULTIARCH}/libcuda.so", "libcuda.so.1")
    tree.link(f"{MULTIARCH}/libcuda.so.1", "tegra/libcuda.so.1.1")
    tree.write(f"{MULTIARCH}/tegra/nvidia_icd.json", "{}\n")
    tree.link("/etc/vulkan/icd.d/nvidia_icd.json", f"{MULTIARCH}/tegra/nvidia_icd.json")
    tree.folder(f"{MULTIARCH}/tegra/plugins")
    tree.link(f"{MULTIARCH}/libv4l/plugins/nv", "../../tegra/plugins")
    tree.write(f"{LISTS}/devices.csv", devices)
    tree.write(f"{LISTS}/drivers.csv", drivers)
    return tree


def _base(top: Path) -> Tree:
    tree = Tree(top)
    os.makedirs(top, exist_ok=True)
    merged_usr(tree)
    tree.folder("/dev")
    tree.folder("/proc")
    tree.folder("/run")
    return tree
