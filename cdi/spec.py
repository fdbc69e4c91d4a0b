# SPDX-License-Identifier: Apache-2.0
"""A CDI spec as a JSON value: the version it needs, the rules that its readers apply, and the file.

Rules are those of the Go library (tags.cncf.io/container-device-interface) that engines carry, in releases
0.5.4 to 1.1.0: a reader refuses a whole file for one bad member, and its user only sees "unresolvable device".
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

from cdi import names
from ldcache.errors import NvhookError

Spec = dict[str, Any]
Format = Literal["yaml", "json"]

VERSIONS = ("0.3.0", "0.4.0", "0.5.0", "0.6.0", "0.7.0", "0.8.0", "1.0.0", "1.1.0")
# Readers look at these and at no other name, `.yml` and `.JSON` included.
SUFFIXES: dict[str, Format] = {".yaml": "yaml", ".json": "json"}

HOOKS = ("prestart", "createRuntime", "createContainer", "startContainer", "poststart", "poststop")
CLOSID_MAX = 4096

Edits = dict[str, Any]


class InvalidSpec(ValueError):
    """A spec that some reader refuses. `problems` has all reasons, each with its place in the spec."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("; ".join(problems))
        self.problems = problems


def _any_device(spec: Spec, found: Callable[[dict[str, Any]], bool]) -> bool:
    return any(found(device) for device in _dicts(spec.get("devices")))


def _any_edits(spec: Spec, found: Callable[[Edits], bool]) -> bool:
    blocks = [spec, *_dicts(spec.get("devices"))]
    return any(found(block["containerEdits"]) for block in blocks if isinstance(block.get("containerEdits"), dict))


def _dicts(value: Any) -> list[dict[str, Any]]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def _rdt(edits: Edits) -> dict[str, Any]:
    value = edits.get("intelRdt")
    return value if isinstance(value, dict) else {}


def _needs_1_1_0(spec: Spec) -> bool:
    # `schemata` counts even as an empty list, unlike every other list.
    return _any_edits(
        spec,
        lambda edits: (
            bool(edits.get("netDevices"))
            or _rdt(edits).get("schemata") is not None
            or _rdt(edits).get("enableMonitoring") is True
        ),
    )


def _needs_0_7_0(spec: Spec) -> bool:
    return _any_edits(spec, lambda edits: edits.get("intelRdt") is not None or bool(edits.get("additionalGids")))


def _needs_0_6_0(spec: Spec) -> bool:
    annotated = bool(spec.get("annotations")) or _any_device(spec, lambda device: bool(device.get("annotations")))
    return annotated or "." in str(spec.get("kind", "")).partition("/")[2]


def _needs_0_5_0(spec: Spec) -> bool:
    def has_host_path(edits: Edits) -> bool:
        return any(node.get("hostPath") for node in _dicts(edits.get("deviceNodes")))

    # str.isdigit() would take digits of other scripts too.
    begins_with_digit = _any_device(spec, lambda device: str(device.get("name", ""))[:1] in tuple("0123456789"))
    return begins_with_digit or _any_edits(spec, has_host_path)


def _needs_0_4_0(spec: Spec) -> bool:
    return _any_edits(spec, lambda edits: any(mount.get("type") for mount in _dicts(edits.get("mounts"))))


# CDI specification, "Released versions"; newest first, the first that holds decides.
REQUIRED: tuple[tuple[str, Callable[[Spec], bool]], ...] = (
    ("1.1.0", _needs_1_1_0),
    ("0.7.0", _needs_0_7_0),
    ("0.6.0", _needs_0_6_0),
    ("0.5.0", _needs_0_5_0),
    ("0.4.0", _needs_0_4_0),
)


def minimum_version(spec: Spec) -> str:
    """The lowest `cdiVersion` that holds a spec's content.

    Always to be written, never a newer one: a library refuses what is newer than itself.
    """
    return next((version for version, needed in REQUIRED if needed(spec)), "0.3.0")


def device_names(spec: Spec) -> list[str]:
    """The names of a spec's devices, in its order."""
    return [device["name"] for device in _dicts(spec.get("devices")) if isinstance(device.get("name"), str)]


