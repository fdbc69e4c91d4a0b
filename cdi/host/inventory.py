# SPDX-License-Identifier: Apache-2.0
"""The inventory: all that this host has of NVIDIA's, as one JSON value (schema 1), and the verb that prints it.

All paths in it are host paths: as if `--host-root` were `/`, with the driver root in front where there is one.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator
from typing import Any

from cdi import VERSION
from cdi.host import (
    config,
    driver,
    files,
    fingerprint,
    gates,
    gpus,
    imex,
    kmods,
    libraries,
    mig,
    nodes,
    nvml,
    overview,
    platform,
    settings,
    store,
)
from cdi.host.store import Options
from ldcache import kernel, root
from ldcache.errors import NvhookError

# A GPU that could not be powered up is looked at again after this many seconds.
FAULT_PAUSE = 60.0

NVML_MODES = ("never", "auto", "facts", "health", "always")


def gather(options: Options, folder: int | None = None, previous: dict[str, Any] | None = None) -> dict[str, Any]:
    """Look at the host and return its inventory. Raises NvhookError where no driver is loaded.

    `folder` is open on the place where what NVML hung on is remembered. What only NVML could tell and
    `previous`, an earlier inventory, holds is taken from there if the same module is still loaded.
    """
    made = look(options, previous)
    if wants_nvml(made, options):
        add_answer(made, ask_nvml(made, options, folder))
    return made


def look(options: Options, previous: dict[str, Any] | None = None) -> dict[str, Any]:
    """`gather` without asking NVML, which may take long."""
    root_fd = root.open_host(options.host_root)
    try:
        made = _look(root_fd, options, previous)
        if kmods.may_load(options.host_root, settings.of(made)) and kmods.load(root_fd, made):
            # The fingerprint is of the time before; and there are more nodes now.
            made = _look(root_fd, options, previous)
        return made
    finally:
        os.close(root_fd)


def _look(root_fd: int, options: Options, previous: dict[str, Any] | None) -> dict[str, Any]:
    recorder = fingerprint.Recorder(root_fd)
    recorder.kernel()
    platform.refuse(root_fd)
    loaded = driver.read(root_fd, options.host_root)
    host = fingerprint.Base(root_fd, "")
    for path in (settings.OURS, settings.NVIDIAS):
        recorder.file(host, path)
    configured = config.read(root_fd)
    places = options.to_json(settings.of({"config": configured}))
    base = _base(recorder, host, places["driver_root"], "driver root")
    dev = _base(recorder, host, places["dev_root"], "dev root")
    try:
        found, faults = gpus.read(root_fd)
        parts = libraries.read(recorder, loaded, base, host, options.library_search_path)
        node_list, node_warnings = nodes.read(recorder, dev, found)
        layout = mig.read(recorder, dev, found)
        channels, channel_warnings = imex.read(recorder, dev)
        opened, gate_warnings = gates.read(recorder, dev, base, host)
        socket_list, socket_warnings = files.sockets(recorder, base, host)
        result: dict[str, Any] = {
            "schema": store.SCHEMA,
            "nvhook": VERSION,
            "options": places,
            "config": configured,
            "driver": loaded.to_json(None),
            "gpus": [gpu.to_json() | {"mig_mode": gpu.bus_id in layout.divided or None} for gpu in found],
            "faults": [fault.to_json() for fault in faults],
            "libraries": [library.to_json() for library in parts.libraries],
            "searched": parts.searched,
            "other_versions": parts.others,
            "programs": files.programs(recorder, base, parts.folders, parts.stems),
            "files": files.data_files(recorder, base, parts.folders, parts.stems, loaded.version),
            "firmware": files.firmware(recorder, base, host, parts.folders, loaded.version),
            "sockets": socket_list,
            "nodes": node_list,
            "mig": layout.devices,
            "mig_control": layout.control,
            "imex": channels,
            "gates": opened,
            "warnings": configured["warnings"] + parts.warnings + node_warnings + socket_warnings,
        }
    finally:
        for one in (base, dev):
            if one is not host:
                os.close(one.fd)
    result["warnings"] += layout.warnings + channel_warnings + gate_warnings
    if any(not fault.lasting for fault in faults):
        recorder.until(FAULT_PAUSE)
    result["fingerprint"] = recorder.fingerprint()
    _carry_over(result, previous)
    return result


def _base(recorder: fingerprint.Recorder, host: fingerprint.Base, path: str, what: str) -> fingerprint.Base:
    if not path.rstrip("/"):
        return host
    recorder.file(host, path)
    return driver.open_root(host.fd, path, what)


def _carry_over(result: dict[str, Any], previous: dict[str, Any] | None) -> None:
    """Keep what NVML told earlier, as long as neither the boot nor the module nor its GPUs are others."""
    if previous is None or previous.get("nvhook") != VERSION:
        return
    mine = _module(result)
    if all(item[0] != "entry" for item in mine):
        # Without sysfs nothing tells of a reload.
        return
    try:
        if _module(previous) != mine:
            return
        cuda, known = previous["driver"]["cuda"], {gpu["bus_id"]: _told(gpu) for gpu in previous["gpus"]}
        if _mig_tree(previous) == _mig_tree(result):
            names = ("uuid", "index", "profile")
            devices = {_place(entry): {name: entry[name] for name in names} for entry in previous["mig"]}
            for entry in result["mig"]:
                entry.update(devices[_place(entry)])
    except (KeyError, TypeError, IndexError):
        # Somebody edited it; it is of no use then.
        return
    result["driver"]["cuda"] = cuda
    for gpu in result["gpus"]:
        _learn(gpu, known.get(gpu["bus_id"], {}))


def _mig_tree(inventory: dict[str, Any]) -> list[Any]:
    """The MIG layout as the fingerprint has it. A MIG device's UUID is made of its GPU's identity and the numbers of
    its instances (nvGenerateSmcUuid of the open kernel module), so one layout has one set of UUIDs."""
    return [item for item in inventory["fingerprint"] if item[0] == "mig"]


def _place(device: dict[str, Any]) -> tuple[str, int, int]:
    return device["gpu"], device["gi"], device["ci"]


def _told(gpu: dict[str, Any]) -> dict[str, Any]:
    """What NVML alone may have told of a GPU."""
    return {name: gpu[name] for name in ("uuid", "arch", "brand", "mig_mode")}


def _learn(gpu: dict[str, Any], told: dict[str, Any]) -> None:
    """Add that to what is not known otherwise."""
    gpu.update({name: value for name, value in told.items() if gpu[name] is None})


def _module(inventory: dict[str, Any]) -> list[Any]:
    """What is another after a reboot, a reload of the module, or a change of its GPUs."""
    module = f"{fingerprint.MODULE_FOLDER}/nvidia"
    return [item for item in inventory["fingerprint"] if item[0] in ("text", "names") or item[1] == module]


def wants_nvml(result: dict[str, Any], options: Options) -> bool:
    """Whether NVML is to be asked for what an inventory lacks."""
    if options.nvml == "facts":
        return not (store.has_facts(result) and store.settled(result))
    return options.nvml in ("health", "always") or (options.nvml == "auto" and not store.settled(result))


def ask_nvml(result: dict[str, Any], options: Options, folder: int | None) -> nvml.Answer:
    """What only NVML tells of an inventory's GPUs; what fails is a warning in the answer."""
    forced = options.nvml == "always"
    wanted = ("uuid", "arch", "brand") if options.nvml == "facts" else ("uuid",)
    each = options.nvml in ("health", "always")
    unknown = {entry["gpu"] for entry in result["mig"] if entry["uuid"] is None}
    unknown |= {gpu["bus_id"] for gpu in result["gpus"] if each or any(gpu[name] is None for name in wanted)}
    unknown |= {gpu["bus_id"] for gpu in store.undivided(result)}
    asked = [gpu["bus_id"] for gpu in result["gpus"] if gpu["bus_id"] in unknown]
    mine = (item for item in result["libraries"] if item["soname"] == "libnvidia-ml.so.1" and _loads(item))
    library = next(mine, None)
    if library is None:
        version = result["driver"]["version"]
        return nvml.Answer(warnings=[f"NVML is not asked: libnvidia-ml.so.{version} is in no library folder"])
    boot_id = next(value for kind, path, value in result["fingerprint"] if path == fingerprint.BOOT_ID)
    back_off = nvml.BackOff(folder, boot_id)
    path = options.host_root.rstrip("/") + library["path"]
    return nvml.ask(path, asked, options.nvml_timeout, back_off, force=forced)


