# SPDX-License-Identifier: Apache-2.0
"""`nvhook nodes` on simulated hosts: device nodes as the kernel says, their links, and the modules' loading."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from hook.cli import main
from tests.needs import needs_program, needs_root
from tests.simhost import Host, SimulatedHost, bare, build, gpus

pytestmark = needs_root

TREE = Path(__file__).resolve().parents[2]


@pytest.fixture
def host(tmp_path: Path) -> SimulatedHost:
    return build(tmp_path / "host", Host(gpus=gpus(2)))


def nodes_of(host: SimulatedHost) -> dict[str, tuple[int, int, str]]:
    """Numbers and mode of each of the driver's nodes, by its name below /dev."""
    found = {}
    for path in sorted(host.path("/dev").rglob("nvidia*")):
        status = path.lstat()
        if stat.S_ISCHR(status.st_mode):
            name = path.relative_to(host.path("/dev")).as_posix()
            mode = oct(stat.S_IMODE(status.st_mode))
            found[name] = (os.major(status.st_rdev), os.minor(status.st_rdev), mode)
    return found


def links_of(host: SimulatedHost) -> dict[str, str]:
    return {path.name: os.readlink(path) for path in host.path("/dev/char").iterdir()}


def run(host: SimulatedHost, *words: str) -> int:
    return main(["nodes", *words, "--host-root", str(host.root)])


def states(host: SimulatedHost) -> dict[str, tuple[int, int]]:
    """What tells a file that was left alone from one that was made again."""
    return {str(path): (path.lstat().st_ino, path.lstat().st_ctime_ns) for path in host.path("/dev").rglob("*")}


# Nodes


def test_missing_nodes_are_made_as_the_kernel_says(host: SimulatedHost, capsys: pytest.CaptureFixture[str]) -> None:
    before = nodes_of(host)
    for name in before:
        host.path(f"/dev/{name}").unlink()
    host.path("/dev/nvidia-caps").rmdir()
    umask = os.umask(0o077)
    try:
        assert run(host, "create") == 0
    finally:
        os.umask(umask)
    # IMEX's capability is in the driver's tree too; the simulated host has no node for it by itself.
    imex = {"nvidia-caps/nvidia-cap4323": (507, 4323, "0o400")}
    assert nodes_of(host) == before | imex
    assert stat.S_IMODE(host.path("/dev/nvidia-caps").stat().st_mode) == 0o755
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(before) + 1
    assert "/dev/nvidia-uvm is device 508:0" in lines


def test_a_second_run_touches_nothing(host: SimulatedHost, capsys: pytest.CaptureFixture[str]) -> None:
    assert (run(host, "create"), run(host, "link")) == (0, 0)
    before = states(host)
    capsys.readouterr()
    assert (run(host, "create"), run(host, "link")) == (0, 0)
    assert states(host) == before
    assert capsys.readouterr().out == ""


def test_a_node_with_an_old_major_is_replaced(host: SimulatedHost, capsys: pytest.CaptureFixture[str]) -> None:
    """nvidia-uvm's major is dynamic: after a reload it can be another."""
    build(host.root, Host(gpus=gpus(2), uvm_major=511, missing=frozenset({"nvidia-uvm", "nvidia-uvm-tools"})))
    assert run(host, "create") == 0
    assert nodes_of(host)["nvidia-uvm"] == (511, 0, "0o666")
    assert "/dev/nvidia-uvm is device 511:0, it was 508:0" in capsys.readouterr().out.splitlines()


def test_modes_and_owners_are_the_modules_parameters(host: SimulatedHost) -> None:
    params = (("DeviceFileMode", 0o660), ("DeviceFileGID", 44))
    host.path("/dev/nvidia0").unlink()
    build(host.root, Host(gpus=gpus(2), params=params, missing=frozenset({"nvidia0", "nvidiactl"})))
    assert run(host, "create") == 0
    for name in ("nvidia0", "nvidiactl"):
        status = host.path(f"/dev/{name}").stat()
        assert (stat.S_IMODE(status.st_mode), status.st_uid, status.st_gid) == (0o660, 0, 44)


def test_an_administrator_who_wants_no_nodes_made_is_obeyed(
    host: SimulatedHost, capsys: pytest.CaptureFixture[str]
) -> None:
    build(host.root, Host(params=(("ModifyDeviceFiles", 0),)))
    host.path("/dev/nvidia0").unlink()
    assert run(host, "create") == 0
    assert not host.path("/dev/nvidia0").exists()
    assert "ModifyDeviceFiles: 0" in capsys.readouterr().err


def test_only_modules_that_are_loaded_have_nodes(tmp_path: Path) -> None:
    host = build(tmp_path / "host", Host(modules=("nvidia",)))
    assert run(host, "create") == 0
    made = nodes_of(host)
    assert {"nvidia0", "nvidiactl"} <= set(made)
    assert made.keys().isdisjoint({"nvidia-uvm", "nvidia-uvm-tools", "nvidia-modeset"})


