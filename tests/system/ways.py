# SPDX-License-Identifier: Apache-2.0
"""Containers of one simulated host by each way that puts a GPU into them."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

from tests import roots
from tests.containers import Bundle, hook
from tests.simhost import SimulatedHost
from tests.system import cdifiles
from tests.system.prestart import nvhook, proc_hook, reported, visible
from tests.system.shim import Shim

NAMES = ["libcuda.so.1", "libcuda.so", "libnvidia-ml.so.1", "libnvidia-ptxjitcompiler.so.1"]


def identities(host: SimulatedHost) -> list[str]:
    """What `resolve -s` prints last for each of NAMES."""
    found = []
    for name in NAMES:
        status = host.library("libcuda.so.1" if name == "libcuda.so" else name).stat()
        found.append(f"{status.st_dev}:{status.st_ino}")
    return found


class Ways:
    """Containers of one host by each way that puts a GPU into them."""

    def __init__(self, folder: Path, prefix: Path, host: SimulatedHost) -> None:
        self.folder = folder
        self.prefix = prefix
        self.host = host
        self.numbers = itertools.count(1)
        self.report = folder / "report"
        self.shim = Shim(prefix, host, folder / "shim")

    def image(self, flavour: roots.Flavour) -> Path:
        return roots.make_root(self.folder / f"image-{next(self.numbers)}", flavour)

    def prestart(self, image: Path, script: str, devices: str, names: str) -> Bundle:
        """The hook that asks the environment."""
        return self.bundle(image, script, env=visible(devices, names), prestart=nvhook(self.prefix, self.host))

    def file(self, image: Path, script: str, *words: str, devices: str = "all", **others: Any) -> Bundle:
        """A CDI file, by an engine that has applied it. The hook's words are in `report`."""
        folder = self.folder / f"cdi-{next(self.numbers)}"
        launcher = self.prefix / "bin/nvhook-create-container"
        cdifiles.generate(folder / "nvidia.json", self.host, "--hook-path", str(launcher), *words)
        edits = cdifiles.edits(folder, f"nvidia.com/gpu={devices}")
        # What runs on the simulated host has to be told of it; an engine can't.
        for entry in (entry for block in edits for entry in block.get("hooks", [])):
            words_of_hook = [entry["path"], *entry["args"][1:], "--host-root", str(self.host.root)]
            (wrapped,) = reported([hook(*words_of_hook)], self.report)
            entry |= wrapped
        return self.bundle(image, script, edits=edits, prestart=[proc_hook()], **others)

    def bundle(self, image: Path, script: str, **others: Any) -> Bundle:
        arguments = ["/bin/sh", "-c", script]
        return Bundle(self.folder / f"bundle-{next(self.numbers)}", image, arguments, **others)
