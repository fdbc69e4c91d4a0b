# SPDX-License-Identifier: Apache-2.0
"""The kernel's side of a host: /proc, /sys and /dev as the driver's modules fill them.

Text, modes and numbers are those of tests/data/h200 (proc-driver.txt, proc-driver-tree.txt,
mig-minors.txt, sysfs.txt, dev.txt); the proprietary module's version line is as its 550 branch prints it.
"""

from __future__ import annotations

import functools

from tests.simhost import platforms
from tests.simhost.host import Gpu, Host
from tests.simhost.tree import Tree

UNKNOWN_UUID = "GPU-????????-????-????-????-????????????"
VERSION_TEXT = {
    "open": "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {}  Release Build  (nixbld@)  \n",
    "proprietary": "NVRM version: NVIDIA UNIX x86_64 Kernel Module  {}  Fri May 31 09:35:42 UTC 2024\n",
}
PARAMS = """\
ResmanDebugLevel: 4294967295
RmLogonRC: 1
ModifyDeviceFiles: 1
DeviceFileUID: 0
DeviceFileGID: 0
DeviceFileMode: 438
InitializeSystemMemoryAllocations: 1
UsePageAttributeTable: 4294967295
EnableMSI: 1
EnablePCIeGen3: 0
MemoryPoolSize: 0
KMallocHeapMaxSize: 0
VMallocHeapMaxSize: 0
IgnoreMMIOCheck: 0
EnableStreamMemOPs: 0
EnableUserNUMAManagement: 1
NvLinkDisable: 0
RmProfilingAdminOnly: 1
PreserveVideoMemoryAllocations: 0
DynamicPowerManagement: 3
RegisterPCIDriver: 1
EnableGpuFirmware: 18
OpenRmEnableUnsupportedGpus: 1
ImexChannelCount: 2048
CreateImexChannel0: 0
RegistryDwords: ""
RegistryDwordsPerDevice: ""
RmMsg: ""
GpuBlacklist: ""
TemporaryFilePath: ""
ExcludedGpus: ""
"""
CAPABILITY = "DeviceFileMinor: {}\nDeviceFileMode: {}\nDeviceFileModify: 1\n"
CONFIG, MONITOR, IMEX = (1, 0o400), (2, 0o444), (4323, 0o400)

# What each gate's modules register: a major, its name in /proc/devices, and nodes with their minors. Numbers are chosen
# here, names are those of the modules.
GATES: dict[str, tuple[int, str, dict[str, int]]] = {
    "gds": (505, "nvidia-fs", {f"nvidia-fs{i}": i for i in range(16)}),
    "mofed": (231, "infiniband_verbs", {"infiniband/uverbs0": 192, "infiniband/uverbs1": 193}),
    "gdrcopy": (504, "gdrdrv", {"gdrdrv": 0}),
    "nvswitch": (503, "nvidia-nvswitch", {"nvidia-nvswitchctl": 255, "nvidia-nvswitch0": 0, "nvidia-nvswitch1": 1}),
}


def version_text(version: str, flavour: str = "open") -> str:
    """/proc/driver/nvidia/version of a loaded module."""
    return VERSION_TEXT[flavour].format(version) + "GCC version:  gcc version 15.3.0 (GCC) \n"


def information_text(gpu: Gpu, version: str, irq: int) -> str:
    """/proc/driver/nvidia/gpus/<bus id>/information; empty where the driver can't power the GPU up."""
    if not gpu.powered:
        return ""
    uuid, bios = (gpu.uuid, "96.00.a5.00.1a") if gpu.known else (UNKNOWN_UUID, "??.??.??.??.??")
    return (
        f"Model: \t\t {gpu.name}\n"
        f"IRQ:   \t\t {irq}\n"
        f"GPU UUID: \t {uuid}\n"
        f"Video BIOS: \t {bios}\n"
        "Bus Type: \t PCIe\n"
        "DMA Size: \t 52 bits\n"
        "DMA Mask: \t 0xfffffffffffff\n"
        f"Bus Location: \t {gpu.bus_id}\n"
        f"Device Minor: \t {gpu.minor}\n"
        f"GPU Firmware: \t {version}\n"
        f"GPU Excluded:\t {'Yes' if gpu.excluded else 'No'}\n"
    )


def params_text(host: Host) -> str:
    text = PARAMS
    for name, value in host.params:
        lines = [f"{name}: {value}" if line.startswith(f"{name}:") else line for line in text.splitlines()]
        text = "\n".join(lines) + "\n"
    return text


