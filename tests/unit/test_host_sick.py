# SPDX-License-Identifier: Apache-2.0
"""Part of the hardware is sick: the healthy GPUs are offered under their own indexes, the others named, in time."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cdi import cli, reader, spec
from cdi.host import inventory
from cdi.host.store import Options
from hook import selection
from hook.request import Request
from ldcache.errors import NvhookError
from tests.needs import needs_root
from tests.simhost import Fault, Gpu, Host, Nvml, SimulatedHost, build, gpus

HOOK = "/usr/bin/nvhook-create-container"
CARDS = gpus(8)
SICK = 3
TIMEOUT = 2.0

HANDLE, UUID = "nvmlDeviceGetHandleByPciBusId", "nvmlDeviceGetUUID"


def with_fault(tmp_path: Path, *faults: Fault, **changes: Any) -> SimulatedHost:
    """Eight GPUs, whose UUIDs the kernel knows, so that only asking shows that one is sick."""
    cards = tuple(replace(card, **changes) if card.minor == SICK else card for card in CARDS)
    return build(tmp_path / "host", Host(gpus=cards, graphics=False, nvml=Nvml(faults=faults)))


def generate(host: SimulatedHost, output: Path, *words: str) -> int:
    root = ["--host-root", str(host.root), "--hook-path", HOOK, "--nvml-timeout", str(TIMEOUT)]
    return cli.main(["generate", *root, "--output", str(output), *words])


def names(output: Path) -> list[str]:
    """The devices that have a number or are all, each with its GPU nodes."""
    return [name for name in spec.device_names(reader.parse(output.read_text())) if not name.startswith("GPU-")]


SICKNESSES = [
    pytest.param((Fault(HANDLE, gpu=SICK, result=15),), {}, "NVML says: GPU is lost", id="lost"),
    pytest.param((Fault(UUID, gpu=SICK, result=15),), {}, "NVML says: GPU is lost", id="lost-later"),
    pytest.param((Fault(HANDLE, gpu=SICK, result=16),), {}, "NVML says: ", id="reset-required"),
    pytest.param((Fault(HANDLE, gpu=SICK, result=999),), {}, "NVML says: Unknown Error", id="unknown"),
    pytest.param(
        (Fault(HANDLE, gpu=SICK, action="hang"),), {}, f"NVML did not answer within {TIMEOUT:g} s", id="hanging"
    ),
    pytest.param((Fault(HANDLE, gpu=SICK, action="crash"),), {}, "NVML died of signal 11", id="crashing"),
    pytest.param((), {"powered": False}, "the driver can't power it up", id="off-the-bus"),
]


@needs_root
@pytest.mark.parametrize(("faults", "changes", "reason"), SICKNESSES)
def test_the_healthy_are_offered(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    faults: tuple[Fault, ...],
    changes: dict[str, Any],
    reason: str,
) -> None:
    host = with_fault(tmp_path, *faults, **changes)
    output = tmp_path / "cdi/nvidia.yaml"
    began = time.monotonic()
    assert generate(host, output) == 0
    # One deadline for the GPU that hangs, and the interpreters that ask; not one for each of eight.
    assert time.monotonic() - began < 6 * TIMEOUT
    assert names(output) == ["0", "1", "2", "4", "5", "6", "7", "all"]
    made = reader.parse(output.read_text())
    devices = {device["name"]: device["containerEdits"]["deviceNodes"] for device in made["devices"]}
    assert devices["4"][0]["path"] == "/dev/nvidia4" and CARDS[4].uuid in devices
    assert f"/dev/nvidia{SICK}" not in json.dumps(made)
    said = [line for line in capsys.readouterr().err.splitlines() if CARDS[SICK].bus_id in line]
    assert len(said) == 1 and f"GPU {CARDS[SICK].bus_id} is left out: {reason}" in said[0]
    # What is kept says the same to the next start.
    kept = json.loads(host.path("/run/nvhook/inventory.json").read_text())
    assert [gpu["index"] for gpu in kept["gpus"]] == [0, 1, 2, 4, 5, 6, 7]
    assert any(item[0] == "until" for item in kept["fingerprint"])
    with pytest.raises(NvhookError, match=f"no GPU '3' on this host.*left out: {CARDS[SICK].bus_id}"):
        selection.select(kept, Request(("3",), ("utility",)))
    # All of it is an error for who asks that, and the file stays as it was.
    before = output.read_bytes()
    assert generate(host, output, "--strict") == 1
    assert output.read_bytes() == before
    assert f"GPU {CARDS[SICK].bus_id} is left out" in capsys.readouterr().err.splitlines()[-2]


@needs_root
def test_an_excluded_gpu_has_no_index(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As NVML, which does not count it: the others' indexes are those that nvidia-smi shows."""
    host = with_fault(tmp_path, excluded=True)
    output = tmp_path / "cdi/nvidia.yaml"
    assert generate(host, output) == 0
    assert names(output) == [*map(str, range(7)), "all"]
    assert f"GPU {CARDS[SICK].bus_id} is left out: excluded by the driver's configuration" in capsys.readouterr().err


