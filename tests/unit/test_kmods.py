# SPDX-License-Identifier: Apache-2.0
"""cdi.host.kmods on the simulated host: a script stands for modprobe, and does to the tree what the kernel would."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cdi.host import inventory, kmods, settings
from cdi.host.store import Options
from ldcache import root
from tests.conftest import TREE
from tests.needs import needs_program, needs_root
from tests.simhost import Host, SimulatedHost, build, divided, gpus
from tests.simhost.kernel import mig_minors

pytestmark = needs_root

BARE = Host(modules=("nvidia",), graphics=False)
LOADING = """#!/bin/sh
echo "$*" >> {log}
case $2 in
nvidia-uvm) mkdir {root}/sys/module/nvidia_uvm; sed -i '/^Block/i 509 nvidia-uvm\\n' {root}/proc/devices ;;
nvidia-modeset) echo "modprobe: FATAL: Module $2 not found" >&2; exit 1 ;;
esac
"""


class Machine:
    """A simulated host, and what a script that stands for modprobe does to it."""

    def __init__(self, folder: Path, host: Host, script: str = LOADING) -> None:
        self.host: SimulatedHost = build(folder / "host", host)
        self.log = folder / "log"
        self.program = folder / "modprobe"
        self.program.write_text(script.format(log=self.log, root=self.host.root))
        self.program.chmod(0o755)
        self.fd = root.open_root(str(self.host.root))

    def look(self, **options: Any) -> dict[str, Any]:
        return inventory.look(Options(str(self.host.root), nvml="never", **options))

    def load(self, made: dict[str, Any]) -> bool:
        return kmods.load(self.fd, made, str(self.program))

    def asked(self) -> list[str]:
        return self.log.read_text().splitlines() if self.log.exists() else []


def roles(made: dict[str, Any]) -> set[str]:
    return {node["role"] for node in made["nodes"]}


def test_modules_are_loaded_and_their_nodes_made(tmp_path: Path) -> None:
    machine = Machine(tmp_path, BARE)
    made = machine.look()
    assert roles(made) == {"control", "gpu"}
    assert machine.load(made)
    assert machine.asked() == ["-- nvidia-uvm", "-- nvidia-modeset"]
    again = machine.look()
    found = {node["role"]: (node["major"], node["minor"], node["mode"]) for node in again["nodes"]}
    assert (found["uvm"], found["uvm-tools"]) == ((509, 0, 0o666), (509, 1, 0o666))
    assert "modeset" not in found
    # A module for displays, which most servers do not have, is missed by nobody.
    assert made["warnings"] == ["/dev/nvidia-uvm is missing", "/dev/nvidia-uvm-tools is missing"]
    assert os.listdir(machine.host.path("/dev")).count("nvidia-uvm") == 1
    assert not [name for name in os.listdir(machine.host.path("/dev")) if name.startswith(".")]


def test_a_loaded_module_is_not_loaded_again(tmp_path: Path) -> None:
    machine = Machine(tmp_path, Host(graphics=False, missing=frozenset({"nvidia-uvm", "nvidia-modeset"})))
    assert machine.load(machine.look())
    assert machine.asked() == []
    assert {"uvm", "modeset"} <= roles(machine.look())


def test_nothing_is_done_where_nothing_is_missing(tmp_path: Path) -> None:
    machine = Machine(tmp_path, Host(graphics=False))
    made = machine.look()
    before = dict(made)
    assert not machine.load(made)
    assert (machine.asked(), made) == ([], before)


def test_owner_and_mode_are_the_drivers_to_say(tmp_path: Path) -> None:
    params = (("DeviceFileUID", 7), ("DeviceFileGID", 44), ("DeviceFileMode", 0o660))
    machine = Machine(tmp_path, replace(BARE, params=params))
    old = os.umask(0o077)
    try:
        assert machine.load(machine.look())
    finally:
        os.umask(old)
    status = machine.host.path("/dev/nvidia-uvm").stat()
    assert (status.st_uid, status.st_gid, status.st_mode & 0o7777) == (7, 44, 0o660)


def test_a_driver_that_wants_no_nodes_made(tmp_path: Path) -> None:
    machine = Machine(tmp_path, replace(BARE, params=(("ModifyDeviceFiles", 0),)))
    assert machine.load(machine.look())
    assert not machine.host.path("/dev/nvidia-uvm").exists()
    assert not machine.load(machine.look())


def test_a_node_of_an_earlier_load_is_replaced(tmp_path: Path) -> None:
    machine = Machine(tmp_path, Host(graphics=False))
    path = machine.host.path("/dev/nvidia-uvm")
    path.unlink()
    os.mknod(path, 0o020666, os.makedev(99, 0))
    assert machine.load(machine.look())
    assert path.stat().st_rdev == os.makedev(508, 0)


@pytest.mark.parametrize("target", ["nvidia0", "/dev/null"])
def test_what_somebody_put_there_stays(tmp_path: Path, target: str) -> None:
    machine = Machine(tmp_path, Host(graphics=False))
    path = machine.host.path("/dev/nvidia-uvm")
    path.unlink()
    path.symlink_to(target)
    assert not machine.load(machine.look())
    assert os.readlink(path) == target


def test_the_dev_root_has_the_nodes(tmp_path: Path) -> None:
    machine = Machine(tmp_path, replace(BARE, driver_root="/drv", dev_root="/drv"))
    assert machine.load(machine.look(driver_root="/drv"))
    assert machine.host.path("/drv/dev/nvidia-uvm").is_char_device()


def mig_host(**others: Any) -> Host:
    return Host(gpus=(divided(gpus(1)[0], (1, 0), (1, 1), (5, 0)),), graphics=False, **others)


def capability_nodes(made: dict[str, Any]) -> list[list[int]]:
    return [[node["minor"] for node in entry["nodes"]] for entry in made["mig"]]


def test_capability_nodes_of_mig_devices(tmp_path: Path) -> None:
    machine = Machine(tmp_path, mig_host())
    whole = capability_nodes(machine.look())
    shutil.rmtree(machine.host.path("/dev/nvidia-caps"))
    made = machine.look()
    assert capability_nodes(made) == [[]] * 3
    old = os.umask(0o077)
    try:
        assert machine.load(made)
    finally:
        os.umask(old)
    assert machine.asked() == []
    assert capability_nodes(machine.look()) == whole
    assert stat.S_IMODE(machine.host.path("/dev/nvidia-caps").stat().st_mode) == 0o755
    # Those of managing MIG are nobody's to miss.
    assert len(os.listdir(machine.host.path("/dev/nvidia-caps"))) == len({minor for pair in whole for minor in pair})
    assert not machine.load(machine.look())


@pytest.mark.parametrize("said", ["DeviceFileModify: 0", "DeviceFileMinor: none"])
def test_capability_nodes_that_are_not_to_be_made(tmp_path: Path, said: str) -> None:
    host = mig_host(missing=frozenset({f"nvidia-cap{mig_minors(0, 5, 0)}"}))
    machine = Machine(tmp_path, host)
    path = machine.host.path("/proc/driver/nvidia/capabilities/gpu0/mig/gi5/ci0/access")
    name = said.partition(":")[0]
    path.chmod(0o644)
    path.write_text("\n".join(said if line.startswith(name) else line for line in path.read_text().splitlines()))
    assert not machine.load(machine.look())


def test_a_folder_that_is_something_else(tmp_path: Path) -> None:
    machine = Machine(tmp_path, mig_host())
    path = machine.host.path("/dev/nvidia-caps")
    shutil.rmtree(path)
    path.write_text("")
    made = machine.look()
    assert not machine.load(made)
    assert made["warnings"][-1] == "cannot make nodes in /dev/nvidia-caps: Not a directory"


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("#!/bin/sh\necho 'modprobe: FATAL: no such module' >&2; exit 1", "modprobe: FATAL: no such module"),
        ("#!/bin/sh\nexit 3", "{program} ended with status 3"),
        ("#!/bin/sh\nprintf '\\033[2J' >&2; exit 1", "{program} ended with status 1"),
        ("no program", "{program}: Exec format error"),
    ],
)
def test_a_module_that_does_not_load(tmp_path: Path, script: str, reason: str) -> None:
    machine = Machine(tmp_path, BARE, script.replace("{", "{{").replace("}", "}}"))
    made = machine.look()
    assert not machine.load(made)
    expected = reason.format(program=machine.program)
    assert made["warnings"][-1] == f"the module nvidia-uvm does not load: {expected}"


def test_a_modprobe_that_hangs_is_given_up(tmp_path: Path) -> None:
    machine = Machine(tmp_path, BARE, "#!/bin/sh\nexec sleep 30")
    made = machine.look()
    start = time.monotonic()
    assert not kmods.load(machine.fd, made, str(machine.program), deadline=0.2)
    assert time.monotonic() - start < 5
    assert made["warnings"][-1].endswith("did not end within 0.2 s")


def test_a_machine_that_must_not_load_modules(tmp_path: Path) -> None:
    machine = Machine(tmp_path, BARE)
    path = machine.host.path("/proc/sys/kernel/modprobe")
    path.write_text("\n")
    made = machine.look()
    assert not kmods.load(machine.fd, made)
    assert made["warnings"][-1] == "the module nvidia-uvm does not load: /proc/sys/kernel/modprobe is empty"


def test_another_root_is_no_machine(tmp_path: Path) -> None:
    """What is looked at below a folder is left as it is, and so is this machine."""
    machine = Machine(tmp_path, BARE)
    machine.host.path("/proc/sys/kernel/modprobe").write_text(str(machine.program))
    made = machine.look()
    assert "uvm" not in roles(made)
    assert machine.asked() == []
    assert not machine.host.path("/dev/nvidia-uvm").exists()


def test_who_may_load() -> None:
    assert kmods.may_load("/", settings.DEFAULTS)
    assert not kmods.may_load("/somewhere", settings.DEFAULTS)
    assert not kmods.may_load("/", settings.DEFAULTS | {"driver.load-kmods": False})


@needs_program("unshare")
@pytest.mark.parametrize("how", [["unshare", "--user", "--map-root-user"], ["setpriv", "--reuid=65534"]])
def test_who_may_not_load(how: list[str]) -> None:
    """The root of a user namespace, and a plain user."""
    program = "from cdi.host import kmods, settings; print(kmods.may_load('/', settings.DEFAULTS))"
    environment = os.environ | {"PYTHONPATH": str(TREE), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [*how, sys.executable, "-c", program], capture_output=True, text=True, check=False, env=environment, cwd="/"
    )
    assert done.stdout == "False\n", done.stderr
