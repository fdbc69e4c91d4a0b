# SPDX-License-Identifier: Apache-2.0
"""cdi.host.mig, cdi.host.imex, cdi.host.gates: what an inventory has beside whole GPUs, on the simulated host."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cdi.host import fingerprint, gates, imex, inventory, mig, overview
from cdi.host.store import Options
from ldcache import root
from tests.needs import needs_root
from tests.simhost import Fault, Host, Nvml, SimulatedHost, build, divided, gpus
from tests.simhost.kernel import mig_minors

pytestmark = needs_root

# The minors do not follow the order of the bus ids.
FIRST, SECOND = (replace(gpu, minor=minor) for gpu, minor in zip(gpus(2), (1, 0), strict=True))
DIVIDED = divided(FIRST, (5, 0), (1, 0), (5, 1))
HOST = Host(gpus=(DIVIDED, SECOND), graphics=False)


def look(host: SimulatedHost, nvml: str = "never", **options: Any) -> dict[str, Any]:
    return inventory.gather(Options(str(host.root), nvml=nvml, **options))


def minors(entry: dict[str, Any]) -> list[int]:
    return [node["minor"] for node in entry["nodes"]]


# --- MIG devices


def test_the_layout_by_the_kernel_alone(tmp_path: Path) -> None:
    made = look(build(tmp_path, HOST))
    assert [(entry["gpu"], entry["index"], entry["gi"], entry["ci"], entry["uuid"]) for entry in made["mig"]] == [
        (FIRST.bus_id, 0, 1, 0, None),
        (FIRST.bus_id, 1, 5, 0, None),
        (FIRST.bus_id, 2, 5, 1, None),
    ]
    entry = made["mig"][2]
    # gpu1: by the minor, although it is the first.
    folder = "/proc/driver/nvidia/capabilities/gpu1/mig/gi5"
    assert entry["access"] == [f"{folder}/access", f"{folder}/ci1/access"]
    gi, ci = mig_minors(1, 5), mig_minors(1, 5, 1)
    assert [(node["path"], node["major"], node["minor"]) for node in entry["nodes"]] == [
        (f"/dev/nvidia-caps/nvidia-cap{minor}", 507, minor) for minor in (gi, ci)
    ]
    assert all((node["role"], node["gpu"], node["mode"]) == ("mig", FIRST.bus_id, 0o444) for node in entry["nodes"])
    assert made["warnings"] == []


def test_nvml_tells_uuids_and_its_own_order(tmp_path: Path) -> None:
    host = build(tmp_path, HOST)
    made = look(host, nvml="auto")
    found = {entry["uuid"]: (entry["index"], entry["gi"], entry["ci"]) for entry in made["mig"]}
    assert found == {one.uuid: (i, one.gi, one.ci) for i, one in enumerate(DIVIDED.mig_devices)}
    # Every UUID of a whole GPU is the kernel's to tell, so only the divided one was asked about.
    assert {call.gpu for call in host.nvml_calls()} == {-1, 0}


def test_what_nvml_told_is_kept_for_one_layout(tmp_path: Path) -> None:
    host = build(tmp_path, HOST)
    told = look(host, nvml="auto")
    again = inventory.look(Options(str(host.root), nvml="never"), told)
    assert again["mig"] == told["mig"]
    shutil.rmtree(host.path("/proc/driver/nvidia/capabilities/gpu1/mig/gi1"))
    other = inventory.look(Options(str(host.root), nvml="never"), told)
    assert [(entry["index"], entry["uuid"]) for entry in other["mig"]] == [(0, None), (1, None)]


def test_a_gpu_whose_mig_devices_nvml_does_not_tell(tmp_path: Path) -> None:
    host = build(tmp_path, replace(HOST, nvml=Nvml(faults=(Fault("nvmlDeviceGetMigDevice", result=3),))))
    made = look(host, nvml="auto")
    assert [entry["uuid"] for entry in made["mig"]] == [None] * 3
    assert [entry["index"] for entry in made["mig"]] == [0, 1, 2]


@pytest.mark.parametrize("lost", [mig_minors(1, 5), mig_minors(1, 5, 1)])
def test_both_capability_nodes_or_none(tmp_path: Path, lost: int) -> None:
    made = look(build(tmp_path, replace(HOST, missing=frozenset({f"nvidia-cap{lost}"}))))
    assert minors(made["mig"][2]) == []
    assert minors(made["mig"][0]) == [mig_minors(1, 1), mig_minors(1, 1, 0)]
    assert f"/dev/nvidia-caps/nvidia-cap{lost} is missing" in made["warnings"]


def test_a_node_of_another_driver(tmp_path: Path) -> None:
    host = build(tmp_path, HOST)
    path = host.path(f"/dev/nvidia-caps/nvidia-cap{mig_minors(1, 1)}")
    path.unlink()
    os.mknod(path, 0o020444, os.makedev(99, mig_minors(1, 1)))
    made = look(host)
    assert minors(made["mig"][0]) == []
    assert any("the kernel says 507:" in text for text in made["warnings"])


def test_a_gpu_instance_alone_is_no_device(tmp_path: Path) -> None:
    host = build(tmp_path, HOST)
    shutil.rmtree(host.path("/proc/driver/nvidia/capabilities/gpu1/mig/gi1/ci0"))
    assert [(entry["gi"], entry["ci"]) for entry in look(host)["mig"]] == [(5, 0), (5, 1)]


def test_an_access_file_that_names_no_minor(tmp_path: Path) -> None:
    host = build(tmp_path, HOST)
    path = host.path("/proc/driver/nvidia/capabilities/gpu1/mig/gi1/ci0/access")
    path.chmod(0o644)
    path.write_text("DeviceFileMinor: none\n")
    made = look(host)
    assert made["mig"][0]["nodes"] == []
    assert made["warnings"] == ["/proc/driver/nvidia/capabilities/gpu1/mig/gi1/ci0/access names no device minor"]


def test_an_access_file_that_is_still_to_come(tmp_path: Path) -> None:
    """The kernel makes an instance's folder before its file."""
    host = build(tmp_path, HOST)
    path = host.path("/proc/driver/nvidia/capabilities/gpu1/mig/gi1/ci0/access")
    text = path.read_text()
    path.unlink()
    made = look(host)
    assert made["mig"][0]["nodes"] == []
    fd = root.open_root(str(host.root))
    assert fingerprint.changed(fd, made["fingerprint"]) is None
    path.write_text(text)
    assert fingerprint.changed(fd, made["fingerprint"]) is not None
    os.close(fd)


