# SPDX-License-Identifier: Apache-2.0
"""What a request brings of an inventory."""

from __future__ import annotations

from typing import Any

import pytest

from hook import request, selection
from hook.request import ALL_CAPABILITIES, Request
from ldcache.errors import NvhookError
from tests import inventories


def choose(
    ids: tuple[str, ...] | None, *capabilities: str, inventory: dict[str, Any] | None = None
) -> selection.Selection:
    """A Selection from the ordinary inventory of two GPUs."""
    return selection.select(inventory or inventories.inventory(), Request(ids, capabilities or ("compute", "utility")))


def sonames(chosen: selection.Selection) -> set[str]:
    return {item["soname"] for item in chosen.libraries}


def paths(entries: list[dict[str, Any]]) -> list[str]:
    return [entry["path"] for entry in entries]


def test_the_default_capabilities() -> None:
    chosen = choose(None)
    assert sonames(chosen) == {"libcuda.so.1", "libnvidia-ptxjitcompiler.so.1", "libnvidia-ml.so.1"}
    assert {item["class"] for item in chosen.libraries} == {64}
    assert [item["name"] for item in chosen.programs] == ["nvidia-smi", "nvidia-cuda-mps-server"]
    assert chosen.files == []
    assert len(chosen.firmware) == len(chosen.sockets) == 1
    expected = ["nvidiactl", "nvidia-uvm", "nvidia-uvm-tools", "nvidia0", "nvidia1"]
    assert paths(chosen.nodes) == [f"/dev/{name}" for name in expected]


def test_video_brings_compute_libraries_and_no_compute_programs() -> None:
    chosen = choose(("0",), "video")
    assert {"libcuda.so.1", "libnvcuvid.so.1"} <= sonames(chosen)
    assert chosen.programs == []
    assert "/dev/nvidia-uvm" in paths(chosen.nodes)


def test_utility_alone_brings_no_compute() -> None:
    chosen = choose(("0",), "utility")
    assert sonames(chosen) == {"libnvidia-ml.so.1"}
    assert paths(chosen.nodes) == ["/dev/nvidiactl", "/dev/nvidia0"]


def test_graphics_brings_files_and_the_gpus_own_drm_nodes() -> None:
    chosen = choose(("1",), "graphics")
    assert "libGLX_nvidia.so.0" in sonames(chosen)
    assert len(chosen.files) == 1
    assert paths(chosen.nodes) == ["/dev/nvidiactl", "/dev/nvidia-modeset", "/dev/nvidia1", "/dev/dri/renderD129"]


def test_a_library_that_several_groups_need() -> None:
    inventory = inventories.inventory(1)
    compiler = inventories.library("libnvidia-gpucomp", "compute", "libnvidia-gpucomp.so.580.159.04")
    inventory["libraries"].append(compiler | {"also": ["graphics"]})
    for capability in ("compute", "graphics"):
        assert "libnvidia-gpucomp.so.580.159.04" in sonames(choose(("0",), capability, inventory=inventory))
    assert "libnvidia-gpucomp.so.580.159.04" not in sonames(choose(("0",), "utility", inventory=inventory))


def test_32_bit_twins_come_with_compat32_alone() -> None:
    assert {item["class"] for item in choose(("0",), "compute", "compat32").libraries} == {32, 64}
    assert {item["class"] for item in choose(("0",), *ALL_CAPABILITIES).libraries} == {32, 64}


def test_ids_in_any_order_and_form() -> None:
    uuid = inventories.gpu(1)["uuid"]
    for ids in (("0", "1"), ("1", "0"), (uuid, "0"), (uuid.upper().replace("GPU", "gpu"), "0", "1")):
        assert [gpu["index"] for gpu in choose(ids).gpus] == [0, 1]
    assert [gpu["index"] for gpu in choose((uuid,)).gpus] == [1]


def test_no_gpu_still_brings_the_drivers_files() -> None:
    chosen = choose(())
    assert chosen.gpus == []
    assert "libcuda.so.1" in sonames(chosen)
    assert not any(node["role"] == "gpu" for node in chosen.nodes)


