# SPDX-License-Identifier: Apache-2.0
"""Requests with a real GPU: what each set of capabilities brings, who is refused, and a hostile image."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hook import install
from tests import roots
from tests.containers import Bundle, hook
from tests.needs import needs_path, needs_program, needs_root
from tests.system.prestart import MULTIARCH, tree_of

pytestmark = [needs_path("/proc/driver/nvidia/version"), needs_root, needs_program("runc")]

MOUNTS = Path("/proc/self/mountinfo")
# What runs the GPU, what lists it, what opens it, and the libraries by which the sets differ.
SCRIPT = f"""
/cuda-check
nvidia-smi -L
cat /dev/nvidia0 >/dev/null
ls {MULTIARCH}
true
"""
CUDA, ML, ENCODE = "libcuda.so.1", "libnvidia-ml.so.1", "libnvidia-encode.so.1"
GLX, NGX = "libGLX_nvidia.so.0", "libnvidia-ngx.so.1"
# By capabilities: the libraries of the above, as far as the host's driver has them.
SETS = {
    "compute": {CUDA},
    "utility": {ML},
    "compute,utility": {CUDA, ML},
    "compute,video": {CUDA, ENCODE},
    "all": {CUDA, ML, ENCODE, GLX, NGX},
}


def gpu() -> tuple[str, str]:
    """Index and UUID of the first GPU."""
    words = ["nvidia-smi", "-i", "0", "--query-gpu=index,uuid", "--format=csv,noheader"]
    index, uuid = subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip().split(", ")
    return index, uuid


def libraries_of_the_host() -> set[str]:
    words = [sys.executable, "-m", "hook", "inventory", "--json"]
    made = json.loads(subprocess.run(words, capture_output=True, text=True, check=True).stdout)
    return {library["soname"] for library in made["libraries"]}


@pytest.fixture
def image(tmp_path: Path) -> Path:
    """A root with the CUDA program in it."""
    root = roots.make_root(tmp_path / "image")
    shutil.copy(install.origin("hook").parent / "bin/cuda-check", root / "cuda-check")
    return root


def bundle(tmp_path: Path, image: Path, installed: Path, **env: str) -> Bundle:
    return Bundle(tmp_path / "bundle", image, ["/bin/sh", "-c", SCRIPT], env=env, prestart=[hook(installed)])


@pytest.mark.parametrize("by", ["index", "uuid"])
@pytest.mark.parametrize("capabilities", SETS)
def test_each_set_of_capabilities(tmp_path: Path, image: Path, installed: Path, capabilities: str, by: str) -> None:
    device = gpu()[by == "uuid"]
    env = {"NVIDIA_VISIBLE_DEVICES": device, "NVIDIA_DRIVER_CAPABILITIES": capabilities}
    done = bundle(tmp_path, image, installed, **env).run()
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    there = {CUDA, ML, ENCODE, GLX, NGX} & set(lines)
    assert there == SETS[capabilities] & libraries_of_the_host()
    assert ("Hello from GPU thread 0!" in lines) == (CUDA in there)
    listed = [line for line in lines if line.startswith("GPU ")]
    assert len(listed) == ("utility" in capabilities or capabilities == "all")
    assert all(gpu()[1] in line for line in listed)
    # What the driver says to a plain read; without the device rule it would be "Operation not permitted".
    assert "Invalid argument" in done.stderr, done.stderr


@pytest.mark.parametrize(
    ("env", "words"),
    [
        ({"NVIDIA_REQUIRE_CUDA": "cuda>=99.0"}, ("cuda>=99.0", "the driver")),
        ({"NVIDIA_REQUIRE_ARCH": "arch<5.0 brand=geforce"}, ("arch<5.0", "brand=geforce")),
        ({"NVIDIA_VISIBLE_DEVICES": "977"}, ("no GPU '977' on this host; there are 0 (GPU-",)),
        ({"NVIDIA_DRIVER_CAPABILITIES": "compute,flying"}, ("flying",)),
    ],
)
def test_a_refused_request(
    tmp_path: Path, image: Path, installed: Path, env: dict[str, str], words: tuple[str, ...]
) -> None:
    done = bundle(tmp_path, image, installed, **{"NVIDIA_VISIBLE_DEVICES": "0"} | env).run()
    assert done.returncode != 0 and done.stdout == ""
    for word in words:
        assert word in done.stderr


def test_a_hostile_image(tmp_path: Path, image: Path, installed: Path) -> None:
    """Each name that we make leads out of the root, to a file that stays as it is; the GPU works all the same."""
    canary = tmp_path / "canary"
    canary.mkdir()
    for name in ("libcuda.so.1", "nvidia-smi", "ld.so.cache", "nvidia0"):
        (canary / name).write_text("the host's\n")
    before, mounts = tree_of(canary), MOUNTS.read_text()
    (image / "etc/ld.so.cache").unlink()
    for place, target in (
        (f"{MULTIARCH}/libcuda.so.1", f"{canary}/libcuda.so.1"),
        (f"{MULTIARCH}/libnvidia-ml.so.1", f"/proc/self/root{canary}/libcuda.so.1"),
        ("/usr/bin/nvidia-smi", f"{'../' * 20}{canary}/nvidia-smi"),
        ("/etc/ld.so.cache", f"{canary}/ld.so.cache"),
        ("/usr/lib/firmware", str(canary)),
    ):
        (image / place.lstrip("/")).symlink_to(target)
    env = {"NVIDIA_VISIBLE_DEVICES": "all", "NVIDIA_DRIVER_CAPABILITIES": "compute,utility"}
    done = bundle(tmp_path, image, installed, **env).run()
    assert tree_of(canary) == before
    assert MOUNTS.read_text() == mounts
    assert done.returncode == 0, done.stderr
    assert "Hello from GPU thread 0!" in done.stdout
    assert gpu()[1] in done.stdout
