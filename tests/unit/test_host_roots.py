# SPDX-License-Identifier: Apache-2.0
"""Discovery on hosts unlike the usual one: where the driver lies, and what is said where it is not found."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from cdi import cli, generate, reader, spec
from hook import selection
from hook.request import Request
from ldcache.errors import NvhookError
from tests.hosts import RELEASE, by_name, look
from tests.needs import needs_root
from tests.simhost import Host, SimulatedHost, build, platforms
from tests.simhost.tree import Tree

HOOK = "/usr/bin/nvhook-create-container"
NEWER = "595.10"

# Without a loader cache: what the loader of such a system knows, another program's cache does not tell.
ALONE = ("lib64", "h200", "alternatives", "talos", "nixos", "gke", "bottlerocket")


def expect_all(host: SimulatedHost, found: dict[str, Any]) -> None:
    """Every library, by its real place; programs, Vulkan's file, and firmware of this version."""
    assert {item["path"] for item in found["libraries"]} == {one.path for one in host.libraries}
    assert {"nvidia-smi", "nvidia-debugdump", "nvidia-cuda-mps-control"} <= {p["name"] for p in found["programs"]}
    places = {item["container_path"] for item in found["files"]}
    assert {"/etc/vulkan/icd.d/nvidia_icd.json", "/usr/share/glvnd/egl_vendor.d/10_nvidia.json"} <= places
    assert [item["container_path"] for item in found["firmware"]] == [
        f"/lib/firmware/nvidia/{RELEASE}/{name}" for name in ("gsp_ga10x.bin", "gsp_tu10x.bin")
    ]
    for kind in ("libraries", "programs", "files", "firmware"):
        for item in found[kind]:
            assert not host.path(item["path"]).is_symlink() and host.path(item["path"]).is_file()
    assert [text for text in found["warnings"] if "/dev/" not in text] == []


@pytest.mark.parametrize("layout", ALONE)
def test_a_driver_is_found_without_a_loader_cache(tmp_path: Path, layout: Any) -> None:
    host = build(tmp_path, Host(layout=layout, i386=layout in ("alternatives", "nixos"), cache=False))
    expect_all(host, look(host))


@pytest.mark.parametrize("layout", sorted(set(platforms.PLACES) - {"nixos"}))
def test_a_driver_is_found_by_the_loader_cache(tmp_path: Path, layout: Any) -> None:
    host = build(tmp_path, Host(layout=layout, cache=True))
    expect_all(host, look(host))


@pytest.mark.parametrize(
    ("place", "layout"), [("/run/nvidia/driver", "debian"), ("/home/kubernetes/bin/nvidia", "gke")]
)
def test_a_driver_root_of_its_own(tmp_path: Path, place: str, layout: Any) -> None:
    """The operator's driver container; and GKE's folder, given as the root that it nearly is."""
    if layout == "gke":
        host = build(tmp_path, Host(layout=layout, cache=False))
        found = look(host, driver_root=place, dev_root="/")
        assert by_name(found, f"libcuda.so.{RELEASE}")["folder"] == "/lib64"
    else:
        host = build(tmp_path, Host(driver_root=place, dev_root=place))
        found = look(host, driver_root=place)
        assert by_name(found, f"libcuda.so.{RELEASE}")["folder"] == "/usr/lib/x86_64-linux-gnu"
    expect_all(host, found)


@needs_root
@pytest.mark.parametrize("layout", ["flatcar", "bottlerocket", "talos", "nixos"])
def test_a_spec_is_made_and_nothing_else_is_written(tmp_path: Path, layout: Any) -> None:
    """/usr and /etc are read-only there, so whoever writes to them fails."""
    host = build(tmp_path / "host", Host(layout=layout))
    before = contents(host.root)
    output = host.path("/run/cdi/nvidia.yaml")
    assert cli.main(["generate", "--host-root", str(host.root), "--hook-path", HOOK, "--output", str(output)]) == 0
    made = reader.parse(output.read_text())
    assert spec.problems(made) == []
    for mount in made["containerEdits"]["mounts"]:
        assert host.path(mount["hostPath"]).exists() and mount["containerPath"].startswith("/")
    changed = contents(host.root) ^ before
    assert {path.parts[0] for path, _ in changed} == {"run"}


