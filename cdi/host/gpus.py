# SPDX-License-Identifier: Apache-2.0
"""The driver's GPUs, by what the kernel tells of them.

`/proc/driver/nvidia/gpus/<bus id>/information` names the minor and the model at once, the UUID only after the
GPU has been initialised since the module was loaded: before, it holds question marks. It is empty where the
driver can't power the GPU up.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from cdi.host import driver, fingerprint
from ldcache import root

INFORMATION_MAX = 65536
PCI = "/sys/bus/pci/devices"

BUS_ID = re.compile(r"([0-9a-f]{4,8}):([0-9a-f]{2}):([0-9a-f]{2})\.([0-7])")
UUID = re.compile(r"GPU-[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")

EXCLUDED = "excluded by the driver's configuration"


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU. `index` is NVML's, `minor` the number of its node; they need not be the same.

    `uuid` is None while the kernel does not know it, `numa_node` where the machine has none.
    """

    index: int
    minor: int
    bus_id: str
    uuid: str | None
    numa_node: int | None
    name: str

    @property
    def node(self) -> str:
        """Its device node, inside the dev root."""
        return f"/dev/nvidia{self.minor}"

    def to_json(self) -> dict[str, Any]:
        """As an inventory holds it."""
        return {
            "index": self.index,
            "minor": self.minor,
            "bus_id": self.bus_id,
            "uuid": self.uuid,
            # NVML's to tell: compute capability (`9.0`) and brand.
            "arch": None,
            "brand": None,
            # Whether it is in MIG mode, where it runs nothing but in its MIG devices. The kernel shows that only by
            # GPU instances; the folder gpu<minor>/mig is there in either mode.
            "mig_mode": None,
            "numa_node": self.numa_node,
            "name": self.name,
            "node": self.node,
        }


@dataclass(frozen=True, slots=True)
class Fault:
    """A GPU that is left out, and why. `lasting` where only the administrator can change it."""

    bus_id: str
    reason: str
    lasting: bool = False

    def to_json(self) -> dict[str, Any]:
        """As an inventory holds it."""
        return {"bus_id": self.bus_id, "reason": self.reason}


def read(root_fd: int) -> tuple[list[Gpu], list[Fault]]:
    """All GPUs by index, and those left out.

    An index is NVML's: the rank by bus id among the driver's GPUs. One that can't be reached keeps its place,
    so that the others' indexes stay; one that the driver excludes is not counted.
    """
    found, faults = [], []
    index = 0
    for bus_id in bus_ids(root_fd):
        gpu, fault = _read(root_fd, bus_id, index)
        if gpu is not None:
            found.append(gpu)
        if fault is not None:
            faults.append(fault)
        index += fault is None or not fault.lasting
    return found, faults


def bus_ids(root_fd: int) -> list[str]:
    """The names of the folders gpus/*, in the order of their numbers: a domain may have more than four digits."""
    try:
        names = root.listdir(root_fd, fingerprint.GPUS)
    except OSError:
        return []
    return sorted(filter(BUS_ID.fullmatch, names), key=address)


def address(bus_id: str) -> tuple[int, ...]:
    """Domain, bus, device and function as numbers."""
    found = BUS_ID.fullmatch(bus_id)
    return tuple(int(part, 16) for part in found.groups()) if found else ()


def _read(root_fd: int, bus_id: str, index: int) -> tuple[Gpu | None, Fault | None]:
    path = f"{fingerprint.GPUS}/{bus_id}/information"
    try:
        text = root.read_file(root_fd, path, INFORMATION_MAX).decode("utf-8", "replace")
    except OSError as error:
        return None, Fault(bus_id, f"cannot read {path}: {error.strerror}")
    if not text.strip():
        return None, Fault(bus_id, f"the driver can't power it up: {path} is empty")
    facts = parse_information(text)
    if facts.get("GPU Excluded") == "Yes":
        return None, Fault(bus_id, EXCLUDED, lasting=True)
    minor = driver.number(facts.get("Device Minor", ""))
    if minor is None:
        return None, Fault(bus_id, f"{path} names no device minor")
    uuid = facts.get("GPU UUID", "")
    known = uuid if UUID.fullmatch(uuid) else None
    return Gpu(index, minor, bus_id, known, numa_node(root_fd, bus_id), facts.get("Model", "")), None


def parse_information(text: str) -> dict[str, str]:
    """Names and values of an `information` file."""
    pairs = (line.partition(":") for line in text.splitlines())
    return {name.strip(): value.strip() for name, colon, value in pairs if colon}


def numa_node(root_fd: int, bus_id: str) -> int | None:
    """The NUMA node that sysfs tells; it says -1 for none."""
    return driver.number(fingerprint.text(root_fd, f"{PCI}/{bus_id}/numa_node").strip())
