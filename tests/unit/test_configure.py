# SPDX-License-Identifier: Apache-2.0
"""`nvhook configure`: what all engines have in common, shown with docker's file (needs.md's case C07)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hook.engines import files, lowlevel
from tests.nodes import Node

THEIRS = '{\n  "log-driver": "local",\n  "features": {"buildkit": true},\n  "runtimes": {"other": {"path": "/o"}}\n}\n'


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


def test_other_keys_stay_and_the_second_time_nothing_changes(node: Node, capsys: pytest.CaptureFixture[str]) -> None:
    node.place("/etc/docker/daemon.json", THEIRS).chmod(0o640)
    assert node.configure("docker", "--cdi", "--set-default") == 0
    assert capsys.readouterr().out.splitlines() == [
        "docker: changed /etc/docker/daemon.json",
        "docker: to put it in force: systemctl restart docker",
    ]
    assert json.loads(node.daemon_json.read_text()) == {
        "log-driver": "local",
        "features": {"buildkit": True, "cdi": True},
        "runtimes": {"other": {"path": "/o"}, "nvidia": {"path": "/usr/bin/nvhook-runtime"}},
        "default-runtime": "nvidia",
    }
    assert node.daemon_json.stat().st_mode & 0o7777 == 0o640
    state = node.state()
    assert node.configure("docker", "--cdi", "--set-default") == 0
    assert node.configure("docker") == 0
    assert capsys.readouterr().out.splitlines() == ["docker: unchanged"] * 2
    assert node.state() == state
    assert node.configure("docker", "--remove") == 0
    assert node.daemon_json.read_text() == THEIRS
    assert node.daemon_json.stat().st_mode & 0o7777 == 0o640
    assert not (node.folder / "var/lib/nvhook").exists()


@pytest.mark.parametrize("text", [None, "", "\n", "{}", "{ }\n"])
def test_no_file_and_an_empty_one(node: Node, text: str | None) -> None:
    if text is not None:
        node.place("/etc/docker/daemon.json", text)
    old = os.umask(0o077)
    try:
        assert node.configure("docker") == 0
    finally:
        os.umask(old)
    assert json.loads(node.daemon_json.read_text()) == {"runtimes": {"nvidia": {"path": "/usr/bin/nvhook-runtime"}}}
    assert node.daemon_json.stat().st_mode & 0o777 == 0o644
    assert node.daemon_json.parent.stat().st_mode & 0o777 == 0o755
    assert node.configure("docker", "--remove") == 0
    assert (node.daemon_json.read_text() if node.daemon_json.exists() else None) == text


def test_folders_that_were_made_for_a_file_go_with_it(node: Node) -> None:
    folder = node.daemon_json.parent
    assert not folder.exists()
    for beside in (None, "certificate"):
        assert node.configure("docker", "--name", "one") == node.configure("docker", "--name", "two") == 0
        if beside:
            (folder / beside).touch()
        assert node.configure("docker", "--name", "one", "--remove") == 0
        assert node.daemon_json.exists()
        assert node.configure("docker", "--name", "two", "--remove") == 0
        assert folder.exists() == bool(beside)
    (folder / "certificate").unlink()
    # One that was there stays.
    assert node.configure("docker") == node.configure("docker", "--remove") == 0
    assert list(folder.iterdir()) == []


def test_a_broken_file_is_told_and_left_alone(node: Node, capsys: pytest.CaptureFixture[str]) -> None:
    node.place("/etc/docker/daemon.json", THEIRS[:-20])
    state = node.state()
    assert node.configure("docker") == 1
    printed = capsys.readouterr()
    assert "/etc/docker/daemon.json is no JSON: line 4 column" in printed.err
    assert node.state() == state


def test_a_dry_run_shows_what_would_change(node: Node, capsys: pytest.CaptureFixture[str]) -> None:
    node.place("/etc/docker/daemon.json", THEIRS)
    state = node.state()
    assert node.configure("docker", "--dry-run") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["--- /etc/docker/daemon.json", "+++ /etc/docker/daemon.json"]
    assert [line for line in lines[2:] if line.startswith("-")] == ['-  "runtimes": {"other": {"path": "/o"}}']
    assert len([line for line in lines[2:] if line.startswith("+")]) == 1
    assert node.state() == state


def test_a_dry_run_says_all_that_the_run_would(node: Node, capsys: pytest.CaptureFixture[str]) -> None:
    node.place("/var/lib/rancher/k3s/agent/etc/containerd/config.toml", "version = 3\n")
    assert node.configure("k3s", "--set-default", "--dry-run") == 0
    printed = capsys.readouterr()
    assert "+# nvhook nvidia: begin" in printed.out and "default-runtime: nvidia" in printed.err
    assert node.configure("docker") == 0
    capsys.readouterr()
    assert node.configure("docker", "--dry-run") == 0
    assert capsys.readouterr().out == "docker: unchanged\n"
    assert node.configure("docker", "--remove", "--name", "other", "--dry-run") == 0
    assert capsys.readouterr().out == "docker: unchanged\n"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["docker", "--json"], "--json goes with --status"),
        (["--json"], "name an engine, or give --status"),
        (["docker", "--hook"], "--hook goes with podman and crio"),
        (["containerd", "--hook", "--remove"], "--hook goes with podman and crio"),
        (["k3s", "--hook"], "--hook goes with podman and crio"),
    ],
)
def test_options_that_do_not_go_together(
    node: Node, words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    state = node.state()
    assert node.configure(*words) == 2
    assert said in capsys.readouterr().err
    assert node.state() == state


def test_a_diff_has_what_letters_stdout_has(node: Node, tree: Path) -> None:
    node.place("/etc/docker/daemon.json", '{"label": "é"}')
    words = [sys.executable, "-m", "hook", "configure", "docker", "--dry-run", "--root", str(node.folder)]
    environment = {**os.environ, "PYTHONPATH": str(tree), "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert '-{"label": "\\xe9"}' in done.stdout


def test_another_runtime_of_that_name_needs_force(node: Node, capsys: pytest.CaptureFixture[str]) -> None:
    theirs = '{"runtimes": {"nvidia": {"path": "nvidia-container-runtime", "runtimeArgs": []}}}'
    node.place("/etc/docker/daemon.json", theirs)
    state = node.state()
    assert node.configure("docker") == 1
    printed = capsys.readouterr()
    assert "runtimes.nvidia is the runtime nvidia-container-runtime" in printed.err
    assert "+" in printed.out and "/usr/bin/nvhook-runtime" in printed.out
    assert node.state() == state
    assert node.configure("docker", "--force") == 0
    entry = json.loads(node.daemon_json.read_text())["runtimes"]["nvidia"]
    assert entry == {"path": "/usr/bin/nvhook-runtime", "runtimeArgs": []}
    assert node.configure("docker", "--remove") == 0
    assert node.daemon_json.read_text() == theirs


def test_what_somebody_changed_in_between_stays(node: Node) -> None:
    node.place("/etc/docker/daemon.json", '{"default-runtime": "mine", "debug": false}')
    assert node.configure("docker", "--set-default", "--cdi") == 0
    value = json.loads(node.daemon_json.read_text())
    value["debug"] = True
    node.daemon_json.write_text(json.dumps(value))
    assert node.configure("docker", "--remove") == 0
    assert json.loads(node.daemon_json.read_text()) == {"default-runtime": "mine", "debug": True}
    assert not (node.folder / "var/lib/nvhook").exists()


def test_without_a_record_the_runtime_goes_and_switches_stay(node: Node) -> None:
    node.place("/etc/docker/daemon.json", THEIRS)
    assert node.configure("docker", "--set-default", "--cdi") == 0
    (node.folder / files.Record.name("/etc/docker/daemon.json")[1:]).unlink()
    assert node.configure("docker", "--remove") == 0
    assert json.loads(node.daemon_json.read_text()) == json.loads(THEIRS) | {
        "features": {"buildkit": True, "cdi": True}
    }


def test_two_names_come_and_go_each_for_itself(node: Node) -> None:
    node.place("/etc/docker/daemon.json", THEIRS)
    for name in ("one", "two"):
        assert node.configure("docker", "--name", name, "--cdi") == 0
    assert node.configure("docker", "--name", "one", "--remove") == 0
    value = json.loads(node.daemon_json.read_text())
    assert (list(value["runtimes"]), value["features"]["cdi"]) == (["other", "two"], True)
    assert node.configure("docker", "--name", "two", "--remove") == 0
    assert node.daemon_json.read_text() == THEIRS


def test_a_link_stays_one(node: Node) -> None:
    node.place("/opt/site/daemon.json", THEIRS)
    node.daemon_json.parent.mkdir(parents=True)
    node.daemon_json.symlink_to("/opt/site/daemon.json")
    assert node.configure("docker") == 0
    assert node.daemon_json.is_symlink()
    assert "nvhook-runtime" in (node.folder / "opt/site/daemon.json").read_text()


@pytest.mark.parametrize("target", ["/opt/site/daemon.json", "../../opt/site/daemon.json", "link"])
def test_a_link_that_leads_nowhere_yet_stays_one_too(node: Node, target: str) -> None:
    node.daemon_json.parent.mkdir(parents=True)
    node.daemon_json.symlink_to(target)
    (node.daemon_json.parent / "link").symlink_to("/opt/site/daemon.json")
    (node.folder / "opt/site").mkdir(parents=True)
    file = node.folder / "opt/site/daemon.json"
    assert node.configure("docker") == 0
    assert node.daemon_json.is_symlink() and "nvhook-runtime" in file.read_text()
    assert node.configure("docker", "--remove") == 0
    assert node.daemon_json.is_symlink() and os.readlink(node.daemon_json) == target
    assert not file.exists() and file.parent.is_dir()


def test_a_link_into_a_folder_that_is_not_there(node: Node, capsys: pytest.CaptureFixture[str]) -> None:
    node.daemon_json.parent.mkdir(parents=True)
    node.daemon_json.symlink_to("/opt/site/daemon.json")
    for words in ([], ["--dry-run"], ["--force"]):
        assert node.configure("docker", *words) == 1
        said = "/etc/docker/daemon.json is a link to /opt/site/daemon.json, whose folder is not there"
        assert said in capsys.readouterr().err
    assert node.configure("docker", "--remove") == 0
    assert node.daemon_json.is_symlink() and not (node.folder / "opt").exists()
    assert not (node.folder / "var").exists()
    node.daemon_json.unlink()
    node.daemon_json.symlink_to("daemon.json")
    assert node.configure("docker") == 1
    assert "cannot read /etc/docker/daemon.json" in capsys.readouterr().err
    assert node.daemon_json.is_symlink()


def test_a_folder_that_is_a_link_leads_inside_the_root(node: Node, tmp_path_factory: pytest.TempPathFactory) -> None:
    (node.folder / "etc").mkdir()
    outside = tmp_path_factory.mktemp("outside")
    (node.folder / "etc/docker").symlink_to(outside)
    (node.folder / str(outside)[1:]).mkdir(parents=True)
    assert node.configure("docker") == 0
    assert list(outside.iterdir()) == []
    assert (node.folder / str(outside)[1:] / "daemon.json").exists()


@pytest.mark.parametrize("path", ["/run/nvidia/validations/toolkit-ready", "/usr/local/nvidia/toolkit/nvidia-ctk"])
def test_a_node_of_the_operator_is_left_alone(node: Node, path: str, capsys: pytest.CaptureFixture[str]) -> None:
    node.place(path, "")
    state = node.state()
    assert node.configure("docker") == 1
    assert "managed by NVIDIA's GPU operator" in capsys.readouterr().err
    assert node.state() == state
    assert node.configure("docker", "--force") == 0


@pytest.mark.parametrize(
    ("place", "said"), [("/var/snap/docker/current/x", "docker is a snap"), ("/opt/docker-desktop/x", "Docker Desktop")]
)
def test_a_docker_that_could_not_start_nvhook(
    node: Node, place: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    node.place(place, "")
    assert node.configure("docker") == 0
    assert node.configure("docker", "--remove") == 0
    (node.folder / "usr/bin/dockerd").unlink()
    assert node.configure("docker") == 1
    assert said in capsys.readouterr().err


def test_the_runtime_must_be_there(node: Node, capsys: pytest.CaptureFixture[str]) -> None:
    (node.folder / "usr/bin/nvhook-runtime").unlink()
    assert node.configure("docker") == 1
    assert "nvhook-runtime is not installed" in capsys.readouterr().err
    assert node.configure("docker", "--runtime-path", "/opt/x/nvhook-runtime") == 0
    assert "/opt/x/nvhook-runtime" in node.daemon_json.read_text()
    assert node.configure("docker", "--remove") == 0
    assert not node.daemon_json.exists()


@pytest.mark.parametrize("words", [["--name", "runc"], ["--name", "a/b"], ["--config", "x"], ["--runtime-path", "x"]])
def test_wrong_use(node: Node, words: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        node.configure("docker", *words)
    assert ended.value.code == 2


@settings(max_examples=40)
@given(st.recursive(st.integers() | st.text(max_size=3), lambda inner: st.dictionaries(st.text(max_size=3), inner)))
def test_removing_gives_the_old_bytes_back(tmp_path_factory: pytest.TempPathFactory, value: object) -> None:
    node = Node(tmp_path_factory.mktemp("node"))
    text = json.dumps({"theirs": value}, indent=3)
    node.place("/etc/docker/daemon.json", text)
    assert node.configure("docker", "--set-default", "--cdi") == 0
    assert node.daemon_json.read_text() != text
    assert node.configure("docker", "--remove") == 0
    assert node.daemon_json.read_text() == text


def test_the_launcher_is_told_which_runtime_it_passes_on_to(node: Node) -> None:
    (node.folder / "run").mkdir()
    file = node.folder / "run/nvhook/runtime.nvhook-runtime"
    with files.Host(str(node.folder)) as host:
        assert lowlevel.write(host, "nvhook-runtime", "/usr/sbin/runc")
        assert (file.read_text(), file.stat().st_mode & 0o777) == ("/usr/sbin/runc\n", 0o644)
        state = node.state()
        assert not lowlevel.write(host, "nvhook-runtime", "/usr/sbin/runc")
        assert node.state() == state
        # One that somebody else could have written counts for nothing.
        file.chmod(0o666)
        assert lowlevel.write(host, "nvhook-runtime", "/usr/sbin/runc")
        assert file.stat().st_mode & 0o777 == 0o644
