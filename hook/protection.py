# SPDX-License-Identifier: Apache-2.0
"""Whether the mask over /proc/driver/nvidia protects a container that the runtime shim starts, and why not.

Hot. The mask keeps the driver's user space from making nodes of GPUs that were not asked for. It costs a hook, and
is worth it only where such a node can be made and opened: mknod(2) of devices needs CAP_MKNOD outside of user
namespaces, and the device rules have the last word. With docker's and containerd's defaults they say no.
"""

from __future__ import annotations

import posix

from ldcache import root

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any

# user_namespaces(7): the map of the first user namespace.
WHOLE_MAP = ["0", "0", "4294967295"]
MAP_MAX = 1 << 16
READ_WRITE = frozenset("rw")


def needed(
    config: dict[str, Any], inventory: dict[str, Any], shown: list[str] | None, crun: bool, wanted: str
) -> tuple[bool, str]:
    """Whether to mask, and why. `shown` are the bus ids of the container's GPUs, None where nothing below /proc is
    masked; `crun` whether that runtime reads the rules; `wanted` is the configuration's `shim.proc-mask`."""
    if shown is None:
        return (
            False,
            "config.json masks nothing below /proc: a mount there would forbid proc mounts in nested containers",
        )
    if wanted != "auto":
        return wanted == "always", f"shim.proc-mask is {wanted}"
    if inventory["driver"]["params"].get("ModifyDeviceFiles") == 0:
        return False, "the driver's own ModifyDeviceFiles is 0"
    reason = _cannot_make_nodes(config)
    if reason:
        return False, reason
    rules = ((config.get("linux") or {}).get("resources") or {}).get("devices") or []
    for node in inventory["nodes"]:
        if node["role"] == "gpu" and node["gpu"] not in shown:
            if may_open(rules, node["major"], node["minor"], crun):
                return True, f"the device rules let it open {node['path']}, a GPU that was not asked for"
    return False, "the device rules open no GPU that was not asked for"


def given(config: dict[str, Any], inventory: dict[str, Any]) -> list[str]:
    """The bus ids of the GPUs whose nodes config.json has, whoever put them in."""
    devices = (config.get("linux") or {}).get("devices") or []
    numbers = {(device.get("major"), device.get("minor")) for device in devices if device.get("type") == "c"}
    nodes = [node for node in inventory["nodes"] if node["role"] == "gpu"]
    return [node["gpu"] for node in nodes if (node["major"], node["minor"]) in numbers]


def _cannot_make_nodes(config: dict[str, Any]) -> str:
    namespaces = (config.get("linux") or {}).get("namespaces") or []
    if any(namespace.get("type") == "user" for namespace in namespaces):
        return "in the container's user namespace nobody can make device nodes"
    if not in_first_user_namespace():
        return "in the runtime's user namespace nobody can make device nodes"
    capabilities = (config.get("process") or {}).get("capabilities") or {}
    # Runtime specification before 1.0.0-rc5: one list for all sets.
    bounding = capabilities if isinstance(capabilities, list) else capabilities.get("bounding") or []
    if "CAP_MKNOD" not in bounding:
        return "without CAP_MKNOD nobody in it can make device nodes"
    if "CAP_SYS_ADMIN" in bounding:
        return "with CAP_SYS_ADMIN it could take the mask off"
    return ""


def in_first_user_namespace() -> bool:
    """Whether this process is in no user namespace but the machine's own."""
    try:
        fd = posix.open("/proc/self/uid_map", posix.O_RDONLY | posix.O_CLOEXEC)
    except OSError:
        # A kernel without user namespaces.
        return True
    return root.read_open(fd, MAP_MAX, "uid_map").decode().split() == WHOLE_MAP


def may_open(rules: Iterable[dict[str, Any]], major: int, minor: int, crun: bool) -> bool:
    """Whether rules, as that runtime reads them, let a character device be opened for reading or for writing."""
    rules = list(rules)
    return _by_crun(rules, major, minor) if crun else _by_runc(rules, major, minor)


def _by_runc(rules: list[dict[str, Any]], major: int, minor: int) -> bool:
    # As cgroup version 1: `a` starts afresh, all else adds letters to exceptions or takes them away.
    default = False
    exceptions: dict[tuple[str, int, int], set[str]] = {}
    for rule in rules:
        allow, access = rule.get("allow") is True, set(_access(rule))
        kind = rule.get("type") or "a"
        if kind == "a":
            default = allow
            exceptions = {}
            continue
        key = (kind, _number(rule, "major"), _number(rule, "minor"))
        before = exceptions.get(key, set())
        exceptions[key] = before | access if allow != default else before - access
    matching = [access for key, access in exceptions.items() if _matches(key, major, minor)]
    if not default:
        return any(access & READ_WRITE for access in matching)
    return not any(READ_WRITE <= access for access in matching)


def _by_crun(rules: list[dict[str, Any]], major: int, minor: int) -> bool:
    # The last rule that matches wins; without any, everything is allowed.
    for letter in READ_WRITE:
        for rule in reversed(rules):
            kind = rule.get("type") or "a"
            key = ("c" if kind == "a" else kind, _number(rule, "major"), _number(rule, "minor"))
            if letter in _access(rule) and _matches(key, major, minor):
                if rule.get("allow") is True:
                    return True
                break
        else:
            if not rules:
                return True
    return False


def _matches(key: tuple[str, int, int], major: int, minor: int) -> bool:
    return key[0] in ("c", "u") and key[1] in (-1, major) and key[2] in (-1, minor)


def _access(rule: dict[str, Any]) -> str:
    value = rule.get("access")
    return value if isinstance(value, str) else ""


def _number(rule: dict[str, Any], name: str) -> int:
    value = rule.get(name)
    return value if isinstance(value, int) and value >= 0 else -1
