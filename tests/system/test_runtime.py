# SPDX-License-Identifier: Apache-2.0
"""`nvhook-runtime` in front of real runc: what config.json, the root and the container become."""

from __future__ import annotations

import json
import os
import pty
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from cdi import cli, inject, spec
from hook import install, planner
from tests import roots
from tests.containers import Bundle, hook
from tests.needs import needs_path, needs_program
from tests.simhost import SimulatedHost
from tests.system.prestart import MULTIARCH, allowed, nvhook, proc_hook, tree_of, visible
from tests.system.shim import Shim, config, gpus

pytestmark = needs_program("runc")

TRY_NODES = "for number in 0 1; do echo nvidia$number: $(cat /dev/nvidia$number 2>&1); done"
HOST_CONFIG = "etc/nvhook/config.toml"


@pytest.fixture
def shim(prefix: Path, host: SimulatedHost, tmp_path: Path) -> Shim:
    return Shim(prefix, host, tmp_path)


@pytest.fixture
def settings(host: SimulatedHost) -> Any:
    """A function that writes the host's configuration file, which is gone afterwards."""
    file = host.root / HOST_CONFIG

    def write(text: str) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    yield write
    shutil.rmtree(file.parent, ignore_errors=True)
    for path in (host.root / "run/nvhook").glob("runtime.*"):
        path.unlink()


@pytest.fixture
def nvidias(host: SimulatedHost) -> Any:
    """Likewise NVIDIA's."""
    file = host.root / "etc/nvidia-container-runtime/config.toml"

    def write(text: str) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    yield write
    shutil.rmtree(file.parent, ignore_errors=True)


# What a container gets


def test_a_container_has_its_gpu_and_no_other(shim: Shim, cgroup: str) -> None:
    script = f"resolve libcuda.so.1 libcuda.so; ls /dev | grep nvidia; {TRY_NODES}; echo $NVIDIA_VISIBLE_DEVICES"
    bundle = shim.bundle(script, env=visible("1"), cgroup=cgroup)
    lines = shim.output(bundle)
    assert lines[:2] == [f"{name} {MULTIARCH}/libcuda.so.1" for name in ("libcuda.so.1", "libcuda.so")]
    assert lines[2:6] == ["nvidia-uvm", "nvidia-uvm-tools", "nvidia1", "nvidiactl"]
    assert "No such file" in lines[6] and allowed(lines, 1)
    assert lines[8] == "void"
    made = config(bundle)
    assert made["hooks"] == {"prestart": [], "createContainer": []}
    asked = {"devices": ["1"], "capabilities": ["compute", "utility"]}
    assert json.loads(made["annotations"]["nvhook.request"]) == asked


def test_capabilities_and_requirements_count(shim: Shim) -> None:
    bundle = shim.bundle("resolve libcuda.so.1; ls /usr/bin | grep nvidia-smi", env=visible("0", "utility"))
    done = shim.run(bundle)
    assert "cannot open shared object file" in done.stdout and done.stdout.endswith("\nnvidia-smi\n")
    bundle = shim.bundle("true", env=visible("0") | {"NVIDIA_REQUIRE_CUDA": "cuda>=99.0"})
    done = shim.run(bundle)
    assert done.returncode == 1 and "NVIDIA_REQUIRE_CUDA is not met" in done.stderr


@pytest.mark.parametrize("name", ["nvhook-runtime", "nvidia-container-runtime.cdi"])
@pytest.mark.parametrize("mode", ["auto", "cdi", "jit-cdi", "csv"])
def test_nvidias_file_in_modes_that_enforce_nothing(
    prefix: Path, shim: Shim, host: SimulatedHost, nvidias: Any, name: str, mode: str
) -> None:
    """NVIDIA's runtime reads capabilities and requirements in neither, and the prestart hook in all."""
    nvidias(f'[nvidia-container-runtime]\nmode = "{mode}"\n')
    if name != shim.program.name:
        shim = Shim(prefix, host, shim.folder, name)
    env = visible("runtime.nvidia.com/gpu=0", "utility,bogus")
    env |= {"NVIDIA_REQUIRE_CUDA": "cuda>=99.0", "NVIDIA_REQUIRE_X": "junk", "NVIDIA_REQUIRE_Y": "brand=none"}
    script = "resolve libcuda.so.1"
    bundle = shim.bundle(script, env=env, cgroup=None)
    done = shim.run(bundle)
    if mode == "csv" and name == "nvhook-runtime":
        assert done.returncode == 1 and "unknown driver capabilities" in done.stderr
    else:
        assert done.returncode == 0, done.stderr
        assert done.stdout == f"libcuda.so.1 {MULTIARCH}/libcuda.so.1\n"
        for text in ("bogus: ignored", "NVIDIA_REQUIRE_CUDA is not met", "NVIDIA_REQUIRE_X holds 'junk'"):
            assert text in done.stderr
    hooked = Bundle(
        shim.folder / "hooked", bundle.root, ["/bin/true"], env=visible("0", "bogus"), prestart=nvhook(prefix, host)
    )
    done = hooked.run()
    assert done.returncode == 1 and "unknown driver capabilities" in done.stderr


