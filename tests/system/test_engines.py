# SPDX-License-Identifier: Apache-2.0
"""Real engines start containers by every way that they have to nvhook; docs/engines.md has the table.

Each way is asked for all GPUs, one by its index, one by its UUID, none, and one that is not there.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import images, roots
from tests.needs import needs_program
from tests.simhost import SimulatedHost
from tests.system import cdifiles, engines
from tests.system.engines import Debian, Done

HERE = Debian(None)
SCRIPT = "resolve libcuda.so.1; resolve libimage.so.1; ls /dev; for node in /dev/nvidia[01]; do cat $node; done"
FOLDER = "/usr/lib/x86_64-linux-gnu"
# docker's client looks for NVIDIA's hook by this name when dockerd starts.
DOCKER_HOOK = "nvidia-container-runtime-hook"
MISSING = "7"

Way = Callable[[str | None], Done]


def check(way: Way, host: SimulatedHost, wrong: str) -> None:
    """All five requests by one way. `wrong` is in what the user reads of a GPU that is not there."""
    uuid = host.host.gpus[1].uuid
    for request, expected in (("all", {"nvidia0", "nvidia1"}), ("1", {"nvidia1"}), (uuid, {"nvidia1"})):
        done = way(request)
        assert done.returncode in (0, 1) and "libcuda.so.1" in done.stdout, done.stdout + done.stderr
        lines = done.stdout.splitlines()
        # By the loader's first default folder that is this one, where no cache names it.
        assert lines[0].replace(" /lib/", " /usr/lib/") == f"libcuda.so.1 {FOLDER}/libcuda.so.1"
        assert lines[1] == f"libimage.so.1 {roots.IMAGE_FOLDER}/libimage.so.1"
        assert {"nvidia0", "nvidia1"} & set(lines) == expected
        assert {"nvidiactl", "nvidia-uvm"} <= set(lines)
        # The device rules are there too: the answer is the driver's, or ENXIO without one.
        assert "not permitted" not in done.stdout + done.stderr
    done = way(None)
    assert "nvidiactl" not in done.stdout and "libimage.so.1" in done.stdout, done.stdout + done.stderr
    done = way(MISSING)
    assert done.returncode != 0 and "nvidiactl" not in done.stdout
    assert wrong in done.stdout + done.stderr, done.stdout + done.stderr


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The image, as a file."""
    folder = tmp_path_factory.mktemp("image")
    return images.archive(roots.make_root(folder / "root"), engines.IMAGE, folder / "image.tar")


@pytest.fixture
def short() -> Iterator[Path]:
    """A folder with a short path: podman's may have 50 characters, a socket's 107."""
    with tempfile.TemporaryDirectory(prefix="nvhook-", ignore_cleanup_errors=True) as name:
        yield Path(name)


def specs(folder: Path, host: SimulatedHost, *words: str) -> Path:
    """A folder with the simulated host's CDI file."""
    cdifiles.generate(folder / "nvidia.json", host, *words)
    return folder


@pytest.fixture
def newer(cache: Path, short: Path, host: SimulatedHost, prefix: Path, tmp_path: Path, archive: Path) -> Debian:
    """Debian 13, or the reason why there is none."""
    try:
        return engines.newer(cache, short, host.root, prefix, tmp_path, archive.parent)
    except RuntimeError as error:
        pytest.skip(str(error))


def podman(debian: Debian, short: Path, host: SimulatedHost, prefix: Path, runtime: str = "runc") -> engines.Podman:
    """podman with the simulated host's CDI file."""
    programs = engines.programs(short / "bin", debian, prefix, None, {"nvhook-create-container": "create-container"})
    folder = specs(short / "cdi", host, "--hook-path", str(programs / "nvhook-create-container"))
    return engines.Podman(debian, short / "podman", debian.program(runtime), cdi=folder)


def by_device(engine: engines.Podman | engines.Docker) -> Way:
    """CDI names on the command line."""
    return lambda request: engine.run(SCRIPT, *(["--device", f"nvidia.com/gpu={request}"] if request else []))


def by_variable(engine: engines.Podman | engines.Docker | engines.Containerd, *words: str) -> Way:
    """The environment, as images ask."""
    return lambda request: engine.run(
        SCRIPT, *words, *(["--env", f"NVIDIA_VISIBLE_DEVICES={request}"] if request else [])
    )


