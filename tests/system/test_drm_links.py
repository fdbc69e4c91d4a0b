# SPDX-License-Identifier: Apache-2.0
"""The names of DRM's nodes by their GPU's place on the bus, in real runc containers by each way."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import roots, simhost
from tests.containers import Bundle
from tests.needs import needs_program
from tests.simhost import SimulatedHost
from tests.system.prestart import nvhook, output, reported, visible
from tests.system.shim import Shim
from tests.system.ways import Ways

pytestmark = needs_program("runc")

FIRST, SECOND = simhost.gpus(2)
HOST = simhost.Host(gpus=(FIRST, SECOND), modules=("nvidia", "nvidia_uvm", "nvidia_modeset", "nvidia_drm"))
BY_PATH = "/dev/dri/by-path"
# What each name is, and what it leads to.
LOOK = f"cd {BY_PATH} && stat -L -c '%n %t:%T' * && stat -c %F *"
# 226 is e2.
NODES = [f"pci-{SECOND.bus_id}-card e2:1", f"pci-{SECOND.bus_id}-render e2:81"]
LINKS = ["symbolic link"] * 2
SPECIAL = ["character special file"] * 2


@pytest.fixture
def host(tmp_path: Path) -> Iterator[SimulatedHost]:
    built = simhost.build(tmp_path / "host", HOST)
    yield built
    built.close()


def run(way: str, ways: Ways, script: str, names: str = "graphics") -> list[str]:
    """A container with the second GPU, which has these capabilities."""
    if way == "runtime":
        folder = ways.folder / f"shim-{next(ways.numbers)}"
        folder.mkdir()
        ours = Shim(ways.prefix, ways.host, folder)
        return ours.output(ours.bundle(script, env=visible("1", names)))
    if way == "prestart":
        return output(ways.prestart(ways.image("debian"), script, "1", names)).splitlines()
    words = ["--capabilities", names, *(["--no-hooks"] if way == "no hook" else [])]
    return output(ways.file(ways.image("debian"), script, *words, devices="1")).splitlines()


@pytest.mark.parametrize(
    ("way", "kinds"), [("prestart", LINKS), ("file", LINKS), ("no hook", SPECIAL), ("runtime", SPECIAL)]
)
def test_links_by_path(ways: Ways, way: str, kinds: list[str]) -> None:
    """Of the container's own GPU and of no other, whatever the file names."""
    assert run(way, ways, LOOK) == NODES + kinds
    assert run(way, ways, "ls /dev/dri 2>/dev/null; true", "compute") == []


def test_a_host_without_these_links(ways: Ways) -> None:
    for path in ways.host.path(BY_PATH).iterdir():
        path.unlink()
    for way in ("prestart", "file", "runtime"):
        assert run(way, ways, "ls /dev/dri") == ["card1", "renderD129"]


def test_a_folder_of_somebody_elses(ways: Ways, tmp_path: Path) -> None:
    """Nothing is made in it, and the container starts."""
    (tmp_path / "foreign").mkdir()
    mount = {"destination": BY_PATH, "type": "bind", "source": str(tmp_path / "foreign"), "options": ["bind"]}
    hooks = reported(nvhook(ways.prefix, ways.host), tmp_path / "said")
    root = roots.make_root(tmp_path / "root")
    script = ["/bin/sh", "-c", "ls /dev/dri"]
    made = Bundle(tmp_path / "bundle", root, script, env=visible("1", "graphics"), prestart=hooks, mounts=[mount])
    assert output(made).split() == ["by-path", "card1", "renderD129"]
    assert list((tmp_path / "foreign").iterdir()) == []
    assert f"{BY_PATH} in the container is a mount from elsewhere" in (tmp_path / "said").read_text()


def test_what_the_file_says(ways: Ways) -> None:
    """Every GPU's, for one hook serves them all; none without graphics, and none where links are not wanted."""

    def words(*options: str) -> list[str]:
        made = ways.file(ways.image("debian"), "true", *options)
        edits = json.loads(json.dumps(made.edits))
        hooks = [entry for block in edits for entry in block.get("hooks", [])]
        return [word for entry in hooks for word in entry["args"] if BY_PATH in word]

    assert words() == [
        f"../{name}{number}::{BY_PATH}/pci-{gpu.bus_id}-{kind}"
        for gpu, first in ((FIRST, 0), (SECOND, 1))
        for name, kind, number in (("card", "card", first), ("renderD", "render", 128 + first))
    ]
    assert words("--capabilities", "compute,utility") == words("--disable-hook", "links") == []
