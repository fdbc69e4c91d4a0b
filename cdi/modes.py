# SPDX-License-Identifier: Apache-2.0
"""CDI specs other than that of a driver's GPUs: WSL's, Tegra's, and the one for what manages GPUs.

WSL and Tegra have no inventory. Management containers (a device plugin, a monitor) get every node of the driver and no
graphics, and work where no GPU does.
"""

from __future__ import annotations

import argparse
import os
import re
from typing import Any

from cdi import generate, spec, versions
from cdi.host import inventory, platform, tegra, wsl
from cdi.host.store import Options
from ldcache import root
from ldcache.errors import NvhookError

MODES = ("auto", "nvml", "management", "wsl", "csv")
# Beside the file of the GPUs: with the same kind its `all` would be in both, and in neither.
MANAGEMENT_KIND = "management.nvidia.com/gpu"

NODE = re.compile(r"nvidia(?:\d+|ctl|-uvm|-uvm-tools|-modeset)")
# Each folder and what is taken of it. GPUDirect Storage's, NVSwitch's and NVLink's nodes have gates of their own.
NODE_FOLDERS = (
    ("/dev", NODE),
    ("/dev/nvidia-caps", re.compile(r"nvidia-cap\d+")),
    ("/dev/nvidia-caps-imex-channels", re.compile(r"channel\d+")),
)


def add_arguments(verb: argparse.ArgumentParser) -> None:
    """The options of `cdi generate` that choose a mode, and those of the mode csv."""
    add = verb.add_argument
    add("--mode", choices=MODES, default="auto", help="auto: what this host is; management: every node, no graphics")
    add(
        "--csv.file",
        dest="csv_files",
        action="append",
        type=inventory.host_path,
        default=[],
        metavar="FILE",
        help=f"csv: a list instead of those in {tegra.FOLDER}; may be repeated",
    )
    add(
        "--csv.ignore-pattern",
        dest="csv_ignored",
        action="append",
        default=[],
        metavar="GLOB",
        help="csv: links to leave out, **/NAME in any folder; may be repeated",
    )


def resolve(mode: str, options: Options) -> str:
    """The mode that is meant: `auto` is the one for this host."""
    if mode != "auto":
        return mode
    root_fd = inventory.open_host(options.host_root)
    try:
        return platform.detect(root_fd)
    finally:
        os.close(root_fd)


def make(
    mode: str, options: Options, hook_path: str, csv_files: tuple[str, ...] = (), ignored: tuple[str, ...] = ()
) -> tuple[dict[str, Any], list[str]]:
    """The spec of the modes wsl, csv and management, and warnings. Raises NvhookError."""
    root_fd = inventory.open_host(options.host_root)
    try:
        if mode == "management":
            return _management(root_fd, options, hook_path)
        parts = wsl.read(root_fd) if mode == "wsl" else tegra.read(root_fd, csv_files, ignored)
    finally:
        os.close(root_fd)
    # Tegra's users ask for 0 or for all; of WSL's GPUs none can be chosen, /dev/dxg has them all.
    names = ("all",) if mode == "wsl" else ("0", "all")
    mounts = [_mount(host_path, place) for host_path, place in parts.mounts]
    edits = {"env": generate.ENV, "hooks": _hook(parts, hook_path), "mounts": mounts}
    return _spec(generate.KIND, names, parts.nodes, edits), parts.warnings


def _mount(host_path: str, container_path: str) -> dict[str, Any]:
    return {"hostPath": host_path, "containerPath": container_path, "options": generate.FILE_OPTIONS}


def _hook(parts: platform.Parts, hook_path: str) -> list[dict[str, Any]]:
    arguments = [generate.HOOK_NAME]
    for target, place in parts.links:
        arguments += ["--link", f"{target}::{place}"]
    for folder in parts.folders:
        arguments += ["--folder", folder]
    entry = {"hookName": "createContainer", "path": hook_path, "args": arguments, "env": generate.HOOK_ENV}
    return [entry] if len(arguments) > 1 else []


def _spec(kind: str, names: tuple[str, ...], nodes: list[dict[str, Any]], edits: dict[str, Any]) -> dict[str, Any]:
    # Parents first, as readers sort them.
    edits["mounts"].sort(key=lambda mount: (mount["containerPath"].count("/"), mount["containerPath"]))
    devices = [{"name": name, "containerEdits": {"deviceNodes": nodes}} for name in names]
    made: dict[str, Any] = {"cdiVersion": "", "kind": kind, "devices": devices, "containerEdits": edits}
    made["cdiVersion"] = versions.minimum_version(made)
    kept: dict[str, Any] = spec.without_empty(made)
    return kept


def _management(root_fd: int, options: Options, hook_path: str) -> tuple[dict[str, Any], list[str]]:
    found, _ = inventory.current(options)
    dev_root = found["options"]["dev_root"].rstrip("/")
    nodes = management_nodes(root_fd, dev_root)
    if not nodes:
        raise NvhookError(f"no node of the driver is in {dev_root}/dev", generate.NO_NODE_REMEDY)
    plain = found | {"files": [item for item in found["files"] if item["capability"] != "graphics"]}
    edits = generate.common(plain, hook_path)
    # All nodes stand with the device, so that each is there once.
    return _spec(MANAGEMENT_KIND, ("all",), nodes, edits | {"deviceNodes": []}), found["warnings"]


def management_nodes(root_fd: int, prefix: str) -> list[dict[str, Any]]:
    """Every node of the driver's, as a spec has it. `prefix` is the dev root, "" for the host's."""
    nodes = []
    for folder, pattern in NODE_FOLDERS:
        try:
            names = sorted(filter(pattern.fullmatch, root.listdir(root_fd, prefix + folder)), key=_by_number)
        except OSError:
            continue
        for name in names:
            made = platform.node(root_fd, f"{prefix}{folder}/{name}")
            if made is not None:
                path = {"path": f"{folder}/{name}"} | ({"hostPath": made["path"]} if prefix else {})
                nodes.append(path | {key: value for key, value in made.items() if key != "path"})
    return nodes


def _by_number(name: str) -> tuple[str, int]:
    digits = re.search(r"\d+$", name)
    return name.rstrip("0123456789"), int(digits[0]) if digits else -1
