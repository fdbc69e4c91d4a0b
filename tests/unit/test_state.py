# SPDX-License-Identifier: Apache-2.0
"""The container's state and its config.json, well formed and not."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from hook import state
from ldcache.errors import NvhookError

CONFIG: dict[str, Any] = {
    "ociVersion": "1.0.2",
    "root": {"path": "rootfs"},
    "process": {"env": ["PATH=/bin", "A=1", "NOEQUALS", "A=2", "EMPTY=", "B=x=y"]},
    "mounts": [{"destination": "/dev", "type": "tmpfs"}],
    "linux": {"resources": {"devices": [{"allow": False, "access": "rwm"}]}, "maskedPaths": ["/proc/kcore"]},
}


def bundle(folder: Path, config: Any = CONFIG) -> str:
    """A bundle folder; a string is written as it is."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    return str(folder)


def read(text: str) -> state.Container:
    """read_container with this text on its stdin."""
    reading, writing = os.pipe()
    try:
        os.write(writing, text.encode())
        os.close(writing)
        return state.read_container(reading)
    finally:
        os.close(reading)


def test_state_and_config(tmp_path: Path) -> None:
    container = read(json.dumps({"id": "c1", "pid": 7, "bundle": bundle(tmp_path), "more": [1]}))
    assert (container.id, container.pid) == ("c1", 7)
    assert container.root_path == f"{tmp_path}/rootfs"
    assert container.env == {"PATH": "/bin", "A": "2", "EMPTY": "", "B": "x=y"}
    assert container.masked_paths == ["/proc/kcore"]
    assert container.device_rules == [{"allow": False, "access": "rwm"}]


def test_bundle_path_of_old_engines(tmp_path: Path) -> None:
    assert read(json.dumps({"pid": 7, "bundlePath": bundle(tmp_path)})).bundle == str(tmp_path)


def test_an_absolute_root_stays(tmp_path: Path) -> None:
    assert state.bundle_container(bundle(tmp_path, {"root": {"path": "/images/1"}})).root_path == "/images/1"


def test_null_members_count_as_absent(tmp_path: Path) -> None:
    config = {"root": {"path": "r"}, "process": None, "linux": {"resources": None, "devices": None}, "mounts": None}
    container = state.bundle_container(bundle(tmp_path, config))
    assert container.env == {}
    assert container.mounts == container.devices == container.device_rules == []


@pytest.mark.parametrize("text", ["", "[]", "null", "{", '{"pid": 7}', '{"bundle": "relative"}', '{"bundle": 7}'])
def test_a_state_that_is_none(text: str) -> None:
    with pytest.raises(NvhookError, match="state"):
        read(text)


def test_a_state_with_a_wrong_pid(tmp_path: Path) -> None:
    with pytest.raises(NvhookError, match="pid is -1"):
        read(json.dumps({"pid": -1, "bundle": bundle(tmp_path)}))


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ("{", "no JSON"),
        ("[]", "a JSON list"),
        ({}, "root.path is missing"),
        ({"root": []}, "`root` is a list"),
        ({"root": {"path": "r"}, "process": 1}, "`process` is a int"),
        ({"root": {"path": "r"}, "process": {"env": {}}}, "`env` is a dict"),
        ({"root": {"path": "r"}, "process": {"env": [1]}}, "process.env holds a int"),
        ({"root": {"path": "r"}, "mounts": [1]}, "`mounts` holds a int"),
        ({"root": {"path": "r"}, "linux": {"resources": {"devices": ["x"]}}}, "`devices` holds a str"),
        ("[" * 100_000, "nested too deeply"),
    ],
)
def test_a_config_that_is_none(tmp_path: Path, config: Any, named: str) -> None:
    with pytest.raises(NvhookError, match=named) as caught:
        state.bundle_container(bundle(tmp_path, config))
    assert str(tmp_path) in caught.value.what


def test_no_bundle(tmp_path: Path) -> None:
    with pytest.raises(NvhookError, match=f"cannot open {tmp_path}/absent/config.json"):
        state.bundle_container(f"{tmp_path}/absent")


def test_a_config_that_is_a_fifo_or_too_big(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(NvhookError, match="no regular file"):
        state.bundle_container(str(tmp_path))
    (tmp_path / "config.json").unlink()
    with open(tmp_path / "config.json", "wb") as file:
        file.truncate(state.CONFIG_MAX + 1)
    with pytest.raises(NvhookError, match="File too large"):
        state.bundle_container(str(tmp_path))


@pytest.mark.parametrize(
    ("version", "capabilities", "privileged"),
    [
        ("1.0.2", {"bounding": ["CAP_CHOWN", "CAP_SYS_ADMIN"]}, True),
        ("1.2.0-dev", {"bounding": ["CAP_SYS_ADMIN"]}, True),
        # What a process has, or may pass on, is another matter than what it may ever get.
        ("1.0.2", {"effective": ["CAP_SYS_ADMIN"], "permitted": ["CAP_SYS_ADMIN"], "bounding": []}, False),
        ("1.0.2", {"bounding": None}, False),
        ("1.0.2", None, False),
        ("1.0.0-rc1", ["CAP_SYS_ADMIN"], True),
        ("1.0.0-rc4-dev", ["CAP_SYS_ADMIN"], True),
        ("1.0.0-rc4", ["CAP_CHOWN"], False),
        ("1.0.0-rc5", {"bounding": ["CAP_SYS_ADMIN"]}, True),
        ("1.0.0", {"bounding": ["CAP_SYS_ADMIN"]}, True),
        ("no version", {"bounding": ["CAP_SYS_ADMIN"]}, True),
        (None, {"bounding": ["CAP_SYS_ADMIN"]}, True),
    ],
)
def test_privileged(tmp_path: Path, version: object, capabilities: object, privileged: bool) -> None:
    config = CONFIG | {"ociVersion": version, "process": {"capabilities": capabilities}}
    assert state.bundle_container(bundle(tmp_path, config)).privileged is privileged


@pytest.mark.parametrize(("version", "capabilities"), [("1.0.2", ["CAP_SYS_ADMIN"]), ("1.0.0-rc2", {"bounding": []})])
def test_capabilities_of_another_version_than_the_file_says(tmp_path: Path, version: str, capabilities: object) -> None:
    config = CONFIG | {"ociVersion": version, "process": {"capabilities": capabilities}}
    with pytest.raises(NvhookError, match="`capabilities` is a"):
        state.bundle_container(bundle(tmp_path, config))


def test_annotations(tmp_path: Path) -> None:
    config = CONFIG | {"annotations": {"cdi.k8s.io/x": "nvidia.com/gpu=0", "bad": 7}}
    assert state.bundle_container(bundle(tmp_path, config)).annotations == {"cdi.k8s.io/x": "nvidia.com/gpu=0"}
