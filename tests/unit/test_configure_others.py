# SPDX-License-Identifier: Apache-2.0
"""`nvhook configure` for CRI-O, podman, k3s and rke2."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tomlkit

from tests.nodes import Node

RUNTIME = "/usr/bin/nvhook-runtime"
CRIO = "/etc/crio/crio.conf.d/99-nvhook-nvidia.conf"
PODMAN = "/etc/containers/containers.conf.d/99-nvhook-nvidia.conf"
HOOK = "/usr/share/containers/oci/hooks.d/nvhook.json"


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


def twice_and_out(node: Node, *words: str) -> None:
    """The second time changes nothing; taking it out gives all files back as they were before."""
    state = node.state()
    assert node.configure(*words) == 0
    assert node.configure(words[0]) == 0
    assert node.state() == state
    assert node.configure(words[0], "--remove") == 0


def test_crio_gets_a_file_with_the_options_of_its_default(node: Node) -> None:
    node.place("/etc/crio/crio.conf", '[crio.runtime]\ndefault_runtime = "crun"\n')
    crun = '[crio.runtime.runtimes.crun]\nruntime_path = "/opt/crun"\nruntime_root = "/run/crun"\nmonitor_path = "/c"\n'
    node.place("/etc/crio/crio.conf.d/10-crun.conf", crun)
    state = node.state()
    assert node.configure("crio", "--set-default") == 0
    value = tomlkit.parse(node.text(CRIO)).unwrap()["crio"]["runtime"]
    assert value == {
        "default_runtime": "nvidia",
        "runtimes": {
            "nvidia": {
                "runtime_path": RUNTIME,
                "runtime_root": "/run/crun",
                "monitor_path": "/c",
                "runtime_type": "oci",
            }
        },
    }
    twice_and_out(node, "crio", "--set-default")
    assert node.state() == state


def test_crio_without_a_file_and_with_the_hook(node: Node, capsys: pytest.CaptureFixture[str]) -> None:
    state = node.state()
    assert node.configure("crio", "--cdi", "--hook") == 0
    assert "always" in capsys.readouterr().err
    runtimes = tomlkit.parse(node.text(CRIO)).unwrap()["crio"]["runtime"]["runtimes"]
    assert runtimes == {"nvidia": {"runtime_path": RUNTIME, "runtime_type": "oci"}}
    twice_and_out(node, "crio", "--cdi", "--hook")
    assert node.state() == state


def test_crio_and_a_runtime_of_that_name(node: Node, capsys: pytest.CaptureFixture[str]) -> None:
    theirs = '[crio.runtime.runtimes.nvidia]\nruntime_path = "/usr/bin/nvidia-container-runtime"\n'
    early, late = "/etc/crio/crio.conf.d/99-nvidia.conf", "/etc/crio/crio.conf"
    node.place(late, theirs)
    assert node.configure("crio") == 1
    assert f"{late}: the runtime nvidia is the runtime /usr/bin/nvidia-container-runtime" in capsys.readouterr().err
    assert node.configure("crio", "--force") == 0
    assert node.configure("crio", "--remove") == 0
    node.place(early, theirs)
    assert node.configure("crio", "--force") == 1
    assert f"{early}: the runtime nvidia is" in capsys.readouterr().err


def test_podman_gets_a_file_and_where_wanted_the_hook(node: Node, capsys: pytest.CaptureFixture[str]) -> None:
    state = node.state()
    assert node.configure("podman", "--set-default", "--hook") == 0
    assert "restart" not in capsys.readouterr().out
    value = tomlkit.parse(node.text(PODMAN)).unwrap()
    assert value == {"engine": {"runtime": "nvidia", "runtimes": {"nvidia": [RUNTIME]}}}
    assert json.loads(node.text(HOOK)) == {
        "version": "1.0.0",
        "hook": {"path": "/usr/bin/nvhook-prestart", "args": ["nvhook-prestart"]},
        "when": {"always": True},
        "stages": ["prestart"],
    }
    assert node.configure("podman", "--name", "second") == 0
    assert node.configure("podman", "--name", "second", "--remove") == 0
    assert "nvhook-prestart" in node.text(HOOK)
    twice_and_out(node, "podman", "--set-default", "--hook")
    assert node.state() == state


def test_podman_asks_before_it_replaces(node: Node, capsys: pytest.CaptureFixture[str]) -> None:
    node.place("/etc/site.conf", '[engine]\n[engine.runtimes]\nnvidia = ["/usr/bin/nvidia-container-runtime"]\n')
    state = node.state()
    assert node.configure("podman", "--config", "/etc/site.conf") == 1
    assert "is the runtime ['/usr/bin/nvidia-container-runtime']" in capsys.readouterr().err
    assert node.configure("podman", "--config", "/etc/site.conf", "--force") == 0
    assert node.configure("podman", "--config", "/etc/site.conf", "--remove") == 0
    assert {name: content for name, (content, _, _) in node.state().items()} == {
        name: content for name, (content, _, _) in state.items()
    }


@pytest.mark.parametrize("engine", ["k3s", "rke2"])
@pytest.mark.parametrize("version", [2, 3])
def test_k3s_and_rke2_get_a_block_in_the_template(
    node: Node, engine: str, version: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert node.configure(engine) == 1
    assert f"start {engine} once" in capsys.readouterr().err
    folder = f"/var/lib/rancher/{engine}/agent/etc/containerd"
    node.place(f"{folder}/config.toml", f"version = {version}\n")
    template = f"{folder}/{'config.toml.tmpl' if version == 2 else 'config-v3.toml.tmpl'}"
    state = node.state()
    assert node.configure(engine, "--set-default") == 0
    assert "default-runtime: nvidia" in capsys.readouterr().err
    plugin = "io.containerd.grpc.v1.cri" if version == 2 else "io.containerd.cri.v1.runtime"
    assert node.text(template) == (
        '{{ template "base" . }}\n\n# nvhook nvidia: begin\n'
        f"[plugins.'{plugin}'.containerd.runtimes.'nvidia']\n"
        '  runtime_type = "io.containerd.runc.v2"\n'
        f"[plugins.'{plugin}'.containerd.runtimes.'nvidia'.options]\n"
        '  BinaryName = "/usr/bin/nvhook-runtime"\n  SystemdCgroup = {{ .SystemdCgroup }}\n# nvhook nvidia: end\n'
    )
    # Rendered, it is what containerd reads.
    rendered = node.text(template).replace("{{ .SystemdCgroup }}", "true").replace('{{ template "base" . }}', "")
    options = tomlkit.parse(rendered).unwrap()["plugins"][plugin]["containerd"]["runtimes"]["nvidia"]["options"]
    assert options == {"BinaryName": RUNTIME, "SystemdCgroup": True}
    assert node.configure(engine, "--name", "second") == 0
    assert node.configure(engine, "--name", "second", "--remove") == 0
    twice_and_out(node, engine)
    assert node.state() == state


def test_a_template_that_is_there_keeps_its_text(node: Node) -> None:
    folder = "/var/lib/rancher/k3s/agent/etc/containerd"
    node.place(f"{folder}/config.toml", "version = 3\n")
    text = '{{ template "base" . }}\n{{ if .X }}\n[x]\n{{ end }}'
    node.place(f"{folder}/config-v3.toml.tmpl", text)
    assert node.configure("k3s") == 0
    made = node.text(f"{folder}/config-v3.toml.tmpl")
    assert made.startswith(text)
    node.place(f"{folder}/config-v3.toml.tmpl", f"{made}\n[y]\n")
    assert node.configure("k3s", "--remove") == 0
    assert node.text(f"{folder}/config-v3.toml.tmpl") == f"{text}\n\n[y]\n"


def test_a_runtime_that_k3s_found_itself(node: Node, capsys: pytest.CaptureFixture[str]) -> None:
    """k3s registers NVIDIA's runtime as `nvidia` where it is installed."""
    made = '[plugins."io.containerd.cri.v1.runtime".containerd.runtimes.nvidia.options]\nBinaryName = "/n"\n'
    node.place("/var/lib/rancher/k3s/agent/etc/containerd/config.toml", f"version = 3\n{made}")
    assert node.configure("k3s", "--force") == 1
    assert "config.toml: the runtime nvidia is the runtime /n" in capsys.readouterr().err
    assert node.configure("k3s", "--name", "nvhook") == 0