def test_no_gpu_asked_for_leaves_everything_as_it_is(shim: Shim, host: SimulatedHost) -> None:
    for env in ({}, visible("void"), visible("")):
        bundle = shim.bundle("echo started; ls /dev | grep nvidia", env=env)
        bundle.write()
        file = bundle.folder / "config.json"
        before, status = file.read_bytes(), file.stat()
        done = shim.call(bundle, "run", "--bundle", str(bundle.folder), bundle.name)
        assert done.stdout == "started\n"
        assert (file.read_bytes(), file.stat().st_mtime_ns, file.stat().st_ino) == (
            before,
            status.st_mtime_ns,
            status.st_ino,
        )


def test_on_its_own_output_it_changes_nothing(shim: Shim) -> None:
    bundle = shim.bundle("resolve libcuda.so.1", env=visible("0"))
    shim.output(bundle)
    file = bundle.folder / "config.json"
    before, root, status = file.read_bytes(), tree_of(bundle.root), file.stat()
    done = shim.call(bundle, "run", "--bundle", str(bundle.folder), bundle.name)
    assert done.stdout == f"libcuda.so.1 {MULTIARCH}/libcuda.so.1\n"
    assert (file.read_bytes(), file.stat().st_ino) == (before, status.st_ino)
    assert tree_of(bundle.root) == root


def test_a_container_of_the_same_root_again(shim: Shim) -> None:
    """An engine starts a stopped container from a new config.json and the root that the last start left."""
    bundle = shim.bundle("resolve libcuda.so.1", env=visible("0"))
    first = shim.output(bundle)
    root = tree_of(bundle.root)
    assert shim.output(bundle) == first
    assert tree_of(bundle.root) == root


def test_what_is_unknown_stays_and_so_do_owner_and_mode(shim: Shim) -> None:
    bundle = shim.bundle("true", env=visible("0"))
    bundle.write()
    file = bundle.folder / "config.json"
    value = config(bundle) | {"acme": {"deep": [1, 2.5, None, "ä\u2028\U0001f600"], "big": 2**63}}
    value["linux"]["acme"] = True
    file.write_text(json.dumps(value))
    file.chmod(0o640)
    os.chown(file, 7, 8)
    done = shim.call(bundle, "run", "--bundle", str(bundle.folder), bundle.name)
    assert done.returncode == 0, done.stderr
    made = config(bundle)
    assert (made["acme"], made["linux"]["acme"]) == (value["acme"], True)
    assert (file.stat().st_mode & 0o7777, file.stat().st_uid, file.stat().st_gid) == (0o640, 7, 8)
    assert [path.name for path in bundle.folder.iterdir() if path.name.startswith(".")] == []


def test_new_privileges_are_what_config_json_says(shim: Shim) -> None:
    for forbidden in (False, True):
        bundle = shim.bundle("grep NoNewPrivs /proc/self/status", env=visible("0"))
        bundle.write()
        value = config(bundle)
        value["process"]["noNewPrivileges"] = forbidden
        (bundle.folder / "config.json").write_text(json.dumps(value))
        done = shim.call(bundle, "run", "--bundle", str(bundle.folder), bundle.name)
        assert done.stdout.split() == ["NoNewPrivs:", str(int(forbidden))], done.stderr


# Kinds of roots


@pytest.mark.parametrize("flavour", ["debian", "lib64", "centos7", "arch"])
def test_a_distribution(shim: Shim, flavour: roots.Flavour) -> None:
    """Before and after an ldconfig of its own."""
    script = "resolve -s libcuda.so.1 libcuda.so; ldconfig; resolve -s libcuda.so.1; resolve libimage.so.1"
    lines = shim.output(shim.bundle(script, flavour, env=visible("0")))
    status = shim.host.library("libcuda.so.1").stat()
    assert [line.split()[-1] for line in lines[:3]] == [f"{status.st_dev}:{status.st_ino}"] * 3
    assert lines[3] == f"libimage.so.1 {roots.IMAGE_FOLDER}/libimage.so.1"


@needs_path("/lib/ld-musl-x86_64.so.1")
def test_musl(shim: Shim) -> None:
    lines = shim.output(shim.bundle("resolve libcuda.so.1", "alpine", env=visible("0")))
    assert lines == ["libcuda.so.1 /usr/lib/libcuda.so.1"]


def test_an_image_without_anything(shim: Shim) -> None:
    """From scratch: one static program."""
    root = shim.folder / "scratch"
    (root / "bin").mkdir(parents=True)
    busybox = shutil.which("busybox", path="/usr/bin:/bin")
    if busybox is None:
        pytest.skip("needs busybox, which is not installed")
    shutil.copy(busybox, root / "bin/busybox")
    arguments = ["/bin/busybox", "ls", "/usr/lib64/libcuda.so.1", "/dev/nvidia0"]
    bundle = shim.bundle("", root=root, arguments=arguments, env=visible("0"))
    assert shim.output(bundle) == ["/dev/nvidia0", "/usr/lib64/libcuda.so.1"]


@pytest.mark.parametrize("flavour", ["debian", "arch"])
def test_a_read_only_root_needs_no_hook(shim: Shim, flavour: roots.Flavour) -> None:
    bundle = shim.bundle("resolve libcuda.so.1; touch /x 2>/dev/null || echo closed", flavour, readonly=True)
    bundle.env = visible("0")
    lines = shim.output(bundle)
    assert lines[0].startswith("libcuda.so.1 /usr/lib") and lines[1] == "closed"
    assert config(bundle)["hooks"]["createContainer"] == []


