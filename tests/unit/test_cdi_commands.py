# SPDX-License-Identifier: Apache-2.0
"""The verbs list, validate, inject and transform: what they print, where, and how they end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cdi import cli, reader
from hook import cli as nvhook
from tests import cdidata

TREE = Path(__file__).resolve().parents[2]


def write(path: Path, spec: Any) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(spec))
    return str(path)


def command(*words: str, stdin: str | bytes = "") -> subprocess.CompletedProcess[str]:
    """The command in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", "import sys; from cdi import cli; sys.exit(cli.main())", *words],
        env={"PYTHONPATH": str(TREE), "PATH": os.environ["PATH"]},
        input=stdin.encode() if isinstance(stdin, str) else stdin,
        capture_output=True,
        check=False,
    )
    return subprocess.CompletedProcess(done.args, done.returncode, done.stdout.decode(), done.stderr.decode())


# --- list


def folders(tmp_path: Path) -> list[str]:
    write(tmp_path / "low/a.json", cdidata.minimal())
    write(tmp_path / "high/b.json", cdidata.minimal())
    write(tmp_path / "high/c.json", cdidata.minimal(kind="acme.test/gadget"))
    write(tmp_path / "high/d.json", cdidata.minimal(kind="acme.test/gadget"))
    write(tmp_path / "high/e.json", cdidata.minimal(cdiVersion="9", kind="x"))
    write(tmp_path / "high/f.yml", {})
    return ["--spec-dir", str(tmp_path / "low"), "--spec-dir", str(tmp_path / "high")]


def test_list_for_a_person(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["list", *folders(tmp_path)]) == 0
    printed = capsys.readouterr()
    high = tmp_path / "high"
    assert printed.out == f"acme.test/widget=w0\t{high}/b.json\n"
    assert printed.err.splitlines() == [
        f"nvhook: warning: acme.test/widget=w0 in {tmp_path}/low/a.json is shadowed by {high}/b.json",
        f"nvhook: warning: acme.test/gadget=w0 is unresolvable: defined by each of {high}/c.json and {high}/d.json",
        f"nvhook: warning: {high}/e.json is not read: cdiVersion: '9' is no version that readers know",
        f"nvhook: warning: {high}/e.json is not read: kind: 'x' is no kind: it has no slash between vendor and class",
        f"nvhook: warning: {high}/f.yml is skipped: its name ends neither in .json nor in .yaml",
    ]


def test_list_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["list", "--json", *folders(tmp_path)]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert [(item["name"], item["shadows"]) for item in printed["devices"]] == [
        ("acme.test/widget=w0", [f"{tmp_path}/low/a.json"])
    ]
    assert [item["name"] for item in printed["conflicts"]] == ["acme.test/gadget=w0"]
    assert [len(item["reasons"]) for item in printed["failed"]] == [2]
    assert [item["path"] for item in printed["skipped"]] == [f"{tmp_path}/high/f.yml"]


def test_a_linked_folder_is_told_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "real/a.json", cdidata.minimal())
    (tmp_path / "link").symlink_to("real")
    assert cli.main(["list", "--spec-dir", str(tmp_path / "link")]) == 0
    printed = capsys.readouterr()
    assert printed.out == f"acme.test/widget=w0\t{tmp_path}/link/a.json\n"
    assert printed.err == (
        f"nvhook: warning: {tmp_path}/link is a link: no release of the CDI library up to 1.1.0 looks into it\n"
    )


def test_names_that_are_no_text_are_shown_as_text(tmp_path: Path) -> None:
    """A folder may hold a name that is no UTF-8, or that would draw on the terminal."""
    folder = os.fsencode(tmp_path)
    for name in (b"\xff.json", b"a\x1b[1m\n.json", b"b\n.txt"):
        with open(folder + b"/" + name, "w") as file:
            json.dump(cdidata.minimal(kind="acme.test/" + "ab"[name == b"\xff.json"] * 2), file)
    done = command("list", "--spec-dir", str(tmp_path))
    assert done.returncode == 0
    assert done.stdout.splitlines() == [
        f"acme.test/aa=w0\t{tmp_path}/a\\x1b[1m\\n.json",
        f"acme.test/bb=w0\t{tmp_path}/\\udcff.json",
    ]
    assert done.stderr == (
        f"nvhook: warning: {tmp_path}/b\\n.txt is skipped: its name ends neither in .json nor in .yaml\n"
    )
    spec = cdidata.minimal(cdiVersion="0.6.0", annotations={"a\n\x1b": {}})
    done = command("validate", write(tmp_path / "c.json", spec))
    assert done.stdout.splitlines()[1] == "  annotations.a\\n\\x1b: must be a string"


