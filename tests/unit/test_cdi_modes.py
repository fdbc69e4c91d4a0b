# SPDX-License-Identifier: Apache-2.0
"""`cdi generate --mode`: WSL, Tegra's lists, management containers, and hosts that are refused."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cdi import cli, modes, reader, spec
from cdi.host import inventory, platform, tegra
from cdi.host.store import Options
from ldcache.errors import NvhookError
from tests.hosts import look
from tests.needs import needs_root
from tests.simhost import Gpu, Host, SimulatedHost, bare, build, gpus
from tests.simhost.tree import Tree

HOOK = "/usr/bin/nvhook-create-container"


def generate(top: Path, capsys: pytest.CaptureFixture[str], *words: str) -> tuple[dict[str, Any], str]:
    """The spec that the command prints, which readers take, and what it says besides."""
    assert cli.main(["generate", "--host-root", str(top), "--hook-path", HOOK, *words]) == 0
    out, err = capsys.readouterr()
    made: dict[str, Any] = reader.parse(out)
    assert spec.problems(made) == []
    return made, err


def refused(top: Path, capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The error, which is two lines and nothing on stdout."""
    assert cli.main(["generate", "--host-root", str(top), "--hook-path", HOOK, *words]) == 1
    out, err = capsys.readouterr()
    lines = [line for line in err.splitlines() if "warning" not in line]
    assert out == "" and len(lines) == 2 and lines[1].startswith("  remedy: ")
    return lines[0].removeprefix("nvhook: error: ")


def mounts(made: dict[str, Any]) -> dict[str, str]:
    return {mount["containerPath"]: mount["hostPath"] for mount in made["containerEdits"]["mounts"]}


def arguments(made: dict[str, Any], option: str) -> list[str]:
    (hook,) = made["containerEdits"]["hooks"]
    assert hook["path"] == HOOK and hook["env"]
    words: list[str] = hook["args"]
    return [words[place + 1] for place, word in enumerate(words) if word == option]


# --- WSL


