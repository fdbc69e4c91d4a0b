# SPDX-License-Identifier: Apache-2.0
"""`nvidia-container-cli` (libnvidia-container 1.17): `info`, `list` and `configure`, for LXC, enroot and scripts.

Options before the command are global, those behind it the command's: -l and -n mean different things there.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from cdi import VERSION, devices
from cdi.host import store
from hook import protection
from hook.names import containerconfigure
from hook.request import Request
from ldcache import root
from ldcache.errors import NvhookError
from ldcache.output import until_closed

# In the order of NVIDIA's listing.
GROUPS = ("utility", "compute", "ngx", "video", "graphics")
CONTROL = ("control", "uvm", "uvm-tools", "modeset")


def parser() -> argparse.ArgumentParser:
    """All commands and their options. Long options may be abbreviated, as GNU's argp allows."""
    top = argparse.ArgumentParser(prog="nvidia-container-cli", description="libnvidia-container's command, by nvhook.")
    add = top.add_argument
    add("-V", "--version", action="version", version=f"nvhook {VERSION}")
    add("-d", "--debug", metavar="FILE", help="has no effect")
    add("-k", "--load-kmods", action="store_true", help="first load modules and make nodes, as `nvhook nodes create`")
    add("-n", "--no-pivot", action="store_true", help="has no effect: nothing is run inside the container")
    add("-u", "--user", metavar="UID[:GID]", help="has no effect: NVML is asked in a child")
    add("-r", "--root", metavar="DIR", help="where the driver's files lie; default: as configured")
    add("-l", "--ldcache", metavar="FILE", help="has no effect: library folders are looked into besides")
    add("--no-create-imex-channels", action="store_true", help="has no effect: no channels are made")
    add("--host-root", default="/", metavar="DIR", help="nvhook's own: the folder that stands for the host's /")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    info = commands.add_parser("info", help="the driver and its GPUs")
    info.add_argument("--csv", action="store_true", help="as values between commas")
    add_list(commands.add_parser("list", help="files and nodes of the driver, one path a line"))
    containerconfigure.add_arguments(commands.add_parser("configure", help="put the driver into a container"))
    return top


def add_list(verb: argparse.ArgumentParser) -> None:
    """The options of `list`; without any, everything is listed."""
    add = verb.add_argument
    add("-d", "--device", action="append", metavar="ID", help="nodes of these GPUs, and the control nodes; repeatable")
    for short, name in (("-l", "libraries"), ("-b", "binaries"), ("-i", "ipcs"), ("-f", "firmwares")):
        add(short, f"--{name}", action="store_true", help=f"the driver's {name}")
    add("--compat32", action="store_true", help="with -l, 32-bit libraries too")
    add("--mig-config", metavar="all", help="the nodes for dividing GPUs")
    add("--mig-monitor", metavar="all", help="the nodes for watching MIG devices")
    add("--imex-channel", action="append", metavar="ID", help="IMEX channels")
    for name in ("persistenced", "fabricmanager", "gsp-firmware"):
        add(f"--no-{name}", action="store_true", help=f"leave {name} out")


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status: 0 done, 1 failed, 1 for wrong use too, as NVIDIA's."""
    words = list(sys.argv[1:] if argv is None else argv)
    return until_closed(lambda: answer(words))


def answer(words: list[str]) -> int:
    """The exit status of a command and its options."""
    # The value of --user is optional, so it counts only where it is attached; behind the command, -u is another option.
    at = next((index for index, word in enumerate(words) if word in COMMANDS), 0)
    words[:at] = ["--user=" if word in ("-u", "--user") else word for word in words[:at]]
    try:
        arguments = parser().parse_args(words)
    except SystemExit as error:
        return 1 if error.code else 0
    try:
        if arguments.load_kmods:
            load(arguments)
        return COMMANDS[arguments.command](arguments)
    except NvhookError as error:
        print(f"nvidia-container-cli: {error.what}\n  remedy: {error.remedy}", file=sys.stderr)
        return 1


def load(arguments: argparse.Namespace) -> None:
    """Modules and nodes. In a user namespace there is nothing to be made; NVIDIA's does without it there too."""
    from hook import cli

    if os.geteuid() == 0 and protection.in_first_user_namespace():
        modules = [] if arguments.host_root != "/" else ["--load-kmods"]
        cli.main(["nodes", "create", "--host-root", arguments.host_root, *modules])


def inventory(arguments: argparse.Namespace, facts: bool) -> dict[str, Any]:
    """What the host has; with `facts` NVML is asked for what only it tells of GPUs."""
    host = root.open_host(arguments.host_root)
    try:
        known = store.inventory(host, arguments.host_root)
        if facts and not store.has_facts(known):
            known = store.renew(host, arguments.host_root, facts=True)
    finally:
        os.close(host)
    containerconfigure.check_root(arguments.root, known)
    return known