def test_a_root_that_is_read_only_on_the_host_too(shim: Shim) -> None:
    """It takes no new names; where an earlier start has left ours, the hook sees to the rest."""
    bundle = shim.bundle("resolve libcuda.so.1", env=visible("0"))
    expected = shim.output(bundle)
    bundle.write()
    root = str(bundle.root)
    script = f'mount --bind {root} {root}; mount -o remount,bind,ro {root}; exec "$@"'
    command = shim.command(bundle, "run", "--bundle", str(bundle.folder), bundle.name)
    wrapped = ["unshare", "--mount", "--propagation", "private", "sh", "-c", script, "sh", *command]
    done = subprocess.run(wrapped, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == expected, done.stderr
    assert len(config(bundle)["hooks"]["createContainer"]) == 1


def test_a_container_in_the_hosts_mount_namespace(shim: Shim) -> None:
    bundle = shim.bundle("true", env=visible("0"), namespaces=("pid", "ipc"))
    done = shim.run(bundle)
    assert done.returncode == 1 and "has no mount namespace of its own" in done.stderr


def test_the_images_own_library_by_our_name(shim: Shim) -> None:
    """A file is covered by a mount; a link is led to ours."""
    status = shim.host.library("libcuda.so.1").stat()
    for kind in ("file", "link", "other version"):
        bundle = shim.bundle("resolve -s libcuda.so.1; ldconfig; resolve -s libcuda.so.1", env=visible("0"))
        folder = bundle.root / MULTIARCH.lstrip("/")
        own = folder / "libcuda.so.999.1"
        if kind == "other version":
            shutil.copy(shim.host.library("libcuda.so.1"), own)
        if kind == "file":
            (folder / "libcuda.so.1").write_text("not a library")
        else:
            (folder / "libcuda.so.1").symlink_to(own.name)
        done = shim.run(bundle)
        assert [line.split()[-1] for line in done.stdout.splitlines()] == [f"{status.st_dev}:{status.st_ino}"] * 2, kind
        assert ("of the image is another driver's" in done.stderr) == (kind == "other version")


def test_a_volume_over_a_folder_is_left_to_the_hook(shim: Shim) -> None:
    """What would be hidden is not written into the root; nor is anything into the volume."""
    volume = shim.folder / "volume"
    bundle = shim.bundle("resolve libcuda.so.1", env=visible("0"))
    shutil.copytree(bundle.root / "etc", volume, symlinks=True)
    bundle.mounts = [{"destination": "/etc", "type": "bind", "source": str(volume), "options": ["rbind", "rw"]}]
    before, root = tree_of(volume), tree_of(bundle.root / "etc")
    done = shim.run(bundle)
    assert "left out: /etc/OpenCL/vendors/nvidia.icd in the container is in a mount from elsewhere" in done.stderr
    assert done.stdout == f"libcuda.so.1 {MULTIARCH}/libcuda.so.1\n", done.stderr
    (entry,) = config(bundle)["hooks"]["createContainer"]
    assert entry["args"][0] == "nvhook-create-container" and entry["env"]
    assert (tree_of(volume), tree_of(bundle.root / "etc")) == (before, root)


def test_a_volume_where_libraries_belong(shim: Shim) -> None:
    bundle = shim.bundle("true", env=visible("0"))
    volume = shim.folder / "volume"
    volume.mkdir()
    bundle.mounts = [{"destination": MULTIARCH, "type": "bind", "source": str(volume), "options": ["rbind", "rw"]}]
    done = shim.run(bundle)
    assert done.returncode == 1 and "is in a mount from elsewhere; nvhook makes no files in it" in done.stderr
    assert list(volume.iterdir()) == []


def test_another_version_at_every_start(shim: Shim) -> None:
    """The link that gave way stays a file, which the next start covers again."""
    bundle = shim.bundle("resolve -s libcuda.so.1; ldconfig; resolve -s libcuda.so.1", env=visible("0"))
    folder = bundle.root / MULTIARCH.lstrip("/")
    shutil.copy(shim.host.library("libcuda.so.1"), folder / "libcuda.so.999.1")
    (folder / "libcuda.so.1").symlink_to("libcuda.so.999.1")
    status = shim.host.library("libcuda.so.1").stat()
    for _ in range(3):
        done = shim.run(bundle)
        found = [line.split()[-1] for line in done.stdout.splitlines()]
        assert found == [f"{status.st_dev}:{status.st_ino}"] * 2, done.stderr


def test_something_in_the_way(shim: Shim) -> None:
    bundle = shim.bundle("echo started", env=visible("0"))
    (bundle.root / "usr/bin/nvidia-smi").mkdir()
    done = shim.run(bundle)
    assert done.stdout == "started\n"
    assert "left out: /usr/bin/nvidia-smi in the container is in the way" in done.stderr
    bundle = shim.bundle("echo started", env=visible("0"))
    (bundle.root / MULTIARCH.lstrip("/") / shim.host.library("libcuda.so.1").name).mkdir()
    done = shim.run(bundle)
    assert (done.returncode, done.stdout) == (1, "") and "is in the way" in done.stderr
    assert gpus(config(bundle)) == set()


# Life


def test_a_whole_life(shim: Shim) -> None:
    script = "trap 'exit 0' TERM; while true; do sleep 0.05; done"
    bundle = shim.bundle(script, env=visible("0"))
    bundle.write()
    create = shim.command(bundle, "create", "--bundle", str(bundle.folder), "--pid-file", str(shim.folder / "pid"))
    try:
        # The container keeps what it is started with.
        null = subprocess.DEVNULL
        assert subprocess.run([*create, bundle.name], stdin=null, stdout=null, stderr=null, check=False).returncode == 0
        assert json.loads(shim.call(bundle, "state", bundle.name).stdout)["status"] == "created"
        assert shim.call(bundle, "start", bundle.name).returncode == 0
        done = shim.call(bundle, "exec", bundle.name, "/bin/sh", "-c", "resolve libcuda.so.1; exit 5")
        assert (done.returncode, done.stdout) == (5, f"libcuda.so.1 {MULTIARCH}/libcuda.so.1\n")
        assert shim.call(bundle, "kill", bundle.name, "TERM").returncode == 0
        end = time.monotonic() + 20
        while json.loads(shim.call(bundle, "state", bundle.name).stdout)["status"] != "stopped":
            assert time.monotonic() < end
            time.sleep(0.05)
        assert shim.call(bundle, "delete", bundle.name).returncode == 0
        assert shim.call(bundle, "state", bundle.name).returncode == 1
    finally:
        bundle.delete(str(shim.program))


def test_after_create_no_python_is_started(shim: Shim, prefix: Path, tmp_path: Path) -> None:
    """The first create of a host leaves what the launcher needs; one that has no interpreter does all the rest."""
    for path in (shim.host.root / "run/nvhook").glob("runtime.*"):
        path.unlink()
    bare = tmp_path / "bare/nvhook-runtime"
    bare.parent.mkdir()
    shutil.copy(Path(install.origin("hook")).parent / "bin/launch", bare)
    install.write_marks(bare, {"@PYTHON@": "/no/such/python", "@ENTRY@": "/no/such/entry"})
    bundle = shim.bundle("sleep 60", env=visible("0"))
    bundle.write()
    create = shim.command(bundle, "create", "--bundle", str(bundle.folder), bundle.name)
    null = subprocess.DEVNULL
    try:
        assert subprocess.run(create, stdin=null, stdout=null, stderr=null, check=False).returncode == 0
        shim.program = bare
        for words in ("start {}", "exec {} /bin/true", "state {}", "kill {} KILL"):
            done = shim.call(bundle, *words.format(bundle.name).split())
            assert (done.returncode, done.stderr) == (0, ""), words
        done = shim.call(bundle, "delete", "--force", bundle.name)
        assert done.returncode == 0, done.stderr
        assert "cannot start /no/such/python" in shim.run(bundle).stderr
    finally:
        bundle.delete(str(prefix / "bin/nvhook-runtime"))


@pytest.mark.parametrize("name", ["create", "run", "state"])
def test_a_container_with_a_verbs_name(shim: Shim, name: str) -> None:
    bundle = shim.bundle("resolve libcuda.so.1", env=visible("0"))
    bundle.name = name
    assert shim.output(bundle) == [f"libcuda.so.1 {MULTIARCH}/libcuda.so.1"]


def test_exit_codes_are_the_runtimes(shim: Shim) -> None:
    assert shim.run(shim.bundle("exit 7", env=visible("0"))).returncode == 7
    bundle = shim.bundle("true")
    assert (
        shim.call(bundle, "no-such-verb").returncode == subprocess.run(["runc", "no-such-verb"], check=False).returncode
    )


def test_signals_reach_the_container(shim: Shim) -> None:
    bundle = shim.bundle(
        "trap 'echo caught; exit 42' TERM; echo ready; while true; do sleep 0.05; done", env=visible("0")
    )
    bundle.write()
    command = shim.command(bundle, "run", "--bundle", str(bundle.folder), bundle.name)
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "ready\n"
            process.send_signal(signal.SIGTERM)
            assert process.stdout.readline() == "caught\n"
            assert process.wait(20) == 42
        finally:
            process.kill()
            bundle.delete(str(shim.program))


def test_a_terminal(shim: Shim) -> None:
    bundle = shim.bundle("test -t 0 && test -t 1 && echo terminal; resolve libcuda.so.1", env=visible("0"))
    bundle.write()
    value = config(bundle)
    value["process"]["terminal"] = True
    (bundle.folder / "config.json").write_text(json.dumps(value))
    leader, follower = pty.openpty()
    command = shim.command(bundle, "run", "--bundle", str(bundle.folder), bundle.name)
    try:
        process = subprocess.Popen(command, stdin=follower, stdout=follower, stderr=follower, start_new_session=True)
        os.close(follower)
        said = b""
        try:
            while part := os.read(leader, 4096):
                said += part
        except OSError:
            pass
        assert process.wait(20) == 0, said
        assert said.split(b"\r\n")[0] == b"terminal" and b"libcuda.so.1 /usr/lib" in said
    finally:
        os.close(leader)
        bundle.delete(str(shim.program))


# Modes and hooks


@pytest.mark.parametrize("name", ["nvhook-runtime.legacy", "nvidia-container-runtime.legacy"])
def test_mode_legacy_by_name(prefix: Path, host: SimulatedHost, tmp_path: Path, name: str) -> None:
    shim = Shim(prefix, host, tmp_path, name)
    bundle = shim.bundle("resolve libcuda.so.1", env=visible("0"))
    assert shim.output(bundle) == [f"libcuda.so.1 {MULTIARCH}/libcuda.so.1"]
    made = config(bundle)
    assert gpus(made) == set() and made["process"]["env"][-1] == "NVIDIA_VISIBLE_DEVICES=0"
    (entry,) = made["hooks"]["prestart"]
    assert entry["args"] == ["nvhook-prestart", "--host-root", str(host.root)]
    shim.call(bundle, "run", "--bundle", str(bundle.folder), bundle.name)
    assert config(bundle) == made


def test_mode_legacy_by_configuration(shim: Shim, settings: Any) -> None:
    settings('[runtime]\nmode = "legacy"\n')
    bundle = shim.bundle("resolve libcuda.so.1", env=visible("0"))
    assert shim.output(bundle) == [f"libcuda.so.1 {MULTIARCH}/libcuda.so.1"]
    assert len(config(bundle)["hooks"]["prestart"]) == 1
    settings('[runtime]\nmode = "auto"\n')
    bundle = shim.bundle("resolve libcuda.so.1", env=visible("0"))
    shim.output(bundle)
    assert config(bundle)["hooks"]["prestart"] == []


@pytest.mark.parametrize("program", ["nvidia-container-runtime-hook", "nvidia-container-toolkit", "nvhook-prestart"])
@pytest.mark.parametrize("stage", ["prestart", "createRuntime"])
def test_a_gpu_hook_is_taken_over(shim: Shim, program: str, stage: str) -> None:
    """docker's --gpus: environment and hook. The hook here would fail; another one stays."""
    bundle = shim.bundle("resolve libcuda.so.1", env=visible("0"))
    bundle.write()
    value = config(bundle)
    other = hook("/bin/true")
    value["hooks"] = {stage: [{"path": f"/no/such/{program}", "args": [program, "prestart"]}, other]}
    (bundle.folder / "config.json").write_text(json.dumps(value))
    done = shim.call(bundle, "run", "--bundle", str(bundle.folder), bundle.name)
    assert done.stdout == f"libcuda.so.1 {MULTIARCH}/libcuda.so.1\n", done.stderr
    assert config(bundle)["hooks"] == {stage: [other]}


@pytest.fixture(params=["json", "yaml"])
def files(request: pytest.FixtureRequest, shim: Shim, prefix: Path) -> Any:
    """The simulated host's CDI file, in its /etc/cdi, host paths as they are on this machine."""
    folder = shim.host.root / "etc/cdi"
    folder.mkdir()
    output = folder / f"nvidia.{request.param}"
    made = shim.folder / "nvidia.json"
    words = ["generate", "--host-root", str(shim.host.root), "--output", str(made)]
    assert cli.main([*words, "--hook-path", str(prefix / "bin/nvhook-create-container")]) == 0
    value = json.loads(made.read_text())
    for edits in [value["containerEdits"], *(device["containerEdits"] for device in value["devices"])]:
        for entry in edits.get("mounts", []) + edits.get("deviceNodes", []):
            entry["hostPath"] = f"{shim.host.root}{entry.get('hostPath', entry.get('path'))}"
        # On a machine with a driver the hook would look at that one.
        for entry in edits.get("hooks", []):
            entry["args"] += ["--host-root", str(shim.host.root)]
    output.write_text(spec.serialise(value, request.param))
    yield value
    shutil.rmtree(folder)


def test_names_go_through_files(shim: Shim, files: dict[str, Any]) -> None:
    annotations = {"cdi.k8s.io/plugin_1": "nvidia.com/gpu=1"}
    for env, notes in (
        (visible("nvidia.com/gpu=1"), {}),
        ({}, annotations),
        (visible("void"), annotations),
    ):
        bundle = shim.bundle("resolve libcuda.so.1", env=env, annotations=notes)
        assert shim.output(bundle) == [f"libcuda.so.1 {MULTIARCH}/libcuda.so.1"]
        made = config(bundle)
        assert {"/dev/nvidia1", "/dev/nvidiactl"} <= gpus(made) and "/dev/nvidia0" not in gpus(made)
        assert len(made["hooks"]["createContainer"]) == 1
        assert "NVIDIA_VISIBLE_DEVICES=void" in made["process"]["env"]
        assert json.loads(made["annotations"]["nvhook.request"]) == {"cdi": ["nvidia.com/gpu=1"]}


def test_annotations_come_first(shim: Shim, settings: Any, files: dict[str, Any]) -> None:
    """CUDA's images say `all`, and a pod is to have what its plugin chose."""
    settings("accept-nvidia-visible-devices-as-volume-mounts = true\n")
    mount = {"destination": "/var/run/nvidia-container-devices/0", "source": "/dev/null", "type": "bind"}
    mount["options"] = ["bind"]  # type: ignore[assignment]
    for env, mounts in ((visible("all"), []), ({"CUDA_VERSION": "11.0"}, []), ({}, [mount])):
        annotations = {"cdi.k8s.io/plugin_1": "nvidia.com/gpu=1"}
        bundle = shim.bundle("true", env=env, annotations=annotations, mounts=mounts)
        assert shim.output(bundle) == []
        assert {"/dev/nvidia0", "/dev/nvidia1"} & gpus(config(bundle)) == {"/dev/nvidia1"}
        assert json.loads(config(bundle)["annotations"]["nvhook.request"]) == {"cdi": ["nvidia.com/gpu=1"]}


def test_the_plan_has_every_edit(shim: Shim, files: dict[str, Any]) -> None:
    """Those of a file, and those of the inventory: injected by CDI's rules they are what the runtime writes."""
    for names in ("nvidia.com/gpu=1", "1", "0,nvidia.com/gpu=1"):
        bundle = shim.bundle("true", env=visible(names))
        bundle.write()
        plan = planner.plan_runtime(str(bundle.folder), str(shim.host.root))
        before = config(bundle)
        assert shim.output(bundle) == []
        after = config(bundle)
        edits = dict(plan["edits"])
        for kind in ("deviceNodes", "mounts"):
            edits[kind] = [on_host(entry, shim.host.root) for entry in edits[kind]]
        by_rules = inject.inject(before, [edits])
        assert by_rules["linux"]["devices"] == after["linux"]["devices"]
        assert by_rules["process"] == after["process"]
        assert {m["destination"] for m in by_rules["mounts"]} == {m["destination"] for m in after["mounts"]}
        assert by_rules.get("hooks") == after.get("hooks")
        assert plan["annotations"] == {"nvhook.request": after["annotations"]["nvhook.request"]}
        assert [gpu["index"] for gpu in plan["gpus"]] == {"nvidia.com/gpu=1": [], "1": [1], "0,nvidia.com/gpu=1": [0]}[
            names
        ]
        # No mask is needed here, and none is promised.
        assert plan["finish"].get("proc_mask") is None


def on_host(entry: dict[str, Any], root: Path) -> dict[str, Any]:
    """A node or mount of a plan, its host path as it is on this machine."""
    path = str(entry.get("hostPath") or entry["path"])
    return entry if path.startswith(str(root)) else entry | {"hostPath": f"{root}{path}"}


def test_what_files_do_not_give_is_said(shim: Shim, files: dict[str, Any]) -> None:
    env = visible("nvidia.com/gpu=1", "utility") | {"NVIDIA_GDS": "enabled", "NVIDIA_MOFED": "yes"}
    env |= {"NVIDIA_IMEX_CHANNELS": "0", "NVIDIA_MIG_CONFIG_DEVICES": "all"}
    done = shim.run(shim.bundle("true", env=env))
    assert done.returncode == 0
    said = [line for line in done.stderr.splitlines() if line]
    reason = "is not obeyed: the devices are those of CDI files; ask for a device of `cdi generate --mode"
    assert said == [
        f"nvhook: warning: NVIDIA_IMEX_CHANNELS=0 {reason} imex`",
        f"nvhook: warning: NVIDIA_GDS=enabled {reason} gds`",
        f"nvhook: warning: NVIDIA_MIG_CONFIG_DEVICES=all {reason} management`",
    ]


def test_gpus_of_files_and_of_the_inventory_together(shim: Shim, settings: Any, files: dict[str, Any]) -> None:
    """One GPU each: both are seen, with the file's mask, and with ours."""
    seen = "ls /proc/driver/nvidia/gpus"
    proc = proc_hook(str(shim.host.root / "proc/driver/nvidia"))
    both = sorted(gpu.bus_id for gpu in shim.host.host.gpus)
    for names in ("nvidia.com/gpu=0,1", "0,nvidia.com/gpu=1", "runtime.nvidia.com/gpu=0,nvidia.com/gpu=1"):
        for rules in (None, [{"allow": True, "access": "rwm"}]):
            others: dict[str, Any] = {} if rules is None else {"device_rules": rules}
            bundle = shim.bundle(seen, env=visible(names), prestart=[proc], **others)
            assert shim.output(bundle) == both
            masking = [entry for entry in config(bundle)["hooks"]["createContainer"] if "--proc-mask" in entry["args"]]
            assert len(masking) == 1


def test_a_user_is_in_the_groups_of_nodes(prefix: Path, host: SimulatedHost, settings: Any, tmp_path: Path) -> None:
    """Hosts where not everybody may open the nodes: the container's user is put into their group, unless forbidden."""
    nodes = [host.root / f"dev/{name}" for name in ("nvidia0", "nvidiactl")]
    for node in nodes:
        os.chown(node, 0, 44)
        node.chmod(0o660)
    shim = Shim(prefix, host, tmp_path)
    try:
        for text, expected in (("", [44]), ("[features]\nno-additional-gids-for-device-nodes = true\n", None)):
            settings(text)
            bundle = shim.bundle("true", env=visible("0"))
            assert shim.output(bundle) == []
            assert config(bundle)["process"]["user"].get("additionalGids") == expected
    finally:
        for node in nodes:
            os.chown(node, 0, 0)
            node.chmod(0o666)


def test_a_name_that_the_engine_has_put_in_is_done(shim: Shim, files: dict[str, Any]) -> None:
    annotations = {"cdi.k8s.io/plugin_1": "nvidia.com/gpu=1"}
    bundle = shim.bundle("true", annotations=annotations)
    done = shim.run(bundle)
    assert done.returncode == 0, done.stderr
    value = config(bundle)
    del value["annotations"]["nvhook.request"]
    text = json.dumps(value)
    (bundle.folder / "config.json").write_text(text)
    done = shim.call(bundle, "run", "--bundle", str(bundle.folder), bundle.name)
    assert (done.returncode, (bundle.folder / "config.json").read_text()) == (0, text)


def test_names_that_resolve_to_nothing(shim: Shim, files: dict[str, Any]) -> None:
    done = shim.run(shim.bundle("true", env=visible("acme.com/gpu=1")))
    assert done.returncode == 1
    assert "unresolvable CDI devices: acme.com/gpu=1" in done.stderr
    # Of our own kinds, the inventory has what no file defines.
    bundle = shim.bundle("ls /dev/nvidia0", env=visible("runtime.nvidia.com/gpu=0"))
    assert shim.output(bundle) == ["/dev/nvidia0"]
    assert config(bundle)["hooks"]["createContainer"] == []


def test_mode_cdi(prefix: Path, shim: Shim, files: dict[str, Any]) -> None:
    forced = Shim(prefix, shim.host, shim.folder, "nvidia-container-runtime.cdi")
    bundle = forced.bundle("ls /dev/nvidia1", env=visible("1"))
    bundle.folder = shim.folder / "of-cdi"
    bundle.folder.mkdir()
    assert forced.output(bundle) == ["/dev/nvidia1"]
    assert json.loads(config(bundle)["annotations"]["nvhook.request"]) == {"cdi": ["nvidia.com/gpu=1"]}
    done = forced.run(forced.bundle("true", env=visible("7")))
    assert done.returncode == 1
    assert "unresolvable CDI devices: nvidia.com/gpu=7; there are nvidia.com/gpu=0, nvidia.com/gpu=1" in done.stderr


def test_names_alone_need_no_driver(prefix: Path, tmp_path: Path) -> None:
    """Another vendor's device, on a host without NVIDIA's driver."""
    (tmp_path / "host/etc/cdi").mkdir(parents=True)
    (tmp_path / "host/run").mkdir()
    acme: dict[str, Any] = {"cdiVersion": "0.5.0", "kind": "acme.com/widget", "containerEdits": {}}
    acme |= {"devices": [{"name": "0", "containerEdits": {"env": ["WIDGET=0"]}}]}
    (tmp_path / "host/etc/cdi/acme.json").write_text(json.dumps(acme))
    options = ["--host-root", str(tmp_path / "host")]
    shim = Shim(prefix, None, tmp_path)  # type: ignore[arg-type]
    shim.host = type("Bare", (), {"root": tmp_path / "host"})  # type: ignore[assignment]
    bundle = shim.bundle("echo $WIDGET", annotations={"cdi.k8s.io/a": "acme.com/widget=0"})
    assert bundle.options == options
    assert shim.output(bundle) == ["0"]
    done = shim.run(shim.bundle("true", env=visible("0")))
    assert done.returncode == 1 and "driver" in done.stderr


# The mask


def test_the_mask_is_a_hook_only_where_it_protects(shim: Shim, settings: Any) -> None:
    bundle = shim.bundle("true", env=visible("1"), device_rules=[{"allow": True, "access": "rwm"}])
    shim.run(bundle)
    (entry,) = config(bundle)["hooks"]["createContainer"]
    (gpu,) = [gpu for gpu in shim.host.host.gpus if gpu.minor == 1]
    assert entry["args"][1:] == ["--host-root", str(shim.host.root), "--gpu", f"1={gpu.bus_id}", "--proc-mask"]
    settings('[shim]\nproc-mask = "never"\n')
    bundle = shim.bundle("true", env=visible("1"), device_rules=[{"allow": True, "access": "rwm"}])
    shim.output(bundle)
    assert config(bundle)["hooks"]["createContainer"] == []
    settings('[shim]\nproc-mask = "always"\n')
    bundle = shim.bundle("true", env=visible("1"))
    shim.run(bundle)
    assert len(config(bundle)["hooks"]["createContainer"]) == 1


# Errors


@pytest.mark.parametrize("verb", ["create", "run"])
def test_an_error_stands_in_the_engines_log(shim: Shim, verb: str) -> None:
    bundle = shim.bundle("true", env=visible("7"))
    bundle.write()
    before = (bundle.folder / "config.json").read_bytes()
    log = shim.folder / "log"
    words = ["--log", str(log), "--log-format", "json", verb, "--bundle", str(bundle.folder), bundle.name]
    done = shim.call(bundle, *words)
    assert done.returncode == 1
    lines = done.stderr.splitlines()
    assert lines[0].startswith("nvhook: error: no GPU '7' on this host") and lines[1].startswith("  remedy: ")
    entry = json.loads(log.read_text())
    assert entry["level"] == "error" and entry["msg"].startswith("nvhook: error: no GPU '7' on this host")
    assert (bundle.folder / "config.json").read_bytes() == before
    words[3] = "text"
    shim.call(bundle, *words)
    last = log.read_text().splitlines()[-1]
    assert last.startswith('time="') and " level=error msg=\"nvhook: error: no GPU '7'" in last


def test_with_debug_the_log_says_why(shim: Shim) -> None:
    for words, count in ((["--debug"], 2), ([], 0)):
        bundle = shim.bundle("true", env=visible("0"))
        bundle.write()
        log = shim.folder / f"log-{count}"
        shim.call(bundle, *words, "--log", str(log), "run", "--bundle", str(bundle.folder), bundle.name)
        text = log.read_text() if log.exists() else ""
        assert text.count('level=debug msg="nvhook: ') == count


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "config.json is no JSON"),
        ("{", "config.json is no JSON"),
        ("[]", "config.json is a JSON list, not an object"),
        ("{}", "root.path is missing"),
        ('{"root": {"path": "r"}, "process": {"env": [7]}}', "process.env holds a int, not a string"),
        ("[" * 100_000, "config.json is no JSON: nested too deeply"),
    ],
)
def test_a_configuration_that_is_none(shim: Shim, text: str, said: str) -> None:
    bundle = shim.bundle("true")
    (bundle.folder / "config.json").write_text(text)
    done = shim.call(bundle, "create", "--bundle", str(bundle.folder), bundle.name)
    assert done.returncode == 1 and said in done.stderr and len(done.stderr.splitlines()) == 2


