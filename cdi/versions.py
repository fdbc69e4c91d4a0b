# SPDX-License-Identifier: Apache-2.0
"""Versions of the CDI specification, and the library releases that read them.

Hot. A spec is to carry the lowest version that holds its content: a library refuses what is newer than itself.
Which content needs which version is a table of predicates, as in the library's `specs-go/version.go`.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

    Spec = dict[str, Any]
    Edits = dict[str, Any]

# 0.1.0 and 0.2.0 are known to all and usable by none: the lowest version that a content can need is 0.3.0.
KNOWN = ("0.1.0", "0.2.0", "0.3.0", "0.4.0", "0.5.0", "0.6.0", "0.7.0", "0.8.0", "1.0.0", "1.1.0")
LOWEST = "0.3.0"

# Releases of the Go library whose verdicts are known, one for each line that engines carry, with the newest
# version that each reads. HEAD is its development after 1.1.0, of August 2026; no engine carries it.
HEAD = "HEAD"
NEWEST_READ = {
    "0.5.4": "0.5.0",
    "0.6.2": "0.6.0",
    "0.7.2": "0.7.0",
    "0.8.1": "0.8.0",
    "1.0.1": "1.0.0",
    "1.1.0": "1.1.0",
    HEAD: "1.1.0",
}
RELEASES = tuple(NEWEST_READ)
NEWEST_RELEASE = RELEASES[-2]


def before(release: str) -> tuple[str, ...]:
    """The releases older than this one."""
    return RELEASES[: RELEASES.index(release)]


def since(release: str) -> tuple[str, ...]:
    """This release and all newer ones."""
    return RELEASES[RELEASES.index(release) :]


def too_old_for(version: str) -> tuple[str, ...]:
    """The releases that do not know a version."""
    at = KNOWN.index(version)
    return tuple(release for release, newest in NEWEST_READ.items() if KNOWN.index(newest) < at)


def minimum_version(spec: Spec) -> str:
    """The lowest `cdiVersion` that holds the content of a spec (of the types that `cdi.decode` gives).

    Empty strings, empty lists and nulls count as absent, but for `schemata`.
    """
    return next((version for version, needed in REQUIRED if needed(spec)), LOWEST)


def _devices(spec: Spec) -> list[dict[str, Any]]:
    return spec.get("devices") or []


def _edits(spec: Spec) -> Iterator[Edits]:
    for owner in (spec, *_devices(spec)):
        yield owner.get("containerEdits") or {}


def _items(spec: Spec, name: str) -> Iterator[dict[str, Any]]:
    for edits in _edits(spec):
        yield from edits.get(name) or []


def _needs_1_1_0(spec: Spec) -> bool:
    for edits in _edits(spec):
        rdt = edits.get("intelRdt") or {}
        # `schemata` counts even as an empty list, unlike every other list.
        if edits.get("netDevices") or rdt.get("schemata") is not None or rdt.get("enableMonitoring"):
            return True
    return False


def _needs_0_7_0(spec: Spec) -> bool:
    return any(edits.get("intelRdt") is not None or edits.get("additionalGids") for edits in _edits(spec))


def _needs_0_6_0(spec: Spec) -> bool:
    if "." in (spec.get("kind") or "").partition("/")[2]:
        return True
    return any(owner.get("annotations") for owner in (spec, *_devices(spec)))


def _needs_0_5_0(spec: Spec) -> bool:
    # str.isdigit() would take digits of other scripts too.
    if any((device.get("name") or "")[:1] in tuple("0123456789") for device in _devices(spec)):
        return True
    return any(node.get("hostPath") for node in _items(spec, "deviceNodes"))


def _needs_0_4_0(spec: Spec) -> bool:
    return any(mount.get("type") for mount in _items(spec, "mounts"))


# CDI specification, "Released versions"; newest first, the first that holds decides. 0.8.0 and 1.0.0 changed
# the library only.
REQUIRED: tuple[tuple[str, Callable[[Spec], bool]], ...] = (
    ("1.1.0", _needs_1_1_0),
    ("0.7.0", _needs_0_7_0),
    ("0.6.0", _needs_0_6_0),
    ("0.5.0", _needs_0_5_0),
    ("0.4.0", _needs_0_4_0),
)
