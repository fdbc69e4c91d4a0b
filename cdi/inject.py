# SPDX-License-Identifier: Apache-2.0
"""CDI edits put into an OCI configuration, as the Go library does it.

Hot: the runtime shim calls `inject`. What is followed is the library's development after 1.1.0; there,
against the releases that engines carry, a variable that the configuration has already is replaced (they append a
second one), permissions `none` exist, and bind mounts of a container in a user namespace get `idmap`.
"""

from __future__ import annotations

import posix

from ldcache import root
from ldcache.errors import NvhookError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    Object = dict[str, Any]

REPORT = "this is a fault of the engine or runtime that wrote it: report it there, with the file"
REGENERATE = "the CDI file is of another state of this host: write it anew, as with `cdi generate`"

NODE_TYPES = {root.S_IFBLK: "b", root.S_IFCHR: "c", 0o010000: "p"}


def inject(oci: Object, edits: list[Object]) -> Object:
    """The configuration with containerEdits applied: `inject(oci, registry.resolve(found, names))`.

    `oci` is the object that a config.json holds; it is not changed, and what the result does not change it
    shares with it. `edits` are containerEdits objects in their order, of the types that `cdi.decode` gives and
    free of problems. Members that the runtime specification does not have are kept.

    Raises NvhookError: a device node that is not on the host and not described in full, or is of another
    type; a member of `oci` whose type is wrong.
    """
    made = dict(oci)
    # One block, kind by kind: a mount of the last device comes before a hook of the first.
    _add_env(made, _all(edits, "env"))
    _add_nodes(made, _all(edits, "deviceNodes"))
    _add_net_devices(made, _all(edits, "netDevices"))
    _add_mounts(made, _all(edits, "mounts"))
    _add_hooks(made, _all(edits, "hooks"))
    for block in edits:
        if "intelRdt" in block:
            # The whole object is replaced, and the last one stays.
            _object(made, "linux")["intelRdt"] = _without_empty(block["intelRdt"])
    _add_gids(made, _all(edits, "additionalGids"))
    return made


def _all(edits: list[Object], name: str) -> list[Any]:
    return [item for block in edits for item in block.get(name, [])]


def _member(owner: Object, name: str, kind: type) -> Any:
    # null and absent are the same to the runtimes: Go's decoder leaves the field empty for both.
    value = owner.get(name)
    if value is None:
        return kind()
    if not isinstance(value, kind):
        raise NvhookError(f"config.json: `{name}` is a {type(value).__name__}, not a {kind.__name__}", REPORT)
    return value


def _object(owner: Object, name: str) -> Object:
    """The owner's object of that name, as a copy that may be changed; made where there is none."""
    owner[name] = made = dict(_member(owner, name, dict))
    return made


def _objects(owner: Object, name: str) -> list[Object]:
    """Likewise a list of objects."""
    owner[name] = made = list(_member(owner, name, list))
    for item in made:
        if not isinstance(item, dict):
            raise NvhookError(f"config.json: `{name}` holds a {type(item).__name__}, not an object", REPORT)
    return made


def _process(oci: Object) -> Object:
    """What the library's structs become where there was no process: a user and an empty working directory."""
    process = _object(oci, "process")
    process.setdefault("user", {"uid": 0, "gid": 0})
    process.setdefault("cwd", "")
    return process


def _add_env(oci: Object, added: list[str]) -> None:
    if not added:
        return
    process = _process(oci)
    process["env"] = env = list(_member(process, "env", list))
    places = {}
    for index, entry in enumerate(env):
        if not isinstance(entry, str):
            raise NvhookError(f"config.json: process.env holds a {type(entry).__name__}, not a string", REPORT)
        # Of entries with one name the last is replaced.
        places[entry.partition("=")[0]] = index
    for entry in added:
        name = entry.partition("=")[0]
        if name in places:
            env[places[name]] = entry
        else:
            places[name] = len(env)
            env.append(entry)


def _add_nodes(oci: Object, nodes: list[Object]) -> None:
    if not nodes:
        return
    user = _member(_member(oci, "process", dict), "user", dict)
    linux = _object(oci, "linux")
    devices = _objects(linux, "devices")
    rules: list[Object] = []
    paths = {device.get("path") for device in devices if isinstance(device.get("path"), str)}
    for node in nodes:
        device = _device(node)
        for name in ("uid", "gid"):
            # The host's owner is never read.
            if name not in device and (_member(user, name, int) or 0) > 0:
                device[name] = user[name]
        _replace(devices, "path", device, paths)
        if device["type"] in ("b", "c"):
            rules.append(_rule(device, node.get("permissions", "")))
    if rules:
        resources = _object(linux, "resources")
        # Never merged: two nodes of one path leave two rules.
        _objects(resources, "devices").extend(rules)


def _rule(device: Object, permissions: str) -> Object:
    rule = {"allow": True, "type": device["type"], "major": device["major"], "minor": device["minor"]}
    return rule if permissions == "none" else {**rule, "access": permissions or "rwm"}


