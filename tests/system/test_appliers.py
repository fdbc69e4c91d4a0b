# SPDX-License-Identifier: Apache-2.0
"""A container gets the same by whichever way: the same nodes, and the same host file for each soname.

And what each way of a CDI file is for: any image with the hook, the images of its layout without.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cdi import capabilities
from hook import install
from tests import roots
from tests.containers import Bundle, hook
from tests.needs import needs_path, needs_program
from tests.simhost import Host, SimulatedHost, build, elfwriter, gpus
from tests.simhost.tree import ldconfig
from tests.system import runtimes
from tests.system.prestart import output, proc_hook, visible
from tests.system.shim import config
from tests.system.ways import NAMES, Ways, identities

pytestmark = needs_program("runc")

EVERYTHING = "compute,display,graphics,ngx,utility,video"
NODES = "find /dev -name 'nvidia*' -type c -o -path '/dev/dri/*' -type c | sort | xargs stat -c '%n %t:%T %a %u:%g'"
DROP_IN = "etc/ld.so.conf.d/00-nvhook.conf"


def sonames(host: SimulatedHost, wanted: Callable[[str], bool] = bool) -> list[str]:
    """Of the host's 64-bit libraries."""
    return sorted({one.soname for one in host.libraries if one.bits == 64 and wanted(one.soname)})


def seen(bundle: Bundle, names: list[str]) -> tuple[list[str], dict[str, str]]:
    """The nodes that a container has, and the file that its loader opens for each name."""
    lines = output(bundle).splitlines()
    at = lines.index("--")
    found = dict(line.split()[::2] for line in lines[at + 1 :])
    assert set(found) == set(names)
    return lines[:at], found


@pytest.mark.parametrize("devices", ["all", "1"])
@pytest.mark.parametrize("names", [EVERYTHING, "compute,utility"])
def test_every_way_gives_the_same(ways: Ways, devices: str, names: str) -> None:
    """Each in a fresh root: nodes with numbers, modes and owners; device and inode behind each soname."""
    groups = capabilities.groups(tuple(names.split(",")))
    only_compute = "graphics" not in groups
    loaded = ["libcuda.so.1", "libnvidia-ml.so.1", "libnvidia-ptxjitcompiler.so.1"]
    wanted = loaded if only_compute else sonames(ways.host)
    script = f"{NODES}; echo --; resolve -s {' '.join(wanted)} libcuda.so"
    expected = [*wanted, "libcuda.so"]
    by_hook = seen(ways.prestart(ways.image("debian"), script, devices, names), expected)
    chosen = ["--capabilities", names]
    assert seen(ways.file(ways.image("debian"), script, *chosen, devices=devices), expected) == by_hook
    for layout in ("debian", "both"):
        plain = ways.file(ways.image("debian"), script, *chosen, "--no-hooks", "--layout", layout, devices=devices)
        assert "createContainer" not in json.dumps(plain.edits)
        assert seen(plain, expected) == by_hook
    # And it is the host's file, and nothing else's node.
    status = ways.host.library("libcuda.so.1").stat()
    assert by_hook[1]["libcuda.so.1"] == by_hook[1]["libcuda.so"] == f"{status.st_dev}:{status.st_ino}"
    assert {line.split()[0] for line in by_hook[0] if line.split()[0][-1].isdigit() and "dri" not in line} == (
        {"/dev/nvidia0", "/dev/nvidia1"} if devices == "all" else {"/dev/nvidia1"}
    )


@pytest.mark.parametrize("flavour", ["debian", "lib64", "fedora", "centos7", "arch", "distroless", "busybox", "alpine"])
@pytest.mark.parametrize("readonly", [False, True])
def test_the_hook_in_every_kind_of_image(ways: Ways, flavour: roots.Flavour, readonly: bool) -> None:
    """The host is Debian's, so that other images get a folder that they don't know."""
    if flavour == "alpine" and not Path("/lib/ld-musl-x86_64.so.1").exists():
        pytest.skip("needs the package musl")
    image = ways.image(flavour)
    bundle = ways.file(image, "", readonly=readonly)
    bundle.arguments = ["resolve", "-s", *NAMES]
    assert [line.split()[-1] for line in output(bundle).splitlines()] == identities(ways.host)
    assert ways.report.read_text() == ""


def test_the_hook_in_an_image_of_one_program(ways: Ways) -> None:
    image = ways.image("scratch")
    bundle = ways.file(image, "")
    (library,) = [m for m in bundle.config()["mounts"] if "/libcuda.so." in m["destination"]]
    link = f"{library['destination'].rpartition('/')[0]}/libcuda.so"
    bundle.arguments = ["/busybox", "stat", "-L", "-c", "%d:%i", link]
    assert output(bundle).split() == identities(ways.host)[:1]


