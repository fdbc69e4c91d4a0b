# SPDX-License-Identifier: Apache-2.0
"""What a request brings of an inventory."""

from __future__ import annotations

from typing import Any

import pytest

from cdi.host import settings
from hook import request, selection
from hook.request import ALL_CAPABILITIES, Request
from hook.state import Container
from ldcache.errors import NvhookError
from tests import inventories


def choose(
    ids: tuple[str, ...] | None, *capabilities: str, inventory: dict[str, Any] | None = None
) -> selection.Selection:
    """A Selection from the ordinary inventory of two GPUs."""
    return selection.select(inventory or inventories.inventory(), Request(ids, capabilities or ("compute", "utility")))


def decided(env: dict[str, str]) -> Request:
    """What an environment asks for."""
    container = Container("/bundle")
    container.env = env
    wanted = request.decide(container, settings.DEFAULTS).request
    assert wanted is not None
    return wanted


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
    for beginning in ("GPU-00000001", "gpu-00000001-2222-33", "0000:07:00.0", "00000000:07:00.0", "0:7:0.0"):
        assert [gpu["index"] for gpu in choose((beginning,)).gpus] == [1]


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
    wanted = decided(env)
    assert selection.select(inventory, wanted).gpus == inventory["gpus"]
    wanted = decided(env | {"NVIDIA_DRIVER_CAPABILITIES": "display,all"})
    with pytest.raises(NvhookError, match="/dev/nvidia-modeset is missing"):
        selection.select(inventory, wanted)


def test_what_may_be_missing() -> None:
    inventory = inventories.inventory(1)
    inventory["nodes"] = [item for item in inventory["nodes"] if item["role"] not in ("modeset", "uvm-tools", "drm")]
    inventory["files"] = inventory["firmware"] = inventory["sockets"] = []
    chosen = choose(("0",), "compute", "graphics", "utility", inventory=inventory)
    assert paths(chosen.nodes) == ["/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia0"]


# --- beginnings of UUIDs


def test_a_beginning_of_several_uuids() -> None:
    with pytest.raises(NvhookError, match="'GPU-0000' is the beginning of more than one UUID; there are 0 "):
        choose(("GPU-0000",))
    with pytest.raises(NvhookError, match="no GPU 'GPU-' on this host"):
        choose(("GPU-",))


def test_a_beginning_where_a_uuid_is_unknown() -> None:
    inventory = inventories.inventory()
    inventory["gpus"][1]["uuid"] = None
    with pytest.raises(selection.UuidsUnknown):
        choose(("GPU-00000000",), inventory=inventory)


# --- MIG


@pytest.fixture
def divided() -> dict[str, Any]:
    """Three GPUs, the second and third divided."""
    return inventories.with_everything(inventories.inventory(3), (1, 2))


@pytest.mark.parametrize(
    "name",
    [
        "1:0",
        "MIG-00010003-2222-3333-4444-555555555550",
        "mig-00010003",
        "MIG-GPU-00000001-2222-3333-4444-555555555555/3/0",
    ],
)
def test_a_mig_device(divided: dict[str, Any], name: str) -> None:
    chosen = choose((name,), "utility", inventory=divided)
    assert [gpu["index"] for gpu in chosen.gpus] == [1]
    assert paths(chosen.nodes) == [
        "/dev/nvidiactl",
        "/dev/nvidia1",
        "/dev/nvidia-caps/nvidia-cap160",
        "/dev/nvidia-caps/nvidia-cap161",
    ]
    folder = "/proc/driver/nvidia/capabilities/gpu1/mig/gi3"
    assert chosen.access == [f"{folder}/access", f"{folder}/ci0/access"]
    assert chosen.warnings == []


@pytest.mark.parametrize(
    "name",
    [
        "0:0",
        "1:3",
        "1:",
        ":1",
        "1:x",
        "9:0",
        "MIG-GPU-00000001-2222-3333-4444-555555555555/9/0",
        "MIG-GPU-1/3",
        "MIG-GPU-00000001-2222-3333-4444-555555555555/3/0/0",
        "MIG-ffff",
    ],
)
def test_no_such_mig_device(divided: dict[str, Any], name: str) -> None:
    with pytest.raises(NvhookError, match=r"no GPU .* there are 0 .*, 1:0 \(MIG-00010003"):
        choose((name,), "utility", inventory=divided)


def test_all_is_all_mig_devices_too(divided: dict[str, Any]) -> None:
    chosen = choose(None, "utility", inventory=divided)
    assert (len(chosen.gpus), len(chosen.mig)) == (3, 6)
    assert len([path for path in paths(chosen.nodes) if "nvidia-caps" in path]) == 12
    assert chosen.warnings == []


def test_a_divided_gpu_alone_runs_nothing(divided: dict[str, Any]) -> None:
    chosen = choose(("0", "1"), "utility", inventory=divided)
    assert chosen.mig == []
    assert chosen.warnings == ["GPU 1 is divided into MIG devices, and alone runs nothing: ask for 1:0 or so"]


@pytest.mark.parametrize("names", [("0", "1"), ("0000:07:00.0",)])
def test_a_divided_gpu_alone_is_no_gpu_to_compute_on(divided: dict[str, Any], names: tuple[str, ...]) -> None:
    with pytest.raises(selection.InMigMode, match="^GPU 1 is divided into MIG devices, and alone runs nothing$"):
        choose(names, "compute", "utility", inventory=divided)
    assert len(choose(("1", "1:0"), "compute", inventory=divided).mig) == 1


