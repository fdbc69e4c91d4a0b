# SPDX-License-Identifier: Apache-2.0
"""Where a Selection lands in a known root."""

from __future__ import annotations

from pathlib import Path

import pytest

from hook import layout, selection
from hook.plan import Plan
from hook.request import ALL_CAPABILITIES, Request
from ldcache import root
from tests import inventories

MULTIARCH = "/usr/lib/x86_64-linux-gnu"


def make_root(folder: Path, *files: str) -> Path:
    for name in files:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    return folder


def probe(folder: Path, path: str = "/usr/bin") -> layout.Target:
    return layout.probe(root.open_root(str(folder)), {"PATH": path}, "x86_64")


def test_a_debian_root(tmp_path: Path) -> None:
    target = probe(make_root(tmp_path, "etc/debian_version"))
    assert target.library_folder == MULTIARCH
    assert target.library_folder_32 == "/usr/lib/i386-linux-gnu"


def test_a_root_made_of_debians_files(tmp_path: Path) -> None:
    assert probe(make_root(tmp_path, "usr/lib/x86_64-linux-gnu/libc.so.6")).library_folder == MULTIARCH


def test_a_fedora_root(tmp_path: Path) -> None:
    target = probe(make_root(tmp_path, "usr/lib64/libc.so.6", "usr/lib/os-release"))
    assert (target.library_folder, target.library_folder_32) == ("/usr/lib64", "/usr/lib")


def test_a_root_whose_lib64_is_lib(tmp_path: Path) -> None:
    make_root(tmp_path, "usr/lib/libc.so.6")
    (tmp_path / "usr/lib64").symlink_to("lib")
    assert probe(tmp_path).library_folder_32 == "/usr/lib32"


def test_a_link_in_the_root_restarts_at_the_root(tmp_path: Path) -> None:
    # On a Debian host the outside /etc/debian_version exists; the image's own link must not reach it.
    make_root(tmp_path, "usr/lib64/libc.so.6")
    (tmp_path / "etc").symlink_to("/etc-elsewhere")
    assert probe(tmp_path).library_folder == "/usr/lib64"


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "/usr/bin"),
        ("/usr/local/cuda/bin:/bin", "/usr/local/cuda/bin"),
        ("/opt/tool/bin:/bin", "/bin"),
        ("", "/usr/bin"),
        ("/opt/only", "/usr/bin"),
        ("/usr/../etc:/usr//x:/usr/./y:relative:/usr/local/bin/", "/usr/local/bin"),
    ],
)
def test_program_folder(path: str, expected: str) -> None:
    assert layout.program_folder({"PATH": path}) == expected


def everything() -> Plan:
    chosen = selection.select(inventories.inventory(1), Request(("0",), ALL_CAPABILITIES))
    return layout.layout(chosen, layout.Target(MULTIARCH, "/usr/lib/i386-linux-gnu", "/usr/bin"))


def test_libraries_land_flat_with_their_links() -> None:
    plan = everything()
    mounts = {mount["containerPath"]: mount for mount in plan.mounts}
    cuda = mounts[f"{MULTIARCH}/libcuda.so.580.159.04"]
    assert cuda["options"] == ["ro", "nosuid", "nodev", "rbind", "rprivate"]
    links = {link["path"]: link["target"] for link in plan.links}
    assert links[f"{MULTIARCH}/libcuda.so.1"] == "libcuda.so.580.159.04"
    assert links[f"{MULTIARCH}/libcuda.so"] == "libcuda.so.1"
    assert links[f"{MULTIARCH}/libGLX_indirect.so.0"] == "libGLX_nvidia.so.0"
    assert links[f"{MULTIARCH}/gbm/nvidia-drm_gbm.so"] == "../libnvidia-allocator.so.1"
    assert links["/usr/lib/i386-linux-gnu/libcuda.so.1"] == "libcuda.so.580.159.04"
    assert f"{MULTIARCH}/libnvidia-glcore.so.580.159.04" not in links


def test_cache_entries_are_ldconfigs_keys() -> None:
    entries = [(entry["soname"], entry["path"], entry["class"]) for entry in everything().cache_entries]
    assert ("libcuda.so.1", f"{MULTIARCH}/libcuda.so.1", 64) in entries
    assert ("libcuda.so", f"{MULTIARCH}/libcuda.so", 64) in entries
    assert ("libcuda.so.1", "/usr/lib/i386-linux-gnu/libcuda.so.1", 32) in entries
    assert not any("indirect" in soname or "gbm" in soname for soname, _, _ in entries)
    assert len(entries) == len(set(entries))


def test_options_by_role() -> None:
    options = {mount["containerPath"]: mount["options"] for mount in everything().mounts}
    assert "ro" not in options["/run/nvidia-persistenced/socket"]
    assert "noexec" in options["/etc/vulkan/icd.d/nvidia_icd.json"]
    assert "noexec" not in options["/usr/bin/nvidia-smi"]


def test_edits_are_a_cdi_object() -> None:
    edits = everything().edits()
    assert set(edits) == {"deviceNodes", "mounts"}
    node = next(node for node in edits["deviceNodes"] if node["path"] == "/dev/nvidia0")
    assert node == {
        "path": "/dev/nvidia0",
        "type": "c",
        "major": 195,
        "minor": 0,
        "fileMode": 0o666,
        "permissions": "rw",
        "uid": 0,
        "gid": 0,
    }
    assert Plan().edits() == {}


def test_links_beside_a_data_file() -> None:
    inventory = inventories.inventory(1)
    module = "/usr/lib/xorg/modules/extensions/libglxserver_nvidia.so"
    inventory["files"][0] |= {"container_path": f"{module}.580.159.04", "links": ["libglxserver_nvidia.so"]}
    chosen = selection.select(inventory, Request(("0",), ("graphics",)))
    plan = layout.layout(chosen, layout.Target(MULTIARCH, "/usr/lib/i386-linux-gnu", "/usr/bin"))
    assert {"path": module, "target": "libglxserver_nvidia.so.580.159.04"} in plan.links


@pytest.mark.parametrize(
    ("capability", "expected"),
    [("graphics", {"gpus": [0]}), ("display", {"gpus": [0]}), ("compute", None), ("utility", None)],
)
def test_egl_lists_the_chosen_gpus(capability: str, expected: dict[str, list[int]] | None) -> None:
    inventory = inventories.inventory(2)
    chosen = selection.select(inventory, Request(("0",), (capability,)))
    plan = layout.layout(chosen, layout.Target(MULTIARCH, "/usr/lib/i386-linux-gnu", "/usr/bin"))
    assert plan.finish()["application_profile"] == expected


def test_the_mask_shows_the_chosen_gpus() -> None:
    assert everything().finish()["proc_mask"] == {"gpus": ["0000:06:00.0"]}