def add_answer(result: dict[str, Any], answer: nvml.Answer) -> None:
    """Fill in what NVML told; what the kernel tells counts more."""
    result["driver"]["cuda"] = answer.cuda or result["driver"]["cuda"]
    for gpu in result["gpus"]:
        _learn(gpu, answer.facts.get(gpu["bus_id"], {}))
        _learn(gpu, {"uuid": answer.uuids.get(gpu["bus_id"])})
        # The mode may be another since it was told before; what has instances is in it.
        if gpu["bus_id"] in answer.mig_modes and not any(one["gpu"] == gpu["bus_id"] for one in result["mig"]):
            gpu["mig_mode"] = answer.mig_modes[gpu["bus_id"]]
    for bus_id, devices in answer.mig.items():
        result["warnings"] += mig.learn(result["mig"], bus_id, devices)
    result["warnings"] += answer.warnings
    _leave_out(result, answer.faults)


def _leave_out(result: dict[str, Any], faults: dict[str, str]) -> None:
    """GPUs that NVML has found unusable: the others keep their indexes, and they are looked at again soon."""
    if not faults:
        return
    result["gpus"] = [gpu for gpu in result["gpus"] if gpu["bus_id"] not in faults]
    result["mig"] = [device for device in result["mig"] if device["gpu"] not in faults]
    for bus_id, reason in faults.items():
        result["faults"].append(gpus.Fault(bus_id, reason).to_json())
    result["faults"].sort(key=lambda fault: gpus.address(fault["bus_id"]))
    fingerprint.look_again(result["fingerprint"], FAULT_PAUSE)