MEMBERS: list[tuple[tuple[str, ...], Any]] = [
    *[
        ((name,), value)
        for name in ("hooks", "mounts", "linux", "process", "annotations")
        for value in (7, "x", [["y"]])
    ],
    (("hooks", "prestart"), {"path": "x"}),
    (("hooks", "prestart"), [7, {"args": {"a": 1}}, {"path": 7}]),
    (("mounts",), [{"destination": 7, "options": 7}, {"options": {}}]),
    (("linux", "namespaces"), [7]),
    (("linux", "namespaces"), [{"type": 7}]),
    (("linux", "uidMappings"), [7, {"containerID": 0, "hostID": "x"}]),
    (("linux", "resources"), {"devices": [{"allow": 7, "access": 7, "type": 7, "major": "x"}]}),
    (("linux", "devices"), [{"path": 7}]),
    (("process", "capabilities"), {"bounding": [7]}),
    (("process", "user"), {"uid": "x"}),
    (("root",), {"path": 7}),
]


@pytest.mark.parametrize(("place", "value"), MEMBERS)
def test_members_of_a_wrong_type(shim: Shim, place: tuple[str, ...], value: Any) -> None:
    """By us or by runc: an error in words, never a traceback."""
    bundle = shim.bundle("true", env=visible("0"))
    made: Any = bundle.config()
    owner = made
    for name in place[:-1]:
        owner = owner[name]
    owner[place[-1]] = value
    (bundle.folder / "config.json").write_text(json.dumps(made))
    done = shim.call(bundle, "run", "--bundle", str(bundle.folder), bundle.name)
    assert "Traceback" not in done.stderr
    assert done.returncode == 0 or done.stderr


