# SPDX-License-Identifier: Apache-2.0
"""What a spec may hold under a ceiling: the newest version of the CDI specification that its readers know.

A reader refuses a whole file for one member that is newer than itself, so what needs more is dropped, and said.
"""

from __future__ import annotations

from typing import Any

from cdi import spec, versions
from ldcache.errors import NvhookError

# What podman 4 reads; names by index need it.
DEFAULT = "0.5.0"

OTHERS_READ_AND_WRITE = 0o006


def add_groups(made: dict[str, Any]) -> dict[str, Any]:
    """The spec, with the groups of nodes that not everybody may open: a container's process is then in them, even if
    it is not root's. As NVIDIA's generator does it, but that it is 0.7.0 then, whoever reads it."""
    return _each_edits(made, lambda edits: {**edits, "additionalGids": groups} if (groups := _groups(edits)) else edits)


def fit(made: dict[str, Any], newest: str) -> tuple[dict[str, Any], list[str]]:
    """The spec with what version `newest` holds of it, its own version set anew, and a line for each thing dropped.

    Raises NvhookError where too little would be left: a node elsewhere than in the container, every device.
    """
    dropped: list[str] = []
    for version, fitted in ((("0.7.0", _without_groups)), ("0.6.0", _without_annotations), ("0.5.0", _without_digits)):
        if versions.KNOWN.index(newest) < versions.KNOWN.index(version):
            made, lines = fitted(made)
            dropped += [f"{line} needs CDI {version}, and {newest} is the newest that may be used" for line in lines]
    made = {**made, "cdiVersion": versions.minimum_version(made)}
    if versions.KNOWN.index(made["cdiVersion"]) > versions.KNOWN.index(newest):
        what = f"the spec can't do without CDI {made['cdiVersion']}, and {newest} is the newest that may be used"
        why = "a dot in the class needs 0.6.0, nodes below a --dev-root 0.5.0"
        raise NvhookError(what, f"give --spec-version-max {made['cdiVersion']}, or do without what needs it: {why}")
    if not made.get("devices"):
        what = f"no device is left under CDI {newest}: names that begin with a digit need 0.5.0"
        raise NvhookError(what, "give a greater --spec-version-max")
    return made, dropped


def _groups(edits: dict[str, Any]) -> list[int]:
    """The groups of nodes that others may not both read and write; root's needs no adding."""
    closed = [node for node in edits.get("deviceNodes", []) if node.get("gid") and not _open_to_all(node)]
    return sorted({node["gid"] for node in closed})


def _open_to_all(node: dict[str, Any]) -> bool:
    return bool(node.get("fileMode", 0) & OTHERS_READ_AND_WRITE == OTHERS_READ_AND_WRITE)


def _each_edits(made: dict[str, Any], change: Any) -> dict[str, Any]:
    devices = [{**device, "containerEdits": change(device["containerEdits"])} for device in made["devices"]]
    return {**made, "devices": devices, "containerEdits": change(made.get("containerEdits", {}))}


def _without_groups(made: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    groups: set[int] = set()

    def change(edits: dict[str, Any]) -> dict[str, Any]:
        groups.update(edits.get("additionalGids", []))
        return {name: value for name, value in edits.items() if name != "additionalGids"}

    made = _each_edits(made, change)
    shown = ", ".join(map(str, sorted(groups)))
    return made, [f"additionalGids {shown} (nodes that only that group may open)"] if groups else []


def _without_annotations(made: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    names = {name for owner in (made, *made["devices"]) for name in owner.get("annotations", {})}
    plain = [{name: value for name, value in device.items() if name != "annotations"} for device in made["devices"]]
    made = {name: value for name, value in made.items() if name != "annotations"} | {"devices": plain}
    return made, [f"the annotation {', '.join(sorted(names))}"] if names else []


def _without_digits(made: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    digits = tuple("0123456789")
    names = [name for name in spec.device_names(made) if name.startswith(digits)]
    kept = [device for device in made["devices"] if not device["name"].startswith(digits)]
    return {**made, "devices": kept}, [f"the device name {', '.join(names)}"] if names else []
