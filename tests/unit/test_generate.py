# SPDX-License-Identifier: Apache-2.0
"""cdi.generate and `cdi generate`: the spec of a host, against the rules of CDI's readers."""

from __future__ import annotations

import copy
import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest
import yaml

from cdi import cli, finish, generate, reader, spec
from cdi.host import inventory
from cdi.host.store import Options
from ldcache.errors import NvhookError
from tests import inventories
from tests.needs import needs_root
from tests.simhost import Gpu, Host, SimulatedHost, build, build_h200, gpus

TREE = Path(__file__).resolve().parents[2]
DATA = TREE / "tests/data/h200"
HOOK = "/usr/bin/nvhook-create-container"
RELEASE = "580.159.04"
UUID = "GPU-11111111-2222-3333-4444-555555555555"


def node(path: str, role: str, gpu: str | None = None, **values: Any) -> dict[str, Any]:
    numbers = {"major": 195, "minor": 0, "mode": 0o666, "uid": 0, "gid": 0}
    return {"path": path, "host_path": path, "role": role, "gpu": gpu, **numbers, **values}


def with_nodes(found: dict[str, Any]) -> dict[str, Any]:
    """The nodes that a host of these GPUs has: making real ones needs root."""
    common = [
        node("/dev/nvidiactl", "control"),
        node("/dev/nvidia-uvm", "uvm"),
        node("/dev/nvidia-uvm-tools", "uvm-tools"),
    ]
    found["nodes"] = common + [node(gpu["node"], "gpu", gpu["bus_id"]) for gpu in found["gpus"]]
    return found


@pytest.fixture(scope="module")
def h200(tmp_path_factory: pytest.TempPathFactory) -> SimulatedHost:
    return build_h200(tmp_path_factory.mktemp("h200"))


@pytest.fixture(scope="module")
def looked(h200: SimulatedHost) -> dict[str, Any]:
    return with_nodes(inventory.gather(Options(str(h200.root), nvml="never")))


@pytest.fixture
def found(looked: dict[str, Any]) -> dict[str, Any]:
    """The H200's inventory, to be changed at will."""
    return copy.deepcopy(looked)


def made_for(found: dict[str, Any]) -> dict[str, Any]:
    """Its spec, which readers take, in both forms."""
    made = generate.make(found, HOOK)
    assert spec.problems(made) == []
    assert reader.parse(spec.serialise(made, "yaml")) == made
    return made


