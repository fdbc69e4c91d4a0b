# SPDX-License-Identifier: Apache-2.0
"""What kind of machine this is: with the driver's module, WSL, Tegra, or one whose GPUs are for virtual machines.

Only the first has /proc/driver/nvidia, which an inventory is made of. The others have CDI files (`cdi.modes`).
"""

from __future__ import annotations

import stat
from dataclasses import dataclass, field
from typing import Any

from cdi.host import fingerprint, gpus
from ldcache import root
from ldcache.errors import NvhookError

DXG = "/dev/dxg"
WSL_LIBRARIES = "/usr/lib/wsl/lib"
DXCORE = f"{WSL_LIBRARIES}/libdxcore.so"

TEGRA_RELEASE = "/etc/nv_tegra_release"
SOC_FAMILY = "/sys/devices/soc0/family"
# In the model's name: Orin's GPU under its own module, and Thor's.
INTEGRATED = ("(nvgpu)", "NVIDIA Thor")

# The virtual GPU manager's module. That driver has neither CUDA nor NVML for containers.
VGPU_MODULE = f"{fingerprint.MODULE_FOLDER}/nvidia_vgpu_vfio"


@dataclass(slots=True)
class Parts:
    """What a machine without an inventory has for containers, at the same paths inside and outside but for `mounts`,
    which has host path and container path. `links` are (target, place); `folders` those of the libraries.
    `cuda` is the driver's CUDA version, `compat_folder` where images have newer libraries for just this machine; each
    "" where there is none."""

    nodes: list[dict[str, Any]] = field(default_factory=list)
    mounts: list[tuple[str, str]] = field(default_factory=list)
    links: list[tuple[str, str]] = field(default_factory=list)
    folders: list[str] = field(default_factory=list)
    cuda: str = ""
    compat_folder: str = ""
    warnings: list[str] = field(default_factory=list)


def detect(root_fd: int) -> str:
    """The mode of `cdi generate` for this host: `wsl`, `csv` (Tegra) or `nvml`."""
    if root.exists(root_fd, DXG) and root.exists(root_fd, DXCORE):
        return "wsl"
    tegra = root.exists(root_fd, TEGRA_RELEASE) or fingerprint.text(root_fd, SOC_FAMILY).startswith("tegra")
    loaded = bool(fingerprint.text(root_fd, fingerprint.VERSION_FILE))
    if (tegra and not loaded) or any(map(is_integrated, _models(root_fd))):
        return "csv"
    return "nvml"


def _models(root_fd: int) -> list[str]:
    found = []
    for bus_id in gpus.bus_ids(root_fd):
        try:
            path = f"{fingerprint.GPUS}/{bus_id}/information"
            text = root.read_file(root_fd, path, gpus.INFORMATION_MAX).decode("utf-8", "replace")
        except OSError:
            continue
        found.append(gpus.parse_information(text).get("Model", ""))
    return found


def is_integrated(model: str) -> bool:
    """Whether a GPU of that name is a part of a Tegra."""
    return any(name in model for name in INTEGRATED)


def refuse(root_fd: int) -> None:
    """Raises NvhookError on a host of which no inventory can be made, however whole its driver is."""
    if root.exists(root_fd, VGPU_MODULE):
        what = f"this is a vGPU host: its driver ({VGPU_MODULE}) gives GPUs to virtual machines, not to containers"
        raise NvhookError(what, "start containers in a virtual machine that has the vGPU guest driver")
    refuse_moduleless(root_fd)


def refuse_moduleless(root_fd: int) -> None:
    """Raises NvhookError on WSL, and on a Tegra whose module is not the ordinary one."""
    if fingerprint.text(root_fd, fingerprint.VERSION_FILE):
        return
    mode = detect(root_fd)
    if mode != "nvml":
        name = {"wsl": "WSL", "csv": "Tegra"}[mode]
        what = f"this is {name}, where no module tells of GPUs in /proc/driver/nvidia: there is no inventory of it"
        how = 'an engine that reads CDI files, or nvhook-runtime with `mode = "cdi"` below `[runtime]`'
        raise NvhookError(what, f"`cdi generate --mode {mode} --output /var/run/cdi/nvidia.yaml`, and {how}")


def node(root_fd: int, path: str) -> dict[str, Any] | None:
    """A character device as a CDI file has it, its mode and group given; None for anything else, a link included."""
    try:
        status = root.stat(root_fd, path, follow=False)
    except OSError:
        return None
    if not stat.S_ISCHR(status.st_mode):
        return None
    made: dict[str, Any] = {"path": path, "fileMode": stat.S_IMODE(status.st_mode), "permissions": "rw"}
    return made | ({"gid": status.st_gid} if status.st_gid else {})


def is_file(root_fd: int, path: str) -> bool:
    """Whether a path leads to a regular file."""
    try:
        return stat.S_ISREG(root.stat(root_fd, path).st_mode)
    except OSError:
        return False


def chain(root_fd: int, path: str) -> tuple[list[tuple[str, str]], str]:
    """The links from `path` on, each as (target, place), and the name where they end. Raises OSError.

    Names stay as they are written, so that a container gets the same ones; a folder that is a link is none here.
    """
    links: list[tuple[str, str]] = []
    for _ in range(fingerprint.LINKS_MAX):
        try:
            target = root.readlink(root_fd, path)
        except OSError:
            root.stat(root_fd, path)
            return links, path
        links.append((target, path))
        path = joined(path.rpartition("/")[0], target)
    raise OSError(40, "Too many levels of symbolic links")


def joined(folder: str, target: str) -> str:
    """Where a link in `folder` leads, by name."""
    parts: list[str] = []
    for part in (target if target.startswith("/") else f"{folder}/{target}").split("/"):
        if part == "..":
            parts = parts[:-1]
        elif part not in ("", "."):
            parts.append(part)
    return "/" + "/".join(parts)
