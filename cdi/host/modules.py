# SPDX-License-Identifier: Apache-2.0
"""The driver's kernel modules: which are loaded, and loading those that are not.

Nothing on a host loads `nvidia-uvm` by itself: in a desktop the display server's start does, on a server the first
CUDA program by way of a set-uid helper. A container's program can't.
"""

from __future__ import annotations

from cdi.host import fingerprint, gpus, kmods
from ldcache import root
from ldcache.errors import NvhookError

LOADED = "/proc/modules"
LOADED_MAX = 1 << 20
VENDOR = "0x10de"
# PCI base class 03 is a display controller, 3D controllers such as data-centre GPUs included.
DISPLAY_CLASS = "0x03"

# In the order in which they depend on each other. Without the first nothing works; the others are for compute and
# for displays.
NAMES = ("nvidia", "nvidia-uvm", "nvidia-modeset")

# A driver that finds a GPU broken can take minutes to give up.
DEADLINE = 120.0


def missing(root_fd: int) -> list[str]:
    """Those of NAMES that are not loaded. One that is built into the kernel has a folder in sysfs, no line."""
    try:
        text = root.read_file(root_fd, LOADED, LOADED_MAX).decode("utf-8", "replace")
    except OSError:
        text = ""
    lines = {line.split(" ", 1)[0] for line in text.splitlines()}
    return [name for name in NAMES if kernel_name(name) not in lines and not in_sysfs(root_fd, name)]


def kernel_name(name: str) -> str:
    """The kernel's own spelling."""
    return name.replace("-", "_")


def in_sysfs(root_fd: int, name: str) -> bool:
    """Whether sysfs knows the module as live. A module that is coming or going has a folder too."""
    folder = f"{fingerprint.MODULE_FOLDER}/{kernel_name(name)}"
    state = fingerprint.text(root_fd, f"{folder}/initstate").strip()
    return root.exists(root_fd, folder) and state in ("", "live")


def has_gpu(root_fd: int) -> bool:
    """Whether a display controller of NVIDIA's is on the PCI bus."""
    try:
        names = root.listdir(root_fd, gpus.PCI)
    except OSError:
        return False
    return any(
        fingerprint.text(root_fd, f"{gpus.PCI}/{name}/vendor").strip() == VENDOR
        and fingerprint.text(root_fd, f"{gpus.PCI}/{name}/class").startswith(DISPLAY_CLASS)
        for name in names
    )


def load(root_fd: int) -> tuple[list[str], list[str]]:
    """Load what is missing into the running kernel: the names, and warnings about those that can't be.

    `root_fd` is the machine's own root; there is no other kernel to load into. Raises NvhookError where the driver
    itself can't be loaded.
    """
    done: list[str] = []
    warnings: list[str] = []
    names = missing(root_fd)
    if names and not has_gpu(root_fd):
        warnings.append(f"no module is loaded: {gpus.PCI} has no display controller of NVIDIA's")
        return done, warnings
    program = kmods.modprobe(root_fd) or kmods.MODPROBE
    for name in names:
        reason = kmods.run(program, name, DEADLINE)
        if reason is None:
            done.append(name)
        elif name == NAMES[0]:
            what = f"cannot load the kernel module {name}: {reason}"
            raise NvhookError(what, "see dmesg; after a kernel update the driver's modules may have to be built again")
        else:
            warnings.append(f"cannot load the kernel module {name}: {reason}")
    return done, warnings
