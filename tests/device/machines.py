# SPDX-License-Identifier: Apache-2.0
"""The machine whose GPUs are looked at: this one, or a simulated host on it. What the driver says of its GPUs is asked
of the driver, never of nvhook."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.containers import Hook
from tests.simhost import SimulatedHost
from tests.system.prestart import proc_hook

TREE = Path(__file__).resolve().parents[2]
LISTED = re.compile(r"^GPU (\d+): (.*) \(UUID: (GPU-\S+)\)$", re.MULTILINE)

# A mount namespace in which the simulated host's nodes and its part of /proc are where a driver has them.
ENTER = """
set -e
mount --rbind "$1/dev" /dev
mount -t tmpfs -o mode=755 nvhook-test /proc/driver
mkdir /proc/driver/nvidia
mount --bind "$1/proc/driver/nvidia" /proc/driver/nvidia
shift
exec "$@"
"""


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU as the driver has it: `index`, `name` and `uuid` are NVML's, `minor` and `bus_id` the kernel's."""

    index: int
    name: str
    uuid: str
    minor: int
    bus_id: str


class Machine:
    """This machine with its driver, or a simulated host, which has no GPU behind its nodes."""

    def __init__(self, simulated: SimulatedHost | None = None) -> None:
        self.simulated = simulated
        self.root = simulated.root if simulated else Path("/")
        self.gpus = self._gpus()

    @property
    def real(self) -> bool:
        """Whether there are GPUs."""
        return self.simulated is None

    @property
    def arguments(self) -> list[str]:
        """What commands and hooks of nvhook are told of this host."""
        return [] if self.real else ["--host-root", str(self.root)]

    @property
    def hooks(self) -> list[Hook]:
        """What a container needs so that its proc is this host's."""
        return [] if self.real else [proc_hook(f"{self.root}/proc/driver/nvidia")]

    @property
    def driver(self) -> str:
        """The loaded module's version."""
        return self.path("/sys/module/nvidia/version").read_text().strip()

    @property
    def masks(self) -> bool:
        """Whether there is something to mask: False where the driver's own ModifyDeviceFiles is 0."""
        return "ModifyDeviceFiles: 1" in self.path("/proc/driver/nvidia/params").read_text()

    def path(self, name: str) -> Path:
        """Where a file of the host is on this machine."""
        return self.root / name.lstrip("/")

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        """A command as on that host, with its nvidia-smi and its libcuda first."""
        environment = dict(os.environ)
        words = list(command)
        if self.simulated:
            folder = self.simulated.path(self.simulated.library_folder)
            environment["PATH"] = f"{self.path('/usr/bin')}:{environment['PATH']}"
            environment["LD_LIBRARY_PATH"] = str(folder)
            words = ["unshare", "--mount", "--propagation", "private", "sh", "-c", ENTER, "sh", str(self.root), *words]
        return subprocess.run(
            words, cwd=TREE, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
        )

    def nvhook(self, *words: str, to_host: bool = True) -> subprocess.CompletedProcess[str]:
        """A cold command of this checkout; `to_host`: it takes the options that name the host."""
        command = [sys.executable, "-m", "hook", *words, *(self.arguments if to_host else [])]
        return subprocess.run(command, cwd=TREE, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)

    def _gpus(self) -> list[Gpu]:
        """By NVML's index. Raises SystemExit where the driver does not tell."""
        done = self.run("nvidia-smi", "-L")
        # Only now: the kernel knows a UUID once the GPU was initialised.
        kernel = self._kernel()
        listed = LISTED.findall(done.stdout)
        unknown = [uuid for _, _, uuid in listed if uuid not in kernel]
        if not listed or unknown:
            said = f"nvidia-smi -L: {done.stdout}{done.stderr}"
            raise SystemExit(f"no GPU to look at, or the kernel does not know {unknown}: {said}")
        return [Gpu(int(index), name, uuid, *kernel[uuid]) for index, name, uuid in listed]

    def _kernel(self) -> dict[str, tuple[int, str]]:
        """Minor and bus id by UUID."""
        found = {}
        for file in self.path("/proc/driver/nvidia/gpus").glob("*/information"):
            lines = (line.partition(":") for line in file.read_text().splitlines())
            facts = {name.strip(): value.strip() for name, _, value in lines}
            if "Device Minor" in facts:
                found[facts.get("GPU UUID", "")] = int(facts["Device Minor"]), file.parent.name
        return found
