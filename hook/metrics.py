# SPDX-License-Identifier: Apache-2.0
"""`nvhook metrics`: counters of container starts, for a node exporter's textfile collector.

Cold. Starts append a line each to `/run/nvhook/starts`, if that file is there (`hook.record`); this command makes it,
reads what is new, adds it to the totals in `/run/nvhook/counters.json`, and writes the text format of Prometheus
(version 0.0.4). Where the reading stopped is a part of the totals and replaced with them by one rename, so that a line
counts once, whenever this is killed. A file that has grown is set aside, and read to its end the next time too: a start
that had it open may still write.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from cdi.host import store
from hook import record, state
from hook.prometheus import Text
from ldcache import root
from ldcache.errors import NvhookError

STARTS = state.STARTS.rpartition("/")[2]
COUNTERS = "counters.json"
OLD = "starts.old"
OUTPUT = "nvhook.prom"
LOCK = "counters.lock"
LOCK_WAIT = 10.0
SCHEMA = 1
# Half of what starts write at most.
ROTATE = record.SIZE_MAX // 2
READ_MAX = 2 * record.SIZE_MAX
CONTAINERS_MAX = 4096
# A runtime's folder for a container comes after our line: seconds that a container counts without one.
GRACE = 60.0


def new() -> dict[str, Any]:
    """Totals of nothing. `read` has the offset by a file's inode number."""
    return {"schema": SCHEMA, "read": {}, "ok": {}, "failed": {}, "ms": {}, "containers": {}}


def load(folder: int) -> dict[str, Any]:
    """The totals that are kept; new ones where there are none, or those of another version."""
    content = store.read_own(folder, COUNTERS, store.INVENTORY_MAX)
    try:
        value = json.loads(content or b"")
    except ValueError:
        return new()
    return value if isinstance(value, dict) and value.get("schema") == SCHEMA else new()


def tail(folder: int, name: str, offsets: dict[str, int]) -> tuple[list[bytes], dict[str, int]]:
    """The whole lines of a file from its offset on, and its new one; nothing where there is no such file."""
    try:
        fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    except FileNotFoundError:
        return [], {}
    try:
        status = os.fstat(fd)
        key = str(status.st_ino)
        begin = offsets.get(key, 0)
        content = os.pread(fd, READ_MAX, begin if begin <= status.st_size else 0)
    finally:
        os.close(fd)
    whole = content[: content.rfind(b"\n") + 1]
    return whole.splitlines(), {key: begin + len(whole)}


def add(totals: dict[str, Any], line: bytes) -> None:
    """Count a line. One that is torn, as by a full /run, is none."""
    try:
        value = json.loads(line)
        verb, failed, identity = str(value["verb"]), str(value["failed"]), str(value["id"])
        gpus = [str(gpu) for gpu in value["gpus"]]
        container = {"gpus": gpus, "pid": int(value["pid"]), "place": str(value["place"]), "at": float(value["at"])}
        times = {str(step): (int(count), float(ms)) for step, (count, ms) in value["ms"].items()}
    except (ValueError, KeyError, TypeError, AttributeError):
        return
    if failed:
        reasons = totals["failed"].setdefault(verb, {})
        reasons[failed] = reasons.get(failed, 0) + 1
    else:
        totals["ok"][verb] = totals["ok"].get(verb, 0) + 1
        if identity and gpus:
            totals["containers"].pop(identity, None)
            totals["containers"][identity] = container
    for step, (count, ms) in times.items():
        known = totals["ms"].setdefault(verb, {}).setdefault(step, [0, 0.0])
        known[0] += count
        known[1] += ms


