# SPDX-License-Identifier: Apache-2.0
"""YAML as the Go library reads spec files: version 1.1, one document, made into a JSON value.

Cold: it needs PyYAML. The value is built from the parser's events, not by PyYAML's constructor, for two
reasons. Scalars are those of Go's `yaml.v2` (`resolve.go`), which differ from PyYAML's: `0o660`, `1e3` and `y` are
a number, a number and a boolean, `1:20` is a string. And every value is counted before it is made, those that
an alias repeats included, so a bomb of aliases or brackets ends in one error.
"""

from __future__ import annotations

import base64
import binascii
import math
import re
from typing import Any

from cdi import source, validate
from cdi.decode import INT64, UINT64_MAX, float_text

# A spec is eight levels deep, and a deeper one is refused for its types anyway.
DEPTH_MAX = 64

TAG = "tag:yaml.org,2002:"
RESOLVABLE = {None, *(TAG + name for name in ("str", "bool", "int", "float", "null", "timestamp"))}

WORDS: dict[str, Any] = {
    **dict.fromkeys(("y", "Y", "yes", "Yes", "YES", "true", "True", "TRUE", "on", "On", "ON"), True),
    **dict.fromkeys(("n", "N", "no", "No", "NO", "false", "False", "FALSE", "off", "Off", "OFF"), False),
    **dict.fromkeys(("", "~", "null", "Null", "NULL"), None),
    **dict.fromkeys((".nan", ".NaN", ".NAN"), math.nan),
    **dict.fromkeys((".inf", ".Inf", ".INF", "+.inf", "+.Inf", "+.INF"), math.inf),
    **dict.fromkeys(("-.inf", "-.Inf", "-.INF"), -math.inf),
}

# What Go's ParseInt with base 0 takes, and the pattern of yaml.v2's floats.
INTEGER = re.compile(r"([-+]?)(0[bB][01]+|0[oO][0-7]+|0[0-7]+|0[xX][0-9a-fA-F]+|0|[1-9][0-9]*)", re.ASCII)
FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?", re.ASCII)
POINT_FLOAT = re.compile(r"\.[0-9]+([eE][-+]?[0-9]+)?", re.ASCII)
TIMESTAMP = re.compile(r"[0-9]{4}-[0-9]{1,2}-[0-9]{1,2}([Tt ][0-9]{1,2}:[0-9]{1,2}:[0-9]{1,2}.*)?", re.ASCII)


class InvalidText(ValueError):
    """Bytes that are no spec file's text. The message says at which line and why."""


def load(path: str) -> validate.Checked:
    """Read and judge a spec file. Raises OSError as `source.read_file` does, InvalidText."""
    return validate.check(parse(source.read_file(path)))


def parse(data: bytes | str) -> Any:
    """The value of a spec file's text, of which JSON is one kind. Raises InvalidText.

    Only the first document is read, and nothing behind it. None of it is a spec yet.
    """
    import yaml

    if isinstance(data, str):
        data = data.encode("utf-8", "surrogatepass")
    if len(data) > source.SIZE_MAX:
        raise InvalidText(f"larger than {source.SIZE_MAX >> 20} MiB")
    try:
        loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)(data)
    except yaml.YAMLError as error:
        raise InvalidText(_reason(error)) from None
    try:
        value = _Composer(yaml, loader).document()
    except yaml.YAMLError as error:
        raise InvalidText(_reason(error)) from None
    finally:
        loader.dispose()
    if value is None:
        raise InvalidText("holds no data")
    return value


def _reason(error: Exception) -> str:
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or getattr(error, "reason", None) or "not readable as YAML"
    return f"line {mark.line + 1}: {problem}" if mark is not None else str(problem)