def _loads(library: dict[str, Any]) -> bool:
    """Whether this very interpreter can load it."""
    return bool(library["class"] == (64 if sys.maxsize > 1 << 32 else 32))


def current(options: Options, refresh: bool = False, lock_held: bool = False) -> tuple[dict[str, Any], str | None]:
    """The inventory as a command prints it: the kept one if it holds and is complete, else a new one, kept.

    And why a new one could not be kept, for callers without a place of their own.
    """
    root_fd = root.open_host(options.host_root)
    try:
        try:
            folder = store.make_folder(root_fd, options.host_root)
        except NvhookError as error:
            return gather(options), error.what
        try:
            kept = store.load(folder)
            if kept is not None and not refresh and _will_do(root_fd, kept, options):
                return kept, None
            return _renew(root_fd, folder, options, lock_held)
        finally:
            os.close(folder)
    finally:
        os.close(root_fd)


def _renew(root_fd: int, folder: int, options: Options, lock_held: bool) -> tuple[dict[str, Any], str | None]:
    """What the kernel and the files tell is kept at once, and its lock given back, before NVML is asked: starts
    that can do with that need not wait for a driver that hangs."""
    with _locked(folder, store.LOCK, lock_held and options.nvml == "never"):
        made = look(options, store.load(folder))
        reason = _keep(folder, made)
    if not wants_nvml(made, options):
        return made, reason
    with _locked(folder, store.NVML_LOCK, lock_held):
        there = store.load(folder)
        if there is not None and _will_do(root_fd, there, options):
            # Whoever held the lock before us has asked.
            return there, None
        answer = ask_nvml(made, options, folder)
        with _locked(folder, store.LOCK):
            there = store.load(folder)
            if there is not None and store.stale(root_fd, there, options) is None:
                if _module(there) != _module(made):
                    return there, None
                # Perhaps looked at again meanwhile; the answer is for that too, since the module is the same.
                made = there
            add_answer(made, answer)
            return made, _keep(folder, made)


@contextlib.contextmanager
def _locked(folder: int, name: str, held: bool = False) -> Iterator[None]:
    """Under one of store's locks, which our caller may hold already. Raises NvhookError."""
    lock = None if held else store.take_lock(folder, time.monotonic() + store.DEADLINE, name)
    try:
        yield
    finally:
        if lock is not None:
            os.close(lock)


