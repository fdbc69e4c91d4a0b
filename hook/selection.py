# SPDX-License-Identifier: Apache-2.0
"""Selection: which of the host's files and nodes a request brings, before anyone knows where they land.

Hot. An inventory (cdi.host.inventory, schema 1) and a Request in, host files by role out. What a capability
brings is decided here and nowhere else.
"""

from __future__ import annotations

from ldcache.errors import NvhookError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from hook.request import Request

# Mount options by role. `ro` is ours to set: a read-only root does not cover what is mounted below it.
# Device nodes never get nodev (opening them would give EACCES), sockets never ro.
LIBRARY_OPTIONS = ("ro", "nosuid", "nodev", "rbind", "rprivate")
DATA_OPTIONS = ("ro", "nosuid", "nodev", "noexec", "rbind", "rprivate")
SOCKET_OPTIONS = ("nosuid", "nodev", "noexec", "rbind", "rprivate")

# The libraries' groups that each capability brings: NVDEC and NVENC need libcuda, a display needs GL.
LIBRARY_GROUPS = {
    "compute": ("compute",),
    "display": ("graphics",),
    "graphics": ("graphics",),
    "ngx": ("ngx",),
    "utility": ("utility",),
    "video": ("video", "compute"),
}
NODE_ROLES = {
    "compute": ("uvm", "uvm-tools"),
    "display": ("modeset",),
    "graphics": ("modeset",),
    "video": ("uvm", "uvm-tools"),
}
DRM_CAPABILITIES = ("display", "graphics")

# Without these a granted capability does nothing, so their absence ends the start.
NEEDED_LIBRARIES = {"compute": "libcuda.so.1", "utility": "libnvidia-ml.so.1"}
NEEDED_NODES = {"compute": "uvm", "display": "modeset"}

MODULES = {"uvm": "nvidia-uvm", "modeset": "nvidia-modeset"}


class UuidsUnknown(Exception):
    """A request by UUID, and an inventory in which the kernel does not tell some GPU's UUID: ask NVML."""


class Selection:
    """Entries of the inventory, chosen; each list keeps the inventory's order."""

    __slots__ = ("driver_version", "files", "firmware", "gpus", "libraries", "nodes", "programs", "sockets")

    def __init__(self, driver_version: str) -> None:
        self.driver_version = driver_version
        self.gpus: list[dict[str, Any]] = []
        self.libraries: list[dict[str, Any]] = []
        self.programs: list[dict[str, Any]] = []
        self.files: list[dict[str, Any]] = []
        self.firmware: list[dict[str, Any]] = []
        self.sockets: list[dict[str, Any]] = []
        self.nodes: list[dict[str, Any]] = []


def select(inventory: dict[str, Any], request: Request) -> Selection:
    """Choose. Raises NvhookError for an unknown id or a missing part that the request cannot do without, and
    UuidsUnknown where only NVML can tell."""
    capabilities = request.capabilities
    groups = {group for name in capabilities for group in LIBRARY_GROUPS.get(name, ())}
    roles = {role for name in capabilities for role in NODE_ROLES.get(name, ())} | {"control"}
    classes = (32, 64) if "compat32" in capabilities else (64,)
    selection = Selection(inventory["driver"]["version"])
    selection.gpus = _gpus(inventory, request)
    selection.libraries = [
        item
        for item in inventory["libraries"]
        if item["class"] in classes and groups & {item["capability"], *item["also"]}
    ]
    selection.programs = [item for item in inventory["programs"] if item["capability"] in capabilities]
    selection.files = [item for item in inventory["files"] if _brings_files(item["capability"], capabilities)]
    selection.firmware = list(inventory["firmware"])
    selection.sockets = [item for item in inventory["sockets"] if item["capability"] in capabilities]
    selection.nodes = _nodes(inventory, selection.gpus, roles, capabilities)
    _check(inventory, selection, request.required)
    return selection


def _brings_files(group: str, capabilities: tuple[str, ...]) -> bool:
    return any(group in LIBRARY_GROUPS.get(name, ()) for name in capabilities)


def _gpus(inventory: dict[str, Any], request: Request) -> list[dict[str, Any]]:
    gpus: list[dict[str, Any]] = inventory["gpus"]
    if request.ids is None:
        if not gpus:
            raise _no_gpu(inventory)
        return list(gpus)
    chosen: dict[int, dict[str, Any]] = {}
    for name in request.ids:
        gpu = find(gpus, name)
        if gpu is None:
            raise _unknown(inventory, name)
        chosen[gpu["index"]] = gpu
    return [chosen[index] for index in sorted(chosen)]


