# SPDX-License-Identifier: Apache-2.0
"""`nvhook configure containerd`: each version of its file, and who imports whom."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tomlkit

from tests.nodes import Node

CONFIG = "/etc/containerd/config.toml"
CRI = {1: "cri", 2: "io.containerd.grpc.v1.cri", 3: "io.containerd.cri.v1.runtime"}
RUNTIME = "/usr/bin/nvhook-runtime"
THEIRS = "/usr/bin/nvidia-container-runtime"
DROP_IN = "/etc/containerd/conf.d/99-nvhook-nvidia.toml"


def runc(version: int, options: str = "SystemdCgroup = true", head: str = "") -> str:
    """A file whose runc has options."""
    table = f'plugins."{CRI[version]}".containerd.runtimes.runc'
    number = f"version = {version}\n" if version > 1 else "oom_score = 0\n"
    entry = '  runtime_type = "io.containerd.runc.v2" # too\n  pod_annotations = ["a"]\n'
    return f"{number}{head}\n# kept\n[{table}]\n{entry}  [{table}.options]\n    {options}\n"


def section(node: Node, path: str, version: int) -> dict[str, Any]:
    """The CRI plugin's section of a file."""
    value: dict[str, Any] = tomlkit.parse(node.text(path)).unwrap()["plugins"][CRI[version]]
    return value


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


@pytest.mark.parametrize("version", [1, 2, 3])
def test_options_are_those_of_runc_and_all_comes_out_again(node: Node, version: int) -> None:
    text = runc(version)
    node.place(CONFIG, text)
    assert node.configure("containerd", "--set-default", "--cdi") == 0
    path = CONFIG if version < 3 else DROP_IN
    made = section(node, path, version)
    options = {"SystemdCgroup": True, "BinaryName": RUNTIME, **({"Runtime": RUNTIME} if version == 1 else {})}
    runtime = {"runtime_type": "io.containerd.runc.v2", "pod_annotations": ["a"], "options": options}
    assert made["containerd"]["runtimes"]["nvidia"] == runtime
    assert (made["containerd"]["default_runtime_name"], made["enable_cdi"]) == ("nvidia", True)
    assert "# kept" in node.text(CONFIG) and "# too" in node.text(CONFIG)
    if version == 3:
        assert tomlkit.parse(node.text(path))["version"] == 3
        assert tomlkit.parse(node.text(CONFIG))["imports"] == ["/etc/containerd/conf.d/*.toml"]
        assert "nvidia" not in section(node, CONFIG, 3)["containerd"]["runtimes"]
    state = node.state()
    assert node.configure("containerd", "--set-default", "--cdi") == 0
    assert node.configure("containerd") == 0
    assert node.state() == state
    assert node.configure("containerd", "--remove") == 0
    assert node.text(CONFIG) == text
    assert not (node.folder / DROP_IN[1:]).exists()
    assert not (node.folder / "var/lib/nvhook").exists()


@pytest.mark.parametrize("text", [None, ""])
def test_no_file_gets_one_that_has_runc_too(node: Node, text: str | None) -> None:
    """A file that names any runtime names all of them."""
    if text is not None:
        node.place(CONFIG, text)
    assert node.configure("containerd") == 0
    assert tomlkit.parse(node.text(CONFIG))["version"] == 2
    assert sorted(section(node, CONFIG, 2)["containerd"]["runtimes"]) == ["nvidia", "runc"]
    assert node.configure("containerd", "--remove") == 0
    assert (node.text(CONFIG) if (node.folder / CONFIG[1:]).exists() else None) == text


def test_with_version_2_the_last_file_that_has_the_section_counts(node: Node) -> None:
    """Up to containerd 1.7 it replaces the section of those before it."""
    node.place(CONFIG, runc(2, head='imports = ["conf.d/*.toml"]\n'))
    first = runc(2, "SystemdCgroup = false")
    node.place("/etc/containerd/conf.d/10-site.toml", first)
    node.place("/etc/containerd/conf.d/20-other.toml", "version = 2\n[grpc]\ngid = 1\n")
    state = node.state()
    assert node.configure("containerd") == 0
    assert node.text(CONFIG).encode() == state[CONFIG[1:]][0]
    made = section(node, "/etc/containerd/conf.d/10-site.toml", 2)["containerd"]["runtimes"]["nvidia"]
    assert made["options"] == {"SystemdCgroup": False, "BinaryName": RUNTIME}
    # A section that came later takes its place; both are cleaned.
    node.place("/etc/containerd/conf.d/30-late.toml", runc(2))
    assert node.configure("containerd") == 0
    assert "nvidia" in section(node, "/etc/containerd/conf.d/30-late.toml", 2)["containerd"]["runtimes"]
    assert node.configure("containerd", "--remove") == 0
    assert node.text("/etc/containerd/conf.d/10-site.toml") == first
    assert node.text("/etc/containerd/conf.d/30-late.toml") == runc(2)