@functools.cache
def mig_minors_text() -> str:
    """The constant table of all MIG capabilities that could be."""
    names = ["config", "monitor"]
    for gpu in range(32):
        for instance in range(15):
            names.append(f"gpu{gpu}/gi{instance}/access")
            names += [f"gpu{gpu}/gi{instance}/ci{compute}/access" for compute in range(8)]
    return "".join(f"{name} {minor}\n" for minor, name in enumerate(names, 1))


def mig_minors(gpu: int, gi: int, ci: int | None = None) -> int:
    """The minor of a GPU instance's capability, or of a compute instance's: its line in that table."""
    return 3 + (gpu * 15 + gi) * 9 + (0 if ci is None else 1 + ci)


def mig_access(gpu: Gpu) -> dict[str, int]:
    """The access files of a GPU's MIG devices, by their names below its mig folder, and their minors."""
    found = {}
    for device in gpu.mig_devices:
        found[f"gi{device.gi}/access"] = mig_minors(gpu.minor, device.gi)
        found[f"gi{device.gi}/ci{device.ci}/access"] = mig_minors(gpu.minor, device.gi, device.ci)
    return found


def devices_text(host: Host) -> str:
    """/proc/devices, as far as a reader of the driver's majors needs the rest."""
    rows = [(1, "mem"), (5, "/dev/tty"), (10, "misc"), (136, "pts")]
    if "nvidia" in host.modules:
        # Up to the 545 branch the module registered its nodes as nvidia-frontend.
        names = ("nvidia", "nvidiactl") if int(host.version.split(".")[0]) > 545 else ("nvidia-frontend",)
        rows += [(195, name) for name in names]
        rows += [(host.caps_major, "nvidia-caps"), (host.caps_major - 1, "nvidia-caps-imex-channels")]
    if "nvidia_modeset" in host.modules:
        rows.append((195, "nvidia-modeset"))
    if "nvidia_uvm" in host.modules:
        rows.append((host.uvm_major, "nvidia-uvm"))
    if "nvidia_drm" in host.modules:
        rows.append((226, "drm"))
    rows += [(GATES[name][0], GATES[name][1]) for name in host.gates]
    rows.sort(key=lambda row: row[0])
    characters = "".join(f"{major:3} {name}\n" for major, name in rows)
    return f"Character devices:\n{characters}\nBlock devices:\n  7 loop\n259 blkext\n"


def proc(tree: Tree, host: Host) -> None:
    """All of /proc that discovery reads."""
    tree.write("/proc/sys/kernel/random/boot_id", f"{host.boot_id}\n", 0o444)
    tree.write("/proc/devices", devices_text(host), 0o444)
    modules = "".join(f"{name} 1830912 0 - Live 0xffffffffc0400000 (O)\n" for name in reversed(host.modules))
    tree.write("/proc/modules", modules, 0o444)
    if "nvidia" not in host.modules:
        return
    top = "/proc/driver/nvidia"
    tree.write(f"{top}/version", version_text(host.version, host.flavour), 0o444)
    tree.write(f"{top}/params", params_text(host), 0o444)
    tree.write(f"{top}/registry", 'Binary: ""\n')
    tree.folder(f"{top}/gpus")
    for irq, gpu in enumerate(host.gpus, 41):
        folder = f"{top}/gpus/{gpu.bus_id}"
        tree.write(f"{folder}/information", information_text(gpu, host.version, irq), 0o444)
        tree.write(f"{folder}/power", "Runtime D3 status:          Not supported\n", 0o444)
        tree.write(f"{folder}/registry", 'Binary: ""\n')
    for name, (minor, mode) in {
        "mig/config": CONFIG,
        "mig/monitor": MONITOR,
        "fabric-imex-mgmt": IMEX,
    }.items():
        tree.write(f"{top}/capabilities/{name}", CAPABILITY.format(minor, mode), 0o444)
    for gpu in host.gpus:
        folder = f"{top}/capabilities/gpu{gpu.minor}/mig"
        tree.folder(folder)
        for name, minor in mig_access(gpu).items():
            tree.write(f"{folder}/{name}", CAPABILITY.format(minor, 0o444), 0o444)
    tree.write("/proc/driver/nvidia-caps/mig-minors", mig_minors_text(), 0o444)
    tree.write("/proc/driver/nvidia-caps/sys-minors", f"fabric-imex-mgmt {IMEX[0]}\n", 0o444)
    tree.write("/proc/driver/nvidia-caps/nvlink-minors", "fabric-mgmt 0\n", 0o444)