def test_status_of_a_host_at_rest(node: Node, capsys: pytest.CaptureFixture[str]) -> None:
    assert node.configure("--status") == 0
    assert capsys.readouterr().out == "no engine runs here or has a file\n"
    node.place("/etc/containerd/config.toml", "version = 3\n")
    node.place("/etc/docker/daemon.json", "{")
    node.place("/etc/crio/crio.conf", "")
    for engine in ("containerd", "podman"):
        assert node.configure(engine) == 0
    capsys.readouterr()
    assert node.configure("--status") == 3
    lines = capsys.readouterr().out.splitlines()
    drop_in = "/etc/containerd/conf.d/99-nvhook-nvidia.toml"
    assert lines[0].startswith("docker (not running) reads /etc/docker/daemon.json: has no nvhook; ")
    assert lines[1:] == [
        f"containerd (not running) reads /etc/containerd/config.toml, {drop_in}: has nvhook as nvidia",
        "crio (not running) reads /etc/crio/crio.conf: has no nvhook",
        f"podman reads {PODMAN}: has nvhook as nvidia",
    ]
    assert node.configure() == 2


NVIDIAS = "/usr/bin/nvidia-container-runtime"
FOREIGN = {
    "docker": (
        "/etc/docker/daemon.json",
        f'{{"default-runtime":"nvidia","runtimes":{{"nvidia":{{"path":"{NVIDIAS}"}}}}}}',
        "runtimes.nvidia",
    ),
    "containerd": (
        "/etc/containerd/config.toml",
        'version = 2\n[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.nvidia.options]\n'
        f'BinaryName = "{NVIDIAS}"\n',
        "plugins.io.containerd.grpc.v1.cri.containerd.runtimes.nvidia",
    ),
    "crio": (CRIO, f'[crio.runtime.runtimes.nvidia]\nruntime_path = "{NVIDIAS}"\n', "crio.runtime.runtimes.nvidia"),
    "podman": (PODMAN, f'[engine.runtimes]\nnvidia = ["{NVIDIAS}"]\n', "engine.runtimes.nvidia"),
}


