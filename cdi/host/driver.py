# SPDX-License-Identifier: Apache-2.0
"""The loaded kernel module: its version, its flavour, and how it wants its device nodes.

Every driver library must be of exactly this version; the module refuses calls from any other.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from cdi.host import fingerprint
from ldcache import root
from ldcache.errors import NvhookError

MODULE_VERSION = "/sys/module/nvidia/version"
PARAMS = "/proc/driver/nvidia/params"

# "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build …" and
# "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.90.07  Fri May 31 …" (nvidia.ko, nvidia_read_version).
OPEN = re.compile(r"NVIDIA UNIX Open Kernel Module for (\S+)\s+(\d+(?:\.\d+)+)\s")
PROPRIETARY = re.compile(r"NVIDIA UNIX (\S+) Kernel Module\s+(\d+(?:\.\d+)+)\s")
VERSION = re.compile(r"\d+(?:\.\d+)+")

# What nvidia-modprobe and the user-space driver obey when they make nodes; the other parameters are not ours.
NODE_PARAMS = ("ModifyDeviceFiles", "DeviceFileUID", "DeviceFileGID", "DeviceFileMode")


@dataclass(frozen=True, slots=True)
class Driver:
    """`machine` is the kernel's word for the architecture (`x86_64`), None where the text does not say."""

    version: str
    flavour: str | None
    machine: str | None
    params: dict[str, int]

    def to_json(self, cuda: str | None) -> dict[str, Any]:
        """As an inventory holds it; `cuda` is the CUDA version that NVML told, such as `13.0`."""
        return {"version": self.version, "flavour": self.flavour, "cuda": cuda, "params": self.params}


def read(root_fd: int, host_root: str = "/") -> Driver:
    """The loaded driver. Raises NvhookError, naming each place looked at, where there is none."""
    text = fingerprint.text(root_fd, fingerprint.VERSION_FILE)
    module = fingerprint.text(root_fd, MODULE_VERSION).strip()
    if not text:
        raise _missing(module, host_root)
    version, flavour, machine = parse_version(text)
    if version is None and VERSION.fullmatch(module):
        # A wording we have not met: the module's own version is plain.
        version = module
    if version is None:
        what = f"{fingerprint.VERSION_FILE} names no driver version: {text.splitlines()[0]!a}"
        raise NvhookError(what, "report this text to nvhook: it does not know this driver's wording")
    return Driver(version, flavour, machine, parse_params(fingerprint.text(root_fd, PARAMS)))


def parse_version(text: str) -> tuple[str | None, str | None, str | None]:
    """Version, flavour (`open`, `proprietary`) and machine from the text of /proc/driver/nvidia/version."""
    for flavour, pattern in (("open", OPEN), ("proprietary", PROPRIETARY)):
        found = pattern.search(text)
        if found:
            return found[2], flavour, found[1]
    return None, None, None


def parse_params(text: str) -> dict[str, int]:
    """Those of NODE_PARAMS that the text of /proc/driver/nvidia/params gives."""
    found = {}
    for line in text.splitlines():
        name, _, value = line.partition(":")
        known = number(value.strip())
        if name in NODE_PARAMS and known is not None:
            found[name] = known
    return found


def number(text: str) -> int | None:
    """A number as the kernel writes it; None for anything else, digits of other scripts and of a thousand places
    included."""
    return int(text) if len(text) <= 10 and text.isascii() and text.isdigit() else None


def _missing(module: str, host_root: str) -> NvhookError:
    below = "" if host_root == "/" else f" below {host_root}"
    if module:
        what = f"the nvidia module {module} is loaded, but {fingerprint.VERSION_FILE} is not there{below}"
        return NvhookError(what, "run this where the host's /proc is not masked, or give --host-root")
    places = f"{fingerprint.VERSION_FILE}, {MODULE_VERSION}"
    what = f"no NVIDIA driver is loaded: there is no {places.replace(', ', ' and no ')}{below}"
    return NvhookError(what, "load it with `modprobe nvidia`; if that fails, `dmesg` says why")


def open_root(root_fd: int, path: str, what: str) -> fingerprint.Base:
    """A root that an option names, inside the host's. Raises NvhookError if it is no folder."""
    try:
        fd = root.open_path(root_fd, path.rstrip("/") + "/")
    except OSError as error:
        raise NvhookError(f"cannot open the {what} {path}: {error.strerror}", "give an existing folder") from error
    return fingerprint.Base(fd, path)