def contents(top: Path) -> set[tuple[Path, int]]:
    """Every name below a folder, with the time it was changed; times of folders do not count."""
    return {
        (path.relative_to(top), 0 if path.is_dir() else path.lstat().st_mtime_ns)
        for path in top.rglob("*")
        if "simulated-nvml" not in path.parts
    }


# --- another version


def upgraded(tmp_path: Path) -> SimulatedHost:
    """A host whose packages were upgraded, while the old module is still loaded."""
    host = build(tmp_path, Host())
    for one in host.libraries:
        path = host.path(one.path)
        if path.name.endswith(RELEASE):
            path.rename(path.with_name(path.name.removesuffix(RELEASE) + NEWER))
    Tree(host.root).ldconfig()
    return host


def test_only_newer_libraries_are_none(tmp_path: Path) -> None:
    """Neither they nor those that have a version of their own, such as the EGL platforms, which came with them."""
    host = upgraded(tmp_path)
    found = look(host)
    assert (found["libraries"], found["other_versions"]) == ([], [NEWER])
    (text,) = [text for text in found["warnings"] if "no library" in text]
    assert text.startswith(f"no library of the loaded driver {RELEASE} was found in ")
    assert text.endswith(f"; there are libraries of {NEWER}")


def test_generate_names_both_versions_and_the_remedy(tmp_path: Path) -> None:
    found = with_control_node(look(upgraded(tmp_path)))
    with pytest.raises(NvhookError, match=f"driver {RELEASE} .* libraries of {NEWER}") as caught:
        generate.make(found, HOOK)
    assert "reboot" in caught.value.remedy and NEWER in caught.value.remedy


@needs_root
def test_a_start_names_both_versions(tmp_path: Path) -> None:
    found = look(upgraded(tmp_path))
    expected = (
        f"no libcuda.so.1 of the loaded driver {RELEASE} was found in .*/ld.so.cache, .*; there are libraries of "
    )
    with pytest.raises(NvhookError, match=f"{expected}{NEWER}; capability `compute` needs it"):
        selection.select(found, Request(None, ("compute",)))


@pytest.mark.parametrize("left", [NEWER, "550.90.07"])
def test_what_is_still_there_of_the_loaded_version_is_used(tmp_path: Path, left: str) -> None:
    found = look(build(tmp_path, Host(leftover=left)))
    assert found["other_versions"] == [left]
    assert by_name(found, f"libcuda.so.{RELEASE}")["soname"] == "libcuda.so.1"
    assert not any(left in item["path"] for item in found["libraries"])


# --- nothing


def with_control_node(found: dict[str, Any]) -> dict[str, Any]:
    """The node that a spec needs, which takes root to make."""
    found["nodes"] = [{"role": "control", "path": "/dev/nvidiactl", "host_path": "/dev/nvidiactl", "mode": 0, "gid": 0}]
    return found


@pytest.mark.parametrize("prefix", ["", "/drv"])
def test_every_place_that_was_searched_is_listed(tmp_path: Path, prefix: str) -> None:
    host = build(tmp_path, Host(driver_root=prefix or "/", dev_root=prefix or "/"))
    for one in host.libraries:
        host.path(one.path).unlink()
    found = look(host, driver_root=prefix or None, library_search_path=("/srv/none",))
    (text,) = [text for text in found["warnings"] if "no library" in text]
    inside = ("/usr/lib/x86_64-linux-gnu", "/usr/lib64", "/run/opengl-driver/lib", "/usr/local/glibc/usr/lib")
    for place in ("/srv/none", *(prefix + folder for folder in inside), f"the folders of {prefix}/etc/ld.so.cache"):
        assert place in found["searched"] and place in text
    assert len(found["searched"]) == len(set(found["searched"]))
    with_control_node(found)
    with pytest.raises(NvhookError) as caught:
        generate.make(found, HOOK)
    assert caught.value.what == text and "--driver-root" in caught.value.remedy


