# SPDX-License-Identifier: Apache-2.0
"""MIG devices, IMEX channels and gates in real runc containers, on the simulated host."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests import simhost
from tests.needs import needs_program
from tests.simhost import SimulatedHost
from tests.simhost.kernel import CAPABILITY, mig_minors
from tests.system.conftest import MakeBundle
from tests.system.prestart import nvhook, output, reported, visible

pytestmark = needs_program("runc")

TREE = Path(__file__).resolve().parents[2]
CAPABILITIES = "/proc/driver/nvidia/capabilities"
CAPS_MAJOR = simhost.Host().caps_major
WHOLE, GPU = simhost.gpus(2)
DIVIDED = simhost.divided(GPU, (1, 0), (5, 0), (5, 1))
HOST = simhost.Host(
    gpus=(WHOLE, DIVIDED), graphics=False, imex=tuple(range(12)), gates=frozenset({"gds", "gdrcopy", "nvswitch"})
)
# The capability nodes of GPU 1 by their instances, and those that manage MIG.
MINORS = {(gi, ci): mig_minors(1, gi, ci) for gi, ci in ((1, None), (1, 0), (5, None), (5, 0), (5, 1))}
CONTROL = {"config": 1, "monitor": 2}

LOOK = f"""
    cd {CAPABILITIES} 2>/dev/null && find . -type f | sort
    cd /dev && find . -path '*nvidia*' -type c | sort
    ls /proc/driver/nvidia/gpus
"""


def try_nodes(*minors: int) -> str:
    """A script that opens capability nodes, which it makes where they are not, as any container may."""
    lines = ["mkdir -p /dev/nvidia-caps"]
    for minor in minors:
        path = f"/dev/nvidia-caps/nvidia-cap{minor}"
        lines += [f"test -e {path} || mknod {path} c {CAPS_MAJOR} {minor}", f'echo "cap{minor}: $(cat {path} 2>&1)"']
    return "\n".join(lines)


def opened(text: str) -> set[int]:
    """The minors of those that the device rules let through; no driver is behind them here."""
    tried = [line.partition(": ") for line in text.splitlines() if line.startswith("cap")]
    return {int(name[3:]) for name, _, said in tried if "Operation not permitted" not in said}


@pytest.fixture
def host(tmp_path: Path) -> Iterator[SimulatedHost]:
    built = simhost.build(tmp_path / "host", HOST)
    yield built
    built.close()


def instances(*numbers: tuple[int, int]) -> list[str]:
    """What of GPU 1's capabilities is to be seen with these MIG devices."""
    names = {f"./gpu1/mig/gi{gi}/{rest}" for gi, ci in numbers for rest in ("access", f"ci{ci}/access")}
    return sorted(names)


@pytest.mark.parametrize(
    "name", ["1:1", DIVIDED.mig_devices[1].uuid, DIVIDED.mig_devices[1].uuid[:13].lower(), f"MIG-{GPU.uuid}/5/0"]
)
def test_a_mig_device(prefix: Path, host: SimulatedHost, make_bundle: MakeBundle, cgroup: str, name: str) -> None:
    script = f"{LOOK} {try_nodes(*MINORS.values(), *CONTROL.values())}\ncat {CAPABILITIES}/gpu1/mig/gi5/ci0/access"
    bundle = make_bundle(script, env=visible(name, "utility"), prestart=nvhook(prefix, host), cgroup=cgroup)
    text = output(bundle)
    lines = text.splitlines()
    wanted = {MINORS[5, None], MINORS[5, 0]}
    assert [line for line in lines if line.startswith("./gpu")] == instances((5, 0))
    caps = sorted(f"./nvidia-caps/nvidia-cap{minor}" for minor in wanted)
    assert [line for line in lines if line.startswith("./nvidia")] == [*caps, "./nvidia1", "./nvidiactl"]
    assert [line for line in lines if line.startswith("0000:")] == [GPU.bus_id]
    assert opened(text) == wanted
    assert f"DeviceFileMinor: {MINORS[5, 0]}" in lines


