# SPDX-License-Identifier: Apache-2.0
"""CDI specs other than that of a driver's GPUs: WSL's, Tegra's, the one for what manages GPUs, IMEX and the gates.

WSL and Tegra have no inventory. Management containers (a device plugin, a monitor) get every node of the driver and no
graphics, and work where no GPU does.
"""

from __future__ import annotations

import argparse
import os
import re
from dataclasses import dataclass
from typing import Any

from cdi import content, finish, generate, spec, versions
from cdi.host import fingerprint, gates, imex, inventory, platform, tegra, wsl
from cdi.host.store import Options
from ldcache import root
from ldcache.errors import NvhookError

GATES = ("gds", "mofed", "gdrcopy", "nvswitch")
MODES = ("auto", "nvml", "management", "imex", *GATES, "wsl", "csv")
# Classes of their own, as NVIDIA's library has them: a container asks for them beside its GPUs.
IMEX_KIND = "nvidia.com/imex-channel"
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
    add(
        "--csv.compat-container-root",
        dest="csv_compat",
        type=inventory.host_path,
        metavar="DIR",
        help=f"csv: where images have a newer libcuda; default: on Orin {tegra.ORIN_FOLDER}, else CUDA's usual folder",
    )


@dataclass(frozen=True, slots=True)
class Lists:
    """What the mode csv is told: lists instead of the usual ones, patterns of links to leave out, where images have a
    newer libcuda ("" for the usual place), and whether a discrete GPU beside Tegra's own is offered."""

    files: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    compat_folder: str = ""
    pair: bool = True


def lists_of(arguments: argparse.Namespace) -> Lists:
    """The same, by the arguments."""
    return Lists(
        tuple(arguments.csv_files),
        tuple(arguments.csv_ignored),
        arguments.csv_compat or "",
        "disable-multiple-csv-devices" not in content.flags(arguments),
    )


def resolve(mode: str, options: Options) -> str:
    """The mode that is meant: `auto` is the one for this host."""
    if mode != "auto":
        return mode
    root_fd = root.open_host(options.host_root)
    try:
        return platform.detect(root_fd)
    finally:
        os.close(root_fd)


def make(
    mode: str,
    options: Options,
    hook_path: str,
    lists: Lists = Lists(),
    hook_parts: tuple[str, ...] = finish.PARTS,
) -> tuple[dict[str, Any], list[str]]:
    """The spec of all modes but nvml, and warnings. `hook_parts` are some of finish.PARTS. Raises NvhookError."""
    if mode == "imex":
        return _imex(_kernels(options))
    if mode in GATES:
        return _gate(mode, _kernels(options))
    root_fd = root.open_host(options.host_root)
    try:
        if mode == "management":
            return _management(root_fd, _kernels(options), hook_path)
        parts = wsl.read(root_fd) if mode == "wsl" else tegra.read(root_fd, lists.files, lists.ignored)
        second = _discrete(root_fd, options, parts) if mode == "csv" and lists.pair else []
        own = _integrated(root_fd, parts.nodes) if second else parts.nodes
    finally:
        os.close(root_fd)
    parts.compat_folder = lists.compat_folder or parts.compat_folder
    mounts = [_mount(host_path, place) for host_path, place in parts.mounts]
    edits = {"env": generate.ENV, "hooks": _hook(parts, hook_path, hook_parts), "mounts": mounts}
    # Tegra's users ask for 0 or for all; of WSL's GPUs none can be chosen, /dev/dxg has them all.
    devices = {} if mode == "wsl" else {"0": own} | ({"1": second} if second else {})
    devices["all"] = own + [node for node in second if node["path"] not in {one["path"] for one in own}]
    return _spec(generate.KIND, devices, edits), parts.warnings


def _discrete(root_fd: int, options: Options, parts: platform.Parts) -> list[dict[str, Any]]:
    """The nodes of a discrete GPU beside Thor's own, with those of the driver, which both have; none where there is no
    such pair. Thor has the ordinary module, and so its GPUs stand in /proc. Any other set of GPUs has a warning."""
    if not fingerprint.text(root_fd, fingerprint.VERSION_FILE):
        return []
    found = _kernels(options)
    cards = found["gpus"]
    if len(cards) < 2:
        return []
    if [platform.is_integrated(card["name"]) for card in cards] != [True, False]:
        shown = ", ".join(card["name"] for card in cards)
        parts.warnings.append(f"only what the lists name is offered, for GPUs are not a Tegra's and one more: {shown}")
        return []
    roles = ("control", "uvm", "uvm-tools", "modeset", "gpu", "drm")
    mine = (None, cards[1]["bus_id"])
    return generate.nodes([node for node in found["nodes"] if node["role"] in roles and node["gpu"] in mine])


