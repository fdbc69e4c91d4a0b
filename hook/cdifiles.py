# SPDX-License-Identifier: Apache-2.0
"""CDI devices that a container names, looked up in the CDI files of the host.

Hot. Files of plain JSON are read here; where any file is YAML, a child reads all of them, since a YAML file may
define the same names.
"""

from __future__ import annotations

from cdi.annotations import InvalidAnnotation
from cdi.annotations import devices as annotated_devices
from ldcache.errors import NvhookError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


class Devices:
    """What files say of some names: `entries` maps a name to its file, that file's edits and the device's own;
    `conflicts` to the files that make it unresolvable; `others` are names that there are instead of one that is not."""

    __slots__ = ("conflicts", "entries", "others")

    def __init__(self, table: dict[str, Any]) -> None:
        self.entries: dict[str, list[Any]] = table["entries"]
        self.conflicts: dict[str, list[str]] = table["conflicts"]
        self.others: list[str] = table["others"]

    def edits(self, names: list[str]) -> list[dict[str, Any]]:
        """The containerEdits of these devices in the order of application: a file's own once, before the first of its
        devices. Raises NvhookError naming all that can't be resolved."""
        missing = [self._described(name) for name in names if name not in self.entries]
        if missing:
            what = f"unresolvable CDI devices: {', '.join(missing)}"
            if self.others:
                what += f"; there are {', '.join(self.others)}"
            raise NvhookError(what, "see `cdi list` for what there is, and what failed")
        made: list[dict[str, Any]] = []
        met: set[str] = set()
        for name in dict.fromkeys(names):
            path, common, own = self.entries[name]
            if path not in met:
                met.add(path)
                made.append(common)
            made.append(own)
        return made

    def _described(self, name: str) -> str:
        paths = self.conflicts.get(name)
        return f"{name} (defined by each of {' and '.join(paths)})" if paths else name

    def done(self, name: str, config: dict[str, Any]) -> bool:
        """Whether config.json has the device already, put in by the engine: all of its nodes, or, where it has none,
        all of its mounts."""
        entry = self.entries.get(name)
        if entry is None:
            return False
        linux = config.get("linux") or {}
        own = entry[2]
        nodes = [node["path"] for node in own.get("deviceNodes", [])]
        if nodes:
            return set(nodes) <= {device.get("path") for device in linux.get("devices") or []}
        mounts = [mount["containerPath"] for mount in own.get("mounts", [])]
        return bool(mounts) and set(mounts) <= {mount.get("destination") for mount in config.get("mounts") or []}


class Files:
    """The CDI files of a host, read when the first name is looked up, once.

    `prefixes` are those of annotations that name devices; `kind`, where CDI files are the only way, that of devices
    that are asked for by a bare id.
    """

    __slots__ = ("devices", "folders", "kind", "prefixes")

    def __init__(self, settings: dict[str, Any], host_root: str, only: bool) -> None:
        top = host_root.rstrip("/")
        self.folders = [f"{top}{folder}" for folder in settings["runtime.spec-dirs"]]
        self.prefixes = tuple(settings["runtime.annotation-prefixes"])
        self.kind = settings["runtime.default-kind"] if only else ""
        self.devices = Devices({"entries": {}, "conflicts": {}, "others": []})

    def annotated(self, found: dict[str, str]) -> list[str]:
        """The names that annotations have. Raises NvhookError."""
        try:
            return annotated_devices(found, self.prefixes)
        except InvalidAnnotation as error:
            raise NvhookError(str(error), "let it name CDI devices, VENDOR/CLASS=NAME, commas between") from error

    def defined(self, names: list[str]) -> set[str]:
        """Look the names up: those that files define, conflicts included, which are to be told."""
        if names:
            self.devices = find(self.folders, names)
        return {*self.devices.entries, *self.devices.conflicts}


def find(folders: list[str], names: list[str]) -> Devices:
    """Look the names up. Raises NvhookError if a child was needed and gave no answer."""
    # Most containers name none (2 ms).
    from cdi import registry

    found = registry.scan(folders, registry.load_plain)
    if found.unparsed:
        from hook import child

        return Devices(child.ask(["devices", *folders, "--", *names]))
    return Devices(registry.table(found, names))
