# SPDX-License-Identifier: Apache-2.0
"""cdi.reader and cdi.source: what a spec file's text means, and that no file makes them slow or large."""

from __future__ import annotations

import base64
import json
import os
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from cdi import reader, registry, source, validate
from tests import cdidata

TREE = Path(__file__).resolve().parents[2]


def read(text: str) -> Any:
    return reader.parse(text)


# --- scalars

# As sigs.k8s.io/yaml's copy of yaml.v2 resolves them (resolve.go), read there.
SCALARS: list[tuple[str, Any]] = [
    ("0", 0),
    ("-0", 0),
    ("+7", 7),
    ("010", 8),
    ("-010", -8),
    ("0o17", 15),
    ("0O17", 15),
    ("08", 8.0),
    ("0x1F", 31),
    ("0b101", 5),
    ("-0b101", -5),
    ("1_000", 1000),
    ("1__", 1),
    ("9223372036854775807", 2**63 - 1),
    ("18446744073709551615", 2**64 - 1),
    ("18446744073709551616", 2.0**64),
    ("-9223372036854775809", -(2.0**63)),
    ("1e3", 1000.0),
    ("1E-3", 0.001),
    ("1.", 1.0),
    (".5", 0.5),
    ("-.5", -0.5),
    ("1e999", "1e999"),
    (".inf", float("inf")),
    ("-.INF", float("-inf")),
    ("yes", True),
    ("Y", True),
    ("n", False),
    ("Off", False),
    ("oN", "oN"),
    ("~", None),
    ("NULL", None),
    ("1:20", "1:20"),
    ("190:20:30", "190:20:30"),
    ("2001-01-01", "2001-01-01"),
    ("0xg", "0xg"),
    ("1 2", "1 2"),
    ("-", "-"),
    ("+", "+"),
    ("0b", "0b"),
    (".e3", ".e3"),
    ("\N{ARABIC-INDIC DIGIT ONE}", "\N{ARABIC-INDIC DIGIT ONE}"),
    ("=", "="),
    ("nvidia.com/gpu", "nvidia.com/gpu"),
]


@pytest.mark.parametrize(("text", "value"), SCALARS)
def test_plain_scalars(text: str, value: Any) -> None:
    found = reader.resolve(text)[1]
    assert (type(found), found) == (type(value), value)


def test_not_a_number() -> None:
    found = reader.resolve(".nan")[1]
    assert isinstance(found, float) and found != found


@pytest.mark.parametrize("text", [text for text, _ in SCALARS if text.isascii()])
def test_a_quoted_scalar_is_its_text(text: str) -> None:
    assert read(f'a: "{text}"\nb: \'{text}\'\nc: !!str "{text}"\n') == {"a": text, "b": text, "c": text}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("!!str 0", "0"),
        ("!!str yes", "yes"),
        ("!!int '7'", 7),
        ("!!float 3", 3.0),
        ("!!bool y", True),
        ("!!null ~", None),
        ("!own 7", "7"),
        ("! 7", "7"),
        ("!!timestamp 2001-01-01", "2001-01-01"),
        (f"!!binary {base64.b64encode(b'A=1').decode()}", "A=1"),
    ],
)
def test_tags(text: str, value: Any) -> None:
    found = read(f"a: {text}\n")["a"]
    assert (type(found), found) == (type(value), value)


@pytest.mark.parametrize("text", ["!!int x", "!!bool 1", "!!float x", "!!null x", "!!binary '*'", "!!timestamp x"])
def test_tags_that_do_not_fit(text: str) -> None:
    with pytest.raises(reader.InvalidText, match="^line 2: "):
        read(f"# first\na: {text}\n")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (True, "true"),
        (8, "8"),
        (2**64 - 1, "18446744073709551615"),
        (1000.0, "1000"),
        (100000.0, "100000"),
        (1e6, "1e+06"),
        (0.5, "0.5"),
        (0.0001, "0.0001"),
        (1e-5, "1e-05"),
        (0.1, "0.1"),
        (123456789.5, "1.2345679e+08"),
        (-2.25, "-2.25"),
        (1e300, "+Inf"),
        (float("-inf"), "-Inf"),
        (float("nan"), "NaN"),
    ],
)
def test_scalars_where_a_string_belongs(value: Any, text: str) -> None:
    """Go: strconv.FormatFloat(value, 'g', -1, 32)."""
    hook = {"hookName": "poststop", "path": "/a", "args": [value]}
    spec = validate.check(cdidata.with_edits(hooks=[hook])).spec
    assert spec["devices"][0]["containerEdits"]["hooks"][0]["args"] == [text]


