# SPDX-License-Identifier: Apache-2.0
"""`cdi check`: which file engines use, and what in it is not so any more (needs.md's cases C03 and C17)."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cdi import check, cli
from tests import simhost
from tests.cdihost import LAUNCHER, Host
from tests.needs import needs_root

TREE = Path(__file__).resolve().parents[2]

pytestmark = needs_root


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


FRESH = (
    "/var/run/cdi/nvidia.yaml: fresh, made by nvhook, used for nvidia.com/gpu=0, nvidia.com/gpu=1, "
    "nvidia.com/gpu=GPU-00000000-1111-2222-3333-444444444444 and 2 more\n"
)


def test_a_fresh_file(host: Host) -> None:
    assert host.check() == (0, FRESH)
    assert host.check() == (0, FRESH)


def test_a_file_of_another_driver_that_counts_or_does_not(tmp_path: Path) -> None:
    """Two files, the lower one stale; then only that."""
    host = Host(tmp_path, version="550.54.14")
    host.high.rename(tmp_path / "old.yaml")
    for library in host.simulated.libraries:
        host.simulated.path(library.path).unlink()
    simhost.build(tmp_path, simhost.Host(gpus=simhost.gpus(2), graphics=False, version="550.90.07"))
    host.generate(host.high)
    host.low.parent.mkdir(parents=True)
    (tmp_path / "old.yaml").rename(host.low)
    before = [path.read_bytes() for path in (host.low, host.high)]
    status, printed = host.check()
    assert status == 3
    lines = printed.splitlines()
    assert lines[0] == "/etc/cdi/nvidia.yaml: stale, made by nvhook, used for nothing"
    assert lines[1].endswith("and 2 more: /var/run/cdi/nvidia.yaml counts")
    assert lines[2] == "  made for driver 550.54.14; 550.90.07 is loaded"
    assert lines[3].startswith("  /usr/lib/x86_64-linux-gnu/") and lines[3].endswith("more are gone")
    assert lines[4] + "\n" == FRESH
    assert [path.read_bytes() for path in (host.low, host.high)] == before
    host.high.unlink()
    status, printed = host.check()
    assert status == 3
    assert printed.startswith("/etc/cdi/nvidia.yaml: stale, made by nvhook, used for nvidia.com/gpu=0")
    assert "made for driver 550.54.14; 550.90.07 is loaded" in printed


def reasons(host: Host) -> list[str]:
    """Why the file is stale."""
    status, printed = host.check()
    assert status == 3
    return [line.strip() for line in printed.splitlines()[1:]]


def test_gpus_that_came_and_went(host: Host) -> None:
    simhost.build(host.folder, simhost.Host(gpus=simhost.gpus(3), graphics=False))
    assert reasons(host) == ["GPU 2 (0000:20:00.0) is there now, and not in `all`"]
    for name in ("dev/nvidia1", "dev/nvidia2"):
        (host.folder / name).unlink()
    for bus in ("0000:18:00.0", "0000:20:00.0"):
        folder = host.folder / "proc/driver/nvidia/gpus" / bus
        (folder / "information").unlink()
        for one in folder.iterdir():
            one.unlink()
        folder.rmdir()
    assert reasons(host) == [
        "/dev/nvidia1 is missing",
        "device 1 is no GPU of this host now",
        "device GPU-00000001-1111-2222-3333-444444444444 is no GPU of this host now",
    ]


def test_nodes_that_changed_places_and_numbers(host: Host) -> None:
    spec = host.spec()
    edits = {device["name"]: device["containerEdits"]["deviceNodes"][0] for device in spec["devices"]}
    edits["0"]["path"], edits["1"]["path"] = "/dev/nvidia1", "/dev/nvidia0"
    uvm = next(node for node in spec["containerEdits"]["deviceNodes"] if node["path"] == "/dev/nvidia-uvm")
    uvm |= {"type": "c", "major": 511, "minor": 0}
    host.write(spec)
    assert reasons(host) == [
        "/dev/nvidia-uvm is device 508:0, and 511:0 in it",
        "device 0 is /dev/nvidia0 now, and /dev/nvidia1 in it",
        "device 1 is /dev/nvidia1 now, and /dev/nvidia0 in it",
    ]


def renumber(host: Host, name: str, major: int, minor: int) -> None:
    path = host.simulated.path(f"/dev/{name}")
    path.unlink()
    os.mknod(path, 0o020666, os.makedev(major, minor))


def test_nodes_of_an_earlier_load(host: Host) -> None:
    """Engines take the number from the host's node, and the container's leads to no driver, or to another."""
    renumber(host, "nvidia-uvm", 511, 0)
    renumber(host, "nvidia1", 195, 0)
    assert reasons(host) == [
        "/dev/nvidia-uvm is device 511:0, the kernel says 508:0",
        "/dev/nvidia1 is device 195:0, the kernel says 195:1",
        "device 1 is no GPU of this host now",
        f"device {simhost.gpus(2)[1].uuid} is no GPU of this host now",
    ]
    renumber(host, "nvidia-uvm", 508, 0)
    renumber(host, "nvidia1", 195, 1)
    assert host.check() == (0, FRESH)


def test_capability_nodes_and_channels_of_an_earlier_load(tmp_path: Path) -> None:
    cards = (simhost.divided(simhost.gpus(1)[0], (1, 0)),)
    host = Host(tmp_path, gpus=cards, imex=(0, 3))
    other = ["--mode", "imex", "--output", str(host.high.with_name("imex.yaml"))]
    assert cli.main(["generate", "--host-root", str(host.folder), *other]) == 0
    assert host.check()[0] == 0
    cap = next(path.name for path in host.simulated.path("/dev/nvidia-caps").iterdir() if len(path.name) > 11)
    minor = int(cap.removeprefix("nvidia-cap"))
    renumber(host, f"nvidia-caps/{cap}", 99, minor)
    renumber(host, "nvidia-caps-imex-channels/channel3", 99, 4)
    said = host.check()[1]
    assert f"  /dev/nvidia-caps/{cap} is device 99:{minor}, the kernel says 507:{minor}\n" in said
    assert "/channel3 is device 99:4, the kernel says " in said


def test_a_node_below_a_dev_root(tmp_path: Path) -> None:
    """Its path on the host says which node is meant no more than the dev root's own name does."""
    host = Host(tmp_path)
    spec = host.spec()
    for node in spec["containerEdits"]["deviceNodes"]:
        node["hostPath"] = f"/dev/nvidia7{node['path']}"
    host.write(spec)
    simhost.tree.Tree(host.folder).node("/dev/nvidia7/dev/nvidia-uvm", 511, 0, 0o666)
    assert "  /dev/nvidia7/dev/nvidia-uvm is device 511:0, the kernel says 508:0\n" in host.check()[1]