@needs_root
def test_a_gpu_that_hung_is_left_alone_and_still_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    host = with_fault(tmp_path, Fault(HANDLE, gpu=SICK, action="hang"))
    output = tmp_path / "cdi/nvidia.yaml"
    assert generate(host, output) == 0
    capsys.readouterr()
    assert SICK in {call.gpu for call in host.nvml_calls()}
    host.clear_nvml_calls()
    assert generate(host, output) == 0
    assert {call.gpu for call in host.nvml_calls()} == {-1, *range(8)} - {SICK}
    assert f"GPU {CARDS[SICK].bus_id} is left out: NVML did not answer" in capsys.readouterr().err
    assert names(output) == ["0", "1", "2", "4", "5", "6", "7", "all"]


@needs_root
def test_without_persistence_each_gpu_takes_its_time(tmp_path: Path) -> None:
    """Longer in all than one may take; nobody is called sick for it, and NVML is started once."""
    host = with_fault(tmp_path, Fault(HANDLE, delay_ms=500))
    output = tmp_path / "cdi/nvidia.yaml"
    began = time.monotonic()
    assert generate(host, output, "--strict") == 0
    spent = time.monotonic() - began
    assert names(output) == [*map(str, range(8)), "all"]
    assert TIMEOUT < spent < 8 * 0.5 + 10
    assert [call.name for call in host.nvml_calls()].count("nvmlInitWithFlags") == 1


def test_nvml_that_hangs_before_any_gpu_blames_none(tmp_path: Path) -> None:
    """What the kernel tells is enough to offer them."""
    host = with_fault(tmp_path, Fault("nvmlInit", action="hang"))
    found = inventory.gather(Options(str(host.root), nvml="health", nvml_timeout=TIMEOUT))
    assert [gpu["index"] for gpu in found["gpus"]] == list(range(8)) and found["faults"] == []
    assert f"NVML did not answer within {TIMEOUT:g} s when asked about the driver" in found["warnings"]


def test_a_driver_that_hangs_altogether_costs_two_deadlines(tmp_path: Path) -> None:
    """And not one for each GPU. Those that were not asked about are offered: nothing is known against them."""
    host = with_fault(tmp_path, Fault(HANDLE, action="hang"))
    began = time.monotonic()
    found = inventory.gather(Options(str(host.root), nvml="health", nvml_timeout=TIMEOUT))
    assert time.monotonic() - began < 6 * TIMEOUT
    assert [fault["bus_id"] for fault in found["faults"]] == [card.bus_id for card in CARDS[:2]]
    assert [gpu["index"] for gpu in found["gpus"]] == list(range(2, 8))
    rest = ", ".join(card.bus_id for card in CARDS[2:])
    assert f"NVML is not asked about {rest}: it hung on 2 GPUs before them" in found["warnings"]


def test_all_sick(tmp_path: Path) -> None:
    host = with_fault(tmp_path, Fault(HANDLE, result=15))
    found = inventory.gather(Options(str(host.root), nvml="health", nvml_timeout=TIMEOUT))
    assert found["gpus"] == [] and [fault["bus_id"] for fault in found["faults"]] == [card.bus_id for card in CARDS]
    with pytest.raises(
        NvhookError, match=r"none of the driver's GPUs can be used: 0000:10:00\.0: NVML says: GPU is lost"
    ):
        selection.select(found, Request(None, ("utility",)))


def test_of_two_faults_each_is_named(tmp_path: Path) -> None:
    cards = (*CARDS[:2], Gpu("0000:05:00.0", 2, "GPU-0000000a-0000-0000-0000-000000000000", powered=False))
    faults = (Fault(HANDLE, gpu=2, result=15),)
    host = build(tmp_path, Host(gpus=cards, graphics=False, nvml=Nvml(faults=faults)))
    found = inventory.gather(Options(str(host.root), nvml="health", nvml_timeout=TIMEOUT))
    assert [(gpu["index"], gpu["bus_id"]) for gpu in found["gpus"]] == [(1, CARDS[0].bus_id)]
    assert [fault["bus_id"] for fault in found["faults"]] == ["0000:05:00.0", CARDS[1].bus_id]