def mounts(made: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {mount["containerPath"]: mount for mount in made["containerEdits"]["mounts"]}


def arguments(made: dict[str, Any], option: str) -> list[str]:
    (hook,) = made["containerEdits"]["hooks"]
    words = hook["args"]
    return [words[place + 1] for place, word in enumerate(words) if word == option]


def link_table(words: list[str]) -> dict[str, str]:
    """Place and target of each `TARGET::PLACE`."""
    return {place: target for target, _, place in (word.partition("::") for word in words)}


# --- the spec


@pytest.mark.parametrize("name", ["peer-cdi-default.yaml", "peer-cdi-search-path.yaml"])
def test_every_file_of_the_peer_is_there(found: dict[str, Any], name: str) -> None:
    made = made_for(found)
    peer = yaml.safe_load((DATA / name).read_text())
    ours = {mount["hostPath"] for mount in mounts(made).values()} | mounts(made).keys()
    assert [m for m in peer["containerEdits"]["mounts"] if not {m["hostPath"], m["containerPath"]} & ours] == []
    assert "/etc/vulkan/implicit_layer.d/nvidia_layers.json" in mounts(made)
    assert [device["name"] for device in made["devices"]] == [device["name"] for device in peer["devices"]]
    paths = {entry["path"] for entry in made["containerEdits"]["deviceNodes"]}
    assert paths == {entry["path"] for entry in peer["containerEdits"]["deviceNodes"]}


@pytest.mark.parametrize("name", ["peer-cdi-default.yaml", "peer-cdi-search-path.yaml"])
def test_every_link_of_the_peer_is_there(found: dict[str, Any], name: str) -> None:
    """The same places; where both lead, in the end, is the same file."""
    links = link_table(arguments(made_for(found), "--link"))
    peer = yaml.safe_load((DATA / name).read_text())
    words = [word for hook in peer["containerEdits"]["hooks"] for word in hook["args"] if "::" in word]
    theirs = link_table(words)
    assert links.keys() >= theirs.keys()

    def end(table: dict[str, str], place: str) -> str:
        while place in table:
            place = os.path.normpath(f"{os.path.dirname(place)}/{table[place]}")
        return place

    assert {place: end(links, place) for place in theirs} == {place: end(theirs, place) for place in theirs}


def test_the_head(found: dict[str, Any]) -> None:
    made = made_for(found)
    assert list(made) == ["cdiVersion", "kind", "devices", "containerEdits"]
    assert (made["cdiVersion"], made["kind"]) == ("0.5.0", "nvidia.com/gpu")
    assert made["containerEdits"]["env"] == ["NVIDIA_VISIBLE_DEVICES=void"]


def test_devices_by_index_uuid_and_all(tmp_path: Path) -> None:
    """By number, not by text: 10 comes after 9."""
    host = build(tmp_path, Host(gpus=gpus(11), graphics=False))
    made = made_for(with_nodes(inventory.gather(Options(str(host.root), nvml="never"))))
    names = [device["name"] for device in made["devices"]]
    assert names == [*map(str, range(11)), *(one.uuid for one in gpus(11)), "all"]
    edits = {device["name"]: device["containerEdits"] for device in made["devices"]}
    assert edits["10"] == edits[gpus(11)[10].uuid]
    assert edits["10"] == {"deviceNodes": [{"path": "/dev/nvidia10", "fileMode": 0o666, "permissions": "rw"}]}
    assert [entry["path"] for entry in edits["all"]["deviceNodes"]] == [f"/dev/nvidia{i}" for i in range(11)]


def test_a_gpu_without_a_known_uuid_has_an_index(found: dict[str, Any]) -> None:
    found["gpus"][0]["uuid"] = None
    assert [device["name"] for device in made_for(found)["devices"]] == ["0", "all"]
    assert generate.left_out(found) == ["GPU 0 (0000:00:06.0) has no name by UUID: nothing tells its UUID"]


def test_a_gpu_without_its_node_is_left_out(tmp_path: Path) -> None:
    host = build(tmp_path, Host(gpus=gpus(2), graphics=False))
    found = with_nodes(inventory.gather(Options(str(host.root), nvml="never")))
    first = found["gpus"][0]
    found["nodes"] = [item for item in found["nodes"] if item["path"] != "/dev/nvidia0"]
    # Its DRM node alone is of no use.
    found["nodes"].append(node("/dev/dri/renderD128", "drm", first["bus_id"]))
    made = made_for(found)
    assert [device["name"] for device in made["devices"]] == ["1", gpus(2)[1].uuid, "all"]
    assert "/dev/dri/renderD128" not in json.dumps(made)
    assert generate.left_out(found) == ["GPU 0 (0000:10:00.0) is left out: /dev/nvidia0 is missing"]


@pytest.mark.parametrize("faulty", [True, False])
def test_nothing_to_generate_for(tmp_path: Path, faulty: bool) -> None:
    cards = (Gpu("0000:10:00.0", 0, UUID, powered=False),) if faulty else ()
    host = build(tmp_path, Host(gpus=cards, graphics=False))
    found = with_nodes(inventory.gather(Options(str(host.root), nvml="never")))
    reason = "can't power it up" if faulty else "the driver has no GPU"
    with pytest.raises(NvhookError, match=f"no GPU to generate a spec for: .*{reason}"):
        generate.make(found, HOOK)


def test_without_the_control_node(found: dict[str, Any]) -> None:
    found["nodes"] = found["nodes"][1:]
    with pytest.raises(NvhookError, match="/dev/nvidiactl is missing"):
        generate.make(found, HOOK)


def test_device_nodes(found: dict[str, Any]) -> None:
    """Numbers come from the host at each start; what readers would not take from there is said."""
    bus_id = found["gpus"][0]["bus_id"]
    found["nodes"] += [
        node("/dev/nvidia-modeset", "modeset", host_path="/drv/dev/nvidia-modeset"),
        node("/dev/dri/renderD128", "drm", bus_id, mode=0o660, gid=44, uid=7),
    ]
    made = made_for(found)
    assert made["containerEdits"]["deviceNodes"] == [
        {"path": "/dev/nvidiactl", "fileMode": 438, "permissions": "rw"},
        {"path": "/dev/nvidia-uvm", "fileMode": 438, "permissions": "rw"},
        {"path": "/dev/nvidia-uvm-tools", "fileMode": 438, "permissions": "rw"},
        {"path": "/dev/nvidia-modeset", "hostPath": "/drv/dev/nvidia-modeset", "fileMode": 438, "permissions": "rw"},
    ]
    assert made["devices"][0]["containerEdits"]["deviceNodes"] == [
        {"path": "/dev/nvidia0", "fileMode": 438, "permissions": "rw"},
        {"path": "/dev/dri/renderD128", "fileMode": 0o660, "permissions": "rw", "gid": 44},
    ]
    # A group's members as additionalGids would ask for 0.7.0.
    assert made["cdiVersion"] == "0.5.0"


def test_one_hook(found: dict[str, Any]) -> None:
    (hook,) = made_for(found)["containerEdits"]["hooks"]
    assert (hook["hookName"], hook["path"], hook["args"][0]) == ("createContainer", HOOK, "nvhook-create-container")
    # Without any, runc hands over its own environment; and none of ours may be empty for a reader to drop.
    assert hook["env"] == ["PATH=/usr/sbin:/usr/bin:/sbin:/bin"]
    assert set(hook) == {"hookName", "path", "args", "env"}
    assert hook["args"][1:3] == ["--driver", RELEASE]
    (gpu,) = found["gpus"]
    links = [word for link in arguments(made_for(found), "--link") for word in ("--link", link)]
    assert hook["args"][3:] == [
        *["--requirements", "enforce", "--proc-mask", "--application-profile"],
        *["--gpu", f"{gpu['minor']}={gpu['bus_id']}"],
        *links,
        *["--folder", "/usr/local/nvidia/lib64"],
    ]


@pytest.mark.parametrize(
    "link",
    [
        f"libcuda.so.{RELEASE}::/usr/local/nvidia/lib64/libcuda.so.1",
        "libcuda.so.1::/usr/local/nvidia/lib64/libcuda.so",
        "libGLX_nvidia.so.0::/usr/local/nvidia/lib64/libGLX_indirect.so.0",
        "../libnvidia-allocator.so.1::/usr/local/nvidia/lib64/gbm/nvidia-drm_gbm.so",
        f"libnvidia-tls.so.{RELEASE}::/usr/local/nvidia/lib64/libnvidia-tls.so",
    ],
)
def test_links(found: dict[str, Any], link: str) -> None:
    assert link in arguments(made_for(found), "--link")


def test_programs_are_on_the_path(found: dict[str, Any]) -> None:
    mount = mounts(made_for(found))["/usr/bin/nvidia-smi"]
    assert mount["hostPath"] == "/usr/local/nvidia/bin/nvidia-smi"
    assert mount["options"] == ["ro", "nosuid", "nodev", "rbind", "rprivate"]


def test_mounts_are_in_one_order_and_each_place_once(found: dict[str, Any]) -> None:
    made = made_for(found)
    places = [mount["containerPath"] for mount in made["containerEdits"]["mounts"]]
    assert places == sorted(set(places), key=lambda path: (path.count("/"), path))
    for kind in ("libraries", "programs", "files", "firmware"):
        found[kind].reverse()
    assert made_for(found)["containerEdits"]["mounts"] == made["containerEdits"]["mounts"]


def test_sockets_are_not_read_only(tmp_path: Path) -> None:
    host = build(tmp_path, Host(graphics=False, persistenced="answering", mps=True))
    made = made_for(with_nodes(inventory.gather(Options(str(host.root), nvml="never"))))
    host.close()
    for path in ("/run/nvidia-persistenced/socket", "/tmp/nvidia-mps"):
        assert mounts(made)[path]["options"] == ["nosuid", "nodev", "noexec", "rbind", "rprivate"]


def test_a_workstation(tmp_path: Path) -> None:
    """32-bit twins are for containers that ask; X.Org's module gets the name that X.Org opens."""
    host = build(tmp_path, Host(i386=True))
    made = made_for(with_nodes(inventory.gather(Options(str(host.root), nvml="never"))))
    assert not any("i386" in path for path in mounts(made))
    assert arguments(made, "--folder") == ["/usr/lib/x86_64-linux-gnu", "/usr/lib/x86_64-linux-gnu/vdpau"]
    server = f"libglxserver_nvidia.so.{RELEASE}"
    assert f"{server}::/usr/lib/xorg/modules/extensions/libglxserver_nvidia.so" in arguments(made, "--link")


def test_driver_root(tmp_path: Path) -> None:
    host = build(tmp_path, Host(driver_root="/drv", dev_root="/drv", graphics=False))
    made = made_for(with_nodes(inventory.gather(Options(str(host.root), driver_root="/drv", nvml="never"))))
    for path, mount in mounts(made).items():
        assert mount["hostPath"].startswith("/drv/") and not path.startswith("/drv")
    assert not any("/drv" in link for link in arguments(made, "--link") + arguments(made, "--folder"))


# --- the command


@needs_root
def test_the_command_on_the_real_host(h200: SimulatedHost, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Through every step, nodes included; the file in its place is what stdout would have shown."""
    root = ["generate", "--host-root", str(h200.root), "--hook-path", HOOK]
    output = tmp_path / "cdi" / "nvidia.yaml"
    assert cli.main(root) == 0
    printed = capsys.readouterr().out
    assert cli.main([*root, "--output", str(output)]) == 0
    assert capsys.readouterr() == ("", "")
    assert reader.parse(output.read_bytes()) == reader.parse(printed)
    assert stat.S_IMODE(output.stat().st_mode) == 0o644
    made = reader.parse(printed)
    assert spec.problems(made) == []
    assert [device["name"] for device in made["devices"]] == ["0", UUID, "all"]
    # Again over itself: the same text, and no quarrel with its own names.
    assert cli.main([*root, "--output", str(output)]) == 0
    assert reader.parse(output.read_bytes()) == reader.parse(printed)


@needs_root
@pytest.mark.parametrize(
    ("words", "is_json"),
    [
        (["--output", "x.json"], True),
        (["--output", "x.yaml"], True),
        (["--output", "x.yaml", "--format", "yaml"], False),
        (["--output", "x.yaml", "--format", "json"], True),
        (["--output", "x.json", "--format", "yaml"], False),
    ],
)
def test_formats(
    h200: SimulatedHost, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], is_json: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["generate", "--host-root", str(h200.root), "--hook-path", HOOK, *words]) == 0
    text = (tmp_path / words[1]).read_text()
    assert text.startswith("{") == is_json
    assert reader.parse(text)["kind"] == "nvidia.com/gpu"


@needs_root
def test_uuids_come_from_nvml_where_the_kernel_has_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    card = Gpu("0000:10:00.0", 0, UUID, known=False)
    host = build(tmp_path, Host(gpus=(card,), graphics=False))
    assert cli.main(["generate", "--host-root", str(host.root), "--hook-path", HOOK]) == 0
    assert spec.device_names(reader.parse(capsys.readouterr().out)) == ["0", UUID, "all"]


@pytest.mark.parametrize("words", [["--output", "nvidia.yml"], ["--output", "nvidia"], ["--hook-path", "nvhook"]])
def test_usage_errors(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["generate", *words])
    assert caught.value.code == 2
    assert words[1] in capsys.readouterr().err


def test_an_error_is_two_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["generate", "--host-root", str(tmp_path)]) == 1
    out, err = capsys.readouterr()
    lines = [line for line in err.splitlines() if "warning" not in line]
    assert out == "" and len(lines) == 2
    assert lines[0].startswith("nvhook: error: no NVIDIA driver is loaded") and lines[1].startswith("  remedy: ")


# --- other files of the folder


def other(folder: Path, name: str, **members: Any) -> Path:
    path = folder / name
    device = {"name": "0", "containerEdits": {"env": ["A=1"]}}
    path.write_text(json.dumps({"cdiVersion": "0.5.0", "kind": "nvidia.com/gpu", "devices": [device], **members}))
    return path


@pytest.mark.parametrize("name", ["nvidia-ctk.yaml", "nvidia.json", ".hidden.yaml"])
def test_a_file_with_the_same_names_is_a_refusal(found: dict[str, Any], tmp_path: Path, name: str) -> None:
    path = other(tmp_path, name)
    with pytest.raises(NvhookError) as caught:
        generate.refuse_conflict(tmp_path / "nvidia.yaml", made_for(found))
    assert str(path) in caught.value.what and "(0)" in caught.value.what and str(path) in caught.value.remedy


def test_files_that_do_no_harm(found: dict[str, Any], tmp_path: Path) -> None:
    other(tmp_path, "nvidia.yaml")
    other(tmp_path, "other.yaml", kind="acme.test/gpu")
    other(tmp_path, "more.yaml", devices=[{"name": "mig0", "containerEdits": {"env": ["A=1"]}}])
    other(tmp_path, "unread.yml")
    (tmp_path / "folder.yaml").mkdir()
    assert generate.refuse_conflict(tmp_path / "nvidia.yaml", made_for(found)) == []
    assert generate.refuse_conflict(tmp_path / "none" / "nvidia.yaml", made_for(found)) == []


def test_files_that_can_not_be_read_are_named(found: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text("a: [")
    (tmp_path / "worse.yaml").write_bytes(b"\xff\xfe")
    unreadable = generate.refuse_conflict(tmp_path / "nvidia.yaml", made_for(found))
    assert unreadable == [str(tmp_path / "bad.yaml"), str(tmp_path / "worse.yaml")]


def test_neighbours_that_are_no_files(found: dict[str, Any], tmp_path: Path) -> None:
    """None of them is waited for or read without end."""
    os.mkfifo(tmp_path / "fifo.yaml")
    (tmp_path / "dangling.yaml").symlink_to("nowhere")
    (tmp_path / "zero.json").symlink_to("/dev/zero")
    (tmp_path / "long.json").touch()
    os.truncate(tmp_path / "long.json", 1 << 40)
    (tmp_path / "deep.yaml").write_text("[" * 20_000)
    names = ("dangling.yaml", "deep.yaml", "fifo.yaml", "long.json", "zero.json")
    unreadable = generate.refuse_conflict(tmp_path / "nvidia.yaml", made_for(found))
    assert unreadable == [str(tmp_path / name) for name in names]


def test_a_neighbour_by_a_link_and_a_relative_path(
    found: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "specs").mkdir()
    path = other(tmp_path, "elsewhere.txt")
    (tmp_path / "specs/linked.yaml").symlink_to(path)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(NvhookError, match="specs/linked.yaml defines"):
        generate.refuse_conflict(Path("specs/nvidia.yaml"), made_for(found))


@needs_root
def test_the_command_refuses_and_leaves_the_folder_alone(
    h200: SimulatedHost, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = other(tmp_path, "nvidia-ctk.yaml")
    words = ["generate", "--host-root", str(h200.root), "--hook-path", HOOK]
    assert cli.main([*words, "--output", str(tmp_path / "nvidia.yaml")]) == 1
    assert str(path) in capsys.readouterr().err
    assert os.listdir(tmp_path) == ["nvidia-ctk.yaml"]


# --- MIG devices


@pytest.fixture
def divided_host() -> dict[str, Any]:
    """GPU 0 whole, GPU 1 with three MIG devices."""
    made = inventories.with_everything(inventories.inventory(2), (1,))
    made["mig"][2]["uuid"] = None
    return made


def test_a_divided_gpu_is_offered_by_its_mig_devices(divided_host: dict[str, Any]) -> None:
    made = generate.make(divided_host, HOOK)
    nodes = {
        device["name"]: [one["path"] for one in device["containerEdits"]["deviceNodes"]] for device in made["devices"]
    }
    first, second = divided_host["mig"][:2]
    assert list(nodes) == [
        "0",
        "1:0",
        "1:1",
        "1:2",
        divided_host["gpus"][0]["uuid"],
        first["uuid"],
        second["uuid"],
        "all",
    ]
    caps = ["/dev/nvidia-caps/nvidia-cap160", "/dev/nvidia-caps/nvidia-cap161"]
    assert nodes["1:0"] == nodes[first["uuid"]] == ["/dev/nvidia1", *caps]
    assert set(nodes["all"]) == {path for name, paths in nodes.items() if name != "all" for path in paths}
    assert len(nodes["all"]) == len(set(nodes["all"]))
    assert generate.left_out(divided_host) == [
        "MIG device 1:2 (gi 7, ci 0) has no name by UUID: nothing tells its UUID",
    ]
    assert spec.problems(made) == []


def test_a_mig_device_without_its_nodes_is_left_out(divided_host: dict[str, Any]) -> None:
    """And never offered with a part of them."""
    divided_host["mig"][1]["nodes"] = []
    names = spec.device_names(generate.make(divided_host, HOOK))
    assert "1:0" in names and "1:1" not in names
    assert generate.left_out(divided_host)[0] == (
        "MIG device 1:1 (gi 1, ci 0) is left out: not all its nodes below /dev/nvidia-caps are there; "
        "`nvhook nodes create` makes them"
    )
    for entry in divided_host["mig"]:
        entry["nodes"] = []
    names = spec.device_names(generate.make(divided_host, HOOK))
    assert names == ["0", divided_host["gpus"][0]["uuid"], "all"]


# --- what a spec is to have


def generated(found: dict[str, Any], **options: Any) -> dict[str, Any]:
    """The spec with these options, which readers take."""
    made = generate.make(found, HOOK, generate.Options(**options))
    assert spec.problems(made) == []
    return made


@pytest.fixture
def pair(tmp_path: Path) -> dict[str, Any]:
    """A host with two GPUs on NUMA node 0, and twins of 32 bits."""
    host = build(tmp_path, Host(gpus=gpus(2), i386=True))
    return with_nodes(inventory.gather(Options(str(host.root), nvml="never")))


def test_device_names(pair: dict[str, Any]) -> None:
    uuids = [gpu.uuid for gpu in gpus(2)]
    names = {
        ("index",): ["0", "1", "all"],
        ("uuid",): [*uuids, "all"],
        ("type-index",): ["gpu0", "gpu1", "all"],
        ("type-index", "index"): ["gpu0", "gpu1", "0", "1", "all"],
    }
    for strategies, expected in names.items():
        assert spec.device_names(generated(pair, strategies=strategies)) == expected
    assert spec.device_names(generated(pair, all_device=False, strategies=("index",))) == ["0", "1"]


def test_device_ids(pair: dict[str, Any]) -> None:
    first, second = gpus(2)
    for name in ("1", second.uuid, second.uuid.lower(), second.bus_id):
        made = generated(pair, device_ids=(name,))
        assert spec.device_names(made) == ["1", second.uuid, "all"]
        assert [entry["path"] for entry in made["devices"][-1]["containerEdits"]["deviceNodes"]] == ["/dev/nvidia1"]
        assert f"1={second.bus_id}" in arguments(made, "--gpu") and first.bus_id not in json.dumps(made)
    assert spec.device_names(generated(pair, device_ids=("1", "all", "none"))) == spec.device_names(generated(pair))
    made = generated(pair, device_ids=("0", "none"))
    assert made["devices"] == [{"name": "none", "containerEdits": {"env": ["NVIDIA_VISIBLE_DEVICES=void"]}}]
    with pytest.raises(NvhookError, match=r"no GPU '7' on this host; there are 0 \(GPU-"):
        generated(pair, device_ids=("7",))


@pytest.mark.parametrize(
    "ids",
    [
        ("1:0",),
        ("MIG-00010003-2222-3333-4444-555555555550",),
        ("mig-00010003",),
        ("MIG-GPU-00000001-2222-3333-4444-555555555555/3/0", "1:0"),
    ],
)
def test_mig_devices_by_id(ids: tuple[str, ...]) -> None:
    """By the same ids as in NVIDIA_VISIBLE_DEVICES: that device and no other, and nothing of the other GPUs."""
    found = inventories.with_everything(inventories.inventory(3), (1, 2))
    made = generated(found, device_ids=ids)
    assert spec.device_names(made) == ["1:0", "MIG-00010003-2222-3333-4444-555555555550", "all"]
    folder = "/dev/nvidia-caps/nvidia-cap"
    paths = [entry["path"] for entry in made["devices"][-1]["containerEdits"]["deviceNodes"]]
    assert paths == ["/dev/nvidia1", f"{folder}160", f"{folder}161"]
    assert len(arguments(made, "--gpu")) == 1
    assert generate.left_out(found, generate.Options(device_ids=ids)) == []


def test_a_divided_gpu_by_id_is_all_its_mig_devices() -> None:
    found = inventories.with_everything(inventories.inventory(3), (1, 2))
    for ids in (("1",), ("1:0", "GPU-00000001"), ("0000:07:00.0",)):
        made = generated(found, device_ids=ids, strategies=("index",))
        assert spec.device_names(made) == ["1:0", "1:1", "1:2", "all"]


def test_a_mig_device_without_its_nodes_alone() -> None:
    found = inventories.with_everything(inventories.inventory(2), (1,))
    found["mig"][0]["nodes"] = []
    with pytest.raises(NvhookError, match=r"no GPU to generate a spec for: MIG device 1:0 \(gi 3, ci 0\) is left out"):
        generated(found, device_ids=("1:0",))
    assert generate.left_out(found, generate.Options(device_ids=("1:1",))) == []


def test_ids_that_are_none() -> None:
    found = inventories.with_everything(inventories.inventory(9), tuple(range(9)))
    for name in ("0:9", "MIG-ffff", "MIG-GPU-00000001/9/9", "GPU-ffff"):
        with pytest.raises(NvhookError, match=r"^no GPU '.*' on this host; there are 0 \(GPU-") as caught:
            generated(found, device_ids=(name,))
        assert " 0:0 (MIG-" in caught.value.what and caught.value.what.endswith(", and 12 more")
    with pytest.raises(NvhookError, match="'GPU-0000' is the beginning of more than one UUID"):
        generated(found, device_ids=("GPU-0000",))
    found["gpus"][3]["uuid"] = None
    with pytest.raises(NvhookError, match="cannot tell which GPU is 'GPU-ffff'"):
        generated(found, device_ids=("GPU-ffff",))


def test_a_kind_of_ones_own(pair: dict[str, Any]) -> None:
    assert generated(pair, kind="k8s.example.com/gpu")["kind"] == "k8s.example.com/gpu"


def test_the_numa_node(pair: dict[str, Any]) -> None:
    """In annotations, which came with version 0.6.0."""
    made = generated(pair, numa=True)
    assert made["cdiVersion"] == "0.6.0"
    assert [device.get("annotations") for device in made["devices"]] == [{"nvhook/numa-node": "0"}] * 4 + [None]
    assert "annotations" not in json.dumps(generated(pair))
    assert generated(pair, strategies=("uuid", "type-index"))["cdiVersion"] == "0.3.0"


def test_capabilities(pair: dict[str, Any]) -> None:
    pair["nodes"].append(node("/dev/dri/renderD128", "drm", pair["gpus"][0]["bus_id"]))
    utility = generated(pair, capabilities=("utility",))
    assert {entry["path"] for entry in utility["containerEdits"]["deviceNodes"]} == {"/dev/nvidiactl"}
    names = [place.rpartition("/")[2] for place in mounts(utility)]
    assert f"libnvidia-ml.so.{RELEASE}" in names and "nvidia-smi" in names
    assert not any("libcuda" in name or "EGL" in name for name in names)
    assert "renderD128" not in json.dumps(utility) and "renderD128" in json.dumps(generated(pair))
    assert "--application-profile" not in utility["containerEdits"]["hooks"][0]["args"]
    both = generated(pair, capabilities=("compute", "compat32"))
    assert {f"/usr/lib/{one}-linux-gnu/libcuda.so.{RELEASE}" for one in ("i386", "x86_64")} <= set(mounts(both))
    assert "/usr/lib/i386-linux-gnu" in arguments(both, "--folder")


def without_parts(found: dict[str, Any], *disabled: str, enabled: tuple[str, ...] = ()) -> str:
    """The hook's words, or none where there is no hook."""
    made = generated(found, parts=finish.chosen_parts(list(disabled), list(enabled)))
    return " ".join(word for hook in made["containerEdits"].get("hooks", []) for word in hook["args"])


@pytest.mark.parametrize(
    ("part", "peers", "word"),
    [
        ("links", "create-symlinks", "--link"),
        ("loader-cache", "update-ldcache", "--folder"),
        ("proc-mask", "disable-device-node-modification", "--proc-mask"),
        ("application-profile", "update-application-profile", "--application-profile"),
        ("requirements", "requirements", "--requirements"),
    ],
)
def test_parts_of_the_hook(found: dict[str, Any], part: str, peers: str, word: str) -> None:
    assert word in without_parts(found)
    assert word not in without_parts(found, part)
    assert without_parts(found, peers) == without_parts(found, part)
    assert word in without_parts(found, "all", enabled=(peers,))


def test_forward_compatibility_is_turned_off_by_a_word(found: dict[str, Any]) -> None:
    """A file from before the word has none, and means yes."""
    assert "--no-forward-compatibility" not in without_parts(found)
    assert "--no-forward-compatibility" in without_parts(found, "enable-cuda-compat")
    found["config"] = {"source": "x", "values": {"compat.forward-compatibility": False}, "warnings": []}
    assert "--no-forward-compatibility" in without_parts(found)


def test_no_part_and_no_hook(found: dict[str, Any]) -> None:
    assert without_parts(found, "all") == ""
    with pytest.raises(ValueError, match="'links2' is no part of the hook: links, "):
        finish.chosen_parts(["links2"], [])
    with pytest.raises(ValueError, match="'all' is no part"):
        finish.chosen_parts([], ["all"])


def test_facts_for_requirements(found: dict[str, Any]) -> None:
    gpu = found["gpus"][0]
    gpu["arch"], gpu["brand"] = "9.0", "Nvidia"
    found["driver"]["cuda"] = "13.0"
    words = without_parts(found)
    assert f"--gpu {gpu['minor']}={gpu['bus_id']},9.0,Nvidia" in words
    assert "--cuda 13.0" in words and "--requirements enforce" in words
    found["config"] = {"source": "x", "values": {"compat.requirements": "warn"}, "warnings": []}
    assert "--requirements warn" in without_parts(found)
    found["config"]["values"] = {"disable-require": True}
    assert "--requirements" not in without_parts(found)


def test_without_a_hook(found: dict[str, Any]) -> None:
    """A mount for each name that is loaded, in each folder of the layout; none by the file's own."""
    made = generated(found, layout="debian")
    assert "hooks" not in made["containerEdits"]
    folder = "/usr/lib/x86_64-linux-gnu"
    expected = {f"{folder}/{name}" for name in ("libcuda.so.1", "libcuda.so", "gbm/nvidia-drm_gbm.so")}
    assert expected <= set(mounts(made))
    assert f"{folder}/libcuda.so.{RELEASE}" not in mounts(made)
    assert mounts(made)[f"{folder}/libcuda.so"]["hostPath"] == f"/usr/local/nvidia/lib64/libcuda.so.{RELEASE}"
    both = generated(found, layout="both")
    assert {"/usr/lib64/libcuda.so.1", f"{folder}/libcuda.so.1"} <= set(mounts(both))
    assert "/usr/lib/libcuda.so.1" in mounts(generated(found, layout="musl"))
    lines = generate.notes(found, both, generate.Options(layout="both"))
    assert lines[0] == f"{len(mounts(both))} mounts and no hook"
    assert "EGL" in " ".join(lines) and "libnvidia-ml.so" in lines[-1].split()
    assert generate.notes(found, generated(found), generate.Options()) == []


@needs_root
def test_notes_are_on_stderr(h200: SimulatedHost, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["generate", "--host-root", str(h200.root), "--no-hooks", "--layout", "lib64"]) == 0
    out, err = capsys.readouterr()
    count = len(reader.parse(out)["containerEdits"]["mounts"])
    lines = err.splitlines()
    assert lines[0] == f"nvhook: note: {count} mounts and no hook"
    assert all(line.startswith("nvhook: note: ") for line in lines)


@needs_root
def test_options_of_the_command(h200: SimulatedHost, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--device-id=0", "--no-all-device", "--vendor", "example.com", "--class", "gpu", "--capabilities=utility"]
    words += ["--device-name-strategy", "type-index,uuid", "--disable-hook", "all", "--enable-hook", "links"]
    assert cli.main(["generate", "--host-root", str(h200.root), "--hook-path", HOOK, *words]) == 0
    made = reader.parse(capsys.readouterr().out)
    assert (made["kind"], spec.device_names(made)) == ("example.com/gpu", ["gpu0", UUID])
    assert {word for word in made["containerEdits"]["hooks"][0]["args"] if word[:2] == "--"} == {"--driver", "--link"}


@needs_root
def test_all_capabilities_are_all_where_they_are_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With 32-bit libraries, as `all` brings in a container; the default is a file for every container, without."""
    host = build(tmp_path, Host(i386=True))
    texts = []
    for names in ([], ["--capabilities", "all"], ["--capabilities", "utility,all"]):
        assert cli.main(["generate", "--host-root", str(host.root), "--hook-path", HOOK, *names]) == 0
        texts.append(capsys.readouterr().out)
    twin = f"/usr/lib/i386-linux-gnu/libcuda.so.{RELEASE}"
    assert [twin in mounts(reader.parse(text)) for text in texts] == [False, True, True]
    assert set(mounts(reader.parse(texts[0]))) < set(mounts(reader.parse(texts[1])))


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["--layout", "debian"], "only of use with --no-hooks"),
        (["--no-hooks", "--disable-hook", "links"], "leaves no hook"),
        (["--capabilities", "compute,nothing"], "--capabilities nothing: use some of"),
        (["--device-name-strategy", "colour"], "--device-name-strategy colour: use some of index, uuid, type-index"),
        (["--vendor", "a/b"], "a/b/gpu"),
        (["--class", "g"], "crashes engines"),
        (["--enable-hook", "all"], "'all' is no part of the hook"),
    ],
)
def test_usage_of_content(words: list[str], what: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["generate", *words])
    assert caught.value.code == 2
    assert what in capsys.readouterr().err


# --- nvidia-ctk's feature flags


@needs_root
def test_feature_flags(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each changes one thing; what is not asked here is no error to leave out."""
    host = build(tmp_path, Host(persistenced="answering", mps=True, modules=("nvidia", "nvidia_uvm", "nvidia_drm")))
    os.chown(host.path("/dev/dri/renderD128"), 0, 44)
    words = ["generate", "--host-root", str(host.root), "--hook-path", HOOK, "--spec-version-max", "0.7.0"]

    def made(*flags: str) -> dict[str, Any]:
        assert cli.main([*words, *flags]) == 0
        found: dict[str, Any] = reader.parse(capsys.readouterr().out)
        return found

    plain = made()
    places = {mount["containerPath"] for mount in plain["containerEdits"]["mounts"]}
    assert {"/run/nvidia-persistenced/socket", "/tmp/nvidia-mps"} <= places
    without = made("--feature-flag", "disable-ipc-discoverer")
    left = {mount["containerPath"] for mount in without["containerEdits"]["mounts"]}
    assert places - left == {"/run/nvidia-persistenced/socket", "/tmp/nvidia-mps"}
    assert "additionalGids" in str(plain)
    assert "additionalGids" not in str(made("--feature-flags", "no-additional-gids-for-device-nodes"))
    assert made("--feature-flag", "disable-nvsandboxutils,disable-nvsandbox-utils") == plain
    host.close()


def test_an_unknown_feature_flag_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["generate", "--feature-flag", "enable-everything"])
    assert ended.value.code == 2
    assert "--feature-flag enable-everything: use some of disable-ipc-discoverer" in capsys.readouterr().err