def test_a_configuration_of_50_megabytes(shim: Shim) -> None:
    bundle = shim.bundle("true")
    (bundle.folder / "config.json").write_bytes(b'{"a": "' + b"x" * (50 << 20) + b'"}')
    begun = time.monotonic()
    done = shim.call(bundle, "create", "--bundle", str(bundle.folder), bundle.name)
    assert done.returncode == 1 and "File too large" in done.stderr and len(done.stderr.splitlines()) == 2
    assert time.monotonic() - begun < 5


def test_a_bundle_that_is_not_there(shim: Shim) -> None:
    bundle = shim.bundle("true")
    done = shim.call(bundle, "create", "--bundle", "/no/such", bundle.name)
    assert done.returncode == 1 and "cannot open /no/such/config.json" in done.stderr


def test_a_failed_write_takes_the_roots_files_back(shim: Shim) -> None:
    """A bundle's folder that is read-only: nothing of ours stays in the root."""
    bundle = shim.bundle("true", env=visible("0"))
    bundle.write()
    before = tree_of(bundle.root)
    folder = str(bundle.folder)
    closed = f"mount --bind {folder} {folder}; mount -o remount,bind,ro {folder}"
    command = shim.command(bundle, "run", "--bundle", folder, bundle.name)
    wrapped = ["unshare", "--mount", "--propagation", "private", "sh", "-c", f'{closed}; exec "$@"', "sh", *command]
    done = subprocess.run(wrapped, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and f"cannot write {folder}/config.json: Read-only" in done.stderr
    assert tree_of(bundle.root) == before


def test_the_mask_where_it_protects(shim: Shim) -> None:
    """A container that may open every node gets the one hook, and with it all else that hooks do."""
    script = "cat /proc/driver/nvidia/params; ls /proc/driver/nvidia/gpus; resolve libcuda.so.1"
    rules = [{"allow": True, "access": "rwm"}]
    bundle = shim.bundle(script, env=visible("1"), device_rules=rules, prestart=[proc_hook()])
    done = shim.run(bundle)
    assert done.returncode == 0, done.stderr
    (entry,) = config(bundle)["hooks"]["createContainer"]
    assert "--proc-mask" in entry["args"]
    assert "ModifyDeviceFiles: 0" in done.stdout
    bus_ids = sorted(os.listdir(shim.host.root / "proc/driver/nvidia/gpus"))
    assert bus_ids[1] in done.stdout and bus_ids[0] not in done.stdout
    assert f"libcuda.so.1 {MULTIARCH}/libcuda.so.1" in done.stdout
