# SPDX-License-Identifier: Apache-2.0
"""What a simulated host is: plain descriptions, no files."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

Layout = Literal["debian", "lib64", "h200", "alternatives", "flatcar", "bottlerocket", "talos", "nixos", "gke"]
Socket = Literal["answering", "dead"]


@dataclass(frozen=True, slots=True)
class Mig:
    """A MIG device: the numbers of its GPU instance and compute instance, and the UUID and profile that NVML tells."""

    gi: int
    ci: int
    uuid: str
    profile: str = "1g.18gb"


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU. `minor` is the driver's number of its node, which need not follow the bus order.

    `known`: the driver prints the UUID; before the first use since the module was loaded it prints
    question marks (NVML knows it all the same). `powered`: False gives an empty information file, as where
    the driver can't power the GPU up. `mig_devices` are in NVML's order; `mig` is NVML's mode, which needs no devices.
    """

    bus_id: str
    minor: int
    uuid: str
    name: str = "NVIDIA H200"
    known: bool = True
    powered: bool = True
    excluded: bool = False
    numa_node: int = -1
    device_id: int = 0x2335
    pci_class: int = 0x030200
    compute: tuple[int, int] = (9, 0)
    brand: int = 14
    architecture: int = 9
    mig: int = 0
    mig_devices: tuple[Mig, ...] = ()

    @property
    def address(self) -> tuple[int, int, int, int]:
        """Domain, bus, device, function."""
        domain, bus, rest = self.bus_id.split(":")
        device, function = rest.split(".")
        return int(domain, 16), int(bus, 16), int(device, 16), int(function, 16)


def gpus(count: int) -> tuple[Gpu, ...]:
    """`count` GPUs (0 to 16) whose minors follow their bus ids."""
    return tuple(
        Gpu(
            bus_id=f"0000:{0x10 + 8 * i:02x}:00.0",
            minor=i,
            uuid=f"GPU-{i:08x}-1111-2222-3333-444444444444",
            numa_node=i // 8,
        )
        for i in range(count)
    )


def divided(gpu: Gpu, *numbers: tuple[int, int]) -> Gpu:
    """The GPU in MIG mode, with one MIG device for each pair of a GPU instance and a compute instance."""
    devices = (Mig(gi, ci, f"MIG-{gpu.minor:04x}{gi:02x}{ci:02x}-5555-6666-7777-888888888888") for gi, ci in numbers)
    return replace(gpu, mig=1, mig_devices=tuple(devices))


@dataclass(frozen=True, slots=True)
class Fault:
    """What a call of the simulated NVML does before, or instead of, answering.

    `call` is the beginning of a function's name ("nvmlInit", "nvmlDeviceGetHandle", "nvmlDeviceGetUUID");
    `gpu` is NVML's index, None meaning whichever. A `result` other than 0 is returned as NVML's code (15:
    GPU is lost).
    """

    call: str
    gpu: int | None = None
    delay_ms: int = 0
    result: int = 0
    action: Literal["return", "hang", "crash"] = "return"


@dataclass(frozen=True, slots=True)
class Nvml:
    """How the simulated NVML behaves. `version`: the driver version it reports, None meaning the host's."""

    faults: tuple[Fault, ...] = ()
    version: str | None = None
    record: bool = True


@dataclass(frozen=True, slots=True)
class Host:
    """A host with an NVIDIA driver.

    `modules` are the loaded kernel modules: each brings its nodes and its line of /proc/devices. `missing`
    names nodes that are not there all the same ("nvidia-uvm"). `leftover` is the version of another driver
    whose libraries are still on disk. `driver_root` and `dev_root` are names on the host: a driver in a
    container has its files below /run/nvidia/driver. `cache` False: no etc/ld.so.cache, as on a system
    without ldconfig. `imex` are the IMEX channels that have a node; `gates` names what is there for an inventory's
    gates.
    """

    version: str = "580.159.04"
    flavour: Literal["open", "proprietary"] = "open"
    cuda: str = "13.0"
    gpus: tuple[Gpu, ...] = field(default_factory=lambda: gpus(1))
    layout: Layout = "debian"
    i386: bool = False
    graphics: bool = True
    firmware: bool = True
    modules: tuple[str, ...] = ("nvidia", "nvidia_uvm", "nvidia_modeset")
    missing: frozenset[str] = frozenset()
    params: tuple[tuple[str, int], ...] = ()
    uvm_major: int = 508
    caps_major: int = 507
    persistenced: Socket | None = None
    fabricmanager: Socket | None = None
    mps: bool = False
    imex: tuple[int, ...] = ()
    gates: frozenset[str] = frozenset()
    leftover: str | None = None
    driver_root: str = "/"
    dev_root: str = "/"
    cache: bool = True
    boot_id: str = "6f2b0f5e-1f0c-4a43-9f7e-0a5b7d3c9e11"
    nvml: Nvml = Nvml()

    @property
    def cuda_version(self) -> int:
        """As CUDA counts it: 13.0 is 13000."""
        major, minor = self.cuda.split(".")
        return 1000 * int(major) + 10 * int(minor)

    @property
    def nvml_order(self) -> tuple[Gpu, ...]:
        """The GPUs as NVML counts them: by bus id, an excluded one not at all."""
        return tuple(sorted((gpu for gpu in self.gpus if not gpu.excluded), key=lambda gpu: gpu.address))


@dataclass(frozen=True, slots=True)
class Library:
    """An installed library of the driver: its real file (a name on the host), SONAME and ELF class."""

    path: str
    soname: str
    bits: int