def test_what_manages_mig(tmp_path: Path) -> None:
    made = look(build(tmp_path, replace(HOST, missing=frozenset({"nvidia-cap2"}))))
    assert {name: minors(entry) for name, entry in made["mig_control"].items()} == {"config": [1]}
    assert made["mig_control"]["config"]["access"] == ["/proc/driver/nvidia/capabilities/mig/config"]
    # Most hosts lack these nodes, and nobody misses them.
    assert made["warnings"] == []


def test_uuids_of_old_drivers() -> None:
    devices = [{"gpu": "a", "gi": 1, "ci": 0, "uuid": None, "index": 0}]
    old = "MIG-GPU-00000001-2222-3333-4444-555555555555/1/0"
    assert mig.learn(devices, "a", [[0, 1, 0, old, ""]]) == []
    assert devices[0]["uuid"] == old
    assert mig.learn(devices, "a", [[0, 1, 0, "nonsense\n", ""]]) == [
        "NVML calls a MIG device of GPU a 'nonsense\\n', which is no UUID"
    ]
    assert devices[0]["uuid"] == old


# --- IMEX channels


def test_channels_that_follow_each_other_are_one_entry(tmp_path: Path) -> None:
    made = look(build(tmp_path, Host(graphics=False, imex=(0, 1, 2, 9))))
    assert [(run["channel"], run["count"], run["node"]["minor"]) for run in made["imex"]] == [(0, 3, 0), (9, 1, 9)]
    assert made["imex"][1]["node"]["path"] == "/dev/nvidia-caps-imex-channels/channel9"


def test_a_channel_that_differs_is_an_entry_of_its_own(tmp_path: Path) -> None:
    host = build(tmp_path, Host(graphics=False, imex=(0, 1, 2, 3)))
    os.chown(host.path("/dev/nvidia-caps-imex-channels/channel2"), -1, 44)
    os.unlink(host.path("/dev/nvidia-caps-imex-channels/channel3"))
    host.path("/dev/nvidia-caps-imex-channels/channel3").symlink_to("channel0")
    made = look(host)
    assert [(run["channel"], run["count"], run["node"]["gid"]) for run in made["imex"]] == [(0, 2, 0), (2, 1, 44)]
    assert made["warnings"] == ["/dev/nvidia-caps-imex-channels/channel3 is left out: it is a link"]


def test_channels_are_bounded(tmp_path: Path) -> None:
    host = build(tmp_path, Host(graphics=False, imex=tuple(range(0, 2 * imex.ENTRIES_MAX + 2, 2))))
    made = look(host)
    assert len(made["imex"]) == imex.ENTRIES_MAX
    assert made["warnings"] == [
        "/dev/nvidia-caps-imex-channels: channels from 128 on are left out: too many gaps",
    ]


def test_thousands_of_channels_make_no_start_slower(tmp_path: Path) -> None:
    made = look(build(tmp_path, Host(graphics=False, imex=tuple(range(2048)))))
    assert [(run["channel"], run["count"]) for run in made["imex"]] == [(0, 2048)]
    assert sum(1 for entry in made["fingerprint"] if entry[1].startswith(imex.FOLDER)) == imex.RECORDED_MAX + 1


# --- gates


ALL_GATES = frozenset(gates.FIXED)