# --- structure


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("a: 1\n---\nb: [\n", {"a": 1}),
        ("a: 1\n...\n[", {"a": 1}),
        ("--- {a: 1}\n", {"a": 1}),
        ('{"a": 1} x', {"a": 1}),
        ("{'a': [1,], }", {"a": [1]}),
        ("\ufeffa: 1\r\n", {"a": 1}),
        ("a: &x [1]\nb: *x\n", {"a": [1], "b": [1]}),
        ("a: &x {b: 1}\nc: {<<: *x, d: 2}\n", {"a": {"b": 1}, "c": {"b": 1, "d": 2}}),
        ("<<: [{a: 1}, {b: 2}]\n", {"a": 1, "b": 2}),
        ("'<<': 1\n", {"<<": 1}),
        ("1: a\ntrue: b\n.inf: c\n0.5: d\n", {"1": "a", "true": "b", ".inf": "c", "0.5": "d"}),
        ("a: &x 1\nb: &x 2\nc: *x\n", {"a": 1, "b": 2, "c": 2}),
        ("text", "text"),
    ],
)
def test_structure(text: str, value: Any) -> None:
    assert read(text) == value


def test_utf_16_is_read() -> None:
    assert reader.parse("a: 1\n".encode("utf-16")) == {"a": 1}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "holds no data"),
        ("# nothing\n", "holds no data"),
        ("--- ~\n", "holds no data"),
        ("a: 1\na: 2\n", "line 2: key 'a' stands twice"),
        ('{"a": 1,\n "b": {"c": 1, "c": 2}}', "line 2: key 'c' stands twice"),
        ("a: &x {b: 1}\nc: {<<: *x, b: 2}\n", "key 'b' stands twice"),
        ("a: &x {b: 1}\nc: {b: 2, <<: *x}\n", "key 'b' stands twice"),
        ("<<: 1\n", "a merge key needs"),
        ("<<: [1]\n", "a merge key needs"),
        ("a: *x\n", "no anchor 'x'"),
        ("a: &x [*x]\n", "contains itself"),
        ("~: 1\n", "NoneType can't be a key"),
        ("? [a]\n: 1\n", "list can't be a key"),
        ("18446744073709551615: 1\n", "int can't be a key"),
        ("a:\n\t- b\n", "line 2: "),
        ("{", "line 2: "),
        ("a: [", "line 2: "),
        ("\t- a", "line 1: "),
        ("a: b\n]", "line 2: "),
        ("a: \0", ""),
        ('"\\ud83d\\ude00"', "line 1: "),
    ],
)
def test_what_is_refused(text: str, reason: str) -> None:
    with pytest.raises(reader.InvalidText) as caught:
        read(text)
    assert reason in str(caught.value) and "\n" not in str(caught.value)


def test_bytes_that_are_no_utf_8() -> None:
    with pytest.raises(reader.InvalidText):
        reader.parse(b"a: \xff\xff\n")


