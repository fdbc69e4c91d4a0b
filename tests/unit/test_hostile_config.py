# SPDX-License-Identifier: Apache-2.0
"""A config.json that wants to wedge its reader: each entry that reads one says one clear error, soon, and within bounds
of memory."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from hook import state

TREE = Path(__file__).resolve().parents[2]
PLACES = [str(TREE), *(folder for folder in sys.path if folder.startswith("/"))]
# As the installed entries start, with as much memory as argv[1] says.
HOOK = (
    "import resource, sys\n"
    "resource.setrlimit(resource.RLIMIT_AS, 2 * (int(sys.argv.pop(1)),))\n"
    f"sys.path[:0] = {PLACES!r}\n"
)
HOT = HOOK + "from hook import start; start.main()"
COLD = HOOK + "from hook import cli; sys.exit(cli.main())"
# The costliest of them takes 0.4 s on a quick machine that is idle.
SECONDS = 3.0
MEMORY = 256 << 20

START = '{"process": {"env": ["NVIDIA_VISIBLE_DEVICES=all"]}, "linux": {"namespaces": [{"type": "mount"}]}, '
CONFIGS = {
    "50 MB": (b'{"a": "' + 50_000_000 * b"x" + b'"}', "config.json: read: File too large"),
    "100,000 lists deep": (100_000 * b"[" + 100_000 * b"]", "is no JSON: nested too deeply"),
    "100,000 objects deep": (100_000 * b'{"a":' + b"1" + 100_000 * b"}", "is no JSON: nested too deeply"),
    "100,000 deep, never closed": (100_000 * b'{"a":[', "is no JSON: nested too deeply"),
    "nothing": (b"", "is no JSON: a value is missing: line 1 column 1"),
    "no JSON": (b"#!/bin/sh\nexit 0\n", "is no JSON: a value is missing: line 1 column 1"),
    "cut off": (b'{"root": {"path": "/roo', "is no JSON: Unterminated string"),
    "NUL bytes": (1000 * b"\0", "is no JSON: a value is missing: line 1 column 1"),
    "a NUL byte in a text": (b'{"root": {"path": "/a\0b"}}', "is no JSON: Invalid control character"),
    "no UTF-8": (b'{"root": {"path": "/\xff\xfe"}}', "is no JSON: byte 20 is not UTF-8"),
    "UTF-16": (json.dumps({"root": {"path": "/"}}).encode("utf-16"), "is no JSON: byte 0 is not UTF-8"),
    "not a number": (b'{"a": NaN}', "is no JSON: NaN is no JSON value"),
    "a key twice": (
        b'{"root": {"path": "/one"}, "root": {"path": "/other"}}',
        "is no JSON: the key 'root' is there twice in one object",
    ),
    "a key twice, deep inside": (
        b'{"root": {"path": "/"}, "linux": {"resources": {"devices": [], "devices": []}}}',
        "is no JSON: the key 'devices' is there twice in one object",
    ),
    "a key twice, the last of 200,000": (
        b"{" + b",".join(b'"%d": 0' % (number % 200_000) for number in range(200_001)) + b"}",
        "is no JSON: the key '0' is there twice in one object",
    ),
    "an object where a list belongs": (
        (START + '"root": {"path": "/x"}, "mounts": {}}').encode(),
        "config.json: `mounts` is a dict, not a list",
    ),
    "a root path with a NUL": (
        (START + r'"root": {"path": "/a\u0000b"}}').encode(),
        r"root.path is '/a\x00b', which names no file",
    ),
    "a root path that is half a character": (
        (START + r'"root": {"path": "/a\ud800b"}}').encode(),
        r"root.path is '/a\ud800b', which names no file",
    ),
    "a root path that is a number": (
        (START + '"root": {"path": 1e999}}').encode(),
        "root.path is inf, which names no file",
    ),
}
if hasattr(sys, "set_int_max_str_digits"):
    # Releases of Python before 3.10.7 read them all.
    CONFIGS["a million digits"] = (b'{"a": ' + 1_000_000 * b"9" + b"}", "is no JSON: Exceeds the limit (4300 digits)")


def spend(verb: str, bundle: Path, memory: int) -> tuple[int, str, float]:
    """An entry's exit status, what it said, and its seconds of processor time: those of the clock are everybody's."""
    command = [sys.executable, "-I", "-S", "-c", COLD if verb == "plan" else HOT, str(memory), verb]
    if verb == "plan":
        command += ["--bundle", str(bundle)]
    text = json.dumps({"ociVersion": "1.0.2", "id": "x", "pid": os.getpid(), "bundle": str(bundle)})
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False, timeout=60)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return done.returncode, done.stdout + done.stderr, used


def clear(said: str, error: str) -> bool:
    """Two lines: the error, of a length that can be read, and the remedy."""
    lines = said.splitlines()
    return (
        [line.split(": ")[0] for line in lines] == ["nvhook", "  remedy"]
        and lines[0].startswith("nvhook: error: ")
        and error in lines[0]
        and len(lines[0]) < 1000
    )


@pytest.mark.parametrize("verb", ["prestart", "create-container", "plan"])
@pytest.mark.parametrize("name", CONFIGS)
def test_one_clear_error(tmp_path: Path, verb: str, name: str) -> None:
    content, error = CONFIGS[name]
    (tmp_path / "config.json").write_bytes(content)
    status, said, used = spend(verb, tmp_path, MEMORY)
    assert status == 1 and clear(said, error), said
    assert used < SECONDS


@pytest.mark.parametrize(
    "unit",
    [b"[],", b"{},", b'{"":0},', b'"",', b"-1e9,", b'"\\ud83d\\ude00",', b'"\\u0000",', b"[[[[[[[[]]]]]]]],"],
    ids=bytes.decode,
)
def test_what_the_greatest_file_costs(tmp_path: Path, unit: bytes) -> None:
    """As much as is read at all, of what takes most memory or most time for its size: nothing grows past a multiple."""
    count = (state.CONFIG_MAX - 100) // len(unit)
    (tmp_path / "config.json").write_bytes(b'{"annotations": [' + count * unit + b"0]}")
    status, said, used = spend("prestart", tmp_path, 1 << 30)
    assert status == 1 and clear(said, "root.path is missing"), said
    assert used < 5 * SECONDS


@pytest.mark.parametrize("kind", ["fifo", "folder", "link to a device"])
def test_no_regular_file(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "config.json"
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to("/dev/zero")
    status, said, used = spend("prestart", tmp_path, MEMORY)
    assert status == 1 and clear(said, f"{path} is no regular file"), said
    assert used < SECONDS


@pytest.mark.parametrize("pid", ["true", "-1", "1e3", '"1"', str(10**20), str(1 << 22)])
def test_a_pid_that_is_none(tmp_path: Path, pid: str) -> None:
    (tmp_path / "config.json").write_text('{"root": {"path": "/"}}')
    text = f'{{"bundle": "{tmp_path}", "pid": {pid}}}'
    command = [sys.executable, "-I", "-S", "-c", HOT, str(MEMORY), "prestart"]
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 1 and clear(done.stderr, "the container state's pid is "), done.stderr