@pytest.mark.parametrize("engine", FOREIGN)
def test_somebody_elses_runtime_is_not_taken_out(node: Node, engine: str, capsys: pytest.CaptureFixture[str]) -> None:
    path, text, key = FOREIGN[engine]
    node.place(path, text)
    state = node.state()
    assert node.configure(engine, "--remove") == 0
    said = capsys.readouterr().out
    assert f"{engine}: {path}: {key} is the runtime " in said
    assert NVIDIAS in said and ": left alone\n" in said
    assert node.state() == state
    assert node.configure(engine, "--remove", "--force") == 0
    assert "left alone" not in capsys.readouterr().out
    left = node.text(path) if (node.folder / path[1:]).exists() else ""
    assert NVIDIAS not in left
    assert left == {"docker": "{}", "containerd": "version = 2\n"}.get(engine, "")


@pytest.mark.parametrize("engine", FOREIGN)
def test_ours_goes_wherever_it_was_installed_and_without_a_record(node: Node, engine: str) -> None:
    path, text, _ = FOREIGN[engine]
    node.place(path, text.replace(NVIDIAS, "/usr/local/bin/nvhook-runtime"))
    assert node.configure(engine, "--remove") == 0
    assert "nvidia" not in (node.text(path) if (node.folder / path[1:]).exists() else "")


@pytest.mark.parametrize("engine", FOREIGN)
def test_what_somebody_put_in_the_place_of_ours_stays(node: Node, engine: str) -> None:
    path, text, _ = FOREIGN[engine]
    assert node.configure(engine, "--runtime-path", "/opt/x/launcher") == 0
    node.place(path, text)
    assert node.configure(engine, "--remove") == 0
    assert node.text(path) == text
    # That ours was there is forgotten.
    assert node.configure(engine, "--force") == node.configure(engine, "--remove") == 0
    assert node.text(path) == text


@pytest.mark.parametrize("path", ["/etc/crio/crio.conf", "/etc/crio/crio.conf.d/99-zz.conf"])
def test_crio_tells_what_another_file_has(node: Node, path: str, capsys: pytest.CaptureFixture[str]) -> None:
    node.place(path, FOREIGN["crio"][1])
    assert node.configure("crio", "--remove") == 0
    said = [f"crio: {path}: the runtime nvidia is the runtime {NVIDIAS}: left alone", "crio: unchanged"]
    assert capsys.readouterr().out.splitlines() == said


def test_a_default_that_is_not_ours_stays(node: Node) -> None:
    """dockerd may have its runtimes as arguments."""
    node.place("/etc/docker/daemon.json", '{"default-runtime": "nvidia"}')
    assert node.configure("docker", "--remove") == 0
    assert node.text("/etc/docker/daemon.json") == '{"default-runtime": "nvidia"}'


