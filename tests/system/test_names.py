# SPDX-License-Identifier: Apache-2.0
"""NVIDIA's names in real containers: the prestart hook, and `nvidia-container-cli configure` with and without --pid."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests import roots
from tests.containers import Hook, hook
from tests.needs import needs_program
from tests.simhost import SimulatedHost
from tests.system.conftest import MakeBundle
from tests.system.prestart import MULTIARCH, allowed, output, proc_hook, visible
from tests.system.test_prestart import TRY_NODES

pytestmark = needs_program("runc")

TREE = Path(__file__).resolve().parents[2]
SHOW = f"""
resolve -s libcuda.so.1 libnvidia-ml.so.1
nvidia-smi -L
grep Modify /proc/driver/nvidia/params
ls /proc/driver/nvidia/gpus
ls {MULTIARCH} | grep nvidia-ml
{TRY_NODES}
"""


def cli(host: SimulatedHost, *words: str) -> list[str]:
    """The command line of nvidia-container-cli."""
    program = "import sys; from hook.names.containercli import main; sys.exit(main())"
    return [sys.executable, "-c", program, "--host-root", str(host.root), *words]


@pytest.mark.parametrize("name", ["nvidia-container-runtime-hook", "nvidia-container-toolkit"])
def test_the_hook_by_nvidias_names(
    prefix: Path, host: SimulatedHost, make_bundle: MakeBundle, tmp_path: Path, name: str
) -> None:
    link = tmp_path / name
    link.symlink_to(prefix / "lib/nvhook/bin/launch")
    hooks = [proc_hook(), hook(link, "-debug", "prestart", "--host-root", str(host.root))]
    lines = output(make_bundle(SHOW, env=visible("0"), prestart=hooks)).splitlines()
    assert [line for line in lines if line.startswith("GPU ")] == [f"GPU 0: NVIDIA H200 (UUID: {gpu_uuid(host)})"]
    assert [allowed(lines, minor) for minor in (0, 1)] == [True, False]


def gpu_uuid(host: SimulatedHost, index: int = 0) -> str:
    return host.host.gpus[index].uuid


# A hook of somebody's own that calls the command, as NVIDIA's does: the process is in the state on stdin.
CALL = """
pid=$(sed -n 's/.*"pid":\\([0-9]*\\).*/\\1/p')
exec "$@" --pid="$pid" "$0"
"""


def calling(bundle_root: Path, command: list[str]) -> Hook:
    return hook("/bin/sh", "-c", CALL, str(bundle_root), "/usr/bin/env", f"PYTHONPATH={TREE}", *command)


def test_configure_with_a_process(host: SimulatedHost, make_bundle: MakeBundle, cgroup: str) -> None:
    bundle = make_bundle(SHOW, cgroup=cgroup)
    command = cli(host, "--load-kmods", "--user", "configure", "--ldconfig=@/sbin/ldconfig", "--device=1")
    # On cgroup version 2 the runtime's filter is known by config.json, which the command never sees.
    command += ["--compute", "--utility", "--require=cuda>=12.0", *["--no-cgroups"] * (cgroup == "v2")]
    bundle.prestart = [proc_hook(), calling(bundle.root, command)]
    lines = output(bundle).splitlines()
    assert "ModifyDeviceFiles: 0" in lines
    assert host.host.gpus[1].bus_id in lines
    assert host.host.gpus[0].bus_id not in lines
    assert any(line.startswith("libnvidia-ml.so.1") for line in lines)
    assert [allowed(lines, minor) for minor in (0, 1)] == [False, cgroup == "v1"]


def test_configure_with_a_requirement_that_is_not_met(host: SimulatedHost, make_bundle: MakeBundle) -> None:
    bundle = make_bundle(SHOW)
    command = cli(host, "configure", "--device=all", "--utility", "--require=cuda>=99.0")
    bundle.prestart = [proc_hook(), calling(bundle.root, command)]
    done = bundle.run()
    assert done.returncode != 0
    assert "nvidia-container-cli: --require is not met by the driver" in done.stderr


# What LXC's mount hook and enroot do: a mount namespace of their own, the image mounted in it, and no process yet.
OWN = """
mount --bind "$1" "$1"
root=$1
shift
"$@"
chroot "$root" /bin/sh -c 'resolve -s libcuda.so.1; ls -l /dev/nvidia1'
"""


def test_configure_in_a_namespace_of_its_own(host: SimulatedHost, tmp_path: Path) -> None:
    image = roots.make_root(tmp_path / "image")
    command = cli(host, "configure", "--no-cgroups", "--device=1", "--compute", "--utility", str(image))
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-euc", OWN, "sh", str(image), *command],
        capture_output=True,
        text=True,
        cwd=TREE,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    status = host.library("libcuda.so.1").stat()
    assert done.stdout.splitlines()[0].split()[-1] == f"{status.st_dev}:{status.st_ino}"
    assert "195,   1" in done.stdout
    # The namespace is gone; in the image are empty files to mount on, links and the loader cache.
    assert (image / "dev/nvidia1").stat().st_size == 0


def test_configure_without_nodes(host: SimulatedHost, tmp_path: Path) -> None:
    image = roots.make_root(tmp_path / "image")
    words = ("configure", "--no-cgroups", "--no-devbind", "--device=1", "--utility", str(image))
    script = OWN.replace("libcuda.so.1", "libnvidia-ml.so.1").replace("ls -l /dev/nvidia1", "ls /dev")
    command = ["unshare", "--mount", "sh", "-euc", script, "sh", str(image), *cli(host, *words)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=TREE, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("libnvidia-ml.so.1 ") and "nvidia1" not in done.stdout
    assert not (image / "dev/nvidia1").exists()


def test_a_shared_mount_is_refused(host: SimulatedHost, tmp_path: Path) -> None:
    image = roots.make_root(tmp_path / "image")
    command = cli(host, "configure", "--no-cgroups", "--device=1", "--utility", str(image))
    script = 'mount --bind "$1" "$1"; mount --make-shared "$1"; shift; exec "$@"'
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-euc", script, "sh", str(image), *command],
        capture_output=True,
        text=True,
        cwd=TREE,
        check=False,
    )
    assert done.returncode == 1
    assert "is a shared mount; what is mounted in it would be the host's too" in done.stderr
    assert not (image / "dev/nvidia1").exists()
