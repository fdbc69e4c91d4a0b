# SPDX-License-Identifier: Apache-2.0
"""Containers of a machine by each way that puts GPUs into them: what a bundle needs, and whose runtime starts it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cdi.finish import HOOK_NAME
from hook import install
from tests.containers import hook
from tests.device.machines import Machine
from tests.system import cdifiles
from tests.system.prestart import visible

CAPABILITIES = "compute,utility"
KIND = "nvidia.com/gpu"
NAMES = PRESTART, RUNTIME, CDI_HOOK, CDI_ALONE = "prestart", "runtime", "CDI and hook", "CDI alone"


@dataclass(frozen=True, slots=True)
class Way:
    """One way. `bundle` gives a Bundle's fields for devices as a user names them; `runtime` is the command that takes
    the place of runc, `masks` whether it hides the other GPUs below /proc where containers are as docker's, and `env`
    whether devices are asked for by the environment, where the beginning of a UUID will do."""

    name: str
    bundle: Callable[[list[str]], dict[str, Any]]
    masks: bool
    env: bool
    runtime: str = "runc"


class Appliers:
    """nvhook installed below a folder, CDI files of the machine, and each way, or those of these names."""

    def __init__(self, machine: Machine, folder: Path, names: Sequence[str] | None = None) -> None:
        self.machine = machine
        self.folder = folder
        launchers = {path.name: path for path in install.install(folder / "prefix")}
        self.launchers = launchers
        self.specs = {CDI_HOOK: self._generate("hook"), CDI_ALONE: self._generate("alone", "--no-hooks")}
        runtime = str(launchers["nvhook-runtime"])
        ways = [
            Way(PRESTART, self._prestart, masks=True, env=True),
            Way(RUNTIME, self._runtime, masks=False, env=True, runtime=runtime),
            Way(CDI_HOOK, lambda devices: self._cdi(CDI_HOOK, devices), masks=True, env=False),
            Way(CDI_ALONE, lambda devices: self._cdi(CDI_ALONE, devices), masks=False, env=False),
        ]
        self.prestart = ways[0]
        self.ways = [way for way in ways if way.name in (names or NAMES)]

    def _prestart(self, devices: list[str]) -> dict[str, Any]:
        ours = hook(self.launchers["nvhook-prestart"], *self.machine.arguments)
        return {"env": visible(",".join(devices), CAPABILITIES), "prestart": [*self.machine.hooks, ours]}

    def _runtime(self, devices: list[str]) -> dict[str, Any]:
        env = visible(",".join(devices), CAPABILITIES)
        return {"env": env, "prestart": self.machine.hooks, "options": self.machine.arguments}

    def _cdi(self, name: str, devices: list[str]) -> dict[str, Any]:
        edits = cdifiles.edits(self.specs[name].parent, *(f"{KIND}={device}" for device in devices))
        # An engine can't tell a hook of the simulated host.
        for entry in (entry for block in edits for entry in block.get("hooks", [])):
            entry["args"] = [*entry["args"], *self.machine.arguments]
        return {"edits": edits, "prestart": self.machine.hooks}

    def _generate(self, name: str, *words: str) -> Path:
        """A CDI file of the machine. Raises SystemExit."""
        file = self.folder / f"cdi-{name}/nvidia.json"
        file.parent.mkdir()
        options = ["--output", str(file), "--capabilities", CAPABILITIES, *words]
        if not words:
            options += ["--hook-path", str(self.launchers[HOOK_NAME])]
        done = self.machine.nvhook("cdi", "generate", *options)
        if done.returncode:
            raise SystemExit(f"cdi generate failed:\n{done.stderr}")
        if not self.machine.real:
            spec = cdifiles.on_this_machine(json.loads(file.read_text()), self.machine.root)
            file.write_text(json.dumps(spec))
        return file
