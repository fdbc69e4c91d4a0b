# SPDX-License-Identifier: Apache-2.0
"""Discovery grows with the number of GPUs and no faster: counted, since times are of a machine."""

from __future__ import annotations

import resource
import subprocess
import sys
import time
from pathlib import Path

from benchmarks import scale
from cdi import generate, reader, spec
from cdi.host import inventory
from cdi.host.store import Options
from tests.needs import needs_root
from tests.simhost import Fault, Host, Nvml, build, divided, gpus

TREE = Path(__file__).resolve().parents[2]
HOOK = "/usr/bin/nvhook-create-container"


def test_one_session_and_the_same_calls_for_each_gpu(tmp_path: Path) -> None:
    counts = (1, 2, 4, 8, 16)
    calls, facts = {}, {}
    for count in counts:
        host = build(tmp_path / str(count), Host(gpus=gpus(count), graphics=False))
        found = inventory.gather(Options(str(host.root), nvml="health"))
        calls[count] = len(host.nvml_calls())
        facts[count] = len(found["fingerprint"])
        assert sum(call.name.startswith("nvmlInit") for call in host.nvml_calls()) == 1
        assert len({call.pid for call in host.nvml_calls()}) == 1
    for grown in (calls, facts):
        each = grown[2] - grown[1]
        assert {count: grown[1] + each * (count - 1) for count in counts} == grown
    # A node's numbers: one more thing that a start has to look at.
    assert facts[2] - facts[1] <= 2


@needs_root
def test_mig_devices_grow_in_line_too(tmp_path: Path) -> None:
    """16 GPUs of 7 MIG devices each: 112 devices, by two names each."""
    calls, names = {}, {}
    for count in (1, 2, 16):
        cards = tuple(divided(gpu, *scale.INSTANCES) for gpu in gpus(count))
        host = build(tmp_path / str(count), Host(gpus=cards, graphics=False))
        found = inventory.gather(Options(str(host.root), nvml="health"))
        assert sum(call.name.startswith("nvmlInit") for call in host.nvml_calls()) == 1
        calls[count] = len(host.nvml_calls())
        names[count] = len(spec.device_names(generate.make(found, HOOK)))
    assert calls[16] == calls[1] + 15 * (calls[2] - calls[1])
    assert names == {1: 15, 2: 29, 16: 225}


@needs_root
def test_a_slow_start_of_nvml_is_paid_once(tmp_path: Path) -> None:
    """8 GPUs, an init of 2 s, 50 ms for each GPU; and a start that finds the kept inventory asks nothing."""
    slow = (Fault("nvmlInit", delay_ms=2000), Fault("nvmlDeviceGetHandle", delay_ms=50))
    host = build(tmp_path / "host", Host(gpus=gpus(8), graphics=False, nvml=Nvml(faults=slow)))
    words = [sys.executable, "-m", "hook", "cdi", "generate", "--host-root", str(host.root), "--hook-path", HOOK]
    done = subprocess.run(words, cwd=TREE, capture_output=True, text=True, check=True)
    calls = [call.name for call in host.nvml_calls()]
    assert sum(name.startswith("nvmlInit") for name in calls) == 1
    assert sum(name.startswith("nvmlDeviceGetHandle") for name in calls) == 8
    assert len(spec.device_names(reader.parse(done.stdout))) == 17
    host.clear_nvml_calls()
    found, _ = inventory.current(Options(str(host.root)))
    assert len(found["gpus"]) == 8 and host.nvml_calls() == ()


@needs_root
def test_a_huge_limit_of_descriptors_costs_nothing(tmp_path: Path) -> None:
    """Container engines run with 2^30: what closes, or makes room for, each possible one takes a minute then."""
    host = build(tmp_path / "host", Host(gpus=gpus(2), graphics=False))
    words = [sys.executable, "-m", "hook", "cdi", "generate", "--host-root", str(host.root), "--hook-path", HOOK]
    # As far as this machine lets us go.
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]

    def spent(limit: int) -> float:
        def set_limit() -> None:
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))

        began = time.monotonic()
        subprocess.run(words, cwd=TREE, capture_output=True, check=True, preexec_fn=set_limit, timeout=30)
        return time.monotonic() - began

    few, many = [], []
    # By turns, and again while a busy machine makes one look dearer: what each descriptor costs is always there.
    for _ in range(10):
        few.append(spent(1024))
        many.append(spent(most))
        if len(few) >= 2 and min(many) < 1.5 * min(few) + 0.3:
            break
    assert min(many) < 1.5 * min(few) + 0.3


def test_the_benchmark_runs(tmp_path: Path) -> None:
    cells = scale.row(tmp_path / "host", 2, scale.INSTANCES, (), 1)
    assert len(cells) == len(scale.COLUMNS) and cells[:2] == ["2", "14"] and cells[6] == "1"
