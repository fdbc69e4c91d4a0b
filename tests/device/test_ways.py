# SPDX-License-Identifier: Apache-2.0
"""A real GPU by each way that puts it into a container: a CUDA kernel and nvidia-smi inside."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hook import install, profile
from tests import demo, roots
from tests.containers import Bundle, hook
from tests.needs import needs_path, needs_program, needs_root
from tests.system import cdifiles

pytestmark = [needs_path(str(demo.DRIVER)), needs_root, needs_program("runc")]

# Words for `cdi generate`, or None where no CDI file is used, and how many createContainer hooks config.json then has.
WAYS: dict[str, tuple[list[str] | None, int]] = {
    "prestart": (None, 0),
    "runtime": (None, 0),
    "CDI file with its hook": ([], 1),
    "CDI file without a hook": (["--no-hooks"], 0),
}
SCRIPT = f"/cuda-check && nvidia-smi -L || exit 1; cat {profile.PATH} || true"


def start(
    way: str, folder: Path, installed: Path, machine: demo.Machine, capabilities: str, readonly: bool
) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    """A container with GPU 0, run to its end, and its config.json as it was at last."""
    image = roots.make_root(folder / "image")
    shutil.copy(install.origin("hook").parent / "bin/cuda-check", image / "cuda-check")
    bundle = Bundle(folder / "bundle", image, ["/bin/sh", "-c", SCRIPT], readonly=readonly, prestart=[*machine.hooks])
    words, runtime = WAYS[way][0], "runc"
    place = [] if machine.real else ["--host-root", str(machine.root)]
    if words is None:
        bundle.env = {"NVIDIA_VISIBLE_DEVICES": "0", "NVIDIA_DRIVER_CAPABILITIES": capabilities}
        if way == "runtime":
            runtime, bundle.options = str(installed.with_name("nvhook-runtime")), place
        else:
            bundle.prestart.append(hook(installed, *place))
    else:
        chosen = [] if capabilities == "all" else ["--capabilities", capabilities]
        launcher = str(installed.with_name("nvhook-create-container"))
        cdifiles.generate(folder / "cdi/nvidia.json", machine, "--hook-path", launcher, *words, *chosen)
        bundle.edits = cdifiles.edits(folder / "cdi", "nvidia.com/gpu=0")
    done = bundle.run(runtime=runtime, timeout=300)
    return done, json.loads((bundle.folder / "config.json").read_text())


def inventory() -> dict[str, Any]:
    words = [sys.executable, "-m", "hook", "inventory", "--json"]
    made: dict[str, Any] = json.loads(subprocess.run(words, capture_output=True, text=True, check=True).stdout)
    return made


@pytest.mark.parametrize("readonly", [False, True])
@pytest.mark.parametrize("capabilities", ["compute,utility", "all"])
@pytest.mark.parametrize("way", WAYS)
def test_a_kernel_runs(tmp_path: Path, installed: Path, way: str, capabilities: str, readonly: bool) -> None:
    done, config = start(way, tmp_path, installed, demo.machine(tmp_path), capabilities, readonly)
    assert done.returncode == 0, done.stdout + done.stderr
    found = inventory()
    gpu = found["gpus"][0]
    assert "Hello from GPU thread 0!" in done.stdout
    listed = [line for line in done.stdout.splitlines() if line.startswith("GPU ")]
    assert len(listed) == 1 and gpu["uuid"] in listed[0], done.stdout
    assert len(config["hooks"]["createContainer"]) == WAYS[way][1]
    has_egl = any(library["soname"].startswith("libEGL_") for library in found["libraries"])
    wanted = has_egl and capabilities == "all" and way != "CDI file without a hook"
    assert (f'["{profile.KEY}", {1 << gpu["minor"]:#x}]' in done.stdout) == wanted