@pytest.mark.parametrize("imports", ['["/etc/containerd/extra.toml", "/etc/ctr.d/*.toml"]', '["../ctr.d/*.toml"]'])
def test_with_version_3_a_folder_that_is_imported_is_used(node: Node, imports: str) -> None:
    text = runc(3, head=f"imports = {imports}\n")
    node.place(CONFIG, text)
    assert node.configure("containerd") == 0
    assert node.text(CONFIG) == text
    assert "nvidia" in section(node, "/etc/ctr.d/99-nvhook-nvidia.toml", 3)["containerd"]["runtimes"]
    assert node.configure("containerd", "--remove") == 0
    assert node.text(CONFIG) == text
    assert not (node.folder / "etc/ctr.d/99-nvhook-nvidia.toml").exists()


def test_two_names_share_the_import(node: Node) -> None:
    node.place(CONFIG, runc(3))
    assert node.configure("containerd") == 0
    assert node.configure("containerd", "--name", "second") == 0
    assert node.configure("containerd", "--remove") == 0
    assert tomlkit.parse(node.text(CONFIG))["imports"] == ["/etc/containerd/conf.d/*.toml"]
    assert node.configure("containerd", "--name", "second", "--remove") == 0
    assert node.text(CONFIG) == runc(3)


def test_what_somebody_wrote_in_between_stays(node: Node) -> None:
    node.place(CONFIG, runc(3))
    assert node.configure("containerd", "--set-default") == 0
    node.place(CONFIG, node.text(CONFIG) + '\n[grpc]\n  address = "/x"\n')
    node.place(DROP_IN, node.text(DROP_IN) + '\n[debug]\n  level = "debug"\n')
    assert node.configure("containerd", "--remove") == 0
    assert node.text(CONFIG).split() == (runc(3) + '\n[grpc]\n  address = "/x"\n').split()
    assert tomlkit.parse(node.text(DROP_IN)).unwrap() == {"version": 3, "debug": {"level": "debug"}}


def nvidia(version: int, head: str = "") -> str:
    """A file as NVIDIA's toolkit leaves it."""
    table = f'plugins."{CRI[version]}".containerd.runtimes.nvidia'
    entry = f'\n[{table}]\n  runtime_type = "io.containerd.runc.v2"\n'
    return f'{runc(version, head=head)}{entry}  [{table}.options]\n    BinaryName = "{THEIRS}"\n'


@pytest.mark.parametrize("version", [2, 3])
def test_another_runtime_of_that_name_needs_force(node: Node, version: int, capsys: pytest.CaptureFixture[str]) -> None:
    node.place(CONFIG, nvidia(version))
    state = node.state()
    assert node.configure("containerd") == 1
    printed = capsys.readouterr()
    assert f"is the runtime {THEIRS}" in printed.err and RUNTIME in printed.out
    assert node.state() == state
    assert node.configure("containerd", "--force") == 0
    assert node.configure("containerd") == (0 if version == 2 else 1)
    assert node.configure("containerd", "--remove") == 0
    assert node.text(CONFIG) == nvidia(version)


def test_a_later_file_would_win_whatever_we_write(node: Node, capsys: pytest.CaptureFixture[str]) -> None:
    node.place(CONFIG, runc(3, head='imports = ["/etc/containerd/conf.d/*.toml"]\n'))
    node.place("/etc/containerd/conf.d/99-nvidia.toml", nvidia(3))
    state = node.state()
    assert node.configure("containerd", "--force") == 1
    assert "/etc/containerd/conf.d/99-nvidia.toml: the runtime nvidia is" in capsys.readouterr().err
    assert node.state() == state
    assert node.configure("containerd", "--name", "nvhook") == 0


def test_the_base_is_the_default_runtime_and_never_a_wrapper(node: Node) -> None:
    text = nvidia(2) + f'\n[plugins."{CRI[2]}".containerd]\n  default_runtime_name = "nvidia"\n'
    node.place(CONFIG, text)
    assert node.configure("containerd", "--name", "nvhook", "--set-default") == 0
    made = section(node, CONFIG, 2)["containerd"]
    assert made["runtimes"]["nvhook"]["options"] == {"SystemdCgroup": True, "BinaryName": RUNTIME}
    assert node.configure("containerd", "--name", "nvhook", "--remove") == 0
    assert node.text(CONFIG) == text


def test_a_broken_file_is_told_and_left_alone(node: Node, capsys: pytest.CaptureFixture[str]) -> None:
    node.place(CONFIG, "version = 2\n[plugins\n")
    state = node.state()
    assert node.configure("containerd") == 1
    assert "/etc/containerd/config.toml is no TOML" in capsys.readouterr().err
    node.place(CONFIG, 'version = "two"\n')
    assert node.configure("containerd") == 1
    assert "version is 'two'" in capsys.readouterr().err
    assert node.state().keys() == state.keys()


def test_notes(node: Node, capsys: pytest.CaptureFixture[str]) -> None:
    node.place("/var/lib/rancher/k3s/x", "")
    assert node.configure("containerd") == 0
    assert "nvhook configure k3s" in capsys.readouterr().err
    node.place(CONFIG, 'disabled_plugins = ["cri"]\n')
    assert node.configure("containerd") == 0
    assert "CRI plugin in disabled_plugins" in capsys.readouterr().err
