# SPDX-License-Identifier: Apache-2.0
"""CDI names: `vendor/class` is a kind, `vendor/class=device` a device's qualified name.

Hot. The grammar is that of the Go library's code, ASCII and without length limits. CDI's text asks for more (a
DNS subdomain of at most 253 characters as vendor, 63 for the class); what we write keeps to both.
"""

from __future__ import annotations

# Allowed between the first and the last character, which are letters or digits.
KIND_INNER = "_-."
DEVICE_INNER = "_-.:"


class InvalidName(ValueError):
    """Not a name of that sort. The message quotes it and says which part is wrong."""


def parse_kind(kind: str) -> tuple[str, str]:
    """Vendor and class of a kind, which ends at the first slash and the end."""
    vendor, slash, device_class = kind.partition("/")
    if not slash:
        raise InvalidName(f"{kind!a} is no kind: it has no slash between vendor and class")
    for what, part in (("vendor", vendor), ("class", device_class)):
        if not is_framed(part, KIND_INNER) or not part[0].isalpha():
            raise InvalidName(f"{kind!a} is no kind: {part!a} can't be a {what}")
    return vendor, device_class


def check_device(name: str) -> None:
    """Raises InvalidName for what can't be a device's name: letters and digits, between them also `_-.:`."""
    if not is_framed(name, DEVICE_INNER):
        raise InvalidName(f"{name!a} can't be a device's name")


def parse_qualified(name: str) -> tuple[str, str, str]:
    """Vendor, class and device name of a qualified name. Nothing around it is trimmed."""
    kind, equals, device = name.partition("=")
    if not equals:
        raise InvalidName(f"{name!a} is no qualified name: it has no `=` before the device's name")
    vendor, device_class = parse_kind(kind)
    check_device(device)
    return vendor, device_class, device


def is_framed(text: str, inner: str) -> bool:
    """Whether a text is ASCII letters and digits, with the characters of `inner` allowed between them."""
    if not text.isascii() or not text[:1].isalnum() or not text[-1:].isalnum():
        return False
    for character in inner:
        text = text.replace(character, "")
    return text.isalnum()
