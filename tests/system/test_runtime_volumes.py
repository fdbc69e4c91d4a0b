# SPDX-License-Identifier: Apache-2.0
"""Volumes, and the runtime that has files, mounts and nodes of ours made by the low-level one: none is the host's."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import simhost
from tests.needs import needs_program
from tests.simhost import SimulatedHost
from tests.system.prestart import MULTIARCH, HostMounts, tree_of, visible
from tests.system.shim import Shim, config, gpus

pytestmark = needs_program("runc")


@pytest.fixture
def shim(prefix: Path, host: SimulatedHost, tmp_path: Path) -> Shim:
    return Shim(prefix, host, tmp_path)


def volume(source: Path, destination: str, *options: str) -> dict[str, Any]:
    """A bind mount as an engine writes it."""
    return {"destination": destination, "type": "bind", "source": str(source), "options": ["rbind", "rw", *options]}


@pytest.fixture
def shared(tmp_path: Path) -> Iterator[Path]:
    """A folder of the host's whose mounts are handed on, as most are under systemd."""
    folder = tmp_path / "shared"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "nvhook-test", str(folder)], check=True)
    subprocess.run(["mount", "--make-shared", str(folder)], check=True)
    yield folder
    subprocess.run(["umount", "-R", "-l", str(folder)], check=True)


RSHARED = {"rootfsPropagation": "rshared"}
SMI = "left out: /usr/bin/nvidia-smi in the container is in a"


@pytest.mark.parametrize("place", ["/link/nvidia-smi", "/usr/bin/./nvidia-smi", "/proc/1/root/./usr/bin/nvidia-smi"])
def test_a_hosts_file_is_not_covered(shim: Shim, shared: Path, place: str) -> None:
    """One that is mounted right where ours belongs, by another name, and hands mounts on."""
    (shared / "passwd").write_text("root\n")
    mounts = HostMounts(shared)
    bundle = shim.bundle("true", env=visible("0", "utility"), linux=RSHARED)
    (bundle.root / "link").symlink_to("usr/bin")
    bundle.mounts = [volume(shared / "passwd", place, "rshared")]
    done = shim.run(bundle)
    assert mounts.changed() == [] and (shared / "passwd").read_text() == "root\n"
    assert "in a volume with rshared propagation" in done.stderr or "can't be told where /proc/1" in done.stderr


def test_a_hosts_file_where_a_link_of_ours_belongs(shim: Shim, shared: Path) -> None:
    """The runtime would follow our link, and our library be mounted on top: links are left to the hook, which looks."""
    (shared / "library").write_text("theirs\n")
    mounts = HostMounts(shared)
    bundle = shim.bundle("true", env=visible("0"), linux=RSHARED)
    bundle.mounts = [volume(shared / "library", f"{MULTIARCH}/libcuda.so.1", "rshared")]
    done = shim.run(bundle)
    assert mounts.changed() == [] and (shared / "library").read_text() == "theirs\n"
    assert done.returncode == 1 and "libcuda.so.1 in the container is in a volume with rshared propag" in done.stderr


@pytest.mark.parametrize("place", ["/usr/bin/nvidia-smi", "/usr/bin/./nvidia-smi"])
def test_ours_is_seen_where_a_file_of_the_users_is_mounted(shim: Shim, place: str) -> None:
    """A private mount by the name of a driver's file is no reason to go without."""
    (shim.folder / "theirs").write_text("theirs\n")
    bundle = shim.bundle("wc -c < /usr/bin/nvidia-smi", env=visible("0"))
    bundle.mounts = [volume(shim.folder / "theirs", place, "rprivate")]
    assert shim.output(bundle) == [str((shim.host.root / "usr/bin/nvidia-smi").stat().st_size)]
    assert (shim.folder / "theirs").read_text() == "theirs\n"