def problems(spec: Any) -> list[str]:
    """Why readers of releases up to 1.1.0 would refuse a spec; empty if none does.

    Stricter than they are where they guess: field names count by case, and a number is no string.
    """
    found = Problems()
    found.spec(spec)
    return found.found


class Problems:
    """Collects what is wrong, each with its place: `devices[0].containerEdits.mounts[2]: …`."""

    def __init__(self) -> None:
        self.found: list[str] = []

    def add(self, where: str, what: str) -> None:
        self.found.append(f"{where}: {what}" if where else what)

    def spec(self, spec: Any) -> None:
        if not self.fields(spec, "", ("cdiVersion", "kind", "annotations", "devices", "containerEdits")):
            return
        self.version(spec)
        if self.string(spec, "kind", "", required=True):
            self.kind(spec["kind"])
        self.annotations(spec, "")
        if spec.get("containerEdits") is not None:
            self.edits(spec["containerEdits"], "containerEdits")
        seen: set[str] = set()
        devices = self.objects(spec, "devices", "")
        for where, device in devices:
            self.device(device, where, seen)
        if not spec.get("devices"):
            # Accepted by libraries up to 0.8.1.
            self.add("devices", "at least one device is needed")

    def version(self, spec: Spec) -> None:
        if not self.string(spec, "cdiVersion", "", required=True):
            return
        # Exactly one small v is taken off; 0.5.4 does not even do that.
        version = spec["cdiVersion"].removeprefix("v")
        if version not in VERSIONS:
            self.add("cdiVersion", f"{spec['cdiVersion']!a} is no version that readers know")
            return
        needed = minimum_version(spec)
        if VERSIONS.index(version) < VERSIONS.index(needed):
            self.add("cdiVersion", f"{version} is too low, the content needs {needed}")

    def kind(self, kind: str) -> None:
        try:
            parts = names.parse_kind(kind)
        except names.InvalidName as error:
            self.add("kind", str(error))
            return
        if min(map(len, parts)) < 2:
            self.add("kind", "every released library crashes on a vendor or class of one character")

    def annotations(self, owner: dict[str, Any], where: str) -> None:
        value = owner.get("annotations")
        if value is None:
            return
        place = f"{where}.annotations".lstrip(".")
        if not isinstance(value, dict):
            self.add(place, "must be an object")
        elif not all(isinstance(item, str) for item in value.values()):
            self.add(place, "every value must be a string")

    def device(self, device: dict[str, Any], where: str, seen: set[str]) -> None:
        self.fields(device, where, ("name", "annotations", "containerEdits"))
        if self.string(device, "name", where, required=True):
            name = device["name"]
            try:
                names.check_device(name)
            except names.InvalidName as error:
                self.add(f"{where}.name", str(error))
            if name in seen:
                self.add(f"{where}.name", f"a second device {name!a}")
            seen.add(name)
        self.annotations(device, where)
        edits = device.get("containerEdits")
        # An empty list is nothing; an empty intelRdt object is an edit.
        if not isinstance(edits, dict) or not any(value or key == "intelRdt" for key, value in _present(edits)):
            self.add(f"{where}.containerEdits", "a device must have an edit")
        if edits is not None:
            self.edits(edits, f"{where}.containerEdits")

    def edits(self, edits: Any, where: str) -> None:
        known = ("env", "deviceNodes", "netDevices", "hooks", "mounts", "intelRdt", "additionalGids")
        if not self.fields(edits, where, known):
            return
        self.env(edits, where)
        for place, node in self.objects(edits, "deviceNodes", where):
            self.node(node, place)
        self.net_devices(self.objects(edits, "netDevices", where))
        for place, hook in self.objects(edits, "hooks", where):
            self.hook(hook, place)
        for place, mount in self.objects(edits, "mounts", where):
            self.fields(mount, place, ("hostPath", "containerPath", "options", "type"))
            self.string(mount, "hostPath", place, required=True)
            self.string(mount, "containerPath", place, required=True)
            self.string(mount, "type", place)
            self.strings(mount, "options", place)
        if edits.get("intelRdt") is not None:
            self.rdt(edits["intelRdt"], f"{where}.intelRdt")
        for place, gid in self.items(edits, "additionalGids", where):
            self.number(gid, place, 0, (1 << 32) - 1)

    def env(self, owner: dict[str, Any], where: str) -> None:
        for place, value in self.strings(owner, "env", where):
            if value.find("=") < 1:
                self.add(place, f"{value!a} is no NAME=VALUE")

    def node(self, node: dict[str, Any], where: str) -> None:
        numbers = {"major": 63, "minor": 63, "fileMode": 32, "uid": 32, "gid": 32}
        self.fields(node, where, ("path", "hostPath", "type", "permissions", *numbers))
        self.string(node, "path", where, required=True)
        self.string(node, "hostPath", where)
        if self.string(node, "type", where) and node["type"] not in ("", "b", "c", "u", "p"):
            self.add(f"{where}.type", f"{node['type']!a} is none of b, c, u, p")
        if self.string(node, "permissions", where) and set(node["permissions"]) - set("rwm"):
            self.add(f"{where}.permissions", f"{node['permissions']!a} has letters other than r, w, m")
        for name, bits in numbers.items():
            if node.get(name) is not None:
                # major and minor are signed 64-bit numbers, the rest unsigned 32-bit ones.
                low = -(1 << bits) if bits == 63 else 0
                self.number(node[name], f"{where}.{name}", low, (1 << bits) - 1)

    def net_devices(self, devices: list[tuple[str, dict[str, Any]]]) -> None:
        seen: dict[str, set[str]] = {"hostInterfaceName": set(), "name": set()}
        for where, device in devices:
            self.fields(device, where, tuple(seen))
            for field, known in seen.items():
                if self.string(device, field, where, required=True):
                    if device[field] in known:
                        self.add(f"{where}.{field}", f"a second {device[field]!a}")
                    known.add(device[field])

    def hook(self, hook: dict[str, Any], where: str) -> None:
        self.fields(hook, where, ("hookName", "path", "args", "env", "timeout"))
        if self.string(hook, "hookName", where, required=True) and hook["hookName"] not in HOOKS:
            self.add(f"{where}.hookName", f"{hook['hookName']!a} is no hook")
        self.string(hook, "path", where, required=True)
        self.strings(hook, "args", where)
        self.env(hook, where)
        if hook.get("timeout") is not None:
            self.number(hook["timeout"], f"{where}.timeout", -(1 << 63), (1 << 63) - 1)

    def rdt(self, rdt: Any, where: str) -> None:
        strings = ("closID", "l3CacheSchema", "memBwSchema")
        if not self.fields(rdt, where, (*strings, "schemata", "enableMonitoring")):
            return
        for name in strings:
            self.string(rdt, name, where)
        self.strings(rdt, "schemata", where)
        if not isinstance(rdt.get("enableMonitoring", False), bool | None):
            self.add(f"{where}.enableMonitoring", "must be true or false")
        identity = rdt.get("closID")
        if isinstance(identity, str) and not _is_closid(identity):
            self.add(f"{where}.closID", f"{identity[:40]!a} can't be a folder's name")

    def fields(self, value: Any, where: str, known: tuple[str, ...]) -> bool:
        """False if it is no object. A member that a reader does not know makes it refuse the file."""
        if not isinstance(value, dict):
            self.add(where, "must be an object")
            return False
        for name in value:
            if name not in known:
                self.add(where, f"unknown field {name!a}")
        return True

    def string(self, owner: dict[str, Any], name: str, where: str, required: bool = False) -> bool:
        """True if there is a string to look at."""
        place = f"{where}.{name}".lstrip(".")
        value = owner.get(name)
        if value is None or value == "":
            if required:
                self.add(place, "must not be missing or empty")
            return False
        return self._text(value, place)

    def _text(self, value: Any, place: str) -> bool:
        if not isinstance(value, str):
            self.add(place, "must be a string")
            return False
        try:
            value.encode()
        except UnicodeEncodeError:
            # A file's name that is no UTF-8 can't stand in YAML or JSON.
            self.add(place, f"{value!a} is no UTF-8")
            return False
        return True

    def items(self, owner: dict[str, Any], name: str, where: str) -> list[tuple[str, Any]]:
        place = f"{where}.{name}".lstrip(".")
        value = owner.get(name)
        if value is None:
            return []
        if not isinstance(value, list):
            self.add(place, "must be a list")
            return []
        return [(f"{place}[{index}]", item) for index, item in enumerate(value)]

    def strings(self, owner: dict[str, Any], name: str, where: str) -> list[tuple[str, str]]:
        return [(place, item) for place, item in self.items(owner, name, where) if self._text(item, place)]

    def objects(self, owner: dict[str, Any], name: str, where: str) -> list[tuple[str, dict[str, Any]]]:
        found = []
        for place, item in self.items(owner, name, where):
            # A null item crashes every release of the library.
            if isinstance(item, dict):
                found.append((place, item))
            else:
                self.add(place, "must be an object")
        return found

    def number(self, value: Any, where: str, low: int, high: int) -> None:
        whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
        if isinstance(value, bool) or not whole:
            self.add(where, "must be a whole number")
        elif not low <= value <= high:
            self.add(where, f"{value} is out of range")


