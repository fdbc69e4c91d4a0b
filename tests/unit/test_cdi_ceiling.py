# SPDX-License-Identifier: Apache-2.0
"""cdi.ceiling and cdi.replacement: what a spec may need, and what it may not lose."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest

from cdi import ceiling, cli, reader, replacement, spec, versions
from cdi.generate import CAPABILITIES as ALL
from ldcache.errors import NvhookError
from tests.needs import needs_root
from tests.simhost import Host, SimulatedHost, build, gpus

HOOK = "/usr/bin/nvhook-create-container"
VIDEO, RENDER = 44, 105
CARDS = gpus(2)


def node(path: str, gid: int = 0, mode: int = 0o666, **more: Any) -> dict[str, Any]:
    return {"path": path, "fileMode": mode, "permissions": "rw", **({"gid": gid} if gid else {}), **more}


def a_spec(**changes: Any) -> dict[str, Any]:
    """A spec that has something for each version."""
    return {
        "cdiVersion": "0.6.0",
        "kind": "nvidia.com/gpu",
        "annotations": {"a/b": "c"},
        "devices": [
            {
                "name": name,
                "annotations": {"nvhook/numa-node": "0"},
                "containerEdits": {"deviceNodes": [node("/dev/dri/renderD128", RENDER, 0o660), node("/dev/nvidia0")]},
            }
            for name in ("0", "GPU-1", "all")
        ],
        "containerEdits": {"deviceNodes": [node("/dev/nvidiactl", VIDEO, 0o660)], "env": ["A=1"]},
        **changes,
    }


@pytest.mark.parametrize("newest", versions.KNOWN[2:])
def test_the_result_is_read_by_whoever_knows_the_ceiling(newest: str) -> None:
    made, dropped = ceiling.fit(ceiling.add_groups(a_spec()), newest)
    at = versions.KNOWN.index
    assert at(made["cdiVersion"]) <= at(newest)
    release = next(name for name, known in versions.NEWEST_READ.items() if at(known) >= at(newest))
    assert spec.problems(made, release) == []
    expected = {
        "additionalGids 44, 105": at(newest) < at("0.7.0"),
        "the annotation a/b, nvhook/numa-node": at(newest) < at("0.6.0"),
        "the device name 0 needs": at(newest) < at("0.5.0"),
    }
    assert len(dropped) == sum(expected.values())
    for text, said in expected.items():
        assert any(line.startswith(text) for line in dropped) == said
        assert all(line.endswith(f", and {newest} is the newest that may be used") for line in dropped)
    names = spec.device_names(made)
    assert names == ([*("0",) * (at(newest) >= at("0.5.0")), "GPU-1", "all"])


def test_only_groups_of_closed_nodes_are_added() -> None:
    """Whoever may open a node needs no group for it, and nobody needs root's."""
    nodes = [
        node("/dev/a", VIDEO, 0o666),
        node("/dev/b", RENDER, 0o664),
        node("/dev/c", 0, 0o600),
        node("/dev/d", 7, 0),
    ]
    made = a_spec(devices=[{"name": "all", "containerEdits": {"deviceNodes": nodes}}], containerEdits={"env": ["A=1"]})
    grouped = ceiling.add_groups(made)
    assert grouped["devices"][0]["containerEdits"]["additionalGids"] == [7, RENDER]
    assert "additionalGids" not in grouped["containerEdits"]


@pytest.mark.parametrize(
    ("changes", "newest"),
    [
        ({"kind": "nvidia.com/gpu.x"}, "0.5.0"),
        ({"containerEdits": {"deviceNodes": [node("/dev/nvidiactl", hostPath="/drv/dev/nvidiactl")]}}, "0.4.0"),
    ],
)
def test_what_can_not_be_dropped_is_an_error(changes: dict[str, Any], newest: str) -> None:
    what = f"the spec can't do without CDI (.*), and {newest} is the newest"
    with pytest.raises(NvhookError, match=what) as caught:
        ceiling.fit(a_spec(**changes), newest)
    needed = re.match(what, caught.value.what)
    assert needed and f"give --spec-version-max {needed[1]}, or " in caught.value.remedy


def test_nothing_left_is_an_error() -> None:
    made = a_spec(devices=a_spec()["devices"][:1])
    with pytest.raises(NvhookError, match=r"no device is left under CDI 0\.4\.0"):
        ceiling.fit(made, "0.4.0")


# --- the command


@pytest.fixture
def host(tmp_path: Path) -> SimulatedHost:
    modules = ("nvidia", "nvidia_uvm", "nvidia_modeset", "nvidia_drm")
    built = build(tmp_path / "host", Host(gpus=CARDS, modules=modules, graphics=False))
    if built.nodes_skipped is None:
        for name in ("card0", "renderD128"):
            os.chown(built.path(f"/dev/dri/{name}"), 0, RENDER)
    return built


def generate(host: SimulatedHost, output: Path | None, *words: str) -> int:
    place = ["--output", str(output)] if output else []
    return cli.main(["generate", "--host-root", str(host.root), "--hook-path", HOOK, *place, *words])


