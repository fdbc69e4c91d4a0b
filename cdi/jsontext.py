# SPDX-License-Identifier: Apache-2.0
"""JSON at a fifth of the json module's start-up.

Hot. `json` drags in `re` (8 ms); its C scanner and encoder in `_json` need neither. Both are private to
CPython, so `json` itself stands behind them: any surprise in how they are called falls back to it, and a
test holds the two equal.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    Pairs = Callable[[list[tuple[str, Any]]], Any]

WHITESPACE = " \t\n\r"


class InvalidJson(ValueError):
    """Text that is no JSON document. The message says where."""


class _Context:
    """What `_json.make_scanner` reads off its argument: the settings of json.JSONDecoder's defaults."""

    __slots__ = (
        "memo",
        "object_hook",
        "object_pairs_hook",
        "parse_constant",
        "parse_float",
        "parse_int",
        "strict",
    )

    def __init__(self, pairs: Pairs | None) -> None:
        self.strict = True
        self.object_hook = None
        self.object_pairs_hook = pairs
        self.parse_float = float
        self.parse_int = int
        self.parse_constant = _refuse
        self.memo: dict[str, str] = {}


def _refuse(name: str) -> Any:
    raise InvalidJson(f"{name} is no JSON value")


def _scanner(pairs: Pairs | None) -> Any:
    try:
        from _json import make_scanner
    except ImportError:
        return None
    context: Any = _Context(pairs)
    return make_scanner(context)


def loads(text: str | bytes, pairs: Pairs | None = None) -> Any:
    """The value of a JSON document. Raises InvalidJson, with line and column, also for NaN and for nesting
    deeper than the interpreter's recursion limit. `pairs` makes the value of each object of its members, which
    may name a key twice; it may raise a ValueError."""
    if isinstance(text, bytes):
        text = _decode(text)
    try:
        scanner = _scanner(pairs)
        if scanner is None:
            return _loads_slowly(text, pairs)
        value, end = scanner(text, _skip(text, 0))
        end = _skip(text, end)
    except StopIteration as error:
        raise InvalidJson(_place("a value is missing", text, error.value)) from None
    except RecursionError:
        raise InvalidJson("nested too deeply") from None
    except InvalidJson:
        raise
    except ValueError as error:
        # Behind the semicolon, of a number with thousands of digits: what a programmer can do about it.
        raise InvalidJson(str(error).partition(";")[0]) from None
    except SystemError:
        # The C scanner takes its exception from json.decoder without importing it: what is wrong with the
        # text is told by going over it once more with that module in place.
        return _loads_slowly(text, pairs)
    if end != len(text):
        raise InvalidJson(_place("text after the document's end", text, end))
    return value


def _decode(text: bytes) -> str:
    try:
        return text.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidJson(f"byte {error.start} is not UTF-8") from None


def _skip(text: str, at: int) -> int:
    while at < len(text) and text[at] in WHITESPACE:
        at += 1
    return at


def _place(what: str, text: str, at: int) -> str:
    line = text.count("\n", 0, at) + 1
    return f"{what}: line {line} column {at - text.rfind(chr(10), 0, at)}"


def _loads_slowly(text: str, pairs: Pairs | None = None) -> Any:
    import json

    try:
        return json.loads(text, parse_constant=_refuse, object_pairs_hook=pairs)
    except json.JSONDecodeError as error:
        raise InvalidJson(str(error)) from None
    except RecursionError:
        raise InvalidJson("nested too deeply") from None


def dumps(value: Any) -> str:
    """A compact JSON document; keys keep their order. Raises ValueError for NaN and for a circle, TypeError
    for a type that JSON does not have."""
    encoder = _encoder()
    if encoder is None:
        return _dumps_slowly(value)
    return "".join(encoder(value, 0))


def _encoder() -> Any:
    try:
        from _json import encode_basestring_ascii, make_encoder
    except ImportError:
        return None
    try:
        # (markers, default, encoder, indent, key_separator, item_separator, sort_keys, skipkeys, allow_nan)
        return make_encoder({}, _not_json, encode_basestring_ascii, None, ":", ",", False, False, False)
    except TypeError:
        return None


def _not_json(value: Any) -> Any:
    raise TypeError(f"a {type(value).__name__} is no JSON value")


def _dumps_slowly(value: Any) -> str:
    import json

    return json.dumps(value, separators=(",", ":"), allow_nan=False)