@needs_program("podman")
@needs_program("runc")
def test_podman_reads_the_file(short: Path, host: SimulatedHost, prefix: Path, archive: Path) -> None:
    engine = podman(HERE, short, host, prefix)
    engine.load(archive)
    try:
        check(by_device(engine), host, f"nvidia.com/gpu={MISSING}")
        # What the hook can't do is an error of podman's, in the hook's own words.
        file = short / "cdi/nvidia.json"
        spec: dict[str, Any] = json.loads(file.read_text())
        spec["containerEdits"]["hooks"][0]["args"] += ["--link", "target::/etc/passwd/link"]
        file.write_text(json.dumps(spec))
        done = by_device(engine)("all")
        assert done.returncode != 0
        assert "cannot make /etc/passwd" in done.stderr
    finally:
        engine.close()


@needs_program("podman")
@needs_program("runc")
def test_podman_reads_a_file_without_a_hook(short: Path, host: SimulatedHost, archive: Path) -> None:
    folder = specs(short / "cdi", host, "--no-hooks", "--layout", "debian")
    engine = engines.Podman(HERE, short / "podman", HERE.program("runc"), cdi=folder)
    engine.load(archive)
    try:
        check(by_device(engine), host, f"nvidia.com/gpu={MISSING}")
    finally:
        engine.close()


@pytest.mark.long
@pytest.mark.parametrize("runtime", ["runc", "crun"])
def test_podman_of_debian_13_reads_the_file(
    newer: Debian, short: Path, host: SimulatedHost, prefix: Path, archive: Path, runtime: str
) -> None:
    engine = podman(newer, short, host, prefix, runtime)
    engine.load(archive)
    try:
        check(by_device(engine), host, f"nvidia.com/gpu={MISSING}")
    finally:
        engine.close()


def hook_file(folder: Path, hook: Path) -> Path:
    """A folder with the hook's file, as podman reads them (oci-hooks(5)), for containers that name GPUs."""
    folder.mkdir()
    when = {"always": True}
    text = {"version": "1.0.0", "hook": {"path": str(hook), "args": [hook.name]}, "when": when, "stages": ["prestart"]}
    (folder / "nvhook.json").write_text(json.dumps(text))
    return folder


@needs_program("podman")
@needs_program("runc")
def test_podman_runs_the_hook(short: Path, host: SimulatedHost, prefix: Path, archive: Path) -> None:
    programs = engines.programs(short / "bin", HERE, prefix, host.root, {"nvhook-prestart": "prestart"})
    hooks = hook_file(short / "hooks.d", programs / "nvhook-prestart")
    engine = engines.Podman(HERE, short / "podman", HERE.program("runc"), hooks_dir=hooks)
    engine.load(archive)
    try:
        check(by_variable(engine), host, f"no GPU '{MISSING}' on this host; there are 0 (")
    finally:
        engine.close()


@needs_program("dockerd")
@needs_program("runc")
def test_docker_asks_by_gpus(short: Path, host: SimulatedHost, prefix: Path, archive: Path) -> None:
    programs = engines.programs(short / "bin", HERE, prefix, host.root, {DOCKER_HOOK: "prestart"})
    engine = engines.Docker(HERE, short / "docker", {}, programs)
    try:
        engine.load(archive)

        def way(request: str | None) -> Done:
            value = "all" if request == "all" else f"device={request}"
            return engine.run(SCRIPT, *(["--gpus", value] if request else []))

        check(way, host, f"no GPU '{MISSING}' on this host; there are 0 (")
    finally:
        engine.close()


@needs_program("podman")
@needs_program("runc")
def test_podman_with_the_runtime(short: Path, host: SimulatedHost, prefix: Path, archive: Path) -> None:
    program = engines.runtime(short / "bin", HERE, prefix, host.root)
    engine = engines.Podman(HERE, short / "podman", str(program))
    engine.load(archive)
    try:
        check(by_variable(engine), host, f"no GPU '{MISSING}' on this host; there are 0 (")
    finally:
        engine.close()