def test_all_is_every_mig_device_of_every_gpu(prefix: Path, host: SimulatedHost, make_bundle: MakeBundle) -> None:
    bundle = make_bundle(
        LOOK + try_nodes(*MINORS.values(), 1), env=visible("all", "utility"), prestart=nvhook(prefix, host)
    )
    text = output(bundle)
    assert [line for line in text.splitlines() if line.startswith("./gpu")] == instances((1, 0), (5, 0), (5, 1))
    assert opened(text) == set(MINORS.values())


def test_a_divided_gpu_alone(
    prefix: Path, host: SimulatedHost, make_bundle: MakeBundle, tmp_path: Path, cgroup: str
) -> None:
    hooks = reported(nvhook(prefix, host), tmp_path / "said")
    bundle = make_bundle(
        LOOK + try_nodes(*MINORS.values()), env=visible("0,1", "utility"), prestart=hooks, cgroup=cgroup
    )
    text = output(bundle)
    assert opened(text) == set()
    assert not any(line.startswith("./gpu") for line in text.splitlines())
    assert "GPU 1 is divided into MIG devices, and alone runs nothing" in (tmp_path / "said").read_text()


def test_a_divided_gpu_alone_computes_nothing(prefix: Path, host: SimulatedHost, make_bundle: MakeBundle) -> None:
    done = make_bundle("true", env=visible("0,1", "compute"), prestart=nvhook(prefix, host)).run()
    assert done.returncode != 0
    assert "GPU 1 is divided into MIG devices, and alone runs nothing" in done.stderr


def test_a_gpu_in_mig_mode_without_a_device(prefix: Path, tmp_path: Path, make_bundle: MakeBundle) -> None:
    """By what NVML said before, and said again when it counted; the mode may be off by then."""
    host = simhost.build(tmp_path / "empty", simhost.Host(gpus=(WHOLE, replace(GPU, mig=1)), graphics=False))
    hooks = nvhook(prefix, host)
    words = [sys.executable, "-m", "hook", "inventory", "--host-root", str(host.root), "--nvml", "health", "--quiet"]
    subprocess.run(words, cwd=TREE, check=True)
    text = output(make_bundle(LOOK, env=visible("all", "compute"), prestart=hooks))
    assert "./nvidia0" in text and "./nvidia1" not in text
    host.clear_nvml_calls()
    done = make_bundle("true", env=visible("1", "compute"), prestart=hooks).run()
    assert done.returncode != 0
    assert f"GPU 1 ({GPU.bus_id}) is in MIG mode without a MIG device, and runs nothing" in done.stderr
    assert "nvidia-smi -i 1 -mig 0" in done.stderr
    assert {call.gpu for call in host.nvml_calls()} == {-1, 1}
    host.host = replace(host.host, gpus=(WHOLE, GPU))
    host.set_nvml(simhost.Nvml())
    assert "./nvidia1" in output(make_bundle(LOOK, env=visible("1", "compute"), prestart=hooks))


def test_a_second_run_changes_nothing(prefix: Path, host: SimulatedHost, make_bundle: MakeBundle) -> None:
    once, twice = nvhook(prefix, host), nvhook(prefix, host)
    twice.append(twice[1])
    script = LOOK + "grep -c nvidia /proc/self/mountinfo"
    texts = [output(make_bundle(script, env=visible("1:0,1:2"), prestart=hooks)) for hooks in (once, twice)]
    assert texts[0] == texts[1]


def test_a_capability_node_that_is_missing(prefix: Path, host: SimulatedHost, make_bundle: MakeBundle) -> None:
    host.path(f"/dev/nvidia-caps/nvidia-cap{MINORS[5, 1]}").unlink()
    hooks = nvhook(prefix, host)
    done = make_bundle("true", env=visible("1:2", "utility"), prestart=hooks).run()
    assert done.returncode != 0
    assert "the capability nodes of MIG device 2 are missing on the host" in done.stderr
    # The others are whole.
    output(make_bundle("true", env=visible("1:1", "utility"), prestart=hooks))


