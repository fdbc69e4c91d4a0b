# SPDX-License-Identifier: Apache-2.0
"""A real GPU through nvhook-runtime: a CUDA kernel and nvidia-smi inside, and no hook."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from hook import install
from tests import roots
from tests.containers import Bundle
from tests.needs import needs_path, needs_program, needs_root

pytestmark = [needs_path("/proc/driver/nvidia/version"), needs_root, needs_program("runc")]


@pytest.mark.parametrize("readonly", [False, True])
def test_a_kernel_runs(tmp_path: Path, installed: Path, readonly: bool) -> None:
    root = roots.make_root(tmp_path / "image")
    shutil.copy(install.origin("hook").parent / "bin/cuda-check", root / "cuda-check")
    env = {"NVIDIA_VISIBLE_DEVICES": "0"}
    script = "/cuda-check && nvidia-smi -L"
    bundle = Bundle(tmp_path / "bundle", root, ["/bin/sh", "-c", script], env=env, readonly=readonly)
    done = bundle.run(runtime=str(installed.with_name("nvhook-runtime")))
    assert done.returncode == 0, done.stderr
    assert "Hello from GPU thread 0!" in done.stdout and "GPU 0: " in done.stdout
    assert json.loads((bundle.folder / "config.json").read_text())["hooks"] == {"prestart": [], "createContainer": []}