# --- watch


def test_watching_a_root_that_is_none(tmp_path: Path) -> None:
    """Two lines each, as of the other verbs: no folder, and one without the place where the inventory is kept."""
    done = command("watch", "--host-root", "/nope", "--once")
    assert (done.returncode, done.stdout) == (1, "")
    what = "nvhook: error: cannot open the host root /nope: No such file or directory"
    assert done.stderr.splitlines() == [what, "  remedy: give an existing folder"]
    done = command("watch", "--host-root", str(tmp_path), "--once")
    assert done.returncode == 1
    what = "nvhook: error: no place to keep the inventory: there is no /run"
    remedy = f"  remedy: make {tmp_path}/run, or give as --host-root the folder that is the host's /"
    assert done.stderr.splitlines() == [what, remedy]


# --- validate


def test_validate_for_a_person(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = write(tmp_path / "good.json", cdidata.minimal())
    bad = write(tmp_path / "bad.json", cdidata.with_edits(env=["A", "B"], mounts=[{"hostPath": "/a"}]))
    old = write(tmp_path / "old.json", cdidata.minimal(devices=[]))
    text = tmp_path / "text.yaml"
    text.write_text("a: 1\na: 2\n")
    assert cli.main(["validate", good, bad, old, str(text)]) == 1
    edits = "devices[0].containerEdits"
    assert capsys.readouterr().out.splitlines() == [
        f"{good}: valid, acme.test/widget, 1 device; read by library 0.5.4 and newer",
        f"{bad}: refused",
        f"  {edits}.env[0]: 'A' is no NAME=VALUE",
        f"  {edits}.env[1]: 'B' is no NAME=VALUE",
        f"  {edits}.mounts[0].containerPath: must not be missing or empty",
        f"{old}: refused; only library 0.5.4 to 0.8.1 reads it",
        "  devices: at least one device is needed",
        f"{text}: refused",
        "  line 2: key 'a' stands twice in a mapping",
    ]


def test_validate_warns_of_what_readers_take(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hook = {"hookName": "prestart", "path": "tool", "args": ["tool"], "timeout": 0}
    node = {"path": "dev/a", "fileMode": 666, "major": -1}
    mount = {"hostPath": "/a", "containerPath": "/a"}
    path = write(
        tmp_path / "spec.yml",
        cdidata.with_edits(env=["A=1", "A=2", " B=\n"], hooks=[hook], deviceNodes=[node], mounts=[mount])
        | {"kind": "acme_x/" + "w" * 64, "cdiVersion": "0.6.0", "annotations": {"a b": "x"}},
    )
    assert cli.main(["validate", path]) == 0
    lines = capsys.readouterr().out.splitlines()[1:]
    edits = "devices[0].containerEdits"
    places = [line.removeprefix("  warning: ").partition(": ")[0] for line in lines]
    assert places == [
        "readers look at names that end in .json or .yaml, and at no others",
        "kind",
        "kind",
        "annotations",
        f"{edits}.env[1]",
        f"{edits}.env[2]",
        f"{edits}.deviceNodes[0].path",
        f"{edits}.deviceNodes[0].fileMode",
        f"{edits}.deviceNodes[0].major",
        f"{edits}.hooks[0].path",
        f"{edits}.hooks[0].timeout",
        f"{edits}.mounts[0].options",
    ]


def test_what_we_generate_has_no_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec = TREE / "tests/data/h200/peer-cdi-default.yaml"
    assert cli.main(["validate", str(spec)]) == 0
    assert capsys.readouterr().out.count("\n") == 1


def test_an_unreadable_file_is_an_error_and_the_others_are_judged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = write(tmp_path / "good.json", cdidata.minimal())
    assert cli.main(["validate", str(tmp_path / "nothing"), str(tmp_path), good]) == 1
    printed = capsys.readouterr()
    assert printed.out.startswith(f"{good}: valid")
    assert printed.err.splitlines()[::2] == [
        f"nvhook: error: cannot read {tmp_path}/nothing: No such file or directory",
        f"nvhook: error: cannot read {tmp_path}: not a regular file: Invalid argument",
    ]


# --- inject


def test_inject_prints_nothing_but_the_configuration(tmp_path: Path) -> None:
    write(tmp_path / "a.json", cdidata.minimal())
    write(tmp_path / "bad.json", {})
    words = ("inject", "--spec-dir", str(tmp_path), "--device", "acme.test/widget=w0")
    done = command(*words, stdin='{"ociVersion": "1.2.0", "x": 9007199254740993}')
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout) == {
        "ociVersion": "1.2.0",
        "x": 9007199254740993,
        "process": {"user": {"uid": 0, "gid": 0}, "cwd": "", "env": ["A=1"]},
    }


@pytest.mark.parametrize(
    ("stdin", "device", "text"),
    [
        ("", "acme.test/widget=w0", "cannot read the configuration on stdin: "),
        ("[]", "acme.test/widget=w0", "the configuration on stdin is no JSON object"),
        ("{}", "acme.test/widget=w1", "unresolvable CDI devices: acme.test/widget=w1"),
        ("{}", "w0", "unresolvable CDI devices: w0"),
        ('{"process": 1}', "acme.test/widget=w0", "config.json: `process` is a int, not a dict"),
        ('{"a": 1e999}', "acme.test/widget=w0", "the configuration on stdin has a number beyond all bounds"),
        (b"\xff", "acme.test/widget=w0", "cannot read the configuration on stdin: byte 0 is not UTF-8"),
    ],
)
def test_inject_fails_with_nothing_on_stdout(tmp_path: Path, stdin: str | bytes, device: str, text: str) -> None:
    write(tmp_path / "a.json", cdidata.minimal())
    done = command("inject", "--spec-dir", str(tmp_path), "--device", device, stdin=stdin)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"nvhook: error: {text}") and "\n  remedy: " in done.stderr


