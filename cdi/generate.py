# SPDX-License-Identifier: Apache-2.0
"""A CDI spec of an inventory: what `cdi generate` writes.

Devices are named by index and by UUID, MIG devices by `GPU:MIG` and by UUID, and `all` is written out, for CDI
knows no wildcard. What every GPU needs stands once, at the spec's top. All that containerEdits can't say goes to one
hook, or is left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cdi import capabilities, devices, finish, hookless, reader, replacement, spec, versions
from cdi.host import libraries, settings, store, table
from ldcache.errors import NvhookError

KIND = "nvidia.com/gpu"
PROGRAMS = "/usr/bin"

# Complete, since nothing is added to a mount's options and a type would ask for version 0.4.0.
FILE_OPTIONS = ["ro", "nosuid", "nodev", "rbind", "rprivate"]
SOCKET_OPTIONS = ["nosuid", "nodev", "noexec", "rbind", "rprivate"]

# So that neither NVIDIA's hook nor its runtime, nor ours, puts the GPU into the container once more.
ENV = ["NVIDIA_VISIBLE_DEVICES=void"]

# A spec serves every container, and 32-bit twins are for those that ask.
CAPABILITIES = tuple(name for name in settings.CAPABILITIES if name != "compat32")
STRATEGIES = ("index", "uuid", "type-index")
NUMA_NODE = "nvhook/numa-node"
CAPS_REMEDY = "`nvhook nodes create` makes them"
NO_NODE_REMEDY = "run nvidia-smi on the host once; it makes the node"


@dataclass(frozen=True, slots=True)
class Options:
    """What a spec is to have. `layout` is one of hookless.LAYOUTS for a spec without a hook, else None; `parts` some of
    finish.PARTS. `device_ids` are ids as `devices.find` takes them, or one of `all` and `none`; None means all. With
    `numa` the devices carry their NUMA node in an annotation, which needs version 0.6.0; without `sockets` there is
    none, nor the MPS folder."""

    layout: str | None = None
    parts: tuple[str, ...] = finish.PARTS
    capabilities: tuple[str, ...] = CAPABILITIES
    strategies: tuple[str, ...] = ("index", "uuid")
    device_ids: tuple[str, ...] | None = None
    all_device: bool = True
    kind: str = KIND
    numa: bool = False
    sockets: bool = True


DEFAULTS = Options()


def make(found: dict[str, Any], hook_path: str, options: Options = DEFAULTS) -> dict[str, Any]:
    """The spec of an inventory. `hook_path` is absolute, where the container's runtime will find the launcher.

    Raises NvhookError where there is nothing to generate for (no control node, no GPU with its node, no library), and
    for an unknown device id.
    """
    inventory = chosen(found, options)
    if not any(node["role"] == "control" for node in inventory["nodes"]):
        raise NvhookError("/dev/nvidiactl is missing on the host", NO_NODE_REMEDY)
    edits = common(inventory, hook_path, options)
    offered = _devices(inventory, options)
    made: dict[str, Any] = {"cdiVersion": "", "kind": options.kind, "devices": offered, "containerEdits": edits}
    made = spec.without_empty(made)
    return {"cdiVersion": versions.minimum_version(made), **made}


def common(
    inventory: dict[str, Any], hook_path: str, options: Options = DEFAULTS, needed: tuple[str, ...] | None = None
) -> dict[str, Any]:
    """What every device of a spec brings, of an inventory that has what the spec is to have. Raises NvhookError where
    there is no library, or one that the capabilities (`needed`, if they are others) can't do without is missing."""
    lacking = capabilities.missing_library(
        inventory, inventory["libraries"], options.capabilities if needed is None else needed
    )
    if lacking or not inventory["libraries"]:
        raise _no_library(inventory, lacking, options.capabilities)
    roles = capabilities.node_roles(options.capabilities)
    return {
        "env": ENV,
        "deviceNodes": nodes([node for node in inventory["nodes"] if node["role"] in roles]),
        "hooks": [] if options.layout else finish.hook(inventory, hook_path, options.parts),
        "mounts": _mounts(inventory, options.layout),
    }


