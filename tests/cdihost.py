# SPDX-License-Identifier: Apache-2.0
"""A simulated host with a CDI file, and the commands that judge and keep it, each in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from cdi import cli
from tests import simhost

TREE = Path(__file__).resolve().parents[1]
LAUNCHER = "/usr/bin/nvhook-create-container"


class Host:
    """A simulated host with two GPUs and a fresh spec in /var/run/cdi."""

    def __init__(self, folder: Path, **others: Any) -> None:
        self.folder = folder
        self.description = simhost.Host(**{"gpus": simhost.gpus(2), "graphics": False, **others})
        self.simulated = simhost.build(folder, self.description)
        self.simulated.path("/run").mkdir(exist_ok=True)
        launcher = self.simulated.path(LAUNCHER)
        launcher.parent.mkdir(parents=True, exist_ok=True)
        launcher.touch(0o755)
        self.high = self.simulated.path("/var/run/cdi/nvidia.yaml")
        self.low = self.simulated.path("/etc/cdi/nvidia.yaml")
        self.generate(self.high)

    def generate(self, path: Path) -> None:
        """`cdi generate`."""
        words = ["--host-root", str(self.folder), "--hook-path", LAUNCHER, "--nvml", "never"]
        assert cli.main(["generate", *words, "--output", str(path)]) == 0

    def check(self, *words: str) -> tuple[int, str]:
        """The status and what is printed, without this host's folder in it."""
        done = subprocess.run(
            [sys.executable, "-m", "cdi", "check", "--host-root", str(self.folder), *words],
            cwd=TREE,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.stderr == ""
        return done.returncode, done.stdout.replace(str(self.folder), "")

    def spec(self) -> dict[str, Any]:
        """The spec in /var/run/cdi."""
        value: dict[str, Any] = json.loads(self.high.read_text())
        return value

    def write(self, spec: dict[str, Any]) -> None:
        """Another one in its place."""
        self.high.write_text(json.dumps(spec))

    def watch(self, *words: str, **others: Any) -> subprocess.Popen[str]:
        """`cdi watch`, with its log in `log`."""
        with (self.folder / "log").open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "cdi", "watch", "--host-root", str(self.folder), "--hook-path", LAUNCHER]
                + ["--nvml", "never", "--quiet", "0.1", "--interval", "0.5", *words],
                cwd=TREE,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                text=True,
                **others,
            )

    def log(self) -> str:
        """What it said, without this host's folder in it."""
        return (self.folder / "log").read_text().replace(str(self.folder), "")