@pytest.mark.long
@pytest.mark.parametrize("low_level", ["runc", "crun"])
def test_podman_of_debian_13_with_the_runtime(
    newer: Debian, short: Path, host: SimulatedHost, prefix: Path, archive: Path, low_level: str
) -> None:
    program = engines.runtime(short / "bin", newer, prefix, host.root)
    configuration = host.root / "etc/nvhook/config.toml"
    configuration.parent.mkdir()
    configuration.write_text(f'[runtime]\nruntimes = "{low_level}"\n')
    engine = engines.Podman(newer, short / "podman", str(program))
    try:
        engine.load(archive)
        check(by_variable(engine), host, f"no GPU '{MISSING}' on this host; there are 0 (")
    finally:
        shutil.rmtree(configuration.parent)
        # The choice is kept, and would be the next test's.
        for kept in (host.root / "run/nvhook").glob("runtime.*"):
            kept.unlink()
        engine.close()


@needs_program("containerd")
@needs_program("runc")
def test_containerd_with_the_runtime(short: Path, host: SimulatedHost, prefix: Path, archive: Path) -> None:
    program = engines.runtime(short / "bin", HERE, prefix, host.root)
    engine = engines.Containerd(HERE, short / "containerd")
    try:
        engine.load(archive)
        check(
            by_variable(engine, "--runc-binary", str(program)), host, f"no GPU '{MISSING}' on this host; there are 0 ("
        )
    finally:
        engine.close()


@pytest.mark.long
def test_containerd_of_debian_13_with_the_runtime(
    newer: Debian, short: Path, host: SimulatedHost, prefix: Path, archive: Path
) -> None:
    program = engines.runtime(short / "bin", newer, prefix, host.root)
    engine = engines.Containerd(newer, short / "containerd")
    # The `cpu` controller is not on this version 2 where others are on version 1.
    words = ("--runc-binary", str(program), "--cpu-shares", "0")
    try:
        engine.load(archive)
        check(by_variable(engine, *words), host, f"no GPU '{MISSING}' on this host; there are 0 (")
    finally:
        engine.close()


@needs_program("dockerd")
@needs_program("runc")
def test_docker_with_the_runtime(short: Path, host: SimulatedHost, prefix: Path, archive: Path) -> None:
    """By the environment, and by --gpus, whose hook is taken over: the one here would fail."""
    program = engines.runtime(short / "bin", HERE, prefix, host.root)
    (short / "bin" / DOCKER_HOOK).write_text("#!/bin/sh\nexit 1\n")
    (short / "bin" / DOCKER_HOOK).chmod(0o755)
    config = {"runtimes": {"nvidia": {"path": str(program)}}}
    engine = engines.Docker(HERE, short / "docker", config, short / "bin")
    try:
        engine.load(archive)
        check(by_variable(engine, "--runtime", "nvidia"), host, f"no GPU '{MISSING}' on this host; there are 0 (")

        def way(request: str | None) -> Done:
            value = "all" if request == "all" else f"device={request}"
            return engine.run(SCRIPT, "--runtime=nvidia", *(["--gpus", value] if request else []))

        check(way, host, f"no GPU '{MISSING}' on this host; there are 0 (")
    finally:
        engine.close()


@pytest.mark.long
def test_docker_of_debian_13_with_the_runtime(
    newer: Debian, short: Path, host: SimulatedHost, prefix: Path, archive: Path
) -> None:
    program = engines.runtime(short / "bin", newer, prefix, host.root)
    engine = engines.Docker(newer, short / "docker", {"runtimes": {"nvidia": {"path": str(program)}}})
    try:
        engine.load(archive)
        check(by_variable(engine, "--runtime", "nvidia"), host, f"no GPU '{MISSING}' on this host; there are 0 (")
    finally:
        engine.close()


@pytest.mark.long
def test_docker_of_debian_13_reads_the_file(
    newer: Debian, short: Path, host: SimulatedHost, prefix: Path, archive: Path
) -> None:
    programs = engines.programs(short / "bin", newer, prefix, None, {"nvhook-create-container": "create-container"})
    folder = specs(short / "cdi", host, "--hook-path", str(programs / "nvhook-create-container"))
    config = {"features": {"cdi": True}, "cdi-spec-dirs": [str(folder)]}
    engine = engines.Docker(newer, short / "docker", config)
    try:
        engine.load(archive)
        check(by_device(engine), host, f"nvidia.com/gpu={MISSING}")
    finally:
        engine.close()
