# SPDX-License-Identifier: Apache-2.0
"""cdi.names, cdi.validate and cdi.spec: the rules that readers of CDI files apply, and the files that we write.

The corpus of verdicts is in test_cdi_corpus.py.
"""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from cdi import names, reader, spec, versions
from ldcache.errors import NvhookError
from tests.needs import needs_program, needs_root

TREE = Path(__file__).resolve().parents[2]


def minimal(**members: Any) -> dict[str, Any]:
    """A spec that every reader takes, with members put over it."""
    device = {"name": "w0", "containerEdits": {"env": ["A=1"]}}
    return {"cdiVersion": "0.3.0", "kind": "acme.test/widget", "devices": [device], **members}


def with_edits(version: str = "0.3.0", **edits: Any) -> dict[str, Any]:
    return minimal(cdiVersion=version, devices=[{"name": "w0", "containerEdits": edits}])


# --- names


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("nvidia.com/gpu=0", ("nvidia.com", "gpu", "0")),
        ("nvidia.com/gpu=GPU-0a1b", ("nvidia.com", "gpu", "GPU-0a1b")),
        ("acme.test/wid.get=a.b-c_d:e", ("acme.test", "wid.get", "a.b-c_d:e")),
        ("acme_.test/widget=w", ("acme_.test", "widget", "w")),
    ],
)
def test_qualified_names(name: str, parts: tuple[str, str, str]) -> None:
    assert names.parse_qualified(name) == parts


@pytest.mark.parametrize(
    "name",
    [
        "",
        "=",
        "0",
        "widget=0",
        "nvidia.com/gpu",
        "nvidia.com/gpu=",
        "/dev/a=b",
        "9acme/widget=0",
        "acme/9widget=0",
        "acme-/widget=0",
        "acme/wid/get=0",
        "nvidia.com/gpu=:0",
        "nvidia.com/gpu=0:",
        "nvidia.com/gpu=0 ",
        "nvidia.com/gpu=0\n",
        "nvidia.com/gpu=\N{LATIN SMALL LETTER E WITH ACUTE}0",
        "nvidia.com/gpu=0,nvidia.com/gpu=1",
    ],
)
def test_what_is_no_qualified_name(name: str) -> None:
    with pytest.raises(names.InvalidName):
        names.parse_qualified(name)


# --- rules


@pytest.mark.parametrize(
    ("made", "version"),
    [
        (minimal(), "0.3.0"),
        (with_edits(mounts=[{"hostPath": "/a", "containerPath": "/a", "options": ["ro"]}]), "0.3.0"),
        (with_edits(mounts=[{"hostPath": "/a", "containerPath": "/a", "type": "bind"}]), "0.4.0"),
        (minimal(containerEdits={"mounts": [{"hostPath": "/a", "containerPath": "/a", "type": "bind"}]}), "0.4.0"),
        (minimal(devices=[{"name": "0", "containerEdits": {"env": ["A=1"]}}]), "0.5.0"),
        (with_edits(deviceNodes=[{"path": "/dev/a", "hostPath": "/drv/dev/a"}]), "0.5.0"),
        (with_edits(deviceNodes=[{"path": "/dev/a", "hostPath": ""}]), "0.3.0"),
        (minimal(annotations={"a": "b"}), "0.6.0"),
        (minimal(annotations={}), "0.3.0"),
        (minimal(kind="acme.test/wid.get"), "0.6.0"),
        (with_edits(additionalGids=[44]), "0.7.0"),
        (with_edits(additionalGids=[]), "0.3.0"),
        (with_edits(intelRdt={}), "0.7.0"),
        (with_edits(intelRdt={"schemata": []}), "1.1.0"),
        (with_edits(netDevices=[{"hostInterfaceName": "a", "name": "b"}]), "1.1.0"),
    ],
)
def test_minimum_version(made: dict[str, Any], version: str) -> None:
    assert versions.minimum_version(made) == version


def test_one_version_too_low_is_refused() -> None:
    made = minimal(cdiVersion="0.4.0", devices=[{"name": "0", "containerEdits": {"env": ["A=1"]}}])
    assert spec.problems(made) == ["cdiVersion: 0.4.0 is too low, the content needs 0.5.0"]
    assert spec.problems(made | {"cdiVersion": "v0.5.0"}) == []