@pytest.mark.parametrize(
    ("flavour", "layout"),
    [
        ("debian", "debian"),
        ("debian", "both"),
        ("distroless", "debian"),
        ("fedora", "lib64"),
        ("fedora", "both"),
        ("arch", "both"),
        pytest.param("alpine", "musl", marks=needs_path("/lib/ld-musl-x86_64.so.1")),
    ],
)
def test_no_hook_in_the_images_of_its_layout(ways: Ways, flavour: roots.Flavour, layout: str) -> None:
    """The image's own loader finds each name, and no file of the image is changed: placeholders are all there is."""
    image = ways.image(flavour)
    cache = image / "etc/ld.so.cache"
    before = cache.read_bytes() if cache.exists() else None
    bundle = ways.file(image, "", "--no-hooks", "--layout", layout)
    bundle.arguments = ["resolve", "-s", *NAMES]
    assert [line.split()[-1] for line in output(bundle).splitlines()] == identities(ways.host)
    assert (cache.read_bytes() if cache.exists() else None) == before
    assert not (image / DROP_IN).exists()
    if flavour in ("debian", "fedora"):
        # What a package installation in the container does.
        bundle = ways.file(image, f"ldconfig && resolve -s {' '.join(NAMES)}", "--no-hooks", "--layout", layout)
        assert [line.split()[-1] for line in output(bundle).splitlines()] == identities(ways.host)


def test_no_hook_and_an_image_with_a_driver_in_its_cache(ways: Ways) -> None:
    """What the notes say it can't do, and the hook can."""
    image = ways.image("debian")
    own = image / "opt/image/lib/libcuda.so.1"
    own.write_bytes(elfwriter.shared_object("libcuda.so.1"))
    ldconfig("-r", str(image))
    lines = output(ways.file(image, "resolve libcuda.so.1", "--no-hooks")).split()
    assert lines == ["libcuda.so.1", "/opt/image/lib/libcuda.so.1"]
    assert output(ways.file(image, "resolve -s libcuda.so.1")).split()[-1] == identities(ways.host)[0]


def test_32_bit_twins(ways: Ways) -> None:
    """For whoever asks for them, in the folder of the layout."""
    bundle = ways.file(ways.image("debian"), "true", "--no-hooks", "--capabilities", "compute,compat32")
    places = {mount["destination"] for mount in bundle.config()["mounts"]}
    assert {"/usr/lib/i386-linux-gnu/libcuda.so.1", "/usr/lib/libcuda.so.1", "/usr/lib64/libcuda.so.1"} <= places


@pytest.mark.long
@pytest.mark.parametrize("flavour", ["debian", "lib64", "fedora", "centos7", "arch", "alpine", "distroless", "busybox"])
@pytest.mark.parametrize("readonly", [False, True])
def test_crun(tmp_path: Path, prefix: Path, debian_13: Path, flavour: roots.Flavour, readonly: bool) -> None:
    """Which tells the root besides, and up to 1.25 makes a root read-only before its createContainer hooks."""
    host = build(tmp_path / "host", Host())
    ways = Ways(tmp_path, prefix, host)
    bundle = ways.file(ways.image(flavour), "", readonly=readonly)
    bundle.arguments = ["resolve", "-s", *NAMES]
    bundle.prestart = [hook(runtimes.PYTHON, *proc_hook()["args"][1:])]
    for entry in (entry for block in bundle.edits for entry in block.get("hooks", [])):
        at = entry["args"].index(str(prefix / "bin/nvhook-create-container"))
        entry |= runtimes.in_debian_13("create_container", *entry["args"][at + 1 :])
    done = runtimes.run(debian_13, bundle, "crun")
    assert [line.split()[-1] for line in done.stdout.splitlines()] == identities(host), done.stdout + done.stderr


USER = ("pid", "mount", "ipc", "uts", "user", "network")


