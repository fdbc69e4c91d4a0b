# SPDX-License-Identifier: Apache-2.0
"""`nvhook prestart` in real runc containers, on the simulated host."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests import roots
from tests.containers import Bundle, Hook, hook
from tests.needs import needs_program
from tests.simhost import SimulatedHost
from tests.system.conftest import MakeBundle
from tests.system.prestart import MULTIARCH, HostMounts, allowed, nvhook, output, proc_hook, reported, tree_of, visible

pytestmark = needs_program("runc")

FAILURE_HOOK = Path(__file__).with_name("failurehook.py")

# What every container can do with its default nodes, before and after us.
DEFAULT_NODES = """
echo x > /dev/null && echo null-ok
head -c 1 /dev/zero > /dev/null && head -c 1 /dev/urandom > /dev/null && echo random-ok
exec 3<>/dev/ptmx && ls /dev/pts | grep -q "^[0-9]" && echo pty-ok
mknod /tmp/fifo p && mknod /tmp/node c 1 3 && echo mknod-ok
"""

TRY_NODES = """
for minor in 0 1; do
  test -e /dev/nvidia$minor || mknod /dev/nvidia$minor c 195 $minor
  echo "nvidia$minor: $(cat /dev/nvidia$minor 2>&1)"
done
"""


def test_the_main_job(prefix: Path, host: SimulatedHost, make_bundle: MakeBundle, cgroup: str) -> None:
    script = f"""
        stat -L -c "libcuda %d:%i" {MULTIARCH}/libcuda.so.1
        readlink -f {MULTIARCH}/libcuda.so
        resolve -s libcuda.so.1 libcuda.so libnvidia-ml.so.1
        resolve libimage.so.1
        nvidia-smi -L
        ls -l {MULTIARCH}/libnvcuvid* 2>/dev/null
        {DEFAULT_NODES} {TRY_NODES}
    """
    bundle = make_bundle(script, env=visible("all"), prestart=nvhook(prefix, host), cgroup=cgroup)
    lines = output(bundle).splitlines()
    status = host.library("libcuda.so.1").stat()
    identity = f"{status.st_dev}:{status.st_ino}"
    assert lines[0] == f"libcuda {identity}"
    assert lines[1] == f"{MULTIARCH}/libcuda.so.580.159.04"
    assert [line.split()[-1] for line in lines[2:4]] == [identity, identity]
    assert lines[5] == f"libimage.so.1 {roots.IMAGE_FOLDER}/libimage.so.1"
    assert [line for line in lines if line.startswith("GPU ")] == [
        f"GPU {gpu.minor}: {gpu.name} (UUID: {gpu.uuid})" for gpu in host.host.gpus
    ]
    assert not any("libnvcuvid" in line for line in lines)
    for word in ("null-ok", "random-ok", "pty-ok", "mknod-ok"):
        assert word in lines
    assert [allowed(lines, minor) for minor in (0, 1)] == [True, True]


def test_without_a_request_nothing_happens(
    prefix: Path, host: SimulatedHost, make_bundle: MakeBundle, cgroup: str
) -> None:
    hooks = nvhook(prefix, host)
    bundle = make_bundle(DEFAULT_NODES + TRY_NODES, prestart=hooks, cgroup=cgroup)
    before = tree_of(bundle.root)
    lines = output(bundle).splitlines()
    assert [allowed(lines, minor) for minor in (0, 1)] == [False, False]
    for name in ("tmp/fifo", "tmp/node"):
        (bundle.root / name).unlink()
    assert tree_of(bundle.root) == before


def test_one_gpu_of_two(prefix: Path, host: SimulatedHost, make_bundle: MakeBundle, cgroup: str) -> None:
    script = TRY_NODES + "ls /proc/driver/nvidia/gpus; grep ModifyDeviceFiles /proc/driver/nvidia/params; nvidia-smi -L"
    gpu = host.host.gpus[1]
    bundle = make_bundle(script, env=visible(gpu.uuid), prestart=nvhook(prefix, host), cgroup=cgroup)
    lines = output(bundle).splitlines()
    assert [allowed(lines, minor) for minor in (0, 1)] == [False, True]
    assert lines[2:4] == [gpu.bus_id, "ModifyDeviceFiles: 0"]
    assert [line for line in lines if line.startswith("GPU ")] == [f"GPU 0: {gpu.name} (UUID: {gpu.uuid})"]


def test_all_capabilities_and_32_bit_twins(prefix: Path, host: SimulatedHost, make_bundle: MakeBundle) -> None:
    script = f"""
        ls {MULTIARCH} /usr/lib/i386-linux-gnu; find /etc/vulkan /usr/share -name '*nvidia*'
        ls /tmp/nvidia-mps >/dev/null && echo mps-ok
        ldconfig -p | grep libcuda
        resolve libGLX_nvidia.so.0 libGLX_indirect.so.0
    """
    bundle = make_bundle(script, env=visible("all", "all"), prestart=nvhook(prefix, host))
    text = output(bundle)
    lines = text.splitlines()
    for name in ("libnvcuvid.so.1", "libGLX_nvidia.so.0", "libnvidia-encode.so.580.159.04", "mps-ok"):
        assert name in lines
    assert lines.count("libcuda.so.580.159.04") == 2
    assert "/usr/share/vulkan/icd.d/nvidia_icd.json" in text or "/etc/vulkan/icd.d/nvidia_icd.json" in text
    assert "libcuda.so.1 (libc6) => /usr/lib/i386-linux-gnu/libcuda.so.1" in text
    assert "libcuda.so.1 (libc6,x86-64) => /usr/lib/x86_64-linux-gnu/libcuda.so.1" in text


def test_a_fedora_like_root(prefix: Path, host: SimulatedHost, make_bundle: MakeBundle) -> None:
    script = "resolve libcuda.so.1 libimage.so.1; nvidia-smi -L"
    bundle = make_bundle(script, "lib64", env=visible("0"), prestart=nvhook(prefix, host))
    lines = output(bundle).splitlines()
    assert lines[:2] == ["libcuda.so.1 /usr/lib64/libcuda.so.1", f"libimage.so.1 {roots.IMAGE_FOLDER}/libimage.so.1"]
    assert lines[2].startswith("GPU 0: ")


def test_ldconfig_in_the_container_still_works_and_still_finds_us(
    prefix: Path, host: SimulatedHost, make_bundle: MakeBundle
) -> None:
    script = "ldconfig && resolve libcuda.so.1 libimage.so.1"
    bundle = make_bundle(script, env=visible("0"), prestart=nvhook(prefix, host))
    # ldconfig spells the folder as the image's ld.so.conf has it first.
    assert output(bundle).splitlines()[0] == "libcuda.so.1 /lib/x86_64-linux-gnu/libcuda.so.1"


def test_running_twice_changes_nothing_more(
    prefix: Path, host: SimulatedHost, make_bundle: MakeBundle, cgroup: str
) -> None:
    script = "cut -d' ' -f4- /proc/self/mountinfo; md5sum /etc/ld.so.cache; ls -lR /usr/lib /dev;" + TRY_NODES
    once, twice = nvhook(prefix, host), nvhook(prefix, host)
    twice.append(twice[1])

    def lines(hooks: list[Hook]) -> list[str]:
        bundle = make_bundle(script, env=visible("0"), prestart=hooks, cgroup=cgroup)
        return [normal(line, bundle) for line in output(bundle).splitlines()]

    assert lines(twice) == lines(once)


def normal(line: str, bundle: Bundle) -> str:
    """A line without what differs between two containers: names, times, mount options' ids."""
    line = line.replace(bundle.name, "NAME").replace(bundle.root.name, "ROOT").replace(bundle.folder.name, "BUNDLE")
    words = line.split()
    return " ".join(word for word in words if ":" not in word or word.startswith(("nvidia", "/")))


