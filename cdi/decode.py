# SPDX-License-Identifier: Apache-2.0
"""A parsed spec file made into the types of a CDI spec, as the Go library's strict decoding does it.

Hot. The library parses every file as YAML, makes JSON of it, and decodes that into structs: field names count
regardless of letter case, an unknown one refuses the whole file, a number or boolean becomes a string where a
string belongs, a string never becomes a number, null is absent (`sigs.k8s.io/yaml` and `encoding/json`).
"""

from __future__ import annotations

import struct

from cdi import versions

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any

INT64 = (-(1 << 63), (1 << 63) - 1)
UINT32 = (0, (1 << 32) - 1)
UINT64_MAX = (1 << 64) - 1


class Finding:
    """Something about a spec that makes releases of the library refuse its file.

    `where` is its place, `devices[0].containerEdits.env[2]`, empty for the whole; `what` says it in words;
    `refused_by` names the releases of `versions.RELEASES` that refuse it.
    """

    __slots__ = ("refused_by", "what", "where")

    def __init__(self, where: str, what: str, refused_by: tuple[str, ...] = versions.RELEASES) -> None:
        self.where = where
        self.what = what
        self.refused_by = refused_by

    def __str__(self) -> str:
        return f"{self.where}: {self.what}" if self.where else self.what


class Kind:
    """What a member's value must be: `form` is string, boolean, number, list, object or map.

    `limits` bounds a number, `item` is a list's or map's element, `fields` are an object's members.
    """

    __slots__ = ("fields", "form", "item", "limits")

    def __init__(
        self,
        form: str,
        limits: tuple[int, int] = INT64,
        item: Kind | None = None,
        fields: dict[str, Kind] | None = None,
    ) -> None:
        self.form = form
        self.limits = limits
        self.item = item
        self.fields = fields or {}


STRING = Kind("string")
BOOLEAN = Kind("boolean")
NUMBER = Kind("number")
UNSIGNED = Kind("number", UINT32)
STRINGS = Kind("list", item=STRING)
ANNOTATIONS = Kind("map", item=STRING)


def _object(**fields: Kind) -> Kind:
    return Kind("object", fields=fields)


def _objects(**fields: Kind) -> Kind:
    return Kind("list", item=_object(**fields))


DEVICE_NODES = _objects(
    path=STRING,
    hostPath=STRING,
    type=STRING,
    major=NUMBER,
    minor=NUMBER,
    fileMode=UNSIGNED,
    permissions=STRING,
    uid=UNSIGNED,
    gid=UNSIGNED,
)
HOOKS = _objects(hookName=STRING, path=STRING, args=STRINGS, env=STRINGS, timeout=NUMBER)
MOUNTS = _objects(hostPath=STRING, containerPath=STRING, options=STRINGS, type=STRING)
NET_DEVICES = _objects(hostInterfaceName=STRING, name=STRING)
INTEL_RDT = _object(
    closID=STRING,
    l3CacheSchema=STRING,
    memBwSchema=STRING,
    schemata=STRINGS,
    enableMonitoring=BOOLEAN,
    enableCMT=BOOLEAN,
    enableMBM=BOOLEAN,
)
EDITS = _object(
    env=STRINGS,
    deviceNodes=DEVICE_NODES,
    netDevices=NET_DEVICES,
    hooks=HOOKS,
    mounts=MOUNTS,
    intelRdt=INTEL_RDT,
    additionalGids=Kind("list", item=UNSIGNED),
)
DEVICES = _objects(name=STRING, annotations=ANNOTATIONS, containerEdits=EDITS)
SPEC = _object(cdiVersion=STRING, kind=STRING, annotations=ANNOTATIONS, devices=DEVICES, containerEdits=EDITS)

# Releases to which a field is unknown, so that they refuse a file that has it, be it null or empty.
UNKNOWN_TO = {
    "annotations": versions.before("0.6.2"),
    "intelRdt": versions.before("0.7.2"),
    "additionalGids": versions.before("0.7.2"),
    "netDevices": versions.before("1.1.0"),
    "schemata": versions.before("1.1.0"),
    "enableMonitoring": versions.before("1.1.0"),
    "enableCMT": (*versions.before("0.7.2"), *versions.since("1.1.0")),
    "enableMBM": (*versions.before("0.7.2"), *versions.since("1.1.0")),
}