@pytest.mark.parametrize("way", ["hook", "no hook"])
def test_a_user_namespace(ways: Ways, way: str) -> None:
    """The hook runs in it, and what it makes belongs to the container's root. Nodes are mounts, as rootless podman
    makes them."""
    image = ways.image("debian")
    for path in (image, *image.rglob("*")):
        os.chown(path, 100000, 100000, follow_symlinks=False)
    for folder in (image, ways.host.root, ways.prefix, ways.folder):
        for path in [folder, *folder.parents][:-1]:
            path.chmod(path.stat().st_mode | 0o011)
    ways.report.touch()
    ways.report.chmod(0o666)
    mapping = [{"containerID": 0, "hostID": 100000, "size": 65536}]
    words = ["--no-hooks", "--layout", "debian"] if way == "no hook" else []
    script = f"resolve -s {' '.join(NAMES)}; stat -c %u {PROFILE} /etc/ld.so.cache; ls /dev | grep nvidia1"
    others: dict[str, Any] = {"namespaces": USER, "linux": {"uidMappings": mapping, "gidMappings": mapping}}
    bundle = ways.file(image, f"{{ {script}; }} 2>/dev/null", *words, **others)
    launcher = str(ways.prefix / "bin/nvhook-create-container")
    for entry in (entry for block in bundle.edits for entry in block.get("hooks", [])):
        start = [python_for_all(), "-I", "-S", "-B", str(ways.prefix / "lib/nvhook/bin/entry"), "create-container"]
        at = entry["args"].index(launcher)
        entry["args"][at : at + 1] = start
    for block in bundle.edits:
        block["mounts"] = block.get("mounts", []) + [
            {"hostPath": node["hostPath"], "containerPath": node["path"], "options": ["bind", "rprivate"]}
            for node in block.pop("deviceNodes", [])
        ]
    done = bundle.run()
    lines = done.stdout.splitlines()
    said = ways.report.read_text()
    assert [line.split()[-1] for line in lines[:4]] == identities(ways.host), done.stdout + done.stderr + said
    assert lines[4:] == (["0", "0", "nvidia1"] if way == "hook" else ["0", "nvidia1"])
    assert said == ""


def python_for_all() -> str:
    """This version of Python where every user can start it; a developer's own is closed to a user namespace."""
    wanted = f"python{sys.version_info.major}.{sys.version_info.minor}"
    for path in (Path(install.interpreter()), Path("/usr/bin", wanted)):
        if path.exists() and all(folder.stat().st_mode & 0o001 for folder in path.parents):
            return str(path)
    pytest.skip(f"needs {wanted} in a folder that is open to all")


# The hook's parts


MASKED = "cat /proc/driver/nvidia/params; ls /proc/driver/nvidia/gpus"
PROFILE = "/etc/nvidia/nvidia-application-profiles-rc.d/10-container.conf"


def test_the_mask_and_the_profile(ways: Ways) -> None:
    """As prestart's mask: params and the container's own GPU."""
    gpu = ways.host.host.gpus[1]
    text = output(ways.file(ways.image("debian"), f"{MASKED}; cat {PROFILE}", devices="1"))
    lines = text.splitlines()
    assert "ModifyDeviceFiles: 0" in lines and "ModifyDeviceFiles: 1" not in lines
    assert [line for line in lines if line.startswith("0000:")] == [gpu.bus_id]
    assert json.loads(lines[-1].replace("0x2", "2")) == {
        "profiles": [{"name": "_container_", "settings": ["EGLVisibleDGPUDevices", 2]}],
        "rules": [{"pattern": [], "profile": "_container_"}],
    }
    by_hook = ways.prestart(ways.image("debian"), f"{MASKED}; cat {PROFILE}", "1", EVERYTHING)
    assert output(by_hook).splitlines() == lines
    # The runtime makes the same file without a hook, and no mask.
    shim = ways.shim
    bundle = shim.bundle(f"cat {PROFILE}", env=visible("1", EVERYTHING))
    assert shim.output(bundle) == lines[-1:]
    assert config(bundle)["hooks"]["createContainer"] == []


def test_all_gpus_in_the_profile(ways: Ways) -> None:
    image = ways.image("debian")
    assert '"EGLVisibleDGPUDevices", 0x3]' in output(ways.file(image, f"cat {PROFILE}"))
    # One of an earlier container, which was committed, is written anew.
    assert '"EGLVisibleDGPUDevices", 0x1]' in output(ways.file(image, f"cat {PROFILE}", devices="0"))


@pytest.mark.parametrize("part", ["proc-mask", "disable-device-node-modification", "unmasked"])
def test_no_mask(ways: Ways, part: str) -> None:
    """Left out of the file, or in a container with nothing masked below /proc."""
    unmasked = part == "unmasked"
    words = [] if unmasked else ["--disable-hook", part]
    others: dict[str, Any] = {"masked_paths": ()} if unmasked else {}
    script = "ls /proc/driver/nvidia; grep -c ' /proc/driver/nvidia ' /proc/self/mountinfo || true"
    assert output(ways.file(ways.image("debian"), script, *words, **others)).split() == ["0"]


def test_without_graphics_there_is_no_profile(ways: Ways) -> None:
    script = f"cat {PROFILE} || echo none"
    assert output(ways.file(ways.image("debian"), script, "--capabilities", "compute,utility")) == "none\n"
    assert output(ways.prestart(ways.image("debian"), script, "all", "compute,utility")) == "none\n"
    bundle = ways.shim.bundle(f"test -e {PROFILE} || echo none", env=visible("all", "compute,utility"))
    assert ways.shim.output(bundle) == ["none"]


def in_the_way(ways: Ways) -> Path:
    """An image that has a file where the profile's folder belongs."""
    image = ways.image("debian")
    (image / "etc/nvidia").write_text("the image's own")
    return image