def test_a_failure_at_any_step_leaves_nothing_behind(
    prefix: Path, host: SimulatedHost, make_bundle: MakeBundle, cgroup: str, tmp_path: Path
) -> None:
    report = tmp_path / "report.json"
    injection = hook(
        sys.executable, "-I", "-S", str(FAILURE_HOOK), str(prefix / "lib/nvhook"), str(host.root), str(report)
    )
    bundle = make_bundle("true", env=visible("all", "all"), prestart=[proc_hook(), injection], cgroup=cgroup)
    # Something to put back: a link that leads elsewhere, and a file of the image's where a link belongs.
    library = bundle.root / MULTIARCH.lstrip("/")
    (library / "libcuda.so.1").symlink_to("libcuda.so.470.1")
    (library / "libnvidia-ml.so.1").write_text("the image's own")
    before = tree_of(bundle.root)
    output(bundle)
    results = json.loads(report.read_text())
    assert len(results) > 40
    assert all(result["message"].startswith("injected") for result in results)
    assert [result for result in results if result["differences"]] == []
    assert tree_of(bundle.root) == before


def test_failures_are_one_line_and_a_remedy(prefix: Path, host: SimulatedHost, make_bundle: MakeBundle) -> None:
    bundle = make_bundle("true", env=visible("7"), prestart=nvhook(prefix, host))
    before = tree_of(bundle.root)
    done = bundle.run()
    assert done.returncode != 0
    assert "nvhook: error: no GPU '7' on this host; there are 0 (GPU-00000000-1111" in done.stderr
    assert "remedy: ask for one of these indexes or UUIDs" in done.stderr
    assert tree_of(bundle.root) == before