def _no_library(inventory: dict[str, Any], lacking: str | None, wanted: tuple[str, ...]) -> NvhookError:
    version, others = inventory["driver"]["version"], inventory["other_versions"]
    if not inventory["libraries"] and not inventory["searched"]:
        what = f"the driver has no library for the capabilities {', '.join(wanted)}"
        return NvhookError(what, "give others to --capabilities, or install these libraries of the driver")
    what = libraries.nothing(version, inventory["searched"], others)
    if inventory["libraries"] and lacking is not None:
        what = lacking
    if others:
        return NvhookError(
            what, f"reboot, or unload the module and load that of {others[-1]}, or install {version} again"
        )
    if inventory["libraries"]:
        return NvhookError(what, f"install all of the driver {version}, or give --library-search-path")
    roots = " or ".join(table.DRIVER_ROOTS)
    return NvhookError(what, f"give --library-search-path, or --driver-root, as for a driver in {roots}")


def chosen(inventory: dict[str, Any], options: Options) -> dict[str, Any]:
    """The inventory, less what the capabilities don't bring and the GPUs that are not asked for."""
    groups = capabilities.groups(options.capabilities)
    classes = capabilities.classes(options.capabilities)
    brought = [
        item
        for item in inventory["libraries"]
        if item["class"] in classes and groups & {item["capability"], *item["also"]}
    ]
    draws = "drm" in capabilities.gpu_roles(options.capabilities)
    return inventory | {
        "nodes": [node for node in inventory["nodes"] if draws or node["role"] != "drm"],
        **_chosen(inventory, options.device_ids),
        "libraries": brought,
        "programs": [item for item in inventory["programs"] if item["capability"] in options.capabilities],
        "files": [item for item in inventory["files"] if item["capability"] in groups],
        "sockets": [
            item for item in inventory["sockets"] if options.sockets and item["capability"] in options.capabilities
        ],
    }


def _chosen(inventory: dict[str, Any], ids: tuple[str, ...] | None) -> dict[str, list[dict[str, Any]]]:
    """The GPUs and the MIG devices that are asked for: a MIG device brings its GPU, and a GPU all its MIG devices."""
    gpus, mig = inventory["gpus"], inventory["mig"]
    if _everything(ids):
        return {"gpus": gpus, "mig": mig}
    found = [] if _nothing(ids) else [_found(inventory, name) for name in ids or ()]
    buses = {device.gpu["bus_id"] for device in found}
    whole = {device.gpu["bus_id"] for device in found if device.mig is None}
    parts = [device.mig for device in found if device.mig is not None]
    return {
        "gpus": [gpu for gpu in gpus if gpu["bus_id"] in buses],
        "mig": [entry for entry in mig if entry["gpu"] in whole or entry in parts],
    }


def _found(inventory: dict[str, Any], name: str) -> devices.Device:
    try:
        return devices.find(inventory, name)
    except devices.UuidsUnknown as error:
        what = f"cannot tell which GPU is {name[:80]!a}: neither the kernel nor NVML tells all UUIDs"
        raise NvhookError(what, "run nvidia-smi on the host, or give the GPU's index to --device-id") from error


def _everything(ids: tuple[str, ...] | None) -> bool:
    """No id, or `all`; of `all` and `none` the first counts, and either before any other id."""
    return ids is None or next((name for name in ids if name in ("all", "none")), "") == "all"


def _nothing(ids: tuple[str, ...] | None) -> bool:
    return ids is not None and not _everything(ids) and "none" in ids


def left_out(found: dict[str, Any], options: Options = DEFAULTS) -> list[str]:
    """What the spec does not have although the host or a user may expect it, one line each."""
    lines = [f"GPU {fault['bus_id']} is left out: {fault['reason']}" for fault in found["faults"]]
    undivided = {gpu["bus_id"] for gpu in store.undivided(found)}
    asked = _chosen(found, options.device_ids)
    for gpu in asked["gpus"]:
        mine = _mig(asked, gpu)
        if gpu["bus_id"] in undivided:
            lines.append(f"GPU {gpu['index']} ({gpu['bus_id']}) is left out: it is in MIG mode and has no MIG device")
        elif not _gpu_nodes(found, gpu, options):
            lines.append(f"GPU {gpu['index']} ({gpu['bus_id']}) is left out: {gpu['node']} is missing")
        elif mine:
            lines += _mig_left_out(gpu, mine, options)
        elif gpu["uuid"] is None and "uuid" in options.strategies:
            lines.append(f"GPU {gpu['index']} ({gpu['bus_id']}) has no name by UUID: nothing tells its UUID")
    return lines + without_uvm(found, options)