def test_minors_may_differ_from_indexes() -> None:
    inventory = inventories.inventory(0)
    inventory["gpus"] = [inventories.gpu(0, minor=1), inventories.gpu(1, minor=0)]
    inventory["nodes"] += [
        inventories.node(gpu["node"], 195, gpu["minor"], "gpu", gpu["bus_id"]) for gpu in inventory["gpus"]
    ]
    assert paths(choose(("0",), "utility", inventory=inventory).nodes) == ["/dev/nvidiactl", "/dev/nvidia1"]


@pytest.mark.parametrize("name", ["2", "-1", "0x0", "٠", "1" * 5000, "GPU-0", "MIG-1", "0:0", "\x1b[31m", "all "])
def test_an_unknown_id_names_the_valid_ones(name: str) -> None:
    with pytest.raises(NvhookError) as caught:
        choose(("0", name))
    assert "there are 0 (GPU-00000000-2222-3333-4444-555555555555), 1 (GPU-00000001" in caught.value.what
    assert len(caught.value.what) < 400
    assert caught.value.what.isprintable()


def test_a_gpu_left_out_is_named() -> None:
    inventory = inventories.inventory(1)
    inventory["faults"] = [{"bus_id": "0000:07:00.0", "reason": "its information file is empty"}]
    with pytest.raises(NvhookError, match=r"left out: 0000:07:00\.0 \(its information file is empty\)"):
        choose(("1",), inventory=inventory)
    inventory["gpus"] = []
    with pytest.raises(NvhookError, match="none of the driver's GPUs can be used: 0000:07:00.0"):
        choose(None, inventory=inventory)


def test_a_uuid_that_only_nvml_knows() -> None:
    inventory = inventories.inventory()
    inventory["gpus"][1]["uuid"] = None
    assert [gpu["index"] for gpu in choose(("1",), inventory=inventory).gpus] == [1]
    known = inventory["gpus"][0]["uuid"]
    assert [gpu["index"] for gpu in choose((known,), inventory=inventory).gpus] == [0]
    with pytest.raises(selection.UuidsUnknown):
        choose(("GPU-ffffffff-2222-3333-4444-555555555555",), inventory=inventory)


@pytest.mark.parametrize(
    ("capability", "lost", "expected"),
    [
        ("compute", "libcuda.so.1", "no libcuda.so.1 of the loaded driver 580.159.04"),
        ("utility", "libnvidia-ml.so.1", "no libnvidia-ml.so.1 of the loaded driver"),
        ("compute", "/dev/nvidia-uvm", "/dev/nvidia-uvm is missing"),
        ("display", "/dev/nvidia-modeset", "/dev/nvidia-modeset is missing"),
        ("utility", "/dev/nvidiactl", "/dev/nvidiactl is missing"),
        ("utility", "/dev/nvidia0", "/dev/nvidia0 of GPU 0"),
    ],
)
def test_what_a_capability_cannot_do_without(capability: str, lost: str, expected: str) -> None:
    inventory = inventories.inventory(1)
    inventory["libraries"] = [item for item in inventory["libraries"] if item["soname"] != lost]
    inventory["nodes"] = [item for item in inventory["nodes"] if item["path"] != lost]
    with pytest.raises(NvhookError, match=expected) as caught:
        choose(("0",), capability, inventory=inventory)
    assert caught.value.remedy


def test_all_does_not_ask_for_a_display_that_the_host_lacks() -> None:
    inventory = inventories.inventory(1)
    inventory["nodes"] = [item for item in inventory["nodes"] if item["role"] != "modeset"]
    env = {"NVIDIA_VISIBLE_DEVICES": "all", "NVIDIA_DRIVER_CAPABILITIES": "all"}
    wanted = request.read(env)
    assert wanted is not None
    assert selection.select(inventory, wanted).gpus == inventory["gpus"]
    wanted = request.read(env | {"NVIDIA_DRIVER_CAPABILITIES": "display,all"})
    assert wanted is not None
    with pytest.raises(NvhookError, match="/dev/nvidia-modeset is missing"):
        selection.select(inventory, wanted)


def test_what_may_be_missing() -> None:
    inventory = inventories.inventory(1)
    inventory["nodes"] = [item for item in inventory["nodes"] if item["role"] not in ("modeset", "uvm-tools", "drm")]
    inventory["files"] = inventory["firmware"] = inventory["sockets"] = []
    chosen = choose(("0",), "compute", "graphics", "utility", inventory=inventory)
    assert paths(chosen.nodes) == ["/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia0"]