def test_a_file_in_the_way_is_left_and_named(host: SimulatedHost, capsys: pytest.CaptureFixture[str]) -> None:
    path = host.path("/dev/nvidiactl")
    path.unlink()
    path.write_text("mine")
    assert run(host, "create") == 1
    assert path.read_text() == "mine"
    error = capsys.readouterr().err
    assert error.startswith("nvhook: error: /dev/nvidiactl is in the way: it is no device node\n  remedy: ")


def test_a_link_in_the_way_is_not_followed(host: SimulatedHost, tmp_path: Path) -> None:
    path = host.path("/dev/nvidiactl")
    path.unlink()
    path.symlink_to(tmp_path / "elsewhere")
    assert run(host, "create") == 1
    assert not (tmp_path / "elsewhere").exists()


def test_nodes_may_lie_in_another_dev_root(tmp_path: Path) -> None:
    host = build(tmp_path / "host", Host(driver_root="/run/nvidia/driver", dev_root="/run/nvidia/driver"))
    place = host.path("/run/nvidia/driver/dev/nvidia0")
    place.unlink()
    assert run(host, "create", "--dev-root", "/run/nvidia/driver") == 0
    assert stat.S_ISCHR(place.stat().st_mode)
    assert not host.path("/dev/nvidia0").exists()


def test_a_dry_run_says_all_and_does_nothing(host: SimulatedHost, capsys: pytest.CaptureFixture[str]) -> None:
    host.path("/dev/nvidia1").unlink()
    before = states(host)
    assert (run(host, "create", "--dry-run"), run(host, "link", "--dry-run")) == (0, 0)
    assert states(host) == before
    lines = capsys.readouterr().out.splitlines()
    assert "/dev/nvidia1 is device 195:1" in lines
    assert "/dev/char/195:0 leads to ../nvidia0" in lines


def test_without_a_driver_there_is_nothing_to_make(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    host = build(tmp_path / "host", Host(modules=()))
    assert run(host, "create") == 1
    assert "no NVIDIA driver is loaded" in capsys.readouterr().err


@pytest.mark.parametrize(("make", "name"), [(bare.wsl, "WSL"), (bare.tegra, "Tegra")])
def test_where_no_module_makes_nodes_none_is_to_be_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], make: Callable[[Path], object], name: str
) -> None:
    make(tmp_path)
    assert main(["nodes", "create", "--host-root", str(tmp_path)]) == 1
    what, remedy = capsys.readouterr().err.splitlines()
    assert what.startswith(f"nvhook: error: this is {name}, where no module tells of GPUs") and "--mode" in remedy


# Links


def test_each_node_has_a_link(host: SimulatedHost) -> None:
    assert run(host, "link") == 0
    links = links_of(host)
    assert links["195:255"] == "../nvidiactl"
    assert links["508:1"] == "../nvidia-uvm-tools"
    assert links["507:2"] == "../nvidia-caps/nvidia-cap2"
    for number, target in links.items():
        status = (host.path("/dev/char") / target).stat()
        assert f"{os.major(status.st_rdev)}:{os.minor(status.st_rdev)}" == number


def test_links_follow_a_major_that_changed(host: SimulatedHost) -> None:
    host.path("/dev/char").mkdir()
    host.path("/dev/char/1:3").symlink_to("../null")
    assert run(host, "link") == 0
    for name in ("nvidia-uvm", "nvidia-uvm-tools"):
        host.path(f"/dev/{name}").unlink()
    build(host.root, Host(gpus=gpus(2), uvm_major=511))
    assert run(host, "link") == 0
    links = links_of(host)
    assert (links["511:0"], links["511:1"]) == ("../nvidia-uvm", "../nvidia-uvm-tools")
    assert {"508:0", "508:1"}.isdisjoint(links)
    assert links["1:3"] == "../null"


def test_a_link_of_another_node_is_set_right(host: SimulatedHost) -> None:
    host.path("/dev/char").mkdir()
    host.path("/dev/char/508:0").symlink_to("../somebody")
    assert run(host, "link") == 0
    assert links_of(host)["508:0"] == "../nvidia-uvm"


def test_a_node_that_is_missing_is_named_and_the_others_have_links(
    host: SimulatedHost, capsys: pytest.CaptureFixture[str]
) -> None:
    """One warning, for one module brings both of its nodes."""
    for name in ("nvidia-uvm", "nvidia-uvm-tools"):
        host.path(f"/dev/{name}").unlink()
    for _ in range(2):
        assert run(host, "link") == 0
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("nvhook: warning: /dev/nvidia-uvm is missing and gets no link: ")
    assert links_of(host)["195:0"] == "../nvidia0"


def test_where_there_is_no_node_none_is_missed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    host = build(tmp_path / "host", Host(modules=()))
    assert run(host, "link") == 0
    assert capsys.readouterr() == ("", "")


# Modules. What is loaded is the kernel's own to tell, so these put a simulated kernel's /proc, /sys and /dev and a
# script for modprobe in the places of the machine's, in a mount namespace that ends with the command.