def sys(tree: Tree, host: Host) -> None:
    """The PCI devices (the GPUs, their sound functions, one of another vendor) and the modules."""
    pci_device(tree, "0000:00:00.0", 0x8086, 0x0D57, 0x060000, None, -1)
    for index, gpu in enumerate(host.gpus):
        folder = pci_device(tree, gpu.bus_id, 0x10DE, gpu.device_id, gpu.pci_class, "nvidia", gpu.numa_node)
        pci_device(tree, f"{gpu.bus_id[:-1]}1", 0x10DE, 0x22BA, 0x040300, "snd_hda_intel", gpu.numa_node)
        if "nvidia_drm" in host.modules:
            tree.write(f"{folder}/drm/card{index}/dev", f"226:{index}\n", 0o444)
            tree.write(f"{folder}/drm/renderD{128 + index}/dev", f"226:{128 + index}\n", 0o444)
    for module in host.modules:
        tree.folder(f"/sys/module/{module}")
    if "nvidia" in host.modules:
        tree.write("/sys/module/nvidia/version", f"{host.version}\n", 0o444)
    # Where a driver outside /lib/firmware has told the kernel to look; empty by default.
    path = platforms.FIRMWARE_PATHS.get(host.layout, "")
    tree.write("/sys/module/firmware_class/parameters/path", f"{path}\n")


def pci_device(
    tree: Tree, bus_id: str, vendor: int, device: int, pci_class: int, driver: str | None, numa_node: int
) -> str:
    """One device of /sys/bus/pci; returns its folder below /sys/devices."""
    folder = f"/sys/devices/pci{bus_id[:7]}/{bus_id}"
    tree.write(f"{folder}/vendor", f"{vendor:#06x}\n", 0o444)
    tree.write(f"{folder}/device", f"{device:#06x}\n", 0o444)
    tree.write(f"{folder}/class", f"{pci_class:#08x}\n", 0o444)
    tree.write(f"{folder}/numa_node", f"{numa_node}\n")
    if driver:
        tree.folder(f"/sys/bus/pci/drivers/{driver}")
        tree.link(f"{folder}/driver", f"../../../bus/pci/drivers/{driver}")
    tree.link(f"/sys/bus/pci/devices/{bus_id}", f"../../../devices/pci{bus_id[:7]}/{bus_id}")
    return folder


def dev(tree: Tree, host: Host) -> None:
    """The nodes below `tree`, the dev root, with the modes that the module's parameters ask for."""
    params = dict(host.params)
    mode = params.get("DeviceFileMode", 0o666)
    owner = params.get("DeviceFileUID", 0), params.get("DeviceFileGID", 0)
    nodes = [("nvidiactl", 195, 255), *((f"nvidia{gpu.minor}", 195, gpu.minor) for gpu in host.gpus)]
    if "nvidia_modeset" in host.modules:
        nodes.append(("nvidia-modeset", 195, 254))
    if "nvidia_uvm" in host.modules:
        nodes += [("nvidia-uvm", host.uvm_major, 0), ("nvidia-uvm-tools", host.uvm_major, 1)]
    tree.folder("/dev")
    tree.node("/dev/null", 1, 3, 0o666)
    if "nvidia" not in host.modules:
        return
    for name, major, minor in nodes:
        if name not in host.missing:
            tree.node(f"/dev/{name}", major, minor, mode, *owner)
    capabilities = [CONFIG, MONITOR, *((minor, 0o444) for gpu in host.gpus for minor in mig_access(gpu).values())]
    for minor, cap_mode in capabilities:
        if f"nvidia-cap{minor}" not in host.missing:
            tree.node(f"/dev/nvidia-caps/nvidia-cap{minor}", host.caps_major, minor, cap_mode)
    for channel in host.imex:
        tree.node(f"/dev/nvidia-caps-imex-channels/channel{channel}", host.caps_major - 1, channel, 0o666)
    _gates(tree, host)
    if "nvidia_drm" in host.modules:
        _dri(tree, host)


def _gates(tree: Tree, host: Host) -> None:
    for gate in host.gates:
        major, _, nodes = GATES[gate]
        for name, minor in nodes.items():
            tree.node(f"/dev/{name}", major, minor, 0o666)
    if "mofed" in host.gates:
        tree.node("/dev/infiniband/rdma_cm", 10, 58, 0o666)
    if "gds" in host.gates:
        tree.folder("/run/udev")
        tree.write("/etc/cufile.json", "{}\n")


def _dri(tree: Tree, host: Host) -> None:
    for index, gpu in enumerate(host.gpus):
        for kind, name, minor in (
            ("card", f"card{index}", index),
            ("render", f"renderD{128 + index}", 128 + index),
        ):
            if name not in host.missing:
                tree.node(f"/dev/dri/{name}", 226, minor, 0o660)
                tree.link(f"/dev/dri/by-path/pci-{gpu.bus_id}-{kind}", f"../{name}")