@needs_root
def test_wsl(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """NVIDIA's store and not the other vendor's; libdxcore, which no loader cache knows; one device."""
    bare.wsl(tmp_path)
    made, said = generate(tmp_path, capsys)
    assert said == ""
    (device,) = made["devices"]
    assert device["name"] == "all"
    assert [node["path"] for node in device["containerEdits"]["deviceNodes"]] == ["/dev/dxg"]
    store = bare.STORE
    wanted = [name for name in bare.STORE_FILES if not name.endswith((".inf", ".cat"))]
    expected = {f"{store}/{name}" for name in wanted} | {"/usr/lib/wsl/lib/libdxcore.so"}
    assert mounts(made) == {path: path for path in expected}
    assert arguments(made, "--folder") == [store, "/usr/lib/wsl/lib"]
    # The loader of the two that have this SONAME is what programs open.
    assert set(arguments(made, "--link")) == {
        f"libcuda_loader.so::{store}/libcuda.so.1",
        f"{store}/nvidia-smi::/usr/bin/nvidia-smi",
    }
    assert made["containerEdits"]["env"] == ["NVIDIA_VISIBLE_DEVICES=void"]


@needs_root
def test_of_two_stores_the_newer_is_taken(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old = "/usr/lib/wsl/drivers/nvlt.inf_amd64_00000000000000aa"
    tree = bare.wsl(tmp_path)
    bare.wsl(tmp_path, store=old)
    os.utime(tree.path(f"{old}/libcuda.so.1.1"), (1, 1))
    made, said = generate(tmp_path, capsys, "--mode", "wsl")
    assert not any(old in path for path in mounts(made))
    assert f"{old} is left out: {bare.STORE} is newer" in said


@needs_root
def test_parts_of_wsl_that_are_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tree = bare.wsl(tmp_path)
    tree.path(f"{bare.STORE}/nvcubins.bin").unlink()
    assert f"{bare.STORE}/nvcubins.bin is missing" in generate(tmp_path, capsys)[1]
    tree.path(f"{bare.STORE}/libcuda.so.1.1").unlink()
    what = refused(tmp_path, capsys)
    assert "no driver store has libcuda.so.1.1" in what and bare.STORE in what and bare.OTHER_VENDOR in what
    tree.path("/usr/lib/wsl/lib/libdxcore.so").unlink()
    assert "libdxcore.so is missing" in refused(tmp_path, capsys, "--mode", "wsl")
    tree.path("/dev/dxg").unlink()
    assert "/dev/dxg is missing" in refused(tmp_path, capsys, "--mode", "wsl")


@needs_root
@pytest.mark.parametrize(("make", "name", "mode"), [(bare.wsl, "WSL", "wsl"), (bare.tegra, "Tegra", "csv")])
def test_there_is_no_inventory_of_it(tmp_path: Path, make: Any, name: str, mode: str) -> None:
    make(tmp_path)
    with pytest.raises(NvhookError, match=f"this is {name}") as caught:
        inventory.gather(Options(str(tmp_path), nvml="never"))
    assert f"--mode {mode}" in caught.value.remedy


# --- Tegra


@needs_root
def test_tegras_lists(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All kinds of lines, patterns and links; what a list names and this board lacks is one line."""
    bare.tegra(tmp_path)
    made, said = generate(tmp_path, capsys)
    assert spec.device_names(made) == ["0", "all"]
    for device in made["devices"]:
        nodes = device["containerEdits"]["deviceNodes"]
        assert [node["path"] for node in nodes] == [
            "/dev/nvhost-ctrl",
            "/dev/nvhost-as-gpu",
            "/dev/nvhost-ctrl-gpu",
            "/dev/nvmap",
        ]
        assert {(node["fileMode"], node["gid"]) for node in nodes} == {(0o660, 44)}
    library = bare.MULTIARCH
    assert mounts(made) == {
        "/etc/nv_tegra_release": "/etc/nv_tegra_release",
        "/lib/firmware/tegra23x": "/usr/lib/firmware/tegra23x",
        **{
            f"{library}/tegra/{name}": f"{library}/tegra/{name}"
            for name in ("libcuda.so.1.1", "libnvrm_gpu.so", "libnvrm_mem.so", "nvidia_icd.json", "plugins")
        },
    }
    assert set(arguments(made, "--link")) == {
        f"libcuda.so.1.1::{library}/tegra/libcuda.so.1",
        f"libcuda.so.1.1::{library}/tegra/libcuda.so",
        f"libcuda.so.1::{library}/libcuda.so",
        f"tegra/libcuda.so.1.1::{library}/libcuda.so.1",
        f"{library}/tegra/nvidia_icd.json::/etc/vulkan/icd.d/nvidia_icd.json",
        f"../../tegra/plugins::{library}/libv4l/plugins/nv",
    }
    assert arguments(made, "--folder") == [f"{library}/tegra"]
    missing = f"dev /dev/not-on-this-board, lib {library}/tegra/libnone.so"
    assert f"listed and not there: {missing}\n" in said


@needs_root
def test_forward_compatibility_on_orin(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By the CUDA version of the release, in the folder of images for Orin; other boards have the usual one."""
    tree = bare.tegra(tmp_path)
    made, _ = generate(tmp_path, capsys)
    assert arguments(made, "--compat-cuda") == ["12.6"] and arguments(made, "--compat-folder") == []
    tree.write("/proc/device-tree/compatible", "nvidia,p3737-0000+p3701-0000\0nvidia,p3701-0000\0nvidia,tegra234\0")
    made, _ = generate(tmp_path, capsys)
    assert arguments(made, "--compat-folder") == ["/usr/local/cuda/compat_orin"]
    made, _ = generate(tmp_path, capsys, "--csv.compat-container-root", "/opt/compat")
    assert arguments(made, "--compat-folder") == ["/opt/compat"]
    made, _ = generate(tmp_path, capsys, "--disable-hook", "enable-cuda-compat,create-symlinks")
    assert arguments(made, "--compat-cuda") == arguments(made, "--compat-folder") == arguments(made, "--link") == []
    tree.write("/etc/nv_tegra_release", "# R99 (release), REVISION: 1.0\n")
    assert "--compat-cuda" not in str(generate(tmp_path, capsys)[0])


@pytest.mark.parametrize(
    ("release", "cuda"),
    [
        ("# R38 (release), REVISION: 2.0, GCID: 1", "13.0"),
        ("# R36 (release), REVISION: 4.3, GCID: 1", "12.6"),
        ("# R36 (release), REVISION: 3.0", "12.2"),
        ("# R35 (release), REVISION: 4.1", "11.4"),
        ("# R32 (release), REVISION: 7.1", "10.2"),
        ("# R28 (release), REVISION: 2.0", ""),
        ("# R99 (release), REVISION: 2.0", ""),
        ("", ""),
    ],
)
def test_the_cuda_version_of_a_release(release: str, cuda: str) -> None:
    assert tegra.cuda(release) == cuda


def thor(top: Path, *names: str) -> SimulatedHost:
    """A Thor with the ordinary module, whose GPUs have these names, and lists that know of no second one."""
    cards = tuple(replace(card, name=name) for card, name in zip(gpus(len(names)), names, strict=True))
    host = build(top, Host(gpus=cards, modules=("nvidia", "nvidia_uvm", "nvidia_modeset", "nvidia_drm")))
    tree = Tree(host.root)
    tree.write("/etc/nv_tegra_release", "# R38 (release), REVISION: 2.0\n")
    lines = [f"dev, /dev/{name}" for name in ("nvidia0", "nvidia1", "nvidiactl", "nvmap")]
    tree.write(f"{bare.LISTS}/devices.csv", "\n".join(lines))
    tree.node("/dev/nvmap", 10, 60, 0o666)
    if not host.path("/dev/nvidia2").exists():
        tree.node("/dev/nvidia2", 195, 2, 0o666)
    return host


def nodes(made: dict[str, Any]) -> dict[str, list[str]]:
    return {one["name"]: [node["path"] for node in one["containerEdits"]["deviceNodes"]] for one in made["devices"]}


@needs_root
def test_thors_own_gpu_and_a_discrete_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The lists' minor 1 is then the discrete one's, which has the driver's nodes with it."""
    host = thor(tmp_path, "NVIDIA Thor", "NVIDIA RTX PRO 6000")
    made, said = generate(host.root, capsys)
    found = nodes(made)
    own = ["/dev/nvidia0", "/dev/nvidiactl", "/dev/nvmap", "/dev/nvidia2"]
    second = ["/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools", "/dev/nvidia-modeset", "/dev/nvidia1"]
    second += ["/dev/dri/card1", "/dev/dri/renderD129"]
    assert found == {"0": own, "1": second, "all": own + [path for path in second if path not in own]}
    assert "GPUs are not" not in said
    made, _ = generate(host.root, capsys, "--feature-flag", "disable-multiple-csv-devices")
    listed = ["/dev/nvidia0", "/dev/nvidia1", "/dev/nvidiactl", "/dev/nvmap"]
    assert nodes(made) == {"0": listed, "all": listed}


@needs_root
@pytest.mark.parametrize(
    ("names", "warned"),
    [(("NVIDIA Thor",), False), (("NVIDIA H200", "NVIDIA Thor"), True), (("NVIDIA Thor", "A", "B"), True)],
)
def test_other_sets_of_gpus_on_a_tegra(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], names: tuple[str, ...], warned: bool
) -> None:
    made, said = generate(thor(tmp_path, *names).root, capsys)
    assert spec.device_names(made) == ["0", "all"]
    assert (f"for GPUs are not a Tegra's and one more: {', '.join(names)}" in said) == warned


@needs_root
def test_lists_that_are_named_and_links_that_are_not_wanted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tree = bare.tegra(tmp_path)
    tree.write(
        "/srv/own.csv", f"dev,/dev/nvmap\nsym,/etc/vulkan/icd.d/nvidia_icd.json\nsym,{bare.MULTIARCH}/libcuda.so\n"
    )
    patterns = ["--csv.ignore-pattern", "**/nvidia_icd.json"]
    made, _ = generate(tmp_path, capsys, "--csv.file", "/srv/own.csv", *patterns)
    assert len(made["devices"][0]["containerEdits"]["deviceNodes"]) == 1
    assert not any("icd.json" in path for path in mounts(made)) and f"{bare.MULTIARCH}/tegra/libcuda.so.1.1" in mounts(
        made
    )
    made, _ = generate(tmp_path, capsys, "--csv.file", "/srv/own.csv", "--csv.ignore-pattern", "/usr/lib/*libcuda.so")
    assert f"{bare.MULTIARCH}/tegra/libcuda.so.1.1" not in mounts(made)


@needs_root
def test_a_folder_that_is_a_link_gives_usable_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The library is mounted under the name that the list and its links have, whatever the host's real one is."""
    tree = bare.tegra(tmp_path, drivers="lib, /opt/tegra/libcuda.so.1.1\n")
    tree.link("/opt/tegra", f"{bare.MULTIARCH}/tegra")
    made, _ = generate(tmp_path, capsys)
    assert mounts(made)["/opt/tegra/libcuda.so.1.1"] == f"{bare.MULTIARCH}/tegra/libcuda.so.1.1"
    assert "libcuda.so.1.1::/opt/tegra/libcuda.so.1" in arguments(made, "--link")


@needs_root
def test_lines_that_are_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bare.tegra(tmp_path, devices="dev, /dev/nvmap\nnonsense\nbin, /x\nlib, relative.so\ndev\n")
    _, said = generate(tmp_path, capsys)
    assert [number for number in range(1, 6) if f"devices.csv line {number} is no `kind, path`" in said] == [2, 3, 4, 5]


@needs_root
def test_links_that_lead_round(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tree = bare.tegra(tmp_path, drivers="sym, /opt/a\nlib, /opt/*\n")
    tree.link("/opt/a", "b")
    tree.link("/opt/b", "a")
    made, said = generate(tmp_path, capsys)
    assert list(mounts(made)) == ["/etc/nv_tegra_release"] and "sym /opt/a" in said


@needs_root
def test_tegra_without_lists_or_nodes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tree = bare.tegra(tmp_path, devices="", drivers="")
    assert refused(tmp_path, capsys).startswith(f"nothing is listed in {bare.LISTS}/devices.csv")
    assert refused(tmp_path, capsys, "--csv.file", "/srv/none.csv") == "/srv/none.csv is missing"
    tree.write(f"{bare.LISTS}/devices.csv", "dev, /dev/none\n")
    assert refused(tmp_path, capsys) == "no device that is listed is there: dev /dev/none"


# --- which mode


def test_each_host_is_told_apart(tmp_path: Path) -> None:
    host = build(tmp_path / "driver", Host(graphics=False))
    thor = build(tmp_path / "thor", Host(gpus=(Gpu("0001:01:00.0", 0, gpus(1)[0].uuid, name="NVIDIA Thor"),)))
    Tree(thor.root).write("/etc/nv_tegra_release", "")
    # A discrete GPU in an AGX has the ordinary module.
    agx = build(tmp_path / "agx", Host(graphics=False))
    Tree(agx.root).write("/etc/nv_tegra_release", "")
    tops = {"nvml": [host.root, agx.root], "csv": [bare.tegra(tmp_path / "tegra").top, thor.root]}
    if os.geteuid() == 0:
        tops["wsl"] = [bare.wsl(tmp_path / "wsl").top]
    for mode, places in tops.items():
        assert [modes.resolve("auto", Options(str(top))) for top in places] == [mode] * len(places)
    soc = Tree(tmp_path / "soc")
    soc.write("/sys/devices/soc0/family", "tegra\n")
    assert modes.resolve("auto", Options(str(soc.top))) == "csv"
    assert modes.resolve("wsl", Options(str(host.root))) == "wsl"


# --- virtual GPUs


def test_a_vgpu_host_is_refused_with_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    host = build(tmp_path, Host(modules=("nvidia", "nvidia_vgpu_vfio"), graphics=False))
    assert refused(host.root, capsys).startswith("this is a vGPU host: ")


def test_a_vgpu_guest(tmp_path: Path) -> None:
    """Its licence daemon goes with utility, the daemon's secret with nobody; its GPUs have profiles for names."""
    card = Gpu("0000:02:00.0", 0, gpus(1)[0].uuid, name="GRID A100D-1-10C", brand=10)
    host = build(tmp_path, Host(gpus=(card,), graphics=False))
    tree = Tree(host.root)
    tree.write("/usr/bin/nvidia-gridd", "#!/bin/sh\n", 0o755)
    tree.write("/etc/nvidia/gridd.conf", "FeatureType=4\n")
    tree.write("/etc/nvidia/ClientConfigToken/client.tok", "secret")
    found = look(host)
    assert (found["gpus"][0]["name"], found["gpus"][0]["node"]) == ("GRID A100D-1-10C", "/dev/nvidia0")
    daemon = {"path": "/usr/bin/nvidia-gridd", "name": "nvidia-gridd", "capability": "utility"}
    assert daemon in found["programs"]
    assert [(item["path"], item["capability"]) for item in found["files"]] == [("/etc/nvidia/gridd.conf", "utility")]


# --- management


@needs_root
@pytest.mark.parametrize("prefix", ["/", "/run/nvidia/driver"])
def test_management(tmp_path: Path, capsys: pytest.CaptureFixture[str], prefix: str) -> None:
    """Every node of the driver, those with gates of their own left out; no graphics; no GPU has to work."""
    cards = tuple(Gpu(card.bus_id, card.minor, card.uuid, powered=card.minor != 1) for card in gpus(11))
    host = build(tmp_path, Host(gpus=cards, driver_root=prefix, dev_root=prefix))
    tree = Tree(tmp_path / prefix.lstrip("/"))
    for name, minor in (("nvidia-nvswitch0", 0), ("nvidia-nvswitchctl", 255), ("nvidia-fs0", 1), ("nvidia-nvlink", 2)):
        tree.node(f"/dev/{name}", 500, minor, 0o666)
    tree.node("/dev/nvidia-caps-imex-channels/channel0", 506, 0, 0o666)
    tree.link("/dev/nvidia99", "nvidia0")
    words = () if prefix == "/" else ("--driver-root", prefix)
    made, _ = generate(host.root, capsys, "--mode", "management", *words)
    assert (made["kind"], spec.device_names(made)) == ("management.nvidia.com/gpu", ["all"])
    nodes = made["devices"][0]["containerEdits"]["deviceNodes"]
    expected = [f"/dev/nvidia{minor}" for minor in range(11)]
    expected += [f"/dev/nvidia{name}" for name in ("-modeset", "-uvm", "-uvm-tools", "ctl")]
    expected += ["/dev/nvidia-caps/nvidia-cap1", "/dev/nvidia-caps/nvidia-cap2"]
    expected.append("/dev/nvidia-caps-imex-channels/channel0")
    assert [node["path"] for node in nodes] == expected
    assert {node.get("hostPath") for node in nodes} == ({None} if prefix == "/" else {prefix + e for e in expected})
    assert "deviceNodes" not in made["containerEdits"]
    places = mounts(made)
    assert any("libnvidia-ml.so" in path for path in places) and "/usr/bin/nvidia-smi" in places
    assert not any(path.startswith("/etc/vulkan") for path in places)
    assert "/etc/OpenCL/vendors/nvidia.icd" in places


def test_management_without_a_node(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    host = build(tmp_path, Host(graphics=False))
    for path in host.path("/dev").glob("nvidia*"):
        path.unlink() if not path.is_dir() else path.rename(path.with_name("aside"))
    assert refused(host.root, capsys, "--mode", "management") == "no node of the driver is in /dev"


def test_names_of_links() -> None:
    assert platform.joined("/usr/lib/x", "../y/./z") == "/usr/lib/y/z"
    assert platform.joined("/usr", "../../../etc/x") == "/etc/x"
    assert platform.joined("/usr", "/abs//x") == "/abs/x"


# --- IMEX and the gates


@needs_root
@pytest.mark.parametrize("prefix", ["/", "/run/nvidia/driver"])
def test_imex(tmp_path: Path, capsys: pytest.CaptureFixture[str], prefix: str) -> None:
    """A device for each channel and one for all, of a class of its own, bounded by what there is."""
    host = build(tmp_path, Host(graphics=False, imex=(0, 1, 2, 7), driver_root=prefix, dev_root=prefix))
    words = () if prefix == "/" else ("--driver-root", prefix)
    made, _ = generate(host.root, capsys, "--mode", "imex", *words)
    assert (made["kind"], spec.device_names(made)) == ("nvidia.com/imex-channel", ["0", "1", "2", "7", "all"])
    folder = "/dev/nvidia-caps-imex-channels"
    edits = {device["name"]: device["containerEdits"]["deviceNodes"] for device in made["devices"]}
    assert [node["path"] for node in edits["2"]] == [f"{folder}/channel2"]
    assert [node["path"] for node in edits["all"]] == [f"{folder}/channel{number}" for number in (0, 1, 2, 7)]
    expected = None if prefix == "/" else f"{prefix}{folder}/channel2"
    assert edits["2"][0].get("hostPath") == expected
    assert made["containerEdits"] == {"env": ["NVIDIA_VISIBLE_DEVICES=void"]}


@needs_root
@pytest.mark.parametrize(
    ("gate", "present"),
    [
        ("gds", ("/dev/nvidia-fs0", "/dev/nvidia-fs1")),
        ("mofed", ("/dev/infiniband/rdma_cm", "/dev/infiniband/uverbs0")),
        ("gdrcopy", ("/dev/gdrdrv",)),
        ("nvswitch", ("/dev/nvidia-nvswitchctl", "/dev/nvidia-nvswitch0", "/dev/nvidia-nvswitch1")),
    ],
)
def test_gates(tmp_path: Path, capsys: pytest.CaptureFixture[str], gate: str, present: tuple[str, ...]) -> None:
    host = build(tmp_path, Host(graphics=False))
    tree = Tree(host.root)
    assert refused(host.root, capsys, "--mode", gate).startswith(f"no node of {gate} is there: /dev/")
    for minor, path in enumerate(present):
        tree.node(path, 240, minor, 0o666)
    tree.write("/etc/cufile.json", "{}\n")
    tree.folder("/run/udev")
    made, _ = generate(host.root, capsys, "--mode", gate)
    assert (made["kind"], spec.device_names(made)) == (f"nvidia.com/{gate}", ["all"])
    assert [node["path"] for node in made["devices"][0]["containerEdits"]["deviceNodes"]] == list(present)
    places = {mount["containerPath"] for mount in made["containerEdits"].get("mounts", [])}
    assert places == ({"/etc/cufile.json", "/run/udev"} if gate == "gds" else set())


@needs_root
def test_channels_by_id(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A number, or NVIDIA's longer name for it; `all` is what was asked for, unless nobody wants it."""
    host = build(tmp_path, Host(graphics=False, imex=(0, 1, 2, 7)))

    def names(*words: str) -> list[str]:
        return spec.device_names(generate(host.root, capsys, "--mode", "imex", *words)[0])

    made, _ = generate(host.root, capsys, "--mode", "imex", "--device-id", "channel7,0", "--strict")
    assert spec.device_names(made) == ["0", "7", "all"]
    every = made["devices"][2]["containerEdits"]["deviceNodes"]
    assert [node["path"].rpartition("/")[2] for node in every] == ["channel0", "channel7"]
    assert names("--device-id", "2", "--no-all-device") == ["2"]
    assert names("--device-id", "7,all", "--no-all-device") == ["0", "1", "2", "7"]
    made, said = generate(host.root, capsys, "--mode", "imex", "--vendor", "example.com", "--no-hooks")
    assert (made["kind"], said) == ("example.com/imex-channel", "")


@needs_root
@pytest.mark.parametrize(
    ("item", "what"),
    [
        ("3", "IMEX channel 3 is missing on the host"),
        ("channel1048575", "IMEX channel 1048575 is missing on the host"),
        ("1048576", "'1048576' is no IMEX channel"),
        ("0x1", "'0x1' is no IMEX channel"),
        ("GPU-1", "'GPU-1' is no IMEX channel"),
    ],
)
def test_channels_that_are_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str], item: str, what: str) -> None:
    host = build(tmp_path, Host(graphics=False, imex=(0, 1)))
    assert refused(host.root, capsys, "--mode", "imex", "--device-id", f"0,{item}") == what


@needs_root
def test_devices_of_tegra_by_id(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    host = thor(tmp_path, "NVIDIA Thor", "NVIDIA RTX PRO 6000")
    made, _ = generate(host.root, capsys, "--device-id", "1", "--no-all-device", "--vendor", "example.com")
    assert (made["kind"], spec.device_names(made)) == ("example.com/gpu", ["1"])
    what = refused(host.root, capsys, "--device-id", "2")
    assert what == "no GPU '2' on this host; there are 0, 1"


OPTIONS = {
    "--device-id": ("management", "gds", "wsl"),
    "--no-all-device": ("management", "mofed", "wsl"),
    "--device-name-strategy": ("management", "imex", "gdrcopy", "wsl", "csv"),
    "--capabilities": ("imex", "nvswitch", "wsl", "csv"),
    "--no-hooks": ("management", "wsl", "csv"),
    "--strict": ("csv",),
}
VALUES = {"--device-id": ["0"], "--device-name-strategy": ["uuid"], "--capabilities": ["utility"]}


@pytest.mark.parametrize(("option", "mode"), [(option, mode) for option, modes in OPTIONS.items() for mode in modes])
def test_an_option_that_a_mode_would_not_obey_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], option: str, mode: str
) -> None:
    """Before the host is looked at, which here has nothing."""
    with pytest.raises(SystemExit) as ended:
        cli.main(["generate", "--host-root", str(tmp_path), "--mode", mode, option, *VALUES.get(option, [])])
    assert ended.value.code == 2
    assert f"error: {option} is not for the mode {mode}, which" in capsys.readouterr().err


@needs_root
def test_the_mode_of_the_host_counts_for_that_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bare.wsl(tmp_path)
    with pytest.raises(SystemExit):
        cli.main(["generate", "--host-root", str(tmp_path), "--device-id", "0"])
    assert "--device-id is not for the mode wsl" in capsys.readouterr().err


@needs_root
def test_a_hook_that_is_not_there_is_missed_by_a_spec_that_has_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where the host would start it, and after what is wrong with the host."""
    host = build(tmp_path, Host(graphics=False, imex=(0,), gates=frozenset({"gdrcopy"})))
    words = ["generate", "--host-root", str(host.root), "--nvml", "never"]

    def said(*more: str) -> str:
        assert cli.main([*words, *more]) == 0
        return capsys.readouterr().err

    for more in (("--mode", "imex"), ("--mode", "gdrcopy"), ("--mode", "gdrcopy", "--no-hooks")):
        assert said(*more) == ""
    assert said("--disable-hook", "all") == ""
    missing = "nvhook: warning: /usr/bin/nvhook-create-container is not there yet: no container starts with this spec "
    assert said().startswith(missing)
    assert said("--mode", "management").startswith(missing)
    Tree(host.root).write("/usr/local/bin/nvhook-create-container", "", 0o755)
    assert cli.main(words) == 0
    out, err = capsys.readouterr()
    assert (reader.parse(out)["containerEdits"]["hooks"][0]["path"], err) == (
        "/usr/local/bin/nvhook-create-container",
        "",
    )
    assert cli.main([*words, "--mode", "nvswitch"]) == 1
    assert "is not there yet" not in capsys.readouterr().err


@needs_root
def test_strictly_managed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without nvidia-uvm what is managed computes nothing; who wants no CUDA is served."""
    host = build(tmp_path, Host(graphics=False, missing=frozenset({"nvidia-uvm"})))
    words = ("--mode", "management", "--strict")
    assert "CUDA will not work, for /dev/nvidia-uvm is missing" in refused(host.root, capsys, *words)
    made, _ = generate(host.root, capsys, *words, "--capabilities", "utility")
    assert not any("libcuda" in path for path in mounts(made))
    generate(host.root, capsys, "--mode", "management", "--device-id", "all")


@needs_root
def test_a_part_of_wsl_that_is_missing_is_left_out_strictly(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tree = bare.wsl(tmp_path)
    generate(tmp_path, capsys, "--strict")
    tree.path(f"{bare.STORE}/nvcubins.bin").unlink()
    assert "nvcubins.bin is missing" in refused(tmp_path, capsys, "--strict")


@needs_root
def test_a_channel_of_another_number_is_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What is wrong with other nodes and sockets is no part of this."""
    host = build(tmp_path, Host(graphics=False, imex=(0, 1), missing=frozenset({"nvidia-uvm"}), fabricmanager="dead"))
    channel = host.path("/dev/nvidia-caps-imex-channels/channel1")
    made, said = generate(host.root, capsys, "--mode", "imex", "--strict")
    assert (spec.device_names(made), said) == (["0", "1", "all"], "")
    channel.unlink()
    os.mknod(channel, 0o020666, os.makedev(1, 1))
    made, said = generate(host.root, capsys, "--mode", "imex")
    assert spec.device_names(made) == ["0", "all"] and "channel1 is left out: it is device 1:1" in said
    assert "channel1 is left out: it is device 1:1" in refused(host.root, capsys, "--mode", "imex", "--strict")


@needs_root
def test_without_channels(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    host = build(tmp_path, Host(graphics=False))
    assert refused(host.root, capsys, "--mode", "imex").startswith("no IMEX channel is there: ")
    assert host.nvml_calls() == ()
