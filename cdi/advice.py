# SPDX-License-Identifier: Apache-2.0
"""What CDI's text asks for and the Go library does not enforce, and slips that load and then do harm.

Nothing here refuses a file: readers take it. Container runtimes and the kernel may not.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from cdi import names

# Kubernetes' names, which the text of CDI asks for: RFC 1123 with a length.
DNS_MAX = 253
CLASS_MAX = 63
DNS_SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*", re.ASCII)
ANNOTATION_NAME_MAX = 63
ANNOTATIONS_MAX = 256 << 10

# IFNAMSIZ less its NUL.
INTERFACE_MAX = 15

PERMISSION_BITS = 0o7777

Warnings = Iterator[tuple[str, str]]


def warnings(spec: dict[str, Any]) -> list[tuple[str, str]]:
    """Place and text of all that is doubtful in a spec that is read (of the types that `cdi.decode` gives)."""
    found = [*_kind(spec["kind"]), *_annotations(spec, ""), *_edits(spec.get("containerEdits", {}), "containerEdits")]
    for index, device in enumerate(spec["devices"]):
        place = f"devices[{index}]"
        found += [*_annotations(device, place), *_edits(device["containerEdits"], f"{place}.containerEdits")]
    return found


def _kind(kind: str) -> Warnings:
    vendor, device_class = names.parse_kind(kind)
    if len(vendor) > DNS_MAX or not DNS_SUBDOMAIN.fullmatch(vendor.lower()):
        yield "kind", f"the vendor is no DNS name of at most {DNS_MAX} characters"
    if len(device_class) > CLASS_MAX:
        yield "kind", f"the class is longer than {CLASS_MAX} characters"


def _annotations(owner: dict[str, Any], where: str) -> Warnings:
    place = f"{where}.annotations" if where else "annotations"
    annotations = owner.get("annotations", {})
    for key in annotations:
        prefix, slash, name = key.lower().rpartition("/")
        good = len(name) <= ANNOTATION_NAME_MAX and names.is_framed(name, names.KIND_INNER)
        if slash:
            good = good and len(prefix) <= DNS_MAX and DNS_SUBDOMAIN.fullmatch(prefix) is not None
        if not good:
            yield place, f"{key[:80]!a} is no qualified name as Kubernetes has them"
    if sum(len(key.encode()) + len(value.encode()) for key, value in annotations.items()) > ANNOTATIONS_MAX:
        yield place, f"larger than {ANNOTATIONS_MAX >> 10} KiB in all"


def _edits(edits: dict[str, Any], where: str) -> Warnings:
    yield from _env(edits, where)
    for index, node in enumerate(edits.get("deviceNodes", [])):
        yield from _node(node, f"{where}.deviceNodes[{index}]")
    for index, device in enumerate(edits.get("netDevices", [])):
        for field in ("hostInterfaceName", "name"):
            if len(device[field].encode()) > INTERFACE_MAX:
                yield f"{where}.netDevices[{index}].{field}", f"longer than {INTERFACE_MAX} bytes, the kernel's limit"
    for index, hook in enumerate(edits.get("hooks", [])):
        yield from _hook(hook, f"{where}.hooks[{index}]")
    for index, mount in enumerate(edits.get("mounts", [])):
        yield from _mount(mount, f"{where}.mounts[{index}]")


def _env(owner: dict[str, Any], where: str) -> Warnings:
    seen = set()
    for index, entry in enumerate(owner.get("env", [])):
        name = entry.partition("=")[0]
        if name in seen:
            yield f"{where}.env[{index}]", f"a second {name!a}: it takes the first one's place"
        seen.add(name)
        if "\0" in entry or "\n" in entry or name != name.strip():
            yield f"{where}.env[{index}]", f"{entry[:80]!a} has blanks around its name, or a line break or NUL"


def _absolute(owner: dict[str, Any], fields: tuple[str, ...], where: str) -> Warnings:
    for field in fields:
        if owner.get(field) and not owner[field].startswith("/"):
            yield f"{where}.{field}", f"{owner[field][:80]!a} is not absolute"


def _node(node: dict[str, Any], where: str) -> Warnings:
    yield from _absolute(node, ("path", "hostPath"), where)
    mode = node.get("fileMode", 0)
    if mode & ~PERMISSION_BITS:
        yield f"{where}.fileMode", f"{mode} has bits beyond the permissions"
    elif mode in (600, 640, 644, 660, 664, 666, 755, 777):
        yield f"{where}.fileMode", f"{mode} is decimal, {mode:#o}; {int(str(mode), 8)} would be 0{mode}"
    for field in ("major", "minor"):
        if node.get(field, 0) < 0:
            yield f"{where}.{field}", "negative; to a device cgroup -1 means any number, and newer libraries refuse it"


def _hook(hook: dict[str, Any], where: str) -> Warnings:
    yield from _absolute(hook, ("path",), where)
    yield from _env(hook, where)
    if "timeout" in hook and hook["timeout"] <= 0:
        yield f"{where}.timeout", f"{hook['timeout']} is not positive; runc ends such a hook at once"
    if not hook.get("args"):
        yield f"{where}.args", "not given, so the program gets no name as its first argument"


def _mount(mount: dict[str, Any], where: str) -> Warnings:
    kind, options = mount.get("type", ""), mount.get("options", [])
    yield from _absolute(mount, ("containerPath",), where)
    if kind in ("", "bind"):
        yield from _absolute(mount, ("hostPath",), where)
    if not kind and not {"bind", "rbind"} & set(options):
        yield f"{where}.options", "neither bind nor rbind, and no type: it is no bind mount, and runtimes fail"