def _integrated(root_fd: int, nodes: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Thor's own nodes where a discrete GPU has the minor 1, which the lists give to Thor's second one: that is 2."""
    moved = platform.node(root_fd, "/dev/nvidia2")
    return [node for node in nodes if node["path"] not in ("/dev/nvidia1", "/dev/nvidia2")] + ([moved] if moved else [])


def _mount(host_path: str, container_path: str) -> dict[str, Any]:
    return {"hostPath": host_path, "containerPath": container_path, "options": generate.FILE_OPTIONS}


def _hook(parts: platform.Parts, hook_path: str, wanted: tuple[str, ...]) -> list[dict[str, Any]]:
    arguments = [finish.HOOK_NAME]
    for target, place in parts.links if "links" in wanted else ():
        arguments += ["--link", f"{target}::{place}"]
    for folder in parts.folders if "loader-cache" in wanted else ():
        arguments += ["--folder", folder]
    if parts.cuda and "forward-compatibility" in wanted:
        arguments += ["--compat-cuda", parts.cuda]
        arguments += ["--compat-folder", parts.compat_folder] if parts.compat_folder else []
    entry = {"hookName": "createContainer", "path": hook_path, "args": arguments, "env": finish.HOOK_ENV}
    return [entry] if len(arguments) > 1 else []


def _spec(kind: str, devices: dict[str, list[dict[str, Any]]], edits: dict[str, Any]) -> dict[str, Any]:
    # Parents first, as readers sort them.
    edits["mounts"].sort(key=lambda mount: (mount["containerPath"].count("/"), mount["containerPath"]))
    named = [{"name": name, "containerEdits": {"deviceNodes": nodes}} for name, nodes in devices.items()]
    return _whole(kind, named, edits)


def _whole(kind: str, devices: list[dict[str, Any]], edits: dict[str, Any]) -> dict[str, Any]:
    made: dict[str, Any] = {"cdiVersion": "", "kind": kind, "devices": devices, "containerEdits": edits}
    made["cdiVersion"] = versions.minimum_version(made)
    kept: dict[str, Any] = spec.without_empty(made)
    return kept


def _kernels(options: Options) -> dict[str, Any]:
    """The inventory as far as no NVML is needed."""
    roots = options.host_root, options.driver_root, options.dev_root, options.library_search_path
    return inventory.current(Options(*roots, nvml="never"))[0]


def _imex(found: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """A device for each channel, by its number, and `all`."""
    nodes = {}
    for run in found["imex"]:
        for number in range(run["channel"], run["channel"] + run["count"]):
            first = run["node"]
            names = {key: f"{first[key].rpartition('/')[0]}/channel{number}" for key in ("path", "host_path")}
            nodes[str(number)] = generate.nodes([first | names])
    if not nodes:
        what = f"no IMEX channel is there: {imex.FOLDER} has no node"
        raise NvhookError(what, "load nvidia with NVreg_CreateImexChannel0=1, or make channels by nvidia-modprobe")
    nodes["all"] = [node for alone in nodes.values() for node in alone]
    devices = [{"name": name, "containerEdits": {"deviceNodes": mine}} for name, mine in nodes.items()]
    return _whole(IMEX_KIND, devices, {"env": generate.ENV}), found["warnings"]


def _gate(mode: str, found: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """One device with all nodes of the gate, and its files."""
    gate = found["gates"].get(mode)
    if gate is None:
        what = f"no node of {mode} is there: {', '.join([*gates.FIXED[mode], *_pattern(mode)])}"
        raise NvhookError(what, "load the module that makes them")
    nodes = generate.nodes(gate["nodes"])
    mounts = [_mount(item["path"], item["container_path"]) for item in gate["files"]]
    return _spec(f"nvidia.com/{mode}", {"all": nodes}, {"env": generate.ENV, "mounts": mounts}), found["warnings"]


def _pattern(mode: str) -> list[str]:
    return [f"{gates.NUMBERED[mode]}*"] if mode in gates.NUMBERED else []


def _management(root_fd: int, found: dict[str, Any], hook_path: str) -> tuple[dict[str, Any], list[str]]:
    dev_root = found["options"]["dev_root"].rstrip("/")
    nodes = management_nodes(root_fd, dev_root)
    if not nodes:
        raise NvhookError(f"no node of the driver is in {dev_root}/dev", generate.NO_NODE_REMEDY)
    # It is there to see all GPUs.
    options = generate.Options(parts=tuple(part for part in finish.PARTS if part != "proc-mask"))
    plain = generate.chosen(found, options)
    plain["nodes"] = [node for node in plain["nodes"] if node["role"] != "drm"]
    plain["files"] = [item for item in plain["files"] if item["capability"] != "graphics"]
    # What monitors GPUs needs no CUDA.
    edits = generate.common(plain, hook_path, options, needed=("utility",))
    # All nodes stand with the device, so that each is there once.
    return _spec(MANAGEMENT_KIND, {"all": nodes}, edits | {"deviceNodes": []}), found["warnings"]


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