def test_ours_is_seen_where_a_link_of_ours_belongs(shim: Shim) -> None:
    """The hook covers such a mount, as it covers a file of the image."""
    (shim.folder / "theirs").write_text("theirs\n")
    bundle = shim.bundle("resolve -s libcuda.so.1", env=visible("0"))
    bundle.mounts = [volume(shim.folder / "theirs", f"{MULTIARCH}/libcuda.so.1", "rprivate")]
    status = shim.host.library("libcuda.so.1").stat()
    assert [line.split()[-1] for line in shim.output(bundle)] == [f"{status.st_dev}:{status.st_ino}"]
    assert (shim.folder / "theirs").read_text() == "theirs\n"


@pytest.mark.parametrize("propagation", ["rprivate", "rshared"])
@pytest.mark.parametrize("target", ["/usr/bin", "../usr/bin", "/v/other/x"])
def test_a_link_in_a_volume(shim: Shim, shared: Path, target: str, propagation: str) -> None:
    """It leads the next volume to /usr/bin, where the runtime would make files of ours in it."""
    for name in ("first/other", "second"):
        (shared / name).mkdir(parents=True)
    (shared / "first/link").symlink_to(target)
    (shared / "first/other/x").symlink_to("/usr/bin")
    mounts, before = HostMounts(shared), tree_of(shared)
    bundle = shim.bundle("true", env=visible("0"), linux=RSHARED if propagation == "rshared" else {})
    bundle.mounts = [volume(shared / "first", "/v"), volume(shared / "second", "/v/link", propagation)]
    done = shim.run(bundle)
    assert (mounts.changed(), tree_of(shared)) == ([], before)
    assert f"{SMI} mount from elsewhere" in done.stderr


def test_an_images_link_through_a_volume(shim: Shim) -> None:
    """The image has a link there too, which the volume will hide: it says where nothing will be."""
    outer = shim.folder / "outer"
    (outer / "cache").mkdir(parents=True)
    bundle = shim.bundle("true", env=visible("0"))
    (bundle.root / "usr/bin").rename(bundle.root / "usr/bin.aside")
    (bundle.root / "usr/bin").symlink_to("/data/cache")
    (bundle.root / "data").mkdir()
    (bundle.root / "data/cache").symlink_to("/usr/bin.aside")
    bundle.mounts = [volume(outer, "/data")]
    before = tree_of(outer)
    done = shim.run(bundle)
    assert tree_of(outer) == before
    assert f"{SMI} mount from elsewhere" in done.stderr


def test_what_no_look_can_tell(shim: Shim) -> None:
    """An overlay of the engine's can't be looked into: a volume below it may be anywhere, so nothing is made."""
    for name in ("lower", "upper", "work", "second"):
        (shim.folder / name).mkdir()
    (shim.folder / "lower/link").symlink_to("/usr/bin")
    layers = [f"{name}dir={shim.folder}/{name}" for name in ("lower", "upper", "work")]
    overlay = {"destination": "/v", "type": "overlay", "source": "overlay", "options": layers}
    bundle = shim.bundle("true", env=visible("0"))
    bundle.mounts = [overlay, volume(shim.folder / "second", "/v/link")]
    done = shim.run(bundle)
    assert list((shim.folder / "second").iterdir()) == []
    assert done.returncode == 1 and "it can't be told where /v/link leads" in done.stderr


def test_volumes_in_volumes_are_no_reason(shim: Shim) -> None:
    """Ordinary ones, one below the other, a link of the first followed."""
    for name in ("first/real", "second", "third"):
        (shim.folder / name).mkdir(parents=True)
    (shim.folder / "first/link").symlink_to("real")
    (shim.folder / "second/seen").touch()
    bundle = shim.bundle("resolve libcuda.so.1; ls /v/real", env=visible("0"))
    tmpfs = {"destination": "/t", "type": "tmpfs", "source": "tmpfs", "options": ["mode=755"]}
    bundle.mounts = [volume(shim.folder / "first", "/v"), volume(shim.folder / "second", "/v/link"), tmpfs]
    bundle.mounts.append(volume(shim.folder / "third", "/t/a/b"))
    assert shim.output(bundle) == [f"libcuda.so.1 {MULTIARCH}/libcuda.so.1", "seen"]


