# SPDX-License-Identifier: Apache-2.0
"""The device nodes of the driver and of its GPUs.

A node is taken only if it is a character device, no link, and has the numbers that the kernel says it should
have: after a reload of nvidia-uvm its dynamic major is another one, and an old node leads to another driver.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from cdi.host import driver, fingerprint, gpus
from ldcache import root

# Minors of the driver's own major (nv.h).
CONTROL_MINOR = 255
MODESET_MINOR = 254
# Up to the 545 branch the major was registered as nvidia-frontend.
MAJOR_NAMES = ("nvidia", "nvidia-frontend", "nvidiactl")

# udev's links to a PCI device's nodes of DRM, by which programs find those of one GPU.
BY_PATH = "/dev/dri/by-path"
KINDS = {"card": "card", "renderD": "render"}

DRM_NAME = re.compile(r"(card|renderD)(\d+)")


@dataclass(frozen=True, slots=True)
class Wanted:
    """A node to look for: its path inside the dev root, and its numbers as far as the kernel tells them.

    `needed`: its absence is worth a word (nvidia-modeset's is not: most servers have none).
    """

    path: str
    role: str
    major: int | None = None
    minor: int | None = None
    gpu: str | None = None
    needed: bool = True


def read(
    recorder: fingerprint.Recorder, dev: fingerprint.Base, found: list[gpus.Gpu]
) -> tuple[list[dict[str, Any]], list[str]]:
    """The nodes that are there, and warnings about those that are not, or are not what they should be."""
    warnings: list[str] = []
    nodes = look_all(recorder, dev, expected(recorder.root_fd, found), warnings)
    # Nodes of DRM come with the module nvidia-drm, which may be loaded later.
    recorder.file(dev, "/dev/dri")
    drawing = [node for node in nodes if node["role"] == "drm"]
    if drawing:
        recorder.file(dev, BY_PATH)
    for node in drawing:
        node["links"] = _by_path(dev, node)
    return nodes, warnings


def look_all(
    recorder: fingerprint.Recorder, dev: fingerprint.Base, wanted: Iterable[Wanted], warnings: list[str]
) -> list[dict[str, Any]]:
    """Those of the nodes that are there and are what they should be; for the others, warnings are added."""
    looked = (look(recorder, dev, one, warnings) for one in wanted)
    return [node for node in looked if node is not None]


def look(
    recorder: fingerprint.Recorder | None, dev: fingerprint.Base, wanted: Wanted, warnings: list[str]
) -> dict[str, Any] | None:
    """One node as an inventory holds it, or None. With a recorder the fingerprint covers it, there or not."""
    if recorder is not None:
        recorder.node(dev, wanted.path)
    try:
        return _node(dev, wanted)
    except FileNotFoundError:
        if wanted.needed:
            warnings.append(f"{dev.prefix}{wanted.path} is missing")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        warnings.append(f"{dev.prefix}{wanted.path} is left out: {reason}")
    return None


def listing(dev: fingerprint.Base, path: str) -> list[str]:
    """The names in a folder of the dev root, sorted; none where there is no such folder."""
    try:
        return root.listdir(dev.fd, path)
    except OSError:
        return []


def expected(root_fd: int, found: list[gpus.Gpu]) -> list[Wanted]:
    majors = character_majors(root_fd)
    nvidia = next((majors[name] for name in MAJOR_NAMES if name in majors), None)
    uvm = majors.get("nvidia-uvm")
    wanted = [
        Wanted("/dev/nvidiactl", "control", nvidia, CONTROL_MINOR),
        Wanted("/dev/nvidia-uvm", "uvm", uvm, 0),
        Wanted("/dev/nvidia-uvm-tools", "uvm-tools", uvm, 1),
        Wanted("/dev/nvidia-modeset", "modeset", nvidia, MODESET_MINOR, needed=False),
    ]
    wanted += [Wanted(gpu.node, "gpu", nvidia, gpu.minor, gpu.bus_id) for gpu in found]
    for gpu in found:
        wanted += _drm(root_fd, gpu.bus_id)
    return wanted


def _drm(root_fd: int, bus_id: str) -> list[Wanted]:
    # Not controlD*: it may vanish, and one missing node fails a whole CDI request.
    folder = f"{gpus.PCI}/{bus_id}/drm"
    try:
        names = [found for name in root.listdir(root_fd, folder) if (found := DRM_NAME.fullmatch(name))]
    except OSError:
        return []
    wanted = []
    for name in sorted(names, key=lambda found: (found[1], int(found[2]))):
        major, _, minor = fingerprint.text(root_fd, f"{folder}/{name[0]}/dev").strip().partition(":")
        wanted.append(Wanted(f"/dev/dri/{name[0]}", "drm", driver.number(major), driver.number(minor), bus_id))
    return wanted


def _by_path(dev: fingerprint.Base, node: dict[str, Any]) -> list[str]:
    """The link to a node of DRM by its GPU's place on the bus, where the host has it."""
    name = node["path"].rpartition("/")[2]
    link = f"{BY_PATH}/pci-{node['gpu']}-{KINDS[name.rstrip('0123456789')]}"
    try:
        target = root.readlink(dev.fd, link)
    except OSError:
        return []
    return [link] if target == f"../{name}" else []


def character_majors(root_fd: int) -> dict[str, int]:
    """Driver names and majors of /proc/devices' first part; later lines of one name do not count."""
    try:
        text = root.read_file(root_fd, fingerprint.DEVICES, fingerprint.DEVICES_MAX).decode("utf-8", "replace")
    except OSError:
        return {}
    majors: dict[str, int] = {}
    for line in text.partition("Block devices:")[0].splitlines():
        major, _, name = line.strip().partition(" ")
        known = driver.number(major)
        if known is not None:
            majors.setdefault(name, known)
    return majors


def _node(dev: fingerprint.Base, wanted: Wanted) -> dict[str, Any]:
    """Raises OSError where there is none, and ValueError for one that is not what it should be."""
    status = root.stat(dev.fd, wanted.path, follow=False)
    if not stat.S_ISCHR(status.st_mode):
        kind = "a link" if stat.S_ISLNK(status.st_mode) else "no character device"
        raise ValueError(f"it is {kind}")
    major, minor = os.major(status.st_rdev), os.minor(status.st_rdev)
    if wanted.major not in (None, major) or wanted.minor not in (None, minor):
        numbers = ":".join("?" if number is None else str(number) for number in (wanted.major, wanted.minor))
        raise ValueError(f"it is device {major}:{minor}, and the kernel says {numbers}")
    return {
        "path": wanted.path,
        "host_path": dev.prefix + wanted.path,
        "major": major,
        "minor": minor,
        "mode": stat.S_IMODE(status.st_mode),
        "uid": status.st_uid,
        "gid": status.st_gid,
        "role": wanted.role,
        "gpu": wanted.gpu,
    }