def test_without_libyaml_the_values_are_the_same() -> None:
    """yaml.CSafeLoader is there only where PyYAML was built with libyaml."""
    if not hasattr(yaml, "CSafeLoader"):
        pytest.skip("needs a PyYAML with libyaml")
    text = "a: &x [1, 010, yes, '2', {b: ~}]\nc: *x\nd: {<<: {e: 1e3}}\n---\n{broken"
    program = (
        "import json, sys, yaml\n"
        "if sys.argv[1] == 'without': del yaml.CSafeLoader\n"
        "from cdi import reader; print(json.dumps(reader.parse(sys.argv[2])))"
    )
    outs = [
        subprocess.run(
            [sys.executable, "-c", program, which, text],
            env={"PYTHONPATH": str(TREE), "PATH": os.environ["PATH"]},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for which in ("with", "without")
    ]
    assert outs[0] == outs[1] == json.dumps(read(text)) + "\n"


# --- plain JSON, which hot code reads without YAML


@pytest.mark.parametrize(
    "text",
    ['{"a": [1, 2.5, true, null, "x"]}', ' {"a": 1}', '{"a": 1} x', '{"a": 1, "a": 2}', "{a: 1}", '{"a": "\\u00e9"}'],
)
def test_plain_json_is_what_yaml_reads_or_nothing(text: str) -> None:
    try:
        value = source.plain_json(text.encode())
    except source.NotPlain:
        return
    assert value == read(text)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"- a",
        b'{"a": 1, "a": 2}',
        b'{"a": 1} x',
        b'{"a": "\x7f"}',
        b'{"a": "\\ud83d\\ude00"}',
        '{"a": "\N{SNOWMAN}"}'.encode(),
        b'{"' + b"k" * 1100 + b'": 1}',
        b'{"a": [' + b"1," * 100_001 + b"1]}",
        b'{"a": ' * 10_000,
        b'{"a": ' + b"9" * 5000 + b"}",
    ],
)
def test_what_is_not_plain(data: bytes) -> None:
    with pytest.raises(source.NotPlain):
        source.plain_json(data)


# --- bounds: in a child, whose time and memory are measured

PROGRAM = """
import json, sys, time
from cdi import reader
try:
    reader.load(sys.argv[1])
except (OSError, ValueError) as error:
    said = str(error)
else:
    said = "read"
# VmHWM begins anew at exec; ru_maxrss would be at least what the parent had.
high = next(line for line in open("/proc/self/status") if line.startswith("VmHWM:"))
print(json.dumps([said, time.process_time(), int(high.split()[1]) >> 10]))
"""