def info(arguments: argparse.Namespace) -> int:
    """`info`: labels padded to 15 columns, or CSV; what nobody tells is empty."""
    known = inventory(arguments, facts=True)
    driver = [("NVRM version", known["driver"]["version"]), ("CUDA version", known["driver"]["cuda"] or "")]
    tables = [[driver], [facts_of(gpu) for gpu in known["gpus"]]]
    if arguments.csv:
        print("\n\n".join(csv(table) for table in tables if table))
    else:
        blocks = ["\n".join(f"{f'{name}:':15} {value}" for name, value in row) for table in tables for row in table]
        print("\n\n".join(blocks))
    return 0


def facts_of(gpu: dict[str, Any]) -> list[tuple[str, str]]:
    """A GPU by NVIDIA's labels."""
    domain, _, rest = gpu["bus_id"].partition(":")
    return [
        ("Device Index", str(gpu["index"])),
        ("Device Minor", str(gpu["minor"])),
        ("Model", gpu["name"]),
        ("Brand", gpu["brand"] or ""),
        ("GPU UUID", gpu["uuid"] or ""),
        ("Bus Location", f"{domain:>08}:{rest}"),
        ("Architecture", gpu["arch"] or ""),
    ]


def csv(rows: list[list[tuple[str, str]]]) -> str:
    """A header and a line for each row, nothing quoted."""
    return "\n".join([",".join(name for name, _ in rows[0]), *(",".join(value for _, value in row) for row in rows)])


def show(arguments: argparse.Namespace) -> int:
    """`list`: paths as the driver root has them."""
    known = inventory(arguments, facts=False)
    given = [name for name in LISTED if getattr(arguments, name)]
    everything = not given
    for path in listed(known, arguments, everything):
        print(path)
    return 0


LISTED = (
    *("device", "libraries", "binaries", "ipcs", "firmwares", "compat32", "mig_config", "mig_monitor"),
    *("no_persistenced", "no_fabricmanager", "no_gsp_firmware"),
)


def listed(known: dict[str, Any], arguments: argparse.Namespace, everything: bool) -> Iterator[str]:
    """The paths, in the order of NVIDIA's listing. Raises NvhookError for a device that is not there."""
    ids = ["all"] if everything else arguments.device
    if ids:
        yield from device_nodes(known, containerconfigure.ids_of(ids))
    for channel in arguments.imex_channel or []:
        yield f"/dev/nvidia-caps-imex-channels/channel{channel}"
    for name in ("config", "monitor"):
        if getattr(arguments, f"mig_{name}"):
            control = (known.get("mig_control") or {}).get(name) or {"nodes": [], "access": []}
            yield from [*control["access"], *(node["path"] for node in control["nodes"])]
    yield from below(known, files(known, arguments, everything))


def files(known: dict[str, Any], arguments: argparse.Namespace, everything: bool) -> Iterator[str]:
    """Programs, libraries, sockets and firmware: host paths."""
    if everything or arguments.binaries:
        yield from (item["path"] for item in known["programs"])
    if everything or arguments.libraries:
        for bits in (64, 32) if everything or arguments.compat32 else (64,):
            of_class = [item for item in known["libraries"] if item["class"] == bits and item["capability"] in GROUPS]
            yield from (item["path"] for item in sorted(of_class, key=lambda item: GROUPS.index(item["capability"])))
    if everything or arguments.ipcs:
        for item in known["sockets"]:
            name = next((name for name in ("persistenced", "fabricmanager") if name in item["path"]), "")
            if not name or not getattr(arguments, f"no_{name}"):
                yield item["path"]
    if (everything or arguments.firmwares) and not arguments.no_gsp_firmware:
        yield from (item["path"] for item in known["firmware"])


def device_nodes(known: dict[str, Any], ids: tuple[str, ...] | None) -> Iterator[str]:
    """Control nodes, GPUs, then what MIG devices need."""
    wanted = Request(ids, ())
    gpus, mig = chosen(known, wanted)
    for roles in (CONTROL, ("gpu",)):
        for node in known["nodes"]:
            if node["role"] in roles and (node["gpu"] is None or node["gpu"] in gpus):
                yield node["path"]
    for entry in mig:
        yield from [*entry["access"], *(node["path"] for node in entry["nodes"])]


def chosen(known: dict[str, Any], wanted: Request) -> tuple[set[str], list[dict[str, Any]]]:
    """Bus ids of the GPUs asked for, and the MIG devices."""
    if wanted.ids is None:
        return {gpu["bus_id"] for gpu in known["gpus"]}, list(known.get("mig") or [])
    try:
        found = [devices.find(known, name) for name in wanted.ids]
    except devices.UuidsUnknown as error:
        what = f"cannot tell which GPU is {', '.join(wanted.ids)}: the kernel does not tell all UUIDs"
        raise NvhookError(what, "run nvidia-smi on the host, or ask for the GPU by its index") from error
    return {device.gpu["bus_id"] for device in found}, [device.mig for device in found if device.mig is not None]


def below(known: dict[str, Any], paths: Iterator[str]) -> Iterator[str]:
    """Host paths as the driver root has them."""
    prefix = known["options"]["driver_root"].rstrip("/")
    for path in paths:
        yield path[len(prefix) :] if prefix and path.startswith(f"{prefix}/") else path


COMMANDS = {"info": info, "list": show, "configure": containerconfigure.run}
