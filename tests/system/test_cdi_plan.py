# SPDX-License-Identifier: Apache-2.0
"""`nvhook plan` for CDI files: what it says is what an engine and the file's hook do, and nothing is done."""

from __future__ import annotations

import json
from typing import Any

import pytest

from cdi import finish
from hook import cdiplanner, cli
from ldcache.errors import NvhookError
from tests.containers import Bundle
from tests.needs import needs_program
from tests.system import cdifiles
from tests.system.prestart import output, tree_of, visible
from tests.system.ways import NAMES, Ways, identities

pytestmark = needs_program("runc")


def printed(bundle: Bundle, ways: Ways, applier: str, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """What the command prints for a bundle, which stays as it is."""
    bundle.write()
    before = tree_of(bundle.folder), tree_of(bundle.root)
    capsys.readouterr()
    words = ["plan", "--bundle", str(bundle.folder), "--host-root", str(ways.host.root), "--applier", applier]
    assert cli.main(words) == 0
    assert (tree_of(bundle.folder), tree_of(bundle.root)) == before
    value: dict[str, Any] = json.loads(capsys.readouterr().out)
    return value


def parts(made: dict[str, Any]) -> dict[str, tuple[bool, str]]:
    return {entry["part"]: (entry["done"], entry["reason"]) for entry in made["parts"]}


@pytest.mark.parametrize("devices", ["all", "1"])
def test_the_hook_does_what_the_plan_says(ways: Ways, devices: str, capsys: pytest.CaptureFixture[str]) -> None:
    made = printed(ways.bundle(ways.image("debian"), "true", env=visible(devices)), ways, "cdi-hook", capsys)
    minors = [0, 1] if devices == "all" else [1]
    buses = [ways.host.host.gpus[minor].bus_id for minor in minors]
    assert made["devices"] == [f"nvidia.com/gpu={devices}"]
    assert tuple(parts(made)) == finish.PARTS
    assert parts(made)["proc-mask"] == (True, f"shows {', '.join(buses)}")
    assert parts(made)["application-profile"] == (True, f"EGL lists {', '.join(f'/dev/nvidia{n}' for n in minors)}")
    assert parts(made)["requirements"] == (False, "the container requires nothing")
    links = made["finish"]["links"]
    script = "; ".join(
        [f"resolve -s {' '.join(NAMES)}", *(f"echo link {link['path']} $(readlink {link['path']})" for link in links)]
    )
    lines = output(ways.file(ways.image("debian"), script, devices=devices)).splitlines()
    assert [line.split()[-1] for line in lines[: len(NAMES)]] == identities(ways.host)
    assert lines[len(NAMES) :] == [f"link {link['path']} {link['target']}" for link in links]
    cached = {entry["soname"] for entry in made["finish"]["loader_cache"]}
    assert set(NAMES) <= cached
    # The edits are the file's own.
    file = cdifiles.generate(ways.folder / "again/nvidia.json", ways.host)
    (device,) = [entry for entry in file["devices"] if entry["name"] == devices]
    places = [mount["containerPath"] for mount in file["containerEdits"]["mounts"]]
    assert [mount["containerPath"] for mount in made["edits"]["mounts"]] == places
    nodes = file["containerEdits"]["deviceNodes"] + device["containerEdits"]["deviceNodes"]
    assert [node["path"] for node in made["edits"]["deviceNodes"]] == [node["path"] for node in nodes]


def test_a_bundle_that_an_engine_has_edited(ways: Ways, capsys: pytest.CaptureFixture[str]) -> None:
    """The hook that stands in config.json is planned, whatever a file of now would have."""
    image = ways.image("debian")
    asked = printed(ways.bundle(image, "true", env=visible("1")), ways, "cdi-hook", capsys)
    cdifiles.generate(ways.folder / "specs/nvidia.json", ways.host, "--disable-hook", "proc-mask,requirements")
    edits = cdifiles.edits(ways.folder / "specs", "nvidia.com/gpu=1")
    made = printed(ways.bundle(image, "true", edits=edits), ways, "cdi-hook", capsys)
    assert (made["devices"], made["edits"], made["request"]) == ([], {}, None)
    assert made["hooks"] == [edits[0]["hooks"][0]["args"]]
    assert made["finish"]["loader_cache"] == asked["finish"]["loader_cache"]
    assert made["steps"] == [step for step in asked["steps"] if not step.startswith("mask ")]
    assert parts(made) == parts(asked) | {
        part: (False, "the hook's arguments do not ask for it") for part in ("proc-mask", "requirements")
    }


def test_a_file_without_a_hook(ways: Ways, capsys: pytest.CaptureFixture[str]) -> None:
    made = printed(ways.bundle(ways.image("debian"), "true", env=visible("0,1")), ways, "cdi", capsys)
    assert made["devices"] == ["nvidia.com/gpu=0", "nvidia.com/gpu=1"]
    assert (made["parts"], made["hooks"], made["steps"]) == ([], [], [])
    places = {mount["containerPath"] for mount in made["edits"]["mounts"]}
    assert {"/usr/lib64/libcuda.so.1", "/usr/lib/x86_64-linux-gnu/libcuda.so.1"} <= places
    assert "hooks" not in made["edits"]
    assert any("is not masked" in warning for warning in made["finish"]["warnings"])


def test_requirements_in_the_plan(ways: Ways, capsys: pytest.CaptureFixture[str]) -> None:
    image = ways.image("debian")
    env = visible("0") | {"NVIDIA_REQUIRE_CUDA": "cuda>=12.0"}
    made = printed(ways.bundle(image, "true", env=env), ways, "cdi-hook", capsys)
    assert parts(made)["requirements"] == (True, "1 checked, 0 not met")
    assert [entry["satisfied"] for entry in made["requirements"]] == [True]
    bundle = ways.bundle(image, "true", env=env | {"NVIDIA_REQUIRE_CUDA": "cuda>=99.0"})
    bundle.write()
    with pytest.raises(NvhookError, match="NVIDIA_REQUIRE_CUDA is not met"):
        cdiplanner.plan(str(bundle.folder), str(ways.host.root), False)


@pytest.mark.parametrize("applier", ["cdi", "cdi-hook"])
def test_no_gpu_and_a_wrong_one(ways: Ways, applier: str, capsys: pytest.CaptureFixture[str]) -> None:
    image = ways.image("debian")
    made = printed(ways.bundle(image, "true"), ways, applier, capsys)
    assert (made["request"], made["edits"], made["devices"], made["parts"]) == (None, {}, [], [])
    bundle = ways.bundle(image, "true", env=visible("7"))
    bundle.write()
    with pytest.raises(NvhookError, match="no GPU '7' on this host; there are 0"):
        cdiplanner.plan(str(bundle.folder), str(ways.host.root), applier == "cdi")