@needs_root
@pytest.mark.parametrize("newest", ["0.5.0", "0.7.0"])
def test_groups_of_a_host(host: SimulatedHost, capsys: pytest.CaptureFixture[str], newest: str) -> None:
    assert generate(host, None, "--spec-version-max", newest) == 0
    out, err = capsys.readouterr()
    made = reader.parse(out)
    edits = {device["name"]: device["containerEdits"] for device in made["devices"]}
    closed = next(one for one in edits["0"]["deviceNodes"] if one["path"] == "/dev/dri/renderD128")
    assert (closed["gid"], closed["fileMode"], made["cdiVersion"]) == (RENDER, 0o660, newest)
    wanted = {"0": [RENDER], "1": None, "all": [RENDER]} if newest == "0.7.0" else dict.fromkeys(("0", "1", "all"))
    assert {name: edits[name].get("additionalGids") for name in wanted} == wanted
    assert (f"additionalGids {RENDER}" in err) == (newest == "0.5.0")
    numa = "the annotation nvhook/numa-node needs CDI 0.6.0, and 0.5.0 is the newest that may be used"
    assert (numa in err) == (newest == "0.5.0")
    assert ("annotations" in made["devices"][0]) == (newest == "0.7.0")
    # Nobody who chose no version misses it.
    assert generate(host, None) == 0
    assert "annotation" not in capsys.readouterr().err


@needs_root
def test_below_0_5_0_there_are_no_names_by_index(host: SimulatedHost, capsys: pytest.CaptureFixture[str]) -> None:
    assert generate(host, None, "--spec-version-max", "0.3.0") == 0
    out, err = capsys.readouterr()
    made = reader.parse(out)
    assert (made["cdiVersion"], spec.device_names(made)) == ("0.3.0", [*(card.uuid for card in CARDS), "all"])
    assert "the device name 0, 1 needs CDI 0.5.0, and 0.3.0 is the newest that may be used" in err


@needs_root
@pytest.mark.parametrize(
    ("module", "node", "remedy"),
    [
        ("nvidia_uvm", "/dev/nvidia-uvm and /dev/nvidia-uvm-tools", "modprobe nvidia-uvm"),
        ("nvidia_modeset", "/dev/nvidia-modeset", "modprobe nvidia-modeset"),
    ],
)
def test_a_fuller_file_stays(
    tmp_path: Path, host: SimulatedHost, capsys: pytest.CaptureFixture[str], module: str, node: str, remedy: str
) -> None:
    output = tmp_path / "cdi/nvidia.yaml"
    assert generate(host, output) == 0
    before = output.read_bytes(), output.stat().st_mtime_ns
    capsys.readouterr()
    modules = tuple(name for name in host.host.modules if name != module)
    for name in node.split(" and "):
        host.path(name).unlink()
    build(host.root, Host(gpus=CARDS, modules=modules, graphics=False))
    assert generate(host, output) == 1
    err = capsys.readouterr().err.splitlines()
    assert err[-2] == f"nvhook: error: {output} has {node}, which this host has not now: the file is left as it is"
    assert remedy in err[-1] and f"remove {output}" in err[-1]
    assert (output.read_bytes(), output.stat().st_mtime_ns) == before
    # To stdout, or in a place that has none, it is what this host has now, and says what it lacks.
    assert generate(host, None) == 0
    out, said = capsys.readouterr()
    assert node.split(" and ")[0] not in out
    loads = (
        "CUDA will not work, for /dev/nvidia-uvm is missing: nvhook nodes create --load-kmods, or modprobe nvidia-uvm "
    )
    assert (loads in said) == (module == "nvidia_uvm")
    output.unlink()
    assert generate(host, output) == 0


@needs_root
def test_a_fuller_file_stays_where_less_is_asked_for(
    tmp_path: Path, host: SimulatedHost, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is missing on the host then, and no module has to be loaded."""
    output = tmp_path / "cdi/nvidia.yaml"
    assert generate(host, output) == 0
    before = output.read_bytes()
    capsys.readouterr()
    assert generate(host, output, "--capabilities", "utility") == 1
    lines = capsys.readouterr().err.splitlines()
    lost = "/dev/nvidia-uvm and /dev/nvidia-uvm-tools and /dev/nvidia-modeset and libcuda.so"
    what = f"{output} has {lost}, which --capabilities utility does not ask for: the file is left as it is"
    assert sorted(lines[-2].split()) == sorted(f"nvhook: error: {what}".split())
    assert lines[-1] == f"  remedy: remove {output}, or give another --output"
    assert output.read_bytes() == before


def test_libraries_that_are_gone_and_others(tmp_path: Path) -> None:
    def mounts(*names: str) -> dict[str, Any]:
        entries = [{"hostPath": f"/usr/lib/{n}", "containerPath": f"/usr/lib/{n}", "options": ["bind"]} for n in names]
        return a_spec(containerEdits={"mounts": entries, "env": ["A=1"]})

    path = tmp_path / "x.json"
    before = mounts("libcuda.so.550.90.07", "libnvidia-ml.so.550.90.07", "libnvidia-encode.so.550.90.07", "nvidia-smi")
    path.write_text(spec.serialise(before, "json"))
    with pytest.raises(NvhookError, match=r"has libcuda\.so, which was not found now"):
        replacement.check(path, mounts("libnvidia-ml.so.580.1", "nvidia-smi"), ALL)
    # An upgrade is no loss; the rest is no error, and is named.
    after = mounts("libcuda.so.580.1", "libnvidia-ml.so.580.1", "nvidia-smi", "new")
    after["devices"] = after["devices"][1:]
    assert replacement.check(path, after, ALL) == [
        f"{path} had the device 0 until now",
        f"{path} had libnvidia-encode.so.VERSION until now",
    ]
    assert replacement.check(tmp_path / "none.json", after, ALL) == []
    # Another kind's file is nothing to compare with.
    other = {**after, "kind": "management.nvidia.com/gpu"}
    assert replacement.check(path, other, ALL) == [f"{path} had devices of the kind nvidia.com/gpu until now"]
    path.write_text("{")
    assert replacement.check(path, after, ALL) == []
