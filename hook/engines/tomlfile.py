# SPDX-License-Identifier: Apache-2.0
"""A TOML text that is changed key by key; comments, order and all other bytes stay.

A new table is appended to the text, which is valid wherever its parents stand. The rest is done by tomlkit, and
what it made is read again and compared with what was meant: a slip ends in an error and not in an engine that
does not start.
"""

from __future__ import annotations

import copy
import re
from typing import Any

from hook.engines.values import REMEDY, Keys, bounded, drop, find, put, too_deep, without_empty
from ldcache.errors import NvhookError

BARE = re.compile(r"[A-Za-z0-9_-]+", re.ASCII)


class TomlText:
    """A TOML document as text. Raises NvhookError with line and column for what is none."""

    def __init__(self, path: str, text: str) -> None:
        self.path = path
        self.text = text
        self._value = self._read(text)

    def _read(self, text: str) -> dict[str, Any]:
        import tomlkit
        import tomlkit.exceptions

        try:
            value: dict[str, Any] = tomlkit.parse(text).unwrap()
        except (tomlkit.exceptions.TOMLKitError, ValueError) as error:
            # Of a key that stands twice tomlkit tells no line.
            why = _at_end(text) if _is_end(error, text) else str(error)
            raise NvhookError(f"{self.path} is no TOML: {why}", REMEDY) from error
        except RecursionError as error:
            raise too_deep(self.path) from error
        return bounded(value, self.path)

    def value(self) -> dict[str, Any]:
        """All of it as a value."""
        return copy.deepcopy(self._value)

    def set(self, keys: Keys, value: Any) -> None:
        """Give a key this value; tables on the way are made."""
        import tomlkit
        import tomlkit.items

        meant = self.value()
        put(meant, keys, value, self.path)
        if isinstance(value, dict) and find(self._value, keys) is None:
            made = self._appended(keys, value)
            if self._is(made, meant):
                self._take(made)
                return
        document = tomlkit.parse(self.text)
        table: Any = document
        for key in keys[:-1]:
            if key not in table:
                # A table with a header can't stand between braces.
                inline = isinstance(table, tomlkit.items.InlineTable)
                table[key] = tomlkit.inline_table() if inline else tomlkit.table()
            table = table[key]
        table[keys[-1]] = value
        self._checked(tomlkit.dumps(document), meant, keys)

    def delete(self, keys: Keys) -> None:
        """Take a key or a table away, where it is there."""
        import tomlkit

        if find(self._value, keys) is None:
            return
        meant = self.value()
        drop(meant, keys)
        made = self._cut(keys)
        if without_empty(self._read(made)) == without_empty(meant):
            self._take(made)
            return
        document = tomlkit.parse(self.text)
        table: Any = document
        for key in keys[:-1]:
            table = table[key]
        del table[keys[-1]]
        self._checked(tomlkit.dumps(document), meant, keys)

    def _cut(self, keys: Keys) -> str:
        """The text without the lines from a header of this table, or one below it, to its last key."""
        kept: list[str] = []
        held: list[str] = []
        cutting = False
        for line in self.text.splitlines(keepends=True):
            header = _header(line)
            if header is not None:
                cutting = header[: len(keys)] == keys
                if cutting:
                    while kept and not kept[-1].strip():
                        kept.pop()
            if not cutting:
                kept += [*held, line]
                held = []
            elif not line.strip() or line.lstrip().startswith("#"):
                # Perhaps a comment on the next table.
                held.append(line)
            else:
                held = []
        return "".join([*kept, *(held if any(line.strip() for line in held) else [])])

    def _checked(self, made: str, meant: dict[str, Any], keys: Keys) -> None:
        if not self._is(made, meant):
            what = f"{self.path}: cannot change {'.'.join(keys)} and keep the rest"
            raise NvhookError(what, "write it as a table of its own ([a.b.c]) in the file; nothing was changed")
        self._take(made)

    def _is(self, made: str, meant: dict[str, Any]) -> bool:
        try:
            return self._read(made) == meant
        except NvhookError:
            return False

    def _take(self, made: str) -> None:
        self.text = made
        self._value = self._read(made)

    def _appended(self, keys: Keys, value: dict[str, Any]) -> str:
        line = "\r\n" if "\r\n" in self.text else "\n"
        head = self.text
        if head and not head.endswith("\n"):
            head += line
        if head.strip():
            head += line
        return head + line.join(_table(keys, value)) + line


def _is_end(error: Exception, text: str) -> bool:
    """Whether the text ended where more had to come. Behind the end tomlkit sees a NUL, and has no true column."""
    import tomlkit.exceptions

    ended = isinstance(error, tomlkit.exceptions.UnexpectedEofError)
    return ended or ("\0" not in text and "'\\x00'" in str(error))


def _at_end(text: str) -> str:
    line = text.count("\n", 0, -1) + 1
    return f"the file ends too early, in line {line}"


def _table(keys: Keys, value: dict[str, Any]) -> list[str]:
    """The lines of a table and those below it."""
    lines = [f"[{'.'.join(map(_key, keys))}]"]
    lines += [f"{_key(key)} = {_literal(item)}" for key, item in value.items() if not isinstance(item, dict)]
    for key, item in value.items():
        if isinstance(item, dict):
            lines += ["", *_table((*keys, key), item)]
    return lines


def _header(line: str) -> Keys | None:
    """The keys of a line that is a table's header. One that only looks like it, in a string of many lines, is found
    out by what the text then means."""
    import tomlkit
    import tomlkit.exceptions

    if not line.lstrip().startswith("["):
        return None
    try:
        value: Any = tomlkit.parse(line).unwrap()
    except tomlkit.exceptions.TOMLKitError:
        return None
    keys: list[str] = []
    while isinstance(value, (dict, list)) and value:
        if isinstance(value, list):
            value = value[0]
            continue
        (key,) = value
        keys.append(key)
        value = value[key]
    return tuple(keys)


def _key(key: str) -> str:
    return key if BARE.fullmatch(key) else _literal(key)


def _literal(item: Any) -> str:
    import tomlkit

    return str(tomlkit.item(item).as_string())