def without_uvm(found: dict[str, Any], options: Options = DEFAULTS) -> list[str]:
    """That the node of CUDA's memory is missing, where a spec would have it."""
    if "compute" not in options.capabilities or any(node["role"] == "uvm" for node in found["nodes"]):
        return []
    return [f"CUDA will not work, for /dev/nvidia-uvm is missing: {replacement.how_to_load(['/dev/nvidia-uvm'])}"]


def refuse_left_out(lines: list[str]) -> None:
    """Raises NvhookError where --strict is asked for and this is left out, a line each."""
    if lines:
        what = f"no spec is written, for it would not have all: {'; '.join(lines)}"
        raise NvhookError(what, "repair what is named, or leave --strict away")


def _mig_left_out(gpu: dict[str, Any], mine: list[dict[str, Any]], options: Options) -> list[str]:
    lines = []
    for entry in mine:
        name = f"MIG device {gpu['index']}:{entry['index']} (gi {entry['gi']}, ci {entry['ci']})"
        if not entry["nodes"]:
            lines.append(f"{name} is left out: not all its nodes below /dev/nvidia-caps are there; {CAPS_REMEDY}")
        elif entry["uuid"] is None and "uuid" in options.strategies:
            lines.append(f"{name} has no name by UUID: nothing tells its UUID")
    return lines


def notes(found: dict[str, Any], made: dict[str, Any], options: Options) -> list[str]:
    """What a user of a spec without a hook has to know of it; nothing for one with a hook."""
    if options.layout is None:
        return []
    return hookless.notes(chosen(found, options), len(made["containerEdits"].get("mounts", [])))


def _devices(inventory: dict[str, Any], options: Options) -> list[dict[str, Any]]:
    if _nothing(options.device_ids):
        # Something has to stand in its edits, and this does nothing that the top does not.
        return [{"name": "none", "containerEdits": {"env": ENV}}]
    offers = [offer for gpu in inventory["gpus"] for offer in _offers(inventory, gpu, options)]
    if not offers:
        reasons = "; ".join(left_out(inventory)) or "the driver has no GPU"
        raise NvhookError(f"no GPU to generate a spec for: {reasons}", "see `nvhook inventory`, lspci and dmesg")
    named = [
        _device(name, offer.nodes, _annotations(offer.gpu, options))
        for strategy in dict.fromkeys(options.strategies)
        for offer in offers
        if (name := offer.name(strategy)) is not None
    ]
    every: list[dict[str, Any]] = []
    for offer in offers:
        every += [node for node in offer.nodes if node not in every]
    # A name by UUID may be all that was wanted, and none is known.
    return [*named, _device("all", every, {})] if options.all_device or not named else named


@dataclass(frozen=True, slots=True)
class Offer:
    """One device of a spec: a whole GPU, `index` being its own, or a MIG device, `index` being `GPU:MIG`."""

    gpu: dict[str, Any]
    index: str
    uuid: str | None
    nodes: list[dict[str, Any]]

    def name(self, strategy: str) -> str | None:
        """nvidia-ctk's names: `0` or `0:1`, `GPU-…` or `MIG-…`, `gpu0` or `mig0:1`. None where the UUID is not
        known."""
        if strategy == "uuid":
            return self.uuid
        kind = "mig" if ":" in self.index else "gpu"
        return f"{kind}{self.index}" if strategy == "type-index" else self.index


def _offers(inventory: dict[str, Any], gpu: dict[str, Any], options: Options) -> Iterator[Offer]:
    """What one GPU is offered as: itself or, where it is divided, its MIG devices.

    In MIG mode nothing runs but in a MIG device, whose nodes are the GPU's and both its capability nodes. Those of DRM
    are for profiles that draw.
    """
    nodes = _gpu_nodes(inventory, gpu, options)
    mine = _mig(inventory, gpu)
    if nodes and not mine and gpu not in store.undivided(inventory):
        yield Offer(gpu, str(gpu["index"]), gpu["uuid"], nodes)
    whole = [_node(node) for node in inventory["nodes"] if node["role"] == "gpu" and node["gpu"] == gpu["bus_id"]]
    for entry in mine if nodes else ():
        if entry["nodes"]:
            index = f"{gpu['index']}:{entry['index']}"
            parent = nodes if capabilities.draws(entry["profile"]) else whole
            yield Offer(gpu, index, entry["uuid"], [*parent, *map(_node, entry["nodes"])])


def _mig(inventory: dict[str, Any], gpu: dict[str, Any]) -> list[dict[str, Any]]:
    return [entry for entry in inventory["mig"] if entry["gpu"] == gpu["bus_id"]]


