# SPDX-License-Identifier: Apache-2.0
"""CDI specs other than that of a driver's GPUs: WSL's, Tegra's, the one for what manages GPUs, IMEX and the gates.

WSL and Tegra have no inventory. Management containers (a device plugin, a monitor) get every node of the driver and no
graphics, and work where no GPU does.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from cdi import content, finish, generate, spec, versions
from cdi.host import fingerprint, gates, imex, inventory, platform, tegra, wsl
from cdi.host.store import Options
from ldcache import root
from ldcache.errors import NvhookError

GATES = ("gds", "mofed", "gdrcopy", "nvswitch")
MODES = ("auto", "nvml", "management", "imex", *GATES, "wsl", "csv")
# Classes of their own, as NVIDIA's library has them: a container asks for them beside its GPUs. With the same kind a
# file's `all` would be in two, and in neither.
KINDS = {
    "imex": ("nvidia.com", "imex-channel"),
    "management": ("management.nvidia.com", "gpu"),
    **{gate: ("nvidia.com", gate) for gate in GATES},
}

# The options of `cdi generate` that not every mode has a use for, and the modes that obey them. In imex and for the
# gates there is no hook at all.
OBEYED = {
    "--device-id": ("nvml", "imex", "csv"),
    "--no-all-device": ("nvml", "imex", "csv"),
    "--device-name-strategy": ("nvml",),
    "--capabilities": ("nvml", "management"),
    "--no-hooks": ("nvml", "imex", *GATES),
    "--layout": ("nvml",),
    "--disable-hook": ("nvml", "management", "imex", *GATES, "wsl", "csv"),
    "--enable-hook": ("nvml", "management", "imex", *GATES, "wsl", "csv"),
    # Tegra's lists name what other boards have: something of them is always left out.
    "--strict": ("nvml", "management", "imex", *GATES, "wsl"),
}
Nodes = list[dict[str, Any]]
CHANNEL = re.compile(r"(?:channel)?(\d{1,10})")

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


def refuse(mode: str, arguments: argparse.Namespace) -> None:
    """Raises ValueError, which names it, for an option that would have no effect in this mode."""
    for option, modes in OBEYED.items():
        value = getattr(arguments, option[2:].replace("-", "_"))
        # All devices are what every mode gives.
        if mode not in modes and value and not (option == "--device-id" and set(value) == {"all"}):
            raise ValueError(f"{option} is not for the mode {mode}, which would not obey it")


def kind_of(mode: str, wanted: generate.Options) -> str:
    """The kind of a mode's devices: its own, but for the vendor or class that the options name."""
    own = KINDS.get(mode, tuple(generate.KIND.split("/")))
    usual = generate.KIND.split("/")
    asked = zip(wanted.kind.split("/"), usual, own, strict=True)
    return "/".join(mine if part == default else part for part, default, mine in asked)


def resolve(mode: str, options: Options) -> str:
    """The mode that is meant: `auto` is the one for this host."""
    if mode != "auto":
        return mode
    root_fd = root.open_host(options.host_root)
    try:
        return platform.detect(root_fd)
    finally:
        os.close(root_fd)


@dataclass(frozen=True, slots=True)
class Made:
    """A spec, what is to be said of it, and what of that --strict does not stand for."""

    spec: dict[str, Any]
    warnings: list[str]
    left_out: list[str]


def make(
    mode: str,
    options: Options,
    hook_path: str,
    lists: Lists = Lists(),
    wanted: generate.Options = generate.DEFAULTS,
) -> Made:
    """The spec of all modes but nvml. Raises NvhookError."""
    kind = kind_of(mode, wanted)
    if mode == "imex":
        return _imex(_kernels(options), kind, wanted)
    if mode in GATES:
        return _gate(mode, _kernels(options), kind)
    root_fd = root.open_host(options.host_root)
    try:
        if mode == "management":
            return _management(root_fd, _kernels(options), hook_path, replace(wanted, kind=kind))
        parts = wsl.read(root_fd) if mode == "wsl" else tegra.read(root_fd, lists.files, lists.ignored)
        second = _discrete(root_fd, options, parts) if mode == "csv" and lists.pair else []
        own = _integrated(root_fd, parts.nodes) if second else parts.nodes
    finally:
        os.close(root_fd)
    parts.compat_folder = lists.compat_folder or parts.compat_folder
    mounts = [_mount(host_path, place) for host_path, place in parts.mounts]
    edits = {"env": generate.ENV, "hooks": _hook(parts, hook_path, wanted.parts), "mounts": mounts}
    if mode == "wsl":
        # None of WSL's GPUs can be chosen, /dev/dxg has them all.
        devices = {"all": own}
    else:
        # Tegra's users ask for 0 or for all.
        devices = _chosen({"0": own} | ({"1": second} if second else {}), wanted, _tegra_name)
    return Made(_spec(kind, devices, edits), parts.warnings, parts.warnings)


