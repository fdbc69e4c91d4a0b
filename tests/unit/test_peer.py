# SPDX-License-Identifier: Apache-2.0
"""Copies between two devices: `nvhook verify --peer` and `cuda-check --peer`, against a libcuda without a GPU."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from hook import peer, verify
from ldcache.errors import NvhookError
from tests.unit.test_verify import UUID, compile_library, run_command, run_program

ELEMENTS = 1 << 24
# nvidia-smi's, with its underlined heading, its blanks, a NIC, and what it explains below.
TOPOLOGY = (
    "\t\x1b[4mGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m\n"
    "GPU0\t X \tNV18\tSYS\tPIX\t0-51\t0\t\tN/A\n"
    "GPU1\tNV18\t X \tPHB\tSYS\t0-51\t0\t\tN/A\n"
    "GPU2\tSYS\tPHB\t X \tSYS\t52-103\t1\t\tN/A\n"
    "NIC0\tPIX\tSYS\tSYS\t X \t\t\t\t\n"
    "\nLegend:\n\n  X    = Self\n  NV#  = Connection traversing a bonded set of # NVLinks\n"
)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compile_library(tmp_path_factory.mktemp("fakecuda") / "libcuda.so.1")


@pytest.fixture(autouse=True)
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An nvidia-smi of three GPUs that the kernel counts the other way round, first on PATH."""
    listed = "".join(f"GPU {i}: Fake GPU (UUID: {UUID.format(2 - i)})\n" for i in range(3))
    program = tmp_path / "bin/nvidia-smi"
    program.parent.mkdir()
    text = f"""#!/bin/sh
        if [ "$1" = -L ]; then cat <<'END'\n{listed}END
        else cat <<'END'\n{TOPOLOGY}END
        fi"""
    program.write_text(text)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("FAKECUDA_DEVICES", "3")
    return program


@pytest.fixture(params=["module", "program"])
def copies(request: pytest.FixtureRequest, library: Path) -> Any:
    """Copies between devices 2 and 0 in either form, and gives `peers` of what `--json` prints."""

    def module() -> Any:
        return verify.verify(["2", "0"], str(library), copies=True).to_json()["peers"]

    def program() -> Any:
        done = run_program("--json", "--library", str(library), "--peer", "2", "0")
        peers = json.loads(done.stdout)["peers"]
        assert done.returncode == (1 if any(item["failures"] for item in peers) else 0), done.stderr
        return peers

    return module if request.param == "module" else program


def failures(peers: Any) -> list[tuple[Any, ...]]:
    return [
        (item["step"], item["device"], item["call"], item["code"], item["text"])
        for copied in peers
        for item in copied["failures"]
    ]


