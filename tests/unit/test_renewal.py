# SPDX-License-Identifier: Apache-2.0
"""A renewal of the inventory that is killed, stopped or left alone: the next start works, and nothing stays behind."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cdi.host import store
from ldcache import root
from tests.needs import needs_path, needs_root
from tests.simhost import Fault, Host, Nvml, SimulatedHost, build, gpus

TREE = Path(__file__).resolve().parents[2]
KILLPOINT = TREE / "tests/killpoint.py"
FREEZER = Path("/sys/fs/cgroup/freezer")
DEADLINE = 2.0
WAIT = 30.0
# What a busy machine may take for the rest; who waited for a stuck renewal would wait for all of WAIT.
SLACK = 10.0

# A start as far as the inventory goes: argv is the host's root, the interpreter of its child, seconds, whom to ask.
START = """
import sys, time
from cdi.host import store
from ldcache import root
from ldcache.errors import NvhookError
sys.executable = sys.argv[2]
began = time.monotonic()
try:
    where = root.open_root(sys.argv[1]), sys.argv[1]
    if sys.argv[4] == "nvml":
        options = store.Options(sys.argv[1], nvml="always", nvml_timeout=60)
        found = store.renew(*where, options=options, deadline=float(sys.argv[3]))
    else:
        found = store.inventory(*where, deadline=float(sys.argv[3]))
    print(len(found["gpus"]), "GPUs")
except NvhookError as error:
    print(error.what)
print(time.monotonic() - began)
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> SimulatedHost:
    return build(tmp_path_factory.mktemp("built") / "host", Host(gpus=gpus(2), graphics=False))


@pytest.fixture
def host(built: SimulatedHost) -> Iterator[SimulatedHost]:
    """A host that was not looked at yet."""
    shutil.rmtree(built.path("/run/nvhook"), ignore_errors=True)
    yield built
    shutil.rmtree(built.path("/run/nvhook"), ignore_errors=True)


Interpreter = Callable[[str], str]


@pytest.fixture
def interpreter(tmp_path: Path) -> Interpreter:
    """A function that makes an interpreter of a few lines of shell, which end in `exec` of the real one."""

    def make(script: str) -> str:
        path = tmp_path / "interpreter"
        path.write_text(f'#!/bin/sh\n{script}\nexec {sys.executable} "$@"\n')
        path.chmod(0o755)
        return str(path)

    return make


def start(
    host: SimulatedHost, python: str = sys.executable, deadline: float = WAIT, asked: str = "kernel"
) -> subprocess.Popen[str]:
    environment = {"PYTHONPATH": str(TREE), "PATH": os.environ["PATH"]}
    command = [sys.executable, "-c", START, str(host.root), python, str(deadline), asked]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def outcome(process: subprocess.Popen[str]) -> tuple[str, float]:
    """What a start said, and how long it took by its own clock."""
    said, seconds = process.communicate(timeout=60)[0].splitlines()
    return said, float(seconds)


def kept(host: SimulatedHost) -> list[str]:
    return sorted(os.listdir(host.path("/run/nvhook")))


def state_of(pid: int) -> str:
    """A process's state as proc(5) has it; Z where it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "Z"


def child_of(pid: int) -> int:
    """The child of a process, once it has one."""
    end = time.monotonic() + WAIT
    while time.monotonic() < end:
        for name in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError):
                if int(Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[1]) == pid:
                    return int(name)
        time.sleep(0.005)
    raise AssertionError("no child was started")


def until(condition: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + WAIT
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.005)


def calls_of(host: SimulatedHost, interpreter: Interpreter, tmp_path: Path) -> int:
    """How many calls into the kernel a renewal makes."""
    assert outcome(start(host, interpreter(killed_at(0, tmp_path))))[0] == "2 GPUs"
    return int((tmp_path / "calls").read_text())


def killed_at(place: int, tmp_path: Path) -> str:
    """An interpreter's script: without `-I -S -B`, which it gives itself."""
    return f'shift 3; set -- -I -S -B {KILLPOINT} {place} {tmp_path}/calls "$@"'