class Decoder:
    """Decodes one value. `findings` has what was wrong. Such members are left out of the result; their places
    are in `broken`, and what holds them in `lacking`, so that nobody reports them as missing."""

    __slots__ = ("broken", "findings", "lacking")

    def __init__(self) -> None:
        self.findings: list[Finding] = []
        self.broken: set[str] = set()
        self.lacking: set[str] = set()

    def spec(self, value: Any) -> dict[str, Any]:
        """The spec that a file's value is; empty if it is no object."""
        if not isinstance(value, dict):
            self._refuse("", "must be an object")
            return {}
        return self._object(SPEC, value, "", {})

    def _refuse(self, where: str, what: str) -> None:
        self.findings.append(Finding(where, what))
        self.broken.add(where)
        while where:
            where = where.rpartition(".")[0]
            self.lacking.add(where)

    def _value(self, kind: Kind, value: Any, where: str, before: Any = None) -> Any:
        """The decoded value; None if it is broken. `before` is what another spelling of the field gave."""
        if kind.form == "string":
            return self._string(value, where)
        if kind.form == "number":
            return self._number(value, where, kind.limits)
        if kind.form == "boolean":
            if isinstance(value, bool):
                return value
            self._refuse(where, "must be true or false")
            return None
        if kind.form == "list":
            return self._list(kind.item or STRING, value, where)
        if not isinstance(value, dict):
            self._refuse(where, "must be an object")
            return None
        if kind.form == "map":
            return self._map(kind.item or STRING, value, where, before or {})
        return self._object(kind, value, where, before or {})

    def _object(self, kind: Kind, value: dict[str, Any], where: str, before: dict[str, Any]) -> dict[str, Any]:
        made = dict(before)
        for key, name in _field_names(value, kind.fields):
            place = f"{where}.{name or key}" if where else name or key
            if name is None:
                self.findings.append(Finding(where, f"unknown field {key!a}"))
                continue
            if name in UNKNOWN_TO:
                self.findings.append(Finding(where, f"unknown field {name!a}", UNKNOWN_TO[name]))
            if value[key] is None:
                # Decoding null empties a list, map or pointer, and leaves a string, number or struct as it is.
                if kind.fields[name].form in ("list", "map"):
                    made.pop(name, None)
                continue
            decoded = self._value(kind.fields[name], value[key], place, made.get(name))
            if decoded is not None:
                made[name] = decoded
        return made

    def _map(self, item: Kind, value: dict[str, Any], where: str, before: dict[str, Any]) -> dict[str, Any]:
        made = dict(before)
        for key, element in value.items():
            if not self._is_text(key, where):
                continue
            decoded = "" if element is None else self._value(item, element, f"{where}.{key}")
            if decoded is not None:
                made[key] = decoded
        return made

    def _list(self, item: Kind, value: Any, where: str) -> list[Any] | None:
        if not isinstance(value, list):
            self._refuse(where, "must be a list")
            return None
        made: list[Any] = []
        for index, element in enumerate(value):
            place = f"{where}[{index}]"
            if element is None and item.form in ("string", "number"):
                made.append("" if item.form == "string" else 0)
                continue
            # A null object crashes the library in every release, or lacks what it must have.
            decoded = self._value(item, element, place)
            # What is broken keeps its place, so that the places of those behind it are right.
            made.append({} if decoded is None and item.form == "object" else decoded)
        return made

    def _string(self, value: Any, where: str) -> str | None:
        if isinstance(value, str):
            return value if self._is_text(value, where) else None
        text = _scalar_text(value)
        if text is None:
            self._refuse(where, "must be a string")
        return text

    def _is_text(self, value: str, where: str) -> bool:
        try:
            value.encode()
        except UnicodeEncodeError:
            # A file's name that is no UTF-8 can't stand in YAML or JSON.
            self._refuse(where, f"{value!a} is no UTF-8")
            return False
        return True

    def _number(self, value: Any, where: str, limits: tuple[int, int]) -> int | None:
        if isinstance(value, int) and -UINT64_MAX <= value < INT64[0]:
            # No integer of 64 bits, so YAML makes a double of it, and that may be one again.
            value = float(value)
        whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
        if isinstance(value, bool) or not whole:
            self._refuse(where, "must be a whole number")
            return None
        low, high = limits
        if not low <= value <= high:
            self._refuse(where, f"{value} is out of range")
            return None
        return int(value)


def _field_names(value: dict[str, Any], fields: Iterable[str]) -> list[tuple[str, str | None]]:
    """Each key with the field that it names, or None; in the order in which the library decodes them."""
    found: list[tuple[str, str | None]] = []
    folded = {name.lower(): name for name in fields}
    for key in value:
        # Go folds the two letters outside of ASCII that have an ASCII twin: lower() knows the Kelvin sign only.
        found.append((key, folded.get(key.replace("\u017f", "s").lower())))
    names = [name for _, name in found if name is not None]
    # Two spellings of one field: JSON made of a map has its keys sorted, and the later one wins.
    return sorted(found, key=lambda pair: pair[0]) if len(set(names)) < len(names) else found


def _scalar_text(value: Any) -> str | None:
    """What a number or boolean is as a string."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int) and INT64[0] <= value <= UINT64_MAX:
        return str(value)
    return float_text(value) if isinstance(value, int | float) else None


def float_text(value: float) -> str:
    """A number's text as Go's FormatFloat(…, 'g', -1, 32) has it: the shortest for 32 bits, 1e+06 from a million."""
    if value != value:
        return "NaN"
    try:
        single: float = struct.unpack("f", struct.pack("f", value))[0]
    except OverflowError:
        return "+Inf" if value > 0 else "-Inf"
    if single in (float("inf"), float("-inf")):
        return "+Inf" if single > 0 else "-Inf"
    # The shortest digits that name this number of 32 bits; nine always do.
    digits, text = 0, ""
    for digits in range(9):
        text = f"{single:.{digits}e}"
        if struct.pack("f", float(text)) == struct.pack("f", single):
            break
    mantissa, _, exponent = text.partition("e")
    power = int(exponent)
    if -4 <= power < 6:
        return f"{float(text):.{max(digits - power, 0)}f}"
    return f"{mantissa}e{'-' if power < 0 else '+'}{abs(power):02d}"