@pytest.mark.parametrize("path", ["/usr/share/containers/containers.conf", "/etc/containers/containers.conf"])
def test_podman_overrules_an_earlier_file_only_where_that_is_wanted(
    node: Node, path: str, capsys: pytest.CaptureFixture[str]
) -> None:
    node.place(path, FOREIGN["podman"][1])
    state = node.state()
    assert node.configure("podman") == 1
    assert f"{path}: the runtime nvidia is the runtime ['{NVIDIAS}']" in capsys.readouterr().err
    assert node.state() == state
    assert node.configure("podman", "--force") == 0
    capsys.readouterr()
    assert node.configure("podman", "--remove") == 0
    assert f"podman: {path}: the runtime nvidia is the runtime ['{NVIDIAS}']: left alone" in capsys.readouterr().out
    assert node.state() == state


def test_a_later_file_of_podmans_wins_whatever_we_write(node: Node, capsys: pytest.CaptureFixture[str]) -> None:
    late = "/etc/containers/containers.conf.d/99-zz.conf"
    node.place(late, FOREIGN["podman"][1])
    state = node.state()
    for words in ([], ["--force"], ["--config", "/etc/containers/containers.conf"]):
        assert node.configure("podman", *words) == 1
        assert f"{late}: the runtime nvidia is" in capsys.readouterr().err
    assert node.state() == state
    assert node.configure("podman", "--name", "nvhook") == 0
    # A user's own file is read behind all of them.
    assert node.configure("podman", "--config", "/home/u/containers.conf", "--force") == 0


@pytest.mark.parametrize("path", ["/etc/containers/containers.conf", "/etc/containers/containers.conf.d/10-x.conf"])
def test_a_broken_file_of_podmans_is_told(node: Node, path: str, capsys: pytest.CaptureFixture[str]) -> None:
    node.place(path, "[engine\n")
    state = node.state()
    assert node.configure("podman") == 1
    assert f"{path} is no TOML" in capsys.readouterr().err
    assert node.configure("--status") == 3
    assert f"{path} is no TOML" in capsys.readouterr().out
    assert node.state() == state


def test_status_lists_all_files_of_podman(node: Node, capsys: pytest.CaptureFixture[str]) -> None:
    main = "/etc/containers/containers.conf"
    node.place(main, FOREIGN["podman"][1].replace(NVIDIAS, RUNTIME))
    assert node.configure("--status") == 0
    assert capsys.readouterr().out == f"podman reads {main}: has nvhook as nvidia\n"
    node.place(PODMAN, FOREIGN["podman"][1])
    assert node.configure("--status") == 0
    assert capsys.readouterr().out == f"podman reads {main}, {PODMAN}: has no nvhook\n"


@pytest.mark.parametrize("path", [CRIO, PODMAN])
def test_status_of_an_engine_that_has_nothing_but_a_drop_in(
    node: Node, path: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert node.configure("crio" if path == CRIO else "podman") == 0
    capsys.readouterr()
    assert node.configure("--status") == 0
    engine = "crio (not running)" if path == CRIO else "podman"
    assert capsys.readouterr().out == f"{engine} reads {path}: has nvhook as nvidia\n"


@pytest.mark.parametrize("engine", ["k3s", "rke2"])
def test_status_tells_whether_k3s_has_taken_its_template(
    node: Node, engine: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = f"/var/lib/rancher/{engine}/agent/etc/containerd"
    made, template = f"{folder}/config.toml", f"{folder}/config-v3.toml.tmpl"
    head = f"{engine} (not running) reads "

    def status() -> tuple[int, str]:
        capsys.readouterr()
        code = node.configure(engine, "--status")
        return code, capsys.readouterr().out.rstrip("\n")

    node.place(made, "version = 3\n")
    assert status() == (0, f"{head}{made}: has no nvhook")
    assert node.configure(engine) == 0
    reads = f"{head}{template}, {made}"
    assert status() == (3, f"{reads}: has nvhook as nvidia; {made} has no nvidia yet: restart {engine}")
    rendered = node.text(template).replace("{{ .SystemdCgroup }}", "true").replace('{{ template "base" . }}', "")
    node.place(made, f"version = 3\n{rendered}")
    assert status() == (0, f"{reads}: has nvhook as nvidia")
    assert node.configure(engine, "--remove") == 0
    assert status() == (3, f"{head}{made}: has nvhook as nvidia; {made} still has nvidia: restart {engine}")
    node.place(made, "version = 3\n")
    assert status() == (0, f"{head}{made}: has no nvhook")
    (node.folder / made[1:]).unlink()
    node.place(f"{folder}/config.toml.tmpl", "")
    assert status() == (0, f"{head}{folder}/config.toml.tmpl: has no nvhook")
