# SPDX-License-Identifier: Apache-2.0
"""cdi.inject, beside the corpus: what configurations may hold, and what must not be touched."""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

import pytest

from cdi import inject
from ldcache.errors import NvhookError
from tests.needs import needs_root

NODE = {"path": "/dev/acme0", "type": "c", "major": 240, "minor": 1}


def test_nothing_asked_for_changes_nothing() -> None:
    oci = {"ociVersion": "1.2.0", "own": [1], "process": None}
    assert inject.inject(oci, []) == oci
    assert inject.inject({}, [{}, {"env": [], "additionalGids": [0]}]) == {}


def test_the_input_stays_as_it_was() -> None:
    oci = {
        "process": {"user": {"uid": 5, "gid": 6, "additionalGids": [7]}, "env": ["A=1"]},
        "mounts": [{"destination": "/a", "options": ["ro"]}],
        "hooks": {"prestart": [{"path": "/x"}]},
        "linux": {"devices": [dict(NODE)], "resources": {"devices": [{"allow": False}]}, "netDevices": {}},
    }
    before = copy.deepcopy(oci)
    edits: list[dict[str, Any]] = [
        {
            "env": ["A=2"],
            "deviceNodes": [dict(NODE)],
            "netDevices": [{"hostInterfaceName": "a", "name": "b"}],
            "mounts": [{"hostPath": "/h", "containerPath": "/a", "options": ["bind"]}],
            "hooks": [{"hookName": "prestart", "path": "/y", "timeout": 0}],
            "intelRdt": {"closID": "c", "schemata": []},
            "additionalGids": [8],
        }
    ]
    edits_before = copy.deepcopy(edits)
    made = inject.inject(oci, edits)
    assert (oci, edits) == (before, edits_before)
    assert made["process"] == {"user": {"uid": 5, "gid": 6, "additionalGids": [7, 8]}, "env": ["A=2"], "cwd": ""}
    assert made["linux"]["devices"] == [{**NODE, "uid": 5, "gid": 6}]
    assert made["linux"]["intelRdt"] == {"closID": "c"}
    assert made["hooks"] == {"prestart": [{"path": "/x"}, {"path": "/y", "timeout": 0}]}
    # And a change of the result does not reach it.
    made["process"]["env"].append("B=1")
    made["linux"]["devices"].clear()
    assert (oci, edits) == (before, edits_before)


def test_unknown_members_are_kept() -> None:
    oci = {"vendor": {"x": 1}, "process": {"own": True}, "linux": {"own": 1.5}}
    made = inject.inject(oci, [{"env": ["A=1"], "deviceNodes": [NODE]}])
    assert made["vendor"] == {"x": 1} and made["process"]["own"] is True and made["linux"]["own"] == 1.5


@pytest.mark.parametrize("empty", [None, {}])
def test_null_is_absent(empty: Any) -> None:
    made = inject.inject({"process": empty, "linux": empty}, [{"env": ["A=1"], "deviceNodes": [NODE]}])
    assert made["process"] == {"user": {"uid": 0, "gid": 0}, "cwd": "", "env": ["A=1"]}