def _keep(folder: int, made: dict[str, Any]) -> str | None:
    """Why it could not be kept, or None."""
    try:
        store.save(folder, made)
    except OSError as error:
        return f"cannot keep the inventory: {error.strerror}"
    return None


def _will_do(root_fd: int, kept: dict[str, Any], options: Options) -> bool:
    if store.stale(root_fd, kept, options) is not None or options.nvml in ("health", "always"):
        return False
    if options.nvml == "facts":
        return store.has_facts(kept)
    return options.nvml == "never" or store.settled(kept)


def add_root_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of every command that looks at a host."""
    add = parser.add_argument
    add("--host-root", type=os.path.abspath, default="/", metavar="DIR", help="the folder that stands for the host's /")
    add("--driver-root", type=host_path, metavar="DIR", help="where the driver's files lie; default: as configured")
    add("--dev-root", type=host_path, metavar="DIR", help="where /dev lies, on the host; default: the driver root")
    add(
        "--library-search-path",
        type=host_path,
        action="append",
        default=[],
        metavar="DIR",
        help="a folder of the driver's libraries, looked into first; repeatable",
    )
    add(
        "--nvml",
        choices=NVML_MODES,
        default="auto",
        help="auto: for UUIDs the kernel lacks; facts: architecture and brand besides; health: about each GPU that is "
        "not known to hang",
    )
    add("--nvml-timeout", type=seconds, default=10.0, metavar="S", help="for each answer of NVML; default: 10")


def host_path(text: str) -> str:
    """An argument that names a folder on the host, where the working directory means nothing."""
    if not text.startswith("/"):
        raise argparse.ArgumentTypeError(f"{text!r} is not absolute")
    # Not normpath: it takes `link/..` away unseen.
    return "/" + "/".join(part for part in text.split("/") if part not in ("", "."))


def seconds(text: str) -> float:
    """An argument that is a time to wait."""
    value = float(text)
    if not 0 < value < 86400:
        raise argparse.ArgumentTypeError(f"{text!r} is no time to wait")
    return value


def options_of(arguments: argparse.Namespace) -> Options:
    """The Options that those arguments say."""
    return Options(
        host_root=arguments.host_root,
        driver_root=arguments.driver_root,
        dev_root=arguments.dev_root,
        library_search_path=tuple(arguments.library_search_path),
        nvml=arguments.nvml,
        nvml_timeout=arguments.nvml_timeout,
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `nvhook inventory`."""
    add_root_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print it as JSON, fingerprint included")
    parser.add_argument("--refresh", action="store_true", help="look again even if what is kept still holds")
    parser.add_argument("--quiet", action="store_true", help="print nothing")
    # A hot process, this one, holds the lock for the child that renews the inventory for it.
    parser.add_argument("--lock-held", type=int, default=0, metavar="PID", help=argparse.SUPPRESS)


def run(arguments: argparse.Namespace) -> int:
    """`nvhook inventory`. Raises NvhookError."""
    if arguments.lock_held:
        _serve(arguments.lock_held)
    made, not_kept = current(options_of(arguments), arguments.refresh, bool(arguments.lock_held))
    if not_kept is not None:
        if arguments.lock_held:
            raise NvhookError(not_kept, "make room in /run; or run as root, or set XDG_RUNTIME_DIR")
        print(f"nvhook: warning: {not_kept}", file=sys.stderr)
    if arguments.json:
        print(json.dumps(made, indent=2))
    elif not arguments.quiet:
        print(overview.table(made))
    return 0


def _serve(parent: int) -> None:
    """End with the process that holds the lock for us: without it others renew beside us, and nobody would be there to
    give us up."""
    kernel.die_with_parent()
    if os.getppid() != parent:
        raise NvhookError(f"process {parent}, for which the inventory is renewed, is gone", store.REMEDY)


def main(argv: list[str] | None = None) -> int:
    """The verb as a program of its own: what `store` starts as its child."""
    parser = argparse.ArgumentParser(prog="nvhook inventory", description="What this host has of NVIDIA's.")
    add_arguments(parser)
    try:
        return run(parser.parse_args(argv))
    except NvhookError as error:
        print(f"nvhook: error: {error.what}\n  remedy: {error.remedy}", file=sys.stderr)
        return 1