def test_uvm_that_came_later(host: Host) -> None:
    spec = host.spec()
    nodes = spec["containerEdits"]["deviceNodes"]
    spec["containerEdits"]["deviceNodes"] = [node for node in nodes if "uvm" not in node["path"]]
    host.write(spec)
    assert reasons(host) == ["/dev/nvidia-uvm is there now, and not in it: CUDA fails"]


def test_paths_that_are_gone(host: Host) -> None:
    host.simulated.path(LAUNCHER).unlink()
    assert reasons(host) == [f"{LAUNCHER} is gone"]
    host.simulated.library("libcuda.so.1").unlink()
    (first, *_) = reasons(host)
    assert first == f"/usr/lib/x86_64-linux-gnu/libcuda.so.580.159.04, {LAUNCHER} are gone"


def test_the_mig_layout(host: Host) -> None:
    folder = host.simulated.path("/proc/driver/nvidia/capabilities/gpu0/mig")
    for name, minor in (("gi1", 12), ("gi1/ci0", 13)):
        (folder / name).mkdir(parents=True)
        (folder / name / "access").write_text(f"DeviceFileMinor: {minor}\nDeviceFileMode: 292\n")
    spec = host.spec()
    caps = [{"path": f"/dev/nvidia-caps/nvidia-cap{minor}"} for minor in (12, 13)]
    host.simulated.path("/dev/nvidia-caps").mkdir(exist_ok=True)
    for minor in (12, 13):
        os.mknod(host.simulated.path(f"/dev/nvidia-caps/nvidia-cap{minor}"), 0o020666, os.makedev(507, minor))
    nodes = spec["devices"][0]["containerEdits"]["deviceNodes"]
    spec["devices"].append({"name": "0:0", "containerEdits": {"deviceNodes": [*nodes, *caps]}})
    host.write(spec)
    assert host.check()[0] == 0
    (folder / "gi1/ci0").rename(folder / "gi1/ci1")
    (folder / "gi1/ci1/access").write_text("DeviceFileMinor: 14\n")
    assert reasons(host) == [
        "the MIG layout is another one: /dev/nvidia-caps/nvidia-cap13 belongs to no instance now",
        "the MIG layout is another one: the instance of /dev/nvidia-caps/nvidia-cap14 is not in it",
    ]