def measured(path: Path) -> tuple[str, float, int]:
    """What the reader says of a file, in a process of its own; its seconds of processor time, its MiB at most."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(path)],
        env={"PYTHONPATH": str(TREE), "PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    said, seconds, mebibytes = json.loads(done.stdout)
    return said, seconds, mebibytes


def text_file(text: str) -> Callable[[Path], object]:
    return lambda path: path.write_text(text[: source.SIZE_MAX])


def sparse(path: Path) -> None:
    path.touch()
    os.truncate(path, 2 << 30)


BOMB = "a: &a [x,x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{chr(98 + level)}: &{chr(98 + level)} [{','.join([f'*{chr(97 + level)}'] * 10)}]\n" for level in range(12)
)

HOSTILE: dict[str, tuple[Callable[[Path], object], str]] = {
    "sparse": (sparse, "File too large"),
    "fifo": (os.mkfifo, "not a regular file"),
    "folder": (Path.mkdir, "not a regular file"),
    "10-mb": (lambda path: path.write_bytes(b"a: b\n" * (2 << 20)), "File too large"),
    "ten-million-entries": (lambda path: path.write_bytes(b"- 1\n" * 10_000_000), "File too large"),
    "entries": (text_file("- 1\n" * (1 << 20)), "more than 100000 values"),
    "flow-entries": (text_file("[" + "1," * (2 << 20)), "more than 100000 values"),
    "keys": (text_file("".join(f"k{index}: 1\n" for index in range(400_000))), "more than 100000 values"),
    "anchors": (text_file("".join(f"- &a{index} x\n" for index in range(400_000))), "more than 100000 values"),
    "aliases": (text_file("- &a x\n" + "- *a\n" * (1 << 20)), "more than 100000 values"),
    "billion-laughs": (text_file(BOMB), "more than 100000 values"),
    "brackets": (text_file("[" * (4 << 20)), "nest"),
    "braces": (text_file("{a: " * (1 << 20)), "nest"),
    "dashes": (text_file("- " * (2 << 20)), "nest"),
    "questions": (text_file("? " * (2 << 20)), "nest"),
    "indents": (text_file("".join(" " * level + "a:\n" for level in range(2000))), "nest"),
    "one-scalar": (text_file("a" * (4 << 20)), "read"),
    "one-number": (text_file("a: " + "9" * (4 << 20)), "read"),
    "one-string": (text_file('"' + "a " * (4 << 20)), "line 1: "),
    "comments": (text_file("# x\n" * (1 << 20)), "holds no data"),
    "newlines": (text_file("\n" * (4 << 20)), "holds no data"),
    "zeros": (lambda path: path.write_bytes(bytes(4 << 20)), ""),
    "unknown-fields": (text_file("".join(f"k{index}: 1\n" for index in range(49_000))), "read"),
    "no-file": (lambda path: None, "No such file"),
    "loop": (lambda path: path.symlink_to(path), "Too many levels"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_no_file_takes_a_second_or_100_mb(tmp_path: Path, name: str) -> None:
    make, reason = HOSTILE[name]
    path = tmp_path / "spec.yaml"
    make(path)
    said, seconds, mebibytes = measured(path)
    assert reason in said and "\n" not in said
    # Less than half a second on a quick machine that is idle.
    assert seconds < 3
    assert mebibytes < 100


def test_a_device_is_not_opened(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root: makes a device node")
    path = tmp_path / "spec.yaml"
    # Opening this one hangs until a line is there, were it not for O_NONBLOCK; reading never ends.
    os.mknod(path, 0o600 | stat.S_IFCHR, os.makedev(1, 5))
    with pytest.raises(OSError, match="not a regular file"):
        source.read_file(str(path))


def test_a_file_that_is_replaced_is_read_whole(tmp_path: Path) -> None:
    """By rename, as writers of specs do it: one of the two, never a mixture."""
    path = tmp_path / "spec.yaml"
    texts = {letter * 300_000 for letter in "ab"}
    path.write_text("a" * 300_000)
    child = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import os, sys\n"
            "while True:\n"
            "    for letter in 'ab':\n"
            "        open(sys.argv[1] + '.new', 'w').write(letter * 300_000)\n"
            "        os.rename(sys.argv[1] + '.new', sys.argv[1])\n",
            str(path),
        ]
    )
    try:
        seen = {source.read_file(str(path)).decode() for _ in range(300)}
    finally:
        child.kill()
        child.wait()
    assert seen <= texts


def test_a_file_that_is_written_in_place_is_read_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "spec.yaml"
    path.write_text("a" * 300_000)
    child = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import sys\n"
            "while True:\n"
            "    for letter in 'ab':\n"
            "        with open(sys.argv[1], 'w') as file:\n"
            "            file.write(letter * 300_000)\n",
            str(path),
        ]
    )
    try:
        for _ in range(300):
            try:
                data = source.read_file(str(path))
            except OSError as error:
                assert "written to while it was read" in str(error)
                continue
            # Between the writer's steps the file is empty or has its first blocks; then, at rest, all.
            assert len(set(data)) <= 1
    finally:
        child.kill()
        child.wait()


def test_the_bounds_leave_room(tmp_path: Path) -> None:
    """Sixteen GPUs of seven MIG instances each, by index and UUID, with a hundred mounts."""
    nodes = [{"path": f"/dev/nvidia-caps/nvidia-cap{index}", "fileMode": 438} for index in range(4)]
    names = [f"{form}{gpu}:{part}" for form in ("g", "MIG-0123456789ab-") for gpu in range(16) for part in range(7)]
    mounts = [{"hostPath": f"/usr/lib/lib{i}.so", "containerPath": f"/usr/lib/lib{i}.so"} for i in range(100)]
    spec = cdidata.minimal(
        devices=[{"name": name, "containerEdits": {"deviceNodes": nodes}} for name in names],
        containerEdits={"mounts": mounts},
    )
    path = tmp_path / "large.json"
    path.write_text(json.dumps(spec, indent=4))
    assert reader.load(str(path)).problems() == []
    assert registry.load_plain(str(path)).spec == reader.load(str(path)).spec
