# SPDX-License-Identifier: Apache-2.0
"""cdi.host.driver and cdi.host.gpus: what the kernel tells of the module and its GPUs."""

from __future__ import annotations

from pathlib import Path

import pytest

from cdi.host import driver, gpus, inventory
from cdi.host.store import Options
from ldcache.errors import NvhookError
from tests.hosts import RELEASE, look
from tests.simhost import Gpu, Host, build
from tests.simhost import gpus as some_gpus


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build  (builder@)\n",
            ("580.159.04", "open", "x86_64"),
        ),
        (
            "NVRM version: NVIDIA UNIX x86_64 Kernel Module  390.157  Wed Oct 12 09:19:07 UTC 2022\n",
            ("390.157", "proprietary", "x86_64"),
        ),
        (
            "NVRM version: NVIDIA UNIX aarch64 Kernel Module  570.124.06  Tue Feb 25 00:43:07 UTC 2025\n",
            ("570.124.06", "proprietary", "aarch64"),
        ),
        ("NVRM version: something else altogether\n", (None, None, None)),
        ("", (None, None, None)),
    ],
)
def test_version_text(text: str, expected: tuple[str | None, str | None, str | None]) -> None:
    assert driver.parse_version(text) == expected


def test_an_unknown_wording_falls_back_to_the_module(tmp_path: Path) -> None:
    host = build(tmp_path, Host(graphics=False))
    host.path("/proc/driver/nvidia/version").chmod(0o644)
    host.path("/proc/driver/nvidia/version").write_text("NVRM version: rewritten\n")
    assert look(host)["driver"]["version"] == RELEASE


def test_no_driver(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    host = build(tmp_path, Host(modules=()))
    with pytest.raises(NvhookError) as caught:
        look(host)
    for place in ("/proc/driver/nvidia/version", "/sys/module/nvidia/version", str(tmp_path)):
        assert place in caught.value.what
    assert inventory.main(["--host-root", str(tmp_path)]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err == f"nvhook: error: {caught.value.what}\n  remedy: {caught.value.remedy}\n"


def test_a_masked_proc_is_not_called_a_missing_driver(tmp_path: Path) -> None:
    host = build(tmp_path, Host(graphics=False))
    host.path("/proc/driver/nvidia/version").unlink()
    with pytest.raises(NvhookError, match=f"module {RELEASE} is loaded, but /proc/driver/nvidia/version"):
        look(host)


def test_no_host_root() -> None:
    with pytest.raises(NvhookError, match="cannot open the host root /nowhere"):
        inventory.gather(Options("/nowhere"))


def test_index_is_the_rank_by_bus_id(tmp_path: Path) -> None:
    """A GPU that can't be reached keeps its place, an excluded one has none, minors follow neither."""
    cards = (
        Gpu("10000:01:00.0", 0, "GPU-00000004-0000-0000-0000-000000000000"),
        Gpu("0000:81:00.0", 5, "GPU-00000003-0000-0000-0000-000000000000"),
        Gpu("0000:41:00.0", 1, "GPU-00000002-0000-0000-0000-000000000000", excluded=True),
        Gpu("0000:21:00.0", 2, "GPU-00000001-0000-0000-0000-000000000000", powered=False),
        Gpu("0000:11:00.0", 3, "GPU-00000000-0000-0000-0000-000000000000", numa_node=1, known=False),
    )
    host = build(tmp_path, Host(gpus=cards, graphics=False))
    found = look(host)
    assert [(g["index"], g["bus_id"], g["minor"], g["node"]) for g in found["gpus"]] == [
        (0, "0000:11:00.0", 3, "/dev/nvidia3"),
        (2, "0000:81:00.0", 5, "/dev/nvidia5"),
        (3, "10000:01:00.0", 0, "/dev/nvidia0"),
    ]
    assert [g["uuid"] for g in found["gpus"]] == [None, cards[1].uuid, cards[0].uuid]
    assert [g["numa_node"] for g in found["gpus"]] == [1, None, None]
    assert [(f["bus_id"], f["reason"]) for f in found["faults"]] == [
        (
            "0000:21:00.0",
            "the driver can't power it up: /proc/driver/nvidia/gpus/0000:21:00.0/information is empty",
        ),
        ("0000:41:00.0", gpus.EXCLUDED),
    ]
    # The one that can't be reached now is looked at again soon; the excluded one alone would not matter.
    assert "until" in {kind for kind, _, _ in found["fingerprint"]}
    numbers = {card.bus_id: index for index, card in enumerate(host.host.nvml_order)}
    assert {g["bus_id"]: g["index"] for g in found["gpus"]}.items() <= numbers.items()


def test_a_gpu_whose_text_cannot_be_read_is_left_out(tmp_path: Path) -> None:
    host = build(tmp_path, Host(gpus=some_gpus(2), graphics=False))
    text = host.path("/proc/driver/nvidia/gpus/0000:10:00.0/information")
    text.unlink()
    text.mkdir()
    found = look(host)
    assert [g["index"] for g in found["gpus"]] == [1]
    assert found["faults"][0]["reason"].startswith("cannot read /proc/driver/nvidia/gpus/0000:10:00.0/information")


def test_no_gpu(tmp_path: Path) -> None:
    found = look(build(tmp_path, Host(gpus=(), graphics=False)))
    assert (found["gpus"], found["faults"]) == ([], [])
    assert len(found["libraries"]) > 10


@pytest.mark.parametrize("text", ["²", "1" * 5000, "-1", "0x1", ""])
def test_numbers_are_the_kernels_own(text: str) -> None:
    assert driver.number(text) is None


def test_a_number_that_is_none_leaves_one_gpu_out(tmp_path: Path) -> None:
    host = build(tmp_path, Host(gpus=some_gpus(2), graphics=False))
    information = host.path(f"/proc/driver/nvidia/gpus/{host.host.gpus[0].bus_id}/information")
    information.write_text(information.read_text().replace("Device Minor: \t 0", "Device Minor: \t ²"))
    found = look(host)
    assert [gpu["index"] for gpu in found["gpus"]] == [1]
    assert found["faults"][0]["reason"].endswith("names no device minor")
