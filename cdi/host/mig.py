# SPDX-License-Identifier: Apache-2.0
"""MIG devices: parts of a GPU, by what the kernel tells of them.

`/proc/driver/nvidia/capabilities/gpu<minor>/mig/gi<G>/ci<C>` is there for each compute instance C in GPU instance G,
and both have a file `access` that names the minor of their capability node, `/dev/nvidia-caps/nvidia-cap<M>`. CUDA
opens both nodes; with one of them, or with the GPU alone, it finds nothing. A GPU instance without a compute instance
is no MIG device. The UUIDs, the profiles, and the order in which NVML counts, are NVML's to tell; and so is the mode of
a GPU that has no instance.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from cdi.host import driver, fingerprint, nodes
from cdi.host.gpus import Gpu
from ldcache import root

CAPS_DEVICE = "nvidia-caps"
NODES = "/dev/nvidia-caps"
ROLE = "mig"
ACCESS_MAX = 4096
# NVML's name of a MIG device is its GPU's, and the profile behind this.
BEFORE_PROFILE = " MIG "
PROFILE = re.compile(r"(?:\d+c\.)?\d+g\.\d+gb[a-z0-9.+-]{0,40}")
# Up to the 460 branch a MIG device's UUID was its GPU's, with the numbers of its instances behind.
UUID = re.compile(r"MIG-[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}|MIG-GPU-[0-9a-fA-F-]{36}/\d{1,3}/\d{1,3}")


@dataclass(slots=True)
class Layout:
    """MIG devices, what manages MIG, and warnings, as an inventory holds them; and the bus ids of the GPUs that have a
    GPU instance, and so are in MIG mode."""

    divided: set[str] = field(default_factory=set)
    devices: list[dict[str, Any]] = field(default_factory=list)
    control: dict[str, dict[str, Any]] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)


def read(recorder: fingerprint.Recorder, dev: fingerprint.Base, found: list[Gpu]) -> Layout:
    """The layout of these GPUs. The capabilities' tree is in the fingerprint as a whole; their nodes are added here."""
    layout = Layout()
    major = nodes.character_majors(recorder.root_fd).get(CAPS_DEVICE)
    for gpu in found:
        folder = f"{fingerprint.CAPABILITIES}/gpu{gpu.minor}/mig"
        if any(True for _ in _numbers(recorder.root_fd, folder, "gi")):
            layout.divided.add(gpu.bus_id)
        # NVML counts so where devices were made one after the other; what it says itself counts more.
        for index, (gi, ci) in enumerate(instances(recorder.root_fd, folder)):
            access = [f"{folder}/gi{gi}/access", f"{folder}/gi{gi}/ci{ci}/access"]
            made = _entry(recorder, dev, access, major, layout.warnings, gpu.bus_id)
            layout.devices.append(made | {"gpu": gpu.bus_id, "index": index, "gi": gi, "ci": ci})
    for name in ("config", "monitor"):
        access = [f"{fingerprint.CAPABILITIES}/mig/{name}"]
        # Hosts whose driver never made these nodes are many, and containers that need them few.
        made = _entry(recorder, dev, access, major, [])
        if made["nodes"]:
            layout.control[name] = made
    return layout


def instances(root_fd: int, folder: str) -> list[tuple[int, int]]:
    """Numbers of GPU and compute instance of each MIG device below a GPU's folder, in order."""
    return sorted(
        (gi, ci) for gi in _numbers(root_fd, folder, "gi") for ci in _numbers(root_fd, f"{folder}/gi{gi}", "ci")
    )


def _numbers(root_fd: int, folder: str, prefix: str) -> Iterator[int]:
    try:
        names = root.listdir(root_fd, folder)
    except OSError:
        return
    for name in names:
        number = driver.number(name[2:]) if name.startswith(prefix) else None
        if number is not None:
            yield number


def _entry(
    recorder: fingerprint.Recorder,
    dev: fingerprint.Base,
    access: list[str],
    major: int | None,
    warnings: list[str],
    gpu: str | None = None,
) -> dict[str, Any]:
    """Nodes and access files. All the nodes or none: with a part of them nothing runs."""
    found: list[dict[str, Any]] = []
    for path in access:
        minor = capability(recorder.root_fd, path).get("DeviceFileMinor")
        if minor is None:
            # The kernel makes the folder first, then the file, and the fingerprint has the folders only.
            recorder.entry(fingerprint.Base(recorder.root_fd, ""), path)
            warnings.append(f"{path} names no device minor")
            continue
        node = nodes.look(recorder, dev, nodes.Wanted(f"{NODES}/nvidia-cap{minor}", ROLE, major, minor, gpu), warnings)
        if node is not None:
            found.append(node)
    told: dict[str, Any] = {"uuid": None, "index": None, "profile": None}
    return told | {"nodes": found if len(found) == len(access) else [], "access": access}


def capability(root_fd: int, path: str) -> dict[str, int]:
    """What a capability's file says of its node: DeviceFileMinor, DeviceFileMode, and DeviceFileModify, whether user
    space may make it (nvidia-caps of the open kernel module)."""
    found = {}
    for line in fingerprint.text(root_fd, path, ACCESS_MAX).splitlines():
        name, _, value = line.partition(":")
        known = driver.number(value.strip())
        if known is not None:
            found[name] = known
    return found


def learn(devices: list[dict[str, Any]], bus_id: str, told: list[list[Any]]) -> list[str]:
    """Add what NVML told of a GPU's MIG devices: `[index, gi, ci, uuid, name]` each. Returns warnings."""
    warnings = []
    mine = {(entry["gi"], entry["ci"]): entry for entry in devices if entry["gpu"] == bus_id}
    known = {(gi, ci): (index, uuid, name) for index, gi, ci, uuid, name in told}
    for numbers, (_, uuid, name) in known.items():
        if numbers in mine:
            mine[numbers]["profile"] = profile(name)
        if not UUID.fullmatch(uuid):
            warnings.append(f"NVML calls a MIG device of GPU {bus_id} {uuid!a}, which is no UUID")
        elif numbers in mine:
            mine[numbers]["uuid"] = uuid
    if mine.keys() == known.keys():
        # All or none, or two of them would have one index.
        for numbers, (index, _, _) in known.items():
            mine[numbers]["index"] = index
    return warnings


def profile(name: str) -> str | None:
    """The profile in NVML's name of a MIG device, `1g.24gb+gfx`; None in one that has none."""
    text = name.rpartition(BEFORE_PROFILE)[2]
    return text if PROFILE.fullmatch(text) else None
