# SPDX-License-Identifier: Apache-2.0
"""The rules that the Go library enforces on a CDI spec, and which of its releases refuse what.

Hot: a registry drops a whole file for one bad member, and which file defines a device depends on that. The
library is `tags.cncf.io/container-device-interface`, releases 0.5.4 to 1.1.0 and its development after that;
rules of CDI's text that it does not enforce are `cdi.advice`'s.
"""

from __future__ import annotations

from cdi import names, versions
from cdi.decode import Decoder, Finding

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

HOOKS = ("prestart", "createRuntime", "createContainer", "startContainer", "poststart", "poststop")
NODE_TYPES = ("", "b", "c", "u", "p")
CLOSID_MAX = 4096

RELEASED = versions.before(versions.HEAD)


class Checked:
    """A file's value after the check.

    `spec` has the types of a spec whatever was wrong, without what was broken; `findings` are all reasons for
    which some release refuses it.
    """

    __slots__ = ("findings", "spec")

    def __init__(self, spec: dict[str, Any], findings: list[Finding]) -> None:
        self.spec = spec
        self.findings = findings

    def problems(self, release: str = versions.HEAD) -> list[Finding]:
        """Why this release refuses it; empty if it is read."""
        return [finding for finding in self.findings if release in finding.refused_by]

    def read_by(self) -> list[str]:
        """The releases that read it, oldest first."""
        return [release for release in versions.RELEASES if not self.problems(release)]


def check(value: Any) -> Checked:
    """Decode and judge the value of a spec file, as `cdi.reader.parse` or JSON gives it. Never raises."""
    decoder = Decoder()
    spec = decoder.spec(value)
    if "" not in decoder.broken:
        _Rules(decoder).spec(spec)
    return Checked(spec, decoder.findings)


class _Rules:
    """Adds to a decoder's findings."""

    __slots__ = ("broken", "findings", "lacking")

    def __init__(self, decoder: Decoder) -> None:
        self.findings = decoder.findings
        self.broken = decoder.broken
        self.lacking = decoder.lacking

    def add(self, where: str, what: str, refused_by: tuple[str, ...] = versions.RELEASES) -> None:
        self.findings.append(Finding(where, what, refused_by))

    def spec(self, spec: dict[str, Any]) -> None:
        if self.required(spec, "cdiVersion", ""):
            self.version(spec)
        if self.required(spec, "kind", ""):
            self.kind(spec["kind"])
        self.edits(spec.get("containerEdits"), "containerEdits")
        devices = spec.get("devices", [])
        if not devices and "devices" not in self.broken:
            self.add("devices", "at least one device is needed", versions.since("1.0.1"))
        seen: set[str] = set()
        for index, device in enumerate(devices):
            self.device(device, f"devices[{index}]", seen)

    def required(self, owner: dict[str, Any], name: str, where: str) -> bool:
        """True if there is something to look at."""
        if owner.get(name):
            return True
        place = f"{where}.{name}" if where else name
        if place not in self.broken and where not in self.broken:
            self.add(place, "must not be missing or empty")
        return False

    def version(self, spec: dict[str, Any]) -> None:
        version = spec["cdiVersion"].removeprefix("v")
        if version not in versions.KNOWN:
            self.add("cdiVersion", f"{spec['cdiVersion']!a} is no version that readers know")
            return
        if version != spec["cdiVersion"]:
            self.add("cdiVersion", "begins with a v", ("0.5.4",))
        needed = versions.minimum_version(spec)
        if versions.KNOWN.index(version) < versions.KNOWN.index(needed):
            self.add("cdiVersion", f"{version} is too low, the content needs {needed}")
        if versions.too_old_for(version):
            self.add("cdiVersion", f"{version} is newer than the library", versions.too_old_for(version))

    def kind(self, kind: str) -> None:
        try:
            parts = names.parse_kind(kind)
        except names.InvalidName as error:
            self.add("kind", str(error))
            return
        if min(map(len, parts)) < 2:
            self.add("kind", "every released library crashes on a vendor or class of one character", RELEASED)

    def device(self, device: dict[str, Any], where: str, seen: set[str]) -> None:
        if self.required(device, "name", where):
            name = device["name"]
            try:
                names.check_device(name)
            except names.InvalidName as error:
                self.add(f"{where}.name", str(error))
            if name in seen:
                self.add(f"{where}.name", f"a second device {name!a}")
            seen.add(name)
        edits = device.get("containerEdits", {})
        place = f"{where}.containerEdits"
        # An empty list is nothing; an empty intelRdt object is an edit.
        empty = not any(value or name == "intelRdt" for name, value in edits.items())
        if empty and not {where, place} & self.broken and place not in self.lacking:
            self.add(place, "a device must have an edit")
        self.edits(edits, place)

    def edits(self, edits: dict[str, Any] | None, where: str) -> None:
        if not edits:
            return
        self.env(edits, where)
        for place, node in self.items(edits, "deviceNodes", where):
            self.node(node, place)
        self.net_devices(self.items(edits, "netDevices", where))
        for place, hook in self.items(edits, "hooks", where):
            if self.required(hook, "hookName", place) and hook["hookName"] not in HOOKS:
                self.add(f"{place}.hookName", f"{hook['hookName']!a} is no hook")
            self.required(hook, "path", place)
            self.env(hook, place)
        for place, mount in self.items(edits, "mounts", where):
            self.required(mount, "hostPath", place)
            self.required(mount, "containerPath", place)
        self.closid(edits.get("intelRdt", {}).get("closID", ""), f"{where}.intelRdt.closID")

    def items(self, edits: dict[str, Any], name: str, where: str) -> list[tuple[str, dict[str, Any]]]:
        return [(f"{where}.{name}[{index}]", item) for index, item in enumerate(edits.get(name, []))]

    def env(self, owner: dict[str, Any], where: str) -> None:
        for index, value in enumerate(owner.get("env", [])):
            if value is not None and value.find("=") < 1:
                self.add(f"{where}.env[{index}]", f"{value!a} is no NAME=VALUE")

    def node(self, node: dict[str, Any], where: str) -> None:
        self.required(node, "path", where)
        if node.get("type", "") not in NODE_TYPES:
            self.add(f"{where}.type", f"{node['type']!a} is none of b, c, u, p")
        permissions = node.get("permissions", "")
        if permissions == "none":
            self.add(f"{where}.permissions", "released libraries do not know 'none'", RELEASED)
        elif permissions.strip("rwm"):
            self.add(f"{where}.permissions", f"{permissions!a} has letters other than r, w, m")

    def net_devices(self, devices: list[tuple[str, dict[str, Any]]]) -> None:
        # Within one block only; across devices the last one wins at the injection.
        seen: dict[str, set[str]] = {"hostInterfaceName": set(), "name": set()}
        for where, device in devices:
            for field, known in seen.items():
                if self.required(device, field, where):
                    if device[field] in known:
                        self.add(f"{where}.{field}", f"a second {device[field]!a}")
                    known.add(device[field])

    def closid(self, identity: str, where: str) -> None:
        """The name of a folder of resctrl; a lone slash is its root class."""
        if identity == "/":
            self.add(where, "'/' is read from 1.1.0 on", versions.before("1.1.0"))
        elif identity in (".", "..") or set("/\n") & set(identity) or len(identity.encode()) >= CLOSID_MAX:
            self.add(where, f"{identity[:40]!a} can't be a folder's name")
