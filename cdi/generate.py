# SPDX-License-Identifier: Apache-2.0
"""A CDI spec of an inventory: what `cdi generate` writes.

Devices are named by index and by UUID, MIG devices by `GPU:MIG` and by UUID, and `all` is written out, for CDI knows no
wildcard. What every GPU
needs stands once, at the spec's top. All that containerEdits can't say goes to one hook.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cdi import reader, replacement, spec, versions
from cdi.host import libraries, table
from ldcache.errors import NvhookError

KIND = "nvidia.com/gpu"
HOOK_NAME = "nvhook-create-container"
PROGRAMS = "/usr/bin"

# A hook entry without env runs, under runc, in runc's own environment, and once ran in the image's
# (CVE-2025-23266). The launcher needs none of this; an entry that says nothing is what must not be.
HOOK_ENV = ["PATH=/usr/sbin:/usr/bin:/sbin:/bin"]

# Complete, since nothing is added to a mount's options and a type would ask for version 0.4.0.
FILE_OPTIONS = ["ro", "nosuid", "nodev", "rbind", "rprivate"]
SOCKET_OPTIONS = ["nosuid", "nodev", "noexec", "rbind", "rprivate"]

# So that neither NVIDIA's hook nor its runtime, nor ours, puts the GPU into the container once more.
ENV = ["NVIDIA_VISIBLE_DEVICES=void"]

NO_NODE_REMEDY = "run nvidia-smi on the host once; it makes the node"

COMMON_ROLES = ("control", "uvm", "uvm-tools", "modeset")
GPU_ROLES = ("gpu", "drm")


def make(inventory: dict[str, Any], hook_path: str) -> dict[str, Any]:
    """The spec. `hook_path` is absolute, where the container's runtime will find the launcher.

    Raises NvhookError where there is nothing to generate for: no control node, no GPU with its node.
    """
    if not any(node["role"] == "control" for node in inventory["nodes"]):
        raise NvhookError("/dev/nvidiactl is missing on the host", NO_NODE_REMEDY)
    edits = common(inventory, hook_path)
    made: dict[str, Any] = {"cdiVersion": "", "kind": KIND, "devices": _devices(inventory), "containerEdits": edits}
    made["cdiVersion"] = versions.minimum_version(made)
    kept: dict[str, Any] = spec.without_empty(made)
    return kept


def common(inventory: dict[str, Any], hook_path: str) -> dict[str, Any]:
    """What every device of a spec brings. Raises NvhookError where there is no library."""
    if not _libraries(inventory):
        raise _no_library(inventory)
    nodes = [_node(node) for node in inventory["nodes"] if node["role"] in COMMON_ROLES]
    return {"env": ENV, "deviceNodes": nodes, "hooks": [_hook(inventory, hook_path)], "mounts": _mounts(inventory)}


def _no_library(inventory: dict[str, Any]) -> NvhookError:
    version, others = inventory["driver"]["version"], inventory["other_versions"]
    what = libraries.nothing(version, inventory["searched"], others)
    if others:
        return NvhookError(
            what, f"reboot, or unload the module and load that of {others[-1]}, or install {version} again"
        )
    roots = " or ".join(table.DRIVER_ROOTS)
    return NvhookError(what, f"give --library-search-path, or --driver-root, as for a driver in {roots}")


def left_out(inventory: dict[str, Any]) -> list[str]:
    """What the spec does not have although the host or a user may expect it, one line each."""
    lines = [f"GPU {fault['bus_id']} is left out: {fault['reason']}" for fault in inventory["faults"]]
    for gpu in inventory["gpus"]:
        mine = _mig(inventory, gpu)
        if not _gpu_nodes(inventory, gpu):
            lines.append(f"GPU {gpu['index']} ({gpu['bus_id']}) is left out: {gpu['node']} is missing")
        elif mine:
            lines += _mig_left_out(gpu, mine)
        elif gpu["uuid"] is None:
            lines.append(f"GPU {gpu['index']} ({gpu['bus_id']}) has no name by UUID: nothing tells its UUID")
    if not any(node["role"] == "uvm" for node in inventory["nodes"]):
        lines.append(f"CUDA will not work, for /dev/nvidia-uvm is missing: {replacement.MODULES['/dev/nvidia-uvm']}")
    return lines


def refuse_left_out(inventory: dict[str, Any]) -> None:
    """Raises NvhookError where `left_out` has something to say."""
    lines = left_out(inventory)
    if lines:
        what = f"no spec is written, for it would not have all: {'; '.join(lines)}"
        raise NvhookError(what, "repair what is named, or leave --strict away")


def _mig_left_out(gpu: dict[str, Any], mine: list[dict[str, Any]]) -> list[str]:
    lines = []
    for entry in mine:
        name = f"MIG device {gpu['index']}:{entry['index']} (gi {entry['gi']}, ci {entry['ci']})"
        if not entry["nodes"]:
            lines.append(f"{name} is left out: not all its nodes below /dev/nvidia-caps are there")
        elif entry["uuid"] is None:
            lines.append(f"{name} has no name by UUID: nothing tells its UUID")
    return lines


def _devices(inventory: dict[str, Any]) -> list[dict[str, Any]]:
    by_index, by_uuid, every = [], [], []
    for gpu in inventory["gpus"]:
        for name, uuid, nodes in _offers(inventory, gpu):
            by_index.append(_device(name, nodes))
            if uuid is not None:
                by_uuid.append(_device(uuid, nodes))
            every += [node for node in nodes if node not in every]
    if not by_index:
        reasons = "; ".join(left_out(inventory)) or "the driver has no GPU"
        raise NvhookError(f"no GPU to generate a spec for: {reasons}", "see `nvhook inventory`, lspci and dmesg")
    return [*by_index, *by_uuid, _device("all", every)]


def _offers(inventory: dict[str, Any], gpu: dict[str, Any]) -> Iterator[tuple[str, str | None, list[dict[str, Any]]]]:
    """Name, UUID and nodes of what one GPU is offered as: itself or, where it is divided, its MIG devices.

    On a divided GPU nothing runs but in a MIG device, whose nodes are the GPU's and both its capability nodes.
    """
    nodes = _gpu_nodes(inventory, gpu)
    mine = _mig(inventory, gpu)
    if nodes and not mine:
        yield str(gpu["index"]), gpu["uuid"], nodes
    whole = [_node(node) for node in inventory["nodes"] if node["role"] == "gpu" and node["gpu"] == gpu["bus_id"]]
    for entry in mine if nodes else ():
        if entry["nodes"]:
            yield f"{gpu['index']}:{entry['index']}", entry["uuid"], [*whole, *map(_node, entry["nodes"])]


def _mig(inventory: dict[str, Any], gpu: dict[str, Any]) -> list[dict[str, Any]]:
    return [entry for entry in inventory["mig"] if entry["gpu"] == gpu["bus_id"]]


def _device(name: str, nodes: list[dict[str, Any]]) -> dict[str, Any]:
    return {"name": name, "containerEdits": {"deviceNodes": nodes}}


def _gpu_nodes(inventory: dict[str, Any], gpu: dict[str, Any]) -> list[dict[str, Any]]:
    """The nodes of one GPU; none if its own is not there, for a DRM node alone is of no use."""
    found = [node for node in inventory["nodes"] if node["role"] in GPU_ROLES and node["gpu"] == gpu["bus_id"]]
    return [_node(node) for node in found] if any(node["role"] == "gpu" for node in found) else []


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


def _mounts(inventory: dict[str, Any]) -> list[dict[str, Any]]:
    """Files at their host path less the driver root, programs in /usr/bin, each place once, parents first."""
    places: dict[str, dict[str, Any]] = {}

    def add(host_path: str, container_path: str, options: list[str]) -> None:
        mount = {"hostPath": host_path, "containerPath": container_path, "options": options}
        places.setdefault(container_path, mount)

    for library in _libraries(inventory):
        add(library["path"], _inside(library, library["name"]), FILE_OPTIONS)
    for program in inventory["programs"]:
        add(program["path"], f"{PROGRAMS}/{program['name']}", FILE_OPTIONS)
    for item in inventory["files"] + inventory["firmware"]:
        add(item["path"], item["container_path"], FILE_OPTIONS)
    for socket in inventory["sockets"]:
        add(socket["path"], socket["container_path"], SOCKET_OPTIONS)
    # Readers sort mounts by depth, some of them not stably; this order is the same in all.
    return [places[path] for path in sorted(places, key=lambda path: (path.count("/"), path))]


def _libraries(inventory: dict[str, Any]) -> list[dict[str, Any]]:
    """The 64-bit ones: a spec serves every container, and 32-bit twins are for those that ask (`compat32`)."""
    return [library for library in inventory["libraries"] if library["class"] == 64]


def _inside(library: dict[str, Any], name: str) -> str:
    return f"{library['folder'].rstrip('/')}/{name}"


def _hook(inventory: dict[str, Any], hook_path: str) -> dict[str, Any]:
    """The one hook. Its arguments are an interface: they stand in files that outlive an update of nvhook.

    The launcher takes its verb from args[0], whatever file `hook_path` is.
    """
    arguments = [HOOK_NAME, "--driver", inventory["driver"]["version"]]
    for target, link in _links(inventory):
        arguments += ["--link", f"{target}::{link}"]
    for folder in dict.fromkeys(library["folder"] for library in _libraries(inventory)):
        arguments += ["--folder", folder]
    return {"hookName": "createContainer", "path": hook_path, "args": arguments, "env": HOOK_ENV}


def _links(inventory: dict[str, Any]) -> list[tuple[str, str]]:
    """Target and absolute place of each link: the SONAME leads to the file, further names to the SONAME."""
    links: dict[str, str] = {}
    for library in _libraries(inventory):
        if library["soname"] != library["name"]:
            links.setdefault(_inside(library, library["soname"]), library["name"])
        for name in library["links"]:
            links.setdefault(_inside(library, name), "../" * name.count("/") + library["soname"])
    for item in inventory["files"]:
        folder, _, own = item["container_path"].rpartition("/")
        for name in item["links"]:
            links.setdefault(f"{folder}/{name}", own)
    return [(target, place) for place, target in links.items()]


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
