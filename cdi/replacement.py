# SPDX-License-Identifier: Apache-2.0
"""Whether a new spec has less than the file that it is to replace.

A module that is not loaded, or a caller without rights, makes a spec that looks right and is poorer: nvidia-smi works
in the container, and CUDA does not. Such a spec never takes a fuller one's place unseen.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from cdi import capabilities, reader, spec
from ldcache.errors import NvhookError

# How to get back what CUDA, or a display, can't do without.
MODULES = {
    "/dev/nvidiactl": "nvidia-smi",
    "/dev/nvidia-uvm": "modprobe nvidia-uvm && nvidia-modprobe -u -c 0",
    "/dev/nvidia-uvm-tools": "modprobe nvidia-uvm && nvidia-modprobe -u -c 0",
    "/dev/nvidia-modeset": "modprobe nvidia-modeset && nvidia-modprobe -m",
}
# What of a file that no container may lose belongs to which roles of nodes and groups of libraries.
ROLES = {
    "/dev/nvidiactl": "control",
    "/dev/nvidia-uvm": "uvm",
    "/dev/nvidia-uvm-tools": "uvm-tools",
    "/dev/nvidia-modeset": "modeset",
}
LIBRARIES = {"libcuda.so": "compute", "libnvidia-ml.so": "utility"}

VERSION = re.compile(r"\d+(?:\.\d+)+|(?<=\.so\.)\d+")


def how_to_load(nodes: list[str]) -> str:
    """What makes these nodes, as root of the host."""
    loads = " && ".join(dict.fromkeys(MODULES[node] for node in nodes))
    return f"nvhook nodes create --load-kmods, or {loads}"


def check(path: Path, made: dict[str, Any], asked: tuple[str, ...]) -> list[str]:
    """What else the file at `path`, if there is one that is read, has and `made` has not, one line each. `asked` are
    the capabilities that `made` is for.

    Raises NvhookError where it would lose one of the driver's own nodes, or a library that everything needs.
    """
    try:
        before = reader.load(str(path)).spec
    except (OSError, ValueError):
        return []
    if before.get("kind") != made["kind"]:
        return [f"{path} had devices of the kind {before.get('kind')} until now"]
    nodes = [node for node in _nodes(before) if node in MODULES and node not in _nodes(made)]
    mine, theirs = _files(made), _files(before)
    libraries = [name for name in LIBRARIES if any(name in file for file in theirs - mine)]
    _refuse(path, nodes, libraries, asked)
    names = [name for name in spec.device_names(before) if name not in spec.device_names(made)]
    gone = [*(f"the device {name}" for name in names), *sorted(theirs - mine)]
    return [f"{path} had {thing} until now" for thing in gone]


def _refuse(path: Path, nodes: list[str], libraries: list[str], asked: tuple[str, ...]) -> None:
    """Raises NvhookError: for what the host has not, else for what was not asked for."""
    roles, groups = capabilities.node_roles(asked), capabilities.groups(asked)
    gone = [node for node in nodes if ROLES[node] in roles]
    if gone:
        what = f"{path} has {' and '.join(gone)}, which this host has not now: the file is left as it is"
        raise NvhookError(what, f"as root: {how_to_load(gone)}; or remove {path} to have one without")
    gone = [name for name in libraries if LIBRARIES[name] in groups]
    if gone:
        what = f"{path} has {' and '.join(gone)}, which was not found now: the file is left as it is"
        raise NvhookError(what, f"see `nvhook inventory`; or remove {path} to have one without")
    if nodes or libraries:
        what = f"{path} has {' and '.join(nodes + libraries)}, which --capabilities {','.join(asked)} does not ask for"
        raise NvhookError(f"{what}: the file is left as it is", f"remove {path}, or give another --output")


def _nodes(made: dict[str, Any]) -> list[str]:
    """The nodes that every device of a spec brings."""
    return [node["path"] for node in made.get("containerEdits", {}).get("deviceNodes", [])]


def _files(made: dict[str, Any]) -> set[str]:
    """Names of what is mounted, without versions, so that an upgrade is no loss."""
    places = (mount["containerPath"] for mount in made.get("containerEdits", {}).get("mounts", []))
    return {VERSION.sub("VERSION", place.rpartition("/")[2]) for place in places}
