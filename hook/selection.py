# SPDX-License-Identifier: Apache-2.0
"""Selection: which of the host's files and nodes a request brings, before anyone knows where they land.

Hot. An inventory (cdi.host.inventory, schema 1) and a Request in, host files by role out. What a capability
brings, cdi.capabilities says.
"""

from __future__ import annotations

from cdi import capabilities as brought
from cdi import devices
from cdi.devices import Missing

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from hook.request import Request

# Mount options by role. `ro` is ours to set: a read-only root does not cover what is mounted below it.
# Device nodes never get nodev (opening them would give EACCES), sockets never ro.
LIBRARY_OPTIONS = ("ro", "nosuid", "nodev", "rbind", "rprivate")
DATA_OPTIONS = ("ro", "nosuid", "nodev", "noexec", "rbind", "rprivate")
SOCKET_OPTIONS = ("nosuid", "nodev", "noexec", "rbind", "rprivate")

# What opens a gate is there for one thing each; the variable that asks for it is named where it is missing.
GATES = {
    "gdrcopy": ("NVIDIA_GDRCOPY", "/dev/gdrdrv"),
    "gds": ("NVIDIA_GDS", "/dev/nvidia-fs*"),
    "mofed": ("NVIDIA_MOFED", "/dev/infiniband/uverbs*"),
    "nvswitch": ("NVIDIA_NVSWITCH", "/dev/nvidia-nvswitch*"),
}
CAPABILITIES = "/proc/driver/nvidia/capabilities"

# Without these a granted capability does nothing, so their absence ends the start.
NEEDED_NODES = {"compute": "uvm", "display": "modeset"}

MODULES = {"uvm": "nvidia-uvm", "modeset": "nvidia-modeset"}

# Part of what `select` raises.
UuidsUnknown = devices.UuidsUnknown


class InMigMode(Missing):
    """A GPU asked for that is in MIG mode, where it runs nothing itself. Of one without a MIG device NVML alone told
    that, some time ago: ask it again."""


class Selection:
    """Entries of the inventory, chosen; each list keeps the inventory's order.

    `access` are the files and folders below /proc/driver/nvidia/capabilities that the container has to see.
    """

    __slots__ = (
        "access",
        "driver_version",
        "files",
        "firmware",
        "gpus",
        "libraries",
        "mig",
        "nodes",
        "programs",
        "sockets",
        "warnings",
    )

    def __init__(self, driver_version: str) -> None:
        self.driver_version = driver_version
        self.access: list[str] = []
        self.mig: list[dict[str, Any]] = []
        self.warnings: list[str] = []
        self.gpus: list[dict[str, Any]] = []
        self.libraries: list[dict[str, Any]] = []
        self.programs: list[dict[str, Any]] = []
        self.files: list[dict[str, Any]] = []
        self.firmware: list[dict[str, Any]] = []
        self.sockets: list[dict[str, Any]] = []
        self.nodes: list[dict[str, Any]] = []


def select(inventory: dict[str, Any], request: Request) -> Selection:
    """Choose. Raises NvhookError for an unknown id or a missing part that the request cannot do without, InMigMode, and
    UuidsUnknown where only NVML can tell."""
    capabilities = request.capabilities
    groups = brought.groups(capabilities)
    classes = brought.classes(capabilities)
    selection = Selection(inventory["driver"]["version"])
    selection.gpus, selection.mig = _devices(inventory, request)
    selection.libraries = [
        item
        for item in inventory["libraries"]
        if item["class"] in classes and groups & {item["capability"], *item["also"]}
    ]
    selection.programs = [item for item in inventory["programs"] if item["capability"] in capabilities]
    selection.files = [item for item in inventory["files"] if item["capability"] in groups]
    selection.firmware = list(inventory["firmware"])
    selection.sockets = [item for item in inventory["sockets"] if item["capability"] in capabilities]
    _mig_modes(inventory, selection, request)
    selection.nodes = _nodes(inventory, selection, capabilities)
    _check(inventory, selection, request.required)
    _mig(inventory, selection, request)
    _imex(inventory, selection, request)
    _gates(inventory, selection, request)
    return selection


