# SPDX-License-Identifier: Apache-2.0
"""`nvhook configure` and real engines: they read what it writes, and find the runtime in it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tomlkit

from hook import cli
from tests.needs import needs_program
from tests.nodes import Node
from tests.system import engines
from tests.system.engines import Debian

HERE = Debian(None)
CRI = "io.containerd.grpc.v1.cri"
RUNTIME = "/usr/bin/nvhook-runtime"


@pytest.fixture
def short() -> Iterator[Path]:
    """A folder with a short path, for sockets."""
    with tempfile.TemporaryDirectory(prefix="nvhook-", ignore_cleanup_errors=True) as name:
        yield Path(name)


def dump(debian: Debian, node: Node) -> dict[str, Any]:
    """What containerd makes of its files."""
    config = f"{node.folder}/etc/containerd/config.toml"
    done = debian.run(debian.program("containerd"), "--config", config, "config", "dump")
    assert done.returncode == 0, done.stderr
    section: dict[str, Any] = tomlkit.parse(done.stdout).unwrap()["plugins"][CRI]
    return section


def check_containerd(debian: Debian, folder: Path) -> None:
    """From no file, from one with a CRI section, and from one that imports."""
    node = Node(folder)
    assert node.configure("containerd", "--set-default", "--cdi") == 0
    found = dump(debian, node)["containerd"]
    assert found["default_runtime_name"] == "nvidia"
    assert found["runtimes"]["nvidia"]["options"]["BinaryName"] == RUNTIME
    assert found["runtimes"]["runc"]["runtime_type"] == "io.containerd.runc.v2"
    assert node.configure("containerd", "--remove") == 0

    text = (
        f'version = 2\nimports = ["{folder}/etc/containerd/conf.d/*.toml"]\n[plugins."{CRI}"]\n  sandbox_image = "s"\n'
        f'[plugins."{CRI}".containerd.runtimes.runc]\n  runtime_type = "io.containerd.runc.v2"\n'
        f'  [plugins."{CRI}".containerd.runtimes.runc.options]\n    SystemdCgroup = true\n'
    )
    node.place("/etc/containerd/config.toml", text)
    assert node.configure("containerd") == 0
    found = dump(debian, node)
    assert found["sandbox_image"] == "s"
    options = found["containerd"]["runtimes"]["nvidia"]["options"]
    assert (options["BinaryName"], options["SystemdCgroup"]) == (RUNTIME, True)
    assert found["containerd"]["runtimes"]["runc"]["options"]["SystemdCgroup"] is True
    assert node.configure("containerd", "--remove") == 0
    assert "nvidia" not in dump(debian, node)["containerd"]["runtimes"]


@needs_program("containerd")
def test_containerd_finds_the_runtime(tmp_path: Path) -> None:
    check_containerd(HERE, tmp_path)


@pytest.mark.long
def test_containerd_of_debian_13_finds_the_runtime(cache: Path, tmp_path: Path) -> None:
    try:
        debian = engines.newer(cache, tmp_path)
    except RuntimeError as error:
        pytest.skip(str(error))
    check_containerd(debian, tmp_path)


def check_docker(debian: Debian, short: Path) -> None:
    """dockerd reads its runtimes again when it is told to, without a start of its own."""
    engine = engines.Docker(debian, short / "docker", {"debug": False})
    try:
        node = Node(short)
        assert node.configure("docker", "--set-default", "--config", "/docker/daemon.json") == 0
        engine.process.send_signal(signal.SIGHUP)
        form = "{{range $name, $ := .Runtimes}}{{$name}} {{end}}{{.DefaultRuntime}}"
        for _ in range(100):
            said = engine.client("info", "--format", form).stdout.split()
            if said[-1:] == ["nvidia"]:
                break
            time.sleep(0.1)
        assert "runc" in said and said.count("nvidia") == 2
    finally:
        engine.close()


@needs_program("dockerd")
def test_docker_finds_the_runtime(short: Path) -> None:
    check_docker(HERE, short)


@pytest.mark.long
def test_docker_of_debian_13_finds_the_runtime(cache: Path, short: Path) -> None:
    try:
        debian = engines.newer(cache, short)
    except RuntimeError as error:
        pytest.skip(str(error))
    check_docker(debian, short)


@needs_program("dockerd")
def test_status_knows_whether_a_daemon_has_read_its_file(short: Path, capsys: pytest.CaptureFixture[str]) -> None:
    node = Node(short)
    config = short / "docker/daemon.json"

    def status() -> tuple[int, dict[str, Any]]:
        capsys.readouterr()
        code = cli.main(["configure", "docker", "--status", "--json"])
        rows = json.loads(capsys.readouterr().out)
        return code, next(row for row in rows if row["files"] == [str(config)])

    engine = engines.Docker(HERE, short / "docker", {})
    try:
        # The daemon came up in the second in which its file was made; a file of before is surely older.
        os.utime(config, (1, 1))
        _, row = status()
        assert (row["pid"], row["names"], row["problem"]) == (engine.process.pid, [], None)
        time.sleep(0.1)
        assert node.configure("docker", "--config", "/docker/daemon.json") == 0
        code, row = status()
        assert (code, row["names"]) == (3, ["nvidia"])
        assert row["problem"].startswith(f"{config} was written after the daemon's start")
    finally:
        engine.close()


@needs_program("podman")
@needs_program("runc")
def test_podman_finds_the_runtime(tmp_path: Path, short: Path) -> None:
    """Its folder is fixed, so this podman sees another one by that name."""
    node = Node(tmp_path)
    runc = HERE.program("runc")
    assert node.configure("podman", "--set-default", "--runtime-path", runc) == 0
    script = 'mount --bind "$1" /etc/containers && shift && exec "$@"'
    private = ["unshare", "--mount", "--propagation", "private", "sh", "-c", script, "sh"]
    words = [*private, str(tmp_path / "etc/containers"), HERE.program("podman"), "--root", str(short / "root")]
    form = "{{.Host.OCIRuntime.Name}} {{.Host.OCIRuntime.Path}}"
    done = HERE.run(*words, "--runroot", str(short / "run"), "--storage-driver", "vfs", "info", "--format", form)
    assert done.stdout.split() == ["nvidia", runc], done.stderr


K3S = """
mount --bind "$1/var/lib" /var/lib && cd "$1" && cp /bin/sh k3s-server && mkfifo wait && echo 'read x <wait' >server
./k3s-server server & pid=$!
sleep 0.2
"$2" -m hook configure k3s --status --json; echo ,
touch var/lib/rancher/k3s/agent/etc/containerd/config-v3.toml.tmpl
"$2" -m hook configure k3s --status --json
kill $pid
"""


def test_status_knows_whether_k3s_was_started_after_its_template(tmp_path: Path, tree: Path) -> None:
    """A process by the name of k3s's own, in a mount namespace with a `/var/lib` of its own: k3s itself is not here."""
    node = Node(tmp_path)
    folder = "/var/lib/rancher/k3s/agent/etc/containerd"
    node.place(f"{folder}/config.toml", "version = 3\n")
    assert node.configure("k3s") == 0
    template = f"{folder}/config-v3.toml.tmpl"
    os.utime(node.folder / template[1:], (1, 1))
    rendered = node.text(template).replace("{{ .SystemdCgroup }}", "true").replace('{{ template "base" . }}', "")
    node.place(f"{folder}/config.toml", f"version = 3\n{rendered}")
    words = ["unshare", "--mount", "--propagation", "private", "sh", "-c", K3S, "sh", str(tmp_path), sys.executable]
    done = subprocess.run(
        words, env={**os.environ, "PYTHONPATH": str(tree)}, capture_output=True, text=True, check=False, timeout=60
    )
    (before,), (after,) = json.loads(f"[{done.stdout}]")
    assert done.stderr == ""
    assert (before["engine"], before["files"]) == ("k3s", [template, f"{folder}/config.toml"])
    assert (before["names"], before["problem"]) == (["nvidia"], None)
    assert before["pid"] == after["pid"] is not None
    assert after["problem"] == f"{template} was written after the daemon's start: restart k3s"