def _present(edits: Edits) -> Iterator[tuple[str, Any]]:
    return ((key, value) for key, value in edits.items() if value is not None)


def _is_closid(identity: str) -> bool:
    # A lone slash, the root class, is read from library 1.1.0 on, where the field's other uses need 0.7.0.
    return identity not in (".", "..") and not set("/\n") & set(identity) and len(identity) < CLOSID_MAX


def without_empty(value: Any) -> Any:
    """The value without members that are None or empty: old readers refuse even an empty new field."""
    if isinstance(value, dict):
        kept = {name: without_empty(item) for name, item in value.items()}
        return {name: item for name, item in kept.items() if item not in (None, "", [], {})}
    if isinstance(value, list):
        return [without_empty(item) for item in value]
    return value


def serialise(spec: Spec, form: Format) -> str:
    """The file's text. Raises InvalidSpec for a spec that a reader would refuse."""
    found = problems(spec)
    if found:
        raise InvalidSpec(found)
    return json.dumps(spec, indent=2) + "\n" if form == "json" else _yaml(spec)


class _Quoted(str):
    """A string that is written between double quotes."""

    __slots__ = ()


def _quoted(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _quoted(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_quoted(item) for item in value]
    return _Quoted(value) if isinstance(value, str) else value


def _yaml(spec: Spec) -> str:
    import yaml

    base: Any = getattr(yaml, "CSafeDumper", yaml.SafeDumper)

    class Dumper(base):  # type: ignore[misc]
        # A list that stands in two places would come out as `&id001` and `*id001`.
        def ignore_aliases(self, data: Any) -> bool:
            return True

    def represent(dumper: Any, text: _Quoted) -> Any:
        return dumper.represent_scalar("tag:yaml.org,2002:str", str(text), style='"')

    # All strings but the field names: readers parse YAML 1.1, which makes 8 of 010 and true of yes, and our
    # own dumper's idea of what needs quotes is not theirs (1e3).
    Dumper.add_representer(_Quoted, represent)
    text: str = yaml.dump(
        _quoted(spec), Dumper=Dumper, explicit_start=True, sort_keys=False, default_flow_style=False, width=4096
    )
    return text


def parse(text: str) -> Any:
    """The value of a spec file's text; YAML, of which JSON is a part. Raises ValueError."""
    import yaml

    try:
        return yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(str(error)) from error


def write(path: Path, text: str) -> None:
    """Put a spec file in its place, whole and readable by all, at one moment. Raises NvhookError.

    Engines watch the folder: they see a rename only if it comes from the same folder, and the temporary file
    only if its name ends like a spec's. The mode is set before the rename, or a rootless engine would meet a
    file that it can't read.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        _make_folder(path.parent)
        # One that was left behind by a process of our number: in a container, that is the same one each time.
        temporary.unlink(missing_ok=True)
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            with open(fd, "w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fchmod(file.fileno(), 0o644)
                os.fsync(file.fileno())
            os.rename(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    except OSError as error:
        what = f"cannot write {path}: {error.strerror}"
        raise NvhookError(what, "give --output a place that you may write, or run as root") from error


def _make_folder(folder: Path) -> None:
    if folder.is_dir():
        return
    _make_folder(folder.parent)
    try:
        folder.mkdir()
    except FileExistsError:
        return
    # mkdir's mode goes through the caller's umask, and a folder that others can't search hides its specs.
    folder.chmod(0o755)
