# SPDX-License-Identifier: Apache-2.0
"""A generated CDI file, read by a real podman, on the simulated host."""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cdi import cli
from tests import roots
from tests.containers import find_program
from tests.needs import needs_program
from tests.simhost import SimulatedHost

pytestmark = [needs_program("podman"), needs_program("runc")]

# podman 4.3 reads /etc/cdi and /var/run/cdi and no other folder; in a mount namespace of its own it may have it.
IN_PRIVATE = 'mkdir -p /var/run/cdi && mount --bind "$1" /var/run/cdi && shift && exec "$@"'


@pytest.fixture
def specs(host: SimulatedHost, prefix: Path, tmp_path: Path) -> Iterator[Path]:
    """A folder with the simulated host's CDI file, its host paths as they are on this machine."""
    folder = tmp_path / "cdi"
    folder.mkdir()
    output = folder / "nvidia.json"
    hook = str(prefix / "bin/nvhook-create-container")
    assert cli.main(["generate", "--host-root", str(host.root), "--hook-path", hook, "--output", str(output)]) == 0
    spec = json.loads(output.read_text())
    for edits in [spec["containerEdits"], *(device["containerEdits"] for device in spec["devices"])]:
        for entry in edits.get("mounts", []) + edits.get("deviceNodes", []):
            entry["hostPath"] = f"{host.root}{entry.get('hostPath', entry.get('path'))}"
    output.write_text(json.dumps(spec))
    yield folder


@pytest.fixture
def image(tmp_path: Path) -> Path:
    """A container root."""
    return roots.make_root(tmp_path / "image")


@pytest.fixture
def store() -> Iterator[Path]:
    """podman's storage; its path may have 50 characters at most."""
    folder = Path(tempfile.mkdtemp(prefix="nvhook-"))
    yield folder
    # After a failed start podman's clean-up process still writes there for a moment.
    for _ in range(100):
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            return
        time.sleep(0.1)
    raise RuntimeError(f"podman still uses {folder}")


def podman(store: Path, specs: Path, image: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """`podman run` with a root folder; a machine without CAP_SYS_RESOURCE needs the ulimits."""
    program = find_program("podman")
    assert program is not None
    runtime = find_program("runc")
    command = [program, "--root", str(store / "root"), "--runroot", str(store / "run"), "--storage-driver", "vfs"]
    command += ["--cgroup-manager=cgroupfs", "--runtime", str(runtime), "run", "--rm", "--network=none"]
    command += ["--ulimit", "nofile=1024:1024", "--ulimit", "nproc=4096:4096"]
    private = ["unshare", "--mount", "--propagation", "private", "sh", "-c", IN_PRIVATE, "sh", str(specs)]
    full = [*private, *command, *words[:-1], "--rootfs", str(image), "/bin/sh", "-c", words[-1]]
    return subprocess.run(full, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL, timeout=120)


SCRIPT = (
    "resolve libcuda.so.1; resolve libcuda.so; resolve libimage.so.1; command -v nvidia-smi; ls /dev; cat /dev/nvidia1"
)


def test_all_devices(store: Path, specs: Path, image: Path) -> None:
    done = podman(store, specs, image, "--device", "nvidia.com/gpu=all", SCRIPT)
    assert "libcuda.so.1" in done.stdout, done.stderr
    lines = done.stdout.splitlines()
    folder = "/usr/lib/x86_64-linux-gnu"
    assert lines[:2] == [f"{name} {folder}/{name}" for name in ("libcuda.so.1", "libcuda.so")]
    assert lines[2] == f"libimage.so.1 {roots.IMAGE_FOLDER}/libimage.so.1"
    assert "/usr/bin/nvidia-smi" in lines
    assert {"nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"} <= set(lines)
    # podman gave the container the device rules too: the answer is the driver's, or ENXIO without one.
    assert "not permitted" not in done.stderr


def test_one_device_by_uuid(store: Path, specs: Path, image: Path, host: SimulatedHost) -> None:
    done = podman(store, specs, image, "--device", f"nvidia.com/gpu={host.host.gpus[1].uuid}", SCRIPT)
    assert "libcuda.so.1" in done.stdout, done.stderr
    assert "nvidia1" in done.stdout.splitlines()
    assert "nvidia0" not in done.stdout.splitlines()


def test_what_the_hook_cannot_do_is_an_error_of_podman(store: Path, specs: Path, image: Path) -> None:
    """The hook's own words reach the user."""
    spec: dict[str, Any] = json.loads((specs / "nvidia.json").read_text())
    hook = spec["containerEdits"]["hooks"][0]
    hook["args"] += ["--link", "target::/etc/passwd/link"]
    (specs / "nvidia.json").write_text(json.dumps(spec))
    done = podman(store, specs, image, "--device", "nvidia.com/gpu=all", SCRIPT)
    assert done.returncode != 0
    assert "cannot make /etc/passwd" in done.stderr
