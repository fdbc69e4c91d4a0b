# SPDX-License-Identifier: Apache-2.0
"""tests/device/several_gpus.py on simulated hosts: all is right there, and whatever is made wrong is found."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import simhost
from tests.containers import Hook
from tests.device import paces, renewals, several_gpus
from tests.device.appliers import CDI_ALONE, PRESTART, RUNTIME, Appliers, Way
from tests.device.inside import judge
from tests.device.machines import Machine
from tests.needs import needs_program
from tests.simhost import SimulatedHost
from tests.system.prestart import proc_hook

pytestmark = [needs_program("runc"), needs_program("unshare")]

TWO = simhost.gpus(2)


@pytest.fixture
def two(tmp_path: Path) -> SimulatedHost:
    """A host of two GPUs, to be spoilt."""
    return simhost.build(tmp_path / "two", simhost.Host(gpus=TWO))


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    made = tmp_path / "examined"
    made.mkdir()
    yield made
    shutil.rmtree(made)


# All is right


def test_two(capsys: pytest.CaptureFixture[str]) -> None:
    assert several_gpus.main(["--simulated", "2", "--rounds", "0", "--single", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "driver 580.159.04, 2 GPUs: NVIDIA H200 (simulated)"
    assert lines[-1] == "all of it is right"
    for way in ("prestart", "runtime", "CDI and hook", "CDI alone"):
        rows = [line for line in lines if line.startswith(f"{way:14}")]
        # By index, UUID, for two ways a beginning; all; two in either order, and mixed; two at once, and the other way.
        assert len(rows) == (11 if way in ("prestart", "runtime") else 10)
        masked = way in ("prestart", "CDI and hook")
        assert {tuple(row[60:].split()) for row in rows} == {("ok", "ok", "ok", "ok" if masked else "-")}
    assert any("link NV18, there and back " in line for line in lines)


@pytest.mark.long
def test_eight(capsys: pytest.CaptureFixture[str]) -> None:
    """And a container with one GPU gets as much as on a host of two."""
    assert several_gpus.main(["--simulated", "8", "--rounds", "0", "--single", "2"]) == 0
    text = capsys.readouterr().out
    assert "(4, 19, 40) for one GPU, (11, 19, 47) for all" in text
    assert "verify --peer 6 7:" in text and "verify --peer 0 7:" in text


def test_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert several_gpus.main(["--simulated", "1", "--rounds", "1", "--way", "runtime"]) == 0
    text = capsys.readouterr().out
    assert "left out, for they need two GPUs" in text
    assert "verify --device 0:" in text and "--peer" not in text
    assert "\nstart, runtime  " in text and "not judged: " in text


def test_minors_against_the_order_of_the_bus(tmp_path: Path, folder: Path) -> None:
    """The number of a node is no index."""
    swapped = tuple(dataclasses.replace(gpu, minor=5 - gpu.minor) for gpu in TWO)
    host = simhost.build(tmp_path / "host", simhost.Host(gpus=swapped))
    assert several_gpus.examine(Machine(host), folder, single=1, ways=[CDI_ALONE]) == []


# Something is wrong


class Deceived(Machine):
    """A machine whose driver has each minor's GPU behind the other's, and tells so nobody but containers."""

    def __init__(self, host: SimulatedHost, truth: SimulatedHost) -> None:
        super().__init__(host)
        self.truth = truth

    @property
    def hooks(self) -> list[Hook]:
        return [proc_hook(f"{self.truth.root}/proc/driver/nvidia")]


def test_the_wrong_gpu(tmp_path: Path, folder: Path, two: SimulatedHost, capsys: pytest.CaptureFixture[str]) -> None:
    swapped = tuple(dataclasses.replace(gpu, minor=1 - gpu.minor) for gpu in TWO)
    truth = simhost.build(tmp_path / "truth", simhost.Host(gpus=swapped))
    misses = several_gpus.examine(Deceived(two, truth), folder, single=1, ways=[RUNTIME])
    (row,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("runtime       0   ")]
    assert row.split()[2:] == ["WRONG", "WRONG", "ok", "-"]
    assert any(TWO[1].uuid in miss and miss.startswith("runtime, 0: CUDA: it shows") for miss in misses)


def test_swapped_nodes(two: SimulatedHost) -> None:
    """Nothing is even generated, and the exit status says so."""
    numbers = {name: two.path(f"/dev/{name}").stat().st_rdev for name in ("nvidia0", "nvidia1")}
    for name, number in zip(numbers, reversed(numbers.values()), strict=True):
        two.path(f"/dev/{name}").unlink()
        os.mknod(two.path(f"/dev/{name}"), stat.S_IFCHR | 0o666, number)
    with pytest.raises(SystemExit, match="cdi generate failed:\n(.*\n)*.*no GPU to generate a spec for"):
        several_gpus.examine(Machine(two), two.root.parent / "examined")


def test_open_rules_and_a_wrong_copy(folder: Path, two: SimulatedHost, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKECUDA_PEER_WRONG", "9")
    rules = [{"allow": True, "access": "rwm"}]
    misses = several_gpus.examine(Machine(two), folder, single=1, rules=rules, ways=[CDI_ALONE])
    assert "CDI alone, 0: nodes: '1 made Operation not permitted' was to be" in misses
    others = [miss for miss in misses if not miss.startswith("CDI alone, ")]
    assert len(others) == 1 and others[0].startswith("verify --peer 0 1: ")


def test_nvml_counts_otherwise(folder: Path, two: SimulatedHost) -> None:
    conf = two.path(two.library_folder) / "simulated-nvml/nvml.conf"
    first, second = (gpu.uuid for gpu in TWO)
    text = conf.read_text().replace(first, "FIRST").replace(second, first).replace("FIRST", second)
    conf.write_text(text)
    misses = several_gpus.examine(Machine(two), folder, single=1, ways=[CDI_ALONE])
    assert any(miss.startswith("indexes are NVML's: nvhook has (0, ") for miss in misses)
    assert any(miss.startswith("names in the file for CDI alone: '0' leads to the minors {0}") for miss in misses)


# What a container printed


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Machine:
    return Machine(simhost.build(tmp_path_factory.mktemp("host"), simhost.Host(gpus=TWO)))


def printed(machine: Machine, **others: list[str]) -> str:
    """What a container with the first GPU has to print, less and more."""
    gpu = machine.gpus[0]
    report = {"failures": [], "devices": [{"uuid": gpu.uuid, "failures": []}]}
    lines = {
        "smi": [f"GPU 0: {gpu.name} (UUID: {gpu.uuid})"],
        "cuda": [json.dumps(report)],
        "node": ["0 chosen No such device or address", "1 there absent", "1 made Operation not permitted"],
        "gpu": [gpu.bus_id],
        "params": ["ModifyDeviceFiles: 0"],
    }
    return "".join(f"{name} {line}\n" for name, value in (lines | others).items() for line in value)


def judged(machine: Machine, text: str, status: int = 0, masks: bool = True) -> dict[str, str]:
    way = Way(PRESTART, lambda devices: {}, masks=masks, env=True)
    done: subprocess.CompletedProcess[str] = subprocess.CompletedProcess([], status, text, "no such GPU")
    row = judge(machine, way, "0", machine.gpus[:1], done)
    wrong = {name for name, verdict in row.verdicts.items() if verdict != "ok"}
    assert bool(row.misses) == (wrong != set())
    return row.verdicts


def test_a_container_as_it_has_to_be(machine: Machine) -> None:
    assert judged(machine, printed(machine)) == dict.fromkeys(("nvidia-smi", "CUDA", "nodes", "proc"), "ok")


@pytest.mark.parametrize(
    ("column", "others"),
    [
        ("nvidia-smi", {"smi": []}),
        ("nvidia-smi", {"smi": [f"GPU {i}: x (UUID: {gpu.uuid})" for i, gpu in enumerate(TWO)]}),
        ("nvidia-smi", {"smi": [f"GPU 0: x (UUID: {TWO[1].uuid})"]}),
        ("CUDA", {"cuda": ["Segmentation fault"]}),
        ("CUDA", {"failed": ["cuda-check"]}),
        ("nodes", {"node": ["0 chosen No such device or address", "1 there absent"]}),
        ("nodes", {"node": ["1 there absent", "1 made Operation not permitted"]}),
        ("nodes", {"node": ["0 chosen opened", "1 there absent", "1 made opened"]}),
        ("proc", {"gpu": [gpu.bus_id for gpu in TWO]}),
        ("proc", {"params": ["ModifyDeviceFiles: 1"]}),
    ],
)
def test_what_is_wrong_in_a_container(machine: Machine, column: str, others: dict[str, list[str]]) -> None:
    verdicts = judged(machine, printed(machine, **others))
    assert [name for name, verdict in verdicts.items() if verdict != "ok"] == [column]


@pytest.mark.parametrize("uuids", [[], [TWO[1].uuid], [TWO[0].uuid, TWO[1].uuid]])
def test_other_devices_of_cuda(machine: Machine, uuids: list[str]) -> None:
    report: dict[str, Any] = {"failures": [], "devices": [{"uuid": uuid, "failures": []} for uuid in uuids]}
    assert judged(machine, printed(machine, cuda=[json.dumps(report)]))["CUDA"] == "WRONG"


def test_a_container_that_failed(machine: Machine) -> None:
    assert set(judged(machine, printed(machine), status=1).values()) == {"-"}
    assert set(judged(machine, "").values()) == {"-"}


def test_a_mask_where_none_was_to_be(machine: Machine) -> None:
    assert judged(machine, printed(machine), masks=False)["proc"] == "WRONG"


# Counting and timing


def test_renewals_are_counted(machine: Machine) -> None:
    machine.nvhook("inventory")
    with renewals.renewals(machine) as none:
        machine.nvhook("inventory")
    with renewals.renewals(machine) as two:
        machine.nvhook("inventory", "--refresh")
        machine.nvhook("inventory", "--refresh")
    assert (none[renewals.FILE], two[renewals.FILE]) == (0, 2)


@pytest.mark.parametrize("crash", [False, True])
def test_sessions_are_counted(machine: Machine, crash: bool) -> None:
    """As the simulated NVML counts them; one that dies is followed by another."""
    assert machine.simulated
    fault = simhost.Fault("nvmlDeviceGetUUID", gpu=0, action="crash")
    machine.simulated.set_nvml(simhost.Nvml(faults=(fault,) if crash else ()))
    machine.nvhook("inventory", "--refresh")
    (machine.path(renewals.FOLDER) / "nvml.json").unlink(missing_ok=True)
    machine.simulated.clear_nvml_calls()
    counted = renewals.sessions(machine)
    called = [call.name for call in machine.simulated.nvml_calls() if call.name.startswith("nvmlInit")]
    machine.simulated.set_nvml(simhost.Nvml())
    assert counted == len(called) == (2 if crash else 1)


def test_starts_that_grow_with_the_host() -> None:
    times = {("start, prestart", which): [ms] * paces.ROUNDS_TO_JUDGE for which, ms in (("one", 13.0), ("alone", 10.0))}
    (miss,) = paces.misses(times)
    assert miss == "start, prestart, with one GPU takes 1.30 times as long as on a host of one"
    assert paces.misses({key: values[1:] for key, values in times.items()}) == []
    assert paces.misses(times | {("start, prestart", "alone"): [12.0] * paces.ROUNDS_TO_JUDGE}) == []
    assert paces.misses(times | {("start, prestart", "one"): [10.0, *times["start, prestart", "one"]]}) == []
    times["start, prestart", "all"] = [26.0] * paces.ROUNDS_TO_JUDGE
    assert paces.table(times)[1].split()[-5:] == ["10.00", "13.00", "26.00", "2.00", "1.30"]


def test_ways_by_name(machine: Machine, tmp_path: Path) -> None:
    assert [way.name for way in Appliers(machine, tmp_path, [RUNTIME, PRESTART]).ways] == [PRESTART, RUNTIME]
