# SPDX-License-Identifier: Apache-2.0
"""The C scanner and encoder, called the way we call them, are the json module."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cdi import jsontext
from cdi.jsontext import InvalidJson

TREE = Path(__file__).resolve().parents[2]

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)
spaces = st.text(alphabet=" \t\r\n", max_size=3)

# What a hostile or broken writer sends. Each is an error for the json module too, NaN and its like aside.
INVALID = (
    "",
    " \n ",
    "{",
    "[1, 2",
    "[1,]",
    '{"a" 1}',
    '{"a": 1,}',
    '{"a": }',
    "{1: 2}",
    "{'a': 1}",
    '"\\x"',
    '"\\u12"',
    '"\n"',
    '"abc',
    "tru",
    "nul",
    "01",
    "1.",
    "-",
    "+1",
    ".5",
    "0x10",
    "1 2",
    "{} {}",
    "[] // end",
    "\ufeff{}",
    "NaN",
    "[Infinity]",
    '{"a": -Infinity}',
    "[" * 100_000,
    '{"a":' * 100_000,
    "9" * 5_000,
    "\x00",
)

DOCUMENTS = (
    "null",
    " [ ] ",
    '{"a": {"b": [1, -2.5e3, true, false, null, "\\u00e9\\ud83d\\ude00\\n\\/"]}, "a": 2}',
    '"\\ud800"',
    "1e400",
    "-0",
    "123456789012345678901234567890",
    "0.1",
)


@given(values)
def test_a_round_trip_keeps_the_value(value: object) -> None:
    assert jsontext.loads(jsontext.dumps(value)) == value


@given(values)
def test_dumps_writes_what_json_writes(value: object) -> None:
    assert jsontext.dumps(value) == json.dumps(value, separators=(",", ":"))


@given(values, st.integers(0, 4), st.booleans(), spaces, spaces)
def test_loads_reads_what_json_reads(value: object, indent: int, ascii_only: bool, before: str, after: str) -> None:
    text = before + json.dumps(value, indent=indent or None, ensure_ascii=ascii_only) + after
    assert jsontext.loads(text) == json.loads(text)
    # A lone surrogate has no UTF-8; with ensure_ascii it is written as an escape.
    if ascii_only:
        assert jsontext.loads(text.encode()) == json.loads(text)


@settings(max_examples=300)
@given(values, st.data())
def test_a_damaged_document_is_judged_as_json_judges_it(value: object, data: st.DataObject) -> None:
    text = json.dumps(value)
    at = data.draw(st.integers(0, len(text)))
    size = data.draw(st.integers(0, 3))
    text = (
        text[:at] + data.draw(st.text(alphabet='[]{}",:\\ \n-+.eE0123456789abfntruls', max_size=3)) + text[at + size :]
    )
    try:
        expected = json.loads(text)
    except ValueError:
        with pytest.raises(InvalidJson):
            jsontext.loads(text)
    else:
        assert repr(jsontext.loads(text)) == repr(expected)


@pytest.mark.parametrize("text", DOCUMENTS)
def test_documents(text: str) -> None:
    assert repr(jsontext.loads(text)) == repr(json.loads(text))


@pytest.mark.parametrize("text", INVALID, ids=lambda text: repr(text[:12]))
def test_invalid_text_is_refused(text: str) -> None:
    with pytest.raises(InvalidJson):
        jsontext.loads(text)


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ('{"a": 1}\n x', "line 2 column 2"),
        ("\n\n  [1, ?]", "line 3 column 7"),
        ('{"a": "\\q"}', "line 1 column 8"),
        ("", "line 1 column 1"),
    ],
)
def test_the_message_says_where(text: str, place: str) -> None:
    with pytest.raises(InvalidJson, match=place):
        jsontext.loads(text)


def test_bytes_that_are_not_utf_8() -> None:
    with pytest.raises(InvalidJson, match="byte 2 is not UTF-8"):
        jsontext.loads(b'["\xff"]')


@pytest.mark.parametrize("value", [math.nan, math.inf, [-math.inf], {"a": math.nan}])
def test_a_number_without_json_form_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match="JSON"):
        jsontext.dumps(value)


def test_members_in_their_order_twice_and_refused() -> None:
    """`pairs` sees what a dict would hide."""
    assert jsontext.loads('{"a": 1, "b": {"a": 2}, "a": 3}', pairs=list) == [("a", 1), ("b", [("a", 2)]), ("a", 3)]

    def refuse(pairs: object) -> None:
        raise ValueError("no objects")

    with pytest.raises(InvalidJson, match="no objects"):
        jsontext.loads("[{}]", pairs=refuse)


def test_a_value_that_holds_itself_is_refused() -> None:
    value: list[object] = []
    value.append(value)
    with pytest.raises(ValueError, match="Circular"):
        jsontext.dumps(value)


@pytest.mark.parametrize("value", [{1, 2}, b"bytes", {"a": object()}])
def test_an_object_of_another_type_is_refused(value: object) -> None:
    with pytest.raises(TypeError):
        jsontext.dumps(value)


# One process judges all: `json` is loaded here, in pytest, and on a container start it is not. The C scanner
# then has no JSONDecodeError to raise.
CHILD = """
import sys
sys.path.insert(0, {tree!r})
{prelude}
from cdi import jsontext
for line in sys.stdin.buffer.read().decode("utf-8", "surrogatepass").split("\\x1e"):
    try:
        sys.stdout.write(ascii(jsontext.loads(line)) + "\\n")
    except jsontext.InvalidJson as error:
        sys.stdout.write("invalid\\n")
{end}
"""
WITHOUT_C = 'sys.modules["_json"] = None'
JSON_NOT_LOADED = 'assert "json" not in sys.modules, "json was loaded"'


def judge(texts: tuple[str, ...], prelude: str = "", end: str = "") -> list[str]:
    """What a fresh interpreter makes of each text."""
    program = CHILD.format(tree=str(TREE), prelude=prelude, end=end)
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-B", "-c", program],
        input="\x1e".join(texts).encode("utf-8", "surrogatepass"),
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode().splitlines()


@pytest.mark.parametrize("prelude", ["", WITHOUT_C], ids=["with _json", "without _json"])
def test_a_fresh_interpreter_judges_the_same(prelude: str) -> None:
    answers = judge(DOCUMENTS + INVALID, prelude)
    assert answers == [ascii(json.loads(text)) for text in DOCUMENTS] + ["invalid"] * len(INVALID)


def test_each_invalid_text_alone_in_a_fresh_interpreter() -> None:
    """The first error of a process is the one that finds `json` absent."""
    for text in ('{"a" 1}', "[1,", '"\\x"', "NaN", "x", "[] x"):
        assert judge((text,)) == ["invalid"]


def test_a_valid_document_needs_no_json_module() -> None:
    judge(DOCUMENTS, end=JSON_NOT_LOADED)


def test_dumps_without_the_c_encoder() -> None:
    program = f"""
import sys
sys.path.insert(0, {str(TREE)!r})
{WITHOUT_C}
from cdi import jsontext
sys.stdout.write(jsontext.dumps({{"a": [1, 2.5, None, True, "\\u00e9"]}}))
"""
    done = subprocess.run([sys.executable, "-I", "-S", "-B", "-c", program], capture_output=True, check=True)
    assert done.stdout == b'{"a":[1,2.5,null,true,"\\u00e9"]}'