def test_a_start_does_without_the_profile(ways: Ways) -> None:
    """It can't be made; the GPU is there by each way, and the runtime says why where somebody looks."""
    script = "cat /etc/nvidia; resolve libcuda.so.1"
    expected = ["the image's ownlibcuda.so.1 /usr/lib/x86_64-linux-gnu/libcuda.so.1"]
    assert output(ways.prestart(in_the_way(ways), script, "0", EVERYTHING)).splitlines() == expected
    assert output(ways.file(in_the_way(ways), script, devices="0")).splitlines() == expected
    assert (
        f"left out: cannot make {PROFILE} in the container: the image has a file where a folder belongs"
        in ways.report.read_text()
    )
    shim = ways.shim
    done = shim.run(shim.bundle(script, root=in_the_way(ways), env=visible("0", EVERYTHING)))
    assert (done.returncode, done.stdout.splitlines()) == (0, expected)
    assert (
        f"left out: cannot make {PROFILE} in the container: the image has a file where a folder belongs" in done.stderr
    )


def test_a_volume_hides_the_profile(ways: Ways) -> None:
    """No hook for its sake, and nothing of ours in the volume."""
    volume = ways.folder / "volume"
    volume.mkdir()
    shim = ways.shim
    bundle = shim.bundle("resolve libcuda.so.1", env=visible("0", EVERYTHING))
    bundle.mounts = [{"destination": "/etc/nvidia", "type": "bind", "source": str(volume), "options": ["rbind", "rw"]}]
    done = shim.run(bundle)
    assert done.returncode == 0 and "libcuda.so.1 /usr" in done.stdout
    assert f"left out: {PROFILE}: config.json mounts something on /etc/nvidia" in done.stderr
    assert config(bundle)["hooks"]["createContainer"] == []
    assert list(volume.iterdir()) == []


@pytest.mark.parametrize(
    ("env", "what"),
    [
        ({"NVIDIA_REQUIRE_CUDA": "cuda>=99.0"}, "NVIDIA_REQUIRE_CUDA is not met by the driver of GPU 0: cuda>=99.0"),
        ({"CUDA_VERSION": "99.0"}, "CUDA_VERSION is not met by the driver of GPU 0: cuda>=99.0 (cuda is 13.0)"),
        ({"NVIDIA_REQUIRE_CUDA": "cuda>=12.0"}, ""),
        ({"NVIDIA_REQUIRE_CUDA": "cuda>=99.0", "NVIDIA_DISABLE_REQUIRE": "1"}, ""),
        ({"NVIDIA_REQUIRE_DRIVER": "driver>=999"}, "NVIDIA_REQUIRE_DRIVER is not met"),
    ],
)
def test_what_the_image_requires(ways: Ways, env: dict[str, str], what: str) -> None:
    done = ways.file(ways.image("debian"), "true", env=env).run()
    assert (done.returncode == 0) == (not what)
    assert what in ways.report.read_text()


def test_a_requirement_that_the_file_does_not_tell_is_a_warning(ways: Ways) -> None:
    """NVML alone tells an architecture, and it was not asked where the kernel knew all UUIDs."""
    # Another test may have had it asked, and what it told is kept.
    (ways.host.root / "run/nvhook/inventory.json").unlink(missing_ok=True)
    output(ways.file(ways.image("debian"), "true", "--nvml", "never", env={"NVIDIA_REQUIRE_ARCH": "arch>=9.0"}))
    assert "NVIDIA_REQUIRE_ARCH is not checked: the CDI file does not tell the GPUs' arch" in ways.report.read_text()


def test_a_requirement_on_the_architecture(ways: Ways) -> None:
    """Of a file for which NVML was asked."""
    for expression, code in (("arch>=9.0", 0), ("arch>=99.0", 1)):
        env = {"NVIDIA_REQUIRE_ARCH": expression}
        assert ways.file(ways.image("debian"), "true", "--nvml", "facts", env=env).run().returncode == code
    assert "NVIDIA_REQUIRE_ARCH is not met by the driver of GPU 0: arch>=99.0 (arch is 9.0)" in ways.report.read_text()


@pytest.mark.parametrize("judged", ["warn", "off"])
def test_the_configuration_at_generation_counts(tmp_path: Path, prefix: Path, judged: str) -> None:
    host = build(tmp_path / "host", Host(gpus=gpus(1)))
    host.path("/etc/nvhook").mkdir(parents=True)
    host.path("/etc/nvhook/config.toml").write_text(f'[compat]\nrequirements = "{judged}"\n')
    ways = Ways(tmp_path, prefix, host)
    output(ways.file(ways.image("debian"), "true", env={"NVIDIA_REQUIRE_CUDA": "cuda>=99.0"}))
    assert ("is not met" in ways.report.read_text()) == (judged == "warn")