def test_a_32_bit_driver_alone_is_nothing(tmp_path: Path) -> None:
    """And every place is listed then too."""
    host = build(tmp_path, Host(i386=True))
    shutil.rmtree(host.path("/usr/lib/x86_64-linux-gnu"))
    found = with_control_node(look(host))
    assert found["libraries"] == []
    with pytest.raises(NvhookError, match=f"of the loaded driver {RELEASE} was found in the folders of .*/usr/lib64, "):
        generate.make(found, HOOK)


def test_without_libraries_of_a_capability(tmp_path: Path) -> None:
    """Where the driver is complete as far as it goes, no place is to blame."""
    found = with_control_node(look(build(tmp_path, Host(graphics=False))))
    found["libraries"] = [item for item in found["libraries"] if item["capability"] != "ngx"]
    with pytest.raises(NvhookError, match=r"^the driver has no library for the capabilities ngx$"):
        generate.make(found, HOOK, generate.Options(capabilities=("ngx",)))


@pytest.mark.parametrize(
    ("soname", "capability", "other"),
    [("libcuda.so.1", "compute", "utility"), ("libnvidia-ml.so.1", "utility", "compute")],
)
def test_a_driver_without_what_a_capability_needs(tmp_path: Path, soname: str, capability: str, other: str) -> None:
    """A second driver's files, and what is left of the loaded one's, do not make up for it."""
    left = "550.90.07"
    host = build(tmp_path, Host(i386=True, leftover=left))
    host.library(soname).unlink()
    found = with_control_node(look(host))
    with pytest.raises(NvhookError) as caught:
        generate.make(found, HOOK)
    assert caught.value.what.startswith(f"no {soname} of the loaded driver {RELEASE} was found in the folders of /etc/")
    instead = f"; there are libraries of {left}; capability `{capability}` needs it"
    assert "/usr/lib/x86_64-linux-gnu, " in caught.value.what and caught.value.what.endswith(instead)
    assert f"load that of {left}" in caught.value.remedy
    found["gpus"] = []
    with pytest.raises(NvhookError, match="no GPU to generate a spec for"):
        # Past the libraries, for who does not ask for it.
        generate.make(found, HOOK, generate.Options(capabilities=(other,)))


@needs_root
def test_a_spec_without_libcuda_is_not_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One file of the loaded driver in vdpau's folder does not make it a driver; for utility alone all is well."""
    description = Host(leftover="550.90.07")
    host = build(tmp_path / "host", description)
    output = tmp_path / "cdi/nvidia.yaml"
    words = ["generate", "--host-root", str(host.root), "--hook-path", HOOK, "--output", str(output)]
    host.library("libcuda.so.1").unlink()
    assert cli.main(words) == 1
    assert "nvhook: error: no libcuda.so.1 of the loaded driver 580.159.04 was found" in capsys.readouterr().err
    assert not output.exists()
    for path in host.path(host.library_folder).glob("*.550.90.07"):
        path.unlink()
    assert cli.main(words) == 1
    assert "  remedy: install all of the driver 580.159.04, or give --library-search-path\n" in capsys.readouterr().err
    assert cli.main([*words, "--capabilities", "utility"]) == 0
    assert cli.main([*words, "--mode", "management", "--output", str(tmp_path / "cdi/management.yaml")]) == 0
    build(host.root, description)
    for one in host.libraries:
        if "vdpau" not in one.path:
            host.path(one.path).unlink(missing_ok=True)
    capsys.readouterr()
    for mode in ("nvml", "management"):
        assert cli.main([*words, "--mode", mode]) == 1
        assert "; there are libraries of 550.90.07; capability `" in capsys.readouterr().err


def test_a_dangling_store_is_nothing(tmp_path: Path) -> None:
    """After the store's garbage collection the links lead nowhere."""
    host = build(tmp_path, Host(layout="nixos", cache=False))
    os.rename(host.path(platforms.STORE), host.path("/nix/gone"))
    found = look(host)
    assert found["libraries"] == [] and "/run/opengl-driver/lib" in found["searched"]