def find(gpus: list[dict[str, Any]], name: str) -> dict[str, Any] | None:
    """The GPU that an index or a full UUID (any letter case) names. Raises UuidsUnknown."""
    if name.isascii() and name.isdigit():
        # A number of a thousand digits would be slow to convert and is no index of anything.
        wanted = int(name) if len(name) < 6 else -1
        return next((gpu for gpu in gpus if gpu["index"] == wanted), None)
    if not name.upper().startswith("GPU-"):
        return None
    for gpu in gpus:
        if gpu["uuid"] is not None and gpu["uuid"].lower() == name.lower():
            return gpu
    if any(gpu["uuid"] is None for gpu in gpus):
        raise UuidsUnknown
    return None


def _unknown(inventory: dict[str, Any], name: str) -> NvhookError:
    gpus = inventory["gpus"]
    if not gpus:
        return _no_gpu(inventory)
    valid = [f"{gpu['index']} ({gpu['uuid'] or gpu['bus_id']})" for gpu in gpus]
    shown = name if len(name) <= 80 else name[:77] + "..."
    left_out = "".join(f"; left out: {fault['bus_id']} ({fault['reason']})" for fault in inventory["faults"])
    what = f"no GPU {shown!a} on this host; there are {', '.join(valid)}{left_out}"
    return NvhookError(what, "set NVIDIA_VISIBLE_DEVICES to one of these indexes or UUIDs, or to all")


def _no_gpu(inventory: dict[str, Any]) -> NvhookError:
    faults = inventory["faults"]
    if faults:
        reasons = ", ".join(f"{fault['bus_id']}: {fault['reason']}" for fault in faults)
        return NvhookError(f"none of the driver's GPUs can be used: {reasons}", "look at the kernel's log: dmesg")
    what = "the driver is loaded and has no GPU: /proc/driver/nvidia/gpus is empty"
    return NvhookError(what, "see whether lspci shows the GPU, and dmesg for what the driver says of it")


def _nodes(
    inventory: dict[str, Any], gpus: list[dict[str, Any]], roles: set[str], capabilities: tuple[str, ...]
) -> list[dict[str, Any]]:
    buses = {gpu["bus_id"] for gpu in gpus}
    with_drm = any(name in DRM_CAPABILITIES for name in capabilities)
    per_gpu = ("gpu", "drm") if with_drm else ("gpu",)
    return [
        node
        for node in inventory["nodes"]
        if node["role"] in roles or (node["role"] in per_gpu and node["gpu"] in buses)
    ]


def _check(inventory: dict[str, Any], selection: Selection, capabilities: tuple[str, ...]) -> None:
    sonames = {item["soname"] for item in selection.libraries if item["class"] == 64}
    for capability, soname in NEEDED_LIBRARIES.items():
        if capability in capabilities and soname not in sonames:
            raise _missing_library(inventory, capability, soname)
    roles = {node["role"]: node for node in selection.nodes}
    if not any(node["path"] == "/dev/nvidiactl" for node in selection.nodes):
        raise NvhookError("/dev/nvidiactl is missing on the host", "run nvidia-smi on the host once; it makes the node")
    for capability, role in NEEDED_NODES.items():
        if capability in capabilities and role not in roles:
            raise _missing_node(capability, MODULES[role])
    have = {node["gpu"] for node in selection.nodes if node["role"] == "gpu"}
    for gpu in selection.gpus:
        if gpu["bus_id"] not in have:
            what = f"{gpu['node']} of GPU {gpu['index']} ({gpu['bus_id']}) is missing on the host"
            raise NvhookError(what, "run nvidia-smi on the host once; it makes the node")


def _missing_library(inventory: dict[str, Any], capability: str, soname: str) -> NvhookError:
    version = inventory["driver"]["version"]
    what = f"no {soname} of the loaded driver {version} on the host; capability `{capability}` needs it"
    return NvhookError(what, f"install the driver's user-space packages of version {version}, or reboot into theirs")


def _missing_node(capability: str, module: str) -> NvhookError:
    what = f"/dev/{module} is missing on the host; capability `{capability}` needs it"
    return NvhookError(what, f"load the module and make its node: modprobe {module} && nvidia-modprobe -u -m")