def test_both_ways(copies: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKECUDA_LOG", str(tmp_path / "log"))
    peers = copies()
    assert [(item["from"], item["to"]) for item in peers] == [(2, 0), (0, 2)]
    assert all(item["direct"] and item["elements"] == ELEMENTS and not item["failures"] for item in peers)
    assert all(1e6 < item["bandwidth"] < 1e13 for item in peers)
    calls = [line.split()[0] for line in (tmp_path / "log").read_text().splitlines()]
    # Whatever was taken is given back, and every copy is one between devices.
    assert calls.count("cuMemAlloc_v2") == calls.count("cuMemFree_v2")
    assert calls.count("cuDevicePrimaryCtxRetain") == calls.count("cuDevicePrimaryCtxRelease_v2")
    assert calls.count("cuCtxEnablePeerAccess") == calls.count("cuCtxDisablePeerAccess") == 2
    assert calls.count("cuMemcpyPeer") == 2 * 21


def test_by_way_of_the_host(copies: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKECUDA_PEER", "0")
    peers = copies()
    assert [item["direct"] for item in peers] == [False, False]
    assert failures(peers) == [] and all(item["elements"] == ELEMENTS for item in peers)


def test_access_that_is_on_already(copies: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKECUDA_FAIL", "cuCtxEnablePeerAccess=704")
    assert failures(copies()) == []


@pytest.mark.parametrize("index", [0, 77, ELEMENTS - 1])
def test_one_wrong_element(copies: Any, monkeypatch: pytest.MonkeyPatch, index: int) -> None:
    monkeypatch.setenv("FAKECUDA_PEER_WRONG", str(index))
    peers = copies()
    assert [item["elements"] for item in peers] == [ELEMENTS - 1] * 2
    for (step, device, call, code, text), target in zip(failures(peers), (0, 2), strict=True):
        assert (step, device, call, code) == ("peer", target, "cuMemcpyPeer", 0)
        assert text.startswith(f"1 of {ELEMENTS} elements are wrong; the first, {index}, is ")


def test_a_copy_that_does_nothing(copies: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """No element is right by having lain there: neither from the start nor from the copy the other way."""
    monkeypatch.setenv("FAKECUDA_PEER_LOST", "1")
    assert [item["elements"] for item in copies()] == [0, 0]


@pytest.mark.parametrize(
    ("call", "device"),
    [("cuDeviceCanAccessPeer", 0), ("cuCtxEnablePeerAccess", 0), ("cuMemcpyPeer", 0), ("cuCtxDisablePeerAccess", 0)],
)
def test_a_failing_call(copies: Any, monkeypatch: pytest.MonkeyPatch, call: str, device: int) -> None:
    """Named with the device whose context was current; the other direction is tried all the same."""
    monkeypatch.setenv("FAKECUDA_FAIL", f"{call}@{device}=700")
    peers = copies()
    assert failures(peers) == [("peer", device, call, 700, "illegal address")]
    assert peers[1]["elements"] == ELEMENTS


@pytest.mark.parametrize(
    "words", [["--peer", "0"], ["--peer", "0", "0"], ["--peer", "0", "x"], ["--peer", "0", "--json"]]
)
def test_usage_of_the_program(words: list[str]) -> None:
    done = run_program(*words)
    assert (done.returncode, done.stdout) == (2, "")


def test_a_device_that_is_not_there(library: Path) -> None:
    done = run_program("--library", str(library), "--peer", "0", "3")
    assert done.returncode == 1
    assert "device 3, step peer: cuDeviceGet: CUDA_ERROR_INVALID_DEVICE (101)" in done.stderr


def test_one_device_twice(library: Path) -> None:
    with pytest.raises(NvhookError, match="--peer names one device twice: it is 1"):
        verify.verify(["1", UUID.format(1)], str(library), copies=True)


# The command


def test_command(tree: Path, library: Path) -> None:
    """By index and by UUID. The link is that of nvidia-smi's indexes of the same UUIDs: there 0 is its GPU 2."""
    done = run_command(tree, "--library", str(library), "--peer", "1", UUID.format(0))
    assert done.returncode == 0, done.stdout
    kernels = [line for line in done.stdout.splitlines() if "vector kernel" in line]
    first, second = [line for line in done.stdout.splitlines() if " to device " in line]
    assert len(kernels) == 2
    assert first.startswith(f"device 1 to device 0: {ELEMENTS} elements right, ")
    assert first.endswith(" GB/s, directly; link PHB")
    assert second.startswith("device 0 to device 1: ")


def test_command_with_a_wrong_copy(tree: Path, library: Path) -> None:
    done = run_command(tree, "--library", str(library), "--peer", "0", "1", FAKECUDA_PEER_WRONG="5")
    assert done.returncode == 1
    assert "nvhook: error: device 1, step peer: cuMemcpyPeer: 1 of " in done.stdout


def test_command_json_without_nvidia_smi(tree: Path, library: Path, smi: Path) -> None:
    smi.write_text("#!/bin/sh\nexit 9\n")
    done = run_command(tree, "--json", "--library", str(library), "--peer", "0", "1")
    made = json.loads(done.stdout.removeprefix("before\n").removesuffix("after\n"))
    assert [item["link"] for item in made["peers"]] == [None, None]


def test_devices_and_peers_exclude_each_other(tree: Path) -> None:
    done = run_command(tree, "--device", "0", "--peer", "0", "1")
    assert done.returncode == 2 and "not allowed with argument" in done.stdout


def test_topology() -> None:
    assert peer.topology(TOPOLOGY) == {
        (0, 1): "NV18",
        (0, 2): "SYS",
        (1, 0): "NV18",
        (1, 2): "PHB",
        (2, 0): "SYS",
        (2, 1): "PHB",
    }
    assert peer.topology("\tGPU0\tCPU Affinity\nGPU0\t X \t0-15\n") == {}
    assert peer.topology("Failed to initialize NVML: Unknown Error\n") == {}
    assert peer.link(UUID.format(0), UUID.format(1)) == "PHB"
    assert peer.link(UUID.format(0), UUID.format(7)) is None
