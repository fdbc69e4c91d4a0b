# SPDX-License-Identifier: Apache-2.0
"""Container annotations that ask for CDI devices: `cdi.k8s.io/<plugin>_<id>: vendor/class=name,…`.

Hot. Device plugins and old clients of the CRI write them. Of the key, readers look at the prefix only; its
grammar is a rule for who writes one (Go library, `pkg/cdi/annotations.go`).
"""

from __future__ import annotations

from cdi import names

PREFIX = "cdi.k8s.io/"
NAME_MAX = 63


class InvalidAnnotation(ValueError):
    """An annotation's key or value that breaks the rules; the message says which."""


def key(plugin: str, device_id: str) -> str:
    """The key under which a plugin asks for devices. Slashes in the id, and only there, become `_`."""
    if not plugin or not device_id:
        raise InvalidAnnotation("an annotation's key needs a plugin's name and a device's id")
    name = f"{plugin}_{device_id.replace('/', '_')}"
    if len(name) > NAME_MAX:
        raise InvalidAnnotation(f"{name!a} is longer than {NAME_MAX} characters")
    if not names.is_framed(name, names.KIND_INNER):
        raise InvalidAnnotation(f"{name!a} can't be an annotation's name")
    return PREFIX + name


def devices(annotations: dict[str, str], prefixes: tuple[str, ...] = (PREFIX,)) -> list[str]:
    """The qualified names that annotations ask for, as often as they do, in the annotations' order.

    Raises InvalidAnnotation for a value with anything else than qualified names between commas: a blank or an
    empty item fails the whole request. The library walks a Go map, so several keys have no order there.
    """
    found = []
    for name, value in annotations.items():
        if not name.startswith(prefixes):
            continue
        for device in value.split(","):
            try:
                names.parse_qualified(device)
            except names.InvalidName as error:
                raise InvalidAnnotation(f"annotation {name!a}: {error}") from error
            found.append(device)
    return found