def _device(node: Object) -> Object:
    """The OCI device of a node, completed from the host's, which is looked at without following a link."""
    path, host_path = node["path"], node.get("hostPath") or node["path"]
    kind, major, minor = node.get("type", ""), node.get("major", 0), node.get("minor", 0)
    full = bool(kind) and (major != 0 or kind == "p")
    device: Object = {"path": path, "type": kind, "major": major, "minor": minor}
    device.update((name, node[name]) for name in ("fileMode", "uid", "gid") if name in node)
    try:
        stat, host_kind = _host_node(path, host_path)
    except NvhookError:
        if full:
            return device
        raise
    if not full:
        if kind and kind != host_kind:
            what = f"{host_path}, the CDI device node of {path}, is of type {host_kind} on the host, not {kind}"
            raise NvhookError(what, REGENERATE)
        device["type"] = host_kind
        if major == 0 and host_kind != "p":
            # Both: a minor that was given alone is no part of the host's number.
            device["major"], device["minor"] = posix.major(stat.st_rdev), posix.minor(stat.st_rdev)
    # From library 1.1.0 on, and for nodes that are described in full too.
    device.setdefault("fileMode", stat.st_mode & 0o7777)
    return device


def _host_node(path: str, host_path: str) -> tuple[posix.stat_result, str]:
    try:
        stat = posix.lstat(host_path)
    except (OSError, ValueError) as error:
        # A NUL byte in a path is a ValueError.
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise NvhookError(f"cannot look at {host_path}, the CDI device node of {path}: {reason}", REGENERATE) from error
    kind = NODE_TYPES.get(root.file_type(stat.st_mode))
    if kind is None:
        raise NvhookError(f"{host_path}, the CDI device node of {path}, is no device node", REGENERATE)
    return stat, kind


def _replace(items: list[Object], name: str, made: Object, present: set[Any]) -> None:
    """Put an object at the end, the first that has the same in this member taken away. `present` has what the
    items have there, so that a long list is gone through only for one that is in it."""
    value = made[name]
    if value in present:
        del items[next(index for index, item in enumerate(items) if item.get(name) == value)]
    present.add(value)
    items.append(made)


def _add_net_devices(oci: Object, devices: list[Object]) -> None:
    if devices:
        net_devices = _object(_object(oci, "linux"), "netDevices")
        for device in devices:
            net_devices[device["hostInterfaceName"]] = {"name": device["name"]}


def _add_mounts(oci: Object, added: list[Object]) -> None:
    if not added:
        return
    mounts = _objects(oci, "mounts")
    for mount in mounts:
        if not isinstance(mount.get("destination", ""), str):
            raise NvhookError("config.json: a mount's destination is no string", REPORT)
    destinations = {mount.get("destination") for mount in mounts}
    mapped = _has_user_namespace(oci)
    for mount in added:
        made: Object = {"destination": mount["containerPath"], "source": mount["hostPath"]}
        if mount.get("type"):
            made["type"] = mount["type"]
        options = [*mount.get("options", []), *(_id_mapping(mount) if mapped else ())]
        if options:
            made["options"] = options
        # Compared as they are written: /a and /a/ both stay.
        _replace(mounts, "destination", made, destinations)
    # All of them, parents before children; equals keep their order, from library 1.0 on.
    mounts.sort(key=lambda mount: depth(mount.get("destination", "")))


def _has_user_namespace(oci: Object) -> bool:
    namespaces = _member(_member(oci, "linux", dict), "namespaces", list)
    return any(isinstance(namespace, dict) and namespace.get("type") == "user" for namespace in namespaces)


def _id_mapping(mount: Object) -> tuple[str, ...]:
    options = mount.get("options", [])
    if "idmap" in options or "ridmap" in options:
        return ()
    if "rbind" in options:
        return ("ridmap",)
    return ("idmap",) if "bind" in options or mount.get("type") == "bind" else ()


def depth(path: str) -> int:
    """The number of slashes in a path after Go's filepath.Clean: 1 for `/` and `/a`, 0 for `a` and nothing."""
    rooted = path.startswith("/")
    parts: list[str] = []
    for part in path.split("/"):
        if part in ("", "."):
            continue
        if part == ".." and parts and parts[-1] != "..":
            parts.pop()
        elif part != ".." or not rooted:
            parts.append(part)
    return max(len(parts), 1) if rooted else max(len(parts) - 1, 0)


def _add_hooks(oci: Object, added: list[Object]) -> None:
    if not added:
        return
    hooks = _object(oci, "hooks")
    for name in dict.fromkeys(hook["hookName"] for hook in added):
        _objects(hooks, name)
    for hook in added:
        made = {member: hook[member] for member in ("path", "args", "env") if hook.get(member)}
        if "timeout" in hook:
            # Zero is not nothing: runc takes it as a timer that has run out.
            made["timeout"] = hook["timeout"]
        hooks[hook["hookName"]].append(made)


def _without_empty(rdt: Object) -> Object:
    return {name: value for name, value in rdt.items() if value}


def _add_gids(oci: Object, added: list[int]) -> None:
    # 0 is in the specification's way of saying "none".
    gids = [gid for gid in added if gid != 0]
    if not gids:
        return
    user = _object(_process(oci), "user")
    user.setdefault("uid", 0)
    user.setdefault("gid", 0)
    present = _member(user, "additionalGids", list)
    user["additionalGids"] = [*present, *(gid for gid in dict.fromkeys(gids) if gid not in present)]
