# SPDX-License-Identifier: Apache-2.0
"""What nvhook sets in an engine's file, put in and taken out again.

Both work on the value that is there, so what somebody added in between stays. `before` is the text that a file
had before nvhook first changed it, where that is known (`files.Record`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from hook.engines.values import Keys, find


class Text(Protocol):
    """A file's text, changed key by key. Its constructor raises NvhookError for what it can't read."""

    text: str

    def value(self) -> dict[str, Any]:
        """All of it as a value."""

    def set(self, keys: Keys, value: Any) -> None:
        """Give a key a value. Raises NvhookError."""

    def delete(self, keys: Keys) -> None:
        """Take a key out, where it is there."""


@dataclass(frozen=True)
class Setting:
    """One key of an engine's file.

    `own`: the key is the runtime's own, so it goes with it. Else it is a switch that others may have set, and is
    taken out only if nvhook set it; with `dangling` also if that is unknown, because it names the runtime that goes.
    `conflict` is told what is there and says what somebody else's it is, or None.
    """

    keys: Keys
    value: Any
    own: bool = False
    dangling: bool = False
    # What a file begins with, such as a version: it goes only with all else.
    head: bool = False
    conflict: Callable[[Any], str | None] = lambda there: None


@dataclass(frozen=True)
class Item:
    """One entry of a list, such as `imports`."""

    keys: Keys
    value: Any


@dataclass(frozen=True)
class Edit:
    """All that belongs into one file. `path` is as on the host, `kind` how it is read."""

    path: str
    kind: Callable[[str, str], Text]
    settings: list[Setting | Item]
    # For `strip` alone: what a configure with more options than this one may have set.
    switches: list[Setting] = field(default_factory=list)
    # Whether the file is nvhook's own, by its name.
    ours: bool = False

    def apply(self, text: str) -> str:
        """The text with everything in it; the same text if it is in it already. Raises NvhookError."""
        document = self.kind(self.path, text)
        for one in self.settings:
            if isinstance(one, Item):
                there = find(document.value(), one.keys) or []
                if one.value not in there:
                    document.set(one.keys, [*there, one.value])
            elif not one.head or not document.value():
                _set(document, one.keys, one.value)
        return document.text if document.value() != self.kind(self.path, text).value() else text

    def conflicts(self, text: str) -> list[str]:
        """What stands there under our keys and is somebody else's."""
        value = self.kind(self.path, text).value()
        found = []
        for one in self.settings:
            there = find(value, one.keys)
            if isinstance(one, Setting) and there is not None:
                reason = one.conflict(there)
                if reason is not None:
                    found.append(f"{self.path}: {'.'.join(one.keys)} {reason}")
        return found

    def strip(self, text: str, before: str | None, shared: bool = False) -> str:
        """The text without it. `shared`: another runtime of nvhook's stays, and with it all that both need.

        Raises NvhookError.
        """
        document = self.kind(self.path, text)
        old = self.kind(self.path, before or "").value()
        owned = any(isinstance(one, Setting) and one.own and find(document.value(), one.keys) for one in self.settings)
        known = before is not None and not shared
        for one in [*self.switches, *self.settings]:
            there = find(document.value(), one.keys)
            if isinstance(one, Item):
                theirs = before is None or shared or one.value in (find(old, one.keys) or [])
                if there and one.value in there and not theirs:
                    _put_back(document, old, one.keys, [item for item in there if item != one.value] or None)
            elif there is not None and not one.head and _is_ours(one, there, known, owned):
                _put_back(document, old, one.keys, find(old, one.keys))
        for one in self.settings if before is not None else []:
            if isinstance(one, Setting) and one.head and document.value() == {one.keys[0]: one.value}:
                _put_back(document, old, one.keys, find(old, one.keys))
        return document.text


def _is_ours(one: Setting, there: Any, known: bool, owned: bool) -> bool:
    """Whether a key goes: `known` is what stood there before, `owned` whether the file has our runtime."""
    return one.own or (there == one.value and (known or (one.dangling and owned)))


def _set(document: Text, keys: Keys, value: Any) -> None:
    """Set what differs, leaf by leaf where a table is there already."""
    there = find(document.value(), keys)
    if isinstance(value, dict) and isinstance(there, dict) and there:
        for key, item in value.items():
            _set(document, (*keys, key), item)
    elif there != value:
        document.set(keys, value)


def _put_back(document: Text, old: dict[str, Any], keys: Keys, value: Any) -> None:
    """Give a key its old value, or take it away with the parents that nothing else is in."""
    if value is not None:
        document.set(keys, value)
        return
    document.delete(keys)
    for length in range(len(keys) - 1, 0, -1):
        parent = keys[:length]
        there = find(document.value(), parent)
        if there not in (None, {}) or find(old, parent) is not None:
            return
        document.delete(parent)