def _devices(inventory: dict[str, Any], request: Request) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """GPUs and MIG devices. `all` is all of both; a MIG device brings its GPU, a GPU none of its MIG devices."""
    gpus: list[dict[str, Any]] = inventory["gpus"]
    mig: list[dict[str, Any]] = inventory.get("mig") or []
    if request.ids is None:
        if not gpus:
            raise devices.no_gpu(inventory)
        return list(gpus), list(mig)
    found = [devices.find(inventory, name) for name in request.ids]
    buses = {device.gpu["bus_id"] for device in found}
    wanted = [device.mig for device in found if device.mig is not None]
    return [gpu for gpu in gpus if gpu["bus_id"] in buses], [entry for entry in mig if entry in wanted]


def _mig_modes(inventory: dict[str, Any], selection: Selection, request: Request) -> None:
    """In MIG mode a GPU runs nothing itself. Asked for alone it is of use to who manages MIG or only looks on, who get
    it; to others it is an error, or, of all that there are, left out."""
    parents = {entry["gpu"] for entry in inventory.get("mig") or []}
    chosen = {entry["gpu"] for entry in selection.mig}
    alone = [
        gpu
        for gpu in selection.gpus
        if gpu["bus_id"] not in chosen and (gpu.get("mig_mode") or gpu["bus_id"] in parents)
    ]
    if not alone or request.mig_control:
        return
    told = {gpu["index"]: _alone(gpu, gpu["bus_id"] in parents) for gpu in alone}
    if all(name == "utility" for name in request.required):
        selection.warnings += [f"{what}: {remedy}" for what, remedy in told.values()]
        return
    left = [gpu for gpu in selection.gpus if gpu not in alone]
    if request.ids is not None or not left:
        raise InMigMode(*told[alone[0]["index"]])
    selection.gpus = left
    selection.warnings += [f"GPU {index} is left out. {what}: {remedy}" for index, (what, remedy) in told.items()]


def _alone(gpu: dict[str, Any], divided: bool) -> tuple[str, str]:
    """What is wrong with asking for that GPU, and the remedy."""
    i = gpu["index"]
    if divided:
        return f"GPU {i} is divided into MIG devices, and alone runs nothing", f"ask for {i}:0 or so"
    what = f"GPU {i} ({gpu['bus_id']}) is in MIG mode without a MIG device, and runs nothing"
    return what, f"make MIG devices: nvidia-smi mig -i {i} -cgi PROFILE -C; or end the mode: nvidia-smi -i {i} -mig 0"


def _nodes(inventory: dict[str, Any], selection: Selection, capabilities: tuple[str, ...]) -> list[dict[str, Any]]:
    buses = {gpu["bus_id"] for gpu in selection.gpus}
    parents = {entry["gpu"] for entry in inventory.get("mig") or []}
    drawing = {entry["gpu"] for entry in selection.mig if brought.draws(entry["profile"])}
    of_gpu = {"gpu": buses, "drm": (buses - parents) | drawing}
    roles, per_gpu = brought.node_roles(capabilities), brought.gpu_roles(capabilities)
    return [
        node
        for node in inventory["nodes"]
        if node["role"] in roles or (node["role"] in per_gpu and node["gpu"] in of_gpu[node["role"]])
    ]