def test_no_driver_and_no_file(host: Host) -> None:
    host.simulated.path("/proc/driver/nvidia/version").unlink()
    assert reasons(host) == ["no NVIDIA driver is loaded: there is no /proc/driver/nvidia/version"]
    host.high.unlink()
    status, printed = host.check()
    assert (status, printed) == (3, "no file in /etc/cdi or /var/run/cdi has NVIDIA's devices\n")


def foreign(spec: dict[str, Any], hook: str) -> dict[str, Any]:
    """The file as somebody else writes it, for devices `0` and `other`."""
    made = copy.deepcopy(spec)
    made["containerEdits"]["hooks"][0] |= {"path": hook, "args": [hook.rpartition("/")[2], "update-ldcache"]}
    made["devices"] = [made["devices"][0], {**made["devices"][0], "name": "other"}]
    return made


def test_another_file_of_the_same_names(host: Host) -> None:
    other = host.high.with_name("other.json")
    hook = "/usr/bin/nvidia-cdi-hook"
    host.simulated.path(hook).touch()
    other.write_text(json.dumps(foreign(host.spec(), hook)))
    status, printed = host.check()
    assert status == 3
    assert printed.splitlines()[-1] == (
        "nvidia.com/gpu=0: no engine finds it, for it is in each of /var/run/cdi/nvidia.yaml (made by nvhook) and "
        "/var/run/cdi/other.json (made by NVIDIA's toolkit); remove one"
    )
    other.write_text("{")
    assert host.check()[1].splitlines()[-1].startswith("/var/run/cdi/other.json: not read by any engine: line ")


def test_a_file_that_ordinary_users_cannot_read(host: Host) -> None:
    host.high.chmod(0o600)
    assert host.check()[0] == 0
    status, printed = host.check("--as-user")
    assert status == 3
    assert "ordinary users can't read it: its mode is 0600" in printed


def test_generated_under_a_strict_umask_into_a_new_folder(tmp_path: Path) -> None:
    old = os.umask(0o077)
    try:
        host = Host(tmp_path / "host")
    finally:
        os.umask(old)
    assert (host.high.stat().st_mode & 0o777, host.high.parent.stat().st_mode & 0o777) == (0o644, 0o755)


def test_json(host: Host) -> None:
    host.simulated.path(LAUNCHER).unlink()
    status, printed = host.check("--json")
    value = json.loads(printed)
    (file,) = value["files"]
    assert (status, file["made_by"], file["stale"]) == (3, "nvhook", [f"{LAUNCHER} is gone"])
    assert (len(file["used"]), file["lost"], value["problems"]) == (5, {}, [])


@pytest.mark.parametrize(
    ("spec", "made_by"),
    [
        ({"kind": "management.nvidia.com/gpu", "devices": []}, "NVIDIA's GPU operator"),
        ({"kind": "k8s.device-plugin.nvidia.com/gpu", "devices": []}, "NVIDIA's device plugin"),
        ({"kind": "nvidia.com/gpu", "devices": []}, "something else"),
    ],
)
def test_who_made_a_file(spec: dict[str, Any], made_by: str) -> None:
    assert check.maker(spec) == made_by


def test_what_it_loads_for_files_of_our_own(host: Host) -> None:
    """Its time is the interpreter's and that of these modules: 25 ms are the bound, on a machine at rest."""
    code = "import sys; sys.path[:0] = sys.argv.pop().split(':'); from cdi.__main__ import main; s = main()\n"
    code += "print(sorted(sys.modules)); sys.exit(s)"
    places = ":".join(dict.fromkeys([str(TREE), *(place for place in sys.path if "site-packages" in place)]))
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code, "check", "--host-root", str(host.folder), places],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    slow = {"re", "argparse", "json", "yaml", "typing", "pathlib", "dataclasses", "subprocess", "jsonschema"}
    assert [name for name in slow if f"'{name}'" in done.stdout] == []


@pytest.mark.parametrize("words", [["--nonsense"], ["--spec-dir"], ["--json=1"]])
def test_wrong_use(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check", *words]) == 2
    assert "usage: cdi check" in capsys.readouterr().err