def _chosen(
    devices: dict[str, Nodes], wanted: generate.Options, name_of: Callable[[str, Any], str]
) -> dict[str, Nodes]:
    """The devices that --device-id names, and `all` of them, each node once. `name_of` knows an id's device, or raises
    NvhookError."""
    if wanted.device_ids is not None and "all" not in wanted.device_ids:
        names = {name_of(item, devices) for item in wanted.device_ids}
        devices = {name: nodes for name, nodes in devices.items() if name in names}
    if not wanted.all_device:
        return devices
    every: dict[str, dict[str, Any]] = {}
    for node in (node for nodes in devices.values() for node in nodes):
        every.setdefault(node["path"], node)
    return {**devices, "all": list(every.values())}


def _tegra_name(text: str, devices: Iterable[str]) -> str:
    if text not in devices:
        what = f"no GPU {text[:80]!a} on this host; there are {', '.join(devices)}"
        raise NvhookError(what, "give one of these to --device-id")
    return text


def _channel_name(text: str, devices: Iterable[str]) -> str:
    found = CHANNEL.fullmatch(text)
    if found is None or int(found[1]) > imex.CHANNEL_MAX:
        what = f"{text[:80]!a} is no IMEX channel"
        raise NvhookError(what, f"give --device-id a number up to {imex.CHANNEL_MAX}, channelN, or all")
    name = str(int(found[1]))
    if name not in devices:
        remedy = f"make {imex.FOLDER}/channel{name}: nvidia-modprobe -i {name}:1"
        raise NvhookError(f"IMEX channel {name} is missing on the host", remedy)
    return name


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
    made: dict[str, Any] = {"cdiVersion": "", "kind": kind, "devices": named, "containerEdits": edits}
    made["cdiVersion"] = versions.minimum_version(made)
    kept: dict[str, Any] = spec.without_empty(made)
    return kept


def _kernels(options: Options) -> dict[str, Any]:
    """The inventory as far as no NVML is needed."""
    roots = options.host_root, options.driver_root, options.dev_root, options.library_search_path
    return inventory.current(Options(*roots, nvml="never"))[0]


def _imex(found: dict[str, Any], kind: str, wanted: generate.Options) -> Made:
    """A device for each channel, by its number, and `all`."""
    channels = {}
    for run in found["imex"]:
        for number in range(run["channel"], run["channel"] + run["count"]):
            first = run["node"]
            names = {key: f"{first[key].rpartition('/')[0]}/channel{number}" for key in ("path", "host_path")}
            channels[str(number)] = generate.nodes([first | names])
    if not channels:
        what = f"no IMEX channel is there: {imex.FOLDER} has no node"
        raise NvhookError(what, "load nvidia with NVreg_CreateImexChannel0=1, or make channels by nvidia-modprobe")
    made = _spec(kind, _chosen(channels, wanted, _channel_name), {"env": generate.ENV, "mounts": []})
    return _about(made, found, (imex.FOLDER,))


def _about(made: dict[str, Any], found: dict[str, Any], paths: tuple[str, ...]) -> Made:
    """A spec of some nodes alone, with what is to be said of these."""
    warnings = [line for line in found["warnings"] if any(path in line for path in paths)]
    return Made(made, warnings, warnings)


def _gate(mode: str, found: dict[str, Any], kind: str) -> Made:
    """One device with all nodes of the gate, and its files."""
    gate = found["gates"].get(mode)
    if gate is None:
        what = f"no node of {mode} is there: {', '.join([*gates.FIXED[mode], *_pattern(mode)])}"
        raise NvhookError(what, "load the module that makes them")
    nodes = generate.nodes(gate["nodes"])
    mounts = [_mount(item["path"], item["container_path"]) for item in gate["files"]]
    made = _spec(kind, {"all": nodes}, {"env": generate.ENV, "mounts": mounts})
    return _about(made, found, (*gates.FIXED[mode], *(path.rstrip("*") for path in _pattern(mode))))


def _pattern(mode: str) -> list[str]:
    return [f"{gates.NUMBERED[mode]}*"] if mode in gates.NUMBERED else []


def _management(root_fd: int, found: dict[str, Any], hook_path: str, wanted: generate.Options) -> Made:
    dev_root = found["options"]["dev_root"].rstrip("/")
    nodes = management_nodes(root_fd, dev_root)
    if not nodes:
        raise NvhookError(f"no node of the driver is in {dev_root}/dev", generate.NO_NODE_REMEDY)
    # It is there to see all GPUs.
    options = replace(wanted, parts=tuple(part for part in wanted.parts if part != "proc-mask"))
    plain = generate.chosen(found, options)
    plain["nodes"] = [node for node in plain["nodes"] if node["role"] != "drm"]
    plain["files"] = [item for item in plain["files"] if item["capability"] != "graphics"]
    # What monitors GPUs needs no CUDA.
    needed = tuple(name for name in options.capabilities if name != "compute")
    edits = generate.common(plain, hook_path, options, needed)
    # All nodes stand with the device, so that each is there once.
    made = _spec(wanted.kind, {"all": nodes}, edits | {"deviceNodes": []})
    missing = [f"GPU {fault['bus_id']} is left out: {fault['reason']}" for fault in found["faults"]]
    return Made(made, found["warnings"], missing + generate.without_uvm(found, options))


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