def test_the_gates_nodes(tmp_path: Path) -> None:
    made = look(build(tmp_path, Host(graphics=False, gates=ALL_GATES)))["gates"]
    assert {name: [node["path"] for node in gate["nodes"]] for name, gate in made.items()} == {
        "gdrcopy": ["/dev/gdrdrv"],
        "gds": [f"/dev/nvidia-fs{i}" for i in range(16)],
        "mofed": ["/dev/infiniband/rdma_cm", "/dev/infiniband/uverbs0", "/dev/infiniband/uverbs1"],
        "nvswitch": ["/dev/nvidia-nvswitchctl", "/dev/nvidia-nvswitch0", "/dev/nvidia-nvswitch1"],
    }
    assert [(item["path"], item["container_path"]) for item in made["gds"]["files"]] == [
        ("/run/udev", "/run/udev"),
        ("/etc/cufile.json", "/etc/cufile.json"),
    ]
    assert all(gate["files"] == [] for name, gate in made.items() if name != "gds")


def test_a_host_without_any(tmp_path: Path) -> None:
    made = look(build(tmp_path, Host(graphics=False)))
    assert (made["mig"], made["imex"], made["gates"], made["warnings"]) == ([], [], {}, [])


def test_files_of_a_gate_below_the_driver_root(tmp_path: Path) -> None:
    host = build(tmp_path, Host(driver_root="/drv", dev_root="/drv", graphics=False, gates=frozenset({"gds"})))
    made = look(host, driver_root="/drv")["gates"]["gds"]
    assert made["nodes"][0]["host_path"] == "/drv/dev/nvidia-fs0"
    assert [item["path"] for item in made["files"]] == ["/drv/run/udev", "/drv/etc/cufile.json"]
    assert [item["container_path"] for item in made["files"]] == ["/run/udev", "/etc/cufile.json"]


# --- the fingerprint


def make_node(path: Path, major: int, minor: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    os.mknod(path, 0o020666, os.makedev(major, minor))


@pytest.mark.parametrize(
    ("path", "numbers", "named"),
    [
        ("/dev/nvidia-caps-imex-channels/channel3", (506, 3), "/dev/nvidia-caps-imex-channels"),
        ("/dev/nvidia-nvswitch2", (503, 2), "/dev/nvidia-nvswitch2"),
        ("/dev/nvidia-fs16", (505, 16), "/dev/nvidia-fs16"),
        ("/dev/infiniband/uverbs7", (231, 199), "/dev/infiniband"),
    ],
)
def test_a_node_that_comes_is_seen(tmp_path: Path, path: str, numbers: tuple[int, int], named: str) -> None:
    host = build(tmp_path, Host(graphics=False, imex=(0, 1), gates=ALL_GATES))
    kept = look(host)["fingerprint"]
    fd = root.open_root(str(host.root))
    assert fingerprint.changed(fd, kept) is None
    make_node(host.path(path), *numbers)
    assert fingerprint.changed(fd, kept) == named
    os.close(fd)


@pytest.mark.parametrize(
    "path",
    ["/dev/nvidia-caps-imex-channels/channel0", "/dev/gdrdrv", "/dev/nvidia-fs0", "/dev/infiniband/uverbs0"],
)
def test_the_first_node_of_a_host_that_had_none_is_seen(tmp_path: Path, path: str) -> None:
    host = build(tmp_path, Host(graphics=False))
    kept = look(host)["fingerprint"]
    fd = root.open_root(str(host.root))
    assert fingerprint.changed(fd, kept) is None
    make_node(host.path(path), 240, 0)
    assert fingerprint.changed(fd, kept) is not None
    os.close(fd)


@pytest.mark.parametrize(
    "path",
    [
        f"/dev/nvidia-caps/nvidia-cap{mig_minors(1, 5)}",
        "/dev/nvidia-caps-imex-channels/channel1",
        "/dev/infiniband/uverbs1",
        "/dev/nvidia-nvswitch0",
    ],
)
def test_a_nodes_mode_is_seen(tmp_path: Path, path: str) -> None:
    host = build(tmp_path, replace(HOST, imex=(0, 1), gates=ALL_GATES))
    kept = look(host)["fingerprint"]
    fd = root.open_root(str(host.root))
    host.path(path).chmod(0o600)
    assert fingerprint.changed(fd, kept) == path
    os.close(fd)


def test_people_read_it(tmp_path: Path) -> None:
    made = look(build(tmp_path, replace(HOST, imex=(0, 1, 7), gates=frozenset({"gdrcopy"}))), nvml="auto")
    lines = overview.table(made).splitlines()
    assert "IMEX channels: 0 to 1, 7" in lines
    assert any(line.startswith("  0:1") and "gi 1 ci 0" in line and "MIG-00010100" in line for line in lines)
    assert any(line.startswith("  gdrcopy") and "/dev/gdrdrv" in line for line in lines)
