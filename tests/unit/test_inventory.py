# SPDX-License-Identifier: Apache-2.0
"""cdi.host.inventory: the one real host on record, and the verb."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from cdi import VERSION
from cdi.host import inventory
from tests.hosts import RELEASE, look
from tests.needs import needs_root
from tests.simhost import Host, SimulatedHost, build, build_h200
from tests.simhost import gpus as some_gpus

TREE = Path(__file__).resolve().parents[2]
DATA = TREE / "tests/data/h200"


@pytest.fixture(scope="module")
def h200(tmp_path_factory: pytest.TempPathFactory) -> SimulatedHost:
    return build_h200(tmp_path_factory.mktemp("h200"))


@pytest.mark.parametrize("peer", ["peer-cdi-default.yaml", "peer-cdi-search-path.yaml"])
def test_h200_has_every_file_of_the_peer(h200: SimulatedHost, peer: str) -> None:
    found = look(h200)
    paths = {item["path"] for kind in ("libraries", "programs", "files", "firmware") for item in found[kind]}
    places = {item["container_path"] for item in found["files"]}
    mounts = yaml.safe_load((DATA / peer).read_text())["containerEdits"]["mounts"]
    # Where two folders have one data file, one of them is enough: a container has one place for it.
    missing = [m for m in mounts if m["hostPath"] not in paths and m["containerPath"] not in places]
    assert len(mounts) > 30 and missing == []


def test_h200_has_what_the_peer_missed(h200: SimulatedHost) -> None:
    paths = [item["path"] for item in look(h200)["files"]]
    assert "/usr/local/nvidia/share/vulkan/implicit_layer.d/nvidia_layers.json" in paths


def test_h200_sonames_are_those_on_record(h200: SimulatedHost) -> None:
    rows = [row.split(" | ") for row in (DATA / "sonames.txt").read_text().splitlines() if row]
    found = {item["name"]: item["soname"] for item in look(h200)["libraries"]}
    assert found == {row[0]: row[1] for row in rows}


def test_h200_kernel_facts(h200: SimulatedHost) -> None:
    found = look(h200)
    params = {"ModifyDeviceFiles": 1, "DeviceFileUID": 0, "DeviceFileGID": 0, "DeviceFileMode": 438}
    assert found["driver"] == {"version": RELEASE, "flavour": "open", "cuda": None, "params": params}
    assert found["gpus"] == [
        {
            "index": 0,
            "minor": 0,
            "bus_id": "0000:00:06.0",
            "uuid": "GPU-11111111-2222-3333-4444-555555555555",
            "arch": None,
            "brand": None,
            "mig_mode": None,
            "numa_node": None,
            "name": "NVIDIA H200",
            "node": "/dev/nvidia0",
        }
    ]
    assert (found["schema"], found["nvhook"], found["faults"], found["sockets"]) == (1, VERSION, [], [])
    if h200.nodes_skipped is None:
        assert found["warnings"] == []


@needs_root
def test_h200_nodes(h200: SimulatedHost) -> None:
    nodes = {n["path"]: (n["role"], n["major"], n["minor"], n["mode"], n["gpu"]) for n in look(h200)["nodes"]}
    assert nodes == {
        "/dev/nvidiactl": ("control", 195, 255, 0o666, None),
        "/dev/nvidia-uvm": ("uvm", 238, 0, 0o666, None),
        "/dev/nvidia-uvm-tools": ("uvm-tools", 238, 1, 0o666, None),
        "/dev/nvidia0": ("gpu", 195, 0, 0o666, "0000:00:06.0"),
    }


# --- the verb


def test_the_table(workstation: SimulatedHost, capsys: pytest.CaptureFixture[str]) -> None:
    assert inventory.main(["--host-root", str(workstation.root)]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"driver {RELEASE}, open module\nGPUs:\n")
    rows = [line.split() for line in out.splitlines()]
    assert ["0", "0", "0000:10:00.0", some_gpus(1)[0].uuid, "0", "NVIDIA", "H200"] in rows
    cuda = f"/usr/lib/x86_64-linux-gnu/libcuda.so.{RELEASE}"
    assert ["compute", "64", cuda, "libcuda.so.1", "libcuda.so"] in rows
    assert "warning: /run/nvidia-fabricmanager/socket is left out: Connection refused" in out


def test_json_is_the_kept_inventory(workstation: SimulatedHost, capsys: pytest.CaptureFixture[str]) -> None:
    kept = workstation.path("/run/nvhook/inventory.json")
    assert inventory.main(["--host-root", str(workstation.root), "--json"]) == 0
    printed = yaml.safe_load(capsys.readouterr().out)
    assert printed == yaml.safe_load(kept.read_text())
    before = kept.stat()
    assert inventory.main(["--host-root", str(workstation.root), "--quiet"]) == 0
    assert kept.stat().st_ino == before.st_ino, "a fresh inventory is not made again"
    assert inventory.main(["--host-root", str(workstation.root), "--quiet", "--refresh"]) == 0
    assert kept.stat().st_mtime_ns > before.st_mtime_ns
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    "words",
    [
        ["--driver-root", "run/nvidia"],
        ["--dev-root", "."],
        ["--library-search-path", "lib"],
        ["--nvml-timeout", "0"],
        ["--nvml-timeout", "nan"],
        ["--nvml", "sometimes"],
    ],
)
def test_usage_errors(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        inventory.main(words)
    assert caught.value.code == 2
    assert words[0] in capsys.readouterr().err


def test_roots_are_one_however_they_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A kept inventory is for a host, not for a spelling."""
    host = build(tmp_path / "host", Host(driver_root="/drv", dev_root="/drv", graphics=False))
    assert inventory.main(["--host-root", str(host.root), "--driver-root", "/drv", "--quiet"]) == 0
    kept = host.path("/run/nvhook/inventory.json").stat()
    monkeypatch.chdir(tmp_path)
    assert inventory.main(["--host-root", "./host/", "--driver-root", "/drv/", "--dev-root", "//drv/.", "--quiet"]) == 0
    assert host.path("/run/nvhook/inventory.json").stat().st_ino == kept.st_ino