@pytest.mark.parametrize(
    ("made", "problem"),
    [
        ([], ": must be an object"),
        (minimal(extra=1), "unknown field 'extra'"),
        (minimal(cdiVersion="0.6"), "cdiVersion: '0.6' is no version"),
        (minimal(kind="acme/w"), "kind: every released library crashes"),
        (minimal(devices=[]), "devices: at least one device is needed"),
        (minimal(devices=[None]), "devices[0]: must be an object"),
        (minimal(devices=minimal()["devices"] * 2), "devices[1].name: a second device 'w0'"),
        (minimal(devices=[{"name": "w0", "containerEdits": {"env": []}}]), "devices[0].containerEdits: a device must"),
        (with_edits(env=["A"]), "devices[0].containerEdits.env[0]: 'A' is no NAME=VALUE"),
        (with_edits(deviceNodes=[{"path": "/dev/a", "permissions": "rx"}]), "deviceNodes[0].permissions: 'rx'"),
        (with_edits(deviceNodes=[{"path": "/dev/a", "fileMode": "0666"}]), "fileMode: must be a whole number"),
        (with_edits(deviceNodes=[{"path": "/dev/a", "gid": -1}]), "gid: -1 is out of range"),
        (with_edits(mounts=[{"hostPath": "/a"}]), "mounts[0].containerPath: must not be missing or empty"),
        (with_edits(mounts=[{"hostPath": "/\udcff", "containerPath": "/a"}]), "'/\\udcff' is no UTF-8"),
        (with_edits(hooks=[{"hookName": "createcontainer", "path": "/a"}]), "'createcontainer' is no hook"),
        (with_edits(hooks=[{"hookName": "poststop", "path": "/a", "timeout": "5"}]), "timeout: must be a whole"),
    ],
)
def test_problems_name_the_place(made: Any, problem: str) -> None:
    found = spec.problems(made)
    assert any(problem in text for text in [*found, *(f": {text}" for text in found)]), found


def test_all_problems_are_told_at_once() -> None:
    with pytest.raises(spec.InvalidSpec) as caught:
        spec.serialise(minimal(cdiVersion="", kind="", extra=1), "yaml")
    assert len(caught.value.problems) == 3
    assert all(text in str(caught.value) for text in caught.value.problems)


def test_without_empty() -> None:
    made = minimal(annotations={}, containerEdits={"env": [], "mounts": None, "hooks": []})
    assert spec.without_empty(made) == minimal()
    # Zero is a value: a node's minor, a user's id.
    node = {"path": "/dev/a", "minor": 0, "type": ""}
    assert spec.without_empty(node) == {"path": "/dev/a", "minor": 0}


# --- text

# What YAML 1.1 makes something else of, in the Go library (1e3) or in Python's.
COERCED = ["0", "010", "1e3", "1_000", "0x1f", "0.5", "yes", "n", "on", "true", "null", "~", "1:30", ".inf", "=", "<<"]


@pytest.mark.parametrize("form", ["yaml", "json"])
def test_a_written_spec_reads_back(form: spec.Format) -> None:
    devices = [{"name": text, "containerEdits": {"env": [f"A={text}"]}} for text in ("0", "010", "1e3", "yes", "n")]
    text_env = [f"{value}=x" for value in COERCED] + ["A=x y: z # no comment", "B=\t\"'\\", "C=\N{SNOWMAN}\n"]
    made = minimal(
        cdiVersion="0.5.0", devices=devices, containerEdits={"env": [text for text in text_env if text[0] != "="]}
    )
    text = spec.serialise(made, form)
    assert reader.parse(text) == made
    if form == "json":
        assert json.loads(text) == made
    else:
        assert text.startswith("---\n")


@pytest.mark.parametrize("value", COERCED)
def test_no_string_can_be_taken_for_something_else(value: str) -> None:
    hook = {"hookName": "createContainer", "path": "/a", "args": [value]}
    text = spec.serialise(with_edits(hooks=[hook]), "yaml")
    assert f'- "{value}"\n' in text


def test_no_aliases() -> None:
    """One list in two places comes out twice; old readers know aliases, people need not."""
    nodes = [{"path": "/dev/a"}]
    devices = [{"name": name, "containerEdits": {"deviceNodes": nodes}} for name in ("a0", "b0")]
    text = spec.serialise(minimal(devices=devices), "yaml")
    assert "&" not in text and "*" not in text
    assert text.count("/dev/a") == 2


def test_long_strings_are_not_folded() -> None:
    value = "A=" + " ".join(["word"] * 300)
    assert f'"{value}"\n' in spec.serialise(with_edits(env=[value]), "yaml")


