# SPDX-License-Identifier: Apache-2.0
"""A prestart hook for tests of device rules: runs the statements in argv[3] with the functions below at hand.

argv[1] is the tree to import from, argv[2] a file that gets what the statements put into `seen`, as JSON.
"""

import json
import os
import sys
import time

sys.path.insert(0, sys.argv[1])

from hook import bpf, cgroup, cgroupfs, devicefilter  # noqa: E402
from ldcache.errors import NvhookError  # noqa: E402

Nodes = list[tuple[int, int]]

state = json.load(sys.stdin)
with open(f"{state['bundle']}/config.json", encoding="utf-8") as config:
    linux = json.load(config)["linux"]

seen: dict[str, object] = {}


def device_rules() -> cgroup.DeviceRules:
    """What `nvhook prestart` works with."""
    return cgroup.DeviceRules(state["pid"], linux["resources"]["devices"], linux.get("devices", []))


def allow(*nodes: tuple[int, int]) -> cgroup.DeviceRules:
    """Prepare and apply; `seen` tells what was done and how long it took, in milliseconds."""
    began = time.perf_counter()
    made = device_rules()
    made.prepare(list(nodes))
    prepared = time.perf_counter()
    made.apply()
    seen["prepare_ms"], seen["apply_ms"] = (prepared - began) * 1e3, (time.perf_counter() - prepared) * 1e3
    seen["change"], seen["warnings"] = made.describe(), made.warnings
    return made


def folder() -> str:
    """The container's cgroup."""
    return cgroupfs.find(state["pid"]).folder


def parent() -> str:
    """The cgroup above."""
    return os.path.dirname(folder())


def programs(path: str) -> list[bpf.Program]:
    """What is attached to a cgroup of version 2."""
    return [bpf.Program(identity) for identity in bpf.query(cgroupfs.open_folder(path))[0]]


def in_force() -> object:
    """The container's rules, in a form that can be compared."""
    if cgroupfs.find(state["pid"]).version == 1:
        return sorted(cgroupfs.read(f"{folder()}/devices.list").splitlines())
    return [program.tag.hex() for program in programs(folder())]


def write(path: str, text: str) -> None:
    """One write to a file of a cgroup."""
    with open(path, "w", encoding="ascii") as file:
        file.write(text)


def attach(path: str, made: devicefilter.Filter, name: str) -> None:
    """Attach a program of the test's own to a cgroup of version 2."""
    bpf.attach(cgroupfs.open_folder(path), bpf.load(made.program(), name))


def stranger() -> devicefilter.Filter:
    """A filter that no runtime makes, and that allows everything."""
    null = devicefilter.Rule(devicefilter.CHAR, 1, 3, devicefilter.EVERYTHING)
    return devicefilter.Filter("nobody", devicefilter.MOVE, [null], True)


try:
    exec(sys.argv[3])
except NvhookError as error:
    seen["error"], seen["remedy"] = error.what, error.remedy
with open(sys.argv[2], "w", encoding="utf-8") as output:
    json.dump(seen, output)
