# SPDX-License-Identifier: Apache-2.0
"""Containers through nvhook-runtime on the simulated host: what several test files say of them."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

from tests import roots
from tests.containers import Bundle
from tests.simhost import SimulatedHost


class Shim:
    """An installed nvhook-runtime, under one of its names, that takes another folder for the host's /."""

    def __init__(self, prefix: Path, host: SimulatedHost, folder: Path, name: str = "nvhook-runtime") -> None:
        self.program = prefix / "bin/nvhook-runtime"
        if name != self.program.name:
            self.program = folder / name
            self.program.symlink_to(prefix / "lib/nvhook/bin/launch")
        self.host = host
        self.folder = folder
        self.numbers = iter(range(1, 1000))

    def bundle(self, script: str, flavour: roots.Flavour = "debian", **others: Any) -> Bundle:
        """A bundle with a fresh root, whose runtime is ours."""
        number = next(self.numbers)
        root = others.pop("root", None) or roots.make_root(self.folder / f"image-{number}", flavour)
        options = ["--host-root", str(self.host.root)]
        arguments = others.pop("arguments", ["/bin/sh", "-c", script])
        return Bundle(self.folder / f"bundle-{number}", root, arguments, options=options, **others)

    def run(self, bundle: Bundle, **others: Any) -> subprocess.CompletedProcess[str]:
        """`nvhook-runtime run`, to the end."""
        return bundle.run(runtime=str(self.program), **others)

    def output(self, bundle: Bundle) -> list[str]:
        """The lines that the container printed; it must succeed, and nothing be said about it."""
        done = self.run(bundle)
        assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
        return done.stdout.splitlines()

    def command(self, bundle: Bundle, *words: str) -> list[str]:
        """A command line of the runtime."""
        return [*bundle.command(str(self.program)), *words]

    def call(self, bundle: Bundle, *words: str) -> subprocess.CompletedProcess[str]:
        """One call of the runtime."""
        return subprocess.run(
            self.command(bundle, *words),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )


def config(bundle: Bundle) -> dict[str, Any]:
    """config.json as it stands in the bundle."""
    value: dict[str, Any] = json.loads((bundle.folder / "config.json").read_text())
    return value


def gpus(value: dict[str, Any]) -> set[str]:
    """The paths of NVIDIA's nodes in a configuration."""
    return {item["path"] for item in value["linux"].get("devices", []) if "nvidia" in item["path"]}
