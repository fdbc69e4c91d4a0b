# SPDX-License-Identifier: Apache-2.0
"""A spec for another place: paths below one root moved below another, as `nvidia-ctk cdi transform root` does.

A spec names paths of two sides. `host` moves what is looked up where the runtime runs: the nodes' and mounts'
host paths, programs of hooks, and the arguments of hooks that run outside of the container. `container` moves
what is looked up inside: nodes, mount points, the arguments of createContainer and startContainer hooks, and the
programs of startContainer hooks, which alone are looked up there.
"""

from __future__ import annotations

from typing import Any, Literal

from cdi import versions

Side = Literal["host", "container"]

Spec = dict[str, Any]

ARGUMENTS_INSIDE = ("createContainer", "startContainer")
PROGRAM_INSIDE = ("startContainer",)


def root(spec: Spec, old: str, new: str, side: Side) -> Spec:
    """A spec like this one (of the types that `cdi.decode` gives), with paths below `old` below `new`.

    A path is below `/a` if it is `/a` or begins with `/a/`. The version is raised, and only then changed, if the
    content needs a higher one: a node whose two paths come to differ is 0.5.0.
    """
    move = _Move(old, new, side)
    made = move.owner(spec)
    made["devices"] = [move.owner(device) for device in spec["devices"]]
    needed = versions.minimum_version(made)
    if versions.KNOWN.index(made["cdiVersion"].removeprefix("v")) < versions.KNOWN.index(needed):
        made["cdiVersion"] = needed
    return made


class _Move:
    def __init__(self, old: str, new: str, side: Side) -> None:
        self.old = old.rstrip("/")
        self.new = new.rstrip("/")
        self.side = side

    def path(self, path: str) -> str:
        if path != (self.old or "/") and not path.startswith(f"{self.old}/"):
            return path
        rest = path[len(self.old) :] if path != "/" else ""
        return f"{self.new}{rest}" or "/"

    def argument(self, argument: str) -> str:
        """A hook's argument: a path, or two with `::` between them, as NVIDIA's hook and ours name links."""
        left, colons, right = argument.partition("::")
        return self.path(left) + colons + (self.path(right) if colons else "")

    def owner(self, owner: dict[str, Any]) -> dict[str, Any]:
        """A spec or device, which hold edits."""
        return {name: self.edits(value) if name == "containerEdits" else value for name, value in owner.items()}

    def edits(self, edits: dict[str, Any]) -> dict[str, Any]:
        kinds = {"deviceNodes": self.node, "mounts": self.mount, "hooks": self.hook}
        return {name: list(map(kinds[name], value)) if name in kinds else value for name, value in edits.items()}

    def node(self, node: dict[str, Any]) -> dict[str, Any]:
        if self.side == "container":
            # The host's path is the container's where it is not given, and is not to move.
            moved = self.path(node["path"])
            return node if moved == node["path"] else {**node, "hostPath": host_path(node), "path": moved}
        moved = self.path(host_path(node))
        return node if moved == host_path(node) else {**node, "hostPath": moved}

    def mount(self, mount: dict[str, Any]) -> dict[str, Any]:
        name = "hostPath" if self.side == "host" else "containerPath"
        return {**mount, name: self.path(mount[name])}

    def hook(self, hook: dict[str, Any]) -> dict[str, Any]:
        made = dict(hook)
        inside = self.side == "container"
        if (hook["hookName"] in PROGRAM_INSIDE) == inside:
            made["path"] = self.path(hook["path"])
        if "args" in hook and (hook["hookName"] in ARGUMENTS_INSIDE) == inside:
            made["args"] = list(map(self.argument, hook["args"]))
        return made


def host_path(node: dict[str, Any]) -> str:
    """Where a node lies on the host: at its path in the container if nothing else is said."""
    path: str = node.get("hostPath") or node["path"]
    return path