def test_another_layout_between_two_starts(prefix: Path, host: SimulatedHost, make_bundle: MakeBundle) -> None:
    hooks = nvhook(prefix, host)
    output(make_bundle("true", env=visible("1:2", "utility"), prestart=hooks))
    folder = host.path(f"{CAPABILITIES}/gpu1/mig")
    shutil.rmtree(folder / "gi5/ci1")
    done = make_bundle("true", env=visible("1:2", "utility"), prestart=hooks).run()
    assert "no GPU '1:2' on this host" in done.stderr
    for name, minor in (("gi9/access", mig_minors(1, 9)), ("gi9/ci0/access", mig_minors(1, 9, 0))):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(CAPABILITY.format(minor, 0o444))
        os.mknod(host.path(f"/dev/nvidia-caps/nvidia-cap{minor}"), 0o020444, os.makedev(CAPS_MAJOR, minor))
    text = output(make_bundle(LOOK, env=visible("1:2", "utility"), prestart=hooks))
    assert [line for line in text.splitlines() if line.startswith("./gpu")] == instances((9, 0))


def test_managing_mig(prefix: Path, host: SimulatedHost, make_bundle: MakeBundle, cgroup: str) -> None:
    """CAP_SYS_ADMIN, and a masked /proc all the same."""
    env = visible("1", "utility") | {"NVIDIA_MIG_CONFIG_DEVICES": "all"}
    hooks, more = nvhook(prefix, host), ("CAP_SYS_ADMIN",)
    bundle = make_bundle(LOOK + try_nodes(1, 2), env=env, prestart=hooks, cgroup=cgroup, more_capabilities=more)
    text = output(bundle)
    shown = {line for line in text.splitlines() if line.startswith("./")}
    assert {"./mig/config", "./mig/monitor", *instances((1, 0), (5, 0), (5, 1))} <= shown
    assert "./nvidia-caps/nvidia-cap1" in shown
    assert opened(text) == {1}


def test_managing_mig_without_the_right(prefix: Path, host: SimulatedHost, make_bundle: MakeBundle) -> None:
    env = visible("1", "utility") | {"NVIDIA_MIG_MONITOR_DEVICES": "all"}
    done = make_bundle("true", env=env, prestart=nvhook(prefix, host)).run()
    assert "NVIDIA_MIG_MONITOR_DEVICES is set in a container without CAP_SYS_ADMIN" in done.stderr


def test_imex_channels_and_gates(prefix: Path, host: SimulatedHost, make_bundle: MakeBundle, cgroup: str) -> None:
    env = visible("0", "utility") | {"NVIDIA_IMEX_CHANNELS": "3,11"}
    env |= {"NVIDIA_GDS": "enabled", "NVIDIA_GDRCOPY": "enabled"}
    script = """
        cd /dev; find . -path '*imex*' -type c -exec stat -c '%n %t:%T' {} ';' | sort; ls -d gdrdrv nvidia-fs15
        ls -d nvidia-nvswitch*; ls -d /run/udev /etc/cufile.json
        for node in gdrdrv nvidia-caps-imex-channels/channel11; do cat /dev/$node; done
    """
    bundle = make_bundle(script, env=env, prestart=nvhook(prefix, host), cgroup=cgroup)
    done = bundle.run()
    folder, major = "./nvidia-caps-imex-channels", f"{CAPS_MAJOR - 1:x}"
    assert done.stdout.splitlines() == [
        f"{folder}/channel11 {major}:b",
        f"{folder}/channel3 {major}:3",
        "gdrdrv",
        "nvidia-fs15",
        "/etc/cufile.json",
        "/run/udev",
    ], done.stderr
    assert done.stderr.count("No such device or address") == 2


def test_an_imex_channel_that_comes_later(prefix: Path, host: SimulatedHost, make_bundle: MakeBundle) -> None:
    hooks = nvhook(prefix, host)
    env = visible("0", "utility") | {"NVIDIA_IMEX_CHANNELS": "12"}
    done = make_bundle("true", env=env, prestart=hooks).run()
    assert "IMEX channel 12 is missing on the host" in done.stderr
    path = host.path("/dev/nvidia-caps-imex-channels/channel12")
    os.mknod(path, 0o020666, os.makedev(CAPS_MAJOR - 1, 12))
    assert "channel12" in output(make_bundle("ls /dev/nvidia-caps-imex-channels", env=env, prestart=hooks))