def start(prefix: Path, host: SimulatedHost, bundle: Bundle, pid: int) -> subprocess.CompletedProcess[str]:
    """The hook by hand, with a state that names a process."""
    bundle.write()
    state = json.dumps({"ociVersion": "1.0.2", "id": "x", "pid": pid, "bundle": str(bundle.folder)})
    command = [str(prefix / "bin/nvhook-prestart"), "--host-root", str(host.root)]
    return subprocess.run(command, input=state, capture_output=True, text=True, check=False)


def test_our_own_mount_namespace_is_refused(prefix: Path, host: SimulatedHost, make_bundle: MakeBundle) -> None:
    bundle = make_bundle("true", env=visible("0"))
    before = tree_of(bundle.root)
    mounts = HostMounts(prefix)
    done = start(prefix, host, bundle, os.getpid())
    assert done.returncode == 1
    assert "is in the host's own mount namespace" in done.stderr
    assert mounts.changed() == []
    assert tree_of(bundle.root) == before


def test_a_process_that_is_gone(prefix: Path, host: SimulatedHost, make_bundle: MakeBundle) -> None:
    done = start(prefix, host, make_bundle("true", env=visible("0")), 2**22 - 1)
    assert done.returncode == 1
    assert "does not exist" in done.stderr


@pytest.mark.parametrize("arguments", [["--unknown"], ["--host-root"], ["--host-root", "/", "more"]])
def test_usage(prefix: Path, arguments: list[str]) -> None:
    command = [str(prefix / "bin/nvhook-prestart"), *arguments]
    done = subprocess.run(command, input="", capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("usage: nvhook prestart")


def test_links_and_files_of_the_image_give_way(prefix: Path, host: SimulatedHost, make_bundle: MakeBundle) -> None:
    bundle = make_bundle(
        "resolve libcuda.so.1 libnvidia-ml.so.1; nvidia-smi -L; cat /usr/lib/image-file",
        env=visible("0"),
        prestart=nvhook(prefix, host),
    )
    library = bundle.root / MULTIARCH.lstrip("/")
    (library / "libcuda.so.1").symlink_to("/usr/lib/image-file")
    (library / "libcuda.so.580.159.04").symlink_to("/usr/lib/image-file")
    (library / "libnvidia-ml.so.1").write_text("not a library")
    (bundle.root / "usr/lib/image-file").write_text("untouched\n")
    lines = output(bundle).splitlines()
    assert lines[:2] == [f"{name} {MULTIARCH}/{name}" for name in ("libcuda.so.1", "libnvidia-ml.so.1")]
    assert lines[2].startswith("GPU 0: ")
    assert lines[-1] == "untouched"


@pytest.mark.parametrize("where", ["usr/lib/x86_64-linux-gnu/libcuda.so.580.159.04", "dev-file"])
def test_something_in_the_way_is_named(
    prefix: Path, host: SimulatedHost, make_bundle: MakeBundle, where: str, tmp_path: Path
) -> None:
    mounts = []
    if where == "dev-file":
        (tmp_path / "dev").mkdir()
        (tmp_path / "dev/nvidia0").mkdir()
        mounts = [{"destination": "/dev/nvidia0", "type": "tmpfs", "source": "tmpfs"}]
    bundle = make_bundle("true", env=visible("0"), prestart=nvhook(prefix, host), mounts=mounts)
    if not mounts:
        (bundle.root / where).mkdir()
    done = bundle.run()
    assert done.returncode != 0
    assert "is in the way" in done.stderr


def test_a_folder_of_the_host_is_left_alone(
    prefix: Path, host: SimulatedHost, make_bundle: MakeBundle, tmp_path: Path
) -> None:
    """A volume over /usr/bin takes no file; the container starts without nvidia-smi."""
    shared = tmp_path / "shared"
    shared.mkdir()
    for name in ("sh", "resolve"):
        shutil.copy(roots.make_root(tmp_path / f"image-of-{name}") / "usr/bin" / name, shared / name)
    before = tree_of(shared)
    mount = {"destination": "/usr/bin", "type": "bind", "source": str(shared), "options": ["rbind", "rw"]}
    hooks = reported(nvhook(prefix, host), tmp_path / "report")
    bundle = make_bundle("resolve libcuda.so.1", env=visible("0"), prestart=hooks, mounts=[mount])
    assert output(bundle) == f"libcuda.so.1 {MULTIARCH}/libcuda.so.1\n"
    report = (tmp_path / "report").read_text()
    assert "nvhook: warning: left out: /usr/bin in the container is a mount from elsewhere" in report
    assert tree_of(shared) == before


def test_links_out_of_the_root_stay_inside(
    prefix: Path, host: SimulatedHost, make_bundle: MakeBundle, tmp_path: Path
) -> None:
    canary = tmp_path / "canary"
    canary.mkdir()
    bundle = make_bundle("ls -R /", env=visible("0"), prestart=nvhook(prefix, host))
    library = bundle.root / "usr/lib/x86_64-linux-gnu"
    library.rename(bundle.root / "usr/lib/real")
    library.symlink_to(canary)
    before = tree_of(canary)
    mounts = HostMounts(prefix)
    bundle.run()
    assert tree_of(canary) == before
    assert mounts.changed() == []


def test_a_privileged_container_gets_no_mask(prefix: Path, host: SimulatedHost, make_bundle: MakeBundle) -> None:
    script = "cat /proc/driver/nvidia/params; resolve libcuda.so.1"
    bundle = make_bundle(script, env=visible("0"), prestart=nvhook(prefix, host), masked_paths=())
    assert output(bundle).splitlines() == [f"libcuda.so.1 {MULTIARCH}/libcuda.so.1"]


def test_a_user_namespace(prefix: Path, host: SimulatedHost, make_bundle: MakeBundle, cgroup: str) -> None:
    mapping = [{"containerID": 0, "hostID": 100000, "size": 65536}]
    bundle = make_bundle(
        "stat -c '%n %u %t:%T' /dev/nvidia0 /dev/nvidiactl; resolve libcuda.so.1; cat /dev/nvidia0",
        env=visible("0"),
        prestart=nvhook(prefix, host),
        namespaces=("pid", "mount", "ipc", "uts", "user", "network"),
        linux={"uidMappings": mapping, "gidMappings": mapping},
        cgroup=cgroup,
    )
    subprocess.run(["chown", "-R", "100000:100000", str(bundle.root)], check=True)
    for folder in [bundle.root, *bundle.root.parents][:-1]:
        folder.chmod(folder.stat().st_mode | 0o011)
    done = bundle.run()
    assert "/dev/nvidia0 65534 c3:0" in done.stdout, done.stderr
    assert f"libcuda.so.1 {MULTIARCH}/libcuda.so.1" in done.stdout
    assert "cat: " in done.stderr
    assert "not permitted" not in done.stderr