MODPROBE = """\
#!/bin/sh
# modprobe -- NAME
echo "$2" >> {log}
case "$2" in
    {failing}) echo "modprobe: FATAL: Module $2 not found in directory /lib/modules" >&2; exit 1 ;;
esac
cp -r {after}/proc/driver {after}/proc/devices /proc/
"""

MACHINE = """
mkdir "$1/proc/real"
ln -s real/self "$1/proc/self"
mount --bind /proc "$1/proc/real"
mount --bind "$1/sys" /sys
mount --bind "$1/dev" /dev
mount --rbind "$1/proc" /proc
shift
exec "$@"
"""


class Machine:
    """A machine whose modules are not loaded yet; loading any of them brings what a driver brings."""

    def __init__(self, folder: Path, failing: str = "none", before: Host | None = None) -> None:
        self.host = build(folder / "before", before or Host(modules=()))
        after = build(folder / "after", Host())
        self.log = folder / "log"
        self.log.touch()
        program = folder / "modprobe"
        program.write_text(MODPROBE.format(log=self.log, failing=failing, after=after.root))
        program.chmod(0o755)
        setting = self.host.path("/proc/sys/kernel/modprobe")
        setting.write_text(f"{program}\n")

    def run(self, *words: str, command: str = "nodes") -> subprocess.CompletedProcess[str]:
        words = (sys.executable, "-m", "hook", command, *words)
        return subprocess.run(
            ["unshare", "--mount", "sh", "-euc", MACHINE, "sh", str(self.host.root), *words],
            capture_output=True,
            text=True,
            cwd=TREE,
            check=False,
        )

    def loaded(self) -> list[str]:
        return self.log.read_text().split()


@needs_program("unshare")
def test_modules_are_loaded_and_their_nodes_made(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    done = machine.run("create", "--load-kmods")
    assert (done.returncode, done.stderr) == (0, "")
    assert machine.loaded() == ["nvidia", "nvidia-uvm", "nvidia-modeset"]
    assert done.stdout.splitlines()[:3] == [f"the kernel module {name} is loaded" for name in machine.loaded()]
    assert {"nvidia0", "nvidiactl", "nvidia-uvm", "nvidia-uvm-tools", "nvidia-modeset"} <= set(nodes_of(machine.host))


@needs_program("unshare")
def test_generate_loads_modules_too(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    (tmp_path / "after/dev").rename(tmp_path / "after/no-dev")
    place = ("--driver-root", str(tmp_path / "after"), "--dev-root", "/", "--hook-path", "/x", "--nvml", "never")
    done = machine.run("generate", "--load-kmods", *place, command="cdi")
    assert done.returncode == 0, done.stderr
    assert machine.loaded() == ["nvidia", "nvidia-uvm", "nvidia-modeset"]
    assert done.stderr.count("is loaded") == 3
    assert "/dev/nvidia-uvm" in done.stdout and "is loaded" not in done.stdout


@needs_program("unshare")
def test_modules_that_are_loaded_are_left_alone(tmp_path: Path) -> None:
    machine = Machine(tmp_path, before=Host())
    assert machine.run("create", "--load-kmods").returncode == 0
    assert machine.loaded() == []


@needs_program("unshare")
def test_a_display_module_that_is_not_installed_is_a_warning(tmp_path: Path) -> None:
    machine = Machine(tmp_path, failing="nvidia-modeset")
    done = machine.run("create", "--load-kmods")
    assert done.returncode == 0
    assert "cannot load the kernel module nvidia-modeset: modprobe: FATAL: Module nvidia-modeset" in done.stderr
    assert "nvidia-uvm" in nodes_of(machine.host)


@needs_program("unshare")
def test_a_driver_that_can_not_be_loaded_is_an_error(tmp_path: Path) -> None:
    machine = Machine(tmp_path, failing="nvidia")
    done = machine.run("create", "--load-kmods")
    assert done.returncode == 1
    assert done.stderr.startswith("nvhook: error: cannot load the kernel module nvidia: modprobe: FATAL: Module nv")
    assert machine.loaded() == ["nvidia"]


@needs_program("unshare")
def test_no_module_is_loaded_where_there_is_no_gpu(tmp_path: Path) -> None:
    machine = Machine(tmp_path, before=Host(modules=(), gpus=()))
    done = machine.run("create", "--load-kmods")
    assert machine.loaded() == []
    assert (done.returncode, done.stdout) == (0, "")
    assert "has no display controller of NVIDIA's" in done.stderr


@needs_program("unshare")
def test_a_dry_run_loads_nothing(tmp_path: Path) -> None:
    machine = Machine(tmp_path, before=Host(modules=("nvidia",)))
    done = machine.run("create", "--load-kmods", "--dry-run")
    assert machine.loaded() == []
    lines = done.stdout.splitlines()
    assert lines[:2] == [f"the kernel module {name} would be loaded" for name in ("nvidia-uvm", "nvidia-modeset")]


def test_another_root_has_no_kernel_to_load_into(host: SimulatedHost, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(host, "create", "--load-kmods") == 1
    assert "--load-kmods would load modules into this machine's kernel" in capsys.readouterr().err
