# SPDX-License-Identifier: Apache-2.0
"""WSL: the GPU is /dev/dxg, and the driver's files are in a Windows driver store that is mounted below /usr/lib/wsl.

A store folder is made for each driver that Windows ever installed, another vendor's GPU's included; NVIDIA's is the one
that has libcuda.so.1.1. libdxcore lies elsewhere, in a folder that ld.so.cache need not know.
"""

from __future__ import annotations

import os

from cdi.host import platform
from cdi.host.platform import Parts
from ldcache import elf, root
from ldcache.errors import NvhookError

STORES = "/usr/lib/wsl/drivers"
CUDA = "libcuda.so.1.1"
PROGRAM = "nvidia-smi"
# What the driver can't do without; the rest of the store's libraries, kernels and DLLs is taken with them.
NEEDED = (
    CUDA,
    "libcuda_loader.so",
    "libnvidia-ptxjitcompiler.so.1",
    "libnvidia-ml.so.1",
    "libnvidia-ml_loader.so",
    "nvcubins.bin",
    PROGRAM,
)


def read(root_fd: int) -> Parts:
    """What containers get. Raises NvhookError where a part is not there that nothing works without."""
    node = platform.node(root_fd, platform.DXG)
    if node is None:
        raise NvhookError(f"{platform.DXG} is missing: this is no WSL 2 with a GPU", "update WSL: wsl.exe --update")
    if not platform.is_file(root_fd, platform.DXCORE):
        what = f"{platform.DXCORE} is missing, by which programs reach {platform.DXG}"
        raise NvhookError(what, "update WSL: wsl.exe --update")
    parts = Parts(nodes=[node], mounts=[(platform.DXCORE, platform.DXCORE)])
    store = _store(root_fd, parts)
    names = [name for name in root.listdir(root_fd, store) if _is_wanted(name)]
    for name in sorted(names):
        path = f"{store}/{name}"
        if platform.is_file(root_fd, path):
            parts.mounts.append((path, path))
    have = {host_path.rpartition("/")[2] for host_path, _ in parts.mounts}
    parts.warnings += [f"{store}/{name} is missing" for name in NEEDED if name not in have]
    parts.folders = [store, platform.WSL_LIBRARIES]
    parts.links = [*_sonames(root_fd, store, have), (f"{store}/{PROGRAM}", f"/usr/bin/{PROGRAM}")]
    return parts


def _store(root_fd: int, parts: Parts) -> str:
    """NVIDIA's store; of several, the one that was written last, since Windows keeps those of older drivers."""
    try:
        folders = [f"{STORES}/{name}" for name in sorted(root.listdir(root_fd, STORES))]
    except OSError:
        folders = []
    found = [folder for folder in folders if platform.is_file(root_fd, f"{folder}/{CUDA}")]
    if not found:
        looked = ", ".join(folders) or f"{STORES}, which has none"
        raise NvhookError(f"no driver store has {CUDA}: not in {looked}", "install NVIDIA's driver for Windows")
    chosen = max(found, key=lambda folder: root.stat(root_fd, f"{folder}/{CUDA}").st_mtime_ns)
    parts.warnings += [f"{folder} is left out: {chosen} is newer" for folder in found if folder != chosen]
    return chosen


def _is_wanted(name: str) -> bool:
    return name == PROGRAM or ".so" in name or name.endswith((".bin", ".dll"))


def _sonames(root_fd: int, store: str, have: set[str]) -> list[tuple[str, str]]:
    """A link by each SONAME. Where two have one, the loader of the two is what programs open."""
    links: dict[str, str] = {}
    for name in sorted(have, key=lambda name: ("_loader" not in name, name)):
        soname = soname_of(root_fd, f"{store}/{name}")
        if soname and "/" not in soname and soname not in have:
            links.setdefault(f"{store}/{soname}", name)
    return [(target, place) for place, target in links.items()]


def soname_of(root_fd: int, path: str) -> str | None:
    """A library's SONAME; None for what is no library or has none that a file could hold."""
    try:
        fd = root.open_file(root_fd, path)
    except OSError:
        return None
    try:
        facts = elf.read(fd)
    except (elf.InvalidElf, OSError):
        return None
    finally:
        os.close(fd)
    soname = os.fsdecode(facts.soname) if facts.soname else None
    return soname if soname and soname.isprintable() else None
