# SPDX-License-Identifier: Apache-2.0
"""WSL and Tegra, of which no inventory can be made: what the hook and the runtime say there, and the way that works."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import roots
from tests.containers import Bundle
from tests.needs import needs_program
from tests.simhost import SimulatedHost, bare
from tests.simhost.tree import Tree
from tests.system import cdifiles
from tests.system.prestart import nvhook, visible
from tests.system.shim import Shim

pytestmark = needs_program("runc")

HOSTS = [(bare.wsl, "WSL", "wsl", "/dev/dxg"), (bare.tegra, "Tegra", "csv", "/dev/nvmap")]
Make = Callable[[Path], Tree]


class Host(SimulatedHost):
    """One of them, as far as helpers for containers ask for a host."""

    def __init__(self, top: Path) -> None:
        self.root = top


@pytest.mark.parametrize(("make", "name", "mode", "node"), HOSTS)
def test_the_hook_names_the_way_that_works(
    prefix: Path, tmp_path: Path, make: Make, name: str, mode: str, node: str
) -> None:
    host = Host(make(tmp_path / "host").top)
    root = roots.make_root(tmp_path / "root")
    made = Bundle(tmp_path / "bundle", root, ["/bin/true"], env=visible("all"), prestart=nvhook(prefix, host))
    done = made.run()
    assert done.returncode != 0
    assert f"this is {name}, where no module tells of GPUs" in done.stderr
    assert f"cdi generate --mode {mode}" in done.stderr and "nvhook-runtime with `mode = " in done.stderr
    assert Bundle(tmp_path / "plain", root, ["/bin/true"], prestart=nvhook(prefix, host)).run().returncode == 0


@pytest.mark.parametrize(("make", "name", "mode", "node"), HOSTS)
def test_the_runtime_goes_by_the_file(
    prefix: Path, tmp_path: Path, make: Make, name: str, mode: str, node: str
) -> None:
    """By itself it says the same; in the mode cdi a request by the environment finds the devices of the file."""
    host = Host(make(tmp_path / "host").top)
    ours = Shim(prefix, host, tmp_path)
    done = ours.run(ours.bundle("true", env=visible("all")))
    assert done.returncode != 0
    assert f"this is {name}, where no module tells of GPUs" in done.stderr
    file = tmp_path / "host/var/run/cdi/nvidia.json"
    made = cdifiles.generate(file, host, "--hook-path", str(prefix / "bin/nvhook-create-container"), "--mode", mode)
    # Other paths than the host's own need that.
    file.write_text(json.dumps(made | {"cdiVersion": "0.5.0"}))
    Tree(tmp_path / "host").write("/etc/nvhook/config.toml", '[runtime]\nmode = "cdi"\n')
    place = made["containerEdits"]["mounts"][-1]["containerPath"]
    lines = ours.output(ours.bundle(f"stat -c %F {node}; ls -d {place}", env=visible("all")))
    assert lines[:2] == ["character special file", place]