def test_without_libyaml_the_text_is_the_same(tmp_path: Path) -> None:
    """yaml.CSafeDumper is there only where PyYAML was built with libyaml."""
    text = (
        "import sys, json; import yaml\n"
        "if sys.argv[1] == 'without': del yaml.CSafeDumper\n"
        "from cdi import spec; sys.stdout.write(spec.serialise(json.loads(sys.argv[2]), 'yaml'))"
    )
    if not hasattr(yaml, "CSafeDumper"):
        pytest.skip("needs a PyYAML with libyaml")
    made = json.dumps(with_edits(env=["A=1e3", "B=\u2603 x"], mounts=[{"hostPath": "/a", "containerPath": "/a"}]))
    outs = [
        subprocess.run(
            [sys.executable, "-c", text, which, made],
            env={"PYTHONPATH": str(TREE), "PATH": os.environ["PATH"]},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for which in ("with", "without")
    ]
    assert outs[0] == outs[1] != ""


# --- the file


def write_with_umask(path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        spec.write(path, "text\n")
    finally:
        os.umask(before)


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077, 0o777])
def test_a_file_is_readable_by_all_under_any_umask(tmp_path: Path, umask: int) -> None:
    path = tmp_path / "etc" / "cdi" / "nvidia.yaml"
    if umask == 0o777 and os.geteuid() != 0:
        pytest.skip("needs root: nobody else can enter a folder of mode 0000 to mend it")
    write_with_umask(path, umask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o644
    assert [stat.S_IMODE(folder.stat().st_mode) for folder in (path.parent, path.parent.parent)] == [0o755, 0o755]
    assert os.listdir(path.parent) == ["nvidia.yaml"]


def test_a_file_is_replaced_whole(tmp_path: Path) -> None:
    """By rename: who has the old one open keeps it, and there is no moment without one."""
    path = tmp_path / "nvidia.yaml"
    path.write_text("old\n")
    with path.open() as old:
        spec.write(path, "new\n")
        assert old.read() == "old\n"
    assert path.read_text() == "new\n"


def test_a_failed_write_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "nvidia.yaml"
    path.mkdir()
    with pytest.raises(NvhookError, match="cannot write .*nvidia.yaml: ") as caught:
        spec.write(path, "text\n")
    assert caught.value.remedy == "give --output the name of a file"
    assert os.listdir(tmp_path) == ["nvidia.yaml"]


def test_a_folder_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "cdi").write_text("")
    with pytest.raises(NvhookError, match="cannot write"):
        spec.write(tmp_path / "cdi" / "nvidia.yaml", "text\n")


@needs_root
@pytest.mark.parametrize(
    ("options", "reason", "remedy"),
    [
        ("size=64k", "No space left on device", "make room there, or give --output another place"),
        ("ro", "Read-only file system", "give --output a place that is not read-only, such as /var/run/cdi"),
    ],
)
@needs_program("unshare")
def test_a_disk_that_takes_nothing(tmp_path: Path, options: str, reason: str, remedy: str) -> None:
    """A user's rights are not to blame for it."""
    program = "import sys; from pathlib import Path; from cdi import spec; from ldcache.errors import NvhookError\n"
    program += "try: spec.write(Path(sys.argv[1]), 'x' * 200000)\n"
    program += "except NvhookError as error: print(error.what, error.remedy, sep='\\n')"
    script = f'mount -t tmpfs -o {options} none "$1" && shift && exec "$@"'
    path = tmp_path / "nvidia.json"
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-euc", script, "sh", str(tmp_path), sys.executable, "-c", program, str(path)],
        cwd=Path(__file__).resolve().parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.splitlines() == [f"cannot write {path}: {reason}", remedy], done.stderr


def test_a_temporary_file_left_behind_is_in_nobodys_way(tmp_path: Path) -> None:
    """In a container the process has the same number each time."""
    path = tmp_path / "nvidia.yaml"
    left = tmp_path / f".nvidia.yaml.{os.getpid()}.tmp"
    victim = tmp_path / "victim"
    victim.write_text("kept")
    for target in (None, victim):
        if target is None:
            left.touch()
        else:
            left.symlink_to(target)
        spec.write(path, "text\n")
        assert path.read_text() == "text\n"
    assert sorted(os.listdir(tmp_path)) == ["nvidia.yaml", "victim"] and victim.read_text() == "kept"
