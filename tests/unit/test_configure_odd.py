# SPDX-License-Identifier: Apache-2.0
"""Engines' files that can be read and say what no engine takes: one line that names the place, and nothing changes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tomlkit
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.nodes import Node

DOCKER = "/etc/docker/daemon.json"
CONTAINERD = "/etc/containerd/config.toml"
CRIO = "/etc/crio/crio.conf"
PODMAN = "/etc/containers/containers.conf.d/10-site.conf"
K3S = "/var/lib/rancher/k3s/agent/etc/containerd/config.toml"
FILES = {"docker": DOCKER, "containerd": CONTAINERD, "crio": CRIO, "podman": PODMAN, "k3s": K3S}
CRI = 'plugins."io.containerd.grpc.v1.cri"'
CRI_3 = 'plugins."io.containerd.cri.v1.runtime"'
KEY, KEY_3 = CRI.replace('"', ""), CRI_3.replace('"', "")

ODD = [
    ("docker", '{"runtimes":[3]}', "runtimes is no object"),
    ("docker", '{"runtimes":"nvidia"}', "runtimes is no object"),
    ("docker", '{"a":' * 2000 + "1" + "}" * 2000, "is nested deeper than 64 levels"),
    ("docker", '{"a":' + "[" * 70 + "]" * 70 + "}", "is nested deeper than 64 levels"),
    ("docker", '{"a":' + "9" * 5000 + "}", "is no JSON"),
    ("containerd", "imports = 3", "imports is no list of strings"),
    ("containerd", 'imports = "x"', "imports is no list of strings"),
    ("containerd", "imports = [3]", "imports is no list of strings"),
    ("containerd", 'imports = ["a\\u0000/*"]', "a\\x00/*: "),
    ("containerd", "plugins = 3", "plugins is no table"),
    ("containerd", f"version = 2\n[{CRI}]\ncontainerd = 5", f"{KEY}.containerd is no table"),
    ("containerd", f"version = 3\n[{CRI_3}]\ncontainerd = 5", f"{KEY_3}.containerd is no table"),
    ("containerd", f'version = 2\n[{CRI}.containerd]\nruntimes = ["a"]', f"{KEY}.containerd.runtimes is no table"),
    (
        "containerd",
        f"version = 2\n[{CRI}.containerd.runtimes.runc]\noptions = 3",
        f"{KEY}.containerd.runtimes.runc.options is no table",
    ),
    ("crio", "[crio]\nruntime = 1", "crio.runtime is no table"),
    ("crio", "[crio.runtime]\nruntimes = 3", "crio.runtime.runtimes is no table"),
    ("crio", "[crio.runtime.runtimes]\nrunc = 3", "crio.runtime.runtimes.runc is no table"),
    ("podman", "engine = 1", "engine is no table"),
    ("podman", "[engine]\nruntimes = 3", "engine.runtimes is no table"),
    ("podman", "[engine.runtimes]\nrunc = 3", "engine.runtimes.runc is no list of strings"),
    ("podman", "[engine.runtimes]\nrunc = '/usr/bin/nvhook-runtime'", "engine.runtimes.runc is no list of strings"),
    ("k3s", "version = '3'", "version is '3'"),
    ("k3s", "version = true", "version is True"),
]


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


@pytest.mark.parametrize(("engine", "text", "said"), ODD)
def test_an_odd_file_is_told_and_left_alone(
    node: Node, engine: str, text: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = FILES[engine]
    node.place(path, text)
    others = "docker" if engine == "crio" else "crio"
    node.place(
        FILES[others], {"docker": '{"runtimes": {"nvidia": {"path": "/usr/bin/nvhook-runtime"}}}'}.get(others, "")
    )
    state = node.state()
    for words in ([], ["--set-default", "--cdi"], ["--force"]):
        assert node.configure(engine, *words) == 1
        error, remedy = capsys.readouterr().err.splitlines()
        assert error.startswith("nvhook: error: ") and said in error
        assert remedy.startswith("  remedy: repair the file" if path in error else "  remedy: see what is there")
    assert node.configure("--status") == 3
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if path in line and said in line]
    assert [line for line in lines if line.startswith(others) and ";" not in line]
    assert node.state() == state


def test_disabled_plugins_must_be_a_list(node: Node, capsys: pytest.CaptureFixture[str]) -> None:
    node.place(CONTAINERD, "disabled_plugins = 7")
    assert node.configure("containerd") == 1
    assert f"{CONTAINERD}: disabled_plugins is no list of strings" in capsys.readouterr().err


def test_tables_between_braces_are_changed_too(node: Node) -> None:
    text = 'version=2\nplugins = {"io.containerd.grpc.v1.cri" = {containerd = {default_runtime_name = "runc"}}}\n'
    node.place(CONTAINERD, text)
    assert node.configure("containerd", "--set-default") == 0
    made = tomlkit.parse(node.text(CONTAINERD)).unwrap()["plugins"]["io.containerd.grpc.v1.cri"]["containerd"]
    assert made["default_runtime_name"] == "nvidia"
    assert made["runtimes"]["nvidia"]["options"]["BinaryName"] == "/usr/bin/nvhook-runtime"
    assert node.configure("containerd", "--remove") == 0
    assert node.text(CONTAINERD) == text


def test_a_hook_file_without_a_path_is_no_hook_of_ours(node: Node) -> None:
    hook = "/usr/share/containers/oci/hooks.d/nvhook.json"
    node.place(hook, '{"hook": 3}')
    assert node.configure("crio") == 0
    assert node.text(hook) == '{"hook": 3}'


NAMES = (
    ["version", "imports", "plugins", "cri", "io.containerd.grpc.v1.cri", "io.containerd.cri.v1.runtime", "containerd"]
    + ["runtimes", "nvidia", "runc", "options", "BinaryName", "default_runtime_name", "disabled_plugins", "path"]
    + ["crio", "runtime", "default_runtime", "runtime_path", "engine", "features", "default-runtime", "hook"]
)
PLACES = [
    ("runtimes", "nvidia", "path"),
    ("features", "cdi"),
    ("plugins", "io.containerd.grpc.v1.cri", "containerd", "runtimes", "runc", "options"),
    ("plugins", "io.containerd.cri.v1.runtime", "containerd", "runtimes", "nvidia", "options"),
    ("plugins", "cri", "containerd", "default_runtime_name"),
    ("crio", "runtime", "runtimes", "runc"),
    ("crio", "runtime", "default_runtime"),
    ("engine", "runtimes", "nvidia"),
]
LEAVES: st.SearchStrategy[Any] = st.one_of(
    st.booleans(),
    st.integers(-3, 3),
    st.floats(allow_nan=False),
    st.sampled_from(["", "x", "*", "a\0b", "/\n", "ü", "nvidia"]),
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=3),
    max_leaves=4,
)


def odd_values() -> st.SearchStrategy[dict[str, Any]]:
    """Values with something anywhere on the ways that engines look."""

    def build(version: Any, places: list[tuple[tuple[str, ...], int, Any]], more: dict[str, Any]) -> dict[str, Any]:
        value: dict[str, Any] = {"version": version, **more}
        for keys, length, leaf in places:
            inner = value
            for key in keys[: length - 1]:
                below = inner.setdefault(key, {})
                if not isinstance(below, dict):
                    break
                inner = below
            else:
                inner[keys[: length or 1][-1]] = leaf
        return value

    place = st.tuples(st.sampled_from(PLACES), st.integers(1, 6), VALUES)
    more = st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=2)
    return st.builds(build, st.sampled_from([1, 2, 3]) | VALUES, st.lists(place, max_size=3), more)


@settings(max_examples=60)
@given(odd_values(), st.booleans())
def test_no_odd_file_ends_in_a_traceback(
    tmp_path_factory: pytest.TempPathFactory, value: dict[str, Any], force: bool
) -> None:
    node = Node(tmp_path_factory.mktemp("node"))
    try:
        toml = tomlkit.dumps(value)
    except (ValueError, TypeError):
        toml = ""
    for engine, path in FILES.items():
        node.place(path, json.dumps(value) if engine == "docker" else toml)
    assert node.configure("--status") in (0, 3)
    for engine, path in FILES.items():
        text = node.text(path)
        words = [engine, *(["--force"] if force else [])]
        if node.configure(*words, "--set-default", "--cdi") == 0:
            assert node.configure(*words, "--remove") == 0
        assert node.text(path) == text