@pytest.mark.parametrize(
    ("oci", "text"),
    [
        ({"process": []}, "`process` is a list"),
        ({"process": {"env": "A=1"}}, "`env` is a str"),
        ({"process": {"env": [1]}}, "process.env holds a int"),
        ({"process": {"user": {"uid": "0"}}}, "`uid` is a str"),
        ({"process": {"user": {"additionalGids": {}}}}, "`additionalGids` is a dict"),
        ({"linux": 1}, "`linux` is a int"),
        ({"linux": {"devices": [1]}}, "`devices` holds a int"),
        ({"linux": {"resources": {"devices": [None]}}}, "`devices` holds a NoneType"),
        ({"mounts": {}}, "`mounts` is a dict"),
        ({"mounts": [{"destination": 5}]}, "a mount's destination is no string"),
        ({"hooks": {"prestart": "x"}}, "`prestart` is a str"),
        ({"linux": {"namespaces": "user"}}, "`namespaces` is a str"),
        ({"linux": {"netDevices": []}}, "`netDevices` is a list"),
    ],
)
def test_a_configuration_of_wrong_types_is_an_error(oci: dict[str, Any], text: str) -> None:
    edits = {
        "env": ["A=1"],
        "deviceNodes": [NODE],
        "netDevices": [{"hostInterfaceName": "a", "name": "b"}],
        "mounts": [{"hostPath": "/h", "containerPath": "/a"}],
        "hooks": [{"hookName": "prestart", "path": "/y"}],
        "additionalGids": [8],
    }
    with pytest.raises(NvhookError, match=f"^config.json: {text}"):
        inject.inject(oci, [edits])


@needs_root
def test_a_node_on_the_host(tmp_path: Path) -> None:
    path = tmp_path / "acme0"
    os.mknod(path, 0o020640, os.makedev(240, 7))
    os.chmod(path, 0o640)
    node = {"path": "/dev/acme0", "hostPath": str(path)}
    made = inject.inject({}, [{"deviceNodes": [node]}])
    assert made["linux"]["devices"] == [
        {"path": "/dev/acme0", "type": "c", "major": 240, "minor": 7, "fileMode": 0o640}
    ]
    # Described in full: the numbers are the spec's, the mode is the host's, from library 1.1.0 on.
    made = inject.inject({}, [{"deviceNodes": [{**node, "type": "c", "major": 1, "minor": 2}]}])
    assert made["linux"]["devices"] == [{"path": "/dev/acme0", "type": "c", "major": 1, "minor": 2, "fileMode": 0o640}]
    made = inject.inject({}, [{"deviceNodes": [{**node, "fileMode": 0o600}]}])
    assert made["linux"]["devices"][0]["fileMode"] == 0o600


@needs_root
def test_a_fifo_on_the_host(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "f", 0o600)
    made = inject.inject({}, [{"deviceNodes": [{"path": "/f", "hostPath": str(tmp_path / "f")}]}])
    assert made["linux"] == {"devices": [{"path": "/f", "type": "p", "major": 0, "minor": 0, "fileMode": 0o600}]}


def test_a_path_with_a_nul() -> None:
    with pytest.raises(NvhookError, match="cannot look at"):
        inject.inject({}, [{"deviceNodes": [{"path": "/dev/a\0b"}]}])


def test_a_full_node_over_something_else_stays_as_described() -> None:
    node = {**NODE, "hostPath": "/etc"}
    assert inject.inject({}, [{"deviceNodes": [node]}])["linux"]["devices"] == [NODE]


@pytest.mark.parametrize(
    ("path", "slashes"),
    [
        ("/", 1),
        ("//", 1),
        ("/a", 1),
        ("/a/", 1),
        ("/a/b", 2),
        ("/a/./b//c", 3),
        ("/a/../b", 1),
        ("/../..", 1),
        ("", 0),
        (".", 0),
        ("a", 0),
        ("a/b", 1),
        ("a/..", 0),
        ("..", 0),
        ("../a", 1),
        ("../../a", 2),
    ],
)
def test_depth_is_that_of_the_cleaned_path(path: str, slashes: int) -> None:
    """Go's filepath.Clean, whose slashes are counted."""
    assert inject.depth(path) == slashes


def test_mounts_of_one_depth_keep_their_order() -> None:
    mounts = [{"destination": path} for path in ("/proc", "/dev", "/a/b", "/sys")]
    made = inject.inject({"mounts": mounts}, [{"mounts": [{"hostPath": "/h", "containerPath": "/c"}]}])
    assert [mount["destination"] for mount in made["mounts"]] == ["/proc", "/dev", "/sys", "/c", "/a/b"]