def _annotations(gpu: dict[str, Any], options: Options) -> dict[str, str]:
    """The NUMA node, for whoever places work."""
    node = gpu["numa_node"]
    if not options.numa or node is None or node < 0:
        return {}
    return {NUMA_NODE: str(node)}


def _device(name: str, nodes: list[dict[str, Any]], annotations: dict[str, str]) -> dict[str, Any]:
    return {"name": name, "annotations": annotations, "containerEdits": {"deviceNodes": nodes}}


def _gpu_nodes(inventory: dict[str, Any], gpu: dict[str, Any], options: Options) -> list[dict[str, Any]]:
    """The nodes of one GPU; none if its own is not there, for a DRM node alone is of no use."""
    roles = capabilities.gpu_roles(options.capabilities)
    found = [node for node in inventory["nodes"] if node["role"] in roles and node["gpu"] == gpu["bus_id"]]
    if not any(node["role"] == "gpu" for node in found):
        return []
    made = [_node(node) for node in found]
    if options.layout:
        # Without a hook nobody makes links to them: what these lead to has their names.
        made += [_node(node | {"path": link}) for node in found for link in node.get("links", ())]
    return made


def nodes(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """An inventory's nodes as a spec has them."""
    return [_node(entry) for entry in entries]


def _node(node: dict[str, Any]) -> dict[str, Any]:
    """One device node, at version 0.3.0 but for `hostPath`.

    Without type, major and minor, which readers then take from the host at each start: nvidia-uvm's major is
    another one after a reload, and readers don't compare numbers that a spec gives, so a stale one would go
    unnoticed; a node that is gone fails the request by name. The mode is given, because readers up to 1.0.1 do
    not take it from the host, and so is a group, because none does: /dev/dri would become root's. Its members'
    `additionalGids` would need version 0.7.0, which podman 4 can't read. `m` is left out of the permissions:
    nothing in a container has to make the node again.
    """
    made: dict[str, Any] = {"path": node["path"]}
    if node["host_path"] != node["path"]:
        made["hostPath"] = node["host_path"]
    made |= {"fileMode": node["mode"], "permissions": "rw"}
    if node["gid"]:
        made["gid"] = node["gid"]
    return made


def _mounts(inventory: dict[str, Any], layout: str | None) -> list[dict[str, Any]]:
    """Files at their host path less the driver root, programs in /usr/bin, each place once, parents first."""
    places: dict[str, dict[str, Any]] = {}

    def add(host_path: str, container_path: str, options: list[str]) -> None:
        mount = {"hostPath": host_path, "containerPath": container_path, "options": options}
        places.setdefault(container_path, mount)

    for library in [] if layout else inventory["libraries"]:
        add(library["path"], finish.inside(library, library["name"]), FILE_OPTIONS)
    for host_path, container_path in hookless.places(inventory, layout) if layout else ():
        add(host_path, container_path, FILE_OPTIONS)
    for program in inventory["programs"]:
        add(program["path"], f"{PROGRAMS}/{program['name']}", FILE_OPTIONS)
    for item in inventory["files"] + inventory["firmware"]:
        add(item["path"], item["container_path"], FILE_OPTIONS)
    for socket in inventory["sockets"]:
        add(socket["path"], socket["container_path"], SOCKET_OPTIONS)
    # Readers sort mounts by depth, some of them not stably; this order is the same in all.
    return [places[path] for path in sorted(places, key=lambda path: (path.count("/"), path))]


def refuse_conflict(path: Path, made: dict[str, Any]) -> list[str]:
    """Look at the other specs in a spec's folder; those that can't be read come back, by name.

    Two files of one folder that define one name make it unresolvable, in both. Raises NvhookError naming the
    other file.
    """
    unreadable = []
    mine = set(spec.device_names(made))
    for other in sorted(path.parent.glob("*")) if path.parent.is_dir() else []:
        if other.suffix not in spec.SUFFIXES or other.name == path.name or other.is_dir():
            continue
        try:
            other_spec = reader.load(str(other)).spec
        except (OSError, ValueError):
            unreadable.append(str(other))
            continue
        if other_spec.get("kind") == made["kind"]:
            common = mine & set(spec.device_names(other_spec))
            if common:
                shown = ", ".join(sorted(common)[:3]) + (", …" if len(common) > 3 else "")
                what = f"{other} defines {made['kind']} devices too ({shown}): with both, no engine finds them"
                raise NvhookError(what, f"remove {other}, or give it as --output")
    return unreadable