def is_there(container: dict[str, Any], now: float) -> bool:
    """Whether a container still is: its process lives and is no later one with its number, or, where none was known,
    the folder is there in which the runtime keeps its state."""
    if container["pid"]:
        try:
            fields = Path(f"/proc/{container['pid']}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return False
        # proc(5): field 3 is the state, field 22 the start in ticks since boot; they begin behind field 2.
        return fields[0] not in "ZX" and int(fields[19]) / os.sysconf("SC_CLK_TCK") <= container["at"]
    return now - container["at"] < GRACE or os.path.exists(container["place"])


def collect(folder: int) -> dict[str, Any]:
    """Bring the totals up to date, and let starts be counted from now on. The lock is held. Raises OSError."""
    totals = load(folder)
    offsets: dict[str, int] = {}
    for name in (OLD, STARTS):
        lines, read = tail(folder, name, totals["read"] | offsets)
        offsets |= read
        for line in lines:
            add(totals, line)
    totals["read"] = offsets
    now = time.clock_gettime(time.CLOCK_BOOTTIME)
    there = [item for item in totals["containers"].items() if is_there(item[1], now)]
    totals["containers"] = dict(there[-CONTAINERS_MAX:])
    store.write_own(folder, COUNTERS, json.dumps(totals).encode())
    set_aside(folder)
    return totals


def set_aside(folder: int) -> None:
    """Begin a new file of starts where there is none, or a large one. There is never a moment without one."""
    try:
        size = os.stat(STARTS, dir_fd=folder, follow_symlinks=False).st_size
    except FileNotFoundError:
        size = None
    if size is not None and size <= ROTATE:
        return
    if size is not None:
        _unlink(folder, OLD)
        os.link(STARTS, OLD, src_dir_fd=folder, dst_dir_fd=folder, follow_symlinks=False)
    store.write_own(folder, STARTS, b"")


def _unlink(folder: int, name: str) -> None:
    try:
        os.unlink(name, dir_fd=folder)
    except FileNotFoundError:
        pass


def stop(folder: int) -> None:
    """Count no more, and forget what was counted."""
    for name in (STARTS, OLD, COUNTERS, OUTPUT):
        _unlink(folder, name)


def text(totals: dict[str, Any], inventory: dict[str, Any] | None) -> str:
    """The totals in Prometheus' format."""
    made = Text()
    made.head("nvhook_starts_total", "counter", "Starts of containers with a GPU that went well, by way in.")
    for verb, count in sorted(totals["ok"].items()):
        made.sample("nvhook_starts_total", count, way=verb)
    made.head("nvhook_start_failures_total", "counter", "Starts of containers that failed, by what was being done.")
    for verb, reasons in sorted(totals["failed"].items()):
        for reason, count in sorted(reasons.items()):
            made.sample("nvhook_start_failures_total", count, way=verb, reason=reason)
    made.head("nvhook_step_milliseconds", "summary", "Time that starts spent on each step.")
    for verb, steps in sorted(totals["ms"].items()):
        for step, (count, ms) in sorted(steps.items()):
            made.sample("nvhook_step_milliseconds_sum", round(ms, 3), way=verb, step=step)
            made.sample("nvhook_step_milliseconds_count", count, way=verb, step=step)
    _gpus(made, totals["containers"], inventory)
    return made.text()


def _gpus(made: Text, containers: dict[str, Any], inventory: dict[str, Any] | None) -> None:
    """Which container has which GPU. A minor number means the GPU that has it in the inventory."""
    known = {str(gpu["minor"]): gpu for gpu in (inventory or {}).get("gpus") or []}
    users = dict.fromkeys(known, 0)
    made.head("nvhook_container_gpu", "gauge", "1 for each GPU that a running container was given.")
    for identity, container in sorted(containers.items()):
        for name in dict.fromkeys(container["gpus"]):
            if name in users:
                users[name] += 1
            made.sample("nvhook_container_gpu", 1, container=identity, **_labels(name, known.get(name)))
    made.head("nvhook_gpu_containers", "gauge", "Running containers that were given the GPU.")
    for name, count in users.items():
        made.sample("nvhook_gpu_containers", count, **_labels(name, known[name]))


def _labels(name: str, gpu: dict[str, Any] | None) -> dict[str, str]:
    if gpu is None:
        # A MIG device, a name of CDI's, or a GPU that is gone.
        return {"gpu": f"minor {name}" if name.isdecimal() else name, "uuid": "", "bus_id": ""}
    return {"gpu": str(gpu["index"]), "uuid": gpu["uuid"] or "", "bus_id": gpu["bus_id"]}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `nvhook metrics`."""
    add = parser.add_argument
    add("--host-root", type=os.path.abspath, default="/", metavar="DIR", help="the folder that stands for the host's /")
    add("--output", metavar="FILE", help=f"default: {store.FOLDER}/{OUTPUT}; - for stdout")
    add("--stop", action="store_true", help="count no more, and forget what was counted")


def run(arguments: argparse.Namespace) -> int:
    """`nvhook metrics`. Raises NvhookError."""
    root_fd = root.open_host(arguments.host_root)
    folder = store.make_folder(root_fd, arguments.host_root)
    lock = store.take_lock(folder, time.monotonic() + LOCK_WAIT, LOCK)
    try:
        if arguments.stop:
            stop(folder)
            return 0
        give_out(folder, arguments.output, text(collect(folder), store.load(folder)))
    except OSError as error:
        what = f"cannot keep the counters in {store.FOLDER}: {error.strerror}"
        raise NvhookError(what, "make room there, or remove what is in the place") from error
    finally:
        os.close(lock)
        os.close(folder)
        os.close(root_fd)
    return 0


def give_out(folder: int, output: str | None, made: str) -> None:
    """Write the text where it is wanted; into a file by rename. Raises NvhookError for a place of the caller's."""
    if output is None:
        store.write_own(folder, OUTPUT, made.encode())
        return
    if output == "-":
        sys.stdout.write(made)
        return
    place, name = os.path.split(os.path.abspath(output))
    try:
        there = os.open(place, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            store.write_own(there, name, made.encode())
        finally:
            os.close(there)
    except OSError as error:
        raise NvhookError(
            f"cannot write {output}: {error.strerror}", "give --output a file that you may write"
        ) from error
