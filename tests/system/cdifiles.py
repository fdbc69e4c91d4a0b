# SPDX-License-Identifier: Apache-2.0
"""CDI files of a simulated host, as an engine on this machine would apply them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from cdi import cli, reader, registry
from tests import demo
from tests.simhost import SimulatedHost


def on_this_machine(spec: dict[str, Any], root: Path) -> dict[str, Any]:
    """The spec of a host below `root`, with its host paths as they are on this machine."""
    for edits in [spec.get("containerEdits", {}), *(device["containerEdits"] for device in spec["devices"])]:
        for entry in edits.get("mounts", []) + edits.get("deviceNodes", []):
            entry["hostPath"] = f"{str(root).rstrip('/')}{entry.get('hostPath', entry.get('path'))}"
    return spec


def generate(output: Path, host: SimulatedHost | demo.Machine, *words: str) -> dict[str, Any]:
    """What `cdi generate` writes for a host, at `output`, moved to this machine."""
    output.parent.mkdir(parents=True, exist_ok=True)
    assert cli.main(["generate", "--host-root", str(host.root), "--output", str(output), *words]) == 0
    spec = on_this_machine(json.loads(output.read_text()), host.root)
    output.write_text(json.dumps(spec))
    return spec


def edits(folder: Path, *devices: str) -> list[dict[str, Any]]:
    """What an engine takes out of a folder of specs for these devices."""
    return registry.resolve(registry.scan([str(folder)], reader.load), list(devices))