def _check(inventory: dict[str, Any], selection: Selection, capabilities: tuple[str, ...]) -> None:
    lacking = brought.missing_library(inventory, selection.libraries, capabilities)
    if lacking is not None:
        version = selection.driver_version
        raise Missing(lacking, f"install the driver's user-space packages of version {version}, or reboot into theirs")
    roles = {node["role"]: node for node in selection.nodes}
    if not any(node["path"] == "/dev/nvidiactl" for node in selection.nodes):
        raise Missing("/dev/nvidiactl is missing on the host", "run nvidia-smi on the host once; it makes the node")
    for capability, role in NEEDED_NODES.items():
        if capability in capabilities and role not in roles:
            raise _missing_node(capability, MODULES[role])
    have = {node["gpu"] for node in selection.nodes if node["role"] == "gpu"}
    for gpu in selection.gpus:
        if gpu["bus_id"] not in have:
            what = f"{gpu['node']} of GPU {gpu['index']} ({gpu['bus_id']}) is missing on the host"
            raise Missing(what, "run nvidia-smi on the host once; it makes the node")


def _missing_node(capability: str, module: str) -> Missing:
    what = f"/dev/{module} is missing on the host; capability `{capability}` needs it"
    return Missing(what, f"load {module} and make its node: nvhook nodes create --load-kmods")


def _mig(inventory: dict[str, Any], selection: Selection, request: Request) -> None:
    """Nodes and access files of the MIG devices, and of what manages or watches MIG."""
    mig: list[dict[str, Any]] = inventory.get("mig") or []
    control: dict[str, Any] = inventory.get("mig_control") or {}
    buses = {gpu["bus_id"] for gpu in selection.gpus}
    entries = [entry for entry in mig if entry["gpu"] in buses] if request.mig_control else selection.mig
    if request.mig_control:
        # Who makes MIG devices has to see those that are made later.
        selection.access.append(CAPABILITIES)
    for name in request.mig_control:
        if name not in control:
            what = f"no capability node for MIG {name} on this host; NVIDIA_MIG_{name.upper()}_DEVICES asks for it"
            raise Missing(what, "see /proc/driver/nvidia/capabilities/mig, and make its node: nvhook nodes create")
        entries = [*entries, control[name]]
    for entry in entries:
        # All or nothing: with the parent alone nothing runs.
        if not entry["nodes"]:
            what = f"the capability nodes of MIG device {entry['uuid'] or entry['index']} are missing on the host"
            raise Missing(what, "make them, as root of the host: nvhook nodes create")
        _add_nodes(selection, entry["nodes"])
        if not request.mig_control:
            selection.access += [path for path in entry["access"] if path not in selection.access]


def _imex(inventory: dict[str, Any], selection: Selection, request: Request) -> None:
    runs: list[dict[str, Any]] = inventory.get("imex") or []
    for channel in request.imex:
        run = next((run for run in runs if 0 <= channel - run["channel"] < run["count"]), None)
        if run is None:
            what = f"IMEX channel {channel} is missing on the host"
            raise Missing(what, f"make /dev/nvidia-caps-imex-channels/channel{channel}: nvidia-modprobe -i {channel}:1")
        _add_nodes(selection, [_channel(run, channel)])


def _channel(run: dict[str, Any], channel: int) -> dict[str, Any]:
    """A node like the first of its run but for the number, which ends its paths and is its minor."""
    node: dict[str, Any] = run["node"]
    cut = -len(str(run["channel"]))
    return node | {key: f"{node[key][:cut]}{channel}" for key in ("path", "host_path")} | {"minor": channel}


def _gates(inventory: dict[str, Any], selection: Selection, request: Request) -> None:
    gates: dict[str, Any] = inventory.get("gates") or {}
    for name in request.gates:
        gate = gates.get(name) or {}
        if not gate.get("nodes"):
            variable, path = GATES[name]
            selection.warnings.append(f"{variable} is enabled, and there is no {path} on the host")
            continue
        _add_nodes(selection, gate["nodes"])
        selection.files += gate.get("files") or []


def _add_nodes(selection: Selection, nodes: list[dict[str, Any]]) -> None:
    have = {node["path"] for node in selection.nodes}
    selection.nodes += [node for node in nodes if node["path"] not in have]
