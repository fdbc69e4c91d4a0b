# SPDX-License-Identifier: Apache-2.0
"""The runtime shim gives what the prestart hook gives: the same nodes, and the same host file for each soname."""

from __future__ import annotations

import itertools
import json
import os
import shutil
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from hypothesis import strategies

from hook import bundle, planner, shim
from ldcache import cache, root
from tests import roots
from tests.containers import Bundle
from tests.needs import needs_program
from tests.simhost import SimulatedHost
from tests.system.prestart import nvhook, output, visible
from tests.system.shim import Shim, config

NUMBERS = itertools.count(1)
FLAVOURS: tuple[roots.Flavour, ...] = ("debian", "lib64", "centos7", "arch", "distroless")
CAPABILITIES = ("compute", "utility", "graphics", "video", "display", "ngx", "compat32")


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A root of each kind, to be copied."""
    folder = tmp_path_factory.mktemp("images")
    return {flavour: roots.make_root(folder / flavour, flavour) for flavour in FLAVOURS}


def in_front(host: SimulatedHost, made: dict[str, Any], root: Path) -> dict[str, str]:
    """The host file behind each soname in the cache of a root that the shim has written, given config.json's mounts."""
    sources = {mount["destination"]: mount["source"] for mount in made["mounts"]}
    found: dict[str, str] = {}
    for entry in cache.parse((root / "etc/ld.so.cache").read_bytes()).entries:
        path = os.fsdecode(entry.path)
        while path not in sources and (root / path.lstrip("/")).is_symlink():
            path = os.path.normpath(os.path.join(os.path.dirname(path), os.readlink(root / path.lstrip("/"))))
        if path in sources:
            found.setdefault(
                f"{os.fsdecode(entry.soname)} {entry.flags:#x}", sources[path].removeprefix(str(host.root))
            )
    return found


def planned(plan: dict[str, Any]) -> dict[str, str]:
    """The same by the prestart hook's plan."""
    sources = {mount["containerPath"]: mount["hostPath"] for mount in plan["edits"]["mounts"]}
    links = {link["path"]: link["target"] for link in plan["finish"]["links"]}
    found: dict[str, str] = {}
    for entry in plan["finish"]["loader_cache"]:
        path = entry["path"]
        while path in links:
            path = os.path.normpath(os.path.join(os.path.dirname(path), links[path]))
        found[f"{entry['soname']} {cache.native_flags(entry['class'], entry['machine']):#x}"] = sources[path]
    return found


@hypothesis.settings(max_examples=40)
@hypothesis.given(
    devices=strategies.sampled_from(["all", "none", "0", "1", "0,1", "1,0,1"]),
    names=strategies.sets(strategies.sampled_from(CAPABILITIES), min_size=1),
    flavour=strategies.sampled_from(FLAVOURS),
)
def test_the_plan_of_either_way(
    tmp_path_factory: pytest.TempPathFactory,
    host: SimulatedHost,
    images: dict[str, Path],
    devices: str,
    names: set[str],
    flavour: roots.Flavour,
) -> None:
    folder = tmp_path_factory.mktemp("plan")
    try:
        image = folder / "image"
        shutil.copytree(images[flavour], image, symlinks=True)
        made = Bundle(folder / f"bundle-{next(NUMBERS)}", image, ["/bin/true"], env=visible(devices, ",".join(names)))
        made.write()
        expected = planner.plan(str(made.folder), str(host.root))
        top = root.open_host(str(host.root))
        edit = shim.Shim(bundle.Bundle(str(made.folder)), top, str(host.root), "nvhook-runtime")
        assert edit.make("/usr/sbin/runc")
        edit.apply()
        os.close(top)
        written = config(made)
        nodes = {(node["path"], node["major"], node["minor"]) for node in expected["edits"].get("deviceNodes", [])}
        devices_written = written["linux"].get("devices", [])
        assert {(item["path"], item["major"], item["minor"]) for item in devices_written} == nodes
        rules = {(rule.get("major"), rule.get("minor")) for rule in written["linux"]["resources"]["devices"][1:]}
        assert rules == {node[1:] for node in nodes}
        assert in_front(host, written, image) == planned(expected)
        assert written["hooks"]["createContainer"] == []
    finally:
        shutil.rmtree(folder)


NODES = "find /dev -name 'nvidia*' -type c -o -path '/dev/dri/*' -type c | sort | xargs stat -c '%n %t:%T %a %u:%g'"


@needs_program("runc")
@pytest.mark.parametrize("devices", ["all", "1"])
@pytest.mark.parametrize("names", ["compute,utility", "all"])
def test_containers_of_either_way(prefix: Path, host: SimulatedHost, tmp_path: Path, devices: str, names: str) -> None:
    """Nodes with numbers, modes and owners; device and inode behind each soname."""
    sonames = ["libcuda.so.1", "libcuda.so", "libnvidia-ml.so.1"]
    if names == "all":
        sonames = sorted({one.soname for one in host.libraries if one.bits == 64} | {"libcuda.so"})
    script = f"{NODES}; resolve -s {' '.join(sonames)}; find /usr /etc -name '*nvidia*' | sort"
    ours = Shim(prefix, host, tmp_path)
    image = roots.make_root(tmp_path / "other")
    arguments = ["/bin/sh", "-c", script]
    env = visible(devices, names)
    other = Bundle(tmp_path / "prestart", image, arguments, env=env, prestart=nvhook(prefix, host))
    assert ours.output(ours.bundle(script, env=env)) == output(other).splitlines()


def test_what_plan_prints(prefix: Path, host: SimulatedHost, tmp_path: Path) -> None:
    """Which way and why; and that nothing is done."""
    ours = Shim(prefix, host, tmp_path)
    made = ours.bundle("true", env=visible("1"))
    made.write()
    before = (made.folder / "config.json").read_bytes()
    printed = planner.plan_runtime(str(made.folder), str(host.root))
    json.dumps(printed)
    assert printed["reasons"] == [
        "links and the loader cache are written into the root before the start",
        "no mask over /proc/driver/nvidia: the device rules open no GPU that was not asked for",
    ]
    assert (printed["mode"], printed["hooks"]) == ("auto", [])
    assert printed["runtime"].endswith("/runc")
    assert any(step.startswith("loader cache /etc/ld.so.cache: ") for step in printed["steps"])
    assert (made.folder / "config.json").read_bytes() == before
    assert not any(path.name.startswith("libcuda") for path in made.root.rglob("*"))
    made.device_rules = [{"allow": True, "access": "rwm"}]
    made.write()
    printed = planner.plan_runtime(str(made.folder), str(host.root))
    assert printed["reasons"][1].startswith(
        "a hook masks /proc/driver/nvidia: the device rules let it open /dev/nvidia0"
    )
    assert printed["hooks"][0][0] == "nvhook-create-container" and printed["hooks"][0][-1] == "--proc-mask"
    ours.run(made)
    assert planner.plan_runtime(str(made.folder), str(host.root))["reasons"] == ["it is done already"]
    nothing = ours.bundle("true")
    nothing.write()
    assert planner.plan_runtime(str(nothing.folder), str(host.root))["request"] is None