def test_a_gpu_in_mig_mode_without_a_device() -> None:
    """Nothing runs there: no device for who computes, one for who manages MIG or only looks on."""
    made = inventories.with_everything(inventories.inventory(2))
    made["gpus"][1]["mig_mode"] = True
    chosen = choose(None, "compute", inventory=made)
    assert [gpu["index"] for gpu in chosen.gpus] == [0] and "/dev/nvidia1" not in paths(chosen.nodes)
    (warning,) = chosen.warnings
    assert warning.startswith("GPU 1 is left out. GPU 1 (0000:07:00.0) is in MIG mode without a MIG device")
    with pytest.raises(selection.InMigMode) as caught:
        choose(("0", "1"), "compute", inventory=made)
    assert "nvidia-smi mig -i 1 -cgi" in caught.value.remedy
    made["gpus"][0]["mig_mode"] = True
    with pytest.raises(selection.InMigMode, match="^GPU 0 "):
        choose(None, "compute", inventory=made)
    wanted = Request(None, ("compute", "utility"))
    wanted.mig_control = ("config",)
    assert len(selection.select(made, wanted).gpus) == 2
    looking = choose(("1",), "utility", inventory=made)
    assert "/dev/nvidia1" in paths(looking.nodes) and len(looking.warnings) == 1


@pytest.mark.parametrize(("profile", "draws"), [("1g.24gb+gfx", True), ("1g.24gb", False), (None, False)])
def test_drm_nodes_of_mig_devices_that_draw(divided: dict[str, Any], profile: str | None, draws: bool) -> None:
    divided["mig"][0]["profile"] = profile
    found = paths(choose(("1:0",), "graphics", inventory=divided).nodes)
    assert [path for path in found if "/dri/" in path] == ["/dev/dri/renderD129"] * draws
    assert not any("/dri/" in path for path in paths(choose(("1:1",), "graphics", inventory=divided).nodes))
    assert "/dev/dri/renderD128" in paths(choose(("0",), "graphics", inventory=divided).nodes)


def test_a_mig_device_without_its_nodes(divided: dict[str, Any]) -> None:
    divided["mig"][0]["nodes"] = []
    with pytest.raises(NvhookError, match="the capability nodes of MIG device MIG-00010003.* are missing"):
        choose(("1:0",), "utility", inventory=divided)


def test_a_mig_uuid_that_only_nvml_knows(divided: dict[str, Any]) -> None:
    divided["mig"][1]["uuid"] = None
    with pytest.raises(selection.UuidsUnknown):
        choose(("MIG-ffffffff-2222-3333-4444-555555555555",), "utility", inventory=divided)
    assert len(choose(("1:1",), "utility", inventory=divided).mig) == 1


def test_managing_mig(divided: dict[str, Any]) -> None:
    wanted = Request(("1",), ("utility",))
    wanted.mig_control = ("config", "monitor")
    chosen = selection.select(divided, wanted)
    assert {"/dev/nvidia-caps/nvidia-cap1", "/dev/nvidia-caps/nvidia-cap2"} <= set(paths(chosen.nodes))
    assert len([path for path in paths(chosen.nodes) if "nvidia-caps" in path]) == 8
    assert chosen.access == ["/proc/driver/nvidia/capabilities"]
    with pytest.raises(NvhookError, match="no capability node for MIG config"):
        selection.select(inventories.inventory(2), wanted)


# --- IMEX channels and gates


def test_imex_channels(divided: dict[str, Any]) -> None:
    wanted = Request(("0",), ("utility",))
    wanted.imex = (0, 2)
    assert [path for path in paths(selection.select(divided, wanted).nodes) if "imex" in path] == [
        f"/dev/nvidia-caps-imex-channels/channel{number}" for number in (0, 2)
    ]
    wanted.imex = (9, 11)
    nodes = selection.select(divided, wanted).nodes[-2:]
    assert [(node["path"], node["host_path"], node["minor"], node["major"]) for node in nodes] == [
        (f"/dev/nvidia-caps-imex-channels/channel{number}",) * 2 + (number, 236) for number in (9, 11)
    ]
    wanted.imex = (3,)
    for inventory in (divided, inventories.inventory(1)):
        with pytest.raises(NvhookError, match="IMEX channel 3 is missing"):
            selection.select(inventory, wanted)


def test_gates(divided: dict[str, Any]) -> None:
    wanted = Request(("0",), ("utility",))
    wanted.gates = ("gds", "nvswitch")
    chosen = selection.select(divided, wanted)
    assert paths(chosen.nodes)[-2:] == ["/dev/nvidia-fs0", "/dev/nvidia-nvswitchctl"]
    assert paths(chosen.files) == ["/etc/cufile.json"]
    chosen = selection.select(inventories.inventory(1), wanted)
    assert chosen.warnings == [
        "NVIDIA_GDS is enabled, and there is no /dev/nvidia-fs* on the host",
        "NVIDIA_NVSWITCH is enabled, and there is no /dev/nvidia-nvswitch* on the host",
    ]