@pytest.mark.parametrize("points", [8, pytest.param(100, marks=pytest.mark.long)])
def test_killed_anywhere(host: SimulatedHost, interpreter: Interpreter, tmp_path: Path, points: int) -> None:
    """Evenly over all of it, and before each of its last calls: those that write and rename."""
    calls = calls_of(host, interpreter, tmp_path)
    assert calls > 500
    places = {1 + calls * number // points for number in range(points)} | set(range(calls - 10, calls + 1))
    left = set()
    for place in sorted(places):
        host.path("/run/nvhook/inventory.json").unlink(missing_ok=True)
        said, _ = outcome(start(host, interpreter(killed_at(place, tmp_path))))
        assert said == "renewing the inventory failed: the command was killed by signal 9", place
        left |= {name.rpartition(".")[0] for name in kept(host) if name.startswith(".")}
        assert outcome(start(host))[0] == "2 GPUs"
        assert kept(host) == ["inventory.json", "lock"], place
    # Some of them died with the new file half written: the test can fail.
    assert left == {".inventory.json"}


def test_stopped(host: SimulatedHost, interpreter: Interpreter) -> None:
    """It costs its start the deadline. Then it is killed, and nothing of it is left that the next start waits for."""
    process = start(host, interpreter("kill -STOP $$"), DEADLINE)
    child = child_of(process.pid)
    said, seconds = outcome(process)
    assert said == f"renewing the inventory took too long: its process {child} is given up"
    assert DEADLINE <= seconds < DEADLINE + SLACK
    until(lambda: state_of(child) == "Z", "the stopped process lives on")
    said, seconds = outcome(start(host))
    assert said == "2 GPUs" and seconds < SLACK
    assert kept(host) == ["inventory.json", "lock"]


def test_others_wait_no_longer_than_they_may(host: SimulatedHost, interpreter: Interpreter) -> None:
    """Who waits for a stopped renewal has a deadline of its own, and then says which process it waited for."""
    first = start(host, interpreter("kill -STOP $$"))
    child = child_of(first.pid)
    try:
        until(lambda: state_of(child) == "T", "it did not stop")
        others = [start(host, deadline=DEADLINE) for _ in range(3)]
        for other in others:
            said, seconds = outcome(other)
            assert said == f"another renewal of the inventory, by process {first.pid}, does not come to its end"
            assert DEADLINE <= seconds < DEADLINE + SLACK
        os.kill(child, signal.SIGCONT)
        assert outcome(first)[0] == "2 GPUs"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)


@pytest.fixture
def freezer() -> Iterator[Path]:
    """A cgroup of version 1 that can be frozen: no signal reaches who is in it, as if the driver hung."""
    folder = FREEZER / f"nvhook-test-{os.getpid()}"
    folder.mkdir()
    yield folder
    (folder / "freezer.state").write_text("THAWED")
    until(lambda: not (folder / "cgroup.procs").read_text(), "the frozen process lives on")
    folder.rmdir()


@needs_root
@needs_path(str(FREEZER))
def test_stuck_in_the_kernel(host: SimulatedHost, interpreter: Interpreter, freezer: Path) -> None:
    script = f"echo $$ > {freezer}/cgroup.procs; echo FROZEN > {freezer}/freezer.state"
    process = start(host, interpreter(script), DEADLINE)
    child = child_of(process.pid)
    said, seconds = outcome(process)
    assert said == f"renewing the inventory took too long: its process {child} is given up"
    assert seconds < DEADLINE + SLACK
    # Killed and still there, with all that it had open; yet neither the next start nor the one behind waits for it.
    assert state_of(child) == "D"
    for _ in range(2):
        host.path("/run/nvhook/inventory.json").unlink(missing_ok=True)
        said, seconds = outcome(start(host))
        assert said == "2 GPUs" and seconds < SLACK
    assert state_of(child) == "D"


def test_left_alone(host: SimulatedHost, interpreter: Interpreter) -> None:
    """The start that it works for is killed: it goes too, or it would renew beside the next one's child."""
    process = start(host, interpreter("kill -STOP $$"))
    child = child_of(process.pid)
    until(lambda: state_of(child) == "T", "it did not stop")
    process.kill()
    process.communicate()
    os.kill(child, signal.SIGCONT)
    until(lambda: state_of(child) == "Z", "it lives on")
    assert kept(host) == ["lock"]
    assert outcome(start(host))[0] == "2 GPUs"


def test_left_alone_with_nvml(host: SimulatedHost) -> None:
    """The same in the middle of its work: nobody is left who waits for NVML."""
    host.set_nvml(Nvml(faults=(Fault("nvmlInit", action="hang"),)))
    try:
        host.clear_nvml_calls()
        process = start(host, asked="nvml")
        until(lambda: host.nvml_calls() != (), "NVML was not asked")
        child, [asking] = child_of(process.pid), {call.pid for call in host.nvml_calls()}
        until(lambda: state_of(child) == "S" and state_of(asking) == "S", "they are not asleep")
        process.kill()
        process.communicate()
        until(lambda: state_of(child) == "Z" and state_of(asking) == "Z", "they live on")
    finally:
        host.set_nvml(Nvml())


def test_a_hundred_cold_starts_renew_once(host: SimulatedHost, interpreter: Interpreter, tmp_path: Path) -> None:
    """Each renewal is a child, and each child leaves a line."""
    python = interpreter(f"echo $$ >> {tmp_path}/children")
    running = [start(host, python) for _ in range(100)]
    assert [outcome(process)[0] for process in running] == ["2 GPUs"] * 100
    assert len((tmp_path / "children").read_text().splitlines()) == 1
    assert kept(host) == ["inventory.json", "lock"]


def test_what_a_killed_writer_left_is_swept(host: SimulatedHost) -> None:
    top = root.open_root(str(host.root))
    folder = store.make_folder(top, str(host.root))
    digits = "0123456789abcdef"
    others = [f".inventory.json.old.{digits}", f".nvml.json.{digits}", "inventory.json.mine"]
    for name in (f".inventory.json.{digits}", f".inventory.json.{digits[::-1]}", *others):
        host.path(f"/run/nvhook/{name}").write_text("half")
    store.write_own(folder, store.FILE, b"{}")
    os.close(folder)
    os.close(top)
    # Each file has its own lock and its own writer.
    assert kept(host) == sorted([*others, "inventory.json"])
