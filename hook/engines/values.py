# SPDX-License-Identifier: Apache-2.0
"""What an engine's file says, as plain values: tables are dicts.

Any file that can be parsed may have anything anywhere. What stands in a wrong place is an error that names the file and
the key, by `table` and `strings`; `find` is for where it does not matter.
"""

from __future__ import annotations

from typing import Any

from ldcache.errors import NvhookError

Keys = tuple[str, ...]

REMEDY = "repair the file, or move it away; nothing was changed"
# Comparing and copying a value recurses; no engine's file comes near.
DEPTH_MAX = 64


def bounded(value: dict[str, Any], path: str) -> dict[str, Any]:
    """The value of the file `path`. Raises NvhookError where it is nested deeper than DEPTH_MAX."""
    level: list[Any] = [value]
    for _ in range(DEPTH_MAX):
        found = [list(one.values()) if isinstance(one, dict) else one for one in level if isinstance(one, (dict, list))]
        level = [item for one in found for item in one]
        if not level:
            return value
    raise too_deep(path)


def too_deep(path: str) -> NvhookError:
    """The error of a file that no engine needs."""
    return NvhookError(f"{path} is nested deeper than {DEPTH_MAX} levels", REMEDY)


def table(value: dict[str, Any], keys: Keys, path: str, kind: str = "table") -> dict[str, Any]:
    """The table below these keys of the file `path`; an empty one where nothing is, or JSON's null.

    Raises NvhookError that names the first key which has something else; `kind` is the format's word for a table.
    """
    for length, key in enumerate(keys, 1):
        there = value.get(key)
        if there is None:
            return {}
        if not isinstance(there, dict):
            raise NvhookError(f"{path}: {'.'.join(keys[:length])} is no {kind}", REMEDY)
        value = there
    return value


def tables(value: dict[str, Any], keys: Keys, path: str) -> dict[str, dict[str, Any]]:
    """Likewise a table of which each entry is a table, such as an engine's runtimes. Raises NvhookError."""
    return {name: table(value, (*keys, name), path) for name in table(value, keys, path)}


def strings(value: dict[str, Any], keys: Keys, path: str) -> list[str]:
    """The list of strings below these keys; an empty one where nothing is. Raises NvhookError."""
    there = table(value, keys[:-1], path).get(keys[-1])
    if there is None:
        return []
    if not isinstance(there, list) or not all(isinstance(one, str) for one in there):
        raise NvhookError(f"{path}: {'.'.join(keys)} is no list of strings", REMEDY)
    return there


def find(value: Any, keys: Keys) -> Any:
    """What stands below these keys; None where nothing does."""
    for key in keys:
        if not isinstance(value, dict):
            return None
        value = value.get(key)
    return value


def put(value: dict[str, Any], keys: Keys, new: Any, path: str) -> None:
    """Set a key in a plain value. Raises NvhookError where a parent is no table."""
    for key in keys[:-1]:
        below = value.setdefault(key, {})
        if not isinstance(below, dict):
            raise NvhookError(f"{path}: {key} is no table", "repair the file; nothing was changed")
        value = below
    value[keys[-1]] = new


def drop(value: dict[str, Any], keys: Keys) -> None:
    """Take a key out of a plain value."""
    for key in keys[:-1]:
        value = value[key]
    del value[keys[-1]]


def without_empty(value: Any) -> Any:
    """A value without its empty tables, that headers above other headers leave behind or don't."""
    if not isinstance(value, dict):
        return value
    kept = {key: without_empty(item) for key, item in value.items()}
    return {key: item for key, item in kept.items() if item != {}}
