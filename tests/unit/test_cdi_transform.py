# SPDX-License-Identifier: Apache-2.0
"""cdi.transform: paths of one side moved from one root to another."""

from __future__ import annotations

from typing import Any

import pytest

from cdi import spec, transform
from tests import cdidata

OLD = "/run/driver"


def moved(side: transform.Side, old: str = OLD, new: str = "/new", **edits: Any) -> dict[str, Any]:
    made = transform.root(cdidata.with_edits("0.5.0", **edits), old, new, side)
    found: dict[str, Any] = made["devices"][0]["containerEdits"]
    return found


@pytest.mark.parametrize(
    ("old", "new", "path", "result"),
    [
        ("/a", "/b", "/a/x", "/b/x"),
        ("/a", "/b", "/a", "/b"),
        ("/a", "/b", "/ab/x", "/ab/x"),
        ("/a", "/b", "a/x", "a/x"),
        ("/a/", "/b/", "/a/x", "/b/x"),
        ("/a", "/", "/a/x", "/x"),
        ("/a", "/", "/a", "/"),
        ("/", "/b", "/x", "/b/x"),
        ("/", "/b", "/", "/b"),
        ("/", "/", "/x", "/x"),
        ("/", "/b", "x", "x"),
        ("/a", "/a", "/a/x", "/a/x"),
    ],
)
def test_a_path_moves_at_component_boundaries(old: str, new: str, path: str, result: str) -> None:
    mount = {"hostPath": path, "containerPath": path}
    assert moved("host", old, new, mounts=[mount])["mounts"] == [{"hostPath": result, "containerPath": path}]
    assert moved("container", old, new, mounts=[mount])["mounts"] == [{"hostPath": path, "containerPath": result}]


@pytest.mark.parametrize(
    ("side", "node", "result"),
    [
        ("host", {"path": f"{OLD}/dev/a"}, {"path": f"{OLD}/dev/a", "hostPath": "/new/dev/a"}),
        ("host", {"path": "/dev/a", "hostPath": f"{OLD}/dev/a"}, {"path": "/dev/a", "hostPath": "/new/dev/a"}),
        ("host", {"path": "/dev/a"}, {"path": "/dev/a"}),
        # The host's node stays where it was.
        ("container", {"path": f"{OLD}/dev/a"}, {"path": "/new/dev/a", "hostPath": f"{OLD}/dev/a"}),
        ("container", {"path": f"{OLD}/dev/a", "hostPath": "/dev/b"}, {"path": "/new/dev/a", "hostPath": "/dev/b"}),
        ("container", {"path": "/dev/a"}, {"path": "/dev/a"}),
    ],
)
def test_nodes(side: transform.Side, node: dict[str, Any], result: dict[str, Any]) -> None:
    assert moved(side, deviceNodes=[node])["deviceNodes"] == [result]


ARGUMENTS = ["tool", f"{OLD}/a", f"{OLD}/a::{OLD}/b", f"../x::{OLD}/b", f"--root={OLD}"]
ARGUMENTS_MOVED = ["tool", "/new/a", "/new/a::/new/b", "../x::/new/b", f"--root={OLD}"]


@pytest.mark.parametrize(
    ("side", "stage", "program", "arguments"),
    [
        ("host", "prestart", True, True),
        ("host", "createRuntime", True, True),
        ("host", "createContainer", True, False),
        ("host", "startContainer", False, False),
        ("host", "poststop", True, True),
        ("container", "prestart", False, False),
        ("container", "createContainer", False, True),
        ("container", "startContainer", True, True),
    ],
)
def test_hooks(side: transform.Side, stage: str, program: bool, arguments: bool) -> None:
    hook = {"hookName": stage, "path": f"{OLD}/bin/tool", "args": ARGUMENTS}
    assert moved(side, hooks=[hook])["hooks"] == [
        {
            "hookName": stage,
            "path": "/new/bin/tool" if program else f"{OLD}/bin/tool",
            "args": ARGUMENTS_MOVED if arguments else ARGUMENTS,
        }
    ]


def test_edits_of_the_whole_move_too_and_nothing_else_does() -> None:
    mount = {"hostPath": f"{OLD}/a", "containerPath": "/a"}
    value = cdidata.minimal(
        cdiVersion="0.6.0", annotations={"a": f"{OLD}/x"}, containerEdits={"mounts": [mount], "env": [f"A={OLD}/x"]}
    )
    made = transform.root(value, OLD, "/new", "host")
    mounts = [{"hostPath": "/new/a", "containerPath": "/a"}]
    assert made == value | {"containerEdits": {"mounts": mounts, "env": [f"A={OLD}/x"]}}
    assert mount["hostPath"] == f"{OLD}/a"


def test_the_version_rises_only_where_it_must() -> None:
    nodes = [{"path": f"{OLD}/dev/a"}]
    made = transform.root(cdidata.with_edits("v0.3.0", deviceNodes=nodes), OLD, "/new", "host")
    assert made["cdiVersion"] == "0.5.0"
    assert spec.problems(made) == []
    for version in ("v0.3.0", "1.1.0"):
        kept = transform.root(cdidata.with_edits(version, deviceNodes=nodes), "/other", "/new", "host")
        assert kept == cdidata.with_edits(version, deviceNodes=nodes)
