# SPDX-License-Identifier: Apache-2.0
"""nvhook with a real GPU and its driver, in real runc containers. Skipped where there is none."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import demo, roots
from tests.containers import Bundle, hook
from tests.needs import needs_path, needs_program, needs_root

pytestmark = [needs_path("/proc/driver/nvidia/version"), needs_root, needs_program("runc")]


def run(*words: str) -> str:
    """What a command of ours prints; it must succeed."""
    done = subprocess.run([sys.executable, "-m", *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def inventory() -> dict[str, Any]:
    value: dict[str, Any] = json.loads(run("hook", "inventory", "--json", "--refresh"))
    return value


def test_the_demo(capsys: pytest.CaptureFixture[str]) -> None:
    assert demo.main() == 0
    text = capsys.readouterr().out
    for name in (
        "nodes",
        "libcuda",
        "libcuda-version",
        "loader",
        "image-library",
        "nvidia-smi",
        "vector-kernel",
        "hello",
    ):
        assert f"evidence: {name} " in text
    assert "Hello from GPU thread 0!" in text


def test_the_inventory_agrees_with_the_driver() -> None:
    made = inventory()
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=True).stdout
    smi = [(int(index), uuid) for index, uuid in re.findall(r"^GPU (\d+): .*\(UUID: (\S+)\)", listed, re.MULTILINE)]
    assert [(gpu["index"], gpu["uuid"]) for gpu in made["gpus"]] == smi
    assert made["driver"]["version"] == Path("/sys/module/nvidia/version").read_text().strip()
    for library in made["libraries"]:
        assert Path(library["path"]).is_file()


def test_verify_on_the_host() -> None:
    text = run("hook", "verify")
    assert "Hello from GPU thread 0!" in text
    assert "elements right" in text


@pytest.mark.parametrize("name", ["index", "uuid"])
def test_verify_in_a_container(name: str, installed: Path) -> None:
    gpu = inventory()["gpus"][0]
    wanted = str(gpu["index"]) if name == "index" else gpu["uuid"]
    command = [sys.executable, "-m", "hook", "verify", "--in-container", "--runtime", "runc", "--device", wanted]
    command += ["--hook", str(installed)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Hello from GPU thread 0!" in done.stdout
    assert gpu["uuid"] in done.stdout


def test_a_container_that_asks_for_no_gpu_cannot_open_one(tmp_path: Path, installed: Path) -> None:
    script = "mknod /dev/nvidia0 c 195 0; cat /dev/nvidia0; mknod /dev/nvidiactl c 195 255; cat /dev/nvidiactl"
    image = roots.make_root(tmp_path / "image")
    bundle = Bundle(tmp_path / "bundle", image, ["/bin/sh", "-c", script], prestart=[hook(installed)])
    done = bundle.run()
    assert done.stderr.count("Operation not permitted") == 2, done.stderr


def test_the_generated_file_names_what_is_there(tmp_path: Path) -> None:
    output = tmp_path / "nvidia.json"
    run("hook", "cdi", "generate", "--output", str(output))
    spec = json.loads(output.read_text())
    names = [device["name"] for device in spec["devices"]]
    assert {"0", "all", inventory()["gpus"][0]["uuid"]} <= set(names)
    for mount in spec["containerEdits"]["mounts"]:
        assert Path(mount["hostPath"]).exists()