class _Composer:
    """Makes the value of one document of a parser's events."""

    def __init__(self, yaml: Any, loader: Any) -> None:
        self.yaml = yaml
        self.next = loader.get_event
        self.count = 0
        # The value under each anchor with the number of values in it; None while it is being made.
        self.anchors: dict[str, tuple[Any, int] | None] = {}

    def document(self) -> Any:
        self.next()
        event = self.next()
        if isinstance(event, self.yaml.StreamEndEvent):
            return None
        value = self.value(self.next(), 0)
        # The end of the document is looked for, and nothing behind it.
        self.next()
        return value

    def fail(self, event: Any, what: str) -> InvalidText:
        return InvalidText(f"line {event.start_mark.line + 1}: {what}")

    def add(self, event: Any, values: int) -> None:
        self.count += values
        if self.count > source.VALUES_MAX:
            raise self.fail(event, f"more than {source.VALUES_MAX} values, those that aliases repeat included")

    def value(self, event: Any, depth: int) -> Any:
        if isinstance(event, self.yaml.AliasEvent):
            return self.alias(event)
        if depth > DEPTH_MAX:
            raise self.fail(event, f"nested deeper than {DEPTH_MAX} levels")
        before = self.count
        self.add(event, 1)
        if event.anchor is not None:
            self.anchors[event.anchor] = None
        value: Any
        if isinstance(event, self.yaml.ScalarEvent):
            value = self.scalar(event)
        elif isinstance(event, self.yaml.SequenceStartEvent):
            value = self.sequence(depth)
        else:
            value = self.mapping(depth)
        if event.anchor is not None:
            self.anchors[event.anchor] = (value, self.count - before)
        return value

    def alias(self, event: Any) -> Any:
        if event.anchor not in self.anchors:
            raise self.fail(event, f"no anchor {event.anchor!a} before this alias")
        anchored = self.anchors[event.anchor]
        if anchored is None:
            raise self.fail(event, f"the value of anchor {event.anchor!a} contains itself")
        value, size = anchored
        self.add(event, size)
        return value

    def sequence(self, depth: int) -> list[Any]:
        values = []
        while not isinstance(event := self.next(), self.yaml.SequenceEndEvent):
            values.append(self.value(event, depth + 1))
        return values

    def mapping(self, depth: int) -> dict[str, Any]:
        members: dict[str, Any] = {}
        while not isinstance(event := self.next(), self.yaml.MappingEndEvent):
            if self.is_merge(event):
                # Read as the members themselves: one that is there already is a duplicate, on either side.
                for other in self.merged(event, self.value(self.next(), depth + 1)):
                    for key, value in other.items():
                        self.put(event, members, key, value)
                continue
            key = self.key(event, self.value(event, depth + 1))
            self.put(event, members, key, self.value(self.next(), depth + 1))
        return members

    def is_merge(self, event: Any) -> bool:
        if not isinstance(event, self.yaml.ScalarEvent) or event.value != "<<":
            return False
        return bool(event.implicit[0]) or event.tag == TAG + "merge"

    def merged(self, event: Any, value: Any) -> list[dict[str, Any]]:
        others = value[::-1] if isinstance(value, list) else [value]
        if not all(isinstance(other, dict) for other in others):
            raise self.fail(event, "a merge key needs a mapping or a list of mappings")
        return others

    def put(self, event: Any, members: dict[str, Any], key: str, value: Any) -> None:
        if key in members:
            raise self.fail(event, f"key {key!a} stands twice in a mapping")
        members[key] = value

    def key(self, event: Any, key: Any) -> str:
        """A key as JSON has it. Go makes no key of null, of a list or mapping, or of what needs 64 bits unsigned."""
        if isinstance(key, str):
            return key
        if isinstance(key, bool):
            return "true" if key else "false"
        if isinstance(key, int) and key <= INT64[1]:
            return str(key)
        if isinstance(key, float):
            special = {"+Inf": ".inf", "-Inf": "-.inf", "NaN": ".nan"}
            text = float_text(key)
            return special.get(text, text)
        raise self.fail(event, f"{type(key).__name__} can't be a key")

    def scalar(self, event: Any) -> Any:
        tag, text = event.tag, event.value
        if tag is None and not event.implicit[0]:
            return text
        if tag == TAG + "binary":
            return self.binary(event)
        if tag not in RESOLVABLE or tag == TAG + "str":
            return text
        kind, value = resolve(text, timestamps=tag in (None, TAG + "timestamp"))
        if tag == TAG + "float" and kind == "int" and value <= INT64[1]:
            return float(value)
        if tag not in (None, TAG + kind):
            raise self.fail(event, f"{text[:40]!a} is no {tag.removeprefix(TAG)}")
        return value

    def binary(self, event: Any) -> str:
        try:
            data = base64.b64decode(event.value.replace("\r", "").replace("\n", ""), validate=True)
        except (binascii.Error, ValueError):
            raise self.fail(event, "no base64") from None
        return data.decode("utf-8", "replace")


def resolve(text: str, timestamps: bool = True) -> tuple[str, Any]:
    """The type and value that Go's YAML gives a plain scalar: null, bool, int, float, timestamp or str.

    A timestamp's value is its text. Numbers of base 60 do not exist there.
    """
    if text in WORDS:
        value = WORDS[text]
        return {type(None): "null", bool: "bool", float: "float"}[type(value)], value
    first = text[:1]
    if first == ".":
        return _float(text) if POINT_FLOAT.fullmatch(text) else ("str", text)
    if not first or first not in "+-0123456789":
        return "str", text
    if timestamps and TIMESTAMP.fullmatch(text):
        return "timestamp", text
    plain = text.replace("_", "")
    number = _integer(plain)
    if number is not None:
        return "int", number
    return _float(plain, text) if FLOAT.fullmatch(plain) else ("str", text)


def _integer(plain: str) -> int | None:
    match = INTEGER.fullmatch(plain)
    # Python takes the quadratic time of a long number, or refuses it; none of 64 bits is that long.
    if match is None or len(plain) > 70:
        return None
    sign, digits = match.groups()
    octal = len(digits) > 1 and digits[0] == "0" and digits[1].isdigit()
    number = int(digits, 8) if octal else int(digits, 0)
    if sign == "-":
        return -number if -number >= INT64[0] else None
    return number if number <= (INT64[1] if sign else UINT64_MAX) else None


def _float(plain: str, text: str = "") -> tuple[str, Any]:
    number = float(plain)
    # Out of range is no number to Go, and stays a string.
    return ("str", text or plain) if math.isinf(number) else ("float", number)