# Nodes

CHANNELS = "/dev/nvidia-caps-imex-channels"


@pytest.fixture
def graphic(prefix: Path, tmp_path: Path) -> Iterator[Shim]:
    """A host with DRM nodes and IMEX channels."""
    modules = ("nvidia", "nvidia_uvm", "nvidia_modeset", "nvidia_drm")
    built = simhost.build(tmp_path / "host", simhost.Host(gpus=simhost.gpus(1), modules=modules, imex=(0, 1)))
    yield Shim(prefix, built, tmp_path)
    built.close()


def test_nodes_that_a_gpu_works_without_are_left_out_of_a_volume(graphic: Shim) -> None:
    """The low-level runtime would make them on the host's disk."""
    folder = graphic.folder / "volume"
    folder.mkdir()
    bundle = graphic.bundle("ls -d /dev/nvidia0", env=visible("0", "all"))
    bundle.mounts = [volume(folder, "/dev/dri")]
    done = graphic.run(bundle)
    assert list(folder.iterdir()) == []
    assert done.stdout == "/dev/nvidia0\n", done.stderr
    assert "left out: /dev/dri/card0 in the container is in a mount from elsewhere" in done.stderr
    rules = config(bundle)["linux"]["resources"]["devices"]
    assert not [rule for rule in rules if rule.get("major") == 226]


@pytest.mark.parametrize("place", [CHANNELS, "/dev/./nvidia-caps-imex-channels", "/dev"])
def test_nodes_that_are_needed_are_not_made_in_a_volume(graphic: Shim, place: str) -> None:
    folder = graphic.folder / "volume"
    folder.mkdir()
    bundle = graphic.bundle("true", env=visible("0") | {"NVIDIA_IMEX_CHANNELS": "0"})
    bundle.mounts = [volume(folder, place)]
    done = graphic.run(bundle)
    assert list(folder.iterdir()) == []
    assert done.returncode == 1 and "is in a mount from elsewhere; nvhook makes no files in it" in done.stderr


def test_a_link_of_the_image_leads_no_node_into_a_volume(graphic: Shim) -> None:
    """A container without a /dev of its own has the image's."""
    folder = graphic.folder / "volume"
    folder.mkdir()
    bundle = graphic.bundle("true", env=visible("0", "all"))
    (bundle.root / "dev").mkdir(exist_ok=True)
    (bundle.root / "dev/dri").symlink_to("/data")
    bundle.mounts = [volume(folder, "/data")]
    bundle.write()
    path = bundle.folder / "config.json"
    given = config(bundle)
    given["mounts"] = [mount for mount in given["mounts"] if not mount["destination"].startswith("/dev")]
    path.write_text(json.dumps(given))
    done = graphic.call(bundle, "run", "--bundle", str(bundle.folder), bundle.name)
    assert list(folder.iterdir()) == []
    assert "left out: /dev/dri/card0 in the container is in a mount from elsewhere" in done.stderr


@pytest.mark.parametrize("place", ["/dev", "/dev/dri", "/dev/dri/card0", "/dev/nvidia0"])
def test_the_hosts_own_nodes_are_no_reason(graphic: Shim, place: str) -> None:
    """`-v /dev:/dev`, as privileged containers have it, or a part of it: all is there, and rules let it be opened."""
    bundle = graphic.bundle("ls /dev/nvidia0 /dev/dri/card0", env=visible("0", "all"))
    bundle.mounts = [volume(graphic.host.path(place), place)]
    before = tree_of(graphic.host.path("/dev"))
    done = graphic.run(bundle)
    assert tree_of(graphic.host.path("/dev")) == before
    assert (done.stdout.split(), done.stderr) == (["/dev/dri/card0", "/dev/nvidia0"], "")
    assert {"/dev/nvidia0", "/dev/nvidiactl"} <= gpus(config(bundle))
