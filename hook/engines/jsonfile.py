# SPDX-License-Identifier: Apache-2.0
"""A JSON text that is changed member by member: every byte that is not concerned stays, indentation included."""

from __future__ import annotations

import json
import re
from typing import Any

from hook.engines.values import REMEDY, Keys, bounded, too_deep
from ldcache.errors import NvhookError

SPACE = re.compile(r"[ \t\r\n]*")
INDENT = re.compile(r"\n([ \t]+)\S")
DECODER = json.JSONDecoder()
DEFAULT_INDENT = "    "


class Member:
    """Where a member stands in the text: the key's begin, the value's begin and end."""

    __slots__ = ("end", "key", "start", "value")

    def __init__(self, key: str, start: int, value: int, end: int) -> None:
        self.key = key
        self.start = start
        self.value = value
        self.end = end


class JsonText:
    """A JSON object as text. An empty text counts as an empty object.

    Raises NvhookError with line and column for what is no JSON object.
    """

    def __init__(self, path: str, text: str) -> None:
        self.path = path
        self.text = text if text.strip() else "{}\n"
        self.fresh = not text.strip()
        try:
            value = json.loads(self.text)
        except json.JSONDecodeError as error:
            what = f"{path} is no JSON: line {error.lineno} column {error.colno}: {error.msg}"
            raise NvhookError(what, REMEDY) from error
        except ValueError as error:
            # A number with thousands of digits.
            raise NvhookError(f"{path} is no JSON: {error}", REMEDY) from error
        except RecursionError as error:
            raise too_deep(path) from error
        if not isinstance(value, dict):
            raise NvhookError(f"{path} is no JSON object", REMEDY)
        bounded(value, path)

    def value(self) -> dict[str, Any]:
        """All of it as a value."""
        value: dict[str, Any] = json.loads(self.text)
        return value

    def set(self, keys: Keys, value: Any) -> None:
        """Give a member this value; objects on the way are made. Raises NvhookError where something else is."""
        begin = self._skip(0)
        for place, key in enumerate(keys):
            if self.text[begin] != "{":
                self._object_in_place(begin, keys[:place])
            found = next((one for one in reversed(self._members(begin)) if one.key == key), None)
            if found is None:
                for inner in reversed(keys[place + 1 :]):
                    value = {inner: value}
                self._insert(begin, key, value)
                return
            begin = found.value
        end = DECODER.raw_decode(self.text, begin)[1]
        self.text = self.text[:begin] + self._written(value, self._line_indent(begin)) + self.text[end:]

    def delete(self, keys: Keys) -> None:
        """Take a member away, where it is there."""
        begin = self._skip(0)
        for key in keys[:-1]:
            found = next((one for one in reversed(self._members(begin)) if one.key == key), None)
            if found is None or self.text[found.value] != "{":
                return
            begin = found.value
        members = self._members(begin)
        for place, one in enumerate(members):
            if one.key == keys[-1]:
                self._cut(begin, members, place)
                return

    def _cut(self, begin: int, members: list[Member], place: int) -> None:
        if place:
            first, last = members[place - 1].end, members[place].end
        elif len(members) > 1:
            first, last = members[0].start, members[1].start
        else:
            first, last = begin + 1, self._skip(members[0].end)
        self.text = self.text[:first] + self.text[last:]

    def _object_in_place(self, begin: int, keys: Keys) -> None:
        if not self.text.startswith("null", begin):
            what = f"{self.path}: {'.'.join(keys)} is no object"
            raise NvhookError(what, "repair the file; nothing was changed")
        self.text = self.text[:begin] + "{}" + self.text[begin + len("null") :]

    def _insert(self, begin: int, key: str, value: Any) -> None:
        members = self._members(begin)
        if members:
            last = members[-1]
            head = self.text[begin + 1 : members[0].start]
            if "\n" in head:
                indent = self._line_indent(last.start)
                made = f",{self._newline()}{indent}{json.dumps(key)}: {self._written(value, indent)}"
            else:
                made = f", {json.dumps(key)}: {json.dumps(value, ensure_ascii=False)}"
            self.text = self.text[: last.end] + made + self.text[last.end :]
            return
        end = self._skip(begin + 1)
        if "\n" not in self.text.strip() and not self.fresh:
            made = f"{json.dumps(key)}: {json.dumps(value, ensure_ascii=False)}"
        else:
            outer = self._line_indent(begin)
            indent = outer + self._unit()
            line = self._newline()
            made = f"{line}{indent}{json.dumps(key)}: {self._written(value, indent)}{line}{outer}"
        self.text = self.text[: begin + 1] + made + self.text[end:]

    def _written(self, value: Any, indent: str) -> str:
        if "\n" not in self.text.strip() and not self.fresh:
            return json.dumps(value, ensure_ascii=False)
        lines = json.dumps(value, indent=self._unit(), ensure_ascii=False).split("\n")
        return (self._newline() + indent).join(lines)

    def _members(self, begin: int) -> list[Member]:
        found = []
        place = self._skip(begin + 1)
        while self.text[place] == '"':
            key, after = DECODER.raw_decode(self.text, place)
            # Behind the key a colon, behind the value a comma or the closing brace: json.loads has seen to that.
            value = self._skip(self._skip(after) + 1)
            end = DECODER.raw_decode(self.text, value)[1]
            found.append(Member(key, place, value, end))
            after = self._skip(end)
            place = self._skip(after + 1) if self.text[after] == "," else after
        return found

    def _skip(self, place: int) -> int:
        match = SPACE.match(self.text, place)
        return match.end() if match else place

    def _line_indent(self, place: int) -> str:
        line = self.text[self.text.rfind("\n", 0, place) + 1 :]
        return line[: len(line) - len(line.lstrip(" \t"))]

    def _unit(self) -> str:
        match = INDENT.search(self.text)
        return match.group(1) if match else DEFAULT_INDENT

    def _newline(self) -> str:
        return "\r\n" if "\r\n" in self.text else "\n"