def test_an_unresolvable_device_names_the_files_that_failed(tmp_path: Path) -> None:
    write(tmp_path / "a.json", cdidata.minimal(cdiVersion="0.2.0"))
    done = command("inject", "--spec-dir", str(tmp_path), "--device", "acme.test/widget=w0", stdin="{}")
    assert f"nvhook: warning: {tmp_path}/a.json is not read: cdiVersion: 0.2.0 is too low" in done.stderr


# --- transform


def test_transform_from_stdin_to_stdout(tmp_path: Path) -> None:
    mounts = [{"hostPath": "/driver/a", "containerPath": "/a"}]
    value = cdidata.with_edits(mounts=mounts)
    done = command("transform", "root", "--from", "/driver", "--to", "/", stdin=json.dumps(value))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("---\n")
    mounts[0]["hostPath"] = "/a"
    assert reader.parse(done.stdout) == cdidata.with_edits(mounts=mounts)


@pytest.mark.parametrize("name", ["out.json", "out.yaml"])
def test_transform_of_files(tmp_path: Path, name: str) -> None:
    mount = {"hostPath": "/a", "containerPath": "/a/b"}
    path = write(tmp_path / "in.json", cdidata.with_edits(mounts=[mount]))
    words = ["--from", "/a", "--to", "/c", "--relative-to", "container", "--input", path]
    assert cli.main(["transform", "root", *words, "--output", str(tmp_path / name)]) == 0
    text = (tmp_path / name).read_text()
    assert text.startswith("{" if name == "out.json" else "---\n")
    assert reader.parse(text) == cdidata.with_edits(mounts=[{"hostPath": "/a", "containerPath": "/c/b"}])


@pytest.mark.parametrize(
    ("text", "reason"),
    [("{", "stdin is no spec: line "), ("{}", "stdin is no spec: cdiVersion: must not be missing")],
)
def test_transform_of_what_is_no_spec(text: str, reason: str) -> None:
    done = command("transform", "root", "--from", "/a", "--to", "/b", stdin=text)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"nvhook: error: {reason}")


def test_transform_of_a_file_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["transform", "root", "--from", "/a", "--to", "/b", "--input", "/nothing/here"]) == 1
    assert capsys.readouterr().err.startswith("nvhook: error: cannot read /nothing/here: No such file")


@pytest.mark.parametrize(
    "words",
    [
        ["validate"],
        ["transform"],
        ["transform", "root", "--from", "/a"],
        ["transform", "root", "--from", "a", "--to", "/b"],
        ["transform", "root", "--from", "/a", "--to", "/b", "--output", "x.yml"],
        ["nothing"],
    ],
)
def test_wrong_use(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(words)
    assert caught.value.code == 2


def test_the_verbs_are_those_of_nvhook_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "a.json", cdidata.minimal())
    assert nvhook.main(["cdi", "validate", path]) == 0
    assert capsys.readouterr().out.startswith(f"{path}: valid")
    assert all(verb in nvhook.PASSED_ON["cdi"] for verb in cli.VERBS)
